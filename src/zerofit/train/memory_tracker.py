"""Track the live bytes on the device by part and phase, tensor by tensor.

Counts tensor storages, never the process's resident memory. On a CPU, the totals exclude allocator overhead. On CUDA,
the totals are the allocator's, the parts are tracked in the same way, and the difference (kernel workspaces) is
`untracked`.

    with MemoryTracker(model) as tracker:      # or build a ZerofitTrainer inside `with MemoryTracker() as tracker:`
        ...
    tracker.peak     # {"forward": {"parameters": bytes, ..., "logits": bytes}, ...}
"""

import contextlib
import resource
import sys
import time
import weakref
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import TrainerCallback

from zerofit.base import allocator, distributed
from zerofit.job import run_folder
from zerofit.train import tensor_owners

PHASES = ("load", "forward", "backward", "step", "save", "eval")

FOLLOWED_STEPS = 3  # step 1 lacks optimizer states, step 2 the ZeRO-3 trace; a tracked operation is a Python call


# Certainty of a label: guessed from the phase, inferred from shape or operation, known from the tensor's owner.
_GUESSED, _INFERRED, _OWNED = 0, 1, 2

# Label of new tensors by phase; "activations" in the others.
_NEW_IN = {"load": "buffers", "step": "buffers", "save": "buffers"}


_open: "MemoryTracker | None" = None


class _Storage:
    """A memory block: bytes, part, and certainty of the part. Peaks keep it after it is freed."""

    __slots__ = ("bytes", "part", "sure")

    def __init__(self, size: int, part: str, sure: int):
        self.bytes, self.part, self.sure = size, part, sure


class Watch(TorchDispatchMode):
    """Pass every tensor that an operation returns to the memory tracker."""

    def __init__(self, tracker: "MemoryTracker"):
        super().__init__()
        self.tracker = tracker

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        if operation.namespace == "c10d":
            self.tracker.see_collective(args, kwargs, output)
        else:
            self.tracker.see_output(output)
        return output


class MemoryTracker:
    """Record the peak bytes of the `with` block by phase and part.

    Args:
        model: its parameters are labeled from the start; a ZerofitTrainer built inside provides its own model.
        optimizer: torch's, accelerate's or DeepSpeed's; a ZerofitTrainer provides its own.
        limit: live bytes above which torch.OutOfMemoryError is raised, as by an allocator of that size.
        round_to: block sizes are rounded up to a multiple of it; 512 in the CUDA allocator.
        keep_events: record every allocation and release in `events`, in order.
        followed_steps: optimizer steps of a ZerofitTrainer after which tracking stops.
    Attributes: phase, the current one (set with `enter` without a ZerofitTrainer); failed_in, the phase of `during`
        that an error has ended, else ""; device, "cpu" or "cuda"; model_states, bytes of parameters, gradients and
        optimizer at two moments of the last tracked step: "last_gradient", after the backward has computed all
        gradients, and "before_step", after they are reduced.
    """

    def __init__(
        self, model=None, optimizer=None, round_to: int = 1, device: str | None = None, limit: int | None = None,
        keep_events: bool = False, followed_steps: int = FOLLOWED_STEPS,
    ):  # fmt: skip
        self.model, self.optimizer, self.round_to = None, optimizer, round_to
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.phase, self.steps, self.following = "load", 0, False
        self.failed_in = ""
        self.model_states: dict[str, dict[str, int]] = {}
        self.allocator_peak: dict[str, int] = {}
        self._table: dict[int, _Storage] = {}
        self.limit, self.highest, self.largest = limit, 0, 0  # bytes: highest total, largest block
        self.live_bytes = 0  # current total of all parts
        self._vocabulary, self._snapshot_due = None, False
        self._best: dict[tuple[str, int], tuple[int, list[_Storage]]] = {}  # (phase, step) -> bytes, storages alive
        self._watch, self._hooks, self._gradient_hooks, self._once = None, [], [], set()
        self.events: list[tuple] | None = [] if keep_events else None  # (key, bytes, stream); 0 bytes: released
        self.stream, self.followed_steps = 0, followed_steps  # stream of new tensors
        self.watch = Watch  # returns a context that passes new tensors to the tracker
        if model is not None:
            self._adopt(model)

    def __enter__(self) -> "MemoryTracker":
        global _open
        _open = self
        self._follow()
        return self

    def __exit__(self, *error) -> None:
        global _open
        self.pause()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _open = None

    # --- live tensors ---

    def see_output(self, output) -> None:
        """Count the storages of the outputs of an operation."""
        if isinstance(output, torch.Tensor):
            self.see(output)
        elif isinstance(output, (tuple, list)):
            for value in tree_iter(output):
                if isinstance(value, torch.Tensor):
                    self.see(value)

    def see_collective(self, args, kwargs, output) -> None:
        """Count the inputs and outputs of a collective: buckets and gathered shards."""
        for value in tree_iter((args, kwargs, output)):
            if isinstance(value, torch.Tensor):
                self.see(value, "buffers", _INFERRED)

    def see(self, tensor: torch.Tensor, part: str | None = None, sure: int = _GUESSED) -> None:
        """Count the tensor's storage until it is freed, if it is on the tracked device (see `count`)."""
        if tensor.device.type == self.device:
            self.count(tensor, part, sure)

    def count(self, tensor: torch.Tensor, part: str | None = None, sure: int = _GUESSED) -> None:
        """Count the tensor's storage until it is freed; relabel a known one if the new label is more certain."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and functorch tensors lack a storage
            return
        key, size = storage._cdata, storage.nbytes()
        known = self._table.get(key)
        if known is not None:
            if part is not None and sure > known.sure:
                known.part, known.sure = part, sure
            return
        if not size:
            return
        if part is None:
            loading = self.model is None  # new tensors are weights until the model exists
            part = "parameters" if loading else _NEW_IN.get(self.phase, "activations")
            if part == "activations" and tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary:
                part, sure = "logits", _INFERRED  # including their fp32 copy, softmax and gradient
        size = -(-size // self.round_to) * self.round_to
        self._table[key] = _Storage(size, part, sure)
        weakref.finalize(storage, self._died, key).atexit = False
        if self.events is not None:
            self.events.append((key, size, self.stream))
        self.live_bytes += size
        self.highest, self.largest = max(self.highest, self.live_bytes), max(self.largest, size)
        if self.limit is not None and self.live_bytes > self.limit:
            raise torch.OutOfMemoryError(f"{self.live_bytes} bytes alive, the limit is {self.limit}")
        best = self._best.get((self.phase, self.steps))
        if best is None or self.live_bytes > best[0]:
            self._best[self.phase, self.steps] = (self.live_bytes, best[1] if best else [])
            self._snapshot_due = True

    def _died(self, key: int) -> None:
        self._keep_snapshot()
        storage = self._table.pop(key, None)
        if storage is not None:
            self.live_bytes -= storage.bytes
            if self.events is not None:
                self.events.append((key, 0, 0))

    def _keep_snapshot(self) -> None:
        """Record a peak's storages, only when one is freed or the phase ends: a rising peak costs nothing."""
        if self._snapshot_due:
            size, _ = self._best[self.phase, self.steps]
            self._best[self.phase, self.steps] = (size, list(self._table.values()))
            self._snapshot_due = False

    def label(self) -> None:
        """Label the tensors of the model and the optimizer, including tensors in recorded peaks."""
        for part, tensors in tensor_owners.owned(self.model, self.optimizer).items():
            for tensor in tensors:
                self.see(tensor, part, _OWNED)

    def alive(self) -> dict[str, int]:
        """Return the live bytes by part."""
        return tensor_owners.by_part(self._table.values())

    @property
    def peak(self) -> dict[str, dict[str, int]]:
        """Return {phase: {part: bytes}} at each phase's highest total, without offloaded tensors."""
        self._keep_snapshot()
        peaks: dict[str, dict[str, int]] = {}
        for (phase, _), (_, storages) in self._best.items():
            parts = tensor_owners.by_part(storages)
            if phase not in peaks or sum(parts.values()) > sum(peaks[phase].values()):
                peaks[phase] = parts
        if self.device == "cuda":
            for phase, total in self.allocator_peak.items():
                parts = peaks.setdefault(phase, dict.fromkeys(tensor_owners.PARTS, 0))
                parts["untracked"] = max(0, total - sum(parts.values()))
        return {phase: peaks[phase] for phase in PHASES if phase in peaks}

    @property
    def host(self) -> int:
        """Return the bytes of offloaded optimizer tensors."""
        if self.device == "cuda":  # tensors in host memory are not tracked
            tensors = tensor_owners.owned(self.model, self.optimizer)["host"]
            storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
            return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return sum(s.bytes for s in self._table.values() if s.part == "host")

    # --- phases ---

    def enter(self, phase: str) -> None:
        """Begin a phase, one of PHASES."""
        global _highest
        self._keep_snapshot()
        if self.device == "cuda" and self.following:
            peak = torch.cuda.max_memory_allocated()
            self.allocator_peak[self.phase] = max(peak, self.allocator_peak.get(self.phase, 0))
            _highest = max(_highest, peak)
            torch.cuda.reset_peak_memory_stats()
        self.phase = phase
        if self.following and self.live_bytes > self._best.get((phase, self.steps), (0, []))[0]:
            self._best[phase, self.steps] = (self.live_bytes, list(self._table.values()))

    def _follow(self) -> None:
        if not self.following:
            self.following, self._watch = True, self.watch(self)
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self._follow_model()
            self._watch.__enter__()

    def _follow_model(self) -> None:
        if self.following and self.model is not None:
            trainable = [p for p in self.model.parameters() if p.requires_grad]
            self._gradient_hooks = [p.register_hook(self._gradient) for p in trainable]
            self.label()

    def pause(self) -> None:
        """Stop tracking, so that operations run at full speed; freed storages are still subtracted."""
        if self.following:
            self.enter(self.phase)
            self._watch.__exit__(None, None, None)
            self.following, self._watch = False, None
            for hook in self._gradient_hooks:
                hook.remove()

    def _adopt(self, model) -> None:
        """Register hooks on the model's forward for phases, and on its parameters for gradients."""
        self.model = model
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # generate() calls it directly
        self._vocabulary = getattr(getattr(inner, "config", None), "vocab_size", None)
        for called in dict.fromkeys((model, inner)):  # peft 0.20 calls inner.forward, which skips hooks of inner
            self._hooks.append(called.register_forward_pre_hook(self._before_forward))
            self._hooks.append(called.register_forward_hook(self._after_forward))
        self._follow_model()

    def _before_forward(self, module, args) -> None:
        self.enter("forward" if module.training and torch.is_grad_enabled() else "eval")

    def _after_forward(self, module, args, output) -> None:
        if self.phase == "forward":
            self.enter("backward")

    def _gradient(self, gradient: torch.Tensor) -> None:
        self.see(gradient, "gradients", _OWNED)
        self._note_model_states("last_gradient")  # overwritten by each gradient: the last one remains

    def _note_model_states(self, moment: str) -> None:
        alive = self.alive()
        self.model_states[moment] = {part: alive[part] for part in ("parameters", "gradients", "optimizer")}

    # --- transformers' Trainer ---

    def attach(self, trainer) -> None:
        """Track the phases of a ZerofitTrainer's steps; its save and evaluation call `during`."""
        if self.model is None and not trainer.args.torch_compile:  # which would compile the hooks
            self._adopt(trainer.model)
        self.enter("load")
        trainer.add_callback(_Phases(self, trainer))

    @contextlib.contextmanager
    def during(self, phase: str):
        """Count the body as a phase; its first run is tracked even while an open tracker is paused."""
        before, paused = self.phase, not self.following
        if paused and _open is self and phase not in self._once:
            self._follow()
        self._once.add(phase)
        self.enter(phase)
        try:
            yield
        except BaseException:
            self.failed_in = phase  # the phase ends before the error is explained
            raise
        finally:
            self.enter(before)
            if paused:
                self.pause()

    def before_step(self) -> None:
        """Label tensors and note the model states, between the last backward and the optimizer's step."""
        if self.following:
            if self.device == "cpu" and torch.distributed.is_initialized():
                time.sleep(0.1)  # gloo's thread briefly keeps the last reduced tensors after the wait
            self.label()
            self._note_model_states("before_step")
        self.enter("step")

    def after_step(self) -> None:
        if self.following:
            self.label()
            self._keep_snapshot()
            for storage in list(self._table.values()):  # an activation does not outlive its step
                if storage.part in ("activations", "logits"):
                    storage.part, storage.sure = "buffers", _INFERRED
            self.steps += 1
        self.enter("forward")
        if self.following and self.steps >= self.followed_steps:
            self.pause()
            if self.device == "cuda" and self is _open:  # turned on by memory_report.start
                torch.cuda.memory._record_memory_history(enabled=None)


class _Phases(TrainerCallback):
    """Callback that reports the start and end of a Trainer's steps to the memory tracker."""

    def __init__(self, tracker: MemoryTracker, trainer):
        self.tracker, self.trainer = tracker, trainer

    def on_train_begin(self, args, state, control, **kwargs):
        tracker, trainer = self.tracker, self.trainer
        tracker.optimizer = trainer.optimizer
        if tracker.following:
            tracker.label()
        engine = trainer.model_wrapped
        if trainer.is_deepspeed_enabled:  # accelerate's backward() also steps the engine
            step = engine.step

            def tracked_step(*args, **kwargs):
                if engine.is_gradient_accumulation_boundary():
                    tracker.before_step()
                return step(*args, **kwargs)

            engine.step = tracked_step
        tracker.pause()  # the report excludes generation before the first step (exact match)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.tracker is _open and self.tracker.steps < self.tracker.followed_steps:
            self.tracker._follow()
        self.tracker.enter("forward")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.trainer.is_deepspeed_enabled:
            self.tracker.before_step()

    def on_step_end(self, args, state, control, **kwargs):
        self.tracker.after_step()


def current() -> MemoryTracker:
    """Return the open memory tracker, or a new one that records only phases."""
    return _open or MemoryTracker()


_highest = 0  # torch.cuda.max_memory_allocated before a memory tracker reset it


def keep_outside_allocator(folder: Path) -> None:
    """Write the GPU memory outside torch's allocator to run.json, and for later plans to the cache folder.

    It includes the CUDA context, NCCL's buffers and other processes.
    """
    free, total = torch.cuda.mem_get_info()
    size = total - free - torch.cuda.memory_reserved()
    run_folder.add_to_run(folder, "outside_allocator", [size])
    allocator.record_outside_bytes(torch.cuda.get_device_name(), distributed.size(), distributed.local_size(), size)


def peak_memory_bytes(args) -> int:
    """Return the highest peak of all ranks: allocated CUDA memory, or resident memory on a CPU. Collective."""
    if args.device.type == "cuda":
        peak = max(torch.cuda.max_memory_allocated(), _highest)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    value = torch.tensor(peak, dtype=torch.long, device=args.device)
    if args.world_size > 1:
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return int(value)
