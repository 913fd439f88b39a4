"""Run many recipe command lines in one launched world, for `make ledger`.

torchrun ... benchmarks/ledger_world.py cases.json

cases.json: [{"name", "recipe", "flags"}]. A case that ends with an error leaves error.txt in its folder; with several
ranks it ends the world, as the others would wait for it.
"""

import gc
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch

from zerofit import entrypoint
from zerofit.base import distributed

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    stop, distributed.stop = distributed.stop, lambda wait=True: None  # the world continues after each case
    guard, entrypoint.guard = entrypoint.guard, lambda recipe: recipe()  # errors do not end the process
    launched = {name: os.environ[name] for name in distributed.LAUNCHER_SETS if name in os.environ}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        words, streams, began = sys.argv, (sys.stdout, sys.stderr), time.time()
        folder = Path(case["flags"][case["flags"].index("--output_dir") + 1])
        sys.argv = [case["recipe"], *case["flags"]]
        os.environ.update(launched)  # one process at stage 0 needs none
        failure = None
        try:
            runpy.run_path(str(ROOT / "recipes" / f"{case['recipe']}.py"), run_name="__main__")
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            sys.argv, (sys.stdout, sys.stderr) = words, streams
        if failure:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "error.txt").write_text(failure)
            if distributed.size() > 1:
                raise SystemExit(1)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if distributed.rank() == 0:
            print(f"  {case['name']}: {time.time() - began:.0f} s{f'  ({failure})' if failure else ''}", flush=True)
    entrypoint.guard = guard
    stop()


if __name__ == "__main__":
    main()
