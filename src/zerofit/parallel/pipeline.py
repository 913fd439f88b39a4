"""Check the arguments and the model of a pipeline (--pp_size, recipes/pipeline.py).

Each stage holds some of the layers, on one rank or on several with different rows; micro batches pass through the
stages in order. pipeline_layers.py cuts the model, train/pipeline_trainer.py trains it.
"""

from zerofit.base.errors import UserError
from zerofit.job.settings import decide
from zerofit.job.technique import AllBut, Conflict
from zerofit.model import attention
from zerofit.parallel.interface import Parallel

# Models tested against one process: embedding, equal dense layers, norm, head.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# Conflicts of --pp_size above 1.
CONFLICTS = (
    Conflict(
        "zero",
        (0,),
        "DeepSpeed's engine without ZeRO applies steps with non-finite gradients, and lacks gradient norms and fp32 "
        "weights for bf16",
        "use --zero 1 (without sharding for one data rank)",
    ),
    Conflict("zero", (2,), "DeepSpeed's pipeline keeps the full gradients of its stage on each rank", "use --zero 1"),
    Conflict(
        "zero", (3,), "each rank of a stage holds complete layers", "use --zero 1, or recipes/sft.py with --zero 3"
    ),
    Conflict("sp_size", None, "their groups of ranks cannot be combined", "use one of the two"),
    Conflict("tp_size", None, "their groups of ranks cannot be combined", "use one of the two"),
    Conflict("offload", ("optimizer", "all"), "DeepSpeed's pipeline does not support it", "leave it out"),
    Conflict(
        "optim", ("sophia", "muon"), "it needs the full model or full matrices on a rank", "use adamw_torch_fused"
    ),
    Conflict("random_init", (True,), "the weights would depend on the cut", "use a model with weights"),
    Conflict("new_tokens", None, "stages read their weights from files, which lack rows for them", "leave it out"),
    Conflict("memory_report", (True,), "it cannot record DeepSpeed's schedule", "leave it out"),
    Conflict("search_batch_size", (True,), "its trial steps need the full model on a rank", "set a micro batch"),
    Conflict("canary", (True,), "its trial steps need the full model on a rank", "leave it out"),
    Conflict(
        "num_samples",
        AllBut(0),
        "generation needs the full model on a rank",
        "use --num_samples 0 (and later `zerofit chat`)",
    ),
    Conflict("push_to_hub", (True,), "each stage writes its own files", "upload it with `hf upload`"),
    Conflict("label_smoothing_factor", None, "the last stage computes the plain loss", "leave it out"),
    Conflict("neftune_noise_alpha", None, "its hook needs the embedding, which only one stage has", "leave it out"),
    Conflict(
        "include_num_input_tokens_seen",
        (True, "all", "non_padding"),
        "it would count each row once per stage",
        "leave it out (metrics.jsonl has tokens_per_second)",
    ),
    Conflict("average_tokens_across_devices", (False,), "the loss is always computed over all ranks", "leave it out"),
    Conflict("torch_empty_cache_steps", None, "DeepSpeed runs each step as one schedule", "leave it out"),
    Conflict(
        "node_local_storage",
        (True,),
        "DeepSpeed then writes the states of each node's first rank only, and checkpoints could not be resumed",
        "leave it out",
    ),
    Conflict("use_liger_kernel", (True,), "transformers applies its kernels to full models only", "leave it out"),
)


def bubble(stages: int, micro_batches: int) -> float:
    """Return the fraction of a step in which a stage waits while the pipeline fills and drains."""
    return (stages - 1) / (micro_batches + stages - 1)


def check_recipe(settings) -> None:
    """Check that recipes/pipeline.py, and only this recipe, has stages. Raises: UserError."""
    size = settings.pp_size
    if not settings.recipe.stages:
        if size > 1:
            raise UserError(
                f"--pp_size {size} with recipes/{settings.recipe}.py: only recipes/pipeline.py splits the model into "
                "stages (full fine-tuning); use it, or leave --pp_size out."
            )
        return
    if size == 1:
        raise UserError(
            f"recipes/pipeline.py with --pp_size 1 on {settings.world_size} rank{'s' * (settings.world_size > 1)}: a "
            "pipeline has at least 2 stages; start more ranks (make pipeline PP=2), or use recipes/sft.py."
        )


def resolve(settings) -> None:
    """Check the micro batches, and choose the attention.

    Raises: UserError for unsupported arguments, or fewer micro batches than stages.
    """
    size, micro_batches = settings.pp_size, settings.gradient_accumulation_steps
    if size == 1:
        return
    if micro_batches < size:
        raise UserError(
            f"--pp_size {size} with --gradient_accumulation_steps {micro_batches}: stages would be idle for most of a "
            f"step; use {size} or more, better {4 * size} (a smaller --per_device_train_batch_size)."
        )
    settings.decisions.append(
        f"pp_size {size}: with {micro_batches} micro batches per step, each stage is idle for (P - 1) / (M + P - 1) = "
        f"{bubble(size, micro_batches):.0%} of the step (the bubble)"
    )
    if settings.attn_implementation not in ("sdpa", attention.NAME):
        raise UserError(
            f"--pp_size {size} with --attn_implementation {settings.attn_implementation}: stages do not pass on "
            "attention masks, and only sdpa is tested without; use sdpa."
        )
    # It reads documents from their bounds, and a layer's window from its argument.
    decide(settings, "attn_implementation", attention.NAME, "stages do not pass on attention masks")


def resolve_for_model(settings, config) -> None:
    """Check that the model is supported and has a layer for each stage, before loading weights.

    Args: config: the model's configuration.
    Raises: UserError.
    """
    size = settings.pp_size
    if size == 1:
        return
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if config.model_type not in MODEL_TYPES:
        raise UserError(
            f"--pp_size {size}: models of type {config.model_type} are unsupported (only {', '.join(MODEL_TYPES)}); "
            "use recipes/sft.py with --zero 3."
        )
    if why := attention.cannot_pack(config, attention.NAME, settings.max_length):
        raise UserError(f"--pp_size {size}: {why}; use recipes/sft.py with --zero 3.")
    if settings.pure_bf16 and config.tie_word_embeddings:
        raise UserError(
            f"--pp_size {size} with --pure_bf16 true: head and embedding are tied, and their copies on the first and "
            "last stage would be rounded differently; leave it out, or use recipes/sft.py."
        )
    if size > layers:
        raise UserError(f"--pp_size {size}: the model has only {layers} layers; use a smaller size.")


PARALLEL = Parallel(
    name="pipeline",
    flag="pp_size",
    example="--pp_size 2",
    splits="layers",
    neighbors=False,  # stages exchange the least data
    default_size=lambda settings: settings.world_size if settings.recipe.stages else 1,
    conflicts=CONFLICTS,
    check_recipe=check_recipe,
    resolve=resolve,
    resolve_for_model=resolve_for_model,
)
