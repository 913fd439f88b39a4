"""zerofit: fine-tune language models with Accelerate and DeepSpeed, and know that it fits.

Importing the package does not change the process (programs call `base.process.begin`) or load libraries: the public
names below are imported on first use.
"""

__version__ = "0.2.0"

__all__ = ["Format", "OptimizerSpec", "Recipe", "Technique", "Trainer", "__version__"]

_PUBLIC = {  # name: (module, name in the module)
    "Format": ("zerofit.data.formats", "Format"),
    "OptimizerSpec": ("zerofit.optim.registry", "OptimizerSpec"),
    "Recipe": ("zerofit.job.recipe", "Recipe"),
    "Technique": ("zerofit.job.technique", "Technique"),
    "Trainer": ("zerofit.train.trainer", "ZerofitTrainer"),
}


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'zerofit' has no attribute {name!r}")  # wording: keep
    import importlib  # here, to keep the import of the package free of modules

    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
