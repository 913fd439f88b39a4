"""Describe the node and write result files. Imports only the standard library, for the peers' environment too."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY_MODEL = ROOT / "examples" / "tiny" / "model"


def versions() -> dict[str, str]:
    """Return the versions of the relevant packages in the calling environment."""
    found = {"python": platform.python_version()}
    names = ("trl", "torch", "transformers", "tokenizers", "datasets", "accelerate", "deepspeed", "peft", "pyarrow")
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def facts() -> dict:
    """Return processor, memory, load at the start of the benchmark, date, commit."""
    processor = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = names[0] if names else processor
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_average_before": round(os.getloadavg()[0], 1),
        "commit": commit.stdout.strip(),
    }


def describe(machine: dict, environments: dict[str, dict]) -> list[str]:
    """Return the facts as Markdown lines."""
    lines = [
        f"{machine['date']}, commit {machine['commit']}; {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB; load average before the first run {machine['load_average_before']}.",
        "",
    ]
    lines += [f"- {name}: {', '.join(f'{k} {v}' for k, v in found.items())}" for name, found in environments.items()]
    return lines


def environment(cache: str, ours: bool) -> dict[str, str]:
    """Return the variables of one measured process: offline, with its own empty caches."""
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    variables |= {"ZEROFIT_CACHE": cache, "HF_DATASETS_CACHE": cache, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    if ours:
        variables["PYTHONPATH"] = str(ROOT / "src")
    return variables


def save(name: str, lines: list[str], record: dict, quiet: bool = False) -> None:
    """Print the Markdown lines and write them and the record to benchmarks/results/<name>-<date>.md and .json."""
    if not quiet:
        print("\n" + "\n".join(lines))
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    stem = f"{name}-{record['machine']['date']}"
    (folder / f"{stem}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / f"{stem}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if not quiet:
        print(f"\nwritten: benchmarks/results/{stem}.md and .json")
