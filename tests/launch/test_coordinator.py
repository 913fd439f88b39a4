"""Supervisors of several machines on one: who is missing, who differs, who is lost; and a job on two of them."""

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import socket
import subprocess
import threading
import time

import pytest
from conftest import ROOT, TINY, Run, python, run_world

from zerofit.base.errors import EXIT_CODES, UserError
from zerofit.checkpoint import next_settings
from zerofit.config import parse
from zerofit.job.request import Request
from zerofit.launch import doctor_nodes, launch, prepare
from zerofit.launch.cluster import coordinator, messages, node_options, rounds
from zerofit.tools import hostfile
from zerofit.train import consistency, network_check

SHORT = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "24", "--effective_batch_size", "8",
    "--learning_rate", "1e-3", "--num_train_epochs", "1", "--logging_steps", "1", "--save_strategy", "no",
    "--num_samples", "0",
]  # fmt: skip


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(rounds, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(rounds, "LAST_CALL_SECONDS", 0.3)
    monkeypatch.setattr(rounds, "LEAVE_SECONDS", 0.3)
    monkeypatch.setattr(coordinator, "GRACE_SECONDS", 0.3)
    return two_free_ports()


def two_free_ports() -> int:
    """Return an even port that is free, as the next is: below those that the system gives to connections."""
    while True:
        first = random.randrange(20_000, 30_000, 2)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first)):
            socket.create_server(("127.0.0.1", first + 1)).close()
            return first


def at(port, rank, most=2, least=None, timeout=5.0):
    return node_options.Place(least or most, most, rank, "127.0.0.1", port, timeout, lost=3.0)


def together(*functions):
    """Each in a thread of its own; what it returned or raised."""
    found = [None] * len(functions)

    def call(i, function):
        try:
            found[i] = function()
        except UserError as error:
            found[i] = error

    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "hangs"
    return found


def come(port, rank, **more):
    """One node that has come to the first round, and is ready."""
    node = coordinator.Coordinator(at(port, rank, **more), 1)
    node.meet()
    if node.leads:
        node.begin_with(node.processes(), Request("sft").put(zero=2))
    return node


def leave(*nodes):
    for node in nodes:
        node.__exit__(SystemExit, SystemExit(0), None)


def until(found, seconds=30):
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def running(port, tmp_path):
    """Two nodes on which an attempt runs."""
    first, second = together(lambda: come(port, 0), lambda: come(port, 1))
    together(lambda: first.order(Request("sft").put(zero=2, model="x"), tmp_path / "runs"), second.next_order)
    return first, second


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
        node_options.of(parser.parse_args(words))


@pytest.mark.bad_input
def test_a_search_for_the_batch_size_is_refused_on_several_nodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text("per_device_train_batch_size: auto\n")
    words = ["--nnodes", "2", "--node_rank", "0", "--master_addr", "127.0.0.1", str(ROOT / "recipes" / "sft.py")]
    for flags in (["--config", str(file)], ["--per_device_train_batch_size", "auto"]):
        with pytest.raises(UserError, match="auto searches on one node"):
            launch.main([*words, *flags])


def test_one_machine_needs_no_place_and_two_are_placed(monkeypatch):
    parser = argparse.ArgumentParser()
    node_options.add_options(parser)
    parser.add_argument("--port", default="")
    assert node_options.of(parser.parse_args([])) is None
    found = node_options.of(parser.parse_args(["--nnodes", "1:4", "--node_rank", "3", "--master_addr", "a"]))
    assert (found.least, found.most, found.rank, found.port, found.lost) == (1, 4, 3, node_options.PORT, 15)
    words = ["--nnodes", "2", "--node_rank", "0", "--master_addr", "a"]
    monkeypatch.setenv(node_options.LOST_SECONDS, "90")
    assert node_options.of(parser.parse_args(words)).lost == 90
    monkeypatch.setenv(node_options.LOST_SECONDS, "soon")
    with pytest.raises(UserError, match="ZEROFIT_LOST_SECONDS soon: must be a number"):
        node_options.of(parser.parse_args(words))


@pytest.mark.slow
@pytest.mark.fault
def test_ordered_and_lost(port, tmp_path):
    first, second = running(port, tmp_path)
    order = second.attempt.order
    assert order.decided["zero"] == 2 and "model" not in order.decided and order.folder == str(tmp_path / "runs")
    words = prepare.node_command(second.place, order.nodes, "recipe.py")
    assert words[words.index("--node_rank") + 1] == "1" and words[words.index("--master_port") + 1] == str(port + 1)
    second.round.close()  # as when its node dies
    ended = []
    until(lambda: first.poll(tmp_path, ended.append) or ended)
    assert ended == [9] and first.attempt.lost == [1]
    first.report(-9, [], None, tmp_path)
    assert first.collect(tmp_path)[0] != 0
    leave(first)


@pytest.mark.fault
def test_what_fails_on_one_node_ends_the_ranks_of_the_other_and_both_come_to_the_next_round(port, tmp_path):
    first, second = running(port, tmp_path)
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "rank1.json").write_text('{"of_a_peer": false}')
    second.report(3, [], None, there)
    ended = []
    until(lambda: first.poll(here, ended.append) or ended)
    first.report(-9, [], None, here)
    assert first.collect(here) == (3, [], None) and (here / "rank1.json").exists()

    def goes_on():
        nodes = first.next_nodes()
        first.order(Request("sft").put(zero=3), tmp_path / "runs")
        return nodes

    assert together(goes_on, second.next_order) == [{0: 1, 1: 1}, second.attempt.order]
    assert second.attempt.order.decided["zero"] == 3 and not second.round.state.is_over
    leave(second, first)


@pytest.mark.fault
@pytest.mark.slow
def test_a_node_that_is_asked_to_leave_leaves(port, tmp_path):
    first, second = running(port, tmp_path)
    second.report(EXIT_CODES["stopped"], [15], None, tmp_path)
    first.report(EXIT_CODES["stopped"], [], None, tmp_path)
    assert first.collect(tmp_path) == (EXIT_CODES["stopped"], [15], None)
    assert first.attempt.change == ""  # two nodes are needed
    first.round.update_round(is_closed=True)
    with pytest.raises(SystemExit) as ended:
        second.next_order()
    assert ended.value.code == EXIT_CODES["stopped"]
    leave(second, first)


@pytest.mark.slow
@pytest.mark.fault
def test_the_end_reaches_the_other_nodes(port, tmp_path, capsys):
    first, second = running(port, tmp_path)
    first.end(4, "the loss is no number")
    with pytest.raises(SystemExit) as ended:
        second.next_order()
    assert ended.value.code == 4 and "zerofit: the loss is no number" in capsys.readouterr().err
    leave(second, first)


@pytest.mark.fault
def test_the_nodes_that_do_not_come_are_named(port, capsys):
    def first():
        with coordinator.Coordinator(at(port, 0, most=3, timeout=2), 1) as node:
            node.meet()

    def second():
        try:
            come(port, 1, most=3, timeout=20)
        except SystemExit as error:
            return error.code

    signal_of_threads = coordinator.signal.signal
    coordinator.signal.signal = lambda *_: None  # only the main thread may set handlers
    try:
        error, code = together(first, second)
    finally:
        coordinator.signal.signal = signal_of_threads
    sentence = "node 2 of 3 did not come within 2 s (here: node 0 ("
    assert sentence in str(error) and code == 2 and sentence in capsys.readouterr().err


def test_elastic_begins_with_those_that_are_there(port):
    (first,) = together(lambda: come(port, 0, most=4, least=1))
    assert first.nodes == {0: 1}
    first.effective_batch_size = 8
    two, four = dict.fromkeys(range(2), 1), dict.fromkeys(range(4), 1)
    assert first.usable(two | {2: 1}) == two and first.usable(four) == four  # 8 is no multiple of 3
    first.attempt = coordinator.AttemptState(messages.Order(nodes=two, decided={}, folder=""))
    first.round.nodes |= {1: first.round.nodes[0]}
    for waiting, joining in ((0, 0), (1, 0), (2, 2)):
        first.round.waiting = waiting
        assert first._joining() == joining
    leave(first)


@pytest.mark.bad_input
def test_a_number_that_is_taken_and_a_port_in_use(port):
    first, second = together(lambda: come(port, 0), lambda: come(port, 1))
    with pytest.raises(UserError, match="NODE_RANK=1 is taken by"):
        coordinator.Coordinator(at(port, 1), 1)
    with pytest.raises(UserError, match=f"PORT={port} is in use"):
        coordinator.Coordinator(at(port, 0), 1)
    leave(second, first)


@pytest.mark.fault
def test_node_0_that_is_not_there(port):
    began = time.monotonic()
    with pytest.raises(UserError, match=f"PORT={port}: cannot be reached from .* within 1 s"):
        coordinator.Coordinator(at(port, 1, timeout=1.0), 1)
    assert time.monotonic() - began < 20
    with pytest.raises(UserError, match=r"within 1 s .*cannot resolve that name"):
        coordinator.Coordinator(node_options.Place(2, 2, 1, "no-such-host.invalid", port, 1.0), 1)


@pytest.mark.injection
def test_files_of_a_node_have_names_of_a_list(tmp_path, record_property):
    records = tmp_path / "records"
    records.mkdir()
    good = {"rank3.json": "{}", "stack3.txt": "a", "heartbeat3": "b", "exits.json": "{}"}
    bad = [
        "../out",
        "/tmp/../out",
        "stop",
        "rank3.json/../../out",
        "rank.json",
        "rank3.json\n",
        "sub/rank3.json",
        "..",
        "",
    ]
    record_property("cases", len(bad))
    messages.write_files(good | dict.fromkeys(bad, "x"), records)
    assert sorted(file.name for file in tmp_path.rglob("*")) == sorted([*good, "records"])


@pytest.mark.bad_input
def test_messages_have_a_shape():
    """As another version of the kit would write them."""
    state = messages.RoundState(1, order=messages.Order({0: 2, 1: 2}, {"zero": 2}, "runs/a"))
    assert messages.read(messages.RoundState, messages.text(state).encode()) == state
    for wrong, said in (
        ([], "message: "), ({"heartbeat": "1"}, "heartbeat: "), ({"order": {"nodes": {}}}, "order.decided: "),
        ({"order": {"nodes": {"x": 1}, "decided": {}, "folder": ""}}, "order.nodes.x"),
        ({"is_over": "yes"}, "is_over"), ("[" * 100_000, "message: "), ("\udcff", "message: "),
    ):  # fmt: skip
        text = (wrong if isinstance(wrong, str) else json.dumps(wrong)).encode(errors="surrogateescape")
        with pytest.raises(ValueError, match=said):
            messages.read(messages.RoundState, text)


@pytest.mark.fault
@pytest.mark.slow
def test_a_node_that_was_suspended_does_not_lose_the_others(port):
    """Its clock has run on, and theirs: SLURM suspends all nodes of a job."""
    first, second = together(lambda: come(port, 0), lambda: come(port, 1))
    for node in (first, second):
        node.round.close()
    time.sleep(3.1)
    assert first.round.is_silent(1) and second.round.is_silent(0)
    for node in (first, second):
        node.round.restart_clocks()
    assert not first.round.is_silent(1) and not second.round.is_silent(0)
    leave(first)


@pytest.mark.injection
def test_flags_come_from_each_nodes_own_command_line(tmp_path):
    own = parse.request("sft", ["--model", "mine", "--zero", "auto", "--resume_from_checkpoint", "auto",
                                "--offload_path", "/disk1", "--gpus", "2"])  # fmt: skip
    leading = Request("sft").put(
        model="evil", trust_remote_code=True, zero=3, offload_path="/disk0", gpus=4, gradient_checkpointing=True,
        resume_from_checkpoint=str(tmp_path / "checkpoint-5"),
    )  # fmt: skip
    found = next_settings.with_decisions(own, json.loads(json.dumps(next_settings.decisions(leading))), tmp_path)
    assert found.values == {
        "model": "mine", "zero": 3, "gradient_checkpointing": True, "gpus": 4, "offload_path": "/disk1",
        "resume_from_checkpoint": str(tmp_path / "checkpoint-5"),
    }  # fmt: skip
    assert next_settings.with_decisions(own, next_settings.decisions(own), tmp_path).values == own.values
    elsewhere = {"resume_from_checkpoint": "/elsewhere/checkpoint-5"}
    assert next_settings.with_decisions(own, elsewhere, tmp_path).get("resume_from_checkpoint") == "auto"
    for wrong in ({"model": "evil"}, {"zero": ["3", "--model"]}, {"zero": "--model"}, {"zero": [3]}, {"zero": {}}):
        with pytest.raises(UserError, match="cannot decide"):
            next_settings.with_decisions(own, wrong, tmp_path)
    for wrong in ({"zero": "9"}, {"gpus": "many"}, {"per_device_train_batch_size": True}):
        with pytest.raises(UserError, match="node 0's order: "):
            next_settings.with_decisions(own, wrong, tmp_path)


@pytest.mark.injection
def test_the_store_listens_on_the_address_of_node_0_only(port):
    node = coordinator.Coordinator(at(port, 0), 1)
    others = [a for found in node_options.interfaces().values() for a in found if "." in a and not a.startswith("127.")]
    for address in ["127.0.0.2", *others]:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), timeout=2)
    leave(node)
    theirs = {"127.0.0.1": "127.0.0.1", "localhost": "", "no-such-host.invalid": "", "192.0.2.1": ""}
    for address, own in (theirs | {address: address for address in others}).items():
        assert node_options.own_address(node_options.Place(2, 2, 0, address, port, 1.0)) == own


def test_difference_counts_the_others():
    assert consistency.difference([("a", {"x": 1}), ("b", {"x": 1})]) == ""
    assert "a has 1, b (and 1 more) has 2" in consistency.difference(
        [("a", {"x": 1}), ("b", {"x": 2}), ("c", {"x": 2})]
    )


@pytest.mark.bad_input
def test_hostfiles(tmp_path, record_property):
    file = tmp_path / "hosts"
    file.write_text("# ours\none slots=4\ntwo slots=2\n")
    assert [(h.name, h.slots, h.whole) for h in hostfile.read(file)] == [
        ("one", [0, 1, 2, 3], True),
        ("two", [0, 1], True),
    ]
    assert [(h.name, h.slots, h.whole) for h in hostfile.read(file, include="one:1,3")] == [("one", [1, 3], False)]
    assert [h.name for h in hostfile.read(file, exclude="one")] == ["two"]
    assert [len(h.slots) for h in hostfile.read(file, gpus="2")] == [2, 2]
    wrong = (
        ("one\n", {}, "bad entry: one"), ("", {}, "empty"), ("one slots=1\none slots=1\n", {}, "multiple entries for "
                                                                                               "one"),
        ("one slots=1\n", {"gpus": "2"}, "has 1 slots"), ("one slots=1\n", {"gpus": "x"}, "GPUS=x"),
        ("-oProxyCommand=x slots=1\n", {}, "-oProxyCommand=x: is no name of a host"),
        ("one slots=1\n", {"include": "two"}, "'two' not found"), ("one slots=1\n", {"exclude": "one"}, "no host"),
    )  # fmt: skip
    record_property("cases", len(wrong) + 1)
    for text, more, sentence in wrong:
        file.write_text(text)
        with pytest.raises(UserError, match=sentence):
            hostfile.read(file, **more)
    with pytest.raises(UserError, match="no such file"):
        hostfile.read(tmp_path / "none")


def test_what_each_host_would_run(tmp_path, capsys, monkeypatch):
    file = tmp_path / "hosts"
    file.write_text("one slots=4\ntwo slots=4\n")
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    hostfile.main(["--hosts", str(file), "--exclude", "two:0", "--show", "recipes/sft.py",
                   "--run_name", "it's a \"run\"", "--hub_token", "hf_other_secret"])  # fmt: skip
    said = capsys.readouterr().out
    assert said.splitlines()[1] == (
        "  zerofit launch --gpus 4 --nnodes 2 --node_rank 0 --master_addr one --join_timeout 600 recipes/sft.py "
        "--run_name 'it'\"'\"'s a \"run\"'"
    )
    assert "--gpus 3 --nnodes 2 --node_rank 1" in said and "CUDA_VISIBLE_DEVICES" in said.splitlines()[5]
    assert "secret" not in said and "HF_TOKEN" in said


def test_what_one_machine_of_two_would_run(capsys, monkeypatch):
    monkeypatch.setenv("PET_NODE_RANK", "7")  # an operator's, which is not for the ranks
    launch.main(["--gpus", "2", "--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1", "--port", "4000",
                 "--show", "--args", "--run_name 'it is a \"run\"'", str(ROOT / "recipes" / "lora.py"),
                 "--zero", "2"])  # fmt: skip
    said = capsys.readouterr().out.splitlines()
    assert shlex.split(said[1])[1:] == [
        "-m", "zerofit.launch.torchrun", "--nnodes", "2", "--node_rank", "1", "--nproc_per_node", "2",
        "--master_addr", "10.0.0.1", "--master_port", "4001", "--rdzv_conf", "timeout=600",
        str(ROOT / "recipes" / "lora.py"), "--zero", "2", "--run_name", 'it is a "run"', "--gpus", "4",
    ]  # fmt: skip
    assert "PET_NODE_RANK" not in os.environ


@pytest.mark.bad_input
def test_a_launch_counts_the_ranks_of_its_node():
    words = ["--gpus", "2", "--nnodes", "2", "--node_rank", "0", "--master_addr", "10.0.0.1", "--show"]
    with pytest.raises(UserError, match="must divide the 2 ranks of this node"):
        launch.main([*words, str(ROOT / "recipes" / "sft.py"), "--tp_size", "4"])


def test_doctor_looks_at_what_several_need(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nonet0")
    found = {(f.name, f.level): f for f in doctor_nodes.check(2, tmp_path, "")}
    assert "there is no nonet0 here" in found["interface", "fail"].text
    assert ("run folder", "warn") in found or ("run folder", "ok") in found
    assert any(name == "ports" for name, _ in found) and ("starting", "ok") in found


@pytest.mark.fault
def test_a_disk_that_is_not_shared_is_seen(tmp_path):
    assert not network_check._seen(tmp_path / "mark", seconds=0.1)
    (tmp_path / "mark").touch()
    assert network_check._seen(tmp_path / "mark", seconds=0.1)


def test_two_machines_train_as_one_does(tmp_path):
    """The line of docs/notes/multinode.md: two supervisors at one address, all but a network between them."""
    page, out = (ROOT / "docs" / "notes" / "multinode.md").read_text(), tmp_path / "two"
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
