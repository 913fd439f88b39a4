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


def run_zerofit(values: dict, data: str, *more: str) -> list[dict]:
    """Return the logged steps of recipes/dpo.py with these arguments."""
    folder, flags = values["output_dir"], [f"--{k}={v}" for k, v in values.items()]
    flags += ["--model", str(MODEL), "--data", data, "--num_samples", "0", *more]
    recipe = str(machine.ROOT / "recipes" / "dpo.py")
    trl_parity._run([sys.executable, recipe, *flags], machine.environment(f"{folder}/cache", ours=True))
    entries = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in entries if "loss" in entry]


def run_trl(python: str, program: str, values: dict, adapter: str = "") -> list[dict]:
    """Return the logged steps of `program --worker`, which trains with TRL in its own environment."""
    job = json.dumps([values, adapter])
    variables = machine.environment(f"{values['output_dir']}/cache", ours=False)
    output = trl_parity._run([python, str(Path(program).resolve()), "--worker", job], variables)
    return json.loads(output.strip().splitlines()[-1])


def train_with_trl(trainer_class: type, config_class: type, rows: list[dict], values: dict, adapter: str) -> None:
    """Train in TRL's environment and print the logged steps as the last line. rows: with the question as `prompt`."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    # TRL adds the end token
    rows = [row | {"prompt": f"<|user|>\n{row['prompt']}<|end|>\n<|assistant|>\n"} for row in rows]
    trainer = trainer_class(
        model,
        args=config_class(**values, precompute_ref_log_probs=not adapter),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    print("\n" + json.dumps([{"versions": machine.versions(), **entry} for entry in steps]))


def worker(job: str) -> None:
    from trl import DPOConfig, DPOTrainer

    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    pairs = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows]
    train_with_trl(DPOTrainer, DPOConfig, pairs, *json.loads(job))


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
        run_zerofit(arguments(f"{name}/initial", "sigmoid"), str(PAIRS), *LORA, "--learning_rate=0", "--max_steps=1")
        cases = [("full", kind, [], "") for kind in options.only]
        cases.append(("LoRA", options.only[0], LORA, f"{name}/initial/final"))
        for method, kind, flags, adapter in cases:
            ours = run_zerofit(arguments(f"{name}/ours-{method}-{kind}", kind), str(PAIRS), *flags)
            theirs = run_trl(options.peers, __file__, arguments(f"{name}/trl-{method}-{kind}", kind), adapter)
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
