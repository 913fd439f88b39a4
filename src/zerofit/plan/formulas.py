"""Estimate memory of a training step, and what it sends, in closed form.

Bytes follow transformers' eager models and DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py, stage3.py); the simulation
decides. The time of a step is in plan/speed.
"""

import math
from dataclasses import dataclass, replace

from zerofit.base import allocator, buffers
from zerofit.model.mixtures import weights as of_experts
from zerofit.optim import registry
from zerofit.parallel.interface import Parallel
from zerofit.plan.gpu_memory import GPUS_OF_A_NODE
from zerofit.plan.speed import work
from zerofit.plan.speed.kernels import AS_THE_KIT, Kernels
from zerofit.plan.speed.work import Work

MATRICES_OF_A_LAYER = 7  # of Llama; a bucket holds hidden_size^2 numbers, so nearly every matrix has a call of its own

GATHERS_OF_A_LAYER = 2  # of a layer that is gathered whole; the second is for its norms, which stay gathered

PACKED_BYTES = {4: 0.55, 8: 1.0}  # of a weight of a packed base with its constants, by bits

DDP_BUCKET = 25 * 2**20  # bytes; torch's DistributedDataParallel

PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")


SCORES, CAPPED_SCORES = 6, 8  # bytes kept of a score: softmax in fp32 and in 16 bits; the same with a tanh

SCORES_IN_BACKWARD = {SCORES: 10, CAPPED_SCORES: 17}  # and those of the gradients of the layer that is computed


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model."""

    trainable: int  # parameters that train
    frozen: int  # parameters that do not: the base of an adapter
    largest: int  # parameters of the largest trainable tensor
    hidden: int  # numbers of a token's hidden state
    layers: int
    heads: int  # of an attention
    kv_heads: int  # heads of keys and values
    head_dim: int  # numbers of a head
    intermediate: int  # width of an MLP
    vocabulary: int  # tokens
    frozen_bytes: float = 2.0  # of a frozen parameter as it is stored
    experts: int = 0  # of a mixture's layer, 0: no mixture
    idle: int = 0  # weights of experts that a token does not use
    embedding: int = 0  # weights of the embedding
    adapted_experts: int = 0  # weights of a layer, fused experts above all, to which LoRA's product is added
    adapted: str = ""  # which experts have adapters, in words
    by_layer: tuple[int, ...] = ()  # parameters of each layer, (): unknown
    liger: bool = False  # Liger's kernels will run: norms keep no fp32 copies, MLPs no result of their activation
    one_by_one: bool = False  # documents are attended to one by one, with keys and values repeated for all heads
    scores: int = 0  # bytes that a layer of eager attention keeps of each score, 0: no scores are written
    work: Work | None = None  # the operations of its step; None: those of a dense model of these dimensions
    cut: bool = True  # with fewer layers it is a smaller model of the same kind

    @property
    def parameters(self) -> int:
        return self.trainable + self.frozen


def shape(config, net, frozen_bytes: float = 2.0, bits: int = 16) -> Shape:
    """Return the Shape of a model.

    Args: config: its config.json; net: with its adapter, on the meta device; frozen_bytes: of a frozen parameter; bits:
        of the frozen linear layers but the head.
    """
    from zerofit.model.mixtures import adapted

    text = config.get_text_config()
    # the configuration of each layer where they differ (Gemma 4): the whole one refuses what differs
    configs = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]

    def first(*names, default):
        largest = (max((v for c in configs if isinstance(v := getattr(c, n, None), int)), default=0) for n in names)
        return next((value for value in largest if value), default)

    hidden = first("hidden_size", "n_embd", "d_model", default=1)
    heads = first("num_attention_heads", "n_head", default=1)
    sizes = [(p.numel(), p.requires_grad) for p in net.parameters()]
    layers = first("num_hidden_layers", "n_layer", default=1)
    kv_heads = first("num_key_value_heads", default=heads)
    head_dim = first("head_dim", default=hidden // heads)
    modules = layers_of(net, layers)
    return Shape(
        trainable=sum(n for n, trained in sizes if trained),
        frozen=sum(n for n, trained in sizes if not trained),
        largest=max(n for n, trained in sizes if trained),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        vocabulary=text.vocab_size,
        experts=of_experts.count(config),
        idle=of_experts.idle(net, config),
        embedding=hidden * text.vocab_size,
        adapted_experts=adapted.added_weights(net) // layers,
        by_layer=tuple(sum(p.numel() for p in layer.parameters()) for layer in modules),
        work=work.of_model(net, config, modules, heads=heads, kv_heads=kv_heads, head_dim=head_dim, bits=bits),
        frozen_bytes=frozen_bytes,
        adapted=adapted.in_words(net),
        cut=not getattr(text, "num_kv_shared_layers", 0),  # counted from the last layer: keys of earlier ones
    )


def score_bytes(config) -> int:
    """Return the bytes that a layer of eager attention keeps of each score."""
    return CAPPED_SCORES if getattr(config.get_text_config(), "attn_logit_softcapping", None) else SCORES


def layers_of(model, count: int) -> list:
    """Return the model's `count` layers, which are its largest list of so many modules; [] without one."""
    import torch

    def size(modules) -> int:
        return sum(getattr(p, "ds_numel", p.numel()) for p in modules.parameters())

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
    return list(max(lists, key=size, default=[]))


@dataclass(frozen=True)
class Setting:
    """The settings that a plan searches."""

    zero: int  # the stage, 0 to 3
    offload: str  # what is in host memory: none, optimizer or all
    every: int  # every n-th layer is checkpointed, 0: none
    micro: int  # rows of a micro batch
    tokens: int  # of a micro batch on one GPU
    accumulation: int  # micro batches of an optimizer step
    ranks: int  # GPUs of all nodes
    activation_offload: bool = False  # the inputs of checkpointed layers are in host memory
    nvme: bool = False  # what is offloaded is on a disk
    node: int = GPUS_OF_A_NODE  # GPUs of a node
    hpz: int = 1  # ranks that share ZeRO++'s secondary copy of the parameters, 1: there is none
    forwards: int = 0  # more of them in each step, without a backward: of a reference, of the KL term of KTO
    in_flight: int = 1  # micro batches whose activations are held at once, above 1 in a pipeline
    head: bool = True  # the GPU computes the logits
    whole_layers: int = 0  # stage 3 exchanges dense layers of up to so many numbers whole (parallel/whole_layers.py)
    selective: bool = False  # checkpointed layers keep the results of matrix products and attention
    fp32_weights: bool = False  # and so are the hidden states between layers, which each product casts for itself
    background_save: bool = False  # a node's part of a checkpoint is copied to host memory, from where it is written
    # The ways in which ranks share rows, each with the ranks of a group.
    groups: tuple[tuple[Parallel, int], ...] = ()
    arithmetic: float = 1.0  # factor of its seconds, below 1 with products of 8-bit floats
    tiles: int = 1  # of tokens in which each MLP is computed, each checkpointed
    kernels: Kernels = AS_THE_KIT  # with which it computes

    def in_words(self, method: str) -> list[str]:
        """Return how a method's model states and activations are held, as parts of a label."""
        parts = [f"{method} ZeRO-{self.zero}" + (f" with hpZ {self.hpz}" if self.hpz > 1 else "")]
        if self.offload != "none":
            parts.append(f"offload {self.offload}{' to NVMe' * self.nvme}")
        if self.every or self.activation_offload:
            every = f" every {self.every}" if self.every > 1 else ""
            kind = "selective checkpointing" if self.selective else f"checkpointing{every}"
            parts.append(kind + " offloaded" * self.activation_offload)
        if self.tiles > 1:
            parts.append("tiled MLP")
        return parts

    @property
    def ranks_per_row(self) -> int:
        """Return how many ranks share each row."""
        return math.prod(size for _, size in self.groups)

    @property
    def sp(self) -> int:
        """Return how many ranks split the tokens of a row."""
        return self._splitting("tokens")

    @property
    def tp(self) -> int:
        """Return how many ranks split each matrix."""
        return self._splitting("matrices")

    @property
    def pp(self) -> int:
        """Return the stages of a pipeline."""
        return self._splitting("layers")

    def _splitting(self, what: str) -> int:
        return math.prod(size for way, size in self.groups if way.splits == what)

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.node)

    @property
    def of_a_node(self) -> int:
        """Return the number of GPUs of one node that the job uses."""
        return min(self.ranks, self.node)


def activations(s: Shape, setting: Setting, fused: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return bytes by part at the loss, and while the last checkpointed layer is recomputed.

    Returns: {"activations", "logits"} and {"activations"}, for Llama-like layers in 16 bits without dropout.
    """
    q, k, heads, intermediate = (
        size / setting.tp
        for size in (s.heads * s.head_dim, _key_heads(s, setting) * s.head_dim, s.heads, s.intermediate)
    )
    layer = 16 * s.hidden + 4 * q + 4 * k + 4 * heads + 8 + 8 * intermediate
    norm = 4 * s.hidden  # beside its input
    tiled = setting.tiles > 1
    if s.liger:
        layer -= 2 * norm + 2 * intermediate * (not tiled)  # whose MLP is not Liger's
    if tiled:  # a tile keeps its input only, and the results of the tiles are put together
        layer += 2 * s.hidden - 8 * intermediate
    if (
        setting.fp32_weights
    ):  # 2 more of both norms' inputs and results, and copies for q, k, v, gate and up instead of 2
        layer += 10 * s.hidden
    if s.frozen:  # a frozen matrix product saves no input; an adapted one does
        layer -= 2 * s.hidden
    if s.one_by_one:
        layer += 6 * q - 4 * k  # repeated keys and values, and the outputs put together
    scores = heads * setting.tokens / setting.micro  # of a token
    layer += s.scores * scores
    if setting.sp > 1:
        layer += 2 * q  # the attention's output before it is exchanged
    products = 0.0  # what the matrix products and the attention of a layer return
    if setting.selective:
        adapted = 4 * s.hidden + 2 * q + 4 * k + 4 * intermediate if s.frozen else 0
        products = 4 * s.hidden + 4 * q + 4 * k + 4 * heads + 4 * intermediate + adapted
    recomputed = _recomputed(s, setting)
    state = (4 if setting.fp32_weights else 2) * s.hidden
    stored = products + (0 if setting.activation_offload else state)
    kept = (recomputed * stored + (s.layers - recomputed) * layer) * setting.in_flight
    summed = 2.0 * s.adapted_experts  # peft adds the product of A and B to all experts, and the sum is kept
    sums = (s.layers - recomputed) * summed
    moving = SCORES_IN_BACKWARD.get(s.scores, 0) * scores
    at_loss = setting.tokens * (kept + moving + 8 * s.hidden + 4 - norm * s.liger) + sums
    logits = setting.tokens * 12 * s.vocabulary
    if fused:
        rows = max(256, min(4096, 2**30 // (4 * s.vocabulary) // 64 * 64, setting.tokens))
        logits = 6 * rows * s.vocabulary + 2 * setting.tokens * s.hidden
        logits += 0 if s.frozen else 2 * s.vocabulary * s.hidden
    logits *= setting.head
    # beside the tile that is computed: the results of the tiles and the gradients of their inputs, apart and joined
    mlp = 12 * intermediate / setting.tiles + 8 * s.hidden if tiled else 4 * intermediate
    again = max(0.0, layer - products) + mlp + moving + 4 * s.hidden
    recomputation = setting.tokens * again + 2 * summed if recomputed else 0
    return {"activations": at_loss, "logits": logits}, {"activations": setting.tokens * kept + sums + recomputation}


def memory(s: Shape, setting: Setting, settings, fused: bool) -> dict[str, float]:
    """Return the bytes on one GPU by part, at the peak of loading, loss, recompute, backward and step.

    Returns: {"parameters", "gradients", "optimizer", "activations", "logits", "buffers"}.
    """
    s = share(s, setting)
    n, zero, trained = setting.ranks // setting.tp, setting.zero, s.trainable
    weight, gradient, optimizer = _widths(settings, zero)
    shares = [1 / n if zero >= stage else 1 for stage in (3, 2, 1)]
    states = {
        "parameters": s.frozen * s.frozen_bytes * shares[0] + trained * weight * shares[0],
        "optimizer": trained * optimizer * shares[2],
    }
    if setting.offload != "none":
        states["optimizer"] = 0.0
    if setting.offload == "all":
        states["parameters"] = s.hidden * 4.0  # parameters too small to be sharded
    if setting.hpz > 1:  # the secondary copy, created by the first forward and freed after the step
        states["parameters"] += 2.0 * s.parameters / setting.hpz
    # bytes of all gradients, and of this rank's share
    total, own = gradient * trained, gradient * trained / n
    if setting.offload != "none" and zero >= 2:
        own = 0.0
    several = setting.accumulation > 1
    before = {0: total if several or n > 1 else 0, 1: total if several else 0, 2: 2 * own * several, 3: own}[zero]
    after = {0: total, 1: total + own, 2: own, 3: own}[zero]
    work = _work(s, setting, weight)
    at_loss, again = activations(s, setting, fused)
    moments = [
        states | {"gradients": before, "buffers": work} | at_loss,
        states | {"gradients": before, "buffers": work} | again,
        states | {"gradients": after, "buffers": work + 2 * s.largest + _foreach_copies(s, settings, zero, weight)},
    ]
    if setting.offload == "none" and zero:
        # Gradients are flattened and copied to fp32, at stage 3 in pieces of at most 1e9 numbers, else all at once.
        piece = min(trained / n, 1e9) if zero == 3 else trained / n
        moments.append(states | {"gradients": own, "buffers": (6 if weight == 2 else 4) * piece})
    if zero in (1, 2):  # weights as loaded and flattened; the flat copy is in host memory if the GPU has no room
        flat = 2 * weight * trained + s.frozen * s.frozen_bytes
        gpu = settings.planned_gpu
        if gpu is None or flat <= gpu.memory_gib * 2**30:
            moments.append({"parameters": flat})
    if zero == 3 and s.frozen_bytes < 2:  # each rank packs the whole base, which is split afterwards
        moments.append({"parameters": s.frozen * s.frozen_bytes})
    highest = max(moments, key=lambda parts: sum(parts.values()))
    return {part: highest.get(part, 0.0) for part in PARTS}


def stages(s: Shape, setting: Setting, settings, fused: bool, tied: bool) -> list[dict[str, float]]:
    """Return `memory` of each of the `setting.pp` stages of a pipeline.

    The layers are cut so that the stages have about as many weights each; a tied embedding is on the first and on the
    last. A stage holds the activations of the micro batches that later stages have not yet sent back.
    """
    count, each = setting.pp, []
    weights = (s.trainable + s.embedding * tied) // count
    for stage in range(count):
        ends = stage in (0, count - 1)  # has the embedding or the head
        held = replace(s, trainable=max(weights, s.embedding * ends), layers=math.ceil(s.layers / count))
        in_flight = min(count - stage, setting.accumulation)
        of_stage = replace(setting, ranks=setting.ranks // count, in_flight=in_flight, head=stage == count - 1)
        each.append(memory(held, of_stage, settings, fused))
    return each


def share(s: Shape, setting: Setting) -> Shape:
    """Return the shape of what one rank holds of the model before ZeRO; for a pipeline see `stages`."""
    for way, size in setting.groups:
        s = way.share(s, size)
    return s


def _widths(settings, zero: int) -> tuple[float, float, float]:
    """Return the bytes of a trained parameter as weight, gradient, and optimizer state with master copy."""
    entry = registry.spec_of(settings)
    width = float(entry.state_bytes) if entry and _is_number(entry.state_bytes) else 8.0
    if settings.pure_bf16:
        return 2, 2, width / 2 if width == 8 else width
    if (
        zero == 0 and not settings.trains_adapter and settings.dtype in ("bfloat16", "float16")
    ):  # no fp32 master: states in the weights' type too
        return 2, 2, width / 2 if width == 8 else width
    if zero == 0:
        return 4, 4, width
    return (2, 2, 4 + width) if settings.precision != "fp32" else (4, 4, 4 + width)


def _foreach_copies(s: Shape, settings, zero: int, weight: float) -> float:
    """Return the bytes of the temporaries that torch's foreach optimizers make of all parameters at once."""
    return weight * s.trainable if zero == 0 and settings.optim == "adamw_torch" else 0.0


def _work(s: Shape, setting: Setting, weight: float) -> float:
    """Return the bytes of buckets and weight copies, beside the model states, while a layer is computed."""
    if setting.zero == 0:
        return 2.0 * s.trainable if weight == 4 else 0.0  # autocast's 16-bit copies
    bucket = 2.0 * _bucket(s, setting)
    if setting.zero < 3:
        return bucket
    # Parameters reused within 1e9 numbers stay gathered (stage3_max_reuse_distance), and autograd keeps those of fused
    # experts until their backward: DeepSpeed's function that gathers them again is one of linear layers.
    kept = 0.0 if s.frozen else 2.0 * _experts(s) * (1 - _recomputed(s, setting) / s.layers)
    return min(2.0 * s.parameters, 2.0 * s.vocabulary * s.hidden + 1e9 + kept) + bucket


def _experts(s: Shape) -> float:
    """Return the weights of all experts of a mixture."""
    return sum(product.weights for product in s.work.products if product.experts) if s.work else 0.0


def _recomputed(s: Shape, setting: Setting) -> int:
    """Return how many layers are checkpointed."""
    return math.ceil(s.layers / setting.every) if setting.every else 0


def _bucket(s: Shape, setting: Setting) -> float:
    """Return the numbers of a bucket of gradients, as parallel/whole_layers.py or transformers' "auto" sets it."""
    return buffers.bucket_size(max(s.by_layer)) if _whole(s, setting) else s.hidden**2


def _whole(s: Shape, setting: Setting) -> bool:
    return bool(s.by_layer) and not s.experts and max(s.by_layer) <= setting.whole_layers


def _is_number(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


@dataclass(frozen=True)
class Collective:
    """The NCCL calls of one kind in an optimizer step."""

    calls: float
    sent: float  # bytes that one GPU sends in all of them
    ranks: int  # GPUs in each call
    reduces: bool = False  # an all-reduce, which goes round the ring twice
    stride: int = 1  # every how many-th GPU is in a call

    def nodes(self, node: int) -> int:
        """Return how many nodes of `node` GPUs a call spans."""
        return math.ceil(self.ranks * self.stride / node)


def _key_heads(s: Shape, setting: Setting) -> int:
    """Return the key heads of an attention, repeated for the ranks that split a row."""
    return math.lcm(s.kv_heads, setting.sp)


def exchanges(s: Shape, setting: Setting) -> list[Collective]:
    """Return the collectives that a layer waits for in an optimizer step.

    The backward of a layer sends as much as its forward, and so does recomputation.
    """
    recomputed = _recomputed(s, setting)
    passes = (2 * s.layers + recomputed) * setting.accumulation
    found = []
    for way, size in setting.groups:
        calls, sent = way.sent(s, setting.tokens, size)
        if calls:
            found.append(Collective(calls * passes, sent * passes, size, reduces=way.sums))
    return found


def collectives(s: Shape, setting: Setting) -> list[Collective]:
    """Return the collectives of an optimizer step: of model states, and of sequence or tensor parallelism."""
    return of_states(s, setting) + exchanges(s, setting)


def of_states(s: Shape, setting: Setting) -> list[Collective]:
    """Return the collectives of gradients and weights; at stages 1 and 2 first those of gradients."""
    return [replace(c, stride=setting.tp) for c in _of_states(share(s, setting), setting)]


def _of_states(s: Shape, setting: Setting) -> list[Collective]:
    """Return the collectives of an optimizer step under DeepSpeed 0.19.8 or DistributedDataParallel.

    A GPU sends M (n-1)/n bytes to gather or to reduce-scatter M bytes over n GPUs, and twice that to all-reduce them
    (arXiv 1910.02054, section 7). The calls were counted in simulations (benchmarks/scaling.py --count): stages 1 and 2
    reduce each gradient to the rank that owns it, on many ranks they all-reduce (buffers.REDUCE_UP_TO), and
    stage 3 gathers twice, whether layers are recomputed or not. The 1e9 numbers that it keeps gathered are not
    subtracted. With hpZ (arXiv 2306.10209) the first forward creates a copy within the node, which serves every later
    gather.
    """
    n, accumulation = setting.ranks // setting.tp, setting.accumulation
    if n == 1:
        return []
    trained = 2.0 * s.trainable
    if setting.zero == 0:
        return [_all_reduced(2 * trained, n, 2 * trained / DDP_BUCKET)]
    if setting.zero in (1, 2):
        times = accumulation if setting.zero == 2 else 1
        buckets = s.trainable / s.hidden**2
        reduced = _all_reduced if n > buffers.REDUCE_UP_TO else _sharded
        return [reduced(trained * times, n, buckets * times), _sharded(trained, n, 1)]
    all_weights, whole = trained + s.frozen * s.frozen_bytes, _whole(s, setting)
    calls = s.layers * (GATHERS_OF_A_LAYER if whole else MATRICES_OF_A_LAYER)
    reductions = s.trainable / _bucket(s, setting) if whole else calls
    reduced = _sharded(trained * accumulation, n, reductions * accumulation)
    if setting.hpz == 1:
        return [_sharded(all_weights * 2 * accumulation, n, calls * 2 * accumulation), reduced]
    later_gathers = 2 * accumulation - 1
    return [
        _sharded(all_weights, n, calls),
        _sharded(all_weights * later_gathers, setting.hpz, calls * later_gathers),
        reduced,
    ]


def _sharded(size: float, n: int, calls: float) -> Collective:
    """Return all-gathers or reduce-scatters of `size` bytes in `calls` calls together."""
    return Collective(calls, size * (n - 1) / n, n)


def _all_reduced(size: float, n: int, calls: float) -> Collective:
    return Collective(calls, 2 * size * (n - 1) / n, n, reduces=True)


def split(c: Collective, setting: Setting) -> tuple[float, float]:
    """Return the bytes that one GPU sends (within its node, to other nodes), on average.

    NCCL's ring passes all GPUs of a node before the next node, so one of its links per node crosses nodes.
    """
    nodes = c.nodes(setting.node)
    share = nodes / c.ranks if nodes > 1 else 0.0
    return c.sent * (1 - share), c.sent * share


def wire_bytes(s: Shape, setting: Setting) -> tuple[float, float]:
    """Return the bytes that one GPU sends in an optimizer step: (within its node, to other nodes)."""
    parts = [split(c, setting) for c in collectives(s, setting)]
    return sum(within for within, _ in parts), sum(across for _, across in parts)


def checkpoint_bytes(trainable: int, parameters: int) -> float:
    """Return the bytes of one checkpoint of all ranks.

    16-bit weights (an adapter's without its base), and fp32 master and Adam's two states of the trainable parameters.
    An upper bound for full fine-tuning at ZeRO-3, which writes 16-bit weights into few checkpoints (save.py).
    """
    return 2.0 * (parameters if trainable == parameters else trainable) + 12.0 * trainable


def offloaded_inputs(s: Shape, setting: Setting) -> float:
    """Return the bytes of pinned host memory in which one rank keeps the inputs of its checkpointed layers."""
    if not setting.activation_offload or not setting.every:
        return 0.0
    each = (4 if setting.fp32_weights else 2) * s.hidden * setting.tokens
    return float(_recomputed(s, setting) * allocator.pinned_bytes(each))


def host_of_a_rank(s: Shape, setting: Setting) -> float:
    """Return the bytes of host memory of a rank's offloaded states and inputs.

    A trained number has an fp32 weight, gradient and Adam's states, and a 16-bit buffer (stage_1_and_2.py, stage3.py);
    with offload all a 16-bit weight too.
    """
    states = {"none": 0, "optimizer": 18, "all": 20}[setting.offload] * s.trainable / setting.ranks
    states += s.frozen_bytes * s.frozen / setting.ranks * (setting.offload == "all")
    return states + offloaded_inputs(s, setting)


def saved_by_a_node(s: Shape, setting: Setting) -> float:
    """Return the bytes of DeepSpeed's states that the ranks of the first node save.

    fp32 masters and Adam's two states of each rank's share, and below stage 3 the 16-bit weights that train.
    """
    return 12.0 * s.trainable / setting.ranks * setting.of_a_node + (2.0 * s.trainable if setting.zero < 3 else 0.0)
