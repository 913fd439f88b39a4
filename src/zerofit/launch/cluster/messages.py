"""Define and validate the messages between the supervisors of a job's nodes."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

# Files of a node's ranks that its supervisor sends to node 0 (rank_status.py, launch/torchrun.py).
FILES = re.compile(r"rank[0-9]+\.json|stack[0-9]+\.txt|heartbeat[0-9]+|exits\.json")

STACK_BYTES = 100_000  # of each stack file that is sent


@dataclass(frozen=True)
class Report:
    """How a node's ranks ended."""

    code: int
    signals: list[int]  # that its supervisor received
    hung: int | None  # the rank furthest behind, if no rank made a step
    killed: bool  # its supervisor ended them
    files: dict[str, str]  # that they wrote: {name: content}


@dataclass(frozen=True)
class NodeState:
    """What each supervisor writes in a round."""

    host: str
    address: str  # of this node on the route to node 0; "" on node 0
    gpus: int
    heartbeat: int = 0  # grows with each write
    is_ready: bool = False  # it has checked its model and data
    error: str = ""  # why it leaves before the job ends
    report: Report | None = None  # once its ranks have ended


@dataclass(frozen=True)
class Begun:
    """What node 0 decides before the nodes check their model and data. decided: of next_settings.decisions."""

    decided: dict
    ranks: int


@dataclass(frozen=True)
class Order:
    """The attempt that the nodes of a round start. nodes: {node rank: its processes}; decided: as of Begun."""

    nodes: dict[int, int]
    decided: dict
    folder: str


@dataclass(frozen=True)
class RoundState:
    """What node 0 writes in a round."""

    heartbeat: int = 0  # grows with each write
    begun: Begun | None = None
    order: Order | None = None
    is_over: bool = False  # the nodes must end their ranks
    is_closed: bool = False  # the nodes must join the next round


@dataclass(frozen=True)
class End:
    """The end of the job. sentence: the cause, "" if it finished."""

    code: int
    sentence: str = field(default="")


def text(message) -> str:
    return json.dumps(asdict(message))


def read(kind: type, content: bytes):
    """Parse a message of this kind. Raises: ValueError naming the first invalid field."""
    try:
        return TypeAdapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'message'}: {first['msg']}") from None


def read_files(records: Path) -> dict[str, str]:
    """Return {name: content} of the files that a node's ranks have written into `records`."""
    files = {}
    for file in records.iterdir():
        limit = STACK_BYTES if file.suffix == ".txt" else None
        if FILES.fullmatch(file.name) and (content := file.read_bytes()[:limit]):
            files[file.name] = content.decode("latin-1")
    return files


def write_files(files: dict[str, str], records: Path) -> None:
    """Write the files of another node's ranks; names that do not match FILES are skipped."""
    for name, content in files.items():
        if not FILES.fullmatch(name):
            continue
        target = records / name
        if name == "exits.json" and target.exists():
            merged = json.loads(target.read_text()) | json.loads(content)
            target.write_text(json.dumps(merged))
        else:
            target.write_bytes(content.encode("latin-1", errors="replace"))
