"""A tokenized dataset with its statistics, optionally packed."""

from dataclasses import dataclass

import numpy as np
import torch

from zerofit.data.batches import best_fit_decreasing, join, lengths_of

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
        self.documents, self.weights, lengths = documents, None, lengths_of(documents)
        if weights is None:
            self.packs = best_fit_decreasing(lengths, max_length)
            return
        packs = []
        for weight in sorted(set(weights)):
            group = np.flatnonzero(np.array(weights) == weight)
            packs += [(group[pack].tolist(), weight) for pack in best_fit_decreasing(lengths[group], max_length)]
        # fullest first, as without weights: trial.longest_rows measures the first packs
        packs.sort(key=lambda pair: -lengths[pair[0]].sum())
        self.packs, self.weights = [pack for pack, _ in packs], [weight for _, weight in packs]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict:
        return join([self.documents[i] for i in self.packs[index]])
