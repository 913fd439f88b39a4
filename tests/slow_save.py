"""Run a recipe whose background save of step 4 never ends, or fails, on the last rank.

python slow_save.py hangs|fails recipes/sft.py --flags
"""

import errno
import os
import runpy
import sys
import threading
import time

from zerofit.base import distributed
from zerofit.checkpoint import save

hash_file = save.hash_file


def hash_or_fault(file, sync=False):
    in_thread = threading.current_thread() is not threading.main_thread()
    if in_thread and "checkpoint-4" in str(file) and distributed.rank() == distributed.size() - 1:
        if WHAT == "hangs":
            time.sleep(600)
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return hash_file(file, sync)


if __name__ == "__main__":
    WHAT = sys.argv.pop(1)
    save.hash_file = hash_or_fault
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
