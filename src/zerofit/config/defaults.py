"""Fill in arguments that were not given, and check the ranges of those that were."""

import contextlib
import json

import torch

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import arguments, offload
from zerofit.data.chat_templates import arguments as template_arguments
from zerofit.job import batch_size, data_entry, groups, program
from zerofit.job.request import BY_PLAN
from zerofit.job.settings import Settings, decide
from zerofit.job.technique import Conflict, Technique, refuse_conflicts

MICRO_BATCHES_PER_STAGE = 4  # at least, where the micro batch is chosen here: a pipeline's bubble is then below 20 %


def _as_json(value):
    """Return an argument that holds an object, as a dict or as text; None for text that is no JSON."""
    with contextlib.suppress(ValueError):
        return value if isinstance(value, dict) else json.loads(value)


def check_ranges(settings: Settings) -> None:
    """Raise UserError for a number outside its range, and for sizes that do not fit the job."""
    file, kinds = settings.given.get("config"), arguments.kit_groups(settings.recipe)
    for name, value in settings.values.items():
        argument = f"{file}: {name}" if settings.source[name] == str(file) else f"--{name}"
        arguments.check_number(name, value, f"{argument} is {value}", kinds)
        if str(value).startswith("{") and not arguments.is_finite(_as_json(value)):
            raise UserError(f"{argument} is {value}: its numbers must be finite.")
    template_arguments.parsed(template_arguments.FLAG, settings.chat_template_kwargs)
    for pair in settings.columns or []:
        if not data_entry.is_pair(pair):
            raise UserError(f"--columns {pair}: must be ours=theirs, e.g. prompt=question.")
    if settings.gpus and settings.gpus != settings.world_size:
        raise UserError(
            f"--gpus asks for {settings.gpus} processes, but this job has {settings.world_size}: start it with "
            f"`{program.make(settings.recipe)} GPUS={settings.gpus}` or `torchrun --nproc_per_node {settings.gpus}`."
        )
    for way in groups.ways():
        if settings.values.get(way.flag, 1) is None:
            decide(settings, way.flag, way.default_size(settings), source=settings.source[way.flag])
        _check_group(settings, way)
    if len(used := groups.in_use(settings.values)) > 1:  # else ranks would be given the rows of another group
        (one, size), (other, other_size) = used[-1], used[0]
        raise UserError(
            f"--{one.flag} {size} with --{other.flag} {other_size}: their groups would cross; use one of the two."
        )
    for technique in PRECISION:
        refuse_conflicts(technique, settings)


def _check_group(settings: Settings, way) -> None:
    """Raise UserError for a size that does not divide the ranks of the job; of neighbors, also those of this node."""
    name, count, local = way.flag, settings.world_size, offload.ranks_of_node(settings)
    size = settings.values.get(name, 1)  # some recipes have no such flag
    if count % size:
        raise UserError(f"--{name} {size}: must divide the {count} rank{'s' * (count > 1)} of this job.")
    if not way.fits_nodes(size, local):
        where = "on one node, or have all ranks of some" if way.whole_nodes else "on one node"
        raise UserError(
            f"--{name} {size}: a group exchanges {way.exchanges} in every layer and must be {where}, so it must "
            f"divide the {local} ranks of this node{' or be a multiple of them' * way.whole_nodes}."
        )


def one_shuffle_seed(settings: Settings) -> None:
    """Give --shuffle_seed and transformers' --data_seed, two names of one argument, the same value."""
    ours, theirs = settings.shuffle_seed, settings.data_seed
    if None not in (ours, theirs) and ours != theirs:
        raise UserError(
            f"--shuffle_seed {ours} ({settings.source['shuffle_seed']}) and --data_seed {theirs} "
            f"({settings.source['data_seed']}) are two names of one argument; leave one of them out."
        )
    set_name, other_name = ("shuffle_seed", "data_seed") if theirs is None else ("data_seed", "shuffle_seed")
    decide(settings, other_name, settings.values[set_name], source=settings.source[set_name])


def hang_before_collectives(settings: Settings) -> None:
    """Set --hang_timeout below a --ddp_timeout of the user's, so that stacks are kept before it expires."""
    limit = settings.ddp_timeout
    if settings.source["ddp_timeout"] != "transformers default" and settings.source["hang_timeout"] == "default":
        why = f"before collectives give up (--ddp_timeout {limit})"
        decide(settings, "hang_timeout", max(limit - 60.0, limit / 2), why)


NO_DATA = "--model is given but --data is not: name the rows to train on with --data."


def fill_defaults(settings: Settings) -> None:
    """Choose model, data, learning rate, ZeRO stage, device and strategies where they were not given."""
    if settings.model is None:
        decide(settings, "model", str(settings.recipe.bundled_file.parent / "model"), source="bundled task")
    if settings.data is None and settings.source["model"] != "bundled task":
        raise UserError(NO_DATA)
    for name, value in settings.recipe.adapter_defaults.items():
        if settings.trains_adapter and settings.source[name] == "default":
            decide(settings, name, value, "an adapter trains")
    if settings.zero == "auto" and not settings.values.get("deepspeed"):  # else the file sets the stage
        if settings.offload_path:
            decide(settings, "zero", 3, "--offload_path needs it")
        elif settings.offload == "none":
            stages = settings.ranks_that_split("layers")
            stage = 0 if settings.world_size == 1 else 1 if stages > 1 else 2
            processes = f"{settings.world_size} process{'es' * (settings.world_size > 1)}"
            decide(settings, "zero", stage, f"{processes}, {stages} stages" if stage == 1 else processes)
        else:
            stage = 3 if settings.offload == "all" else 2
            decide(settings, "zero", stage, f"the lowest stage that can offload {settings.offload}")
    if not settings.use_cpu and settings.planned_gpu is None and not hardware.torch_sees_some():
        if why := hardware.why_torch_sees_none():
            raise UserError(f"{why}; or train on the CPU with --use_cpu true.")
        decide(settings, "use_cpu", True, "no GPU is visible to PyTorch")
    if settings.use_cpu:
        decide(settings, "dataloader_pin_memory", False)
        decide(settings, "ddp_backend", "gloo")
    _choose_strategies(settings)


def _choose_strategies(settings: Settings) -> None:
    """Save and evaluate by steps where their number is given and the strategy is not: transformers would ignore it."""
    if "save_steps" in settings.given and settings.source["save_strategy"] == "default":
        decide(settings, "save_strategy", "steps", "--save_steps is given")
    has_eval = bool(settings.eval_data or settings.eval_fraction)
    if has_eval and settings.source["eval_strategy"] == "transformers default":
        if "eval_steps" in settings.given:
            decide(settings, "eval_strategy", "steps", "--eval_steps is given")
        else:
            decide(settings, "eval_strategy", "epoch", "there are eval rows")


PRECISION = (
    Technique(
        name="bf16",
        flag="bf16",
        example="--bf16 true",
        conflicts=(Conflict("fp16", (True,), "products have one type", "choose one"),),
    ),
    Technique(name="fp16", flag="fp16", example="--fp16 true"),
)


def choose_precision(settings: Settings) -> None:
    """Choose bf16, fp16 (GPUs without bf16) or fp32 (CPUs), unless a flag or the JSON decides."""
    set_by_user = {"bf16", "fp16"} & {k for k, s in settings.source.items() if s != "transformers default"}
    gpu, has_bf16, planned = "CPU", True, settings.planned_gpu
    if not settings.use_cpu:
        gpu = planned.device_name if planned is not None else torch.cuda.get_device_name()
        has_bf16 = hardware.is_ampere_or_later(planned)
    for flag in ("bf16", "pure_bf16"):
        if settings.values[flag] and not has_bf16:
            raise UserError(f"--{flag}: {gpu} has no bf16 arithmetic; use --fp16 true, or leave both out.")
    if settings.fp16 and settings.use_cpu and settings.deepspeed is None:
        raise UserError("--fp16 with stage 0 needs a GPU (its loss scaler does); use --bf16 true on the CPU.")
    if settings.fp16 and settings.use_cpu:
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            raise UserError("--fp16 true: this CPU has no fp16 arithmetic; use --bf16 true, or leave both out.")
    if settings.deepspeed is None and not settings.trains_adapter and settings.dtype == "float16" and settings.fp16:
        raise UserError(
            "--dtype float16 --fp16 true with stage 0: the loss scaler needs fp32 weights; use --dtype auto."
        )
    if settings.use_cpu and (settings.bf16 or settings.pure_bf16) and not hardware.cpu_has_bf16():
        settings.decisions.append(
            "bf16: this CPU has no bf16 arithmetic (avx512_bf16, AMX), so its products are emulated and can take many "
            "times as long as in fp32 (--bf16 false)"
        )
    if set_by_user:
        return
    if settings.pure_bf16:
        decide(settings, "bf16", True, "--pure_bf16")
    elif settings.use_cpu:
        faster = "; this CPU has bf16 arithmetic, faster for large models (--bf16 true)" * hardware.cpu_has_bf16()
        settings.decisions.append(f"precision fp32: exact{faster}")
    elif has_bf16:
        decide(settings, "bf16", True, f"{gpu} has bf16 arithmetic")
    else:
        decide(settings, "fp16", True, f"{gpu} has no bf16 arithmetic; loss scaling is on")


def solve_batch(settings: Settings) -> None:
    names = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    open_sources = {"transformers default", "default", "bundled task"}
    fixed = [None if settings.source[n] in open_sources else settings.values[n] for n in names]
    max_micro = batch_size.DEFAULT_MAX_MICRO_BATCH
    bound = settings.source[names[1]]  # a micro batch as large as the effective batch allows
    bound = bound if (bound == BY_PLAN or bound.startswith("preset")) and not fixed[2] else None
    if bound:
        fixed[1], max_micro = None, settings.per_device_train_batch_size
    if settings.source[names[0]] == "bundled task" and fixed[1:] == [None, None]:
        ranks = settings.data_ranks
        fixed[0] = max(1, round(settings.effective_batch_size / ranks)) * ranks  # 32 is not the user's choice
        max_micro = settings.per_device_train_batch_size
    if (stages := settings.ranks_that_split("layers")) > 1:
        per_rank = (fixed[0] or batch_size.DEFAULT_EFFECTIVE_BATCH_SIZE) // settings.data_ranks
        max_micro = max(1, min(max_micro, per_rank // (MICRO_BATCHES_PER_STAGE * stages)))
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
    """Evaluate no more rows at once than are trained, where the number is not given; transformers' 8 may not fit."""
    name, micro = "per_device_eval_batch_size", settings.per_device_train_batch_size
    has_eval = settings.eval_data or settings.eval_fraction
    if has_eval and settings.source[name] == "transformers default" and micro < settings.values[name]:
        decide(settings, name, micro, "as many rows as a micro batch has, so that evaluation needs no more memory")


def _data_ranks_text(settings: Settings) -> str:
    whole, count = settings.world_size, settings.data_ranks
    if count == whole:
        return f"{whole} rank{'s' * (whole > 1)}"
    divided = " / ".join(f"{way.flag} {size}" for way, size in groups.in_use(settings.values))
    return f"{count} data rank{'s' * (count > 1)} ({whole} ranks / {divided})"


def scale_learning_rate(settings: Settings) -> None:
    factor = batch_size.learning_rate_factor(
        settings.lr_scaling, settings.effective_batch_size, settings.lr_scaling_base_batch_size
    )
    if settings.lr_scaling != "none":
        base_rate = settings.learning_rate
        why = f"{base_rate:g} x {factor:.4g} (--lr_scaling {settings.lr_scaling}: effective batch "
        why += f"{settings.effective_batch_size} against {settings.lr_scaling_base_batch_size})"
        decide(settings, "learning_rate", base_rate * factor, why)
