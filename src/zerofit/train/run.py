"""Train, save, evaluate and write result.json."""

import contextlib
import json
import os
import time
from pathlib import Path

from zerofit import rank_status, run_folder
from zerofit.errors import DiskFull, Stopped, UserError, full_disk, printable
from zerofit.model import adapters
from zerofit.model.load import count_parameters, verify_saved
from zerofit.train import generation, memory_history, memory_report, memory_tracker
from zerofit.train.checkpoint import resume
from zerofit.train.trainer import ZerofitTrainer, how_it_stopped


def evaluation_of_saved(trainer: ZerofitTrainer) -> dict | None:
    """Return the metrics of the model in final/, from the last evaluation or a new one. Collective.

    With --load_best_model_at_end the weights are an earlier step's, which the last evaluation did not measure.
    """
    state = trainer.state
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    if trainer.eval_dataset is None:
        return evaluations[-1] if evaluations else None
    best = trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None
    if evaluations and not best and evaluations[-1]["step"] == state.global_step:
        return evaluations[-1]
    return trainer.evaluate()


def finish(trainer: ZerofitTrainer, started: float) -> None:
    """Save final/, evaluate, print samples, plot the loss and write result.json last. Collective.

    Args: started: time.perf_counter() when training began.
    """
    args, settings = trainer.args, trainer.settings
    folder, is_rank_0 = Path(args.output_dir), args.process_index == 0
    train_seconds = time.perf_counter() - started
    final = folder / "final"
    trainer.model.config.use_cache = True  # off for training only
    trainer.save_model(str(final))  # collective: under ZeRO-3 every rank holds a share
    trainable_params, total_params = count_parameters(trainer.model)
    if is_rank_0:
        adapters.convert_to_plain_lora(trainer.model, final)
        (final / "training_args.bin").unlink(missing_ok=True)  # a pickle that no loader needs
        verify_saved(final, trainable_params if settings.recipe == "lora" else total_params)
        run_folder.readable(final)
    evaluation = evaluation_of_saved(trainer)
    before = trainer.reporter.before
    after = generation.exact_match(trainer) if settings.bundled else None
    samples = generation.samples(trainer, settings.num_samples)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    meter = trainer.clock
    result = {
        "status": "finished",
        "recipe": settings.recipe,
        "steps": trainer.state.global_step,
        "steps_not_applied": trainer.guard.found,
        "train_loss": next((e["train_loss"] for e in reversed(trainer.state.log_history) if "train_loss" in e), None),
        "last_loss": losses[-1] if losses else None,
        "eval_loss": evaluation["eval_loss"] if evaluation else None,
        "world_size": args.world_size,
        "zero": settings.zero,
        "offload": settings.offload,
        "precision": settings.precision,
        "trainable_parameters": trainable_params,
        "parameters": total_params,
        "tokens": meter.total_tokens,
        "tokens_per_second": round(meter.total_tokens / meter.total_seconds, 1) if meter.total_seconds else None,
        "train_seconds": round(train_seconds, 2),
        "peak_memory_bytes": memory_tracker.peak_memory_bytes(args),
        "peak_memory_of": "process (resident)" if settings.use_cpu else "GPU (allocated)",
        "final": str(final),
    }
    predicted = json.loads(os.environ.get(memory_history.PLANNED, "{}"))
    if is_rank_0 and predicted and "by" not in predicted and not settings.use_cpu:
        memory_history.remember(predicted, result["peak_memory_bytes"], folder)
    if settings.bundled:
        result |= {"exact_match_before": before, "exact_match_after": after}
    if settings.memory_report:
        memory_report.write(trainer)
    if not is_rank_0:
        return
    if (folder / "metrics.jsonl").exists():
        run_folder.plot_loss(
            folder / "metrics.jsonl",
            folder / "loss.png",
            f"{settings.recipe} on {', '.join(Path(d).name for d in settings.data)}",
        )
    for prompt, answer, expected in samples:
        print(printable(f"\n  asked     {prompt}\n  answered  {answer}\n  wanted    {expected}"))
    if settings.bundled:
        print(f"\nexact match on held-out rows: {before:.1%} before, {after:.1%} after")
    print(f"{'adapter' if settings.recipe == 'lora' else 'model'}: {final}")
    run_folder.write_json(folder / "result.json", result)


def run(trainer: ZerofitTrainer) -> None:
    """Train, then finish; write a failure to result.json before it is raised again."""
    started = time.perf_counter()
    try:
        with memory_report.explained(trainer):
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
            if trainer.reporter.stopping:
                raise Stopped(how_it_stopped(trainer.args, trainer.state.global_step))
            finish(trainer, started)
    except BaseException as error:
        folder = Path(trainer.args.output_dir)
        if isinstance(error, KeyboardInterrupt) and not rank_status.folder():  # else the supervisor prints it
            error = KeyboardInterrupt(resume.how_to_go_on("interrupted", folder, trainer.state.global_step))
        if trainer.args.process_index == 0 and not run_folder.finished(folder):
            kinds = {Stopped: "stopped", KeyboardInterrupt: "interrupted"}
            status = {
                "status": kinds.get(type(error), "failed"),
                "error": f"{type(error).__name__}: {error}",
                "steps": trainer.state.global_step,
            }
            with contextlib.suppress(OSError):  # the disk may be full; the original error must still be raised
                run_folder.write_json(folder / "result.json", status)
        if not isinstance(error, UserError) and rank_status.disk_is_full(error):
            raise DiskFull(full_disk(folder)) from error
        raise error
