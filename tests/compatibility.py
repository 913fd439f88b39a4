"""Which memory techniques go together at which ZeRO stage: the table of docs/compatibility.md, made from the checks."""

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.config.resolve import STAGES, TECHNIQUES


def flags(names: tuple[str, ...], zero: str) -> tuple[str, list[str]] | None:
    """(recipe, command line) of these techniques together; None where they say different things in one flag."""
    recipes = {TECHNIQUES[n].recipe for n in names} - {None}
    words: dict[str, str] = {"--zero": zero}
    for name in names:
        parts = TECHNIQUES[name].flags.split()
        for flag, value in zip(parts[::2], parts[1::2], strict=True):
            if words.setdefault(flag, value) != value:
                return None
    return next(iter(recipes), "sft"), [word for pair in words.items() for word in pair]


def verdict(names: tuple[str, ...], zero: str, base: list[str], ranks: int = 1) -> str:
    """ "" where the kit accepts them together, "-" where they exclude each other by name, else its sentence.

    Args: base: what every command line has (data, steps).
    """
    found = flags(names, zero)
    if found is None:
        return "-"
    recipe, words = found
    try:
        resolve.resolve_settings(recipe, [*base, *words], ranks)
    except UserError as error:
        return str(error)
    return ""


def table(base: list[str]) -> str:
    """Return the Markdown table of docs/compatibility.md.

    It has for each pair the stages at which both go together, or a letter that names the reason below the table.
    """
    names = [n for n, t in TECHNIQUES.items() if not t.cuda]
    reasons: dict[str, int] = {}
    lines = ["| | " + " | ".join(str(i + 1) for i in range(len(names))) + " |", "|---" * (len(names) + 1) + "|"]
    for i, one in enumerate(names):
        cells = []
        for j, other in enumerate(names):
            if j >= i:
                cells.append(_stages((one,), base, reasons) if i == j else "")
                continue
            cells.append(_stages((one, other), base, reasons))
        lines.append(f"| {i + 1} {one} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {text}" for text, number in reasons.items())]
    return "\n".join(lines)


def _stages(names: tuple[str, ...], base: list[str], reasons: dict[str, int]) -> str:
    found = {zero: verdict(names, zero, base) for zero in STAGES}
    fine = "".join(zero for zero, said in found.items() if not said)
    said = sorted({text for text in found.values() if text not in ("", "-")})
    notes = [str(reasons.setdefault(text, len(reasons) + 1)) for text in said]
    return (fine or ("-" if "-" in found.values() else "")) + (f"<sup>{','.join(notes)}</sup>" if notes else "")
