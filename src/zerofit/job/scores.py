"""Write and read scores.json in a run folder: the results of `zerofit eval` for the base and the tuned model."""

import json
from pathlib import Path

from zerofit.base import paths
from zerofit.base.errors import printable
from zerofit.job import run_folder

FILE = "scores.json"

HEAD = ["weights", "task", "metric", "rows"]  # header of a table, followed by the models' titles and the difference

# Settings of an evaluation that make scores incomparable, with their labels next to the task's name. Each combination
# has its own rows.
QUESTION = {
    "num_fewshot": "{} shots",
    "system_instruction": "system message {!r}",
    "gen_kwargs": "{}",
    "chat_template_kwargs": "template arguments {}",
    "plain_text": "as plain text",
}

MAX_SHOWN = 40  # most characters of a value in a row

Scores = dict[str, dict[str, dict]]  # task -> metric -> {"value", "stderr" (None if unavailable), "rows"}


def add(folder: Path, evaluation: dict) -> Path:
    """Append an evaluation to the folder's file and return its path."""
    file, logs = folder / FILE, folder / "logs"  # the lock remains among the logs
    logs.mkdir(exist_ok=True)
    with paths.locked(logs / "scores.lock"):  # another process may append in parallel
        run_folder.write_json(file, {"evaluations": [*read_evaluations(folder), evaluation]})
    return file


def read_evaluations(folder: Path) -> list[dict]:
    """Return the evaluations of a run folder, oldest first. Raises: UserError for invalid values."""
    return run_folder.read_record(folder / FILE).get("evaluations", [])


def is_final(weights: str) -> bool:
    """Return whether the name of an evaluation's weights refers to final/: "final (step 174)"."""
    return weights.partition(" ")[0] == "final"


def table(evaluations: list[dict], weights: str = "") -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of a table with the newest scores of each task; ([], []) without scores.

    A trial on the first rows (--limit) is only included if the task has not been scored on all rows.
    Args: weights: only weights with this name, such as "checkpoint-50"; "": all, with their names.
    """
    chosen: dict[tuple, dict] = {}
    for new in evaluations:
        name = str(new.get("weights", ""))
        for task in dict.fromkeys(task for scores in new.get("scores", {}).values() for task in scores):
            key = (name, task, json.dumps(_question(new)))
            if weights in ("", name) and (new.get("limit") is None or chosen.get(key, new).get("limit") is not None):
                chosen[key] = _with_earlier(new, task, chosen.get(key))
    titles = [title for title in ("base", "tuned") if any(title in entry["scores"] for entry in chosen.values())]
    rows = [row for (name, task, _), entry in chosen.items() for row in _rows(name, task, entry, titles)]
    skipped = 1 if weights else 0
    head = [*HEAD[skipped:], *titles, *(["difference"] if len(titles) > 1 else [])]
    return (head, [row[skipped:] for row in rows]) if rows else ([], [])


def _question(evaluation: dict) -> dict:
    return {name: evaluation[name] for name in QUESTION if evaluation.get(name) not in (None, "", {})}


def _with_earlier(evaluation: dict, task: str, earlier: dict | None) -> dict:
    """Return an evaluation of a task, completed with earlier scores of the other model on the same number of rows."""
    scores = {title: {task: tasks[task]} for title, tasks in evaluation["scores"].items() if task in tasks}
    if earlier and earlier.get("limit") == evaluation.get("limit"):
        rows = {score.get("rows") for tasks in scores.values() for score in tasks[task].values()}
        for title, tasks in earlier["scores"].items():
            if title not in scores and {score.get("rows") for score in tasks[task].values()} == rows:
                scores[title] = tasks
    return evaluation | {"scores": scores}


def _rows(weights: str, task: str, evaluation: dict, titles: list[str]) -> list[list[str]]:
    """Return a row for each metric of a task."""
    table_rows, scores = [], evaluation["scores"]
    words = [QUESTION[name].format(str(value)[:MAX_SHOWN]) for name, value in _question(evaluation).items()]
    for metric in dict.fromkeys(metric for tasks in scores.values() for metric in tasks.get(task, {})):
        each = {title: scores[title].get(task, {}).get(metric) for title in titles if title in scores}
        rows = next((f"{score['rows']:,}" for score in each.values() if score and score.get("rows")), "")
        first = "first " if evaluation.get("limit") is not None and rows else ""
        name = ", ".join([task, *words])
        cells = [weights, name, metric, first + rows, *(_shown(each.get(title)) for title in titles)]
        table_rows.append([printable(cell) for cell in [*cells, *([_difference(each)] if len(titles) > 1 else [])]])
    return table_rows


def _shown(score: dict | None) -> str:
    if score is None or score.get("value") is None:
        return ""
    error = score.get("stderr")
    return f"{score['value']:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def _difference(each: dict[str, dict | None]) -> str:
    """Return tuned - base, also in standard errors of the difference between two samples."""
    base, tuned = each.get("base"), each.get("tuned")
    if not base or not tuned or None in (base.get("value"), tuned.get("value")):
        return ""
    difference = tuned["value"] - base["value"]
    noise = sum((score.get("stderr") or 0.0) ** 2 for score in (base, tuned)) ** 0.5
    return f"{difference:+.4f}" + (f" ({abs(difference) / noise:.1f} standard errors)" if noise else "")


def as_text(head: list[str], rows: list[list[str]]) -> str:
    """Format a table for a terminal."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)


def as_markdown(head: list[str], rows: list[list[str]]) -> str:
    """Format a table for a model card."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
