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


def worker(job: str) -> None:
    from trl import KTOConfig, KTOTrainer

    trl_dpo.train_with_trl(KTOTrainer, KTOConfig, rows(), *json.loads(job))


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
        initial = arguments(f"{name}/initial", "kto")
        trl_dpo.run_zerofit(initial, data, *trl_dpo.LORA, "--learning_rate=0", "--max_steps=1")
        cases = [("full", "kto", [], ""), ("full", "apo_zero_unpaired", [], "")]
        cases.append(("LoRA", "kto", trl_dpo.LORA, f"{name}/initial/final"))
        for method, kind, flags, adapter in cases:
            ours = trl_dpo.run_zerofit(arguments(f"{name}/ours-{method}-{kind}", kind), data, *flags)
            of_trl = arguments(f"{name}/trl-{method}-{kind}", kind)
            theirs = trl_dpo.run_trl(options.peers, __file__, of_trl, adapter)
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
