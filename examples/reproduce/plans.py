"""Plan each recipe for the machines of its published.yaml and write both tables of README.md.

python examples/reproduce/plans.py                 plan all and write (an hour on an idle core)
python examples/reproduce/plans.py NAME ...        plan these and write their rows
python examples/reproduce/plans.py --scores        write the table of scores only, plan nothing
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from zerofit.base.hardware import GIB
from zerofit.plan import candidates
from zerofit.plan.advice import cost

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
PRICE = 2.50  # dollars for an hour of a GPU: an example, not an offer
NOT_RUN = "not run by us"
MACHINE = re.compile(r"(?:(?P<nodes>\d+) nodes of )?(?P<gpus>\d+) x (?P<gpu>\S+)")
PLAN_HEAD = ["recipe", "machine", "plan", "GPU memory", "time", "GPU hours", f"at ${PRICE:.2f}", "result"]
SCORE_HEAD = ["recipe", "score", "published", "noise", "ours"]


def published() -> dict[str, dict]:
    """Return what published.yaml of each folder says, by the folder's name."""
    files = sorted(HERE.glob("*/published.yaml"))
    return {file.parent.name: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}


def command(name: str, result: dict, machine: str, folder: str) -> list[str]:
    """Return the `zerofit plan` of a recipe for a machine, with the rows counted as full and not read."""
    place = MACHINE.fullmatch(machine)
    return ["plan", "--recipe", result["recipe"], "--config", f"examples/reproduce/{name}/config.yaml",
            "--model", f"examples/models/{result['model_config']}", "--model_revision", "main",
            "--data", candidates.UNNAMED, "--nodes", place["nodes"] or "1", "--gpus", place["gpus"], "--gpu_type",
            place["gpu"], "--rows", str(result["rows"]), "--gpu_price", str(PRICE), "--output_dir", folder]  # fmt: skip


def plan(name: str, result: dict, machine: str) -> str:
    """Return the row of a recipe on a machine."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "zerofit", *command(name, result, machine, folder)]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        file = Path(folder) / "plan.json"
        if not file.is_file():
            raise SystemExit(f"{name} on {machine}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return row(name, result, machine, json.loads(file.read_text(encoding="utf-8")))


def row(name: str, result: dict, machine: str, found: dict) -> str:
    """Return the table's row of a plan.json."""
    has = found["gpu"]["memory_gib"]
    if not found["chosen"]:
        needs = found["nearest"]["nvidia_smi_bytes"] / GIB
        return line([f"[{name}]({name}/)", machine, f"**nothing fits**; nearest: {found['nearest']['label']}",
                     f"{needs:.1f} of {has} GiB", "", "", "", NOT_RUN])  # fmt: skip
    price, most = found["cost"], "at most " if result.get("at_most") else ""
    return line([f"[{name}]({name}/)", machine, found["chosen"]["label"].partition(" ")[2],
                 f"{found['chosen']['nvidia_smi_bytes'] / GIB:.1f} of {has} GiB", most + cost.duration(price["hours"]),
                 cost.rounded(price["gpu_hours"]), f"${cost.rounded(price['dollars'])}", NOT_RUN])  # fmt: skip


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def score_rows(results: dict[str, dict]) -> list[str]:
    return [
        line([f"[{name}]({name}/)", f"{score['task']}, {score['metric']}" if "task" in score else score["metric"],
              f"{score['value']:g}", f"{score['noise']:g}", NOT_RUN])
        for name, result in results.items() for score in result["scores"]
    ]  # fmt: skip


def write(kind: str, head: list[str], rows: list[str]) -> None:
    """Put a table behind its mark in README.md."""
    begin, end = f"<!-- {kind}: made by plans.py -->", "<!-- end -->"
    before, _, rest = README.read_text(encoding="utf-8").partition(begin)
    table = "\n".join([begin, "", line(head), f"|{'---|' * len(head)}", *rows, "", end])
    README.write_text(before + table + rest.partition(end)[2], encoding="utf-8")


def main() -> None:
    results = published()
    write("scores", SCORE_HEAD, score_rows(results))
    if "--scores" in sys.argv:
        return
    named = sys.argv[1:]
    old = {tuple(one.split(" | ")[:2]): one for one in README.read_text(encoding="utf-8").splitlines()}
    pairs = [(name, machine) for name, result in results.items() for machine in result["machines"]]
    rows = {pair: old.get((f"| [{pair[0]}]({pair[0]}/)", pair[1])) for pair in pairs}
    for name, machine in pairs:
        if not named or name in named:
            rows[name, machine] = plan(name, results[name], machine)
            print(rows[name, machine], flush=True)
            write("plans", PLAN_HEAD, [one for one in rows.values() if one])


if __name__ == "__main__":
    main()
