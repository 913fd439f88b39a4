"""Order rows, pack them and collate them into batches."""

import array
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from zerofit.base.errors import UserError
from zerofit.data import conversations
from zerofit.job.settings import order_seed


class Share(NamedTuple):
    """How often rows of a data set are used in an epoch."""

    weight: float
    number: int = 0  # entry of --data; the rows of each entry are sampled separately


def rows_of_epoch(shares: list[Share], epoch: int) -> list[int]:
    """Return the row indices of an epoch, sorted and repeated by weight. shares: one per row.

    The rows of a set are shuffled once, independent of the seed, and each epoch takes the next len x weight of them,
    cyclically: with weight 0.5, the second epoch uses the half that the first one skipped. All epochs have the same
    number of rows of each set.
    """
    groups: dict[Share, list[int]] = {}
    for row, share in enumerate(shares):
        groups.setdefault(share, []).append(row)
    chosen = []
    for share, group in groups.items():
        count = max(1, round(len(group) * share.weight))
        order = torch.randperm(len(group), generator=torch.Generator().manual_seed(0)).tolist()
        chosen += [group[order[turn % len(group)]] for turn in range(epoch * count, (epoch + 1) * count)]
    return sorted(chosen)


def tables(rows, columns: list[str]) -> Iterator:
    """Yield the columns of a datasets.Dataset as Arrow tables of some rows each."""
    return rows.select_columns(columns).with_format("arrow").iter(10_000)


def lengths_of(rows) -> np.ndarray:
    """Return the number of tokens of each row, without converting a datasets.Dataset to Python lists."""
    if not hasattr(rows, "with_format"):
        return np.array([len(row["input_ids"]) for row in rows])
    import pyarrow.compute as pc

    return np.concatenate([pc.list_value_length(table["input_ids"]) for table in tables(rows, ["input_ids"])])


def without_labels(pad_token_id: int, length: int) -> dict:
    """Return a document that does not contribute to the loss.

    It does not use the padding token: its embedding is often zero, and the gradient of a norm of zeros can be NaN, as
    in Gemma-3n.
    """
    return {"input_ids": [int(pad_token_id == 0)] * length, "labels": [conversations.IGNORE] * length}


def filler(pad_token_id: int, documents: int = 1) -> dict:
    """Return a row without labels, which does not contribute to the loss."""
    row = without_labels(pad_token_id, 2 * documents)
    return row if documents == 1 else row | {"lengths": [2] * documents}


class DatasetWithFiller(torch.utils.data.Dataset):
    """A dataset with a filler row at index len(dataset), which samplers use to complete the last batch.

    reference: the reference model's log-probabilities (pairs, 2), which are added to the rows of a preference set.
    """

    def __init__(self, sequences, pad_token_id: int, documents: int = 1):
        self.sequences, self.filler, self.reference = sequences, filler(pad_token_id, documents), None

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict:
        row = self.filler if index == len(self.sequences) else self.sequences[index]
        if self.reference is None:
            return row
        reference = self.reference[index] if index < len(self.sequences) else torch.zeros(2)
        return row | {"reference": reference}


class EpochSampler(torch.utils.data.Sampler):
    """Sample one epoch in an order that is independent of ranks, micro batch and accumulation.

    Yields each index once (shuffled by seed + epoch, or in order), then the filler index `length` until the count
    is a multiple of `multiple`, so that no row is dropped or used twice.
    """

    def __init__(self, length: int, multiple: int, seed: int | None, order=None, weights: list[Share] | None = None):
        """Args: order: (indices of the epoch, torch.Generator) -> ordered indices; default: a uniform shuffle;
        weights: how often each index is used in an epoch (default: once), see rows_of_epoch.
        """
        self.length, self.multiple, self.seed, self.order, self.epoch = length, multiple, seed, order, 0
        self.weights, self.rows = weights, length if weights is None else len(rows_of_epoch(weights, 0))

    def __len__(self) -> int:
        return -(-self.rows // self.multiple) * self.multiple

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self._epoch(self.epoch)))

    def indices(self, epoch: int) -> list[int]:
        """Return the indices of any epoch."""
        return self._epoch(epoch).tolist()

    def _epoch(self, epoch: int) -> np.ndarray:
        """Return the indices of an epoch in 8 bytes each."""
        rows = np.arange(self.length) if self.weights is None else np.array(rows_of_epoch(self.weights, epoch))
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            shuffled = torch.randperm(self.rows, generator=generator).numpy()
            rows = self.order(rows, generator) if self.order else rows[shuffled]
        return np.pad(np.asarray(rows, dtype=np.int64), (0, len(self) - self.rows), constant_values=self.length)


def training_sampler(dataset: DatasetWithFiller, args, weights: list[Share] | None, data_ranks: int) -> EpochSampler:
    """Return the sampler of a training set. Optimizer steps have the same rows for any number of ranks.

    Args: args: TrainingArguments. weights: one share per row; packs have theirs. data_ranks: Settings.data_ranks.
    Raises: UserError for a --train_sampling_strategy that depends on the number of ranks.
    """
    effective, order = args.per_device_train_batch_size * args.gradient_accumulation_steps * data_ranks, None
    if args.train_sampling_strategy == "group_by_length":
        lengths = lengths_of(dataset.sequences).tolist()

        def order(rows, generator):
            chosen = [lengths[i] for i in rows]
            return [rows[i] for i in LengthGroupedSampler(effective, lengths=chosen, generator=generator)]

    elif args.train_sampling_strategy not in ("random", "sequential"):
        raise UserError(
            f"--train_sampling_strategy {args.train_sampling_strategy}: the row order would depend on the number of "
            "ranks; use random, sequential or group_by_length."
        )
    return EpochSampler(
        len(dataset), effective, order_seed(args), order, getattr(dataset.sequences, "weights", weights)
    )


class Collator:
    """Pad rows on the right to (rows, longest rounded up); padding has mask 0 and label IGNORE.

    The documents of a row with `lengths` (the two sides of a pair) become separate rows. transformers'
    DataCollatorForSeq2Seq pads on the tokenizer's side, sometimes the left, and takes twice as long.
    """

    def __init__(self, pad_token_id: int, multiple_of: int = 8):
        self.pad_token_id, self.multiple_of = pad_token_id, multiple_of

    def __call__(self, batch: list[dict]) -> dict[str, torch.Tensor]:
        references, batch = _references(batch), [document for row in batch for document in documents(row)]
        longest = max(len(row["input_ids"]) for row in batch)
        width = -(-longest // self.multiple_of) * self.multiple_of  # tensor cores are fastest with multiples of 8
        ids = torch.full((len(batch), width), self.pad_token_id)
        labels = torch.full((len(batch), width), conversations.IGNORE)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for i, row in enumerate(batch):
            length = len(row["input_ids"])
            ids[i, :length] = torch.tensor(row["input_ids"])
            labels[i, :length] = torch.tensor(row["labels"])
            mask[i, :length] = 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask} | references


def documents(row: dict) -> list[dict]:
    """Split a row into its documents; a row without `lengths` is one document."""
    if "lengths" not in row:
        return [row]
    ends = list(itertools.accumulate(row["lengths"], initial=0))
    return [{k: row[k][a:b] for k in ("input_ids", "labels")} for a, b in itertools.pairwise(ends)]


def _references(batch: list[dict]) -> dict[str, torch.Tensor]:
    """Return {"reference": (pairs, 2)} if the rows have reference log-probabilities."""
    return {"reference": torch.stack([row["reference"] for row in batch])} if "reference" in batch[0] else {}


def document_of_each_token(inputs: dict) -> tuple[torch.Tensor, int]:
    """Return (index of each token's document in a collated batch, flat; number of documents)."""
    ids, bounds = inputs["input_ids"], inputs.get("cu_seq_lens_q")
    if bounds is None:
        return torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1]), len(ids)
    numbers = torch.arange(len(bounds) - 1, device=ids.device)
    return numbers.repeat_interleave(bounds.diff(), output_size=ids.numel()), len(bounds) - 1


def join(documents: list[dict]) -> dict:
    """Concatenate documents into a pack: {"input_ids", "labels", "lengths": tokens per document}."""
    return {
        "input_ids": [token for document in documents for token in document["input_ids"]],
        "labels": [token for document in documents for token in document["labels"]],
        "lengths": [len(document["input_ids"]) for document in documents],
    }


class Packs(Sequence):
    """Lists of indices in two arrays, 16 bytes per index: a quarter of lists of Python numbers."""

    def __init__(self, indices: np.ndarray, ends: np.ndarray):
        """Args: indices: the concatenated indices of all packs; ends: the end of each pack in `indices`."""
        self.indices, self.ends = indices, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> list[int]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.indices[self.ends[number - 1] if number else 0 : self.ends[number]].tolist()


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> Packs:
    """Group indices into packs of at most `capacity`: longest first, each into the fullest pack that fits.

    A bit mask of the free room in all packs finds this pack quickly: 500,000 rows take seconds.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    open_packs: dict[int, array.array] = {}  # free room -> pack numbers
    pack_of, packs, mask = array.array("q"), 0, 0  # bit r of mask: some pack has free room r
    for length in memoryview(lengths[order]):  # converts one number at a time
        fitting = mask >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # lowest bit: the least sufficient free room
            pack = open_packs[room].pop()
            if not open_packs[room]:
                mask ^= 1 << room
        else:
            pack, room, packs = packs, capacity, packs + 1
        pack_of.append(pack)
        if free := room - length:
            open_packs.setdefault(free, array.array("q")).append(pack)
            mask |= 1 << free
    numbers = np.frombuffer(pack_of, dtype=np.int64) if pack_of else np.empty(0, dtype=np.int64)
    return Packs(order[np.argsort(numbers, kind="stable")], np.cumsum(np.bincount(numbers, minlength=packs)))


class PackedCollator:
    """Concatenate packs or rows into a single row with document boundaries, without padding.

    input_ids, labels, position_ids: (1, tokens); cu_seq_lens_q/k: int32 (documents + 1); max_length_q/k: the longest.
    seq_idx (optional): int32 (1, tokens), the number of each token's document.
    A final document of padding makes the number of tokens a multiple of `multiple_of`.
    """

    def __init__(self, pad_token_id: int = 0, multiple_of: int = 1, seq_idx: bool = False):
        from transformers import DataCollatorWithFlattening

        self.pad_token_id, self.multiple_of = pad_token_id, multiple_of
        self.flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=seq_idx)

    def __call__(self, batch: list[dict]) -> dict:
        flat = [document for row in batch for document in documents(row)]
        if missing := -sum(len(document["input_ids"]) for document in flat) % self.multiple_of:
            flat.append(without_labels(self.pad_token_id, missing))
        return self.flatten(flat) | _references(batch)


LABEL_COUNT = "label_count"


class CountingCollator:
    """Collate with `collate` and add LABEL_COUNT, the number of labels in the loss, before they are on the GPU."""

    def __init__(self, collate):
        self.collate = collate

    def __call__(self, batch: list) -> dict:
        batch = self.collate(batch)
        return batch | {LABEL_COUNT: int((batch["labels"][..., 1:] != conversations.IGNORE).sum())}


class TrainCollator:
    """Collate training batches: concatenated if `packed`, else padded.

    The number of tokens is a multiple of `slices`, the ranks that share a row. seq_idx: see PackedCollator.
    """

    def __init__(self, pad_token_id: int, packed: bool, slices: int = 1, seq_idx: bool = False):
        self.packed, self.pad = packed, Collator(pad_token_id, 8 * slices)
        self.pack = PackedCollator(pad_token_id, slices, seq_idx)

    def __call__(self, batch: list[dict]) -> dict:
        return (self.pack if self.packed else self.pad)(batch)
