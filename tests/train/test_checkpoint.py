"""Checkpoints: whole or not there; a damaged one is named, with what is wrong; one of another run is refused."""

import contextlib
import errno
import functools
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, Run, recipe_process, run_python, run_world, runs_slow, two_layers
from safetensors.torch import load_file
from transformers import Trainer

from zerofit.base.errors import DiskFull, UserError
from zerofit.checkpoint import integrity, resumable, save, verify, zero_shards
from zerofit.checkpoint.facts import FACTS, STAGING, digest_of, read_facts
from zerofit.config import resolve
from zerofit.job import run_folder
from zerofit.model.load import count_parameters
from zerofit.train.trainer import ZerofitTrainer

FLAGS = [
    "--model", two_layers(), "--data", str(TINY / "train.jsonl"), "--max_samples", "48", "--num_samples", "0",
    "--effective_batch_size", "8",
    "--per_device_train_batch_size", "4", "--learning_rate", "1e-3", "--max_steps", "4", "--logging_steps", "1",
    "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "2",
]  # fmt: skip
TOKEN = "hf_notARealToken"
STAGES = {"0": ("sft", []), "2": ("sft", ["--bf16", "true"]), "3": ("lora", [])}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """Two ranks; and each run resumed from its middle."""
    folder = tmp_path_factory.mktemp("saved")
    cases = {}
    for zero, (recipe, more) in STAGES.items():
        flags = [*FLAGS, "--zero", zero, *more]
        cases[zero] = (recipe, flags)
        cases[f"{zero}-resumed"] = (recipe, [*flags, "--resume_from_checkpoint", str(folder / zero / "checkpoint-2")])
    best = ["--eval_data", str(TINY / "eval.jsonl"), "--eval_strategy", "steps", "--eval_steps", "2", "--zero", "2",
            "--load_best_model_at_end", "true", "--save_total_limit", "1"]  # fmt: skip
    cases["best-3"] = ("sft", [*FLAGS, *best, "--zero", "3", "--greater_is_better", "true", "--save_total_limit", "2"])
    cases["model"] = ("sft", [*FLAGS, "--zero", "0", "--save_only_model", "true", "--hub_token", TOKEN])
    if runs_slow(request):
        minutes = ["--save_strategy", "no", "--save_every_minutes", "1e-6"]
        cases |= {"best": ("sft", [*FLAGS, *best]), "minutes": ("sft", [*FLAGS, "--zero", "1", *minutes])}
    return run_world(2, cases, folder)


@pytest.mark.slow
def test_the_best_one_is_known_by_its_name(runs):
    (saved,) = runs["best"].folder.glob("checkpoint-*")
    state = json.loads((saved / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(saved) and integrity.find_corruption(saved) == ""
    assert runs["best"].json("result.json")["status"] == "finished"


def test_the_best_one_is_loaded_from_shards_alone(runs):
    """A larger loss is said to be better here: step 2's, which ZeRO-3 has saved without model.safetensors."""
    run = runs["best-3"]
    best = run.folder / "checkpoint-2"
    assert json.loads((run.folder / "checkpoint-4" / "trainer_state.json").read_text())["best_global_step"] == 2
    assert not list(best.glob("*.safetensors")) and "| steps | 2 |" in (run.folder / "final" / "README.md").read_text()
    states, final = zero_shards.read(best), load_file(run.folder / "final" / "model.safetensors")
    assert states.shapes and all(torch.equal(final[name], states.full(name)) for name in states.shapes)


def saver(**changed):
    """What needs_no_weights asks of a trainer on a model of one weight."""
    given = {"zero": 3, "flag": False, "only_model": False, "push": False, "local": False, "net": torch.nn.Linear(2, 1)}
    given |= changed
    given["net"].config = SimpleNamespace(to_dict=lambda: {"num_experts": 8} if given.get("experts") else {})
    shapes = {name: tuple(p.shape) for name, p in given["net"].named_parameters()}
    settings = SimpleNamespace(zero=given["zero"], save_model_in_checkpoints=given["flag"], source={}, values={})
    settings.node_local_storage = given["local"]
    args = SimpleNamespace(save_only_model=given["only_model"], push_to_hub=given["push"], hub_strategy="every_save")
    return SimpleNamespace(settings=settings, args=args, model=given["net"], shapes=shapes, is_deepspeed_enabled=True,
                           numel=(given.get("trainable", 3), 3))  # fmt: skip


def test_when_shards_hold_the_weights(monkeypatch):
    monkeypatch.setattr(save.offload, "unsaved", lambda settings: "")
    assert save.needs_no_weights(saver())
    for changed in ({"zero": 2}, {"flag": True}, {"only_model": True}, {"push": True}, {"local": True},
                    {"trainable": 2}, {"experts": True}, {"net": torch.nn.BatchNorm1d(1)}):  # fmt: skip
        assert not save.needs_no_weights(saver(**changed)), changed
    monkeypatch.setattr(save.offload, "unsaved", lambda settings: "--offload_path")
    assert not save.needs_no_weights(saver())


@pytest.mark.fault
def test_shards_that_lack_a_weight_are_found(runs, tmp_path, monkeypatch):
    """By each rank in its own files."""
    monkeypatch.setattr(save.distributed, "size", lambda: 2)
    best = runs["best-3"].folder / "checkpoint-2"
    shapes = zero_shards.read(best).shapes
    for file in best.glob("*/*rank_1*"):
        (tmp_path / file.parent.name).mkdir(exist_ok=True)
        shutil.copy(file, tmp_path / file.parent.name)
    save._check_rank_files(tmp_path, shapes)
    with pytest.raises(RuntimeError, match=r"incomplete: .*extra has shape None in it, not \(1,\)"):
        save._check_rank_files(tmp_path, shapes | {"extra": (1,)})
    with pytest.raises(RuntimeError, match="its shards end before"):
        monkeypatch.setattr(save.distributed, "size", lambda: 1)
        save._check_rank_files(tmp_path, shapes)
    (file,) = tmp_path.glob("*/*optim_states.pt")
    truncate(file)
    with pytest.raises(RuntimeError, match="was written incompletely"):
        save._check_rank_files(tmp_path, shapes)


@pytest.mark.parametrize("zero", STAGES)
def test_what_is_saved_goes_on(runs, zero):
    run = runs[zero]
    assert sorted(f.name for f in run.folder.glob("*checkpoint*")) == ["checkpoint-2", "checkpoint-4"]
    assert not (run.folder / STAGING).exists()
    for saved in run.folder.glob("checkpoint-*"):
        known = read_facts(saved)
        files = {str(f.relative_to(saved)) for f in saved.rglob("*") if f.is_file()}
        assert set(known["files"]) | {FACTS} == files
        assert (known["zero"], known["world_size"], known["effective_batch_size"]) == (zero, 2, 8)
        assert integrity.find_corruption(saved) == ""
    assert runs[f"{zero}-resumed"].losses == run.losses[2:]  # bit for bit


RANKS_OWN = r"rng_state_(\d)\.pth|zero_pp_rank_(\d)"  # names of the files that each rank writes


def test_each_rank_hashes_what_it_has_written(tmp_path):
    """Synced by the process that has the pages, each file once."""
    notes = tmp_path / "hashes.jsonl"
    run = run_world(2, {"3": ("sft", [*FLAGS, "--zero", "3"])}, tmp_path, ZEROFIT_TEST_HASHES=str(notes))["3"]
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert all(line["sync"] for line in lines if line["what"] == "save")
    for step in (2, 4):
        hashed = {}
        for line in lines:
            name = line["file"].partition(f"/checkpoint-{step}/")[2]
            if name:
                assert name not in hashed
                hashed[name] = line["rank"]
        assert hashed.keys() == read_facts(run.folder / f"checkpoint-{step}")["files"].keys()
        for name, rank in hashed.items():
            own = re.search(RANKS_OWN, name)
            assert rank == (int(own[1] or own[2]) if own else 0), name
    shares = [sum(line["bytes"] for line in lines if line["rank"] == rank and ".pt" in line["file"]) for rank in (0, 1)]
    assert shares[0] == pytest.approx(shares[1], rel=0.05)


@pytest.mark.fault
def test_two_ranks_that_write_one_file_are_found(monkeypatch):
    parts = [("a", {"x": [1, "one"], "y": [1, "y"]}), ("b", {"x": [1, "one"]}), ("b", {"y": [2, "other"]})]
    monkeypatch.setattr(save.distributed, "all_gather", lambda value: parts)
    monkeypatch.setattr(save.distributed, "node", lambda: "a")
    assert save._gather_hashes({}, local=True) == ({"x": [1, "one"], "y": [1, "y"]}, {})
    with pytest.raises(RuntimeError, match="two ranks have saved y"):
        save._gather_hashes({}, local=False)


def test_a_token_is_in_no_file(runs):
    folder = runs["model"].folder
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 10 and not [file for file in files if TOKEN.encode() in file.read_bytes()]
    assert not [file for run in runs.values() for file in run.folder.rglob("training_args.bin")]


def test_arguments_are_written_without_tokens(tmp_path):
    """As transformers writes them beside what it pushes."""
    from zerofit.train.trainer import Arguments

    arguments = object.__new__(Arguments)
    vars(arguments).update(hub_token=TOKEN, seed=7)
    torch.save(arguments, tmp_path / "training_args.bin")
    assert arguments.hub_token == TOKEN and TOKEN.encode() not in (tmp_path / "training_args.bin").read_bytes()
    assert torch.load(tmp_path / "training_args.bin", weights_only=False).seed == 7


@pytest.mark.bad_input
def test_a_model_alone_is_no_checkpoint_to_resume(runs):
    """It can be exported, and nothing goes on from it."""
    from zerofit.export import source as export_source

    folder = runs["model"].folder
    for name, zero in itertools.product((folder / "checkpoint-4", folder / "checkpoint-2"), "02"):
        settings = resolve.resolve_settings("sft", [*FLAGS, "--zero", zero, "--resume_from_checkpoint", str(name)], 2)
        with pytest.raises(UserError, match="holds a model without optimizer states"):
            resumable.find_checkpoint(settings, folder)
    assert integrity.latest_valid_checkpoint(folder) is None
    assert export_source.find(str(folder / "checkpoint-4")).weights


def test_an_older_one_goes_on_in_its_own_folder(runs, tmp_path):
    """The newer ones of the run that is left are put aside, and do not outlive what is saved now."""
    folder = tmp_path / "run"
    shutil.copytree(runs["0"].folder, folder)
    shutil.copytree(folder / "checkpoint-4", folder / "checkpoint-6")
    flags = ["--zero", "0", "--max_steps", "3", "--save_steps", "1", "--save_total_limit", "1"]
    again = [*FLAGS, *flags, "--resume_from_checkpoint", str(folder / "checkpoint-2")]
    run = run_world(1, {"run": ("sft", again)}, tmp_path)["run"]
    assert [f.name for f in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    assert {f.name for f in folder.glob("attempts/*/*")} == {"checkpoint-4", "checkpoint-6"}
    assert "resumes at step 2; later checkpoints were moved to" in run.json("run.json")["decisions"][-1]
    assert [line["step"] for line in run.metrics] == [1, 2, 3]


@pytest.mark.parametrize(("limit", "best", "left"), [
    (1, None, [3]), (2, None, [3, 6]), (1, 4, [3, 4]), (2, 3, [3, 6]), (3, 4, [3, 4, 6]), (None, None, [2, 3, 4, 6]),
    (9, None, [2, 3, 4, 6]),
])  # fmt: skip
def test_what_was_just_saved_is_kept(tmp_path, limit, best, left):
    for step in (2, 3, 4, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    save._rotate(tmp_path, "checkpoint-3", limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert list(run_folder.checkpoints(tmp_path)) == left


def of_step(step, best_step, best=None):
    """transformers' state after its own saving."""
    return SimpleNamespace(global_step=step, best_global_step=best_step, best_model_checkpoint=best)


def test_a_best_step_without_a_checkpoint_is_not_named(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    for state, named in [
        (of_step(8, 6), None),
        (of_step(8, 6, "run/checkpoint-2"), "run/checkpoint-2"),
        (of_step(8, 2, "elsewhere/checkpoint-2"), str(tmp_path / "checkpoint-2")),  # the folder was moved
        (of_step(8, 8, str(tmp_path / STAGING / "checkpoint-8")), str(tmp_path / "checkpoint-8")),  # it is being saved
        (of_step(8, None), None),
    ]:
        save._record_best(tmp_path, state)
        assert state.best_model_checkpoint == named


@pytest.mark.parametrize(("strategy", "loads", "due", "answers", "best"), [
    ("steps", True, False, False, None), ("steps", True, True, True, 4), ("steps", False, False, True, 4),
    ("best", True, False, True, 4),
])  # fmt: skip
def test_only_a_saved_step_can_be_the_best(strategy, loads, due, answers, best):
    """A save that is due (a signal's, one by the clock) is not left out by --save_strategy best either."""
    from zerofit.train.trainer import ZerofitTrainer

    trainer = object.__new__(ZerofitTrainer)
    trainer.args = SimpleNamespace(
        save_strategy=strategy, load_best_model_at_end=loads, metric_for_best_model="loss", greater_is_better=False
    )
    trainer.state = SimpleNamespace(global_step=4, best_metric=None, best_global_step=None)
    trainer.control = SimpleNamespace(should_save=due)
    assert trainer._determine_best_metric({"eval_loss": 1.0}, None) is answers
    assert trainer.state.best_global_step == best
    if answers:
        trainer.control.should_save = strategy == "best"
        assert trainer._determine_best_metric({"eval_loss": 2.0}, None) is (strategy == "best")


def test_the_card_tells_the_step_that_is_loaded(tmp_path, monkeypatch):
    from zerofit.train import run

    shown = []
    monkeypatch.setattr(run.model_card, "Card", lambda **fields: fields)
    monkeypatch.setattr(run.model_card, "losses", lambda history, step: shown.append(step))
    (tmp_path / "run.json").write_text("{}")
    for best, step in (("run/checkpoint-4", 4), (None, 8)):
        state = of_step(8, 6, best)
        state.log_history = []
        trainer = SimpleNamespace(
            state=state, model=torch.nn.Linear(1, 1), args=SimpleNamespace(load_best_model_at_end=True), architecture=""
        )
        assert run._card(trainer, tmp_path / "final")["steps"] == step == shown[-1]


@pytest.mark.slow
def test_a_best_step_between_two_saves(tmp_path):
    """A schedule that follows the loss looks for a best step too, which no checkpoint holds here."""
    words = ["--zero", "0", "--eval_data", str(TINY / "eval.jsonl"), "--eval_strategy", "steps", "--warmup_steps", "0"]
    plateau = ["--lr_scheduler_type", "reduce_lr_on_plateau", "--eval_steps", "3", "--save_total_limit", "1",
               "--greater_is_better", "true", "--save_steps", "4"]  # fmt: skip
    best = ["--load_best_model_at_end", "true", "--eval_steps", "1", "--save_total_limit", "2", "--greater_is_better",
            "true", "--save_steps", "2"]  # fmt: skip
    cases = {name: ("sft", [*FLAGS, *words, *more]) for name, more in {"plateau": plateau, "best": best}.items()}
    done = run_world(1, cases, tmp_path)
    assert [run.json("result.json")["status"] for run in done.values()] == ["finished"] * 2
    # A larger loss is said to be better here: step 1's, which is not saved, would be the best.
    evaluations = [line["eval_loss"] for line in done["best"].metrics if "eval_loss" in line][:4]
    assert evaluations[0] > evaluations[1] > evaluations[3]
    assert done["best"].json("result.json")["eval_loss"] == pytest.approx(evaluations[1], rel=1e-5)
    assert "| steps | 2 |" in (done["best"].folder / "final" / "README.md").read_text().lower()


@pytest.mark.slow
def test_minutes_save_where_steps_do_not(runs):
    """Every step is longer than that; two are kept."""
    found = sorted(f.name for f in runs["minutes"].folder.glob("checkpoint-*"))
    assert (
        found == ["checkpoint-3", "checkpoint-4"] and integrity.find_corruption(runs["minutes"].folder / found[0]) == ""
    )


def test_adapters_hold_no_frozen_base(runs):
    from zerofit.model.weights import stored

    saved = runs["3"].folder / "checkpoint-4"
    trained = sum(stored.Weights(saved).get(name).numel() for name in stored.Weights(saved).where)
    states = sum(f.stat().st_size for f in saved.rglob("*.pt"))
    assert states < 1.5 * 12 * trained  # fp32 weights and two moments; the base alone has 3.4 MB


@pytest.fixture
def copied(runs, tmp_path):
    """Two checkpoints of ZeRO-2 to spoil."""
    for name in ("checkpoint-2", "checkpoint-4"):
        shutil.copytree(runs["2"].folder / name, tmp_path / name)
    return tmp_path


def truncate(file):
    os.truncate(file, file.stat().st_size - 1)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


STATES = "global_step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.fault
@pytest.mark.parametrize(("harm", "name", "says"), [
    (truncate, "model.safetensors", "model.safetensors has .* bytes instead of"),
    (flip, "model.safetensors", "was changed or damaged"),
    (flip, STATES, "rank_1.*was changed or damaged"),
    (lambda file: file.unlink(), STATES, "is missing"),
    (truncate, "trainer_state.json", "trainer_state.json has .* bytes instead of"),
    (truncate, FACTS, "zerofit.json is damaged"),
    (lambda file: file.unlink(), "trainer_state.json", "trainer_state.json is missing"),
])  # fmt: skip
def test_damage_is_named_and_passed_over(copied, capsys, harm, name, says):
    harm(copied / "checkpoint-4" / name)
    if name == FACTS:
        truncate(copied / "checkpoint-4" / name)  # the first byte was its line's end
    flags = [*FLAGS, "--zero", "2", "--output_dir", str(copied), "--resume_from_checkpoint"]

    def found(asked: str, *judge) -> str:
        settings = resolve.resolve_settings("sft", [*flags, asked], 2)
        resumable.find_checkpoint(settings, copied, *judge)
        return settings.resume_from_checkpoint

    by_ranks = functools.partial(verify.by_hashes, local=False)
    for judge in [by_ranks] if harm is flip else [by_ranks, integrity.by_sizes]:
        with pytest.raises(UserError, match=rf"checkpoint-4: cannot be resumed: .*{says}"):
            found(str(copied / "checkpoint-4"), judge)
        assert found("auto", judge) == str(copied / "checkpoint-2")
        assert "note: skipping checkpoint-4: " in capsys.readouterr().out
    if harm is flip:  # a launcher leaves it to its ranks
        assert found("auto") == str(copied / "checkpoint-4")


@pytest.mark.fault
def test_a_file_that_cannot_be_read_is_damage(copied, monkeypatch):
    def fails(file, sync=False):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(integrity, "hash_file", fails)
    assert re.search("cannot be read: Input/output error", integrity.find_corruption(copied / "checkpoint-4"))


@pytest.mark.fault
def test_ranks_hash_each_file_once_and_fall_back(runs, tmp_path):
    """Two ranks and `auto`: both take the older one, after shares of about half the bytes."""
    notes, folder, cases = tmp_path / "hashes.jsonl", tmp_path / "run", tmp_path / "cases.json"
    shutil.copytree(runs["2"].folder, folder)
    shutil.rmtree(folder / "final")
    flip(folder / "checkpoint-4" / STATES)
    flags = [*FLAGS, "--zero", "2", "--bf16", "true", "--gpus", "2", "--output_dir", str(folder)]
    cases.write_text(json.dumps([{"recipe": "sft", "flags": [*flags, "--resume_from_checkpoint", "auto"]}]))
    done = run_python([str(ROOT / "tests" / "world.py"), str(cases)], ranks=2, ZEROFIT_TEST_HASHES=str(notes))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert done.stdout.count("note: skipping checkpoint-4: ") == 1 and "rank_1" in done.stdout
    assert "resumes at step 2; later checkpoints were moved to" in done.stdout
    assert Run(folder).losses == runs["2"].losses
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    lines = [line for line in lines if line["what"] == "verify"]
    for step in (2, 4):
        mine = [line for line in lines if f"/checkpoint-{step}/" in line["file"]]
        names = [line["file"].partition(f"/checkpoint-{step}/")[2] for line in mine]
        assert sorted(names) == sorted(read_facts(runs["2"].folder / f"checkpoint-{step}")["files"]) or step == 4
        assert len(set(names)) == len(names)
        shares = [sum(line["bytes"] for line in mine if line["rank"] == rank) for rank in (0, 1)]
        assert step == 4 or min(shares) > 0.4 * sum(shares)


@pytest.mark.parametrize(("nodes", "shares"), [(["", "", ""], [9, 7, 6]), (["n", "n", "m"], [11, 11, 22])])
def test_the_files_are_dealt_out_by_size(tmp_path, monkeypatch, nodes, shares):
    """Among the ranks of a disk."""
    sizes = {"model": 9, "a": 4, "b": 4, "c": 3, "d": 1, "e": 1}
    known = {"files": {name: [size, "0"] for name, size in sizes.items()}}
    monkeypatch.setattr(verify, "read_facts", lambda checkpoint: known)
    monkeypatch.setattr(verify.distributed, "all_gather", lambda value: [(node, "d") for node in nodes])
    found = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        found.append(sum(entry[0] for entry in verify._share_of_rank(tmp_path, local=True).values()))
    assert found == shares


def test_a_launcher_hashes_no_file(copied, monkeypatch):
    monkeypatch.setattr(integrity, "hash_file", lambda *_, **__: pytest.fail("a file is hashed"))
    flags = [*FLAGS, "--zero", "2", "--output_dir", str(copied), "--resume_from_checkpoint", "auto"]
    settings = resolve.resolve_settings("sft", flags, 2)
    assert resumable.choose_folder(settings) == copied
    assert settings.resume_from_checkpoint == str(copied / "checkpoint-4")


def overwrite_with_zeros(file):
    file.write_bytes(bytes(file.stat().st_size))


def link_to_nothing(file):
    file.unlink()
    file.symlink_to("nowhere")


HARMS = [Path.unlink, lambda file: file.write_bytes(b""), truncate, flip, overwrite_with_zeros, link_to_nothing]


@pytest.mark.fault
def test_damage_to_any_file_is_found(copied, record_property):
    """Each file deleted, emptied, cut by a byte, with a flipped bit, zeroed, and a link to nothing."""
    saved = copied / "checkpoint-4"
    (copied / "run.json").write_text('{"versions": {"zerofit": "0.1"}}')  # so that a zerofit.json must be there
    files = [file for file in saved.rglob("*") if file.is_file()]
    record_property("cases", len(files) * len(HARMS) - 1)
    unnoticed = []
    for file in files:
        content = file.read_bytes()
        for number, harm in enumerate(HARMS):
            if file.name == FACTS and harm is truncate:
                continue  # its last byte is a line break
            harm(file)
            if not integrity.find_corruption(saved):
                unnoticed.append((file.name, number))
            file.unlink(missing_ok=True)
            file.write_bytes(content)
    assert len(files) > 10 and not unnoticed
    assert integrity.find_corruption(saved) == ""


@pytest.mark.fault
@pytest.mark.parametrize("content", ["null", "{}", "[]", "3", "", '{"files": null}', '{"files": {}}',
                                     '{"files": {"a": 1}}', '{"files": {"a": [1, "b"]}}',
                                     '{"files": {"a": [1, "b"]}, "elsewhere": 3}',
                                     '{"format": "x"}'])  # fmt: skip
def test_other_content_of_the_facts_is_damage(copied, content):
    (copied / "checkpoint-4" / FACTS).write_text(content)
    assert integrity.find_corruption(copied / "checkpoint-4") == "its zerofit.json is damaged"


@pytest.mark.fault
def test_facts_that_are_gone(copied):
    """In a run folder of this kit every checkpoint has them; elsewhere it is another program's."""
    (copied / "checkpoint-4" / FACTS).unlink()
    assert integrity.find_corruption(copied / "checkpoint-4") == ""
    (copied / "run.json").write_text('{"versions": {"zerofit": "0.1"}}')
    assert integrity.find_corruption(copied / "checkpoint-4") == "its zerofit.json is missing"
    assert integrity.latest_valid_checkpoint(copied).name == "checkpoint-2"
    (copied / "checkpoint-2" / FACTS).unlink()
    (copied / "checkpoint-2" / FACTS).symlink_to("nowhere")
    assert integrity.latest_valid_checkpoint(copied) is None


@pytest.mark.fault
def test_all_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """File, its folders, rename, the run folder; what it replaces is deleted last."""
    new, old = tmp_path / STAGING / "checkpoint-2", tmp_path / "checkpoint-2"
    (new / "global_step2").mkdir(parents=True)
    old.mkdir()
    done = []

    def noted(module, name, what):
        before = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kw: (done.append(what(*args)), before(*args, **kw))[1])

    def relative(path):
        return re.sub(r"\.\w{8}\.tmp$", ".tmp", str(path).replace(str(tmp_path), "").lstrip("/"))

    noted(os, "fsync", lambda number: ("sync", relative(Path(f"/proc/self/fd/{number}").readlink())))
    noted(os, "replace", lambda source, target: ("rename", relative(target)))
    noted(type(tmp_path), "rename", lambda source, target: ("rename", relative(target)))
    noted(shutil, "rmtree", lambda folder: ("delete", relative(folder)))
    run_folder.write_json(new / FACTS, {})
    save._publish(tmp_path, "checkpoint-2")
    assert done == [
        ("sync", ".saving/checkpoint-2/zerofit.json.tmp"), ("rename", ".saving/checkpoint-2/zerofit.json"),
        ("sync", ".saving/checkpoint-2/global_step2"), ("sync", ".saving/checkpoint-2"),
        ("rename", ".saving/checkpoint-2.before"), ("rename", "checkpoint-2"), ("sync", ""), ("delete", ".saving"),
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == [old] and (old / FACTS).exists()


def test_a_checkpoint_of_a_newer_version_is_passed_over(copied):
    file = copied / "checkpoint-4" / FACTS
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99, "zerofit": "9.9"}))
    assert "zerofit 9.9 saved it in a format that" in integrity.find_corruption(copied / "checkpoint-4")
    assert integrity.latest_valid_checkpoint(copied).name == "checkpoint-2"


def test_minutes_between_checkpoints(monkeypatch):
    """Steps of 10 s and a checkpoint every minute: due after 60 s, and looked at four times on the way."""
    now, looks = [0.0], []
    monkeypatch.setattr(save.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(save.distributed, "broadcast", lambda value: looks.append(value) or value)
    clock, saved = save.SaveTimer(1.0), []
    for step in range(1, 25):
        now[0] += 10.0
        if clock.is_due(step):
            saved.append(step)
            clock.saved()
    assert saved == [6, 12, 18, 24] and len(looks) < 24
    assert not any(save.SaveTimer(0.0).is_due(step) for step in range(1, 100))


def test_what_is_pushed_has_its_name(tmp_path, monkeypatch):
    """transformers reads the folder when it pushes: not before it is verified and renamed."""
    from transformers import Trainer

    from zerofit.train.trainer import ZerofitTrainer

    pushed = []
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append(folder))
    trainer = object.__new__(ZerofitTrainer)
    trainer.args, trainer.saving_to = SimpleNamespace(push_to_hub=True), tmp_path / STAGING
    trainer._push_from_checkpoint("aside")
    trainer.saving_to = None
    trainer._push_from_checkpoint("checkpoint-2")
    assert pushed == ["checkpoint-2"]


class Touch:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.system, (f"touch {self.file}",)


@pytest.mark.injection
def test_a_pickle_that_would_run_something_is_not_loaded(copied, tmp_path):
    (copied / "checkpoint-4" / FACTS).unlink()  # as if another program had saved it
    assert integrity.find_corruption(copied / "checkpoint-4") == ""
    torch.save({"optimizer_state_dict": Touch(tmp_path / "pwned")}, copied / "checkpoint-4" / STATES)
    assert "would run posix.system when it is loaded" in integrity.find_corruption(copied / "checkpoint-4")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.fault
def test_another_programs_checkpoint(copied):
    saved = copied / "checkpoint-4"
    (saved / FACTS).unlink()
    assert integrity.find_corruption(saved) == ""
    truncate(saved / STATES)
    assert "is incomplete" in integrity.find_corruption(saved)
    (saved / STATES).unlink()
    assert integrity.find_corruption(saved) == "it holds the optimizer states of 1 ranks, but 2 ranks saved it"


@pytest.mark.bad_input
@pytest.mark.parametrize(("more", "says"), [
    (["--optim", "sgd"], "was saved with optim adamw_torch_fused, this run has sgd; use --optim adamw_torch_fused"),
    (["--bf16", "false"], "was saved with precision bf16, this run has fp32; use --bf16 true"),
    (["--train_on", "all"], "another data, tokenizer, template, --train_on.* or --max_length.*--ignore_resume"),
    (["--seed", "7"], "was saved with seed 42, this run has 7; use --seed 42 .add --ignore_resume_mismatch true"),
    (["--data_seed", "99"], "was saved with data_seed 42, this run has 99; use --data_seed 42"),
    (["--packing", "true"], "was saved with packing false, this run has true; use --packing false"),
    (["--eval_fraction", "0.25"], "was saved with eval_fraction 0.0, this run has 0.25; use --eval_fraction 0.0"),
    (["--train_sampling_strategy", "sequential"], "this run has sequential; use --train_sampling_strategy random"),
    (["--max_samples", "40"], "was saved with max_samples 48, this run has 40; use --max_samples 48"),
    (["--max_length", "64"], "was saved with max_length 2048, this run has 64; use --max_length 2048"),
    (["--random_init", "true"], "another model than"),
    (["--effective_batch_size", "16"], "was saved with effective_batch_size 8, this run has 16 and would continue at "
                                       "another position"),
])  # fmt: skip
def test_another_run_is_refused(runs, tmp_path, more, says):
    saved = str(runs["2"].folder / "checkpoint-2")
    flags = [*FLAGS, "--zero", "2", "--bf16", "true", "--resume_from_checkpoint", saved, *more]
    with pytest.raises(UserError, match=says):
        check_same(flags)
    said = check_same([*flags, "--ignore_resume_mismatch", "true"])
    assert any(sentence.startswith("ignore_resume_mismatch: the checkpoint was saved with") for sentence in said)


def test_what_may_change_is_said(runs):
    """Which of the two values is taken was measured: the schedule's state has the rate, the optimizer's the decay."""
    flags = [*FLAGS, "--bf16", "true", "--resume_from_checkpoint", str(runs["2"].folder / "checkpoint-2")]
    more = ["--learning_rate", "1e-4", "--weight_decay", "0.5", "--max_steps", "6", "--lr_scheduler_type", "linear"]
    for zero, taken in (("2", "the checkpoint's value"), ("3", "this run's value")):
        said = check_same([*flags, *more, "--zero", zero])
        for start in (
            "learning_rate 0.001 of the checkpoint is 0.0001 here: the checkpoint's value",
            "max_steps 4 of the checkpoint is 6 here: this run's value",
            "lr_scheduler_type cosine of the checkpoint is linear here: this run's value",
            f"weight_decay 0.0 of the checkpoint is 0.5 here: {taken}",
        ):
            assert any(sentence.startswith(start) for sentence in said), said
    assert not [sentence for sentence in check_same([*flags, "--zero", "2"]) if " of the checkpoint is " in sentence]


@pytest.mark.bad_input
@pytest.mark.parametrize(("more", "says"), [
    (["--lora_r", "8"], "was saved with lora_r 16, this run has 8; use --lora_r 16;"),
    (["--lora_target_modules", "q_proj", "v_proj"], "lora_target_modules all-linear, this run has q_proj v_proj"),
])  # fmt: skip
def test_another_adapter_is_refused(runs, more, says):
    flags = [*FLAGS, "--zero", "3", "--resume_from_checkpoint", str(runs["3"].folder / "checkpoint-2"), *more]
    for anyway in ([], ["--ignore_resume_mismatch", "true"]):
        with pytest.raises(UserError, match=says):
            check_same([*flags, *anyway], recipe="lora")


def test_an_older_record_says_nothing(copied):
    file = copied / "checkpoint-4" / FACTS
    known = json.loads(file.read_text())
    del known["settings"], known["digest"]
    file.write_text(json.dumps(known))
    flags = [*FLAGS, "--zero", "2", "--bf16", "true", "--data_seed", "9", "--learning_rate", "1e-4"]
    said = check_same([*flags, "--resume_from_checkpoint", str(copied / "checkpoint-4")])
    assert not [sentence for sentence in said if "checkpoint" in sentence]


def check_same(flags, ranks=2, recipe="sft"):
    from zerofit.data.load import load_datasets
    from zerofit.model.load import load_tokenizer

    settings = resolve.resolve_settings(recipe, flags, ranks)
    train_set, _ = load_datasets(settings, load_tokenizer(settings))
    resumable.check_resumable(settings, train_set)
    return settings.decisions


@pytest.mark.bad_input
def test_states_that_were_not_saved_are_not_made_up(copied):
    file = copied / "checkpoint-4" / FACTS
    known = json.loads(file.read_text()) | {"unsaved": "--offload_path"}
    file.write_text(json.dumps(known | {"digest": digest_of(known)}))
    with pytest.raises(UserError, match=r"was saved with --offload_path, .*--model"):
        check_same([*FLAGS, "--zero", "2", "--bf16", "true", "--resume_from_checkpoint", str(copied / "checkpoint-4")])


@pytest.mark.bad_input
def test_a_schedule_that_follows_the_loss_stays_at_its_stage(copied):
    """Its state has no base_lrs, whichever schedule this run has."""
    torch.save({"best": 1.0, "_last_lr": [1e-3]}, copied / "checkpoint-4" / "scheduler.pt")
    flags = [*FLAGS, "--bf16", "true", "--resume_from_checkpoint", str(copied / "checkpoint-4")]
    for schedule in ("reduce_lr_on_plateau", "cosine"):
        more = ["--lr_scheduler_type", schedule, "--eval_fraction", "0.25", "--ignore_resume_mismatch", "true"]
        with pytest.raises(UserError, match="reduce_lr_on_plateau cannot be resumed with another stage"):
            check_same([*flags, *more, "--zero", "3"])
        check_same([*flags, *more, "--zero", "2"])


@pytest.mark.bad_input
def test_another_recipe_is_refused(runs):
    with pytest.raises(UserError, match=r"was saved by recipes/lora\.py"):
        check_same([*FLAGS, "--zero", "2", "--resume_from_checkpoint", str(runs["3"].folder / "checkpoint-2")])


@pytest.mark.bad_input
def test_a_refusal_is_one_sentence(runs, tmp_path):
    saved = runs["0"].folder / "checkpoint-2"
    done = recipe_process("sft", *FLAGS, "--zero", "0", "--max_length", "64", "--output_dir", str(tmp_path / "new"),
                          "--resume_from_checkpoint", str(saved))  # fmt: skip
    assert done.returncode == 2 and "with max_length 2048" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.fault
def test_without_room_training_goes_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / STAGING).mkdir()
    assert save._has_room(tmp_path) and not (tmp_path / STAGING).exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=999))
    assert not save._has_room(tmp_path)
    assert "WARNING: no checkpoint is saved" in capsys.readouterr().out


@pytest.mark.fault
def test_a_stop_without_room_says_so(tmp_path):
    """Code 75 would let SLURM queue the job again and again."""
    from zerofit.train.trainer import stopped

    args = SimpleNamespace(output_dir=str(tmp_path), save_only_model=False)
    ended = stopped(args, 4)
    assert isinstance(ended, DiskFull) and ended.exit_code == 1 and "nothing is saved yet; free" in str(ended)
    (tmp_path / "checkpoint-2").mkdir()
    assert "after step 4, which is not saved" in str(stopped(args, 4)) and "checkpoint-2 remains" in str(
        stopped(args, 4)
    )
    (tmp_path / "checkpoint-4").mkdir()
    assert stopped(args, 4).exit_code == 75 and "checkpoint-4 is saved" in str(stopped(args, 4))


@pytest.mark.parametrize("stopping", [True, False])
def test_a_run_that_was_told_to_stop_keeps_its_last_checkpoint(stopping, monkeypatch):
    """At a run's end transformers loads the best step, and with --save_total_limit 1 deletes the last one for it."""
    from transformers import Trainer

    from zerofit.train.trainer import ZerofitTrainer

    seen = []
    monkeypatch.setattr(
        Trainer, "_finalize_training", lambda self, *words: seen.append(self.state.best_model_checkpoint)
    )
    trainer = object.__new__(ZerofitTrainer)
    trainer.state = SimpleNamespace(best_model_checkpoint="run/checkpoint-2")
    trainer.reporter, trainer.pending_checkpoint = SimpleNamespace(stopping=stopping), None
    trainer.args = SimpleNamespace(load_best_model_at_end=True)
    trainer._finalize_training(None, 8, 0.0)
    assert seen == [None if stopping else "run/checkpoint-2"]


def saved_as(tmp_path, tensors, net, recipe="sft"):
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "model.safetensors")
    numel, shapes = count_parameters(net), {name: tuple(p.shape) for name, p in net.named_parameters()}
    settings = SimpleNamespace(trains_adapter=recipe == "lora")
    save.verify(tmp_path, SimpleNamespace(model=net, numel=numel, shapes=shapes, settings=settings))


@pytest.mark.fault
def test_what_was_not_saved_whole_is_found(tmp_path):
    net = torch.nn.Module()
    net.norm, net.head = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
    saved_as(tmp_path, {"norm": torch.ones(3), "head": torch.ones(2)}, net)
    with pytest.raises(RuntimeError, match=r"norm was saved with shape \(4,\) instead of \(3,\)"):
        saved_as(tmp_path, {"norm": torch.ones(4), "head": torch.ones(2)}, net)
    with pytest.raises(RuntimeError, match="only 3 of the 5"):
        saved_as(tmp_path, {"norm": torch.ones(3)}, net)
    with pytest.raises(RuntimeError, match="head was saved empty"):
        saved_as(tmp_path, {"norm": torch.ones(3), "head": torch.ones(0)}, net)
    net.all_tied_weights_keys = {"head": "norm"}
    net.head = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="head and norm are tied"):
        saved_as(tmp_path, {"norm": torch.ones(3), "head": torch.zeros(3)}, net)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"norm": "a", "gone": "b"}}')
    with pytest.raises(RuntimeError, match="does not match the weight files"):
        saved_as(tmp_path, {"norm": torch.ones(3), "head": torch.ones(3)}, net)


@pytest.mark.fault
def test_optimizer_states_of_every_rank_are_asked_for(tmp_path, monkeypatch):
    """As a writer that is still at work, or a rank that did not write, would leave them."""
    monkeypatch.setattr(save.distributed, "size", lambda: 2)
    settings = SimpleNamespace(node_local_storage=False, deepspeed={}, zero=2)
    trainer = SimpleNamespace(settings=settings, args=SimpleNamespace(save_only_model=False))
    with pytest.raises(RuntimeError, match="optimizer states were not saved"):
        save.verify_states(tmp_path, trainer)
    (tmp_path / "latest").write_text("global_step4")
    (tmp_path / "global_step4").mkdir()
    (tmp_path / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(RuntimeError, match="1 of 2 ranks saved"):
        save.verify_states(tmp_path, trainer)
    (tmp_path / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").touch()
    save.verify_states(tmp_path, trainer)


def test_an_adapter_is_saved_by_its_names(tmp_path):
    from peft import LoraConfig, get_peft_model

    inner = torch.nn.Sequential(torch.nn.Linear(3, 3))
    net = get_peft_model(inner, LoraConfig(r=2, target_modules=["0"]))
    names = {"base_model.model.0.lora_A.weight": torch.ones(2, 3), "base_model.model.0.lora_B.weight": torch.ones(3, 2)}
    saved_as(tmp_path, names, net, "lora")
    wrong = {name.replace("lora_B", "lora_C"): tensor for name, tensor in names.items()}
    with pytest.raises(RuntimeError, match=r"lora_B\.weight was not saved"):
        saved_as(tmp_path, wrong, net, "lora")


@pytest.mark.parametrize("name", ["_save_checkpoint", "save_model"])
def test_a_rank_beats_while_it_saves(monkeypatch, name):
    """From the start of a save to its end, hashing included; and the step lines' clock stands still in a checkpoint."""
    from transformers import Trainer

    from zerofit.train.trainer import ZerofitTrainer

    said = []

    @contextlib.contextmanager
    def noted(what, *step):
        said.append((what, *step))
        yield
        said.append(("end", what))

    monkeypatch.setattr(save, "save", lambda trainer, write: said.append("written and hashed"))
    monkeypatch.setattr(Trainer, "save_model", lambda self, *words: said.append("written"))
    trainer = object.__new__(ZerofitTrainer)
    trainer.state, trainer.settings = SimpleNamespace(global_step=4), SimpleNamespace(trains_adapter=False)
    trainer.clock, trainer.saving_to = SimpleNamespace(paused=lambda: noted("pause")), None
    trainer.reporter = SimpleNamespace(heartbeat=SimpleNamespace(beating=lambda step: noted("beat", step)))
    trainer.tracker = SimpleNamespace(during=lambda phase: contextlib.nullcontext())
    getattr(trainer, name)("folder")
    beating = [("beat", 4), "written and hashed" if name == "_save_checkpoint" else "written", ("end", "beat")]
    assert said == ([("pause",), *beating, ("end", "pause")] if name == "_save_checkpoint" else beating)


@pytest.mark.parametrize("saved, seeded", [(4, True), (8, False)])
def test_random_states_of_nodes_with_another_number_of_gpus_are_not_taken(tmp_path, monkeypatch, capsys, saved, seeded):
    """A rank's file has the states of its node's GPUs by their numbers: on nodes of 8 instead of 4 those of others."""
    loaded, seeds = [], []
    torch.save({"cuda": [torch.zeros(3)] * saved}, tmp_path / "rng_state_0.pth")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(Trainer, "_load_rng_state", lambda self, checkpoint: loaded.append(checkpoint))
    one = ZerofitTrainer.__new__(ZerofitTrainer)
    one.args = SimpleNamespace(process_index=0, world_size=8)
    one.seed_this_rank = lambda: seeds.append(1)
    one._load_rng_state(None)
    one._load_rng_state(str(tmp_path))
    assert (loaded, seeds) == (([], [1]) if seeded else ([str(tmp_path)], []))
    assert ("nodes with another number of GPUs" in capsys.readouterr().out) is seeded
