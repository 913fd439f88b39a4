"""Plan a job: find the fastest setting that fits among those that the user leaves open."""

from collections.abc import Callable

from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB, Gpu
from zerofit.job.request import FLAG, Request
from zerofit.plan import candidates, gpu_memory, predict, simulate
from zerofit.plan.advice import long_rows, methods
from zerofit.plan.candidate import Candidate, Plan, change_flag
from zerofit.plan.search import MAX_FAILURES, best_fit, fits, search

MIN_KERNEL_SPEEDUP = 1.03  # estimated speedup from which kernels without a self-test result are considered


class Progress:
    """Receive the progress of a search: lines of text, the current simulation and the answer by formula."""

    def __init__(self, print_line: Callable[[str], None] = lambda text: None):
        self.print_line, self.has_first_answer = print_line, False

    def note(self, text: str) -> None:
        """Keep a line for plan.md."""

    def now(self, text: str) -> None:
        """Report the current simulation, which takes seconds."""

    def first(self, candidate: Candidate | None, plan: Plan) -> None:
        """Report the fastest setting that fits by formula, or None, before the first simulation."""


def plan_of(
    names: list[str],
    request: Request,
    ranks: int,
    gpu: Gpu,
    progress: Progress | None = None,
    host_memory_limit: int | None = None,
    node: int = gpu_memory.GPUS_PER_NODE,
    disk_limit: int | None = None,
    exact: bool = False,
) -> Plan:
    """Return the Plan with the fastest setting that fits among those that the request leaves open.

    Args: names: methods in order of preference; advice/methods.py chooses one. request: for the recipe of any of them.
        host_memory_limit: bytes of host memory per node; settings above it are rejected, unless --offload_path puts
        their states on a disk. node: GPUs per node. disk_limit: free bytes for checkpoints, used only to choose between
        methods. exact: always simulate the chosen setting.
    Raises: UserError for the user's mistakes.
    """
    outside = gpu_memory.outside_allocator(gpu, ranks, node)
    settings = candidates.first_settings(names[0], request, ranks, gpu, node)
    total = int((settings.memory_limit or gpu.memory_gib) * GIB)
    margin = int(gpu_memory.MARGIN * total)
    limit = total - margin - sum(outside.values())
    plan = Plan(gpu, ranks, limit, outside, None, [], margin=margin, node=node, host_memory_limit=host_memory_limit)
    plan.kept, plan.methods, plan.disk_limit = settings.save_total_limit, names, disk_limit
    with simulate.reuse_process():
        plan_search = _PlanSearch(plan, request, progress or Progress(), exact)
        plan_search.methods(names) if len(names) > 1 else plan_search.method(names[0])
    nearest = plan.nearest
    if plan.chosen is None and nearest is not None:
        if nearest.answer and nearest.peak <= limit + margin and not plan.exceeds_host_memory(nearest):
            plan.limit, plan.margin, plan.chosen, plan.nearest = limit + margin, 0, nearest, None
            plan.rejected = [(one, why) for one, why in plan.rejected if one is not nearest]
        else:
            if not plan.packs_too_much:
                plan.sufficient_gpus = _sufficient_gpus(names[-1], request, plan)
            plan.longest = _longest_that_fits(names[-1], request, plan)
    return plan


class _PlanSearch:
    """Search the spaces of a plan one after the other."""

    def __init__(self, plan: Plan, request: Request, progress: Progress, exact: bool):
        self.plan, self.request, self.progress, self.exact = plan, request, progress, exact
        self.by_formula: Candidate | None = None
        self.failures = 0

    def method(self, name: str) -> None:
        """Search a method, then the same with smaller optimizer states, until a setting fits."""
        plan, decide_states = self.plan, ("optim", "pure_bf16", "preset")
        flags = [argument for argument, source in self.request.source.items() if source == FLAG]
        is_chosen = any(argument.startswith(decide_states) for argument in flags)
        may_shrink = not is_chosen and not candidates.method_of(name).takes_adapters
        for change in [(), *candidates.SMALLER_STATES * may_shrink]:  # these train slightly differently
            try:
                tried = candidates.candidates(name, self.request, plan.ranks, plan.gpu, change, plan.node)
            except UserError:
                if not change:
                    raise
                continue  # not compatible with the user's other flags
            self.decide(tried, name, change)
            if not change:
                self.with_less_activations(name, tried)
            if plan.chosen:
                return
        nearest = plan.nearest
        if nearest and nearest.answer is None and not plan.exceeds_host_memory(nearest):
            self.simulate(nearest)  # a closed form alone must not refuse a job
            plan.chosen = nearest if fits(nearest, plan) else None

    def methods(self, names: list[str]) -> None:
        """Search the methods of `--method auto` in order of preference, each only if it is fast enough.

        If no method fits by formula, search all, the one with the least memory first.
        """
        plan, request = self.plan, self.request
        if plan.host_memory_limit is None:
            plan.host_memory_limit, plan.host_memory_source = methods.assumed_host_memory(plan), "assumed"
        offers = methods.offers(names, request, plan)
        plan.methods = [offer.name for offer in offers]
        for name, tried in methods.fast_enough(offers, plan):
            self.decide(tried, name)
            if plan.chosen:
                self.with_less_activations(name, tried)
                break
        else:
            for offer in reversed(offers):
                self.method(offer.name)
                if plan.chosen:
                    break
        chosen = plan.chosen.method if plan.chosen else ""
        plan.alternatives = {
            candidates.method_of(offer.name).title: (offer.best, f"METHOD={offer.name}")
            for offer in offers
            if offer.name != chosen
        }

    def with_less_activations(self, name: str, plain: list[Candidate]) -> None:
        """Search the settings of advice/long_rows.py if nothing fits or the chosen setting trades time for memory."""
        best = self.plan.chosen
        if best and not (best.setting.offload != "none" or best.setting.groups or best.setting.activation_offload):
            return
        tried = long_rows.settings(name, self.request, self.plan, plain)
        self.decide([one for one in tried if best is None or one.seconds * MIN_KERNEL_SPEEDUP < best.seconds], name)

    def decide(self, tried: list[Candidate], name: str, change: tuple = ()) -> None:
        """Choose among candidates, the fastest first, and record chosen and rejected ones in the plan."""
        plan, before = self.plan, self.plan.chosen
        if not tried:
            return
        job, gpus = f"{name} {change_flag(change)}".rstrip(), candidates.gpus_as_text(plan.ranks, plan.node)
        self.progress.note(f"{len(tried)} settings of {job} on {gpus} x {plan.gpu.device_name}")
        self.by_formula = best_fit(tried, plan)
        best = search(tried, plan, self.simulate, exact=self.exact, formulas_suffice=self.formulas_suffice)
        plan.chosen = best or before
        slower = plan.chosen.seconds if plan.chosen else float("inf")
        plan.rejected += [
            (one, why_not(one, plan)) for one in tried if one.seconds < slower and not fits(one, plan)
        ]  # fmt: skip
        smallest = min([*tried, *filter(None, [plan.nearest])], key=lambda one: one.peak)
        plan.nearest = None if plan.chosen else smallest

    def formulas_suffice(self, candidate: Candidate) -> bool:
        """Return whether a closed form may decide; it must if simulations fail."""
        return self.failures >= MAX_FAILURES or bool(candidate.failed) or candidates.formulas_suffice(candidate)

    def simulate(self, candidate: Candidate) -> None:
        """Simulate a candidate and report its peak."""
        if not self.progress.has_first_answer:
            self.progress.has_first_answer = True
            self.progress.first(self.by_formula, self.plan)
        self.progress.now(f"simulating {candidate.label}")
        predict.simulate_candidate(candidate, self.plan.limit)
        how = "by simulation"
        if candidate.failed:
            self.failures += 1
            how = f"by formula, + {gpu_memory.margin(candidate.setting.zero).high - 1:.0%}: simulation failed"
        self.progress.print_line(f"  {candidate.label}: {candidate.peak / GIB:.1f} GiB ({how})")


def why_not(candidate: Candidate, plan: Plan) -> str:
    """Return why a candidate was not chosen."""
    if plan.exceeds_host_memory(candidate):
        need, limit = candidate.host_bytes_per_node / GIB, plan.host_memory_limit / GIB
        return f"host memory {need:.0f} GiB per node > {limit:.0f}"
    how = "" if candidate.answer else f" (by formula, + {gpu_memory.margin(candidate.setting.zero).high - 1:.0%})"
    return f"{candidate.peak / GIB:.1f} GiB > {plan.limit / GIB:.1f}{how}"


# --- larger clusters and shorter rows if nothing fits, by formula ---


def _sufficient_gpus(method: str, request: Request, plan: Plan) -> int | None:
    """Double the GPUs until a setting fits by formula, and return their number; None if 4096 do not suffice."""
    more = plan.ranks
    while more < 4096:
        more *= 2
        outside = gpu_memory.outside_allocator(plan.gpu, more, plan.node)
        limit = int(plan.gpu.memory_gib * GIB) - sum(outside.values())
        if any(one.peak <= limit for one in candidates.find(method, request, plan, more)):
            return more
    return None


def _longest_that_fits(method: str, request: Request, plan: Plan) -> int | None:
    """Halve --max_length until a setting fits by formula, and return it; None if 128 is too long."""
    length = candidates.first_settings(method, request, plan.ranks, plan.gpu, plan.node).max_length // 2
    while length >= 128:
        if any(one.peak <= plan.limit for one in candidates.find(method, request.put(max_length=length), plan)):
            return length
        length //= 2
    return None
