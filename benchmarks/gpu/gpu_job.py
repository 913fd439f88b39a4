"""Run a recipe as a process, monitor its logged steps and the GPU's memory, and write a report.

Shared by the GPU benchmarks and tests/gpu.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine
import psutil
from machine import ROOT, TINY_MODEL

# Read before tests/conftest.py replaces it: it may point to packages.
OUTSIDE = os.environ.get("PYTHONPATH", "")
GIB = 2**30
PACKAGES = ("deepspeed", "peft", "triton", "bitsandbytes", "liger-kernel")


def recipe_command(recipe: str, flags: list[str], folder: Path) -> list[str]:
    return [sys.executable, f"recipes/{recipe}.py", *flags, "--output_dir", str(folder)]


def launch_command(recipe: str, flags: list[str], folder: Path) -> list[str]:
    words = [sys.executable, "-m", "zerofit", "launch", "--gpus", "1", f"recipes/{recipe}.py"]
    return [*words, *flags, "--output_dir", str(folder)]


def write_model(folder: Path, config: str) -> None:
    """Write a model folder with a config.json and the bundled tokenizer but without weights (--random_init)."""
    skipped = shutil.ignore_patterns("*.safetensors", "generation_config.json")
    shutil.copytree(TINY_MODEL, folder, ignore=skipped, dirs_exist_ok=True)
    (folder / "config.json").write_text(config)


def write_rows(file: Path, lengths: list[int]) -> None:
    """Write rows of random tokens."""
    draw = random.Random(2)
    file.write_text("".join(json.dumps({"input_ids": draw.choices(range(3, 500), k=n)}) + "\n" for n in lengths))


class Job:
    """A command that writes a run folder, with its output in FOLDER.log."""

    def __init__(self, words: list[str], folder: Path, variables: dict[str, str] | None = None):
        self.folder, self.log = folder, folder.with_name(f"{folder.name}.log")
        self.started = time.monotonic()
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), OUTSIDE]))}
        folder.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            print("$", shlex.join(words), file=log, flush=True)
            self.process = subprocess.Popen(
                words, env=env | (variables or {}), stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def steps(self) -> list[dict]:
        """Read the logged steps, without an incomplete last line."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [entry for entry in map(json.loads, (x for x in lines if x.endswith("\n"))) if "loss" in entry]

    def json(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())

    def prints(self, text: str, seconds: float) -> bool:
        """Wait until the output contains `text`; return False if the process ends or the time is over."""
        while text not in self.output:
            if self.process.poll() is not None or self.seconds > seconds:
                return False
            time.sleep(0.05)
        return True

    def finish(self, seconds: float) -> int | None:
        """Wait for the end and return the exit code; after `seconds` kill the process and return None."""
        try:
            return self.process.wait(max(0.0, seconds - self.seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """Kill the process and its descendants; a launcher's ranks have their own sessions."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        self.process.wait()


def used_bytes() -> int:
    """Return the memory of the first visible GPU in use by all processes (nvidia-smi)."""
    index = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    return int(nvidia_smi("memory.used", "-i", index)) * 2**20


def nvidia_smi(name: str, *options: str) -> str:
    words = ["nvidia-smi", *options, f"--query-gpu={name}", "--format=csv,noheader,nounits"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[0]


# --- the report of a benchmark ---


def parser(doc: str, name: str, budget_seconds: float) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="regular expression of the names to run")
    options.add_argument(
        "--budget", type=float, default=budget_seconds, help="seconds after which no further part starts"
    )
    default = ROOT / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    options.add_argument("--out", type=lambda path: Path(path).resolve(), default=default, help="folder of the report")
    return options


def facts() -> dict:
    """Return the node, its GPU and the versions of the packages."""
    import torch

    versions = machine.versions()
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpu = torch.cuda.get_device_properties(0)
    versions |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
    name = f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB, driver {nvidia_smi('driver_version')}"
    return machine.facts() | {"gpu": name, "versions": versions}


def table(head: list[str], rows: list[list]) -> list[str]:
    """Format a Markdown table; None is an empty cell."""
    cells = [["" if cell is None else str(cell).replace("|", "/") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *cells]]


def save(out: Path, name: str, title: str, lines: list[str], record: dict) -> None:
    """Print the report and write it to <out>/<name>.md and .json; record: with "machine" as `facts()` gives it."""
    of_machine = record["machine"]
    packages = {"GPU": {of_machine["gpu"]: ""}, "zerofit": of_machine["versions"]}
    about = machine.describe(of_machine, packages)
    text = "\n".join([f"# {title}", "", *about, "", *lines]) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text)
    (out / f"{name}.json").write_text(json.dumps(record, indent=1, default=str) + "\n")
    print(f"\n{text}\nwritten: {out / name}.md and .json")
