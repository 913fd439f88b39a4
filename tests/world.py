"""Run many recipe command lines in one launched world, so that start-up is paid once.

    torchrun --nproc_per_node 2 tests/world.py cases.json

cases.json: [{"recipe": "sft", "flags": [...]}, ...]. Every rank runs the real recipe file for each case; a case
that raises ends the world with its traceback.
"""

import gc
import json
import os
import runpy
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    for case in json.loads(Path(sys.argv[1]).read_text()):
        began, streams = time.time(), (sys.stdout, sys.stderr)
        sys_argv, sys.argv = sys.argv, [case["recipe"], *case["flags"]]
        try:
            runpy.run_path(str(ROOT / "recipes" / f"{case['recipe']}.py"), run_name="__main__")
        finally:
            sys.argv = sys_argv
            sys.stdout, sys.stderr = streams
        gc.collect()  # the last case's engine must not keep its configuration registered
        if os.environ["RANK"] == "0":
            print(f"case {' '.join([case['recipe'], *case['flags']])}: {time.time() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
