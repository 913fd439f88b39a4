"""Bring the turns of published data sets into one form: roles, turns without roles, and contents in parts."""

import json
from typing import Any

from zerofit.base.errors import UserError

# Role names of published datasets, in lower case -> the standard role.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}

CALL_ROLES = ("function_call", "tool_call")  # turns that are a tool call in JSON

# Keys of an exchange, a question with its answer in one object (Capybara, ms-swift, xtuner), in their order.
EXCHANGE = {"system": "system"} | dict.fromkeys(("human", "user", "input", "question", "instruction", "prompt"), "user")
EXCHANGE |= dict.fromkeys(("assistant", "gpt", "bot", "output", "answer", "response", "completion"), "assistant")

CONTENT_KEYS = ("content", "value", "text")

TEXT_PARTS = ("text", "input_text", "output_text")

REASONING_PARTS = ("reasoning", "thinking")

CALL_PARTS = ("tool_call", "tool_use")  # LLaMA-Factory's, Anthropic's

ALTERNATELY = "turns without roles are taken as the user's and the assistant's, alternately"


def role_of(turn: Any) -> str | None:
    """Return the standard role of a turn; None for one that is not known."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return ROLES.get(role.strip().lower()) if isinstance(role, str) else None


def is_call(turn: Any) -> bool:
    """Return whether a turn's role says that it is a tool call."""
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return isinstance(role, str) and role.strip().lower() in CALL_ROLES


def content_of(turn: dict[str, Any]) -> Any:
    """Return the content of a turn, under whichever key it stands."""
    return next((turn[key] for key in CONTENT_KEYS if turn.get(key) is not None), None)


def with_roles(place: str, turns: Any) -> tuple[list, tuple[str, ...]]:
    """Return turns as objects with roles, and notes on what was taken for granted.

    JSON text is parsed, strings get their roles in turn, and an exchange becomes several turns.
    Raises: UserError for what is no list of turns.
    """
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: the conversation is a string that is not valid JSON: {error}.") from None
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{place}: the conversation must be a list of turns that is not empty.")
    if all(isinstance(turn, str) for turn in turns):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)], (ALTERNATELY,)
    return [single for turn in turns for single in _of_exchange(turn)], ()


def is_exchange(turn: Any) -> bool:
    """Return whether an object holds a question and its answer instead of a role."""
    if not isinstance(turn, dict) or {"role", "from"} & turn.keys():
        return False
    return {"user", "assistant"} <= {EXCHANGE.get(str(key).lower()) for key in turn}


def is_turns(value: Any) -> bool:
    """Return whether a value is a list of turns, by the keys of its first one."""
    first = value[0] if isinstance(value, list) and value else None
    return is_exchange(first) or (isinstance(first, dict) and bool({"role", "from"} & first.keys()))


def _of_exchange(turn: Any) -> list:
    """Return the turns of an exchange; a turn as it is."""
    if not is_exchange(turn):
        return [turn]
    order = list(EXCHANGE)
    known = sorted((key for key in turn if str(key).lower() in EXCHANGE), key=lambda key: order.index(key.lower()))
    rest = {key: value for key, value in turn.items() if key not in known}
    found = [
        {"role": EXCHANGE[key.lower()], "content": turn[key]}
        for key in known
        if turn[key] is not None and (turn[key] != "" or EXCHANGE[key.lower()] != "system")
    ]
    # What stands beside question and answer may mark the answer; it is looked at with that turn.
    return [single | rest if single["role"] == "assistant" else single for single in found]


def from_parts(place: str, i: int, turn: dict[str, Any], parts: list) -> tuple[dict[str, Any], str]:
    """Return turn `i` with the reasoning and the calls of its content's parts, and its text.

    Parts are OpenAI's ({"type": "text", "text": ...}), LLaMA-Factory's (`value`), Anthropic's and Mistral's.
    Raises: UserError for a part that is neither text, reasoning nor a tool call.
    """
    kinds = (*TEXT_PARTS, *REASONING_PARTS, *CALL_PARTS) if role_of(turn) == "assistant" else TEXT_PARTS
    other = [part.get("type") if isinstance(part, dict) else part for part in parts if not _is_one_of(part, kinds)]
    if other:
        raise UserError(
            f"{place}: turn {i} has content other than text ({', '.join(map(repr, other[:3]))}); this recipe "
            "trains on text only."
        )
    calls = [call for part in parts if part["type"] in CALL_PARTS for call in _calls_of(place, i, part)]
    reasoning = "".join(_text(place, i, part) for part in parts if part["type"] in REASONING_PARTS)
    text = "".join(_text(place, i, part) for part in parts if part["type"] in TEXT_PARTS)
    turn = turn | ({"reasoning_content": reasoning} if reasoning else {})
    return turn | ({"tool_calls": [*(turn.get("tool_calls") or []), *calls]} if calls else {}), text


def _is_one_of(part: Any, kinds: tuple[str, ...]) -> bool:
    return isinstance(part, dict) and part.get("type") in kinds


def _text(place: str, i: int, part: dict[str, Any]) -> str:
    keys = ("text", "value", "content") if part["type"] in TEXT_PARTS else (part["type"], "text", "value", "content")
    value = next((part[key] for key in keys if part.get(key) is not None), None)
    if isinstance(value, list) and all(
        _is_one_of(inner, TEXT_PARTS) for inner in value
    ):  # Mistral's thinking is a list of text parts
        return "".join(_text(place, i, inner) for inner in value)
    if not isinstance(value, str):
        raise UserError(f"{place}: column 'content of turn {i}' must be a string, found a {type(value).__name__}.")
    return value


def _calls_of(place: str, i: int, part: dict[str, Any]) -> list[dict]:
    """Return the tool calls of a part."""
    if part["type"] == "tool_use":
        call = {"name": part.get("name"), "arguments": part.get("input")}
        return [{"type": "function", "function": call} | ({"id": part["id"]} if part.get("id") else {})]
    calls = function_calls(next((part[key] for key in ("value", "tool_call", "text") if part.get(key)), None))
    if calls is None:
        raise UserError(f"{place}: turn {i} has a tool_call part that is not JSON with a name and arguments.")
    return calls


def function_calls(text: Any) -> list[dict] | None:
    """Parse the text of a ShareGPT `function_call` turn into tool calls; None if it holds none."""
    try:
        parsed = json.loads(text) if isinstance(text, str) else text
    except (TypeError, ValueError, RecursionError):
        return None
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        return None
    return [{"type": "function", "function": {k: call[k] for k in ("name", "arguments")}} for call in calls]
