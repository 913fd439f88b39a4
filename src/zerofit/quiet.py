"""Library messages that concern no decision of the user's, turned off before the libraries load."""

import logging
import os
import sys
import warnings


def libraries() -> None:
    import torch

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else every process warns that it found nothing better
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    warnings.filterwarnings("ignore", message=r"OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    logging.getLogger("accelerate.accelerator").addFilter(
        # DeepSpeed owns the accumulation; accelerate's own plugin is not used.
        lambda record: "radient accumulation steps mismatch" not in record.getMessage()
    )
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a CPU kernel for inference that is not installed
    if not sys.stderr.isatty():  # progress bars fill a log file with one endless line
        import datasets
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        datasets.disable_progress_bars()
