"""Outline a model of a known kind by its config.json, without building it, which takes torch and transformers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from zerofit.model.mixtures import weights
from zerofit.plan import formulas
from zerofit.plan.answer.outline import Config, Experts, Linear, Model, Module, RMSNorm, Router, adapt
from zerofit.plan.formulas import Shape

LORA_RANK = 16  # default of --lora_r

NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "vocab_size",
)

# With other values than these a model has layers that are not known here.
PLAIN = {
    "attention_bias": False, "mlp_bias": False, "mlp_only_layers": [], "decoder_sparse_step": 1,
    "use_sliding_window": False, "use_bidirectional_attention": False, "quantization_config": None, "auto_map": None,
}  # fmt: skip

LLAMAS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class Kind:
    """What a model type has beside or instead of Llama's layers."""

    defaults: tuple[tuple[str, Any], ...] = ()  # values of the class in transformers where config.json is silent
    biases: bool = False  # of query, key and value
    normed: str = ""  # queries and keys are normed: "head" by head, or "all" heads at once
    norms: tuple[str, ...] = LLAMAS  # of a layer
    joined: bool = False  # query, key and value are one linear layer, and so are gate and up
    experts: str = ""  # name in config.json of their width; "": it is no mixture
    is_eager: bool = False  # transformers has no sdpa for it, so its attention writes scores
    partly_rotated: bool = False  # config.json may say that a part of a head is turned
    kind_of_layer: Callable[[dict, int], str] | None = None  # returns that of its number, where config.json is silent


def _every_second(config: dict, place: int) -> str:
    return "full_attention" if place % 2 else "sliding_attention"


def _every_sixth(config: dict, place: int) -> str:
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    return "sliding_attention" if (place + 1) % every else "full_attention"


_GEMMAS = (*LLAMAS, "pre_feedforward_layernorm", "post_feedforward_layernorm")

_WINDOW, _NO_WINDOW, _TIED = ("sliding_window", 4096), ("sliding_window", None), ("tie_word_embeddings", True)
_HEADS, _CAP = ("head_dim", 256), ("attn_logit_softcapping", 50.0)

KNOWN = {
    "llama": Kind(),
    "mistral": Kind((_WINDOW,)),
    "qwen2": Kind(biases=True),
    "qwen3": Kind((("head_dim", 128),), normed="head"),
    "mixtral": Kind((_NO_WINDOW,), experts="intermediate_size"),
    "qwen3_moe": Kind(normed="head", experts="moe_intermediate_size"),
    "gemma": Kind((_HEADS, _TIED)),
    "gemma2": Kind((_HEADS, _WINDOW, _TIED, _CAP), norms=_GEMMAS, is_eager=True, kind_of_layer=_every_second),
    "gemma3_text": Kind((_HEADS, _WINDOW, _TIED), normed="head", norms=_GEMMAS, kind_of_layer=_every_sixth),
    "phi3": Kind((_NO_WINDOW,), joined=True, partly_rotated=True),
    "olmo2": Kind(normed="all", norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    "smollm3": Kind((_TIED,)),
    "granite": Kind(),
}


def is_known(config: dict) -> bool:
    """Return whether `shape_of` knows all that the config.json asks for."""
    kind = KNOWN.get(config.get("model_type", ""))
    if kind is None or any(not config.get(name) for name in NEEDED):
        return False
    read = Config(**config)
    if kind.experts and not all((config.get(kind.experts), weights.count(read), weights.selected(read))):
        return False
    return all((config.get(name) or plain) == plain for name, plain in PLAIN.items())


def shape_of(config: dict, adapter: bool = False, bits: int = 16, rank: int = LORA_RANK) -> Shape:
    """Return what `candidates.shape_of` does for a model that `is_known`, without the words on adapted experts.

    Args: config: its config.json; adapter: LoRA trains, on all of its linear layers, experts and routers; bits: of the
        frozen linear layers but the head; rank: of the adapter.
    """
    kind = KNOWN[config["model_type"]]
    read = _config(config, kind)
    model = Model(read, [_layer(read, kind) for _ in range(read.num_hidden_layers)])
    added_to = adapt(model, rank) if adapter else 0
    shape = formulas.of_modules(read, model, lambda model, _: model.layers, added_to, bits)
    if kind.is_eager:
        shape = replace(shape, scores=formulas.score_bytes(read))
    if bits == 16:
        return shape
    packed = sum(product.weights for product in shape.work.products if product.bits < 16) / shape.frozen
    return replace(shape, frozen_bytes=formulas.PACKED_BYTES[bits] * packed + 2.0 * (1 - packed))


def _config(config: dict, kind: Kind) -> Config:
    """Return the config.json with what its class in transformers adds and a plan reads."""
    found = {"tie_word_embeddings": False, "rope_theta": 10000.0} | dict(kind.defaults) | config
    found["head_dim"] = found.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "sliding_window" not in dict(kind.defaults):
        found["sliding_window"] = None
    if kind.kind_of_layer and not config.get("layer_types"):
        found["layer_types"] = [kind.kind_of_layer(config, place) for place in range(config["num_hidden_layers"])]
    if kind.partly_rotated:
        rope, share = config.get("rope_parameters") or {}, float(config.get("partial_rotary_factor") or 1.0)
        found["rope_parameters"] = {"partial_rotary_factor": share} | rope
    return Config(**found)


def _layer(config: Config, kind: Kind) -> Module:
    norms = {name: RMSNorm(config.hidden_size) for name in kind.norms}
    return Module({"self_attn": _attention(config, kind), "mlp": _mlp(config, kind), **norms})


def _attention(config: Config, kind: Kind) -> Module:
    hidden, size = config.hidden_size, config.head_dim
    q, k = config.num_attention_heads * size, config.num_key_value_heads * size
    output = {"o_proj": Linear(q, hidden)}
    if kind.joined:
        return Module({**output, "qkv_proj": Linear(hidden, q + 2 * k)})
    heads = {name: Linear(hidden, out, kind.biases) for name, out in (("q_proj", q), ("k_proj", k), ("v_proj", k))}
    normed = {"head": (size, size), "all": (q, k)}.get(kind.normed, ())
    norms = {name: RMSNorm(of) for name, of in zip(("q_norm", "k_norm"), normed, strict=False)}
    return Module({**heads, **output, **norms})


def _mlp(config: Config, kind: Kind) -> Module:
    hidden, wide = config.hidden_size, config.intermediate_size
    if kind.experts:
        count = weights.count(config)
        return Module({"gate": Router(hidden, count), "experts": Experts(count, hidden, getattr(config, kind.experts))})
    inner = {"gate_up_proj": Linear(hidden, 2 * wide)} if kind.joined else {
        "gate_proj": Linear(hidden, wide), "up_proj": Linear(hidden, wide)
    }  # fmt: skip
    return Module({**inner, "down_proj": Linear(wide, hidden)})
