"""The order of the resolvers, and settings that nothing else changes."""

import ast
import copy
import json
import pickle
import re
from dataclasses import FrozenInstanceError

import pytest
from conftest import ROOT

from zerofit.config import resolve
from zerofit.settings import AFTER_RESOLVING, decide

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
    for name in AFTER_RESOLVING:
        setattr(other, name, getattr(settings, name))
    assert other.output_dir == settings.output_dir and other.deepspeed == settings.deepspeed
    with pytest.raises(FrozenInstanceError):
        other.deepspeed["zero_optimization"]["stage"] = 3
    other.thaw()
    with pytest.raises(AttributeError, match="leraning_rate is no argument of recipes"):
        other.leraning_rate = 1.0


def test_every_exception_has_a_writer():
    """Each name of AFTER_RESOLVING is assigned outside of the resolvers; a name that nobody needs is taken out."""
    text = "\n".join(file.read_text() for file in SRC.rglob("*.py"))
    for name in AFTER_RESOLVING:
        assert re.search(rf"settings\.{name}(, settings\.\w+)? \+?= ", text), name


def test_only_the_list_thaws_settings():
    thawing = {
        str(file.relative_to(SRC))
        for file in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "thaw"
    }
    assert thawing == {"config/resolve.py", "settings.py"}


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


def test_every_resolver_is_in_one_list():
    """A function called resolve or resolve_for_model that no list holds would never run."""
    listed = {f"{f.__module__}.{f.__name__}" for f in (*resolve.FROM_FLAGS, *resolve.FROM_MODEL_CONFIG)}
    defined = {
        f"zerofit.{'.'.join(file.relative_to(SRC).with_suffix('').parts)}.{node.name}"
        for folder in ("config", "data", "model", "optim", "train")
        for file in (SRC / folder).glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name in ("resolve", "resolve_for_model")
    } - {"zerofit.config.resolve.resolve_for_model"}
    assert defined <= listed and len(listed) == len(resolve.FROM_FLAGS) + len(resolve.FROM_MODEL_CONFIG)
