"""The replay follows the rules of c10/cuda/CUDACachingAllocator.cpp, in cases counted by hand."""

import itertools
import random

import pytest

from zerofit.plan.caching_allocator import EMPTY_CACHE, MIB, CachingAllocator, OutOfMemory, replay, required_bytes

KIB = 1024


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([513], 1024, 2 * MIB),
        ([MIB, MIB], 2 * MIB, 2 * MIB),  # both halves of a small segment
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),  # the large pool
        ([9 * MIB, 9 * MIB], 18 * MIB, 20 * MIB),
        ([9 * MIB] * 3, 27 * MIB, 40 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),  # a segment of its own
        ([10 * MIB + 1, MIB + 512], 12 * MIB, 12 * MIB),  # a rest above 1 MiB is split off, one below stays
        ([11 * MIB + 1, 900 * KIB], 12 * MIB + 900 * KIB, 14 * MIB),  # the rest of under 1 MiB stays with the block
    ],
)
def test_sizes_of_segments(sizes, allocated, reserved):
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_the_smallest_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.allocate(60 * MIB), allocator.allocate(40 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(30 * MIB) is small
    assert allocator.allocate(50 * MIB) is large
    assert allocator.allocate(10 * MIB) and allocator.reserved == 100 * MIB  # the rest of a block, split off


def test_freed_neighbors_are_merged():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(60 * MIB))
    parts = [allocator.allocate(20 * MIB) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        allocator.free(part)
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 60 * MIB


def test_two_streams_share_nothing():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(40 * MIB, stream=0))
    allocator.allocate(40 * MIB, stream=1)
    assert allocator.reserved == 80 * MIB


def test_growing_sizes_leave_segments_that_nothing_uses():
    events = []
    for key, size in enumerate((40, 60, 80)):
        events += [(key, size * MIB, 0), (key, 0, 0)]
    assert replay(events) == {"reserved": 180 * MIB, "allocated": 80 * MIB, "fits": True}
    assert replay(events, expandable=True) == {"reserved": 80 * MIB, "allocated": 80 * MIB, "fits": True}
    assert replay([*events[:4], (EMPTY_CACHE, 0, 0), *events[4:]])["reserved"] == 100 * MIB
    found = required_bytes(events)  # a full GPU returns them
    assert found["reserved"] == 180 * MIB and 80 * MIB <= found["least"] <= 88 * MIB
    assert required_bytes(events, capacity=120 * MIB)["reserved"] == 100 * MIB  # the third returns both
    assert required_bytes(events, capacity=50 * MIB)["reserved"] == 180 * MIB  # does not run there


def test_a_full_gpu_returns_whole_segments_only():
    allocator = CachingAllocator(capacity=100 * MIB)
    first, second = allocator.allocate(60 * MIB), allocator.allocate(40 * MIB)
    allocator.free(first)
    allocator.allocate(20 * MIB)
    allocator.free(second)
    with pytest.raises(OutOfMemory):
        allocator.allocate(41 * MIB)  # the other 40 MiB of the first segment cannot be returned
    assert allocator.reserved == 60 * MIB
    allocator.allocate(40 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.allocated == allocator.reserved == 100 * MIB


def test_an_expandable_segment_grows_by_pages():
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved == 40 * MIB  # pages of 20 MiB
    allocator.allocate(30 * MIB)  # 10 MiB are mapped already
    assert allocator.reserved == 60 * MIB
    allocator.allocate(100)
    assert allocator.reserved == 62 * MIB  # the small pool's pages have 2 MiB
    allocator.free(first)
    allocator.allocate(25 * MIB)  # in the gap, not at the end
    allocator.allocate(5 * MIB)
    assert allocator.reserved == 62 * MIB
    allocator.allocate(MIB + 1)
    assert allocator.reserved == 82 * MIB and allocator.allocated == 61 * MIB + 1024


def test_a_full_gpu_returns_pages_of_an_expandable_segment():
    events = [(1, 40 * MIB, 0), (2, 40 * MIB, 0), (1, 0, 0), (3, 60 * MIB, 0)]
    found = required_bytes(events, expandable=True)
    assert found["reserved"] == 140 * MIB and found["allocated"] == 100 * MIB
    assert 100 * MIB <= found["least"] <= 108 * MIB  # the 40 MiB before the second block are returned
    assert required_bytes(events, expandable=True, capacity=200 * MIB)["least"] == 140 * MIB  # enough room


def test_pages_that_a_free_block_covers_in_part_stay():
    allocator = CachingAllocator(expandable=True)
    first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB  # the page of which the second block has a half stays
    allocator.allocate(10 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.allocate(15 * MIB)  # the page that was returned, at the lowest address
    assert allocator.reserved == 60 * MIB
    allocator.free(second)
    allocator.allocate(30 * MIB)
    assert allocator.reserved == 60 * MIB


@pytest.mark.oracle
@pytest.mark.parametrize("expandable", [False, True])
def test_what_is_reserved_is_allocated_or_free(expandable):
    """After any allocations, releases, returns and failures, and no two blocks overlap."""
    draw, failed = random.Random(0), 0
    for _ in range(20):
        allocator, blocks = CachingAllocator(200 * MIB, expandable), []
        for _ in range(200):
            try:
                if draw.random() < 0.02:
                    allocator.empty_cache()
                elif blocks and draw.random() < 0.47:
                    allocator.free(blocks.pop(draw.randrange(len(blocks))))
                else:
                    size = int(2 ** draw.uniform(9, 27))
                    blocks.append(allocator.allocate(size, draw.randrange(2)))
                    assert blocks[-1].size >= size
            except OutOfMemory:
                failed += 1
            free = [entry[2] for pool in allocator._free.values() for entry in pool]
            assert sum(block.size for block in blocks) == allocator.allocated
            assert allocator.allocated + sum(block.size for block in free) == allocator.reserved <= 200 * MIB
            assert all(block.free and block.mapped for block in free) and not any(block.free for block in blocks)
            places = sorted((block.address, block.address + block.size) for block in [*blocks, *free])
            assert all(one[1] <= other[0] for one, other in itertools.pairwise(places))
    assert failed > 20
