"""Reproduce a published result: train, score, and print the scores beside the published ones.

python examples/reproduce/run.py zephyr-sft --gpus 8     any flag of the recipe overrides a line of its config.yaml
python examples/reproduce/run.py zephyr-sft --dry        only print the commands
python examples/reproduce/run.py zephyr-sft --sample     try the chain on sample rows and a tiny model
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
    """Return what published.yaml of a recipe's folder says. Raises: UserError for an unknown recipe."""
    file = HERE / name / "published.yaml"
    if "/" in name or not file.is_file():
        names = ", ".join(sorted(file.parent.name for file in HERE.glob("*/published.yaml")))
        raise UserError(f"RECIPE={name}: is no folder of examples/reproduce; name one of {names}.")
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def of_harness(score: dict, folder: Path) -> tuple[float, float] | None:
    """Return (value, standard error) of the newest whole evaluation of final/ in scores.json; None without one."""
    found = scores.of_folder(folder)
    whole = [one for one in found if scores.is_of_final(one["weights"]) and one.get("limit") is None]
    for evaluation in reversed(whole):
        metrics = evaluation["scores"].get("tuned", {}).get(score["task"], {})
        if values := metrics.get(score["metric"]):
            return values["value"], values.get("stderr") or 0.0
    return None


def of_run(score: dict, folder: Path) -> tuple[float, float] | None:
    """Return (value, 0) of the run's own evaluations: the last, the best, or the rows seen when one was low enough."""
    name = "eval_loss" if "until" in score else score["metric"]
    found = [(row["step"], row[name]) for row in run_folder.read_metrics(folder) if row.get(name) is not None]
    if "until" in score:
        arguments = json.loads((folder / "run.json").read_text(encoding="utf-8"))["arguments"]
        reached = [step for step, value in found if value <= score["until"]]
        return (reached[0] * arguments["effective_batch_size"]["value"], 0.0) if reached else None
    values = [value for _, value in found]
    return (min(values) if score.get("best") else values[-1], 0.0) if values else None


def compare(result: dict, folder: Path, of_sample: bool) -> list[str]:
    """Return the lines of the table; the noise is one standard deviation of the difference, from both sides."""
    what = "of sample rows and a tiny model: NO REPRODUCTION" if of_sample else str(folder)
    ours = "ours, of the sample" if of_sample else "ours"
    lines = [f"{result['title']}, {what}", "", f"| score | published | {ours} | difference | noise |", f"|{'---|' * 5}"]
    for score in result["scores"]:
        name = f"{score['task']}, {score['metric']}" if "task" in score else score["metric"]
        found = (of_harness if "task" in score else of_run)(score, folder)
        value, error = found or (None, 0.0)
        own = ["not scored", ""] if value is None else [f"{value:.4g}", f"{value - score['value']:+.4g}"]
        noise = f"{math.hypot(score['noise'], error):.2g}"
        lines.append(f"| {' | '.join([name, format(score['value'], 'g'), *own, noise])} |")
    return [*lines, "", *dict.fromkeys(f"published: {score['source']}" for score in result["scores"])]


def start(words: list) -> None:
    """Run a command of zerofit; if it fails, which it has explained, end with its exit code."""
    if code := subprocess.run([sys.executable, "-m", "zerofit", *map(str, words)]).returncode:
        raise SystemExit(code)


def main() -> None:
    """Run the chain. Raises: UserError for an unknown recipe."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", help="a folder beside this file")
    parser.add_argument("--gpus", default="1", help="processes on this machine")
    parser.add_argument("--output_dir", default="", help="run folder; a finished run in it is only scored")
    parser.add_argument("--dry", action="store_true", help="only print the commands")
    parser.add_argument("--sample", action="store_true", help="try the chain on sample rows and a tiny model")
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
        if own := [score["metric"] for score in result["scores"] if "task" not in score]:
            print(f"# the run's own evaluations give {', '.join(own)}")
        return
    if not run_folder.finished(folder):
        start(train)
    if tasks and not args.sample:
        if importlib.util.find_spec("lm_eval"):
            start(score)
        else:
            print(
                "tasks are not scored without lm-evaluation-harness: make install EXTRAS=eval, then this command again"
            )
    table = "\n".join(compare(result, folder, args.sample))
    (folder / "reproduction.md").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\nwritten: {folder / 'reproduction.md'}", flush=True)


if __name__ == "__main__":
    entrypoint.guard(main)
