"""--use_liger_kernel: the decision, the self-test before training, and the kernels against transformers' modules."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers.integrations.liger as of_transformers
from gpu_machine import Card, in_process
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from zerofit import recipe
from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.model import self_test, tiled_mlp
from zerofit.model.kernels import liger
from zerofit.plan import candidates
from zerofit.train import network_check

GPU = hardware.GPUS["h100-80g"]
CONFIG = AutoConfig.for_model(
    "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=512
)


def resolved(*flags, recipe="sft", config=CONFIG, gpu=GPU, ranks=1):
    settings = resolve.resolve_settings(recipe, list(flags), ranks, gpu)
    resolve.resolve_for_model(settings, config)
    return settings


def said(settings) -> list[str]:
    return [line for line in settings.decisions if "iger" in line]


def test_liger_is_on_where_a_gpu_and_the_model_have_it():
    settings = resolved()
    assert settings.use_liger_kernel is True and settings.source["use_liger_kernel"] == "decided"
    assert settings.liger_kernel_config == liger.NO_LOSS  # the loss stays the kit's, fused or dense
    assert "use_liger_kernel True: norms, rotary embeddings and MLPs of llama (off: --use_liger_kernel false)" in said(
        settings
    )
    for flags in ((), ("--use_liger_kernel", "true", "--fused_loss", "false")):
        assert resolved("--sp_size", "2", *flags, ranks=2).liger_kernel_config == liger.NO_LOSS  # its loss shifts rows
    off = resolved("--use_liger_kernel", "false")
    assert off.use_liger_kernel is False and not said(off)


@pytest.mark.parametrize(
    ("flags", "more", "why"),
    [
        ((), {"gpu": hardware.GPUS["t4-16g"]}, "Triton has no kernels"),
        ((), {"config": AutoConfig.for_model("gpt_neox", vocab_size=512)}, "not tested with gpt_neox"),
        (("--torch_compile", "true"), {}, "--torch_compile fuses"),
        (("--tp_size", "2", "--zero", "2"), {"ranks": 2}, "--tp_size: DeepSpeed replaces the layers that it patches"),
        (("--pp_size", "2"), {"recipe": "pipeline", "ranks": 2}, "--pp_size: transformers applies its kernels to"),
        (("--full_determinism", "true"), {}, "--full_determinism"),
        (("--adapter", "ln_tuning"), {"recipe": "lora"}, "--adapter ln_tuning: Liger's norms would use the frozen"),
    ],
)
def test_liger_stays_off(flags, more, why):
    settings = resolved(*flags, **more)
    assert settings.use_liger_kernel is False
    (line,) = said(settings)
    assert line.startswith(f"use_liger_kernel False: {why}")


def test_a_cpu_run_says_nothing_of_liger():
    settings = resolved("--use_cpu", "true", gpu=None)
    assert settings.use_liger_kernel is False and not said(settings)


def test_a_gpu_of_this_machine_decides(tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path, [Card("Tesla T4", 15360, capability=(7, 5))])
    assert "use_liger_kernel False: Triton has no kernels for GPUs before Ampere" in said(resolved(gpu=None))


def test_what_of_liger_is_used_on_request():
    large = AutoConfig.for_model("llama", vocab_size=128_256)
    ours = resolved("--use_liger_kernel", "true", config=large)
    assert ours.fused_loss is True and ours.liger_kernel_config == liger.NO_LOSS
    theirs = resolved("--use_liger_kernel", "true", "--fused_loss", "false", config=large)
    assert theirs.liger_kernel_config is None
    selective = ("--gradient_checkpointing_policy", "selective")
    assert resolved(*selective).liger_kernel_config == liger.NO_LOSS | {"rope": False}
    theirs = resolved("--use_liger_kernel", "true", "--fused_loss", "false", *selective, config=large)
    assert theirs.liger_kernel_config == {"rope": False}
    assert any(line.startswith("Liger's rotary kernel is off") for line in theirs.decisions)
    tiled = resolved("--tiled_mlp", "2")
    assert tiled.liger_kernel_config == liger.NO_LOSS | liger.NO_MLP
    assert any(line.startswith("Liger's MLP is off") for line in tiled.decisions)


def test_tiles_stay_beside_the_kernels_of_liger(monkeypatch):
    """Liger binds its forward to each MLP, which would undo the tiles: they are computed, and the norms are Liger's."""
    for name, value in list(vars(modeling_llama).items()):  # Liger replaces functions and classes of the module too
        monkeypatch.setitem(vars(modeling_llama), name, value)
    config = AutoConfig.for_model("llama", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    (mlp,) = tiled_mlp.find(model)
    tiled_mlp.tile(mlp, 2)
    tiles, norm = mlp.forward, model.model.norm.forward
    of_transformers.apply_liger_kernel(model, resolved("--tiled_mlp", "2", config=config).liger_kernel_config)
    assert mlp.forward is tiles and model.model.norm.forward != norm


@pytest.mark.bad_input
def test_a_request_that_cannot_be_met(monkeypatch):
    with pytest.raises(UserError, match="need a GPU"):
        resolve.resolve_settings("sft", ["--use_liger_kernel", "true", "--use_cpu", "true"], 1)
    with pytest.raises(UserError, match="--use_liger_kernel with --adapter ln_tuning"):
        resolve.resolve_settings("lora", ["--use_liger_kernel", "true", "--adapter", "ln_tuning"], 1, GPU)
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"liger-kernel is not installed .*: make install"):
        resolve.resolve_settings("sft", ["--use_liger_kernel", "true"], 1, GPU)


# --- the self-test, with other changes to a model in place of Liger's, which needs a GPU ---


def no_change(model, kernels):
    assert kernels["cross_entropy"] is kernels["fused_linear_cross_entropy"] is False


def wrong_norm(model, kernels):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 0.1


def no_compiler(model, kernels):
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")


def after_self_test(monkeypatch, change, *flags):
    """The settings of a GPU run after its self-test, which runs on the CPU here."""
    monkeypatch.setattr(of_transformers, "apply_liger_kernel", change)
    settings = resolved(*flags).replace(use_cpu=True)
    liger.self_test_kernels(settings, CONFIG)
    return settings


def test_right_numbers_keep_liger_on(monkeypatch):
    state = torch.get_rng_state()
    settings = after_self_test(monkeypatch, no_change)
    assert settings.use_liger_kernel is True and settings.liger_kernel_config == liger.NO_LOSS
    assert torch.equal(torch.get_rng_state(), state)


def test_a_self_test_is_remembered_by_gpu_versions_and_sizes(tmp_path, monkeypatch):
    """Plans have the kernels from the next start on, until a self-test fails."""
    in_process(monkeypatch, tmp_path, [Card()], ZEROFIT_CACHE=str(tmp_path / "cache"))
    monkeypatch.setattr(liger, "_problem", lambda *args: None)
    monkeypatch.setattr(liger.self_test, "run", lambda find, *words: find())
    monkeypatch.setattr("zerofit.model.load.load_config", lambda settings: CONFIG)
    name = torch.cuda.get_device_name()
    settings = resolved(gpu=None)
    assert not liger.will_run(settings, name)
    liger.self_test_kernels(settings, CONFIG)
    assert liger.will_run(settings, name) and settings.use_liger_kernel is True
    assert not liger.will_run(settings, "NVIDIA A100-SXM4-80GB")
    assert not liger.will_run(resolved("--use_liger_kernel", "false", gpu=None), name)
    assert liger.will_run(resolved("--gradient_checkpointing_policy", "selective", gpu=None), name)
    wider = copy.deepcopy(CONFIG)
    wider.hidden_size = 64
    assert liger._result_files(settings, wider, name) != liger._result_files(settings, CONFIG, name)
    assert candidates.shape_of(settings, hardware.find("detect")).liger
    with monkeypatch.context() as patch:
        patch.setattr(liger.metadata, "version", lambda package: "0.0.1")
        assert not liger.will_run(settings, name)
    monkeypatch.setattr(liger, "_problem", lambda *args: "its outputs are off")
    liger.self_test_kernels(settings, CONFIG)
    assert not settings.use_liger_kernel and not liger.will_run(resolved(gpu=None), name)


def test_a_self_test_of_some_kernels_is_none_of_others(tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path, [Card()], ZEROFIT_CACHE=str(tmp_path / "cache"))
    monkeypatch.setattr("zerofit.model.load.load_config", lambda settings: CONFIG)
    name, selective = torch.cuda.get_device_name(), ("--gradient_checkpointing_policy", "selective")
    without_rope, every = resolved(*selective, gpu=None), resolved(gpu=None)
    liger.self_test.store_result(liger._result_files(without_rope, CONFIG, name), True)
    assert liger.will_run(without_rope, name)
    assert not liger.will_run(every, name) and not liger.will_run(resolved("--tiled_mlp", "2", gpu=None), name)
    liger.self_test.store_result(liger._result_files(every, CONFIG, name), True)
    liger.self_test.store_result(liger._result_files(without_rope, CONFIG, name), False)
    assert not liger.will_run(without_rope, name) and not liger.will_run(every, name)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (wrong_norm, r"use_liger_kernel False: its \w[\w ]+ differ .* by \d+\.\d% \(bound 5\.0%\)"),
        (no_compiler, r"use_liger_kernel False: it raised an error \(Failed to find C compiler"),
    ],
)
def test_a_failed_self_test_turns_liger_off_with_one_line(change, why, monkeypatch):
    settings = after_self_test(monkeypatch, change)
    assert settings.use_liger_kernel is False
    (line,) = said(settings)
    assert re.match(why, line) and "\n" not in line
    with pytest.raises(UserError, match=r"--use_liger_kernel: .*; leave it out\."):
        after_self_test(monkeypatch, change, "--use_liger_kernel", "true")


def test_ranks_are_compared_before_they_prove_liger_together(monkeypatch):
    """Where a node lacks it, its ranks would answer the self-test with the next collective's values."""

    def differ(*_):
        raise UserError("argument --use_liger_kernel is not the same on all nodes")

    monkeypatch.setattr(network_check, "check", differ)
    monkeypatch.setattr(liger, "self_test_kernels", lambda *_: pytest.fail("the self-test came first"))
    with pytest.raises(UserError, match="--use_liger_kernel is not the same"):
        recipe.start_processes(resolve.resolve_settings("sft", ["--use_cpu", "true", "--zero", "0"], 1), None, None)


def test_a_failure_of_another_rank_turns_liger_off_here_too(monkeypatch):
    monkeypatch.setattr(self_test.distributed, "all_gather", lambda value: [value, "it raised an error (x)"])
    assert after_self_test(monkeypatch, no_change).use_liger_kernel is False


def test_the_self_test_leaves_transformers_classes_as_they_were(monkeypatch):
    from transformers.models.llama import modeling_llama

    def replace_class(model, kernels):
        modeling_llama.LlamaMLP = SimpleNamespace

    before = modeling_llama.LlamaMLP
    after_self_test(monkeypatch, replace_class)
    assert modeling_llama.LlamaMLP is before


# --- the kernels themselves ---


@pytest.fixture(scope="module")
def interpreted():
    """What liger_interpreter.py prints for every model in TESTED."""
    program = Path(__file__).with_name("liger_interpreter.py")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(program), *sorted(liger.TESTED)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("answer ")[2])


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("model_type", sorted(liger.TESTED))
def test_the_kernels_compute_what_transformers_modules_do(model_type, interpreted):
    errors = interpreted[model_type]
    assert max(errors["fp32"].values()) < 2e-5
    assert max(errors["fp16"].values()) < liger.BOUNDS[torch.float16] / 2


@pytest.mark.slow
def test_the_rotary_kernel_overwrites_what_selective_checkpointing_keeps(interpreted):
    """When it no longer does, liger.resolve_for_model need not turn it off."""
    errors = interpreted["selective"]
    assert errors["rope"] > 0.05 and errors["no rope"] < 1e-5


@pytest.mark.slow
@pytest.mark.oracle
def test_ranks_that_split_rows_compute_what_one_does_without_liger():
    program = Path(__file__).with_name("liger_interpreter.py")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launcher, str(program), "split"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.partition("answer ")[2].splitlines()[0])["split"] < 1e-5


def test_ligers_norms_would_use_the_frozen_weights_of_ln_tuning():
    """When they no longer do, liger.resolve need not refuse the adapter."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from peft import LNTuningConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    model = get_peft_model(model, LNTuningConfig(task_type="CAUSAL_LM"))
    with liger._layer(CONFIG, torch.float32, torch.device("cpu")):  # brings the module's classes back
        of_transformers.apply_liger_kernel(model, liger.NO_LOSS)
    norm = model.get_base_model().model.norm
    assert norm.forward.__func__ is LigerRMSNorm.forward and not norm.weight.requires_grad
    assert any(parameter.requires_grad for parameter in norm.parameters())


def test_liger_knows_every_tested_model():
    known = Path(liger.importlib.util.find_spec("liger_kernel").origin).parent / "transformers" / "monkey_patch.py"
    text = known.read_text().partition("MODEL_TYPE_TO_APPLY_LIGER_FN = {")[2].partition("}")[0]
    assert all(f'"{model_type}": ' in text for model_type in liger.TESTED)
