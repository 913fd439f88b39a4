"""Tell which tensor is a weight, a gradient or an optimizer state."""

import itertools
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """`with Allocations() as made:` counts every storage that an operation inside returns, once, until it is freed.

    largest: bytes of the largest one; live: bytes alive now; peak: the most that were alive at once.
    """

    def __init__(self):
        super().__init__()
        self.largest = self.live = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in given:
                    self._add(storage)
        return out

    def _add(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        self.largest, self.peak = max(self.largest, size), max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size) -> None:
        self._known.discard(key)
        self.live -= size


PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


def owned(model, optimizer) -> dict[str, list[torch.Tensor]]:
    """The tensors of the known objects: {"parameters" | "gradients" | "optimizer" | "buffers" | "host": [tensor]}.

    Sharded parameters (ZeRO-3) count by this rank's share; what is gathered is "buffers". "host" is what offload moved
    out of the device.
    Args: optimizer: torch's own, in whatever accelerate and DeepSpeed wrapped around it.
    """
    found = {part: [] for part in ("parameters", "gradients", "optimizer", "buffers", "host")}
    if model is not None:
        for parameter in model.parameters():
            sharded = hasattr(parameter, "ds_tensor")
            found["parameters"] += [parameter.ds_tensor] if sharded else _inner(parameter.data)
            found["parameters"] += _quantisation(parameter)
            found["gradients"] += _tensors([parameter.grad, getattr(parameter, "grad_accum", None)])
            if sharded:
                found["buffers"].append(parameter.data)
        found["parameters"] += model.buffers()
    own = {id(p) for p in model.parameters()} if model is not None else set()
    wrappers = list(_unwrapped(optimizer))
    for wrapper in wrappers:
        attributes = vars(wrapper)
        for part, names in _DEEPSPEED.items():
            for name in names:
                found[part] += _tensors(attributes.get(name))
        for group in getattr(wrapper, "param_groups", ()):
            masters = [p for p in group["params"] if isinstance(p, torch.Tensor) and id(p) not in own]
            found["optimizer"] += masters
            found["gradients"] += _tensors([p.grad for p in masters])
        for bucket in (attributes.get("ipg_buckets") or {}).values():
            found["buffers"] += _tensors(bucket.buffer)
    if wrappers:
        found["optimizer"] += _tensors(dict(wrappers[-1].state))
    zero = next((w for w in wrappers if hasattr(w, "cpu_offload") or hasattr(w, "offload_optimizer")), None)
    if zero is not None and (getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False)):
        found["host"] += found.pop("optimizer")
        found["optimizer"] = []
    return found


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


def _quantisation(parameter) -> list[torch.Tensor]:
    """The scales beside bitsandbytes' 4-bit weights, once or twice quantised."""
    state = getattr(parameter, "quant_state", None)
    states = [s for s in (state, getattr(state, "state2", None)) if s is not None]
    return [t for s in states for t in _tensors(vars(s))]


def _unwrapped(optimizer):
    """The optimizer inside the optimizer inside ...: accelerate's, DeepSpeed's, torch's."""
    seen = set()
    while optimizer is not None and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        optimizer = vars(optimizer).get("optimizer")


def _tensors(value) -> list[torch.Tensor]:
    """All tensors in nested lists and dicts."""
    if isinstance(value, torch.Tensor):
        return _inner(value)
    if isinstance(value, dict):
        return list(itertools.chain.from_iterable(_tensors(v) for v in value.values()))
    if isinstance(value, (list, tuple)):
        return list(itertools.chain.from_iterable(_tensors(v) for v in value))
    return []


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors inside a subclass (torchao's quantised optimizer states), else the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [t for name in tensor.__tensor_flatten__()[0] for t in _inner(getattr(tensor, name))]


def by_part(storages) -> dict[str, int]:
    found = dict.fromkeys(PARTS, 0)
    for storage in storages:
        if storage.part != "host":
            found[storage.part] += storage.bytes
    return found
