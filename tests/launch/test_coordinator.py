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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
from conftest import ROOT, TINY, Run, python, run_world
from torch.distributed import TCPStore

from zerofit.base import rank_status
from zerofit.base.errors import EXIT_CODES, UserError
from zerofit.checkpoint import next_settings
from zerofit.commands import hostfile
from zerofit.config import parse
from zerofit.job import run_lock
from zerofit.job.request import Request
from zerofit.launch import doctor_nodes, launch, prepare
from zerofit.launch.cluster import coordinator, documents, job_secret, membership, node_options, transport
from zerofit.launch.cluster.documents import JOB_KEY, End, JobState, Kill, NodeState, Order, Report, Stop
from zerofit.train import consistency, network_check

FACTS = {"torch": "2", "recipe files": "abc"}
SECRET = b"0123456789abcdef"
SHORT = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "24", "--effective_batch_size", "8",
    "--learning_rate", "1e-3", "--num_train_epochs", "1", "--logging_steps", "1", "--save_strategy", "no",
    "--num_samples", "0",
]  # fmt: skip


@pytest.fixture
def port(monkeypatch):
    for module in (transport, membership, coordinator):
        monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(membership, "LOST_SECONDS", 1.0)
    monkeypatch.setattr(membership, "LAST_CALL_SECONDS", 0.3)
    monkeypatch.setattr(membership, "LEAVE_SECONDS", 0.3)
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
    return node_options.Place(least or most, most, rank, "127.0.0.1", port, timeout)


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


def come(port, rank, facts=FACTS, ready=None, **more):
    """One node's way to an agreed job; its view of it."""
    node = coordinator.Coordinator(at(port, rank, **more), 1, facts, SECRET)
    try:
        node.membership.gather()
        if node.leads:
            node.begin_with(node.membership.processes(), Request("sft").put(zero=2))
        return node, node.membership.agree(ready or {"data": "x"}, ROOT / "runs" / "a" if node.leads else None)
    except UserError as error:
        node.membership.leave(str(error))
        raise


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


def test_one_machine_needs_no_place_and_two_are_placed():
    parser = argparse.ArgumentParser()
    node_options.add_options(parser)
    parser.add_argument("--port", default="")
    assert node_options.of(parser.parse_args([])) is None
    found = node_options.of(parser.parse_args(["--nnodes", "1:4", "--node_rank", "3", "--master_addr", "a"]))
    assert (found.least, found.most, found.rank, found.port) == (1, 4, 3, node_options.PORT)


@pytest.mark.fault
def test_agreed_and_lost(port, tmp_path):
    (first, folder), (second, theirs) = together(lambda: come(port, 0), lambda: come(port, 1))
    assert folder == theirs == ROOT / "runs" / "a" and first.world_size == second.world_size == 2
    first.order(1, {0: 1, 1: 1}, Request("sft").put(zero=2, model="x"))
    order = second.next_order()
    assert order.decided["zero"] == 2 and "model" not in order.decided
    second.begin(order)
    words = prepare.node_command(second.place, second.attempt.order.nodes, "recipe.py")
    assert words[words.index("--node_rank") + 1] == "1" and words[words.index("--master_port") + 1] == str(port + 1)
    second.transport.close()  # as when its node dies
    ended, told = [], time.monotonic()
    while not ended and time.monotonic() - told < 10:
        first.poll(tmp_path, [], ended.append)
        time.sleep(0.05)
    assert ended == [9] and first.attempt.lost == [1]
    first.report(-9, [], None, tmp_path)
    assert first.collect(tmp_path)[0] != 0
    first.membership.leave()


@pytest.mark.fault
def test_a_signal_to_one_asks_the_ranks_of_all(port, tmp_path, monkeypatch):
    (first, _), (second, _) = together(lambda: come(port, 0), lambda: come(port, 1))
    first.order(1, {0: 1, 1: 1}, Request("sft"))
    second.begin(second.next_order())
    folders = [tmp_path / "a", tmp_path / "b"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        (folder / f"heartbeat{rank}").write_bytes(rank_status._HEARTBEAT_FILE.pack(1, 7 + rank, time.time()))
    asked = set()
    monkeypatch.setattr(rank_status, "ask_to_save", asked.add)
    deadline = time.monotonic() + 10
    while len(asked) < 2 and time.monotonic() < deadline:
        first.poll(folders[0], [], pytest.fail)
        second.poll(folders[1], [15], pytest.fail)
        time.sleep(0.05)
    assert asked == {*folders}
    for node in (second, first):
        node.membership.leave()


@pytest.mark.fault
def test_a_node_that_is_asked_to_leave_after_the_last_poll_leaves(port, tmp_path):
    (first, _), (second, _) = together(lambda: come(port, 0), lambda: come(port, 1))
    first.order(1, {0: 1, 1: 1}, Request("sft"))
    second.begin(second.next_order())
    second.poll(tmp_path, [], pytest.fail)
    second.report(EXIT_CODES["stopped"], [15], None, tmp_path)
    first.report(EXIT_CODES["stopped"], [], None, tmp_path)
    assert first.collect(tmp_path) == (EXIT_CODES["stopped"], [15], None)
    first.place.timeout = 0.1
    assert first.next_nodes() is None  # two are needed, and one of them leaves
    first.order(2, {0: 1}, Request("sft"))
    assert second.next_order() == End(EXIT_CODES["stopped"], "")
    for node in (second, first):
        node.membership.leave()


@pytest.mark.fault
def test_the_nodes_that_do_not_come_are_named(port):
    def only_first():
        return come(port, 0, most=3, timeout=1.5)

    def second():
        return come(port, 1, most=3, timeout=1.5)

    found = together(only_first, second)
    for error in found:
        assert "node 2 of 3 did not come within 2 s (here: node 0 (" in str(error)


def test_elastic_begins_with_those_that_are_there(port):
    ((first, _),) = together(lambda: come(port, 0, most=4, least=1))
    assert first.world_size == 1
    first.effective_batch_size = 8
    two, four = dict.fromkeys(range(2), 1), dict.fromkeys(range(4), 1)
    assert first.usable(two | {2: 1}) == two and first.usable(four) == four  # 8 is no multiple of 3
    first.membership.leave()


@pytest.mark.bad_input
@pytest.mark.parametrize("key", ["software", "job"])
def test_who_differs_is_named(port, key):
    other = {"facts": FACTS | {"torch": "3"}} if key == "software" else {"ready": {"data": "y"}}
    for error in together(lambda: come(port, 0), lambda: come(port, 1, **other)):
        what = "torch" if key == "software" else "data"
        assert f"{what} is not the same on all nodes: node 0 (" in str(error) and "node 1 (" in str(error)


@pytest.mark.bad_input
def test_a_number_that_is_taken_and_a_port_in_use(port):
    first, second = together(
        lambda: coordinator.Coordinator(at(port, 0, most=3), 1, FACTS, SECRET),
        lambda: coordinator.Coordinator(at(port, 1, most=3), 1, FACTS, SECRET),
    )
    with pytest.raises(UserError, match="NODE_RANK=1 is taken by"):
        coordinator.Coordinator(at(port, 1, most=3), 1, FACTS, SECRET)
    with pytest.raises(UserError, match=f"PORT={port} is in use"):
        coordinator.Coordinator(at(port, 0, most=3), 1, FACTS, SECRET)
    second.membership.leave()
    first.membership.leave()


@pytest.mark.fault
def test_node_0_that_is_not_there(port):
    began = time.monotonic()
    with pytest.raises(UserError, match=f"PORT={port}: cannot be reached from .* within 1 s"):
        coordinator.Coordinator(at(port, 1, timeout=1.0), 1, FACTS, SECRET)
    assert time.monotonic() - began < 20
    with pytest.raises(UserError, match=r"within 1 s .*does not know that name"):
        coordinator.Coordinator(node_options.Place(2, 2, 1, "no-such-host.invalid", port, 1.0), 1, FACTS, SECRET)


# --- strangers on the port ---


def stranger(port):
    """A client of the store without the job's secret."""
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=5), wait_for_workers=False)


def ended_with(files):
    return Report(attempt=1, code=1, hung=None, killed=False, files=files)


@pytest.mark.injection
@pytest.mark.parametrize("content", ["{x", "[]", "null", "[" * 100_000, '{"id": "x", "beat": 1}', "\udcff"])
def test_what_is_not_signed_is_ignored_and_said_once(port, capfd, content):
    (first, _), (second, _) = together(lambda: come(port, 0), lambda: come(port, 1))
    first.order(1, {0: 1, 1: 1}, Request("sft").put(zero=2))
    store = stranger(port)
    deadline = time.monotonic() + 10
    while (
        not ("node/1" in first.transport._reported and JOB_KEY in second.transport._reported)
        and time.monotonic() < deadline
    ):
        for key in ("node/1", JOB_KEY):
            store.set(key, content.encode(errors="surrogateescape"))
        time.sleep(0.01)
    for key in ("node/1", JOB_KEY):
        store.set(key, content.encode(errors="surrogateescape"))
    time.sleep(0.3)
    assert first.transport._thread.is_alive() and second.transport._thread.is_alive()
    assert first.membership.present() == [0, 1] and second.next_order().attempt == 1
    told = capfd.readouterr().err
    for key in ("node/1", JOB_KEY):
        assert told.count(f"'{key}' is ignored: it is not signed with this job's secret") == 1
    for node in (second, first):
        node.membership.leave()


@pytest.mark.injection
def test_an_order_and_files_of_a_stranger_have_no_effect(port, tmp_path):
    (first, _), (second, _) = together(lambda: come(port, 0), lambda: come(port, 1))
    first.order(1, {0: 1, 1: 1}, Request("sft").put(zero=2))
    second.begin(second.next_order())
    second.transport.close()  # so that nothing is written over what the stranger puts there
    store, records = stranger(port), tmp_path / "records"
    records.mkdir()
    report = ended_with({"../outside": "x", str(tmp_path / "absolute"): "x"})
    node = replace(second.transport.node, heartbeat=10**6, report=report)
    job = replace(
        first.job, heartbeat=10**6, supervisors={1: second.transport.node.id}, order=replace(first.job.order, attempt=2)
    )
    for key, document in (("node/1", node), (JOB_KEY, job)):
        store.set(key, documents.signed(b"another secret of a stranger", key, document))
    second.transport._read_job()
    assert second.job.order.attempt == 1
    store.set(JOB_KEY, documents.signed(SECRET, JOB_KEY, job))  # the same, by a node
    second.transport._read_job()
    assert second.job.order.attempt == 2
    first.report(0, [], None, records)
    first.collect(records)
    assert first.attempt.lost == [1] and [file.name for file in tmp_path.rglob("*")] == ["records"]
    first.membership.leave()


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
    documents.write_files(good | dict.fromkeys(bad, "x"), records)
    assert sorted(file.name for file in tmp_path.rglob("*")) == sorted([*good, "records"])


@pytest.mark.injection
def test_a_signature_holds_for_one_key_and_documents_have_a_shape():
    job = JobState(leader="a", heartbeat=1, supervisors={1: "id"}, order=Order(1, {0: 2, 1: 2}, {"zero": 2}, {}))
    text = documents.signed(SECRET, JOB_KEY, job).encode()
    assert documents.read(SECRET, JOB_KEY, text) == job
    with pytest.raises(ValueError, match="not signed"):
        documents.read(SECRET, "node/1", text)
    right = {"leader": "a", "heartbeat": 1, "supervisors": {}}
    for wrong, said in (
        ([], "document: "), ({"leader": "a", "heartbeat": 1}, "supervisors: Field required"),
        (right | {"heartbeat": "1"}, "heartbeat: "), (right | {"order": {"attempt": 1}}, "order.nodes: "),
        (right | {"end": []}, "end: "), (right | {"nodes": {"x": 1}}, "nodes.x"),
        ("[" * 100_000, "document: "), ("\udcff", "document: "),
    ):  # fmt: skip
        text = (wrong if isinstance(wrong, str) else json.dumps(wrong)).encode(errors="surrogateescape")
        signature = documents._signature(SECRET, JOB_KEY, text).encode()
        with pytest.raises(ValueError, match=said):
            documents.read(SECRET, JOB_KEY, signature + text)


@pytest.mark.injection
def test_a_document_of_earlier_is_no_news(port):
    first, second = together(
        lambda: coordinator.Coordinator(at(port, 0), 1, FACTS, SECRET),
        lambda: coordinator.Coordinator(at(port, 1), 1, FACTS, SECRET),
    )
    deadline = time.monotonic() + 5
    while 1 not in first.membership.present() and time.monotonic() < deadline:
        time.sleep(0.05)
    before = stranger(port).get("node/1").decode()[documents.DIGITS :]
    second.transport.close()
    again = coordinator.Coordinator(at(port, 1), 1, FACTS, SECRET)
    while first.transport.nodes[1].id != again.transport.node.id and time.monotonic() < deadline + 5:
        time.sleep(0.05)
    old, now = NodeState(**json.loads(before)), first.transport.nodes[1]
    assert first.transport._is_old(old, now) and not first.transport._is_old(now, now)
    assert first.transport._is_old(replace(now, leader="another job's"), now)
    again.membership.leave()
    first.membership.leave()


@pytest.mark.injection
def test_a_write_before_a_node_comes_does_not_keep_it_out(port):
    """Once, to every key, by a stranger or an earlier job with the same secret."""

    def come_after_a_stranger():
        node_options.reach(at(port, 1))
        store = stranger(port)
        store.wait([JOB_KEY])
        earlier = JobState(leader="an earlier one", heartbeat=10**6, supervisors={1: "an earlier one"})
        for key, text in (("zerofit", "x"), ("node/1", "x"), (JOB_KEY, documents.signed(SECRET, JOB_KEY, earlier))):
            store.set(key, text)
        return come(port, 1)

    (first, folder), (second, same) = together(lambda: come(port, 0), come_after_a_stranger)
    assert folder == same and second.transport.node.id == first.transport.nodes[1].id
    for node in (second, first):
        node.membership.leave()


@pytest.mark.fault
def test_a_node_that_was_suspended_does_not_lose_the_others(port):
    """Its clock has run on, and theirs: SLURM suspends all nodes of a job."""
    (first, _), (second, _) = together(lambda: come(port, 0), lambda: come(port, 1))
    for transport_of in (first.transport, second.transport):
        transport_of._closing.set()
        transport_of._thread.join()
    time.sleep(1.1)
    assert first.membership.is_lost(1, None) and second.membership.loss_of_node_0()
    for node in (first, second):
        node.transport.restart_clocks()
    assert not first.membership.is_lost(1, None) and not second.membership.loss_of_node_0()


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


# --- the secret ---


@pytest.mark.injection
def test_the_secret_is_in_the_environment_or_beside_the_run_folder(port, tmp_path, monkeypatch):
    out = ["--output_dir", str(tmp_path / "runs" / "a")]
    run_lock.release()  # locks that other tests left in this process
    monkeypatch.setenv(job_secret.VARIABLE, "sixteen letters.")
    with job_secret.of_job(at(port, 1), []) as secret:
        assert secret == b"sixteen letters." and job_secret.VARIABLE not in os.environ
    monkeypatch.setenv(job_secret.VARIABLE, "short")
    with pytest.raises(UserError, match="5 characters, 16 or more"), job_secret.of_job(at(port, 0), out):
        pass
    with (
        pytest.raises(UserError, match="ZEROFIT_JOB_SECRET to the same random text"),
        job_secret.of_job(at(port, 0), []),
    ):
        pass
    file = tmp_path / "runs" / ".a.job-secret"
    with job_secret.of_job(at(port, 0), out) as secret, socket.create_server(("127.0.0.1", port)):
        assert file.stat().st_mode & 0o777 == 0o600 and len(secret) == 32
        assert run_lock.held() == [tmp_path / "runs" / "a"]  # nobody else's job is there whose file this would replace
        with job_secret.of_job(at(port, 1), out) as theirs:
            assert theirs == secret
        file.chmod(0o644)
        with pytest.raises(UserError, match="is not a file that this user alone"), job_secret.of_job(at(port, 1), out):
            pass
    run_lock.release()
    assert not file.parent.exists()
    monkeypatch.setattr(job_secret, "READ_SECONDS", 0.1)
    server, missing = socket.create_server(("127.0.0.1", port)), pytest.raises(UserError, match="No such file")
    with server, missing, job_secret.of_job(at(port, 1), out):
        pass


@pytest.mark.injection
def test_the_store_listens_on_the_address_of_node_0_only(port):
    node = coordinator.Coordinator(at(port, 0), 1, FACTS, SECRET)
    others = [a for found in node_options.interfaces().values() for a in found if "." in a and not a.startswith("127.")]
    for address in ["127.0.0.2", *others]:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), timeout=2)
    node.membership.leave()
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
        launch.main([*words, str(ROOT / "recipes" / "sft.py"), "--sp_size", "4"])


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


def disturb(port, folder, done) -> int:
    """Send a stranger's messages to the supervisors' port once a second until `done` is set; return how often."""
    outside = dict.fromkeys(("../../outside", str(folder / "outside"), "rank0.json"), "x")
    node = NodeState(
        id="stranger", leader="x", heartbeat=10**6, host="h", address="", gpus=1, facts={}, report=ended_with(outside)
    )
    flags = {
        "model": str(folder / "evil"),
        "trust_remote_code": True,
        "output_dir": str(folder / "outside"),
    }
    job = JobState(
        leader="stranger", heartbeat=10**6, supervisors={1: "stranger"}, order=Order(9, {0: 1, 1: 1}, flags, {}),
        stop=Stop(1), kill=Kill(1, 9, stacks=False), end=End(0, "ended"),
    )  # fmt: skip
    sent = 0
    while not done.wait(1.0):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as raw:
                raw.sendall(os.urandom(300))
            store = stranger(port)
            for key, document in (("node/1", node), (JOB_KEY, job)):
                for text in (
                    os.urandom(3),
                    json.dumps(asdict(document)),
                    documents.signed(b"of a stranger, 16 bytes", key, document),
                ):
                    store.set(key, text)
            sent += 1
        except (OSError, RuntimeError):  # the port is not open yet, or not any more
            continue
    return sent


@pytest.mark.injection
def test_two_machines_train_as_one_does(tmp_path):
    """The line of docs/notes/multinode.md: two supervisors at one address, all but a network between them.

    Meanwhile a stranger writes to their port.
    """
    page, out = (ROOT / "docs" / "notes" / "multinode.md").read_text(), tmp_path / "two"
    line = re.search(r"```bash\n(make sft NODES=2 NODE_RANK=1 .* & make sft NODES=2 .*)\n```", page)[1]
    port, done = two_free_ports(), threading.Event()
    more = f"make sft ENV=active PYTHON={python()} ZERO=3 PORT={port} ARGS={shlex.quote(shlex.join(SHORT))}"
    line = line.replace("make sft", more).replace("runs/two", str(out)).replace(" & ", " & first=$!; ")
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(disturb, port, tmp_path, done)
        try:
            made = subprocess.run(
                ["bash", "-c", f"{line}; code=$?; wait $first && exit $code"],
                cwd=ROOT, capture_output=True, text=True, timeout=400,
            )  # fmt: skip
        finally:
            done.set()
    assert made.returncode == 0, made.stdout + made.stderr
    assert sent.result() >= 3 and "not signed with this job's secret" in made.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["two"] and not (out / "attempts").exists()
    assert made.stdout.count("2 processes on 2 nodes, all with the same software, data and arguments") == 2
    whole = run_world(2, {"one": ("sft", [*SHORT, "--zero", "3"])}, tmp_path)["one"]
    found = Run(out)
    assert found.losses == whole.losses and found.json("result.json")["world_size"] == 2
    assert any(sentence.startswith("links between nodes") for sentence in found.json("run.json")["decisions"])


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


def test_the_hosts_of_a_job_get_one_secret_through_the_connection(tmp_path, monkeypatch):
    file, told = tmp_path / "hosts", []
    monkeypatch.setattr(hostfile, "check", lambda *_: None)
    monkeypatch.setattr(hostfile, "run", lambda ssh, hosts, jobs: told.append(jobs) or 0)
    monkeypatch.delenv(job_secret.VARIABLE, raising=False)
    for text in ("one slots=1\ntwo slots=1\n", "one slots=1\ntwo slots=1\n", "one slots=1\n"):
        file.write_text(text)
        with pytest.raises(SystemExit):
            hostfile.main(["--hosts", str(file), "recipes/sft.py"])
    secrets = [{job["env"].get(job_secret.VARIABLE) for job in jobs} for jobs in told]
    assert [len(found) for found in secrets] == [1, 1, 1] and secrets[0] != secrets[1] and secrets[2] == {None}
    assert all(len(secret) == 32 for found in secrets[:2] for secret in found)
    assert not any(secret in word for jobs, found in zip(told, secrets[:2], strict=False) for secret in found
                   for job in jobs for word in job["argv"])  # fmt: skip


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
