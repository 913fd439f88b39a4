"""`zerofit convert`: the file that it writes, what it says, and what it refuses; a foreign file given as --config."""

import re

import pytest
import yaml
from conftest import ROOT

from zerofit.base.errors import UserError
from zerofit.cli import LIGHT, USAGE, VERBS
from zerofit.config import parse, synonyms
from zerofit.convert import kits, page
from zerofit.convert.conversion import Conversion, number
from zerofit.convert.page import written
from zerofit.tools import convert

QLORA = """
base_model: a/b
adapter: qlora
lora_r: 8
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
learning_rate: 2e-4
sequence_len: 1024
datasets: [{path: rows.jsonl, type: alpaca}]
unheard_of: 5
lora_fan_in_fan_out: true
group_by_length: false
special_tokens: {pad_token: x}
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qlora.yml").write_text(QLORA)
    return tmp_path / "qlora.yml"


def test_the_file_and_the_terminal_say_the_same(theirs, tmp_path, capsys):
    convert.main([str(theirs)])
    printed = capsys.readouterr().out
    text = (tmp_path / "qlora.zerofit.yaml").read_text()
    assert yaml.safe_load(text)["per_device_train_batch_size"] == 2
    assert re.search(r"^lora_r: 8 +# lora_r$", text, re.M)
    assert re.search(r"^per_device_train_batch_size: 2 +# micro_batch_size$", text, re.M)
    assert re.search(r"^max_grad_norm: 1.0 +# axolotl's default$", text, re.M)
    for line in (
        "- lora_fan_in_fan_out: True -- LoRA's layers and ranks are the same everywhere",
        "- unheard_of: 5 -- unknown key (axolotl 0.19.0)",
        "- special_tokens -- special tokens are the tokenizer's",
        "- effective batch: 8 x the number of data-parallel GPUs",
    ):
        assert f"\n# {line}" in text and f"\n  {line}" in printed
    same = "Set to the default: group_by_length"  # it is off, and off here
    assert f"\n# {same}\n" in text and f"\n{same}\n" in printed
    assert printed.endswith("next: make lora CONFIG=qlora.zerofit.yaml\n")


def test_a_template_becomes_a_file_beside_the_converted_one(theirs, tmp_path, capsys):
    theirs.write_text(
        QLORA + 'chat_template: jinja\nchat_template_jinja: "{% for m in messages %}\\n{{ m }}{% endfor %}"\n'
    )
    (tmp_path / "sub").mkdir()
    convert.main([str(theirs), "--output", "sub/mine.yaml"])
    assert yaml.safe_load((tmp_path / "sub" / "mine.yaml").read_text())["chat_template"] == "sub/mine.jinja"
    assert (tmp_path / "sub" / "mine.jinja").read_text() == "{% for m in messages %}\n{{ m }}{% endfor %}\n"
    (tmp_path / "qlora.zerofit.jinja").write_text("mine")
    with pytest.raises(UserError, match=r"qlora\.zerofit\.jinja: already exists"):
        convert.main([str(theirs)])
    assert not (tmp_path / "qlora.zerofit.yaml").exists()
    capsys.readouterr()
    convert.main([str(theirs), "--output", "-"])
    assert "chat_template_jinja: {% for m in messages %}" in capsys.readouterr().out


def test_keys_of_a_section_are_one_line(tmp_path):
    file = tmp_path / "tune.yaml"
    file.write_text(
        "model: {_component_: torchtune.models.llama3.llama3_8b}\ndataset: {_component_: torchtune.datasets.x}"
        "\noptimizer: {_component_: torch.optim.AdamW}\nprofiler: {enabled: false, cpu: true, cuda: true}\n"
    )
    done = convert.convert_files([str(file)])
    lines = [line for line in page.text(done, "make sft").splitlines() if "profiler" in line]
    assert lines == [
        "# - profiler: cpu, cuda -- memory_report: true records the memory of a step",
        "# Set to the default: profiler.enabled",
    ]


def test_the_terminal_alone(theirs, tmp_path, capsys):
    convert.main([str(theirs), "--output", "-"])
    assert yaml.safe_load(capsys.readouterr().out)["model"] == "a/b"
    assert [file.name for file in tmp_path.iterdir()] == ["qlora.yml"]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "text, flags, sentence",
    [
        (QLORA, ["--gpus", "0"], "--gpus 0: it must be 1 or more"),
        (QLORA, ["--kit", "peft"], "--kit peft: must be one of axolotl"),
        ("a: 1\nb: 2\n", [], "set --kit to one of axolotl"),
        ("a: [1\n", [], r"qlora.yml:2:1: not valid YAML"),
        ("- 1\n", [], "must hold `key: value` lines"),
        (QLORA.replace("2e-4", "fast"), [], "learning_rate is fast: it must be a number"),
        (QLORA.replace("2e-4", "-1"), [], "learning_rate is -1: it must be 0 or more"),
        (
            "distributed_type: MULTI_GPU\nnum_processes: many\nmachine_rank: 0\n",
            [],
            r"num_processes is many: it must be a number \(gpus\)",
        ),
        (QLORA + "rl: grpo\n", [], "rl: grpo: not supported; zerofit trains SFT, LoRA and preferences"),
    ],
)
def test_it_refuses(text, flags, sentence, theirs, tmp_path):
    theirs.write_text(text)
    with pytest.raises(UserError, match=sentence):
        convert.main([str(theirs), *flags])
    assert [file.name for file in tmp_path.iterdir()] == ["qlora.yml"]


@pytest.mark.bad_input
def test_it_overwrites_nothing(theirs, tmp_path):
    (tmp_path / "mine.yaml").write_text("zero: 3\n")
    with pytest.raises(UserError, match=r"mine\.yaml: already exists; .*--output"):
        convert.main([str(theirs), "--output", "mine.yaml"])
    assert (tmp_path / "mine.yaml").read_text() == "zero: 3\n"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "text, kit",
    [
        (QLORA, "axolotl"),
        ("stage: sft\nfinetuning_type: lora\ncutoff_len: 8\nmodel_name_or_path: a\nlora_rank: 2\n", "LLaMA-Factory"),
        ("train_type: lora\nmodel: a\nsplit_dataset_ratio: 0.1\nlora_rank: 2\n", "ms-swift"),
        ("model_name_or_path: a\ndataset_name: b\nlearning_rate: 1e-5\nuse_peft: true\n", "TRL"),
        ("model_name_or_path: a\ndataset_mixer: {b: 1}\nmax_seq_length: 8\n", "alignment-handbook"),
        ("model: a\ndata: {dataset: b}\ntraining: {training_type: lora, max_seq_length: 8}\n", "unsloth"),
        ("model: {_component_: a}\ntokenizer: {_component_: b, max_seq_len: null}\n", "torchtune"),
        ("distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\n", "accelerate"),
        ('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}', "DeepSpeed"),
    ],
)
def test_a_foreign_file_as_config_gives_one_short_sentence(text, kit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        parse.read_yaml("theirs.yaml", parse.program.recipe_of("sft"))
    sentence = str(refused.value)
    assert sentence.startswith("theirs.yaml: ") and f" {kit} file (" in sentence and len(sentence) < 200
    assert "`zerofit convert theirs.yaml`" in sentence
    assert kits.detect(kits.read("theirs.yaml"))[0].name == kit


def test_no_file_of_ours_is_taken_for_another_kits():
    recipe = parse.program.recipe_of("dpo")
    for file in [*ROOT.glob("examples/*.yaml"), *ROOT.glob("examples/tiny/**/*.yaml")]:
        assert (
            kits.foreign(yaml.safe_load(file.read_text()), str(file), frozenset(parse.argument_names(recipe))) is None
        )


def test_a_single_foreign_key_is_answered_by_its_name(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("base_model: a\nzero: 2\n")
    with pytest.raises(UserError, match="unknown key 'base_model'; did you mean model"):
        parse.read_yaml(str(file), parse.program.recipe_of("sft"))


def test_every_argument_of_the_tables_is_one_of_ours():
    known = convert.names().accepted
    named = {key.ours for kit in kits.KITS for key in kit.keys.values()}
    assert named - known == set()


def test_a_table_has_a_key_once():
    for kit in kits.KITS:
        lost = [key for keys in kit.lost.values() for key in keys.split()]
        twice = {key for key in lost if lost.count(key) > 1} | (set(lost) & kit.keys.keys())
        assert twice == set(), kit.name


def test_numbers_are_read_and_names_are_not():
    assert number("2e-5") == 2e-5 and number("8") == 8 and number("zero3") == "zero3"
    done = Conversion(kits.KITS[0], {}, ROOT / "x.yaml")
    done.put("model_revision", "3.10", "revision")
    done.put("learning_rate", "1e-5", "learning_rate")
    assert (done.lines["model_revision"].value, done.lines["learning_rate"].value) == ("3.10", 1e-5)
    assert [written(value) for value in ("no", 1e-5, [1, "a: b"], {"min_lr": 0.1})] == [
        "'no'",
        "1.0e-05",
        "[1, 'a: b']",
        "{min_lr: 0.1}",
    ]


def test_the_verb_is_listed_and_needs_no_torch():
    assert VERBS["convert"] == "tools.convert" and "convert" not in LIGHT and "zerofit convert" in USAGE
    assert not set(synonyms.NO_GUESS) & synonyms.RENAMED.keys()
