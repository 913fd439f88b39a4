"""Train each case with the real trainer; count by place what would make the host wait for a GPU in one of its steps.

    torchrun --nproc_per_node 2 tests/train/waits_ranks.py '{"name": ["sft", ["--zero", "3", ...]], ...}'

Started by test_waits.py; rank 0 prints a line of JSON: {name: {place: count}}. Counted are the operations of torch that
read a value or whose size depends on one, `Tensor.cpu`, `Tensor.tolist`, and `synchronize` of DeepSpeed's accelerator,
of its streams and of its events. DeepSpeed takes the CPU for a device with streams, as a GPU is; these do nothing here.

Not seen: a copy to the host by `Tensor.to` or `Tensor.copy_`, which looks like one to the device here; what waits below
Python (NCCL, the allocator, a copy from memory that is not pinned); what runs only where torch sees a GPU, such as
torch.cuda.synchronize.
"""

import contextlib
import json
import os
import runpy
import sys
import traceback
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from zerofit import entrypoint
from zerofit.base import distributed
from zerofit.train import trainer as train_trainer

ROOT = Path(__file__).resolve().parents[2]
STEP = 5  # the trace of ZeRO-3 is complete, and the checks of the first steps are over

ATEN = torch.ops.aten
READS = {ATEN._local_scalar_dense.default, ATEN.nonzero.default, ATEN.masked_select.default, ATEN.equal.default}


def place() -> str:
    """Return the innermost function of a library or of the kit that is being called, file:name."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}"


class Stream:
    """A stream or an event of a device, of which there is one order; DeepSpeed's calls of `synchronize` are counted."""

    def __init__(self, *args, **kwargs):
        pass

    def synchronize(self):
        pass

    record = wait = wait_event = wait_stream = lambda self, *args: None
    query = lambda self: True  # noqa: E731


def with_streams() -> None:
    """Let DeepSpeed take the CPU for a device that computes while the host goes on."""
    current = Stream()
    CPU_Accelerator.is_synchronized_device = lambda self: False
    CPU_Accelerator.Stream = CPU_Accelerator.Event = property(lambda self: Stream)
    CPU_Accelerator.stream = lambda self, stream: contextlib.nullcontext()
    CPU_Accelerator.current_stream = CPU_Accelerator.default_stream = lambda self, device_index=None: current
    torch.Tensor.record_stream = lambda self, stream: None


# (owner, name) of what has the host wait, and is no operation.
CALLS = (
    (torch.Tensor, "cpu"),
    (torch.Tensor, "tolist"),
    (CPU_Accelerator, "synchronize"),
    (Stream, "synchronize"),
)


class Waits(TorchDispatchMode):
    """Count the operations and the calls that make the host wait."""

    def __init__(self):
        super().__init__()
        self.found, self.calls = Counter(), contextlib.ExitStack()

    def __enter__(self):
        for owner, name in CALLS:
            self.calls.enter_context(mock.patch.object(owner, name, self.counted(getattr(owner, name))))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.calls.close()

    def counted(self, call):
        def counted_call(*args, **kwargs):
            self.found[place()] += 1
            return call(*args, **kwargs)

        return counted_call

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        by_mask = operation is ATEN.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or operation in READS:
            self.found[place()] += 1
        return operation(*args, **(kwargs or {}))


class OneStep(TrainerCallback):
    """Follow everything between two steps' beginnings."""

    def __init__(self):
        self.waits = Waits()

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == STEP - 1:
            self.waits.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == STEP:
            self.waits.__exit__(None, None, None)


def main() -> None:
    with_streams()
    found = {}
    plain = train_trainer.ZerofitTrainer.__init__

    def with_callback(self, *args):
        plain(self, *args)
        self.one_step = OneStep()
        self.add_callback(self.one_step)
        found[Path(self.args.output_dir).name] = self.one_step.waits.found

    train_trainer.ZerofitTrainer.__init__ = with_callback
    entrypoint.report = lambda told=False: None
    launched = {key: os.environ[key] for key in distributed.LAUNCHER_SETS if key in os.environ}
    stop, distributed.stop = distributed.stop, lambda wait=True: None
    for recipe, flags in json.loads(sys.argv[1]).values():
        os.environ.update(launched)
        words, sys.argv = sys.argv, [recipe, *flags]
        try:
            runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"), run_name="__main__")
        finally:
            sys.argv = words
    if distributed.rank() == 0:
        print("\nWAITS " + json.dumps(found), flush=True)
    stop()


if __name__ == "__main__":
    main()
