"""Replay allocations through torch's CUDA caching allocator to predict the memory that it reserves.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13): sizes are rounded up to 512 bytes; blocks of at
most 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones have a segment of their
own, a multiple of 2 MiB; the smallest free block that is large enough is taken, and split if enough remains; freed
neighbors are merged; segments are returned to the driver only by empty_cache, or when the GPU is full.

Not modeled: a block that another stream used is reusable at once (torch waits for that stream's event), and the
settings of PYTORCH_ALLOC_CONF other than expandable_segments.
"""

import bisect
import itertools

MIB = 2**20

MIN_BLOCK = 512

SMALL_SIZE = MIB  # largest block of the small pool

SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT = 2 * MIB, 20 * MIB, 10 * MIB  # from OWN_SEGMENT on a block has its own

ROUND_LARGE = 2 * MIB

# As the key of an event: the cache is emptied; a layer (its size) or a pass (extended_trace.BEGINS) runs from here on.
EMPTY_CACHE, LAYER, PASS = -1, -2, -3


class OutOfMemory(Exception):
    """An allocation does not fit into the capacity, even after all free segments were returned."""


class _Block:
    """A part of a segment, with its neighbors in it."""

    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, size, address, pool, free=True, before=None, after=None):
        self.size, self.address, self.pool, self.free = size, address, pool, free
        self.before, self.after = before, after


class CachingAllocator:
    """The reserved and allocated bytes of one GPU.

    Args: capacity: bytes that may be reserved; None: no limit. expandable: PYTORCH_ALLOC_CONF=expandable_segments:True,
        without a return of pages.
    """

    def __init__(self, capacity: int | None = None, expandable: bool = False):
        self.capacity, self.expandable = capacity, expandable
        self.reserved = self.highest = self.allocated = self.highest_allocated = 0
        self._free: dict[tuple, list] = {}  # (stream, small) -> sorted [(size, address, block)] of free blocks
        self._last: dict[tuple, _Block] = {}  # (stream, small) -> the end of its expandable segment
        self._addresses = itertools.count(0, 2**60)

    def allocate(self, size: int, stream=0) -> _Block:
        """Return a block of at least `size` bytes. Raises: OutOfMemory."""
        size = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)
        pool = (stream, size <= SMALL_SIZE)
        free = self._free.setdefault(pool, [])
        place = bisect.bisect_left(free, (size,))
        if self.expandable and place + 1 < len(free) and free[place][2] is self._last[pool]:
            place += 1  # the end of the segment counts as endless, so any other block fits better
        if place < len(free):
            block = free.pop(place)[2]
        else:
            block = self._expanded(pool, size) if self.expandable else self._new_segment(pool, size)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.highest_allocated = max(self.highest_allocated, self.allocated)
        return block

    def free(self, block: _Block) -> None:
        self.allocated -= block.size
        block.free = True
        for neighbor in (block.before, block.after):
            if neighbor is not None and neighbor.free:
                self._remove(neighbor)
                block = self._merged(block, neighbor)
        self._add(block)

    def empty_cache(self) -> None:
        """Return all segments without an allocated block to the driver."""
        if self.expandable:
            return
        for free in self._free.values():
            for entry in list(free):
                if entry[2].before is None and entry[2].after is None:
                    free.remove(entry)
                    self.reserved -= entry[0]

    def _add(self, block: _Block) -> None:
        bisect.insort(self._free[block.pool], (block.size, block.address, block))

    def _remove(self, block: _Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect.bisect_left(free, (block.size, block.address)))

    def _merged(self, a: _Block, b: _Block) -> _Block:
        first, second = (a, b) if a.address < b.address else (b, a)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        elif self.expandable:
            self._last[first.pool] = first
        return first

    def _split(self, block: _Block, size: int) -> None:
        """Make the block `size` bytes long and its rest a free block, if the rest is large enough."""
        left = block.size - size
        if left < MIN_BLOCK if block.pool[1] or self.expandable else left <= SMALL_SIZE:
            return
        rest = _Block(left, block.address + size, block.pool, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        elif self.expandable:
            self._last[block.pool] = rest
        block.after, block.size = rest, size
        self._add(rest)

    def _reserve(self, size: int) -> None:
        if self.capacity is not None and self.reserved + size > self.capacity:
            self.empty_cache()
            if self.reserved + size > self.capacity:
                raise OutOfMemory
        self.reserved += size
        self.highest = max(self.highest, self.reserved)

    def _new_segment(self, pool: tuple, size: int) -> _Block:
        if pool[1]:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        self._reserve(segment)
        return _Block(segment, next(self._addresses), pool)

    def _expanded(self, pool: tuple, size: int) -> _Block:
        """Return the free end of the pool's segment, after pages for `size` bytes were mapped to it."""
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        last = self._last.get(pool)
        missing = size - (last.size if last is not None and last.free else 0)
        missing = -(-missing // page) * page
        self._reserve(missing)
        if last is not None and last.free:
            self._remove(last)
            last.size += missing
            return last
        address = last.address + last.size if last is not None else next(self._addresses)
        block = _Block(missing, address, pool, before=last)
        if last is not None:
            last.after = block
        self._last[pool] = block
        return block


def replay(events: list[tuple], capacity: int | None = None, expandable: bool = False) -> dict:
    """Return {"reserved", "allocated": highest bytes, "fits": False if the capacity did not suffice}.

    Args: events: (key, bytes, stream) for an allocation, (key, 0, 0) for its release, (EMPTY_CACHE, 0, 0), and
        (LAYER, number, 0) and (PASS, number, 0), which are ignored.
    """
    allocator, blocks = CachingAllocator(capacity, expandable), {}
    try:
        for key, size, stream in events:
            if key == EMPTY_CACHE:
                allocator.empty_cache()
            elif key in (LAYER, PASS):
                continue
            elif size:
                blocks[key] = allocator.allocate(size, stream)
            else:
                allocator.free(blocks.pop(key))
    except OutOfMemory:
        return {"reserved": allocator.highest, "allocated": allocator.highest_allocated, "fits": False}
    return {"reserved": allocator.highest, "allocated": allocator.highest_allocated, "fits": True}


def needs(events: list[tuple], expandable: bool = False, capacity: int | None = None) -> dict[str, int]:
    """Return what a job's allocations take of a GPU, in bytes.

    Returns: {"allocated": the peak of its blocks; "reserved": the segments at their peak, on a GPU of `capacity` if
        the job runs there, else on one with room; "least": the smallest capacity (within 0.2 %) in which it runs, since
        a full GPU returns unused segments}.
    """
    roomy = replay(events, None, expandable)
    here = replay(events, capacity, expandable) if capacity and roomy["reserved"] > capacity else roomy
    low, high = roomy["allocated"], roomy["reserved"]
    while not expandable and high - low > max(8 * MIB, 0.002 * low):
        middle = (low + high) // 2
        low, high = (low, middle) if replay(events, middle)["fits"] else (middle, high)
    reserved = (here if here["fits"] else roomy)["reserved"]
    return {"allocated": roomy["allocated"], "reserved": reserved, "least": high}


def of_both_kinds(events: list[tuple], capacity: int | None = None) -> dict[str, dict[str, int]]:
    """Return `needs` with torch's usual segments and with expandable ones."""
    return {kind: needs(events, kind == "expandable", capacity) for kind in ("segments", "expandable")}
