"""Training and evaluation sets: files -> tokens -> an Arrow file that every rank maps, in the same order everywhere."""

import contextlib
import gc
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import torch

from . import chat, rows, world
from .errors import UserError

CACHE_VERSION = 6  # raise it when the tokens of a row change
CHUNK = 500  # rows encoded at once
KEPT_REASONS = 100  # in run.json and data.json
MOST_REASONS = 10  # why rows cannot be used, a line each
MOST_COLUMNS = 20  # that are not used, in one line
LOOKED_AT = 100  # rows in which --bad_rows drop looks for the format
FIRST_PLACES = 3  # of the rows that cannot be used for one reason
COUNTS = (
    "rows",
    "kept",
    "dropped_bad",
    "dropped_no_answer_left",
    "dropped_too_long",
    "truncated",
    "tokens",
    "supervised_tokens",
)


@dataclass
class Tokens:
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
        return Packs(self.all_rows, settings.max_length, self.weights) if settings.packing else self.all_rows


def load(settings, tokenizer) -> tuple[Tokens, Tokens | None]:
    """(training set, evaluation set or None), tokenised once and cached; safe to call on every rank at once.

    Raises: UserError for data that cannot be read or holds nothing to learn.
    """
    train, held_out = rows.find(settings.data, settings.data_config, settings.data_split, settings.streaming)
    if not train:
        raise UserError(f"--data {' '.join(settings.data)}: holds only evaluation files; training needs one more.")
    if settings.eval_data:
        named, marked = rows.find(settings.eval_data, settings.data_config, settings.data_split)
        held_out = marked or named  # a folder's or hub set's own eval split, else all that is named
    if settings.eval_fraction and held_out:
        raise UserError("--eval_fraction: the data already has an eval split; use one of the two.")
    encoder = chat.Encoder(tokenizer, settings.train_on)
    if settings.streaming:
        from . import stream  # which builds on this module

        train_set = stream.load(train, settings, encoder)
    else:
        train_set = _prepare(train, settings, encoder, settings.max_samples)
    eval_set = _prepare(held_out, settings, encoder, None) if held_out else None
    if settings.eval_fraction:
        train_set, eval_set = _split(train_set, settings)
    return _repeated(train_set), eval_set


def _fingerprint(sources: list[rows.Source], settings, tokenizer, limit: int | None) -> str:
    """A hash of everything that decides the tokens: data bytes, tokenizer, template, options, this code's version."""
    digest = hashlib.sha256()
    for source in sources:
        if source.hub:
            from datasets import load_dataset_builder

            digest.update(repr((source.hub, load_dataset_builder(*source.hub[:2]).hash)).encode())
            continue
        try:
            files = [source.path] if source.path.is_file() else sorted(f for f in source.path.iterdir() if f.is_file())
            for file in files:
                # Size and format first: rows that move from one file to the next, and the same bytes read as another
                # format, give other tokens.
                form = [rows.suffix(file), file.suffix.lower(), file.stat().st_size]
                digest.update((json.dumps(form) + "\n").encode())
                with file.open("rb") as opened:
                    while block := opened.read(1 << 22):
                        digest.update(block)
        except OSError as error:
            raise UserError(f"{error.filename or source}: cannot be read: {error.strerror}.") from None
    options = [
        CACHE_VERSION, [s.weight for s in sources], settings.max_length, limit, settings.data_format, settings.columns,
        settings.train_on, settings.truncation, tokenizer.chat_template, tokenizer.eos_token_id,
        tokenizer.special_tokens_map,
    ]  # fmt: skip
    digest.update(json.dumps(options, default=str).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()[:24]


def cache_folder() -> Path:
    """The folder of tokenised sets, made if need be: $ZEROFIT_CACHE or ~/.cache/zerofit, else a temporary one.

    Raises: UserError when $ZEROFIT_CACHE cannot be written to.
    """
    folder = world.cache_root() / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        reason = "no permission to write"
    except OSError as error:
        reason = error.strerror
    if os.environ.get("ZEROFIT_CACHE"):
        raise UserError(f"ZEROFIT_CACHE={os.environ['ZEROFIT_CACHE']}: {reason}; name a folder that can be written.")
    aside = world.private_folder()
    if aside is None:
        aside = Path(tempfile.mkdtemp(prefix="zerofit-"))
        os.environ["ZEROFIT_CACHE"] = str(aside)  # for the ranks, which this process starts
        print(
            f"note: {tempfile.gettempdir()}/zerofit-{os.getuid()} is not this user's alone; tokenised rows are in {aside}",
            flush=True,
        )
    (aside / "data").mkdir(exist_ok=True)
    return aside / "data"


def _checksum(file: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_64()
    with file.open("rb") as opened:
        while block := opened.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _prepare(sources: list[rows.Source], settings, encoder: chat.Encoder, limit: int | None) -> Tokens:
    from datasets import Dataset
    from filelock import FileLock

    fingerprint = _fingerprint(sources, settings, encoder.tokenizer, limit)
    folder = cache_folder()
    table, facts = folder / f"{fingerprint}.arrow", folder / f"{fingerprint}.json"
    # Without the lock: all ranks check at the same time.
    before, statistics = _stamp(facts), _verified(table, facts, settings)
    if statistics is None:
        # The first process prepares, the others wait here, outside any collective.
        with FileLock(str(table) + ".lock"):
            if _stamp(facts) != before:  # another process has just prepared it, and checked what it wrote
                statistics = _read_facts(facts, settings)
            statistics = statistics or _build(table, facts, sources, settings, encoder, limit)
    weights = [weight for kept, weight in statistics["sources"] for _ in range(kept)]
    return Tokens(Dataset.from_file(str(table)), statistics, fingerprint, weights if set(weights) != {1.0} else None)


def _build(table: Path, facts: Path, sources: list[rows.Source], settings, encoder: chat.Encoder, limit) -> dict:
    """Write the table and, last, what is known about it: a half-written table is never taken for a whole one."""
    statistics = _write(table, sources, settings, encoder, limit)
    statistics["checksum"] = _checksum(table)
    aside = facts.with_suffix(".facts")
    aside.write_text(json.dumps(statistics))
    os.replace(aside, facts)
    return statistics


def _stamp(file: Path) -> tuple | None:
    """What changes when the file is replaced."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _verified(table: Path, facts: Path, settings) -> dict | None:
    """What is known about a cached table that is whole; None when it is missing or damaged."""
    statistics = _read_facts(facts, settings)
    try:
        return statistics if statistics and _checksum(table) == statistics["checksum"] else None
    except FileNotFoundError:
        return None


def _read_facts(facts: Path, settings) -> dict | None:
    """What is known about a cached table; None when the file is missing or damaged.

    Also None for one with rows left out, unless --bad_rows drop: reading the data again tells the first of them.
    """
    try:
        statistics = json.loads(facts.read_text())
        if not {"checksum", "sources", "bad_rows", "longest"} <= statistics.keys():
            return None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return None if statistics["bad_rows"] and settings.bad_rows == "error" else statistics


def _repeated(tokens: Tokens) -> Tokens:
    """The set with each row as often as its source's weight says; with weights like 0.5 each epoch has other rows."""
    if tokens.weights is None:
        return tokens
    chosen = rows_of_epoch(tokens.weights, 0)
    times = Counter(chosen)
    statistics = tokens.statistics | {
        "rows_an_epoch": len(chosen),
        "repeated_by_weight": len(chosen) - len(times),
        "left_out_by_weight": len(tokens) - len(times),
    }
    found = Tokens(tokens.dataset.select(chosen), statistics, tokens.fingerprint)
    if any(weight % 1 for weight in tokens.weights):
        found.weights, found.whole = tokens.weights, tokens.dataset
    return found


def rows_of_epoch(weights: list[float], epoch: int) -> list[int]:
    """Return the numbers of the rows that an epoch trains on, in order, each as often as it counts.

    Rows of one weight wait in a shuffled order, and each epoch takes the next rows x weight of them, round and round: at
    0.5 the second epoch takes the half that the first has left out. Every epoch has equally many rows.
    """
    groups: dict[float, list[int]] = {}
    for row, weight in enumerate(weights):
        groups.setdefault(weight, []).append(row)
    chosen = []
    for weight, group in groups.items():
        count = max(1, round(len(group) * weight))
        order = torch.randperm(len(group), generator=torch.Generator().manual_seed(0)).tolist()
        chosen += [group[order[turn % len(group)]] for turn in range(epoch * count, (epoch + 1) * count)]
    return sorted(chosen)


def tokenised(raw: Iterable[tuple], settings, encoder: chat.Encoder, count: Counter) -> list[tuple | None]:
    """Return (input_ids, labels) of each (place, row as `rows.read` gives it, format), None for one that is dropped.

    Without a format ("") it is found row by row.
    Raises: UserError for a row that cannot be used, unless --bad_rows drop.
    """
    names, out, content, slots = _names(settings), [], [], []
    for place, row, kind in raw:
        out.append(None)
        count["rows"] += 1
        try:
            columns = _renamed(place, row, names)
            kind = kind or chat.detect(place, columns)
            content.append((place, chat.parse(place, columns, kind)))
        except UserError as error:
            _refuse(place, error, settings, count)
        else:
            slots.append(len(out) - 1)
            count[f"format {kind}"] += 1
            count.update(f"not used {name}" for name in chat.not_used(columns, kind))
    encoded = encoder.encode(content, lambda place, error: _refuse(place, error, settings, count))
    for i, pair in zip(slots, encoded, strict=True):
        out[i] = None if pair is None else cut(*pair, settings, count)
    count.update({f"note {sentence}": rows_of for sentence, rows_of in encoder.notes.items() if rows_of})
    encoder.notes.clear()
    return out


def _refuse(place: str, error: UserError, settings, count: Counter) -> None:
    """Count a row that cannot be used, by its reason without numbers.

    Raises: the error itself under --bad_rows error.
    """
    if settings.bad_rows == "error":
        raise error
    exact = str(error).removeprefix(f"{place}: ")
    reason = re.sub(r"\d+", "N", exact)
    count["dropped_bad"] += 1
    count[f"bad row {reason}"] += 1
    if count[f"bad row {reason}"] <= FIRST_PLACES:
        count["bad place " + json.dumps([reason, place, exact])] += 1


def read(source: rows.Source, settings) -> Iterator[tuple]:
    """Yield the rows of one source as `rows.read` gives them; with --bad_rows drop a file that cannot be read on is a bad row.

    Raises: UserError for such a file under --bad_rows error, and for a hub set.
    """
    try:
        yield from rows.read(source, lines=True)
    except UserError as error:
        if settings.bad_rows == "error" or source.hub:
            raise
        place = f"{source}{str(error).removeprefix(str(source)).partition(': ')[0]}"  # with the line, where it is named
        yield place, error


def kind_of(found: Iterator, settings) -> tuple[str, Iterator]:
    """(--data_format or the format of the first row, all rows); with --bad_rows drop of the first row that has one.

    It is "" when none of the rows looked at has one.
    Raises: UserError when the first row has no known format, under --bad_rows error.
    """
    if settings.data_format != "auto":
        return settings.data_format, found
    looked_at: list = []
    for place, row in itertools.islice(found, LOOKED_AT):
        looked_at.append((place, row))
        try:
            kind = chat.detect(place, _renamed(place, row, _names(settings)))
        except UserError:
            if settings.bad_rows == "error":
                raise
        else:
            return kind, itertools.chain(looked_at, found)
    return "", itertools.chain(looked_at, found)


def _names(settings) -> dict[str, str]:
    """--columns: the data's name -> ours."""
    return {theirs: ours for ours, theirs in (c.split("=", 1) for c in settings.columns or [])}


def _renamed(place: str, row: dict | str | UserError, names: dict[str, str]) -> dict:
    """The row with --columns applied; a JSON line is parsed first.

    Raises: UserError for a row that cannot be read.
    """
    if isinstance(row, UserError):
        raise row
    row = rows.json_object(place, row) if isinstance(row, str) else row
    missing = next((old for old in names if old not in row), None)
    if missing is not None:
        raise UserError(f"{place}: --columns names {missing!r}, but the columns are {', '.join(row)}.")
    return {names.get(key, key): value for key, value in row.items() if key in names or key not in names.values()}


def repeats(weight: float, number: int, epoch: int) -> int:
    """Return how often row `number` of a stream (from 0) counts in an epoch: `weight` times on average, over the rows of an
    epoch and over the epochs of a row."""
    return math.floor((number + epoch + 1) * weight) - math.floor((number + epoch) * weight)


def _chunks(read: Iterator, limit: int | None) -> Iterator[list]:
    read = itertools.islice(read, limit)
    while chunk := list(itertools.islice(read, CHUNK)):
        yield chunk


_work: tuple = ()  # (encoder, settings): what the forked workers inherit, so that no tokenizer is pickled per chunk


def _encode(chunk: list, kind: str) -> tuple[Counter, object]:
    """Rows as they were read -> (what was counted, the kept ones as an Arrow batch or None)."""
    import pyarrow as pa

    (encoder, settings), count = _work, Counter()
    encoded = tokenised([(*row, kind) for row in chunk], settings, encoder, count)
    kept = [row for row in encoded if row is not None]
    if not kept:
        return count, None
    columns = [pa.array(column, pa.list_(pa.int32())) for column in zip(*kept, strict=True)]
    return count, pa.record_batch(columns, names=["input_ids", "labels"])


def _encoded(chunks: Iterator[list], kind: str, pool, workers: int) -> Iterator[tuple[Counter, object]]:
    """Each chunk encoded, in order; with several workers at most two chunks a worker are in memory.

    Raises: UserError from a row, or when a worker was killed (most likely for its memory).
    """
    if pool is None:
        yield from (_encode(chunk, kind) for chunk in chunks)
        return
    waiting: deque = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode, chunk, kind))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a tokenising process was killed, most likely for its memory; use --preprocessing_num_workers 1."
        ) from None


@contextlib.contextmanager
def _pool(encoder: chat.Encoder, settings, workers: int):
    """A pool of forked processes that know the encoder, or None for one worker."""
    global _work
    _work = encoder, settings
    gc.freeze()  # the collector need not visit, and in each worker thereby copy, all that the libraries hold
    pool = None
    if workers > 1:
        pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"))
    try:
        yield pool
    finally:
        gc.unfreeze()
        if pool:
            pool.shutdown(cancel_futures=True)


def _workers(sources: list[rows.Source], settings) -> int:
    if settings.preprocessing_num_workers is not None:
        return settings.preprocessing_num_workers
    size = sum(s.path.stat().st_size for s in sources if s.path and s.path.is_file())
    return min(8, os.cpu_count() or 1) if size > 4 << 20 else 1


def _write(table: Path, sources: list[rows.Source], settings, encoder: chat.Encoder, limit: int | None) -> dict:
    """Tokenise all rows into an Arrow stream file, a thousand at a time, and count."""
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "labels": pa.list_(pa.int32())})
    count: Counter = Counter()
    started = last_word = time.monotonic()
    aside = table.with_suffix(".tmp")
    workers, per_source, longest = _workers(sources, settings), [], 0
    with (
        pa.OSFile(str(aside), "wb") as file,
        pa.ipc.new_stream(file, schema) as writer,
        _pool(encoder, settings, workers) as pool,
    ):
        for source in sources:
            before, left = count["kept"], None if limit is None else limit - count["rows"]
            kind, found = kind_of(read(source, settings), settings)
            for counted, batch in _encoded(_chunks(found, left), kind, pool, workers):
                count.update(counted)
                if batch is not None:
                    writer.write_batch(batch)
                    longest = max(longest, pc.max(pc.list_value_length(batch["input_ids"])).as_py())
                if time.monotonic() - last_word > 5:
                    last_word = time.monotonic()
                    print(f"tokenising: {count['rows']:,} rows, {count['tokens']:,} tokens", flush=True)
            per_source.append((count["kept"] - before, source.weight))
    found = tally(sources, count, settings)
    os.replace(aside, table)
    return found | {"longest": longest, "sources": per_source, "seconds": round(time.monotonic() - started, 3)}


def tally(sources: list[rows.Source], count: Counter, settings) -> dict:
    """What was read, for the report: names, formats and COUNTS.

    Raises: UserError when no row is left to train on.
    """
    names = ", ".join(map(str, sources))
    if not count["rows"]:
        raise UserError(f"{names}: holds no rows.")
    bad = _bad_rows(count)
    if count["dropped_bad"] == count["rows"]:
        found = next(iter(bad.values()))
        raise UserError(
            f"{found['first'][0]}: {found['exact'].rstrip('.')}; like it, none of the {count['rows']} rows can be used."
        )
    if not count["kept"]:
        raise UserError(
            f"{names}: in none of the {count['rows']} rows an answer fits into --max_length {settings.max_length}."
        )
    formats, notes = sorted(_counted(count, "format ")), _counted(count, "note ")
    return (
        {"source": names, "format": " + ".join(formats)}
        | {name: count[name] for name in COUNTS}
        | {"bad_rows": bad, "columns_not_used": _counted(count, "not used ")}
        | {"notes": [f"{sentence} ({rows_of:,} row{'s' * (rows_of > 1)})" for sentence, rows_of in notes.items()]}
    )


def _bad_rows(count: Counter) -> dict[str, dict]:
    """{reason: {"rows": how many, "first": their first places, "exact": the first one's words}}, the frequent first."""
    reasons = sorted(_counted(count, "bad row ").items(), key=lambda pair: -pair[1])[:KEPT_REASONS]
    bad = {reason: {"rows": n, "first": [], "exact": ""} for reason, n in reasons}
    for entry in _counted(count, "bad place "):
        reason, place, exact = json.loads(entry)
        if reason in bad:
            bad[reason]["exact"] = bad[reason]["exact"] or exact
            bad[reason]["first"] = [*bad[reason]["first"], place][:FIRST_PLACES]
    return bad


def _counted(count: Counter, start: str) -> dict[str, int]:
    """The entries of `count` whose names start so, without the start."""
    return {name.removeprefix(start): n for name, n in count.items() if name.startswith(start)}


def cut(ids: list[int], labels: list[int], settings, count: Counter) -> tuple[list[int], list[int]] | None:
    """The row cut by --truncation, or None when it is dropped; counted either way.

    Raises: UserError for a long row under --truncation error.
    """
    longest = settings.max_length
    if len(ids) > longest:
        if settings.truncation == "error":
            raise UserError(f"a row has {len(ids)} tokens, more than --max_length {longest} (--truncation error).")
        if settings.truncation == "drop":
            count["dropped_too_long"] += 1
            return None
        count["truncated"] += 1
        keep = slice(-longest, None) if settings.truncation == "truncate_left" else slice(longest)
        ids, labels = ids[keep], labels[keep]
    supervised = len(labels) - 1 - labels.count(chat.IGNORE) + (labels[0] == chat.IGNORE)
    if supervised <= 0:
        count["dropped_no_answer_left"] += 1
        return None
    count["kept"] += 1
    count["tokens"] += len(ids)
    count["supervised_tokens"] += supervised
    return ids, labels


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
        weights = tokens.weights and [tokens.weights[i] for i in chosen]
        parts.append(Tokens(part, tokens.statistics | count, tokens.fingerprint, weights))
    return parts[0], parts[1]


def describe(name: str, tokens: Tokens) -> str:
    """One line about a set, with every loss of rows counted."""
    s = tokens.statistics
    rows_of = f"a stream; of the first {s['rows']:,} rows" if tokens.stream is not None else f"{len(tokens):,} rows"
    text = f"{name}: {rows_of} ({s['format']}) from {s['source']}"
    if s["truncated"]:
        text += f", {s['truncated']:,} cut at max_length"
    if s.get("dropped_too_long"):
        text += f", {s['dropped_too_long']:,} dropped (longer than max_length)"
    if s["dropped_bad"]:
        text += f", {s['dropped_bad']:,} dropped (cannot be used)"
    if s["dropped_no_answer_left"]:
        text += f", {s['dropped_no_answer_left']:,} dropped (no answer left after the cut)"
    return text + f"; {s['supervised_tokens']:,} of {s['tokens']:,} tokens are trained on"


def notes(sets: dict[str, Tokens]) -> list[str]:
    """Return a line for each thing about the rows of {"training": ..., "evaluation": ...} that the user should know."""
    lines = []
    for name, tokens in sets.items():
        columns = list(tokens.statistics["columns_not_used"])
        if columns:
            more = f" and {len(columns) - MOST_COLUMNS} more" if len(columns) > MOST_COLUMNS else ""
            lines.append(f"{name}: columns not used: {', '.join(columns[:MOST_COLUMNS])}{more}")
        lines += [f"{name}: {note}" for note in tokens.statistics["notes"]]
        bad = list(tokens.statistics["bad_rows"].items())
        for reason, found in bad[:MOST_REASONS]:
            places = ", ".join(found["first"])
            rows_of = f"{found['rows']:,} row{'s' * (found['rows'] > 1)}"
            lines.append(f"{name}: {rows_of} cannot be used: {reason.rstrip('.')} (first: {places})")
        if len(bad) > MOST_REASONS:
            rest = sum(found["rows"] for _, found in bad[MOST_REASONS:])
            lines.append(f"{name}: {rest:,} rows cannot be used for {len(bad) - MOST_REASONS} more reasons")
    return lines


def filler(pad_token_id: int) -> dict:
    """A row that trains on nothing."""
    return {"input_ids": [pad_token_id] * 2, "labels": [chat.IGNORE] * 2}


class PaddedToMultiple(torch.utils.data.Dataset):
    """A set with one more row, at index len(tokens), that trains on nothing; samplers fill the last batch with it."""

    def __init__(self, sequences, pad_token_id: int):
        self.sequences, self.filler = sequences, filler(pad_token_id)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict:
        return self.filler if index == len(self.sequences) else self.sequences[index]


class EpochSampler(torch.utils.data.Sampler):
    """The order of one epoch, the same for every rank count, micro batch and accumulation.

    Yields each index once (shuffled by seed + epoch, or in order), then the filler index `length` until the count
    is a multiple of `multiple`, so that no row is dropped and none is trained on twice.
    """

    def __init__(self, length: int, multiple: int, seed: int | None, order=None, weights: list[float] | None = None):
        """Args: order: (the epoch's indices, torch.Generator) -> the indices shuffled in another way than uniformly;
        weights: how often each index counts in an epoch (default: once), see rows_of_epoch.
        """
        self.length, self.multiple, self.seed, self.order, self.epoch = length, multiple, seed, order, 0
        self.weights, self.rows = weights, length if weights is None else len(rows_of_epoch(weights, 0))

    def __len__(self) -> int:
        return -(-self.rows // self.multiple) * self.multiple

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rows = range(self.length) if self.weights is None else rows_of_epoch(self.weights, self.epoch)
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            shuffled = torch.randperm(self.rows, generator=generator).tolist()
            rows = self.order(rows, generator) if self.order else [rows[i] for i in shuffled]
        yield from rows
        yield from [self.length] * (len(self) - self.rows)


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


def join(documents: list[dict]) -> dict:
    """One pack: {"input_ids", "labels", "lengths" of the documents}."""
    return {
        "input_ids": [t for part in documents for t in part["input_ids"]],
        "labels": [t for part in documents for t in part["labels"]],
        "lengths": [len(part["input_ids"]) for part in documents],
    }


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Indices grouped so that no group's lengths exceed `capacity`; each goes into the fullest group that has room.

    A bit mask of the room left finds that group in a few machine words, so 500,000 rows take seconds.
    """
    open_packs: dict[int, list[list[int]]] = {}  # room left -> packs
    packs, mask = [], 0  # bit r of mask: some pack has room r
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        need = lengths[i]
        fitting = mask >> need
        if fitting:
            room = need + (fitting & -fitting).bit_length() - 1
            pack = open_packs[room].pop()
            if not open_packs[room]:
                mask ^= 1 << room
        else:
            pack, room = [], capacity
            packs.append(pack)
        pack.append(i)
        open_packs.setdefault(room - need, []).append(pack)
        mask |= 1 << (room - need)
    return packs


class PackedCollator:
    """Packs or rows -> one row of all their tokens with document boundaries, no padding.

    input_ids, labels, position_ids: (1, tokens); cu_seq_lens_q/k: int32 (documents + 1); max_length_q/k: the longest.
    """

    def __call__(self, batch: list[dict]) -> dict:
        lengths = [n for row in batch for n in row.get("lengths", [len(row["input_ids"])])]
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        labels = torch.tensor([[t for row in batch for t in row["labels"]]])
        labels[0, bounds[:-1].long()] = chat.IGNORE  # else the last token of the document before would predict it
        return {
            "input_ids": torch.tensor([[t for row in batch for t in row["input_ids"]]]),
            "labels": labels,
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }


class TrainCollator:
    """The training batches: without padding while `packed` holds, else padded."""

    def __init__(self, pad_token_id: int, packed: bool):
        self.packed, self.pad, self.pack = packed, Collator(pad_token_id), PackedCollator()

    def __call__(self, batch: list[dict]) -> dict:
        return (self.pack if self.packed else self.pad)(batch)
