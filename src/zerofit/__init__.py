"""zerofit: fine-tune language models with Accelerate and DeepSpeed, and know that it fits."""

__version__ = "0.1.0"

from . import allocator, failure, quiet

failure.end_with_supervisor()  # first of all: the imports take longer than a supervisor needs to die
allocator.configure()  # before anything imports torch, whichever way a process was started
quiet.optional_packages()
