"""Offer other ways to train beside the chosen setting: adapters, a pipeline over nodes."""

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.job.request import Request
from zerofit.model import load
from zerofit.model.mixtures import adapted
from zerofit.plan import candidates
from zerofit.plan.advice import long_rows
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.search import fits, preferred

EDGE = 0.9  # share of the limit above which a plan offers LoRA too

PAGE_OF_PIPELINES = "docs/pipeline.md"

Offers = dict[str, tuple[Candidate | None, str]]


def offers(plan: Plan, names: list[str], request: Request) -> Offers:
    """Return {name: (the best setting that fits by formula, None: none does; words that plan or explain it)}."""
    ways = adapters(plan, names, request) | attention_only(plan, request) | whole_states(plan, request)
    return ways | pipelines(plan, names, request)


def adapters(plan: Plan, names: list[str], request: Request) -> Offers:
    """Return {name: (the best setting of LoRA and QLoRA that fits by formula, None: none does; words that plan it)}.

    {} if several methods were searched, which have theirs, or the chosen setting is below EDGE of the limit without
    offload.
    """
    chosen = plan.chosen
    if len(names) > 1 or (chosen and chosen.setting.offload == "none" and chosen.peak <= EDGE * plan.limit):
        return {}
    found: Offers = {}
    for title, method, own, hint in _with_adapters(names[0], request):
        try:
            is_long = chosen and chosen.setting.tiles > 1
            if is_long:
                tried = long_rows.settings(method, own, plan, [])
            else:
                tried = candidates.candidates(method, own, plan.ranks, plan.gpu, node=plan.node)
        except UserError:
            continue  # the user's other flags do not go with it
        fit = [one for one in tried if one.setting.offload == "none" and one.peak <= plan.limit]
        found[title] = preferred(fit, plan), hint
    return found


def attention_only(plan: Plan, request: Request) -> Offers:
    """Return {a name: (the best setting with adapters of the attention alone, None: none fits; the flag)}.

    {} where no experts are adapted, or the user has named what is. Adapters of all experts are most of the adapter's
    weights, and each step adds their products to copies of the experts.
    """
    best = plan.chosen or plan.nearest
    named = any(request.get(name) is not None for name in ("lora_target_modules", "lora_target_parameters"))
    if best is None or not best.shape.adapted_experts or named:
        return {}
    flag = adapted.attention_only(load.check_model(resolve.resolve(best.request, plan.ranks, plan.gpu)))
    try:
        own = candidates.planned(request, best.method).put(lora_target_modules=flag.split()[1:])
        tried = candidates.candidates(best.method, own, plan.ranks, plan.gpu, node=plan.node)
    except UserError:
        return {}
    title = f"{candidates.method_of(best.method).title} of the attention"
    return {title: (preferred([one for one in tried if fits(one, plan)], plan), f"ARGS='{flag}'")}


def whole_states(plan: Plan, request: Request) -> Offers:
    """Return {a name: (the best setting without --pure_bf16, None: none fits; how)}, where nothing fits with it.

    --pure_bf16 has no optimizer in host memory.
    """
    if plan.chosen or plan.nearest is None or not request.get("pure_bf16"):
        return {}
    tried = candidates.candidates(plan.nearest.method, request.drop("pure_bf16"), plan.ranks, plan.gpu, node=plan.node)
    best = preferred([one for one in tried if fits(one, plan)], plan)
    return {"without --pure_bf16": (best, "leave out --pure_bf16")} if best else {}


def _with_adapters(method: str, request: Request) -> list[tuple[str, str, Request, str]]:
    """Return (title, method, its request, words that plan it) of the ways to train an adapter instead."""
    recipe = candidates.recipe_of(method)
    offers = [(name, request, f"METHOD={name}") for name in recipe.smaller if name != method]
    offers = [(candidates.method_of(name).title, name, own, hint) for name, own, hint in offers]
    for one in recipe.variants:
        if not one.method and all(request.get(name) is None for name in one.arguments):
            offers.append((one.title, recipe.name, request.put(**one.arguments), one.flags))
    return offers


def pipelines(plan: Plan, names: list[str], request: Request) -> Offers:
    """Return {its name: (the fastest pipeline that fits by formula, None: none does; words for it)}.

    {} for GPUs of one node, for what is no full fine-tuning, and for a model or settings that no pipeline takes. There
    is a whole number of stages on each node, so only hidden states cross the links between nodes.
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
                tried += candidates.of_pipeline(staged, best, request, plan, size, micro, per_rank // micro)
    fit = [candidate for candidate in tried if candidate.peak <= plan.limit]
    return {staged: (preferred(fit, plan), PAGE_OF_PIPELINES)} if tried else {}
