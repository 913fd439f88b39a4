"""`zerofit watch`: show the page of a run as text in the terminal until the run ends."""

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
from zerofit.report import run as run_data
from zerofit.report import run_page
from zerofit.report.run import Run

EVERY_SECONDS = 5.0

WIDTH = 100  # columns, in a wider terminal too

CHART_ROWS, LABEL_COLUMNS = 7, 10  # loss chart

MAX_LINES = 8  # newest decisions and failures

BLOCKS, ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#%"  # levels of a bar, for Unicode and other encodings

HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def main(argv: list[str]) -> None:
    """`zerofit watch`: see --help. Raises: UserError for a folder without a run."""
    parser = argparse.ArgumentParser(prog="zerofit watch", allow_abbrev=False, description=__doc__)
    parser.add_argument("run", help="the run folder")
    parser.add_argument(
        "--every", type=float, default=EVERY_SECONDS, metavar="SECONDS", help="interval between updates"
    )
    args = parser.parse_args(argv)
    if not 0.5 <= args.every <= 86_400:
        raise UserError(f"--every {args.every:g}: must be between 0.5 and 86400 seconds.")
    on_terminal, levels = sys.stdout.isatty(), _levels(sys.stdout.encoding)
    try:
        while True:
            size = shutil.get_terminal_size((WIDTH, 50))
            current = run_data.open_run(args.run)
            lines = list(frame(current, min(WIDTH, size.columns), levels))
            if not on_terminal:
                print("\n".join(lines))
                return
            _draw(lines[: max(1, size.lines - 1)])
            if not current.training:
                return
            time.sleep(args.every)
    except KeyboardInterrupt:  # the run continues
        print()


def _levels(encoding: str | None) -> str:
    """Return the bar characters that the encoding supports."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def _draw(lines: list[str]) -> None:
    """Overwrite the previous frame without flicker."""
    text = "".join(f"{line}{CLEAR_LINE}\n" for line in lines)
    if os.environ.get("TERM") == "dumb":  # no cursor to move
        text, before = "\n".join([*lines, "", ""]), ""
    else:
        before = HOME
    sys.stdout.write(before + text + (CLEAR_BELOW if before else ""))
    sys.stdout.flush()


def frame(run: Run, width: int, levels: str = BLOCKS) -> Iterator[str]:
    """Yield the lines of a frame, at most `width` columns wide."""
    evaluations = [f"step {step:,}: loss {value:.4f}" for step, value in run.points("eval_loss")[-3:]]
    commands = run_page.next_steps(run.folder, run.training)
    if run.training:
        del commands[0]  # `zerofit watch` itself
    blocks = (_head(run, width), _figures(run, width), _loss(run, width, levels), _memory(run),
              _sentences("evaluation", evaluations, width),
              _sentences("failures and fixes", run_data.failures(run)[-MAX_LINES:], width),
              _sentences("decisions", run.facts.get("decisions", [])[-MAX_LINES:], width),
              [f"next: {command}" for command in commands])  # fmt: skip
    for number, lines in enumerate(filter(None, map(list, blocks))):
        if number:
            yield ""
        for line in lines:
            yield cut(line, width)


def _head(run: Run, width: int) -> Iterator[str]:
    recipe = run.facts.get("recipe", "run")
    yield f"{run.folder}: {recipe} of {run.argument('model')[0]}, {run.status}"
    if progress := run_page.progress(run):
        bar = ""
        if progress["total"]:
            columns = max(10, width - columns_of(progress["text"]) - 4)
            done = min(columns, columns * progress["step"] // progress["total"])
            bar = f"[{'#' * done}{'-' * (columns - done)}] "
        yield bar + progress["text"]
    elif cause := not run.finished and (run.failure.get("cause") or run.result.get("error")):
        yield f"cause: {cause}"


def _figures(run: Run, width: int) -> Iterator[str]:
    """Yield the run's figures, two per line."""
    figures = [(name, value) for name, value in run_page.summary(run).items() if value is not None]
    rate = run.last("learning_rate")
    figures += [("learning rate", f"{rate:.3g}")] if rate is not None else []
    half = width // 2
    for left, right in zip(figures[::2], [*figures[1::2], ("", "")], strict=False):
        words = [cut(f"{name}: {value}" if name else "", half - 2) for name, value in (left, right)]
        yield f"{words[0]}{' ' * (half - columns_of(words[0]))}{words[1]}".rstrip()


def _loss(run: Run, width: int, levels: str) -> Iterator[str]:
    points = [point for point in run.points("loss") if math.isfinite(point[1])]
    if len(points) < 2:
        return
    values = _resampled(points, max(1, width - LABEL_COLUMNS - 1))
    low, high = min(values), max(values)
    yield f"loss, steps {points[0][0]:,} to {points[-1][0]:,}"
    heights = [(value - low) / ((high - low) or 1) * (CHART_ROWS * 8 - 1) + 1 for value in values]
    for row in reversed(range(CHART_ROWS)):
        label = {CHART_ROWS - 1: f"{high:.4g}", 0: f"{low:.4g}"}.get(row, "")
        bars = "".join(levels[round(min(8, max(0, height - 8 * row)))] for height in heights)
        yield f"{label:>{LABEL_COLUMNS}} {bars}".rstrip()


def _memory(run: Run) -> Iterator[str]:
    rows = [[f"{cell}" for cell in row] for row in run_data.memory_rows(run)]
    widths = [max(columns_of(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for number, row in enumerate(rows):
        first = row[0] if number else "memory per rank"
        cells = [" " * (size - columns_of(cell)) + cell for cell, size in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([f"{first:<{max(16, widths[0])}}", *cells])


def _sentences(title: str, sentences: list[str], width: int) -> Iterator[str]:
    if sentences:
        yield title
    for sentence in sentences:
        yield from textwrap.wrap(sentence, width, initial_indent="  ", subsequent_indent="    ", max_lines=3)


def _resampled(points: list[tuple[float, float]], count: int) -> list[float]:
    """Return the means of `count` intervals of the points. With few points, values repeat."""
    begins = [len(points) * number // count for number in range(count)]
    intervals = (points[begin : max(begin + 1, len(points) * (number + 1) // count)]
                 for number, begin in enumerate(begins))  # fmt: skip
    return [sum(value / len(interval) for _, value in interval) for interval in intervals]


# --- columns of a terminal ---


def columns_of(text: str) -> int:
    """Return the width of a text in a terminal."""
    return sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, width: int) -> str:
    """Return a text as run line of at most `width` columns, without control characters."""
    text = printable(re.sub(r"\s", " ", text))
    text = "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) == "Cf" else c for c in text)  # e.g. right to left
    if columns_of(text) <= width:
        return text
    kept, left = [], width - 1
    for character in text:
        left -= _columns(character)
        if left < 0:
            break
        kept.append(character)
    return "".join(kept) + "~"
