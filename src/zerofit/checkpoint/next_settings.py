"""Choose the settings of a job's next attempt: with less GPU memory, on other ranks, or as another process decided."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zerofit.base.errors import UserError
from zerofit.config import parse
from zerofit.job import groups
from zerofit.job.request import BY_PLAN, Request
from zerofit.job.settings import Settings

EVALUATION = "eval"  # phase of errors.OutOfMemory


def next_smaller_setting(settings: Settings, resolve: Callable[[Request, int], Settings], phase: str = ""):
    """Return the next setting with the same effective batch that needs less GPU memory.

    In this order: smaller micro batch (about half), gradient checkpointing of every layer (before it, where a plan has
    chosen fewer), higher ZeRO stage, optimizer offload, offload of everything. A checkpoint can be resumed at each.
    For evaluation a smaller evaluation batch, which changes no results, replaces the first two.

    Args: resolve: (request, ranks) -> Settings; raises UserError for arguments that exclude each other, which are then
        skipped; phase: of errors.OutOfMemory.
    Returns: (description of the change, its Settings), or None.
    """
    micro, effective_batch = settings.per_device_train_batch_size, settings.effective_batch_size
    kept = settings.request.drop("gradient_accumulation_steps", "search_batch_size")
    kept = replace(kept, notes=())  # why a plan has chosen what is changed here
    kept = kept.put(effective_batch_size=effective_batch, per_device_train_batch_size=micro)
    tries = _smaller_evaluation(settings, kept) if phase == EVALUATION else _smaller_steps(settings, kept)
    stages = [] if settings.world_size == 1 else [z for z in (2, 3) if z > settings.zero]
    tries += [(f"ZeRO-{z}", kept.put(zero=z, offload=settings.offload)) for z in stages]
    for offload in {"none": ["optimizer", "all"], "optimizer": ["all"]}.get(settings.offload, []):
        zero = {"optimizer": max(2, settings.zero), "all": 3}[offload]
        tries.append((f"offload {offload}", kept.put(zero=zero, offload=offload)))
    for change, candidate in tries:
        try:
            return change, resolve(candidate, settings.world_size)
        except UserError:
            continue
    return None


def _smaller_evaluation(settings: Settings, kept: Request) -> list[tuple[str, Request]]:
    """Return the change that makes evaluation smaller, as (description, request)."""
    rows = settings.per_device_eval_batch_size
    if rows == 1:
        return []
    words = f"evaluation batch {rows // 2} instead of {rows}"
    return [(words, kept.put(per_device_eval_batch_size=rows // 2))]


def _smaller_steps(settings: Settings, kept: Request) -> list[tuple[str, Request]]:
    """Return the changes that make a training step's activations smaller, as (description, request)."""
    micro, tries = settings.per_device_train_batch_size, []
    per_rank = settings.effective_batch_size // settings.data_ranks
    half = max((n for n in range(1, micro // 2 + 1) if per_rank % n == 0), default=None)
    if half:
        smaller = {"per_device_train_batch_size": half}
        if "per_device_eval_batch_size" in settings.given and settings.per_device_eval_batch_size > half:
            smaller["per_device_eval_batch_size"] = half  # not given, it follows the micro batch
        tries.append((f"micro batch {half} instead of {micro}", kept.put(**smaller)))
    selective = settings.gradient_checkpointing_policy == "selective"
    if not settings.gradient_checkpointing or settings.gradient_checkpointing_every > 1 or selective:
        bare = kept.drop("gradient_checkpointing_every", "gradient_checkpointing_policy")
        more = {"gradient_checkpointing_every": 1} if settings.gradient_checkpointing_every > 1 else {}
        more |= {"gradient_checkpointing_policy": "full"} if selective else {}  # over that of a preset
        every_layer = bare.put(gradient_checkpointing=True, **more)
        by_plan = settings.source["gradient_checkpointing"] == BY_PLAN
        tries.insert(0 if by_plan else len(tries), ("gradient checkpointing of every layer", every_layer))
    return tries


BATCH = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")


def same_batch(whole: int, micro: int, ranks: int, ranks_per_row: int = 1) -> dict[str, int]:
    """Return arguments for the same effective batch on another number of ranks; the micro batch never grows.

    Args: whole: the effective batch; micro: the run's per_device_train_batch_size.

    Raises: UserError if `ranks_per_row` does not divide `ranks`, or the data ranks do not divide the effective batch.
    """
    if ranks % ranks_per_row:
        raise UserError(
            f"--gpus {ranks}: is no multiple of the {ranks_per_row} ranks that share each row of this run "
            f"({', '.join(f'--{name}' for name in groups.flags())}); change one of the two."
        )
    ranks //= ranks_per_row
    if whole % ranks:
        raise UserError(
            f"--gpus {ranks * ranks_per_row}: the run's effective batch of {whole} is no multiple of "
            f"{'it' if ranks_per_row == 1 else f'its {ranks} data ranks'}, and its steps must stay the same; use "
            f"{', '.join(str(n * ranks_per_row) for n in range(1, whole + 1) if whole % n == 0 and n <= 64)} processes."
        )
    per_rank = whole // ranks
    micro = max(n for n in range(1, min(micro, per_rank) + 1) if per_rank % n == 0)
    return {"effective_batch_size": whole, "per_device_train_batch_size": micro}


# --- decisions of another process ---

# Arguments that are decided between attempts. All others come from each process's own command line.
DECIDED = (
    "zero", "offload", "per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size",
    "per_device_eval_batch_size", "gradient_checkpointing", "gradient_checkpointing_every",
    "gradient_checkpointing_policy", "activation_offload", "optim", "pure_bf16", "load_in_4bit", "search_batch_size",
    "gpus",
)  # fmt: skip

NEWEST = ("auto", "true", "last")  # values of --resume_from_checkpoint that are no path


def decisions(asked: Request) -> dict[str, Any]:
    """Return {argument: its value, or None if it is not given} for the arguments of DECIDED."""
    return {name: asked.get(name) for name in DECIDED}


def with_decisions(own: Request, decided: dict, by: str) -> Request:
    """Return this process's request with the decisions of another one in it.

    Args: own: this process's; decided: from `decisions`; by: who has decided, for messages.
    Raises: UserError for an argument that is not one of DECIDED, or a malformed value.
    """
    asked = own.drop(*DECIDED)
    for name, value in decided.items():
        if name not in DECIDED or not _is_value(value):
            raise UserError(f"{by} has {name} {value}, which it cannot decide; remove the file.")
        if value is not None:
            parse.explicit(own.recipe, Request(own.recipe).put(**{name: value}).flags(), by)
            asked = asked.put(**{name: value})
    return asked


def _is_value(value: Any) -> bool:
    """Return whether a value is none, or a scalar that does not look like a flag."""
    return value is None or (isinstance(value, bool | int | float | str) and str(value)[:1] != "-")
