"""Split the matrices of each layer over a group of ranks (--tp_size: DeepSpeed's AutoTP, full fine-tuning).

All ranks of a group compute the same rows, and each holds 1/tp_size of the matrices in transformers' tensor parallel
plan of the model; each layer sums its outputs over the group twice. ZeRO shards a rank's part over the ranks with other
rows. DeepSpeed splits the model at the start of training, and gathers full weights for a save.
"""

from dataclasses import replace

from zerofit.base.errors import UserError
from zerofit.job.technique import AllBut, Conflict
from zerofit.model import experts
from zerofit.parallel.interface import Parallel

# Conflicts of --tp_size above 1.
CONFLICTS = (
    Conflict(
        "zero",
        (0,),
        "DeepSpeed's engine without ZeRO applies steps with non-finite gradients, and lacks gradient norms and fp32 "
        "weights for bf16",
        "use --zero 1 (without sharding for one data rank)",
    ),
    Conflict("zero", (3,), "transformers cannot load a model that both split", "use --zero 2"),
    Conflict("adapter", None, "DeepSpeed would replace the layers that peft wraps", "use recipes/sft.py"),
    Conflict("sp_size", None, "their groups of ranks cannot be combined", "use one of the two"),
    Conflict("optim", ("sophia", "muon"), "it builds groups of full matrices", "use adamw_torch_fused"),
    Conflict("pure_bf16", (True,), "its random rounding would differ within a group", "leave it out"),
    Conflict("fp16", (True,), "the ranks of a group could skip different steps", "use --bf16 true"),
    Conflict("fused_loss", (True,), "DeepSpeed replaces the head, which it needs", "use --fused_loss false"),
    Conflict("tiled_mlp", AllBut(1), "DeepSpeed replaces the layers that it tiles", "use --tiled_mlp 1"),
    Conflict("neftune_noise_alpha", None, "its noise would differ within a group", "leave it out"),
    Conflict(
        "include_num_input_tokens_seen",
        (True, "all", "non_padding"),
        "it would count each row once per rank of its group",
        "leave it out (metrics.jsonl has tokens_per_second)",
    ),
    Conflict(
        "node_local_storage",
        (True,),
        "DeepSpeed then writes the first rank's matrices only, and checkpoints could not be resumed",
        "leave it out",
    ),
    Conflict("torch_compile", (True,), "DeepSpeed's split layers cannot be traced", "leave it out"),
    Conflict("use_liger_kernel", (True,), "DeepSpeed replaces the layers that it patches", "leave it out"),
)

# DeepSpeed's ways to split a layer; each is tested against one rank.
PLANS = ("colwise", "colwise_gather_output", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise")


def check_recipe(settings) -> None:
    """Check the recipe. Raises: UserError if it does not train full weights."""
    size = settings.tp_size
    if size > 1 and (settings.trains_adapter or settings.recipe.stages or settings.objective.name != "causal_lm"):
        raise UserError(
            f"--tp_size {size} with recipes/{settings.recipe}.py: DeepSpeed splits the matrices of full fine-tuning "
            "only; use recipes/sft.py."
        )


def resolve_for_model(settings, config) -> None:
    """Check that DeepSpeed can split this model evenly with equal results, before loading weights.

    Args: config: the model's configuration.
    Raises: UserError.
    """
    size, text = settings.tp_size, config.get_text_config()
    if size == 1:
        return
    why, plan = "", getattr(text, "base_model_tp_plan", None)
    dropout = [name for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
               if getattr(text, name, 0)]  # fmt: skip
    if experts.count(config):
        why = "it is a mixture of experts, and DeepSpeed cannot split fused experts of transformers"
    elif not plan:
        why = "transformers lacks a tensor parallel plan for it"
    elif others := sorted({str(way) for way in plan.values()} - set(PLANS)):
        why = f"its tensor parallel plan has {others[0]} layers, which DeepSpeed cannot split"
    elif dropout:
        why = f"its {dropout[0]} of {getattr(text, dropout[0])} would use other random numbers on each rank of a group"
    if why:
        raise UserError(f"--tp_size {size}: {why}; train this model without it.")
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    for name in names:
        if (getattr(text, name, None) or size) % size:
            raise UserError(
                f"--tp_size {size}: must divide the model's {name} of {getattr(text, name)}; use a smaller size."
            )


def _share(shape, size: int):
    """Return the shape of a rank's part, with the full embedding."""
    split = (shape.trainable - shape.embedding) // size + shape.embedding
    return replace(shape, trainable=split, largest=max(shape.largest // size, shape.embedding))


def _sent(shape, tokens: int, size: int) -> tuple[float, float]:
    """Return calls and bytes of the all-reduces of a layer's attention and MLP outputs."""
    return 2, 2 * (2 * 2.0 * tokens * shape.hidden) * (size - 1) / size


PARALLEL = Parallel(
    name="tensor parallelism",
    flag="tp_size",
    example="--tp_size 2",
    splits="matrices",
    groups="split matrices",
    searched=(2, 4, 8, 16),
    overlay="tensor_parallel.json",
    sections=lambda size: {"tensor_parallel": {"autotp_size": size}},
    conflicts=CONFLICTS,
    share=_share,
    sent=_sent,
    sums=True,
    check_recipe=check_recipe,
    resolve_for_model=resolve_for_model,
)
