"""Estimate the seconds of an optimizer step, by part, from the operations of its model.

The rates (rates.json) depend on the shape of a product, the row length of attention and the bytes of an elementwise
kernel; starting a kernel from Python takes time as well. benchmarks/results/published-speeds.md compares the estimates
with published speeds.
"""

import functools
import math
from dataclasses import dataclass, fields, replace

from zerofit.base.hardware import Gpu
from zerofit.plan.formulas import PlanPoint, Shape, exchanges, share, state_collectives
from zerofit.plan.speed import links, work
from zerofit.plan.speed.kernels import Kernels
from zerofit.plan.speed.rates import TILE, Rates, rates_for
from zerofit.plan.speed.work import Product, Work

# Bytes per number of `work.Passes` in the forward and in the backward, with transformers' modules and with fused ones.
# They are counted from the kernels: each reads and writes 2 bytes per number, or 4 in fp32.
PASSES = {
    "rms": ((36, 84), (4, 6)),  # to fp32, square, mean, product, to 16 bits, weight
    "layer_norm": ((4, 6), (4, 6)),
    "rotated": ((20, 30), (4, 4)),  # two products, swapped halves, a sum
    "gated": ((10, 18), (6, 10)),  # activation, product with the gate
    "activated": ((4, 6), (4, 6)),
    "composed": ((36, 66), (36, 66)),  # an activation of several kernels
    "added": ((6, 6), (6, 6)),
    "shared": ((0, 6), (0, 6)),
    "joined": ((0, 4), (0, 4)),
    "turned": ((4, 4), (4, 4)),
    # The kernels of the packages; the backward recomputes chunks and states.
    "delta": ((28, 66), (28, 66)),  # convolution; norms of q and k, keys with keys, w and u, chunks' states, output
    "state": ((18, 42), (18, 42)),  # convolution; chunks' states, scan with its gate
    "convolved": ((16, 26), (16, 26)),  # convolution between two products
    "routed": ((30, 60), (7, 10)),  # gathered for the experts, weighted, scattered: with a loop, with sorting
}

NORM_WEIGHTS = {"rms": (8, 2), "layer_norm": (4, 4)}  # additional bytes in the backward of norms with trained weights

# Additional bytes with fp32 hidden states: the inputs of five products are cast, and gradients are added in fp32.
WIDE_STATES = {"rms": (30, 55), "layer_norm": (30, 55), "rotated": (24, 28)}

# Bytes (forward, backward) per number of an adapted layer's output and input: B's product is added in place; it is a
# separate sum; inputs are cast to the adapter's fp32 and back; the complete adapter is in fp32.
LORA = {
    "in place": ((4, 0), (0, 6)), "sum": ((10, 4), (0, 6)), "cast": ((10, 4), (12, 18)), "fp32": ((24, 20), (6, 12)),
}  # fmt: skip

DROPOUT = (5, 5)  # bytes per number of the input: input, 1-byte mask, result
CLONE = 4  # bytes per number of the output of an adapted packed layer, which peft clones
CAST = 6  # bytes per fp32 weight that is cast for 16-bit products, and per number of its gradient
LOGITS = {False: (14, 18), True: (10, 14)}  # bytes per logit, all together or in chunks: in fp32, softmax, gradient
UNPACKED = {4: 2.55, 8: 3.0}  # bytes per use of a packed weight: read packed, written in 16 bits
SCORES = (22, 24)  # bytes per score of eager attention: fp32 softmax, mask, 16 bits
ADAPTED_EXPERTS = 8  # bytes per weight of adapted fused experts and pass: B A is added to a copy
GRADIENTS = 8  # bytes per trained parameter and micro batch: accumulated, and copied into a bucket
STATES = 14  # bytes per trained parameter of a rank's share: gradient to fp32, its norm, weights to 16 bits

# Kernels that Python starts in a forward.
KERNELS = {"rms": (7, 1), "layer_norm": (1, 1), "rotary": (14, 1), "gated": (2, 1), "attention": 6, "added": 2}
KERNELS_OF_LINEAR, KERNELS_OF_PACKED = 1.2, 4
KERNELS_OF_CONVOLVED = 9  # a layer with a convolution, with sums of the decay and states of chunks
KERNELS_OF_ADAPTER = {True: 4, False: 7}  # whether B's product is added in place
KERNELS_OF_EXPERT, KERNELS_OF_ROUTER = 14, 25  # per expert that a loop calls; per layer
PRODUCTS_OF_EXPERT = 2  # kernels per expert if only the products have a kernel per expert
BACKWARD = 1.9  # kernels of the backward per kernel of the forward
SOFTNESS = 4  # exponent of the soft maximum of the GPU's and the host's time: either is slower in some layers
SEED = 2.5  # operations of an attention's backward per operation of its forward: scores again, four gradients


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step, by part. Overlapped work does not count."""

    products: float = 0.0  # matrix products of dense layers, with recomputation
    attention: float = 0.0
    elementwise: float = 0.0  # norms, activations, rotary embeddings, sums
    experts: float = 0.0  # products of routed experts
    unpacking: float = 0.0  # packed weights are converted to 16 bits
    loss: float = 0.0  # logits and loss
    starting: float = 0.0  # the GPU waits for Python to start its kernels
    links: float = 0.0  # collectives that computation does not overlap
    bubble: float = 0.0  # a stage waits while the pipeline fills and drains
    update: float = 0.0  # optimizer, gradients and their norm
    copies: float = 0.0  # to and from host memory or a disk

    @property
    def seconds(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def arithmetic(self) -> float:
        """Return the seconds of computation that communication can overlap with."""
        return self.products + self.attention + self.elementwise + self.experts + self.unpacking + self.loss


def seconds(s: Shape, setting: PlanPoint, gpu: Gpu, sequence: int) -> float:
    """Return the estimated seconds of an optimizer step. sequence: tokens of a document."""
    return estimate_step(s, setting, gpu, sequence).seconds


def estimate_step(s: Shape, setting: PlanPoint, gpu: Gpu, sequence: int) -> Step:
    """Return the estimated Step. sequence: tokens of a document."""
    rates, stages, micro_batches = rates_for(gpu, setting.ranks_per_node), setting.pp, setting.accumulation
    per_micro_batch = _micro_batch(s, setting, rates, sequence)
    by_part = {name: value * micro_batches / stages for name, value in per_micro_batch.items()}
    computing = Step(**by_part)
    update, copies = _update(s, setting, rates)
    if setting.activation_offload:  # the part that computation does not overlap
        inputs = (4.0 if setting.fp32_weights else 2.0) * s.layers / setting.every * s.hidden * setting.tokens
        copies += 2 * inputs * micro_batches / rates.host * (1 - rates.host_overlap) / stages
    sent = _exposed_seconds(s, setting, rates, computing)
    if stages > 1:  # hidden states are sent to the next stage, and their gradients back
        link = rates.node if setting.nodes > 1 else rates.link
        sent += 2 * 2.0 * setting.tokens * s.hidden * micro_batches / link
    return Step(
        **by_part,
        links=sent,
        # P stages are busy with M micro batches in M + P - 1 turns
        bubble=computing.seconds / micro_batches * (stages - 1),
        update=update + rates.step,
        copies=copies,
    )


# --- a micro batch ---


def _micro_batch(s: Shape, setting: PlanPoint, rates: Rates, sequence: int) -> dict[str, float]:
    """Return the seconds of forward, recomputation and backward of a micro batch by all layers, by fields of Step."""
    model_work = s.work or _dense(s)
    if model_work.loops_experts:
        setting = replace(setting, kernels=replace(setting.kernels, loops_experts=True))
    again = 1 / setting.every if setting.every else 0.0
    recomputed = 0.0 if setting.selective else again  # share of attention that is recomputed
    forwards = 1.0 + setting.forwards
    products = _products(model_work.products, setting, rates)
    attention = _attention(s, model_work, setting, rates, sequence, forwards, recomputed)
    passes = _elementwise(s, model_work, setting, rates, forwards + again)
    logits = setting.tokens * sum(p.out for p in model_work.products if p.head) / setting.tp
    moved = LOGITS[setting.kernels.fused_loss]
    parts = products | {"attention": attention, "elementwise": passes}
    parts["loss"] += logits * (moved[0] * forwards + moved[1]) / rates.memory
    on_gpu = sum(parts.values())
    on_host = _starting(s, model_work, setting, rates, forwards, again)
    waited = (on_gpu**SOFTNESS + on_host**SOFTNESS) ** (1 / SOFTNESS)
    return parts | {"starting": waited - on_gpu}


@functools.lru_cache(maxsize=64)
def _dense(s: Shape) -> Work:
    """Return the operations of a model from its dimensions."""
    return work.dense(
        layers=s.layers, hidden=s.hidden, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim,
        intermediate=s.intermediate, vocabulary=s.vocabulary, trained=not s.frozen,
    )  # fmt: skip


def operations(s: Shape, setting: PlanPoint) -> float:
    """Return the operations of the matrix products of an optimizer step, on all ranks that share a row."""
    model_work, tokens = s.work or _dense(s), setting.tokens * setting.sp * setting.accumulation
    return sum(p.flops(tokens) * sum(_times(p, setting)) for p in model_work.products)


def _times(p: Product, setting: PlanPoint) -> tuple[float, float, float]:
    """Return how often a micro batch computes a product, its input gradient and its weight gradient."""
    kept = setting.selective or not p.in_layer or (p.last and setting.kernels.stops_early)
    again = 1 / setting.every if setting.every and not kept else 0.0
    return 1.0 + setting.forwards + again, 1.0, float(p.trained)


def _products(products: tuple[Product, ...], setting: PlanPoint, rates: Rates) -> dict[str, float]:
    """Return the seconds of all products of a micro batch and of unpacking their weights, by fields of Step."""
    arithmetic = setting.arithmetic
    if arithmetic < 1 and rates.measured and rates.fp8_products:  # products of 8-bit floats
        arithmetic = max(0.5, rates.products / rates.fp8_products)
    parts = dict.fromkeys(("products", "experts", "unpacking", "loss"), 0.0)
    speed = rates.fp32_products if setting.kernels.fp32_products else rates.products
    for p in products:
        times, timed = _times(p, setting), _expert_seconds if p.experts else _product_seconds
        per_expert = setting.kernels.loops_experts or setting.kernels.kernel_per_expert
        each = timed(p, setting.tokens, setting.tp, rates, speed, per_expert)
        spent = sum(n * seconds for n, seconds in zip(times, each, strict=True))
        part = "loss" if p.head else "experts" if p.experts else "products"
        parts[part] += p.count * spent * (1.0 if p.adapter or p.head else arithmetic)
        if p.bits < 16:
            parts["unpacking"] += p.weights * UNPACKED[p.bits] * (times[0] + times[1]) / rates.unpacking
    return parts


def _product_seconds(
    p: Product, tokens: float, split: int, rates: Rates, speed: float, _per_expert=False
) -> tuple[float, float, float]:
    """Return the seconds of a product's forward, input gradient and weight gradient."""
    out = p.out / split
    return (
        rates.product_seconds(tokens, p.wide, out, speed),
        rates.product_seconds(tokens, out, p.wide, speed * rates.backward),
        rates.product_seconds(p.wide, tokens, out, speed * rates.backward),
    )


def _expert_seconds(
    p: Product, tokens: float, _split, rates: Rates, speed: float, per_expert: bool
) -> tuple[float, float, float]:
    """Return the seconds of `_product_seconds` for the experts of a layer, which share the rows."""
    busy = min(p.experts, tokens * p.selected)
    rows = tokens * p.selected / busy
    if per_expert:
        times = _product_seconds(p, rows, 1, rates, speed)
        return tuple(busy * time for time in times)
    # The tiles of a single kernel fill the GPU together, but the last tile of an expert is rarely full.
    filled = rows / (rows + TILE / 2)
    times = _product_seconds(p, tokens * p.selected, 1, rates, speed * rates.grouped * filled)
    weights = 2 * p.wide * p.out * busy / rates.memory
    return tuple(max(time, weights) for time in times)


def _attention(
    s: Shape, model_work: Work, setting: PlanPoint, rates: Rates, sequence: int, forwards: float, again: float
) -> float:
    """Return the seconds of causal attention: a token attends to half of its document or window on average."""
    total, heads = 0.0, model_work.heads / setting.tp
    slow = rates.products / rates.fp32_products if setting.kernels.fp32_products else 1.0
    narrow = min(1.0, 0.78 + 0.22 * model_work.head_dim / 128)  # head size 64: about 0.89 of the rate at 128
    for window, layers in model_work.attentions:
        span = min(sequence, window or sequence)
        attended = span - span * span / (2 * sequence)  # tokens, on average
        pairs = setting.tokens * attended * heads * layers
        reached = narrow * setting.kernels.attention * span / (span + rates.attention_half)
        operations = 4 * pairs * model_work.head_dim * slow
        total += operations * (forwards + again) / (rates.attention_forward * reached)
        total += operations * SEED / (rates.attention_backward * reached)
        if s.scores:  # eager attention writes them
            scores = setting.tokens * sequence * heads * layers
            total += scores * (SCORES[0] * (forwards + again) + SCORES[1]) / rates.memory
    return total


def _elementwise(s: Shape, model_work: Work, setting: PlanPoint, rates: Rates, forwards: float) -> float:
    """Return the seconds of kernels that memory limits. forwards: including the recomputed share."""
    passes, kernels = model_work.passes, setting.kernels
    fused = s.liger or kernels.compiled
    forward = backward = 0.0
    for name, costs in PASSES.items():
        numbers = getattr(passes, name) / (setting.tp if name in ("gated", "activated", "rotated", "turned") else 1)
        cost = costs[not kernels.loops_experts if name == "routed" else fused]
        forward += cost[0] * numbers
        backward += cost[1] * numbers
        if name in NORM_WEIGHTS and not s.frozen:
            backward += NORM_WEIGHTS[name][fused] * numbers
        if name in WIDE_STATES and (setting.fp32_weights or kernels.fp32_states):
            forward += WIDE_STATES[name][0] * numbers
            backward += WIDE_STATES[name][1] * numbers
    output_bytes, input_bytes = LORA[kernels.adapters]
    in_place = kernels.adapters == "in place"
    forward += passes.adapted_out * (output_bytes[0] + CLONE * (passes.packed > 0 and not in_place))
    backward += passes.adapted_out * output_bytes[1] + passes.adapted_in * input_bytes[1]
    forward += passes.adapted_in * (input_bytes[0] + DROPOUT[0] * kernels.lora_dropout)
    backward += passes.adapted_in * DROPOUT[1] * kernels.lora_dropout
    moved = setting.tokens * (forward * forwards + backward)
    moved += s.adapted_experts * s.layers * ADAPTED_EXPERTS * (forwards + 1)
    if setting.fp32_weights:
        moved += CAST * (forwards * s.parameters + s.trainable) / setting.tp
    return moved / rates.memory


def _starting(s: Shape, model_work: Work, setting: PlanPoint, rates: Rates, forwards: float, again: float) -> float:
    """Return the seconds that the host needs to start all kernels of a micro batch."""
    started = kernels_started(s, model_work, setting.kernels)
    total = started * (rates.kernel * (forwards + again) + rates.backward_kernel * BACKWARD)
    if setting.zero == 3 and setting.ranks > 1:
        modules = model_work.layers if setting.whole_layers else model_work.passes.modules
        total += modules * rates.module * (forwards + again + 1)
    return total


def kernels_started(s: Shape, model_work: Work, kernels: Kernels) -> float:
    """Return how many kernels Python starts in a forward."""
    passes, layers = model_work.passes, model_work.layers
    fused = s.liger or kernels.compiled
    started = passes.norms * KERNELS["rms"][fused] + 2 * layers * (passes.layer_norm > 0)
    per_attention = KERNELS["rotary"][fused] * (passes.rotated > 0) + KERNELS["attention"]
    started += sum(n for _, n in model_work.attentions) * per_attention
    started += passes.convolutions * KERNELS_OF_CONVOLVED
    started += layers * (KERNELS["added"] + KERNELS["gated"][fused])
    started += passes.linears * KERNELS_OF_LINEAR + passes.packed * KERNELS_OF_PACKED
    started += passes.adapters * KERNELS_OF_ADAPTER[kernels.adapters == "in place"]
    in_layers = max((p.count for p in model_work.products if p.experts), default=0.0)
    experts = max((p.experts for p in model_work.products if p.experts), default=0)
    per_product = experts * PRODUCTS_OF_EXPERT * kernels.kernel_per_expert
    started += in_layers * (experts * KERNELS_OF_EXPERT if kernels.loops_experts else KERNELS_OF_ROUTER + per_product)
    return started


# --- communication ---


def _exposed_seconds(s: Shape, setting: PlanPoint, rates: Rates, computing: Step) -> float:
    """Return the seconds of collectives that computation does not overlap.

    A layer waits for the exchanges of its ranks. At stage 3, gathering weights and reducing gradients overlap with the
    computation of other layers. At lower stages, reducing gradients overlaps with the backward, two thirds of the
    computation; stages 1 and 2 gather weights after the update.
    """
    if setting.pp > 1:  # the ranks of a stage shard the layers of that stage only
        s = replace(s, trainable=s.trainable // setting.pp, layers=math.ceil(s.layers / setting.pp))
        groups = tuple((way, size) for way, size in setting.groups if way.splits != "layers")
        setting = replace(setting, ranks=setting.ranks // setting.pp, groups=groups)
    exchanged = links.seconds(exchanges(s, setting), setting, rates)
    states = state_collectives(s, setting)
    first = 1 if setting.zero in (1, 2) else len(states)
    overlapped, after = (links.seconds(part, setting, rates) for part in (states[:first], states[first:]))
    backward = computing.arithmetic if setting.zero == 3 else computing.arithmetic * 2 / 3
    if setting.zero in (0, 1):
        backward /= setting.accumulation  # gradients are reduced once per step
    return exchanged + after + overlapped - rates.overlap * min(overlapped, backward)


# --- the update ---


def _update(s: Shape, setting: PlanPoint, rates: Rates) -> tuple[float, float]:
    """Return the seconds of the update and of its copies to host memory or a disk."""
    local = share(s, setting)
    trained, ranks = local.trainable / setting.pp, setting.ranks // setting.tp // setting.pp
    updated = trained / (ranks if setting.zero else 1)
    on_gpu = GRADIENTS * trained * setting.accumulation + (STATES * updated if setting.zero else 0)
    copies, update_bytes = 0.0, setting.kernels.update_bytes * updated
    disk = rates.nvme / setting.ranks_per_node  # the GPUs of a node share it
    if setting.offload == "none":
        on_gpu += update_bytes
        return on_gpu / rates.memory, copies
    copies += 4 * updated / rates.host + (2 * 12 * updated / disk if setting.nvme else 0)
    if setting.offload == "all":
        moved = 2 * (2.0 * local.trainable + s.frozen * s.frozen_bytes) / setting.ranks * setting.accumulation
        copies += moved / (min(disk, rates.host) if setting.nvme else rates.host)
    return on_gpu / rates.memory + update_bytes / rates.cpu_adam, copies
