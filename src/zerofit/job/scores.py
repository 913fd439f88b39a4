"""Write and read scores.json of a run folder: what `zerofit eval` has measured, base and tuned model side by side."""

from pathlib import Path

from zerofit.base.errors import printable
from zerofit.job import run_folder

FILE = "scores.json"

HEAD = ["weights", "task", "metric", "rows"]  # of a table of scores; then the models' titles, and the difference

Scores = dict[str, dict[str, dict]]  # task -> metric -> {"value", "stderr" (None: the harness has none), "rows"}


def add(folder: Path, evaluation: dict) -> Path:
    """Add an evaluation to the folder's file, which keeps all earlier ones; return its path."""
    file = folder / FILE
    run_folder.write_json(file, {"evaluations": [*of_folder(folder), evaluation]})
    return file


def of_folder(folder: Path) -> list[dict]:
    """Return the evaluations of a run folder, the oldest first. Raises: UserError for values that none writes."""
    return run_folder.read_record(folder / FILE).get("evaluations", [])


def is_of_final(weights: str) -> bool:
    """Return whether the name of an evaluation's weights is that of final/: "final (step 174)"."""
    return weights.partition(" ")[0] == "final"


def table(evaluations: list[dict], weights: str = "") -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table with the newest score of each task; ([], []) without scores.

    A trial on the first rows only (--limit) stands where there is no score on all of them.
    Args: weights: those of this name only, such as "checkpoint-50"; "": of all, each row with its name.
    """
    chosen = {}
    for one in evaluations:
        for task in dict.fromkeys(task for of in one.get("scores", {}).values() for task in of):
            key = (str(one.get("weights", "")), task, one.get("num_fewshot"))
            if one.get("limit") is None or chosen.get(key, one).get("limit") is not None:
                chosen[key] = one
    chosen = {key: one for key, one in chosen.items() if weights in ("", key[0])}
    titles = [title for title in ("base", "tuned") if any(title in one["scores"] for one in chosen.values())]
    rows = [row for (name, task, _), one in chosen.items() for row in _rows(name, task, one, titles)]
    skipped = 1 if weights else 0
    head = [*HEAD[skipped:], *titles, *(["difference"] if len(titles) > 1 else [])]
    return (head, [row[skipped:] for row in rows]) if rows else ([], [])


def _rows(weights: str, task: str, evaluation: dict, titles: list[str]) -> list[list[str]]:
    """Return a row for each metric of a task."""
    found, scores = [], evaluation["scores"]
    shots = evaluation.get("num_fewshot")
    for metric in dict.fromkeys(metric for of in scores.values() for metric in of.get(task, {})):
        each = {title: scores[title].get(task, {}).get(metric) for title in titles if title in scores}
        rows = next((f"{score['rows']:,}" for score in each.values() if score and score.get("rows")), "")
        first = "first " if evaluation.get("limit") is not None and rows else ""
        name = task if shots is None else f"{task}, {shots} shots"
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
