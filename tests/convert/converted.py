"""Convert a text in a kit's form, and resolve the result as --show does."""

import json
from dataclasses import dataclass, field

import yaml
from counted import uncounted

from zerofit.config import resolve
from zerofit.convert import page
from zerofit.tools import convert


@dataclass(frozen=True)
class Case:
    """A file in a kit's form, and what that kit would train, worked out by hand from its documentation and source."""

    name: str
    text: str
    recipe: str  # that trains it here
    command: str  # the line in the file's head, after `make`
    expected: dict  # argument -> value after resolving
    absent: tuple[str, ...] = ()  # arguments that are not written
    ranks: int = 1  # of the job that is resolved
    gpus: int | None = None  # --gpus
    file: str = "theirs.yaml"
    lost: tuple[str, ...] = ()  # keys that are listed as without a counterpart
    on_gpus: dict = field(default_factory=dict)  # lines to uncomment on a GPU


def plain(value):
    """Return an enumeration's word, and an object from its JSON."""
    value = getattr(value, "value", value)
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value


def check(case, folder):
    """Convert, read with our own parser, resolve, and compare every expected value."""
    theirs = folder / case.file
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_text(case.text)
    done = convert.convert_files([str(theirs)], gpus=case.gpus)
    for name, content in convert.name_texts(done, "ours.yaml").items():
        (folder / name).write_text(content)
    text = page.text(done, convert._command(done, "ours.yaml"))
    convert.check(done, text)
    ours = folder / "ours.yaml"
    ours.write_text(text)
    assert done.recipe == case.recipe
    assert f"# make {case.command} CONFIG=ours.yaml" in text.splitlines()
    settings = resolve.resolve_settings(done.recipe, ["--config", str(ours)], case.ranks, arguments_only=True)
    found = {name: settings.values[name] for name in case.expected}
    found = {name: plain(value) for name, value in found.items()}
    wrong = {name: (found[name], value) for name, value in case.expected.items() if found[name] != value}
    assert not wrong, f"(found, expected): {wrong}"
    written = yaml.safe_load(text)
    assert not written.keys() & set(case.absent)
    assert set(case.lost) <= done.lost.keys(), done.lost
    on_gpus = {name: line.value for name, line in done.on_gpus.items()}
    assert on_gpus == case.on_gpus, on_gpus
    # each line says where it comes from, and no key of theirs is dropped without a word
    for line in text.splitlines():
        assert not line or line.startswith("#") or "  # " in line, line
    missing = uncounted(yaml.safe_load(case.text), done, text)
    assert not missing, missing
    unknown = [key for key, why in done.lost.items() if "unknown" in why]
    assert not unknown, unknown
    return done, text
