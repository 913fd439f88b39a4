"""Options and checks for one node of a multi-node job: rank, address, interface, ports."""

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
        raise UserError(f"PORT={text} is in use on this machine; set another port, or none to use a free one.")
    return int(text)


JOIN_TIMEOUT = "600"  # seconds; nodes that import from one file server can differ by minutes

SITE_CONF = Path("/etc/nccl.conf")  # read by NCCL, after ~/.nccl.conf or NCCL_CONF_FILE

LOST_SECONDS = "ZEROFIT_LOST_SECONDS"  # environment variable: seconds without a heartbeat after which a node is lost

PORT = 29500  # default port of the agents' store; the ranks use the next port


@dataclass
class NodePlacement:
    """Placement of this node in a multi-node job.

    least, most: number of nodes (equal if not elastic); rank: this node's rank; address, port: node 0's store;
    timeout: seconds to wait for other nodes at the start; interface: "" for the interface on the route to them; lost:
    seconds without a heartbeat after which a node is lost (torch's default).
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
    """Add the options of a node's placement."""
    parser.add_argument("--nnodes", default="1", help="number of nodes, or MIN:MAX for an elastic job")
    parser.add_argument("--node_rank", default="", help="rank of this node; --master_addr is rank 0")
    parser.add_argument("--master_addr", default="", help="name or address of node 0 that the other nodes can reach")
    add_rendezvous_options(parser)


def add_rendezvous_options(parser: argparse.ArgumentParser) -> None:
    """Add the rendezvous options with the same values on all nodes."""
    parser.add_argument("--join_timeout", default=JOIN_TIMEOUT, help="seconds to wait for the other nodes")
    parser.add_argument("--interface", default="", help="network interface between the nodes (default: "
                                                        "from the route)")  # fmt: skip


def parse_count(text: str) -> tuple[int, int] | None:
    """Parse "4" or "1:4" into (least, most) nodes; return None for any other text."""
    least, _, most = text.partition(":")
    most = most or least
    if not (least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most)):
        return None
    return int(least), int(most)


def placement(args) -> NodePlacement | None:
    """Return this node's placement from the parsed options, or None for a single node.

    Raises: UserError for invalid or contradictory values.
    """
    if (bounds := parse_count(args.nnodes)) is None:
        raise UserError(f"NODES={args.nnodes}: must be a number of nodes, or MIN:MAX for an elastic job.")
    least, most = bounds
    if most == 1:
        return None
    if not args.node_rank.isdigit() or int(args.node_rank) >= most:
        raise UserError(
            f"NODE_RANK={args.node_rank or '(not set)'}: NODES={args.nnodes} needs a different NODE_RANK on each node, "
            f"from 0 to {most - 1}; MASTER_ADDR is the node with 0."
        )
    if not args.master_addr:
        raise UserError(f"MASTER_ADDR is not set: NODES={args.nnodes} needs the address of the node with NODE_RANK=0 "
                        "on all nodes.")  # fmt: skip
    port = args.port or str(PORT)
    if not port.isdigit() or not 1 <= int(port) < 65535:
        raise UserError(f"PORT={port}: must be a number from 1 to 65534 (the next port is also used), the same on all "
                        "nodes.")  # fmt: skip
    timeout = seconds(args.join_timeout)
    lost = seconds(os.environ.get(LOST_SECONDS) or str(NodePlacement.lost), LOST_SECONDS)
    if args.interface and args.interface not in interfaces():
        raise UserError(f"--interface {args.interface}: no such interface; this machine has {', '.join(interfaces())}.")
    return NodePlacement(least, most, int(args.node_rank), args.master_addr, int(port), timeout, args.interface, lost)


def seconds(text: str, name: str = "--join_timeout") -> float:
    """Parse seconds from an option or variable. Raises: UserError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"{name} {text}: must be a number of seconds above 0.")
    return number


def check_ports(place: NodePlacement) -> None:
    """Check that node 0's two ports are free on this node. Raises: UserError."""
    for port in (place.port, place.port + 1):
        if not distributed.port_is_free(port, ""):
            note = "" if port == place.port else f" (PORT={place.port} needs the next port too)"
            raise UserError(f"PORT={port} is in use on this machine{note}; set another port on all nodes.")


def local_address(name: str, port: int) -> str:
    """Return MASTER_ADDR's address if this node has it, or "" if node 0 must listen on all addresses.

    It must if the name has several addresses, or resolves differently on this node: to localhost or 127.0.1.1 by
    /etc/hosts, or to a Kubernetes service.
    """
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)}
    except OSError:
        return ""
    address = addresses.pop()
    if addresses or (name != address and (address.startswith("127.") or address == "::1")):
        return ""
    return address if address.startswith("127.") or any(address in local for local in interfaces().values()) else ""


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on this address only. Raises: UserError."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UserError(
            f"PORT={port}: cannot be opened on {address}: {error.strerror}; set another port on all nodes."
        ) from None
    return listener


def interfaces() -> dict[str, list[str]]:
    """Return {network interface: IPv4 and IPv6 addresses}."""
    import psutil

    internet = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in internet]
        for name, entries in psutil.net_if_addrs().items()
    }


def interface_towards(address: str, port: int) -> str:
    """Return the network interface on the route to an address, or "" without a route."""
    try:
        family = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as udp:
            udp.connect((address, port))  # UDP: nothing is sent
            local_ip = udp.getsockname()[0]
    except OSError:
        return ""
    return next((name for name, addresses in interfaces().items() if local_ip in addresses), "")


def interface_variables(interface: str, address: str, port: int) -> dict[str, str]:
    """Return the interface variables of gloo and NCCL. Without --interface, keep variables that are already set.

    With InfiniBand or RoCE, leave the choice to NCCL, which can use several network cards.

    Args: interface: value of --interface, "" if not set; address, port: another node.
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
    """Return whether an NCCL config file sets the interface, which the environment would override."""
    user_file = os.environ.get("NCCL_CONF_FILE") or Path.home() / ".nccl.conf"
    for file in (user_file, SITE_CONF):
        with contextlib.suppress(OSError):
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
            if any(line.startswith("NCCL_SOCKET_IFNAME=") for line in lines):
                return True
    return False


def wait_for_node_0(place: NodePlacement) -> str:
    """Wait until node 0's port accepts a connection; return this node's address on that route.

    Raises: UserError with the last network error after --join_timeout.
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
        f"MASTER_ADDR={place.address} PORT={place.port}: no connection from {socket.gethostname()} within "
        f"{place.timeout:.0f} s ({reason}); start the same command there with NODE_RANK=0, and check for a firewall "
        "between the nodes."
    )
