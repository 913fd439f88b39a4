"""zerofit: fine-tune language models with Accelerate and DeepSpeed, and know that it fits."""

__version__ = "0.1.0"

from . import quiet

quiet.optional_packages()
