"""The table of a kit's keys: their zerofit names, those without a counterpart, and differences in meaning."""

from zerofit.convert import shared
from zerofit.convert.conversion import Kit


def page(kit: Kit) -> list[str]:
    """Return the Markdown lines for the keys of a kit."""
    lines = [f"## {kit.name} {kit.version}", "", f"| {kit.name} | zerofit | note |", "|---|---|---|"]
    if kit.like:
        return [*lines, *map(_rule, (rule for rule in kit.rules if rule not in kit.like.rules)), "",
                f"All other keys are converted like {kit.like.name}'s.", ""]  # fmt: skip
    lines += map(_rule, kit.rules)
    for name, key in kit.keys.items():
        names = ", ".join(f"`{name}`" for name in (name, *key.other.split()))
        lines.append(f"| {names} | `{key.ours}` | {_note(key)} |")
    lines += ["", *_lost({why: keys for why, keys in kit.lost.items() if why not in shared.NO_COUNTERPART}), ""]
    if kit.refused:
        lines += [*_lost({f"refused, as it {why}": keys for why, keys in kit.refused.items()}), ""]
    return [*lines, *kit.meaning, ""]


def without_counterpart() -> list[str]:
    """Return the Markdown lines for the keys of several kits without a counterpart."""
    return ["## Keys of several kits without a counterpart", "", *_lost(shared.NO_COUNTERPART)]


def _rule(rule) -> str:
    return f"| {', '.join(f'`{key}`' for key in rule.keys.split())} | {rule.ours} | {rule.note} |"


def _note(key) -> str:
    """Return a key's default and the zerofit names of its values, or its note."""
    default = "" if key.default is None else f"default {key.page or _text(key.default)}"
    values = [f"{_text(value)}: {_text(ours)}" for value, ours in key.values.items() if ours is not None]
    return "; ".join(filter(None, (default, *values))) or key.note


def _text(value) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _lost(lost: dict[str, str]) -> list[str]:
    return [f"- {', '.join(f'`{key}`' for key in keys.split())}: {why}" for why, keys in lost.items()]
