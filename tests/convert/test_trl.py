"""Files of TRL 1.16 and of the alignment handbook: what they train there is what the converted file trains here."""

import pytest
from converted import Case, check

from zerofit.base.errors import UserError
from zerofit.tools import convert

CASES = [
    Case(
        "SFT with little said",
        """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
output_dir: Qwen2.5-0.5B-SFT
""",
        "sft",
        "sft",
        {
            "learning_rate": 2e-5, "effective_batch_size": 8, "per_device_train_batch_size": 8, "num_train_epochs": 3,
            "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0, "optim": "adamw_torch_fused",
            "max_length": 1024, "packing": False, "train_on": "all", "save_steps": 500, "save_total_limit": 0,
            "eval_strategy": "no", "truncation": "truncate_right", "max_grad_norm": 1.0,
        },
    ),
    Case(
        "LoRA on the answers, packed",
        """
model_name_or_path: meta-llama/Llama-3.2-3B
dataset_name: HuggingFaceTB/smoltalk
dataset_config: everyday-conversations
use_peft: true
lora_r: 32
lora_target_modules: all-linear
assistant_only_loss: true
packing: true
max_length: 4096
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 2.0e-4
warmup_ratio: 0.03
lr_scheduler_type: cosine
eval_strategy: steps
eval_steps: 100
dataset_test_split: test
attn_implementation: flash_attention_2
torch_dtype: bfloat16
""",
        "lora",
        "lora",
        {
            "lora_r": 32, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["all-linear"],
            "data_config": "everyday-conversations", "train_on": "assistant", "packing": True, "max_length": 4096,
            "effective_batch_size": 32, "warmup_steps": 0.03, "eval_strategy": "steps", "eval_steps": 100,
        },
        ranks=2,
        lost=("torch_dtype",),
        on_gpus={"attn_implementation": "flash_attention_2"},
    ),
    Case(
        "DPO with QLoRA and peft's default modules",
        """
model_name_or_path: alignment-handbook/zephyr-7b-sft-qlora
torch_dtype: bfloat16
use_peft: true
load_in_4bit: true
lora_r: 128
lora_alpha: 128
dataset_name: HuggingFaceH4/ultrafeedback_binarized
dataset_train_split: train_prefs
beta: 0.01
loss_type: sigmoid_norm
max_length: 1024
max_prompt_length: 512
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
learning_rate: 5.0e-6
optim: paged_adamw_32bit
save_strategy: "no"
""",
        "dpo",
        "dpo",
        {
            "adapter": "lora", "load_in_4bit": True, "lora_r": 128, "lora_alpha": 128, "lora_dropout": 0.05,
            "lora_target_modules": ["q_proj", "v_proj"], "beta": 0.01, "loss_type": "sigmoid_norm",
            "data_split": "train_prefs", "effective_batch_size": 16, "learning_rate": 5e-6, "max_length": 1024,
            "optim": "adamw_torch_fused", "save_strategy": "no",
        },
        absent=("train_on", "packing", "save_steps"),
        lost=("max_prompt_length",),
        on_gpus={"optim": "paged_adamw_32bit"},
    ),
    Case(
        "a list of sets, ZeRO by accelerate's name",
        """
model_name_or_path: Qwen/Qwen3-1.7B
datasets:
  - path: org/one
    split: train
  - path: json
    data_files: two.jsonl
dataset_num_proc: 4
completion_only_loss: true
max_length: 2048
deepspeed: ds_zero2.json
""",
        "sft",
        "sft",
        {"data": ["org/one", "two.jsonl"], "train_on": "assistant", "zero": 2, "preprocessing_num_workers": 4,
         "effective_batch_size": 16},
        ranks=2,
    ),
    Case(
        "the handbook's mixer",
        """
model_name_or_path: mistralai/Mistral-7B-v0.1
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
chat_template: "{% for message in messages %}{{ message['content'] }}{% endfor %}"
dataset_mixer:
  HuggingFaceH4/ultrachat_200k: 1.0
  org/half: 0.5
dataset_splits:
- train_sft
- test_sft
preprocessing_num_workers: 12
bf16: true
do_eval: true
eval_strategy: epoch
gradient_accumulation_steps: 1
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: False
hub_model_id: zephyr-7b-sft-full
hub_strategy: every_save
learning_rate: 2.0e-05
log_level: info
logging_steps: 5
logging_strategy: steps
lr_scheduler_type: cosine
max_seq_length: 2048
max_steps: -1
num_train_epochs: 1
overwrite_output_dir: true
per_device_eval_batch_size: 8
per_device_train_batch_size: 16
push_to_hub: true
report_to:
- tensorboard_of_nobody
save_strategy: "steps"
save_steps: 100
save_total_limit: 1
seed: 42
warmup_ratio: 0.1
""",
        "sft",
        "sft GPUS=8",
        {
            "data": ["HuggingFaceH4/ultrachat_200k", "org/half:0.5"], "data_split": "train_sft", "bf16": True,
            "effective_batch_size": 128, "num_train_epochs": 1, "max_length": 2048, "warmup_steps": 0.1,
            "lr_scheduler_type": "cosine", "learning_rate": 2e-5, "save_steps": 100, "save_total_limit": 1,
            "train_on": "all", "push_to_hub": True, "hub_strategy": "every_save", "logging_steps": 5,
            "packing": True, "chat_template": "ours.jinja",
        },
        ranks=8,
        gpus=8,
        file="recipes/zephyr/sft/config_full.yaml",
        lost=("report_to", "gradient_checkpointing_kwargs"),
        on_gpus={"attn_implementation": "flash_attention_2"},
    ),
    Case(
        "the handbook's mixture for APO",
        """
model_name_or_path: HuggingFaceTB/SmolLM3-3B
dataset_mixture:
  datasets:
    - id: HuggingFaceTB/smoltalk2
      config: Preference
      split: tulu_no_think
      columns: [chosen, rejected, chat_template_kwargs]
      weight: 0.5
    - id: HuggingFaceTB/smoltalk2
      config: Preference
      split: tulu_think
      columns: [chosen, rejected, chat_template_kwargs]
      weight: 1.0
  seed: 42
  test_split_size: 0.01
loss_type: apo_zero
beta: 0.05
max_length: 24576
padding_free: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
eval_strategy: steps
eval_steps: 200
lr_scheduler_type: cosine
warmup_ratio: 0.1
use_liger_kernel: true
num_train_epochs: 1
""",
        "dpo",
        "dpo",
        {
            "loss_type": "apo_zero", "beta": 0.05, "learning_rate": 1e-6, "max_length": 24576, "eval_fraction": 0.01,
            "eval_strategy": "steps", "eval_steps": 200, "data_config": "Preference", "effective_batch_size": 2,
            "data": ['{"path": "HuggingFaceTB/smoltalk2", "split": "tulu_no_think", "weight": "0.5"}',
                     '{"path": "HuggingFaceTB/smoltalk2", "split": "tulu_think"}'],
            "adapter": None, "warmup_steps": 0.1,
        },
        lost=("dataset_mixture: chat_template_kwargs",),
        on_gpus={"use_liger_kernel": True},
    ),
    Case(
        "the handbook's SFT of an adapter",
        """
model_name_or_path: google/gemma-7b
dataset_mixer: {HuggingFaceH4/deita-10k-v0-sft: 1.0}
dataset_splits: [train_sft, test_sft]
use_peft: true
lora_r: 16
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, k_proj, v_proj, o_proj]
load_in_4bit: true
max_seq_length: 2048
packing: true
learning_rate: 2.0e-04
gradient_accumulation_steps: 2
per_device_train_batch_size: 4
num_train_epochs: 1
""",
        "lora",
        "lora",
        {"load_in_4bit": True, "lora_r": 16, "lora_alpha": 16, "packing": True, "effective_batch_size": 8,
         "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "data_split": "train_sft"},
    ),
    Case(
        "open-r1's SFT on a mixture, with a count of rows to evaluate on and jobs that follow",
        """
model_name_or_path: Qwen/Qwen2.5-Math-7B
attn_implementation: flash_attention_2
dataset_mixture:
  datasets:
    - id: org/maths
      config: all
      split: train[:25%]
      columns: [messages]
      weight: 1.0
    - id: org/code
      config: cpp
      split: train
      columns: [messages]
      weight: 0.5
  test_split_size: 1000
  seed: 0
system_prompt: Think first.
eos_token: <|im_end|>
callbacks: [push_to_hub_revision]
benchmarks: [aime24]
eval_strategy: epoch
gradient_accumulation_steps: 8
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
packing: false
max_grad_norm: 0.2
max_length: 32768
num_train_epochs: 5
per_device_train_batch_size: 2
use_liger: true
warmup_ratio: 0.03
""",
        "sft",
        "sft",
        {
            "data": ['{"path": "org/maths", "config": "all", "weight": "0.25"}',
                     '{"path": "org/code", "config": "cpp", "weight": "0.5"}'],
            "eval_strategy": "no", "effective_batch_size": 16, "packing": False, "max_length": 32768,
            "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        },
        lost=("eval_strategy", "dataset_mixture: test_split_size", "callbacks", "benchmarks", "system_prompt"),
        on_gpus={"attn_implementation": "flash_attention_2", "use_liger_kernel": True},
    ),
    Case(
        "KTO, known by its keys",
        """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/kto-mix-14k
dataset_configs: [plain]
train_split: train[:50%]
max_train_samples: 100
mtp_enabled: true
desirable_weight: 1.33
undesirable_weight: 1.0
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1.0e-06
""",
        "dpo",
        "dpo",
        {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.33, "undesirable_weight": 1.0,
         "effective_batch_size": 8, "learning_rate": 1e-6, "data": ["trl-lib/kto-mix-14k:0.5"], "max_samples": 100,
         "data_config": "plain"},
        absent=("data_split",),
        lost=("mtp_enabled",),
    ),
    Case(
        "the handbook's ORPO, known by its folder",
        """
model_name_or_path: mistralai/Mistral-7B-v0.1
dataset_mixer: {argilla/distilabel-capybara-dpo-7k-binarized: 1.0}
dataset_splits: [train]
beta: 0.05
learning_rate: 5.0e-6
lr_scheduler_type: inverse_sqrt
max_length: 2048
max_prompt_length: 1792
num_train_epochs: 3
optim: adamw_bnb_8bit
per_device_train_batch_size: 4
use_flash_attention_2: true
warmup_steps: 100
""",
        "dpo",
        "dpo",
        {"loss_type": "orpo", "beta": 0.05, "lr_scheduler_type": "inverse_sqrt", "optim": "adamw_8bit",
         "warmup_steps": 100, "effective_batch_size": 4},
        file="recipes/zephyr-141b/orpo/config_full.yaml",
        absent=("packing",),
        on_gpus={"attn_implementation": "flash_attention_2"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_trains_the_same(case, tmp_path):
    check(case, tmp_path)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "line", ["num_generations: 8", "loss_type: [sigmoid, sft]", "lmbda: 0.5", "dataset_mixture: [1]"]
)
def test_other_trainers_and_what_is_no_mapping_are_refused(line, tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(f"model_name_or_path: a/b\ndataset_name: c/d\nbeta: 0.1\n{line}\n")
    with pytest.raises(UserError, match=line.partition(":")[0]):
        convert.convert_files([str(file)])
