"""Price a run: its steps, hours, GPU hours and dollars."""

import math
from dataclasses import dataclass, replace

from zerofit.base.errors import UserError
from zerofit.data import tokens
from zerofit.plan import candidates
from zerofit.plan.candidate import Candidate


@dataclass(frozen=True)
class TrainingAmount:
    """The amount of training and the price of a GPU."""

    rows: float | None = None  # rows in all epochs, None: unknown
    row_tokens: float | None = None  # mean length of a row, None: --max_length
    steps: int | None = None  # --max_steps, None if not set
    price: float | None = None  # dollars per GPU hour

    def steps_of(self, candidate: Candidate) -> int | None:
        """Return the optimizer steps at a candidate's effective batch, or None if unknown."""
        if self.steps is None and self.rows is not None:
            return max(1, math.ceil(self.rows / candidate.effective_batch))
        return self.steps


def run_of_rows(settings, train_set) -> TrainingAmount:
    """Return the run of a job with these training rows, or with --max_steps."""
    rows = None if train_set.stream is not None else settings.num_train_epochs * tokens.rows(settings, train_set)
    return TrainingAmount(
        rows, tokens.row_tokens(settings, train_set), settings.max_steps if settings.max_steps > 0 else None
    )


def run_of_number(settings, text: str) -> TrainingAmount:
    """Return the run of a job with `--rows` rows of --max_length tokens. text: the option, "" if not set.

    Raises: UserError for an invalid number.
    """
    steps = settings.max_steps if settings.max_steps > 0 else None
    if not text:
        return TrainingAmount(steps=steps)
    digits = text.replace(",", "").replace("_", "")
    if not digits.isdecimal() or int(digits) < 1:
        raise UserError(f"--rows {text}: must be a positive integer, the number of training rows, e.g. 50000.")
    return TrainingAmount(settings.num_train_epochs * int(digits), steps=steps)


def step_seconds(candidate: Candidate, run: TrainingAmount) -> float:
    """Return the seconds of an optimizer step with rows of the mean length."""
    setting, mean = candidate.setting, run.row_tokens
    share = mean / candidate.row_length if mean else 1.0
    if share >= 1 or setting.pp > 1 or candidate.gpu is None:
        return candidate.seconds
    real = replace(setting, tokens=max(1, round(setting.tokens * share)))
    return candidates.step_seconds(candidate.shape, real, candidate.gpu, round(mean or 1))


def price_run(candidate: Candidate, run: TrainingAmount) -> dict[str, float | int | None]:
    """Return the cost of a candidate.

    Returns: {"steps", "hours", "gpu_hours", "dollars": of the run, None if rows or price are unknown;
        "gpu_hours_of_a_billion_tokens"}.
    """
    steps, ranks = run.steps_of(candidate), candidate.setting.ranks
    costs = dict.fromkeys(("steps", "hours", "gpu_hours", "dollars"))
    if steps is not None:
        hours = steps * step_seconds(candidate, run) / 3600
        dollars = None if run.price is None else hours * ranks * run.price
        costs = {"steps": steps, "hours": hours, "gpu_hours": hours * ranks, "dollars": dollars}
    return costs | {"gpu_hours_of_a_billion_tokens": 1e9 / candidate.tokens_per_second / 3600 * ranks}


def text(candidate: Candidate, run: TrainingAmount) -> str:
    """Return the cost of a candidate as text."""
    price = price_run(candidate, run)
    if price["steps"] is None:
        each = price["gpu_hours_of_a_billion_tokens"]
        dollars = "" if run.price is None else f", ${rounded(each * run.price)}"
        return f"{rounded(each)} GPU hours per billion tokens{dollars}; for the cost of a run, set --rows=N"
    dollars = "" if run.price is None else f", ${rounded(price['dollars'])} at ${run.price:g} per GPU hour"
    at_most = "at most " * (candidate.request.get("early_stopping_patience") is not None)
    return (
        f"{at_most}{price['steps']:,} step{'s' * (price['steps'] > 1)} in {duration(price['hours'])}: "
        f"{rounded(price['gpu_hours'])} GPU hours{dollars}"
    )


def duration(hours: float) -> str:
    """Return hours as text: "40 min", "3.5 h", "6.2 days"."""
    if hours < 1:
        return f"{max(1, round(60 * hours))} min"
    return f"{rounded(hours)} h" if hours < 72 else f"{rounded(hours / 24)} days"


def rounded(number: float) -> str:
    """Return a number with two significant digits, the accuracy of time estimates."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
