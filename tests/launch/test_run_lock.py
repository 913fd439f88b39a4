"""One writer for each run folder, no orphans: real processes started at once, resumed while they run, and killed."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import ROOT, TINY, Run, run_python

from zerofit.base import distributed, paths, rank_status
from zerofit.base.errors import UserError
from zerofit.checkpoint import integrity
from zerofit.checkpoint import resumable as checkpoint_resume
from zerofit.checkpoint.facts import step_of
from zerofit.commands import cancel, status
from zerofit.commands import resume as resume_command
from zerofit.export import export
from zerofit.job import program, run_folder, run_lock
from zerofit.launch import launch, node_options, postmortem
from zerofit.plan import preflight
from zerofit.report import run_page, watch

FLAGS = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "64", "--max_length", "64", "--effective_batch_size", "8",
    "--per_device_train_batch_size", "4", "--max_steps", "100000", "--logging_steps", "1", "--num_samples", "0",
    "--save_steps", "5", "--save_strategy", "steps", "--zero", "2",
]  # fmt: skip
HOLDS = (
    "import sys, time; from pathlib import Path; from zerofit.job import run_lock; "
    "run_lock.take(Path(sys.argv[1])); print(1, flush=True); time.sleep(600)"
)


@pytest.fixture
def owner(tmp_path):
    """(run folder, process that has locked it)."""
    folder = tmp_path / "runs" / "x"
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "1\n"
    yield folder, process
    process.kill()
    process.wait()
    run_lock.release()


def started(
    folder, *flags, words=("-m", "zerofit", "launch", "--gpus", "2", "recipes/sft.py", *FLAGS)
) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *words, *flags, "--output_dir", str(folder)], cwd=ROOT, text=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip


def again(folder, *flags) -> subprocess.CompletedProcess:
    return run_python(["-m", "zerofit", "resume", str(folder), *flags], cwd=ROOT)


def processes_of(folder) -> list[psutil.Process]:
    """Return those with the folder on their command line: supervisor, launcher, ranks and their data workers."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]


def wait_for(true, what: str, seconds=240) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def assert_goes_on(folder) -> None:
    """What was saved is whole, and a resume makes each step once."""
    saved = integrity.latest_valid_checkpoint(folder)
    assert saved is not None
    steps = step_of(saved) + 3
    done = again(folder, "--max_steps", str(steps))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert [line["step"] for line in Run(folder).metrics] == list(range(1, steps + 1))
    assert Run(folder).json("result.json")["status"] == "finished"
    assert not (folder / run_lock.FILE).exists()


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.bad_input
def test_of_two_launches_one_trains_and_a_resume_of_it_is_refused(tmp_path):
    """And when its supervisor is killed nothing of it is left, and it goes on."""
    folder = tmp_path / "run"
    both = [started(folder, "--dataloader_num_workers", "1"), started(folder, "--learning_rate", "1e-3")]
    try:
        wait_for(lambda: any(p.poll() is not None for p in both), "none of two was refused")
        (refused,) = [p for p in both if p.poll() is not None]
        (live,) = [p for p in both if p is not refused]
        since = f"{folder} is in use by process {live.pid} on {socket.gethostname()} since 20"
        said = refused.communicate()[1]
        assert refused.returncode == 2 and since in said and "Traceback" not in said

        wait_for(lambda: integrity.latest_valid_checkpoint(folder), "no checkpoint")
        kept = {name: (folder / name).read_bytes() for name in ("run.json", "deepspeed.json")}
        before = (folder / "metrics.jsonl").read_text()
        with pytest.raises(UserError, match=re.escape(since)):
            resume_command.main([str(folder)])
        assert live.poll() is None and {name: (folder / name).read_bytes() for name in kept} == kept
        assert (folder / "metrics.jsonl").read_text().startswith(before)
        assert not [
            name for name in ("result.json", "report.json", "report.md", "attempts") if (folder / name).exists()
        ]

        live.kill()
        wait_for(lambda: not processes_of(folder), "processes outlive their supervisor", seconds=10)
    finally:
        for process in both:
            process.kill()
            process.wait()
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
             if line.endswith("\n")]  # fmt: skip
    assert steps == list(range(1, len(steps) + 1))
    assert_goes_on(folder)


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(("who", "launcher"), [
    ("torchrun", "torchrun"), ("rank 1", "torchrun"), ("supervisor", "deepspeed"), ("supervisor", "accelerate"),
])  # fmt: skip
def test_whichever_process_is_killed_nothing_is_left(tmp_path, who, launcher):
    folder = tmp_path / "run"
    words = ("-m", "zerofit", "launch", "--gpus", "2", "--launcher", launcher, "recipes/sft.py", *FLAGS)
    job = started(folder, "--max_restarts", "0", "--dataloader_num_workers", "1", words=words)
    wait_for(lambda: run_folder.checkpoints(folder) or job.poll() is not None, "no checkpoint")
    assert job.poll() is None, job.communicate()[1]
    victims = {"supervisor": psutil.Process(job.pid), "torchrun": psutil.Process(job.pid).children()[0]}
    if who == "rank 1":
        victims[who] = max(victims["torchrun"].children(), key=lambda process: process.pid)  # started last
    victims[who].kill()
    wait_for(lambda: not [p for p in processes_of(folder) if p.pid != job.pid], "processes are left", seconds=10)
    said = job.communicate(timeout=60)[1]
    if who == "supervisor":
        assert job.returncode == -signal.SIGKILL
    else:
        assert job.returncode == 137 and f"Continue: make resume RUN={folder}" in said, said
    assert_goes_on(folder)


@pytest.mark.slow
@pytest.mark.fault
def test_a_recipe_without_a_supervisor_has_the_folder_too(tmp_path):
    folder = tmp_path / "run"
    words = ("recipes/sft.py", *FLAGS[:-1], "0", "--effective_batch_size", "4")
    live = started(folder, words=words)
    wait_for(lambda: run_folder.checkpoints(folder) or live.poll() is not None, "no checkpoint")
    second = started(folder, "--resume_from_checkpoint", "auto", words=words)
    said = second.communicate(timeout=200)[1]
    assert second.returncode == 2 and f"{folder} is in use by process {live.pid} on" in said
    assert f"process {live.pid} on" in again(folder).stderr
    live.send_signal(signal.SIGINT)
    said = live.communicate(timeout=60)[1]
    assert live.returncode == 130 and f"Continue: make resume RUN={folder}" in said
    assert not (folder / run_lock.FILE).exists()


@pytest.mark.slow
@pytest.mark.fault
def test_a_stop_that_saves_a_model_only_promises_no_resume(tmp_path):
    folder = tmp_path / "run"
    job = started(folder, "--save_only_model", "true", "--save_steps", "100000")
    wait_for(lambda: (folder / "metrics.jsonl").exists() or job.poll() is not None, "no step")
    job.send_signal(signal.SIGTERM)
    said = job.communicate(timeout=120)[1]
    (saved,) = folder.glob("checkpoint-*")
    assert job.returncode == 130 and "make resume" not in said
    assert f"{saved.name} holds the model without optimizer states (--save_only_model) and cannot be resumed" in said
    assert f"export it with `make export RUN={saved}`" in said
    assert Run(folder).json("result.json")["status"] == "stopped"


# --- the parts ---


@pytest.mark.fault
def test_a_lock_ends_with_its_process(owner):
    folder, process = owner
    with pytest.raises(UserError, match=f"is in use by process {process.pid} on {socket.gethostname()} since 20"):
        run_lock.take(folder)
    process.kill()
    process.wait()
    run_lock.take(folder)
    assert json.loads((folder / run_lock.FILE).read_text())["process"] == os.getpid()
    run_lock.take(folder.parent / "x")  # again, by the same process
    run_lock.release()
    assert folder.exists() and not list(folder.iterdir())  # made by the other


def test_a_data_worker_does_not_keep_its_ranks_lock(tmp_path):
    run_lock.take(tmp_path / "x")
    held = [d for d, _ in run_lock._held.values()]
    worker = os.fork()
    if not worker:
        code = 0
        for descriptor in held:  # closed in the child
            try:
                os.fstat(descriptor)
                code = 1
            except OSError:
                pass
        run_lock.release()  # removes nothing of its parent's
        os._exit(code)
    assert os.waitpid(worker, 0)[1] == 0 and (tmp_path / "x" / run_lock.FILE).exists()
    run_lock.release()
    assert not (tmp_path / "x").exists()


def test_what_was_made_for_a_lock_goes_and_a_run_stays(tmp_path):
    run_lock.take(tmp_path / "a" / "b" / "empty")
    run_lock.take(tmp_path / "a" / "run")
    (tmp_path / "a" / "run" / "run.json").touch()
    run_lock.release()
    assert sorted(str(f.relative_to(tmp_path)) for f in tmp_path.rglob("*")) == ["a", "a/run", "a/run/run.json"]


def test_a_folder_that_was_removed_and_made_again_is_anothers(tmp_path):
    folder = tmp_path / "x"
    run_lock.take(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / run_lock.FILE).write_text("{}")
    run_lock.release()
    assert (folder / run_lock.FILE).exists()


@pytest.mark.fault
def test_a_file_system_without_locks_is_said_once(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    for _ in range(2):
        run_lock.take(tmp_path / "x")
    assert capsys.readouterr().out.count("its file system lacks locks (Function not implemented)") == 1
    run_lock.release()


def test_the_lock_of_another_machine_is_waited_for(owner, monkeypatch, capsys):
    """As long as a file server keeps the locks of a machine that died."""
    folder, _ = owner
    monkeypatch.setattr(run_lock, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    began = time.monotonic()
    with pytest.raises(UserError, match="is in use by process"):
        run_lock.take(folder)
    assert time.monotonic() - began > 0.6 and "in case that machine has died" in capsys.readouterr().out


@pytest.mark.bad_input
def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/x: cannot be written to: Not a directory"):
        run_lock.take(tmp_path / "file" / "x")
    monkeypatch.setattr(run_lock, "REMOVAL_SECONDS", 0.1)
    with pytest.raises(UserError, match="/proc/x: cannot be written to: No such file or directory"):
        run_lock.take(Path("/proc/x"))


@pytest.mark.injection
@pytest.mark.parametrize("name", [
    "run.lock", "run.json", "result.json", "run.tmp", "result.tmp", "metrics.tmp", "metrics.jsonl", "report.html",
    "memory.png", "report.md", "deepspeed.json", "slurm.log", "cancelled", "logs", "logs/rank0.log", "nan", "final",
    "final/model.safetensors", "reference", "certificate.md", "slurm.sbatch", "oom-rank3.pickle",
    "plan.tmp", "job.json", "job.tmp",
])  # fmt: skip
def test_a_link_in_a_run_folder_is_refused_and_not_written_through(tmp_path, name):
    """In a folder that others may write to, it would choose which file of this user is overwritten."""
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("mine")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(precious)
    settings = SimpleNamespace(output_dir=str(folder), push_to_hub=False)
    with pytest.raises(UserError, match=f"{re.escape(str(folder / name))}: is a link to {re.escape(str(precious))}, "):
        run_folder.claim_folder(settings)
    assert not run_lock.held() and precious.read_text() == "mine"
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "not-there")
    with pytest.raises(UserError, match="is a link"):
        run_folder.claim_folder(settings)
    assert not (tmp_path / "not-there").exists()


@pytest.mark.injection
def test_what_a_link_leads_to_is_not_pushed_nor_made_readable(tmp_path):
    key, folder = tmp_path / "id_rsa", tmp_path / "run"
    key.write_text("secret")
    key.chmod(0o600)
    folder.mkdir()
    (folder / "notes.txt").symlink_to(key)
    (folder / "checkpoint-1").symlink_to(tmp_path)
    run_folder.apply_umask(folder)
    assert key.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match=r"notes\.txt: is a link to .* or push its target"):
        run_folder.claim_folder(SimpleNamespace(output_dir=str(folder), push_to_hub=True))
    assert not run_lock.held()


def test_several_writers_of_one_folder_have_no_temporary_name_in_common(tmp_path):
    """The live page, the supervisor and `zerofit report` write at once, on machines that share the folder."""
    (tmp_path / "report.json").write_text("before")
    with paths.replacing(tmp_path / "report.html") as page, paths.replacing(tmp_path / "report.html") as again:
        page.write(b"page, ")
        paths.write_text(tmp_path / "report.md", "text")
        paths.write_text(tmp_path / "report.json", "{}")
        again.write(b"again")
        page.write(b"whole")
    read = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert read == {"report.html": "page, whole", "report.md": "text", "report.json": "{}"}
    with pytest.raises(ZeroDivisionError), paths.replacing(tmp_path / "report.json"):
        assert 1 / 0
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == read


@pytest.mark.fault
def test_what_a_killed_writer_has_left_does_not_stay(tmp_path):
    """What another process may still be writing, and what no writer of ours names so, does."""
    name = "n[a].json"
    old, young, foreign = (tmp_path / f"{name}.{end}" for end in ("0123abcd.tmp", "4567abcd.tmp", "mine.tmp"))
    for file in (old, young, foreign):
        file.write_text("half")
    for file in (old, foreign):
        os.utime(file, (0, 0))
    paths.write_text(tmp_path / name, "{}")
    assert {*tmp_path.iterdir()} == {tmp_path / name, young, foreign}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["o\udce4t", "n" * 256, "ö" * 128, "/".join(["p" * 200] * 20)])
def test_a_folder_in_which_a_run_could_not_be_saved_is_refused_before_it(tmp_path, name):
    folder = tmp_path / name
    with pytest.raises(UserError, match=r"--output_dir .*: is (not UTF-8|too long for a file system)"):
        run_folder.claim_folder(SimpleNamespace(output_dir=str(folder), push_to_hub=False))
    with pytest.raises(UserError, match="--output_dir"):
        run_folder.check_folder(folder, resumes=False)
    with pytest.raises(UserError, match="--output_dir"):
        export.main([str(TINY / "model"), "--output_dir", str(folder)])
    assert not [*tmp_path.iterdir()] and not run_lock.held()


def test_a_name_as_long_as_can_be_has_room_beside_it(tmp_path):
    for name in ("n" * 255, "ö" * 127, "short"):
        folder, other = tmp_path / name, tmp_path / f"{name[:-1]}x"
        aside = paths.sibling(folder, ".canary", prefix=".")
        aside.mkdir()
        paths.write_text(folder, "text")
        assert folder.read_text() == "text" and aside != paths.sibling(other, ".canary", prefix=".")
    assert paths.sibling(tmp_path / "run", ".canary", prefix=".").name == ".run.canary"


LOCKS = {
    "run.lock": lambda folder: run_lock.take(folder),
    "rows.arrow.lock": lambda folder: paths.locked(folder / "rows.arrow.lock").__enter__(),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_lock_file_that_is_no_file_is_named(tmp_path, name, kind):
    (tmp_path / name).mkdir() if kind == "folder" else (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        LOCKS[name](tmp_path)
    assert not (tmp_path / "elsewhere").exists()


# File -> why its text has no name or text of a user, or may not be written with escapes.
WRITES_PLAINLY = {
    "init.py": "files of the kit", "doctor.py": "a letter", "measure.py": "a number", "simulate.py": "a trace",
    "convert.py": "YAML is read again, and says so", "run_page.py": "escapes by itself, into a named file",
}  # fmt: skip


def test_files_that_name_what_a_user_named_are_written_whatever_the_name():
    """Path.write_text raises for what has no UTF-8: in the model card, after the last step."""
    for file in (ROOT / "src" / "zerofit").rglob("*.py"):
        plain = re.findall(r"(?<!paths)(?<=[\w)])\.write_text\((?!json\.dumps).*", file.read_text(encoding="utf-8"))
        assert not plain or file.name in WRITES_PLAINLY, f"{file}: {plain}: use paths.write_text"


def test_two_jobs_that_are_started_at_once_with_one_port_do_not_meet():
    port = distributed.free_port()
    assert node_options.port_of(str(port)) == node_options.port_of(str(port)) == port  # a second attempt
    words = "import sys; from zerofit.launch import node_options; node_options.port_of(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", words, str(port)], capture_output=True, text=True, check=False)
    assert f"PORT={port} is in use on this machine" in done.stderr


@pytest.mark.injection
@pytest.mark.parametrize("verb", [status.main, cancel.main, run_page.main, watch.main])
def test_no_escape_sequence_of_a_folders_name_reaches_the_terminal(tmp_path, monkeypatch, capsys, verb):
    monkeypatch.chdir(tmp_path)
    folder = Path("r\x1b[2J")
    folder.mkdir()
    (folder / "run.json").write_text('{"recipe": "sft"}')
    with contextlib.suppress(UserError):  # whose text the entry point makes printable
        verb([str(folder)])
    assert "\x1b" not in "".join(capsys.readouterr())


@pytest.mark.bad_input
def test_pipes_in_a_folder_from_elsewhere_are_not_waited_for(tmp_path):
    for name in ("run.json", "result.json", "metrics.jsonl", "run.lock"):
        os.mkfifo(tmp_path / name)
    assert status.progress(tmp_path).startswith("before the first step")
    assert run_lock.owner(tmp_path) == {} and run_lock.holder(tmp_path) is None
    with pytest.raises(UserError, match="not a run folder"):
        run_page.main([str(tmp_path)])


@pytest.mark.injection
def test_a_link_that_comes_later_is_replaced_or_an_error(tmp_path, capsys):
    """Whoever shares the folder may make it after the folder was claimed."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("run.json", "result.json", "report.json", "report.md", "report.html"):
        (tmp_path / name).symlink_to(precious)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    run_folder.write_json(tmp_path / "run.json", {"recipe": "sft"})
    run_folder.write_json(tmp_path / "result.json", {"status": "finished", "steps": 1})
    run_folder.keep_metrics(tmp_path, 1)
    run_page.write(tmp_path)
    postmortem.write(tmp_path, [postmortem.Outcome("crash", 1)], "")
    assert run_folder.finished(tmp_path)
    assert not [file for file in tmp_path.iterdir() if file.is_symlink() or file.suffix == ".tmp"]
    assert precious.read_text() == "mine" and "could not" not in capsys.readouterr().out
    for name in ("rank0.log", "metrics.jsonl"):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / name).symlink_to(precious)
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            paths.appending(tmp_path / "logs" / name)
    os.mkfifo(tmp_path / "logs" / "pipe")
    with pytest.raises(OSError, match="No such device or address"):  # it would wait for a reader
        paths.appending(tmp_path / "logs" / "pipe")
    assert precious.read_text() == "mine"


def test_a_report_that_is_a_link_is_left_alone(tmp_path):
    (tmp_path / "run.json").write_text('{"recipe": "sft"}')
    (tmp_path / "report.html").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"report\.html: is a link .*--output"):
        run_page.main([str(tmp_path)])
    run_page.main([str(tmp_path), "--output", str(tmp_path / "report.html")])  # named by the user
    assert "sft" in (tmp_path / "mine").read_text()


def test_folders_and_checkpoints_on_other_disks_are_linked_as_before(tmp_path):
    disk, folder = tmp_path / "disk", tmp_path / "runs" / "x"
    (disk / "runs" / "x" / "attempts").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(disk / "runs")
    users = ["data.jsonl", "metrics.csv", "plan.txt", "report.pdf", "run.py", "run.sh"]  # that no run writes
    for name in ("checkpoint-100", "attempts/1", "notes.txt", "train.jsonl", "data", *users):
        (folder / name).symlink_to(tmp_path)
    run_folder.claim_folder(SimpleNamespace(output_dir=str(folder), push_to_hub=False))
    run_lock.release()
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        ["attempts", "checkpoint-100", "data", "notes.txt", "train.jsonl", *users]
    )


def test_jobs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    holders = []
    for _ in range(3):
        reading, writing = os.pipe()
        if not (holder := os.fork()):
            settings = SimpleNamespace(recipe=program.kit()["sft"], output_dir=None, push_to_hub=False)
            run_folder.claim_folder(settings)
            os.write(writing, settings.output_dir.encode() + b"\n")
            signal.pause()
        os.close(writing)
        holders.append((holder, os.read(reading, 1000).decode().strip()))
        os.close(reading)
    for holder, _ in holders:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    assert [name for _, name in holders] == [f"runs/sft-20260101-000000{suffix}" for suffix in ("", "-2", "-3")]


@pytest.mark.injection
@pytest.mark.parametrize("said", [
    "[1]", "{}", "1", "null", "[" * 100_000, '{"process": "x", "host": "HOST", "since": "NOW"}',
    '{"process": PID, "host": "HOST", "since": "soon"}', '{"process": PID, "host": "HOST", "since": 3}',
    '{"process": PID, "host": "HOST", "since": "NOW"}',
])  # fmt: skip
def test_a_lock_file_that_nobody_holds_ends_no_process(tmp_path, said):
    """Whatever it says: a process that it names may have nothing to do with the run."""
    other = subprocess.Popen(["sleep", "60"])
    now = time.strftime(run_lock.SINCE, time.localtime(time.time() + 5))
    for word, meant in (("PID", str(other.pid)), ("HOST", socket.gethostname()), ("NOW", now)):
        said = said.replace(word, meant)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / run_lock.FILE).write_text(said)
    try:
        assert run_lock.holder(tmp_path) is None
        with pytest.raises(UserError, match="not running on this machine"):
            cancel.main(["--now", str(tmp_path)])
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_process_that_holds_a_lock_is_found(owner, monkeypatch):
    """By the file that it has open, or, of another user's process, by the kernel's list of locks."""
    folder, process = owner
    assert run_lock.holder(folder).pid == process.pid

    def denied(self):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "open_files", denied)
    assert run_lock.holder(folder).pid == process.pid


def test_what_only_looks_takes_no_lock(owner, monkeypatch):
    folder, _ = owner
    monkeypatch.setattr(preflight, "dry_run", lambda settings: None)  # the simulation, a minute
    words = ["--gpus", "1", str(ROOT / "recipes" / "sft.py"), "--output_dir", str(folder)]
    launch.main(["--show", *words])
    for look in ("--show", "--plan"):
        with pytest.raises(SystemExit) as ended:
            launch.main([*words, look])
        assert ended.value.code == 0 and not run_lock.held()
    with pytest.raises(UserError, match="is in use by process"):
        launch.main(words)
    assert sorted(f.name for f in folder.iterdir()) == [run_lock.FILE]


@pytest.mark.fault
def test_a_process_ends_with_its_supervisor(tmp_path):
    """Also where a process is in between that outlives it; and nobody reaps the supervisor yet."""
    rank = (
        "import time; from pathlib import Path; from zerofit.base import process; process.begin(); "
        f"Path({str(tmp_path / 'up')!r}).touch(); time.sleep(600)"
    )
    between = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    above = (
        "import os, subprocess, sys; from zerofit.base import rank_status; os.environ[rank_status.SUPERVISOR] = "
        f"str(os.getpid()); subprocess.run([sys.executable, '-c', {between!r}], start_new_session=True)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", above])
    family = []
    try:
        wait_for((tmp_path / "up").exists, "no rank")
        family = psutil.Process(supervisor.pid).children(recursive=True)
        assert len(family) == 2 and not psutil.wait_procs(family, timeout=1.5 * rank_status.LOOK_SECONDS)[0]
        supervisor.kill()
        assert not psutil.wait_procs(family, timeout=60)[1]
    finally:
        supervisor.kill()
        supervisor.wait()
        for process in family:
            if process.is_running():
                process.kill()


@pytest.mark.fault
def test_the_next_command_is_true(tmp_path):
    """What the end of a run tells, by what its folder holds."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "it's a run"
    folder.mkdir()
    assert (
        checkpoint_resume.how_to_continue("interrupted", folder, None)
        == "interrupted; no run was started. Repeat the command"
    )
    (folder / "run.json").write_text("{}")
    quoted = f"'{tmp_path}/it'\"'\"'s a run'"
    assert checkpoint_resume.next_command(folder) == f"nothing is saved yet. Start again: make resume RUN={quoted}"
    saved = Path(folder / "checkpoint-4")
    saved.mkdir()
    (saved / "trainer_state.json").write_text('{"global_step": 4}')
    save_file({"a": torch.ones(3)}, saved / "model.safetensors")
    said = checkpoint_resume.next_command(folder)
    assert "checkpoint-4 holds the model without optimizer states" in said and "make export RUN=" in said
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"a": torch.ones(3)}, saved / name)
    assert checkpoint_resume.next_command(folder) == f"saved up to step 4. Continue: make resume RUN={quoted}"
