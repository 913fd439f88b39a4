"""Predict the peak memory of one setting, by simulation where possible."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from zerofit.base import allocator, hardware
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.base.paths import cache_root
from zerofit.plan import candidates, gpu_memory, simulate
from zerofit.plan.candidate import Candidate
from zerofit.plan.formulas import Shape
from zerofit.plan.simulate import Question

# Layers with which deeper models are simulated, to extrapolate linearly. Stages 1 and 2 reduce gradients in buckets of
# 5e8 numbers across layers: the fill of the last bucket varies with the depth, by up to 3.5 % of the total.
LAYERS_MEASURED = {True: (16, 24), False: (6, 7)}  # {stage 1 or 2: the first pair of depths}

LAYERS_WHOLE = {True: 40, False: 12}

MOST_OF_ALL = 0.6  # of the layers: two depths with more, and others where they disagree, take longer than the model

LAYERS_OF_CHOSEN = 48  # up to here all layers of a setting that fits are simulated: 8B 20 s, 80 layers would take 50 s

UNUSED_AT_MOST = 1.25  # least bytes that do / allocated ones: 1.22 in the worst of benchmarks/published

# Of the allocated bytes of a few layers: expandable segments that leave less than this leave no larger share with all
# layers. LoRA of 8B and QLoRA of 7B left 1.1 and 1.3 % with 7 layers, 0.4 and 0.6 % with 32.
LITTLE_UNUSED = 0.02

LONGEST_PATTERN = 8  # layers after which kinds of layers may repeat: attention in every 8th layer of Jamba

OFF_THE_LINE = 0.001  # of a model's parameters: what an extended answer may lack or have too much of them

KEPT_GATHERED = 1e9  # parameters that stage 3 keeps gathered (stage3_max_live_parameters): linear below and above

STEPPED_AT_ONCE = 1e9  # numbers (stage 3's sub_group_size); the fp32 copy of a rank's share grows only up to it


def ask(candidate: Candidate, limit: int = 0) -> None:
    """Store the simulation's answer (the higher of first and last rank) or failure in the candidate.

    The last rank is simulated only if the first one's tensors fit. Where unused segments may matter, these are both
    simulated with all layers, unless the model has many and does not come near the limit.
    Args: limit: bytes of torch's allocator; 0: there is none, and unused segments do not matter.
    """
    ranks = sorted({0, candidate.setting.ranks - 1})
    _ask(candidate, ranks[:1])
    first = candidate.answer
    if first is None or (limit and candidate.allocated > limit):
        return
    if needs_all_layers(candidate, limit):
        _ask(candidate, ranks, whole=True)
        candidate.failed = ""  # the extended answer is kept then
    elif ranks[1:]:
        _ask(candidate, ranks[1:])
        candidate.answer, candidate.failed = max((first, candidate.answer), key=_peak), ""


def _peak(answer: dict) -> int:
    return max(answer["total"].values())


def _ask(candidate: Candidate, asked: Sequence[int], seconds: float | None = None, whole: bool = False) -> None:
    """Store the simulation's answer or failure in the candidate. Args: as for `answer_of`."""
    setting = candidate.setting
    request, has_liger = candidates.for_simulation(candidate.request), candidate.shape.liger
    question = Question(request, setting.ranks, gpu=candidate.gpu, liger=has_liger)
    answer = answer_of(
        question, candidate.shape, zero=setting.zero, every=setting.every, asked=asked, seconds=seconds, whole=whole,
    )  # fmt: skip
    if isinstance(answer, Exception):
        candidate.failed = str(answer)
    else:
        candidate.answer, candidate.failed = answer, ""


def needs_all_layers(candidate: Candidate, limit: int) -> bool:
    """Return whether to simulate all layers of a candidate that fits, for the segments that they leave unused."""
    if not _lacks_replay(candidate.answer) or candidate.allocated > limit:
        return False
    return candidate.shape.layers <= LAYERS_OF_CHOSEN or UNUSED_AT_MOST * candidate.allocated > limit


def _lacks_replay(answer: dict | None) -> bool:
    """Return whether an extended answer does not say what all layers leave unused in the allocator's segments."""
    return bool(answer) and answer.get("lacks_replay", False)


def answer_of(
    question: Question,
    shape: Shape,
    *,
    zero: int,
    every: int,
    asked: Sequence[int] = (0,),
    seconds: float | None = None,
    whole: bool = False,
) -> dict | simulate.SimulationFailed:
    """Return the simulation's answer of the rank in `asked` with the highest peak, or why there is none.

    Args: question: of any rank and all layers; shape: of its model; zero: its stage; every: every n-th layer is
        checkpointed, 0: none; seconds: time limit, None: no limit; whole: simulate all layers.
    Raises: UserError for the user's mistakes.
    """
    began, before, gpu = time.perf_counter(), None, question.gpu
    if gpu is not None:
        gpu = replace(gpu, node_gbs=hardware.NODE_LINK_GBS)  # no effect on memory: equal questions share an answer
    for depths in [(None,)] if whole else _depths(zero, shape, every, question.ranks):
        questions = [
            replace(question, rank=rank, gpu=gpu, overrides={"num_hidden_layers": depth} if depth else {})
            for rank in asked
            for depth in reversed(depths)  # the longest first: they run in parallel
        ]
        seconds_left = None if seconds is None else seconds - (time.perf_counter() - began)
        answers = simulate.run_all(questions, cache_root() / "simulations", seconds_left)
        for answer in answers:
            if isinstance(answer, UserError):
                raise answer
            if isinstance(answer, Exception):
                return answer
        if len(depths) == 1:
            break
        pairs = list(zip(answers[1::2], answers[::2], strict=True))
        slopes = [_slopes(low, high, depths) for low, high in pairs]
        all_there = all(_has_all_parameters(low, high, depths, shape) for low, high in pairs)
        if all_there and _is_linear(pairs, slopes, before, zero, shape, question.ranks):
            answers = [_extended(low, high, depths, shape.layers) for low, high in pairs]
            break
        before = slopes
    return max(answers, key=_peak)


def _depths(zero: int, shape: Shape, every: int, ranks: int) -> list[tuple]:
    """Return pairs of layer counts to extrapolate from; the last, (None,), is the full model.

    The counts are multiples of `every`, and of the layers after which kinds of layers repeat; a later pair is for peaks
    that are at different moments in the earlier one."""
    for pattern in range(1, LONGEST_PATTERN + 1) if shape.cut else ():
        pairs = _pairs(zero, shape, max(1, every), pattern * max(1, every), ranks)
        if on_line := [pair for pair in pairs if _on_a_line(shape, pair)]:
            return [*on_line, (None,)]
    return [(None,)]


def _pairs(zero: int, shape: Shape, every: int, pattern: int, ranks: int) -> list[tuple[int, int]]:
    """Return up to three pairs of layer counts below the model's, multiples of `pattern`."""
    buckets = zero in (1, 2)
    first, second = LAYERS_MEASURED[buckets]
    distance = second - first
    stored = _numbers_of_a_parameter(shape)
    if zero == 3 and shape.parameters * stored > KEPT_GATHERED:
        layer = (shape.parameters - 2 * shape.vocabulary * shape.hidden) / shape.layers
        first = max(first, math.ceil(KEPT_GATHERED / (layer * stored)))
        if (
            shape.trainable / ranks > 1.25 * STEPPED_AT_ONCE
        ):  # else the result is at most 1.4 GiB too high, in one phase
            small = STEPPED_AT_ONCE * ranks + shape.largest - 2 * shape.vocabulary * shape.hidden
            first = max(first, math.ceil(small / layer) + 1)  # a sub-group is filled with whole tensors
    if every > 1 and zero == 3:
        first += 4  # prefetching of layers that are not recomputed is steady only later
    small, distance = (-(-count // pattern) * pattern for count in (first, distance))
    pairs = []
    while len(pairs) < 3 and shape.layers > max(LAYERS_WHOLE[buckets], (small + distance) / MOST_OF_ALL):
        pairs.append((small, small + distance))
        small += distance  # its answer is cached already
    return pairs


def _on_a_line(shape: Shape, depths: tuple[int, int]) -> bool:
    """Return whether the first layers, extended from two depths, have the parameters of the model's."""
    few, more = (sum(shape.by_layer[:depth]) for depth in depths)
    extended = _line(few, more, depths, shape.layers)
    return abs(extended - sum(shape.by_layer)) <= OFF_THE_LINE * shape.parameters


def _line(low: float, high: float, depths: tuple[int, int], layers: int) -> float:
    """Return the value for `layers` on the line through those for two depths."""
    small, large = depths
    return high + (high - low) / (large - small) * (layers - large)


def _numbers_of_a_parameter(shape: Shape) -> float:
    """Return 0.25 for packed 4-bit weights, four of which are one 16-bit number of DeepSpeed's; else 1."""
    return 0.25 if shape.frozen_bytes < 1 else 1


def _is_linear(
    pairs: list[tuple[dict, dict]], slopes: list[dict], before: list[dict] | None, zero: int, shape: Shape, ranks: int
) -> bool:
    """Return whether the answers for two depths may be extended to all layers.

    Args: pairs: the answers of each rank; slopes: their `_slopes`; before: those of the two depths before, None at
        first.
    """
    if not all(_same_moments(low, high) for low, high in pairs):
        return False
    packed = shape.frozen_bytes < 1
    return zero != 3 or _level(slopes, shape, ranks) or (packed and _alike(slopes, before))


def _has_all_parameters(low: dict, high: dict, depths: tuple[int, int], shape: Shape) -> bool:
    """Return whether two depths, extended, have the model's parameters, where the simulation counts them whole.

    They do not in a model whose first layers depend on how many there are.
    """
    extended = _line(low["parameters"], high["parameters"], depths, shape.layers)
    return not high.get("whole_parameters") or abs(extended - shape.parameters) <= OFF_THE_LINE * shape.parameters


def _same_moments(low: dict, high: dict) -> bool:
    """Return whether two depths peak at the same moment of training: no part shrinks with more layers."""
    return all(
        size >= low["peak"][phase][part] - 0.001 * low["total"][phase]
        for phase, parts in high["peak"].items()
        if phase in ("forward", "backward", "step")
        for part, size in parts.items()
    )


def _slopes(low: dict, high: dict, depths: tuple[int, int]) -> dict[str, float]:
    """Return the bytes by which each phase's buffers grow with a layer."""
    return {
        phase: (parts["buffers"] - low["peak"][phase]["buffers"]) / (depths[1] - depths[0])
        for phase, parts in high["peak"].items()
        if phase in ("forward", "backward", "step")
    }


def _level(slopes: list[dict[str, float]], shape: Shape, ranks: int) -> bool:
    """Return whether stage 3's gathered parameters have stopped growing with the depth.

    A layer may add its shards to the step's buffers: at most 16 bytes a parameter over the ranks, gradients and states
    in fp32. The layers that a forward or backward holds gathered must not grow, unless stage 3 keeps all of them.
    """
    if shape.parameters * _numbers_of_a_parameter(shape) <= KEPT_GATHERED:
        return True
    layer = shape.parameters / shape.layers
    gathered = layer * (shape.frozen_bytes if shape.frozen else 2.0)
    bounds = {"forward": 0.05 * gathered, "backward": 0.05 * gathered, "step": 16 * layer / ranks}
    return all(slope <= bounds[phase] for by_phase in slopes for phase, slope in by_phase.items())


def _alike(slopes: list[dict[str, float]], before: list[dict[str, float]] | None) -> bool:
    """Return whether buffers grow as they did between the two depths before: linear, however steep.

    So does a packed base, whose gathered weights bitsandbytes keeps until the graph is freed.
    """
    return before is not None and all(
        abs(slope - earlier[phase]) <= 0.02 * max(slope, earlier[phase])
        for by_phase, earlier in zip(slopes, before, strict=True)
        for phase, slope in by_phase.items()
        if max(slope, earlier[phase]) > 0
    )


def _extended(low: dict, high: dict, depths: tuple[int, int], layers: int) -> dict:
    """Return the answer for `layers`, extrapolated linearly from those for two depths.

    Unused segments do not grow linearly: those of the deeper model stand for all layers only where they are little.
    """

    def line(a, b):
        return int(_line(a, b, depths, layers))

    total = {phase: line(low["total"][phase], value) for phase, value in high["total"].items()}
    peak = {}
    for phase, parts in high["peak"].items():
        parts = {part: max(0, line(low["peak"][phase][part], value)) for part, value in parts.items()}
        # If the two peaks are at different moments, only the sum of the parts is linear: scale the parts to it.
        too_much = sum(parts.values()) / max(1, total[phase])
        peak[phase] = {part: int(value / too_much) for part, value in parts.items()}
    numbers = {name: line(low[name], high[name]) for name in ("host", "host_saving", "parameters", "trainable")}
    answer = high | {"peak": peak, "total": total, "extended_from_layers": list(depths)} | numbers
    replayed = high.get("allocator")
    if replayed and not _is_little(replayed["least"] - replayed["allocated"], replayed["allocated"]):
        answer |= {"allocator": None, "lacks_replay": True}
    return answer


def _is_little(unused: int, allocated: int) -> bool:
    """Return whether a few layers leave so little of expandable segments unused that all layers do too."""
    return allocator.expandable_segments() and unused <= LITTLE_UNUSED * allocated


# --- the check of a launch ---


def place_of(settings) -> tuple[hardware.Gpu, int, dict[str, int]]:
    """Return (the GPU of a job on GPUs, its bytes, {reason: bytes} of them outside torch's allocator)."""
    ranks = settings.world_size
    local_ranks = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or ranks))
    gpu = settings.planned_gpu or hardware.find("detect", local_ranks)
    total = int((settings.memory_limit or gpu.memory_gib) * GIB)
    return gpu, total, gpu_memory.outside_allocator(gpu, ranks, local_ranks)


def predict(settings, seconds: float | None = None) -> dict | None:
    """Return the predicted memory of the job; None on a CPU without --memory_limit, and for a pipeline on a CPU.

    Args: seconds: how long to wait for the simulation, None: until it ends.
    Returns: as `as_plan`; bytes on a CPU are those of a CPU run. If the simulation of a GPU fails, the closed forms are
        used; also if it takes more than `seconds`, but only if the job fits by them. On a CPU it is waited for.
    Raises: SimulationFailed on a CPU, which the closed forms do not cover; UserError for the user's mistakes.
    """
    cpu, is_pipeline = settings.use_cpu, settings.ranks_that_split("layers") > 1
    if cpu and (not settings.memory_limit or is_pipeline):
        return None
    gpu, total, outside = (None, int(settings.memory_limit * GIB), {}) if cpu else place_of(settings)
    began = time.perf_counter()
    candidate = candidates.of_settings(settings, gpu)
    if is_pipeline:
        candidate.failed = "no simulation covers pipelines"
    else:
        ask_first_rank(candidate, total - sum(outside.values()), seconds)
    if cpu and candidate.failed:
        raise simulate.SimulationFailed(candidate.failed)
    return as_plan(candidate, total, outside) | {"seconds": round(time.perf_counter() - began, 1)}


def as_plan(candidate: Candidate, total: int, outside: dict[str, int]) -> dict:
    """Return what run.json and the report keep of a prediction. total: bytes of the GPU; outside: as `place_of`.

    Returns: {"peak_bytes", "limit_bytes", "phase", "peak", "step_seconds" (an estimate; None on a CPU and for a
        pipeline), "stage" (of a pipeline), "by" (why the closed forms decide, where they do), ...}.
    """
    limit = total - sum(outside.values())
    parts = {part: int(size) for part, size in candidate.formula.items()}
    answer = candidate.answer or {"total": {"backward": sum(parts.values())}, "peak": {"backward": parts}, "host": 0}
    gpu, stage = candidate.gpu, candidate.stage
    by = candidate.failed or ("" if candidate.answer else candidates.ENOUGH)
    return {
        "peak_bytes": candidate.allocated,
        "limit_bytes": limit - candidate.unused["least"],
        "reserved_bytes": min(candidate.reserved, limit),
        "outside_bytes": sum(outside.values()),
        "phase": max(answer["total"], key=answer["total"].get),
        "peak": answer["peak"],
        "host": answer["host"],
        "gpu": gpu.device_name if gpu else "cpu",
        "step_seconds": None if gpu is None or stage is not None else candidate.seconds,
        **({"stage": stage} if stage is not None else {}),
        **({"by": by} if by else {}),
    }


def ask_first_rank(candidate: Candidate, limit: int, seconds: float | None, waits: bool = True) -> None:
    """Store the answer of rank 0 in the candidate, with all layers where unused segments decide.

    A launch is refused by a simulation only, and there are no closed forms of a CPU: these simulations are waited for.
    Without `waits` none is, and without the simulation of all layers there is no answer.
    Args: limit: bytes of torch's allocator; seconds: how long to wait, None: until it ends.
    """
    began = time.perf_counter()
    if waits and (candidate.gpu is None or candidate.allocated > limit):
        seconds = None
    _ask(candidate, [0], seconds)
    if not _lacks_replay(candidate.answer) or not candidate.allocated <= limit < UNUSED_AT_MOST * candidate.allocated:
        return
    few_layers = candidate.answer
    if waits and candidate.peak > limit:
        seconds = None
    _ask(candidate, [0], None if seconds is None else seconds - (time.perf_counter() - began), whole=True)
    if candidate.failed:
        candidate.answer, candidate.failed = (few_layers, "") if waits else (None, candidate.failed)
