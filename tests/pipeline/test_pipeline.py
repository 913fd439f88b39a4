"""--pp_size: stages of the model train, save and resume what one process does."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, Run, python, run_python, run_world, runs_beside_one_rank, slow_but
from safetensors.torch import load_file

from zerofit.base.errors import UserError
from zerofit.checkpoint import resumable
from zerofit.config import resolve
from zerofit.launch import prepare
from zerofit.parallel import pipeline
from zerofit.plan import candidates, formulas, preflight

COMMON = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "18", "--max_steps", "3", "--effective_batch_size", "8",
    "--logging_steps", "1", "--eval_fraction", "0.25", "--num_samples", "0", "--learning_rate", "1e-4",
    "--weight_decay", "0.1", "--save_strategy", "no",
]  # fmt: skip
# {kind of model: further flags}
MODELS = {
    "tied": [],
    "untied": ["--fused_loss", "true"],
    "packed": ["--packing", "true", "--max_length", "64"],
    "bf16": ["--bf16", "true", "--zero", "1"],
    "pure": ["--pure_bf16", "true", "--zero", "1"],
    "qwen2": ["--gradient_checkpointing_policy", "selective"],
    "qwen3": ["--gradient_checkpointing_every", "2", "--padding_free", "true"],
    "tiled": ["--tiled_mlp", "2"],
    "streamed": ["--streaming", "true", "--eval_fraction", "0", "--eval_data", str(TINY / "eval.jsonl")],
    "best": ["--learning_rate", "1e-2", "--load_best_model_at_end", "true", "--save_strategy", "steps", "--save_steps",
             "1", "--eval_strategy", "steps", "--eval_steps", "1", "--save_total_limit", "3"],
    "mistral": ["--gradient_checkpointing", "false", "--optim", "lion_32bit"],
}  # fmt: skip


def save_model(kind: str, folder) -> str:
    """Write a tiny model and return its folder; others than untied, pure and model types: the bundled Llama."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind in ("tied", "packed", "bf16", "tiled", "streamed", "best"):
        return str(TINY / "model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(TINY / "model", tie_word_embeddings=False, dtype="float32")
    if kind not in ("untied", "pure"):
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                 "pad_token_id", "eos_token_id", "num_hidden_layers")  # fmt: skip
        more = {"vocab_size": 520, "tie_word_embeddings": False}  # some of their tokenizers add tokens
        more |= {"sliding_window": 8} if kind == "mistral" else {}
        config = AutoConfig.for_model(kind, **{name: getattr(config, name) for name in names}, **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / "model" / file, folder / file)
    return str(folder)


def one(model: str, *more: str) -> tuple[str, list[str]]:
    return "sft", [*COMMON, "--model", model, "--per_device_train_batch_size", "4", *more]


def stages(model: str, pp_size: int, micro: int, *more: str) -> tuple[str, list[str]]:
    return "pipeline", [*COMMON, "--model", model, "--pp_size", str(pp_size), "--per_device_train_batch_size",
                        str(micro), *more]  # fmt: skip


# {ranks: {name: (model, pp_size, micro batch, further flags)}}
CASES = {
    2: {"tied-pp2": ("tied", 2, 2), "untied-pp2": ("untied", 2, 1), "packed-pp2": ("packed", 2, 1),
        "bf16-pp2": ("bf16", 2, 2), "qwen2-pp2": ("qwen2", 2, 4), "qwen3-pp2": ("qwen3", 2, 2),
        "mistral-pp2": ("mistral", 2, 2), "tiled-pp2": ("tiled", 2, 2), "streamed-pp2": ("streamed", 2, 2),
        "best-pp2": ("best", 2, 2), "pure-pp2": ("pure", 2, 2),
        "tied-pp2-compiled": ("tied", 2, 2, "--torch_compile", "true", "--torch_compile_backend", "aot_eager")},
    4: {"tied-pp2-dp2": ("tied", 2, 1), "untied-pp2-dp2": ("untied", 2, 2), "bf16-pp2-dp2": ("bf16", 2, 2),
        "qwen3-pp4": ("qwen3", 4, 2)},
}  # fmt: skip

# {kind of model: largest difference of losses and norms, relative, and of saved weights}
BOUNDS = {"bf16": (1e-2, 3e-4), "pure": (1e-2, 2**-7)}  # pure: the norms' weights, about 1, are rounded at random

SHORT = ("tied-pp2", "untied-pp2")  # what `make test` runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    return runs_beside_one_rank(
        request, tmp_path_factory.mktemp("runs"), CASES, SHORT, save_model,
        alone=lambda model, kind: one(model, *MODELS[kind]),
        split=lambda model, kind, *rest: stages(model, *rest, *MODELS[kind]),
    )  # fmt: skip


def weights(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", slow_but([name for cases in CASES.values() for name in cases], SHORT))
def test_losses_norms_evaluation_and_saved_weights_are_those_of_one_process(runs, name):
    run, reference = runs[name], runs[name.split("-")[0]]
    assert len(run.losses) == len(reference.losses) == 3
    bound, largest = BOUNDS.get(name.split("-")[0], (1e-5, 1e-6))
    for found, expected in ((run.losses, reference.losses), (run.grad_norms, reference.grad_norms)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=bound, atol=0)
    result, expected = run.json("result.json"), reference.json("result.json")
    assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=bound)
    assert (result["parameters"], result["tokens"]) == (expected["parameters"], expected["tokens"])
    if name == "best-pp2":
        evaluated = [line["eval_loss"] for line in run.metrics if "eval_loss" in line]
        assert min(evaluated) < evaluated[2]  # the weights below are not those of the last step
    saved, whole = weights(run.folder / "final"), weights(reference.folder / "final")
    twin = {"lm_head.weight"} if "bf16" in name else set()  # DeepSpeed's 16-bit state dict has the tied head too
    assert saved.keys() == whole.keys() - twin
    for tensor, value in saved.items():
        assert (value - whole[tensor]).abs().max() <= largest, tensor


LOSS_SCALE = {"enabled": True, "loss_scale": 0, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 2}
SECTIONS = {
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 2}},
}
# {name: (flags, what a DeepSpeed JSON has beside them)}; ranks may do what otherwise only GPUs do
ON_A_GPU = {
    "fp16": (["--fp16", "true", "--max_steps", "8"], {"fp16": LOSS_SCALE}),
    "sections": ([], SECTIONS),
    "offload": (["--activation_offload", "true"], None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_GPU)
def test_what_only_gpus_do_is_that_of_one_process(tmp_path, name):
    """With fp16 the same steps overflow, whichever stage has the infinite gradient, and both scale alike."""
    flags, sections = ON_A_GPU[name]
    if sections:
        file = tmp_path / "zero1.json"
        file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"} | sections))
        flags = [*flags, "--deepspeed", str(file)]
    model = str(TINY / "model")
    runs = run_world(1, {"one": one(model, *flags)}, tmp_path, ZEROFIT_TEST_AS_ON_A_GPU="1")
    runs |= run_world(2, {"two": stages(model, 2, 2, *flags)}, tmp_path, ZEROFIT_TEST_AS_ON_A_GPU="1")
    found, expected = runs["two"], runs["one"]
    bound = 1e-3 if name == "fp16" else 1e-5
    assert found.losses == pytest.approx(expected.losses, rel=bound)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=bound)
    skipped = [[line.get("skipped_steps") for line in run.metrics if "loss" in line] for run in (found, expected)]
    assert skipped[0] == skipped[1] and bool(skipped[0][-1]) == (name == "fp16")
    assert bool(found.json("result.json")["offloaded"]) == ("--activation_offload" in flags)
    saved, whole = (weights(run.folder / "final") for run in (found, expected))
    rounding = 2**-12 if name == "fp16" else bound / 10  # of a saved weight of up to 0.5
    assert max((value - whole[tensor]).abs().max() for tensor, value in saved.items()) <= rounding


def test_each_stage_saves_and_holds_its_own_layers_only(runs):
    final = runs["untied-pp2"].folder / "final"
    files = sorted(file.name for file in final.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    first, last = (set(load_file(final / file)) for file in files)
    assert "model.embed_tokens.weight" in first and {"lm_head.weight", "model.norm.weight"} <= last
    assert not first & last
    index = json.loads((final / "model.safetensors.index.json").read_text())["weight_map"]
    assert {file for name, file in index.items() if name in first} == {files[0]}
    record = runs["untied-pp2"].json("run.json")
    assert any(line.startswith("pipeline stages: 2 + 2 layers") for line in record["decisions"])
    assert any("each stage is idle for (P - 1) / (M + P - 1) = 11% of the step" in line for line in record["decisions"])


def test_the_folder_loads_in_transformers_and_answers_as_one_process_trained(runs):
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[5, 6, 7, 8]])
    one, two = (
        AutoModelForCausalLM.from_pretrained(runs[name].folder / "final")(ids).logits for name in ("tied", "tied-pp2")
    )
    assert (one - two).abs().max() <= 1e-5


# --- checkpoints ---


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), (4, 1)])
def test_it_goes_on_to_the_same_bits(tmp_path, ranks, micro):
    steps = ["--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "3"]
    whole = stages(str(TINY / "model"), 2, micro, *steps)
    run_world(ranks, {"whole": whole}, tmp_path)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed = whole[0], [*whole[1], "--resume_from_checkpoint", str(tmp_path / "resumed" / "checkpoint-2")]
    run = run_world(ranks, {"again": resumed}, tmp_path)["again"]
    first, again = (weights(tmp_path / name / "final") for name in ("whole", "again"))
    assert run.json("result.json")["steps"] == 3 and all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("saved", "ranks", "flags", "says"),
    [
        (
            2,
            4,
            ["--pp_size", "4"],
            "--pp_size can only be resumed with the saved layout; use --pp_size 2 --zero 1 --gpus 4",
        ),
        (
            2,
            2,
            ["--pp_size", "2"],
            "--pp_size can only be resumed with the saved layout; use --pp_size 2 --zero 1 --gpus 4",
        ),
    ],
)
def test_a_checkpoint_of_other_stages_is_refused(saved, ranks, flags, says):
    settings = settings_of(*flags, ranks=ranks)
    known = {"zero": "1", "world_size": 4, "offload": "none", "optim": settings.optim, "pp_size": saved}
    settings = settings.replace(resharded=ranks != 4)
    with pytest.raises(UserError, match=says):
        resumable.check_split(settings, known, "--resume_from_checkpoint x")


# --- the launch's ways ---


@pytest.mark.slow
@pytest.mark.parametrize("launcher", prepare.LAUNCHERS)
def test_make_pipeline_trains_the_bundled_task(launcher, tmp_path):
    short = "--num_train_epochs 3 --save_strategy epoch"
    words = ["make", "pipeline", "PP=2", f"OUT={tmp_path / 'run'}", "ENV=active", f"PYTHON={python()}",
             f"LAUNCHER={launcher}", f"ARGS={short}"]  # fmt: skip
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = Run(tmp_path / "run").json("result.json")
    assert (result["world_size"], result["zero"], result["status"]) == (2, "1", "finished")
    assert result["exact_match_before"] < 0.05 < result["exact_match_after"]
    if launcher == "torchrun":
        exported = run_python(["-m", "zerofit", "export", str(tmp_path / "run"), "--output_dir", str(tmp_path / "out")])
        assert exported.returncode == 0, exported.stderr
        assert weights(tmp_path / "out").keys() == weights(tmp_path / "run" / "final").keys()


# --- arguments ---


def settings_of(*flags: str, recipe: str = "pipeline", ranks: int = 4):
    return resolve.resolve_settings(recipe, list(flags), ranks)


def test_the_batch_counts_pipelines_and_the_micro_batch_fills_them():
    settings = settings_of("--pp_size", "2", "--effective_batch_size", "32", "--data", "unread", "--model", "x")
    assert (settings.zero, settings.data_ranks, settings.per_device_train_batch_size) == (1, 2, 2)
    assert any("8 x 2 data ranks (4 ranks / pp_size 2)" in line for line in settings.decisions)
    assert any("each stage is idle for (P - 1) / (M + P - 1) = 11% of the step" in line for line in settings.decisions)
    assert [settings.data_rank(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert settings_of(ranks=3).pp_size == 3 and settings_of(recipe="sft").pp_size == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--pp_size", "3"], "--pp_size 3: must divide the 4 ranks of this job."),
        (["--pp_size", "0"], "--pp_size is 0: it must be 1 or more."),
        (["--pp_size", "1"], "recipes/pipeline.py with --pp_size 1 on 4 ranks: a pipeline has at least 2 stages"),
        (["--zero", "0"], "--pp_size 4 with ZeRO stage 0: "),
        (["--zero", "2"], "--pp_size 4 with ZeRO stage 2: "),
        (["--zero", "3"], "--pp_size 4 with ZeRO stage 3: "),
        (["--offload", "optimizer"], "--pp_size 4 with ZeRO stage 2: "),
        (["--offload", "optimizer", "--zero", "1"], "--pp_size 4 with --offload optimizer: "),
        (["--pp_size", "2", "--sp_size", "2"], "--pp_size 2 with --sp_size 2: "),
        (["--tp_size", "4"], "--pp_size 4 with --tp_size 4: "),
        (["--gradient_accumulation_steps", "2"], "--pp_size 4 with --gradient_accumulation_steps 2: "),
        (["--optim", "muon"], "--pp_size 4 with --optim muon: "),
        (["--node_local_storage", "true"], "--pp_size 4 with --node_local_storage true: "),
        (["--num_samples", "2"], "--pp_size 4 with --num_samples 2: "),
        (["--canary", "true"], "--pp_size 4 with --canary true: "),
        (["--per_device_train_batch_size", "auto"], "--pp_size 4 with --search_batch_size true: "),
        (["--attn_implementation", "eager"], "--pp_size 4 with --attn_implementation eager: "),
        (["--num_samples", "1"], "--pp_size 4 with --num_samples 1: "),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_loads(flags, says):
    with pytest.raises(UserError) as error:
        settings_of(*flags)
    assert str(error.value).startswith(says) and str(error.value).count(". ") == 0


@pytest.mark.bad_input
def test_every_stage_and_offload_but_one_is_refused_in_a_sentence():
    for zero, offload in itertools.product("0123", ("none", "optimizer", "all")):
        flags = ["--zero", zero, "--offload", offload]
        if (zero, offload) == ("1", "none"):
            assert settings_of(*flags).deepspeed["zero_optimization"]["stage"] == 1
            continue
        with pytest.raises(UserError) as error:
            settings_of(*flags)
        assert str(error.value).count(". ") == 0


@pytest.mark.bad_input
@pytest.mark.parametrize("recipe", ["sft", "lora", "dpo"])
def test_other_recipes_have_no_stages(recipe):
    with pytest.raises(UserError, match=f"--pp_size 2 with recipes/{recipe}.py: only recipes/pipeline.py"):
        settings_of("--pp_size", "2", recipe=recipe)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("qwen3-moe-30b", 2, "--pp_size 2: models of type qwen3_moe are unsupported"),
        ("gpt2", 2, "--pp_size 2: models of type gpt2 are unsupported"),
        ("llama3.2-1b", 32, "--pp_size 32: the model has only 16 layers; use a smaller size."),
        ("llama3.2-1b", 2, "--pp_size 2 with --pure_bf16 true: head and embedding are tied, and their copies"),
    ],
)
def test_models_that_are_refused_by_their_config(name, size, says):
    model = str(ROOT / "tests" / "configs" / name)
    flags = ["--model", model, "--data", "unread", "--pp_size", str(size), "--effective_batch_size", "64"]
    flags += ["--pure_bf16", "true"] if "pure_bf16" in says else []
    settings = settings_of(*flags, ranks=size)
    with pytest.raises(UserError) as error:
        resolve.resolve_for_model(settings)
    assert str(error.value).startswith(says)


# --- plans ---


@pytest.mark.bad_input
def test_plans_do_not_search_pipelines():
    with pytest.raises(UserError, match="zerofit pipeline --plan true"):
        candidates.methods_to_try("", "pipeline", [])


def test_closed_forms_of_stages():
    """Weights cut evenly, a tied matrix twice, activations of the micro batches in flight, logits on the last stage."""
    shape = formulas.Shape(8_000_000_000, 0, 525_336_576, 4096, 32, 32, 8, 128, 14336, 128256, embedding=525_336_576)
    setting = formulas.PlanPoint(1, "none", 1, 1, 4096, 16, 8, groups=((pipeline.PARALLEL, 4),))
    settings = settings_of("--model", str(ROOT / "tests/configs/llama3.1-8b"), "--data", "unread", "--bf16", "true")
    by_stage = formulas.stages(shape, setting, settings, False, False)
    assert [parts["parameters"] for parts in by_stage] == [2 * 2e9] * 4
    assert [parts["optimizer"] for parts in by_stage] == [12 * 2e9 / 2] * 4  # over two data ranks
    held = [formulas.activations(shape, replace(setting, in_flight=n), False)[1]["activations"] for n in (1, 2)]
    assert held[1] - held[0] == 4096 * 32 * 2 * 4096  # the inputs of 32 layers
    assert [bool(formulas.activations(shape, replace(setting, head=h), True)[0]["logits"]) for h in (True, False)] == [
        True, False
    ]  # fmt: skip
    tied = formulas.stages(shape, setting, settings, False, True)
    assert tied[1]["parameters"] == 2 * ((8_000_000_000 + 525_336_576) // 4)


def test_a_pipeline_is_priced_by_formula(capsys):
    flags = ["--model", str(ROOT / "tests/configs/llama3.1-8b"), "--data", "unread", "--bf16", "true", "--plan", "true"]
    with pytest.raises(SystemExit):
        preflight.only_print(settings_of(*flags, "--gpu_type", "h100-80g"))
    printed = capsys.readouterr().out
    assert printed.startswith("plan: fits by formula (pipelines are not simulated)") and "of stage 0" in printed
    assert preflight.check(settings_of()) is None and not capsys.readouterr().out  # a CPU
