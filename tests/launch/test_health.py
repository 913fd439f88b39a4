"""What has become worse on a node between two looks is in the report of a restart."""

from types import SimpleNamespace

import pytest

from zerofit.base import hardware, health
from zerofit.launch import postmortem, supervisor

pytestmark = pytest.mark.fault


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two GPUs, as nvidia-smi lists them, and two InfiniBand ports, one of which is not connected."""
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(state)
    monkeypatch.setattr(health, "INFINIBAND", tmp_path)
    gpus = [dict(zip(health.FIELDS, cells, strict=True)) for cells in (("0", "H100", "2"), ("1", "H100", "[N/A]"))]
    monkeypatch.setattr(hardware, "nvidia_smi", lambda fields: gpus)
    return gpus, tmp_path / "mlx5_0" / "ports" / "1" / "state"


def test_nothing_new_is_nothing(machine):
    before = health.read()
    assert before == health.Health({"GPU 0 (H100)": 2, "GPU 1 (H100)": 0}, frozenset({"mlx5_0 port 1"}))
    assert health.degradations(before, health.read()) == ""


def test_a_restart_says_what_became_worse(machine):
    gpus, state = machine
    settings = SimpleNamespace(on_oom="fail", max_restarts=3, use_cpu=False)
    job = SimpleNamespace(initial_health=health.read(), coordinator=None, env={})
    gpus[0][health.FIELDS[2]] = "5"
    del gpus[1]
    state.write_text("1: DOWN\n")
    lost = postmortem.Outcome("lost rank", 1)
    following = supervisor._next_attempt(job, supervisor.Attempt(settings, None), lost, 0)
    assert following.change == (
        "the same settings (restart 1 of 3); on this node GPU 1 (H100) no longer responds, GPU 0 (H100) has 3 "
        "new uncorrected memory errors, mlx5_0 port 1 is down"
    )


def test_a_driver_that_is_gone_is_one_clause(machine):
    before = health.read()
    machine[0].clear()
    assert health.degradations(before, health.read()) == "nvidia-smi no longer responds"
