"""List this machine's GPUs without opening a CUDA context; table of known GPUs.

A context takes 0.3 to 0.6 GiB of each GPU for the life of its process, and a GPU in EXCLUSIVE_PROCESS mode has room for
one process only. The launcher therefore reads names and sizes from torch (which needs no context) and the rest from
nvidia-smi.
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

# A GPU with fewer bytes in use counts as free: the driver, a display or a rank of this job may hold them.
NOBODY_ELSE_BYTES = GIB

FIELDS = ("uuid", "name", "memory.total", "memory.free", "driver_version", "compute_mode")

SMI_SECONDS = 30

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"

MINIMUM_DRIVER = "580"  # of CUDA 13.0, which the pinned torch is built for


@dataclass(frozen=True)
class Device:
    """A GPU visible to this process."""

    index: int  # torch's
    name: str
    total_bytes: int
    free_bytes: int | None  # None where nvidia-smi has no number (a MIG slice, or no nvidia-smi)
    capability: tuple[int, int]  # of CUDA, such as (9, 0)
    exclusive: bool = False  # only one process may use it

    @property
    def usable_bytes(self) -> int:
        """Return the bytes available to a job that starts now, including its CUDA context."""
        if self.free_bytes is None or self.total_bytes - self.free_bytes < NOBODY_ELSE_BYTES:
            return self.total_bytes
        return self.free_bytes


def visible() -> list[Device]:
    """Return the GPUs that torch can use, in torch's order."""
    import torch

    rows = {row["uuid"]: row for row in nvidia_smi()}
    devices = []
    for index in range(torch.cuda.device_count() if torch_sees_some() else 0):
        properties = torch.cuda.get_device_properties(index)
        row = rows.get(f"GPU-{properties.uuid}", {})
        free = row.get("memory.free", "")
        devices.append(Device(
            index, properties.name, properties.total_memory, int(free) * 2**20 if free.isdigit() else None,
            (properties.major, properties.minor), row.get("compute_mode") == "Exclusive_Process",
        ))  # fmt: skip
    return devices


def torch_sees_some() -> bool:
    """Return whether torch can use a GPU on this machine.

    `import deepspeed` sets PYTORCH_NVML_BASED_CUDA_CHECK=1, with which torch.cuda.is_available() also counts GPUs whose
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
    """Return the GPU with the least usable memory, and a sentence on it (None: all are equal and free).

    Args: count: the number of GPUs that the job uses on this machine, from the first; default: all."""
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
    """Return what this machine lacks of what Triton needs to compile a kernel; [] if nothing."""
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


def why_torch_sees_none() -> str | None:
    """Return why torch sees no GPU on a machine with GPUs, and the fix.

    None if torch sees one, or the machine has none, or CUDA_VISIBLE_DEVICES hides them."""
    import torch

    if torch_sees_some() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    rows = nvidia_smi()
    if not rows and not Path("/dev/nvidia0").exists():
        return None
    driver = rows[0]["driver_version"] if rows else "unknown"
    gpus = f"{len(rows)} x {rows[0]['name']}" if rows else "/dev/nvidia0"
    if torch.version.cuda is None:
        return (
            f"this machine has a GPU ({gpus}, driver {driver}), but the installed torch {torch.__version__} is a build "
            "without CUDA: run `make clean install` on this machine"
        )
    return (
        f"this machine has a GPU ({gpus}), but torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot "
        f"use it with driver {driver}: CUDA 13 needs driver {MINIMUM_DRIVER} or newer; update the driver, or install "
        f"the CUDA 12 build of the same torch (pytorch.org/get-started lists it)"
    )


NODE_LINK_GBS = 50.0  # a 400 Gbit/s adapter for each GPU, as in NVIDIA's DGX H100 and B200; clouds often have much less

FP8_CAPABILITY = (8, 9)  # of CUDA: Ada, Hopper, Blackwell

USER_TABLE = "ZEROFIT_GPUS"  # environment variable: a JSON file {"name": {"memory_gib": ..., ...}} with more GPUs


@dataclass(frozen=True)
class Gpu:
    """A type of GPU by its numbers."""

    device_name: str  # whole words of torch.cuda.get_device_name(); more specific names first in the table
    memory_gib: float  # the total that the driver shows
    tflops: float  # 16-bit tensor-core products with fp32 accumulation
    memory_gbs: float  # device memory, GB/s
    link_gbs: float  # to the other GPUs of the node, one direction, GB/s
    host_gbs: float  # to host memory, one direction, GB/s
    bf16: bool = True  # whether it has bf16 arithmetic
    node_gbs: float = NODE_LINK_GBS  # its share of the network to other nodes, one direction, GB/s
    fp8: bool = False  # whether it has products of 8-bit floats

    @property
    def groups_products(self) -> bool:
        """Return whether torch multiplies by all experts of a layer in one kernel: H100, B200 and their relatives.

        GroupedBlas.cpp of torch 2.13: compute capability 9 or 10, in bf16; else one product for each expert.
        """
        return bool(re.search(r"\bG?[HB]\d{2,3}\b", self.device_name))


# From NVIDIA's data sheets and whitepapers. memory_gib as nvidia-smi shows it, or torch's total
# where an out-of-memory message tells it; link_gbs: half of NVLink's two-way figure, or PCIe; host_gbs: what PCIe 3, 4
# and 5 x16 reach of theirs, and half of NVLink-C2C's two-way figure (the two GPUs of a GB200 share it).
GPUS = {
    name: Gpu(**numbers)
    for name, numbers in json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8")).items()
}

# Other names of cards in the table.
ALSO_NAMED = {
    "A100-PCIE-80GB": "A100 80GB PCIe", "A800-PCIE-80GB": "A800 80GB PCIe", "A800 40GB Active": "A800-PCIE-40GB",
}  # fmt: skip

# Words of a device name: a slice of the GPU, another chip of the same name.
OTHER_CHIPS = {"MIG", "Laptop", "Ti", "SUPER"}

AMD = r"(amd|instinct|radeon|mi\d)"  # how names of GPUs begin for which there is no build of the kit's libraries

BEFORE_SM_75 = ("V100", "P100", "P40")  # in device names: GPUs for which CUDA 13 has no kernels


def table() -> dict[str, Gpu]:
    """Return {name: Gpu}, the user's own (ZEROFIT_GPUS=file.json) first.

    Raises: UserError for a file that cannot be read or a wrong entry, naming file and key.
    """
    file = os.environ.get(USER_TABLE)
    if not file:
        return GPUS
    try:
        entries = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        names = {f.name for f in fields(Gpu)}
        own = {}
        for name, entry in entries.items():
            if unknown := set(entry) - names:
                raise UserError(
                    f"{USER_TABLE}={file}: {name}: unknown key {min(unknown)!r}; known: {', '.join(names)}."
                )
            if wrong := [key for key, value in entry.items() if not _fits(key, value)]:
                raise UserError(f"{USER_TABLE}={file}: {name}: {wrong[0]} cannot be {json.dumps(entry[wrong[0]])}.")
            base = asdict(GPUS.get(name.lower(), replace(GPUS["a100-80g"], device_name=name)))
            own[name.lower()] = Gpu(**{**base, **entry})
    except OSError as error:
        raise UserError(f"{USER_TABLE}={file}: cannot be read: {error.strerror}.") from None
    except RuntimeError as error:  # ~nobody
        raise UserError(f"{USER_TABLE}={file}: cannot be looked up: {error}.") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f'{USER_TABLE}={file}: must be JSON like {{"my-gpu": {{"memory_gib": 96}}}}: {error}.'
        ) from None
    return own | {name: gpu for name, gpu in GPUS.items() if name not in own}


def _fits(key: str, value) -> bool:
    """Return whether the value fits this field of Gpu: a name, true or false, or a number above 0."""
    if key == "device_name":
        return isinstance(value, str) and bool(value.strip())
    if key in ("bf16", "fp8"):
        return isinstance(value, bool)
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def find(name: str, count: int | None = None) -> Gpu:
    """Return the table's GPU of that name; "detect": this machine's, with its usable memory.

    Args: count: the number of GPUs that the job uses here (default: all); the one with the least memory is returned.
    Raises: UserError for a name that is not in the table, or when there is no GPU to detect.
    """
    known = table()
    if name == "detect":
        if not visible():
            why = why_torch_sees_none() or "no GPU is visible to PyTorch"
            raise UserError(f"--gpu_type detect: {why}. To plan for another machine, name its GPU: {', '.join(known)}.")
        device, note = tightest(count)
        if note:
            print(f"note: {note}", flush=True)
        known_gpu = by_device_name(device.name) or _slice(device.name)
        if known_gpu is None:
            print(f"note: the speeds of {device.name} are not known ({USER_TABLE}=file.json tells them): times are "
                  "estimated with an A100's", flush=True)  # fmt: skip
        base = asdict(known_gpu or GPUS["a100-80g"])
        return Gpu(**{**base, "device_name": device.name, "memory_gib": round(device.usable_bytes / 2**30, 2),
                      "bf16": device.capability >= (8, 0), "fp8": device.capability >= FP8_CAPABILITY})  # fmt: skip
    meant = [name.lower()] if name.lower() in known else [key for key in known if _stands_for(name, key)]
    if not meant and (device := by_device_name(name)):  # nvidia-smi's name
        meant = [key for key, gpu in known.items() if gpu == device]
    if len(meant) > 1:
        raise UserError(f"--gpu_type {name}: there are several: {', '.join(meant)}; name one of them.")
    if not meant and re.match(AMD, name.lower()):
        raise UserError(
            f"--gpu_type {name}: AMD's GPUs are not supported yet: the pinned torch, DeepSpeed and bitsandbytes are "
            f"those for CUDA. An entry in {USER_TABLE}=file.json gives figures for its memory all the same."
        )
    if not meant:
        close = difflib.get_close_matches(name.lower(), known, 1, 0.7)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise UserError(
            f"--gpu_type {name}: not in the table{hint} Known: {', '.join(known)}; more with {USER_TABLE}=file.json."
        )
    return known[meant[0]]


def _stands_for(name: str, key: str) -> bool:
    """Return whether a user's name is a table's without its memory: h200, 4090, "RTX 4090", h100-sxm."""

    def plain(text: str) -> str:
        return re.sub(r"nvidia|geforce|rtx|sxm\d?|[^a-z0-9]", "", re.sub(r"(?<=\d)gb", "g", text.lower()))

    return plain(name) in (plain(key), plain(re.sub(r"-\d+g", "", key)))


def by_device_name(device_name: str) -> Gpu | None:
    """Return the table's entry for a torch device name; None if unknown, a MIG slice or a laptop chip."""
    for name, listed in ALSO_NAMED.items():
        device_name = device_name.replace(name, listed)
    words = set(device_name.split())
    for gpu in table().values():
        matches = re.search(rf"(?<!\w){re.escape(gpu.device_name)}(?!\w)", device_name)
        if matches and not (OTHER_CHIPS & words) - set(gpu.device_name.split()):
            return gpu
    return None


def _slice(device_name: str) -> Gpu | None:
    """Return a Gpu with a MIG slice's share of the speeds ("MIG 3g.40gb": 3 of 7); None for no slice."""
    card, is_slice, profile = device_name.partition(" MIG ")
    gpu = by_device_name(card)
    if not is_slice or gpu is None or not profile[:1].isdigit():
        return None
    share = int(profile[0]) / 7
    return replace(gpu, tflops=gpu.tflops * share, memory_gbs=gpu.memory_gbs * share)


def note(gpu: Gpu) -> str | None:
    """Return a note if the pinned torch build has no kernels for this GPU; else None."""
    if not any(name in gpu.device_name for name in BEFORE_SM_75):
        return None
    return (
        f"note: {gpu.device_name}: the pinned torch is built for CUDA 13, which has no kernels for GPUs before compute "
        "capability 7.5; the plan holds for a torch build for CUDA 12 that still has them"
    )


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOP/s of 16-bit products; None for a device that is not in the table."""
    gpu = by_device_name(device_name)
    return gpu.tflops * 1e12 if gpu else None


def check_devices(count: int, use_cpu: bool) -> None:
    """Check that this machine has a GPU (or CPU cores) for each of `count` processes.

    Raises: UserError for more processes than GPUs; without a GPU for more than 8 a core (above 1 prints a note).
    """
    import torch

    if use_cpu or not torch_sees_some():
        cores = distributed.cores()
        if count > 8 * cores:
            raise UserError(f"GPUS={count}: this machine has no GPU and only {cores} CPU cores.")
        if count > cores:
            print(
                f"note: {count} CPU processes share {cores} core{'s' * (cores > 1)}; expect it to be slow", flush=True
            )
    elif count > torch.cuda.device_count():
        raise UserError(
            f"GPUS={count}: this machine has {torch.cuda.device_count()}; use GPUS={torch.cuda.device_count()}."
        )


def is_ampere_or_later(planned: Gpu | None) -> bool:
    """Return whether the planned GPU, else this machine's, has bf16 arithmetic, FlashAttention and Triton's kernels."""
    import torch

    return planned.bf16 if planned else torch.cuda.is_bf16_supported(including_emulation=False)


def groups_products(planned: Gpu | None) -> bool:
    """Return whether the planned GPU, else this machine's, has one kernel for the products of all experts in bf16."""
    import torch

    return planned.groups_products if planned else torch.cuda.get_device_capability()[0] in (9, 10)


def cpu_has_bf16() -> bool:
    """Return whether this CPU multiplies bf16 numbers itself."""
    import torch

    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16"))
