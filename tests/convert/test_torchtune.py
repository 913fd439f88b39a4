"""Files of torchtune 0.6.1: what they train there is what the converted file trains here."""

from dataclasses import replace

import pytest
from converted import Case, check

from zerofit.base.errors import UserError
from zerofit.tools import convert

REST = """
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /tmp/Llama/original/tokenizer.model
  max_seq_len: 4096
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: ${base_dir}/Llama
  checkpoint_files: [model-00001-of-00001.safetensors]
  output_dir: ${output_dir}
  model_type: LLAMA3
base_dir: /models
output_dir: /tmp/out
shuffle: True
device: cuda
dtype: bf16
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
log_every_n_steps: 1
"""

CASES = [
    Case(
        "all weights without a schedule",
        """
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
dataset:
  _component_: torchtune.datasets.alpaca_dataset
  packed: False
seed: null
batch_size: 2
epochs: 3
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5
  fused: True
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
max_steps_per_epoch: null
clip_grad_norm: null
gradient_accumulation_steps: 8
enable_activation_checkpointing: True
""" + REST,
        "sft",
        "sft",
        {
            "model": "/models/Llama", "data": ["tatsu-lab/alpaca"], "train_on": "all", "effective_batch_size": 16,
            "learning_rate": 2e-5, "weight_decay": 0.01, "lr_scheduler_type": "constant", "warmup_steps": 0,
            "max_grad_norm": 0, "num_train_epochs": 3, "optim": "adamw_torch", "pure_bf16": True, "max_length": 4096,
            "packing": False, "gradient_checkpointing": True, "logging_steps": 1,
        },
        absent=("seed", "max_steps"),
    ),
    Case(
        "LoRA on attention and MLP, packed",
        """
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: json
  data_files: my_chats.json
  conversation_column: dialogue
  conversation_style: sharegpt
  packed: True
seed: 7
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  weight_decay: 0.1
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
epochs: 1
max_steps_per_epoch: 25
gradient_accumulation_steps: 4
clip_grad_norm: 1.0
""" + REST,
        "lora",
        "lora",
        {
            "lora_target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "lora_r": 8,
            "lora_alpha": 16, "lora_dropout": 0.0, "data": ["my_chats.json"], "columns": ["messages=dialogue"],
            "packing": True, "train_on": "assistant", "seed": 7, "effective_batch_size": 32, "max_steps": 25,
            "lr_scheduler_type": "cosine", "warmup_steps": 100, "weight_decay": 0.1, "learning_rate": 3e-4,
            "max_grad_norm": 1.0, "bf16": True,
        },
        ranks=4,
        absent=("pure_bf16",),
    ),
    Case(
        "QDoRA on instructions",
        """
model:
  _component_: torchtune.models.llama3.lora_llama3_8b
  lora_attn_modules: [q_proj, k_proj]
  apply_lora_to_mlp: False
  lora_rank: 16
  lora_alpha: 32
  use_dora: True
  quantize_base: True
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: org/tasks
  column_map: {input: question, output: answer}
  split: train[:10%]
batch_size: 4
optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 1e-4}
epochs: 2
""" + REST,
        "lora",
        "lora",
        {"load_in_4bit": True, "use_dora": True, "lora_r": 16, "lora_alpha": 32, "optim": "adamw_8bit",
         "lora_target_modules": ["q_proj", "k_proj"], "columns": ["prompt=question", "completion=answer"],
         "effective_batch_size": 4, "weight_decay": 0.01, "data": ["org/tasks:0.1"]},
        on_gpus={"optim": "paged_adamw_8bit"},
    ),
    Case(
        "DPO of an adapter",
        """
model:
  _component_: torchtune.models.llama2.lora_llama2_7b
  lora_attn_modules: [q_proj, v_proj]
  lora_rank: 8
  lora_alpha: 16
dataset:
  _component_: torchtune.datasets.stack_exchange_paired_dataset
batch_size: 4
optimizer: {_component_: torch.optim.AdamW, fused: True, weight_decay: 0.05, lr: 5e-4}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.2, label_smoothing: 0.1}
epochs: 1
gradient_accumulation_steps: 8
""" + REST,
        "dpo",
        "dpo",
        {"adapter": "lora", "beta": 0.2, "label_smoothing": 0.1, "loss_type": "sigmoid", "effective_batch_size": 64,
         "data": ["lvwerra/stack-exchange-paired"], "lora_target_modules": ["q_proj", "v_proj"],
         "columns": ["prompt=question", "chosen=response_j", "rejected=response_k"], "learning_rate": 5e-4},
        ranks=2,
    ),
    Case(
        "an early version, no length: a row too long ends the run, SGD without decay",
        """
model: {_component_: torchtune.models.llama2.llama2_7b}
dataset: {_component_: torchtune.datasets.AlpacaDataset, train_on_input: True}
batch_size: 2
epochs: 3
optimizer: {_component_: torch.optim.SGD, lr: 2e-5}
run_generation: 1
enable_fsdp: True
cpu_offload: True
""" + REST.replace("max_seq_len: 4096", "max_seq_len: null"),
        "sft",
        "sft",
        {"data": ["tatsu-lab/alpaca"], "train_on": "all", "truncation": "error", "optim": "sgd", "weight_decay": 0.0,
         "zero": 3, "offload": "all", "effective_batch_size": 4, "num_train_epochs": 3},
        absent=("max_length",),
        ranks=2,
    ),
    Case(
        "several sets on tensor-parallel ranks",
        """
model: {_component_: torchtune.models.llama3_1.llama3_1_70b}
dataset:
  - {_component_: torchtune.datasets.text_completion_dataset, source: text, data_files: a.txt, column: text}
  - {_component_: torchtune.datasets.text_completion_dataset, source: org/texts, column: text, packed: True}
batch_size: 16
optimizer: {_component_: torch.optim.AdamW, lr: 2e-5}
tensor_parallel_dim: 2
tensor_parallel_plan: {_component_: torchtune.models.llama3.base_llama_tp_plan}
""" + REST,
        "sft",
        "sft GPUS=2",
        {"data": ["a.txt", "org/texts"], "tp_size": 2, "effective_batch_size": 32, "train_on": "all", "packing": True},
        ranks=4,
    ),
]  # fmt: skip


ON_4 = replace(CASES[-1], name="ranks that share a row are one in its effective batch", gpus=4, command="sft GPUS=4")


@pytest.mark.parametrize("case", [*CASES, ON_4], ids=lambda case: case.name)
def test_it_trains_the_same(case, tmp_path):
    check(case, tmp_path)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "text, word",
    [
        ("model: {_component_: torchtune.models.llama3_2_vision.llama3_2_vision_11b}\nbatch_size: 1\n", "on text"),
        ("policy_model: {_component_: a.b}\nmodel: {_component_: a.b}\n", "PPO"),
        ("model: {_component_: torchtune.models.llama3.llama3_8b}\n", "trains nothing"),
        ("lr_scheduler: cosine_with_warmup\nnum_warmup_steps: 9\nmodel_checkpoint: a\nmodel: b\n", "before 0.1"),
    ],
)
def test_a_job_that_nothing_here_trains_is_refused(text, word, tmp_path):
    file = tmp_path / "theirs.yaml"
    rest = REST if word != "trains nothing" else "tokenizer: {_component_: a.b}\n"
    file.write_text(text + ("optimizer: {_component_: torch.optim.AdamW}\n" * (rest == REST)) + rest)
    with pytest.raises(UserError, match=word):
        convert.convert_files([str(file)])
