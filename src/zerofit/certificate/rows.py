"""Record the rows that each rank receives, and compare them with the rows of the epochs."""

import numpy as np
import torch

from zerofit.base import distributed
from zerofit.job.settings import Check

ROWS = "row_numbers"  # key of a batch from the data loader to the trainer


class Numbered(torch.utils.data.Dataset):
    """A dataset whose items are (index, row)."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, dict]:
        return index, self.dataset[index]


class NumberedCollator:
    """Collate (index, row) with `collate`, and add the indices as ROWS."""

    def __init__(self, collate):
        self.collate = collate

    def __call__(self, batch: list[tuple[int, dict]]) -> dict:
        numbers, rows = zip(*batch, strict=True)
        return self.collate(list(rows)) | {ROWS: list(numbers)}


def hashed(numbers) -> np.ndarray:
    """Return a 64-bit hash of each number (splitmix64; Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        z = np.asarray(numbers, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def digest(numbers) -> tuple[int, int]:
    """Return (count, sum of the hashes mod 2^64), which do not depend on the order."""
    return len(numbers), int(hashed(numbers).sum(dtype=np.uint64)) if len(numbers) else 0


class RowsSeen:
    """The rows that this rank has received, as a digest per epoch."""

    def __init__(self):
        self.epochs: dict[int, tuple[int, int]] = {}

    def add(self, epoch: int, numbers: list[int], filler: int) -> None:
        """Add the rows of a micro batch. filler: index of the row without labels that fills up the last batch."""
        count, total = digest([number for number in numbers if number != filler])
        before = self.epochs.get(epoch, (0, 0))
        self.epochs[epoch] = before[0] + count, (before[1] + total) % 2**64


def are_countable(trainer, first_step: int) -> bool:
    """Return whether the rows of a step follow from its number: not for a stream or with --ignore_data_skip."""
    return trainer.seen_rows is not None and not (trainer.args.ignore_data_skip and first_step)


def check(trainer, first_step: int) -> Check:
    """Compare the rows that all ranks have received since `first_step` with the rows of the epochs. Collective."""
    if not are_countable(trainer, first_step):
        reason = "--ignore_data_skip repeats rows"
        if trainer.seen_rows is None:
            custom = "the recipe uses a custom data loader"
            reason = custom if trainer.tokens.stream is None else "the rows of a stream are not numbered"
        return Check("rows", None, f"rows seen: not counted: {reason}")
    settings, sampler, last = trainer.settings, trainer.train_sampler, trainer.state.global_step
    seen: dict[int, tuple[int, int]] = {}
    for rank_epochs in distributed.all_gather(trainer.seen_rows.epochs):
        for epoch, (count, total) in rank_epochs.items():
            before = seen.get(epoch, (0, 0))
            seen[epoch] = before[0] + count, (before[1] + total) % 2**64
    steps, wrong, epochs = len(sampler) // sampler.multiple, [], []
    for epoch in range(first_step // steps, -(-last // steps)):
        begin, end = max(first_step, epoch * steps) - epoch * steps, min(last, (epoch + 1) * steps) - epoch * steps
        expected, count = _expected(sampler, epoch, begin, end, steps)
        times = settings.ranks_per_row  # ranks that split a row receive the same rows
        if seen.get(epoch, (0, 0)) != (count * times, expected * times % 2**64):
            wrong.append(epoch)
        epochs.append({"epoch": epoch + 1, "steps": [begin + 1, end], "rows": count, "hash": f"{expected:016x}"})
    rows = sum(epoch["rows"] for epoch in epochs)
    if wrong:
        named = ", ".join(str(epoch + 1) for epoch in wrong)
        return Check("rows", False, f"rows seen: NOT the rows of the data in epoch {named}", {"epochs": epochs})
    unit = "packs" if settings.packing else settings.objective.unit
    after = f" since step {first_step}" if first_step else ""
    if epochs and (end := epochs[-1]["steps"][1]) < steps:
        after += f", {'the last' if len(epochs) > 1 else 'which was'} cut after {end} of its {steps} steps,"
    once = f"used by exactly one of {settings.data_ranks} ranks" if settings.data_ranks > 1 else "used exactly once"
    if sampler.weights is not None:
        once = "used as often as its weight specifies"
    return Check(
        "rows",
        True,
        f"rows seen: each of the {rows:,} {unit} of {len(epochs)} epoch{'s' * (len(epochs) > 1)}{after} was {once} "
        f"(hash of the last epoch's {epochs[-1]['hash'] if epochs else '-'})",
        {"epochs": epochs},
    )


def _expected(sampler, epoch: int, begin: int, end: int, steps: int) -> tuple[int, int]:
    """Return (sum of hashes, count) of the rows in steps `begin` to `end` of an epoch.

    A complete epoch of unweighted rows contains every row once, in any order of the sampler.
    """
    if sampler.weights is None and (begin, end) == (0, steps):
        count, total = digest(np.arange(sampler.length))
        return total, count
    order = np.asarray(sampler.indices(epoch)[begin * sampler.multiple : end * sampler.multiple])
    count, total = digest(order[order != sampler.length])
    return total, count
