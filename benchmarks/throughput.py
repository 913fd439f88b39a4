"""Measure the real tokens a second of a training step: the recipe, other kits, and a hand-written loop.

    python benchmarks/throughput.py --peers .venv-peers/bin/python        # `make bench-peers`; without: no TRL
    python benchmarks/throughput.py --llama_factory .venv-llama-factory/bin/python --swift .venv-swift/bin/python
    python benchmarks/throughput.py --only 'zerofit.*bf16' --rounds 1 --more
    python benchmarks/throughput.py --model 1b/config.json --micro 8      # on a GPU, which is used where there is one

One process, random weights of --model's shape, tokenized rows as long as those of gsm8k, half of each an answer that
is trained on; the same rows in the same order (packs: shuffled), AdamW, weights in fp32 (bf16: autocast), no
checkpointing, every step logged. Packed rows have 1,024 tokens. The loop is the ceiling: the same model and batches
with no trainer around them. Steps are timed at their ends, after --warm_up of them; padding does not count. The cases
are interleaved; each is a process. Writes benchmarks/results/throughput.{json,md}.
"""

import argparse
import functools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import kits
import machine

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 384,
    "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 6,
    "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.02, "dtype": "float32",
}  # fmt: skip

THREADS = len(os.sched_getaffinity(0))  # the cores that this process may use: `taskset -c 0` leaves one

LENGTH = 1024  # of packed rows, and the longest of others

SYSTEMS = {  # the ways of batching that each has
    "hand-written loop": ("padded", "packed"),
    "zerofit": ("padded", "padding-free", "by length", "packed"),
    "transformers Trainer": ("padded",),
    "TRL": ("padded", "packed"),
    "LLaMA-Factory": ("padded",),
    "ms-swift": ("padded",),
}

PYTHONS = {"TRL": "peers", "LLaMA-Factory": "llama_factory", "ms-swift": "swift"}  # the option with each one's Python


def cases(options) -> list[str]:
    systems = [name for name in SYSTEMS if name not in PYTHONS or getattr(options, PYTHONS[name])]
    return [f"{s}, {mode}, {p}" for p in ("fp32", "bf16") for s in systems for mode in SYSTEMS[s]]


# --- model and rows ---


def write_model(folder: Path, config: str) -> None:
    """Save random weights of this config.json's shape with the bundled tokenizer."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(machine.TINY_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors", "generation_config*"))
    (folder / "config.json").write_text(config)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).save_pretrained(folder)


def write_rows(file: Path, count: int) -> None:
    """Write rows of random words with the lengths of gsm8k, of which a tokenizer of 8,192 words makes 166 on average.

    gsm8k's questions and answers have log-normal lengths; a chat template adds some ten tokens. Each word is a token,
    with its space, so that the text of a row has the row's tokens again.
    """
    from transformers import AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(machine.TINY_MODEL), random.Random(0)
    texts = {i: tokenizer.decode([i]) for i in range(len(tokenizer))}
    words = [i for i, text in texts.items() if text[0] == " " and tokenizer.encode(text) == [i]]
    with file.open("w") as out:
        for _ in range(count):
            question, answer = (int(draw.lognormvariate(mean, sd)) for mean, sd in ((4.12, 0.38), (4.35, 0.49)))
            ids = draw.choices(words, k=min(LENGTH, question + answer + 10))
            labels = [-100] * (question + 8) + ids[question + 8 :]
            out.write(json.dumps({"input_ids": ids, "labels": labels[: len(ids)]}) + "\n")


# --- one case, in its own process ---


class Meter:
    """Note the time and the real tokens of every optimizer step."""

    def __init__(self):
        self.tokens, self.steps, self.losses = 0, [], []

    def count(self, inputs) -> None:
        mask = inputs.get("attention_mask")
        padded = mask is not None and mask.dim() == 2
        self.tokens += int(mask.sum()) if padded else inputs["input_ids"].numel()

    def step(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps.append((time.perf_counter(), self.tokens))
        self.tokens = 0

    def watch(self) -> None:
        """Count what any Trainer of transformers trains on."""
        from transformers import Trainer, TrainerCallback

        meter, build, step = self, Trainer.__init__, Trainer.training_step

        class Steps(TrainerCallback):
            def on_step_end(self, *args, **kwargs):
                meter.step()

            def on_log(self, *args, logs, **kwargs):
                if "loss" in logs:
                    meter.losses.append(logs["loss"])

        @functools.wraps(build)  # ms-swift looks at its parameters
        def built(trainer, *args, **kwargs):
            build(trainer, *args, **kwargs)
            trainer.add_callback(Steps())

        def counted(trainer, model, inputs, *args, **kwargs):
            meter.count(inputs)
            return step(trainer, model, inputs, *args, **kwargs)

        Trainer.__init__, Trainer.training_step = built, counted


def shared_arguments(job: dict) -> dict:
    """Return the arguments of transformers that all three trainers have."""
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


def train_zerofit(job: dict, meter: Meter) -> None:
    import runpy

    meter.watch()
    flags = shared_arguments(job) | {
        "model": job["model"], "data": job["rows"], "max_length": LENGTH, "num_samples": 0, "zero": 0,
        "packing": job["mode"] == "packed", "padding_free": job["mode"] in ("packed", "padding-free"),
    }  # fmt: skip
    recipe = str(machine.ROOT / "recipes" / "sft.py")
    sys.argv = [recipe, *(f"--{k}={v}" for k, v in flags.items())]
    runpy.run_path(recipe, run_name="__main__")


def train_transformers(job: dict, meter: Meter) -> None:
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    meter.watch()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.padding_side = "right"
    Trainer(
        AutoModelForCausalLM.from_pretrained(job["model"]),
        TrainingArguments(**shared_arguments(job)),
        DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
        datasets.load_dataset("json", data_files=job["rows"], split="train"),
    ).train()


def train_trl(job: dict, meter: Meter) -> None:
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    meter.watch()
    SFTTrainer(
        AutoModelForCausalLM.from_pretrained(job["model"]),
        SFTConfig(**shared_arguments(job), max_length=LENGTH, packing=job["mode"] == "packed"),
        train_dataset=datasets.load_dataset("json", data_files=job["rows"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    ).train()


def train_loop(job: dict, meter: Meter) -> None:
    """Train with plain torch on the batches that the recipe makes."""
    import torch
    from transformers import AutoModelForCausalLM

    from zerofit.data import batches
    from zerofit.model import attention

    device = "cpu" if job["use_cpu"] else "cuda"
    packed, micro = job["mode"] == "packed", shared_arguments(job)["per_device_train_batch_size"]
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    if packed:
        groups = batches.best_fit_decreasing([len(row["input_ids"]) for row in rows], LENGTH)
        rows = [batches.join([rows[i] for i in group]) for group in groups]
        rows = [rows[i] for i in torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    collate = batches.PackedCollator() if packed else batches.Collator(0)
    attn = attention.register() if packed else "sdpa"
    net = AutoModelForCausalLM.from_pretrained(job["model"], attn_implementation=attn).to(device)
    net.train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
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
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.losses.append(float(total))
        meter.step()


TRAIN = {
    "zerofit": train_zerofit, "transformers Trainer": train_transformers, "TRL": train_trl,
    "LLaMA-Factory": lambda job, meter: kits.train_llama_factory(job, meter, shared_arguments(job)),
    "ms-swift": lambda job, meter: kits.train_swift(job, meter, shared_arguments(job)),
}  # fmt: skip


def worker(job: dict) -> None:
    """Train and print the measurement as the last line."""
    import torch

    job["use_cpu"] = not torch.cuda.is_available()
    meter, result = Meter(), {"peak_flops": peak_flops(job["precision"])}
    TRAIN.get(job["system"], train_loop)(job, meter)
    times, tokens = zip(*meter.steps[job["warm_up"] :], strict=True)
    seconds = times[-1] - meter.steps[job["warm_up"] - 1][0]
    result |= {"tokens_per_second": sum(tokens) / seconds, "losses": meter.losses, "tokens": sum(tokens)}
    print("\n" + json.dumps(result | {"versions": machine.versions()}))


def peak_flops(precision: str) -> float:
    """Return the floating-point operations a second of a square matrix product, the best of five."""
    import torch

    on_gpu = torch.cuda.is_available()
    size, dtype = 8192 if on_gpu else 1024, torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device="cuda" if on_gpu else "cpu").to(dtype) for _ in range(2))
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        for _ in range(4):
            a @ b
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / 4)
    return 2 * size**3 / min(seconds[1:])


def measure(case: str, options, folder: Path) -> dict:
    """Run one case in its own process."""
    system, mode, precision = case.split(", ")
    job = {
        "system": system, "mode": mode, "precision": precision, "model": str(folder / "model"),
        "rows": str(folder / "rows.jsonl"), "steps": options.warm_up + options.steps, "length": LENGTH,
        **{name: getattr(options, name) for name in ("warm_up", "micro", "packs", "accumulation")},
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        job["folder"] = f"{cache}/run"
        python = getattr(options, PYTHONS[system]) if system in PYTHONS else sys.executable
        env = machine.environment(cache, ours=system not in PYTHONS) | {"OMP_NUM_THREADS": str(THREADS)}
        words = [python, str(Path(__file__).resolve()), "--worker", json.dumps(job)]
        process = subprocess.run(words, env=env, capture_output=True, text=True, cwd=machine.ROOT)
    if process.returncode:
        sys.exit(f"{case} failed:\n{process.stdout[-2000:]}{process.stderr[-4000:]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def flops_per_token(config: dict) -> int:
    """Return 6 x the weights that multiply (the head too, not the table of embeddings); attention is left out."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * width * (heads + config["num_key_value_heads"])
    layer = attention + 3 * hidden * config["intermediate_size"]
    return 6 * (config["num_hidden_layers"] * layer + hidden * config["vocab_size"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="python of an environment with TRL")
    parser.add_argument("--llama_factory", help="python of an environment with LLaMA-Factory (kits.py)")
    parser.add_argument("--swift", help="python of an environment with ms-swift (kits.py)")
    parser.add_argument("--model", type=Path, help="config.json of the shape; default: a Llama of 12 M parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="regular expression of the cases, e.g. 'zerofit, packed'")
    parser.add_argument("--more", action="store_true", help="add rounds to those of the result file, if it is of today")
    parser.add_argument("--steps", type=int, default=6, help="that are timed")
    parser.add_argument("--warm_up", type=int, default=2)
    parser.add_argument("--micro", type=int, default=8, help="rows of a micro batch")
    parser.add_argument("--packs", type=int, default=1, help="packed rows of a micro batch")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--name", default="throughput", help="of the result files")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker)

    facts, config = machine.facts(), json.loads(options.model.read_text()) if options.model else SHAPE
    record = (machine.record_of_today(options.name) if options.more else None) or {"cases": {}, "versions": {}}
    record |= {"machine": facts, "config": config, "threads": THREADS}
    record["batches"] = {name: getattr(options, name) for name in ("micro", "packs", "accumulation", "steps")}
    with tempfile.TemporaryDirectory(prefix="zerofit-throughput-") as name:
        folder = Path(name)
        write_model(folder / "model", json.dumps(config))
        count = (options.warm_up + options.steps) * options.accumulation * max(options.micro, 8 * options.packs)
        write_rows(folder / "rows.jsonl", count)
        chosen = [case for case in cases(options) if re.search(options.only, case)]
        for number in range(options.rounds):
            for case in chosen:
                result = measure(case, options, folder)
                system = case.split(", ")[0]
                record["versions"][system if system in PYTHONS else "zerofit"] = result.pop("versions")
                record["cases"].setdefault(case, []).append(result)
                print(f"round {number + 1}, {case}: {result['tokens_per_second']:,.0f} tok/s", flush=True)
                machine.save(options.name, report(record), record, quiet=True)
    print("\n".join(report(record)))
    return None


def report(record: dict) -> list[str]:
    """Return the table as Markdown lines."""
    flops, measured = flops_per_token(record["config"]), record["cases"]
    speed = {case: statistics.median(r["tokens_per_second"] for r in rounds) for case, rounds in measured.items()}
    lines = ["# Tokens a second", "", *machine.describe(record["machine"], record["versions"]), ""]
    sizes = ", ".join(f"{name} {value}" for name, value in record["batches"].items())
    lines += [
        f"{flops / 6e6:.1f} M weights that multiply; {sizes}; {record['threads']} threads. Real tokens a second, "
        "medians of the rounds; the share of the machine is 6 x weights x tokens/s over the best matrix product of "
        "1,024 x 1,024 (GPU: 8,192) in the same process, so it leaves the attention out.",
        "",
        "| | batches | | rounds | tokens/s | lowest to highest | share of the machine | of the loop | last loss |",
        "|---|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for case, rounds in sorted(measured.items(), key=lambda item: item[0].split(", ")[::-1]):
        system, mode, precision = case.split(", ")
        all_speeds = [r["tokens_per_second"] for r in rounds]
        share = speed[case] * flops / max(r["peak_flops"] for r in rounds)
        loop = speed.get(f"hand-written loop, {'packed' if mode == 'packed' else 'padded'}, {precision}")
        of_loop = f"{speed[case] / loop:.0%}" if loop else ""
        lines.append(
            f"| {system} | {mode} | {precision} | {len(rounds)} | **{speed[case]:,.0f}** | {min(all_speeds):,.0f} to "
            f"{max(all_speeds):,.0f} | {share:.0%} | {of_loop} | {rounds[-1]['losses'][-1]:.4f} |"
        )
    return lines


if __name__ == "__main__":
    main()
