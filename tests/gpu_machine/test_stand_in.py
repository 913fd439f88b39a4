"""The stand-in GPU machine: what torch, nvidia-smi and SLURM's commands answer on it, and that nothing computes."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from . import Card, contexts, in_process, machine, submitted

MIB = 2**20
UNEQUAL = [
    Card("NVIDIA GeForce RTX 4060 Ti", 16380, capability=(8, 9), multi_processor_count=34),
    Card("NVIDIA GeForce RTX 4090", 24564, free_mib=20000, capability=(8, 9), multi_processor_count=128),
]
SLICED = Card(slices=(("3g.40gb", 40448), ("3g.40gb", 40448)))


def output(env: dict[str, str], *words: str, code: int = 0, **options) -> str:
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def python(env: dict[str, str], text: str, **options) -> list[str]:
    return output(env, sys.executable, "-c", text, **options).splitlines()


# --- torch ---


def test_names_and_memory(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path, UNEQUAL)
    assert torch.cuda.is_available() and torch.version.cuda == "13.0"
    assert torch.accelerator.is_available() and torch.cuda.nccl.version() == (2, 29, 7)
    assert [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] == [c.name for c in UNEQUAL[::-1]]
    assert torch.cuda.get_device_capability() == (8, 9) and torch.cuda.is_bf16_supported(including_emulation=False)
    properties = torch.cuda.get_device_properties(0)
    assert 0.99 * 24564 * MIB < properties.total_memory < 24564 * MIB and properties.multi_processor_count == 128
    assert torch.cuda.current_device() == 0 and torch.cuda.is_initialized()
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(2)
    assert contexts(os.environ) == []  # none of this opens one
    free, total = torch.cuda.mem_get_info(0)
    assert (free, total) == ((20000 - 500) * MIB, properties.total_memory)  # its own context is among what is used
    assert [(c.pid, c.function, c.device) for c in contexts(os.environ)] == [(os.getpid(), "mem_get_info", "1")]


def test_it_ends_with_the_test(tmp_path):
    built_for = torch.version.cuda  # None: torch's build for CPUs
    with pytest.MonkeyPatch.context() as patch:
        in_process(patch, tmp_path, [Card()])
        torch.cuda.init()
    assert not torch.cuda.is_available() and not torch.cuda.is_initialized() and torch.version.cuda == built_for
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and "GPU_MACHINE" not in os.environ
    with pytest.raises((AssertionError, RuntimeError), match=r"not compiled with CUDA|NVIDIA|No CUDA GPUs"):
        torch.ones(1, device="cuda")


ALL, UUIDS = [0, 1, 2, 3], [Card().described(i)["uuid"] for i in range(4)]


@pytest.mark.parametrize(
    ("value", "seen"),
    [(None, ALL), ("", []), ("-1", []), ("2,0", [2, 0]), (" 3 ,1", [3, 1]), ("1,7,2", [1]), ("1,1", []), ("0,x", [0]),
     (f"{UUIDS[3]},{UUIDS[1]}", [3, 1]), (UUIDS[2][:12], [2]), ("GPU-ffff", [])],
)  # fmt: skip
def test_visible_devices(monkeypatch, tmp_path, value, seen):
    in_process(monkeypatch, tmp_path, [Card()] * 4, visible=value)
    assert torch.cuda.device_count() == len(seen) and torch.cuda.is_available() == bool(seen)
    assert [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(len(seen))] == [UUIDS[i] for i in seen]


def test_order_of_unequal_cards(monkeypatch, tmp_path):
    """CUDA's default order is the fastest first, nvidia-smi's the PCI bus."""
    in_process(monkeypatch, tmp_path, UNEQUAL, CUDA_DEVICE_ORDER="PCI_BUS_ID", visible="0")
    assert torch.cuda.get_device_name() == UNEQUAL[0].name


@pytest.mark.parametrize("part", [0, 1])
def test_a_process_sees_one_slice(monkeypatch, tmp_path, part):
    uuid = SLICED.described(0)["slices"][part]["uuid"]
    in_process(monkeypatch, tmp_path, [SLICED], visible=uuid if part else None)
    assert torch.cuda.device_count() == 1 and torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    properties = torch.cuda.get_device_properties(0)
    assert (f"MIG-{properties.uuid}", properties.total_memory) == (uuid, 40448 * MIB)


@pytest.mark.parametrize(
    ("options", "text", "counted"),
    [({"driver": "550.54.15"}, r"driver on your system is too old \(found version 12040\)", 2),
     ({"driver": "550.54.15", "nvml": False}, "too old", 0),
     ({"torch_usable": False}, "CUDA unknown error", 2)],
)  # fmt: skip
def test_unusable_driver(monkeypatch, tmp_path, options, text, counted):
    """torch counts GPUs by NVML before CUDA is initialized, so that they can be there and yet not be available."""
    in_process(monkeypatch, tmp_path, [Card()] * 2, **options)
    with pytest.warns(UserWarning, match=f"CUDA initialization: .*{text}"):
        assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == counted and torch.version.cuda == "13.0"
    with pytest.raises(RuntimeError, match=text):
        torch.ones(1, device="cuda")
    assert contexts(os.environ) == []
    assert output(os.environ, "nvidia-smi", "-L").count("H100") == 2


def test_no_gpu_at_all(monkeypatch, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_process(monkeypatch, tmp_path)
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert shutil.which("nvidia-smi") is None and shutil.which("nvcc") is None
    with pytest.raises(RuntimeError, match="Found no NVIDIA driver"):
        torch.cuda.init()


def test_cpu_build_of_torch_beside_gpus(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path, [Card()], cuda=None)
    assert torch.version.cuda is None and torch.cuda.device_count() == 0 and shutil.which("nvidia-smi")


def test_cards_that_torch_was_not_built_for(monkeypatch, tmp_path):
    in_process(
        monkeypatch, tmp_path, [Card("Tesla V100-SXM2-32GB", 32768, capability=(7, 0), multi_processor_count=80)]
    )
    with pytest.warns(UserWarning, match="V100"):
        assert torch.cuda.get_device_capability() == (7, 0)
    assert torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)


COMPUTES = [
    lambda: torch.ones(1, device="cuda"), lambda: torch.ones(1).to("cuda:0"), lambda: torch.nn.Linear(1, 1).cuda(),
    torch.cuda.Stream, torch.cuda.Event,
]  # fmt: skip


@pytest.mark.parametrize("compute", COMPUTES)
def test_nothing_computes(monkeypatch, tmp_path, compute):
    in_process(monkeypatch, tmp_path, [Card()])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the stand-in GPU computes nothing: "):
            compute()
    assert torch.ones(1).sum() == 1


def test_what_opens_a_context(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path, [Card()] * 4, visible="2,3")
    torch.cuda.manual_seed_all(1)
    torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    with torch.cuda.device(0):
        assert contexts(os.environ) == []
    torch.cuda.set_device(1)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(2)
    with pytest.raises(RuntimeError, match="computes nothing"):
        torch.ones(1, device="cuda")
    opened = [(c.function, c.device) for c in contexts(os.environ)]
    assert opened == [("set_device", "3"), ("synchronize", "3"), ("allocation", "?")]


@pytest.mark.slow
def test_exclusive_process(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path, [Card()] * 2, compute_mode="Exclusive_Process")
    torch.cuda.mem_get_info(1)
    text = """
import torch
torch.cuda.set_device(0)
try:
    torch.cuda.set_device(1)
except torch.AcceleratorError as error:
    print(error)
"""
    assert python(os.environ, text) == ["CUDA error: CUDA-capable device(s) is/are busy or unavailable"]
    torch.cuda.mem_get_info(0)  # the other process has ended


def test_fork_after_cuda(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path, [Card()])
    assert torch.cuda.is_available()
    if (child := os.fork()) == 0:
        try:
            torch.cuda.get_device_name()
        except RuntimeError as error:
            os._exit(7 if "re-initialize CUDA in forked" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# --- commands ---


def test_nvidia_smi(tmp_path):
    env = machine(tmp_path, [SLICED, *UNEQUAL], visible="", driver="550.54.15", compute_mode="Exclusive_Process")
    fields = "index,name,memory.total,memory.free,memory.used,driver_version,compute_mode,mig.mode.current,compute_cap"
    assert output(env, "nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines() == [
        "0, NVIDIA H100 80GB HBM3, 81559, 81070, 0, 550.54.15, Exclusive_Process, Enabled, 9.0",
        "1, NVIDIA GeForce RTX 4060 Ti, 16380, 16282, 0, 550.54.15, Exclusive_Process, [N/A], 8.9",
        "2, NVIDIA GeForce RTX 4090, 24564, 20000, 4417, 550.54.15, Exclusive_Process, [N/A], 8.9",
    ]
    assert output(env, "nvidia-smi", "-i", "1", "--query-gpu=memory.total,uuid", "--format=csv").splitlines() == [
        "memory.total [MiB], uuid", f"16380 MiB, {UNEQUAL[0].described(1)['uuid']}"]  # fmt: skip
    assert output(env, "nvidia-smi", "-L").count("UUID: MIG-") == 2
    assert "CUDA Version: 12.4" in output(env, "nvidia-smi")
    wrong = output(env, "nvidia-smi", "--query-gpu=name,nonsense", "--format=csv", code=2)
    assert wrong == 'Field "nonsense" is not a valid field to query.\n\n'
    assert output(env, "nvidia-smi", "-i", "5", code=6) == "No devices were found\n"


def test_nvidia_smi_shows_contexts(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path, [Card()] * 2)
    torch.cuda.set_device(1)
    apps = output(os.environ, "nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    assert apps == f"{os.getpid()}, 500\n"
    used = output(os.environ, "nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    assert used.split() == ["0", "500"]


@pytest.mark.slow
def test_toolkit(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path, [Card()], toolkit=True)
    assert "release 13.0," in output(os.environ, "nvcc", "--version")
    assert os.environ["CUDA_HOME"] == torch.utils.cpp_extension.CUDA_HOME
    without = machine(tmp_path, [Card()])  # whatever /usr/local/cuda is
    assert "CUDA_HOME" not in without and shutil.which("nvcc", path=without["PATH"]) is None
    assert python(without, "from torch.utils.cpp_extension import CUDA_HOME as home; print(home)") == ["None"]


def test_sbatch(tmp_path):
    env = machine(tmp_path, sbatch=True, DS_ACCELERATOR="cpu")
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/sh\n")
    assert output(env, "sbatch", "--parsable", str(script)) == "1001\n"
    assert output(env, "sbatch", "--wrap", "true", input="from stdin") == "Submitted batch job 1002\n"
    assert [(job["script"], job["environment"]["DS_ACCELERATOR"]) for job in submitted(env)] == [
        ("#!/bin/sh\n", "cpu"), ("from stdin", "cpu")]  # fmt: skip
    assert output(env, "squeue", "--noheader", "--jobs=1002", "--format=%i|%T|") == "1002|PENDING|\n"
    assert output(env, "scontrol", "ping")


# --- processes ---


def test_environment_is_complete(tmp_path):
    """The session's own CUDA_VISIBLE_DEVICES and DS_ACCELERATOR are gone, everything else is there."""
    assert {"CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"} <= os.environ.keys()
    env = machine(tmp_path, [Card()])
    assert not {"CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"} & env.keys() and env["HF_HOME"] == os.environ["HF_HOME"]
    assert machine(tmp_path, [Card()], visible="0", DS_ACCELERATOR="cpu")["DS_ACCELERATOR"] == "cpu"


def test_commands_of_the_real_machine_are_hidden(monkeypatch, tmp_path):
    for name in ("nvcc", "nvidia-smi", "sbatch", "other"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    path = machine(tmp_path)["PATH"]
    assert [bool(shutil.which(name, path=path)) for name in ("nvcc", "nvidia-smi", "sbatch", "other")] == [0, 0, 0, 1]


def test_another_sitecustomize_runs_too(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = 'yes'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = "import os, sys; print(os.environ.get('SEEN'), 'torch' in sys.modules, 'gpu_machine' in sys.modules)"
    env = machine(tmp_path, [Card()])
    assert (
        python(env, text) == python({n: v for n, v in env.items() if n != "GPU_MACHINE"}, text) == ["yes False False"]
    )


@pytest.mark.slow
def test_deepspeed_takes_cuda(tmp_path):
    text = """
import json
import torch._inductor.compile_fx
from deepspeed.accelerator import get_accelerator
from accelerate import PartialState
a = get_accelerator()
print(json.dumps([a.device_name(), a.communication_backend_name(), a.device_count(), a.is_bf16_supported(),
                  a.is_available(), a.total_memory(1), str(PartialState().device)]))
"""
    env = machine(tmp_path, [Card()] * 2)
    total = (81559 - 489) * MIB
    assert json.loads(python(env, text)[-1]) == ["cuda", "nccl", 2, True, True, total, "cuda"]
    assert {c.function for c in contexts(env)} <= {"set_device"}
