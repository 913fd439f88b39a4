"""The flags of the recipes: names, defaults and help texts."""

from dataclasses import dataclass, field
from typing import Literal

from zerofit.config import batch_size
from zerofit.job import program
from zerofit.job.recipe import Recipe


@dataclass
class RunArguments:
    """Run: ZeRO stage, offload, batch, checkpoints."""

    _argument_group_name = "run"
    config: str | None = field(default=None, metadata={"help": "YAML file with any of these arguments."})
    zero: Literal["auto", 0, 1, 2, 3] = field(
        default="auto",
        metadata={
            "help": "ZeRO stage. 0: plain DDP or one process. Default: 0 for one process, 2 for more. `auto` by name "
            "plans first (make plan) and runs the fastest setting that fits the GPU."
        },
    )
    offload: Literal["none", "optimizer", "all"] = field(
        default="none",
        metadata={"help": "Keep in host memory: the optimizer, or all (optimizer and parameters, stage 3 only)."},
    )
    effective_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Samples per optimizer step over all ranks (default 32); accumulation is derived: "
            "micro batch x accumulation x ranks / (sp_size x tp_size x pp_size)."
        },
    )
    sp_size: int = field(
        default=1,
        metadata={
            "help": "Sequence parallel: this many ranks of a node share each row and split its tokens "
            "(docs/long_context.md)."
        },
    )
    tp_size: int = field(
        default=1,
        metadata={
            "help": "Tensor parallel: this many ranks of a node share each row and split the matrices of each layer "
            "(full fine-tuning, ZeRO 1 and 2; docs/tensor_parallel.md)."
        },
    )
    pp_size: int | None = field(
        default=None,
        metadata={
            "help": "Pipeline parallel: stages of the model's layers, each on ranks of its own (recipes/pipeline.py "
            "only, default all ranks; docs/pipeline.md)."
        },
    )
    preset: str | None = field(
        default=None,
        metadata={
            "help": "A tested combination of flags by the GPU's memory: gpu-12g, gpu-24g, gpu-40g, gpu-80g, gpu-141g."
        },
    )
    search_batch_size: bool = field(
        default=False,
        metadata={
            "help": "First search the largest micro batch that fits, by real steps on the longest rows (the same as "
            "--per_device_train_batch_size auto)."
        },
    )
    memory_limit: float | None = field(
        default=None,
        metadata={"help": "GiB of device memory that a run is planned and probed for. Default: what the GPU has."},
    )
    plan: bool = field(
        default=False, metadata={"help": "Say whether this very job would fit, by a run without memory, and stop."}
    )
    ignore_plan: bool = field(default=False, metadata={"help": "Start although the plan says that it does not fit."})
    gpu_type: str = field(
        default="detect",
        metadata={"help": "GPU that --plan plans for: a name of `zerofit plan`'s table, or this machine's."},
    )
    gpus: int | None = field(
        default=None,
        metadata={"help": "Processes that this job must have; it refuses to start with another number."},
    )
    show: bool = field(default=False, metadata={"help": "Print every effective argument with its source and stop."})
    gradient_checkpointing_every: int = field(
        default=1, metadata={"help": "Checkpoint layers 0, N, 2N, ...; the others keep their activations."}
    )
    gradient_checkpointing_policy: Literal["full", "selective"] = field(
        default="full",
        metadata={"help": "What a checkpointed layer recomputes: all, or all but matrix products and attention."},
    )
    activation_offload: bool = field(
        default=False, metadata={"help": "Keep the inputs of checkpointed layers in host memory until the backward."}
    )
    activation_offload_streams: bool = field(
        default=False,
        metadata={"help": "Copy for --activation_offload on a stream of its own, while the GPU computes."},
    )
    memory_report: bool = field(
        default=False,
        metadata={
            "help": "Follow every tensor of the first 3 steps, the first save and the first evaluation: memory.json, "
            "memory.png and a table of peak bytes by phase and part."
        },
    )
    certificate: bool = field(
        default=True,
        metadata={
            "help": "Check before the first step and at the end that what trains is what was asked (certificate.md); "
            "false: only what costs nothing."
        },
    )
    save_every_minutes: float = field(
        default=0.0, metadata={"help": "Save a checkpoint this long after the last one, beside --save_steps; 0: never."}
    )
    node_local_storage: bool = field(
        default=False,
        metadata={
            "help": "Several machines without a shared disk: each keeps its ranks' part of a checkpoint on its own "
            "(ZeRO 1 to 3)."
        },
    )
    ignore_resume_mismatch: bool = field(
        default=False,
        metadata={
            "help": "Resume although model, data, seed or effective batch are others than the checkpoint's; it is said."
        },
    )
    on_nan: Literal["stop", "skip"] = field(
        default="stop",
        metadata={
            "help": "A step whose loss or gradient is not finite is never applied, but said, and kept for `zerofit "
            "replay`; stop: the run ends after --max_nan_steps such in a row; skip: never."
        },
    )
    max_nan_steps: int = field(
        default=3, metadata={"help": "Steps in a row without a finite gradient that end the run."}
    )
    max_tokens_per_sample: int = field(default=48, metadata={"help": "New tokens per sample generation."})
    num_samples: int = field(
        default=3,
        metadata={
            "help": "Generations from the eval (else training) rows, before (not at stage 3) and after training."
        },
    )


@dataclass
class SupervisionArguments:
    """Supervision: what `make` and `zerofit launch` do when a job fails; no effect without them."""

    _argument_group_name = "supervision"
    on_oom: Literal["retry", "fail", "ask"] = field(
        default="retry",
        metadata={
            "help": "Out of memory: start again from the newest checkpoint with a smaller micro batch and the same "
            "effective batch, then gradient checkpointing, a higher stage, offload."
        },
    )
    canary: Literal["auto", True, False] = field(
        default="auto",
        metadata={
            "help": "Before the run, in processes of their own: two steps on the longest rows, an evaluation batch, "
            "save and reload; auto: when the run is predicted to take over 10 minutes."
        },
    )
    max_restarts: int = field(
        default=3, metadata={"help": "Starts again from the newest checkpoint after a rank was lost or hung."}
    )
    hang_timeout: float = field(
        default=1740.0,
        metadata={
            "help": "Seconds without a step after which a job has hung and is ended; 0: never. A minute less than "
            "--ddp_timeout, so that every rank's stack is kept before the collectives give up."
        },
    )


@dataclass
class OffloadArguments:
    """Offload beyond host memory, and ZeRO++ communication; DeepSpeed's own names. See docs/offload.md."""

    _argument_group_name = "offload"
    offload_path: str | None = field(
        default=None,
        metadata={"help": "Folder on a fast local disk: what --offload names goes there (NVMe; stage 3)."},
    )
    offload_ratio: float | None = field(
        default=None,
        metadata={"help": "Share of the optimizer that --offload keeps on the CPU, the rest on the GPU (stage 3)."},
    )
    super_offload: bool = field(
        default=False, metadata={"help": "CPU Adam in a process of its own, beside the GPU (stage 3; GH200, GB200)."}
    )
    zero_hpz_partition_size: int | None = field(
        default=None,
        metadata={"help": "ZeRO++ hpZ: ranks that share one more copy of the parameters, those of a node (stage 3)."},
    )
    zero_quantized_weights: bool = field(
        default=False, metadata={"help": "ZeRO++ qwZ: gather parameters as int8 (stage 3, CUDA, nvcc; approximate)."}
    )
    zero_quantized_gradients: bool = field(
        default=False,
        metadata={"help": "ZeRO++ qgZ: reduce gradients as int4 between nodes (stage 3, CUDA, nvcc; approximate)."},
    )


@dataclass
class ModelArguments:
    """Model."""

    _argument_group_name = "model"
    model: str | None = field(
        default=None, metadata={"help": "Model folder or hub id. Default: the bundled tiny Llama."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of a hub model."})
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto",
        metadata={
            "help": "Type that weights are loaded in. auto: the one that the precision needs (docs/precision.md)."
        },
    )
    attn_implementation: str = field(default="sdpa", metadata={"help": "sdpa, flash_attention_2, eager, ..."})
    experts_implementation: Literal["auto", "eager", "grouped_mm", "batched_mm"] = field(
        default="auto",
        metadata={"help": "How a mixture of experts computes its products. auto: grouped_mm, or eager under autocast."},
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run Python code that comes with the model."})
    random_init: bool = field(
        default=False, metadata={"help": "Random weights from the model's config.json (benchmarks, pretraining)."}
    )
    new_tokens: list[str] | None = field(
        default=None, metadata={"help": "Words that become one token each, trained and saved with the rest."}
    )


@dataclass
class DataArguments:
    """Data: which rows, and how they become tokens."""

    _argument_group_name = "data"
    data: list[str] | None = field(
        default=None,
        metadata={
            "help": "JSON, JSONL, CSV, TSV, Parquet or Arrow files (.gz, .zst too), folders, globs or hub ids; several "
            "may be given, `a.jsonl:2` counts each of its rows twice an epoch, `:0.5` in every other one. Default: "
            "bundled task."
        },
    )
    eval_data: list[str] | None = field(default=None, metadata={"help": "Like --data, for evaluation."})
    eval_fraction: float = field(
        default=0.0, metadata={"help": "Share of the rows held out for evaluation when there is no eval split."}
    )
    data_format: str = field(default="auto", metadata={"help": "What a row is. auto: by its columns."})
    columns: list[str] | None = field(
        default=None, metadata={"help": "Column names to map: prompt=question completion=answer."}
    )
    data_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    data_split: str = field(default="train", metadata={"help": "Split of a hub data set to train on."})
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "Template file or built-in (plain, chatml, qwen3, qwen2.5, llama3, llama3.1, gemma, mistral, "
            "phi4). Default: the tokenizer's."
        },
    )
    train_on: Literal["assistant", "last_turn", "all", "prompt"] = field(
        default="assistant",
        metadata={"help": "Where the loss is: every answer, the last answer, everything, or all but the answers."},
    )
    mask_generation_prompt: bool = field(
        default=False,
        metadata={
            "help": "Leave out of the loss what the chat template itself writes at the start of an answer, such as an "
            "empty <think></think> (docs/templates.md)."
        },
    )
    max_length: int = field(default=2048, metadata={"help": "Most tokens of a row (of a pack with --packing)."})
    truncation: Literal["truncate_right", "truncate_left", "drop", "error"] = field(
        default="truncate_right",
        metadata={"help": "What happens to longer rows. A row whose answer is cut away entirely is always dropped."},
    )
    bad_rows: Literal["error", "drop"] = field(
        default="error",
        metadata={"help": "A row or file that cannot be used ends the run, or is left out and counted by reason."},
    )
    max_samples: int | None = field(default=None, metadata={"help": "Use only the first N training rows."})
    streaming: bool = field(
        default=False,
        metadata={"help": "Read and tokenise rows while training, for data larger than the disk; needs --max_steps."},
    )
    shuffle_buffer_size: int = field(
        default=10_000, metadata={"help": "Rows that --streaming reads ahead and shuffles among themselves."}
    )
    shuffle_seed: int | None = field(
        default=None, metadata={"help": "Seed of the row order (transformers' --data_seed). Default: --seed."}
    )
    preprocessing_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that tokenise. Default: one for each core, for files over 4 MB."}
    )
    packing: bool = field(
        default=False, metadata={"help": "Several rows per sequence of max_length; they never see each other."}
    )
    padding_free: Literal["auto", True, False] = field(
        default="auto",
        metadata={"help": "A batch is one long row without padding. auto: where it is proven for the model."},
    )
    min_supervised_fraction: float = field(
        default=0.0,  # off: for classification with long prompts about 0.001 is right
        metadata={"help": "Refuse to start when less than this share of the training tokens is in the loss; 0: off."},
    )
    max_truncated_fraction: float = field(
        default=1.0,
        metadata={"help": "Refuse to start when more than this share of the training rows is over max_length; 1: off."},
    )
    max_duplicate_fraction: float = field(
        default=1.0,
        metadata={
            "help": "Refuse to start when more than this share of the training rows repeats another, but for case, "
            "white space and punctuation; 1: off."
        },
    )
    max_eval_overlap_fraction: float = field(
        default=1.0,
        metadata={
            "help": "Refuse to start when more than this share of the eval rows is also in training, compared in the "
            "same way; 1: off."
        },
    )


@dataclass
class OptimizerArguments:
    """Optimizer, beside transformers' --optim, --optim_args and --learning_rate."""

    _argument_group_name = "optimizer"
    pure_bf16: bool = field(
        default=False,
        metadata={"help": "Weights, gradients and optimizer states in bf16, no fp32 master copy (docs/optimizers.md)."},
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = field(
        default="none",
        metadata={"help": "Multiply the learning rate by effective batch / base batch, or by the root of it."},
    )
    lr_scaling_base_batch_size: int = field(
        default=batch_size.DEFAULT_EFFECTIVE_BATCH_SIZE,
        metadata={"help": "Effective batch that the learning rate was chosen for (with --lr_scaling)."},
    )


@dataclass
class LoraArguments:
    """Adapter and frozen base (recipes/lora.py, or recipes/dpo.py --adapter lora); names as in peft.LoraConfig."""

    _argument_group_name = "lora"
    adapter: Literal[
        "lora", "ia3", "prompt_tuning", "prefix_tuning", "adaption_prompt", "ln_tuning", "loha", "lokr", "oft", "hra",
        "miss", "vera", "randlora", "delora", "road",
    ] = field(default="lora", metadata={"help": "Which of peft's adapters (docs/adapters.md)."})  # fmt: skip
    adapter_config: list[str] | None = field(
        default=None, metadata={"help": "More of the adapter's settings in peft: oft_block_size=16 coft=true."}
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "QLoRA: the frozen base in 4 bits (NF4, doubly quantized; bitsandbytes)."}
    )
    load_in_8bit: bool = field(default=False, metadata={"help": "The frozen base in 8 bits (LLM.int8; bitsandbytes)."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter matrices."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale: the update is multiplied by alpha / r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the adapter's input."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Module names to adapt, or all-linear (every linear layer but the head)."},
    )
    use_dora: bool = field(default=False, metadata={"help": "Weight-decomposed LoRA (arXiv 2402.09353)."})
    use_rslora: bool = field(default=False, metadata={"help": "Scale by alpha / sqrt(r) (arXiv 2312.03732)."})
    init_lora_weights: str = field(
        default="true",
        metadata={"help": "How A and B start: true (B is 0), gaussian, orthogonal, pissa, pissa_niter_16, olora."},
    )
    loraplus_lr_ratio: float | None = field(
        default=None, metadata={"help": "LoRA+: B learns this many times faster than A, e.g. 16 (arXiv 2402.12354)."}
    )
    num_virtual_tokens: int = field(
        default=20, metadata={"help": "Length of the prompt of prompt_tuning and prefix_tuning."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained in full and saved with the adapter, e.g. lm_head."}
    )


@dataclass
class PreferenceArguments:
    """Preference loss (recipes/dpo.py); names and meaning as in trl.DPOConfig."""

    _argument_group_name = "preference"
    beta: float = field(
        default=0.1, metadata={"help": "Strength of the pull to the reference; the margin is multiplied by it."}
    )
    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero", "simpo", "orpo"] = field(
        default="sigmoid", metadata={"help": "Formula of the loss (docs/dpo.md). simpo and orpo need no reference."}
    )
    label_smoothing: float = field(
        default=0.0, metadata={"help": "Share of pairs taken to be the wrong way round (sigmoid and robust)."}
    )
    rpo_alpha: float = field(
        default=0.0, metadata={"help": "Weight of the SFT loss of the chosen answer, added to the loss."}
    )
    simpo_gamma: float = field(default=0.5, metadata={"help": "Margin that simpo asks for."})
    precompute_ref_log_probs: bool | None = field(
        default=None,
        metadata={
            "help": "Compute the reference's log-probabilities before the first step. Default: without an adapter; "
            "with one the reference is the model with its adapter off, one more forward a step."
        },
    )


@dataclass
class MemoryArguments:
    """Memory techniques."""

    _argument_group_name = "memory"
    fused_loss: Literal["auto", True, False] = field(
        default="auto",
        metadata={"help": "Loss without the logits, in chunks of tokens. auto: for vocabularies from 8,000 words."},
    )
    tiled_mlp: str = field(
        default="1",
        metadata={"help": "Tiles of tokens that each MLP is computed in; 1: whole. auto: by length and width."},
    )


# Defaults that differ from transformers', with the reason.
SHARED_DEFAULTS = {
    "gradient_checkpointing": True,  # activations are the first to exhaust memory
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,  # below 1: a share of all steps
    "logging_steps": 10,
    "logging_nan_inf_filter": False,  # a NaN must show in the logs, not be averaged away
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "ddp_find_unused_parameters": False,
    "remove_unused_columns": False,  # our collator returns exactly the model's inputs
    "report_to": ["none"],
}


def kit_groups(recipe: Recipe | str) -> tuple[type, ...]:
    """Return the dataclasses of the arguments that a recipe takes beside transformers': the shared ones and its own."""
    shared = (RunArguments, SupervisionArguments, OffloadArguments, ModelArguments, DataArguments, MemoryArguments,
              OptimizerArguments)  # fmt: skip
    return (*shared, *program.recipe_of(recipe).arguments)


def title_of(group: type) -> str:
    """Return the heading of a dataclass of arguments: its `_argument_group_name`, else its name."""
    return getattr(group, "_argument_group_name", group.__name__)
