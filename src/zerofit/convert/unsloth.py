"""The table of the files of `unsloth train --config` (unsloth's studio and command line)."""

from zerofit.convert import shared
from zerofit.convert.conversion import Conversion, Key, Kit, Line, Rule, number, words


def _recipe(done: Conversion) -> None:
    """Choose the recipe from training_type, and write the adapter."""
    kind = done.take("training.training_type", "lora")
    if kind not in ("lora", "qlora", "full"):
        done.refuse(f"training_type: {kind}", "has no counterpart: zerofit trains lora, qlora and full")
    done.choose("sft" if kind == "full" else "lora", "training.training_type")
    key, in_4bit, default = done.named("training.load_in_4bit", True)
    if done.recipe == "sft":
        for key in [key for key in done.unread if key.startswith("lora.")]:
            done.lose(key, "the file has no adapter, so all weights train")
        return
    done.put("load_in_4bit", default if in_4bit is None else in_4bit, key)
    shared.lora(done, {
        "lora_r": done.named("lora.lora_r", 64),
        "lora_alpha": done.named("lora.lora_alpha", 16),
        "lora_dropout": done.named("lora.lora_dropout", 0.0),
    })  # fmt: skip
    key, value, _ = done.named("lora.target_modules")
    shared.targets(done, key, value, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    if done.take("lora.use_rslora"):
        done.put("use_rslora", True, "lora.use_rslora")
    if done.take("lora.use_loftq"):
        done.lose("lora.use_loftq", "init_lora_weights: pissa begins from the base's own directions too")


def _data(done: Conversion) -> None:
    key, value = done.first("data.dataset", "data.local_dataset")
    of = done.take("data.split", "train"), done.take("data.subset")
    shared.data(done, [shared.Source(path, *of) for path in words(value or [])], str(key), split_key="data.split",
                config_key="data.subset")  # fmt: skip
    kind = done.take("data.format_type", "auto")
    if kind not in ("auto", None):
        done.differ(f"format_type: {kind}: formats are detected from the columns (docs/data.md).")
    answers = done.take("training.train_on_completions", False)
    done.put("train_on", "assistant" if answers else "all",
             "training.train_on_completions" if "training.train_on_completions" in done.given else None)  # fmt: skip


def _training(done: Conversion) -> None:
    """Convert batch, steps, warm-up, checkpointing and trackers; unsloth's schedule is linear."""
    shared.batch(done, done.named("training.batch_size", 2), done.named("training.gradient_accumulation_steps", 4))
    shared.steps(done, done.named("training.num_epochs", 3), "training.max_steps")
    key, count, default = done.named("training.warmup_steps", 5)
    ratio = done.take("training.warmup_ratio")
    if ratio and count is None:
        done.put("warmup_steps", ratio, "training.warmup_ratio")
    else:
        done.put("warmup_steps", default if count is None else count, key)
    given = done.take("training.optim")
    shared.optimizer(done, "training.optim" if given else None, given, "adamw_8bit")
    every = number(done.take("training.save_steps", 0))
    done.put("save_strategy", "steps" if every else "no", "training.save_steps" if every else None)
    if every:
        done.put("save_steps", every, "training.save_steps")
        done.put("save_total_limit", 0)
    checkpointing = done.take("training.gradient_checkpointing")
    if checkpointing == "unsloth":
        done.lines["activation_offload"] = Line(True, "training.gradient_checkpointing: unsloth")
    elif checkpointing is not None:
        on = checkpointing not in (False, "none", "false", "False")
        done.put("gradient_checkpointing", on, "training.gradient_checkpointing")
    names = [name for name in ("wandb", "tensorboard") if done.take(f"logging.enable_{name}")]
    shared.report(done, "logging.enable_wandb" if "wandb" in names else "logging.enable_tensorboard", names)
    done.differ("precision: adapters and their optimizer are in fp32 here.")


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
        "training.trust_remote_code": Key("trust_remote_code", values={False: None}),
    },
    rules=(
        Rule("training.training_type training.load_in_4bit", "recipe sft or lora; load_in_4bit", _recipe),
        Rule("lora.lora_r lora.lora_alpha lora.lora_dropout lora.target_modules lora.use_rslora", "the same names",
             note="defaults 64, 16, 0 and the seven matrices of a layer"),
        Rule("data.dataset data.local_dataset data.split training.train_on_completions", "data, data_split, train_on",
             _data, "all tokens are trained by default"),
        Rule("training.batch_size training.gradient_accumulation_steps training.num_epochs training.warmup_steps",
             "per_device_train_batch_size and the same", _training,
             "defaults 2, 4, 3 epochs, 5 steps, adamw_8bit, linear"),
        Rule("logging.enable_wandb logging.enable_tensorboard", "report_to"),
    ),
    lost=shared.NO_COUNTERPART | {
        "images are not trained": "lora.vision_all_linear lora.finetune_vision_layers vision",
        "lora_target_modules names the modules": (
            "lora.finetune_language_layers lora.finetune_attention_modules lora.finetune_mlp_modules"
        ),
        "the project's name is an environment variable (WANDB_PROJECT)": (
            "logging.wandb_* logging.tensorboard_dir logging.hf_token"
        ),
        "what a generation does is said to zerofit chat": "inference",
    },
    meaning=("loss: mean over the trained tokens of the whole step on all GPUs, as in TRL, on which unsloth runs.",),
    nested=True,
    defaults={f"lora.finetune_{what}": True for what in ("language_layers", "attention_modules", "mlp_modules")}
    | {"training.max_steps": 0},
)  # fmt: skip
