"""Read a configuration file and detect its kit."""

import re
from collections import Counter
from typing import Any

from zerofit.base.errors import UserError
from zerofit.convert import axolotl, llamafactory, sharding, swift, torchtune, trl, unsloth
from zerofit.convert.conversion import Kit, sections
from zerofit.job import settings_file

KITS = (axolotl.KIT, llamafactory.KIT, swift.KIT, trl.TRL, trl.HANDBOOK, unsloth.KIT, torchtune.KIT,
        sharding.ACCELERATE, sharding.DEEPSPEED)  # fmt: skip

NAMES = {kit.name.lower(): kit for kit in KITS}

LAUNCHERS = (sharding.ACCELERATE, sharding.DEEPSPEED)  # their files configure the launch, not the training

_COUNT = Counter(mark for kit in KITS for mark in kit.marks)

UNIQUE_MARK, SHARED_MARK = 3, 1  # weights of a key that identifies one kit, and of a key of several kits


def read(path: str) -> dict[str, Any]:
    """Return the values of a YAML or JSON file.

    Raises: UserError for a file that cannot be read or without settings.
    """
    values = settings_file.load(path, keep_text=True)[0]
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path}: must hold `key: value` lines.")
    return _interpolated(values)


def _interpolated(values: dict[str, Any]) -> dict[str, Any]:
    """Expand OmegaConf's ${section.key}, which torchtune's files use."""
    flat = sections(values)

    def expand(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: expand(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [expand(inner) for inner in value]
        if isinstance(value, str) and "${" in value:
            return re.sub(r"\$\{([\w.]+)\}", lambda name: str(flat.get(name[1], name[0])), value)
        return value

    return expand(values)


def detect(values: dict[str, Any], ours: frozenset[str] = frozenset()) -> tuple[Kit | None, list[str]]:
    """Return (kit, its keys in `values`); (None, []) if fewer than two keys identify a kit.

    Args: ours: zerofit's arguments, which are ignored.
    """
    present = {*values, *sections(values)}
    best, weight, reasons = None, 0, []
    for kit in KITS:
        marks = [mark for mark in kit.marks if mark in present and mark not in ours]
        score = sum(UNIQUE_MARK if _COUNT[mark] == 1 else SHARED_MARK for mark in marks)
        if len(marks) >= 2 and score > weight:
            best, weight, reasons = kit, score, marks
    return best, reasons


def foreign(values: dict[str, Any], path: str, ours: frozenset[str]) -> str | None:
    """Return the error for a file of another kit passed to zerofit; None if it may be a zerofit file."""
    kit, reasons = detect(values, ours)
    if kit is None:
        return None
    return (
        f"{path}: this is a {kit.name} file ({', '.join(reasons[:3])}); run `zerofit convert {path}` to convert it for "
        "zerofit."
    )
