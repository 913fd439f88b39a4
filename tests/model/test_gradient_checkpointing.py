"""Activation offload in streams, on a stand-in of torch.cuda whose copies run as late and as early as waits allow."""

import contextlib
import functools
import inspect
import math
import textwrap
import weakref
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, run_world
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.model import gradient_checkpointing, prove
from zerofit.model.gradient_checkpointing import IN_FLIGHT, StreamedOffload

GPU = hardware.GPUS["h100-80g"]
LAYERS = 6
CONFIG = AutoConfig.for_model(
    "llama", hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2, vocab_size=64,
    attn_implementation="eager",
)  # fmt: skip
MOST = IN_FLIGHT + 1  # the forward of a model of transformers holds the embeddings, the first layer's input, itself
LENGTHS = ((21, 40), (40, 9))  # of the micro batches of two steps
WAYS = {
    "every layer": {},
    "every 2nd": {"gradient_checkpointing_every": 2},
    "selective": {"gradient_checkpointing_policy": "selective"},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
}

QUICK = ("every layer", "selective", "the side stream never waits", "the compute stream never waits")  # not slow


def key_of(tensor) -> int:
    return tensor.untyped_storage()._cdata


class Stream:
    """A side stream: its copies are queued until the compute stream waits for an event after them."""

    def __init__(self, device):
        self.device, self.copies, self.done, self.seen = device, [], 0, 0

    def wait_stream(self, stream):
        assert stream is self.device.compute
        self.seen = self.device.clock

    def record_event(self):
        return SimpleNamespace(stream=self, position=len(self.copies))


class Compute:
    """The compute stream: what it is given is done at once."""

    def __init__(self, device):
        self.device = device

    def wait_event(self, event):
        with _disable_current_modes():
            for position in range(event.stream.done, event.position):
                event.stream.copies[position]()
                event.stream.copies[position] = None  # and with it the host's memory
        event.stream.done = max(event.stream.done, event.position)


class Device(TorchDispatchMode):
    """torch.cuda's interface on the CPU, as harsh as a GPU may be.

    A copy runs as late as waits allow: when the compute stream waits for an event after it. Memory that is freed before
    is used by others: what is copied from there is NaN, and a copy to there is a `stray`. A copy that its stream starts
    before it has waited for the operations that wrote the source, or allocated the target, is NaN too.
    clock: number of operations of the compute stream; saved: storages on the device that copies have read or written.
    """

    def __init__(self):
        super().__init__()
        self.compute, self.current, self.clock = Compute(self), None, 0
        self.written, self.host, self.saved = {}, set(), set()
        self.most_saved = self.copies = self.stray = 0

    def Stream(self):
        return Stream(self)

    def current_stream(self):
        return self.current or self.compute

    @contextlib.contextmanager
    def stream(self, stream):
        self.current = stream
        try:
            yield
        finally:
            self.current = None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if self.current is not None and operation is torch.ops.aten.copy_.default:
            self.enqueue(*args[:2])
            return args[0]
        assert self.current is None or not operation._schema.is_mutable
        result = operation(*args, **(kwargs or {}))
        self.clock += 1
        if operation is torch.ops.aten.empty_like.default and result.is_floating_point():
            result.fill_(math.nan)
        outputs = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        for tensor in outputs:
            if key_of(tensor) not in self.written:
                weakref.finalize(tensor.untyped_storage(), self.forget, key_of(tensor)).atexit = False
                self.written[key_of(tensor)] = self.clock
            elif operation._schema.is_mutable:
                self.written[key_of(tensor)] = self.clock
        return result

    def forget(self, key):
        for known in (self.host, self.saved):
            known.discard(key)
        self.written.pop(key, None)

    def enqueue(self, target, source):
        """Queue a copy; only the memory of the host is kept for it, as by torch's allocator of pinned memory."""
        stream, to_host = self.current, key_of(source) not in self.host
        if to_host:
            self.host.add(key_of(target))
        on_device, on_host = (source, target) if to_host else (target, source)
        early = self.written.get(key_of(on_device), 0) > stream.seen
        memory = weakref.ref(on_device.untyped_storage())
        place = on_device.storage_offset(), on_device.shape, on_device.stride()
        dtype, host = on_device.dtype, on_host.detach()

        def copy():
            storage = memory()
            if storage is None and not to_host:
                self.stray += 1
                return
            alive = None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *place)
            target, source = (host, alive) if to_host else (alive, host)
            target.copy_(torch.full_like(target, math.nan) if source is None or early else source)

        stream.copies.append(copy)
        self.saved.add(key_of(on_device))
        self.copies += 1
        self.most_saved = max(self.most_saved, len(self.saved))


def llama(way: dict, context=None):
    """A checkpointed model, whose layers save their inputs under the context."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    model.train()
    values = {
        "gradient_checkpointing": True, "gradient_checkpointing_every": 1, "gradient_checkpointing_policy": "full",
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "activation_offload": False,
        "activation_offload_streams": False, "use_cpu": True,
    }  # fmt: skip
    gradient_checkpointing.enable(SimpleNamespace(**values | way), model)
    if context is not None:
        gradient_checkpointing.offload_in_streams(model, context)
    return model


def trained(model) -> list[torch.Tensor]:
    """Losses and final weights of two steps with accumulation, of rows of different lengths."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw, losses = torch.Generator().manual_seed(1), []
    for lengths in LENGTHS:
        for length in lengths:
            rows = torch.randint(64, (1, length), generator=draw)
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@functools.cache
def expected(way: str) -> list[torch.Tensor]:
    """What torch's save_on_cpu, in the place where transformers has it, computes."""
    return trained(llama(WAYS[way], save_on_cpu()))


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.oracle
@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_streams_change_no_bit(way):
    """With torch.cpu's streams, which do nothing; and the model trains."""
    found = trained(llama(WAYS[way], StreamedOffload("cpu")))
    assert equal(found, expected(way)) and found[0] != found[2]


@pytest.mark.parametrize("way", WAYS)
def test_late_and_early_copies_change_no_bit_and_few_tensors_are_on_the_gpu(way):
    with Device() as device:
        assert equal(trained(llama(WAYS[way], StreamedOffload("cpu", device))), expected(way))
    layers, batches = LAYERS // WAYS[way].get("gradient_checkpointing_every", 1), len(LENGTHS) * 2
    assert device.copies == batches * (2 * layers - IN_FLIGHT)  # the last inputs come back without a copy
    assert device.most_saved == MOST and device.stray == 0


WAIT_OF_SIDE = "self.side.wait_stream(self.streams.current_stream())"
WAIT_OF_COMPUTE = "self.streams.current_stream().wait_event(saved.copied)"
MUTANTS = {
    "the side stream never waits": (WAIT_OF_SIDE, "pass"),
    "it does not wait for what it copies to the host": (WAIT_OF_SIDE, f"source is saved.host and {WAIT_OF_SIDE}"),
    "it does not wait for who had the memory on the GPU": (WAIT_OF_SIDE, f"target is saved.host and {WAIT_OF_SIDE}"),
    "the compute stream never waits": (WAIT_OF_COMPUTE, "pass"),
    "the compute stream does not wait before a layer uses its input": (
        "self._release(saved)", "saved.tensor = self.resident.remove(saved)"
    ),
    "memory is released before its copy": (
        "self._release(self.resident[0])", "self.resident.popleft().tensor = None"
    ),
    "nothing is ever released": ("self._make_room(IN_FLIGHT - 1)", "pass"),
}  # fmt: skip


def mutant(name: str):
    old, new = MUTANTS[name]
    source = textwrap.dedent(inspect.getsource(StreamedOffload))
    assert old in source
    scope = dict(vars(gradient_checkpointing))
    exec(source.replace(old, new), scope)
    return scope["StreamedOffload"]


@pytest.mark.fault
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MUTANTS]
)
def test_the_stand_in_finds_each_missing_wait(name):
    with Device() as device:
        try:
            same = equal(trained(llama({}, mutant(name)("cpu", device))), expected("every layer"))
        except AttributeError:  # a tensor that is not there
            same = False
    assert not same or device.stray or device.most_saved > MOST


# --- other orders than a model's ---


def layered(context, several: bool = False, layers: int = 5):
    """Inputs and outputs of layers; several: each layer saves two tensors."""
    torch.manual_seed(0)
    weights = [torch.randn(8).requires_grad_() for _ in range(layers)]
    outputs = [torch.randn(3, 8).requires_grad_()]
    for weight in weights:
        with context:
            if several:
                outputs.append(checkpoint(lambda x, w: torch.sin(x * w), outputs[-1], weight, use_reentrant=False))
            else:
                function = functools.partial(lambda w, x: torch.sin(x * w), weight)
                outputs.append(checkpoint(function, outputs[-1], use_reentrant=False))
    return [outputs[0], *weights], outputs


def gradients(context, several: bool) -> list[torch.Tensor]:
    """Gradients of two graphs at once, each taken twice, the older one first."""
    results, graphs = [], [layered(context, several) for _ in range(2)]
    for inputs, outputs in graphs:
        for retain in (True, False):
            results += torch.autograd.grad(outputs[-1].sum(), inputs, retain_graph=retain)
    return results


@pytest.mark.oracle
@pytest.mark.parametrize("several", [False, True])
def test_any_order_of_backwards_computes_the_same(several):
    wanted = gradients(contextlib.nullcontext(), several)
    with Device() as device:
        assert equal(gradients(StreamedOffload("cpu", device), several), wanted)
    assert device.stray == 0


def test_each_tensor_of_a_layer_is_fetched_once():
    with Device() as device:
        context = StreamedOffload("cpu", device)
        inputs, outputs = layered(context, several=True)
        torch.autograd.grad(outputs[-1].sum(), inputs)
    assert device.copies == 2 * 10 - IN_FLIGHT and not context.resident


@pytest.mark.fault
def test_a_forward_without_a_backward_leaves_little_behind():
    with Device() as device:
        context = StreamedOffload("cpu", device)
        _, outputs = layered(context)
        host = weakref.ref(context.resident[0].host)
        del outputs
        assert len(context.resident) == IN_FLIGHT
        with context:
            for function in (torch.sin, torch.cos):
                checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert len(context.resident) == IN_FLIGHT and host() is None


@pytest.mark.bad_input
def test_a_layer_that_writes_into_its_input_is_an_error():
    x = torch.ones(3, requires_grad=True) * 2
    context = StreamedOffload("cpu")
    with context:
        out = checkpoint(lambda x: x.mul_(3).sin(), x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="writes into its input: leave --activation_offload_streams out"):
        out.sum().backward()


def test_other_tensors_stay_where_they_are():
    context, x = StreamedOffload("cuda"), torch.ones(2, requires_grad=True)
    with context:
        out = x.exp()
    assert out.grad_fn._saved_result.data_ptr() == out.data_ptr() and context.side is None
    with (context := StreamedOffload("cpu")):
        torch.ones(0, requires_grad=True).exp()
    assert context.side is None


# --- the flag and the proof at the start ---


def resolved(*flags, gpu=GPU):
    return resolve.resolve_settings("sft", list(flags), 1, gpu)


ON = ("--activation_offload", "true", "--activation_offload_streams", "true")


def test_streams_are_off_unless_asked_for():
    assert resolved("--activation_offload", "true").activation_offload_streams is False
    assert resolved(*ON).activation_offload_streams is True


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--activation_offload_streams", "true"), "with --activation_offload false: .*use --activation_offload true"),
        ((*ON, "--gradient_checkpointing", "false"), "--activation_offload with --gradient_checkpointing false: "),
    ],
)
def test_streams_that_cannot_be(flags, why):
    with pytest.raises(UserError, match=why):
        resolved(*flags)


def test_a_model_on_a_gpu_saves_its_inputs_in_streams(monkeypatch):
    """And with torch's save_on_cpu where the flag is off."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: torch.device("cuda"))
    monkeypatch.setattr("transformers.modeling_utils.get_current_accelerator", lambda: torch.device("cuda"))
    used = []
    monkeypatch.setattr(StreamedOffload, "__enter__", lambda self: used.append(self.device_type))
    monkeypatch.setattr(StreamedOffload, "__exit__", lambda *args: None)
    monkeypatch.setattr(
        "transformers.modeling_utils.save_on_cpu", lambda **named: used.append("torch") or save_on_cpu()
    )
    for streams, wanted in ((True, ["cuda"] * LAYERS), (False, ["torch"] * LAYERS)):
        used.clear()
        way = {"use_cpu": False, "activation_offload": True, "activation_offload_streams": streams}
        llama(way)(input_ids=torch.ones(1, 4, dtype=torch.long))
        assert used == wanted


@pytest.mark.slow
def test_compiled_layers_are_offloaded_in_streams(tmp_path):
    flags = ["--data", str(TINY / "train.jsonl"), "--max_samples", "18", "--max_steps", "3", "--logging_steps", "1",
             "--num_samples", "0", "--save_strategy", "no", "--learning_rate", "1e-3", "--zero", "2"]  # fmt: skip
    compiled = ["--torch_compile", "true", "--torch_compile_backend", "aot_eager", *ON]
    runs = run_world(
        1, {"plain": ("sft", flags), "compiled": ("sft", [*flags, *compiled])}, tmp_path, ZEROFIT_TEST_AS_ON_A_GPU="1"
    )
    assert runs["compiled"].json("result.json")["offloaded"] > 0 == runs["plain"].json("result.json")["offloaded"]
    assert runs["compiled"].losses == pytest.approx(runs["plain"].losses, rel=1e-5)
    assert runs["compiled"].grad_norms == pytest.approx(runs["plain"].grad_norms, rel=1e-5)


def proven(monkeypatch, context):
    monkeypatch.setattr(gradient_checkpointing, "StreamedOffload", context)
    monkeypatch.setattr(gradient_checkpointing, "PROOF_WIDTH", 64)
    problem = gradient_checkpointing._problem_of_streams
    monkeypatch.setattr(gradient_checkpointing, "_problem_of_streams", lambda device: problem(torch.device("cpu")))
    settings = resolved(*ON)
    gradient_checkpointing.prove_streams(settings)
    return settings


class Spoiled(StreamedOffload):
    def _unpack(self, saved):
        return super()._unpack(saved) + 1


def broken(device_type):
    raise RuntimeError("no stream\nmore")


def test_right_gradients_keep_the_streams(monkeypatch):
    settings = proven(monkeypatch, StreamedOffload)
    assert settings.activation_offload_streams is True
    assert not any("streams" in line for line in settings.decisions)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("context", "why"),
    [
        (Spoiled, "its gradients differ from those"),
        (broken, "it failed here (no stream)"),
    ],
)
def test_a_failed_proof_turns_the_streams_off_with_one_line(context, why, monkeypatch):
    settings = proven(monkeypatch, context)
    assert settings.activation_offload_streams is False
    (line,) = (line for line in settings.decisions if "streams" in line)
    assert line.startswith(f"activation_offload_streams False: {why}") and "\n" not in line


@pytest.mark.fault
def test_a_failure_of_another_rank_turns_the_streams_off_here_too(monkeypatch):
    monkeypatch.setattr(prove.distributed, "all_gather", lambda value: [value, "it failed here (x)"])
    assert proven(monkeypatch, StreamedOffload).activation_offload_streams is False


@pytest.mark.parametrize(("flags", "value"), [((), False), (("--gradient_checkpointing", "true"), True)])
def test_a_class_without_checkpointing_trains_without_it_unless_asked(flags, value, tmp_path):
    AutoConfig.for_model("jetmoe").save_pretrained(tmp_path)
    words = ["--model", str(tmp_path), "--data", "none", *flags]
    settings = resolve.resolve_settings("sft", words, 1, hardware.GPUS["h100-80g"])
    resolve.resolve_for_model(settings)
    assert settings.gradient_checkpointing is value
