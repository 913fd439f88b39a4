"""Solve effective batch = micro batch x accumulation x data ranks for the unset numbers."""

from zerofit.base.errors import UserError

DEFAULT_EFFECTIVE_BATCH_SIZE = 32

DEFAULT_MAX_MICRO_BATCH = 8

LARGEST_MICRO = 64  # most rows per micro batch that a plan tries


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


def solve(
    effective: int | None,
    micro: int | None,
    accumulation: int | None,
    ranks: int,
    max_micro: int = DEFAULT_MAX_MICRO_BATCH,
) -> tuple[int, int, int]:
    """Return (effective, micro, accumulation) with effective = micro x accumulation x ranks.

    Args: effective, micro, accumulation: in samples, None if not set; ranks: Settings.data_ranks; max_micro: the
        largest micro batch to choose. The default effective batch is about 32 samples.
    Raises: UserError for a number below 1, or numbers that do not fit together.
    """
    for name, value in (
        ("effective_batch_size", effective),
        ("per_device_train_batch_size", micro),
        ("gradient_accumulation_steps", accumulation),
    ):
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}: it must be 1 or more.")

    if effective is None:
        if micro and accumulation:
            return micro * accumulation * ranks, micro, accumulation
        # Keep the effective batch near its default; the caller prints it.
        unit = (micro or accumulation or 1) * ranks
        effective = unit * max(1, round(DEFAULT_EFFECTIVE_BATCH_SIZE / unit))

    unit = (micro or 1) * (accumulation or 1) * ranks
    if effective % unit or (micro and accumulation and effective != unit):
        parts = [f"{ranks} rank{'s' if ranks > 1 else ''}"]
        parts += [f"per_device_train_batch_size {micro}"] if micro else []
        parts += [f"gradient_accumulation_steps {accumulation}"] if accumulation else []
        if micro and accumulation:
            fix = f"use --effective_batch_size {unit}, or remove one of the three"
        else:
            below, above = effective // unit * unit, (effective // unit + 1) * unit
            fix = f"the nearest multiples are {below} and {above}" if below else f"the nearest multiple is {above}"
        raise UserError(f"--effective_batch_size {effective} is not a multiple of {' x '.join(parts)} = {unit}: {fix}.")
    per_rank = effective // ranks
    micro = micro or (per_rank // accumulation if accumulation else _largest_divisor(per_rank, max_micro))
    return effective, micro, per_rank // micro


def divisors(rows: int) -> list[int]:
    """Return the micro batch sizes that divide the rows of a rank's step."""
    return [n for n in range(1, min(rows, LARGEST_MICRO) + 1) if rows % n == 0]


def learning_rate_factor(rule: str, effective: int, base: int) -> float:
    """Return the factor that scales a learning rate from batches of `base` to `effective` samples.

    rule: none: 1; linear: effective / base (arXiv 1706.02677); sqrt: its square root (arXiv 1404.5997).
    """
    return {"none": 1.0, "linear": effective / base, "sqrt": (effective / base) ** 0.5}[rule]
