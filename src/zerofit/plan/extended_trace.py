"""Extend the allocations of a job with few layers to all layers, for the allocator's replay.

Two simulations with few layers mark in their events which layer runs (simulated_rank.py). What the larger has more is
the events of one unit of layers. They are repeated for each missing unit: a layer's own allocations and releases in the
middle of each pass, and outside of the passes (loading, optimizer step) the allocations that only the larger one has.
A block whose size differs between the two, such as a flat buffer, grows linearly.

With rows of different lengths, the micro batches can also be put in other orders (`usual_order`).
"""

import difflib
import random
from dataclasses import dataclass, field

from zerofit.plan.caching_allocator import EMPTY_CACHE, LAYER, MIN_BLOCK, PASS, replay

OUTSIDE = -1  # layer of events outside of all layers

MICRO_BATCH = 0

BEGINS = {"forward": MICRO_BATCH, "step": 1, "eval": 2, "save": 3}  # phases at whose begin a pass is marked

ORDERS = 9  # of micro batches that are replayed

COMPARED_AT_MOST = 6000  # events of a block outside of the layers; the comparison is quadratic


class NotRegular(Exception):
    """The layers' allocations do not repeat; the text says where."""


@dataclass
class _Block:
    """Events while one layer runs. section: number of blocks outside of all layers before it.

    entries: ("new", size, stream), ("free", section, layer, index) of a block's index-th allocation, ("empty",), or
    ("pass", number).
    """

    section: int
    layer: int
    entries: list[tuple] = field(default_factory=list)
    allocations: int = 0


def extend(small: list, large: list, depths: tuple[int, int], layers: int) -> list[tuple]:
    """Return the events of `layers` layers, from those of two depths. Raises: NotRegular."""
    unit = depths[1] - depths[0]
    missing, rest = divmod(layers - depths[1], unit)
    if rest:
        raise NotRegular(f"{layers} layers are no multiple of {unit} more than {depths[1]}")
    blocks, fewer = _blocks(large), _blocks(small)
    first = (depths[1] - unit) // 2  # of the unit that is repeated
    _check_middle(blocks, first, unit, depths[1])
    return _Writer(blocks, fewer, first, unit, missing).write()


def _blocks(events: list) -> list[_Block]:
    block, where, blocks, section = _Block(0, OUTSIDE), {}, [], 0
    for key, size, stream in events:
        if key == LAYER:
            if size != block.layer:
                blocks.append(block)
                section += size == OUTSIDE
                block = _Block(section, size)
        elif key == EMPTY_CACHE:
            block.entries.append(("empty",))
        elif key == PASS:
            block.entries.append(("pass", size))
        elif size:
            where[key] = (block.section, block.layer, block.allocations)
            block.entries.append(("new", size, stream))
            block.allocations += 1
        else:
            block.entries.append(("free", *where.pop(key)))
    return [*blocks, block]


def _relative(block: _Block) -> list[tuple]:
    """Return the block's entries with the layers of what they free counted from its own."""
    return [
        (*entry[:2], "outside" if entry[2] == OUTSIDE else entry[2] - block.layer, entry[3])
        if entry[0] == "free"
        else entry
        for entry in block.entries
    ]


def _check_middle(blocks: list[_Block], first: int, unit: int, layers: int) -> None:
    """Raise NotRegular unless in each pass the repeated layers do what those one unit before and after them do."""
    by_place = {(block.section, block.layer): block for block in blocks}
    if len(by_place) != len(blocks):
        raise NotRegular("a layer runs twice in a pass")
    sections = {block.section for block in blocks if block.layer != OUTSIDE}
    if not sections:
        raise NotRegular("no layer was seen to run")
    for section in sections:
        if {block.layer for block in blocks if block.section == section} - {OUTSIDE} != set(range(layers)):
            raise NotRegular("a pass does not run all layers")
        for layer in range(first, first + unit):
            middle = _relative(by_place[section, layer])
            if any(entry[0] == "free" and entry[2] == "outside" for entry in middle):
                raise NotRegular("a layer frees what was allocated outside of it")
            if middle != _relative(by_place[section, layer + unit]):
                raise NotRegular(f"layer {layer} and layer {layer + unit} allocate differently")


class _Writer:
    """Writes the events of all layers; the copies of a unit follow it.

    fewer: the blocks of the smaller job; first: layer of the unit that is repeated; missing: number of its copies.
    """

    def __init__(self, blocks: list[_Block], fewer: list[_Block], first: int, unit: int, missing: int):
        self.blocks, self.first, self.unit, self.missing = blocks, first, unit, missing
        self.end = first + unit
        outside = [[b for b in of if b.layer == OUTSIDE] for of in (blocks, fewer)]
        if len(outside[0]) != len(outside[1]):
            raise NotRegular("the two depths have different passes")
        self.sizes = {}  # (section, index) of an allocation outside of the layers -> its size with all layers
        self.repeated = set()  # (section, position) of entries outside of the layers that each unit has
        self.repeated_allocations = set()  # (section, index)
        for large, small in zip(*outside, strict=True):
            self._compare(large, small)
        self.events, self.keys = [], {}

    def _compare(self, large: _Block, small: _Block) -> None:
        """Note the sizes of a block's allocations with all layers, and which of them each unit repeats."""
        places, tokens = _tokens(large)
        _, before = _tokens(small)
        if max(len(tokens), len(before)) > COMPARED_AT_MOST:
            raise NotRegular("too many events outside of the layers")
        number = {place: index for index, place in enumerate(p for p in places if large.entries[p][0] == "new")}
        for place, token, other in zip(places, tokens, _counterparts(before, tokens), strict=True):
            if token[0] != "new":
                continue
            size, index = token[1], number[place]
            if other is None:
                self.repeated.add((large.section, place))
                self.repeated_allocations.add((large.section, index))
            else:
                size = max(MIN_BLOCK, size + (size - other[1]) * self.missing)  # multiples of MIN_BLOCK
            self.sizes[large.section, index] = size

    def write(self) -> list[tuple]:
        for section in range(self.blocks[-1].section + 1):
            run = [block for block in self.blocks if block.section == section]
            for block in run:
                if block.layer == OUTSIDE:
                    self._outside(block)
            layered = [block for block in run if block.layer != OUTSIDE]
            backward = len(layered) > 1 and layered[0].layer > layered[-1].layer
            ordered = sorted(layered, key=lambda block: block.layer)
            whole = [(block, 0) for block in ordered[: self.end]]
            for copy in range(1, self.missing + 1):
                whole += [(block, copy * self.unit) for block in ordered[self.first : self.end]]
            whole += [(block, self.missing * self.unit) for block in ordered[self.end :]]
            for block, shift in reversed(whole) if backward else whole:
                self._layer(block, shift)
        return self.events

    def _new(self, place: tuple, size: int, stream) -> None:
        self.keys[place] = len(self.keys)
        self.events.append((self.keys[place], size, stream))

    def _free(self, place: tuple) -> None:
        key = self.keys.get(place)
        if key is None or key < 0:
            raise NotRegular("something is freed that was not allocated")
        self.keys[place] = -1 - key
        self.events.append((key, 0, 0))

    def _mark(self, entry: tuple) -> None:
        self.events.append((EMPTY_CACHE, 0, 0) if entry[0] == "empty" else (PASS, entry[1], 0))

    def _layer(self, block: _Block, shift: int) -> None:
        index = 0
        for entry in block.entries:
            if entry[0] == "new":
                self._new((block.section, block.layer + shift, index), *entry[1:])
                index += 1
            elif entry[0] in ("empty", "pass"):
                self._mark(entry)
            elif entry[2] == OUTSIDE:
                if (entry[1], entry[3]) in self.repeated_allocations:
                    raise NotRegular("a layer frees what was allocated outside of it")
                self._free((entry[1], OUTSIDE, entry[3], 0))
            else:
                self._free((entry[1], entry[2] + shift, entry[3]))

    def _outside(self, block: _Block) -> None:
        index, chunk = 0, []
        for place, entry in enumerate(block.entries):
            repeated = (block.section, place) in self.repeated
            if chunk and not repeated and entry[0] == "new":
                chunk = self._copies(block.section, chunk)
            if entry[0] == "new":
                self._new((block.section, OUTSIDE, index, 0), self.sizes[block.section, index], entry[2])
                if repeated:
                    chunk.append((index, entry))
                index += 1
                continue
            chunk = self._copies(block.section, chunk)
            if entry[0] in ("empty", "pass"):
                self._mark(entry)
            else:
                for freed in self._freed_outside(*entry[1:]):
                    self._free(freed)
        self._copies(block.section, chunk)

    def _copies(self, section: int, chunk: list[tuple]) -> list:
        """Write the copies of repeated allocations; return an empty list."""
        for copy in range(1, self.missing + 1):
            for index, entry in chunk:
                self._new((section, OUTSIDE, index, copy), *entry[1:])
        return []

    def _freed_outside(self, section: int, layer: int, index: int) -> list[tuple]:
        """Return all places that an entry outside of the layers frees."""
        if layer == OUTSIDE:
            copies = self.missing if (section, index) in self.repeated_allocations else 0
            return [(section, OUTSIDE, index, copy) for copy in range(copies + 1)]
        if layer >= self.end:
            return [(section, layer + self.missing * self.unit, index)]
        copies = self.missing if layer >= self.first else 0
        return [(section, layer + copy * self.unit, index) for copy in range(copies + 1)]


def _tokens(block: _Block) -> tuple[list[int], list[tuple]]:
    """Return (positions, tokens) of the entries to compare: all but releases of what a layer allocated."""
    kept = [(place, entry) for place, entry in enumerate(block.entries) if entry[0] != "free" or entry[2] == OUTSIDE]
    return [place for place, _ in kept], [
        ("free", 0, 0) if entry[0] == "free" else entry if len(entry) == 3 else (entry[0], 0, 0) for _, entry in kept
    ]


def _counterparts(before: list[tuple], tokens: list[tuple]) -> list[tuple | None]:
    """Return for each token of the larger job that of the smaller, which may have another size; None if it has none."""
    result: list[tuple | None] = [None] * len(tokens)
    for _, a, a_end, b, b_end in difflib.SequenceMatcher(None, before, tokens, autojunk=False).get_opcodes():
        count, more = a_end - a, b_end - b - (a_end - a)
        if more < 0:
            raise NotRegular("the two depths differ by more than repetition outside of the layers")
        known = set(before)
        start = b if known.issuperset(tokens[b + count : b_end]) else b + more  # the rest is repeated
        if any(
            token[0] != other[0] for token, other in zip(tokens[start : start + count], before[a:a_end], strict=True)
        ):
            raise NotRegular("the two depths differ by more than repetition outside of the layers")
        result[start : start + count] = before[a:a_end]
    return result


# --- the order of micro batches ---


@dataclass
class _Pass:
    """Events from one mark of a pass to the next: a micro batch, an optimizer step, what is before or after them.

    entries: ("new", size, stream), ("own", index) and ("other", passes back, rank) for releases, or ("empty",); an
    index is of the pass's allocations, a rank of those among them that outlive it.
    """

    kind: int
    entries: list[tuple] = field(default_factory=list)
    survivors: dict[int, int] = field(default_factory=dict)  # index -> rank

    def seen_from_outside(self) -> tuple:
        """Return what must be equal for two passes to change places."""
        return self.kind, len(self.survivors), tuple(e for e in self.entries if e[0] == "other")


def usual_order(events: list[tuple]) -> list[tuple]:
    """Return the events with their micro batches in the order whose reserved bytes are the median of ORDERS orders.

    Only micro batches that release the same of earlier passes change places: usually all but the first of a step and
    those of the first steps.
    """
    passes = _passes(events)
    alike: dict[tuple, list[int]] = {}
    for number, one in enumerate(passes):
        if one.kind == MICRO_BATCH:
            alike.setdefault(one.seen_from_outside(), []).append(number)
    draw, orders = random.Random(0), [list(range(len(passes)))]
    while len(orders) < ORDERS and any(len(places) > 1 for places in alike.values()):
        orders.append(list(orders[0]))
        for places in alike.values():
            for place, number in zip(places, draw.sample(places, len(places)), strict=True):
                orders[-1][place] = number

    def written(order: list[int]) -> list[tuple]:
        return _written([passes[number] for number in order])

    return written(sorted(orders, key=lambda order: replay(written(order))["reserved"])[len(orders) // 2])


def _passes(events: list[tuple]) -> list[_Pass]:
    passes, where, allocations = [_Pass(-1)], {}, [0]
    for key, size, stream in events:
        entries = passes[-1].entries
        if key == PASS:
            passes.append(_Pass(size))
            allocations.append(0)
        elif key == EMPTY_CACHE:
            entries.append(("empty",))
        elif key == LAYER:
            continue
        elif size:
            where[key] = (len(passes) - 1, allocations[-1])
            passes[-1].survivors[allocations[-1]] = 0
            allocations[-1] += 1
            entries.append(("new", size, stream))
        else:
            number, index = where.pop(key)
            if number == len(passes) - 1:
                del passes[-1].survivors[index]
                entries.append(("own", index))
            else:
                entries.append(("other", number, index))
    for one in passes:
        one.survivors = {index: rank for rank, index in enumerate(one.survivors)}
    for number, one in enumerate(passes):
        one.entries = [
            ("other", number - entry[1], passes[entry[1]].survivors[entry[2]]) if entry[0] == "other" else entry
            for entry in one.entries
        ]
    return passes


def _written(passes: list[_Pass]) -> list[tuple]:
    """Return the events of the passes, one after the other."""
    events, count, alive = [], 0, []  # alive: keys of each pass's survivors, by rank
    for number, one in enumerate(passes):
        keys = []
        for entry in one.entries:
            if entry[0] == "new":
                keys.append(count)
                events.append((count, *entry[1:]))
                count += 1
            elif entry[0] == "empty":
                events.append((EMPTY_CACHE, 0, 0))
            else:
                freed = keys[entry[1]] if entry[0] == "own" else alive[number - entry[1]][entry[2]]
                events.append((freed, 0, 0))
        alive.append([keys[index] for index in one.survivors])
    return events
