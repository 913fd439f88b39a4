"""Train with LLaMA-Factory and with ms-swift as they come from pip: two systems of throughput.py.

Each in an environment of its own, since they pin other versions:

    python -m venv .venv-llama-factory
    .venv-llama-factory/bin/pip install llamafactory==0.9.5 torch==2.11.0 torchaudio==2.11.0  # newer ones do not match
    python -m venv .venv-swift && .venv-swift/bin/pip install ms-swift==4.6.0

LLaMA-Factory is given the tokens in the form that it keeps its own in, ms-swift their text. Packing needs
FlashAttention in ms-swift, and rows of text in LLaMA-Factory, so both are compared on padded batches.
"""

import json
import sys
from pathlib import Path


def _rows(job: dict) -> list[dict]:
    return [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]


def train_llama_factory(job: dict, meter, arguments: dict) -> None:
    """Train by its own `run_exp`, with the arguments that a YAML file of its names."""
    import datasets
    from llamafactory.train.tuner import run_exp

    meter.watch()
    rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in _rows(job)]
    datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(path := f"{job['folder']}-rows")
    names = arguments.keys() - {"gradient_checkpointing", "train_sampling_strategy"}
    run_exp(
        {name: arguments[name] for name in names} | {
            "stage": "sft", "do_train": True, "finetuning_type": "full", "model_name_or_path": job["model"],
            "dataset": "tokenized", "tokenized_path": path, "template": "empty", "cutoff_len": job["length"],
            "disable_shuffling": True, "disable_gradient_checkpointing": True, "flash_attn": "sdpa",
        }
    )  # fmt: skip


def train_swift(job: dict, meter, arguments: dict) -> None:
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
    arguments = arguments | {
        "model": job["model"], "model_type": "llama", "template": "dummy", "tuner_type": "full", "dataset": str(texts),
        "max_length": job["length"], "attn_impl": "sdpa", "torch_dtype": "float32", "fp16": False,
        "dataset_shuffle": False, "train_dataloader_shuffle": False, "split_dataset_ratio": 0, "eval_strategy": "no",
        "dataloader_num_workers": 0,
    }  # fmt: skip
    sys.argv = sys.argv[:1]
    sft_main([word for name, value in arguments.items() for word in (f"--{name}", str(value))])
