"""The README's commands run, its pages name every flag, variable and file, its links lead somewhere."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, Run, python, run_world

from zerofit.launch import make_variables

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)
COMMANDS = [line.strip() for block in BLOCKS for line in block.splitlines() if line.strip()]


def test_commands_were_found():
    assert "make sft" in COMMANDS and len(COMMANDS) >= 10 and set(LONG) < set(COMMANDS)


# Of two that differ in a flag, `make test` runs one; of the first command it runs four steps.
LONG = ["deepspeed --num_gpus 2 recipes/lora.py --zero 3", "make dpo",
        'make lora GPUS=2 ZERO=2 OFFLOAD=optimizer ARGS="--lora_r 32 --num_train_epochs 2"',
        "make plan GPU_TYPE=rtx4090-24g GPUS=2 MODEL=tests/configs/qwen2.5-0.5b",
        "torchrun --nproc_per_node 2 recipes/sft.py --zero 2 --offload optimizer",
        'make batch-size GPUS=2 ZERO=3 ARGS="--memory_limit 0.02 --max_samples 40"']  # fmt: skip


def as_parameter(command: str):
    return pytest.param(command, marks=pytest.mark.slow) if command in LONG else command


@pytest.mark.slow
def test_the_first_command_learns(tmp_path):
    """Whole: near 0 before, over 90 % after."""
    check("make sft", tmp_path, short=False)
    result = Run(tmp_path / "run").json("result.json")
    assert result["exact_match_before"] < 0.05 and result["exact_match_after"] > 0.9


@pytest.mark.parametrize("command", [as_parameter(c) for c in COMMANDS if c != "make test" and "RUN=" not in c])
def test_command(command, tmp_path):
    check(command, tmp_path)


def check(command: str, tmp_path: Path, short: bool = True) -> None:
    """Run a command as printed but for its folder and, if short, 4 steps; hub models are shown, not fetched."""
    words, out = shlex.split(command), tmp_path / "run"
    needs_hub = "Qwen" in command
    rows = TINY / ("preference" if "dpo" in command else "") / "train.jsonl"
    fewer = ["--max_steps", "4", "--eval_strategy", "no", "--data", str(rows)] if short else []
    if words[0] == "make":
        words += [f"OUT={out}", "ENV=active", f"PYTHON={python()}"]
        given = next((w for w in words if w.startswith("ARGS=")), "ARGS=")
        words = [w for w in words if w != given] + [f"{given} {shlex.join(fewer)}"]
        words[1:1] = ["show"] if needs_hub and "show" not in words else []
    else:
        words += ["--output_dir", str(out), *fewer]
        words[0] = python() if words[0] == "python" else words[0]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    if words[:2] == ["make", "batch-size"]:
        assert "largest micro batch that fits: " in done.stdout and not out.exists()
        return
    if words[:2] == ["make", "plan"]:
        plan = json.loads((out / "plan.json").read_text())
        assert plan["chosen"] and "\nrun it: make sft GPUS=2 " in done.stdout
        return
    if needs_hub:
        assert re.search(r"model +Qwen/|--model Qwen/", done.stdout) and not out.exists()
        return
    result = Run(out).json("result.json")
    asked = re.search(r"(?:GPUS=|nproc_per_node |num_gpus )(\d)", command)
    stage = re.search(r"(?:ZERO=|--zero )(\d)", command)
    assert result["status"] == "finished"
    assert result["world_size"] == int(asked[1] if asked else 1)
    assert result["zero"] == (stage[1] if stage else "0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs of two ranks for the commands that need one."""
    flags = ["--max_steps", "2", "--eval_strategy", "no", "--data", str(TINY / "train.jsonl"), "--save_steps", "1",
             "--save_strategy", "steps", "--num_samples", "0", "--zero", "2"]  # fmt: skip
    return run_world(2, {"sft": ("sft", flags), "lora": ("lora", flags)}, tmp_path_factory.mktemp("finished"))


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if "RUN=" in c])
def test_command_on_a_run(command, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished["lora" if "MERGE" in command else "sft"].folder, run)
    if "resume" in command:
        (run / "result.json").unlink()
    words = shlex.split(command.replace("runs/x", str(run)))
    done = subprocess.run([*words, "ENV=active", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, input="What is 2 + 2?\n")  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    if "export" in command:
        (out,) = run.glob("export*")
        assert (out / "model.safetensors").exists() and (out / "README.md").exists() and "compared" in done.stdout
    if "resume" in command:
        assert Run(run).json("result.json")["world_size"] == 1


def test_the_numbers_are_those_of_the_results():
    results = ROOT / "benchmarks" / "results"
    rows = [[cell.strip() for cell in line.split("|")] for line in (results / "published.md").read_text().splitlines()]
    one, several = (
        next(row[2:] for row in rows if row[1:2] == [f"A and B, {kind}"]) for kind in ("one GPU", "several GPUs")
    )
    text = " ".join(README.split())
    assert f"one GPU are {one[5].lstrip('+-')} off in the median ({one[6].lstrip('+-')} at worst)" in text
    assert f"several GPUs {several[5].lstrip('+-')} ({several[6].lstrip('+-')})" in text
    speeds = json.loads((results / "published-speeds.json").read_text())["summary"]["check"]
    dense, mixtures = speeds["dense models"], speeds["mixtures of experts"]
    assert f"{dense['median']:.0%} off in the median, {dense['within']:.0%} of {dense['n']} within 20%" in text
    assert f"mixtures of experts {mixtures['median']:.0%}" in text


def test_the_pages_build(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "memory" / "index.html").exists()


def test_every_make_variable_is_on_its_page():
    page = (ROOT / "docs" / "flags.md").read_text()
    for variable in (*make_variables.VARIABLES, "PYTHON", "ENV"):
        assert f"`{variable}`" in page, variable


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    for file in pages:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", file.read_text()):
            assert (file.parent / link).exists(), f"{file.name}: {link}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_ten_minutes_of_the_docs(tmp_path):
    """The commands of docs/README.md, one after the other, print what the page shows."""
    page = (ROOT / "docs" / "README.md").read_text()
    blocks = [block for block in re.findall(r"```bash\n(.*?)```", page, re.S) if "curl" not in block]
    script = (
        "\n".join(blocks).replace("runs/first", str(tmp_path / "first")).replace("transformers serve", ": served by")
    )
    script = f'make() {{ command make ENV=active PYTHON={python()} "$@"; }}\nset -e\n{script}'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=800,
                          input="What pet does Hana have?\n")  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for line in (
        "supervised tokens                 6,840 ( 27.8%)", "«Hana has a parrot.<|end|>»",
        "chosen: sft ZeRO-3, micro batch 2", "6 of 6 checks hold", "step 10/174  loss 2.2972", "\nHana has a parrot.",
        "all logits are bit for bit the same", "greedy answers: 6 of 6 identical", "serve it with: ",
    ):  # fmt: skip
        assert line in done.stdout, line
        assert line.strip() in page or line in ("\nHana has a parrot.",), line
