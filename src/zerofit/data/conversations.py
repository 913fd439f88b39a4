"""Parse rows as conversations: formats, roles, tool calls."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zerofit.base.errors import UserError
from zerofit.data import loss_marks
from zerofit.data.chat_templates import arguments
from zerofit.data.dataset_conventions import turns as conventions

IGNORE = -100  # label that transformers' loss ignores

# Keys of a turn that hold an answer's reasoning, in order of preference; the first is ours.
REASONING = ("reasoning_content", "reasoning", "thinking")

TURN_KEYS = {"role", "from", *conventions.CONTENT_KEYS, "tool_calls", "tool_call_id", "name", *loss_marks.TURN_MARKS}

FLAT_CALL = ("name", "arguments", "parameters")  # keys of a call without a `function` object

SWITCHES = ("/no_think", "/think", "/system_override")  # commands in system texts, which SmolLM3's template removes

TRAIN_ON = ("assistant", "last_turn", "all", "prompt")

TEMPLATE_SECONDS = 20  # limit per conversation; a slower template probably never ends

TEMPLATE_BYTES = 4 << 30  # memory limit for rendering a conversation

PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # code points without assigned characters

CALL_AS_TEXT = "a function_call turn that is not JSON with a name and arguments is read as plain text"

EMPTY_ANSWER = "empty answers are excluded from the loss"

GREETING = "the first turn is the assistant's, before any question; the loss includes it like other answers"

LATER_SYSTEM = "a system turn follows other turns; the chat template writes it in this position"

WRAPPED_TOOLS = 'tools are converted to OpenAI\'s form, {"type": "function", "function": ...}, as servers pass them'

UNANSWERED = "user turns after the last answer are dropped"

PROMPT_IS_LONGER = (
    "the generation prompt ends with text that does not precede the trained answers, such as <think>: prompts at "
    "inference differ from training"
)


def reasoning_lost(where: str, keeper: str) -> str:
    """Return the note about reasoning outside the loss. keeper: the built-in template that writes it, or ""."""
    more = f"; --chat_template {keeper} keeps it" if keeper else ""
    return f"reasoning_content of {where} is not in the loss: the chat template does not write it{more}"


@dataclass
class Conversation:
    """Chat turns for the template."""

    turns: list[dict]
    trained: list[bool]  # per turn: whether it is an answer in the loss
    tools: list | None = None
    notes: tuple[str, ...] = ()  # warnings about a row that is used
    template_arguments: dict[str, Any] = field(default_factory=dict)  # the row's arguments for the chat template


def begins_conversation(turns: Any) -> bool:
    """Return whether the first turn is a system or user turn, as in a complete conversation."""
    first = turns[0] if isinstance(turns, list) and turns else None
    return conventions.is_exchange(first) or conventions.role_of(first) in ("system", "user")


def unused_keys(column: str, turns: Any) -> list[str]:
    """Return the ignored non-empty keys of turns, as `column[].key`."""
    turns = [turns] if isinstance(turns, dict) else turns
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return []
    unknown = {
        str(key)
        for turn in turns
        if isinstance(turn, dict) and not turn.keys() <= TURN_KEYS
        for key in turn.keys() - TURN_KEYS
        if not (conventions.is_exchange(turn) and str(key).lower() in conventions.EXCHANGE)
        if turn[key] not in (None, "", [], {}) and not (key in REASONING and isinstance(turn[key], str))
    }
    return [f"{column}[].{key}" for key in sorted(unknown)]


def with_input(place: str, instruction: str, row: dict[str, Any]) -> str:
    """Return Alpaca's question: the instruction and a non-empty `input`."""
    context = string(place, "input", row["input"]) if row.get("input") else ""
    return "\n\n".join(part for part in (instruction, context) if part.strip()) or instruction


def string(place: str, column: str, value: Any) -> str:
    """Check that a value is a string, and return it. column: its name, or "content of turn 1"."""
    what = f"the {column}" if " of turn " in column else f"column {column!r}"
    if not isinstance(value, str):
        raise UserError(f"{place}: {what} must be a string, found {conventions.describe_type(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: {what} contains a lone surrogate (half a Unicode character).") from None
    return value


def history_of(place: str, history: Any) -> list[dict]:
    """Return the turns of LLaMA-Factory's `history`, a list of (instruction, response) pairs."""
    turns = []
    for pair in history if isinstance(history, list) else [history] if history else []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"{place}: 'history' must be a list of [instruction, response] pairs.")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def turns_of(place: str, messages: Any, row: dict, drop_unanswered: bool = False) -> Conversation:
    """Convert turns (role/content or from/value) to standard roles, and check their order.

    Args: drop_unanswered: drop user turns after the last answer.
    """
    messages, notes = conventions.with_roles(place, messages)
    if drop_unanswered:
        kept = len(messages)
        while kept and conventions.role_of(messages[kept - 1]) == "user":
            kept -= 1
        if kept < len(messages) and any(conventions.role_of(message) == "assistant" for message in messages):
            messages, notes = messages[:kept], (*notes, UNANSWERED)
    system = conventions.joined_text(place, "system", row.get("system"))
    turns = [{"role": "system", "content": string(place, "system", system)}] if system else []
    trained, has_empty, as_text = [False] * len(turns), False, False
    for i, message in enumerate(messages, 1):
        turn, train = _turn(place, i, message)
        turns.append(turn)
        trained.append(train and not is_empty(turn))
        has_empty = has_empty or (train and not trained[-1])
        as_text = as_text or ("tool_calls" not in turn and conventions.is_call(message))
    notes += _check_order(place, turns)
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: column 'tools' is not valid JSON: {error}.") from None
    notes += tuple(note for note, is_true in ((EMPTY_ANSWER, has_empty), (CALL_AS_TEXT, as_text)) if is_true)
    tools, wrapped = _tools(tools)
    notes += (WRAPPED_TOOLS,) if wrapped else ()
    return Conversation(turns, trained, tools or None, notes, arguments.row_arguments(place, row))


def _tools(tools: Any) -> tuple[Any, bool]:
    """Return the tools in OpenAI's form, which servers pass to templates, and whether any had another form.

    Wrap bare functions, rename Anthropic's `input_schema` to `parameters`, split Gemini's declarations into tools.
    """
    if not isinstance(tools, list):
        return tools, False
    result: list = []
    for entry in tools:
        declared = isinstance(entry, dict) and (entry.get("functionDeclarations") or entry.get("function_declarations"))
        for tool in declared if isinstance(declared, list) else [entry]:
            is_bare = isinstance(tool, dict) and isinstance(tool.get("name"), str) and "function" not in tool
            if is_bare and tool.get("type", "function") == "function" and {"parameters", "input_schema"} & tool.keys():
                function = {"parameters" if key == "input_schema" else key: value for key, value in tool.items()}
                tool = {"type": "function", "function": {k: v for k, v in function.items() if k != "type"}}
            result.append(tool)
    return result, result != tools


def _turn(place: str, i: int, message: Any) -> tuple[dict, bool]:
    if not isinstance(message, dict):
        raise UserError(f"{place}: turn {i} must be an object with role and content.")
    role, content = conventions.role_of(message), conventions.content_of(message)
    if role is None:
        unknown, known = message.get("role", message.get("from")), sorted(set(conventions.ROLES.values()))
        others = ", ".join(name for name in conventions.ROLES if name not in known)
        raise UserError(f"{place}: turn {i} has the role {unknown!r}; use {', '.join(known)} (or {others}).")
    if isinstance(content, str) and len(message) == 2 and not conventions.is_call(message):  # most turns
        return {"role": role, "content": string(place, f"content of turn {i}", content)}, role == "assistant"
    if isinstance(content, list):
        message, content = conventions.from_parts(place, i, message, content)
    calls = message.get("tool_calls")
    if conventions.is_call(message) and not calls and (calls := conventions.function_calls(content)):
        message, content = message | {"tool_calls": calls}, None
    if content is None and calls:
        content = ""
    if message.get("function_call") and not calls:
        raise UserError(
            f"{place}: turn {i} has OpenAI's deprecated `function_call`; convert it to `tool_calls`, and the column "
            "`functions` to `tools`."
        )
    turn = {"role": role, "content": string(place, f"content of turn {i}", content)}
    if calls:
        message = message | {"tool_calls": _calls(place, i, calls)}
    turn |= {k: message[k] for k in ("tool_calls", "tool_call_id", "name") if message.get(k) is not None}
    alternatives = (message[key] for key in REASONING if message.get(key) and isinstance(message[key], str))
    reasoning = message.get("reasoning_content") or next(alternatives, None)
    if reasoning:
        turn["reasoning_content"] = string(place, f"reasoning of turn {i}", reasoning)
    return turn, loss_marks.is_trained(place, i, turn["role"], message)


def is_empty(turn: dict) -> bool:
    """Return whether a turn is without text, reasoning and tool calls."""
    return not (turn["content"].strip() or turn.get("tool_calls") or turn.get("reasoning_content", "").strip())


def _calls(place: str, i: int, calls: Any) -> list[dict]:
    """Return tool calls with arguments as objects: templates would JSON-encode OpenAI's strings again."""
    try:
        json.dumps(calls, ensure_ascii=False).encode()
        parsed = []
        for call in calls:
            if "function" not in call and "name" in call:  # flat, as Llama 3 writes them
                function = {"name": call["name"], "arguments": call.get("arguments", call.get("parameters", {}))}
                rest = {key: value for key, value in call.items() if key not in FLAT_CALL}
                call = {"type": "function", **rest, "function": function}
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


def _check_order(place: str, turns: list[dict]) -> tuple[str, ...]:
    """Return notes on an unusual order of turns.

    Raises: UserError for consecutive user turns, a tool result without a call, or a question or answer alone.
    """
    notes = []
    for i, (before, turn) in enumerate(zip([None, *turns], turns, strict=False), 1):
        role, role_before = turn["role"], before["role"] if before else None
        if role == "system" and role_before not in (None, "system"):
            notes.append(LATER_SYSTEM)
        if role == "assistant" and all(earlier["role"] == "system" for earlier in turns[: i - 1]):
            notes.append(GREETING)
        if role == "user" and role_before == "user":
            raise UserError(f"{place}: turns {i - 1} and {i} are both user turns; join them or insert the answer.")
        if role == "tool" and role_before not in ("assistant", "tool"):
            raise UserError(f"{place}: turn {i} is a tool result, but no assistant turn precedes it.")
    if turns[-1]["role"] not in ("assistant", "tool") or not any(t["role"] == "assistant" for t in turns):
        raise UserError(f"{place}: the last turn is not an assistant turn; add the answer or remove the row.")
    if len(turns) == sum(turn["role"] in ("system", "assistant") for turn in turns):
        i = next(i for i, turn in enumerate(turns, 1) if turn["role"] == "assistant")
        raise UserError(f"{place}: turn {i} is an answer without a question; insert a user turn before it.")
    return tuple(dict.fromkeys(notes))
