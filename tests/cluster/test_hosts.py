"""The hosts themselves: what the cluster tests take for granted."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from .hosts import ETC, INTERFACE, NAMESPACES, Hosts

pytestmark = pytest.mark.cluster
PY = sys.executable

CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""
LISTEN = """
import socket, sys, time
server = socket.create_server(("", 4000))
print("listening", flush=True)
while True:
    peer, address = server.accept()
    print("from", address[0], flush=True)
    while data := peer.recv(1 << 16):
        peer.sendall(data)
    peer.close()
"""
ECHO = """
import hashlib, os, socket, sys, threading, time
peer, data, got = socket.create_connection((sys.argv[1], 4000)), os.urandom(int(sys.argv[2])), b""
start = time.monotonic()
threading.Thread(target=peer.sendall, args=(data,)).start()
while len(got) < len(data):
    got += peer.recv(1 << 20)
print(time.monotonic() - start, hashlib.sha256(got).digest() == hashlib.sha256(data).digest())
"""


def until(condition, what: str, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return value


def listener(host):
    process = host.popen([PY, "-c", LISTEN], log="listen.txt")
    until(lambda: "listening" in host.text("listen.txt"), host.text("listen.txt"))
    return process


def connect(host, address: str, port: int = 4000, timeout: float = 3) -> str:
    return host.check([PY, "-c", CONNECT, address, port, timeout]).strip()


def traces(bed: Hosts) -> list[str]:
    """What of the bed can be seen from outside: namespaces, mounts, processes, folders."""
    seen = [str(path) for place in (NAMESPACES, ETC) for path in place.glob(f"{bed.name}-*")]
    seen += [line for line in Path("/proc/self/mounts").read_text().splitlines() if bed.name in line]
    seen += [
        words
        for process in psutil.process_iter(["cmdline"])
        if bed.name in (words := " ".join(process.info["cmdline"] or []))
    ]
    return seen + [str(bed.folder)] * bed.folder.exists()


def test_names_addresses_and_nothing_else(hosts):
    bed = hosts(4)
    for host in bed:
        assert host.check(["hostname"]) == f"{host.name}\n"
        assert f" {host.address}/24 " in host.check(["ip", "-4", "address", "show", host.interface])
        links = host.check(["ip", "-br", "link"])
        assert sorted(line.split()[0].split("@")[0] for line in links.splitlines()) == [INTERFACE, "lo"]
        assert host.check(["ls", "/sys/class/net"]).split() == [INTERFACE, "lo"]
        assert connect(host, "10.9.9.9") == "OSError"  # no way out
        for other in bed:
            assert host.check(["getent", "hosts", other.name]).split() == [other.address, other.name]
    assert {host.address for host in bed} == {"10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.4"}
    assert socket.gethostname() not in [host.name for host in bed]
    assert "10.77.0" not in Path("/etc/hosts").read_text()


def test_every_host_reaches_every_other(hosts):
    bed = hosts(3)
    for host in bed:
        listener(host)
    for host in bed:
        for other in bed:
            assert connect(host, other.name) == "connected"
    for host in bed:
        assert {f"from {other.address}" for other in bed if other is not host} <= set(
            host.text("listen.txt").splitlines()
        )
    assert connect(bed[0], bed[1].name, 4001) == "ConnectionRefusedError"


def test_what_hosts_share(hosts, tmp_path):
    shared, private = tmp_path / "shared", tmp_path / "disk"
    shared.mkdir()
    first, second = hosts(2, private=[private])
    for host in (first, second):
        host.check(["sh", "-c", f"echo {host.name} | tee {private}/name /dev/shm/name > {shared}/{host.name}"])
    assert sorted(path.name for path in shared.iterdir()) == ["host0", "host1"]
    assert list(private.iterdir()) == [] and not Path("/dev/shm/name").exists()
    for host in (first, second):
        assert host.check(["cat", private / "name", "/dev/shm/name"]) == f"{host.name}\n{host.name}\n"
        assert [path.read_text() for path in host.folder.glob("private/*/name")] == [f"{host.name}\n"]


def test_a_cut_link_is_silence(hosts):
    first, second, third = hosts(3)
    for host in (first, second, third):
        listener(host)
    second.cut()
    assert connect(first, second.name) == connect(second, first.name) == "TimeoutError"
    assert connect(first, third.name) == connect(second, second.name) == "connected"
    assert " state UP " in second.check(["ip", "link", "show", INTERFACE])
    second.mend()
    assert connect(first, second.name, timeout=30) == connect(second, first.name, timeout=30) == "connected"


@pytest.mark.parametrize("by", ["netem", "wire"])
def test_delay_and_loss(hosts, by):
    first, second = hosts(2)
    if by == "netem" and not first.bed.netem:
        pytest.skip("this kernel lacks tc netem (CONFIG_NET_SCH_NETEM, module sch_netem); wire.py is used instead")
    listener(first)

    def echo(size: int) -> float:
        seconds, same = second.check([PY, "-c", ECHO, "host0", size], timeout=120).split()
        assert same == "True"
        return float(seconds)

    second.slow(delay_ms=150, by=by)
    assert echo(1) >= 0.3
    second.slow(delay_ms=1, loss_percent=5, by=by)
    echo(1 << 20)
    second.slow(loss_percent=100, by=by)
    assert connect(second, "host0") == connect(first, "host1") == "TimeoutError"
    second.slow(delay_ms=1, by=by)
    echo(8 << 20)  # frames of 64 KiB go through whole
    second.cut()
    assert connect(second, "host0") == "TimeoutError"
    second.mend()
    assert connect(second, "host0", timeout=30) == "connected"
    second.slow()
    echo(8 << 20)
    assert second.processes() == {}


def test_a_killed_host_runs_nothing_and_can_start_again(hosts):
    first, second = hosts(2, sshd=True)
    listener(first)
    for words in ["sleep 1000"], ["setsid sleep 1001 & sleep 1002"], ["(trap '' TERM HUP INT; sleep 1003) & wait"]:
        second.popen(["sh", "-c", *words])
    until(lambda: len(second.processes()) >= 5, second.processes())
    second.kill()
    assert second.processes() == {}
    assert "listen" in " ".join(first.processes().values())
    assert connect(first, "host1", 22) == "ConnectionRefusedError"
    second.sshd()
    assert first.check(["ssh", "host1", "hostname"]) == "host1\n"


def test_ssh_and_pdsh(hosts):
    home = Path.home() / ".ssh"
    before = {path: path.stat().st_mtime_ns for path in (home, *home.rglob("*")) if path.exists()}
    first, second, third = bed = hosts(3, sshd=True)
    for options in [], ["-F", bed.ssh_config]:
        name, source, _, target, port = first.check(
            ["ssh", *options, "host1", "hostname; echo $SSH_CONNECTION"]
        ).split()
        assert (name, source, target, port) == ("host1", first.address, second.address, "22")
    said = first.check(["pdsh", "-R", "ssh", "-w", "host[0-2]", "hostname"])
    assert sorted(said.splitlines()) == ["host0: host0", "host1: host1", "host2: host2"]
    third.kill()
    assert third.run(["ssh", "host0", "hostname"]).stdout == "host0\n"
    refused = first.run(["ssh", "host2", "true"])
    assert refused.returncode == 255 and "refused" in refused.stderr
    assert {path: path.stat().st_mtime_ns for path in (home, *home.rglob("*")) if path.exists()} == before
    until(lambda: all(host.processes() == {} for host in bed), [host.processes() for host in bed])


@pytest.mark.parametrize("how", ["end", "exception", "failed start"])
def test_nothing_is_left(namespaces, how):
    bed, ran = Hosts(2, sshd=True, private=["/proc/no"] if how == "failed start" else []), False
    try:
        with bed as (first, second):
            ran = True
            processes = [host.popen(["sh", "-c", "setsid sleep 1000 & sleep 1000"]) for host in (first, second)]
            first.slow(delay_ms=5)
            until(lambda: len(second.processes()) == 3, second.processes())
            assert len(traces(bed)) > 5
            if how == "exception":
                raise KeyError("a test fails")
    except (KeyError, OSError):
        assert how != "end"
    assert ran == (how != "failed start") and traces(bed) == []
    assert not ran or all(process.returncode == -9 for process in processes)


def test_a_killed_test_process_is_cleaned_up_after(namespaces, tmp_path):
    script = (
        f"import os, sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from cluster.hosts import Hosts\n"
        "from pathlib import Path\n"
        f"bed = Hosts(2, folder=Path({str(tmp_path / 'bed')!r}))\n"
        "bed.__enter__()[0].popen(['sleep', '1000'])\n"
        "print(bed.name, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    name = subprocess.run([PY, "-c", script], capture_output=True, text=True, timeout=60).stdout.strip()
    assert len(list(NAMESPACES.glob(f"{name}-*"))) == 3
    with Hosts(2):
        assert list(NAMESPACES.glob(f"{name}-*")) == list(ETC.glob(f"{name}-*")) == []
