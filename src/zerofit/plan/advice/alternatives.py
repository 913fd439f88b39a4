"""Offer alternatives to the chosen setting: adapters, a pipeline over nodes."""

from zerofit.config import resolve
from zerofit.job.request import Request
from zerofit.model import load
from zerofit.model.mixtures import adapted
from zerofit.plan import candidates
from zerofit.plan.advice import long_rows
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.search import best_fit

TIGHT_SHARE = 0.9  # share of the limit above which a plan also offers LoRA

Offers = dict[str, tuple[Candidate | None, str]]


def offers(plan: Plan, names: list[str], request: Request) -> Offers:
    """Return {name: (the best setting that fits by formula or None, the flag or page for it)}."""
    ways = adapters(plan, names, request) | attention_only(plan, request) | without_pure_bf16(plan, request)
    return ways | pipelines(plan, names, request)


def adapters(plan: Plan, names: list[str], request: Request) -> Offers:
    """Return the offers for LoRA and QLoRA.

    {} if several methods were searched, or if the chosen setting is below TIGHT_SHARE of the limit without offload.
    """
    chosen = plan.chosen
    if len(names) > 1 or (chosen and chosen.setting.offload == "none" and chosen.peak <= TIGHT_SHARE * plan.limit):
        return {}
    recipe, is_long = candidates.recipe_of(names[0]), chosen and chosen.setting.tiles > 1
    smaller = [name for name in recipe.smaller if name != names[0]]
    ways = [(candidates.method_of(name).title, name, request, f"METHOD={name}") for name in smaller]
    for one in recipe.variants:
        if not one.method and all(request.get(name) is None for name in one.arguments):
            ways.append((one.title, recipe.name, request.put(**one.arguments), one.flags))
    result: Offers = {}
    for title, method, variant, hint in ways:
        tried = long_rows.settings(method, variant, plan, []) if is_long else candidates.find(method, variant, plan)
        if tried or is_long:
            result[title] = best_fit([one for one in tried if one.setting.offload == "none"], plan), hint
    return result


def attention_only(plan: Plan, request: Request) -> Offers:
    """Return the offer to adapt only the attention.

    {} if no experts are adapted, or the user has set the adapted modules. Adapters of all experts hold most of the
    adapter's weights, and each step adds their products to copies of the experts.
    """
    best = plan.chosen or plan.nearest
    is_set = any(request.get(name) is not None for name in ("lora_target_modules", "lora_target_parameters"))
    if best is None or not best.shape.adapted_experts or is_set:
        return {}
    flag = adapted.attention_only(load.check_model(resolve.resolve(best.request, plan.ranks, plan.gpu)))
    tried = candidates.find(best.method, request.put(lora_target_modules=flag.split()[1:]), plan)
    title = f"{candidates.method_of(best.method).title} of the attention"
    return {title: (best_fit(tried, plan), f"ARGS='{flag}'")} if tried else {}


def without_pure_bf16(plan: Plan, request: Request) -> Offers:
    """Return the offer without --pure_bf16 if nothing fits: --pure_bf16 cannot offload its optimizer."""
    if plan.chosen or plan.nearest is None or not request.get("pure_bf16"):
        return {}
    best = best_fit(candidates.find(plan.nearest.method, request.drop("pure_bf16"), plan), plan)
    return {"without --pure_bf16": (best, "remove --pure_bf16")} if best else {}


def pipelines(plan: Plan, names: list[str], request: Request) -> Offers:
    """Return the offer of the fastest pipeline.

    {} for one node, for methods other than full fine-tuning, and if the model or the settings do not support pipelines.
    Each node holds an integer number of stages, so only hidden states cross the links between nodes.
    """
    best = plan.chosen or plan.nearest
    staged = candidates.recipe_of(names[0]).staged
    if not staged or len(names) > 1 or best is None or plan.nodes == 1 or plan.ranks % plan.nodes:
        return {}
    rows = best.setting.micro * best.setting.accumulation * plan.ranks // best.setting.ranks_per_row
    tried = []
    for size in range(plan.nodes, plan.ranks + 1, plan.nodes):
        per_rank = rows * size // plan.ranks
        for micro in (n for n in (1, 2, 4, 8, 16) if plan.ranks % size == 0 and per_rank % n == 0):
            if per_rank // micro >= size:
                tried += candidates.pipeline_candidates(staged, best, request, plan, size, micro, per_rank // micro)
    return {staged: (best_fit(tried, plan), "docs/parallelism.md")} if tried else {}
