"""Describe the operations of a model: matrix products by shape, attention, and elementwise passes per token."""

import functools
from collections import Counter
from dataclasses import dataclass, replace

from zerofit.model.mixtures import weights

# Linear layers whose result is only added to the hidden states, and modules after them that would keep the result.
LAST, AFTER_LAST = ("down_proj", "w2", "c_proj", "dense_4h_to_h", "fc2", "fc_out"), ("post_feedforward", "post_mlp")
SHARED_INPUT = ("k_proj", "v_proj", "up_proj", "w3")  # linear layers with the input of another linear layer

# Fused linear layers, with the cost of joining their gradients; Phi-3 pads the gradient of each slice with zeros.
SPLIT = {"query_key_value": 1.0, "c_attn": 1.0, "Wqkv": 1.0, "gate_up_proj": 1.0, "qkv_proj": 5.5}
COMPOSED = ("gelu_new", "gelu_fast")  # activations that transformers computes with several kernels
ADDITIONS = 2  # additions to the hidden states per layer: attention and MLP


@dataclass(frozen=True)
class Product:
    """Matrix products of one shape: rows of `wide` numbers into rows of `out`."""

    wide: int  # numbers per row before the product
    out: int  # numbers per row after the product
    count: float = 1.0  # products of the model with this shape; the experts of a layer count as one
    trained: bool = True  # whether the weight has a gradient
    bits: int = 16  # bits per stored number of the weight
    experts: int = 0  # expert weights of a layer, to which a router distributes the rows; 0: no experts
    selected: int = 1  # experts per row
    in_layer: bool = True  # whether it is in a layer, which checkpointing recomputes
    head: bool = False  # whether it computes the logits
    adapter: bool = False  # whether it is A or B of a LoRA
    last: bool = False  # whether nothing after it in its layer keeps its result for the backward

    def flops(self, rows: float) -> float:
        """Return the operations of the forwards of all `count` products for `rows` tokens."""
        return 2.0 * rows * self.selected * self.wide * self.out * self.count

    @property
    def weights(self) -> float:
        return float(self.wide) * self.out * self.count * max(1, self.experts)


@dataclass(frozen=True)
class Passes:
    """Numbers per token that elementwise kernels of all layers read, and counts of modules that start kernels."""

    rms: float = 0.0  # inputs of RMSNorms with several kernels
    layer_norm: float = 0.0  # inputs of norms with a single kernel
    rotated: float = 0.0  # inputs of rotary embeddings
    gated: float = 0.0  # inputs of activation and gate of MLPs
    activated: float = 0.0  # inputs of activations without a gate
    composed: float = 0.0  # inputs of activations with several kernels
    added: float = 0.0  # numbers added to the hidden states
    shared: float = 0.0  # inputs that several linear layers share: their gradients are added
    joined: float = 0.0  # outputs of fused linear layers: the gradients of the parts are joined
    turned: float = 0.0  # attention outputs, whose heads are copied into rows
    routed: float = 0.0  # numbers copied to experts and back
    delta: float = 0.0  # inputs of a convolution and the delta rule of linear attention
    state: float = 0.0  # inputs of a convolution and the scan of a state space
    convolved: float = 0.0  # inputs of a short convolution between two gates
    adapted_in: float = 0.0  # inputs of adapted linear layers
    adapted_out: float = 0.0  # outputs of adapted linear layers
    adapters: float = 0.0  # adapted linear layers
    packed: float = 0.0  # linear layers with packed weights
    norms: float = 0.0  # norms with several kernels
    linears: float = 0.0  # linear layers, without adapters
    convolutions: float = 0.0  # layers with a convolution
    modules: float = 0.0  # modules with weights, which ZeRO-3 gathers one by one


@dataclass(frozen=True)
class Work:
    """The operations of a model."""

    products: tuple[Product, ...]
    passes: Passes
    attentions: tuple[tuple[int, float], ...]  # (window in tokens, 0: none; layers) per kind of attention
    heads: int  # query heads per layer
    head_dim: int
    layers: int
    loops_experts: bool = False  # its class always loops over experts, whatever --experts_implementation is


def dense(
    *, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocabulary: int,
    gated: bool = True, rms: bool = True, rotary: bool = True, trained: bool = True,
) -> Work:  # fmt: skip
    """Return the operations of a model with these dimensions.

    A model without a gate in its MLP has a fused projection of q, k and v.
    """
    q, k = heads * head_dim, kv_heads * head_dim
    shapes = [(hidden, q), (hidden, k), (hidden, k), (q, hidden)]
    shapes += [(hidden, intermediate)] * (2 if gated else 1) + [(intermediate, hidden)]
    last = Product(*shapes.pop(), count=float(layers), trained=trained, last=True)
    products = [Product(*shape, count=n * layers, trained=trained) for shape, n in Counter(shapes).items()] + [last]
    if vocabulary:
        products.append(Product(hidden, vocabulary, trained=trained, in_layer=False, head=True))
    normed = 2.0 * hidden * layers
    passes = Passes(
        rms=normed * rms, layer_norm=normed * (not rms), rotated=(q + k) * layers * rotary,
        gated=intermediate * layers * gated, activated=intermediate * layers * (not gated),
        added=float(ADDITIONS * hidden * layers), turned=float(q * layers), norms=2.0 * layers * rms,
        shared=3.0 * hidden * layers * gated, joined=float((q + 2 * k) * layers * (not gated)),
        linears=float((len(shapes) + 1) * layers), modules=float((len(shapes) + 3) * layers),
    )  # fmt: skip
    return Work(tuple(products), passes, ((0, float(layers)),), heads, head_dim, layers)


def model_work(net, config, layers: list, *, heads: int, kv_heads: int, head_dim: int, bits: int = 16) -> Work:
    """Return the operations of a model, with its adapter, on the meta device.

    Args: bits: of frozen linear layers except the head.
    """
    reader = _Reader(net, config, layers, bits, {"q": heads, "k": kv_heads})
    for name, module in net.named_modules():
        reader.read(name, module)
    text, count = config.get_text_config(), max(1, len(layers))
    attentions = _attentions(text, count)
    attending = sum(n for _, n in attentions)
    passes = Passes(
        rms=reader.normed["rms"], layer_norm=reader.normed["one kernel"],
        rotated=(heads + kv_heads) * head_dim * attending * _rotated_share(text), gated=reader.gated,
        activated=reader.activated, composed=reader.composed, shared=reader.shared, joined=reader.joined,
        added=float(ADDITIONS * reader.hidden * count), turned=heads * head_dim * attending,
        routed=reader.routed, **reader.convolved, convolutions=reader.convolutions, adapted_in=reader.adapted_in,
        adapted_out=reader.adapted_out, adapters=reader.adapters,
        packed=reader.packed, norms=reader.norms, linears=reader.linears, modules=reader.modules,
    )  # fmt: skip
    loops = bool(weights.count(config)) and not weights.has_kernels(net) and not weights.computes_all(net)
    return Work(reader.products(), passes, attentions, heads, head_dim, count, loops)


def _attentions(text, layers: int) -> tuple[tuple[int, float], ...]:
    """Return (window, layers) of each kind of attention in a config.json.

    `_Reader` counts the other layers of a hybrid: their convolutions and the operations after them.
    """
    window = getattr(text, "sliding_window", None) or 0
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if not kinds:
        used = window if getattr(text, "use_sliding_window", True) else 0
        return ((used, float(layers)),)
    counts: Counter = Counter()
    for kind in kinds[:layers]:
        if "attention" in kind and not kind.startswith("linear"):
            counts[window if "sliding" in kind or "chunked" in kind else 0] += 1
    return tuple((size, float(count)) for size, count in sorted(counts.items()))


def _rotated_share(text) -> float:
    """Return the share of a head that the kernels of rotary embeddings read; 0 without them.

    Half of the rest is added, because it is cut off and joined again.
    """
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and isinstance(rope.get("partial_rotary_factor"), float):
        return (1 + rope["partial_rotary_factor"]) / 2
    return float(
        any(getattr(text, name, None) for name in ("rope_theta", "rope_parameters", "rotary_pct", "rotary_dim"))
    )


class _Reader:
    """Count the modules of a model by their operations."""

    def __init__(self, net, config, layers: list, bits: int, heads: dict[str, int]):
        self.bits, self.experts, self.heads = bits, weights.count(config), heads
        of_token = 0 if weights.computes_all(net) else weights.selected(config)
        self.selected = min(self.experts, of_token) or self.experts
        self.fused = {id(weight) for weight in weights.fused(net).values()}
        self.inside = {id(module) for layer in layers for module in layer.modules()}
        head = net.get_output_embeddings()
        self.head = getattr(head, "base_layer", head)  # without its adapter
        self.hidden = getattr(config.get_text_config(), "hidden_size", 1)
        self.is_routed = weights.is_routed
        self.keeps_last = any(part in name for name, _ in net.named_modules() for part in AFTER_LAST)
        self.shapes: Counter = Counter()
        self.normed: Counter = Counter()
        self.gated = self.activated = self.composed = self.routed = self.shared = self.joined = 0.0
        names, text = ("hidden_act", "activation_function", "hidden_activation"), config.get_text_config()
        self.is_composed = next(filter(None, (getattr(text, name, None) for name in names)), None) in COMPOSED
        self.config, self.convolved = config, Counter()
        self.adapted_in = self.adapted_out = self.adapters = self.packed = self.norms = self.linears = 0.0
        self.modules = self.convolutions = 0.0

    @functools.cached_property
    def after_convolution(self) -> str:
        """Return the field of Passes for the operation after the convolution of a layer."""
        from zerofit.model.kernels import linear_attention

        kernels = [kernel for kernel, _ in linear_attention.kernels_of(self.config).values()]
        if any(kernel.startswith("chunk_") for kernel in kernels):
            return "delta"
        return "state" if any("scan" in kernel for kernel in kernels) else "convolved"

    def products(self) -> tuple[Product, ...]:
        return tuple(replace(product, count=count) for product, count in self.shapes.items())

    def read(self, name: str, module) -> None:
        """Count the operations of a module without its children."""
        parameters = dict(module.named_parameters(recurse=False))
        self.modules += bool(parameters) and id(module) in self.inside
        stacked = [(key, p) for key, p in parameters.items() if self.experts and id(p) in self.fused]
        if stacked:
            self._read_experts(stacked)
        weight = parameters.get("weight")
        if weight is None or "Embedding" in type(module).__name__:
            return
        if weight.ndim == 2:
            self._read_linear(name, module, weight)
        elif weight.ndim == 3 and type(module).__name__ == "Conv1d" and id(module) in self.inside:
            self.convolved[self.after_convolution] += weight.shape[0]
            self.convolutions += 1
        elif weight.ndim == 1 and "norm" in type(module).__name__.lower():
            self._read_norm(name, module, weight)

    def _read_linear(self, name: str, module, weight) -> None:
        wide, out = weight.shape[::-1] if type(module).__name__ != "Conv1D" else weight.shape
        adapter, trained = ".lora_" in name, bool(weight.requires_grad)
        if adapter and "embedding" in name:
            return
        is_head = module is self.head
        routed = [part for part in name.split(".")[:-1] if self.is_routed(part)]
        packed = self.bits < 16 and not trained and not is_head and type(module).__name__ in ("Linear", "Conv1D")
        share = self.selected / self.experts if routed and self.experts else 1.0
        product = Product(
            wide, out, 1.0, trained, self.bits if packed else 16, 1 if routed else 0, 1,
            in_layer=id(module) in self.inside, head=is_head, adapter=adapter, last=self._is_last(name, bool(routed)),
        )  # fmt: skip
        if routed:  # each expert is a module: one product represents all of a layer
            product = replace(product, experts=self.experts, selected=self.selected)
        self.shapes[product] += 1 / self.experts if routed else 1
        if adapter:
            self.adapters += ".lora_A" in name
            self.adapted_in += wide * share * (".lora_A" in name)
            self.adapted_out += out * share * (".lora_B" in name)
            return
        self.linears, self.packed = self.linears + 1, self.packed + packed
        last = [part for part in name.split(".") if part != "base_layer"][-1]
        self.shared += wide * share * (last in SHARED_INPUT)
        self.joined += out * share * SPLIT.get(last, 0.0)
        self._read_mlp(last, out, share, bool(routed))

    def _is_last(self, name: str, routed: bool) -> bool:
        """Return whether the result of a product, or of B in an adapted layer, is only added to the hidden states."""
        parts = [part for part in name.split(".") if part not in ("lora_B", "default")]
        shared = routed or any(self.is_routed(part) or "expert" in part for part in parts)
        return parts[-1] in LAST and "attn" not in name and not shared and not self.keeps_last

    def _read_mlp(self, last: str, out: int, share: float, routed: bool) -> None:
        """Count the activation of an MLP by the name of the linear layer before it."""
        if last in ("gate_proj", "w1", "gate_up_proj", "input_linear"):
            self.gated += (out / 2 if last in ("gate_up_proj", "input_linear") else out) * share
            self.routed += 2.0 * self.hidden * share * routed
        elif last in ("dense_h_to_4h", "fc_in", "fc1", "c_fc"):
            self.composed += out * share * self.is_composed
            self.activated += out * share * (not self.is_composed)

    def _read_experts(self, stacked: list) -> None:
        """Count fused experts, whose tensors hold all experts of a layer."""
        for name, weight in stacked:
            product = Product(weight.shape[1], weight.shape[2], 1.0, bool(weight.requires_grad), 16, self.experts,
                              self.selected)  # fmt: skip
            self.shapes[product] += 1
            if name.startswith("gate_up"):
                first, second = weight.shape[1:]  # one of the two is the hidden size
                wide = {first: second, second: first}.get(self.hidden, max(first, second))
                self.gated += wide / 2 * self.selected
                self.routed += 2.0 * self.hidden * self.selected

    def _read_norm(self, name: str, module, weight) -> None:
        if id(module) not in self.inside:
            return
        size, of_keys = weight.numel(), name.rpartition(".")[2].startswith("k_")
        heads = 1 if size > self.hidden / 2 else self.heads["k" if of_keys else "q"]
        fused = type(module).__name__ == "LayerNorm" or type(module).__module__.startswith("torch.")
        self.normed["one kernel" if fused else "rms"] += size * heads
        self.norms += not fused
