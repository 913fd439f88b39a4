"""Training and evaluation sets: files -> tokens -> an Arrow file that every rank maps, in the same order everywhere."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from . import chat, rows
from .errors import UserError

CACHE_VERSION = 1  # raise it when the tokens of a row change


@dataclass
class Tokens:
    """Tokenised rows. `dataset[i]` is {"input_ids": [...], "labels": [...]}; `statistics` counts what was read."""

    dataset: object
    statistics: dict
    fingerprint: str

    def __len__(self) -> int:
        return len(self.dataset)

    def sequences(self, settings):
        """What one training row is: a document, or with packing several of them."""
        return Packs(self.dataset, settings.max_length) if settings.packing else self.dataset


def load(settings, tokenizer) -> tuple[Tokens, Tokens | None]:
    """(training set, evaluation set or None), tokenised once and cached; safe to call on every rank at once.

    Raises: UserError for data that cannot be read or holds nothing to learn.
    """
    train, held_out = _sources(settings.data, settings)
    if settings.eval_data:
        held_out = _sources(settings.eval_data, settings)[0]
    if settings.eval_fraction and held_out:
        raise UserError("--eval_fraction: the data already has an eval split; use one of the two.")
    train_set = _prepare(train, settings, tokenizer, settings.max_samples)
    eval_set = _prepare(held_out, settings, tokenizer, None) if held_out else None
    if settings.eval_fraction:
        train_set, eval_set = _split(train_set, settings)
    return train_set, eval_set


def _sources(data: str, settings) -> tuple[list, list]:
    """Lists of files, or of ("hub id", split) pairs, for training and for evaluation."""
    files = rows.find_files(data)
    if files is not None:
        if not files[0]:
            raise UserError(f"{data}: the folder holds only evaluation files; training needs at least one more.")
        return files
    splits = rows.hub_splits(data)
    if "train" not in splits:
        raise UserError(f"--data {data}: has no 'train' split, only {', '.join(splits)}.")
    held_out = [s for s in rows.EVAL_NAMES if s in splits][:1]
    return [(data, "train")], [(data, s) for s in held_out]


def _read(source) -> Iterator[rows.Row]:
    yield from rows.read_hub(*source) if isinstance(source, tuple) else rows.read(source)


def _fingerprint(sources: list, settings, tokenizer, limit: int | None) -> str:
    """A hash of everything that decides the tokens: data bytes, tokenizer, template, options, this code's version."""
    digest = hashlib.sha256()
    for source in sources:
        if isinstance(source, tuple):
            from datasets import load_dataset_builder

            digest.update(repr((source, str(load_dataset_builder(source[0]).hash))).encode())
            continue
        with source.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    options = [CACHE_VERSION, settings.max_length, limit, tokenizer.chat_template, tokenizer.eos_token_id]
    digest.update(json.dumps(options).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()[:24]


def cache_folder() -> Path:
    return Path(os.environ.get("ZEROFIT_CACHE", "~/.cache/zerofit")).expanduser() / "data"


def _prepare(sources: list, settings, tokenizer, limit: int | None) -> Tokens:
    from datasets import Dataset
    from filelock import FileLock

    fingerprint = _fingerprint(sources, settings, tokenizer, limit)
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    table, facts = folder / f"{fingerprint}.arrow", folder / f"{fingerprint}.json"
    with FileLock(str(table) + ".lock"):  # the first process prepares, the others wait here, outside any collective
        if not facts.exists():
            statistics = _write(table, sources, settings, tokenizer, limit)
            aside = facts.with_suffix(".tmp")
            aside.write_text(json.dumps(statistics))
            os.replace(aside, facts)  # last: a half-written table is never taken for a whole one
    statistics = json.loads(facts.read_text())
    return Tokens(Dataset.from_file(str(table)), statistics, fingerprint)


def _write(table: Path, sources: list, settings, tokenizer, limit: int | None) -> dict:
    """Tokenise all rows into an Arrow stream file, a thousand at a time, and count."""
    import pyarrow as pa

    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32())})
    count = dict.fromkeys(("rows", "kept", "dropped_no_answer_left", "truncated", "tokens", "supervised_tokens"), 0)
    kind, batch, started, last_word = None, [], time.monotonic(), time.monotonic()
    aside = table.with_suffix(".tmp")
    with pa.OSFile(str(aside), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for source in sources:
            for place, row in _read(source):
                kind = kind or chat.detect(place, row)
                ids, labels = chat.tokenize(place, chat.to_messages(place, row, kind), tokenizer)
                count["rows"] += 1
                count["truncated"] += len(ids) > settings.max_length
                ids, labels = ids[: settings.max_length], labels[: settings.max_length]
                supervised = sum(label != chat.IGNORE for label in labels[1:])
                if supervised == 0:
                    count["dropped_no_answer_left"] += 1
                else:
                    batch.append({"input_ids": ids, "labels": labels})
                    count["kept"] += 1
                    count["tokens"] += len(ids)
                    count["supervised_tokens"] += supervised
                if len(batch) == 1000:
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
                    batch = []
                if time.monotonic() - last_word > 5:
                    last_word = time.monotonic()
                    print(f"tokenising: {count['rows']:,} rows, {count['tokens']:,} tokens", flush=True)
                if limit and count["rows"] == limit:
                    break
        if batch:
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
    names = ", ".join(str(s if isinstance(s, Path) else s[0]) for s in sources)
    if not count["rows"]:
        raise UserError(f"{names}: holds no rows.")
    if not count["kept"]:
        raise UserError(
            f"{names}: in none of the {count['rows']} rows an answer fits into --max_length {settings.max_length}."
        )
    os.replace(aside, table)
    return {"source": names, "format": kind, **count, "seconds": round(time.monotonic() - started, 3)}


def _split(tokens: Tokens, settings) -> tuple[Tokens, Tokens]:
    """Hold out a share of the rows, the same ones for the same seed."""
    held = round(len(tokens) * settings.eval_fraction)
    if held < 1 or held == len(tokens):
        raise UserError(f"--eval_fraction {settings.eval_fraction} of {len(tokens)} rows leaves one side empty.")
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(settings.seed)).tolist()
    parts = []
    for chosen in (sorted(order[held:]), sorted(order[:held])):
        part = tokens.dataset.select(chosen)
        count = {"kept": len(part), "tokens": sum(map(len, part["input_ids"]))}
        count["supervised_tokens"] = sum(t != chat.IGNORE for row in part["labels"] for t in row[1:])
        parts.append(Tokens(part, tokens.statistics | count, tokens.fingerprint))
    return parts[0], parts[1]


def describe(name: str, tokens: Tokens) -> str:
    """One line about a set, with every loss of rows counted."""
    s = tokens.statistics
    text = f"{name}: {len(tokens):,} rows ({s['format']}) from {s['source']}"
    if s["truncated"]:
        text += f", {s['truncated']:,} cut at max_length"
    if s["dropped_no_answer_left"]:
        text += f", {s['dropped_no_answer_left']:,} dropped (no answer left after the cut)"
    return text + f"; {s['supervised_tokens']:,} of {s['tokens']:,} tokens are trained on"


class PaddedToMultiple(torch.utils.data.Dataset):
    """A set with one more row, at index len(tokens), that trains on nothing; samplers fill the last batch with it."""

    def __init__(self, sequences, pad_token_id: int):
        self.sequences = sequences
        self.filler = {"input_ids": [pad_token_id] * 2, "labels": [chat.IGNORE] * 2}

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict:
        return self.filler if index == len(self.sequences) else self.sequences[index]


class EpochSampler(torch.utils.data.Sampler):
    """The order of one epoch, the same for every rank count, micro batch and accumulation.

    Yields each index once (shuffled by seed + epoch, or in order), then the filler index `length` until the count
    is a multiple of `multiple`, so that no row is dropped and none is trained on twice.
    """

    def __init__(self, length: int, multiple: int, seed: int | None, order=None):
        """order: torch.Generator -> list of indices, for another shuffle than a uniform one."""
        self.length, self.multiple, self.seed, self.order, self.epoch = length, multiple, seed, order, 0

    def __len__(self) -> int:
        return -(-self.length // self.multiple) * self.multiple

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = range(self.length)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = self.order(generator) if self.order else torch.randperm(self.length, generator=generator).tolist()
        yield from order
        yield from [self.length] * (len(self) - self.length)


class Collator:
    """Rows -> right-padded tensors of shape (rows, longest); attention_mask 0 and label IGNORE on the padding."""

    def __init__(self, pad_token_id: int, multiple_of: int = 8):
        self.pad_token_id, self.multiple_of = pad_token_id, multiple_of

    def __call__(self, batch: list[dict]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in batch)
        width = -(-longest // self.multiple_of) * self.multiple_of  # tensor cores want multiples of 8
        ids = torch.full((len(batch), width), self.pad_token_id)
        labels = torch.full((len(batch), width), chat.IGNORE)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for i, row in enumerate(batch):
            n = len(row["input_ids"])
            ids[i, :n] = torch.tensor(row["input_ids"])
            labels[i, :n] = torch.tensor(row["labels"])
            mask[i, :n] = 1
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}


class Packs(torch.utils.data.Dataset):
    """Documents packed into sequences of at most max_length tokens: longest first, each into the fullest pack it fits.

    An item is {"input_ids", "labels", "lengths"}; the first label of each document is IGNORE, because its predictor
    would be the last token of the document before.
    """

    def __init__(self, documents, max_length: int):
        self.documents = documents
        self.packs = best_fit_decreasing([len(ids) for ids in documents["input_ids"]], max_length)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict:
        parts = [self.documents[i] for i in self.packs[index]]
        return {
            "input_ids": [t for part in parts for t in part["input_ids"]],
            "labels": [t for part in parts for t in (chat.IGNORE, *part["labels"][1:])],
            "lengths": [len(part["input_ids"]) for part in parts],
        }


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Indices grouped so that no group's lengths exceed `capacity`. O(n x capacity / 64) worst, near O(n) in practice."""
    open_packs: dict[int, list[list[int]]] = {}  # room left -> packs
    packs = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        need = lengths[i]
        room = next((r for r in range(need, capacity + 1) if open_packs.get(r)), None)
        if room is None:
            pack, room = [], capacity
            packs.append(pack)
        else:
            pack = open_packs[room].pop()
        pack.append(i)
        open_packs.setdefault(room - need, []).append(pack)
    return packs


class PackedCollator:
    """Packs -> one row of all their tokens with document boundaries, no padding.

    input_ids, labels, position_ids: (1, tokens); cu_seq_lens_q/k: int32 (documents + 1); max_length_q/k: the longest.
    """

    def __call__(self, batch: list[dict]) -> dict:
        lengths = [n for pack in batch for n in pack.get("lengths", [len(pack["input_ids"])])]
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return {
            "input_ids": torch.tensor([[t for pack in batch for t in pack["input_ids"]]]),
            "labels": torch.tensor([[t for pack in batch for t in pack["labels"]]]),
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
