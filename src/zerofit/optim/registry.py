"""The optimizers of --optim: requirements, conflicts and memory."""

import difflib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zerofit.base import command_line
from zerofit.base.errors import UserError
from zerofit.job.settings import decide, json_value, merge_json
from zerofit.job.technique import Conflict, Technique


@dataclass(frozen=True)
class OptimizerSpec:
    """Requirements, support and memory of an optimizer."""

    # Bytes of state per trained parameter, without fp32 weights (r: rank, n: longer side of a matrix).
    state_bytes: str
    stages: str = "0123"  # supported ZeRO stages
    offload: bool = True  # whether it supports --offload
    why_not: str = ""  # why other stages or offload are unsupported
    module: str | None = None  # required package
    extra: str | None = None  # extra of pyproject.toml that installs the package; None: the base install
    needs_cuda: bool = False
    rounding: str | None = "nearest"  # rounding of bf16 weights with --pure_bf16; None: unsupported
    bundled_lr: float = 5e-4  # learning rate with over 90 % exact match on the bundled task
    note: str = ""
    # (parameter groups, learning rate) -> optimizer, for optimizers of a recipe (Recipe.optimizers); None: the kit's
    build: Callable[[list[dict], float], Any] | None = None


_BNB = {"module": "bitsandbytes"}

_PAGED = {
    **_BNB,
    "needs_cuda": True,
    "offload": False,
    "why_not": "its states are paged CUDA memory, which offload would turn into plain host tensors",
}

_TORCHAO = {
    "module": "torchao",
    "stages": "0",
    "offload": False,
    "rounding": "stochastic",
    "why_not": "ZeRO's flat slices are rarely multiples of its block, so the states would silently stay in fp32 "
    "(use adamw_8bit)",
}

_PROJECTED = {
    "stages": "0",
    "offload": False,
    "rounding": None,
    "why_not": "it projects full gradient matrices, but ZeRO passes flat slices",
    "extra": "projected",
}

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw_torch_fused": OptimizerSpec("8", rounding="stochastic", note="the default"),
    "adamw_torch": OptimizerSpec("8", rounding="stochastic"),
    "adamw_8bit": OptimizerSpec("2", **_BNB, note="at stage 0 embeddings and tensors below 4096 numbers use 8 bytes"),
    "paged_adamw_32bit": OptimizerSpec("8", **_PAGED, note="states move to host memory when the GPU is full"),
    "paged_adamw_8bit": OptimizerSpec("2", **_PAGED, note="states move to host memory when the GPU is full"),
    "adamw_torch_8bit": OptimizerSpec(
        "2", **_TORCHAO, note="compiles at the first step; all linear layers and embeddings"
    ),
    "adamw_torch_4bit": OptimizerSpec("1", **_TORCHAO, note="compiles at the first step"),
    "adafactor": OptimizerSpec(
        "~0",
        stages="0",
        offload=False,
        why_not="it needs full matrices: with ZeRO's flat slices it would use 4 bytes per parameter, and the result "
        "would depend on the number of ranks",
        note="no momentum; the update of each matrix is clipped to root mean square 1",
    ),
    "lion_32bit": OptimizerSpec(
        "4", **_BNB, bundled_lr=3e-4, note="arXiv 2302.06675: a third to a tenth of AdamW's rate"
    ),
    "lion_8bit": OptimizerSpec("1", **_BNB, bundled_lr=3e-4),
    "sgd": OptimizerSpec(
        "4", bundled_lr=0.3, note="momentum 0.9 unless --optim_args sets another; 0 bytes without momentum"
    ),
    "muon": OptimizerSpec(
        "4 (matrices), 8 (rest)",
        rounding=None,
        bundled_lr=1e-3,
        note="DeepSpeed's; Muon for hidden matrices, AdamW for embeddings, head and vectors, one rate for both "
        "(arXiv 2502.16982); no gradient clipping",
    ),
    "sophia": OptimizerSpec(
        "8",
        rounding="stochastic",
        bundled_lr=4e-4,
        note="Sophia-G, arXiv 2305.14342; a second backward on sampled labels every k=10 steps",
    ),
    "galore_adamw": OptimizerSpec("8 r/n", **_PROJECTED, module="galore_torch", note="arXiv 2403.03507; rank 128"),
    "apollo_adamw": OptimizerSpec("8 r/n", **_PROJECTED, module="apollo_torch", note="arXiv 2412.05270; rank 128"),
}

ALIASES = {"lion": "lion_32bit", "adamw": "adamw_torch_fused", "adamw_bnb_8bit": "adamw_8bit"}

OURS = ("muon", "sophia")  # not in transformers' OptimizerNames


def spec_of(settings) -> OptimizerSpec | None:
    """Return the spec of --optim from the recipe's optimizers or OPTIMIZERS; None if unlisted."""
    return settings.recipe.optimizers.get(settings.optim) or OPTIMIZERS.get(settings.optim)


def resolve_name(settings) -> None:
    """Replace an alias of --optim by the name in OPTIMIZERS."""
    name = str(getattr(settings.optim, "value", settings.optim))
    decide(settings, "optim", ALIASES.get(name, name), source=settings.source["optim"])


def resolve(settings) -> None:
    """Check --optim and --pure_bf16 against the other arguments, and set dependent ones.

    Raises: UserError for a combination that cannot work or would silently not save memory.
    """
    explicit, name = settings.explicit, settings.optim
    entry = spec_of(settings)
    _match_json(settings, explicit)
    if settings.tf32 and settings.use_cpu:
        raise UserError("--tf32 true: TF32 needs an NVIDIA GPU, but this run is on the CPU; leave it out.")
    if entry is None:
        _choose_unlisted(settings, name)
    elif entry.module and importlib.util.find_spec(entry.module) is None:
        install = command_line.install(entry.extra or "")
        raise UserError(f"--optim {name}: {entry.module} is not installed: {install}.")
    elif entry.needs_cuda and settings.use_cpu:
        raise UserError(f"--optim {name}: needs a GPU; use {name.removeprefix('paged_')} or adamw_torch_fused here.")
    _choose_arguments(settings, name, explicit)
    if settings.pure_bf16:
        _choose_pure_bf16(settings, name, entry, explicit)


def _match_json(settings, explicit: dict) -> None:
    """Let an "optimizer" section in the user's DeepSpeed JSON replace --optim; refuse conflicting flags."""
    section = json_value(settings.deepspeed or {}, "optimizer.type")
    if section is None:
        return
    for flag in ("optim", "optim_args", "pure_bf16", "lr_scaling", "loraplus_lr_ratio"):
        if explicit.get(flag) not in (None, False, "none"):
            raise UserError(
                f'{settings.values["deepspeed"]} has an "optimizer" section ({section}), but --{flag} is '
                f"{explicit[flag]}: change one of them."
            )
    settings.decisions.append(f"optimizer {section}: set in the DeepSpeed JSON; --optim is not used")


def _choose_unlisted(settings, name: str) -> None:
    from transformers.training_args import OptimizerNames

    known = {n.value for n in OptimizerNames}
    if name not in known:
        candidates = [*settings.recipe.optimizers, *OPTIMIZERS, *ALIASES, *known]
        close = difflib.get_close_matches(name, candidates, 1, 0.6)
        raise UserError(
            f"--optim {name}: unknown optimizer{f'; did you mean {close[0]}?' if close else ''} (docs/optimizers.md "
            "lists the tested ones)."
        )
    if settings.zero != 0:
        listed = ", ".join(n for n, e in OPTIMIZERS.items() if str(settings.zero) in e.stages)
        raise UserError(
            f"--optim {name}: ZeRO stage {settings.zero} passes flat slices of parameters, for which this optimizer is "
            f"not tested; use --zero 0, or {listed}."
        )
    settings.decisions.append(f"optim {name}: supported by transformers, but not tested here")


def _choose_arguments(settings, name: str, explicit: dict) -> None:
    optim_args = arguments(settings)
    if name == "sgd" and "momentum" not in optim_args:
        momentum = ",".join([*([settings.optim_args] if settings.optim_args else []), "momentum=0.9"])
        decide(settings, "optim_args", momentum, "SGD needs momentum in most cases; momentum=0 turns it off")
    if name == "muon" and "max_grad_norm" not in explicit and settings.source["max_grad_norm"] != "deepspeed JSON":
        decide(settings, "max_grad_norm", 0.0, "DeepSpeed would clip Muon's normalized updates")
    elif name == "muon" and settings.max_grad_norm:
        raise UserError(
            f"--optim muon with --max_grad_norm {settings.max_grad_norm}: under ZeRO DeepSpeed would clip the "
            "normalized updates; use --max_grad_norm 0."
        )
    scatters = json_value(settings.deepspeed or {}, "zero_optimization.reduce_scatter", True)
    if name == "muon" and settings.zero == 3 and scatters:
        settings.deepspeed = merge_json(settings.deepspeed, {"zero_optimization": {"reduce_scatter": False}})
        settings.decisions.append("zero_optimization.reduce_scatter false: Muon at stage 3 needs full gradients")
    if name.startswith(("galore", "apollo")) and settings.optim_target_modules is None:
        decide(settings, "optim_target_modules", "all-linear", f"the matrices that {name} projects")


def arguments(settings) -> dict[str, str]:
    """Parse --optim_args into a dictionary.

    Raises: UserError if it is not name=value,name=value, or a number is not finite.
    """
    pairs = [pair for pair in (settings.optim_args or "").replace(" ", "").split(",") if pair]
    if any(pair.count("=") != 1 for pair in pairs):
        raise UserError(f"--optim_args {settings.optim_args}: must have the form name=value,name=value.")
    for pair in pairs:
        if re.fullmatch(r"[+-]?(nan|inf|infinity)", pair.partition("=")[2], re.IGNORECASE):
            raise UserError(f"--optim_args {pair}: it must be a finite number.")
    return dict(pair.split("=") for pair in pairs)


def _choose_pure_bf16(settings, name: str, entry: OptimizerSpec | None, explicit: dict) -> None:
    """Set up --pure_bf16: bf16 weights, gradients and optimizer states, without fp32 master weights."""
    if json_value(settings.deepspeed or {}, "data_types.grad_accum_dtype") not in (None, "bf16"):
        raise UserError(
            f"{settings.values.get('deepspeed')}: data_types.grad_accum_dtype makes DeepSpeed keep fp32 master "
            "weights, but --pure_bf16 is on: change one of them."
        )
    if settings.deepspeed is not None:
        pure = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
        settings.deepspeed = merge_json(settings.deepspeed, pure)
    if name in ("adamw_torch_8bit", "adamw_torch_4bit") and "bf16_stochastic_round" not in arguments(settings):
        parts = [settings.optim_args] if settings.optim_args else []
        decide(settings, "optim_args", ",".join([*parts, "bf16_stochastic_round=True"]), "--pure_bf16")
    if (choice := arguments(settings).get("compile", "auto")) not in ("auto", "true", "false"):
        raise UserError(f"--optim_args compile={choice}: must be auto, true or false.")
    stochastic = entry is not None and entry.rounding == "stochastic"
    rounding = (
        "weights are rounded stochastically, which preserves small updates on average"
        if stochastic
        else f"{name} rounds to nearest and loses changes below 1/512 of a weight (adamw_torch_fused rounds "
        "stochastically)"
    )
    settings.decisions.append(f"pure_bf16: no fp32 master copy of the weights; {rounding}")


def name_for_transformers(settings) -> str:
    """Return --optim for TrainingArguments, adamw_torch for names unknown to transformers."""
    return "adamw_torch" if settings.optim in (*OURS, *settings.recipe.optimizers) else settings.optim


def technique(name: str, spec: OptimizerSpec) -> Technique:
    """Return the technique of an optimizer with its conflicts."""
    conflicts = []
    if unsupported := tuple(stage for stage in range(4) if str(stage) not in spec.stages):
        conflicts.append(Conflict("zero", unsupported, spec.why_not, f"use --zero {' or '.join(spec.stages)}"))
    if not spec.offload:
        conflicts.append(Conflict("offload", ("optimizer", "all"), spec.why_not, "leave --offload out"))
    if spec.rounding is None:
        conflicts.append(Conflict("pure_bf16", (True,), "it needs an fp32 master copy", "use adamw_torch_fused"))
    if name == "sophia":
        why = "its squared gradients exceed the range of fp16"
        conflicts.append(Conflict("fp16", (True,), why, "use --bf16 true"))
    return Technique(name=name, flag="optim", values=(name,), example=f"--optim {name}", conflicts=tuple(conflicts))


TECHNIQUES = (
    Technique(name="optimizer aliases", resolve=resolve_name),  # first: the others read the name
    *(technique(name, spec) for name, spec in OPTIMIZERS.items()),
    Technique(
        name="pure bf16",
        flag="pure_bf16",
        example="--pure_bf16 true",
        conflicts=(
            Conflict("fp16", (True,), "it needs bf16"),
            Conflict("bf16", (False,), "it needs bf16"),
            Conflict("dtype", ("float32", "float16"), "its weights are bf16", "leave --dtype out"),
            Conflict(
                "offload",
                ("optimizer", "all"),
                "DeepSpeed allows only its CPU Adam for offload, which rounds to nearest and loses small updates",
                "use one of the two",
            ),
        ),
    ),
    Technique(name="optimizer", resolve=resolve),
)
