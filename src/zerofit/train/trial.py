"""Measure steps on the longest rows, on a rank of the canary or the batch size search."""

import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from zerofit.base import distributed, rank_status
from zerofit.base.errors import EXIT_CODES, UserError
from zerofit.base.paths import size_of
from zerofit.job import job
from zerofit.job.request import Request
from zerofit.train import memory_tracker

# Keys of job.Job.trial, a measurement of the ranks instead of training.
CANARY = "canary"  # True
BATCH_SEARCH = "batch_search"  # {"sizes": [micro batch], "limit_bytes": limit per rank}

LONG_RUN_SECONDS = 600  # predicted training time from which --canary auto is on


# --- canary ---


def is_canary() -> bool:
    """Return whether this process is a rank of a canary."""
    return _trial_of_job(CANARY) is not None


def _trial_of_job(kind: str):
    """Return the parameters of a kind of trial in this process's job, None if it is not such a trial."""
    running = job.running()
    return running and running.trial.get(kind)


def _record(record: dict) -> None:
    """Append a measurement of this rank to its file in the folder of the attempt."""
    with (rank_status.folder() / f"measured{distributed.rank()}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def measured(folder: Path, rank: int) -> list[dict]:
    """Return the measurements of a rank of a trial. folder: of the attempt."""
    file = folder / f"measured{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def measure_canary(trainer) -> None:
    """Run the canary instead of training, then end the process. Collective; the engine must be built."""
    args, folder = trainer.args, Path(trainer.args.output_dir)
    rows = longest_rows(trainer, args.per_device_train_batch_size)
    seconds, tokens = _steps(trainer, rows)
    if trainer.eval_dataset is not None:
        _evaluate(trainer)
    began = time.perf_counter()
    trainer.save_model(str(folder / "final"))
    result = {"final_bytes": size_of(folder / "final"), "reloaded": args.save_strategy != "no"}
    result |= _save_and_reload(trainer, rows, folder) if result["reloaded"] else {
        "checkpoint_bytes": result["final_bytes"], "save_seconds": time.perf_counter() - began,
    }  # fmt: skip
    result |= {
        "device": args.device.type, "peak_bytes": memory_tracker.peak_memory_bytes(args), "step_seconds": seconds,
        "tokens_per_second": tokens * args.gradient_accumulation_steps * trainer.settings.data_ranks / seconds,
        "steps": trainer.state.max_steps, "checkpoints": _checkpoints(trainer),
    }  # fmt: skip
    if args.process_index == 0:
        _record(result)
    sys.stdout.flush()
    distributed.barrier()
    os._exit(0)


def _steps(trainer, rows: list[dict]) -> tuple[float, int]:
    """Take two optimizer steps; return (seconds of a full step, tokens of a micro batch)."""
    args = trainer.args
    number = min(2, args.gradient_accumulation_steps)  # gradients during a second micro batch add to the peak
    for _ in range(2):
        began = time.perf_counter()
        loss = micro_batches(trainer, rows, number)
        if not math.isfinite(loss):
            raise UserError(
                f"the canary's loss on the longest rows is {loss}; check the model, and the data with `make data`."
            )
        seconds = time.perf_counter() - began
    return seconds / number * args.gradient_accumulation_steps, sum(len(row["input_ids"]) for row in rows)


def _evaluate(trainer) -> None:
    count = trainer.args.per_device_eval_batch_size
    batch = trainer.data_collator(longest(trainer.eval_tokens.dataset, count))
    loss = trainer.evaluation_loop([batch], "canary").metrics["eval_loss"]
    if not math.isfinite(loss):
        raise UserError(f"the canary's loss on the longest evaluation rows is {loss}; check --eval_data.")


def _save_and_reload(trainer, rows: list[dict], folder: Path) -> dict:
    """Save a checkpoint, take a step, reload it, and check that the loss equals the one at the save."""
    args = trainer.args
    began = time.perf_counter()
    trainer._save_checkpoint(trainer.model, trial=None)
    saved, checkpoint = time.perf_counter(), folder / f"checkpoint-{trainer.state.global_step}"
    before = _loss(trainer, rows)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.01  # a warm-up starts at 0, and a step at 0 would not change the weights
    micro_batches(trainer, rows, min(2, args.gradient_accumulation_steps))
    reloading = time.perf_counter()
    _load(trainer, str(checkpoint))
    loaded, after = time.perf_counter(), _loss(trainer, rows)
    _check_same_loss(before, after, trainer.settings.compute_dtype, args.device.type)
    return {
        "checkpoint_bytes": size_of(checkpoint),
        "save_seconds": saved - began,
        "load_seconds": loaded - reloading,
    }


def _check_same_loss(before: float, after: float, precision: str, device: str) -> None:
    """Compare the losses at the save and after the reload. Raises: UserError if they differ."""
    if math.isclose(before, after, rel_tol=1e-6):
        return
    note = ""
    if device == "cuda" and precision != "fp32":  # cuBLAS selects a kernel for each product
        note = (
            "; a difference in the last digits may come from another cuBLAS kernel (split-K adds in another order, "
            f"visible in {precision}) rather than the checkpoint; --canary false skips the comparison"
        )
    raise UserError(f"a reloaded checkpoint gives the loss {after:.9g} instead of {before:.9g}{note}.")


def _loss(trainer, rows: list[dict]) -> float:
    return trainer.evaluation_loop([trainer.data_collator(rows)], "canary").metrics["eval_loss"]


def _load(trainer, checkpoint: str) -> None:
    if trainer.is_deepspeed_enabled:
        strict = not trainer.settings.trains_adapter  # an adapter's checkpoint lacks the frozen base
        deepspeed_load_checkpoint(trainer.model_wrapped, checkpoint, load_module_strict=strict)
    else:
        trainer._load_from_checkpoint(checkpoint)
        trainer._load_optimizer_and_scheduler(checkpoint)


def _checkpoints(trainer) -> int:
    """Return the maximum number of checkpoints on the disk: a save is written before the oldest is deleted."""
    args, state = trainer.args, trainer.state
    if args.save_strategy == "no":
        return 0
    written = state.num_train_epochs
    if args.save_strategy == "steps":  # the last step is also saved
        written = math.ceil(state.max_steps / max(1, state.save_steps or 1))
    written = min(written, state.max_steps)  # for a stream, the epochs are unlimited
    # + 1 for the one being written, + 1 for the best one, which is kept in addition to a limit of 1.
    kept = args.save_total_limit + 1 + args.load_best_model_at_end if args.save_total_limit else written
    return min(written, kept)


def request(original: Request) -> Request:
    """Return the request of a trial: without hub, storage and trackers, and with saves in the foreground."""
    local = original.drop("upload_to", "resume_from_checkpoint")
    return local.put(push_to_hub=False, report_to="none", save_in_background=False)


# --- batch size search ---


def is_batch_search() -> bool:
    """Return whether this process is a rank of the batch size search."""
    return _trial_of_job(BATCH_SEARCH) is not None


def measure_batch(trainer) -> None:
    """Measure a real step with each size of the job, in order, instead of training; then end the process.

    Call it with model, optimizer and engine built. Each rank writes a line for each size that fits.
    """
    search = _trial_of_job(BATCH_SEARCH)
    rows = longest_rows(trainer, max(search["sizes"]))
    cuda = trainer.args.device.type == "cuda"
    if cuda:
        total_bytes = torch.cuda.get_device_properties(trainer.args.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, search["limit_bytes"] / total_bytes))
        tracker = None
    else:
        tracker = memory_tracker.MemoryTracker(trainer.model, trainer.optimizer, limit=search["limit_bytes"])
    exit_code = 0
    try:
        for size in search["sizes"]:
            _record({"size": size, **_step(trainer, rows[:size], tracker)})
    except RuntimeError as error:
        if not rank_status.gpu_is_full(error):
            raise
        rank_status.record(error)
        exit_code = EXIT_CODES["out of memory"]
    sys.stdout.flush()
    if not exit_code:
        distributed.barrier()
    os._exit(exit_code)  # other ranks may hang in a collective; the launcher ends them


def longest_rows(trainer, count: int) -> list[dict]:
    """Return the `count` longest training rows (or packs), longest first; a short set repeats its rows."""
    tokens, settings = trainer.tokens, trainer.settings
    if tokens.stream is not None:
        rows = list(tokens.dataset)
    else:
        sequences = tokens.sequences(settings)
        rows = sequences if not settings.packing else [sequences[i] for i in range(min(len(sequences), 4 * count))]
    longest_first = longest(rows, count)
    return [longest_first[i % len(longest_first)] for i in range(count)]


def longest(rows, count: int) -> list[dict]:
    """Return at most `count` of the rows, longest first."""
    lengths = [len(row["input_ids"]) for row in rows]
    return [rows[i] for i in sorted(range(len(lengths)), key=lambda i: -lengths[i])[:count]]


def _step(trainer, rows: list[dict], tracker) -> dict:
    """Take one optimizer step of two micro batches of these rows; return {"peak_bytes", "seconds"}."""
    if tracker is None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    if tracker is None:
        micro_batches(trainer, rows, 2)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved()
    else:
        tracker.highest = 0
        with tracker:
            micro_batches(trainer, rows, 2)
        peak = tracker.highest
    return {"peak_bytes": peak, "seconds": time.perf_counter() - started}


def micro_batches(trainer, rows: list[dict], number: int) -> float:
    """Take one optimizer step of `number` micro batches of these rows each; return its loss."""
    accelerator, model = trainer.accelerator, trainer.model_wrapped
    count = number * sum(label != -100 for row in rows for label in row["labels"])
    count = torch.tensor(max(1, count), device=trainer.args.device)
    model.train()
    loss = torch.zeros((), device=trainer.args.device)
    for i in range(number):
        accelerator.sync_gradients = i == number - 1
        loss += trainer.training_step(model, trainer.train_collator(rows), count)
    if not trainer.is_deepspeed_enabled:  # DeepSpeed's backward also steps
        if trainer.args.max_grad_norm:
            accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        model.zero_grad()
    return loss.item()
