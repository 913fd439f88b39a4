"""Format the output of --show: all arguments that differ from transformers' defaults, with their sources."""

from dataclasses import fields

from zerofit.base.errors import UserError
from zerofit.config.arguments import kit_groups, title_of
from zerofit.data import sources
from zerofit.job import run_folder
from zerofit.job.settings import Settings


def summary(settings: Settings) -> str:
    """Return the arguments with their sources, and the decisions, as text."""
    rows = [(name, run_folder.format_value(name, value), source) for name, value, source in settings.rows()]
    widths = [min(60, max(len(row[i]) for row in rows)) for i in (0, 1)]
    group_of = {f.name: title_of(group) for group in kit_groups(settings.recipe) for f in fields(group)}
    lines, previous = [], None
    for name, value, source in sorted(rows, key=lambda row: row[0] not in group_of):  # transformers' last
        if (group := group_of.get(name, "transformers")) != previous:
            lines.append(f" {group}")
            previous = group
        lines.append(f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {source}")
    for entry in [*(settings.data or []), *(settings.eval_data or [])]:
        try:
            sources.find_local(entry, settings.data_split)
        except UserError as error:  # a missing file; a run would be refused
            lines.append(f"  note: {error}")
    return "\n".join(["arguments", *lines, "decisions", *(f"  - {sentence}" for sentence in settings.decisions)])
