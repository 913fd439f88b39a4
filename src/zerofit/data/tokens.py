"""A tokenized dataset with its statistics, optionally packed."""

from dataclasses import dataclass

import torch

from zerofit.data.batches import best_fit_decreasing, join

CHUNK = 500  # rows encoded per call


@dataclass
class TokenizedDataset:
    """Tokenized rows: `dataset[i]` is {"input_ids": [...], "labels": [...]}, `statistics` counts rows."""

    dataset: object
    statistics: dict
    fingerprint: str
    weights: list[float] | None = None  # how often each row counts in an epoch; None: once
    whole: object = None  # with fractional weights all rows; `dataset` holds the first epoch's
    stream: torch.utils.data.IterableDataset | None = None  # --streaming: all rows; `dataset` holds the first ones

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def all_rows(self):
        """Return the rows of all epochs; `sequences` is built from these."""
        return self.dataset if self.whole is None else self.whole

    def sequences(self, settings):
        """Return the training rows: documents, or packs of documents with --packing."""
        return PackedDataset(self.all_rows, settings.max_length, self.weights) if settings.packing else self.all_rows


class PackedDataset(torch.utils.data.Dataset):
    """Documents packed into sequences of at most max_length tokens (best fit decreasing).

    An item is {"input_ids", "labels", "lengths"}; PackedCollator keeps the documents apart. Only documents of equal
    weight share a pack; `weights` holds the weight of each pack.
    """

    def __init__(self, documents, max_length: int, weights: list[float] | None = None):
        self.documents, self.packs, self.weights = documents, [], None if weights is None else []
        lengths = [len(ids) for ids in documents["input_ids"]]
        for weight in [None] if weights is None else sorted(set(weights)):
            group = [i for i in range(len(lengths)) if weights is None or weights[i] == weight]
            packs = best_fit_decreasing([lengths[i] for i in group], max_length)
            self.packs += [[group[i] for i in pack] for pack in packs]
            if weights is not None:
                self.weights += [weight] * len(packs)
        if weights is not None:  # fullest first, as without weights: trial.longest_rows measures the first packs
            order = sorted(range(len(self.packs)), key=lambda i: -sum(lengths[j] for j in self.packs[i]))
            self.packs, self.weights = [self.packs[i] for i in order], [self.weights[i] for i in order]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict:
        return join([self.documents[i] for i in self.packs[index]])
