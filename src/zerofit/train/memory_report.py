"""Write the memory report (table, memory.json, memory.png) and explain out-of-memory errors."""

import contextlib
import os
from pathlib import Path

import torch

from zerofit.base import distributed, paths, rank_status
from zerofit.base.errors import OutOfMemory, failed_allocation
from zerofit.job import memory_figure, run_folder
from zerofit.parallel import dims
from zerofit.train import memory_tracker, tensor_owners

_SHORTER_ROWS = (
    (lambda s: s.world_size > 1 and s.ranks_per_row == 1, "{tokens} 2"),
    (lambda s: True, "a smaller --max_length"),
)


def _adapter_instead(settings) -> str:
    """Return the flags, else the recipe, to train an adapter instead; "" without an adapter variant."""
    recipe = settings.recipe
    if settings.trains_adapter:
        return ""
    if recipe.variants:
        return recipe.variants[0].flags
    return f"recipes/{recipe.smaller[0]}.py (make {recipe.smaller[0]})" if recipe.smaller else ""


# Part -> flags that reduce it, best first: (applies to the settings, flag).
_ADVICE = {
    "activations": (
        (lambda s: not s.gradient_checkpointing, "--gradient_checkpointing true"),
        (lambda s: s.per_device_train_batch_size > 1, "--per_device_train_batch_size {half}"),
        (lambda s: s.gradient_checkpointing_every > 1, "--gradient_checkpointing_every 1"),
        (lambda s: s.gradient_checkpointing_policy == "selective", "--gradient_checkpointing_policy full"),
        (lambda s: not s.activation_offload, "--activation_offload true"),
        *_SHORTER_ROWS,
    ),
    "activations of evaluation": _SHORTER_ROWS,
    "parameters": (
        (lambda s: s.zero != 3 and s.world_size > 1, "--zero 3"),
        (lambda s: s.offload != "all", "--zero 3 --offload all"),
    ),
    "gradients": (
        (lambda s: s.zero in (0, 1) and s.world_size > 1, "--zero 2"),
        (_adapter_instead, "{adapter}"),
    ),
    "optimizer": (
        (lambda s: s.zero == 0 and s.world_size > 1, "--zero 2"),
        (lambda s: s.offload == "none", "--offload optimizer"),
        (_adapter_instead, "{adapter}"),
    ),
}


def start(settings) -> None:
    """Open the memory tracker of --memory_report. Call it before the model is loaded."""
    if settings.use_cpu:
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # weights loaded in other threads cannot be tracked
        tracker = memory_tracker.MemoryTracker(device="cpu")
    else:
        # For the snapshot of an out-of-memory error; the tracker turns it off after its last step.
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=20_000)
        tracker = memory_tracker.MemoryTracker(device="cuda", round_to=512)
    tracker.__enter__()


def write(trainer) -> None:
    """Write memory.json and memory.png and print the table for the rank with the highest peak. Collective."""
    trainer.tracker.pause()
    ranks = distributed.all_gather(_rank_report(trainer))
    if trainer.args.process_index:
        return
    folder, fullest = Path(trainer.args.output_dir), _write_json(trainer, ranks)
    memory_figure.plot(
        fullest["peak"], folder / "memory.png", f"Peak memory of rank {fullest['rank']}, by phase and part"
    )
    cpu_note = f"; plus {memory_figure.size(fullest['host'])} in host memory" if fullest["host"] else ""
    print(
        f"\npeak memory of rank {fullest['rank']}{cpu_note}; {folder / 'memory.json'}\n"
        f"{memory_figure.table(fullest['peak'])}\n",
        flush=True,
    )


def _rank_report(trainer) -> dict:
    tracker = trainer.tracker
    states = {"peak": tracker.peak, "model_states": tracker.model_states, "host": tracker.host}
    return {"rank": trainer.args.process_index, **states}


def _write_json(trainer, ranks: list[dict]) -> dict:
    """Write memory.json from the reports of the ranks, and return the report with the highest peak."""
    tracker = trainer.tracker
    fullest = max(ranks, key=lambda rank: max(sum(parts.values()) for parts in rank["peak"].values()))
    cuda = tracker.device == "cuda"
    report = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "bytes_are": "the CUDA allocator's peak, split by followed tensors" if cuda else "followed tensors (exact)",
        "followed_optimizer_steps": tracker.steps,
        **fullest,
        "total": {phase: sum(parts.values()) for phase, parts in fullest["peak"].items()},
        "ranks": ranks,
    }
    run_folder.write_json(Path(trainer.args.output_dir) / "memory.json", report)
    return fullest


def write_early(trainer) -> None:
    """Write rank 0's memory after its first log line, for readers of the run folder during training.

    With --memory_report it is memory.json, with this rank only until the end; else "owners" of run.json, the bytes of
    the model and the optimizer. Both take milliseconds.
    """
    folder = Path(trainer.args.output_dir)
    if trainer.settings.memory_report:
        _write_json(trainer, [_rank_report(trainer)])
    else:
        owned = {part: size for part, size in parts_now(trainer).items() if part in ("parameters", "optimizer")}
        run_folder.put_into_run(folder, {"owners": owned})


@contextlib.contextmanager
def explained(trainer):
    """Convert an out-of-memory error of the body to OutOfMemory, and close the memory tracker.

    Raises: OutOfMemory with phase, largest parts and flags, for an out-of-memory error of torch or CUDA in the body.
    """
    try:
        yield
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        if not rank_status.gpu_is_full(error):
            raise
        raise OutOfMemory(explain(error, trainer), trainer.tracker.failed_in) from error
    finally:
        trainer.tracker.__exit__(None, None, None)


def explain(error, trainer) -> str:
    """Return the message of an out-of-memory error; on CUDA also write two files to the run folder.

    oom-rank<r>.txt: torch.cuda.memory_summary; oom-rank<r>.pickle: a snapshot for https://pytorch.org/memory_viz.
    """
    settings, tracker, rank = trainer.settings, trainer.tracker, trainer.args.process_index
    parts, files = parts_now(trainer), ""
    if tracker.device == "cuda":
        folder = Path(trainer.args.output_dir)
        text, snapshot = folder / f"oom-rank{rank}.txt", folder / f"oom-rank{rank}.pickle"
        paths.write_text(text, f"{error}\n\n{torch.cuda.memory_summary()}")
        snapshot.unlink(missing_ok=True)
        torch.cuda.memory._dump_snapshot(str(snapshot))
        files = f" {text} and {snapshot} contain the allocator's state."
    phase = tracker.failed_in or tracker.phase
    if tracker.model is None and not tracker.failed_in:  # a compiled model has no hooks for the phases
        phase = "forward or backward"
    largest = sorted((p for p in parts.items() if p[1]), key=lambda p: -p[1])[:3]
    values = {"half": settings.per_device_train_batch_size // 2, "adapter": _adapter_instead(settings)}
    values["tokens"] = dims.flag_that_splits("tokens")
    flags, activations = [], "activations"
    if tracker.failed_in == "eval":  # not a forward of generation or of the packing self-test
        activations, rows = "activations of evaluation", settings.per_device_eval_batch_size
        flags = [f"--per_device_eval_batch_size {rows // 2}"] if rows > 1 else []
    for part, _ in largest:
        choices = _ADVICE.get(activations if part.startswith("activations") else part, ())
        applicable = [flag.format(**values) for applies, flag in choices if applies(settings)]
        if settings.parallel_size("layers") > 1:
            excluded = ("--zero", "--offload", "--activation_offload")
            more = [f"more stages ({dims.flag_that_splits('layers')})"]
            applicable = [flag for flag in applicable if not flag.startswith(excluded)] or more
        flags += [f for f in applicable[:2] if f not in flags]
    return (
        f"rank {rank} ran out of GPU memory in the {phase} phase of step {trainer.state.global_step + 1}"
        f"{failed_allocation(error)}: {', '.join(f'{part} {memory_figure.size(count)}' for part, count in largest)}; "
        f"try {', or '.join(flags[:3]) or 'a smaller model'}.{files}"
    )


def parts_now(trainer) -> dict[str, int]:
    """Return the current bytes by part, from the memory tracker if it tracks, else from model and optimizer."""
    tracker = trainer.tracker
    if tracker.following:
        return tracker.alive()
    parts, counted = {}, set()
    for part, tensors in tensor_owners.owned(trainer.model, trainer.optimizer).items():
        parts[part] = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == tracker.device and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                parts[part] += storage.nbytes()
    parts.pop("host")
    if tracker.device == "cuda":
        parts["activations, logits and temporaries"] = torch.cuda.max_memory_allocated() - sum(parts.values())
    return parts
