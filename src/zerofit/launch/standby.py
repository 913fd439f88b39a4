"""Run the ranks in forks of the launcher, which has imported the libraries already.

Imports take seconds of a core in every process, and minutes where eight ranks read them from a busy file server. The
launcher calls `prefork` once it has imported them and before it uses a device, a thread or a file of the run. The fork
imports what else ranks need and waits until `popen` makes it the only rank of a job, or the parent of its ranks
(launch/forked_ranks.py). Where a fork would not be safe, `popen` starts a fresh interpreter.
"""

import array
import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from zerofit.base import rank_status
from zerofit.launch import forked_ranks

# Environment variable. 0: every rank starts in an interpreter of its own. 1: forks on GPUs too, which no test covers.
# Default: forks where torch sees no GPU.
FORKS = "ZEROFIT_FORK"

POLL_SECONDS = 0.02

# Modules that launcher and ranks import later; loaded once, before the fork.
OF_BOTH = ("datasets", "transformers.modeling_utils")

# Modules that ranks import and the launcher does not.
OF_RANKS = ("transformers.trainer", "zerofit.recipe", "zerofit.train.run", "zerofit.train.trainer")

_waiting: list["Standby"] = []  # at most one


class Standby:
    """A forked process that waits for a command. pid and wait: as of subprocess.Popen."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode = None
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _wait_and_run(theirs, launcher)
        theirs.close()
        self._connection = ours

    def begin(self, command: list[str], env: dict[str, str], stdout=None) -> None:
        """Make the process run the command; stdout: a file instead of this process's."""
        files = array.array("i", [stdout.fileno()] if stdout else [])
        with contextlib.suppress(ConnectionError):  # it has ended, which `wait` reports
            self._connection.sendmsg([b"\n"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)] if stdout else [])
            self._connection.sendall(json.dumps({"command": command, "env": env}).encode())
        self.dismiss()

    def dismiss(self) -> None:
        """Let the process end, if it has no command."""
        self._connection.close()

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, -n for signal n. Raises: subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG if deadline else 0)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("forked ranks", timeout)
            else:
                time.sleep(POLL_SECONDS)
        return self.returncode


def prefork() -> None:
    """Fork the process that waits for the next command, where that is safe.

    The fork leaves this function by SystemExit: no caller may have anything to clean up.
    """
    forks = os.environ.get(FORKS, "0" if _gpus_are_visible() else "1")
    if forks != "0" and sys.platform == "linux" and not _waiting:
        for name in OF_BOTH:
            importlib.import_module(name)
        if threading.active_count() == 1 and not _driver_is_loaded():
            _waiting.append(Standby())


def _gpus_are_visible() -> bool:
    """Return whether the machine has NVIDIA GPUs that ranks may use, without loading libraries or a driver."""
    devices = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("dxg")]  # the latter: under WSL2
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and bool(devices)


def popen(command: list[str], env: dict[str, str], stdout=None) -> Standby | subprocess.Popen:
    """Start the command in a session of its own, in the process that waits for it if there is one."""
    if not _waiting:
        before = signal.signal(signal.SIGHUP, lambda *_: None)  # ignored by nohup, it would be in the new program too
        try:
            return subprocess.Popen(command, env=env, start_new_session=True, stdout=stdout)
        finally:
            signal.signal(signal.SIGHUP, before)
    process = _waiting.pop()
    process.begin(command, env, stdout)
    return process


def dismiss() -> None:
    """End the process that waits for a command, if there is one."""
    while _waiting:
        process = _waiting.pop()
        process.dismiss()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def _driver_is_loaded() -> bool:
    """Return whether CUDA's driver is loaded: its state does not survive a fork."""
    return "libcuda.so" in Path("/proc/self/maps").read_text()


def _forget() -> None:
    for process in _waiting:
        process.dismiss()
    _waiting.clear()


os.register_at_fork(after_in_child=_forget)  # else a child could keep the waiting process after the launcher's end


# --- in the forked process ---


def _wait_and_run(connection: socket.socket, launcher: int) -> None:
    """Wait for a command and run it. Raises: SystemExit at its end."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup is for the supervisor, which ends ranks with SIGHUP
    rank_status.end_with_parent(launcher)
    for name in OF_RANKS:
        with contextlib.suppress(Exception):  # the rank reports it
            importlib.import_module(name)
    _, files, _, _ = socket.recv_fds(connection, 1, 1)
    with connection.makefile("rb") as stream:
        request = stream.read()
    connection.close()
    if not request:
        os._exit(0)
    command, env = json.loads(request).values()
    for file in files:
        os.dup2(file, 1)
        os.close(file)
    job = forked_ranks.of_command(command)
    if job is None or not _may_become_ranks(env):
        os.execve(command[0], command, env)
    os.environ.clear()
    os.environ.update(env)
    rank_status.mark()
    forked_ranks.run(job)


def _may_become_ranks(env: dict[str, str]) -> bool:
    """Return whether forks of this process can train: no threads, no CUDA driver, and unchanged GPUs.

    env: of the ranks. Libraries, DeepSpeed among them, may have looked for GPUs when they were imported.
    """
    if len([*Path("/proc/self/task").iterdir()]) > 1 or _driver_is_loaded():
        return False
    import torch

    if env.get(FORKS) != "1" and torch.cuda.is_available():
        return False
    if not torch.backends.cuda.is_built():
        return True
    unchanged = all(env.get(name) == os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"))
    return unchanged and not _driver_is_loaded()  # the check above may have loaded it
