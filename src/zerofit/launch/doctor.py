"""`zerofit doctor`: check what would break, slow down or silently corrupt a run here, with fixes.

Every check returns findings. Together they take less than 15 s, and half a minute more where the self-test runs. The
launcher runs `installation` and `of_job` before each job.
"""

import argparse
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from zerofit.base import allocator, command_line, distributed, hardware, hub
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.base.paths import cache_root, nearest_existing
from zerofit.job.run_folder import PACKAGES
from zerofit.launch import doctor_nodes, doctor_packages, node_options
from zerofit.launch.doctor_nodes import Finding, fail, ok, warn
from zerofit.plan import formulas

# {environment variable that changes how a job runs: its effect}
CHANGES_BEHAVIOR = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every kernel: training is several times slower",
    "NCCL_P2P_DISABLE": "GPUs of a node communicate through host memory: slower collectives",
    "NCCL_IB_DISABLE": "nodes communicate over TCP: slower collectives",
    "DS_ACCELERATOR": "DeepSpeed uses this accelerator, even if the machine has another",
    "DS_SKIP_CUDA_CHECK": "ops are compiled even if nvcc and torch have different CUDA versions",
    "TORCH_EXTENSIONS_DIR": "compiled ops are loaded from here, also those of another machine",
    "DEEPSPEED_TIMEOUT": "minutes after which DeepSpeed's collectives give up",
    "HF_HUB_OFFLINE": "nothing is downloaded",
    "TRANSFORMERS_OFFLINE": "nothing is downloaded",
    "PYTORCH_CUDA_ALLOC_CONF": "the allocator works differently from the plan's assumption",
    "PYTORCH_ALLOC_CONF": "the allocator works differently from the plan's assumption",
}


def main(argv: list[str]) -> None:
    """`zerofit doctor`: see --help. Exits with 0, or with 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="zerofit doctor", allow_abbrev=False, description=__doc__)
    parser.add_argument("--json", action="store_true", help="findings as JSON on standard output, nothing else")
    parser.add_argument("--gpus", default="", help="processes that exchange a tensor (default: one per GPU, else 2)")
    parser.add_argument("--output_dir", default="runs", help="folder that runs will be written to")
    parser.add_argument("--port", default="", help="port of the rendezvous to check")
    parser.add_argument("--nodes", default="1", help="nodes of the job; above 1, also check what several nodes need")
    parser.add_argument("--self_test", action="store_true", help="train the bundled model for four steps and check "
                        "what they compute; done without this flag where a package is newer than tested")  # fmt: skip
    given = parser.parse_args(argv)
    command_line.whole_number("NODES=", given.nodes)
    if given.gpus:
        hardware.check_devices(command_line.whole_number("--gpus ", given.gpus), use_cpu=False)
    began, findings = time.perf_counter(), []
    for name, (check, fine) in _checks(given).items():
        findings += (latest := list(check()) or [ok(name, fine)])
        for finding in [] if given.json else latest:
            print(f"{finding.level:<5} {finding.name}: {finding.text}", flush=True)
            if finding.fix and finding.level != "ok":
                print(f"      -> {finding.fix}", flush=True)
    counts = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "fail")}
    if given.json:
        print(json.dumps({"findings": [asdict(f) for f in findings], "ok": not counts["fail"]}, indent=1))
    else:
        summary = ", ".join(f"{n} {level}" for level, n in counts.items())
        print(f"\n{summary}, {time.perf_counter() - began:.1f} s")
    raise SystemExit(1 if counts["fail"] else 0)


def _checks(given) -> dict:
    """Return {name: (check, text of an ok where it has no findings)}, in the order in which they run."""
    nodes, folder, packages = int(given.nodes), Path(given.output_dir), list(doctor_packages.check())
    versions = [
        f"python {platform.python_version()}",
        *(f"{p} {metadata.version(p)}" for p in PACKAGES if find_spec(p)),
    ]
    checks = {
        "packages": (lambda: packages, ", ".join(versions)),
        "known problems": (doctor_packages.known_problems, "none applies"),
        "compiler": (compilers, "ninja and g++ are on PATH"),
        "environment": (variables, "no variable changes what runs"),
        "GPUs": (gpus, "none: jobs run on the CPU"),
        "host memory": (lambda: host_memory(nodes=nodes), ""),
        "disk": (lambda: disk(folder), ""),
        "cache": (caches, "the folders of models and prepared rows can be written"),
        "network": (lambda: port(given.port), "a port is free, the host's name has an address"),
        "hub": (hub_access, ""),
        "exchange": (lambda: exchange(int(given.gpus or 0)), "one process has nothing to exchange"),
    }
    if given.self_test or any(finding.level == "warn" for finding in packages):
        checks["self-test"] = (doctor_packages.self_test, "")
    if nodes > 1:
        checks["nodes"] = (lambda: doctor_nodes.check(nodes, folder, given.port), "")
    return checks


# --- compilers ---


def compilers() -> Iterator[Finding]:
    """Look for ninja and g++ (offload ops), a C compiler and Python's headers (Triton, GPU), nvcc (ZeRO++ ops)."""
    from zerofit.train import deepspeed_ops

    if missing := deepspeed_ops.missing_tools():
        text = f"{' and '.join(missing)} not on PATH: --offload_path and offload_optimizer.ratio cannot be used"
        yield warn("compiler", text, "apt install g++; ninja comes with `make install`")
    if hardware.torch_sees_some() and (missing := hardware.missing_for_triton()):
        text = (
            f"{' and '.join(missing)}: Triton cannot start a kernel (Liger, flex_attention, torch.compile and with it "
            "--optim muon, torchao)"
        )
        yield warn("C compiler", text, "apt install gcc python3-dev")
    yield from _nvcc()


def _nvcc() -> Iterator[Finding]:
    """Compare nvcc and torch's CUDA by DeepSpeed's rule: same version, or both in its compatibility list."""
    import torch

    nvcc, cuda = shutil.which("nvcc"), torch.version.cuda
    if not (cuda and nvcc):
        return
    from deepspeed.ops.op_builder.builder import cuda_minor_mismatch_ok

    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    version, cuda = output.partition("release ")[2].partition(",")[0], ".".join(cuda.split(".")[:2])
    if version != cuda and not any({version, cuda} <= set(group) for group in cuda_minor_mismatch_ok.values()):
        text = f"nvcc {version or '(unknown)'}, torch for CUDA {cuda}: DeepSpeed compiles no CUDA op"
        only_for = "needed by zero_quantized_weights and zero_quantized_gradients only"
        yield warn("nvcc", text, f"install the CUDA {cuda} toolkit; {only_for}")


# --- environment ---


def variables() -> Iterator[Finding]:
    """Warn of environment variables that change how a job runs."""
    cores, threads = distributed.cores(), os.environ.get("OMP_NUM_THREADS")
    if threads == "1" and cores > 2:
        text = f"1 of {cores} cores: the offloaded optimizer is very slow"
        yield warn("OMP_NUM_THREADS", text, "unset OMP_NUM_THREADS (make sets cores / processes)")
    for name, effect in CHANGES_BEHAVIOR.items():
        if os.environ.get(name, "0") not in ("0", "", allocator.default()):
            yield warn(name, f"is {os.environ[name]}: {effect}", f"unset {name}")


# --- the machine ---


def gpus() -> Iterator[Finding]:
    """Report each GPU: free memory, support by this torch build, bf16, exclusive mode."""
    import torch

    if hardware.torch_sees_some():
        yield from (_of_gpu(device, torch.cuda.get_arch_list()) for device in hardware.visible())
    elif why := hardware.why_torch_sees_none():
        yield fail("GPUs", why, "nvidia-smi shows the driver's version; --use_cpu true trains on the CPU")


def _runs_on(arch: str, major: int, minor: int) -> bool:
    """Return whether code that torch was built with runs on a GPU of this compute capability.

    Machine code (sm_86) does on the same major and at least this minor version, PTX (compute_90) is compiled for all
    later ones; with an `a` at its end it is for one capability, with an `f` for one family (CUDA's programming guide).
    """
    kind, version, only = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch).groups()
    built = divmod(int(version), 10)
    if only == "a":
        return built == (major, minor)
    if kind == "compute" and not only:
        return built <= (major, minor)
    return built[0] == major and built[1] <= minor


def _of_gpu(device, architectures: list[str]) -> Finding:
    """Report one GPU. architectures: those that torch was built for (sm_90, compute_120); []: unknown."""
    name, (major, minor) = f"GPU {device.index}", device.capability
    known = [arch for arch in architectures if re.fullmatch(r"(sm|compute)_\d+[af]?", arch)]
    if known and not any(_runs_on(arch, major, minor) for arch in known):
        is_newer = all(divmod(int(re.search(r"\d+", arch)[0]), 10) < (major, minor) for arch in known)
        text = (
            f"{device.name} has compute capability {major}.{minor}, this torch has no kernels for it: it was built for "
            f"{' '.join(architectures)}"
        )
        newer = "a newer torch, built for this GPU (make install; pytorch.org/get-started)"
        return fail(name, text, newer if is_newer else "another GPU, or a torch build for CUDA 12")
    free = "free memory unknown (no nvidia-smi, or a MIG slice)"
    if device.free_bytes is not None:
        free = f"{device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free"
    text = f"{device.name}, {free}" + ("" if major >= 8 else "; no bf16, fp16 is used")
    text += "; only one process may use it (EXCLUSIVE_PROCESS)" * device.exclusive
    is_busy = device.usable_bytes < device.total_bytes
    return warn(name, text, "nvidia-smi lists the processes that use it") if is_busy else ok(name, text)


def host_memory(nvme: bool = False, nodes: int = 1) -> Iterator[Finding]:
    """Report host memory, the size of /dev/shm, and the limits on open files, locked and pinned memory.

    Args: nvme: whether --offload_path is used; nodes: nodes of the job.
    """
    import psutil

    memory, shm = psutil.virtual_memory(), Path("/dev/shm")
    yield ok("host memory", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available")
    if shm.exists() and (size := shutil.disk_usage(shm).total) < GIB:
        text = f"{size / 2**20:.0f} MiB: NCCL and data workers need more"
        yield warn("/dev/shm", text, "docker run --shm-size 16g, or --ipc host")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < 1024:
        text = f"{files} files may be open: data workers and a checkpoint of many shards need more"
        yield warn("open files", text, "ulimit -n 65536 (docker: --ulimit nofile=65536)")
    # RLIMIT_MEMLOCK does not apply to CUDA's pinned memory, which the driver pins.
    users = ["the buffers of --offload_path"] * nvme
    users += ["what InfiniBand registers"] * (nodes > 1 and bool(doctor_nodes.infiniband()))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if users and soft != resource.RLIM_INFINITY and soft < 16 * GIB:
        text = f"{soft / 2**20:.0f} MiB may be locked, too little for {' and '.join(users)}"
        yield warn("memlock", text, "ulimit -l unlimited (docker: --ulimit memlock=-1)")
    # No ulimit shows what WSL2 lets a process pin: 0.5 GiB in microsoft/WSL issue 14078.
    if "microsoft" in platform.release().lower() and hardware.torch_sees_some():
        text = (
            "WSL2 pins little memory, sometimes 0.5 GiB: --offload and --activation_offload can end in "
            '"CUDA error: out of memory" while the GPU is empty'
        )
        fix = "train without them, or on Linux itself; --dataloader_pin_memory false where loading fails"
        yield warn("pinned memory", text, fix)


def disk(folder: Path) -> Iterator[Finding]:
    """Check that files can be written and atomically replaced in a folder, and report the free space."""
    parent = nearest_existing(folder.expanduser().absolute())
    try:  # a new name, which no other user can have created
        with tempfile.TemporaryDirectory(prefix=".zerofit-", dir=parent) as scratch:
            source, target = Path(scratch) / "file.tmp", Path(scratch) / "file"
            source.write_text("x")
            os.replace(source, target)
    except OSError as error:
        yield fail("disk", f"{parent}: {error.strerror}: runs cannot be written", "another folder with OUT=")
        return
    free = shutil.disk_usage(parent).free
    text = f"{parent}: {free / GIB:.1f} GiB free (a checkpoint takes 14 bytes a trained parameter)"
    yield Finding(
        "disk", "warn" if free < 10 * GIB else "ok", text, "--save_total_limit 1, or another folder with OUT="
    )


def caches() -> Iterator[Finding]:
    """Warn of a cache folder (models, prepared rows) that cannot be written or holds less than a model of 7B."""
    from huggingface_hub import constants

    for variable, folder in (("HF_HOME", Path(constants.HF_HUB_CACHE)), ("ZEROFIT_CACHE", cache_root())):
        parent = nearest_existing(folder.expanduser().absolute())
        fix = f"{variable}= of a folder on a larger disk (docker: -v /data/cache:/cache --env {variable}=/cache)"
        if not os.access(parent, os.W_OK):
            yield warn("cache", f"{folder}: cannot be written", fix)
        elif variable == "HF_HOME" and (free := shutil.disk_usage(parent).free) < 16 * GIB:
            yield warn("cache", f"{folder}: {free / GIB:.1f} GiB free, a model of 7B in bf16 takes 14", fix)


def port(text: str) -> Iterator[Finding]:
    """Check that the rendezvous port is free and that this machine's host name has an address."""
    try:
        node_options.port_of(text)
    except UserError as error:
        yield fail("port", str(error), "another one, or none for a free one")
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        text = f"{name} has no address: gloo and NCCL may not find it"
        yield warn("host name", text, f"echo 127.0.0.1 {name} >> /etc/hosts")


# --- processes ---

EXCHANGE = "zerofit.train.network_check"  # the module that each process runs

EXCHANGE_SECONDS = 90.0  # importing torch takes most of it, a minute from a cold network disk


def exchange(count: int) -> Iterator[Finding]:
    """Exchange numbers between processes, as each run does before it loads the model, and report the speed.

    Args: count: processes, 0 for one per GPU, or 2 on a CPU.
    """
    import torch

    cuda = hardware.torch_sees_some()
    count = count or (torch.cuda.device_count() if cuda else 2)
    if count == 1:
        return
    backend, fix = ("NCCL", "NCCL_DEBUG=INFO make doctor") if cuda else ("gloo", "GLOO_SOCKET_IFNAME=lo make doctor")
    answer = _exchanged(count)
    if answer is None:
        text = f"{count} processes exchanged nothing over {backend} in {EXCHANGE_SECONDS:.0f} s"
        yield fail("exchange", text, "the machine is busy or its disk slow; repeat this when it is idle")
    elif answer.startswith("exchanged "):
        yield ok("exchange", f"{count} processes over {backend}, {answer.removeprefix('exchanged ')}")
    else:
        yield fail("exchange", f"{count} processes over {backend}: {answer}", fix)


def _exchanged(count: int) -> str | None:
    """Start processes that exchange numbers; return the speed or the first error, None after a timeout."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    env = {name: value for name, value in doctor_packages.environment().items() if name != hardware.NVML_CHECK}
    try:
        done = subprocess.run([*words, "-m", EXCHANGE], env=env, capture_output=True, text=True, errors="replace",
                              timeout=EXCHANGE_SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]  # NCCL_DEBUG prints many
    starts = ["zerofit: error: "] * bool(done.returncode) + ["exchanged "]
    found = next((line for start in starts for line in lines if line.startswith(start)), None)
    raised = (line for line in reversed(lines) if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Exit): ", line))
    return (found or next(raised, "no answer")).removeprefix("zerofit: error: ")


# --- before each launch ---


def hub_access() -> Iterator[Finding]:
    """Check access to the Hugging Face Hub: offline mode, token, address."""
    from huggingface_hub import get_token

    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"):
        yield ok("hub", "offline mode: what was downloaded before is used")
        return
    token = "with a token" if get_token() else "without a token (gated models need one: hf auth login)"
    try:
        hub.check_reachable("hub")
    except UserError:
        text = f"cannot be reached, {token}: local folders and files only"
        yield warn("hub", text, "set HTTPS_PROXY or HF_ENDPOINT; HF_HUB_OFFLINE=1 uses earlier downloads")
    else:
        yield ok("hub", f"can be reached, {token}")


def room(settings, net) -> Iterator[Finding]:
    """Warn if the disk is too small for the run's checkpoints and final/, by formula (AdamW, two states).

    Args: net: the model on the meta device.
    """
    from zerofit.model.load import count_parameters

    trained_params, total_params = count_parameters(net)
    checkpoint_size = formulas.checkpoint_bytes(trained_params, total_params)
    kept = 0 if settings.save_strategy == "no" else (settings.save_total_limit or 1) + 1  # one is being written
    needed = kept * checkpoint_size + 2 * (trained_params if settings.trains_adapter else total_params)
    folder = nearest_existing(Path(settings.output_dir or "runs").expanduser().absolute())
    free = shutil.disk_usage(folder).free
    if needed > free:
        takes = f"{kept} checkpoints and final/ take about {needed / 1e9:.3g} GB"
        fix = "--save_total_limit 1, --save_strategy no, or another folder with OUT="
        yield warn("disk", f"{takes}, {folder} has {free / 1e9:.3g} free", fix)


def installation() -> list[Finding]:
    """Run the checks that need no model: package versions and known problems."""
    return [*doctor_packages.check(), *doctor_packages.known_problems()]


def of_job(settings, net) -> list[Finding]:
    """Run the cheap checks that concern this job. net: the model on the meta device."""
    from zerofit.model.kernels import linear_attention

    findings = [*room(settings, net)]
    gpu_prefixes = ("CUDA", "NCCL", "PYTORCH", "DS_ACCELERATOR")
    findings += [f for f in variables() if not settings.use_cpu or not f.name.startswith(gpu_prefixes)]
    if not settings.use_cpu:
        findings += gpus()
        if missing := linear_attention.missing_kernels(net.config):
            findings.append(warn("kernels", *missing))
    if settings.offload != "none" or settings.activation_offload:
        nodes = -(-settings.world_size // int(os.environ.get("LOCAL_WORLD_SIZE") or settings.world_size))
        findings += host_memory(nvme=bool(settings.offload_path), nodes=nodes)
    return findings


def raise_or_warn(findings: list[Finding]) -> list[str]:
    """Return the warnings as sentences. Raises: UserError for the first finding that fails."""
    for finding in findings:
        if finding.level == "fail":
            raise UserError(f"{finding.name}: {finding.text}; {finding.fix}.")
    return [f"{finding.name}: {finding.text}; {finding.fix}" for finding in findings if finding.level == "warn"]
