"""Loading the tokenizer, the configuration and the weights of a model."""

import json
import math
import re
import shlex
import shutil

import pytest
import torch
from conftest import ROOT, TINY, run_python, runs_slow
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig

from zerofit.base.errors import UserError
from zerofit.config import parse, resolve
from zerofit.model import load
from zerofit.model.load import check_model, check_weights, load_config, load_model, load_tokenizer
from zerofit.model.weights import files


@pytest.mark.bad_input
def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    """transformers makes one of the model's class instead, which knows no word."""
    shutil.copy(TINY / "model" / "config.json", tmp_path)
    settings = parse.settings_of(parse.request("sft", ["--model", str(tmp_path), "--data", "rows.jsonl"]), 1)
    with pytest.raises(UserError, match="tokenizer not found in the folder; copy"):
        load_tokenizer(settings)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "model" / name, tmp_path)
    assert load_tokenizer(settings).eos_token_id is not None


@pytest.mark.bad_input
@pytest.mark.parametrize("recipe, why", [("lora", "an adapter could not"), ("sft", "they cannot be trained")])
@pytest.mark.parametrize("method", ["bitsandbytes", "fp8"])
def test_weights_that_are_quantized_already_are_refused(tmp_path, method, recipe, why):
    """Else full tuning ends in a traceback after loading, and an adapter of them is refused at its export."""
    config = json.loads((TINY / "model" / "config.json").read_text())
    quantized = config | {"quantization_config": {"quant_method": method, "load_in_4bit": method == "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    settings = parse.settings_of(parse.request(recipe, ["--model", str(tmp_path), "--data", "rows.jsonl"]), 1)
    with pytest.raises(UserError, match=rf"already quantized \({method}\), and {why}.* use the orig"):
        load_config(settings)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(settings).model_type == config["model_type"]


# --- weights ---


def changed(folder, change, **config):
    """Copy the bundled model, with `change` applied to its {name: tensor} and `config` put into its config.json."""
    shutil.copytree(TINY / "model", folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    if config:
        own = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(own | config))
    return folder


REMOVED = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("down", "gate", "up")]


def without_three(weights):
    return {name: weight for name, weight in weights.items() if name not in REMOVED}


def renamed(weights):
    return {name.replace("model.layers", "model.language_model.layers"): w for name, w in weights.items()}


def with_nan(weights):
    weights["model.layers.2.self_attn.k_proj.weight"][-1, -1] = math.nan  # in the last rank's part
    return weights


def with_another(weights):
    return weights | {"model.vision.patch.weight": torch.zeros(3)}


def settings_of(folder, recipe="sft", *flags):
    return parse.settings_of(parse.request(recipe, ["--model", str(folder), "--data", "rows.jsonl", *flags]), 1)


def refusal(folder, *flags) -> str:
    """Return the sentence with which the launcher and each rank refuse the folder, before the data are read."""
    with pytest.raises(UserError) as refused:
        check_weights(settings_of(folder, "sft", *flags))
    return str(refused.value)


@pytest.mark.injection
def test_weights_that_are_missing_are_named_before_the_start(tmp_path):
    """transformers draws them at random and trains on: exit code 0."""
    said = refusal(changed(tmp_path / "three", without_three))
    assert all(name in said for name in REMOVED) and "3 of its 38 weights are not in its files" in said
    assert said.endswith("The copy is incomplete; download or save it again.")
    check_weights(settings_of(tmp_path / "three", "sft", "--random_init", "true"))
    check_weights(settings_of(TINY / "model"))  # its head is tied: no file has it


@pytest.mark.injection
@pytest.mark.parametrize("started", ["by the launcher", "by torchrun"])
def test_missing_weights_end_a_run_before_the_data_are_tokenized(tmp_path, started):
    """At every stage and in every recipe: it is checked before either matters."""
    flags = ["--model", str(changed(tmp_path / "model", without_three)), "--data", str(TINY / "train.jsonl")]
    flags += ["--use_cpu", "true", "--output_dir", str(tmp_path / "run")]
    cache = {"ZEROFIT_CACHE": str(tmp_path / "cache")}
    if started == "by torchrun":
        done = run_python([str(ROOT / "recipes" / "lora.py"), *flags, "--zero", "3"], ranks=2, **cache)
    else:
        words = ["-m", "zerofit", "launch", "--gpus", "2", str(ROOT / "recipes" / "sft.py"), *flags, "--zero", "2"]
        done = run_python(words, cwd=ROOT, **cache)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "LOAD REPORT" not in done.stderr, done.stderr
    assert f"3 of its 38 weights are not in its files and would be random numbers: {REMOVED[0]}" in done.stderr
    assert not list((tmp_path / "cache").rglob("*.arrow")) and not (tmp_path / "run" / "run.json").exists()


@pytest.mark.injection
def test_the_likely_cause_of_missing_weights_is_named(tmp_path):
    said = refusal(changed(tmp_path / "renamed", renamed))
    assert "36 of its 38 weights" in said
    assert "36 of them have other names in the files (model.language_model.layers" in said
    said = refusal(changed(tmp_path / "part", lambda w: renamed(w) | {"model.vision.patch.weight": torch.zeros(3)}))
    assert "image or audio weights: they are the text part of a larger model" in said
    untied = {"architectures": ["LlamaForSequenceClassification"], "tie_word_embeddings": False}
    said = refusal(changed(tmp_path / "reward", lambda w: w | {"score.weight": torch.zeros(1, 128)}, **untied))
    assert "1 of its 39 weights" in said and "lm_head.weight. config.json is of LlamaForSequenceClassification" in said
    said = refusal(changed(tmp_path / "other", lambda w: {f"encoder.{i}.x": t for i, t in enumerate(w.values())}))
    assert "38 of its 38" in said and "config.json is of another model" in said


@pytest.mark.injection
def test_weights_of_another_shape_are_refused_before_the_start(tmp_path):
    said = refusal(changed(tmp_path / "shape", lambda w: w | {"model.norm.weight": torch.zeros(126)}))
    assert "1 of its 38 weights have another shape" in said and "model.norm.weight [126] instead of [128]" in said


@pytest.mark.injection
@pytest.mark.parametrize("damage", ["cut", "cut in the header", "empty", "pointer", "no header"])
def test_a_damaged_file_of_weights_is_one_sentence(tmp_path, damage):
    """safetensors raises a traceback, after the data are tokenized."""
    folder = changed(tmp_path / "model", dict)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    content, why = {
        "cut": (whole[: len(whole) // 2], f"incomplete: {len(whole) // 2:,} of {len(whole):,} bytes"),
        "cut in the header": (whole[:100], "its header is truncated"),
        "empty": (b"", "empty"),
        "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a git-lfs pointer"),
        "no header": (b"\x08" + bytes(7) + b"not json", "its header is truncated or not a safetensors header"),
    }[damage]
    file.write_bytes(content)
    said = refusal(folder)
    assert said.startswith(f"--model {folder}: model.safetensors is damaged ({why}") and "again" in said


@pytest.mark.injection
def test_a_shard_that_the_index_names_is_missing(tmp_path):
    folder = changed(tmp_path / "model", dict)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    names = dict.fromkeys(weights, "model-00001-of-00002.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    check_weights(settings_of(folder))
    index.write_text(json.dumps({"weight_map": names | {"x": "model-00002-of-00002.safetensors"}}))
    assert "model-00002-of-00002.safetensors is damaged (it is missing)" in refusal(folder)
    index.write_text("[]")
    assert "index.json is damaged (not JSON with a weight_map)" in refusal(folder)
    index.unlink()
    assert "model.safetensors and model.safetensors.index.json are missing" in refusal(folder)


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def more_layers(weights):
    return weights | {"model.layers.4.mlp.up_proj.weight": torch.zeros(4, 4)}


# What contradicts config.json -> (change of the weights, change of config.json, what is said).
CONTRADICTIONS = {
    "whole numbers": (lambda w: w | {Q_PROJ: w[Q_PROJ].to(torch.int8)}, {}, rf"I8 numbers in its files \({Q_PROJ}\)"),
    "bytes": (lambda w: w | {Q_PROJ: w[Q_PROJ].to(torch.uint8)}, {}, "1 of its weights are U8 numbers"),
    "8 bits and scales": (
        lambda w: w | {Q_PROJ: w[Q_PROJ].to(torch.float8_e4m3fn), f"{Q_PROJ}_scale": torch.ones(1)}, {},
        "F8_E4M3 numbers .* quantization_config",
    ),
    "scales alone": (lambda w: w | {f"{Q_PROJ}_scale_inv": torch.ones(1)}, {}, "scales of packed weights"),
    "fewer layers": ({}, {"num_hidden_layers": 2}, "18 weights of layers .* would be ignored: model.layers.2"),
    "no layers": ({}, {"num_hidden_layers": 0}, "36 weights of layers"),
    "part of a layer more": (more_layers, {}, "1 weights of layers in its files .* model.layers.4.mlp.up_proj.weight"),
    "norms of queries": (
        lambda w: w | {Q_PROJ.replace("q_proj", "q_norm"): torch.ones(4)}, {}, "self_attn.q_norm.weight. Config and",
    ),
    "biases": (lambda w: w | {Q_PROJ.replace("weight", "bias"): torch.ones(128)}, {}, "q_proj.bias"),
}  # fmt: skip


@pytest.mark.injection
@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_weights_that_contradict_config_json_are_refused_by_name(tmp_path, what):
    """They trained to the end, from a loss of another model, and the certificate held."""
    change, config, expected = CONTRADICTIONS[what]
    assert re.search(expected, refusal(changed(tmp_path / "model", change or dict, **config)))


@pytest.mark.injection
def test_buffers_that_layers_compute_and_layers_that_predict_further_are_left_out(tmp_path):
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
        "model.layers.4.enorm.weight": torch.ones(9),
    }
    check_weights(settings_of(changed(tmp_path / "model", lambda w: w | more, num_nextn_predict_layers=1)))


@pytest.mark.injection
def test_many_weights_that_are_left_out_are_a_warning(tmp_path, capsys):
    """One of thirty decisions said so."""
    towers = {f"model.vision.{i}.patch.weight": torch.zeros(3) for i in range(9)}
    check_weights(settings_of(changed(tmp_path / "few", with_another)))
    assert "warning" not in capsys.readouterr().out
    check_weights(settings_of(changed(tmp_path / "many", lambda w: w | towers)))
    assert "warning: --model" in (said := capsys.readouterr().out) and "9 unexpected in the files, not used by" in said


@pytest.mark.injection
def test_a_tensor_in_two_shards_is_refused(tmp_path):
    """The shard that the index does not name was trained."""
    folder = changed(tmp_path / "model", dict)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    save_file(weights, folder / names[0], {"format": "pt"})
    save_file({"model.embed_tokens.weight": 3 * weights["model.embed_tokens.weight"]}, folder / names[1])
    weight_map = dict.fromkeys(weights, names[0]) | {"other": names[1]}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert f"{names[0]} and {names[1]} both contain model.embed_tokens.weight" in refusal(folder)
    index.write_text(json.dumps({"weight_map": weight_map | {"other": "../x.safetensors"}}))
    assert "'../x.safetensors' is not a file name in its folder" in refusal(folder)


HEADERS = {
    "a type": (b'"BF16"', b'"X16"'),
    "a shape": (b"[512,128]", b"[512,127]"),
    "a negative offset": (b'"data_offsets":[0', b'"data_offsets":[-8'),
    "brackets": (b"", b"[" * 200_000),
}


@pytest.mark.injection
@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_does_not_fit_its_file_is_one_sentence(tmp_path, what):
    """transformers or safetensors ended in a traceback, after the data were tokenized."""
    folder = changed(tmp_path / "model", dict)
    file = folder / "model.safetensors"
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header, rest = file.read_bytes()[8 : 8 + size], file.read_bytes()[8 + size :]
    old, new = HEADERS[what]
    damaged = header.replace(old, new, 1) if old else new
    assert damaged != header
    file.write_bytes(len(damaged).to_bytes(8, "little") + damaged + rest)
    assert re.search(r"model.safetensors is damaged \(.+\); download or copy it again", refusal(folder))
    load_config(settings_of(folder))  # which looks for a head of its own in the files


# What config.json says -> what is said: values, or the file's text after its first brace.
CONFIGS = {
    "a million layers": ({"num_hidden_layers": 1_000_000}, "num_hidden_layers 1,000,000 must be at most 10,000"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers 0 must be 1 or more"),
    "a wide model": ({"hidden_size": 10**12}, "6,665,000,000,000,000 parameters, more than any machine"),
    "no heads": ({"num_attention_heads": 0}, "its config.json could not be loaded: "),
    "odd heads": ({"num_attention_heads": 7}, "not a multiple of the number of attention heads"),
    "heads that share unevenly": ({"num_key_value_heads": 3}, "4 attention heads is not a multiple of 3 key heads"),
    "text for a number": ({"vocab_size": "512"}, "'vocab_size' expected int, got str"),
    "a negative vocabulary": ({"vocab_size": -5}, "cannot build a causal language model from its config.json"),
    "a wide range": ({"initializer_range": 1e300}, "initializer_range.*1e\\+300"),
    "a dropout of 2": ({"attention_dropout": 2.0}, "attention_dropout 2.0 must be from 0 to below 1"),
    "an unknown dtype": ({"dtype": "float99"}, "its config.json could not be loaded: .*float99"),
    "a name for a list": ({"architectures": 5}, "architectures. with value 5|architectures 5 must be a list"),
    "a key twice": ('"vocab_size": 1, ', "the key 'vocab_size' twice"),
    "nesting": (f'"x": {"[" * 100_000}{"]" * 100_000}, ', "its config.json could not be loaded"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_json_of_which_no_model_can_be_made_is_one_sentence(tmp_path, what):
    """Tracebacks after the data were read, and a million layers that were built without an end."""
    said, expected = CONFIGS[what]
    folder = changed(tmp_path / "model", dict, **(said if isinstance(said, dict) else {}))
    if isinstance(said, str):
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text("{" + said + text.removeprefix("{"))
    with pytest.raises(UserError, match=expected) as refused:
        check_model(settings_of(folder, "sft", "--random_init", "true"))
    assert str(refused.value).startswith("--model ") and "\n" not in str(refused.value)


def test_outputs_that_training_does_not_read_are_turned_off_and_said(tmp_path):
    """output_attentions met the attention of packed rows: a traceback."""
    folder = changed(tmp_path / "model", dict, output_attentions=True, return_dict=False)
    settings = resolved("sft", folder)
    assert any(line.startswith("config.json: output_attentions and return_dict ") for line in settings.decisions)
    model = load_model(settings, load_tokenizer(settings))
    assert model.config.return_dict and not model.config.output_attentions


def untied(weights):
    return weights | {"lm_head.weight": 2 * weights["model.embed_tokens.weight"]}


@pytest.mark.injection
def test_a_head_of_its_own_under_a_config_that_ties_it_is_trained_said_and_saved_as_such(tmp_path, capsys):
    """config.json of final/ said true: llama.cpp, vLLM and older transformers serve another model by it."""
    folder = changed(tmp_path / "untied", untied)
    check_weights(settings_of(folder))
    assert "lm_head.weight in the files differs from the" in (said := capsys.readouterr().out) and "warning" in said
    settings = resolved("sft", folder)
    assert not load_config(settings).tie_word_embeddings
    planned = {name: p.shape for name, p in check_model(settings).named_parameters()}
    model = load_model(settings, load_tokenizer(settings))
    assert {name: p.shape for name, p in model.named_parameters()} == planned and "lm_head.weight" in planned
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    same = changed(tmp_path / "same", lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()})
    check_weights(settings_of(same))
    assert load_config(resolved("sft", same)).tie_word_embeddings and "warning" not in capsys.readouterr().out


def converted(said: str, folder) -> dict:
    """Run the command that a message ends with; return the weights of the new model, which can be trained."""
    new = folder / "converted"
    command = shlex.split(said[said.index("python -c") :].replace("NEW_FOLDER", str(new)))
    (folder / "command.py").write_text(command[2])
    done = run_python([str(folder / "command.py"), *command[3:]])
    assert done.returncode == 0, done.stderr[-2000:]
    check_weights(settings_of(new))
    assert load_tokenizer(settings_of(new)).eos_token_id is not None
    return load_file(new / "model.safetensors")


@pytest.mark.bad_input
def test_the_command_that_converts_a_pickled_model_works(tmp_path):
    """Many older models of the Hub are pytorch_model.bin alone."""
    folder = changed(tmp_path / "model", dict)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    said = refusal(folder)
    assert "its weights are pickles (.bin)" in said
    assert all(torch.equal(weight, weights[name]) for name, weight in converted(said, tmp_path).items())


@pytest.mark.injection
def test_each_rank_refuses_missing_weights_and_nan_at_every_stage(tmp_path, request):
    """Where the files were not compared before: a class that cannot be built without memory, a changed file."""
    folders = {
        "missing": changed(tmp_path / "missing", without_three),
        "renamed": changed(tmp_path / "renamed", renamed),
        "nan": changed(tmp_path / "nan", with_nan),
        "whole": TINY / "model",
        "another": changed(tmp_path / "another", with_another),
        "untied": changed(tmp_path / "untied", untied),
    }
    cases = {f"{kind} sft {stage}": ("sft", stage, folders[kind]) for kind in ("missing", "nan") for stage in "03"}
    cases |= {"renamed lora 3": ("lora", "3", folders["renamed"]), "whole sft 3": ("sft", "3", folders["whole"])}
    cases |= {"another lora 0": ("lora", "0", folders["another"]), "untied sft 3": ("sft", "3", folders["untied"])}
    if runs_slow(request):
        recipes = [("sft", stage) for stage in "0123"] + [("lora", stage) for stage in "0123"]
        cases = {f"{kind} {r} {s}": (r, s, folder) for kind, folder in folders.items() for r, s in recipes}
    words = [str(ROOT / "tests" / "model" / "weights_ranks.py"), json.dumps(cases, default=str)]
    done = run_python(words, ranks=2, timeout=900, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "LOAD REPORT" not in done.stdout + done.stderr
    expected = {
        "missing": f"3 of its 38 weights are not in its files and would be random numbers: {', '.join(REMOVED)}",
        "renamed": "36 of its 38 weights are not in its files",
        "nan": "model.layers.2.self_attn.k_proj.weight of the base holds NaN or Inf",
        "whole": "base weights: 38 of 38 tensors loaded, none missing, none mismatched",
        "another": "base weights: 38 of 38 tensors loaded, none missing, none mismatched (1 unexpected)",
        "untied": "base weights: 39 of 39 tensors loaded",  # transformers compares empty tensors at stage 3
    }
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert said.keys() == cases.keys()
    for name, of_ranks in said.items():
        kind, stage = name.split()[0], name.split()[-1]
        wanted = expected[kind].replace("(1 un", "(unknown un") if stage == "3" else expected[kind]
        assert len(of_ranks) == 2 and all(wanted in text for text in of_ranks), (name, of_ranks)
        if kind == "another" and stage != "3":  # said once, among the decisions
            assert "1 unexpected in the files, not used by LlamaForCausalLM: model.vision.patch.weight" in of_ranks[0]


# --- gpt-oss: weights in MXFP4 ---


def packed(folder):
    """Write a tiny gpt-oss with random experts in MXFP4, as OpenAI's folders hold them; return the folder."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    shutil.copytree(TINY / "model", folder)
    weights = {}
    for name, weight in AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, rows, columns = weight.shape
            blocks = (experts, columns, rows // 32)  # of 32 numbers: 16 bytes and a scale
            weights[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
            weights[f"{name}_scales"] = torch.randint(120, 125, blocks, dtype=torch.uint8)
        else:
            weights[name] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    own = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(own))
    return folder


def resolved(recipe, folder, *flags, ranks=1):
    words = ["--model", str(folder), "--data", "rows.jsonl", "--use_cpu", "true", *flags]
    settings = resolve.resolve_settings(recipe, words, ranks)
    resolve.resolve_for_model(settings)
    return settings


@pytest.mark.injection
def test_a_base_in_mxfp4_is_unpacked_trained_and_saved_under_its_own_names(tmp_path):
    """Packed it cannot be trained, and transformers would save the unpacked experts so that nobody can load them."""
    folder = packed(tmp_path / "packed")
    settings = resolved("sft", folder, "--zero", "0")
    assert any(line.startswith("base weights: MXFP4 files, unpacked for training") for line in settings.decisions)
    check_weights(settings)
    model = load_model(settings, load_tokenizer(settings))
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not hasattr(model.config, "quantization_config")
    assert settings.checks[0].numbers["loaded"] == 37 and settings.checks[0].numbers["unexpected"] == 0
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert (
        experts.shape == (4, 64, 128) and 0.1 < experts.std().item() < 0.3
    )  # FP4's values by a scale of 2**-7 to 2**-3
    planned = check_model(settings)
    assert {n: p.shape for n, p in planned.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    model.save_pretrained(tmp_path / "saved")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())


@pytest.mark.bad_input
def test_a_base_in_mxfp4_is_refused_where_it_would_be_whole_on_every_rank(tmp_path):
    folder = packed(tmp_path / "packed")
    with pytest.raises(UserError, match=r"packed \(MXFP4\).*on every rank.*use --zero 2") as refused:
        resolved("lora", folder, "--zero", "3", ranks=2)
    names = converted(str(refused.value), tmp_path)
    assert len(names) == 37 and not any(name.endswith("_blocks") for name in names)
    with pytest.raises(UserError, match="--load_in_4bit would pack only the other layers; leave it out"):
        resolved("lora", folder, "--zero", "0", "--load_in_4bit", "true")


def test_the_hash_of_the_weights_changes_with_a_number_of_a_small_file(tmp_path):
    one = changed(tmp_path / "one", dict)
    two = changed(tmp_path / "two", lambda w: w | {"model.norm.weight": w["model.norm.weight"] + 1})
    assert files.identity(one) == files.identity(TINY / "model") != files.identity(two)


def test_a_missing_library_is_said_with_its_install_line(monkeypatch):
    """transformers has it on a line of its own."""

    def build(*args, **kwargs):
        raise ImportError("\nTimmModel requires the timm library but it was not found.\n`pip install timm`.\n")

    monkeypatch.setattr(load.towers, "build", build)
    settings = resolve.resolve_settings("sft", ["--data", "none", "--model", str(TINY / "model")], 1)
    with pytest.raises(UserError, match=r"^--model .*: TimmModel requires .* not found\. `pip install timm`\.$"):
        check_model(settings)
