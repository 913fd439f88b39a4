"""--canary: before the real run, the same job in its real world size takes two steps on the longest rows, one evaluation
batch, a save and a reload. What would end it in three hours ends it now.

It runs in processes of its own, so that the run itself starts from an untouched state.
"""

import json
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from . import failure, postmortem, recovery, report, supervise, world
from .errors import UserError

JOB = "ZEROFIT_CANARY"  # environment variable: the file that a canary's rank 0 writes its findings to
FOUND = "ZEROFIT_CANARY_FOUND"  # environment variable: the findings, for run.json
LONG = 600  # predicted seconds from which --canary auto is on
GIB = 2**30


def wanted(settings, planned: dict | None, steps: int | None) -> bool:
    """Whether to rehearse. planned: planner.check's answer; steps: of the whole run, None: not known."""
    if settings.canary != "auto":
        return settings.canary == "true"
    return bool(planned and planned["step_seconds"] and (steps is None or steps * planned["step_seconds"] > LONG))


# --- in the process that starts ranks ---


def rehearse(job: supervise.Job, planned: dict | None) -> tuple[list[str], object]:
    """Run the canary, with smaller settings where it runs out of memory and --on_oom allows.

    Returns: (flags, Settings) that it went well with.
    Raises: SystemExit with the exit code of what went wrong, which has been said; UserError for a disk that is too small.
    """
    flags, settings = job.flags, job.settings
    folder = job.folder.parent / f".{job.folder.name}.canary"  # on the disk that the checkpoints will be on
    print("canary: two steps on the longest rows, an evaluation batch, save and reload", flush=True)
    while True:
        began = time.perf_counter()
        try:
            last, found = _attempt(job, flags, settings, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if last.kind == "finished" and found:
            break
        smaller = None
        if last.kind == "out of memory" and settings.on_oom != "fail":
            smaller = recovery.smaller(settings, flags, job.parse)
        if smaller is None:
            print(f"zerofit: the canary failed: {last.sentence}", file=sys.stderr)
            raise SystemExit(last.code or 1)
        print(f"canary: {last.sentence}; once more with {smaller[0]}", flush=True)
        _, flags, settings = smaller
    for line in sentences(found, planned, time.perf_counter() - began):
        print(line, flush=True)
    _check_disk(found, settings, job.folder)
    os.environ[FOUND] = json.dumps(found)
    return flags, settings


def _attempt(job: supervise.Job, flags: list[str], settings, folder: Path) -> tuple[postmortem.Ending, dict | None]:
    with tempfile.TemporaryDirectory(prefix="zerofit-canary-") as temporary:
        records, answer = Path(temporary), Path(temporary) / "canary.json"
        words = job.command(_flags(flags, folder))
        env = os.environ | job.env | {failure.FOLDER: str(records), JOB: str(answer)}
        with (records / "canary.log").open("w") as log:
            code, heard, hung = supervise.watch(words, env, records, settings.hang_timeout, job.count, stdout=log)
        last = postmortem.ending(code, records, heard, hung, settings.hang_timeout, 0)
        return last, json.loads(answer.read_text()) if answer.exists() else None


def _flags(flags: list[str], folder: Path) -> list[str]:
    """The run's flags for a rehearsal in a folder of its own, of which a hub and a tracker see nothing."""
    from . import probe

    kept = probe.drop(flags, "--output_dir", "--resume_from_checkpoint")
    return [*kept, *probe.NOTHING_OUTSIDE, "--resume_from_checkpoint", "false", "--output_dir", str(folder)]


def sentences(found: dict, planned: dict | None, seconds: float) -> list[str]:
    """The findings for people."""
    lines = [f"canary: all well, {seconds:.0f} s"]
    peak = f"  peak {found['peak_bytes'] / GIB:.2f} GiB a rank"
    if found["device"] == "cpu":
        peak += " (resident)"
    elif planned:
        room = planned["limit_bytes"] - found["peak_bytes"]
        peak += f"; the plan said {planned['peak_bytes'] / GIB:.2f}; {room / GIB:.2f} GiB are left"
    lines.append(peak)
    hours, rest = divmod(int(found["step_seconds"] * found["steps"]), 3600)
    lines.append(
        f"  {found['tokens_per_second']:,.0f} tokens/s on the longest rows; {found['steps']:,} steps take at most "
        f"{hours}:{rest // 60:02}:{rest % 60:02}, evaluation and saving apart"
    )
    lines.append(
        f"  a save is {found['checkpoint_bytes'] / 1e9:.3g} GB in {found['save_seconds']:.1f} s"
        + (f", read back in {found['load_seconds']:.1f} s to the same loss" if found["reloaded"] else "")
    )
    return lines


def _check_disk(found: dict, settings, folder: Path) -> None:
    free = shutil.disk_usage(report.nearest_existing(folder)).free
    needed = found["checkpoint_bytes"] * found["checkpoints"] + found["final_bytes"]
    if needed > free and not settings.force:
        raise UserError(
            f"--output_dir {folder}: {found['checkpoints']} checkpoints and final/ will take {needed / 1e9:.3g} GB, the disk "
            f"has {free / 1e9:.3g}; set --save_total_limit, or name a folder on another disk (--force true starts anyway)."
        )


# --- the ranks ---


def asked() -> bool:
    """Whether this process is a rank of a canary."""
    return JOB in os.environ


def measure(trainer) -> None:
    """Instead of training; ends the process. All ranks call it, when model, optimizer and engine stand."""
    from . import probe, train

    args, folder = trainer.args, Path(trainer.args.output_dir)
    rows = probe.longest_rows(trainer, args.per_device_train_batch_size)
    seconds, tokens = _steps(trainer, rows)
    if trainer.eval_dataset is not None:
        _evaluate(trainer)
    began = time.perf_counter()
    trainer.save_model(str(folder / "final"))
    found = {"final_bytes": report.size_of(folder / "final"), "reloaded": args.save_strategy != "no"}
    found |= _save_and_reload(trainer, rows, folder) if found["reloaded"] else {
        "checkpoint_bytes": found["final_bytes"], "save_seconds": time.perf_counter() - began,
    }  # fmt: skip
    found |= {
        "device": args.device.type, "peak_bytes": train.peak_memory_bytes(args), "step_seconds": seconds,
        "tokens_per_second": tokens * args.gradient_accumulation_steps * args.world_size / seconds,
        "steps": trainer.state.max_steps, "checkpoints": _checkpoints(trainer),
    }  # fmt: skip
    if args.process_index == 0:
        report.write_json(Path(os.environ[JOB]), found)
    sys.stdout.flush()
    world.barrier()
    os._exit(0)


def _steps(trainer, rows: list[dict]) -> tuple[float, int]:
    """Two optimizer steps: (seconds that a whole one takes, tokens of a micro batch)."""
    from . import probe

    args = trainer.args
    some = min(2, args.gradient_accumulation_steps)  # gradients that wait for a second micro batch are part of the peak
    for _ in range(2):
        began = time.perf_counter()
        loss = probe.micro_batches(trainer, rows, some)
        if not math.isfinite(loss):
            raise UserError(f"the canary's loss on the longest rows is {loss}: look at the model and at `make data`.")
        seconds = time.perf_counter() - began
    return seconds / some * args.gradient_accumulation_steps, sum(len(row["input_ids"]) for row in rows)


def _evaluate(trainer) -> None:
    from . import probe

    count = trainer.args.per_device_eval_batch_size
    batch = trainer.data_collator(probe.longest(trainer.eval_tokens.dataset, count))
    loss = trainer.evaluation_loop([batch], "canary").metrics["eval_loss"]
    if not math.isfinite(loss):
        raise UserError(f"the canary's loss on the longest evaluation rows is {loss}: look at --eval_data.")


def _save_and_reload(trainer, rows: list[dict], folder: Path) -> dict:
    """Save a checkpoint, take a step, read it back: the loss must be the one at the save."""
    from . import probe

    args = trainer.args
    began = time.perf_counter()
    trainer._save_checkpoint(trainer.model, trial=None)
    saved, checkpoint = time.perf_counter(), folder / f"checkpoint-{trainer.state.global_step}"
    before = _loss(trainer, rows)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.01  # a warm-up begins with 0, with which there would be nothing to bring back
    probe.micro_batches(trainer, rows, min(2, args.gradient_accumulation_steps))
    reloading = time.perf_counter()
    _load(trainer, str(checkpoint))
    loaded, after = time.perf_counter(), _loss(trainer, rows)
    _check_same_loss(before, after, trainer.settings.precision, args.device.type)
    return {
        "checkpoint_bytes": report.size_of(checkpoint),
        "save_seconds": saved - began,
        "load_seconds": loaded - reloading,
    }


def _check_same_loss(before: float, after: float, precision: str, device: str) -> None:
    """Compare the losses at the save and after the reload.

    Raises: UserError where they differ.
    """
    if math.isclose(before, after, rel_tol=1e-6):
        return
    note = ""
    if device == "cuda" and precision != "fp32":  # cuBLAS chooses a kernel for each product
        note = (
            f"; a difference in the last digits can come from another cuBLAS kernel (split-K adds in another order, which {precision} "
            "shows) instead of the checkpoint; --canary false trains without the comparison"
        )
    raise UserError(f"a checkpoint that was read back gives the loss {after:.9g} instead of {before:.9g}{note}.")


def _loss(trainer, rows: list[dict]) -> float:
    return trainer.evaluation_loop([trainer.data_collator(rows)], "canary").metrics["eval_loss"]


def _load(trainer, checkpoint: str) -> None:
    if trainer.is_deepspeed_enabled:
        from transformers.integrations.deepspeed import deepspeed_load_checkpoint

        strict = trainer.settings.recipe != "lora"  # an adapter's checkpoint has no frozen base
        deepspeed_load_checkpoint(trainer.model_wrapped, checkpoint, load_module_strict=strict)
    else:
        trainer._load_from_checkpoint(checkpoint)
        trainer._load_optimizer_and_scheduler(checkpoint)


def _checkpoints(trainer) -> int:
    """How many a run keeps at the same time, the one before the newest included while that is written."""
    args, state = trainer.args, trainer.state
    if args.save_strategy == "no":
        return 0
    made = state.num_train_epochs
    if args.save_strategy == "steps":  # the last step is saved too
        made = math.ceil(state.max_steps / max(1, state.save_steps or 1))
    made = min(made, state.max_steps)  # a stream has epochs without end
    kept = args.save_total_limit + 1 + args.load_best_model_at_end if args.save_total_limit else made
    return min(made, kept)
