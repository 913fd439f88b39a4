"""Find the largest micro batch that fits, by real steps on the longest rows.

The steps run in separate processes, with the recipe and flags of the run. An out-of-memory error ends only those
processes; inside a ZeRO-3 run the other ranks would wait for the failed one forever, which is why transformers'
auto_find_batch_size rejects that stage.
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

MARGIN = 0.08  # fraction of device memory kept free: fragmentation, and rows that differ a little between ranks


@dataclass
class SearchResult:
    """The result of a search. size: the largest that fits; tried: {size: its record, None if it did not fit}."""

    size: int
    tried: dict[int, dict | None]


# --- the search, in the process that starts ranks ---


def main(argv: list[str]) -> None:
    """`zerofit batch-size`: see --help. Prints one line per size, and the flags that select the result.

    Raises: UserError for the user's mistakes, or if not even one row fits.
    """
    parser = argparse.ArgumentParser(prog="zerofit batch-size", allow_abbrev=False, description=__doc__)
    parser.add_argument("--recipe", default=program.DEFAULT, help="sft, lora, dpo or a recipe's file (default sft)")
    parser.add_argument("--gpus", default="1", help="processes")
    parser.add_argument("--args", default="", help="more recipe flags in one string, split like a shell would")
    args, flags = parser.parse_known_args(argv)
    prepare.without_a_launchers_variables()
    recipe = program.start(args.recipe).recipe
    flags, ranks = command_line.with_more(flags, args.args, args.gpus)
    if {"--help", "-h"} & set(flags):
        parser.print_help()
        return
    if recipe.stages:
        raise UserError(
            f"batch-size --recipe {recipe}: its trial steps need the whole model on a rank; name a micro batch with "
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
    """Find the largest micro batch that fits: double until one does not fit, then bisect.

    Only sizes that divide the effective batch of a rank are tried.

    Args: settings: the run's, with its effective batch and number of ranks.
    Raises: UserError if not even a micro batch of 1 fits, or if the steps fail for another reason.
    """
    limit = limit_bytes(settings)
    per_rank = settings.effective_batch_size // settings.data_ranks
    sizes = [n for n in range(1, per_rank + 1) if per_rank % n == 0]
    print(
        f"batch search: up to {per_rank} rows within {memory_figure.size(limit)} a rank ({MARGIN:.0%} left free)",
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
                f"  {size:>4}  peak {memory_figure.size(record['peak_bytes'])}, {record['seconds']:.2f} s a step",
                flush=True,
            )
    fitting = [size for size, record in tried.items() if record is not None]
    if not fitting:
        raise UserError(
            f"not even a micro batch of 1 fits into {memory_figure.size(limit)}: use a smaller --max_length, "
            "--gradient_checkpointing true, --zero 3, --offload optimizer, or recipes/lora.py."
        )
    return SearchResult(max(fitting), dict(sorted(tried.items())))


def next_sizes(sizes: list[int], tried: dict[int, dict | None]) -> list[int]:
    """Return the sizes to try next, ascending; [] once the largest fitting size is known."""
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
    """Return the bytes of device memory that a rank may use, less the margin.

    Raises: UserError on a CPU without --memory_limit: a run that fills host memory is killed without an error.
    """
    if settings.memory_limit:
        usable_bytes = settings.memory_limit * 2**30
    elif settings.use_cpu:
        raise UserError("a batch search needs a GPU, or --memory_limit GiB to search within.")
    else:
        usable_bytes = hardware.tightest(min(settings.world_size, torch.cuda.device_count()))[0].usable_bytes
    return int(usable_bytes * (1 - MARGIN))


def _run(settings, ladder: list[int], limit: int) -> dict[int, dict]:
    """Try the sizes of `ladder`; return {size: record of the rank with the highest peak}.

    Sizes that some rank did not finish are left out.
    """
    ranks = settings.world_size
    with tempfile.TemporaryDirectory(prefix="zerofit-probe-") as temporary:
        folder, recipe = Path(temporary), program.file_of(settings.recipe)
        trial_job = _trial(settings, folder)
        trials = {trial.BATCH_SEARCH: {"sizes": ladder, "limit_bytes": limit}}
        job.write(folder / job.FILE, job.Job(trial_job.request, trial_job, program.of(recipe).facts, trial=trials))
        words = job.words(folder / job.FILE, trial_job.output_dir)
        command = prepare.command("torchrun", ranks, distributed.free_port(), recipe, words)
        of_supervisor = {rank_status.FOLDER: temporary, rank_status.SUPERVISOR: str(os.getpid())}
        env = os.environ | prepare.environment(ranks) | of_supervisor
        code = subprocess.run(command, env=env, capture_output=True).returncode
        last = postmortem.ending(code if code >= 0 else 128 - code, folder, [], None, 0, 0)
        if last.kind not in ("finished", "out of memory"):
            raise UserError(f"the steps of the batch search failed: {last.sentence}")
        measured = [trial.measured(folder, rank) for rank in range(ranks)]
    # The ranks try the sizes in the same order, so the rank that has finished the fewest says which all have finished.
    return {
        of_ranks[0]["size"]: max(of_ranks, key=lambda record: record["peak_bytes"])
        for of_ranks in zip(*measured, strict=False)
    }


def _trial(settings, folder: Path) -> Settings:
    """Return the settings of the trial steps.

    Two micro batches per step: the gradients accumulated from the first one are part of the peak.
    """
    asked = trial.request(settings.request).drop("lr_scaling").put(
        gpus=settings.world_size, output_dir=str(folder / "run"), search_batch_size=False,
        per_device_train_batch_size=1, gradient_accumulation_steps=2, effective_batch_size=2 * settings.data_ranks,
        max_steps=2,
    )  # fmt: skip
    tried = resolving.resolve(asked, settings.world_size)
    resolving.resolve_for_model(tried)
    return tried


def with_size(settings, size: int) -> Request:
    """Return the request with this micro batch; the effective batch stays, accumulation follows from both."""
    batch = {"per_device_train_batch_size": size, "effective_batch_size": settings.effective_batch_size}
    return settings.request.drop("gradient_accumulation_steps").put(**batch, search_batch_size=False)
