"""On a real SLURM: submitted, warned of its limit, preempted, queued again, resumed, cancelled, as an array."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, TINY, Run

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.commands import cancel, status
from zerofit.tools import slurm

from .slurm_cluster import Cluster, why_not

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
SECRET = "hf_0123456789abcdef"
RANK_S = 240  # in which ranks come up and make their steps on a busy machine
STEPS = 120
FLAGS = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "64", "--effective_batch_size", "8",
    "--learning_rate", "1e-4", "--logging_steps", "1", "--num_samples", "0", "--eval_strategy", "no",
    "--use_cpu", "true", "--save_strategy", "steps", "--save_steps", "100000",
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="zs-", dir="/tmp") as folder, Cluster(Path(folder) / "c") as up:
        os.environ["HF_TOKEN"] = SECRET
        yield up


@pytest.fixture(autouse=True)
def no_job_is_left(cluster):
    yield
    subprocess.run(["scancel", "--user=root"], check=False)
    cluster.until(lambda: not cluster.ask("squeue", "-h"), "no job is left", 120)


def submitted(folder: Path, *words: str, nodes: int = 2) -> str:
    """The number of a job on `nodes` machines with one rank each."""
    slurm.main(["--nodes", str(nodes), "--time", "30", "--output_dir", str(folder), *words])
    return json.loads((folder / status.JOB).read_text())["job_id"]


def said(folder: Path) -> str:
    log = folder / status.LOG
    return log.read_text(errors="replace") if log.exists() else ""


def at_step(cluster: Cluster, folder: Path, step: int) -> None:
    metrics = folder / "metrics.jsonl"
    cluster.until(
        lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= step,
        f"step {step}: {said(folder)}",
        RANK_S,
    )


def ended(cluster: Cluster, number: str, folder: Path) -> str:
    """The state in which a job ends."""
    cluster.until(lambda: cluster.job(number)["JobState"] in status.ENDED, f"the job's end: {said(folder)}", RANK_S)
    return cluster.job(number)["JobState"]


def orphans(folder: Path) -> list[str]:
    """Command lines of this machine that name the run folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(folder) in words:
            found.append(" ".join(words))
    return found


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """The losses of a run on two nodes, in a folder whose name is a nuisance."""
    folder = tmp_path_factory.mktemp("whole") / 'it\'s a "run" 100% $HOME'
    number = submitted(
        folder, "recipes/sft.py", *FLAGS, "--max_steps", str(STEPS), "--run_name", "a 'name' with \"quotes\" \\ $PATH"
    )
    assert ended(cluster, number, folder) == "COMPLETED", said(folder)
    return Run(folder)


def test_two_nodes(cluster, undisturbed, capsys):
    result, facts = undisturbed.json("result.json"), undisturbed.json("run.json")
    assert result["status"] == "finished" and result["world_size"] == 2 and result["steps"] == STEPS
    assert facts["arguments"]["run_name"]["value"] == "a 'name' with \"quotes\" \\ $PATH"
    assert {file.name for file in (undisturbed.folder / "logs").iterdir()} >= {"rank0.log", "rank1.log"}
    assert f"step {STEPS}/{STEPS}" in said(undisturbed.folder)
    status.main([str(undisturbed.folder)])
    assert f"finished after {STEPS} steps" in (told := capsys.readouterr().out) and "COMPLETED" in told
    cluster.ask("sbatch", "--test-only", str(undisturbed.folder / slurm.SCRIPT))
    for file in undisturbed.folder.rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file
    assert orphans(undisturbed.folder) == []


@pytest.mark.fault
def test_the_limit_is_near(cluster, tmp_path):
    """SLURM's own warning, a minute before the limit of two (its clock is coarse: up to a minute earlier)."""
    run = tmp_path / "run"
    number = submitted(run, "--sbatch", "--time=2 --signal=USR1@60", "recipes/sft.py", *FLAGS, "--max_steps", "4000")
    cluster.until(lambda: "is queued again" in said(run), f"the warning: {said(run)}", RANK_S)
    assert "is saved" in said(run) and cluster.job(number)["Restarts"] == "1"
    saved = Run(run).metrics[-1]["step"]
    assert (run / f"checkpoint-{saved}").is_dir()
    cluster.ask(
        "scontrol", "update", f"JobId={number}", "TimeLimit=30"
    )  # a busy machine needs a minute to come up again
    cluster.start_now(number)
    at_step(cluster, run, saved + 1)  # it went on
    assert [m["step"] for m in Run(run).metrics] == list(range(1, len(Run(run).metrics) + 1))


@pytest.mark.fault
def test_preempted_and_resumed(cluster, undisturbed, tmp_path):
    run = tmp_path / "run"
    number = submitted(run, "recipes/sft.py", *FLAGS, "--max_steps", str(STEPS))
    at_step(cluster, run, 5)
    words = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    higher = cluster.ask("sbatch", "--parsable", *words).strip()
    cluster.until(lambda: cluster.job(higher)["JobState"] == "COMPLETED", f"the higher job's end: {said(run)}", RANK_S)
    cluster.start_now(number)
    assert ended(cluster, number, run) == "COMPLETED", said(run)
    assert cluster.job(number)["Restarts"] == "1" and said(run).count("is queued again") == 1
    stopped = int(re.search(r"stopped after step (\d+), checkpoint-\1 is saved", said(run))[1])
    assert 5 <= stopped < STEPS  # it was really in the middle
    assert Run(run).json("result.json")["world_size"] == 2
    assert [m["step"] for m in Run(run).metrics if "loss" in m] == list(range(1, STEPS + 1))
    assert Run(run).losses == undisturbed.losses  # bit for bit
    assert orphans(run) == []


SLOW_HASHES = """\
import time
from zerofit.base import paths
hash_file = paths.hash_file
def slow(file, *args, **kwargs):
    reads_back = not (args or any(kwargs.values()))  # while it is saved, a file is hashed in the cache
    if reads_back and "checkpoint-" in str(file):
        time.sleep(60)
    return hash_file(file, *args, **kwargs)
paths.hash_file = slow
"""


@pytest.mark.fault
def test_a_job_that_is_warned_is_queued_again_however_slow_its_disk_reads(cluster, tmp_path, monkeypatch):
    """Each file of a checkpoint that is read back takes a minute, and there are more than minutes after the warning."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_HASHES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = tmp_path / "run"
    number = submitted(run, "--sbatch", "--time=7 --signal=USR1@180", "recipes/sft.py", *FLAGS, "--max_steps", "40000")
    cluster.until(lambda: "is saved" in said(run), "the warning", 2 * RANK_S)
    cluster.until(lambda: "is queued again" in said(run), f"queued again: {said(run)}", 60)
    assert len(list(run.glob("checkpoint-*/**/*"))) > 3
    assert cluster.job(number)["Restarts"] == "1" and "DUE TO TIME LIMIT" not in said(run)


def own_script(folder: Path, *options: str) -> str:
    """The batch script of docs/multinode.md for two ranks on the CPU: a user's, with torchrun alone."""
    blocks = (ROOT / "docs" / "multinode.md").read_text().split("```")[1::2]
    text = next(block for block in blocks if "srun" in block).removeprefix("bash\n")
    for old, new in (
        (" --gpus-per-node=8 --cpus-per-task=64", ""),
        ("--time=24:00:00", f"--time=30 --chdir={ROOT}"),
        ("/shared/run", str(folder)),
        ("torchrun", f"{sys.executable} -m torch.distributed.run"),
        ("nproc_per_node 8", "nproc_per_node 1"),
        (":29500", f":{distributed.free_port()}"),
        ("--zero 3 --data data.jsonl", shlex.join(options)),
    ):
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.mark.fault
@pytest.mark.parametrize(("number", "nodes"), [("USR1", 2), ("TERM", 2), ("TERM", 1)])
def test_a_script_of_ones_own_with_torchrun(cluster, undisturbed, tmp_path, number, nodes):
    """SLURM signals torchrun and all ranks: they save, the script queues the job again, and it goes on by itself.

    Args: nodes: of the second start.
    """
    run, script, log = tmp_path / "run", tmp_path / "own.sbatch", tmp_path / "log"
    script.write_text(own_script(run, *FLAGS, "--max_steps", str(STEPS)))
    job = cluster.ask("sbatch", "--parsable", f"--output={log}", str(script)).strip()
    at_step(cluster, run, 5)
    cluster.ask("scancel", f"--signal={number}", job)  # as SLURM itself does: to the steps, not to the script
    cluster.until(lambda: cluster.job(job)["Restarts"] == "1", f"queued again: {log.read_text()}", RANK_S)
    if nodes == 1:
        cluster.ask("scontrol", "update", f"JobId={job}", "NumNodes=1", "NumTasks=1")
    cluster.start_now(job)
    cluster.until(lambda: cluster.job(job)["JobState"] in status.ENDED, f"its end: {log.read_text()}", RANK_S)
    assert cluster.job(job)["JobState"] == "COMPLETED" and cluster.job(job)["Restarts"] == "1", log.read_text()
    stopped = int(re.search(r"stopped after step (\d+), checkpoint-\1 is saved", log.read_text())[1])
    assert 5 <= stopped < STEPS and Run(run).json("result.json")["world_size"] == nodes and orphans(run) == []
    same = undisturbed.losses if nodes == 2 else pytest.approx(undisturbed.losses, rel=1e-5)
    assert Run(run).losses == same


@pytest.mark.fault
def test_preempted_before_the_first_step(cluster, tmp_path):
    run = tmp_path / "run"
    number = submitted(run, "recipes/sft.py", *FLAGS, "--max_steps", "3")
    cluster.until(lambda: (run / status.LOG).exists(), "the job's start")
    cluster.ask("scancel", "--signal=TERM", number)  # as SLURM does at the beginning of the time of grace
    cluster.until(lambda: "is queued again" in said(run), f"queued again: {said(run)}", RANK_S)
    cluster.start_now(number)
    assert ended(cluster, number, run) == "COMPLETED", said(run)
    assert Run(run).json("result.json")["status"] == "finished"


@pytest.mark.fault
@pytest.mark.parametrize(("gpus", "number"), [("1", "USR1"), ("2", "USR1"), ("1", "TERM"), ("2", "TERM")])
def test_the_signal_on_one_machine(cluster, tmp_path, gpus, number):
    """With torchrun and without: SLURM signals every process of the job, and still all is saved."""
    run = tmp_path / "run"
    job = submitted(run, "--gpus", gpus, "recipes/sft.py", *FLAGS, "--max_steps", "4000", nodes=1)
    at_step(cluster, run, 3)
    cluster.ask("scancel", f"--signal={number}", job)
    cluster.until(lambda: "is queued again" in said(run), f"queued again: {said(run)}", RANK_S)
    assert "is saved" in said(run) and list(run.glob("checkpoint-*"))


def test_cancelled(cluster, tmp_path, capsys):
    run = tmp_path / "my run"
    number = submitted(run, "recipes/sft.py", *FLAGS, "--max_steps", "4000")
    at_step(cluster, run, 3)
    with pytest.raises(UserError, match=r"its job .* is running"):
        submitted(run, "recipes/sft.py", *FLAGS, "--max_steps", "4000", "--resume_from_checkpoint", "auto")
    cancel.main([str(run)])
    assert "cancelled; step" in capsys.readouterr().out and list(run.glob("checkpoint-*"))
    assert cluster.job(number)["JobState"] == "CANCELLED" and cluster.job(number)["Restarts"] == "0"
    with pytest.raises(UserError, match="the job has already ended"):
        cancel.main([str(run)])
    assert orphans(run) == []
    # submitted again it goes on; cancelled at once it ends within SLURM's KillWait
    more = submitted(run, "recipes/sft.py", *FLAGS, "--max_steps", "4000", "--resume_from_checkpoint", "auto")
    assert not (run / status.CANCELLED).exists()
    cancel.main(["--now", str(run)])
    cluster.until(lambda: cluster.job(more)["JobState"] == "CANCELLED", "the second end", RANK_S)
    assert orphans(run) == []


def test_a_sweep(cluster, tmp_path, capsys):
    (tmp_path / "sweep.txt").write_text("--learning_rate 1e-4\n--learning_rate 0.001 --run_name 'the second'\n")
    run = tmp_path / "run"
    number = submitted(
        run, "--sweep", str(tmp_path / "sweep.txt"), "recipes/sft.py", *FLAGS, "--max_steps", "3", nodes=1
    )
    for index in range(2):
        assert ended(cluster, f"{number}_{index}", run / str(index)) == "COMPLETED", said(run / str(index))
    status.main([str(run)])
    told = capsys.readouterr().out
    assert f"job {number}_0: COMPLETED" in told and "  1: finished after 3 steps" in told
    rates = [Run(run / str(index)).json("run.json")["arguments"]["learning_rate"]["value"] for index in range(2)]
    assert rates == [1e-4, 1e-3]


@pytest.mark.fault
def test_a_job_that_fails_keeps_its_exit_code(cluster, tmp_path):
    run = tmp_path / "run"
    number = submitted(run, "recipes/sft.py", *FLAGS, "--model", str(tmp_path / "none"))
    assert ended(cluster, number, run) == "FAILED"
    assert cluster.job(number)["ExitCode"] == "2:0" and "is queued again" not in said(run)
