"""Track the bytes alive on the device by part and phase, tensor by tensor.

Bytes are those of tensor storages, never the process's resident memory. On a CPU they are what a device without an
allocator of its own would hold; on CUDA the totals are the allocator's and the parts come from the same following, with
what the allocator holds beyond followed tensors (kernel workspaces) as `untracked`.

    with memory.Ledger(model) as ledger:      # or a KitTrainer inside `with memory.Ledger() as ledger:`
        ...
    ledger.peak     # {"forward": {"parameters": bytes, ..., "logits": bytes}, ...}
"""

import functools
import resource
import sys
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import TrainerCallback

from zerofit.train import tensor_owners

PHASES = ("load", "forward", "backward", "step", "save", "eval")

FOLLOWED_STEPS = 3  # the first has no optimizer state yet, the second no ZeRO-3 trace; each Python call an operation


# How sure a label is: by the phase, by the shape or operation, by the object that owns the tensor.
_GUESS, _SEEN, _OWNED = 0, 1, 2

_NEW_IN = {"load": "buffers", "step": "buffers", "save": "buffers"}  # elsewhere: activations


_open: "MemoryTracker | None" = None


class _Storage:
    """One block of memory: bytes, the part it belongs to, and how sure that is. Kept in peaks after it has died."""

    __slots__ = ("bytes", "part", "sure")

    def __init__(self, size: int, part: str, sure: int):
        self.bytes, self.part, self.sure = size, part, sure


class Watch(TorchDispatchMode):
    """Shows the ledger every tensor that an operation returns."""

    def __init__(self, ledger: "MemoryTracker"):
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if operation.namespace == "c10d":  # buckets and gathered shards: what a collective reads or writes
            for value in tree_iter((args, kwargs, out)):
                if isinstance(value, torch.Tensor):
                    self.ledger.see(value, "buffers", _SEEN)
        elif isinstance(out, torch.Tensor):
            self.ledger.see(out)
        elif isinstance(out, (tuple, list)):
            for value in tree_iter(out):
                if isinstance(value, torch.Tensor):
                    self.ledger.see(value)
        return out


class MemoryTracker:
    """Peak bytes by phase and part. A context manager; what runs inside is followed.

    Args:
        model: its parameters are known from the start; a KitTrainer built inside brings its own.
        optimizer: torch's, accelerate's or DeepSpeed's; a KitTrainer brings its own.
        limit: bytes; more of them alive at once raise torch.OutOfMemoryError, as an allocator of that size would.
        round_to: bytes that a block is rounded up to; 512 is what the CUDA allocator does.
    Attributes: phase, the running one (a caller without KitTrainer sets it with `enter`); device, "cpu" or "cuda";
        model_states, bytes of parameters, gradients and optimizer at two moments of the last followed step:
        "last_gradient", when the backward has computed all of them, and "before_step", when they are reduced.
    """

    def __init__(
        self, model=None, optimizer=None, round_to: int = 1, device: str | None = None, limit: int | None = None
    ):
        self.model, self.optimizer, self.round_to = None, optimizer, round_to
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.phase, self.steps, self.following = "load", 0, False
        self.model_states: dict[str, dict[str, int]] = {}
        self.allocator_peak: dict[str, int] = {}
        self._table: dict[int, _Storage] = {}
        self.limit, self.highest, self.largest = limit, 0, 0  # bytes: alive at most, and of the largest block
        self._live, self._vocabulary, self._snapshot_due = 0, None, False
        self._best: dict[tuple[str, int], tuple[int, list[_Storage]]] = {}  # (phase, step) -> bytes, what was alive
        self._watch, self._hooks, self._gradient_hooks, self._once = None, [], [], set()
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

    # --- what is alive ---

    def see(self, tensor: torch.Tensor, part: str | None = None, sure: int = _GUESS) -> None:
        """Count the tensor's storage from now until it dies, or say better what it is."""
        if tensor.device.type != self.device:
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, functorch: no storage to follow
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
            loading = self.model is None  # before there is a model, what appears are its weights
            part = "parameters" if loading else _NEW_IN.get(self.phase, "activations")
            if part == "activations" and tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary:
                part, sure = "logits", _SEEN  # also their fp32 copy, softmax and gradient
        size = -(-size // self.round_to) * self.round_to
        self._table[key] = _Storage(size, part, sure)
        weakref.finalize(storage, self._died, key).atexit = False
        self._live += size
        self.highest, self.largest = max(self.highest, self._live), max(self.largest, size)
        if self.limit is not None and self._live > self.limit:
            raise torch.OutOfMemoryError(f"{self._live} bytes alive, the limit is {self.limit}")
        best = self._best.get((self.phase, self.steps))
        if best is None or self._live > best[0]:
            self._best[self.phase, self.steps] = (self._live, best[1] if best else [])
            self._snapshot_due = True

    def _died(self, key: int) -> None:
        self._keep_snapshot()
        storage = self._table.pop(key, None)
        if storage is not None:
            self._live -= storage.bytes

    def _keep_snapshot(self) -> None:
        """The list of a peak is only made when the next block dies or the phase ends: a rising peak costs nothing."""
        if self._snapshot_due:
            size, _ = self._best[self.phase, self.steps]
            self._best[self.phase, self.steps] = (size, list(self._table.values()))
            self._snapshot_due = False

    def label(self) -> None:
        """Say of every known object's tensors what they are; peaks already seen learn it too."""
        for part, tensors in tensor_owners.owned(self.model, self.optimizer).items():
            for tensor in tensors:
                self.see(tensor, part, _OWNED)

    def alive(self) -> dict[str, int]:
        """Bytes that are alive now, by part."""
        return tensor_owners.by_part(self._table.values())

    @property
    def peak(self) -> dict[str, dict[str, int]]:
        """{phase: {part: bytes}} where the phase's total was highest; memory offloaded to the host is not in it."""
        self._keep_snapshot()
        found: dict[str, dict[str, int]] = {}
        for (phase, _), (_, storages) in self._best.items():
            parts = tensor_owners.by_part(storages)
            if phase not in found or sum(parts.values()) > sum(found[phase].values()):
                found[phase] = parts
        if self.device == "cuda":
            for phase, total in self.allocator_peak.items():
                parts = found.setdefault(phase, dict.fromkeys(tensor_owners.PARTS, 0))
                parts["untracked"] = max(0, total - sum(parts.values()))
        return {phase: found[phase] for phase in PHASES if phase in found}

    @property
    def live_bytes(self) -> int:
        """Bytes that are alive now, of all parts."""
        return self._live

    @property
    def host(self) -> int:
        """Bytes of optimizer and parameters that are kept in host memory now (offload)."""
        return sum(s.bytes for s in self._table.values() if s.part == "host")

    # --- phases ---

    def enter(self, phase: str) -> None:
        """Begin a phase, one of PHASES."""
        self._keep_snapshot()
        if self.device == "cuda" and self.following:
            self._read_allocator()
        self.phase = phase
        if self.following and self._live > self._best.get((phase, self.steps), (0, []))[0]:
            self._best[phase, self.steps] = (self._live, list(self._table.values()))

    def _read_allocator(self) -> None:
        global _highest
        peak = torch.cuda.max_memory_allocated()
        self.allocator_peak[self.phase] = max(peak, self.allocator_peak.get(self.phase, 0))
        _highest = max(_highest, peak)
        torch.cuda.reset_peak_memory_stats()

    def _follow(self) -> None:
        if not self.following:
            self.following, self._watch = True, Watch(self)
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self._follow_model()
            self._watch.__enter__()

    def _follow_model(self) -> None:
        if self.following and self.model is not None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self._gradient_hooks = [p.register_hook(self._gradient) for p in trained]
            self.label()

    def pause(self) -> None:
        """Stop following: operations run at full speed again. Deaths are still counted."""
        if self.following:
            self.enter(self.phase)
            self._watch.__exit__(None, None, None)
            self.following, self._watch = False, None
            for hook in self._gradient_hooks:
                hook.remove()

    def _adopt(self, model) -> None:
        """Phases from the model's own calls, gradients from its parameters."""
        self.model = model
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # generate() calls this one
        self._vocabulary = getattr(getattr(inner, "config", None), "vocab_size", None)
        self._hooks += [
            inner.register_forward_pre_hook(self._before_forward),
            inner.register_forward_hook(self._after_forward),
        ]
        self._follow_model()

    def _before_forward(self, module, args) -> None:
        self.enter("forward" if module.training and torch.is_grad_enabled() else "eval")

    def _after_forward(self, module, args, output) -> None:
        if self.phase == "forward":
            self.enter("backward")

    def _gradient(self, gradient: torch.Tensor) -> None:
        self.see(gradient, "gradients", _OWNED)
        self._note_model_states("last_gradient")  # each one overwrites the one before

    def _note_model_states(self, moment: str) -> None:
        alive = self.alive()
        self.model_states[moment] = {part: alive[part] for part in ("parameters", "gradients", "optimizer")}

    # --- transformers' Trainer ---

    def attach(self, trainer) -> None:
        """Follow a Trainer's phases: it becomes part of its callbacks, its saving and its evaluation."""
        if self.model is None and not trainer.args.torch_compile:  # hooks would be compiled too
            self._adopt(trainer.model)
        self.enter("load")
        trainer.add_callback(_Phases(self, trainer))
        for name, phase in (("_save_checkpoint", "save"), ("save_model", "save"), ("evaluation_loop", "eval")):
            setattr(trainer, name, self._during(phase, getattr(trainer, name)))

    def _during(self, phase: str, call):
        """`call`, followed the first time that it runs when this ledger is in use at all."""

        @functools.wraps(call)
        def run(*args, **kwargs):
            before, paused = self.phase, not self.following
            if paused and _open is self and phase not in self._once:
                self._follow()
            self._once.add(phase)
            self.enter(phase)
            try:
                return call(*args, **kwargs)
            finally:
                self.enter(before)
                if paused:
                    self.pause()

        return run

    def before_step(self) -> None:
        """Between the last backward and the optimizer's step."""
        if self.following:
            if self.device == "cpu" and torch.distributed.is_initialized():
                time.sleep(0.1)  # gloo's thread holds the last reduced tensors for a moment after the wait for them
            self.label()
            self._note_model_states("before_step")
        self.enter("step")

    def after_step(self) -> None:
        if self.following:
            self.label()
            self._keep_snapshot()
            for storage in list(self._table.values()):  # what outlives a step was no activation
                if storage.part in ("activations", "logits"):
                    storage.part, storage.sure = "buffers", _SEEN
            self.steps += 1
        self.enter("forward")
        if self.steps >= FOLLOWED_STEPS:
            self.pause()


class _Phases(TrainerCallback):
    """Where a Trainer's step begins and ends."""

    def __init__(self, ledger: MemoryTracker, trainer):
        self.ledger, self.trainer = ledger, trainer

    def on_train_begin(self, args, state, control, **kwargs):
        ledger, trainer = self.ledger, self.trainer
        ledger.optimizer = trainer.optimizer
        if ledger.following:
            ledger.label()
        engine = trainer.model_wrapped
        if trainer.is_deepspeed_enabled:  # accelerate's backward() makes the step too
            step = engine.step

            def followed(*args, **kwargs):
                if engine.is_gradient_accumulation_boundary():
                    ledger.before_step()
                return step(*args, **kwargs)

            engine.step = followed
        ledger.pause()  # what generates before the first step is no part of the report

    def on_step_begin(self, args, state, control, **kwargs):
        if self.ledger is _open and self.ledger.steps < FOLLOWED_STEPS:
            self.ledger._follow()
        self.ledger.enter("forward")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.trainer.is_deepspeed_enabled:
            self.ledger.before_step()

    def on_step_end(self, args, state, control, **kwargs):
        self.ledger.after_step()


def current() -> MemoryTracker:
    """The ledger whose `with` block runs, or one that only knows phases."""
    return _open or MemoryTracker()


_highest = 0


def highest_before_resets() -> int:
    """torch.cuda.max_memory_allocated of the time before a ledger reset it, in bytes."""
    return _highest


def peak_memory_bytes(args) -> int:
    """Highest of all ranks: torch.cuda.max_memory_allocated, on a CPU the process's peak resident memory."""
    if args.device.type == "cuda":
        peak = max(torch.cuda.max_memory_allocated(), highest_before_resets())
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    value = torch.tensor(peak, dtype=torch.long, device=args.device)
    if args.world_size > 1:
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return int(value)
