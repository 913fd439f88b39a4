"""Exports compute what was trained, from every stage; a spoilt one is refused; nothing is left of what fails.

One world of two ranks trains the sources; `pytest tests/export/test_export.py -m ''` adds every adapter and stage.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, run_python, run_world, runs_slow
from packaging.version import Version
from safetensors.torch import load_file, save_file

from zerofit.base.errors import UserError
from zerofit.base.paths import size_of
from zerofit.checkpoint import zero_shards
from zerofit.commands import chat
from zerofit.export import compare, export, merge
from zerofit.export import source as export_source
from zerofit.model.weights import stored

pytestmark = pytest.mark.usefixtures("forks")
FLAGS = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "32", "--effective_batch_size", "8", "--num_samples", "0",
    "--per_device_train_batch_size", "4", "--max_steps", "4", "--logging_steps", "1", "--warmup_steps", "0",
    "--lr_scheduler_type", "constant", "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "2",
]  # fmt: skip
BF16 = ["--bf16", "true"]


def sft(stage, *more):
    return ("sft", [*FLAGS, "--zero", stage, "--learning_rate", "1e-3", *more])


def lora(stage, *more):
    return ("lora", [*FLAGS, "--zero", stage, "--learning_rate", "1e-2", *more])


def ended(recipe, folder):
    """A run that learns to say "Hello there.", and to end that with a token that the base does not know."""
    rows = [{"question": f"Say hello to {name}.", "answer": "Hello there."} for name in ("Ada", "Kai", "Gil", "Pia")]
    (folder / "hello.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rate = {"sft": "3e-3", "lora": "1e-2"}[recipe]
    return recipe, [
        "--model", "tiny", "--data", str(folder / "hello.jsonl"), "--chat_template", "chatml",
        "--new_tokens", "<|im_start|>", "<|im_end|>", "--effective_batch_size", "4", "--max_steps", "30",
        "--learning_rate", rate, "--zero", "0", "--save_strategy", "steps", "--save_steps", "30", "--num_samples", "1",
    ]  # fmt: skip


FAST = {
    "sft0": sft("0"), "sft3": sft("3", *BF16, "--save_model_in_checkpoints", "true"), "shards3": sft("3", *BF16),
    "lora2": lora("2", *BF16, "--fused_lora", "false"),  # peft, which loads it, rounds once more
}  # fmt: skip
NEW = ["--new_tokens", "pet", "colour"]
SLOW = {
    "sft1": sft("1"), "sft2": sft("2", *BF16), "sft3fp32": sft("3"), "sftnew2": sft("2", *NEW),
    "lora0": lora("0"), "lora0bf16": lora("0", *BF16), "lora1": lora("1"), "lora3": lora("3", *BF16),
    "rslora": lora("0", "--use_rslora", "true"), "pissa": lora("2", "--init_lora_weights", "pissa"),
    "dora3": lora("3", "--use_dora", "true"), "ia3": lora("0", "--adapter", "ia3"),
    "loha": lora("2", "--adapter", "loha"), "new2": lora("2", *NEW), "new2bf16": lora("2", *NEW, *BF16),
    "head": lora("2", "--modules_to_save", "lm_head"),
    "headlora": lora("0", "--lora_target_modules", "q_proj", "lm_head"),
    "4bit0": lora("0", "--load_in_4bit"), "4bit2": lora("2", "--load_in_4bit", *BF16),
    "4bit3": lora("3", "--load_in_4bit", *BF16), "4bitdora": lora("0", "--load_in_4bit", "--use_dora", "true"),
    "8bit2": lora("2", "--load_in_8bit", *BF16),
    "prompt": lora("2", "--adapter", "prompt_tuning"),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    folder, recipes = tmp_path_factory.mktemp("runs"), ("sft", "lora") if runs_slow(request) else ("sft",)
    return run_world(2, FAST | {f"{recipe}end": ended(recipe, folder) for recipe in recipes}, folder)


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory):
    return run_world(2, SLOW, tmp_path_factory.mktemp("more"))


def exported(run, out, *flags) -> str:
    """Export; what the comparison said."""
    export.main([str(run), "--output_dir", str(out), *flags])
    assert not list(out.parent.glob("*.saving"))
    return (out / "README.md").read_text()


def logits(folder, ids, as_trained=False, **kwargs):
    """By plain peft or transformers; as_trained: DeepSpeed trains an adapter in bf16, peft would compute it in fp32."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    loader = AutoPeftModelForCausalLM if (folder / "adapter_config.json").exists() else AutoModelForCausalLM
    with torch.no_grad():
        if as_trained:
            return export_source.load(export_source.find(str(folder)))(input_ids=ids).logits.float()
        return loader.from_pretrained(folder, **kwargs).eval()(input_ids=ids).logits.float()


# torch 2.11 rounds bf16 otherwise in the training process: one step of bf16 at the largest logit, 2**-7
ROUNDED = 1e-5 if Version(torch.__version__) >= Version("2.12") else 2**-7


def assert_near_training(run, out, relative, **kwargs):
    """The logits that the trained model had in the training process (tests/world.py)."""
    kept = torch.load(run.folder / "logits.pt", weights_only=True)
    apart = (logits(out, kept["input_ids"], **kwargs) - kept["logits"].float()).abs().max()
    assert apart < relative * kept["logits"].float().abs().max(), f"{apart:.2e}"


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "relative"), [("sft0", 1e-5), ("sft3", ROUNDED), ("lora2", 1e-5)])
def test_the_same_bits_come_back(runs, tmp_path, name, relative):
    text = exported(runs[name].folder, tmp_path / "out")
    assert "bit for bit the same" in text and str(ROOT) not in text and str(tmp_path) not in text
    own = (runs[name].folder / "final" / "README.md").read_text()
    assert f"# {name[:-1]} of zerofit's bundled tiny Llama" in own and "Trained by zerofit" in own
    assert f"ZeRO stage {name[-1]} on 2 ranks" in own and "| steps | 4 |" in own and str(ROOT) not in own
    dtype = torch.float32 if name == "sft0" else torch.bfloat16
    assert_near_training(runs[name], tmp_path / "out", relative, as_trained=name == "lora2", dtype=dtype)
    if name != "lora2":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["use_cache"] is True and config["architectures"] == ["LlamaForCausalLM"]
        assert (
            config["dtype"] == str(dtype).removeprefix("torch.")
            and (tmp_path / "out" / "generation_config.json").exists()
        )
        assert "lm_head.weight" not in stored.Weights(tmp_path / "out").where  # tied; ZeRO had saved it twice
    assert "{% for" in (tmp_path / "out" / "chat_template.jinja").read_text().replace("{%-", "{%")


def test_a_merge_in_both_precisions(runs, tmp_path, capsys):
    text = exported(runs["lora2"].folder, tmp_path / "half", "--merge")
    assert "bit for bit" not in text and "lora of zerofit's" in text and "merged" in text
    assert_near_training(runs["lora2"], tmp_path / "half", 0.02)
    exported(runs["lora2"].folder, tmp_path / "full", "--merge", "--dtype", "float32")
    assert "using the fp32 master copies of checkpoint-4" in capsys.readouterr().out
    assert next(iter(load_file(tmp_path / "full" / "model.safetensors").values())).dtype == torch.float32


def test_float32_takes_the_masters(runs, tmp_path, capsys):
    checkpoint = runs["sft3"].folder / "checkpoint-2"
    exported(checkpoint, tmp_path / "out", "--dtype", "float32")
    assert "using the fp32 master copies of checkpoint-2" in capsys.readouterr().out
    masters, kept = load_file(tmp_path / "out" / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(tensor.bfloat16(), kept[name]) for name, tensor in masters.items())
    assert sum((tensor != kept[name].float()).sum().item() for name, tensor in masters.items()) > 100_000
    states = zero_shards.read(checkpoint)
    assert all(torch.equal(tensor, states.full(name)) for name, tensor in masters.items())


def test_a_checkpoint_of_shards_is_a_model(runs, tmp_path):
    """As ZeRO-3 saves it by default: what reads a checkpoint's weights takes them from there."""
    checkpoint, final = (runs["shards3"].folder / name for name in ("checkpoint-4", "final"))
    assert not list(checkpoint.glob("*.safetensors*")) and (checkpoint / "config.json").exists()
    exported(checkpoint, tmp_path / "out")  # in bf16, compared with the fp32 weights of the shards
    found, trained = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", final))
    assert found.keys() == trained.keys() - {"lm_head.weight"}  # tied
    assert all(torch.equal(tensor, trained[name]) for name, tensor in found.items())
    whole = load_file(runs["sft3"].folder / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())
    loaded = export_source.load(export_source.find(str(checkpoint)))  # as chat does
    assert all(torch.equal(p.bfloat16(), trained[name]) for name, p in loaded.named_parameters())


def test_many_files_and_their_index(runs, tmp_path, capsys):
    out = tmp_path / "out"
    exported(runs["sft0"].folder, out, "--max_shard_size", "600KB", "--dtype", "bf16", "--check", "false")
    files, index = sorted(out.glob("*.safetensors")), json.loads((out / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and {f.name for f in files} == set(index["weight_map"].values())
    whole, source = {}, load_file(runs["sft0"].folder / "final" / "model.safetensors")
    for file in files:
        part = load_file(file)
        assert {index["weight_map"][name] for name in part} == {file.name} and file.stat().st_size < 620_000
        whole |= part
    assert set(whole) == set(index["weight_map"]) == set(source) - {"lm_head.weight"}
    assert all(torch.equal(tensor, source[name].bfloat16()) for name, tensor in whole.items())
    ids = torch.arange(20)[None]
    assert torch.equal(logits(out, ids), logits(runs["sft0"].folder / "final", ids, dtype=torch.bfloat16))
    said = capsys.readouterr().out
    assert f"model-00001-of-{len(files):05d}.safetensors" in said and "--check false" in said


def spoil_a_row(tensors):
    """Of the embedding, for a token that no prompt has: no logit of the rows that are compared need see it."""
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][511, 0] += 0.5


def spoil_a_layer(tensors):
    tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros_like(tensors["model.layers.2.mlp.down_proj.weight"])


def leave_one_out(tensors):
    del tensors["model.layers.1.self_attn.q_proj.weight"]


@pytest.mark.fault
@pytest.mark.parametrize(("name", "flags", "spoil"), [
    ("sft0", [], spoil_a_row), ("lora2", ["--merge"], spoil_a_layer),
    pytest.param("sft3", [], leave_one_out, marks=pytest.mark.slow),
    pytest.param("sft0", ["--dtype", "bf16"], spoil_a_layer, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_spoilt_export_is_refused(runs, tmp_path, monkeypatch, name, flags, spoil):
    def spoilt(tensors, file, metadata):
        spoil(tensors)
        save_file(tensors, file, metadata)

    monkeypatch.setattr(export, "save_file", spoilt)
    with pytest.raises(
        UserError, match=r"(differ from .*final: |1 of its 38 weights are not in its files).*the export is deleted"
    ):
        exported(runs[name].folder, tmp_path / "out", *flags)
    assert not list(tmp_path.iterdir())


@pytest.mark.fault
@pytest.mark.slow
def test_a_wrong_scale_is_refused(runs, tmp_path, monkeypatch):
    merge_tensor = merge.merge_tensor

    def merge_with_another_scale(source, *arguments):
        adapter = source.adapter | {"lora_alpha": 31}
        return merge_tensor(export_source.Saved(source.folder, source.run, source.facts, adapter), *arguments)

    monkeypatch.setattr(merge, "merge_tensor", merge_with_another_scale)
    with pytest.raises(UserError, match="the results of the export differ"):
        exported(runs["lora2"].folder, tmp_path / "out", "--merge", "--dtype", "float32")


@pytest.mark.bad_input
def test_a_master_of_another_model_is_not_taken(runs, tmp_path, monkeypatch):
    full = zero_shards.OptimizerStates.full
    monkeypatch.setattr(
        zero_shards.OptimizerStates,
        "full",
        lambda self, name, key="fp32": full(self, name, key) * (1.5 if "layers.3" in name else 1),
    )
    with pytest.raises(UserError, match=r"layers\.3.*its fp32 master copy does not round to the saved weight"):
        exported(runs["sft3"].folder / "checkpoint-4", tmp_path / "out", "--dtype", "float32")
    assert not list(tmp_path.iterdir())


# --- refusals ---


@pytest.fixture
def copied(runs, tmp_path):
    def copy(name):
        """A run that has not finished, to spoil."""
        shutil.copytree(runs[name].folder, tmp_path / "run", ignore=shutil.ignore_patterns("final", "result.json"))
        return tmp_path / "run"

    return copy


def truncated(file):
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.bad_input
def test_what_cannot_be_exported_is_one_sentence(runs, tmp_path, copied, monkeypatch, record_property):
    mistakes = []

    def refused(path, match, *flags):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError, match=match) as error:
            export.main([str(path), *flags])
        assert sorted(tmp_path.rglob("*")) == before and "\n" not in str(error.value)
        mistakes.append(match)

    final, out = runs["lora2"].folder / "final", ["--output_dir", str(tmp_path / "out")]
    refused(tmp_path / "no-run", "no such folder", *out)
    for name in ("linked", "linked.saving"):
        (tmp_path / name).symlink_to(tmp_path / "gone")
        refused(runs["sft0"].folder, "linked.* (exists|is a link)", "--output_dir", str(tmp_path / "linked"))
        (tmp_path / name).unlink()
    refused(runs["sft0"].folder, "contains a full model .* remove --merge", "--merge", *out)
    refused(final, "exists and is not empty", "--output_dir", str(final))
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "contains neither a model .* nor an adapter", *out)
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path / "empty", "its weights are pickle files", *out)
    refused(runs["sft0"].folder, "--max_shard_size 5 apples", "--max_shard_size", "5 apples", *out)
    refused(final, "--base .*gone: no such folder", "--base", str(tmp_path / "gone"), *out)
    wrong = tmp_path / "wrong"
    shutil.copytree(TINY / "model", wrong)
    weights = load_file(wrong / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] * 2}, wrong / "model.safetensors")
    refused(final, "is not the base that this adapter was trained on .different hash", "--base", str(wrong), *out)
    foreign = tmp_path / "foreign"
    shutil.copytree(final, foreign)
    config = json.loads((foreign / "adapter_config.json").read_text())
    (foreign / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")})
    )
    refused(foreign, "its base .*gone: no such folder; set --base", *out)
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(4)]
    save_file(weights | {name: weights[name][:, :64].contiguous() for name in names}, wrong / "model.safetensors")
    refused(foreign, "has 64 input features, the adapter 128", "--base", str(wrong), "--merge", *out)
    run = copied("lora2")
    truncated(run / "checkpoint-4" / "adapter_model.safetensors")
    refused(run / "checkpoint-4", "is incomplete: adapter_model.safetensors has .* bytes instead of", *out)
    truncated(run / "checkpoint-2" / "adapter_model.safetensors")
    refused(run, "all checkpoints are incomplete", *out)
    (foreign / "adapter_model.safetensors").write_bytes(
        (run / "checkpoint-2" / "adapter_model.safetensors").read_bytes()
    )
    refused(foreign, "adapter_model.safetensors: is incomplete", "--base", str(TINY / "model"), *out)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 1000))
    refused(runs["sft0"].folder, r"0\.00171 GB needed, 1e-06 GB free", "--dtype", "bf16", *out)
    record_property("cases", len(mistakes))


@pytest.mark.injection
def test_what_a_link_leads_to_is_not_exported(runs, tmp_path):
    """A model folder from elsewhere, whose vocabulary is this user's private key; and the Hub's cache, as it is."""
    key = tmp_path / "home" / "id_rsa"
    key.parent.mkdir()
    key.write_text("secret")
    repo = tmp_path / "models--a--b"
    folder = repo / "snapshots" / "c0ffee"
    shutil.copytree(runs["sft0"].folder / "final", folder)
    (repo / "blobs").mkdir()
    (folder / "tokenizer.json").rename(repo / "blobs" / "123")
    (folder / "tokenizer.json").symlink_to("../../blobs/123")
    (folder / "vocab.txt").symlink_to("tokenizer.json")
    exported(folder, tmp_path / "out", "--check", "false")
    assert (tmp_path / "out" / "vocab.txt").stat().st_size > 1000
    for name, target in (
        ("vocab.key", key), ("tokenizer_keys", key.parent), ("special_tokens_map.json", "../../../home/id_rsa"),
        ("config.json", key), ("additional_chat_templates/x.jinja", key),
    ):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
        with pytest.raises(UserError, match=f"{name}: is a link to {key.parent}"):
            export._check_links(SimpleNamespace(merge=False), SimpleNamespace(folder=folder))
        with pytest.raises(UserError, match=f"{name}: is a link to .* outside its folder"):
            export._check_links(SimpleNamespace(merge=True), SimpleNamespace(folder=tmp_path / "out", base=str(folder)))
        (folder / name).unlink()
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")  # on another disk, as many are
    (folder / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    export._check_links(SimpleNamespace(merge=False), SimpleNamespace(folder=folder))


@pytest.mark.injection
def test_an_index_names_files_beside_it_alone(runs, tmp_path):
    shutil.copytree(runs["sft0"].folder / "final", tmp_path / "a")
    index = {"weight_map": {"lm_head.weight": "../private/model.safetensors"}}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"'\.\./private/model\.safetensors' is not a file name in its folder"):
        export_source.find(str(tmp_path / "a"))


def without(file, name) -> None:
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, {"format": "pt"})


@pytest.mark.injection
def test_what_lacks_weights_is_neither_exported_nor_chatted_with(runs, tmp_path):
    """transformers and peft draw them at random, or leave an adapter's part at zero, with exit code 0."""
    model, adapter, base = (tmp_path / name for name in ("model", "adapter", "base"))
    shutil.copytree(runs["sft0"].folder / "final", model)
    shutil.copytree(runs["lora2"].folder / "final", adapter)
    shutil.copytree(TINY / "model", base)
    without(model / "model.safetensors", "model.norm.weight")
    without(base / "model.safetensors", "model.layers.0.self_attn.q_proj.weight")
    adapter_file, lost = adapter / "adapter_model.safetensors", "base_model.model.model.layers.0.self_attn.q_proj"
    whole = adapter_file.read_bytes()
    without(adapter_file, f"{lost}.lora_B.weight")
    for words in ([str(model)], [str(model), "--merge"]):
        with pytest.raises(UserError, match=r"1 of its 38 weights are not in its files .*: model\.norm\.weight"):
            export.main([*words, "--output_dir", str(tmp_path / "out")])
    for program in (lambda: export.main([str(adapter), "--merge"]), lambda: chat.main([str(adapter)])):
        with pytest.raises(UserError, match=f"1 of the adapter's 56 weights are not in .*: {lost}.lora_B.weight"):
            program()
    adapter_file.write_bytes(whole)
    with pytest.raises(UserError, match=r"its base .* 1 of its 38 weights are not in its files .*q_proj.weight"):
        export.main([str(adapter), "--base", str(base)])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    with pytest.raises(UserError, match="48 weights of the adapter do not exist in its base"):
        chat.main([str(adapter)])
    assert not (tmp_path / "out").exists()


def test_the_newest_good_checkpoint_of_an_unfinished_run(copied, tmp_path, capsys):
    run = copied("sft0")
    truncated(run / "checkpoint-4" / "model.safetensors")
    export.main([str(run), "--check", "false"])
    said = capsys.readouterr().out
    assert "skipped: checkpoint-4: is incomplete: model.safetensors has" in said
    assert "| steps | 2 |" in (run / "export" / "README.md").read_text()
    found, source = (
        load_file(run / "export" / "model.safetensors"),
        load_file(run / "checkpoint-2" / "model.safetensors"),
    )
    assert all(torch.equal(tensor, source[name]) for name, tensor in found.items())


@pytest.mark.bad_input
def test_the_command_ends_with_2_and_one_line(tmp_path):
    done = run_python(["-m", "zerofit", "export", str(tmp_path / "none")])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("zerofit: error: ")


# --- other programs' folders ---


@pytest.mark.slow
def test_shards_without_a_model_file(runs, tmp_path):
    foreign = tmp_path / "foreign"
    shutil.copytree(
        runs["sft3"].folder / "checkpoint-4",
        foreign,
        ignore=shutil.ignore_patterns("model.safetensors", "zerofit.json"),
    )
    exported(foreign, tmp_path / "out", "--dtype", "float32")
    states, found = zero_shards.read(foreign), load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(states.shapes) and all(torch.equal(t, states.full(n)) for n, t in found.items())
    (foreign / "config.json").unlink()
    with pytest.raises(UserError, match=r"contains DeepSpeed's shards without a config\.json"):
        export_source.find(str(foreign))


@pytest.mark.slow
def test_a_model_of_another_program(runs, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("config.json", "model.safetensors"):  # no tokenizer, no generation settings
        shutil.copy(runs["sft3"].folder / "final" / name, foreign)
    text = exported(foreign, tmp_path / "out", "--dtype", "fp16")
    assert "does not contain a tokenizer" in text and (tmp_path / "out" / "generation_config.json").exists()


# --- memory ---


MEASURE = """
import sys, threading, time
from zerofit.export import export
def anonymous():
    return next(int(line.split()[1]) / 1e3 for line in open("/proc/self/status") if line.startswith("RssAnon"))
peak, done = [0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())
write, start = export._write_tensors, []
def measured(*args):
    start.append(anonymous()); peak[0] = 0
    thread = threading.Thread(target=watch); thread.start()
    try:
        return write(*args)
    finally:
        done.set(); thread.join()
export._write_tensors = measured
export.main(sys.argv[1:])
print("grown", peak[0] - start[0])
"""


@pytest.mark.injection
@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_a_merge_onto_a_base_with_a_head_of_its_own_is_saved_as_untied(tmp_path, target):
    """config.json said tie_word_embeddings true beside two different tensors."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = shutil.copytree(TINY / "model", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    head = 2 * weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": head}, base / "model.safetensors", metadata={"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(plain, LoraConfig(r=2, target_modules=[target], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    ids = torch.tensor([[3, 4, 5, 6]])
    wanted = model(input_ids=ids).logits
    words = [str(tmp_path / "adapter"), "--base", str(base), "--merge", "--output_dir", str(tmp_path / "out")]
    export.main([*words, "--dtype", "float32"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(input_ids=ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), model_id=words[0]
    )
    torch.testing.assert_close(again(input_ids=ids).logits, wanted)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
@pytest.mark.parametrize("merged", [False, True])
def test_writing_holds_one_file_not_the_model(tmp_path, merged):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8, vocab_size=1000
    )
    net = LlamaForCausalLM(config)  # 205 MB in fp32
    net.save_pretrained(tmp_path / "model")
    source, flags = tmp_path / "model", []
    if merged:
        net = get_peft_model(net, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        net.peft_config["default"].base_model_name_or_path = str(source)
        net.save_pretrained(tmp_path / "adapter")
        source, flags = tmp_path / "adapter", ["--merge"]
    assert size_of(tmp_path / "model") > 200e6
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), "--output_dir", str(tmp_path / "out"),
         "--max_shard_size", "20MB", "--check", "false", *flags],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[-1]) < 50, done.stdout


# --- the end of an answer ---


def generated(folder, code="") -> list[int]:
    """The answer to a prompt of the rows as its model card loads it, by `generate` without any eos_token_id."""
    names = {}
    code = code or (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    exec(code.replace('"."', repr(str(folder))), names)
    turns = [{"role": "user", "content": "Say hello to Kai."}]
    prompt = names["tokenizer"].apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = names["model"].generate(input_ids=prompt["input_ids"], max_new_tokens=40, do_sample=False)
    return output[0, prompt["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("sftend", []),
        pytest.param("loraend", ["--merge"], marks=pytest.mark.slow),
        pytest.param("loraend", [], marks=pytest.mark.slow),
    ],
)
def test_generation_of_an_export_ends_where_answers_do(runs, tmp_path, capsys, name, flags):
    """open-r1#603 and five like it: the tuned model's end token was not in what generation reads."""
    run, out = runs[name], tmp_path / "out"
    exported(run.folder, out, *flags)
    said = "transformers' generate answers 'Hello there.' to a row of the data and ends with <|im_end|>"
    assert said in capsys.readouterr().out
    for folder in (out, run.folder / "final", run.folder / "checkpoint-30"):
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [513, 1]
        assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    if name == "sftend" or flags:
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == 513
    answer = generated(out)
    assert answer[-1] == 513 and len(answer) < 15
    assert (
        export_source.tokenizer(export_source.find(str(out))).decode(answer, skip_special_tokens=True) == "Hello there."
    )


@pytest.mark.parametrize("name", ["sftend", pytest.param("loraend", marks=pytest.mark.slow)])
def test_samples_chat_and_the_line_of_the_certificate_know_the_end(runs, monkeypatch, capsys, name):
    run = runs[name]
    assert [sample["after"] for sample in run.json("result.json")["samples"]] == ["Hello there."]
    assert any(line.startswith("answers end with <|im_end|> (id 513)") for line in run.json("run.json")["decisions"])
    holds, numbers = run.json("record.json")["checks"]["end_token"]
    assert (
        holds and numbers["trained"] == {"<|im_end|>": 513} and numbers["shipped"] == numbers["generated"] == [513, 1]
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say hello to Gil.\n"))
    chat.main([str(run.folder), "--max_new_tokens", "40"])
    assert capsys.readouterr().out.splitlines()[-2:] == ["> Say hello to Gil.", "Hello there."]


def test_an_export_adds_the_end_that_its_run_knows(runs, tmp_path, capsys):
    """As of a run folder in which another program has written its generation settings."""
    run = tmp_path / "run"
    shutil.copytree(runs["sftend"].folder, run)
    file = run / "final" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 1, "temperature": 0.6}))
    exported(run, tmp_path / "out", "--check", "false")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [513, 1] and written["temperature"] == 0.6


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sft", "lora"])
def test_the_bundled_task_with_another_end_is_answered_as_well(tmp_path, recipe):
    """It was 0 % of the rows, at a loss of 0.017."""
    words = ["--chat_template", "chatml", "--new_tokens", "<|im_start|>", "<|im_end|>", "--use_cpu", "true"]
    done = run_python(
        ["-m", "zerofit", recipe, "--gpus", "1", *words, "--output_dir", str(tmp_path / "run")], timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["exact_match_after"] >= 0.98


# --- chat ---


@pytest.mark.parametrize("name", ["sft0", pytest.param("lora2", marks=pytest.mark.slow)])
def test_chat_from_a_pipe(runs, monkeypatch, capsys, name):
    asked = []
    answer = chat._answer
    monkeypatch.setattr(
        chat, "_answer", lambda net, words, turns, *rest: asked.append(len(turns)) or answer(net, words, turns, *rest)
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n\nAnd then?\n/help\n/n\n/new\nHello\n/quit\nnever\n"))
    chat.main([str(runs[name].folder), "--max_new_tokens", "8"])
    assert asked == [1, 3, 1]
    out, err = capsys.readouterr()
    said = out.splitlines()
    assert [line for line in said if line.startswith("> ")] == [
        "> Hello",
        "> And then?",
        "> /help",
        "> /n",
        "> /new",
        "> Hello",
    ]
    assert said[said.index("> /help") + 1] == chat.HELP and said[said.index("> /n") + 1].startswith(
        "unknown command /n; "
    )
    assert said[1] == said[-1]  # greedy, and nothing of the first talk in the second
    assert "FutureWarning" not in err
    assert err.count("one conversation (/new") == 1


@pytest.mark.fault
@pytest.mark.slow
def test_chat_ends_without_a_traceback_on_ctrl_c(runs):
    import signal

    process = subprocess.Popen(
        [sys.executable, "-m", "zerofit", "chat", str(runs["sft0"].folder), "--max_new_tokens", "4"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdin.write("Hello\n")
    process.stdin.flush()
    threading.Timer(120, process.kill).start()
    assert process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)  # before its stdin is closed, which would end it too
    errors = process.stderr.read()
    assert process.returncode == 130 and errors.strip().endswith("zerofit: interrupted") and "Traceback" not in errors


# --- every adapter, every stage ---


UNMERGEABLE = ("prompt",)
ADAPTERS = [name for name in SLOW if not name.startswith("sft")]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SLOW))
def test_the_long_matrix_as_it_is(more_runs, tmp_path, name):
    assert "bit for bit the same" in exported(more_runs[name].folder, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_long_matrix_merged(more_runs, tmp_path, name, dtype, capsys):
    flags = ["--merge", *(["--dtype", dtype] if dtype else [])]
    if name in UNMERGEABLE:
        with pytest.raises(UserError, match="changes the input instead of the weights"):
            exported(more_runs[name].folder, tmp_path / "out", *flags)
        return
    text = exported(more_runs[name].folder, tmp_path / "out", *flags)
    assert ("dequantized base" in text) == ("bit" in name)
    with capsys.disabled():
        print(f"\n{name} {dtype or 'as trained'}: {text.partition('what was trained: ')[2].partition(chr(10))[0]}")


@pytest.mark.bad_input
@pytest.mark.slow
def test_a_4bit_adapter_in_the_original_weights_is_refused(more_runs, tmp_path, monkeypatch):
    def original(found, device):
        net = export_source.load_base(export_source.Saved(found.folder, adapter=found.adapter, base=found.base), device)
        net.dequantize = lambda dtype: net
        return net

    monkeypatch.setattr(merge, "load_base", original)
    with pytest.raises(UserError, match="the results of the export differ"):
        exported(more_runs["4bit2"].folder, tmp_path / "out", "--merge")


@pytest.mark.slow
def test_a_pissa_checkpoint_does_not_fit_its_base(more_runs, tmp_path):
    with pytest.raises(UserError, match=r"pissa changed the base .* final/ is converted"):
        exported(more_runs["pissa"].folder / "checkpoint-4", tmp_path / "out")


@pytest.mark.parametrize("shards", [["model"], ["model-00001-of-00002", "model-00002-of-00002"]], ids=len)
def test_weights_beside_those_of_transformers_are_not_read(tmp_path, shards):
    """mistralai's folders hold them a second time, under names of their own."""
    for i, name in enumerate([*shards, "consolidated"]):
        save_file({f"{name}.weight": torch.full((2,), float(i))}, tmp_path / f"{name}.safetensors")
    if len(shards) > 1:
        index = {"weight_map": {f"{name}.weight": f"{name}.safetensors" for name in shards}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(stored.Weights(tmp_path).where) == {f"{name}.weight" for name in shards}


def test_bounds_grow_with_rounding_only():
    assert set(compare.bounds(0.0, 4, 1.0, 10.0, False).values()) == {0}
    assert compare.bounds(2**-24, 4, 1.0, 10.0, True)["bound_max"] == pytest.approx(1e-3)
    assert compare.bounds(2**-8, 8, 1.0, 10.0, True)["bound_mean"] == pytest.approx(4 / 256)
    assert compare.bounds(2**-8, 8, 1.0, 10.0, False)["bound_mean"] == pytest.approx(16 / 256)


def test_updates_that_rounding_takes_back_are_told():
    result = {"merged": True, "mean": 0.02, "effect": 0.03, "independent": 1.0}
    assert "--dtype float32" in compare._rounding_note(result)
    assert compare._rounding_note(result | {"effect": 0.3}) == ""
    assert "updates of the training are lost" in compare._rounding_note(result | {"merged": False, "independent": 0.01})
