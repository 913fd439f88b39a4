"""zerofit: fine-tune language models with Accelerate and DeepSpeed, and know that it fits."""

__version__ = "0.1.0"

from . import allocator, quiet

allocator.configure()  # before anything imports torch, whichever way a process was started
quiet.optional_packages()
