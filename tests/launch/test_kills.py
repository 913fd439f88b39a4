"""SIGKILL of every process at random moments: each time the run goes on, and ends in the same weights."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, TINY, Run

from zerofit.checkpoint import integrity
from zerofit.checkpoint.facts import STAGING
from zerofit.job import run_folder

KILLS = int(os.environ.get("ZEROFIT_KILLS", 100))
FLAGS = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "64", "--effective_batch_size", "8", "--num_samples", "0",
    "--per_device_train_batch_size", "4", "--learning_rate", "1e-4", "--max_steps", str(8 * KILLS),
    "--logging_steps", "1", "--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "2",
    "--zero", "2", "--gpus", "2",
]  # fmt: skip


def started(folder, more=()) -> subprocess.Popen:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
             str(ROOT / "recipes" / "sft.py"), *FLAGS, *more, "--output_dir", str(folder),
             "--resume_from_checkpoint", "auto"]  # fmt: skip
    with Path(os.devnull).open("w") as nowhere, Path(f"{folder}.err").open("w") as errors:
        return subprocess.Popen(words, stdout=nowhere, stderr=errors, env=os.environ | {"OMP_NUM_THREADS": "1"})


def kill(process: subprocess.Popen) -> None:
    """The launcher and the ranks, in no time for any of them to do anything."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=60)
    process.wait()


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("more", [(), ("--save_in_background", "true")], ids=["", "background"])
def test_killed_at_random_moments(tmp_path, record_property, more):
    record_property("cases", KILLS)
    whole, killed, moments = tmp_path / "whole", tmp_path / "killed", random.Random(7)
    process = started(whole)
    assert process.wait(timeout=3600) == 0, (tmp_path / "whole.err").read_text()[-3000:]
    kills, made = [], 0
    while len(kills) < KILLS:
        before = max(run_folder.checkpoints(killed), default=0)
        process = started(killed, more)
        # From the first imports on; most while it trains and saves.
        deadline = time.monotonic() + 240
        if moments.random() < 0.2:
            deadline = time.monotonic() + moments.uniform(0.1, 8.0)
        while time.monotonic() < deadline and process.poll() is None:
            if max(run_folder.checkpoints(killed), default=0) > before:
                deadline = min(deadline, time.monotonic() + moments.uniform(0.0, 1.5))
            time.sleep(0.01)
        assert process.poll() is None, (tmp_path / "killed.err").read_text()[-3000:]
        aside = (killed / STAGING).exists()
        kill(process)
        newest = max(run_folder.checkpoints(killed), default=0)
        done = [json.loads(line)["step"] for line in _lines(killed)]
        kills.append({"at": done[-1] if done else 0, "checkpoint": newest, "while_saving": aside})
        made += max(0, (done[-1] if done else 0) - newest)
        if newest:  # whatever the moment was: the newest folder that has its name is good
            assert integrity.find_corruption(run_folder.checkpoints(killed)[newest]) == ""
        assert newest >= before
    process = started(killed, more)
    assert process.wait(timeout=3600) == 0, (tmp_path / "killed.err").read_text()[-3000:]
    saving = sum(kill["while_saving"] for kill in kills)
    print(f"{len(kills)} kills ({saving} while a checkpoint was written): {made} of {8 * KILLS} steps were made twice")
    assert saving > 0 or KILLS < 50
    assert [line["step"] for line in Run(killed).metrics] == list(range(1, 8 * KILLS + 1))
    assert Run(killed).losses == Run(whole).losses  # bit for bit
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (whole, killed)]
    assert weights[0] == weights[1]


def _lines(folder) -> list[str]:
    file = folder / "metrics.jsonl"
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []
