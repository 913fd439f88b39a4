"""What is known about GPUs by name: memory, speeds and links. Figures are the vendors' (dense, no sparsity)."""

import difflib
import json
import math
import os
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from .errors import UserError

NODE_LINK_GBS = 50.0  # a 400 Gbit/s adapter for each GPU, as in NVIDIA's DGX H100 and B200; clouds often have much less
USER_TABLE = "ZEROFIT_GPUS"  # environment variable: a JSON file {"name": {"memory_gib": ..., ...}} with more GPUs


@dataclass(frozen=True)
class Gpu:
    """memory_gib: what the driver shows as total; tflops: 16-bit tensor-core products with fp32 accumulation;
    memory_gbs: device memory, GB/s; link_gbs: to the other GPUs of the node, one direction, GB/s;
    host_gbs: to host memory, one direction, GB/s; bf16: has bf16 arithmetic; node_gbs: this GPU's share of the network to
    other nodes, one direction, GB/s;
    device_name: whole words of torch.cuda.get_device_name(), more telling ones first in the table.
    """

    device_name: str
    memory_gib: float
    tflops: float
    memory_gbs: float
    link_gbs: float
    host_gbs: float
    bf16: bool = True
    node_gbs: float = NODE_LINK_GBS


# Data sheets of NVIDIA. memory_gib as nvidia-smi shows it; link_gbs: half of NVLink's two-way figure, or PCIe.
GPUS = {
    "b200-180g": Gpu("B200", 179.0, 2250.0, 8000, 900, 56),
    "h200-141g": Gpu("H200", 139.8, 989.0, 4800, 450, 56),
    "h100-80g-pcie": Gpu("H100 PCIe", 79.6, 756.0, 2000, 56, 56),
    "h100-94g-nvl": Gpu("H100 NVL", 93.6, 835.0, 3900, 300, 56),
    "h100-80g": Gpu("H100", 79.6, 989.0, 3350, 450, 56),
    "a100-40g": Gpu("A100-SXM4-40GB", 39.4, 312.0, 1555, 300, 25),
    "a100-40g-pcie": Gpu("A100-PCIE-40GB", 39.4, 312.0, 1555, 25, 25),
    "a100-80g": Gpu("A100", 79.3, 312.0, 2039, 300, 25),
    "l40s-48g": Gpu("L40S", 44.5, 362.0, 864, 25, 25),
    "l40-48g": Gpu("L40", 44.5, 181.0, 864, 25, 25),
    "l4-24g": Gpu("L4", 22.0, 121.0, 300, 25, 25),
    "a10g-24g": Gpu("A10G", 22.0, 70.0, 600, 25, 25),
    "a10-24g": Gpu("A10", 22.0, 125.0, 600, 25, 25),
    "v100-32g": Gpu("V100-SXM2-32GB", 31.7, 125.0, 900, 150, 12, bf16=False),
    "v100-16g": Gpu("V100", 15.8, 125.0, 900, 150, 12, bf16=False),
    "t4-16g": Gpu("T4", 14.6, 65.0, 320, 12, 12, bf16=False),
    "rtx5090-32g": Gpu("RTX 5090", 31.4, 209.5, 1792, 56, 56),
    "rtx4090-24g": Gpu("RTX 4090", 23.5, 165.2, 1008, 25, 25),
    "rtx3090-24g": Gpu("RTX 3090", 23.6, 71.0, 936, 25, 25),
}


OTHER_CHIPS = {"MIG", "Laptop"}  # words of a device name: a slice of the GPU, a smaller chip of the same name
BEFORE_SM_75 = ("V100", "P100", "P40")  # in device names: GPUs for which CUDA 13 has no kernels


def table() -> dict[str, Gpu]:
    """The GPUs by name, the user's own (ZEROFIT_GPUS=file.json) first.

    Raises: UserError for a file that cannot be read, naming it and the key.
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
    """Return whether the value is of the kind that this field of Gpu has: a name, true or false, a number above 0."""
    if key == "device_name":
        return isinstance(value, str) and bool(value.strip())
    if key == "bf16":
        return isinstance(value, bool)
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def find(name: str, count: int | None = None) -> Gpu:
    """Return the GPU of that name in the table; "detect": this machine's, with the memory that can be used now.

    Args: count: GPUs of this machine that the job uses (default: all); the one with the least memory counts.
    Raises: UserError for a name that is not in the table, or when there is no GPU to detect.
    """
    known = table()
    if name == "detect":
        from . import devices

        if not devices.visible():
            why = devices.why_torch_sees_none() or "no GPU is visible to PyTorch"
            raise UserError(f"--gpu detect: {why}; or name one: {', '.join(known)}.")
        device, note = devices.tightest(count)
        if note:
            print(f"note: {note}", flush=True)
        known_gpu = by_device_name(device.name) or _slice(device.name)
        if known_gpu is None:
            print(f"note: the speeds of {device.name} are not known ({USER_TABLE}=file.json tells them): times are estimated "
                  "with an A100's", flush=True)  # fmt: skip
        base = asdict(known_gpu or GPUS["a100-80g"])
        return Gpu(**{**base, "device_name": device.name, "bf16": device.capability >= (8, 0),
                      "memory_gib": round(device.usable_bytes / 2**30, 2)})  # fmt: skip
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, 1, 0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(
            f"--gpu {name}: not in the table; {hint}Known: {', '.join(known)}; more with {USER_TABLE}=file.json."
        )
    return known[name.lower()]


def by_device_name(device_name: str) -> Gpu | None:
    """Return the GPU of the table that this is; None: none, or another chip or a part of one under its name."""
    words = set(device_name.split())
    for gpu in table().values():
        # GH200 and GB200, with a CPU in the package, have the GPUs H200 and B200.
        named = re.search(rf"(?<!\w)G?{re.escape(gpu.device_name)}(?!\w)", device_name)
        if named and not (OTHER_CHIPS & words) - set(gpu.device_name.split()):
            return gpu
    return None


def _slice(device_name: str) -> Gpu | None:
    """Return a MIG slice's part of its card's speeds: "... MIG 3g.40gb" has 3 of 7 compute slices; None: no slice."""
    card, is_slice, profile = device_name.partition(" MIG ")
    whole = by_device_name(card)
    if not is_slice or whole is None or not profile[:1].isdigit():
        return None
    share = int(profile[0]) / 7
    return replace(whole, tflops=whole.tflops * share, memory_gbs=whole.memory_gbs * share)


def note(gpu: Gpu) -> str | None:
    """Return what a plan for this GPU should say about the pinned torch build; None: nothing."""
    if not any(name in gpu.device_name for name in BEFORE_SM_75):
        return None
    return (
        f"note: {gpu.device_name}: the pinned torch is built for CUDA 13, which has no kernels for GPUs before compute capability "
        "7.5; the plan holds for a torch build for CUDA 12 that still has them"
    )


def peak_flops(device_name: str) -> float | None:
    """Peak FLOP/s of 16-bit products, or None for a device that is not in the table."""
    gpu = by_device_name(device_name)
    return gpu.tflops * 1e12 if gpu else None
