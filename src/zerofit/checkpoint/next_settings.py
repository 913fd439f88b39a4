"""Choose the settings of a job's next attempt: less GPU memory, another rank count, or another process's decisions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zerofit.base.errors import UserError
from zerofit.config import parse
from zerofit.job import parallel_dims
from zerofit.job.request import BY_PLAN, Request
from zerofit.job.settings import Settings

EVALUATION = "eval"  # a phase of errors.OutOfMemory


def next_smaller_setting(settings: Settings, resolve: Callable[[Request, int], Settings], phase: str = ""):
    """Return the next settings with the same effective batch that need less GPU memory.

    In this order: smaller micro batch (about half), gradient checkpointing of every layer (first, if a plan has
    chosen fewer layers), higher ZeRO stage, optimizer offload, full offload. A checkpoint can be resumed with each.
    For evaluation, a smaller evaluation batch replaces the first two; it does not change results.

    Args: resolve: (request, ranks) -> Settings; a candidate for which it raises UserError is skipped;
        phase: of errors.OutOfMemory.
    Returns: (description of the change, its Settings), or None.
    """
    micro, effective_batch = settings.per_device_train_batch_size, settings.effective_batch_size
    unchanged = settings.request.drop("gradient_accumulation_steps", "search_batch_size")
    unchanged = replace(unchanged, notes=())  # a plan's reasons for values that change here
    unchanged = unchanged.put(effective_batch_size=effective_batch, per_device_train_batch_size=micro)
    candidates = (
        _smaller_evaluation(settings, unchanged) if phase == EVALUATION else _smaller_steps(settings, unchanged)
    )
    stages = [] if settings.world_size == 1 else [z for z in (2, 3) if z > settings.zero]
    candidates += [(f"ZeRO-{z}", unchanged.put(zero=z, offload=settings.offload)) for z in stages]
    for offload in {"none": ["optimizer", "all"], "optimizer": ["all"]}.get(settings.offload, []):
        zero = {"optimizer": max(2, settings.zero), "all": 3}[offload]
        candidates.append((f"offload {offload}", unchanged.put(zero=zero, offload=offload)))
    for change, candidate in candidates:
        try:
            return change, resolve(candidate, settings.world_size)
        except UserError:
            continue
    return None


def _smaller_evaluation(settings: Settings, unchanged: Request) -> list[tuple[str, Request]]:
    """Return the change that reduces the memory of evaluation, as (description, request)."""
    rows = settings.per_device_eval_batch_size
    if rows == 1:
        return []
    change = f"evaluation batch {rows // 2} instead of {rows}"
    return [(change, unchanged.put(per_device_eval_batch_size=rows // 2))]


def _smaller_steps(settings: Settings, unchanged: Request) -> list[tuple[str, Request]]:
    """Return the changes that reduce a training step's activations, as (description, request)."""
    micro, candidates = settings.per_device_train_batch_size, []
    per_rank = settings.effective_batch_size // settings.data_ranks
    half = max((n for n in range(1, micro // 2 + 1) if per_rank % n == 0), default=None)
    if half:
        smaller = {"per_device_train_batch_size": half}
        if "per_device_eval_batch_size" in settings.explicit and settings.per_device_eval_batch_size > half:
            smaller["per_device_eval_batch_size"] = half  # by default it follows the micro batch
        candidates.append((f"micro batch {half} instead of {micro}", unchanged.put(**smaller)))
    selective = settings.gradient_checkpointing_policy == "selective"
    if not settings.gradient_checkpointing or settings.gradient_checkpointing_every > 1 or selective:
        bare = unchanged.drop("gradient_checkpointing_every", "gradient_checkpointing_policy")
        more = {"gradient_checkpointing_every": 1} if settings.gradient_checkpointing_every > 1 else {}
        more |= {"gradient_checkpointing_policy": "full"} if selective else {}  # overrides a preset
        every_layer = bare.put(gradient_checkpointing=True, **more)
        by_plan = settings.source["gradient_checkpointing"] == BY_PLAN
        candidates.insert(0 if by_plan else len(candidates), ("gradient checkpointing of every layer", every_layer))
    return candidates


BATCH = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")


def keep_effective_batch(effective: int, micro: int, ranks: int, ranks_per_row: int = 1) -> dict[str, int]:
    """Return arguments for the same effective batch on another number of ranks; the micro batch never grows.

    Raises: UserError if `ranks_per_row` does not divide `ranks`, or the data ranks do not divide the effective batch.
    """
    if ranks % ranks_per_row:
        raise UserError(
            f"--gpus {ranks}: is not a multiple of the {ranks_per_row} ranks that share each row of this run "
            f"({', '.join(f'--{name}' for name in parallel_dims.size_flags())}); change one of the two."
        )
    ranks //= ranks_per_row
    if effective % ranks:
        raise UserError(
            f"--gpus {ranks * ranks_per_row}: the run's effective batch of {effective} is not a multiple of "
            f"{'it' if ranks_per_row == 1 else f'its {ranks} data ranks'}, and the steps must stay the same; use "
            f"{', '.join(str(n * ranks_per_row) for n in range(1, min(effective, 64) + 1) if effective % n == 0)} "
            "processes."
        )
    per_rank = effective // ranks
    micro = max(n for n in range(1, min(micro, per_rank) + 1) if per_rank % n == 0)
    return {"effective_batch_size": effective, "per_device_train_batch_size": micro}


# --- decisions of another process ---

# Arguments that are decided between attempts. The others come from each process's command line.
DECIDED = (
    "zero", "offload", "per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size",
    "per_device_eval_batch_size", "gradient_checkpointing", "gradient_checkpointing_every",
    "gradient_checkpointing_policy", "activation_offload", "optim", "pure_bf16", "load_in_4bit", "search_batch_size",
    "gpus",
)  # fmt: skip

NEWEST = ("auto", "true", "last")  # values of --resume_from_checkpoint that select the newest checkpoint


def decisions(request: Request) -> dict[str, Any]:
    """Return {argument: value, None if not set} for the arguments of DECIDED."""
    return {name: request.get(name) for name in DECIDED}


def with_decisions(request: Request, decided: dict, by: str) -> Request:
    """Return this process's request with the decisions of another process.

    Args: decided: from `decisions`; by: the source of the decisions, for messages.
    Raises: UserError for an argument that is not in DECIDED, or a malformed value.
    """
    merged = request.drop(*DECIDED)
    for name, value in decided.items():
        if name not in DECIDED or not _is_value(value):
            raise UserError(f"{by}: cannot set {name} {value}; remove the file.")
        if value is not None:
            parse.parse_explicit(request.recipe, Request(request.recipe).put(**{name: value}).flags(), by)
            merged = merged.put(**{name: value})
    return merged


def _is_value(value: Any) -> bool:
    """Return whether a value is a scalar that does not look like a flag, or None."""
    return value is None or (isinstance(value, bool | int | float | str) and str(value)[:1] != "-")
