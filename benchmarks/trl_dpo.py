"""Compare the losses of recipes/dpo.py and TRL's DPOTrainer: full fine-tuning and LoRA, each loss that both have.

make bench-peers                                                # makes .venv-peers, and runs this among others
python benchmarks/trl_dpo.py --peers .venv-peers/bin/python

The same model and pairs in the same order, fp32, padded. TRL gets the rows as text and adds the end token, so that
both train on the same tokens. Exits with 1 when a loss differs by more than 1e-5 (relative).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import machine
import trl_parity

MODEL = machine.ROOT / "examples" / "tiny" / "preference" / "model"
PAIRS = machine.ROOT / "examples" / "tiny" / "preference" / "train.jsonl"
STEPS, BATCH, BOUND = 20, 4, 1e-5
LOSSES = ("sigmoid", "sigmoid_norm", "ipo", "hinge", "robust", "apo_zero")
PER_TOKEN = ("sigmoid_norm", "ipo")  # their rewards are per token here, and of whole answers in TRL's logs
LORA = ["--adapter", "lora", "--lora_r", "4", "--lora_alpha", "8"]


def arguments(folder: str, kind: str) -> dict:
    """Return the arguments that affect the numbers, the same on both sides."""
    smoothing = {"label_smoothing": 0.1} if kind == "robust" else {}
    return smoothing | {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 1, "learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "weight_decay": 0.0, "max_grad_norm": 1.0, "optim": "adamw_torch", "train_sampling_strategy": "sequential",
        "bf16": False, "gradient_checkpointing": False, "use_cpu": True, "seed": 0, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "max_length": 128, "beta": 0.2, "loss_type": kind,
    }  # fmt: skip


def run_zerofit(folder: str, kind: str, *more: str) -> list[dict]:
    """Return the logged steps of recipes/dpo.py."""
    flags = [f"--{k}={v}" for k, v in arguments(folder, kind).items()]
    flags += ["--model", str(MODEL), "--data", str(PAIRS), "--num_samples", "0", *more]
    recipe = str(machine.ROOT / "recipes" / "dpo.py")
    trl_parity._run([sys.executable, recipe, *flags], machine.environment(f"{folder}/cache", ours=True))
    entries = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in entries if "loss" in entry]


def run_trl(python: str, folder: str, kind: str, adapter: str = "") -> list[dict]:
    """Return the logged steps of DPOTrainer, in its own environment."""
    job = json.dumps([arguments(folder, kind), adapter])
    variables = machine.environment(f"{folder}/cache", ours=False)
    output = trl_parity._run([python, str(Path(__file__).resolve()), "--worker", job], variables)
    return json.loads(output.strip().splitlines()[-1])


def worker(job: str) -> None:
    """Train in TRL's environment and print the logged steps as the last line."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    values, adapter = json.loads(job)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    prompts = [f"<|user|>\n{row['prompt']}<|end|>\n<|assistant|>\n" for row in rows]  # TRL adds the end token
    pairs = [
        {"prompt": p, "chosen": row["chosen"], "rejected": row["rejected"]}
        for p, row in zip(prompts, rows, strict=True)
    ]
    trainer = DPOTrainer(
        model,
        args=DPOConfig(**values, precompute_ref_log_probs=not adapter),
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    print("\n" + json.dumps([{"versions": machine.versions(), **entry} for entry in steps]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="python of an environment with TRL (and peft, for LoRA)")
    parser.add_argument("--only", nargs="+", default=list(LOSSES), help="loss types")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return 0
    if not options.peers:
        parser.error("--peers is needed")
    facts, off, lines, record = machine.facts(), [], [], {}
    with tempfile.TemporaryDirectory() as name:
        run_zerofit(f"{name}/initial", "sigmoid", *LORA, "--learning_rate=0", "--max_steps=1")
        cases = [("full", kind, [], "") for kind in options.only]
        cases.append(("LoRA", options.only[0], LORA, f"{name}/initial/final"))
        for method, kind, flags, adapter in cases:
            ours = run_zerofit(f"{name}/ours-{method}-{kind}", kind, *flags)
            theirs = run_trl(options.peers, f"{name}/trl-{method}-{kind}", kind, adapter)
            losses = [[step["loss"] for step in steps] for steps in (ours, theirs)]
            loss = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
            margin = max(abs(a["rewards/margins"] - b["rewards/margins"]) for a, b in zip(ours, theirs, strict=True))
            off += [f"{method} {kind}: {loss:.1e}"] * (not loss <= BOUND)
            of_margin = "per token" if kind in PER_TOKEN else f"{margin:.1e}"
            lines.append(f"| {method}, {kind} | {losses[0][0]:.6f} | {losses[0][-1]:.6f} | {loss:.1e} | {of_margin} |")
            record[f"{method} {kind}"] = {"zerofit": losses[0], "trl": losses[1]}
            print(lines[-1], flush=True)
    versions = {"zerofit": machine.versions(), "trl": theirs[0]["versions"]}
    head = ["# Loss parity with TRL's DPOTrainer", "", *machine.describe(facts, versions), ""]
    head += [f"examples/tiny/preference, {STEPS} steps of {BATCH} pairs in order, fp32, beta 0.2, learning rate 3e-4. "
             "Differences (of the loss relative) are the largest of all steps; the reference of full tuning is "
             "precomputed, that of LoRA the model with its adapter off.", "",
             "| | loss, step 1 | last | difference of the loss | of the margin |", "|---|---|---|---|---|"]  # fmt: skip
    machine.save("trl-dpo", [*head, *lines], {"machine": facts, "versions": versions, "losses": record})
    for sentence in off:
        print(f"trl_dpo: {sentence}, the bound is {BOUND:g}", file=sys.stderr)
    return bool(off)


if __name__ == "__main__":
    sys.exit(main())
