"""zerofit: fine-tune language models with Accelerate and DeepSpeed, and know that it fits."""

__version__ = "0.1.0"

from zerofit.base import allocator, log_filters, rank_status
from zerofit.job.recipe import Recipe as Recipe
from zerofit.model import patches

rank_status.end_with_supervisor()  # first of all: the imports take longer than a supervisor needs to die
allocator.configure()  # before anything imports torch, whichever way a process was started
log_filters.optional_packages()
patches.load_bitsandbytes_on_use()  # before peft imports it
