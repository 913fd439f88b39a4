"""Prepare the process of a program of the kit, before it imports torch."""

import functools

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
