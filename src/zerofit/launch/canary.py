"""--canary: try two steps, an evaluation batch, a save and a reload before the run.

The canary uses the run's world size and separate processes, so that the run starts from a clean state.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from zerofit.base import rank_status
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.base.paths import nearest_existing, sibling
from zerofit.checkpoint import next_settings
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.launch import postmortem, supervisor
from zerofit.train import trial


def wanted(settings, planned: dict | None, steps: int | None) -> bool:
    """Return whether to run the canary. planned: from preflight.check; steps: number of steps, None if unknown."""
    if settings.canary != "auto":
        return settings.canary
    return bool(
        planned
        and planned["step_seconds"]
        and (steps is None or steps * planned["step_seconds"] > trial.LONG_RUN_SECONDS)
    )


# --- in the process that starts ranks ---


def run(job: supervisor.Supervised, planned: dict | None) -> Settings:
    """Run the canary; after an out-of-memory error, try smaller settings if --on_oom allows it.

    If GPUs cannot communicate, repeat it without direct copies, as for the run (supervisor.py).

    Returns: the settings of the successful attempt.
    Raises: SystemExit with the failed attempt's exit code after printing the cause; UserError if the disk is too small.
    """
    settings = job.settings
    folder = sibling(job.folder, ".canary", prefix=".")  # on the same disk as the checkpoints
    print("canary: two steps on the longest rows, an evaluation batch, a save and a reload", flush=True)
    while True:
        began = time.perf_counter()
        try:
            last, measured = _attempt(job, settings, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if last.kind == "finished" and measured:
            break
        if change := supervisor.without_copies_between_gpus(job, last, settings):
            print(f"canary: {last.sentence}; retrying: {change}", flush=True)
            continue
        smaller = None
        if last.kind == "out of memory" and settings.on_oom != "fail":
            smaller = next_settings.next_smaller_setting(settings, job.resolve, last.phase)
        if smaller is None:
            print(f"zerofit: the canary failed: {last.sentence}", file=sys.stderr)
            raise SystemExit(last.code or 1)
        print(f"canary: {last.sentence}; retrying with {smaller[0]}", flush=True)
        _, settings = smaller
    for line in sentences(measured, planned, time.perf_counter() - began):
        print(line, flush=True)
    _check_disk(measured, settings, job.folder)
    job.facts["canary"] = measured
    return settings


def _attempt(job: supervisor.Supervised, settings: Settings, folder: Path) -> tuple[postmortem.Outcome, dict | None]:
    with tempfile.TemporaryDirectory(prefix="zerofit-canary-") as temporary:
        records = Path(temporary)
        rehearsed = job.resolve(_canary_request(settings.request, folder), settings.world_size)
        command = job.start(rehearsed, records, {}, {trial.CANARY: True})
        env = os.environ | job.env | {rank_status.FOLDER: temporary}
        with (records / "canary.log").open("w") as log:
            code, received, hung = supervisor.watch(command, env, records, settings.hang_timeout, job.count, stdout=log)
        last = postmortem.ending(code, records, received, hung, settings.hang_timeout, 0)
        return last, next(iter(trial.measured(records, rank=0)), None)


def _canary_request(request: Request, folder: Path) -> Request:
    """Return the run's request with a temporary folder, and without resume, Hub and trackers."""
    return trial.request(request).put(resume_from_checkpoint="false", output_dir=str(folder))


def sentences(measured: dict, planned: dict | None, seconds: float) -> list[str]:
    """Return the canary's results as lines to print. seconds: wall time."""
    lines = [f"canary passed in {seconds:.0f} s"]
    peak = f"  peak {measured['peak_bytes'] / GIB:.2f} GiB per rank"
    if measured["device"] == "cpu":
        peak += " (resident)"
    elif planned:
        free = planned["limit_bytes"] - measured["peak_bytes"]
        peak += f" (plan: {planned['peak_bytes'] / GIB:.2f}); {free / GIB:.2f} GiB free"
    lines.append(peak)
    hours, rest = divmod(int(measured["step_seconds"] * measured["steps"]), 3600)
    lines.append(
        f"  {measured['tokens_per_second']:,.0f} tokens/s on the longest rows; {measured['steps']:,} steps take at "
        f"most {hours}:{rest // 60:02}:{rest % 60:02}, without evaluation and saving"
    )
    lines.append(
        f"  a checkpoint is {measured['checkpoint_bytes'] / 1e9:.3g} GB, saved in {measured['save_seconds']:.1f} s"
        + (f", reloaded in {measured['load_seconds']:.1f} s with the same loss" if measured["reloaded"] else "")
    )
    return lines


def _check_disk(measured: dict, settings, folder: Path) -> None:
    free = shutil.disk_usage(nearest_existing(folder)).free
    needed = measured["checkpoint_bytes"] * measured["checkpoints"] + measured["final_bytes"]
    if needed > free and not settings.ignore_plan:
        raise UserError(
            f"--output_dir {folder}: {measured['checkpoints']} checkpoints and final/ need {needed / 1e9:.3g} GB, but "
            f"the disk has {free / 1e9:.3g} free; set --save_total_limit or a folder on another disk, or start with "
            "--ignore_plan true."
        )
