"""Choose among the settings of a job: by the closed forms, or by simulation if they cannot decide.

A space is a list of candidates: all settings of `make plan`, the micro batches of a launch, larger batches, half of the
GPUs. `search` makes every choice of the kit, so all commands agree.
"""

from collections.abc import Callable

from zerofit.plan import gpu_memory
from zerofit.plan.candidate import Candidate, Plan

TIE_RATIO = 1.03  # estimates within this factor of the fastest are equal: the one with the least memory is chosen

# Minimum speedup of a setting above this share of a GPU's memory over all others: near the limit, the allocator frees
# and allocates again; published runs lost up to a third of their speed (benchmarks/results/published-speeds.md).
FULL_GPU_SHARE, MIN_SPEEDUP = 0.95, 1.05

# Minimum speedup over plain settings for one that copies to host memory or shares rows or matrices between GPUs: links
# differ between machines with the same GPUs, and few published runs use them.
MIN_GAIN_OVER_PLAIN = 1.1
MAX_SIMULATIONS = 8  # per search
KIND_TOLERANCE = 0.03  # relative error of a closed form that is corrected by a simulation of the same kind

# If nothing fits, the smallest settings by formula of this many kinds are simulated, up to MAX_EXCESS times the limit:
# the closed form alone must not refuse a job.
MAX_LAST_SIMULATIONS, MAX_EXCESS = 4, 1.5
MAX_FAILURES = 2  # failed simulations after which a search runs no more

Simulate = Callable[[Candidate], None]  # stores the answer or the failure in the candidate


def search(
    space: list[Candidate],
    plan: Plan,
    simulate: Simulate,
    *,
    exact: bool = False,
    first: Candidate | None = None,
    formulas_suffice: Callable[[Candidate], bool] = lambda candidate: True,
    has_time: Callable[[], bool] = lambda: True,
) -> Candidate | None:
    """Return the candidate to run, or None if none is known to fit.

    Args: plan: GPUs and limits; exact: simulate the choice even if the closed form leaves room; first: preferred over
        faster candidates unless it does not fit by simulation; formulas_suffice: whether the closed forms may decide
        that a candidate fits; has_time: whether another simulation may start.
    """
    simulated: list[Candidate] = []
    while True:
        fit, near = _sorted_out(space, simulated, plan, formulas_suffice)
        best = first if first in fit else preferred(fit, plan)
        next_one = first if first in near else None
        if next_one is None and (best is None or best is not first):
            faster = [one for one in near if best is None or _is_worth_simulating(one, best, plan)]
            is_broken = sum(bool(one.failed) for one in simulated) >= MAX_FAILURES
            next_one = preferred(faster, plan) if len(simulated) < MAX_SIMULATIONS and not is_broken else None
            has_last_tries = len(simulated) < MAX_SIMULATIONS + MAX_LAST_SIMULATIONS and not is_broken
            if next_one is None and best is None and has_last_tries:
                next_one = _smallest(space, simulated, plan)
        if next_one is None and exact and best is not None and _is_open(best):
            next_one = best
        if next_one is None or not has_time():
            return best
        simulate(next_one)
        simulated.append(next_one)
        if next_one is first and first.failed:
            return first


def preferred(fit: list[Candidate], plan: Plan) -> Candidate | None:
    """Return the setting with the least memory among those about as fast as the fastest; None if `fit` is empty.

    A setting that is not plain must be MIN_GAIN_OVER_PLAIN times as fast as all plain ones.
    """
    groups = [one for one in fit if _is_plain(one)], [one for one in fit if not _is_plain(one)]
    best = [_leanest(group, plan) for group in groups if group]
    if len(best) == 2 and best[0].seconds <= MIN_GAIN_OVER_PLAIN * best[1].seconds:
        return best[0]
    return min(best, key=lambda one: one.seconds, default=None)


def _is_worth_simulating(one: Candidate, best: Candidate, plan: Plan) -> bool:
    """Return whether a candidate would be chosen over the best that fits, and clearly faster, if it fits too."""
    return one.seconds * MIN_SPEEDUP < best.seconds and preferred([best, one], plan) is one


def best_fit(space: list[Candidate], plan: Plan) -> Candidate | None:
    """Return the preferred candidate among those that fit by formula, or None if none fits."""
    return preferred([one for one in space if fits(one, plan)], plan)


def _is_plain(one: Candidate) -> bool:
    """Return whether a setting does not copy to host memory and does not share rows between GPUs."""
    return one.setting.offload == "none" and not one.setting.activation_offload and not one.setting.groups


def _leanest(fit: list[Candidate], plan: Plan) -> Candidate:
    def memory(one: Candidate) -> tuple:
        return ("none", "optimizer", "all").index(one.setting.offload), one.peak, one.seconds

    least = min(one.seconds for one in fit)
    best = min((one for one in fit if one.seconds <= TIE_RATIO * least), key=memory)
    if plan.share(best) > FULL_GPU_SHARE:
        roomy = [one for one in fit if one.seconds <= MIN_SPEEDUP * least and plan.share(one) <= FULL_GPU_SHARE]
        best = min(roomy, key=memory, default=best)
    return best


def fits(candidate: Candidate, plan: Plan) -> bool:
    """Return whether a candidate fits by simulation, or by the closed forms with their margin if not simulated."""
    return candidate.peak <= plan.limit and not plan.exceeds_host_memory(candidate)


def _is_open(candidate: Candidate) -> bool:
    return candidate.answer is None and not candidate.failed


def _sorted_out(space: list[Candidate], simulated: list[Candidate], plan: Plan, formulas_suffice) -> tuple[list, list]:
    """Return (candidates that fit, unsimulated candidates that may fit by the closed forms)."""
    fit, near = [], []
    for one in space:
        if plan.exceeds_host_memory(one):
            continue
        least, most = _bounds(one, simulated)
        if max(most, one.peak) <= plan.limit and (one.answer or formulas_suffice(one)):
            fit.append(one)
        elif _is_open(one) and least <= plan.limit:
            near.append(one)
    return fit, near


def _bounds(one: Candidate, simulated: list[Candidate]) -> tuple[float, float]:
    """Return bounds of a candidate's bytes from its closed form and from simulations of its kind.

    The error of the closed form is assumed proportional to its bytes or to the number of tokens.
    """
    if one.answer:
        return one.peak, one.peak
    least, most = gpu_memory.margin(one.setting.zero).low * one.by_formula, float(one.peak)
    alike = [other for other in simulated if other.answer and _kind(other) == _kind(one)]
    if alike and not one.failed:
        nearest = min(alike, key=lambda other: abs(other.setting.tokens - one.setting.tokens))
        share = nearest.peak / nearest.by_formula * one.by_formula
        missing = (nearest.peak - nearest.by_formula) / nearest.setting.tokens * one.setting.tokens
        both = share, one.by_formula + missing
        least, most = (1 - KIND_TOLERANCE) * min(both), (1 + KIND_TOLERANCE) * max(both)
    return least, most


def _kind(one: Candidate) -> tuple:
    s = one.setting
    return s.zero, s.offload, s.every, s.selective, s.activation_offload, s.tiles > 1, s.groups, one.change


def _smallest(space: list[Candidate], simulated: list[Candidate], plan: Plan) -> Candidate | None:
    """Return the smallest candidate by formula of the kinds not simulated yet, or None if all are far too large."""
    kinds = {(one.setting.zero, one.setting.offload) for one in simulated}
    remaining = [
        one for one in space
        if _is_open(one) and not plan.exceeds_host_memory(one) and one.by_formula <= MAX_EXCESS * plan.limit
        and (one.setting.zero, one.setting.offload) not in kinds
    ]  # fmt: skip
    return min(remaining, key=lambda one: one.by_formula, default=None)
