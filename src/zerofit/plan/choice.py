"""Choose micro batch and gradient checkpointing of a job together: the fastest pair that fits its GPUs."""

import hashlib
import itertools
import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from zerofit.base import allocator
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.base.paths import cache_root
from zerofit.checkpoint import restart
from zerofit.config import resolve
from zerofit.data import tokens
from zerofit.job import program
from zerofit.job.request import BY_PLAN, Request
from zerofit.job.run_folder import read_record
from zerofit.model import gradient_checkpointing
from zerofit.model.kernels import liger
from zerofit.model.load import load_config
from zerofit.parallel import whole_layers
from zerofit.plan import candidates, formulas, gpu_memory, predict, preflight, simulate
from zerofit.plan.candidate import Candidate
from zerofit.plan.candidates import Checkpointing
from zerofit.plan.speed import step

MICRO = "per_device_train_batch_size"

NEARLY = 1.03  # times the least seconds: estimates that are taken as equal; the pair with less memory is chosen

MUCH_FASTER = 1.2  # times as fast by estimate: from here on a better micro batch than the user's is worth a line

PATIENCE = 300  # seconds that a start waits for simulations at most, where the run would gain as many


@dataclass(frozen=True)
class Choice:
    """What the plan of a start has chosen."""

    plan: dict | None = None  # the prediction, as `predict.predict`
    flags: dict = field(default_factory=dict)  # {argument: value} that were open; {}: none was
    why: str = ""  # a sentence for the terminal and run.json

    def of(self, request: Request) -> Request:
        """Return the request with the choice."""
        return request.drop("search_batch_size").planned(self.why, self.flags) if self.flags else request


@dataclass(frozen=True)
class Pair:
    """A micro batch with a gradient checkpointing, and the job with both by the closed forms."""

    micro: int
    checkpointing: Checkpointing
    job: Candidate  # its bytes are those of rows that are all as long as the longest
    seconds: float  # of a step with rows as long as the mean


def for_rows(settings, train_set, eval_set) -> Choice:
    """Return the choice for a job with these rows, print it, and whether the job fits. Errors: as `preflight.check`."""
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

    The closed forms decide where they leave room. Else what is faster is simulated, and taken if it fits. A result is
    kept for the next start of the same job.
    Args: row_tokens: the mean of the training rows; longest: of all rows; steps: of the run. None: unknown. seconds:
        how long to wait for simulations, unless the run would gain more.
    Raises: as `preflight.check`.
    """
    if longest and preflight.is_planned(settings):
        settings = _with_rows_up_to(longest, settings)
    if settings.use_cpu or settings.ranks_that_split("layers") > 1:
        return Choice(preflight.check(settings))
    earlier, settings = _earlier(settings), _without_choice(settings)
    gpu, total, outside = predict.place_of(settings)
    settings = settings.replace(planned_gpu=gpu)  # it is looked up once
    margin = int(gpu_memory.MARGIN * total)
    limit = total - sum(outside.values()) - margin
    file = _kept_file(settings, (row_tokens, earlier, limit, liger.will_run(settings, gpu.device_name)))
    kept = simulate.recall(file)
    with simulate.reused():
        if kept:
            choice, said, is_certain = Choice(**kept["choice"]), kept["said"], False
        else:
            search = _Search(settings, earlier, row_tokens, (limit, margin), seconds, steps)
            choice, said, is_certain = *search.result(), search.all_answered
    for sentence in filter(None, (choice.why, said)):
        print(f"plan: {sentence}", flush=True)
    if choice.plan:
        preflight.report(choice.plan, settings)
    if is_certain:
        simulate.keep(file, {"choice": asdict(choice), "said": said})
    return choice


class _Search:
    """The search among the pairs that a job leaves open."""

    def __init__(self, settings, earlier, row_tokens: float | None, room: tuple[int, int], seconds: float, steps):
        """Args: earlier: the pair to keep if it fits, None: there is none; room: bytes of torch's allocator, and those
        that are kept free beside them; the others: as of `choose`.
        """
        self.settings, (self.limit, self.margin), self.row_tokens = settings, room, row_tokens
        self.steps, self.seconds, self.began = steps, seconds, time.monotonic()
        self.all_answered, self.goes_on = True, earlier is not None
        self.unanswered: tuple[Pair, str] | None = None  # the first pair that no simulation has answered, and why
        self.whole = candidates.of_settings(settings, settings.planned_gpu)
        self.kinds = _checkpointings(settings, self.whole.shape.layers, earlier)
        self.micros = _micros(settings)
        self.pairs = self._pairs(self.micros or [self.whole.setting.micro])
        self.own = self._find((settings.per_device_train_batch_size, candidates.checkpointing_of(settings)))
        self.earlier = self._find(earlier) if earlier else None

    def result(self) -> tuple[Choice, str]:
        """Return the choice, and a sentence on a better micro batch than the user's, "" if there is none."""
        pair, plan = self._decide()
        if plan.get("step_seconds"):  # what follows is of rows as long as the mean
            row = (self.row_tokens or self.settings.max_length) * self.settings.objective.documents
            plan |= {"tokens_per_second": round(pair.job.rows_of_a_step * row / pair.seconds, 1)}
        if self.steps and plan.get("step_seconds"):
            hours = self.steps * pair.seconds * pair.job.setting.ranks / 3600
            plan |= {"steps": self.steps, "gpu_hours": round(hours, 3)}
        flags = self._flags(pair)
        return Choice(plan, flags, self._why(pair, plan, flags) if flags else ""), self._better_micro_batch(pair)

    def _pairs(self, micros: list[int]) -> list[Pair]:
        pairs, given = [], self.whole.setting
        mean = self.row_tokens or self.settings.max_length
        rows = mean * self.settings.objective.documents / self.settings.ranks_that_split("tokens")
        for micro, kind in itertools.product(micros, self.kinds):
            most = given.tokens // given.micro * micro
            full = replace(
                given, micro=micro, tokens=most, whole_layers=whole_layers.largest(self.settings, most),
                accumulation=given.micro * given.accumulation // micro,
                every=kind.every, selective=kind.selective, activation_offload=kind.offloaded,
            )  # fmt: skip
            job = candidates.with_formulas(self.whole.request, full, self.whole.shape, self.settings, self.whole.gpu)
            real = replace(full, tokens=max(1, round(rows * micro)))
            seconds = step.seconds(self.whole.shape, real, self.whole.gpu, round(mean))
            pairs.append(Pair(micro, kind, job, seconds))
        return pairs

    def _find(self, key: tuple[int, Checkpointing]) -> Pair | None:
        """Return the pair of this micro batch, or of the only one, with this checkpointing; None: it is not open."""
        micro = key[0] if self.micros else self.whole.setting.micro
        return next((pair for pair in self.pairs if (pair.micro, pair.checkpointing) == (micro, key[1])), None)

    def _decide(self) -> tuple[Pair, dict]:
        """Return the chosen pair and its prediction."""
        sure = self._sure(self.pairs)
        best = self.earlier if self.earlier in sure else _least_memory_of_the_fastest(sure)
        for pair in [] if best and best is self.earlier else self._to_simulate(sure, best):
            plan = self._simulated(pair, best)
            if "by" in plan:
                fits = pair is self.earlier  # nobody knows, but it ran so
                self.unanswered = self.unanswered or (pair, plan["by"])
            else:
                fits = self._fits(plan["peak_bytes"], plan["limit_bytes"] - self.margin)
            if fits:
                return pair, plan
        if best:
            return best, predict.predict(self._job(best), by=candidates.ENOUGH)
        smallest = min(self.pairs, key=lambda pair: pair.job.peak)
        for pair in [self.own, smallest] if self.own.job.peak <= self.limit else [smallest]:
            plan = predict.predict(self._job(pair), self._left())
            self.all_answered &= "by" not in plan
            if plan["peak_bytes"] <= plan["limit_bytes"]:
                break
        return pair, plan

    def _sure(self, pairs: list[Pair]) -> list[Pair]:
        """Return the pairs that fit by the closed forms with their margin, where the closed forms describe the job."""
        if not described(self.settings, self.whole.shape):
            return []
        if len(pairs) == 1:  # the job is as it is
            return [pair for pair in pairs if pair.job.peak <= self.limit]
        return [pair for pair in pairs if self._fits(pair.job.peak, self.limit)]

    def _to_simulate(self, sure: list[Pair], best: Pair | None) -> list[Pair]:
        """Return the pairs that may fit and are faster than the best of the sure ones, the fastest first."""
        if len(self.pairs) == 1:
            return []
        close = [pair for pair in self.pairs if pair not in sure and self._fits(pair.job.by_formula, self.limit)]
        first = [self.earlier] if self.earlier in close else []
        faster = [p for p in close if p not in first and (best is None or p.seconds * NEARLY < best.seconds)]
        return first + sorted(faster, key=lambda pair: pair.seconds)

    def _simulated(self, pair: Pair, best: Pair | None) -> dict:
        """Return the prediction of a pair, by simulation if one answers in time."""
        gain = (self.steps or 0) * ((best or self.own).seconds - pair.seconds)
        patience = min(PATIENCE, self.settings.ddp_timeout / 2)  # other ranks may be waiting for this one
        self.seconds = max(self.seconds, min(patience, gain))
        plan = predict.predict(self._job(pair), self._left(), waits=False)
        self.all_answered &= "by" not in plan
        return plan

    def _left(self) -> float:
        return max(0.0, self.began + self.seconds - time.monotonic())

    def _fits(self, peak: float, limit: int) -> bool:
        return peak * (1 if allocator.expandable_segments() else gpu_memory.UNEQUAL_ROWS) <= limit

    def _flags(self, pair: Pair) -> dict:
        """Return the arguments of a pair that are open."""
        flags = {MICRO: pair.micro} if self.micros else {}
        return flags | (pair.checkpointing.flags if len(self.kinds) > 1 else {})

    def _job(self, pair: Pair):
        """Return the settings with a pair."""
        flags, asked = self._flags(pair), self.settings.request
        if MICRO in flags:
            asked = asked.drop("search_batch_size").put(effective_batch_size=self.settings.effective_batch_size)
        accumulation = pair.job.setting.accumulation
        return self.settings.replace(request=asked.put(**flags), gradient_accumulation_steps=accumulation, **flags)

    def _why(self, pair: Pair, plan: dict, flags: dict) -> str:
        how = "formula" if "by" in plan else "simulation"
        size = f"{plan['peak_bytes'] / GIB:.1f} of {plan['limit_bytes'] / GIB:.1f} GiB a rank by {how}"
        said, faster = f"{_words(flags)}: {size}", self._not_checked(pair)
        if pair is self.own:
            return said + (faster or "; nothing that fits is faster by estimate")
        default = [f"micro batch {self.own.micro}"] if MICRO in flags else []
        default += ["every layer recomputed"] if "gradient_checkpointing" in flags else []
        times = self.own.seconds / pair.seconds
        return f"{said}; with {' and '.join(default)} a step would take about {times:.2f} times as long{faster}"

    def _not_checked(self, pair: Pair) -> str:
        """Return the end of a sentence on a faster pair of which nobody knows whether it fits, or ""."""
        if self.unanswered is None or pair.seconds < NEARLY * self.unanswered[0].seconds:
            return ""
        faster, why_not = self.unanswered
        return (
            f"; {_words(self._flags(faster))} would be about {pair.seconds / faster.seconds:.2f} times as fast by "
            f"estimate, but was not checked ({why_not}): `make plan` with the same arguments waits for it"
        )

    def _better_micro_batch(self, pair: Pair) -> str:
        """Return a sentence on a micro batch that is much faster than the one that the user has given, or ""."""
        # A run that goes on may have had too little memory.
        if self.micros or self.goes_on or not covers(self.settings):
            return ""
        best = _least_memory_of_the_fastest(self._sure(self._pairs(_divisors(self.settings))))
        if best is None or pair.seconds < MUCH_FASTER * best.seconds:
            return ""
        return (
            f"micro batch {pair.micro} is kept, as it was given: --{MICRO} {best.micro} --effective_batch_size "
            f"{self.settings.effective_batch_size} would be about {pair.seconds / best.seconds:.1f} times as fast by "
            "estimate, with the same steps"
        )


def _words(flags: dict) -> str:
    return ", ".join(f"{name} {str(value).lower()}" for name, value in flags.items())


def _least_memory_of_the_fastest(pairs: list[Pair]) -> Pair | None:
    """Return of the pairs that are about as fast as the fastest the one with the least memory; None without any."""
    least = min((pair.seconds for pair in pairs), default=0.0)
    return min((p for p in pairs if p.seconds <= NEARLY * least), key=lambda p: (p.job.peak, p.seconds), default=None)


def described(settings, shape: formulas.Shape) -> bool:
    """Return whether the closed forms describe a job: of a kit's recipe, dense, without whole attention matrices."""
    is_described = not shape.experts and settings.attn_implementation != "eager"
    return is_described and program.if_not_of_kit(settings.recipe) is None


def covers(settings) -> bool:
    """Return whether rows are as a plan counts them, in half precision, not padded, and micro batches sum in any order.

    A router's loss is a statistic of a micro batch.
    """
    return _counts_rows(settings) and not getattr(
        load_config(settings).get_text_config(), "output_router_logits", False
    )


def _counts_rows(settings) -> bool:
    return settings.precision in ("bf16", "fp16") and bool(settings.padding_free)


def _divisors(settings) -> list[int]:
    """Return the micro batches that divide the effective batch of a rank."""
    return candidates.divisors(settings.effective_batch_size // settings.data_ranks)


def _micros(settings) -> list[int]:
    """Return the micro batches that the user's arguments leave open; []: one of them says it."""
    is_set = any(candidates.is_set(settings, name) for name in (MICRO, "gradient_accumulation_steps"))
    if is_set or not covers(settings):
        return []
    return sorted({*_divisors(settings), settings.per_device_train_batch_size})


def _checkpointings(settings, layers: int, earlier: tuple[int, Checkpointing] | None) -> list[Checkpointing]:
    """Return the gradient checkpointing that the user's arguments leave open; the one that they say."""
    own = candidates.checkpointing_of(settings)
    if not (_counts_rows(settings) and gradient_checkpointing.is_open(settings)):
        return [own]
    kinds = [*candidates.less_checkpointing(settings), *([earlier[1]] if earlier else [])]
    kinds = [kind for kind in dict.fromkeys(kinds) if kind.every <= layers and kind != own]
    return [*(kind for kind in kinds if _is_allowed(settings, kind)), own]


def _is_allowed(settings, kind: Checkpointing) -> bool:
    """Return whether the user's other arguments go with a gradient checkpointing."""
    try:
        asked = settings.request.put(**kind.flags)
        resolve.resolve_for_model(resolve.resolve(asked, settings.world_size, settings.planned_gpu))
    except UserError:
        return False
    return True


def _with_rows_up_to(longest: int, settings):
    """Return the settings with --max_length of the longest row, as the collator rounds it, and print it.

    Padding and tiles of the MLP may have been decided from --max_length: then it stays.
    """
    width = -(-longest // 8) * 8
    if width >= settings.max_length or not settings.padding_free or settings.tiled_mlp != 1:
        return settings
    print(
        f"plan: the longest row has {longest} tokens: checked with --max_length {width} instead of "
        f"{settings.max_length}",
        flush=True,
    )
    return settings.replace(request=settings.request.put(max_length=width), max_length=width)


def _without_choice(settings):
    """Return the settings without what an earlier plan has chosen."""
    if BY_PLAN not in settings.request.source.values():
        return settings
    bare = resolve.resolve(settings.request.planned("", {}), settings.world_size, settings.planned_gpu)
    resolve.resolve_for_model(bare)
    return bare


def _earlier(settings) -> tuple[int, Checkpointing] | None:
    """Return the pair that an earlier plan of this job has chosen, or that of the run it goes on with; None: none."""
    if BY_PLAN in settings.request.source.values():
        return settings.per_device_train_batch_size, candidates.checkpointing_of(settings)
    folder = restart.earlier_run(settings)
    try:
        arguments = read_record(folder / "run.json")["arguments"] if folder else {}
        values = {name: entry["value"] for name, entry in arguments.items()}
        return (values[MICRO], candidates.checkpointing_of(SimpleNamespace(**values))) if values else None
    except (KeyError, TypeError, AttributeError):
        return None


def _kept_file(settings, more: tuple) -> Path:
    """Return the file that keeps the choice for a job. more: what it depends on beside the request and the GPU."""
    question = simulate.Question(
        candidates.for_simulation(settings.request), settings.world_size, gpu=settings.planned_gpu
    )
    text = json.dumps([simulate.key(question), *map(repr, more)])
    return cache_root() / "choices" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
