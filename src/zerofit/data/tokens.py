"""The tokenized dataset with its statistics, optionally packed, and the number of steps of a run."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from zerofit.data.batches import Share, best_fit_decreasing, join, lengths_of
from zerofit.job.settings import Settings

CHUNK = 500  # rows encoded per call


@dataclass
class TokenizedDataset:
    """Tokenized rows: `dataset[i]` is {"input_ids": [...], "labels": [...]}, `statistics` counts rows."""

    dataset: object
    statistics: dict
    fingerprint: str
    weights: list[Share] | None = None  # how often each row is used in an epoch; None: once
    full_dataset: object = None  # all rows, with fractional weights; `dataset` holds the first epoch
    numbers: np.ndarray | None = None  # each row's entry of --data; None for a single entry
    stream: torch.utils.data.IterableDataset | None = None  # --streaming: all rows; `dataset` holds the first ones

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def all_rows(self):
        """Return the rows of all epochs; `sequences` is built from these."""
        return self.dataset if self.full_dataset is None else self.full_dataset

    def sequences(self, settings):
        """Return the training rows: documents, or packs of documents with --packing."""
        return PackedDataset(self.all_rows, settings.max_length, self.weights) if settings.packing else self.all_rows


class PackedDataset(torch.utils.data.Dataset):
    """Documents packed into sequences of at most max_length tokens (best fit decreasing).

    An item is {"input_ids", "labels", "lengths"}; PackedCollator separates the documents. A pack holds documents of
    equal share; `weights` holds the share of each pack.
    """

    def __init__(self, documents, max_length: int, weights: list[Share] | None = None):
        self.documents, self.weights, lengths = documents, None, lengths_of(documents)
        if weights is None:
            self.packs = best_fit_decreasing(lengths, max_length)
            return
        packs, groups = [], {}
        for row, share in enumerate(weights):
            groups.setdefault(share, []).append(row)
        for share, rows in sorted(groups.items()):
            group = np.array(rows)
            packs += [(group[pack].tolist(), share) for pack in best_fit_decreasing(lengths[group], max_length)]
        # Fullest first, as without weights: trial.longest_rows measures the first packs.
        packs.sort(key=lambda pair: -lengths[pair[0]].sum())
        self.packs, self.weights = [pack for pack, _ in packs], [weight for _, weight in packs]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict:
        return join([self.documents[i] for i in self.packs[index]])


# --- with the settings of a run ---


def number_of_steps(settings: Settings, train_set) -> int | None:
    """Return the steps of the run, assuming full packs; None for a stream without --max_steps."""
    if settings.max_steps > 0:
        return settings.max_steps
    if train_set.stream is not None:
        return None
    return math.ceil(settings.num_train_epochs * rows(settings, train_set) / settings.effective_batch_size)


def rows(settings: Settings, train_set) -> float:
    """Return the training rows of an epoch, assuming full packs."""
    return len(train_set) * _tokens(train_set) / settings.max_length if settings.packing else len(train_set)


MIN_STEPS = 30  # optimizer steps; a shorter run consists mostly of warmup and noise


def few_steps(settings: Settings, train_set) -> list[str]:
    """Recommend a smaller effective batch if the default one leaves too few steps."""
    steps = number_of_steps(settings, train_set)
    if settings.source["effective_batch_size"] != "default" or settings.max_steps > 0 or not steps:
        return []
    ranks, rows = settings.data_ranks, steps * settings.effective_batch_size
    batch = max(1, rows // (2 * MIN_STEPS) // ranks) * ranks
    if steps >= MIN_STEPS or batch >= settings.effective_batch_size:
        return []
    return [
        f"few optimizer steps: {steps} for {settings.num_train_epochs:g} epochs with an effective batch of "
        f"{settings.effective_batch_size}; --effective_batch_size {batch} increases them to {rows // batch}"
    ]


def row_tokens(settings: Settings, train_set) -> float | None:
    """Return the mean tokens of a training row, assuming full packs; None for a stream."""
    if settings.packing or train_set.stream is not None:
        return settings.max_length if settings.packing else None
    return _tokens(train_set) / settings.objective.documents


def _tokens(train_set) -> float:
    """Return the mean tokens of an epoch's rows, with their weights; other statistics count each row once."""
    statistics = train_set.statistics
    if "tokens_an_epoch" in statistics:
        return statistics["tokens_an_epoch"] / statistics["rows_an_epoch"]
    return statistics["tokens"] / statistics["kept"]


def longest_row(settings: Settings, *sets) -> int:
    """Return the tokens of the longest row, or side of a pair; --max_length for packs and streams.

    Args: sets: training and evaluation sets, or None.
    """
    sets = [rows for rows in sets if rows is not None]
    if settings.packing or any(rows.stream is not None for rows in sets):
        return settings.max_length
    return max(rows.statistics["longest"] for rows in sets)
