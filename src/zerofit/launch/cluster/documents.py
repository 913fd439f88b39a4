"""Sign and check the documents that supervisors exchange."""

import hashlib
import hmac
import json
import re
from pathlib import Path

from zerofit.command_line import by_flag, drop
from zerofit.errors import UserError

DIGITS = hashlib.sha256().digest_size * 2  # length of the signature in front of the JSON

# Files of a node's ranks that its supervisor sends to node 0 (rank_status.py, launch/torchrun.py).
FILES = re.compile(r"rank[0-9]+\.json|stack[0-9]+\.txt|pulse[0-9]+|exits\.json")


# {kind of document: {key: type}}; a key with a ? is optional. A key that is itself a kind is checked recursively.
_SHAPES = {
    "node": {"id": str, "host": str, "gpus": int, "facts": dict, "beat": int, "address": str, "leader": str,
             "ready?": dict, "refused?": str, "left?": bool, "missed?": bool, "heard?": int | None, "pulse?": dict | None,
             "ended?": dict | None},
    "pulse": {"ranks": int, "step": int},
    "ended": {"number": int, "code": int, "hung": int | None, "killed": bool, "files": dict},
    "board": {"beat": int, "nodes": dict, "members?": dict, "flags?": dict, "folder?": str, "order?": dict,
              "stop?": dict, "kill?": dict, "end?": dict},
    "order": {"number": int, "members": dict, "flags": dict, "addresses": dict},
    "stop": {"number": int, "step": int},
    "kill": {"number": int, "signal": int, "stacks": bool},
    "end": {"code": int, "sentence": str},
}  # fmt: skip


# Flags that node 0 changes at the start or between attempts. All others come from each node's own command line.
DECIDED = ("--zero", "--offload", "--per_device_train_batch_size", "--gradient_accumulation_steps",
           "--effective_batch_size", "--gradient_checkpointing", "--gradient_checkpointing_every", "--activation_offload",
           "--optim", "--pure_bf16", "--load_in_4bit", "--search_batch_size", "--gpus")  # fmt: skip

# Flags with a path: node 0 decides whether they are set, each node's own command line gives the path.
PATHS = ("--offload_path", "--resume_from_checkpoint")

CHECKPOINT = re.compile(r"checkpoint-[0-9]+")

NEWEST = ("auto", "true", "last")  # values of --resume_from_checkpoint that are no path


def signed(secret: bytes, key: str, document: dict) -> str:
    """Return what to store under a key: signature, then JSON. The signature is valid for this key only."""
    text = json.dumps(document)
    return _signature(secret, key, text.encode()) + text


def read(secret: bytes, key: str, content: bytes) -> dict:
    """Verify what a key stores and return the document. Raises: ValueError with the reason to ignore it."""
    signature, text = content[:DIGITS], content[DIGITS:]
    if not hmac.compare_digest(signature, _signature(secret, key, text).encode()):
        raise ValueError("it is not signed with this job's secret, which must be the same on all nodes")
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    _check_shape(document, "board" if key == "board" else "node")
    return document


def _signature(secret: bytes, key: str, text: bytes) -> str:
    return hmac.new(secret, key.encode() + b"\n" + text, hashlib.sha256).hexdigest()


def _check_shape(document, name: str) -> None:
    """Check keys and types against _SHAPES. Raises: ValueError."""
    if not isinstance(document, dict):
        raise ValueError(f"{name} is no object")
    for key, expected_type in _SHAPES[name].items():
        field = key.rstrip("?")
        if not isinstance(document[field], expected_type) if field in document else field == key:
            raise ValueError(f"{name} has no right {field}")
        if field in _SHAPES and document.get(field) is not None:
            _check_shape(document[field], field)
    if name in ("board", "order"):
        members = document.get("members", {})
        if not all(rank.isdigit() and isinstance(gpus, int) for rank, gpus in members.items()):
            raise ValueError(f"{name} has no right members")
    if name == "ended" and not all(isinstance(content, str) for content in document["files"].values()):
        raise ValueError("ended has no right files")


# --- flags ---


def decisions(flags: list[str]) -> dict[str, list[str] | None]:
    """Return {flag: its values, or None if it is absent} for the flags that node 0 decides."""
    values: dict[str, list[str] | None] = dict.fromkeys((*DECIDED, *PATHS))
    return values | {name: given for name, given, _ in by_flag(flags) if name in values}


def with_decisions(own: list[str], decided: dict, folder: Path | None = None) -> list[str]:
    """Return this node's command line with node 0's decisions in it.

    Args: own: this node's flags; decided: node 0's, from `decisions`; folder: the run folder. A checkpoint in it is the
        only path that node 0 may set.
    Raises: UserError for a flag that node 0 cannot decide, or a malformed value.
    """
    own_values, flags = decisions(own), drop(own, *DECIDED, *PATHS)
    for name, value in decided.items():
        if name not in (*DECIDED, *PATHS) or not _are_words(value):
            raise UserError(f"node 0 orders {name} {value}, which it cannot decide; use the same zerofit on all nodes.")
        if name in PATHS and value and not _is_checkpoint(value, folder):
            if own_values[name] is None:
                raise UserError(f"{name}: node 0 has it and this node has not; give all nodes the same flags.")
            value = own_values[name]
        flags += [] if value is None else [name, *value]
    return flags


def _are_words(words) -> bool:
    return words is None or (isinstance(words, list) and all(isinstance(w, str) and w[:1] != "-" for w in words))


def _is_checkpoint(words: list[str], folder: Path | None) -> bool:
    if len(words) == 1 and words[0].lower() in NEWEST:
        return True
    return (
        folder is not None
        and len(words) == 1
        and Path(words[0]).parent.absolute() == folder.absolute()
        and CHECKPOINT.fullmatch(Path(words[0]).name) is not None
    )
