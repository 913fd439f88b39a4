"""Define the formats of data rows: their identifying columns and their readers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zerofit.base.errors import UserError
from zerofit.data import loss_marks
from zerofit.data.chat_templates import arguments
from zerofit.data.conversations import (
    IGNORE,
    Conversation,
    begins_conversation,
    history_of,
    string,
    turns_of,
    unused_keys,
    with_input,
)
from zerofit.data.dataset_conventions import columns, comparisons, trees
from zerofit.job.recipe import Recipe

MASKS = ("completion_mask", "assistant_masks", "loss_mask")  # columns next to input_ids; the first two are TRL's

CHAT_COLUMNS = ("system", "tools", *arguments.COLUMNS)  # optional columns of any conversation

MAX_NAMED_COLUMNS = 20  # columns listed in an error

Row = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """A format of data rows. Formats in Recipe.formats are tried before FORMATS."""

    name: str  # value of --data_format
    columns: tuple[str, ...]  # identifying columns: a row has the first format whose columns it has
    # (place, row) -> chat turns, plain text, or token lists {"input_ids", "labels"}; raises UserError with the place
    read: Callable[[str, Row], Conversation | str | dict]
    optional: tuple[str, ...] = ()  # optional columns that `read` uses; others are reported as not used


# --- readers ---


def _tokens(place: str, row: Row) -> dict:
    """Check token lists; labels default to input_ids, and each mask of TRL (1: trained) removes some."""
    ids, labels = row["input_ids"], row.get("labels")
    labels = ids if labels is None else labels
    for name, values in (("input_ids", ids), ("labels", labels)):
        if not isinstance(values, list) or not values or not all(type(v) is int for v in values):
            raise UserError(f"{place}: column {name!r} must be a non-empty list of integers.")
    if labels is not ids and any(label != IGNORE and label < 0 for label in labels):
        raise UserError(f"{place}: labels must be token ids or {IGNORE}.")
    if len(ids) != len(labels):
        raise UserError(f"{place}: input_ids has {len(ids)} entries, labels {len(labels)}; their lengths must match.")
    for name in MASKS:
        mask = row.get(name)
        if mask is None:
            continue
        if not isinstance(mask, list) or not all(type(v) in (int, bool) and v in (0, 1) for v in mask):
            raise UserError(f"{place}: column {name!r} must be a list of 0 and 1.")
        if len(ids) != len(mask):
            raise UserError(f"{place}: input_ids has {len(ids)} entries, {name} {len(mask)}; their lengths must match.")
        labels = [label if on else IGNORE for label, on in zip(labels, mask, strict=True)]
    return {"input_ids": ids, "labels": labels}


def _pair(first: str, last: str) -> Callable[[str, Row], Conversation]:
    """Return a reader of a question and an answer, each a string or a list of turns."""

    def read(place: str, row: Row) -> Conversation:
        if isinstance(row[first], list) or isinstance(row[last], list):
            if not (isinstance(row[first], list) and isinstance(row[last], list)):
                raise UserError(f"{place}: columns {first!r} and {last!r} must both be strings or both message lists.")
            return turns_of(place, [*row[first], *row[last]], row, drop_unanswered=True)
        question, answer = string(place, first, row[first]), string(place, last, row[last])
        if first == "instruction":
            question = with_input(place, question, row)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return turns_of(place, [*history_of(place, row.get("history")), *turns], row)

    return read


def _chat(column: str) -> Callable[[str, Row], Conversation]:
    """Return a reader of a column of turns."""
    return lambda place, row: turns_of(place, row[column], row, drop_unanswered=True)


def _instances(place: str, row: Row) -> Conversation:
    """Read a task of self-instruct: an instruction with one instance, {"input", "output"}."""
    instances = row["instances"]
    if not isinstance(instances, list) or len(instances) != 1 or not isinstance(instances[0], dict):
        count = f"{len(instances)} entries" if isinstance(instances, list) else "no list"
        raise UserError(f"{place}: column 'instances' has {count}, but needs a single one; write one row per instance.")
    return parse(place, {**row, **instances[0]}, "alpaca")


def _tree(place: str, row: Row) -> Conversation:
    """Read a tree of messages along its best replies."""
    conversation = turns_of(place, trees.turns(place, row), row, drop_unanswered=True)
    conversation.notes += (trees.TREE_NOTE,)
    return conversation


FORMATS = (
    Format("tokens", ("input_ids",), _tokens, ("labels", *MASKS)),
    Format("messages", ("messages",), _chat("messages"), CHAT_COLUMNS),
    Format("sharegpt", ("conversations",), _chat("conversations"), CHAT_COLUMNS),
    Format("prompt/completion", ("prompt", "completion"), _pair("prompt", "completion"), (*CHAT_COLUMNS, "history")),
    Format("question/answer", ("question", "answer"), _pair("question", "answer"), (*CHAT_COLUMNS, "history")),
    Format("alpaca", ("instruction", "output"), _pair("instruction", "output"), ("input", *CHAT_COLUMNS, "history")),
    Format("self-instruct", ("instruction", "instances"), _instances, CHAT_COLUMNS),
    Format("tree", trees.COLUMNS, _tree, trees.OPTIONAL_COLUMNS),
    Format("text", ("text",), lambda place, row: string(place, "text", row["text"])),
)


# --- the formats of a job ---


def formats_of(recipe: Recipe) -> tuple[Format, ...]:
    """Return the formats of a recipe, custom formats first."""
    return (*recipe.formats, *FORMATS)


def format_named(name: str, known: Sequence[Format] = FORMATS) -> Format:
    """Return the format with this name."""
    return next(entry for entry in known if entry.name == name)


def parse(place: str, row: Row, kind: str, known: Sequence[Format] = FORMATS) -> Conversation | str | dict:
    """Parse a row of the format `kind` into a conversation, plain text or token lists ({"input_ids", "labels"}).

    Raises: UserError with the place for a missing column, a wrong type, a wrong role or a wrong order of roles.
    """
    entry = format_named(kind, known)
    for column in entry.columns:
        if row.get(column) is None:
            present = ", ".join(k for k, v in row.items() if v is not None) or "none"
            raise UserError(f"{place}: column {column!r} is missing or null (format {kind}; columns found: {present}).")
    _check_preference(place, row)
    loss_marks.check_row(place, row, kind)
    return entry.read(place, row)


def unused_columns(row: Row, kind: str, known: Sequence[Format] = FORMATS) -> list[str]:
    """Return the ignored non-empty columns of a row and keys of its turns (`messages[].id`)."""
    entry = format_named(kind, known)
    used = {*entry.columns, *entry.optional}
    unused = [str(name) for name, value in row.items() if name not in used and value not in (None, "", [])]
    return unused + [key for name in entry.columns for key in unused_keys(name, row[name])]


def recognize(place: str, row: Row, known: Sequence[Format] = FORMATS) -> tuple[str, dict[str, str]]:
    """Return the format of a row, and {column: our name} for columns that are recognized by their names.

    Raises: UserError with the place and the columns of the row.
    """
    kind = _with_columns(row, known)
    if kind:
        return kind, {}
    _check_preference(place, row)
    names = columns.guess(row)
    if names:
        return _with_columns(rename_columns(row, names), known), names
    more = len(row) - MAX_NAMED_COLUMNS
    present = ", ".join(map(str, [*row][:MAX_NAMED_COLUMNS])) + (f" and {more} more" if more > 0 else "")
    supported = "; ".join("+".join(entry.columns) for entry in known)
    raise UserError(f"{place}: no known format has the columns {present}; supported: {supported}; {_fix_for(row)}.")


def _with_columns(row: Row, known: Sequence[Format]) -> str:
    """Return the first format whose columns a row has, or ""."""
    return next((entry.name for entry in known if all(column in row for column in entry.columns)), "")


def rename_columns(row: Row, names: dict[str, str]) -> Row:
    """Return the row with renamed columns, which replace columns of the same name."""
    return {names.get(key, key): value for key, value in row.items() if key in names or key not in names.values()}


def _fix_for(row: Row) -> str:
    """Return a fix for a row without recognizable columns of question and answer."""
    values = list(row.values())
    if "custom_id" in row and ("body" in row or "response" in row):
        part, other = ("request", "answer") if "body" in row else ("answer", "question")
        return (
            f"this is a {part} of OpenAI's batch API without its {other}: append to the `messages` of each request the "
            "message of the response with the same custom_id"
        )
    if {"request", "response"} <= row.keys():
        return "this is a log of requests: write `messages` with the request's messages and the response's message"
    if values and all(isinstance(value, dict) and value and all(map(str.isdigit, value)) for value in values):
        return "this is pandas' JSON by columns: write rows with to_json(orient='records', lines=True)"
    if len(row) > 1 and all(isinstance(value, dict) and _is_row(value) for value in values):
        return "this is a single object with rows as its values: write them as a list"
    if len(row) == 1 and isinstance(values[0], dict) and _is_row(values[0]):
        return f"the row is under the key {next(iter(row))!r}: write only its value"
    if {"query", "answers", "tools"} <= row.keys():
        return "`answers` are tool calls: write `messages` with the question and an assistant turn with `tool_calls`"
    lists = {name: value[0] for name, value in row.items() if isinstance(value, list) and value}
    if lists and len(lists) == len(row) and all(isinstance(item, dict) and _is_row(item) for item in lists.values()):
        return f"this is a single object with lists of rows: write each list to a separate file ({', '.join(lists)})"
    text, (questions, answers) = columns.text_column(row), columns.candidates(row)
    if text:
        return f"map the text: --columns text={text}"
    roles = ((questions, "question"), (answers, "answer"))
    candidates = "; ".join(f"{', '.join(names)} ({role})" for names, role in roles if names)
    note = f"; candidates: {candidates}" if len(questions) > 1 or len(answers) > 1 else ""
    return f"map columns with --columns prompt=... completion=...{note}"


def _is_row(value: Row) -> bool:
    known = {column for entry in FORMATS for column in entry.columns}
    return not known.isdisjoint(value) or bool(columns.guess(value) or comparisons.columns_of(value))


def _check_preference(place: str, row: Row) -> None:
    """Raise UserError for preference data (DPO): rows with a chosen and a rejected answer."""
    pair = comparisons.columns_of(row)
    if pair is None:
        return
    column = _column_of_chosen(row[pair[0]], row.get("prompt")) if pair == ("chosen", "rejected") else None
    fix = f"train on the chosen answers with --columns {column}=chosen" if column else "keep only the chosen answers"
    raise UserError(
        f"{place}: columns {pair[0]!r} and {pair[1]!r} are preference data; train on it with recipes/dpo.py "
        f"(make dpo), or {fix}."
    )


def _column_of_chosen(chosen: Any, prompt: Any) -> str | None:
    """Return our column that the chosen answers can be mapped to, or None."""
    if begins_conversation(chosen):
        return "messages"  # Tülu-3 repeats the prompt in it
    if prompt is None:
        return "text" if isinstance(chosen, str) else None
    return "completion" if type(chosen) is type(prompt) and isinstance(chosen, str | list) else None
