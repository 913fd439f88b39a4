"""Prepare a process of the kit before it imports torch."""

import atexit
import contextlib
import functools
import gc
import os
import signal
import sys
import threading

from zerofit.base import allocator, log_filters, rank_status


@functools.cache
def begin() -> None:
    """Prepare this process for training: its end, torch's allocator and the logs.

    Every program of the kit calls it first; `import zerofit` does not. Further calls, also in forks, do nothing.
    """
    atexit.register(_skip_collection)  # before the libraries register theirs: the first is called last
    rank_status.end_with_supervisor()  # first, since a supervisor may die during the imports
    allocator.configure()  # before anything imports torch
    log_filters.optional_packages()


def _skip_collection() -> None:
    """Skip the garbage collection at exit, which takes 1 to 3 s, and what bindings of triton 3.9 print without it.

    They (nanobind) write each function that is not released to stderr, after all of Python has ended.
    """
    gc.freeze()
    if "triton._C.libtriton" in sys.modules:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextlib.contextmanager
def importing():
    """Import libraries in the body without garbage collections, which would take a fifth of its processor time.

    Later collections skip the libraries' objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def time_limit(seconds: float):
    """Context that raises TimeoutError after this many seconds of processor time in the main thread.

    Python checks for it between bytecodes and in regular expressions, which can take practically forever.
    """

    def stop(*_):
        raise TimeoutError(f"it did not finish within {seconds:g} seconds")

    if threading.current_thread() is not threading.main_thread():  # Python runs signal handlers only there
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1)  # repeated, since an error in a destructor is lost
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
