"""Run each operation of a simulated rank on fake tensors in one call, and pass new tensors to the memory trackers.

FakeTensorMode alone spends most of a simulation on views, which it computes in Python, and a stack of modes on being
called one by one, also for each `tensor.device`.
"""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Results that are views of their first argument's storage; their shapes are computed by torch's kernels in C++.
_VIEWS = frozenset(
    [
        *(aten.alias.default, aten.as_strided.default, aten.detach.default, aten.expand.default),
        *(aten.permute.default, aten.select.int, aten.slice.Tensor, aten.squeeze.dim, aten.t.default),
        *(aten.transpose.int, aten.unsqueeze.default, aten.view.default, aten.view.dtype),
        *(aten._unsafe_view.default, aten.split.Tensor, aten.split_with_sizes.default),
    ]
)

_DEVICE = torch.ops.prim.device.default

_READ, _INDICES, _SELECTED = aten._local_scalar_dense.default, aten.nonzero.default, aten.index.Tensor

_ALIKE, _COPY = aten.allclose.default, aten._to_copy.default


class FakeOperations(TorchDispatchMode):
    """A mode above FakeTensorMode that answers reads of tensors and tells trackers of every tensor that is returned.

    A read is answered with 1.0 (loss, norm), 0 (overflows) or False (an overflow).
    Args: fake: the mode below; rows: {tokens of a batch: its rows}; all labels count but the first of each row, which
        nothing predicts.
    """

    def __init__(self, fake: FakeTensorMode, rows: dict[int, int]):
        super().__init__()
        self.fake, self.rows = fake, rows
        self.trackers = {}  # {type of device: tracker that follows it}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each call goes through a wrapper for torch.compile

    @contextlib.contextmanager
    def followed(self, tracker):
        """Tell a tracker of the tensors of its device while the body runs."""
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
            self._tell(operation, args, kwargs, output)
        return output

    def _view(self, operation, args, kwargs):
        """Return what a view of a fake tensor is, without FakeTensorMode's call and cache."""
        device = args[0].fake_device
        with in_kernel_invocation_manager(self.fake):
            views = operation(*args, **kwargs)
        if isinstance(views, torch.Tensor):
            return FakeTensor(self.fake, views, device)
        return [FakeTensor(self.fake, view, device) for view in views]

    def _run(self, operation, args, kwargs):
        if operation is _READ:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        if operation is _INDICES:  # of the labels that count: all of them
            count = args[0].numel() - self.rows.get(args[0].numel(), 0)
            return args[0].new_empty((count, args[0].ndim), dtype=torch.long)
        if operation is _SELECTED and args[1][0].dtype == torch.bool and len(args[1]) == 1:
            mask = args[1][0]
            return args[0].new_empty(mask.numel(), *args[0].shape[mask.ndim :])
        if operation is _ALIKE:
            return True
        if operation is _COPY and getattr(args[0], "constant", None) is not None:
            args[0].constant = None  # FakeTensorMode would copy the value to the device, which does not exist
        return operation(*args, **kwargs)

    def _tell(self, operation, args, kwargs, output) -> None:
        """Pass the tensors of a result to the trackers; of a collective its buffers and gathered shards too."""
        if operation.namespace == "c10d":
            for tracker in self.trackers.values():
                tracker.see_collective(args, kwargs, output)
        elif type(output) is FakeTensor:
            if tracker := self.trackers.get(output.fake_device.type):
                tracker.count(output)
        else:
            for tracker in self.trackers.values():
                tracker.see_output(output)
