"""Start Python programs as forks of one process that has imported the libraries, so that none imports them again.

Imports take 5 to 10 s a process, most of a short test. `conftest.run_python` asks the server directly; a program that
starts others (make, a launcher, torchrun) is given `server.python` as its interpreter, a script that asks the server.
`pytest --isolated` uses neither. Tests that kill processes or read /proc do not either: a fork is the server's child.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

LIBRARIES = """
    torch transformers.trainer transformers.models.llama.modeling_llama datasets peft accelerate deepspeed bitsandbytes
    deepspeed.ops.op_builder.all_ops deepspeed.module_inject.auto_ep_presets deepspeed.runtime.zero.muon.muon_optimizer
    matplotlib.pyplot matplotlib.backends.backend_agg setuptools
"""
OWN = """
    zerofit.cli zerofit.recipe zerofit.data.dataset zerofit.data.load zerofit.export.export zerofit.launch.launch
    zerofit.commands.data zerofit.plan.search zerofit.plan.simulated_rank zerofit.train.deepspeed_ops
    zerofit.train.network_check zerofit.objective.labeled zerofit.train.run zerofit.train.trainer
"""
ADDRESS = "ZEROFIT_FORK_SERVER"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class ForkServer:
    """A server at folder/socket. address: of its socket; python: a script to use in place of the interpreter."""

    def __init__(self, folder: Path):
        self.address, self.python = str(folder / "socket"), str(folder / "python")

    def begin(self, **variables: str) -> None:
        """Start the server's process; the libraries read these environment variables as they are imported."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.address)
        listener.listen(64)
        with listener:
            words = [sys.executable, __file__, "serve", str(listener.fileno()), self.python]
            environment = os.environ | variables
            self.process = subprocess.Popen(
                words, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        script = f'#!/bin/sh\n{ADDRESS}={self.address} exec {sys.executable} -SE {__file__} ask {sys.executable} "$@"\n'
        Path(self.python).write_text(script)
        Path(self.python).chmod(0o755)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


def start(address: str, words: list[str], environment: dict, cwd: str, streams: list[int]) -> socket.socket:
    """Start `python words`; return the connection that delivers its process id, then its exit code, a line each.

    The program is killed when the connection is closed. streams: descriptors of its stdin, stdout and stderr.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = json.dumps({"words": words, "environment": environment, "cwd": cwd}).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], streams)
    connection.sendall(request)
    return connection


def ask(python: str, words: list[str]) -> int:
    """Run `python words` as a fork if the server has its libraries, else in the interpreter; return the exit code."""
    options = [word for word in words if word != "-u"]
    module = options[1] if options[:1] == ["-m"] else ""
    forked = Path(options[0] if options else "").parent.name == "recipes" or module in (
        "zerofit", "zerofit.launch.torchrun", "torch.distributed.run",
    )  # fmt: skip
    address = os.environ.pop(ADDRESS)
    if not forked or os.environ.get("DS_ACCELERATOR") != "cpu":  # the server's DeepSpeed has chosen the CPU
        os.execv(python, [python, *words])
    answers = start(address, options, dict(os.environ), str(Path.cwd()), [0, 1, 2]).makefile()
    program = int(answers.readline())
    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: os.kill(program, number))
    return int(answers.readline() or -signal.SIGKILL)


def serve(listener: socket.socket, python: str) -> None:
    """Import the libraries, then fork for each connection until this process is ended."""
    import ctypes

    from zerofit.base import distributed

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the tests
    os.environ.update(distributed.thread_waiting())
    for name in f"{LIBRARIES} {OWN}".split():
        with suppress(ImportError):  # a broken module is reported by the program that imports it
            __import__(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # builds the table of all models, kept for every load
    gc.collect()
    gc.freeze()  # a collection in a fork takes 0.3 s otherwise, and copies the pages it looks at
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of the forks
    sys.executable = python
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _watch(connection)
        connection.close()


def _watch(connection: socket.socket) -> None:
    """Fork the program and report its exit code; kill it when the client closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(connection, 4, 3)
    length, request = int.from_bytes(head, "big"), b""
    while len(request) < length:
        request += connection.recv(length - len(request))
    if (program := os.fork()) == 0:
        connection.close()
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _become(**json.loads(request))
    for stream in streams:
        os.close(stream)
    with suppress(BrokenPipeError):  # the client was killed meanwhile; the loop finds that out
        connection.sendall(f"{program}\n".encode())
    connection.setblocking(False)
    while True:
        done, status = os.waitpid(program, os.WNOHANG)
        with suppress(BlockingIOError, OSError):
            if done:
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            elif not connection.recv(1):
                os.killpg(program, signal.SIGKILL)
                done = program
        if done:
            os._exit(0)
        time.sleep(0.01)


def _become(words: list[str], environment: dict, cwd: str) -> None:
    """Run the program as the interpreter would, and exit."""
    import atexit
    import runpy

    import torch
    import torch._dynamo

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if threads := os.environ.get("OMP_NUM_THREADS"):  # libgomp has read it at import
        torch.set_num_threads(int(threads))
    torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"  # torch has read it at import, too
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if (customize := Path(folder) / "sitecustomize.py").is_file():  # as an interpreter does at its start
            runpy.run_path(str(customize))
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        raise SystemExit(ask(sys.argv[2], sys.argv[3:]) & 0xFF)
    serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3])
