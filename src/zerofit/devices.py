"""Read which GPUs this machine has and what of them is free, without opening a CUDA context.

A context takes 0.3 to 0.6 GiB of each GPU for as long as its process lives, and GPUs in EXCLUSIVE_PROCESS mode give one to a
single process. The launcher therefore asks torch for names and sizes only (which needs none) and nvidia-smi for the rest.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
# Bytes in use on a GPU up to which nobody else is taken to use it: the driver's own, a display, a rank of this very job.
NOBODY_ELSE_BYTES = GIB
FIELDS = ("uuid", "name", "memory.total", "memory.free", "driver_version", "compute_mode")
SMI_SECONDS = 30
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
MINIMUM_DRIVER = "580"  # of CUDA 13.0, which the pinned torch is built for


@dataclass(frozen=True)
class Device:
    """A GPU as this process sees it. index: torch's; free_bytes: None where nvidia-smi does not tell (a MIG slice, or no
    nvidia-smi); exclusive: only one process may use it."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int | None
    capability: tuple[int, int]
    exclusive: bool = False

    @property
    def usable_bytes(self) -> int:
        """What a job that starts now can have, its CUDA context included."""
        if self.free_bytes is None or self.total_bytes - self.free_bytes < NOBODY_ELSE_BYTES:
            return self.total_bytes
        return self.free_bytes


def visible() -> list[Device]:
    """Return the GPUs that torch can use, in its order."""
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
    """Return whether torch can use a GPU here.

    `import deepspeed` sets PYTORCH_NVML_BASED_CUDA_CHECK=1, with which torch.cuda.is_available() counts GPUs whose driver is
    too old for it.
    """
    import torch

    before = os.environ.pop(NVML_CHECK, None)
    try:
        return torch.cuda.is_available()
    finally:
        if before is not None:
            os.environ[NVML_CHECK] = before


def tightest(count: int | None = None) -> tuple[Device, str | None]:
    """Return the GPU with the least usable memory of a job's `count` (default: all) GPUs here, and a sentence about it
    where the GPUs differ or somebody else uses them."""
    devices = visible()[:count]
    device = min(devices, key=lambda d: d.usable_bytes)
    if device.usable_bytes == max(d.total_bytes for d in devices):
        return device, None
    text = f"GPU {device.index} ({device.name}) has the least memory of the job's {len(devices)}"
    if device.usable_bytes < device.total_bytes:
        text += f", {device.usable_bytes / GIB:.1f} of {device.total_bytes / GIB:.1f} GiB free (nvidia-smi shows who uses it)"
    return device, f"{text}: the plan is for {device.usable_bytes / GIB:.1f} GiB"


def nvidia_smi() -> list[dict[str, str]]:
    """Return {field: value} of FIELDS for every GPU of the machine, sizes in MiB; [] where nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        asked = subprocess.run(
            [program, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=SMI_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    if asked.returncode:
        return []
    lines = [[cell.strip() for cell in line.split(", ")] for line in asked.stdout.splitlines()]
    return [dict(zip(FIELDS, cells, strict=True)) for cells in lines if len(cells) == len(FIELDS)]


def why_torch_sees_none() -> str | None:
    """Return why torch sees no GPU on a machine that has some, with the fix; None where it has none, or where
    CUDA_VISIBLE_DEVICES hides them."""
    import torch

    if torch_sees_some() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    rows = nvidia_smi()
    if not rows and not Path("/dev/nvidia0").exists():
        return None
    driver = rows[0]["driver_version"] if rows else "unknown"
    there = f"{len(rows)} x {rows[0]['name']}" if rows else "/dev/nvidia0"
    if torch.version.cuda is None:
        return (
            f"this machine has a GPU ({there}, driver {driver}), but the installed torch {torch.__version__} is a build "
            "without CUDA: run `make clean install` on this machine"
        )
    return (
        f"this machine has a GPU ({there}), but torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use it "
        f"with driver {driver}: CUDA 13 needs driver {MINIMUM_DRIVER} or newer; update the driver, or install the CUDA 12 "
        f"build of the same torch (pytorch.org/get-started lists it)"
    )
