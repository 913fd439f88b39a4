"""List this machine's GPUs without opening a CUDA context, and look up known GPUs.

A context takes 0.3 to 0.6 GiB of each GPU until its process ends, and a GPU in EXCLUSIVE_PROCESS mode accepts only one
process. The launcher therefore reads names and sizes from torch, without a context, and the rest from nvidia-smi.
"""

import difflib
import json
import math
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from zerofit.base import distributed
from zerofit.base.errors import UserError

GIB = 2**30

# A GPU with fewer bytes in use counts as idle: the driver, a display or a rank of this job may hold them.
MAX_IDLE_BYTES = GIB

FIELDS = ("uuid", "name", "memory.total", "memory.free", "driver_version", "compute_mode")

SMI_SECONDS = 30

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"

MINIMUM_DRIVER = "580"  # for CUDA 13.0, which the pinned torch is built for


@dataclass(frozen=True)
class Device:
    """A GPU visible to this process."""

    index: int  # as torch counts
    name: str
    total_bytes: int
    free_bytes: int | None  # None if unknown (a MIG slice, or nvidia-smi is missing)
    capability: tuple[int, int]  # compute capability, such as (9, 0)
    exclusive: bool = False  # only one process may use it

    @property
    def usable_bytes(self) -> int:
        """Return the bytes available to a new job, including its CUDA context."""
        if self.free_bytes is None or self.total_bytes - self.free_bytes < MAX_IDLE_BYTES:
            return self.total_bytes
        return self.free_bytes


def visible() -> list[Device]:
    """Return the GPUs that torch can use, in torch's order."""
    import torch

    rows = {row["uuid"]: row for row in nvidia_smi()}
    devices = []
    for index in range(torch.cuda.device_count() if torch_sees_gpu() else 0):
        properties = torch.cuda.get_device_properties(index)
        row = rows.get(f"GPU-{properties.uuid}", {})
        free = row.get("memory.free", "")
        devices.append(Device(
            index, properties.name, properties.total_memory, int(free) * 2**20 if free.isdigit() else None,
            (properties.major, properties.minor), row.get("compute_mode") == "Exclusive_Process",
        ))  # fmt: skip
    return devices


def torch_sees_gpu() -> bool:
    """Return whether torch can use a GPU on this machine.

    `import deepspeed` sets PYTORCH_NVML_BASED_CUDA_CHECK=1, which makes torch.cuda.is_available() count GPUs whose
    driver is too old for torch.
    """
    import torch

    before = os.environ.pop(NVML_CHECK, None)
    try:
        return torch.cuda.is_available()
    finally:
        if before is not None:
            os.environ[NVML_CHECK] = before


def tightest(count: int | None = None) -> tuple[Device, str | None]:
    """Return the GPU with the least usable memory, and a note on it (None if all are equal and idle).

    Args: count: number of GPUs that the job uses on this machine; default: all."""
    devices = visible()[:count]
    device = min(devices, key=lambda d: d.usable_bytes)
    if device.usable_bytes == max(d.total_bytes for d in devices):
        return device, None
    text = f"GPU {device.index} ({device.name}) has the least memory of the job's {len(devices)}"
    if device.usable_bytes < device.total_bytes:
        free = f"{device.usable_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free"
        text += f", {free} (nvidia-smi shows who uses it)"
    return device, f"{text}: the plan is for {device.usable_bytes / GIB:.1f} GiB"


def missing_for_triton() -> list[str]:
    """Return the missing requirements of Triton for compiling a kernel; [] if none."""
    missing = []
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        missing.append("no C compiler (gcc, clang, CC=)")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        missing.append(f"no {header}")
    return missing


def nvidia_smi(fields: tuple[str, ...] = FIELDS) -> list[dict[str, str]]:
    """Return {field: value} for every GPU, sizes in MiB; [] if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        result = subprocess.run(
            [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=SMI_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    if result.returncode:
        return []
    lines = [[cell.strip() for cell in line.split(", ")] for line in result.stdout.splitlines()]
    return [dict(zip(fields, cells, strict=True)) for cells in lines if len(cells) == len(fields)]


def why_no_gpu() -> str | None:
    """Return why torch sees no GPU on a machine with GPUs, and the fix.

    None if torch sees a GPU, the machine is without one, or CUDA_VISIBLE_DEVICES hides them."""
    import torch

    if torch_sees_gpu() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    rows = nvidia_smi()
    if not rows and not Path("/dev/nvidia0").exists():
        return None
    driver = rows[0]["driver_version"] if rows else "unknown"
    gpus = f"{len(rows)} x {rows[0]['name']}" if rows else "/dev/nvidia0"
    if torch.version.cuda is None:
        return (
            f"this machine has a GPU ({gpus}, driver {driver}), but the installed torch {torch.__version__} was built "
            "without CUDA: run `make clean install` on this machine"
        )
    return (
        f"this machine has a GPU ({gpus}), but torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot "
        f"use it with driver {driver}: CUDA 13 needs driver {MINIMUM_DRIVER} or newer; update the driver, or install "
        f"the CUDA 12 build of the same torch (pytorch.org/get-started lists it)"
    )


NODE_LINK_GBS = 50.0  # 400 Gbit/s per GPU, as in NVIDIA's DGX H100 and B200; clouds often have much less

FP8_CAPABILITY = (8, 9)  # compute capability: Ada, Hopper, Blackwell

USER_TABLE = "ZEROFIT_GPUS"  # environment variable: JSON file {"name": {"memory_gib": ..., ...}} that adds GPUs


@dataclass(frozen=True)
class Gpu:
    """The specification of a GPU type."""

    device_name: str  # complete words in torch.cuda.get_device_name(); specific names come first in the table
    memory_gib: float  # total reported by the driver
    tflops: float  # 16-bit tensor-core products with fp32 accumulation
    memory_gbs: float  # device memory, GB/s
    link_gbs: float  # to the other GPUs of the node, one direction, GB/s
    host_gbs: float  # to host memory, one direction, GB/s
    bf16: bool = True  # supports bf16 arithmetic
    node_gbs: float = NODE_LINK_GBS  # share of the network to other nodes, one direction, GB/s
    fp8: bool = False  # supports matrix products in 8-bit floats

    @property
    def groups_products(self) -> bool:
        """Return whether torch multiplies by all experts of a layer in one kernel: H100, B200 and similar GPUs.

        torch 2.13 (GroupedBlas.cpp) requires compute capability 9 or 10 and bf16; otherwise one product per expert.
        """
        return bool(re.search(r"\bG?[HB]\d{2,3}\b", self.device_name))


# From NVIDIA's data sheets and whitepapers. memory_gib: as nvidia-smi or torch's out-of-memory messages report it;
# link_gbs: half of NVLink's bidirectional figure, or PCIe; host_gbs: achieved rates of PCIe 3, 4 and 5 x16, and half of
# NVLink-C2C's bidirectional figure (the two GPUs of a GB200 share it).
GPUS = {
    name: Gpu(**numbers)
    for name, numbers in json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8")).items()
}

# Alternative names of GPUs in the table.
ALSO_NAMED = {
    "A100-PCIE-80GB": "A100 80GB PCIe", "A800-PCIE-80GB": "A800 80GB PCIe", "A800 40GB Active": "A800-PCIE-40GB",
}  # fmt: skip

# Words in a device name that mark a slice of the GPU or a different chip of the same name.
OTHER_CHIPS = {"MIG", "Laptop", "Ti", "SUPER"}

AMD = r"(amd|instinct|radeon|mi\d)"  # start of the names of GPUs that the kit's libraries do not support

BEFORE_SM_75 = ("V100", "P100", "P40")  # in device names: GPUs without kernels in CUDA 13


def table() -> dict[str, Gpu]:
    """Return {name: Gpu}, with the user's entries (ZEROFIT_GPUS=file.json) first.

    Raises: UserError with file and key for an unreadable file or an invalid entry.
    """
    file = os.environ.get(USER_TABLE)
    if not file:
        return GPUS
    try:
        entries = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        names = {f.name for f in fields(Gpu)}
        custom = {}
        for name, entry in entries.items():
            if unknown := set(entry) - names:
                raise UserError(
                    f"{USER_TABLE}={file}: {name}: unknown key {min(unknown)!r}; known: {', '.join(names)}."
                )
            if wrong := [key for key, value in entry.items() if not _fits(key, value)]:
                raise UserError(f"{USER_TABLE}={file}: {name}: {wrong[0]} cannot be {json.dumps(entry[wrong[0]])}.")
            base = asdict(GPUS.get(name.lower(), replace(GPUS["a100-80g"], device_name=name)))
            custom[name.lower()] = Gpu(**{**base, **entry})
    except OSError as error:
        raise UserError(f"{USER_TABLE}={file}: cannot be read: {error.strerror}.") from None
    except RuntimeError as error:  # ~unknown_user
        raise UserError(f"{USER_TABLE}={file}: cannot be expanded: {error}.") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f'{USER_TABLE}={file}: must be JSON like {{"my-gpu": {{"memory_gib": 96}}}}: {error}.'
        ) from None
    return custom | {name: gpu for name, gpu in GPUS.items() if name not in custom}


def _fits(key: str, value) -> bool:
    """Return whether the value is valid for this field of Gpu: a name, a boolean or a positive number."""
    if key == "device_name":
        return isinstance(value, str) and bool(value.strip())
    if key in ("bf16", "fp8"):
        return isinstance(value, bool)
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def find(name: str, count: int | None = None) -> Gpu:
    """Return the GPU with this name from the table; "detect": this machine's GPU, with its usable memory.

    Args: count: number of GPUs that the job uses here (default: all); the GPU with the least memory is returned.
    Raises: UserError for a name that is not in the table, or if no GPU is detected.
    """
    known = table()
    if name == "detect":
        if not visible():
            why = why_no_gpu() or "no GPU is visible to PyTorch"
            raise UserError(f"--gpu_type detect: {why}. To plan for another machine, set its GPU: {', '.join(known)}.")
        device, note = tightest(count)
        if note:
            print(f"note: {note}", flush=True)
        listed = by_device_name(device.name) or _slice(device.name)
        if listed is None:
            print(f"note: the speed of {device.name} is unknown (set it in {USER_TABLE}=file.json): times are for an "
                  "A100", flush=True)  # fmt: skip
        base = asdict(listed or GPUS["a100-80g"])
        return Gpu(**{**base, "device_name": device.name, "memory_gib": round(device.usable_bytes / 2**30, 2),
                      "bf16": device.capability >= (8, 0), "fp8": device.capability >= FP8_CAPABILITY})  # fmt: skip
    matches = [name.lower()] if name.lower() in known else [key for key in known if _stands_for(name, key)]
    if not matches and (device := by_device_name(name)):  # nvidia-smi's name
        matches = [key for key, gpu in known.items() if gpu == device]
    if len(matches) > 1:
        raise UserError(f"--gpu_type {name}: matches several GPUs: {', '.join(matches)}; use one of these names.")
    if not matches and re.match(AMD, name.lower()):
        raise UserError(
            f"--gpu_type {name}: AMD GPUs are not supported yet: the pinned torch, DeepSpeed and bitsandbytes are CUDA "
            f"builds. To plan for its memory anyway, add an entry in {USER_TABLE}=file.json."
        )
    if not matches:
        close = difflib.get_close_matches(name.lower(), known, 1, 0.7)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise UserError(
            f"--gpu_type {name}: not in the table{hint} Known: {', '.join(known)}; add it in {USER_TABLE}=file.json."
        )
    return known[matches[0]]


def _stands_for(name: str, key: str) -> bool:
    """Return whether a name is a key of the table without its memory size: h200, 4090, "RTX 4090", h100-sxm."""

    def plain(text: str) -> str:
        return re.sub(r"nvidia|geforce|rtx|sxm\d?|[^a-z0-9]", "", re.sub(r"(?<=\d)gb", "g", text.lower()))

    return plain(name) in (plain(key), plain(re.sub(r"-\d+g", "", key)))


def by_device_name(device_name: str) -> Gpu | None:
    """Return the table's entry for a torch device name; None for an unknown GPU, a MIG slice or a laptop chip."""
    for name, listed in ALSO_NAMED.items():
        device_name = device_name.replace(name, listed)
    words = set(device_name.split())
    for gpu in table().values():
        matches = re.search(rf"(?<!\w){re.escape(gpu.device_name)}(?!\w)", device_name)
        if matches and not (OTHER_CHIPS & words) - set(gpu.device_name.split()):
            return gpu
    return None


def _slice(device_name: str) -> Gpu | None:
    """Return a Gpu with a MIG slice's share of the speed ("MIG 3g.40gb": 3 of 7); None if it is not a slice."""
    card, is_slice, profile = device_name.partition(" MIG ")
    gpu = by_device_name(card)
    if not is_slice or gpu is None or not profile[:1].isdigit():
        return None
    share = int(profile[0]) / 7
    return replace(gpu, tflops=gpu.tflops * share, memory_gbs=gpu.memory_gbs * share)


def note(gpu: Gpu) -> str | None:
    """Return a note if the pinned torch build lacks kernels for this GPU; else None."""
    if not any(name in gpu.device_name for name in BEFORE_SM_75):
        return None
    return (
        f"note: {gpu.device_name}: the pinned torch is built for CUDA 13, without kernels for GPUs before compute "
        "capability 7.5; the plan is valid for a torch build for CUDA 12 that still has them"
    )


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of 16-bit matrix products; None for a device that is not in the table."""
    gpu = by_device_name(device_name)
    return gpu.tflops * 1e12 if gpu else None


def check_devices(count: int, use_cpu: bool) -> None:
    """Check that this machine has a GPU (or CPU core) for each of `count` processes.

    Raises: UserError for more processes than GPUs or, without a GPU, for more than 8 per core.
    """
    import torch

    if use_cpu or not torch_sees_gpu():
        cores = distributed.cores()
        if count > 8 * cores:
            raise UserError(f"GPUS={count}: this machine has only {cores} CPU cores, without a GPU.")
        if count > cores:
            print(
                f"note: {count} CPU processes share {cores} core{'s' * (cores > 1)}; expect it to be slow", flush=True
            )
    elif count > torch.cuda.device_count():
        raise UserError(
            f"GPUS={count}: this machine has {torch.cuda.device_count()}; use GPUS={torch.cuda.device_count()}."
        )


def is_ampere_or_later(planned: Gpu | None) -> bool:
    """Return whether the planned GPU, or else this machine's, supports bf16, FlashAttention and Triton kernels."""
    import torch

    return planned.bf16 if planned else torch.cuda.is_bf16_supported(including_emulation=False)


def groups_products(planned: Gpu | None) -> bool:
    """Return whether the planned GPU, or else this machine's, multiplies by all experts in one bf16 kernel."""
    import torch

    return planned.groups_products if planned else torch.cuda.get_device_capability()[0] in (9, 10)


def cpu_has_bf16() -> bool:
    """Return whether this CPU has bf16 instructions."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
