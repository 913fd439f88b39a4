"""Detect ranks that repeatedly delay all others because their data or forward pass is slow."""

import statistics
import time
from collections import Counter, defaultdict

import torch

MIN_SLOWDOWN = 0.2  # minimum slowdown of a straggler compared with the other ranks

WINDOW_STEPS = 20  # minimum number of steps per window

MIN_SLOW_WINDOWS = 3  # consecutive windows in which a rank must be slow, since rows differ in length

DATA, FORWARD, TOKENS, SECONDS = range(4)  # indices of the list that Pace.take returns


class Pace:
    """Measure the time that this rank waits for data and spends in the forward pass."""

    def __init__(self):
        self.data = self.forward = 0.0
        self.tokens, self.events, self.began = 0, [], None

    def timed(self, batches):
        """Yield the batches and measure the wait for each."""
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
        """Measure the model's forward in training, which must not communicate with other ranks."""
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
        """Return the measurements since the last call, `seconds` ago: DATA, FORWARD, TOKENS, SECONDS."""
        taken = [self.data, sum(_between(*pair) for pair in self.events), float(self.tokens), seconds]
        self.data, self.tokens, self.events = 0.0, 0, []
        return taken


def _now(model):
    """Return the time at which the device reaches this point, without waiting for it."""
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


class Detector:
    """Detect stragglers from the measurements of all ranks. places: the node of each rank."""

    def __init__(self, places: list[str]):
        self.places, self.steps, self.totals = places, 0, None
        self.in_a_row, self.reported = Counter(), set()

    def add(self, measured: list[list[float]], steps: int) -> list[str]:
        """Return a sentence for each newly detected slow node. measured: the result of Pace.take for each rank."""
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
            if self.in_a_row[rank, kind] >= MIN_SLOW_WINDOWS and (self.places[rank], kind) not in self.reported:
                by_place[self.places[rank], kind][rank] = sentence
        self.reported |= by_place.keys()
        return [_sentence(place, ranks) for (place, _), ranks in by_place.items()]


def _slow(totals: list[list[float]], steps: int) -> dict[tuple[int, int], str]:
    """Return {(rank, DATA or FORWARD): description} for ranks slower than the others by MIN_SLOWDOWN."""
    slow = {}
    data = [row[DATA] / steps for row in totals]
    forward = [row[FORWARD] / row[TOKENS] if row[TOKENS] else 0.0 for row in totals]
    step = totals[0][SECONDS] / steps
    for rank in range(len(totals)):
        usual, cost = _of_others(data, rank), _of_others(forward, rank)
        if (more := data[rank] - usual) > MIN_SLOWDOWN * max(step - more, 0.0):
            slow[rank, DATA] = f"waits {data[rank]:.3g} of {step:.3g} s per step for data, the others {usual:.2g} s"
        if cost and forward[rank] > (1 + MIN_SLOWDOWN) * cost:
            slow[rank, FORWARD] = f"runs the forward pass {forward[rank] / cost - 1:.0%} slower than the others"
    return slow


def _of_others(values: list[float], rank: int) -> float:
    return statistics.median(values[:rank] + values[rank + 1 :])


def _sentence(place: str, ranks: dict[int, str]) -> str:
    worst = next(iter(ranks.values()))
    more = f", like {len(ranks) - 1} more on its node" if len(ranks) > 1 else ""
    return f"rank {min(ranks)} ({place}) {worst}{more}: all ranks wait for it in each step"
