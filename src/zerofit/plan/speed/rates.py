"""Read the rates of GPUs, links and hosts: rates.json, and what `make calibrate` has measured here."""

import functools
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from zerofit.base import hardware
from zerofit.base.hardware import Gpu
from zerofit.base.paths import cache_root

FILE = Path(__file__).with_name("rates.json")

FOLDER = "rates"  # of the cache, with a file for each GPU that was measured

# What a calibration may measure: names of Rates, in units of a second and a byte.
MEASURED = (
    *("products", "fp32_products", "fp8_products", "attention_forward", "attention_backward", "memory", "unpacking"),
    *("kernel", "backward_kernel", "host", "link"),
)

TILE = 128  # rows and columns of the result that one multiprocessor computes at a time

TAIL = 0.35  # share of a wave of tiles that is lost at the end of a product: the last wave is rarely full

KERNEL = 4e-6  # seconds of the smallest kernel on the GPU itself


@dataclass(frozen=True)
class Rates:
    """What a GPU with its links and its host reaches, in operations, bytes and seconds."""

    multiprocessors: int
    products: float  # 16-bit operations a second of a large matrix product
    fp32_products: float  # the same of fp32 numbers, without TF32
    fp8_products: float | None  # and of 8-bit floats, None: there are none
    backward: float  # share of it that the products of a backward reach
    depth: float  # numbers of the summed dimension at which half of a product's time is loading and storing
    grouped: float  # share of `products` that one product for many experts reaches
    attention_forward: float  # operations a second of a fused attention on long rows, 128 numbers a head
    attention_backward: float
    attention_half: float  # tokens of a row at which it reaches half of that
    memory: float  # bytes a second of elementwise kernels
    unpacking: float  # bytes a second at which 4-bit weights are unpacked, read and written
    kernel: float  # seconds in which Python starts a kernel of the forward
    backward_kernel: float  # and autograd one of the backward
    module: float  # seconds of the host for the hooks of ZeRO-3 at a module, in each pass
    step: float  # seconds of the host for an optimizer step: data, norms, logs
    link: float  # bytes a second to the other GPUs of the node
    overlap: float  # share of the communication that can run beside arithmetic
    node: float  # bytes a second to other nodes
    host: float  # bytes a second to host memory
    host_overlap: float  # share of those copies that runs beside arithmetic
    cpu_adam: float  # bytes a second of host memory in a rank's CPU Adam
    nvme: float  # bytes a second of a node's disk, one way
    measured: bool = False  # on this machine, by `make calibrate`

    def product_seconds(self, rows: float, wide: float, out: float, speed: float | None = None) -> float:
        """Return the seconds of a matrix product, limited by arithmetic or by memory."""
        arithmetic = 2 * rows * wide * out / ((speed or self.products) * self.filled(rows, wide, out))
        moved = 2 * (rows * wide + wide * out + rows * out) / self.memory
        return max(arithmetic, moved, KERNEL)

    def filled(self, rows: float, wide: float, out: float) -> float:
        """Return the share of `products` that a product of this shape reaches.

        A result of few tiles leaves multiprocessors idle, and a short sum is mostly loading and storing.
        """
        waves = math.ceil(rows / TILE) * math.ceil(out / TILE) / self.multiprocessors
        return waves / (waves + TAIL) * wide / (wide + self.depth)


def table() -> dict:
    """Return rates.json."""
    return _read(FILE)


@functools.cache
def _read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def of(gpu: Gpu, together: int = 1) -> Rates:
    """Return the rates of a GPU: shares of its data sheet's numbers, or what was measured on this machine.

    Args: together: GPUs of a node that a job uses.
    """
    found = _by_table(gpu, *link_of(gpu, together))
    own = measured(gpu)
    if not own:
        return found
    return replace(found, **{name: own["rates"][name] for name in MEASURED if own["rates"].get(name)}, measured=True)


def link_of(gpu: Gpu, together: int) -> tuple[str, float]:
    """Return (its kind in rates.json, GB/s one way) of the link between so many GPUs of a node.

    More NVL cards than a bridge joins send over PCIe: NCCL's ring is as fast as its slowest link.
    """
    entry = _entry(gpu)
    if together > entry.get("bridged", together):
        return "pcie", gpu.host_gbs
    return entry["link"], gpu.link_gbs


@functools.lru_cache(maxsize=256)
def _by_table(gpu: Gpu, kind: str, link_gbs: float) -> Rates:
    known = table()
    entry, host, copies = _entry(gpu), known["host"], known["copies"]
    share, link = known["families"][entry["family"]], known["links"][kind]
    peak = gpu.tflops * 1e12
    return Rates(
        multiprocessors=entry["sms"],
        products=peak * share["products"],
        fp32_products=entry["fp32_tflops"] * 1e12 * share["products"],
        fp8_products=(entry["fp8_tflops"] or 0) * 1e12 * share["products"] or None,
        backward=share["backward"],
        depth=share["depth"],
        grouped=share["grouped"],
        attention_forward=peak * share["attention_forward"],
        attention_backward=peak * share["attention_backward"],
        attention_half=share["attention_half"],
        memory=gpu.memory_gbs * 1e9 * share["memory"],
        unpacking=gpu.memory_gbs * 1e9 * share["unpacking"],
        kernel=host["kernel_us"] * 1e-6,
        backward_kernel=host["backward_kernel_us"] * 1e-6,
        module=host["module_us"] * 1e-6,
        step=host["step_ms"] * 1e-3,
        link=link_gbs * 1e9 * link["share"],
        overlap=link["overlap"],
        node=gpu.node_gbs * 1e9 * known["links"]["network"]["share"],
        host=gpu.host_gbs * 1e9 * copies["host"],
        host_overlap=copies["overlap"],
        cpu_adam=copies["cpu_adam_gbs"] * 1e9,
        nvme=copies["nvme_gbs"] * 1e9,
    )


def _entry(gpu: Gpu) -> dict:
    """Return the entry of rates.json for a GPU, also by torch's name; that of an A100 for one that has none."""
    known = table()["gpus"]
    return known[name_of(gpu) or "a100-80g"]


def name_of(gpu: Gpu) -> str | None:
    """Return the name in the table of a GPU, also where it has torch's name of the device; None: it has none."""
    names = {entry.device_name: name for name, entry in hardware.GPUS.items()}
    if gpu.device_name in names:
        return names[gpu.device_name]
    found = hardware.by_device_name(gpu.device_name.partition(" MIG ")[0])
    return names.get(found.device_name) if found else None


# --- what was measured on this machine ---


def file_of(device_name: str) -> Path:
    """Return the file for what is measured of GPUs of this name."""
    return cache_root() / FOLDER / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


def keep(device_name: str, found: dict[str, float], details: dict) -> Path:
    """Write measured rates, by names of Rates, so that plans use them; return the file."""
    file = file_of(device_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    written = {"device_name": device_name, "rates": found, "details": details}
    file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return file


def measured(gpu: Gpu) -> dict | None:
    """Return what `make calibrate` has kept of GPUs like this one; None: nothing, or nothing that can be read."""
    folder = cache_root() / FOLDER
    try:
        files = tuple((file, file.stat().st_mtime_ns) for file in sorted(folder.glob("*.json")))
    except OSError:
        return None
    kept = _kept(files)
    return kept.get(gpu.device_name) or kept.get(name_of(gpu))


@functools.lru_cache(maxsize=4)
def _kept(files: tuple[tuple[Path, int], ...]) -> dict[str, dict]:
    """Return {name of a device, and its name in the table: content} of files, each with the time of its last change."""
    found = {}
    for file, _ in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            usable = {name: rate for name, rate in content["rates"].items() if _is_rate(rate)}
            device = content["device_name"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        known = hardware.by_device_name(device)
        names = [device] + [name for name, gpu in hardware.GPUS.items() if known and gpu == known]
        found |= dict.fromkeys(names, content | {"rates": usable})
    return found


def _is_rate(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
