"""Write the table of the methods that a plan considered, with time, memory and cost."""

import re
import textwrap

from zerofit.base.hardware import GIB
from zerofit.plan import candidates
from zerofit.plan.advice import cost, methods
from zerofit.plan.candidate import Candidate, Plan

WIDTH = 100  # columns of a terminal


def lines(plan: Plan) -> list[str]:
    """Return the table of the chosen method and its alternatives; [] without alternatives."""
    if not plan.alternatives:
        return []
    rows = [(candidates.method_of(plan.chosen.method).title, plan.chosen, "")] if plan.chosen else []
    rows += [(name, candidate, hint) for name, (candidate, hint) in plan.alternatives.items()]
    priced = any(cost.price_run(one, plan.run)["hours"] is not None for _, one, _ in rows if one) if plan.run else False
    money = ("dollars" if plan.run.price else "GPU hours",) if priced else ()
    head = ("methods", "a step", "tokens/s", "GPU GiB", "host GiB", *money, "setting (~: by formula + margin)")
    cells = [head, *(_cells(name, one, plan, priced) for name, one, _ in rows)]
    return [*_aligned(cells), *_hints(plan, cells), *methods.rule(plan)]


def _cells(name: str, one: Candidate | None, plan: Plan, priced: bool) -> tuple[str, ...]:
    """Return the cells of a method."""
    mark = "* " if one is plan.chosen and one else "  "
    if one is None:
        alone = len(plan.methods) == 1 and name != "pipeline"  # alternatives were planned without offload
        return mark + name, *[""] * (4 + priced), "does not fit" + " without offload" * alone
    about = "" if one.answer else "~"
    host = f"{one.host_bytes_per_node / GIB:,.0f}" + "!" * (plan.exceeds_host_memory(one) or plan.exceeds_disk(one))
    cells = [mark + name, f"{cost.rounded(one.seconds)} s", cost.rounded(one.tokens_per_second)]
    cells += [f"{about}{one.peak / GIB:.1f}", host if one.host_bytes_per_node >= GIB / 2 else "-"]
    if priced:
        price = cost.price_run(one, plan.run)
        cells.append(f"${cost.rounded(price['dollars'])}" if plan.run.price else cost.rounded(price["gpu_hours"]))
    return *cells, one.label.partition(" ")[2]


def wrapped(text: str, width: int) -> str:
    """Wrap a plan's text to `width` columns, except for the command at its end.

    Continuation lines start below the text after a name and two or more spaces, or four columns to the right.
    """
    result = []
    for line in text.splitlines():
        if len(line) <= width or line.startswith("run it: "):
            result.append(line)
            continue
        start = len(line) - len(line.lstrip())
        prefix = re.match(r"  \S+( \S+)*  +", line)
        indent = " " * (len(prefix[0]) if prefix else start if start > 4 else start + 4)
        head = prefix[0] if prefix else " " * start
        result += textwrap.wrap(line[len(head) :], width, initial_indent=head, subsequent_indent=indent)
    return "\n".join(result)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the rows as lines: the first and last column aligned left, the last column wrapped."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    result = []
    for name, *numbers, last in rows:
        line = name.ljust(widths[0]) + "".join(
            f"  {cell:>{width}}" for cell, width in zip(numbers, widths[1:], strict=True)
        )
        room = WIDTH - len(line) - 2
        first, *more = textwrap.wrap(last, room) or [""]
        result.append(f"{line}  {first}".rstrip())
        result += [" " * (len(line) + 2) + part for part in more]
    return result


def _hints(plan: Plan, rows: list[tuple[str, ...]]) -> list[str]:
    """Return lines that explain the marks of the table and how to plan the other methods."""
    fit = [(name, hint) for name, (candidate, hint) in plan.alternatives.items() if candidate]
    flags = ", ".join(f"{name}: {hint}" for name, hint in fit if not hint.startswith("docs/"))
    pages = ", ".join(f"{name}: {hint}" for name, hint in fit if hint.startswith("docs/"))
    short = any("!" in cell for row in rows for cell in row[:-1])
    lines = ["  !: not enough host memory or disk space"] if short else []
    if flags:
        lines.append(f"  to plan another method: {flags}")
    return [*lines, f"  more about {pages}"] if pages else lines
