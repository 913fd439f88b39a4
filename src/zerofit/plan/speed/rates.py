"""Read the rates of GPUs, links and hosts from rates.json and from the measurements of `make calibrate`."""

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
FOLDER = "rates"  # folder in the cache with a file per measured GPU

# Fields of Rates that a calibration can measure, in seconds and bytes.
MEASURED = (
    *("products", "fp32_products", "fp8_products", "attention_forward", "attention_backward", "memory", "unpacking"),
    *("kernel", "backward_kernel", "host", "link"),
)

TILE = 128  # rows and columns of a tile of the result, which one multiprocessor computes at a time
TAIL = 0.35  # idle share of a wave of tiles at the end of a product: the last wave is rarely full
KERNEL = 4e-6  # seconds that the smallest kernel takes on the GPU


@dataclass(frozen=True)
class Rates:
    """Rates that a GPU, its links and its host reach, in operations, bytes and seconds."""

    multiprocessors: int
    products: float  # operations per second of a large 16-bit matrix product
    fp32_products: float  # operations per second in fp32, without TF32
    fp8_products: float | None  # operations per second of 8-bit floats; None: unsupported
    backward: float  # share of `products` that the products of a backward reach
    depth: float  # size of the summed dimension at which loading and storing take half of a product's time
    grouped: float  # share of `products` that a grouped product of experts reaches
    attention_forward: float  # operations per second of a fused attention on long rows with a head size of 128
    attention_backward: float
    attention_half: float  # tokens per row at which attention reaches half of its rate
    memory: float  # bytes per second of elementwise kernels
    unpacking: float  # bytes per second, read and written, at which 4-bit weights are unpacked
    kernel: float  # seconds in which Python starts a kernel of the forward
    backward_kernel: float  # seconds in which autograd starts a kernel of the backward
    module: float  # seconds per module and pass that the hooks of ZeRO-3 take on the host
    step: float  # seconds per optimizer step on the host: data, norms, logs
    link: float  # bytes per second to the other GPUs of the node
    overlap: float  # share of the communication that can overlap with computation
    node: float  # bytes per second to other nodes
    host: float  # bytes per second to host memory
    host_overlap: float  # share of copies to host memory that overlaps with computation
    cpu_adam: float  # bytes per second of host memory that the CPU Adam of a rank reaches
    nvme: float  # bytes per second of a node's disk, one way
    measured: bool = False  # whether `make calibrate` measured rates on this machine

    def product_seconds(self, rows: float, wide: float, out: float, speed: float | None = None) -> float:
        """Return the seconds of a matrix product, limited by computation or by memory."""
        arithmetic = 2 * rows * wide * out / ((speed or self.products) * self.filled(rows, wide, out))
        moved = 2 * (rows * wide + wide * out + rows * out) / self.memory
        return max(arithmetic, moved, KERNEL)

    def filled(self, rows: float, wide: float, out: float) -> float:
        """Return the share of `products` that a product of this shape reaches.

        With few tiles multiprocessors are idle; with short sums loading and storing take most of the time.
        """
        waves = math.ceil(rows / TILE) * math.ceil(out / TILE) / self.multiprocessors
        return waves / (waves + TAIL) * wide / (wide + self.depth)


@functools.cache
def table() -> dict:
    """Return rates.json."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def rates_for(gpu: Gpu, gpus: int = 1) -> Rates:
    """Return the rates of a GPU: measured on this machine, else shares of its data sheet's numbers.

    Args: gpus: GPUs of a node that a job uses.
    """
    rates, calibration = _by_table(gpu, *link_between(gpu, gpus)), measured(gpu)
    if not calibration:
        return rates
    values = {name: calibration["rates"][name] for name in MEASURED if calibration["rates"].get(name)}
    return replace(rates, **values, measured=True)


def link_between(gpu: Gpu, gpus: int) -> tuple[str, float]:
    """Return (kind in rates.json, GB/s one way) of the link between `gpus` GPUs of a node.

    If a bridge does not join all NVL cards, the link is PCIe: NCCL's ring is as fast as its slowest link.
    """
    entry = _entry(gpu)
    if gpus > entry.get("bridged", gpus):
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
    """Return the entry of a GPU in rates.json; an unlisted GPU gets the entry of the A100."""
    return table()["gpus"][gpu_name(gpu) or "a100-80g"]


def gpu_name(gpu: Gpu) -> str | None:
    """Return the name of a GPU in rates.json, also if it has torch's device name; None if it is not listed."""
    names = {entry.device_name: name for name, entry in hardware.GPUS.items()}
    if gpu.device_name in names:
        return names[gpu.device_name]
    entry = hardware.by_device_name(gpu.device_name.partition(" MIG ")[0])
    return names.get(entry.device_name) if entry else None


# --- measurements on this machine ---


def rates_file(device_name: str) -> Path:
    """Return the file with the measured rates of GPUs of this name."""
    return cache_root() / FOLDER / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


def save_rates(device_name: str, rates: dict[str, float], details: dict) -> Path:
    """Write measured rates, named by fields of Rates, which plans then use; return the file."""
    file = rates_file(device_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    written = {"device_name": device_name, "rates": rates, "details": details}
    file.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return file


def measured(gpu: Gpu) -> dict | None:
    """Return the measurements of `make calibrate` for GPUs of this kind; None without a readable file."""
    folder = cache_root() / FOLDER
    try:
        files = tuple((file, file.stat().st_mtime_ns) for file in sorted(folder.glob("*.json")))
    except OSError:
        return None
    kept = _kept(files)
    return kept.get(gpu.device_name) or kept.get(gpu_name(gpu))


@functools.lru_cache(maxsize=4)
def _kept(files: tuple[tuple[Path, int], ...]) -> dict[str, dict]:
    """Return {device name or name in the table: content}. files: each with its time of modification."""
    contents = {}
    for file, _ in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            usable = {name: rate for name, rate in content["rates"].items() if _is_rate(rate)}
            device = content["device_name"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        known = hardware.by_device_name(device)
        names = [device] + [name for name, gpu in hardware.GPUS.items() if known and gpu == known]
        contents |= dict.fromkeys(names, content | {"rates": usable})
    return contents


def _is_rate(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
