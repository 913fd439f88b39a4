"""Read rows as conversations: column names, formats, bad rows and their counts."""

import contextlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from zerofit.base.errors import UserError
from zerofit.data import conversations, encoding, end_tokens, formats, pairs, template_text
from zerofit.data.sources import Source, json_object, read_rows

KEPT_REASONS = 100  # reasons kept in run.json and data.json

MOST_REASONS = 10  # reasons printed, one line each

MOST_COLUMNS = 20  # unused columns printed, in one line

LOOKED_AT = 100  # rows searched for the format under --bad_rows drop

FIRST_PLACES = 3  # places kept for each reason

COUNTS = (
    "rows",
    "kept",
    "dropped_bad",
    "dropped_no_answer_left",
    "dropped_untrained",
    "dropped_too_long",
    "truncated",
    "tokens",
    "supervised_tokens",
)


def tokenized(
    raw: Iterable[tuple], settings, encoder: encoding.Encoder, count: Counter, as_arrays: bool = False
) -> list[tuple | None]:
    """Tokenize (place, row of sources.read_rows, format) into (input_ids, labels), None if dropped; pairs of a
    preference set into (input_ids, labels, lengths).

    An empty format ("") is detected row by row. as_arrays: see Encoder.encode.
    Raises: UserError for a row that cannot be used, unless --bad_rows drop.
    """
    names, rows, parsed, slots = _names(settings), [], [], []
    if settings.documents_per_row == 2:
        rows = pairs.tokenized(
            ((place, row) for place, row, _ in raw),
            lambda place, row: _renamed(place, row, names),
            lambda ids, labels, of_sides: truncate(ids, labels, settings, of_sides),
            lambda place, error: _refuse(place, error, settings, count),
            encoder,
            count,
        )
        _count_notes(encoder, count)
        return rows
    known = formats.known_to(settings.recipe)
    for place, row, kind in raw:
        rows.append(None)
        count["rows"] += 1
        try:
            columns = _renamed(place, row, names)
            kind = kind or formats.detect(place, columns, known)
            parsed.append((place, formats.parse(place, columns, kind, known)))
        except UserError as error:
            _refuse(place, error, settings, count)
        else:
            slots.append(len(rows) - 1)
            count[f"format {kind}"] += 1
            count.update(f"not used {name}" for name in formats.not_used(columns, kind, known))
    encoded = encoder.encode(parsed, lambda place, error: _refuse(place, error, settings, count), as_arrays)
    for i, pair in zip(slots, encoded, strict=True):
        rows[i] = None if pair is None else truncate(*pair, settings, count)
    _count_notes(encoder, count)
    return rows


def _count_notes(encoder: encoding.Encoder, count: Counter) -> None:
    count.update({f"note {sentence}": rows_of for sentence, rows_of in encoder.notes.items() if rows_of})
    encoder.notes.clear()
    count.update(f"end {json.dumps(entry)}" for entry in encoder.ended.take())


def _refuse(place: str, error: UserError, settings, count: Counter) -> None:
    """Count an unusable row by its reason, with every number in it replaced by N.

    Raises: the error itself under --bad_rows error.
    """
    if settings.bad_rows == "error":
        raise error
    exact = str(error).removeprefix(place).lstrip(":, ")  # `place: ...`, or `place, chosen: ...`
    reason = re.sub(r"\d+", "N", exact)
    count["dropped_bad"] += 1
    count[f"bad row {reason}"] += 1
    if count[f"bad row {reason}"] <= FIRST_PLACES:
        count["bad place " + json.dumps([reason, place, exact])] += 1


def first_kept(rows: Iterator, sample: list) -> Iterator:
    """Yield the rows, and keep the first of them in `sample`, whose tokens `template_tokens` counts."""
    for row in rows:
        if len(sample) < template_text.SAMPLED:
            sample.append(row)
        yield row


def template_tokens(raw: list[tuple], settings, encoder: encoding.Encoder) -> Counter:
    """Count the tokens in the loss of some (place, row, format) by who wrote them, as "template text <name>"."""
    names, parsed, known = _names(settings), [], formats.known_to(settings.recipe)
    for place, row, kind in raw:
        with contextlib.suppress(UserError):  # rows that cannot be used are counted elsewhere
            columns = _renamed(place, row, names)
            if kind == pairs.KIND:
                parsed += [(place, side) for side in pairs.parse(place, columns)]
            else:
                kind = kind or formats.detect(place, columns, known)
                parsed.append((place, formats.parse(place, columns, kind, known)))
    counted = template_text.count(encoder, parsed)
    encoder.notes.clear()  # of these rows, which are counted with all rows
    encoder.ended.take()
    return Counter({f"template text {name}": counted[name] for name in template_text.COUNTS})


def read(source: Source, settings) -> Iterator[tuple]:
    """Yield sources.read_rows; with --bad_rows drop the error that ends a file becomes a bad row.

    Raises: UserError for such a file under --bad_rows error, and for a Hub dataset.
    """
    try:
        yield from read_rows(source, lines=True)
    except UserError as error:
        if settings.bad_rows == "error" or source.hub:
            raise
        place = f"{source}{str(error).removeprefix(str(source)).partition(': ')[0]}"  # with the line, if named
        yield place, error


def kind_of(rows: Iterator, settings) -> tuple[str, Iterator]:
    """Return (format, all rows): --data_format, or the format of the first row that has one.

    The format is "" when none of the first LOOKED_AT rows has one, under --bad_rows drop.
    Raises: UserError when the first row has no known format, under --bad_rows error.
    """
    if settings.documents_per_row == 2:
        return pairs.KIND, rows
    if settings.data_format != "auto":
        return settings.data_format, rows
    looked_at: list = []
    for place, row in itertools.islice(rows, LOOKED_AT):
        looked_at.append((place, row))
        try:
            kind = formats.detect(place, _renamed(place, row, _names(settings)), formats.known_to(settings.recipe))
        except UserError:
            if settings.bad_rows == "error":
                raise
        else:
            return kind, itertools.chain(looked_at, rows)
    return "", itertools.chain(looked_at, rows)


def _names(settings) -> dict[str, str]:
    """Return --columns as {name in the data: our name}."""
    return {theirs: ours for ours, theirs in (c.split("=", 1) for c in settings.columns or [])}


def _renamed(place: str, row: dict | str | UserError, names: dict[str, str]) -> dict:
    """Apply --columns to a row; parse it first if it is a JSON line.

    Raises: UserError for a row that cannot be read.
    """
    if isinstance(row, UserError):
        raise row
    row = json_object(place, row) if isinstance(row, str) else row
    missing = next((old for old in names if old not in row), None)
    if missing is not None:
        raise UserError(f"{place}: --columns names {missing!r}, but the columns are {', '.join(row)}.")
    return {names.get(key, key): value for key, value in row.items() if key in names or key not in names.values()}


def repeats(weight: float, number: int, epoch: int) -> int:
    """Return how often row `number` (from 0) of a stream is used in an epoch.

    On average `weight` times, both over the rows of an epoch and over the epochs of a row."""
    return math.floor((number + epoch + 1) * weight) - math.floor((number + epoch) * weight)


def summarize_counts(sources: list[Source], count: Counter, settings) -> dict:
    """Return the statistics of a dataset: source names, formats, COUNTS, bad rows, unused columns, notes.

    Raises: UserError when no row is left to train on.
    """
    names = ", ".join(map(str, sources))
    if not count["rows"]:
        raise UserError(f"{names}: holds no rows.")
    bad = _bad_rows(count)
    if count["dropped_bad"] == count["rows"]:
        first = next(iter(bad.values()))
        raise UserError(
            f"{first['first'][0]}: {first['exact'].rstrip('.')}; like it, none of the {count['rows']} rows can be used."
        )
    if not count["kept"] and count[pairs.EMPTY] + count[pairs.IDENTICAL] == count["rows"]:
        raise UserError(f"{names}: each of the {count['rows']} pairs has an empty side or two identical ones.")
    if not count["kept"] and not count["dropped_no_answer_left"] and not count["dropped_too_long"]:
        raise UserError(
            f"{names}: in none of the {count['rows']} rows anything is trained on: --train_on {settings.train_on}, "
            "empty answers, the rows' own `train` or `weight`, masks or labels leave nothing."
        )
    if not count["kept"]:
        raise UserError(
            f"{names}: in none of the {count['rows']} rows an answer fits into --max_length {settings.max_length}."
        )
    formats, notes = sorted(_counted(count, "format ")), _counted(count, "note ")
    return (
        {"source": names, "format": " + ".join(formats)}
        | {
            name: count[name]
            for name in (*COUNTS, *((pairs.EMPTY, pairs.IDENTICAL) if formats == [pairs.KIND] else ()))
        }
        | {"template_text": _counted(count, "template text ")}
        | {"bad_rows": bad, "columns_not_used": _counted(count, "not used ")}
        | {"ends": end_tokens.summary(_counted(count, "end "))}
        | {"notes": [f"{sentence} ({rows_of:,} row{'s' * (rows_of > 1)})" for sentence, rows_of in notes.items()]}
    )


def _bad_rows(count: Counter) -> dict[str, dict]:
    """Return {reason: {"rows": count, "first": places, "exact": first message}}, most frequent first."""
    reasons = sorted(_counted(count, "bad row ").items(), key=lambda pair: -pair[1])[:KEPT_REASONS]
    bad = {reason: {"rows": rows_of, "first": [], "exact": ""} for reason, rows_of in reasons}
    for entry in _counted(count, "bad place "):
        reason, place, exact = json.loads(entry)
        if reason in bad:
            bad[reason]["exact"] = bad[reason]["exact"] or exact
            bad[reason]["first"] = [*bad[reason]["first"], place][:FIRST_PLACES]
    return bad


def _counted(count: Counter, start: str) -> dict[str, int]:
    """Return the entries of `count` with the prefix `start`, which is removed."""
    return {name.removeprefix(start): n for name, n in count.items() if name.startswith(start)}


def truncate(ids: list[int], labels: list[int], settings, count: Counter) -> tuple[list[int], list[int]] | None:
    """Truncate a row to --max_length by --truncation; return None when it is dropped. Updates `count`.

    Raises: UserError for a long row under --truncation error.
    """
    longest = settings.max_length
    is_cut = len(ids) > longest
    if is_cut:
        if settings.truncation == "error":
            raise UserError(f"a row has {len(ids)} tokens, more than --max_length {longest} (--truncation error).")
        if settings.truncation == "drop":
            count["dropped_too_long"] += 1
            return None
        count["truncated"] += 1
        kept = slice(-longest, None) if settings.truncation == "truncate_left" else slice(longest)
        ids, labels = ids[kept], labels[kept]
    # Labels are shifted by one, so the first is never predicted.
    if isinstance(labels, np.ndarray):
        supervised = int(np.count_nonzero(labels[1:] != conversations.IGNORE))
    else:
        supervised = len(labels) - 1 - labels.count(conversations.IGNORE) + (labels[0] == conversations.IGNORE)
    if supervised <= 0:
        count["dropped_no_answer_left" if is_cut else "dropped_untrained"] += 1
        return None
    count["kept"] += 1
    count["tokens"] += len(ids)
    count["supervised_tokens"] += supervised
    return ids, labels
