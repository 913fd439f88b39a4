"""Say with which kernels a job computes its step, as far as its time depends on them."""

from dataclasses import dataclass

FP32_STATES, STATES_16_BIT, STATES_8_BIT = 28.0, 18.0, 16.0  # bytes that an update reads and writes a number

FOREACH = 2.0  # an optimizer of several kernels reads and writes its numbers about twice


@dataclass(frozen=True)
class Kernels:
    """How a job computes its step."""

    fused_loss: bool = False  # the loss is computed in chunks of tokens
    adapters: str = "in place"  # how B's product is added, of step.LORA: "in place", "sum", "cast" or "fp32"
    lora_dropout: bool = False  # inputs of adapters pass through dropout
    loops_experts: bool = False  # experts are called one by one, not one kernel for all of a layer
    experts_apart: bool = False  # their products are a kernel for each expert, the rest one for all
    compiled: bool = False  # elementwise kernels of a layer are fused by torch.compile
    fp32_products: bool = False  # products of fp32 numbers
    stops_early: bool = True  # recomputation of a layer ends with the last result that its backward needs
    fp32_states: bool = False  # hidden states are fp32, and each product casts its input
    attention: float = 1.0  # share of the rates of FlashAttention 2 that its kernel reaches
    update_bytes: float = FP32_STATES  # that the optimizer reads and writes a trained number


AS_THE_KIT = Kernels()  # of zerofit's defaults


def of(settings) -> Kernels:
    """Return the kernels of a job. settings: resolved."""
    from zerofit.model import experts
    from zerofit.model.load import weight_dtype

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
        experts_apart=not settings.use_cpu and not experts.has_one_kernel(settings),
        compiled=bool(settings.compile_layers),
        fp32_products=settings.precision == "fp32" and weight_dtype(settings) == "float32",
        stops_early=not dict(values.get("gradient_checkpointing_kwargs") or {}).get("use_reentrant", False),
        update_bytes=width * (FOREACH if settings.optim == "adamw_torch" else 1.0),
    )
