"""Supervisors of several machines on one: who is missing, who differs, who is lost; and a job on two of them."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, TINY, Run, run_world

from zerofit import doctor_nodes, failure, hostfile, launch, links, nodes, peers, place, world
from zerofit.errors import UserError

FACTS = {"torch": "2", "recipe files": "abc"}
SHORT = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "24", "--effective_batch_size", "8", "--learning_rate", "1e-3",
    "--num_train_epochs", "1", "--logging_steps", "1", "--save_strategy", "no", "--num_samples", "0",
]  # fmt: skip


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(nodes, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(nodes, "LOST_SECONDS", 1.0)
    monkeypatch.setattr(nodes, "LAST_CALL_SECONDS", 0.3)
    monkeypatch.setattr(nodes, "GRACE_SECONDS", 0.3)
    return world.free_port()


def at(port, rank, most=2, least=None, timeout=5.0):
    return place.Place(least or most, most, rank, "127.0.0.1", port, timeout)


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
    crew = nodes.Nodes(at(port, rank, **more), 1, facts)
    try:
        crew.gather()
        if crew.leads:
            crew.begin_with(crew.here(), ["--zero", "2"])
        return crew, crew.agree(ready or {"data": "x"}, ROOT / "runs" / "a" if crew.leads else None)
    except UserError as error:
        crew.close(str(error))
        raise


@pytest.mark.parametrize("words", [
    ["--nnodes", "two"], ["--nnodes", "3:2", "--node_rank", "0"], ["--nnodes", "2"], ["--nnodes", "2", "--node_rank", "2"],
    ["--nnodes", "2", "--node_rank", "0"], ["--nnodes", "2", "--node_rank", "0", "--master_addr", "a", "--port", "65535"],
    ["--nnodes", "2", "--node_rank", "0", "--master_addr", "a", "--join_timeout", "soon"],
    ["--nnodes", "2", "--node_rank", "0", "--master_addr", "a", "--interface", "nonet0"],
])  # fmt: skip
def test_places_that_are_none(words):
    parser = argparse.ArgumentParser()
    place.add_options(parser)
    parser.add_argument("--port", default="")
    with pytest.raises(UserError, match=r"NNODES|NODE_RANK|MASTER_ADDR|PORT|--join_timeout|--interface"):
        place.of(parser.parse_args(words))


def test_one_machine_needs_no_place_and_two_are_placed():
    parser = argparse.ArgumentParser()
    place.add_options(parser)
    parser.add_argument("--port", default="")
    assert place.of(parser.parse_args([])) is None
    found = place.of(parser.parse_args(["--nnodes", "1:4", "--node_rank", "3", "--master_addr", "a"]))
    assert (found.least, found.most, found.rank, found.port) == (1, 4, 3, place.PORT)


def test_agreed_and_lost(port, tmp_path):
    (first, folder), (second, theirs) = together(lambda: come(port, 0), lambda: come(port, 1))
    assert folder == theirs == ROOT / "runs" / "a" and first.processes == second.processes == 2
    first.order(1, {0: 1, 1: 1}, ["--zero", "2"])
    assert second.next_order()["order"]["flags"] == ["--zero", "2"]
    second.begin()
    words = second.torchrun(["recipe.py"])
    assert words[words.index("--node_rank") + 1] == "1" and words[words.index("--master_port") + 1] == str(port + 1)
    second.closing.set()  # as when its machine dies
    second.thread.join()
    ended, told = [], time.monotonic()
    while not ended and time.monotonic() - told < 10:
        first.look(tmp_path, [], ended.append)
        time.sleep(0.05)
    assert ended == [9] and first.lost == [1]
    first.report(-9, [], None, tmp_path)
    assert first.collect(tmp_path)[0] != 0
    first.close()


def test_a_signal_to_one_names_one_step_for_all(port, tmp_path):
    (first, _), (second, _) = together(lambda: come(port, 0), lambda: come(port, 1))
    first.order(1, {0: 1, 1: 1}, [])
    second.next_order()
    second.begin()
    folders = [tmp_path / "a", tmp_path / "b"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        failure.write_stop(folder, 0)
        (folder / f"pulse{rank}").write_bytes(failure._PULSE.pack(1, 7 + rank, time.time()))
    deadline, steps = time.monotonic() + 10, [0, 0]
    while 0 in steps and time.monotonic() < deadline:
        first.look(folders[0], [], pytest.fail)
        second.look(folders[1], [15], pytest.fail)
        steps = [failure._STEP.unpack((folder / failure.STOP).read_bytes())[0] for folder in folders]
        time.sleep(0.05)
    assert steps[0] == steps[1] > 8
    for crew in (second, first):
        crew.close()


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
    assert first.processes == 1
    first.batch = 8
    first.documents = {r: {"gpus": 1, "host": "h"} for r in range(4)}
    assert first.usable([0, 1, 2]) == [0, 1] and first.usable([0, 1, 2, 3]) == [0, 1, 2, 3]  # 8 is no multiple of 3
    first.documents = {0: first.mine}
    first.close()


@pytest.mark.parametrize("key", ["software", "job"])
def test_who_differs_is_named(port, key):
    other = {"facts": FACTS | {"torch": "3"}} if key == "software" else {"ready": {"data": "y"}}
    for error in together(lambda: come(port, 0), lambda: come(port, 1, **other)):
        what = "torch" if key == "software" else "data"
        assert f"{what} is not the same on all nodes: node 0 (" in str(error) and "node 1 (" in str(error)


def test_a_number_that_is_taken_and_a_port_in_use(port):
    first, second = together(
        lambda: nodes.Nodes(at(port, 0, most=3), 1, FACTS), lambda: nodes.Nodes(at(port, 1, most=3), 1, FACTS)
    )
    with pytest.raises(UserError, match="NODE_RANK=1 is taken by"):
        nodes.Nodes(at(port, 1, most=3), 1, FACTS)
    with pytest.raises(UserError, match=f"PORT={port} is in use"):
        nodes.Nodes(at(port, 0, most=3), 1, FACTS)
    second.close()
    first.close()


def test_node_0_that_is_not_there(port):
    began = time.monotonic()
    with pytest.raises(UserError, match=f"PORT={port}: cannot be reached from .* within 1 s"):
        nodes.Nodes(at(port, 1, timeout=1.0), 1, FACTS)
    assert time.monotonic() - began < 20
    with pytest.raises(UserError, match=r"within 1 s .*does not know that name"):
        nodes.Nodes(place.Place(2, 2, 1, "no-such-host.invalid", port, 1.0), 1, FACTS)


def test_difference_counts_the_others():
    assert peers.difference([("a", {"x": 1}), ("b", {"x": 1})]) == ""
    assert "a has 1, b (and 1 more) has 2" in peers.difference([("a", {"x": 1}), ("b", {"x": 2}), ("c", {"x": 2})])


def test_hostfiles(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\none slots=4\ntwo slots=2\n")
    assert [(h.name, h.slots, h.whole) for h in hostfile.read(file)] == [
        ("one", [0, 1, 2, 3], True),
        ("two", [0, 1], True),
    ]
    assert [(h.name, h.slots, h.whole) for h in hostfile.read(file, include="one:1,3")] == [("one", [1, 3], False)]
    assert [h.name for h in hostfile.read(file, exclude="one")] == ["two"]
    assert [len(h.slots) for h in hostfile.read(file, gpus="2")] == [2, 2]
    for text, more, sentence in (
        ("one\n", {}, "bad entry: one"), ("", {}, "empty"), ("one slots=1\none slots=1\n", {}, "multiple entries for one"),
        ("one slots=1\n", {"gpus": "2"}, "has 1 slots"), ("one slots=1\n", {"gpus": "x"}, "GPUS=x"),
        ("one slots=1\n", {"include": "two"}, "'two' not found"), ("one slots=1\n", {"exclude": "one"}, "no host"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(UserError, match=sentence):
            hostfile.read(file, **more)
    with pytest.raises(UserError, match="no such file"):
        hostfile.read(tmp_path / "none")


def test_what_each_host_would_run(tmp_path, capsys, monkeypatch):
    file = tmp_path / "hosts"
    file.write_text("one slots=4\ntwo slots=4\n")
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    hostfile.main(["--hosts", str(file), "--exclude", "two:0", "--show", "recipes/sft.py", "--run_name", "it's a \"run\"",
                   "--hub_token", "hf_other_secret"])  # fmt: skip
    said = capsys.readouterr().out
    assert said.splitlines()[1] == (
        "  zerofit launch --gpus 4 --nnodes 2 --node_rank 0 --master_addr one --join_timeout 45 recipes/sft.py --run_name "
        "'it'\"'\"'s a \"run\"'"
    )
    assert "--gpus 3 --nnodes 2 --node_rank 1" in said and "CUDA_VISIBLE_DEVICES" in said.splitlines()[5]
    assert "secret" not in said and "HF_TOKEN" in said


def test_what_one_machine_of_two_would_run(capsys, monkeypatch):
    monkeypatch.setenv("PET_NODE_RANK", "7")  # an operator's, which is not for the ranks
    launch.main(["--gpus", "2", "--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1", "--port", "4000", "--show",
                 "--args", "--run_name 'it is a \"run\"'", str(ROOT / "recipes" / "lora.py"), "--zero", "2"])  # fmt: skip
    said = capsys.readouterr().out.splitlines()
    assert shlex.split(said[1])[1:] == [
        "-m", "zerofit.torchrun", "--nnodes", "2", "--node_rank", "1", "--nproc_per_node", "2", "--master_addr", "10.0.0.1",
        "--master_port", "4001", "--rdzv_conf", "timeout=45", str(ROOT / "recipes" / "lora.py"), "--zero", "2", "--run_name",
        'it is a "run"', "--gpus", "4",
    ]  # fmt: skip
    assert "PET_NODE_RANK" not in os.environ


def test_doctor_looks_at_what_several_need(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nonet0")
    found = {(f.name, f.level): f for f in doctor_nodes.check(2, tmp_path, "")}
    assert "there is no nonet0 here" in found["interface", "fail"].text
    assert ("run folder", "warn") in found or ("run folder", "ok") in found
    assert any(name == "ports" for name, _ in found) and ("starting", "ok") in found


def test_a_disk_that_is_not_shared_is_seen(tmp_path):
    assert not links._seen(tmp_path / "mark", seconds=0.1)
    (tmp_path / "mark").touch()
    assert links._seen(tmp_path / "mark", seconds=0.1)


def test_two_machines_train_as_one_does(tmp_path):
    """The line of docs/multinode.md: two supervisors at one address, the whole way but for a network between them."""
    page, out = (ROOT / "docs" / "multinode.md").read_text(), tmp_path / "two"
    line = re.search(r"```bash\n(make sft NNODES=2 NODE_RANK=1 .* & make sft NNODES=2 .*)\n```", page)[1]
    more = f"make sft ENV=active PYTHON={sys.executable} ZERO=3 PORT={world.free_port() // 2 * 2} ARGS={shlex.quote(shlex.join(SHORT))}"
    line = line.replace("make sft", more).replace("runs/two", str(out)).replace(" & ", " & first=$!; ")
    done = subprocess.run(
        ["bash", "-c", f"{line}; code=$?; wait $first && exit $code"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 processes on 2 nodes, all with the same software, data and arguments") == 2
    whole = run_world(2, {"one": ("sft", [*SHORT, "--zero", "3"])}, tmp_path)["one"]
    found = Run(out)
    assert found.losses == whole.losses and found.json("result.json")["world_size"] == 2
    assert any(sentence.startswith("links between nodes") for sentence in found.json("run.json")["decisions"])


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
