"""Decide --method auto: which of full fine-tuning, LoRA and QLoRA to take among those that fit."""

from dataclasses import dataclass

from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.job.request import Request
from zerofit.plan import candidates
from zerofit.plan.advice import worth as of_methods
from zerofit.plan.candidates import Candidate, Plan


@dataclass(frozen=True)
class Offer:
    """A method with its settings."""

    name: str  # as in --method
    tried: list[Candidate]  # the fastest first
    best: Candidate | None  # the fastest that fits by formula; None: none does


def offers(methods: list[str], request: Request, plan: Plan) -> list[Offer]:
    """Return the methods with their settings by formula. Raises: UserError if the first one has none."""
    found = []
    for name in methods:
        try:
            tried = candidates.candidates(name, request, plan.ranks, plan.gpu, node=plan.node)
        except UserError:
            if name == methods[0] or not found:
                raise
            continue  # the user's other flags do not go with it
        found.append(Offer(name, tried, _fastest_that_fits(tried, plan)))
    return found


def _fastest_that_fits(tried: list[Candidate], plan: Plan) -> Candidate | None:
    """Return the fastest that fits the GPU by formula, rather one for which there is host memory and disk too."""
    fit = [one for one in tried if one.peak <= plan.limit]
    return next((one for one in fit if not _is_short(one, plan)), fit[0] if fit else None)


def _is_short(one: Candidate, plan: Plan) -> bool:
    return plan.host_is_short(one) or plan.disk_is_short(one)


def pace(one: Candidate) -> float:
    """Return the seconds of a token."""
    return 1 / one.tokens_per_second


def worth(name: str, names: list[str]) -> float:
    """Return how many times as long as the fastest a method may take, where `names` are looked at."""
    return of_methods.worth(names.index(name), len(names), candidates.method_of(name).takes_adapters)


def near(found: list[Offer], plan: Plan) -> list[tuple[str, list[Candidate]]]:
    """Return the methods in order of preference, each with the settings that are fast enough to be preferred."""
    fit = [pace(offer.best) for offer in found if offer.best and not _is_short(offer.best, plan)]
    if not fit:
        return []
    result = []
    names = [offer.name for offer in found]
    for offer in found:
        times = worth(offer.name, names)
        near_enough = (p for p in offer.tried if pace(p) <= of_methods.most(min(fit), times, p.setting.offload))
        fast = [one for one in near_enough if not _is_short(one, plan)]
        if any(one.by_formula <= plan.limit for one in fast):
            result.append((offer.name, fast))
    return result


def rule(plan: Plan) -> list[str]:
    """Return the line that says why --method auto has taken its method; none where no several were searched."""
    chosen, names = plan.chosen, plan.methods
    if chosen is None or len(names) == 1:
        return []
    said = ", then ".join(f"{_title(name)} up to {worth(name, names):g} times" for name in names[:-1])
    passed = [_passed(name, chosen, plan) for name in names[: names.index(chosen.method)]]
    why = f"; {', '.join(passed)}" if passed else ""
    return [f"auto prefers {said} the time of the fastest, with weights on the GPU{why}"]


def _title(name: str) -> str:
    return candidates.method_of(name).title


def _passed(name: str, chosen: Candidate, plan: Plan) -> str:
    """Return why a preferred method was not taken."""
    one, _ = plan.instead.get(_title(name), (None, ""))
    if one is None:
        return f"{_title(name)} does not fit"
    if plan.host_is_short(one):
        return f"{_title(name)} needs {one.host_of_a_node / GIB:,.0f} GiB of host memory"
    if plan.disk_is_short(one):
        return f"{_title(name)} needs more disk than is free"
    where = ", with its weights in host memory" * (one.setting.offload == "all")
    return f"{_title(name)} would take {pace(one) / pace(chosen):.1f} times as long{where}"
