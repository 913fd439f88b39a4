"""Start Python programs as forks of one process that has imported the libraries, so that none imports them again.

    server = ForkServer(environment)
    done = server.run(["recipes/sft.py", "--zero", "2"], ranks=2)

Imports take 5 to 10 s a process, most of a short test. `pytest --isolated` starts a fresh interpreter for each program
instead (conftest.run_python). Neither is used for tests that kill processes or read /proc: a fork is the server's child.
"""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

LIBRARIES = "torch transformers.trainer datasets peft accelerate deepspeed bitsandbytes".split()
OWN = "zerofit.recipe zerofit.data.load zerofit.model.load zerofit.plan.inspect_data zerofit.train.run zerofit.train.trainer"


class ForkServer:
    """The client's side: starts the server's process and sends it programs to run."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.requests = ours
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def stop(self) -> None:
        self.requests.close()
        self.process.wait(timeout=30)

    def run(self, words: list[str], environments: list[dict], cwd, timeout: float) -> subprocess.CompletedProcess:
        """Run `python words` once per environment, side by side; return the first exit code that is not 0, and the output.

        A failed program ends the others. Raises: subprocess.TimeoutExpired after `timeout` seconds.
        """
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            running = [self._start(words, env, cwd, out, errors) for env in environments]
            codes, deadline = [], time.monotonic() + timeout
            while running:
                for connection in list(running):
                    connection.settimeout(0.02)
                    with suppress(TimeoutError):
                        code = connection.recv(64)
                        running.remove(connection)
                        connection.close()
                        codes.append(int(code or b"-9"))
                if any(codes) or time.monotonic() > deadline:
                    for connection in running:
                        connection.close()  # the fork's parent kills it
                    break
            stdout, stderr = (stream.seek(0) or stream.read().decode(errors="replace") for stream in (out, errors))
        if running and not any(codes):
            raise subprocess.TimeoutExpired(words, timeout, stdout, stderr)
        return subprocess.CompletedProcess(words, next((code for code in codes if code), 0), stdout, stderr)

    def _start(self, words, environment, cwd, out, errors) -> socket.socket:
        ours, theirs = socket.socketpair()
        request = json.dumps({"words": words, "environment": environment, "cwd": str(cwd or Path.cwd())}).encode()
        with theirs:
            socket.send_fds(self.requests, [len(request).to_bytes(4, "big")],
                            [theirs.fileno(), out.fileno(), errors.fileno()])  # fmt: skip
        self.requests.sendall(request)
        return ours


def serve(requests: socket.socket) -> None:
    """Import the libraries, then fork for each request until the client closes its end."""
    sys.path.insert(0, str(Path(__file__).parent))
    for name in [*LIBRARIES, *OWN.split()]:
        with suppress(ImportError):  # a broken module is reported by the program that imports it
            __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of the forks
    while True:
        head, descriptors, _, _ = socket.recv_fds(requests, 4, 3)
        if not head:
            return
        length, request = int.from_bytes(head, "big"), b""
        while len(request) < length:
            request += requests.recv(length - len(request))
        if os.fork() == 0:
            requests.close()
            _watch(*descriptors, json.loads(request))
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(connection: int, out: int, errors: int, request: dict) -> None:
    """Fork the program, and report its exit code; kill it when the client closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    client = socket.socket(fileno=connection)
    if (program := os.fork()) == 0:
        client.close()
        os.setsid()
        os.dup2(out, 1)
        os.dup2(errors, 2)
        _become(request)
    client.setblocking(False)
    while True:
        done, status = os.waitpid(program, os.WNOHANG)
        if done:
            with suppress(OSError):
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            os._exit(0)
        with suppress(BlockingIOError):
            if not client.recv(1):
                os.killpg(program, signal.SIGKILL)
                os._exit(0)
        time.sleep(0.01)


def _become(request: dict) -> None:
    """Run the program as the interpreter would, and exit."""
    import torch

    words = request["words"]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if threads := os.environ.get("OMP_NUM_THREADS"):  # libgomp has read it at import
        torch.set_num_threads(int(threads))
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
    serve(socket.socket(fileno=int(sys.argv[1])))
