"""Every argument of both recipes: what it means, where its value came from, and what was decided for the user.

Precedence: default < bundled task (only when neither --model nor --data is given) < --config file.yaml < flag.
A literal in the DeepSpeed JSON that contradicts a flag stops the run; against a mere default the JSON wins.
"""

import argparse
import ast
import importlib.util
import json
import math
import shlex
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml
from transformers import HfArgumentParser  # without torch; TrainingArguments brings it and takes seconds

from . import batch, devices, flags, offload, optimizers, presets, synonyms, zero
from .errors import UserError

ROOT = Path(__file__).resolve().parents[2]  # of the repository
PACKAGE = Path(__file__).resolve().parent
TINY = ROOT / "examples" / "tiny"


@dataclass
class RunArguments:
    """The ZeRO stage, offload and batch: what decides memory."""

    _argument_group_name = "run"
    config: str | None = field(default=None, metadata={"help": "YAML file with any of these arguments."})
    zero: Literal["auto", "0", "1", "2", "3"] = field(
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
            "micro batch x accumulation x ranks."
        },
    )
    preset: str | None = field(
        default=None,
        metadata={
            "help": "A tested combination of flags by the GPU's memory: gpu-12g, gpu-24g, gpu-40g, gpu-80g, gpu-141g."
        },
    )
    probe: bool = field(
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
    dry_run: bool = field(
        default=False, metadata={"help": "Say whether this very job would fit, by a run without memory, and stop."}
    )
    force: bool = field(default=False, metadata={"help": "Start although the plan says that it does not fit."})
    gpu: str = field(
        default="detect",
        metadata={"help": "GPU that --dry_run plans for: a name of `zerofit plan`'s table, or this machine's."},
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
    memory_report: bool = field(
        default=False,
        metadata={
            "help": "Follow every tensor of the first 3 steps, the first save and the first evaluation: memory.json, "
            "memory.png and a table of peak bytes by phase and part."
        },
    )
    save_every_minutes: float = field(
        default=0.0, metadata={"help": "Save a checkpoint this long after the last one, beside --save_steps; 0: never."}
    )
    node_local_storage: bool = field(
        default=False,
        metadata={
            "help": "Several machines without a shared disk: each keeps its ranks' part of a checkpoint on its own (ZeRO 1 to 3)."
        },
    )
    resume_anyway: bool = field(
        default=False,
        metadata={
            "help": "Resume although model, data, seed or effective batch are others than the checkpoint's; it is said."
        },
    )
    on_nan: Literal["stop", "skip"] = field(
        default="stop",
        metadata={
            "help": "A step whose loss or gradient is not finite is never applied, but said, and kept for `zerofit replay`; "
            "stop: the run ends after --max_nan_steps such in a row; skip: never."
        },
    )
    max_nan_steps: int = field(
        default=3, metadata={"help": "Steps in a row without a finite gradient that end the run."}
    )
    max_tokens_per_sample: int = field(default=48, metadata={"help": "New tokens per sample generation."})
    num_samples: int = field(
        default=3, metadata={"help": "Generations from the eval (else training) rows, shown at the end."}
    )


@dataclass
class SupervisionArguments:
    """What `make` and `zerofit launch` do when a job fails; without them these flags do nothing."""

    _argument_group_name = "supervision"
    on_oom: Literal["retry", "fail", "ask"] = field(
        default="retry",
        metadata={
            "help": "Out of memory: start again from the newest checkpoint with a smaller micro batch and the same "
            "effective batch, then gradient checkpointing, a higher stage, offload."
        },
    )
    canary: Literal["auto", "true", "false"] = field(
        default="auto",
        metadata={
            "help": "Before the run, in processes of their own: two steps on the longest rows, an evaluation batch, save and "
            "reload; auto: when the run is predicted to take over 10 minutes."
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
    """What leaves the GPU beyond host memory, and how stage 3 communicates; DeepSpeed's own words. See docs/memory.md."""

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
    zenflow: bool = field(
        default=False, metadata={"help": "Refused with the reason: deepspeed 0.19's ZenFlow does not train right."}
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
    """Which model, in which form."""

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
    trust_remote_code: bool = field(default=False, metadata={"help": "Run Python code that comes with the model."})
    random_init: bool = field(
        default=False, metadata={"help": "Random weights from the model's config.json (benchmarks, pretraining)."}
    )
    new_tokens: list[str] | None = field(
        default=None, metadata={"help": "Words that become one token each, trained and saved with the rest."}
    )


@dataclass
class DataArguments:
    """Which rows, and how they become tokens."""

    _argument_group_name = "data"
    data: list[str] | None = field(
        default=None,
        metadata={
            "help": "JSON, JSONL, CSV, TSV, Parquet or Arrow files (.gz, .zst too), folders, globs or hub ids; several "
            "may be given, `a.jsonl:2` counts each of its rows twice an epoch, `:0.5` in every other one. Default: bundled "
            "task."
        },
    )
    eval_data: list[str] | None = field(default=None, metadata={"help": "Like --data, for evaluation."})
    eval_fraction: float = field(
        default=0.0, metadata={"help": "Share of the rows held out for evaluation when there is no eval split."}
    )
    data_format: Literal[
        "auto", "messages", "sharegpt", "prompt/completion", "question/answer", "alpaca", "text", "tokens"
    ] = field(default="auto", metadata={"help": "What a row is. auto: by its columns."})
    columns: list[str] | None = field(
        default=None, metadata={"help": "Column names to map: prompt=question completion=answer."}
    )
    data_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    data_split: str = field(default="train", metadata={"help": "Split of a hub data set to train on."})
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "Template file or built-in (plain, chatml, qwen3, qwen2.5, llama3, llama3.1, gemma, mistral, phi4). "
            "Default: the tokenizer's."
        },
    )
    train_on: Literal["assistant", "last_turn", "all", "prompt"] = field(
        default="assistant",
        metadata={"help": "Where the loss is: every answer, the last answer, everything, or all but the answers."},
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
    padding_free: Literal["auto", "true", "false"] = field(
        default="auto",
        metadata={
            "help": "A batch is one long row without padding. auto: with packing, and on a GPU where it is proven."
        },
    )
    min_supervised_fraction: float = field(
        default=0.0,  # off: a classification set with long prompts is rightly near 0.001
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
    """What the optimizer keeps, beside transformers' --optim, --optim_args and --learning_rate."""

    _argument_group_name = "optimizer"
    pure_bf16: bool = field(
        default=False,
        metadata={"help": "Weights, gradients and optimizer states in bf16, no fp32 master copy (docs/memory.md)."},
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = field(
        default="none",
        metadata={"help": "Multiply the learning rate by effective batch / base batch, or by the root of it."},
    )
    lr_scaling_base_batch_size: int = field(
        default=batch.DEFAULT_EFFECTIVE_BATCH_SIZE,
        metadata={"help": "Effective batch that the learning rate was chosen for (with --lr_scaling)."},
    )


@dataclass
class LoraArguments:
    """The adapter and the frozen base; names and meaning as in peft.LoraConfig."""

    _argument_group_name = "lora"
    adapter: Literal[
        "lora", "ia3", "prompt_tuning", "prefix_tuning", "adaption_prompt", "ln_tuning", "loha", "lokr", "oft", "hra",
        "miss", "vera", "randlora", "delora", "road",
    ] = field(default="lora", metadata={"help": "Which of peft's adapters (docs/memory.md)."})  # fmt: skip
    adapter_config: list[str] | None = field(
        default=None, metadata={"help": "More of the adapter's settings in peft: oft_block_size=16 coft=true."}
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "QLoRA: the frozen base in 4 bits (NF4, doubly quantised; bitsandbytes)."}
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
class MemoryArguments:
    """Techniques that trade time for memory, or nothing for memory."""

    _argument_group_name = "memory"
    fused_loss: Literal["auto", "true", "false"] = field(
        default="auto",
        metadata={"help": "Loss without the logits, in chunks of tokens. auto: for vocabularies from 32,000 words."},
    )
    tiled_mlp: str = field(
        default="1",
        metadata={"help": "Tiles of tokens that each MLP is computed in; 1: whole. auto: by length and width."},
    )


# What differs from transformers' own defaults, and why.
SHARED_DEFAULTS = {
    "gradient_checkpointing": True,  # activations are what runs out first
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,  # below 1: share of all steps
    "logging_steps": 10,
    "logging_nan_inf_filter": False,  # a NaN must be seen, not averaged away
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "ddp_find_unused_parameters": False,
    "remove_unused_columns": False,  # our collator names exactly what the model gets
    "report_to": ["none"],
}
RECIPES = {
    "sft": {"arguments": (), "defaults": {"learning_rate": 2e-5}},
    "lora": {"arguments": (LoraArguments,), "defaults": {"learning_rate": 2e-4}},
}
_UNSET = object()


class _Parser(HfArgumentParser):
    """HfArgumentParser whose errors are one sentence instead of 300 lines of usage."""

    origin = "command line"

    def print_help(self, file=None):
        from . import flag_help

        print(flag_help.text(self.prog), file=file)

    def error(self, message: str):
        raise UserError(f"{self.origin}: {message}{synonyms.of_value(message)} Every flag: --help all.")


@dataclass
class Settings:
    """Everything a run needs to know, resolved: `settings.zero`, `settings.model`, `settings.learning_rate` ...

    values: argument -> value;  source: argument -> where it came from;  decisions: sentences to print once;
    deepspeed: the DeepSpeed configuration ("auto" left for transformers), None for stage 0;
    planned_gpu: the GPU that is planned for (hardware.Gpu), None: what this machine has;  flags: the command line;
    fingerprints: of model and data, for checkpoints;  resharded: the checkpoint to resume was saved at another stage,
    rank count or offload (both: checkpoint.check_same).
    """

    recipe: str
    values: dict[str, Any]
    source: dict[str, str]
    decisions: list[str]
    deepspeed: dict | None
    world_size: int
    planned_gpu: Any = None
    flags: list[str] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)
    resharded: bool = False

    def __getattr__(self, name: str):
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def precision(self) -> str:
        """bf16, fp16 or fp32: the type of the matrix products."""
        return "bf16" if self.values["bf16"] else "fp16" if self.values["fp16"] else "fp32"

    @property
    def bundled(self) -> bool:
        """Whether this is the embedded default task."""
        return self.source["data"] == "bundled task"

    def training_values(self) -> dict[str, Any]:
        """The keyword arguments of transformers.TrainingArguments."""
        from transformers import TrainingArguments

        names = {f.name for f in fields(TrainingArguments) if f.init}
        values = {k: v for k, v in self.values.items() if k in names}
        values["deepspeed"] = self.deepspeed
        if self.pure_bf16 and self.deepspeed is None:
            values["bf16"] = False  # that flag means autocast over fp32 weights; these weights are bf16
        for name in ("gradient_checkpointing", "activation_checkpointing"):  # recompute.enable does it
            values.pop(name, None)
            values.pop(f"{name}_kwargs", None)
        return values

    def rows(self) -> list[tuple[str, Any, str]]:
        """(argument, value, source) of everything that is not a plain transformers default."""
        shown = [k for k in self.values if self.source[k] != "transformers default"]
        return [(k, self.values[k], self.source[k]) for k in shown if k not in ("show", "config")]


def kit_groups(recipe: str) -> tuple:
    shared = (RunArguments, SupervisionArguments, OffloadArguments, ModelArguments, DataArguments, MemoryArguments,
              OptimizerArguments)  # fmt: skip
    return (*shared, *RECIPES[recipe]["arguments"])


def build_parser(recipe: str) -> _Parser:
    from transformers import TrainingArguments

    groups = (*kit_groups(recipe), TrainingArguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parser = _Parser(groups, prog=recipe, allow_abbrev=False, formatter_class=argparse.HelpFormatter)
    parallelism = next(action for action in parser._actions if action.dest == "parallelism_config")
    parallelism.type = str  # an object of accelerate's, which no text becomes: flags.check refuses it with the reason
    optim = next(action for action in parser._actions if action.dest == "optim")
    optim.choices, optim.metavar = None, "OPTIM"  # optimizers.choose checks it: there are more than transformers knows
    return parser


def _early_parser(recipe: str) -> _Parser:
    """A parser that checks the kit's own arguments and knows transformers' by name, without the import of torch."""
    parser = _Parser(kit_groups(recipe), prog=recipe, allow_abbrev=False)
    for name in training_argument_names():
        words = [f"--{name}", f"--no_{name}"]
        parser.add_argument(*dict.fromkeys([*words, *(word.replace("_", "-") for word in words)]), dest=name, nargs="*")
    return parser


def training_argument_names() -> list[str]:
    """Return the names of transformers' TrainingArguments, read from its source."""
    file = Path(importlib.util.find_spec("transformers").origin).with_name("training_args.py")
    classes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    body = next(node.body for node in classes if node.name == "TrainingArguments")
    return [line.target.id for line in body if isinstance(line, ast.AnnAssign)]


def explicit(recipe: str, argv: list[str], origin: str, early: bool = False, strict: bool = True) -> dict[str, Any]:
    """Only what `argv` says, with argparse's types and choices checked.

    Args: early: check the kit's own arguments only; those of transformers are lists of words then. strict: refuse others.
    """
    parser = _early_parser(recipe) if early else build_parser(recipe)
    parser.origin = origin
    argv = with_auto_as_probe(argv)
    names = [action.dest for action in parser._actions if action.dest != "help"]
    found, unknown = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(names, _UNSET)))
    if unknown and strict:
        raise UserError(f"{origin}: {synonyms.of_unknown(unknown, recipe, names, origin)}")
    return {k: v for k, v in vars(found).items() if v is not _UNSET}


def with_auto_as_probe(argv: list[str]) -> list[str]:
    """`--per_device_train_batch_size auto` -> `--probe true`: transformers' flag itself takes numbers only."""
    name, out = "--per_device_train_batch_size", []
    for word in argv:
        flag, _, value = word.partition("=")
        if flag.replace("-", "_")[2:] == name[2:] and value == "auto":
            out += ["--probe", "true"]
        elif word == "auto" and out and out[-1].replace("-", "_")[2:] == name[2:]:
            out[-1:] = ["--probe", "true"]
        else:
            out.append(word)
    return out


def read_yaml(path: str, recipe: str, early: bool = False) -> dict[str, Any]:
    """The arguments in a YAML file, checked like flags; early: as in `explicit`.

    Raises: UserError with file, line and column for broken YAML, with file and key for an unknown key.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        values = yaml.safe_load(text) or {}
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {path}: is not a UTF-8 text file.") from None
    except RuntimeError as error:  # ~nobody
        raise UserError(f"--config {path}: cannot be looked up: {str(error).rstrip('.')}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise UserError(f"{place}: not valid YAML: {getattr(error, 'problem', error)}.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold `argument: value` lines, found a {type(values).__name__}.")
    argv = []
    for key, value in values.items():
        if value is None:
            continue
        words = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        argv += [f"--{key}", *(str(w) for w in words)] if isinstance(value, list) else [f"--{key}={words[0]}"]
    return explicit(recipe, argv, str(path), early)


def command_line(recipe: str, flags: list[str], more: str = "", gpus: str = "1") -> tuple[list[str], int]:
    """What the verbs of `zerofit` take in common: (the recipe's flags with those of ARGS behind them, processes).

    Args: more: flags in one string, split like a shell would.
    Raises: UserError for an unknown recipe, an unclosed quote or a count that is no number.
    """
    if recipe not in RECIPES:
        raise UserError(f"--recipe {recipe}: must be one of {', '.join(RECIPES)}.")
    if not gpus.isdigit() or int(gpus) < 1:
        raise UserError(f"GPUS={gpus}: must be a whole number of 1 or more.")
    try:
        return [*flags, *shlex.split(more)], int(gpus)
    except ValueError as error:
        raise UserError(f"ARGS={more}: cannot be split into words: {str(error).lower()}.") from None


def parse(recipe: str, argv: list[str], world_size: int, gpu=None) -> Settings:
    """Flags, YAML and DeepSpeed JSON made into `Settings`, before a GPU or a process group is touched.

    Args: recipe: "sft" or "lora"; argv: the flags; world_size: number of processes of this job; gpu: hardware.Gpu of
        a plan, which need not be in this machine.
    Raises: UserError for anything unknown, malformed or contradictory.
    """
    from . import recompute  # it imports torch

    from_flags = explicit(recipe, argv, "command line")
    from_yaml = read_yaml(from_flags["config"], recipe) if from_flags.get("config") else {}
    given = {**from_yaml, **from_flags}
    bundled = {}
    if not given.get("model") and not given.get("data"):
        bundled = read_yaml(str(TINY / f"{recipe}.yaml"), recipe)
        bundled |= {"data": [str(TINY / "train.jsonl")], "eval_data": [str(TINY / "eval.jsonl")]}

    preset = explicit(recipe, presets.flags(given["preset"]), "preset") if given.get("preset") else {}

    values, source = {}, {}
    defaults = vars(build_parser(recipe).parse_args([]))
    for layer, origin in (
        (defaults, "transformers default"),
        ({**SHARED_DEFAULTS, **RECIPES[recipe]["defaults"]}, "default"),
        (bundled, "bundled task"),
        (preset, f"preset {given.get('preset')}"),
        (from_yaml, str(from_flags.get("config"))),
        (from_flags, "flag"),
    ):
        values |= layer
        source |= dict.fromkeys(layer, origin)
    kit = {f.name for group in kit_groups(recipe) for f in fields(group)}
    source |= {name: "default" for name in kit if source[name] == "transformers default"}
    settings = Settings(recipe, values, source, [], None, world_size, gpu, list(argv))
    if preset:
        settings.decisions.append(f"preset {given['preset']}: {' '.join(presets.flags(given['preset']))}")
    _check_ranges(settings)
    _one_shuffle_seed(settings)
    _hang_before_collectives(settings)
    _fill_defaults(settings)
    flags.check(settings, given, defaults)
    settings.deepspeed = zero.choose(settings, given)
    recompute.choose(settings)
    _choose_precision(settings)
    _solve_batch(settings)
    optimizers.choose(settings, given)
    _scale_learning_rate(settings)
    return settings


def order_seed(settings) -> int | None:
    """The seed of the row order, of Settings or of TrainingArguments; None keeps the rows as they come."""
    if settings.train_sampling_strategy == "sequential":
        return None
    return settings.seed if settings.data_seed is None else settings.data_seed


def decide(settings: Settings, name: str, value: Any, why: str) -> None:
    """Set an argument for the user and remember the sentence that says so."""
    settings.values[name] = value
    settings.source[name] = "decided"
    settings.decisions.append(f"{name} {value}: {why}")


def _check_ranges(settings: Settings) -> None:
    at_least = {
        "max_length": 8,
        "max_samples": 1,
        "shuffle_buffer_size": 1,
        "lora_r": 1,
        "gpus": 1,
        "preprocessing_num_workers": 1,
        "num_samples": 0,
        "logging_steps": 0,
        "lr_scaling_base_batch_size": 1,
        "max_restarts": 0,
        "max_nan_steps": 1,
        "save_every_minutes": 0,
        "hang_timeout": 0,
    }
    for name, low in at_least.items():
        value = settings.values.get(name)
        if value is not None and value < low:
            raise UserError(f"--{name} is {value}: it must be {low} or more.")
    if (limit := settings.memory_limit) is not None and not 0 < limit < math.inf:
        raise UserError(f"--memory_limit is {limit}: it must be a number of GiB above 0.")
    if not 0 <= settings.eval_fraction < 1:
        raise UserError(f"--eval_fraction is {settings.eval_fraction}: it must be at least 0 and below 1.")
    for pair in settings.columns or []:
        if pair.count("=") != 1 or not all(pair.split("=")):
            raise UserError(f"--columns {pair}: must be ours=theirs, e.g. prompt=question.")
    for name in [n for n in settings.values if n.endswith("_fraction") and n != "eval_fraction"]:
        if not 0 <= settings.values[name] <= 1:
            raise UserError(f"--{name} is {settings.values[name]}: it must be from 0 to 1.")
    if settings.gpus and settings.gpus != settings.world_size:
        raise UserError(
            f"--gpus asks for {settings.gpus} processes, but this job has {settings.world_size}: start it with "
            f"`make {settings.recipe} GPUS={settings.gpus}` or `torchrun --nproc_per_node {settings.gpus}`."
        )
    if settings.bf16 and settings.fp16:
        raise UserError("--bf16 and --fp16 are both on: choose one.")


def _one_shuffle_seed(settings: Settings) -> None:
    """--shuffle_seed and transformers' --data_seed are one argument with two names."""
    ours, theirs = settings.shuffle_seed, settings.data_seed
    if None not in (ours, theirs) and ours != theirs:
        raise UserError(
            f"--shuffle_seed {ours} ({settings.source['shuffle_seed']}) and --data_seed {theirs} "
            f"({settings.source['data_seed']}) are two names of one argument; leave one of them out."
        )
    given, other = ("shuffle_seed", "data_seed") if theirs is None else ("data_seed", "shuffle_seed")
    settings.values[other], settings.source[other] = settings.values[given], settings.source[given]


def _hang_before_collectives(settings: Settings) -> None:
    """Let --hang_timeout follow a --ddp_timeout that the user has set: the supervisor keeps every rank's stack."""
    limit = settings.ddp_timeout
    if settings.source["ddp_timeout"] != "transformers default" and settings.source["hang_timeout"] == "default":
        why = f"before collectives give up (--ddp_timeout {limit})"
        decide(settings, "hang_timeout", max(limit - 60.0, limit / 2), why)


def _fill_defaults(settings: Settings) -> None:

    if settings.model is None:
        settings.values["model"] = str(TINY / "model")
        settings.source["model"] = "bundled task"
    if settings.data is None and settings.source["model"] != "bundled task":
        raise UserError("--model is given but --data is not: name the rows to train on with --data.")
    if settings.zero == "auto" and not settings.values.get("deepspeed"):  # else the file says the stage
        if offload.asked(settings):
            decide(settings, "zero", "3", f"--{offload.asked(settings)[0]} needs it")
        elif settings.offload == "none":
            stage = "0" if settings.world_size == 1 else "2"
            decide(settings, "zero", stage, f"{settings.world_size} process{'es' * (settings.world_size > 1)}")
        else:
            stage = "3" if settings.offload == "all" else "2"
            decide(settings, "zero", stage, f"the lowest stage that can offload {settings.offload}")
    if not settings.use_cpu and settings.planned_gpu is None and not devices.torch_sees_some():
        if why := devices.why_torch_sees_none():
            raise UserError(f"{why}; or train on the CPU with --use_cpu true.")
        decide(settings, "use_cpu", True, "no GPU is visible to PyTorch")
    if settings.use_cpu:
        settings.values |= {"dataloader_pin_memory": False, "ddp_backend": "gloo"}
        settings.source |= {"dataloader_pin_memory": "decided", "ddp_backend": "decided"}
    has_eval = bool(settings.eval_data or settings.eval_fraction)
    if has_eval and settings.source["eval_strategy"] == "transformers default":
        decide(settings, "eval_strategy", "epoch", "there are eval rows")


def _choose_precision(settings: Settings) -> None:
    """bf16 where the hardware has it, fp16 on GPUs that do not, fp32 on the CPU; a flag or the JSON decides first."""
    named = {"bf16", "fp16"} & {k for k, s in settings.source.items() if s != "transformers default"}
    gpu, has_bf16 = _gpu(settings)
    if settings.bf16 and not settings.use_cpu and not has_bf16:
        raise UserError("--bf16: this GPU has no bf16 arithmetic; use --fp16 true, or leave both out.")
    if settings.fp16 and settings.use_cpu and settings.deepspeed is None:
        raise UserError("--fp16 with stage 0 needs a GPU (its loss scaler does); use --bf16 true on the CPU.")
    if settings.fp16 and settings.use_cpu:
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            raise UserError("--fp16 true: this CPU has no fp16 arithmetic; use --bf16 true, or leave both out.")
    if settings.deepspeed is None and settings.recipe == "sft" and settings.dtype == "float16" and settings.fp16:
        raise UserError(
            "--dtype float16 --fp16 true with stage 0: the loss scaler needs fp32 weights; use --dtype auto."
        )
    if named:
        return
    if settings.pure_bf16:
        decide(settings, "bf16", True, "--pure_bf16")
    elif settings.use_cpu:
        settings.decisions.append("precision fp32: exact, and the fast one for small models on a CPU (--bf16 true)")
    elif has_bf16:
        decide(settings, "bf16", True, f"{gpu} has bf16 arithmetic")
    else:
        decide(settings, "fp16", True, f"{gpu} has no bf16 arithmetic; loss scaling is on")


def _gpu(settings: Settings) -> tuple[str, bool]:
    """(name, whether it has bf16 arithmetic) of the GPU that the run is for."""
    import torch

    if settings.use_cpu:
        return "CPU", True
    if settings.planned_gpu is not None:
        return settings.planned_gpu.device_name, settings.planned_gpu.bf16
    return torch.cuda.get_device_name(), torch.cuda.is_bf16_supported(including_emulation=False)


def _solve_batch(settings: Settings) -> None:
    names = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    open_sources = {"transformers default", "default", "bundled task"}
    fixed = [None if settings.source[n] in open_sources else settings.values[n] for n in names]
    max_micro = batch.DEFAULT_MAX_MICRO_BATCH
    if settings.source[names[0]] == "bundled task" and fixed[1:] == [None, None]:
        ranks = settings.world_size
        fixed[0] = max(1, round(settings.effective_batch_size / ranks)) * ranks  # nobody asked for 32 exactly
        max_micro = settings.per_device_train_batch_size
    solved = batch.solve(*fixed, settings.world_size, max_micro)
    for name, was, value in zip(names, fixed, solved, strict=True):
        settings.values[name] = value
        settings.source[name] = settings.source[name] if was is not None else "decided"
    effective, micro, accumulation = solved
    if fixed[0] is None and effective == batch.DEFAULT_EFFECTIVE_BATCH_SIZE:
        settings.source[names[0]] = "default"
    settings.decisions.append(
        f"effective batch {effective} = per_device_train_batch_size {micro} x gradient_accumulation_steps "
        f"{accumulation} x {settings.world_size} rank{'s' * (settings.world_size > 1)}"
    )


def _scale_learning_rate(settings: Settings) -> None:
    factor = batch.learning_rate_factor(
        settings.lr_scaling, settings.effective_batch_size, settings.lr_scaling_base_batch_size
    )
    if settings.lr_scaling != "none":
        was = settings.learning_rate
        why = f"{was:g} x {factor:.4g} (--lr_scaling {settings.lr_scaling}: effective batch "
        why += f"{settings.effective_batch_size} against {settings.lr_scaling_base_batch_size})"
        decide(settings, "learning_rate", was * factor, why)
