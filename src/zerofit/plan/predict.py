"""Predict the peak memory of one setting, by simulation if possible."""

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

# Deeper models are simulated at two of these depths and extrapolated linearly. Stages 1 and 2 reduce gradients in
# buckets of 5e8 numbers across layers: the fill of the last one varies with the depth, by up to 3.5 % of the total.
FIRST_DEPTHS = {True: (16, 24), False: (6, 7)}  # {stage 1 or 2: first pair of depths}
MAX_FULL_LAYERS = {True: 40, False: 12}
MAX_DEPTH_SHARE = 0.6  # share of the layers: two deeper simulations may take longer than the full model
MAX_LAYERS_OF_CHOSEN = 48  # up to this depth, a setting that fits is simulated in full: 20 s for 8B, 50 s for 80 layers
MAX_UNUSED_RATIO = 1.25  # least required bytes / allocated bytes: at most 1.22 in benchmarks/published

# Share of the allocated bytes: expandable segments that leave less than this unused with a few layers do not leave more
# with all layers. LoRA of 8B and QLoRA of 7B left 1.1 and 1.3 % with 7 layers, 0.4 and 0.6 % with 32.
MAX_IGNORED_UNUSED = 0.02
LONGEST_PATTERN = 8  # longest period of a pattern of layers: Jamba has attention in every 8th layer
PARAMETER_TOLERANCE = 0.001  # largest relative error of the extrapolated number of parameters
MAX_LIVE_PARAMETERS = 1e9  # stage3_max_live_parameters: memory is linear below and above it
SUB_GROUP_SIZE = 1e9  # stage 3: the fp32 copy of a rank's share grows only up to this many numbers


def simulate_candidate(candidate: Candidate, limit: int = 0) -> None:
    """Store the simulation's answer (the higher of first and last rank) or failure in the candidate.

    The last rank is simulated only if the tensors of the first one fit. If unused segments may matter, both are
    simulated with all layers, unless the model has many layers and is far below the limit.
    Args: limit: bytes of torch's allocator; 0: unlimited, unused segments do not matter.
    """
    last = candidate.setting.ranks - 1
    _simulate(candidate, [0])
    first = candidate.answer
    if first is None or (limit and candidate.allocated > limit):
        return
    if needs_all_layers(candidate, limit):
        _simulate(candidate, sorted({0, last}), all_layers=True)
    elif last:
        _simulate(candidate, [last])
        candidate.answer = max((first, candidate.answer), key=_peak)
    candidate.failed = ""  # the first answer is kept


def _peak(answer: dict) -> int:
    return max(answer["total"].values())


def _simulate(candidate: Candidate, ranks: Sequence[int], seconds: float | None = None, all_layers=False) -> None:
    """Store the simulation's answer or failure in the candidate. Args: see `answer_of`."""
    setting, shape = candidate.setting, candidate.shape
    request = candidates.for_simulation(candidate.request)
    question = Question(request, setting.ranks, gpu=candidate.gpu, liger=shape.liger)
    answer = answer_of(
        question, shape, zero=setting.zero, every=setting.every, ranks=ranks, seconds=seconds, all_layers=all_layers
    )
    if isinstance(answer, Exception):
        candidate.failed = str(answer)
    else:
        candidate.answer, candidate.failed = answer, ""


def needs_all_layers(candidate: Candidate, limit: int) -> bool:
    """Return whether to simulate all layers of a candidate that fits, to find the unused parts of segments."""
    if not _lacks_replay(candidate.answer) or candidate.allocated > limit:
        return False
    return candidate.shape.layers <= MAX_LAYERS_OF_CHOSEN or MAX_UNUSED_RATIO * candidate.allocated > limit


def _lacks_replay(answer: dict | None) -> bool:
    """Return whether an extrapolated answer lacks the unused parts of the allocator's segments."""
    return bool(answer) and answer.get("lacks_replay", False)


def answer_of(
    question: Question,
    shape: Shape,
    *,
    zero: int,
    every: int,
    ranks: Sequence[int] = (0,),
    seconds: float | None = None,
    all_layers: bool = False,
) -> dict | simulate.SimulationFailed:
    """Return the simulation's answer for the one of `ranks` with the highest peak, or the failure.

    Args: question: the job, for any rank and all layers; shape: shape of its model; zero: ZeRO stage; every: every n-th
        layer is checkpointed, 0: none; seconds: time limit, None: no limit; all_layers: do not extrapolate.
    Raises: UserError for the user's mistakes.
    """
    began, before, gpu = time.perf_counter(), None, question.gpu
    if gpu is not None:
        gpu = replace(gpu, node_gbs=hardware.NODE_LINK_GBS)  # does not change memory: equal questions share an answer
    for depths in [(None,)] if all_layers else _depths(zero, shape, every, question.ranks):
        questions = [
            replace(question, rank=rank, gpu=gpu, overrides={"num_hidden_layers": depth} if depth else {})
            for rank in ranks
            for depth in reversed(depths)  # the slowest first: they run in parallel
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
        is_complete = all(  # the first layers of a model may depend on the number of layers
            _on_a_line(low["parameters"], high["parameters"], depths, shape.parameters, shape)
            for low, high in pairs
            if high.get("whole_parameters")
        )
        is_linear = zero != 3 or _is_level(slopes, shape, question.ranks)
        is_linear = is_linear or (shape.frozen_bytes < 1 and _same_slopes(slopes, before))
        if is_complete and is_linear and all(_same_moments(low, high) for low, high in pairs):
            answers = [_extended(low, high, depths, shape.layers) for low, high in pairs]
            break
        before = slopes
    return max(answers, key=_peak)


def _depths(zero: int, shape: Shape, every: int, ranks: int) -> list[tuple]:
    """Return pairs of layer counts to extrapolate from; the last, (None,), is the full model.

    The counts are multiples of `every` and of the period of the layers' kinds. A later pair is used if the peaks of the
    earlier one are at different moments.
    """
    for pattern in range(1, LONGEST_PATTERN + 1) if shape.can_be_cut else ():
        pairs = _pairs(zero, shape, max(1, every), pattern * max(1, every), ranks)
        sums = [[sum(shape.by_layer[:depth]) for depth in pair] for pair in pairs]
        total = sum(shape.by_layer)
        if on_line := [p for p, n in zip(pairs, sums, strict=True) if _on_a_line(*n, p, total, shape)]:
            return [*on_line, (None,)]
    return [(None,)]


def _pairs(zero: int, shape: Shape, every: int, pattern: int, ranks: int) -> list[tuple[int, int]]:
    """Return up to three pairs of layer counts below the model's, as multiples of `pattern`."""
    buckets = zero in (1, 2)
    first, second = FIRST_DEPTHS[buckets]
    distance = second - first
    stored = _stored_per_parameter(shape)
    if zero == 3 and shape.parameters * stored > MAX_LIVE_PARAMETERS:
        layer = (shape.parameters - 2 * shape.vocabulary * shape.hidden) / shape.layers
        first = max(first, math.ceil(MAX_LIVE_PARAMETERS / (layer * stored)))
        if shape.trainable / ranks > 1.25 * SUB_GROUP_SIZE:  # else at most 1.4 GiB too high, in one phase
            small = SUB_GROUP_SIZE * ranks + shape.largest - 2 * shape.vocabulary * shape.hidden
            first = max(first, math.ceil(small / layer) + 1)  # a sub-group holds complete tensors
    if every > 1 and zero == 3:
        first += 4  # prefetching of layers without recomputation becomes steady later
    small, distance = (-(-count // pattern) * pattern for count in (first, distance))
    pairs = []
    while len(pairs) < 3 and shape.layers > max(MAX_FULL_LAYERS[buckets], (small + distance) / MAX_DEPTH_SHARE):
        pairs.append((small, small + distance))
        small += distance  # its answer is already cached
    return pairs


def _on_a_line(low: float, high: float, depths: tuple[int, int], total: float, shape: Shape) -> bool:
    """Return whether the parameters of two depths extrapolate to the model's `total`."""
    return abs(_line(low, high, depths, shape.layers) - total) <= PARAMETER_TOLERANCE * shape.parameters


def _line(low: float, high: float, depths: tuple[int, int], layers: int) -> float:
    """Return the value for `layers` on the line through the values for two depths."""
    small, large = depths
    return high + (high - low) / (large - small) * (layers - large)


def _stored_per_parameter(shape: Shape) -> float:
    """Return 0.25 for packed 4-bit weights (DeepSpeed counts 16-bit numbers), else 1."""
    return 0.25 if shape.frozen_bytes < 1 else 1


def _same_moments(low: dict, high: dict) -> bool:
    """Return whether two depths peak at the same moment of training: every part grows with the layers."""
    return all(
        size >= low["peak"][phase][part] - 0.001 * low["total"][phase]
        for phase, parts in high["peak"].items()
        if phase in ("forward", "backward", "step")
        for part, size in parts.items()
    )


def _slopes(low: dict, high: dict, depths: tuple[int, int]) -> dict[str, float]:
    """Return the growth of each phase's buffers in bytes per layer."""
    return {
        phase: (parts["buffers"] - low["peak"][phase]["buffers"]) / (depths[1] - depths[0])
        for phase, parts in high["peak"].items()
        if phase in ("forward", "backward", "step")
    }


def _is_level(slopes: list[dict[str, float]], shape: Shape, ranks: int) -> bool:
    """Return whether stage 3's gathered parameters no longer grow with the depth.

    A layer may add its shards to the step's buffers: up to 16 bytes per parameter over all ranks, for gradients and
    states in fp32. Layers gathered in a forward or backward must not grow, unless stage 3 keeps all layers gathered.
    """
    if shape.parameters * _stored_per_parameter(shape) <= MAX_LIVE_PARAMETERS:
        return True
    layer = shape.parameters / shape.layers
    gathered = layer * (shape.frozen_bytes if shape.frozen else 2.0)
    bounds = {"forward": 0.05 * gathered, "backward": 0.05 * gathered, "step": 16 * layer / ranks}
    return all(slope <= bounds[phase] for by_phase in slopes for phase, slope in by_phase.items())


def _same_slopes(slopes: list[dict[str, float]], before: list[dict[str, float]] | None) -> bool:
    """Return whether buffers grow as between the two previous depths: linearly, with any slope.

    This covers a packed base, whose gathered weights bitsandbytes keeps until the graph is freed.
    """
    return before is not None and all(
        abs(slope - earlier[phase]) <= 0.02 * max(slope, earlier[phase])
        for by_phase, earlier in zip(slopes, before, strict=True)
        for phase, slope in by_phase.items()
        if max(slope, earlier[phase]) > 0
    )


def _extended(low: dict, high: dict, depths: tuple[int, int], layers: int) -> dict:
    """Return the answer for `layers`, extrapolated linearly from the answers for two depths.

    Unused parts of segments do not grow linearly: the deeper answer represents all layers only if they are small.
    """

    def line(a, b):
        return int(_line(a, b, depths, layers))

    total = {phase: line(low["total"][phase], value) for phase, value in high["total"].items()}
    peak = {}
    for phase, parts in high["peak"].items():
        parts = {part: max(0, line(low["peak"][phase][part], value)) for part, value in parts.items()}
        # If the two peaks are at different moments, only the sum of the parts is linear: scale the parts to it.
        excess = sum(parts.values()) / max(1, total[phase])
        peak[phase] = {part: int(value / excess) for part, value in parts.items()}
    numbers = {name: line(low[name], high[name]) for name in ("host", "host_saving", "parameters", "trainable")}
    answer = high | {"peak": peak, "total": total, "extended_from_layers": list(depths)} | numbers
    replayed = high.get("allocator")
    if replayed:
        unused = replayed["least"] - replayed["allocated"]
        if not allocator.expandable_segments() or unused > MAX_IGNORED_UNUSED * replayed["allocated"]:
            answer |= {"allocator": None, "lacks_replay": True}
    return answer


# --- the check of a launch ---


def place_of(settings) -> tuple[hardware.Gpu, int, dict[str, int]]:
    """Return (the GPU of a job, its bytes, {reason: bytes outside torch's allocator}); not for CPU jobs."""
    ranks = settings.world_size
    local_ranks = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or ranks))
    gpu = settings.planned_gpu or hardware.find("detect", local_ranks)
    total = int((settings.memory_limit or gpu.memory_gib) * GIB)
    return gpu, total, gpu_memory.outside_allocator(gpu, ranks, local_ranks)


def predict(settings, seconds: float | None = None) -> dict | None:
    """Return the predicted memory of the job; None on a CPU without --memory_limit, and for a pipeline on a CPU.

    If the simulation of a GPU fails, the closed forms are used; also if it takes longer than `seconds` and the job fits
    by formula. On a CPU, the simulation is always awaited and counts a CPU run's bytes.
    Args: seconds: how long to wait for the simulation, None: until it ends.
    Returns: see `as_plan`.
    Raises: SimulationFailed on a CPU, which the closed forms do not cover; UserError for the user's mistakes.
    """
    cpu, is_pipeline = settings.use_cpu, settings.parallel_size("layers") > 1
    if cpu and (not settings.memory_limit or is_pipeline):
        return None
    gpu, total, outside = (None, int(settings.memory_limit * GIB), {}) if cpu else place_of(settings)
    began = time.perf_counter()
    candidate = candidates.candidate_of(settings, gpu)
    if is_pipeline:
        candidate.failed = "pipelines are not simulated"
    else:
        simulate_first_rank(candidate, total - sum(outside.values()), seconds)
    if cpu and candidate.failed:
        raise simulate.SimulationFailed(candidate.failed)
    return as_plan(candidate, total, outside) | {"seconds": round(time.perf_counter() - began, 1)}


def as_plan(candidate: Candidate, total: int, outside: dict[str, int]) -> dict:
    """Return a prediction as recorded in run.json and the report. total: bytes of the GPU; outside: see `place_of`.

    Returns: {"peak_bytes", "limit_bytes", "phase", "peak", "step_seconds" (estimate; None on a CPU and for a pipeline),
        "stage" (for a pipeline), "by" (why the closed forms decide, only if they do), ...}.
    """
    limit = total - sum(outside.values())
    parts = {part: int(size) for part, size in candidate.formula.items()}
    answer = candidate.answer or {"total": {"backward": sum(parts.values())}, "peak": {"backward": parts}, "host": 0}
    gpu, stage = candidate.gpu, candidate.stage
    by = candidate.failed or ("" if candidate.answer else candidates.ROOM_BY_FORMULA)
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


def simulate_first_rank(candidate: Candidate, limit: int, seconds: float | None, waits: bool = True) -> None:
    """Store the answer of rank 0 in the candidate, with all layers if unused segments decide.

    Only a simulation may refuse a launch, and closed forms do not cover a CPU: with `waits`, these simulations ignore
    the time limit. Without `waits`, an unfinished simulation of all layers leaves no answer.
    Args: limit: bytes of torch's allocator; seconds: how long to wait, None: until it ends.
    """
    began = time.perf_counter()
    if waits and (candidate.gpu is None or candidate.allocated > limit):
        seconds = None
    _simulate(candidate, [0], seconds)
    if not _lacks_replay(candidate.answer) or not candidate.allocated <= limit < MAX_UNUSED_RATIO * candidate.allocated:
        return
    few_layers = candidate.answer
    if waits and candidate.peak > limit:
        seconds = None
    remaining = None if seconds is None else seconds - (time.perf_counter() - began)
    _simulate(candidate, [0], remaining, all_layers=True)
    if candidate.failed:
        candidate.answer, candidate.failed = (few_layers, "") if waits else (None, candidate.failed)
