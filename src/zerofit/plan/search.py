"""Choose among the settings of a job: by the closed forms, and by simulation where these leave it open.

A space is a list of candidates: all settings of `make plan`, the micro batches of a start, twice as large a batch, half
of the GPUs. Every choice of the kit is made by `search`, so that two of them never differ.
"""

from collections.abc import Callable

from zerofit.plan import gpu_memory
from zerofit.plan.candidate import Candidate, Plan

EQUAL = 1.03  # times the least seconds: estimates that are taken as equal, of which the least memory is chosen

# Above this share of a GPU's memory a setting is chosen only where all others take so many times as long: there the
# allocator frees and allocates again, and published runs fell up to a third behind (docs/notes/published-speeds.md).
FULL, WORTH = 0.95, 1.05

# Times as fast, by estimate, as a setting without copies to host memory and without rows or matrices shared between
# GPUs: links differ between machines with the same GPUs, and few published runs have them.
PLAIN = 1.1

MOST = 8  # simulations of a search

LIKE = 0.03  # how far the closed form of a setting is from that of a simulated one of its kind, relative to it

# Where nothing fits, the smallest settings by formula of so many kinds are simulated, if they are below HOPELESS times
# the limit: a closed form alone must not refuse a job.
LAST_TRIES, HOPELESS = 4, 1.5

FAILED = 2  # simulations after which no more is asked: what has failed twice will fail again

Ask = Callable[[Candidate], None]  # simulates a candidate: stores the answer in it, or why there is none


def search(
    space: list[Candidate],
    plan: Plan,
    ask: Ask,
    *,
    exact: bool = False,
    first: Candidate | None = None,
    is_described: Callable[[Candidate], bool] = lambda candidate: True,
    has_time: Callable[[], bool] = lambda: True,
) -> Candidate | None:
    """Return the candidate to run; None: none is known to fit.

    Args: plan: the place, with its limits; exact: whether the choice is simulated where its closed form leaves room;
        first: taken before faster ones, unless a simulation says that it does not fit; is_described: whether the closed
        forms may decide that a candidate fits; has_time: whether another simulation may begin.
    """
    simulated: list[Candidate] = []
    while True:
        fit, near = _sorted_out(space, simulated, plan, is_described)
        best = first if first in fit else preferred(fit, plan)
        asked = first if first in near else None
        if asked is None and (best is None or best is not first):
            faster = [one for one in near if best is None or one.seconds * WORTH < best.seconds]
            is_broken = sum(bool(one.failed) for one in simulated) >= FAILED
            asked = preferred(faster, plan) if len(simulated) < MOST and not is_broken else None
            if asked is None and best is None and len(simulated) < MOST + LAST_TRIES and not is_broken:
                asked = _smallest(space, simulated, plan)
        if asked is None and exact and best is not None and _is_open(best):
            asked = best
        if asked is None or not has_time():
            return best
        ask(asked)
        simulated.append(asked)
        if asked is first and first.failed:
            return first


def preferred(fit: list[Candidate], plan: Plan) -> Candidate | None:
    """Return of the settings that are about as fast as the fastest the one with the least memory; None without any.

    One that is not plain is taken where it is PLAIN times as fast as all that are.
    """
    groups = [one for one in fit if _is_plain(one)], [one for one in fit if not _is_plain(one)]
    found = [_leanest(group, plan) for group in groups if group]
    if len(found) == 2 and found[0].seconds <= PLAIN * found[1].seconds:
        return found[0]
    return min(found, key=lambda one: one.seconds, default=None)


def _is_plain(one: Candidate) -> bool:
    """Return whether a setting copies nothing to host memory and shares no rows between GPUs."""
    return one.setting.offload == "none" and not one.setting.activation_offload and not one.setting.groups


def _leanest(fit: list[Candidate], plan: Plan) -> Candidate:
    def memory(one: Candidate) -> tuple:
        return ("none", "optimizer", "all").index(one.setting.offload), one.peak, one.seconds

    least = min(one.seconds for one in fit)
    best = min((one for one in fit if one.seconds <= EQUAL * least), key=memory)
    if plan.share(best) > FULL:
        roomy = [one for one in fit if one.seconds <= WORTH * least and plan.share(one) <= FULL]
        best = min(roomy, key=memory, default=best)
    return best


def fits(candidate: Candidate, plan: Plan) -> bool:
    """Return whether a candidate fits, by simulation or else by the closed forms with their margin."""
    return candidate.peak <= plan.limit and not plan.host_is_short(candidate)


def _is_open(candidate: Candidate) -> bool:
    return candidate.answer is None and not candidate.failed


def _sorted_out(space: list[Candidate], simulated: list[Candidate], plan: Plan, is_described) -> tuple[list, list]:
    """Return (the candidates that fit, those that may fit by the closed forms and are not simulated)."""
    fit, near = [], []
    for one in space:
        if plan.host_is_short(one):
            continue
        least, most = _bounds(one, simulated)
        if max(most, one.peak) <= plan.limit and (one.answer or is_described(one)):
            fit.append(one)
        elif _is_open(one) and least <= plan.limit:
            near.append(one)
    return fit, near


def _bounds(one: Candidate, simulated: list[Candidate]) -> tuple[float, float]:
    """Return the least and the most bytes of a candidate: by its closed form, and by simulations of its kind.

    What these needed beside their closed forms is a part of them, or the same for each token.
    """
    if one.answer:
        return one.peak, one.peak
    least, most = gpu_memory.margin(one.setting.zero).low * one.by_formula, float(one.peak)
    alike = [other for other in simulated if other.answer and _kind(other) == _kind(one)]
    if alike and not one.failed:
        nearest = min(alike, key=lambda other: abs(other.setting.tokens - one.setting.tokens))
        share = nearest.peak / nearest.by_formula * one.by_formula
        lacked = (nearest.peak - nearest.by_formula) / nearest.setting.tokens * one.setting.tokens
        both = share, one.by_formula + lacked
        least, most = (1 - LIKE) * min(both), (1 + LIKE) * max(both)
    return least, most


def _kind(one: Candidate) -> tuple:
    s = one.setting
    return s.zero, s.offload, s.every, s.selective, s.activation_offload, s.tiles > 1, s.groups, one.change


def _smallest(space: list[Candidate], simulated: list[Candidate], plan: Plan) -> Candidate | None:
    """Return the smallest candidate by formula of the kinds that no simulation has answered; None: all are hopeless."""
    kinds = {(one.setting.zero, one.setting.offload) for one in simulated}
    left = [
        one for one in space
        if _is_open(one) and not plan.host_is_short(one) and one.by_formula <= HOPELESS * plan.limit
        and (one.setting.zero, one.setting.offload) not in kinds
    ]  # fmt: skip
    return min(left, key=lambda one: one.by_formula, default=None)
