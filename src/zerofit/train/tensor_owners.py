"""Classify tensors as weights, gradients, optimizer states or buffers."""

import itertools

import torch

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


def owned(model, optimizer) -> dict[str, list[torch.Tensor]]:
    """Return tensors by part: parameters, gradients, optimizer, buffers, and host for offloaded ones.

    Sharded parameters (ZeRO-3) count with this rank's share; gathered parameters are "buffers". With offload, the
    optimizer's tensors are "host" (CPU memory).
    Args: optimizer: torch's, or wrapped by accelerate and DeepSpeed.
    """
    parts = {part: [] for part in ("parameters", "gradients", "optimizer", "buffers", "host")}
    weights = [] if model is None else list(model.parameters())
    for weight in weights:
        _add_weight(parts, weight)
    if model is not None:
        parts["parameters"] += model.buffers()
    wrappers = list(_unwrapped(optimizer))
    for wrapper in wrappers:
        _add_optimizer(parts, wrapper, {id(weight) for weight in weights})
    if wrappers:
        parts["optimizer"] += _tensors(dict(wrappers[-1].state))
    zero_optimizer = next((w for w in wrappers if hasattr(w, "cpu_offload") or hasattr(w, "offload_optimizer")), None)
    if getattr(zero_optimizer, "cpu_offload", False) or getattr(zero_optimizer, "offload_optimizer", False):
        parts["host"], parts["optimizer"] = parts["optimizer"], []
    return parts


def _add_weight(parts: dict[str, list], weight: torch.nn.Parameter) -> None:
    """Add the tensors of a parameter of the model; a parameter gathered by ZeRO-3 also counts as "buffers"."""
    sharded = hasattr(weight, "ds_tensor")
    parts["parameters"] += [weight.ds_tensor] if sharded else _inner(weight.data)
    parts["parameters"] += _quantization(weight)
    parts["gradients"] += _tensors([weight.grad, getattr(weight, "grad_accum", None)])
    if sharded:
        parts["buffers"].append(weight.data)


def _add_optimizer(parts: dict[str, list], wrapper, model_ids: set[int]) -> None:
    """Add the tensors of an optimizer or its wrapper, except the model's parameters."""
    attributes = vars(wrapper)
    for part, names in _DEEPSPEED.items():
        for name in names:
            parts[part] += _tensors(attributes.get(name))
    for group in getattr(wrapper, "param_groups", ()):
        masters = [p for p in group["params"] if isinstance(p, torch.Tensor) and id(p) not in model_ids]
        parts["optimizer"] += masters
        parts["gradients"] += _tensors([p.grad for p in masters])
    for bucket in (attributes.get("ipg_buckets") or {}).values():
        parts["buffers"] += _tensors(bucket.buffer)


# Attributes of DeepSpeed 0.19's optimizers (runtime/zero/stage_1_and_2.py, stage3.py, fp16/, bf16_optimizer.py).
_DEEPSPEED = {
    "parameters": ("bit16_groups_flat",),
    "optimizer": (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat",
        "fp32_groups_flat_partition",
        "fp32_groups",
    ),
    "gradients": (
        "averaged_gradients",
        "all_grad_tensors",
        "grads_in_partition",
        "grad_partitions_flat_buffer",
        "fp32_groups_gradients_flat",
    ),
}


def _quantization(parameter) -> list[torch.Tensor]:
    """Return the scales of bitsandbytes' 4-bit weights, quantized once or twice."""
    state = getattr(parameter, "quant_state", None)
    states = [s for s in (state, getattr(state, "state2", None)) if s is not None]
    return [t for s in states for t in _tensors(vars(s))]


def _unwrapped(optimizer):
    """Yield the optimizer and all wrapped ones: accelerate's, DeepSpeed's, torch's."""
    seen = set()
    while optimizer is not None and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        optimizer = vars(optimizer).get("optimizer")


def _tensors(value) -> list[torch.Tensor]:
    """Return all tensors in nested lists and dicts."""
    if isinstance(value, torch.Tensor):
        return _inner(value)
    if isinstance(value, dict):
        return list(itertools.chain.from_iterable(_tensors(v) for v in value.values()))
    if isinstance(value, (list, tuple)):
        return list(itertools.chain.from_iterable(_tensors(v) for v in value))
    return []


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors inside a subclass (torchao's quantized states), else the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [t for name in tensor.__tensor_flatten__()[0] for t in _inner(getattr(tensor, name))]


def by_part(storages) -> dict[str, int]:
    totals = dict.fromkeys(PARTS, 0)
    for storage in storages:
        if storage.part != "host":
            totals[storage.part] += storage.bytes
    return totals
