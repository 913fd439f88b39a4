"""`zerofit calibrate`: measure this machine's GPU in about three minutes, so that plans use the measured rates."""

import argparse
import time

import torch

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.plan.speed import measure, rates

# {rate: (title, factor to the unit, unit)}
TITLES = {
    "products": ("16-bit matrix products", 1e-12, "TFLOP/s"),
    "fp32_products": ("fp32 matrix products", 1e-12, "TFLOP/s"),
    "fp8_products": ("fp8 matrix products", 1e-12, "TFLOP/s"),
    "attention_forward": ("attention, forward", 1e-12, "TFLOP/s"),
    "attention_backward": ("attention, backward", 1e-12, "TFLOP/s"),
    "memory": ("elementwise kernels", 1e-9, "GB/s"),
    "unpacking": ("unpacking of 4-bit weights", 1e-9, "GB/s"),
    "host": ("copies to host memory", 1e-9, "GB/s"),
    "link": ("all-gather within the node", 1e-9, "GB/s"),
    "kernel": ("Python, per forward kernel", 1e6, "us"),
    "backward_kernel": ("autograd, per backward kernel", 1e6, "us"),
}

TINY = measure.Sizes(rows=64, shapes=((64, 64), (64, 128), (128, 64)), length=64, heads=1, copied=2**16, seconds=0.001)


def main(argv: list[str]) -> None:
    """Run `zerofit calibrate`; see --help. Raises: UserError without a GPU."""
    parser = argparse.ArgumentParser(prog="zerofit calibrate", allow_abbrev=False, description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)  # cpu: for tests
    device = parser.parse_args(argv).device
    if device == "cuda" and not hardware.torch_sees_gpu():
        why = hardware.why_no_gpu() or "PyTorch sees no GPU on this machine"
        raise UserError(
            f"zerofit calibrate needs a GPU: {why}; run it on the machine that trains. Plans for other machines use "
            "src/zerofit/plan/speed/rates.json."
        )
    began = time.perf_counter()
    name, count, gpu = _device(device)
    sizes = measure.Sizes() if device == "cuda" else TINY
    known = rates.rates_for(gpu)
    measured = measure.measure_rates(device, known, sizes, lambda what: print(f"measuring {what}", flush=True))
    if count > 1:
        print(f"measuring an all-gather over {count} GPUs", flush=True)
        measured["link"] = measure.link(count, device, sizes)
    details = {"seconds": round(time.perf_counter() - began, 1), "gpus": count}
    file = rates.save_rates(name, measured, details)
    print("\n".join(["", *_table(name, measured, known)]))
    print(f"saved to {file} ({details['seconds']:.0f} s); plans for this GPU use these rates until you delete the file")


def _device(device: str) -> tuple[str, int, hardware.Gpu]:
    """Return (name, number of devices, entry of the GPU table)."""
    if device == "cpu":
        return "cpu", 2, hardware.GPUS["a100-80g"]

    return torch.cuda.get_device_name(), torch.cuda.device_count(), hardware.find("detect")


def _table(name: str, measured: dict, known: rates.Rates) -> list[str]:
    """Return a line per rate with the measured and the previous value."""
    lines = [f"{name:<38}{'measured':>12}{'previous':>12}"]
    for rate, (title, factor, unit) in TITLES.items():
        if rate in measured:
            before = getattr(known, rate)
            previous = f"{before * factor:>12,.1f}" if before else f"{'-':>12}"
            lines.append(f"{title:<38}{measured[rate] * factor:>12,.1f}{previous} {unit}")
    return lines
