"""Estimate the memory and the communication of a training step in closed form.

Bytes follow transformers' eager models and DeepSpeed 0.19 (runtime/zero/stage_1_and_2.py, stage3.py). Simulations
replace these estimates. The time of a step is in plan/speed.
"""

import contextlib
import math
from dataclasses import dataclass, replace

from zerofit.base import allocator, limits
from zerofit.model.mixtures import weights as expert_weights
from zerofit.optim import registry
from zerofit.parallel.interface import Parallel
from zerofit.plan.gpu_memory import GPUS_PER_NODE
from zerofit.plan.speed import work
from zerofit.plan.speed.kernels import DEFAULT_KERNELS, Kernels
from zerofit.plan.speed.work import Work

MATRICES_PER_LAYER = 7  # in Llama; a bucket holds hidden_size^2 numbers, so nearly every matrix has a separate call
GATHERS_PER_LAYER = 2  # if whole_layers gathers it in one call; the second is for its norms, which stay gathered
PACKED_BYTES = {4: 0.55, 8: 1.0}  # bytes per weight of a packed base with its constants, by bits
DDP_BUCKET = 25 * 2**20  # bytes; torch's DistributedDataParallel
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")

SCORES, CAPPED_SCORES = 6, 8  # bytes kept per score: softmax in fp32 and in 16 bits; also a tanh
SCORES_IN_BACKWARD = {SCORES: 10, CAPPED_SCORES: 17}  # bytes per score of gradients in the current layer


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model."""

    trainable: int  # trained parameters
    frozen: int  # frozen parameters: the base of an adapter
    largest: int  # parameters of the largest trainable tensor
    hidden: int  # size of a hidden state
    layers: int
    heads: int  # query heads per layer
    kv_heads: int  # key and value heads per layer
    head_dim: int  # size of a head
    intermediate: int  # width of an MLP
    vocabulary: int  # tokens
    frozen_bytes: float = 2.0  # bytes per stored frozen parameter
    experts: int = 0  # experts per layer of a mixture, 0: not a mixture
    embedding: int = 0  # weights of the embedding
    adapted_experts: int = 0  # weights per layer, mostly of fused experts, to which LoRA's product is added
    adapted: str = ""  # text: which experts have adapters
    by_layer: tuple[int, ...] = ()  # parameters of each layer, (): unknown
    liger: bool = False  # Liger's kernels run: norms keep no fp32 copies, MLPs no activation results
    one_by_one: bool = False  # attention loops over documents, with keys and values repeated for all heads
    scores: int = 0  # bytes per score that a layer of eager attention keeps, 0: scores are not stored
    work: Work | None = None  # the operations of its step; None: a dense model of these dimensions
    can_be_cut: bool = True  # with fewer layers it is a smaller model of the same kind

    @property
    def parameters(self) -> int:
        return self.trainable + self.frozen


def shape(config, net, frozen_bytes: float = 2.0, bits: int = 16) -> Shape:
    """Return the Shape of a model.

    Args: config: its config.json; net: with its adapter, on the meta device; frozen_bytes: per frozen parameter; bits:
        of frozen linear layers except the head.
    """
    from zerofit.model.mixtures import adapted

    text = config.get_text_config()
    # Layers can differ (Gemma 4): their common config raises for attributes that differ.
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
        experts=expert_weights.count(config),
        embedding=hidden * text.vocab_size,
        adapted_experts=adapted.added_weights(net) // layers,
        by_layer=tuple(sum(p.numel() for p in layer.parameters()) for layer in modules),
        work=work.model_work(net, config, modules, heads=heads, kv_heads=kv_heads, head_dim=head_dim, bits=bits),
        frozen_bytes=frozen_bytes,
        adapted=adapted.describe(net),
        can_be_cut=not getattr(text, "num_kv_shared_layers", 0),  # the last layers reuse keys of earlier layers
    )


def layers_of(model, count: int) -> list:
    """Return the model's layers: its largest ModuleList of `count` modules; [] without such a list."""
    import torch

    def size(modules) -> int:
        return sum(getattr(p, "ds_numel", p.numel()) for p in modules.parameters())

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
    return list(max(lists, key=size, default=[]))


@dataclass(frozen=True)
class Checkpointing:
    """Gradient checkpointing: which layers the backward recomputes."""

    every: int  # every n-th layer, 0: none
    selective: bool = False  # the results of matrix products and attention are kept
    offloaded: bool = False  # the inputs of these layers are in host memory

    @property
    def flags(self) -> dict:
        """Return --gradient_checkpointing and the flags that differ from checkpointing every layer."""
        flags = {"gradient_checkpointing_every": self.every} if self.every > 1 else {}
        flags |= {"gradient_checkpointing_policy": "selective"} if self.selective else {}
        flags |= {"activation_offload": True} if self.offloaded else {}
        return {"gradient_checkpointing": bool(self.every)} | flags


@dataclass(frozen=True)
class PlanPoint:
    """A point in the search of a plan: the settings that affect memory and time."""

    zero: int  # the stage, 0 to 3
    offload: str  # states in host memory: none, optimizer or all
    every: int  # every n-th layer is checkpointed, 0: none
    micro: int  # rows per micro batch
    tokens: int  # tokens per micro batch on a GPU
    accumulation: int  # micro batches per optimizer step
    ranks: int  # GPUs of all nodes
    activation_offload: bool = False  # the inputs of checkpointed layers are in host memory
    nvme: bool = False  # offloaded states are on a disk
    node: int = GPUS_PER_NODE  # GPUs per node
    hpz: int = 1  # ranks that share ZeRO++'s secondary copy of the parameters, 1: no copy
    forwards: int = 0  # additional forwards without a backward: a reference model, the KL term of KTO
    in_flight: int = 1  # micro batches whose activations are in memory together, above 1 in a pipeline
    head: bool = True  # whether the GPU computes the logits
    whole_layers: int = 0  # largest dense layer that stage 3 exchanges in one call (parallel/whole_layers.py)
    selective: bool = False  # checkpointed layers keep the results of matrix products and attention
    fp32_weights: bool = False  # also the hidden states between layers, which each product casts
    fp32_engine: bool = False  # DeepSpeed's engine has 16-bit weights and neither bf16 nor fp16 on (--dtype)
    background_save: bool = False  # a node's part of a checkpoint is copied to host memory and written from there
    groups: tuple[tuple[Parallel, int], ...] = ()  # the ways in which ranks share rows, with the ranks per group
    arithmetic: float = 1.0  # factor of the seconds of products, below 1 with 8-bit floats
    tiles: int = 1  # tiles of tokens of each MLP, each checkpointed
    kernels: Kernels = DEFAULT_KERNELS

    def label_parts(self, method: str) -> list[str]:
        """Return the parts of a label: how a method stores model states and activations."""
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
    def checkpointing(self) -> Checkpointing:
        return Checkpointing(self.every, self.selective, self.activation_offload)

    @property
    def ranks_per_row(self) -> int:
        """Return the number of ranks that share a row."""
        return math.prod(size for _, size in self.groups)

    @property
    def sp(self) -> int:
        """Return the number of ranks that split the tokens of a row."""
        return self._splitting("tokens")

    @property
    def tp(self) -> int:
        """Return the number of ranks that split a matrix."""
        return self._splitting("matrices")

    @property
    def pp(self) -> int:
        """Return the number of stages of a pipeline."""
        return self._splitting("layers")

    def _splitting(self, what: str) -> int:
        return math.prod(size for way, size in self.groups if way.splits == what)

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.node)

    @property
    def ranks_per_node(self) -> int:
        """Return the number of GPUs of a node that the job uses."""
        return min(self.ranks, self.node)


def activations(s: Shape, setting: PlanPoint, fused: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes by part at the loss, and during the recomputation of the last checkpointed layer.

    Returns: {"activations", "logits"} and {"activations"}, for Llama-like layers in 16 bits without dropout.
    """
    key_heads = math.lcm(s.kv_heads, setting.sp)  # repeated for the ranks that split a row
    q, k, heads, intermediate = (
        size / setting.tp for size in (s.heads * s.head_dim, key_heads * s.head_dim, s.heads, s.intermediate)
    )
    layer = 16 * s.hidden + 4 * q + 4 * k + 4 * heads + 8 + 8 * intermediate
    norm = 4 * s.hidden  # in addition to its input
    tiled = setting.tiles > 1
    if s.liger:
        layer -= 2 * norm + 2 * intermediate * (not tiled)  # Liger does not replace a tiled MLP
    if tiled:  # a tile keeps its input only, and the results of the tiles are joined
        layer += 2 * s.hidden - 8 * intermediate
    if setting.fp32_weights:  # norms: 2 more bytes per input and result; 5 copies for q, k, v, gate, up, not 2
        layer += 10 * s.hidden
    if s.frozen:  # a frozen matrix product does not save its input; an adapted product does
        layer -= 2 * s.hidden
    if s.one_by_one:
        layer += 6 * q - 4 * k  # repeated keys and values, and the joined outputs
    scores = heads * setting.tokens / setting.micro  # per token
    layer += s.scores * scores
    if setting.sp > 1:
        layer += 2 * q  # the attention's output before the exchange
    products = 0.0  # results of the matrix products and the attention of a layer
    if setting.selective:
        adapted = 4 * s.hidden + 2 * q + 4 * k + 4 * intermediate if s.frozen else 0
        products = 4 * s.hidden + 4 * q + 4 * k + 4 * heads + 4 * intermediate + adapted
    recomputed = _recomputed(s, setting)
    state = (4 if setting.fp32_weights else 2) * s.hidden
    stored = products + (0 if setting.activation_offload else state)
    kept = (recomputed * stored + (s.layers - recomputed) * layer) * setting.in_flight
    summed = 2.0 * s.adapted_experts  # peft adds the product of A and B to all experts and keeps the sum
    sums = (s.layers - recomputed) * summed
    moving = SCORES_IN_BACKWARD.get(s.scores, 0) * scores
    at_loss = setting.tokens * (kept + moving + 8 * s.hidden + 4 - norm * s.liger) + sums
    logits = setting.tokens * 12 * s.vocabulary
    if fused:
        rows = max(256, min(4096, 2**30 // (4 * s.vocabulary) // 64 * 64, setting.tokens))
        logits = 6 * rows * s.vocabulary + 2 * setting.tokens * s.hidden
        logits += 0 if s.frozen else 2 * s.vocabulary * s.hidden
    logits *= setting.head
    # In addition to the current tile: the results of the tiles and the gradients of their inputs, separate and joined.
    mlp = 12 * intermediate / setting.tiles + 8 * s.hidden if tiled else 4 * intermediate
    again = max(0.0, layer - products) + mlp + moving + 4 * s.hidden
    recomputation = setting.tokens * again + 2 * summed if recomputed else 0
    return {"activations": at_loss, "logits": logits}, {"activations": setting.tokens * kept + sums + recomputation}


def memory(s: Shape, setting: PlanPoint, settings, fused: bool) -> dict[str, float]:
    """Return the bytes on a GPU by part, at the peak of loading, loss, recomputation, backward and step.

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
    if setting.hpz > 1:  # the secondary copy exists from the first forward to the step
        states["parameters"] += 2.0 * s.parameters / setting.hpz
    # bytes of all gradients, and of this rank's share
    total, local = gradient * trained, gradient * trained / n
    if setting.offload != "none" and zero >= 2:
        local = 0.0
    several = setting.accumulation > 1
    before = {0: total if several or n > 1 else 0, 1: total if several else 0, 2: 2 * local * several, 3: local}[zero]
    after = {0: total, 1: total + local, 2: local, 3: local}[zero]
    work = _work(s, setting, weight)
    copies = weight * trained if zero == 0 and settings.optim == "adamw_torch" else 0.0  # torch's foreach
    at_loss, again = activations(s, setting, fused)
    moments = [
        states | {"gradients": before, "buffers": work} | at_loss,
        states | {"gradients": before, "buffers": work} | again,
        states | {"gradients": after, "buffers": work + 2 * s.largest + copies},
    ]
    if setting.offload == "none" and zero:
        # Gradients are flattened and copied to fp32, at stage 3 in pieces of at most 1e9 numbers, else all together.
        piece = min(trained / n, 1e9) if zero == 3 else trained / n
        moments.append(states | {"gradients": local, "buffers": (6 if weight == 2 else 4) * piece})
    if zero in (1, 2):  # loaded and flattened weights; the flat copy is in host memory if the GPU is too small
        flat = 2 * weight * trained + s.frozen * s.frozen_bytes
        gpu = settings.planned_gpu
        if gpu is None or flat <= gpu.memory_gib * 2**30:
            moments.append({"parameters": flat})
    if zero == 3 and s.frozen_bytes < 2:  # each rank packs the complete base before sharding
        moments.append({"parameters": s.frozen * s.frozen_bytes})
    highest = max(moments, key=lambda parts: sum(parts.values()))
    return {part: highest.get(part, 0.0) for part in PARTS}


def stages(s: Shape, setting: PlanPoint, settings, fused: bool, tied: bool) -> list[dict[str, float]]:
    """Return `memory` of each of the `setting.pp` stages of a pipeline.

    The stages have about the same number of weights. A tied embedding is on the first and on the last stage. A stage
    keeps the activations of the micro batches that later stages have not yet sent back.
    """
    count, each = setting.pp, []
    weights = (s.trainable + s.embedding * tied) // count
    for stage in range(count):
        ends = stage in (0, count - 1)  # has the embedding or the head
        local = replace(s, trainable=max(weights, s.embedding * ends), layers=math.ceil(s.layers / count))
        in_flight = min(count - stage, setting.accumulation)
        point = replace(setting, ranks=setting.ranks // count, in_flight=in_flight, head=stage == count - 1)
        each.append(memory(local, point, settings, fused))
    return each


def share(s: Shape, setting: PlanPoint) -> Shape:
    """Return the shape of a rank's part of the model before ZeRO; for a pipeline see `stages`."""
    for way, size in setting.groups:
        s = way.share(s, size)
    return s


def _widths(settings, zero: int) -> tuple[float, float, float]:
    """Return the bytes of a trained parameter as weight, gradient, and optimizer state with master copy."""
    spec = registry.spec_of(settings)
    width = 8.0
    with contextlib.suppress(ValueError):  # some specs have a text instead of bytes
        width = float(spec.state_bytes) if spec else width
    no_master = zero == 0 and not settings.trains_adapter and settings.dtype in ("bfloat16", "float16")
    if settings.pure_bf16 or no_master:  # the states have the type of the weights
        return 2, 2, width / 2 if width == 8 else width
    if zero == 0:
        return 4, 4, width
    return (2, 2, 4 + width) if settings.compute_dtype != "fp32" else (4, 4, 4 + width)


def _work(s: Shape, setting: PlanPoint, weight: float) -> float:
    """Return the bytes of buckets and weight copies during the computation of a layer."""
    if setting.zero == 0:
        return 2.0 * s.trainable if weight == 4 else 0.0  # autocast's 16-bit copies
    bucket = 2.0 * _bucket(s, setting)
    if setting.zero < 3:
        return bucket
    experts = sum(product.weights for product in s.work.products if product.experts) if s.work else 0.0
    # Parameters reused within 1e9 numbers stay gathered (stage3_max_reuse_distance), and autograd keeps fused experts
    # until their backward: DeepSpeed gathers again only in the backward of linear layers.
    kept = 0.0 if s.frozen else 2.0 * experts * (1 - _recomputed(s, setting) / s.layers)
    return min(2.0 * s.parameters, 2.0 * s.vocabulary * s.hidden + 1e9 + kept) + bucket


def _recomputed(s: Shape, setting: PlanPoint) -> int:
    """Return the number of checkpointed layers."""
    return math.ceil(s.layers / setting.every) if setting.every else 0


def _bucket(s: Shape, setting: PlanPoint) -> float:
    """Return the size of a bucket of gradients, set by parallel/whole_layers.py or by transformers' "auto"."""
    return limits.bucket_size(max(s.by_layer)) if _exchanges_layers(s, setting) else s.hidden**2


def _exchanges_layers(s: Shape, setting: PlanPoint) -> bool:
    return bool(s.by_layer) and not s.experts and max(s.by_layer) <= setting.whole_layers


@dataclass(frozen=True)
class Collective:
    """The NCCL calls of a kind in an optimizer step."""

    calls: float
    sent: float  # bytes that a GPU sends in all calls
    ranks: int  # GPUs per call
    reduces: bool = False  # an all-reduce, which passes the ring twice
    stride: int = 1  # every n-th GPU takes part in a call

    def nodes(self, node: int) -> int:
        """Return the number of nodes of `node` GPUs that a call spans."""
        return math.ceil(self.ranks * self.stride / node)


def exchanges(s: Shape, setting: PlanPoint) -> list[Collective]:
    """Return the collectives that a layer waits for in an optimizer step.

    The backward and the recomputation of a layer each send as much as its forward.
    """
    passes, calls = (2 * s.layers + _recomputed(s, setting)) * setting.accumulation, []
    for way, size in setting.groups:
        count, sent = way.sent(s, setting.tokens, size)
        if count:
            calls.append(Collective(count * passes, sent * passes, size, reduces=way.sums))
    return calls


def collectives(s: Shape, setting: PlanPoint) -> list[Collective]:
    """Return the collectives of an optimizer step: model states, and sequence or tensor parallelism."""
    return state_collectives(s, setting) + exchanges(s, setting)


def state_collectives(s: Shape, setting: PlanPoint) -> list[Collective]:
    """Return the collectives of gradients and weights; at stages 1 and 2 the gradients come first."""
    return [replace(c, stride=setting.tp) for c in _zero_collectives(share(s, setting), setting)]


def _zero_collectives(s: Shape, setting: PlanPoint) -> list[Collective]:
    """Return the collectives of an optimizer step under DeepSpeed 0.19.8 or DistributedDataParallel.

    A GPU sends M (n-1)/n bytes to gather or to reduce-scatter M bytes over n GPUs, and twice that to all-reduce them
    (arXiv 1910.02054, section 7). The calls were counted in simulations (benchmarks/scaling.py --count): stages 1 and 2
    reduce each gradient to the rank that owns it, or all-reduce it on many ranks (limits.MAX_REDUCE_RANKS), and stage 3
    gathers twice, with or without recomputation. The 1e9 numbers that it keeps gathered are not subtracted. With hpZ
    (arXiv 2306.10209) the first forward creates a copy within the node, from which later gathers read.
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
        reduced = _all_reduced if n > limits.MAX_REDUCE_RANKS else _sharded
        return [reduced(trained * times, n, buckets * times), _sharded(trained, n, 1)]
    all_weights, by_layer = trained + s.frozen * s.frozen_bytes, _exchanges_layers(s, setting)
    calls = s.layers * (GATHERS_PER_LAYER if by_layer else MATRICES_PER_LAYER)
    reductions = s.trainable / _bucket(s, setting) if by_layer else calls
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
    """Return all-gathers or reduce-scatters of `size` bytes in `calls` calls."""
    return Collective(calls, size * (n - 1) / n, n)


def _all_reduced(size: float, n: int, calls: float) -> Collective:
    return Collective(calls, 2 * size * (n - 1) / n, n, reduces=True)


def split(c: Collective, setting: PlanPoint) -> tuple[float, float]:
    """Return the bytes that a GPU sends (within its node, to other nodes), on average.

    NCCL's ring passes all GPUs of a node before the next node, so one link per node crosses nodes.
    """
    nodes = c.nodes(setting.node)
    share = nodes / c.ranks if nodes > 1 else 0.0
    return c.sent * (1 - share), c.sent * share


def wire_bytes(s: Shape, setting: PlanPoint) -> tuple[float, float]:
    """Return the bytes that a GPU sends in an optimizer step: (within its node, to other nodes)."""
    parts = [split(c, setting) for c in collectives(s, setting)]
    return sum(within for within, _ in parts), sum(across for _, across in parts)


def checkpoint_bytes(trainable: int, parameters: int) -> float:
    """Return the bytes of a checkpoint of all ranks.

    It has 16-bit weights (without the base of an adapter), and fp32 masters and Adam's states of trained parameters.
    Full fine-tuning at ZeRO-3 needs less, since it writes 16-bit weights into few checkpoints (save.py).
    """
    return 2.0 * (parameters if trainable == parameters else trainable) + 12.0 * trainable


def offloaded_inputs(s: Shape, setting: PlanPoint) -> float:
    """Return the bytes of pinned host memory for the inputs of a rank's checkpointed layers."""
    if not setting.activation_offload or not setting.every:
        return 0.0
    each = (4 if setting.fp32_weights else 2) * s.hidden * setting.tokens
    return float(_recomputed(s, setting) * allocator.pinned_bytes(each))


def host_bytes_per_rank(s: Shape, setting: PlanPoint) -> float:
    """Return the bytes of host memory of a rank's offloaded states and inputs.

    A trained parameter has an fp32 weight, gradient and Adam's states, and a 16-bit buffer (stage_1_and_2.py,
    stage3.py), and with offload all a 16-bit weight.
    """
    states = {"none": 0, "optimizer": 18, "all": 20}[setting.offload] * s.trainable / setting.ranks
    states += s.frozen_bytes * s.frozen / setting.ranks * (setting.offload == "all")
    return states + offloaded_inputs(s, setting)


def saved_bytes_per_node(s: Shape, setting: PlanPoint) -> float:
    """Return the bytes of DeepSpeed's states that the ranks of the first node save.

    They are fp32 masters and Adam's two states of each rank's share, and below stage 3 the trained 16-bit weights.
    """
    weights = 2.0 * s.trainable if setting.zero < 3 else 0.0
    return 12.0 * s.trainable / setting.ranks * setting.ranks_per_node + weights
