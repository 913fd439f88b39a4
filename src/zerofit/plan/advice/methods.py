"""Offer --method auto full fine-tuning, LoRA and QLoRA, and say why it took one; preference.py decides."""

from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.job.request import Request
from zerofit.plan import candidates
from zerofit.plan.advice import preference
from zerofit.plan.advice.preference import Offer
from zerofit.plan.candidate import Candidate, Plan


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
    return [
        Offer(name, tried, preference.fastest_that_fits(tried, plan), worth(name, [*found]))
        for name, tried in found.items()
    ]


def worth(name: str, names: list[str]) -> float:
    """Return how many times as long as the fastest a method may take, where `names` are looked at."""
    return preference.worth(name == names[-1], candidates.method_of(name).takes_adapters)


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
    return f"{_title(name)} would take {preference.pace(one) / preference.pace(chosen):.1f} times as long{where}"
