"""Predict the peak memory of one setting, by simulation where possible."""

import functools
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from zerofit.base import allocator, hardware
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.base.paths import cache_root
from zerofit.plan import caching_allocator, candidates, extended_trace, formulas, simulate
from zerofit.plan.formulas import Shape
from zerofit.plan.simulate import Question

# Layers with which deeper models are simulated, to extrapolate linearly. Stages 1 and 2 reduce gradients in buckets of
# 5e8 numbers across layers: the fill of the last bucket varies with the depth, by up to 3.5 % of the total.
LAYERS_MEASURED = {True: (16, 24), False: (6, 7)}  # {stage 1 or 2: the first pair of depths}

LAYERS_WHOLE = {True: 40, False: 12}

LAYERS_OF_CHOSEN = 48  # up to here all layers of a setting that fits are simulated: 8B 20 s, 80 layers would take 50 s

UNUSED_AT_MOST = 1.25  # least bytes that do / allocated ones: 1.22 in the worst of benchmarks/published

# Of the allocated bytes: an extended trace of equal rows that leaves more unused is not believed. QLoRA of 80 layers
# left 24 % extended, 10 % with all of them and in the measured run.
EXTENDED_UNUSED = 0.15

TRACE_ERROR = 0.005  # of the peak: an extended trace that differs more from the extended peak is not used

WIDTHS = 16  # micro batches of different lengths that are simulated where rows vary

LAYERS_OF_ALL_WIDTHS = 256  # widths x simulated layers at most: half a minute on two cores

LONGEST_PATTERN = 8  # layers after which kinds of layers may repeat: attention in every 8th layer of Jamba

OFF_THE_LINE = 0.001  # of a model's parameters: what an extended answer may lack or have too much of them

STEPPED_AT_ONCE = 1e9  # numbers (stage 3's sub_group_size); the fp32 copy of a rank's share grows only up to it


def ask(candidate: candidates.Candidate, ranks: int, gpu, limit: int = 0) -> None:
    """Store the simulation's answer (the higher of first and last rank) or failure in the candidate.

    An extended answer has the unused segments of the deeper of its two models if its trace could not be extended. Then
    a candidate whose tensors fit is simulated with all layers, unless it has many and does not come near the limit.
    Args: limit: bytes of torch's allocator; 0: unused segments do not matter.
    """
    _ask(candidate, ranks, sorted({0, ranks - 1}), gpu)
    if needs_all_layers(candidate, limit):
        _ask(candidate, ranks, [candidate.answer["rank"]], gpu, whole=True)


def needs_all_layers(candidate: candidates.Candidate, limit: int) -> bool:
    """Return whether to simulate all layers of a candidate that fits, for the segments that they leave unused."""
    if candidate.answer is None or not _lacks_layers(candidate.answer) or candidate.allocated > limit:
        return False
    return candidate.shape.layers <= LAYERS_OF_CHOSEN or UNUSED_AT_MOST * candidate.allocated > limit


def vary_rows(candidate: candidates.Candidate, lengths: list[int], ranks: int, gpu) -> None:
    """Replay a candidate's allocations with rows of `lengths`, and store what the allocator then needs in its answer.

    Blocks of each length leave segments that longer rows cannot use; how many depends on the order of the rows, so it
    is that of `extended_trace.usual_order`. Without a trace of all layers nothing is stored.
    """
    setting, shape, answer = candidate.setting, candidate.shape, candidate.answer
    depths = _depths_of_a_trace(_depths(setting.zero, shape, setting.every, ranks)[0], setting.zero, shape)
    layers = sum(depth or shape.layers for depth in depths)
    widths = widths_of(lengths, setting.micro, min(WIDTHS, max(2, LAYERS_OF_ALL_WIDTHS // layers)))
    if answer is None or len(set(widths)) == 1:
        return
    varied = _asked(candidate, ranks, [answer["rank"]], gpu, widths)
    if not isinstance(varied, Exception) and varied.get("allocator") and not _lacks_layers(varied):
        candidate.answer = answer | {
            "allocator": varied["allocator"], "equal_rows": answer["allocator"], "widths": widths,
        }  # fmt: skip


def widths_of(lengths: list[int], micro: int, count: int) -> tuple[int, ...]:
    """Return the tokens of the rows of `count` micro batches, in a drawn order after the median.

    They are the quantiles of the longest of `micro` rows, the highest of them the longest row of all. The first micro
    batch has the same place in all orders of `extended_trace.usual_order`: behind the longest, nothing would be unused.
    """
    ordered = sorted(lengths)
    chosen = [ordered[int(((i + 0.5) / count) ** (1 / micro) * len(ordered))] for i in range(count - 1)]
    chosen.append(ordered[-1])
    first = chosen.pop(count // 2 - 1)
    random.Random(0).shuffle(chosen)
    chosen = [first, *chosen]
    return tuple(-(-length // 8) * 8 for length in chosen)  # as the collator rounds


def _lacks_layers(answer: dict) -> bool:
    """Return whether the allocator's replay had fewer layers than the model."""
    return "extended_from_layers" in answer and not answer.get("all_layers_replayed")


def _ask(candidate: candidates.Candidate, ranks: int, asked: list[int], gpu, whole: bool = False) -> None:
    answer = _asked(candidate, ranks, asked, gpu, whole=whole)
    if isinstance(answer, Exception):
        candidate.failed = str(answer)
    else:
        candidate.answer = answer


def _asked(
    candidate: candidates.Candidate, ranks: int, asked: list[int], gpu, widths: tuple[int, ...] = (), whole=False
):
    """Return `answer_of` the candidate."""
    setting = candidate.setting
    request = candidates.drop_flags(candidate.request, "offload_path")  # from host memory a GPU holds as much, or more
    question = Question(request, ranks, gpu=gpu, widths=widths)
    return answer_of(question, candidate.shape, zero=setting.zero, every=setting.every, asked=asked, whole=whole)


def answer_of(
    question: Question, shape: Shape, *, zero: int, every: int, asked: Sequence[int] = (0,),
    seconds: float | None = None, whole: bool = False,
):  # fmt: skip
    """Return the simulation's answer of the rank in `asked` with the highest peak, or a SimulationFailed.

    Args: question: of any rank and all layers; shape: of its model; zero: its stage; every: every n-th layer is
        checkpointed, 0: none; seconds: time limit, None: no limit; whole: simulate all layers.
    Raises: UserError for the user's mistakes.
    """
    began, before, gpu, widths = time.perf_counter(), None, question.gpu, question.widths
    if gpu is not None:
        gpu = replace(gpu, node_gbs=hardware.NODE_LINK_GBS)  # no effect on memory: equal questions share an answer
    tried = [(None,)] if whole else _depths(zero, shape, every, question.ranks)
    for depths in [_depths_of_a_trace(tried[0], zero, shape)] if widths else tried:
        questions = [
            replace(question, rank=rank, gpu=gpu, overrides={"num_hidden_layers": d} if d else {})
            for rank in asked
            for d in reversed(depths)  # the longest first: they run in parallel
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
        all_there = all(_has_all_parameters(low, high, depths, shape) for low, high in pairs)
        if widths and not all_there:
            return simulate.SimulationFailed("few layers do not stand for all layers of this model")
        slopes = [_slopes(low, high, depths) for low, high in pairs]
        if all_there and (widths or _is_linear(pairs, slopes, before, zero, shape, question.ranks)):
            room = candidates.room(gpu, question.ranks) if gpu else None
            answers = [_extended(low, high, depths, shape.layers, room, bool(widths)) for low, high in pairs]
            break
        before = slopes
    by_rank = [answer | {"rank": rank} for rank, answer in zip(asked, answers, strict=True)]
    return max(by_rank, key=lambda answer: max(answer["total"].values()))


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
    if zero == 3 and shape.parameters * stored > candidates.KEPT_GATHERED:
        layer = (shape.parameters - 2 * shape.vocabulary * shape.hidden) / shape.layers
        first = max(first, math.ceil(candidates.KEPT_GATHERED / (layer * stored)))
        if (
            shape.trainable / ranks > 1.25 * STEPPED_AT_ONCE
        ):  # else the result is at most 1.4 GiB too high, in one phase
            small = STEPPED_AT_ONCE * ranks + shape.largest - 2 * shape.vocabulary * shape.hidden
            first = max(first, math.ceil(small / layer) + 1)  # a sub-group is filled with whole tensors
    if every > 1 and zero == 3:
        first += 4  # prefetching of layers that are not recomputed is steady only later
    small, distance = (-(-count // pattern) * pattern for count in (first, distance))
    pairs = []
    while len(pairs) < 3 and shape.layers > max(LAYERS_WHOLE[buckets], small + distance):
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


def _depths_of_a_trace(depths: tuple, zero: int, shape: Shape) -> tuple:
    """Return the layer counts whose trace is extended: at stage 0, which gathers nothing, the least that repeat."""
    if zero or len(depths) == 1:
        return depths
    unit = depths[1] - depths[0]
    least = (3 * unit, 4 * unit)
    return least if _on_a_line(shape, least) else depths


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
    if shape.parameters * _numbers_of_a_parameter(shape) <= candidates.KEPT_GATHERED:
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


def _extended(
    low: dict, high: dict, depths: tuple[int, int], layers: int, room: int | None = None, varied: bool = False
) -> dict:
    """Return the answer for `layers`, extrapolated linearly from those for two depths.

    Args: room: of the GPU's allocator. varied: rows differ in length.
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
    return answer | _replayed(low, high, depths, layers, max(total.values()), room, varied)


def _replayed(
    low: dict, high: dict, depths: tuple[int, int], layers: int, allocated: int, room: int | None, varied: bool
) -> dict:
    """Return {"allocator": what it needs with all layers, "all_layers_replayed": whether the trace could be extended}.

    Otherwise it is what the deeper of the two needs.
    """
    without = {"events": None, "all_layers_replayed": False}
    if not high.get("events"):  # of a CPU
        return without
    try:
        events = extended_trace.extend(low["events"], high["events"], depths, layers)
    except extended_trace.NotRegular:
        return without
    needs = caching_allocator.of_both_kinds(extended_trace.usual_order(events) if varied else events, room)
    if abs(needs["segments"]["allocated"] - allocated) > TRACE_ERROR * allocated:
        return without
    mode = needs["expandable" if allocator.expandable_segments() else "segments"]
    if not varied and mode["least"] > (1 + EXTENDED_UNUSED) * mode["allocated"]:
        return without
    return {"events": None, "all_layers_replayed": True, "allocator": needs}


def allowance_of(gpu, ranks: int, node: int = formulas.GPUS_OF_A_NODE) -> dict[str, int]:
    """Return {reason: bytes} of the GPU memory outside torch's allocator."""
    return {"CUDA context": candidates.context_bytes(gpu), "NCCL buffers": candidates.nccl_bytes(ranks, node)}


def _with_all_layers(answer: dict, ask: Callable, gpu, limit: int, seconds: float | None, waits: bool):
    """Return the answer with all layers if unused segments decide, and if there is time; else the given one.

    Without them it is waited for: only that simulation may refuse a job whose tensors fit.
    Args: ask: `answer_of` the job. waits: False: it is not waited for, and what failed or took too long is returned as
        a SimulationFailed.
    """
    allocated = max(answer["total"].values()) + candidates.workspace_bytes(gpu)
    if not _lacks_layers(answer) or not allocated <= limit < UNUSED_AT_MOST * allocated:
        return answer
    if waits and allocated + candidates.beyond_allocated(answer, allocated)["least"] > limit:
        seconds = None
    whole = ask(seconds=seconds, whole=True)
    return answer if isinstance(whole, Exception) and waits else whole


def predict_stages(settings) -> dict | None:
    """Return the memory of the fullest stage of a pipeline by the closed forms, in predict's form; None on a CPU.

    Also "stage", its number, and "by": that no simulation covers pipelines.
    """
    if settings.use_cpu:
        return None
    gpu, total, allowance = place_of(settings)
    outside = sum(allowance.values())
    stage, parts = candidates.fullest_stage(candidates.shape_of(settings), candidates.setting_of(settings), settings)
    peak = candidates.peak_by_formula(parts, gpu)
    return {
        "peak_bytes": peak, "limit_bytes": total - outside, "reserved_bytes": peak, "outside_bytes": outside,
        "phase": "backward", "host": 0, "gpu": gpu.device_name, "step_seconds": None,
        "peak": {"backward": {part: int(size) for part, size in parts.items()}},
        "stage": stage, "by": "no simulation covers pipelines",
    }  # fmt: skip


def place_of(settings) -> tuple[hardware.Gpu, int, dict[str, int]]:
    """Return (the GPU of a job on GPUs, its bytes, {reason: bytes} of them outside torch's allocator)."""
    ranks = settings.world_size
    local_ranks = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or ranks))
    gpu = settings.planned_gpu or hardware.find("detect", local_ranks)
    return gpu, int((settings.memory_limit or gpu.memory_gib) * GIB), allowance_of(gpu, ranks, local_ranks)


def predict(settings, seconds: float | None = None, waits: bool = True) -> dict | None:
    """Return the predicted memory of the job, or None on a CPU without --memory_limit.

    Args: seconds: how long to wait for the simulation, None: until it ends; waits: wait longer for an answer that only
        a simulation may give.
    Returns: {"peak_bytes", "limit_bytes", "phase", "peak", "step_seconds" (an estimate; None on a CPU), ...}; bytes on
        a CPU are those of a CPU run. If the simulation of a GPU fails, the closed forms are used and "by" holds the
        reason; also if it takes more than `seconds`, but only if the job fits by them. On a CPU it is waited for.
    Raises: SimulationFailed on a CPU, which the closed forms do not cover; UserError for the user's mistakes.
    """
    cpu = settings.use_cpu
    if cpu and not settings.memory_limit:
        return None
    ranks = settings.world_size
    gpu, total, allowance = (None, int(settings.memory_limit * GIB), {}) if cpu else place_of(settings)
    limit = total - sum(allowance.values())
    began = time.perf_counter()
    shape, setting = candidates.shape_of(settings), candidates.setting_of(settings)
    parts = formulas.memory(shape, setting, settings, settings.fused_loss)
    if waits and (cpu or candidates.peak_by_formula(parts, gpu) > limit):
        seconds = None  # only a simulation may refuse a launch, and only a simulation knows a CPU's peak
    question = Question(candidates.for_simulation(settings.request), ranks, gpu=gpu)
    ask = functools.partial(answer_of, question, shape, zero=setting.zero, every=setting.every)
    answer = ask(seconds=seconds)
    if not cpu and not isinstance(answer, Exception):
        left = None if seconds is None else seconds - (time.perf_counter() - began)
        answer = _with_all_layers(answer, ask, gpu, limit, left, waits)
    source = {}  # empty: by simulation
    if isinstance(answer, Exception):
        if cpu:
            raise answer
        source = {"by": str(answer)}
        parts = {part: int(size) for part, size in parts.items()}
        answer = {"total": {"backward": sum(parts.values())}, "peak": {"backward": parts}, "host": 0}
    peak = max(answer["total"].values()) + (0 if cpu else candidates.workspace_bytes(gpu))
    peak = candidates.peak_by_formula(parts, gpu) if source else peak
    beyond = dict.fromkeys(("reserved", "least"), 0) if cpu else candidates.beyond_allocated(answer, peak)
    return {
        "peak_bytes": peak, "limit_bytes": limit - beyond["least"],
        "reserved_bytes": min(peak + beyond["reserved"], limit), "outside_bytes": sum(allowance.values()),
        "phase": max(answer["total"], key=answer["total"].get),
        "peak": answer["peak"], "host": answer["host"], "gpu": gpu.device_name if gpu else "cpu",
        "step_seconds": gpu and formulas.step_seconds(shape, setting, gpu, settings.max_length),
        "seconds": round(time.perf_counter() - began, 1), **source,
    }  # fmt: skip
