"""Draw the charts of report.html as embedded images."""

import base64
import io
from dataclasses import dataclass

from zerofit.job.run_folder import without_formulas

MAX_POINTS = 1000  # per series, so that pages of long runs open quickly


@dataclass
class Series:
    """One line of a chart. color: its number; dashed: e.g. for an evaluation."""

    label: str
    points: list[tuple[float, float]]
    color: int
    dashed: bool = False


def chart(unit: str, series: list[Series], from_zero: bool = False) -> str:
    """Return an image of the series over the optimizer steps, or "" if no series has two points."""
    from matplotlib.figure import Figure

    series = [line for line in series if line.points]
    if not any(len(line.points) > 1 for line in series):
        return ""
    figure = Figure(figsize=(5.4, 3))
    axes = figure.subplots()
    for line in series:
        stride = -(-len(line.points) // MAX_POINTS)
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
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return picture(figure)


def picture(figure) -> str:
    """Return a matplotlib figure as a data URI. The page provides the background, and dark mode inverts the ink."""
    without_formulas(figure)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
