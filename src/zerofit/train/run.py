"""Finish a recipe after training: save final/, evaluate, write result.json; and report failures."""

import contextlib
import json
from pathlib import Path

from zerofit.base import paths, rank_status
from zerofit.base.errors import DiskFull, OutOfMemory, Stopped, UserError, full_disk, printable
from zerofit.certificate import page, saved
from zerofit.checkpoint import restart, resumable
from zerofit.job import job, run_folder
from zerofit.job.settings import Check, written
from zerofit.model import adapters, generation
from zerofit.model.load import verify_saved
from zerofit.train import memory_report, memory_tracker, model_card
from zerofit.train.trainer import ZerofitTrainer


@contextlib.contextmanager
def failures_reported(trainer: ZerofitTrainer):
    """Write a failure to result.json and raise it again, with a message for out of memory and a full disk."""
    try:
        with memory_report.explained(trainer):
            yield
    except BaseException as error:
        folder = Path(trainer.args.output_dir)
        if isinstance(error, OutOfMemory):
            error.what_next = restart.record_smaller_settings(trainer.settings, error.phase)
        if isinstance(error, KeyboardInterrupt) and not rank_status.folder():  # else the supervisor prints it
            error = KeyboardInterrupt(resumable.how_to_continue("interrupted", folder, trainer.state.global_step))
        if trainer.args.process_index == 0 and not run_folder.finished(folder):
            kinds = {Stopped: "stopped", KeyboardInterrupt: "interrupted"}
            status = {
                "status": kinds.get(type(error), "failed"),
                "error": f"{type(error).__name__}: {error}",
                "steps": trainer.state.global_step,
            }
            with contextlib.suppress(OSError):  # the disk may be full; the original error must be raised
                run_folder.write_json(folder / "result.json", status)
                ended = f"the run has {status['status']} at step {status['steps']}"
                page.write(trainer.settings, ended, trainer.certificate.seconds)
        if not isinstance(error, UserError) and rank_status.disk_is_full(error):
            raise DiskFull(full_disk(folder)) from error
        raise error


def save_final(trainer: ZerofitTrainer) -> None:
    """Save the trained model or adapter with its card to final/ and verify its files. Collective."""
    final = _final(trainer)
    trainer.model.config.get_text_config().use_cache = True  # off during training only
    trainer.save_model(str(final))
    if trainer.args.process_index == 0:
        trainable, total = trainer.numel
        adapters.convert_to_plain_lora(trainer.model, final)
        (final / "training_args.bin").unlink(missing_ok=True)  # an unused pickle
        verify_saved(final, trainable if trainer.settings.trains_adapter else total)
        _write_card(trainer, final)
        run_folder.apply_umask(final)
        file = final / "generation_config.json"
        stops = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.exists() else None
        trainer.check_ends(shipped=generation.ids_of(stops))
    if trainer.settings.certificate:
        with trainer.certificate.timed():
            trainer.settings.checks.append(saved.check(trainer, final))
    else:
        trainer.settings.checks.append(Check("saved", None, "saved = trained: not compared (--certificate false)"))


def _write_card(trainer: ZerofitTrainer, final: Path) -> None:
    paths.write_text(final / "README.md", model_card.text(_card(trainer, final)))


def _card(trainer: ZerofitTrainer, final: Path) -> model_card.Card:
    state, model, adapter = trainer.state, trainer.model, final / "adapter_config.json"
    best = trainer.args.load_best_model_at_end and state.best_model_checkpoint
    step = int(best.rpartition("-")[2]) if best else state.global_step
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    return model_card.Card(
        facts=json.loads((final.parent / "run.json").read_text(encoding="utf-8")),
        name=final.parent.name,
        architecture=trainer.architecture,
        adapter=json.loads(adapter.read_text(encoding="utf-8")) if adapter.exists() else None,
        steps=step,
        losses=model_card.losses(state.log_history, step),
        weights=str(dtype).removeprefix("torch."),
        has_generation_config=(final / "generation_config.json").exists(),
    )


def _final(trainer: ZerofitTrainer) -> Path:
    return Path(trainer.args.output_dir) / "final"


def evaluate(trainer: ZerofitTrainer) -> dict:
    """Evaluate the saved model, print sample generations and return the metrics for result.json. Collective."""
    settings = trainer.settings
    evaluation = evaluation_of_saved(trainer)
    if trainer.args.process_index == 0 and (_final(trainer) / "README.md").exists():
        _write_card(trainer, _final(trainer))  # with this evaluation's loss
    preference_prefixes = ("eval_rewards", "eval_logps", "eval_preference", "eval_kl")
    metrics = {"eval_loss": evaluation["eval_loss"] if evaluation else None}
    metrics |= {name: value for name, value in (evaluation or {}).items() if name.startswith(preference_prefixes)}
    if settings.bundled:
        name = trainer.objective.score_name.replace(" ", "_")
        metrics |= {f"{name}_before": trainer.reporter.before, f"{name}_after": trainer.score()}
    before = trainer.reporter.samples_before
    samples = [
        {"prompt": prompt, "before": before.get(prompt), "after": answer, "wanted": wanted}
        for prompt, answer, wanted in generation.samples(trainer, settings.num_samples)
    ]
    metrics["samples"] = samples
    if trainer.args.process_index == 0:
        for sample in samples:
            labels = {"prompt": "prompt", "before": "before", "after": "after", "wanted": "expected"}
            lines = [f"  {label:<8}  {sample[key]}" for key, label in labels.items() if sample[key] is not None]
            print(printable("\n".join(["", *lines])))
        if settings.bundled:
            before, after = metrics[f"{name}_before"], metrics[f"{name}_after"]
            when = f"at step {first}" if (first := trainer.reporter.before_step) else "before"
            print(f"\n{trainer.objective.score_name} on held-out rows: {before:.1%} {when}, {after:.1%} after")
    return metrics


def evaluation_of_saved(trainer: ZerofitTrainer) -> dict | None:
    """Return the metrics of the model in final/, from the last evaluation or a new one. Collective.

    With --load_best_model_at_end the weights are of an earlier step than the last evaluation.
    """
    state = trainer.state
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    if trainer.eval_dataset is None:
        return evaluations[-1] if evaluations else None
    best = trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None
    if evaluations and not best and evaluations[-1]["step"] == state.global_step:
        return evaluations[-1]
    return trainer.evaluate()


def write_result(trainer: ZerofitTrainer, metrics: dict) -> None:
    """Write the memory report and, last, result.json. Collective.

    Args: metrics: from `evaluate`.
    """
    args, settings = trainer.args, trainer.settings
    folder, first = Path(args.output_dir), args.process_index == 0
    result = _result(trainer) | metrics
    if first and not settings.use_cpu:
        write_prediction(result["peak_memory_bytes"], folder)
    if settings.memory_report:
        memory_report.write(trainer)
    if not first:
        return
    print(f"{'adapter' if settings.trains_adapter else 'model'}: {_final(trainer)}")
    trainer.certificate.publish("the run has finished")
    result["certificate"] = page.holds(settings)
    run_folder.write_json(folder / "result.json", result)
    trainer.finish_uploads(_final(trainer))


def write_prediction(measured_bytes: int, folder: Path) -> None:
    """Write the simulated peak memory of the plan and the measured one to plan.json."""
    predicted = job.published()
    if predicted and "by" not in predicted:
        measured = {"bytes": measured_bytes, "ratio": round(measured_bytes / predicted["peak_bytes"], 4)}
        run_folder.write_json(folder / "plan.json", predicted | {"measured": measured})


def _result(trainer: ZerofitTrainer) -> dict:
    """Return the training's part of result.json."""
    args, settings, meter = trainer.args, trainer.settings, trainer.clock
    trainable, total = trainer.numel
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    return {
        "status": "finished",
        "recipe": settings.recipe.name,
        "steps": trainer.state.global_step,
        "steps_not_applied": trainer.guard.bad_steps,
        "train_loss": next((entry["train_loss"] for entry in reversed(history) if "train_loss" in entry), None),
        "last_loss": losses[-1] if losses else None,
        "world_size": args.world_size,
        "zero": written("zero", settings.zero),
        "offload": settings.offload,
        "precision": settings.precision,
        "trainable_parameters": trainable,
        "parameters": total,
        "tokens": meter.total_tokens,
        "tokens_per_second": round(meter.total_tokens / meter.total_seconds, 1) if meter.total_seconds else None,
        "train_seconds": round(trainer.train_seconds, 2),
        "peak_memory_bytes": memory_tracker.peak_memory_bytes(args),
        "peak_memory_of": "process (resident)" if settings.use_cpu else "GPU (allocated)",
        "final": str(_final(trainer)),
    }
