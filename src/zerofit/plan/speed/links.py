"""Price collectives: bytes over links, and the latency of each call by NCCL's cost model."""

import functools
import math

from zerofit.plan.formulas import Collective, Setting, Shape, collectives, split
from zerofit.plan.speed import rates
from zerofit.plan.speed.rates import Rates


def seconds(calls: list[Collective], setting: Setting, found: Rates) -> float:
    """Return the seconds of collectives, in sequence as NCCL runs those of one communicator.

    Within a call only the slower kind of link counts: the ring is a pipeline, and NCCL builds as many rings as it needs
    to use every adapter of a node (nccl-tests, doc/PERFORMANCE.md: bus bandwidth).
    """
    total = 0.0
    for call in calls:
        within, across = split(call, setting)
        total += max(within / found.link, across / found.node) + call.calls * call_seconds(call, setting)
    return total


def wire_seconds(s: Shape, setting: Setting, gpu) -> float:
    """Return the seconds of all collectives of an optimizer step."""
    return seconds(collectives(s, setting), setting, rates.of(gpu, setting.of_a_node))


@functools.cache
def _latencies() -> dict:
    """Return microseconds of latency of NCCL's calls and hops.

    hwLat and baseLat (LL128) of its cost model, github.com/NVIDIA/nccl src/graph/tuning.cc.
    """
    return rates.table()["collectives"]


def call_seconds(c: Collective, setting: Setting) -> float:
    """Return a call's latency in seconds by NCCL's cost model.

    It is that of a ring, whose steps are sequential; for an all-reduce, of a tree over the nodes if that is faster."""
    known, nodes = _latencies(), c.nodes(setting.node)
    hop, branch = known["ring_hop_us"], known["tree_hop_us"]
    ring = (c.ranks - nodes) * hop["within"] + (nodes - 1) * hop["across"]
    if c.reduces:
        tree = (c.ranks / nodes - 1) * branch["within"] + math.log2(nodes) * branch["across"]
        ring = 2 * min(ring, tree)
    return (known["call_us"] + ring) * 1e-6
