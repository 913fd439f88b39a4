"""A row that makes the loss NaN: its step is not applied on any stage, the row is named, and replay finds the layer."""

import json
import math
import shutil

import pytest
import torch
from conftest import ROOT, TINY, Run, run_python, run_world, runs_slow, slow_but

from zerofit.base.errors import UserError
from zerofit.job import program
from zerofit.train import nan_guard

RARE, ROW, ROWS = "~", 17, 24
SHORT = ["sft-0-fp32", "sft-3-fp32", "sft-json-fp32"]  # json: DeepSpeed's engine at stage 0
STAGES = [
    *SHORT,
    "sft-2-fp32",
    "sft-0-bf16",
    "sft-1-bf16",
    "sft-2-bf16",
    "sft-3-bf16",
    "lora-0-fp32",
    "lora-2-fp32",
    "lora-3-fp32",
    "pipeline-1-fp32",
]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A model whose embedding of one token is NaN, and rows of which one has that token."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("poisoned")
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(TINY / "model")
    config.tie_word_embeddings = False  # a tied head would spoil every row's logits
    model = AutoModelForCausalLM.from_config(config)
    (token,) = tokenizer(RARE, add_special_tokens=False)["input_ids"]
    model.get_input_embeddings().weight.data[token] = math.nan
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [json.loads(line) for line in (TINY / "train.jsonl").read_text().splitlines()[:ROWS]]
    rows[ROW]["messages"][0]["content"] += f" {RARE}"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def flags(poisoned, *more):
    return ["--model", str(poisoned / "model"), "--data", str(poisoned / "rows.jsonl"), "--effective_batch_size", "8",
            "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--num_samples", "0",
            "--save_strategy", "no", "--logging_steps", "1", "--num_train_epochs", "2", *more]  # fmt: skip


def recipe_with_nan(recipe, *words):
    return run_python([str(ROOT / "tests" / "nan_base.py"), str(ROOT / "recipes" / f"{recipe}.py"), *words])


@pytest.fixture(scope="module")
def runs(poisoned, tmp_path_factory, request):
    """Two epochs of three steps, on two ranks: the row comes once in each epoch."""
    cases, file = {}, poisoned / "zero0.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    for name in STAGES if runs_slow(request) else SHORT:
        recipe, zero, precision = name.split("-")
        bf16 = str(precision == "bf16").lower()
        stage = ["--deepspeed", str(file)] if zero == "json" else ["--zero", zero]
        cases[name] = (recipe, flags(poisoned, *stage, "--bf16", bf16, "--on_nan", "skip"))
    return run_world(2, cases, tmp_path_factory.mktemp("nan"), ZEROFIT_TEST_NAN_BASE="1")


def bad_steps(run: Run) -> list[int]:
    return sorted(int(f.name.split("-")[1]) for f in (run.folder / "nan").glob("step-*"))


@pytest.mark.fault
@pytest.mark.parametrize("name", slow_but(STAGES, SHORT))
def test_the_step_is_not_applied_and_the_row_is_named(runs, name):
    run, plain = runs[name], runs[f"{'lora' if 'lora' in name else 'sft'}-0-{name[-4:]}"]
    bad = bad_steps(run)
    assert len(bad) == 2 and bad[0] <= 3 < bad[1]
    assert run.json("result.json")["steps_not_applied"] == 2
    finite = [m for m in run.metrics if "loss" in m and m["step"] not in bad]
    assert len(finite) == 4 and all(math.isfinite(m["loss"]) for m in finite)
    assert all(math.isnan(m["loss"]) for m in run.metrics if m.get("step") in bad and "loss" in m)
    assert run.losses == pytest.approx(plain.losses, rel=5e-3 if "bf16" in name else 1e-4, nan_ok=True)
    rates = [m["learning_rate"] for m in run.metrics if "loss" in m]
    assert rates == pytest.approx([m["learning_rate"] for m in plain.metrics if "loss" in m])
    for step in bad:
        facts = run.json(f"nan/step-{step}/step.json")
        (where,) = [(r, m) for r, rank in enumerate(facts["losses"]) for m, loss in enumerate(rank) if math.isnan(loss)]
        assert ROW in facts["rows"][where[0]][where[1]] and RARE in facts["texts"][str(ROW)]


@pytest.mark.slow
def test_the_mean_of_several_steps_leaves_it_out(poisoned, runs, tmp_path):
    """logging_steps 3: each line is the mean of the two steps that were applied."""
    done = recipe_with_nan("sft", *flags(poisoned, "--zero", "0", "--bf16", "false", "--on_nan", "skip",
                                         "--logging_steps", "3", "--output_dir", str(tmp_path / "run")))  # fmt: skip
    assert done.returncode == 0, done.stderr
    each = [m["loss"] for m in runs["sft-0-fp32"].metrics if "loss" in m]
    means = [sum(x for x in each[i : i + 3] if math.isfinite(x)) / 2 for i in (0, 3)]
    assert Run(tmp_path / "run").losses == pytest.approx(means, rel=1e-3)
    assert f"row {ROW}" in done.stdout or f" {ROW}" in done.stdout.split("the loss is not finite on")[1].split(")")[0]


@pytest.mark.fault
@pytest.mark.parametrize("recipe", ["sft", pytest.param("lora", marks=pytest.mark.slow)])
def test_stop_and_replay(poisoned, tmp_path, recipe):
    folder = tmp_path / "run"
    stopping = flags(poisoned, "--zero", "0", "--bf16", "false", "--max_nan_steps", "1", "--output_dir", str(folder))
    done = recipe_with_nan(recipe, *stopping)
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert "1 steps in a row (--max_nan_steps) were skipped" in done.stderr and "zerofit replay" in done.stderr
    assert json.loads((folder / "result.json").read_text())["status"] == "failed"
    (kept,) = folder.glob("nan/step-*/step.json")
    assert json.loads(kept.read_text())["program"] == program.from_file(ROOT / "recipes" / f"{recipe}.py").facts
    facts = json.loads(kept.read_text())
    changed = facts | {"flags": [*facts["flags"], "--bf16", "true"]}  # as a --deepspeed file may say now
    kept.write_text(json.dumps(changed))
    again = run_python(["-m", "zerofit", "replay", str(folder)], cwd=ROOT)
    assert f"replay of {kept.parent}: bf16 (trained in fp32) on " in again.stdout, again.stderr
    kept.write_text(json.dumps(facts))
    again = run_python(["-m", "zerofit", "replay", str(folder)], cwd=ROOT)
    assert again.returncode == 4, again.stderr
    said = again.stdout.splitlines()
    bad = [i for i, line in enumerate(said) if "loss nan" in line]
    assert len(bad) == 1 and "embed_tokens" in said[bad[0] + 1]
    assert any(f"row {ROW}: " in line and RARE in line for line in said)


WITHOUT_GRADIENT = [
    "--data", str(TINY / "train.jsonl"), "--adapter_config", 'alpha_pattern={".*": 0}', "--save_strategy", "no",
    "--num_samples", "0", "--effective_batch_size", "4",
]  # fmt: skip


@pytest.mark.fault
@pytest.mark.parametrize(
    ("zero", "steps", "ranks"),
    [
        ("0", "5", 0),
        ("2", "2", 2),
        pytest.param("0", "5", 2, marks=pytest.mark.slow),
        pytest.param("3", "5", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_in_which_every_gradient_was_zero_is_not_finished(tmp_path, zero, steps, ranks):
    """A scale of 0 trains nothing: said after three steps, or at the end of a shorter run."""
    flags = [*WITHOUT_GRADIENT, "--zero", zero, "--max_steps", steps, "--output_dir", str(tmp_path)]
    done = run_python([str(ROOT / "recipes" / "lora.py"), *flags], ranks=ranks)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert f"the gradient was exactly zero in each of the first {min(3, int(steps))} steps" in done.stderr
    assert "lora_A" in done.stderr and not (tmp_path / "final").exists()
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("norms", "loss", "ends", "holds"),
    [
        ([0.0, 0.0, 0.0], 2.0, True, False),
        ([torch.tensor(0.0), torch.tensor(0.0), torch.tensor(0.0)], 2.0, True, False),
        ([0.0, 1e-9, 0.0], 2.0, False, True),
        ([0.0, 0.0, 0.0], 0.0, False, False),  # no row has a label, or a hinge is satisfied
        ([None, None, None], 2.0, False, None),  # an engine that computes no norm
        ([], 0.0, False, None),
    ],
)
def test_only_a_loss_without_any_gradient_ends_a_run(norms, loss, ends, holds):
    gradients = nan_guard.GradientCount()
    gradients.count(None, [])  # of a trainer with a step of its own
    for norm in norms:
        gradients.count(norm, [torch.tensor(0.0), torch.tensor(loss)])
    if ends:
        with pytest.raises(UserError, match=r"depend on the 2 trainable tensors \(weight, bias \.\.\.\)"):
            gradients.check(torch.nn.Linear(1, 1))
    else:
        gradients.check(torch.nn.Linear(1, 1))
    line = gradients.line()
    known = [norm for norm in norms if norm is not None]
    assert line.name == "gradient" and line.holds is holds
    assert line.numbers == {"steps": len(known), "steps_with_zero_gradient": sum(norm == 0 for norm in known)}


@pytest.mark.bad_input
def test_a_replay_of_nothing_is_one_sentence(tmp_path):
    shutil.copy(TINY / "train.jsonl", tmp_path)
    done = run_python(["-m", "zerofit", "replay", str(tmp_path)])
    assert done.returncode == 2 and "does not contain nan/step-<n>" in done.stderr and "Traceback" not in done.stderr
