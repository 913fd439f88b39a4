"""Two to four hosts on one machine: network namespaces on one switch, each with its address, name, /etc/hosts and sshd.

    with Hosts(2) as (first, second):
        server = first.popen([sys.executable, "serve.py"], env={"PORT": "29500"})
        second.run(["ssh", "host0", "hostname"], timeout=30)

What they share, as nodes with a shared file system do: the files, but for `private` paths. What they do not: network,
host name, /dev/shm, sshd. Process ids are the machine's. There is no way out: no route, no name server.
Needs root; `why_not()` says what is missing. Linux only.
"""

import contextlib
import ipaddress
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

NAMESPACES, ETC = Path("/run/netns"), Path("/etc/netns")
NETWORK = ipaddress.ip_network("10.77.0.0/24")
INTERFACE = "eth0"  # of every host: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME
TOOLS = ("ip", "tc", "nsenter", "unshare", "mount", "hostname", "ssh", "ssh-keygen", "sshd", "pdsh")
INSTALL = "run `make test-cluster` as root, or tests/cluster/install.sh"
WAIT_S = 30  # for what takes well under a second: a process killed, an sshd up
BEDS = itertools.count()

SSHD = """\
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {bed}/client_key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
SSH = """\
Host *
    User root
    IdentityFile {bed}/client_key
    IdentitiesOnly yes
    StrictHostKeyChecking accept-new
    UserKnownHostsFile {bed}/known_hosts
    GlobalKnownHostsFile /dev/null
    LogLevel ERROR
"""


def command(*words: str) -> str:
    """Run a tool of the machine's; its output. Raises RuntimeError with what it said."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} -> {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def why_not() -> str | None:
    """Why this machine can have no such hosts, with the mending; None where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return f"network namespaces need Linux and root: {INSTALL}"
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"{', '.join(missing)} not found: {INSTALL}"
    name = f"zf{os.getpid()}-may"
    try:
        command("ip", "netns", "add", name)
        command("ip", "-n", name, "link", "add", "name", "br0", "type", "bridge")
        command("ip", "-n", name, "link", "add", "name", "p0", "type", "veth", "peer", "name", "p1")
    except RuntimeError as error:
        return f"this kernel or container allows no network namespace with a bridge and a veth: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


def inside(name: str) -> list[int]:
    """The ids of the living processes whose network namespace is `name`."""
    try:
        space = (NAMESPACES / name).stat()
    except FileNotFoundError:
        return []
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # ended meanwhile; a zombie has no namespace
            its = Path(f"/proc/{pid}/ns/net").stat()
            if (its.st_ino, its.st_dev) == (space.st_ino, space.st_dev):
                found.append(pid)
    return found


def kill_inside(name: str, spare: tuple[int, ...] = ()) -> None:
    """SIGKILL every process in the namespace, those forked meanwhile too. Raises TimeoutError where one stays."""
    deadline = time.monotonic() + WAIT_S
    while left := [pid for pid in inside(name) if pid not in spare]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name}: processes {left} are still there {WAIT_S} s after SIGKILL")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove(name: str) -> None:
    """The namespace with its processes, interfaces and /etc view."""
    kill_inside(name)
    if (NAMESPACES / name).exists():
        command("ip", "netns", "del", name)
    shutil.rmtree(ETC / name, ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty: another's; absent: never made
        ETC.rmdir()


def remove_abandoned() -> None:
    """What test processes left that were killed before they could clean up."""
    for path in [*NAMESPACES.glob("zf*-*"), *ETC.glob("zf*-*")]:
        owner = re.fullmatch(r"zf(\d+)-.*", path.name)
        if owner and not psutil.pid_exists(int(owner[1])):
            remove(path.name)


class Host:
    """One host. `name`, `address`, `interface`; `folder` holds its logs, keys and private paths, seen from outside."""

    def __init__(self, bed: "Hosts", rank: int):
        self.bed, self.rank, self.name = bed, rank, f"host{rank}"
        self.address, self.interface = str(NETWORK[rank + 1]), INTERFACE
        self.mac, self.space = f"02:00:0a:4d:00:{rank + 1:02x}", f"{bed.name}-{rank}"
        self.folder = bed.folder / self.name
        self.port = self.cable = f"p{rank}"  # the switch's interface for it; another one behind a wire
        self.started: list[subprocess.Popen] = []
        self.severed, self.keeper, self.wire, self.server = False, None, None, None
        self.own: dict[Path, Path] = {}  # private path -> where it lies

    def build(self) -> None:
        self.folder.mkdir()
        view = ETC / self.space
        view.mkdir(parents=True)
        lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{host.address} {host.name}" for host in self.bed.hosts)]
        (view / "hosts").write_text("\n".join(lines) + "\n")
        command("ip", "netns", "add", self.space)
        switch = self.bed.switch
        command("ip", "-n", switch, "link", "add", "name", self.cable, "type", "veth",
                "peer", "name", INTERFACE, "address", self.mac, "netns", self.space)  # fmt: skip
        self.plug()
        command("ip", "-n", self.space, "link", "set", "lo", "up")
        command("ip", "-n", self.space, "address", "add", f"{self.address}/{NETWORK.prefixlen}", "dev", INTERFACE)
        command("ip", "-n", self.space, "link", "set", INTERFACE, "up")
        for other in self.bed.hosts:
            if (
                other is not self
            ):  # fixed: a host that is cut off is silence, not "no route to host" after three seconds
                command("ip", "-n", self.space, "neigh", "add", other.address,
                        "lladdr", other.mac, "nud", "permanent", "dev", INTERFACE)  # fmt: skip
        self.keep()

    def keep(self) -> None:
        """One sleeping process holds the host's mounts and name; what runs on the host enters them."""
        script = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && echo up && exec sleep infinity'
        self.keeper = subprocess.Popen(
            ["ip", "netns", "exec", self.space, "unshare", "--uts", "sh", "-c", script, self.name],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        if self.keeper.stdout.readline() != "up\n":
            raise RuntimeError(f"{self.name} did not come up: {self.keeper.stderr.read()}")

    def private(self, path: Path | str) -> Path:
        """From here on this host has its own empty folder at `path`; where it lies, seen from outside."""
        path = Path(path)
        own = self.folder / "private" / str(path.absolute()).strip("/").replace("/", "_")
        self.own[path.absolute()] = own
        own.mkdir(parents=True)
        if not path.exists():
            path.mkdir(parents=True)
            self.bed.made.append(path)
        self.check(["mount", "--bind", str(own), str(path)])
        return own

    def seen(self, path: Path) -> Path:
        """Where a file of this host's lies, seen from outside."""
        for shown, own in self.own.items():
            if path.is_relative_to(shown):
                return own / path.relative_to(shown)
        return path

    # --- processes ---
    def words(self, words: list, cwd=None) -> list[str]:
        """The command that runs `words` on this host, in the same process (the id is the id of what runs)."""
        enter = ["nsenter", "--target", str(self.keeper.pid), "--net", "--mount", "--uts", "--"]
        return [*enter, "env", "-C", str(cwd or Path.cwd()), *map(str, words)]

    def popen(self, words: list, env: dict | None = None, cwd=None, log="log.txt", **options) -> subprocess.Popen:
        """Start `words` in their own session, `env` added to ours; append stdout and stderr to folder/log."""
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True, "env": os.environ | (env or {})} | options
        with (self.folder / log).open("a") as file:
            options = {"stdout": file, "stderr": subprocess.STDOUT} | options
            process = subprocess.Popen(self.words(words, cwd), **options)
        self.started.append(process)
        return process

    def text(self, log="log.txt") -> str:
        """What the processes on this host have written so far."""
        path = self.folder / log
        return path.read_text(errors="replace") if path.exists() else ""

    def run(self, words: list, timeout: float = 60, env: dict | None = None, cwd=None) -> subprocess.CompletedProcess:
        """Run to the end, output captured as text; raises subprocess.TimeoutExpired, its process group killed."""
        process = self.popen(words, env, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        finally:
            self.started.remove(process)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def check(self, words: list, timeout: float = 60, **options) -> str:
        """`run`, and its stdout; raises RuntimeError with what it said where it failed."""
        done = self.run(words, timeout, **options)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {words} -> {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout

    def processes(self) -> dict[int, str]:
        """{process id: command line} of what still runs here, but for the bed's own sshd."""
        found = {}
        for pid in inside(self.space):
            if pid not in (self.keeper.pid, self.server and self.server.pid):
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    found[pid] = " ".join(process.cmdline()) or f"[{process.name()}]"
        return found

    def kill(self) -> None:
        """SIGKILL everything, sshd too. The kernel still closes the connections: for a power loss, `cut()` first."""
        for process in self.started:
            process.kill()  # one that has not even entered the namespace yet
        kill_inside(self.space, spare=(self.keeper.pid,))
        for process in self.started:
            process.wait(WAIT_S)
        self.server = None

    # --- the link ---
    def cut(self) -> None:
        """From here on packets to and from this host vanish; nobody is told (no RST, no lost carrier)."""
        self.severed = True
        self.plug()

    def mend(self) -> None:
        self.severed = False
        self.plug()

    def plug(self) -> None:
        master = ["nomaster"] if self.severed else ["master", "bridge"]
        command("ip", "-n", self.bed.switch, "link", "set", self.port, *master, "up")

    def slow(self, delay_ms: float = 0, loss_percent: float = 0, by: str | None = None) -> None:
        """Delay and loss in each direction of this host's link (a round trip takes 2 x delay_ms more); none: as new.
        `by`: netem (the kernel's), wire (a process, wire.py); by default netem where the kernel has it."""
        self.fast()
        if not delay_ms and not loss_percent:
            return
        if (by or ("netem" if self.bed.netem else "wire")) == "netem":
            for space, device in (self.space, INTERFACE), (self.bed.switch, self.cable):
                command("tc", "-n", space, "qdisc", "replace", "dev", device, "root", "netem",
                        "delay", f"{delay_ms}ms", "loss", f"{loss_percent}%")  # fmt: skip
            return
        switch, self.port, end = self.bed.switch, f"b{self.rank}", f"r{self.rank}"
        command("ip", "-n", switch, "link", "set", self.cable, "nomaster")
        command("ip", "-n", switch, "link", "add", "name", self.port, "type", "veth", "peer", "name", end)
        command("ip", "-n", switch, "link", "set", end, "up")
        self.plug()
        with (self.folder / "wire.txt").open("a") as log:
            self.wire = subprocess.Popen(
                ["ip", "netns", "exec", switch, sys.executable, str(Path(__file__).with_name("wire.py")),
                 self.cable, end, str(delay_ms), str(loss_percent)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        if self.wire.stdout.readline() != "carrying\n":
            raise RuntimeError(f"{self.name}: no wire: {self.text('wire.txt')}")

    def fast(self) -> None:
        """Undo `slow`."""
        if self.wire:
            self.stop(self.wire)
            command("ip", "-n", self.bed.switch, "link", "del", self.port)
            self.wire, self.port = None, self.cable
            self.plug()
        elif self.bed.netem:
            for space, device in (self.space, INTERFACE), (self.bed.switch, self.cable):
                subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", device, "root"], capture_output=True)

    # --- ssh ---
    def sshd(self) -> None:
        """Start an sshd on port 22 that takes the bed's key (as root).

        From here on plain `ssh` and `pdsh -R ssh` on this host use the bed's client configuration, `bed.ssh_config`;
        nothing in the user's ~/.ssh is written.
        """
        if self.server:
            return
        Path("/run/sshd").mkdir(exist_ok=True)
        if not (self.folder / "host_key").exists():
            command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(self.folder / "host_key"))
            self.check(["mount", "--bind", self.bed.ssh_config, "/etc/ssh/ssh_config"])
        settings = self.folder / "sshd_config"
        settings.write_text(SSHD.format(address=self.address, folder=self.folder, bed=self.bed.folder))
        (self.folder / "sshd.txt").unlink(missing_ok=True)
        self.server = self.popen([shutil.which("sshd"), "-D", "-e", "-f", settings], cwd="/", log="sshd.txt")
        deadline = time.monotonic() + WAIT_S
        while "Server listening" not in self.text("sshd.txt"):
            if self.server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: sshd does not listen: {self.text('sshd.txt')}")
            time.sleep(0.02)

    def stop(self, process: subprocess.Popen | None) -> None:
        if process:
            process.kill()
            process.wait(WAIT_S)
            for pipe in process.stdout, process.stderr:
                if pipe:
                    pipe.close()

    def close(self) -> None:
        for process in [self.wire, *self.started]:
            self.stop(process)
        try:
            remove(self.space)
        finally:
            self.stop(self.keeper)


class Hosts:
    """`with Hosts(n) as bed:` is a sequence of n hosts; everything of them is gone after it.

    private  paths where each host has its own folder (disks that nodes do not share)
    folder   for logs and keys; kept when given, else a temporary one that is removed
    sshd     whether every host starts with one
    """

    def __init__(self, n: int, *, private=(), folder: Path | None = None, sshd: bool = False):
        assert 2 <= n <= 4, n
        self.name, self.temporary = f"zf{os.getpid()}-{next(BEDS)}", folder is None
        self.switch = f"{self.name}-s"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-") if folder is None else folder).absolute()
        self.ssh_config = self.folder / "ssh_config"
        self.paths, self.with_sshd, self.netem = list(private), sshd, False
        self.made: list[Path] = []  # folders to mount private ones on
        self.hosts = [Host(self, rank) for rank in range(n)]

    def __getitem__(self, rank: int) -> Host:
        return self.hosts[rank]

    def __len__(self) -> int:
        return len(self.hosts)

    def __enter__(self) -> "Hosts":
        try:
            self.build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def build(self) -> None:
        remove_abandoned()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ssh_config.write_text(SSH.format(bed=self.folder))
        command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(self.folder / "client_key"))
        command("ip", "netns", "add", self.switch)
        # STP off and no learning of multicast: a port forwards as soon as it is up.
        command("ip", "-n", self.switch, "link", "add", "name", "bridge", "type", "bridge", "mcast_snooping", "0")
        command("ip", "-n", self.switch, "link", "set", "bridge", "up")
        tried = ["tc", "-n", self.switch, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        self.netem = subprocess.run(tried, capture_output=True).returncode == 0
        for host in self.hosts:
            host.build()
            for path in self.paths:
                host.private(path)
            if self.with_sshd:
                host.sshd()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # each is tried, whatever befalls the others
            if self.temporary:
                stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            for path in self.made:
                stack.callback(self.remove_empty, path)
            stack.callback(remove, self.switch)
            for host in self.hosts:
                stack.callback(host.close)

    def remove_empty(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            folder.rmdir()
