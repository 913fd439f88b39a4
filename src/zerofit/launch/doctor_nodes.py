"""`make doctor NODES=4`: check this machine as one node of several."""

import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerofit.base import distributed
from zerofit.base.health import INFINIBAND
from zerofit.base.paths import nearest_existing
from zerofit.launch import node_options


@dataclass
class Finding:
    """The result of one check. level: "ok", "warn" or "fail"; fix: the command or setting that repairs it."""

    name: str
    level: str
    text: str
    fix: str = ""


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def warn(name: str, text: str, fix: str) -> Finding:
    return Finding(name, "warn", text, fix)


def fail(name: str, text: str, fix: str) -> Finding:
    return Finding(name, "fail", text, fix)


# File systems that several nodes can mount at the same path.
SHARED = frozenset("nfs nfs4 lustre beegfs gpfs ceph cifs smb3 afs glusterfs 9p wekafs pvfs2 orangefs".split())

# {command on PATH: the way to start several nodes that needs it}
STARTERS = {"sbatch": "make slurm", "ssh": "HOSTS=hostfile", "kubectl": "zerofit kubernetes"}


def check(count: int, out: Path, port: str) -> list[Finding]:
    """Run every check of this file.

    Args: count: nodes of the job; out: folder of its runs; port: of the rendezvous, "" for the default one.
    """
    return [*interfaces(), name_of_node(), ports(port), shared(out, count), starters()]


def interfaces() -> Iterator[Finding]:
    """List the network interfaces; fail if NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME matches none of them."""
    present = node_options.interfaces()
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        names = [n.lstrip("=^") for n in os.environ.get(name, "").split(",") if n and not n.startswith("^")]
        if missing := [n for n in names if not any(i.startswith(n) for i in present)]:
            text = f"{name}={os.environ[name]}: there is no {missing[0]} here, only {', '.join(present)}"
            yield fail("interface", text, f"unset {name}, or name one of these")
    outward = {
        n: address
        for n, addresses in present.items()
        for address in addresses[:1]
        if n != "lo" and not address.startswith(("127.", "169.254."))
    }
    if not outward:
        yield fail("interface", "no network interface except loopback", "enable one (ip link set NAME up)")
        return
    fast = f"InfiniBand or RoCE {', '.join(infiniband())}" if infiniband() else "no InfiniBand"
    yield ok("interface", f"{', '.join(f'{name} {address}' for name, address in outward.items())}; {fast}")


def infiniband() -> list[str]:
    """Return the names of this node's InfiniBand and RoCE devices."""
    devices = INFINIBAND
    return sorted(device.name for device in devices.iterdir()) if devices.is_dir() else []


def name_of_node() -> Finding:
    """Warn if this node's host name cannot be looked up, or resolves to a loopback address."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return warn("name", f"{name} cannot be resolved", "MASTER_ADDR by address, not by name")
    if address.startswith("127."):
        text = f"{name} is {address} here: other nodes would connect to themselves"
        return warn("name", text, "MASTER_ADDR by address, or fix /etc/hosts")
    return ok("name", f"{name} is {address}")


def ports(text: str) -> Finding:
    """Check that the two ports of node 0 are free on this node."""
    first = int(text) if text.isdigit() else node_options.PORT
    if taken := [str(p) for p in (first, first + 1) if not distributed.port_is_free(p, "")]:
        text = f"{' and '.join(taken)} in use: this machine could not be node 0 with PORT={first}"
        return warn("ports", text, "another PORT, the same on all nodes")
    return ok("ports", f"{first} and {first + 1} are free; the other nodes must reach them on node 0")


def shared(folder: Path, count: int) -> Finding:
    """Check by file system type whether other nodes can see the run folder. count: nodes of the job."""
    import psutil

    parent = nearest_existing(folder.absolute())
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda m: len(m.mountpoint))
    candidates = [m for m in mounts if parent.is_relative_to(m.mountpoint)]
    kind = candidates[-1].fstype if candidates else "an unknown file system"
    if kind in SHARED or kind.startswith("fuse."):
        return ok("run folder", f"{parent} is on {kind}, which several nodes can share")
    text = f"{parent} is on {kind}: {count} nodes would each have their own"
    return warn("run folder", text, "OUT on a disk that all nodes mount at the same place (checked again at the start)")


def starters() -> Finding:
    """List the ways to start several nodes that this machine has."""
    ways = [f"{tool} ({use})" for tool, use in STARTERS.items() if shutil.which(tool)]
    return ok("starting", f"{', '.join([*ways, 'one line on each node (NODES= NODE_RANK= MASTER_ADDR=)'])}")
