"""Recipes in the workers of Ray Train (launchers/ray_train.py): losses of torchrun, a killed worker, SIGTERM."""

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from conftest import ROOT, Run
from test_torchrun import FLAGS, torchrun, wait_for_step

from zerofit.job import run_folder

pytest.importorskip("ray.train", reason="ray is not installed: pip install zerofit[ray]")
pytestmark = [pytest.mark.fault, pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run of two ranks under torchrun."""
    folder = tmp_path_factory.mktemp("torchrun") / "whole"
    said = torchrun(folder).communicate(timeout=300)[0]
    assert Run(folder).json("result.json")["status"] == "finished", said
    return Run(folder)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """`start()`: the same run in two workers of a Ray of its own; what is left of it is killed at the end."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path.parents[1]))  # Ray's sockets have short paths
    jobs = []

    def job(workers: int = 2):
        words = [str(workers), str(ROOT / "recipes" / "sft.py"), *FLAGS, "--use_cpu", "true"]
        words = [sys.executable, str(ROOT / "launchers" / "ray_train.py"), *words, "--output_dir", f"{tmp_path}/run"]
        jobs.append(
            subprocess.Popen([*words, "--save_steps", "5"], cwd=ROOT, env=os.environ, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)
        )  # fmt: skip
        return jobs[-1]

    yield job
    for job in jobs:
        for process in [*(psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []), job]:
            process.kill()


def ranks(folder) -> list[psutil.Process]:
    """The workers that train into a folder, by rank: each writes its own log."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if "RayTrainWorker" in " ".join(process.info["cmdline"] or []):
            for file in process.open_files():
                if file.path.startswith(f"{folder}/logs/rank"):
                    found[file.path] = process
    return [found[name] for name in sorted(found)]


def resumed_from(output: str) -> int:
    """Return the step at which the job in this output went on, the only one."""
    (step,) = {*re.findall("resumed from checkpoint-([0-9]+)\n", output)}
    return int(step)


def test_the_losses_are_those_of_torchrun(start, undisturbed, tmp_path):
    job = start()
    said = job.communicate(timeout=400)[0]
    assert job.returncode == 0, said
    assert Run(tmp_path / "run").json("result.json")["world_size"] == 2
    assert Run(tmp_path / "run").losses == undisturbed.losses  # bit for bit
    for text in (said, (tmp_path / "run" / "logs" / "rank0.log").read_text()):
        assert len(re.findall("step 60/60  loss ", text)) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_ended_is_started_again(start, undisturbed, tmp_path, number):
    """SIGKILL: from the last checkpoint. SIGTERM: all ranks save after the same step first."""
    job, run = start(), tmp_path / "run"
    wait_for_step(job, run, 8)
    ranks(run)[1].send_signal(number)
    said = job.communicate(timeout=400)[0]
    assert job.returncode == 0, said
    step = resumed_from(said)
    before = said.partition("resumed from checkpoint-")[0]
    assert step % 5 == 0 if number == signal.SIGKILL else f"stopped after step {step}, checkpoint-{step}" in before
    assert Run(run).losses == undisturbed.losses and Run(run).json("result.json")["status"] == "finished"


def test_the_same_line_goes_on_with_fewer_workers(start, undisturbed, tmp_path):
    job, run = start(), tmp_path / "run"
    wait_for_step(job, run, 8)
    workers = ranks(run)
    job.kill()  # the driver, and with it Ray; until that ends the workers, they may save once more
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    newest = max(run_folder.checkpoints(run))
    said = start(workers=1).communicate(timeout=400)[0]
    assert resumed_from(said) == newest, said
    assert Run(run).json("result.json")["world_size"] == 1
    assert Run(run).losses == pytest.approx(undisturbed.losses, rel=1e-5)
