"""Find the largest micro batch that fits, with real steps on the longest rows.

The steps run in separate processes with the recipe and flags of the run, so that an out-of-memory error ends only
these processes. In a ZeRO-3 run, the other ranks would wait forever for the failed one (transformers'
auto_find_batch_size rejects ZeRO-3).
"""

import argparse
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from zerofit.base import command_line, distributed, hardware, rank_status
from zerofit.base.errors import UserError
from zerofit.config import resolve as resolving
from zerofit.config.resolve import resolve_settings
from zerofit.job import job, memory_figure, program
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.launch import postmortem, prepare
from zerofit.plan import preflight
from zerofit.train import trial

MARGIN = 0.08  # fraction of device memory to keep free for fragmentation and for differences between ranks


@dataclass
class SearchResult:
    """Result of a search. size: largest micro batch that fits; tried: {size: record, None if it did not fit}."""

    size: int
    tried: dict[int, dict | None]


# --- the search, in the process that starts ranks ---


def main(argv: list[str]) -> None:
    """`zerofit batch-size`: see --help. Print one line per size, and the flags for the result.

    Raises: UserError for user errors, or if a micro batch of 1 does not fit.
    """
    parser = argparse.ArgumentParser(prog="zerofit batch-size", allow_abbrev=False, description=__doc__)
    parser.add_argument(
        "--recipe", default=program.DEFAULT, help="sft, lora, dpo or the file of a recipe (default sft)"
    )
    parser.add_argument("--gpus", default="1", help="number of processes")
    parser.add_argument("--args", default="", help="more flags of the recipe in one string, split as in a shell")
    args, flags = parser.parse_known_args(argv)
    prepare.clear_launcher_variables()
    recipe = program.start(args.recipe).recipe
    flags, ranks = command_line.with_extra_flags(flags, args.args, args.gpus)
    if {"--help", "-h"} & set(flags):
        parser.print_help()
        return
    if recipe.stages:
        raise UserError(
            f"batch-size does not support --recipe {recipe}: trial steps need the full model on each rank; set "
            "--per_device_train_batch_size."
        )

    settings = resolve_settings(recipe, flags, ranks)
    preflight.only_print(settings)
    prepare.prepare(settings)
    result = search(settings)
    accumulation = settings.effective_batch_size // (result.size * settings.data_ranks)
    print(
        f"\nlargest micro batch that fits: {result.size}\n  --per_device_train_batch_size {result.size} "
        f"--effective_batch_size {settings.effective_batch_size}  (gradient_accumulation_steps {accumulation})"
    )


def search(settings) -> SearchResult:
    """Find the largest micro batch that fits: double until a size does not fit, then bisect.

    Only try sizes that divide the effective batch of a rank.

    Raises: UserError if a micro batch of 1 does not fit, or if the steps fail for another reason.
    """
    limit = limit_bytes(settings)
    per_rank = settings.effective_batch_size // settings.data_ranks
    sizes = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
    print(
        f"batch search: up to {per_rank} rows within {memory_figure.size(limit)} per rank ({MARGIN:.0%} kept free)",
        flush=True,
    )
    tried: dict[int, dict | None] = {}
    while ladder := next_sizes(sizes, tried):
        measured = _run(settings, ladder, limit)
        for size in ladder:
            record = measured.get(size)
            tried[size] = record
            if record is None:
                print(f"  {size:>4}  does not fit", flush=True)
                break
            print(
                f"  {size:>4}  peak {memory_figure.size(record['peak_bytes'])}, {record['seconds']:.2f} s per step",
                flush=True,
            )
    fitting = [size for size, record in tried.items() if record is not None]
    if not fitting:
        raise UserError(
            f"a micro batch of 1 does not fit into {memory_figure.size(limit)}: use a smaller --max_length, "
            "--gradient_checkpointing true, --zero 3, --offload optimizer, or recipes/lora.py."
        )
    return SearchResult(max(fitting), dict(sorted(tried.items())))


def next_sizes(sizes: list[int], tried: dict[int, dict | None]) -> list[int]:
    """Return the sizes to try next in ascending order, [] when the largest fitting size is known."""
    fits = max((s for s, record in tried.items() if record is not None), default=0)
    too_large = min((s for s, record in tried.items() if record is None), default=sizes[-1] + 1)
    between = [s for s in sizes if fits < s < too_large]
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
    """Return the bytes of device memory that a rank may use, minus the margin.

    Raises: UserError on a CPU without --memory_limit, since a run that fills host memory is killed without an error.
    """
    if settings.memory_limit:
        usable_bytes = settings.memory_limit * 2**30
    elif settings.use_cpu:
        raise UserError("the batch search needs a GPU or --memory_limit GiB.")
    else:
        usable_bytes = hardware.tightest(min(settings.world_size, torch.cuda.device_count()))[0].usable_bytes
    return int(usable_bytes * (1 - MARGIN))


def _run(settings, ladder: list[int], limit: int) -> dict[int, dict]:
    """Try the sizes of `ladder`; return {size: record of the highest peak} for the sizes that all ranks finished."""
    ranks = settings.world_size
    with tempfile.TemporaryDirectory(prefix="zerofit-batch-size-") as temporary:
        folder, recipe = Path(temporary), program.file_of(settings.recipe)
        trial_job = _trial(settings, folder)
        trials = {trial.BATCH_SEARCH: {"sizes": ladder, "limit_bytes": limit}}
        job.write(
            folder / job.FILE, job.Job(trial_job.request, trial_job, program.from_file(recipe).facts, trial=trials)
        )
        words = job.words(folder / job.FILE, trial_job.output_dir)
        command = prepare.command("torchrun", ranks, distributed.free_port(), recipe, words)
        supervised = {rank_status.FOLDER: temporary, rank_status.SUPERVISOR: str(os.getpid())}
        env = os.environ | prepare.environment(ranks) | supervised
        code = subprocess.run(command, env=env, capture_output=True).returncode
        last = postmortem.ending(code if code >= 0 else 128 - code, folder, [], None, 0, 0)
        if last.kind not in ("finished", "out of memory"):
            raise UserError(f"the steps of the batch search failed: {last.sentence}")
        measured = [trial.measured(folder, rank) for rank in range(ranks)]
    # All ranks try the sizes in the same order, so zip stops after the last size that all finished.
    return {
        records[0]["size"]: max(records, key=lambda record: record["peak_bytes"])
        for records in zip(*measured, strict=False)
    }


def _trial(settings, folder: Path) -> Settings:
    """Return the settings of the trial steps.

    Use two micro batches per step, since gradients accumulated from the first are part of the peak.
    """
    request = trial.request(settings.request).drop("lr_scaling").put(
        gpus=settings.world_size, output_dir=str(folder / "run"), search_batch_size=False,
        per_device_train_batch_size=1, gradient_accumulation_steps=2, effective_batch_size=2 * settings.data_ranks,
        max_steps=2,
    )  # fmt: skip
    trial_settings = resolving.resolve(request, settings.world_size)
    resolving.resolve_for_model(trial_settings)
    return trial_settings


def with_size(settings, size: int) -> Request:
    """Return the request with this micro batch and the same effective batch."""
    batch = {"per_device_train_batch_size": size, "effective_batch_size": settings.effective_batch_size}
    return settings.request.drop("gradient_accumulation_steps").put(**batch, search_batch_size=False)
