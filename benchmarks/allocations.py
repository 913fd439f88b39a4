"""Count the bytes of the tensors that operations allocate. Tests use it too."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Count every storage that an operation inside the `with` block returns, once, until it is freed.

    largest: bytes of the largest one; live: bytes alive now; peak: most bytes alive at once.
    """

    def __init__(self):
        super().__init__()
        self.largest = self.live = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        input_storages = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in input_storages:
                    self._add(storage)
        return output

    def _add(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += size
        self.largest, self.peak = max(self.largest, size), max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size) -> None:
        self._known.discard(key)
        self.live -= size
