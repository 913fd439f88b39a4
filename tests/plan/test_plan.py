"""A simulated run equals the real one; the planner searches, refuses and says why; nothing of it needs a GPU."""

import dataclasses
import json
import math
import os
import pwd
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT, TINY, recipe_process, run_world, slow_but
from huggingface_hub.errors import StrictDataclassError
from image_text_models import config_of
from transformers import CONFIG_MAPPING, AutoConfig, TrainingArguments
from transformers.models.auto import modeling_auto

from zerofit.base import command_line, hardware
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.base.paths import cache_root, private_folder
from zerofit.checkpoint import restart
from zerofit.commands import plan as plan_command
from zerofit.config import accelerate_env, nvme, parse, resolve
from zerofit.data import tokens
from zerofit.data.load import load_datasets
from zerofit.job import job as job_file
from zerofit.model.image_text import classes
from zerofit.model.kernels import linear_attention
from zerofit.model.load import load_tokenizer
from zerofit.parallel import pipeline, sequence_parallel, tensor_parallel
from zerofit.plan import (
    candidates,
    choice,
    formulas,
    gpu_memory,
    planner,
    predict,
    preflight,
    search,
    simulate,
    simulated_rank,
)
from zerofit.plan.advice import alternatives
from zerofit.plan.answer import answer_text, run_line
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.speed import step
from zerofit.train import run as training_run

sys.path.insert(0, str(ROOT / "benchmarks"))
import plan as benchmark
import scaling

pytestmark = pytest.mark.usefixtures("forks")
CONFIGS = ROOT / "tests" / "configs"
GPU = hardware.GPUS["h100-80g"]


def job(flags, recipe="sft"):
    return parse.request(recipe, flags)


# --- without memory = with memory ---

FEW = [
    ("sft", "--zero 2 --gradient_checkpointing true", 8),
    ("sft", "--zero 3", 2),  # exchanges whole layers
    ("dpo", "--zero 3 --adapter lora --load_in_4bit true --eval_fraction 0.1", 2),
]


def errors_above(rows, bound):
    assert not [row for row in rows if "failed" in row]
    return {row["case"]: row["error"] for row in rows if abs(row["error"]) > bound}


@pytest.mark.oracle
@pytest.mark.parametrize("case", slow_but(FEW, FEW[:2]), ids=["sft", "whole layers", "dpo"])
def test_a_simulation_has_the_bytes_of_real_tensors(case, record_property):
    """Every phase, through the kit's trainer and the real engine as one rank of N."""
    rows = benchmark.compare([case])
    errors = errors_above(rows, 0)  # first of all: a row that has failed has no error
    record_property("relative_difference", max(abs(row["error"]) for row in rows))
    assert errors == {}


@pytest.mark.oracle
@pytest.mark.slow
def test_a_simulation_of_kto_has_the_bytes_of_real_tensors():
    """The forwards of its KL term and of its reference, in a step and in an evaluation."""
    rows = benchmark.compare([
        ("dpo", "--zero 2 --loss_type kto --eval_fraction 0.1", 2),
        ("dpo", "--zero 3 --adapter lora --loss_type kto --eval_fraction 0.1", 2),
        ("dpo", "--zero 0 --loss_type apo_zero_unpaired", 1),
    ])  # fmt: skip
    assert errors_above(rows, 0) == {} and len(rows) >= 3


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_simulation_has_the_bytes_of_real_tensors_everywhere():
    """`make plan-validate` on the CPU: 145 settings."""
    rows = benchmark.compare(benchmark.cpu_cases())
    assert errors_above(rows, 0) == {}
    assert len(rows) >= 60


TWO_RANKS = {
    "sft-0": ("sft", "--zero 0"), "sft-2": ("sft", "--zero 2"), "lora-3": ("lora", "--zero 3"),
    "sft-3": ("sft", "--zero 3"), "sft-3-recomputed": ("sft", "--zero 3 --gradient_checkpointing true"),
    "dpo-0": ("dpo", "--zero 0"), "dpo-2": ("dpo", "--zero 2"), "dpo-3": ("dpo", "--zero 3 --adapter lora"),
    "kto-2": ("dpo", "--zero 2 --loss_type kto"),
}  # fmt: skip


@pytest.fixture(scope="module")
def full_rows(tmp_path_factory):
    """Rows of exactly 64 tokens, as a plan supposes them."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    row = {"input_ids": [5 + i % 50 for i in range(64)], "labels": [5 + i % 50 for i in range(64)]}
    file.write_text((json.dumps(row) + "\n") * 16)
    pair = {"prompt": "a", "chosen": "b " * 100, "rejected": "c " * 100}  # cut to 64 tokens a side
    (file.parent / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 16)
    return file


@pytest.mark.oracle
@pytest.mark.slow
def test_a_simulation_equals_two_real_ranks(full_rows, tmp_path):
    """Recipes on two gloo processes, followed by --memory_report, against simulations of both ranks.

    gloo's reduce-scatter copies its whole input, a bucket of 3 % of the bytes with whole layers; NCCL reduces in place.
    """
    common = ["--model", str(TINY / "model"), "--max_length", "64", "--per_device_train_batch_size", "1",
              "--effective_batch_size", "2"]  # fmt: skip
    run_only = ["--max_steps", "3", "--save_strategy", "no", "--num_samples", "0", "--memory_report", "true"]
    cases = {}
    for name, (recipe, flags) in TWO_RANKS.items():
        rows = full_rows.with_name("pairs.jsonl") if recipe == "dpo" else full_rows
        cases[name] = (recipe, [*common, *flags.split(), "--data", str(rows)])
    followed = {name: (recipe, [*flags, *run_only]) for name, (recipe, flags) in cases.items()}
    runs = run_world(2, followed, tmp_path, ZEROFIT_TEST_REDUCE_IN_PLACE="1")
    asked = [simulate.Question(job(flags, recipe), 2, rank) for recipe, flags in cases.values() for rank in (0, 1)]
    answers = iter(simulate.run_all(asked))
    for name, run in runs.items():
        measured = {rank["rank"]: rank["peak"] for rank in run.json("memory.json")["ranks"]}
        assert len(measured) == 2
        for rank in (0, 1):
            predicted = next(answers)
            for phase in ("forward", "backward", "step"):
                real = sum(measured[rank][phase].values())
                assert predicted["total"][phase] == pytest.approx(real, rel=0.005), (name, rank, phase)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "layers"), [(3, 13), (2, 44)])
def test_layers_are_extended(zero, layers, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    config = json.loads((TINY / "model" / "config.json").read_text()) | {"num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--model", str(tmp_path), "--data", "none", "--zero", str(zero), "--max_length", "64",
             "--gradient_checkpointing", "true"]  # fmt: skip
    (whole,) = simulate.run_all([simulate.Question(job(flags), 8, gpu=GPU)])
    shape = candidates.shape_of(resolve.resolve_settings("sft", flags, 8, GPU))
    extended = predict.answer_of(simulate.Question(job(flags), 8, gpu=GPU), shape, zero=zero, every=1)
    assert extended["extended_from_layers"] == list(predict.FIRST_DEPTHS[zero == 2])
    assert extended["parameters"] == whole["parameters"]
    for phase, size in whole["total"].items():
        # While stage 3 loads, a bucket or the copies of all layers are the most, so few layers say too little.
        near = 0.1 if (phase, zero) == ("load", 3) else 0.005
        assert extended["total"][phase] == pytest.approx(size, rel=near), phase
    assert zero == 2 or whole["total"]["load"] < max(whole["total"].values()) / 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(f.name for f in CONFIGS.iterdir()))
def test_every_architecture_has_a_plan(name):
    """Two layers of each config.json: fake = real on the CPU."""
    fake, real = two_small_layers("sft", name)
    assert fake["parameters"] == real["parameters"]
    bound = 0.25 if "moe" in name else 0.005  # which expert a token takes is not known without numbers
    for phase, size in real["total"].items():
        assert fake["total"][phase] == pytest.approx(size, rel=bound), phase


def two_small_layers(recipe, name, *flags):
    """The answers of a simulation and of real tensors on the CPU."""
    own = ["--bf16", "true"] if "moe" in name else []  # without numbers, experts' grouped products are bf16 only
    small = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "vocab_size": 512,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4,
             "moe_intermediate_size": 64, "num_experts_per_tok": 2, "n_layer": 2, "pad_token_id": 0}  # fmt: skip
    config = json.loads((CONFIGS / name / "config.json").read_text())
    overrides = {k: v for k, v in small.items() if k in config}
    words = ["--model", str(CONFIGS / name), "--data", "none", "--zero", "2", "--max_length", "64",
             "--per_device_train_batch_size", "1", "--effective_batch_size", "2", *own, *flags]  # fmt: skip
    asked = [simulate.Question(job(words, recipe), 2, fake=fake, overrides=overrides) for fake in (True, False)]
    return simulate.run_all(asked[:1]) + simulate.run_all(asked[1:])


# --- closed forms ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "checkpointing"),
    [
        (2, candidates.EVERY_LAYER),
        (3, candidates.Checkpointing(0)),
        (3, candidates.Checkpointing(1, selective=True)),
        (3, candidates.Checkpointing(2)),
    ],
    ids=str,
)
def test_closed_forms_agree_with_the_simulation(zero, checkpointing):
    flags = ["--model", str(CONFIGS / "llama3.1-8b"), "--max_length", "8192", "--zero", str(zero),
             "--per_device_train_batch_size", "1", "--effective_batch_size", "8", "--fused_loss", "false",
             "--offload", "none", "--sp_size", "1"]  # fmt: skip
    flags = command_line.put(flags, **checkpointing.flags)
    (candidate,) = candidates.candidates("sft", job(flags), 8, GPU)
    predict.simulate_candidate(candidate)
    assert candidate.failed == ""
    assert sum(candidate.formula.values()) == pytest.approx(max(candidate.answer["total"].values()), rel=0.03)


@pytest.mark.oracle
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_closed_forms_agree_with_the_simulation_in_fp32(checkpointing, tmp_path, record_property):
    """A small model in fp32 under autocast: the fused loss multiplies half-precision factors into fp32 as on a
    GPU, without copies of them."""
    config = {"model_type": "llama", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4,
              "num_attention_heads": 12, "vocab_size": 50304, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--model", str(tmp_path), "--zero", "0", "--offload", "none", "--per_device_train_batch_size", "4",
             "--max_length", "1024", "--gradient_checkpointing", checkpointing, "--fused_loss", "true"]  # fmt: skip
    (candidate,) = candidates.candidates("sft", job(flags), 1, GPU)
    predict.simulate_candidate(candidate)
    assert candidate.failed == ""
    formula, simulated = sum(candidate.formula.values()), max(candidate.answer["total"].values())
    record_property("relative_difference", abs(formula / simulated - 1))
    assert formula == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize(("words", "suffice", "gpu"), [
    ("--zero 2 --bf16 true", True, "h100-80g"), ("--zero 2 --pure_bf16 true", True, "h100-80g"),
    ("--zero 3 --pure_bf16 true", False, "h100-80g"), ("--zero 0 --bf16 false --dtype bfloat16", True, "h100-80g"),
    ("--zero 2 --bf16 false --dtype bfloat16", False, "h100-80g"), ("--zero 2 --dtype float16", True, "t4-16g"),
    ("--zero 2 --fp16 false --dtype float16", False, "t4-16g"),
])  # fmt: skip
def test_jobs_that_the_closed_forms_do_not_describe_are_simulated(words, suffice, gpu):
    flags = ["--model", str(CONFIGS / "llama3.2-1b"), *words.split(), "--offload", "none", "--sp_size", "1",
             "--per_device_train_batch_size", "1", "--effective_batch_size", "8",
             "--gradient_checkpointing", "true"]  # fmt: skip
    (candidate,) = candidates.candidates("sft", job(flags), 8, hardware.GPUS[gpu])
    assert candidates.formulas_suffice(candidate) is suffice


@pytest.mark.slow
@pytest.mark.parametrize(("method", "flags", "gpus"), [("lora", ["--zero", "3"], 8), ("qlora", ["--zero", "0"], 1)])
def test_closed_forms_count_fused_experts(method, flags, gpus):
    """LoRA on all experts of Qwen3-30B-A3B: the sums of weights and products; QLoRA: experts in 16 bits."""
    flags = ["--model", str(CONFIGS / "qwen3-moe-30b"), *flags, "--offload", "none", "--gradient_checkpointing", "true",
             "--per_device_train_batch_size", "1", "--effective_batch_size", "8", "--max_length", "2048",
             "--sp_size", "1"]  # fmt: skip
    request = job(flags, candidates.recipe_of(method))
    (candidate,) = candidates.candidates(method, request, gpus, GPU)
    predict.simulate_candidate(candidate)
    simulated = max(candidate.answer["total"].values())
    assert sum(candidate.formula.values()) == pytest.approx(simulated, rel=0.08)
    assert candidate.shape.adapted_experts == 128 * (3 * 768 + 1) * 2048  # and the router
    assert candidate.shape.frozen_bytes > 1.9


@pytest.mark.parametrize(
    ("name", "flags"),
    [("qwen2.5-0.5b", []), ("pythia-1b", []), ("pythia-1b", ["--lora_target_modules", "lm_head"]), ("gpt2", [])],
)
@pytest.mark.parametrize(("bits", "each"), [(4, 0.55), (8, 1.0)])
def test_embeddings_and_head_of_a_packed_base_count_in_16_bits(name, flags, bits, each):
    flags = ["--model", str(CONFIGS / name), *flags, "--data", "x", f"--load_in_{bits}bit", "true", "--zero", "0"]
    shape = candidates.shape_of(resolve.resolve_settings("lora", flags, 1, GPU))
    config = AutoConfig.from_pretrained(CONFIGS / name)
    positions = config.n_positions if name == "gpt2" else 0
    rows = config.vocab_size * (1 if config.tie_word_embeddings else 2) + positions
    unpacked = rows * config.hidden_size
    counted = 2 * unpacked + each * (shape.frozen - unpacked)
    assert shape.frozen * shape.frozen_bytes == pytest.approx(counted, rel=2e-3)  # norms and biases are the rest


def test_formulas_of_sharding():
    """16 bytes a parameter, shared out by stage (arXiv 1910.02054), where activations are nothing."""
    shape = formulas.Shape(8_000_000_000, 0, 1, 4096, 32, 32, 8, 128, 14336, 128256)
    settings = resolve.resolve_settings("sft", ["--bf16", "true", "--zero", "2"], 8, GPU)
    psi, states = shape.trainable, {}
    for zero in (0, 1, 2, 3):
        setting = formulas.PlanPoint(zero, "none", 1, 1, 1, 1, 8)
        states[zero] = formulas.memory(shape, setting, settings, True)
    assert states[0]["optimizer"] == 8 * psi and states[1]["optimizer"] == states[2]["optimizer"] == 12 * psi / 8
    assert states[2]["parameters"] == 2 * psi and states[3]["parameters"] == 2 * psi / 8
    assert states[3]["gradients"] == 2 * psi / 8


def test_less_is_faster():
    shape = formulas.Shape(8_000_000_000, 0, 525_336_576, 4096, 32, 32, 8, 128, 14336, 128256)

    def seconds(zero=2, offload="none", every=0, micro=2):
        setting = formulas.PlanPoint(zero, offload, every, micro, 2048 * micro, 8 // micro, 8)
        return step.seconds(shape, setting, GPU, 2048)

    assert seconds() < seconds(zero=3) < seconds(zero=3, offload="optimizer") < seconds(zero=3, offload="all")
    assert seconds() < seconds(every=2) < seconds(every=1)
    assert seconds(micro=4) < seconds(micro=2) < seconds(micro=1)


SHAPE_8B = formulas.Shape(8_000_000_000, 0, 525_336_576, 4096, 32, 32, 8, 128, 14336, 128256)


def of_nodes(zero, ranks, node=8, accumulation=1, hpz=1):
    return formulas.PlanPoint(zero, "none", 1, 2, 8192, accumulation, ranks, node=node, hpz=hpz)


@pytest.mark.parametrize(("zero", "gathers_and_reduces"), [(0, 4), (1, 2), (2, 2), (3, 3)])
def test_bytes_within_and_between_nodes(zero, gathers_and_reduces):
    """In a ring through nodes of 8 every eighth link leaves its node; the sum is what one ring of all GPUs sends."""
    weights = 2 * SHAPE_8B.trainable
    within, across = formulas.wire_bytes(SHAPE_8B, of_nodes(zero, 8))
    assert across == 0 and within == pytest.approx(gathers_and_reduces * weights * 7 / 8)
    within, across = formulas.wire_bytes(SHAPE_8B, of_nodes(zero, 64))
    assert within + across == pytest.approx(gathers_and_reduces * weights * 63 / 64)
    assert within == pytest.approx(7 * across)
    assert formulas.wire_bytes(SHAPE_8B, of_nodes(zero, 1)) == (0, 0)
    assert formulas.wire_bytes(SHAPE_8B, of_nodes(zero, 4, node=1))[0] == 0


@pytest.mark.parametrize("accumulation", [1, 4])
def test_hpz_gathers_once_between_nodes(accumulation):
    """arXiv 2306.10209: 2 M between nodes instead of 3 M; with accumulation one gather, and a reduction each time."""
    _, plain = formulas.wire_bytes(SHAPE_8B, of_nodes(3, 64, accumulation=accumulation))
    _, hpz = formulas.wire_bytes(SHAPE_8B, of_nodes(3, 64, accumulation=accumulation, hpz=8))
    assert hpz / plain == pytest.approx((1 + accumulation) / (3 * accumulation))
    settings = resolve.resolve_settings("sft", ["--bf16", "true", "--zero", "3"], 64, GPU)
    memory = [formulas.memory(SHAPE_8B, of_nodes(3, 64, hpz=n), settings, True)["parameters"] for n in (1, 8)]
    assert memory[1] - memory[0] == 2 * SHAPE_8B.parameters / 8


def test_the_network_between_nodes_counts_where_there_are_several():
    def seconds(ranks, gbs, hpz=1, zero=3):
        gpu = dataclasses.replace(GPU, node_gbs=gbs)
        return step.seconds(SHAPE_8B, of_nodes(zero, ranks, hpz=hpz), gpu, 4096)

    assert seconds(8, 50) == seconds(8, 1)
    assert seconds(16, 50) < seconds(16, 5) < seconds(16, 1)
    assert seconds(64, 5, hpz=8) < seconds(64, 5)  # a slow network is what hpZ is for
    assert seconds(16, 50) < seconds(1024, 50)  # a ring of more GPUs takes longer, though it sends the same
    assert seconds(16, 400) == pytest.approx(seconds(16, 4000))  # the links within the node are the slower ones then


@pytest.mark.slow
def test_what_an_engine_calls_is_what_the_formula_says_it_sends():
    """The counting that scaling.py writes down, at stage 2 with accumulation: two reductions to owners, one gather."""
    found = scaling.count("8B", "ZeRO-2", 2, ranks=16, layers=1)
    shape = dataclasses.replace(SHAPE_8B, trainable=found["parameters"], layers=1)
    assert found["sent"] == pytest.approx(sum(formulas.wire_bytes(shape, of_nodes(2, 16, accumulation=2))), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "accumulation"), [("ZeRO-3", 1), ("ZeRO-3 + hpZ", 2)])
def test_what_stage_3_calls_is_what_the_formula_says_it_sends(way, accumulation):
    """But for the 1e9 parameters that it keeps from the forward to the backward."""
    found = scaling.count("8B", way, accumulation, ranks=16, layers=6)
    shape = dataclasses.replace(SHAPE_8B, trainable=found["parameters"], layers=6)
    setting = scaling._setting(*scaling.WAYS[way], 16, accumulation, 1)
    formula = sum(formulas.wire_bytes(shape, setting))
    assert formula - 2e9 * accumulation < found["sent"] <= formula * 1.0001
    if setting.hpz > 1:
        gathered = {kind: size for kind, (_, size) in found["calls"].items() if "gather" in kind}
        assert gathered["all_gather_into_tensor of 16"] == pytest.approx(2 * found["parameters"], rel=1e-3)
        assert gathered["all_gather_into_tensor of 8"] > gathered["all_gather_into_tensor of 16"]


# --- the search ---


def fake_simulation(size_of, host=0):
    """run_all that answers with `size_of(flags)` GiB, or fails where that is None; host: bytes of a rank."""

    def run_all(questions, cache=None, seconds=None):
        answers = []
        for question in questions:
            size = size_of(question.request.flags())
            if size is None:
                answers.append(simulate.SimulationFailed("no such kernel"))
                continue
            parts = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "logits", "buffers"), 0)
            total = {"load": 1, "forward": int(size * 2**30)}
            peak = {p: parts | {"parameters": n} for p, n in total.items()}
            answers.append({"peak": peak, "total": total, "host": host, "host_saving": 0, "model_states": {},
                            "parameters": 1, "trainable": 1})  # fmt: skip
        return answers

    return run_all


FLAGS_1B = ["--model", str(CONFIGS / "llama3.2-1b"), "--max_length", "1024"]


def test_the_fastest_that_fits_is_chosen(monkeypatch, tmp_path):
    def size_of(flags):
        return 10 if flags[flags.index("--zero") + 1] == "2" else 99

    monkeypatch.setattr(simulate, "run_all", fake_simulation(size_of))
    plan = planner.plan_of(["sft"], job(FLAGS_1B), 4, GPU, exact=True)
    assert plan.chosen.setting.zero == 2 and plan.chosen.answer
    assert all(c.seconds <= plan.chosen.seconds + 1e-3 for c, _ in plan.rejected)
    line = run_line.command_of(plan.chosen)
    assert line.startswith("make sft GPUS=4 MODEL=") and "ZERO=2" in line and "DATA=your.jsonl" in line
    answer_text.write(plan, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert written["chosen"]["command"] == line and written["limit_bytes"] == plan.limit
    assert (tmp_path / "out" / "plan.png").stat().st_size > 5000
    assert line in (tmp_path / "out" / "plan.md").read_text()


@pytest.mark.slow
def test_a_plan_for_several_nodes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 10))
    out = tmp_path / "plan"
    flags = [*FLAGS_1B, *"--zero 3 --offload none --per_device_train_batch_size 2 --output_dir".split(), str(out)]

    def plan(*words):
        plan_command.main(["--gpu_type", "h100-80g", *flags, *words])
        return capsys.readouterr().out, json.loads((out / "plan.json").read_text())

    said, found = plan("--nodes", "2", "--gpus", "4")
    assert "2 nodes x 4 x H100, " in said and found["gpus"] == 8 and found["gpus_of_a_node"] == 4
    command = "make sft GPUS=4 NODES=2 NODE_RANK=0 MASTER_ADDR=name-of-node-0 MODEL="
    assert found["chosen"]["command"].startswith(command)
    assert "(and NODE_RANK=1, 2, ... on the other nodes)" in said
    assert "to other nodes at 50 GB/s" in found["facts"]["sent by each GPU"]
    _, slow = plan("--nodes", "2", "--gpus", "4", "--node_link_gbs", "0.5")
    assert slow["chosen"]["seconds_per_step"] > found["chosen"]["seconds_per_step"]
    config = json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
    config["zero_optimization"]["zero_hpz_partition_size"] = 4
    (tmp_path / "hpz.json").write_text(json.dumps(config))
    copied = ["--deepspeed", str(tmp_path / "hpz.json")]
    _, hpz = plan("--nodes", "2", "--gpus", "4", "--node_link_gbs", "0.5", *copied)
    assert hpz["chosen"]["seconds_per_step"] < slow["chosen"]["seconds_per_step"] and "hpZ 4" in hpz["chosen"]["label"]
    with pytest.raises(UserError, match=r"zero_hpz_partition_size 4: .* must divide the 2 GPUs per node of this plan"):
        plan("--nodes", "4", "--gpus", "2", *copied)
    _, one = plan("--nodes", "1", "--gpus", "16")
    assert "nodes" not in one["facts"]["sent by each GPU"]
    said, many = plan("--gpus", "16")  # without --nodes: all GPUs, eight a node
    assert "2 nodes x 8 x H100, " in said and many["chosen"]["command"].startswith("make sft GPUS=8 NODES=2 ")


def test_a_plan_says_which_kernels_are_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 10))
    monkeypatch.setattr(
        linear_attention, "missing_kernels", lambda config: (f"{config.model_type} is slow", "pip install x")
    )
    fixed = ["--zero", "0", "--per_device_train_batch_size", "2", "--output_dir", str(tmp_path)]
    plan_command.main(["--gpu_type", "h100-80g", *FLAGS_1B, *fixed])
    assert "note: llama is slow; pip install x\n" in capsys.readouterr().out
    assert "note: llama is slow; pip install x" in (tmp_path / "plan.md").read_text()


def test_the_network_changes_no_simulation(monkeypatch):
    """Memory does not depend on it, and an answer that is kept is found again."""
    asked = []
    monkeypatch.setattr(
        simulate, "run_all", lambda questions, *a: asked.append(questions) or [simulate.SimulationFailed("no")]
    )
    for gbs in (50.0, 1.0):
        gpu = dataclasses.replace(GPU, node_gbs=gbs)
        predict.answer_of(simulate.Question(job([]), 8, gpu=gpu), SHAPE_8B, zero=0, every=0)
    assert asked[0] == asked[1]


def test_what_is_fixed_is_not_searched(monkeypatch):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 1))
    flags = [*FLAGS_1B, "--zero", "2", "--offload", "optimizer", "--gradient_checkpointing", "true",
             "--per_device_train_batch_size", "2"]  # fmt: skip
    (only,) = candidates.candidates("sft", job(flags), 2, GPU)
    assert (only.setting.zero, only.setting.offload, only.setting.every, only.setting.micro) == (2, "optimizer", 1, 2)


DEEPSPEED = {"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}


@pytest.mark.parametrize("place", ["flag", "YAML", "JSON"])
def test_the_stage_of_one_gpu_is_planned_without_offload(place, tmp_path):
    (tmp_path / "run.yaml").write_text("zero: 2\noffload: none\n")
    (tmp_path / "run.json").write_text(json.dumps(DEEPSPEED | {"zero_optimization": {"stage": 2}}))
    words = {"flag": ["--zero", "2", "--offload", "none"], "YAML": ["--config", str(tmp_path / "run.yaml")],
             "JSON": ["--deepspeed", str(tmp_path / "run.json"), "--offload", "none"]}  # fmt: skip
    found = candidates.candidates("sft", job([*FLAGS_1B, "--per_device_train_batch_size", "1", *words[place]]), 1, GPU)
    assert {(c.setting.zero, c.setting.offload) for c in found} == {(2, "none")}


@pytest.mark.parametrize("place", ["flag", "YAML"])
def test_accumulation_is_kept(place, tmp_path):
    (tmp_path / "run.yaml").write_text("gradient_accumulation_steps: 4\n")
    words = {"flag": ["--gradient_accumulation_steps", "4"], "YAML": ["--config", str(tmp_path / "run.yaml")]}
    flags = [*FLAGS_1B, "--zero", "3", "--offload", "none", "--effective_batch_size", "64", *words[place]]
    found = candidates.candidates("sft", job(flags), 8, GPU)
    assert {(c.setting.micro, c.setting.accumulation) for c in found if c.setting.sp == c.setting.tp == 1} == {(2, 4)}
    assert {c.setting.accumulation for c in found} == {4}
    settings = resolve.resolve(found[0].request, 8, GPU)
    assert (settings.per_device_train_batch_size, settings.gradient_accumulation_steps) == (2, 4)


def test_rows_are_split_where_one_does_not_fit(monkeypatch):
    """Micro batch 1 and checkpointing come first; --sp_size is searched among what is left, and said."""
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: None))
    flags = ["--model", str(CONFIGS / "llama3.1-8b"), "--offload", "none", "--activation_offload", "false",
             "--tiled_mlp", "1", "--use_liger_kernel", "false", "--effective_batch_size", "8", "--max_length", "262144",
             ]  # fmt: skip
    chosen = planner.plan_of(["sft"], job(flags), 8, GPU).chosen
    assert (chosen.setting.sp, chosen.setting.micro, chosen.setting.every) == (8, 1, 1)  # as fast as 4, and leaner
    assert chosen.label.endswith(", micro batch 1, sp_size 8") and " SP=8 " in run_line.command_of(chosen)
    assert (chosen.setting.tokens, chosen.setting.accumulation) == (32768, 8)
    short = planner.plan_of(["sft"], job([*flags[:-1], "4096"]), 8, GPU)
    assert short.chosen.setting.sp == 1
    with pytest.raises(
        UserError, match="--sp_size 4: a group must be on one node, so the size must divide the 3 GPUs per node"
    ):
        candidates.candidates("sft", job([*flags, "--sp_size", "4"]), 8, GPU, node=3)
    (two_nodes,) = {c.setting.sp for c in candidates.candidates("sft", job([*flags, "--sp_size", "4"]), 8, GPU, node=2)}
    assert two_nodes == 4
    few = candidates.candidates("sft", job([*flags, "--effective_batch_size", "2"]), 8, GPU)  # less than the GPUs
    assert {(c.setting.sp, c.setting.tp) for c in few} == {(4, 1), (8, 1), (1, 4), (1, 8)}


@pytest.mark.slow
def test_matrices_are_split_on_request_and_in_the_search(monkeypatch):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: None))
    flags = ["--model", str(CONFIGS / "llama3.1-8b"), "--effective_batch_size", "8", "--max_length", "2048"]
    chosen = planner.plan_of(["sft"], job([*flags, "--tp_size", "2"]), 8, GPU).chosen
    assert chosen.setting.tp == 2 and chosen.setting.zero in (1, 2) and chosen.setting.offload == "none"
    assert chosen.label.endswith(", tp_size 2") and " TP=2 " in run_line.command_of(chosen)
    assert chosen.host_bytes_per_node == 8 * 2 * chosen.shape.parameters  # each rank loads the whole model
    assert chosen.tokens_per_second == pytest.approx(8 * 2048 / chosen.seconds)
    searched = candidates.candidates("sft", job(flags), 8, GPU)
    assert {c.setting.tp for c in searched} == {1, 2, 4, 8} and searched[0].setting.tp == 1
    assert {c.setting.zero for c in searched if c.setting.tp > 1} == {1, 2}
    assert {c.setting.tp for c in candidates.candidates("lora", job(flags, "lora"), 8, GPU)} == {1}
    with pytest.raises(UserError, match="--tp_size 4: a group must be on one node, so the size must divide the 2 GPUs"):
        candidates.candidates("sft", job([*flags, "--tp_size", "4"]), 8, GPU, node=2)


def test_sp_size_in_a_config_file_is_kept(tmp_path):
    (tmp_path / "run.yaml").write_text("sp_size: 1\n")
    flags = ["--model", str(TINY / "model"), "--effective_batch_size", "8"]
    assert {c.setting.sp for c in candidates.candidates("sft", job(flags), 4, GPU)} == {1, 2, 4}
    with_file = [*flags, "--config", str(tmp_path / "run.yaml")]
    assert {c.setting.sp for c in candidates.candidates("sft", job(with_file), 4, GPU)} == {1}


def test_fewer_rows_than_gpus_are_split(monkeypatch):
    """An effective batch that no rank of its own can have is planned with the --sp_size that it allows."""
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 1))
    flags = ["--model", str(TINY / "model"), "--max_length", "512", "--effective_batch_size", "2"]
    request, _ = plan_command.with_real_lengths(job(flags), 4, GPU)
    assert planner.plan_of(["sft"], request, 4, GPU).chosen.setting.sp == 2
    with pytest.raises(UserError, match="--effective_batch_size 2 is not a multiple of 4 ranks"):
        planner.plan_of(["sft"], request.put(sp_size=1), 4, GPU)


def test_split_rows_by_formula():
    """1/sp_size of activations and logits, the same model states; four exchanges for each pass through an attention."""
    whole = formulas.PlanPoint(3, "none", 1, 1, 8192, 1, 8)
    split = dataclasses.replace(whole, groups=((sequence_parallel.PARALLEL, 8),), tokens=1024)
    one, part = (formulas.activations(SHAPE_8B, s, False) for s in (whole, split))
    assert part[0]["logits"] == one[0]["logits"] / 8 and part[0]["activations"] == one[0]["activations"] / 8
    assert formulas.exchanges(SHAPE_8B, whole) == []
    (calls,) = formulas.exchanges(SHAPE_8B, split)
    passes = 3 * SHAPE_8B.layers  # forward, recomputation, backward
    width = 2 * (SHAPE_8B.heads + SHAPE_8B.kv_heads) * SHAPE_8B.head_dim  # q, k, v and output
    assert (calls.calls, calls.ranks) == (4 * passes, 8)
    assert calls.sent == 2 * 1024 * width * passes * 7 / 8
    assert formulas.wire_bytes(SHAPE_8B, split)[0] == formulas.wire_bytes(SHAPE_8B, whole)[0] + calls.sent


@pytest.mark.slow
def test_nothing_fits_says_what_is_missing_and_what_would_do(monkeypatch):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 30))
    plan = planner.plan_of(
        ["sft"], job(["--model", str(CONFIGS / "llama3.1-8b"), "--offload", "none"]), 1, hardware.GPUS["t4-16g"]
    )
    assert plan.chosen is None
    sentence = answer_text.nothing_fits(plan)
    assert sentence.startswith("nothing fits: the smallest setting is sft ZeRO-") and "GiB too much for T4" in sentence
    assert plan.sufficient_gpus and plan.sufficient_gpus > 8 and f"{plan.sufficient_gpus} GPUs suffice" in sentence


@pytest.mark.slow
def test_a_disk_is_used_when_host_memory_is_short(monkeypatch):
    """12 GiB of states fit no GPU of 8; they fit a host of 64, and with 8 GiB of host memory only a disk."""
    monkeypatch.setattr(
        simulate, "run_all", fake_simulation(lambda flags: 6 if "none" not in flags else 20, host=12 * 2**30)
    )
    fixed = [*FLAGS_1B, "--zero", "3", "--gradient_checkpointing", "true", "--per_device_train_batch_size", "1"]
    flags = [*fixed, "--offload_path", "/fast/disk"]
    small = hardware.Gpu("small", 8.0, 100.0, 900, 25, 25)
    plan = planner.plan_of(["sft"], job(flags), 1, small, host_memory_limit=64 * 2**30)
    assert plan.chosen.setting.offload == "optimizer" and not plan.chosen.setting.nvme
    assert "offload_path" not in plan.chosen.request.values
    plan = planner.plan_of(["sft"], job(flags), 1, small, host_memory_limit=8 * 2**30)
    assert plan.chosen.setting.nvme and "offload optimizer to NVMe" in plan.chosen.label
    assert "--offload_path /fast/disk" in run_line.command_of(plan.chosen)
    assert any(
        "host memory 21 GiB per node > 8" in why or "host memory 12 GiB per node > 8" in why for _, why in plan.rejected
    )
    assert "GiB of optimizer states and gradients in --offload_path" in answer_text.text(plan)
    plan = planner.plan_of(["sft"], job(fixed), 1, small, host_memory_limit=8 * 2**30)
    sentence = answer_text.nothing_fits(plan)
    assert plan.chosen is None and "of host memory per node, 8 available; set --offload_path" in sentence


@pytest.mark.slow
def test_the_copies_of_a_save_in_the_background_are_in_host_memory(monkeypatch):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 6))
    flags = [*FLAGS_1B, "--per_device_train_batch_size", "1", "--zero", "3", "--offload", "none"]
    host = {}
    for copied in ("false", "true"):
        for gpus in (4, 16):  # on one and on two nodes
            asked = job([*flags, "--save_in_background", copied, "--effective_batch_size", "16"])
            host[copied, gpus] = planner.plan_of(["sft"], asked, gpus, GPU).chosen
    trained = host["true", 4].shape.trainable
    for gpus, part in ((4, 1), (16, 2)):
        more = host["true", gpus].host_bytes_per_node - host["false", gpus].host_bytes_per_node
        assert more == pytest.approx(12 * trained / part, rel=1e-6)
    asked = job([*flags, "--save_in_background", "true", "--effective_batch_size", "16"])
    assert planner.plan_of(["sft"], asked, 4, GPU, host_memory_limit=8 * 2**30).chosen is None  # 11.5 GiB


NVME = {"device": "nvme", "nvme_path": "/fast/disk", "buffer_count": 5}


def flags_with_a_disk(place, tmp_path):
    sections = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "offload_optimizer": NVME}
    (tmp_path / "run.json").write_text(json.dumps(DEEPSPEED | {"zero_optimization": sections}))
    (tmp_path / "run.yaml").write_text("zero: 3\noffload: optimizer\noffload_path: /fast/disk\n")
    return {"flags": ["--zero", "3", "--offload", "optimizer", "--offload_path", "/fast/disk"],
            "YAML": ["--config", str(tmp_path / "run.yaml")],
            "JSON": ["--deepspeed", str(tmp_path / "run.json")]}[place]  # fmt: skip


@pytest.mark.parametrize("place", ["flags", "YAML", "JSON"])
def test_a_disk_is_planned_wherever_it_is_named(place, tmp_path):
    flags = [*FLAGS_1B, "--per_device_train_batch_size", "1", *flags_with_a_disk(place, tmp_path)]
    candidate, *_ = candidates.candidates("sft", job(flags), 8, GPU)
    assert candidate.setting.nvme and candidate.host_bytes_per_node == 0
    assert candidates.plan_point_of(resolve.resolve(candidate.request, 8, GPU)).nvme


@pytest.mark.parametrize("place", ["flags", "YAML", "JSON"])
def test_a_simulation_writes_to_no_disk(place, tmp_path):
    flags = [*FLAGS_1B, "--data", "x", *flags_with_a_disk(place, tmp_path)]
    settings = resolve.resolve_settings("sft", flags, 8, GPU)
    changed = simulated_rank._nvme_in_host_memory(settings)
    assert nvme.paths_of(settings.deepspeed) and nvme.paths_of(changed.deepspeed) == {}
    before, after = (dict(s.deepspeed["zero_optimization"]["offload_optimizer"]) for s in (settings, changed))
    assert before == after | {"device": "nvme", "nvme_path": "/fast/disk"}
    assert after["device"] == "cpu" and "nvme_path" not in after and changed.offload_path is None
    assert simulated_rank._nvme_in_host_memory(changed) is changed


@pytest.mark.parametrize(
    ("method", "recipe", "flags", "methods"),
    [
        ("", "lora", ["--load_in_4bit", "true"], ["qlora"]),
        ("", "lora", ["--load-in-4bit=true"], ["qlora"]),
        ("", "lora", ["--load_in_4bit", "false"], ["lora"]),
        ("", "lora", ["--config", "4bit.yaml"], ["qlora"]),
        ("", "lora", ["--config", "4bit.yaml", "--load_in_4bit", "false"], ["lora"]),
        ("", "sft", [], ["sft"]),
        ("auto", "sft", [], ["sft", "lora", "qlora"]),
    ],
)
def test_the_method_follows_load_in_4bit(method, recipe, flags, methods, tmp_path, monkeypatch):
    (tmp_path / "4bit.yaml").write_text("load_in_4bit: true\n")
    monkeypatch.chdir(tmp_path)
    assert candidates.methods_to_try(method, recipe, flags) == methods
    request = job(flags, candidates.recipe_of(methods[-1]))
    added = candidates.method_request(request, methods[-1]).flags()
    assert added == request.flags() if methods[-1] != "qlora" or flags else added == ["--load_in_4bit", "true"]


@pytest.mark.bad_input
@pytest.mark.parametrize(("method", "value"), [("qlora", "false"), ("lora", "true"), ("sft", "true")])
def test_a_method_that_contradicts_load_in_4bit(method, value):
    with pytest.raises(UserError, match=f"--method {method} and --load_in_4bit {value} contradict"):
        candidates.methods_to_try(method, "lora", ["--load_in_4bit", value])


@pytest.mark.bad_input
def test_4_bits_without_an_adapter_are_refused():
    """The sft recipe has no such flag: the plan says so instead of planning LoRA."""
    flags = [*FLAGS_1B, "--load_in_4bit", "true"]
    with pytest.raises(UserError, match="load_in_4bit"):
        planner.plan_of(candidates.methods_to_try("", "sft", flags), job(flags), 1, GPU)


@pytest.mark.parametrize(
    ("flags", "planned", "says"),
    [
        ([], None, "assumed to have --max_length 512 tokens; set DATA="),
        (["--data", "rows.jsonl"], 104, "the longest row of --data has 100 tokens: --max_length 104"),
        (["--data", "rows.jsonl", "--packing", "true"], 200, "the longest pack of --data has 200 tokens"),
        (["--data", "long.jsonl"], None, "the longest row of --data fills --max_length 512"),
        (["--data", "none.jsonl"], None, "assumed to have --max_length 512 tokens, since they cannot be read: "),
    ],
)
def test_rows_are_planned_at_their_real_length(flags, planned, says, tmp_path, monkeypatch):
    for name, lengths in (("rows", (100, 60, 40)), ("long", (600, 10))):
        rows = [json.dumps({"input_ids": [5] * n, "labels": [5] * n}) for n in lengths]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    given = ["--model", str(TINY / "model"), "--max_length", "512", *flags]
    changed, sentence = plan_command.with_real_lengths(job(given), 2, GPU)
    assert sentence.startswith(says), sentence
    assert resolve.resolve(candidates.method_request(changed, "sft"), 2, GPU).max_length == (planned or 512)


@pytest.mark.parametrize(
    ("flags", "longest"),
    [
        (["--data", "rows.jsonl"], 100),
        (["--data", "rows.jsonl", "--eval_data", "eval.jsonl"], 300),
        (["--data", "rows.jsonl", "--packing", "true"], 512),  # packs are full
        (["--data", "rows.jsonl", "--streaming", "true", "--max_steps", "2"], 512),  # not read yet
    ],
    ids=["rows", "eval", "packs", "stream"],
)
def test_a_launch_knows_its_longest_row(flags, longest, tmp_path, monkeypatch):
    for name, lengths in (("rows", (100, 60, 40)), ("eval", (300, 10))):
        rows = [json.dumps({"input_ids": [5] * n, "labels": [5] * n}) for n in lengths]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    given = ["--model", str(TINY / "model"), "--max_length", "512", "--use_cpu", "true", *flags]
    settings = resolve.resolve_settings("sft", given, 1)
    assert tokens.longest_row(settings, *load_datasets(settings, load_tokenizer(settings))) == longest


def test_pairs_are_planned_at_the_length_of_their_longer_side(tmp_path):
    rows = [{"prompt": "a", "chosen": "b " * n, "rejected": "c " * m} for n, m in ((40, 90), (70, 20))]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--model", str(TINY / "preference" / "model"), "--data", str(tmp_path / "pairs.jsonl")]
    changed, sentence = plan_command.with_real_lengths(job([*flags, "--max_length", "512"], "dpo"), 2, GPU)
    planned = resolve.resolve(candidates.method_request(changed, "dpo"), 2, GPU)
    longest = int(re.match(r"the longest side of a pair of --data has (\d+) tokens", sentence)[1])
    assert planned.max_length == -(-longest // 8) * 8
    settings = resolve.resolve_settings("dpo", [*flags, "--max_length", "512"], 1)
    train_set, _ = load_datasets(settings, load_tokenizer(settings))
    assert (
        longest
        == tokens.longest_row(settings, train_set, None)
        == max(max(lengths) for lengths in train_set.dataset["lengths"])
        < max(len(ids) for ids in train_set.dataset["input_ids"])
    )


@pytest.mark.slow
def test_what_a_plan_at_the_edge_says(monkeypatch):
    """4 x RTX 4090 and 8 billion parameters: the host's memory, the checkpoints' disk, and LoRA beside full tuning."""
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: None))
    gpu, flags = hardware.GPUS["rtx4090-24g"], ["--model", str(CONFIGS / "qwen3-8b"), "--use_liger_kernel", "false"]
    plan = planner.plan_of(["sft"], job(flags), 4, gpu)
    plan.disk_free = 200 * 2**30
    assert "offload optimizer" in plan.chosen.label
    host, disk = answer_text.host_memory(plan.chosen, plan), answer_text.disk_space(plan.chosen, plan)
    assert plan.chosen.setting.activation_offload  # 36 layers of 4,096 features on 4 GPUs
    states = 18 * plan.chosen.shape.parameters + 4 * 36 * 2 * 4096 * plan.chosen.setting.tokens
    gib = f"{states / 2**30:.0f}"
    assert host == {"training_bytes": pytest.approx(states, abs=4), "saving_bytes": 0, "there_bytes": None}
    assert disk["needed_bytes"] == 2 * disk["checkpoint_bytes"] + disk["final_bytes"]
    said = answer_text.text(plan)
    assert f"host memory   {gib} GiB per node while training (not checked; set HOST_MEMORY=GiB)" in said
    disk_said = answer_text.facts(plan.chosen, plan)["disk"]
    assert disk_said.startswith("229 GiB in runs/: checkpoints of 107 GiB (1 kept and a new one), final/ 15 GiB; free")
    assert "; free on this machine: 200 GiB" in disk_said
    assert "warning: checkpoints take 229 GiB: check the free disk space" in said
    limits = {"host_memory_limit": 150 * 2**30, "disk_limit": 200 * 2**30}
    on_this = dataclasses.replace(plan, host_memory_source="this machine", **limits)
    here = answer_text.text(on_this)
    assert "only 200 GiB are free; --save_only_model true saves checkpoints of 15 GiB" in here
    assert "(of 150 on this machine)" in here
    assert "; free: 200 GiB" in answer_text.facts(plan.chosen, on_this)["disk"]
    assert "check the free disk space" not in here
    plan.alternatives = alternatives.adapters(plan, ["sft"], job(flags))
    for name, method in (("LoRA", "lora"), ("QLoRA", "qlora")):
        found, hint = plan.alternatives[name]
        assert found.method == method and found.peak <= plan.limit and found.setting.offload == "none"
        speed = f"{float(f'{found.tokens_per_second:.2g}'):,.0f}"
        assert re.search(rf"^  {name} .* {speed} +~{found.peak / 2**30:.1f} ", answer_text.text(plan), re.M)
        assert hint == f"METHOD={method}"
    assert set(alternatives.adapters(plan, ["lora"], job(flags, "lora"))) == {"QLoRA"}
    assert alternatives.adapters(plan, ["sft", "lora"], job(flags)) == {}  # METHOD=auto looks itself
    roomy = dataclasses.replace(plan.chosen, setting=found.setting)
    larger = dataclasses.replace(plan, chosen=roomy, limit=2 * plan.limit)
    assert alternatives.adapters(larger, ["sft"], job(flags)) == {}


@pytest.mark.slow  # three models of 70 billion parameters, without weights
def test_an_adapter_that_does_not_fit_is_said(monkeypatch):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: None))
    gpu, flags = hardware.GPUS["rtx4090-24g"], ["--model", str(CONFIGS / "llama3.1-70b"), "--offload", "none"]
    plan = planner.plan_of(["sft"], job(flags), 1, gpu)
    plan.alternatives = alternatives.adapters(plan, ["sft"], job(flags))
    assert {name: found for name, (found, _) in plan.alternatives.items()} == {"LoRA": None, "QLoRA": None}
    assert re.search("^  QLoRA +does not fit without offload$", answer_text.text(plan), re.M)
    assert "would fit" not in answer_text.nothing_fits(plan)
    preferences = alternatives.adapters(plan, ["dpo"], job(flags, "dpo"))
    assert preferences == {"LoRA": (None, "--adapter lora")}
    assert alternatives.adapters(plan, ["dpo"], job([*flags, "--adapter", "lora"], "dpo")) == {}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 7])
def test_a_rank_without_gradients_of_its_own_is_simulated(rank):
    """The last rank's share of the optimizer is a part of the head, whose gradient another rank of its group counts."""
    flags = ["--model", str(CONFIGS / "llama3.1-8b"), "--zero", "1", "--tp_size", "2", "--max_length", "512"]
    request = job([*flags, "--data", "x.jsonl"])
    question = simulate.Question(request, 8, rank, gpu=GPU, overrides={"num_hidden_layers": 2})
    (answer,) = simulate.run_all([question])
    assert not isinstance(answer, Exception), answer
    assert answer["total"]["step"] > 2 * 10**9


@pytest.mark.slow
def test_a_pipeline_is_priced_between_nodes(monkeypatch):
    """Over a slow link it is faster than what was chosen, over a fast one not; nothing is said where there is none."""
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: None))
    flags = ["--model", str(CONFIGS / "llama3.1-8b"), "--max_length", "2048", "--effective_batch_size", "64"]

    def plan_with(gbs: float, nodes: int = 2, more=()):
        gpu = dataclasses.replace(hardware.GPUS["h100-80g"], node_gbs=gbs)
        plan = planner.plan_of(["sft"], job([*flags, "--sp_size", "1", *more]), 8 * nodes, gpu, node=8)
        plan.alternatives = alternatives.pipelines(plan, ["sft"], job(flags))
        return plan

    slow, fast = plan_with(0.1), plan_with(50.0)
    found, _ = slow.alternatives["pipeline"]
    assert found.seconds < slow.chosen.seconds and found.setting.pp == 2 and found.peak <= slow.limit
    assert fast.alternatives["pipeline"][0].seconds > fast.chosen.seconds
    assert re.search("^  pipeline .*micro batch", answer_text.text(slow), re.M)
    assert "  more about pipeline: docs/parallelism.md" in answer_text.text(slow)
    command = run_line.command_of(found)
    assert command.startswith("make pipeline ") and all(words in command for words in ("PP=2", "NODES=2", "GPUS=8"))
    micro, accumulation = found.setting.micro, found.setting.accumulation
    assert micro * accumulation * 16 // found.setting.pp == 64
    for methods, nodes in ((["lora"], 2), (["sft", "lora"], 2), (["sft"], 1)):
        assert alternatives.pipelines(dataclasses.replace(slow, ranks=8 * nodes), methods, job(flags)) == {}
    mixture = ["--model", str(CONFIGS / "qwen3-moe-30b")]
    assert alternatives.pipelines(slow, ["sft"], job(mixture)) == {}
    offers = {"pipeline": (None, "")}
    too_small = dataclasses.replace(slow, chosen=None, nearest=slow.chosen, limit=1, alternatives=offers)
    assert "--method auto also tries LoRA and QLoRA" in answer_text.nothing_fits(too_small)


def test_states_cross_the_nodes_that_groups_of_split_matrices_are_on():
    """8 groups of 2 GPUs are on two nodes of 8, although each call has 8 GPUs only."""
    shape = formulas.Shape(trainable=10**9, frozen=0, largest=10**8, hidden=2048, layers=16, heads=32, kv_heads=8,
                           head_dim=64, intermediate=8192, vocabulary=32000)  # fmt: skip
    setting = formulas.PlanPoint(1, "none", 0, 1, 2048, 1, 16, node=8, groups=((tensor_parallel.PARALLEL, 2),))
    (within, across), alone = formulas.wire_bytes(shape, setting), dataclasses.replace(setting, ranks=8)
    states = 2 * 2 * 10**9 / 2 * 7 / 8  # reduced and gathered over 8 ranks, 16 bits, half of each matrix
    assert across == pytest.approx(states * 2 / 8) and within > 0
    assert formulas.wire_bytes(shape, alone)[1] == 0


def test_a_pipeline_waits_for_the_bubble():
    """Where links and memory cost nothing, a step is (M + P - 1) / M times its arithmetic."""
    gpu = dataclasses.replace(hardware.GPUS["h100-80g"], node_gbs=1e12, link_gbs=1e12, memory_gbs=1e12)
    shape = formulas.Shape(trainable=8 * 10**9, frozen=0, layers=32, hidden=4096, vocabulary=0, heads=32, kv_heads=8,
                           head_dim=128, intermediate=14336, largest=10**8)  # fmt: skip
    for stages, micro_batches in ((2, 8), (4, 8), (4, 32)):
        groups = ((pipeline.PARALLEL, stages),)
        setting = formulas.PlanPoint(1, "none", 0, 1, 2048, micro_batches, stages, groups=groups)
        alone = dataclasses.replace(setting, ranks=1, groups=())
        found, whole = (step.estimate_step(shape, one, gpu, 2048) for one in (setting, alone))
        ratio = (found.seconds - found.update) / (whole.seconds - whole.update)  # of the host, too
        busy = 1 - pipeline.bubble(stages, micro_batches)
        assert ratio == pytest.approx(1 / stages / busy, rel=1e-3)


@pytest.mark.slow
def test_rejected_settings_teach_in_a_line_each(monkeypatch, tmp_path):
    """One line for each kind, which names what takes the most."""
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: None))
    flags = ["--model", str(CONFIGS / "llama3.1-8b"), "--max_length", "2048", "--effective_batch_size", "8"]
    flags += ["--per_device_train_batch_size", "1", "--sp_size", "1", "--gradient_checkpointing", "true"]
    flags += ["--use_liger_kernel", "false"]
    ideas = answer_text.rejected_ideas(planner.plan_of(["sft"], job(flags), 8, hardware.GPUS["l4-24g"]))
    line = r"ZeRO-1, checkpointing, micro batch 1: about [\d.]+ GiB, [\d.]+ too much; mostly gradients, 16\.8"
    assert re.fullmatch(line, ideas[0]), ideas[0]
    assert ideas[1].startswith("ZeRO-2, ") and ideas[2].startswith("ZeRO-3, ")
    plan = planner.plan_of(["sft"], job(["--model", str(CONFIGS / "qwen3-8b")]), 1, hardware.GPUS["rtx4090-24g"])
    kinds = {answer_text._group_key(candidate, plan) for candidate, _ in plan.rejected}
    ideas = answer_text.rejected_ideas(plan)
    assert len(ideas) == len(kinds) < 8 < len(plan.rejected)
    assert any("; mostly activations, " in idea for idea in ideas)
    plan.alternatives = alternatives.adapters(plan, ["sft"], job([]))
    assert len(answer_text.text(plan).splitlines()) <= 32
    answer_text.write(plan, tmp_path)
    assert all(idea in (tmp_path / "plan.md").read_text() for idea in ideas)
    assert json.loads((tmp_path / "plan.json").read_text())["disk"]["needed_bytes"] > 2e11


def test_a_formula_that_is_far_too_low_costs_few_simulations(monkeypatch):
    """What it lacked for the same tokens is added to what comes after: settings like it wait for the end."""
    asked = []

    def size_of(flags):
        words = dict(zip(flags[::2], flags[1::2], strict=False))
        asked.append(words)
        return 10.0 * int(words["--per_device_train_batch_size"])

    monkeypatch.setattr(simulate, "run_all", fake_simulation(size_of))
    small = dataclasses.replace(GPU, memory_gib=16.0)
    flags = [*FLAGS_1B, "--offload", "none", "--effective_batch_size", "64", "--sp_size", "1"]
    plan = planner.plan_of(["sft"], job(flags), 4, small, exact=True)
    assert plan.chosen.setting.micro == 1
    assert len(asked) < 20


def test_a_simulation_that_fails_leaves_an_estimate_and_says_so_first(monkeypatch):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: None))
    plan = planner.plan_of(["sft"], job(FLAGS_1B), 2, GPU, exact=True)
    assert plan.chosen.answer is None
    first, *_, text = answer_text.text(plan).strip().partition("\n")
    assert first.startswith("simulation failed: no such kernel; this is an estimate by formula with a margin of ")
    assert "(by formula with a margin of " in text and "no such kernel" not in text


@pytest.mark.slow
def test_nothing_fits_is_said_by_a_simulation_only(monkeypatch):
    """What is far too large by formula is simulated before the plan gives up, and chosen when it fits after all."""
    asked = []

    def size_of(flags):
        words = dict(zip(flags[::2], flags[1::2], strict=False))
        asked.append((words["--zero"], words["--per_device_train_batch_size"]))
        return 9.0

    monkeypatch.setattr(simulate, "run_all", fake_simulation(size_of))
    small = dataclasses.replace(GPU, memory_gib=11.0)
    flags = [*FLAGS_1B, "--offload", "none", "--gradient_checkpointing", "true", "--zero", "0"]
    found = candidates.candidates("sft", job(flags), 1, small)
    assert min(candidate.by_formula for candidate in found) > search.MAX_EXCESS * 10 * 2**30
    plan = planner.plan_of(["sft"], job(flags), 1, small)
    assert plan.chosen is not None and plan.chosen.answer and asked
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 30))
    plan = planner.plan_of(["sft"], job(flags), 1, small)
    assert plan.chosen is None and plan.nearest.answer and "with 31.0 GiB" in answer_text.nothing_fits(plan)


@pytest.mark.parametrize(("dtype", "bytes_each"), [("bfloat16", 8), ("float32", 16)])
def test_weights_without_a_master_are_smaller_by_formula(dtype, bytes_each):
    """2 + 2 + 4 bytes a parameter in bf16, 4 + 4 + 8 in fp32, at stage 0."""
    settings = resolve.resolve_settings("sft", ["--zero", "0", "--dtype", dtype], 1, GPU)
    assert sum(formulas._widths(settings, 0)) == bytes_each


def answers_for(questions):
    answers = simulate.run_all(questions)
    assert not [answer for answer in answers if isinstance(answer, Exception)], answers
    return answers


FOUR_LAYERS = {"num_hidden_layers": 4}


OFFLOADED = ("--activation_offload", "true")


def test_a_packed_base_is_simulated_on_a_gpu():
    """Its skeleton is built in `with torch.device("meta")`, where torch asks torch.tensor for the default device."""
    flags = ["--model", str(TINY / "model"), "--data", "none", "--zero", "3", "--load_in_4bit", "true",
             "--max_length", "64", "--per_device_train_batch_size", "1", "--effective_batch_size", "8"]  # fmt: skip
    (answer,) = answers_for([simulate.Question(job(flags, "lora"), 8, gpu=GPU, overrides={"num_hidden_layers": 2})])
    assert 0 < answer["total"]["load"] < answer["total"]["backward"]


@pytest.mark.slow
def test_a_simulation_compiles_nothing():
    """DeepSpeed's Muon is compiled: its kernel would write to tensors that have no memory, and end the process."""
    flags = ["--model", str(TINY / "model"), "--data", "none", "--zero", "2", "--optim", "muon",
             "--max_length", "64", "--per_device_train_batch_size", "1", "--effective_batch_size", "2"]  # fmt: skip
    (answer,) = answers_for([simulate.Question(job(flags), 2, gpu=GPU, overrides={"num_hidden_layers": 2})])
    assert answer["total"]["step"] > answer["total"]["load"] > 0


def test_compiled_layers_that_are_recomputed_have_a_margin():
    """A simulation runs them uncompiled; compiled they were up to 11 % above (tests/model/test_compiled.py)."""
    words = [*FLAGS_1B, "--zero", "2", "--per_device_train_batch_size", "1", "--gradient_checkpointing"]
    sizes = {}
    for more in (["true"], ["true", "--compile_layers", "true"], ["false", "--compile_layers", "true"]):
        candidate, *_ = candidates.candidates("sft", job([*words, *more]), 2, GPU)
        candidate.answer = {"total": {"backward": 10**9}}
        sizes[" ".join(more)] = (candidate.allocated - candidate.workspace) / 10**9
        assert ("compiled layers" in answer_text._source(candidate)) == (sizes[" ".join(more)] > 1)
    assert list(sizes.values()) == [1.0, 1.12, 1.0]


@pytest.mark.parametrize(
    ("recipe", "flags", "unlike"),
    [
        ("sft", "--zero 2", ""), ("sft", "--zero 3 --offload optimizer", "offload"),
        ("dpo", "--zero 3", "preference losses"), ("sft", "--zero 3 --sp_size 2", "split rows"),
    ],
)  # fmt: skip
def test_the_range_of_a_time_says_what_the_compared_runs_had_not(recipe, flags, unlike):
    words = [*FLAGS_1B, *flags.split(), "--gradient_checkpointing", "true", "--per_device_train_batch_size", "1"]
    candidate, *_ = candidates.candidates(recipe, job(words, recipe), 2, GPU)
    said = answer_text._error(candidate).partition("; few or none of these runs had ")[2]
    assert said == unlike


@pytest.mark.slow
def test_a_plan_does_not_depend_on_the_planning_machines_memory():
    """DeepSpeed flattens weights on the GPU where they fit twice: the planned GPU, not the host that plans."""
    flags = [*FLAGS_1B, "--data", "none", "--zero", "2", "--offload", "optimizer", "--per_device_train_batch_size", "1",
             "--max_length", "64", "--effective_batch_size", "2"]  # fmt: skip
    small = dataclasses.replace(GPU, memory_gib=1.5)  # 0.94 GiB of weights: once
    large, little = answers_for(
        [simulate.Question(job(flags), 2, gpu=gpu, overrides=FOUR_LAYERS) for gpu in (GPU, small)]
    )
    assert little["total"]["load"] < 1.5 * 2**30 < large["total"]["load"]


@pytest.mark.slow
def test_a_foreach_optimizer_holds_one_more_copy(tmp_path):
    """torch's default AdamW makes temporaries of all weights at once: 10 bytes a parameter in bf16, not 8."""
    flags = [*FLAGS_1B, "--data", "none", "--zero", "0", "--dtype", "bfloat16", "--max_length", "64",
             "--per_device_train_batch_size", "1", "--effective_batch_size", "1", "--optim"]  # fmt: skip
    fused, foreach = answers_for([simulate.Question(job([*flags, optim]), 1, gpu=GPU, overrides=FOUR_LAYERS)
                                  for optim in ("adamw_torch_fused", "adamw_torch")])  # fmt: skip
    each = [answer["total"]["step"] / answer["parameters"] for answer in (fused, foreach)]
    assert each == pytest.approx([8.0, 10.0], rel=0.02)


@pytest.mark.slow
def test_the_share_of_offload_ratio_is_on_the_gpu(tmp_path):
    """The sub-groups that depend on the model's size reach the engine: 60 % of Adam's 12 bytes a parameter stay."""
    flags = ["--model", str(TINY / "model"), "--data", "none", "--zero", "3", "--offload", "optimizer", "--max_length",
             "64", "--per_device_train_batch_size", "1", "--effective_batch_size", "2"]  # fmt: skip
    buckets = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto")
    asked = []
    for name, ratio in (("whole", {}), ("split", {"ratio": 0.4})):
        section = buckets | {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True} | ratio}
        (tmp_path / f"{name}.json").write_text(json.dumps({"zero_optimization": section}))
        asked.append(job([*flags, "--deepspeed", str(tmp_path / f"{name}.json")]))
    whole, split = answers_for([simulate.Question(request, 2, gpu=GPU) for request in asked])
    more = split["total"]["step"] - whole["total"]["step"]
    assert more / (split["parameters"] / 2) == pytest.approx(0.6 * 12, rel=0.1)


@pytest.mark.slow
def test_the_optimizer_of_a_deepspeed_file_is_simulated(tmp_path):
    """DeepSpeed's FusedAdam has the states of torch's; its C++ would read fake tensors."""
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    stage_3 = auto | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    flags = ["--model", str(TINY / "model"), "--data", "none", "--max_length", "64", "--effective_batch_size", "2",
             "--per_device_train_batch_size", "1", "--deepspeed"]  # fmt: skip
    asked = []
    for name, config in (("torch", stage_3), ("own", stage_3 | adam)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        asked.append(simulate.Question(job([*flags, str(tmp_path / f"{name}.json")]), 2, gpu=GPU))
    of_torch, own = answers_for(asked)
    assert own["total"]["step"] == pytest.approx(of_torch["total"]["step"], rel=0.01)


def test_the_backward_of_silu_is_one_kernel():
    """Six tensors of an MLP's width are alive at once: gate, its SiLU, up, and the gradients of product and factors."""
    flags = ["--model", str(TINY / "model"), "--data", "none", "--zero", "0", "--dtype", "bfloat16", "--bf16", "false",
             "--lora_target_modules", "q_proj", "--gradient_checkpointing", "true", "--max_length", "2048",
             "--per_device_train_batch_size", "1", "--effective_batch_size", "1"]  # fmt: skip
    wide = {"intermediate_size": 1 << 16, "num_hidden_layers": 2}
    (answer,) = answers_for([simulate.Question(job(flags, "lora"), 1, gpu=GPU, overrides=wide)])
    held = answer["total"]["backward"] - answer["total"]["load"]
    assert held / (2048 * wide["intermediate_size"] * 2) == pytest.approx(6, abs=0.3)


@pytest.mark.parametrize(("mode", "least", "lacks"), [("True", 101, False), ("True", 103, True), ("False", 101, True)])
def test_unused_segments_of_few_layers_stand_for_all_where_they_are_little(mode, least, lacks, monkeypatch):
    """Else all layers are simulated where they decide."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"expandable_segments:{mode}")
    few = stage_3(7, 5e9) | {"allocator": {"allocated": 100, "reserved": 110, "least": least}}
    answer = predict._extended(stage_3(6, 5e9), few, (6, 7), 32)
    assert answer["extended_from_layers"] == [6, 7] and answer.get("lacks_replay", False) is lacks
    assert (answer["allocator"] is None) is lacks  # 3 % are added then


COUNT_DEQUANTIZED = """
from zerofit.plan import fake_device

def count(trainer):
    plain = fake_device._dequantized

    def counted(inputs, state):
        found = plain(inputs, state)
        with open(FILE, "a") as file:
            file.write("x" * bool(found))
        return found

    fake_device._dequantized = counted
"""


@pytest.mark.slow
def test_the_product_of_many_rows_dequantizes_4_bit_weights(tmp_path):
    """bitsandbytes has a kernel without that for at most 1,536 rows."""
    counts = []
    flags = ["--model", str(TINY / "model"), "--data", "none", "--zero", "0", "--load_in_4bit", "true",
             "--gradient_checkpointing", "false", "--per_device_train_batch_size", "1", "--effective_batch_size", "1",
             "--max_length"]  # fmt: skip
    for rows in ("1024", "2048"):
        found, hook = tmp_path / rows, tmp_path / f"{rows}.py"
        hook.write_text(COUNT_DEQUANTIZED.replace("FILE", repr(str(found))))
        request, hooks = job([*flags, rows], "lora"), (f"{hook}:count",)
        answers_for([simulate.Question(request, 1, gpu=GPU, overrides={"num_hidden_layers": 2}, before_training=hooks)])
        counts.append(len(found.read_text()))
    assert counts == [0, simulate.STEPS * 2 * 7]  # in two layers: four products of the attention, three of the MLP


@pytest.mark.slow
def test_liger_on_request_is_planned_with_its_bytes():
    """By default a plan has transformers' modules, to which a run may go back, until an earlier one has proven them."""
    flags = [*FLAGS_1B, "--data", "none", "--zero", "1", "--gradient_checkpointing", "false", "--max_length", "512",
             "--per_device_train_batch_size", "1", "--effective_batch_size", "1"]  # fmt: skip
    liger = ["--use_liger_kernel"]
    asked = [
        simulate.Question(job([*flags, *more]), 1, gpu=GPU, overrides=FOUR_LAYERS)
        for more in ([], [*liger, "false"], [*liger, "true"])
    ]
    default, without, with_liger, proven = answers_for([*asked, dataclasses.replace(asked[0], liger=True)])
    assert default["total"] == without["total"] and with_liger["total"] == proven["total"]
    # Of a token: fp32 and bf16 copies of the input of nine norms, instead of which Liger keeps the bf16 input; SiLU's
    # result in four layers.
    saved = 512 * (9 * (4 + 2 - 2) * 2048 + 4 * 2 * 8192)
    less = default["total"]["forward"] - with_liger["total"]["forward"]
    assert less == pytest.approx(saved, rel=0.2)
    settings = resolve.resolve(job(flags), 1, GPU)
    shape = dataclasses.replace(candidates.shape_of(settings), layers=4)
    whole, less = (
        formulas.activations(dataclasses.replace(shape, liger=on), candidates.plan_point_of(settings), True)[0]
        for on in (False, True)
    )
    assert whole["activations"] - less["activations"] == saved


@pytest.mark.slow
def test_pinned_blocks_are_rounded_in_a_plan(monkeypatch):
    """Offload pins fp32 weights and gradients; torch before 2.13 rounds each block up to a power of two."""
    flags = [*FLAGS_1B, "--data", "none", "--zero", "3", "--offload", "optimizer", "--max_length", "64",
             "--per_device_train_batch_size", "1", "--effective_batch_size", "2"]  # fmt: skip
    host = []
    for settings in ("pinned_max_round_threshold_mb:256", "pinned_max_round_threshold_mb:1000000"):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
        (answer,) = answers_for([simulate.Question(job(flags), 2, gpu=GPU, overrides={"num_hidden_layers": 6})])
        host.append(answer["host"])
    assert host[0] == pytest.approx(18 * answer["parameters"] / 2, rel=0.02)
    assert 1.1 * host[0] < host[1] < 2 * host[0]


@pytest.mark.slow
def test_the_simulation_leaves_torch_usable_for_what_is_imported_later():
    """A function in the place of torch.Generator broke DeepSpeed's import of Muon where inductor was not loaded yet."""
    code = """
import sys
import torch
assert "torch._inductor.decomposition" not in sys.modules
from zerofit.plan import fake_device
torch.Generator = fake_device._generator_class(torch.Generator)
assert isinstance(torch.Generator("gpu:0"), torch.Generator) and torch.Generator | None
import torch._inductor.decomposition
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_error_of_the_simulation_is_kept_in_a_file(monkeypatch, tmp_path):
    """What the user reads is a sentence; the traceback is in the file that it names."""
    monkeypatch.setattr(simulate, "_start", lambda *of: None)
    said = 'simulation-answer: [0, {"trace": "Traceback ...\\nTypeError: unsupported"}]\n'

    def ask(process, text, seconds, receive, keep):
        receive("\n")
        receive(said)
        return ""

    monkeypatch.setattr(simulate, "_ask", ask)
    (failed,) = simulate.run_all([simulate.Question(job([]), 2)], tmp_path)
    assert f"{tmp_path}/error.txt" in str(failed) and "please report" in str(failed)
    assert (tmp_path / "error.txt").read_text().endswith("TypeError: unsupported")


@pytest.mark.slow  # the README has one more, by make
def test_a_real_plan_from_the_command_line(tmp_path):
    """make's own path: prints the choice, writes the files; the printed flags are taken by the recipe."""
    done = subprocess.run(
        [sys.executable, "-m", "zerofit", "plan", "--gpu_type", "t4-16g", "--gpus", "2", *FLAGS_1B, "--zero", "3",
         "--offload", "optimizer", "--gradient_checkpointing", "true", "--output_dir", str(tmp_path / "plan"),
         "--exact", "true"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "chosen: sft ZeRO-3, offload optimizer, checkpointing" in done.stdout and "(by simulation)" in done.stdout
    found = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert found["chosen"]["simulation"]["parameters"] == 1_235_814_400
    assert found["chosen"]["peak_bytes"] <= found["limit_bytes"]
    assert "an estimate" in found["facts"]["time"] and found["gpu"]["bf16"] is False


# --- mistakes ---


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu_type", "h100-8g"], "--gpu_type h100-8g: not in the table; did you mean h100-80g?"),
        (["--gpu_type", "h100-80g", "--gpus", "many"], "GPUS=many: must be a positive integer"),
        (["--gpu_type", "h100-80g", "--nodes", "two"], "NODES=two: must be a positive integer"),
        (["--gpu_type", "h100-80g", "--nodes", "0", "--gpus", "4"], "NODES=0: must be a positive integer"),
        (
            ["--gpu_type", "h100-80g", "--nodes", "2", "--node_link_gbs", "-1"],
            "--node_link_gbs -1: must be a number above 0",
        ),
        (
            ["--gpu_type", "h100-80g", "--method", "magic"],
            "--method magic: must be one of dpo, lora, qlora, sft, auto.",
        ),
        (["--gpu_type", "h100-80g", "--zero", "0", "--offload", "optimizer"], "stage 0 is plain DDP"),
        (["--gpu_type", "h100-80g", "--model", "/no/such/folder"], "no such model folder"),
        (["--gpu_type", "h100-80g", "--zerro", "3"], "unknown flag --zerro"),
        (["--gpu_type", "detect"], "no GPU is visible"),
        (["--gpu_type", "h100-80g", "--host_memory", "much"], "--host_memory much: must be a number above 0"),
        (["--gpu_type", "h100-80g", "--host_memory", "inf"], "--host_memory inf: must be a number above 0"),
        (["--gpu_type", "h100-80g", "--args", "--disk much"], "--disk much: must be a number above 0"),
        (
            ["--gpu_type", "h100-80g", "--zero", "3", "--output_dir", "/proc/plan"],
            "--output_dir /proc/plan: cannot write the plan",
        ),
    ],
)
def test_mistakes(words, said, monkeypatch):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 1))
    words = words if "--model" in words else [*words, *FLAGS_1B]
    with pytest.raises(UserError) as error:
        plan_command.main(words)
    assert said in str(error.value)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kind", "said"), [("git", "without a separate language model"), ("mllama", "cross-attention layers")]
)
def test_an_image_text_model_without_a_model_of_text_is_refused(kind, said, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"^--model .* {said}.* use a text-only checkpoint"):
        candidates.candidates("sft", job(["--model", str(tmp_path), "--zero", "2"]), 2, GPU)


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("zero", ["0", "3"])
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_towers_count_to_the_byte_where_they_are_in_memory(kind, zero, tmp_path):
    """A simulation against real tensors, with the towers kept and left out."""
    config_of(kind).save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--data", "none", "--zero", zero, "--max_length", "64",
             "--per_device_train_batch_size", "1"]  # fmt: skip
    ranks, asked = {"0": 1, "3": 2}[zero], []
    for towers in ("keep", "drop"):
        request = job([*words, "--effective_batch_size", str(ranks), "--towers", towers])
        asked += [simulate.Question(request, ranks, fake=fake) for fake in (True, False)]
    fake, real, fake_dropped, real_dropped = simulate.run_all(asked)
    assert fake["total"] == real["total"] and fake_dropped["total"] == real_dropped["total"]
    model = classes.skeleton(config_of(kind))
    names = classes.towers_of(model)
    weights = sum(p.numel() for n, p in model.named_parameters() if classes.holds(names, n))
    buffers = sum(b.nbytes for n, b in model.named_buffers() if classes.holds(names, n))
    assert fake["parameters"] - fake_dropped["parameters"] == weights > 0
    assert fake["trainable"] == fake_dropped["trainable"] == fake_dropped["parameters"]
    if zero == "0":  # in fp32
        held, left_out = (one["model_states"]["before_step"]["parameters"] for one in (fake, fake_dropped))
        assert held - left_out == 4 * weights + buffers


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("bert", "is a bidirectional model"),
        ("bart", "is an encoder-decoder model"),
        ("musicgen", "is an encoder-decoder model"),
        ("paligemma", "reads the prompt bidirectionally"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(kind, said, tmp_path):
    """Though transformers has a causal class of each."""
    try:
        AutoConfig.for_model(kind).save_pretrained(tmp_path)
    except StrictDataclassError as error:  # transformers 5.17 makes no default of Musicgen
        pytest.skip(f"this transformers cannot make a default {kind}: {error}")
    with pytest.raises(UserError, match=rf"^--model .*: {kind} {said}"):
        candidates.candidates("sft", job(["--model", str(tmp_path), "--zero", "2"]), 2, GPU)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kind", "more", "name"),
    [("bart", {"is_encoder_decoder": False, "is_decoder": True}, "BartForCausalLM"), ("xlnet", {}, "XLNetLMHeadModel")],
)
def test_a_class_whose_loss_is_not_of_the_next_token_is_refused(kind, more, name, tmp_path):
    AutoConfig.for_model(kind, **more).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"^--model .*: {name} does not use transformers' loss functions"):
        candidates.candidates("sft", job(["--model", str(tmp_path), "--zero", "2"]), 2, GPU)


def test_a_decoder_of_that_class_is_planned(tmp_path):
    AutoConfig.for_model("bert", is_decoder=True).save_pretrained(tmp_path)
    assert candidates.candidates("sft", job(["--model", str(tmp_path), "--zero", "2"]), 2, GPU)


def planned_by_defaults(kind, method, folder) -> list:
    """The settings of a plan of a configuration class's defaults; [] where it is refused in a sentence."""
    try:
        config = AutoConfig.for_model(kind)
    except Exception as error:
        pytest.skip(f"transformers does not have a default configuration of {kind}: {type(error).__name__}")
    config.save_pretrained(folder)
    flags = "--zero 3 --offload none --gradient_checkpointing true --per_device_train_batch_size 1 --sp_size 1"
    words = ["--model", str(folder), *flags.split(), "--tp_size", "1"]
    try:
        planned = candidates.candidates(method, job(words, method), 8, GPU)
    except UserError as error:
        assert str(error).startswith("--")
        return []
    assert planned
    return planned


OTHER_TYPES = sorted(CONFIG_MAPPING.keys() - modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())


@pytest.mark.bad_input
@pytest.mark.parametrize("kind", slow_but(OTHER_TYPES, ["vit", "wav2vec2-bert", "t5"]))
def test_each_other_type_of_model_is_planned_or_refused_in_a_sentence(kind, tmp_path):
    """Of images, sound, encoders."""
    planned_by_defaults(kind, "sft", tmp_path)


FEW_TYPES = ("llama", "gpt_oss", "mamba2", "dots1", "hunyuan_v1_moe", "emu3")


@pytest.mark.parametrize("method", ["sft", "lora"])
@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in FEW_TYPES else pytest.param(kind, marks=pytest.mark.slow)
        for kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ],
)
def test_each_type_of_model_is_planned_or_refused_in_a_sentence(kind, method, tmp_path):
    if found := planned_by_defaults(kind, method, tmp_path):
        (planned,) = found
        assert planned.shape.parameters > 1e6 and planned.peak > planned.shape.parameters / 8


@pytest.mark.parametrize("kind", slow_but(["falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"], ["mamba2"]))
def test_all_linear_leaves_out_what_peft_refuses_in_mamba_layers(kind, tmp_path):
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--zero", "2"]
    assert candidates.candidates("lora", job(words, "lora"), 2, GPU)  # peft takes it
    settings = resolve.resolve_settings("lora", [*words, "--data", "none"], 2, GPU)
    resolve.resolve_for_model(settings)
    more = ["dt_proj", "out_proj", "x_proj"] if kind in ("mamba", "falcon_mamba") else ["out_proj"]
    assert settings.adapter_config == [f"exclude_modules=[{', '.join(['conv1d', *more])}]"]
    assert any("Mamba's kernels in " in line for line in settings.decisions)
    with pytest.raises(UserError, match="so an adapter would not train; leave it out"):
        candidates.candidates("lora", job([*words, "--lora_target_modules", "out_proj"], "lora"), 2, GPU)


@pytest.mark.oracle
def test_a_base_in_bf16_is_counted_so_in_a_run_in_fp32():
    """--bf16 false --dtype bfloat16: DeepSpeed casts nothing, and the base stays as it is."""
    words = [*FLAGS_1B, "--zero", "0", "--gradient_checkpointing", "true", "--per_device_train_batch_size", "1"]
    sizes = {}
    for dtype in ("bfloat16", "float32"):
        request = job([*words, "--bf16", "false", "--dtype", dtype], "lora")
        (planned,) = candidates.candidates("lora", request, 1, GPU)
        sizes[dtype] = planned.shape.frozen_bytes
    assert sizes == {"bfloat16": 2, "float32": 4}


def test_a_folder_without_config(tmp_path):
    with pytest.raises(UserError, match=r"config.json is missing in the folder"):
        plan_command.main(["--gpu_type", "h100-80g", "--model", str(tmp_path)])


def test_gpus_of_the_users_own(tmp_path, monkeypatch):
    file = tmp_path / "gpus.json"
    monkeypatch.setenv(hardware.USER_TABLE, str(file))
    file.write_text('{"mi300x": {"memory_gib": 191.5, "tflops": 1307}}')
    assert hardware.find("MI300X").memory_gib == 191.5
    file.write_text('{"mi300x": {"memory": 191.5}}')
    with pytest.raises(UserError, match="unknown key 'memory'"):
        hardware.find("mi300x")
    file.write_text("[1")
    with pytest.raises(UserError, match="must be JSON"):
        hardware.find("mi300x")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"memory_gib": "96"}, 'memory_gib cannot be "96"'),
        ({"tflops": 0}, "tflops cannot be 0"),
        ({"bf16": 1}, "bf16 cannot be 1"),
        ({"device_name": ""}, 'device_name cannot be ""'),
        ({"memory_gib": math.nan}, "memory_gib cannot be NaN"),
    ],
)
def test_a_gpu_of_the_users_own_with_a_wrong_value(tmp_path, monkeypatch, entry, says):
    (tmp_path / "gpus.json").write_text(json.dumps({"mine": entry}))
    monkeypatch.setenv(hardware.USER_TABLE, str(tmp_path / "gpus.json"))
    with pytest.raises(UserError, match=says):
        hardware.find("mine")


def test_a_gpu_of_the_users_own_goes_before_the_tables(tmp_path, monkeypatch):
    """A name of the table takes what the user says, and keeps the rest."""
    (tmp_path / "gpus.json").write_text('{"h100-80g": {"memory_gib": 40}}')
    monkeypatch.setenv(hardware.USER_TABLE, str(tmp_path / "gpus.json"))
    own = hardware.find("h100-80g")
    assert own == dataclasses.replace(hardware.GPUS["h100-80g"], memory_gib=40)
    assert hardware.by_device_name("NVIDIA H100 80GB HBM3") == own


@pytest.mark.bad_input
@pytest.mark.parametrize("size", ["0", "-5", "nan", "inf"])
def test_a_memory_limit_that_is_none(size):
    with pytest.raises(UserError, match=f"--memory_limit is {float(size)}: it must be (above 0|a finite number)"):
        resolve.resolve_settings("sft", ["--memory_limit", size], 1)


# --- the check before a launch ---


@pytest.mark.bad_input
def test_a_job_that_does_not_fit_is_refused_before_it_starts(tmp_path):
    common = ["--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--num_samples", "0", "--memory_limit"]
    done = recipe_process("sft", *common, "0.01")
    assert done.returncode == 3 and not (tmp_path / "run").exists()
    assert "zerofit: error: this job does not fit: " in done.stderr and "--ignore_plan true" in done.stderr
    done = recipe_process("sft", *common, "0.01", "--ignore_plan", "true")
    assert done.returncode == 0 and "plan: does not fit: " in done.stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_dry_run_within_a_limit(tmp_path):
    common = ["--output_dir", str(tmp_path / "run"), "--plan", "true", "--memory_limit"]
    assert recipe_process("sft", *common, "0.01").returncode == 3
    done = recipe_process("sft", *common, "4")
    assert done.returncode == 0, done.stderr
    assert "plan: fits: " in done.stdout and "backward" in done.stdout and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_dry_run_for_a_gpu_that_is_not_here():
    done = recipe_process("lora", "--plan", "true", "--gpu_type", "rtx4090-24g")
    assert done.returncode == 0, done.stderr
    assert "plan: fits: " in done.stdout and "of 22.98 GiB per rank" in done.stdout
    with pytest.raises(UserError, match="set a GPU with --gpu_type h100-80g"):
        preflight.dry_run(resolve.resolve_settings("sft", ["--plan", "true"], 1))


def test_zero_auto_on_a_cpu_goes_by_the_processes(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("zero: auto\n")
    for flags in (["--zero", "auto"], ["--zero=auto"], ["--config", str(file)]):
        assert job(flags).get("zero") == "auto"
    for flags in ([], ["--zero", "2"], ["--config", str(file), "--zero", "2"]):
        assert job(flags).get("zero") != "auto"
    assert preflight.chosen_request(job(["--zero", "auto"]), 2) == job(["--zero", "auto"])


def test_zero_auto_keeps_the_data_of_a_yaml_file_and_knows_the_host(monkeypatch, tmp_path):
    """A model as a flag and data in the file, and the other way round; what is offloaded must fit this machine."""
    file, found = tmp_path / "job.yaml", {}

    def fastest(methods, request, ranks, gpu, **more):
        found.update(more)
        candidate, *_ = candidates.candidates(methods[0], request, ranks, gpu)
        return Plan(gpu, ranks, 1 << 40, {}, candidate, [])

    monkeypatch.setattr(hardware, "torch_sees_gpu", lambda: True)
    monkeypatch.setattr(hardware, "find", lambda *args: GPU)
    monkeypatch.setattr(planner, "plan_of", fastest)
    model, rows = str(TINY / "model"), str(tmp_path / "rows.jsonl")
    for text, flags in ((f"data: {rows}", ["--model", model]), (f"model: {model}", ["--data", rows])):
        file.write_text(f"zero: auto\n{text}\n")
        chosen = preflight.chosen_request(job([*flags, "--config", str(file)]), 8)
        settings = resolve.resolve(chosen, 8, GPU)
        assert (settings.model, settings.data) == (model, [rows])
        assert settings.source["per_device_train_batch_size"] == settings.source["gradient_checkpointing"] == "plan"
    assert found["host_memory_limit"] == psutil.virtual_memory().total
    file.write_text(f"zero: auto\nmodel: {model}\n")
    assert candidates.candidates("sft", job(["--config", str(file)]), 8, GPU)  # a plan needs no data
    with pytest.raises(UserError, match="--model is set but --data is missing"):
        preflight.chosen_request(job(["--config", str(file)]), 8)


def test_a_finished_run_has_its_predicted_and_measured_peak(monkeypatch, tmp_path):
    """And what was predicted by formula is compared with nothing."""
    predicted = {"gpu": "H100", "peak_bytes": 10 * 2**30}
    monkeypatch.setattr(job_file, "_published", predicted | {"by": "no such kernel"})
    training_run.write_prediction(9 * 2**30, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(job_file, "_published", predicted)
    training_run.write_prediction(9 * 2**30, tmp_path)
    measured = {"bytes": 9 * 2**30, "ratio": 0.9}
    assert json.loads((tmp_path / "plan.json").read_text()) == predicted | {"measured": measured}


def test_a_plan_is_the_same_on_every_machine():
    """What is kept free depends on the GPU and the number of ranks alone."""
    assert set(gpu_memory.outside_allocator(GPU, 8)) == {"CUDA context", "NCCL buffers"}
    h100, switches = hardware.GPUS["h100-80g"], int(gpu_memory.NVLS_GIB * 2**30)
    for ranks, node, added in ((8, 8, switches), (16, 8, switches), (4, 8, 0), (16, 4, 0)):
        nccl = gpu_memory.outside_allocator(h100, ranks, node)["NCCL buffers"]
        assert nccl - gpu_memory.nccl_bytes(ranks, node) in (added, added + 1)
    assert 1.5 <= gpu_memory.nccl_bytes(8, 8, h100) / 2**30 <= 2.5
    for name in ("h100-80g-pcie", "h100-94g-nvl", "h200-141g-nvl", "h800-80g-pcie"):  # without NVLink's switches
        assert gpu_memory.nccl_bytes(8, 8, hardware.GPUS[name]) == gpu_memory.nccl_bytes(8, 8)


@pytest.mark.fault
def test_a_cache_that_cannot_be_written_costs_no_run(monkeypatch):
    monkeypatch.setenv("ZEROFIT_CACHE", "/proc/cache")
    simulate.save_answer(Path("/proc/cache/simulations/some.json"), {"peak": {}})
    assert "no such kernel" in str(simulate._as_exception({"trace": "no such kernel"}, Path("/proc/cache/simulations")))


@pytest.mark.fault
def test_a_user_without_a_home_folder(monkeypatch, tmp_path):
    """A user number that no file of the machine knows, as in a container, and no HOME."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("ZEROFIT_CACHE", "")
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("HF_HOME", raising=False)

    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cache_root() == private_folder() == tmp_path / f"zerofit-{os.getuid()}"
    assert accelerate_env.cached_accelerate_config() == Path("/.cache/huggingface/accelerate/default_config.yaml")
    monkeypatch.setenv("ZEROFIT_CACHE", "~nobody-here/x")
    with pytest.raises(UserError, match=r"ZEROFIT_CACHE=~nobody-here/x: cannot be expanded"):
        cache_root()


def test_a_changed_file_is_another_question(tmp_path, monkeypatch):
    """A kept answer is not taken for a job whose files have changed since, however the flags name them."""
    json_file, yaml_file = tmp_path / "ds.json", tmp_path / "run.yaml"
    yaml_file.write_text(f"deepspeed: {json_file}\n")
    ways = [f"--config={yaml_file}"], ["--config", str(yaml_file)], [f"--deepspeed={json_file}"]

    def keys():
        return [simulate.key(simulate.Question(job(flags), 2)) for flags in ways]

    seen = []
    for stage in (2, 3):
        json_file.write_text(f'{{"zero_optimization": {{"stage": {stage}}}}}')
        seen.append(keys())
    yaml_file.write_text(f"deepspeed: {json_file}\nmax_length: 64\n")
    seen.append(keys())
    assert all(a != b for a, b in zip(seen[0], seen[1], strict=True))
    assert [a != b for a, b in zip(seen[1], seen[2], strict=True)] == [True, True, False]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "zero2.json").write_text("{}")
    monkeypatch.setattr("zerofit.config.deepspeed_json.CONFIGS", tmp_path / "configs")
    assert keys()[2] != seen[2][2]
    assert simulate.key(simulate.Question(job(["--new_tokens", "x" * 5000, "--data", "~nobody-here/x"]), 2))


def test_the_make_line_of_several_files(tmp_path, monkeypatch):
    (tmp_path / "x.yaml").write_text("max_length: 64\n")
    monkeypatch.chdir(tmp_path)
    flags = ["--data", "a.jsonl", "b.jsonl", "--model=m", "--zero", "0", "--config", "x.yaml"]
    setting = formulas.PlanPoint(0, "none", 1, 1, 10, 1, 1)
    line = run_line.command_of(Candidate(job(flags), "sft", setting, {}, 1.0, None, GPU))
    assert line == "make sft GPUS=1 MODEL=m ZERO=0 CONFIG=x.yaml ARGS='--data a.jsonl b.jsonl'"


def test_the_line_without_a_makefile(monkeypatch):
    monkeypatch.setattr(run_line, "PROJECT", run_line.IN_WHEEL)
    flags = ["--data", candidates.DATA_PLACEHOLDER, "--zero", "3", "--offload", "none"]
    setting = formulas.PlanPoint(3, "none", 1, 1, 10, 1, 16)
    candidate = Candidate(job(flags, "lora"), "qlora", setting, {}, 1.0, None, GPU)
    assert run_line.command_of(candidate) == (
        "zerofit lora --gpus 8 --nnodes 2 --node_rank 0 --master_addr name-of-node-0 --data your.jsonl --zero 3"
    )


def on_a_gpu(*flags):
    flags = ["--model", str(CONFIGS / "llama3.1-8b"), "--data", "none", "--zero", "3", *flags]
    settings = resolve.resolve_settings("sft", flags, 8, hardware.GPUS["h100-80g"])
    return settings.replace(use_cpu=False)


def test_a_launch_does_not_wait_longer_for_a_simulation(monkeypatch, tmp_path, capsys):
    """A job that fits by formula starts then, and a line says so; no process stays behind."""
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path))
    preflight.prestart(on_a_gpu())
    (process,) = simulate._ready
    found = preflight.check(on_a_gpu("--per_device_train_batch_size", "1", "--max_length", "2048"), seconds=1.0)
    said = capsys.readouterr().out
    assert f"plan: simulation failed: {found['by']}; this is an estimate by formula with a margin of " in said
    assert "time limit" in found["by"] and "plan: fits by formula" in said
    assert process.poll() is not None and not simulate._ready
    assert set(found["peak"]["backward"]) == set(formulas.PARTS)


def test_a_question_travels_as_json(tmp_path):
    """Typed values with their sources and the GPU come back as they went."""
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-5\ndata: [a.jsonl, b.jsonl]\n")
    request = job(["--config", str(tmp_path / "run.yaml"), "--zero", "3", "--gradient_checkpointing", "false"])
    asked = simulate.Question(request, 8, 7, gpu=GPU, overrides={"num_hidden_layers": 6}, before_training=("x.py:f",))
    assert simulate.Question.from_json(json.loads(json.dumps(asked.as_json()))) == asked
    assert (asked.device, asked.layers, simulate.Question(request, 2).device) == ("gpu", 6, "cpu")


def test_what_is_part_of_a_plan_leaves_the_plans_process_alone():
    pipe = subprocess.PIPE
    process = subprocess.Popen(["sleep", "60"], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    with simulate.reuse_process():
        simulate._ready.append(process)
        with simulate.reuse_process():  # as planner.plan_of does
            pass
        assert process.poll() is None and simulate._reusing
    assert process.poll() is not None and not simulate._reusing


TOO_LARGE = ("--per_device_train_batch_size", "8", "--max_length", "131072", "--gradient_checkpointing", "false")


def test_a_launch_is_refused_by_a_simulation_only(monkeypatch, capsys):
    """What does not fit by formula is simulated to the end, however long it takes, before it is refused."""
    waited = []

    def run_all(questions, cache=None, seconds=None):
        waited.append(seconds)
        return fake_simulation(lambda flags: 500)(questions)

    monkeypatch.setattr(simulate, "run_all", run_all)
    with pytest.raises(candidates.NothingFits, match="this job does not fit: 500"):
        preflight.check(on_a_gpu(*TOO_LARGE), seconds=1.0)
    assert set(waited) == {None}
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: None))
    found = preflight.check(on_a_gpu(*TOO_LARGE), seconds=1.0)  # nobody knows: it starts, and this is said
    assert found["peak_bytes"] > found["limit_bytes"]
    said = capsys.readouterr().out
    assert "simulation failed: no such kernel; this is an estimate" in said and "does not fit by formula" in said


# --- micro batch and gradient checkpointing where nothing says them ---

SMALL_ROWS = ("--per_device_train_batch_size", "1", "--max_length", "2048")

MICRO = "per_device_train_batch_size"


@pytest.fixture
def expandable(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def simulated(expandable, monkeypatch):
    """A job that the closed forms do not describe: only a simulation decides."""
    monkeypatch.setattr(choice, "_formulas_suffice", lambda candidate: False)


def size_by_checkpointing(none, selective, every_2, full):
    def size_of(flags):
        words = dict(zip(flags[::2], flags[1::2], strict=False))
        if words.get("--gradient_checkpointing") == "false":
            return none
        if words.get("--gradient_checkpointing_policy") == "selective":
            return selective
        return every_2 if words.get("--gradient_checkpointing_every") == "2" else full

    return fake_simulation(size_of)


def lora_8b(*flags):
    flags = ["--model", str(CONFIGS / "llama3.1-8b"), "--data", "none", "--zero", "0", "--max_length", "2048", *flags]
    return resolve.resolve_settings("lora", flags, 1, GPU)


def test_the_fastest_pair_is_chosen_at_once(expandable, monkeypatch, capsys):
    """8B LoRA on one H100: a quarter of the micro batch without recomputation, by the closed forms alone."""
    monkeypatch.setattr(simulate, "run_all", lambda *args: pytest.fail("a simulation"))
    settings = lora_8b()
    chosen = choice.choose(settings, row_tokens=2048)
    assert chosen.flags == {MICRO: 2, "gradient_checkpointing": False}
    assert 40 * GIB < chosen.plan["peak_bytes"] < chosen.plan["limit_bytes"]
    assert chosen.plan["by"] == candidates.ROOM_BY_FORMULA
    assert chosen.plan["tokens_per_second"] == pytest.approx(32 * 2048 / chosen.plan["step_seconds"], rel=1e-3)
    said = capsys.readouterr().out
    assert "per_device_train_batch_size 2, gradient_checkpointing false: 45.7 of 79.0 GiB per rank by formula" in said
    assert "; with micro batch 8 and every layer recomputed, a step would take about 1.35 times as long\n" in said
    resolved = resolve.resolve(chosen.apply_to(settings.request), 1, GPU)
    batch = ("effective_batch_size", MICRO, "gradient_accumulation_steps")
    assert [(resolved.values[name], resolved.source[name]) for name in batch] == [
        (32, "default"), (2, "plan"), (16, "decided")]  # fmt: skip
    assert resolved.gradient_checkpointing is False and resolved.source["gradient_checkpointing"] == "plan"
    assert chosen.why in resolved.decisions
    assert choice.choose(resolved, row_tokens=2048).flags == chosen.flags  # e.g. resumed


@pytest.mark.slow
def test_what_is_close_is_simulated_and_else_what_is_sure_is_taken(expandable, monkeypatch, capsys):
    """Also where no simulation answers in time: every layer is not recomputed for that."""
    asked = []

    def run_all(size):
        def answers(questions, cache=None, seconds=None):
            asked.extend(question.request for question in questions)
            return fake_simulation(lambda flags: size)(questions)

        return answers

    def chosen(size):
        asked.clear()
        monkeypatch.setattr(simulate, "run_all", run_all(size))
        found = choice.choose(lora_8b("--max_length", "9216"), 9216)
        return found.flags, {request.get("gradient_checkpointing") for request in asked}

    sure = {MICRO: 1, "gradient_checkpointing": True, "gradient_checkpointing_every": 2}
    close = {MICRO: 1, "gradient_checkpointing": False}
    assert chosen(None) == (sure, {False})  # nobody knows
    said = (
        r"per_device_train_batch_size 1, gradient_checkpointing false would be about 1\.\d+ times as fast by estimate, "
    )
    said += r"but was not simulated \(no such kernel\); `make plan` with the same arguments simulates it\n"
    assert re.search(said, capsys.readouterr().out)
    assert chosen(500) == (sure, {False})
    assert chosen(70) == (close, {False})
    assert re.search("by simulation; with (micro batch . and )?every layer recomputed", capsys.readouterr().out)


@pytest.mark.slow
def test_a_start_waits_as_long_as_the_run_would_gain(expandable, monkeypatch):
    waited = []

    def asked(candidate, limit, seconds=None, waits=True):
        waited.append(seconds)
        candidate.failed = "too slow"

    monkeypatch.setattr(predict, "simulate_first_rank", asked)
    monkeypatch.setattr(preflight, "report", lambda plan, settings: None)
    for steps, least, most in ((None, 10, 18), (1, 10, 25), (10, 55, 65), (10**6, 290, 300)):
        waited.clear()
        choice.choose(lora_8b("--max_length", "9216"), row_tokens=9215, steps=steps)
        assert least < waited[0] <= most


@pytest.mark.parametrize(("sizes", "flags"), [
    ((60, 50, 50, 40), {"gradient_checkpointing": False}),
    ((78, 50, 50, 40), {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"}),  # 1 % short
    ((90, 80, 50, 40), {"gradient_checkpointing": True, "gradient_checkpointing_every": 2}),
    ((90, 90, 90, 40), {"gradient_checkpointing": True}),
    ((None, None, None, 40), {"gradient_checkpointing": True}),  # nobody knows
])  # fmt: skip
def test_a_launch_recomputes_no_more_than_it_must(sizes, flags, simulated, monkeypatch, capsys):
    monkeypatch.setattr(simulate, "run_all", size_by_checkpointing(*sizes))
    settings = on_a_gpu(*SMALL_ROWS)
    chosen = choice.choose(settings)
    assert chosen.flags == flags and chosen.plan["peak_bytes"] <= chosen.plan["limit_bytes"]
    said, is_less = capsys.readouterr().out, flags != {"gradient_checkpointing": True}
    assert ("with every layer recomputed, a step would take about 1." in said) is is_less and "plan: fits" in said
    assert ("but was not simulated (no such kernel); `make plan`" in said) is (sizes[0] is None)
    resolved = resolve.resolve(chosen.apply_to(settings.request), 8, GPU)
    assert resolved.source["gradient_checkpointing"] == "plan"
    assert any("GiB per rank by simulation; " in sentence for sentence in resolved.decisions)


def test_a_gpu_without_bf16_has_its_pair_chosen_too(simulated, monkeypatch):
    """A T4 trains in fp16: before, every layer was recomputed there."""
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 10))
    settings = resolve.resolve_settings("lora", ["--data", "none", *FLAGS_1B], 1, hardware.GPUS["t4-16g"])
    assert settings.precision == "fp16"
    assert choice.choose(settings).flags["gradient_checkpointing"] is False


@pytest.mark.slow
def test_the_attention_of_a_gpu_before_ampere_holds_repeated_keys():
    """The simulation and the closed form: 6 q - 4 k bytes a token and layer more than with the varlen kernel."""
    flags = ["--data", "none", *FLAGS_1B, "--zero", "0", "--per_device_train_batch_size", "4", "--fp16", "true",
             "--gradient_checkpointing", "false"]  # fmt: skip
    gpus = [hardware.GPUS["t4-16g"], dataclasses.replace(hardware.GPUS["t4-16g"], bf16=True)]
    asked, by_formula = [], []
    for gpu in gpus:
        settings = resolve.resolve_settings("lora", flags, 1, gpu)
        asked.append(simulate.Question(settings.request, 1, gpu=gpu, overrides={"num_hidden_layers": 4}))
        shape = dataclasses.replace(candidates.shape_of(settings, gpu), layers=4)
        by_formula.append(formulas.activations(shape, candidates.plan_point_of(settings), fused=True)[0]["activations"])
    simulated = [answer["peak"]["forward"]["activations"] for answer in simulate.run_all(asked)]
    expected = 4 * 4096 * (6 * 2048 - 4 * 512)
    assert by_formula[0] - by_formula[1] == expected
    assert simulated[0] - simulated[1] == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", ["false", "true"])
@pytest.mark.parametrize("name", ["gemma2-2b", "llama3.2-1b"])
def test_the_closed_form_counts_the_scores_of_eager_attention(name, recomputed):
    """Rows of 4,096 tokens, where scores are the most: with a soft cap and without, against the simulation."""
    flags = ["--data", "none", "--model", str(CONFIGS / name), "--max_length", "4096", "--attn_implementation", "eager",
             "--padding_free", "false", "--zero", "2", "--per_device_train_batch_size", "2",
             "--gradient_checkpointing", recomputed]  # fmt: skip
    settings = resolve.resolve_settings("sft", flags, 1, GPU)
    shape = dataclasses.replace(candidates.shape_of(settings, GPU), layers=4)
    at_loss, again = formulas.activations(shape, candidates.plan_point_of(settings), fused=True)
    question = simulate.Question(settings.request, 1, gpu=GPU, overrides={"num_hidden_layers": 4})
    (answer,) = simulate.run_all([question])
    parts = ("activations", "logits", "buffers")
    simulated = max(sum(answer["peak"][phase][part] for part in parts) for phase in ("forward", "backward"))
    assert max(sum(at_loss.values()), again["activations"]) == pytest.approx(simulated, rel=0.1)


@pytest.mark.parametrize("flags", [
    ["--gradient_checkpointing", "true"], ["--gradient_checkpointing_every", "1"], ["--activation_offload", "true"],
    *([["--activation_checkpointing", "true"]] if hasattr(TrainingArguments, "activation_checkpointing") else []),
    ["--preset", "gpu-40g"], ["--padding_free", "false"], ["--bf16", "false"],
])  # fmt: skip
def test_what_says_how_to_checkpoint_is_kept(flags, simulated, monkeypatch):
    """And so is the default where no plan knows what padding takes."""
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 10))
    assert choice.choose(on_a_gpu(*SMALL_ROWS, *flags)).flags == {}


@pytest.mark.parametrize("flags", [
    ["--per_device_train_batch_size", "2"], ["--gradient_accumulation_steps", "2"], ["--preset", "gpu-80g"],
    ["--padding_free", "false"], ["--bf16", "false"],
])  # fmt: skip
def test_what_says_the_micro_batch_is_kept(flags, simulated, monkeypatch):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 10))
    assert MICRO not in choice.choose(on_a_gpu(*flags)).flags


def test_a_router_loss_is_of_a_micro_batch_which_stays(expandable, monkeypatch):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 10))
    settings = on_a_gpu("--max_length", "2048")
    assert choice.covers(settings)
    monkeypatch.setattr(choice, "load_config", lambda settings: SimpleNamespace(
        get_text_config=lambda: SimpleNamespace(output_router_logits=True)))  # fmt: skip
    assert choice.choose(settings).flags == {"gradient_checkpointing": False}


def test_segments_that_do_not_expand_need_room(simulated, monkeypatch):
    """Rows of different lengths leave them unused: the check of a launch has equal rows."""
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 40))
    assert choice.choose(on_a_gpu(*SMALL_ROWS)).flags == {"gradient_checkpointing": False}
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 60))
    assert choice.choose(on_a_gpu(*SMALL_ROWS)).flags == {"gradient_checkpointing": True}


def test_what_the_closed_forms_rule_out_is_not_simulated(expandable, monkeypatch):
    asked = []

    def run_all(questions, cache=None, seconds=None):
        asked.append(questions[0].request)
        return fake_simulation(lambda flags: 40)(questions)

    monkeypatch.setattr(simulate, "run_all", run_all)
    rows = ("--per_device_train_batch_size", "2", "--max_length", "65536")
    assert choice.choose(on_a_gpu(*rows)).flags == {"gradient_checkpointing": True}
    assert all(request.get("gradient_checkpointing") is True for request in asked)


@pytest.mark.parametrize(("earlier", "sizes", "flags"), [
    ((True, 1, "full"), (10, 10, 10, 10), {"gradient_checkpointing": True}),
    ((True, 2, "full"), (10, 10, 10, 10), {"gradient_checkpointing": True, "gradient_checkpointing_every": 2}),
    ((False, 1, "full"), (None, 10, 10, 10), {"gradient_checkpointing": False}),  # nobody knows, but it ran so
    ((False, 1, "full"), (90, 10, 10, 10),
     {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"}),
])  # fmt: skip
@pytest.mark.parametrize("by", ["path", "auto", "agent"])
def test_a_resumed_run_keeps_its_pair(earlier, sizes, flags, by, simulated, monkeypatch, tmp_path):
    names = ("gradient_checkpointing", "gradient_checkpointing_every", "gradient_checkpointing_policy")
    arguments = dict(zip(names, earlier, strict=True)) | {"activation_offload": False, MICRO: 2}
    arguments = {name: {"value": value} for name, value in arguments.items()}
    (tmp_path / "run.json").write_text(json.dumps({"arguments": arguments, "started_by": ["ours"]}))
    monkeypatch.setattr(simulate, "run_all", size_by_checkpointing(*sizes))
    monkeypatch.setattr(restart, "_agent", lambda: "ours" if by == "agent" else "")
    settings = on_a_gpu("--max_length", "2048", "--output_dir", str(tmp_path))
    settings.resume_from_checkpoint = {"path": str(tmp_path / "checkpoint-2"), "auto": "auto", "agent": None}[by]
    chosen = choice.choose(settings).flags
    is_other = "gradient_checkpointing_policy" in flags
    assert (chosen[MICRO] == 2) is not is_other
    assert {name: chosen[name] for name in flags} == flags


@pytest.mark.parametrize(
    ("longest", "flags", "shorter"),
    [
        (300, (), True),
        (4093, (), False),  # rounded up to 4096
        (None, (), False),  # not known
        (300, ("--padding_free", "false"), False),
        (300, ("--tiled_mlp", "4"), False),
    ],
)
def test_a_launch_is_checked_with_its_longest_row(longest, flags, shorter, simulated, monkeypatch, capsys):
    """A job whose rows are short is not refused for the --max_length that none of them fills."""

    def size_of(flags):
        return 40 if flags[flags.index("--max_length") + 1] == "304" else 100

    monkeypatch.setattr(simulate, "run_all", fake_simulation(size_of))
    settings = on_a_gpu("--max_length", "4096", "--gradient_checkpointing", "true", *flags)
    if shorter:
        plan = choice.choose(settings, longest=longest).plan
        assert plan["peak_bytes"] <= plan["limit_bytes"]
    else:
        with pytest.raises(candidates.NothingFits):
            choice.choose(settings, longest=longest)
    line = "plan: the longest row has 300 tokens: planned with --max_length 304 instead of 4096\n"
    assert (line in capsys.readouterr().out) is shorter


@pytest.mark.slow
def test_a_users_micro_batch_is_kept_and_a_better_one_said(expandable, monkeypatch, capsys):
    monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags: 10))
    line = (
        r"plan: micro batch 16 is kept as set; --per_device_train_batch_size 2 --effective_batch_size 32 "
        r"would be about 1\.\d times as fast by estimate"
    )
    for given, said in (((), False), ((f"--{MICRO}", "16"), True), ((f"--{MICRO}", "4"), False)):
        chosen = choice.choose(lora_8b(*given), row_tokens=2048)
        assert bool(re.search(line, capsys.readouterr().out)) is said and (MICRO in chosen.flags) is not bool(given)


@pytest.mark.slow
def test_answers_are_kept_by_question(tmp_path):
    flags = ["--model", str(TINY / "model"), "--data", "none", "--max_length", "64"]
    asked = [simulate.Question(job(flags), 2)]
    (first,) = simulate.run_all(asked, tmp_path)
    (again,) = simulate.run_all(asked, tmp_path)
    assert first == again and len(list(tmp_path.iterdir())) == 1
    assert simulate.key(asked[0]) != simulate.key(simulate.Question(job([*flags, "--zero", "3"]), 2))


@pytest.mark.bad_input
def test_an_unknown_model_fails_in_words(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "no-such-model"}))
    (answer,) = simulate.run_all([simulate.Question(job(["--model", str(tmp_path), "--data", "none"]), 2)])
    assert isinstance(answer, UserError)


DEVICE_NAMES = {
    "NVIDIA H100 PCIe": "h100-80g-pcie", "NVIDIA H100 NVL": "h100-94g-nvl", "NVIDIA H100 80GB HBM3": "h100-80g",
    "NVIDIA H200": "h200-141g", "NVIDIA H200 NVL": "h200-141g-nvl", "NVIDIA GH200 480GB": "gh200-96g",
    "NVIDIA GH200 144G HBM3e": "gh200-144g", "NVIDIA B200": "b200-180g", "NVIDIA GB200": "gb200-186g",
    "NVIDIA B300 SXM6 AC": "b300-288g", "NVIDIA GB300": "gb300-288g",
    "NVIDIA H800": "h800-80g", "NVIDIA H800 PCIe": "h800-80g-pcie", "NVIDIA H20": "h20-96g",
    "NVIDIA H20-3e": "h20-141g",
    "NVIDIA A800-SXM4-40GB": "a800-40g",
    "NVIDIA A800-SXM4-80GB": "a800-80g", "NVIDIA A800 80GB PCIe": "a800-80g-pcie", "NVIDIA A40": "a40-48g",
    "NVIDIA A800-PCIE-40GB": "a800-40g-pcie", "NVIDIA A800 40GB Active": "a800-40g-pcie",
    "NVIDIA A800-PCIE-80GB": "a800-80g-pcie", "NVIDIA A100-PCIE-80GB": "a100-80g-pcie",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "rtxpro6000maxq-96g",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000-96g",
    "NVIDIA GeForce RTX 4090 D": "rtx4090d-24g", "NVIDIA GeForce RTX 5090 D": "rtx5090d-32g",
    "NVIDIA A30": "a30-24g", "NVIDIA L20": "l20-48g", "NVIDIA RTX A6000": "a6000-48g", "NVIDIA RTX A5000": "a5000-24g",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000ada-48g",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000-96g",
    "NVIDIA GeForce RTX 3070": "rtx3070-8g", "NVIDIA GeForce RTX 3080": "rtx3080-10g",
    "NVIDIA GeForce RTX 3060 Ti": "rtx3060ti-8g", "NVIDIA GeForce RTX 3090 Ti": "rtx3090ti-24g",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx4070tisuper-16g", "NVIDIA GeForce RTX 4070 Ti": "rtx4070ti-12g",
    "NVIDIA GeForce RTX 4070 SUPER": "rtx4070super-12g", "NVIDIA GeForce RTX 4080": "rtx4080-16g",
    "NVIDIA GeForce RTX 5070 Ti": "rtx5070ti-16g", "NVIDIA GeForce RTX 5080": "rtx5080-16g",
    "Tesla V100-PCIE-16GB": "v100-16g-pcie", "Tesla V100-PCIE-32GB": "v100-32g-pcie",
    "NVIDIA A100-SXM4-40GB": "a100-40g", "NVIDIA A100-PCIE-40GB": "a100-40g-pcie", "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100 80GB PCIe": "a100-80g-pcie", "NVIDIA L40S": "l40s-48g", "NVIDIA L40": "l40-48g", "NVIDIA L4": "l4-24g",
    "NVIDIA A10G": "a10g-24g", "NVIDIA A10": "a10-24g", "Tesla V100-SXM2-32GB": "v100-32g",
    "Tesla V100-SXM2-16GB": "v100-16g", "Tesla T4": "t4-16g", "NVIDIA GeForce RTX 5090": "rtx5090-32g",
    "NVIDIA GeForce RTX 4090": "rtx4090-24g", "NVIDIA GeForce RTX 3090": "rtx3090-24g",
    "NVIDIA GeForce RTX 4060 Ti": "rtx4060ti-16g", "NVIDIA GeForce RTX 3060": "rtx3060-12g",
    # Others, and parts of these: no peak is known.
    "NVIDIA RTX A1000": None, "NVIDIA RTX A1000 Laptop GPU": None, "NVIDIA T400 4GB": None,
    "NVIDIA T1000 8GB": None, "NVIDIA A100-SXM4-40GB MIG 3g.20gb": None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None, "NVIDIA GeForce RTX 2080 SUPER": None, "Quadro M4000": None,
    "Quadro RTX 6000": None, "NVIDIA RTX 5000 Ada Generation": None, "AMD Instinct MI300X": None,
}  # fmt: skip


@pytest.mark.parametrize(("device", "name"), DEVICE_NAMES.items())
def test_gpus_by_the_drivers_name(device, name):
    assert hardware.by_device_name(device) == (hardware.GPUS[name] if name else None)
    assert (hardware.peak_flops(device) is None) is (name is None)


def test_a_gpu_has_the_links_of_its_form():
    """A PCIe card has no NVLink, an export version a narrower one, and a superchip a wider link to its host."""
    sent = {name: (gpu.link_gbs, gpu.host_gbs) for name, gpu in hardware.GPUS.items()}
    for name in sent:
        if name.endswith("-pcie"):
            with_nvlink = name.removesuffix("-pcie")
            assert sent[name][0] == sent[name][1] < sent[with_nvlink if with_nvlink in sent else "a800-80g"][0]
    assert sent["h800-80g"][0] < sent["h100-80g"][0] and sent["a800-80g"][0] < sent["a100-80g"][0]
    assert min(sent["gh200-96g"][1], sent["gb200-186g"][1], sent["gb300-288g"][1]) > 3 * sent["h200-141g"][1]
    named = [gpu.device_name for gpu in hardware.GPUS.values()]
    assert len(set(named)) == len(named) and all(
        hardware.by_device_name(gpu.device_name) == gpu for gpu in hardware.GPUS.values()
    )


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80g"), ("Tesla T4", "t4-16g"),
        ("h200", "h200-141g"), ("H100", "h100-80g"), ("h100-sxm", "h100-80g"), ("h100-pcie", "h100-80g-pcie"),
        ("h100-80gb", "h100-80g"), ("4090", "rtx4090-24g"), ("rtx4090", "rtx4090-24g"), ("RTX 4090", "rtx4090-24g"),
        ("NVIDIA GeForce RTX 5080", "rtx5080-16g"), ("a6000", "a6000-48g"), ("RTX A6000", "a6000-48g"),
        ("rtx6000-ada", "rtx6000ada-48g"), ("rtx-pro-6000", "rtxpro6000-96g"), ("b200", "b200-180g"),
        ("gb200", "gb200-186g"), ("t4", "t4-16g"), ("4070ti", "rtx4070ti-12g"), ("h200-nvl", "h200-141g-nvl"),
    ],
)  # fmt: skip
def test_a_short_name_is_understood(short, name):
    assert hardware.find(short) == hardware.GPUS[name]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("short", "says"),
    [
        ("a100", "matches several GPUs: a100-40g, a100-80g; use one"),
        ("gh200", "matches several GPUs: gh200-144g, gh200-96g; use one"),
        ("mi300x-192g", "AMD GPUs are not supported yet"),
        ("MI300X", "AMD GPUs are not supported yet"),
        ("h100-8g", "not in the table; did you mean h100-80g"),
        ("m60", r"not in the table\. Known: "),
    ],
)
def test_a_short_name_that_is_no_or_several_gpus(short, says):
    with pytest.raises(UserError, match=f"^--gpu_type {short}: {says}"):
        hardware.find(short)


def test_a_slice_can_be_described_by_the_user(tmp_path, monkeypatch):
    file = tmp_path / "gpus.json"
    monkeypatch.setenv(hardware.USER_TABLE, str(file))
    file.write_text('{"slice": {"device_name": "A100-SXM4-40GB MIG 3g.20gb", "memory_gib": 19.6, "tflops": 134}}')
    assert hardware.peak_flops("NVIDIA A100-SXM4-40GB MIG 3g.20gb") == 134e12
    assert hardware.by_device_name("NVIDIA A100-SXM4-40GB") == hardware.GPUS["a100-40g"]


def test_a_gpu_without_kernels_in_the_pinned_torch():
    for name, gpu in hardware.GPUS.items():
        said = hardware.note(gpu)
        assert (said is not None) is name.startswith("v100-")
        assert said is None or (gpu.device_name in said and "built for CUDA 13" in said)
    detected = dataclasses.replace(hardware.GPUS["v100-16g"], device_name="Tesla V100-SXM2-16GB", node_gbs=1.0)
    assert "CUDA 13" in hardware.note(detected)


# --- what published measurements showed ---


def test_a_softmax_has_the_temporary_of_cuda():
    """The same gradients; grad * output is alive beside them, as large as the fp32 output."""
    import torch

    from zerofit.plan import fake_device
    from zerofit.train import memory_tracker

    plain, found = torch.nn.functional.softmax, {}
    for name, softmax in (("plain", plain), ("cuda", fake_device._softmax_of_cuda(plain, "cpu"))):
        x = torch.linspace(-2, 2, 4096).view(4, 1024).requires_grad_()
        output = softmax(x, dim=-1, dtype=torch.float32)
        with memory_tracker.MemoryTracker(device="cpu") as tracker:
            output.backward(torch.linspace(0, 1, 4096).view(4, 1024))
        found[name] = x.grad, tracker.highest
    assert torch.equal(found["plain"][0], found["cuda"][0])
    assert found["cuda"][1] - found["plain"][1] == 4 * 4096


def stage_3(layers, forward, backward=0, step=0):
    buffers = {"forward": forward, "backward": backward, "step": step}
    parts = dict.fromkeys(formulas.PARTS, 0) | {"parameters": 1000 * layers}
    peak = {phase: parts | {"buffers": int(size)} for phase, size in buffers.items()}
    total = {phase: sum(sizes.values()) for phase, sizes in peak.items()}
    return {"peak": peak, "total": total, "host": 0, "host_saving": 0, "parameters": layers, "trainable": layers}


@pytest.mark.parametrize(
    ("gathered", "bytes_each", "depths"),
    [
        (lambda layers: 5e9, 2, [6, 7]),
        (lambda layers: min(layers, 8) * 5e8, 2, [8, 9]),  # 6 and 7, 7 and 8 still grow
        (lambda layers: layers * 5e8, 0.55, [7, 8]),  # kept to the end, as a packed base: the same from pair to pair
        (lambda layers: layers**2 * 1e8, 0.55, None),  # neither: all layers
    ],
)
def test_gathered_parameters_are_level_before_they_are_extended(gathered, bytes_each, depths, monkeypatch):
    def run_all(questions, cache=None, seconds=None):
        counts = [question.layers or 40 for question in questions]
        return [stage_3(count, gathered(count)) for count in counts]

    monkeypatch.setattr(simulate, "run_all", run_all)
    monkeypatch.setattr(predict, "_depths", lambda *args: [(6, 7), (7, 8), (8, 9), (None,)])
    shape = dataclasses.replace(SHAPE_8B, layers=40, frozen_bytes=bytes_each)
    answer = predict.answer_of(simulate.Question(job([]), 2, gpu=GPU), shape, zero=3, every=1)
    assert answer.get("extended_from_layers") == depths
    assert answer["peak"]["forward"]["buffers"] == pytest.approx(gathered(40), rel=1e-6)


TWO_KINDS = {
    "mixtures of experts and dense layers": ({"model_type": "qwen3_moe", "decoder_sparse_step": 2, "num_experts": 8,
                                              "num_experts_per_tok": 2, "moe_intermediate_size": 64}, 24, (6, 8)),
    "attention in each third layer": ({"model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention"] * 8,
                                       "block_auto_adjust_ff_dim": False}, 24, (6, 9)),
    "one kind": ({"model_type": "llama"}, 24, (6, 7)),
    "another kind at first": ({"model_type": "lfm2", "layer_types": ["full_attention"] * 2 + ["conv"] * 22,
                               "block_auto_adjust_ff_dim": False}, 24, (6, 7)),
    "another kind at last": ({"model_type": "lfm2", "layer_types": ["conv"] * 23 + ["full_attention"],
                              "block_auto_adjust_ff_dim": False}, 24, (None,)),
}  # fmt: skip


@pytest.mark.parametrize(("kinds", "layers", "depths"), TWO_KINDS.values(), ids=TWO_KINDS)
def test_layers_of_several_kinds_are_extended_by_whole_patterns(kinds, layers, depths, tmp_path):
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "vocab_size": 512, "num_hidden_layers": layers}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(small | kinds))
    shape = candidates.shape_of(resolve.resolve_settings("sft", ["--model", str(tmp_path), "--data", "x"], 8, GPU))
    assert len(shape.by_layer) == layers
    found = predict._depths(3, shape, 1, 8)[0]
    assert found == depths and predict._depths(0, shape, 0, 8)[0] == depths


def test_layers_with_their_own_number_of_heads_have_a_shape(tmp_path):
    """Gemma 4: the configuration as a whole refuses what its layers differ in; keys that layers share forbid a cut."""
    config = {"model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "vocab_size": 512,
              "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512, "num_hidden_layers": 24}  # fmt: skip

    def shape_with(**more):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        return candidates.shape_of(resolve.resolve_settings("sft", ["--model", str(tmp_path), "--data", "x"], 8, GPU))

    shape = shape_with()
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.intermediate) == (24, 4, 2, 32, 128)
    assert len(predict._depths(3, shape, 1, 8)) > 1
    assert predict._depths(3, shape_with(num_kv_shared_layers=16), 1, 8) == [(None,)]


@pytest.mark.parametrize(("each", "whole", "depths"), [(2e8, True, [6, 7]), (3e8, True, None), (3e8, False, [6, 7])])
def test_extended_layers_have_the_parameters_of_the_model(each, whole, depths, monkeypatch):
    """A model whose first layers depend on how many there are is simulated with all of them."""

    def run_all(questions, cache=None, seconds=None):
        counts = [question.layers or 40 for question in questions]
        return [stage_3(n, 5e9) | {"parameters": n * each, "whole_parameters": whole} for n in counts]

    monkeypatch.setattr(simulate, "run_all", run_all)
    shape = dataclasses.replace(SHAPE_8B, layers=40)  # 2e8 parameters a layer
    answer = predict.answer_of(simulate.Question(job([]), 2, gpu=GPU), shape, zero=0, every=1)
    assert answer.get("extended_from_layers") == depths


# --- what the allocator adds ---


def replayed(allocated, reserved, least):
    return {"allocated": allocated << 30, "reserved": reserved << 30, "least": least << 30}


def with_allocator(total, allocator, layers=None):
    def run_all(questions, cache=None, seconds=None):
        found = fake_simulation(lambda flags: total)(questions)
        whole = not questions[0].overrides
        extended = {} if whole else {"extended_from_layers": [6, 7]}
        return [answer | {"allocator": layers if whole and layers else allocator} | extended for answer in found]

    return run_all


ONE_SETTING = ["--zero", "2", "--offload", "none", "--gradient_checkpointing", "true"]


def test_a_plan_has_three_figures(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(simulate, "run_all", with_allocator(50, replayed(20, 26, 21)))
    flags = [*FLAGS_1B, *ONE_SETTING, "--per_device_train_batch_size", "1"]
    plan = planner.plan_of(["sft"], job(flags), 8, GPU, exact=True)
    sizes = {name: size / 2**30 for name, size in answer_text.figures(plan.chosen, plan).items()}
    # 64 MiB of cuBLAS workspace; 6 and 1 GiB of segments; 0.6 GiB context and 2 of NCCL, on 8 GPUs with NVLS
    wanted = {"allocated": 50.0625, "reserved": 56.0625, "nvidia_smi": 58.6625, "least": 53.6625}
    assert sizes == pytest.approx(wanted, abs=1e-3)
    assert "GPU memory    53.7 of 79.6 GiB (by simulation); nvidia-smi will show 58.7" in answer_text.text(plan)
    said = answer_text._markdown(plan)
    assert "allocated     50.1 GiB" in said and "reserved      56.1 GiB" in said
    assert "nvidia-smi    58.7 of 79.6 GiB; 53.7 GiB suffice on a fuller GPU" in said
    assert (
        answer_text.as_json(plan)["chosen"]["nvidia_smi_bytes"] == answer_text.figures(plan.chosen, plan)["nvidia_smi"]
    )
    assert "rows of different lengths: may need up to 1.9 times" in said
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert "rows of different lengths" not in answer_text._markdown(plan)


def test_unused_segments_that_decide_are_simulated_with_all_layers(monkeypatch):
    """Extended, the job fits only on a GPU that returns segments; with all layers it does not fit."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    flags = ["--model", str(CONFIGS / "llama3.1-8b"), *ONE_SETTING[2:], "--zero", "3"]
    flags += ["--per_device_train_batch_size", "1", "--sp_size", "1"]
    monkeypatch.setattr(simulate, "run_all", with_allocator(74, replayed(20, 26, 21), replayed(74, 90, 85)))
    (candidate,) = candidates.candidates("sft", job(flags), 8, GPU)
    plan = Plan(GPU, 8, int(78.2 * 2**30), {}, None, [])
    search.search([candidate], plan, lambda one: predict.simulate_candidate(one, plan.limit), exact=True)
    assert candidate.allocated < plan.limit < candidate.peak and "extended_from_layers" not in candidate.answer


@pytest.mark.parametrize(("least", "with_all_layers", "fits"), [(25, 74, True), (20, 85, False)])
def test_a_launch_near_the_limit_asks_for_all_layers(least, with_all_layers, fits, monkeypatch):
    """Unused segments of few layers neither refuse a job that fits nor start one that does not."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    few, all_layers = replayed(20, 26, least), replayed(74, 90, with_all_layers)
    monkeypatch.setattr(simulate, "run_all", with_allocator(74, few, all_layers))
    plan = predict.predict(on_a_gpu("--per_device_train_batch_size", "1"), seconds=10)
    assert (plan["peak_bytes"] <= plan["limit_bytes"]) is fits


def test_the_error_of_plans_is_kept_free_if_something_fits_so(monkeypatch):
    flags = [*FLAGS_1B, *ONE_SETTING[2:], "--zero", "0", "--per_device_train_batch_size", "1"]
    plans = {}
    for size in (60, 76.5, 77):  # 79.6 GiB, 0.6 of them for the context; 3 % more than the size without a replay
        monkeypatch.setattr(simulate, "run_all", fake_simulation(lambda flags, size=size: size))
        plans[size] = planner.plan_of(["sft"], job(flags), 1, GPU, exact=True)
    assert plans[60].margin == pytest.approx(0.01 * GPU.memory_gib * 2**30, abs=2) and plans[60].chosen
    assert "CUDA context 0.60, kept free for the error of plans 0.80 (1%)" in answer_text._gpu(plans[60])
    assert plans[76.5].chosen and not plans[76.5].margin and plans[76.5].nearest is None
    assert "no memory is kept free for the error of plans" in answer_text.text(plans[76.5])
    assert all("of 79.6 GiB (by simulation" in answer_text.text(plans[size]) for size in (60, 76.5))
    assert plans[77].chosen is None and plans[77].nearest


def test_a_fuller_limit_says_what_tensors_may_take(monkeypatch):
    """A launch compares allocated bytes, so its limit is lower by what the allocator cannot use."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(simulate, "run_all", with_allocator(20, replayed(20, 26, 21)))
    found = predict.predict(on_a_gpu("--zero", "2"))
    outside = gpu_memory.UNKNOWN_CONTEXT_GIB + gpu_memory.NCCL_GIB["within a node"] + gpu_memory.NVLS_GIB
    assert found["limit_bytes"] / 2**30 == pytest.approx(GPU.memory_gib - outside - 1)
    assert found["reserved_bytes"] == found["peak_bytes"] + (6 << 30)
