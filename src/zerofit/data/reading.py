"""Read rows as conversations: column names, formats, bad rows and their counts."""

import contextlib
import difflib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import NamedTuple

import numpy as np

from zerofit.base.errors import UserError
from zerofit.data import conversations, encoding, end_tokens, formats, loss_marks, template_text
from zerofit.data.dataset_conventions import columns as column_names
from zerofit.data.dataset_conventions import comparisons, rendered, trees
from zerofit.data.sources import Source, json_object, read_rows

MAX_KEPT_REASONS = 100  # reasons kept in run.json and data.json

MAX_PRINTED_REASONS = 10  # reasons printed, one line each

MAX_PRINTED_COLUMNS = 20  # unused columns printed, in one line

MAX_FORMAT_ROWS = 100  # rows searched for the format under --bad_rows drop

LOST_QUESTION = "truncation to --max_length removed the question of the row's first answer (--truncation truncate_left)"

MAX_PLACES = 3  # places kept for each reason


@dataclass
class BadRows:
    """Unusable rows with the same reason."""

    rows: int = 0
    first: list[str] = field(default_factory=list)  # the first MAX_PLACES places
    exact: str = ""  # the first row's error, with its numbers

    def add(self, other: "BadRows") -> None:
        """Add rows that were read later."""
        self.rows += other.rows
        self.first = (self.first + other.first)[:MAX_PLACES]
        self.exact = self.exact or other.exact


@dataclass
class ReadingReport:
    """Counts and notes of the rows of a set."""

    rows: int = 0  # read
    kept: int = 0
    dropped_bad: int = 0  # unusable (--bad_rows drop)
    dropped_no_answer_left: int = 0  # after truncation to --max_length
    dropped_untrained: int = 0  # no token in the loss
    dropped_too_long: int = 0  # --truncation drop
    dropped_empty_side: int = 0  # pairs with an empty answer
    dropped_identical_sides: int = 0  # pairs with identical answers
    dropped_ties: int = 0  # pairs without a better answer
    wanted: int = 0  # kept answers with the label true
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0  # tokens in the loss
    formats: Counter = field(default_factory=Counter)  # name -> rows
    columns_not_used: Counter = field(default_factory=Counter)  # name -> rows
    notes: Counter = field(default_factory=Counter)  # warning -> rows
    template_text: Counter = field(default_factory=Counter)  # template_text.count of sampled rows
    bad_rows: dict[str, BadRows] = field(default_factory=dict)  # by reason
    ends: list[dict] = field(default_factory=list)  # entries of end_tokens.EndCounter.take

    def add(self, other: "ReadingReport") -> None:
        """Add the report of more rows of the same set."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("formats", "columns_not_used", "notes", "template_text"):
            getattr(self, name).update(getattr(other, name))
        for reason, bad in other.bad_rows.items():
            self.bad_rows.setdefault(reason, BadRows()).add(bad)
        self.ends += other.ends


COUNTS = tuple(entry.name for entry in fields(ReadingReport) if entry.type is int)

# Reasons for dropped rows, in the order of dataset.describe.
DROPPED = {
    "dropped_too_long": "longer than max_length",
    "dropped_bad": "unusable",
    "dropped_empty_side": "empty side",
    "dropped_identical_sides": "identical sides",
    "dropped_ties": "tie",
    "dropped_no_answer_left": "no answer left after truncation",
    "dropped_untrained": "no token in the loss",
}

PAIR_COUNTS = ("dropped_empty_side", "dropped_identical_sides", "dropped_ties")  # counts of pairs only

LABEL_COUNTS = ("wanted",)  # counts of labeled answers only


@dataclass(frozen=True)
class RowFormat:
    """How the rows of a source are read."""

    kind: str  # name of their format; "" to detect it row by row
    names: dict[str, str] = field(default_factory=dict)  # --columns: name in the data -> our name
    guessed: dict[str, str] = field(default_factory=dict)  # the same for columns that are recognized by their names
    note: str = ""  # note for all of them
    is_rendered: bool = False  # control words in their texts are tokens


class Example(NamedTuple):
    """A training example of an objective."""

    place: str
    sequences: tuple  # conversations, texts or token lists: one, or both sides of a pair
    wanted: bool | None = None  # label of an answer


class Examples(NamedTuple):
    """Result of `Objective.parse` for a row."""

    format: str
    examples: list[Example]  # two for a pair that is split
    not_used: list[str]  # columns
    notes: list[str]


def parse_row(
    place: str, row: dict | str | UserError, row_format: RowFormat, settings, report: ReadingReport | None = None
) -> tuple:
    """Return the sequences of a row: one conversation, text or token lists, or both sides of a pair.

    Args: report: counts the format, unused columns and notes.
    Raises: UserError for an unusable row.
    """
    examples = _parse_examples(place, row, row_format, settings, report)
    return tuple(side for example in examples for side in example.sequences)


def _parse_examples(
    place: str, row: dict | str | UserError, row_format: RowFormat, settings, report: ReadingReport | None
) -> list[Example]:
    """Parse a row by the job's objective. Control words of rendered texts become tokens."""
    columns, report = _apply_columns(place, row, row_format.names), report or ReadingReport()
    kind, examples, not_used, notes = settings.objective.parse(place, columns, row_format, settings)
    report.formats[kind] += 1
    report.columns_not_used.update(not_used)
    report.notes.update([row_format.note, *notes] if row_format.note else notes)
    if not row_format.is_rendered:
        return examples
    return [
        Example(at, tuple(rendered.as_rendered(place, columns, side) for side in sides), wanted)
        for at, sides, wanted in examples
    ]


def tokenize_rows(
    raw: Iterable[tuple], settings, encoder: encoding.Encoder, report: ReadingReport, as_arrays: bool = False
) -> list[tuple | None]:
    """Tokenize (place, row of sources.read_rows, RowFormat) into (input_ids, labels), None if dropped; pairs into
    (input_ids, labels, lengths), labeled answers into (input_ids, labels, [1 if wanted]).

    as_arrays: see Encoder.encode; rows of pairs are lists.
    Raises: UserError for an unusable row, unless --bad_rows drop.
    """
    examples: list[Example] = []
    for place, row, row_format in raw:
        row_examples = [Example(place, ())]
        try:
            row_examples = _parse_examples(place, row, row_format, settings, report)
        except comparisons.Tie:
            report.dropped_ties += 1
        except UserError as error:
            _count_bad_row(place, error, settings, report)
        report.rows += len(row_examples)
        for example in row_examples:
            empty = len(example.sequences) == 2 and any(map(_is_empty, example.sequences))
            report.dropped_empty_side += empty
            examples.append(Example(example.place, (), example.wanted) if empty else example)
    errors: dict[str, UserError] = {}

    def on_error(place: str, error: UserError) -> None:
        if settings.bad_rows == "error":
            raise error
        errors.setdefault(place, error)

    flat = [(example.place, side) for example in examples for side in example.sequences]
    encoded = iter(encoder.encode(flat, on_error, as_arrays and settings.objective.documents == 1))
    rows = []
    for place, sequences, wanted in examples:
        sides = list(itertools.islice(encoded, len(sequences)))
        if None in sides:
            _count_bad_row(place, errors[place], settings, report)
        tokens = _truncate(place, sides, settings, report, encoder) if sides and None not in sides else None
        if tokens is not None and wanted is not None:
            tokens = (*tokens, [int(wanted)])
            report.wanted += wanted
        rows.append(tokens)
    report.notes += encoder.notes
    encoder.notes.clear()
    report.ends += encoder.end_counter.take()
    return rows


def _is_empty(side: conversations.Conversation | rendered.Rendered) -> bool:
    """Return whether all trained turns of a pair's side are empty."""
    if isinstance(side, rendered.Rendered):
        return not side.text.strip()
    answers = [turn for turn, trained in zip(side.turns, side.trained, strict=True) if trained]
    return all(map(conversations.is_empty, answers))


def _truncate(place: str, sides: list, settings, report: ReadingReport, encoder: encoding.Encoder) -> tuple | None:
    """Truncate the sides of a row to --max_length by --truncation, and join them; return None for a dropped row.

    Raises: UserError for a long row under --truncation error.
    """
    longest, is_long = settings.max_length, [len(ids) > settings.max_length for ids, _ in sides]
    if any(is_long):
        if settings.truncation == "error":
            tokens = max(len(ids) for ids, _ in sides)
            raise UserError(f"{place}: has {tokens} tokens, more than --max_length {longest} (--truncation error).")
        if settings.truncation == "drop":
            report.dropped_too_long += 1
            return None
        report.truncated += 1
        kept = slice(-longest, None) if settings.truncation == "truncate_left" else slice(longest)
        if kept.start and any(_lost_question(labels, longest, encoder) for _, labels in sides):
            report.notes[LOST_QUESTION] += 1
        sides = [(ids[kept], labels[kept]) for ids, labels in sides]
    supervised = [_supervised(labels) for _, labels in sides]
    if 0 in supervised:
        if is_long[supervised.index(0)]:
            report.dropped_no_answer_left += 1
        else:
            report.dropped_untrained += 1
        return None
    if len(sides) == 2 and sides[0] == sides[1]:
        report.dropped_identical_sides += 1
        return None
    report.kept += 1
    report.tokens += sum(len(ids) for ids, _ in sides)
    report.supervised_tokens += sum(supervised)
    if len(sides) == 1:
        return sides[0]
    (ids, labels), (other_ids, other_labels) = sides
    return [*ids, *other_ids], [*labels, *other_labels], [len(ids), len(other_ids)]


def _lost_question(labels: list[int] | np.ndarray, longest: int, encoder: encoding.Encoder) -> bool:
    """Return whether the last `longest` tokens begin with an answer, or its header, without its question."""
    trained = np.asarray(labels) != conversations.IGNORE
    before, after = trained[:-longest], trained[-longest:]
    first = int(after.argmax())  # first trained token
    return bool(len(before)) and not before.all() and bool(after[first]) and first <= encoder.header


def _supervised(labels: list[int] | np.ndarray) -> int:
    """Count the labels in the loss, without the first, which no token predicts."""
    if isinstance(labels, np.ndarray):
        return int(np.count_nonzero(labels[1:] != conversations.IGNORE))
    return len(labels) - labels.count(conversations.IGNORE) - (labels[0] != conversations.IGNORE)


def _count_bad_row(place: str, error: UserError, settings, report: ReadingReport) -> None:
    """Count an unusable row by its reason, with every number in it replaced by N.

    Raises: the error itself under --bad_rows error.
    """
    if settings.bad_rows == "error":
        raise error
    exact = str(error).removeprefix(place).lstrip(":, ")  # `place: ...`, or `place, chosen: ...`
    report.dropped_bad += 1
    report.bad_rows.setdefault(re.sub(r"\d+", "N", exact), BadRows()).add(BadRows(1, [place], exact))


def template_tokens(raw: list[tuple], settings, encoder: encoding.Encoder) -> Counter:
    """Return template_text.count of some (place, row, RowFormat)."""
    sides = []
    for place, row, row_format in raw:
        with contextlib.suppress(UserError):  # unusable rows are counted elsewhere
            sides += [(place, side) for side in parse_row(place, row, row_format, settings)]
    counted = template_text.count(encoder, sides)
    encoder.notes.clear()  # they are counted with all rows
    encoder.end_counter.take()
    return counted


def read(source: Source, settings) -> Iterator[tuple]:
    """Yield sources.read_rows; with --bad_rows drop, an error that ends a file becomes a bad row.

    Raises: UserError for such a file under --bad_rows error, and for a Hub dataset.
    """
    try:
        yield from read_rows(source, lines=True)
    except UserError as error:
        if settings.bad_rows == "error" or source.hub:
            raise
        place = f"{source}{str(error).removeprefix(str(source)).partition(': ')[0]}"  # with the line, if named
        yield place, error


def detect_format(rows: Iterator, settings, source: Source) -> tuple[RowFormat, Iterator]:
    """Return (RowFormat, all rows) of a source: of --data_format, or of the first row with a known format.

    With --bad_rows drop, the format is "" if none of the first MAX_FORMAT_ROWS rows has a known one. Messages of trees,
    one per row, are joined in memory.
    Raises: UserError if the first row has an unknown format under --bad_rows error, and for trees with --streaming.
    """
    is_rendered, columns = settings.data_format == rendered.TOKENS, source.entry.columns
    columns = settings.columns if columns is None else columns
    known = formats.formats_of(settings.recipe)
    names = _column_names(
        (settings.columns if columns is None else columns) or (), known, settings.objective.own_columns
    )
    if settings.objective.format:
        return RowFormat(settings.objective.format, names, is_rendered=is_rendered), rows
    if settings.data_format not in ("auto", *rendered.VALUES):
        return RowFormat(settings.data_format, names), rows
    rows, note = trees.join_trees(rows, lambda place, row: _apply_columns(place, row, names))
    if note and getattr(settings, "streaming", False):
        raise UserError("--streaming: the rows are messages of trees, which are joined in memory; remove the flag.")
    first_rows: list = []
    for place, row in itertools.islice(rows, MAX_FORMAT_ROWS):
        first_rows.append((place, row))
        try:
            kind, guessed = formats.recognize(place, _apply_columns(place, row, names), known)
        except UserError:
            if settings.bad_rows == "error":
                raise
        else:
            return RowFormat(kind, names, guessed, note, is_rendered), itertools.chain(first_rows, rows)
    return RowFormat("", names, note=note, is_rendered=is_rendered), itertools.chain(first_rows, rows)


def _column_names(columns: Iterable[str], known: Iterable[formats.Format], extra: frozenset[str]) -> dict[str, str]:
    """Return --columns as {name in the data: our name}. extra: columns that the objective reads.

    Raises: UserError for a repeated name, and for a misspelled name of ours, whose column would be ignored.
    """
    ours = {name for entry in known for name in (*entry.columns, *entry.optional)} | extra
    ours |= {*loss_marks.SUSPICIOUS, *column_names.QUESTION_COLUMNS, *column_names.ANSWER_COLUMNS}
    names: dict[str, str] = {}
    for column in columns:
        name, theirs = column.split("=", 1)
        if name in names.values() or theirs in names:
            raise UserError(f"--columns {column}: one of these names is repeated; use each once.")
        if name not in ours and (close := difflib.get_close_matches(name, sorted(ours), 1, 0.75)):
            raise UserError(f"--columns {column}: no format has a column {name!r}; did you mean {close[0]}={theirs}?")
        names[theirs] = name
    return names


def _apply_columns(place: str, row: dict | str | UserError, names: dict[str, str]) -> dict:
    """Apply --columns to a row; parse it first if it is a JSON line.

    Raises: UserError for a row that cannot be read.
    """
    if isinstance(row, UserError):
        raise row
    row = json_object(place, row) if isinstance(row, str) else row
    missing = next((old for old in names if old not in row), None)
    if missing is not None:
        raise UserError(f"{place}: --columns maps {missing!r}, but the columns are {', '.join(row)}.")
    return formats.rename_columns(row, names)


def repeats(weight: float, number: int, epoch: int) -> int:
    """Return how often row `number` (from 0) of a stream is used in an epoch.

    On average `weight` times, both over the rows of an epoch and over the epochs of a row.
    """
    return math.floor((number + epoch + 1) * weight) - math.floor((number + epoch) * weight)


def summarize(sources: list[Source], report: ReadingReport, settings) -> dict:
    """Return the statistics of a dataset as JSON values: sources, formats and the report.

    Raises: UserError if no row is left to train on.
    """
    _check_rows_left(", ".join(map(str, sources)), report, settings)
    others = {*PAIR_COUNTS, *LABEL_COUNTS} - {*settings.objective.counts}
    bad = sorted(report.bad_rows.items(), key=lambda entry: -entry[1].rows)[:MAX_KEPT_REASONS]
    return {
        "source": ", ".join(map(str, sources)),
        "format": " + ".join(sorted(report.formats)),
        **{name: getattr(report, name) for name in COUNTS if name not in others},
        "template_text": {name: report.template_text[name] for name in template_text.COUNTS},
        "bad_rows": {reason: asdict(rows) for reason, rows in bad},
        "columns_not_used": dict(report.columns_not_used),
        "ends": end_tokens.summary(report.ends),
        "notes": [f"{note} ({rows:,} row{'s' * (rows > 1)})" for note, rows in report.notes.items()],
    }


def _check_rows_left(names: str, report: ReadingReport, settings) -> None:
    """Raise UserError if no row is left to train on. names: names of the sources."""
    if not report.rows:
        raise UserError(f"{names}: contains no rows.")
    if report.dropped_bad == report.rows:
        bad = max(report.bad_rows.values(), key=lambda entry: entry.rows)
        raise UserError(f"{bad.first[0]}: {bad.exact.rstrip('.')}; all {report.rows} rows are unusable.")
    if report.kept:
        return
    if sum(getattr(report, name) for name in PAIR_COUNTS) == report.rows:
        raise UserError(f"{names}: all {report.rows} pairs are ties, or have an empty side or identical sides.")
    if report.dropped_no_answer_left or report.dropped_too_long:
        raise UserError(f"{names}: no answer of {report.rows} rows fits --max_length {settings.max_length}; raise it.")
    raise UserError(
        f"{names}: no token of the {report.rows} rows is in the loss; check --train_on {settings.train_on}, empty "
        "answers, and the data's `train`, `weight`, masks and labels."
    )
