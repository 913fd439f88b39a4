"""What --show prints: every argument that is not a plain default, with its source."""

from dataclasses import fields

from zerofit import run_folder
from zerofit.config.arguments import kit_groups
from zerofit.errors import UserError
from zerofit.settings import Settings


def summary(settings: Settings) -> str:
    """The effective arguments with their sources, and what was decided, as text."""
    rows = [(name, run_folder.shown(name, value), source) for name, value, source in settings.rows()]
    wide = [min(60, max(len(row[i]) for row in rows)) for i in (0, 1)]
    group_of = {f.name: group._argument_group_name for group in kit_groups(settings.recipe) for f in fields(group)}
    lines, last = [], None
    for name, value, source in sorted(rows, key=lambda row: row[0] not in group_of):  # transformers' own behind
        if (group := group_of.get(name, "transformers")) != last:
            lines.append(f" {group}")
            last = group
        lines.append(f"  {name:<{wide[0]}}  {value:<{wide[1]}}  {source}")
    lines += [f"  note: {sentence}" for sentence in _missing(settings)]
    return "\n".join(["arguments", *lines, "decisions", *(f"  - {sentence}" for sentence in settings.decisions)])


def _missing(settings: Settings) -> list[str]:
    """Sentences about rows that are named and not here; a run would be refused."""
    from zerofit.data import sources

    sentences = []
    for entry in [*(settings.data or []), *(settings.eval_data or [])]:
        try:
            sources.find_local(entry, settings.data_split)
        except UserError as error:
            sentences.append(str(error))
    return sentences
