"""The largest micro batch that fits, by real steps on the longest rows: make probe, --per_device_train_batch_size auto.

The steps run in processes of their own, with the very recipe and flags of the run. There an out-of-memory costs nothing
but those processes; inside a run under ZeRO-3 the other ranks would wait for the failed one forever, which is why
transformers' auto_find_batch_size refuses that stage.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from . import args, devices, failure, memory, memory_report, world
from .errors import EXIT_CODES, UserError

MARGIN = 0.08  # of the device's memory stays free: fragmentation, and rows that differ a little from rank to rank
NOTHING_OUTSIDE = ("--push_to_hub", "false", "--report_to", "none")  # of a rehearsal reaches a hub or a tracker
JOB = "ZEROFIT_PROBE"  # environment variable: the file that tells a recipe's ranks to measure instead of to train


@dataclass
class Found:
    """What a search found: `size` is the micro batch; `tried`: {size: None (did not fit) or its record}."""

    size: int
    limit_bytes: int
    tried: dict[int, dict | None]


# --- the search, in the process that starts ranks ---


def main(argv: list[str]) -> None:
    """`zerofit probe`: see --help. Prints a line a size and the flags that use the answer.

    Raises: UserError for the user's mistakes, or when not even one row fits.
    """
    parser = argparse.ArgumentParser(prog="zerofit probe", allow_abbrev=False, description=__doc__)
    parser.add_argument("--recipe", default="sft", help="whose flags: sft or lora (default sft)")
    parser.add_argument("--gpus", default="1", help="processes")
    parser.add_argument("--args", default="", help="more recipe flags in one string, split like a shell would")
    given, flags = parser.parse_known_args(argv)
    flags, ranks = args.command_line(given.recipe, flags, given.args, given.gpus)
    if {"--help", "-h"} & set(flags):
        parser.print_help()
        return
    from . import launch, planner
    from . import resolve as resolver

    settings = resolver.settings(given.recipe, flags, ranks)
    planner.only_print(settings)
    launch.prepare(settings)
    found = search(settings, flags)
    accumulation = settings.effective_batch_size // (found.size * settings.world_size)
    print(
        f"\nlargest micro batch that fits: {found.size}\n  --per_device_train_batch_size {found.size} "
        f"--effective_batch_size {settings.effective_batch_size}  (gradient_accumulation_steps {accumulation})"
    )


def search(settings, flags: list[str]) -> Found:
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
    return Found(max(fitting), limit, dict(sorted(tried.items())))


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
        whole = devices.tightest(min(settings.world_size, torch.cuda.device_count()))[0].usable_bytes
    return int(whole * (1 - MARGIN))


def _run(settings, flags: list[str], ladder: list[int], limit: int) -> dict[int, dict]:
    """{size: record of the fullest rank} of the sizes that every rank has finished."""
    from . import launch

    ranks = settings.world_size
    with tempfile.TemporaryDirectory(prefix="zerofit-probe-") as temporary:
        folder = Path(temporary)
        job = folder / "job.json"
        job.write_text(json.dumps({"sizes": ladder, "limit_bytes": limit, "folder": str(folder)}))
        # Two micro batches a step: gradients that wait for the second one are part of the peak.
        words = [*drop(flags, *_OWN), "--gpus", str(ranks), "--output_dir", str(folder / "run"), "--probe", "false",
                 *NOTHING_OUTSIDE,
                 "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2",
                 "--effective_batch_size", str(2 * ranks), "--max_steps", "2"]  # fmt: skip
        recipe = args.ROOT / "recipes" / f"{settings.recipe}.py"
        command = launch.command("torchrun", ranks, world.free_port(), recipe, words)
        env = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES and not k.startswith("TORCHELASTIC_")}
        env |= launch.environment(ranks) | {JOB: str(job), failure.SUPERVISOR: str(os.getpid())}
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
        "--output_dir", "--gpus", "--probe", "--resume_from_checkpoint", "--lr_scaling")  # fmt: skip
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE",
                   "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "LOCAL_SIZE")  # fmt: skip


def drop(flags: list[str], *names: str) -> list[str]:
    """The command line without these flags and their values."""
    kept, skipping = [], False
    for word in flags:
        if word.startswith("--"):
            skipping = word.split("=")[0].replace("-", "_") in {n.replace("-", "_") for n in names}
        if not skipping:
            kept.append(word)
    return kept


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
            "--per_device_train_batch_size auto on several machines: search on one with `make probe`, then name the size."
        )
    folder = world.private_folder()
    if folder is None:
        raise UserError(
            f"{tempfile.gettempdir()}/zerofit-{os.getuid()}: is not a folder of this user alone, so the ranks cannot exchange "
            "the size in it; set TMPDIR to a folder of your own."
        )
    # The ranks of one launch share their parent process; each rank takes its own copy of the answer away.
    parent = psutil.Process(os.getppid())
    name = f"probe-{parent.pid}-{os.environ.get('MASTER_PORT', 0)}"
    answers = [folder / f"{name}-{rank}" for rank in range(settings.world_size)]
    if world.rank() == 0:
        try:
            found: int | str = search(settings, flags).size
        except UserError as error:
            found = str(error)
        for answer in answers:
            aside = answer.with_suffix(".tmp")
            aside.write_text(json.dumps(found))
            os.replace(aside, answer)
    answer = answers[world.rank()]
    while not answer.exists() or answer.stat().st_mtime < parent.create_time():  # of a launch that was killed
        time.sleep(0.2)
    found = json.loads(answer.read_text())
    answer.unlink()
    if isinstance(found, str):
        raise UserError(found)
    return with_size(settings, flags, found)


def with_size(settings, flags: list[str], size: int) -> list[str]:
    """The flags with the micro batch that was found; the effective batch stays, accumulation follows."""
    kept = drop(
        flags, "--per_device_train_batch_size", "--gradient_accumulation_steps", "--effective_batch_size", "--probe"
    )
    return [*kept, "--per_device_train_batch_size", str(size), "--effective_batch_size",
            str(settings.effective_batch_size), "--probe", "false"]  # fmt: skip


# --- the ranks ---


def asked() -> bool:
    """Whether this process is a rank of a probe."""
    return JOB in os.environ


def measure(trainer) -> None:
    """Instead of training: a real step with each size of the job, in order; ends the process.

    Called when model, optimizer and engine stand. Each rank writes a line for each size that fitted.
    """
    job = json.loads(Path(os.environ[JOB]).read_text())
    rank = trainer.args.process_index
    rows = longest_rows(trainer, max(job["sizes"]))
    cuda = trainer.args.device.type == "cuda"
    if cuda:
        whole = torch.cuda.get_device_properties(trainer.args.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["limit_bytes"] / whole))
        ledger = None
    else:
        ledger = memory.Ledger(trainer.model, trainer.optimizer, limit=job["limit_bytes"])
    code = 0
    try:
        for size in job["sizes"]:
            record = _step(trainer, rows[:size], ledger)
            with (Path(job["folder"]) / f"rank{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"size": size, **record}) + "\n")
    except RuntimeError as error:
        if not failure.gpu_is_full(error):
            raise
        (Path(job["folder"]) / "out-of-memory").touch()
        code = EXIT_CODES["out of memory"]
    sys.stdout.flush()
    if not code:
        world.barrier()
    os._exit(code)  # the other ranks may wait in a collective for ever; the launcher ends them


def longest_rows(trainer, count: int) -> list[dict]:
    """The `count` longest rows (or packs) of the training set, the longest first; short sets repeat theirs."""
    tokens, settings = trainer.tokens, trainer.settings
    if tokens.stream is not None:
        rows = list(tokens.dataset)
    else:
        sequences = tokens.sequences(settings)
        rows = sequences if not settings.packing else [sequences[i] for i in range(min(len(sequences), 4 * count))]
    found = longest(rows, count)
    return [found[i % len(found)] for i in range(count)]


def longest(rows, count: int) -> list[dict]:
    """At most `count` of the rows, the longest first."""
    lengths = [len(row["input_ids"]) for row in rows]
    return [rows[i] for i in sorted(range(len(lengths)), key=lambda i: -lengths[i])[:count]]


def _step(trainer, rows: list[dict], ledger) -> dict:
    """One optimizer step of two micro batches of these rows: {"peak_bytes", "seconds"}."""
    if ledger is None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    if ledger is None:
        micro_batches(trainer, rows, 2)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved()
    else:
        ledger.highest = 0
        with ledger:
            micro_batches(trainer, rows, 2)
        peak = ledger.highest
    return {"peak_bytes": peak, "seconds": time.perf_counter() - started}


def micro_batches(trainer, rows: list[dict], number: int) -> float:
    """One optimizer step of `number` micro batches, each of these rows: its loss."""
    accelerator, net = trainer.accelerator, trainer.model_wrapped
    count = number * sum(label != -100 for row in rows for label in row["labels"])
    count = torch.tensor(max(1, count), device=trainer.args.device)
    net.train()
    loss = torch.zeros((), device=trainer.args.device)
    for i in range(number):
        accelerator.gradient_state._set_sync_gradients(i == number - 1)
        loss += trainer.training_step(net, trainer.train_collator(rows), count)
    if not trainer.is_deepspeed_enabled:  # DeepSpeed's backward makes the step too
        if trainer.args.max_grad_norm:
            accelerator.clip_grad_norm_(net.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        net.zero_grad()
    return loss.item()
