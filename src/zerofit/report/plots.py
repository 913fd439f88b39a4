"""Draw the charts of report.html, as pictures that stand in the page itself."""

import base64
import io
from dataclasses import dataclass

from zerofit.job.run_folder import without_formulas

MOST_POINTS = 1000  # of a line; a page with every step of a long run would be slow to open


@dataclass
class Line:
    """One line of a chart. color: its number; dashed: an evaluation beside the training."""

    label: str
    points: list[tuple[float, float]]
    color: int
    dashed: bool = False


def chart(unit: str, lines: list[Line], from_zero: bool = False) -> str:
    """Return a picture of the lines over the optimizer steps; "" if none has two points."""
    from matplotlib.figure import Figure

    lines = [line for line in lines if line.points]
    if not any(len(line.points) > 1 for line in lines):
        return ""
    figure = Figure(figsize=(5.4, 3))
    axes = figure.subplots()
    for line in lines:
        stride = -(-len(line.points) // MOST_POINTS)
        points = line.points[::stride] + (line.points[-1:] if stride > 1 else [])
        axes.plot(
            *zip(*points, strict=True),
            label=line.label,
            color=f"C{line.color}",
            linestyle="--" if line.dashed else "-",
            marker="." if len(points) < 40 else None,
        )
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if from_zero:
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return picture(figure)


def picture(figure) -> str:
    """Return a figure of matplotlib as the address of a picture that holds it."""
    without_formulas(figure)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
