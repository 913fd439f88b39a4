"""Compare flex_attention with a model's eager attention on a device: outputs and gradients, documents, windows."""

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

from zerofit.model import self_test

NAME = "flex_attention"

COMPILATIONS = 64  # torch's default limit of 8 is too small

# Keys of config.json that the self-test depends on.
SIZES = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "sliding_window", "layer_types",
    "attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier",
)  # fmt: skip

# Lengths of the packed documents in one row, and of the padded rows. Multiples of 128 use separate kernels: the padded
# length is one, the packed length is not.
PACKED, PADDED = (40, 216, 137), (384, 216)

WINDOW = 50  # the longest tested window, shorter than a document; longer ones use the same kernel

# Bounds of the relative errors. Rounding causes up to 1.1 % in bf16 (tests/model/test_flex.py), a window that is one
# token longer 9 %. Gradients of sinks are sums of few numbers, and transformers rounds the logarithm of a row's sum to
# the dtype of the values before it scales the output: up to 2.5 %.
BOUNDS = {torch.float32: 5e-3, torch.bfloat16: 0.03, torch.float16: 0.006}
BOUNDS_OF_SINKS = {torch.float32: 5e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
SINK_GRADIENTS = "gradients of the sinks"


@dataclass(frozen=True)
class Layer:
    """The properties of a layer's attention that the self-test depends on."""

    heads: int  # query heads
    kv_heads: int  # key and value heads
    size: int  # numbers per head
    scaling: float  # factor for the products of queries and keys
    softcap: float | None  # soft cap for the scores
    window: int  # tokens that each token attends to; 0: all tokens before it
    has_sinks: bool  # each head has a score without a value
    eager: Callable  # transformers' eager function for that model

    @property
    def arguments(self) -> dict:
        """Return the arguments that the model's layer passes to its attention function, except tensors."""
        caps = {"softcap": self.softcap} if self.softcap is not None else {}
        return {"scaling": self.scaling, "dropout": 0.0, "sliding_window": self.window or None, **caps}


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a run's attention."""

    compute: torch.dtype  # dtype of the products
    sinks: torch.dtype  # dtype of the model's parameters
    autocast: bool  # with autocast, rotary embeddings leave queries and keys in fp32


def compile_all_lengths() -> None:
    """Raise torch's recompilation limit for flex_attention.

    Windows, evaluation, padding and lengths that are multiples of 128 each need a kernel. Beyond the limit torch 2.13
    runs flex_attention uncompiled, with all scores in memory, after a warning (vllm issue 27178).
    """
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, COMPILATIONS)


def has_passed(settings, config) -> bool:
    """Return whether flex_attention passed in an earlier start, for the model's sizes and the job's GPU."""
    planned = settings.planned_gpu
    return result_file(settings, config, planned.device_name if planned else torch.cuda.get_device_name()).exists()


def result_file(settings, config, gpu_name: str) -> Path:
    """Return the file that marks a passed self-test; its name is a hash of all conditions of the result."""
    text = config.get_text_config()
    installed = {package.metadata["Name"]: package.version for package in metadata.distributions(name="triton")}
    versions = [*installed.values(), *(metadata.version(name) for name in ("torch", "transformers"))]
    sizes = [getattr(text, name, None) for name in SIZES]
    types = [settings.precision, settings.dtype, settings.keeps_fp32, settings.trains_adapter]
    return self_test.result_file(NAME, gpu_name, *versions, text.model_type, *sizes, *types)


def layers_of(model) -> list[Layer]:
    """Return the distinct kinds of attention of a model that the self-test covers."""
    layers = {}
    for module in model.modules():
        eager = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
        is_known = all(hasattr(module, name) for name in ("scaling", "head_dim", "num_key_value_groups", "config"))
        if eager is None or not is_known or not getattr(module, "is_causal", False):
            continue
        if getattr(module.config, "v_head_dim", None) not in (None, module.head_dim):
            continue
        heads, cap = module.config.num_attention_heads, getattr(module, "attn_logit_softcapping", None)
        window, has_sinks = getattr(module, "sliding_window", None) or 0, getattr(module, "sinks", None) is not None
        kv_heads = heads // module.num_key_value_groups
        layers[Layer(heads, kv_heads, module.head_dim, module.scaling, cap, window, has_sinks, eager)] = None
    return [*layers]


def problem(layers: list[Layer], dtypes: Dtypes, device: torch.device) -> str | None:
    """Return the failure of flex_attention for these layers, or None if it matches eager."""
    if not layers:
        return "the self-test does not cover this model's attention"
    for layer in layers:
        for lengths, packed in ((PACKED, True), (PADDED, False)):
            errors = differences(_shortened(layer), lengths, packed, dtypes, device)
            if errors.pop("between documents") > 0:
                return "documents in one row attend to each other with flex_attention"
            for what, error in errors.items():
                bound = (BOUNDS_OF_SINKS if what == SINK_GRADIENTS else BOUNDS)[dtypes.compute]
                if not error <= bound:
                    return f"the {what} of flex_attention differ from eager by {error:.1%} (bound {bound:.1%})"
    return None


def _shortened(layer: Layer) -> Layer:
    return Layer(**vars(layer) | {"window": min(layer.window, WINDOW)})


def differences(layer: Layer, lengths, packed: bool, dtypes: Dtypes, device: torch.device) -> dict[str, float]:
    """Return the relative errors of flex_attention, and the largest gradient between documents of a row.

    Args: lengths: lengths of the documents in one row if packed, else of the padded rows.
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
    results, out = _results(computed, leaves, upstream)
    middle = documents == len(lengths) // 2
    gradients = torch.autograd.grad((out * middle[..., None, None]).float().sum(), leaves[:3])
    with torch.no_grad():
        results["outputs of an evaluation"] = computed(*inputs, training=False).float() * real[..., None, None]
    expected["outputs of an evaluation"] = expected["outputs"]
    errors = {what: ((results[what] - exact).norm() / exact.norm()).item() for what, exact in expected.items()}
    others = ~middle[:, None, :, None]
    return errors | {"between documents": max((x.abs() * others).max().item() for x in gradients)}


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _inputs(layer: Layer, rows: int, tokens: int, dtypes: Dtypes, device: torch.device) -> list[torch.Tensor]:
    """Return random queries, keys, values and, if the layer has them, sinks, in the dtypes of the run.

    With a soft cap, scores are around three quarters of it, so that it has an effect, and close to each other, so that
    attention does not collapse to one token.
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
    """Return a mask of the keys that each query attends to, (rows, 1, tokens, tokens)."""
    position = torch.arange(documents.shape[1], device=documents.device)
    distance = position[:, None] - position
    seen = (distance >= 0) & (documents[:, :, None] == documents[:, None, :]) & real[:, None, :]
    return (seen & (distance < window) if window else seen)[:, None]


def _block_mask(layer: Layer, documents: torch.Tensor, real: torch.Tensor, packed: bool, device: torch.device):
    """Return the mask as transformers' models build it: from positions for packed rows, from the padding mask else."""
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
    """Return the attributes of a layer's module that attention functions read."""
    groups = layer.heads // layer.kv_heads
    return SimpleNamespace(sinks=sinks, num_key_value_groups=groups, head_dim=layer.size, training=training)


def _eager(layer: Layer, mask, query, key, value, sinks=None):
    """Return the outputs of transformers' eager attention function, (rows, tokens, heads, head_dim)."""
    return layer.eager(_module(layer, sinks, True), query, key, value, mask, **layer.arguments)[0]


def _flex(layer: Layer, dtypes: Dtypes, mask, query, key, value, sinks=None, training: bool = True):
    """Return the outputs of transformers' flex_attention; the backward runs outside of autocast, as in training."""
    more = {} if sinks is None else {"s_aux": sinks}
    module = _module(layer, sinks, training)
    with torch.autocast(query.device.type, dtypes.compute, enabled=dtypes.autocast):
        return ALL_ATTENTION_FUNCTIONS[NAME](module, query, key, value, mask, **layer.arguments, **more)[0]


def _results(attend: Callable, inputs: list[torch.Tensor], upstream: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """Return the outputs and the gradients of their product with `upstream`; also the outputs with their graph."""
    out = attend(*inputs)
    gradients = torch.autograd.grad((out * upstream).float().sum(), inputs, retain_graph=True, materialize_grads=True)
    names = ("outputs", *(f"gradients of the {what}" for what in ("queries", "keys", "values")), SINK_GRADIENTS)
    shown = (out.detach() * (upstream != 0), *gradients)
    return {name: tensor.float() for name, tensor in zip(names, shown, strict=False)}, out
