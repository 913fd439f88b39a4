"""Predict the peak memory of one setting, by simulation where possible."""

import math
import os
import time
from dataclasses import replace

from zerofit import hardware
from zerofit.errors import UserError
from zerofit.hardware import GIB
from zerofit.paths import cache_root
from zerofit.plan import candidates, formulas, simulate
from zerofit.plan.formulas import Shape
from zerofit.train import memory_history

# Deeper models are measured with so many layers and extended linearly. Stages 1 and 2 reduce gradients in buckets of
# 5e8 numbers over layers: how full the last one is goes up and down with the depth, by up to 3.5 % of the whole.
LAYERS_MEASURED = {True: (16, 24), False: (6, 7)}  # with such buckets, without

LAYERS_WHOLE = {True: 40, False: 12}

STEPPED_AT_ONCE = 1e9  # of a rank's share, at stage 3 (sub_group_size): its fp32 copy grows with the share only below


def ask(candidate: candidates.Candidate, ranks: int, gpu) -> None:
    """Put the simulation's answer, the highest of first and last rank, into the candidate."""
    from zerofit import command_line

    recipe = candidates.recipe_of(candidate.method)
    asked = sorted({0, ranks - 1})
    setting = candidate.setting
    flags = command_line.drop(candidate.flags, "--offload_path")  # on the GPU a disk is as host memory
    answer = answer_of(recipe, flags, ranks, asked, gpu, setting.zero, candidate.shape, setting.every)
    if isinstance(answer, Exception):
        candidate.failed = str(answer)
    else:
        candidate.answer = answer


def answer_of(
    recipe: str, flags: list[str], ranks: int, asked: list[int], gpu, zero: int, shape: Shape, every: int,
    seconds: float | None = None,
):  # fmt: skip
    """The ghost's answer of the rank with the highest peak among `asked`, or the GhostFailed that stands in its place.

    Args: every: n-th layer that is checkpointed; 0: none. seconds: after which it has failed; None: never.
    Raises: UserError for the user's mistakes.
    """
    began = time.perf_counter()
    if gpu is not None:
        gpu = replace(gpu, node_gbs=hardware.NODE_LINK_GBS)  # no matter of memory: answers are kept by question
    for depths in _depths(zero, shape, every, ranks):
        questions = [
            simulate.question(recipe, flags, ranks, rank, gpu=gpu, overrides={"num_hidden_layers": d} if d else None)
            for rank in asked
            for d in reversed(depths)  # the longest first: they run side by side
        ]
        left = None if seconds is None else seconds - (time.perf_counter() - began)
        answers = simulate.run_all(questions, cache_root() / "ghosts", left)
        for answer in answers:
            if isinstance(answer, UserError):
                raise answer
            if isinstance(answer, Exception):
                return answer
        if len(depths) == 1:
            break
        pairs = list(zip(answers[1::2], answers[::2], strict=True))
        if all(_same_moments(low, high) for low, high in pairs):
            answers = [_extended(low, high, depths, shape.layers) for low, high in pairs]
            break
    return max(answers, key=lambda answer: max(answer["total"].values()))


def _depths(zero: int, shape: Shape, every: int, ranks: int) -> list[tuple]:
    """Pairs of numbers of layers, multiples of `every`, from which the whole may follow; last (None,): all of them."""
    buckets, pattern = zero in (1, 2), max(1, every)
    first, second = LAYERS_MEASURED[buckets]
    apart = second - first
    stored = 0.25 if shape.frozen_bytes < 1 else 1  # four packed weights are one number
    if zero == 3 and shape.parameters * stored > candidates.KEPT_GATHERED:
        layer = (shape.parameters - 2 * shape.vocabulary * shape.hidden) / shape.layers
        first = max(first, math.ceil(candidates.KEPT_GATHERED / (layer * stored)))
        if shape.trainable / ranks > 1.25 * STEPPED_AT_ONCE:  # else the line is at most 1.4 GiB too high, in one phase
            small = STEPPED_AT_ONCE * ranks + shape.largest - 2 * shape.vocabulary * shape.hidden
            first = max(first, math.ceil(small / layer) + 1)  # whole tensors are taken until there are enough
    if pattern > 1 and zero == 3:
        first += 4  # what is prefetched where no layer is recomputed settles later
    small, apart = (-(-count // pattern) * pattern for count in (first, apart))
    found = []
    while len(found) < 3 and shape.layers > max(LAYERS_WHOLE[buckets], small + apart):
        found.append((small, small + apart))
        small += apart  # its answer is there already
    return [*found, (None,)]


def _same_moments(low: dict, high: dict) -> bool:
    """Whether training's peaks of two depths are of the same moment: then no part shrinks where layers are added."""
    return all(
        size >= low["peak"][phase][part] - 0.001 * low["total"][phase]
        for phase, parts in high["peak"].items()
        if phase in ("forward", "backward", "step")
        for part, size in parts.items()
    )


def _extended(low: dict, high: dict, depths: tuple[int, int], layers: int) -> dict:
    """The answer for `layers`, from those for two depths: all that a layer adds, it adds once more."""
    small, large = depths

    def line(a, b):
        return int(b + (b - a) / (large - small) * (layers - large))

    total = {phase: line(low["total"][phase], value) for phase, value in high["total"].items()}
    peak = {}
    for phase, parts in high["peak"].items():
        parts = {part: max(0, line(low["peak"][phase][part], value)) for part, value in parts.items()}
        # Where two depths have their peak at different moments, the parts are no line; their sum is.
        too_much = sum(parts.values()) / max(1, total[phase])
        peak[phase] = {part: int(value / too_much) for part, value in parts.items()}
    numbers = {name: line(low[name], high[name]) for name in ("host", "host_saving", "parameters", "trainable")}
    return high | {"peak": peak, "total": total, "extended_from_layers": [small, large]} | numbers


def allowance_of(gpu, ranks: int) -> dict[str, int]:
    """What of the GPU is not for tensors, and why: {"reason": bytes}."""
    found = {
        "CUDA context": candidates.CONTEXT_BYTES,
        "NCCL buffers": candidates.NCCL_BYTES if ranks > 1 else 0,
        f"fragmentation, {candidates.FRAGMENTATION:.0%}": int(gpu.memory_gib * GIB * candidates.FRAGMENTATION),
    }
    learned = memory_history.learned_allowance(gpu.device_name, gpu.memory_gib)
    return found | ({memory_history.learned_from(): learned} if learned else {})


def predict(settings, seconds: float | None = None) -> dict | None:
    """What the very job takes: {"peak_bytes", "limit_bytes", "phase", "peak", "step_seconds" (an estimate; None on a
    CPU), ...}, or None where there is no limit.

    On a CPU --memory_limit is the limit, and bytes are a CPU run's. Where the simulation fails, the closed forms answer for a
    GPU, and "by" says why; also where it takes more than `seconds`, but only when by them the job fits.
    Raises: GhostFailed on a CPU, of which they know nothing; UserError for the user's mistakes.
    """
    cpu = settings.use_cpu
    if cpu and not settings.memory_limit:
        return None
    ranks = settings.world_size
    here = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE") or ranks))
    gpu = None if cpu else settings.planned_gpu or hardware.find("detect", here)
    allowance = {} if cpu else allowance_of(gpu, ranks)
    whole = int(settings.memory_limit * GIB) if settings.memory_limit else int(gpu.memory_gib * GIB)
    limit = whole - sum(allowance.values())
    began = time.perf_counter()
    flags, shape = candidates.flags_for_simulation(settings.flags), candidates.shape_of(settings)
    setting = candidates.setting_of(settings)
    parts = formulas.memory(shape, setting, settings, candidates.fused_losses(settings, shape))
    if not cpu and candidates.peak_by_formula(parts) > limit:
        seconds = None  # a launch is refused by a simulation only
    answer = answer_of(settings.recipe, flags, ranks, [0], gpu, setting.zero, shape, setting.every, seconds)
    by = {}  # without any: the simulation
    if isinstance(answer, Exception):
        if cpu:
            raise answer
        by = {"by": str(answer)}
        parts = {part: int(size) for part, size in parts.items()}
        answer = {"total": {"backward": sum(parts.values())}, "peak": {"backward": parts}, "host": 0}
    simulated = max(answer["total"].values()) + (0 if cpu else candidates.WORKSPACE_BYTES)
    return {
        "peak_bytes": candidates.peak_by_formula(parts) if by else simulated,
        "limit_bytes": limit, "learned_bytes": allowance.get(memory_history.learned_from(), 0), "phase": max(answer["total"], key=answer["total"].get),
        "peak": answer["peak"], "host": answer["host"], "gpu": gpu.device_name if gpu else "cpu",
        "step_seconds": gpu and formulas.step_seconds(shape, setting, gpu, settings.max_length),
        "seconds": round(time.perf_counter() - began, 1), **by,
    }  # fmt: skip
