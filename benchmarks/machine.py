"""Describe the node and write result files. Imports only the standard library, for the peers' environment too."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Text, or written by tests and benchmarks: a change of these makes no result out of date.
NO_CODE = (
    "*.md", "llms.txt", "benchmarks/results", "docs/pictures", "src/zerofit/launch/tested.json",
    "src/zerofit/model/tested_models.json", "src/zerofit/plan/speed/accuracy.json",
)  # fmt: skip
CODE = ("--", ".", *(f":(exclude){place}" for place in NO_CODE))  # for git
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


def git(*words: str) -> str:
    """Return what git prints in the checkout."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def code_commit() -> str:
    """Return the short hash of the last commit that changed more than NO_CODE, with "-dirty" after other changes."""
    return git("log", "-1", "--format=%h", *CODE) + "-dirty" * bool(git("status", "--porcelain", *CODE))


def changed_files(commit: str) -> list[str] | None:
    """Return the files other than NO_CODE that differ between a commit and the last one; None for an unknown commit."""
    if not git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"):
        return None
    return git("diff", "--name-only", "--no-renames", commit, "HEAD", *CODE).splitlines()


def facts() -> dict:
    """Return processor, memory, load at the start of the benchmark, date, commit."""
    processor, instructions = platform.processor() or platform.machine(), ""
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = names[0] if names else processor
        flags = next((line.split() for line in info.read_text().splitlines() if line.startswith("flags")), [])
        known = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
        instructions = next((name for name in known if name in flags), "")
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor,
        "instructions": instructions,  # the widest of these: without the first two there is no bf16 arithmetic
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_average_before": round(os.getloadavg()[0], 1),
        "commit": git("describe", "--always", "--dirty"),
    }


def describe(machine: dict, environments: dict[str, dict]) -> list[str]:
    """Return the facts as Markdown lines."""
    lines = [
        f"{machine['date']}, commit {machine['commit']}; {machine['processor']}"
        f"{' with ' * bool(machine.get('instructions'))}{machine.get('instructions', '')}, {machine['cores']} cores, "
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


def record_of_today(name: str) -> dict | None:
    """Return the record of benchmarks/results/<name>.json if it was measured today; None: there is none of today."""
    file = RESULTS / f"{name}.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"machine": {"date": None}}
    return record if record["machine"]["date"] == datetime.date.today().isoformat() else None


def save(name: str, lines: list[str], record: dict, quiet: bool = False) -> None:
    """Print the Markdown lines and write them and the record to benchmarks/results/<name>.md and .json.

    No date is in the names, so a new run replaces the last one; `record` has "machine", the facts() with the date.
    """
    if not quiet:
        print("\n" + "\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if not quiet:
        print(f"\nwritten: benchmarks/results/{name}.md and .json")
