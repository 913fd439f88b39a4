"""Technique x technique x stage: the docs show what the checks say, and what they accept trains."""

import json
import os
import subprocess
import sys

import pytest
from compatibility import flags, table, verdict
from conftest import ROOT, TINY

from zerofit.config import resolve

BASE = ["--data", str(TINY / "train.jsonl"), "--max_samples", "16", "--max_steps", "2", "--max_length", "128",
        "--per_device_train_batch_size", "4", "--logging_steps", "1", "--save_strategy", "no", "--num_samples", "0",
        "--shuffle_buffer_size", "8"]  # fmt: skip
NAMES = [n for n, t in resolve.TECHNIQUES.items() if not t.cuda]


def test_rules_refuse_by_name():
    both = verdict(("LoRA+", "Sophia"), "0", BASE)
    assert both.startswith("--loraplus_lr_ratio 4.0 with --optim sophia: ")
    assert verdict(("LoRA+",), "0", BASE) == verdict(("Sophia",), "0", BASE) == ""
    assert verdict(("bf16", "pure bf16"), "0", BASE) == ""
    assert verdict(("SGD", "Lion"), "0", BASE) == "-"


@pytest.mark.slow
def test_the_table_in_the_docs():
    """`python -m pytest tests/config/test_exclusions.py -m slow -k table` prints it where it differs."""
    text = table(BASE)
    print(text)
    assert text in (ROOT / "docs" / "compatibility.md").read_text()


def pairs(zero):
    for i, one in enumerate(NAMES):
        yield (one,)
        for other in NAMES[:i]:
            yield other, one


@pytest.mark.slow
@pytest.mark.parametrize("zero", resolve.STAGES)
@pytest.mark.timeout(7200)
def test_every_pair_that_is_accepted_trains(zero, tmp_path):
    cases = []
    for names in pairs(zero):
        if verdict(names, zero, BASE) == "":
            recipe, words = flags(names, zero)
            folder = tmp_path / "-".join(names).replace(" ", "_")
            cases.append({"name": " + ".join(names), "recipe": recipe,
                          "flags": [*BASE, *words, "--output_dir", str(folder)]})  # fmt: skip
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1",
         str(ROOT / "benchmarks" / "ledger_world.py"), str(file)],
        check=True, timeout=7000, env=os.environ | {"OMP_NUM_THREADS": "2"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    failed = {}
    for case in cases:
        folder = tmp_path / case["name"].replace(" + ", "-").replace(" ", "_")
        result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
        if result.get("status") != "finished" or not 0 < result["last_loss"] < 20:
            said = folder / "error.txt"
            failed[case["name"]] = said.read_text()[:300] if said.exists() else str(result)[:300]
    assert not failed, json.dumps(failed, indent=1)
    assert len(cases) > 100
