"""Choose micro batch and gradient checkpointing of a job together: the fastest pair that fits its GPUs."""

import hashlib
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
from zerofit.job.request import BY_PLAN, Request
from zerofit.job.run_folder import read_record
from zerofit.model import gradient_checkpointing
from zerofit.model.kernels import liger
from zerofit.model.load import load_config
from zerofit.plan import candidates, gpu_memory, predict, preflight, search, simulate
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.candidates import Checkpointing

MICRO = "per_device_train_batch_size"

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
    plan = Plan(gpu, settings.world_size, total - sum(outside.values()) - margin, outside, None, [], margin=margin)
    file = _kept_file(settings, (row_tokens, earlier, plan.limit, liger.will_run(settings, gpu.device_name)))
    kept = simulate.recall(file)
    with simulate.reused():
        if kept:
            choice, said, is_certain = Choice(**kept["choice"]), kept["said"], False
        else:
            found = _Search(settings, earlier, row_tokens, plan, seconds, steps)
            choice, said, is_certain = *found.result(), found.all_answered
    for sentence in filter(None, (choice.why, said)):
        print(f"plan: {sentence}", flush=True)
    if choice.plan:
        preflight.report(choice.plan, settings)
    if is_certain:
        simulate.keep(file, {"choice": asdict(choice), "said": said})
    return choice


class _Search:
    """The search among the pairs of micro batch and gradient checkpointing that a job leaves open."""

    def __init__(self, settings, earlier, row_tokens: float | None, plan: Plan, seconds: float, steps):
        """Args: earlier: the pair to keep if it fits, None: there is none; the others: as of `choose`."""
        self.settings, self.plan, self.row_tokens = settings, plan, row_tokens
        self.steps, self.seconds, self.began = steps, seconds, time.monotonic()
        self.all_answered, self.continues = True, earlier is not None
        self.unanswered: Candidate | None = None  # the first pair that no simulation has answered
        self.job = candidates.of_settings(settings, settings.planned_gpu)
        self.kinds = _checkpointings(settings, self.job.shape.layers, earlier)
        self.micros = _micros(settings)
        self.pairs = self._pairs(self.micros)
        self.own = self._find((settings.per_device_train_batch_size, candidates.checkpointing_of(settings)))
        self.earlier = self._find(earlier) if earlier else None

    def result(self) -> tuple[Choice, str]:
        """Return the choice, and a sentence on a better micro batch than the user's, "" if there is none."""
        pair = self._decide()
        full = replace(pair, seconds=candidates.step_seconds(pair.shape, pair.setting, pair.gpu, pair.row_length))
        plan = predict.as_plan(full, self.plan.gpu_bytes, self.plan.allowance)
        plan["seconds"] = round(time.monotonic() - self.began, 1)
        # what follows is of rows as long as the mean
        row = (self.row_tokens or self.settings.max_length) * self.settings.objective.documents
        plan |= {"tokens_per_second": round(pair.rows_of_a_step * row / pair.seconds, 1)}
        if self.steps:
            hours = self.steps * pair.seconds * pair.setting.ranks / 3600
            plan |= {"steps": self.steps, "gpu_hours": round(hours, 3)}
        flags = self._flags(pair)
        return Choice(plan, flags, self._why(pair, plan, flags) if flags else ""), self._better_micro_batch(pair)

    def _pairs(self, micros: list[int]) -> list[Candidate]:
        """Return the job in each pair, with the seconds of rows as long as the mean."""
        mean = self.row_tokens or self.settings.max_length
        rows = mean * self.settings.objective.documents / self.settings.ranks_that_split("tokens")
        pairs = []
        kinds = self.kinds if len(self.kinds) > 1 else None
        for one in candidates.varied(self.job, self.settings, micros or None, kinds):
            real = replace(one.setting, tokens=max(1, round(rows * one.setting.micro)))
            seconds = candidates.step_seconds(one.shape, real, one.gpu, round(mean))
            pairs.append(replace(one, seconds=seconds))
        return pairs

    def _find(self, key: tuple[int, Checkpointing]) -> Candidate | None:
        """Return the pair of this micro batch, or of the only one, with this checkpointing; None: it is not open."""
        micro = key[0] if self.micros else self.job.setting.micro
        alike = (one for one in self.pairs if (one.setting.micro, _checkpointing(one)) == (micro, key[1]))
        return next(alike, None)

    def _decide(self) -> Candidate:
        """Return the chosen pair."""
        only = len(self.pairs) == 1  # the job is as it is
        plan = self.plan if only else replace(self.plan, limit=int(self.plan.limit / _unequal_rows()))
        sure = [one for one in self.pairs if _is_described(one) and search.fits(one, plan)]
        self.sure = search.preferred(sure, plan) or self.own
        pair = search.search(
            self.pairs, plan, self._ask, first=self.earlier, is_described=_is_described,
            has_time=lambda: not only,
        )  # fmt: skip
        if pair is not None:
            return pair
        smallest = min(self.pairs, key=lambda one: one.peak)
        limit = self.plan.limit + self.plan.margin
        for pair in [self.own, smallest] if self.own.peak <= self.plan.limit else [smallest]:
            if pair.answer is None:
                predict.ask_first_rank(pair, limit, self._left())
            self.all_answered &= not pair.failed
            if pair.peak <= limit:
                break
        return pair

    def _ask(self, pair: Candidate) -> None:
        """Simulate a pair, as long as the run would gain by it."""
        gain = (self.steps or 0) * (self.sure.seconds - pair.seconds)
        patience = min(PATIENCE, self.settings.ddp_timeout / 2)  # other ranks may be waiting for this one
        self.seconds = max(self.seconds, min(patience, gain))
        predict.ask_first_rank(pair, self.plan.limit + self.plan.margin, self._left(), waits=False)
        if pair.failed:
            self.all_answered, self.unanswered = False, self.unanswered or pair

    def _left(self) -> float:
        return max(0.0, self.began + self.seconds - time.monotonic())

    def _flags(self, pair: Candidate) -> dict:
        """Return the arguments of a pair that are open."""
        flags = {MICRO: pair.setting.micro} if self.micros else {}
        return flags | (_checkpointing(pair).flags if len(self.kinds) > 1 else {})

    def _why(self, pair: Candidate, plan: dict, flags: dict) -> str:
        how = "formula" if "by" in plan else "simulation"
        size = f"{plan['peak_bytes'] / GIB:.1f} of {plan['limit_bytes'] / GIB:.1f} GiB a rank by {how}"
        said, faster = f"{_words(flags)}: {size}", self._not_checked(pair)
        if pair is self.own:
            return said + (faster or "; nothing that fits is faster by estimate")
        default = [f"micro batch {self.own.setting.micro}"] if MICRO in flags else []
        default += ["every layer recomputed"] if "gradient_checkpointing" in flags else []
        times = self.own.seconds / pair.seconds
        return f"{said}; with {' and '.join(default)} a step would take about {times:.2f} times as long{faster}"

    def _not_checked(self, pair: Candidate) -> str:
        """Return the end of a sentence on a faster pair of which nobody knows whether it fits, or ""."""
        if self.unanswered is None or pair.seconds < search.EQUAL * self.unanswered.seconds:
            return ""
        faster = self.unanswered
        return (
            f"; {_words(self._flags(faster))} would be about {pair.seconds / faster.seconds:.2f} times as fast by "
            f"estimate, but was not checked ({faster.failed}): `make plan` with the same arguments waits for it"
        )

    def _better_micro_batch(self, pair: Candidate) -> str:
        """Return a sentence on a micro batch that is much faster than the one that the user has given, or ""."""
        # A run that goes on may have had too little memory.
        if self.micros or self.continues or not covers(self.settings):
            return ""
        others = [one for one in self._pairs(_divisors(self.settings)) if _is_described(one)]
        best = search.preferred([one for one in others if one.peak <= self.plan.limit / _unequal_rows()], self.plan)
        if best is None or pair.seconds < MUCH_FASTER * best.seconds:
            return ""
        return (
            f"micro batch {pair.setting.micro} is kept, as it was given: --{MICRO} {best.setting.micro} "
            f"--effective_batch_size {self.settings.effective_batch_size} would be about "
            f"{pair.seconds / best.seconds:.1f} times as fast by estimate, with the same steps"
        )


def _checkpointing(one: Candidate) -> Checkpointing:
    return Checkpointing(one.setting.every, one.setting.selective, one.setting.activation_offload)


def _unequal_rows() -> float:
    """Return how many times the memory of equal rows those of different lengths may hold."""
    return 1 if allocator.expandable_segments() else gpu_memory.UNEQUAL_ROWS


def _is_described(candidate: Candidate) -> bool:
    """Return whether the closed forms may start a job; a mixture of experts is simulated at any stage."""
    return not candidate.shape.experts and candidates.is_described(candidate)


def _words(flags: dict) -> str:
    return ", ".join(f"{name} {str(value).lower()}" for name, value in flags.items())


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
