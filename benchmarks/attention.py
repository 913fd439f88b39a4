"""Measure the attention operation alone: eager, each back end of torch's SDPA, FlashAttention when installed.

python benchmarks/attention.py                      # CUDA: 32 heads of 128, 2,048 to 16,384 tokens, bf16
python benchmarks/attention.py --tokens 512 1024    # CPU: 8 heads of 64, fp32

Causal, one forward and backward from q, k, v to their gradients. Rounds are interleaved, medians are given. Memory is
the peak above the inputs: the allocator's on CUDA, exact tensor bytes on a CPU (a fused kernel is one operator there).
`make ledger` has a row for the whole training step with either attention. This file tests the claim "FlashAttention-2
is 2 to 4 times faster" (arXiv 2205.14135, 2307.08691), which is about the operation.
"""

import argparse
import contextlib
import math
import statistics

import machine
import torch
import torch.nn.functional as F
from measure import time_and_peak
from torch.nn.attention import SDPBackend, sdpa_kernel


def eager(q, k, v):
    """Compute attention like transformers' eager_attention_forward: softmax in fp32, all scores in memory."""
    tokens = q.shape[-2]
    mask = torch.full((tokens, tokens), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def with_back_end(back_end):
    def attention(q, k, v):
        with sdpa_kernel(back_end):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def implementations(device: str) -> dict:
    """Return {name: function of q, k, v, (rows, heads, tokens, head_dim) each}."""
    found = {"eager": eager, "sdpa flash": with_back_end(SDPBackend.FLASH_ATTENTION)}
    if device == "cuda":
        found["sdpa efficient"] = with_back_end(SDPBackend.EFFICIENT_ATTENTION)
        found["sdpa cudnn"] = with_back_end(SDPBackend.CUDNN_ATTENTION)
        with contextlib.suppress(ImportError):
            from flash_attn import flash_attn_func

            found["flash_attn"] = lambda *qkv: flash_attn_func(*(x.transpose(1, 2) for x in qkv), causal=True)
    return found


def once(function, qkv, device: str) -> tuple[float, int]:
    """Return (seconds, peak bytes above the inputs) of a forward and a backward."""

    def run():
        out = function(*qkv)
        torch.autograd.grad(out, qkv, torch.ones_like(out))

    return time_and_peak(run, device)


def measure(tokens: int, given, device: str) -> list[dict]:
    torch.manual_seed(0)
    shape = (1, given.heads, tokens, given.head_dim)
    qkv = [torch.randn(shape, device=device).to(getattr(torch, given.dtype)).requires_grad_() for _ in range(3)]
    functions, failed = implementations(device), {}
    rounds = {name: [] for name in functions}
    for round_ in range(given.rounds + 1):  # the first one warms up
        for name, function in functions.items():
            if name in failed:
                continue
            try:
                taken = once(function, qkv, device)
            except (RuntimeError, torch.OutOfMemoryError) as error:  # a back end that this device lacks, or too large
                failed[name] = str(error).splitlines()[0]
                continue
            rounds[name] += [taken] if round_ else []
    found = []
    for name, taken in rounds.items():
        entry = {"tokens": tokens, "attention": name, "failed": failed.get(name)}
        if taken and name not in failed:
            entry["milliseconds"] = statistics.median(seconds for seconds, _ in taken) * 1e3
            entry["peak_bytes"] = max(peak for _, peak in taken)
        found.append(entry)
    return found


def table(found: list[dict]) -> list[str]:
    lines = ["| tokens | attention | ms | faster than eager | peak MB | of eager |", "|---|---|---|---|---|---|"]
    for entry in found:
        start = f"| {entry['tokens']:,} | {entry['attention']} | "
        if entry["failed"]:
            lines.append(f"{start}did not run: {entry['failed'][:80]} | | | |")
            continue
        eager = next(e for e in found if e["attention"] == "eager" and e["tokens"] == entry["tokens"])
        faster, share = "", ""
        if not eager["failed"]:
            faster = f"x {eager['milliseconds'] / entry['milliseconds']:.2f}"
            share = f"{entry['peak_bytes'] / eager['peak_bytes']:.1%}"
        lines.append(f"{start}{entry['milliseconds']:.2f} | {faster} | {entry['peak_bytes'] / 1e6:,.1f} | {share} |")
    return lines


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    large = device == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32 if large else 8)
    parser.add_argument("--head_dim", type=int, default=128 if large else 64)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16_384] if large else [512, 1024, 2048]
    )
    parser.add_argument("--dtype", default="bfloat16" if large else "float32")
    parser.add_argument("--rounds", type=int, default=9 if large else 5)
    given = parser.parse_args()
    facts = machine.facts()
    found = [entry for tokens in given.tokens for entry in measure(tokens, given, device)]
    where = torch.cuda.get_device_name() if large else "CPU"
    lines = [
        "# The attention operation",
        "",
        *machine.describe(facts, {"zerofit": machine.versions()}),
        "",
        f"{where}; causal, {given.heads} heads of {given.head_dim}, {given.dtype}; medians of {given.rounds} "
        "interleaved rounds, forward and backward.",
        "",
        *table(found),
    ]
    machine.save("attention", lines, {"machine": facts, "device": where, "arguments": vars(given), "rows": found})


if __name__ == "__main__":
    main()
