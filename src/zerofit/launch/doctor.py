"""`zerofit doctor`: check what would break, slow down or silently corrupt a run here, with fixes.

Every check returns findings; none starts a job, and together they take less than 15 s. The launcher runs `installation`
and `of_job` before each job.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from zerofit.base import allocator, hardware
from zerofit.base.errors import UserError
from zerofit.launch import doctor_nodes

GIB = 2**30

RULES = Path(__file__).parent / "known_problems.json"

# {environment variable that changes how a job runs: its effect}
CHANGES_BEHAVIOUR = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for: training is several times slower",
    "NCCL_P2P_DISABLE": "GPUs of a node talk through host memory: slower collectives",
    "NCCL_IB_DISABLE": "nodes talk over TCP: slower collectives",
    "DS_ACCELERATOR": "DeepSpeed uses this accelerator whatever the machine has",
    "DS_SKIP_CUDA_CHECK": "ops are compiled though nvcc and torch are of different CUDA versions",
    "TORCH_EXTENSIONS_DIR": "compiled ops are taken from here, also when another machine made them",
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
    parser.add_argument("--gpus", default="", help="processes that shall exchange a tensor (default: GPUs, else 2)")
    parser.add_argument("--output_dir", default="runs", help="folder that runs will be written to")
    parser.add_argument("--port", default="", help="port of the rendezvous to look at")
    parser.add_argument("--nodes", default="1", help="nodes of the job: looks at what several need")
    given = parser.parse_args(argv)
    if given.gpus and (not given.gpus.isdecimal() or not int(given.gpus)):
        raise UserError(f"--gpus {given.gpus}: must be a whole number from 1.")
    if not given.nodes.isdecimal() or not int(given.nodes):
        raise UserError(f"NODES={given.nodes}: must be a whole number from 1.")
    if given.gpus:
        hardware.check_devices(int(given.gpus), use_cpu=False)
    began, findings = time.perf_counter(), []
    for check in (python_and_packages, known_problems, compilers, compiled_ops, variables, launcher_files, gpus,
                  lambda: host_memory(nodes=int(given.nodes)), lambda: disk(Path(given.output_dir)),
                  lambda: port(given.port), hub_access, json_files, lambda: exchange(int(given.gpus or 0)),
                  lambda: _of_nodes(given)):  # fmt: skip
        findings += (latest := check())
        if not given.json:
            _print(latest)
    counts = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "fail")}
    if given.json:
        print(json.dumps({"findings": [asdict(f) for f in findings], "ok": not counts["fail"]}, indent=1))
    else:
        summary = ", ".join(f"{n} {level}" for level, n in counts.items())
        print(f"\n{summary}, {time.perf_counter() - began:.1f} s")
    raise SystemExit(1 if counts["fail"] else 0)


def _of_nodes(given) -> list[doctor_nodes.Finding]:
    several = int(given.nodes) > 1
    return doctor_nodes.check(int(given.nodes), Path(given.output_dir), given.port) if several else []


def _print(found: list[doctor_nodes.Finding]) -> None:
    for finding in found:
        print(f"{finding.level:<5} {finding.name}: {finding.text}", flush=True)
        if finding.fix and finding.level != "ok":
            print(f"      -> {finding.fix}", flush=True)


# --- packages ---


def python_and_packages() -> list[doctor_nodes.Finding]:
    """Compare installed versions with the ranges that zerofit was tested with."""
    from packaging.requirements import Requirement

    from zerofit.job.run_folder import PACKAGES

    bad = []
    try:
        requires = [Requirement(text) for text in metadata.requires("zerofit") or []]
    except metadata.PackageNotFoundError:
        return [
            doctor_nodes.Finding(
                "packages", "warn", "zerofit is not installed, it runs from its folder", "make install"
            )
        ]
    for requirement in requires:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):  # of an extra or of another platform
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            bad.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            bad.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if bad:
        return [doctor_nodes.Finding("packages", "fail", "; ".join(bad), "make install")]
    text = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    return [doctor_nodes.Finding("packages", "ok", f"python {sys.version.split()[0]}, {text}")]


def _version(name: str) -> str:
    """Return the version of a package, "python" or torch's "cuda". Raises: PackageNotFoundError."""
    import torch

    if name == "python":
        return platform.python_version()
    if name == "cuda":
        if torch.version.cuda is None:
            raise metadata.PackageNotFoundError(name)
        return torch.version.cuda
    return metadata.version(name)


def known_problems() -> list[doctor_nodes.Finding]:
    """Apply the rules of known_problems.json: version ranges with a known problem."""
    from packaging.specifiers import SpecifierSet

    findings = []
    rules = json.loads(RULES.read_text(encoding="utf-8"))
    for rule in rules:
        try:
            versions = {name: _version(name) for name in rule["when"]}
        except metadata.PackageNotFoundError:
            continue
        if all(SpecifierSet(rule["when"][name]).contains(v, prereleases=True) for name, v in versions.items()):
            matched = ", ".join(f"{name} {version}" for name, version in versions.items())
            findings.append(
                doctor_nodes.Finding(
                    "known problem", rule["level"], f"{matched}: {rule['symptom']} ({rule['link']})", rule["fix"]
                )
            )
    return findings or [doctor_nodes.Finding("known problems", "ok", f"none of {len(rules)} applies")]


# --- what DeepSpeed compiles ---


def compilers() -> list[doctor_nodes.Finding]:
    """Look for ninja and g++ (offload ops), a C compiler (Triton, on a GPU) and nvcc (ZeRO++ ops)."""
    from zerofit.train import deepspeed_ops

    missing = deepspeed_ops.missing_tools()
    findings = [
        doctor_nodes.Finding("compiler", "warn", f"{' and '.join(missing)} not on PATH: --offload_path and "
                                                 "offload_optimizer.ratio cannot be used",
                "apt install g++; ninja comes with `make install`")
        if missing else doctor_nodes.Finding("compiler", "ok", "ninja and g++ are on PATH")
    ]  # fmt: skip
    return [*findings, *_c_compiler(), *_nvcc()]


def _c_compiler() -> list[doctor_nodes.Finding]:
    """Look for what Triton needs at run time on a GPU: $CC, gcc or clang, and Python's headers."""
    if not hardware.torch_sees_some():
        return []
    missing = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("no C compiler (gcc, clang, CC=)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        missing.append(f"no {header}")
    if not missing:
        return []
    text = (
        f"{' and '.join(missing)}: Triton cannot start a kernel (Liger, flex_attention, torch.compile and with it "
        "--optim muon, torchao)"
    )
    return [doctor_nodes.Finding("C compiler", "warn", text, "apt install gcc python3-dev")]


def _nvcc() -> list[doctor_nodes.Finding]:
    """Compare nvcc and torch's CUDA by DeepSpeed's rule: same version, or both in its compatibility list."""
    import torch

    nvcc, cuda = shutil.which("nvcc"), torch.version.cuda
    if not (cuda and nvcc):
        return []
    from deepspeed.ops.op_builder.builder import cuda_minor_mismatch_ok

    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    version, cuda = output.partition("release ")[2].partition(",")[0], ".".join(cuda.split(".")[:2])
    if version == cuda or any({version, cuda} <= set(group) for group in cuda_minor_mismatch_ok.values()):
        return []
    return [doctor_nodes.Finding("nvcc", "warn", f"nvcc {version or '(unknown)'}, torch for CUDA {cuda}: DeepSpeed "
                                                 "compiles no CUDA op",
                    f"install the CUDA {cuda} toolkit; needed by zero_quantized_weights and "
                    "zero_quantized_gradients only")]  # fmt: skip


def compiled_ops() -> list[doctor_nodes.Finding]:
    """List compiled ops; warn of a `lock` file, which a killed build leaves behind.

    Every later start waits for it forever (pytorch issue 189245). zerofit removes stale locks in its own folder
    (deepspeed_ops.clear_stale_lock).
    """
    from zerofit.train import deepspeed_ops

    folder, ours = deepspeed_ops.folder_of_all()
    locks = list(folder.glob("*/lock"))
    if locks and not ours:
        return [
            doctor_nodes.Finding(
                "compiled ops", "warn", f"{locks[0]}: a build runs, or a killed one left it", f"rm {locks[0]}"
            )
        ]
    compiled = [f.stem for f in folder.glob("*/*.so")]
    text = (
        f"{', '.join(compiled)} in {folder}"
        if compiled
        else "none yet; a job that needs one compiles it first (a minute)"
    )
    return [doctor_nodes.Finding("compiled ops", "ok", text)]


# --- environment ---


def variables() -> list[doctor_nodes.Finding]:
    """Warn of environment variables that change how a job runs."""
    from zerofit.base import distributed

    findings = []
    cores, threads = distributed.cores(), os.environ.get("OMP_NUM_THREADS")
    if threads == "1" and cores > 2:
        findings.append(doctor_nodes.Finding("OMP_NUM_THREADS", "warn",
                             f"1 of {cores} cores: the offloaded optimizer crawls",
                             "unset OMP_NUM_THREADS (make sets cores / processes)"))  # fmt: skip
    for name, effect in CHANGES_BEHAVIOUR.items():
        if os.environ.get(name, "0") not in ("0", "", allocator.default()):
            findings.append(doctor_nodes.Finding(name, "warn", f"is {os.environ[name]}: {effect}", f"unset {name}"))
    return findings or [doctor_nodes.Finding("environment", "ok", "no variable changes what runs")]


def launcher_files() -> list[doctor_nodes.Finding]:
    """Warn of files with launcher settings: accelerate's cached configuration, DeepSpeed's .deepspeed_env."""
    from zerofit.base import distributed
    from zerofit.config import accelerate_env

    findings, cached = [], accelerate_env.cached_accelerate_config()
    if cached.exists():
        text = (
            f"{cached} sets the number of processes of a bare `accelerate launch`; its stage and precision are not used"
        )
        findings.append(doctor_nodes.Finding("accelerate", "warn", text, f"rm {cached}, or name --num_processes"))
    for folder in {Path.cwd(), distributed.home()}:
        if (folder / ".deepspeed_env").exists():
            file = folder / ".deepspeed_env"
            text = f"{file} holds an environment, often with tokens, that DeepSpeed's launcher sends to every node"
            findings.append(doctor_nodes.Finding("deepspeed", "warn", text, f"rm {file}"))
    return findings or [doctor_nodes.Finding("launchers", "ok", "no cached configuration")]


# --- the machine ---


def gpus() -> list[doctor_nodes.Finding]:
    """Report each GPU: free memory, support by this torch build, bf16, exclusive mode."""
    import torch

    if not hardware.torch_sees_some():
        if why := hardware.why_torch_sees_none():
            return [
                doctor_nodes.Finding(
                    "GPUs", "fail", why, "nvidia-smi shows the driver's version; --use_cpu true trains on the CPU"
                )
            ]
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return [doctor_nodes.Finding("GPUs", "ok", f"none: jobs run on the CPU (torch {torch.__version__}, {built})")]
    return [_of_gpu(device, torch.cuda.get_arch_list()) for device in hardware.visible()]


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


def _of_gpu(device, architectures: list[str]) -> doctor_nodes.Finding:
    """Report one GPU. architectures: those that torch was built for (sm_90, compute_120); none: not known."""
    name, (major, minor) = f"GPU {device.index}", device.capability
    known = [arch for arch in architectures if re.fullmatch(r"(sm|compute)_\d+[af]?", arch)]
    if known and not any(_runs_on(arch, major, minor) for arch in known):
        is_newer = all(divmod(int(re.search(r"\d+", arch)[0]), 10) < (major, minor) for arch in known)
        return doctor_nodes.Finding(
            name, "fail", f"{device.name} has compute capability {major}.{minor}, this torch has no kernels for it: "
            f"it was built for {' '.join(architectures)}",
            "a newer torch, built for this GPU (make install; pytorch.org/get-started)" if is_newer else
            "another GPU, or a torch build for CUDA 12 (pytorch.org/get-started)",
        )  # fmt: skip
    free = "what is free is not known (no nvidia-smi, or a slice)"
    if device.free_bytes is not None:
        free = f"{device.free_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free"
    text = f"{device.name}, {free}" + ("" if major >= 8 else "; no bf16, fp16 is used")
    text += "; only one process may use it (EXCLUSIVE_PROCESS)" * device.exclusive
    busy = device.usable_bytes < device.total_bytes
    return doctor_nodes.Finding(name, "warn" if busy else "ok", text, "nvidia-smi shows who holds it" if busy else "")


def host_memory(nvme: bool = False, nodes: int = 1) -> list[doctor_nodes.Finding]:
    """Report host memory, the size of /dev/shm, and the limits on locked and pinned memory.

    Args: nvme: whether --offload_path is used; nodes: nodes of the job.
    """
    import psutil

    memory = psutil.virtual_memory()
    findings = [
        doctor_nodes.Finding(
            "host memory", "ok", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
        )
    ]
    shm = Path("/dev/shm")
    if shm.exists() and (size := shutil.disk_usage(shm).total) < GIB:
        findings.append(doctor_nodes.Finding("/dev/shm", "warn",
                             f"{size / 2**20:.0f} MiB: NCCL and data workers need more",
                             "docker run --shm-size 16g, or --ipc host"))  # fmt: skip
    return [*findings, *_locked_memory(nvme, nodes), *_pinned_memory()]


def _locked_memory(nvme: bool, nodes: int) -> list[doctor_nodes.Finding]:
    """Warn of a low RLIMIT_MEMLOCK if something depends on it.

    DeepSpeed's NVMe buffers (mlock) and InfiniBand registrations do. The limit does not apply to CUDA's pinned memory,
    which the driver pins.
    """
    users = ["the buffers of --offload_path"] * nvme
    users += ["what InfiniBand registers"] * (nodes > 1 and bool(doctor_nodes.infiniband()))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not users or soft == resource.RLIM_INFINITY or soft >= 16 * GIB:
        return []
    return [doctor_nodes.Finding("memlock", "warn", f"{soft / 2**20:.0f} MiB may be locked, too little for "
                                                    f"{' and '.join(users)}",
                    "ulimit -l unlimited (docker: --ulimit memlock=-1)")]  # fmt: skip


def _pinned_memory() -> list[doctor_nodes.Finding]:
    """Warn of WSL2's limit on pinned memory (0.5 GiB in microsoft/WSL issue 14078), which no ulimit shows."""
    if "microsoft" not in _kernel().lower() or not hardware.torch_sees_some():
        return []
    text = (
        "WSL2 pins little memory, sometimes 0.5 GiB: --offload and --activation_offload can end in "
        '"CUDA error: out of memory" while the GPU is empty'
    )
    fix = "train without them, or on Linux itself; --dataloader_pin_memory false where loading fails"
    return [doctor_nodes.Finding("pinned memory", "warn", text, fix)]


def _kernel() -> str:
    """Return the kernel's name and version; "" where there is no /proc."""
    file = Path("/proc/version")
    return file.read_text() if file.exists() else ""


def disk(folder: Path) -> list[doctor_nodes.Finding]:
    """Check that files can be written and atomically replaced in a folder, and report the free space."""
    from zerofit.base.paths import nearest_existing

    parent = nearest_existing(folder.expanduser().absolute())
    try:
        with tempfile.TemporaryDirectory(
            prefix=".zerofit-", dir=parent
        ) as scratch:  # a new name, which no other user can have created
            source, target = Path(scratch) / "file.tmp", Path(scratch) / "file"
            source.write_text("x")
            os.replace(source, target)
    except OSError as error:
        return [
            doctor_nodes.Finding(
                "disk", "fail", f"{parent}: {error.strerror}: runs cannot be written", "another folder with OUT="
            )
        ]
    free = shutil.disk_usage(parent).free
    level = "warn" if free < 10 * GIB else "ok"
    return [doctor_nodes.Finding("disk", level,
                    f"{parent}: {free / GIB:.1f} GiB free (a checkpoint takes 14 bytes a trained parameter)",
                    "--save_total_limit 1, or another folder with OUT=")]  # fmt: skip


def port(text: str) -> list[doctor_nodes.Finding]:
    """Check that the rendezvous port is free and that this machine's host name has an address."""
    from zerofit.launch.cluster import node_options

    findings = []
    try:
        node_options.port_of(text)
    except UserError as error:
        findings.append(doctor_nodes.Finding("port", "fail", str(error), "another one, or none for a free one"))
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        findings.append(doctor_nodes.Finding("host name", "warn",
                             f"{socket.gethostname()} has no address: gloo and NCCL may not find it",
                             f"echo 127.0.0.1 {socket.gethostname()} >> /etc/hosts"))  # fmt: skip
    return findings or [doctor_nodes.Finding("network", "ok", "a port is free, the host's name has an address")]


def json_files() -> list[doctor_nodes.Finding]:
    """Check each JSON of deepspeed_configs/ for keys that DeepSpeed removed or ignores."""
    from zerofit.base.paths import PROJECT
    from zerofit.config import deepspeed_json

    findings, files = [], sorted((PROJECT / "deepspeed_configs").glob("*.json"))
    for file in files:
        try:
            config = deepspeed_json.read_json(file)
            if "stage" in config.get("zero_optimization", {}):  # an overlay has none
                deepspeed_json.lint(config, file)
        except UserError as error:
            findings.append(doctor_nodes.Finding("JSON", "fail", str(error), f"git diff {file}"))
    return findings or [doctor_nodes.Finding("JSON", "ok", f"{len(files)} files in deepspeed_configs are valid")]


# --- processes ---

_EXCHANGE = """
import os, sys, time, datetime
import torch, torch.distributed as dist
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
timeout = datetime.timedelta(seconds=80)  # before exchange() gives up
dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
x = torch.ones(16 * 2**20, device="cuda" if cuda else "cpu")
dist.all_reduce(x)
began = time.perf_counter()
dist.all_reduce(x)
x[0].item()
seconds = time.perf_counter() - began
if dist.get_rank() == 0:
    right = bool((x == dist.get_world_size() ** 2).all())
    print("exchanged", dist.get_world_size(), x.numel() * 4 / seconds / 1e9, right)
dist.destroy_process_group()
"""

_EXCHANGE_FIXES = {  # {backend: (fix for a timeout, fix for a failure)}
    "NCCL": ("NCCL_DEBUG=INFO make doctor; set NCCL_SOCKET_IFNAME to the right network", "NCCL_DEBUG=INFO make doctor"),
    "gloo": ("the machine is busy or its disk slow: again when it is idle", "GLOO_SOCKET_IFNAME=lo make doctor"),
}


def exchange(count: int, seconds: float = 90.0) -> list[doctor_nodes.Finding]:
    """All-reduce a 64 MiB tensor between processes and report the speed.

    GPUs that fail try it once more without copies from GPU to GPU, which tells whether these are broken.
    Args: count: processes, 0 for one per GPU, or 2 on a CPU; seconds: timeout of the whole check; importing
        torch takes most of it, a minute from a cold network disk.
    """
    import torch

    from zerofit.base import distributed
    from zerofit.train import network_check

    cuda = hardware.torch_sees_some()
    count = count or (torch.cuda.device_count() if cuda else 2)
    if count == 1:
        return []
    env = {name: value for name, value in os.environ.items() if name != hardware.NVML_CHECK}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(distributed.free_port()), "WORLD_SIZE": str(count)}
    backend = "NCCL" if cuda else "gloo"
    speed, problem, fix = _exchanged(count, env | rendezvous, seconds, backend)
    if problem and cuda and network_check.WITHOUT_PEERS not in env:
        without_peers = env | rendezvous | {network_check.WITHOUT_PEERS: "1"}
        if not _exchanged(count, without_peers, seconds, backend)[1]:
            problem += f"; with {network_check.WITHOUT_PEERS}=1 they do: copies from GPU to GPU are broken"
            fix = f"export {network_check.WITHOUT_PEERS}=1 (slower); or turn IOMMU and ACS off in the BIOS"
    if problem:
        return [doctor_nodes.Finding("exchange", "fail", problem, fix)]
    return [doctor_nodes.Finding("exchange", "ok", f"{count} processes over {backend}, {speed:.2f} GB/s")]


def _exchanged(count: int, env: dict[str, str], seconds: float, backend: str) -> tuple[float, str, str]:
    """Return (GB/s, what went wrong or "", its fix) of processes that all-reduce a tensor."""
    timeout_fix, failure_fix = _EXCHANGE_FIXES[backend]
    failed, output = _ranks(count, env, seconds)
    if failed is None:
        return 0.0, f"{count} processes did not exchange a tensor over {backend} in {seconds:.0f} s", timeout_fix
    # With NCCL_DEBUG, NCCL prints lines too.
    fields = next((line.split() for line in output.splitlines() if line.startswith("exchanged ")), [])
    if failed or len(fields) != 4 or fields[3] != "True":
        last = (output.strip().splitlines() or ["no answer"])[-1]
        return 0.0, f"{count} processes over {backend}: {last}", failure_fix
    return float(fields[2]), "", ""


def _ranks(count: int, env: dict[str, str], seconds: float) -> tuple[bool | None, str]:
    """Run _EXCHANGE in `count` processes.

    Returns: (whether one failed, its output or else rank 0's); (None, "") on a timeout.
    """
    with tempfile.TemporaryDirectory(prefix="zerofit-doctor-") as temporary, contextlib.ExitStack() as stack:
        # Files, not pipes: NCCL_DEBUG would fill a pipe that is not read, and its rank would block.
        files = [stack.enter_context((Path(temporary) / str(rank)).open("w+")) for rank in range(count)]
        ranks = [
            subprocess.Popen([sys.executable, "-c", _EXCHANGE], stdout=file, stderr=file,
                             env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, file in enumerate(files)
        ]  # fmt: skip
        deadline, shown_rank = time.monotonic() + seconds, None
        try:
            while time.monotonic() < deadline and shown_rank is None:
                codes = [rank.poll() for rank in ranks]
                shown_rank = next((rank for rank, code in enumerate(codes) if code), None)
                if shown_rank is None and None not in codes:
                    shown_rank = 0
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if shown_rank is None:
            return None, ""
        return bool(codes[shown_rank]), (Path(temporary) / str(shown_rank)).read_text(errors="replace")


# --- before each launch ---


def hub_access() -> list[doctor_nodes.Finding]:
    """Check access to the Hugging Face Hub: offline mode, token, address."""
    from huggingface_hub import get_token

    from zerofit.base import hub

    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"):
        return [doctor_nodes.Finding("hub", "ok", "offline mode: what was downloaded before is used")]
    token = "with a token" if get_token() else "without a token (gated models need one: hf auth login)"
    try:
        hub.check_reachable("hub")
    except UserError:
        return [doctor_nodes.Finding("hub", "warn", f"cannot be reached, {token}: local folders and files only",
                        "set HTTPS_PROXY or HF_ENDPOINT; HF_HUB_OFFLINE=1 uses earlier downloads")]  # fmt: skip
    return [doctor_nodes.Finding("hub", "ok", f"can be reached, {token}")]


def room(settings, net) -> list[doctor_nodes.Finding]:
    """Warn if the disk is too small for the run's checkpoints and final/, by formula (AdamW, two states).

    Args: net: the model on the meta device.
    """
    from zerofit.base.paths import nearest_existing
    from zerofit.model.load import count_parameters
    from zerofit.plan import formulas

    trained_params, total_params = count_parameters(net)
    checkpoint_size = formulas.checkpoint_bytes(trained_params, total_params)
    kept = 0 if settings.save_strategy == "no" else (settings.save_total_limit or 1) + 1  # one is being written
    needed = kept * checkpoint_size + 2 * (trained_params if settings.trains_adapter else total_params)
    folder = nearest_existing(Path(settings.output_dir or "runs").expanduser().absolute())
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return []
    return [doctor_nodes.Finding("disk", "warn",
                    f"{kept} checkpoints and final/ take about {needed / 1e9:.3g} GB, {folder} has {free / 1e9:.3g} "
                    "free",
                    "--save_total_limit 1, --save_strategy no, or another folder with OUT=")]  # fmt: skip


def installation() -> list[doctor_nodes.Finding]:
    """Run the checks that need no model: package versions and known problems."""
    return [*python_and_packages(), *known_problems()]


def of_job(settings, net) -> list[doctor_nodes.Finding]:
    """Run the cheap checks that concern this job. net: the model on the meta device."""
    from zerofit.model import attention

    findings = room(settings, net)
    gpu_prefixes = ("CUDA", "NCCL", "PYTORCH", "DS_ACCELERATOR")
    findings += [f for f in variables() if not settings.use_cpu or not f.name.startswith(gpu_prefixes)]
    if not settings.use_cpu:
        findings += gpus()
        if missing := attention.missing_kernels(net.config):
            findings.append(doctor_nodes.Finding("kernels", "warn", *missing))
    if settings.offload != "none" or settings.activation_offload:
        nodes = -(-settings.world_size // int(os.environ.get("LOCAL_WORLD_SIZE") or settings.world_size))
        findings += host_memory(nvme=bool(settings.offload_path), nodes=nodes)
    return findings


def raise_or_warn(found: list[doctor_nodes.Finding]) -> list[str]:
    """Return the warnings as sentences. Raises: UserError for the first finding that fails."""
    for finding in found:
        if finding.level == "fail":
            raise UserError(f"{finding.name}: {finding.text}; {finding.fix}.")
    return [f"{finding.name}: {finding.text}; {finding.fix}" for finding in found if finding.level == "warn"]
