"""What is known about GPUs by name. Peaks are the vendors' dense figures (no sparsity)."""

# name fragment as in torch.cuda.get_device_name() -> TFLOP/s of 16-bit tensor-core products with fp32 accumulation.
# More telling fragments first.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "V100": 125.0,
    "T4": 65.0,
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def peak_flops(device_name: str) -> float | None:
    """Peak FLOP/s of 16-bit products, or None for a device that is not in the table."""
    for fragment, tflops in PEAK_TFLOPS.items():
        if fragment in device_name:
            return tflops * 1e12
    return None
