"""`zerofit eval`: score a trained model and its base with lm-evaluation-harness, side by side."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from zerofit.base import distributed, paths
from zerofit.base.errors import OutOfMemory, Unavailable, UserError
from zerofit.data.chat_templates import arguments
from zerofit.export import source
from zerofit.job import scores
from zerofit.report import run_page
from zerofit.tools.scores import models, rank, tasks
from zerofit.train import model_card

EXAMPLES = """examples:
  zerofit eval runs/x --tasks gsm8k,ifeval             tasks of the harness, from the Hub or its cache
  zerofit eval runs/x --tasks my_tasks/                custom tasks: YAML files with their data
  zerofit eval runs/x/checkpoint-50 --tasks my_tasks/  a checkpoint, even of a run that is still training
"""

UNSAFE_CHARACTERS = re.compile(r"[^-.\w]")  # characters of task names that are not allowed in file names

ERRORS = {kind.exit_code: kind for kind in (UserError, OutOfMemory, Unavailable)}


def main(argv: list[str]) -> None:
    """Run `zerofit eval`; see --help. Raises: UserError for a folder without a model, or missing tasks."""
    args = parsed(argv)
    if find_spec("lm_eval") is None:
        raise UserError(
            "lm-evaluation-harness is not installed: pip install 'zerofit[eval]', or make install EXTRAS=eval."
        )
    chosen = models.to_score(args.run, args.base, args.skip_base, args.trust_remote_code)
    saved = chosen[-1].saved
    if saved.run:
        scores.read_evaluations(saved.run)  # reject a damaged file before hours of scoring
    before = saved.label, _writes(saved)
    answer = _answer(question(args, chosen), args.gpus)
    evaluation = record(args, before[0], answer)
    print(scores.as_text(*scores.table([evaluation])), flush=True)
    if saved.folder.exists() and (saved.label, _writes(saved)) != before:  # a checkpoint may be removed once it is read
        raise UserError(
            f"{saved.folder}: was overwritten during scoring, so the scores are discarded; score it again after its "
            "run has ended."
        )
    if saved.run:
        keep(saved, evaluation, answer["samples"])


def parsed(argv: list[str]) -> argparse.Namespace:
    """Return the arguments. Raises: UserError for invalid values."""
    parser = argparse.ArgumentParser(
        prog="zerofit eval", allow_abbrev=False, description=__doc__, epilog=EXAMPLES,
        usage="zerofit eval RUN --tasks NAME|FOLDER [...] [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="a run folder, one of its checkpoints, its final/, or an export")
    parser.add_argument(
        "--tasks", nargs="+", required=True, metavar="T", help="task names, or folders and files of custom tasks"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="processes that share the rows, each with a full model"
    )
    parser.add_argument("--batch_size", default="8", metavar="N", help="rows per batch (8); auto: the most that fit")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows of each task, for a trial")
    parser.add_argument(
        "--num_fewshot", type=int, metavar="N", help="examples before each question (default: set by the task)"
    )
    parser.add_argument(
        "--gen_kwargs", default="", metavar="K=V,..", help="generation options, such as max_gen_toks=2048"
    )
    parser.add_argument("--system_instruction", default="", metavar="TEXT", help="a system message")
    parser.add_argument("--no_chat_template", dest="chat_template", action="store_false",
                        help="prompts as plain text, also for a tokenizer with a chat template")  # fmt: skip
    parser.add_argument(arguments.FLAG, metavar="JSON", help="a JSON object (default: as in the training)")
    parser.add_argument("--log_samples", action="store_true", help="write each row's answer into the run folder")
    parser.add_argument("--skip_base", action="store_true", help="score the tuned model only")
    parser.add_argument("--base", default="", metavar="DIR", help="the folder of the base, if it was moved")
    parser.add_argument("--confirm_run_unsafe_code", action="store_true", help="allow tasks to run the model's code")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code in the model's folder")
    args = parser.parse_args(argv)
    args.tasks = tasks.words(args.tasks)
    if not args.tasks:
        raise UserError("--tasks: name tasks of lm-evaluation-harness, or a folder of custom tasks.")
    if not re.fullmatch(r"[1-9]\d*|auto(:\d+)?", args.batch_size):
        raise UserError(f"--batch_size {args.batch_size}: must be a positive integer or auto.")
    for name, minimum in (("gpus", 1), ("limit", 1), ("num_fewshot", 0)):
        if (value := getattr(args, name)) is not None and value < minimum:
            raise UserError(f"--{name} {value}: must be {minimum} or more.")
    args.chat_template_kwargs = arguments.parse_arguments(arguments.FLAG, args.chat_template_kwargs)
    return args


def question(args: argparse.Namespace, chosen: list[models.Model]) -> dict:
    """Return the request for each process of a job (rank.score)."""
    trained_with = chosen[-1].saved.argument("chat_template_kwargs")
    return {
        "models": [model.as_json() for model in chosen],
        "template_arguments": args.chat_template_kwargs or arguments.parse_arguments(arguments.FLAG, trained_with),
        "unsafe": args.confirm_run_unsafe_code,
        **{name: getattr(args, name) for name in ("tasks", "batch_size", "limit", "num_fewshot", "gen_kwargs",
                                                   "system_instruction", "chat_template", "log_samples")},
    }  # fmt: skip


def _answer(request: dict, processes: int) -> dict:
    """Score in this process or in several; return rank 0's answer. Raises: the UserError of any process."""
    if processes == 1:
        return rank.score(request)

    gpus = torch.cuda.device_count()
    if 0 < gpus < processes:
        raise UserError(f"--gpus {processes}: this machine has {gpus}.")
    env = os.environ | ({} if gpus else {"OMP_NUM_THREADS": str(max(1, distributed.cores() // processes))})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "question.json"
        file.write_text(json.dumps(request, default=str), encoding="utf-8")
        ranks = ["--standalone", "--nproc_per_node", str(processes), "-m", rank.__name__, str(file)]
        done = subprocess.run([sys.executable, "-m", "zerofit.launch.torchrun", *ranks], env=env, check=False)
        for error in map(json.loads, map(Path.read_text, sorted(Path(folder).glob("error-*.json")))):
            raise ERRORS.get(error["exit_code"], UserError)(error["error"])
        if done.returncode or not (answer := file.with_name("answer.json")).exists():
            raise UserError(
                f"a process of lm-evaluation-harness ended with code {done.returncode}; see its output above."
            )
        return json.loads(answer.read_text(encoding="utf-8"))


def _writes(saved: source.Saved) -> dict[str, int]:
    """Return the modification time of each weights file."""
    return {file.name: file.stat().st_mtime_ns for file in saved.weights}


def record(args: argparse.Namespace, weights: str, answer: dict) -> dict:
    """Return an evaluation for scores.json. weights: the name of the scored weights."""
    options = ("limit", "num_fewshot", "batch_size", "gen_kwargs", "system_instruction", "chat_template_kwargs")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "weights": weights,
        "harness": answer["harness"],
        "processes": answer["processes"],
        "chat_template": answer["chat_template"],
        "plain_text": None if args.chat_template else "asked for",
        **{name: getattr(args, name) for name in options},
        "scores": answer["scores"],
    }


def keep(saved: source.Saved, evaluation: dict, samples: dict[str, dict[str, list]]) -> None:
    """Write an evaluation into the run folder, its report page and the weights' model card; print the paths."""
    run = saved.run
    file = scores.add(run, evaluation)
    print(f"scores: {file}", flush=True)
    for title, tasks_ in samples.items():
        for task, rows in tasks_.items():
            name = f"{saved.folder.name}-{title}-{UNSAFE_CHARACTERS.sub('_', task)}"
            place = paths.sibling(run / "scores" / name, ".jsonl")
            place.parent.mkdir(exist_ok=True)
            paths.write_text(place, "".join(json.dumps(row, default=str) + "\n" for row in rows))
            print(f"answers: {place}", flush=True)
    card = saved.folder / "README.md"
    if card.is_file() and evaluation["limit"] is None:
        text = card.read_text(encoding="utf-8")
        paths.write_text(card, model_card.with_scores(text, scores.read_evaluations(run), evaluation["weights"]))
        print(f"model card: {card}", flush=True)
    if (run / run_page.FILE).is_file():
        run_page.write(run, next_printed=True)
