"""Read the state of this node's GPUs and InfiniBand ports, and report how it has degraded."""

from dataclasses import dataclass
from pathlib import Path

from zerofit.base import hardware

FIELDS = ("index", "name", "ecc.errors.uncorrected.volatile.total")

INFINIBAND = Path("/sys/class/infiniband")  # one entry per InfiniBand or RoCE device


@dataclass(frozen=True)
class Health:
    """The state of a node's GPUs and ports."""

    gpus: dict[str, int]  # GPU -> uncorrected memory errors since the driver was loaded
    ports: frozenset[str]  # InfiniBand and RoCE ports that are up


def read() -> Health:
    """Return the state of this node's GPUs and ports."""
    counts = {f"GPU {row['index']} ({row['name']})": row[FIELDS[2]] for row in hardware.nvidia_smi(FIELDS)}
    states = {file: file.read_text(encoding="utf-8") for file in INFINIBAND.glob("*/ports/*/state")}
    return Health(
        {gpu: int(count) if count.isdigit() else 0 for gpu, count in counts.items()},  # [N/A]: without error correction
        frozenset(f"{file.parts[-4]} port {file.parts[-2]}" for file, state in states.items() if "ACTIVE" in state),
    )


def degradations(before: Health, now: Health) -> str:
    """Return the degradations as a clause; "" without any."""
    missing = [f"{gpu} no longer responds" for gpu in before.gpus if gpu not in now.gpus]
    missing = ["nvidia-smi no longer responds"] if len(missing) > 1 and not now.gpus else missing
    errors = {gpu: count - before.gpus[gpu] for gpu, count in now.gpus.items() if gpu in before.gpus}
    new = {gpu: count for gpu, count in errors.items() if count > 0}
    faulty = [f"{gpu} has {count} new uncorrected memory errors" for gpu, count in new.items()]
    down = [f"{port} is down" for port in sorted(before.ports - now.ports)]
    return ", ".join([*missing, *faulty, *down])
