"""Measure what the certificate of a run costs: the seconds of its checks, and the whole run with and without it.

    python benchmarks/certificate.py     # full fine-tuning of 207 M parameters, one process: 4 minutes on 2 cores

Runs with and without --certificate alternate. Writes benchmarks/results/certificate.{json,md}.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkpoint import SHAPE, model_folder
from machine import ROOT, describe, facts, save, versions

TEN_MINUTES = 600.0


def run(model: Path, out: Path, certificate: str) -> dict:
    """Return {"seconds": of the whole process, "checks": seconds that the certificate names, "lines": that hold}."""
    words = [
        sys.executable, str(ROOT / "recipes" / "sft.py"), "--model", str(model), "--use_cpu", "true",
        "--data", str(ROOT / "examples" / "tiny" / "train.jsonl"), "--max_length", "512", "--packing", "true",
        "--effective_batch_size", "2", "--max_steps", "2", "--save_strategy", "no", "--num_samples", "0",
        "--certificate", certificate, "--output_dir", str(out),
    ]  # fmt: skip
    began = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    page = json.loads((out / "certificate.json").read_text(encoding="utf-8"))
    return {
        "seconds": seconds,
        "checks": page["seconds"],
        "lines": sum(line["holds"] is True for line in page["checks"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    machine, found = facts(), {"true": [], "false": []}
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder) / "model", SHAPE)
        for number in range(args.rounds):
            for certificate, runs in found.items():
                runs.append(run(model, Path(folder) / f"{certificate}-{number}", certificate))
                print(certificate, runs[-1], flush=True)
    seconds = {name: statistics.median(entry["seconds"] for entry in runs) for name, runs in found.items()}
    checks = statistics.median(entry["checks"] for entry in found["true"])
    lines = [
        "# The certificate's cost", "", *describe(machine, {"zerofit": versions()}), "",
        "Full fine-tuning of 207 M parameters in one process, two steps, medians of the rounds:", "",
        "| | seconds |", "|---|---|", f"| whole run, `--certificate true` | {seconds['true']:.1f} |",
        f"| whole run, `--certificate false` | {seconds['false']:.1f} |", f"| the checks alone | {checks:.1f} |",
        f"| share of a run of ten minutes | {checks / TEN_MINUTES:.1%} |", "",
    ]  # fmt: skip
    save("certificate", lines, {"machine": machine, "versions": versions(), "runs": found})


if __name__ == "__main__":
    main()
