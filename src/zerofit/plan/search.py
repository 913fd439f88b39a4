"""Try candidates from the fastest on and stop at the first that fits.

Closed forms order the candidates by predicted time and drop those far above the limit; the simulation (simulate.py),
which runs zerofit's trainer and the real engine on tensors without memory, decides about the rest.
"""

import contextlib
import time
from collections.abc import Callable

from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB, Gpu
from zerofit.job.request import FLAG, Request
from zerofit.plan import candidates, formulas, gpu_memory, predict, simulate
from zerofit.plan.advice import long_rows, preference
from zerofit.plan.advice import methods as of_methods
from zerofit.plan.candidate import Candidate, Plan, changed

# Of the bytes by formula, what a setting surely needs where the simulation has confirmed the closed form for others of
# its stage and offload: the two differ by less than 3 % in dense models (tests/plan).
CONFIRMED = 0.95

FIRST_SIMULATIONS = 8  # after this many simulations only settings that clearly fit by the closed forms are tried

# Before the search ends with "nothing fits", it simulates the smallest settings by formula of up to LAST_TRIES pairs of
# stage and offload, if they are below HOPELESS times the limit.
LAST_TRIES, HOPELESS = 4, 2.0

EDGE = 0.9  # share of the limit above which a plan suggests LoRA too

FEWER = 4  # simulations of settings that would be faster than one which fits already

FASTER = 0.97  # of its seconds; estimates within 3 % are taken as equal

PAGE_OF_PIPELINES = "docs/pipeline.md"


# --- the search ---


class Progress:
    """What a search tells while it runs: lines of text, what it simulates now, and its first answer."""

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self.say, self.has_answered = say, False

    def now(self, text: str) -> None:
        """Tell what is simulated now, which takes seconds."""

    def meanwhile(self, candidate: Candidate, plan: Plan) -> None:
        """Do work of one's own while a candidate is simulated."""

    def first(self, candidate: Candidate | None, plan: Plan) -> None:
        """Tell the fastest setting that fits by formula, before anything is simulated; None: none does."""


def search(
    methods: list[str],
    request: Request,
    ranks: int,
    gpu: Gpu,
    progress: Progress | None = None,
    host_limit: int | None = None,
    node: int = gpu_memory.GPUS_OF_A_NODE,
    disk_limit: int | None = None,
) -> Plan:
    """Return the Plan with the fastest setting that fits among those that the request leaves open.

    Args: methods: in order of preference, of which advice/methods.py takes one. request: of the recipe of any of them.
        progress: told of the search. host_limit: bytes of a node's host memory; settings above it are rejected, unless
        --offload_path puts their states on a disk. node: GPUs of a node. disk_limit: bytes that are free for
        checkpoints, which decide between methods only.
    Raises: UserError for the user's mistakes.
    """
    began = time.perf_counter()
    outside = gpu_memory.outside_allocator(gpu, ranks, node)
    settings = candidates.first_settings(methods[0], request, ranks, gpu, node)
    total = int((settings.memory_limit or gpu.memory_gib) * GIB)
    margin = int(gpu_memory.MARGIN * total)
    limit, kept = total - margin - sum(outside.values()), settings.save_total_limit
    plan = Plan(gpu, ranks, limit, outside, None, [], margin=margin, node=node, host_limit=host_limit, kept=kept)
    plan.methods, plan.disk_limit = methods, disk_limit
    with simulate.reused():
        progress = progress or Progress()
        if len(methods) == 1:
            _search(plan, methods, request, progress)
            offers = []
        else:
            offers = _search_methods(plan, methods, request, progress)
    if plan.chosen is None and _fits_into_the_margin(plan):
        plan.limit, plan.margin, plan.chosen, plan.nearest = limit + margin, 0, plan.nearest, None
        plan.rejected = [(candidate, why) for candidate, why in plan.rejected if candidate is not plan.chosen]
    taken = plan.chosen.method if plan.chosen else ""
    plan.instead = {
        candidates.method_of(offer.name).title: (offer.best, f"METHOD={offer.name}")
        for offer in offers
        if offer.name != taken
    }
    if plan.chosen is None and plan.nearest is not None:
        plan.would_do = _gpus_that_would_do(methods[-1], request, plan)
        plan.longest = _longest_that_fits(methods[-1], request, plan)
    plan.seconds = time.perf_counter() - began
    return plan


def _fits_into_the_margin(plan: Plan) -> bool:
    nearest = plan.nearest
    fits = nearest and nearest.answer and nearest.peak <= plan.limit + plan.margin
    return bool(fits) and not plan.host_is_short(nearest)


def _search(plan: Plan, methods: list[str], request: Request, progress: Progress) -> None:
    """Search each (method, change) of `_rungs` until a setting fits; write the result into the plan."""
    ranks, gpu, node = plan.ranks, plan.gpu, plan.node
    for method, change in _rungs(methods, request):
        try:
            tried = candidates.candidates(method, request, ranks, gpu, change, node)
        except UserError:
            if not change:
                raise
            continue  # the user's other flags do not go with it
        _announce(plan, method, change, tried, progress)
        _decide(plan, tried, progress)
        if not change:
            _try_less_activations(plan, method, request, tried, progress)
        if plan.chosen:
            return
    if plan.nearest.answer is None and not plan.host_is_short(plan.nearest):
        _fits(plan.nearest, plan, progress)  # a prediction by formula alone must not refuse a job


def _first_that_fits(plan: Plan, tried: list[Candidate]) -> Candidate | None:
    """Return the fastest candidate that fits by formula, with its margin, and into the host memory."""
    return next((one for one in tried if one.peak <= plan.limit and not plan.host_is_short(one)), None)


def _announce(plan: Plan, method: str, change: tuple, tried: list[Candidate], progress: Progress) -> None:
    job, gpus = f"{method} {changed(change)}".rstrip(), candidates.gpus_as_text(plan.ranks, plan.node)
    progress.say(f"plan: {len(tried)} settings of {job} on {gpus} x {plan.gpu.device_name}; the fastest first")
    if not progress.has_answered:
        progress.has_answered = True
        progress.first(_first_that_fits(plan, tried), plan)


def _try_less_activations(plan: Plan, method: str, request: Request, plain: list[Candidate], progress) -> None:
    """Search the settings of advice/long_rows.py where nothing fits, or what fits pays for it with time."""
    best = plan.chosen
    if best and not (best.setting.offload != "none" or best.setting.groups or best.setting.activation_offload):
        return
    tried = long_rows.settings(method, request, plan, plain)
    most = plan.limit * (1 if best else candidates.CLEARLY_TOO_MUCH)
    tried = [one for one in tried if one.by_formula <= most]
    if best:
        tried = [one for one in tried if one.seconds <= FASTER * best.seconds][:FEWER]
    if not tried:
        return
    progress.say(f"plan: {len(tried)} settings of {method} with Liger's kernels or tiled MLPs")
    _decide(plan, tried, progress)


def _search_methods(plan: Plan, methods: list[str], request: Request, progress: Progress) -> list[preference.Offer]:
    """Search the methods of `--method auto` in order of preference, each only where it is fast enough; return all.

    Where none fits by formula, they are searched one after the other, that with the least memory first.
    """
    plan.host_assumed = preference.host_assumed(plan)
    found = of_methods.offers(methods, request, plan)
    for method, tried in preference.near(found, plan):
        _announce(plan, method, (), tried, progress)
        _decide(plan, tried, progress)
        if plan.chosen:
            _try_less_activations(plan, method, request, tried, progress)
            break
    else:
        for offer in reversed(found):
            _search(plan, [offer.name], request, progress)
            if plan.chosen:
                break
    plan.methods = [offer.name for offer in found]
    return found


def adapters_instead(plan: Plan, methods: list[str], request: Request) -> dict[str, tuple[Candidate | None, str]]:
    """Return {name: (the fastest setting of LoRA and QLoRA that fits by formula, None: none does; words that plan it)}.

    {} if several methods were searched, which have theirs, or the chosen setting is below EDGE of the limit without
    offload.
    """
    chosen = plan.chosen
    if len(methods) > 1 or (chosen and not _is_near_the_edge(chosen, plan)):
        return {}
    found = {}
    for title, method, own, hint in _with_adapters(methods[0], request):
        try:
            is_long = chosen and chosen.setting.tiles > 1
            tried = long_rows.settings(method, own, plan, []) if is_long else _listed(plan, method, own)
        except UserError:
            continue  # the user's other flags do not go with it
        fit = (c for c in tried if c.setting.offload == "none" and c.peak <= plan.limit)
        found[title] = next(fit, None), hint
    return found


def list_adapters(candidate: Candidate, plan: Plan, methods: list[str], request: Request) -> None:
    """List what `adapters_instead` will ask for if this candidate is chosen, which by its closed forms may fit."""
    if len(methods) == 1 and candidate.by_formula <= plan.limit and _is_near_the_edge(candidate, plan):
        for _, method, own, _ in _with_adapters(methods[0], request):
            with contextlib.suppress(UserError):
                _listed(plan, method, own)


def _is_near_the_edge(candidate: Candidate, plan: Plan) -> bool:
    return candidate.setting.offload != "none" or candidate.peak > EDGE * plan.limit


def _with_adapters(method: str, request: Request) -> list[tuple[str, str, Request, str]]:
    """Return (title, method, its request, words that plan it) of the ways to train an adapter instead."""
    recipe = candidates.recipe_of(method)
    offers = [(name, request, f"METHOD={name}") for name in recipe.smaller if name != method]
    offers = [(candidates.method_of(name).title, name, own, hint) for name, own, hint in offers]
    for one in recipe.variants:
        if not one.method and all(request.get(name) is None for name in one.arguments):
            offers.append((one.title, recipe.name, request.put(**one.arguments), one.flags))
    return offers


def _listed(plan: Plan, method: str, request: Request) -> list[Candidate]:
    """Return the candidates of a method, listed once a plan. Raises: UserError as `candidates.candidates`."""
    key = method, *request.flags()
    if key not in plan.listed:
        plan.listed[key] = candidates.candidates(method, request, plan.ranks, plan.gpu, node=plan.node)
    return plan.listed[key]


def pipeline_instead(plan: Plan, methods: list[str], request: Request) -> dict[str, tuple[Candidate | None, str]]:
    """Return {its name: (the fastest pipeline that fits by formula, None: none does; words for it)}.

    {} for GPUs of one node, for what is no full fine-tuning, and for a model or settings that no pipeline takes. There
    is a whole number of stages on each node, so only hidden states cross the links between nodes.
    """
    best = plan.chosen or plan.nearest
    staged = candidates.recipe_of(methods[0]).staged
    if not staged or len(methods) > 1 or best is None or plan.nodes == 1 or plan.ranks % plan.nodes:
        return {}
    rows = best.setting.micro * best.setting.accumulation * plan.ranks // best.setting.ranks_per_row
    tried = []
    for size in range(plan.nodes, plan.ranks + 1, plan.nodes):
        per_rank = rows * size // plan.ranks
        for micro in (n for n in (1, 2, 4, 8, 16) if plan.ranks % size == 0 and per_rank % n == 0):
            if per_rank // micro >= size:
                tried += candidates.of_pipeline(staged, best, request, plan, size, micro, per_rank // micro)
    fit = [candidate for candidate in tried if candidate.peak <= plan.limit]
    fastest = min(fit, key=lambda candidate: candidate.seconds, default=None)
    return {staged: (fastest, PAGE_OF_PIPELINES)} if tried else {}


def _rungs(methods: list[str], request: Request) -> list[tuple[str, tuple]]:
    """Return (method, one of SMALLER_STATES to add or ()) in order of preference.

    Those with smaller optimizer states, which train slightly differently, come after the unchanged method; what takes
    adapters has those."""
    decide_states = ("optim", "pure_bf16", "preset")
    flags = (name for name, source in request.source.items() if source == FLAG)
    chosen_by_user = any(name.startswith(decide_states) for name in flags)
    smaller = [] if chosen_by_user else candidates.SMALLER_STATES
    return [
        (method, change)
        for method in methods
        for change in [(), *([] if candidates.method_of(method).takes_adapters else smaller)]
    ]


def _decide(plan: Plan, tried: list[Candidate], progress: Progress) -> None:
    """Simulate the fastest candidates until one fits; those far too large by formula come last."""
    simulated, large = [], []
    for candidate in tried:
        share = candidates.CLEARLY_TOO_MUCH if len(simulated) < FIRST_SIMULATIONS else 0.9
        if _expected(candidate, simulated) > share * plan.limit or _is_too_large(candidate, simulated, plan.limit):
            large.append(candidate)
        elif not plan.host_is_short(candidate):
            simulated.append(candidate)  # only a simulated candidate is chosen, unless the simulation fails
            if _fits(candidate, plan, progress):
                break
    else:
        if plan.chosen is None:
            _last_tries(plan, large, progress)
    for candidate in tried:
        if candidate is plan.chosen:
            break
        plan.rejected.append((candidate, _why_not(candidate, plan)))
    if plan.chosen is None:
        plan.nearest = min([*tried, *([plan.nearest] if plan.nearest else [])], key=lambda candidate: candidate.peak)


def _last_tries(plan: Plan, large: list[Candidate], progress: Progress) -> None:
    """Simulate the smallest candidate of each stage and offload; if one fits, also faster ones like it.

    The closed forms can be far too high for an unusual model, so they must not refuse a job.
    """
    smallest: dict[tuple, Candidate] = {}
    for candidate in sorted(large, key=lambda candidate: candidate.by_formula):
        if not plan.host_is_short(candidate) and candidate.by_formula <= HOPELESS * plan.limit:
            smallest.setdefault((candidate.setting.zero, candidate.setting.offload), candidate)
    for last in list(smallest.values())[:LAST_TRIES]:
        if not _fits(last, plan, progress):
            continue
        too_high = last.by_formula / last.peak
        for candidate in large:  # the fastest first
            if candidate is last:
                return
            near = (candidate.setting.zero, candidate.setting.offload) == (last.setting.zero, last.setting.offload)
            if near and candidate.by_formula <= too_high * plan.limit and _fits(candidate, plan, progress):
                return


def _expected(candidate: Candidate, simulated: list[Candidate]) -> float:
    """Return the bytes by formula and what it lacked for the same tokens in the simulations of settings like it."""

    def kind(setting: formulas.Setting) -> tuple:
        return setting.zero, setting.offload, setting.every > 0

    lacked = [
        (other.allocated - other.by_formula) / other.setting.tokens
        for other in simulated
        if other.answer and kind(other.setting) == kind(candidate.setting)
    ]
    return candidate.by_formula + max(0.0, min(lacked, default=0.0)) * candidate.setting.tokens


def _is_too_large(candidate: Candidate, simulated: list[Candidate], limit: int) -> bool:
    """Return whether a candidate is above the limit by a closed form that simulations of its stage have confirmed."""
    shares = [
        other.allocated / other.by_formula
        for other in simulated
        if other.answer
        and (other.setting.zero, other.setting.offload) == (candidate.setting.zero, candidate.setting.offload)
    ]
    return bool(shares) and CONFIRMED * min(shares) * candidate.by_formula > limit


def _fits(candidate: Candidate, plan: Plan, progress: Progress) -> bool:
    """Simulate the candidate, report its peak, and choose it if it fits."""
    progress.now(f"simulating {candidate.label}")
    simulate.while_waiting(lambda: progress.meanwhile(candidate, plan))
    predict.ask(candidate, plan.limit)
    how = (
        f"by formula, + {candidates.FORMULA_MARGIN:.0%}: the exact check failed"
        if candidate.failed
        else "by simulation"
    )
    progress.say(f"  {candidate.label}: {candidate.peak / GIB:.1f} GiB ({how})")
    if candidate.peak > plan.limit or plan.host_is_short(candidate):
        return False
    plan.chosen = candidate
    return True


def _why_not(candidate: Candidate, plan: Plan) -> str:
    if plan.host_is_short(candidate):
        return f"host memory {candidate.host_of_a_node / GIB:.0f} GiB a node > {plan.host_there / GIB:.0f}"
    if candidate.is_passed_over(plan.limit):
        return f"{candidate.peak / GIB:.1f} GiB by formula, of which settings like it needed more; not simulated"
    how = "" if candidate.answer else f" (by formula, + {candidates.FORMULA_MARGIN:.0%})"
    return f"{candidate.peak / GIB:.1f} GiB > {plan.limit / GIB:.1f}{how}"


# --- what would do where nothing fits, by formula ---


def _gpus_that_would_do(method: str, request: Request, plan: Plan) -> int | None:
    """Return the smallest doubling of the GPUs at which a setting fits by formula; None up to 4096."""
    more = plan.ranks
    while more < 4096:
        more *= 2
        outside = gpu_memory.outside_allocator(plan.gpu, more, plan.node)
        limit = int(plan.gpu.memory_gib * GIB) - sum(outside.values())
        try:
            tried = candidates.candidates(method, request, more, plan.gpu, node=plan.node)
        except UserError:
            continue
        if any(candidate.peak <= limit for candidate in tried):
            return more
    return None


def _longest_that_fits(method: str, request: Request, plan: Plan) -> int | None:
    """Return the largest halving of --max_length at which a setting fits by formula; None below 128."""
    length = candidates.first_settings(method, request, plan.ranks, plan.gpu, plan.node).max_length // 2
    while length >= 128:
        shorter = request.put(max_length=length)
        tried = candidates.candidates(method, shorter, plan.ranks, plan.gpu, node=plan.node)
        if any(candidate.peak <= plan.limit for candidate in tried):
            return length
        length //= 2
    return None
