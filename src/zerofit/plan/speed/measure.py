"""Measure the rates of this machine's GPU in the units in which a step is priced."""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from zerofit.plan import formulas
from zerofit.plan.speed import step
from zerofit.plan.speed.rates import Rates

ROUNDS = 5  # of which the median counts


@dataclass(frozen=True)
class Sizes:
    """How much is computed. The defaults fill a GPU; tests on a CPU take less."""

    rows: int = 8192  # of a matrix product
    shapes: tuple[tuple[int, int], ...] = ((4096, 4096), (4096, 14336), (14336, 4096))  # (wide, out) of products
    length: int = 4096  # tokens of a row for attention
    heads: int = 32
    copied: int = 2**28  # bytes of a copy
    seconds: float = 0.3  # of a round


def seconds_of(function: Callable[[], object], device: str, least: float) -> float:
    """Return the seconds of a call: the median of ROUNDS rounds, each as many calls as take about `least` seconds."""
    function()  # compiles and allocates
    one = _timed(function, device, 1)
    count = max(1, round(least / max(one, 1e-7)))
    return statistics.median(_timed(function, device, count) / count for _ in range(ROUNDS))


def _timed(function: Callable[[], object], device: str, count: int) -> float:
    _wait(device)
    began = time.perf_counter()
    for _ in range(count):
        function()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def all_of(device: str, known: Rates, sizes: Sizes, say: Callable[[str], None] = lambda text: None) -> dict:
    """Return {name of Rates: rate} of what can be measured on one device.

    Args: known: rates that say how far a product of this size fills the device; say: called with lines of progress.
    """
    bf16 = device == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    half = torch.bfloat16 if bf16 else torch.float16
    found = {}
    say(f"matrix products in {half}".replace("torch.", ""))
    found["products"] = products(device, half, known, sizes)
    found["fp32_products"] = products(device, torch.float32, known, sizes)
    if fp8 := fp8_products(device, known, sizes):
        found["fp8_products"] = fp8
    say("attention")
    found["attention_forward"], found["attention_backward"] = attention(device, half, known, sizes)
    say("elementwise kernels, and copies to host memory")
    found["memory"] = elementwise(device, half, sizes)
    if unpacked := unpacking(device, half, sizes):
        found["unpacking"] = unpacked
    found["host"] = host_copies(device, sizes)
    say("what Python needs to start a kernel")
    found["kernel"], found["backward_kernel"] = starting(device, half, sizes)
    return found


def products(device: str, dtype, known: Rates, sizes: Sizes) -> float:
    """Return operations a second of products that would fill the device, from shapes of a model."""
    found = []
    for wide, out in sizes.shapes:
        x, weight = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((sizes.rows, wide), (out, wide)))
        spent = seconds_of(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight), device, sizes.seconds)
        found.append(2 * sizes.rows * wide * out / spent / known.filled(sizes.rows, wide, out))
    return statistics.median(found)


def fp8_products(device: str, known: Rates, sizes: Sizes) -> float | None:
    """Return the same of 8-bit floats; None on a device without them."""
    if device == "cpu" or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    from torch.nn.functional import ScalingType, scaled_mm

    one = torch.ones((), device=device)
    (wide, out), dtype = sizes.shapes[0], torch.float8_e4m3fn
    x, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((sizes.rows, wide), (out, wide)))

    def multiply():
        return scaled_mm(
            x, weight.t(), one, ScalingType.TensorWise, one, ScalingType.TensorWise, output_dtype=torch.bfloat16
        )

    spent = seconds_of(multiply, device, sizes.seconds)
    return 2 * sizes.rows * wide * out / spent / known.filled(sizes.rows, wide, out)


def attention(device: str, dtype, known: Rates, sizes: Sizes) -> tuple[float, float]:
    """Return operations a second of causal attention on long rows, forward and backward."""
    shape = (1, sizes.heads, sizes.length, 128)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both():
        forward().sum().backward()

    with torch.no_grad():
        once = seconds_of(forward, device, sizes.seconds)
    backward = max(seconds_of(both, device, sizes.seconds) - once, 0.1 * once)
    operations = 4 * sizes.heads * sizes.length * sizes.length / 2 * 128
    reached = sizes.length / (sizes.length + known.attention_half)
    return operations / once / reached, step.SEED * operations / backward / reached


def elementwise(device: str, dtype, sizes: Sizes) -> float:
    """Return bytes a second of a norm's kernels, forward and backward, with the bytes that a step counts for it."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    wide = sizes.shapes[0][0]
    norm = LlamaRMSNorm(wide).to(device, dtype)
    x = torch.randn(sizes.rows, wide, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)
    counted = (sum(step.PASSES["rms"][0]) + step.NORM_WEIGHTS["rms"][0]) * sizes.rows * wide
    return counted / seconds_of(lambda: norm(x).backward(gradient), device, sizes.seconds)


def unpacking(device: str, dtype, sizes: Sizes) -> float | None:
    """Return bytes a second at which bitsandbytes unpacks 4-bit weights; None on a CPU, where nothing trains so."""
    if device == "cpu":
        return None
    from bitsandbytes import functional

    wide, out = sizes.shapes[1]
    packed, state = functional.quantize_4bit(
        torch.randn(out, wide, device=device, dtype=dtype), quant_type="nf4", compress_statistics=True
    )
    spent = seconds_of(lambda: functional.dequantize_4bit(packed, state), device, sizes.seconds)
    return step.UNPACKED[4] * wide * out / spent


def host_copies(device: str, sizes: Sizes) -> float:
    """Return bytes a second of copies to host memory and back, the slower of the two."""
    on_gpu = device != "cpu"
    here = torch.empty(sizes.copied, dtype=torch.uint8, pin_memory=on_gpu)
    there = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    to = seconds_of(lambda: there.copy_(here, non_blocking=True), device, sizes.seconds)
    back = seconds_of(lambda: here.copy_(there, non_blocking=True), device, sizes.seconds)
    return sizes.copied / max(to, back)


def starting(device: str, dtype, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds in which Python starts a kernel of the forward, and autograd one of the backward.

    A model of tiny layers computes nothing that takes time, so its time is that of its kernels' starts.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=1,
                         num_key_value_heads=1, vocab_size=128, use_cache=False)  # fmt: skip
    model = LlamaForCausalLM(config).to(device, dtype)
    ids = torch.zeros(1, 8, dtype=torch.long, device=device)
    shape = formulas.shape(config, model)
    started = step.kernels_started(shape, shape.work, formulas.Setting(0, "none", 0, 1, 8, 1, 1).kernels)

    def forward():
        return model(input_ids=ids, labels=ids).loss

    once = seconds_of(forward, device, sizes.seconds)
    backward = max(seconds_of(lambda: forward().backward(), device, sizes.seconds) - once, 0.1 * once)
    return once / started, backward / started / step.BACKWARD


# --- links ---


def link(ranks: int, device: str, sizes: Sizes) -> float:
    """Return bytes a second that a GPU sends in an all-gather over the GPUs of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_gather, (ranks, device, sizes, folder), nprocs=ranks)
        return min(float(file.read_text()) for file in Path(folder).glob("rate-*"))


def _gather(rank: int, ranks: int, device: str, sizes: Sizes, folder: str) -> None:
    """Measure an all-gather as one of `ranks` processes, and write what this one sends a second."""
    own = device if device == "cpu" else f"{device}:{rank}"
    if own != "cpu":
        torch.cuda.set_device(own)
    dist.init_process_group("gloo" if own == "cpu" else "nccl", f"file://{folder}/meeting", rank=rank, world_size=ranks)
    mine = torch.zeros(sizes.copied // ranks, dtype=torch.uint8, device=own)
    whole = [torch.empty_like(mine) for _ in range(ranks)]
    calls = 5  # as many on each rank: a round by time would differ
    dist.all_gather(whole, mine)
    spent = statistics.median(_timed(lambda: dist.all_gather(whole, mine), own, calls) / calls for _ in range(ROUNDS))
    dist.destroy_process_group()
    (Path(folder) / f"rate-{rank}").write_text(str(mine.numel() * (ranks - 1) / spent))
