"""The flags of the recipes: names, types with their ranges, defaults and help texts.

A number's range is part of its annotation, as in `memory_limit: Annotated[float | None, ABOVE_0]`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

from zerofit.base.errors import UserError
from zerofit.job import batch_size, parallel_dims, program
from zerofit.job.recipe import Recipe

LARGEST = 2**32 - 1  # largest integer: numpy's largest seed, more than any count of a job


class Range(NamedTuple):
    """The allowed numbers of an argument."""

    words: str  # requirement in words: "1 or more"
    allows: Callable[[float], bool]


FINITE = Range("finite", lambda n: True)
FROM_0, FROM_1 = Range("0 or more", lambda n: n >= 0), Range("1 or more", lambda n: n >= 1)
FROM_8, ABOVE_0 = Range("8 or more", lambda n: n >= 8), Range("above 0", lambda n: n > 0)
BELOW_1 = Range("at least 0 and below 1", lambda n: 0 <= n < 1)
BELOW_HALF = Range("at least 0 and below 0.5", lambda n: 0 <= n < 0.5)
SHARE = Range("from 0 to 1", lambda n: 0 <= n <= 1)
STEPS = Range(
    "an integer number of steps, or a fraction of all steps below 1", lambda n: n >= 0 and (n < 1 or n == int(n))
)

# transformers' argument -> its range; tests/config/test_parse.py checks that no numeric argument is missing.
TRANSFORMERS_RANGES = {
    "per_device_train_batch_size": FROM_1, "per_device_eval_batch_size": FROM_1, "gradient_accumulation_steps": FROM_1,
    "local_rank": Range("-1 or more", lambda n: n >= -1), "dataloader_num_workers": FROM_0,
    "dataloader_prefetch_factor": FROM_1, "seed": FROM_0, "data_seed": FROM_0, "num_train_epochs": ABOVE_0,
    "max_steps": Range("1 or more, or -1 to use --num_train_epochs", lambda n: n >= 1 or n == -1),
    "learning_rate": FROM_0, "weight_decay": FROM_0,  # a rate of 0 runs everything and keeps the weights
    "warmup_steps": STEPS, "logging_steps": STEPS, "eval_steps": STEPS, "save_steps": STEPS, "eval_delay": FROM_0,
    "adam_beta1": BELOW_1, "adam_beta2": BELOW_1, "adam_epsilon": ABOVE_0,  # 0 divides 0 by 0 without a gradient
    "max_grad_norm": FROM_0,  # 0 disables clipping, in transformers and in DeepSpeed
    "label_smoothing_factor": BELOW_1, "neftune_noise_alpha": FROM_0, "torch_empty_cache_steps": FROM_1,
    "save_total_limit": FROM_0, "eval_accumulation_steps": FINITE, "ddp_timeout": FROM_1, "ddp_bucket_cap_mb": FROM_1,
}  # fmt: skip


def flag(default: Any, help: str) -> Any:
    """Return a dataclass field for a flag with a default and its `--help` text."""
    return field(default=default, metadata={"help": help})


@dataclass
class RunArguments:
    """Run: ZeRO stage, offload, batch, checkpoints."""

    _argument_group_name = "run"
    config: str | None = flag(None, "YAML file with any of these arguments.")
    zero: Literal["auto", 0, 1, 2, 3] = flag(
        "auto",
        "ZeRO stage (0: plain DDP or one process). Default: 0 for one process, else 2. auto: plan first, "
        "then run the fastest setting that fits.",
    )
    offload: Literal["none", "optimizer", "all"] = flag(
        "none", "Offload to host memory: the optimizer, or all (optimizer and parameters, stage 3 only)."
    )
    offload_path: str | None = flag(
        None, "Folder on a fast local disk (NVMe) to offload to instead of host memory (stage 3)."
    )
    effective_batch_size: Annotated[int | None, FROM_1] = flag(
        None,
        "Samples per optimizer step over all ranks (default 32): micro batch x accumulation x ranks / "
        "(sp_size x tp_size x pp_size). Sets the accumulation.",
    )
    sp_size: int = flag(
        1,
        "Sequence parallelism: number of ranks that share each row's tokens, within a node or all ranks of "
        "several nodes (docs/parallelism.md).",
    )
    tp_size: int = flag(
        1,
        "Tensor parallelism: number of ranks of a node that share each row and split each layer's matrices "
        "(full fine-tuning, ZeRO 1 and 2; docs/parallelism.md).",
    )
    pp_size: int | None = flag(
        None,
        "Pipeline parallelism: number of stages of layers, each on separate ranks (recipes/pipeline.py only, "
        "default all ranks; docs/parallelism.md).",
    )
    preset: str | None = flag(
        None, "A tested combination of flags by the GPU's memory: gpu-12g, gpu-24g, gpu-40g, gpu-80g, gpu-141g."
    )
    search_batch_size: bool = flag(
        False,
        "Search for the largest micro batch that fits before training, with real steps on the longest "
        "rows (same as --per_device_train_batch_size auto).",
    )
    memory_limit: Annotated[float | None, ABOVE_0] = flag(
        None, "Plan and size batches for a GPU of this many GiB. Default: this GPU's memory."
    )
    plan: bool = flag(False, "Simulate this job without using GPU memory, print whether it fits, and exit.")
    ignore_plan: bool = flag(False, "Start even if the planned job does not fit.")
    gpu_type: str = flag(
        "detect", "GPU that --plan plans for: a name from `zerofit plan`'s table. Default: this machine's."
    )
    gpus: Annotated[int | None, FROM_1] = flag(
        None, "Required number of processes; the job does not start with another number."
    )
    show: bool = flag(False, "Print every argument in effect with its source, and exit.")
    gradient_checkpointing_every: Annotated[int, FROM_1] = flag(
        1, "Recompute only every Nth layer: less recomputation, more memory (1: every layer)."
    )
    gradient_checkpointing_policy: Literal["full", "selective"] = flag(
        "full",
        "Operations that a checkpointed layer recomputes. full: all. selective: all except matrix products and "
        "attention.",
    )
    activation_offload: bool = flag(False, "Keep the inputs of checkpointed layers in host memory until the backward.")
    memory_report: bool = flag(
        False,
        "Record every tensor of the first 3 steps, save and evaluation; write memory.json, memory.png and a "
        "table of peaks.",
    )
    certificate: bool = flag(
        True,
        "Check before the first step and at the end that the run trains as requested "
        "(certificate.md). false: only the free checks.",
    )
    save_every_minutes: Annotated[float, FROM_0] = flag(
        0.0,
        "Save a checkpoint this many minutes after the last one, in addition to --save_steps (0: never). "
        "Default on a cluster: 30 if no flag sets when to save.",
    )
    save_in_background: bool = flag(
        False,
        "ZeRO 1 to 3: copy the states of a checkpoint to host memory, which needs space for them, and write "
        "them while training continues.",
    )
    save_model_in_checkpoints: bool = flag(
        False,
        "ZeRO-3, full fine-tuning: write model.safetensors into each checkpoint too. The shards hold the "
        "same weights; final/ always has it.",
    )
    node_local_storage: bool = flag(
        False,
        "For several machines without a shared disk: each stores its ranks' part of a checkpoint (ZeRO 1 to 3).",
    )
    upload_to: str | None = flag(
        None,
        "Also copy finished checkpoints and final/ to this place: s3://bucket/run, gs://..., file:///disk/run "
        "(fsspec). --resume_from_checkpoint auto downloads the newest if the run folder lacks a checkpoint.",
    )
    ignore_resume_mismatch: bool = flag(
        False,
        "Resume even if model, data, seed or effective batch differ from the checkpoint. Each difference is printed.",
    )
    early_stopping_patience: Annotated[int | None, FROM_1] = flag(
        None,
        "End the run after this many evaluations in a row that do not improve --metric_for_best_model (default loss). "
        "--load_best_model_at_end true saves the best model as final/.",
    )
    early_stopping_threshold: Annotated[float, FROM_0] = flag(
        0.0, "Smallest change that counts as an improvement (--early_stopping_patience)."
    )
    on_nan: Literal["stop", "skip"] = flag(
        "stop",
        "Skip, report and save (for `zerofit replay`) each step with a non-finite loss or gradient. stop: also "
        "end the run after --max_nan_steps in a row.",
    )
    max_nan_steps: Annotated[int, FROM_1] = flag(3, "Number of non-finite steps in a row that end the run.")
    max_tokens_per_sample: Annotated[int, FROM_1] = flag(48, "Maximum number of new tokens of a generated sample.")
    eval_generation_rows: Annotated[int, FROM_0] = flag(
        0,
        "Generate answers to this many eval rows in each evaluation and report eval_exact_match; answers have at "
        "most --max_tokens_per_sample tokens.",
    )
    num_samples: Annotated[int, FROM_0] = flag(
        3,
        "Number of samples generated before (not at stage 3) and after training, from eval rows or, without "
        "them, training rows.",
    )


@dataclass
class SupervisionArguments:
    """Supervision: reactions of `make` and `zerofit launch` to a failed job."""

    _argument_group_name = "supervision"
    on_oom: Literal["retry", "fail", "ask"] = flag(
        "retry",
        "After out of memory: restart from the newest checkpoint with a smaller micro batch, then gradient "
        "checkpointing, a higher ZeRO stage, offload.",
    )
    canary: Literal["auto", True, False] = flag(
        "auto",
        "Try two steps on the longest rows, an evaluation batch, save and reload before the run. auto: for "
        "runs of over 10 minutes.",
    )
    max_restarts: Annotated[int, FROM_0] = flag(
        3, "Maximum number of restarts from the newest checkpoint after a rank died or hung."
    )
    hang_timeout: Annotated[float, FROM_0] = flag(
        1740.0,
        "Seconds without a step after which a job counts as hung (0: never), below --ddp_timeout. Default: "
        "measured from the steps, at most 1740.",
    )
    verbose: bool = flag(
        False,
        "Print every decision and every line of the certificate. run.json and certificate.md have them in any case.",
    )


@dataclass
class ModelArguments:
    """Model."""

    _argument_group_name = "model"
    model: str | None = flag(None, "Model folder or hub id. Default, or tiny with --data: the bundled tiny Llama.")
    model_revision: str = flag("main", "Branch, tag or commit of a hub model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "Data type of the loaded weights. auto: the type that the precision needs (docs/memory.md)."
    )
    attn_implementation: str = flag("sdpa", "Attention kernel: sdpa, flash_attention_2, eager, ...")
    experts_implementation: Literal["auto", "eager", "grouped_mm", "batched_mm"] = flag(
        "auto", "Kernel for the products of a mixture of experts. auto: grouped_mm, or eager under autocast."
    )
    towers: Literal["auto", "keep", "drop"] = flag(
        "auto",
        "Vision and audio towers of an image-text model. keep: frozen in memory; drop: not loaded. Both save "
        "them unchanged. auto: drop (docs/image_text.md).",
    )
    trust_remote_code: bool = flag(False, "Run Python code from the model folder.")
    random_init: bool = flag(False, "Start from random weights of the model's config.json (benchmarks, pretraining).")
    new_tokens: list[str] | None = flag(None, "Words to add as one token each; trains and saves their embeddings.")


@dataclass
class DataArguments:
    """Data: rows and their tokenization."""

    _argument_group_name = "data"
    data: list[str] | None = flag(
        None,
        "Files (JSON, JSONL, CSV, TSV, Parquet, Arrow; .gz, .zst), folders, globs or hub ids, some with a "
        "weight (`a.jsonl:2`, docs/data.md). Default: bundled task.",
    )
    eval_data: list[str] | None = flag(None, "Like --data, for evaluation.")
    eval_fraction: Annotated[float, BELOW_1] = flag(
        0.0, "Fraction of the rows held out for evaluation if no eval split exists."
    )
    data_format: str = flag(
        "auto",
        "Format of a row. auto: detect from its columns. rendered, letters: also detect, and read control words "
        "in texts as tokens or as letters (data.md).",
    )
    columns: list[str] | None = flag(None, "Column names to map: prompt=question completion=answer.")
    data_config: str | None = flag(None, "Configuration of a hub data set.")
    data_split: str = flag("train", "Split of a hub data set to train on.")
    chat_template: str | None = flag(None, "Template file or name (docs/templates.md). Default: the tokenizer's.")
    chat_template_kwargs: str | None = flag(
        None, "Arguments of the chat template as a JSON object: '{\"enable_thinking\": false}'."
    )
    train_on: Literal["assistant", "last_turn", "all", "prompt"] = flag(
        "assistant",
        "Tokens in the loss: every answer, the last answer, everything, or everything except the answers.",
    )
    mask_generation_prompt: bool = flag(
        False,
        "Exclude the text from the loss that the chat template writes at the start of an answer, such as an "
        "empty <think></think> (docs/templates.md).",
    )
    max_length: Annotated[int, FROM_8] = flag(2048, "Maximum number of tokens of a row (with --packing: of a pack).")
    truncation: Literal["truncate_right", "truncate_left", "drop", "error"] = flag(
        "truncate_right", "Treatment of longer rows. A row whose answer would be cut off entirely is always dropped."
    )
    bad_rows: Literal["error", "drop"] = flag(
        "error",
        "Treatment of a malformed row or file. error: end the run. drop: leave it out and count it by reason.",
    )
    max_samples: Annotated[int | None, FROM_1] = flag(None, "Use only the first N training rows.")
    streaming: bool = flag(
        False, "Read and tokenize rows during training, for data larger than the disk. Needs --max_steps."
    )
    shuffle_buffer_size: Annotated[int, FROM_1] = flag(
        10_000, "Number of rows that --streaming reads ahead and shuffles."
    )
    shuffle_seed: Annotated[int | None, FROM_0] = flag(
        None, "Seed of the row order (transformers' --data_seed). Default: --seed."
    )
    preprocessing_num_workers: Annotated[int | None, FROM_1] = flag(
        None, "Number of tokenizer processes. Default: one per core, for files over 4 MB."
    )
    packing: bool = flag(False, "Pack several rows into each sequence of max_length; attention does not cross rows.")
    padding_free: Literal["auto", True, False] = flag(
        "auto",
        "Concatenate the rows of a batch instead of padding them. auto: if a check of the model shows that "
        "rows stay separate.",
    )
    min_supervised_fraction: Annotated[float, SHARE] = flag(
        0.0, "Refuse to start if less than this fraction of the training tokens is in the loss (0: off)."
    )
    max_truncated_fraction: Annotated[float, SHARE] = flag(
        1.0, "Refuse to start if more than this fraction of the training rows is longer than max_length (1: off)."
    )
    max_duplicate_fraction: Annotated[float, SHARE] = flag(
        1.0,
        "Refuse to start if more than this fraction of the training rows repeats another row, ignoring case, "
        "white space and punctuation (1: off).",
    )
    max_eval_overlap_fraction: Annotated[float, SHARE] = flag(
        1.0,
        "Refuse to start if more than this fraction of the eval rows is also in the training rows, compared "
        "in the same way (1: off).",
    )


@dataclass
class OptimizerArguments:
    """Optimizer, in addition to transformers' --optim, --optim_args and --learning_rate."""

    _argument_group_name = "optimizer"
    pure_bf16: bool = flag(
        False, "Keep weights, gradients and optimizer states in bf16, without an fp32 master copy (docs/optimizers.md)."
    )
    freeze: list[str] | None = flag(
        None,
        "Weights to freeze: names of modules or weights, or regular expressions that match full names "
        "(embed_tokens, layers.0, '.*norm.*').",
    )
    train_only: list[str] | None = flag(None, "Train only these weights, named as for --freeze.")
    embedding_learning_rate: Annotated[float | None, FROM_0] = flag(
        None, "Learning rate of the input embeddings, with the same schedule (default --learning_rate)."
    )
    head_learning_rate: Annotated[float | None, FROM_0] = flag(
        None, "Learning rate of the head, with the same schedule (default --learning_rate)."
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = flag(
        "none", "Multiply the learning rate by effective batch / base batch (linear) or its square root (sqrt)."
    )
    lr_scaling_base_batch_size: Annotated[int, FROM_1] = flag(
        batch_size.DEFAULT_EFFECTIVE_BATCH_SIZE,
        "Effective batch size for which the learning rate was chosen (with --lr_scaling).",
    )


@dataclass
class LoraArguments:
    """Adapter and frozen base (recipes/lora.py, or recipes/dpo.py --adapter lora); names as in peft.LoraConfig."""

    _argument_group_name = "lora"
    adapter: Literal[
        "lora", "ia3", "prompt_tuning", "prefix_tuning", "adaption_prompt", "ln_tuning", "loha", "lokr", "oft", "hra",
        "miss", "vera", "randlora", "delora", "road",
    ] = flag("lora", "Adapter type of peft (docs/adapters.md).")  # fmt: skip
    initial_adapter: str | None = flag(
        None, "Continue training this LoRA adapter, e.g. runs/x/final; it keeps its configuration."
    )
    adapter_config: list[str] | None = flag(None, "Further peft settings of the adapter: oft_block_size=16 coft=true.")
    load_in_4bit: bool = flag(False, "QLoRA: load the frozen base in 4 bits (NF4, doubly quantized; bitsandbytes).")
    load_in_8bit: bool = flag(False, "Load the frozen base in 8 bits (LLM.int8; bitsandbytes).")
    lora_r: Annotated[int, FROM_1] = flag(16, "Rank of the adapter matrices.")
    lora_alpha: Annotated[int, FROM_1] = flag(32, "Scale of the adapter: the update is multiplied by alpha / r.")
    lora_dropout: Annotated[float, BELOW_1] = flag(0.0, "Dropout on the adapter's input.")
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={
            "help": "Module names to adapt, all-linear (every linear layer except the head), or one regular "
            "expression that matches full names."
        },
    )
    lora_target_parameters: list[str] | None = flag(
        None,
        "Parameters to adapt outside linear layers: experts (all fused experts of a mixture), or their names "
        "(docs/experts.md).",
    )
    use_dora: bool = flag(False, "Weight-decomposed LoRA (arXiv 2402.09353).")
    use_rslora: bool = flag(False, "Scale by alpha / sqrt(r) (arXiv 2312.03732).")
    init_lora_weights: str = flag(
        "true", "Initial values of A and B: true (B is 0), gaussian, orthogonal, pissa, pissa_niter_16, olora."
    )
    fused_lora: bool = flag(
        True, "Add the adapter's product to the layer's output in one pass over it instead of three."
    )
    loraplus_lr_ratio: Annotated[float | None, FROM_1] = flag(
        None, "LoRA+: ratio of the learning rates of B and A, e.g. 16 (arXiv 2402.12354)."
    )
    num_virtual_tokens: Annotated[int, FROM_1] = flag(20, "Length of the prompt of prompt_tuning and prefix_tuning.")
    modules_to_save: list[str] | None = flag(None, "Modules trained in full and saved with the adapter, e.g. lm_head.")


@dataclass
class PreferenceArguments:
    """Preference loss (recipes/dpo.py); names and meaning as in trl.DPOConfig."""

    _argument_group_name = "preference"
    beta: Annotated[float, ABOVE_0] = flag(
        0.1, "Factor of the margin: larger values keep the model closer to the reference."
    )
    loss_type: Literal[
        "sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero", "simpo", "orpo", "kto", "apo_zero_unpaired"
    ] = flag(
        "sigmoid",
        "Formula of the loss (docs/preferences.md). simpo and orpo need no reference; kto and "
        "apo_zero_unpaired train on single answers with a label.",
    )
    label_smoothing: Annotated[float, BELOW_HALF] = flag(
        0.0, "Assumed fraction of pairs with swapped answers (sigmoid and robust)."
    )
    rpo_alpha: Annotated[float, FROM_0] = flag(0.0, "Weight of the chosen answer's SFT loss in the loss.")
    simpo_gamma: Annotated[float, FINITE] = flag(0.5, "Target margin of simpo.")
    desirable_weight: Annotated[float, FROM_0] = flag(
        1.0, "Factor of the loss of wanted answers (kto and apo_zero_unpaired)."
    )
    undesirable_weight: Annotated[float, FROM_0] = flag(1.0, "Factor of the loss of unwanted answers.")
    precompute_ref_log_probs: bool | None = flag(
        None,
        "Compute the reference's log-probabilities before the first step. Default: true without an adapter; "
        "with an adapter each step also runs the model with the adapter off.",
    )


@dataclass
class MemoryArguments:
    """Memory and speed techniques."""

    _argument_group_name = "memory"
    fused_loss: Literal["auto", True, False] = flag(
        "auto",
        "Compute the loss in chunks of tokens, without storing the logits. auto: for vocabularies of 8,000 "
        "tokens or more.",
    )
    tiled_mlp: Annotated[int | str, FROM_1] = flag(
        1, "Number of token tiles in which each MLP is computed (1: no tiling). auto: from length and width."
    )
    compile_layers: bool = flag(
        False, "Compile the decoder layers, except their attention, for rows of any length (docs/speed.md)."
    )
    whole_layers: bool = flag(
        True,
        "ZeRO-3: gather and reduce each decoder layer in one call if micro batches are short or ranks many. "
        "false: matrix by matrix (docs/parallelism.md).",
    )
    fp8: bool = flag(
        False, "Multiply the matrices of the decoder layers as 8-bit floats, if the GPU can (docs/speed.md)."
    )


# Defaults that differ from transformers'.
SHARED_DEFAULTS = {
    "gradient_checkpointing": True,  # activations exhaust memory first
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,  # fraction of all steps
    "logging_steps": 10,
    "logging_nan_inf_filter": False,  # a NaN must appear in the logs
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "ddp_find_unused_parameters": False,
    "remove_unused_columns": False,  # our collator returns exactly the model's inputs
    "report_to": ["none"],
}


def kit_groups(recipe: Recipe | str) -> tuple[type, ...]:
    """Return the argument dataclasses of a recipe besides TrainingArguments: the shared ones and its own."""
    shared = (RunArguments, SupervisionArguments, ModelArguments, DataArguments, MemoryArguments,
              OptimizerArguments)  # fmt: skip
    recipe = program.recipe_of(recipe)
    return (*shared, *recipe.arguments, *(t.arguments for t in recipe.techniques if t.arguments))


def title_of(group: type) -> str:
    """Return the heading of an argument dataclass: its `_argument_group_name`, else its name."""
    return getattr(group, "_argument_group_name", group.__name__)


# --- ranges ---


@functools.cache
def ranges(kinds: tuple[type, ...]) -> dict[str, Range]:
    """Return the ranges of transformers' arguments and the ranges in the annotations of argument dataclasses."""
    known = dict(TRANSFORMERS_RANGES)
    for kind in kinds:
        for name, hint in get_type_hints(kind, include_extras=True).items():
            known.update((name, entry) for entry in get_args(hint) if isinstance(entry, Range))
    return known


def check_number(name: str, value, where: str, kinds: tuple[type, ...]) -> None:
    """Raise UserError for a number outside the range of its argument.

    Args: where: the user's setting and its place; kinds: the recipe's argument dataclasses.
    """
    known = dict.fromkeys(parallel_dims.size_flags(), FROM_1) | ranges(kinds)  # --sp_size and the like
    if name not in known or isinstance(value, bool) or not isinstance(value, int | float):
        return
    words, is_allowed = known[name]
    if not is_finite(value):
        raise UserError(f"{where}: it must be a finite number.")
    if not is_allowed(value):
        raise UserError(f"{where}: it must be {words}.")
    if isinstance(value, int) and value > LARGEST:
        raise UserError(f"{where}: it must be {LARGEST} or less.")


def is_finite(value) -> bool:
    """Return whether all numbers in a JSON value are finite."""
    if isinstance(value, dict | list):
        return all(map(is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)
