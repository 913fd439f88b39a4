"""How long to wait on this machine: waits of an idle one, times what a start takes now."""

import functools
import subprocess
import sys
import time

IDLE_SECONDS = 8.0  # of the start below on an idle machine with two cores


@functools.cache
def factor() -> float:
    """How many times as long as on an idle machine a start takes; 2 at least, as the load may grow."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import transformers.trainer, deepspeed, peft"], check=True)
    return max(2.0, 2 * (time.monotonic() - began) / IDLE_SECONDS)


def of(seconds: float) -> float:
    """The seconds to wait for what takes `seconds` at most on an idle machine."""
    return seconds * factor()
