"""Measure the seconds from a command to its first training step, and where they go.

    python benchmarks/startup.py                                       # 1 and 2 ranks, 3 interleaved rounds
    python benchmarks/startup.py --ranks 8 --rounds 1
    python benchmarks/startup.py --peers .venv-peers/bin/python        # TRL's SFTTrainer too (`make bench-peers`)

The bundled model and rows, ZeRO-2, on the CPU: `zerofit launch` with all its checks, and scripts
without any under torchrun (startup_peer.py: transformers' Trainer with DeepSpeed; TRL's SFTTrainer). The rounds are
interleaved; each figure is the median of the points that rank 0 and the launcher note. Beside it the verbs that train
nothing. Writes benchmarks/results/startup.{json,md}.
"""

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import ROOT, TINY_MODEL, describe, facts, record_of_today, save, versions

ROWS = ROOT / "examples" / "tiny" / "train.jsonl"
JSON = ROOT / "deepspeed_configs" / "zero2.json"

# The points of a job in order, and what happens before each.
POINTS = {
    "launcher imported": "launcher's imports", "checked": "checks", "rank began": "start of the ranks",
    "rank imported": "imports of a rank", "data read": "arguments, tokenizer, data", "group opened": "process group",
    "model loaded": "model", "trainer built": "trainer", "first step": "engine and first step",
}  # fmt: skip

VERBS = {
    "a wrong flag": ["launch", "recipes/sft.py", "--zeroo", "3"],
    "an unknown stage": ["launch", "recipes/sft.py", "--zero", "7"],
    "a missing file": ["launch", "recipes/sft.py", "--model", str(TINY_MODEL), "--data", "missing.jsonl"],
    "an unknown recipe": ["launch", "recipes/sfd.py"],
    "`zerofit status`": ["status", "runs/none"],
    "`zerofit cancel`": ["cancel", "runs/none"],
    "`zerofit launch --show`": ["launch", "--show", "recipes/sft.py"],
}


def command(system: str, ranks: int, folder: Path, options) -> list[str]:
    words = ["--model", str(TINY_MODEL), "--data", str(ROWS), "--output_dir", str(folder / "run")]
    if system.startswith("zerofit"):
        return [
            sys.executable, "-m", "zerofit", "launch", "--gpus", str(ranks), "recipes/sft.py", *words, "--zero", "2",
            "--max_steps", "2", "--per_device_train_batch_size", "4", "--effective_batch_size", str(4 * ranks),
            "--save_strategy", "no", "--num_samples", "0", "--bf16", "false", "--padding_free", "false",
        ]  # fmt: skip
    python = options.peers if system == "TRL" else sys.executable
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return [
        python, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", port,
        str(ROOT / "benchmarks" / "startup_peer.py"), *words, "--deepspeed", str(JSON),
        *(["--trl"] if system == "TRL" else []),
    ]  # fmt: skip


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(system: str, ranks: int, options) -> dict[str, float]:
    """Return {what happens: seconds} of one job; "total": to the first step; "cpu": its CPU seconds to its end."""
    with tempfile.TemporaryDirectory(prefix="zerofit-startup-") as temporary:
        folder = Path(temporary)
        marks = folder / "marks"
        paths = [str(ROOT / "benchmarks" / "startup_marks"), *([str(ROOT / "src")] if "zerofit" in system else [])]
        env = os.environ | {
            "STARTUP_MARKS": str(marks), "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu", "HF_DATASETS_CACHE": str(folder / "datasets"), "HF_HUB_OFFLINE": "1",
            "ZEROFIT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": str(max(1, os.cpu_count() // ranks)),
        }  # fmt: skip
        words = command(system, ranks, folder, options)
        cpu_before, began = cpu_seconds(), time.time()
        done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{system} on {ranks} ranks failed: {done.stderr[-3000:]}")
        cpu = cpu_seconds() - cpu_before
        times = {}
        for line in marks.read_text().splitlines():
            seconds, _, name = line.partition(" ")
            times.setdefault(name, float(seconds))
    spent, before = {}, began
    for point, what in POINTS.items():
        if point in times:
            spent[what] = times[point] - before
            before = times[point]
    return spent | {"total": times["first step"] - began, "cpu": cpu}


def seconds_of(words: list[str]) -> float:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "zerofit", *words], env=env, cwd=ROOT, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", help="interpreter of an environment with TRL and DeepSpeed")
    parser.add_argument("--more", action="store_true", help="add rounds to those of the result file, if it is of today")
    parser.add_argument("--name", default="startup", help="of the result files")
    options = parser.parse_args()
    machine, found = facts(), {"zerofit": versions()}
    systems = ["zerofit", "transformers + DeepSpeed", *(["TRL"] if options.peers else [])]
    record = (record_of_today(options.name) if options.more else None) or {"jobs": {}, "verbs": {}}
    for number in range(options.rounds):
        for ranks in options.ranks:
            for system in systems:
                spent = measure(system, ranks, options)
                record["jobs"].setdefault(f"{ranks} | {system}", []).append(spent)
                print(f"round {number + 1}, {ranks} ranks, {system}: {spent['total']:.1f} s", flush=True)
        for name, words in VERBS.items():
            record["verbs"].setdefault(name, []).append(seconds_of(words))
        record |= {"machine": machine, "versions": found}
        save(options.name, report(record), record)


def report(record: dict) -> list[str]:
    """Return the tables as Markdown lines."""
    columns = list(POINTS.values())
    lines = ["# From the command to the first step", "", *describe(record["machine"], record["versions"]), ""]
    lines += [
        "Seconds, medians of interleaved rounds; CPU: of all processes until the job's end, after two steps, "
        "zerofit's with a save. Other work on the machine changes CPU seconds less than the others.",
        "",
    ]
    lines += [f"| ranks | | rounds | total | CPU | {' | '.join(columns)} |", "|---|---|" + "---:|" * (len(columns) + 3)]
    for job, rounds in sorted(record["jobs"].items()):
        spent = {name: statistics.median(spent[name] for spent in rounds) for name in rounds[0]}
        cells = [f"{spent[what]:.1f}" if what in spent else "" for what in columns]
        total = f"**{spent['total']:.1f}** | {spent['cpu']:.1f}"
        lines.append(f"| {job} | {len(rounds)} | {total} | {' | '.join(cells)} |")
    if not any(job.endswith("TRL") for job in record["jobs"]):
        lines += ["", "TRL: not measured, since no --peers was given."]
    lines += ["", "| command | seconds |", "|---|---:|"]
    return [*lines, *(f"| {name} | {statistics.median(times):.2f} |" for name, times in record["verbs"].items())]


if __name__ == "__main__":
    main()
