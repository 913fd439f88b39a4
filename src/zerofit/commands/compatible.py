"""`zerofit compatible`: print which techniques exclude each other, why, and the alternative."""

import argparse

from zerofit.base.errors import UserError
from zerofit.config.resolve import TECHNIQUES
from zerofit.job import parallel_dims
from zerofit.job.technique import AllBut, Conflict, Technique


def main(argv: list[str]) -> None:
    """Print the conflicts of the named flags' techniques, or of all techniques.

    Raises: UserError for a word that no technique has as its flag or in its name.
    """
    parser = argparse.ArgumentParser(prog="zerofit compatible", allow_abbrev=False, description=__doc__)
    parser.add_argument("techniques", nargs="*", metavar="TECHNIQUE", help="a flag or a name: fp8, packing, lora ...")
    args, flags = parser.parse_known_args(argv)  # a technique may be typed as its flag
    words = [word.lstrip("-") for word in (*args.techniques, *flags)]
    for word in words or [""]:
        if not (chosen := [technique for technique in shown() if word in f"{technique.example} {technique.name}"]):
            raise UserError(f"{word}: not a technique; `zerofit compatible` lists all of them.")
        print("\n".join(page(chosen)))


def shown() -> list[Technique]:
    return [technique for technique in (*TECHNIQUES, *parallel_dims.registered()) if technique.example]


def page(techniques: list[Technique]) -> list[str]:
    """Return the Markdown lines of techniques: a section for each with its conflicts, then those without any."""
    sections = {technique: conflicts(technique) for technique in techniques}
    free = ", ".join(f"{technique.name} (`{technique.example}`)" for technique in sections if not sections[technique])
    lines = [f"Compatible with every other technique: {free}.", ""] if free else []
    for technique, rows in sections.items():
        if rows:
            lines += [f"## {technique.name}", "", f"`{technique.example}` cannot be combined with", "", *rows, ""]
    return lines


def conflicts(technique: Technique) -> list[str]:
    """Return a list item for each argument that a technique excludes, and for each technique that excludes it."""
    lines: dict[str, str] = {}
    for conflict in technique.conflicts:
        lines.setdefault(_argument(conflict), f"- {_argument(conflict)}{_reason(conflict)}")
    for other in shown():
        for conflict in other.conflicts:
            listed = other is technique or any(argument.startswith(f"`--{other.flag}") for argument in lines)
            if not listed and conflict.excludes(technique):
                line = f"- `{other.example}` ({other.name}){_reason(conflict)}"
                lines[line] = line
    return [*lines.values()]


def _argument(conflict: Conflict) -> str:
    """Return the excluded values of an argument, as they are typed."""
    excluded = getattr(conflict.values, "values", conflict.values) or ()
    values = [str(value).lower() if isinstance(value, bool) else str(value) for value in excluded]
    if conflict.argument == "zero":
        return f"ZeRO stage{'s' * (len(values) > 1)} {', '.join(values)}"
    if isinstance(conflict.values, AllBut):
        return f"`--{conflict.argument}` other than {', '.join(f'`{value}`' for value in values)}"
    return f"`--{' '.join([conflict.argument, *values[:1]])}`" + "".join(f", `{value}`" for value in values[1:])


def _reason(conflict: Conflict) -> str:
    stages = f" at ZeRO stage {', '.join(map(str, conflict.stages))}" if conflict.stages else ""
    return f"{stages}: {conflict.why}; {conflict.instead}."
