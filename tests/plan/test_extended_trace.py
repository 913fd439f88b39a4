"""The extended trace of few layers is that of all layers, and what does not repeat is not extended."""

import pytest
from conftest import ROOT

from zerofit.base import hardware
from zerofit.config import parse
from zerofit.plan import candidates, predict, simulate
from zerofit.plan.caching_allocator import EMPTY_CACHE, LAYER, PASS, needs
from zerofit.plan.extended_trace import BEGINS, OUTSIDE, NotRegular, extend, usual_order

KIB = 1024


class Job:
    """The events of a job with `layers` layers: weights, two steps of forward and backward, flat optimizer states."""

    def __init__(self, layers: int):
        self.events, self.layers, self.count = [(LAYER, OUTSIDE, 0)], layers, 0
        weights = [self.new(64 * KIB)] + [self.new(size * KIB) for _ in range(layers) for size in (16, 48, 48)]
        states = None
        for _ in range(2):
            kept = [self.forward(layer) for layer in range(layers)]
            self.mark(OUTSIDE)
            logits = self.new(3000 * KIB)
            self.free(self.new(6000 * KIB))
            gradients = [gradient for layer in reversed(range(layers)) for gradient in self.backward(layer, kept)]
            self.mark(OUTSIDE)
            self.free(logits)
            states = states or self.new(layers * 448 * KIB)
            copies = [self.new(112 * KIB) for _ in range(layers)]
            for block in (*gradients, *copies):
                self.free(block)
        self.events.append((EMPTY_CACHE, 0, 0))
        for block in (*weights, states):
            self.free(block)

    def new(self, size: int) -> int:
        self.count += 1
        self.events.append((self.count, size, 0))
        return self.count

    def free(self, key: int) -> None:
        self.events.append((key, 0, 0))

    def mark(self, layer: int) -> None:
        self.events.append((LAYER, layer, 0))

    def forward(self, layer: int) -> int:
        self.mark(layer)
        work = [self.new(2000 * KIB), self.new(12000 * KIB)]
        output = self.new(700 * KIB)
        for block in work:
            self.free(block)
        return output

    def backward(self, layer: int, kept: list[int]) -> list[int]:
        self.mark(layer)
        work = self.new(12000 * KIB)
        gradients = [self.new(56 * KIB), self.new(56 * KIB)]
        self.free(work)
        if layer + 1 < self.layers:  # the input of the layer above, whose gradient is no longer needed
            self.free(kept[layer + 1])
        if layer == 0:
            self.free(kept[0])
        return gradients


def numbered(events: list[tuple]) -> list:
    """Return the events without marks, with keys in the order of allocation and releases in a row as a set."""
    keys, result = {}, []
    for key, size, _ in events:
        if key in (LAYER, PASS):
            continue
        if key == EMPTY_CACHE or size:
            result.append((key if key == EMPTY_CACHE else keys.setdefault(key, len(keys)), size))
        elif result and isinstance(result[-1], set):
            result[-1].add(keys[key])
        else:
            result.append({keys[key]})
    return result


@pytest.mark.parametrize(("depths", "layers"), [((6, 7), 8), ((6, 7), 32), ((8, 10), 20)])
def test_an_extended_trace_is_that_of_all_layers(depths, layers):
    small, large = (Job(depth).events for depth in depths)
    extended = extend(small, large, depths, layers)
    whole = Job(layers).events
    assert numbered(extended) == numbered(whole)
    assert needs(extended) == needs(whole) != needs(large)


def test_what_does_not_repeat_is_not_extended():
    small, large = Job(6), Job(8)
    with pytest.raises(NotRegular, match="no multiple of 2 more than 8"):
        extend(small.events, large.events, (6, 8), 11)
    once = [*Job(7).events]
    once.insert(once.index((LAYER, 3, 0)) + 1, (10**6, 512, 0))  # only in the first forward of layer 3
    with pytest.raises(NotRegular, match="layer 3 and layer 4 allocate differently"):
        extend(Job(6).events, once, (6, 7), 12)
    no_pass = [event for event in Job(7).events if event[:2] != (LAYER, 5)]
    with pytest.raises(NotRegular, match="a pass does not run all layers"):
        extend(Job(6).events, no_pass, (6, 7), 12)
    with pytest.raises(NotRegular, match="no layer was seen to run"):
        extend(*([(1, 512, 0), (1, 0, 0)] for _ in range(2)), (6, 7), 12)
    with pytest.raises(NotRegular, match="different passes"):
        extend(Job(6).events[: len(Job(6).events) // 2], Job(7).events, (6, 7), 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("sft", "--optim adamw_torch"),
        ("lora", ""),
        ("lora", "--load_in_4bit true"),
        ("sft", "--optim adamw_torch --activation_offload true --activation_offload_streams true"),
    ],
)
def test_an_extended_trace_reserves_what_all_layers_do(recipe, flags):
    words = ["--model", str(ROOT / "tests" / "configs" / "llama3.2-1b"), "--data", "none", "--max_length", "1024",
             "--per_device_train_batch_size", "1", "--effective_batch_size", "2", "--offload", "none", "--zero", "0",
             "--gradient_checkpointing", "true", *flags.split()]  # fmt: skip
    gpu, request = hardware.GPUS["h100-80g"], parse.request(recipe, words)
    small, large, whole = simulate.run_all(
        [simulate.Question(request, 1, gpu=gpu, overrides={"num_hidden_layers": n}) for n in (6, 7, 11)]
    )
    extended = needs(extend(small["events"], large["events"], (6, 7), 11))
    assert extended == pytest.approx(whole["allocator"]["segments"], rel=0.02)
    assert large["allocator"]["segments"]["reserved"] < 0.95 * extended["reserved"]


def with_rows(widths: list[int], accumulation: int = 4) -> list[tuple]:
    """Return the events of a job whose blocks grow with the rows: a micro batch keeps one block until the next."""
    events, count, batch, gradients = [(1, 64 * KIB, 0)], 1, None, None

    def new(size: int) -> int:
        nonlocal count
        count += 1
        events.append((count, size, 0))
        return count

    for number, width in enumerate(widths):
        events.append((PASS, BEGINS["forward"], 0))
        outputs = [new(width * 40 * KIB) for _ in range(3)]
        if batch:
            events.append((batch, 0, 0))
        batch = new(width * 8)
        if number % accumulation == 0:
            gradients = new(3000 * KIB)
        events += [(key, 0, 0) for key in outputs]
        if number % accumulation == accumulation - 1:
            events.append((PASS, BEGINS["step"], 0))
            if number < accumulation:
                new(6000 * KIB)  # the optimizer's states
            events.append((gradients, 0, 0))
    return events


def test_the_usual_order_of_rows():
    """Ascending rows leave the most unused, descending ones nothing; the first stays the first."""
    widths = list(range(400, 4000, 300))

    def reserved(events: list[tuple]) -> int:
        return needs(events)["reserved"]

    def order(events: list[tuple]) -> list[int]:
        large = [size // (40 * KIB) for key, size, _ in events if size >= 400 * 40 * KIB]
        return large[::3]

    ascending, descending = with_rows(widths), with_rows(widths[::-1])
    usual = usual_order(ascending)
    assert order(ascending) == widths and sorted(order(usual)) == widths
    assert set(order(usual)[::4]) == set(widths[::4]) and order(usual)[0] == widths[0] and order(usual) != widths
    assert reserved(descending) < reserved(usual) < reserved(ascending)
    assert needs(usual)["allocated"] == needs(ascending)["allocated"]
    equal = with_rows([500] * 12)
    assert needs(usual_order(equal)) == needs(equal)
    once = with_rows([500])
    assert numbered(usual_order(once)) == numbered(once)


@pytest.mark.slow
def test_rows_of_different_lengths_are_planned_in_the_usual_order():
    """They leave more unused than equal rows, whatever the order in which the file has them."""
    flags = ["--model", str(ROOT / "tests" / "configs" / "llama3.2-1b"), "--data", "none", "--max_length", "2048",
             "--per_device_train_batch_size", "1", "--effective_batch_size", "16", "--offload", "none", "--zero", "0",
             "--gradient_checkpointing", "true", "--fused_loss", "false"]  # fmt: skip
    gpu = hardware.GPUS["h100-80g"]
    (candidate,) = candidates.candidates("lora", parse.request("lora", flags), 1, gpu)
    predict.ask(candidate, 1, gpu)
    equal = candidate.reserved
    lengths = list(range(200, 2049, 8))
    with simulate.reused():
        predict.vary_rows(candidate, lengths[::-1], 1, gpu)
    assert candidate.answer["widths"] == predict.widths_of(lengths, 1, predict.WIDTHS)
    assert 1.1 * equal < candidate.reserved < 3 * equal
