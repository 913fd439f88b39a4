"""Estimate the time of collectives: bytes over links, plus the latency of each call by NCCL's cost model."""

import math

from zerofit.plan.formulas import Collective, PlanPoint, Shape, collectives, split
from zerofit.plan.speed.rates import Rates, rates_for, table


def seconds(calls: list[Collective], setting: PlanPoint, rates: Rates) -> float:
    """Return the seconds of collectives, which NCCL runs in sequence on a communicator.

    Only the slower kind of link counts in a call: the ring is a pipeline, and NCCL builds enough rings to use every
    network adapter of a node (nccl-tests, doc/PERFORMANCE.md: bus bandwidth).
    """
    total = 0.0
    for call in calls:
        within, across = split(call, setting)
        total += max(within / rates.link, across / rates.node) + call.calls * call_seconds(call, setting)
    return total


def wire_seconds(s: Shape, setting: PlanPoint, gpu) -> float:
    """Return the seconds of all collectives of an optimizer step."""
    return seconds(collectives(s, setting), setting, rates_for(gpu, setting.ranks_per_node))


def call_seconds(c: Collective, setting: PlanPoint) -> float:
    """Return a call's latency in seconds by NCCL's cost model.

    The steps of a ring are sequential. An all-reduce takes a tree over the nodes if it is faster. The latencies are
    hwLat and baseLat (LL128) of github.com/NVIDIA/nccl src/graph/tuning.cc.
    """
    latencies, nodes = table()["collectives"], c.nodes(setting.node)
    hop, branch = latencies["ring_hop_us"], latencies["tree_hop_us"]
    ring = (c.ranks - nodes) * hop["within"] + (nodes - 1) * hop["across"]
    if c.reduces:
        tree = (c.ranks / nodes - 1) * branch["within"] + math.log2(nodes) * branch["across"]
        ring = 2 * min(ring, tree)
    return (latencies["call_us"] + ring) * 1e-6
