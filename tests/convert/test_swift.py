"""Files of ms-swift 4.6 (and 3.x): what they train there is what the converted file trains here."""

import pytest
from converted import Case, check

CASES = [
    Case(
        "LoRA of version 3",
        """
model: Qwen/Qwen2.5-7B-Instruct
train_type: lora
dataset: swift/self-cognition#1000
split_dataset_ratio: 0.0
torch_dtype: bfloat16
attn_impl: flash_attn
num_train_epochs: 5
per_device_train_batch_size: 1
per_device_eval_batch_size: 1
learning_rate: 1e-4
gradient_accumulation_steps: 8
eval_steps: 1000
save_steps: 1000
save_total_limit: 5
logging_steps: 5
warmup_ratio: 0.05
max_length: 2048
dataloader_num_workers: 0
dataset_num_proc: 8
deepspeed: zero3
model_name: swift-bot
model_author: swift
""",
        "lora",
        "lora",
        {
            "lora_r": 8, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["all-linear"], "bf16": True,
            "data": ["swift/self-cognition"], "max_samples": 1000, "effective_batch_size": 32, "learning_rate": 1e-4,
            "lr_scheduler_type": "cosine", "warmup_steps": 0.05, "weight_decay": 0.1, "adam_beta2": 0.95, "zero": 3,
            "num_train_epochs": 5, "optim": "adamw_torch_fused", "truncation": "drop", "max_length": 2048,
            "save_steps": 1000, "save_total_limit": 5, "eval_strategy": "no", "train_on": "assistant",
            "preprocessing_num_workers": 8,
        },
        ranks=4,
        lost=("model_name", "model_author"),
        on_gpus={"attn_implementation": "flash_attention_2"},
    ),
    Case(
        "all weights, the rate and the batch left out",
        """
model: Qwen/Qwen3-8B
tuner_type: full
dataset:
  - data/a.jsonl
  - data/b.jsonl
val_dataset: data/dev.jsonl
max_length: 8192
packing: true
truncation_strategy: left
loss_scale: ignore_empty_think
per_device_train_batch_size: 4
save_steps: 100
use_liger_kernel: true
deepspeed: zero2_offload
""",
        "sft",
        "sft",
        {
            "learning_rate": 1e-5, "effective_batch_size": 16, "per_device_train_batch_size": 4, "packing": True,
            "data": ["data/a.jsonl", "data/b.jsonl"], "eval_data": ["data/dev.jsonl"], "eval_strategy": "steps",
            "eval_steps": 100, "truncation": "truncate_left", "mask_generation_prompt": True, "zero": 2,
            "offload": "optimizer", "num_train_epochs": 3, "warmup_steps": 0, "max_length": 8192,
        },
        ranks=2,
        on_gpus={"use_liger_kernel": True},
    ),
    Case(
        "no length: a row too long ends the run",
        """
model: Qwen/Qwen2.5-7B-Instruct
train_type: lora
target_modules: [q_proj, k_proj, v_proj, o_proj]
dataset: rows.jsonl
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
""",
        "lora",
        "lora",
        {"truncation": "error", "effective_batch_size": 8, "lora_r": 8,
         "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        absent=("max_length",),
    ),
    Case(
        "the batch left out on 8 GPUs",
        "model: Qwen/Qwen3-8B\ntuner_type: lora\ndataset: a.jsonl\nmax_length: 1024\nper_device_train_batch_size: 4\n",
        "lora",
        "lora GPUS=8",
        {"effective_batch_size": 32, "learning_rate": 1e-4},
        gpus=8,
    ),
    Case(
        "QLoRA on long rows, several GPUs a row",
        """
model: Qwen/Qwen3-32B
tuner_type: lora
quant_method: bnb
quant_bits: 4
lora_rank: 64
lora_alpha: 128
lora_dropout: 0
target_modules: [q_proj, k_proj, v_proj, o_proj]
use_rslora: true
dataset: HF::allenai/tulu-3-sft-mixture
loss_scale: all
max_length: 32768
sequence_parallel_size: 2
gradient_accumulation_steps: 4
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: '{"min_lr": 1e-6}'
neftune_noise_alpha: 5
""",
        "lora",
        "lora GPUS=2",
        {
            "load_in_4bit": True, "lora_r": 64, "lora_alpha": 128, "lora_dropout": 0.0, "use_rslora": True,
            "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "sp_size": 2, "effective_batch_size": 8,
            "data": ["allenai/tulu-3-sft-mixture"], "train_on": "all", "max_length": 32768,
            "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6},
            "neftune_noise_alpha": 5.0,
        },
        ranks=4,
    ),
    Case(
        "DPO with an SFT term",
        """
rlhf_type: dpo
model: Qwen/Qwen2.5-3B-Instruct
train_type: lora
dataset: pairs.jsonl
split_dataset_ratio: 0.01
num_train_epochs: 1
per_device_train_batch_size: 4
learning_rate: 1e-4
lora_rank: 8
lora_alpha: 32
target_modules: all-linear
gradient_accumulation_steps: 16
eval_steps: 50
save_steps: 50
max_length: 2048
warmup_ratio: 0.05
rpo_alpha: 0.1
""",
        "dpo",
        "dpo",
        {"adapter": "lora", "loss_type": "sigmoid", "beta": 0.1, "rpo_alpha": 0.1, "effective_batch_size": 64,
         "eval_fraction": 0.01, "eval_strategy": "steps", "eval_steps": 50, "learning_rate": 1e-4, "lora_r": 8},
        absent=("train_on",),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_trains_the_same(case, tmp_path):
    check(case, tmp_path)
