"""Draw the charts of report.html as inline SVG, whose colors the page's style sheet sets."""

import io
import json
import re
from dataclasses import dataclass

from zerofit.job.run_folder import without_formulas

# Drawn color -> CSS: matplotlib knows no style sheet, so colors that nothing else has stand for the page's.
INK, GRID = "#010101", "#020202"
LINES = tuple(f"#0303{number:02x}" for number in range(6))
STYLED = {INK: "currentColor", GRID: "var(--grid)"} | {color: f"var(--line{i})" for i, color in enumerate(LINES)}

MOST_POINTS = 1000  # of a line; a page with every step of a long run would be slow to open


@dataclass
class Line:
    """One line of a chart. dashed: an evaluation beside the training."""

    label: str
    points: list[tuple[float, float]]
    color: int
    dashed: bool = False


def chart(title: str, unit: str, lines: list[Line], from_zero: bool = False) -> str:
    """Return an SVG of the lines over the optimizer steps; "" if none has two points."""
    lines = [line for line in lines if line.points]
    if not any(len(line.points) > 1 for line in lines):
        return ""
    figure, axes = _figure(5.4, 3)
    for line in lines:
        stride = -(-len(line.points) // MOST_POINTS)
        points = line.points[::stride] + (line.points[-1:] if stride > 1 else [])
        axes.plot(
            *zip(*points, strict=True),
            label=line.label,
            color=LINES[line.color % len(LINES)],
            linestyle="--" if line.dashed else "-",
            marker="." if len(points) < 40 else None,
        )
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if from_zero:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    if len(lines) > 1:
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)
    return _svg(figure, title)


def memory(title: str, bars: dict[str, dict[str, int]], limit: int | None) -> str:
    """Return an SVG of stacked bars. Args: bars: label -> part -> bytes; limit: bytes of a line, e.g. the GPU's."""
    from zerofit.train.memory_report import COLORS

    parts_of_all = {part for parts in bars.values() for part in parts}
    colors = {part: COLORS[part] for part in COLORS if part in parts_of_all}
    colors |= dict.fromkeys(sorted(parts_of_all - colors.keys()), LINES[0])
    largest = max([sum(parts.values()) for parts in bars.values()] + [limit or 0])
    unit, scale = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    figure, axes = _figure(5.4, 0.9 + 0.42 * len(bars))
    labels, left = list(bars), [0.0] * len(bars)
    for part, color in colors.items():
        widths = [bars[label].get(part, 0) / scale for label in labels]
        axes.barh(labels, widths, left=left, label=part, color=color, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.annotate(f" {total:,.2f}", (total, row), va="center", fontsize=9, color=INK)
    axes.set_xlim(0, 1.18 * largest / scale)
    if limit:
        axes.axvline(limit / scale, color=INK, linestyle=":", label="limit")
    axes.invert_yaxis()
    axes.set(xlabel=unit)
    axes.grid(visible=False, axis="y")
    figure.legend(frameon=False, labelcolor=INK, fontsize=9, loc="outside upper left", ncols=4)
    return _svg(figure, title)


def _figure(width: float, height: float):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=INK, which="both", length=0, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    return figure, axes


def _svg(figure, title: str) -> str:
    """Return the figure as an <svg> element with its own ids and the page's colors."""
    import matplotlib

    without_formulas(figure)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    own = re.sub(r"\W+", "-", title)  # ids are unique in a page, not in a figure
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{own}-", svg)
    for drawn, styled in STYLED.items():
        svg = svg.replace(drawn, styled)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'font: [\d.]+px [^;"]*', lambda m: re.sub(r"px .*", "px inherit", m[0]), svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label={json.dumps(title)} ', 1)
