"""Compare the losses of zerofit and TRL's SFTTrainer. Same tiny model, same rows in the same order, fp32, padded.

python benchmarks/trl_parity.py --peers .venv-peers/bin/python                      # generated word problems
python benchmarks/trl_parity.py --peers .venv-peers/bin/python --data gsm8k.jsonl   # question/answer rows of yours

`make bench-peers` makes .venv-peers. TRL runs twice: trained on the same tokens (assistant_only_loss), and with its
default for prompt/completion rows, which also trains on what the chat template puts after the answer's end token.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import data
import machine

MASKS = {"assistant_only_loss": True, "completion_only_loss, its default": False}


def word_problems(count: int, seed: int = 0):
    """Return question/answer rows in the style of gsm8k."""
    rng = random.Random(seed)
    for _ in range(count):
        name, thing = (
            rng.choice(["Ada", "Ben", "Chi", "Dana", "Emil"]),
            rng.choice(["apples", "coins", "pens", "books"]),
        )
        a, b, times = rng.randint(2, 60), rng.randint(2, 60), rng.randint(2, 9)
        question = f"{name} has {a} {thing} and buys {b} more."
        answer = f"{name} has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} {thing}.\n"
        if rng.random() < 0.6:
            question += f" Then a friend brings {times} times as many as {name} has now."
            answer += f"The friend brings {times} * {a + b} = <<{times}*{a + b}={times * (a + b)}>>{times * (a + b)}.\n"
            a = times * (a + b)
        question += f" How many {thing} does {name} have at the end?"
        yield {"question": question, "answer": f"{answer}#### {a + b}"}


def shared_arguments(options, folder: str) -> dict:
    """Return transformers' arguments that affect the numbers, the same on both sides."""
    return {
        "output_dir": folder,
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": 1,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 5,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "seed": 0,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "max_length": options.max_length,
    }


def run_zerofit(options, path: Path, folder: str) -> list[dict]:
    """Return the logged steps of recipes/sft.py."""
    flags = [f"--{k}={v}" for k, v in shared_arguments(options, folder).items()]
    flags += ["--model", str(machine.TINY_MODEL), "--data", str(path), "--num_samples", "0"]
    recipe = str(machine.ROOT / "recipes" / "sft.py")
    _run([sys.executable, recipe, *flags], machine.environment(f"{folder}/cache", ours=True))
    entries = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in entries if "loss" in entry]


def run_trl(options, path: Path, folder: str, assistant_only: bool) -> list[dict]:
    """Return the logged steps of SFTTrainer, in its own environment."""
    arguments = shared_arguments(options, folder) | {"assistant_only_loss": assistant_only}
    command = [options.peers, str(Path(__file__).resolve()), "--worker", json.dumps([str(path), arguments])]
    output = _run(command, machine.environment(f"{folder}/cache", ours=False))
    return json.loads(output.strip().splitlines()[-1])


def _run(command: list[str], variables: dict[str, str]) -> str:
    process = subprocess.run(command, env=variables, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{Path(command[1]).name} failed:\n{process.stdout[-2000:]}{process.stderr[-4000:]}")
    return process.stdout


def worker(job: str) -> None:
    """Train in TRL's environment and print the logged steps as the last line."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    path, arguments = json.loads(job)
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(machine.TINY_MODEL, dtype=torch.float32),
        SFTConfig(**arguments),
        train_dataset=datasets.load_dataset("json", data_files=path, split="train"),
        processing_class=AutoTokenizer.from_pretrained(machine.TINY_MODEL),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    print("\n" + json.dumps([{"versions": machine.versions(), **entry} for entry in steps]))


def largest(ours: list[dict], theirs: list[dict], key: str) -> dict:
    """Return the largest relative difference of a logged value, and its step."""
    pairs = enumerate(zip(ours, theirs, strict=True), 1)
    return max(
        ({"step": n, "relative": abs(a[key] - b[key]) / abs(b[key])} for n, (a, b) in pairs),
        key=lambda d: d["relative"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="python of an environment with TRL")
    parser.add_argument("--data", type=Path, help="JSONL of question/answer rows; default: generated word problems")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.worker)
    if not options.peers:
        parser.error("--peers is needed")

    facts, count = machine.facts(), options.steps * options.batch
    with tempfile.TemporaryDirectory() as name:
        rows = list(word_problems(count))
        if options.data:
            with options.data.open(encoding="utf-8") as file:
                rows = [json.loads(line) for line in file if line.strip()][:count]
        path = data.write_jsonl(Path(name) / "rows.jsonl", rows)
        converted = data.write_jsonl(Path(name) / "trl.jsonl", map(data.as_trl, rows))
        ours = run_zerofit(options, path, f"{name}/zerofit")
        theirs = {mask: run_trl(options, converted, f"{name}/{mask[:10]}", on) for mask, on in MASKS.items()}

    title = f"{options.data.parent.name}/{options.data.name}" if options.data else "generated word problems"
    found = {"zerofit": machine.versions()}
    found["trl"] = next(iter(theirs.values()))[0]["versions"]
    lines = ["# Loss parity with TRL's SFTTrainer", "", *machine.describe(facts, found), ""]
    lines.append(
        f"examples/tiny/model, first {len(rows)} rows of {title} in order, {options.steps} steps of {options.batch} "
        f"rows, fp32, padded, max_length {options.max_length}, AdamW, learning rate {options.learning_rate:g}. "
        f"zerofit's loss: {ours[0]['loss']:.4f} at step 1, {ours[-1]['loss']:.4f} at step {len(ours)}."
    )
    lines += [
        "",
        "| TRL's loss mask | largest relative difference of the loss | of the gradient norm |",
        "|---|---|---|",
    ]
    record = {"machine": facts, "versions": found, "rows": title, "zerofit": [e["loss"] for e in ours], "trl": {}}
    for mask, steps in theirs.items():
        loss, norm = (largest(ours, steps, key) for key in ("loss", "grad_norm"))
        record["trl"][mask] = {"losses": [e["loss"] for e in steps], "loss": loss, "grad_norm": norm}
        cells = [f"{d['relative']:.1e} (step {d['step']})" for d in (loss, norm)]
        lines.append(f"| {mask} | {cells[0]} | {cells[1]} |")
    lines += [
        "",
        "With `assistant_only_loss` both train on the same tokens. TRL's default for prompt/completion rows trains on "
        "one more token a row, the line break that the template puts after the end token; that is the whole cause of "
        "the second line, because the two TRL runs differ in nothing else. (benchmarks/data.py compares the labels "
        "token for token.)",
    ]
    machine.save("trl-parity", lines, record)
    return None


if __name__ == "__main__":
    main()
