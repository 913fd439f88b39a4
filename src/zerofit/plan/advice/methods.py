"""Choose between full fine-tuning, LoRA and QLoRA for --method auto, and explain the choice."""

from dataclasses import dataclass, replace

from zerofit.base.hardware import GIB
from zerofit.job.request import Request
from zerofit.plan import candidates
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.search import best_fit

# Largest slowdown of full fine-tuning and of LoRA compared with the fastest method; the last method is unlimited. LoRA
# saves a third of the products, and half of them without recomputation: full fine-tuning cannot be faster than that.
# Unlike QLoRA, LoRA does not round the base.
MAX_SLOWDOWN_FULL, MAX_SLOWDOWN_LORA = 2.0, 1.25

# GiB of host memory per GiB of GPU memory that --method auto assumes without HOST_MEMORY. Cloud nodes have 2.1 (one
# A100) to 4, a workstation with a 24-GB card has 64 GB.
ASSUMED_HOST_PER_GPU = 2.0


@dataclass(frozen=True)
class Offer:
    """A method with its settings."""

    name: str  # value of --method
    tried: list[Candidate]  # the fastest first
    best: Candidate | None  # the best that fits by formula, or None
    max_slowdown: float  # compared with the fastest method


def best_of(tried: list[Candidate], plan: Plan) -> Candidate | None:
    """Return the preferred setting that fits by formula, if possible with enough host memory and disk space."""
    roomy = best_fit([one for one in tried if not plan.exceeds_disk(one)], plan)
    return roomy or best_fit(tried, replace(plan, host_memory_limit=None))


def is_short(one: Candidate, plan: Plan) -> bool:
    """Return whether a setting needs more host memory or disk space than the plan has."""
    return plan.exceeds_host_memory(one) or plan.exceeds_disk(one)


def seconds_per_token(one: Candidate) -> float:
    """Return the seconds per token."""
    return 1 / one.tokens_per_second


def fast_enough(offers: list[Offer], plan: Plan) -> list[tuple[str, list[Candidate]]]:
    """Return the methods in order of preference, each with its settings that are fast enough to be preferred."""
    fit = [seconds_per_token(offer.best) for offer in offers if offer.best and not is_short(offer.best, plan)]
    if not fit:
        return []
    result = []
    for offer in offers:
        limit = offer.max_slowdown * min(fit)
        fast = [one for one in offer.tried if seconds_per_token(one) <= _time_limit(one, limit, min(fit))]
        fast = [one for one in fast if not is_short(one, plan)]
        if any(one.by_formula <= plan.limit for one in fast):
            result.append((offer.name, fast))
    return result


def assumed_host_memory(plan: Plan) -> int:
    """Return the bytes of host memory per node that --method auto assumes if not set."""
    return int(ASSUMED_HOST_PER_GPU * plan.gpu.memory_gib * GIB * min(plan.ranks, plan.node))


def _time_limit(one: Candidate, limit: float, fastest: float) -> float:
    """Return the seconds per token up to which a setting is preferred.

    With weights in host memory, a setting must be as fast as the fastest: each micro batch waits for links whose speeds
    are not measured, and smaller batches wait longer.
    """
    return fastest if one.setting.offload == "all" else limit


def offers(names: list[str], request: Request, plan: Plan) -> list[Offer]:
    """Return the methods with their settings by formula. Raises: UserError if the first method allows none."""
    first, *others = names
    by_name = {first: candidates.candidates(first, request, plan.ranks, plan.gpu, node=plan.node)}
    by_name |= {name: tried for name in others if (tried := candidates.find(name, request, plan))}
    return [Offer(name, tried, best_of(tried, plan), max_slowdown(name, [*by_name])) for name, tried in by_name.items()]


def max_slowdown(name: str, names: list[str]) -> float:
    """Return the largest slowdown of a method compared with the fastest of `names`."""
    if name == names[-1]:
        return float("inf")
    return MAX_SLOWDOWN_LORA if candidates.method_of(name).takes_adapters else MAX_SLOWDOWN_FULL


def rule(plan: Plan) -> list[str]:
    """Return the line that explains the method of --method auto; [] if only one method was searched."""
    chosen, names = plan.chosen, plan.methods
    if chosen is None or len(names) == 1:
        return []
    rules = ", then ".join(f"{_title(name)} up to {max_slowdown(name, names):g} times" for name in names[:-1])
    passed = [_why_not(name, chosen, plan) for name in names[: names.index(chosen.method)]]
    why = f"; {', '.join(passed)}" if passed else ""
    return [f"auto prefers {rules} the time of the fastest, with weights on the GPU{why}"]


def _title(name: str) -> str:
    return candidates.method_of(name).title


def _why_not(name: str, chosen: Candidate, plan: Plan) -> str:
    """Return why a preferred method was not chosen."""
    one, _ = plan.alternatives.get(_title(name), (None, ""))
    if one is None:
        return f"{_title(name)} does not fit"
    if plan.exceeds_host_memory(one):
        return f"{_title(name)} needs {one.host_bytes_per_node / GIB:,.0f} GiB of host memory"
    if plan.exceeds_disk(one):
        return f"{_title(name)} needs {sum(one.saved(plan.kept)) / GIB:,.0f} GiB of disk"
    where = ", with its weights in host memory" * (one.setting.offload == "all")
    return f"{_title(name)} would take {seconds_per_token(one) / seconds_per_token(chosen):.1f} times as long{where}"
