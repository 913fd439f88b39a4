"""Prepare a process of the kit before it imports torch."""

import contextlib
import functools
import gc
import signal
import threading

from zerofit.base import allocator, log_filters, rank_status


@functools.cache
def begin() -> None:
    """Prepare this process for training: its end, torch's allocator and the logs.

    Every program of the kit calls it first; `import zerofit` does not. Further calls, also in forks, do nothing.
    """
    rank_status.end_with_supervisor()  # first, since a supervisor may die during the imports
    allocator.configure()  # before anything imports torch
    log_filters.optional_packages()


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
