"""Every check of `zerofit doctor` finds what it is for, names the mending, and is silent on a healthy machine."""

import contextlib
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from zerofit.base.errors import UserError
from zerofit.base.paths import ROOT
from zerofit.config import resolve
from zerofit.launch import doctor, doctor_packages


def only(found):
    (finding,) = found
    return finding.level, finding.text + " -> " + finding.fix


def failure(found):
    """Return the one that fails; the installed packages may be newer than tested besides."""
    return only(finding for finding in found if finding.level == "fail")


def none(found):
    return list(found) == []


@pytest.mark.slow
def test_this_machine(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "zerofit", "doctor", "--json", "--gpus", "2", "--output_dir", str(tmp_path / "new")],
        capture_output=True, text=True, timeout=120, env=os.environ | {"HOME": str(tmp_path)}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert {found[name]["level"] for name in ("packages", "known problems", "network", "exchange")} == {"ok"}
    assert found["exchange"]["text"].startswith("2 processes over gloo, ")
    assert not (tmp_path / "new").exists()


def test_a_version_outside_of_the_tested_set(monkeypatch):
    plain = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.18.5" if name == "deepspeed" else plain(name))
    level, text = failure(doctor_packages.check())
    assert level == "fail" and "deepspeed 0.18.5 is not " in text and "make install" in text
    with pytest.raises(UserError, match=r"deepspeed 0\.18\.5"):
        doctor.raise_or_warn(doctor.check_installation())


def installed(monkeypatch, **versions):
    """Have packages installed in these versions; None: not at all."""
    plain = metadata.version

    def version(name):
        if name in versions and versions[name] is None:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or plain(name)

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("versions, noted", [
    ({"torch": "9.0.0+cu150", "transformers": "5.99.0"}, "torch 9.0.0+cu150 (tested up to 2.{}), transformers 5.99.0"),
    ({"deepspeed": "0.99.0"}, "deepspeed 0.99.0"),
    ({"deepspeed": None, "peft": "9.0"}, ""),  # a failure says more
    ({"torchao": None, "bitsandbytes": None}, None),  # needed where they are used
])  # fmt: skip
def test_a_version_above_all_tested_ones_is_noted_and_never_refused(versions, noted, monkeypatch):
    newest = {requirement.name: metadata.version(requirement.name) for requirement in doctor_packages.requirements()}
    monkeypatch.setattr(doctor_packages, "newest_tested", lambda: newest)
    patch_release = f"{newest['transformers'].rpartition('.')[0]}.99"
    installed(monkeypatch, **{"transformers": patch_release} | versions)  # of a minor release that was tested: no note
    found = [f for f in doctor_packages.check() if f.level == "warn"]
    if noted is None:
        assert none(doctor_packages.check())
        return
    text = noted.replace("2.{}", newest["torch"].partition("+")[0])
    assert len(found) == 1 and found[0].text.startswith(f"newer than the tested versions: {text}")
    assert "`zerofit doctor`" in found[0].fix
    if versions.get("deepspeed", "") is not None:
        assert doctor.raise_or_warn(doctor.check_installation())


@pytest.mark.slow
def test_a_newer_minor_release_trains_with_one_note(tmp_path, monkeypatch):
    """transformers' own metadata, found first on the module path, says another version."""
    metadata_folder = tmp_path / "transformers-5.99.0.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.99.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for number, words in enumerate((["-m", "zerofit", "sft"], ["recipes/sft.py"])):
        folder = tmp_path / f"run{number}"
        more = ["--max_steps", "1", "--num_samples", "0", "--output_dir", str(folder)]
        done = subprocess.run([sys.executable, *words, *more], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (done.stdout + done.stderr).count("newer than the tested versions: transformers 5.99.0") == 1
        decisions = json.loads((folder / "run.json").read_text())["decisions"]
        assert sum("transformers 5.99.0" in decision for decision in decisions) == 1


def test_every_dependency_has_a_floor_and_no_upper_bound():
    """So `pip install .` replaces nothing that is installed and above the floors."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    operators = {spec.operator for text in project["dependencies"] for spec in Requirement(text).specifier}
    assert operators == {">="} and all(Requirement(text).specifier for text in project["dependencies"])


def test_a_checkout_has_the_floors_of_its_own_file(monkeypatch, tmp_path):
    """Also where it is not installed, or where an older installation left metadata of its own."""
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["peft>=99"]\n')
    monkeypatch.setattr(doctor_packages, "ROOT", tmp_path)
    level, text = failure(doctor_packages.check())
    assert level == "fail" and "is not >=99" in text


@pytest.mark.slow
def test_the_self_test_trains_and_reports_the_certificate(monkeypatch, tmp_path):
    """It says what the run said where it breaks, here by a package that raises as it is imported."""
    (finding,) = doctor_packages.self_test()
    assert finding.level == "ok" and "9 of 9 checks of a short run hold" in finding.text, finding
    checks = list(doctor._checks(SimpleNamespace(nodes="1", output_dir="runs", gpus="", port="", self_test=True)))
    assert "self-test" in checks
    (tmp_path / "peft.py").write_text("raise RuntimeError('this peft is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (finding,) = doctor_packages.self_test()
    assert finding.level == "fail" and "Error: " in finding.text and finding.fix.endswith("make install")


def test_a_package_that_is_missing(monkeypatch):
    def version(name, plain=metadata.version):
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return plain(name)

    monkeypatch.setattr(metadata, "version", version)
    assert failure(doctor_packages.check())[1].startswith("peft is missing")


def test_rules_are_complete():
    for ranges, symptom, fix in doctor_packages.RULES:
        assert "https://github.com/" in symptom and fix.startswith("pip install ")
        assert all(SpecifierSet(versions) for versions in ranges.values())
    assert none(doctor_packages.known_problems())  # the tested set has none


def test_each_rule_can_apply():
    """Versions outside of pyproject's ranges are refused without a rule."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    for ranges, symptom, _ in doctor_packages.RULES:
        for name in allowed.keys() & ranges.keys():
            both = allowed[name] & SpecifierSet(ranges[name])
            assert any(both.contains(bound.version) for bound in both), f"{name} {both}: {symptom}"


def test_a_known_problem_is_reported(monkeypatch):
    plain = metadata.version
    versions = {"flash-attn": "2.7.4.post1", "torch": "2.13.0"}
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or plain(name))
    level, text = only(doctor_packages.known_problems())
    assert level == "warn" and text.startswith("flash-attn 2.7.4.post1, torch 2.13.0: a prebuilt wheel fails")
    assert any("undefined symbol" in sentence for sentence in doctor.raise_or_warn(doctor.check_installation()))
    versions["flash-attn"] = "2.8.0"
    assert none(doctor_packages.known_problems())


def test_compilers_that_are_missing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    level, text = only(doctor.compilers())
    assert level == "warn" and "ninja and g++ not on PATH" in text


def test_variables(monkeypatch):
    from zerofit.base import distributed

    for name in (*doctor.CHANGES_BEHAVIOR, "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert none(doctor.variables())
    monkeypatch.setattr(distributed, "cores", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert [f.name for f in doctor.variables()] == ["OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING"]


def test_a_folder_that_cannot_be_written(tmp_path):
    assert only(doctor.disk(tmp_path / "runs"))[0] in ("ok", "warn")
    assert not list(tmp_path.iterdir())
    assert only(doctor.disk(Path("/proc/runs")))[0] == "fail"


def test_a_port_in_use():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert next(doctor.port(str(taken.getsockname()[1]))).level == "fail"


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A function that has the processes run other code in place of the exchange."""

    def use(code):
        (tmp_path / "stand_in.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(doctor, "EXCHANGE", "stand_in")

    return use


def test_a_cache_that_is_small_or_cannot_be_written_is_named(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "rows"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(2**40, 0, 2**40))
    assert list(doctor.caches()) == []
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(2**34, 0, 2**33))
    assert [f.text for f in doctor.caches()] == [f"{tmp_path / 'hub'}: 8.0 GiB free, a 7B model in bf16 takes 14"]
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert [f.fix.partition("=")[0] for f in doctor.caches()] == ["HF_HOME", "ZEROFIT_CACHE"]


def test_few_open_files_are_named(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 4096))
    (found,) = (f for f in doctor.host_memory() if f.name == "open files")
    assert found.level == "warn" and found.text.startswith("limited to 256 files")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param("raise RuntimeError('no route to host')", "no route to host", marks=pytest.mark.slow),
        pytest.param(
            "import os, time; time.sleep(60) if os.environ['RANK'] == '0' else exit(int('no device 1'))",
            "no device 1",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "print('zerofit: error: rank 0 had no answer.'); exit(9)", "rank 0 had no answer.", marks=pytest.mark.slow
        ),
    ],
    ids=["all fail", "rank 1 alone fails", "a sentence"],
)
def test_processes_that_cannot_talk(stand_in, code, said):
    """Of the rank that failed, not of rank 0, which waits for it."""
    stand_in(code)
    level, text = only(doctor.exchange(2))
    assert level == "fail" and "2 processes over gloo: " in text and said in text and "NCCL" not in text


@pytest.mark.fault
def test_processes_that_hang(monkeypatch, stand_in):
    stand_in("import time; time.sleep(20)")
    monkeypatch.setattr(doctor, "EXCHANGE_SECONDS", 1.0)
    level, text = only(doctor.exchange(2))
    assert level == "fail" and "exchanged nothing over gloo in 1 s" in text


@pytest.mark.slow
def test_what_libraries_print_is_no_failure(monkeypatch, stand_in):
    """NCCL_DEBUG=INFO, which the failure's fix proposes, has every rank print more than a pipe holds."""
    stand_in("print('NCCL INFO ' * 30000)\nprint('exchanged 1.50 GB/s')")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert only(doctor.exchange(2)) == ("ok", "2 processes over NCCL, 1.50 GB/s -> ")
    stand_in("raise SystemExit(1)")
    assert "-> NCCL_DEBUG=INFO make doctor" in only(doctor.exchange(2))[1]


@pytest.mark.injection
def test_no_file_is_written_through_a_link(tmp_path):
    """In a folder that others can write to, they know this process's number."""
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / f".zerofit-{os.getpid()}.tmp").symlink_to(precious)
    assert only(doctor.disk(folder))[0] in ("ok", "warn")
    assert precious.read_text() == "precious"


@pytest.mark.bad_input
@pytest.mark.parametrize("words", [["--gpus", "none"], ["--gpus", "0"], ["--gpus", "\u00b2"], ["--nodes", "\u00b2"]])
def test_mistakes(words):
    with pytest.raises(UserError, match="must be a positive integer"):
        doctor.main(words)


@pytest.mark.bad_input
def test_no_more_processes_than_the_machine_bears():
    with pytest.raises(UserError, match="GPUS=100000: this machine has only"):
        doctor.main(["--gpus", "100000"])


def test_room_for_checkpoints(monkeypatch, tmp_path):
    settings = resolve.resolve_settings("sft", ["--save_total_limit", "2", "--output_dir", str(tmp_path / "new")], 1)
    net = torch.nn.Linear(10**5, 10**5, bias=False, device="meta")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=0, free=100 * 10**9))
    level, text = only(doctor.disk_space(settings, net))  # 3 x 14 bytes x 1e10 and 2 bytes x 1e10
    assert level == "warn" and "3 checkpoints and final/ take about 440 GB" in text and "has 100 free" in text
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=0, free=10**12))
    assert none(doctor.disk_space(settings, net))


def test_the_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert only(doctor.hub_access())[1].startswith("offline mode")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    level, text = only(doctor.hub_access())
    assert level == "warn" and "not reachable, without a token" in text
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "with a token" in only(doctor.hub_access())[1] and "hf_secret" not in only(doctor.hub_access())[1]


def test_a_job_is_told_what_concerns_it(monkeypatch):
    net = torch.nn.Linear(2, 2, device="meta")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("DS_SKIP_CUDA_CHECK", "1")
    found = doctor.check_job(resolve.resolve_settings("sft", ["--zero", "2", "--offload", "optimizer"], 1), net)
    assert "NCCL_P2P_DISABLE" not in {f.name for f in found}  # on a CPU
    assert {"DS_SKIP_CUDA_CHECK", "host memory"} <= {f.name for f in found}
    assert any("DS_SKIP_CUDA_CHECK is" in s or s.startswith("DS_SKIP_CUDA_CHECK") for s in doctor.raise_or_warn(found))


def test_a_job_is_told_of_missing_kernels_on_a_gpu_alone(monkeypatch):
    asked = resolve.resolve_settings("sft", ["--zero", "0"], 1)
    config = transformers.AutoConfig.for_model("qwen3_next")
    net = SimpleNamespace(config=config, parameters=torch.nn.Linear(2, 2, device="meta").parameters)
    monkeypatch.setattr(doctor, "gpus", list)
    monkeypatch.setattr(doctor, "disk_space", lambda *_: [])
    assert "kernels" not in {f.name for f in doctor.check_job(asked, net)}
    (sentence,) = [s for s in doctor.raise_or_warn(doctor.check_job(asked.replace(use_cpu=False), net)) if "fla" in s]
    assert sentence.startswith("kernels: Qwen3NextForCausalLM computes layers in plain PyTorch")
    assert sentence.endswith("; pip install flash-linear-attention && pip install causal-conv1d --no-build-isolation")


def test_triton_needs_a_c_compiler_on_a_gpu(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("gcc", "clang", "nvcc") else f"/usr/bin/{tool}")
    assert none(doctor.compilers())  # on a CPU nothing needs it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = next(f for f in doctor.compilers() if f.name == "C compiler")
    assert found.level == "warn" and "gcc" in found.text and "Triton" in found.text
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    monkeypatch.setenv("CC", "/opt/cc")
    text = next(f.text for f in doctor.compilers() if f.name == "C compiler")
    assert "no /nowhere/Python.h" in text and "gcc" not in text


@pytest.mark.parametrize(("nvcc", "torchs", "warns"), [
    ("13.0", "13.0", False), ("13.1", "13.0", True), ("12.6", "12.8", False), ("12.4", "13.0", True),
    ("13.0", "12.9", True),
])  # fmt: skip
def test_nvcc_is_compared_as_deepspeed_does(monkeypatch, tmp_path, nvcc, torchs, warns):
    from deepspeed.ops.op_builder import builder

    tool = tmp_path / "nvcc"
    tool.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V{nvcc}.48'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.version, "cuda", torchs)
    found = [f for f in doctor.compilers() if f.name == "nvcc"]
    assert len(found) == warns
    assert not warns or f"nvcc {nvcc}, torch for CUDA {torchs}" in found[0].text
    monkeypatch.setattr(builder, "installed_cuda_version", lambda name="": tuple(map(int, nvcc.split("."))))
    with pytest.raises(builder.CUDAMismatchException) if warns else contextlib.nullcontext():
        builder.assert_no_cuda_mismatch()


def test_locked_memory_where_something_locks_it(monkeypatch):
    from zerofit.launch import doctor_nodes

    monkeypatch.setattr(resource, "getrlimit", lambda what: (8 * 2**20, 8 * 2**20))
    monkeypatch.setattr(doctor_nodes, "infiniband", lambda: ["mlx5_0"])

    def warned(**more):
        return [f.text for f in doctor.host_memory(**more) if f.name == "memlock"]

    assert warned() == []  # the driver pins CUDA's memory itself
    assert warned(nvme=True) == ["limited to 8 MiB, too little for the buffers of --offload_path"]
    assert warned(nodes=2) == ["limited to 8 MiB, too little for InfiniBand's registered memory"]
    monkeypatch.setattr(doctor_nodes, "infiniband", list)
    assert warned(nodes=2) == []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    assert warned(nvme=True) == []


def test_wsl_pins_little_memory(monkeypatch):
    monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    assert "pinned memory" not in {f.name for f in doctor.host_memory()}  # nothing is pinned without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert next(f for f in doctor.host_memory() if f.name == "pinned memory").level == "warn"
    monkeypatch.setattr(platform, "release", lambda: "6.1.0")
    assert "pinned memory" not in {f.name for f in doctor.host_memory()}


@pytest.mark.slow
@pytest.mark.parametrize("given", [pytest.param(None, marks=pytest.mark.slow), "cpu"])
def test_an_accelerator_is_named_where_the_user_chose_it(tmp_path, given):
    """Nothing that the doctor itself imports may look like the user's own setting."""
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    environment |= {"DS_ACCELERATOR": given} if given else {}
    done = subprocess.run(
        [sys.executable, "-m", "zerofit", "doctor", "--json", "--gpus", "1", "--output_dir", str(tmp_path / "new")],
        capture_output=True, text=True, timeout=120, env=environment | {"HOME": str(tmp_path)}, cwd=tmp_path,
    )  # fmt: skip
    levels = [f["level"] for f in json.loads(done.stdout)["findings"] if f["name"] == "DS_ACCELERATOR"]
    assert levels == (["warn"] if given else []), done.stderr
