"""Faults for tests/launch/test_retry.py: Python imports this file at its start where this folder is on PYTHONPATH.

ZEROFIT_TEST_FAULT: {"what": "oom" | "kill" | "hang" | "crash" | "disk full" | "limit", "where": a moment below,
"rank": n, "step": optimizer steps done by then, "marker": file made when it strikes, after which it does not again,
"slow": {moment: rank}, the ranks that need half a second more, each time; "chosen": gradient checkpointing that a plan
is said to have chosen, if any; "patience": seconds that a phase may take at least (base/phases.py), learned after two}
ZEROFIT_TEST_CLOCK: seconds by which the clock of this node goes ahead, as datetime tells it.
"""

import datetime
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

FAULT = json.loads(os.environ.get("ZEROFIT_TEST_FAULT", "null"))

AHEAD = float(os.environ.get("ZEROFIT_TEST_CLOCK", "0"))
MEETING = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(seconds=AHEAD)


class ClockFinder:
    """Gives the rendezvous of torch, when it is imported, a clock that goes ahead."""

    def find_spec(self, name, path=None, target=None):
        if name != MEETING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.datetime = Clock

        spec.loader.exec_module = exec_module
        return spec


if AHEAD:
    sys.meta_path.insert(0, ClockFinder())


def is_for_this_rank() -> bool:
    """Asked when it strikes: the ranks may be forks of a launcher, which has no rank."""
    return os.environ.get("RANK", "0") == str(FAULT["rank"])


def strike(trainer) -> None:
    import torch

    marker = Path(FAULT["marker"])
    if not is_for_this_rank() or trainer.state.global_step != FAULT["step"] or marker.exists():
        return
    marker.touch()
    if FAULT["what"] == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
    if FAULT["what"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT["what"] == "hang":
        time.sleep(10_000)
    if FAULT["what"] == "disk full":
        raise OSError(28, "No space left on device")
    raise RuntimeError("injected")


def limit_memory(trainer) -> None:
    """From here on this process gets FAULT["bytes"] more address space, and no more."""
    import resource

    if not is_for_this_rank():
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + FAULT["bytes"], resource.RLIM_INFINITY))


def before(owner, name: str, trainer_of, act=strike) -> None:
    plain = getattr(owner, name)

    def wrapped(self, *args, **kwargs):
        act(trainer_of(self))
        return plain(self, *args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner, name: str) -> None:
    plain = getattr(owner, name)

    def wrapped(self, *args, **kwargs):
        result = plain(self, *args, **kwargs)
        strike(self)
        return result

    setattr(owner, name, wrapped)


def dawdle_at(moment: str) -> None:
    if os.environ.get("RANK") == str(FAULT["slow"][moment]):
        time.sleep(0.5)


def dawdle(module) -> None:
    """Have ranks need half a second more, each time; and be judged after few steps."""
    import torch

    moments = (("data", module.TrainCollator, "__call__"), ("forward", torch.nn.Embedding, "forward"))
    for moment, owner, name in moments:
        before(owner, name, lambda self, moment=moment: moment, dawdle_at)
    judging = sys.modules["zerofit.base.stragglers"]
    judging.WINDOW_STEPS, judging.MIN_SLOW_WINDOWS = 2, 2


def inject(module) -> None:
    kit, where = module.ZerofitTrainer, FAULT["where"]
    if "slow" in FAULT:
        dawdle(module)
    if "patience" in FAULT:
        module.phases.MIN_SEEN_PHASES = 2
        module.phases.MIN_LIMIT_SECONDS = dict.fromkeys(module.phases.MIN_LIMIT_SECONDS, FAULT["patience"])
    if where == "forward":
        before(kit, "compute_loss", lambda self: self)
    elif where == "backward":
        after(kit, "training_step")
    elif where == "step":
        before(module.progress.Reporter, "on_step_end", lambda self: self.trainer)
    elif where == "eval":
        before(kit, "evaluation_loop", lambda self: self)
    elif where == "save":  # the model is written, the rest is not
        before(kit, "_save_rng_state", lambda self: self)
    elif where == "data":
        before(kit, "get_batch_samples", lambda self: self)
    elif where == "worker":
        plain = module.TrainCollator.__call__

        def collate(self, batch):
            import torch

            if is_for_this_rank() and torch.utils.data.get_worker_info() and not Path(FAULT["marker"]).exists():
                Path(FAULT["marker"]).touch()
                raise RuntimeError("injected")
            return plain(self, batch)

        module.TrainCollator.__call__ = collate
    elif where == "start":
        before(module.progress.Reporter, "on_train_begin", lambda self: self.trainer, limit_memory)


class Finder:
    def __init__(self, name, inject):
        self.name, self.inject = name, inject

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self.inject(module)

        spec.loader.exec_module = exec_module
        return spec


if FAULT and (loaded := sys.modules.get("zerofit.train.trainer")):  # in a fork
    inject(loaded)
elif FAULT:
    sys.meta_path.insert(0, Finder("zerofit.train.trainer", inject))
if FAULT and (chosen := FAULT.get("chosen")):

    def choose(module):
        module.for_rows = lambda *args: module.Choice(None, **chosen)

    sys.meta_path.insert(0, Finder("zerofit.plan.choice", choose))
