"""Reproduce a published result: train, score, and print the scores next to the published ones.

python examples/reproduce/run.py zephyr-sft --gpus 8     any flag of the recipe overrides a line of its config.yaml
python examples/reproduce/run.py zephyr-sft --dry        print only the commands
python examples/reproduce/run.py zephyr-sft --sample     test the chain on sample rows and a tiny model
"""

import argparse
import importlib.util
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import sample
import yaml

from zerofit import entrypoint
from zerofit.base.errors import UserError
from zerofit.job import run_folder, scores

HERE = Path(__file__).resolve().parent


def published(name: str) -> dict:
    """Return a recipe's published.yaml. Raises: UserError for an unknown recipe."""
    file = HERE / name / "published.yaml"
    if "/" in name or not file.is_file():
        names = ", ".join(sorted(file.parent.name for file in HERE.glob("*/published.yaml")))
        raise UserError(f"RECIPE={name}: not a folder of examples/reproduce; use one of {names}.")
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def harness_score(score: dict, folder: Path) -> tuple[float, float] | None:
    """Return (value, standard error) of the newest full evaluation of final/ in scores.json; None if it is missing."""
    evaluations = scores.read_evaluations(folder)
    full = [one for one in evaluations if scores.is_final(one["weights"]) and one.get("limit") is None]
    for evaluation in reversed(full):
        metrics = evaluation["scores"].get("tuned", {}).get(score["task"], {})
        if values := metrics.get(score["metric"]):
            return values["value"], values.get("stderr") or 0.0
    return None


def run_score(score: dict, folder: Path) -> tuple[float, float] | None:
    """Return (value, 0) from the run's evaluations: the last, the best, or the rows until the loss was low enough."""
    name = "eval_loss" if "until" in score else score["metric"]
    points = [(row["step"], row[name]) for row in run_folder.read_metrics(folder) if row.get(name) is not None]
    if "until" in score:
        arguments = json.loads((folder / "run.json").read_text(encoding="utf-8"))["arguments"]
        reached = [step for step, value in points if value <= score["until"]]
        return (reached[0] * arguments["effective_batch_size"]["value"], 0.0) if reached else None
    values = [value for _, value in points]
    return (min(values) if score.get("best") else values[-1], 0.0) if values else None


def compare(result: dict, folder: Path, is_sample: bool) -> list[str]:
    """Return the lines of the table; the noise is one standard deviation of the difference."""
    run = "sample rows and a tiny model: NO REPRODUCTION" if is_sample else str(folder)
    ours = "ours, on the sample" if is_sample else "ours"
    lines = [
        f"{result['title']}, {run}",
        "",
        f"| score | published | {ours} | difference | noise |",
        f"|{'---|' * 5}",
    ]
    for score in result["scores"]:
        name = f"{score['task']}, {score['metric']}" if "task" in score else score["metric"]
        measured = (harness_score if "task" in score else run_score)(score, folder)
        value, error = measured or (None, 0.0)
        cells = ["not scored", ""] if value is None else [f"{value:.4g}", f"{value - score['value']:+.4g}"]
        noise = f"{math.hypot(score['noise'], error):.2g}"
        lines.append(f"| {' | '.join([name, format(score['value'], 'g'), *cells, noise])} |")
    return [*lines, "", *dict.fromkeys(f"published: {score['source']}" for score in result["scores"])]


def start(words: list) -> None:
    """Run a zerofit command; exit with its code if it fails."""
    if code := subprocess.run([sys.executable, "-m", "zerofit", *map(str, words)]).returncode:
        raise SystemExit(code)


def main() -> None:
    """Run the chain. Raises: UserError for an unknown recipe."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", help="a folder next to this file")
    parser.add_argument("--gpus", default="1", help="processes on this machine")
    parser.add_argument("--output_dir", default="", help="run folder; a finished run is only scored")
    parser.add_argument("--dry", action="store_true", help="print only the commands")
    parser.add_argument("--sample", action="store_true", help="test the chain on sample rows and a tiny model")
    args, flags = parser.parse_known_args()
    result = published(args.recipe)
    folder = Path(args.output_dir or f"runs/reproduce/{args.recipe}{'-sample' * args.sample}")
    tasks = list(dict.fromkeys(score["task"] for score in result["scores"] if "task" in score))
    program = HERE.parents[1] / "recipes" / f"{result['recipe']}.py"
    config = HERE / args.recipe / "config.yaml"
    more = sample.flags(config, result["model_config"], folder) if args.sample and not args.dry else []
    train = ["launch", "--gpus", args.gpus, program, "--config", config, "--output_dir", folder, *more, *flags]
    score = ["eval", folder, "--tasks", ",".join(tasks), "--gpus", args.gpus, "--skip_base"]
    if args.dry:
        print("\n".join(shlex.join(["zerofit", *map(str, words)]) for words in ([train, score] if tasks else [train])))
        if metrics := [score["metric"] for score in result["scores"] if "task" not in score]:
            print(f"# the run's own evaluations give {', '.join(metrics)}")
        return
    if not run_folder.finished(folder):
        start(train)
    if tasks and not args.sample:
        if importlib.util.find_spec("lm_eval"):
            start(score)
        else:
            print("the tasks need lm-evaluation-harness: run make install EXTRAS=eval, then this command again")
    table = "\n".join(compare(result, folder, args.sample))
    (folder / "reproduction.md").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\nwritten: {folder / 'reproduction.md'}", flush=True)


if __name__ == "__main__":
    entrypoint.guard(main)
