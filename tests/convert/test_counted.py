"""No key of a file is lost: the counting rule over all keys of all kits, and the files that it was made for."""

import itertools

import pytest
import yaml
from counted import said_of, uncounted

from zerofit.base.errors import UserError
from zerofit.commands import convert
from zerofit.convert import kits
from zerofit.convert.conversion import convert as converted

BASES = {
    "axolotl": "base_model: a/b\ndatasets: [{path: a.jsonl, type: alpaca}]\n",
    "LLaMA-Factory": "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ndataset: a.jsonl\n",
    "ms-swift": "model: a/b\ntuner_type: lora\ndataset: a.jsonl\n",
    "TRL": "model_name_or_path: a/b\ndataset_name: c/d\n",
    "alignment-handbook": "model_name_or_path: a/b\ndataset_mixer: {c/d: 1.0}\n",
    "unsloth": "model: a/b\ntraining: {training_type: lora}\ndata: {dataset: c/d}\n",
    "torchtune": "model: {_component_: torchtune.models.llama3.llama3_8b}\n"
    "checkpointer: {checkpoint_dir: a}\ndataset: {_component_: torchtune.datasets.alpaca_dataset}\n"
    "optimizer: {_component_: torch.optim.AdamW}\n",
    "accelerate": "distributed_type: MULTI_GPU\nnum_processes: 2\n",
    "DeepSpeed": "zero_optimization: {stage: 2}\n",
}

VALUES = (True, False, None, 0, 2, "words", [], ["a"], {"a": 1})
OFF = (None, 0, [])  # beside False, which says the same


def keys_in_tables(kit):
    """Return every key that a kit's tables name; a prefix as one key of it."""
    texts = [*kit.lost.values(), *kit.refused.values(), *(rule.keys for rule in kit.rules)]
    named = {*kit.keys, *kit.defaults, *kit.marks, *itertools.chain(*(text.split() for text in texts)), "unheard_of"}
    return sorted(key.replace("*", "x") for key in named if "," not in key and not key.endswith("."))


def with_key(base, key, value, nested):
    """Return a base with one key; a dotted one of a kit with sections below its section, of a set in each set."""
    section, dot, name = key.partition(".")
    if not dot:
        return base | {key: value}
    held = base.get(section, {})
    if isinstance(held, list):
        return base | {section: [one | {name: value} for one in held]}
    return base | {section: (held if isinstance(held, dict) else {}) | {name: value}}


@pytest.mark.parametrize("kit", kits.KITS, ids=lambda kit: kit.name)
def test_no_key_of_a_kit_vanishes_with_any_value(kit, tmp_path):
    base = yaml.safe_load(BASES[kit.name])
    failures, same = [], {}
    for key, value in itertools.product(keys_in_tables(kit), VALUES):
        theirs = with_key(base, key, value, kit.nested)
        try:
            done = converted(kit, theirs, tmp_path / "a.yaml", names=convert.names())
            convert.name_texts(done, "b.yaml")
        except UserError:
            continue
        failures += [f"{missing}: {value!r}" for missing in uncounted(theirs, done, said_of(done))]
        if any(place.replace(": ", ".") == key for place in done.same) and (value is False or value not in OFF):
            same.setdefault(key, []).append(value)
    assert not failures, failures
    both = {key: values for key, values in same.items() if len(values) > 1}
    assert not both, both
