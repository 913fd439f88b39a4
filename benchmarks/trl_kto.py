"""Compare the steps of recipes/dpo.py --loss_type kto with TRL's KTOTrainer: full fine-tuning and LoRA.

python benchmarks/trl_kto.py --peers .venv-peers/bin/python

The same model and labeled answers in the same order, fp32, padded, one process and no accumulation, so that TRL's KL
term is of the same answers. TRL gets the rows as text and adds the end token, so that both train on the same tokens.
Exits with 1 when a loss, a KL term or a gradient norm differs by more than 1e-5 (of it, or of 1 where it is smaller).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import machine
import trl_dpo
import trl_parity

STEPS, BATCH, BOUND = trl_dpo.STEPS, trl_dpo.BATCH, trl_dpo.BOUND
WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.7}
SHOWN = ("loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected")


def rows() -> list[dict]:
    """Return the answers of the bundled pairs with their labels: of each pair one, alternately."""
    pairs = [json.loads(line) for line in trl_dpo.PAIRS.read_text().splitlines()]
    sides = [("chosen", "rejected")[i % 3 == 1] for i in range(len(pairs))]
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
        for pair, side in zip(pairs, sides, strict=True)
    ]


def arguments(folder: str, kind: str) -> dict:
    """Return the arguments that affect the numbers, the same on both sides."""
    return trl_dpo.arguments(folder, kind) | WEIGHTS


def run_zerofit(folder: str, data: str, kind: str, *more: str) -> list[dict]:
    """Return the logged steps of recipes/dpo.py."""
    flags = [f"--{k}={v}" for k, v in arguments(folder, kind).items()]
    flags += ["--model", str(trl_dpo.MODEL), "--data", data, "--num_samples", "0", *more]
    recipe = str(machine.ROOT / "recipes" / "dpo.py")
    trl_parity._run([sys.executable, recipe, *flags], machine.environment(f"{folder}/cache", ours=True))
    entries = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in entries if "loss" in entry]


def run_trl(python: str, folder: str, kind: str, adapter: str = "") -> list[dict]:
    """Return the logged steps of KTOTrainer, in its own environment."""
    job = json.dumps([arguments(folder, kind), adapter])
    variables = machine.environment(f"{folder}/cache", ours=False)
    output = trl_parity._run([python, str(Path(__file__).resolve()), "--worker", job], variables)
    return json.loads(output.strip().splitlines()[-1])


def worker(job: str) -> None:
    """Train in TRL's environment and print the logged steps as the last line."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import KTOConfig, KTOTrainer

    values, adapter = json.loads(job)
    model = AutoModelForCausalLM.from_pretrained(trl_dpo.MODEL, dtype=torch.float32)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    data = [row | {"prompt": f"<|user|>\n{row['prompt']}<|end|>\n<|assistant|>\n"} for row in rows()]
    trainer = KTOTrainer(
        model,
        args=KTOConfig(**values, precompute_ref_log_probs=not adapter),
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(trl_dpo.MODEL),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    print("\n" + json.dumps([{"versions": machine.versions(), **entry} for entry in steps]))


def differences(ours: list[dict], theirs: list[dict]) -> dict[str, float]:
    """Return the largest difference of any step for each of SHOWN that TRL has logged in it."""
    return {
        name: max(
            abs(a[name] - b[name]) / max(1.0, abs(b[name])) for a, b in zip(ours, theirs, strict=True) if name in b
        )
        for name in SHOWN
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="python of an environment with TRL (and peft, for LoRA)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return 0
    if not options.peers:
        parser.error("--peers is needed")
    facts, off, lines, record = machine.facts(), [], [], {}
    with tempfile.TemporaryDirectory() as name:
        data = f"{name}/rows.jsonl"
        Path(data).write_text("\n".join(map(json.dumps, rows())))
        run_zerofit(f"{name}/initial", data, "kto", *trl_dpo.LORA, "--learning_rate=0", "--max_steps=1")
        cases = [("full", "kto", [], ""), ("full", "apo_zero_unpaired", [], "")]
        cases.append(("LoRA", "kto", trl_dpo.LORA, f"{name}/initial/final"))
        for method, kind, flags, adapter in cases:
            ours = run_zerofit(f"{name}/ours-{method}-{kind}", data, kind, *flags)
            theirs = run_trl(options.peers, f"{name}/trl-{method}-{kind}", kind, adapter)
            if kind != "kto":
                ours = [{"kl": 0.0} | step for step in ours]
            found = differences(ours, theirs)
            off += [f"{method} {kind}, {n}: {found[n]:.1e}" for n in SHOWN[:3] if not found[n] <= BOUND]
            shown = " | ".join(f"{found[n]:.1e}" for n in SHOWN)
            lines.append(f"| {method}, {kind} | {ours[0]['loss']:.6f} | {ours[-1]['loss']:.6f} | {shown} |")
            record[f"{method} {kind}"] = {"zerofit": ours, "trl": theirs}
            print(lines[-1], flush=True)
    versions = {"zerofit": machine.versions(), "trl": theirs[0]["versions"]}
    head = ["# Parity with TRL's KTOTrainer", "", *machine.describe(facts, versions), ""]
    head += [f"Answers of examples/tiny/preference with labels, {STEPS} steps of {BATCH} in order, fp32, beta 0.2, "
             "learning rate 3e-4, weights 1.3 and 0.7, one process. The largest difference of all steps, of the value "
             "or of 1 where that is larger.", "",
             "| | loss, step 1 | last | loss | gradient norm | KL | rewards/chosen | rewards/rejected |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    machine.save("trl-kto", [*head, *lines], {"machine": facts, "versions": versions, "steps": record})
    for sentence in off:
        print(f"trl_kto: {sentence}, the bound is {BOUND:g}", file=sys.stderr)
    return bool(off)


if __name__ == "__main__":
    sys.exit(main())
