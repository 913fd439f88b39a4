"""The order of the resolvers, and settings that nothing else changes."""

import ast
import copy
import json
import pickle
import re
from dataclasses import FrozenInstanceError
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from conftest import ROOT

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import arguments, resolve
from zerofit.job import technique
from zerofit.job.settings import LATE_FIELDS, WORD_ARGUMENTS, decide

SRC = ROOT / "src" / "zerofit"


@pytest.fixture(scope="module", params=["flags", "model"])
def settings(request):
    found = resolve.resolve_settings("sft", ["--zero", "2"], 2)
    if request.param == "model":
        resolve.resolve_for_model(found)
    return found


@pytest.mark.parametrize(
    "write",
    [
        lambda s: decide(s, "bf16", True, "a test"),
        lambda s: setattr(s, "learning_rate", 1.0),
        lambda s: setattr(s, "world_size", 3),
        lambda s: s.values.update(seed=3),
        lambda s: s.values.__setitem__("seed", 3),
        lambda s: s.source.pop("seed"),
        lambda s: s.deepspeed.setdefault("checkpoint", {}),
        lambda s: s.deepspeed["zero_optimization"].__setitem__("stage", 3),
    ],
)
def test_nothing_changes_resolved_settings(settings, write):
    before = json.dumps([settings.values, settings.source, settings.deepspeed, settings.decisions], default=str)
    with pytest.raises(FrozenInstanceError):
        write(settings)
    assert json.dumps([settings.values, settings.source, settings.deepspeed, settings.decisions], default=str) == before


def test_the_exceptions_are_written_and_an_unknown_name_is_refused(settings):
    other = settings.replace(output_dir="first")
    for name in LATE_FIELDS:
        setattr(other, name, getattr(settings, name))
    assert other.output_dir == settings.output_dir and other.deepspeed == settings.deepspeed
    with pytest.raises(FrozenInstanceError):
        other.deepspeed["zero_optimization"]["stage"] = 3
    other.unseal()
    with pytest.raises(AttributeError, match="leraning_rate is not an argument of recipes"):
        other.leraning_rate = 1.0


def test_every_exception_has_a_writer():
    """Each name of LATE_FIELDS is assigned outside of the resolvers; a name that nobody needs is taken out."""
    text = "\n".join(file.read_text() for file in SRC.rglob("*.py"))
    for name in LATE_FIELDS:
        assert re.search(rf"settings\.{name}(, settings\.\w+)? \+?= ", text), name


def test_only_the_list_unseals_settings():
    unsealing = {
        str(file.relative_to(SRC))
        for file in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "unseal"
    }
    assert unsealing == {"config/resolve.py", "job/settings.py"}


def test_another_job_is_a_copy(settings):
    other = settings.replace(deepspeed=None, per_device_train_batch_size=7)
    other.decisions.append("of the other")
    assert (other.deepspeed, other.per_device_train_batch_size) == (None, 7)
    assert settings.deepspeed is not None and settings.per_device_train_batch_size != 7
    assert "of the other" not in settings.decisions


def test_copies_and_pickles_of_frozen_values_are_plain():
    """DeepSpeed and transformers fill in the "auto" of their copy."""
    config = resolve.resolve_settings("sft", ["--zero", "3"], 2).deepspeed
    for plain in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(plain) is type(plain["zero_optimization"]) is dict and plain == config


def test_the_model_is_resolved_once(settings):
    other = settings.replace()
    resolve.resolve_for_model(other)
    said = list(other.decisions)
    resolve.resolve_for_model(other)
    assert other.decisions == said and other.fused_loss != "auto"


def test_an_argument_is_set_in_one_way():
    """By `decide`, which records where the value comes from; values and source are written in settings.py alone."""
    found = resolve.resolve_settings("sft", [], 1)
    found.unseal()
    with pytest.raises(FrozenInstanceError, match="max_length: use `decide`"):
        found.max_length = 3
    decide(found, "max_length", 3, source="a test")
    assert (found.max_length, found.source["max_length"]) == (3, "a test")
    writes = re.compile(r"settings\.(values|source)(\[[^]]*\])? (\|=|=) ")
    others = [file for file in SRC.rglob("*.py") if file.name != "settings.py" and writes.search(file.read_text())]
    assert others == []


# --- types ---


def test_an_editor_knows_every_argument():
    """Settings inherits every group of arguments, as a type checker reads settings.py."""
    body = ast.parse((SRC / "job" / "settings.py").read_text()).body
    block = next(node for node in body if isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING")
    bases = [ast.unparse(base).removeprefix("arguments.") for base in block.body[-1].bases]
    assert sorted(bases) == sorted(["TrainingArguments", *(g.__name__ for g in arguments.kit_groups("dpo"))])


def fits(value, kind) -> bool:
    """Whether a value has the type of an annotation of config/arguments.py."""
    if get_origin(kind) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(fits(item, get_args(kind)[0]) for item in value)
    if get_args(kind):  # a union
        return any(fits(value, each) for each in get_args(kind))
    return isinstance(value, (int, float)) if kind is float else type(value) is (kind or type(None))


COMMAND_LINES = [
    ("sft", ""),
    ("lora", "--zero 3 --offload all --padding_free false --fused_loss True --canary true"),
    ("lora", "--adapter prompt_tuning --fused_loss auto --tiled_mlp auto"),
    ("sft", "--deepspeed deepspeed_configs/zero2.json --packing true --preset gpu-24g"),
]


@pytest.mark.parametrize(("recipe", "flags"), COMMAND_LINES)
def test_values_have_the_annotated_types(recipe, flags, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = resolve.resolve_settings(recipe, flags.split(), 2)
    resolve.resolve_for_model(settings)
    for group in arguments.kit_groups(recipe):
        for name, kind in get_type_hints(group).items():
            if not name.startswith("_"):
                assert fits(getattr(settings, name), kind), f"{name}: {getattr(settings, name)!r} is no {kind}"
    assert type(settings.zero) is int and {type(settings.padding_free), type(settings.fused_loss)} == {bool}


def test_files_hold_the_words_of_the_command_line():
    """Run folders of earlier versions, and the checkpoints in them, are read with these words."""
    kinds = {name: kind for group in arguments.kit_groups("lora") for name, kind in get_type_hints(group).items()}
    typed = {n for n, kind in kinds.items() if get_origin(kind) is Literal and {*map(type, get_args(kind))} != {str}}
    assert typed == set(WORD_ARGUMENTS)
    words = resolve.resolve_settings("sft", "--zero 2 --padding_free true --fused_loss false".split(), 2).written()
    assert [words[name] for name in WORD_ARGUMENTS] == ["2", "auto", "true", "false"]


@pytest.mark.bad_input
def test_a_wrong_word_is_refused_with_the_choices():
    with pytest.raises(UserError, match=r"--padding_free yes: must be one of auto, true, false\.$"):
        resolve.resolve_settings("sft", ["--padding_free", "yes"], 1)


def test_every_technique_and_resolver_is_in_one_list():
    """One that no list holds would never run; config/resolve.py's own functions have the names of what they call."""
    hooks = [getattr(one, hook) for one in resolve.TECHNIQUES for hook in ("resolve", "resolve_for_model", "install")]
    listed = [f"{f.__module__}.{f.__name__}" for f in (*resolve.ARGUMENTS, *hooks) if f is not technique._nothing]
    assert len(listed) == len(set(listed))
    defined = {
        f"zerofit.{'.'.join(file.relative_to(SRC).with_suffix('').parts)}.{node.name}"
        for folder in ("config", "data", "model", "objective", "optim", "train")
        for file in (SRC / folder).rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in ("resolve", "resolve_for_model", "install")
    }
    assert defined - {f"zerofit.config.resolve.{name}" for name in ("resolve", "resolve_for_model", "install")} == {
        name
        for name in listed
        if name.rpartition(".")[2] in ("resolve", "resolve_for_model", "install") and ".parallel." not in name
    } | {"zerofit.model.fused_loss.install"}  # which returns the loss that the trainer then calls


@pytest.mark.parametrize("has_bf16", [True, False])
def test_precision_on_a_cpu(monkeypatch, has_bf16):
    """The same on every machine: bf16 is advised where the CPU multiplies such numbers itself, and never chosen.

    Where it does not, a line says that the bf16 that was asked for is slow.
    """
    monkeypatch.setattr(hardware, "cpu_has_bf16", lambda: has_bf16)
    settings = resolve.resolve_settings("sft", [], 1)
    assert settings.precision == "fp32"
    (said,) = [sentence for sentence in settings.decisions if sentence.startswith("precision fp32: exact")]
    assert ("(--bf16 true)" in said) == has_bf16
    for flag in ("--bf16", "--pure_bf16"):
        asked = resolve.resolve_settings("sft", [flag, "true"], 1)
        assert asked.precision == "bf16"
        assert any("does not support bf16" in sentence for sentence in asked.decisions) != has_bf16


@pytest.mark.parametrize(("words", "rows"), [
    (["--per_device_train_batch_size", "2"], 2), (["--per_device_train_batch_size", "16"], 8),
    (["--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "4"], 4),
])  # fmt: skip
def test_evaluation_takes_no_more_rows_than_a_micro_batch(words, rows):
    settings = resolve.resolve_settings("sft", [*words, "--eval_fraction", "0.1"], 1)
    assert settings.per_device_eval_batch_size == rows
    assert any("per_device_eval_batch_size 2: " in said for said in settings.decisions) == (rows == 2)
