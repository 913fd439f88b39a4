"""The certificate of a run: each of its lines holds in real runs, and fails where what it states is not so."""

import copy
import json
import unicodedata
from collections import Counter
from datetime import datetime
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, recipe_process, run_world, slow_but, two_layers

from zerofit import recipe
from zerofit.base.errors import UserError
from zerofit.certificate import first_step, page, recorder, rendering, rows, saved
from zerofit.config import resolve
from zerofit.data import encoding, formats
from zerofit.data.batches import EpochSampler
from zerofit.data.load import load_datasets
from zerofit.job.settings import Check
from zerofit.model.load import load_model, load_tokenizer
from zerofit.objective.causal_lm import CausalLM
from zerofit.train.trainer import ZerofitTrainer

SHORT = [
    "--model", two_layers(),
    "--data", str(TINY / "train.jsonl"), "--max_samples", "28", "--num_train_epochs", "2", "--save_strategy", "no",
    "--effective_batch_size", "8", "--num_samples", "0", "--use_cpu", "true",
]  # fmt: skip
CASES = {
    "sft-0": ("sft", ["--zero", "0"]),
    "sft-3-packed": ("sft", ["--zero", "3", "--packing", "true", "--max_length", "64", "--effective_batch_size", "2"]),
    "lora-2-padded": ("lora", ["--zero", "2", "--padding_free", "false", "--lora_dropout", "0.1"]),
    "sft-3-accumulation": ("sft", ["--zero", "3", "--per_device_train_batch_size", "1", "--max_steps", "5"]),
    "sft-2-smoothed": ("sft", ["--zero", "2", "--label_smoothing_factor", "0.1"]),
    "sft-2-bf16": ("sft", ["--zero", "2", "--bf16", "true"]),
    "sft-0-bf16-without-autocast": ("sft", ["--zero", "0", "--bf16", "false", "--dtype", "bfloat16"]),
    "sft-0-weights": ("sft", ["--zero", "0", "--data", f"{TINY / 'train.jsonl'}:0.5", "--max_samples", "60"]),
    "lora-3-noise": ("lora", ["--zero", "3", "--neftune_noise_alpha", "5", "--dataloader_num_workers", "1"]),
}
QUICK = ("sft-0", "sft-0-bf16-without-autocast", "sft-3-packed", "lora-2-padded")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    everything = "not slow" not in request.config.getoption("markexpr")
    cases = {n: (r, [*SHORT, *words]) for n, (r, words) in CASES.items() if everything or n in QUICK}
    return run_world(2, cases, tmp_path_factory.mktemp("certificates"))


def lines_of(run) -> dict[str, dict]:
    return {line["name"]: line for line in run.json("certificate.json")["checks"]}


@pytest.mark.oracle
@pytest.mark.parametrize("name", slow_but(CASES, QUICK))
def test_lines_hold_on_two_ranks(runs, name):
    run, lines = runs[name], lines_of(runs[name])
    found = run.json("certificate.json")
    assert found["holds"] and found["status"] == "the run has finished" and run.json("result.json")["certificate"]
    for line in ("rendering", "loss", "rows", "saved"):
        assert lines[line]["holds"], lines[line]["sentence"]
    assert lines["loss"]["numbers"]["relative"] < (1e-2 if "bf16" in name else 1e-5)
    assert run.json("run.json")["world_size"] == 2
    epochs = lines["rows"]["numbers"]["epochs"]
    record = run.json("record.json")
    units = run.json("run.json")["data"]["training"]["kept"]
    if name == "sft-0":
        assert [epoch["rows"] for epoch in epochs] == [units] * 2 and len({epoch["hash"] for epoch in epochs}) == 1
        assert sum(record["rows_per_rank"]) == 2 * units
    text = (run.folder / "certificate.md").read_text()
    assert f"| `effective_batch_size` | {8 if 'packed' not in name else 2} | flag |" in text
    assert "| `lr_scheduler_type` | cosine | zerofit's default |" in text and "| `save_total_limit` | 1 |" in text
    assert ("documents_apart" in lines) == ("padded" not in name)


def test_lines_are_printed_and_the_costly_ones_can_be_left_out(tmp_path):
    flags = [*SHORT, "--max_steps", "2", "--certificate", "false", "--verbose", "true"]
    done = recipe_process("sft", *flags, "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "not checked loss: not recomputed (--certificate false)" in done.stdout
    assert "holds       gradient: not zero in 2 of 2 steps" in done.stdout
    cut = "16 rows of 1 epoch, which was cut after 2 of its 4 steps, was used exactly once"
    assert f"holds       rows seen: each of the {cut}" in done.stdout
    found = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert {line["name"] for line in found["checks"] if line["holds"] is None} == {"loss", "rendering", "saved"}


CUT = {  # (first step, last step) of epochs of 28 rows in 4 steps -> what the line says
    (0, 1): "8 rows of 1 epoch, which was cut after 1 of its 4 steps, was used",
    (0, 4): "28 rows of 1 epoch was used",
    (0, 6): "44 rows of 2 epochs, the last cut after 2 of its 4 steps, was used",
    (0, 8): "56 rows of 2 epochs was used",
    (2, 4): "12 rows of 1 epoch since step 2 was used",
    (5, 7): "16 rows of 1 epoch since step 5, which was cut after 3 of its 4 steps, was used",
}


@pytest.mark.parametrize(("first", "last"), CUT)
def test_a_cut_epoch_is_called_cut(first, last):
    sampler, seen = EpochSampler(28, 8, 0), rows.RowsSeen()
    for step in range(first, last):
        seen.add(step // 4, sampler.indices(step // 4)[step % 4 * 8 : step % 4 * 8 + 8], 28)
    settings = SimpleNamespace(ranks_per_row=1, packing=False, objective=CausalLM, data_ranks=1)
    ended = SimpleNamespace(
        settings=settings, train_sampler=sampler, seen_rows=seen, state=SimpleNamespace(global_step=last),
        args=SimpleNamespace(ignore_data_skip=False),
    )  # fmt: skip
    assert rows.check(ended, first).sentence.startswith(f"rows seen: each of the {CUT[first, last]} exactly once")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """The trainer of a recipe's command line, before its first step."""
    folder = tmp_path_factory.mktemp("run")
    words = [*SHORT, "--zero", "0", "--output_dir", str(folder / "run"), "--per_device_train_batch_size", "4"]
    settings = resolve.resolve_settings("sft", words, 1)
    tokenizer = load_tokenizer(settings)
    sets = load_datasets(settings, tokenizer)
    arguments = recipe.start_processes(settings, *sets)
    (folder / "run").mkdir(exist_ok=True)
    return ZerofitTrainer(settings, load_model(settings, tokenizer), tokenizer, arguments, *sets)


def test_a_loss_that_counts_other_tokens_fails(trainer, monkeypatch):
    assert first_step.check(trainer).holds
    collate = trainer.train_collator

    def one_label_less(rows):
        batch = collate(rows)
        supervised = (batch["labels"][0] != -100).nonzero()[-1]
        batch["labels"][0, supervised] = -100
        return batch

    monkeypatch.setattr(trainer, "train_collator", one_label_less)
    line = first_step.check(trainer)
    assert line.holds is False and "is NOT" in line.sentence and line.numbers["trainer"] < line.numbers["plain"]


def test_a_loss_that_is_scaled_by_other_tokens_stops_the_run(trainer):
    trainer.settings.checks[:] = [first_step.check(trainer)]
    own = recorder.Recorder(trainer)
    right = trainer.settings.checks[0].numbers["supervised_in_step"]
    own.compare_count(torch.tensor(right))
    with pytest.raises(RuntimeError, match="counts 1 supervised tokens, but its rows have"):
        recorder.Recorder(trainer).compare_count(torch.tensor(1))


def test_documents_that_read_each_other_fail(trainer, monkeypatch):
    def without_bounds(rows):
        joined = trainer.train_collator.pack(rows)
        length = joined["input_ids"].shape[1]
        bounds = torch.tensor([0, length], dtype=torch.int32)
        return joined | {
            "position_ids": torch.arange(length)[None], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds,
            "max_length_q": length, "max_length_k": length,
        }  # fmt: skip

    whole = trainer.train_collator
    monkeypatch.setattr(trainer, "train_collator", lambda rows: without_bounds(rows))
    monkeypatch.setattr(trainer.train_collator, "pack", whole.pack, raising=False)
    assert first_step.check(trainer).holds is False


def test_a_label_outside_of_the_answers_and_a_changed_token_fail(trainer, monkeypatch):
    assert rendering.check(trainer).holds
    place, row = next(rendering._conversations(trainer, trainer.processing_class))
    ids = tuple(trainer.processing_class.apply_chat_template(row.turns, return_dict=False))
    found = rendering._tokenized
    table = found(trainer, {ids})

    def instead(labels: dict):
        monkeypatch.setattr(rendering, "_tokenized", lambda trainer, wanted: found(trainer, wanted) | labels)

    instead({ids: list(ids)})
    assert "text of turn 1 is among the labeled tokens" in rendering.check(trainer).sentence
    instead({ids: [-100] * len(ids)})
    assert "the answer of turn 2 is not among the labeled tokens" in rendering.check(trainer).sentence
    assert place.endswith("train.jsonl:1") and list(table) == [ids]
    monkeypatch.setattr(rendering, "_tokenized", lambda trainer, wanted: found(trainer, wanted - {ids}))
    line = rendering.check(trainer)
    assert line.holds is False and "train.jsonl:1: the data set lacks a row with" in line.sentence


@pytest.mark.parametrize("given", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4]])
def test_a_row_that_is_left_out_repeated_or_replaced_fails(trainer, monkeypatch, given):
    seen = rows.RowsSeen()
    everything = list(range(len(trainer.train_dataset)))
    replaced = [number for number in everything if number > 3]
    seen.add(0, [*given, *replaced, len(everything)], filler=len(everything))
    monkeypatch.setattr(trainer, "seen_rows", seen)
    monkeypatch.setattr(trainer.state, "global_step", len(trainer.train_sampler) // trainer.train_sampler.multiple)
    line = rows.check(trainer, 0)
    assert line.holds is False and "NOT the rows of the data in epoch 1" in line.sentence
    right = rows.RowsSeen()
    right.add(0, everything[::-1], filler=len(everything))
    monkeypatch.setattr(trainer, "seen_rows", right)
    assert rows.check(trainer, 0).holds


def test_a_saved_number_that_differs_fails(trainer, tmp_path):
    from safetensors.torch import load_file, save_file

    trainer.save_model(str(tmp_path))
    assert saved.check(trainer, tmp_path).holds
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-6
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    line = saved.check(trainer, tmp_path)
    assert line.holds is False and line.numbers["differing"] == ["model.norm.weight"]


def test_large_tensors_are_compared_at_both_ends(monkeypatch, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    monkeypatch.setattr(saved, "MAX_COMPARED", 20)
    weight = torch.arange(100.0).view(10, 10)
    for row, equal in ((0, False), (9, False), (5, True)):
        changed = weight.clone()
        changed[row, 2] = -1
        save_file({"w": changed}, tmp_path / "w.safetensors")
        with safe_open(tmp_path / "w.safetensors", "pt") as file:
            assert (saved._compare(weight, file, "w") == 20) is equal
    save_file({"scale": torch.tensor(2.0)}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        assert [saved._compare(torch.tensor(x), file, "scale") for x in (2.0, 2.5)] == [1, -1]


def test_a_line_that_fails_stops_the_run_before_the_first_step(trainer, capsys):
    trainer.settings.checks[:] = [Check("base_weights", False, "base weights: 1 of 2 is missing")]
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(UserError, match=r"fails before the first step: base weights: 1 of 2 is missing; nothing was"):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert trainer.state.global_step == 0 and "FAILS" in capsys.readouterr().out
    trainer.settings.checks.clear()


def test_a_failed_line_is_red_on_a_terminal_alone(trainer, capsys):
    trainer.settings.checks[:] = [Check("saved", False, "saved = trained: 1 tensor DIFFERS")]
    page.show(trainer.settings, ["saved"], terminal=True)
    assert page.RED + "  FAILS       saved = trained: 1 tensor DIFFERS" + page.PLAIN in capsys.readouterr().out
    page.show(trainer.settings, ["saved"], terminal=False)
    shown = capsys.readouterr().out
    assert "\033" not in shown and shown.startswith("certificate: 0 of 1 checks hold; 1 FAILS (")
    trainer.settings.checks.clear()


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "few.jsonl", "many.jsonl"],
        ["--data", "few.jsonl:0.5"],
        ["--data", "few.jsonl", "many.jsonl", "--max_samples", "20"],
        ["--data", "few.jsonl:3", "many.jsonl", "--streaming", "false"],
    ],
)
def test_rows_of_several_sources_are_found_again(tmp_path, monkeypatch, words):
    """Streams interleave their sources, and weights repeat rows or leave them out."""
    monkeypatch.chdir(tmp_path)
    lines = (TINY / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:40]))
    (tmp_path / "many.jsonl").write_text("".join(lines[40:] * 3))
    given = ["--streaming", "true", "--max_steps", "2"] if "--streaming" not in words else ["--max_steps", "2"]
    settings = resolve.resolve_settings("sft", [*words, *given, "--use_cpu", "true"], 1)
    tokenizer = load_tokenizer(settings)
    train_set, _ = load_datasets(settings, tokenizer)
    one = SimpleNamespace(settings=settings, processing_class=tokenizer, tokens=train_set, eval_tokens=None)
    line = rendering.check(one)
    assert line.holds and line.numbers["rows"] == 16, line.sentence


def test_text_that_the_tokenizer_composes_is_found(trainer, monkeypatch):
    """An NFC normalizer, as Qwen's: data in decomposed characters decode to composed ones."""
    from tokenizers import normalizers

    decomposed = unicodedata.normalize("NFD", "Tiếng Việt rất hay.")
    row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": decomposed}]}
    parsed = formats.parse("here", row, "messages")
    tokenizer = copy.deepcopy(trainer.processing_class)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    ((ids, labels),) = encoding.Encoder(tokenizer).encode([("here", parsed)])
    arguments = tokenizer, trainer.settings, Counter(), datetime.now()
    assert rendering._fault("here", parsed, {tuple(ids): labels}, *arguments) == ""
    assert rendering._fault("here", parsed, {tuple(ids): [-100] * len(ids)}, *arguments)


def test_a_line_that_cannot_be_made_ends_no_run(trainer, monkeypatch):
    monkeypatch.setattr(rendering, "check", lambda trainer: [][1])
    line = recorder.Recorder(trainer).rendering()
    assert line.holds is None and line.sentence == "rendering: not compared: IndexError: list index out of range"


def test_few_tokens_have_a_wider_bound_in_16_bits():
    one = SimpleNamespace(
        settings=SimpleNamespace(compute_dtype="bf16", values={}), tokens=SimpleNamespace(stream=None),
        args=SimpleNamespace(world_size=1, average_tokens_across_devices=True),
    )  # fmt: skip
    assert first_step._line(one, [(1.05, 1.0, 2)], 2).holds and not first_step._line(one, [(1.05, 1.0, 64)], 64).holds
    one.settings.compute_dtype = "fp32"
    assert not first_step._line(one, [(1.0, 1.0, 64), (1.001, 1.0, 2)], 66).holds
