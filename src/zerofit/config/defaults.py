"""Fill in arguments that are not set, and check the ranges of the others."""

import contextlib
import json

import torch

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import arguments, offload
from zerofit.data.chat_templates import arguments as template_arguments
from zerofit.job import batch_size, data_entry, parallel_dims, program
from zerofit.job.request import BY_PLAN
from zerofit.job.settings import Settings, decide
from zerofit.job.technique import Conflict, Technique, refuse_conflicts

MIN_MICRO_BATCHES_PER_STAGE = 4  # for micro batches chosen here: keeps a pipeline's bubble below 20 %


def _as_json(value):
    """Return an object-valued argument (a dict or JSON text) as a dict; None for malformed JSON."""
    with contextlib.suppress(ValueError):
        return value if isinstance(value, dict) else json.loads(value)


def check_ranges(settings: Settings) -> None:
    """Raise UserError for a number outside its range, and for sizes that do not fit the job."""
    file, kinds = settings.explicit.get("config"), arguments.kit_groups(settings.recipe)
    for name, value in settings.values.items():
        argument = f"{file}: {name}" if settings.source[name] == str(file) else f"--{name}"
        arguments.check_number(name, value, f"{argument} is {value}", kinds)
        if str(value).startswith("{") and not arguments.is_finite(_as_json(value)):
            raise UserError(f"{argument} is {value}: its numbers must be finite.")
    template_arguments.parse_arguments(template_arguments.FLAG, settings.chat_template_kwargs)
    for pair in settings.columns or []:
        if not data_entry.is_pair(pair):
            raise UserError(f"--columns {pair}: must have the form prompt=question (our name = your column).")
    if settings.gpus and settings.gpus != settings.world_size:
        raise UserError(
            f"--gpus {settings.gpus}: this job has {settings.world_size} processes; start it with "
            f"`{program.make_command(settings.recipe)} GPUS={settings.gpus}` or `torchrun --nproc_per_node "
            f"{settings.gpus}`."
        )
    for dim in parallel_dims.registered():
        if settings.values.get(dim.flag, 1) is None:
            decide(settings, dim.flag, dim.default_size(settings), source=settings.source[dim.flag])
        _check_group(settings, dim)
    if len(used := parallel_dims.active(settings.values)) > 1:  # else ranks would read the rows of another group
        (dim, size), (other, other_size) = used[-1], used[0]
        raise UserError(
            f"--{dim.flag} {size} with --{other.flag} {other_size}: their rank groups overlap; use one of the two."
        )
    for technique in PRECISION:
        refuse_conflicts(technique, settings)


def _check_group(settings: Settings, dim) -> None:
    """Raise UserError if the size does not divide the job's ranks or, for neighbors, the ranks of this node."""
    name, count, local = dim.flag, settings.world_size, offload.ranks_of_node(settings)
    size = settings.values.get(name, 1)  # some recipes lack the flag
    if count % size:
        raise UserError(f"--{name} {size}: must divide the {count} rank{'s' * (count > 1)} of this job.")
    if not dim.fits_nodes(size, local):
        where = "on one node or fill several nodes" if dim.fills_nodes else "on one node"
        raise UserError(
            f"--{name} {size}: a group exchanges {dim.exchanges} in every layer and must be {where}, so the size must "
            f"divide the {local} ranks of this node{' or be a multiple of them' * dim.fills_nodes}."
        )


def one_shuffle_seed(settings: Settings) -> None:
    """Set --shuffle_seed and transformers' --data_seed, two names of one argument, to the same value."""
    ours, theirs = settings.shuffle_seed, settings.data_seed
    if None not in (ours, theirs) and ours != theirs:
        raise UserError(
            f"--shuffle_seed {ours} ({settings.source['shuffle_seed']}) and --data_seed {theirs} "
            f"({settings.source['data_seed']}) name the same argument; leave one of them out."
        )
    set_name, other_name = ("shuffle_seed", "data_seed") if theirs is None else ("data_seed", "shuffle_seed")
    decide(settings, other_name, settings.values[set_name], source=settings.source[set_name])


def hang_before_collectives(settings: Settings) -> None:
    """Set --hang_timeout below the user's --ddp_timeout, so that stacks are recorded before it expires."""
    limit = settings.ddp_timeout
    if settings.source["ddp_timeout"] != "transformers default" and settings.source["hang_timeout"] == "default":
        why = f"below the timeout of collectives (--ddp_timeout {limit})"
        decide(settings, "hang_timeout", max(limit - 60.0, limit / 2), why)


NO_DATA = "--model is set but --data is missing: add --data with the rows to train on."


def fill_defaults(settings: Settings) -> None:
    """Choose model, data, learning rate, ZeRO stage, device and strategies if they are not set."""
    if settings.model is None:
        decide(settings, "model", str(settings.recipe.bundled_file.parent / "model"), source="bundled task")
    if settings.data is None and settings.source["model"] != "bundled task":
        raise UserError(NO_DATA)
    for name, value in settings.recipe.adapter_defaults.items():
        if settings.trains_adapter and settings.source[name] == "default":
            decide(settings, name, value, "default for adapters")
    if settings.zero == "auto" and not settings.values.get("deepspeed"):  # else the file sets the stage
        if settings.offload_path:
            decide(settings, "zero", 3, "required by --offload_path")
        elif settings.offload == "none":
            stages = settings.parallel_size("layers")
            stage = 0 if settings.world_size == 1 else 1 if stages > 1 else 2
            processes = f"{settings.world_size} process{'es' * (settings.world_size > 1)}"
            decide(settings, "zero", stage, f"{processes}, {stages} stages" if stage == 1 else processes)
        else:
            stage = 3 if settings.offload == "all" else 2
            decide(settings, "zero", stage, f"the lowest stage that can offload {settings.offload}")
    if not settings.use_cpu and settings.planned_gpu is None and not hardware.torch_sees_gpu():
        if why := hardware.why_no_gpu():
            raise UserError(f"{why}; or train on the CPU with --use_cpu true.")
        decide(settings, "use_cpu", True, "no GPU is visible to PyTorch")
    if settings.use_cpu:
        decide(settings, "dataloader_pin_memory", False)
        decide(settings, "ddp_backend", "gloo")
    _choose_strategies(settings)


def _choose_strategies(settings: Settings) -> None:
    """Set strategy "steps" for --save_steps and --eval_steps, which transformers would ignore otherwise."""
    if "save_steps" in settings.explicit and settings.source["save_strategy"] == "default":
        decide(settings, "save_strategy", "steps", "--save_steps is set")
    has_eval = bool(settings.eval_data or settings.eval_fraction)
    if has_eval and settings.source["eval_strategy"] == "transformers default":
        if "eval_steps" in settings.explicit:
            decide(settings, "eval_strategy", "steps", "--eval_steps is set")
        else:
            decide(settings, "eval_strategy", "epoch", "eval rows are set")


PRECISION = (
    Technique(
        name="bf16",
        flag="bf16",
        example="--bf16 true",
        conflicts=(Conflict("fp16", (True,), "only one precision can be on", "choose one"),),
    ),
    Technique(name="fp16", flag="fp16", example="--fp16 true"),
)


def choose_precision(settings: Settings) -> None:
    """Choose bf16, fp16 (GPUs without bf16) or fp32 (CPUs), unless a flag or the JSON sets it."""
    set_by_user = {"bf16", "fp16"} & {k for k, s in settings.source.items() if s != "transformers default"}
    gpu, has_bf16, planned = "CPU", True, settings.planned_gpu
    if not settings.use_cpu:
        gpu = planned.device_name if planned is not None else torch.cuda.get_device_name()
        has_bf16 = hardware.is_ampere_or_later(planned)
    for flag in ("bf16", "pure_bf16"):
        if settings.values[flag] and not has_bf16:
            raise UserError(f"--{flag}: {gpu} does not support bf16; use --fp16 true, or leave both out.")
    if settings.fp16 and settings.use_cpu and settings.deepspeed is None:
        raise UserError("--fp16 with stage 0: its loss scaler needs a GPU; use --bf16 true on the CPU.")
    if settings.fp16 and settings.use_cpu:
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            raise UserError("--fp16 true: this CPU does not support fp16; use --bf16 true, or leave both out.")
    if settings.deepspeed is None and not settings.trains_adapter and settings.dtype == "float16" and settings.fp16:
        raise UserError(
            "--dtype float16 --fp16 true with stage 0: the loss scaler needs fp32 weights; use --dtype auto."
        )
    if settings.use_cpu and (settings.bf16 or settings.pure_bf16) and not hardware.cpu_has_bf16():
        settings.decisions.append(
            "bf16: this CPU does not support bf16 (avx512_bf16, AMX) and emulates it, which can be many times slower "
            "than fp32 (--bf16 false)"
        )
    if set_by_user:
        return
    if settings.pure_bf16:
        decide(settings, "bf16", True, "--pure_bf16")
    elif settings.use_cpu:
        faster = "; this CPU supports bf16, which is faster for large models (--bf16 true)" * hardware.cpu_has_bf16()
        settings.decisions.append(f"precision fp32: exact{faster}")
    elif has_bf16:
        decide(settings, "bf16", True, f"{gpu} supports bf16")
    else:
        decide(settings, "fp16", True, f"{gpu} does not support bf16; loss scaling is on")


def solve_batch(settings: Settings) -> None:
    names = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    unset_sources = {"transformers default", "default", "bundled task"}
    fixed = [None if settings.source[n] in unset_sources else settings.values[n] for n in names]
    max_micro = batch_size.DEFAULT_MAX_MICRO_BATCH
    bound = settings.source[names[1]]  # an upper bound of the micro batch, below the effective batch
    bound = bound if (bound == BY_PLAN or bound.startswith("preset")) and not fixed[2] else None
    if bound:
        fixed[1], max_micro = None, settings.per_device_train_batch_size
    if settings.source[names[0]] == "bundled task" and fixed[1:] == [None, None]:
        ranks = settings.data_ranks
        fixed[0] = max(1, round(settings.effective_batch_size / ranks)) * ranks  # 32 is only a default
        max_micro = settings.per_device_train_batch_size
    if (stages := settings.parallel_size("layers")) > 1:
        per_rank = (fixed[0] or batch_size.DEFAULT_EFFECTIVE_BATCH_SIZE) // settings.data_ranks
        max_micro = max(1, min(max_micro, per_rank // (MIN_MICRO_BATCHES_PER_STAGE * stages)))
    solved = batch_size.solve(*fixed, settings.data_ranks, max_micro)
    effective, micro, accumulation = solved
    is_default = fixed[0] is None and effective == batch_size.DEFAULT_EFFECTIVE_BATCH_SIZE
    sources = [settings.source[n] if number is not None else "decided" for n, number in zip(names, fixed, strict=True)]
    sources = ["default" if is_default else sources[0], bound or sources[1], sources[2]]
    for name, value, source in zip(names, solved, sources, strict=True):
        decide(settings, name, value, source=source)
    settings.decisions.append(
        f"effective batch {effective} = per_device_train_batch_size {micro} x gradient_accumulation_steps "
        f"{accumulation} x {_data_ranks_text(settings)}"
    )
    _solve_eval_batch(settings)


def _solve_eval_batch(settings: Settings) -> None:
    """Limit the default eval batch to the micro batch; transformers' 8 rows may not fit."""
    name, micro = "per_device_eval_batch_size", settings.per_device_train_batch_size
    has_eval = settings.eval_data or settings.eval_fraction
    if has_eval and settings.source[name] == "transformers default" and micro < settings.values[name]:
        decide(settings, name, micro, "the micro batch, so that evaluation does not need more memory")


def _data_ranks_text(settings: Settings) -> str:
    total, count = settings.world_size, settings.data_ranks
    if count == total:
        return f"{total} rank{'s' * (total > 1)}"
    divided = " / ".join(f"{dim.flag} {size}" for dim, size in parallel_dims.active(settings.values))
    return f"{count} data rank{'s' * (count > 1)} ({total} ranks / {divided})"


def scale_learning_rate(settings: Settings) -> None:
    factor = batch_size.learning_rate_factor(
        settings.lr_scaling, settings.effective_batch_size, settings.lr_scaling_base_batch_size
    )
    if settings.lr_scaling != "none":
        base_rate = settings.learning_rate
        why = f"{base_rate:g} x {factor:.4g} (--lr_scaling {settings.lr_scaling}: effective batch "
        why += f"{settings.effective_batch_size}, base {settings.lr_scaling_base_batch_size})"
        decide(settings, "learning_rate", base_rate * factor, why)
