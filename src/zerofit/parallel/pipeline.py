"""Check what a pipeline (--pp_size, recipes/pipeline.py) can train: arguments, and models by their config.json.

Each stage is a rank, or several with different rows, and holds some of the layers; micro batches pass through the
stages one after the other. The cut is in pipeline_layers.py, the training in train/pipeline_trainer.py.
"""

from zerofit.base.errors import UserError
from zerofit.job.settings import decide
from zerofit.job.technique import AllBut, Conflict
from zerofit.model import attention
from zerofit.parallel.interface import Parallel

# Models whose layers were compared with one process: embedding, equal dense layers, norm, head.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# What --pp_size above 1 excludes.
CONFLICTS = (
    Conflict(
        "zero",
        (0,),
        "DeepSpeed's engine without ZeRO applies steps whose gradient is not finite, reports no norm and keeps no fp32 "
        "weights in bf16",
        "use --zero 1, which shards nothing over one data rank",
    ),
    Conflict("zero", (2,), "DeepSpeed's pipeline keeps whole gradients on each rank", "use --zero 1"),
    Conflict(
        "zero", (3,), "each rank of a stage holds its whole layers", "use --zero 1, or recipes/sft.py with --zero 3"
    ),
    Conflict("sp_size", None, "their groups of ranks cannot be combined", "use one of the two"),
    Conflict("tp_size", None, "their groups of ranks cannot be combined", "use one of the two"),
    Conflict("offload", ("optimizer", "all"), "DeepSpeed's pipeline does not support it", "leave it out"),
    Conflict(
        "optim", ("sophia", "muon"), "it needs the whole model or whole matrices on a rank", "use adamw_torch_fused"
    ),
    Conflict("random_init", (True,), "the weights would depend on the cut", "name a folder with weights"),
    Conflict("new_tokens", None, "stages read their weights from files, which have no rows for them", "leave it out"),
    Conflict("memory_report", (True,), "it does not follow DeepSpeed's schedule", "leave it out"),
    Conflict("search_batch_size", (True,), "its trial steps need the whole model on a rank", "name a micro batch"),
    Conflict("canary", (True,), "its trial steps need the whole model on a rank", "leave it out"),
    Conflict(
        "num_samples",
        AllBut(0),
        "no rank has the whole model to generate with",
        "use --num_samples 0 (`zerofit chat` later)",
    ),
    Conflict("push_to_hub", (True,), "each stage writes its own files", "upload it with `hf upload`"),
    Conflict("label_smoothing_factor", None, "the last stage computes the plain loss", "leave it out"),
    Conflict("neftune_noise_alpha", None, "its hook needs the embedding, which one stage has", "leave it out"),
    Conflict(
        "include_num_input_tokens_seen",
        (True, "all", "non_padding"),
        "it would count a row once for each stage",
        "leave it out (metrics.jsonl has tokens_per_second)",
    ),
    Conflict("average_tokens_across_devices", (False,), "the loss is that of all ranks", "leave it out"),
    Conflict("torch_empty_cache_steps", None, "a step is one schedule of DeepSpeed's", "leave it out"),
    Conflict(
        "node_local_storage",
        (True,),
        "DeepSpeed then writes the states of each node's first rank only, and no checkpoint could be resumed",
        "leave it out",
    ),
    Conflict("use_liger_kernel", (True,), "transformers applies its kernels to whole models only", "leave it out"),
)


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of a step that each stage waits while the pipeline fills and drains."""
    return (stages - 1) / (micro_batches + stages - 1)


def check_recipe(settings) -> None:
    """Check that recipes/pipeline.py, and no other recipe, has stages. Raises: UserError."""
    size = settings.pp_size
    if not settings.recipe.stages:
        if size > 1:
            raise UserError(
                f"--pp_size {size} with recipes/{settings.recipe}.py: only recipes/pipeline.py cuts the model into "
                "stages (full fine-tuning); use it, or leave --pp_size out."
            )
        return
    if size == 1:
        raise UserError(
            f"recipes/pipeline.py with --pp_size 1 on {settings.world_size} rank{'s' * (settings.world_size > 1)}: a "
            "pipeline has at least 2 stages; start more ranks (make pipeline PP=2), or use recipes/sft.py."
        )


def resolve(settings) -> None:
    """Check sections and micro batches, and choose the attention.

    Raises: UserError for what a pipeline does not take, and for fewer micro batches than stages.
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
        f"pp_size {size}: with {micro_batches} micro batches a step each stage waits (P - 1) / (M + P - 1) = "
        f"{bubble(size, micro_batches):.0%} of it (the bubble)"
    )
    if settings.attn_implementation not in ("sdpa", attention.NAME):
        raise UserError(
            f"--pp_size {size} with --attn_implementation {settings.attn_implementation}: stages pass no attention "
            "mask on, and only sdpa was compared with one process; use sdpa."
        )
    # Without a mask it knows documents by their bounds, and a layer's window by its argument.
    decide(settings, "attn_implementation", attention.NAME, "stages pass no attention mask on")


def resolve_for_model(settings, config) -> None:
    """Check that this model was compared with one process and has a layer for each stage, before loading weights.

    Args: config: of the model.
    Raises: UserError.
    """
    size = settings.pp_size
    if size == 1:
        return
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if config.model_type not in MODEL_TYPES:
        raise UserError(
            f"--pp_size {size}: models of type {config.model_type} are not cut into stages ({', '.join(MODEL_TYPES)} "
            "are); use recipes/sft.py with --zero 3."
        )
    if why := attention.cannot_pack(config, attention.NAME, settings.max_length):
        raise UserError(f"--pp_size {size}: {why}; use recipes/sft.py with --zero 3.")
    if settings.pure_bf16 and config.tie_word_embeddings:
        raise UserError(
            f"--pp_size {size} with --pure_bf16 true: the head is the embedding, and its copies on the first and the "
            "last stage would be rounded differently; leave it out, or use recipes/sft.py."
        )
    if size > layers:
        raise UserError(f"--pp_size {size}: the model has {layers} layers; use a smaller one.")


PARALLEL = Parallel(
    name="pipeline",
    flag="pp_size",
    example="--pp_size 2",
    splits="layers",
    neighbors=False,  # a stage's links carry the least
    default_size=lambda settings: settings.world_size if settings.recipe.stages else 1,
    conflicts=CONFLICTS,
    check_recipe=check_recipe,
    resolve=resolve,
    resolve_for_model=resolve_for_model,
)
