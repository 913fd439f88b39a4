"""Find what would pay beside the chosen setting: a larger effective batch, fewer GPUs."""

from dataclasses import dataclass, replace

from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.config import resolve
from zerofit.job.request import Request
from zerofit.plan import candidates, gpu_memory
from zerofit.plan.advice import accepted, cost
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.search import fits, preferred

FACTORS = (2, 4, 8)  # of the effective batch that are tried

PAYS = 1.2  # times the tokens per second from which a larger effective batch is worth a line

NEARLY_ALL = 0.9  # of the most that a larger batch gains: a smaller one that gains as much is named

MANY_TOKENS = 4_000_000  # of a step: what models of 7 to 70 billion parameters were pre-trained with

LEAST_STEPS = 30  # of a run; with fewer it learns in too few steps for a larger batch

CHEAPER = 0.75  # of the GPU hours from which half of the GPUs are worth a line


@dataclass(frozen=True)
class Advice:
    """A line of a plan, and the job that it speaks of."""

    text: str
    request: Request
    ranks: int
    faster: Candidate | None = None  # on fewer GPUs the job takes less time, so this is what to run


def advices(plan: Plan, request: Request) -> list[Advice]:
    """Return the lines on what would pay, each of a job that the kit accepts; request: as the user gave it."""
    if plan.chosen is None or plan.chosen.setting.pp > 1:
        return []
    fewer = _fewer_gpus(plan, request)
    found = [fewer] if fewer and fewer.faster else [fewer, _larger_batch(plan), _smaller_batch(plan, request)]
    return [one for one in found if one and accepted.accepts(one.request, one.ranks, plan.gpu)]


# --- a larger effective batch ---


def _larger_batch(plan: Plan) -> Advice | None:
    """Return the smallest larger effective batch that gains nearly as much as any; None if none is worth a line."""
    chosen, best = plan.chosen, {}
    assert chosen is not None
    if any(chosen.request.get(name) for name in ("gradient_accumulation_steps", "deepspeed")):
        return None  # which fix the batch
    settings = resolve.resolve(chosen.request, plan.ranks, plan.gpu)
    for factor in FACTORS:
        steps = plan.run.steps_of(replace(chosen, setting=replace(chosen.setting, micro=chosen.setting.micro * factor)))
        if plan.run.steps is None and steps is not None and steps < LEAST_STEPS:
            break
        fit = [one for one in _with_batch(plan, settings, factor) if fits(one, plan)]
        best |= {factor: preferred(fit, plan)} if fit else {}
    gains = {factor: one.tokens_per_second / chosen.tokens_per_second for factor, one in best.items()}
    most = max(gains.values(), default=0.0)
    if most < PAYS:
        return None
    factor = min(factor for factor, gain in gains.items() if gain >= max(PAYS, NEARLY_ALL * most))
    one = best[factor]
    text = (
        f"a larger batch: --effective_batch_size {one.rows_of_a_step} instead of {chosen.rows_of_a_step} trains "
        f"{gains[factor]:.1f} times as many tokens a second ({cost.rounded(one.tokens_per_second)}; micro batch "
        f"{one.setting.micro}, about {one.peak / GIB:.1f} GiB)"
    )
    return Advice(text, one.request, plan.ranks)


def _with_batch(plan: Plan, settings, factor: int) -> list[Candidate]:
    """Return the chosen setting with `factor` times its effective batch, in each micro batch that divides it."""
    chosen = plan.chosen
    assert chosen is not None
    s = chosen.setting
    larger = replace(chosen, setting=replace(s, accumulation=s.accumulation * factor))
    return candidates.varied(larger, settings, candidates.divisors(larger.setting.micro * larger.setting.accumulation))


def _smaller_batch(plan: Plan, request: Request) -> Advice | None:
    """Return a smaller effective batch where the default's steps train more tokens than those of pre-training."""
    chosen = plan.chosen
    assert chosen is not None
    rows, tokens = chosen.rows_of_a_step, chosen.rows_of_a_step * chosen.row_length
    least = chosen.setting.ranks // chosen.setting.ranks_per_row
    fewer = max(least, MANY_TOKENS // chosen.row_length // least * least)
    if tokens <= MANY_TOKENS or fewer >= rows or request.get("effective_batch_size") is not None:
        return None
    text = f"a step trains {tokens / 1e6:.1f} million tokens: --effective_batch_size {fewer} makes more steps of them"
    return Advice(text, chosen.request.drop("per_device_train_batch_size").put(effective_batch_size=fewer), plan.ranks)


# --- fewer GPUs ---


def _fewer_gpus(plan: Plan, request: Request) -> Advice | None:
    """Return half of the GPUs with the same effective batch, where the run then takes far fewer GPU hours."""
    chosen, half = plan.chosen, plan.ranks // 2
    assert chosen is not None
    if plan.ranks % 2 or (plan.ranks > plan.node and half % plan.node) or not _waits_for_others(chosen, plan):
        return None
    same = {"effective_batch_size": chosen.rows_of_a_step}
    if "offload" not in request.values:
        same["offload"] = "none"
    try:
        tried = candidates.candidates(chosen.method, request.put(**same), half, plan.gpu, node=plan.node)
    except UserError:
        return None
    limit = plan.limit + sum(plan.allowance.values())
    limit -= sum(gpu_memory.outside_allocator(plan.gpu, half, plan.node).values())
    one = preferred([one for one in tried if one.peak <= limit], plan)
    times = one.seconds / chosen.seconds if one else 0.0
    if one is None or times / 2 > CHEAPER:
        return None
    saved = ""
    if plan.run.price is not None:
        now, then = (cost.of(each, plan.run)["dollars"] for each in (chosen, one))
        saved = "" if now is None else f", ${cost.rounded(then)} instead of ${cost.rounded(now)}"
    longer = "as long" if abs(times - 1) < 0.05 else f"{times:.1f} times as long"
    text = f"fewer GPUs: {half} instead of {plan.ranks} take {longer}, with {1 - times / 2:.0%} fewer GPU hours{saved}"
    return Advice(text, one.request, half, one if times < 0.95 else None)


def _waits_for_others(chosen: Candidate, plan: Plan) -> bool:
    """Return whether half of the GPUs may be worth a look: twice the rows for each would take less than twice as long.

    That is so where links take a part of the step that does not grow with the rows, or few rows leave a GPU idle.
    """
    s = chosen.setting
    if s.accumulation > 1:
        twice = replace(s, accumulation=2 * s.accumulation)
    else:
        twice = replace(s, micro=2 * s.micro, tokens=2 * s.tokens)
    seconds = candidates.step_seconds(chosen.shape, twice, plan.gpu, chosen.row_length)
    return seconds / chosen.seconds / 2 <= CHEAPER
