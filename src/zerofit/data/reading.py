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
from zerofit.data import conversations, encoding, end_tokens, formats, meaning, template_text
from zerofit.data.published import columns as published_columns
from zerofit.data.published import comparisons, rendered, trees
from zerofit.data.sources import Source, json_object, read_rows

KEPT_REASONS = 100  # reasons kept in run.json and data.json

MOST_REASONS = 10  # reasons printed, one line each

MOST_COLUMNS = 20  # unused columns printed, in one line

LOOKED_AT = 100  # rows searched for the format under --bad_rows drop

LOST_QUESTION = "the cut at --max_length removed the question of the row's first answer (--truncation truncate_left)"

FIRST_PLACES = 3  # places kept for each reason


@dataclass
class BadRows:
    """The rows that cannot be used for one reason."""

    rows: int = 0
    first: list[str] = field(default_factory=list)  # places of the first ones, FIRST_PLACES at most
    exact: str = ""  # the error of the first one, with its numbers

    def add(self, other: "BadRows") -> None:
        """Add rows that were read later."""
        self.rows += other.rows
        self.first = (self.first + other.first)[:FIRST_PLACES]
        self.exact = self.exact or other.exact


@dataclass
class ReadingReport:
    """What became of the rows that were read, and what is said about them."""

    rows: int = 0  # read
    kept: int = 0
    dropped_bad: int = 0  # cannot be used (--bad_rows drop)
    dropped_no_answer_left: int = 0  # after the cut at --max_length
    dropped_untrained: int = 0  # nothing in them is in the loss
    dropped_too_long: int = 0  # --truncation drop
    dropped_empty_side: int = 0  # pairs, one of whose answers is empty
    dropped_identical_sides: int = 0  # pairs
    dropped_ties: int = 0  # pairs, neither of whose answers is the better one
    wanted: int = 0  # kept answers with the label true
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0  # that are in the loss
    formats: Counter = field(default_factory=Counter)  # name -> rows
    columns_not_used: Counter = field(default_factory=Counter)  # name -> rows
    notes: Counter = field(default_factory=Counter)  # warning -> rows
    template_text: Counter = field(default_factory=Counter)  # of sampled rows: template_text.count
    bad_rows: dict[str, BadRows] = field(default_factory=dict)  # by reason
    ends: list[dict] = field(default_factory=list)  # entries of end_tokens.Found.take

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

# Why rows are dropped, as one line about a data set says it, in its order.
DROPPED = {
    "dropped_too_long": "longer than max_length",
    "dropped_bad": "cannot be used",
    "dropped_empty_side": "a side is empty",
    "dropped_identical_sides": "both sides are the same",
    "dropped_ties": "a tie",
    "dropped_no_answer_left": "no answer left after the cut",
    "dropped_untrained": "nothing in them is trained on",
}

OF_PAIRS = ("dropped_empty_side", "dropped_identical_sides", "dropped_ties")  # those that only pairs have

OF_LABELED = ("wanted",)  # those that only answers with a label have


@dataclass(frozen=True)
class Form:
    """How the rows of a source are read."""

    kind: str  # their format; "": detected row by row
    names: dict[str, str] = field(default_factory=dict)  # --columns: name in the data -> our name
    guessed: dict[str, str] = field(default_factory=dict)  # the same for columns that are taken by their names
    note: str = ""  # what was taken for granted for all of them
    is_rendered: bool = False  # control words in their texts are tokens


class Example(NamedTuple):
    """What an objective takes from a row, to be trained on."""

    place: str
    sequences: tuple  # conversations, texts or token lists: one, or both sides of a pair
    wanted: bool | None = None  # the label of an answer


class Examples(NamedTuple):
    """What `Objective.parse` returns for a row."""

    format: str
    examples: list[Example]  # a pair that is taken apart makes two
    not_used: list[str]  # columns
    notes: list[str]  # what was taken for granted


def parsed(place: str, row: dict | str | UserError, form: Form, settings, report: ReadingReport | None = None) -> tuple:
    """Return what is trained of a row: one conversation, text or token lists; of a pair both sides.

    Args: report: counts the format, the columns that are not used and what was taken for granted.
    Raises: UserError for a row that cannot be used.
    """
    return tuple(side for example in _examples(place, row, form, settings, report) for side in example.sequences)


def _examples(
    place: str, row: dict | str | UserError, form: Form, settings, report: ReadingReport | None
) -> list[Example]:
    """Return what the job's objective takes from a row, with rendered control words as tokens."""
    columns, report = _renamed(place, row, form.names), report or ReadingReport()
    kind, examples, not_used, notes = settings.objective.parse(place, columns, form, settings)
    report.formats[kind] += 1
    report.columns_not_used.update(not_used)
    report.notes.update([form.note, *notes] if form.note else notes)
    if not form.is_rendered:
        return examples
    return [
        Example(at, tuple(rendered.of(place, columns, side) for side in sides), wanted)
        for at, sides, wanted in examples
    ]


def tokenized(
    raw: Iterable[tuple], settings, encoder: encoding.Encoder, report: ReadingReport, as_arrays: bool = False
) -> list[tuple | None]:
    """Tokenize (place, row of sources.read_rows, Form) into (input_ids, labels), None if dropped; pairs into
    (input_ids, labels, lengths), labeled answers into (input_ids, labels, [1 if wanted]).

    as_arrays: see Encoder.encode; rows of pairs are lists.
    Raises: UserError for a row that cannot be used, unless --bad_rows drop.
    """
    examples: list[Example] = []
    for place, row, form in raw:
        of_row = [Example(place, ())]
        try:
            of_row = _examples(place, row, form, settings, report)
        except comparisons.Tie:
            report.dropped_ties += 1
        except UserError as error:
            _refuse(place, error, settings, report)
        report.rows += len(of_row)
        for example in of_row:
            empty = len(example.sequences) == 2 and any(map(_is_empty, example.sequences))
            report.dropped_empty_side += empty
            examples.append(Example(example.place, (), example.wanted) if empty else example)
    errors: dict[str, UserError] = {}

    def refuse(place: str, error: UserError) -> None:
        if settings.bad_rows == "error":
            raise error
        errors.setdefault(place, error)

    flat = [(example.place, side) for example in examples for side in example.sequences]
    encoded = iter(encoder.encode(flat, refuse, as_arrays and settings.objective.documents == 1))
    rows = []
    for place, sequences, wanted in examples:
        sides = list(itertools.islice(encoded, len(sequences)))
        if None in sides:
            _refuse(place, errors[place], settings, report)
        tokens = _cut(place, sides, settings, report, encoder) if sides and None not in sides else None
        if tokens is not None and wanted is not None:
            tokens = (*tokens, [int(wanted)])
            report.wanted += wanted
        rows.append(tokens)
    report.notes += encoder.notes
    encoder.notes.clear()
    report.ends += encoder.ended.take()
    return rows


def _is_empty(side: conversations.Conversation | rendered.Rendered) -> bool:
    """Return whether no turn of a pair's side that is trained has a text or a tool call."""
    if isinstance(side, rendered.Rendered):
        return not side.text.strip()
    answers = [turn for turn, trained in zip(side.turns, side.trained, strict=True) if trained]
    return all(map(conversations.is_empty, answers))


def _cut(place: str, sides: list[tuple], settings, report: ReadingReport, encoder: encoding.Encoder) -> tuple | None:
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
    """Return whether the last `longest` tokens begin with an answer, or its header, whose question is cut off."""
    trained = np.asarray(labels) != conversations.IGNORE
    before, after = trained[:-longest], trained[-longest:]
    first = int(after.argmax())  # of the trained ones
    return bool(len(before)) and not before.all() and bool(after[first]) and first <= encoder.header


def _supervised(labels: list[int] | np.ndarray) -> int:
    """Return how many labels are in the loss: they are shifted by one, so the first is never predicted."""
    if isinstance(labels, np.ndarray):
        return int(np.count_nonzero(labels[1:] != conversations.IGNORE))
    return len(labels) - labels.count(conversations.IGNORE) - (labels[0] != conversations.IGNORE)


def _refuse(place: str, error: UserError, settings, report: ReadingReport) -> None:
    """Count an unusable row by its reason, with every number in it replaced by N.

    Raises: the error itself under --bad_rows error.
    """
    if settings.bad_rows == "error":
        raise error
    exact = str(error).removeprefix(place).lstrip(":, ")  # `place: ...`, or `place, chosen: ...`
    report.dropped_bad += 1
    report.bad_rows.setdefault(re.sub(r"\d+", "N", exact), BadRows()).add(BadRows(1, [place], exact))


def template_tokens(raw: list[tuple], settings, encoder: encoding.Encoder) -> Counter:
    """Count the tokens in the loss of some (place, row, Form) by who wrote them, as template_text.count does."""
    sides = []
    for place, row, form in raw:
        with contextlib.suppress(UserError):  # rows that cannot be used are counted elsewhere
            sides += [(place, side) for side in parsed(place, row, form, settings)]
    counted = template_text.count(encoder, sides)
    encoder.notes.clear()  # of these rows, which are counted with all rows
    encoder.ended.take()
    return counted


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


def form_of(rows: Iterator, settings, source: Source) -> tuple[Form, Iterator]:
    """Return (form, all rows) of a source: with --data_format, or the format of the first row that has one.

    The format is "" when none of the first LOOKED_AT rows has one, under --bad_rows drop. Messages of trees, which
    stand in a row each, are joined; all of them are in memory then.
    Raises: UserError when the first row has no known format, under --bad_rows error; for trees under --streaming.
    """
    own, is_rendered = source.entry.columns, settings.data_format == rendered.TOKENS
    known = formats.known_to(settings.recipe)
    names = _names(settings.columns if own is None else own, known, settings.objective.own_columns)
    if settings.objective.format:
        return Form(settings.objective.format, names, is_rendered=is_rendered), rows
    if settings.data_format not in ("auto", *rendered.VALUES):
        return Form(settings.data_format, names), rows
    rows, note = trees.take(rows, lambda place, row: _renamed(place, row, names))
    if note and getattr(settings, "streaming", False):
        raise UserError("--streaming: the rows are messages of trees, which are joined in memory; leave it out.")
    looked_at: list = []
    for place, row in itertools.islice(rows, LOOKED_AT):
        looked_at.append((place, row))
        try:
            kind, guessed = formats.recognize(place, _renamed(place, row, names), known)
        except UserError:
            if settings.bad_rows == "error":
                raise
        else:
            return Form(kind, names, guessed, note, is_rendered), itertools.chain(looked_at, rows)
    return Form("", names, note=note, is_rendered=is_rendered), itertools.chain(looked_at, rows)


def _names(columns: Iterable[str] | None, known: Iterable[formats.Format], own: frozenset[str]) -> dict[str, str]:
    """Return --columns as {name in the data: our name}. own: columns that the objective reads.

    Raises: UserError for a name that is given twice, or nearly one of ours: its column would not be used.
    """
    of_formats = {name for entry in known for name in (*entry.columns, *entry.beside)}
    ours = of_formats | own | meaning.SUSPICIOUS | {*published_columns.ASKED, *published_columns.ANSWERED}
    names: dict[str, str] = {}
    for column in columns or []:
        name, theirs = column.split("=", 1)
        if name in names.values() or theirs in names:
            raise UserError(f"--columns {column}: one of these names is given twice; give each once.")
        if name not in ours and (close := difflib.get_close_matches(name, sorted(ours), 1, 0.75)):
            raise UserError(f"--columns {column}: no format has a column {name!r}; did you mean {close[0]}={theirs}?")
        names[theirs] = name
    return names


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
    return formats.renamed(row, names)


def repeats(weight: float, number: int, epoch: int) -> int:
    """Return how often row `number` (from 0) of a stream is used in an epoch.

    On average `weight` times, both over the rows of an epoch and over the epochs of a row."""
    return math.floor((number + epoch + 1) * weight) - math.floor((number + epoch) * weight)


def summarize(sources: list[Source], report: ReadingReport, settings) -> dict:
    """Return the statistics of a dataset as JSON holds them: its sources and formats, and the report.

    Raises: UserError when no row is left to train on.
    """
    _refuse_nothing(", ".join(map(str, sources)), report, settings)
    others = {*OF_PAIRS, *OF_LABELED} - {*settings.objective.counts}
    bad = sorted(report.bad_rows.items(), key=lambda entry: -entry[1].rows)[:KEPT_REASONS]
    return {
        "source": ", ".join(map(str, sources)),
        "format": " + ".join(sorted(report.formats)),
        **{name: getattr(report, name) for name in COUNTS if name not in others},
        "template_text": {name: report.template_text[name] for name in template_text.COUNTS},
        "bad_rows": {reason: asdict(rows) for reason, rows in bad},
        "columns_not_used": dict(report.columns_not_used),
        "ends": end_tokens.summary(report.ends),
        "notes": [f"{said} ({rows:,} row{'s' * (rows > 1)})" for said, rows in report.notes.items()],
    }


def _refuse_nothing(names: str, report: ReadingReport, settings) -> None:
    """Raise UserError when no row is left to train on. names: of the sources."""
    if not report.rows:
        raise UserError(f"{names}: holds no rows.")
    if report.dropped_bad == report.rows:
        bad = max(report.bad_rows.values(), key=lambda entry: entry.rows)
        raise UserError(
            f"{bad.first[0]}: {bad.exact.rstrip('.')}; like it, none of the {report.rows} rows can be used."
        )
    if report.kept:
        return
    if sum(getattr(report, name) for name in OF_PAIRS) == report.rows:
        raise UserError(f"{names}: each of the {report.rows} pairs is a tie, has an empty side or two identical ones.")
    if report.dropped_no_answer_left or report.dropped_too_long:
        raise UserError(
            f"{names}: in none of the {report.rows} rows an answer fits into --max_length {settings.max_length}."
        )
    raise UserError(
        f"{names}: in none of the {report.rows} rows anything is trained on: --train_on {settings.train_on}, "
        "empty answers, the rows' own `train` or `weight`, masks or labels leave nothing."
    )
