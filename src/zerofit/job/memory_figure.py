"""Format peak memory by phase and part as a text table or as stacked bars."""

from pathlib import Path

from zerofit.job import run_folder

COLORS = {
    "parameters": "#1d4ed8", "gradients": "#0891b2", "optimizer": "#7c3aed", "activations": "#ea580c",
    "logits": "#facc15", "buffers": "#94a3b8", "untracked": "#e2e8f0",
}  # fmt: skip


def size(count: int) -> str:
    """Format bytes as GiB or MiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def table(peak: dict[str, dict[str, int]]) -> str:
    """Format peaks as a table with a row per phase, a column per part, and the totals last."""
    parts = [part for part in COLORS if any(part in row for row in peak.values())]
    rows = [[phase, *(size(row.get(p, 0)) for p in parts), size(sum(row.values()))] for phase, row in peak.items()]
    head = ["phase", *parts, "total"]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(w.rjust(n) for w, n in zip(row[1:], widths[1:], strict=True))])
        for row in [head, *rows]
    )


def plot(peak: dict[str, dict[str, int]], target: Path, title: str, limit: tuple[int, str] | None = None) -> None:
    """Write the figure as PNG."""
    run_folder.save_figure(figure(peak, title, limit), target)


def figure(peak: dict[str, dict[str, int]], title: str, limit: tuple[int, str] | None = None):
    """Draw a stacked bar per phase. limit: (bytes, label) of a horizontal line."""
    from matplotlib.figure import Figure

    largest = max([sum(row.values()) for row in peak.values()] + ([limit[0]] if limit else [])) or 1
    unit, scale = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    drawn = Figure(figsize=(8, 4.5), dpi=120)
    axes, phases, bottom = drawn.subplots(), list(peak), [0.0] * len(peak)
    for part, color in COLORS.items():
        heights = [peak[phase].get(part, 0) / scale for phase in phases]
        if any(heights):
            bars = axes.bar(phases, heights, 0.66, bottom=bottom, color=color, label=part, edgecolor="white", lw=0.6)
            sizes = [f"{height:.1f}" if height * scale > 0.05 * largest else "" for height in heights]
            ink = "#0f172a" if part in ("logits", "buffers", "untracked") else "white"
            axes.bar_label(bars, sizes, label_type="center", fontsize=8, color=ink)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    for x, total in enumerate(bottom):
        size, ink = (11, "#0f172a") if total == max(bottom) else (9, "#475569")
        axes.text(x, total + 0.015 * largest / scale, f"{total:.2f}", ha="center", fontsize=size, color=ink)
    if limit:
        axes.axhline(limit[0] / scale, color="#dc2626", linewidth=1.2, linestyle="--")
        axes.annotate(
            limit[1], (1, limit[0] / scale), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", fontsize=9, color="#dc2626",
        )  # fmt: skip
    margin = max(0.0, (4 - len(phases)) / 2)  # a single bar would fill the figure
    axes.set(ylabel=f"peak {unit}", ylim=(0, 1.12 * largest / scale), xlim=(-0.5 - margin, len(phases) - 0.5 + margin))
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", alpha=0.2)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    handles, labels = axes.get_legend_handles_labels()  # in the order of the stack
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.45))
    return drawn
