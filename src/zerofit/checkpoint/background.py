"""--save_in_background: copy the states of a checkpoint to host memory; a thread writes them to disk."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator

import torch

MIN_PINNED_BYTES = 1 << 20  # copies of smaller tensors are not pinned: there are too many


class HostCopies:
    """Host copies of the states, pinned for GPU tensors; each save reuses the memory of the last one."""

    def __init__(self):
        self.buffers, self.used = [], 0
        self.seen = {}  # copies of the current file's tensors; tensors that share memory share a copy

    def copy(self, states):
        """Return a copy of the content of a file that training does not change."""
        self.seen = {}
        return self._copied(states)

    def _copied(self, value):
        if torch.is_tensor(value):
            return self._on_host(value.detach())
        if isinstance(value, dict):
            copied = copy.copy(value)
            copied.update({key: self._copied(entry) for key, entry in value.items()})
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copied(entry) for entry in value)
        return copy.deepcopy(value)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or not tensor.numel():
            return tensor.to("cpu", copy=True)
        identity = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if identity not in self.seen:
            self.seen[identity] = self._buffer(tensor).copy_(tensor, non_blocking=True)
        return self.seen[identity]

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the next buffer, allocated if it does not exist or has another shape or dtype."""
        if self.used == len(self.buffers):
            self.buffers.append(torch.empty(0))
        buffer = self.buffers[self.used]
        if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.is_cuda and tensor.nbytes >= MIN_PINNED_BYTES
            buffer = self.buffers[self.used] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        self.used += 1
        return buffer


class Collector:
    """A DeepSpeed checkpoint engine that copies the content of the files and writes it later."""

    def __init__(self, engine, copies: HostCopies):
        self.engine, self.copies = engine, copies
        self.files = []  # (content, path)

    def save(self, state_dict, path: str) -> None:
        self.files.append((self.copies.copy(state_dict), path))

    def preserves_storage_sharing(self) -> bool:
        """Return False: everything is copied here, so DeepSpeed need not clone the views that it saves."""
        return False

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def write(self) -> None:
        """Write the files, as DeepSpeed would have."""
        for content, path in self.files:
            self.engine.save(content, path)


@contextlib.contextmanager
def collecting(trainer) -> Iterator[Callable[[], None]]:
    """Keep DeepSpeed from writing states in the body; yield the function that writes them later."""
    engine, copies = trainer.model_wrapped, trainer.host_copies
    copies.used = 0
    plain = engine.checkpoint_engine
    engine.checkpoint_engine = collector = Collector(plain, copies)
    try:
        yield collector.write
    finally:
        engine.checkpoint_engine = plain
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the next step changes the sources of the copies


class Writing:
    """Run a function in a thread, and keep its error for the waiting thread."""

    def __init__(self, work: Callable[[], None]):
        self.error = None
        self._work, self._thread = work, threading.Thread(target=self._run, name="zerofit-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    @property
    def ended(self) -> bool:
        """Return whether it has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
