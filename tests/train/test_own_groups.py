"""Weights that do not train, and learning rates of embeddings and head: two ranks at each stage, and a resume."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import TINY, run_world, two_layers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import parse, resolve
from zerofit.model import freezing, load
from zerofit.plan import candidates, simulate

FLAGS = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "16", "--num_samples", "0", "--effective_batch_size", "8",
    "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--max_steps", "2", "--logging_steps", "1",
    "--max_length", "64", "--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "3",
    "--bf16", "false", "--warmup_steps", "0", "--lr_scheduler_type", "constant", "--weight_decay", "0",
]  # fmt: skip
RATES = ["--embedding_learning_rate", "0", "--head_learning_rate", "5e-3"]


@functools.cache
def untied() -> str:
    """A model of two layers whose head is a weight of its own."""
    folder = tempfile.mkdtemp(prefix="zerofit-untied-")
    shutil.copytree(two_layers(), folder, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def case(zero: str, *more: str):
    return "sft", [*FLAGS, "--model", untied(), "--zero", zero, *more]


def weights(folder) -> dict:
    return load_file(folder / "model.safetensors")


def moved(run) -> dict[str, float]:
    """The largest change of each weight in a run."""
    before, after = weights(Path(untied())), weights(run.folder / "final")
    return {name: (after[name].float() - before[name].float()).abs().max().item() for name in before}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    cases = {}
    for zero in ("0", "2", "3"):
        cases[f"freeze-{zero}"] = case(zero, "--freeze", "embed_tokens", "layers.0", ".*norm.*")
        cases[f"only-{zero}"] = case(zero, "--train_only", r".*self_attn\.[qv]_proj")
        cases[f"rates-{zero}"] = case(zero, *RATES)
    saved = ["--modules_to_save", "embed_tokens", "lm_head", "--lora_target_modules", "q_proj"]
    cases["lora-2"] = "lora", [*FLAGS, "--model", untied(), "--zero", "2", *saved, *RATES]
    found = run_world(2, cases, folder)
    on = {}
    for name in ("freeze-3", "rates-3", "only-2"):
        words = ["--resume_from_checkpoint", str(folder / name / "checkpoint-1")]
        on[f"{name}>"] = (cases[name][0], [*cases[name][1], *words])
    return found | run_world(2, on, folder)


@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_frozen_weights_stay_and_others_move(runs, zero):
    for name, size in moved(runs[f"freeze-{zero}"]).items():
        frozen = any(part in name for part in ("embed_tokens", "layers.0.", "norm"))
        assert (size == 0) is frozen, (name, size)
    for name, size in moved(runs[f"only-{zero}"]).items():
        assert (size > 0) is ("q_proj" in name or "v_proj" in name), (name, size)


@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_embeddings_and_head_have_their_own_rates(runs, zero):
    sizes = moved(runs[f"rates-{zero}"])
    assert sizes["model.embed_tokens.weight"] == 0
    assert 4e-3 < sizes["lm_head.weight"] < 1.1e-2 and 8e-4 < sizes["model.layers.0.mlp.up_proj.weight"] < 2.2e-3


def test_modules_beside_an_adapter_have_them_too(runs):
    before, after = weights(Path(untied())), load_file(runs["lora-2"].folder / "final" / "adapter_model.safetensors")
    (embeddings,) = (value for name, value in after.items() if "embed_tokens" in name)
    (head,) = (value for name, value in after.items() if "lm_head" in name)
    assert torch.equal(embeddings.float(), before["model.embed_tokens.weight"].float())
    assert 4e-3 < (head.float() - before["lm_head.weight"].float()).abs().max() < 1.1e-2


@pytest.mark.parametrize("kind", ["freeze", "only", "rates"])
def test_losses_are_those_of_one_stage(runs, kind):
    for zero in ("2", "3"):
        assert runs[f"{kind}-{zero}"].losses == pytest.approx(runs[f"{kind}-0"].losses, rel=1e-4)
    assert runs[f"{kind}-0"].json("result.json")["world_size"] == 2


@pytest.mark.parametrize("name", ["freeze-3", "rates-3", "only-2"])
def test_a_resume_continues_it(runs, name):
    assert runs[f"{name}>"].losses[-1] == pytest.approx(runs[name].losses[-1], rel=1e-5)
    for key, value in weights(runs[name].folder / "final").items():
        assert torch.allclose(weights(runs[f"{name}>"].folder / "final")[key], value, atol=1e-6), key


def settings_of(*flags, recipe="sft"):
    words = ["--model", untied(), "--data", "x.jsonl", *flags]
    settings = resolve.resolve_settings(recipe, words, 1)
    resolve.resolve_for_model(settings)
    return settings


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("recipe", "flags", "says"),
    [
        (
            "sft",
            ["--freeze", "embed_token"],
            "--freeze embed_token: .*; the model has em",
        ),
        ("sft", ["--freeze", ".*"], "no weight is left to train"),
        ("sft", ["--freeze", "lm_head", "--train_only", "norm"], "--freeze .*--train_only .*use one of the two"),
        ("lora", ["--freeze", "lm_head"], "an adapter's base is already frozen"),
        ("lora", ["--head_learning_rate", "1e-5"], "the head does not train in this job"),
        ("sft", ["--head_learning_rate", "-1"], "it must be 0 or more"),
        ("sft", ["--freeze", "embed_tokens", "--embedding_learning_rate", "1"], "the embeddings do not train"),
    ],
)
def test_what_cannot_be_is_refused(recipe, flags, says):
    with pytest.raises(UserError, match=says):
        settings = settings_of(*flags, recipe=recipe)
        resolve.install(settings, load.check_model(settings))


def test_patterns_are_names_or_expressions_of_whole_names():
    name = "model.layers.10.self_attn.q_proj.weight"
    for pattern in ("q_proj", "self_attn", "layers.10", "self_attn.q_proj", name, r"model\.layers\.1\d", r".*q_proj.*"):
        assert freezing._matches(pattern, name), pattern
    for pattern in ("proj", "layers.1", "attn", "[", "layers"):
        assert freezing._matches(pattern, name) is (pattern == "layers"), pattern


def test_a_tied_weight_is_one(tmp_path):
    config = json.loads((TINY / "model" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in TINY.joinpath("model").glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = ["--model", str(tmp_path), "--data", "x.jsonl", "--random_init", "true"]
    settings = resolve.resolve_settings("sft", [*words, "--freeze", "lm_head"], 1)
    model = load.check_model(settings)
    assert not model.get_input_embeddings().weight.requires_grad
    rates = ["--head_learning_rate", "1e-4", "--embedding_learning_rate", "1e-5"]
    settings = resolve.resolve_settings("sft", [*words, *rates], 1)
    with pytest.raises(UserError, match="are tied; set only one"):
        resolve.install(settings, load.check_model(settings))


@pytest.mark.slow
def test_a_plan_simulates_what_trains():
    """Its optimizer is that of the weights that train; a closed form, which is of all or a LoRA, never decides."""
    found = {}
    for more in ([], ["--train_only", "self_attn"]):
        words = ["--model", untied(), "--data", "none", "--max_length", "64", "--zero", "1", *more]
        request = parse.request("sft", words)
        (answer,) = simulate.run_all([simulate.Question(request, 1, gpu=hardware.GPUS["h100-80g"])])
        assert not isinstance(answer, Exception), answer
        found[len(more)] = answer
        one, *_ = candidates.candidates("sft", request, 1, hardware.GPUS["h100-80g"])
        assert candidates.formulas_suffice(one) is (not more)
    attention = sum(value.numel() for name, value in weights(Path(untied())).items() if "self_attn" in name)
    assert found[2]["trainable"] == attention < found[0]["trainable"] == found[0]["parameters"]
    assert found[2]["peak"]["step"]["optimizer"] < found[0]["peak"]["step"]["optimizer"] / 4
