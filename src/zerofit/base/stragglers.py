"""Name the ranks that all others wait for: they are slow at their data or in their forward, time after time."""

import statistics
import time
from collections import Counter, defaultdict

import torch

LONGER = 0.2  # how much slower than the others a rank must be

WINDOW_STEPS = 20  # that a judgment is made of, at least

WINDOWS = 3  # in a row, in which a rank must be slow: rows differ in length

DATA, FORWARD, TOKENS, SECONDS = range(4)  # of what Pace.take returns


class Pace:
    """Measure the seconds that this rank waits for its data and computes its forward."""

    def __init__(self):
        self.data = self.forward = 0.0
        self.tokens, self.events, self.began = 0, [], None

    def timed(self, batches):
        """Yield the batches."""
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.data += time.perf_counter() - began
            yield batch

    def follow(self, model) -> None:
        """Measure the model's forward in training from now on; it must exchange nothing with other ranks."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)

    def _begin(self, model, args, kwargs) -> None:
        if not model.training:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        self.tokens += 0 if ids is None else ids.numel()
        self.began = _now(model)

    def _end(self, model, args, output) -> None:
        if self.began is not None:
            self.events.append((self.began, _now(model)))
            self.began = None

    def take(self, seconds: float) -> list[float]:
        """Return what was measured since the last call, in these `seconds`: DATA, FORWARD, TOKENS, SECONDS."""
        taken = [self.data, sum(_between(*pair) for pair in self.events), float(self.tokens), seconds]
        self.data, self.tokens, self.events = 0.0, 0, []
        return taken


def _now(model):
    """Return the time at which the device gets here, without waiting for it."""
    if next(model.parameters()).device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(began, ended) -> float:
    if isinstance(began, float):
        return ended - began
    ended.synchronize()
    return began.elapsed_time(ended) / 1000


class Judge:
    """Judge the ranks by what all of them have measured. places: of each rank, its node."""

    def __init__(self, places: list[str]):
        self.places, self.steps, self.totals = places, 0, None
        self.in_a_row, self.named = Counter(), set()

    def add(self, measured: list[list[float]], steps: int) -> list[str]:
        """Return a sentence on each node with ranks that are found slow, once. measured: of each rank, Pace.take."""
        before = self.totals or [[0.0] * 4 for _ in measured]
        self.totals = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(before, measured, strict=True)]
        self.steps += steps
        if self.steps < WINDOW_STEPS:
            return []
        slow = _slow(self.totals, self.steps)
        self.steps, self.totals = 0, None
        self.in_a_row = Counter({key: self.in_a_row[key] + 1 for key in slow})
        by_place = defaultdict(dict)
        for (rank, kind), sentence in slow.items():
            if self.in_a_row[rank, kind] >= WINDOWS and (self.places[rank], kind) not in self.named:
                by_place[self.places[rank], kind][rank] = sentence
        self.named |= by_place.keys()
        return [_sentence(place, ranks) for (place, _), ranks in by_place.items()]


def _slow(totals: list[list[float]], steps: int) -> dict[tuple[int, int], str]:
    """Return {(rank, DATA or FORWARD): what it is slow at} of the ranks that are slower than the rest by LONGER."""
    found = {}
    data = [row[DATA] / steps for row in totals]
    forward = [row[FORWARD] / row[TOKENS] if row[TOKENS] else 0.0 for row in totals]
    step = totals[0][SECONDS] / steps
    for rank in range(len(totals)):
        usual, cost = _of_others(data, rank), _of_others(forward, rank)
        if (more := data[rank] - usual) > LONGER * max(step - more, 0.0):
            found[rank, DATA] = f"waits {data[rank]:.3g} of {step:.3g} s a step for its data, the others {usual:.2g} s"
        if cost and forward[rank] > (1 + LONGER) * cost:
            found[rank, FORWARD] = f"computes a forward {forward[rank] / cost - 1:.0%} slower than the others"
    return found


def _of_others(values: list[float], rank: int) -> float:
    return statistics.median(values[:rank] + values[rank + 1 :])


def _sentence(place: str, ranks: dict[int, str]) -> str:
    worst = next(iter(ranks.values()))
    more = f", as {len(ranks) - 1} more of its node" if len(ranks) > 1 else ""
    return f"rank {min(ranks)} ({place}) {worst}{more}: all ranks wait for it in each step"
