"""Run the ranks of one node as forks of this process, as launch/torchrun.py runs them in fresh interpreters."""

import os
import runpy
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from zerofit.base import command_line, rank_status
from zerofit.launch import postmortem

END_SECONDS = 30.0  # after which ranks are killed that have not ended after one has failed; as torchrun

_TORCHRUN = ["-m", "zerofit.launch.torchrun"]


@dataclass
class Job:
    """A recipe's file with its flags, to run on `ranks` processes of this machine; address, port: of rank 0."""

    script: str
    flags: list[str]
    ranks: int = 1
    address: str = ""
    port: str = ""


class _Signaled(Exception):
    """Raised when this process receives a signal that ends its ranks."""


def of_command(command: list[str]) -> Job | None:
    """Return the job of a command of launch/prepare.py; None if another program starts its ranks."""
    words = command[1:]
    if words[0].endswith(".py"):
        return Job(words[0], words[1:])
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
    options = {name: values for name, values, _ in command_line.by_flag(words[2:script])}
    if words[:2] != _TORCHRUN or options.get("--nnodes") != ["1"] or "--node_rank" in options:
        return None
    (ranks,), (address,), (port,) = (options[f"--{name}"] for name in ("nproc_per_node", "master_addr", "master_port"))
    return Job(words[script], words[script + 1 :], int(ranks), address, port)


def run(job: Job) -> None:
    """Run the job. Raises: SystemExit with its exit code: that of the rank which failed first."""
    if job.ranks == 1:
        rank_status.end_with_supervisor()
        _run_script(job)
    for number in rank_status.SENT_TO_ALL:  # the supervisor handles them; the ranks inherit this
        signal.signal(number, signal.SIG_IGN)
    parent, running = os.getpid(), {}
    for rank in range(job.ranks):
        pid = os.fork()
        if pid == 0:
            _become_rank(job, rank, parent)
            _run_script(job)
        running[pid] = rank
    try:
        exits = _until_one_fails(running)
        _end(running, rank_status.ENDS_RANKS, exits)
    except _Signaled as error:
        (number,) = error.args
        _end(running, number, {})
        raise SystemExit(128 + number) from None
    if exits:
        rank_status.write_json(rank_status.folder() / postmortem.EXITS, exits)
    code = next(iter(exits.values()), 0)
    raise SystemExit(code if code >= 0 else 128 - code)


def _become_rank(job: Job, rank: int, parent: int) -> None:
    """Start a new session and set the environment variables that torchrun sets for a rank."""
    os.setsid()
    rank_status.end_with_parent(parent)
    ranks = str(job.ranks)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "ROLE_RANK": str(rank),
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": ranks,
        "MASTER_ADDR": job.address, "MASTER_PORT": job.port,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }  # fmt: skip
    rank_status.end_with_supervisor()


def _run_script(job: Job) -> None:
    """Run the recipe as `python recipe.py flags` would. Raises: SystemExit at its end."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdigit():  # OpenMP read the launcher's value when it was imported
        import torch

        torch.set_num_threads(int(threads))
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)
    sys.argv, sys.path[0] = [job.script, *job.flags], str(Path(job.script).parent)
    try:
        runpy.run_path(job.script, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    raise SystemExit(0)


def _until_one_fails(running: dict[int, int]) -> dict[int, int]:
    """Wait until a rank fails or all have ended; return {rank: exit code} of the one that failed.

    Args: running: {process id: rank}; ranks that have ended are removed.
    Raises: _Signaled for a signal that asks this process to end.
    """

    def end(number, _frame):
        raise _Signaled(number)

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, end)
    while running:
        pid, status = os.wait()
        rank = running.pop(pid)
        if code := os.waitstatus_to_exitcode(status):
            return {rank: code}
    return {}


def _end(running: dict[int, int], number: int, exits: dict[int, int]) -> None:
    """Send the remaining ranks a signal, kill them after END_SECONDS, and add their exit codes to `exits`."""
    for other in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(other, signal.SIG_IGN)
    for pid in running:
        os.kill(pid, number)
    deadline = time.monotonic() + END_SECONDS
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = running.pop(pid)
            if code := os.waitstatus_to_exitcode(status):
                exits[rank] = code
        elif time.monotonic() > deadline:
            deadline = float("inf")
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        else:
            time.sleep(0.05)
