"""Prepare the process of a program of the kit, before it imports torch."""

import contextlib
import functools
import signal
import threading

from zerofit.base import allocator, log_filters, rank_status


@functools.cache
def begin() -> None:
    """Prepare this process for training: its end, torch's allocator and the logs.

    Every program of the kit calls it first of all; further calls, and calls in forks, do nothing. `import zerofit` does
    not call it.
    """
    rank_status.end_with_supervisor()  # first of all: the imports take longer than a supervisor needs to die
    allocator.configure()  # before anything imports torch, whichever way a process was started
    log_filters.optional_packages()


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
