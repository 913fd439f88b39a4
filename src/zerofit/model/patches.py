"""Patch libraries on the training path; each patch names the library's version and the reason.

tests/model/test_patches.py fails when a patch is no longer needed. Simulated ranks are patched in plan/fake_device.py.
docs/patches.toml lists all patches and the private names that are used elsewhere. If a newer library has changed, a
patch for speed or memory is skipped with a note, and a patch for correct numbers raises an error.
"""

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable
from importlib import metadata

from zerofit.base import distributed
from zerofit.base.errors import UserError, first_line

CHANGED = (AttributeError, ImportError, KeyError, TypeError, ValueError)  # errors of a patch if the library has changed


def only_for(purpose: str, library: str, without: str) -> Callable:
    """Return a decorator that handles a patch which no longer applies because the library has changed.

    Args: purpose: "speed" or "memory" (the run continues without the patch) or "numbers" (the run does not start);
        without: the consequence for the user, as a clause.
    """

    def decorate(patch: Callable) -> Callable:
        @functools.wraps(patch)
        def apply(*args) -> None:
            try:
                patch(*args)
            except CHANGED as error:
                changed = f"{library} {metadata.version(library)} has changed ({patch.__name__}: {first_line(error)})"
                if purpose == "numbers":
                    raise UserError(f"{changed}: {without}.") from error
                _print_once(f"note: {changed}: {without}")

        apply.purpose = purpose
        return apply

    return decorate


@functools.cache
def _print_once(sentence: str) -> None:
    """Print a sentence on the first rank, to stderr: a simulated rank writes its result to stdout."""
    if distributed.rank() == 0:
        print(sentence, file=sys.stderr, flush=True)


def check_overrides(cls: type) -> None:
    """Check that each method marked with `override`, in a class or its bases, overrides a method of a base class.

    Raises: UserError for a method that a newer library has renamed: the override would never be called.
    """
    for owner in cls.__mro__:
        for name, method in vars(owner).items():
            if getattr(method, "__override__", False) and not any(hasattr(base, name) for base in owner.__mro__[1:]):
                library = next(base for base in owner.__mro__ if not base.__module__.startswith("zerofit."))
                raise UserError(_missing_name(library, name))


def check_attributes(owner: object, *names: str) -> None:
    """Check that a library's object has these attributes. Raises: UserError."""
    for name in names:
        if not hasattr(owner, name):
            raise UserError(_missing_name(type(owner), name))


def write(owner: object, name: str, value) -> None:
    """Set an existing attribute of a library's object. Raises: UserError if it does not exist."""
    check_attributes(owner, name)
    setattr(owner, name, value)


def _missing_name(owner: type, name: str) -> str:
    """Return the error message for a private name that a newer library has removed."""
    library = owner.__module__.partition(".")[0]
    return (
        f"{owner.__name__}.{name}: {library} {metadata.version(library)} no longer has it, and training needs it "
        f"(docs/patches.toml); install an earlier {library}."
    )


@only_for("memory", "bitsandbytes", "each rank of a QLoRA run at stage 3 holds the full base in the backward")
def release_gathered_4bit_weights() -> None:
    """Make bitsandbytes (0.50.2) save the ZeRO-3 parameter for the backward, not its gathered data.

    `MatMul4Bit` saves `weight.view(-1, 1)`, whose storage is the gathered weight. DeepSpeed empties the parameter after
    the layer, but that storage lives until the end of the backward, so every rank holds the full base, with or without
    checkpointing. If the parameter itself is saved, DeepSpeed gathers it again before the backward.
    """
    import bitsandbytes
    import torch

    plain = bitsandbytes.matmul_4bit
    if plain.__name__ == "matmul_gathered_4bit":
        return

    class Product(torch.autograd.Function):
        """Multiply x (..., K) by the transposed 4-bit weight (N, K), add bias (N)."""

        @staticmethod
        def forward(ctx, x, weight, bias, quant_state):
            ctx.weight, ctx.quant_state = weight, quant_state
            return plain(x, weight, bias=bias, quant_state=quant_state)

        @staticmethod
        def backward(ctx, gradient):
            weight = bitsandbytes.functional.dequantize_4bit(ctx.weight.data, ctx.quant_state).to(gradient.dtype)
            of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
            return torch.matmul(gradient, weight), None, of_bias, None

    def matmul_gathered_4bit(A, B, quant_state, out=None, bias=None):
        if not hasattr(B, "ds_id") or out is not None:
            return plain(A, B, quant_state=quant_state, out=out, bias=bias)
        return Product.apply(A, B, bias, quant_state)

    bitsandbytes.matmul_4bit = matmul_gathered_4bit


@only_for("speed", "deepspeed", "steps at stage 3 take longer")
def list_own_parameters_directly() -> None:
    """Make ZeRO-3's coordinator (DeepSpeed 0.19.8) read a module's parameters directly from its dictionaries.

    `iter_params` walks `named_parameters`, which builds prefixes and a set of parameters: 40 microseconds, several
    times for each use of a module in a step, and for each pair of uses in the first step after the trace. A LoRA step
    of 4 layers with 7 adapters each took 1.3 s of Python on one core, and takes 0.8 s with this patch.
    """
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator

    plain = partitioned_param_coordinator.iter_params
    if plain.__name__ == "own_parameters":
        return

    def own_parameters(module, recurse=False):
        if recurse:
            return plain(module, recurse=True)
        return [p for p in (*module._parameters.values(), *module._external_params.values()) if p is not None]

    partitioned_param_coordinator.iter_params = parameter_offload.iter_params = own_parameters


@only_for("speed", "deepspeed", "steps at stage 3 may gather parameters twice")
def clear_releases_with_trace() -> None:
    """Make ZeRO-3's coordinator (DeepSpeed 0.19.8) clear its list of parameters to release when it drops its trace.

    It caches the list by module and step. After a forward without a backward before the first step (samples, the check
    of packed rows), every later step used that forward's list and released parameters that its backward still needs: a
    LoRA step of the bundled model gathered 56 % more numbers.
    """
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    plain = Coordinator._clear_trace_structures
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def clear_trace_and_releases(self):
        plain(self)
        self.dropped_traces = getattr(self, "dropped_traces", 0) + 1

    Coordinator._clear_trace_structures = clear_trace_and_releases
    # The coordinator is part of the cache's key: with a new hash, entries of an earlier trace are not used.
    Coordinator.__hash__ = lambda self: hash((id(self), getattr(self, "dropped_traces", 0)))


@only_for("memory", "deepspeed", "the memory of a rank at stage 3 differs by up to a layer from run to run")
def wait_for_parameters_in_order() -> None:
    """Make ZeRO-3's coordinator (DeepSpeed 0.19.8) wait for the parameters of a module in a fixed order.

    It iterates over sets, whose order differs between processes. The parameters of a layer are gathered by two or more
    calls, and several of their buffers are alive at the same time if the calls are not awaited in order: the memory of
    a rank, and of a plan, differed by up to a layer from run to run.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator

    partitioned_param_coordinator.set = _InOrder


class _InOrder(set):
    """A set of parameters, or of their ids, that is iterated in the order of the ids."""

    def __iter__(self):
        return iter(sorted(super().__iter__(), key=lambda entry: getattr(entry, "ds_id", entry)))


@contextlib.contextmanager
def same_trace(engine, begins: bool = False):
    """Make a forward in the body part of the current trace of ZeRO-3's coordinator (DeepSpeed 0.19.8).

    The coordinator records the modules from one forward of the model to the next, to prefetch their parameters. If each
    step has two forwards of different modules, such as with an adapter off and on, the trace was dropped and recorded
    anew each time: nothing was prefetched, and the ranks compared each new trace. A nested context does nothing.
    Args: begins: start a new trace with the body.
    """
    zero = getattr(engine.optimizer, "parameter_offload", engine.optimizer)  # without training it is the optimizer
    coordinator = zero.get_param_coordinator() if hasattr(zero, "get_param_coordinator") else None
    if not (has_step := hasattr(coordinator, "reset_step")):
        _print_once(f"note: deepspeed {metadata.version('deepspeed')} lacks reset_step: steps at stage 3 take longer")
    if not has_step or "reset_step" in vars(coordinator):
        yield
        return
    if begins:
        coordinator.reset_step()
    coordinator.reset_step = lambda: None
    try:
        yield
    finally:
        del coordinator.reset_step


_WITH_BOUNDS = set()  # names of attention functions that receive the documents' boundaries


@only_for("speed", "transformers", "the host waits once in each forward of packed rows")
def skip_document_search(name: str) -> None:
    """Keep transformers (5.23.0) from building a document mask for the attention `name`, which receives boundaries.

    In each forward without a mask it searches the positions for documents on the device: the host waits once per micro
    batch, for a mask that attention.mask omits.
    """
    from transformers import masking_utils

    _WITH_BOUNDS.add(name)
    plain = masking_utils._preprocess_mask_arguments
    if hasattr(plain, "plain"):
        return
    parameters = inspect.signature(plain)
    if not {"config", "position_ids"} <= set(parameters.parameters):
        raise AttributeError("_preprocess_mask_arguments does not take config and position_ids")

    @functools.wraps(plain)
    def without_a_search(*args, **named):
        bound = parameters.bind(*args, **named)
        if bound.arguments["config"]._attn_implementation in _WITH_BOUNDS:
            bound.arguments["position_ids"] = None  # only this search reads them
        return plain(*bound.args, **bound.kwargs)

    without_a_search.plain = plain
    masking_utils._preprocess_mask_arguments = without_a_search


@only_for("numbers", "transformers", "the experts of this model could be loaded transposed at stage 3; use --zero 2")
def compare_full_shapes() -> None:
    """Make transformers' weight conversion (5.23.0) compare with the full shape of ZeRO-3 parameters.

    `Transpose(check_dims=True)`, for the experts of Qwen3-VL-MoE, transposes weights whose shape differs from the
    parameter's. At stage 3 that shape is (0,), so correct weights were transposed, and rejected if not square.
    """
    from transformers.core_model_loading import Transpose

    plain = Transpose.convert
    if hasattr(plain, "plain"):
        return
    if "check_dims" not in inspect.signature(Transpose).parameters:
        raise AttributeError("Transpose does not take check_dims")

    def convert_by_full_shape(self, input_dict, source_patterns, target_patterns, **named):
        if self.check_dims:
            shape = getattr(named["model"].get_parameter(named["full_layer_name"]), "ds_shape", None)
            if shape is not None:
                full = types.SimpleNamespace(shape=shape)
                named["model"] = types.SimpleNamespace(get_parameter=lambda name: full)
        return plain(self, input_dict, source_patterns, target_patterns, **named)

    convert_by_full_shape.plain = plain
    Transpose.convert = convert_by_full_shape


@only_for("numbers", "transformers", "Llama 4's image-text class cannot be trained")
def give_llama4_image_outputs() -> None:
    """Let Llama 4's forward (transformers 5.24) read image_outputs of an output that lacks it.

    Without it each forward of the image-text class ends in an AttributeError.
    """
    from transformers.models.llama4 import modeling_llama4 as modeling

    reads = "outputs.image_outputs" in inspect.getsource(modeling.Llama4ForConditionalGeneration.forward)
    if reads and not hasattr(modeling.MoeCausalLMOutputWithPast, "image_outputs"):
        modeling.MoeCausalLMOutputWithPast.image_outputs = None
