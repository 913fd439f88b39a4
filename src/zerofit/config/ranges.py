"""Which numbers an argument takes: its range stands beside its type, as in `lr: Annotated[float, ABOVE_0]`."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, get_args, get_type_hints

from zerofit.base.errors import UserError
from zerofit.job import groups

LARGEST = 2**32 - 1  # of a whole number: what numpy takes as a seed, and more than any count of a job


class Range(NamedTuple):
    """The numbers that an argument takes."""

    words: str  # what a number must be
    allows: Callable[[float], bool]


FINITE = Range("finite", lambda n: True)
FROM_0, FROM_1 = Range("0 or more", lambda n: n >= 0), Range("1 or more", lambda n: n >= 1)
FROM_8, ABOVE_0 = Range("8 or more", lambda n: n >= 8), Range("above 0", lambda n: n > 0)
BELOW_1 = Range("at least 0 and below 1", lambda n: 0 <= n < 1)
BELOW_HALF = Range("at least 0 and below 0.5", lambda n: 0 <= n < 0.5)
SHARE = Range("from 0 to 1", lambda n: 0 <= n <= 1)
STEPS = Range("a whole number of steps, or below 1 a share of all steps", lambda n: n >= 0 and (n < 1 or n == int(n)))

# transformers' argument -> its range. tests/config/test_parse.py: every argument that takes a number has one.
OF_TRANSFORMERS = {
    "per_device_train_batch_size": FROM_1, "per_device_eval_batch_size": FROM_1, "gradient_accumulation_steps": FROM_1,
    "local_rank": Range("-1 or more", lambda n: n >= -1), "dataloader_num_workers": FROM_0,
    "dataloader_prefetch_factor": FROM_1, "seed": FROM_0, "data_seed": FROM_0, "num_train_epochs": ABOVE_0,
    "max_steps": Range("1 or more, or -1 to go by --num_train_epochs", lambda n: n >= 1 or n == -1),
    "learning_rate": FROM_0, "weight_decay": FROM_0,  # a rate of 0 does everything but change the weights
    "warmup_steps": STEPS, "logging_steps": STEPS, "eval_steps": STEPS, "save_steps": STEPS, "eval_delay": FROM_0,
    "adam_beta1": BELOW_1, "adam_beta2": BELOW_1, "adam_epsilon": ABOVE_0,  # 0 divides 0 by 0 where no gradient comes
    "max_grad_norm": FROM_0,  # 0 clips nothing, in transformers' loop and in DeepSpeed's engine
    "label_smoothing_factor": BELOW_1, "neftune_noise_alpha": FROM_0, "torch_empty_cache_steps": FROM_1,
    "save_total_limit": FROM_0, "eval_accumulation_steps": FINITE, "ddp_timeout": FROM_1, "ddp_bucket_cap_mb": FROM_1,
}  # fmt: skip


@functools.cache
def of(kinds: tuple[type, ...]) -> dict[str, Range]:
    """Return the ranges of transformers' arguments, and those in the annotations of dataclasses of arguments."""
    ranges = dict(OF_TRANSFORMERS)
    for kind in kinds:
        for name, hint in get_type_hints(kind, include_extras=True).items():
            ranges.update((name, one) for one in get_args(hint) if isinstance(one, Range))
    return ranges


def check(name: str, value, said: str, kinds: tuple[type, ...]) -> None:
    """Raise UserError for a number outside the range of its argument.

    Args: said: what the user wrote, and where; kinds: the dataclasses of the recipe's arguments.
    """
    ranges = dict.fromkeys(groups.flags(), FROM_1) | of(kinds)  # ways to share a row among ranks
    if name not in ranges or isinstance(value, bool) or not isinstance(value, int | float):
        return
    words, is_allowed = ranges[name]
    if not is_finite(value):
        raise UserError(f"{said}: it must be a finite number.")
    if not is_allowed(value):
        raise UserError(f"{said}: it must be {words}.")
    if isinstance(value, int) and value > LARGEST:
        raise UserError(f"{said}: it must be {LARGEST} or less.")


def is_finite(value) -> bool:
    """Return whether all numbers in a JSON value are finite."""
    if isinstance(value, dict | list):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)
