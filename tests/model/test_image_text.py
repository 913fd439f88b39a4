"""Text rows on image-text checkpoints: what is trained, what is saved, and that the towers stay as they are."""

import json

import pytest
import torch
from conftest import TINY, recipe_process, run_world, runs_slow, slow_but
from image_text_models import KINDS, checkpoint, config_of
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from zerofit.base.errors import UserError
from zerofit.config import parse, resolve
from zerofit.export import export
from zerofit.model.image_text import classes, saved, towers
from zerofit.model.load import check_weights, load_config, load_model, load_tokenizer
from zerofit.model.weights import stored

MUST = ("gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3", "gemma4")  # of issue 37
FAST = ("gemma3",)

FLAGS = ["--data", str(TINY / "train.jsonl"), "--max_samples", "32", "--effective_batch_size", "8", "--num_samples",
         "0", "--per_device_train_batch_size", "4", "--max_steps", "3", "--logging_steps", "1", "--warmup_steps", "0",
         "--learning_rate", "1e-3", "--use_cpu", "true"]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function from a kind to the folder of a checkpoint of it, in bf16."""
    made = {}

    def model_of(kind):
        if kind not in made:
            made[kind] = checkpoint(kind, tmp_path_factory.mktemp("models") / kind)
        return made[kind]

    return model_of


@pytest.fixture(scope="module")
def runs(request, models, tmp_path_factory):
    """Each recipe at stage 0 on one rank and at stage 3 on two; without slow tests full tuning of one kind."""
    slow = runs_slow(request)
    kinds, recipes = (MUST, ("sft", "lora")) if slow else (FAST, ("sft",))
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for ranks, zero in ((1, "0"), (2, "3")):
        cases = {
            f"{kind}-{recipe}-{zero}": (recipe, ["--model", str(models(kind)), *FLAGS, "--zero", zero])
            for kind in kinds
            for recipe in recipes
        }
        if slow and ranks == 1:
            kept = [*FLAGS, "--zero", "0", "--towers", "keep"]
            cases |= {f"{kind}-keep": ("sft", ["--model", str(models(kind)), *kept]) for kind in kinds}
        found |= run_world(ranks, cases, folder)
    return found


def weights(folder) -> dict:
    held = stored.Weights(folder)
    return {name: held.get(name) for name in held.where}


def kept_logits(run):
    """Token ids and the logits that the model had at the end, in the process that trained it (tests/world.py)."""
    kept = torch.load(run.folder / "logits.pt", weights_only=True)
    return kept["input_ids"], kept["logits"].float()


def cases(*recipes):
    every = [(kind, recipe) for kind in MUST for recipe in recipes]
    return [case if case == ("gemma3", "sft") else pytest.param(*case, marks=pytest.mark.slow) for case in every]


@pytest.mark.parametrize(("kind", "recipe"), cases("sft", "lora"))
def test_losses_are_equal_at_stages_0_and_3(runs, kind, recipe):
    one, two = runs[f"{kind}-{recipe}-0"], runs[f"{kind}-{recipe}-3"]
    assert one.losses == pytest.approx(two.losses, rel=1e-5) and len(one.losses) == 3
    assert one.losses[-1] < one.losses[0]
    for run in (one, two):
        checks = run.json("record.json")["checks"]
        assert checks["loss"][0] and checks["base_weights"][0] and checks["documents_apart"][0], checks


@pytest.mark.slow
@pytest.mark.parametrize("kind", MUST)
def test_towers_in_memory_change_no_loss_and_nothing_of_them_is_trained(runs, kind):
    kept, dropped = runs[f"{kind}-keep"], runs[f"{kind}-sft-0"]
    assert kept.losses == pytest.approx(dropped.losses, rel=1e-6)
    record, base = kept.json("record.json"), config_of(kind)
    assert record["frozen_before"] == record["frozen_after"]
    sizes = [run.json("result.json") for run in (kept, dropped)]
    model = classes.skeleton(base)
    of_towers = sum(p.numel() for n, p in model.named_parameters() if classes.holds(classes.towers_of(model), n))
    assert sizes[0]["parameters"] - sizes[1]["parameters"] == of_towers > 0
    assert sizes[0]["trainable_parameters"] == sizes[1]["trainable_parameters"]


@pytest.mark.parametrize("kind", slow_but(MUST, FAST))
def test_final_is_a_checkpoint_of_the_original_class(runs, models, kind, request):
    finals = [f"{kind}-sft-0", f"{kind}-sft-3", *([f"{kind}-keep"] if runs_slow(request) else [])]
    for name in finals:
        base, final = models(kind), runs[name].folder / "final"
        before, after = weights(base), weights(final)
        assert before.keys() == after.keys()
        of_towers = classes.names_of_towers(AutoConfig.from_pretrained(base), before)
        assert len(of_towers) > 10
        for tower in of_towers:
            assert before[tower].dtype == after[tower].dtype and torch.equal(before[tower], after[tower])
        trained = [name for name in before if name not in of_towers]
        assert not any(torch.equal(before[name].float(), after[name].float()) for name in trained if "proj" in name)
        assert json.loads((final / "config.json").read_text())["architectures"] == [
            type(classes.skeleton(config_of(kind))).__name__
        ]
        assert (final / "preprocessor_config.json").read_text() == (base / "preprocessor_config.json").read_text()
        model, info = AutoModelForImageTextToText.from_pretrained(final, output_loading_info=True)
        assert not any(info.values()), info
        ids, logits = kept_logits(runs[name])
        with torch.no_grad():
            assert torch.allclose(model(input_ids=ids).logits, logits, atol=1e-5)
        assert runs[name].json("record.json")["checks"]["saved"][0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["0", "3"])
@pytest.mark.parametrize("kind", MUST)
def test_an_adapter_fits_the_original_class_and_merges_into_it(runs, models, kind, stage, tmp_path):
    base, run = models(kind), runs[f"{kind}-lora-{stage}"]
    original = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(original, run.folder / "final").eval()
    held = load_file(run.folder / "final" / "adapter_model.safetensors")
    own = {n.replace(".default", "") for n, _ in model.named_parameters() if "lora_" in n}
    assert own == held.keys()  # no module of the towers has an adapter
    ids, logits = kept_logits(run)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, logits, atol=1e-5)
    export.main([str(run.folder), "--merge", "--output_dir", str(tmp_path / "merged")])
    before, after = weights(base), weights(tmp_path / "merged")
    assert before.keys() == after.keys()
    for name in classes.names_of_towers(AutoConfig.from_pretrained(base), before):
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name])
    merged, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=ids).logits, logits, atol=1e-4)
    assert (tmp_path / "merged" / "preprocessor_config.json").exists()


# --- classes, without training ---


@pytest.mark.parametrize("kind", slow_but(KINDS, FAST))
def test_a_class_without_its_towers_computes_and_saves_what_the_original_does(models, kind, tmp_path):
    base = models(kind)
    config, ids = AutoConfig.from_pretrained(base), torch.arange(2, 34)[None]
    model, info = classes.for_text(config, True).from_pretrained(base, dtype=torch.float32, output_loading_info=True)
    towers.record_folder(model, config, base)
    assert not any(info.values()), info
    original = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    assert {n: p.shape for n, p in original.named_parameters() if not classes.holds(model.towers, n)} == {
        n: p.shape for n, p in model.named_parameters() if not classes.holds(model.towers, n)
    }
    with torch.no_grad():
        outputs = [one.eval()(input_ids=ids, use_cache=False).logits for one in (original, model)]
    assert torch.equal(*outputs)
    model.save_pretrained(tmp_path / "saved")
    before, after = weights(base), weights(tmp_path / "saved")
    assert before.keys() == after.keys() and all(torch.equal(before[n].float(), after[n].float()) for n in before)
    assert {after[name].dtype for name in model.tower_names} == {torch.bfloat16}


def settings_of(folder, *flags, recipe="sft"):
    given = ["--model", str(folder), "--data", str(TINY / "train.jsonl"), "--use_cpu", "true", *flags]
    settings = resolve.resolve(parse.request(recipe, given), 1)
    resolve.resolve_for_model(settings)
    return settings


def test_the_names_of_older_files_are_kept(models, tmp_path):
    """Gemma-3's files on the Hub say language_model.model.layers..., the class model.language_model.layers..."""
    base = models("gemma3")
    settings = settings_of(base)
    model = load_model(settings, load_tokenizer(settings))
    assert settings.towers == "drop" and not any(n.startswith("model.vision") for n, _ in model.named_parameters())
    assert any(name.startswith("language_model.model.layers") for name in saved.names_in(base))
    names = classes.file_names(load_config(settings), saved.names_in(base))
    assert names["model.language_model.norm.weight"] == "language_model.model.norm.weight"


@pytest.mark.injection
@pytest.mark.parametrize("part", ["vision_tower", "language_model"])
def test_a_missing_weight_is_refused_of_the_towers_too(models, part, tmp_path):
    """One of a tower would be a random number in the saved model of whoever loads it."""
    folder = tmp_path / "cut"
    folder.mkdir()
    for file in models("gemma3").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    held = load_file(folder / "model.safetensors")
    lost = next(name for name in sorted(held) if name.startswith(part) and "proj" in name)
    save_file({n: w for n, w in held.items() if n != lost}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="1 of its 62 weights are not in its files and would be random numbers"):
        check_weights(settings_of(folder))


@pytest.mark.bad_input
def test_refusals(models, tmp_path):
    base = models("gemma3")
    with pytest.raises(UserError, match="--towers keep: llama does not have towers; leave it out"):
        settings_of(TINY / "model", "--towers", "keep")
    with pytest.raises(UserError, match="--towers drop: --random_init creates them; use --towers keep"):
        settings_of(base, "--towers", "drop", "--random_init", "true")
    assert settings_of(base, "--random_init", "true").towers == "keep"
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "A cat."}]
    rows.write_text(json.dumps({"messages": turns, "images": ["cat.png"]}) + "\n")
    done = recipe_process("sft", "--model", str(base), "--data", str(rows), "--use_cpu", "true", "--output_dir",
                          str(tmp_path / "run"))  # fmt: skip
    assert done.returncode == 2 and "images" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_class_that_needs_a_tower_for_text_keeps_it(monkeypatch):
    """Gemma-3n embeds the tokens of images by its projector in each forward."""
    config = config_of("gemma3")
    original = type(classes.skeleton(config))
    forward = original.forward

    def needs_projector(self, *args, **kwargs):
        assert self.model.multi_modal_projector is not None
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(original, "forward", needs_projector)
    config.text_config.sliding_window = 17  # another configuration than was looked at before
    _, found, cannot, needed = classes.examined(config)
    assert len(found) == 2 and not cannot and "has no attribute 'multi_modal_projector'" in needed


@pytest.mark.slow
def test_a_run_goes_on_at_another_stage(models, tmp_path):
    """The checkpoints hold the towers too, under names of the files; those of ZeRO-3 their shards."""
    saving = ["--model", str(models("gemma3")), *FLAGS, "--save_strategy", "steps", "--save_steps", "1"]
    saving += ["--save_total_limit", "3"]
    before = run_world(1, {"0": ("sft", [*saving, "--zero", "0"])}, tmp_path)
    before |= run_world(2, {"3": ("sft", [*saving, "--zero", "3"])}, tmp_path)
    resumes = {
        f"{source}>{zero}": ("sft", [*saving, "--zero", zero, "--resume_from_checkpoint",
                                     str(before[source].folder / "checkpoint-1")])
        for source, zero in (("0", "0"), ("0", "2"), ("3", "0"))
    }  # fmt: skip
    for name, run in run_world(1, resumes, tmp_path).items():
        assert run.losses == pytest.approx(before["0"].losses[1:], rel=1e-5), name
        held = weights(run.folder / "checkpoint-3")
        assert held.keys() == weights(models("gemma3")).keys() == weights(before["3"].folder / "checkpoint-3").keys()


@pytest.mark.slow
def test_other_recipes(models, tmp_path):
    """QLoRA with the towers in memory, which are not packed; preference pairs; packed rows of Qwen's positions."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Say {i}", "chosen": "good answer", "rejected": "bad one"} for i in range(32)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    dpo = [str(pairs) if word.endswith("train.jsonl") else word for word in FLAGS]
    cases = {
        "4bit": ("lora", ["--model", str(models("gemma3")), *FLAGS, "--zero", "0", "--load_in_4bit", "true",
                          "--towers", "keep"]),
        "dpo": ("dpo", ["--model", str(models("qwen3_vl")), *dpo, "--zero", "2"]),
        "packed": ("sft", ["--model", str(models("qwen2_5_vl")), *FLAGS, "--zero", "0", "--packing", "true",
                           "--max_length", "128"]),
    }  # fmt: skip
    runs = run_world(1, cases, tmp_path)
    assert all(run.json("result.json")["status"] == "finished" for run in runs.values())
    assert runs["packed"].json("record.json")["checks"]["documents_apart"][0]
    before, after = weights(models("qwen3_vl")), weights(runs["dpo"].folder / "final")
    assert before.keys() == after.keys()
    export.main([str(runs["4bit"].folder), "--merge", "--output_dir", str(tmp_path / "merged")])
    before, after = weights(models("gemma3")), weights(tmp_path / "merged")
    assert before.keys() == after.keys()
    for name in classes.names_of_towers(AutoConfig.from_pretrained(models("gemma3")), before):
        assert torch.equal(before[name], after[name])
