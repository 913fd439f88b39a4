"""A SLURM of two nodes on this machine, with daemons, key, configuration and state of its own; gone when it is left.

    with Cluster(folder) as cluster:
        cluster.ask("sbatch", "--parsable", "job.sbatch")

Both slurmd run on this host (`-N n1`, `-N n2`); n1 and n2 are names of it in /etc/hosts while the cluster is up. Jobs
in the partition `high` preempt those in `low`, which get GRACE_S to end. Needs root; `why_not()` says what is missing.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil

from . import patience

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
INSTALL = "run `make test-cluster` as root, or tests/cluster/install_slurm.sh"
GRACE_S, KILL_S = 90, 30  # between SIGTERM and the end: of a preempted job, of one that is cancelled
WAIT_S = 60  # for what takes a second or two: a daemon up, an answer
HOSTS, MARK = Path("/etc/hosts"), "# zerofit's test cluster"

CONFIGURATION = """\
ClusterName=zerofit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill}
MinJobAge=3600
ReturnToService=2
MpiDefault=none
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
"""


def why_not() -> str:
    """Why this machine can have no such cluster; "": it can."""
    path = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
    if missing := [tool for tool in TOOLS if not shutil.which(tool, path=path)]:
        return f"{', '.join(missing)} not installed: {INSTALL}"
    return "" if os.geteuid() == 0 else f"not root: {INSTALL}"


class Cluster:
    """The daemons. folder: theirs, short and private (munge's socket is in it)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.before = dict(os.environ)

    def __enter__(self) -> "Cluster":
        folder = self.folder
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        configuration = folder / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(folder=folder, host=socket.gethostname(), ports=_ports(), kill=KILL_S, grace=GRACE_S)
        )
        os.environ |= {"SLURM_CONF": str(configuration), "PATH": f"{os.environ['PATH']}{os.pathsep}/usr/sbin"}
        try:
            self._name_nodes()
            self.ask("munged", "--force", *(f"--{what}={folder}/munge.{end}" for what, end in (
                ("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"),
                ("seed-file", "seed"))))  # fmt: skip
            self.ask("slurmctld", "-f", str(configuration))
            for node in ("n1", "n2"):
                self.ask("slurmd", "-f", str(configuration), "-N", node)
            self.until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2\n", "both nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(Exception):
            self.ask("scancel", "--user=root")
            self.until(lambda: not self.ask("squeue", "-h"), "no job is left", KILL_S + WAIT_S)
        for name in ("slurmd-n1.pid", "slurmd-n2.pid", "slurmctld.pid", "munge.pid"):
            self._end(self.folder / name)
        os.environ.clear()
        os.environ.update(self.before)
        HOSTS.write_text("".join(line for line in HOSTS.read_text().splitlines(keepends=True) if MARK not in line))

    def _name_nodes(self) -> None:
        text = HOSTS.read_text()
        HOSTS.write_text(f"{text}{'' if text.endswith(chr(10)) else chr(10)}127.0.0.1 n1 n2 {MARK}\n")

    def _end(self, file: Path) -> None:
        """End the daemon whose number is in a file, and what it has started."""
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            daemon = psutil.Process(int(file.read_text()))
            family = [daemon, *daemon.children(recursive=True)]
            daemon.send_signal(signal.SIGTERM)
            for process in psutil.wait_procs(family, timeout=WAIT_S)[1]:
                process.kill()

    def ask(self, *words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def until(self, condition, what: str, seconds: float = WAIT_S) -> None:
        """Wait for a condition; fail with what it was, and the daemons' last words, after so many seconds."""
        seconds = patience.of(seconds)
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}\n{self.logs()}"
            time.sleep(0.3)

    def job(self, number: str) -> dict[str, str]:
        """What scontrol shows of a job: {"JobState": "RUNNING", "Restarts": "1", ...}."""
        said = self.ask("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in said if "=" in word)

    def start_now(self, number: str) -> None:
        """Start a requeued job once its first start has gone, without the two minutes for which SLURM holds it."""
        self.until(lambda: int(self.job(number)["Restarts"]) > 0, f"job {number} is queued again", 2 * WAIT_S)
        self.until(lambda: not _steps(number), f"the first start of job {number} has gone", 2 * WAIT_S)
        time.sleep(2)  # slurmd refuses a start in the second in which it was told to forget the job
        self.ask("scontrol", "update", f"JobId={number}", "StartTime=now")
        self.until(lambda: self.job(number)["JobState"] != "PENDING", f"job {number} is started again", 2 * WAIT_S)

    def logs(self) -> str:
        return "".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in sorted(self.folder.glob("*.log")))


def _steps(number: str) -> list[int]:
    """The slurmstepd of a job, which name it as their title."""
    titles = ((process.pid, " ".join(process.info["cmdline"] or [])) for process in psutil.process_iter(["cmdline"]))
    return [pid for pid, title in titles if title.startswith(f"slurmstepd: [{number}.")]


def _ports() -> tuple[int, int, int]:
    """Free ones below the kernel's own; the last two follow each other."""
    free = [port for port in range(17000, 18000) if _is_free(port)]
    return next((a, a + 1, a + 2) for a in free if {a + 1, a + 2} <= set(free))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
