"""Parse rows as conversations: formats, roles, tool calls."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zerofit.base.errors import UserError
from zerofit.data import meaning
from zerofit.data.chat_templates import arguments
from zerofit.data.published import turns as published

IGNORE = -100  # label that transformers' loss ignores


# Keys of a turn that hold an answer's reasoning, in order of preference; the first is ours.
REASONING = ("reasoning_content", "reasoning", "thinking")

TURN_KEYS = {"role", "from", *published.CONTENT_KEYS, "tool_calls", "tool_call_id", "name", *meaning.TURN_MARKS}

FLAT_CALL = ("name", "arguments", "parameters")  # keys of a call that stands without its `function`

SWITCHES = ("/no_think", "/think", "/system_override")  # words of a system text that SmolLM3's template obeys

TRAIN_ON = ("assistant", "last_turn", "all", "prompt")

TEMPLATE_SECONDS = 20  # per conversation; a template that takes longer is taken to loop forever

TEMPLATE_BYTES = 4 << 30  # that rendering a conversation may take

PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # code points without a character

CALL_AS_TEXT = "a function_call turn that is not JSON with a name and arguments is taken as plain text"

EMPTY_ANSWER = "an empty answer is not trained on"

GREETING = "the first turn is the assistant's, before anything is asked; it is trained on as any answer"

LATER_SYSTEM = "a system turn stands behind other turns, where the chat template writes it"

WRAPPED_TOOLS = 'tools are written in OpenAI\'s form, {"type": "function", "function": ...}, as servers give them'

UNANSWERED = "the last turn is the user's, without an answer; it is left out"

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
    return published.is_exchange(first) or published.role_of(first) in ("system", "user")


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
        if not (published.is_exchange(turn) and str(key).lower() in published.EXCHANGE)
        if turn[key] not in (None, "", [], {}) and not (key in REASONING and isinstance(turn[key], str))
    }
    return [f"{column}[].{key}" for key in sorted(unknown)]


def with_input(place: str, instruction: str, row: dict[str, Any]) -> str:
    """Return Alpaca's question: the instruction and its `input`, of which an empty one is left out."""
    given = string(place, "input", row["input"]) if row.get("input") else ""
    return "\n\n".join(part for part in (instruction, given) if part.strip()) or instruction


def string(place: str, column: str, value: Any) -> str:
    """Return a value that is a string. column: its name, or "content of turn 1"."""
    what = f"the {column}" if " of turn " in column else f"column {column!r}"
    if not isinstance(value, str):
        raise UserError(f"{place}: {what} must be a string, found {published.found(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{place}: {what} has half a unicode character (a lone surrogate).") from None
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

    Args: drop_unanswered: leave out turns of the user behind the last answer.
    """
    messages, said = published.with_roles(place, messages)
    if drop_unanswered:
        kept = len(messages)
        while kept and published.role_of(messages[kept - 1]) == "user":
            kept -= 1
        if kept < len(messages) and any(published.role_of(message) == "assistant" for message in messages):
            messages, said = messages[:kept], (*said, UNANSWERED)
    system = published.joined_text(place, "system", row.get("system"))
    turns = [{"role": "system", "content": string(place, "system", system)}] if system else []
    trained, has_empty = [False] * len(turns), False
    for i, message in enumerate(messages, 1):
        turn, train = _turn(place, i, message)
        turns.append(turn)
        trained.append(train and not is_empty(turn))
        has_empty = has_empty or (train and not trained[-1])
    said += _check_order(place, turns)
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: column 'tools' is not valid JSON: {error}.") from None
    as_text = any(
        published.is_call(message) and "tool_calls" not in turn
        for message, turn in zip(messages, turns[-len(messages) :], strict=True)
    )
    said += tuple(note for note, is_true in ((EMPTY_ANSWER, has_empty), (CALL_AS_TEXT, as_text)) if is_true)
    tools, wrapped = _tools(tools)
    said += (WRAPPED_TOOLS,) if wrapped else ()
    return Conversation(turns, trained, tools or None, said, arguments.of_row(place, row))


def _tools(tools: Any) -> tuple[Any, bool]:
    """Return the tools in OpenAI's form, which servers give a template, and whether some had another.

    Bare functions are wrapped, Anthropic's `input_schema` becomes `parameters`, Gemini's declarations a tool each.
    """
    if not isinstance(tools, list):
        return tools, False
    made: list = []
    for tool in tools:
        declared = isinstance(tool, dict) and (tool.get("functionDeclarations") or tool.get("function_declarations"))
        for one in declared if isinstance(declared, list) else [tool]:
            is_bare = isinstance(one, dict) and isinstance(one.get("name"), str) and "function" not in one
            if is_bare and one.get("type", "function") == "function" and {"parameters", "input_schema"} & one.keys():
                function = {"parameters" if key == "input_schema" else key: value for key, value in one.items()}
                one = {"type": "function", "function": {k: v for k, v in function.items() if k != "type"}}
            made.append(one)
    return made, made != tools


def _turn(place: str, i: int, message: Any) -> tuple[dict, bool]:
    if not isinstance(message, dict):
        raise UserError(f"{place}: turn {i} must be an object with a role and a content.")
    role, content = published.role_of(message), published.content_of(message)
    if role is None:
        named, known = message.get("role", message.get("from")), sorted(set(published.ROLES.values()))
        others = ", ".join(name for name in published.ROLES if name not in known)
        raise UserError(f"{place}: turn {i} has the role {named!r}; known: {', '.join(known)} (and {others}).")
    if isinstance(content, list):
        message, content = published.from_parts(place, i, message, content)
    calls = message.get("tool_calls")
    if published.is_call(message) and not calls and (calls := published.function_calls(content)):
        message, content = message | {"tool_calls": calls}, None
    if content is None and calls:
        content = ""
    if message.get("function_call") and not calls:
        raise UserError(
            f"{place}: turn {i} has OpenAI's old `function_call`; write it as `tool_calls`, and the column `functions` "
            "as `tools`."
        )
    turn = {"role": role, "content": string(place, f"content of turn {i}", content)}
    if calls:
        message = message | {"tool_calls": _calls(place, i, calls)}
    turn |= {k: message[k] for k in ("tool_calls", "tool_call_id", "name") if message.get(k) is not None}
    of_others = (message[key] for key in REASONING if message.get(key) and isinstance(message[key], str))
    reasoning = message.get("reasoning_content") or next(of_others, None)
    if reasoning:
        turn["reasoning_content"] = string(place, f"reasoning of turn {i}", reasoning)
    return turn, meaning.is_trained(place, i, turn["role"], message)


def is_empty(turn: dict) -> bool:
    """Return whether a turn has no text, no reasoning and no tool call."""
    return not (turn["content"].strip() or turn.get("tool_calls") or turn.get("reasoning_content", "").strip())


def _calls(place: str, i: int, calls: Any) -> list[dict]:
    """Return tool calls with arguments as objects: templates would encode OpenAI's JSON strings twice."""
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

    Raises: UserError for an order in which something is not answered, or nothing is.
    """
    said = []
    for i, (before, turn) in enumerate(zip([None, *turns], turns, strict=False), 1):
        role, role_before = turn["role"], before["role"] if before else None
        if role == "system" and role_before not in (None, "system"):
            said.append(LATER_SYSTEM)
        if role == "assistant" and all(earlier["role"] == "system" for earlier in turns[: i - 1]):
            said.append(GREETING)
        if role == "user" and role_before == "user":
            raise UserError(f"{place}: turns {i - 1} and {i} are both the user's; join them or insert the answer.")
        if role == "tool" and role_before not in ("assistant", "tool"):
            raise UserError(f"{place}: turn {i} is a tool's result, but no assistant turn precedes it.")
    if turns[-1]["role"] not in ("assistant", "tool") or not any(t["role"] == "assistant" for t in turns):
        raise UserError(f"{place}: the conversation does not end in an assistant turn, so there is nothing to learn.")
    if len(turns) == sum(turn["role"] in ("system", "assistant") for turn in turns):
        i = next(i for i, turn in enumerate(turns, 1) if turn["role"] == "assistant")
        raise UserError(f"{place}: turn {i} is an answer that nothing was asked for; a user turn must precede it.")
    return tuple(dict.fromkeys(said))
