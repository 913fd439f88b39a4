"""Jobs that fail: each fault, injected into one of two real ranks, ends in recovery with the losses of an undisturbed
run, or in the right exit code and sentence; no process and no half-written checkpoint stays behind."""

import fcntl
import functools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, TINY, Run, python, run_python

from zerofit.base import distributed, rank_status
from zerofit.base.errors import OutOfMemory
from zerofit.checkpoint import integrity, next_settings
from zerofit.commands import resume
from zerofit.config import resolve
from zerofit.entrypoint import guard
from zerofit.job import job, run_folder
from zerofit.job.request import Request
from zerofit.launch import canary, postmortem, retry, supervisor
from zerofit.launch import launch as launcher
from zerofit.train import network_check

pytestmark = pytest.mark.fault

COMMON = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "64", "--max_length", "64", "--effective_batch_size", "8",
    "--per_device_train_batch_size", "4", "--learning_rate", "1e-3", "--max_steps", "6", "--logging_steps", "1",
    "--save_strategy", "steps", "--save_steps", "2", "--num_samples", "0",
]  # fmt: skip


def launch(folder, *flags, fault=None, gpus="2", zero="2", timeout=400, recipe="sft", fresh=True):
    """The finished `zerofit launch` of two ranks; every process that it had started is gone.

    fresh: with a fault, in an interpreter of its own, whose processes are told by their command lines.
    """
    file = recipe if recipe.endswith(".py") else f"recipes/{recipe}.py"
    words = ["-m", "zerofit", "launch", "--gpus", gpus, file, *COMMON, "--zero", zero, *flags]
    if not fault:
        return run_python([*words, "--output_dir", str(folder)], cwd=ROOT, timeout=timeout)
    marker = folder.with_suffix(".struck")
    env = {  # sitecustomize brings the fault
        "ZEROFIT_TEST_FAULT": json.dumps({"marker": str(marker), "rank": 1, "step": 3} | fault),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "faults"), os.environ["PYTHONPATH"]]),
    }
    if not fresh:
        done = run_python([*words, "--output_dir", str(folder)], cwd=ROOT, timeout=timeout, **env)
        assert marker.exists(), done.stderr
        return done
    done = subprocess.run(
        [sys.executable, *words, "--output_dir", str(folder)],
        capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=os.environ | env,
    )  # fmt: skip
    assert fault["what"] == "limit" or marker.exists(), done.stderr
    time.sleep(0.2)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or [])]
    return done


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = launch(folder)
    assert done.returncode == 0, done.stderr
    assert not (folder / "report.json").exists() and not (folder / "attempts").exists()
    return Run(folder)


def assert_recovered(done, folder, undisturbed, attempts=2):
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    run = Run(folder)
    assert [m["step"] for m in run.metrics if "loss" in m] == [1, 2, 3, 4, 5, 6]
    assert run.losses == pytest.approx(undisturbed.losses, rel=1e-3)  # as between accumulation splits
    found = run.json("report.json")
    assert found["status"] == "finished" and len(found["attempts"]) == attempts
    assert all(not integrity.find_corruption(f) for f in folder.glob("checkpoint-*"))
    assert run.json("result.json")["status"] == "finished"
    return found["attempts"][0]


def test_out_of_memory_goes_on_with_half_the_micro_batch(tmp_path):
    folder = tmp_path / "run"
    done = launch(folder, "--max_steps", "4", fault={"what": "oom", "where": "backward"}, fresh=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    first = Run(folder).json("report.json")["attempts"][0]
    before, after = Run(folder / "attempts" / "1").losses, Run(folder).losses
    assert len(before) == 3 and len(after) == 4  # the third step was made twice: whole, and in halves
    assert after[:3] == pytest.approx(before, rel=1e-3)
    assert (first["kind"], first["rank"], first["step"]) == ("out of memory", 1, 3)
    assert "attempt 2, from checkpoint-2: micro batch 2 instead of 4" in done.stderr
    arguments = Run(folder).json("run.json")["arguments"]
    assert arguments["per_device_train_batch_size"]["value"] == 2
    assert arguments["effective_batch_size"]["value"] == 8
    assert "ran out of GPU memory" in (folder / "report.md").read_text()
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_out_of_memory_brings_back_the_checkpointing_that_a_plan_left_out(undisturbed, tmp_path):
    chosen = {"flags": {"gradient_checkpointing": False}, "why": "gradient_checkpointing false: it fits"}
    folder, fault = tmp_path / "run", {"what": "oom", "where": "backward", "chosen": chosen}
    done = launch(folder, fault=fault)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "attempt 2, from checkpoint-2: gradient checkpointing of every layer" in done.stderr
    assert "gradient_checkpointing false of the checkpoint is true here: this run's value is used" in done.stdout
    first, second = (json.loads((f / "run.json").read_text()) for f in (folder / "attempts" / "1", folder))
    assert first["arguments"]["gradient_checkpointing"] == {"value": False, "source": "plan"}
    assert chosen["why"] in first["decisions"] and chosen["why"] not in second["decisions"]
    assert second["arguments"]["gradient_checkpointing"]["value"] is True
    assert second["arguments"]["per_device_train_batch_size"]["value"] == 4
    assert Run(folder).losses == pytest.approx(undisturbed.losses, rel=1e-3)


@pytest.mark.slow
def test_a_killed_rank_is_started_again(undisturbed, tmp_path):
    folder = tmp_path / "run"
    done = launch(folder, fault={"what": "kill", "where": "step"})
    first = assert_recovered(done, folder, undisturbed)
    assert (first["kind"], first["rank"], first["signal"]) == ("lost rank", 1, "SIGKILL")
    assert "the same settings (restart 1 of 3)" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["0", "3"])
@pytest.mark.parametrize("where", ["forward", "step", "eval", "save"])
def test_out_of_memory_anywhere(where, zero, tmp_path):
    more = ["--eval_data", str(TINY / "eval.jsonl"), "--eval_strategy", "steps", "--eval_steps", "3"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert launch(whole, *more, zero=zero).returncode == 0
    step = {"eval": 3, "save": 4}.get(where, 3)
    done = launch(folder, *more, fault={"what": "oom", "where": where, "step": step}, zero=zero)
    assert assert_recovered(done, folder, Run(whole))["kind"] == "out of memory"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["data", "forward", "backward", "step", "save"])
@pytest.mark.parametrize("step", [0, 1, 2, 4])
def test_a_rank_is_killed_at_any_moment(undisturbed, tmp_path, where, step):
    step += 3 * (where == "step" and step == 0)  # no step has ended before the first
    if where == "save" and step in (0, 1):
        step += 5 if step else 2  # saves come after steps 2, 4 and 6
    folder = tmp_path / "run"
    done = launch(folder, fault={"what": "kill", "where": where, "step": step})
    assert assert_recovered(done, folder, undisturbed)["kind"] == "lost rank"


@pytest.mark.slow
def test_a_hang_is_ended_and_named(undisturbed, tmp_path):
    folder = tmp_path / "run"
    done = launch(folder, "--hang_timeout", "8", fault={"what": "hang", "where": "forward"})
    first = assert_recovered(done, folder, undisturbed)
    assert (first["kind"], first["rank"]) == ("hang", 1)
    stacks = [(folder / "attempts" / "1" / f"stack{rank}.txt").read_text() for rank in (0, 1)]
    assert "sitecustomize.py" in stacks[1] and "sitecustomize.py" not in stacks[0] and "File" in stacks[0]


@pytest.mark.slow
def test_ranks_that_stay_far_longer_than_ever_end_the_job(undisturbed, tmp_path):
    """With limits of seconds instead of minutes (tests/faults); nothing is said about --hang_timeout."""
    folder = tmp_path / "run"
    done = launch(folder, fault={"what": "hang", "where": "forward", "patience": 8.0})
    first = assert_recovered(done, folder, undisturbed)
    assert (first["kind"], first["rank"], first["step"]) == ("hang", 1, 3)
    assert re.search("rank 1 never started collective [0-9]+ of group ", first["error"])
    assert "this step has run for" in first["error"] and "training is stuck on all ranks" in done.stderr + done.stdout
    stacks = [(folder / "attempts" / "1" / f"stack{rank}.txt").read_text() for rank in (0, 1)]
    assert "sitecustomize.py" in stacks[1] and "sitecustomize.py" not in stacks[0] and "File" in stacks[0]


@pytest.mark.slow
def test_ranks_that_the_others_wait_for_are_named(tmp_path):
    folder = tmp_path / "run"
    slow = {"what": "none", "where": "none", "slow": {"data": 1, "forward": 0}}
    folder.with_suffix(".struck").touch()
    done = launch(folder, "--max_steps", "8", "--dataloader_num_workers", "0", fault=slow)
    assert done.returncode == 0, done.stderr
    found = Run(folder).json("run.json")["slow_ranks"]
    assert len(found) == 2 and all(f"note: {sentence}" in done.stdout for sentence in found), found
    data, forward = sorted(found, reverse=True)
    assert re.match(r"rank 1 \(node 0, .*\) waits 0\.[5-9].* s per step for data, the others 0.* s: all ", data)
    assert re.match(r"rank 0 \(node 0, .*\) runs the forward pass \d+% slower than the others: all ", forward)


@pytest.mark.slow
def test_a_finished_run_that_is_extended_and_fails_is_not_called_finished(tmp_path):
    folder = tmp_path / "run"
    assert launch(folder, "--max_steps", "2").returncode == 0
    fault = {"what": "crash", "where": "forward", "rank": 0}
    done = launch(folder, "--resume_from_checkpoint", "true", fault=fault, fresh=False)
    assert done.returncode == 1 and "injected" in done.stderr, done.stderr
    assert not run_folder.finished(folder)
    assert Run(folder).json("result-after-step-2.json")["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ({"what": "crash", "where": "forward"}, 1, "rank 1 ended after step 3: injected"),
        ({"what": "disk full", "where": "save", "step": 4}, 1, "is full (No space left on device)"),
        ({"what": "oom", "where": "forward"}, 3, "ran out of GPU memory in the"),
    ],
)
def test_what_cannot_be_survived_is_explained(tmp_path, fault, code, says):
    folder = tmp_path / "run"
    done = launch(folder, "--on_oom", "fail", "--memory_limit", "1", fault=fault)
    assert done.returncode == code and says in done.stderr, done.stderr
    found = Run(folder).json("report.json")
    assert found["status"] == "failed" and says in found["cause"] and found["attempts"][0]["rank"] == 1
    assert "| 3 | " in (folder / "report.md").read_text()
    assert integrity.latest_valid_checkpoint(folder).name == "checkpoint-2"
    if code == 3:  # one thing to try, with what it saves by the plan
        assert "zerofit: try: micro batch 2 instead of 4 (according to the plan, saves 0.0" in done.stderr
        assert " and fits)" in done.stderr


def test_the_advice_after_out_of_memory_names_the_next_smaller_setting(tmp_path):
    settings = resolve.resolve_settings("sft", ["--zero", "0", "--use_cpu", "true"], 1)
    smaller = next_settings.next_smaller_setting(settings, resolve.resolve)
    advice = postmortem.advice(postmortem.Outcome("out of memory", 3), tmp_path, settings, smaller)
    half = settings.per_device_train_batch_size // 2
    assert advice.startswith(f"micro batch {half} instead of {2 * half}; or `make plan`")


@pytest.mark.slow
def test_a_full_disk_at_the_first_save_is_one_sentence(tmp_path):
    folder = tmp_path / "run"
    done = launch(folder, fault={"what": "disk full", "where": "save", "step": 2})
    assert done.returncode == 1 and f"the disk of {folder} is full (No space left on device); " in done.stderr
    assert "Traceback" not in done.stderr and Run(folder).json("report.json")["attempts"][0]["kind"] == "disk full"
    assert not [*folder.rglob("*.tmp"), *folder.glob(".saving"), *folder.glob("checkpoint-*")]


def test_the_report_may_find_no_room(monkeypatch, tmp_path, capsys):
    """The supervisor says why the job ended nevertheless, and leaves nothing half-written."""

    def full(self, *_args, **_kw):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    attempt = supervisor.Attempt(settings=None)
    for rank, why in ((1, ": the disk of x is full"), (0, "")):  # rank 0 prints its error itself
        job = SimpleNamespace(folder=tmp_path, node="")
        last = postmortem.Outcome("disk full", 1, rank, "DiskFull: the disk of x is full", step=2)
        supervisor._write_report(job, attempt, [last], tmp_path / "records", opened=True)
        said = capsys.readouterr().err
        assert f"rank {rank} ended after step 2{why} (report.md could not be written: No space left" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device"), RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos "
                                                         "3816448 vs 3816340"),
    RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/1"),
    Exception("I/O error: No space left on device (os error 28)"),
])  # fmt: skip
def test_how_a_full_disk_is_known(error):
    assert rank_status.disk_is_full(error) and not rank_status.disk_is_full(RuntimeError("CUDA error: out of memory"))


@pytest.mark.slow
def test_an_exception_in_a_data_worker(tmp_path):
    folder = tmp_path / "run"
    done = launch(folder, "--dataloader_num_workers", "1", fault={"what": "crash", "where": "worker"})
    assert done.returncode == 1 and "rank 1 ended: injected (in a data worker)" in done.stderr, done.stderr
    assert Run(folder).json("report.json")["attempts"][0]["kind"] == "crash"


@pytest.mark.slow
def test_memory_that_truly_runs_out(tmp_path):
    """Address space for a small micro batch only: the CPU's allocator fails, the next attempt fits."""
    flags = ["--per_device_train_batch_size", "512", "--effective_batch_size", "512", "--max_steps", "2",
             "--max_samples", "512", "--gradient_checkpointing", "false"]  # fmt: skip
    fault = {"what": "limit", "where": "start", "rank": 0, "bytes": 600 * 2**20}
    done = launch(tmp_path / "run", *flags, fault=fault, gpus="1", zero="0")
    assert done.returncode == 0, done.stderr
    found = Run(tmp_path / "run").json("report.json")
    assert found["attempts"][0]["kind"] == "out of memory" and "micro batch 256 instead of 512" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(tmp_path, number):
    words = ["-m", "zerofit", "launch", "--gpus", "2", "recipes/sft.py", *COMMON, "--max_steps", "5000"]
    job = subprocess.Popen([sys.executable, *words, "--output_dir", str(tmp_path / "run")], cwd=ROOT,
                           stderr=subprocess.PIPE, text=True)  # fmt: skip
    deadline = time.time() + 120
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert time.time() < deadline and job.poll() is None
        time.sleep(0.2)
    ranks = psutil.Process(job.pid).children(recursive=True)
    for rank in ranks:
        rank.suspend()  # else they may have saved and ended before the second signal
    job.send_signal(number)
    time.sleep(rank_status.ONE_SIGNAL_SECONDS + 0.3)
    job.send_signal(number)
    _, said = job.communicate(timeout=30)
    ended = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
    assert job.returncode == 130 and f"zerofit: {ended} at step" in said and "make resume RUN=" in said
    assert not psutil.wait_procs(ranks, timeout=60)[1]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "zero"), [(signal.SIGTERM, "2"), (signal.SIGUSR1, "3")])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, number, zero):
    """It saves, ends with 75, and `make resume` makes the rest of it the same, bit for bit."""
    long = ["--max_steps", "150", "--zero", zero, "--save_steps", "1000"]
    assert launch(tmp_path / "whole", *long, zero=zero).returncode == 0
    folder = tmp_path / "run"
    words = ["-m", "zerofit", "launch", "--gpus", "2", "recipes/sft.py", *COMMON, *long, "--output_dir", str(folder)]
    job = subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 120
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < 3:
        assert time.time() < deadline and job.poll() is None
        time.sleep(0.1)
    job.send_signal(number)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 75, said
    (saved,) = folder.glob("checkpoint-*")
    stopped = f"stopped after step {saved.name[11:]}, {saved.name} is saved"
    assert f"{stopped}; continue with `make resume RUN={folder}`" in said
    assert Run(folder).json("result.json")["status"] == "stopped" and not (folder / "report.json").exists()
    done = subprocess.run(["make", "-C", str(ROOT), "ENV=active", f"PYTHON={python()}", "resume", f"RUN={folder}"],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    assert Run(folder).losses == Run(tmp_path / "whole").losses
    done = run_python(["-m", "zerofit", "resume", str(folder)])
    assert done.returncode == 2 and "this run has finished" in done.stderr


@pytest.mark.slow
@pytest.mark.fault
def test_a_terminal_that_closes_loses_no_step(tmp_path):
    """The job saves, although whatever it prints from then on is an error."""
    words = ["-m", "zerofit", "launch", "--gpus", "2", "recipes/sft.py", *COMMON, "--max_steps", "5000"]
    words += ["--save_strategy", "steps", "--save_steps", "10000", "--output_dir", str(tmp_path / "run")]
    ours, theirs = pty.openpty()

    def of_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    job = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
                           start_new_session=True, preexec_fn=of_terminal)  # fmt: skip
    os.close(theirs)
    said = b""
    while b"step 3/" not in said:
        said += os.read(ours, 4096)
    os.close(ours)
    assert job.wait(120) == 75
    result = Run(tmp_path / "run").json("result.json")
    assert result["status"] == "stopped" and (tmp_path / "run" / f"checkpoint-{result['steps']}").is_dir()
    assert f"step {result['steps']}/" in (tmp_path / "run" / "logs" / "rank0.log").read_text()


@pytest.mark.slow
def test_a_signal_to_every_process_leaves_the_data_workers_to_finish(tmp_path):
    """As SLURM sends SIGTERM: the step is saved, and no worker outlives its rank."""
    folder = tmp_path / "run"
    workers = ["--dataloader_num_workers", "2", "--dataloader_persistent_workers", "true", "--max_steps", "5000"]
    words = ["-m", "zerofit", "launch", "--gpus", "2", "recipes/sft.py", *COMMON, *workers, "--save_steps", "10000"]
    job = subprocess.Popen([sys.executable, *words, "--output_dir", str(folder)], cwd=ROOT, stderr=subprocess.PIPE,
                           text=True)  # fmt: skip
    deadline = time.time() + 180
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < 3:
        assert time.time() < deadline and job.poll() is None
        time.sleep(0.1)
    processes = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
    assert len(processes) >= 7  # the launcher, two ranks, four workers
    for process in processes:
        process.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 75 and "is saved; continue with `make resume" in said, said
    assert not psutil.wait_procs(processes, timeout=15)[1]


# --- the parts ---


@pytest.mark.parametrize("by_agent", [False, True])
def test_a_rank_without_a_supervisor_notes_one_signal_and_ends_at_the_second(by_agent):
    """Not under torchrun, whose agent passes on, perhaps later, what SLURM has sent to the rank too."""
    said = """
import os, signal, time
from zerofit.base import rank_status
asked = rank_status.StopRequest()
asked.listen()
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)  # at once: the same request
print(asked.received is not None, flush=True)
time.sleep(rank_status.ONE_SIGNAL_SECONDS + 0.1)
os.kill(os.getpid(), signal.SIGTERM)
print("goes on")
"""
    env = os.environ | ({distributed.BY_AGENT: "x"} if by_agent else {})
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout) == ((0, "True\ngoes on\n") if by_agent else (-signal.SIGTERM, "True\n"))


def test_what_cannot_be_resumed(tmp_path):
    done = run_python(["-m", "zerofit", "resume", str(tmp_path)])
    assert done.returncode == 2 and "not a run folder" in done.stderr and "Traceback" not in done.stderr


def parse(flags, ranks=2):
    return resolve.resolve_settings("sft", flags, ranks)


def smaller(settings, phase=""):
    """What is tried after an out-of-memory error: (change, settings), or None."""
    return next_settings.next_smaller_setting(settings, resolve.resolve, phase)


def request_changes(before, after):
    """The arguments that two requests do not have in common."""
    names = before.values.keys() | after.values.keys()
    return {name for name in names if before.values.get(name, "none") != after.values.get(name, "none")}


CHANGED = {"micro": {"per_device_train_batch_size"}, "gradient": {"gradient_checkpointing"}, "ZeRO-3": {"zero"},
           "offload": {"offload"}}  # fmt: skip


def test_rungs_down_to_the_last():
    flags = ["--per_device_train_batch_size", "4", "--effective_batch_size", "8", "--zero", "2",
             "--gradient_checkpointing", "false"]  # fmt: skip
    said, settings = [], parse(flags)
    while following := smaller(settings):
        said.append(following[0])
        changed = request_changes(settings.request, following[1].request)
        assert changed <= CHANGED[following[0].partition(" ")[0]], changed
        settings = following[1]
        assert parse(settings.request.flags()).effective_batch_size == settings.effective_batch_size == 8
    assert said == ["micro batch 2 instead of 4", "micro batch 1 instead of 2", "gradient checkpointing of every layer",
                    "ZeRO-3", "offload optimizer", "offload all"]  # fmt: skip


def test_evaluation_gets_a_smaller_batch_of_its_own():
    """Its memory depends neither on the micro batch nor on checkpointing."""
    flags = ["--per_device_train_batch_size", "4", "--effective_batch_size", "8", "--zero", "2", "--eval_fraction",
             "0.1", "--gradient_checkpointing", "false"]  # fmt: skip
    said, settings = [], parse(flags)
    while following := smaller(settings, "eval"):
        said.append(following[0])
        settings = following[1]
        assert settings.per_device_train_batch_size == 4
    assert said == ["evaluation batch 2 instead of 4", "evaluation batch 1 instead of 2", "ZeRO-3", "offload optimizer",
                    "offload all"]  # fmt: skip


@pytest.mark.parametrize(("given", "becomes"), [([], 2), (["--per_device_eval_batch_size", "16"], 2),
                                                (["--per_device_eval_batch_size", "1"], 1)])  # fmt: skip
def test_half_the_micro_batch_is_half_of_evaluation_too(given, becomes):
    flags = ["--per_device_train_batch_size", "4", "--effective_batch_size", "8", "--eval_fraction", "0.1", *given]
    said, settings = smaller(parse(flags))
    assert said == "micro batch 2 instead of 4" and settings.per_device_eval_batch_size == becomes


def test_the_phase_is_known_to_the_supervisor(monkeypatch, tmp_path):
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    rank_status.record(OutOfMemory("rank 0 ran out of GPU memory", "eval"))
    last = postmortem.ending(3, tmp_path, [], None, 0, host_kills=0)
    assert (last.kind, last.phase) == ("out of memory", "eval")


def test_checkpointing_that_a_plan_left_out_comes_back_first():
    chosen = {"per_device_train_batch_size": 4, "gradient_checkpointing": False}
    asked = parse(["--effective_batch_size", "8"]).request
    asked = asked.with_plan_values("gradient_checkpointing false: it fits", chosen)
    settings = resolve.resolve(asked, 2)
    assert "gradient_checkpointing false: it fits" in settings.decisions
    said, settings = smaller(settings)
    assert said == "gradient checkpointing of every layer" and settings.per_device_train_batch_size == 4
    assert settings.gradient_checkpointing and settings.source["gradient_checkpointing"] == "flag"
    assert "gradient_checkpointing false: it fits" not in settings.decisions
    assert smaller(settings)[0] == "micro batch 2 instead of 4"


def test_every_layer_is_recomputed_whatever_a_preset_says():
    for preset in ("gpu-24g", "gpu-80g"):
        flags = ["--preset", preset, "--optim", "adamw_torch", "--per_device_train_batch_size", "1"]
        said, settings = smaller(parse(flags))
        assert said == "gradient checkpointing of every layer"
        assert (settings.gradient_checkpointing_every, settings.gradient_checkpointing_policy) == (1, "full")


def test_a_resume_leaves_to_the_plan_what_it_has_chosen(monkeypatch, tmp_path):
    """Its choice goes on, with its source: the plan of the start keeps it if it fits."""
    started, chosen = [], {"per_device_train_batch_size": 4, "gradient_checkpointing": False}
    monkeypatch.setattr(launcher, "main", lambda words, asked: started.append(asked))
    request = parse(["--effective_batch_size", "16", "--zero", "2"]).request.with_plan_values("it fits", chosen)
    job.write(tmp_path / job.FILE, job.Job(request, resolve.resolve(request, 2), None))
    resume.main([str(tmp_path)])
    resume.main([str(tmp_path), "--gradient_checkpointing", "true"])
    sources = [{name: asked.source[name] for name in chosen} for asked in started]
    assert sources == [dict.fromkeys(chosen, "plan"), dict(zip(chosen, ("plan", "flag"), strict=True))]
    assert started[0].get("per_device_train_batch_size") == 4 and not started[0].notes


def test_the_newest_whole_checkpoint(tmp_path):
    import torch
    from safetensors.torch import save_file

    for step in (2, 4, 6, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
        save_file({"a": torch.ones(3)}, folder / "model.safetensors")
        for name in ("optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"):
            torch.save({"a": torch.ones(3)}, folder / name)
    assert integrity.latest_valid_checkpoint(tmp_path).name == "checkpoint-10"
    content = (tmp_path / "checkpoint-10" / "optimizer.pt").read_bytes()
    (tmp_path / "checkpoint-10" / "optimizer.pt").write_bytes(content[:-30])
    assert integrity.latest_valid_checkpoint(tmp_path).name == "checkpoint-6"
    (tmp_path / "checkpoint-6" / "rng_state_1.pth").unlink()
    assert integrity.latest_valid_checkpoint(tmp_path).name == "checkpoint-4"
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"global')
    content = (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(content[:-1])
    assert integrity.latest_valid_checkpoint(tmp_path) is None


def test_every_job_of_a_folder_archives_its_attempts(tmp_path):
    """A resumed job begins with a first attempt again; it lies beside those of earlier jobs."""
    folder = tmp_path / "run"
    for number in (1, 2, 3):
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "rank0.log").write_text(f"job {number}")
        (tmp_path / "records").mkdir(exist_ok=True)
        (tmp_path / "records" / "rank0.json").write_text("{}")
        assert retry.archive_attempt(folder, tmp_path / "records") is None
        assert (folder / "attempts" / str(number) / "logs" / "rank0.log").read_text() == f"job {number}"
    (tmp_path / "records" / "stack0.txt").write_text("")
    whole = SimpleNamespace(folder=folder, node="")
    attempt = supervisor.Attempt(settings=None)
    crash = postmortem.Outcome("crash", 1, 0, "RuntimeError: boom", step=2)
    supervisor._write_report(whole, attempt, [crash], tmp_path / "records", opened=True)
    assert sorted(str(f.relative_to(folder / "attempts")) for f in folder.glob("attempts/*/*")) == [
        "1/logs", "1/rank0.json", "2/logs", "2/rank0.json", "3/logs", "3/rank0.json", "4/stack0.txt",
    ]  # fmt: skip


@pytest.mark.parametrize(("code", "says"), [(1, "is a fatal CUDA error in bitsandbytes"), (7, "exit code 7\n")])
def test_a_library_that_ends_a_rank_before_the_run_folder_is_there_is_named(code, says, tmp_path, capfd):
    """A real supervisor over a stand-in rank, which ends as bitsandbytes does while a base is quantized."""
    settings = SimpleNamespace(on_oom="retry", max_restarts=3, hang_timeout=0, save_only_model=False, use_cpu=False)
    words = f"import os; os.write(2, b'Error out of memory at line 76 in file /src/csrc/ops.cu\\n'); os._exit({code})"
    job = supervisor.Supervised(lambda *_: [sys.executable, "-c", words], None, settings, tmp_path / "run", {}, 1)
    assert supervisor.run(job) == code
    said = capfd.readouterr().err
    assert said.count("zerofit: the job ended: exit code") == 1 and says in said


RANK_WITHOUT_ANSWER = """
import os, sys
from zerofit.base import distributed, rank_status
from zerofit.train import network_check
print("tried with", os.environ.get("NCCL_P2P_DISABLE"), flush=True)
if os.environ.get("NCCL_P2P_DISABLE") != "1" or sys.argv[1] == "never":
    network_check.SECONDS = 0.1
    with network_check._bounded(use_cpu=False):
        import time
        time.sleep(60)
"""


@pytest.mark.fault
@pytest.mark.parametrize(
    ("answers", "use_cpu", "tried", "code"),
    [("without peers", False, 2, 0), pytest.param("never", False, 2, 5, marks=pytest.mark.slow), ("never", True, 1, 5)],
)
def test_gpus_that_do_not_answer_are_tried_without_peer_to_peer(
    tmp_path, capfd, monkeypatch, answers, use_cpu, tried, code
):
    """A real supervisor over stand-in ranks: the second attempt has NCCL_P2P_DISABLE=1, and says what it means."""
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    settings = SimpleNamespace(
        use_cpu=use_cpu, on_oom="retry", max_restarts=3, hang_timeout=0, save_only_model=False,
        resume_from_checkpoint=None,
    )  # fmt: skip
    command = [sys.executable, "-c", RANK_WITHOUT_ANSWER, answers]
    job = supervisor.Supervised(lambda *_: command, None, settings, tmp_path / "run", {}, 2)
    assert supervisor.run(job) == code
    out, err = capfd.readouterr()
    assert out.count("tried with") == tried and out.count("tried with 1") == tried - 1
    failures = out.count("received no answer from all ranks in 0 s before the first step")  # one per failed attempt
    assert failures == tried - (code == 0)
    assert ("attempt 2, from the start: the same settings with NCCL_P2P_DISABLE=1, " in err) == (tried == 2)
    assert ("so they are not the cause; NCCL_DEBUG=INFO" in out) == (tried == 2 and code == 5)


@pytest.mark.slow
@pytest.mark.fault
def test_the_canary_too_is_tried_without_peer_to_peer(tmp_path, capfd, monkeypatch):
    """And what it finds holds for the run: both have the environment of the job."""
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    settings = SimpleNamespace(use_cpu=False, on_oom="fail", hang_timeout=0, request=Request("sft"), world_size=2)
    command = [sys.executable, "-c", RANK_WITHOUT_ANSWER, "never"]
    job = supervisor.Supervised(lambda *_: command, lambda *_: settings, settings, tmp_path / "run", {}, 2)
    with pytest.raises(SystemExit, match="5"):
        canary.run(job, None)
    assert job.env["NCCL_P2P_DISABLE"] == "1"
    said = capfd.readouterr()
    assert said.out.count("retrying: the same settings with NCCL_P2P_DISABLE=1") == 1
    assert "the canary failed: rank 0 ended: " in said.err and "so they are not the cause" in said.err


@pytest.mark.parametrize(
    ("several", "use_cpu", "peers", "says", "not_said"),
    [
        (True, False, None, "NCCL_SOCKET_IFNAME; NCCL_IB_DISABLE=1 disables InfiniBand", "IOMMU"),
        (True, True, None, "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"),
        (False, True, None, "GLOO_SOCKET_IFNAME=lo", "NCCL"),
        (False, False, None, "NCCL_P2P_DISABLE=1 copies through host memory instead", "IFNAME"),
        (False, False, "1", "so they are not the cause", "IFNAME"),
    ],
)
def test_the_cure_of_ranks_without_an_answer_is_of_their_links(monkeypatch, several, use_cpu, peers, says, not_said):
    monkeypatch.setattr(distributed, "several_nodes", lambda: several)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    if peers:
        monkeypatch.setenv("NCCL_P2P_DISABLE", peers)
    cure = network_check._cure(use_cpu)
    assert says in cure and not_said not in cure


@pytest.mark.fault
def test_links_that_sum_wrong_numbers_are_found(monkeypatch):
    """Not only in the numbers that were looked at: a broken copy may spoil a part."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda numbers, group: numbers.mul_(2))
    assert network_check._bus_bandwidth(None, 2, use_cpu=True) > 0

    def spoiled(numbers, group):
        numbers.mul_(2)[-3:] = 7.0

    monkeypatch.setattr(torch.distributed, "all_reduce", spoiled)
    with pytest.raises(RuntimeError, match="3 of 4194304 summed numbers are wrong"):
        network_check._bus_bandwidth(None, 2, use_cpu=True)


def test_a_run_without_copies_between_gpus_says_so(monkeypatch):
    monkeypatch.setattr(distributed, "several_nodes", lambda: False)
    settings = SimpleNamespace(use_cpu=False)
    assert network_check._network_settings(settings) == []
    monkeypatch.setenv(network_check.P2P_FAILED, "1")
    (sentence,) = network_check._network_settings(settings)
    assert sentence.startswith(
        "NCCL_P2P_DISABLE=1: the first attempt, with copies from GPU to GPU, received no answer or a wrong one"
    )


def entry(rank, when, kind="crash", error="RuntimeError: boom", peer=False):
    return {"rank": rank, "time": when, "kind": kind, "error": error, "traceback": "", "of_a_peer": peer}


@pytest.mark.parametrize(
    ("records", "exits", "code", "expected"),
    [
        ([entry(0, 1, peer=True)], {"0": 1, "1": -9}, 1, ("lost rank", 137, 1)),
        ([entry(0, 1, peer=True), entry(1, 2)], {"0": 1, "1": 1}, 1, ("crash", 1, 1)),  # the peer noticed first
        ([entry(1, 2, "out of memory")], {"0": -15, "1": 3}, 3, ("out of memory", 3, 1)),
        ([], {}, 137, ("lost rank", 137, None)),
        ([], {}, 1, ("crash", 1, None)),
        ([entry(0, 1, peer=True)], {}, 1, ("lost rank", 1, None)),
    ],
)
def test_who_failed_first(records, exits, code, expected, tmp_path):
    for found in records:
        (tmp_path / f"rank{found['rank']}.json").write_text(json.dumps(found))
    if exits:
        (tmp_path / postmortem.EXITS).write_text(json.dumps(exits))
    last = postmortem.ending(code, tmp_path, [], None, 0, host_kills=0)
    assert (last.kind, last.code, last.rank) == expected


@pytest.mark.parametrize("place", [
    '/site-packages/torch/distributed/distributed_c10d.py", line 3398 in reduce',
    '/site-packages/deepspeed/runtime/zero/partition_parameters.py", line 700 in wait',
    '/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward',
], ids=["ZeRO-2", "ZeRO-3", "DDP"])  # fmt: skip
def test_the_rank_that_hung_is_one_that_waits_for_no_other(tmp_path, place):
    """Ranks 0 and 2 wait in the step in which rank 1 stays; rank 0's heartbeat is the oldest by chance."""
    for rank, innermost in enumerate([place, '/job/rows.py", line 7 in read', place]):
        (tmp_path / f"heartbeat{rank}").write_bytes(
            rank_status._HEARTBEAT_FILE.pack(100 + rank, 3, 50.0 + rank, b"step")
        )
        (tmp_path / f"stack{rank}.txt").write_text(
            'Thread 0x01 (most recent call first):\n  File "/zerofit/base/rank_status.py", line 9 in wait\n\n'
            f'Current thread 0x02 (most recent call first):\n  File "{innermost}\n  File "/sft.py", line 4 in main\n'
        )
    ended = functools.partial(postmortem.ending, 137, tmp_path, [], supervisor._hung(tmp_path, 1e-9, 3), 8.0, 0)
    assert (ended().kind, ended().rank, ended().step) == ("hang", 1, 3)
    assert ended().error.startswith("no step for 8 s (phase: step); ")
    by_ranks = functools.partial(postmortem.ending, 5, tmp_path, [], None, 1740.0, 0)
    (tmp_path / "rank2.json").write_text(json.dumps(entry(2, 1, "hang", "Hung: stuck: rank 2 reports it")))
    assert (by_ranks().kind, by_ranks().code, by_ranks().rank) == ("hang", 5, 1)
    assert by_ranks().sentence.startswith("rank 1 hung after step 3: stuck: rank 2 reports it; see the stacks")
    begun = [
        [[7, "all_gather of [[4]]"], [8, "all_reduce of [[9]]"], [9, "barrier of []"]],
        [[7, "all_gather of [[4]]"]],
    ]
    for rank, numbers in enumerate([begun[0], begun[1], begun[0]]):
        record = entry(rank, rank, "hang", "Hung: stuck: x") | {"collectives": {"0": numbers, str(rank): begun[0]}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(record))
    missing = "rank 1 never started collective 8 of group 0 (all_reduce of [[9]])"
    assert f"stuck: x; {missing}" in by_ranks().sentence
    for rank in range(3):
        (tmp_path / f"rank{rank}.json").unlink()
    (tmp_path / "stack1.txt").unlink()  # it could not write any
    assert ended().rank == 1
    (tmp_path / "stack1.txt").write_text((tmp_path / "stack0.txt").read_text())
    assert ended().rank == 0  # the first to stop, if the stacks do not tell


@pytest.mark.parametrize(("kind", "ended"), [
    ("disk full", ("disk full", 1)), ("crash", ("interrupted", 130)),
])  # fmt: skip
def test_a_save_that_a_signal_asked_for_found_no_room(tmp_path, kind, ended):
    (tmp_path / "rank0.json").write_text(json.dumps(entry(0, 1, kind, "DiskFull: no room for another checkpoint")))
    last = postmortem.ending(1, tmp_path, [signal.SIGUSR1], None, 0, host_kills=0)
    assert (last.kind, last.code) == ended


def test_the_kernels_kill_for_memory_is_out_of_memory(tmp_path):
    (tmp_path / postmortem.EXITS).write_text('{"1": -9}')
    last = postmortem.ending(1, tmp_path, [], None, 0, host_kills=1)
    assert (last.kind, last.code) == ("out of memory", 3) and "host memory was full" in last.sentence


def test_nothing_is_written_where_nobody_watches(monkeypatch, tmp_path):
    monkeypatch.delenv(rank_status.FOLDER, raising=False)
    rank_status.record(RuntimeError("x"))
    rank_status.Heartbeat().beat(1)
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    rank_status.record(RuntimeError("first"))
    rank_status.record(RuntimeError("its echo"))
    assert [e["error"] for e in rank_status.records(tmp_path)] == ["RuntimeError: first"]


def test_a_record_on_a_full_disk_is_none(monkeypatch, tmp_path):
    """/tmp is full: the file is made, but no byte of it fits. The supervisor tells from the exit code alone."""

    def full(descriptor, *_):
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", full)
        rank_status.record(RuntimeError("first"))
        rank_status.write_json(tmp_path / postmortem.EXITS, {"0": 1})
    assert not list(tmp_path.iterdir())
    ended = postmortem.ending(1, tmp_path, [], None, 0, host_kills=0)  # before the first step
    assert ended.sentence.startswith("the job ended: exit code 1 ") and "CUDA error in bitsandbytes" in ended.error
    assert postmortem.ending(7, tmp_path, [], None, 0, host_kills=0).error == "exit code 7"
    monkeypatch.setattr(rank_status, "heartbeats", lambda where: {0: (1, 3, 0.0)})
    ended = postmortem.ending(1, tmp_path, [], None, 0, host_kills=0)
    assert (
        ended.sentence.startswith("the job ended after step 3: ") and "fatal CUDA error in bitsandbytes" in ended.error
    )
    rank_status.record(RuntimeError("second"))
    assert [e["error"] for e in rank_status.records(tmp_path)] == ["RuntimeError: second"]


def test_pythons_memory_error_is_out_of_memory(monkeypatch, tmp_path, capsys):
    """It has no text. The supervisor finds a record that it starts again for."""
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))

    def load():
        raise MemoryError

    with pytest.raises(SystemExit) as ended:
        guard(load)
    assert ended.value.code == 3 and rank_status.records(tmp_path)[0]["kind"] == "out of memory"
    assert "ran out of host memory (MemoryError); " in capsys.readouterr().err


def test_a_clock_that_is_set_forward_is_no_hang(monkeypatch, tmp_path):
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    rank_status.Heartbeat().beat(3)
    wall, clock = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: wall() + 1900)
    assert supervisor._hung(tmp_path, 1740, 1) is None
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1900)
    assert supervisor._hung(tmp_path, 1740, 1) == 0


# A supervisor of one rank that makes 20 steps a second: for each line of stdin one attempt, whose end it prints. A rank
# that is told to hang makes no step after the first.
SUPERVISED = """
import json, os, signal, sys, tempfile
from pathlib import Path
from zerofit.job.request import Request
from zerofit.launch import supervisor
supervisor.SUSPENDED_SECONDS = 1.0
RANK = '''
import sys, time
from zerofit.base import rank_status
heartbeat, asked, step = rank_status.Heartbeat(), rank_status.StopRequest(), 0
asked.listen()
while asked.received is None or sys.argv[1] == "hangs":
    if sys.argv[1] == "trains" or step == 0:
        step += 1
        heartbeat.beat(step)
    time.sleep(0.05)
time.sleep(0.3)  # it saves while more signals come
sys.exit(75)
'''
for line in sys.stdin:
    kind, hangup, limit = json.loads(line)
    signal.signal(signal.SIGHUP, getattr(signal, hangup))
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"ZEROFIT_ATTEMPT": folder}
        print(json.dumps(folder), flush=True)
        code, signals, hung = supervisor.watch([sys.executable, "-c", RANK, kind], env, Path(folder), limit, 1)
    print(json.dumps([code, [signal.Signals(number).name for number in signals], hung]), flush=True)
"""


@pytest.fixture(scope="module")
def supervised():
    process = subprocess.Popen([sys.executable, "-c", SUPERVISED], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)  # fmt: skip
    yield process
    process.kill()
    process.wait()


def attempt(supervised, kind="trains", hangup="SIG_DFL", limit=0.0) -> int:
    """Begin an attempt of SUPERVISED; return the process id of its rank once it makes steps."""
    supervised.stdin.write(json.dumps([kind, hangup, limit]) + "\n")
    supervised.stdin.flush()
    records = Path(json.loads(supervised.stdout.readline()))
    deadline = time.monotonic() + 60
    while not (beats := rank_status.heartbeats(records)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return beats[0][0]


def end_of(supervised) -> list:
    """Return [exit code, signals, hung rank] of the attempt."""
    return json.loads(supervised.stdout.readline())


@pytest.mark.slow
@pytest.mark.fault
def test_a_suspended_job_is_no_hang(supervised):
    """SIGSTOP to all its processes, as SLURM's gang scheduling sends it, for longer than --hang_timeout."""
    rank = attempt(supervised, limit=1.5)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(rank, number)  # first the rank, below first the supervisor, which sees an old heartbeat then
        supervised.send_signal(number)
        time.sleep(3.0 if number == signal.SIGSTOP else 1.0)
    supervised.send_signal(signal.SIGSTOP)
    os.kill(rank, signal.SIGSTOP)
    time.sleep(3.0)
    supervised.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    os.kill(rank, signal.SIGCONT)
    time.sleep(0.5)
    supervised.send_signal(signal.SIGTERM)
    assert end_of(supervised) == [75, ["SIGTERM"], None]
    attempt(supervised, kind="hangs", limit=1.5)
    assert end_of(supervised) == [137, [], 0]


@pytest.mark.slow
@pytest.mark.fault
def test_nohup_is_heeded_and_a_closed_terminal_asks_for_a_save(supervised):
    attempt(supervised)
    supervised.send_signal(signal.SIGHUP)
    assert end_of(supervised) == [75, ["SIGHUP"], None]
    rank = attempt(supervised, hangup="SIG_IGN")
    supervised.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    ignored = int(re.search(r"SigIgn:\s+(\w+)", Path(f"/proc/{rank}/status").read_text())[1], 16)
    assert not ignored >> (signal.SIGHUP - 1) & 1  # the supervisor ends ranks with it
    supervised.send_signal(signal.SIGTERM)
    assert end_of(supervised) == [75, ["SIGTERM"], None]


@pytest.mark.slow
@pytest.mark.fault
def test_signals_of_one_second_are_one(supervised):
    """`timeout make sft` signals make and its children, and make passes its own on."""
    attempt(supervised)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        supervised.send_signal(number)
        time.sleep(0.02)
    assert end_of(supervised) == [75, ["SIGTERM"], None]
    attempt(supervised, kind="hangs")
    supervised.send_signal(signal.SIGTERM)
    time.sleep(rank_status.ONE_SIGNAL_SECONDS + 0.2)
    supervised.send_signal(signal.SIGTERM)
    assert end_of(supervised) == [137, ["SIGTERM", "SIGTERM"], None]


def test_a_rank_beats_while_it_writes(monkeypatch, tmp_path):
    """A save that takes longer than --hang_timeout is no hang; its thread ends with it."""
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    monkeypatch.setattr(rank_status, "BEAT_SECONDS", 0.01)
    heartbeat, beats = rank_status.Heartbeat(), set()
    threads = threading.active_count()
    with heartbeat.beating(7):
        deadline = time.monotonic() + 60
        while len(beats) < 5 and time.monotonic() < deadline:
            beats |= {when for _, _, when in rank_status.heartbeats(tmp_path).values()}
    assert len(beats) >= 5 and threading.active_count() == threads
    assert rank_status.heartbeats(tmp_path)[0][1] == 7
    with pytest.raises(OSError, match="full"), heartbeat.beating(8):
        raise OSError("full")
    assert threading.active_count() == threads
    monkeypatch.delenv(rank_status.FOLDER)
    with rank_status.Heartbeat().beating(1):  # nobody watches
        assert threading.active_count() == threads
