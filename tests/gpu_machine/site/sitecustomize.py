"""Change torch right after its import where GPU_MACHINE names a machine; Python imports this file at its start."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOOKS = {
    "torch": lambda cuda, torch: cuda.install(),
    "torch.utils.cpp_extension": lambda cuda, module: cuda.set_toolkit(module),
} | (
    {"zerofit.recipe": lambda cuda, module: cuda.end_with_settings(module)}
    if "GPU_MACHINE_SETTINGS" in os.environ
    else {}
)


class Finder:
    """Calls the module's function of HOOKS after the module was executed."""

    def find_spec(self, name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in HOOKS else None
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                sys.path.insert(0, str(HERE.parents[1]))
                cuda = importlib.import_module("gpu_machine.cuda")
                sys.path.remove(str(HERE.parents[1]))
                HOOKS[name](cuda, module)

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("GPU_MACHINE"):
    sys.meta_path.insert(0, Finder())
others = [entry for entry in sys.path if Path(entry).resolve() != HERE]
if hidden := importlib.machinery.PathFinder.find_spec("sitecustomize", others):  # another one that this hides
    hidden.loader.exec_module(importlib.util.module_from_spec(hidden))
