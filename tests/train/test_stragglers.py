"""Ranks that the others wait for are named once, and ranks whose rows only differ are not."""

import random

import pytest
import torch

from zerofit.base import stragglers

PLACES = [f"node {rank // 2}, host{rank // 2}" for rank in range(8)]


def judged(windows: int, row, places=PLACES) -> list[list[str]]:
    """Return what is said after each window. row: (rank, window) -> seconds of data, of forward, and tokens."""
    judge = stragglers.Detector(places)
    return [
        judge.add([[*row(rank, window), 20.0] for rank in range(len(places))], stragglers.WINDOW_STEPS)
        for window in range(windows)
    ]


def test_slow_data_is_named_once_after_three_windows():
    said = judged(6, lambda rank, _: (8.0 if rank == 5 else 0.2, 5.0, 1000.0))
    sentence = "rank 5 (node 2, host2) waits 0.4 of 1 s per step for data, the others 0.01 s"
    assert said == [[], [], [f"{sentence}: all ranks wait for it in each step"], [], [], []]


def test_a_slow_forward_is_named_by_its_tokens():
    said = judged(3, lambda rank, _: (0.2, 6.5 if rank == 3 else 5.0, 1000.0))
    slow = "rank 3 (node 1, host1) runs the forward pass 30% slower than the others"
    assert said[2] == [f"{slow}: all ranks wait for it in each step"]
    assert judged(9, lambda rank, _: (0.2, 6.5, 1300.0) if rank == 3 else (0.2, 5.0, 1000.0)) == [[]] * 9


def test_a_slow_node_is_one_sentence():
    said = judged(3, lambda rank, _: (0.2, 7.0 if rank in (6, 7) else 5.0, 1000.0))
    assert [line.partition(" runs")[0] for line in said[2]] == ["rank 6 (node 3, host3)"]
    assert "like 1 more on its node" in said[2][0]


def test_two_ranks_are_compared_with_each_other():
    said = judged(3, lambda rank, _: (0.1, 6.5 if rank else 5.0, 1000.0), PLACES[:2])
    assert said[2][0].startswith("rank 1 (node 0, host0) runs the forward pass 30% slower")


@pytest.mark.parametrize("slow", [0.1, 0.0], ids=["a tenth", "not at all"])
def test_less_than_a_fifth_is_not_named(slow):
    assert judged(6, lambda rank, _: (0.2 + 20 * slow * (rank == 2), 5.0 * (1 + slow * (rank == 2)), 1e3)) == [[]] * 6


def test_rows_of_different_lengths_name_nobody():
    """500 ranks for 50 windows: in each some are slow by chance, but not the same one three times in a row."""
    draw = random.Random(1)
    places = [f"node {rank // 8}" for rank in range(500)]
    said = judged(50, lambda *_: (draw.uniform(0.0, 0.5), draw.gauss(5.0, 0.4), 1000.0), places)
    assert said == [[]] * 50


def test_steps_are_collected_until_there_are_enough():
    judge = stragglers.Detector(PLACES[:2])
    said = [judge.add([[0.0, 0.1, 50.0, 1.0], [0.0, 0.2, 50.0, 1.0]], 1) for _ in range(3 * stragglers.WINDOW_STEPS)]
    assert [step for step, sentences in enumerate(said, 1) if sentences] == [3 * stragglers.WINDOW_STEPS]


def test_pace_measures_training_only(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(stragglers.time, "perf_counter", lambda: float(next(clock)))
    pace, model = stragglers.Pace(), torch.nn.Linear(4, 4)
    assert list(pace.timed(iter("ab"))) == ["a", "b"]
    pace.follow(model)
    model(torch.ones(2, 4))
    model.eval()(torch.ones(2, 4))
    assert pace.take(7.0) == [3.0, 1.0, 8.0, 7.0]  # the end of the data takes a tick too
    assert pace.take(1.0) == [0.0, 0.0, 0.0, 1.0]


def test_batches_that_are_not_taken_stay():
    pace, batches = stragglers.Pace(), iter([1, 2, 3])
    assert next(pace.timed(batches)) == 1 and list(pace.timed(batches)) == [2, 3]
