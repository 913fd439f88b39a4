"""Find the largest micro batch that fits, by real steps on the longest rows.

The steps run in processes of their own, with the very recipe and flags of the run. There an out-of-memory costs nothing
but those processes; inside a run under ZeRO-3 the other ranks would wait for the failed one forever, which is why
transformers' auto_find_batch_size refuses that stage.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from zerofit import command_line, distributed, hardware, rank_status
from zerofit.config import parse
from zerofit.errors import UserError
from zerofit.paths import ROOT, private_folder
from zerofit.train import memory_report, trial

MARGIN = 0.08  # of the device's memory stays free: fragmentation, and rows that differ a little from rank to rank


@dataclass
class SearchResult:
    """What a search found: `size` is the micro batch; `tried`: {size: None (did not fit) or its record}."""

    size: int
    limit_bytes: int
    tried: dict[int, dict | None]


# --- the search, in the process that starts ranks ---


def main(argv: list[str]) -> None:
    """`zerofit batch-size`: see --help. Prints a line a size and the flags that use the answer.

    Raises: UserError for the user's mistakes, or when not even one row fits.
    """
    parser = argparse.ArgumentParser(prog="zerofit batch-size", allow_abbrev=False, description=__doc__)
    parser.add_argument("--recipe", default="sft", help="whose flags: sft or lora (default sft)")
    parser.add_argument("--gpus", default="1", help="processes")
    parser.add_argument("--args", default="", help="more recipe flags in one string, split like a shell would")
    given, flags = parser.parse_known_args(argv)
    flags, ranks = parse.command_line(given.recipe, flags, given.args, given.gpus)
    if {"--help", "-h"} & set(flags):
        parser.print_help()
        return
    from zerofit.config.resolve import resolve_settings
    from zerofit.launch import prepare
    from zerofit.plan import preflight

    settings = resolve_settings(given.recipe, flags, ranks)
    preflight.only_print(settings)
    prepare.prepare(settings)
    found = search(settings, flags)
    accumulation = settings.effective_batch_size // (found.size * settings.world_size)
    print(
        f"\nlargest micro batch that fits: {found.size}\n  --per_device_train_batch_size {found.size} "
        f"--effective_batch_size {settings.effective_batch_size}  (gradient_accumulation_steps {accumulation})"
    )


def search(settings, flags: list[str]) -> SearchResult:
    """Try micro batches that divide the effective batch: doubling until one does not fit, then between the last two.

    Args: settings: the run's, with its effective batch and number of ranks; flags: the recipe's command line.
    Raises: UserError when not even a micro batch of 1 fits, or when the steps fail for another reason.
    """
    limit = limit_bytes(settings)
    per_rank = settings.effective_batch_size // settings.world_size
    sizes = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
    print(
        f"probe: micro batches up to {per_rank} within {memory_report.size(limit)} a rank ({MARGIN:.0%} left free)",
        flush=True,
    )
    tried: dict[int, dict | None] = {}
    while ladder := next_sizes(sizes, tried):
        measured = _run(settings, flags, ladder, limit)
        for size in ladder:
            record = measured.get(size)
            tried[size] = record
            if record is None:
                print(f"  {size:>4}  does not fit", flush=True)
                break
            print(
                f"  {size:>4}  peak {memory_report.size(record['peak_bytes'])}, {record['seconds']:.2f} s a step",
                flush=True,
            )
    fitting = [size for size, record in tried.items() if record is not None]
    if not fitting:
        raise UserError(
            f"not even a micro batch of 1 fits into {memory_report.size(limit)}: use a smaller --max_length, "
            "--gradient_checkpointing true, --zero 3, --offload optimizer, or recipes/lora.py."
        )
    return SearchResult(max(fitting), limit, dict(sorted(tried.items())))


def next_sizes(sizes: list[int], tried: dict[int, dict | None]) -> list[int]:
    """What to try next, in ascending order; [] when the largest fitting size is known."""
    good = max((s for s, record in tried.items() if record is not None), default=0)
    bad = min((s for s, record in tried.items() if record is None), default=sizes[-1] + 1)
    between = [s for s in sizes if good < s < bad]
    if not between:
        return []
    if tried:
        return [between[len(between) // 2]]
    ladder = [sizes[0]]
    for size in sizes[1:]:
        if size >= 2 * ladder[-1]:
            ladder.append(size)
    return ladder


def limit_bytes(settings) -> int:
    """Device memory that a rank may use, the margin taken off.

    Raises: UserError on a CPU without --memory_limit: host memory has no edge that a run could safely touch.
    """
    if settings.memory_limit:
        whole = settings.memory_limit * 2**30
    elif settings.use_cpu:
        raise UserError("a probe needs a GPU, or --memory_limit GiB to search within.")
    else:
        whole = hardware.tightest(min(settings.world_size, torch.cuda.device_count()))[0].usable_bytes
    return int(whole * (1 - MARGIN))


def _run(settings, flags: list[str], ladder: list[int], limit: int) -> dict[int, dict]:
    """{size: record of the fullest rank} of the sizes that every rank has finished."""
    from zerofit.launch import prepare

    ranks = settings.world_size
    with tempfile.TemporaryDirectory(prefix="zerofit-probe-") as temporary:
        folder = Path(temporary)
        job = folder / "job.json"
        job.write_text(json.dumps({"sizes": ladder, "limit_bytes": limit, "folder": str(folder)}))
        # Two micro batches a step: gradients that wait for the second one are part of the peak.
        words = [*command_line.drop(flags, *_OWN), "--gpus", str(ranks), "--output_dir", str(folder / "run"), "--search_batch_size", "false",
                 *trial.NOTHING_OUTSIDE,
                 "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2",
                 "--effective_batch_size", str(2 * ranks), "--max_steps", "2"]  # fmt: skip
        recipe = ROOT / "recipes" / f"{settings.recipe}.py"
        command = prepare.command("torchrun", ranks, distributed.free_port(), recipe, words)
        env = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES and not k.startswith("TORCHELASTIC_")}
        env |= prepare.environment(ranks) | {trial.BATCH_SEARCH_JOB: str(job), rank_status.SUPERVISOR: str(os.getpid())}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        records = [_records(folder / f"rank{rank}.jsonl") for rank in range(ranks)]
        sizes = set.intersection(*(set(r) for r in records))
        failed = (folder / "out-of-memory").exists()
        if not failed and len(sizes) < len(ladder):
            lines = done.stderr.strip().splitlines() or ["no message"]
            said = next((line for line in lines if line.startswith("zerofit: error: ")), lines[-1])
            raise UserError(f"the probe's steps failed: {said.removeprefix('zerofit: error: ')}")
        return {size: max((r[size] for r in records), key=lambda record: record["peak_bytes"]) for size in sizes}


# Flags that a probe sets itself, and what a launcher says about the ranks of the job around it.
_OWN = ("--per_device_train_batch_size", "--gradient_accumulation_steps", "--effective_batch_size", "--max_steps",
        "--output_dir", "--gpus", "--search_batch_size", "--resume_from_checkpoint", "--lr_scaling")  # fmt: skip

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE",
                   "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE")  # fmt: skip


def _records(file: Path) -> dict[int, dict]:
    if not file.exists():
        return {}
    found = (json.loads(line) for line in file.read_text().splitlines())
    return {record["size"]: record for record in found}


# --- a run that asks for it ---


def resolve(settings, flags: list[str]) -> list[str]:
    """The recipe's flags with the micro batch found. Rank 0 searches, the other ranks of the machine wait for it.

    Raises: UserError on several machines.
    """
    if settings.world_size > 1 and int(os.environ.get("LOCAL_WORLD_SIZE", settings.world_size)) != settings.world_size:
        raise UserError(
            "--per_device_train_batch_size auto on several machines: search on one with `make batch-size`, then name the size."
        )
    folder = private_folder()
    if folder is None:
        raise UserError(
            f"{tempfile.gettempdir()}/zerofit-{os.getuid()}: is not a folder of this user alone, so the ranks cannot exchange "
            "the size in it; set TMPDIR to a folder of your own."
        )
    # The ranks of one launch share their parent process; each rank takes its own copy of the answer away.
    parent = psutil.Process(os.getppid())
    name = f"probe-{parent.pid}-{os.environ.get('MASTER_PORT', 0)}"
    answers = [folder / f"{name}-{rank}" for rank in range(settings.world_size)]
    if distributed.rank() == 0:
        try:
            found: int | str = search(settings, flags).size
        except UserError as error:
            found = str(error)
        for answer in answers:
            aside = answer.with_suffix(".tmp")
            aside.write_text(json.dumps(found))
            os.replace(aside, answer)
    answer = answers[distributed.rank()]
    while not answer.exists() or answer.stat().st_mtime < parent.create_time():  # of a launch that was killed
        time.sleep(0.2)
    found = json.loads(answer.read_text())
    answer.unlink()
    if isinstance(found, str):
        raise UserError(found)
    return with_size(settings, flags, found)


def with_size(settings, flags: list[str], size: int) -> list[str]:
    """The flags with the micro batch that was found; the effective batch stays, accumulation follows."""
    kept = command_line.drop(
        flags,
        "--per_device_train_batch_size",
        "--gradient_accumulation_steps",
        "--effective_batch_size",
        "--search_batch_size",
    )
    return [*kept, "--per_device_train_batch_size", str(size), "--effective_batch_size",
            str(settings.effective_batch_size), "--search_batch_size", "false"]  # fmt: skip
