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
from zerofit.data.published import columns, comparisons, trees
from zerofit.job.recipe import Recipe

MASKS = ("completion_mask", "assistant_masks", "loss_mask")  # beside input_ids; the first two are TRL's

AROUND = ("system", "tools", *arguments.COLUMNS)  # optional columns around any conversation

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
        count = len(instances) if isinstance(instances, list) else "no list of"
        raise UserError(f"{place}: column 'instances' holds {count} instances; write a row for each of them.")
    return parse(place, {**row, **instances[0]}, "alpaca")


def _tree(place: str, row: Row) -> Conversation:
    """Read a tree of messages along its best replies."""
    conversation = turns_of(place, trees.turns(place, row), row, drop_unanswered=True)
    conversation.notes += (trees.WHOLE,)
    return conversation


FORMATS = (
    Format("tokens", ("input_ids",), _tokens, ("labels", *MASKS)),
    Format("messages", ("messages",), _chat("messages"), AROUND),
    Format("sharegpt", ("conversations",), _chat("conversations"), AROUND),
    Format("prompt/completion", ("prompt", "completion"), _pair("prompt", "completion"), (*AROUND, "history")),
    Format("question/answer", ("question", "answer"), _pair("question", "answer"), (*AROUND, "history")),
    Format("alpaca", ("instruction", "output"), _pair("instruction", "output"), ("input", *AROUND, "history")),
    Format("self-instruct", ("instruction", "instances"), _instances, AROUND),
    Format("tree", trees.COLUMNS, _tree, trees.BESIDE),
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
    idle = [str(name) for name, value in row.items() if name not in used and value not in (None, "", [])]
    return idle + [key for name in entry.columns for key in keys_not_used(name, row[name])]


def recognize(place: str, row: Row, known: Sequence[Format] = FORMATS) -> tuple[str, dict[str, str]]:
    """Return the format of a row, and {column: our name} where columns are taken by their names.

    Raises: UserError naming the place and the columns found.
    """
    kind = _with_columns(row, known)
    if kind:
        return kind, {}
    _check_preference(place, row)
    names = columns.guess(row)
    if names:
        return _with_columns(renamed(row, names), known), names
    found = [*map(str, row)]
    named = ", ".join(found[:MOST_NAMED]) + f" and {len(found) - MOST_NAMED} more" * (len(found) > MOST_NAMED)
    needed = "; ".join("+".join(entry.columns) for entry in known)
    raise UserError(f"{place}: no known format in the columns {named}; one of these is needed: {needed}; {_mend(row)}.")


def _with_columns(row: Row, known: Sequence[Format]) -> str:
    """Return the first format whose columns a row has; "" without one."""
    return next((entry.name for entry in known if all(column in row for column in entry.columns)), "")


def renamed(row: Row, names: dict[str, str]) -> Row:
    """Return the row with columns under other names, without those whose names these were."""
    return {names.get(key, key): value for key, value in row.items() if key in names or key not in names.values()}


def _mend(row: Row) -> str:
    """Return what to type for a row whose columns do not say what is asked and what is answered."""
    values = list(row.values())
    if "custom_id" in row and ("body" in row or "response" in row):
        of = "request" if "body" in row else "answer"
        other = "answer" if "body" in row else "question"
        return (
            f"this is a {of} of OpenAI's batch API without its {other}: write the `messages` of each request with the "
            "message of the response that has its custom_id behind them"
        )
    if {"request", "response"} <= row.keys():
        return "this is a log of requests: write `messages` of the request's messages and the response's message"
    if values and all(isinstance(value, dict) and value and all(map(str.isdigit, value)) for value in values):
        return "this is a table by columns, as pandas writes it: write it with to_json(orient='records', lines=True)"
    if len(row) > 1 and all(isinstance(value, dict) and _is_row(value) for value in values):
        return "this is one object with the rows under its keys: write its values as a list"
    if len(row) == 1 and isinstance(values[0], dict) and _is_row(values[0]):
        return f"the row is under the key {next(iter(row))!r}: write its value alone"
    if {"query", "answers", "tools"} <= row.keys():
        return "`answers` are tool calls: write `messages`, the question and an assistant turn with `tool_calls`"
    lists = {name: value[0] for name, value in row.items() if isinstance(value, list) and value}
    if lists and len(lists) == len(row) and all(isinstance(one, dict) and _is_row(one) for one in lists.values()):
        return f"this is one object with lists of rows: write each to a file of its own ({', '.join(lists)})"
    text, (asked, answered) = columns.whole_text(row), columns.candidates(row)
    if text:
        return f"map them: --columns text={text}"
    several = [f"{', '.join(names)} ({role})" for names, role in ((asked, "asked"), (answered, "answered")) if names]
    which = f"; here could be meant: {'; '.join(several)}" if len(asked) > 1 or len(answered) > 1 else ""
    return f"name columns with --columns prompt=... completion=...{which}"


def _is_row(value: Row) -> bool:
    known = {column for entry in FORMATS for column in entry.columns}
    return not known.isdisjoint(value) or bool(columns.guess(value) or comparisons.columns_of(value))


def _check_preference(place: str, row: Row) -> None:
    """Raise UserError for preference data (DPO): rows with a chosen and a rejected answer."""
    found = comparisons.columns_of(row)
    if found is None:
        return
    column = _column_of_chosen(row[found[0]], row.get("prompt")) if found == ("chosen", "rejected") else None
    mend = f"--columns {column}=chosen would train on the chosen answers" if column else "keep the chosen answers only"
    raise UserError(
        f"{place}: columns {found[0]!r} and {found[1]!r} are preference data, which recipes/dpo.py trains on "
        f"(make dpo); here {mend}."
    )


def _column_of_chosen(chosen: Any, prompt: Any) -> str | None:
    """Return our column as which the chosen answers can be trained on; None if there is none."""
    if begins_conversation(chosen):
        return "messages"  # Tülu-3 repeats the prompt in it
    if prompt is None:
        return "text" if isinstance(chosen, str) else None
    return "completion" if type(chosen) is type(prompt) and isinstance(chosen, str | list) else None
