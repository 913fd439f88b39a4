"""Measure the cost of a plan, and the error of measuring few layers instead of all.

    python benchmarks/plan_cost.py            # about 20 minutes on 2 cores: every case also with all of its layers
    python benchmarks/plan_cost.py --fast     # without these; nothing is written
    python benchmarks/plan_cost.py --plans    # the plans alone, about 8 minutes; nothing is written

Each case runs in a fresh process without cached answers: the seconds that the check adds to a launch that waits for its
end (its process imports while the launcher reads model and tokenizer code; a launch waits for 18 s and then uses the
closed forms), the seconds of the whole process, the two depths it measured, and how far the extended peak is from that
of the whole model. Each plan (PLANS) runs with an empty cache, on idle cores and beside BUSY processes that compute:
seconds until it ends, of processor time too, and what it simulated. Writes benchmarks/results/plan-cost.{json,md}.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

from machine import ROOT, describe, facts, save, versions

CONFIGS = ROOT / "tests" / "configs"
ON, OFF = "--gradient_checkpointing true", "--gradient_checkpointing false"
CASES = [  # (model, recipe, flags), 8 GPUs
    ("llama3.1-8b", "sft", f"--zero 2 {ON}"),
    ("llama3.1-8b", "sft", f"--zero 3 {ON}"),
    ("llama3.1-8b", "sft", f"--zero 3 {ON} --gradient_checkpointing_every 2"),
    ("llama3.1-8b", "lora", f"--zero 0 {ON}"),
    ("llama3.1-8b", "lora", f"--zero 3 {ON}"),
    ("qwen3-8b", "sft", f"--zero 3 {OFF}"),
    ("qwen3-8b", "lora", f"--zero 3 {ON} --gradient_checkpointing_every 2"),
    ("mistral-7b", "lora", f"--load_in_4bit true --zero 3 {ON}"),
]
PLANS = {  # job: (model, GPUs, method)
    "8B, all weights, 8 GPUs": ("llama3.1-8b", 8, "sft"),
    "8B, LoRA, 1 GPU": ("llama3.1-8b", 1, "lora"),
    "8B, DPO, 8 GPUs": ("llama3.1-8b", 8, "dpo"),
    "8B, METHOD=auto, 1 GPU": ("llama3.1-8b", 1, "auto"),
    "70B, all weights, 64 GPUs": ("llama3.1-70b", 64, "sft"),
    "70B, QLoRA, 8 GPUs": ("llama3.1-70b", 8, "qlora"),
    "mixture of 30B, all weights, 8 GPUs": ("qwen3-moe-30b", 8, "sft"),
    "mixture of 30B, LoRA, 8 GPUs": ("qwen3-moe-30b", 8, "lora"),
    "Phi-3 mini, QLoRA, 1 GPU": ("phi3-mini", 1, "qlora"),
    "Pythia 1B, all weights, 1 GPU": ("pythia-1b", 1, "sft"),
}

BUSY = 4  # processes that compute beside a plan

CHECK = """
import json, sys, time
from zerofit.base import hardware
from zerofit.config import resolve
from zerofit.launch import doctor
from zerofit.model.load import check_model
from zerofit.plan import predict
from zerofit.plan import preflight
given = json.loads(sys.argv[1])
if given["whole"]:
    predict._depths = lambda *a: [(None,)]
settings = resolve.resolve_settings(given["recipe"], given["flags"], 8, hardware.GPUS["h100-80g"])
settings = settings.replace(ignore_plan=True, use_cpu=False)
preflight.prestart(settings)
  # what the launcher does meanwhile
doctor.raise_or_warn(doctor.check_installation())
resolve.resolve_for_model(settings)
doctor.raise_or_warn(doctor.check_job(settings, check_model(settings)))
asked = predict.answer_of
def answer_of(*a, **k):
    found = asked(*a, **k)
    print("answer " + json.dumps({"total": found["total"], "layers": found.get("extended_from_layers")}))
    return found
predict.answer_of = answer_of
began = time.perf_counter()
preflight.check(settings, seconds=None)
print(f"added {time.perf_counter() - began:.1f}")
"""


def check(model: str, recipe: str, flags: str, whole: bool) -> dict:
    """Return {"seconds", "total", "layers"} of one check in its own process."""
    words = ["--model", str(CONFIGS / model), "--data", "none", "--max_length", "4096", "--gpu_type", "h100-80g",
             "--per_device_train_batch_size", "1", "--effective_batch_size", "8", *flags.split()]  # fmt: skip
    given = json.dumps({"recipe": recipe, "flags": words, "whole": whole})
    began = time.perf_counter()
    done = _run([sys.executable, "-c", CHECK, given])
    seconds = time.perf_counter() - began
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("answer ", "added ")))
    return {"seconds": round(seconds, 1), "added": float(said["added"]), **json.loads(said["answer"])}


def _run(command: list[str]) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"ZEROFIT_CACHE": cache, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cache)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return done


def measure(fast: bool) -> list[dict]:
    rows = []
    for model, recipe, flags in CASES:
        found = check(model, recipe, flags, whole=False)
        row = {"case": f"{model} {recipe} {flags}", "added": found["added"], "seconds": found["seconds"],
               "layers": found["layers"]}  # fmt: skip
        if not fast and found["layers"]:
            whole = check(model, recipe, flags, whole=True)
            row["whole_seconds"] = whole["seconds"]
            row["error_of_peak"] = max(found["total"].values()) / max(whole["total"].values()) - 1
            row["error_by_phase"] = {p: found["total"][p] / size - 1 for p, size in whole["total"].items()}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def plan(model: str, gpus: int, method: str) -> dict:
    """Return {"seconds", "cpu_seconds", "simulated", "chosen"} of a plan for H100s with an empty cache."""
    began, before = time.perf_counter(), _cpu_seconds()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        env = os.environ | {"ZEROFIT_CACHE": folder, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(
            [sys.executable, "-m", "zerofit", "plan", "--gpu_type", "h100-80g", "--gpus", str(gpus), "--method", method,
             "--model", str(CONFIGS / model), "--output_dir", folder], capture_output=True, text=True, env=env,
            cwd=folder)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the plan of {model}, {method}, failed:\n{done.stderr[-3000:]}")
    seconds, lines = time.perf_counter() - began, done.stdout.splitlines()
    return {
        "seconds": round(seconds, 1), "cpu_seconds": round(_cpu_seconds() - before, 1),
        "simulated": sum(line.endswith("(by simulation)") for line in lines),
        "chosen": next(line for line in lines if line.startswith("chosen: ")).removeprefix("chosen: "),
    }  # fmt: skip


def plans() -> dict[str, dict]:
    """Return {job: {"idle", "busy": as `plan`}}."""
    found: dict[str, dict] = {job: {} for job in PLANS}
    for state in ("idle", "busy"):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY * (state == "busy"))]
        try:
            for job, asked in PLANS.items():
                found[job][state] = plan(*asked)
                print(job, state, found[job][state], flush=True)
        finally:
            for process in busy:
                process.kill()
                process.wait()
    return found


def _cpu_seconds() -> float:
    """Return the processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def markdown(rows: list[dict], plans: dict, about: list[str]) -> list[str]:
    lines = ["# What a plan costs", "", *about, "", "The check before a launch, 8 GPUs, rows of 4,096 tokens:", "",
             "| case | adds, s | whole process, s | layers measured | with all layers, s | error of the peak | worst "
             "phase |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        layers = " and ".join(map(str, row["layers"])) if row["layers"] else "all"
        if "error_of_peak" in row:
            phase, worst = max(row["error_by_phase"].items(), key=lambda p: abs(p[1]))
            rest = f"{row['whole_seconds']:.0f} | {row['error_of_peak']:+.2%} | {phase} {worst:+.2%}"
        else:
            rest = " | | "
        lines.append(f"| {row['case']} | {row['added']:.0f} | {row['seconds']:.0f} | {layers} | {rest} |")
    return [*lines, "", *said(plans)]


def said(plans: dict) -> list[str]:
    """Return the table of the plans."""
    rows = [
        f"| {job} | {one['idle']['seconds']:.1f} | {one['busy']['seconds']:.1f} | {one['idle']['cpu_seconds']:.1f} | "
        f"{one['idle']['simulated']} | {one['idle']['chosen']} |"
        for job, one in plans.items()
    ]
    head = f"| `zerofit plan`, H100s | s, two idle cores | s, beside {BUSY} busy processes | s of processor time |"
    return [f"{head} simulated | chosen |", "|---|---|---|---|---|---|", *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="without the runs of all layers")
    parser.add_argument("--plans", action="store_true", help="only the plans; nothing is written")
    given = parser.parse_args()
    machine = facts()
    found = plans()
    print("\n".join(said(found)), flush=True)
    if given.plans:
        return
    rows = measure(given.fast)
    lines = markdown(rows, found, describe(machine, {"zerofit": versions()}))
    if given.fast:
        print("\n".join(lines))
    else:
        save("plan-cost", lines, {"machine": machine, "cases": rows, "plans": found})


if __name__ == "__main__":
    main()
