"""List the operations of a model: its matrix products by shape, attention and elementwise passes of a token."""

import functools
from collections import Counter
from dataclasses import dataclass, replace

from zerofit.model.mixtures import weights

# Linear layers whose result is only added to the hidden states, and what in a layer would keep it.
LAST, AFTER_LAST = ("down_proj", "w2", "c_proj", "dense_4h_to_h", "fc2", "fc_out"), ("post_feedforward", "post_mlp")

BESIDE_OTHERS = ("k_proj", "v_proj", "up_proj", "w3")  # read the same input as another linear layer

# Several linear layers in one, with the cost of joining their gradients; Phi-3 cuts slices, each with zeros around it.
SPLIT = {"query_key_value": 1.0, "c_attn": 1.0, "Wqkv": 1.0, "gate_up_proj": 1.0, "qkv_proj": 5.5}

COMPOSED = ("gelu_new", "gelu_fast")  # activations that transformers computes by several kernels

ADDITIONS = 2  # of a layer: what its attention and its MLP add to the hidden states


@dataclass(frozen=True)
class Product:
    """Matrix products of one shape: rows of `wide` numbers into rows of `out`."""

    wide: int  # numbers of a row before the product
    out: int  # and after it
    count: float = 1.0  # products of the model with this shape; with experts those of all of a layer are one
    trained: bool = True  # the weight has a gradient
    bits: int = 16  # in which the weight is stored
    experts: int = 0  # weights of its kind in a layer, among which a router shares out the rows; 0: no experts
    selected: int = 1  # experts that a row goes through
    of_layers: bool = True  # it is in the layers that are recomputed
    head: bool = False  # it computes the logits
    adapter: bool = False  # A or B of a LoRA
    last: bool = False  # nothing after it in its layer keeps its result for the backward

    def flops(self, rows: float) -> float:
        """Return the operations of the forward of all of them for so many tokens."""
        return 2.0 * rows * self.selected * self.wide * self.out * self.count

    @property
    def weights(self) -> float:
        return float(self.wide) * self.out * self.count * max(1, self.experts)


@dataclass(frozen=True)
class Passes:
    """Numbers of a token that elementwise kernels of all layers read, and how many kernels a forward starts."""

    rms: float = 0.0  # through an RMSNorm of several kernels
    layer_norm: float = 0.0  # through a norm of one kernel
    rotated: float = 0.0  # through rotary embeddings
    gated: float = 0.0  # through activation and gate of an MLP
    activated: float = 0.0  # through an activation without a gate
    composed: float = 0.0  # the same of one that is several kernels
    added: float = 0.0  # to the hidden states
    shared: float = 0.0  # inputs of a linear layer that another reads too: their gradients are added
    joined: float = 0.0  # outputs of a linear layer that are split: their gradients are put together
    turned: float = 0.0  # heads of an attention's output, copied into rows
    routed: float = 0.0  # copied to experts and back
    delta: float = 0.0  # through a convolution and the delta rule of a linear attention
    state: float = 0.0  # through a convolution and the scan of a state space
    convolved: float = 0.0  # through a short convolution between two gates
    adapted_in: float = 0.0  # inputs of adapted linear layers
    adapted_out: float = 0.0  # and their outputs
    adapters: float = 0.0  # adapted linear layers
    packed: float = 0.0  # linear layers with packed weights
    norms: float = 0.0  # norms of several kernels
    linears: float = 0.0  # linear layers without adapters' own
    convolutions: float = 0.0  # layers with a convolution
    modules: float = 0.0  # modules with weights, which ZeRO-3 gathers one by one


@dataclass(frozen=True)
class Work:
    """What a model computes."""

    products: tuple[Product, ...]
    passes: Passes
    attentions: tuple[tuple[int, float], ...]  # (tokens of a window, 0: none; layers) of each kind of attention
    heads: int  # query heads of a layer
    head_dim: int
    layers: int
    loops_experts: bool = False  # its class calls one expert after the other, whatever --experts_implementation says


def dense(
    *, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocabulary: int,
    gated: bool = True, rms: bool = True, rotary: bool = True, trained: bool = True,
) -> Work:  # fmt: skip
    """Return the operations of a model that is known by its dimensions alone.

    Without a gate in its MLP it projects q, k and v as one.
    """
    q, k = heads * head_dim, kv_heads * head_dim
    shapes = [(hidden, q), (hidden, k), (hidden, k), (q, hidden)]
    shapes += [(hidden, intermediate)] * (2 if gated else 1) + [(intermediate, hidden)]
    last = Product(*shapes.pop(), count=float(layers), trained=trained, last=True)
    products = [Product(*shape, count=n * layers, trained=trained) for shape, n in Counter(shapes).items()] + [last]
    if vocabulary:
        products.append(Product(hidden, vocabulary, trained=trained, of_layers=False, head=True))
    normed = 2.0 * hidden * layers
    passes = Passes(
        rms=normed * rms, layer_norm=normed * (not rms), rotated=(q + k) * layers * rotary,
        gated=intermediate * layers * gated, activated=intermediate * layers * (not gated),
        added=float(ADDITIONS * hidden * layers), turned=float(q * layers), norms=2.0 * layers * rms,
        shared=3.0 * hidden * layers * gated, joined=float((q + 2 * k) * layers * (not gated)),
        linears=float((len(shapes) + 1) * layers), modules=float((len(shapes) + 3) * layers),
    )  # fmt: skip
    return Work(tuple(products), passes, ((0, float(layers)),), heads, head_dim, layers)


def of_model(net, config, layers: list, *, heads: int, kv_heads: int, head_dim: int, bits: int = 16) -> Work:
    """Return the operations of a model, with its adapter, on the meta device.

    Args: layers: its layers; bits: of the frozen linear layers but the head.
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
    """Return (window, layers) of each kind of attention that a config.json names.

    A hybrid's other layers are no attention: _Reader counts their convolutions, and what comes after them.
    """
    window = getattr(text, "sliding_window", None) or 0
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if not kinds:
        used = window if getattr(text, "use_sliding_window", True) else 0
        return ((used, float(layers)),)
    found: Counter = Counter()
    for kind in kinds[:layers]:
        if "attention" in kind and not kind.startswith("linear"):
            found[window if "sliding" in kind or "chunked" in kind else 0] += 1
    return tuple((size, float(count)) for size, count in sorted(found.items()))


def _activation(text) -> str | None:
    names = ("hidden_act", "activation_function", "hidden_activation")
    return next((getattr(text, name) for name in names if getattr(text, name, None)), None)


def _rotated_share(text) -> float:
    """Return the share of a head that passes the kernels of rotary embeddings; 0 without them.

    Half of what is not turned is added: it is cut off and joined again.
    """
    rope = getattr(text, "rope_parameters", None)
    if isinstance(rope, dict) and isinstance(rope.get("partial_rotary_factor"), float):
        return (1 + rope["partial_rotary_factor"]) / 2
    return float(
        any(getattr(text, name, None) for name in ("rope_theta", "rope_parameters", "rotary_pct", "rotary_dim"))
    )


class _Reader:
    """Counts the modules of a model by what they compute."""

    def __init__(self, net, config, layers: list, bits: int, heads: dict[str, int]):
        self.bits, self.experts, self.heads = bits, weights.count(config), heads
        of_token = 0 if weights.computes_all(net) else weights.selected(config)
        self.selected = min(self.experts, of_token) or self.experts
        self.fused = {id(weight) for weight in weights.fused(net).values()}
        self.inside = {id(module) for layer in layers for module in layer.modules()}
        head = net.get_output_embeddings()
        self.head = getattr(head, "base_layer", head)  # below its adapter
        self.hidden = getattr(config.get_text_config(), "hidden_size", 1)
        self.is_routed = weights.is_routed
        self.keeps_last = any(part in name for name, _ in net.named_modules() for part in AFTER_LAST)
        self.shapes: Counter = Counter()
        self.normed: Counter = Counter()
        self.gated = self.activated = self.composed = self.routed = self.shared = self.joined = 0.0
        self.is_composed = _activation(config.get_text_config()) in COMPOSED
        self.config, self.convolved = config, Counter()
        self.adapted_in = self.adapted_out = self.adapters = self.packed = self.norms = self.linears = 0.0
        self.modules = self.convolutions = 0.0

    @functools.cached_property
    def after_convolution(self) -> str:
        """Return what the layers with a convolution compute after it, as the field of Passes."""
        from zerofit.model.kernels import linear_attention

        kernels = [kernel for kernel, _ in linear_attention.kernels_of(self.config).values()]
        if any(kernel.startswith("chunk_") for kernel in kernels):
            return "delta"
        return "state" if any("scan" in kernel for kernel in kernels) else "convolved"

    def products(self) -> tuple[Product, ...]:
        return tuple(replace(product, count=count) for product, count in self.shapes.items())

    def read(self, name: str, module) -> None:
        """Count what one module computes itself; its children are read on their own."""
        own = dict(module.named_parameters(recurse=False))
        self.modules += bool(own) and id(module) in self.inside
        stacked = [(key, p) for key, p in own.items() if self.experts and id(p) in self.fused]
        if stacked:
            self._read_experts(stacked)
        weight = own.get("weight")
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
            of_layers=id(module) in self.inside, head=is_head, adapter=adapter, last=self._is_last(name, bool(routed)),
        )  # fmt: skip
        if routed:  # its experts are modules of their own: one product stands for those of a layer
            product = replace(product, experts=self.experts, selected=self.selected)
        self.shapes[product] += 1 / self.experts if routed else 1
        if adapter:
            self.adapters += ".lora_A" in name
            self.adapted_in += wide * share * (".lora_A" in name)
            self.adapted_out += out * share * (".lora_B" in name)
            return
        self.linears, self.packed = self.linears + 1, self.packed + packed
        last = [part for part in name.split(".") if part != "base_layer"][-1]
        self.shared += wide * share * (last in BESIDE_OTHERS)
        self.joined += out * share * SPLIT.get(last, 0.0)
        self._read_mlp(last, out, share, bool(routed))

    def _is_last(self, name: str, routed: bool) -> bool:
        """Return whether a product's result is only added; of an adapted layer that of B is, which comes after it."""
        parts = [part for part in name.split(".") if part not in ("lora_B", "default")]
        shared = routed or any(self.is_routed(part) or "expert" in part for part in parts)
        return parts[-1] in LAST and "attn" not in name and not shared and not self.keeps_last

    def _read_mlp(self, last: str, out: int, share: float, routed: bool) -> None:
        """Count an MLP's activation by the name of the linear layer before it."""
        if last in ("gate_proj", "w1", "gate_up_proj", "input_linear"):
            self.gated += (out / 2 if last in ("gate_up_proj", "input_linear") else out) * share
            self.routed += 2.0 * self.hidden * share * routed
        elif last in ("dense_h_to_4h", "fc_in", "fc1", "c_fc"):
            self.composed += out * share * self.is_composed
            self.activated += out * share * (not self.is_composed)

    def _read_experts(self, stacked: list) -> None:
        """Count fused experts: the tensors of all experts of a layer."""
        for name, weight in stacked:
            product = Product(weight.shape[1], weight.shape[2], 1.0, bool(weight.requires_grad), 16, self.experts,
                              self.selected)  # fmt: skip
            self.shapes[product] += 1
            if name.startswith("gate_up"):
                wide = max(weight.shape[1:]) if self.hidden not in weight.shape[1:] else _other(weight, self.hidden)
                self.gated += wide / 2 * self.selected
                self.routed += 2.0 * self.hidden * self.selected

    def _read_norm(self, name: str, module, weight) -> None:
        if id(module) not in self.inside:
            return
        size, of_keys = weight.numel(), name.rpartition(".")[2].startswith("k_")
        heads = 1 if size > self.hidden / 2 else self.heads["k" if of_keys else "q"]
        one = type(module).__name__ == "LayerNorm" or type(module).__module__.startswith("torch.")
        self.normed["one kernel" if one else "rms"] += size * heads
        self.norms += not one


def _other(weight, hidden: int) -> int:
    """Return the side of a layer's expert that is not the hidden size."""
    first, second = weight.shape[1:]
    return second if first == hidden else first
