"""Run each operation of a simulated rank on fake tensors in a single call, and pass new tensors to memory trackers.

FakeTensorMode would take most of the time of a simulation: it computes views in Python, builds cache keys, and is
called for each `tensor.device`. Here it runs once per operation and shapes of arguments; the shapes of the result are
cached.
"""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten

# Operations that return views of their first argument's storage; torch's C++ kernels compute their shapes.
_VIEWS = frozenset(
    [
        *(aten.alias.default, aten.as_strided.default, aten.detach.default, aten.expand.default),
        *(aten.permute.default, aten.select.int, aten.slice.Tensor, aten.squeeze.dim, aten.t.default),
        *(aten.transpose.int, aten.unsqueeze.default, aten.view.default, aten.view.dtype),
        *(aten._unsafe_view.default, aten.split.Tensor, aten.split_with_sizes.default),
    ]
)

_CACHED_NAMESPACES = ("aten", "zerofit")  # namespaces of operations whose results are cached

_UNKNOWN_SIZES = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

_DEVICE = torch.ops.prim.device.default

_READ, _INDICES, _SELECTED = aten._local_scalar_dense.default, aten.nonzero.default, aten.index.Tensor

_GROUPED = aten._grouped_mm.default  # matrix products of experts

_ADDED_PRODUCT = aten.addmm.dtype_out  # torch 2.12 cannot infer its shape, which is the shape of `out`

_ALIKE, _COPY = aten.allclose.default, aten._to_copy.default


class _NoKey(Exception):
    """The result of an operation with these arguments cannot be cached."""


_PLAIN = frozenset(
    [*(type(None), int, float, bool, str, complex), torch.dtype, torch.device, torch.layout, torch.memory_format]
)


def _as_key(value):
    """Return the properties of an argument that determine a result's shape, type and device. Raises: _NoKey."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None:
            raise _NoKey
        return value.dtype, value.shape, value.stride(), value.fake_device
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        return tuple([_as_key(part) for part in value])
    raise _NoKey


def _is_cacheable(operation) -> bool:
    """Return whether an operation's results depend only on the shapes of its arguments, and have separate storage."""
    if operation.namespace not in _CACHED_NAMESPACES or operation.is_view or operation.name().startswith("aten::lift"):
        return False
    return not _UNKNOWN_SIZES & set(operation.tags)


class FakeOperations(TorchDispatchMode):
    """A mode above FakeTensorMode that returns values for reads of tensors and passes new tensors to trackers.

    A read returns 1.0 (loss, norm), 0 (overflows) or False (an overflow).
    Args: fake: the FakeTensorMode; rows: {tokens of a batch: rows}. All labels count except the first of each row,
        which is not predicted.
    """

    def __init__(self, fake: FakeTensorMode, rows: dict[int, int]):
        super().__init__()
        self.fake, self.rows = fake, rows
        self.trackers = {}  # {type of device: its tracker}
        self._attributes = {}  # {device: attributes of its fake tensors}
        self._cache = {}  # {operation and arguments: result of `_as_shapes`}
        self._is_cacheable = {}  # {operation: whether its results can be cached}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # avoids a wrapper for torch.compile around each call

    @contextlib.contextmanager
    def followed(self, tracker):
        """Pass the tensors of the tracker's device to it while the body runs."""
        self.trackers[tracker.device] = tracker
        try:
            yield
        finally:
            del self.trackers[tracker.device]

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is _DEVICE:
            return args[0].fake_device if type(args[0]) is FakeTensor else operation(*args)
        if operation in _VIEWS and type(args[0]) is FakeTensor and args[0].constant is None:
            output = self._view(operation, args, kwargs or {})
        else:
            output = self._run(operation, args, kwargs or {})
        if self.trackers:
            self._notify(operation, args, kwargs, output)
        return output

    def _view(self, operation, args, kwargs):
        """Return views of a fake tensor without FakeTensorMode's call and cache."""
        device = args[0].fake_device
        with in_kernel_invocation_manager(self.fake):
            views = operation(*args, **kwargs)
        if isinstance(views, torch.Tensor):
            return self._fake(views, device)
        return [self._fake(view, device) for view in views]

    def _fake(self, meta: torch.Tensor, device: torch.device) -> FakeTensor:
        """Return FakeTensor(self.fake, meta, device) without the constructor, half of an operation's time."""
        if device not in self._attributes:
            self._attributes[device] = dict(vars(FakeTensor(self.fake, meta, device)))
        tensor = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(tensor)
        vars(tensor).update(self._attributes[device])
        return tensor

    def _run(self, operation, args, kwargs):
        if operation is _READ:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        if operation is _INDICES:  # indices of the labels that count
            count = args[0].numel() - self.rows.get(args[0].numel(), 0)
            return args[0].new_empty((count, args[0].ndim), dtype=torch.long)
        if operation is _SELECTED and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            mask = args[1][0]
            return args[0].new_empty(mask.numel(), *args[0].shape[mask.ndim :])
        if operation is _ALIKE:
            return True
        if operation is _GROUPED and args[0].dtype != torch.bfloat16:
            return _grouped_product(args, kwargs)
        if operation is _ADDED_PRODUCT:
            return kwargs["out"]
        if operation is _COPY and getattr(args[0], "constant", None) is not None:
            args[0].constant = None  # FakeTensorMode would copy the value to the fake device
        if operation.namespace == "c10d" and all(_has_no_value(value) for value in tree_iter((args, kwargs))):
            with in_kernel_invocation_manager(self.fake):
                return operation(*args, **kwargs)  # returns its arguments
        if operation not in self._is_cacheable:
            self._is_cacheable[operation] = _is_cacheable(operation)
        return self._by_shape(operation, args, kwargs) if self._is_cacheable[operation] else operation(*args, **kwargs)

    def _by_shape(self, operation, args, kwargs):
        """Return an operation's result from the cached shapes of an earlier call with the same argument shapes."""
        try:
            key = operation, _as_key(args), tuple([(name, _as_key(value)) for name, value in kwargs.items()])
        except _NoKey:
            return operation(*args, **kwargs)
        shapes = self._cache.get(key, self)
        if shapes is self:
            output = operation(*args, **kwargs)
            self._cache[key] = None if "out" in kwargs else _as_shapes(output, args)
            return output
        if shapes is None:
            return operation(*args, **kwargs)
        if type(shapes) is int:
            return args[shapes]
        with in_kernel_invocation_manager(self.fake):
            metas = [torch.empty_strided(*size, dtype=dtype, device="meta") for *size, dtype, _ in shapes[1]]
        tensors = [self._fake(meta, device) for meta, (*_, device) in zip(metas, shapes[1], strict=True)]
        return tensors[0] if shapes[0] is None else shapes[0](tensors)

    def _notify(self, operation, args, kwargs, output) -> None:
        """Pass the tensors of a result to the trackers; for a collective also its buffers and gathered shards."""
        if operation.namespace == "c10d":
            for tracker in self.trackers.values():
                tracker.see_collective(args, kwargs, output)
        elif type(output) is FakeTensor:
            if tracker := self.trackers.get(output.fake_device.type):
                tracker.count(output)
        else:
            for tracker in self.trackers.values():
                tracker.see_output(output)


def _grouped_product(args, kwargs) -> torch.Tensor:
    """Return the product of experts in fp32 or fp16: torch 2.13 computes it, but infers its shape for bf16 only."""
    as_bf16 = [
        torch.empty_strided(value.shape, value.stride(), dtype=torch.bfloat16, device=value.device)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for value in args
    ]
    product = _GROUPED(*as_bf16, **kwargs)
    return product.new_empty(product.shape, dtype=args[0].dtype)


def _has_no_value(value) -> bool:
    """Return whether an argument is a fake tensor without a stored value, or not a tensor."""
    return not isinstance(value, torch.Tensor) or (type(value) is FakeTensor and value.constant is None)


def _as_shapes(output, args) -> int | tuple | None:
    """Return a result of FakeTensorMode as shapes.

    Returns: the index in `args` of the result of an in-place operation; or (None for a tensor, else list or tuple;
        shape, strides, dtype and device of each new tensor); None for other results.
    """
    for place, value in enumerate(args):
        if output is value and type(value) is FakeTensor:
            return place
    several = type(output) if type(output) in (list, tuple) else None
    tensors = list(output) if several else [output]
    taken = {value.untyped_storage()._cdata for value in tree_iter(args) if isinstance(value, torch.Tensor)}
    for tensor in tensors:
        if type(tensor) is not FakeTensor or tensor.constant is not None or not _is_all_of_its_storage(tensor):
            return None
        key = tensor.untyped_storage()._cdata
        if key in taken:
            return None
        taken.add(key)
    return several, [(tuple(t.shape), t.stride(), t.dtype, t.fake_device) for t in tensors]


def _is_all_of_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether torch.empty_strided would create a tensor with the same storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    numbers = last + 1 if tensor.numel() else 0
    complete = tensor.untyped_storage().nbytes() == numbers * tensor.element_size() and tensor.storage_offset() == 0
    return complete and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
