"""--streaming: read, shuffle and tokenize rows while training, for data larger than the disk.

Every rank reads the same lines in the same order, and parses and tokenizes only its own (all of them with --packing).
So the samples of an optimizer step do not depend on ranks or micro batch, and a resumed run continues at the next one.
"""

import hashlib
import heapq
import itertools
from collections.abc import Iterator

import torch

from zerofit.base.errors import UserError
from zerofit.data import dataset, encoding, reading, template_text
from zerofit.data import sources as data_sources
from zerofit.data.batches import best_fit_decreasing, filler, join
from zerofit.data.tokens import CHUNK, TokenizedDataset
from zerofit.job.settings import decide, order_seed
from zerofit.job.technique import AllBut, Conflict, Technique

PREVIEW = 500  # rows tokenized before the start: for statistics, limits, the packing check, sample answers


def resolve(settings) -> None:
    """Set the arguments that streaming depends on.

    Raises: UserError without --max_steps and for several workers.
    """
    if not settings.streaming:
        return
    if settings.max_steps <= 0:
        raise UserError("--streaming needs --max_steps: the number of rows is unknown.")
    if settings.dataloader_num_workers > 1:
        raise UserError(
            f"--dataloader_num_workers {settings.dataloader_num_workers}: use at most 1 with --streaming, where every "
            "worker reads all rows."
        )
    if not settings.use_cpu and settings.source["dataloader_num_workers"] == "transformers default":
        decide(settings, "dataloader_num_workers", 1)  # tokenizes while the GPU computes
    # Each rank takes its own rows from the stream; accelerate would otherwise broadcast batches of rank 0. On resume
    # Stream.resume skips samples, so the Trainer must not.
    decide(settings, "accelerator_config", {**(settings.accelerator_config or {}), "dispatch_batches": False})
    decide(settings, "ignore_data_skip", True)
    for action in ("save", "eval"):  # a stream never ends an epoch
        if settings.values[f"{action}_strategy"] == "epoch":
            why = f"a stream never ends an epoch; every {settings.save_steps}"
            decide(settings, f"{action}_strategy", "steps", why)
            decide(settings, f"{action}_steps", settings.save_steps)


def load(sources: list[data_sources.Source], settings, encoder: encoding.Encoder) -> TokenizedDataset:
    """Return a streamed training set; its `dataset` holds the first PREVIEW rows.

    Raises: UserError if none of them is usable.
    """
    from datasets import Dataset

    effective = settings.effective_batch_size
    stream = Stream(sources, settings, encoder, order_seed(settings), effective)
    preview = list(itertools.islice(stream.rows(), min(PREVIEW, settings.max_samples or PREVIEW)))
    report = reading.ReadingReport()
    kept = [row for row in stream.encode(preview, report) if row is not None]
    report.template_text += reading.template_tokens(preview[: template_text.SAMPLE_ROWS], settings, encoder)
    statistics = reading.summarize(sources, report, settings) | {
        "streaming": True,
        "longest": max(len(ids) for ids, _ in kept),
    }
    table = Dataset.from_dict({"input_ids": [ids for ids, _ in kept], "labels": [labels for _, labels in kept]})
    return TokenizedDataset(table, statistics, _fingerprint(sources, settings, encoder.tokenizer), stream=stream)


class Stream(torch.utils.data.IterableDataset):
    """Iterate over all rows, epoch after epoch without end, in the same order on every rank.

    Yields (place, row or JSON line, RowFormat), or packs {"input_ids", "labels", "lengths"} with --packing. The first
    `skip` samples are skipped (set it before iterating).
    """

    def __init__(self, sources, settings, encoder, seed: int | None, effective: int):
        self.sources, self.settings, self.encoder, self.seed = sources, settings, encoder, seed
        self.effective, self.skip = effective, 0

    def resume(self, step: int) -> None:
        """Skip the samples of the first `step` optimizer steps."""
        self.skip = step * self.effective

    def __iter__(self) -> Iterator:
        return itertools.islice(self._samples(), self.skip, None)

    def rows(self, epoch: int = 0) -> Iterator[tuple[str, object, reading.RowFormat]]:
        """Yield an unshuffled epoch: sources interleaved by size, rows repeated by weight."""
        return itertools.islice(self._merged(epoch), self.settings.max_samples)

    def _merged(self, epoch: int) -> Iterator[tuple[str, object, reading.RowFormat]]:
        iterators = [self._weighted(source, epoch) for source in self.sources]
        known = [data_sources.size(source) for source in self.sources]
        mean = sum(known) // max(1, sum(map(bool, known)))  # for a Hub dataset, whose size is unknown
        sizes = [size or mean or 1 for size in known]
        step = [1 / (size * s.weight) for size, s in zip(sizes, self.sources, strict=True)]
        queue = [(0.0, i) for i in range(len(iterators))]  # (rows read by size x weight, index of the source)
        while queue:
            progress, i = heapq.heappop(queue)
            row = next(iterators[i], None)
            if row is not None:
                yield row
                heapq.heappush(queue, (progress + step[i], i))

    def _weighted(self, source, epoch: int) -> Iterator[tuple[str, object, reading.RowFormat]]:
        row_format, read = reading.detect_format(reading.read(source, self.settings), self.settings, source)
        for number, row in enumerate(read):
            yield from itertools.repeat((*row, row_format), reading.repeats(source.weight, number, epoch))

    def encode(self, raw: list, report: reading.ReadingReport | None = None) -> list[tuple[list, list] | None]:
        """Return (input_ids, labels) of each row, None for a dropped row, and count them in the report."""
        return reading.tokenize_rows(raw, self.settings, self.encoder, report or reading.ReadingReport())

    def _samples(self) -> Iterator:
        for epoch in itertools.count():
            generator = None if self.seed is None else torch.Generator().manual_seed(self.seed + epoch)
            rows, empty = self.rows(epoch), True
            while window := list(itertools.islice(rows, self.settings.shuffle_buffer_size)):
                empty = False
                samples = self._packs(window) if self.settings.packing else window
                order = range(len(samples)) if generator is None else torch.randperm(len(samples), generator=generator)
                yield from (samples[i] for i in order)
            if empty:
                raise UserError(f"{', '.join(map(str, self.sources))}: contains no rows.")

    def _packs(self, window: list) -> list[dict]:
        kept = []
        for start in range(0, len(window), CHUNK):
            kept += [
                {"input_ids": row[0], "labels": row[1]}
                for row in self.encode(window[start : start + CHUNK])
                if row is not None
            ]
        packs = best_fit_decreasing([len(row["input_ids"]) for row in kept], self.settings.max_length)
        return [join([kept[i] for i in pack]) for pack in packs]


class TokenizingCollator:
    """Tokenize the rows of this rank, then collate them with `collate`.

    A filler without labels replaces a dropped row, so that the order on other ranks does not depend on it; the 1st,
    10th, 100th ... dropped row is reported.
    """

    def __init__(self, stream: Stream, collate):
        self.stream, self.collate = stream, collate
        self.filler, self.dropped = filler(stream.encoder.tokenizer.pad_token_id), 0

    def __call__(self, batch: list) -> dict:
        if self.stream.settings.packing:
            return self.collate(batch)
        tokenized = []
        for (place, _, _), row in zip(batch, self.stream.encode(batch), strict=True):
            tokenized.append(self.filler if row is None else {"input_ids": row[0], "labels": row[1]})
            if row is None:
                self.dropped += 1
                if str(self.dropped).strip("0") == "1":  # a power of ten
                    print(
                        f"note: {place}: dropped, no answer within --max_length or no loss ({self.dropped} in all)",
                        flush=True,
                    )
        return self.collate(tokenized)


def _fingerprint(sources: list[data_sources.Source], settings, tokenizer) -> str:
    """Hash names and sizes of the sources, tokenizer and options, without reading all data."""
    digest = hashlib.sha256(repr([(str(s), data_sources.size(s)) for s in sources]).encode())
    dataset.hash_options(digest, sources, settings, tokenizer, settings.max_samples)
    return digest.hexdigest()[:24]


_ALL_ROWS = "it needs all rows in advance"

TECHNIQUE = Technique(
    name="streaming",
    flag="streaming",
    example="--streaming true",
    conflicts=(
        Conflict(
            "train_sampling_strategy",
            AllBut("random", "sequential"),
            "the lengths of rows are unknown before they are read",
            "use random or sequential",
        ),
        Conflict("eval_fraction", None, _ALL_ROWS),
        Conflict("max_duplicate_fraction", AllBut(1), _ALL_ROWS),
        Conflict("max_eval_overlap_fraction", AllBut(1), _ALL_ROWS),
    ),
    resolve=resolve,
)
