"""`zerofit eval`: score a trained model and its base by lm-evaluation-harness, side by side."""

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
  zerofit eval runs/x --tasks my_tasks/                own ones: YAML files, and the data that they name
  zerofit eval runs/x/checkpoint-50 --tasks my_tasks/  a checkpoint, also of a run that still trains
"""

NOT_OF_NAMES = re.compile(r"[^-.\w]")  # characters of tasks' names that a file's name must not have

OF_ERRORS = {kind.exit_code: kind for kind in (UserError, OutOfMemory, Unavailable)}


def main(argv: list[str]) -> None:
    """`zerofit eval`: see --help. Raises: UserError for a folder without a model, or tasks that are not there."""
    given = parsed(argv)
    if find_spec("lm_eval") is None:
        raise UserError(
            "lm-evaluation-harness is not installed: pip install 'zerofit[eval]', or make install EXTRAS=eval."
        )
    chosen = models.to_score(given.run, given.base, given.skip_base, given.trust_remote_code)
    saved = chosen[-1].saved
    if saved.run:
        scores.of_folder(saved.run)  # a damaged file is refused before the hours of scoring
    before = saved.label, _writes(saved)
    answer = _answer(question(given, chosen), given.gpus)
    evaluation = record(given, before[0], answer)
    print(scores.as_text(*scores.table([evaluation])), flush=True)
    if saved.folder.exists() and (saved.label, _writes(saved)) != before:  # a checkpoint may be removed once it is read
        raise UserError(
            f"{saved.folder}: was written again while it was scored: of which weights these scores are is not known, "
            "and they are not kept; score it again once its run has ended."
        )
    if saved.run:
        keep(saved, evaluation, answer["samples"])


def parsed(argv: list[str]) -> argparse.Namespace:
    """Return the arguments. Raises: UserError for values that mean nothing."""
    parser = argparse.ArgumentParser(
        prog="zerofit eval", allow_abbrev=False, description=__doc__, epilog=EXAMPLES,
        usage="zerofit eval RUN --tasks NAME|FOLDER [...] [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN", help="a run folder, one of its checkpoints, its final/, or an export")
    parser.add_argument(
        "--tasks", nargs="+", required=True, metavar="T", help="names of tasks; folders or files of own ones"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="processes that share the rows, each with a whole model"
    )
    parser.add_argument("--batch_size", default="8", metavar="N", help="rows at a time (8); auto: as many as fit")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first rows of each task: a trial, no score")
    parser.add_argument(
        "--num_fewshot", type=int, metavar="N", help="examples before each question; default: the task's own"
    )
    parser.add_argument("--gen_kwargs", default="", metavar="K=V,..", help="of generation, such as max_gen_toks=2048")
    parser.add_argument("--system_instruction", default="", metavar="TEXT", help="a system message")
    parser.add_argument("--no_chat_template", dest="chat_template", action="store_false",
                        help="prompts as plain text, also for a tokenizer with a chat template")  # fmt: skip
    parser.add_argument(arguments.FLAG, metavar="JSON", help="a JSON object; default: what the model was trained with")
    parser.add_argument("--log_samples", action="store_true", help="write each row's answer into the run folder")
    parser.add_argument("--skip_base", action="store_true", help="score the tuned model only")
    parser.add_argument("--base", default="", metavar="DIR", help="the base, where it has moved")
    parser.add_argument("--confirm_run_unsafe_code", action="store_true", help="tasks that run the model's code may")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that is in the model's folder")
    given = parser.parse_args(argv)
    given.tasks = tasks.words(given.tasks)
    if not given.tasks:
        raise UserError("--tasks: name tasks of lm-evaluation-harness, or a folder of own ones.")
    if not re.fullmatch(r"[1-9]\d*|auto(:\d+)?", given.batch_size):
        raise UserError(f"--batch_size {given.batch_size}: must be a whole number from 1, or auto.")
    for name, least in (("gpus", 1), ("limit", 1), ("num_fewshot", 0)):
        if (value := getattr(given, name)) is not None and value < least:
            raise UserError(f"--{name} {value}: must be {least} or more.")
    given.chat_template_kwargs = arguments.parsed(arguments.FLAG, given.chat_template_kwargs)
    return given


def question(given: argparse.Namespace, chosen: list[models.Model]) -> dict:
    """Return what each process of a job is asked (rank.score)."""
    trained_with = chosen[-1].saved.argument("chat_template_kwargs")
    return {
        "models": [model.as_json() for model in chosen],
        "template_arguments": given.chat_template_kwargs or arguments.parsed(arguments.FLAG, trained_with),
        "unsafe": given.confirm_run_unsafe_code,
        **{name: getattr(given, name) for name in ("tasks", "batch_size", "limit", "num_fewshot", "gen_kwargs",
                                                   "system_instruction", "chat_template", "log_samples")},
    }  # fmt: skip


def _answer(asked: dict, processes: int) -> dict:
    """Return rank 0's answer, of this process or of several. Raises: UserError as they do."""
    if processes == 1:
        return rank.score(asked)

    found = torch.cuda.device_count()
    if 0 < found < processes:
        raise UserError(f"--gpus {processes}: this machine has {found}.")
    env = os.environ | ({} if found else {"OMP_NUM_THREADS": str(max(1, distributed.cores() // processes))})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "question.json"
        file.write_text(json.dumps(asked, default=str), encoding="utf-8")
        ranks = ["--standalone", "--nproc_per_node", str(processes), "-m", rank.__name__, str(file)]
        done = subprocess.run([sys.executable, "-m", "zerofit.launch.torchrun", *ranks], env=env, check=False)
        for said in map(json.loads, map(Path.read_text, sorted(Path(folder).glob("error-*.json")))):
            raise OF_ERRORS.get(said["exit_code"], UserError)(said["error"])
        if done.returncode or not (answer := file.with_name("answer.json")).exists():
            raise UserError(f"a process of lm-evaluation-harness ended with code {done.returncode}; why stands above.")
        return json.loads(answer.read_text(encoding="utf-8"))


def _writes(saved: source.Saved) -> dict[str, int]:
    """Return when each file of the weights was written."""
    return {file.name: file.stat().st_mtime_ns for file in saved.weights}


def record(given: argparse.Namespace, weights: str, answer: dict) -> dict:
    """Return an evaluation as scores.json keeps it. weights: their name as they were loaded."""
    asked = ("limit", "num_fewshot", "batch_size", "gen_kwargs", "system_instruction", "chat_template_kwargs")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "weights": weights,
        "harness": answer["harness"],
        "processes": answer["processes"],
        "chat_template": answer["chat_template"],
        "plain_text": None if given.chat_template else "asked for",
        **{name: getattr(given, name) for name in asked},
        "scores": answer["scores"],
    }


def keep(saved: source.Saved, evaluation: dict, samples: dict[str, dict[str, list]]) -> None:
    """Write an evaluation into the run folder, its report page and the model card of the weights; print where."""
    run = saved.run
    file = scores.add(run, evaluation)
    print(f"scores: {file}", flush=True)
    for title, tasks_ in samples.items():
        for task, rows in tasks_.items():
            name = f"{saved.folder.name}-{title}-{NOT_OF_NAMES.sub('_', task)}"
            place = paths.beside(run / "scores" / name, ".jsonl")
            place.parent.mkdir(exist_ok=True)
            paths.write_text(place, "".join(json.dumps(row, default=str) + "\n" for row in rows))
            print(f"answers: {place}", flush=True)
    card = saved.folder / "README.md"
    if card.is_file() and evaluation["limit"] is None:
        text = card.read_text(encoding="utf-8")
        paths.write_text(card, model_card.with_scores(text, scores.of_folder(run), evaluation["weights"]))
        print(f"model card: {card}", flush=True)
    if (run / run_page.FILE).is_file():
        run_page.write(run, told=True)
