"""Train each case with the real trainer; count by place what would make the host wait for a GPU in one of its steps.

    torchrun --nproc_per_node 2 tests/train/waits_ranks.py '{"name": ["sft", ["--zero", "3", ...]], ...}'

Started by test_waits.py; rank 0 prints a line of JSON: {name: {place: count}}.
"""

import json
import os
import runpy
import sys
import traceback
from collections import Counter
from pathlib import Path

import torch
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


class Waits(TorchDispatchMode):
    """Count the operations that read a value, or whose size depends on one."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

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
