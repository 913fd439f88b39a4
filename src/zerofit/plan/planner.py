"""Plan a job: find the fastest setting that fits among those that the user leaves open, and what would fit instead."""

from collections.abc import Callable

from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB, Gpu
from zerofit.job.request import FLAG, Request
from zerofit.plan import candidates, gpu_memory, predict, simulate
from zerofit.plan.advice import long_rows, methods
from zerofit.plan.candidate import Candidate, Plan, changed
from zerofit.plan.search import FAILED, fits, preferred, search

WORTH_A_KERNEL = 1.03  # times as fast, by estimate, as a setting without them: unproven kernels are tried from here on


class Progress:
    """What a search tells while it runs: lines of text, what it simulates now, and its first answer."""

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self.say, self.has_answered = say, False

    def note(self, text: str) -> None:
        """Keep a line for plan.md."""

    def now(self, text: str) -> None:
        """Tell what is simulated now, which takes seconds."""

    def first(self, candidate: Candidate | None, plan: Plan) -> None:
        """Tell the fastest setting that fits by formula, before anything is simulated; None: none does."""


def plan_of(
    names: list[str],
    request: Request,
    ranks: int,
    gpu: Gpu,
    progress: Progress | None = None,
    host_limit: int | None = None,
    node: int = gpu_memory.GPUS_OF_A_NODE,
    disk_limit: int | None = None,
    exact: bool = False,
) -> Plan:
    """Return the Plan with the fastest setting that fits among those that the request leaves open.

    Args: names: of methods in order of preference, of which advice/methods.py takes one. request: of the recipe of any
        of them. progress: told of the search. host_limit: bytes of a node's host memory; settings above it are
        rejected, unless --offload_path puts their states on a disk. node: GPUs of a node. disk_limit: bytes that are
        free for checkpoints, which decide between methods only. exact: simulate the chosen setting in any case.
    Raises: UserError for the user's mistakes.
    """
    outside = gpu_memory.outside_allocator(gpu, ranks, node)
    settings = candidates.first_settings(names[0], request, ranks, gpu, node)
    total = int((settings.memory_limit or gpu.memory_gib) * GIB)
    margin = int(gpu_memory.MARGIN * total)
    limit = total - margin - sum(outside.values())
    plan = Plan(gpu, ranks, limit, outside, None, [], margin=margin, node=node, host_limit=host_limit)
    plan.kept, plan.methods, plan.disk_limit = settings.save_total_limit, names, disk_limit
    with simulate.reused():
        found = _Search(plan, request, progress or Progress(), exact)
        found.methods(names) if len(names) > 1 else found.method(names[0])
    if plan.chosen is None and plan.nearest is not None:
        if _fits_into_the_margin(plan):
            plan.limit, plan.margin, plan.chosen, plan.nearest = limit + margin, 0, plan.nearest, None
            plan.rejected = [(one, why) for one, why in plan.rejected if one is not plan.chosen]
        else:
            if not plan.packs_too_much:
                plan.would_do = _gpus_that_would_do(names[-1], request, plan)
            plan.longest = _longest_that_fits(names[-1], request, plan)
    return plan


def _fits_into_the_margin(plan: Plan) -> bool:
    nearest = plan.nearest
    assert nearest is not None
    return bool(nearest.answer) and nearest.peak <= plan.limit + plan.margin and not plan.host_is_short(nearest)


class _Search:
    """The spaces that a plan searches one after the other."""

    def __init__(self, plan: Plan, request: Request, progress: Progress, exact: bool):
        self.plan, self.request, self.progress, self.exact = plan, request, progress, exact
        self.by_formula: Candidate | None = None
        self.failures = 0

    def method(self, name: str) -> None:
        """Search the method, then with smaller optimizer states, until a setting fits."""
        plan = self.plan
        for change in [(), *_smaller_states(name, self.request)]:
            try:
                tried = candidates.candidates(name, self.request, plan.ranks, plan.gpu, change, plan.node)
            except UserError:
                if not change:
                    raise
                continue  # the user's other flags do not go with it
            self.decide(tried, name, change)
            if not change:
                self.with_less_activations(name, tried)
            if plan.chosen:
                return
        nearest = plan.nearest
        if nearest and nearest.answer is None and not plan.host_is_short(nearest):
            self.ask(nearest)  # a closed form alone must not refuse a job
            plan.chosen = nearest if fits(nearest, plan) else None

    def methods(self, names: list[str]) -> None:
        """Search the methods of `--method auto` in order of preference, each only where it is fast enough.

        Where none fits by formula, they are searched one after the other, that with the least memory first.
        """
        plan, request = self.plan, self.request
        plan.host_assumed = methods.host_assumed(plan)
        found = methods.offers(names, request, plan)
        plan.methods = [offer.name for offer in found]
        for name, tried in methods.near(found, plan):
            self.decide(tried, name)
            if plan.chosen:
                self.with_less_activations(name, tried)
                break
        else:
            for offer in reversed(found):
                self.method(offer.name)
                if plan.chosen:
                    break
        taken = plan.chosen.method if plan.chosen else ""
        plan.instead = {
            candidates.method_of(offer.name).title: (offer.best, f"METHOD={offer.name}")
            for offer in found
            if offer.name != taken
        }

    def with_less_activations(self, name: str, plain: list[Candidate]) -> None:
        """Search the settings of advice/long_rows.py where nothing fits, or what fits pays for it with time."""
        best = self.plan.chosen
        if best and not (best.setting.offload != "none" or best.setting.groups or best.setting.activation_offload):
            return
        tried = long_rows.settings(name, self.request, self.plan, plain)
        self.decide([one for one in tried if best is None or one.seconds * WORTH_A_KERNEL < best.seconds], name)

    def decide(self, tried: list[Candidate], name: str, change: tuple = ()) -> None:
        """Choose among candidates, the fastest first, and write into the plan what is chosen and what is not."""
        plan, before = self.plan, self.plan.chosen
        if not tried:
            return
        job, gpus = f"{name} {changed(change)}".rstrip(), candidates.gpus_as_text(plan.ranks, plan.node)
        self.progress.note(f"{len(tried)} settings of {job} on {gpus} x {plan.gpu.device_name}")
        self.by_formula = preferred([one for one in tried if fits(one, plan)], plan)
        found = search(tried, plan, self.ask, exact=self.exact, is_described=self.is_described)
        plan.chosen = found or before
        slower = plan.chosen.seconds if plan.chosen else float("inf")
        plan.rejected += [
            (one, why_not(one, plan)) for one in tried if one.seconds < slower and not fits(one, plan)
        ]  # fmt: skip
        if plan.chosen is None:
            plan.nearest = min([*tried, *([plan.nearest] if plan.nearest else [])], key=lambda one: one.peak)
        else:
            plan.nearest = None

    def is_described(self, candidate: Candidate) -> bool:
        """Return whether a closed form may decide; where simulations fail, nothing else does."""
        return self.failures >= FAILED or bool(candidate.failed) or candidates.is_described(candidate)

    def ask(self, candidate: Candidate) -> None:
        """Simulate a candidate and report its peak."""
        if not self.progress.has_answered:
            self.progress.has_answered = True
            self.progress.first(self.by_formula, self.plan)
        self.progress.now(f"simulating {candidate.label}")
        predict.ask(candidate, self.plan.limit)
        how = "by simulation"
        if candidate.failed:
            self.failures += 1
            how = f"by formula, + {gpu_memory.margin(candidate.setting.zero).high - 1:.0%}: the exact check failed"
        self.progress.say(f"  {candidate.label}: {candidate.peak / GIB:.1f} GiB ({how})")


def _smaller_states(name: str, request: Request) -> list[tuple]:
    """Return SMALLER_STATES, which train slightly differently, where the user has not chosen them and they are large.

    What takes adapters has those.
    """
    decide_states = ("optim", "pure_bf16", "preset")
    flags = (argument for argument, source in request.source.items() if source == FLAG)
    is_chosen = any(argument.startswith(decide_states) for argument in flags)
    return [] if is_chosen or candidates.method_of(name).takes_adapters else candidates.SMALLER_STATES


def why_not(candidate: Candidate, plan: Plan) -> str:
    """Return why a candidate was not chosen."""
    if plan.host_is_short(candidate):
        return f"host memory {candidate.host_of_a_node / GIB:.0f} GiB a node > {plan.host_there / GIB:.0f}"
    how = "" if candidate.answer else f" (by formula, + {gpu_memory.margin(candidate.setting.zero).high - 1:.0%})"
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
