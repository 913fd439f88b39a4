"""Offer --method auto full fine-tuning, LoRA and QLoRA, decide between those that fit, and say why it took one."""

from dataclasses import dataclass

from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.job.request import Request
from zerofit.plan import candidates
from zerofit.plan.candidate import Candidate, Plan

# How many times as long as the fastest method a step may take, of the first method (all weights) and of the others but
# the last (an adapter on whole weights). LoRA saves a third of the products, and half of them where it needs no
# recomputation: up to that, full fine-tuning is as fast as it can be. LoRA has no rounding of the base.
WORTH_FIRST, WORTH_NEXT = 2.0, 1.25

# GiB of host memory for each GiB of a node's GPUs that --method auto counts on where HOST_MEMORY is not known. Nodes of
# clouds have 2.1 (one A100) to 4, a workstation with a 24-GB card 64 GB.
HOST_OF_GPU = 2.0


@dataclass(frozen=True)
class Offer:
    """A method with its settings."""

    name: str  # as in --method
    tried: list[Candidate]  # the fastest first
    best: Candidate | None  # the fastest that fits by formula; None: none does
    worth: float  # how many times as long as the fastest it may take


def fastest_that_fits(tried: list[Candidate], plan: Plan) -> Candidate | None:
    """Return the fastest that fits the GPU by formula, rather one for which there is host memory and disk too."""
    fit = [one for one in tried if one.peak <= plan.limit]
    return next((one for one in fit if not is_short(one, plan)), fit[0] if fit else None)


def is_short(one: Candidate, plan: Plan) -> bool:
    """Return whether a setting needs more host memory or disk than the plan counts on."""
    return plan.host_is_short(one) or plan.disk_is_short(one)


def pace(one: Candidate) -> float:
    """Return the seconds of a token."""
    return 1 / one.tokens_per_second


def near(found: list[Offer], plan: Plan) -> list[tuple[str, list[Candidate]]]:
    """Return the methods in order of preference, each with the settings that are fast enough to be preferred."""
    fit = [pace(offer.best) for offer in found if offer.best and not is_short(offer.best, plan)]
    if not fit:
        return []
    result = []
    for offer in found:
        most = offer.worth * min(fit)
        fast = [one for one in offer.tried if pace(one) <= _most(one, most, min(fit)) and not is_short(one, plan)]
        if any(one.by_formula <= plan.limit for one in fast):
            result.append((offer.name, fast))
    return result


def host_assumed(plan: Plan) -> int | None:
    """Return the bytes of host memory that --method auto counts on where nobody has told them; None: they are told."""
    if plan.host_limit is not None:
        return None
    return int(HOST_OF_GPU * plan.gpu.memory_gib * GIB * min(plan.ranks, plan.node))


def _most(one: Candidate, most: float, fastest: float) -> float:
    """Return the seconds of a token up to which a setting is preferred.

    With the weights in host memory it must be as fast as the fastest: each micro batch waits for links whose speeds no
    measurement has confirmed, and smaller batches wait longer.
    """
    return fastest if one.setting.offload == "all" else most


def offers(methods: list[str], request: Request, plan: Plan) -> list[Offer]:
    """Return the methods with their settings by formula. Raises: UserError if the first one has none."""
    found = {}
    for name in methods:
        try:
            found[name] = candidates.candidates(name, request, plan.ranks, plan.gpu, node=plan.node)
        except UserError:
            if name == methods[0] or not found:
                raise
            continue  # the user's other flags do not go with it
    return [Offer(name, tried, fastest_that_fits(tried, plan), worth(name, [*found])) for name, tried in found.items()]


def worth(name: str, names: list[str]) -> float:
    """Return how many times as long as the fastest a method may take, where `names` are looked at."""
    if name == names[-1]:
        return float("inf")
    return WORTH_NEXT if candidates.method_of(name).takes_adapters else WORTH_FIRST


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
        return f"{_title(name)} needs {sum(one.saved(plan.kept)) / GIB:,.0f} GiB of disk"
    where = ", with its weights in host memory" * (one.setting.offload == "all")
    return f"{_title(name)} would take {pace(one) / pace(chosen):.1f} times as long{where}"
