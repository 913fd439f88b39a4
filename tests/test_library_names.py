"""The check of names and signatures against libraries that are not installed finds what a newer one has lost."""

import functools
import sysconfig
import zipfile
from pathlib import Path

import library_names
import pytest
from conftest import ROOT

INSTALLED = Path(sysconfig.get_path("purelib"))


@pytest.mark.slow
def test_the_installed_libraries_have_every_name():
    assert library_names.problems(INSTALLED) == []


LOST = {  # what a newer accelerate does: what is said
    'from .deepspeed import *\nfrom .send import send_to_device as send\n': "accelerate.utils has no send_to_device",
    'send_to_device = 1\n': "",
    '_import_structure = {"send": ["send_to_device"]}\n': "",
    'try:\n    from .send import send_to_device\nexcept ImportError:\n    pass\n': "",
}  # fmt: skip


@pytest.mark.parametrize("text", LOST)
def test_a_name_that_a_wheel_has_lost_is_said(text, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "accelerate-9.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("accelerate/__init__.py", "")
        wheel.writestr("accelerate/utils/__init__.py", text)
        wheel.writestr("accelerate/utils/send.py", "def send_to_device(): ...\n")
    monkeypatch.setattr(library_names, "taken", lambda: [("train/trainer.py", "accelerate.utils", "send_to_device")])
    monkeypatch.setattr(library_names, "overridden", list)
    found = [one for one in library_names.problems(tmp_path) if "patches.toml" not in one]
    assert found == [f"train/trainer.py: {LOST[text]}"] * bool(LOST[text])


TRAINERS = {  # methods of a newer Trainer: what is said of ours
    "def _load_best_model(self): ...": "",
    "def _load_the_best_model(self): ...": "Trainer has no _load_best_model, which would never be called",
    "def _load_best_model(self, folder): ...": "Trainer._load_best_model is given folder, which ours does not take",
    "def _load_best_model(self, *, how=1): ...": "Trainer._load_best_model is given how, which ours does not take",
}


@functools.cache
def our_override():
    (ours,) = [one for one in library_names.overridden() if one[3] == "_load_best_model"]
    return ours


@pytest.mark.parametrize("method", TRAINERS)
def test_an_override_of_another_form_is_said(method, tmp_path, monkeypatch):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("")
    (tmp_path / "transformers" / "trainer.py").write_text(f"class Base:\n    {method}\nclass Trainer(Base): ...\n")
    ours = [our_override()]
    monkeypatch.setattr(library_names, "taken", list)
    monkeypatch.setattr(library_names, "overridden", lambda: ours)
    found = [one for one in library_names.problems(tmp_path) if "patches.toml" not in one]
    assert found == [f"train/trainer.py: {TRAINERS[method]}"] * bool(TRAINERS[method])


def test_what_is_looked_at_is_what_src_takes():
    taken = library_names.taken()
    assert len(taken) > 100 and ("train/trainer.py", "transformers.trainer_utils", "EvalLoopOutput") in taken
    methods = {(file, name) for file, _, _, name, _ in library_names.overridden()}
    assert {("train/trainer.py", "_clip_grad_norm"), ("train/trainer.py", "_get_num_items_in_batch")} <= methods
    assert all((ROOT / "src" / "zerofit" / file).is_file() for file, _, _ in taken)
