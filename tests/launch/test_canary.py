"""The canary: what it meets, that a run after it is the run without it, and what it does about what it meets."""

import json
import sys
from types import SimpleNamespace

import pytest
from conftest import TINY, Run
from test_retry import launch

from zerofit.base.errors import UserError
from zerofit.config import parse, resolve
from zerofit.launch import canary
from zerofit.train import trial

EVAL = ["--eval_data", str(TINY / "eval.jsonl"), "--lora_dropout", "0.1"]
CASES = [("0", "sft"), ("1", "sft"), ("2", "sft"), ("3", "sft"), ("0", "lora"), ("2", "lora"), ("3", "lora")]


def check_same_as_without(tmp_path, zero, recipe, more=()):
    more = [*(EVAL if recipe == "lora" else EVAL[:2]), *more]
    plain = launch(tmp_path / "plain", *more, zero=zero, recipe=recipe)
    done = launch(tmp_path / "run", *more, "--canary", "true", zero=zero, recipe=recipe)
    assert plain.returncode == done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "canary passed" in done.stdout and "with the same loss" in done.stdout
    assert Run(tmp_path / "run").losses == Run(tmp_path / "plain").losses  # bit for bit
    found = Run(tmp_path / "run").json("run.json")["canary"]
    saved = tmp_path / "run" / "checkpoint-6"
    assert found["checkpoint_bytes"] == pytest.approx(
        sum(f.stat().st_size for f in saved.rglob("*") if f.is_file()), rel=0.02
    )
    assert (found["steps"], found["reloaded"]) == (6, True)
    assert found["checkpoints"] == 2  # one is kept (save_total_limit 1) while the next is written
    assert "canary" not in Run(tmp_path / "plain").json("run.json")
    assert not list(tmp_path.glob(".*.canary"))


@pytest.mark.slow
def test_the_run_after_it_is_the_run_without_it(tmp_path):
    check_same_as_without(tmp_path, "2", "lora")


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "recipe"), CASES)
def test_every_stage(tmp_path, zero, recipe):
    check_same_as_without(tmp_path, zero, recipe)


@pytest.mark.slow
def test_packed_and_streamed(tmp_path):
    check_same_as_without(tmp_path / "packed", "0", "sft", ["--packing", "true"])
    check_same_as_without(tmp_path / "streamed", "0", "sft", ["--streaming", "true"])


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "more"), [("2", []), ("3", ["--adapter", "lora"])])
def test_preference_pairs(tmp_path, zero, more):
    pairs = TINY / "preference"
    files = ["--data", str(pairs / "train.jsonl"), "--eval_data", str(pairs / "eval.jsonl")]
    check_same_as_without(tmp_path, zero, "dpo", ["--model", str(pairs / "model"), *files, *more])


@pytest.mark.fault
@pytest.mark.slow
def test_out_of_memory_is_met_before_the_run(tmp_path):
    fault = {"what": "oom", "where": "backward", "step": 0}
    done = launch(tmp_path / "run", "--canary", "true", fault=fault)
    assert done.returncode == 0, done.stderr
    assert "retrying with micro batch 2 instead of 4" in done.stdout and "canary passed" in done.stdout
    assert Run(tmp_path / "run").json("run.json")["arguments"]["per_device_train_batch_size"]["value"] == 2
    assert not (tmp_path / "run" / "attempts").exists()  # nothing was lost


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code", "says"), [
    ({"what": "disk full", "where": "save", "step": 0}, 1, "No space left on device"),
    ({"what": "kill", "where": "eval", "step": 0}, 137, "rank 1 was ended by SIGKILL"),
])  # fmt: skip
def test_a_run_is_not_started_over_it(tmp_path, fault, code, says):
    done = launch(tmp_path / "run", *EVAL[:2], "--canary", "true", fault=fault)
    assert done.returncode == code and says in done.stderr and "the canary failed" in done.stderr
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob(".*.canary"))


@pytest.mark.parametrize(("flag", "planned", "steps", "expected"), [
    ("auto", None, 10**6, False), (True, None, None, True), (False, {"step_seconds": 9.0}, 10**6, False),
    ("auto", {"step_seconds": 2.0}, 299, False), ("auto", {"step_seconds": 2.0}, 301, True),
    ("auto", {"step_seconds": 2.0}, None, True), ("auto", {"step_seconds": None}, 10**6, False),
])  # fmt: skip
def test_when_it_is_on(flag, planned, steps, expected):
    assert canary.wanted(SimpleNamespace(canary=flag), planned, steps) is expected


@pytest.mark.fault
def test_a_disk_that_is_too_small(tmp_path):
    found = {"checkpoint_bytes": 2**60, "checkpoints": 3, "final_bytes": 2**40}
    with pytest.raises(UserError, match=r"3 checkpoints and final/ need .* GB, but the disk has .*--save_total_limit"):
        canary._check_disk(found, SimpleNamespace(ignore_plan=False), tmp_path / "run")
    canary._check_disk(found, SimpleNamespace(ignore_plan=True), tmp_path / "run")


@pytest.mark.parametrize(("words", "epochs", "expected"), [
    ({"save_strategy": "steps", "save_steps": 4, "save_total_limit": None}, 1, 3),  # after 4, 8 and the last
    ({"save_strategy": "steps", "save_steps": 500, "save_total_limit": 1}, 1, 1),  # the last
    ({"save_strategy": "epoch", "save_total_limit": None}, sys.maxsize, 10),  # a stream
    ({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}, 1, 2),
    ({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "load_best_model_at_end": True}, 1, 3),
    ({"save_strategy": "no", "save_total_limit": 1}, 1, 0),
])  # fmt: skip
def test_how_many_checkpoints_a_disk_must_hold(words, epochs, expected):
    args = SimpleNamespace(**{"load_best_model_at_end": False} | words)
    state = SimpleNamespace(max_steps=10, save_steps=words.get("save_steps"), num_train_epochs=epochs)
    assert trial._checkpoints(SimpleNamespace(args=args, state=state)) == expected


def test_nothing_of_a_rehearsal_leaves_the_machine(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "push_to_hub: true\nresume_from_checkpoint: auto\nreport_to: tensorboard\nupload_to: file:///there\n"
    )
    given = ["--config", str(file), "--output_dir", "run", "--resume_from_checkpoint", "auto"]
    settings = resolve.resolve(canary._canary_request(parse.request("sft", given), tmp_path), 1)
    assert (settings.push_to_hub, settings.report_to, settings.output_dir) == (False, "none", str(tmp_path))
    assert settings.resume_from_checkpoint == "false" and settings.upload_to is None


def test_what_it_says():
    found = {"device": "cuda", "peak_bytes": 60 * 2**30, "step_seconds": 4.0, "steps": 2000,
             "tokens_per_second": 12345.6, "checkpoint_bytes": 112e9, "save_seconds": 31.0,
             "load_seconds": 40.0, "reloaded": True}  # fmt: skip
    text = "\n".join(canary.sentences(found, {"peak_bytes": 59 * 2**30, "limit_bytes": 76 * 2**30}, 95.0))
    assert "peak 60.00 GiB per rank (plan: 59.00); 16.00 GiB free" in text
    assert "12,346 tokens/s" in text and "2,000 steps take at most 2:13:20" in text and "112 GB, saved" in text
    assert json.dumps(found)


def test_a_loss_that_changed_by_saving():
    trial._check_same_loss(2.0, 2.000001, "bf16", "cuda")
    with pytest.raises(UserError, match=r"gives the loss 2\.00001234 instead of 2\.$"):
        trial._check_same_loss(2.0, 2.00001234, "bf16", "cpu")
    with pytest.raises(UserError, match=r"gives the loss 2\.00001234 instead of 2; .*split-K.*bf16.*--canary false"):
        trial._check_same_loss(2.0, 2.00001234, "bf16", "cuda")
    with pytest.raises(UserError, match=r"gives the loss nan instead of 2\.$"):
        trial._check_same_loss(2.0, float("nan"), "fp32", "cuda")
