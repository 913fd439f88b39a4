"""What the kit decides on stand-in GPU machines of many kinds: devices, precision, processes, memory, failures."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from gpu_machine import Card, contexts, in_process, machine, submitted
from zerofit import recipe
from zerofit.base import allocator, hardware, rank_status
from zerofit.base.errors import UserError
from zerofit.checkpoint import reshard
from zerofit.config import offload, parse, resolve
from zerofit.launch import batch_search, doctor, launch, prepare
from zerofit.model import quantization
from zerofit.plan import gpu_memory, preflight, simulate, simulated_rank
from zerofit.train import memory_tracker, progress, trial
from zerofit.train import trainer as train_trainer

H100 = Card()
RTX4090 = Card("NVIDIA GeForce RTX 4090", 24564, capability=(8, 9))
T4 = Card("Tesla T4", 15360, capability=(7, 5))
V100 = Card("Tesla V100-SXM2-32GB", 32768, capability=(7, 0))
GIB = 2**30


def python(env: dict, code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240, cwd=ROOT)


def zerofit(env: dict, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "zerofit", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, cwd=ROOT)


# --- processes and devices ---


@pytest.mark.slow
def test_one_process_uses_one_of_several_gpus(tmp_path):
    """transformers would make it nn.DataParallel, with four times the micro batch."""
    code = """
from zerofit.base import distributed
from zerofit.config import resolve
from zerofit.train.trainer import training_arguments
settings = resolve.resolve_settings("sft", ["--per_device_train_batch_size", "8"])
settings.output_dir = "unused"
distributed.start(settings)
arguments = training_arguments(settings)
print("decided", arguments.n_gpu, arguments.train_batch_size, settings.precision, arguments.device)
print("copies", arguments.dataloader_pin_memory, arguments.accelerator_config.non_blocking)
"""
    done = python(machine(tmp_path, [H100] * 4), code)
    assert "decided 1 8 bf16 cuda:0" in done.stdout, done.stderr[-2000:]
    assert "copies True True" in done.stdout  # no batch is waited for


@pytest.mark.parametrize(("cards", "precision"), [([T4], "fp16"), ([RTX4090], "bf16"), ([], "fp32")])
def test_precision_is_what_the_gpu_has(cards, precision, tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path, cards)
    assert resolve.resolve_settings("sft", [], 1).precision == precision


@pytest.mark.bad_input
def test_more_processes_than_gpus_are_refused(tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path, [H100] * 2)
    with pytest.raises(UserError, match=r"GPUS=4: this machine has 2; use GPUS=2\."):
        launch.main(["--gpus", "4", str(ROOT / "recipes" / "sft.py")])


def test_deepspeeds_launcher_gets_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    words = prepare.command("deepspeed", 2, 29500, Path("recipes/sft.py"), [])
    assert words[words.index("--include") + 1] == "localhost:2,3" and "--num_gpus" not in words
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8a56a4bc,GPU-1c2d")
    with pytest.raises(UserError, match="LAUNCHER=deepspeed supports only numbers"):
        prepare.command("deepspeed", 2, 29500, Path("recipes/sft.py"), [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "--num_gpus" in prepare.command("deepspeed", 2, 29500, Path("recipes/sft.py"), [])


# --- installing ---


@pytest.fixture(scope="module")
def deepspeed_source(tmp_path_factory):
    """DeepSpeed's source distribution, which pip builds on the user's machine."""
    folder = tmp_path_factory.mktemp("deepspeed")
    pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("deepspeed=="))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-binary", ":all:",
         "-d", str(folder), pin], capture_output=True, text=True, env=os.environ | {"DS_IGNORE_CUDA_DETECTION": "1"},
    )  # fmt: skip
    files = list(folder.glob("*.tar.gz"))
    if not files:
        pytest.skip(f"DeepSpeed's source cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    shutil.unpack_archive(files[0], folder)
    return next(path for path in folder.iterdir() if path.is_dir())


@pytest.mark.slow
def test_deepspeed_installs_with_a_gpu_and_without_the_cuda_toolkit(deepspeed_source, tmp_path):
    """By what the Makefile sets; without it DeepSpeed's setup.py ends (when that no longer happens, the Makefile's
    DS_IGNORE_CUDA_DETECTION can go)."""
    env = machine(tmp_path, [H100] * 8)
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("PIP = ")]
    name, value = line.removeprefix("PIP = ").split()[0].split("=")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    plain = subprocess.run(command, cwd=deepspeed_source, env=env, capture_output=True, text=True)
    assert plain.returncode and "MissingCUDAException" in plain.stderr
    ours = subprocess.run(command, cwd=deepspeed_source, env=env | {name: value}, capture_output=True, text=True)
    assert ours.returncode == 0, ours.stderr[-2000:]


# --- a GPU that torch cannot use ---


UNUSABLE = {
    "driver": ({"driver": "550.54.14"}, "cannot use it with driver 550.54.14: CUDA 13 needs driver 580 or newer"),
    "CPU build": ({"cuda": None}, "was built without CUDA: run `make clean install`"),
    "driver that fails": ({"torch_usable": False}, "cannot use it with driver"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", UNUSABLE)
def test_a_gpu_that_torch_cannot_use_is_named(name, tmp_path, monkeypatch):
    options, said = UNUSABLE[name]
    in_process(monkeypatch, tmp_path, [H100] * 2, **options)
    with pytest.raises(UserError) as error:
        resolve.resolve_settings("sft", ["--zero", "2"], 2)
    assert "this machine has a GPU (2 x NVIDIA H100 80GB HBM3" in str(error.value) and said in str(error.value)


@pytest.mark.slow
@pytest.mark.bad_input
def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu(tmp_path):
    options, said = UNUSABLE["driver"]
    env = machine(tmp_path, [H100] * 2, **options)
    done = zerofit(env, "launch", "--gpus", "2", "--show", "recipes/sft.py", "--zero", "2")
    assert (
        done.returncode == 2
        and "this machine has a GPU (2 x NVIDIA H100 80GB HBM3" in done.stderr
        and said in done.stderr
    )
    assert "--use_cpu true" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("visible", "flags"), [(None, ["--use_cpu", "true"]), ("", [])])
def test_the_cpu_is_used_where_it_was_asked_for(visible, flags, tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path, [H100], driver="550.54.14", visible=visible)
    monkeypatch.setattr(sys, "argv", ["sft.py", *flags])
    assert recipe.parse("sft").use_cpu


@pytest.mark.slow
def test_a_launch_on_the_cpu_of_a_gpu_machine(tmp_path):
    old = machine(tmp_path, [H100], driver="550.54.14")
    done = zerofit(old, "launch", "--gpus", "2", "recipes/sft.py", "--use_cpu", "true", "--zero", "2",
                   "--max_steps", "2",
                   "--num_samples", "0", "--save_strategy", "no", "--output_dir", str(tmp_path / "run"))  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["world_size"] == 2
    assert contexts(old) == []


def test_an_import_of_deepspeed_makes_no_gpu_usable(tmp_path, monkeypatch):
    """It sets a variable with which torch.cuda.is_available() counts GPUs that torch cannot use."""
    in_process(monkeypatch, tmp_path, [H100], driver="550.54.14")
    monkeypatch.setenv(hardware.NVML_CHECK, "1")
    assert torch.cuda.is_available() and not hardware.torch_sees_gpu()
    assert hardware.visible() == [] and "CUDA 13 needs driver 580" in hardware.why_no_gpu()
    assert os.environ[hardware.NVML_CHECK] == "1"


def test_the_time_of_an_unknown_gpu_is_said_to_be_a_guess(tmp_path, monkeypatch, capsys):
    in_process(monkeypatch, tmp_path, [Card("NVIDIA RTX 9999", 24564)])
    assert hardware.find("detect").tflops == hardware.GPUS["a100-80g"].tflops
    assert "note: the speed of NVIDIA RTX 9999 is unknown" in capsys.readouterr().out


def test_doctor_says_why_torch_sees_no_gpu(tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path, [H100], driver="550.54.14")
    (finding,) = doctor.gpus()
    assert finding.level == "fail" and "driver 580 or newer" in finding.text


# Where each architecture of torch runs: machine code within its major version, PTX on everything later.
CU128 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
OLDER = ["sm_50", "sm_80", "sm_86", "sm_90"]  # of CUDA 12.4


@pytest.mark.parametrize(
    ("capability", "architectures", "fix"),
    [
        ((7, 0), CU128, "a torch build for CUDA 12"),
        ((12, 0), OLDER, "a newer torch"),  # an RTX 5090 with a torch of its year before
        ((10, 0), OLDER, "a newer torch"),
        ((9, 0), ["sm_80", "sm_90a"], ""),
        ((10, 0), ["sm_80", "sm_90a"], "a newer torch"),
        ((12, 1), ["sm_120f"], ""),
        ((12, 0), [*OLDER, "compute_90"], ""),  # compiled by the driver
        ((12, 0), [*OLDER, "compute_90a"], "a newer torch"),
        ((8, 9), OLDER, ""),
        ((8, 0), ["sm_86", "sm_90"], "a torch build for CUDA 12"),
        ((12, 1), CU128, ""),
        ((9, 0), [], ""),  # a build that does not say
    ],
)
def test_doctor_names_a_gpu_without_kernels(capability, architectures, fix, tmp_path, monkeypatch):
    other = Card("The other GPU", 32768, capability=capability)
    in_process(monkeypatch, tmp_path, [other])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
    (finding,) = doctor.gpus()
    assert (finding.level == "fail") == bool(fix)
    if fix:
        major, minor = capability
        built = " ".join(architectures)
        assert f"compute capability {major}.{minor}, but this torch build has no kernels for it, only for {built}" in (
            finding.text
        )
        assert fix in finding.fix


# --- contexts ---


def test_asking_about_gpus_opens_no_context(tmp_path, monkeypatch):
    """Each would take 0.5 GiB of every GPU for the whole job, and EXCLUSIVE_PROCESS would let no rank in."""
    in_process(monkeypatch, tmp_path, [H100] * 2, compute_mode="Exclusive_Process")
    assert "limited to one process (EXCLUSIVE_PROCESS)" in next(doctor.gpus()).text
    assert hardware.find("detect", 2).memory_gib > 70
    assert batch_search.limit_bytes(SimpleNamespace(memory_limit=None, use_cpu=False, world_size=2)) > 70 * GIB
    hardware.check_devices(2, use_cpu=False)
    assert contexts(os.environ) == []
    torch.cuda.mem_get_info(0)  # what would open one
    assert contexts(os.environ)


@pytest.mark.slow
def test_the_launcher_opens_no_context(tmp_path):
    """A whole launch; its ranks open theirs and end where the stand-in would have to compute."""
    env = machine(tmp_path, [H100] * 2, ZEROFIT_CACHE=str(tmp_path / "cache"))
    done = zerofit(env, "launch", "--gpus", "2", "recipes/sft.py", "--zero", "0", "--max_restarts", "0",
                   "--output_dir", str(tmp_path / "run"))  # fmt: skip
    assert done.returncode != 0 and "plan: fits" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    opened = contexts(env)
    assert opened and not [context for context in opened if context.argv.split()[1] == "launch"], opened


# --- memory ---


def test_a_plan_is_for_the_gpu_with_the_least_free_memory(tmp_path, monkeypatch, capsys):
    small = Card("NVIDIA GeForce RTX 4080", 16376, capability=(8, 9))
    in_process(monkeypatch, tmp_path, [RTX4090, small])
    assert hardware.find("detect", 2).memory_gib < 16 and hardware.find("detect", 2).device_name == small.name
    assert "GPU 1 (NVIDIA GeForce RTX 4080) has the least memory of the job's 2" in capsys.readouterr().out
    assert 23 < hardware.find("detect", 1).memory_gib < 24
    assert batch_search.limit_bytes(SimpleNamespace(memory_limit=None, use_cpu=False, world_size=2)) < 0.93 * 16 * GIB


def test_memory_that_somebody_else_uses_is_not_planned_for(tmp_path, monkeypatch, capsys):
    in_process(monkeypatch, tmp_path, [RTX4090, Card(RTX4090.name, 24564, free_mib=20000, capability=(8, 9))])
    assert hardware.find("detect").memory_gib == pytest.approx(20000 / 1024, abs=0.01)
    assert "19.5 of 23.8 GiB free (nvidia-smi shows who uses it)" in capsys.readouterr().out
    levels = [finding.level for finding in doctor.gpus()]
    assert levels == ["ok", "warn"]
    assert hardware.find("rtx4090-24g").memory_gib == 23.5  # a GPU that is named is planned whole


def test_without_nvidia_smi_the_whole_gpu_is_planned_for(tmp_path, monkeypatch):
    in_process(monkeypatch, tmp_path, [RTX4090])
    monkeypatch.setenv("PATH", "/nowhere")
    (device,) = hardware.visible()
    assert device.free_bytes is None and device.usable_bytes == device.total_bytes
    assert "free memory unknown" in next(doctor.gpus()).text


def test_a_mig_slice_has_its_own_memory_and_no_known_peak(tmp_path, monkeypatch):
    card = Card(slices=(("3g.40gb", 40448),))
    in_process(monkeypatch, tmp_path, [card], visible=None)
    (device,) = hardware.visible()
    assert "MIG 3g.40gb" in device.name and device.usable_bytes == device.total_bytes < 41 * GIB
    assert hardware.peak_flops(device.name) is None
    assert hardware.find("detect").tflops == pytest.approx(989 * 3 / 7)


@pytest.mark.parametrize(
    ("size", "taken"), [(0, 0), (3, 4), (2**20, 2**20), (100 * 2**20, 128 * 2**20), (257 * 2**20, 257 * 2**20)]
)
def test_pinned_blocks_as_torch_rounds_them(size, taken, monkeypatch):
    monkeypatch.setattr(allocator.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", allocator.default())
    assert allocator.pinned_bytes(size) == taken


def test_pinned_blocks_of_a_torch_without_the_threshold(monkeypatch):
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocator.metadata, "version", lambda name: "2.11.0+cu130")
    allocator.configure()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert allocator.pinned_bytes(30 * GIB) == 32 * GIB


def test_the_users_allocator_settings_stay(monkeypatch):
    monkeypatch.setattr(allocator.metadata, "version", lambda name: "2.13.0")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    allocator.configure()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == allocator.default() and "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    allocator.configure()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512,pinned_max_round_threshold_mb:256"
    assert not allocator.expandable_segments()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"{allocator.PINNED_ROUND_KEY}:8")
    allocator.configure()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == f"{allocator.PINNED_ROUND_KEY}:8"
    assert allocator.pinned_bytes(9 * 2**20) == 9 * 2**20


@pytest.mark.slow
def test_torch_knows_the_allocator_setting():
    """torch reads it from the variable that programs set before torch is imported."""
    env = {name: value for name, value in os.environ.items() if name not in allocator.VARIABLES}
    begin = "from zerofit.base import process; process.begin(); import torch; "
    done = python(env, f"{begin}print(torch._C._accelerator_getAllocatorSettings())")
    assert done.stdout.strip() == allocator.default(), done.stderr


@pytest.mark.parametrize(
    ("system", "release", "on"),
    [("linux", "6.8.0-45-generic", True), ("linux", "6.6.87.2-microsoft-standard-WSL2", False), ("darwin", "", False)],
)
def test_segments_expand_where_torch_has_them(system, release, on, monkeypatch):
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocator.sys, "platform", system)
    monkeypatch.setattr(allocator.platform, "release", lambda: release)
    allocator.configure()
    assert allocator.expandable_segments() is on


def test_segments_that_the_driver_refuses_are_not_expanded(monkeypatch):
    monkeypatch.setattr(allocator.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", allocator.default())
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    set_to = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", set_to.append)

    def allocate():
        if allocator.expandable_segments():
            raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(allocator, "_allocate", allocate)
    said = allocator.check_expandable_segments()
    assert said == "expandable_segments False: the driver rejects them (CUDA driver error: operation not supported)"
    assert set_to == ["expandable_segments:False,pinned_max_round_threshold_mb:256"]
    assert allocator.check_expandable_segments() is None and len(set_to) == 1
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", allocator.default())
    monkeypatch.setattr(allocator, "_allocate", lambda: None)
    assert allocator.check_expandable_segments().startswith("expandable_segments True: ")


def test_data_workers_of_a_gpu(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    gpu = hardware.GPUS["h100-80g"]

    def workers(ranks, *flags):
        settings = resolve.resolve_settings("sft", ["--data", "unused.jsonl", "--model", "unused", *flags], ranks, gpu)
        return settings.dataloader_num_workers, settings.dataloader_persistent_workers

    monkeypatch.setattr(resolve.distributed, "cores", lambda: 16)
    free = SimpleNamespace(free=8 * GIB)
    monkeypatch.setattr(resolve.shutil, "disk_usage", lambda path: free)
    assert [workers(ranks) for ranks in (1, 4, 8, 16)] == [(2, True), (2, True), (1, True), (0, False)]
    assert workers(1, "--dataloader_num_workers", "0") == (0, False)
    assert workers(1, "--dataloader_num_workers", "4") == (4, False)
    assert workers(1, "--dataloader_persistent_workers", "false") == (2, False)
    assert workers(1, "--use_cpu", "true") == (0, False)
    assert workers(1, "--streaming", "true", "--max_steps", "3") == (1, False)
    free.free = 64 * 2**20
    assert workers(1) == (0, False)


# --- a batch job from a login node ---


@pytest.mark.slow
def test_a_login_node_does_not_choose_the_accelerator_of_the_gpu_nodes(tmp_path):
    env = machine(tmp_path, sbatch=True)
    done = zerofit(
        env,
        "slurm",
        "--nodes",
        "2",
        "--gpus",
        "8",
        "--output_dir",
        str(tmp_path / "run"),
        "recipes/sft.py",
        "--zero",
        "3",
    )
    assert done.returncode == 0, done.stderr
    (job,) = submitted(env)
    assert "DS_ACCELERATOR" not in job["environment"] and "CUDA_VISIBLE_DEVICES" not in job["environment"]
    assert "\nunset DS_ACCELERATOR" in job["script"]


@pytest.mark.parametrize(
    ("cards", "use_cpu", "name"),
    [
        pytest.param([H100], True, "cpu", marks=pytest.mark.slow),
        pytest.param([H100], False, "cuda", marks=pytest.mark.slow),
        pytest.param([], True, "cpu", marks=pytest.mark.slow),
    ],
)
def test_deepspeed_takes_the_jobs_device(cards, use_cpu, name, tmp_path):
    """Also where DS_ACCELERATOR=cpu came along from another machine; and it is not left behind for child processes."""
    code = f"""
import os
from zerofit.base import distributed
deepspeed = distributed.import_deepspeed({use_cpu})
print("chosen", deepspeed.accelerator.get_accelerator()._name, os.environ.get("DS_ACCELERATOR"))
"""
    done = python(machine(tmp_path, cards), code)
    assert f"chosen {name} None" in done.stdout, done.stderr[-2000:]
    done = python(machine(tmp_path, cards, DS_ACCELERATOR="cpu"), code)
    assert f"chosen {name} cpu" in done.stdout, done.stderr[-2000:]


# --- out of memory, in every wording ---


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def pin_memory(error):
    raise error


GPU_IS_FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    torch.distributed.DistBackendError("NCCL error ... ncclUnhandledCudaError: Call to CUDA function failed.\nLast "
                                       "error:\nCuda failure 2 'out of memory'"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]  # fmt: skip
CRASHES = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),  # with memory left
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("CUDA error: out of memory"),
]


@pytest.mark.fault
@pytest.mark.parametrize("error", GPU_IS_FULL, ids=lambda e: str(e)[:40])
def test_gpu_memory_that_is_full_in_every_wording(error):
    assert rank_status.gpu_is_full(raised(error)) and rank_status.kind(error) == "out of memory"
    assert not rank_status.host_is_full(raised(error))


@pytest.mark.parametrize("error", CRASHES, ids=lambda e: str(e)[:40])
def test_other_failures_are_no_out_of_memory(error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 * GIB, 80 * GIB))
    assert not rank_status.gpu_is_full(raised(error)) and rank_status.kind(error) == "crash"


@pytest.mark.fault
def test_an_internal_error_with_no_memory_left_is_an_out_of_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB // 2, 80 * GIB))
    assert rank_status.kind(raised(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"))) == "out of memory"


@pytest.mark.fault
def test_pinned_memory_is_host_memory():
    with pytest.raises(torch.AcceleratorError) as caught:
        pin_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert rank_status.host_is_full(caught.value) and not rank_status.gpu_is_full(caught.value)


@pytest.mark.fault
def test_a_full_gpu_ends_the_proof_of_packing_as_such(monkeypatch):
    """It is no reason to turn padding_free off."""

    def full(*args):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(train_trainer.attention, "packed_logit_error", full)
    trainer = SimpleNamespace(
        seq_idx=False, settings=SimpleNamespace(compute_dtype="bf16"), data_collator=SimpleNamespace(pad_token_id=0),
        model_wrapped=None, tokens=SimpleNamespace(dataset=None), args=None)  # fmt: skip
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        train_trainer.ZerofitTrainer.check_no_cross_document_attention(trainer)


@pytest.mark.parametrize(("dtype", "logits", "leak", "packed"), [
    ("bf16", 0.12, 0.0, True),  # the rounding of a deep model
    ("bf16", 0.5, 0.0, False), ("bf16", 0.01, 1e-3, False), ("bf16", float("nan"), 0.0, False),
    ("fp32", 1e-4, 0.0, True), ("fp32", 0.12, 0.0, False),
])  # fmt: skip
def test_the_gradient_judges_packed_rows_in_half_precision(dtype, logits, leak, packed, monkeypatch, capsys, tmp_path):
    (tmp_path / "run.json").write_text('{"decisions": ["first"]}')
    monkeypatch.setattr(train_trainer.attention, "packed_logit_error", lambda *args: logits)
    monkeypatch.setattr(train_trainer.attention, "cross_document_gradient", lambda *args: leak)
    settings = SimpleNamespace(compute_dtype=dtype, packing=False, checks=[])
    trainer = SimpleNamespace(settings=settings, data_collator=SimpleNamespace(pad_token_id=0), model=None,
                              train_collator=SimpleNamespace(packed=True),
                              args=SimpleNamespace(process_index=0, output_dir=str(tmp_path)),
                              model_wrapped=None, tokens=SimpleNamespace(dataset=None), seq_idx=False)  # fmt: skip
    train_trainer.ZerofitTrainer.check_no_cross_document_attention(trainer)
    _, *decided = json.loads((tmp_path / "run.json").read_text())["decisions"]
    assert [line.partition(":")[0] for line in decided] == ([] if packed else ["padding_free false"])
    said = capsys.readouterr().out + "".join(check.sentence for check in settings.checks)
    assert trainer.train_collator.packed == packed == bool(settings.checks)
    assert f"gradient between documents {leak:.1g}" in said and f"logits {logits:.1e} off" in said


def test_a_launch_says_what_runs_without_a_compiler(monkeypatch):
    settings = SimpleNamespace(use_cpu=False, use_liger_kernel=True, pure_bf16=True)
    assert preflight._without_compiler(settings) is None or shutil.which("gcc") is None
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    said = preflight._without_compiler(settings)
    assert said.startswith("no C compiler") and "without Liger kernels and fused AdamW" in said
    for values in ({"use_cpu": True}, {"use_liger_kernel": False, "pure_bf16": False}):
        assert preflight._without_compiler(SimpleNamespace(**vars(settings) | values)) is None


def test_a_run_keeps_what_its_gpu_holds_outside_the_allocator(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 67)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path / "cache"))
    memory_tracker.keep_outside_allocator(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text()) == {"outside_allocator": [3]}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 80))  # another program is on it, too
    memory_tracker.keep_outside_allocator(tmp_path)
    here = dataclasses.replace(hardware.GPUS["h100-80g"], device_name="NVIDIA H100 80GB HBM3")
    assert gpu_memory.outside_allocator(here, 8) == {"CUDA context and NCCL, measured by a run here": 3}
    for gpu, ranks, node in ((here, 4, 8), (here, 8, 4), (hardware.GPUS["h100-80g"], 8, 8)):
        assert set(gpu_memory.outside_allocator(gpu, ranks, node)) == {"CUDA context", "NCCL buffers"}
    (tmp_path / "cache" / "outside_allocator.json").write_text('{"a": "b"}')
    assert set(gpu_memory.outside_allocator(here, 8)) == {"CUDA context", "NCCL buffers"}


@pytest.mark.parametrize(("others_gib", "is_kept"), [(0, True), (0.5, True), (3, False), (40, False)])
def test_other_programs_of_a_first_run_are_in_no_later_plan(monkeypatch, tmp_path, others_gib, is_kept):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path))
    here = dataclasses.replace(hardware.GPUS["h100-80g"], device_name="NVIDIA H100 80GB HBM3")
    own = sum(gpu_memory.outside_allocator(here, 1).values())
    allocator.record_outside_bytes(here.device_name, 1, 1, own + int(others_gib * 2**30))
    planned = gpu_memory.outside_allocator(here, 1)
    assert sum(planned.values()) == (own + int(others_gib * 2**30) if is_kept else own)
    allocator.record_outside_bytes(here.device_name, 1, 1, own - 5)  # once the GPU was this run's alone
    assert sum(gpu_memory.outside_allocator(here, 1).values()) == own - 5


# --- states that are put into another engine, the order of a start, the simulation on a GPU ---


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_step_counts_lie_where_the_optimizer_wants_them(fused, device):
    flat = torch.zeros(4, device="meta")
    group, optimizer = {"params": [flat], "fused": fused}, SimpleNamespace(state={})
    reshard._set_state(optimizer, group, flat, {"exp_avg": torch.zeros(4)}, {"step": torch.tensor(7.0)})
    assert optimizer.state[flat]["step"].device.type == device


def test_a_batch_size_is_searched_after_the_proof_of_packing(monkeypatch):
    """Where packed attention cannot run, training falls back to padding, and so does the search."""
    order = []
    trainer = SimpleNamespace(
        tokens=SimpleNamespace(stream=None), is_deepspeed_enabled=False, train_collator=SimpleNamespace(packed=True),
        check_no_cross_document_attention=lambda: order.append("proof"), seed_this_rank=lambda: None,
        settings=SimpleNamespace(bundled=False, zero=3), before_first_step=lambda: None,
        sequence=SimpleNamespace(size=1), _tr_loss=0.0, _globalstep_last_logged=0,
        optimizer=SimpleNamespace(_is_overflow=False),
    )  # fmt: skip
    monkeypatch.setattr(trial, "is_batch_search", lambda: True)

    def search(trainer):
        order.append("search")
        raise SystemExit  # the real one ends the process

    monkeypatch.setattr(trial, "measure_batch", search)
    monkeypatch.setattr(quantization, "verify_shares", lambda trainer: None)
    monkeypatch.setattr(offload, "after_start", lambda trainer: "")
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    reporter = SimpleNamespace(trainer=trainer, heartbeat=None)
    with pytest.raises(SystemExit):
        progress.Reporter.on_train_begin(
            reporter, SimpleNamespace(process_index=0), SimpleNamespace(global_step=0), None
        )
    assert order == ["proof", "search"]


def test_questions_for_a_real_gpu_are_not_answered_in_forks(monkeypatch):
    """CUDA cannot be used in a fork of a process that has looked for it, as DeepSpeed's import does."""
    asked = []
    monkeypatch.setattr(simulate, "_start", lambda fake, cuda: cuda)
    monkeypatch.setattr(
        simulate,
        "_ask",
        lambda process, text, seconds, receive, keep: (asked.append((process, len(json.loads(text)))), "")[1],
    )
    questions = [simulate.Question(parse.request("sft", []), 2, rank, device="cuda", fake=False) for rank in (0, 1)]
    simulate.run_all(questions)
    assert asked == [(True, 1), (True, 1)]

    def answer(number, question):
        raise SystemExit(question.device)

    monkeypatch.setattr(simulated_rank, "_answer_and_end", answer)
    monkeypatch.setattr(simulate.os, "fork", lambda: pytest.fail("a fork"))
    monkeypatch.setattr(sys, "stdin", [json.dumps([questions[0].as_json()])])
    with pytest.raises(SystemExit, match="cuda"):
        simulated_rank.main([])
