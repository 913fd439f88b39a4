"""zerofit: fine-tune language models with Accelerate and DeepSpeed, and know that it fits.

Importing it changes nothing in the process (programs call `base.process.begin`) and loads no library: the public names
below are imported when they are first used.
"""

__version__ = "0.2.0"

__all__ = ["Format", "OptimizerSpec", "Recipe", "Technique", "Trainer", "__version__"]

_PUBLIC = {  # name: its module and its name there
    "Format": ("zerofit.data.formats", "Format"),
    "OptimizerSpec": ("zerofit.optim.registry", "OptimizerSpec"),
    "Recipe": ("zerofit.job.recipe", "Recipe"),
    "Technique": ("zerofit.job.technique", "Technique"),
    "Trainer": ("zerofit.train.trainer", "ZerofitTrainer"),
}


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'zerofit' has no attribute {name!r}")
    import importlib  # here, so that the package's own import loads no module

    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
