"""`make doctor NODES=4`: check what matters when this machine is one node of several."""

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from zerofit import distributed
from zerofit.launch.cluster import node_options


@dataclass
class Finding:
    """level: "ok", "warn" or "fail"; fix: the command or setting that mends it."""

    name: str
    level: str
    text: str
    fix: str = ""


# File systems that several machines can have at one place.
SHARED = (
    "nfs",
    "nfs4",
    "lustre",
    "beegfs",
    "gpfs",
    "ceph",
    "cifs",
    "smb3",
    "afs",
    "glusterfs",
    "9p",
    "wekafs",
    "pvfs2",
    "orangefs",
)

STARTERS = {"sbatch": "make slurm", "ssh": "HOSTS=hostfile", "kubectl": "zerofit kubernetes"}


def check(count: int, out: Path, port: str) -> list[Finding]:
    """Args: count: machines of the job; out: where its runs are to be; port: of the rendezvous, "": the usual one."""
    return [*interfaces(), *names(), *ports(port), *shared(out, count), *starters()]


def interfaces() -> list[Finding]:
    """What the machines can talk over, and whether the variables that choose it name one of them."""
    here = node_options.interfaces()
    found = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        asked = [n.lstrip("=^") for n in os.environ.get(name, "").split(",") if n and not n.startswith("^")]
        if missing := [n for n in asked if not any(i.startswith(n) for i in here)]:
            found.append(Finding("interface", "fail", f"{name}={os.environ[name]}: there is no {missing[0]} here, only "
                                 f"{', '.join(here)}", f"unset {name}, or name one of these"))  # fmt: skip
    outward = {
        n: a
        for n, addresses in here.items()
        for a in addresses[:1]
        if n != "lo" and not a.startswith(("127.", "169.254."))
    }
    if not outward:
        return [
            *found,
            Finding("interface", "fail", "this machine has no network but itself", "bring an interface up (ip link)"),
        ]
    fast = infiniband()
    text = ", ".join(f"{name} {address}" for name, address in outward.items())
    return [
        *found,
        Finding("interface", "ok", f"{text}; {'InfiniBand or RoCE ' + ', '.join(fast) if fast else 'no InfiniBand'}"),
    ]


def infiniband() -> list[str]:
    """The names of this machine's InfiniBand and RoCE devices."""
    devices = Path("/sys/class/infiniband")
    return sorted(device.name for device in devices.iterdir()) if devices.is_dir() else []


def names() -> list[Finding]:
    """Whether this machine's name leads others to it."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return [
            Finding("name", "warn", f"{name} is no name that can be looked up", "MASTER_ADDR by address, not by name")
        ]
    if address.startswith("127."):
        return [Finding("name", "warn", f"{name} is {address} here: the others would look for it on themselves",
                        "MASTER_ADDR by address, or mend /etc/hosts")]  # fmt: skip
    return [Finding("name", "ok", f"{name} is {address}")]


def ports(text: str) -> list[Finding]:
    """Whether node 0 could listen here."""
    first = int(text) if text.isdigit() else node_options.PORT
    taken = [str(p) for p in (first, first + 1) if not distributed.port_is_free(p, "")]
    if taken:
        return [Finding("ports", "warn", f"{' and '.join(taken)} in use: this machine could not be node 0 with PORT={first}",
                        "another PORT, the same on all nodes")]  # fmt: skip
    return [Finding("ports", "ok", f"{first} and {first + 1} are free; the other nodes must reach them on node 0")]


def shared(folder: Path, count: int) -> list[Finding]:
    """Whether the run folder is on a disk that the other machines can see."""
    import psutil

    from zerofit.paths import nearest_existing

    near = nearest_existing(folder.absolute())
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda m: len(m.mountpoint))
    of_it = [m for m in mounts if near.is_relative_to(m.mountpoint)]
    kind = of_it[-1].fstype if of_it else "an unknown file system"
    if kind in SHARED or kind.startswith("fuse."):
        return [Finding("run folder", "ok", f"{near} is on {kind}, which several machines can share")]
    return [Finding("run folder", "warn", f"{near} is on {kind}: {count} machines would each have their own",
                    "OUT on a disk that all machines mount at the same place (checked again when ranks start)")]  # fmt: skip


def starters() -> list[Finding]:
    here = [f"{tool} ({use})" for tool, use in STARTERS.items() if shutil.which(tool)]
    return [
        Finding("starting", "ok", f"{', '.join([*here, 'one line on each machine (NODES= NODE_RANK= MASTER_ADDR=)'])}")
    ]
