"""Train with the systems of throughput.py: each as it comes from pip, in an environment of its own where it needs one.

The environments that it looks for in --peers, a folder (`make bench-peers` makes the first):

    python -m venv .venv-peers
    .venv-peers/bin/pip install -c constraints.txt torch 'trl==1.16.*' transformers peft deepspeed
    python -m venv .venv-peers/swift && .venv-peers/swift/bin/pip install ms-swift==4.6.0
    python -m venv .venv-peers/llama-factory
    .venv-peers/llama-factory/bin/pip install llamafactory==0.9.5 torch==2.11.0 torchaudio==2.11.0  # newer ones differ

LLaMA-Factory is given the tokens in the form that it keeps its own in, ms-swift their text. Packing needs
FlashAttention in ms-swift, and rows of text in LLaMA-Factory, so both are compared on padded batches. LoRA has rank 16
on every linear layer; in bf16 its frozen base is in bf16 too, in each.
"""

import json
import sys
from pathlib import Path

import machine

# The folder in --peers with the environment of each; the others run in zerofit's own.
ENVIRONMENTS = {"TRL": ".", "LLaMA-Factory": "llama-factory", "ms-swift": "swift"}

LENGTH = 1024  # of packed rows, and the longest of others

RANK, ALPHA = 16, 32  # of LoRA


def shared_arguments(job: dict) -> dict:
    """Return the arguments of transformers that all trainers have."""
    packed = job["mode"] == "packed"
    return {
        "output_dir": job["folder"], "max_steps": job["steps"], "logging_steps": 1, "save_strategy": "no",
        "per_device_train_batch_size": job["packs"] if packed else job["micro"],
        "gradient_accumulation_steps": job["accumulation"], "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        "weight_decay": 0.0, "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "seed": 0,
        # Packs are made longest documents first, so only shuffled ones have the average length.
        "train_sampling_strategy": {"by length": "group_by_length", "packed": "random"}.get(job["mode"], "sequential"),
        "gradient_checkpointing": False, "bf16": job["precision"] == "bf16", "report_to": "none",
        "use_cpu": job["use_cpu"],
    }  # fmt: skip


def train_zerofit(job: dict, meter) -> None:
    import runpy

    meter.watch()
    flags = shared_arguments(job) | {
        "model": job["model"], "data": job["rows"], "max_length": LENGTH, "num_samples": 0, "zero": 0,
        "packing": job["mode"] == "packed", "padding_free": job["mode"] in ("packed", "padding-free"),
    }  # fmt: skip
    if job["method"] == "LoRA":
        flags |= {"lora_r": RANK, "lora_alpha": ALPHA, "lora_target_modules": "all-linear"}
    recipe = str(machine.ROOT / "recipes" / {"full": "sft.py", "LoRA": "lora.py"}[job["method"]])
    sys.argv = [recipe, *(f"--{k}={v}" for k, v in flags.items())]
    runpy.run_path(recipe, run_name="__main__")


def _model(job: dict, **options):
    """Return the model in fp32, or in bf16 where it is LoRA's frozen base."""
    import torch
    from transformers import AutoModelForCausalLM

    frozen_bf16 = job["method"] == "LoRA" and job["precision"] == "bf16"
    dtype = torch.bfloat16 if frozen_bf16 else torch.float32
    return AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, **options)


def _adapter(job: dict):
    """Return peft's configuration, or None for full fine-tuning."""
    if job["method"] != "LoRA":
        return None
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")


def train_transformers(job: dict, meter) -> None:
    import datasets
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    meter.watch()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.padding_side = "right"
    Trainer(
        _model(job),
        TrainingArguments(**shared_arguments(job)),
        DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
        datasets.load_dataset("json", data_files=job["rows"], split="train"),
    ).train()


def train_trl(job: dict, meter) -> None:
    import datasets
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    meter.watch()
    SFTTrainer(
        _model(job),
        SFTConfig(**shared_arguments(job), max_length=LENGTH, packing=job["mode"] == "packed"),
        train_dataset=datasets.load_dataset("json", data_files=job["rows"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        peft_config=_adapter(job),
    ).train()


def train_loop(job: dict, meter) -> None:
    """Train with plain torch on the batches that the recipe makes."""
    import torch

    from zerofit.data import batches
    from zerofit.model import attention

    device = "cpu" if job["use_cpu"] else "cuda"
    packed, micro = job["mode"] == "packed", shared_arguments(job)["per_device_train_batch_size"]
    rows = _rows(job)
    if packed:
        groups = batches.best_fit_decreasing([len(row["input_ids"]) for row in rows], LENGTH)
        rows = [batches.join([rows[i] for i in group]) for group in groups]
        rows = [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    collate = batches.PackedCollator() if packed else batches.Collator(0)
    attn = attention.register() if packed else "sdpa"
    net = _model(job, attn_implementation=attn).to(device)
    if adapter := _adapter(job):
        from peft import get_peft_model

        net = get_peft_model(net, adapter)
    net.train()
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, fused=True)
    taken = iter([rows[i : i + micro] for i in range(0, len(rows), micro)])
    for _ in range(job["steps"]):
        inputs = [collate(next(taken)) for _ in range(job["accumulation"])]
        supervised, total = sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in inputs), 0.0
        for batch in inputs:
            meter.count(batch)
            batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
            with torch.autocast(device, torch.bfloat16, enabled=job["precision"] == "bf16"):
                loss = net(**batch, num_items_in_batch=supervised, use_cache=False).loss
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.losses.append(float(total))
        meter.step()


def _rows(job: dict) -> list[dict]:
    return [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]


def train_llama_factory(job: dict, meter) -> None:
    """Train by its own `run_exp`, with the arguments that a YAML file of its names."""
    import datasets
    from llamafactory.train.tuner import run_exp

    meter.watch()
    rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in _rows(job)]
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(path := f"{job['folder']}-rows")
    arguments = shared_arguments(job)
    names = arguments.keys() - {"gradient_checkpointing", "train_sampling_strategy"}
    adapter = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_target": "all"} if job["method"] == "LoRA" else {}
    run_exp(
        {name: arguments[name] for name in names} | {
            "stage": "sft", "do_train": True, "finetuning_type": job["method"].lower(),
            "model_name_or_path": job["model"],
            "dataset": "tokenized", "tokenized_path": path, "template": "empty", "cutoff_len": LENGTH,
            "disable_shuffling": True, "disable_gradient_checkpointing": True, "flash_attn": "sdpa",
        } | adapter
    )  # fmt: skip


def train_swift(job: dict, meter) -> None:
    """Train by its own `sft_main`, with the flags of `swift sft`."""
    from swift.pipelines import sft_main
    from transformers import AutoTokenizer

    meter.watch()
    tokenizer, texts = AutoTokenizer.from_pretrained(job["model"]), Path(f"{job['folder']}-rows.jsonl")
    with texts.open("w") as file:
        for row in _rows(job):
            begun = row["labels"].count(-100)  # of the answer
            parts = {"user": row["input_ids"][:begun], "assistant": row["input_ids"][begun:]}
            turns = [{"role": role, "content": tokenizer.decode(ids)} for role, ids in parts.items()]
            file.write(json.dumps({"messages": turns}) + "\n")
    frozen_bf16 = job["method"] == "LoRA" and job["precision"] == "bf16"
    arguments = shared_arguments(job) | {
        "model": job["model"], "model_type": "llama", "template": "dummy", "dataset": str(texts),
        "tuner_type": job["method"].lower(), "lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
        "max_length": LENGTH, "attn_impl": "sdpa", "torch_dtype": "bfloat16" if frozen_bf16 else "float32",
        "fp16": False,
        "dataset_shuffle": False, "train_dataloader_shuffle": False, "split_dataset_ratio": 0, "eval_strategy": "no",
        "dataloader_num_workers": 0,
    }  # fmt: skip
    sys.argv = sys.argv[:1]
    sft_main([word for name, value in arguments.items() for word in (f"--{name}", str(value))])


TRAIN = {
    "hand-written loop": train_loop, "zerofit": train_zerofit, "transformers Trainer": train_transformers,
    "TRL": train_trl, "LLaMA-Factory": train_llama_factory, "ms-swift": train_swift,
}  # fmt: skip
