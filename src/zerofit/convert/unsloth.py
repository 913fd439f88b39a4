"""The key table for files of `unsloth train --config` (unsloth's studio and command line)."""

from zerofit.convert import shared
from zerofit.convert.conversion import Conversion, Key, Kit, Line, Rule, Shared, number, words


def _recipe(done: Conversion) -> None:
    """Choose the recipe from training_type."""
    kind = done.take("training.training_type", "lora")
    if kind not in ("lora", "qlora", "full"):
        done.refuse(f"training_type: {kind}", "not supported; use lora, qlora or full")
    recipe = done.recipe or ("sft" if kind == "full" else "lora")
    adapter = "" if recipe == "sft" else "lora"
    done.choose(recipe, "training.training_type", adapter=adapter, origin="training.training_type")


def _data(done: Conversion) -> None:
    key, value = done.first("data.dataset", "data.local_dataset")
    split, config = done.take("data.split", "train"), done.take("data.subset")
    shared.data(done, [shared.DataSource(path, split, config) for path in words(value or [])], str(key),
                split_key="data.split", config_key="data.subset")  # fmt: skip
    kind = done.take("data.format_type", "auto")
    if kind not in ("auto", None):
        done.differ(f"format_type: {kind}: the format is detected from the columns (docs/data.md).")


def _training(done: Conversion) -> None:
    """Convert warm-up, saving, checkpointing and trackers; unsloth's schedule is linear."""
    ratio = done.take("training.warmup_ratio")
    if ratio and done.take("training.warmup_steps") is None:
        done.put("warmup_steps", ratio, "training.warmup_ratio")
    shared.optimizer(done, "training.optim", default="adamw_8bit")
    steps = number(done.take("training.save_steps", 0))
    done.put("save_strategy", "steps" if steps else "no", "training.save_steps" if steps else None)
    if steps:
        done.put("save_steps", steps, "training.save_steps")
        done.put("save_total_limit", 0)
    checkpointing = done.take("training.gradient_checkpointing")
    if checkpointing == "unsloth":
        done.lines["activation_offload"] = Line(True, "training.gradient_checkpointing: unsloth")
    elif checkpointing is not None:
        enabled = checkpointing not in (False, "none", "false", "False")
        done.put("gradient_checkpointing", enabled, "training.gradient_checkpointing")
    names = [name for name in ("wandb", "tensorboard") if done.take(f"logging.enable_{name}")]
    shared.write_trackers(done, "logging.enable_wandb" if "wandb" in names else "logging.enable_tensorboard", names)
    done.differ("precision: adapters and their optimizer states are kept in fp32.")


MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

KIT = Kit(
    name="unsloth",
    version="2026.10.9",
    marks=(
        "training.training_type", "training.max_seq_length", "training.random_seed", "training.batch_size",
        "lora.lora_r", "data.dataset", "data.local_dataset", "data.format_type", "logging.enable_wandb",
        "training.train_on_completions",
    ),
    keys={
        "model": Key("model"),
        "model_revision": Key("model_revision"),
        "training.output_dir": Key("output_dir", default="outputs"),
        "training.max_seq_length": Key("max_length", default=2048),
        "training.learning_rate": Key("learning_rate", default=2e-4),
        "training.weight_decay": Key("weight_decay", default=0.01),
        "training.lr_scheduler_type": Key("lr_scheduler_type", default="linear"),
        "training.max_grad_norm": Key("max_grad_norm", default=1.0),
        "training.random_seed": Key("seed", default=3407),
        "training.packing": Key("packing", default=False),
        "training.trust_remote_code": Key("trust_remote_code", skip_off=True),
        "training.num_epochs": Key("num_train_epochs", default=3),
        "training.max_steps": Key("max_steps", values={-1: None, 0: None}),
        "training.warmup_steps": Key("warmup_steps", default=5),
        "training.train_on_completions": Key("train_on", default=False, values={True: "assistant", False: "all"}),
        "training.load_in_4bit": Key("load_in_4bit", default=True, only="adapter"),
        "lora.lora_r": Key("lora_r", default=64, only="adapter"),
        "lora.lora_alpha": Key("lora_alpha", default=16, only="adapter"),
        "lora.lora_dropout": Key("lora_dropout", default=0.0, only="adapter"),
        "lora.target_modules": Key("lora_target_modules", default=MATRICES, only="adapter", read=shared.modules),
        "lora.use_rslora": Key("use_rslora", only="adapter", skip_off=True),
    },
    rules=(
        Rule("training.training_type", "recipe sft or lora", _recipe),
        Rule("data.dataset data.local_dataset data.split data.subset", "data, data_split, data_config", _data),
        Shared("training.batch_size training.gradient_accumulation_steps",
               "per_device_train_batch_size, gradient_accumulation_steps", shared.batch, "defaults 2 and 4"),
        Rule("training.warmup_ratio training.optim training.save_steps training.gradient_checkpointing",
             "warmup_steps, optim, save_steps, gradient_checkpointing, activation_offload", _training,
             "default adamw_8bit"),
        Rule("logging.enable_wandb logging.enable_tensorboard", "report_to"),
    ),
    lost=shared.NO_COUNTERPART | {
        "init_lora_weights: pissa is an alternative": "lora.use_loftq",
        "images are not trained": "lora.vision_all_linear lora.finetune_vision_layers vision",
        "set lora_target_modules": (
            "lora.finetune_language_layers lora.finetune_attention_modules lora.finetune_mlp_modules"
        ),
        "set the project with an environment variable (WANDB_PROJECT)": (
            "logging.wandb_* logging.tensorboard_dir logging.hf_token"
        ),
        "set generation options in zerofit chat": "inference",
    },
    meaning=("loss: mean over the trained tokens of a step on all GPUs, as in TRL, on which unsloth is built.",),
    nested=True,
    defaults={f"lora.finetune_{part}": True for part in ("language_layers", "attention_modules", "mlp_modules")}
    | {"training.max_steps": 0, "training.batch_size": 2, "training.gradient_accumulation_steps": 4},
)  # fmt: skip
