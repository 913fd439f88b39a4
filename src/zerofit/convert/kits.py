"""Find out whose configuration a file is, and read it."""

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

LAUNCHERS = (sharding.ACCELERATE, sharding.DEEPSPEED)  # they say how a job is started, not what it trains

_COUNT = Counter(mark for kit in KITS for mark in kit.marks)

OWN_MARK, SHARED_MARK = 3, 1  # weights of a key that one kit has, and that several have


def read(path: str) -> dict[str, Any]:
    """Return the values of a YAML or JSON file.

    Raises: UserError for a file that cannot be read or holds no settings.
    """
    values = settings_file.load(path, as_written=True)[0]
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path}: must hold `key: value` lines.")
    return _interpolated(values)


def _interpolated(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with OmegaConf's ${section.key} replaced, as torchtune's files have them."""
    flat = sections(values)

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [replaced(inner) for inner in value]
        if isinstance(value, str) and "${" in value:
            return re.sub(r"\$\{([\w.]+)\}", lambda name: str(flat.get(name[1], name[0])), value)
        return value

    return replaced(values)


def detect(values: dict[str, Any], ours: frozenset[str] = frozenset()) -> tuple[Kit | None, list[str]]:
    """Return (the kit whose keys these are, the keys that say so); (None, []) where no two of them are a kit's.

    Args: ours: our arguments, which tell nothing.
    """
    present = {*values, *sections(values)}
    best, weight, reasons = None, 0, []
    for kit in KITS:
        marks = [mark for mark in kit.marks if mark in present and mark not in ours]
        own = sum(OWN_MARK if _COUNT[mark] == 1 else SHARED_MARK for mark in marks)
        if len(marks) >= 2 and own > weight:
            best, weight, reasons = kit, own, marks
    return best, reasons


def foreign(values: dict[str, Any], path: str, ours: frozenset[str]) -> str | None:
    """Return the sentence on a file of another kit that is given as ours; None for a file that may be ours."""
    kit, reasons = detect(values, ours)
    if kit is None:
        return None
    return (
        f"{path}: is a file of {kit.name} ({', '.join(reasons[:3])}), not of zerofit; `zerofit convert {path}` writes "
        "it in our names."
    )
