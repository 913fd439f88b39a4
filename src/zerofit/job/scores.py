"""Write and read scores.json of a run folder: what `zerofit eval` has measured, base and tuned model side by side."""

import json
from pathlib import Path

from zerofit.base import paths
from zerofit.base.errors import printable
from zerofit.job import run_folder

FILE = "scores.json"

HEAD = ["weights", "task", "metric", "rows"]  # of a table of scores; then the models' titles, and the difference

# Of an evaluation: what was asked of the model, with the words for it beside a task's name. Scores of another question
# do not compare, and stand in a row of their own.
QUESTION = {
    "num_fewshot": "{} shots",
    "system_instruction": "system message {!r}",
    "gen_kwargs": "{}",
    "chat_template_kwargs": "template arguments {}",
    "plain_text": "as plain text",
}

SHOWN = 40  # most letters of a value that a row shows

Scores = dict[str, dict[str, dict]]  # task -> metric -> {"value", "stderr" (None: the harness has none), "rows"}


def add(folder: Path, evaluation: dict) -> Path:
    """Add an evaluation to the folder's file, which keeps all earlier ones; return its path."""
    file, logs = folder / FILE, folder / "logs"  # a lock stays: among the logs it is in nobody's way
    logs.mkdir(exist_ok=True)
    with paths.locked(logs / "scores.lock"):  # another process may be adding one
        run_folder.write_json(file, {"evaluations": [*of_folder(folder), evaluation]})
    return file


def of_folder(folder: Path) -> list[dict]:
    """Return the evaluations of a run folder, the oldest first. Raises: UserError for values that none writes."""
    return run_folder.read_record(folder / FILE).get("evaluations", [])


def is_of_final(weights: str) -> bool:
    """Return whether the name of an evaluation's weights is that of final/: "final (step 174)"."""
    return weights.partition(" ")[0] == "final"


def table(evaluations: list[dict], weights: str = "") -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table with the newest scores of each task; ([], []) without scores.

    A trial on the first rows only (--limit) stands where there is no score on all of them.
    Args: weights: those of this name only, such as "checkpoint-50"; "": of all, each row with its name.
    """
    chosen: dict[tuple, dict] = {}
    for one in evaluations:
        name = str(one.get("weights", ""))
        for task in dict.fromkeys(task for of in one.get("scores", {}).values() for task in of):
            key = (name, task, json.dumps(_asked(one)))
            if weights in ("", name) and (one.get("limit") is None or chosen.get(key, one).get("limit") is not None):
                chosen[key] = _with_earlier(one, task, chosen.get(key))
    titles = [title for title in ("base", "tuned") if any(title in one["scores"] for one in chosen.values())]
    rows = [row for (name, task, _), one in chosen.items() for row in _rows(name, task, one, titles)]
    skipped = 1 if weights else 0
    head = [*HEAD[skipped:], *titles, *(["difference"] if len(titles) > 1 else [])]
    return (head, [row[skipped:] for row in rows]) if rows else ([], [])


def _asked(evaluation: dict) -> dict:
    return {name: evaluation[name] for name in QUESTION if evaluation.get(name) not in (None, "", {})}


def _with_earlier(evaluation: dict, task: str, earlier: dict | None) -> dict:
    """Return an evaluation of a task, with the earlier scores of the model that it has left out, on as many rows."""
    scores = {title: {task: of[task]} for title, of in evaluation["scores"].items() if task in of}
    if earlier and earlier.get("limit") == evaluation.get("limit"):
        rows = {score.get("rows") for of in scores.values() for score in of[task].values()}
        for title, of in earlier["scores"].items():
            if title not in scores and {score.get("rows") for score in of[task].values()} == rows:
                scores[title] = of
    return evaluation | {"scores": scores}


def _rows(weights: str, task: str, evaluation: dict, titles: list[str]) -> list[list[str]]:
    """Return a row for each metric of a task."""
    found, scores = [], evaluation["scores"]
    words = [QUESTION[name].format(str(value)[:SHOWN]) for name, value in _asked(evaluation).items()]
    for metric in dict.fromkeys(metric for of in scores.values() for metric in of.get(task, {})):
        each = {title: scores[title].get(task, {}).get(metric) for title in titles if title in scores}
        rows = next((f"{score['rows']:,}" for score in each.values() if score and score.get("rows")), "")
        first = "first " if evaluation.get("limit") is not None and rows else ""
        name = ", ".join([task, *words])
        cells = [weights, name, metric, first + rows, *(_shown(each.get(title)) for title in titles)]
        found.append([printable(cell) for cell in [*cells, *([_difference(each)] if len(titles) > 1 else [])]])
    return found


def _shown(score: dict | None) -> str:
    if score is None or score.get("value") is None:
        return ""
    error = score.get("stderr")
    return f"{score['value']:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def _difference(each: dict[str, dict | None]) -> str:
    """Return tuned - base, and in how many standard errors of the difference of two samples."""
    base, tuned = each.get("base"), each.get("tuned")
    if not base or not tuned or None in (base.get("value"), tuned.get("value")):
        return ""
    apart = tuned["value"] - base["value"]
    noise = sum((score.get("stderr") or 0.0) ** 2 for score in (base, tuned)) ** 0.5
    return f"{apart:+.4f}" + (f" ({abs(apart) / noise:.1f} standard errors)" if noise else "")


def as_text(head: list[str], rows: list[list[str]]) -> str:
    """Return a table for a terminal."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)


def as_markdown(head: list[str], rows: list[list[str]]) -> str:
    """Return a table for a model card."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
