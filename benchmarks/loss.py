"""Measure time and memory of the loss of a language model's head: dense, fused (the kit's), torch's own, Liger's.

python benchmarks/loss.py                       # CUDA: V = 128,256, h = 4,096, T = 8,192 and 16,384, bf16
python benchmarks/loss.py --rounds 9 --supervised 0.4

One forward and backward from hidden states to the gradients of hidden states and head ("frozen": hidden states only).
Rounds are interleaved, medians are given. Memory is the peak above the bytes before: the allocator's on CUDA,
exact tensor bytes on a CPU (torch's own loss is one operator, whose inside is not counted there). Without a GPU the
sizes are small, and the times do not carry over to a GPU.
"""

import argparse
import contextlib
import statistics

import machine
import torch
import torch.nn.functional as F
from measure import time_and_peak

from zerofit.model import fused_loss

TARGET = {"time": 1.15, "memory": 0.25}  # of the dense loss


def dense(hidden, weight, labels):
    """Compute the loss like transformers: logits in the type of the weights, the cross entropy in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def fused(hidden, weight, labels):
    return fused_loss.linear_cross_entropy(hidden, weight, None, labels)


def torch_fused(hidden, weight, labels):
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=fused_loss.rows_per_chunk(weight.shape[0]))
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def implementations(device: str) -> dict:
    found = {"dense": dense, "fused": fused}
    if hasattr(F, "linear_cross_entropy"):
        found["torch"] = torch_fused
    if device == "cuda":
        with contextlib.suppress(ImportError):
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

            found["liger"] = lambda h, w, y: liger(h, w, y, reduction="sum")
    return found


def once(function, hidden, weight, labels, device) -> tuple[float, int]:
    """Return (seconds, peak bytes above the inputs) of a forward and a backward."""

    def run():
        hidden.grad = weight.grad = None
        (function(hidden, weight, labels) / len(labels)).backward()

    hidden.grad = weight.grad = None
    return time_and_peak(run, device)


def measure(tokens: int, given, device: str) -> list[dict]:
    torch.manual_seed(0)
    dtype = getattr(torch, given.dtype)
    hidden = torch.randn(tokens, given.features, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(given.vocabulary, given.features, device=device) * given.features**-0.5).to(dtype)
    labels = torch.randint(0, given.vocabulary, (tokens,), device=device)
    labels[torch.rand(tokens, device=device) >= given.supervised] = -100
    functions, found = implementations(device), []
    for frozen in (False, True):
        weight.requires_grad_(not frozen)
        rounds = {name: [] for name in functions}
        for round_ in range(given.rounds + 1):  # the first one warms up
            for name, function in functions.items():
                taken = once(function, hidden, weight, labels, device)
                rounds[name] += [taken] if round_ else []
        for name, taken in rounds.items():
            entry = {
                "tokens": tokens,
                "head": "frozen" if frozen else "trains",
                "loss": name,
                "milliseconds": statistics.median(seconds for seconds, _ in taken) * 1e3,
                "peak_bytes": max(peak for _, peak in taken),
            }
            found.append(entry)
    return found


def table(found: list[dict]) -> list[str]:
    lines = ["| tokens | head | loss | ms | of dense | peak MB | of dense |", "|---|---|---|---|---|---|---|"]
    for entry in found:
        reference = next(e for e in found if e["loss"] == "dense" and all(e[k] == entry[k] for k in ("tokens", "head")))
        entry["time_of_dense"] = entry["milliseconds"] / reference["milliseconds"]
        entry["memory_of_dense"] = entry["peak_bytes"] / reference["peak_bytes"]
        lines.append(
            f"| {entry['tokens']:,} | {entry['head']} | {entry['loss']} | {entry['milliseconds']:.1f} | "
            f"{entry['time_of_dense']:.2f} | {entry['peak_bytes'] / 1e6:,.0f} | {entry['memory_of_dense']:.1%} |"
        )
    return lines


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    large = device == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=128_256 if large else 16_384)
    parser.add_argument("--features", type=int, default=4096 if large else 256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16_384] if large else [2048])
    parser.add_argument("--supervised", type=float, default=1.0, help="share of the tokens that have a label")
    parser.add_argument("--dtype", default="bfloat16" if large else "float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk_bytes", type=int, help="of fp32 logits; default: the kit's")
    given = parser.parse_args()
    fused_loss.CHUNK_BYTES = given.chunk_bytes or (fused_loss.CHUNK_BYTES if large else 2**24)

    facts = machine.facts()
    found = [entry for tokens in given.tokens for entry in measure(tokens, given, device)]
    lines = table(found)
    ours = [e for e in found if e["loss"] == "fused"]
    met = all(e["time_of_dense"] <= TARGET["time"] and e["memory_of_dense"] <= TARGET["memory"] for e in ours)
    where = torch.cuda.get_device_name() if large else "CPU"
    verdict = f"Target: fused in at most {TARGET['time']} of the dense time and {TARGET['memory']:.0%} of its memory: "
    lines = [
        "# The loss of the head",
        "",
        *machine.describe(facts, {"zerofit": machine.versions()}),
        "",
        f"{where}; V = {given.vocabulary:,}, h = {given.features:,}, {given.dtype}, {given.supervised:.0%} of the "
        f"tokens labeled; chunks of {fused_loss.rows_per_chunk(given.vocabulary):,} rows; medians of {given.rounds} "
        "interleaved rounds, forward and backward.",
        "",
        *lines,
        "",
        verdict + ("met." if met else "not met."),
    ]
    machine.save("loss", lines, {"machine": facts, "device": where, "arguments": vars(given), "rows": found})


if __name__ == "__main__":
    main()
