"""--upload_to: checkpoints and final/ are copied by fsspec, failures are said and repeated, a new machine goes on."""

import json
import shutil
import threading
from types import SimpleNamespace

import fsspec
import pytest
from conftest import TINY, Run, run_world

from zerofit.base.errors import UserError
from zerofit.checkpoint import upload
from zerofit.checkpoint.facts import FACTS
from zerofit.job import run_segments

FLAGS = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "64", "--max_length", "64", "--effective_batch_size", "8",
    "--learning_rate", "1e-3", "--logging_steps", "1", "--save_strategy", "steps", "--save_steps", "3",
    "--num_samples", "0", "--zero", "2",
]  # fmt: skip


def a_checkpoint(run, step: int, content: str = "weights"):
    folder = run / f"checkpoint-{step}"
    (folder / "global_step").mkdir(parents=True)
    (folder / "global_step" / "shard.pt").write_text(content)
    (folder / FACTS).write_text(f'{{"of": "{content}"}}')
    return folder


@pytest.fixture
def there():
    """A folder in memory that is empty; `files()` lists it."""
    memory = fsspec.filesystem("memory")
    if memory.exists("/run"):
        memory.rm("/run", recursive=True)
    return SimpleNamespace(
        url="memory://run",
        fs=memory,
        files=lambda: sorted(name.removeprefix("/run/") for name in memory.find("/run")),
    )


def saved(uploads, step: int) -> None:
    """What transformers calls after the save of a step."""
    uploads.on_save(SimpleNamespace(process_index=0), SimpleNamespace(global_step=step), None)


def test_what_is_kept_here_is_kept_there(tmp_path, there):
    uploads = upload.Uploads(there.url, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    a_checkpoint(tmp_path, 3)
    saved(uploads, 3)
    shutil.rmtree(tmp_path / "checkpoint-3")  # rotated, perhaps before it was copied
    a_checkpoint(tmp_path, 6)
    saved(uploads, 6)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "model.safetensors").write_text("all")
    uploads.finish(tmp_path / "final")
    assert there.files() == [
        "checkpoint-6/global_step/shard.pt", f"checkpoint-6/{FACTS}", "final/model.safetensors", "metrics.jsonl",
    ]  # fmt: skip
    assert not (tmp_path / upload.LINKED).exists()


@pytest.mark.fault
def test_a_checkpoint_that_is_deleted_while_it_is_copied_arrives_whole(tmp_path, there, monkeypatch):
    uploads = upload.Uploads(there.url, tmp_path)
    monkeypatch.setattr(uploads.place, "prune", lambda run: None)
    a_checkpoint(tmp_path, 3)
    turn = threading.Event()
    uploads.thread.submit(turn.wait)
    saved(uploads, 3)
    shutil.rmtree(tmp_path / "checkpoint-3")
    turn.set()
    uploads.finish()
    assert there.files() == ["checkpoint-3/global_step/shard.pt", f"checkpoint-3/{FACTS}"]


@pytest.mark.fault
def test_an_older_one_stays_until_the_newest_is_there(tmp_path, there, monkeypatch):
    uploads = upload.Uploads(there.url, tmp_path)
    put_file, turn = uploads.place.files.put_file, threading.Event()

    def fails_for_the_second(source, name):
        if "checkpoint-6" in name:
            raise ConnectionError("the network is gone")
        put_file(source, name)

    monkeypatch.setattr(uploads.place.files, "put_file", fails_for_the_second)
    uploads.thread.submit(turn.wait)
    for step in (3, 6):
        a_checkpoint(tmp_path, step)
        saved(uploads, step)
    shutil.rmtree(tmp_path / "checkpoint-3")
    turn.set()
    uploads.finish()
    assert [*upload.Place(there.url).steps()] == [3]


@pytest.mark.fault
def test_a_failure_is_said_and_tried_again_at_the_next_save(tmp_path, there, monkeypatch, capsys):
    uploads = upload.Uploads(there.url, tmp_path)
    put_file, calls = uploads.place.files.put_file, []

    def fails_once(source, name):
        calls.append(name)
        if len(calls) == 1:
            raise ConnectionError("the network is gone")
        put_file(source, name)

    monkeypatch.setattr(uploads.place.files, "put_file", fails_once)
    for step in (3, 6):
        a_checkpoint(tmp_path, step)
        saved(uploads, step)
    uploads.finish()
    assert capsys.readouterr().out == (
        "WARNING: memory://run: checkpoint-3 was not uploaded (ConnectionError: the network is gone); the next save "
        "retries it\n"
    )
    assert {name.partition("/")[0] for name in there.files()} == {"checkpoint-3", "checkpoint-6"}


def test_the_end_of_a_run_says_what_it_waits_for(tmp_path, there, monkeypatch, capsys):
    slow, original = threading.Event(), upload.Place.put

    def put(place, folder, name):
        slow.wait(30)
        original(place, folder, name)

    monkeypatch.setattr(upload.Place, "put", put)
    monkeypatch.setattr(upload, "WAIT_REPORT_SECONDS", 0.05)
    uploads = upload.Uploads(there.url, tmp_path)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "model.safetensors").write_text("all")
    threading.Timer(0.5, slow.set).start()
    uploads.finish(tmp_path / "final")
    assert "waiting for the upload to memory://run" in capsys.readouterr().out
    assert there.files() == ["final/model.safetensors"]


def test_the_same_checkpoint_is_copied_once_and_a_new_one_of_its_name_replaces_it(tmp_path, there, monkeypatch):
    copied = []
    place = upload.Place(there.url)
    monkeypatch.setattr(place.files, "put_file", lambda source, name, put=place.files.put_file: (
        copied.append(name), put(source, name)))  # fmt: skip
    for content in ("one", "one", "two"):
        shutil.rmtree(tmp_path / "checkpoint-3", ignore_errors=True)
        place.put(a_checkpoint(tmp_path, 3, content), "checkpoint-3")
    assert len(copied) == 4 and copied[1].endswith(FACTS)  # last, so that it is whole with it
    assert there.fs.cat_file("/run/checkpoint-3/global_step/shard.pt") == b"two"


def settings(folder, url: str, resume: str | None, **more):
    facts = {"output_dir": str(folder), "upload_to": url, "resume_from_checkpoint": resume, "node_local_storage": False}
    return SimpleNamespace(**facts | more)


def test_the_newest_whole_one_is_fetched_where_there_is_none(tmp_path, there, capsys):
    run = tmp_path / "before"
    for step in (3, 6, 9):
        upload.Place(there.url).put(a_checkpoint(run, step, f"of {step}"), f"checkpoint-{step}")
    there.fs.rm(f"/run/checkpoint-9/{FACTS}")  # its upload was cut off
    (run / "metrics.jsonl").write_text('{"step": 6}\n')
    upload.Place(there.url).put_small_files(run)
    upload.fetch(settings(tmp_path / "new", there.url, "auto"))
    assert (tmp_path / "new" / "checkpoint-6" / "global_step" / "shard.pt").read_text() == "of 6"
    assert sorted(f.name for f in (tmp_path / "new").iterdir()) == ["checkpoint-6", "metrics.jsonl"]
    assert "downloading checkpoint-6 from memory://run" in capsys.readouterr().out
    upload.fetch(settings(run, there.url, "auto"))  # has some of its own
    assert capsys.readouterr().out == ""


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("url", "resume", "sentence"),
    [
        (
            "memory://run",
            None,
            "already holds a run; use another location, or continue with --resume_from_checkpoint auto",
        ),
        ("nonesuch://x", "auto", "--upload_to nonesuch://x: cannot be opened: "),
    ],
)
def test_what_is_refused(tmp_path, there, url, resume, sentence):
    upload.Place(there.url).put(a_checkpoint(tmp_path, 3), "checkpoint-3")
    with pytest.raises(UserError, match=sentence):
        upload.fetch(settings(tmp_path / "new", url, resume))


def a_run(folder, started: str, *steps: int):
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"started": started, "command": "zerofit sft"}))
    for step in steps:
        a_checkpoint(folder, step, f"{folder.name} {step}")
    return folder


@pytest.mark.injection
@pytest.mark.parametrize("resume", ["auto", "true", "last", "checkpoint-3"])
def test_a_run_does_not_replace_another_one_where_it_is_uploaded(tmp_path, there, resume):
    first, second = a_run(tmp_path / "first", "monday", 6), a_run(tmp_path / "second", "friday", 3)
    uploads = upload.Uploads(there.url, first)
    saved(uploads, 6)
    (first / "final").mkdir()
    (first / "final" / "mine.txt").write_text("mine")
    uploads.finish(first / "final")
    resume = str(second / resume) if "-" in resume else resume
    before = there.files()
    with pytest.raises(UserError, match=f"--upload_to memory://run: holds another run than {second}"):
        upload.fetch(settings(second, there.url, resume))
    uploads = upload.Uploads(there.url, second)  # both began when nothing was there
    saved(uploads, 3)
    uploads.finish()
    assert there.files() == before and there.fs.cat_file("/run/final/mine.txt") == b"mine"
    upload.fetch(settings(first, there.url, "auto"))
    there.fs.rm("/run/checkpoint-6", recursive=True)
    shutil.rmtree(second / "checkpoint-3")
    with pytest.raises(UserError, match="holds another run"):  # a final/ alone
        upload.fetch(settings(second, there.url, "auto"))


def test_a_run_that_was_fetched_goes_on_in_its_place(tmp_path, there, capsys):
    first = a_run(tmp_path / "first", "monday", 3)
    uploads = upload.Uploads(there.url, first)
    saved(uploads, 3)
    uploads.finish()
    moved = tmp_path / "moved"
    upload.fetch(settings(moved, there.url, "auto"))
    begun = run_segments.carried_over(moved, 3) | {"started": "friday", "command": "zerofit resume"}
    (moved / "run.json").write_text(json.dumps(begun))
    a_checkpoint(moved, 6)
    shutil.rmtree(moved / "checkpoint-3")
    uploads = upload.Uploads(there.url, moved)
    saved(uploads, 6)
    uploads.finish()
    assert [*upload.Place(there.url).steps()] == [6] and "WARNING" not in capsys.readouterr().out
    upload.fetch(settings(moved, there.url, "auto"))


def test_a_run_that_ended_before_its_first_checkpoint_leaves_the_place_to_the_next_start(tmp_path, there):
    upload.Place(there.url).claim(a_run(tmp_path / "first", "monday"))
    second = a_run(tmp_path / "second", "friday", 3)
    upload.fetch(settings(second, there.url, "auto"))
    uploads = upload.Uploads(there.url, second)
    saved(uploads, 3)
    uploads.finish()
    assert [*upload.Place(there.url).steps()] == [3]


@pytest.mark.bad_input
def test_parts_on_several_disks_are_refused(tmp_path, there):
    with pytest.raises(UserError, match="each node has a part"):
        upload.fetch(settings(tmp_path, there.url, "auto", node_local_storage=True))


@pytest.mark.injection
def test_a_name_that_leads_out_of_the_run_folder_is_refused(tmp_path, there):
    there.fs.pipe_file(f"/run/checkpoint-3/{FACTS}", b"{}")
    place = upload.Place(there.url)
    place.files = SimpleNamespace(find=lambda path: ["/run/../outside"])
    with pytest.raises(UserError, match="would be written outside the folder"):
        place.get("/run/checkpoint-3", tmp_path / "new")


@pytest.mark.slow
def test_a_run_goes_on_where_its_folder_is_gone(tmp_path):
    """Two ranks: the losses are those of a run that was not moved, bit for bit, and final/ is there as it is here."""
    flags = [*FLAGS, "--lr_scheduler_type", "constant"]
    there = ["--upload_to", f"file://{tmp_path}/there", "--resume_from_checkpoint", "auto"]
    cases = {
        "whole": ("sft", [*flags, "--max_steps", "8"]),
        "first": ("sft", [*flags, "--max_steps", "6", *there]),
        "second": ("sft", [*flags, "--max_steps", "8", *there]),
    }
    whole, first, second = run_world(2, cases, tmp_path).values()
    assert "resumed from checkpoint-6" in (second.folder / "logs" / "rank0.log").read_text()
    assert [entry["step"] for entry in second.metrics if "loss" in entry] == list(range(1, 9))
    assert second.losses == whole.losses and first.losses == whole.losses[:6]
    here, there = second.folder / "final", tmp_path / "there" / "final"
    assert {f.name: f.read_bytes() for f in here.iterdir()} == {f.name: f.read_bytes() for f in there.iterdir()}
    assert Run(tmp_path / "there").json("result.json")["status"] == "finished"
