"""Find out whose configuration a file is, and read it."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from zerofit.base.errors import UserError
from zerofit.base.paths import read_text
from zerofit.convert import axolotl, llamafactory, sharding, swift, torchtune, trl, unsloth
from zerofit.convert.conversion import Kit, sections

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
    try:
        values = yaml.safe_load(read_text(Path(path).expanduser()))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not a UTF-8 text file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or 'cannot be parsed'}.") from None
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path}: must hold `key: value` lines.")
    return _interpolated({str(key): value for key, value in values.items()})


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
