"""A training script as users write them, for benchmarks/startup.py: transformers' Trainer, or TRL's with --trl.

torchrun --nproc_per_node 2 benchmarks/startup_peer.py --output_dir x --deepspeed zero2.json [--trl]
"""

import argparse

import deepspeed
from datasets import load_dataset
from sitecustomize import mark  # startup_marks
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
for name in ("--model", "--data", "--output_dir", "--deepspeed"):
    parser.add_argument(name)
parser.add_argument("--trl", action="store_true")
options = parser.parse_args()
if options.trl:
    import trl
mark("rank imported")


class Marks(TrainerCallback):
    def on_train_begin(self, *args, **kwargs):
        mark("trainer built")

    def on_step_end(self, *args, **kwargs):
        mark("first step")


tokenizer = AutoTokenizer.from_pretrained(options.model)
rows = load_dataset("json", data_files=options.data, split="train")


def tokenized(row):
    ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)["input_ids"]
    return {"input_ids": ids}


def collate(batch):
    padded = tokenizer.pad([{"input_ids": row["input_ids"]} for row in batch], return_tensors="pt")
    padded["labels"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
    return padded


if not options.trl:
    rows = rows.map(tokenized, remove_columns=rows.column_names)
mark("data read")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles an op that training does not use
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
shared = {
    "output_dir": options.output_dir, "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-4,
    "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False, "deepspeed": options.deepspeed,
    "optim": "adamw_torch",
}  # fmt: skip
arguments = trl.SFTConfig(**shared) if options.trl else TrainingArguments(**shared, remove_unused_columns=False)
mark("group opened")
model = AutoModelForCausalLM.from_pretrained(options.model)
mark("model loaded")
more = {"processing_class": tokenizer} | ({} if options.trl else {"data_collator": collate})
make = trl.SFTTrainer if options.trl else Trainer
make(model=model, args=arguments, train_dataset=rows, callbacks=[Marks()], **more).train()
