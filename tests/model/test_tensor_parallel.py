"""--tp_size: ranks that split each matrix train, save and resume what one rank does."""

import shutil
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, TINY, run_world, runs_beside_one_rank, slow_but
from safetensors.torch import load_file
from transformers import LlamaConfig

from zerofit.base.errors import UserError
from zerofit.checkpoint import resumable
from zerofit.config import resolve
from zerofit.job.settings import written
from zerofit.parallel import tensor_parallel
from zerofit.plan import formulas

COMMON = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "18", "--max_steps", "3", "--effective_batch_size", "4",
    "--logging_steps", "1", "--eval_fraction", "0.25", "--num_samples", "1", "--max_tokens_per_sample", "4",
    "--learning_rate", "1e-4", "--save_strategy", "no",
]  # fmt: skip
# {kind of model: further flags}
MODELS = {"tied": [], "untied": [], "qwen3": [], "packed": ["--packing", "true", "--max_length", "64"],
          "tokens": ["--new_tokens", "<a>", "<b>"]}  # fmt: skip


def save_model(kind: str, folder) -> str:
    """Write a tiny model: the bundled Llama, the same with a head of its own, or a Qwen3, whose heads have norms.

    Returns: its folder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind in ("tied", "packed", "tokens"):
        return str(TINY / "model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(TINY / "model", tie_word_embeddings=False, dtype="float32")
    if kind == "qwen3":
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "pad_token_id", "eos_token_id", "tie_word_embeddings")  # fmt: skip
        config = AutoConfig.for_model("qwen3", **{name: getattr(config, name) for name in names})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / "model" / file, folder / file)
    return str(folder)


def case(model: str, zero: str, tp_size: int, micro: int, *more: str) -> tuple[str, list[str]]:
    return "sft", [*COMMON, "--model", model, "--zero", zero, "--tp_size", str(tp_size),
                   "--per_device_train_batch_size", str(micro), *more]  # fmt: skip


# {ranks: {name: (model, stage, tp_size, micro batch, further flags)}}
CASES = {
    2: {f"{model}-{zero}-tp2": (model, zero, 2, micro)
        for model, zero, micro in [("tied", "1", 4), ("untied", "2", 2), ("qwen3", "2", 4), ("tokens", "2", 4)]}
       | {f"{model}-{zero}-tp2-offload": (model, zero, 2, 2, "--offload", "optimizer")
          for model, zero in [("tied", "1"), ("untied", "2")]},
    4: {f"{model}-{zero}-tp{size}-4ranks": (model, zero, size, micro)
        for model, zero, size, micro in [("tied", "2", 2, 2), ("packed", "1", 2, 1)]},
}  # fmt: skip


SHORT = ("untied-2-tp2",)  # what `make test` runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    return runs_beside_one_rank(
        request, tmp_path_factory.mktemp("runs"), CASES, SHORT, save_model,
        alone=lambda model, kind: case(model, "0", 1, 4, *MODELS[kind]),
        split=lambda model, kind, *rest: case(model, *rest, *MODELS[kind]),
    )  # fmt: skip


@pytest.mark.parametrize("name", slow_but([name for cases in CASES.values() for name in cases], SHORT))
def test_losses_norms_evaluation_and_saved_weights_are_those_of_one_rank(runs, name):
    run, reference = runs[name], runs[name.split("-")[0]]
    assert len(run.losses) == len(reference.losses) == 3
    for found, expected in ((run.losses, reference.losses), (run.grad_norms, reference.grad_norms)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
    result, expected = run.json("result.json"), reference.json("result.json")
    assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert result["parameters"] == expected["parameters"]
    assert result["tokens"] == expected["tokens"] or "packed" in name  # whose rows end in some padding
    saved, whole = (load_file(r.folder / "final" / "model.safetensors") for r in (run, reference))
    assert saved.keys() == whole.keys()
    for tensor, value in whole.items():
        assert (saved[tensor] - value).abs().max() <= 1e-6, tensor


@pytest.mark.slow
def test_activations_of_split_layers_are_offloaded(tmp_path):
    flags = ["--activation_offload", "true"]
    model = str(TINY / "model")
    expected = run_world(1, {"one": case(model, "0", 1, 4)}, tmp_path)["one"]
    run = run_world(2, {"two": case(model, "2", 2, 4, *flags)}, tmp_path, ZEROFIT_TEST_AS_ON_A_GPU="1")["two"]
    assert run.json("result.json")["offloaded"] > 0
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)


# --- checkpoints ---


@pytest.mark.slow
def test_it_goes_on_at_the_same_tp_size(tmp_path):
    steps = ["--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "3", "--eval_fraction", "0",
             "--num_samples", "0"]  # fmt: skip
    whole = case(str(TINY / "model"), "2", 2, 4, *steps)
    run_world(2, {"whole": whole}, tmp_path)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    saved = load_file(checkpoint / "model.safetensors")
    assert saved["model.embed_tokens.weight"].shape == (512, 128)
    shutil.copytree(checkpoint, tmp_path / "resumed" / "checkpoint-2")
    resumed = whole[0], [*whole[1], "--resume_from_checkpoint", str(tmp_path / "resumed" / "checkpoint-2")]
    run = run_world(2, {"again": resumed}, tmp_path)["again"]
    first, again = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "again"))
    assert run.json("result.json")["steps"] == 3 and all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("saved", "flags", "says"),
    [
        (2, [], "--tp_size can only be resumed with the saved layout; use --tp_size 2 --zero 2 --gpus 2 --offload"),
        (1, ["--tp_size", "2"], "--tp_size can only be resumed with the saved layout; use --tp_size 1"),
        (
            2,
            ["--tp_size", "2", "--zero", "1"],
            "--tp_size can only be resumed with the saved layout; use --tp_size 2 --zero 2",
        ),
    ],
)
def test_a_checkpoint_of_another_tp_size_is_refused(saved, flags, says):
    settings = resolve.resolve_settings("sft", ["--zero", "2", *flags], 2)
    known = {"zero": "2", "world_size": 2, "offload": "none", "optim": settings.optim, "tp_size": saved}
    settings = settings.replace(resharded=written("zero", settings.zero) != "2")
    with pytest.raises(UserError, match=says):
        resumable.check_split(settings, known, "--resume_from_checkpoint x")


# --- arguments ---


def settings_of(*flags: str, recipe: str = "sft", ranks: int = 4):
    return resolve.resolve_settings(recipe, ["--zero", "2", *flags], ranks)


def test_the_batch_counts_data_ranks_and_the_overlay_is_merged():
    settings = settings_of("--tp_size", "2", "--effective_batch_size", "8", "--per_device_train_batch_size", "1")
    assert (settings.data_ranks, settings.gradient_accumulation_steps) == (2, 4)
    assert any("4 x 2 data ranks (4 ranks / tp_size 2)" in d for d in settings.decisions)
    assert settings.deepspeed["tensor_parallel"]["autotp_size"] == 2
    assert settings.deepspeed["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    assert "train_batch_size" not in settings.deepspeed


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tp_size", "3"], "--tp_size 3: must divide the 4 ranks of this job."),
        (["--tp_size", "0"], "--tp_size is 0: it must be 1 or more."),
        (["--tp_size", "2", "--zero", "0"], "--tp_size 2 with ZeRO stage 0: "),
        (["--tp_size", "2", "--zero", "3"], "--tp_size 2 with ZeRO stage 3: "),
        (["--tp_size", "2", "--sp_size", "2"], "--tp_size 2 with --sp_size 2: "),
        (["--tp_size", "2", "--optim", "muon"], "--tp_size 2 with --optim muon: "),
        (["--tp_size", "2", "--fused_loss", "true"], "--tp_size 2 with --fused_loss true: "),
        (["--tp_size", "2", "--tiled_mlp", "auto"], "--tp_size 2 with --tiled_mlp auto: "),
        (["--tp_size", "2", "--pure_bf16", "true"], "--tp_size 2 with --pure_bf16 true: "),
        (["--tp_size", "2", "--node_local_storage", "true"], "--tp_size 2 with --node_local_storage true: "),
        (["--tp_size", "2", "--neftune_noise_alpha", "5"], "--tp_size 2 with --neftune_noise_alpha 5.0: "),
        (["--tp_size", "2", "--torch_compile", "true"], "--tp_size 2 with --torch_compile true: "),
        (["--tp_size", "2", "--adapter", "lora"], "--tp_size 2 with recipes/lora.py: "),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_loads(flags, says):
    with pytest.raises(UserError) as error:
        settings_of(*flags, recipe="lora" if "--adapter" in flags else "sft")
    assert str(error.value).startswith(says) and str(error.value).count(". ") == 0


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("qwen2.5-0.5b", 4, "--tp_size 4: must divide the model's num_attention_heads of 14; use a smaller size."),
        ("llama3.1-8b", 16, "--tp_size 16: must divide the model's num_key_value_heads of 8; use a smaller size."),
        ("qwen3-moe-30b", 2, "--tp_size 2: it is a mixture of experts, and DeepSpeed cannot split"),
        ("gpt2", 2, "--tp_size 2: transformers lacks a tensor parallel plan for it"),
        ("phi3-mini", 2, "--tp_size 2: its tensor parallel plan has rowwise_split_input layers, which DeepSpeed"),
    ],
)
def test_models_that_are_refused_by_their_config(name, size, says):
    model = str(ROOT / "tests" / "configs" / name)
    settings = settings_of("--model", model, "--data", "unread", "--tp_size", str(size), ranks=16)
    with pytest.raises(UserError) as error:
        resolve.resolve_for_model(settings)
    assert str(error.value).startswith(says)


def test_deepspeed_has_these_ways_to_split_a_layer():
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES, TPPlanConverter

    assert {"colwise_rep", *tensor_parallel.PLANS} == SUPPORTED_STYLES  # its former name of colwise_gather_output
    with pytest.raises(ValueError, match="unsupported partition style"):
        TPPlanConverter.convert({"layers.*.mlp.down_proj": "rowwise_split_input"})


@pytest.mark.bad_input
def test_dropout_is_refused():
    config = LlamaConfig(num_attention_heads=4, attention_dropout=0.1)
    with pytest.raises(UserError, match=r"--tp_size 2: its attention_dropout of 0\.1 would use other random numbers"):
        tensor_parallel.resolve_for_model(settings_of("--tp_size", "2"), config)


# --- plans ---


def test_closed_forms_of_split_matrices():
    """States over the ranks with other rows, the embedding whole, four all-reduces a layer."""
    shape = formulas.Shape(8_000_000_000, 0, 525_336_576, 4096, 32, 32, 8, 128, 14336, 128256, embedding=525_336_576)
    plain = formulas.PlanPoint(2, "none", 0, 1, 2048, 1, 8)
    split = replace(plain, groups=((tensor_parallel.PARALLEL, 2),))
    settings = settings_of("--model", str(ROOT / "tests/configs/llama3.1-8b"), "--data", "unread", "--bf16", "true")
    one, two = (formulas.memory(shape, setting, settings, False) for setting in (plain, split))
    held = (8_000_000_000 - 525_336_576) / 2 + 525_336_576
    assert two["parameters"] == pytest.approx(2 * held) and one["parameters"] == 2 * 8_000_000_000
    assert two["activations"] < one["activations"]
    (reduced,) = formulas.exchanges(shape, split)
    assert reduced.calls == 4 * 32 and reduced.sent == pytest.approx(4 * 32 * 2 * 2048 * 4096)  # 2 (n - 1) / n = 1
    assert formulas.exchanges(shape, replace(split, every=1))[0].calls == 6 * 32
