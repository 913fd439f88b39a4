"""Every file of examples/ is a job that its first lines start, and by its plan fits the GPUs that they name."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, slow_but

from zerofit.plan import candidates

sys.path.append(str(ROOT / "examples"))
import generate

pytestmark = pytest.mark.usefixtures("forks")
EXAMPLES = generate.all_examples()
# Planned by `make test` too: one of each kind.
QUICK = ("llama3.2-1b-lora-12g", "qwen2.5-0.5b-sft-12g", "qwen3-4b-qlora-12g", "llama3.2-3b-dpo-24g")


def test_there_is_one_for_each_family_method_and_size_of_gpu():
    families = {re.match(r"[a-z]+", example.name)[0] for example in EXAMPLES}
    assert families == {"llama", "qwen", "gemma", "mistral", "phi"} and len(EXAMPLES) >= 25
    methods = {example.method.partition(", ZeRO")[0] for example in EXAMPLES}
    assert methods == {"full", "LoRA", "QLoRA", "DPO, full", "DPO, LoRA"}
    assert {re.search(r"-(\d+)g", example.gpu)[1] for example in EXAMPLES} == {"12", "16", "24", "48", "80", "141"}
    assert {example.gpus for example in EXAMPLES} >= {1, 2, 4, 8} and {example.nodes for example in EXAMPLES} == {1, 2}
    assert any(example.values.get("sp_size", 1) > 1 for example in EXAMPLES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_first_lines_say_what_the_file_is(example):
    command, place = example.file.read_text().splitlines()[:2]
    words = dict(word.split("=") for word in shlex.split(command)[3:])
    assert words["CONFIG"] == f"examples/{example.name}.yaml" and "DATA" in words
    assert int(words.get("GPUS", 1)) == example.gpus and int(words.get("NODES", 1)) == example.nodes
    settings = generate.settings_of(example)
    assert settings.max_length == example.values["max_length"]
    assert place == "# planned for " + (
        f"{example.nodes} nodes of {example.gpus} x {example.gpu}" if example.nodes > 1 else
        f"{example.gpus} x {example.gpu}"
    )  # fmt: skip
    assert (example.config / "config.json").is_file()
    assert candidates.plan_point_of(settings).ranks == example.gpus * example.nodes


def test_the_table_has_a_row_for_each():
    names = re.findall(r"^\| \[([^]]+)\]", generate.README.read_text(), re.M)
    assert names == [example.name for example in EXAMPLES]
    assert "does not fit" not in generate.README.read_text()


@pytest.mark.parametrize("name", slow_but(QUICK, []))
def test_the_plan_of_what_the_table_recomputes_fits_and_is_its_row(name):
    example = next(example for example in EXAMPLES if example.name == name)
    rows = generate.README.read_text().splitlines()
    cells = next(row for row in rows if row.startswith(f"| [{example.name}]")).split(" | ")
    planned = generate.plan(example, cells[generate.COLUMNS.index("recomputed")])
    assert planned["fits"] and generate.row(example, planned) in rows


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_the_plan_fits_and_is_what_the_table_says(example):
    planned = generate.plan(example)
    assert planned["fits"], f"{planned['needs'] / 2**30:.1f} of {planned['has'] / 2**30:.1f} GiB"
    row = generate.row(example, planned)
    assert row in generate.README.read_text().splitlines(), f"run `make examples`; now: {row}"


@pytest.mark.slow
def test_make_takes_one():
    example = next(example for example in EXAMPLES if example.name in QUICK)
    words = ["make", "show", example.recipe, f"CONFIG={example.file}", f"MODEL={example.config}", "DATA=none.jsonl",
             "ENV=active", f"PYTHON={sys.executable}"]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0 and str(example.values["max_length"]) in done.stdout, done.stderr
