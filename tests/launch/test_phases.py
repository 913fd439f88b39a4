"""Hangs that the ranks see themselves: all of them are far longer in a phase than ever before."""

import os
import subprocess
import sys
import threading

import pytest
from torch.distributed import TCPStore

from zerofit.base import distributed, phases, rank_status

pytestmark = pytest.mark.fault


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch, tmp_path):
    monkeypatch.setenv(rank_status.FOLDER, str(tmp_path))
    clock = Clock()
    monkeypatch.setattr(phases.time, "monotonic", clock)
    return clock


@pytest.fixture
def ranks(clock, monkeypatch):
    """Two ranks: their phases, and the watches of both, which look when they are told to."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "broadcast", lambda value: "same")
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(phases, "write_stack", lambda heartbeat: None)
    of_ranks = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        of_ranks.append(phases.Phases(rank_status.Heartbeat()))
    return of_ranks, [phases.HangDetector(of_rank) for of_rank in of_ranks], store


def pass_time(clock, ranks, seconds: float) -> bool:
    """Let both watches look each second; return whether one has seen that all are late."""
    ended = False
    for _ in range(int(seconds)):
        clock.now += 1.0
        for watch in ranks[1]:  # each looks
            ended |= watch.check(clock.now)
    return ended


def make_steps(clock, ranks, count: int, seconds: float) -> None:
    for _ in range(count):
        for of_rank in ranks[0]:
            of_rank.enter(phases.STEP)
        assert not pass_time(clock, ranks, seconds)
        for of_rank in ranks[0]:
            of_rank.enter(phases.OTHER_PHASE)


def enter(ranks, *of_each: str) -> None:
    for of_rank, phase in zip(ranks[0], of_each, strict=True):
        of_rank.enter(phase)


def test_short_steps_are_given_five_minutes(clock, ranks):
    make_steps(clock, ranks, 10, 2)
    enter(ranks, phases.STEP, phases.STEP)
    assert not pass_time(clock, ranks, 299)
    assert pass_time(clock, ranks, 3)


def test_long_steps_are_given_ten_times_the_slowest(clock, ranks):
    make_steps(clock, ranks, 1, 250)  # the first compiles
    make_steps(clock, ranks, 8, 60)
    make_steps(clock, ranks, 1, 90)
    enter(ranks, phases.STEP, phases.STEP)
    assert not pass_time(clock, ranks, 899)
    assert pass_time(clock, ranks, 3)


@pytest.mark.parametrize("phase", [phases.DATA, phases.EVALUATION])
def test_each_phase_has_a_limit_of_its_own(clock, ranks, phase):
    make_steps(clock, ranks, 10, 2)
    enter(ranks, phase, phase)
    assert not pass_time(clock, ranks, 3000)  # no such phase was seen before


def test_what_was_seen_a_few_times_only_has_no_limit(clock, ranks):
    make_steps(clock, ranks, 9, 2)
    enter(ranks, phases.STEP, phases.STEP)
    assert not pass_time(clock, ranks, 3000)


def test_a_rank_that_saves_or_runs_a_callback_holds_up_the_others(clock, ranks):
    make_steps(clock, ranks, 10, 2)
    enter(ranks, phases.OTHER_PHASE, phases.STEP)
    assert not pass_time(clock, ranks, 3000)
    enter(ranks, phases.STEP, phases.OTHER_PHASE)  # the late one is late no more
    assert not pass_time(clock, ranks, 3000)
    assert ranks[2].add(ranks[1][0].key, 0) == 1


def test_ranks_that_hang_in_different_phases_end_the_job(clock, ranks):
    make_steps(clock, ranks, 10, 2)
    for _ in range(10):
        enter(ranks, phases.DATA, phases.DATA)
        assert not pass_time(clock, ranks, 1)
    enter(ranks, phases.DATA, phases.STEP)
    assert not pass_time(clock, ranks, 899)  # a file server may be away: the step waits for the data
    assert pass_time(clock, ranks, 3)


def test_a_suspended_job_is_no_hang(clock, ranks):
    make_steps(clock, ranks, 10, 2)
    enter(ranks, phases.STEP, phases.STEP)
    assert not pass_time(clock, ranks, 100)
    clock.now += 5000.0  # nobody looks
    assert not pass_time(clock, ranks, 299)
    assert pass_time(clock, ranks, 3)


def test_one_suspended_rank_is_waited_for(clock, ranks):
    make_steps(clock, ranks, 10, 2)
    enter(ranks, phases.STEP, phases.STEP)
    for _ in range(1000):  # rank 1 does not look
        clock.now += 1.0
        assert not ranks[1][0].check(clock.now)
    assert not pass_time(clock, ranks, 250)  # it has as long as the others had


def test_the_phase_is_in_the_heartbeat(clock, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    of_rank = phases.Phases(rank_status.Heartbeat())
    assert rank_status.heartbeats(tmp_path) == rank_status.phases(tmp_path) == {}
    of_rank.enter(phases.EVALUATION)
    assert rank_status.heartbeats(tmp_path) == {}  # no progress yet
    of_rank.heartbeat.beat(7)
    assert rank_status.heartbeats(tmp_path) == {3: (os.getpid(), 7, clock.now)}
    assert rank_status.phases(tmp_path) == {3: "evaluation batch"}
    of_rank.enter(phases.OTHER_PHASE)
    assert rank_status.phases(tmp_path) == {3: ""}


RECORDS = """
import sys, torch, torch.distributed as dist
from zerofit.base import phases
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
group = dist.new_group([0])
for _ in range(phases.MAX_KEPT_COLLECTIVES):
    dist.all_reduce(torch.ones(9, 2))
dist.all_gather([torch.ones(4)], torch.ones(4), group=group)
(name, of_all), (_, of_group) = sorted(phases.collectives().items())
print(len(of_all), *of_all[-1], *of_group[-1], sep="|")
"""


@pytest.mark.slow
def test_what_torch_has_recorded(tmp_path):
    """Without a setting: its flight recorder is on."""
    words = [sys.executable, "-c", RECORDS, str(tmp_path / "store")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    number = str(phases.MAX_KEPT_COLLECTIVES)
    assert done.stdout.strip().split("|") == [number, number, "all_reduce of [[9, 2]]", "1", "all_gather of [[4]]"]
