"""Time the parts of the recipes on a GPU: packed attention, an adapted linear layer, optimizers, copies.

python benchmarks/gpu/gpu_attention.py                       # a few minutes; 20 GB of GPU memory
python benchmarks/gpu/gpu_attention.py --only 'packed|copies' --out runs/my-report

Times forward and backward, if there is one. benchmarks/attention.py compares torch's back ends on one document,
benchmarks/loss.py the losses; tests/gpu tests the results. Memory is the increase of the allocator's peak.
"""

import re
import statistics
import time
from types import SimpleNamespace

import gpu_job
import torch
import torch.nn.functional as F
from gpu_job import GIB
from measure import time_and_peak

from zerofit.model import attention
from zerofit.optim import bf16_adamw

ROUNDS = 7
UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9}
TOKENS, HEADS, KEY_HEADS, WIDTH = 16384, 32, 8, 128
IN, OUT = 4096, 14336  # sizes of the linear layer


def row(name: str, run, amount: float, unit: str) -> list:
    """Time `run` and format its table row; amount: FLOPs or bytes per run."""
    try:
        run()  # compiles and allocates
        measured = [time_and_peak(run, "cuda") for _ in range(ROUNDS)]
    except RuntimeError as error:  # including out of memory
        return [name, None, f"{error}".splitlines()[0][:160], None]
    seconds, peak_bytes = statistics.median(s for s, _ in measured), max(p for _, p in measured)
    return [name, f"{seconds * 1e3:.2f}", f"{amount / seconds / UNITS[unit]:,.1f} {unit}", f"{peak_bytes / GIB:.2f}"]


def with_flash_3(name: str, run, amount: float) -> list:
    """Time `run` like `row`, but with FlashAttention 3 instead of 2."""
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except Exception as error:  # the package is missing or does not support this GPU
        return [name, None, f"{error}".splitlines()[0][:160], None]
    try:
        return row(name, run, amount, "TFLOP/s")
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def numbers(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def packed(documents: int) -> list[list]:
    """Time attention on 16k tokens: zerofit's varlen kernel on packed documents, sdpa on the same number of rows."""
    length = TOKENS // documents
    leaves = [numbers(1, heads, TOKENS, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    rows = [numbers(documents, heads, length, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    repeated = [numbers(documents, HEADS, length, WIDTH) for _ in range(3)]
    bounds = torch.arange(0, TOKENS + 1, length, device="cuda", dtype=torch.int32)
    mask = torch.ones(length, length, device="cuda", dtype=torch.bool).tril().expand(documents, 1, length, length)

    def backward(out, inputs):
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    def varlen():
        more = {"cu_seq_lens_q": bounds, "max_length_q": length}
        backward(attention.packed_attention(None, *leaves, None, scaling=WIDTH**-0.5, **more)[0], leaves)

    kernels = {
        "varlen (zerofit)": varlen,
        "sdpa, causal": lambda: backward(F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True), rows),
        "sdpa, mask": lambda: backward(F.scaled_dot_product_attention(*repeated, attn_mask=mask), repeated),
    }
    # Causal: half of both products; forward once, backward 2.5 times.
    flops = 3.5 * 2 * length * length * WIDTH * HEADS * documents
    prefix = f"attention, {documents} x {length} tokens"
    timed = [row(f"{prefix}, {name}", kernel, flops, "TFLOP/s") for name, kernel in kernels.items()]
    return [*timed, with_flash_3(f"{prefix}, varlen (zerofit), FlashAttention 3", varlen, flops)]


def adapted(dtype: torch.dtype | None, autocast: bool = False, cast: bool = True) -> list[list]:
    """Time a linear layer on 16k tokens, plain or with adapters of a dtype; cast: PEFT casts the input to it."""
    from peft import LoraConfig, get_peft_model
    from peft.helpers import disable_input_dtype_casting

    net, name = torch.nn.Sequential(torch.nn.Linear(IN, OUT, bias=False)).to("cuda", torch.bfloat16), "linear layer"
    net.requires_grad_(False)
    if dtype:
        net = get_peft_model(net, LoraConfig(r=16, target_modules=["0"]), autocast_adapter_dtype=False)
        for p in net.parameters():
            p.data = p.data.to("cuda", dtype) if p.requires_grad else p.data
        name += f", {dtype} adapter".replace("torch.", "") + ", autocast" * autocast + ", input not cast" * (not cast)
    x, upstream = numbers(1, TOKENS, IN), numbers(1, TOKENS, OUT)
    leaves = [x, *(p for p in net.parameters() if p.requires_grad)]

    def run():
        with torch.autocast("cuda", enabled=autocast), disable_input_dtype_casting(net, active=not cast):
            out = net(x)
        torch.autograd.grad(out, leaves, upstream.to(out.dtype))

    return [row(name, run, 2 * 2 * TOKENS * IN * OUT, "TFLOP/s")]


def adamw(kind: str, dtype: torch.dtype, count: int = 10**9, device: str = "cuda") -> list[list]:
    """Time a step over `count` numbers; on the CPU this is the step of --offload optimizer."""
    p = torch.nn.Parameter(torch.randn(count, device=device, dtype=dtype))
    p.grad = torch.randn(count, device=device, dtype=dtype)
    optimizer = bf16_adamw.AdamW([p], lr=1e-5) if kind == "zerofit" else torch.optim.AdamW([p], lr=1e-5, fused=True)
    name = f"AdamW of {kind}, {count:.0e} numbers, {dtype}, {device}".replace("torch.", "")
    return [row(name, optimizer.step, 7 * count * p.element_size(), "GB/s")]


def copies() -> list[list]:
    """Time copies of 1.1 GiB to and from pinned memory, and from pageable memory."""
    size = int(1.1 * GIB)
    pinned, pageable = (torch.empty(size, dtype=torch.uint8, pin_memory=pin).fill_(1) for pin in (True, False))
    on_gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
    return [
        row("copy, pinned to GPU", lambda: on_gpu.copy_(pinned, non_blocking=True), size, "GB/s"),
        row("copy, GPU to pinned", lambda: pinned.copy_(on_gpu, non_blocking=True), size, "GB/s"),
        row("copy, pageable to GPU", lambda: on_gpu.copy_(pageable), size, "GB/s"),
    ]


SECTIONS = [
    *((packed, (count,)) for count in (1, 8, 128)),
    *((adapted, way) for way in [(None,), (torch.bfloat16,), (torch.float32, True), (torch.float32, True, False)]),
    (adamw, ("zerofit", torch.bfloat16)), (adamw, ("torch", torch.bfloat16)), (adamw, ("torch", torch.float32)),
    (adamw, ("torch", torch.float32, 2 * 10**8, "cpu")), (copies, ()),
]  # fmt: skip


def main() -> None:
    args = gpu_job.parser(__doc__, "gpu-attention", budget_seconds=480).parse_args()
    attention.avoid_wrong_kernels(SimpleNamespace(use_cpu=False, decisions=[]))
    facts, began, rows = gpu_job.facts(), time.monotonic(), []
    for section, arguments in SECTIONS:
        if re.search(args.only, section.__name__) and time.monotonic() - began < args.budget:
            rows += section(*arguments)
            torch.cuda.empty_cache()
    lines = [f"Medians of {ROUNDS} rounds.", "", *gpu_job.table(["what", "ms", "speed", "peak GiB"], rows)]
    title = "Attention, adapters, optimizers and copies on one GPU"
    gpu_job.save(args.out, "gpu-attention", title, lines, {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()
