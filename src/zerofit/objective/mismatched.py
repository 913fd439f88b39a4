"""Give each row a second document for the KL term of KTO: its prompt with the answer of another row."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from zerofit.data.batches import tables
from zerofit.data.conversations import IGNORE

MISMATCHED = "mismatched"  # key of a row: the second document


def partners(order: Sequence[int], prompts: Sequence[int], block: int) -> np.ndarray:
    """Return for each row the index of the row with the answer that its prompt is paired with.

    Like TRL in its batches, use the previous row in the same block, cyclically, but not an answer to the same prompt if
    the block has another. Rows that are missing in `order` or alone in a block use the previous row in the file.
    Args: order: row order of the first epoch; larger indices than the rows are fillers. prompts: a hash per row; block:
        rows per step.
    """
    length = len(prompts)
    indices = (np.arange(length) - 1) % length
    order = np.asarray(order)
    for begin in range(0, len(order), block):
        rows = [int(row) for row in order[begin : begin + block] if row < length]
        for place, row in enumerate(rows) if len(rows) > 1 else ():
            before = (rows[place - distance] for distance in range(1, len(rows)))
            indices[row] = next((other for other in before if prompts[other] != prompts[row]), rows[place - 1])
    return indices


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
    """Tokenized rows with the key MISMATCHED: the prompt with the partner's answer, truncated at max_length."""

    def __init__(self, rows, partners: np.ndarray, max_length: int):
        self.rows, self.partners, self.max_length = rows, partners, max_length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        row = self.rows[index]
        return row | {MISMATCHED: joined(row, self.rows[int(self.partners[index])], self.max_length)}


def joined(row: dict, other: dict, max_length: int) -> dict:
    """Return the prompt of a row with the answer of another row, truncated to max_length tokens."""
    begin, begin_other = _answer(row), _answer(other)
    ids = [*row["input_ids"][:begin], *other["input_ids"][begin_other:]]
    labels = [*[IGNORE] * begin, *other["labels"][begin_other:]]
    return {"input_ids": ids[:max_length], "labels": labels[:max_length]}


def _answer(row: dict) -> int:
    """Return the start of a row's answer: its first label."""
    return next(i for i, label in enumerate(row["labels"]) if label != IGNORE)
