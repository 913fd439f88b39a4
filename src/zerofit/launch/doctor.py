"""`zerofit doctor`: find problems that would break, slow down or silently corrupt a run, and print fixes.

Every check returns findings. All checks take less than 15 s, plus half a minute if the self-test runs. The launcher
runs `check_installation` and `check_job` before each job.
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

# {environment variable: its effect on a job}
CHANGES_BEHAVIOR = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every kernel: training is several times slower",
    "NCCL_P2P_DISABLE": "GPUs of a node communicate through host memory: slower collectives",
    "NCCL_IB_DISABLE": "nodes communicate over TCP: slower collectives",
    "DS_ACCELERATOR": "DeepSpeed uses this accelerator, even if the machine has another",
    "DS_SKIP_CUDA_CHECK": "ops are compiled even if nvcc and torch have different CUDA versions",
    "TORCH_EXTENSIONS_DIR": "compiled ops are loaded from this folder, even ops that another machine compiled",
    "DEEPSPEED_TIMEOUT": "timeout of DeepSpeed's collectives in minutes",
    "HF_HUB_OFFLINE": "downloads are disabled",
    "TRANSFORMERS_OFFLINE": "downloads are disabled",
    "PYTORCH_CUDA_ALLOC_CONF": "the allocator differs from the plan's assumption",
    "PYTORCH_ALLOC_CONF": "the allocator differs from the plan's assumption",
}


def main(argv: list[str]) -> None:
    """`zerofit doctor`: see --help. Exits with 0, or with 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="zerofit doctor", allow_abbrev=False, description=__doc__)
    parser.add_argument("--json", action="store_true", help="print findings as JSON only")
    parser.add_argument(
        "--gpus", default="", help="processes of the exchange test (default: one per GPU, or 2 without a GPU)"
    )
    parser.add_argument("--output_dir", default="runs", help="parent folder of the runs")
    parser.add_argument("--port", default="", help="rendezvous port to check")
    parser.add_argument("--nodes", default="1", help="number of nodes; above 1, also run the multi-node checks")
    parser.add_argument("--self_test", action="store_true", help="train the bundled model for four steps and check "
                        "the results; also runs if a package is newer than tested")  # fmt: skip
    args = parser.parse_args(argv)
    command_line.positive_integer("NODES=", args.nodes)
    if args.gpus:
        hardware.check_devices(command_line.positive_integer("--gpus ", args.gpus), use_cpu=False)
    began, findings = time.perf_counter(), []
    for name, (check, ok_text) in _checks(args).items():
        findings += (latest := list(check()) or [ok(name, ok_text)])
        for finding in [] if args.json else latest:
            print(f"{finding.level:<5} {finding.name}: {finding.text}", flush=True)
            if finding.fix and finding.level != "ok":
                print(f"      -> {finding.fix}", flush=True)
    counts = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "fail")}
    if args.json:
        print(json.dumps({"findings": [asdict(f) for f in findings], "ok": not counts["fail"]}, indent=1))
    else:
        summary = ", ".join(f"{n} {level}" for level, n in counts.items())
        print(f"\n{summary}, {time.perf_counter() - began:.1f} s")
    raise SystemExit(1 if counts["fail"] else 0)


def _checks(args) -> dict:
    """Return {name: (check, text to print for an empty result)} in the order in which they run."""
    nodes, folder, packages = int(args.nodes), Path(args.output_dir), list(doctor_packages.check())
    versions = [
        f"python {platform.python_version()}",
        *(f"{p} {metadata.version(p)}" for p in PACKAGES if find_spec(p)),
    ]
    checks = {
        "packages": (lambda: packages, ", ".join(versions)),
        "known problems": (doctor_packages.known_problems, "none applies"),
        "compiler": (compilers, "ninja and g++ are on PATH"),
        "environment": (variables, "no variable changes how a job runs"),
        "GPUs": (gpus, "none: jobs run on the CPU"),
        "host memory": (lambda: host_memory(nodes=nodes), ""),
        "disk": (lambda: disk(folder), ""),
        "cache": (caches, "the folders of models and prepared rows are writable"),
        "network": (lambda: port(args.port), "a port is free, the host name has an address"),
        "hub": (hub_access, ""),
        "exchange": (lambda: exchange(int(args.gpus or 0)), "skipped for one process"),
    }
    if args.self_test or any(finding.level == "warn" for finding in packages):
        checks["self-test"] = (doctor_packages.self_test, "")
    if nodes > 1:
        checks["nodes"] = (lambda: doctor_nodes.check_node(nodes, folder, args.port), "")
    return checks


# --- compilers ---


def compilers() -> Iterator[Finding]:
    """Look for ninja and g++ (offload ops), a C compiler and Python's headers (Triton, GPU), nvcc (ZeRO++ ops)."""
    from zerofit.train import deepspeed_ops

    if missing := deepspeed_ops.missing_tools():
        text = f"{' and '.join(missing)} not on PATH: --offload_path and offload_optimizer.ratio do not work"
        yield warn("compiler", text, "apt install g++; ninja comes with `make install`")
    if hardware.torch_sees_gpu() and (missing := hardware.missing_for_triton()):
        text = (
            f"{' and '.join(missing)}: Triton cannot start kernels (Liger, flex_attention, torch.compile, torchao and "
            "--optim muon)"
        )
        yield warn("C compiler", text, "apt install gcc python3-dev")
    yield from _nvcc()


def _nvcc() -> Iterator[Finding]:
    """Compare the CUDA versions of nvcc and torch by DeepSpeed's rule: equal, or both in its compatibility list."""
    import torch

    nvcc, cuda = shutil.which("nvcc"), torch.version.cuda
    if not (cuda and nvcc):
        return
    from deepspeed.ops.op_builder.builder import cuda_minor_mismatch_ok

    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    version, cuda = output.partition("release ")[2].partition(",")[0], ".".join(cuda.split(".")[:2])
    if version != cuda and not any({version, cuda} <= set(group) for group in cuda_minor_mismatch_ok.values()):
        text = f"nvcc {version or '(unknown)'}, torch for CUDA {cuda}: DeepSpeed cannot compile CUDA ops"
        users = "only zero_quantized_weights and zero_quantized_gradients need it"
        yield warn("nvcc", text, f"install the CUDA {cuda} toolkit; {users}")


# --- environment ---


def variables() -> Iterator[Finding]:
    """Warn about environment variables that change how a job runs."""
    cores, threads = distributed.cores(), os.environ.get("OMP_NUM_THREADS")
    if threads == "1" and cores > 2:
        text = f"1 thread for {cores} cores: the offloaded optimizer is very slow"
        yield warn("OMP_NUM_THREADS", text, "unset OMP_NUM_THREADS (make sets cores / processes)")
    for name, effect in CHANGES_BEHAVIOR.items():
        if os.environ.get(name, "0") not in ("0", "", allocator.default()):
            yield warn(name, f"is {os.environ[name]}: {effect}", f"unset {name}")


# --- the machine ---


def gpus() -> Iterator[Finding]:
    """Report free memory, support by this torch build, bf16 support and exclusive mode of each GPU."""
    import torch

    if hardware.torch_sees_gpu():
        yield from (_gpu_finding(device, torch.cuda.get_arch_list()) for device in hardware.visible())
    elif why := hardware.why_no_gpu():
        yield fail("GPUs", why, "see the driver version in nvidia-smi, or train on the CPU with --use_cpu true")


def _runs_on(arch: str, major: int, minor: int) -> bool:
    """Return whether code that torch was built for runs on a GPU of this compute capability.

    Machine code (sm_86) runs on the same major and on this or a later minor version; PTX (compute_90) compiles for all
    later versions. The suffix `a` limits code to one capability, `f` to one family (CUDA programming guide).
    """
    kind, version, suffix = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch).groups()
    built = divmod(int(version), 10)
    if suffix == "a":
        return built == (major, minor)
    if kind == "compute" and not suffix:
        return built <= (major, minor)
    return built[0] == major and built[1] <= minor


def _gpu_finding(device, architectures: list[str]) -> Finding:
    """Check one GPU. architectures: torch's build targets (sm_90, compute_120), [] if unknown."""
    name, (major, minor) = f"GPU {device.index}", device.capability
    known = [arch for arch in architectures if re.fullmatch(r"(sm|compute)_\d+[af]?", arch)]
    if known and not any(_runs_on(arch, major, minor) for arch in known):
        is_newer = all(divmod(int(re.search(r"\d+", arch)[0]), 10) < (major, minor) for arch in known)
        text = (
            f"{device.name} has compute capability {major}.{minor}, but this torch build has no kernels for it, only "
            f"for {' '.join(architectures)}"
        )
        newer = "install a newer torch build for this GPU (make install; pytorch.org/get-started)"
        return fail(name, text, newer if is_newer else "use another GPU, or install a torch build for CUDA 12")
    free = "free memory unknown (no nvidia-smi, or a MIG slice)"
    if device.free_bytes is not None:
        free = f"{device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free"
    text = f"{device.name}, {free}" + ("" if major >= 8 else "; no bf16 support, runs use fp16")
    text += "; limited to one process (EXCLUSIVE_PROCESS)" * device.exclusive
    is_busy = device.usable_bytes < device.total_bytes
    return warn(name, text, "nvidia-smi lists the processes that use it") if is_busy else ok(name, text)


def host_memory(nvme: bool = False, nodes: int = 1) -> Iterator[Finding]:
    """Report host memory, the size of /dev/shm, and the limits on open files, locked and pinned memory.

    Args: nvme: whether --offload_path is set; nodes: number of nodes.
    """
    import psutil

    memory, shm = psutil.virtual_memory(), Path("/dev/shm")
    yield ok("host memory", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available")
    if shm.exists() and (size := shutil.disk_usage(shm).total) < GIB:
        text = f"{size / 2**20:.0f} MiB: NCCL and data workers need more"
        yield warn("/dev/shm", text, "docker run --shm-size 16g, or --ipc host")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < 1024:
        text = f"limited to {files} files: data workers and checkpoints with many shards need more"
        yield warn("open files", text, "ulimit -n 65536 (docker: --ulimit nofile=65536)")
    # RLIMIT_MEMLOCK does not apply to CUDA's pinned memory.
    users = ["the buffers of --offload_path"] * nvme
    users += ["InfiniBand's registered memory"] * (nodes > 1 and bool(doctor_nodes.infiniband()))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if users and soft != resource.RLIM_INFINITY and soft < 16 * GIB:
        text = f"limited to {soft / 2**20:.0f} MiB, too little for {' and '.join(users)}"
        yield warn("memlock", text, "ulimit -l unlimited (docker: --ulimit memlock=-1)")
    # No ulimit reports WSL2's limit on pinned memory: 0.5 GiB in microsoft/WSL issue 14078.
    if "microsoft" in platform.release().lower() and hardware.torch_sees_gpu():
        text = (
            "WSL2 limits pinned memory, sometimes to 0.5 GiB: --offload and --activation_offload can fail with "
            '"CUDA error: out of memory" although GPU memory is free'
        )
        fix = "train without these flags, or on native Linux; if data loading fails, --dataloader_pin_memory false"
        yield warn("pinned memory", text, fix)


def disk(folder: Path) -> Iterator[Finding]:
    """Check that a folder allows writing and atomic replacement, and report its free space."""
    parent = nearest_existing(folder.expanduser().absolute())
    try:  # in a new folder that no other user can have created
        with tempfile.TemporaryDirectory(prefix=".zerofit-", dir=parent) as scratch:
            source, target = Path(scratch) / "file.tmp", Path(scratch) / "file"
            source.write_text("x")
            os.replace(source, target)
    except OSError as error:
        yield fail("disk", f"{parent}: {error.strerror}: runs cannot be written", "set OUT= to another folder")
        return
    free = shutil.disk_usage(parent).free
    text = f"{parent}: {free / GIB:.1f} GiB free (a checkpoint takes 14 bytes per trained parameter)"
    yield Finding(
        "disk", "warn" if free < 10 * GIB else "ok", text, "set --save_total_limit 1, or OUT= to another folder"
    )


def caches() -> Iterator[Finding]:
    """Warn about a cache folder (models, prepared rows) that is not writable or has no space for a 7B model."""
    from huggingface_hub import constants

    for variable, folder in (("HF_HOME", Path(constants.HF_HUB_CACHE)), ("ZEROFIT_CACHE", cache_root())):
        parent = nearest_existing(folder.expanduser().absolute())
        fix = f"{variable}=FOLDER on a larger disk (docker: -v /data/cache:/cache --env {variable}=/cache)"
        if not os.access(parent, os.W_OK):
            yield warn("cache", f"{folder}: is not writable", fix)
        elif variable == "HF_HOME" and (free := shutil.disk_usage(parent).free) < 16 * GIB:
            yield warn("cache", f"{folder}: {free / GIB:.1f} GiB free, a 7B model in bf16 takes 14", fix)


def port(text: str) -> Iterator[Finding]:
    """Check that the rendezvous port is free and that the host name has an address."""
    try:
        node_options.port_of(text)
    except UserError as error:
        yield fail("port", str(error), "set another PORT, or none to use a free one")
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        text = f"{name} does not resolve to an address: gloo and NCCL may fail to connect"
        yield warn("host name", text, f"echo 127.0.0.1 {name} >> /etc/hosts")


# --- processes ---

EXCHANGE = "zerofit.train.network_check"  # module that each process runs

EXCHANGE_SECONDS = 90.0  # mostly the import of torch, a minute from a cold network disk


def exchange(count: int) -> Iterator[Finding]:
    """Exchange numbers between processes, as each run does before it loads the model, and report the speed.

    Args: count: number of processes; 0: one per GPU, or 2 on a CPU.
    """
    import torch

    cuda = hardware.torch_sees_gpu()
    count = count or (torch.cuda.device_count() if cuda else 2)
    if count == 1:
        return
    backend, fix = ("NCCL", "NCCL_DEBUG=INFO make doctor") if cuda else ("gloo", "GLOO_SOCKET_IFNAME=lo make doctor")
    result = _exchanged(count)
    if result is None:
        text = f"{count} processes exchanged nothing over {backend} in {EXCHANGE_SECONDS:.0f} s"
        yield fail("exchange", text, "the machine is busy or its disk is slow; repeat the check when it is idle")
    elif result.startswith("exchanged "):
        yield ok("exchange", f"{count} processes over {backend}, {result.removeprefix('exchanged ')}")
    else:
        yield fail("exchange", f"{count} processes over {backend}: {result}", fix)


def _exchanged(count: int) -> str | None:
    """Start processes that exchange numbers; return the speed or the first error, or None after a timeout."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    env = {name: value for name, value in doctor_packages.environment().items() if name != hardware.NVML_CHECK}
    try:
        done = subprocess.run([*words, "-m", EXCHANGE], env=env, capture_output=True, text=True, errors="replace",
                              timeout=EXCHANGE_SECONDS)  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]  # NCCL_DEBUG prints many
    starts = ["zerofit: error: "] * bool(done.returncode) + ["exchanged "]
    message = next((line for start in starts for line in lines if line.startswith(start)), None)
    raised = (line for line in reversed(lines) if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Exit): ", line))
    return (message or next(raised, "no output")).removeprefix("zerofit: error: ")


# --- before each launch ---


def hub_access() -> Iterator[Finding]:
    """Check access to the Hugging Face Hub."""
    from huggingface_hub import get_token

    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"):
        yield ok("hub", "offline mode: runs use earlier downloads")
        return
    token = "with a token" if get_token() else "without a token (gated models need one: hf auth login)"
    try:
        hub.check_reachable("hub")
    except UserError:
        text = f"not reachable, {token}: only local folders and files work"
        yield warn("hub", text, "set HTTPS_PROXY or HF_ENDPOINT, or use earlier downloads with HF_HUB_OFFLINE=1")
    else:
        yield ok("hub", f"reachable, {token}")


def disk_space(settings, net) -> Iterator[Finding]:
    """Warn if the disk is too small for the run's checkpoints and final/, estimated for AdamW.

    Args: net: the model on the meta device.
    """
    from zerofit.model.load import count_parameters

    trained_params, total_params = count_parameters(net)
    checkpoint_size = formulas.checkpoint_bytes(trained_params, total_params)
    kept = 0 if settings.save_strategy == "no" else (settings.save_total_limit or 1) + 1  # one more while saving
    needed = kept * checkpoint_size + 2 * (trained_params if settings.trains_adapter else total_params)
    folder = nearest_existing(Path(settings.output_dir or "runs").expanduser().absolute())
    free = shutil.disk_usage(folder).free
    if needed > free:
        text = f"{kept} checkpoints and final/ take about {needed / 1e9:.3g} GB, {folder} has {free / 1e9:.3g} free"
        yield warn("disk", text, "set --save_total_limit 1, --save_strategy no, or OUT= to another folder")


def check_installation() -> list[Finding]:
    """Check package versions and known problems."""
    return [*doctor_packages.check(), *doctor_packages.known_problems()]


def check_job(settings, net) -> list[Finding]:
    """Run the fast checks that apply to this job. net: the model on the meta device."""
    from zerofit.model.kernels import linear_attention

    findings = [*disk_space(settings, net)]
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
