"""Measure the rates of this machine's GPU, in the units of `rates.Rates`."""

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

ROUNDS = 5  # rounds of a measurement; their median is the result


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured operations. The defaults fill a GPU; tests on a CPU use smaller ones."""

    rows: int = 8192  # rows of a matrix product
    shapes: tuple[tuple[int, int], ...] = (
        (4096, 4096),
        (4096, 14336),
        (14336, 4096),
    )  # (wide, out) of products
    length: int = 4096  # tokens of a row for attention
    heads: int = 32
    copied: int = 2**28  # bytes per copy
    seconds: float = 0.3  # duration of a round


def time_call(function: Callable[[], object], device: str, min_seconds: float) -> float:
    """Return the seconds of a call: the median of ROUNDS rounds of about `min_seconds` each."""
    function()  # warm-up: compiles and allocates
    single = _timed(function, device, 1)
    count = max(1, round(min_seconds / max(single, 1e-7)))
    return statistics.median(_timed(function, device, count) / count for _ in range(ROUNDS))


def _timed(function: Callable[[], object], device: str, count: int) -> float:
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda device: None
    wait(device)
    began = time.perf_counter()
    for _ in range(count):
        function()
    wait(device)
    return time.perf_counter() - began


def measure_rates(device: str, known: Rates, sizes: Sizes, report: Callable[[str], None] = lambda text: None) -> dict:
    """Return {field of Rates: rate} for the rates that can be measured on one device.

    Args: known: rates from which `filled` estimates how well a product fills the device; report: prints progress.
    """
    bf16 = device == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    half = torch.bfloat16 if bf16 else torch.float16
    measured = {}
    report(f"matrix products in {half}".replace("torch.", ""))
    measured["products"] = products(device, half, known, sizes)
    measured["fp32_products"] = products(device, torch.float32, known, sizes)
    if fp8 := fp8_products(device, known, sizes):
        measured["fp8_products"] = fp8
    report("attention")
    measured["attention_forward"], measured["attention_backward"] = attention(device, half, known, sizes)
    report("elementwise kernels, and copies to host memory")
    measured["memory"] = elementwise(device, half, sizes)
    if unpacked := unpacking(device, half, sizes):
        measured["unpacking"] = unpacked
    measured["host"] = host_copies(device, sizes)
    report("time to start a kernel from Python")
    measured["kernel"], measured["backward_kernel"] = starting(device, half, sizes)
    return measured


def products(device: str, dtype, known: Rates, sizes: Sizes) -> float:
    """Return the operations per second of a product that fills the device, from the shapes of a model."""
    speeds = []
    for wide, out in sizes.shapes:
        x, weight = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((sizes.rows, wide), (out, wide)))
        spent = time_call(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight), device, sizes.seconds)
        speeds.append(2 * sizes.rows * wide * out / spent / known.filled(sizes.rows, wide, out))
    return statistics.median(speeds)


def fp8_products(device: str, known: Rates, sizes: Sizes) -> float | None:
    """Return the operations per second of a product of 8-bit floats; None if the device does not support them."""
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

    spent = time_call(multiply, device, sizes.seconds)
    return 2 * sizes.rows * wide * out / spent / known.filled(sizes.rows, wide, out)


def attention(device: str, dtype, known: Rates, sizes: Sizes) -> tuple[float, float]:
    """Return the operations per second of causal attention on long rows, forward and backward."""
    shape = (1, sizes.heads, sizes.length, 128)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def forward():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both():
        forward().sum().backward()

    with torch.no_grad():
        once = time_call(forward, device, sizes.seconds)
    backward = max(time_call(both, device, sizes.seconds) - once, 0.1 * once)
    operations = 4 * sizes.heads * sizes.length * sizes.length / 2 * 128
    reached = sizes.length / (sizes.length + known.attention_half)
    return operations / once / reached, step.SEED * operations / backward / reached


def elementwise(device: str, dtype, sizes: Sizes) -> float:
    """Return the bytes per second of a norm, forward and backward, with the bytes that `step` counts for it."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    wide = sizes.shapes[0][0]
    norm = LlamaRMSNorm(wide).to(device, dtype)
    x = torch.randn(sizes.rows, wide, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)
    counted = (sum(step.PASSES["rms"][0]) + step.NORM_WEIGHTS["rms"][0]) * sizes.rows * wide
    return counted / time_call(lambda: norm(x).backward(gradient), device, sizes.seconds)


def unpacking(device: str, dtype, sizes: Sizes) -> float | None:
    """Return the bytes per second at which bitsandbytes unpacks 4-bit weights; None on a CPU."""
    if device == "cpu":
        return None
    from bitsandbytes import functional

    wide, out = sizes.shapes[1]
    packed, state = functional.quantize_4bit(
        torch.randn(out, wide, device=device, dtype=dtype), quant_type="nf4", compress_statistics=True
    )
    spent = time_call(lambda: functional.dequantize_4bit(packed, state), device, sizes.seconds)
    return step.UNPACKED[4] * wide * out / spent


def host_copies(device: str, sizes: Sizes) -> float:
    """Return the bytes per second of copies to host memory or back, whichever is slower."""
    on_gpu = device != "cpu"
    host = torch.empty(sizes.copied, dtype=torch.uint8, pin_memory=on_gpu)
    on_device = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    to = time_call(lambda: on_device.copy_(host, non_blocking=True), device, sizes.seconds)
    back = time_call(lambda: host.copy_(on_device, non_blocking=True), device, sizes.seconds)
    return sizes.copied / max(to, back)


def starting(device: str, dtype, sizes: Sizes) -> tuple[float, float]:
    """Return the seconds in which Python starts a kernel of the forward and autograd a kernel of the backward.

    The kernels of a model of tiny layers take almost no time, so only starting them is measured.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=1,
                         num_key_value_heads=1, vocab_size=128, use_cache=False)  # fmt: skip
    model = LlamaForCausalLM(config).to(device, dtype)
    ids = torch.zeros(1, 8, dtype=torch.long, device=device)
    shape = formulas.shape(config, model)
    started = step.kernels_started(shape, shape.work, formulas.PlanPoint(0, "none", 0, 1, 8, 1, 1).kernels)

    def forward():
        return model(input_ids=ids, labels=ids).loss

    once = time_call(forward, device, sizes.seconds)
    backward = max(time_call(lambda: forward().backward(), device, sizes.seconds) - once, 0.1 * once)
    return once / started, backward / started / step.BACKWARD


# --- links ---


def link(ranks: int, device: str, sizes: Sizes) -> float:
    """Return the bytes per second that a GPU sends in an all-gather over the GPUs of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(_gather, (ranks, device, sizes, folder), nprocs=ranks)
        return min(float(file.read_text()) for file in Path(folder).glob("rate-*"))


def _gather(rank: int, ranks: int, device: str, sizes: Sizes, folder: str) -> None:
    """Measure an all-gather as one of `ranks` processes, and write the bytes per second that this process sends."""
    local = device if device == "cpu" else f"{device}:{rank}"
    if local != "cpu":
        torch.cuda.set_device(local)
    backend = "gloo" if local == "cpu" else "nccl"
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=ranks)
    shard = torch.zeros(sizes.copied // ranks, dtype=torch.uint8, device=local)
    gathered = [torch.empty_like(shard) for _ in range(ranks)]
    calls = 5  # a fixed number, because all ranks have to make the same calls
    dist.all_gather(gathered, shard)
    rounds = [_timed(lambda: dist.all_gather(gathered, shard), local, calls) for _ in range(ROUNDS)]
    spent = statistics.median(rounds) / calls
    dist.destroy_process_group()
    (Path(folder) / f"rate-{rank}").write_text(str(shard.numel() * (ranks - 1) / spent))
