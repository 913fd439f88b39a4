"""`zerofit watch`: show a run that trains in the terminal, until it ends: what its page shows, as text."""

import argparse
import math
import os
import re
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Iterator

from zerofit.base.errors import UserError, printable
from zerofit.report import run, run_page
from zerofit.report.run import Run

EVERY_SECONDS = 5.0

WIDTH = 100  # columns, in a wider terminal too

CHART_ROWS, LABEL = 7, 10  # of the loss; columns of its axis

MOST_LINES = 8  # of decisions, and of what broke: the newest

BLOCKS, ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#%"  # levels of a bar, where the terminal's encoding has them and where it has not

HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def main(argv: list[str]) -> None:
    """`zerofit watch`: see --help. Raises: UserError for a folder without a run."""
    parser = argparse.ArgumentParser(prog="zerofit watch", allow_abbrev=False, description=__doc__)
    parser.add_argument("run", help="the run folder")
    parser.add_argument("--every", type=float, default=EVERY_SECONDS, metavar="SECONDS", help="between two frames")
    args = parser.parse_args(argv)
    if not 0.5 <= args.every <= 86_400:
        raise UserError(f"--every {args.every:g}: must be between 0.5 and 86400 seconds.")
    on_terminal, levels = sys.stdout.isatty(), _levels(sys.stdout.encoding)
    try:
        while True:
            size = shutil.get_terminal_size((WIDTH, 50))
            one = run.open_run(args.run)
            lines = list(frame(one, min(WIDTH, size.columns), levels))
            if not on_terminal:
                print("\n".join(lines))
                return
            _draw(lines[: max(1, size.lines - 1)])
            if not one.training:
                return
            time.sleep(args.every)
    except KeyboardInterrupt:  # the run goes on
        print()


def _levels(encoding: str | None) -> str:
    """Return the characters of a bar that an encoding has."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def _draw(lines: list[str]) -> None:
    """Write a frame over the one before, without a moment in which the terminal is empty."""
    text = "".join(f"{line}{CLEAR_LINE}\n" for line in lines)
    if os.environ.get("TERM") == "dumb":  # no cursor to move
        text, before = "\n".join([*lines, "", ""]), ""
    else:
        before = HOME
    sys.stdout.write(before + text + (CLEAR_BELOW if before else ""))
    sys.stdout.flush()


def frame(one: Run, width: int, levels: str = BLOCKS) -> Iterator[str]:
    """Yield the lines of a frame, none of them wider than `width` columns."""
    evaluations = [f"step {step:,}: loss {value:.4f}" for step, value in one.points("eval_loss")[-3:]]
    commands = run_page.next_steps(one.folder, one.training)
    if one.training:
        del commands[0]  # which is this view
    blocks = (_head(one, width), _figures(one, width), _loss(one, width, levels), _memory(one),
              _sentences("evaluation", evaluations, width),
              _sentences("what broke, and what was tried", run.broke(one)[-MOST_LINES:], width),
              _sentences("decided", one.facts.get("decisions", [])[-MOST_LINES:], width),
              [f"next: {command}" for command in commands])  # fmt: skip
    for number, lines in enumerate(filter(None, map(list, blocks))):
        if number:
            yield ""
        for line in lines:
            yield cut(line, width)


def _head(one: Run, width: int) -> Iterator[str]:
    recipe = one.facts.get("recipe", "run")
    yield f"{one.folder}: {recipe} of {one.argument('model')[0]}, {one.status}"
    if far := run_page.progress(one):
        bar = ""
        if far["total"]:
            columns = max(10, width - columns_of(far["words"]) - 4)
            done = min(columns, columns * far["step"] // far["total"])
            bar = f"[{'#' * done}{'-' * (columns - done)}] "
        yield bar + far["words"]
    elif why := not one.finished and (one.failure.get("cause") or one.result.get("error")):
        yield f"why: {why}"


def _figures(one: Run, width: int) -> Iterator[str]:
    """Yield the figures of the run, two in a line."""
    found = [(name, value) for name, value in run_page.summary(one).items() if value is not None]
    rate = one.last("learning_rate")
    found += [("learning rate", f"{rate:.3g}")] if rate is not None else []
    half = width // 2
    for left, right in zip(found[::2], [*found[1::2], ("", "")], strict=False):
        words = [cut(f"{name}: {value}" if name else "", half - 2) for name, value in (left, right)]
        yield f"{words[0]}{' ' * (half - columns_of(words[0]))}{words[1]}".rstrip()


def _loss(one: Run, width: int, levels: str) -> Iterator[str]:
    points = [point for point in one.points("loss") if math.isfinite(point[1])]
    if len(points) < 2:
        return
    values = _resampled(points, max(1, width - LABEL - 1))
    low, high = min(values), max(values)
    yield f"loss, steps {points[0][0]:,} to {points[-1][0]:,}"
    heights = [(value - low) / ((high - low) or 1) * (CHART_ROWS * 8 - 1) + 1 for value in values]
    for row in reversed(range(CHART_ROWS)):
        label = {CHART_ROWS - 1: f"{high:.4g}", 0: f"{low:.4g}"}.get(row, "")
        bars = "".join(levels[round(min(8, max(0, height - 8 * row)))] for height in heights)
        yield f"{label:>{LABEL}} {bars}".rstrip()


def _memory(one: Run) -> Iterator[str]:
    rows = [[f"{cell}" for cell in row] for row in run.memory_rows(one)]
    widths = [max(columns_of(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for number, row in enumerate(rows):
        first = row[0] if number else "memory of a rank"
        cells = [" " * (size - columns_of(cell)) + cell for cell, size in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([f"{first:<{max(16, widths[0])}}", *cells])


def _sentences(title: str, sentences: list[str], width: int) -> Iterator[str]:
    if sentences:
        yield title
    for sentence in sentences:
        yield from textwrap.wrap(sentence, width, initial_indent="  ", subsequent_indent="    ", max_lines=3)


def _resampled(points: list[tuple[float, float]], count: int) -> list[float]:
    """Return `count` values: the means of as many stretches of the points, of which some repeat where they are few."""
    begins = [len(points) * number // count for number in range(count)]
    stretches = (points[begin : max(begin + 1, len(points) * (number + 1) // count)]
                 for number, begin in enumerate(begins))  # fmt: skip
    return [sum(value / len(stretch) for _, value in stretch) for stretch in stretches]


# --- columns of a terminal ---


def columns_of(text: str) -> int:
    """Return the columns that a text takes in a terminal."""
    return sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, width: int) -> str:
    """Return a text in one line of at most `width` columns, with nothing in it that a terminal would obey."""
    text = printable(re.sub(r"\s", " ", text))
    text = "".join(f"\\u{ord(one):04x}" if unicodedata.category(one) == "Cf" else one for one in text)  # right to left
    if columns_of(text) <= width:
        return text
    kept, left = [], width - 1
    for character in text:
        left -= _columns(character)
        if left < 0:
            break
        kept.append(character)
    return "".join(kept) + "~"
