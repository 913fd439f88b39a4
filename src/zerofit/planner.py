"""make plan, ZERO=auto, --dry_run and the check before a launch: does it fit, and what is the fastest that does?

Closed forms order the candidates by predicted time and drop what cannot fit by far; the ghost run (ghost.py), which is
the kit's own trainer and the real engine on tensors without memory, decides about the rest.
"""

import argparse
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import time
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from . import args, closed_forms, devices, ghost, hardware, world
from .closed_forms import Setting, Shape
from .devices import GIB
from .errors import EXIT_CODES, UserError

CONTEXT_BYTES = int(0.6 * GIB)  # CUDA context and kernels, outside the allocator (typical of CUDA 12/13)
NCCL_BYTES = int(0.4 * GIB)  # NCCL's channels and buffers
WORKSPACE_BYTES = 72 * 2**20  # cuBLAS: 32 MiB for each of two handles, and its lt workspace; counted by the allocator
FRAGMENTATION = 0.03  # of the GPU: what the allocator cannot hand out
CLEARLY_TOO_MUCH = 1.25  # what is above this share of the limit by formula is simulated only when nothing else fits
CHECK_SECONDS = 18  # that a launch waits for a ghost; the whole check then takes less than 20
GHOSTS = 8  # after so many simulations only settings that fit clearly by the closed forms are looked at
# Before "nothing fits" is said, the smallest settings by formula of so many stages and offloads are simulated, where they
# are below this share of the limit.
LAST_TRIES, HOPELESS = 4, 2.0
# Deeper models are measured with so many layers and extended linearly. Stages 1 and 2 reduce gradients in buckets of
# 5e8 numbers over layers: how full the last one is goes up and down with the depth, by up to 3.5 % of the whole.
LAYERS_MEASURED = {True: (16, 24), False: (6, 7)}  # with such buckets, without
LAYERS_WHOLE = {True: 40, False: 12}
STEPPED_AT_ONCE = 1e9  # of a rank's share, at stage 3 (sub_group_size): its fp32 copy grows with the share only below
KEPT_GATHERED = 1e9  # parameters that stage 3 keeps gathered (stage3_max_live_parameters): linear below and above
FORMULA_MARGIN = 0.1  # added to what the closed forms say
ESTIMATE = f"the exact check failed: {{}}; this is an estimate by formula, with a margin of {FORMULA_MARGIN:.0%}"
SMALLER_STATES = [("--optim", "adamw_bnb_8bit"), ("--pure_bf16", "true")]
UNNAMED = "not-named-yet"  # stands for --data, which a plan does not need
EDGE = 0.9  # of the limit; a plan above it names LoRA too
LEARNED_RUNS = 50  # of them, the latest, that a plan learns from
LEARNED_AT_MOST = 0.1  # of the GPU


@dataclass
class Candidate:
    """One setting with what is known about it. formula: bytes by part; answer: the ghost's, None: not asked."""

    flags: list[str]
    method: str
    setting: Setting
    formula: dict[str, float]
    seconds: float
    shape: Shape
    answer: dict | None = None
    failed: str = ""  # why the simulation could not be asked
    change: tuple[str, ...] = ()  # of SMALLER_STATES

    @property
    def label(self) -> str:
        s = self.setting
        checkpointing = "" if not s.every else ", checkpointing" + (f" every {s.every}" if s.every > 1 else "")
        checkpointing += " offloaded" if s.activation_offload else ""
        hpz = f" with hpZ {s.hpz}" if s.hpz > 1 else ""
        offload = "" if s.offload == "none" else f", offload {s.offload}{' to NVMe' * s.nvme}"
        change = f", {' '.join(self.change)}" if self.change else ""
        return f"{self.method} ZeRO-{s.zero}{hpz}{offload}{checkpointing}{change}, micro batch {s.micro}"

    @property
    def peak(self) -> int:
        """Bytes: the allocator's peak, by the ghost or else by the closed forms with a margin."""
        if self.answer:
            return max(self.answer["total"].values()) + WORKSPACE_BYTES
        return peak_by_formula(self.formula)

    @property
    def host_of_a_node(self) -> int:
        """Bytes of host memory that a node's ranks need while they train, for what is offloaded."""
        # fp32 weights, gradients and Adam's states, and a 16-bit buffer (stage_1_and_2.py, stage3.py); 16-bit weights
        each = {"none": 0, "optimizer": 18, "all": 20}[self.setting.offload] * self.shape.trainable / self.setting.ranks
        each = self.answer["host"] if self.answer else each
        return 0 if self.setting.nvme else int(each * self.setting.of_a_node)

    @property
    def tokens_per_second(self) -> float:
        s = self.setting
        return s.tokens * s.accumulation * s.ranks / self.seconds


def peak_by_formula(parts: dict[str, float]) -> int:
    """Return the allocator's peak by the closed forms, with their margin."""
    return int(sum(parts.values()) * (1 + FORMULA_MARGIN)) + WORKSPACE_BYTES


@dataclass
class Plan:
    """gpu, limit: bytes that tensors may take; host_limit: bytes of a node's host memory, None: not known; chosen: None
    when nothing fits; rejected: faster, and why not; node: GPUs of a machine; adapter: LoRA or QLoRA by formula, where full
    fine-tuning is at the edge; disk_free: bytes for checkpoints, None: not known; kept: checkpoints, None: all."""

    gpu: hardware.Gpu
    ranks: int
    limit: int
    allowance: dict[str, int]
    chosen: Candidate | None
    rejected: list[tuple[Candidate, str]]
    nearest: Candidate | None = None
    would_do: int | None = None
    longest: int | None = None
    host_limit: int | None = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    node: int = closed_forms.GPUS_OF_A_NODE
    adapter: Candidate | None = None
    disk_free: int | None = None
    kept: int | None = None

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.node)


# --- the command ---


def main(argv: list[str]) -> None:
    """`zerofit plan`: see --help. Prints the plan and writes plan.json, plan.md and plan.png.

    Raises: UserError for the user's mistakes; NothingFits (exit code 3) when no setting does.
    """
    parser = argparse.ArgumentParser(
        prog="zerofit plan", allow_abbrev=False,
        description="Whether a job fits and what is fastest, before anything is downloaded or allocated. Only the model's "
        "config.json is needed. What you leave open is searched; every flag of the recipe works too.",
    )  # fmt: skip
    parser.add_argument("--recipe", default="sft", help="sft or lora (default sft)")
    parser.add_argument("--method", default="", help="sft, lora, qlora or auto (the first of them that fits)")
    parser.add_argument("--gpus", default="1", help="GPUs of all machines together; with --nodes those of each")
    parser.add_argument("--nodes", default="", help="machines with --gpus GPUs each (default: as many as --gpus needs at "
                        f"{closed_forms.GPUS_OF_A_NODE} each)")  # fmt: skip
    parser.add_argument("--node_link_gbs", default="", help="GB/s one way that each GPU has to other nodes, all adapters of a "
                        f"node over its GPUs (default {hardware.NODE_LINK_GBS:g}: 400 Gbit/s a GPU)")  # fmt: skip
    parser.add_argument("--gpu", default="", help="a GPU of the table, or detect (default: this machine's)")
    parser.add_argument("--host_memory", default="", help="GiB of a node's host memory (default: this machine's with "
                        "--gpu detect, else not looked at)")  # fmt: skip
    parser.add_argument("--out", default="", help="folder for plan.json, plan.md, plan.png (default runs/plan-<time>)")
    parser.add_argument("--args", default="", help="more recipe flags in one string, split like a shell would")
    given, flags = parser.parse_known_args(argv)
    flags, ranks = args.command_line(given.recipe, flags, given.args, given.gpus)
    ranks, node = _machines(given.nodes, ranks)
    if {"--help", "-h"} & set(flags):
        parser.print_help()
        return
    methods = _methods(given.method, given.recipe, flags)
    gpu = _with_node_link(hardware.find(given.gpu or "detect", min(ranks, node)), given.node_link_gbs)
    if sentence := hardware.note(gpu):
        print(sentence, flush=True)
    from . import plan_report, report

    folder = Path(given.out or Path("runs") / f"plan-{time.strftime('%Y%m%d-%H%M%S')}").expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder}: is a file; name a folder.")
    here = given.gpu in ("", "detect")
    host_limit = _host_limit(given.host_memory, here)
    plan = search(methods, flags, ranks, gpu, lambda text: print(text, flush=True), host_limit, node)
    plan.adapter = _adapter_instead(plan, methods, flags)
    if here:
        plan.disk_free = shutil.disk_usage(report.nearest_existing(folder)).free
    print(plan_report.text(plan))
    try:
        plan_report.write(plan, folder)
    except OSError as error:
        raise UserError(
            f"--out {folder}: the plan cannot be written there: {error.strerror}; name another folder."
        ) from None
    print(f"\n{folder}/plan.md, plan.json, plan.png")
    if plan.chosen is None:
        raise NothingFits(plan_report.nothing_fits(plan))


class NothingFits(UserError):
    """No setting fits into the GPU's memory."""

    exit_code = EXIT_CODES["out of memory"]


def _machines(nodes: str, gpus: int) -> tuple[int, int]:
    """(GPUs of all machines, GPUs of one)."""
    if not nodes:
        return gpus, closed_forms.GPUS_OF_A_NODE
    if not nodes.isdigit() or int(nodes) < 1:
        raise UserError(f"NODES={nodes}: must be a whole number of 1 or more machines, each with GPUS={gpus} GPUs.")
    return int(nodes) * gpus, gpus


def _with_node_link(gpu: hardware.Gpu, text: str) -> hardware.Gpu:
    if not text:
        return gpu
    try:
        if 0 < (speed := float(text)) < math.inf:
            return replace(gpu, node_gbs=speed)
    except ValueError:
        pass
    raise UserError(
        f"--node_link_gbs {text}: must be a number of GB/s above 0: what the network between the machines of NODES= gives "
        "each GPU, one way."
    )


def _host_limit(text: str, here: bool) -> int | None:
    """Bytes of a node's host memory."""
    import psutil

    if not text:
        return psutil.virtual_memory().total if here else None
    try:
        if 0 < (size := float(text)) < math.inf:
            return int(size * GIB)
    except ValueError:
        pass
    raise UserError(f"--host_memory {text}: must be a number of GiB.")


def _methods(method: str, recipe: str, flags: list[str]) -> list[str]:
    quantised = any(f.startswith(("--load_in_4bit", "--load-in-4bit")) for f in flags)
    if not method:
        return ["qlora" if quantised else recipe]
    if method not in ("sft", "lora", "qlora", "auto"):
        raise UserError(f"--method {method}: must be one of sft, lora, qlora, auto.")
    return ["sft", "lora", "qlora"] if method == "auto" else [method]


def _recipe(method: str) -> str:
    return "sft" if method == "sft" else "lora"


# --- the search ---


def search(
    methods: list[str], flags: list[str], ranks: int, gpu, say=lambda text: None, host_limit: int | None = None,
    node: int = closed_forms.GPUS_OF_A_NODE,
) -> Plan:  # fmt: skip
    """The fastest setting that fits, by the flags that the user left open.

    Args: methods: in order of preference; the first with anything that fits is taken. host_limit: bytes of a node's
        host memory; what does not fit there is left out, unless --offload_path takes it to a disk. node: GPUs of a machine.
    Raises: UserError for the user's mistakes.
    """
    began = time.perf_counter()
    allowance = _allowance(gpu, ranks)
    settings = args.parse(_recipe(methods[0]), _planned(flags, methods[0]), ranks, gpu)
    limit = int((settings.memory_limit or gpu.memory_gib) * GIB) - sum(allowance.values())
    kept = settings.save_total_limit
    plan = Plan(gpu, ranks, limit, allowance, None, [], host_limit=host_limit, node=node, kept=kept)
    with ghost.reused():
        _search(plan, methods, flags, say)
    if plan.chosen is None and plan.nearest is not None:
        plan.would_do = _gpus_that_would_do(methods[-1], flags, ranks, gpu, node)
        plan.longest = _longest_that_fits(methods[-1], flags, ranks, gpu, plan.limit, node)
    plan.seconds = time.perf_counter() - began
    return plan


def _search(plan: Plan, methods: list[str], flags: list[str], say) -> None:
    """Look for a setting that fits, rung by rung."""
    ranks, gpu, node = plan.ranks, plan.gpu, plan.node
    for method, change in _rungs(methods, flags):
        try:
            found = candidates(method, flags, ranks, gpu, change, node)
        except UserError:
            if not change:
                raise
            continue  # the user's other flags do not go with it
        what = " ".join([method, *change])
        say(f"plan: {len(found)} settings of {what} on {machines(ranks, node)} x {gpu.device_name}; the fastest first")
        _decide(plan, found, say)
        if plan.chosen:
            return
    if plan.nearest.answer is None and not _host_is_short(plan.nearest, plan):
        _fits(plan.nearest, plan, say)  # a figure by formula does not say that nothing fits


def _adapter_instead(plan: Plan, methods: list[str], flags: list[str]) -> Candidate | None:
    """The fastest LoRA, else QLoRA, that fits by formula, where full fine-tuning does not fit, offloads or is nearly too large."""
    chosen = plan.chosen
    if methods != ["sft"] or (chosen and chosen.setting.offload == "none" and chosen.peak <= EDGE * plan.limit):
        return None
    for method in ("lora", "qlora"):
        try:
            found = candidates(method, flags, plan.ranks, plan.gpu, node=plan.node)
        except UserError:
            continue  # the user's other flags do not go with it
        for candidate in found:
            if candidate.setting.offload == "none" and candidate.peak <= plan.limit:
                return candidate
    return None


def machines(ranks: int, node: int) -> str:
    """The GPUs in words: "4", "2 nodes x 8"; "12 (2 nodes)" where they are not alike."""
    nodes = math.ceil(ranks / node)
    if nodes == 1:
        return str(ranks)
    return f"{ranks} ({nodes} nodes)" if ranks % nodes else f"{nodes} nodes x {ranks // nodes}"


def _rungs(methods: list[str], flags: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(method, flags laid over the user's) in order of preference; what trains a little differently, with smaller
    optimizer states, is looked at when nothing else fits."""
    said = any(f.replace("-", "_").startswith(("__optim", "__pure_bf16", "__preset")) for f in flags)
    smaller = [] if said else SMALLER_STATES
    return [(method, change) for method in methods for change in [(), *(smaller if method == "sft" else [])]]


def _decide(plan: Plan, found: list[Candidate], say) -> None:
    """Simulate the fastest candidates until one fits; what is far too large by formula only when nothing else does."""
    asked, large = 0, []
    for candidate in found:
        believed = CLEARLY_TOO_MUCH if asked < GHOSTS else 0.9
        if _by_formula(candidate) > believed * plan.limit:
            large.append(candidate)
        elif not _host_is_short(candidate, plan):
            asked += 1  # nothing is chosen that was not simulated
            if _fits(candidate, plan, say):
                break
    else:
        _last_tries(plan, large, say)
    for candidate in found:
        if candidate is plan.chosen:
            break
        plan.rejected.append((candidate, _why_not(candidate, plan)))
    if plan.chosen is None:
        plan.nearest = min([*found, *([plan.nearest] if plan.nearest else [])], key=lambda candidate: candidate.peak)


def _last_tries(plan: Plan, large: list[Candidate], say) -> None:
    """Simulate the smallest by formula of each stage and offload; where one fits, the faster ones like it are asked too.

    The closed forms can be far too high for a job that they do not know well; a refusal is not theirs to make.
    """
    smallest: dict[tuple, Candidate] = {}
    for candidate in sorted(large, key=_by_formula):
        if not _host_is_short(candidate, plan) and _by_formula(candidate) <= HOPELESS * plan.limit:
            smallest.setdefault((candidate.setting.zero, candidate.setting.offload), candidate)
    for last in list(smallest.values())[:LAST_TRIES]:
        if not _fits(last, plan, say):
            continue
        too_high = _by_formula(last) / last.peak
        for candidate in large:  # the fastest first
            if candidate is last:
                return
            near = (candidate.setting.zero, candidate.setting.offload) == (last.setting.zero, last.setting.offload)
            if near and _by_formula(candidate) <= too_high * plan.limit and _fits(candidate, plan, say):
                return


def _by_formula(candidate: Candidate) -> float:
    return sum(candidate.formula.values()) + WORKSPACE_BYTES


def _fits(candidate: Candidate, plan: Plan, say) -> bool:
    """Simulate the candidate, say its peak, and choose it when it fits."""
    ask(candidate, plan.ranks, plan.gpu)
    how = f"by formula, + {FORMULA_MARGIN:.0%}: the exact check failed" if candidate.failed else "by simulation"
    say(f"  {candidate.label}: {candidate.peak / GIB:.1f} GiB ({how})")
    if candidate.peak > plan.limit or _host_is_short(candidate, plan):
        return False
    plan.chosen = candidate
    return True


def _host_is_short(candidate: Candidate, plan: Plan) -> bool:
    return plan.host_limit is not None and candidate.host_of_a_node > plan.host_limit


def _why_not(candidate: Candidate, plan: Plan) -> str:
    if _host_is_short(candidate, plan):
        return f"host memory {candidate.host_of_a_node / GIB:.0f} GiB a node > {plan.host_limit / GIB:.0f}"
    how = "" if candidate.answer else f" (by formula, + {FORMULA_MARGIN:.0%})"
    return f"{candidate.peak / GIB:.1f} GiB > {plan.limit / GIB:.1f}{how}"


def ask(candidate: Candidate, ranks: int, gpu) -> None:
    """Put the simulation's answer, the highest of first and last rank, into the candidate."""
    from . import probe

    recipe = _recipe(candidate.method)
    asked = sorted({0, ranks - 1})
    setting = candidate.setting
    flags = probe.drop(candidate.flags, "--offload_path")  # on the GPU a disk is as host memory
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
            ghost.question(recipe, flags, ranks, rank, gpu=gpu, overrides={"num_hidden_layers": d} if d else None)
            for rank in asked
            for d in reversed(depths)  # the longest first: they run side by side
        ]
        left = None if seconds is None else seconds - (time.perf_counter() - began)
        answers = ghost.run_all(questions, world.cache_root() / "ghosts", left)
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
    if zero == 3 and shape.parameters * stored > KEPT_GATHERED:
        layer = (shape.parameters - 2 * shape.vocabulary * shape.hidden) / shape.layers
        first = max(first, math.ceil(KEPT_GATHERED / (layer * stored)))
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


def candidates(
    method: str, flags: list[str], ranks: int, gpu, change: tuple[str, ...] = (),
    node: int = closed_forms.GPUS_OF_A_NODE,
) -> list[Candidate]:  # fmt: skip
    """All settings that the flags leave open, the fastest (by estimate) first.

    Args: change: flags that are laid over them, of SMALLER_STATES; node: GPUs of a machine.
    Raises: UserError when the flags themselves are wrong.
    """
    recipe, disk = _recipe(method), world.value_of(flags, ("--offload_path",))
    flags = [*_planned(flags, method), *change]
    base = args.parse(recipe, flags, ranks, gpu)
    hpz = _hpz(base, ranks, node)
    shape = _shape(base)
    fused, found, error = _fused(base, shape), [], None
    for zero, (offload, nvme), (every, away), micro in itertools.product(*_open(base, ranks, disk)):
        if not _sensible(zero, offload, ranks, base) or (nvme and zero != 3):
            continue
        own = _flags(flags, base, zero, offload, every, away, micro)
        own = [*own, "--offload_path", disk] if nvme else own
        try:
            args.parse(recipe, own, ranks, gpu)
        except UserError as refused:
            error = error or refused
            continue
        setting = Setting(zero, offload, every, micro, micro * base.max_length,
                          base.effective_batch_size // (micro * ranks), ranks, away, nvme, node, hpz)  # fmt: skip
        parts = closed_forms.memory(shape, setting, base, fused)
        seconds = closed_forms.step_seconds(shape, setting, gpu, base.max_length)
        found.append(Candidate(own, method, setting, parts, seconds, shape, change=change))
    if not found:
        raise error or UserError("these flags leave no setting to plan.")
    return sorted(found, key=lambda c: (round(c.seconds, 4), c.setting.zero))


def _hpz(settings, ranks: int, node: int) -> int:
    """Ranks that share ZeRO++'s second copy; 1: there is none.

    Raises: UserError for a copy that would lie on several nodes.
    """
    size = settings.zero_hpz_partition_size or 1
    if ranks > node and node % size:
        raise UserError(
            f"--zero_hpz_partition_size {size}: its copies are gathered inside a node, so it must divide the {node} GPUs of "
            f"a node of this plan (best: {node}); NODES= and GPUS= say which these are."
        )
    return size


def _planned(flags: list[str], method: str) -> list[str]:
    """The flags with what a plan of this method adds to them."""
    from . import probe

    flags = _without(flags, "--zero", "auto")
    if not _names(flags, "--offload"):  # candidates() lays the disk over what offloads to it
        flags = probe.drop(flags, "--offload_path")
    if method == "qlora" and not any(f.startswith(("--load_in_4bit", "--load-in-4bit")) for f in flags):
        flags = [*flags, "--load_in_4bit", "true"]
    if _names(flags, "--model") and not _names(flags, "--data"):
        flags = [*flags, "--data", UNNAMED]  # rows are never opened
    return flags


def _shape(settings) -> Shape:
    from . import model, quantized

    try:
        net = model.check(settings)
    except NotImplementedError as error:
        raise UserError(f"--model {settings.model}: cannot be built without weights: {error}.") from None
    config = model.load_config(settings)
    fp32 = settings.precision == "fp32" or (settings.deepspeed is None and model.weight_dtype(settings) == "float32")
    return closed_forms.shape(config, net, {4: 0.55, 8: 1.0}.get(quantized.bits(settings), 4.0 if fp32 else 2.0))


_FIXED = ("flag", "deepspeed JSON")


def _open(base, ranks: int, disk: str | None) -> tuple[list, list, list, list]:
    """(stages, offloads, checkpointing, micro batches) to try; one each where the user has said it.

    Offload is (what, whether to a disk: where --offload_path names one); checkpointing is (every n-th layer or 0,
    whether what it keeps goes to host memory).
    """

    def said(name: str) -> bool:
        source = base.source[name]
        return source in _FIXED or source.startswith("preset") or source == base.config

    stages = [int(base.zero)] if said("zero") else [0, 1, 2, 3]
    if said("offload"):
        offloads = [(base.offload, bool(disk))]
    else:
        offloads = [("none", False), ("optimizer", False), ("all", False)]
        offloads += [("optimizer", True), ("all", True)] * bool(disk)
    if any(said(n) for n in ("gradient_checkpointing", "gradient_checkpointing_every", "activation_offload")):
        every = base.gradient_checkpointing_every if base.gradient_checkpointing else 0
        checkpointing = [(every, base.activation_offload)]
    else:
        checkpointing = [(0, False), (2, False), (1, False), (1, True)]
    per_rank = base.effective_batch_size // ranks
    if said("per_device_train_batch_size"):
        micros = [base.per_device_train_batch_size]
    else:
        micros = [n for n in range(1, min(per_rank, 64) + 1) if per_rank % n == 0]
    return stages, offloads, checkpointing, micros


def _sensible(zero: int, offload: str, ranks: int, base) -> bool:
    if (offload == "all" and zero != 3) or (offload != "none" and zero == 0):
        return False
    if ranks == 1 and zero in (1, 2, 3) and offload == "none" and base.source["zero"] != "flag":
        return base.precision != "fp32" and zero == 1  # 16-bit weights with a master; nothing else to shard
    return True


def _flags(flags: list[str], base, zero: int, offload: str, every: int, away: bool, micro: int) -> list[str]:
    """The recipe's command line of one candidate."""
    from . import probe

    own = probe.drop(flags, "--zero", "--offload", "--per_device_train_batch_size", "--gradient_accumulation_steps",
                     "--effective_batch_size", "--probe", "--offload_path")  # fmt: skip
    own += ["--zero", str(zero), "--offload", offload, "--per_device_train_batch_size", str(micro),
            "--effective_batch_size", str(base.effective_batch_size)]  # fmt: skip
    if not any(f.replace("-", "_").startswith(("__gradient_checkpointing", "__activation_offload")) for f in own):
        own += ["--gradient_checkpointing", str(bool(every)).lower()]
        own += ["--gradient_checkpointing_every", str(every)] if every > 1 else []
        own += ["--activation_offload", "true"] if away else []
    return own


def _names(flags: list[str], name: str) -> bool:
    return any(f == name or f.startswith(f"{name}=") for f in flags)


def _without(flags: list[str], name: str, value: str) -> list[str]:
    """The flags without `name value`: --zero auto is what a plan decides."""
    for i, word in enumerate(flags):
        if word == name and flags[i + 1 : i + 2] == [value]:
            return [*flags[:i], *flags[i + 2 :]]
        if word == f"{name}={value}":
            return [*flags[:i], *flags[i + 1 :]]
    return flags


def _allowance(gpu, ranks: int) -> dict[str, int]:
    """What of the GPU is not for tensors, and why: {"reason": bytes}."""
    found = {
        "CUDA context": CONTEXT_BYTES,
        "NCCL buffers": NCCL_BYTES if ranks > 1 else 0,
        f"fragmentation, {FRAGMENTATION:.0%}": int(gpu.memory_gib * GIB * FRAGMENTATION),
    }
    learned = learned_allowance(gpu.device_name, gpu.memory_gib)
    return found | ({_learned_from(): learned} if learned else {})


def history() -> Path:
    """Return the file of predicted and measured peaks of finished runs on this machine."""
    return world.cache_root() / "history.jsonl"


def _learned_from() -> str:
    return f"earlier runs on this GPU were above their plan ({history()})"


def _gpus_that_would_do(method: str, flags: list[str], ranks: int, gpu, node: int) -> int | None:
    """The least doubling of the GPUs at which something fits by the closed forms; None up to 4096."""
    more = ranks
    while more < 4096:
        more *= 2
        limit = int(gpu.memory_gib * GIB) - sum(_allowance(gpu, more).values())
        try:
            found = candidates(method, flags, more, gpu, node=node)
        except UserError:
            continue
        if any(candidate.peak <= limit for candidate in found):
            return more
    return None


def _longest_that_fits(method: str, flags: list[str], ranks: int, gpu, limit: int, node: int) -> int | None:
    """The longest halving of --max_length at which something fits by the closed forms; None below 128."""
    length = args.parse(_recipe(method), _planned(flags, method), ranks, gpu).max_length // 2
    while length >= 128:
        found = candidates(method, [*flags, "--max_length", str(length)], ranks, gpu, node=node)
        if any(candidate.peak <= limit for candidate in found):
            return length
        length //= 2
    return None


# --- the check before a launch ---


PLANNED = "ZEROFIT_PLAN"  # environment variable: what the launcher's check found, or "{}"


def announce(found: dict | None) -> None:
    """Tell the run what was predicted, and that it need not ask again."""
    os.environ[PLANNED] = json.dumps(found or {})


def get_ready(settings) -> None:
    """Begin what `check` will wait for; it imports while the data are read."""
    if settings.memory_limit or not settings.use_cpu:
        ghost.get_ready()


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
    allowance = {} if cpu else _allowance(gpu, ranks)
    whole = int(settings.memory_limit * GIB) if settings.memory_limit else int(gpu.memory_gib * GIB)
    limit = whole - sum(allowance.values())
    began = time.perf_counter()
    flags, shape = _for_a_ghost(settings.flags), _shape(settings)
    setting = _setting(settings)
    parts = closed_forms.memory(shape, setting, settings, _fused(settings, shape))
    if not cpu and peak_by_formula(parts) > limit:
        seconds = None  # a launch is refused by a simulation only
    answer = answer_of(settings.recipe, flags, ranks, [0], gpu, setting.zero, shape, setting.every, seconds)
    by = {}  # without any: the simulation
    if isinstance(answer, Exception):
        if cpu:
            raise answer
        by = {"by": str(answer)}
        parts = {part: int(size) for part, size in parts.items()}
        answer = {"total": {"backward": sum(parts.values())}, "peak": {"backward": parts}, "host": 0}
    simulated = max(answer["total"].values()) + (0 if cpu else WORKSPACE_BYTES)
    return {
        "peak_bytes": peak_by_formula(parts) if by else simulated,
        "limit_bytes": limit, "learned_bytes": allowance.get(_learned_from(), 0), "phase": max(answer["total"], key=answer["total"].get),
        "peak": answer["peak"], "host": answer["host"], "gpu": gpu.device_name if gpu else "cpu",
        "step_seconds": gpu and closed_forms.step_seconds(shape, setting, gpu, settings.max_length),
        "seconds": round(time.perf_counter() - began, 1), **by,
    }  # fmt: skip


def _fused(settings, shape: Shape) -> bool:
    """Whether the loss is made without the logits."""
    return settings.fused_loss != "false" and (settings.fused_loss == "true" or shape.vocabulary >= 32_000)


def _setting(settings) -> Setting:
    every = settings.gradient_checkpointing_every if settings.gradient_checkpointing else 0
    micro = settings.per_device_train_batch_size
    node = int(os.environ.get("LOCAL_WORLD_SIZE") or closed_forms.GPUS_OF_A_NODE)
    return Setting(int(settings.zero), settings.offload, every, micro, micro * settings.max_length,
                   settings.gradient_accumulation_steps, settings.world_size, settings.activation_offload,
                   bool(settings.offload_path), node, settings.zero_hpz_partition_size or 1)  # fmt: skip


def check(settings, seconds: float | None = CHECK_SECONDS) -> dict | None:
    """`predict`, said in a line; None also where it is not known.

    Args: seconds: that the simulation is waited for when the job fits by formula; None: to its end.

    Raises: NothingFits when it does not fit by simulation and --force is not given; UserError for the user's mistakes.
    """
    try:
        found = predict(settings, seconds)
    except ghost.GhostFailed as error:
        print(f"plan: the exact check failed: {error}; whether the job fits is not known", flush=True)
        return None
    finally:
        ghost.dismiss()
    if found is None:
        return None
    peak, limit = found["peak_bytes"], found["limit_bytes"]
    size = f"{peak / GIB:.2f} of {limit / GIB:.2f} GiB a rank, highest in the {found['phase']} phase"
    fits = "fits" if peak <= limit else "does not fit"
    if "by" in found:
        print(f"plan: {ESTIMATE.format(found['by'])}\nplan: {fits} by formula: {size}", flush=True)
        return found
    if peak > limit and not settings.force:
        learned = f", {found['learned_bytes'] / GIB:.2f} GiB more kept free since {history()} has runs above their plan"
        raise NothingFits(
            f"this job does not fit: {size}{learned if found['learned_bytes'] else ''}; `make plan` with the same arguments "
            "finds one that does, --force true starts it anyway."
        )
    print(f"plan: {fits}: {size}", flush=True)
    return found


def only_print(settings: args.Settings) -> None:
    """Print what --dry_run or --show asks for and end the process; without either, do nothing."""
    if settings.dry_run:
        dry_run(settings)
        raise SystemExit(0)
    if settings.show:
        from . import report

        count = settings.world_size
        print(f"{settings.recipe}, {count} process{'es' * (count > 1)}\n{report.summary(settings)}")
        raise SystemExit(0)


def dry_run(settings) -> None:
    """--dry_run: print what this very job would hold, on --gpu or this machine.

    Raises: NothingFits when it does not fit; UserError without a GPU and without --gpu or --memory_limit.
    """
    from . import memory_report

    if settings.gpu != "detect":
        settings = args.parse(settings.recipe, settings.flags, settings.world_size, hardware.find(settings.gpu))
    if settings.use_cpu and not settings.memory_limit:
        raise UserError(
            "--dry_run: there is no GPU here; name one with --gpu h100-80g, or a limit with --memory_limit."
        )
    if found := check(settings, seconds=None):
        print(memory_report.table(found["peak"]))


def asked(flags: list[str]) -> bool:
    """Whether the command line says --zero auto by name."""
    return _without(flags, "--zero", "auto") != flags


def chosen_flags(recipe: str, flags: list[str], ranks: int, node: int = closed_forms.GPUS_OF_A_NODE) -> list[str]:
    """--zero auto: the flags of the fastest setting that fits this machine's GPUs; on a CPU the flags as they are,
    where the stage goes by the number of processes. node: GPUs of a machine.

    Raises: NothingFits.
    """
    if not devices.torch_sees_some():
        return flags
    gpu = hardware.find("detect", min(ranks, node))
    bare = _without(flags, "--zero", "auto")
    plan = search(_methods("", recipe, bare), bare, ranks, gpu, say=lambda text: print(text, flush=True), node=node)
    from . import plan_report

    if plan.chosen is None:
        raise NothingFits(plan_report.nothing_fits(plan))
    print(f"chosen: {plan.chosen.label}, {plan.chosen.peak / GIB:.1f} of {plan.limit / GIB:.1f} GiB", flush=True)
    return plan.chosen.flags


def _for_a_ghost(flags: list[str]) -> list[str]:
    """Without what does not change memory, so that the answer is found again."""
    from . import probe

    return probe.drop(flags, "--dry_run", "--show", "--gpu", "--gpus", "--force", "--output_dir", "--memory_limit",
                      "--resume_from_checkpoint", "--on_oom", "--max_restarts", "--hang_timeout", "--on_nan",
                      "--max_nan_steps", "--canary", "--resume_anyway")  # fmt: skip


# --- what was measured ---


def remember(predicted: dict, measured_bytes: int, folder: Path) -> None:
    """Append predicted against measured peak to the run folder's plan.json and to the local history."""
    from . import report

    report.write_json(folder / "plan.json", predicted | {"measured": _learn(predicted, measured_bytes)})


def outgrown(errors: list[str]) -> None:
    """A job ran out of memory: the history learns that it needed more than there was, unless somebody else used the GPU;
    and what was announced is taken back, since the next attempt has other settings.

    Args: errors: the ranks' tracebacks, with torch's words on who holds how much.
    """
    predicted = json.loads(os.environ.get(PLANNED, "{}"))
    announce(None)
    if (
        predicted
        and "by" not in predicted
        and predicted["gpu"] != "cpu"
        and predicted["peak_bytes"] < predicted["limit_bytes"]
        and any(_alone_on_the_gpu(text) for text in errors)
    ):
        _learn(predicted, predicted["limit_bytes"])


def _alone_on_the_gpu(text: str) -> bool:
    """Whether torch's message on an out-of-memory accounts for the whole GPU with this process and what is free.

    It reads: "GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free. [Process 7 has 4.00 GiB memory in use.]
    Including non-PyTorch memory, this process has 73.80 GiB memory in use." (c10/cuda/CUDACachingAllocator.cpp)
    """
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    sizes = []
    for before in ("total capacity of", "of which", "this process has"):
        size = re.search(rf"{before} ([\d.]+) (bytes|KiB|MiB|GiB)", text)
        if size is None:
            return False
        sizes.append(float(size[1]) * units[size[2]])
    whole, free, own = sizes
    return whole - free - own < devices.NOBODY_ELSE_BYTES


def _learn(predicted: dict, measured_bytes: int) -> dict:
    entry = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "gpu": predicted["gpu"], "predicted_bytes": predicted["peak_bytes"],
        "measured_bytes": measured_bytes, "ratio": round(measured_bytes / predicted["peak_bytes"], 4),
        "versions": {p: metadata.version(p) for p in ("torch", "transformers", "deepspeed")},
        "python": platform.python_version(),
    }  # fmt: skip
    try:
        history().parent.mkdir(parents=True, exist_ok=True)
        with history().open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:  # the run itself has finished
        print(f"note: {history()}: the measured peak is not kept: {error.strerror}", flush=True)
    return entry


def learned_allowance(device_name: str, memory_gib: float = math.inf) -> int:
    """Return the bytes by which runs on this kind of GPU with this torch were above their plan: the 90th percentile of the
    last 50, at most a tenth of the GPU; 0 without a history."""
    try:
        lines = history().read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    above = []
    for line in lines:
        try:
            entry = json.loads(line)
            if entry["gpu"] == device_name and entry["versions"]["torch"] == metadata.version("torch"):
                above.append(entry["measured_bytes"] - entry["predicted_bytes"])
        except (ValueError, KeyError, TypeError):
            continue
    above = sorted(above[-LEARNED_RUNS:])
    high = above[math.ceil(0.9 * len(above)) - 1] if above else 0
    return int(max(0, min(high, LEARNED_AT_MOST * memory_gib * GIB)))


def _with_values(flags: list[str]) -> list[list[str]]:
    """Return each flag of the command line with its values."""
    found: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found


def command(candidate: Candidate, ranks: int) -> str:
    """The `make` line that runs it; on several nodes that of the first one."""
    nodes, rest = candidate.setting.nodes, []
    words = {"GPUS": str(ranks)}
    if nodes > 1 and ranks % nodes == 0:
        words = {"GPUS": str(ranks // nodes), "NNODES": str(nodes), "NODE_RANK": "0", "MASTER_ADDR": "name-of-node-0"}
    for flag in _with_values(candidate.flags):
        name, _, value = flag[0].partition("=")
        name, values = name.lstrip("-").replace("-", "_"), [*([value] if value else []), *flag[1:]]
        if name in ("zero", "offload", "model", "data", "config") and len(values) == 1:
            words[name.upper()] = values[0]
        else:  # --data with several files, too: a make variable holds one
            rest += flag
    if words.get("DATA") == UNNAMED:
        words["DATA"] = "your.jsonl"
    if words.get("OFFLOAD") == "none":
        del words["OFFLOAD"]
    recipe = _recipe(candidate.method)
    more = f" ARGS={shlex.quote(shlex.join(rest))}" if rest else ""
    return f"make {recipe} " + " ".join(f"{k}={shlex.quote(v)}" for k, v in words.items()) + more
