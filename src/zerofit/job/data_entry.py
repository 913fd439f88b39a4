"""Define DataEntry, a parsed entry of --data."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.base.errors import UserError
from zerofit.job.settings_file import without_repeated_keys

KEYS = ("path", "config", "split", "revision", "weight", "columns")


@dataclass(frozen=True)
class DataEntry:
    """A data set of --data or --eval_data."""

    path: str  # file, folder, glob or hub id
    config: str | None = None  # configuration of a Hub data set; None: --data_config
    split: str | None = None  # None: --data_split
    revision: str | None = None  # branch, tag or commit of a Hub data set
    weight: float = 1.0  # number of times that each row is used per epoch
    columns: tuple[str, ...] | None = None  # ours=theirs; None: --columns


def parse(entry: str) -> DataEntry:
    """Parse an entry of --data: `path`, `path:weight`, or a JSON object with KEYS (a mapping in a YAML file).

    Raises: UserError for an invalid object, weight or list of columns.
    """
    if not entry.lstrip().startswith("{"):
        match = re.fullmatch(r"(.+):(\d+(?:\.\d+)?)", entry, re.DOTALL)
        if not match or Path(entry).expanduser().exists():
            return DataEntry(entry)
        return DataEntry(match[1], weight=_weight(entry, match[2]))
    try:
        values = json.loads(entry, object_pairs_hook=without_repeated_keys)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--data {entry}: not a valid JSON object: {error}.") from None
    unknown = next((key for key in values if key not in KEYS), None)
    if unknown is not None:
        raise UserError(f"--data {entry}: unknown key {unknown!r}; known: {', '.join(KEYS)}.")
    if not values.get("path"):
        raise UserError(f"--data {entry}: path is missing; set it to a file, a folder or a Hub id.")
    texts = {key: values.get(key) for key in KEYS[:4]}
    wrong = next((key for key, value in texts.items() if not isinstance(value, str | None)), None)
    if wrong:
        raise UserError(f"--data {entry}: {wrong} must be a string, not {values[wrong]!r}.")
    weight = _weight(entry, values["weight"]) if values.get("weight") is not None else 1.0
    return DataEntry(**texts, weight=weight, columns=_columns(entry, values.get("columns")))


def _weight(entry: str, value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = 0.0
    if isinstance(value, bool) or not 0 < weight < float("inf"):
        raise UserError(f"--data {entry}: the weight must be a positive number.")
    return weight


def _columns(entry: str, value: Any) -> tuple[str, ...] | None:
    """Return the columns of an entry's object: {ours: theirs} or a list of ours=theirs."""
    if value is None:
        return None
    pairs = [f"{ours}={theirs}" for ours, theirs in value.items()] if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, str) and is_pair(pair) for pair in pairs):
        raise UserError(f"--data {entry}: columns must map zerofit's names to the data set's, e.g. {{prompt: query}}.")
    return tuple(pairs)


def is_pair(text: str) -> bool:
    """Return whether a text is ours=theirs."""
    return text.count("=") == 1 and all(text.split("="))
