"""Options and checks of one node among several: rank, address, interface, ports."""

import argparse
import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.base.health import INFINIBAND


def port_of(text: str) -> int:
    """Return the given port, or a free one for "". Raises: UserError for an invalid port or one in use."""
    if not text:
        return distributed.free_port()
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise UserError(f"PORT={text}: must be a number from 1 to 65535.")
    if not (distributed.port_is_free(int(text)) and distributed.hold_port(int(text))):
        raise UserError(f"PORT={text} is in use on this machine; name another, or none for a free one.")
    return int(text)


JOIN_TIMEOUT = "600"  # seconds, as torchrun's: nodes that import from one file server differ by minutes

SITE_CONF = Path("/etc/nccl.conf")  # read by NCCL, after ~/.nccl.conf or NCCL_CONF_FILE

LOST_SECONDS = "ZEROFIT_LOST_SECONDS"  # environment variable: without a heartbeat, after which a node is lost

PORT = 29500  # default port of the agents' store; the ranks use the next one


@dataclass
class Place:
    """This node's place in the job.

    least, most: nodes of the job (equal if not elastic); rank: of this node; address, port: of node 0's store;
    timeout: seconds that nodes wait for each other at the start; interface: "" for the one towards the others; lost:
    seconds without a heartbeat after which a node is lost, torch's default.
    """

    least: int
    most: int
    rank: int
    address: str
    port: int
    timeout: float
    interface: str = ""
    lost: float = 15.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that place this node in a job."""
    parser.add_argument("--nnodes", default="1", help="nodes of the job, or MIN:MAX of an elastic one")
    parser.add_argument("--node_rank", default="", help="rank of this node; 0 is the node of --master_addr")
    parser.add_argument("--master_addr", default="", help="name or address of node 0, as the others reach it")
    add_meeting(parser)


def add_meeting(parser: argparse.ArgumentParser) -> None:
    """Add the rendezvous options that are equal on all nodes."""
    parser.add_argument("--join_timeout", default=JOIN_TIMEOUT, help="seconds that the nodes wait for each other")
    parser.add_argument("--interface", default="", help="network interface between the nodes (default: the one that "
                                                        "leads there)")  # fmt: skip


def count(text: str) -> tuple[int, int] | None:
    """Parse "4" or "1:4" into (least, most) nodes; None for any other text."""
    least, _, most = text.partition(":")
    most = most or least
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        return None
    return int(least), int(most)


def of(given) -> Place | None:
    """Return this node's place from the parsed options; None for a job on one node.

    Raises: UserError for invalid or contradictory values.
    """
    if (bounds := count(given.nnodes)) is None:
        raise UserError(f"NODES={given.nnodes}: must be a number of nodes, or MIN:MAX for an elastic job.")
    least, most = bounds
    if most == 1:
        return None
    if not given.node_rank.isdigit() or int(given.node_rank) >= most:
        raise UserError(
            f"NODE_RANK={given.node_rank or '(not given)'}: with NODES={given.nnodes} each node needs its own, from "
            f"0 to {most - 1}; 0 is the node that MASTER_ADDR names."
        )
    if not given.master_addr:
        raise UserError(f"MASTER_ADDR is not given: with NODES={given.nnodes} name the node with NODE_RANK=0 to all "
                        "of them.")  # fmt: skip
    port = given.port or str(PORT)
    if not port.isdigit() or not 1 <= int(port) < 65535:
        raise UserError(f"PORT={port}: must be a number from 1 to 65534 (the next port is used too), the same on all "
                        "nodes.")  # fmt: skip
    timeout = seconds(given.join_timeout)
    lost = seconds(os.environ.get(LOST_SECONDS) or str(Place.lost), LOST_SECONDS)
    if given.interface and given.interface not in interfaces():
        raise UserError(f"--interface {given.interface}: this machine has {', '.join(interfaces())}.")
    return Place(least, most, int(given.node_rank), given.master_addr, int(port), timeout, given.interface, lost)


def seconds(text: str, name: str = "--join_timeout") -> float:
    """Return an option or variable as a number of seconds. Raises: UserError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"{name} {text}: must be a number of seconds above 0.")
    return number


def check_ports(place: Place) -> None:
    """Check that node 0's two ports are free on this node. Raises: UserError."""
    for needed in (place.port, place.port + 1):
        if not distributed.port_is_free(needed, ""):
            after = "" if needed == place.port else f" (PORT={place.port} and the next one are needed)"
            raise UserError(f"PORT={needed} is in use on this machine{after}; name another one on all nodes.")


def own_address(name: str, port: int) -> str:
    """Return MASTER_ADDR's address if it is one of this node's; "" if node 0 must listen on all of them.

    That is so if the name has several addresses, or resolves differently here than elsewhere: to localhost or
    127.0.1.1 by this node's /etc/hosts, or to a Kubernetes service.
    """
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)}
    except OSError:
        return ""
    address = addresses.pop()
    if addresses or (name != address and (address.startswith("127.") or address == "::1")):
        return ""
    return (
        address
        if address.startswith("127.") or any(address in of_interface for of_interface in interfaces().values())
        else ""
    )


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address only. Raises: UserError if it cannot be opened."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UserError(
            f"PORT={port}: cannot be opened on {address}: {error.strerror}; name another one on all nodes."
        ) from None
    return listener


def interfaces() -> dict[str, list[str]]:
    """Return {network interface: its IPv4 and IPv6 addresses}."""
    import psutil

    internet = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in internet]
        for name, entries in psutil.net_if_addrs().items()
    }


def interface_towards(address: str, port: int) -> str:
    """Return the network interface on the route to an address; "" if there is none."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as udp:
            udp.connect((address, port))  # UDP: nothing is sent
            own_ip = udp.getsockname()[0]
    except OSError:
        return ""
    return next((name for name, addresses in interfaces().items() if own_ip in addresses), "")


def interface_variables(interface: str, address: str, port: int) -> dict[str, str]:
    """Return the interface variables of gloo and NCCL; without --interface, set ones are not changed.

    With InfiniBand or RoCE NCCL chooses, as it can use several network cards.

    Args: interface: the value of --interface, "": none; address: of another node.
    """
    name = interface or interface_towards(address, port)
    if not name:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": name} | ({"NCCL_SOCKET_IFNAME": f"={name}"} if name != "lo" else {})
    if interface:
        return variables
    if _nccl_is_configured() or any(INFINIBAND.glob("*")):
        variables.pop("NCCL_SOCKET_IFNAME", None)
    return {key: value for key, value in variables.items() if key not in os.environ}


def _nccl_is_configured() -> bool:
    """Return whether a file that NCCL reads names its interface; the environment would override it."""
    own = os.environ.get("NCCL_CONF_FILE") or Path.home() / ".nccl.conf"
    for file in (own, SITE_CONF):
        with contextlib.suppress(OSError):
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
            if any(line.startswith("NCCL_SOCKET_IFNAME=") for line in lines):
                return True
    return False


def reach(place: Place) -> str:
    """Wait until node 0's port accepts a connection; return this node's own address on that route.

    Raises: UserError after --join_timeout, with the last network error.
    """
    deadline, last_print, reason = time.monotonic() + place.timeout, time.monotonic(), "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((place.address, place.port), timeout=min(5.0, remaining)) as connection:
                return connection.getsockname()[0]
        except socket.gaierror as error:  # a pod's DNS name can appear late
            reason = f"this machine cannot resolve that name: {error.strerror}"
        except OSError as error:
            reason = (error.strerror or str(error) or "no answer").lower()
        if time.monotonic() - last_print > 10:
            last_print = time.monotonic()
            print(f"waiting for node 0 at {place.address}:{place.port} ({reason})", flush=True)
        time.sleep(0.5)
    raise UserError(
        f"MASTER_ADDR={place.address} PORT={place.port}: cannot be reached from {socket.gethostname()} within "
        f"{place.timeout:.0f} s ({reason}); start the same command there with NODE_RANK=0, and see that no firewall is "
        "between."
    )
