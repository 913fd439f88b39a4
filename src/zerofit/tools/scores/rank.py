"""One process of `zerofit eval`: score models with lm-evaluation-harness, which distributes the rows over processes.

python -m zerofit.tools.scores.rank QUESTION.json     writes answer.json, or error-<rank>.json, next to it
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
        report = {"error": str(error), "exit_code": error.exit_code}
        question.with_name(f"error-{distributed.rank()}.json").write_text(json.dumps(report), encoding="utf-8")
        sys.exit(error.exit_code)
    if answer:
        question.with_name("answer.json").write_text(json.dumps(answer, default=str), encoding="utf-8")


def score(request: dict) -> dict:
    """Return {"scores": {"base", "tuned": job.scores.Scores}, ...} on rank 0, {} on others.

    Args: request: from `evaluate.question`. Raises: UserError for tasks that cannot be built, and OutOfMemory.
    """
    _quiet()
    sources = tasks.find(request["tasks"])
    built = tasks.build(sources, request["unsafe"])  # reports missing data before a model is loaded
    _check_rows(tasks.rows_of(built), request["limit"])
    answer = {"scores": {}, "chat_template": {}, "samples": {}, "harness": metadata.version("lm_eval"), "processes": 1}
    for model in map(models.Model.from_json, request["models"]):
        built = built or tasks.build(sources, request["unsafe"])  # tasks keep the answers of the previous model
        results, answer["chat_template"][model.title], size = _score_model(model, built, request)
        built = None
        answer["processes"] = size
        if results:
            answer["scores"][model.title] = numbers(results)
            answer["samples"][model.title] = results.get("samples", {})
    return answer if distributed.rank() == 0 else {}


def _score_model(model: models.Model, built: list, request: dict) -> tuple[dict | None, bool, int]:
    """Return (results on rank 0, None on others; whether prompts used a chat template; number of ranks)."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    templated = bool(request["chat_template"] and model.tokenizer().chat_template)
    if distributed.rank() == 0:
        prompts = "with its chat template" if templated else "as plain text"
        print(f"{model.title}: {_name(model)}, prompts {prompts}", flush=True)
    try:
        lm = models.for_harness(model, request["batch_size"], request["template_arguments"])
        results = simple_evaluate(
            model=lm,
            tasks=built,
            task_manager=TaskManager(include_defaults=False),  # avoids reading 14,000 files again
            num_fewshot=request["num_fewshot"],
            batch_size=request["batch_size"],
            limit=request["limit"],
            log_samples=request["log_samples"],
            apply_chat_template=templated,
            system_instruction=request["system_instruction"] or None,
            gen_kwargs=request["gen_kwargs"] or None,
            confirm_run_unsafe_code=request["unsafe"],
        )
        size = lm.world_size
    except AssertionError as error:  # a task requests more tokens than the model has positions
        raise UserError(
            f"{model.title}: lm-evaluation-harness: {first_line(error)} (--gen_kwargs max_gen_toks=N)."
        ) from error
    except (RuntimeError, MemoryError) as error:
        if not (rank_status.gpu_is_full(error) or rank_status.host_is_full(error)):
            raise
        raise OutOfMemory(
            f"{model.title}: out of memory at --batch_size {request['batch_size']}; try a smaller one, or a "
            "GPU without other processes."
        ) from error
    del lm
    gc.collect()  # free the memory for the next model
    _empty_cache()
    return results, templated, size


def _name(model: models.Model) -> str:
    return f"{model.saved.base}" if model.without_adapter else f"{model.saved.folder}"


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_rows(rows: dict[str, int], limit: int | None) -> None:
    """Reject more processes than a task has rows, for which the harness fails. Raises: UserError."""
    size = distributed.size()
    for task, count in rows.items():
        if min(count, limit or count) < size:
            raise UserError(f"--gpus {size}: {task} has only {min(count, limit or count)} rows; use fewer processes.")


def numbers(results: dict) -> dict[str, dict[str, dict]]:
    """Return {task: {metric: {"value", "stderr", "rows"}}} from the harness's results.

    Its keys are "metric,filter" and "metric_stderr,filter"; the filter is kept if a task has several.
    """
    scores = {}
    for task, values in results["results"].items():
        keys = [key for key, value in values.items() if "," in key and isinstance(value, Real)]
        keys = [key for key in keys if not key.partition(",")[0].endswith("_stderr")]
        several = len({key.partition(",")[2] for key in keys}) > 1
        for key in keys:
            metric, _, name = key.partition(",")
            error = values.get(f"{metric}_stderr,{name}")
            entry = {"value": float(values[key]), "stderr": float(error) if isinstance(error, Real) else None}
            entry["rows"] = int(values.get("sample_len") or 0)
            scores.setdefault(task, {})[f"{metric} ({name})" if several else metric] = entry
    return scores


def _quiet() -> None:
    """Show the harness's warnings on rank 0 only, without those that zerofit causes deliberately."""
    harness = logging.getLogger("lm_eval")
    harness.setLevel(logging.WARNING if distributed.rank() == 0 else logging.ERROR)
    known = ("`pretrained` model kwarg is not of type `str`", "Passed an already-initialized model")
    logging.getLogger("lm_eval.models.huggingface").addFilter(lambda record: not record.getMessage().startswith(known))


if __name__ == "__main__":
    main()
