"""Replay allocations through torch's CUDA caching allocator to predict the memory that it reserves.

It follows c10/cuda/CUDACachingAllocator.cpp (torch 2.13). Sizes are rounded up to 512 bytes. Blocks of at most 1 MiB
come from segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB, and a larger block gets a separate segment, a
multiple of 2 MiB. The allocator takes the smallest free block that is large enough, and splits it if enough remains.
Freed neighbors are merged. Segments return to the driver in empty_cache or when the GPU is full. An expandable segment
has pages of 2 or 20 MiB, which are mapped if no free block is large enough; pages of free blocks can be returned.

Two simplifications: blocks of other streams are reusable immediately (torch waits for the stream's event), and
expandable_segments is the only supported setting of PYTORCH_ALLOC_CONF.
"""

import bisect
import itertools

MIB = 2**20
MIN_BLOCK = 512
SMALL_SIZE = MIB  # largest block of the small pool
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
MIN_SEPARATE_BLOCK = 10 * MIB  # smallest block with a separate segment
ROUND_LARGE = 2 * MIB
ENDLESS = 2**40 * LARGE_SEGMENT  # bytes of the address range of an expandable segment
EMPTY_CACHE = -1  # key of an event that empties the cache


class OutOfMemory(Exception):
    """An allocation exceeds the capacity, even after all free segments were returned."""


class _Block:
    """A part of a segment, linked to its neighbors. mapped: whether it has memory."""

    __slots__ = ("address", "after", "before", "free", "mapped", "pool", "size")

    def __init__(self, size, address, pool, before=None, after=None, mapped=True):
        self.size, self.address, self.pool, self.mapped, self.free = size, address, pool, mapped, True
        self.before, self.after = before, after
        if before is not None:
            before.after = self
        if after is not None:
            after.before = self

    @property
    def page(self) -> int:
        """Return the bytes of a page of an expandable segment."""
        return SMALL_SEGMENT if self.pool[1] else LARGE_SEGMENT

    @property
    def expandable_size(self) -> int:
        """Return its bytes plus the bytes of the pages that can be mapped after it."""
        return self.size + (0 if self.after is None or self.after.mapped else self.after.size)


class CachingAllocator:
    """The reserved and allocated bytes of one GPU.

    Args: capacity: limit of reserved bytes; None: no limit. expandable: PYTORCH_ALLOC_CONF=expandable_segments:True.
    """

    def __init__(self, capacity: int | None = None, expandable: bool = False):
        self.capacity, self.expandable = capacity, expandable
        self.reserved = self.highest = self.allocated = self.highest_allocated = 0
        # (stream, small) -> sorted [(size, address, block)] of free blocks
        self._free: dict[tuple, list] = {}
        # (stream, small) -> sorted [(address, block)] of unmapped parts of an expandable segment
        self._unmapped: dict[tuple, list] = {}
        self._addresses = itertools.count(0, 2 * ENDLESS)

    def allocate(self, size: int, stream=0) -> _Block:
        """Return a block of at least `size` bytes. Raises: OutOfMemory."""
        size = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)
        pool = (stream, size <= SMALL_SIZE)
        block = self._fitting(self._free.setdefault(pool, []), size)
        if block is None:
            add = self._expanded if self.expandable else self._new_segment
            try:
                block = add(pool, size)
            except OutOfMemory:
                self.empty_cache()
                block = add(pool, size)
        self._remove(block)
        self._split(block, size)
        block.free = False
        self.allocated += block.size
        self.highest_allocated = max(self.highest_allocated, self.allocated)
        return block

    def free(self, block: _Block) -> None:
        self.allocated -= block.size
        block.free = True
        self._add(self._with_free_neighbors(block))

    def empty_cache(self) -> None:
        """Return all segments, or pages of expandable segments, without an allocated block to the driver."""
        for free in self._free.values():
            for _, _, block in list(free):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._remove(block)
                    self.reserved -= block.size

    def _fitting(self, free: list, size: int) -> _Block | None:
        """Return the smallest free block that is large enough; in expandable segments by the size it can grow to."""
        place = bisect.bisect_left(free, (size,))
        if place == len(free):
            return None
        block = free[place][2]
        if self.expandable:
            for _, _, larger in free[place + 1 :]:
                if larger.expandable_size >= block.expandable_size:
                    break
                block = larger
        return block

    def _add(self, block: _Block) -> None:
        bisect.insort(self._free[block.pool], (block.size, block.address, block))

    def _remove(self, block: _Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect.bisect_left(free, (block.size, block.address)))

    def _with_free_neighbors(self, block: _Block) -> _Block:
        """Return the block merged with its free neighbors, which are removed from the free list."""
        for neighbor in (block.before, block.after):
            if neighbor is not None and neighbor.free and neighbor.mapped:
                self._remove(neighbor)
                block = _merged(block, neighbor)
        return block

    def _split(self, block: _Block, size: int) -> None:
        """Shorten the block to `size` bytes and free the rest, if the rest is large enough."""
        left = block.size - size
        if left < MIN_BLOCK if block.pool[1] or self.expandable else left <= SMALL_SIZE:
            return
        self._add(_Block(left, block.address + size, block.pool, block, block.after))
        block.size = size

    def _reserve(self, size: int) -> None:
        if self.capacity is not None and self.reserved + size > self.capacity:
            raise OutOfMemory
        self.reserved += size
        self.highest = max(self.highest, self.reserved)

    def _new_segment(self, pool: tuple, size: int) -> _Block:
        if pool[1]:
            segment = SMALL_SEGMENT
        elif size < MIN_SEPARATE_BLOCK:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        self._reserve(segment)
        block = _Block(segment, next(self._addresses), pool)
        self._add(block)
        return block

    def _expanded(self, pool: tuple, size: int) -> _Block:
        """Return a free block of at least `size` bytes after mapping pages at the lowest possible addresses."""
        unmapped = self._unmapped.setdefault(pool, [])
        if not unmapped:
            start = next(self._addresses)
            unmapped.append((start, _Block(ENDLESS, start, pool, mapped=False)))
        for _, block in unmapped:
            if block.before is not None and block.before.free:
                block = block.before
            if _has_room(block, size):
                break
        if not block.mapped:
            block = self._map(block, size)
        while block.size < size:
            block = self._map(block.after, size - block.size)
        return block

    def _map(self, block: _Block, size: int) -> _Block:
        """Map pages for `size` bytes, at most the complete block; return the free block with these pages."""
        size = min(block.size, -(-size // block.page) * block.page)
        self._reserve(size)
        unmapped = self._unmapped[block.pool]
        place = bisect.bisect_left(unmapped, (block.address,))
        unmapped.pop(place)
        block.mapped = True
        if size < block.size:
            rest = _Block(block.size - size, block.address + size, block.pool, block, block.after, mapped=False)
            unmapped.insert(place, (rest.address, rest))
            block.size = size
        block = self._with_free_neighbors(block)
        self._add(block)
        return block

    def _unmap(self, block: _Block) -> None:
        """Return the pages of a free block to the driver."""
        page = block.page
        begin, end = -(-block.address // page) * page, (block.address + block.size) // page * page
        if begin >= end:
            return
        self._remove(block)
        self.reserved -= end - begin
        if block.address < begin:
            self._add(_Block(begin - block.address, block.address, block.pool, block.before, block))
        if end < block.address + block.size:
            self._add(_Block(block.address + block.size - end, end, block.pool, block, block.after))
        block.address, block.size, block.mapped = begin, end - begin, False
        unmapped = self._unmapped[block.pool]
        for neighbor in (block.before, block.after):
            if neighbor is not None and not neighbor.mapped:
                unmapped.pop(bisect.bisect_left(unmapped, (neighbor.address,)))
                block = _merged(block, neighbor)
        bisect.insort(unmapped, (block.address, block))


def _merged(a: _Block, b: _Block) -> _Block:
    first, second = (a, b) if a.address < b.address else (b, a)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


def _has_room(block: _Block, size: int) -> bool:
    """Return whether this block and the free or unmapped blocks after it have `size` bytes."""
    while block is not None and block.free and size > 0:
        size, block = size - block.size, block.after
    return size <= 0


def replay(events: list[tuple], capacity: int | None = None, expandable: bool = False) -> dict:
    """Return {"reserved", "allocated": peak bytes, "fits": False if the capacity was too small}.

    Args: events: (key, bytes, stream) for an allocation, (key, 0, 0) for its release, (EMPTY_CACHE, 0, 0).
    """
    allocator, blocks = CachingAllocator(capacity, expandable), {}
    try:
        for key, size, stream in events:
            if key == EMPTY_CACHE:
                allocator.empty_cache()
            elif size:
                blocks[key] = allocator.allocate(size, stream)
            else:
                allocator.free(blocks.pop(key))
    except OutOfMemory:
        return {"reserved": allocator.highest, "allocated": allocator.highest_allocated, "fits": False}
    return {"reserved": allocator.highest, "allocated": allocator.highest_allocated, "fits": True}


def required_bytes(events: list[tuple], expandable: bool = False, capacity: int | None = None) -> dict[str, int]:
    """Return the bytes that a job's allocations require on a GPU.

    Returns: {"allocated": the peak of its blocks; "reserved": the peak of its segments, on a GPU of `capacity` if the
        job fits, else without a limit; "least": the smallest capacity (within 0.2 %) in which it runs, since a full GPU
        returns unused segments; "reserved" if expandable segments take less than 0.9 of `capacity`}.
    """
    unlimited = replay(events, None, expandable)
    limited = replay(events, capacity, expandable) if capacity and unlimited["reserved"] > capacity else unlimited
    low, high = unlimited["allocated"], unlimited["reserved"]
    while high - low > max(8 * MIB, 0.002 * low) and not (expandable and capacity and high < 0.9 * capacity):
        middle = (low + high) // 2
        low, high = (low, middle) if replay(events, middle, expandable)["fits"] else (middle, high)
    reserved = (limited if limited["fits"] else unlimited)["reserved"]
    return {"allocated": unlimited["allocated"], "reserved": reserved, "least": high}
