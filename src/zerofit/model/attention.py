"""Choose the attention implementation and keep packed documents apart.

transformers' `sdpa` needs a dense S x S mask to separate documents and, with a padding mask, builds no such mask:
documents then attend to each other without an error. The implementation registered here as "zerofit_packed" uses the
varlen kernel of torch.nn.attention on CUDA (in bf16 or fp16, without dropout), else a loop over documents. Without
document boundaries (evaluation, generation) it uses plain sdpa.

transformers' flash and flex implementations separate documents by cu_seq_lens and by position_ids. The trainer checks
this on the loaded model before the first step: `packed_logit_error` and `cross_document_gradient`.
"""

import contextlib
import functools
import inspect
import sys

import torch
import transformers.utils as available
from accelerate.utils import send_to_device
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.data.batches import Collator, PackedCollator
from zerofit.job import parallel_dims
from zerofit.job.settings import decide
from zerofit.job.technique import Conflict, Technique
from zerofit.model import patches
from zerofit.model.experimental import flex_self_test
from zerofit.model.image_text import classes
from zerofit.model.kernels import linear_attention
from zerofit.model.kernels.linear_attention import spans

NAME = "zerofit_packed"

FP32_TOKENS = 256  # longest document that a CPU attends to in fp32: see _dtype_of_document

# Largest relative difference of packed logits in half precision that may be rounding. 80 layers in bf16 exceed 5 %;
# wrong positions and windows, which leave no gradient between documents, exceed this.
MAX_ROUNDING_ERROR = 0.3

DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # keys of config.json

MAX_HEAD_DIM = 256  # limit of FlashAttention

KERNELS = "pip install 'transformers[kernels]'"  # transformers then loads the kernel from the Hub

INSTALL = {  # flash attention: (transformers' function that checks for it, install command)
    "flash_attention_2": ("is_flash_attn_2_available", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": ("is_flash_attn_3_available", KERNELS),
    "flash_attention_4": ("is_flash_attn_4_available", KERNELS),
}


def is_flash(name: str) -> bool:
    return name.startswith("flash_attention") or "flash-attn" in name  # the latter: kernels-community/flash-attn2


def avoid_wrong_kernels(settings=None) -> None:
    """Disable cuDNN's sdpa kernels, which compute NaN or wrong numbers with torch 2.11 and later.

    sdpa prefers them on H100, H200 and B200. They fail in the backward with a mask and a length of 64 more than a
    multiple of 128 (pytorch issue 196678), in the forward with fewer than 8 key heads on B200 (issue 193893), and with
    a query of one token (cudnn-frontend issue 1072). tests/gpu/test_attention.py runs these cases on a GPU and fails
    with the first release that fixes them.
    Called before every model is loaded: recipe.start_processes, model/load.load_model, export/source.load.
    Args: settings: a recipe's settings, to add a decision; None: add none.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if settings is not None and not settings.use_cpu:
        settings.decisions.append(
            "sdpa without cuDNN's kernels, which are wrong since torch 2.11 (pytorch issue 196678)"
        )


def hold_no_scores(settings) -> None:
    """Keep transformers' "sdpa" from materializing scores on GPUs without FlashAttention: before Ampere, or in fp32."""
    has_flash = settings.compute_dtype != "fp32" and hardware.is_ampere_or_later(settings.planned_gpu)
    if not settings.use_cpu and not has_flash:
        AttentionInterface.register("sdpa", sdpa_without_scores)


def check_available(name: str, use_cpu: bool) -> None:
    """Check that this node can train with the attention implementation `name`.

    Raises: UserError for flex or flash attention without a GPU, or flash attention without its package.
    """
    if use_cpu and name == "flex_attention":
        raise UserError("--attn_implementation flex_attention: torch has no backward for it on a CPU; use sdpa.")
    if use_cpu and is_flash(name):
        raise UserError(f"--attn_implementation {name}: needs a GPU; use sdpa.")
    check, install = INSTALL.get(name, (None, KERNELS))
    if is_flash(name) and not (available.is_kernels_available() or (check and getattr(available, check)())):
        raise UserError(f"--attn_implementation {name}: its package is not installed: {install}; or use sdpa.")


def resolve(settings) -> None:
    """Decide --padding_free and the attention that keeps the documents of a row apart.

    Raises: UserError for an unavailable attention implementation, or one that would mix packed documents.
    """
    attn = settings.attn_implementation
    check_available(attn, settings.use_cpu)
    keeps_apart = attn in ("sdpa", "flex_attention") or is_flash(attn)
    if (settings.packing or settings.padding_free is True) and not keeps_apart:
        flag = "--packing" if settings.packing else "--padding_free true"
        raise UserError(
            f"{flag} with --attn_implementation {attn}: documents in one row would attend to each other; use sdpa, "
            "flex_attention or flash_attention_2."
        )
    if settings.padding_free == "auto":
        if keeps_apart:
            decide(settings, "padding_free", True, f"{attn} keeps the documents of a row apart")
        else:
            decide(settings, "padding_free", False)
    if settings.padding_free and attn == "sdpa":
        decide(settings, "attn_implementation", NAME, "with plain sdpa the documents of a row attend to each other")


def resolve_for_model(settings, config) -> None:
    """Choose, validate and register the attention implementation from config.json, before loading weights.

    Args: config: the model's; settings: padding_free is turned off in them if documents cannot be kept apart.
    Raises: UserError for --packing in that case, and for dropout that the implementation would ignore.
    """
    _use_flex_without_sdpa(settings, config)
    chosen = settings.attn_implementation
    key, dropout = _dropout(config)
    # flash_attention_3 and 4 would silently train without dropout, flex_attention fails in the first step.
    if dropout and (chosen == "flex_attention" or (is_flash(chosen) and "2" not in chosen)):
        raise UserError(
            f"--attn_implementation {chosen} does not support dropout, and the model's config.json has {key} "
            f"{dropout}; use sdpa, or set {key} to 0 in config.json."
        )
    packed = settings.padding_free
    why = cannot_pack(config, chosen, settings.max_length) if packed else None
    if why and settings.packing:
        raise UserError(f"--packing: {why}; train without --packing.")
    if why:
        decide(settings, "padding_free", False, why)
        if chosen == NAME:
            decide(settings, "attn_implementation", "sdpa", "batches are padded")
    elif packed and chosen == NAME:
        add_loop_decision(settings, config)
    _use_eager_without_sdpa(settings, config)
    if settings.attn_implementation == NAME:
        register()


def _dropout(config) -> tuple[str | None, float]:
    """Return the key in config.json and the value of the attention's dropout."""
    text = config.get_text_config()
    return next(((key, getattr(text, key)) for key in DROPOUT_KEYS if getattr(text, key, 0)), (None, 0))


def add_loop_decision(settings, config) -> None:
    """Add a decision if a GPU cannot use the varlen kernel and loops over documents."""
    why, where = why_one_by_one(settings, config), ""
    sizes = head_dims(config.get_text_config())
    if not settings.use_cpu and not why and not all(map(varlen_takes, sizes)):
        why = f"head_dim {max(sizes)}: the varlen kernel supports multiples of 8 up to {MAX_HEAD_DIM}"
        where = " in these layers"
    if why:
        settings.decisions.append(f"{why}; attention{where} loops over documents, which is slower")


def why_one_by_one(settings, config) -> str | None:
    """Return why no layer can use the varlen kernel on the job's GPU; None if a layer can, or without a GPU."""
    if settings.use_cpu or not (settings.attn_implementation == NAME or settings.sp_size > 1):
        return None
    key, dropout = _dropout(config)
    if not hardware.is_ampere_or_later(settings.planned_gpu):
        return "the varlen kernel needs an Ampere GPU or newer"
    if settings.compute_dtype == "fp32":
        return "fp32: the varlen kernel supports bf16 and fp16 only"
    return f"{key} {dropout}: the varlen kernel does not support dropout" if dropout else None


def varlen_takes(head_dim: int) -> bool:
    return head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0


def head_dims(text) -> set[int]:
    """Return the head dimensions of the queries in all layers."""
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    return {size for layer in layers if (size := _head_dim(layer))}


def _head_dim(text) -> int | None:
    if latent := getattr(text, "qk_nope_head_dim", None):
        return latent + text.qk_rope_head_dim
    sizes = [getattr(text, name, None) for name in ("head_dim", "hidden_size", "num_attention_heads")]
    size, hidden, heads = (size if isinstance(size, int) else 0 for size in sizes)  # a list has an entry for each layer
    return size or (hidden // heads if heads else None) or None


def has_sdpa(cls, config) -> bool:
    """Return whether a class supports sdpa with this configuration; sdpa has neither a soft cap nor sinks.

    The Gemma-2 class of transformers 5.17 claims to support sdpa, but ignores its soft cap.
    """
    return bool(cls._supports_sdpa) and not getattr(config.get_text_config(), "attn_logit_softcapping", None)


def has_only_flex(config) -> bool:
    """Return whether a model supports flex_attention but not sdpa, as those with a soft cap or sinks do."""
    cls = classes.text_class(config)
    return cls is not None and not has_sdpa(cls, config) and bool(cls._supports_flex_attn)


def why_not_flex(settings, config) -> str | None:
    """Return why this run cannot use flex_attention, even after a passed self-test; None if it can."""
    key, dropout = _dropout(config)
    split = [f"--{way.flag} splits its rows" for way, _ in parallel_dims.active(settings.values)]
    adapter = settings.values.get("adapter")
    reasons = {
        "Triton has no kernels for GPUs before Ampere": not hardware.is_ampere_or_later(settings.planned_gpu),
        f"{key} {dropout}: flex_attention does not support dropout": dropout,
        "".join(split[:1]): split,
        f"--adapter {adapter} lengthens the rows": adapter in ("prompt_tuning", "prefix_tuning"),
        "the self-test covers text models only": classes.has_towers(config),
        "--compile_layers": settings.values.get("compile_layers"),
        "--torch_compile": settings.torch_compile,
        "--full_determinism": settings.full_determinism,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _use_flex_without_sdpa(settings, config) -> None:
    """Choose flex_attention for a model without sdpa if it passed its self-test in an earlier start on this GPU."""
    is_open = settings.attn_implementation in ("sdpa", NAME) and "attn_implementation" not in settings.explicit
    if settings.use_cpu or not is_open or not has_only_flex(config) or why_not_flex(settings, config):
        return
    if flex_self_test.has_passed(settings, config):
        why = f"{classes.text_class(config).__name__} does not support sdpa; it passed its self-test on this GPU"
        decide(settings, "attn_implementation", flex_self_test.NAME, f"{why} (off: --attn_implementation eager)")


def _use_eager_without_sdpa(settings, config) -> None:
    """Choose eager for models without sdpa, until flex_attention passes its self-test when the ranks start.

    Raises: UserError for an explicit --attn_implementation sdpa.
    """
    cls = classes.text_class(config)
    if settings.attn_implementation != "sdpa" or cls is None or has_sdpa(cls, config):
        return
    if "attn_implementation" in settings.explicit:
        raise UserError(f"--attn_implementation sdpa: {cls.__name__} does not support it; use eager.")
    why = f"{cls.__name__} does not support sdpa"
    if has_only_flex(config) and not settings.use_cpu:
        if why_not := why_not_flex(settings, config):
            why += f"; flex_attention, which needs no memory for S x S scores, is not possible: {why_not}"
        else:
            why += "; flex_attention, which needs no memory for S x S scores, replaces it if it passes a self-test"
    decide(settings, "attn_implementation", "eager", why)


@contextlib.contextmanager
def for_generation(settings, model):
    """Context in which a model with flex_attention generates by another one, as flex would compile every length."""
    if settings.attn_implementation != flex_self_test.NAME:
        yield
        return
    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    owner.set_attn_implementation("sdpa" if has_sdpa(owner, owner.config) else "eager")
    try:
        yield
    finally:
        owner.set_attn_implementation(flex_self_test.NAME)


def cannot_pack(config, chosen: str, max_length: int) -> str | None:
    """Return why this architecture cannot train on packed documents; None if no reason is known.

    The check on the loaded model uses short documents, so it misses errors of a longer sliding window.
    """
    text = config.get_text_config()
    if getattr(text, "attention_chunk_size", None):  # Llama-4
        return "its attention counts chunks from the start of a row, not of a document"
    cls = classes.text_class(config)
    if why := linear_attention.mixes_documents(config):
        return why
    if chosen != NAME or cls is None:  # remote code is left to the check on the loaded model
        return None
    # Models with a soft cap or sinks do not support sdpa (Gemma-2, gpt-oss); Mamba, BLOOM, GPT-J and others do not use
    # the attention interface. Hybrids use it, though the flag of most is off (Qwen3.5, Falcon-H1).
    has_interface = cls._supports_attention_backend or linear_attention.reads_documents(config)
    if not (has_sdpa(cls, config) and has_interface):
        flex = ", only with --attn_implementation flex_attention on a GPU" if cls._supports_flex_attn else ""
        return f"{cls.__name__} cannot keep documents of one row apart with sdpa{flex}"
    # Other models do not pass sliding_window= to the attention function, so packed_attention cannot apply the window.
    window = getattr(text, "sliding_window", None) or max_length
    if window < max_length and "sliding_window=" not in inspect.getsource(sys.modules[cls.__module__]):
        return f"{cls.__name__} applies its window of {window} tokens in the mask only (--max_length {max_length})"
    return None


def packed_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, documents=None, **kwargs):
    """Compute causal attention within each document.

    Args:
        query: (1, heads, tokens, head_dim); key, value: (1, kv_heads, tokens, head_dim); value's head_dim may be
            smaller (multi-head latent attention).
        kwargs: cu_seq_lens_q, int32 (documents + 1), the documents' boundaries on the token axis, and max_length_q;
            without them transformers' sdpa is called. sliding_window as the model sets it.
        documents: replaces `spans` in a simulation, whose boundaries do not have values.
    Returns: (1, tokens, heads, head_dim) and None, as transformers' attention functions do.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("sdpa supports no soft cap or sinks; use --attn_implementation eager or flex_attention")
    bounds = kwargs.get("cu_seq_lens_q")
    window = kwargs.get("sliding_window") or 0
    if bounds is None:
        if attention_mask is None and query.shape[2] == key.shape[2] > window > 0:
            attention_mask = _window_mask(query.shape[2], window, query.device)
        return sdpa_without_scores(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    dtype = autocast_dtype(value)
    # The varlen kernel does not support other dtypes, dropout, wider heads or earlier GPUs.
    is_supported = dtype in (torch.float16, torch.bfloat16) and not dropout and varlen_takes(query.shape[-1])
    if query.is_cuda and is_supported and _is_ampere_or_later(query.device):
        rounded = in_autocast_dtype(query, key, value)
        return varlen(*rounded, bounds, int(kwargs["max_length_q"]), window, scaling), None
    lengths = [end - start for start, end in (documents or spans)(bounds)]
    if query.is_cuda:
        key, value = _in_all_heads(query, key, value)
    parts = []
    with torch.autocast(query.device.type, enabled=False):  # sdpa would cast to the dtype of autocast
        # The gradient of a slice by index would have the size of the full row.
        for document in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True):
            tokens = document[0].shape[2]
            document_dtype = _dtype_of_document(query.device, dtype, tokens)
            q, k, v = (x.to(document_dtype) for x in document)
            mask = _window_mask(tokens, window, query.device) if window and tokens > window else None
            attended = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
            parts.append(attended.to(dtype))
    out = torch.cat(parts, dim=2)
    return out.transpose(1, 2).contiguous(), None


def sdpa_without_scores(module, query, key, value, attention_mask, *args, **kwargs):
    """Call transformers' sdpa so that torch picks no kernel that materializes scores."""
    is_half = autocast_dtype(value) in (torch.float16, torch.bfloat16)
    if query.is_cuda and attention_mask is None and not (is_half and _is_ampere_or_later(query.device)):
        key, value = _in_all_heads(query, key, value)  # with a mask, transformers repeats them
    return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)


def _in_all_heads(query, key, value) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value repeated for each head of the query.

    Of torch 2.13's GPU kernels only FlashAttention and the one that materializes scores support grouped heads.
    """
    groups = query.shape[1] // key.shape[1]
    return tuple(x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (key, value))


@functools.cache
def _is_ampere_or_later(device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _dtype_of_document(device, dtype, tokens: int) -> torch.dtype:
    """Return the dtype for a document's attention: fp32 for a short bf16 document on an x86 CPU without AMX.

    torch 2.13's kernel takes 1.1 to 2.7 times as long in bf16 there, and rounds more; it materializes no scores in
    either dtype. If the CPU emulates bf16, long documents take 4.7 times as long too (1,024 tokens).
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return dtype
    cpu = torch.cpu.get_capabilities()
    if not cpu.get("avx2") or cpu.get("amx_bf16"):
        return dtype
    return torch.float32 if tokens <= FP32_TOKENS or not cpu.get("avx512_bf16") else dtype


def autocast_dtype(value: torch.Tensor) -> torch.dtype:
    """Return the dtype of autocast on the device of `value`, or without autocast the dtype of `value`."""
    device = value.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype


def in_autocast_dtype(query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value in the dtype of autocast, or without autocast in the dtype of `value`.

    Under autocast rotary embeddings leave q and k in fp32; plain sdpa casts them, the kernels here do not.
    """
    dtype = autocast_dtype(value)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _window_mask(tokens, window, device):
    """Return a bool mask (tokens, tokens): each token attends to itself and the window - 1 before it."""
    position = torch.arange(tokens, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def varlen(query, key, value, bounds, longest, window, scaling):
    from torch.nn.attention.varlen import varlen_attn

    size = value.shape[-1]
    if missing := query.shape[-1] - size:  # the kernel needs equal head_dims; F.pad would copy even if it pads by 0
        value = torch.nn.functional.pad(value, (0, missing))
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch before 2.12
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        groups = 1
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (tokens, heads, head_dim)
    extra = {"enable_gqa": True} if groups > 1 else {}
    out = varlen_attn(
        q, k, v, bounds, bounds, longest, longest, scale=scaling,
        window_size=(window - 1 if window else -1, 0), **extra,
    )  # fmt: skip
    return out[None, ..., :size]


def mask(*args, attention_mask=None, **kwargs):
    """Return None for packed documents, and sdpa's mask for padded batches (evaluation, generation)."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def register(documents=None) -> str:
    """Register packed_attention and its mask under NAME with transformers; return NAME.

    Args: documents: see packed_attention.
    """
    linear_attention.read_boundaries_by(documents or spans)
    AttentionInterface.register(NAME, functools.partial(packed_attention, documents=documents))
    AttentionMaskInterface.register(NAME, mask)
    patches.skip_document_search(NAME)
    return NAME


def _truncated(documents, count, longest):
    return [{"input_ids": documents[i]["input_ids"][:longest], "labels": documents[i]["labels"][:longest]}
            for i in range(min(count, len(documents)))]  # fmt: skip


@torch.no_grad()
def packed_logit_error(
    model, documents, pad_token_id: int, args, seq_idx: bool = False, count: int = 3, longest: int = 128
) -> float:
    """Return the largest |logit difference| between packed and single documents, over the largest logit.

    It detects wrong positions and windows as well as mixed documents, if they exceed the rounding of the precision.
    Collective under ZeRO-3: every rank calls it with the same documents.
    Args:
        documents: rows with input_ids and labels; the first `count` are used, truncated to `longest` tokens.
        seq_idx: see PackedCollator.
    """
    rows, training = _truncated(documents, count, longest), model.training
    model.eval()

    def logits(batch):
        return model(**send_to_device(batch, args.device), use_cache=False).logits[0].float()

    packed = logits(PackedCollator(seq_idx=seq_idx)(rows))
    single = torch.cat([logits(Collator(pad_token_id)([row]))[: len(row["input_ids"])] for row in rows])
    model.train(training)
    return ((packed - single).abs().max() / single.abs().max()).item()


def cross_document_gradient(model, documents, args, seq_idx: bool = False, count: int = 3, longest: int = 128) -> float:
    """Return how much the loss of the middle document depends on the embeddings of the others.

    It is the ratio of the largest |gradient| for their embeddings to the largest for its own: exactly 0 in every
    precision if documents are isolated. Runs in training mode (dropout, gradient checkpointing) and leaves no gradient
    in a parameter.
    Args: model: not wrapped by DDP or DeepSpeed, whose backward would start; others: as in packed_logit_error.
    """
    rows, training, embeddings = _truncated(documents, count, longest), model.training, []
    lengths = [len(row["input_ids"]) for row in rows]
    start, end = sum(lengths[: len(rows) // 2]), sum(lengths[: len(rows) // 2 + 1])

    def cut(module, inputs, output):
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1]

    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)  # does not support autograd.grad
    model.train(not reentrant)
    hook = model.get_input_embeddings().register_forward_hook(cut)
    try:
        # Without `devices` fork_rng initializes every GPU of the node and warns.
        devices = [torch.cuda.current_device()] if args.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.enable_grad():
            batch = send_to_device(PackedCollator(seq_idx=seq_idx)(rows), args.device)
            logits = model(**batch, use_cache=False).logits[0, start:end].float()
            loss = torch.nn.functional.cross_entropy(logits, batch["input_ids"][0, start:end], reduction="sum")
            (gradient,) = torch.autograd.grad(loss, embeddings[0])
    finally:
        hook.remove()
        model.train(training)
    sizes = gradient[0].float().norm(dim=-1)
    own_size = sizes[start:end].max().item()
    sizes[start:end] = 0
    leak = sizes.max().item()
    return leak / own_size if own_size else leak


TECHNIQUES = (
    Technique(
        name="packing",
        flag="packing",
        example="--packing true",
        conflicts=(Conflict("padding_free", (False,), "packed sequences are not padded"),),
    ),
    Technique(
        name="padding-free batches",
        flag="padding_free",
        values=(True,),
        example="--padding_free true",
        resolve=resolve,
        resolve_for_model=resolve_for_model,
    ),
)
