"""Measure what `zerofit launch` costs a job that succeeds.

    python benchmarks/supervision.py          # about 4 minutes on 2 cores

Three figures, each the median of interleaved rounds: seconds that watching a process adds to starting it and to its
end; seconds that the launcher's checks (packages, model, data, folder) take before the job starts, as the difference of
a two-step run with and without the launcher; microseconds that a rank's heartbeat and NaN guard take at a step. Writes
benchmarks/results/supervision.{json,md}.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from types import SimpleNamespace

from machine import ROOT, describe, facts, save, versions

ROUNDS = 5
RUN = ["--max_steps", "2", "--num_samples", "0", "--save_strategy", "no", "--eval_strategy", "no", "--data",
       str(ROOT / "examples" / "tiny" / "train.jsonl")]  # fmt: skip


def seconds(action) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def watching() -> float:
    """Return the median seconds that supervisor.watch takes beyond subprocess.run for the same process."""
    from zerofit.launch import supervisor

    words, extra = [sys.executable, "-c", "pass"], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as records:
            watched = seconds(lambda: supervisor.watch(words, dict(os.environ), Path(records), 0, 1))
        extra.append(watched - seconds(lambda: subprocess.run(words)))
    return statistics.median(extra)


def checks() -> float:
    """Return the median seconds between a recipe started by the launcher and by python."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with tempfile.TemporaryDirectory() as folder:

        def run(words, name):
            done = subprocess.run([sys.executable, *words, *RUN, "--output_dir", f"{folder}/{name}"], env=env,
                                  capture_output=True, text=True, cwd=ROOT)  # fmt: skip
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])

        extra = []
        for i in range(ROUNDS):
            launched = seconds(lambda: run(["-m", "zerofit", "launch", "recipes/sft.py"], f"launched{i}"))  # noqa: B023
            extra.append(launched - seconds(lambda: run(["recipes/sft.py"], f"plain{i}")))  # noqa: B023
        return statistics.median(extra)


def at_a_step() -> dict[str, float]:
    """Return the microseconds of a rank's heartbeat, and of the guard around an applied step of two micro batches."""
    import torch
    from accelerate import Accelerator

    from zerofit.base import rank_status
    from zerofit.train import nan_guard

    with tempfile.TemporaryDirectory() as records:
        os.environ[rank_status.FOLDER] = records
        heartbeat = rank_status.Heartbeat()
        del os.environ[rank_status.FOLDER]
        beat = min(timeit.repeat(lambda: heartbeat.beat(7), number=10_000, repeat=ROUNDS)) / 10_000
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True))
    trainer = SimpleNamespace(
        settings=None, model=None, _tr_loss=torch.zeros(()), is_deepspeed_enabled=False,
        accelerator=accelerator, optimizer=optimizer,
    )  # fmt: skip
    guard, loss = nan_guard.NanGuard(trainer), torch.ones(())
    guard.grad_norm = torch.ones(())

    def step():
        guard.begin([], None)
        guard.losses += [loss, loss]
        guard.hold_back()
        guard.look_back()
        guard.after_step()

    return {"heartbeat": beat * 1e6, "guard": min(timeit.repeat(step, number=10_000, repeat=ROUNDS)) / 10_000 * 1e6}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    machine = facts()
    found = {"watching_seconds": watching(), "checks_seconds": checks(), "step_microseconds": at_a_step()}
    lines = [
        "# What supervision costs", "", *describe(machine, {"zerofit": versions()}), "",
        "| what | cost |", "|---|---|",
        f"| watching a process, start and end together | {found['watching_seconds']:.2f} s |",
        f"| the launcher's checks before the job, imports and all | {found['checks_seconds']:.1f} s |",
        f"| a rank's heartbeat at a step | {found['step_microseconds']['heartbeat']:.1f} us |",
        f"| a rank's NaN guard at a step | {found['step_microseconds']['guard']:.1f} us |",
    ]  # fmt: skip
    print(json.dumps(found))
    save("supervision", lines, {"machine": machine, **found})


if __name__ == "__main__":
    main()
