"""Prepare the process of a program of the kit, before it imports torch."""

import contextlib
import functools
import importlib
import importlib.util
import signal
import sys
import threading
import types

from zerofit.base import allocator, log_filters, rank_status


@functools.cache
def begin() -> None:
    """Prepare this process for training: its end, torch's allocator, the logs and the import of bitsandbytes.

    Every program of the kit calls it first of all; further calls, and calls in forks, do nothing. `import zerofit` does
    not call it.
    """
    rank_status.end_with_supervisor()  # first of all: the imports take longer than a supervisor needs to die
    allocator.configure()  # before anything imports torch, whichever way a process was started
    log_filters.optional_packages()
    load_bitsandbytes_on_use()  # before peft imports it


@contextlib.contextmanager
def time_limit(seconds: float):
    """Context of work that raises TimeoutError after so many seconds of processor time, in the main thread.

    Python looks for it between bytecodes and in regular expressions, which may take longer than the universe is old.
    """

    def stop(*_):
        raise TimeoutError(f"it was not done after {seconds:g} seconds")

    if threading.current_thread() is not threading.main_thread():  # Python runs signal handlers only there
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1)  # again: an error in a destructor is lost
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def load_bitsandbytes_on_use() -> None:
    """Make `import bitsandbytes` (0.50.2) return a module that loads when one of its attributes is first used.

    transformers' trainer imports peft (0.21.2), and peft imports bitsandbytes, which few runs use. It calls
    torch.compile when it is imported, and with that imports torch._inductor: seconds in every process. It also
    initializes CUDA, whose state does not survive a fork (launch/standby.py).
    """
    if "bitsandbytes" in sys.modules or (spec := importlib.util.find_spec("bitsandbytes")) is None:
        return
    module, lock = importlib.util.module_from_spec(spec), threading.RLock()
    path = vars(module).pop("__path__")  # absent until loaded: `import bitsandbytes.nn` reads it, and so loads first

    def load(name: str):
        with lock:
            if "__path__" in vars(module) and name not in vars(module):  # in the middle of loading, or loaded
                raise AttributeError(f"module 'bitsandbytes' has no attribute {name!r}")
            if "__path__" not in vars(module):
                module.__path__ = path
                spec.loader.exec_module(module)
            return getattr(module, name)

    module.__getattr__ = load
    sys.modules["bitsandbytes"] = module


def load_peft_on_use() -> None:
    """Import transformers' trainer_utils (5.23) without peft (0.21.2), which it needs for `isinstance` only.

    TrainingArguments import it, and with peft all model code of transformers: 60 % of the seconds until a command line
    is parsed. In place of its two classes are some that ask peft's once peft is loaded: before, nothing is one of them.
    """
    spec = importlib.util.find_spec("peft")
    if spec is None or not {"peft", "transformers.trainer_utils"}.isdisjoint(sys.modules):
        return

    class OfPeft(type):
        def __instancecheck__(cls, model):
            return isinstance(model, getattr(sys.modules.get("peft"), cls.__name__, ()))

    classes = types.ModuleType("peft")
    classes.__spec__ = spec
    classes.PeftModel, classes.PeftMixedModel = OfPeft("PeftModel", (), {}), OfPeft("PeftMixedModel", (), {})
    sys.modules["peft"] = classes
    try:
        importlib.import_module("transformers.trainer_utils")
    finally:
        del sys.modules["peft"]
