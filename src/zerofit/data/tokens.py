"""A tokenized dataset and what is known about it."""

from dataclasses import dataclass

import torch

from zerofit.data.batches import best_fit_decreasing, join

CHUNK = 500  # rows encoded at once


@dataclass
class TokenizedDataset:
    """Tokenised rows. `dataset[i]` is {"input_ids": [...], "labels": [...]}; `statistics` counts what was read."""

    dataset: object
    statistics: dict
    fingerprint: str
    weights: list[float] | None = None  # how often each row counts in an epoch; None: once
    whole: object = None  # with weights like 0.5 all rows; `dataset` holds those of the first epoch
    stream: torch.utils.data.IterableDataset | None = None  # with --streaming all rows; `dataset` holds the first

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def all_rows(self):
        """The rows of all epochs, which the indices of `sequences` count."""
        return self.dataset if self.whole is None else self.whole

    def sequences(self, settings):
        """What one training row is: a document, or with packing several of them."""
        return PackedDataset(self.all_rows, settings.max_length, self.weights) if settings.packing else self.all_rows


class PackedDataset(torch.utils.data.Dataset):
    """Documents packed into sequences of at most max_length tokens: longest first, each into the fullest pack it fits.

    An item is {"input_ids", "labels", "lengths"}; PackedCollator keeps the documents apart. With weights the documents of
    a pack have the same one, which is the pack's in `weights`.
    """

    def __init__(self, documents, max_length: int, weights: list[float] | None = None):
        self.documents, self.packs, self.weights = documents, [], None if weights is None else []
        lengths = [len(ids) for ids in documents["input_ids"]]
        for weight in [None] if weights is None else sorted(set(weights)):
            alike = [i for i in range(len(lengths)) if weights is None or weights[i] == weight]
            found = best_fit_decreasing([lengths[i] for i in alike], max_length)
            self.packs += [[alike[i] for i in pack] for pack in found]
            if weights is not None:
                self.weights += [weight] * len(found)
        if weights is not None:  # the fullest first, as without weights: a probe looks at the first ones
            order = sorted(range(len(self.packs)), key=lambda i: -sum(lengths[j] for j in self.packs[i]))
            self.packs, self.weights = [self.packs[i] for i in order], [self.weights[i] for i in order]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict:
        return join([self.documents[i] for i in self.packs[index]])
