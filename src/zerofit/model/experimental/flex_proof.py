"""Compare flex_attention with a model's own eager attention on a device: outputs and gradients, documents, windows."""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import PreTrainedConfig, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zerofit.model import prove

NAME = "flex_attention"

COMPILATIONS = 64  # torch's limit is 8, and gives up on compiling it beyond

# What a proof depends on, of config.json.
SIZES = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "sliding_window", "layer_types",
    "attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier",
)  # fmt: skip

# Tokens of the proof's documents in one row, and of its padded rows. Lengths that are multiples of 128 have kernels of
# their own: the padded rows are, the documents together are not.
PACKED, PADDED = (40, 216, 137), (384, 216)

WINDOW = 50  # the longest of the proof, shorter than a document: a longer one is the same kernel with another number

# Of the relative errors. Rounding makes up to 1.1 % in bf16 (tests/model/test_flex.py), a window that is one token
# longer 9 %. Gradients of sinks are sums of few numbers, and transformers rounds the logarithm of a row's sum to the
# type of the values before it scales the output by it: up to 2.5 %.
BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 0.03, torch.float16: 0.006}
BOUNDS_OF_SINKS = {torch.float32: 5e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
OF_SINKS = "gradients of the sinks"


@dataclass(frozen=True)
class Layer:
    """The attention of a layer, as far as the proof tells one from another."""

    heads: int  # of the queries
    kv_heads: int  # of keys and values
    size: int  # numbers of a head
    scaling: float  # of the products of queries and keys
    softcap: float | None  # of the scores
    window: int  # tokens that each one attends to; 0: all before it
    has_sinks: bool  # a score of each head that takes its share and has no value
    eager: Callable  # transformers' function of that model

    @property
    def arguments(self) -> dict:
        """Return what the model's layer passes to its attention function, beside tensors."""
        caps = {"softcap": self.softcap} if self.softcap is not None else {}
        return {"scaling": self.scaling, "dropout": 0.0, "sliding_window": self.window or None, **caps}


@dataclass(frozen=True)
class Dtypes:
    """The types that a run computes its attention in."""

    compute: torch.dtype  # of the products
    sinks: torch.dtype  # of the model's parameters
    autocast: bool  # rotary embeddings leave queries and keys in fp32 under it


def compile_all_lengths() -> None:
    """Raise torch's limit of compilations for flex_attention, which has several reasons for one.

    Windows, evaluation, padding and lengths that are multiples of 128 have kernels of their own. Beyond the limit torch
    2.13 runs flex_attention without compiling it, with all scores in memory, after a warning (vllm issue 27178).
    """
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, COMPILATIONS)


def is_kept(settings, config) -> bool:
    """Return whether an earlier start has proven flex_attention for a model's sizes, on the GPU that a job is for."""
    planned = settings.planned_gpu
    return file(settings, config, planned.device_name if planned else torch.cuda.get_device_name()).exists()


def file(settings, config, gpu_name: str) -> Path:
    """Return the file that stands for a proof; its name is made from all that the proof depends on."""
    text = config.get_text_config()
    installed = {package.metadata["Name"]: package.version for package in metadata.distributions(name="triton")}
    versions = [*installed.values(), *(metadata.version(name) for name in ("torch", "transformers"))]
    sizes = [getattr(text, name, None) for name in SIZES]
    types = [settings.precision, settings.dtype, settings.keeps_fp32, settings.trains_adapter]
    return prove.file(NAME, gpu_name, *versions, text.model_type, *sizes, *types)


def layers_of(model) -> list[Layer]:
    """Return the kinds of attention that a model has; []: none that is known."""
    found = {}
    for module in model.modules():
        eager = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
        known = all(hasattr(module, name) for name in ("scaling", "head_dim", "num_key_value_groups", "config"))
        if eager is None or not known or not getattr(module, "is_causal", False):
            continue
        if getattr(module.config, "v_head_dim", None) not in (None, module.head_dim):
            continue
        heads, cap = module.config.num_attention_heads, getattr(module, "attn_logit_softcapping", None)
        window, has_sinks = getattr(module, "sliding_window", None) or 0, getattr(module, "sinks", None) is not None
        kv_heads = heads // module.num_key_value_groups
        found[Layer(heads, kv_heads, module.head_dim, module.scaling, cap, window, has_sinks, eager)] = None
    return [*found]


def problem(layers: list[Layer], dtypes: Dtypes, device: torch.device) -> str | None:
    """Return what is wrong with flex_attention's numbers for these layers; None if nothing is."""
    if not layers:
        return "its attention is not one that the proof knows"
    for layer in layers:
        for lengths, packed in ((PACKED, True), (PADDED, False)):
            errors = differences(_shortened(layer), lengths, packed, dtypes, device)
            if errors.pop("between documents") > 0:
                return "documents in one row read each other with flex_attention"
            for what, error in errors.items():
                bound = (BOUNDS_OF_SINKS if what == OF_SINKS else BOUNDS)[dtypes.compute]
                if not error <= bound:
                    return f"the {what} of flex_attention are {error:.1%} off those of eager (bound {bound:.1%})"
    return None


def _shortened(layer: Layer) -> Layer:
    return Layer(**vars(layer) | {"window": min(layer.window, WINDOW)})


def differences(layer: Layer, lengths, packed: bool, dtypes: Dtypes, device: torch.device) -> dict[str, float]:
    """Return the relative errors of flex_attention, and the largest gradient between documents of a row.

    Args: lengths: of the documents in one row where packed, else of the padded rows.
    """
    rows, tokens = (1, sum(lengths)) if packed else (len(lengths), max(lengths))
    inputs = _inputs(layer, rows, tokens, dtypes, device)
    numbers = torch.arange(len(lengths), device=device)
    documents = numbers.repeat_interleave(torch.tensor(lengths, device=device))[None] if packed else numbers[:, None]
    documents = documents.expand(rows, tokens)
    real = torch.arange(tokens, device=device) < torch.tensor(lengths, device=device)[:, None]
    real = torch.ones_like(documents, dtype=torch.bool) if packed else real
    upstream = torch.randn(rows, tokens, layer.heads, layer.size, generator=_generator(device), device=device)
    upstream = upstream * real[..., None, None]
    seen = _visible(documents, real, layer.window)
    alone = torch.eye(tokens, dtype=torch.bool, device=device) & ~seen.any(-1, keepdim=True)  # padding past a window
    exact = torch.zeros(seen.shape, dtype=torch.float64, device=device).masked_fill(~(seen | alone), float("-inf"))
    expected, _ = _results(functools.partial(_eager, layer, exact), _leaves(inputs, torch.float64), upstream)
    computed = functools.partial(_flex, layer, dtypes, _block_mask(layer, documents, real, packed, device))
    leaves = _leaves(inputs)
    found, out = _results(computed, leaves, upstream)
    middle = documents == len(lengths) // 2
    of_middle = torch.autograd.grad((out * middle[..., None, None]).float().sum(), leaves[:3])
    with torch.no_grad():
        found["outputs of an evaluation"] = computed(*inputs, training=False).float() * real[..., None, None]
    expected["outputs of an evaluation"] = expected["outputs"]
    errors = {what: ((found[what] - exact).norm() / exact.norm()).item() for what, exact in expected.items()}
    others = ~middle[:, None, :, None]
    return errors | {"between documents": max((x.abs() * others).max().item() for x in of_middle)}


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _inputs(layer: Layer, rows: int, tokens: int, dtypes: Dtypes, device: torch.device) -> list[torch.Tensor]:
    """Return random queries, keys, values and, if the layer has them, sinks, in the types of the run.

    A soft cap is felt: scores lie around three quarters of it, close enough to each other that no token takes all.
    """
    generator = _generator(device)
    draw = functools.partial(torch.randn, generator=generator, device=device)
    shift = (0.75 * layer.softcap / layer.scaling / layer.size) ** 0.5 if layer.softcap is not None else 0.0
    spread = (layer.size**-0.5 / layer.scaling) ** 0.5  # scores differ by about 1
    q, k = (draw(rows, heads, tokens, layer.size) * spread + shift for heads in (layer.heads, layer.kv_heads))
    v = draw(rows, layer.kv_heads, tokens, layer.size)
    rounded = [x.to(dtypes.compute) for x in (q, k, v)]
    if dtypes.autocast:
        rounded[:2] = (x.float() for x in rounded[:2])
    sinks = [(2 + draw(layer.heads)).to(dtypes.sinks)] if layer.has_sinks else []
    return [*rounded, *sinks]


def _leaves(tensors: list[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in tensors]


def _visible(documents: torch.Tensor, real: torch.Tensor, window: int) -> torch.Tensor:
    """Return which keys each query attends to, (rows, 1, tokens, tokens)."""
    position = torch.arange(documents.shape[1], device=documents.device)
    distance = position[:, None] - position
    seen = (distance >= 0) & (documents[:, :, None] == documents[:, None, :]) & real[:, None, :]
    return (seen & (distance < window) if window else seen)[:, None]


def _block_mask(layer: Layer, documents: torch.Tensor, real: torch.Tensor, packed: bool, device: torch.device):
    """Return the mask as transformers' models make it: of packed rows from positions, of padded ones from the mask."""
    config = PreTrainedConfig(attn_implementation=NAME, sliding_window=layer.window or None)
    make = masking_utils.create_sliding_window_causal_mask if layer.window else masking_utils.create_causal_mask
    positions = torch.arange(documents.shape[1], device=device).expand(documents.shape)
    if packed:
        starts = torch.searchsorted(documents[0].contiguous(), documents[0].contiguous())
        positions = positions - starts
    return make(
        config=config, inputs_embeds=torch.empty(*documents.shape, 1, device=device), past_key_values=None,
        attention_mask=None if packed else real.long(), position_ids=positions,
    )  # fmt: skip


def _module(layer: Layer, sinks, training: bool) -> SimpleNamespace:
    """Return what attention functions read of the layer's module."""
    groups = layer.heads // layer.kv_heads
    return SimpleNamespace(sinks=sinks, num_key_value_groups=groups, head_dim=layer.size, training=training)


def _eager(layer: Layer, mask, query, key, value, sinks=None):
    """Return the outputs of transformers' eager function of the model, (rows, tokens, heads, head_dim)."""
    return layer.eager(_module(layer, sinks, True), query, key, value, mask, **layer.arguments)[0]


def _flex(layer: Layer, dtypes: Dtypes, mask, query, key, value, sinks=None, training: bool = True):
    """Return the outputs of transformers' flex_attention; a backward is outside of autocast, as in training."""
    more = {} if sinks is None else {"s_aux": sinks}
    module = _module(layer, sinks, training)
    with torch.autocast(query.device.type, dtypes.compute, enabled=dtypes.autocast):
        return ALL_ATTENTION_FUNCTIONS[NAME](module, query, key, value, mask, **layer.arguments, **more)[0]


def _results(attend: Callable, inputs: list[torch.Tensor], upstream: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """Return outputs and gradients of their product with `upstream`, and the outputs with their graph."""
    out = attend(*inputs)
    gradients = torch.autograd.grad((out * upstream).float().sum(), inputs, retain_graph=True, materialize_grads=True)
    names = ("outputs", *(f"gradients of the {what}" for what in ("queries", "keys", "values")), OF_SINKS)
    shown = (out.detach() * (upstream != 0), *gradients)
    return {name: tensor.float() for name, tensor in zip(names, shown, strict=False)}, out
