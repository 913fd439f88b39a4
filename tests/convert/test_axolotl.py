"""Files of axolotl 0.19: what they train there is what the converted file trains here."""

import pytest
from converted import Case, check

CASES = [
    Case(
        "qlora with packing",
        """
base_model: NousResearch/Llama-3.2-1B
model_type: LlamaForCausalLM
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
output_dir: ./outputs/qlora-out
adapter: qlora
sequence_len: 2048
sample_packing: true
eval_sample_packing: true
pad_to_sequence_len: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
loss_watchdog_threshold: 5.0
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
""",
        "lora",
        "lora",
        {
            "model": "NousResearch/Llama-3.2-1B", "load_in_4bit": True, "lora_r": 32, "lora_alpha": 16,
            "lora_dropout": 0.05, "train_on": "assistant", "data": ["teknium/GPT4-LLM-Cleaned"], "eval_fraction": 0.1,
            "lora_target_modules": ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"],
            "max_length": 2048, "packing": True, "truncation": "drop", "effective_batch_size": 8,
            "per_device_train_batch_size": 2, "num_train_epochs": 1, "max_steps": -1, "learning_rate": 2e-4,
            "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "weight_decay": 0.0, "optim": "adamw_8bit",
            "eval_strategy": "steps", "eval_steps": 0.25, "save_strategy": "epoch", "seed": 42, "max_grad_norm": 1.0,
        },
        absent=("bf16", "load_in_8bit"),
        lost=("special_tokens", "pad_to_sequence_len", "loss_watchdog_threshold"),
        on_gpus={"attn_implementation": "flash_attention_2"},
    ),
    Case(
        "all weights on DeepSpeed, everything left out that has a default",
        """
base_model: Qwen/Qwen2.5-7B
datasets:
  - path: data/chats.jsonl
    type: chat_template
    field_messages: dialogue
    roles_to_train: [assistant]
chat_template: qwen_25
learning_rate: 1e-5
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json
bf16: true
num_epochs: 3
saves_per_epoch: 2
optimizer: paged_adamw_8bit
tf32: true
""",
        "sft",
        "sft",
        {
            "max_length": 512, "packing": False, "effective_batch_size": 4, "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1, "learning_rate": 1e-5, "lr_scheduler_type": "cosine", "zero": 3,
            "offload": "all", "warmup_steps": 0.03, "weight_decay": 0.0, "optim": "adamw_8bit", "num_train_epochs": 3,
            "columns": ["messages=dialogue"], "chat_template": "qwen2.5", "train_on": "assistant", "bf16": True,
            "save_strategy": "steps", "save_steps": 0.166667, "save_total_limit": 4, "eval_strategy": "no",
        },
        ranks=4,
        on_gpus={"optim": "paged_adamw_8bit", "tf32": True},
    ),
    Case(
        "DPO of an 8-bit adapter, the GPUs of the original known",
        """
base_model: meta-llama/Meta-Llama-3-8B-Instruct
load_in_8bit: true
chat_template: llama3
rl: dpo
rl_beta: 0.2
datasets:
  - path: fozziethebeat/alpaca_messages_2k_dpo_test
    type: chat_template.default
    field_messages: conversation
    field_chosen: better
    field_rejected: rejected
sequence_len: 4096
adapter: lora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_torch_fused
lr_scheduler: linear
learning_rate: 5e-6
warmup_steps: 10
max_steps: 500
""",
        "dpo",
        "dpo GPUS=8",
        {
            "adapter": "lora", "load_in_8bit": True, "loss_type": "sigmoid", "beta": 0.2, "chat_template": "llama3",
            "columns": ["messages=conversation", "chosen=better"], "max_length": 4096, "lora_r": 32, "lora_alpha": 16,
            "lora_dropout": 0.0, "lora_target_modules": ["all-linear"], "effective_batch_size": 64,
            "gradient_accumulation_steps": 16, "num_train_epochs": 4, "max_steps": 500, "warmup_steps": 10,
            "lr_scheduler_type": "linear", "learning_rate": 5e-6, "optim": "adamw_torch_fused",
        },
        ranks=2,  # 64 = 2 x 16 x 2, where it was 2 x 4 x 8
        gpus=8,
        absent=("gradient_accumulation_steps", "train_on"),
    ),
    Case(
        "several sets, texts, a smallest rate, FSDP",
        """
base_model: mistralai/Mistral-7B-v0.1
datasets:
  - path: roneneldan/TinyStories
    type: completion
    field: story
  - path: wikimedia/wikipedia
    name: 20231101.en
    type: completion
    field: text
learning_rate: 3e-5
lr_scheduler: rex
max_steps: 2000
sequence_len: 8192
sample_packing: true
excess_length_strategy: truncate
micro_batch_size: 4
max_grad_norm: 0.5
adam_beta2: 0.95
weight_decay: 0.1
cosine_min_lr_ratio: 0.1
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
liger_fused_linear_cross_entropy: true
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_offload_params: true
  fsdp_transformer_layer_cls_to_wrap: MistralDecoderLayer
""",
        "sft",
        "sft",
        {
            "data": ['{"path": "roneneldan/TinyStories", "columns": {"text": "story"}}',
                     '{"path": "wikimedia/wikipedia", "config": "20231101.en"}'], "train_on": "all", "max_length": 8192,
            "packing": True, "truncation": "truncate_right", "effective_batch_size": 8, "max_grad_norm": 0.5,
            "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "adam_beta2": 0.95, "weight_decay": 0.1, "zero": 3, "offload": "all", "num_train_epochs": 1,
            "optim": "adamw_torch_fused", "warmup_steps": 60, "max_steps": 2000,
        },
        ranks=2,
        absent=("data_config", "columns"),
        lost=("lr_scheduler",),
        on_gpus={"use_liger_kernel": True},
    ),
    Case(
        "LoRA on the experts too, a part of a split, several GPUs a row",
        """
base_model: Qwen/Qwen3-30B-A3B
plugins: [axolotl.integrations.kernels.KernelsPlugin]
use_sonicmoe: true
nvfp4_merge_aware: true
chat_template_jinja: "{{ messages[0]['content'] }}"
datasets:
  - path: mlabonne/FineTome-100k
    type: chat_template
    split: train[10%:30%]
sequence_len: 32768
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, v_proj]
lora_target_parameters: [experts.gate_up_proj, experts.down_proj]
context_parallel: {size: 4, backend: auto}
micro_batch_size: 2
gradient_accumulation_steps: 3
learning_rate: 1e-5
warmup_steps: 10
adam_eps: 1e-9
lr_quadratic_warmup: true
cls_model_config: AutoConfig
""",
        "lora",
        "lora GPUS=4",
        {
            "data": ["mlabonne/FineTome-100k:0.2"], "sp_size": 4, "effective_batch_size": 12, "max_length": 32768,
            "lora_target_modules": ["q_proj", "v_proj"], "chat_template": "ours.jinja", "adam_epsilon": 1e-8,
            "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
        ranks=8,
        absent=("data_split", "max_samples"),
        lost=("plugins: axolotl.integrations.kernels.KernelsPlugin", "adam_eps", "lr_quadratic_warmup",
              "cls_model_config", "nvfp4_merge_aware"),
    ),
    Case(
        "a layer over all GPUs",
        """
base_model: NousResearch/Meta-Llama-3.1-8B
datasets: [{path: a.jsonl, split: "train[:500]"}]
tensor_parallel: 'auto'
micro_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 2e-5
""",
        "sft",
        "sft GPUS=4",
        {"tp_size": 4, "effective_batch_size": 8, "max_samples": 500},
        ranks=4,
        gpus=4,
    ),
    Case(
        "ORPO",
        """
base_model: mistralai/Mistral-7B-v0.1
rl: orpo
orpo_alpha: 0.15
chat_template: qwen3_5
chat_template_kwargs: {enable_thinking: false, real_last_index: 3}
datasets:
  - path: argilla/ultrafeedback-binarized-preferences-cleaned
    type: chat_template.argilla
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 8e-6
optimizer: adamw_torch
""",
        "dpo",
        "dpo",
        {"loss_type": "orpo", "beta": 0.15, "effective_batch_size": 8, "learning_rate": 8e-6, "adapter": None,
         "optim": "adamw_torch", "chat_template": "qwen3.5", "max_length": 4096,
         "chat_template_kwargs": {"enable_thinking": False}},
        lost=("chat_template_kwargs",),
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_trains_the_same(case, tmp_path):
    check(case, tmp_path)
