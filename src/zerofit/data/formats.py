"""The formats of data rows: the columns that identify each, and how a row of it is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerofit.base.errors import UserError
from zerofit.data import meaning
from zerofit.data.chat_templates import arguments
from zerofit.data.conversations import (
    IGNORE,
    Conversation,
    begins_conversation,
    history_of,
    keys_not_used,
    string,
    turns_of,
    with_input,
)
from zerofit.job.recipe import Recipe

MASKS = ("completion_mask", "assistant_masks", "loss_mask")  # beside input_ids; the first two are TRL's

AROUND = ("system", "tools", *arguments.COLUMNS)  # optional columns around any conversation

# Names of published datasets for a question, an answer and a whole text, in order of preference.
ASKED = ("instruction", "question", "prompt", "query", "problem", "input")

ANSWERED = ("completion", "answer", "output", "response", "solution", "target")

WHOLE_TEXT = ("content", "document", "body", "article")

MOST_NAMED = 20  # columns that a refusal names

Row = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """A format of data rows. A recipe names its own ones in Recipe.formats; they are tried before those of FORMATS."""

    name: str  # of --data_format
    columns: tuple[str, ...]  # that identify it: a row that has them all is of the first such format
    # (place, row) -> chat turns, plain text, or token lists {"input_ids", "labels"}; raises UserError naming the place
    read: Callable[[str, Row], Conversation | str | dict]
    beside: tuple[str, ...] = ()  # optional columns that `read` follows; any other is reported as not used


# --- reading each format ---


def _tokens(place: str, row: Row) -> dict:
    """Check token lists; labels default to input_ids, and each mask of TRL (1: trained) removes some."""
    ids, labels = row["input_ids"], row.get("labels")
    labels = ids if labels is None else labels
    for name, values in (("input_ids", ids), ("labels", labels)):
        if not isinstance(values, list) or not values or not all(type(v) is int for v in values):
            raise UserError(f"{place}: column {name!r} must be a list of whole numbers that is not empty.")
    if labels is not ids and any(label != IGNORE and label < 0 for label in labels):
        raise UserError(f"{place}: labels must be token ids or {IGNORE}.")
    if len(ids) != len(labels):
        raise UserError(f"{place}: input_ids has {len(ids)} entries, labels {len(labels)}; they must be as many.")
    for name in MASKS:
        mask = row.get(name)
        if mask is None:
            continue
        if not isinstance(mask, list) or not all(type(v) in (int, bool) and v in (0, 1) for v in mask):
            raise UserError(f"{place}: column {name!r} must be a list of 0 and 1.")
        if len(ids) != len(mask):
            raise UserError(f"{place}: input_ids has {len(ids)} entries, {name} {len(mask)}; they must be as many.")
        labels = [label if on else IGNORE for label, on in zip(labels, mask, strict=True)]
    return {"input_ids": ids, "labels": labels}


def _pair(first: str, last: str) -> Callable[[str, Row], Conversation]:
    """Return a reader of a question and an answer, each a string or a list of turns."""

    def read(place: str, row: Row) -> Conversation:
        if isinstance(row[first], list) or isinstance(row[last], list):
            if not (isinstance(row[first], list) and isinstance(row[last], list)):
                raise UserError(f"{place}: columns {first!r} and {last!r} must both be strings or both message lists.")
            return turns_of(place, [*row[first], *row[last]], row)
        question, answer = string(place, first, row[first]), string(place, last, row[last])
        if first == "instruction":
            question = with_input(place, question, row)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return turns_of(place, [*history_of(place, row.get("history")), *turns], row)

    return read


FORMATS = (
    Format("tokens", ("input_ids",), _tokens, ("labels", *MASKS)),
    Format("messages", ("messages",), lambda place, row: turns_of(place, row["messages"], row), AROUND),
    Format("sharegpt", ("conversations",), lambda place, row: turns_of(place, row["conversations"], row), AROUND),
    Format("prompt/completion", ("prompt", "completion"), _pair("prompt", "completion"), (*AROUND, "history")),
    Format("question/answer", ("question", "answer"), _pair("question", "answer"), (*AROUND, "history")),
    Format("alpaca", ("instruction", "output"), _pair("instruction", "output"), ("input", *AROUND, "history")),
    Format("text", ("text",), lambda place, row: string(place, "text", row["text"])),
)


# --- the formats of a job ---


def known_to(recipe: Recipe) -> tuple[Format, ...]:
    """Return the formats that a recipe's rows may have: its own ones first."""
    return (*recipe.formats, *FORMATS)


def named(name: str, known: Sequence[Format] = FORMATS) -> Format:
    """Return the format of a name."""
    return next(entry for entry in known if entry.name == name)


def parse(place: str, row: Row, kind: str, known: Sequence[Format] = FORMATS) -> Conversation | str | dict:
    """Parse a row of the format `kind` into a conversation, plain text or token lists ({"input_ids", "labels"}).

    Raises: UserError naming the place for a missing column, a wrong type, a wrong role or a wrong order of roles.
    """
    entry = named(kind, known)
    for column in entry.columns:
        if row.get(column) is None:
            present = ", ".join(k for k, v in row.items() if v is not None) or "none"
            raise UserError(f"{place}: column {column!r} is missing or null (format {kind}; columns here: {present}).")
    _check_preference(place, row)
    meaning.check_row(place, row, kind)
    return entry.read(place, row)


def not_used(row: Row, kind: str, known: Sequence[Format] = FORMATS) -> list[str]:
    """Return the columns of a row and the keys of its turns (`messages[].id`) that are not empty and are ignored."""
    entry = named(kind, known)
    used = {*entry.columns, *entry.beside}
    columns = [str(name) for name, value in row.items() if name not in used and value not in (None, "", [])]
    return columns + [key for name in entry.columns for key in keys_not_used(name, row[name])]


def detect(place: str, row: Row, known: Sequence[Format] = FORMATS) -> str:
    """Return the format of a row, detected by its columns.

    Raises: UserError naming the place and the columns found.
    """
    for entry in known:
        if all(column in row for column in entry.columns):
            return entry.name
    _check_preference(place, row)
    columns = "; ".join("+".join(entry.columns) for entry in known)
    guess = guess_columns(row)
    mend = (
        f"map them: --columns {' '.join(guess)}" if guess else "name columns with --columns prompt=... completion=..."
    )
    found = [*map(str, row)]
    if len(found) > 1 and all(isinstance(value, dict) for value in row.values()):
        mend = "this is one object with the rows under its keys: write its values as a list"
    named = ", ".join(found[:MOST_NAMED]) + f" and {len(found) - MOST_NAMED} more" * (len(found) > MOST_NAMED)
    raise UserError(f"{place}: no known format in the columns {named}; one of these is needed: {columns}; {mend}.")


def guess_columns(row: Row) -> list[str]:
    """Guess --columns for a row of unknown format by its column names; [] without a guess."""
    strings = {name for name, value in row.items() if isinstance(value, str)}
    chat_column = next((name for name, v in row.items() if isinstance(v, list) and v and isinstance(v[0], dict)), None)
    if chat_column and {"role", "from"} & row[chat_column][0].keys():
        return [f"messages={chat_column}"]
    question = next((name for name in ASKED if name in strings), None)
    answer = next((name for name in ANSWERED if name in strings and name != question), None)
    if not (question and answer):
        text = next((name for name in WHOLE_TEXT if name in strings), None)
        return [f"text={text}"] if text and not question else []
    first, last = next(
        (pair for kind in ("question/answer", "alpaca") if question == (pair := named(kind).columns)[0]),
        ("prompt", "completion"),
    )
    guess = [f"{ours}={theirs}" for ours, theirs in ((first, question), (last, answer)) if ours != theirs]
    if first == "instruction" and "input" not in row and "context" in strings:
        guess.append("input=context")
    return guess + (["system=system_prompt"] if "system" not in row and "system_prompt" in strings else [])


def _check_preference(place: str, row: Row) -> None:
    """Raise UserError for preference data (DPO): rows with a chosen and a rejected answer."""
    if row.get("chosen") is None or row.get("rejected") is None:
        return
    column = _column_of_chosen(row["chosen"], row.get("prompt"))
    mend = f"--columns {column}=chosen would train on the chosen answers" if column else "keep the chosen answers only"
    raise UserError(
        f"{place}: columns 'chosen' and 'rejected' are preference data, which recipes/dpo.py trains on (make dpo); "
        f"here {mend}."
    )


def _column_of_chosen(chosen: Any, prompt: Any) -> str | None:
    """Return our column as which the chosen answers can be trained on; None if there is none."""
    if begins_conversation(chosen):
        return "messages"  # Tülu-3 repeats the prompt in it
    if prompt is None:
        return "text" if isinstance(chosen, str) else None
    return "completion" if type(chosen) is type(prompt) and isinstance(chosen, str | list) else None
