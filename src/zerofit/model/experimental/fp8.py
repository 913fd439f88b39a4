"""Multiply the matrices of the decoder layers in 8-bit floats (--fp8), like torchao's float8 training.

Each operand is scaled by its largest absolute value and rounded: inputs and weights to e4m3, gradients to e5m2.
Weights, gradients and optimizer states keep their dtypes. Scales, casts and products are torchao's functions. Its layer
is not used: it saves a view of its weight, which at ZeRO-3 keeps the gathered weight in memory, and it computes the
gradient of frozen weights.
"""

import functools
import os

import torch
from torch.autograd.function import once_differentiable

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.job.technique import Conflict, Technique
from zerofit.model import experts, load, self_test

EMULATION = "ZEROFIT_FP8_EMULATION"  # environment variable for tests: emulate the rounding on a CPU

INPUTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2

MULTIPLE = 16  # the sides of a matrix must be multiples of it

# Matrices up to this size are slower than in bf16, as measured by torchao on H100 (_auto_filter_for_tensorwise).
SMALL_INPUTS, SMALL_OUTPUTS = 4096, 1024

# Tokens per second of Llama-3 8B on H100 in bf16 / in fp8, both compiled, the latter also gathered in 8 bits
# (torchtitan, commit 7a04053). Without compilation the casts cost as much as the products gain.
FACTOR = 5760 / 7186

# Bound of the self-test's relative errors. Rounding causes 0.04 in outputs and 0.07 in gradients; if half of a product
# is missing, the error is 0.7.
BOUND = 0.15

SELF_TEST_ROWS = 72  # not a multiple of 16


def seconds(settings) -> float:
    """Return the factor on the time of arithmetic, for plans."""
    return FACTOR if settings.fp8 and settings.compile_layers else 1.0


def resolve(settings) -> None:
    """Check that the GPU supports 8-bit float products. Raises: UserError."""
    if not settings.fp8:
        return
    required = "it needs a GPU with 8-bit float products (compute capability 8.9: Ada, Hopper, newer); leave it out"
    if settings.use_cpu:
        if not os.environ.get(EMULATION):
            raise UserError(f"--fp8: {required}.")
    elif settings.planned_gpu is not None:
        if not settings.planned_gpu.fp8:
            raise UserError(f"--fp8: {settings.planned_gpu.device_name}: {required}.")
    elif torch.cuda.get_device_capability() < hardware.FP8_CAPABILITY:
        raise UserError(f"--fp8: {torch.cuda.get_device_name()}: {required}.")
    if not settings.compile_layers:
        settings.decisions.append("fp8: casts are slow, unless --compile_layers true fuses them into other kernels")


def resolve_for_model(settings, config) -> None:
    """Add a decision with the number of converted layers. Raises: UserError for a model without suitable layers."""
    if not settings.fp8:
        return
    if experts.count(config):
        raise UserError("--fp8: the experts of a mixture are not linear layers; leave it out.")
    linears = _linears(settings, load.check_model(settings, config))
    settings.decisions.append(f"fp8: the products of {len(linears)} linear layers; embedding and head stay in bf16")


def _linears(settings, model) -> list[torch.nn.Linear]:
    """Return the linear layers to convert, in decoder layers and without adapters.

    Raises: UserError without suitable layers.
    """
    named = [
        pair for layer in load.transformer_layers(model) for pair in layer.named_modules() if ".lora_" not in pair[0]
    ]
    linears = [module for _, module in named if type(module) is torch.nn.Linear and _is_suitable(settings, module)]
    if not linears:
        raise UserError(
            f"--fp8: {type(model).__name__} does not contain a linear layer that is large enough, with sides that are "
            f"multiples of {MULTIPLE}; leave it out."
        )
    return linears


def _is_suitable(settings, linear: torch.nn.Linear) -> bool:
    sides = linear.in_features, linear.out_features
    small = sides[0] <= SMALL_INPUTS and sides[1] <= SMALL_OUTPUTS and not settings.use_cpu
    return not small and all(side % MULTIPLE == 0 for side in sides)


class _Linear(torch.nn.Linear):
    """A linear layer with 8-bit float products."""

    def forward(self, inputs):
        device = inputs.device.type
        if torch.is_autocast_enabled(device):
            inputs = inputs.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            output = _Product.apply(inputs, self.weight)
            return output if self.bias is None else output + self.bias.to(output.dtype)


class _Product(torch.autograd.Function):
    """inputs @ weight.T, with shapes (..., k) and (n, k), and the products of its backward."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)  # the parameter: ZeRO-3 gathers it again for the backward
        rows = _cast(inputs.reshape(-1, inputs.shape[-1]), INPUTS)
        output = _multiply(rows, _transposed(_cast(weight, INPUTS)), inputs.dtype, fast=True)
        return output.view(*inputs.shape[:-1], output.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        upstream = _cast(gradient.reshape(-1, gradient.shape[-1]), GRADIENTS)
        d_inputs = d_weight = None
        if ctx.needs_input_grad[0]:
            d_inputs = _multiply(upstream, _cast(weight, INPUTS), gradient.dtype).view(inputs.shape)
        if ctx.needs_input_grad[1]:  # not for a frozen base
            rows = _cast(inputs.reshape(-1, inputs.shape[-1]), INPUTS)
            d_weight = _multiply(_transposed(upstream), rows, gradient.dtype).to(weight.dtype)
        return d_inputs, d_weight


def _cast(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scaled matrix in 8-bit floats, and the scale."""
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    scale = tensor_to_scale(matrix, dtype)
    return to_fp8_saturated(matrix.float() * scale, dtype), scale


def _transposed(scaled: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return scaled[0].t(), scaled[1]


def _multiply(a, b, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """Return the product of two scaled matrices. fast: sum in the precision of the tensor cores."""
    (left, left_scale), (right, right_scale) = a, b
    if left.device.type == "cpu":  # emulated as in torchao
        return torch.mm(left.float() / left_scale, right.float() / right_scale).to(dtype)
    from torchao.float8.float8_ops import addmm_float8_unwrapped
    from torchao.float8.float8_utils import pad_tensor_for_matmul

    if left.shape[1] % MULTIPLE:  # tokens
        left, right = pad_tensor_for_matmul(left, dims=1), pad_tensor_for_matmul(right, dims=0)
    right = right.t().contiguous().t()  # the kernel needs a row-major left and a column-major right matrix
    return addmm_float8_unwrapped(left.contiguous(), left_scale, right, right_scale, dtype, use_fast_accum=fast)


def install(settings, model) -> None:
    """Convert the linear layers in place, so that their weights, hooks and adapters stay."""
    if not settings.fp8:
        return
    if settings.compile_layers or settings.torch_compile:
        torch.compiler.allow_in_graph(_Product)  # its parts are compiled, without tracing the Python that calls them
    for linear in _linears(settings, model):
        linear.__class__ = _Linear


def self_test_products(settings, config) -> None:
    """Compare a layer's outputs and gradients with those in bf16 on this GPU, before the model is loaded. Collective.

    Args: config: the model's. Raises: UserError if they differ on any rank.
    """
    if not settings.fp8 or settings.use_cpu:
        return
    largest = max(_linears(settings, load.check_model(settings, config)), key=lambda linear: linear.weight.numel())
    sides = largest.in_features, largest.out_features
    if wrong := self_test.run(functools.partial(problem, sides, torch.device("cuda")), "--fp8", "leave it out"):
        raise UserError(f"--fp8: {wrong}; leave it out.")


def problem(sides: tuple[int, int], device: torch.device) -> str | None:
    """Return the failure for a layer with these numbers of inputs and outputs, or None."""
    with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []):
        linear = torch.nn.Linear(*sides, bias=False, device=device, dtype=torch.bfloat16)
        inputs, upstream = (torch.randn(SELF_TEST_ROWS, side, device=device, dtype=torch.bfloat16) for side in sides)
    expected = _results(linear, inputs, upstream)
    linear.__class__ = _Linear
    in_fp8 = _results(linear, inputs, upstream)
    errors = {what: ((in_fp8[what] - expected[what]).norm() / expected[what].norm()).item() for what in expected}
    what, error = max(errors.items(), key=lambda pair: pair[1] if pair[1] == pair[1] else float("inf"))
    return None if error <= BOUND else f"its {what} differ from bf16 by {error:.1%} (bound {BOUND:.0%})"


def _results(linear, inputs, upstream) -> dict[str, torch.Tensor]:
    """Return the outputs of a layer, and the gradients of their product with `upstream`."""
    inputs = inputs.clone().requires_grad_()
    outputs = linear(inputs)
    d_inputs, d_weight = torch.autograd.grad(outputs, [inputs, linear.weight], upstream)
    tensors = {"outputs": outputs.detach(), "gradients of the inputs": d_inputs, "gradients of the weight": d_weight}
    return {what: tensor.float() for what, tensor in tensors.items()}


TECHNIQUE = Technique(
    name="fp8",
    flag="fp8",
    example="--fp8 true --bf16 true",
    conflicts=(
        Conflict("bf16", (False,), "all other computations are in bf16", "use --bf16 true"),
        Conflict("load_in_4bit", (True,), "a packed base uses other products"),
        Conflict("load_in_8bit", (True,), "a packed base uses other products"),
        Conflict(
            "adapter",
            ("hra",),
            "it multiplies with reflected weights outside of the converted layers",
            "use --adapter lora, or leave --fp8 out",
        ),
        Conflict(
            "adapter",
            ("delora",),
            "it divides by the norm of a matrix that is initially 0, so rounding would dominate the first step",
            "use --adapter lora, or leave --fp8 out",
        ),
        Conflict(
            "torch_compile",
            (True,),
            "DeepSpeed's hooks around each matrix break a compiled layer into about 20 graphs",
            "use --compile_layers true",
            stages=(3,),
        ),
        Conflict(
            "sp_size",
            None,
            "each slice of a row has a separate scale, so the check of the slices cannot distinguish errors from "
            "rounding (10 % of the logits)",
        ),
        Conflict("tp_size", None, "DeepSpeed replaces the linear layers"),
    ),
    resolve=resolve,
    resolve_for_model=resolve_for_model,
    self_test=self_test_products,
    seconds=seconds,
    install=install,
)
