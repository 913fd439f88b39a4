"""Split the tokens of each row over a group of ranks (--sp_size, Ulysses: arXiv 2309.14509).

All ranks of a group load the same rows, and each computes the layers for its slice of the tokens. Around the attention
an all-to-all exchanges slices of tokens for slices of heads, so the kernel sees complete documents; the backward is the
opposite exchange. A rank's loss is the sum over its slice / supervised tokens of the step x all ranks. DDP and ZeRO
average gradients over all ranks, which yields the gradient of the step, so they work unchanged, and states are sharded
over all ranks. (DeepSpeed's Ulysses uses the loss of the group on each rank, which scales the gradients by
sp_size at stages 1 and 2: DeepSpeed issues 5248 and 7837.)
"""

import contextlib
import functools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.job.settings import decide
from zerofit.job.technique import Conflict
from zerofit.model import attention, patches
from zerofit.model.kernels import linear_attention
from zerofit.parallel.interface import Parallel

NAME = "zerofit_sequence_parallel"

# Conflicts of --sp_size above 1.
CONFLICTS = (
    Conflict(
        "optim", ("sophia",), "its estimate samples labels from the logits of complete rows", "use another optimizer"
    ),
    Conflict(
        "adapter",
        ("prompt_tuning", "prefix_tuning", "adaption_prompt"),
        "its prompt would precede each slice instead of the row",
        "use --adapter lora",
    ),
    Conflict("label_smoothing_factor", None, "it would shift the labels of each slice a second time", "leave it out"),
    Conflict(
        "neftune_noise_alpha",
        None,
        "its noise would be scaled by a slice's length instead of the row's",
        "leave it out",
    ),
    Conflict(
        "include_num_input_tokens_seen",
        (True, "all", "non_padding"),
        "it would count each row once per rank of its group",
        "leave it out (metrics.jsonl has tokens_per_second)",
    ),
    Conflict("torch_compile", None, "the exchange between the ranks cannot be traced", "leave it out"),
)


# --- checks ---


def resolve(settings) -> None:
    """Choose the attention of --sp_size. Raises: UserError if another attention is set."""
    size = settings.sp_size
    if size == 1:
        return
    if settings.attn_implementation not in ("sdpa", attention.NAME):
        raise UserError(
            f"--sp_size {size} with --attn_implementation {settings.attn_implementation}: only sdpa is "
            "supported; use sdpa."
        )
    if settings.deepspeed is not None and "train_batch_size" in settings.deepspeed:
        settings.deepspeed["train_batch_size"] = "auto"  # DeepSpeed counts a group's rows once per rank
    decide(settings, "attn_implementation", NAME, f"{size} ranks exchange tokens for heads around it")


def resolve_for_model(settings, config) -> None:
    """Check that the model can be computed on slices of the tokens, and register the attention.

    Args: config: the model's configuration.
    Raises: UserError.
    """
    size, text = settings.sp_size, config.get_text_config()
    if size == 1:
        return
    # RecurrentGemma has block_types in transformers 5.17.
    layers = getattr(text, "layer_types", None) or getattr(text, "block_types", None) or ()
    other_layers = set(layers) - linear_attention.ATTENTION_LAYERS
    why = attention.cannot_pack(config, attention.NAME, settings.max_length)
    if other_layers:
        why = f"its {min(other_layers)} layers need the tokens before a slice"
    elif getattr(config, "is_encoder_decoder", False):
        why = "it has an encoder"
    elif getattr(text, "output_router_logits", False):
        why = "its router loss (output_router_logits in config.json) is not a sum over tokens"
    heads = getattr(text, "num_attention_heads", None)
    if not why and not isinstance(heads, int):
        why = "its config.json lacks the number of attention heads"
    if why:
        why = why.partition(", only with --attn_implementation")[0]  # this hint does not apply here
        raise UserError(f"--sp_size {size}: {why}; train this model without it.")
    if heads % size:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise UserError(f"--sp_size {size}: must divide the model's {heads} attention heads; use one of {divisors}.")
    attention.add_loop_decision(settings, config)
    register()


def _sent(shape, tokens: int, size: int) -> tuple[float, float]:
    """Return calls and bytes of a layer's all-to-alls of q, k, v and output; a rank keeps 1/size of its slice."""
    key_heads = math.lcm(shape.kv_heads, size)  # repeated, so that all ranks have the same number
    return 4, 2.0 * tokens * 2 * shape.head_dim * (shape.heads + key_heads) * (size - 1) / size


PARALLEL = Parallel(
    name="sequence parallelism",
    flag="sp_size",
    example="--sp_size 2",
    splits="tokens",
    exchanges="its rows",
    groups="split rows",
    searched=(2, 4, 8, 16),
    fills_nodes=True,
    sent=_sent,
    conflicts=CONFLICTS,
    resolve=resolve,
    resolve_for_model=resolve_for_model,
)


# --- training ---


@dataclass
class _Row:
    """The complete rows of a group; bounds, longest: of their documents."""

    group: object
    size: int
    bounds: torch.Tensor
    longest: int


_row: _Row | None = None  # None: rows are not split (one rank, generation)


class SequenceParallel:
    """The group of this rank: `size` neighboring ranks; this rank computes slice `index`."""

    def __init__(self, settings):
        """Create the process groups. Collective."""
        self.size, self.data_ranks = settings.sp_size, settings.data_ranks
        self.shares_rows = settings.ranks_per_row > 1
        self.data_rank = settings.data_rank(distributed.rank())
        self.index = distributed.rank() % self.size
        self.group = None
        if self.size == 1:
            return
        for first in range(0, settings.world_size, self.size):
            group = dist.new_group(list(range(first, first + self.size)))
            if first // self.size == self.data_rank:
                self.group = group

    def refusal(self, why: str) -> UserError:
        """Return the error for a model that cannot be computed on slices."""
        return UserError(f"--sp_size {self.size}: {why}; train it without --sp_size.")

    def share_rows(self, loader):
        """Make ranks that share rows (in any dimension) read the same batches of accelerate's loader; return it."""
        if self.shares_rows:
            # accelerate's BatchSamplerShard, or IterableDatasetShard for a stream
            shard = loader.batch_sampler if hasattr(loader.batch_sampler, "num_processes") else loader.dataset
            shard.num_processes, shard.process_index = self.data_ranks, self.data_rank
        return loader

    @contextlib.contextmanager
    def split(self, inputs: dict):
        """Return a context in which the model computes slices of these rows; yields this rank's slice.

        The backward of recomputed layers must also run in it. Without groups it yields `inputs`.
        """
        global _row
        if self.size == 1:
            yield inputs
            return
        before, _row = _row, self._complete_row(inputs)
        try:
            yield self._slice(inputs)
        finally:
            _row = before

    def _complete_row(self, inputs: dict) -> _Row:
        rows, width = inputs["input_ids"].shape
        if (bounds := inputs.get("cu_seq_lens_q")) is not None:
            return _Row(self.group, self.size, bounds, int(inputs["max_length_q"]))
        bounds = torch.arange(0, rows * width + 1, width, dtype=torch.int32, device=inputs["input_ids"].device)
        return _Row(self.group, self.size, bounds, width)  # padding comes last and needs no mask

    def _slice(self, inputs: dict) -> dict:
        """Return this rank's tokens, their positions in the row, and labels, shifted before the split."""
        ids, labels = inputs["input_ids"], inputs["labels"]
        width, rest = divmod(ids.shape[1], self.size)
        assert not rest, f"{ids.shape[1]} tokens on {self.size} ranks: the collator pads to a multiple"
        positions = inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        part = slice(self.index * width, (self.index + 1) * width)
        targets = shifted[:, part].contiguous()
        return {
            "input_ids": ids[:, part].contiguous(),
            "position_ids": positions[:, part].contiguous(),
            "labels": targets,
            "shift_labels": targets,
        }

    @torch.no_grad()
    def logit_error(self, model, inputs: dict) -> float:
        """Return the largest |logit difference| of slices and complete rows / the largest logit. Collective."""
        training = model.training
        model.eval()
        rows = {name: value for name, value in inputs.items() if name not in ("labels", "attention_mask")}
        expected = model(**rows, use_cache=False).logits
        with self.split(inputs) as mine:
            logits = model(input_ids=mine["input_ids"], position_ids=mine["position_ids"], use_cache=False).logits
        model.train(training)
        expected = expected.chunk(self.size, 1)[self.index].float()
        return max(distributed.all_gather(((logits.float() - expected).abs().max() / expected.abs().max()).item()))


def supervised(inputs: dict, first: int = 1) -> torch.Tensor:
    """Return the number of tokens in the loss of a batch or a slice. Args: first: first position of a row."""
    targets = inputs["shift_labels"] if "shift_labels" in inputs else inputs["labels"][:, first:]
    return (targets != -100).sum()


# --- attention ---


def register(documents=None) -> None:
    """Register sequence_attention and the mask of packed attention with transformers as NAME.

    Args: documents: see attention.packed_attention.
    """
    AttentionInterface.register(NAME, functools.partial(sequence_attention, documents=documents))
    AttentionMaskInterface.register(NAME, attention.mask)
    patches.skip_document_search(NAME)


class _Exchange(torch.autograd.Function):
    """Scatter dimension `out` of a tensor over the group and gather dimension `into`; reversed in the backward."""

    @staticmethod
    def forward(ctx, x, out, into, row):
        ctx.arguments = out, into, row
        return _exchange(x, out, into, row)

    @staticmethod
    def backward(ctx, gradient):
        out, into, row = ctx.arguments
        return _exchange(gradient, into, out, row), None, None, None


def _exchange(x, out, into, row):
    sent = torch.stack(x.chunk(row.size, out))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=row.group)
    return torch.cat(received.unbind(), into)


def sequence_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Compute causal attention within each document of the complete rows; see attention.packed_attention.

    Args: query: (rows, heads, tokens of the slice, head_dim); key, value: (rows, kv_heads, ..., head_dim).
    Returns: (rows, tokens of the slice, heads, head_dim) and None.
    """
    row = _row
    if row is None:
        return attention.packed_attention(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    query, key, value = attention.in_autocast_dtype(query, key, value)
    # Each rank needs the same number of key heads, repeated if necessary; resolve_for_model checks the query heads.
    repeats = row.size // math.gcd(key.shape[1], row.size)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    rows = query.shape[0]
    # (rows, heads / size, tokens, head_dim) -> (1, heads / size, rows x tokens, head_dim)
    joined = [_Exchange.apply(x, 1, 2, row).transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value)]
    kwargs |= {"cu_seq_lens_q": row.bounds, "max_length_q": row.longest}
    out, _ = attention.packed_attention(module, *joined, None, dropout, scaling, **kwargs)
    return _Exchange.apply(out.unflatten(1, (rows, -1))[0], 1, 2, row), None
