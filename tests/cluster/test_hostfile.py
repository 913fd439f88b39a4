"""HOSTS=hostfile: one line starts the job on several machines over ssh. Also DeepSpeed's own launcher over pdsh."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, Run, run_world

from .test_nodes import LONG, SHORT, ends, is_at, nothing_is_left, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


@pytest.fixture
def beside(hosts, tmp_path):
    """Two hosts with sshd, and a hostfile of them."""
    bed = hosts(2, sshd=True)
    file = tmp_path / "my hosts"
    file.write_text("# two machines\nhost0 slots=1\nhost1 slots=1\n")
    return bed, file


def hosts_command(file, flags, placing=()):
    return [sys.executable, "-m", "zerofit", "hosts", "--hosts", file, *placing, ROOT / "recipes" / "sft.py", *flags]


def test_one_line_starts_both(beside, tmp_path):
    bed, file = beside
    out = tmp_path / "a 'run'"
    secret = {"HF_TOKEN": "hf_secret_of_the_test", "WANDB_API_KEY": "wandb_secret_of_the_test"}
    flags = [*SHORT, "--zero", "3", "--output_dir", out]
    process = bed[0].popen(hosts_command(file, flags), cwd=ROOT, env=secret)
    titles = set()
    while process.poll() is None:
        for host in bed:
            titles |= set(host.processes().values())
        time.sleep(0.2)
    assert process.returncode == 0, bed[0].text()
    whole = run_world(2, {"one": ("sft", [*SHORT, "--zero", "3"])}, tmp_path)["one"]
    assert Run(out).losses == whole.losses and Run(out).json("result.json")["world_size"] == 2
    written = [
        f.read_text(errors="replace")
        for f in out.rglob("*")
        if f.is_file() and f.suffix in (".json", ".log", ".jsonl", ".md")
    ]
    for value in secret.values():
        assert not [t for t in titles if value in t]
        assert value not in bed[0].text() and not [text for text in written if value in text]
    assert [t for t in titles if "zerofit join" in t] and not (ROOT / ".deepspeed_env").exists()
    nothing_is_left(bed)


@pytest.mark.fault
def test_ctrl_c_and_a_starter_that_is_killed(beside, tmp_path):
    bed, file = beside
    for how, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        out = tmp_path / how.name
        process = bed[0].popen(hosts_command(file, [*LONG, "--max_steps", "400", "--output_dir", out]), cwd=ROOT)
        wait_for(is_at(out, 3))
        process.send_signal(how)
        assert ends(process, seconds=90) == [code], bed[0].text()
        nothing_is_left(bed)


@pytest.mark.fault
def test_sigterm_saves(beside, tmp_path):
    bed, file = beside
    out = tmp_path / "run"
    flags = [*LONG, "--max_steps", "400", "--save_steps", "1000", "--output_dir", out]
    process = bed[0].popen(hosts_command(file, flags), cwd=ROOT)
    wait_for(is_at(out, 5))
    process.send_signal(signal.SIGTERM)
    assert ends(process, seconds=90) == [75] and len(list(out.glob("checkpoint-*"))) == 1
    nothing_is_left(bed)


@pytest.mark.bad_input
def test_what_is_refused_before_anything_starts(beside, tmp_path):
    bed, file = beside
    bad = tmp_path / "bad"
    bad.write_text("host0 slots=1\nhost1\n")
    far = tmp_path / "far"
    far.write_text("host0 slots=1\nhost9 slots=1\n")
    for name, placing, sentence in (
        (tmp_path / "none", (), "the file does not exist"),
        (bad, (), "bad entry: host1"),
        (far, (), "ssh to host9 without a password failed"),
        (file, ("--include", "host7"), "Hostname 'host7' not found"),
        (file, ("--gpus", "2"), "host0 has 1 slots"),
    ):
        done = bed[0].run(hosts_command(name, SHORT, placing), cwd=ROOT)
        assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr, done.stderr
    bed[1].server.terminate()
    done = bed[0].run(hosts_command(file, SHORT), cwd=ROOT)
    assert done.returncode == 2 and "ssh to host1 without a password failed" in done.stderr


def test_deepspeeds_own_launcher_over_pdsh(beside, tmp_path):
    bed, file = beside
    out = tmp_path / "run"
    plain = tmp_path / "hostfile"
    plain.write_text(file.read_text())
    words = ["deepspeed", "--hostfile", plain, "--master_addr", bed[0].address, ROOT / "recipes" / "sft.py", *SHORT,
             "--zero", "2", "--output_dir", out]  # fmt: skip
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = bed[0].run(words, timeout=200, cwd=tmp_path, env={"PATH": path, "GLOO_SOCKET_IFNAME": bed[0].interface})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert Run(out).json("result.json")["world_size"] == 2
    nothing_is_left(bed)
