"""One process of `zerofit eval`: score models by lm-evaluation-harness, which shares the rows among the processes.

python -m zerofit.tools.scores.rank QUESTION.json     writes answer.json, or error-<rank>.json, beside it
"""

import gc
import json
import logging
import sys
from importlib import metadata
from numbers import Real
from pathlib import Path

from zerofit.base import process

if __name__ == "__main__":
    process.begin()  # before anything imports torch

import torch

from zerofit.base import distributed, log_filters, rank_status
from zerofit.base.errors import OutOfMemory, UserError, first_line
from zerofit.tools.scores import models, tasks


def main() -> None:
    question = Path(sys.argv[1])
    log_filters.libraries()
    try:
        answer = score(json.loads(question.read_text(encoding="utf-8")))
    except UserError as error:
        said = {"error": str(error), "exit_code": error.exit_code}
        question.with_name(f"error-{distributed.rank()}.json").write_text(json.dumps(said), encoding="utf-8")
        sys.exit(error.exit_code)
    if answer:
        question.with_name("answer.json").write_text(json.dumps(answer, default=str), encoding="utf-8")


def score(asked: dict) -> dict:
    """Return {"scores": {"base", "tuned": job.scores.Scores}, ...} on rank 0, {} on others.

    Args: asked: as `evaluate.question` makes it. Raises: UserError for tasks that cannot be built, and OutOfMemory.
    """
    _quiet()
    found = tasks.find(asked["tasks"])
    built = tasks.build(found, asked["unsafe"])  # before a model is loaded: what is missing is said at once
    _check_rows(tasks.rows_of(built), asked["limit"])
    answer = {"scores": {}, "chat_template": {}, "samples": {}, "harness": metadata.version("lm_eval"), "processes": 1}
    for model in map(models.Model.of_json, asked["models"]):
        built = built or tasks.build(found, asked["unsafe"])  # anew: a task keeps what the model before has answered
        results, answer["chat_template"][model.title], size = _of_model(model, built, asked)
        built = None
        answer["processes"] = size
        if results:
            answer["scores"][model.title] = numbers(results)
            answer["samples"][model.title] = results.get("samples", {})
    return answer if distributed.rank() == 0 else {}


def _of_model(model: models.Model, built: list, asked: dict) -> tuple[dict | None, bool, int]:
    """Return the harness's results (None on ranks but 0), whether prompts had a chat template, and the ranks."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    templated = bool(asked["chat_template"] and model.tokenizer().chat_template)
    if distributed.rank() == 0:
        print(
            f"{model.title}: {_name(model)}, prompts {'by its chat template' if templated else 'as plain text'}",
            flush=True,
        )
    try:
        lm = models.for_harness(model, asked["batch_size"], asked["template_arguments"])
        results = simple_evaluate(
            model=lm,
            tasks=built,
            task_manager=TaskManager(include_defaults=False),  # they are built: else it reads 14,000 files again
            num_fewshot=asked["num_fewshot"],
            batch_size=asked["batch_size"],
            limit=asked["limit"],
            log_samples=asked["log_samples"],
            apply_chat_template=templated,
            system_instruction=asked["system_instruction"] or None,
            gen_kwargs=asked["gen_kwargs"] or None,
            confirm_run_unsafe_code=asked["unsafe"],
        )
        size = lm.world_size
    except AssertionError as error:  # of a task that asks for more tokens than the model has positions
        raise UserError(
            f"{model.title}: lm-evaluation-harness: {first_line(error)} (--gen_kwargs max_gen_toks=N)."
        ) from error
    except (RuntimeError, MemoryError) as error:
        if not (rank_status.gpu_is_full(error) or rank_status.host_is_full(error)):
            raise
        raise OutOfMemory(
            f"{model.title}: its memory is full at --batch_size {asked['batch_size']}; try a smaller one, or a GPU on "
            "which nothing else runs."
        ) from error
    del lm
    gc.collect()  # the next model finds the memory free
    _empty_cache()
    return results, templated, size


def _name(model: models.Model) -> str:
    return f"{model.saved.base}" if model.without_adapter else f"{model.saved.folder}"


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_rows(rows: dict[str, int], limit: int | None) -> None:
    """Refuse more processes than a task has rows: the harness fails in a process without any. Raises: UserError."""
    size = distributed.size()
    for task, count in rows.items():
        if min(count, limit or count) < size:
            raise UserError(
                f"--gpus {size}: {task} has {min(count, limit or count)} rows to share; name fewer processes."
            )


def numbers(results: dict) -> dict[str, dict[str, dict]]:
    """Return {task: {metric: {"value", "stderr", "rows"}}} of the harness's results.

    Its keys are "metric,filter" and "metric_stderr,filter"; a filter's name is kept where a task has several.
    """
    found = {}
    for task, values in results["results"].items():
        keys = [key for key, value in values.items() if "," in key and isinstance(value, Real)]
        keys = [key for key in keys if not key.partition(",")[0].endswith("_stderr")]
        several = len({key.partition(",")[2] for key in keys}) > 1
        for key in keys:
            metric, _, way = key.partition(",")
            error = values.get(f"{metric}_stderr,{way}")
            one = {"value": float(values[key]), "stderr": float(error) if isinstance(error, Real) else None}
            one["rows"] = int(values.get("sample_len") or 0)
            found.setdefault(task, {})[f"{metric} ({way})" if several else metric] = one
    return found


def _quiet() -> None:
    """Let the harness warn on rank 0 only, and not of what this kit does on purpose."""
    harness = logging.getLogger("lm_eval")
    harness.setLevel(logging.WARNING if distributed.rank() == 0 else logging.ERROR)
    known = ("`pretrained` model kwarg is not of type `str`", "Passed an already-initialized model")
    logging.getLogger("lm_eval.models.huggingface").addFilter(lambda record: not record.getMessage().startswith(known))


if __name__ == "__main__":
    main()
