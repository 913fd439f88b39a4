"""Attention for packed sequences: each document attends to itself alone.

transformers' `sdpa` needs a dense S x S mask for that and, with a padding mask present, builds none at all: documents
then read each other without an error. Registered here under the name "zerofit_packed" are the varlen kernel of
torch.nn.attention on CUDA and a loop over documents on the CPU. Without document boundaries (evaluation,
generation) it is plain sdpa.
"""

import inspect

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "zerofit_packed"


def packed_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Causal attention within documents.

    Args:
        query: (1, heads, tokens, head_dim); key, value: (1, kv_heads, tokens, head_dim).
        kwargs: cu_seq_lens_q, int32 (documents + 1), the documents' boundaries on the token axis, and max_length_q;
            without them the call goes to transformers' sdpa. sliding_window as the model sets it.
    Returns: (1, tokens, heads, head_dim) and None, as transformers' attention functions do.
    """
    bounds = kwargs.get("cu_seq_lens_q")
    window = kwargs.get("sliding_window") or 0
    if bounds is None:
        if attention_mask is None and query.shape[2] == key.shape[2] > window > 0:
            attention_mask = _window_mask(query.shape[2], window, query.device)
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("packed attention has no soft cap and no sinks; use --attn_implementation flash_attention_2")
    autocast = torch.is_autocast_enabled(query.device.type)
    # Under autocast rotary embeddings leave q and k in fp32; plain sdpa casts them, the kernels here would not.
    dtype = torch.get_autocast_dtype(query.device.type) if autocast else value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.is_cuda and dtype in (torch.float16, torch.bfloat16):  # the varlen kernel knows no other type
        return _varlen(query, key, value, bounds, int(kwargs["max_length_q"]), window, scaling, dropout), None
    out = torch.empty_like(query)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        mask = None
        if window and end - start > window:
            mask = _window_mask(end - start, window, query.device)
        out[:, :, start:end] = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, start:end], key[:, :, start:end], value[:, :, start:end], attn_mask=mask,
            dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=True,
        )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _window_mask(tokens, window, device):
    """(tokens, tokens) bool: each token sees itself and the window - 1 tokens before it."""
    position = torch.arange(tokens, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _varlen(query, key, value, bounds, longest, window, scaling, dropout):
    from torch.nn.attention.varlen import varlen_attn

    if dropout:
        raise ValueError("packed attention has no dropout; set attention_dropout to 0 or turn --packing off")
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
    return out[None]


def _mask(*args, attention_mask=None, **kwargs):
    """No mask where boundaries do the work; padded batches (evaluation, generation) get sdpa's."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def register() -> str:
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, _mask)
    return NAME


@torch.no_grad()
def logits_apart(model, documents, pad_token_id: int, args, count: int = 3, longest: int = 128) -> float:
    """Largest |logit difference| between documents in one row and one by one, relative to the largest logit.

    Args: documents: rows with input_ids and labels, the first `count` are taken, cut at `longest` tokens. Collective
        under ZeRO-3: every rank calls it with the same documents.
    """
    from . import data

    rows = [{"input_ids": documents[i]["input_ids"][:longest], "labels": documents[i]["labels"][:longest]}
            for i in range(min(count, len(documents)))]  # fmt: skip
    training = model.training
    model.eval()

    def logits(batch):
        moved = {k: v.to(args.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        return model(**moved, use_cache=False).logits

    together = logits(data.PackedCollator()(rows))[0].float()
    alone = [logits(data.Collator(pad_token_id)([row]))[0, : len(row["input_ids"])].float() for row in rows]
    model.train(training)
    alone = torch.cat(alone)
    return ((together - alone).abs().max() / alone.abs().max()).item()
