"""Price a run: its steps, hours, GPU hours and dollars."""

import math
from dataclasses import dataclass, replace

from zerofit.base.errors import UserError
from zerofit.data import tokens
from zerofit.plan import candidates
from zerofit.plan.candidate import Candidate


@dataclass(frozen=True)
class Run:
    """How much a job trains, and what a GPU costs."""

    rows: float | None = None  # of all epochs, None: unknown
    row_tokens: float | None = None  # the mean of a row, None: as long as --max_length
    steps: int | None = None  # of --max_steps, None: it is not given
    price: float | None = None  # dollars for an hour of one GPU

    def steps_of(self, candidate: Candidate) -> int | None:
        """Return the optimizer steps with a candidate's effective batch; None: unknown."""
        if self.steps is None and self.rows is not None:
            return max(1, math.ceil(self.rows / candidate.rows_of_a_step))
        return self.steps


def of_rows(settings, train_set) -> Run:
    """Return the run of a job with these training rows, or of --max_steps."""
    rows = None if train_set.stream is not None else settings.num_train_epochs * tokens.rows(settings, train_set)
    return Run(rows, tokens.row_tokens(settings, train_set), settings.max_steps if settings.max_steps > 0 else None)


def of_number(settings, text: str) -> Run:
    """Return the run of a job with the number of rows of `--rows`, "" for unknown, all as long as --max_length.

    Raises: UserError for what is no number of rows.
    """
    steps = settings.max_steps if settings.max_steps > 0 else None
    if not text:
        return Run(steps=steps)
    digits = text.replace(",", "").replace("_", "")
    if not digits.isdecimal() or int(digits) < 1:
        raise UserError(f"--rows {text}: must be a whole number of training rows, 1 or more, e.g. 50000.")
    return Run(settings.num_train_epochs * int(digits), steps=steps)


def step_seconds(candidate: Candidate, run: Run) -> float:
    """Return the seconds of an optimizer step with rows of their mean length."""
    setting, mean = candidate.setting, run.row_tokens
    share = mean / candidate.row_length if mean else 1.0
    if share >= 1 or setting.pp > 1 or candidate.gpu is None:
        return candidate.seconds
    real = replace(setting, tokens=max(1, round(setting.tokens * share)))
    return candidates.step_seconds(candidate.shape, real, candidate.gpu, round(mean or 1))


def of(candidate: Candidate, run: Run) -> dict[str, float | int | None]:
    """Return what a candidate costs.

    Returns: {"steps", "hours", "gpu_hours", "dollars": of the run, None where rows or price are unknown;
        "gpu_hours_of_a_billion_tokens"}.
    """
    steps, ranks = run.steps_of(candidate), candidate.setting.ranks
    hours = None if steps is None else steps * step_seconds(candidate, run) / 3600
    gpu_hours = None if hours is None else hours * ranks
    return {
        "steps": steps,
        "hours": hours,
        "gpu_hours": gpu_hours,
        "dollars": None if gpu_hours is None or run.price is None else gpu_hours * run.price,
        "gpu_hours_of_a_billion_tokens": 1e9 / candidate.tokens_per_second / 3600 * ranks,
    }


def text(candidate: Candidate, run: Run) -> str:
    """Return what a candidate costs in words."""
    price = of(candidate, run)
    if price["steps"] is None:
        each = price["gpu_hours_of_a_billion_tokens"]
        dollars = "" if run.price is None else f", ${rounded(each * run.price)}"
        return f"{rounded(each)} GPU hours for a billion tokens{dollars}; --rows=N prices a run"
    dollars = "" if run.price is None else f", ${rounded(price['dollars'])} at ${run.price:g} a GPU hour"
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
    """Return a number with two significant digits: no estimate of time is more exact."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
