"""Every way of starting a job on GPUs chooses the same micro batch and gradient checkpointing, on all ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY

from gpu_machine import Card, machine
from zerofit.base import distributed

FLAGS = ["--model", str(TINY / "model"), "--data", str(TINY / "train.jsonl"), "--max_length", "128",
         "--effective_batch_size", "48"]  # fmt: skip

LORA = ["recipes/lora.py", *FLAGS, "--zero", "0"]

SHARDED = ["recipes/sft.py", *FLAGS, "--zero", "3"]

CHOSEN = {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 1, "gradient_checkpointing": False}

PYTHON = [sys.executable]


def by_make(ranks, job=LORA):
    variables = [f"GPUS={ranks}", "ENV=active", f"PYTHON={sys.executable}", f"ARGS={' '.join(job[1:])}"]
    return ["make", Path(job[0]).stem, *variables]


def by_torchrun(ranks, job=LORA):
    return [*PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", port(), *job]


def by_accelerate(ranks, job=LORA):
    placed = ["--multi_gpu", "--num_processes", str(ranks), "--main_process_port", port()]
    return [*PYTHON, "-m", "accelerate.commands.launch", *placed, *job]


def by_deepspeed(ranks, job=LORA):
    places = ",".join(map(str, range(ranks)))
    placed = ["--include", f"localhost:{places}", "--master_port", port()]
    return [*PYTHON, "-m", "deepspeed.launcher.runner", *placed, *job]


def by_python(ranks, job=LORA):
    return [*PYTHON, *job]


def port() -> str:
    return str(distributed.free_port())


def started(folder, command: list[str], cards: int, **variables) -> tuple[str, list[dict], dict]:
    """What a job prints, the settings of each rank that it would train with, and its run.json."""
    settings = folder / "settings"
    settings.mkdir()
    env = machine(folder, [Card()] * cards, ZEROFIT_CACHE=str(folder / "cache"), GPU_MACHINE_SETTINGS=str(settings),
                  **variables)  # fmt: skip
    paths = [path for path in env["PYTHONPATH"].split(os.pathsep) if path != str(ROOT / "src")]
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *paths])
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, cwd=ROOT)
    ranks = [json.loads((settings / f"rank{rank}.json").read_text()) for rank in range(len(list(settings.iterdir())))]
    assert ranks and (folder / "run" / "run.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr, ranks, json.loads((folder / "run" / "run.json").read_text())


def check(said: str, ranks: list[dict], run: dict, count: int, chosen: dict) -> None:
    assert len(ranks) == run["world_size"] == count
    written = {name: one["value"] for name, one in run["arguments"].items()}
    source = {name: one["source"] for name, one in run["arguments"].items()}
    for rank in [*ranks, {"values": written, "source": source, "decisions": run["decisions"]}]:
        assert {name: rank["values"][name] for name in chosen} == chosen
        assert rank["source"]["per_device_train_batch_size"] == rank["source"]["gradient_checkpointing"] == "plan"
        (why,) = (sentence for sentence in rank["decisions"] if "GiB per rank by formula" in sentence)
        assert why.startswith("per_device_train_batch_size ") and f"plan: {why}" in said
        assert f"effective batch 48 = per_device_train_batch_size {chosen['per_device_train_batch_size']} x" in str(
            rank["decisions"]
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", [by_make, by_torchrun, by_accelerate, by_deepspeed])
def test_two_ranks_choose_the_same_however_they_are_started(way, tmp_path):
    check(*started(tmp_path, way(2), 2), 2, CHOSEN)


@pytest.mark.slow
@pytest.mark.parametrize("way", [by_make, by_accelerate])
def test_two_ranks_choose_the_same_for_sharded_weights_however_they_are_started(way, tmp_path):
    check(*started(tmp_path, way(2, SHARDED), 2), 2, CHOSEN | {"zero": "3"})


@pytest.mark.slow
@pytest.mark.parametrize("way", [by_make, by_python])
def test_one_rank_chooses_the_same_however_it_is_started(way, tmp_path):
    check(*started(tmp_path, way(1), 1), 1, CHOSEN | {"per_device_train_batch_size": 48})


@pytest.mark.slow
def test_a_micro_batch_that_is_to_be_searched_is_chosen_without_a_launcher(tmp_path):
    command = [*by_torchrun(2), "--per_device_train_batch_size", "auto"]
    check(*started(tmp_path, command, 2), 2, CHOSEN | {"search_batch_size": False})


@pytest.mark.slow
def test_without_the_check_nothing_is_chosen(tmp_path):
    said, ranks, _ = started(tmp_path, by_python(1), 1, ZEROFIT_PLAN="0")
    assert ranks[0]["values"]["per_device_train_batch_size"] == 8 and "plan:" not in said
