"""Test the kernels that only a GPU has against fp64: packed attention, sdpa without cuDNN, the fused loss."""

import contextlib
import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from test_attention import SHAPE, documents
from test_fused_loss import apart
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, TrainingArguments

from zerofit.base.errors import UserError
from zerofit.model import attention, fused_loss
from zerofit.model.experimental import flex_self_test

pytestmark = pytest.mark.gpu
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # relative difference in norm
LAYOUTS = {"awkward": [1, 7, 64, 65, 192, 320, 128, 33], "even": [256] * 4, "one": [1000], "ones": [1] * 16}
WIDTHS = [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256),  # of keys, of values
          (512, 512), (100, 100)]  # fmt: skip
CONFIGS = sorted(folder.name for folder in (ROOT / "tests" / "configs").iterdir())


@pytest.fixture(autouse=True)
def on_the_gpu():
    """Choose the kernels as the kit does; give the memory back for the tests that fill the GPU."""
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("the varlen kernel needs compute capability 8.0")
    attention.register()
    attention.avoid_wrong_kernels(SimpleNamespace(use_cpu=False, decisions=[]))
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def packed(q, k, v, lengths, window=0):
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    more = {"cu_seq_lens_q": bounds, "max_length_q": max(lengths), "sliding_window": window or None}
    return attention.packed_attention(None, q, k, v, None, scaling=q.shape[-1] ** -0.5, **more)[0]


def document_by_document(q, k, v, lengths, window):
    """Compute causal attention of one document after the other; (1, heads, tokens, width) each."""
    groups, out = q.shape[1] // k.shape[1], []
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    for qs, ks, vs in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True):
        position = torch.arange(qs.shape[2], device=q.device)
        distance = position[:, None] - position
        seen = (distance >= 0) & (distance < (window or qs.shape[2]))
        scores = qs @ ks.transpose(-1, -2) * q.shape[-1] ** -0.5
        out.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ vs)
    return torch.cat(out, 2).transpose(1, 2)


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_packed_attention_equals_fp64(dtype, heads, width):
    """Compare output and gradients, over lengths of documents and windows."""
    windows = (0, 1, 16, 100) if dtype == torch.bfloat16 and width[0] in (64, 128, 256) else (0,)
    for (layout, lengths), window in itertools.product(LAYOUTS.items(), windows):
        # as models make them: (1, tokens, heads, width), seen as (1, heads, tokens, width)
        sizes = ((heads[0], width[0]), (heads[1], width[0]), (heads[1], width[1]))
        q, k, v = (torch.randn(1, sum(lengths), h, w, device="cuda", dtype=dtype).transpose(1, 2) for h, w in sizes)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
        out, exact = packed(*leaves, lengths, window), document_by_document(*exact_leaves, lengths, window)
        upstream = torch.randn_like(out)
        gradients = torch.autograd.grad(out, leaves, upstream)
        wanted = torch.autograd.grad(exact, exact_leaves, upstream.double())
        for name, a, b in zip(("out", "dq", "dk", "dv"), (out, *gradients), (exact, *wanted), strict=True):
            if b.norm() > 1e-6:  # queries and keys of single tokens have no gradient
                assert apart(a, b) < BOUND[dtype], f"{name}, documents {layout}, window {window}"


def test_no_gradient_between_documents():
    leaves = [torch.randn(1, 8, 337, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    out = packed(*leaves, [100, 37, 200])
    for gradient in torch.autograd.grad(out[:, 100:137].float().square().sum(), leaves):
        assert gradient[:, :, 100:137].abs().max() > 0
        assert gradient[:, :, :100].abs().max() == 0 and gradient[:, :, 137:].abs().max() == 0


@pytest.mark.parametrize(("name", "implementation"), [
    *((name, attention.NAME) for name in CONFIGS),
    ("gemma2-2b", "flex_attention"), ("mistral-7b", "flex_attention"),  # compiling takes long: a soft cap and a window
])  # fmt: skip
def test_architecture_keeps_documents_apart(name, implementation):
    """Run the proof that each training makes on two layers of each architecture in tests/configs."""
    config = AutoConfig.from_pretrained(ROOT / "tests" / "configs" / name)
    config.num_hidden_layers = 2
    for key in ("layer_types", "no_rope_layers"):
        if isinstance(getattr(config, key, None), list):
            setattr(config, key, getattr(config, key)[:2])
    if implementation == attention.NAME and (why := attention.cannot_pack(config, implementation, 2048)):
        pytest.skip(f"the kit does not pack it: {why}")
    with torch.device("cuda"):
        net = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=implementation, dtype=torch.bfloat16
        )
    net.config.use_cache = False
    rows = [torch.randint(3, 500, (n,)).tolist() for n in (97, 64, 128)]
    rows = [{"input_ids": row, "labels": row} for row in rows]
    arguments = SimpleNamespace(device=torch.device("cuda"), gradient_checkpointing_kwargs=None)
    assert attention.packed_logit_error(net, rows, 0, arguments) < 0.05
    assert attention.cross_document_gradient(net, rows, arguments) == 0


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", attention.NAME])
def test_implementation_keeps_documents_apart(name):
    try:
        attention.check_available(name, use_cpu=False)
    except UserError as error:
        pytest.skip(str(error))
    config = LlamaConfig(**SHAPE | {"hidden_size": 128, "head_dim": 32})
    arguments = TrainingArguments()
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.bfloat16)
    model.to(arguments.device)
    assert attention.packed_logit_error(model, documents(), 0, arguments) < 0.02
    assert attention.cross_document_gradient(model, documents(), arguments) == 0


@pytest.mark.oracle
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.bfloat16, False), (torch.bfloat16, torch.float32, True)], ids=str
)
@pytest.mark.parametrize(("kind", "sizes"), [
    ("gemma2", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}),
    ("gemma2", {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144}),
    ("gpt_oss", {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 2}),
])  # fmt: skip
def test_flex_attention_is_proven(kind, sizes, dtypes):
    config = AutoConfig.for_model(kind, **sizes, num_hidden_layers=2)
    with torch.device("meta"):
        layers = flex_self_test.layers_of(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    flex_self_test.compile_all_lengths()
    assert len(layers) == 2
    assert flex_self_test.problem(layers, flex_self_test.Dtypes(*dtypes), torch.device("cuda")) is None


# --- sdpa with a padding mask ---


def sdpa_is_finite(tokens: int) -> bool:
    """Run sdpa forward and backward with a causal mask and padding."""
    leaves = [
        torch.randn(4, 32, tokens, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    seen = torch.ones(tokens, tokens, device="cuda", dtype=torch.bool).tril().expand(4, 1, -1, -1).clone()
    for row, length in enumerate((tokens, tokens - 9, tokens // 2, 17)):
        seen[row, :, :, length:] = False
    out = F.scaled_dot_product_attention(*leaves, attn_mask=seen)
    return all(x.isfinite().all() for x in (out, *torch.autograd.grad(out, leaves, torch.randn_like(out))))


@pytest.mark.parametrize("tokens", [128, 192, 256, 320, 448])
def test_sdpa_is_finite(tokens):
    """Include lengths of 64 more than a multiple of 128, at which cuDNN's kernel fails (pytorch issue 196678)."""
    assert sdpa_is_finite(tokens)


def cudnn_is_right(heads: int, kv_heads: int, queries: int, tokens: int, masked: bool) -> bool:
    """Compare cuDNN's forward and backward with those of the kernel that holds all scores, in bf16."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shapes = ((heads, queries), (kv_heads, tokens), (kv_heads, tokens))
    leaves = [torch.randn(4, n, length, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
              for n, length in shapes]  # fmt: skip
    mask = torch.ones(queries, tokens, device="cuda", dtype=torch.bool).tril(tokens - queries) if masked else None
    weights, results = torch.randn(4, heads, queries, 128, device="cuda", dtype=torch.bfloat16), []
    for backend in (SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                *leaves, attn_mask=mask, is_causal=not masked and queries == tokens, enable_gqa=heads != kv_heads
            )
        results.append([out, *torch.autograd.grad(out, leaves, weights)])
    errors = [(x.float() - y.float()).norm() / y.float().norm() for y, x in zip(*results, strict=True)]
    return all(error < 2e-2 for error in errors)  # NaN is not below it


def test_cudnn_is_off_and_still_wrong():
    """When the second part fails on Hopper and on Blackwell, name the first right release in avoid_wrong_kernels."""
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("torch prefers cuDNN's kernels from Hopper on")
    torch.backends.cuda.enable_cudnn_sdp(True)
    cases = [(32, 32, n, n, True) for n in (128, 192, 320, 448)]
    cases += [(32, 32, 512, 512, False), (32, 4, 512, 512, False), (32, 2, 512, 512, False), (32, 8, 1, 512, True)]
    right = {case: cudnn_is_right(*case) for case in cases}
    torch.backends.cuda.enable_cudnn_sdp(False)
    versions = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    assert not all(right.values()), f"{versions}: cuDNN's sdpa is right in all {len(right)} known cases"


# --- the loss without the logits ---


@pytest.mark.oracle
@pytest.mark.parametrize(("hidden_type", "weight_type", "autocast", "bound"), [
    ("float32", "float32", None, 1e-5), ("bfloat16", "bfloat16", None, 2e-2), ("float16", "float16", None, 5e-3),
    ("bfloat16", "float32", "bfloat16", 2e-2), ("float32", "float32", "bfloat16", 2e-2),
    ("float16", "float32", "float16", 5e-3),
])  # fmt: skip
def test_fused_loss_equals_fp64(hidden_type, weight_type, autocast, bound):
    hidden, weight = torch.randn(2100, 1024, device="cuda"), torch.randn(32064, 1024, device="cuda") * 0.03
    labels = torch.randint(0, 32064, (2100,), device="cuda")
    labels[::7] = -100
    leaves = [x.to(getattr(torch, t)).requires_grad_() for x, t in ((hidden, hidden_type), (weight, weight_type))]
    with torch.autocast("cuda", dtype=getattr(torch, autocast)) if autocast else contextlib.nullcontext():
        total = fused_loss.linear_cross_entropy(*leaves, None, labels, rows=512)
    gradients = torch.autograd.grad(total / 100, leaves)
    exact_leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    exact = F.cross_entropy(exact_leaves[0] @ exact_leaves[1].t(), labels, reduction="sum")
    wanted = torch.autograd.grad(exact / 100, exact_leaves)
    assert total.item() == pytest.approx(exact.item(), rel=bound / 10)
    assert all(apart(a, b) < bound for a, b in zip(gradients, wanted, strict=True))


def test_torchs_memory_efficient_kernel_still_has_no_groups_of_heads():
    """When this fails, attention.sdpa_without_scores and the repeated keys of the loop can go."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query, key = (torch.randn(1, heads, 64, 32, device="cuda") for heads in (4, 2))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
