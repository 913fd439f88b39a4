"""Measure the real tokens a second of a training step: the recipe, other kits, and a hand-written loop.

    python benchmarks/throughput.py                                   # with the kits that are in .venv-peers (kits.py)
    python benchmarks/throughput.py --only 'zerofit.*bf16' --rounds 1 --more
    python benchmarks/throughput.py --isa avx2 --more                 # as on a processor without AVX-512
    python benchmarks/throughput.py --model 1b/config.json --micro 8  # on a GPU, which is used where there is one

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

SYSTEMS = {  # the ways of batching that each has
    "hand-written loop": ("padded", "packed"),
    "zerofit": ("padded", "padding-free", "by length", "packed"),
    "transformers Trainer": ("padded",),
    "TRL": ("padded", "packed"),
    "LLaMA-Factory": ("padded",),
    "ms-swift": ("padded",),
}

# Variables with which torch, oneDNN and MKL compute as on a processor that has no more than these instructions.
INSTRUCTION_SETS = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}


def python_of(system: str, peers: Path) -> str | None:
    """Return the Python that trains with this system; None: its environment is not there."""
    if system not in kits.ENVIRONMENTS:
        return sys.executable
    found = peers / kits.ENVIRONMENTS[system] / "bin" / "python"
    return str(found) if found.exists() else None


def cases(options) -> list[str]:
    """Return the cases that can run here, in the order of a round."""
    systems = [name for name in SYSTEMS if python_of(name, options.peers)]
    suffix = "" if options.isa == "native" else f" {options.isa}"
    return [
        f"{system}, {method}, {mode}, {precision}{suffix}"
        for precision in ("fp32", "bf16")
        for method in ("full", "LoRA")
        for system in systems
        for mode in SYSTEMS[system]
        if method == "full" or (system != "transformers Trainer" and mode != "by length")
    ]


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
            ids = draw.choices(words, k=min(kits.LENGTH, question + answer + 10))
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


def worker(job: dict) -> None:
    """Train and print the measurement as the last line."""
    import torch

    job["use_cpu"] = not torch.cuda.is_available()
    meter, result = Meter(), {"peak_flops": peak_flops(job["precision"])}
    kits.TRAIN[job["system"]](job, meter)
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
    system, method, mode, precision = case.split(", ")
    job = {
        "system": system, "method": method, "mode": mode, "precision": precision.split()[0],
        "model": str(folder / "model"),
        "rows": str(folder / "rows.jsonl"), "steps": options.warm_up + options.steps,
        **{name: getattr(options, name) for name in ("warm_up", "micro", "packs", "accumulation")},
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        job["folder"] = f"{cache}/run"
        env = machine.environment(cache, ours=system not in kits.ENVIRONMENTS) | {"OMP_NUM_THREADS": str(THREADS)}
        env |= INSTRUCTION_SETS[options.isa]
        words = [python_of(system, options.peers), str(Path(__file__).resolve()), "--worker", json.dumps(job)]
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
    peers = machine.ROOT / ".venv-peers"
    parser.add_argument("--peers", type=Path, default=peers, help="folder with the other kits' environments (kits.py)")
    parser.add_argument("--model", type=Path, help="config.json of the shape; default: a Llama of 12 M parameters")
    parser.add_argument("--isa", choices=INSTRUCTION_SETS, default="native", help="instructions that all may use")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="regular expression of the cases, e.g. 'zerofit, full'")
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
                record["versions"][system if system in kits.ENVIRONMENTS else "zerofit"] = result.pop("versions")
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
        "medians of the rounds; the share of the machine is 6 x weights x tokens/s (LoRA: 4) over the best matrix "
        "product of 1,024 x 1,024 (GPU: 8,192) in the same process, so it leaves attention and adapters out.",
        "",
        "| | | batches | | rounds | tokens/s | lowest to highest | share of the machine | of the loop | last loss |",
        "|---|---|---|---|---:|---:|---|---:|---:|---:|",
    ]
    for case in sorted(measured, key=lambda name: [name.split(", ")[part] for part in (3, 1, 2, 0)]):
        (system, method, mode, precision), rounds = case.split(", "), measured[case]
        all_speeds = [r["tokens_per_second"] for r in rounds]
        work = flops if method == "full" else flops * 2 // 3
        share = speed[case] * work / max(r["peak_flops"] for r in rounds)
        loop = speed.get(f"hand-written loop, {method}, {'packed' if mode == 'packed' else 'padded'}, {precision}")
        of_loop = f"{speed[case] / loop:.0%}" if loop else ""
        spread, loss = f"{min(all_speeds):,.0f} to {max(all_speeds):,.0f}", rounds[-1]["losses"][-1]
        lines.append(
            f"| {system} | {method} | {mode} | {precision} | {len(rounds)} | **{speed[case]:,.0f}** | {spread} | "
            f"{share:.0%} | {of_loop} | {loss:.4f} |"
        )
    return lines


if __name__ == "__main__":
    main()
