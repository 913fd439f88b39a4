"""Describe the kernels of a job that affect the time of its step."""

from dataclasses import dataclass

FP32_STATES, STATES_16_BIT, STATES_8_BIT = 28.0, 18.0, 16.0  # bytes read and written per updated parameter
FOREACH = 2.0  # an optimizer of several kernels moves about twice the bytes of a fused one


@dataclass(frozen=True)
class Kernels:
    """The kernels with which a job computes its step."""

    fused_loss: bool = False  # the loss is computed in chunks of tokens
    adapters: str = "in place"  # how B's product is added, a key of step.LORA: "in place", "sum", "cast" or "fp32"
    lora_dropout: bool = False  # inputs of adapters pass through dropout
    loops_experts: bool = False  # a Python loop calls the experts of a layer
    kernel_per_expert: bool = False  # a product has a kernel per expert; other operations have one per layer
    compiled: bool = False  # elementwise kernels of a layer are fused by torch.compile
    fp32_products: bool = False  # matrix products are in fp32
    stops_early: bool = True  # the recomputation of a layer stops after the last tensor that its backward needs
    fp32_states: bool = False  # hidden states are in fp32, and each product casts its input
    attention: float = 1.0  # speed of its attention kernel relative to FlashAttention 2
    update_bytes: float = FP32_STATES  # bytes that the optimizer reads and writes per trained parameter


DEFAULT_KERNELS = Kernels()  # zerofit's defaults


def kernels_for(settings) -> Kernels:
    """Return the kernels of a job with these resolved settings."""
    from zerofit.model import experts

    values = settings.values
    dropout = bool(values.get("lora_dropout"))
    width = STATES_8_BIT if "8bit" in settings.optim else FP32_STATES
    if settings.pure_bf16 and width == FP32_STATES:
        width = STATES_16_BIT
    return Kernels(
        fused_loss=bool(settings.fused_loss),
        adapters="in place" if values.get("fused_lora", True) and not dropout else "sum",
        lora_dropout=dropout,
        loops_experts=settings.experts_implementation == "eager",
        kernel_per_expert=not settings.use_cpu and not experts.has_one_kernel(settings),
        compiled=bool(settings.compile_layers),
        fp32_products=settings.compute_dtype == "fp32",
        stops_early=not dict(values.get("gradient_checkpointing_kwargs") or {}).get("use_reentrant", False),
        update_bytes=width * (FOREACH if settings.optim == "adamw_torch" else 1.0),
    )
