"""Silence harmless warnings of libraries. Call before importing them."""

import logging
import os
import sys
import warnings


def optional_packages() -> None:
    """Silence warnings of torchao, bitsandbytes and Liger about kernels for missing hardware.

    Most are logged at the import of transformers, so `process.begin` calls this.
    """
    for name in ("torchao", "bitsandbytes", "bitsandbytes.backends.cpu.ops", "liger_kernel.backends.registry"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant" not in record.getMessage())


def libraries() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # DeepSpeed logs at import that it uses the CPU as accelerator.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    # peft reads the deprecated attribute of a model for each adapter that it loads
    warnings.filterwarnings("ignore", message=r"`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    # peft 0.21 matches its patterns for fused experts only with modules, but applies them to parameters
    fused = r"The following (rank|alpha)_pattern keys did not match any targeted module .*\['\.\*\\\\\."
    warnings.filterwarnings("ignore", message=fused, category=RuntimeWarning)
    # the towers of an image-text model (model/image_text/towers.py) are excluded even if they are not loaded
    towers = r"You have passed exclude_modules=\(.*\)\(\\\.\.\*\)\? but no modules were excluded"
    warnings.filterwarnings("ignore", message=towers, category=UserWarning)
    warnings.filterwarnings("ignore", message=r"OMP_NUM_THREADS/MKL_NUM_THREADS unset")
    logging.getLogger("accelerate.accelerator").addFilter(
        # DeepSpeed does the accumulation; accelerate's plugin is not used.
        lambda record: "radient accumulation steps mismatch" not in record.getMessage()
    )
    logging.getLogger("transformers.trainer_utils").addFilter(lambda record: not _is_redundant(record.getMessage()))
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one per model load and checkpoint, between the step lines
    if not sys.stderr.isatty():  # in a log file, progress bars become one endless line
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when datasets is imported


def _is_redundant(message: str) -> bool:
    """Return whether a warning of transformers repeats a message or a choice of the run.

    These are a resume with another micro batch or other intervals (checkpoint/differences.py), and the special tokens
    that load_tokenizer and generation.stop_at_ends aligned.
    """
    return (
        "new PAD/BOS/EOS tokens" in message or "arguments do not match the ones in the `trainer_state.json`" in message
    )
