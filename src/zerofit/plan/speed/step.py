"""Price an optimizer step from the operations of its model, by part.

Each operation has a rate (rates.json): products by shape, attention by the length of rows, elementwise kernels by
bytes, each kernel by what Python needs to start it. docs/notes/published-speeds.md compares with published speeds.
"""

import functools
import math
from dataclasses import dataclass, fields, replace

from zerofit.base.hardware import Gpu
from zerofit.plan.formulas import Setting, Shape, exchanges, of_states, share
from zerofit.plan.speed import links, rates, work
from zerofit.plan.speed.kernels import Kernels
from zerofit.plan.speed.rates import Rates
from zerofit.plan.speed.work import Product, Work

# Bytes that a number of `work.Passes` costs in the forward and in the backward, with transformers' modules and with
# fused ones. Counted from their kernels: each reads and writes 2 bytes a number, or 4 in fp32.
PASSES = {
    "rms": ((36, 84), (4, 6)),  # to fp32, square, mean, product, to 16 bits, weight
    "layer_norm": ((4, 6), (4, 6)),
    "rotated": ((20, 30), (4, 4)),  # two products, halves turned round, a sum
    "gated": ((10, 18), (6, 10)),  # activation, product with the gate
    "activated": ((4, 6), (4, 6)),
    "composed": ((36, 66), (36, 66)),  # an activation of several kernels
    "added": ((6, 6), (6, 6)),
    "shared": ((0, 6), (0, 6)),
    "joined": ((0, 4), (0, 4)),
    "turned": ((4, 4), (4, 4)),
    # Of the packages' kernels; the backward computes chunks and states again.
    "delta": ((28, 66), (28, 66)),  # convolution; norms of q and k, keys with keys, w and u, chunks' states, output
    "state": ((18, 42), (18, 42)),  # convolution; chunks' states, scan with its gate
    "convolved": ((16, 26), (16, 26)),  # convolution between two products
    "routed": ((30, 60), (7, 10)),  # gathered for the experts, weighted, added at its place: by sorting, where in loops
}

NORM_WEIGHTS = {"rms": (8, 2), "layer_norm": (4, 4)}  # of the backward of norms whose weights train

# More of them where hidden states are fp32: the inputs of five products are cast, and gradients added in fp32.
WIDE_STATES = {"rms": (30, 55), "layer_norm": (30, 55), "rotated": (24, 28)}

# Of a number of an adapted output, and of its input: where B's product is added in place; where it is a sum of its own;
# where inputs are cast to the adapter's fp32 and back; where all of the adapter is in fp32.
LORA = {
    "in place": ((4, 0), (0, 6)), "sum": ((10, 4), (0, 6)), "cast": ((10, 4), (12, 18)), "fp32": ((24, 20), (6, 12)),
}  # fmt: skip

DROPOUT = (5, 5)  # of a number of the input: it, a mask of bytes, the result

CLONE = 4  # of a number of the output of an adapted packed layer, which peft clones

CAST = 6  # of a weight in fp32 for products of 16 bits, and of its gradient

LOGITS = {False: (14, 18), True: (10, 14)}  # of a logit, whole or in chunks: in fp32, softmax, gradient

UNPACKED = {4: 2.55, 8: 3.0}  # of a packed weight whenever it is used: read packed, written in 16 bits

SCORES = (22, 24)  # of a score of an attention that writes them: fp32 softmax, mask, 16 bits

ADAPTED_EXPERTS = 8  # of a weight of fused experts with adapters, in each pass: B A is added to a copy

GRADIENTS = 8  # of a trained number in each micro batch: added to, and copied into a bucket

STATES = 14  # of a trained number of a rank's share: gradient to fp32, its norm, weights back to 16 bits

# Kernels that Python starts in a forward.
KERNELS = {"rms": (7, 1), "layer_norm": (1, 1), "rotary": (14, 1), "gated": (2, 1), "attention": 6, "added": 2}

KERNELS_OF_LINEAR, KERNELS_OF_PACKED = 1.2, 4

KERNELS_OF_CONVOLVED = 9  # of a layer with a convolution: with sums of the decay, states of chunks and the rest

KERNELS_OF_ADAPTER = {True: 4, False: 7}  # with B's product added in place, or not

KERNELS_OF_EXPERT, KERNELS_OF_ROUTER = 14, 25  # of each expert where they are called one by one; of a layer

PRODUCTS_OF_EXPERT = 2  # kernels of each expert where its products alone are by themselves

BACKWARD = 1.9  # kernels of a backward for one of the forward

SOFTNESS = 4  # of the larger of the GPU's and the host's time: each is waited for in some layers

SEED = 2.5  # operations of an attention's backward for one of its forward: scores again, four gradients


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer step on a GPU, by part; those of the GPU that are waited for, not what runs beside."""

    products: float = 0.0  # matrix products of dense layers, with recomputation
    attention: float = 0.0
    elementwise: float = 0.0  # norms, activations, rotary embeddings, sums
    experts: float = 0.0  # products of routed experts
    unpacking: float = 0.0  # packed weights to 16 bits
    loss: float = 0.0  # logits and what is computed of them
    starting: float = 0.0  # the GPU waits for Python, which starts its kernels
    links: float = 0.0  # collectives that nothing runs beside
    bubble: float = 0.0  # a stage waits while the pipeline fills and drains
    update: float = 0.0  # optimizer, gradients and their norm
    copies: float = 0.0  # to and from host memory or a disk

    @property
    def seconds(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def arithmetic(self) -> float:
        """Return the seconds that communication can run beside."""
        return self.products + self.attention + self.elementwise + self.experts + self.unpacking + self.loss


def seconds(s: Shape, setting: Setting, gpu: Gpu, sequence: int) -> float:
    """Return the estimated seconds of an optimizer step. sequence: tokens of a document."""
    return of(s, setting, gpu, sequence).seconds


def of(s: Shape, setting: Setting, gpu: Gpu, sequence: int) -> Step:
    """Return the estimated Step. sequence: tokens of a document."""
    found, count, micro_batches = rates.of(gpu, setting.of_a_node), setting.pp, setting.accumulation
    one = _micro_batch(s, setting, found, sequence)
    by_part = {name: value * micro_batches / count for name, value in one.items()}
    computing = Step(**by_part)
    update, copies = _update(s, setting, found)
    copies += _copied_activations(s, setting, found)
    return Step(
        **by_part,
        links=_waited_for(s, setting, found, computing) + _sent_on(s, setting, found),
        # P stages are busy with M micro batches in M + P - 1 turns
        bubble=computing.seconds / micro_batches * (count - 1),
        update=update + found.step,
        copies=copies,
    )


# --- a micro batch ---


def _micro_batch(s: Shape, setting: Setting, found: Rates, sequence: int) -> dict[str, float]:
    """Return the seconds of forward, recomputation and backward of a micro batch by all layers, by fields of Step."""
    of_model = s.work or _dense(s)
    if of_model.loops_experts:
        setting = replace(setting, kernels=replace(setting.kernels, loops_experts=True))
    again = 1 / setting.every if setting.every else 0.0
    whole = 0.0 if setting.selective else again  # of products and attention
    forwards = 1.0 + setting.forwards
    products = _products(of_model.products, setting, found)
    attention = _attention(s, of_model, setting, found, sequence, forwards, whole)
    passes = _elementwise(s, of_model, setting, found, forwards + again)
    logits = setting.tokens * sum(p.out for p in of_model.products if p.head) / setting.tp
    moved = LOGITS[setting.kernels.fused_loss]
    parts = products | {"attention": attention, "elementwise": passes}
    parts["loss"] += logits * (moved[0] * forwards + moved[1]) / found.memory
    on_gpu = sum(parts.values())
    of_host = _starting(s, of_model, setting, found, forwards, again)
    waited = (on_gpu**SOFTNESS + of_host**SOFTNESS) ** (1 / SOFTNESS)
    return parts | {"starting": waited - on_gpu}


@functools.lru_cache(maxsize=64)
def _dense(s: Shape) -> Work:
    """Return the operations of a model of which only the dimensions are known."""
    return work.dense(
        layers=s.layers, hidden=s.hidden, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim,
        intermediate=s.intermediate, vocabulary=s.vocabulary, trained=not s.frozen,
    )  # fmt: skip


def operations(s: Shape, setting: Setting) -> float:
    """Return the operations of the matrix products of an optimizer step on all ranks that share a row."""
    of_model, tokens = s.work or _dense(s), setting.tokens * setting.sp * setting.accumulation
    return sum(p.flops(tokens) * sum(_times(p, setting)) for p in of_model.products)


def _times(p: Product, setting: Setting) -> tuple[float, float, float]:
    """Return how often a micro batch computes a product, its gradient to the input, and that to the weight."""
    left_out = setting.selective or not p.of_layers or (p.last and setting.kernels.stops_early)
    again = 1 / setting.every if setting.every and not left_out else 0.0
    return 1.0 + setting.forwards + again, 1.0, float(p.trained)


def _products(products: tuple[Product, ...], setting: Setting, found: Rates) -> dict[str, float]:
    """Return the seconds of all products of a micro batch and of unpacking their weights, by fields of Step."""
    arithmetic = setting.arithmetic
    if arithmetic < 1 and found.measured and found.fp8_products:  # products of 8-bit floats
        arithmetic = max(0.5, found.products / found.fp8_products)
    parts = dict.fromkeys(("products", "experts", "unpacking", "loss"), 0.0)
    speed = found.fp32_products if setting.kernels.fp32_products else found.products
    for p in products:
        times, timed = _times(p, setting), _of_experts if p.experts else _of_rows
        apart = setting.kernels.loops_experts or setting.kernels.experts_apart
        each = timed(p, setting.tokens, setting.tp, found, speed, apart)
        spent = sum(n * seconds for n, seconds in zip(times, each, strict=True))
        part = "loss" if p.head else "experts" if p.experts else "products"
        parts[part] += p.count * spent * (1.0 if p.adapter or p.head else arithmetic)
        if p.bits < 16:
            parts["unpacking"] += p.weights * UNPACKED[p.bits] * (times[0] + times[1]) / found.unpacking
    return parts


def _of_rows(p: Product, tokens: float, split: int, found: Rates, speed: float, _loops) -> tuple[float, float, float]:
    """Return the seconds of a product's forward, of its gradient to the input, and to the weight."""
    out = p.out / split
    return (
        found.product_seconds(tokens, p.wide, out, speed),
        found.product_seconds(tokens, out, p.wide, speed * found.backward),
        found.product_seconds(p.wide, tokens, out, speed * found.backward),
    )


def _of_experts(
    p: Product, tokens: float, _split, found: Rates, speed: float, loops: bool
) -> tuple[float, float, float]:
    """Return the same for the experts of a layer, each with its share of the rows."""
    busy = min(p.experts, tokens * p.selected)
    rows = tokens * p.selected / busy
    if loops:
        times = _of_rows(p, rows, 1, found, speed, loops)
        return tuple(busy * time for time in times)
    # one kernel: its tiles fill the GPU together, but an expert's last tile of rows is rarely full
    filled = rows / (rows + rates.TILE / 2)
    times = _of_rows(p, tokens * p.selected, 1, found, speed * found.grouped * filled, loops)
    weights = 2 * p.wide * p.out * busy / found.memory
    return tuple(max(time, weights) for time in times)


def _attention(
    s: Shape, of_model: Work, setting: Setting, found: Rates, sequence: int, forwards: float, again: float
) -> float:
    """Return the seconds of causal attention: each token meets on average half of its document, or of its window."""
    total, heads = 0.0, of_model.heads / setting.tp
    slow = found.products / found.fp32_products if setting.kernels.fp32_products else 1.0
    narrow = min(1.0, 0.78 + 0.22 * of_model.head_dim / 128)  # 64 numbers a head: about 0.89 of the rate at 128
    for window, layers in of_model.attentions:
        seen = min(sequence, window or sequence)
        met = seen - seen * seen / (2 * sequence)
        pairs = setting.tokens * met * heads * layers
        reached = narrow * setting.kernels.attention * seen / (seen + found.attention_half)
        operations = 4 * pairs * of_model.head_dim * slow
        total += operations * (forwards + again) / (found.attention_forward * reached)
        total += operations * SEED / (found.attention_backward * reached)
        if s.scores:  # the attention writes them
            scores = setting.tokens * sequence * heads * layers
            total += scores * (SCORES[0] * (forwards + again) + SCORES[1]) / found.memory
    return total


def _elementwise(s: Shape, of_model: Work, setting: Setting, found: Rates, forwards: float) -> float:
    """Return the seconds of what is limited by memory. forwards: with the recomputed share."""
    passes, kernels = of_model.passes, setting.kernels
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
    of_output, of_input = LORA[kernels.adapters]
    in_place = kernels.adapters == "in place"
    forward += passes.adapted_out * (of_output[0] + CLONE * (passes.packed > 0 and not in_place))
    backward += passes.adapted_out * of_output[1] + passes.adapted_in * of_input[1]
    forward += passes.adapted_in * (of_input[0] + DROPOUT[0] * kernels.lora_dropout)
    backward += passes.adapted_in * DROPOUT[1] * kernels.lora_dropout
    moved = setting.tokens * (forward * forwards + backward)
    moved += s.adapted_experts * s.layers * ADAPTED_EXPERTS * (forwards + 1)
    if setting.fp32_weights:
        moved += CAST * (forwards * s.parameters + s.trainable) / setting.tp
    return moved / found.memory


def _starting(s: Shape, of_model: Work, setting: Setting, found: Rates, forwards: float, again: float) -> float:
    """Return the seconds in which the host starts all kernels of a micro batch."""
    started = kernels_started(s, of_model, setting.kernels)
    total = started * (found.kernel * (forwards + again) + found.backward_kernel * BACKWARD)
    if setting.zero == 3 and setting.ranks > 1:
        modules = of_model.layers if setting.whole_layers else of_model.passes.modules
        total += modules * found.module * (forwards + again + 1)
    return total


def kernels_started(s: Shape, of_model: Work, kernels: Kernels) -> float:
    """Return how many kernels Python starts in a forward."""
    passes, layers = of_model.passes, of_model.layers
    fused = s.liger or kernels.compiled
    norms_of_one = 2 * layers * (passes.layer_norm > 0)
    started = passes.norms * KERNELS["rms"][fused] + norms_of_one
    of_attention = KERNELS["rotary"][fused] * (passes.rotated > 0) + KERNELS["attention"]
    started += sum(n for _, n in of_model.attentions) * of_attention
    started += passes.convolutions * KERNELS_OF_CONVOLVED
    started += layers * (KERNELS["added"] + KERNELS["gated"][fused])
    started += passes.linears * KERNELS_OF_LINEAR + passes.packed * KERNELS_OF_PACKED
    started += passes.adapters * KERNELS_OF_ADAPTER[kernels.adapters == "in place"]
    in_layers = max((p.count for p in of_model.products if p.experts), default=0.0)
    experts = max((p.experts for p in of_model.products if p.experts), default=0)
    of_products = experts * PRODUCTS_OF_EXPERT * kernels.experts_apart
    started += in_layers * (experts * KERNELS_OF_EXPERT if kernels.loops_experts else KERNELS_OF_ROUTER + of_products)
    return started


# --- what is sent ---


def _waited_for(s: Shape, setting: Setting, found: Rates, computing: Step) -> float:
    """Return the seconds of collectives that no arithmetic runs beside.

    A layer waits for the exchanges of its ranks. At stage 3 weights are gathered and gradients reduced beside the
    arithmetic of other layers, else gradients beside the backward, two thirds of it; at stages 1 and 2 the update waits
    for nothing but its weights are gathered after it.
    """
    if setting.pp > 1:
        s, setting = _of_stage(s, setting)
    exchanged = links.seconds(exchanges(s, setting), setting, found)
    states = of_states(s, setting)
    first = 1 if setting.zero in (1, 2) else len(states)
    beside, after = (links.seconds(part, setting, found) for part in (states[:first], states[first:]))
    backward = computing.arithmetic if setting.zero == 3 else computing.arithmetic * 2 / 3
    if setting.zero in (0, 1):
        backward /= setting.accumulation  # gradients are sent once
    return exchanged + after + beside - found.overlap * min(beside, backward)


def _of_stage(s: Shape, setting: Setting) -> tuple[Shape, Setting]:
    """Return the shape and the setting of a stage of a pipeline, whose ranks share out only their own layers."""
    stage = replace(s, trainable=s.trainable // setting.pp, layers=math.ceil(s.layers / setting.pp))
    groups = tuple((way, size) for way, size in setting.groups if way.splits != "layers")
    return stage, replace(setting, ranks=setting.ranks // setting.pp, groups=groups)


def _sent_on(s: Shape, setting: Setting, found: Rates) -> float:
    """Return the seconds in which a stage of a pipeline sends hidden states on, and their gradients back."""
    if setting.pp == 1:
        return 0.0
    link = found.node if setting.nodes > 1 else found.link
    return 2 * 2.0 * setting.tokens * s.hidden * setting.accumulation / link


# --- the update ---


def _update(s: Shape, setting: Setting, found: Rates) -> tuple[float, float]:
    """Return the seconds of the update, and those of copies to host memory or a disk for it."""
    held = share(s, setting)
    trained, ranks = held.trainable / setting.pp, setting.ranks // setting.tp // setting.pp
    own = trained / (ranks if setting.zero else 1)
    on_gpu = GRADIENTS * trained * setting.accumulation + (STATES * own if setting.zero else 0)
    copies, update_bytes = 0.0, setting.kernels.update_bytes * own
    disk = found.nvme / setting.of_a_node  # shared by a node's GPUs
    if setting.offload == "none":
        on_gpu += update_bytes
        return on_gpu / found.memory, copies
    copies += 4 * own / found.host + (2 * 12 * own / disk if setting.nvme else 0)
    if setting.offload == "all":
        moved = 2 * (2.0 * held.trainable + s.frozen * s.frozen_bytes) / setting.ranks * setting.accumulation
        copies += moved / (min(disk, found.host) if setting.nvme else found.host)
    return on_gpu / found.memory + update_bytes / found.cpu_adam, copies


def _copied_activations(s: Shape, setting: Setting, found: Rates) -> float:
    """Return the seconds of copies of the inputs of checkpointed layers that no arithmetic runs beside."""
    if not setting.activation_offload:
        return 0.0
    width = 4.0 if setting.fp32_weights else 2.0
    moved = 2 * width * s.layers / setting.every * s.hidden * setting.tokens * setting.accumulation
    return moved / found.host * (1 - found.host_overlap) / setting.pp
