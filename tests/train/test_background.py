"""--save_in_background: the same checkpoints and losses as without; no kill or failed write loses the one before."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, Run, recipe_process, run_python, run_world, runs_slow, slow_but, two_layers

from zerofit.checkpoint import background, integrity, pickles
from zerofit.checkpoint.facts import STAGING, read_facts
from zerofit.job import run_folder
from zerofit.plan import formulas

FLAGS = [
    "--model", two_layers(),
    "--data", str(TINY / "train.jsonl"), "--max_samples", "48", "--effective_batch_size", "8", "--num_samples", "0",
    "--per_device_train_batch_size", "4", "--learning_rate", "1e-3", "--max_steps", "8", "--logging_steps", "1",
    "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "2",
]  # fmt: skip
ON = ["--save_in_background", "true"]
KINDS = {
    "1": ("sft", ["--zero", "1"]), "2": ("sft", ["--zero", "2", "--bf16", "true"]), "3": ("sft", ["--zero", "3"]),
    "lora": ("lora", ["--zero", "3", "--bf16", "true"]), "offload": ("sft", ["--zero", "2", "--offload", "optimizer"]),
}  # fmt: skip
SHORT = ("3",)  # without slow tests


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Two ranks: without, with, and gone on from a checkpoint that a thread has written."""
    folder, cases = tmp_path_factory.mktemp("background"), {}
    for name in KINDS if runs_slow(request) else SHORT:
        recipe, more = KINDS[name]
        cases[name] = recipe, [*FLAGS, *more]
        cases[f"{name}-on"] = recipe, [*FLAGS, *more, *ON]
        resumed = ["--resume_from_checkpoint", str(folder / f"{name}-on" / "checkpoint-6")]
        cases[f"{name}-resumed"] = recipe, [*FLAGS, *more, *resumed]
    return run_world(2, cases, folder)


def tensors_of(value, place: str = "") -> dict[str, torch.Tensor]:
    """Return {place in the content of a file: tensor}."""
    if torch.is_tensor(value):
        return {place: value}
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {name: t for key, entry in entries for name, t in tensors_of(entry, f"{place}/{key}").items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(KINDS, SHORT))
def test_the_same_is_saved_and_trained(runs, name):
    plain, written = runs[name], runs[f"{name}-on"]
    assert written.losses == plain.losses and runs[f"{name}-resumed"].losses == plain.losses[6:]
    assert not (written.folder / STAGING).exists()
    for step in (6, 8):  # the older ones are deleted as without
        saved, wanted = (run.folder / f"checkpoint-{step}" for run in (written, plain))
        assert integrity.find_corruption(saved) == ""
        assert read_facts(saved)["files"].keys() == read_facts(wanted)["files"].keys()
        assert read_facts(saved)["step"] == step
        for file in wanted.rglob("*_states.pt"):
            found, expected = (tensors_of(pickles.load(f / file.relative_to(wanted))) for f in (saved, wanted))
            assert found.keys() == expected.keys() and expected
            assert all(torch.equal(found[place], tensor) for place, tensor in expected.items()), file
    assert sorted(run_folder.checkpoints(written.folder)) == [6, 8]


def test_the_plan_counts_what_is_copied(runs):
    trained = runs["3-on"].json("result.json")["trainable_parameters"]
    setting = formulas.PlanPoint(zero=3, offload="none", every=0, micro=1, tokens=1, accumulation=1, ranks=2)
    states = (runs["3-on"].folder / "checkpoint-8").rglob("*_states.pt")
    copied = sum(t.nbytes for file in states for t in tensors_of(pickles.load(file)).values())
    assert formulas.saved_bytes_per_node(SimpleNamespace(trainable=trained), setting) == pytest.approx(copied, rel=0.01)


@pytest.mark.slow  # as kills of all kinds, in test_kills.py
@pytest.mark.fault
def test_a_kill_during_the_writing_keeps_the_newest_one(runs, tmp_path):
    folder, flags = tmp_path / "run", [*FLAGS, "--zero", "3", *ON]
    words = [sys.executable, str(ROOT / "tests" / "slow_save.py"), "hangs", str(ROOT / "recipes" / "sft.py")]
    with Path(os.devnull).open("w") as nowhere:
        process = subprocess.Popen([*words, *flags, "--output_dir", str(folder)], stdout=nowhere, stderr=nowhere)
        metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 240
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 6:  # it trains on behind step 4
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
    assert (folder / STAGING).exists() and list(run_folder.checkpoints(folder)) == [2]
    assert integrity.find_corruption(folder / "checkpoint-2") == ""
    again = recipe_process("sft", *flags, "--output_dir", str(folder), "--resume_from_checkpoint", "auto")
    assert again.returncode == 0, again.stderr[-3000:]
    assert sorted(run_folder.checkpoints(folder)) == [6, 8] and not (folder / STAGING).exists()
    assert [line["step"] for line in Run(folder).metrics] == list(range(1, 9))
    assert Run(folder).losses == pytest.approx(runs["3"].losses, rel=1e-4)  # of two ranks


# Steps of a tiny model can be faster than the thread that writes; with this, training waits for the thread.
WRITTEN_FIRST = """
import runpy, sys
from zerofit.checkpoint import background

class Written(background.Writing):
    def __init__(self, work):
        super().__init__(work)
        self.wait()

background.Writing = Written
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.fault
def test_a_failed_write_ends_the_run_before_the_next_save(tmp_path):
    """On all ranks: they vote at the end of step 5 and read the result at the end of step 6."""
    folder = tmp_path / "run"
    (tmp_path / "written_first.py").write_text(WRITTEN_FIRST)
    flags = [*FLAGS, "--zero", "2", *ON, "--max_steps", "12", "--save_steps", "4", "--output_dir", str(folder)]
    words = [str(tmp_path / "written_first.py"), str(ROOT / "tests" / "slow_save.py"), "fails"]
    words.append(str(ROOT / "recipes" / "sft.py"))
    done = run_python([*words, *flags], ranks=2)
    assert done.returncode == 1
    assert "checkpoint-4 was not saved: rank 1 could not write it: [Errno 5] Input/output error" in done.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed" and "checkpoint-4 was not saved" in result["error"] and result["steps"] == 6
    assert not run_folder.checkpoints(folder)


def test_copies_are_apart_and_their_memory_is_used_again():
    tied, odd = torch.arange(6.0).view(2, 3), torch.arange(5)[::2]
    content = {"a": [tied, tied.view(2, 3), tied.view(3, 2)], "b": {"odd": odd, "none": torch.empty(0)}, "rate": [0.5]}
    copies = background.HostCopies()
    copied = copies.copy(content)
    tied.zero_()
    odd.zero_()
    content["rate"][0] = 0.25
    assert copied["a"][0].flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and copied["a"][0] is copied["a"][1]
    assert copied["a"][2].shape == (3, 2) and copied["b"]["odd"].tolist() == [0, 2, 4] and copied["rate"] == [0.5]
    assert copied["b"]["none"].numel() == 0
    buffers, copies.used = [buffer.data_ptr() for buffer in copies.buffers], 0
    assert copies.copy(content)["a"][0].sum() == 0
    assert [buffer.data_ptr() for buffer in copies.buffers] == buffers
