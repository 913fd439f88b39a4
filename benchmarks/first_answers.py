"""Measure how long `zerofit plan` takes to its first answer, for methods and kinds of models.

    python benchmarks/first_answers.py      # about 3 minutes on 2 cores

Each plan has an empty cache and is ended at its line `first answer, by formula`. Writes
benchmarks/results/first-answers.{json,md}: medians of five, the jobs in turn.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import ROOT, describe, facts, save, versions

REPEATS = 5
JOBS = {  # job: (model, GPUs, method)
    "8B, all weights, 8 GPUs": ("llama3.1-8b", 8, "sft"),
    "8B, LoRA, 1 GPU": ("llama3.1-8b", 1, "lora"),
    "70B, QLoRA, 8 GPUs": ("llama3.1-70b", 8, "qlora"),
    "8B, DPO, 8 GPUs": ("llama3.1-8b", 8, "dpo"),
    "8B, METHOD=auto, 1 GPU": ("llama3.1-8b", 1, "auto"),
    "mixture of 30B, all weights, 8 GPUs": ("qwen3-moe-30b", 8, "sft"),
    "mixture of 30B, LoRA, 8 GPUs": ("qwen3-moe-30b", 8, "lora"),
    "Gemma 2 2B, all weights, 1 GPU": ("gemma2-2b", 1, "sft"),
    "Phi-3 mini, QLoRA, 1 GPU": ("phi3-mini", 1, "qlora"),
    "Pythia 1B, all weights, 1 GPU (a kind that is built first)": ("pythia-1b", 1, "sft"),
}


def first_answer(model: str, gpus: int, method: str) -> tuple[float, float, str]:
    """Return (seconds until the first answer, processor seconds of the plan's process, the answer); end the plan."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, start(folder, model, gpus, method) as plan:
        said = next((line for line in plan.stdout if line.startswith("first answer")), "")
        seconds, used = time.perf_counter() - began, Path(f"/proc/{plan.pid}/stat").read_text().rpartition(")")[2]
        os.killpg(plan.pid, signal.SIGKILL)
    if not said:
        raise SystemExit(f"the plan of {model}, {method}, gave no first answer")
    ticks = sum(map(int, used.split()[11:13]))
    return seconds, ticks / os.sysconf("SC_CLK_TCK"), said.partition(": ")[2].partition(";")[0].strip()


def start(folder: str, model: str, gpus: int, method: str) -> subprocess.Popen:
    """Start a plan with its cache in `folder`, as the leader of its own group of processes."""
    env = os.environ | {"ZEROFIT_CACHE": folder, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-m", "zerofit", "plan", "--gpu_type", "h100-80g", "--gpus", str(gpus), "--method", method,
         "--model", str(ROOT / "tests" / "configs" / model), "--output_dir", str(Path(folder) / "plan")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=folder, start_new_session=True,
    )  # fmt: skip


def measure() -> dict[str, dict]:
    """Return {job: {"seconds", "cpu_seconds": those of each repeat, "answer"}}."""
    found: dict[str, dict] = {job: {"seconds": [], "cpu_seconds": []} for job in JOBS}
    for _ in range(REPEATS):
        for job, asked in JOBS.items():
            seconds, used, answer = first_answer(*asked)
            found[job]["seconds"].append(round(seconds, 2))
            found[job]["cpu_seconds"].append(round(used, 2))
            found[job]["answer"] = answer
            print(f"{job}: {seconds:.2f} s", flush=True)
    return found


def markdown(found: dict[str, dict], about: list[str]) -> list[str]:
    lines = ["# The first answer of a plan", "", *about, "",
             "From the start of `zerofit plan` on H100s, with an empty cache, to its line `first answer, by formula`; "
             f"the process of the simulations starts beside it. Medians of {REPEATS}, and the slowest:", "",
             "| job | s | slowest, s | s of processor time | first answer |", "|---|---|---|---|---|"]  # fmt: skip
    for job, of_job in found.items():
        seconds, used = of_job["seconds"], statistics.median(of_job["cpu_seconds"])
        times = f"{statistics.median(seconds):.1f} | {max(seconds):.1f} | {used:.2f}"
        lines.append(f"| {job} | {times} | {of_job['answer']} |")
    return lines


def main() -> None:
    machine, found = facts(), measure()
    about = describe(machine, {"zerofit": versions()})
    save("first-answers", markdown(found, about), {"machine": machine, "jobs": found})


if __name__ == "__main__":
    main()
