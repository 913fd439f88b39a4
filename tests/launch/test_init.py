"""`zerofit init` and `zerofit sft ...`: a project to edit, and recipes without their file's name."""

import argparse
import subprocess
import sys

import pytest
from conftest import ROOT

from zerofit.base import command_line, paths
from zerofit.base.errors import UserError
from zerofit.job import program
from zerofit.launch import launch, node_options, prepare
from zerofit.tools import init


@pytest.fixture(autouse=True)
def program_as_before(monkeypatch):
    """Restore the program that this process starts: a later test of the same worker would take it for its own."""
    monkeypatch.setattr(program, "_started", program._started)


def test_a_project_has_what_a_run_reads(tmp_path):
    init.main([str(tmp_path / "new")])
    for name in ("recipes/lora.py", "deepspeed_configs/zero3.json", "launchers/local.sh", "examples/my_run.yaml"):
        assert (tmp_path / "new" / name).read_bytes() == (ROOT / name).read_bytes()
    assert paths.is_project(tmp_path / "new") and not (tmp_path / "new" / "examples" / "tiny").exists()


def test_the_makefile_of_a_project_uses_this_interpreter_and_installs_nothing(tmp_path):
    (tmp_path / "Makefile").write_text(init.makefile())
    done = subprocess.run(["make", "-n", "lora", "GPUS=2"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "pip" not in done.stdout, done.stdout + done.stderr
    assert f"{sys.executable} -m zerofit\n" in done.stdout
    unknown = subprocess.run(["make", "lora", "STAGE=2"], cwd=tmp_path, capture_output=True, text=True)
    assert "did you mean ZERO?" in unknown.stderr
    words = ["make", "-n", "reproduce", "RECIPE=zephyr-sft"]  # examples/reproduce/README.md of a project names it
    assert "examples/reproduce/run.py" in subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout
    for verb in ("test", "install", "ledger"):
        assert "No rule" in subprocess.run(["make", verb], cwd=tmp_path, capture_output=True, text=True).stderr


@pytest.mark.parametrize(("script", "verb"), [("local", "launch"), ("multinode", "launch"), ("hostfile", "hosts")])
def test_a_launcher_is_a_zerofit_command(script, verb, tmp_path):
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nprintf "%s|" "$PYTHONPATH" "$@"\n')
    stub.chmod(0o755)
    words = [ROOT / "launchers" / f"{script}.sh", "--gpus", "2", "recipes/sft.py", "--data", "a b"]
    done = subprocess.run(words, cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "PYTHON": str(stub)}, capture_output=True)
    assert done.stdout.decode() == f"{ROOT}/src|-m|zerofit|{verb}|--gpus|2|recipes/sft.py|--data|a b|"


@pytest.mark.bad_input
def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match="not an empty folder; name a new one"):
        init.main([str(tmp_path)])
    with pytest.raises(UserError, match="not an empty folder"):
        init.main([str(tmp_path / "mine")])


def test_the_project_is_found_from_its_folder_and_its_recipes(tmp_path, monkeypatch):
    init.main([str(tmp_path / "new")])
    monkeypatch.setattr(sys, "argv", ["zerofit"])
    assert paths._project() == ROOT
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "new" / "recipes" / "sft.py")])
    assert paths._project() == tmp_path / "new"
    monkeypatch.setattr(sys, "argv", ["zerofit"])
    monkeypatch.chdir(tmp_path / "new")
    assert paths._project() == tmp_path / "new"


@pytest.mark.bad_input
def test_a_recipe_of_another_project_is_refused(tmp_path):
    init.main([str(tmp_path / "new")])
    with pytest.raises(UserError, match=f"belongs to another project; start it in {tmp_path / 'new'}"):
        launch.main(["--show", str(tmp_path / "new" / "recipes" / "sft.py")])


def test_options_and_flags_stand_in_any_order():
    words = ["--zero", "3", "--gpus", "4", "--data", "a", "b", "--show", "--node-rank=1", "--packing"]
    assert command_line.for_launch("sft.py", words) == [
        "--gpus=4", "--node_rank=1", "--show", "sft.py", "--zero", "3", "--data", "a", "b", "--packing",
    ]  # fmt: skip


def test_the_short_verbs_know_all_recipes_and_options():
    assert set(program.names()) == set(program.kit()) == {"sft", "lora", "dpo", "pipeline"}
    parser = argparse.ArgumentParser(add_help=False)
    prepare.add_placement(parser, gpus="1")
    node_options.add_options(parser)
    assert {action.option_strings[0] for action in parser._actions} == {*command_line.LAUNCH_OPTIONS, "--args"}


def test_the_next_step_is_said_in_the_words_of_its_user(tmp_path, monkeypatch):
    assert command_line.next_step("chat", tmp_path / "my run") == f"make chat RUN='{tmp_path}/my run'"
    monkeypatch.setattr(command_line, "PROJECT", command_line.IN_WHEEL)
    assert command_line.next_step("chat", tmp_path) == f"zerofit chat {tmp_path}"
