"""Give each row a second document for the KL term of KTO: its prompt with the answer of another row."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from zerofit.data.batches import tables
from zerofit.data.conversations import IGNORE

MISMATCHED = "mismatched"  # key of a row: the second document


def partners(order: Sequence[int], prompts: Sequence[int], block: int) -> np.ndarray:
    """Return for each row the row whose answer its prompt is paired with.

    As TRL does in its batches: the row before it in the same block, cyclically; but not an answer to the same prompt,
    where the block has another. Rows that `order` leaves out, and one that is alone in a block, take the answer of the
    row before them in the file.
    Args: order: of the rows in the first epoch; indices behind the rows' are fillers. prompts: a hash of each row's;
        block: rows of a step.
    """
    length = len(prompts)
    found = (np.arange(length) - 1) % length
    order = np.asarray(order)
    for begin in range(0, len(order), block):
        rows = [int(row) for row in order[begin : begin + block] if row < length]
        for place, row in enumerate(rows) if len(rows) > 1 else ():
            before = (rows[place - distance] for distance in range(1, len(rows)))
            found[row] = next((other for other in before if prompts[other] != prompts[row]), rows[place - 1])
    return found


def prompts_of(dataset) -> np.ndarray:
    """Return a 64-bit hash of the prompt of each row of a datasets.Dataset."""
    import xxhash

    hashes = []
    for table in tables(dataset, ["input_ids", "labels"]):
        ids, labels = (table[name].combine_chunks() for name in ("input_ids", "labels"))
        bounds = ids.offsets.to_numpy() - ids.offsets[0].as_py()
        tokens, is_label = ids.flatten().to_numpy(), labels.flatten().to_numpy() != IGNORE
        for begin, end in itertools.pairwise(bounds):
            hashes.append(xxhash.xxh3_64_intdigest(tokens[begin : begin + int(is_label[begin:end].argmax())].tobytes()))
    return np.array(hashes, dtype=np.uint64)


class MismatchedRows(torch.utils.data.Dataset):
    """Tokenized rows, each with the key MISMATCHED: its prompt with the answer of its partner, cut at max_length."""

    def __init__(self, rows, of_row: np.ndarray, max_length: int):
        self.rows, self.partners, self.max_length = rows, of_row, max_length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        row = self.rows[index]
        return row | {MISMATCHED: joined(row, self.rows[int(self.partners[index])], self.max_length)}


def joined(row: dict, other: dict, max_length: int) -> dict:
    """Return the prompt of one row with the answer of another, cut at the right to max_length tokens."""
    begin, begin_other = _answer(row), _answer(other)
    ids = [*row["input_ids"][:begin], *other["input_ids"][begin_other:]]
    labels = [*[IGNORE] * begin, *other["labels"][begin_other:]]
    return {"input_ids": ids[:max_length], "labels": labels[:max_length]}


def _answer(row: dict) -> int:
    """Return where the answer of a row begins: at its first label."""
    return next(i for i, label in enumerate(row["labels"]) if label != IGNORE)
