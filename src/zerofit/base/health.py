"""Look at this node's GPUs and InfiniBand ports, and tell what has become worse since an earlier look."""

from dataclasses import dataclass
from pathlib import Path

from zerofit.base import hardware

FIELDS = ("index", "name", "ecc.errors.uncorrected.volatile.total")

INFINIBAND = Path("/sys/class/infiniband")  # has an entry for each InfiniBand and RoCE device


@dataclass(frozen=True)
class Health:
    """What a look has found."""

    gpus: dict[str, int]  # GPU -> its memory errors that were not corrected since the driver was loaded
    ports: frozenset[str]  # InfiniBand and RoCE ports that are up


def look() -> Health:
    """Return how this node's GPUs and ports are; nothing of those that it has not."""
    counts = {f"GPU {row['index']} ({row['name']})": row[FIELDS[2]] for row in hardware.nvidia_smi(FIELDS)}
    states = {file: file.read_text(encoding="utf-8") for file in INFINIBAND.glob("*/ports/*/state")}
    return Health(
        {gpu: int(count) if count.isdigit() else 0 for gpu, count in counts.items()},  # [N/A]: no error correction
        frozenset(f"{file.parts[-4]} port {file.parts[-2]}" for file, state in states.items() if "ACTIVE" in state),
    )


def worse(before: Health, now: Health) -> str:
    """Return what has become worse, as a clause; "" if nothing has."""
    gone = [f"{gpu} does not answer any more" for gpu in before.gpus if gpu not in now.gpus]
    gone = ["nvidia-smi does not answer any more"] if len(gone) > 1 and not now.gpus else gone
    errors = {gpu: count - before.gpus[gpu] for gpu, count in now.gpus.items() if gpu in before.gpus}
    new = {gpu: count for gpu, count in errors.items() if count > 0}
    faulty = [f"{gpu} has {count} more memory errors that were not corrected" for gpu, count in new.items()]
    down = [f"{port} is down" for port in sorted(before.ports - now.ports)]
    return ", ".join([*gone, *faulty, *down])
