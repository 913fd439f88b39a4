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
    """The result of one check. level: "ok", "warn" or "fail"; fix: a command or setting."""

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

# {command on PATH: how it starts several nodes}
STARTERS = {"sbatch": "make slurm", "ssh": "HOSTS=hostfile", "kubectl": "zerofit kubernetes"}


def check_node(count: int, out: Path, port: str) -> list[Finding]:
    """Run all checks of this file.

    Args: count: number of nodes; out: parent folder of the runs; port: rendezvous port, "" for the default.
    """
    return [*interfaces(), host_name(), ports(port), shared_folder(out, count), launch_methods()]


def interfaces() -> Iterator[Finding]:
    """List the network interfaces; fail if NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME matches none."""
    present = node_options.interfaces()
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        names = [n.lstrip("=^") for n in os.environ.get(name, "").split(",") if n and not n.startswith("^")]
        if missing := [n for n in names if not any(i.startswith(n) for i in present)]:
            text = f"{name}={os.environ[name]}: no interface {missing[0]} on this machine, only {', '.join(present)}"
            yield fail("interface", text, f"unset {name}, or use one of these interfaces")
    external = {
        n: address
        for n, addresses in present.items()
        for address in addresses[:1]
        if n != "lo" and not address.startswith(("127.", "169.254."))
    }
    if not external:
        yield fail("interface", "no network interface except loopback", "enable an interface (ip link set NAME up)")
        return
    fast = f"InfiniBand or RoCE {', '.join(infiniband())}" if infiniband() else "no InfiniBand"
    yield ok("interface", f"{', '.join(f'{name} {address}' for name, address in external.items())}; {fast}")


def infiniband() -> list[str]:
    """Return the names of this node's InfiniBand and RoCE devices."""
    devices = INFINIBAND
    return sorted(device.name for device in devices.iterdir()) if devices.is_dir() else []


def host_name() -> Finding:
    """Warn if this node's host name does not resolve, or resolves to a loopback address."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return warn("name", f"{name} cannot be resolved", "set MASTER_ADDR to an address instead of a name")
    if address.startswith("127."):
        text = f"{name} resolves to {address}: other nodes would connect to themselves"
        return warn("name", text, "set MASTER_ADDR to an address, or fix /etc/hosts")
    return ok("name", f"{name} resolves to {address}")


def ports(text: str) -> Finding:
    """Check that the two ports that node 0 needs are free on this node."""
    first = int(text) if text.isdigit() else node_options.PORT
    if taken := [str(p) for p in (first, first + 1) if not distributed.port_is_free(p, "")]:
        text = f"{' and '.join(taken)} in use: this machine cannot be node 0 with PORT={first}"
        return warn("ports", text, "set another PORT, the same on all nodes")
    return ok("ports", f"{first} and {first + 1} are free; on node 0, other nodes must be able to reach them")


def shared_folder(folder: Path, count: int) -> Finding:
    """Check by file system type whether other nodes can see the run folder. count: number of nodes."""
    import psutil

    parent = nearest_existing(folder.absolute())
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda m: len(m.mountpoint))
    candidates = [m for m in mounts if parent.is_relative_to(m.mountpoint)]
    kind = candidates[-1].fstype if candidates else "an unknown file system"
    if kind in SHARED or kind.startswith("fuse."):
        return ok("run folder", f"{parent} is on {kind}, which nodes can share")
    text = f"{parent} is on {kind}: each of the {count} nodes would see a different folder"
    return warn(
        "run folder", text, "set OUT to a disk that all nodes mount at the same path (checked again at the start)"
    )


def launch_methods() -> Finding:
    """List the available ways to start several nodes."""
    methods = [f"{tool} ({use})" for tool, use in STARTERS.items() if shutil.which(tool)]
    return ok("starting", f"{', '.join([*methods, 'one command on each node (NODES= NODE_RANK= MASTER_ADDR=)'])}")
