"""--streaming: read, shuffle and tokenize rows while training, for data larger than the disk.

Every rank reads the same lines in the same order and parses and tokenises only its own (all of them with --packing), so
the samples of an optimizer step do not depend on ranks or micro batch, and a resumed run goes on at the next sample.
"""

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator

import torch

from zerofit.data import encoding, reading
from zerofit.data import sources as data_sources
from zerofit.data.batches import best_fit_decreasing, filler, join
from zerofit.data.tokens import CHUNK, TokenizedDataset
from zerofit.errors import UserError
from zerofit.settings import order_seed

PREVIEW = 500  # rows tokenised before the start: statistics, limits, the proof on real documents, sample answers


def choose(settings) -> None:
    """What streaming needs from the other arguments.

    Raises: UserError for arguments that need to know all rows.
    """
    if not settings.streaming:
        return
    if settings.max_steps <= 0:
        raise UserError("--streaming needs --max_steps: the number of rows is not known before they are read.")
    if settings.train_sampling_strategy not in ("random", "sequential"):
        raise UserError(
            f"--streaming with --train_sampling_strategy {settings.train_sampling_strategy}: the lengths are not known "
            "before the rows are read; use random or sequential."
        )
    for flag, off in (("eval_fraction", 0), ("max_duplicate_fraction", 1), ("max_eval_overlap_fraction", 1)):
        if settings.values[flag] != off:
            raise UserError(f"--streaming with --{flag}: it needs all rows at once; leave one of the two out.")
    if settings.dataloader_num_workers > 1:
        raise UserError("--streaming --dataloader_num_workers: 1 at most; every worker would read all rows.")
    if not settings.use_cpu and settings.source["dataloader_num_workers"] == "transformers default":
        settings.values["dataloader_num_workers"] = 1  # tokenising beside the GPU, not before it
        settings.source["dataloader_num_workers"] = "decided"
    # Each rank takes its own rows from the stream (rank 0 would hand out tensors in a collective otherwise), and the
    # stream itself goes to the right sample.
    settings.values["accelerator_config"] = {**(settings.accelerator_config or {}), "dispatch_batches": False}
    settings.values["ignore_data_skip"] = True
    for what in ("save", "eval"):  # a stream has no epochs that end
        if settings.values[f"{what}_strategy"] == "epoch":
            settings.values[f"{what}_strategy"] = "steps"
            settings.values[f"{what}_steps"] = settings.save_steps
            settings.source |= {f"{what}_strategy": "decided", f"{what}_steps": "decided"}
            settings.decisions.append(f"{what}_strategy steps: a stream has no epochs; every {settings.save_steps}")


def load(sources: list[data_sources.Source], settings, encoder: encoding.Encoder) -> TokenizedDataset:
    """A training set whose rows are still to be read; its `dataset` holds the first PREVIEW rows.

    Raises: UserError when none of them can be trained on.
    """
    from datasets import Dataset

    effective = settings.effective_batch_size
    stream = Stream(sources, settings, encoder, order_seed(settings), effective)
    first = list(itertools.islice(stream.rows(), min(PREVIEW, settings.max_samples or PREVIEW)))
    count: Counter = Counter()
    kept = [row for row in stream.encoded(first, count) if row is not None]
    facts = reading.summarize_counts(sources, count, settings) | {
        "streaming": True,
        "longest": max(len(ids) for ids, _ in kept),
    }
    table = Dataset.from_dict({"input_ids": [ids for ids, _ in kept], "labels": [labels for _, labels in kept]})
    return TokenizedDataset(table, facts, _fingerprint(sources), stream=stream)


class Stream(torch.utils.data.IterableDataset):
    """An endless run over all rows, epoch after epoch, the same on every rank.

    Yields (place, row or line of JSON, format), or packs {"input_ids", "labels", "lengths"} with --packing. `skip`
    samples are passed over first (set before iterating).
    """

    def __init__(self, sources, settings, encoder, seed: int | None, effective: int):
        self.sources, self.settings, self.encoder, self.seed = sources, settings, encoder, seed
        self.effective, self.skip = effective, 0

    def resume(self, step: int) -> None:
        """Go on after `step` optimizer steps."""
        self.skip = step * self.effective

    def __iter__(self) -> Iterator:
        return itertools.islice(self._samples(), self.skip, None)

    def rows(self, epoch: int = 0) -> Iterator[tuple[str, object, str]]:
        """One epoch in order: the sources side by side, in proportion to their size; rows as often as their weight."""
        return itertools.islice(self._merged(epoch), self.settings.max_samples)

    def _merged(self, epoch: int) -> Iterator[tuple[str, object, str]]:
        iterators = [self._weighted(source, epoch) for source in self.sources]
        step = [1 / (size * s.weight) for size, s in zip(_sizes(self.sources), self.sources, strict=True)]
        queue = [(0.0, i) for i in range(len(iterators))]  # (how far the source is read, its number)
        while queue:
            progress, i = heapq.heappop(queue)
            row = next(iterators[i], None)
            if row is not None:
                yield row
                heapq.heappush(queue, (progress + step[i], i))

    def _weighted(self, source, epoch: int) -> Iterator[tuple[str, object, str]]:
        kind, read = reading.kind_of(reading.read(source, self.settings), self.settings)
        for number, row in enumerate(read):
            yield from itertools.repeat((*row, kind), reading.repeats(source.weight, number, epoch))

    def encoded(self, raw: list, count: Counter) -> list[tuple[list[int], list[int]] | None]:
        """(input_ids, labels) of each row, None where nothing is left to learn; counted."""
        return reading.tokenised(raw, self.settings, self.encoder, count)

    def _samples(self) -> Iterator:
        for epoch in itertools.count():
            generator = None if self.seed is None else torch.Generator().manual_seed(self.seed + epoch)
            left, empty = self.rows(epoch), True
            while window := list(itertools.islice(left, self.settings.shuffle_buffer_size)):
                empty = False
                samples = self._packs(window) if self.settings.packing else window
                order = range(len(samples)) if generator is None else torch.randperm(len(samples), generator=generator)
                yield from (samples[i] for i in order)
            if empty:
                raise UserError(f"{', '.join(map(str, self.sources))}: holds no rows.")

    def _packs(self, window: list) -> list[dict]:
        kept = []
        for at in range(0, len(window), CHUNK):
            kept += [
                {"input_ids": row[0], "labels": row[1]}
                for row in self.encoded(window[at : at + CHUNK], Counter())
                if row is not None
            ]
        packs = best_fit_decreasing([len(row["input_ids"]) for row in kept], self.settings.max_length)
        return [join([kept[i] for i in pack]) for pack in packs]


class TokenizingCollator:
    """The collator of a stream: its rank's rows -> tokens -> what `collate` makes of them.

    A row of which nothing is left to learn keeps its place and trains on nothing, so that the order on the other
    ranks does not depend on it; the 1st, 10th, 100th ... is said.
    """

    def __init__(self, stream: Stream, collate):
        self.stream, self.collate = stream, collate
        self.filler, self.dropped = filler(stream.encoder.tokenizer.pad_token_id), 0

    def __call__(self, batch: list) -> dict:
        if self.stream.settings.packing:
            return self.collate(batch)
        out = []
        for (place, _, _), row in zip(batch, self.stream.encoded(batch, Counter()), strict=True):
            out.append(self.filler if row is None else {"input_ids": row[0], "labels": row[1]})
            if row is None:
                self.dropped += 1
                if str(self.dropped).strip("0") == "1":
                    print(
                        f"note: {place}: no answer left in --max_length, or cannot be used; such rows: {self.dropped}",
                        flush=True,
                    )
        return self.collate(out)


def _fingerprint(sources: list[data_sources.Source]) -> str:
    """A hash of names, sizes and weights: reading all bytes is what a stream avoids."""
    return hashlib.sha256(repr([(str(s), data_sources.size(s), s.weight) for s in sources]).encode()).hexdigest()[:24]


def _sizes(sources: list[data_sources.Source]) -> list[int]:
    """Bytes of each source; of a hub set, whose size is not known here, the mean of the others."""
    known = [data_sources.size(source) for source in sources]
    mean = sum(known) // max(1, sum(map(bool, known)))
    return [size or mean or 1 for size in known]
