"""recipes/dpo.py: equal to a textbook loop with a second model, for every stage, rank count and accumulation."""

import functools
import json
import math
import random
import shutil

import pytest
import torch
from conftest import ROOT, TINY, Run, recipe_process, run_python, run_world, runs_slow, slow_but
from safetensors.torch import load_file, save_file
from test_retry import launch

from zerofit.config import resolve
from zerofit.model.load import model_fingerprint
from zerofit.objective import pairs, preference
from zerofit.tools import replay

MODEL = TINY / "preference" / "model"
STEPS, BATCH, RATE, BETA = 20, 4, 1e-3, 0.2
FEW = 7  # steps where 20 are not needed: over the end of an epoch, whose last batch holds fillers
ADAPTER = ["--adapter", "lora", "--lora_r", "4", "--lora_alpha", "8"]


def flags(folder, *more):
    return [
        "--model", str(folder / "model"), "--data", str(folder / "pairs.jsonl"),
        "--eval_data", str(folder / "held_out.jsonl"),
        "--effective_batch_size", str(BATCH), "--per_device_train_batch_size", "2", "--learning_rate", str(RATE),
        "--lr_scheduler_type", "constant", "--warmup_steps", "0", "--beta", str(BETA), "--max_steps", str(STEPS),
        "--train_sampling_strategy", "sequential", "--logging_steps", "1", "--eval_strategy", "no",
        "--save_strategy", "no", "--num_samples", "0", "--max_length", "128", "--gradient_checkpointing", "false",
        *more,
    ]  # fmt: skip


def write_inputs(folder):
    """Write 22 and 5 pairs of uneven lengths (an epoch ends with two fillers) and a small random model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(MODEL)
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.initializer_range = 2, 64, 96, 0.1
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / file, folder / "model" / file)
    rng = random.Random(3)
    words = "Ada Bo Cleo lives works likes has a the red cat pilot Oslo Rome where what".split()

    def text(low, high):
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    for name, count in (("pairs", 22), ("held_out", 5)):
        rows = [{"prompt": text(2, 6), "chosen": text(1, 10), "rejected": text(1, 10)} for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preference")
    write_inputs(folder)
    return folder


# Without them `make test` still has each way of computing the loss, and each stage.
LONG = ("full, micro 1, fused", "full, concatenated", "full, ZeRO 1", "full, ZeRO 2", "full, ZeRO 3, offloaded",
        "lora, ZeRO 0", "lora, ZeRO 3")  # fmt: skip


def of_this_run(request, cases: dict) -> dict:
    return cases if runs_slow(request) else {name: case for name, case in cases.items() if name not in LONG}


@pytest.fixture(scope="module")
def on_one_rank(folder, request):
    """Full tuning and LoRA: three splits, without logits, concatenated, with computed log-probabilities."""
    f, few = flags(folder), ["--max_steps", str(FEW)]
    cases = {
        "full": ("dpo", f),
        "full, micro 4": ("dpo", [*f, *few, "--per_device_train_batch_size", "4"]),
        "full, micro 1, fused": ("dpo", [*f, *few, "--per_device_train_batch_size", "1", "--fused_loss", "true"]),
        "full, concatenated": ("dpo", [*f, *few, "--padding_free", "true"]),
        "lora": ("dpo", [*f, *ADAPTER]),
        "lora, fused, concatenated": ("dpo", [*f, *few, *ADAPTER, "--fused_loss", "true", "--padding_free", "true"]),
        "lora, precomputed": ("dpo", [*f, *few, *ADAPTER, "--precompute_ref_log_probs", "true"]),
        "lora, untrained": ("dpo", [*f, *ADAPTER, "--learning_rate", "0", "--max_steps", "1"]),
    }
    return run_world(1, of_this_run(request, cases), folder)


@pytest.fixture(scope="module")
def on_two_ranks(folder, request):
    """Full tuning and LoRA at each stage, half of them without logits."""
    f, cases = flags(folder), {}
    for zero in "0123":
        fused = "true" if zero in "13" else "false"
        split = [
            "--gradient_checkpointing",
            str(zero == "3").lower(),
            "--zero",
            zero,
            "--per_device_train_batch_size",
            "1",
            "--fused_loss",
            fused,
            "--max_steps",
            str(FEW),
        ]
        cases[f"full, ZeRO {zero}"] = ("dpo", [*f, *split])
        if zero != "1":
            cases[f"lora, ZeRO {zero}"] = ("dpo", [*f, *split, *ADAPTER])
    cases["full, ZeRO 3, offloaded"] = ("dpo", [*f, "--zero", "3", "--offload", "all", "--max_steps", str(FEW)])
    return run_world(2, of_this_run(request, cases), folder)


@pytest.fixture(scope="module")
def run_of(request):
    """Return a function from a case's name to its run."""
    return lambda name: request.getfixturevalue("on_two_ranks" if "ZeRO" in name else "on_one_rank")[name]


# --- the textbook: whole logits, row by row, and the reference as a second model ---


def encoded(tokenizer, folder, name):
    """Return [(ids, first answer token) of chosen and rejected] of each pair."""
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    pairs = []
    for row in rows:
        prompt = f"<|user|>\n{row['prompt']}<|end|>\n<|assistant|>\n"
        start = len(tokenizer(prompt)["input_ids"])
        sides = [tokenizer(f"{prompt}{row[side]}<|end|>")["input_ids"] for side in ("chosen", "rejected")]
        pairs.append([(ids, start) for ids in sides])
    return pairs


def log_prob(model, ids, start):
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(ids[1:])[:, None])[start - 1 :].sum()


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()


def textbook(folder, tokenizer, adapter=None) -> dict:
    """Return losses, gradient norms and margins of a loop in plain PyTorch, and eval losses by number of steps."""
    from peft import LoraConfig, get_peft_model

    model, second = load(folder), load(folder)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
        initial = load_file(adapter)
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.data = initial[name.replace(".default", "")].clone()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, weight_decay=0.0)
    pairs, held_out = (encoded(tokenizer, folder, name) for name in ("pairs", "held_out"))
    epoch = [*range(len(pairs)), *[None] * (-len(pairs) % BATCH)]

    def margin(pair):
        (chosen, c), (rejected, r) = pair
        with torch.no_grad():
            reference = log_prob(second, chosen, c) - log_prob(second, rejected, r)
        return BETA * (log_prob(model, chosen, c) - log_prob(model, rejected, r) - reference)

    found = {"loss": [], "grad_norm": [], "rewards/margins": [], "rewards/accuracies": [], "eval_loss": {}}
    for step in range(STEPS):
        at = step * BATCH % len(epoch)
        batch = [pairs[i] for i in epoch[at : at + BATCH] if i is not None]
        margins = torch.stack([margin(pair) for pair in batch])
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        loss.backward()
        found["grad_norm"].append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        found["loss"].append(loss.item())
        found["rewards/margins"].append(margins.mean().item())
        found["rewards/accuracies"].append((margins > 0).double().mean().item())
        if step + 1 in (FEW, STEPS):
            with torch.no_grad():
                margins = torch.stack([margin(pair) for pair in held_out])
            found["eval_loss"][step + 1] = -torch.nn.functional.logsigmoid(margins).mean().item()
    return found


@pytest.fixture(scope="module")
def textbook_of(request, folder):
    """Return a function from "full" or "lora" to its textbook's numbers."""
    untrained = request.getfixturevalue("on_one_rank")["lora, untrained"].folder
    adapter = untrained / "final" / "adapter_model.safetensors"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    @functools.cache
    def numbers(kind):
        return textbook(folder, tokenizer, adapter if kind == "lora" else None)

    return numbers


NAMES = """full|full, micro 4|full, micro 1, fused|full, concatenated|lora|lora, fused, concatenated|lora, precomputed|
full, ZeRO 0|full, ZeRO 1|full, ZeRO 2|full, ZeRO 3|full, ZeRO 3, offloaded|lora, ZeRO 0|lora, ZeRO 2|lora, ZeRO 3
""".replace("\n", "").split("|")
NAMES = slow_but(NAMES, set(NAMES) - set(LONG))


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_20_steps_are_those_of_a_textbook_loop_with_a_second_model(run_of, textbook_of, name, record_property):
    run, wanted = run_of(name), textbook_of(name[:4])
    lines = [line for line in run.metrics if "loss" in line]
    steps = len(lines)
    assert steps in (FEW, STEPS)
    assert run.losses == pytest.approx(wanted["loss"][:steps], abs=1e-5)
    assert run.grad_norms == pytest.approx(wanted["grad_norm"][:steps], rel=1e-3)
    for key, first in (("rewards/margins", 0), ("rewards/accuracies", 1)):  # step 1: margins of 0, but for rounding
        assert [line[key] for line in lines[first:]] == pytest.approx(wanted[key][first:steps], abs=1e-4)
    assert run.json("result.json")["eval_loss"] == pytest.approx(wanted["eval_loss"][steps], abs=1e-5)
    record_property("difference", max(abs(a - b) for a, b in zip(run.losses, wanted["loss"], strict=False)))


@pytest.mark.parametrize("name", NAMES)
def test_the_first_loss_is_ln_2_and_all_metrics_are_written(run_of, name):
    run, first = run_of(name), run_of(name).metrics[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=5e-7)
    assert first["rewards/margins"] == first["rewards/chosen"] - first["rewards/rejected"]
    assert first["logps/chosen"] < 0 > first["logps/rejected"]
    assert {"eval_rewards/accuracies", "eval_preference_accuracy"} <= run.json("result.json").keys()


def test_the_adapter_is_saved_and_the_frozen_base_stays(run_of):
    seen = run_of("lora, ZeRO 2").json("record.json")
    assert seen["frozen_before"] == seen["frozen_after"]
    assert (run_of("lora, ZeRO 2").folder / "final" / "adapter_config.json").exists()


SAVING = "--max_steps 6 --save_strategy steps --save_steps 4 --save_total_limit 2 --seed 5 --zero 0".split()


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("more", [[], [*ADAPTER, "--lora_dropout", "0.1"]], ids=["full", "lora"])
def test_a_resumed_run_goes_on_bit_for_bit_with_the_reference_of_the_start(tmp_path, folder, more):
    words = [*flags(folder), *SAVING, "--train_sampling_strategy", "random", "--eval_strategy", "steps", *more]

    def run(name, *others):
        caches = {"ZEROFIT_CACHE": str(tmp_path / f"cache-{name}")}  # without the other's reference
        return recipe_process("dpo", *words, *others, "--output_dir", str(tmp_path / name), **caches)

    done = run("whole")
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    done = run("resumed", "--resume_from_checkpoint", checkpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reference log-probabilities of" not in done.stdout
    lines = {}
    for name in ("whole", "resumed"):
        read = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        kept = (
            "loss",
            "grad_norm",
            "eval_loss",
            "rewards/",
            "eval_rewards",
            "logps/",
            "eval_logps",
            "learning_rate",
            "step",
        )
        lines[name] = [{k: v for k, v in line.items() if k.startswith(kept)} for line in read if line["step"] > 4]
    assert lines["whole"] == lines["resumed"] != []
    file = "adapter_model.safetensors" if more else "model.safetensors"
    weights = [load_file(tmp_path / name / "final" / file) for name in lines]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    if more:
        return
    for kept in (tmp_path / "whole" / "reference").iterdir():
        kept.unlink()
    done = run("third", "--resume_from_checkpoint", checkpoint)
    assert done.returncode == 2 and "the reference cannot be computed from trained weights" in done.stderr
    done = run("fourth", "--resume_from_checkpoint", checkpoint, "--beta", "0.3")
    assert done.returncode == 2 and "was saved with beta 0.2, this run has 0.3; use --beta 0.2" in done.stderr


PAIRS = ["--model", str(MODEL), "--data", str(TINY / "preference" / "train.jsonl")]


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--zero", "3"], [*ADAPTER, "--lora_dropout", "0.1"], [*ADAPTER, "--precompute_ref_log_probs", "true"]],
    ids=["full", "lora", "lora, precomputed"],
)  # fmt: skip
def test_a_killed_run_goes_on_bit_for_bit_and_never_computes_its_reference_again(tmp_path, monkeypatch, more):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert launch(whole, *PAIRS, *more, recipe="dpo").returncode == 0
    shutil.rmtree(tmp_path / "cache")
    fault = {"what": "kill", "where": "step", "step": 5}
    done = launch(killed, *PAIRS, *more, "--max_restarts", "0", fault=fault, recipe="dpo")
    assert done.returncode == 137 and not (killed / "final").exists(), done.stderr
    shutil.rmtree(tmp_path / "cache")  # the run folder alone must do
    done = run_python(["-m", "zerofit", "resume", str(killed)])
    assert done.returncode == 0 and "reference log-probabilities" not in done.stdout, done.stdout + done.stderr
    runs = [Run(whole), Run(killed)]
    for name in ("loss", "grad_norm", *pairs.METRICS):
        values = [[line[name] for line in run.metrics] for run in runs]
        assert values[0] == values[1] and len(values[0]) == 6, name
    (file,) = (whole / "final").glob("*.safetensors")
    assert file.read_bytes() == (killed / "final" / file.name).read_bytes()


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ADAPTER], ids=["full", "lora"])
def test_out_of_memory_goes_on_with_half_the_micro_batch(tmp_path, monkeypatch, more):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert launch(whole, *PAIRS, *more, recipe="dpo").returncode == 0
    shutil.rmtree(tmp_path / "cache")
    done = launch(folder, *PAIRS, *more, fault={"what": "oom", "where": "backward"}, recipe="dpo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attempt 2, from checkpoint-2: micro batch 2 instead of 4" in done.stderr
    assert done.stdout.count("reference log-probabilities of") == (not more)
    assert Run(folder).losses == pytest.approx(Run(whole).losses, rel=1e-3)
    assert Run(folder).json("run.json")["arguments"]["effective_batch_size"]["value"] == 8


def test_the_cached_reference_of_another_model_is_not_taken(tmp_path):
    """Two models that differ in a tensor at the start of the file only, as merges of adapters on one layer may."""
    settings, keys = [], set()
    weights = load_file(MODEL / "model.safetensors")
    first = min(weights)
    for name in ("one", "other"):
        folder = shutil.copytree(MODEL, tmp_path / name)
        save_file(weights | {first: weights[first] * (1 + (name == "other"))}, folder / "model.safetensors")
        flags = ["--model", str(folder), *PAIRS[2:], "--use_cpu", "true"]
        settings.append(resolve.resolve_settings("dpo", flags, 1))
        settings.append(resolve.resolve_settings("dpo", [*flags, *ADAPTER, "--load_in_4bit", "true"], 1))
    keys = {preference._model_key(each) for each in settings}
    assert len(keys) == 4 and len({model_fingerprint(each) for each in settings}) == 1


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ADAPTER], ids=["full", "lora"])
def test_a_pair_whose_loss_is_not_a_number_is_left_out_and_named(tmp_path, folder, more):
    """A word of one pair has an embedding of NaN; its reference is NaN as well."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    shutil.copytree(folder / "model", tmp_path / "model")
    config = AutoConfig.from_pretrained(folder / "model")
    config.tie_word_embeddings = False  # a tied head would spoil every pair
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.get_input_embeddings().weight.data[tokenizer("~", add_special_tokens=False)["input_ids"]] = math.nan
    model.save_pretrained(tmp_path / "model")
    rows = (folder / "pairs.jsonl").read_text().splitlines()
    row = json.loads(rows[9])
    rows[9] = json.dumps(row | {"chosen": row["chosen"] + " ~"})
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    words = [*flags(folder), *more, "--model", str(tmp_path / "model"), "--data", str(tmp_path / "pairs.jsonl"),
             "--max_steps", "5", "--on_nan", "skip", "--output_dir", str(tmp_path / "run")]  # fmt: skip
    done = run_python([str(ROOT / "tests" / "nan_base.py"), str(ROOT / "recipes" / "dpo.py"), *words])
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(tmp_path / "run")
    assert run.json("result.json")["steps_not_applied"] == 1
    assert [math.isfinite(loss) for loss in run.losses] == [True, True, False, True, True]  # pair 9 is in step 3
    trained = [line for line in run.metrics if "loss" in line and line["step"] != 3]
    assert all(math.isfinite(line["rewards/margins"]) for line in trained)
    again = run_python(["-m", "zerofit", "replay", str(tmp_path / "run")])
    assert again.returncode == 4 and "row 9: " in again.stdout and "embed_tokens" in again.stdout, again.stdout


EVALUATED = ["--eval_strategy", "steps", "--eval_steps", "1"]  # no replay does it


@pytest.mark.fault
@pytest.mark.oracle
def test_a_replay_computes_the_loss_of_the_pairs(tmp_path, folder, capsys):
    """ln 2 where the model is its own reference; not finite where the reference alone is not. SFT's is 4 and finite."""
    step = tmp_path / "nan" / "step-1"
    step.mkdir(parents=True)
    ids = torch.tensor([[3, 4, 5, 6], [3, 4, 7, 0], [8, 9, 5, 6], [8, 9, 6, 0]])  # chosen, rejected, chosen, rejected
    labels = ids.where((ids != 0) & (torch.arange(4) > 1), -100)
    batch = {"0.input_ids": ids, "0.labels": labels, "0.attention_mask": (ids != 0).long()}
    spoilt = {"0.reference": torch.tensor([[math.nan, -1.0], [-1.0, -2.0]])}
    for more, tensors, code, said in (
        (["--precompute_ref_log_probs", "true"], batch | spoilt, 4, "loss nan, gradient not finite in"),
        (["--fused_loss", "true"], batch | spoilt, 4, "loss nan, gradient not finite in"),
        ([*ADAPTER, *EVALUATED], batch, 0, "rank 0 micro batch 0: loss 0.6931, gradient finite"),
        ([*ADAPTER, "--fused_loss", "true"], batch, 0, "rank 0 micro batch 0: loss 0.6931, gradient finite"),
    ):
        save_file(tensors, step / "rank0.safetensors")
        facts = {"recipe": "dpo", "flags": [*flags(folder), *more], "world_size": 1, "rows": None, "texts": {}}
        (step / "step.json").write_text(json.dumps(facts))
        with pytest.raises(SystemExit) as ended:
            replay.main([str(tmp_path)])
        assert ended.value.code == code and said in capsys.readouterr().out, more


@pytest.mark.slow
def test_batch_search_canary_and_export_as_for_other_recipes(folder, tmp_path):
    rows = [
        "--model",
        str(folder / "model"),
        "--data",
        str(folder / "pairs.jsonl"),
        "--max_length",
        "64",
        "--use_cpu",
        "true",
    ]
    small = [*rows, "--effective_batch_size", "4", "--num_samples", "0", "--max_steps", "2"]
    found = run_python(["-m", "zerofit", "batch-size", "--recipe", "dpo", *small, "--memory_limit", "0.5"])
    assert found.returncode == 0 and "largest micro batch that fits: " in found.stdout, found.stdout + found.stderr
    run = tmp_path / "run"
    words = ["-m", "zerofit", "launch", "--gpus", "1", str(ROOT / "recipes" / "dpo.py"), *small, *ADAPTER]
    done = run_python([*words, "--canary", "true", "--output_dir", str(run)])
    assert done.returncode == 0 and "canary passed" in done.stdout, done.stdout + done.stderr
    exported = run_python(["-m", "zerofit", "export", "--merge", "--output_dir", str(tmp_path / "whole"), str(run)])
    assert exported.returncode == 0 and (tmp_path / "whole" / "model.safetensors").exists(), exported.stderr


@pytest.mark.slow  # the README's `make dpo` runs four steps of it
def test_the_bundled_task_goes_from_half_to_nine_tenths(tmp_path):
    done = recipe_process("dpo", "--output_dir", str(tmp_path / "run"), "--num_samples", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["preference_accuracy_before"] == 0.5 and result["preference_accuracy_after"] > 0.9
    assert "preference accuracy on held-out rows: 50.0% before" in done.stdout
