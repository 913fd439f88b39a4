"""Choose micro batch and gradient checkpointing of a job together: the fastest pair that fits."""

import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from zerofit.base import allocator
from zerofit.base.hardware import GIB
from zerofit.checkpoint import restart
from zerofit.config import resolve
from zerofit.data import tokens
from zerofit.job.request import BY_PLAN, Request
from zerofit.job.run_folder import read_record
from zerofit.model import gradient_checkpointing
from zerofit.model.load import load_config
from zerofit.plan import candidates, gpu_memory, predict, preflight, search, simulate
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.formulas import Checkpointing

MICRO = "per_device_train_batch_size"
MIN_HINT_SPEEDUP = 1.2  # speedup over the user's micro batch from which a faster one is printed
MAX_WAIT_SECONDS = 300  # longest wait of a launch for simulations, if the run would gain as much


@dataclass(frozen=True)
class Choice:
    """The choice of a launch."""

    plan: dict | None = None  # the prediction, see `predict.predict`
    flags: dict = field(default_factory=dict)  # {argument: value} for the arguments left open
    why: str = ""  # sentence for the terminal and run.json

    def apply_to(self, request: Request) -> Request:
        """Return the request with the choice."""
        return request.drop("search_batch_size").with_plan_values(self.why, self.flags) if self.flags else request


def for_rows(settings, train_set, eval_set) -> Choice:
    """Return the choice for a job with these rows, and print it and whether the job fits. Raises: see `choose`."""
    if not preflight.is_planned(settings):
        return Choice()
    mean, longest = tokens.row_tokens(settings, train_set), tokens.longest_row(settings, train_set, eval_set)
    return choose(settings, mean, longest, tokens.number_of_steps(settings, train_set))


def choose(
    settings,
    row_tokens: float | None = None,
    longest: int | None = None,
    steps: int | None = None,
    seconds: float = preflight.CHECK_SECONDS,
) -> Choice:
    """Return the fastest pair that the user's arguments leave open, at the same effective batch, and print it.

    The closed forms decide if they leave room; faster pairs are simulated and chosen if they fit.
    Args: row_tokens: mean length of training rows; longest: longest row; steps: steps of the run; None: unknown.
        seconds: how long to wait for simulations, or longer if the run would gain more.
    Raises: NothingFits and UserError as `preflight.check`.
    """
    if longest and preflight.is_planned(settings):
        settings = _with_rows_up_to(longest, settings)
    if settings.use_cpu or settings.parallel_size("layers") > 1:
        return Choice(preflight.check(settings))
    earlier, settings = _earlier(settings), _without_choice(settings)
    gpu, total, outside = predict.place_of(settings)
    settings = settings.replace(planned_gpu=gpu)  # looked up once
    margin = int(gpu_memory.MARGIN * total)
    plan = Plan(gpu, settings.world_size, total - sum(outside.values()) - margin, outside, None, [], margin=margin)
    with simulate.reuse_process():
        choice, better = _Autotuner(settings, earlier, row_tokens, plan, seconds, steps).result()
    for sentence in filter(None, (choice.why, better)):
        print(f"plan: {sentence}", flush=True)
    preflight.report(choice.plan, settings)
    return choice


class _Autotuner:
    """Search the pairs of micro batch and gradient checkpointing that a job leaves open."""

    def __init__(self, settings, earlier, row_tokens: float | None, plan: Plan, seconds: float, steps):
        """Args: earlier: pair to keep if it fits, or None; the others: see `choose`."""
        self.settings, self.plan, self.row_tokens = settings, plan, row_tokens
        self.steps, self.seconds, self.began = steps, seconds, time.monotonic()
        self.continues = earlier is not None
        self.unanswered: Candidate | None = None  # the first pair whose simulation failed
        self.job = candidates.candidate_of(settings, settings.planned_gpu)
        self.kinds = _checkpointings(settings, self.job.shape.layers, earlier)
        self.micros = _micros(settings)
        self.pairs = self._pairs(self.micros)
        self.default = self._find((settings.per_device_train_batch_size, candidates.checkpointing_of(settings)))
        self.earlier = self._find(earlier) if earlier else None

    def result(self) -> tuple[Choice, str]:
        """Return the choice, and a sentence about a faster micro batch than the user's or ""."""
        pair = self._decide()
        full = replace(pair, seconds=candidates.step_seconds(pair.shape, pair.setting, pair.gpu, pair.row_length))
        plan = predict.as_plan(full, self.plan.gpu_bytes, self.plan.allowance)
        plan["seconds"] = round(time.monotonic() - self.began, 1)
        # from here on, rows have the mean length
        row = (self.row_tokens or self.settings.max_length) * self.settings.objective.documents
        plan |= {"tokens_per_second": round(pair.effective_batch * row / pair.seconds, 1)}
        if self.steps:
            hours = self.steps * pair.seconds * pair.setting.ranks / 3600
            plan |= {"steps": self.steps, "gpu_hours": round(hours, 3)}
        flags = self._flags(pair)
        return Choice(plan, flags, self._why(pair, plan, flags) if flags else ""), self._better_micro_batch(pair)

    def _pairs(self, micros: list[int]) -> list[Candidate]:
        """Return the job with each pair, and seconds for rows of the mean length."""
        mean = self.row_tokens or self.settings.max_length
        rows = mean * self.settings.objective.documents / self.settings.parallel_size("tokens")
        pairs, kinds = [], self.kinds if len(self.kinds) > 1 else None
        for one in candidates.variants(self.job, self.settings, micros or None, kinds):
            real = replace(one.setting, tokens=max(1, round(rows * one.setting.micro)))
            seconds = candidates.step_seconds(one.shape, real, one.gpu, round(mean))
            pairs.append(replace(one, seconds=seconds))
        return pairs

    def _find(self, key: tuple[int, Checkpointing]) -> Candidate | None:
        """Return the pair with this micro batch (or the job's, if set) and checkpointing; None if not open."""
        micro = key[0] if self.micros else self.job.setting.micro
        matches = (one for one in self.pairs if (one.setting.micro, one.setting.checkpointing) == (micro, key[1]))
        return next(matches, None)

    def _decide(self) -> Candidate:
        """Return the chosen pair."""
        is_fixed = len(self.pairs) == 1
        plan = self.plan if is_fixed else self._with_room_for_unequal_rows()
        self.sure = search.best_fit([one for one in self.pairs if _formulas_suffice(one)], plan) or self.default
        pair = search.search(
            self.pairs, plan, self._simulate, first=self.earlier, formulas_suffice=_formulas_suffice,
            has_time=lambda: not is_fixed,
        )  # fmt: skip
        if pair is not None:
            return pair
        smallest = min(self.pairs, key=lambda one: one.peak)
        limit = self.plan.limit + self.plan.margin
        for pair in [self.default, smallest] if self.default.peak <= self.plan.limit else [smallest]:
            if pair.answer is None:
                predict.simulate_first_rank(pair, limit, self._left())
            if pair.peak <= limit:
                break
        return pair

    def _with_room_for_unequal_rows(self) -> Plan:
        """Return the plan with the limit reduced for rows of different lengths."""
        share = 1 if allocator.expandable_segments() else gpu_memory.UNEQUAL_ROWS
        return replace(self.plan, limit=int(self.plan.limit / share))

    def _simulate(self, pair: Candidate) -> None:
        """Simulate a pair, for at most as long as the run would gain."""
        gain = (self.steps or 0) * (self.sure.seconds - pair.seconds)
        patience = min(MAX_WAIT_SECONDS, self.settings.ddp_timeout / 2)  # other ranks may be waiting for this one
        self.seconds = max(self.seconds, min(patience, gain))
        predict.simulate_first_rank(pair, self.plan.limit + self.plan.margin, self._left(), waits=False)
        if pair.failed:
            self.unanswered = self.unanswered or pair

    def _left(self) -> float:
        return max(0.0, self.began + self.seconds - time.monotonic())

    def _flags(self, pair: Candidate) -> dict:
        """Return the open arguments of a pair."""
        flags = {MICRO: pair.setting.micro} if self.micros else {}
        return flags | (pair.setting.checkpointing.flags if len(self.kinds) > 1 else {})

    def _why(self, pair: Candidate, plan: dict, flags: dict) -> str:
        how = "formula" if "by" in plan else "simulation"
        size = f"{plan['peak_bytes'] / GIB:.1f} of {plan['limit_bytes'] / GIB:.1f} GiB per rank by {how}"
        sentence, faster = f"{_as_text(flags)}: {size}", self._not_simulated(pair)
        if pair is self.default:
            return sentence + (faster or "; no faster setting fits by estimate")
        default = [f"micro batch {self.default.setting.micro}"] * (MICRO in flags)
        default += ["every layer recomputed"] * ("gradient_checkpointing" in flags)
        times = self.default.seconds / pair.seconds
        return f"{sentence}; with {' and '.join(default)}, a step would take about {times:.2f} times as long{faster}"

    def _not_simulated(self, pair: Candidate) -> str:
        """Return the end of a sentence about a faster pair whose simulation failed, or ""."""
        if self.unanswered is None or pair.seconds < search.TIE_RATIO * self.unanswered.seconds:
            return ""
        faster = self.unanswered
        return (
            f"; {_as_text(self._flags(faster))} would be about {pair.seconds / faster.seconds:.2f} times as fast by "
            f"estimate, but was not simulated ({faster.failed}); `make plan` with the same arguments simulates it"
        )

    def _better_micro_batch(self, pair: Candidate) -> str:
        """Return a sentence about a micro batch that is much faster than the user's, or ""."""
        # A resumed run may have run out of memory.
        if self.micros or self.continues or not covers(self.settings):
            return ""
        others = [one for one in self._pairs(_divisors(self.settings)) if _formulas_suffice(one)]
        best = search.best_fit(others, self._with_room_for_unequal_rows())
        if best is None or pair.seconds < MIN_HINT_SPEEDUP * best.seconds:
            return ""
        return (
            f"micro batch {pair.setting.micro} is kept as set; --{MICRO} {best.setting.micro} "
            f"--effective_batch_size {self.settings.effective_batch_size} would be about "
            f"{pair.seconds / best.seconds:.1f} times as fast by estimate, with the same steps"
        )


def _formulas_suffice(candidate: Candidate) -> bool:
    """Return whether the closed forms may start a job; a mixture of experts is always simulated."""
    return not candidate.shape.experts and candidates.formulas_suffice(candidate)


def _as_text(flags: dict) -> str:
    return ", ".join(f"{name} {str(value).lower()}" for name, value in flags.items())


def covers(settings) -> bool:
    """Return whether the micro batch may be chosen: half precision, no padding, and results independent of the split.

    The loss of a router is a statistic of a micro batch.
    """
    return _counts_rows(settings) and not getattr(
        load_config(settings).get_text_config(), "output_router_logits", False
    )


def _counts_rows(settings) -> bool:
    return settings.compute_dtype in ("bf16", "fp16") and bool(settings.padding_free)


def _divisors(settings) -> list[int]:
    """Return the micro batches that divide a rank's share of the effective batch."""
    return candidates.divisors(settings.effective_batch_size // settings.data_ranks)


def _micros(settings) -> list[int]:
    """Return the micro batches that the user's arguments leave open; [] if they set it."""
    is_set = any(candidates.is_set(settings, name) for name in (MICRO, "gradient_accumulation_steps"))
    if is_set or not covers(settings):
        return []
    return sorted({*_divisors(settings), settings.per_device_train_batch_size})


def _checkpointings(settings, layers: int, earlier: tuple[int, Checkpointing] | None) -> list[Checkpointing]:
    """Return the kinds of gradient checkpointing that the user's arguments leave open, or the kind that they set."""
    default = candidates.checkpointing_of(settings)
    if not (_counts_rows(settings) and gradient_checkpointing.is_open(settings)):
        return [default]
    kinds = [*candidates.less_checkpointing(settings), *([earlier[1]] if earlier else [])]
    kinds = [kind for kind in dict.fromkeys(kinds) if kind.every <= layers and kind != default]
    place = settings.world_size, settings.planned_gpu
    return [*(kind for kind in kinds if candidates.accepts(settings.request, *place, **kind.flags)), default]


def _with_rows_up_to(longest: int, settings):
    """Return the settings with --max_length set to the longest row (rounded like the collator), and print it.

    --max_length stays if it may have decided padding or the tiles of the MLP.
    """
    width = -(-longest // 8) * 8
    if width >= settings.max_length or not settings.padding_free or settings.tiled_mlp != 1:
        return settings
    print(
        f"plan: the longest row has {longest} tokens: planned with --max_length {width} instead of "
        f"{settings.max_length}",
        flush=True,
    )
    return settings.replace(request=settings.request.put(max_length=width), max_length=width)


def _without_choice(settings):
    """Return the settings without the choice of an earlier plan."""
    if BY_PLAN not in settings.request.source.values():
        return settings
    bare = resolve.resolve(settings.request.with_plan_values("", {}), settings.world_size, settings.planned_gpu)
    resolve.resolve_for_model(bare)
    return bare


def _earlier(settings) -> tuple[int, Checkpointing] | None:
    """Return the pair chosen by an earlier plan of this job or used by the run it continues; None if unknown."""
    if BY_PLAN in settings.request.source.values():
        return settings.per_device_train_batch_size, candidates.checkpointing_of(settings)
    folder = restart.earlier_run(settings)
    try:
        arguments = read_record(folder / "run.json")["arguments"] if folder else {}
        values = {name: entry["value"] for name, entry in arguments.items()}
        return (values[MICRO], candidates.checkpointing_of(SimpleNamespace(**values))) if values else None
    except (KeyError, TypeError, AttributeError):
        return None
