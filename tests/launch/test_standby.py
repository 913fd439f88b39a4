"""Ranks as forks of the launcher: they are what torchrun's are, end with it, and are not tried where that is unsafe."""

import fnmatch
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from zerofit.base import rank_status
from zerofit.job import run_lock
from zerofit.launch import forked_ranks, prepare, standby, supervisor

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "EXTRA")
where, then = Path(sys.argv[1]), json.loads(sys.argv[2])
rank = os.environ.get("RANK", "0")
facts = {name: os.environ.get(name) for name in names} | {
    "argv": sys.argv[1:], "session": os.getsid(0) == os.getpid(), "name": __name__, "pid": os.getpid(),
    "ignores": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "forked": "zerofit.launch.standby" in sys.modules,
}
(where / f"new{rank}.json").write_text(json.dumps(facts))
(where / f"new{rank}.json").rename(where / f"facts{rank}.json")  # never read half-written
print("said by a rank")
exec(then[int(rank)])
"""
# The part of a launcher that starts the ranks of SCRIPT.
LAUNCHER = """
import os, sys
from pathlib import Path
from zerofit.launch import standby
standby.OF_BOTH = standby.OF_RANKS = ()
standby.prefork()
assert len(standby._waiting) == int(sys.argv[2])
where, command = Path(sys.argv[1]), sys.argv[3:]
env = os.environ | {"ZEROFIT_ATTEMPT": str(where), "ZEROFIT_SUPERVISOR": str(os.getpid()), "EXTRA": "given"}
env.pop("OMP_NUM_THREADS", None)
with (where / "log").open("w") as log:
    code = standby.popen(command, env, log).wait()
raise SystemExit(code if code >= 0 else 128 - code)
"""


def launched(folder: Path, then: list[str], forks: bool = True, **env) -> subprocess.Popen:
    """Start LAUNCHER; then: code of each rank of the script."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = prepare.command("torchrun", len(then), 29_999, script, [str(folder), json.dumps(then)])
    words = [sys.executable, "-c", LAUNCHER, str(folder), str(int(forks)), *command]
    return subprocess.Popen(words, env=os.environ | env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def facts(folder: Path, rank: int) -> dict:
    return json.loads((folder / f"facts{rank}.json").read_text())


def wait_for(true, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.fault
def test_ranks_are_what_torchrun_makes_them(tmp_path):
    """The first failure ends the others, and is the job's."""
    job = launched(tmp_path, ["time.sleep(600)", "sys.exit(7)", "time.sleep(600)"])
    assert job.wait(timeout=60) == 7, job.stderr.read()
    for rank in range(3):
        found = facts(tmp_path, rank)
        assert found["argv"][0] == str(tmp_path) and found["name"] == "__main__" and found["forked"]
        assert found["session"] and found["ignores"] and found["EXTRA"] == "given"
        assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(rank), str(rank), "3")
        assert (found["LOCAL_WORLD_SIZE"], found["GROUP_RANK"]) == ("3", "0")
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "29999")
        assert not psutil.pid_exists(found["pid"])
    ended_with = -rank_status.ENDS_RANKS
    assert json.loads((tmp_path / "exits.json").read_text()) == {"1": 7, "0": ended_with, "2": ended_with}
    assert (tmp_path / "log").read_text().count("said by a rank") == 3


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("who", ["launcher", "parent of the ranks"])
def test_ranks_end_with_what_started_them(tmp_path, who):
    job = launched(tmp_path, ["time.sleep(600)"] * 2)
    try:
        wait_for(lambda: all((tmp_path / f"facts{rank}.json").exists() for rank in range(2)))
        ranks = [psutil.Process(facts(tmp_path, rank)["pid"]) for rank in range(2)]
        (parent,) = {rank.ppid() for rank in ranks}
        os.kill(job.pid if who == "launcher" else parent, signal.SIGKILL)
        assert not psutil.wait_procs(ranks, timeout=60)[1]
        assert job.wait(timeout=60) == (-signal.SIGKILL if who == "launcher" else 128 + signal.SIGKILL)
    finally:
        job.kill()


@pytest.mark.fault
def test_what_a_fork_leaves_behind_is_ended(tmp_path, monkeypatch):
    """A process in a session of its own is found by the file that it has inherited."""
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    if (left := os.fork()) == 0:
        try:
            os.setsid()
            rank_status.mark()
            time.sleep(600)
        finally:
            os._exit(0)
    wait_for((tmp_path / rank_status.FORKS).exists)
    monkeypatch.delenv(rank_status.FOLDER)
    supervisor._end_ranks(tmp_path)  # and not this process
    assert not psutil.pid_exists(left)


def test_where_a_fork_is_unsafe_the_ranks_are_fresh_processes(tmp_path, monkeypatch):
    job = launched(tmp_path, ["sys.exit(3)"], forks=False, ZEROFIT_FORK="0")
    assert job.wait(timeout=60) == 3, job.stderr.read()
    assert not facts(tmp_path, 0)["forked"] and facts(tmp_path, 0)["EXTRA"] == "given"
    assert not standby._driver_is_loaded()
    driver = tmp_path / "libcuda.so.1"
    driver.write_bytes(b"\0" * 4096)
    with driver.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert standby._driver_is_loaded()
        standby.prefork()
        assert not standby._waiting


def test_libraries_that_have_seen_other_gpus_are_imported_anew(monkeypatch):
    monkeypatch.setattr(standby.Path, "iterdir", lambda self: iter(["this thread"]))
    same = dict(os.environ)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert standby._may_become_ranks(same) and standby._may_become_ranks(same | {"CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert standby._may_become_ranks(same) and not standby._may_become_ranks(same | {"CUDA_VISIBLE_DEVICES": "1"})


def test_ranks_on_gpus_are_forks_on_request_only(monkeypatch):
    monkeypatch.setattr(standby.Path, "iterdir", lambda self: iter(["this thread"]))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not standby._may_become_ranks(dict(os.environ))
    assert standby._may_become_ranks(os.environ | {"ZEROFIT_FORK": "1"})


@pytest.mark.parametrize("device", ["nvidia0", "dxg"])
@pytest.mark.parametrize(("variables", "started"), [
    ({}, 0), ({"CUDA_VISIBLE_DEVICES": "1"}, 0), ({"CUDA_VISIBLE_DEVICES": ""}, 1), ({"CUDA_VISIBLE_DEVICES": "-1"}, 1),
    ({"ZEROFIT_FORK": "1"}, 1),
])  # fmt: skip
def test_no_process_waits_where_ranks_may_use_a_gpu(variables, started, device, monkeypatch):
    """It would import everything beside the launcher, and then start fresh interpreters all the same."""
    for name, value in {"OF_BOTH": (), "Standby": object, "_waiting": []}.items():
        monkeypatch.setattr(standby, name, value)
    monkeypatch.setattr(standby.threading, "active_count", lambda: 1)
    monkeypatch.setattr(standby.Path, "glob", lambda self, pattern: fnmatch.filter([device], pattern))  # of /dev
    for name in ("CUDA_VISIBLE_DEVICES", standby.FORKS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    standby.prefork()
    assert len(standby._waiting) == started


def test_a_launch_that_is_refused_leaves_no_process():
    code = """
import psutil
from zerofit.launch import standby
standby.OF_BOTH = standby.OF_RANKS = ()
standby.prefork()
assert len(psutil.Process().children()) == 1
standby.dismiss()
assert not psutil.Process().children() and not standby._waiting
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_commands_that_become_forks():
    script, flags = Path("recipes/sft.py"), ["--zero", "2"]
    one = forked_ranks.of_command(prepare.command("torchrun", 1, 29_500, script, flags))
    assert one == forked_ranks.Job("recipes/sft.py", flags)
    two = forked_ranks.of_command(prepare.command("torchrun", 2, 29_500, script, flags))
    assert two == forked_ranks.Job("recipes/sft.py", flags, 2, "127.0.0.1", "29500")
    for launcher in ("accelerate", "deepspeed"):
        assert forked_ranks.of_command(prepare.command(launcher, 2, 29_500, script, flags)) is None
    assert forked_ranks.of_command([sys.executable, "-m", "zerofit.launch.torchrun", "--nnodes", "2", "--node_rank",
                                    "0", "--nproc_per_node", "2", "recipes/sft.py"]) is None  # fmt: skip


def test_a_job_is_found_by_its_lock(tmp_path):
    """The command line of a fork is its launcher's, which need not name the run folder."""
    run_lock.take(tmp_path / "run")
    try:
        assert run_lock.holder(tmp_path / "run").pid == os.getpid()
        lock = tmp_path / "run" / run_lock.FILE
        lock.write_text(lock.read_text().replace(time.strftime("%Y-"), "2001-"))  # this process is younger
        assert run_lock.holder(tmp_path / "run") is None
    finally:
        run_lock.release()
