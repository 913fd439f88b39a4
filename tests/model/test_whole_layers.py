"""Whole layers in one call at ZeRO-3: when, with which buckets, and that it trains the same."""

import json
import shutil

import pytest
from conftest import ROOT, TINY, run_world, two_layers

from zerofit.base import hardware, limits
from zerofit.config import resolve
from zerofit.parallel import whole_layers
from zerofit.plan import candidates, formulas
from zerofit.plan.speed import links

CONFIGS = ROOT / "tests" / "configs"
LLAMA = str(CONFIGS / "llama3.1-8b")
MIXTURE = str(CONFIGS / "qwen3-moe-30b")
MATRICES = 4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14336
LAYER = MATRICES + 2 * 4096


def zero_section(ranks: int, *flags: str, model: str = LLAMA, recipe: str = "sft") -> tuple[dict, list[str]]:
    words = ["--model", model, "--data", "none", "--effective_batch_size", str(ranks), *flags]
    settings = resolve.resolve_settings(recipe, words, ranks, hardware.GPUS["h100-80g"])
    resolve.resolve_for_model(settings)
    return settings.deepspeed["zero_optimization"], settings.decisions


@pytest.mark.parametrize(("ranks", "length", "why"), [
    (256, 8192, "256 ranks fewer calls save more"), (8, 2048, "a micro batch of at most 2,048 tokens"),
])  # fmt: skip
def test_buckets_and_leaves_are_layers_on_many_ranks_and_for_short_micro_batches(ranks, length, why):
    section, decisions = zero_section(ranks, "--zero", "3", "--max_length", str(length))
    assert [section[name] for name in whole_layers.BUCKETS] == [LAYER, MATRICES]
    assert section["leaf_module"] == {"classes": ["LlamaDecoderLayer"]}
    (sentence,) = (sentence for sentence in decisions if "LlamaDecoderLayer" in sentence)
    assert why in sentence and sentence.endswith("--whole_layers false turns it off")


@pytest.mark.parametrize(("recipe", "ranks", "model", "flags"), [
    ("sft", 128, LLAMA, "--zero 3 --max_length 4096"), ("sft", 256, LLAMA, "--zero 2"),
    ("sft", 256, MIXTURE, "--zero 3"), ("lora", 256, LLAMA, "--zero 3"), ("sft", 8, LLAMA, "--zero 3 --offload all"),
    ("sft", 256, LLAMA, "--zero 3 --whole_layers false"), ("sft", 8, str(CONFIGS / "llama3.1-70b"), "--zero 3"),
])  # fmt: skip
def test_long_micro_batches_large_layers_other_stages_mixtures_and_adapters_are_left_alone(recipe, ranks, model, flags):
    section, _ = zero_section(ranks, "--max_length", "512", *flags.split(), model=model, recipe=recipe)
    assert "leaf_module" not in section and section["reduce_bucket_size"] == "auto"


@pytest.mark.parametrize("own", [
    {"reduce_bucket_size": 10**7}, {"leaf_module": {"classes": ["LlamaMLP"]}},
    {"stage3_module_granularity_threshold": 10**6},
])  # fmt: skip
def test_what_the_json_says_is_what_runs(own, tmp_path):
    config = json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
    config["zero_optimization"] |= own
    file = tmp_path / "own.json"
    file.write_text(json.dumps(config))
    section, decisions = zero_section(256, "--deepspeed", str(file))
    assert section == config["zero_optimization"]
    assert not any("whole_layers" in sentence for sentence in decisions)
    _, decisions = zero_section(256, "--deepspeed", str(file), "--whole_layers", "true")
    assert sum(sentence.startswith("whole_layers False: the DeepSpeed JSON sets") for sentence in decisions) == 1


def test_a_plan_prices_fewer_calls_and_the_larger_buffers():
    words = ["--model", LLAMA, "--data", "none", "--zero", "3", "--effective_batch_size", "256"]
    settings = resolve.resolve_settings("sft", words, 256, hardware.GPUS["h100-80g"])
    setting, shape = candidates.plan_point_of(settings, 8), candidates.shape_of(settings)
    resolve.resolve_for_model(settings)
    assert candidates.plan_point_of(settings, 8) == setting, "what it has added itself counts as the user's"
    assert setting.whole_layers == limits.ANY_SIZE
    calls, seconds, peaks = {}, {}, {}
    for whole in (limits.ANY_SIZE, LAYER - 1):
        of_matrices = formulas.replace(setting, whole_layers=whole)
        calls[whole] = sum(c.calls for c in formulas.collectives(shape, of_matrices))
        seconds[whole] = links.wire_seconds(shape, of_matrices, hardware.GPUS["h100-80g"])
        peaks[whole] = formulas.memory(shape, of_matrices, settings, True)["buffers"]
    assert calls[limits.ANY_SIZE] < calls[LAYER - 1] / 3 and seconds[limits.ANY_SIZE] < seconds[LAYER - 1]
    assert peaks[limits.ANY_SIZE] - peaks[LAYER - 1] == 2 * (max(shape.by_layer) - 4096**2)


@pytest.mark.slow
def test_two_ranks_train_the_same_with_whole_layers(tmp_path):
    common = ["--model", two_layers(), "--data", str(TINY / "train.jsonl"), "--max_samples", "32", "--zero", "3",
              "--max_steps", "4", "--effective_batch_size", "8", "--logging_steps", "1", "--num_samples", "0",
              "--save_strategy", "no"]  # fmt: skip
    cases = {
        "matrices": ("sft", [*common, "--whole_layers", "false"]),
        "layers": ("sft", common),
        "checkpointed": ("sft", [*common, "--gradient_checkpointing", "true"]),
    }
    runs = run_world(2, cases, tmp_path)
    assert all(run.json("result.json")["world_size"] == 2 for run in runs.values())
    said = {
        name: sum("leaf_module" in line for line, _ in run.json("job.json")["decisions"]) for name, run in runs.items()
    }
    assert said == {"matrices": 0, "layers": 1, "checkpointed": 1}
    assert runs["layers"].losses == pytest.approx(runs["matrices"].losses, rel=1e-6)
    assert runs["checkpointed"].losses == pytest.approx(runs["matrices"].losses, rel=1e-6)


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16,
         "num_key_value_heads": 2, "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 1024, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 1, "layer_types": None}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_dense_architecture_trains_the_same_with_whole_layers(tmp_path):
    cases = {}
    for folder in sorted(CONFIGS.iterdir()):
        config = json.loads((folder / "config.json").read_text())
        if "moe" in folder.name:
            continue
        shutil.copytree(TINY / "model", tmp_path / folder.name, ignore=shutil.ignore_patterns("*.safetensors"))
        small = config | {name: value for name, value in SMALL.items() if name in config}
        (tmp_path / folder.name / "config.json").write_text(json.dumps(small))
        words = ["--model", str(tmp_path / folder.name), "--random_init", "true", "--data", str(TINY / "train.jsonl"),
                 "--max_samples", "16", "--max_steps", "2", "--effective_batch_size", "4", "--logging_steps", "1",
                 "--num_samples", "0", "--save_strategy", "no", "--zero", "3"]  # fmt: skip
        for on in ("true", "false"):
            cases[f"{folder.name} {on}"] = ("sft", [*words, "--whole_layers", on])
    runs = run_world(2, cases, tmp_path)
    assert len(runs) >= 16
    for name in {name.split()[0] for name in runs}:
        assert runs[f"{name} true"].json("job.json")["deepspeed"]["zero_optimization"]["leaf_module"], name
        assert runs[f"{name} true"].losses == pytest.approx(runs[f"{name} false"].losses, rel=1e-5), name
