"""Read rows as conversations: column names, formats, bad rows and their counts."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from zerofit.data import conversations, encoding
from zerofit.data.sources import Source, json_object, read_rows
from zerofit.errors import UserError

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


def tokenised(raw: Iterable[tuple], settings, encoder: encoding.Encoder, count: Counter) -> list[tuple | None]:
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
            kind = kind or conversations.detect(place, columns)
            content.append((place, conversations.parse(place, columns, kind)))
        except UserError as error:
            _refuse(place, error, settings, count)
        else:
            slots.append(len(out) - 1)
            count[f"format {kind}"] += 1
            count.update(f"not used {name}" for name in conversations.not_used(columns, kind))
    encoded = encoder.encode(content, lambda place, error: _refuse(place, error, settings, count))
    for i, pair in zip(slots, encoded, strict=True):
        out[i] = None if pair is None else truncate(*pair, settings, count)
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


def read(source: Source, settings) -> Iterator[tuple]:
    """Yield the rows of one source as `rows.read` gives them; with --bad_rows drop a file that cannot be read on is a bad row.

    Raises: UserError for such a file under --bad_rows error, and for a hub set.
    """
    try:
        yield from read_rows(source, lines=True)
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
            kind = conversations.detect(place, _renamed(place, row, _names(settings)))
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
    row = json_object(place, row) if isinstance(row, str) else row
    missing = next((old for old in names if old not in row), None)
    if missing is not None:
        raise UserError(f"{place}: --columns names {missing!r}, but the columns are {', '.join(row)}.")
    return {names.get(key, key): value for key, value in row.items() if key in names or key not in names.values()}


def repeats(weight: float, number: int, epoch: int) -> int:
    """Return how often row `number` of a stream (from 0) counts in an epoch: `weight` times on average, over the rows of an
    epoch and over the epochs of a row."""
    return math.floor((number + epoch + 1) * weight) - math.floor((number + epoch) * weight)


def summarize_counts(sources: list[Source], count: Counter, settings) -> dict:
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


def truncate(ids: list[int], labels: list[int], settings, count: Counter) -> tuple[list[int], list[int]] | None:
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
    supervised = len(labels) - 1 - labels.count(conversations.IGNORE) + (labels[0] == conversations.IGNORE)
    if supervised <= 0:
        count["dropped_no_answer_left"] += 1
        return None
    count["kept"] += 1
    count["tokens"] += len(ids)
    count["supervised_tokens"] += supervised
    return ids, labels
