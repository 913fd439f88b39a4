"""Patch libraries on the training path, each patch with the library's version and the reason.

tests/model/test_patches.py fails when a patch is no longer needed. Those of simulated ranks are in plan/fake_device.py;
docs/patches.toml lists all, with the private names that are used elsewhere. A patch that saves time or memory does
nothing where a newer library has changed, and says so; one that keeps numbers right refuses to train.
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

CHANGED = (AttributeError, ImportError, KeyError, TypeError, ValueError)  # what a patch meets in a changed library


def only_for(purpose: str, library: str, without: str) -> Callable:
    """Return a decorator of patches, functions that change a library, for a library that may have changed itself.

    Args: purpose: "speed" or "memory": the run goes on without the patch; "numbers": it does not start. without: what
        that means for the user, as a part of a sentence.
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
                _say_once(f"note: {changed}: {without}")

        apply.purpose = purpose
        return apply

    return decorate


@functools.cache
def _say_once(sentence: str) -> None:
    """Print a sentence on the first rank; on stderr, as a simulated rank answers on stdout."""
    if distributed.rank() == 0:
        print(sentence, file=sys.stderr, flush=True)


def check_overrides(cls: type) -> None:
    """Check that each method of a class, or of its bases, that is marked by `override` overrides one.

    Raises: UserError for a method that a newer library calls by another name: it would never be called.
    """
    for owner in cls.__mro__:
        for name, method in vars(owner).items():
            if getattr(method, "__override__", False) and not any(hasattr(base, name) for base in owner.__mro__[1:]):
                library = next(base for base in owner.__mro__ if not base.__module__.startswith("zerofit."))
                raise UserError(_gone(library, name))


def check_attributes(owner: object, *names: str) -> None:
    """Check that an object of a library has attributes that are written to it. Raises: UserError."""
    for name in names:
        if not hasattr(owner, name):
            raise UserError(_gone(type(owner), name))


def write(owner: object, name: str, value) -> None:
    """Set an attribute that a library reads. Raises: UserError where it does not have it."""
    check_attributes(owner, name)
    setattr(owner, name, value)


def _gone(owner: type, name: str) -> str:
    """Return the sentence on a private name that a library has lost."""
    library = owner.__module__.partition(".")[0]
    return (
        f"{owner.__name__}.{name}: {library} {metadata.version(library)} no longer has it, and training would go on "
        f"without what it is for (docs/patches.toml); install an earlier {library}."
    )


@only_for("memory", "bitsandbytes", "each rank of a QLoRA run at stage 3 holds the whole base in the backward")
def release_gathered_4bit_weights() -> None:
    """Make bitsandbytes (0.50.2) save the ZeRO-3 parameter for the backward, not its gathered data.

    `MatMul4Bit` saves `weight.view(-1, 1)`, whose storage is the gathered weight. DeepSpeed empties the parameter after
    the layer, but that storage lives until the end of the backward, with or without checkpointing: the full base of all
    layers on every rank. If the parameter itself is saved, DeepSpeed gathers it again before the backward needs it.
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
    """Make ZeRO-3's coordinator (DeepSpeed 0.19.8) read a module's parameters from its own dictionaries.

    `iter_params` walks `named_parameters`, which builds prefixes and a set of what was seen: 40 microseconds, several
    times for each use of a module in a step, and for each pair of uses in the first step after the trace. A LoRA step
    of 4 layers with 7 adapters each took 1.3 s of Python on one core, 0.8 s with this.
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
def forget_releases_with_their_trace() -> None:
    """Make ZeRO-3's coordinator (DeepSpeed 0.19.8) forget which parameters to release when it drops its trace.

    It caches them by module and step. After a forward without a backward before the first step (samples, the check of
    packed rows) every later step released what its backward still needs, by that pass's trace: a LoRA step of the
    bundled model gathered 56 % more numbers.
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
    # The cache has the coordinator among its keys: with another hash it finds nothing of an earlier trace.
    Coordinator.__hash__ = lambda self: hash((id(self), getattr(self, "dropped_traces", 0)))


@only_for("memory", "deepspeed", "the memory of a rank at stage 3 differs by up to a layer from run to run")
def wait_for_parameters_in_order() -> None:
    """Make ZeRO-3's coordinator (DeepSpeed 0.19.8) wait for the parameters of a module in their order.

    It goes through sets of them, whose order is another in each process. Those of a whole layer are gathered by two
    calls or more, of which several buffers are alive unless one call after the other is waited for: the memory of a
    rank differed by up to a layer from run to run, and a plan's with it.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator

    partitioned_param_coordinator.set = _InOrder


class _InOrder(set):
    """A set of parameters, or of their numbers, that is iterated in the order of the numbers."""

    def __iter__(self):
        return iter(sorted(super().__iter__(), key=lambda entry: getattr(entry, "ds_id", entry)))


@contextlib.contextmanager
def same_trace(engine, begins: bool = False):
    """Let a forward in the body be a part of the trace of ZeRO-3's coordinator (DeepSpeed 0.19.8) that goes on.

    The coordinator records the modules from one forward of the model to the next, to gather their parameters ahead. Two
    forwards of different modules in each step, as with an adapter off and on, had the trace dropped and recorded in
    turns: nothing was gathered ahead, and the ranks compared each new trace. Within another such context it does
    nothing.
    Args: begins: the trace begins with the body.
    """
    zero = getattr(engine.optimizer, "parameter_offload", engine.optimizer)  # without training it is the optimizer
    coordinator = zero.get_param_coordinator() if hasattr(zero, "get_param_coordinator") else None
    if not (has_step := hasattr(coordinator, "reset_step")):
        _say_once(f"note: deepspeed {metadata.version('deepspeed')} has no reset_step: steps at stage 3 take longer")
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


_WITH_BOUNDS = set()  # names of attention functions that are told where documents begin


@only_for("speed", "transformers", "the host waits once in each forward of packed rows")
def look_for_no_documents(name: str) -> None:
    """Make transformers (5.23.0) build no mask of documents for the attention `name`, which is told their boundaries.

    It looks for documents in the positions of each forward without a mask, and asks the device whether there are
    several: the host waits once a micro batch, for a mask that attention.mask leaves out.
    """
    from transformers import masking_utils

    _WITH_BOUNDS.add(name)
    plain = masking_utils._preprocess_mask_arguments
    if hasattr(plain, "plain"):
        return
    parameters = inspect.signature(plain)
    if not {"config", "position_ids"} <= set(parameters.parameters):
        raise AttributeError("_preprocess_mask_arguments takes no config and position_ids")

    @functools.wraps(plain)
    def without_a_search(*args, **named):
        given = parameters.bind(*args, **named)
        if given.arguments["config"]._attn_implementation in _WITH_BOUNDS:
            given.arguments["position_ids"] = None  # are read for that alone
        return plain(*given.args, **given.kwargs)

    without_a_search.plain = plain
    masking_utils._preprocess_mask_arguments = without_a_search


@only_for("numbers", "transformers", "the experts of this model could be loaded transposed at stage 3; use --zero 2")
def compare_whole_shapes() -> None:
    """Make transformers' conversion of weights (5.23.0) compare shapes with those of whole ZeRO-3 parameters.

    `Transpose(check_dims=True)`, for the experts of Qwen3-VL-MoE, transposes what has not the parameter's shape. That
    is (0,) at stage 3, so weights that are already in order were transposed, and refused if they are not square.
    """
    from transformers.core_model_loading import Transpose

    plain = Transpose.convert
    if hasattr(plain, "plain"):
        return
    if "check_dims" not in inspect.signature(Transpose).parameters:
        raise AttributeError("Transpose takes no check_dims")

    def convert_whole(self, input_dict, source_patterns, target_patterns, **named):
        if self.check_dims:
            shape = getattr(named["model"].get_parameter(named["full_layer_name"]), "ds_shape", None)
            if shape is not None:
                whole = types.SimpleNamespace(shape=shape)
                named["model"] = types.SimpleNamespace(get_parameter=lambda name: whole)
        return plain(self, input_dict, source_patterns, target_patterns, **named)

    convert_whole.plain = plain
    Transpose.convert = convert_whole
