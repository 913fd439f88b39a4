"""Recipes under a plain torchrun: a signal to its agent saves on all ranks, and the next start goes on from there."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, TINY, Run

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.checkpoint import restart
from zerofit.config import resolve
from zerofit.job import program

pytestmark = pytest.mark.fault

SFT = program.start("recipes/sft.py").recipe
FLAGS = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "64", "--max_length", "64", "--effective_batch_size", "8",
    "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--max_steps", "60", "--logging_steps", "1",
    "--save_strategy", "steps", "--num_samples", "0", "--zero", "2", "--certificate", "false",
]  # fmt: skip


def torchrun(folder, *options, save_steps="1000", **env):
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *options,
        str(ROOT / "recipes" / "sft.py"), *FLAGS, "--save_steps", save_steps, "--output_dir", str(folder),
    ]  # fmt: skip
    return subprocess.Popen(words, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True)  # fmt: skip


def wait_for_step(job, folder, step, seconds=240):
    deadline, file = time.monotonic() + seconds, folder / "metrics.jsonl"
    while not file.exists() or len(file.read_text().splitlines()) < step:
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchrun") / "whole"
    job = torchrun(folder)
    said = job.communicate(timeout=300)[0]
    assert job.returncode == 0, said
    return Run(folder)


@pytest.mark.slow
def test_sigterm_to_the_agent_saves_and_the_next_start_goes_on(undisturbed, tmp_path):
    """torchrun's own exit code is 1; losses equal those of an undisturbed run, bit for bit."""
    folder = tmp_path / "run"
    job = torchrun(folder)
    wait_for_step(job, folder, 3)
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=120)[0]
    assert job.returncode == 1 and "is saved; continue with `make resume" in said, said
    (saved,) = folder.glob("checkpoint-*")
    steps = int(saved.name.rpartition("-")[2])
    assert 3 < steps < 60 and Run(folder).json("result.json") == {
        "status": "stopped", "error": Run(folder).json("result.json")["error"], "steps": steps,
    }  # fmt: skip
    refused = torchrun(folder)  # a new job, which does not say that it resumes
    assert "already holds a run" in refused.communicate(timeout=120)[0]
    again = torchrun(folder, **{distributed.BY_SLURM: "1"})
    said = again.communicate(timeout=300)[0]
    assert again.returncode == 0 and f"step {steps + 1}/60" in said and f"step {steps}/60" not in said, said
    assert Run(folder).losses == undisturbed.losses


@pytest.mark.slow
def test_a_killed_rank_is_started_again_by_the_agent(undisturbed, tmp_path):
    """The restart needs no flag; torch 2.13 needs the variable, else ranks find the addresses of the dead ones."""
    folder = tmp_path / "run"
    job = torchrun(folder, "--max_restarts", "1", save_steps="5", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    wait_for_step(job, folder, 8)
    ranks = [p for p in psutil.Process(job.pid).children() if p.environ().get("RANK") == "1"]
    ranks[0].send_signal(signal.SIGKILL)
    said = job.communicate(timeout=200)[0]
    assert job.returncode == 0 and "the job was restarted and continues in" in said, said
    assert "step 5/60" not in said.partition("continues in")[2] and Run(folder).losses == undisturbed.losses


@pytest.mark.slow
def test_out_of_memory_is_answered_by_the_restart_of_the_agent(undisturbed, tmp_path):
    """The rank that failed leaves the next setting; all read it, and the effective batch stays."""
    folder, struck = tmp_path / "run", tmp_path / "struck"
    fault = {"what": "oom", "where": "backward", "rank": 1, "step": 7, "marker": str(struck)}
    path = os.pathsep.join([str(ROOT / "tests" / "faults"), os.environ["PYTHONPATH"]])
    env = {"ZEROFIT_TEST_FAULT": json.dumps(fault), "PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    job = torchrun(folder, "--max_restarts", "1", save_steps="5", **env)
    said = job.communicate(timeout=300)[0]
    assert job.returncode == 0 and struck.exists(), said
    assert "  - micro batch 1 instead of 2: the run was out of GPU memory" in said
    after = said.partition("continues in")[2]
    assert "step 6/60" in after and "step 5/60" not in after
    arguments = Run(folder).json("run.json")["arguments"]
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size")
    assert [arguments[name]["value"] for name in names] == [1, 4, 8]
    assert Run(folder).losses == pytest.approx(undisturbed.losses, rel=1e-3)  # as between accumulation splits
    # another agent: its flags are not those of the failed one
    again = torchrun(folder, "--max_restarts", "1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert "already holds a run" in again.communicate(timeout=120)[0]


def resolved(folder, ranks=2):
    return resolve.resolve_settings("sft", [*FLAGS, "--output_dir", str(folder)], ranks)


@pytest.fixture
def by_agent(monkeypatch):
    monkeypatch.setenv(distributed.BY_AGENT, "x")
    monkeypatch.setattr(restart, "_agent", lambda: "this one")


@pytest.fixture
def started(by_agent, tmp_path, monkeypatch):
    """Return a function that returns the settings of one of `ranks` ranks that an agent has started."""

    def settings(ranks, *flags):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr(sys, "argv", ["sft.py", *FLAGS, *flags, "--output_dir", str(tmp_path)])
        return restart.resolve_settings(SFT)

    return settings


def test_only_the_agent_of_the_failed_start_goes_on_with_less(started, tmp_path, monkeypatch):
    less = {"per_device_train_batch_size": 1, "effective_batch_size": 8}
    left = {"started_by": ["that one", "this one"], "change": "micro batch 1 instead of 2", "decided": less}
    (tmp_path / "next.json").write_text(json.dumps(left))
    settings = started(2)
    assert (settings.per_device_train_batch_size, settings.gradient_accumulation_steps) == (1, 4)
    assert settings.decisions[-1].startswith("micro batch 1 instead of 2: the run was out of GPU memory")
    before = {"effective_batch_size": {"value": 8}, "per_device_train_batch_size": {"value": 2}}
    (tmp_path / "run.json").write_text(json.dumps({"world_size": 2, "arguments": before}))
    settings = started(4)  # and another node has joined
    assert (settings.per_device_train_batch_size, settings.gradient_accumulation_steps) == (1, 2)
    for wrong in ({"model": "evil"}, {"zero": "--model"}, {"output_dir": "/elsewhere"}):
        (tmp_path / "next.json").write_text(json.dumps(left | {"decided": wrong}))
        with pytest.raises(UserError, match=r"next.json: cannot set .*; remove the file"):
            started(2)
    (tmp_path / "next.json").write_text(json.dumps(left))
    monkeypatch.setattr(restart, "_agent", lambda: "another one")
    assert started(2).per_device_train_batch_size == 2  # another job in the same folder
    monkeypatch.setenv(distributed.RESTARTED, "1")
    assert started(2).per_device_train_batch_size == 1  # on a node that has joined since


def test_other_ranks_keep_the_runs_batch_unless_another_is_asked_for(started, tmp_path):
    before = {"effective_batch_size": {"value": 8}, "per_device_train_batch_size": {"value": 4}}
    (tmp_path / "run.json").write_text(json.dumps({"world_size": 2, "arguments": before}))
    settings = started(8, "--per_device_train_batch_size", "4")  # which 8 rows on 8 ranks do not hold
    assert (settings.per_device_train_batch_size, settings.effective_batch_size) == (1, 8)
    assert started(4, "--effective_batch_size", "16").effective_batch_size == 16
    with pytest.raises(UserError, match="--gpus 3: the run's effective batch of 8 is not a multiple of it"):
        started(3)


@pytest.mark.usefixtures("by_agent")
def test_nothing_is_left_for_a_restart_that_does_not_come(tmp_path, monkeypatch):
    for count, limit in (("1", "1"), ("0", "1")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", limit)
        assert bool(restart.record_smaller_settings(resolved(tmp_path), "")) == (count < limit)
        assert (tmp_path / "next.json").exists() == (count < limit)
    left = json.loads((tmp_path / "next.json").read_text())
    assert left["change"] == "micro batch 1 instead of 2" and left["decided"]["effective_batch_size"] == 8


def test_one_rank_of_a_request_is_enough_and_all_read_it_a_step_later(tmp_path):
    script = tmp_path / "votes.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "from zerofit.train.stop import Vote\n"
        "dist.init_process_group('gloo')\n"
        "vote = Vote()\n"
        "answers = [vote.passes(step == 2 and dist.get_rank() == 1) for step in range(5)]\n"
        "print(answers, flush=True)\n"
        "dist.barrier(); dist.destroy_process_group()\n"
    )
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    assert done.stdout.count(str([False, False, False, True, False])) == 2, done.stderr
