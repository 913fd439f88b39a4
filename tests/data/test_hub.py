"""Models of the Hub: one process of a node asks, again after a refusal; its faults are not the user's mistakes."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, TINY

FETCH = """
import sys
from zerofit import entrypoint
from zerofit.base import hub
def main():
    hub.fetch("some/model", "--model some/model", None)
    print(hub.fetch("some/model", "--model some/model", None, (*hub.SMALL_FILES, "model.safetensors")))
entrypoint.guard(main)
"""


@pytest.fixture
def hub(tmp_path):
    """Start a Hub that first fails with a status, for each path so many times; return its environment and requests."""
    servers = []

    def start(status: int, times: int):
        log = tmp_path / "requests"
        words = [sys.executable, str(ROOT / "tests" / "data" / "fake_hub.py"), str(TINY / "model"), str(log)]
        server = subprocess.Popen([*words, str(status), str(times)], stdout=subprocess.PIPE, text=True)
        servers.append(server)
        port = int(server.stdout.readline())
        folders = {"HF_HOME": str(tmp_path / "home"), "ZEROFIT_CACHE": str(tmp_path / "cache")}
        added = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_DISABLE_XET": "1"} | folders

        def requests() -> Counter:
            lines = [line for line in log.read_text().splitlines() if "agent-harnesses" not in line]
            return Counter(line.replace("/some/model", "") for line in lines)

        return os.environ | added, requests

    yield start
    for server in servers:
        server.kill()
        server.wait()


def two_ranks(environment: dict) -> list[tuple[int, str, str]]:
    """Return (exit code, stdout, stderr) of two processes that torchrun would have started."""
    words = [sys.executable, "-c", FETCH]
    ranks = [
        subprocess.Popen(words, env=environment | {"LOCAL_RANK": str(i)}, stdout=-1, stderr=-1, text=True)
        for i in range(2)
    ]
    told = [rank.communicate(timeout=120) for rank in ranks]
    return [(rank.returncode, *streams) for rank, streams in zip(ranks, told, strict=True)]


@pytest.mark.slow
@pytest.mark.fault
def test_429_twice_is_waited_for_and_one_process_of_the_node_downloads(hub):
    environment, requests = hub(429, 2)
    ranks = two_ranks(environment)
    assert [code for code, *_ in ranks] == [0, 0], ranks
    (folder,) = {Path(out.strip()) for _, out, _ in ranks}
    names = {file.name for file in (TINY / "model").iterdir()}
    assert {file.name for file in folder.iterdir()} == names
    answered = requests()
    downloads = {line: count for line, count in answered.items() if line.startswith("200 GET /resolve")}
    assert len(downloads) == len(names) and set(downloads.values()) == {1}
    assert answered["429 GET /api/models/revision/main"] == 2  # of the first process alone
    # Of each process the question that waits, and the one that resolves.
    assert answered["200 GET /api/models/revision/main"] == 4
    (folder / "chat_template.jinja").unlink()  # a cache that another program has filled need not hold every file
    words = [sys.executable, "-c", FETCH]
    done = subprocess.run(words, env=environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and Path(done.stdout.strip()) == folder and requests() == answered, done.stderr


@pytest.mark.slow
@pytest.mark.fault
def test_a_hub_that_is_down_is_not_the_users_mistake(hub):
    """Both ranks end with the same sentence."""
    environment, requests = hub(503, -1)
    ranks = two_ranks(environment)
    assert [code for code, *_ in ranks] == [69, 69]
    for _, _, said in ranks:
        assert "--model some/model: the Hub (127.0.0.1:" in said and "tries (HTTP 503)" in said
        assert "Traceback" not in said
    assert sum(requests().values()) == 2 * 7, requests()  # 6 tries of the library's, and one that resolves


@pytest.mark.fault
def test_no_connection_is_told_within_seconds(tmp_path):
    folders = {"HF_HOME": str(tmp_path / "home"), "ZEROFIT_CACHE": str(tmp_path / "cache")}
    began = time.monotonic()
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"} | folders
    done = subprocess.run([sys.executable, "-c", FETCH], env=environment, capture_output=True, text=True)
    assert done.returncode == 69 and "127.0.0.1 cannot be reached" in done.stderr
    assert time.monotonic() - began < 30


@pytest.mark.bad_input
def test_a_model_that_is_not_there_is_the_users_mistake(hub):
    environment, _ = hub(404, -1)
    done = subprocess.run([sys.executable, "-c", FETCH], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "--model some/model: its files could not be loaded" in done.stderr
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", FETCH], env=offline, capture_output=True, text=True)
    assert done.returncode == 2 and "--model some/model" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.fault
def test_the_launcher_downloads_and_its_ranks_ask_nothing(hub, tmp_path):
    environment, requests = hub(503, 1)
    words = ["-m", "zerofit", "launch", "--gpus", "2", "recipes/sft.py", "--model", "some/model", "--data"]
    words += [str(TINY / "train.jsonl"), "--max_steps", "1", "--use_cpu", "true", "--zero", "3", "--num_samples", "0"]
    run = subprocess.run([sys.executable, *words, "--output_dir", str(tmp_path / "run")], cwd=ROOT, env=environment,
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    answered = requests()
    assert set(Counter({line: n for line, n in answered.items() if "/resolve/" in line}).values()) == {1}, answered
    assert answered["200 GET /api/models/revision/main"] == 2 and not any("adapter_config" in line for line in answered)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "finished"
