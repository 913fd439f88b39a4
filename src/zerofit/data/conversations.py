"""Parse rows as conversations: formats, roles, tool calls."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zerofit.base.errors import UserError
from zerofit.data import meaning
from zerofit.data.chat_templates import arguments

IGNORE = -100  # label that transformers' loss ignores


# Role names of published datasets -> the standard role.
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
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}

# Keys of a turn that hold an answer's reasoning, in order of preference; the first is ours.
REASONING = ("reasoning_content", "reasoning", "thinking")

TURN_KEYS = {"role", "from", "content", "value", "tool_calls", "tool_call_id", "name", *meaning.TURN_MARKS}

SWITCHES = ("/no_think", "/think", "/system_override")  # words of a system text that SmolLM3's template obeys

TRAIN_ON = ("assistant", "last_turn", "all", "prompt")

TEMPLATE_SECONDS = 20  # per conversation; a template that takes longer is taken to loop forever

PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # code points without a character

CALL_AS_TEXT = "a function_call turn that is not JSON with a name and arguments is taken as plain text"

EMPTY_ANSWER = "an empty answer is not trained on"

PROMPT_GOES_ON = (
    "the template's generation prompt ends with text that does not precede the trained answers, such as <think>: a "
    "model that has learned them will be asked in another way"
)


def reasoning_lost(where: str, keeper: str) -> str:
    """Return the note about reasoning that is not trained on. keeper: the built-in template that writes it, or ""."""
    more = f", --chat_template {keeper} keeps it" if keeper else ""
    return f"reasoning_content of {where} is not trained on: the chat template does not write it{more}"


@dataclass
class Conversation:
    """Chat turns for the template."""

    turns: list[dict]
    trained: list[bool]  # for each turn: whether it is an answer to train on (`train` of the data)
    tools: list | None = None
    notes: tuple[str, ...] = ()  # warnings about a row that is still used
    template_arguments: dict[str, Any] = field(default_factory=dict)  # of this row for the chat template


def begins_conversation(turns: Any) -> bool:
    """Return whether turns begin as a whole conversation does, with a system or user turn."""
    first = turns[0] if isinstance(turns, list) and turns else None
    role = first.get("role", first.get("from")) if isinstance(first, dict) else None
    return isinstance(role, str) and ROLES.get(role) in ("system", "user")


def keys_not_used(column: str, turns: Any) -> list[str]:
    """Return the keys of turns that are not empty and that are ignored, as `column[].key`."""
    turns = [turns] if isinstance(turns, dict) else turns
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return []
    unknown = {
        str(key)
        for turn in turns
        if isinstance(turn, dict) and not turn.keys() <= TURN_KEYS
        for key in turn.keys() - TURN_KEYS
        if turn[key] not in (None, "", [], {}) and not (key in REASONING and isinstance(turn[key], str))
    }
    return [f"{column}[].{key}" for key in sorted(unknown)]


def with_input(place: str, instruction: str, row: dict[str, Any]) -> str:
    """Return Alpaca's question: the instruction and its `input`, of which an empty one is left out."""
    given = string(place, "input", row["input"]) if row.get("input") else ""
    return "\n\n".join(part for part in (instruction, given) if part.strip()) or instruction


def string(place: str, column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: column {column!r} must be a string, found a {type(value).__name__}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: column {column!r} has half a unicode character (a lone surrogate).") from None
    return value


def history_of(place: str, history: Any) -> list[dict]:
    """Return the turns of LLaMA-Factory's `history`, a list of (instruction, response) pairs."""
    turns = []
    for pair in history if isinstance(history, list) else [history] if history else []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"{place}: 'history' must be a list of [instruction, response] pairs.")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def turns_of(place: str, messages: Any, row: dict) -> Conversation:
    """Convert turns (role/content or from/value) to standard roles, and check their order."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{place}: the conversation must be a list of turns that is not empty.")
    system = row.get("system")
    turns = [{"role": "system", "content": string(place, "system", system)}] if system else []
    trained, has_empty = [False] * len(turns), False
    for i, message in enumerate(messages, 1):
        turn, train = _turn(place, i, message)
        turns.append(turn)
        trained.append(train and not is_empty(turn))
        has_empty = has_empty or (train and not trained[-1])
    _check_order(place, turns)
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: column 'tools' is not valid JSON: {error}.") from None
    as_text = any(
        isinstance(m, dict) and m.get("role", m.get("from")) == "function_call" and "tool_calls" not in turn
        for m, turn in zip(messages, turns[-len(messages) :], strict=True)
    )
    notes = tuple(note for note, is_true in ((EMPTY_ANSWER, has_empty), (CALL_AS_TEXT, as_text)) if is_true)
    return Conversation(turns, trained, tools or None, notes, arguments.of_row(place, row))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def _function_calls(text: Any) -> list[dict] | None:
    """Parse the text of a ShareGPT `function_call` turn into tool calls; None if it holds none."""
    try:
        parsed = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        return None
    return [{"type": "function", "function": {k: call[k] for k in ("name", "arguments")}} for call in calls]


def _turn(place: str, i: int, message: Any) -> tuple[dict, bool]:
    if not isinstance(message, dict):
        raise UserError(f"{place}: turn {i} must be an object with a role and a content.")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        known = sorted(set(ROLES.values()))
        others = ", ".join(name for name in ROLES if name not in known)
        raise UserError(f"{place}: turn {i} has the role {role!r}; known: {', '.join(known)} (and {others}).")
    calls = message.get("tool_calls")
    if role == "function_call" and not calls and (calls := _function_calls(content)):
        message, content = message | {"tool_calls": calls}, None
    if isinstance(content, list):  # a list of parts, as in OpenAI's API
        other = [part.get("type") if isinstance(part, dict) else part for part in content if not _is_text(part)]
        if other:
            raise UserError(
                f"{place}: turn {i} has content other than text ({', '.join(map(repr, other[:3]))}); this recipe "
                "trains on text only."
            )
        # LLaMA-Factory's key is `value`
        content = "".join(
            string(place, f"content of turn {i}", part.get("text", part.get("value"))) for part in content
        )
    if content is None and calls:
        content = ""
    if message.get("function_call") and not calls:
        raise UserError(
            f"{place}: turn {i} has OpenAI's old `function_call`; write it as `tool_calls`, and the column `functions` "
            "as `tools`."
        )
    turn = {"role": ROLES[role], "content": string(place, f"content of turn {i}", content)}
    if calls:
        message = message | {"tool_calls": _calls(place, i, calls)}
    turn |= {k: message[k] for k in ("tool_calls", "tool_call_id", "name") if message.get(k) is not None}
    reasoning = message.get("reasoning_content") or _reasoning(message)
    if reasoning:
        turn["reasoning_content"] = string(place, f"reasoning of turn {i}", reasoning)
    return turn, meaning.is_trained(place, i, turn["role"], message)


def is_empty(turn: dict) -> bool:
    """Return whether a turn has no text, no reasoning and no tool call."""
    return not (turn["content"].strip() or turn.get("tool_calls") or turn.get("reasoning_content", "").strip())


def _reasoning(message: dict) -> str | None:
    return next((message[key] for key in REASONING if message.get(key) and isinstance(message[key], str)), None)


def _calls(place: str, i: int, calls: Any) -> list[dict]:
    """Return tool calls with arguments as objects: templates would encode OpenAI's JSON strings twice."""
    try:
        json.dumps(calls, ensure_ascii=False).encode()
        parsed = []
        for call in calls:
            function = call.get("function", call)
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                function = function | {"arguments": json.loads(arguments)}
            parsed.append(call | {"function": function} if "function" in call else function)
        return parsed
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise UserError(f"{place}: turn {i}: 'tool_calls' is not a list of calls with JSON arguments.") from None


def with_text_arguments(turn: dict) -> dict:
    """Return a turn with the arguments of its tool calls as JSON text."""
    calls = []
    for call in turn.get("tool_calls", ()):
        function = call.get("function", call)
        function = function | {"arguments": json.dumps(function.get("arguments", {}), ensure_ascii=False)}
        calls.append(call | {"function": function} if "function" in call else function)
    return turn | {"tool_calls": calls} if calls else turn


def tool_names(calls_or_tools: Any) -> list[str]:
    """Return the function names in a list of tool calls or tools."""
    listed = [entry for entry in calls_or_tools or [] if isinstance(entry, dict)]
    functions = [entry.get("function", entry) for entry in listed]
    return [f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)]


def strings(value: Any) -> Iterator[str]:
    """Yield every string in nested lists and dictionaries, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for pair in value.items():
            yield from strings(pair)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from strings(part)


def map_strings(change, value: Any) -> Any:
    """Apply `change` to every string in nested lists and dictionaries, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_strings(change, k): map_strings(change, v) for k, v in value.items()}
    return [map_strings(change, part) for part in value] if isinstance(value, list) else value


def _check_order(place: str, turns: list[dict]) -> None:
    for i, (before, turn) in enumerate(zip([None, *turns], turns, strict=False), 1):
        role, role_before = turn["role"], before["role"] if before else None
        if role == "system" and role_before not in (None, "system"):
            raise UserError(f"{place}: turn {i} is a system turn behind others; it must come first.")
        if role == "assistant" and role_before in (None, "system"):
            raise UserError(f"{place}: turn {i} is an answer that nothing was asked for; a user turn must precede it.")
        if role == "user" and role_before == "user":
            raise UserError(f"{place}: turns {i - 1} and {i} are both the user's; join them or insert the answer.")
        if role == "tool" and role_before not in ("assistant", "tool"):
            raise UserError(f"{place}: turn {i} is a tool's result, but no assistant turn precedes it.")
    if turns[-1]["role"] not in ("assistant", "tool") or not any(t["role"] == "assistant" for t in turns):
        raise UserError(f"{place}: the conversation does not end in an assistant turn, so there is nothing to learn.")
