"""Interface variables of gloo and NCCL: what the user and the site have set stays."""

import pytest

from zerofit.launch import node_options

NCCL, GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """Return a function that returns the variables of node 1, whose route to node 0 is eth7."""
    for name in (NCCL, GLOO, "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node_options, "interface_towards", lambda address, port: "eth7")
    monkeypatch.setattr(node_options, "SITE_CONF", tmp_path / "etc" / "nccl.conf")
    monkeypatch.setattr(node_options, "INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "etc").mkdir()

    def of(interface=""):
        return node_options.interface_variables(interface, "host0", 29500)

    return of


def test_where_nothing_is_set_both_use_the_route_to_node_0(chosen, tmp_path):
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=INFO\n# NCCL_SOCKET_IFNAME=ib0\n")
    (tmp_path / "infiniband").mkdir()  # a driver without devices
    assert chosen() == {GLOO: "eth7", NCCL: "=eth7"}


@pytest.mark.parametrize("file", ["etc/nccl.conf", ".nccl.conf", "named.conf"])
def test_a_configuration_file_of_nccl_wins(chosen, tmp_path, monkeypatch, file):
    (tmp_path / file).write_text("NCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME=ib0,ib1\n")
    if file == "named.conf":
        assert chosen() == {GLOO: "eth7", NCCL: "=eth7"}
        monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / file))
    assert chosen() == {GLOO: "eth7"}
    assert chosen("eth1") == {GLOO: "eth1", NCCL: "=eth1"}  # --interface is the user's word


def test_a_named_file_is_read_instead_of_the_home_folders(chosen, tmp_path, monkeypatch):
    (tmp_path / ".nccl.conf").write_text("NCCL_SOCKET_IFNAME=ib0\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "missing"))
    assert chosen() == {GLOO: "eth7", NCCL: "=eth7"}


def test_with_infiniband_nccl_chooses(chosen, tmp_path):
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert chosen() == {GLOO: "eth7"}
    assert chosen("eth1") == {GLOO: "eth1", NCCL: "=eth1"}


def test_the_environment_wins(chosen, monkeypatch):
    monkeypatch.setenv(NCCL, "ib0")
    assert chosen() == {GLOO: "eth7"}
    monkeypatch.setenv(GLOO, "ib0")
    assert chosen() == {}
