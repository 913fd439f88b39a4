"""Find changes of the chosen setting that would pay: a larger effective batch, fewer GPUs."""

from dataclasses import dataclass, replace

from zerofit.base.hardware import GIB
from zerofit.config import resolve
from zerofit.job.request import Request
from zerofit.plan import candidates, gpu_memory
from zerofit.plan.advice import cost
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.search import best_fit

FACTORS = (2, 4, 8)  # multiples of the effective batch to try
MIN_GAIN = 1.2  # gain in tokens per second from which a larger effective batch is advised
ENOUGH_OF_GAIN = 0.9  # share of the largest gain: the smallest batch with this gain is advised
MAX_STEP_TOKENS = 4_000_000  # tokens per step in pre-training of models with 7 to 70 billion parameters
MIN_STEPS = 30  # no larger batch is advised if a run would have fewer steps
MAX_COST_SHARE = 0.75  # share of the GPU hours below which half of the GPUs are advised


@dataclass(frozen=True)
class Advice:
    """A line of a plan and the job that it describes."""

    text: str
    request: Request
    ranks: int
    faster: Candidate | None = None  # set if the job is faster on fewer GPUs: run this instead


def advices(plan: Plan, request: Request) -> list[Advice]:
    """Return the advice for jobs that the kit accepts. request: the user's request."""
    if plan.chosen is None or plan.chosen.setting.pp > 1:
        return []
    fewer = _fewer_gpus(plan, request)
    options = [fewer] if fewer and fewer.faster else [fewer, _larger_batch(plan), _smaller_batch(plan, request)]
    return [one for one in options if one and candidates.accepts(one.request, one.ranks, plan.gpu)]


# --- a larger effective batch ---


def _larger_batch(plan: Plan) -> Advice | None:
    """Return the smallest larger effective batch with nearly the largest gain, or None."""
    chosen, best = plan.chosen, {}
    assert chosen is not None
    if any(chosen.request.get(name) for name in ("gradient_accumulation_steps", "deepspeed")):
        return None  # these fix the batch
    settings = resolve.resolve(chosen.request, plan.ranks, plan.gpu)
    for factor in FACTORS:
        steps = plan.run.steps_of(replace(chosen, setting=replace(chosen.setting, micro=chosen.setting.micro * factor)))
        if plan.run.steps is None and steps is not None and steps < MIN_STEPS:
            break
        s = chosen.setting
        larger = replace(chosen, setting=replace(s, accumulation=s.accumulation * factor))
        micros = candidates.divisors(s.micro * s.accumulation * factor)  # rows per rank
        best[factor] = best_fit(candidates.variants(larger, settings, micros), plan)
    gains = {factor: one.tokens_per_second / chosen.tokens_per_second for factor, one in best.items() if one}
    largest = max(gains.values(), default=0.0)
    if largest < MIN_GAIN:
        return None
    factor = min(factor for factor, gain in gains.items() if gain >= max(MIN_GAIN, ENOUGH_OF_GAIN * largest))
    one = best[factor]
    text = (
        f"a larger batch: --effective_batch_size {one.effective_batch} instead of {chosen.effective_batch} trains "
        f"{gains[factor]:.1f} times as many tokens per second ({cost.rounded(one.tokens_per_second)}; micro batch "
        f"{one.setting.micro}, about {one.peak / GIB:.1f} GiB)"
    )
    return Advice(text, one.request, plan.ranks)


def _smaller_batch(plan: Plan, request: Request) -> Advice | None:
    """Return a smaller effective batch if steps of the default batch have more tokens than in pre-training."""
    chosen = plan.chosen
    assert chosen is not None
    rows, tokens = chosen.effective_batch, chosen.effective_batch * chosen.row_length
    least = chosen.setting.ranks // chosen.setting.ranks_per_row
    fewer = max(least, MAX_STEP_TOKENS // chosen.row_length // least * least)
    if tokens <= MAX_STEP_TOKENS or fewer >= rows or request.get("effective_batch_size") is not None:
        return None
    text = f"a step trains {tokens / 1e6:.1f} million tokens; --effective_batch_size {fewer} gives more steps"
    return Advice(text, chosen.request.drop("per_device_train_batch_size").put(effective_batch_size=fewer), plan.ranks)


# --- fewer GPUs ---


def _fewer_gpus(plan: Plan, request: Request) -> Advice | None:
    """Return half of the GPUs at the same effective batch, if the run then takes far fewer GPU hours."""
    chosen, half = plan.chosen, plan.ranks // 2
    assert chosen is not None
    if plan.ranks % 2 or (plan.ranks > plan.node and half % plan.node) or not _waits_for_others(chosen, plan):
        return None
    flags = {"effective_batch_size": chosen.effective_batch}
    if "offload" not in request.values:
        flags["offload"] = "none"
    outside = gpu_memory.outside_allocator(plan.gpu, half, plan.node)
    limit = plan.limit + sum(plan.allowance.values()) - sum(outside.values())
    place = replace(plan, limit=limit, allowance=outside)
    one = best_fit(candidates.find(chosen.method, request.put(**flags), plan, half), place)
    times = one.seconds / chosen.seconds if one else 0.0
    if one is None or times / 2 > MAX_COST_SHARE:
        return None
    saved = ""
    if plan.run.price is not None:
        now, then = (cost.price_run(each, plan.run)["dollars"] for each in (chosen, one))
        saved = "" if now is None else f", ${cost.rounded(then)} instead of ${cost.rounded(now)}"
    longer = "as long" if abs(times - 1) < 0.05 else f"{times:.1f} times as long"
    text = f"fewer GPUs: {half} instead of {plan.ranks} take {longer}, with {1 - times / 2:.0%} fewer GPU hours{saved}"
    return Advice(text, one.request, half, one if times < 0.95 else None)


def _waits_for_others(chosen: Candidate, plan: Plan) -> bool:
    """Return whether half of the GPUs may pay: twice the rows per GPU would take less than twice as long.

    This happens if communication does not grow with the rows, or few rows leave a GPU idle.
    """
    s = chosen.setting
    if s.accumulation > 1:
        twice = replace(s, accumulation=2 * s.accumulation)
    else:
        twice = replace(s, micro=2 * s.micro, tokens=2 * s.tokens)
    seconds = candidates.step_seconds(chosen.shape, twice, plan.gpu, chosen.row_length)
    return seconds / chosen.seconds / 2 <= MAX_COST_SHARE
