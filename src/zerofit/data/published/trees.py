"""Read Open Assistant's trees of messages: one conversation of each, along the replies of the best rank."""

import itertools
from collections.abc import Iterator
from typing import Any

from zerofit.base.errors import UserError

COLUMNS = ("message_tree_id", "tree_state")  # of a row that holds a whole tree

BESIDE = ("prompt", "system")  # the tree is in the first

PARENTS = ("parent_id", "parent_message_id")  # columns of single messages

IDS = ("message_id", "user_message_id", "id")

WHOLE = "a tree of replies is read as one conversation: at each turn the reply of the best rank, else the first"


def is_message(row: Any) -> bool:
    """Return whether a row is one message of a tree."""
    if not isinstance(row, dict) or not {"role", "text"} <= row.keys():
        return False
    return any(name in row for name in PARENTS) and any(name in row for name in IDS)


def turns(place: str, row: dict[str, Any]) -> list[dict]:
    """Return the turns of a row that holds a tree: `prompt` is its first message, with `replies` and theirs.

    Raises: UserError for a message that is no object.
    """
    message, found = row.get("prompt") or "", []
    while message is not None:
        if not isinstance(message, dict) or not isinstance(message.get("replies") or [], list):
            raise UserError(f"{place}: a message of a tree must be an object with role, text and replies.")
        found.append({"role": message.get("role"), "content": message.get("text")})
        message = _best(message.get("replies") or [])
    return found


def joined(rows: list[tuple[str, dict]]) -> tuple[list[tuple[str, dict | UserError]], str]:
    """Join (place, message) into (place of the first message, {"messages": turns}), and say what was made of them.

    A message whose parent is not among them is an error of its own.
    """
    parent = next(name for name in PARENTS if name in rows[0][1])
    identity = next(name for name in IDS if name in rows[0][1])
    known = {row.get(identity) for _, row in rows}
    replies: dict[Any, list[dict]] = {}
    for _, row in rows:
        replies.setdefault(row.get(parent), []).append(row)
    found, used = [], 0
    for place, row in rows:
        if row.get(parent) is None:
            path = list(_path(row, replies, identity))
            used += len(path)
            found.append((place, {"messages": [{"role": one.get("role"), "content": one.get("text")} for one in path]}))
        elif row[parent] not in known:
            found.append((place, UserError(f"{place}: its {parent} {row[parent]!r} is no message of this file.")))
    return found, f"{WHOLE}; {used:,} of {len(rows):,} messages are in them"


def _path(root: dict, replies: dict[Any, list[dict]], identity: str) -> Iterator[dict]:
    """Yield the messages from the first one down, each the best reply to the one before."""
    message, seen = root, set()
    while message is not None and id(message) not in seen:  # replies in a circle would never end
        seen.add(id(message))
        yield message
        message = _best(replies.get(message.get(identity), []) if message.get(identity) is not None else [])


def _best(messages: list) -> Any:
    """Return the reply of the lowest rank, else the first; None without any."""
    ranked = [one for one in messages if isinstance(one, dict) and isinstance(one.get("rank"), int | float)]
    return min(ranked, key=lambda one: one["rank"]) if ranked else next(iter(messages), None)


def take(rows: Iterator[tuple], parsed) -> tuple[Iterator[tuple], str]:
    """Return the conversations of a file of messages with the note about them; else the rows as they are and "".

    Args: rows: (place, row, line of JSON or error); parsed: (place, row) -> columns, or UserError.
    """
    first = next(rows, None)
    if first is None:
        return iter(()), ""
    rows = itertools.chain([first], rows)
    try:
        if not is_message(parsed(*first)):
            return rows, ""
    except UserError:
        return rows, ""
    messages, others = [], []
    for place, row in rows:
        try:
            columns = parsed(place, row)
            if not is_message(columns):
                raise UserError(f"{place}: is no message of a tree (role, text and its parent), as the first row is.")
            messages.append((place, columns))
        except UserError as error:
            others.append((place, error))
    found, said = joined(messages)
    return iter([*found, *others]), said
