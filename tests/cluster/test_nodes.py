"""Several machines, started by hand: train as one does; no hang, orphan or half a job when something breaks.

What is asserted is what a user sees: exit codes, losses, sentences. ZEROFIT_NODE_TIMES=FILE appends how long each event
takes to it, as lines of JSON.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, TINY, Run, run_world

from zerofit.base.errors import UserError
from zerofit.checkpoint import zero_shards
from zerofit.job import run_folder

from . import patience

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
LOST_SECONDS = 15.0  # without a heartbeat: a node is lost
DATA = ["--data", str(TINY / "train.jsonl"), "--learning_rate", "1e-3", "--num_samples", "0", "--logging_steps", "1"]
SHORT = [
    *DATA,
    "--max_samples",
    "24",
    "--effective_batch_size",
    "8",
    "--num_train_epochs",
    "1",
    "--save_strategy",
    "no",
]
# long enough to be broken in the middle
LONG = [*DATA, "--max_samples", "64", "--effective_batch_size", "12", "--max_steps", "60", "--save_steps", "5",
        "--save_strategy", "steps", "--save_total_limit", "3", "--zero", "2"]  # fmt: skip
JOBS = [(recipe, zero) for recipe in ("sft", "lora") for zero in "123"]


def launch(host, rank, recipe, flags, nnodes="2", gpus="1", address="host0", more=(), log="log.txt", env=None):
    """The supervisor of one node."""
    words = [sys.executable, "-m", "zerofit", "launch", "--gpus", gpus, "--nnodes", nnodes, "--node_rank", str(rank),
             "--master_addr", address, *more, ROOT / "recipes" / f"{recipe}.py", *flags]  # fmt: skip
    return host.popen(words, cwd=ROOT, log=log, env=env)


def ends(*processes, seconds=300):
    deadline = time.monotonic() + patience.of(seconds)
    return [process.wait(max(1, deadline - time.monotonic())) for process in processes]


def wait_for(said, seconds=180):
    deadline = time.monotonic() + patience.of(seconds)
    while not said():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.2)


def is_at(folder, step):
    file = folder / "metrics.jsonl"
    return lambda: file.exists() and len(file.read_text().splitlines()) >= step


def took(what, since):
    """Note the seconds that an event has taken. since: of time.time()."""
    seconds = time.time() - since
    if file := os.environ.get("ZEROFIT_NODE_TIMES"):
        with Path(file).open("a") as log:
            log.write(json.dumps({"event": what, "seconds": round(seconds, 1)}) + "\n")


def goes_on(out, what, since, seconds=300):
    """Wait until a later attempt has made a step, and note how long it took."""
    run, metrics = out / "run.json", out / "metrics.jsonl"

    def has():
        return run.stat().st_mtime > since and metrics.exists() and metrics.stat().st_mtime > run.stat().st_mtime

    wait_for(has, seconds)
    took(what, since)


def same_losses(out, undisturbed, rel=1e-4):
    assert curve(out) == pytest.approx(curve(undisturbed.folder), rel=rel) and len(curve(out)) == 60


def nothing_is_left(bed):
    for host in bed:
        wait_for(lambda host=host: not host.processes(), 20)


def curve(folder):
    """{step: loss}; of a step that was made twice, the last."""
    return {entry["step"]: entry["loss"] for entry in Run(folder).metrics if "loss" in entry}


@pytest.fixture(scope="module")
def on_one_machine(tmp_path_factory):
    cases = {f"{recipe}{zero}": (recipe, [*SHORT, "--zero", zero]) for recipe, zero in JOBS}
    return run_world(2, cases, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_world(1, {"long": ("sft", LONG[:-2])}, tmp_path_factory.mktemp("whole"))["long"]


@pytest.mark.parametrize(("recipe", "zero"), JOBS)
def test_two_machines_train_as_one_does(hosts, tmp_path, on_one_machine, recipe, zero):
    bed, out = hosts(2), tmp_path / "run"
    flags = [*SHORT, "--zero", zero, "--output_dir", str(out)]
    assert ends(*(launch(host, rank, recipe, flags) for rank, host in enumerate(bed))) == [0, 0], bed[0].text()
    assert Run(out).losses == on_one_machine[f"{recipe}{zero}"].losses
    assert Run(out).json("result.json")["world_size"] == 2
    decided = " ".join(Run(out).json("run.json")["decisions"])
    assert re.search(r"links between nodes: [\d.]+ GB/s per rank \(2 ranks, gloo", decided)
    assert f"GLOO_SOCKET_IFNAME={bed[0].interface}" in decided
    nothing_is_left(bed)


@pytest.mark.fault
def test_four_machines_with_delay_and_loss(hosts, tmp_path):
    bed, out = hosts(4), tmp_path / "run"
    for host in (bed[1], bed[2], bed[3]):
        host.slow(delay_ms=10, loss_percent=1)
    flags = [*SHORT, "--zero", "3", "--output_dir", str(out)]
    more = ["--join_timeout", "600"]
    assert ends(*(launch(h, r, "sft", flags, "4", more=more) for r, h in enumerate(bed)), seconds=600) == [0] * 4
    assert Run(out).json("result.json")["world_size"] == 4 and len(Run(out).losses) == 3
    nothing_is_left(bed)


@pytest.mark.fault
def test_a_machine_that_is_missing(hosts, tmp_path):
    bed = hosts(3)
    flags = [*SHORT, "--effective_batch_size", "12", "--output_dir", str(tmp_path / "run")]
    seconds = f"{patience.of(15):.0f}"
    found = ends(*(launch(bed[r], r, "sft", flags, "3", more=["--join_timeout", seconds]) for r in (0, 1)), seconds=60)
    assert found == [2, 2]
    for host in (bed[0], bed[1]):
        assert f"node 2 of 3 did not join within {seconds} s (present: node 0 (host0), node 1 (host1))" in host.text()
    assert not (tmp_path / "run").exists()
    nothing_is_left(bed)


@pytest.mark.fault
def test_node_0_that_is_missing_and_a_name_that_nobody_knows(hosts, tmp_path):
    first, second = bed = hosts(2)
    flags = [*SHORT, "--output_dir", str(tmp_path / "run")]
    first.cut()
    processes = [
        launch(second, 1, "sft", flags, more=["--join_timeout", "8"]),
        launch(second, 1, "sft", flags, address="nohost", more=["--join_timeout", "8"], log="name.txt"),
    ]
    assert ends(*processes, seconds=60) == [2, 2]
    assert "MASTER_ADDR=host0 PORT=29500: no connection from host1 within 8 s" in second.text()
    assert "cannot resolve that name" in second.text("name.txt")
    nothing_is_left(bed)


@pytest.mark.bad_input
def test_other_arguments_data_and_recipe_files(hosts, tmp_path):
    first, second = bed = hosts(2)
    out = ["--output_dir", str(tmp_path / "run")]
    ends_as = {}
    other = tmp_path / "other.jsonl"
    other.write_text((TINY / "train.jsonl").read_text().replace("Kai", "Kim"))
    short = [*SHORT, "--model", "tiny"]
    differing = {
        "argument": [*short, "--weight_decay", "0.1"],
        "data": [other if word == str(TINY / "train.jsonl") else word for word in short],
    }
    for name, flags in differing.items():
        port = ["--port", str(29600 + len(ends_as) * 2)]
        ends_as[name] = (launch(first, 0, "sft", [*short, *out], more=port, log=f"{name}.txt"),
                         launch(second, 1, "sft", [*flags, *out], more=port, log=f"{name}.txt"))  # fmt: skip
        assert ends(*ends_as[name], seconds=120) == [2, 2]
    for host in bed:
        said = host.text("argument.txt")
        assert "argument --weight_decay differs between nodes: node 0 (host0) has 0.0, node 1 (host1) has 0.1" in said
        assert "data differs between nodes: node 0 (host0)" in host.text("data.txt")
        assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
    nothing_is_left(bed)


@pytest.mark.bad_input
def test_torchrun_by_hand_finds_other_data_too(hosts, tmp_path):
    bed = hosts(2)
    other = tmp_path / "other.jsonl"
    other.write_text((TINY / "train.jsonl").read_text().replace("Kai", "Kim"))
    started = []
    for rank, host in enumerate(bed):
        flags = [str(other) if rank and word == str(TINY / "train.jsonl") else word for word in SHORT]
        flags += ["--model", "tiny"]
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", rank,
                 "--nproc_per_node", "1", "--master_addr", "host0", "--master_port", "29500",
                 ROOT / "recipes" / "sft.py", *flags, "--zero", "2", "--output_dir", tmp_path / "run"]  # fmt: skip
        started.append(host.popen(words, cwd=ROOT, env={"GLOO_SOCKET_IFNAME": host.interface}))
    assert 0 not in ends(*started, seconds=120)
    assert "data differs between nodes: node 0 (host0) has" in bed[0].text() + bed[1].text()
    nothing_is_left(bed)


@pytest.mark.fault
def test_elastic_torchrun_by_hand_goes_on_with_the_machine_that_is_left(hosts, tmp_path, undisturbed):
    first, second = bed = hosts(2)
    out = tmp_path / "run"
    flags = [*LONG[:-2], "--output_dir", str(out), "--resume_from_checkpoint", "auto"]
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1",
             "--max_restarts", "3", "--rdzv_backend", "c10d", "--rdzv_endpoint", "host0:29500",
             "--rdzv_conf", "last_call_timeout=20"]  # fmt: skip
    started = [
        host.popen([*words, "--local_addr", host.address, ROOT / "recipes" / "sft.py", *flags], cwd=ROOT,
                   env={"GLOO_SOCKET_IFNAME": host.interface}) for host in bed
    ]  # fmt: skip
    wait_for(is_at(out, 8))
    assert Run(out).json("run.json")["world_size"] == 2
    second.kill()
    assert ends(started[0]) == [0], first.text()
    assert Run(out).json("result.json")["world_size"] == 1
    assert curve(out) == pytest.approx(curve(undisturbed.folder), rel=1e-4) and len(curve(out)) == 60
    nothing_is_left(bed)


@pytest.mark.fault
@pytest.mark.parametrize("whom", ["one", "all"])
def test_sigterm_saves_on_all_and_resumes(hosts, tmp_path, undisturbed, whom):
    first, second = bed = hosts(2)
    out = tmp_path / "run"
    flags = [*LONG, "--output_dir", str(out), "--resume_from_checkpoint", "auto"]
    flags[flags.index("--save_steps") + 1] = "1000"
    started = [launch(host, rank, "sft", flags) for rank, host in enumerate(bed)]
    wait_for(is_at(out, 6))
    event = time.time()
    for process in started if whom == "all" else started[1:]:
        process.send_signal(signal.SIGTERM)
    assert ends(*started, seconds=120) == [75, 75], first.text() + second.text()
    took(f"SIGTERM to {whom}: all have saved and ended", event)
    saved = list(run_folder.checkpoints(out))
    assert len(saved) == 1 and 6 < saved[0] < 60
    nothing_is_left(bed)
    assert ends(*(launch(host, rank, "sft", flags) for rank, host in enumerate(bed))) == [0, 0]
    same_losses(out, undisturbed)
    nothing_is_left(bed)


@pytest.mark.fault
@pytest.mark.parametrize(("what", "kind", "change"), [
    ("oom", "out of memory", "micro batch 3 instead of 6, on 2 nodes"),
    ("hang", "hang", "the same settings (restart 1 of 3), on 2 nodes"),
    ("kill", "lost rank", "the same settings (restart 1 of 3), on 2 nodes"),
])  # fmt: skip
def test_what_befalls_a_rank_of_one_node_is_answered_on_both(hosts, tmp_path, undisturbed, what, kind, change):
    first, second = bed = hosts(2)
    out, struck, limit = tmp_path / "run", tmp_path / "struck", patience.of(10)
    flags = [*LONG, "--per_device_train_batch_size", "6", "--hang_timeout", f"{limit:.0f}", "--output_dir", str(out)]
    fault = {"what": what, "where": "backward", "rank": 1, "step": 7, "marker": str(struck)}
    path = os.pathsep.join([str(ROOT / "tests" / "faults"), os.environ.get("PYTHONPATH", "")])
    env = {"ZEROFIT_TEST_FAULT": json.dumps(fault), "PYTHONPATH": path}
    started = [launch(host, rank, "sft", flags, env=env) for rank, host in enumerate(bed)]
    wait_for(struck.exists)
    goes_on(out, f"{kind} on one node: the next step", struck.stat().st_mtime + (limit if what == "hang" else 0))
    assert ends(*started) == [0, 0], first.text() + second.text()
    attempts = Run(out).json("report.json")["attempts"]
    assert [a["kind"] for a in attempts] == [kind, "finished"] and attempts[0]["what_next"].startswith(change)
    assert attempts[0]["rank"] == 1 and attempts[0]["step"] in (7, 8)  # of a rank that is killed: its peer's
    same_losses(out, undisturbed, rel=1e-3)
    nothing_is_left(bed)


@pytest.mark.fault
def test_ctrl_c_ends_all(hosts, tmp_path):
    bed = hosts(2)
    started = [launch(host, r, "sft", [*LONG, "--output_dir", str(tmp_path / "run")]) for r, host in enumerate(bed)]
    wait_for(is_at(tmp_path / "run", 3))
    event = time.time()
    started[1].send_signal(signal.SIGINT)
    assert ends(*started, seconds=60) == [130, 130]
    took("Ctrl-C on one: all have ended", event)
    nothing_is_left(bed)


@pytest.mark.fault
@pytest.mark.parametrize("cut", [False, True])
def test_a_machine_that_dies_comes_back(hosts, tmp_path, undisturbed, cut):
    first, second = bed = hosts(2)
    out = tmp_path / "run"
    flags = [*LONG, "--output_dir", str(out), "--resume_from_checkpoint", "auto"]
    leader = launch(first, 0, "sft", flags)
    launch(second, 1, "sft", flags)
    wait_for(is_at(out, 12))
    if cut:
        second.cut()
    event, before = time.time(), len(first.text())
    second.kill()
    wait_for(lambda: "1 of 2 nodes are present; waiting 600 s for node 1" in first.text()[before:], 90)
    took(f"a node is {'cut off' if cut else 'killed'}: it is said", event)
    if cut:
        second.mend()
    event = time.time()
    again = launch(second, 1, "sft", flags, log="again.txt")
    goes_on(out, f"the node that was {'cut off' if cut else 'killed'} is started again: the next step", event)
    assert ends(leader, again) == [0, 0], first.text() + second.text("again.txt")
    lost = "node 1 (host1) left, restarted, or stopped sending heartbeats"
    assert lost in Run(out).json("report.json")["attempts"][0]["error"]
    same_losses(out, undisturbed)
    nothing_is_left(bed)


@pytest.mark.fault
def test_node_0_that_dies_ends_the_job_which_is_started_again(hosts, tmp_path, undisturbed):
    first, second = bed = hosts(2)
    out = tmp_path / "run"
    flags = [*LONG, "--output_dir", str(out), "--resume_from_checkpoint", "auto"]
    launch(first, 0, "sft", flags)
    other = launch(second, 1, "sft", flags)
    wait_for(is_at(out, 12))
    first.cut()
    event = time.time()
    first.kill()
    assert ends(other, seconds=90)[0] not in (0, 2)
    took("node 0 dies: the others have ended", event)
    assert re.search(r"node 0 .*(has left|has sent no heartbeat).*start again with", second.text())
    assert "--resume_from_checkpoint auto" in second.text()
    first.mend()
    again = [launch(host, rank, "sft", flags, log="again.txt") for rank, host in enumerate(bed)]
    assert ends(*again) == [0, 0], first.text("again.txt") + second.text("again.txt")
    same_losses(out, undisturbed)
    nothing_is_left(bed)


@pytest.mark.fault
@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_that_is_suspended(hosts, tmp_path, undisturbed, rank):
    """Longer than a node may be silent: the job goes on, or ends with a sentence and is started again."""
    bed = hosts(2)
    out = tmp_path / "run"
    flags = [*LONG, "--output_dir", str(out), "--resume_from_checkpoint", "auto"]
    started = [launch(host, r, "sft", flags) for r, host in enumerate(bed)]
    wait_for(is_at(out, 12))
    asleep = [psutil.Process(pid) for pid in bed[rank].processes()]
    for process in asleep:
        process.suspend()
    time.sleep(2 * LOST_SECONDS)
    event = time.time()
    for process in asleep:
        process.resume()
    found = ends(*started)
    took(f"node {rank} wakes up after {2 * LOST_SECONDS:.0f} s: the job has ended with {found}", event)
    if found != [0, 0]:
        assert found[1] not in (0, 2) and "--resume_from_checkpoint auto" in bed[1].text()
        again = [launch(host, r, "sft", flags, log="again.txt") for r, host in enumerate(bed)]
        assert ends(*again) == [0, 0], bed[0].text("again.txt") + bed[1].text("again.txt")
    same_losses(out, undisturbed)
    nothing_is_left(bed)


@pytest.mark.fault
@pytest.mark.parametrize("seconds", [5, 120])
def test_clocks_that_differ(hosts, tmp_path, undisturbed, seconds):
    """A few seconds do no harm; at two minutes the nodes think each other dead, and say what may be the cause."""
    bed, out = hosts(2), tmp_path / "run"
    path = os.pathsep.join([str(ROOT / "tests" / "faults"), os.environ.get("PYTHONPATH", "")])
    other = {"ZEROFIT_TEST_CLOCK": str(seconds), "PYTHONPATH": path}
    wait = f"{patience.of(20):.0f}"
    flags = [*LONG, "--output_dir", str(out), "--resume_from_checkpoint", "auto"]
    more = ["--join_timeout", wait]
    started = [
        launch(host, rank, "sft", flags, more=more, env=other if rank else None) for rank, host in enumerate(bed)
    ]
    found = ends(*started)
    if seconds == 5:
        assert found == [0, 0], bed[0].text() + bed[1].text()
        same_losses(out, undisturbed)
    else:
        said = bed[0].text() + bed[1].text()
        assert 0 not in found
        assert (
            "the clock of node 1 (host1) is 1" in said or "that the nodes' clocks agree" in said
        )  # if they do not meet
        assert not (out / "run.json").exists()
    nothing_is_left(bed)


@pytest.mark.fault
@pytest.mark.parametrize("interface", ["nonet0", "lo"])
def test_a_wrong_interface(hosts, tmp_path, interface):
    bed = hosts(2)
    flags = [*SHORT, "--output_dir", str(tmp_path / "run")]
    event = time.time()
    started = [launch(host, r, "sft", flags, more=["--interface", interface]) for r, host in enumerate(bed)]
    found = ends(*started)
    took(f"--interface {interface}: refused", event)
    said = bed[0].text() + bed[1].text()
    if interface == "lo":  # there, but it leads nowhere
        assert 0 not in found and "check that the nodes reach each other on all ports" in said
    else:
        assert found == [2, 2] and "--interface nonet0: no such interface; this machine has lo, eth0." in said
    assert not (tmp_path / "run" / "run.json").exists()
    nothing_is_left(bed)


@pytest.mark.fault
def test_two_jobs_on_the_same_machines(hosts, tmp_path, on_one_machine):
    """Each with its own port; a job that is started with the port of another is refused, and disturbs it not."""
    bed = hosts(2)
    long, short = ([*flags, "--zero", "2", "--output_dir"] for flags in ([*LONG, "--max_steps", "300"], SHORT))

    def started(name, flags, more=()):
        where = [*flags, str(tmp_path / name)]
        return [launch(host, rank, "sft", where, more=more, log=f"{name}.txt") for rank, host in enumerate(bed)]

    first, second = started("first", long), started("second", short, ["--port", "29600"])
    wait_for(is_at(tmp_path / "first", 3))
    refused = started("refused", short)
    wait_for(is_at(tmp_path / "second", 1))
    assert first[0].poll() is None, "both are to train at once"
    assert ends(*refused, seconds=90) == [2, 2]
    assert "PORT=29500 is in use on this machine" in bed[0].text("refused.txt")
    assert "NODE_RANK=1 is taken by node 1 (host1)" in bed[1].text("refused.txt")
    assert ends(*second) == [0, 0], bed[0].text("second.txt")
    assert ends(*first) == [0, 0], bed[0].text("first.txt")
    assert sorted(curve(tmp_path / "first")) == list(range(1, 301))
    assert not (tmp_path / "first" / "report.json").exists()  # its only attempt
    assert Run(tmp_path / "second").losses == on_one_machine["sft2"].losses
    assert not (tmp_path / "refused").exists()
    nothing_is_left(bed)


@pytest.mark.fault
def test_a_link_that_is_cut_for_good(hosts, tmp_path):
    first, second = bed = hosts(2)
    flags = [*LONG, "--max_restarts", "0", "--output_dir", str(tmp_path / "run")]
    more = ["--join_timeout", "20"]
    started = [launch(host, rank, "sft", flags, more=more) for rank, host in enumerate(bed)]
    wait_for(is_at(tmp_path / "run", 3))
    event = time.time()
    second.cut()
    assert 0 not in ends(*started, seconds=90)
    took("the link is cut, no restart: both have ended", event)
    assert "node 1 (host1) left, restarted, or stopped sending heartbeats" in first.text()
    assert re.search(r"node 0 .*(has left|has sent no heartbeat).*15 s", second.text())
    nothing_is_left(bed)


@pytest.mark.fault
def test_a_run_folder_that_is_not_shared(hosts, tmp_path):
    """Refused; with --node_local_storage each machine keeps its part, goes on from it, and the parts make a whole."""
    disk = tmp_path / "disk"
    first, second = bed = hosts(2, private=[disk])
    flags = [*LONG, "--max_steps", "12", "--output_dir", str(disk / "run")]
    refused = [launch(host, rank, "sft", flags, log="refused.txt") for rank, host in enumerate(bed)]
    assert 0 not in ends(*refused, seconds=120)
    assert "node 1 (host1) does not see node 0's disk there" in first.text("refused.txt")
    flags += ["--node_local_storage", "true", "--resume_from_checkpoint", "auto"]
    started = [launch(host, rank, "sft", flags) for rank, host in enumerate(bed)]
    assert ends(*started) == [0, 0], first.text()
    whole = curve(first.seen(disk / "run"))
    assert len(whole) == 12
    for host, shard in ((first, "pp_rank_0"), (second, "pp_rank_1")):
        held = [f.name for f in (host.seen(disk / "run") / "checkpoint-10").rglob("*optim_states.pt")]
        assert len(held) == 1 and shard in held[0]
    # on from step 10, which each has its part of
    for name in ("result.json", "report.json"):
        (first.seen(disk / "run") / name).unlink(missing_ok=True)
    for host in bed:
        shutil.rmtree(host.seen(disk / "run") / "checkpoint-12", ignore_errors=True)
    again = [launch(host, rank, "sft", flags, log="again.txt") for rank, host in enumerate(bed)]
    assert ends(*again) == [0, 0], first.text("again.txt")
    assert "step 11/12" in first.text("again.txt") and "step 10/12" not in first.text("again.txt")
    assert curve(first.seen(disk / "run")) == pytest.approx(whole, rel=1e-6)
    nothing_is_left(bed)
    # consolidated: one part says what is missing, all parts in one folder can be read at any rank count
    part, other = (host.seen(disk / "run") / "checkpoint-10" for host in bed)
    with pytest.raises(UserError, match="holds one node's part"):
        zero_shards.read(part)
    shutil.copytree(
        other,
        part,
        dirs_exist_ok=True,
        ignore=lambda folder, names: [n for n in names if (part / Path(folder).relative_to(other) / n).is_file()],
    )
    states = zero_shards.read(part)
    assert states.step == 10 and all(states.full(name).isfinite().all() for name in states.shapes)


@pytest.mark.fault
def test_elastic_one_joins_one_leaves_and_comes_again(hosts, tmp_path):
    first, second, third = bed = hosts(3)
    out = tmp_path / "run"
    flags = [*LONG[:-2], "--max_steps", "300", "--output_dir", str(out), "--resume_from_checkpoint", "auto"]
    leaving = launch(second, 1, "sft", flags, "1:3")
    wait_for(lambda: "waiting for node 0" in second.text())  # so that it comes within the seconds of the last call
    leader = launch(first, 0, "sft", flags, "1:3")
    wait_for(is_at(out, 4))
    event = time.time()
    joined = launch(third, 2, "sft", flags, "1:3")
    goes_on(out, "a node joins: the next step", event)
    event = time.time()
    leaving.send_signal(signal.SIGTERM)
    assert ends(leaving, seconds=60) == [75], second.text()
    goes_on(out, "a node leaves at SIGTERM: the next step", event)
    event = time.time()
    again = launch(second, 1, "sft", flags, "1:3", log="again.txt")
    goes_on(out, "a node comes again: the next step", event)
    assert ends(leader, joined, again, seconds=400) == [0, 0, 0], first.text()
    attempts = Run(out).json("report.json")["attempts"]
    assert [a["kind"] for a in attempts] == ["stopped", "stopped", "stopped", "finished"]
    assert [a["what_next"].partition(", ")[2] for a in attempts] == [
        "on 3 nodes with 3 processes", "on 2 nodes with 2 processes", "on 3 nodes with 3 processes", "",
    ]  # fmt: skip
    assert "node 1 (host1) was asked to leave" in attempts[1]["what_next"]
    assert sorted(curve(out)) == list(range(1, 301)) and Run(out).json("result.json")["world_size"] == 3
    facts = Run(out).json("run.json")["arguments"]
    assert facts["effective_batch_size"]["value"] == 12 and facts["zero"]["value"] == "2"
    nothing_is_left(bed)


@pytest.mark.fault
def test_elastic_goes_on_without_a_machine_that_dies_and_with_as_many_as_divide_the_batch(hosts, tmp_path, undisturbed):
    """Three nodes do not divide a batch of 8 rows: the third waits, and takes the place of the one that dies."""
    first, second, third = hosts(3)
    out = tmp_path / "run"
    flags = [*LONG, "--max_steps", "200", "--effective_batch_size", "8", "--output_dir", str(out)]
    waiting = [launch(host, rank, "sft", flags, "1:3") for rank, host in ((1, second), (2, third))]
    for host in (second, third):
        wait_for(lambda host=host: "waiting for node 0" in host.text())
    leader = launch(first, 0, "sft", flags, "1:3")
    wait_for(is_at(out, 12))
    assert Run(out).json("run.json")["world_size"] == 2 and "not needed now; waiting" in third.text()
    second.cut()
    event = time.time()
    second.kill()
    goes_on(out, "elastic, a node dies: the next step", event)
    assert ends(leader, waiting[1]) == [0, 0], first.text() + third.text()
    assert Run(out).json("result.json")["world_size"] == 2
    assert [a["kind"] for a in Run(out).json("report.json")["attempts"]] == ["lost rank", "finished"]
    assert sorted(curve(out)) == list(range(1, 201))
    nothing_is_left([first, third])
