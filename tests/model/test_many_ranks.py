"""Whole layers in one call at ZeRO-3 on many ranks: when, with which buckets, and that it trains the same."""

import json

import pytest
from conftest import ROOT, TINY, run_world, two_layers

from zerofit.base import hardware
from zerofit.config import resolve
from zerofit.parallel import many_ranks
from zerofit.plan import candidates, formulas
from zerofit.plan.speed import links

LLAMA = str(ROOT / "tests" / "configs" / "llama3.1-8b")
MIXTURE = str(ROOT / "tests" / "configs" / "qwen3-moe-30b")


def zero_section(ranks: int, *flags: str, model: str = LLAMA, recipe: str = "sft") -> tuple[dict, list[str]]:
    words = ["--model", model, "--data", "none", "--effective_batch_size", str(ranks), *flags]
    settings = resolve.resolve_settings(recipe, words, ranks, hardware.GPUS["h100-80g"])
    resolve.resolve_for_model(settings)
    return settings.deepspeed["zero_optimization"], settings.decisions


def test_buckets_and_leaves_are_layers_above_128_ranks():
    section, decisions = zero_section(256, "--zero", "3")
    layer = 4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336 + 2 * 4096
    assert [section[name] for name in many_ranks.BUCKETS] == [layer, layer]
    assert section["leaf_module"] == {"classes": ["LlamaDecoderLayer"]}
    assert sum("LlamaDecoderLayer" in sentence for sentence in decisions) == 1


@pytest.mark.parametrize("recipe, ranks, zero, model", [
    ("sft", 128, "3", LLAMA), ("sft", 256, "2", LLAMA), ("sft", 256, "3", MIXTURE), ("lora", 256, "3", LLAMA),
])  # fmt: skip
def test_few_ranks_other_stages_mixtures_and_adapters_are_left_alone(recipe, ranks, zero, model):
    section, _ = zero_section(ranks, "--zero", zero, model=model, recipe=recipe)
    assert "leaf_module" not in section and section["reduce_bucket_size"] == "auto"


@pytest.mark.parametrize("own", [{"reduce_bucket_size": 10**7}, {"leaf_module": {"classes": ["LlamaMLP"]}}])
def test_what_the_json_says_is_what_runs(own, tmp_path):
    config = json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
    config["zero_optimization"] |= own
    file = tmp_path / "own.json"
    file.write_text(json.dumps(config))
    section, _ = zero_section(256, "--deepspeed", str(file))
    assert section == config["zero_optimization"]


def test_a_plan_prices_fewer_calls_and_the_larger_buffers():
    words = ["--model", LLAMA, "--data", "none", "--zero", "3", "--effective_batch_size", "256"]
    settings = resolve.resolve_settings("sft", words, 256, hardware.GPUS["h100-80g"])
    setting, shape = candidates.setting_of(settings, 8), candidates.shape_of(settings)
    assert setting.whole_layers
    calls, seconds, peaks = {}, {}, {}
    for whole in (True, False):
        of_matrices = formulas.replace(setting, whole_layers=whole)
        calls[whole] = sum(c.calls for c in formulas.collectives(shape, of_matrices))
        seconds[whole] = links.wire_seconds(shape, of_matrices, hardware.GPUS["h100-80g"])
        peaks[whole] = formulas.memory(shape, of_matrices, settings, True)["buffers"]
    assert calls[True] < calls[False] / 3 and seconds[True] < seconds[False]
    assert peaks[True] - peaks[False] == 2 * (max(shape.by_layer) - 4096**2)


def test_two_ranks_train_the_same_with_whole_layers(tmp_path):
    config = json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
    layers = dict.fromkeys(many_ranks.BUCKETS, 200_000) | {"leaf_module": {"classes": ["LlamaDecoderLayer"]}}
    config["zero_optimization"] |= layers
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(config))
    common = ["--model", two_layers(), "--data", str(TINY / "train.jsonl"), "--max_samples", "32",
              "--max_steps", "4", "--effective_batch_size", "8", "--logging_steps", "1", "--num_samples", "0",
              "--save_strategy", "no"]  # fmt: skip
    cases = {
        "matrices": ("sft", [*common, "--zero", "3"]),
        "layers": ("sft", [*common, "--deepspeed", str(file)]),
        "checkpointed": ("sft", [*common, "--gradient_checkpointing", "true", "--deepspeed", str(file)]),
    }
    runs = run_world(2, cases, tmp_path)
    assert all(run.json("result.json")["world_size"] == 2 for run in runs.values())
    assert runs["layers"].losses == pytest.approx(runs["matrices"].losses, rel=1e-6)
    assert runs["checkpointed"].losses == pytest.approx(runs["matrices"].losses, rel=1e-6)
