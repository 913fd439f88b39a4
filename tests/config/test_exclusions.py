"""Technique x technique x stage: what is refused is on the page, and what is accepted trains."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from compatibility import STAGES, TECHNIQUES, contained, flags, verdict
from conftest import ROOT, TINY, slow_but

from zerofit.base.errors import UserError
from zerofit.commands import compatible
from zerofit.config import resolve
from zerofit.job.technique import AllBut, Conflict, Technique, refuse_conflicts
from zerofit.model import load

BASE = ["--data", str(TINY / "train.jsonl"), "--max_samples", "16", "--max_steps", "2", "--max_length", "128",
        "--per_device_train_batch_size", "4", "--logging_steps", "1", "--save_strategy", "no", "--num_samples", "0",
        "--shuffle_buffer_size", "8"]  # fmt: skip

# Those of which every accepted pair is trained.
TRAINED = (
    "gradient accumulation", "no gradient checkpointing", "checkpointing of every Nth layer", "selective checkpointing",
    "activation offload", "bf16", "fp16", "pure bf16", "packing", "padding-free batches", "streaming", "fused loss",
    "tiled MLP", "adamw_8bit", "adafactor", "lion_32bit", "sgd", "muon", "sophia", "optimizer offload",
    "optimizer and parameter offload", "LoRA", "DoRA", "LoRA+", "PiSSA and OLoRA", "IA3", "prompt tuning",
    "4-bit base", "8-bit base",
)  # fmt: skip


def of(*names):
    return tuple(TECHNIQUES[name] for name in names)


def test_pairs_are_refused_by_name():
    both = verdict(of("LoRA+", "sophia"), "0", BASE)
    assert both.startswith("--loraplus_lr_ratio 4.0 with --optim sophia: ")
    assert verdict(of("LoRA+"), "0", BASE) == verdict(of("sophia"), "0", BASE) == ""
    assert verdict(of("bf16", "pure bf16"), "0", BASE) == ""
    assert verdict(of("sgd", "lion_32bit"), "0", BASE) == "-"


def runs_here():
    """The techniques that this machine's CPU and packages, and one rank, can train with at some stage."""
    return [t for t in TECHNIQUES.values() if any(verdict((t,), zero, BASE) == "" for zero in STAGES)]


def test_every_technique_that_a_cpu_can_train_is_accepted_alone():
    names = {technique.name for technique in runs_here()}
    assert set(TRAINED) - names <= {"fp16"}
    # Ranks, a GPU, a package or a pair's rows are missing for these.
    assert TECHNIQUES.keys() - names <= {
        "fp16", "paged_adamw_32bit", "paged_adamw_8bit", "galore_adamw", "apollo_adamw", "Liger kernels", "NVMe",
        "SuperOffload", "ZeRO++ qwZ", "ZeRO++ qgZ", "ZeRO++ hpZ", "tensor parallelism", "sequence parallelism",
        "pipeline", "preference loss", "fp8",
    }  # fmt: skip


def excluded(one, other, zero):
    """Whether a conflict of one, or of what it contains, is about the other at this stage."""
    return any(
        conflict.excludes(part) and (conflict.stages is None or int(zero) in conflict.stages)
        for whole in contained(one)
        for conflict in whole.conflicts
        for part in contained(other)
    )


@pytest.mark.parametrize("zero", slow_but(STAGES, STAGES[-1:]))
def test_a_pair_is_refused_where_a_conflict_says_so(zero):
    """And nowhere else, with the words of the page: the objects, the page and the checks say the same."""
    page = "\n".join(compatible.page(compatible.shown()))
    here = runs_here()
    alone = {technique.name: verdict((technique,), zero, BASE) for technique in here}
    reasons = {conflict.why for technique in TECHNIQUES.values() for conflict in technique.conflicts}
    refused = 0
    for one, other in itertools.combinations(here, 2):
        said, pair = verdict((one, other), zero, BASE), f"{one.name} + {other.name}"
        if said == "-":
            continue
        by_conflict = excluded(one, other, zero) or excluded(other, one, zero)
        recipe = flags((one, other), zero)[0]  # new tokens alone train with LoRA, with --freeze they do not
        refused_alone = [t for t in (one, other) if alone[t.name] and (said or flags((t,), zero)[0] == recipe)]
        assert bool(said) == bool(by_conflict or refused_alone), f"{pair}: {said or 'accepted'}"
        if said and said not in alone.values():
            refused += 1
            assert any(why in said and why in page for why in reasons), f"{pair}: {said}"
    assert refused > 15


# --- a technique of one's own, as a recipe names it ---


@dataclass
class Dummy:
    """Dummy."""

    dummy_parts: int = 1


def dummy(calls):
    """A technique that notes the calls of its hooks in a list."""
    return Technique(
        name="dummy",
        flag="dummy_parts",
        example="--dummy_parts 2",
        arguments=Dummy,
        conflicts=(Conflict("optim", ("sgd",), "it is tested with Adam only", "use adamw_torch_fused"),),
        resolve=lambda settings: calls.append(("resolve", settings.max_length)),
        resolve_for_model=lambda settings, config: calls.append(("config", config.model_type)),
        install=lambda settings, model: calls.append(("install", type(model).__name__)),
    )


def test_a_technique_of_ones_own_is_resolved_refused_and_installed(monkeypatch):
    calls = []
    with_dummy = (*resolve.TECHNIQUES, dummy(calls))
    monkeypatch.setattr(resolve, "techniques_of", lambda settings: with_dummy)
    settings = resolve.resolve_settings("sft", BASE, 1)
    resolve.resolve_for_model(settings)
    resolve.install(settings, load.check_model(settings))
    assert calls == [("resolve", 128), ("config", "llama"), ("install", "LlamaForCausalLM")]


@pytest.mark.bad_input
def test_a_conflict_of_a_technique_names_both_arguments_cause_and_fix():
    settings = resolve.resolve_settings("sft", [*BASE, "--optim", "sgd"], 1)
    refuse_conflicts(dummy([]), settings)  # its flag is not there: off
    settings = settings.replace()
    settings.unseal()
    settings.values["dummy_parts"] = 2
    with pytest.raises(UserError) as caught:
        refuse_conflicts(dummy([]), settings)
    expected = "--dummy_parts 2 with --optim sgd: it is tested with Adam only; use adamw_torch_fused."
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("values", "value", "on"),
    [
        (None, None, False), (None, False, False), (None, 0, False), (None, 1, False), (None, "none", False),
        (None, "auto", False), (None, 2, True), (None, 0.5, True), (None, "folder", True), (None, ["a"], True),
        (("sgd",), "sgd", True), (("sgd",), "muon", False), ((True,), "auto", False), (("b",), ["a", "b"], True),
        (AllBut("lora"), "ia3", True), (AllBut("lora"), "lora", False), (AllBut("lora"), None, False),
    ],
)  # fmt: skip
def test_when_a_technique_is_on(values, value, on):
    settings = SimpleNamespace(values={"flag": value})
    assert Technique(name="one", flag="flag", values=values).is_on(settings) is on


@pytest.mark.slow
@pytest.mark.parametrize("zero", STAGES)
@pytest.mark.timeout(7200)
def test_every_pair_that_is_accepted_trains(zero, tmp_path):
    trained = of(*TRAINED)
    cases = []
    for techniques in [*((one,) for one in trained), *itertools.combinations(trained, 2)]:
        if verdict(techniques, zero, BASE) == "":
            recipe, words = flags(techniques, zero)
            name = " with ".join(one.name for one in techniques)
            folder = tmp_path / name.replace(" ", "_")
            cases.append({"name": name, "recipe": recipe, "flags": [*BASE, *words, "--output_dir", str(folder)]})
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(cases))
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1",
         str(ROOT / "benchmarks" / "ledger_world.py"), str(file)],
        check=True, timeout=7000, env=os.environ | {"OMP_NUM_THREADS": "2"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    failed = {}
    for case in cases:
        folder = tmp_path / case["name"].replace(" ", "_")
        result = json.loads((folder / "result.json").read_text()) if (folder / "result.json").exists() else {}
        if result.get("status") != "finished" or not 0 < result["last_loss"] < 20:
            said = folder / "error.txt"
            failed[case["name"]] = said.read_text()[:300] if said.exists() else str(result)[:300]
    assert not failed, json.dumps(failed, indent=1)
    assert len(cases) > 100
