"""--initial_adapter: training goes on from its weights and its configuration; what does not fit is refused."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, TINY, recipe_process, two_layers
from safetensors.torch import load_file, save_file

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.export import export
from zerofit.model import adapters, attention
from zerofit.model.load import check_model, load_model, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An adapter of rank 4 on two modules with drawn values, saved by peft on the bundled model with two layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    attention.register()  # as a run does
    folder = tmp_path_factory.mktemp("adapter")
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(two_layers(), dtype=torch.float32), config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def settings_of(folder, *more, recipe="lora"):
    words = ["--model", str(two_layers()), "--data", str(TINY / "train.jsonl"), "--use_cpu", "true"]
    return resolve.resolve_settings(recipe, [*words, "--initial_adapter", str(folder), *more], 1)


def test_training_begins_with_its_weights_and_its_configuration(folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    settings = settings_of(folder)
    assert (settings.lora_r, settings.lora_alpha, settings.lora_target_modules) == (4, 12, ["down_proj", "q_proj"])
    tokenizer = load_tokenizer(settings)
    model = adapters.add_adapter(load_model(settings, tokenizer), settings, tokenizer)
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(two_layers(), dtype=torch.float32), folder)
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 8 and all("lora_" in name for name in trained)
    check_model(settings)


@pytest.mark.bad_input
def test_what_does_not_go_on_is_refused_before_a_model_is_loaded(folder, tmp_path):
    for words, said in (
        (["--lora_r", "8"], "--lora_r 8 with --initial_adapter"),
        (["--adapter", "ia3"], "only LoRA adapters can be continued"),
        (["--init_lora_weights", "pissa"], "--init_lora_weights with --initial_adapter"),
        (["--model", str(TINY / "preference" / "model")], "it was trained on"),
    ):
        with pytest.raises(UserError) as refused:
            settings_of(folder, *words)
        assert said in str(refused.value), words
    with pytest.raises(UserError, match=r"adapter_config.json is missing; pass the folder of an adapter"):
        settings_of(tmp_path)
    with pytest.raises(UserError, match=r"--initial_adapter .* without --adapter lora"):
        settings_of(folder, recipe="dpo")
    with pytest.raises(UserError, match="the reference is the model with this adapter, not the base model"):
        settings_of(folder, "--adapter", "lora", "--precompute_ref_log_probs", "false", recipe="dpo")
    copy = shutil.copytree(folder, tmp_path / "cut")
    weights = load_file(copy / "adapter_model.safetensors")
    save_file({name: weights[name] for name in list(weights)[1:]}, copy / "adapter_model.safetensors")
    with pytest.raises(UserError, match="1 of its weights do not fit the model"):
        check_model(settings_of(copy))
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/other"}))
    assert any("trained on org/other; --model" in sentence for sentence in settings_of(copy).decisions)


# What is wrong with an adapter's files -> (change of adapter_config.json, bytes cut from the weights, what is said).
ODD_FILES = {
    "cut": ({}, 100, "adapter_model.safetensors is damaged .incomplete"),
    "another start": ({"init_lora_weights": "loftq"}, 0, "init_lora_weights loftq in adapter_config.json is not"),
    "an expression without an end": ({"target_modules": "(.*)*x"}, 0, "cannot be matched with the model's names"),
    "a wrong type": ({"rank_pattern": 3}, 0, "--initial_adapter"),
    "text for a number": ({"r": "four"}, 0, "--initial_adapter|--lora_r"),
    "no modules": ({"target_modules": None}, 0, "--initial_adapter|--lora_target_modules"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("what", ODD_FILES)
def test_an_adapter_with_odd_files_is_one_sentence(folder, tmp_path, what):
    """Tracebacks, and an expression that peft compares without an end."""
    change, cut, said = ODD_FILES[what]
    copy = shutil.copytree(folder, tmp_path / "odd")
    weights = copy / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size - cut])
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=said):
        check_model(settings_of(copy))


@pytest.mark.bad_input
def test_an_adapter_with_nan_is_refused_as_such(folder, tmp_path):
    """As one to go on with, and by the export, which blamed its own sums."""
    copy = shutil.copytree(folder, tmp_path / "nan")
    weights = load_file(copy / "adapter_model.safetensors")
    name = next(name for name in weights if "lora_B" in name)
    weights[name][0, 0] = float("nan")
    save_file(weights, copy / "adapter_model.safetensors")
    said = rf"{name} of adapter_model.safetensors holds NaN or Inf \(1 numbers\)"
    with pytest.raises(UserError, match=said):
        check_model(settings_of(copy))
    with pytest.raises(UserError, match=said):
        export.main([str(copy), "--output_dir", str(tmp_path / "out")])


@pytest.mark.bad_input
@pytest.mark.parametrize("merge", [[], ["--merge"]])
def test_an_adapter_that_needs_a_missing_package_names_it_to_the_export(folder, tmp_path, merge, monkeypatch):
    import peft.tuners.lora.config

    copy = shutil.copytree(folder, tmp_path / "loftq")
    config = json.loads((copy / "adapter_config.json").read_text())
    config |= {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}
    (copy / "adapter_config.json").write_text(json.dumps(config))
    monkeypatch.setattr(peft.tuners.lora.config.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"loftq: peft needs scipy to read it: pip install scipy\."):
        export.main([str(copy), *merge, "--output_dir", str(tmp_path / "out")])


def test_adapters_before_the_last_are_merged_by_the_commands_of_the_refusal(folder, tmp_path, monkeypatch):
    """The logits that the first step starts from are those of the base with both adapters, added by peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    second = shutil.copytree(folder, tmp_path / "second")
    weights = {name: 0.5 * tensor for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    save_file(weights, second / "adapter_model.safetensors")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="only one adapter can be continued") as refused:
        settings_of(f"{folder},{second}")
    _, command = str(refused.value).splitlines()
    export.main([*command.split()[2:], "--dtype", "float32"])
    settings = settings_of(second, "--model", "merged-1")
    tokenizer = load_tokenizer(settings)
    model = adapters.add_adapter(load_model(settings, tokenizer), settings, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(two_layers(), dtype=torch.float32)
    for each in (folder, second):
        plain = PeftModel.from_pretrained(plain, each).merge_and_unload()
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["0", "3"])
def test_dpo_goes_on_from_it_with_it_as_the_reference(folder, tmp_path, zero):
    """ln 2 at first, where model and reference are the same: not with the base as the reference."""
    pairs = ROOT / "examples" / "tiny" / "preference" / "train.jsonl"
    words = ["--model", str(two_layers()), "--data", str(pairs), "--adapter", "lora", "--initial_adapter", str(folder)]
    words += ["--max_steps", "2", "--logging_steps", "1", "--num_samples", "0", "--save_strategy", "no", "--zero", zero]
    done = recipe_process("dpo", *words, "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    first, _ = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[:2])
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
    before, after = (load_file(f / "adapter_model.safetensors") for f in (folder, tmp_path / "run" / "final"))
    moved = [(after[name] - before[name]).abs().max().item() for name in before]
    assert before.keys() == after.keys() and 0 < max(moved) < 1e-3
