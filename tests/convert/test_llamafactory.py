"""Files of LLaMA-Factory 0.9.5: what they train there is what the converted file trains here."""

import json

import pytest
from converted import Case, check

from zerofit.base.errors import UserError
from zerofit.tools import convert

CASES = [
    Case(
        "LoRA with the template of Llama 3",
        """
### model
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
### output
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
""",
        "lora",
        "lora",
        {
            "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"],
            "data": ["data/identity.json", "data/alpaca_en_demo.json"], "chat_template": "llama3", "max_length": 2048,
            "effective_batch_size": 8, "learning_rate": 1e-4, "num_train_epochs": 3, "lr_scheduler_type": "cosine",
            "warmup_steps": 0.1, "weight_decay": 0.0, "optim": "adamw_torch_fused", "bf16": True, "packing": False,
            "train_on": "assistant", "trust_remote_code": True, "preprocessing_num_workers": 16, "save_steps": 500,
            "ddp_timeout": 180000000, "dataloader_num_workers": 4, "eval_strategy": "no", "max_grad_norm": 1.0,
        },
        lost=("overwrite_cache", "plot_loss", "overwrite_output_dir"),
    ),
    Case(
        "all weights on ZeRO-3 with what is left out",
        """
model_name_or_path: Qwen/Qwen3-4B
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: train.jsonl
eval_dataset: dev.jsonl
template: qwen3
enable_thinking: false
neat_packing: true
mask_history: true
enable_liger_kernel: true
flash_attn: fa2
eval_strategy: steps
eval_steps: 200
max_steps: 1000
use_muon: false
""",
        "sft",
        "sft",
        {
            "zero": 3, "offload": "none", "effective_batch_size": 16, "per_device_train_batch_size": 8,
            "learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0, "max_steps": 1000,
            "num_train_epochs": 3, "packing": True, "train_on": "last_turn", "eval_data": ["dev.jsonl"],
            "eval_strategy": "steps", "eval_steps": 200, "chat_template": "qwen3", "max_length": 2048,
            "chat_template_kwargs": {"enable_thinking": False}, "optim": "adamw_torch_fused",
        },
        ranks=2,
        on_gpus={"use_liger_kernel": True, "attn_implementation": "flash_attention_2"},
    ),
    Case(
        "QLoRA with LoRA+, DoRA and a held-out share",
        """
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
do_train: true
finetuning_type: lora
quantization_bit: 4
quantization_method: bnb
lora_rank: 16
lora_alpha: 64
lora_dropout: 0.1
lora_target: q_proj,v_proj
additional_target: embed_tokens,lm_head
use_dora: true
loraplus_lr_ratio: 16.0
dataset: rows.json
template: qwen
val_size: 0.1
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
eval_strategy: epoch
optim: paged_adamw_8bit
fp16: true
""",
        "lora",
        "lora",
        {
            "load_in_4bit": True, "lora_r": 16, "lora_alpha": 64, "lora_dropout": 0.1, "use_dora": True,
            "lora_target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "lm_head"],
            "loraplus_lr_ratio": 16.0, "chat_template": "qwen2.5", "eval_fraction": 0.1, "eval_strategy": "epoch",
            "effective_batch_size": 8, "optim": "adamw_8bit",
        },
        on_gpus={"optim": "paged_adamw_8bit", "fp16": True},
    ),
    Case(
        "SimPO of an adapter",
        """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: dpo
do_train: true
finetuning_type: lora
lora_target: all
pref_beta: 2.0
pref_loss: simpo
pref_ftx: 0.1
dataset: dpo_en_demo
template: llama3
cutoff_len: 1024
max_samples: 1000
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
warmup_ratio: 0.1
lr_scheduler_type: cosine
""",
        "dpo",
        "dpo",
        {
            "adapter": "lora", "loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "rpo_alpha": 0.1,
            "max_samples": 1000, "max_length": 1024, "lora_r": 8, "lora_alpha": 16, "learning_rate": 5e-6,
            "effective_batch_size": 32,
        },
        ranks=4,
        absent=("train_on",),
    ),
    Case(
        "KTO of an adapter",
        """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: kto
do_train: true
finetuning_type: lora
lora_target: all
pref_beta: 0.2
kto_chosen_weight: 1.5
dataset: kto_en_demo
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
warmup_ratio: 0.1
lr_scheduler_type: cosine
""",
        "dpo",
        "dpo",
        {
            "adapter": "lora", "loss_type": "kto", "beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 1.0,
            "learning_rate": 5e-6, "effective_batch_size": 8,
        },
        absent=("train_on",),
    ),
    Case(
        "several GPUs a row, on Gaudi, with keys that forks have added",
        """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: full
dataset: traces
template: qwen
cutoff_len: 196608
attn: fa2
use_liger_kernel: true
rope_scaling: linear
sequence_parallel_size: 4
sequence_parallel_mode: deepspeed-alst
alst_ulysses_degree: 4
pad_to_multiple_of: 64
include_mfu: true
enable_qat: true
qat_group_size: 32
use_habana: true
dataset_concatenation: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
label_smoothing_factor: 0.05
""",
        "sft",
        "sft GPUS=4",
        {"sp_size": 4, "effective_batch_size": 8, "packing": True, "max_length": 196608,
         "label_smoothing_factor": 0.05, "chat_template": "qwen2.5"},
        ranks=8,
        lost=("rope_scaling", "sequence_parallel_mode", "alst_ulysses_degree", "pad_to_multiple_of", "include_mfu",
              "enable_qat", "qat_group_size", "use_habana"),
        on_gpus={"attn_implementation": "flash_attention_2", "use_liger_kernel": True},
    ),
    Case(
        "further pretraining",
        """
model_name_or_path: Qwen/Qwen2.5-0.5B
stage: pt
finetuning_type: full
dataset: books
dataset_dir: corpora
cutoff_len: 4096
pure_bf16: true
warmup_steps: 20
""",
        "sft",
        "sft",
        {"train_on": "all", "packing": True, "data": ["corpora/books.json"], "pure_bf16": True, "warmup_steps": 20,
         "max_length": 4096},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_trains_the_same(case, tmp_path):
    check(case, tmp_path)


def test_names_of_data_sets_are_looked_up(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(
        json.dumps({
            "mine": {"file_name": "mine_v2.json", "columns": {"prompt": "q", "response": "a", "query": "input"}},
            "hubs": {"hf_hub_url": "org/set", "subset": "en", "split": "train[:1000]"},
        })
    )  # fmt: skip
    file = tmp_path / "theirs.yaml"
    file.write_text("stage: sft\nfinetuning_type: lora\nmodel_name_or_path: a/b\ndataset: mine\n")
    done = convert.convert_files([str(file)])
    assert done.lines["data"].value == [str(tmp_path / "data" / "mine_v2.json")]
    assert done.lines["columns"].value == ["instruction=q", "output=a"]
    assert not [sentence for sentence in done.differences if "dataset_info" in sentence]
    file.write_text("stage: sft\nfinetuning_type: lora\nmodel_name_or_path: a/b\ndataset: hubs\n")
    lines = convert.convert_files([str(file)]).lines
    assert lines["data"].value == ["org/set"] and lines["data_config"].value == "en"
    assert lines["max_samples"].value == 1000 and "data_split" not in lines


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "text, word",
    [
        ("stage: ppo\nfinetuning_type: lora\ndataset: a\n", "stage: ppo"),
        ("stage: sft\nfinetuning_type: freeze\ndataset: a\n", "finetuning_type: freeze"),
        ("export_dir: out\ntemplate: llama3\nmodel_name_or_path: a\nadapter_name_or_path: b\n", "trains nothing"),
        ("model: a\ntemplate: qwen3\ncutoff_len: 10\ntrain_dataset: b.yaml\nmicro_batch_size: 1\n", "v1"),
    ],
)
def test_a_job_that_nothing_here_trains_is_refused(text, word, tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=word):
        convert.convert_files([str(file)], kit="llama-factory")
