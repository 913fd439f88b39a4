"""Gradient checkpointing: which layers are recomputed, what they still store, and where."""

import collections
import functools
import json
import weakref

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zerofit.base.buffers import IN_FLIGHT
from zerofit.base.errors import UserError
from zerofit.job.settings import decide
from zerofit.job.technique import AllBut, Conflict, Technique
from zerofit.model import prove

SIMULATED_ATTENTION = "zerofit::attention"  # of a plan (plan/fake_device.py)

# Matrix products and attention, which are slow to recompute. Norms, activations, rotations and casts are recomputed.
SAVED_OPERATIONS = frozenset(
    """
    aten::mm aten::addmm aten::bmm aten::baddbmm aten::_scaled_mm aten::_grouped_mm
    aten::_scaled_dot_product_flash_attention aten::_scaled_dot_product_efficient_attention
    aten::_scaled_dot_product_cudnn_attention aten::_scaled_dot_product_flash_attention_for_cpu
    aten::_scaled_dot_product_fused_attention_overrideable aten::_flash_attention_forward
    aten::_efficient_attention_forward torch_attn::_varlen_attn flex_attention
    flash_attn::_flash_attn_forward flash_attn::_flash_attn_varlen_forward flash_attn_3::fwd
    """.split()
) | {SIMULATED_ATTENTION}

ARGUMENTS = (
    "gradient_checkpointing", "gradient_checkpointing_every", "gradient_checkpointing_policy",
    "gradient_checkpointing_kwargs", "activation_offload", "activation_offload_streams",
)  # fmt: skip

PROOF_LAYERS, PROOF_WIDTH, PROOF_ROWS = 6, 2048, (2048, 1024)  # of the proof of the streams; rows of two micro batches


def is_open(settings) -> bool:
    """Return whether nothing but a default says how to checkpoint."""
    in_json = settings.deepspeed and "activation_checkpointing" in settings.deepspeed
    sources = {settings.source[name] for name in ARGUMENTS}
    return settings.gradient_checkpointing and sources <= {"default", "transformers default"} and not in_json


def resolve(settings) -> None:
    """Merge both names of each argument into gradient_checkpointing*, and check the combination.

    transformers 5.20 renamed gradient_checkpointing* to activation_checkpointing*.
    Raises: UserError for a contradiction.
    """
    values = settings.values
    _one_name(settings, "gradient_checkpointing", "activation_checkpointing")
    _one_name(settings, "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    kwargs = dict(_parsed(values["gradient_checkpointing_kwargs"]))
    for key, flag in (("every_n_layers", "gradient_checkpointing_every"), ("offload", "activation_offload")):
        if key in kwargs:
            value = kwargs.pop(key)
            if settings.source[flag] != "default" and values[flag] != value:
                raise UserError(f"--{flag} is {values[flag]}, but gradient_checkpointing_kwargs says {key} {value}.")
            decide(settings, flag, value, source=settings.source["gradient_checkpointing_kwargs"])
    kwargs = {"use_reentrant": False, **kwargs}
    decide(settings, "gradient_checkpointing_kwargs", kwargs, source=settings.source["gradient_checkpointing_kwargs"])
    if values["gradient_checkpointing_every"] < 1:
        raise UserError(
            f"--gradient_checkpointing_every is {values['gradient_checkpointing_every']}: it must be 1 or more."
        )
    selective = values["gradient_checkpointing_policy"] == "selective"
    if selective and kwargs["use_reentrant"]:
        raise UserError(
            "--gradient_checkpointing_policy selective needs non-reentrant checkpointing: delete use_reentrant from "
            "--gradient_checkpointing_kwargs."
        )
    if values["activation_offload"] and settings.use_cpu:
        settings.decisions.append(
            "activation_offload: nothing to move, the activations of a CPU run are in host memory"
        )
    if settings.deepspeed and "activation_checkpointing" in settings.deepspeed:
        settings.decisions.append(
            "the DeepSpeed JSON's activation_checkpointing section has no effect: models of transformers never call "
            "DeepSpeed's checkpointing; see --gradient_checkpointing and --activation_offload"
        )


def resolve_for_model(settings, config) -> None:
    """Leave it out, where only a default asks for it, for a class of transformers that has none (JetMoE, CTRL)."""
    from zerofit.model.image_text import classes

    cls = classes.text_class(config) if is_open(settings) else None
    if cls is not None and not cls.supports_gradient_checkpointing:
        decide(settings, "gradient_checkpointing", False, f"{cls.__name__} of transformers has none")


def _one_name(settings, old: str, new: str) -> None:
    """Move the value of the `new` name (transformers 5.20) to the `old` one, which is used here."""
    value = settings.values.get(new)
    if value is None:
        return
    old_is_set = settings.source[old] not in ("default", "bundled task", "transformers default")
    if old_is_set and settings.values[old] != value:
        raise UserError(
            f"--{old} is {settings.values[old]}, but --{new} is {value}: give one of them, they are the same."
        )
    decide(settings, old, value, source=settings.source[new])
    decide(settings, new, None, source=settings.source[new])


def _parsed(kwargs) -> dict:
    """Return the dictionary of --gradient_checkpointing_kwargs, a dict or JSON text."""
    if not isinstance(kwargs, str):
        return kwargs or {}
    try:
        parsed = json.loads(kwargs)
    except json.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise UserError(f"--gradient_checkpointing_kwargs {kwargs}: must be a JSON object.")
    return parsed


def enable(settings, model) -> None:
    """Enable gradient checkpointing; call it once, before the Trainer is created.

    The Trainer cannot do it: it takes the policy only from TrainingArguments, which must be serializable as JSON.
    Raises: UserError for a model without support, or with fewer layers than --gradient_checkpointing_every.
    """
    from zerofit.model import load

    if not settings.gradient_checkpointing:
        return
    every, kwargs = settings.gradient_checkpointing_every, dict(settings.gradient_checkpointing_kwargs)
    if settings.gradient_checkpointing_policy == "selective":
        kwargs["context_fn"] = _keeping_products
    layers = len(load.transformer_layers(model))
    if every > max(layers, 1):
        raise UserError(f"--gradient_checkpointing_every {every}: the model has {layers} layers; choose fewer.")
    # Renamed in transformers 5.20. `offload` needs pinned memory, which does not exist on a CPU alone.
    turn_on = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    offload = settings.activation_offload and not settings.use_cpu
    streams = offload and settings.activation_offload_streams
    try:
        turn_on(kwargs, every_n_layers=every, offload=offload and not streams)
    except ValueError as error:
        raise UserError(f"--gradient_checkpointing: {error} Add --gradient_checkpointing false.") from None
    if streams:
        offload_in_streams(model, StreamedOffload(torch.accelerator.current_accelerator().type))


def _keeping_products() -> tuple["_Products", "_Products"]:
    """Return the contexts of torch.utils.checkpoint for the forward and for the recomputation."""
    contexts = create_selective_checkpoint_contexts(lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
    return tuple(_Products(context) for context in contexts)


class _Products(TorchDispatchMode):
    """Pass only SAVED_OPERATIONS to torch's selective checkpointing.

    It requires the same operations in the same order in forward and recomputation, but ZeRO-3 gathers parameters in
    one and finds them gathered in the other.
    """

    def __init__(self, context: TorchDispatchMode):
        super().__init__()
        self.context = context

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name() if hasattr(operation, "name") else str(operation)
        if name in SAVED_OPERATIONS:
            return self.context.__torch_dispatch__(operation, types, args, kwargs or {})
        return operation(*args, **(kwargs or {}))


# --- activation offload beside the arithmetic ---


def offload_in_streams(model, context: "StreamedOffload") -> None:
    """Make the model's checkpointed layers save their inputs under the context."""

    def under_context(function):
        def checkpointed(*args, **kwargs):
            with context:
                return function(*args, **kwargs)

        return checkpointed

    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = under_context(module._gradient_checkpointing_func)


class _Saved:
    """A saved tensor in host memory. tensor: on the GPU, while it is there; copied: event of the last copy.

    following: weak reference to the one that a backward takes next; overwritten: the tensor was, while it was copied.
    """

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, following):
        self.tensor, self.host, self.following = tensor, host, following
        self.device, self.version, self.copied, self.overwritten = tensor.device, None, None, False


def _nothing() -> None:
    """Stand for a weak reference to what is gone."""


class StreamedOffload(saved_tensors_hooks):
    """Context that keeps saved tensors in pinned host memory, and copies them on a stream of their own.

    As save_on_cpu(pin_memory=True), but the arithmetic goes on meanwhile. The forward holds a tensor until its copy is
    done; the backward, while it uses one, fetches the next. At most IN_FLIGHT are on the GPU. They are allocated by the
    compute stream, which waits for a tensor's copy before it releases the memory, so nothing else can be in it too
    early. The pinned memory is torch's: its allocator uses a block again when the copies of it are done.

    Each `with` is one layer: a backward takes the layers in reverse, and the tensors of a layer in order. Any other
    order computes the same, and waits for its copies.
    Args: device_type: other devices' tensors stay where they are; streams: torch.cuda, or a stand-in of its interface.
    """

    def __init__(self, device_type: str, streams=None):
        super().__init__(self._pack, self._unpack)
        self.device_type, self.streams = device_type, streams or torch.get_device_module(device_type)
        self.side = None  # stream of the copies
        self.resident: collections.deque[_Saved] = collections.deque()  # those on the GPU, the oldest first
        # Weak references: to what the last layer, and the one before it, saved first, and to what was saved last.
        self.first = self.before = self.last = _nothing

    def __enter__(self) -> None:
        self.before, self.first = self.first, _nothing
        super().__enter__()

    def _pack(self, tensor: torch.Tensor):
        if tensor.device.type != self.device_type or tensor.layout != torch.strided or not tensor.numel():
            return tensor
        self.side = self.side or self.streams.Stream()
        self._make_room(IN_FLIGHT - 1)
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.device_type != "cpu")
        saved = _Saved(tensor.detach(), host, self.before)  # with its graph it would keep all before it alive
        self._copy(saved, saved.tensor, host)
        if self.first() is None:
            self.first = weakref.ref(saved)
        elif (last := self.last()) is not None:
            last.following = weakref.ref(saved)
        self.last = weakref.ref(saved)
        return saved

    def _unpack(self, saved):
        """Return the tensor. Raises: RuntimeError if it was overwritten while it was copied."""
        if isinstance(saved, torch.Tensor):
            return saved
        self._fetch(saved, IN_FLIGHT - 1)
        tensor = saved.tensor
        self._release(saved)
        if saved.overwritten:
            raise RuntimeError("a layer writes into its input: leave --activation_offload_streams out")
        if (following := saved.following()) is not None:
            self._fetch(following, IN_FLIGHT - 2)
        return tensor

    def _fetch(self, saved: _Saved, others: int) -> None:
        """Start the copy of a tensor to the GPU, beside so many others at most, unless it is there."""
        if saved.tensor is None:
            self._make_room(others)
            saved.tensor = torch.empty_like(saved.host, device=saved.device)
            self._copy(saved, saved.host, saved.tensor)

    def _copy(self, saved: _Saved, source: torch.Tensor, target: torch.Tensor) -> None:
        self.side.wait_stream(self.streams.current_stream())  # for the source, and for who had the target's memory
        with self.streams.stream(self.side):
            target.copy_(source, non_blocking=True)
            saved.copied = self.side.record_event()
        saved.version = saved.tensor._version
        self.resident.append(saved)

    def _make_room(self, count: int) -> None:
        while len(self.resident) > count:
            self._release(self.resident[0])

    def _release(self, saved: _Saved) -> None:
        """Release a tensor on the GPU when it is copied."""
        self.streams.current_stream().wait_event(saved.copied)
        saved.overwritten |= saved.tensor._version != saved.version
        saved.tensor = None
        self.resident.remove(saved)


def prove_streams(settings) -> None:
    """Compare offload in streams with torch's on this GPU, before the model is loaded. Collective.

    A difference on any rank turns the streams off on all, with a line among the decisions.
    Raises: UserError for a failure after which the GPU computes nothing more.
    """
    if not settings.activation_offload_streams or settings.use_cpu:
        return
    find = functools.partial(_problem_of_streams, torch.device("cuda"))
    problem = prove.problem(find, "--activation_offload_streams", "leave it out")
    if problem is not None:
        settings.activation_offload_streams = False
        settings.decisions.append(f"activation_offload_streams False: {problem}")


def _problem_of_streams(device: torch.device) -> str | None:
    """Return what is wrong with StreamedOffload on this rank's GPU; None if nothing is."""
    expected = _gradients_under(save_on_cpu(device.type != "cpu", device.type), device)
    streamed = _gradients_under(StreamedOffload(device.type), device)
    same = all(torch.equal(one, other) for one, other in zip(expected, streamed, strict=True))
    return None if same else "its gradients differ from those without streams on this GPU"


def _gradients_under(context, device: torch.device) -> list[torch.Tensor]:
    """Return the gradients of two micro batches through layers that take less time than the copies of their inputs."""
    random = torch.Generator(device).manual_seed(0)
    weights = torch.randn(PROOF_LAYERS, PROOF_WIDTH, device=device, generator=random).requires_grad_()
    gradients = []
    for rows in PROOF_ROWS:
        hidden = inputs = torch.randn(rows, PROOF_WIDTH, device=device, generator=random).requires_grad_()
        for weight in weights:
            with context:
                hidden = checkpoint(lambda x, w: torch.sin(x * w), hidden, weight, use_reentrant=False)
        gradients += torch.autograd.grad(hidden.sum(), [inputs, weights])
    return gradients


_IS_OFF = Conflict(
    "gradient_checkpointing",
    (False,),
    "checkpointing that is off cannot be refined",
    "use --gradient_checkpointing true",
)

# The first one's hooks are for all.
TECHNIQUES = (
    Technique(
        name="gradient checkpointing",
        flag="gradient_checkpointing",
        resolve=resolve,
        resolve_for_model=resolve_for_model,
        install=enable,
    ),
    Technique(
        name="no gradient checkpointing",
        flag="gradient_checkpointing",
        values=(False,),
        example="--gradient_checkpointing false",
    ),
    Technique(
        name="checkpointing of every Nth layer",
        flag="gradient_checkpointing_every",
        values=AllBut(1),
        example="--gradient_checkpointing_every 2",
        conflicts=(_IS_OFF,),
    ),
    Technique(
        name="selective checkpointing",
        flag="gradient_checkpointing_policy",
        values=("selective",),
        example="--gradient_checkpointing_policy selective",
        conflicts=(_IS_OFF,),
    ),
    Technique(
        name="activation offload",
        flag="activation_offload",
        example="--activation_offload true",
        conflicts=(_IS_OFF,),
    ),
    Technique(
        name="activation offload in streams",
        flag="activation_offload_streams",
        example="--activation_offload true --activation_offload_streams true",
        conflicts=(
            Conflict(
                "activation_offload", (False,), "an offload that is off has no streams", "use --activation_offload true"
            ),
        ),
    ),
)
