"""Convert turns of published datasets to one form: roles, turns without roles, and contents in parts."""

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

CALL_ROLES = ("function_call", "tool_call")  # roles of turns with a tool call in JSON

# Keys of an exchange, a question with its answer in one object (Capybara, ms-swift, xtuner), in their order.
EXCHANGE = {"system": "system"} | dict.fromkeys(("human", "user", "input", "question", "instruction", "prompt"), "user")
EXCHANGE |= dict.fromkeys(("assistant", "gpt", "bot", "output", "answer", "response", "completion"), "assistant")

CONTENT_KEYS = ("content", "value", "text", "parts")  # the last is Gemini's

TEXT_PARTS = ("text", "input_text", "output_text")

REASONING_PARTS = ("reasoning", "thinking")

CALL_PARTS = ("tool_call", "tool_use")  # LLaMA-Factory's, Anthropic's

RESULT_PART = "tool_result"  # Anthropic's, in a turn of the user

# Keys of parts without a type: Gemini's in both spellings, and Bedrock's.
CALL_KEYS = ("functionCall", "function_call", "toolUse")

RESULT_KEYS = ("functionResponse", "function_response", "toolResult")

ALTERNATING_ROLES = "turns without roles are read as user and assistant turns, alternately"


def describe_type(value: Any) -> str:
    """Return the type of a JSON value in words, such as "a string"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"{value}".lower()
    kinds = ((str, "a string"), (dict, "an object"), (list, "a list"), (int | float, "a number"))
    return next((name for kind, name in kinds if isinstance(value, kind)), f"a {type(value).__name__}")


def role_of(turn: Any) -> str | None:
    """Return the standard role of a turn; None if unknown."""
    return ROLES.get(_role_name(turn))


def is_call(turn: Any) -> bool:
    """Return whether a turn's role marks it as a tool call."""
    return _role_name(turn) in CALL_ROLES


def _role_name(turn: Any) -> str:
    role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return role.strip().lower() if isinstance(role, str) else ""


def content_of(turn: dict[str, Any]) -> Any:
    """Return the content of a turn, under any of CONTENT_KEYS."""
    for key in CONTENT_KEYS:
        if turn.get(key) is not None:
            return turn[key]
    return None


def with_roles(place: str, turns: Any) -> tuple[list, tuple[str, ...]]:
    """Return turns as objects with roles, and notes.

    Parse JSON text, assign roles to strings alternately, and split exchanges into turns.
    Raises: UserError for anything but a list of turns.
    """
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: the conversation is a string that is not valid JSON: {error}.") from None
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{place}: the conversation must be a non-empty list of turns.")
    if all(isinstance(turn, str) for turn in turns):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)], (ALTERNATING_ROLES,)
    return [single for turn in turns for part in _split_exchange(turn) for single in _split_results(part)], ()


def is_exchange(turn: Any) -> bool:
    """Return whether an object holds a question and its answer instead of a role."""
    if not isinstance(turn, dict) or "role" in turn or "from" in turn:
        return False
    return {"user", "assistant"} <= {EXCHANGE.get(str(key).lower()) for key in turn}


def is_turns(value: Any) -> bool:
    """Return whether a value is a list of turns, by the keys of the first one."""
    first = value[0] if isinstance(value, list) and value else None
    return is_exchange(first) or (isinstance(first, dict) and bool({"role", "from"} & first.keys()))


def _split_exchange(turn: Any) -> list:
    """Return the turns of an exchange; any other turn unchanged."""
    if not is_exchange(turn):
        return [turn]
    order = list(EXCHANGE)
    known = sorted((key for key in turn if str(key).lower() in EXCHANGE), key=lambda key: order.index(key.lower()))
    rest = {key: value for key, value in turn.items() if key not in known}
    turns = [
        {"role": EXCHANGE[key.lower()], "content": turn[key]}
        for key in known
        if turn[key] is not None and (turn[key] != "" or EXCHANGE[key.lower()] != "system")
    ]
    # Other keys may mark the answer, so that turn keeps them.
    return [single | rest if single["role"] == "assistant" else single for single in turns]


def _typed(part: Any) -> Any:
    """Return an untyped part of Gemini or Bedrock in Anthropic's form; any other unchanged."""
    if not isinstance(part, dict) or "type" in part:
        return part
    for kind, keys in (("tool_use", CALL_KEYS), (RESULT_PART, RESULT_KEYS)):
        value = next((part[key] for key in keys if isinstance(part.get(key), dict)), None)
        if value is not None:
            names = {"toolUseId": "id" if kind == "tool_use" else "tool_use_id", "args": "input", "response": "content"}
            return {"type": kind} | {names.get(key, key): inner for key, inner in value.items()}
    if isinstance(part.get("text"), str):
        kind = REASONING_PARTS[1] if part.get("thought") is True else TEXT_PARTS[0]
        return {"type": kind, "text": part["text"]}
    return {"type": RESULT_PART, "content": part["json"]} if part.keys() == {"json"} else part


def _split_results(turn: Any) -> list:
    """Return a turn with the tool results in its content as separate turns before it."""
    parts = content_of(turn) if isinstance(turn, dict) else None
    if not isinstance(parts, list):
        return [turn]
    typed = [_typed(part) for part in parts]
    results = [part for part in typed if _is_one_of(part, (RESULT_PART,))]
    if not results:
        return [turn]
    tool_turns = [
        {"role": "tool", "content": _result_text(part.get("content"))}
        | {key: part[name] for key, name in (("tool_call_id", "tool_use_id"), ("name", "name")) if part.get(name)}
        for part in results
    ]
    rest = [part for part in typed if part not in results]
    others = {key: value for key, value in turn.items() if key not in CONTENT_KEYS}
    return tool_turns + ([others | {"content": rest}] if rest else [])


def _result_text(content: Any) -> Any:
    """Return the content of a tool result: text, text parts, or an object as JSON."""
    parts = [_typed(part) for part in content] if isinstance(content, list) else []
    if parts and all(_is_one_of(part, (*TEXT_PARTS, RESULT_PART)) for part in parts):
        return "".join(_text("", 0, p) if p["type"] in TEXT_PARTS else _result_text(p["content"]) for p in parts)
    if content is None or isinstance(content, str):
        return content or ""
    is_media = any(isinstance(part, dict) and "type" in part for part in parts)  # refused later, with its type
    return content if is_media else json.dumps(content, ensure_ascii=False)


def joined_text(place: str, name: str, value: Any) -> Any:
    """Return the text of Gemini's, Anthropic's or Bedrock's system prompt in parts; any other value unchanged.

    Raises: UserError for a part other than text.
    """
    parts = value.get("parts") if isinstance(value, dict) else value
    if not isinstance(parts, list):
        return value
    typed = [_typed(part) for part in parts]
    if not all(_is_one_of(part, TEXT_PARTS) for part in typed):
        raise UserError(f"{place}: column {name!r} must be a string or a list of text parts.")
    return "\n\n".join(_text(place, 0, part) for part in typed)


def from_parts(place: str, i: int, turn: dict[str, Any], parts: list) -> tuple[dict[str, Any], str]:
    """Return turn `i` with the reasoning and the calls of its content's parts, and its text.

    Parts are OpenAI's ({"type": "text", "text": ...}), LLaMA-Factory's (`value`), Anthropic's and Mistral's.
    Raises: UserError for a part that is neither text, reasoning nor a tool call.
    """
    parts = [_typed(part) for part in parts]
    kinds = (*TEXT_PARTS, *REASONING_PARTS, *CALL_PARTS) if role_of(turn) == "assistant" else TEXT_PARTS
    other = [_kind(part) for part in parts if not _is_one_of(part, kinds)]
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


def _kind(part: Any) -> Any:
    """Return the type of an unknown part, or its keys."""
    return part.get("type") or ", ".join(map(str, part)) if isinstance(part, dict) else part


def _is_one_of(part: Any, kinds: tuple[str, ...]) -> bool:
    return isinstance(part, dict) and part.get("type") in kinds


def _text(place: str, i: int, part: dict[str, Any]) -> str:
    keys = ("text", "value", "content") if part["type"] in TEXT_PARTS else (part["type"], "text", "value", "content")
    value = next((part[key] for key in keys if part.get(key) is not None), None)
    # Mistral's thinking is a list of text parts.
    if isinstance(value, list) and all(_is_one_of(inner, TEXT_PARTS) for inner in value):
        return "".join(_text(place, i, inner) for inner in value)
    if not isinstance(value, str):
        raise UserError(f"{place}: the content of turn {i} must be a string, found {describe_type(value)}.")
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
    """Parse the text of a ShareGPT `function_call` turn into tool calls; None for any other text."""
    try:
        parsed = json.loads(text) if isinstance(text, str) else text
    except (TypeError, ValueError, RecursionError):
        return None
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        return None
    return [{"type": "function", "function": {k: call[k] for k in ("name", "arguments")}} for call in calls]
