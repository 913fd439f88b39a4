"""Tokenize rows into an Arrow file that every rank memory-maps, cached by a fingerprint."""

import contextlib
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import torch

from zerofit.base.errors import UserError
from zerofit.base.paths import cache_root, hash_file, locked, private_folder, write_text
from zerofit.data import conversations, encoding, formats, reading, template_text
from zerofit.data.batches import Share, lengths_of, rows_of_epoch, tables
from zerofit.data.sources import Source, revision_arguments, suffix
from zerofit.data.tokens import CHUNK, TokenizedDataset
from zerofit.job import program

CACHE_VERSION = 12  # increment it when the tokens of a row change


def columns_of(settings) -> tuple[str, ...]:
    """Return the columns of tokenized rows."""
    return ("input_ids", "labels", *settings.objective.columns)


def _fingerprint(sources: list[Source], settings, tokenizer, limit: int | None) -> str:
    """Hash everything that the tokens depend on: data, tokenizer, template, options, CACHE_VERSION."""
    digest = hashlib.sha256()
    for source in sources:
        if source.hub:
            from datasets import load_dataset_builder

            revision = revision_arguments(source.entry.revision)
            built = load_dataset_builder(*source.hub[:2], **revision)
            digest.update(repr((source.hub, *revision.values(), built.hash)).encode())
            continue
        try:
            files = [source.path] if source.path.is_file() else sorted(f for f in source.path.iterdir() if f.is_file())
            for file in files:
                # Size and format first: moving rows between files or reading the same bytes as another format must
                # change the hash.
                header = [suffix(file), file.suffix.lower(), file.stat().st_size]
                digest.update((json.dumps(header) + "\n").encode())
                with file.open("rb") as opened:
                    hashlib.file_digest(opened, lambda: digest)  # updates this digest
        except OSError as error:
            raise UserError(f"{error.filename or source}: cannot be read: {error.strerror}.") from None
    hash_options(digest, sources, settings, tokenizer, limit)
    return digest.hexdigest()[:24]


def hash_options(digest, sources: list[Source], settings, tokenizer, limit: int | None) -> None:
    """Add everything but the data to a hash: tokenizer, template, options, CACHE_VERSION."""
    options = [
        CACHE_VERSION, [(s.weight, s.number, s.entry.columns) for s in sources], settings.max_length, limit,
        settings.data_format, settings.columns,
        settings.train_on, settings.mask_generation_prompt, settings.truncation, tokenizer.chat_template,
        tokenizer.eos_token_id, tokenizer.special_tokens_map,
        *([settings.objective.format] if settings.objective.format else []),
        *([program.current().sha256] if formats.formats_of(settings.recipe) != formats.FORMATS else []),
    ]  # fmt: skip
    digest.update(json.dumps(options, default=str).encode())
    digest.update(tokenizer.backend_tokenizer.to_str().encode())


def cache_folder() -> Path:
    """Return the cache folder of tokenized datasets, created if it is missing.

    It is below $ZEROFIT_CACHE or ~/.cache/zerofit, else in a temporary folder.
    Raises: UserError if $ZEROFIT_CACHE is not writable.
    """
    folder = cache_root() / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
        reason = "no write permission"
    except OSError as error:
        reason = error.strerror
    if os.environ.get("ZEROFIT_CACHE"):
        raise UserError(f"ZEROFIT_CACHE={os.environ['ZEROFIT_CACHE']}: {reason}; set it to a writable folder.")
    fallback = private_folder()
    if fallback is None:
        fallback = Path(tempfile.mkdtemp(prefix="zerofit-"))
        os.environ["ZEROFIT_CACHE"] = str(fallback)  # inherited by the ranks
        print(
            f"note: {tempfile.gettempdir()}/zerofit-{os.getuid()} is not private to this user; tokenized rows are "
            f"in {fallback}",
            flush=True,
        )
    (fallback / "data").mkdir(exist_ok=True)
    return fallback / "data"


def prepare(sources: list[Source], settings, encoder: encoding.Encoder, limit: int | None) -> TokenizedDataset:
    """Tokenize the sources, at most `limit` rows, or map the cached table; ranks may call it in parallel."""
    from datasets import Dataset

    fingerprint = _fingerprint(sources, settings, encoder.tokenizer, limit)
    folder = cache_folder()
    table, facts = folder / f"{fingerprint}.arrow", folder / f"{fingerprint}.json"
    # Verify the checksum outside the lock, so that all ranks do it in parallel.
    before, statistics = _stamp(facts), _verified_statistics(table, facts, settings)
    if statistics is None:
        # One process tokenizes; the others wait on the lock, not in a collective, which could time out.
        with locked(folder / f"{table.name}.lock"):
            if _stamp(facts) != before:  # just written by another process: no need to verify its checksum
                statistics = _read_facts(facts, settings)
            if statistics is None:
                statistics = _write(table, sources, settings, encoder, limit)
                statistics["checksum"] = hash_file(table)
                write_text(facts, json.dumps(statistics))  # last, so that an incomplete table is never used
    statistics["source"] = ", ".join(map(str, sources))  # the cached table may come from a copy of the data
    kept = [count for count, _ in statistics["sources"]]
    statistics["entries"] = {source.number: (source.entry.path, source.weight) for source in sources}
    numbers = np.repeat(np.array([source.number for source in sources], dtype=np.uint16), kept)
    weights = None
    if any(source.weight != 1.0 for source, count in zip(sources, kept, strict=True) if count):
        weights = []
        for source, count in zip(sources, kept, strict=True):
            weights += [Share(source.weight, source.number)] * count
    numbers = numbers if len(statistics["entries"]) > 1 else None
    return TokenizedDataset(Dataset.from_file(str(table)), statistics, fingerprint, weights, numbers=numbers)


def _stamp(file: Path) -> tuple | None:
    """Return inode, time and size of the file, which change when it is replaced; None if it is missing."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _verified_statistics(table: Path, facts: Path, settings) -> dict | None:
    """Return the statistics of a cached table whose checksum matches; None if it is missing or damaged."""
    statistics = _read_facts(facts, settings)
    try:
        return statistics if statistics and hash_file(table) == statistics["checksum"] else None
    except FileNotFoundError:
        return None


def _read_facts(facts: Path, settings) -> dict | None:
    """Return the statistics of a cached table; None when the file is missing or damaged.

    Also None if rows were dropped and --bad_rows is error: reading the data again raises the first row's error.
    """
    try:
        statistics = json.loads(facts.read_text())
        if not {"checksum", "sources", "bad_rows", "longest", "ends"} <= statistics.keys():
            return None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return None if statistics["bad_rows"] and settings.bad_rows == "error" else statistics


def repeat_by_weight(tokens: TokenizedDataset) -> TokenizedDataset:
    """Repeat rows by the weight of their source; with fractional weights the rows differ between epochs.

    If --data has several entries, the statistics get the rows and tokens of each in an epoch.
    """
    if tokens.weights is None:
        tokens.statistics |= _set_sizes(tokens, slice(None))
        return tokens
    chosen = rows_of_epoch(tokens.weights, 0)
    repeats = Counter(chosen)
    statistics = tokens.statistics | {
        "rows_an_epoch": len(chosen),
        "tokens_an_epoch": int(lengths_of(tokens.dataset)[chosen].sum()),
        "repeated_by_weight": len(chosen) - len(repeats),
        "left_out_by_weight": len(tokens) - len(repeats),
        **_set_sizes(tokens, chosen),
    }
    first_epoch = TokenizedDataset(tokens.dataset.select(chosen), statistics, tokens.fingerprint)
    if any(share.weight % 1 for share in set(tokens.weights)):
        first_epoch.weights, first_epoch.full_dataset = tokens.weights, tokens.dataset
    return first_epoch


def _set_sizes(tokens: TokenizedDataset, chosen: Sequence[int] | slice) -> dict:
    """Return {"sets": [name, weight, rows and tokens of each entry of --data]} for chosen rows; {} for one entry."""
    if tokens.numbers is None:
        return {}
    numbers, lengths = tokens.numbers[chosen], lengths_of(tokens.dataset)[chosen]
    entries = tokens.statistics["entries"]
    rows = np.bincount(numbers, minlength=max(entries) + 1)
    sums = np.bincount(numbers, weights=lengths, minlength=max(entries) + 1)
    return {
        "sets": [
            {"data": name, "weight": weight, "rows": int(rows[number]), "tokens": int(sums[number])}
            for number, (name, weight) in entries.items()
        ]
    }


def _chunks(read: Iterator) -> Iterator[list]:
    while chunk := list(itertools.islice(read, CHUNK)):
        yield chunk


_work: tuple = ()  # (encoder, settings); forked workers inherit it, so chunks do not pickle the tokenizer


def _encode(chunk: list, row_format: reading.RowFormat) -> tuple[reading.ReadingReport, object]:
    """Encode rows; return (report, Arrow batch of the kept rows or None)."""
    import pyarrow as pa

    (encoder, settings), report = _work, reading.ReadingReport()
    encoded = reading.tokenize_rows([(*row, row_format) for row in chunk], settings, encoder, report, as_arrays=True)
    kept = [row for row in encoded if row is not None]
    if not kept:
        return report, None
    columns = [_list_array(column) for column in zip(*kept, strict=True)]
    return report, pa.record_batch(columns, names=columns_of(settings))


def _list_array(rows: Sequence[list[int] | np.ndarray]):
    """Return the rows as an Arrow array of lists, faster than pa.array does for lists of Python numbers."""
    import pyarrow as pa

    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, np.concatenate([np.asarray(row, dtype=np.int32) for row in rows]))


def _encode_chunks(
    chunks: Iterator[list], row_format: reading.RowFormat, pool, workers: int
) -> Iterator[tuple[reading.ReadingReport, object]]:
    """Encode chunks in order, with at most two chunks per worker in memory.

    Raises: UserError for an unusable row, or if a worker was killed (most likely by the OOM killer).
    """
    if pool is None:
        yield from (_encode(chunk, row_format) for chunk in chunks)
        return
    waiting: deque = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_encode, chunk, row_format))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a tokenizing process was killed, likely out of memory; set --preprocessing_num_workers 1."
        ) from None


@contextlib.contextmanager
def _pool(encoder: encoding.Encoder, settings, workers: int):
    """Provide a pool of forked processes that share the encoder; None for one worker."""
    global _work
    _work = encoder, settings
    gc.freeze()  # keeps garbage collection in the workers from copying the parent's pages
    pool = None
    if workers > 1:
        pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"))
    try:
        yield pool
    finally:
        gc.unfreeze()
        if pool:
            pool.shutdown(cancel_futures=True)


def _workers(sources: list[Source], settings) -> int:
    if settings.preprocessing_num_workers is not None:
        return settings.preprocessing_num_workers
    size = sum(s.path.stat().st_size for s in sources if s.path and s.path.is_file())
    return min(8, os.cpu_count() or 1) if size > 4 << 20 else 1


def _write(table: Path, sources: list[Source], settings, encoder: encoding.Encoder, limit: int | None) -> dict:
    """Tokenize all rows into an Arrow stream file, CHUNK rows at a time; return their statistics."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names = columns_of(settings)
    schema = pa.schema(dict.fromkeys(names, pa.list_(pa.int32())))
    report = reading.ReadingReport()
    started = last_printed = time.monotonic()
    tmp_path = table.with_suffix(".tmp")
    workers, per_source, longest = _workers(sources, settings), [], 0
    with (
        pa.OSFile(str(tmp_path), "wb") as file,
        pa.ipc.new_stream(file, schema) as writer,
        _pool(encoder, settings, workers) as pool,
    ):
        for source in sources:
            before, to_read = report.kept, None if limit is None else max(0, limit - report.rows)
            row_format, result = reading.detect_format(reading.read(source, settings), settings, source)
            result = itertools.islice(result, to_read)
            sample = list(itertools.islice(result, template_text.SAMPLE_ROWS))
            chunks = _chunks(itertools.chain(sample, result))
            for chunk_report, batch in _encode_chunks(chunks, row_format, pool, workers):
                report.add(chunk_report)
                if batch is not None:
                    writer.write_batch(batch)
                    lengths = (
                        batch["lengths"].flatten() if "lengths" in names else pc.list_value_length(batch["input_ids"])
                    )
                    longest = max(longest, pc.max(lengths).as_py())
                if time.monotonic() - last_printed > 5:
                    last_printed = time.monotonic()
                    print(f"tokenizing: {report.rows:,} rows, {report.tokens:,} tokens", flush=True)
            per_source.append((report.kept - before, source.weight))
            if report.template_text["rows"] < template_text.MAX_ROWS:
                rows = [(*row, row_format) for row in sample]
                report.template_text += reading.template_tokens(rows, settings, encoder)
    result = reading.summarize(sources, report, settings)
    os.replace(tmp_path, table)
    return result | {"longest": longest, "sources": per_source, "seconds": round(time.monotonic() - started, 3)}


def split(tokens: TokenizedDataset, settings) -> tuple[TokenizedDataset, TokenizedDataset]:
    """Split off --eval_fraction of the rows for evaluation, the same ones for the same --seed."""
    eval_rows = round(len(tokens) * settings.eval_fraction)
    if eval_rows < 1 or eval_rows == len(tokens):
        raise UserError(f"--eval_fraction {settings.eval_fraction}: a part of {len(tokens)} rows is empty; change it.")
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(settings.seed)).numpy()
    parts = []
    for chosen in (np.sort(order[eval_rows:]), np.sort(order[:eval_rows])):
        part = tokens.dataset.select(chosen)
        count = {"kept": len(part), "tokens": int(lengths_of(part).sum())}
        count["supervised_tokens"] = sum(_supervised(table["labels"]) for table in tables(part, ["labels"]))
        count |= settings.objective.count(part)
        weights = tokens.weights and [tokens.weights[i] for i in chosen]
        numbers = None if tokens.numbers is None else tokens.numbers[chosen]
        parts.append(TokenizedDataset(part, tokens.statistics | count, tokens.fingerprint, weights, numbers=numbers))
    return parts[0], parts[1]


def _supervised(labels) -> int:
    """Count the labels of an Arrow list column in the loss, without first tokens, which are not predicted."""
    import pyarrow.compute as pc

    every, first = pc.list_flatten(labels), pc.list_element(labels, 0)
    every, first = (pc.sum(pc.not_equal(part, conversations.IGNORE)).as_py() or 0 for part in (every, first))
    return every - first


def describe(name: str, tokens: TokenizedDataset, unit: str = "rows") -> str:
    """Return one line with the row counts of a dataset. unit: the objective's word for rows."""
    stats = tokens.statistics
    is_stream = tokens.stream is not None
    size = f"a stream; in the first {stats['rows']:,} rows" if is_stream else f"{len(tokens):,} {unit}"
    text = f"{name}: {size} ({stats['format']}) from {stats['source']}"
    if stats["truncated"]:
        text += f", {stats['truncated']:,} truncated to max_length"
    for name, reason in reading.DROPPED.items():
        if stats.get(name):
            text += f", {stats[name]:,} dropped ({reason})"
    return text + f"; {stats['supervised_tokens']:,} of {stats['tokens']:,} tokens are in the loss"


def notes(sets: dict[str, TokenizedDataset]) -> list[str]:
    """Return warnings about {"training": set, "evaluation": set}: unused columns, notes, bad rows."""
    lines = []
    for name, tokens in sets.items():
        columns = list(tokens.statistics["columns_not_used"])
        if columns:
            more = len(columns) - reading.MAX_PRINTED_COLUMNS
            printed = ", ".join(columns[: reading.MAX_PRINTED_COLUMNS]) + (f" and {more} more" if more > 0 else "")
            lines.append(f"{name}: columns not used: {printed}")
        lines += [f"{name}: {note}" for note in tokens.statistics["notes"]]
        bad = list(tokens.statistics["bad_rows"].items())
        for reason, entry in bad[: reading.MAX_PRINTED_REASONS]:
            count, reason = f"{entry['rows']:,} row{'s' * (entry['rows'] > 1)}", entry.get("exact") or reason
            lines.append(f"{name}: {count} unusable: {reason.rstrip('.')} (first: {', '.join(entry['first'])})")
        if others := bad[reading.MAX_PRINTED_REASONS :]:
            rows = sum(entry["rows"] for _, entry in others)
            lines.append(f"{name}: {rows:,} rows unusable for {len(others)} more reasons")
    return lines
