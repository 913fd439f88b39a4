"""Read each of Open Assistant's trees of messages as one conversation, along the replies of the best rank."""

import itertools
from collections.abc import Iterator
from typing import Any

from zerofit.base.errors import UserError

COLUMNS = ("message_tree_id", "tree_state")  # columns of a row with a complete tree

OPTIONAL_COLUMNS = ("prompt", "system")  # the first holds the tree

PARENTS = ("parent_id", "parent_message_id")  # columns of single messages

IDS = ("message_id", "user_message_id", "id")

TREE_NOTE = "a tree of replies is read as one conversation: each turn is the reply of the best rank, or the first one"


def is_message(row: Any) -> bool:
    """Return whether a row is one message of a tree."""
    if not isinstance(row, dict) or not {"role", "text"} <= row.keys():
        return False
    return any(name in row for name in PARENTS) and any(name in row for name in IDS)


def turns(place: str, row: dict[str, Any]) -> list[dict]:
    """Return the turns of a row that holds a tree: `prompt` is its first message, with `replies` and theirs.

    Raises: UserError for a message that is not an object.
    """
    message, result = row.get("prompt") or "", []
    while message is not None:
        if not isinstance(message, dict) or not isinstance(message.get("replies") or [], list):
            raise UserError(f"{place}: a message of a tree must be an object with role, text and replies.")
        result.append({"role": message.get("role"), "content": message.get("text")})
        message = _best(message.get("replies") or [])
    return result


def join_messages(rows: list[tuple[str, dict]]) -> tuple[list[tuple[str, dict | UserError]], str]:
    """Join (place, message) into (place of the first message, {"messages": turns}), and return a note about them.

    A message whose parent is missing becomes an error.
    """
    parent = next(name for name in PARENTS if name in rows[0][1])
    identity = next(name for name in IDS if name in rows[0][1])
    known = {row.get(identity) for _, row in rows}
    replies: dict[Any, list[dict]] = {}
    for _, row in rows:
        replies.setdefault(row.get(parent), []).append(row)
    conversations, used = [], 0
    for place, row in rows:
        if row.get(parent) is None:
            path = list(_path(row, replies, identity))
            used += len(path)
            messages = [{"role": message.get("role"), "content": message.get("text")} for message in path]
            conversations.append((place, {"messages": messages}))
        elif row[parent] not in known:
            error = UserError(f"{place}: its {parent} {row[parent]!r} is not in this file; add it or remove the row.")
            conversations.append((place, error))
    return conversations, f"{TREE_NOTE}; {used:,} of {len(rows):,} messages are used"


def _path(root: dict, replies: dict[Any, list[dict]], identity: str) -> Iterator[dict]:
    """Yield the messages from the root on, each the best reply to the previous one."""
    message, seen = root, set()
    while message is not None and id(message) not in seen:  # circular replies would never end
        seen.add(id(message))
        yield message
        message = _best(replies.get(message.get(identity), []) if message.get(identity) is not None else [])


def _best(messages: list) -> Any:
    """Return the reply of the lowest rank, else the first, or None."""
    ranked = [reply for reply in messages if isinstance(reply, dict) and isinstance(reply.get("rank"), int | float)]
    return min(ranked, key=lambda reply: reply["rank"]) if ranked else next(iter(messages), None)


def join_trees(rows: Iterator[tuple], parse) -> tuple[Iterator[tuple], str]:
    """Return the conversations of a file of messages and a note about them; other rows unchanged and "".

    Args: rows: (place, row, JSON line or error); parse: (place, row) -> columns, raises UserError.
    """
    first = next(rows, None)
    if first is None:
        return iter(()), ""
    rows = itertools.chain([first], rows)
    try:
        if not is_message(parse(*first)):
            return rows, ""
    except UserError:
        return rows, ""
    messages, others = [], []
    for place, row in rows:
        try:
            columns = parse(place, row)
            if not is_message(columns):
                raise UserError(f"{place}: is not a message of a tree (role, text, parent); remove it.")
            messages.append((place, columns))
        except UserError as error:
            others.append((place, error))
    conversations, note = join_messages(messages)
    return iter([*conversations, *others]), note
