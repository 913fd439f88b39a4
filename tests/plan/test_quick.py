"""The quick answer of a plan: by the same closed forms as all candidates, without importing torch or transformers."""

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT, TINY, slow_but

from zerofit.base import hardware
from zerofit.config import parse
from zerofit.plan import candidates, search, simulate
from zerofit.plan.answer import quick

CONFIGS = ROOT / "tests" / "configs"
# The model, GPUs and flags of a plan.
CASES = {
    "one GPU": ("qwen3-8b", "l40s-48g", 1, ""),
    "one node": ("llama3.1-8b", "h100-80g", 8, ""),
    "tied and biased": ("qwen2.5-0.5b", "rtx4090-24g", 2, "--max_length 1024 --effective_batch_size 24"),
    "windows": ("mistral-7b", "a100-80g", 8, "--max_length 8192"),
    "many nodes": ("llama3.1-70b", "h100-80g", 256, ""),
    "named": ("llama3.2-1b", "a10g-24g", 1, "--zero 2 --offload none --per_device_train_batch_size 2"),
    "named stage": ("llama3.1-8b", "h200-141g", 4, "--zero 3 --per_device_train_batch_size 2"),
}


def by_setting(found):
    """{what a setting is: the rest}"""
    return {
        (s.zero, s.offload, s.every, s.selective, s.activation_offload, s.micro, s.accumulation): rest
        for s, *rest in found
    }


METHODS = {f"{method}, {case}": (method, *of) for method in quick.METHODS for case, of in CASES.items()}
FAST = ["sft, one GPU", "sft, one node", "sft, windows", "lora, one GPU", "qlora, one node"]


@pytest.mark.oracle
@pytest.mark.parametrize("case", slow_but(METHODS, FAST))
def test_settings_and_bytes_are_those_of_all_candidates(case):
    method, model, name, ranks, flags = METHODS[case]
    gpu = hardware.GPUS[name]
    words = ["--model", str(CONFIGS / model), *flags.split()]
    request = parse.request("sft" if method == "sft" else "lora", words)
    listed = [c for c in candidates.candidates(method, request, ranks, gpu) if not c.setting.groups]
    given = quick._given([*words, "--gpu_type", name, "--method", method])
    shape = quick.shape_of(json.loads((CONFIGS / model / "config.json").read_text()), method)
    priced = quick._priced(shape, given, ranks, 8, gpu)
    found = [(p.setting, p.peak, p.by_formula, int(p.host * min(ranks, 8))) for p in priced]
    expected = by_setting((c.setting, c.peak, c.by_formula, c.host_of_a_node) for c in listed)
    assert (by_setting(found) == expected and len(expected) > 10) or flags
    whole = listed[0].shape
    unlike = {"work": None} | ({} if shape.frozen else {"frozen_bytes": 0})  # of frozen weights, if there are any
    assert replace(shape, **unlike) == replace(whole, **unlike)
    assert shape.work.passes == whole.work.passes
    labels = [c.label for c in listed]
    mine = [", ".join([*s.in_words(method), f"micro batch {s.micro}"]) for s, *_ in found]
    assert mine == labels  # in the same order: by the same seconds


@pytest.mark.parametrize(("model", "gpu", "gpus", "flags"), [
    ("llama3.1-8b", "a100-80g", 4, ()), ("qwen3-8b", "rtx4090-24g", 1, ()),
    pytest.param("llama3.1-8b", "rtx4090-24g", 8, (), marks=pytest.mark.slow),
    pytest.param("llama3.2-1b", "rtx3060-12g", 1, ("--max_length", "4096"), marks=pytest.mark.slow),
    pytest.param("llama3.1-70b", "h100-80g", 16, (), marks=pytest.mark.slow),
    pytest.param("mistral-7b", "l40s-48g", 2, ("--zero", "2"), marks=pytest.mark.slow),
])  # fmt: skip
def test_auto_takes_the_method_and_setting_of_the_search(model, gpu, gpus, flags):
    words = ["--model", str(CONFIGS / model), *flags]
    found, said = hardware.GPUS[gpu], []
    plan = search.search(list(quick.METHODS), parse.request("lora", words), gpus, found, Told(said), node=min(gpus, 8))
    assert len(said) == 1 and plan.ranks == gpus
    answer = quick.answer([*words, "--gpus", str(gpus), "--gpu_type", gpu, "--method", "auto"])
    assert answer is None if said[0] is None else f"margin of 10%: {said[0].label}, about " in answer


class Told(search.Progress):
    """Keeps the first answer of a search, which then simulates nothing."""

    def __init__(self, said):
        super().__init__()
        self.said = said

    def first(self, candidate, plan):
        self.said.append(candidate)


@pytest.fixture(autouse=True)
def by_formula(request, monkeypatch):
    if "of_the_search" in request.node.name:
        failed = simulate.SimulationFailed("not in this test")
        monkeypatch.setattr(simulate, "run_all", lambda questions, *a, **k: [failed] * len(questions))


def test_what_is_not_known_has_no_quick_answer():
    known = ["--model", str(CONFIGS / "llama3.1-8b"), "--gpu_type", "h100-80g"]
    assert quick.answer(known) and quick.answer([*known, "--nodes=2", "--gpus=4", "--args", "--max_length 512"])
    for method in ("lora", "qlora"):
        assert f": {method} ZeRO-" in quick.answer([*known, "--method", method])
        assert quick.answer([*known, "--recipe=lora", f"--method={method}"]) == quick.answer(
            [*known, "--method", method]
        )
    for more in (
        "--method dpo",
        "--recipe dpo",
        "--method lora --args '--lora_r 8'",
        "--data rows.jsonl",
        "--optim sgd",
        "--host_memory 64",
        "--args '--packing true'",
    ):
        assert quick.answer([*known, *parse.shlex.split(more)]) is None, more
    assert quick.answer(["--model", str(CONFIGS / "gemma2-2b"), "--gpu_type", "h100-80g"]) is None
    assert quick.answer(["--model", str(CONFIGS / "llama3.1-8b")]) is None  # for this machine's GPU


def test_it_comes_before_any_library(monkeypatch):
    code = """
import sys
from zerofit import cli
from zerofit.plan import simulate
simulate.prestart = lambda: None
cli._check_and_import = lambda *words: sys.exit("|".join(sorted({"torch", "transformers", "numpy"} & {*sys.modules})))
sys.argv = ["zerofit", "plan", "--gpus", "8", "--gpu_type", "h100-80g", "--model", sys.argv[1]]
cli.main()
"""
    words = [sys.executable, "-c", code, str(CONFIGS / "llama3.1-8b")]
    done = subprocess.run(words, capture_output=True, text=True, env=simulate.environment(fake=True, cuda=False))
    assert done.stdout.startswith("first answer, by formula with a margin of 10%: sft ZeRO-3, micro batch 2, about ")
    assert not done.stderr.strip(), done.stderr


def test_mistakes_are_left_to_the_command(capsys, monkeypatch):
    monkeypatch.setattr(simulate, "prestart", lambda: None)
    for wrong in (
        ["--model", "/no/such"],
        ["--model", str(CONFIGS / "llama3.1-8b"), "--gpus", "many"],
        ["--args", "'"],
    ):
        quick.begin(["--gpu_type", "h100-80g", *wrong])
    assert capsys.readouterr().out == "" and quick.said == ""


# --- all layers of a setting, simulated beside the few that say whether they are needed ---


def asked(model):
    words = ["--model", str(model), "--zero", "2", "--max_length", "64", "--data", "none"]
    return simulate.Question(parse.request("sft", words), 2, gpu=hardware.GPUS["h100-80g"])


@pytest.mark.parametrize("needed", [True, False])
def test_a_spare_question_is_waited_for_only_if_it_is_needed(needed, monkeypatch, tmp_path):
    signals, few = [], asked(TINY / "model")
    spare = simulate.Spare(replace(few, rank=1), lambda found: found == [{"total": {"step": 7}}] and needed)

    class Process:
        send_signal = signals.append

    def ask(process, text, seconds, receive, keep):
        assert [plain.get("spare", False) for plain in json.loads(text)] == [False, True]
        receive(f'{simulate.MARK}[0, {{"total": {{"step": 7}}}}]')
        receive(f"{simulate.MARK}[1, {json.dumps({'failed': 'killed'} if signals else {'total': {'step': 9}})}]")
        return ""

    monkeypatch.setattr(simulate, "_start", lambda *of: Process)
    monkeypatch.setattr(simulate, "_ask", ask)
    assert simulate.run_all([few], tmp_path, spare=spare) == [{"total": {"step": 7}}]
    assert signals == ([] if needed else [signal.SIGUSR1])
    (of_spare,) = simulate.run_all([spare.question], tmp_path) if needed else [None]
    assert (of_spare == {"total": {"step": 9}}) is needed and len(list(tmp_path.iterdir())) == 1 + needed


@pytest.mark.slow
def test_a_spare_simulation_ends_and_the_process_goes_on(tmp_path):
    few, said = asked(TINY / "model"), []
    with simulate.reused():
        for rank, needed in enumerate((False, True)):
            spare = simulate.Spare(replace(few, rank=rank, padded=True), lambda found, needed=needed: needed)
            said += simulate.run_all([replace(few, rank=rank)], tmp_path, spare=spare)
            assert (tmp_path / f"{simulate.key(spare.question)}.json").exists() is needed
        (alone,) = simulate.run_all([replace(few, rank=0)])
    assert alone["total"] == said[0]["total"]
