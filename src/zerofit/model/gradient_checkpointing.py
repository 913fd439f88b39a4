"""Gradient checkpointing: which layers are recomputed, what they still store, and where."""

import json

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zerofit.errors import UserError

# Products and attention: what costs time to compute again. Norms, activations, rotations and casts are recomputed.
SAVED_OPERATIONS = frozenset(
    """
    aten::mm aten::addmm aten::bmm aten::baddbmm aten::_scaled_mm aten::_grouped_mm
    aten::_scaled_dot_product_flash_attention aten::_scaled_dot_product_efficient_attention
    aten::_scaled_dot_product_cudnn_attention aten::_scaled_dot_product_flash_attention_for_cpu
    aten::_scaled_dot_product_fused_attention_overrideable aten::_flash_attention_forward
    aten::_efficient_attention_forward torch_attn::_varlen_attn flex_attention
    flash_attn::_flash_attn_forward flash_attn::_flash_attn_varlen_forward flash_attn_3::fwd
    """.split()
)


def choose(settings) -> None:
    """Fold transformers' two names of each argument into gradient_checkpointing*, and check what belongs together.

    Raises: UserError for a contradiction, or for a refinement of checkpointing while it is off.
    """
    values = settings.values
    _one_name(settings, "gradient_checkpointing", "activation_checkpointing")
    _one_name(settings, "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    kwargs = dict(_parsed(values["gradient_checkpointing_kwargs"]))
    for key, flag in (("every_n_layers", "gradient_checkpointing_every"), ("offload", "activation_offload")):
        if key in kwargs:
            said = kwargs.pop(key)
            if settings.source[flag] != "default" and values[flag] != said:
                raise UserError(f"--{flag} is {values[flag]}, but gradient_checkpointing_kwargs says {key} {said}.")
            values[flag], settings.source[flag] = said, settings.source["gradient_checkpointing_kwargs"]
    values["gradient_checkpointing_kwargs"] = {"use_reentrant": False, **kwargs}
    selective = values["gradient_checkpointing_policy"] == "selective"
    refined = {
        "gradient_checkpointing_every": values["gradient_checkpointing_every"] != 1,
        "gradient_checkpointing_policy": selective,
        "activation_offload": values["activation_offload"],
    }
    for name, asked in refined.items():
        if asked and not values["gradient_checkpointing"]:
            raise UserError(
                f"--{name} refines gradient checkpointing, which is off: add --gradient_checkpointing true."
            )
    if values["gradient_checkpointing_every"] < 1:
        raise UserError(
            f"--gradient_checkpointing_every is {values['gradient_checkpointing_every']}: it must be 1 or more."
        )
    if selective and values["gradient_checkpointing_kwargs"]["use_reentrant"]:
        raise UserError(
            "--gradient_checkpointing_policy selective needs non-reentrant checkpointing: delete use_reentrant from "
            "--gradient_checkpointing_kwargs."
        )
    if values["activation_offload"] and settings.use_cpu:
        settings.decisions.append(
            "activation_offload: nothing to move, the activations of a CPU run are in host memory"
        )
    if settings.deepspeed and "activation_checkpointing" in settings.deepspeed:
        settings.decisions.append(
            "the DeepSpeed JSON's activation_checkpointing section has no effect: models of transformers never call "
            "DeepSpeed's checkpointing; see --gradient_checkpointing and --activation_offload"
        )


def _one_name(settings, old: str, new: str) -> None:
    """transformers before 5.20 says gradient_checkpointing, later ones activation_checkpointing; ours is the first."""
    given = settings.values.get(new)
    if given is None:
        return
    said = settings.source[old] not in ("default", "bundled task", "transformers default")
    if said and settings.values[old] != given:
        raise UserError(
            f"--{old} is {settings.values[old]}, but --{new} is {given}: give one of them, they are the same."
        )
    settings.values[old], settings.source[old] = given, settings.source[new]
    settings.values[new] = None


def _parsed(kwargs) -> dict:
    """A dict, or the JSON text that a flag brings."""
    if not isinstance(kwargs, str):
        return kwargs or {}
    try:
        found = json.loads(kwargs)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"--gradient_checkpointing_kwargs {kwargs}: must be a JSON object.")
    return found


def enable(model, settings) -> None:
    """Turn checkpointing on, once and before the Trainer exists.

    Not left to the Trainer: it takes the policy only from TrainingArguments, which must stay printable as JSON.
    Raises: UserError for a model that cannot do it or has fewer layers than --gradient_checkpointing_every.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not settings.gradient_checkpointing:
        return
    every, kwargs = settings.gradient_checkpointing_every, dict(settings.gradient_checkpointing_kwargs)
    if settings.gradient_checkpointing_policy == "selective":
        kwargs["context_fn"] = _keeping_products
    layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    if every > max(layers, 1):
        raise UserError(f"--gradient_checkpointing_every {every}: the model has {layers} layers; choose fewer.")
    # The old name until transformers 5.19; on a CPU its `offload` asks for pinned memory, which only GPUs have.
    turn_on = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        turn_on(kwargs, every_n_layers=every, offload=settings.activation_offload and not settings.use_cpu)
    except ValueError as error:
        raise UserError(f"--gradient_checkpointing: {error} Add --gradient_checkpointing false.") from None


def _keeping_products() -> tuple["_Products", "_Products"]:
    """What torch.utils.checkpoint enters for the forward and for the recomputation."""
    contexts = create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
    return tuple(_Products(context) for context in contexts)


class _Products(TorchDispatchMode):
    """Shows torch's selective checkpointing only the operations that are kept.

    It insists that forward and recomputation call the same operations in the same order; ZeRO-3 gathers parameters in one
    and finds them gathered in the other.
    """

    def __init__(self, context: TorchDispatchMode):
        super().__init__()
        self.context = context

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name() if hasattr(operation, "name") else str(operation)
        if name in SAVED_OPERATIONS:
            return self.context.__torch_dispatch__(operation, types, args, kwargs or {})
        return operation(*args, **(kwargs or {}))
