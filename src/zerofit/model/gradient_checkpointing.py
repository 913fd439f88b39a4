"""Gradient checkpointing: which layers are recomputed, which activations are stored, and where."""

import json

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zerofit.base.errors import UserError
from zerofit.job.settings import decide
from zerofit.job.technique import AllBut, Conflict, Technique
from zerofit.model import load
from zerofit.model.image_text import classes

SIMULATED_ATTENTION = "zerofit::attention"  # the operation in simulations (plan/fake_device.py)

# Matrix products and attention are slow to recompute. Norms, activations, rotations and casts are recomputed.
SAVED_OPERATIONS = frozenset(
    """
    aten::mm aten::addmm aten::bmm aten::baddbmm aten::_scaled_mm aten::_grouped_mm
    aten::_scaled_dot_product_flash_attention aten::_scaled_dot_product_efficient_attention
    aten::_scaled_dot_product_cudnn_attention aten::_scaled_dot_product_flash_attention_for_cpu
    aten::_scaled_dot_product_fused_attention_overrideable aten::_flash_attention_forward
    aten::_efficient_attention_forward torch_attn::_varlen_attn flex_attention
    flash_attn::_flash_attn_forward flash_attn::_flash_attn_varlen_forward flash_attn_3::fwd
    """.split()
) | {SIMULATED_ATTENTION}

ARGUMENTS = (
    "gradient_checkpointing", "gradient_checkpointing_every", "gradient_checkpointing_policy",
    "gradient_checkpointing_kwargs", "activation_offload",
)  # fmt: skip


def is_open(settings) -> bool:
    """Return whether all checkpointing arguments have default values."""
    in_json = settings.deepspeed and "activation_checkpointing" in settings.deepspeed
    sources = {settings.source[name] for name in ARGUMENTS}
    return settings.gradient_checkpointing and sources <= {"default", "transformers default"} and not in_json


def resolve(settings) -> None:
    """Merge both names of each argument into gradient_checkpointing*, and check the combination.

    transformers 5.20 renamed gradient_checkpointing* to activation_checkpointing*.
    Raises: UserError for a contradiction.
    """
    values = settings.values
    _one_name(settings, "gradient_checkpointing", "activation_checkpointing")
    _one_name(settings, "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    kwargs = dict(_parsed(values["gradient_checkpointing_kwargs"]))
    for key, flag in (("every_n_layers", "gradient_checkpointing_every"), ("offload", "activation_offload")):
        if key in kwargs:
            value = kwargs.pop(key)
            if settings.source[flag] != "default" and values[flag] != value:
                raise UserError(f"--{flag} is {values[flag]}, but --gradient_checkpointing_kwargs has {key} {value}.")
            decide(settings, flag, value, source=settings.source["gradient_checkpointing_kwargs"])
    kwargs = {"use_reentrant": False, **kwargs}
    decide(settings, "gradient_checkpointing_kwargs", kwargs, source=settings.source["gradient_checkpointing_kwargs"])
    if values["gradient_checkpointing_every"] < 1:
        raise UserError(
            f"--gradient_checkpointing_every is {values['gradient_checkpointing_every']}: it must be 1 or more."
        )
    selective = values["gradient_checkpointing_policy"] == "selective"
    if selective and kwargs["use_reentrant"]:
        raise UserError(
            "--gradient_checkpointing_policy selective needs non-reentrant checkpointing; delete use_reentrant from "
            "--gradient_checkpointing_kwargs."
        )
    if values["activation_offload"] and settings.use_cpu:
        settings.decisions.append("activation_offload: no effect, activations of a CPU run are in host memory")
    if settings.deepspeed and "activation_checkpointing" in settings.deepspeed:
        settings.decisions.append(
            "the DeepSpeed JSON's activation_checkpointing section has no effect: transformers' models do not call "
            "DeepSpeed's checkpointing; see --gradient_checkpointing and --activation_offload"
        )


def resolve_for_model(settings, config) -> None:
    """Turn the default off for classes of transformers that do not support it (JetMoE, CTRL)."""
    cls = classes.text_class(config) if is_open(settings) else None
    if cls is not None and not cls.supports_gradient_checkpointing:
        decide(settings, "gradient_checkpointing", False, f"{cls.__name__} of transformers does not support it")


def _one_name(settings, old: str, new: str) -> None:
    """Move the value of the `new` name (transformers 5.20) to the `old` one, which is used here."""
    value = settings.values.get(new)
    if value is None:
        return
    old_is_set = settings.source[old] not in ("default", "bundled task", "transformers default")
    if old_is_set and settings.values[old] != value:
        raise UserError(f"--{old} is {settings.values[old]}, but --{new} is {value}; set only one of these synonyms.")
    decide(settings, old, value, source=settings.source[new])
    decide(settings, new, None, source=settings.source[new])


def _parsed(kwargs) -> dict:
    """Return --gradient_checkpointing_kwargs, a dict or JSON text, as a dict."""
    if not isinstance(kwargs, str):
        return kwargs or {}
    try:
        parsed = json.loads(kwargs)
    except json.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise UserError(f"--gradient_checkpointing_kwargs {kwargs}: must be a JSON object.")
    return parsed


def enable(settings, model) -> None:
    """Enable gradient checkpointing; call it once, before the Trainer is created.

    The Trainer cannot enable the policy: it reads only TrainingArguments, which must be serializable as JSON.
    Raises: UserError for a model without support, or with fewer layers than --gradient_checkpointing_every.
    """
    if not settings.gradient_checkpointing:
        return
    every, kwargs = settings.gradient_checkpointing_every, dict(settings.gradient_checkpointing_kwargs)
    if settings.gradient_checkpointing_policy == "selective":
        kwargs["context_fn"] = _keeping_products
    layers = len(load.transformer_layers(model))
    if every > max(layers, 1):
        raise UserError(f"--gradient_checkpointing_every {every}: the model has {layers} layers; use a smaller number.")
    # Renamed in transformers 5.20. `offload` needs pinned memory, which requires a GPU.
    turn_on = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    offload = settings.activation_offload and not settings.use_cpu
    try:
        turn_on(kwargs, every_n_layers=every, offload=offload)
    except ValueError as error:
        raise UserError(f"--gradient_checkpointing: {error} Add --gradient_checkpointing false.") from None


def _keeping_products() -> tuple["_Products", "_Products"]:
    """Return the contexts of torch.utils.checkpoint for the forward and for the recomputation."""
    contexts = create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
    return tuple(_Products(context) for context in contexts)


class _Products(TorchDispatchMode):
    """Pass only SAVED_OPERATIONS to torch's selective checkpointing.

    It requires the same operations in the same order in forward and recomputation, but ZeRO-3 gathers parameters in
    only one of them.
    """

    def __init__(self, context: TorchDispatchMode):
        super().__init__()
        self.context = context

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name() if hasattr(operation, "name") else str(operation)
        if name in SAVED_OPERATIONS:
            return self.context.__torch_dispatch__(operation, types, args, kwargs or {})
        return operation(*args, **(kwargs or {}))


_IS_OFF = Conflict(
    "gradient_checkpointing",
    (False,),
    "it has no effect without checkpointing",
    "use --gradient_checkpointing true",
)

# The hooks of the first technique handle all of them.
TECHNIQUES = (
    Technique(
        name="gradient checkpointing",
        flag="gradient_checkpointing",
        resolve=resolve,
        resolve_for_model=resolve_for_model,
        install=enable,
    ),
    Technique(
        name="no gradient checkpointing",
        flag="gradient_checkpointing",
        values=(False,),
        example="--gradient_checkpointing false",
    ),
    Technique(
        name="checkpointing of every Nth layer",
        flag="gradient_checkpointing_every",
        values=AllBut(1),
        example="--gradient_checkpointing_every 2",
        conflicts=(_IS_OFF,),
    ),
    Technique(
        name="selective checkpointing",
        flag="gradient_checkpointing_policy",
        values=("selective",),
        example="--gradient_checkpointing_policy selective",
        conflicts=(_IS_OFF,),
    ),
    Technique(
        name="activation offload",
        flag="activation_offload",
        example="--activation_offload true",
        conflicts=(_IS_OFF,),
    ),
)
