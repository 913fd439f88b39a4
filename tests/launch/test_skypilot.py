"""launchers/skypilot.yaml: SkyPilot's own client takes it, and its command reaches the launch."""

import os
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT

from zerofit.launch import launch

FILE = ROOT / "launchers" / "skypilot.yaml"


def test_skypilots_client_takes_the_file(tmp_path):
    sky = pytest.importorskip("sky", reason="skypilot is not installed: pip install skypilot")
    task = sky.Task.from_yaml(str(FILE))
    assert task.num_nodes == 1 and task.envs["UPLOAD_TO"].startswith("s3://")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(FILE.read_text().replace("use_spot:", "use_spots:"))
    with pytest.raises(ValueError, match="use_spots"):
        sky.Task.from_yaml(str(wrong))


def test_its_command_is_one_of_the_launch(tmp_path, capsys):
    task = yaml.safe_load(FILE.read_text())
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\nimport sys\nprint('\\0'.join(sys.argv[1:]))\n")
    python.chmod(0o755)
    sets = {"SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "HOME": str(tmp_path)}  # fmt: skip
    env = os.environ | sets | task["envs"] | {"UPLOAD_TO": f"file://{tmp_path}/there"}
    words = subprocess.run(["bash", "-euc", task["run"]], env=env, capture_output=True, text=True, check=True).stdout
    module, name, verb, *rest = words.strip("\n").split("\0")
    assert [module, name, verb] == ["-m", "zerofit", "launch"] and "10.0.0.1" in rest
    launch.main(["--show", *rest, "--use_cpu", "true"])
    assert f"file://{tmp_path}/there" in capsys.readouterr().out
