"""`zerofit hosts`: start a job on every host of a DeepSpeed hostfile over ssh.

Each host runs `zerofit launch` as one node. Its arguments and environment, with HF_TOKEN, are sent through the
connection's standard input, so they never appear in a file or a command line. The launch on a host ends with its
connection.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from zerofit.base import command_line, rank_status
from zerofit.base.errors import UserError
from zerofit.base.paths import import_path
from zerofit.config import parse
from zerofit.job import program, run_folder
from zerofit.launch import launch, node_options, prepare

# Prefixes of the environment variables that are sent to the hosts.
PASSED_ON = (
    "HF_",
    "HUGGING_FACE_",
    "TRANSFORMERS_",
    "WANDB_",
    "MLFLOW_",
    "COMET_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "ZEROFIT_",
)

# The prefix CUDA_ is not used: CUDA_VISIBLE_DEVICES, CUDA_MPS_PIPE_DIRECTORY and others are valid on one node only.
PASSED_BY_NAME = (
    "OMP_NUM_THREADS",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
)

SSH_SECONDS = 10  # connection timeout

END_SECONDS = 30.0  # time for the other hosts to end after node 0, or for node 0 after another host has failed

POLL_SECONDS = 0.2


@dataclass
class Host:
    """One line of the hostfile."""

    name: str
    slots: list[int]  # GPUs to use there
    contiguous: bool  # whether they are GPUs 0 to n-1


def main(argv: list[str]) -> None:
    """Run `zerofit hosts` (see --help) and exit with the job's exit code.

    Raises: UserError for invalid arguments and unusable hosts, before anything is started.
    """
    parser = argparse.ArgumentParser(prog="zerofit hosts", allow_abbrev=False, description=__doc__)
    parser.add_argument("--hosts", required=True, help="DeepSpeed's hostfile: a line `host slots=8` for each node")
    parser.add_argument("--include", default="", help="hosts to use, as in DeepSpeed: host1@host2:0,2")
    parser.add_argument("--exclude", default="", help="hosts to exclude, in the same format")
    parser.add_argument("--gpus", default="", help="processes on each host (default: its slots)")
    parser.add_argument(
        "--master_addr", default="", help="address of the first host for the others (default: its name in the hostfile)"
    )
    parser.add_argument(
        "--port", default="", help=f"port on the first host; the next is used too (default {node_options.PORT})"
    )
    node_options.add_rendezvous_options(parser)
    parser.add_argument("--ssh", default="ssh", help='how to reach a host, e.g. "ssh -p 2222 -i key"')
    parser.add_argument("--args", default="", help="more recipe flags in one string, split like a shell would")
    parser.add_argument("--show", action="store_true", help="print the command of each host without starting it")
    parser.add_argument("recipe", help="recipes/sft.py, or any other recipe's file")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the recipe's flags")
    args = parser.parse_args(argv)
    hosts = read(Path(args.hosts), args.include, args.exclude, args.gpus)
    flags, _ = command_line.with_extra_flags(args.flags, args.args)
    recipe = program.start(args.recipe).recipe
    request = parse.request(recipe, flags)  # invalid flags are rejected before any connection
    if not request.get("output_dir"):  # all hosts need the same name
        flags = [*flags, "--output_dir", str(run_folder.default_name(recipe))]
    if len(hosts) > 1:
        prepare.check_for_nodes(flags)
    env = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON) or k in PASSED_BY_NAME}
    token = command_line.value_of(flags, ("--hub_token",))  # any user can read a command line
    flags = command_line.drop(flags, "--hub_token")
    env |= {"HF_TOKEN": token} if token else {}
    jobs = [_job(args, hosts, rank, flags, env) for rank in range(len(hosts))]
    if args.show:
        for host, job in zip(hosts, jobs, strict=True):
            print(
                f"{host.name}\n  zerofit {command_line.hide_secrets(job['argv'])}\n  environment: "
                f"{', '.join(sorted(job['env'])) or '-'}"
            )
        return
    ssh = shlex.split(args.ssh)
    check(ssh, hosts, args.hosts)
    raise SystemExit(run(ssh, hosts, jobs))


def read(file: Path, include: str = "", exclude: str = "", gpus: str = "") -> list[Host]:
    """Return the hosts of a hostfile in order, parsed by DeepSpeed.

    Raises: UserError for a missing or invalid file (DeepSpeed's launcher would run on this machine instead).
    """
    if not file.is_file():
        raise UserError(f"HOSTS={file}: the file does not exist; it needs a line for each node: `host1 slots=8`.")
    from deepspeed.launcher import runner

    runner.logger.disabled = True  # it would log the error raised below
    try:
        pool = runner.fetch_hostfile(str(file))
        slots_by_host = runner.parse_inclusion_exclusion(pool, include, exclude)
    except (ValueError, OSError) as error:
        raise UserError(f"HOSTS={file}: {' '.join(str(error).split()).rstrip('.')}; it needs a line for each node: "
                        "`host1 slots=8`.") from None  # fmt: skip
    finally:
        runner.logger.disabled = False
    count = command_line.positive_integer("GPUS=", gpus) if gpus else None
    hosts = []
    for name, slots in slots_by_host.items():
        if count and count > len(slots):
            raise UserError(f"GPUS={count}: {name} has {len(slots)} slots in {file}.")
        if name.startswith("-"):
            raise UserError(f"HOSTS={file}: {name}: not a valid host name; ssh would read it as an option.")
        used = slots[:count]
        hosts.append(Host(name, used, used == list(range(len(used)))))
    if not hosts:
        raise UserError(f"HOSTS={file}: INCLUDE={include} EXCLUDE={exclude} exclude all hosts.")
    return hosts


def _job(args, hosts: list[Host], rank: int, flags: list[str], env: dict[str, str]) -> dict:
    """Return one host's job: {"argv": arguments of `zerofit`, "env": environment}."""
    host = hosts[rank]
    argv = ["launch", "--gpus", str(len(host.slots))]
    if len(hosts) > 1:
        argv += ["--nnodes", str(len(hosts)), "--node_rank", str(rank),
                 "--master_addr", args.master_addr or hosts[0].name, "--join_timeout", args.join_timeout]  # fmt: skip
        argv += ["--interface", args.interface] if args.interface else []
    argv += ["--port", args.port] if args.port else []
    if not host.contiguous:
        env = env | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))}
    return {"argv": [*argv, args.recipe, *flags], "env": env}


def check(ssh: list[str], hosts: list[Host], file: str) -> None:
    """Check that ssh to each host needs no password, and that it has this folder and this interpreter.

    Raises: UserError for the first host that fails.
    """
    test = f"test -d {shlex.quote(str(Path.cwd()))} && test -x {shlex.quote(sys.executable)}"
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SSH_SECONDS}"]

    def attempt(host: Host) -> tuple[int, str]:
        """Return the exit code of the test on a host and ssh's last error message."""
        command = [*ssh, *options, "--", host.name, test]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * SSH_SECONDS
            )
        except subprocess.TimeoutExpired:
            return 255, "no answer"
        return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]

    try:
        with ThreadPoolExecutor(len(hosts)) as pool:
            answers = list(pool.map(attempt, hosts))
    except OSError as error:
        raise UserError(
            f"--ssh {shlex.join(ssh)}: could not be started: {error.strerror}; install an ssh client."
        ) from None
    for host, (code, reason) in zip(hosts, answers, strict=True):
        if code == 1:
            raise UserError(
                f"HOSTS={file}: {host.name} lacks {Path.cwd()} or {sys.executable}; all hosts need this folder and "
                "environment at the same path (a shared disk, or the same installation)."
            )
        if code:
            raise UserError(
                f"HOSTS={file}: ssh to {host.name} without a password failed ({reason}); try `ssh {host.name} true` "
                f"and `ssh-copy-id {host.name}`."
            )


def run(ssh: list[str], hosts: list[Host], jobs: list[dict]) -> int:
    """Run the jobs to their end and forward signals; return node 0's exit code."""
    remote_command = (
        f"cd {shlex.quote(str(Path.cwd()))} && PYTHONPATH={shlex.quote(os.pathsep.join(import_path()))} exec "
        f"{shlex.quote(sys.executable)} -m zerofit join"
    )
    options = ["-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
    processes = []
    for host, job in zip(hosts, jobs, strict=True):
        process = subprocess.Popen([*ssh, *options, "--", host.name, remote_command],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, start_new_session=True)  # fmt: skip
        processes.append(process)
        _send(process, json.dumps(job))
    printers = [
        threading.Thread(target=_show, args=(process, "" if host is hosts[0] else f"{host.name}: "), daemon=True)
        for host, process in zip(hosts, processes, strict=True)
    ]
    for thread in printers:
        thread.start()
    signals: list[int] = []

    def pass_on(number: int) -> None:
        for process in processes if number == signal.SIGINT or len(signals) > 1 else processes[:1]:
            _send(process, signal.Signals(number).name)

    before = rank_status.handle_signals(rank_status.receiver(signals, pass_on))
    try:
        code = _wait_for_first(processes)
        deadline = time.monotonic() + END_SECONDS
        for process in processes[1:]:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # the connection closes, which ends the launch on that host
    finally:
        for process in processes:
            with contextlib.suppress(BrokenPipeError):  # the process ended before it read its job
                process.stdin.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    for thread in printers:
        thread.join(5)
    if code == 255:
        print(f"zerofit: error: the connection to {hosts[0].name} was lost.", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _wait_for_first(processes: list[subprocess.Popen]) -> int:
    """Wait for node 0 and return its exit code; end it END_SECONDS after another host has failed."""
    failed = None
    while (code := processes[0].poll()) is None:
        if any(process.poll() for process in processes[1:]):
            failed = failed or time.monotonic()
        if failed and time.monotonic() - failed > END_SECONDS:
            failed = float("inf")
            _send(processes[0], signal.SIGINT.name)
        time.sleep(POLL_SECONDS)
    return code


def _send(process: subprocess.Popen, line: str) -> None:
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except (BrokenPipeError, ValueError):
        pass  # the process has ended; its exit code is reported


def _show(process: subprocess.Popen, prefix: str) -> None:
    for line in process.stdout:
        with contextlib.suppress(OSError):  # the terminal was closed; the job runs until it has saved
            print(prefix + line, end="", flush=True)


# --- on a host ---


def join(argv: list[str]) -> None:
    """Run one host's launch (`zerofit join`), as sent by `zerofit hosts` over standard input.

    The first line is JSON (`_job`), each further line a signal name; the end of input ends the launch.
    """
    if argv:
        raise UserError("zerofit join is started by `zerofit hosts` and takes no arguments.")
    source = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the ranks must not read it
    job = json.loads(source.readline() or "null")
    if not job:
        raise UserError("zerofit join: the connection ended before the job arrived.")
    os.environ.update(job["env"])
    threading.Thread(target=_listen, args=(source,), daemon=True).start()
    launch.main(job["argv"][1:])


def _listen(source) -> None:
    for line in source:
        os.kill(os.getpid(), signal.Signals[line.strip()])
    os.kill(os.getpid(), signal.SIGINT)  # `zerofit hosts` has ended
