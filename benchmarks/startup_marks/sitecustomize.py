"""Write when a job reaches which point, for benchmarks/startup.py: Python imports this file at its start.

STARTUP_MARKS: the file for lines of `seconds name`, of the launcher and of rank 0.
"""

import functools
import importlib.util
import os
import sys
import time
from pathlib import Path

# (module, class or "", function): (point at its start or "", point at its end or "")
POINTS = {
    ("zerofit.launch.launch", "", "main"): ("launcher imported", ""),
    ("zerofit.launch.supervisor", "", "watch"): ("checked", ""),
    ("zerofit.entrypoint", "", "check_early"): ("rank began", ""),
    ("zerofit.recipe", "", "parse"): ("rank imported", ""),
    ("zerofit.recipe", "", "start_processes"): ("data read", "group opened"),
    ("zerofit.recipe", "", "open_run_folder"): ("model loaded", ""),
    ("zerofit.train.progress", "Reporter", "on_train_begin"): ("trainer built", ""),
    ("zerofit.train.progress", "Reporter", "on_step_end"): ("first step", ""),
}


def mark(name: str) -> None:
    if name and os.environ.get("RANK", "0") == "0":
        with Path(os.environ["STARTUP_MARKS"]).open("a") as file:
            file.write(f"{time.time():.3f} {name}\n")


def marked(function, before: str, after: str):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        mark(before)
        result = function(*args, **kwargs)
        mark(after)
        return result

    return wrapped


class Finder:
    def find_spec(self, name, path=None, target=None):
        points = {key[1:]: value for key, value in POINTS.items() if key[0] == name}
        if not points:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            for (owner, function), (before, after) in points.items():
                place = getattr(module, owner) if owner else module
                setattr(place, function, marked(getattr(place, function), before, after))

        spec.loader.exec_module = exec_module
        return spec


if "STARTUP_MARKS" in os.environ:
    if "RANK" in os.environ:
        mark("rank began")
    sys.meta_path.insert(0, Finder())
