"""Files of `unsloth train --config`: what they train there is what the converted file trains here."""

import pytest
from converted import Case, check

LOGGING = """
logging:
  enable_wandb: false
  wandb_project: unsloth-training
  enable_tensorboard: false
"""

CASES = [
    Case(
        "LoRA on all tokens",
        """
model: unsloth/Qwen2.5-0.5B
data:
  dataset: tatsu-lab/alpaca
  format_type: auto
training:
  training_type: lora
  max_seq_length: 2048
  load_in_4bit: true
  output_dir: outputs
  num_epochs: 1
  learning_rate: 0.0002
  batch_size: 2
  gradient_accumulation_steps: 4
  warmup_steps: 5
  max_steps: 0
  save_steps: 0
  weight_decay: 0.01
  random_seed: 3407
  packing: false
  train_on_completions: false
  gradient_checkpointing: "unsloth"
lora:
  lora_r: 64
  lora_alpha: 16
  lora_dropout: 0.0
  target_modules: "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
  use_rslora: false
  use_loftq: false
  finetune_vision_layers: true
""" + LOGGING,
        "lora",
        "lora",
        {
            "load_in_4bit": True, "lora_r": 64, "lora_alpha": 16, "lora_dropout": 0.0, "data": ["tatsu-lab/alpaca"],
            "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "train_on": "all", "effective_batch_size": 8, "num_train_epochs": 1, "max_steps": -1, "warmup_steps": 5,
            "optim": "adamw_8bit", "lr_scheduler_type": "linear", "weight_decay": 0.01, "seed": 3407,
            "learning_rate": 2e-4, "max_length": 2048, "save_strategy": "no", "activation_offload": True,
        },
        lost=("lora.finetune_vision_layers",),
    ),
    Case(
        "all weights, few steps, the adapter's section not in use",
        """
model: unsloth/Llama-3.2-1B
data: {local_dataset: [a.jsonl, b.jsonl]}
training:
  training_type: full
  load_in_4bit: false
  max_seq_length: 4096
  batch_size: 1
  max_steps: 30
  save_steps: 10
  learning_rate: 1e-5
  packing: true
  train_on_completions: true
  gradient_checkpointing: none
lora: {lora_r: 64, lora_alpha: 16}
""" + LOGGING,
        "sft",
        "sft",
        {
            "data": ["a.jsonl", "b.jsonl"], "train_on": "assistant", "effective_batch_size": 8, "max_steps": 30,
            "save_strategy": "steps", "save_steps": 10, "learning_rate": 1e-5, "packing": True, "max_length": 4096,
            "gradient_checkpointing": False, "optim": "adamw_8bit",
        },
        ranks=2,
    ),
    Case(
        "what is left out",
        "model: unsloth/Qwen3-4B\ntraining: {training_type: lora, random_seed: 1}\ndata: {dataset: a.jsonl}\n",
        "lora",
        "lora",
        {"load_in_4bit": True, "lora_r": 64, "lora_alpha": 16, "learning_rate": 2e-4, "seed": 1, "max_length": 2048,
         "effective_batch_size": 8, "num_train_epochs": 3, "warmup_steps": 5, "weight_decay": 0.01},
    ),
    Case(
        "16-bit LoRA with a rank-stabilized scale and a ratio",
        """
model: unsloth/gemma-3-1b-it
data: {dataset: org/chats, split: train_sft, subset: en}
training: {training_type: lora, load_in_4bit: false, warmup_ratio: 0.1, num_epochs: 2, optim: adamw_torch}
lora: {lora_r: 16, lora_alpha: 32, use_rslora: true, target_modules: all-linear}
""",
        "lora",
        "lora GPUS=2",
        {"load_in_4bit": False, "use_rslora": True, "warmup_steps": 0.1, "num_train_epochs": 2, "optim": "adamw_torch",
         "data_split": "train_sft", "data_config": "en", "lora_target_modules": ["all-linear"],
         "effective_batch_size": 16},
        gpus=2,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_trains_the_same(case, tmp_path):
    check(case, tmp_path)
