"""torchrun's agents of several machines on one: who is missing or lost, what ends a job; and a job on two of them."""

import argparse
import contextlib
import inspect
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, Run, python, run_world
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

from zerofit.base import rank_status
from zerofit.base.errors import EXIT_CODES, UserError
from zerofit.launch import doctor_nodes, launch, node_options, prepare, rendezvous
from zerofit.tools import hostfile
from zerofit.train import consistency, network_check

SHORT = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "24", "--effective_batch_size", "8",
    "--learning_rate", "1e-3", "--num_train_epochs", "1", "--logging_steps", "1", "--save_strategy", "no",
    "--num_samples", "0",
]  # fmt: skip


@pytest.fixture
def port(monkeypatch, tmp_path):
    """Two free ports; nodes wait and look often."""
    monkeypatch.setattr(rendezvous, "LAST_CALL_SECONDS", 4)  # a waiting node sees a new round after 2 s
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous, "CLOSE_SECONDS", 1.5)
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.3)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv(rank_status.RUN_FOLDER, str(tmp_path / "run"))
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what a process of its own would keep
    return two_free_ports()


def two_free_ports() -> int:
    """Return an even port that is free, as the next is: below those that the system gives to connections."""
    while True:
        first = random.randrange(20_000, 30_000, 2)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first)):
            socket.create_server(("127.0.0.1", first + 1)).close()
            return first


def at(port, rank, least=2, most=2, timeout=10, max_restarts=3, batch=0, lost=3.0):
    """One node's rendezvous, with records of its own."""
    place = node_options.NodePlacement(least, most, rank, "127.0.0.1", port, timeout, lost=lost)
    settings = SimpleNamespace(
        max_restarts=max_restarts, ranks_per_row=1, effective_batch_size=batch, explicit={"effective_batch_size"}
    )
    words = prepare.node_command(place, 1, settings, "recipe.py", f"127.0.0.{rank}")
    options = dict(option.split("=") for option in words[words.index("--rdzv_conf") + 1].split(","))
    node = rendezvous.meet(RendezvousParameters("zerofit", f"127.0.0.1:{port}", "zerofit", least, most, **options))
    node.records = node.folder.parent / f"records{rank}"
    node.records.mkdir(exist_ok=True)
    return node


def together(*functions):
    """Each in a thread of its own; what it returned or raised."""
    results = [None] * len(functions)

    def call(i, function):
        try:
            results[i] = function()
        except (UserError, rendezvous.Ended) as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "hangs"
    return results


def nodes(port, count=2, **more):
    """That many nodes, which have met."""
    met = [at(port, rank, **more) for rank in range(count)]
    infos = together(*(node.next_rendezvous for node in met))
    assert [(info.rank, info.world_size) for info in infos] == [(rank, count) for rank in range(count)], infos
    return met


def failed(node, rank, kind, of_a_peer=False, step=7, **more):
    """What a rank leaves that has failed."""
    record = {"rank": rank, "time": time.time(), "kind": kind, "error": f"Error: {kind}", "traceback": ""}
    rank_status.write_json(node.records / f"rank{rank}.json", record | {"of_a_peer": of_a_peer} | more)


def opened(node):
    """The run folder as its ranks open it."""
    node.folder.mkdir(exist_ok=True)
    (node.folder / "run.json").write_text("{}")


def until(found, seconds=30):
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


@pytest.mark.bad_input
@pytest.mark.parametrize("words", [
    ["--nnodes", "two"], ["--nnodes", "3:2", "--node_rank", "0"], ["--nnodes", "2"],
    ["--nnodes", "2", "--node_rank", "2"], ["--nnodes", "2", "--node_rank", "0"],
    ["--nnodes", "2", "--node_rank", "0", "--master_addr", "a", "--port", "65535"],
    ["--nnodes", "2", "--node_rank", "0", "--master_addr", "a", "--join_timeout", "soon"],
    ["--nnodes", "2", "--node_rank", "0", "--master_addr", "a", "--interface", "nonet0"],
])  # fmt: skip
def test_places_that_are_none(words):
    parser = argparse.ArgumentParser()
    node_options.add_options(parser)
    parser.add_argument("--port", default="")
    with pytest.raises(UserError, match=r"NODES|NODE_RANK|MASTER_ADDR|PORT|--join_timeout|--interface"):
        node_options.placement(parser.parse_args(words))


@pytest.mark.bad_input
def test_a_search_for_the_batch_size_is_refused_on_several_nodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text("per_device_train_batch_size: auto\n")
    words = ["--nnodes", "2", "--node_rank", "0", "--master_addr", "127.0.0.1", str(ROOT / "recipes" / "sft.py")]
    for flags in (["--config", str(file)], ["--per_device_train_batch_size", "auto"]):
        with pytest.raises(UserError, match="auto works on one node only"):
            launch.main([*words, *flags])


def test_one_machine_needs_no_place_and_two_are_placed(monkeypatch):
    parser = argparse.ArgumentParser()
    node_options.add_options(parser)
    parser.add_argument("--port", default="")
    assert node_options.placement(parser.parse_args([])) is None
    found = node_options.placement(parser.parse_args(["--nnodes", "1:4", "--node_rank", "3", "--master_addr", "a"]))
    assert (found.least, found.most, found.rank, found.port, found.lost) == (1, 4, 3, node_options.PORT, 15)
    words = ["--nnodes", "2", "--node_rank", "0", "--master_addr", "a"]
    monkeypatch.setenv(node_options.LOST_SECONDS, "90")
    assert node_options.placement(parser.parse_args(words)).lost == 90
    monkeypatch.setenv(node_options.LOST_SECONDS, "soon")
    with pytest.raises(UserError, match="ZEROFIT_LOST_SECONDS soon: must be a number"):
        node_options.placement(parser.parse_args(words))


@pytest.mark.fault
def test_node_0_that_is_not_there(port):
    began = time.monotonic()
    with pytest.raises(UserError, match=f"PORT={port}: no connection from .* within 1 s"):
        node_options.wait_for_node_0(node_options.NodePlacement(2, 2, 1, "127.0.0.1", port, 1.0))
    assert time.monotonic() - began < 20
    with pytest.raises(UserError, match=r"within 1 s .*cannot resolve that name"):
        node_options.wait_for_node_0(node_options.NodePlacement(2, 2, 1, "no-such-host.invalid", port, 1.0))


def test_the_round_has_rank_0_on_node_0_whoever_comes_first(port):
    first, second = at(port, 0), at(port, 1)

    def late():
        time.sleep(1)
        return first.next_rendezvous()

    infos = together(late, second.next_rendezvous)
    assert [info.rank for info in infos] == [0, 1]
    meeting = infos[1].bootstrap_store_info
    assert (meeting.master_addr, meeting.master_port) == ("127.0.0.1", port + 1)
    assert first.attempt == second.attempt == 1 and not second.num_nodes_waiting()


@pytest.mark.fault
def test_the_nodes_that_do_not_come_are_named(port, capsys):
    met = [at(port, rank, least=3, most=3, timeout=7) for rank in (0, 1)]
    errors = together(*(node.next_rendezvous for node in met))
    here = f"(present: node 0 ({socket.gethostname()}), node 1 ({socket.gethostname()}))"
    for error in errors:
        assert f"node 2 of 3 did not join within 7 s {here}" in str(error) and "clocks agree" in str(error)
    assert "2 of 3 nodes are present; waiting 7 s for node 2;" in capsys.readouterr().out


@pytest.mark.bad_input
def test_a_clock_that_is_ahead_is_refused(port, monkeypatch):
    met = nodes(port)
    state = met[0]._state()
    state.last_heartbeats = {node: beat + timedelta(seconds=100) for node, beat in state.last_heartbeats.items()}
    monkeypatch.setattr(met[0], "_state", lambda: state)
    with pytest.raises(UserError, match=r"the clock of node 1 \(.*\) is (99|100) s ahead of the clock of node 0"):
        met[0]._check_clocks()


@pytest.mark.bad_input
def test_a_number_that_is_taken_and_a_port_in_use(port):
    met = nodes(port)
    with pytest.raises(UserError, match="NODE_RANK=1 is taken by node 1"):
        at(port, 1)
    assert len(met) == 2  # which hold the ports
    with pytest.raises(UserError, match=f"PORT={port} is in use"):
        node_options.check_ports(node_options.NodePlacement(2, 2, 0, "127.0.0.1", port, 1.0))


@pytest.mark.fault
@pytest.mark.parametrize(("kind", "more", "code"), [
    ("user error", {}, 2), ("diverged", {}, 4), ("disk full", {}, 1), ("crash", {}, 1),
    ("out of memory", {"what_next": ""}, 3), ("stopped", {"is_asked": True}, 75),
])  # fmt: skip
def test_what_no_restart_mends_ends_the_job_on_both(port, kind, more, code):
    first, second = nodes(port)
    opened(first)
    if more.pop("is_asked", False):
        (second.records / rank_status.SAVE_REQUESTED_FILE).touch()
    failed(second, 1, kind, **more)
    failed(first, 0, "crash", of_a_peer=True)
    ended = together(first.next_rendezvous, lambda: ends(second))
    assert [error.outcome.code for error in ended] == [code, code]
    assert {error.outcome.kind for error in ended} == {kind} and ended[0].outcome.rank in (1, None)
    assert rendezvous.endings(second.records)[-1].code == code and not rendezvous.endings(second.records)[-1].what_next


def ends(node):
    """The next round of a node that torchrun's agent ends with its error."""
    try:
        return node.next_rendezvous()
    finally:
        node.shutdown()


@pytest.mark.fault
def test_out_of_memory_on_one_node_goes_on_with_less_on_both(port, capsys):
    first, second = nodes(port)
    opened(first)
    failed(second, 1, "out of memory", what_next="micro batch 1 instead of 2")
    failed(first, 0, "crash", of_a_peer=True)
    assert [info.rank for info in together(first.next_rendezvous, second.next_rendezvous)] == [0, 1]
    change = "micro batch 1 instead of 2, on 2 nodes with 2 processes"
    for node in (first, second):
        (ending,) = rendezvous.endings(node.records)
        assert (ending.kind, ending.rank, ending.what_next) == ("out of memory", 1, change)
    report = json.loads((first.folder / "report.json").read_text())
    assert report["status"] == "restarted" and report["attempts"][0]["what_next"] == change
    assert f"zerofit: attempt 2: {change}" in capsys.readouterr().out
    assert {file.name for file in (first.folder / "attempts" / "1").iterdir()} == {"rank0.json", "rank1.json"}


@pytest.mark.fault
def test_a_lost_rank_is_restarted_as_often_as_asked_for(port):
    met = nodes(port, max_restarts=1)
    opened(met[0])
    failed(met[0], 0, "crash", of_a_peer=True)
    infos = together(*(node.next_rendezvous for node in met))
    assert [info.rank for info in infos] == [0, 1] and os.environ["ZEROFIT_RESTARTED"] == "1"
    failed(met[0], 0, "crash", of_a_peer=True)
    results = together(*(lambda node=node: ends(node) for node in met))
    assert [(error.outcome.kind, error.outcome.code) for error in results] == [("lost rank", 1)] * 2


@pytest.mark.slow
@pytest.mark.fault
def test_a_node_that_is_lost_is_reason_for_a_restart(port):
    first, second = nodes(port, least=1)
    second._stop_heartbeats()  # as when its node dies
    assert not first.num_nodes_waiting()
    until(first.num_nodes_waiting)
    opened(first)
    info = first.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    (ending,) = rendezvous.endings(first.records)
    assert ending.kind == "lost rank" and "node 1 (" in ending.error and "on 1 node with 1 process" in ending.what_next


@pytest.mark.fault
def test_node_0_that_is_lost_ends_the_others(port):
    first, second = nodes(port)
    first._stop_heartbeats()
    del first  # its process ends
    import gc

    rendezvous._current.clear()
    gc.collect()
    until(second.num_nodes_waiting)
    (ended,) = together(lambda: ends(second))
    assert ended.outcome.code == 1 and "node 0 (127.0.0.1) has left" in str(ended)
    assert "--resume_from_checkpoint auto" in str(ended)


@pytest.mark.fault
def test_a_node_leaves_an_elastic_job_that_saves_for_it_and_goes_on(port):
    first, second = nodes(port, least=1, lost=60)  # the join times out before a heartbeat is old
    opened(first)
    for node, rank in ((first, 0), (second, 1)):
        failed(node, rank, "stopped")
    (second.records / rank_status.SAVE_REQUESTED_FILE).touch()
    info, ended = together(first.next_rendezvous, lambda: ends(second))
    assert info.world_size == 1 and ended.outcome.code == EXIT_CODES["stopped"]
    assert "node 1 (" in rendezvous.endings(first.records)[0].what_next


@pytest.mark.fault
def test_a_node_that_joins_is_waited_for_until_the_ranks_have_saved(port, monkeypatch):
    first, second = nodes(port, least=1, most=3, batch=6)
    asked = []
    monkeypatch.setattr(rank_status, "heartbeats", lambda records: {0: (1, 1, 1.0)})
    monkeypatch.setattr(rank_status, "request_save", asked.append)
    third = at(port, 2, least=1, most=3, batch=6)
    joins = threading.Thread(target=third.next_rendezvous, daemon=True)
    joins.start()

    def is_asked():
        assert not first.num_nodes_waiting()  # the ranks end by themselves
        return asked

    assert until(is_asked) == [first.records]
    for node, rank in ((first, 0), (second, 1)):
        failed(node, rank, "stopped")
    infos = together(first.next_rendezvous, second.next_rendezvous)
    joins.join(20)
    assert [info.world_size for info in infos] == [3, 3] and third.attempt == first.attempt == 2
    assert "more nodes joined" in rendezvous.endings(first.records)[0].what_next


@pytest.mark.fault
def test_a_node_with_which_the_batch_cannot_be_divided_waits(port, capsys):
    met = [at(port, rank, least=1, most=3, batch=8) for rank in range(3)]
    waits = threading.Thread(target=lambda: together(met[2].next_rendezvous), daemon=True)
    waits.start()
    infos = together(met[0].next_rendezvous, met[1].next_rendezvous)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
    until(lambda: "node 2 (" in (said := capsys.readouterr().out) and "not needed now; waiting" in said)
    assert met[0]._usable([1, 1, 1, 1]) == 4 and met[0]._grows(1)  # with the one that waits
    assert not met[0].num_nodes_waiting()
    met[0].shutdown()
    waits.join(20)
    assert not waits.is_alive()


@pytest.mark.fault
def test_ctrl_c_on_one_node_ends_the_job_on_all(port):
    first, second = nodes(port)
    opened(first)
    failed(first, 0, "crash", of_a_peer=True)
    second.interrupted(signal.SIGINT)
    (ended,) = together(first.next_rendezvous)
    assert ended.outcome.code == EXIT_CODES["interrupted"] and "was ended by SIGINT" in str(ended)


@pytest.mark.injection
def test_the_store_listens_on_the_address_of_node_0_only(port):
    node = at(port, 0)
    others = [a for known in node_options.interfaces().values() for a in known if "." in a and not a.startswith("127.")]
    for address in ["127.0.0.2", *others]:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), timeout=2)
    assert node.rank == 0
    theirs = {"127.0.0.1": "127.0.0.1", "localhost": "", "no-such-host.invalid": "", "192.0.2.1": ""}
    for address, own in (theirs | {address: address for address in others}).items():
        assert node_options.local_address(address, port) == own


def test_torchs_agent_still_keeps_exit_codes_to_itself():
    """launch/torchrun.py overrides what checks on the ranks to learn them; the rendezvous is asked without.

    And it ends ranks by SIGTERM, at which they save.
    """
    from torch.distributed import launcher
    from torch.distributed.elastic.agent.server import local_elastic_agent

    assert launcher.api.LocalElasticAgent is local_elastic_agent.LocalElasticAgent
    asked = inspect.getsource(launcher.api.launch_agent)
    assert "LocalElasticAgent(" in asked and "rdzv_handler=" in asked
    assert list(inspect.signature(RendezvousHandler.next_rendezvous).parameters) == ["self"]
    agent = local_elastic_agent.LocalElasticAgent
    assert "_monitor_workers" in vars(agent)
    assert inspect.signature(agent._shutdown).parameters["death_sig"].default == signal.SIGTERM


@pytest.mark.bad_input
def test_several_nodes_need_a_run_folder_and_a_launcher_that_starts_them():
    words = ["--nnodes", "2", "--node_rank", "0", "--master_addr", "127.0.0.1"]
    recipe = str(ROOT / "recipes" / "sft.py")
    with pytest.raises(UserError, match=r"--output_dir \(OUT=\) is not set: several nodes need one run folder"):
        launch.main([*words, recipe])
    with pytest.raises(UserError, match="LAUNCHER=accelerate: only torchrun starts several nodes"):
        launch.main([*words, "--launcher", "accelerate", recipe])


def test_difference_counts_the_others():
    assert consistency.difference([("a", {"x": 1}), ("b", {"x": 1})]) == ""
    assert "a has 1, b (and 1 more) has 2" in consistency.difference(
        [("a", {"x": 1}), ("b", {"x": 2}), ("c", {"x": 2})]
    )


@pytest.mark.bad_input
def test_hostfiles(tmp_path, record_property):
    file = tmp_path / "hosts"
    file.write_text("# ours\none slots=4\ntwo slots=2\n")
    assert [(h.name, h.slots, h.contiguous) for h in hostfile.read(file)] == [
        ("one", [0, 1, 2, 3], True),
        ("two", [0, 1], True),
    ]
    assert [(h.name, h.slots, h.contiguous) for h in hostfile.read(file, include="one:1,3")] == [("one", [1, 3], False)]
    assert [h.name for h in hostfile.read(file, exclude="one")] == ["two"]
    assert [len(h.slots) for h in hostfile.read(file, gpus="2")] == [2, 2]
    wrong = (
        ("one\n", {}, "bad entry: one"), ("", {}, "empty"), ("one slots=1\none slots=1\n", {}, "multiple entries for "
                                                                                               "one"),
        ("one slots=1\n", {"gpus": "2"}, "has 1 slots"), ("one slots=1\n", {"gpus": "x"}, "GPUS=x"),
        ("-oProxyCommand=x slots=1\n", {}, "-oProxyCommand=x: not a valid host name"),
        ("one slots=1\n", {"include": "two"}, "'two' not found"), ("one slots=1\n", {"exclude": "one"}, "EXCLUDE=one"),
    )  # fmt: skip
    record_property("cases", len(wrong) + 1)
    for text, more, sentence in wrong:
        file.write_text(text)
        with pytest.raises(UserError, match=sentence):
            hostfile.read(file, **more)
    with pytest.raises(UserError, match="the file does not exist"):
        hostfile.read(tmp_path / "none")


def test_what_each_host_would_run(tmp_path, capsys, monkeypatch):
    file = tmp_path / "hosts"
    file.write_text("one slots=4\ntwo slots=4\n")
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    hostfile.main(["--hosts", str(file), "--exclude", "two:0", "--show", "recipes/sft.py",
                   "--run_name", "it's a \"run\"", "--hub_token", "hf_other_secret"])  # fmt: skip
    said = capsys.readouterr().out
    line, folder = said.splitlines()[1].split(" --output_dir runs/sft-")  # one name for all hosts
    assert line == (
        "  zerofit launch --gpus 4 --nnodes 2 --node_rank 0 --master_addr one --join_timeout 600 recipes/sft.py "
        "--run_name 'it'\"'\"'s a \"run\"'"
    )
    assert said.count(folder) == 2
    assert "--gpus 3 --nnodes 2 --node_rank 1" in said and "CUDA_VISIBLE_DEVICES" in said.splitlines()[5]
    assert "secret" not in said and "HF_TOKEN" in said


def test_what_one_machine_of_two_would_run(capsys, monkeypatch):
    monkeypatch.setenv("PET_NODE_RANK", "7")  # an operator's, which is not for the ranks
    launch.main(["--gpus", "2", "--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1", "--port", "4000",
                 "--show", "--args", "--run_name 'it is a \"run\"'", str(ROOT / "recipes" / "lora.py"),
                 "--zero", "2", "--output_dir", "/shared/run"])  # fmt: skip
    said = capsys.readouterr().out.splitlines()
    words = shlex.split(said[1])[1:]
    assert words[: words.index("--rdzv_conf")] == [
        "-m", "zerofit.launch.torchrun", "--nnodes", "2:2", "--nproc_per_node", "2", "--max_restarts",
        str(prepare.MAX_RESTARTS), "--rdzv_backend", "zerofit", "--rdzv_id", "zerofit", "--rdzv_endpoint",
        "10.0.0.1:4000",
    ]  # fmt: skip
    assert "node_rank=1,gpus=2,join_timeout=600,lost=15,max_restarts=3" in words[words.index("--rdzv_conf") + 1]
    flags = ["--zero", "2", "--output_dir", "/shared/run", "--run_name", 'it is a "run"']
    assert words[words.index("--rdzv_conf") + 2 :] == [str(ROOT / "recipes" / "lora.py"), *flags]
    assert "  ZEROFIT_RUN_FOLDER=/shared/run" in said
    assert "PET_NODE_RANK" not in os.environ


@pytest.mark.bad_input
def test_a_launch_counts_the_ranks_of_its_node():
    words = ["--gpus", "2", "--nnodes", "2", "--node_rank", "0", "--master_addr", "10.0.0.1", "--show"]
    with pytest.raises(UserError, match="must divide the 2 ranks of this node"):
        launch.main([*words, str(ROOT / "recipes" / "sft.py"), "--tp_size", "4"])


def test_doctor_looks_at_what_several_need(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nonet0")
    found = {(f.name, f.level): f for f in doctor_nodes.check_node(2, tmp_path, "")}
    assert "nonet0" in found["interface", "fail"].text
    assert ("run folder", "warn") in found or ("run folder", "ok") in found
    assert any(name == "ports" for name, _ in found) and ("starting", "ok") in found


@pytest.mark.fault
def test_a_disk_that_is_not_shared_is_seen(tmp_path):
    assert not network_check._seen(tmp_path / "mark", seconds=0.1)
    (tmp_path / "mark").touch()
    assert network_check._seen(tmp_path / "mark", seconds=0.1)


def test_two_machines_train_as_one_does(tmp_path):
    """The line of docs/multinode.md: two supervisors at one address, all but a network between them."""
    page, out = (ROOT / "docs" / "multinode.md").read_text(), tmp_path / "two"
    line = re.search(r"```bash\n(make sft NODES=2 NODE_RANK=1 .* & make sft NODES=2 .*)\n```", page)[1]
    more = f"make sft ENV=active PYTHON={python()} ZERO=3 PORT={two_free_ports()} ARGS={shlex.quote(shlex.join(SHORT))}"
    line = line.replace("make sft", more).replace("runs/two", str(out)).replace(" & ", " & first=$!; ")
    made = subprocess.run(
        ["bash", "-c", f"{line}; code=$?; wait $first && exit $code"],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    assert made.stdout.count(f"2 processes on 2 nodes; run folder {out}") == 2
    whole = run_world(2, {"one": ("sft", [*SHORT, "--zero", "3"])}, tmp_path)["one"]
    found = Run(out)
    assert found.losses == whole.losses and found.json("result.json")["world_size"] == 2
    decisions = found.json("run.json")["decisions"]
    assert "2 nodes with the same software, data and arguments" in decisions
    assert any(sentence.startswith("links between nodes") for sentence in decisions)


@pytest.mark.injection
def test_a_host_is_no_option_of_ssh(tmp_path):
    client, said = tmp_path / "ssh", tmp_path / "said"
    client.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(said))}\n')
    client.chmod(0o755)
    hosts = [hostfile.Host("one", [0], True)]
    hostfile.check([str(client)], hosts, "hosts")
    for argv in ([], ["x" * 200_000]):  # more than a pipe holds: the client ends without having read it
        assert hostfile.run([str(client)], hosts, [{"argv": argv, "env": {}}]) == 0
    lines = said.read_text().splitlines()
    assert len(lines) == 3 and all(" -- one " in line for line in lines)


def test_which_variables_travel_to_the_hosts(tmp_path, capsys, monkeypatch):
    file = tmp_path / "hosts"
    file.write_text("one slots=1\ntwo slots=1\n")
    travel = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_DUMP_ON_TIMEOUT", "CUDA_LAUNCH_BLOCKING",
              "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_HOME")  # fmt: skip
    stay = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_CACHE_PATH", "RANK")
    for name in (*travel, *stay):
        monkeypatch.setenv(name, "1")
    hostfile.main(["--hosts", str(file), "--show", "recipes/sft.py"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "environment: " in line]
    assert len(lines) == 2
    for line in lines:
        told = set(line.partition("environment: ")[2].split(", "))
        assert told >= set(travel) and not told & set(stay)
