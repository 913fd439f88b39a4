"""The quick answer of a plan: by the same closed forms as all candidates, without importing torch or transformers."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import ROOT, TINY, slow_but
from transformers import CONFIG_MAPPING

from zerofit.base import hardware
from zerofit.commands import plan_progress
from zerofit.config import parse, resolve
from zerofit.plan import candidates, predict, search, simulate
from zerofit.plan.answer import known_models, quick

CONFIGS = ROOT / "tests" / "configs"
METHODS = ("sft", "lora", "qlora")

# The method, model, GPUs and flags of a plan.
CASES = {
    "one GPU": ("sft", "qwen3-8b", "l40s-48g", 1, ""),
    "one node": ("sft", "llama3.1-8b", "h100-80g", 8, ""),
    "tied and biased": ("sft", "qwen2.5-0.5b", "rtx4090-24g", 2, "--max_length 1024 --effective_batch_size 24"),
    "windows": ("sft", "mistral-7b", "a100-80g", 8, "--max_length 8192"),
    "many nodes": ("sft", "llama3.1-70b", "h100-80g", 256, ""),
    "named": ("sft", "llama3.2-1b", "a10g-24g", 1, "--zero 2 --offload none --per_device_train_batch_size 2"),
    "named stage": ("sft", "llama3.1-8b", "h200-141g", 4, "--zero 3 --per_device_train_batch_size 2"),
    "lora": ("lora", "llama3.1-8b", "h100-80g", 1, ""),
    "lora, tied and biased": ("lora", "qwen2.5-0.5b", "rtx4090-24g", 2, ""),
    "qlora": ("qlora", "llama3.1-70b", "h100-80g", 8, ""),
    "qlora, normed": ("qlora", "qwen3-8b", "rtx4090-24g", 1, "--max_length 1024"),
    "dpo": ("dpo", "llama3.1-8b", "h100-80g", 8, ""),
    "mixture": ("sft", "qwen3-moe-30b", "h100-80g", 8, ""),
    "mixture, lora": ("lora", "qwen3-moe-30b", "h100-80g", 8, ""),
    "mixture, qlora": ("qlora", "mixtral", "a100-80g", 2, ""),
    "lora of rank 64": ("lora", "qwen3-8b", "a100-80g", 2, "--lora_r 64"),
    "mixture of wide experts": ("sft", "mixtral", "h100-80g", 16, ""),
    **{f"{kind}, {method}": (method, kind, "a100-80g", 1, "") for kind in known_models.KNOWN for method in METHODS},
}
FAST = ["one GPU", "one node", "windows", "lora", "mixture, qlora", "gemma3_text, sft", "phi3, qlora", "olmo2, lora"]


@pytest.fixture
def folder_of(tmp_path):
    """The folder of a model's config.json."""

    def found(model):
        if model not in CONFIG_MAPPING:
            return CONFIGS / model
        CONFIG_MAPPING[model](num_hidden_layers=8).save_pretrained(tmp_path)
        return tmp_path

    return found


def by_setting(found):
    """{what a setting is: its peak}"""
    return {
        (s.zero, s.offload, s.every, s.selective, s.activation_offload, s.micro, s.accumulation): c.peak
        for c in found
        for s in [c.setting]
    }


@pytest.mark.oracle
@pytest.mark.parametrize("case", slow_but(CASES, FAST))
def test_settings_and_bytes_are_those_of_all_candidates(case, folder_of):
    method, model, name, ranks, flags = CASES[case]
    gpu, folder = hardware.GPUS[name], folder_of(model)
    words = ["--model", str(folder), *flags.split()]
    request = parse.request(candidates.recipe_of(method), words)
    listed = [c for c in candidates.candidates(method, request, ranks, gpu) if not c.setting.groups]
    given = quick._given([*words, "--method", method, "--gpu_type", name, "--gpus", str(ranks)])
    config = json.loads((folder / "config.json").read_text())
    assert known_models.is_known(config)
    found = quick.fastest_first(method, config, given, quick.plan_of(given))
    assert by_setting(found) == by_setting(listed) and (len(found) > 10 or flags)
    mine, whole = found[0].shape, listed[0].shape
    of_work = {frozenset(shape.work.products) for shape in (mine, whole)}
    assert len(of_work) == 1 and replace(mine.work, products=()) == replace(whole.work, products=())
    unused = {} if whole.frozen else {"frozen_bytes": mine.frozen_bytes}
    assert replace(mine, work=None) == replace(whole, work=None, adapted="", **unused)
    assert [c.label for c in found] == [c.label for c in listed]  # in the same order: by the same seconds
    for one in ("host_of_a_node", "rows_of_a_step"):
        assert [getattr(c, one) for c in found] == [getattr(c, one) for c in listed]


def first_of_search(words, ranks, gpu, monkeypatch, **known):
    """The sentence of the first answer of `search.search`, which is stopped there."""

    class Stop(Exception):
        pass

    class Told(search.Progress):
        def first(self, candidate, plan):
            raise Stop(plan_progress.first_answer(candidate, plan))

    monkeypatch.setattr(simulate, "prestart", lambda *a, **k: None)
    names = candidates.methods_to_try("auto", "sft", [])
    request = parse.request(candidates.recipe_of(names[-1]), words)
    with pytest.raises(Stop) as stopped:
        search.search(names, request, ranks, gpu, Told(), **known)
    return str(stopped.value)


# The GPU, how many, and GiB of host memory and of disk.
AUTO = {
    "one card": ("rtx4090-24g", 1, "", ""),
    "a node": ("h100-80g", 8, "", ""),
    "host told": ("rtx4090-24g", 1, "512", ""),
    "disk told": ("h100-80g", 8, "", "100"),
}


@pytest.mark.oracle
@pytest.mark.parametrize("case", slow_but(AUTO, ["disk told"]))
def test_auto_takes_the_method_that_the_search_takes_first(case, monkeypatch):
    (name, ranks, host, disk), model = AUTO[case], "llama3.1-8b"
    words = ["--model", str(CONFIGS / model), "--max_length", "1024"]
    more = ["--gpu_type", name, "--gpus", str(ranks), "--method", "auto", "--host_memory", host, "--disk", disk]
    known = {"host_limit": int(float(host) * hardware.GIB)} if host else {}
    known |= {"disk_limit": int(float(disk) * hardware.GIB)} if disk else {}
    expected = first_of_search(words, ranks, hardware.GPUS[name], monkeypatch, **known)
    assert quick.answer([*words, *more]) == expected
    assert ("margin of 10%: sft" in expected) is (case == "a node")


def test_methods_are_those_of_the_recipes():
    own = candidates.methods()
    for name, method in quick.METHODS.items():
        assert (method.answers == 2) == (own[name].recipe.name == "dpo")
        assert (method.bits < 16) == bool(own[name].arguments)
    for recipe, names in quick.AUTO.items():
        assert names == candidates.methods_to_try("auto", recipe, [])
        assert all(quick.METHODS[name].adapter is own[name].takes_adapters for name in names)
    settings = resolve.resolve(parse.request("lora", ["--model", str(TINY / "model"), "--data", "none"]), 1)
    assert (settings.lora_r, settings.save_total_limit, settings.max_length) == (
        known_models.LORA_RANK, int(quick.OPTIONS["save_total_limit"]), int(quick.OPTIONS["max_length"]),
    )  # fmt: skip


def test_what_is_not_known_has_no_quick_answer():
    known = ["--model", str(CONFIGS / "llama3.1-8b"), "--gpu_type", "h100-80g"]
    assert quick.answer(known) and quick.answer([*known, "--nodes=2", "--gpus=4", "--args", "--max_length 512"])
    assert quick.answer([*known, "--recipe", "lora"]) == quick.answer([*known, "--method", "lora"])
    adapter = [*known, "--method", "lora"]
    assert quick.answer(adapter) != quick.answer([*adapter, "--lora_r", "256"])
    assert quick.answer([*known, "--host_memory", "64"]) != quick.answer([*known, "--host_memory", "640"])
    refused = ("--method pipeline", "--recipe dpo --method auto", "--recipe own.py", "--lora_r 32", "--adapter lora")
    plain = ("--data rows.jsonl more.jsonl", "--optim sgd", "--args '--packing true'", "--load_in_4bit true")
    for more in refused + plain:
        assert quick.answer([*known, *shlex.split(more)]) is None, more
    assert quick.answer(["--model", str(CONFIGS / "pythia-1b"), "--gpu_type", "h100-80g"]) is None
    assert quick.answer(["--model", str(CONFIGS / "llama3.1-8b")]) is None  # for this machine's GPU
    config = json.loads((CONFIGS / "qwen3-moe-30b" / "config.json").read_text())
    unlike = ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}, {"auto_map": {"AutoModel": "own.Model"}},
              {"quantization_config": {"bits": 4}}, {"num_experts": 0}, {"attention_bias": True})  # fmt: skip
    assert known_models.is_known(config) and not any(known_models.is_known(config | more) for more in unlike)


def test_rows_of_data_are_taken_to_be_full():
    words = ["--model", str(CONFIGS / "llama3.1-8b"), "--gpu_type", "h100-80g", "--gpus", "8", "--max_length", "1024"]
    plain = quick.answer(words)
    assert quick.answer([*words, "--data", "rows.jsonl"]) == plain.replace(
        "10%:", "10% and rows of 1024 tokens, whatever --data has:"
    )


@pytest.mark.parametrize("kind", known_models.KNOWN)
def test_defaults_are_those_of_the_class(kind):
    of_class, own = CONFIG_MAPPING[kind](), dict(known_models.KNOWN[kind].defaults)
    for name in ("tie_word_embeddings", "head_dim", "sliding_window", "attn_logit_softcapping"):
        expected = getattr(of_class, name, None) or None
        if name == "head_dim" and expected == of_class.hidden_size // of_class.num_attention_heads and name not in own:
            continue
        assert own.get(name) == expected, name


@pytest.mark.parametrize(
    ("model", "method", "label"),
    [("llama3.1-8b", "sft", "sft ZeRO-3, micro batch 2"), ("llama3.1-8b", "auto", "sft ZeRO-3, micro batch 2"),
     ("qwen3-moe-30b", "qlora", "qlora ZeRO-")],
)  # fmt: skip
def test_it_comes_before_any_library(model, method, label):
    code = """
import sys
from zerofit import cli
from zerofit.plan import simulate
simulate.prestart = lambda: None
cli._check_and_import = lambda *words: sys.exit("|".join(sorted({"torch", "transformers", "numpy"} & {*sys.modules})))
sys.argv = ["zerofit", "plan", "--gpus", "8", "--gpu_type", "h100-80g", "--model", *sys.argv[1:]]
cli.main()
"""
    words = [sys.executable, "-c", code, str(CONFIGS / model), "--method", method]
    done = subprocess.run(words, capture_output=True, text=True, env=simulate.environment(fake=True, cuda=False))
    assert done.stdout.startswith("first answer, by formula with a margin of 10%: " + label)
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


# --- how much of a setting is simulated ---

FEW = "few layers of rank 0"


@pytest.mark.parametrize(
    ("model", "limit", "expected"),
    [
        ("llama3.1-8b", 10, [FEW]),  # its tensors do not fit
        ("llama3.1-8b", 80, [FEW, "all layers of ranks 0 and 7"]),
        ("llama3.1-8b", 0, [FEW, "few layers of rank 7"]),  # unused segments do not matter
        ("llama3.1-70b", 200, [FEW, "few layers of rank 7"]),  # nowhere near the limit
        ("llama3.1-70b", 18, [FEW, "all layers of ranks 0 and 7"]),
    ],
)
def test_the_last_rank_and_all_layers_are_simulated_only_where_they_decide(model, limit, expected, monkeypatch):
    asked = []

    def run_all(questions, cache=None, seconds=None):
        ranks = " and ".join(str(rank) for rank in sorted({one.rank for one in questions}))
        few = any(one.layers for one in questions)
        asked.append(f"{'few' if few else 'all'} layers of rank{'s' * (' and ' in ranks)} {ranks}")
        return [answer_of(one.layers or layers, 1 + one.rank / 100) for one in questions]

    def answer_of(depth, share):
        size = int((10 + 6 * depth / layers) * share * 2**30)
        parts = {"parameters": size, "buffers": 0}
        phases = dict.fromkeys(("forward", "backward", "step"))
        return {
            "peak": dict.fromkeys(phases, parts), "total": dict.fromkeys(phases, size),
            "host": 0, "host_saving": 0, "parameters": 0, "trainable": 0, "whole_parameters": False,
            "allocator": {"allocated": size, "reserved": size * 1.2, "least": size * 1.1},
        }  # fmt: skip

    monkeypatch.setattr(simulate, "run_all", run_all)
    words = ["--model", str(CONFIGS / model), "--zero", "3", "--per_device_train_batch_size", "1", "--offload", "none"]
    request = parse.request("sft", [*words, "--gradient_checkpointing", "true", "--sp_size", "1"])
    (one, *_) = candidates.candidates("sft", request, 8, hardware.GPUS["h100-80g"])
    layers = one.shape.layers
    predict.ask(one, limit * 2**30)
    assert asked == expected
    share = 1.07 if len(expected) > 1 else 1  # the higher of the two
    assert max(one.answer["total"].values()) == pytest.approx(16 * share * 2**30, rel=1e-6)


@pytest.mark.parametrize(
    ("simulated", "expected", "micro"),
    [
        (1.0, ["selective checkpointing", "checkpointing", "checkpointing"], 4),
        (0.9, ["selective checkpointing", "checkpointing"], 8),
    ],
)
def test_a_confirmed_closed_form_spares_simulations_of_what_is_too_large(simulated, expected, micro, monkeypatch):
    """8B on four 40-GB cards: 47.0, 47.0, 40.1, 41.0 and 36.6 GiB by formula, of which the last fits."""
    asked = []

    def ask(candidate, limit=0):
        asked.append(candidate)
        size = int(simulated * candidate.by_formula) - candidate.workspace
        candidate.answer = {"total": {"backward": size}, "peak": {"backward": {}}, "host": 0, "host_saving": 0}

    monkeypatch.setattr(predict, "ask", ask)
    monkeypatch.setattr(simulate, "prestart", lambda *a, **k: None)
    request = parse.request("sft", ["--model", str(CONFIGS / "llama3.1-8b"), "--zero", "3", "--offload", "none"])
    plan = search.search(["sft"], request, 4, replace(hardware.GPUS["a100-40g"], memory_gib=40))
    assert [one.label.split(", ")[1] for one in asked] == expected
    assert plan.chosen is asked[-1] and plan.chosen.setting.micro == micro
