"""Define, sign and check the documents that a job's supervisors exchange.

Each supervisor writes a NodeState, and node 0 writes a JobState; transport.py exchanges them.
"""

import hashlib
import hmac
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

JOB_KEY = "job"

DIGITS = hashlib.sha256().digest_size * 2  # length of the signature in front of the JSON

# Files of a node's ranks that its supervisor sends to node 0 (rank_status.py, launch/torchrun.py).
FILES = re.compile(r"rank[0-9]+\.json|stack[0-9]+\.txt|heartbeat[0-9]+|exits\.json")

STACK_BYTES = 100_000  # of each stack file that is sent


@dataclass(frozen=True)
class Progress:
    """Steps of a node's ranks. ranks: how many have made a step; step: the furthest."""

    ranks: int = 0
    step: int = 0


@dataclass(frozen=True)
class Report:
    """How a node's ranks ended.

    hung: the rank furthest behind, if no rank made a step; killed: their supervisor ended them; files: {name: content}.
    """

    attempt: int
    code: int
    hung: int | None
    killed: bool
    files: dict[str, str]


@dataclass(frozen=True)
class NodeState:
    """What each supervisor writes."""

    id: str  # of the supervisor; one that is started again has another
    leader: str  # id of node 0's supervisor; "" until it is known
    heartbeat: int  # grows with each write
    host: str
    address: str  # of this node on the route to node 0; "" on node 0
    gpus: int  # processes on this node
    facts: dict  # versions and recipe files; must be equal on all nodes
    ready: dict | None = None  # data and arguments, once they are prepared; must be equal on all nodes
    progress: Progress = Progress()
    signal: int | None = None  # the first that the supervisor received in this attempt
    report: Report | None = None  # of the latest attempt, once its ranks have ended
    error: str = ""  # why it has left before the job ended
    left: bool = False


@dataclass(frozen=True)
class Order:
    """An attempt that the nodes shall start. nodes: {node rank: its processes}; decided: from `decisions`."""

    attempt: int
    nodes: dict[int, int]
    decided: dict
    addresses: dict[int, str]


@dataclass(frozen=True)
class Stop:
    """The ranks of an attempt shall save after the same step, and end."""

    attempt: int


@dataclass(frozen=True)
class Kill:
    """The signal that ends the ranks of an attempt. stacks: whether they write their stacks before."""

    attempt: int
    signal: int
    stacks: bool


@dataclass(frozen=True)
class End:
    """The end of the job. sentence: the cause, "" if it finished."""

    code: int
    sentence: str


@dataclass(frozen=True)
class JobState:
    """What node 0 writes. A node that is not among `supervisors` yet ignores it."""

    leader: str  # id of node 0's supervisor
    heartbeat: int  # grows with each write
    supervisors: dict[int, str]  # {node rank: id of its supervisor}
    nodes: dict[int, int] = field(default_factory=dict)  # {node rank: its processes} that the job begins with
    decided: dict = field(default_factory=dict)  # from `decisions`, when the job begins
    folder: str = ""  # the run folder, once all nodes are ready
    order: Order | None = None
    stop: Stop | None = None
    kill: Kill | None = None
    end: End | None = None


_NODE, _JOB = TypeAdapter(NodeState), TypeAdapter(JobState)


def signed(secret: bytes, key: str, document: NodeState | JobState) -> str:
    """Return what to store under a key: signature, then JSON. The signature is valid for this key only."""
    text = json.dumps(asdict(document))
    return _signature(secret, key, text.encode()) + text


def read(secret: bytes, key: str, content: bytes) -> NodeState | JobState:
    """Verify what a key stores and return the document. Raises: ValueError with the reason to ignore it."""
    signature, text = content[:DIGITS], content[DIGITS:]
    if not hmac.compare_digest(signature, _signature(secret, key, text).encode()):
        raise ValueError("it is not signed with this job's secret, which must be the same on all nodes")
    try:
        return (_JOB if key == JOB_KEY else _NODE).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'document'}: {first['msg']}") from None


def _signature(secret: bytes, key: str, text: bytes) -> str:
    return hmac.new(secret, key.encode() + b"\n" + text, hashlib.sha256).hexdigest()


# --- files of ranks ---


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
