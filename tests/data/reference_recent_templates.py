# ruff: noqa: RUF001 -- DeepSeek's control words have wide bars
"""The chat formats of newer model families, by hand in Python without jinja, beside those of reference_templates."""

import json
from datetime import datetime

from reference_templates import Piece, answer_of, as_json, framed

QWEN_XML = """# Tools

You have access to the following functions:

<tools>
{}
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within \
<tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
</IMPORTANT>"""

GLM_TOOLS = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, output the function name and arguments within the following XML format:
<tool_call>{{function-name}}
<arg_key>{{arg-key-1}}</arg_key>
<arg_value>{{arg-value-1}}</arg_value>
<arg_key>{{arg-key-2}}</arg_key>
<arg_value>{{arg-value-2}}</arg_value>
...
</tool_call>"""

GRANITE_TOOLS = """You are a helpful assistant with access to the following tools. You may call one or more tools to \
assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each tool call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>. If a tool does not exist in the provided list of tools, notify the user that you do not have the ability \
to fulfill the request."""

LLAMA4_TOOLS = """Given the following functions, please respond with a JSON for a function call with its proper \
arguments that best answers the given prompt.

Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.Do not use \
variables.

"""

DEEPSEEK_TOOLS = """IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>\
{{additional_tool_calls}}<｜tool▁calls▁end｜>

Where:

- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""

SMOLLM_TOOLS = """### Tools

You may call one or more functions to assist with the user query.
You are provided with function signatures within <tools></tools> XML tags:

<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>

"""


def today(spelling: str) -> str:
    return datetime.now().strftime(spelling)


def thought(turn: dict, strip: str | None = "\n") -> tuple[str, str]:
    """The reasoning and the text of an answer; a block that stands in the text is its reasoning."""
    reasoning, text = turn.get("reasoning_content", ""), turn["content"]
    is_block = text.lstrip().startswith("<think>") or "<think>" not in text
    if not reasoning.strip() and "</think>" in text and is_block:
        head, _, text = text.partition("</think>")
        reasoning, text = head.replace("<think>", "", 1), text.lstrip("\n")
    return reasoning.strip(strip), text


def functions(turn: dict) -> list[dict]:
    return [call["function"] for call in turn.get("tool_calls", ())]


def in_words(text: str, words: list[str], turn: int | None) -> list[Piece]:
    """Cut a text at its control words."""
    pieces: list[Piece] = []
    while text:
        at, word = min((text.find(w) if w in text else len(text), w) for w in words)
        pieces.append((text[:at], False, turn))
        if at < len(text):
            pieces.append((word, True, turn))
        text = text[at + len(word) :]
    return pieces


def results_of(turns: list[dict], i: int) -> list[str] | None:
    """The results that end with turn `i`, which no further result follows; None elsewhere."""
    if turns[i]["role"] != "tool" or (i + 1 < len(turns) and turns[i + 1]["role"] == "tool"):
        return None
    first = i
    while turns[first - 1]["role"] == "tool":
        first -= 1
    return [turn["content"] for turn in turns[first : i + 1]]


def qwen35(turns, tools):
    system = turns[0]["content"].strip() if turns[0]["role"] == "system" else ""
    parts = [QWEN_XML.format("\n".join(map(as_json, tools)))] if tools else []
    parts += [system] if system or turns[0]["role"] == "system" else []
    pieces = framed("<|im_start|>", "system", "\n", "\n\n".join(parts), "<|im_end|>", "\n", None) if parts else []
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            pieces += framed("<|im_start|>", "user", "\n", turn["content"].strip(), "<|im_end|>", "\n", None)
        elif results := results_of(turns, i):
            text = "\n".join(f"<tool_response>\n{result.strip()}\n</tool_response>" for result in results)
            pieces += framed("<|im_start|>", "user", "\n", text, "<|im_end|>", "\n", None)
        elif turn["role"] == "assistant":
            reasoning, text = thought(turn, None)
            calls = []
            for function in functions(turn):
                values = [
                    f"<parameter={name}>\n{value if isinstance(value, str) else as_json(value)}\n</parameter>\n"
                    for name, value in function["arguments"].items()
                ]
                calls.append(f"<tool_call>\n<function={function['name']}>\n{''.join(values)}</function>\n</tool_call>")
            text = text.strip() + ("\n\n" if text.strip() and calls else "") + "\n".join(calls)
            text = f"{reasoning}\n</think>\n\n{text}"
            pieces += framed("<|im_start|>", "assistant\n<think>", "\n", text, "<|im_end|>", "\n", i)
    return pieces


def deepseek_v3(turns, tools):
    end = "<｜end▁of▁sentence｜>"
    pieces: list[Piece] = [("<｜begin▁of▁sentence｜>", True, None)]
    for i, turn in enumerate(turns):
        if turn["role"] == "system":
            pieces.append((turn["content"], False, None))
        elif turn["role"] == "user":
            pieces += [("<｜User｜>", True, None), (turn["content"], False, None)]
        elif results := results_of(turns, i):
            pieces.append(("<｜tool▁outputs▁begin｜>", True, None))
            for text in results:
                pieces += between("<｜tool▁output▁begin｜>", text, "<｜tool▁output▁end｜>")
            pieces.append(("<｜tool▁outputs▁end｜>", True, None))
        elif turn["role"] == "assistant":
            if turns[i - 1]["role"] != "tool":
                pieces.append(("<｜Assistant｜>", True, None))
            pieces.append((turn["content"], False, i))
            for number, function in enumerate(functions(turn)):
                pieces.append(("\n", False, i) if number else ("<｜tool▁calls▁begin｜>", True, i))
                pieces += [
                    ("<｜tool▁call▁begin｜>", True, i), ("function", False, i), ("<｜tool▁sep｜>", True, i),
                    (f"{function['name']}\n```json\n{as_json(function['arguments'])}\n```", False, i),
                    ("<｜tool▁call▁end｜>", True, i),
                ]  # fmt: skip
            pieces += [("<｜tool▁calls▁end｜>", True, i)] * bool(functions(turn)) + [(end, True, i)]
    return pieces


def between(opening: str, text: str, closing: str) -> list[Piece]:
    return [(opening, True, None), (text, False, None), (closing, True, None)]


def deepseek_r1(turns, tools):
    pieces: list[Piece] = [("<｜begin▁of▁sentence｜>", True, None)]
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            reasoning, text = thought(turn)
            pieces += [("<｜Assistant｜>", True, None), ("<think>\n", False, None)]
            pieces += [(f"{reasoning}\n</think>\n\n{text}", False, i), ("<｜end▁of▁sentence｜>", True, i)]
        elif turn["role"] == "user":
            pieces += [("<｜User｜>", True, None), (turn["content"], False, None)]
        else:
            pieces.append((turn["content"], False, None))
    return pieces


def deepseek_v31(turns, tools, thinking=False):
    system = turns[0]["content"] if turns[0]["role"] == "system" else ""
    pieces: list[Piece] = [("<｜begin▁of▁sentence｜>", True, None), (system, False, None)]
    if tools:
        text = "## Tools\nYou have access to the following tools:\n\n"
        for tool in tools:
            function = tool["function"]
            text += f"### {function['name']}\nDescription: {function['description']}\n\n"
            text += f"Parameters: {as_json(function.get('parameters', {}))}\n\n"
        words = [f"<｜tool▁{w}｜>" for w in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
        pieces.append(("\n\n" * bool(system) + text, False, None))
        pieces += in_words(DEEPSEEK_TOOLS, words, None)
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            pieces += [("<｜User｜>", True, None), (turn["content"], False, None)]
        elif turn["role"] == "tool":
            pieces += between("<｜tool▁output▁begin｜>", turn["content"], "<｜tool▁output▁end｜>")
        elif turn["role"] == "assistant":
            reasoning, text = turn.get("reasoning_content", ""), turn["content"]
            if not reasoning and text.startswith("<think>") and "</think>" in text:
                reasoning, _, text = text.removeprefix("<think>").partition("</think>")
            if turns[i - 1]["role"] != "tool":
                pieces.append(("<｜Assistant｜>", True, None))
                if thinking or reasoning:
                    pieces += [("<think>", False, None), (f"{reasoning}</think>", False, i)]
                else:
                    pieces.append(("</think>", False, None))
            pieces.append((text, False, i))
            for number, function in enumerate(functions(turn)):
                pieces += [("<｜tool▁calls▁begin｜>", True, i)] * (number == 0)
                pieces += [
                    ("<｜tool▁call▁begin｜>", True, i), (function["name"], False, i), ("<｜tool▁sep｜>", True, i),
                    (as_json(function["arguments"]), False, i), ("<｜tool▁call▁end｜>", True, i),
                ]  # fmt: skip
            pieces += [("<｜tool▁calls▁end｜>", True, i)] * bool(functions(turn))
            pieces.append(("<｜end▁of▁sentence｜>", True, i))
    return pieces


def gpt_oss(turns, tools):
    system = (
        "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
        f"Current date: {today('%Y-%m-%d')}\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    )
    if tools:
        system += "\nCalls to these tools must go to the commentary channel: 'functions'."
    pieces = message("system", system)
    developer = f"# Instructions\n\n{turns[0]['content']}\n\n" if turns[0]["role"] == "system" else ""
    if tools:
        written = [f"// {t['function']['description']}\ntype {t['function']['name']} = () => any;\n\n" for t in tools]
        developer += f"# Tools\n\n## functions\n\nnamespace functions {{\n\n{''.join(written)}}} // namespace functions"
    pieces += message("developer", developer) if developer else []
    called = ""
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            pieces += message("user", turn["content"])
        elif turn["role"] == "tool":
            pieces += message(f"functions.{called} to=assistant", as_json(turn["content"]), "commentary")
        elif turn["role"] == "assistant":
            parts = [("analysis", turn["reasoning_content"], "<|end|>")] if turn.get("reasoning_content") else []
            for function in functions(turn):
                called = function["name"]
                parts.append((f"{called} commentary json", as_json(function["arguments"]), "<|call|>"))
            parts += [("final", turn["content"], "<|return|>")] * (not functions(turn))
            for number, (channel, text, end) in enumerate(parts):
                learned = i if number else None
                pieces += [("<|start|>", True, learned), ("assistant", False, learned)]
                if end == "<|call|>":
                    pieces.append((f" to=functions.{called}", False, i))
                    channel = "commentary json"
                pieces += [("<|channel|>", True, i), (channel, False, i), ("<|message|>", True, i)]
                pieces += [(text, False, i), (end, True, i)]
    return pieces


def message(head: str, text: str, channel: str = "") -> list[Piece]:
    named = [("<|channel|>", True, None), (channel, False, None)] if channel else []
    begun = [("<|start|>", True, None), (head, False, None), *named, ("<|message|>", True, None)]
    return [*begun, (text, False, None), ("<|end|>", True, None)]


def glm(turns, tools):
    pieces: list[Piece] = [("[gMASK]", True, None), ("<sop>", True, None)]
    if tools:
        text = GLM_TOOLS.format("\n".join(map(as_json, tools)))
        pieces += [("<|system|>", True, None), (text, False, None)]
    begun = ""  # the word that the answer before ends with
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            reasoning, text = thought(turn, None)
            text = f"\n<think>{reasoning}</think>" + (f"\n{text.strip()}" if text.strip() else "")
            for function in functions(turn):
                text += f"\n<tool_call>{function['name']}\n"
                for name, value in function["arguments"].items():
                    value = value if isinstance(value, str) else as_json(value)
                    text += f"<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"
                text += "</tool_call>"
            begun = "<|observation|>" if functions(turn) else "<|user|>"
            pieces += [("<|assistant|>", True, None), (text, False, i), (begun, True, i)]
            continue
        word = {"user": "<|user|>", "system": "<|system|>"}.get(turn["role"], "")
        pieces.append((word if word != begun else "", True, None))
        text = f"<tool_response>\n{turn['content']}\n</tool_response>" if turn["role"] == "tool" else turn["content"]
        pieces.append(("\n" + text, False, None))
        begun = ""
    return pieces


def gemma4(turns, tools):
    pieces: list[Piece] = [("<bos>", True, None)]
    quote = '<|"|>'
    if tools or turns[0]["role"] == "system":
        pieces += [("<|turn>", True, None), ("system\n", False, None)]
        pieces.append((turns[0]["content"].strip() if turns[0]["role"] == "system" else "", False, None))
        for tool in tools or []:
            function = tool["function"]
            pieces += [("<|tool>", True, None), (f"declaration:{function['name']}{{description:", False, None)]
            pieces += between(quote, function["description"], quote)
            parameters = f",parameters:{{type:{quote}OBJECT{quote}}}" if function.get("parameters") else ""
            pieces += [*in_words(parameters + "}", [quote], None), ("<tool|>", True, None)]
        pieces += [("<turn|>", True, None), ("\n", False, None)]
    calls: list[dict] = []
    for i, turn in enumerate(turns):
        text = turn["content"].strip()
        if turn["role"] == "user":
            pieces += [("<|turn>", True, None), (f"user\n{text}", False, None), ("<turn|>", True, None)]
            pieces.append(("\n", False, None))
        elif turn["role"] == "tool":
            name = next(call["function"]["name"] for call in calls if call["id"] == turn["tool_call_id"])
            if turns[i - 1]["role"] == "tool":
                pieces.append(("<|tool_response>", True, None))
            pieces.append((f"response:{name}{{value:", False, None))
            pieces += [(quote, True, None), (turn["content"], False, None), (quote, True, None), ("}", False, None)]
            pieces.append(("<tool_response|>", True, None))
        elif turn["role"] == "assistant":
            if turns[i - 1]["role"] != "tool":
                pieces += [("<|turn>", True, None), ("model\n", False, None)]
            if turn.get("reasoning_content"):
                pieces += [("<|channel>", True, i), (f"thought\n{turn['reasoning_content']}\n", False, i)]
                pieces.append(("<channel|>", True, i))
            calls = turn.get("tool_calls", [])
            for function in functions(turn):
                pieces += [("<|tool_call>", True, i), (f"call:{function['name']}", False, i)]
                pieces += [*gemma_value(function["arguments"], i), ("<tool_call|>", True, i)]
            if calls:
                pieces.append(("<|tool_response>", True, i))
            else:
                pieces += [(text, False, i), ("<turn|>", True, i), ("\n", False, None)]
    return pieces


def gemma_value(value, turn: int) -> list[Piece]:
    if isinstance(value, str):
        return [('<|"|>', True, turn), (value, False, turn), ('<|"|>', True, turn)]
    if isinstance(value, dict | list):
        keys = sorted(value) if isinstance(value, dict) else [None] * len(value)
        inner = value if isinstance(value, list) else [value[key] for key in keys]
        pieces = [("{" if isinstance(value, dict) else "[", False, turn)]
        for number, (key, part) in enumerate(zip(keys, inner, strict=True)):
            pieces.append(("," * bool(number) + (f"{key}:" if key else ""), False, turn))
            pieces += gemma_value(part, turn)
        return [*pieces, ("}" if isinstance(value, dict) else "]", False, turn)]
    return [(json.dumps(value), False, turn)]


def llama4(turns, tools):
    pieces: list[Piece] = [("<|begin_of_text|>", True, None)]
    asked = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    for i, turn in enumerate(turns):
        role, text, learned = turn["role"], turn["content"], answer_of(turns, i)
        if role == "system":
            text = ("Environment: ipython\n" if tools else "") + text.strip()
        elif role == "tool":
            role, text = "ipython", as_json(text)
        elif i == asked and tools:
            text = LLAMA4_TOOLS + "".join(as_json(tool, indent=4) + "\n\n" for tool in tools) + text.strip()
        pieces += [("<|header_start|>", True, None), (role, False, None), ("<|header_end|>", True, None)]
        pieces.append(("\n\n", False, None))
        if functions(turn):
            pieces += [("<|python_start|>", True, i), (text, False, i), ("<|python_end|>", True, i)]
            text = "".join(as_json({"name": f["name"], "parameters": f["arguments"]}) for f in functions(turn))
        pieces += [(text, False, learned), ("<|eot|>", True, learned)]
    return pieces


def smollm3(turns, tools):
    given = turns[0]["content"] if turns[0]["role"] == "system" else ""
    asked = given.replace("/no_think", "").replace("/think", "").rstrip() or (
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face. Use the format: <think> Thought section "
        "</think> Solution section."
    )
    head = f"system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: {today('%d %B %Y')}\n"
    head += f"Reasoning Mode: /think\n\n## Custom Instructions\n\n{asked}\n\n"
    pieces: list[Piece] = [("<|im_start|>", True, None), (head, False, None)]
    if tools:
        text = SMOLLM_TOOLS.format("\n".join(map(as_json, tools)))
        pieces += [(text, False, None), ("<|im_end|>", True, None), ("\n", False, None)]
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            text, reasoning = turn["content"].lstrip("\n"), turn.get("reasoning_content", "").strip("\n")
            calls = [f"<tool_call>\n{as_json(function)}\n</tool_call>" for function in functions(turn)]
            text = "\n".join([text] * bool(text or not calls) + calls)
            text = (f"<think>\n{reasoning}\n</think>\n" if reasoning else "") + text
            pieces += framed("<|im_start|>", "assistant", "\n", text, "<|im_end|>", "\n", i)
        elif turn["role"] != "system":
            pieces += framed("<|im_start|>", "user", "\n", turn["content"], "<|im_end|>", "\n", None)
    return pieces


def granite_turn(role: str, text: str, turn: int | None = None) -> list[Piece]:
    return framed("<|start_of_role|>", role, "<|end_of_role|>", text, "<|end_of_text|>", "\n", turn)


def granite3(turns, tools):
    if turns[0]["role"] == "system":
        pieces = granite_turn("system", turns[0]["content"])
    else:
        text = (
            f"Knowledge Cutoff Date: April 2024.\nToday's Date: {today('%B %d, %Y')}.\nYou are Granite, developed by "
            "IBM. You are a helpful "
        )
        pieces = granite_turn("system", text + "AI assistant.")
        if tools:
            asked = (
                "assistant with access to the following tools. When a tool is required to answer the user's query, "
                "respond only with <|tool_call|> followed by a JSON list of tools used. If a tool does not exist in "
                "the provided list of tools, notify the user that you do not have the ability to fulfill the request."
            )
            before, after = pieces[:-3], pieces[-2:]
            pieces = [*before, *in_words(text + asked, ["<|tool_call|>"], None), *after]
    if tools:
        pieces += granite_turn("available_tools", as_json(tools, indent=4))
    for i, turn in enumerate(turns):
        if turn["role"] != "system":
            turned = granite_turn(turn["role"], turn["content"], answer_of(turns, i))
            if functions(turn):
                listed = as_json([{"name": f["name"], "arguments": f["arguments"]} for f in functions(turn)])
                turned[-2:-2] = [("<|tool_call|>", True, i), (listed, False, i)]
            pieces += turned
    return pieces


def granite4(turns, tools):
    system = turns[0]["content"] if turns[0]["role"] == "system" else None
    if tools:
        system = (f"{system}\n\n" if system else "") + GRANITE_TOOLS.format("\n".join(map(as_json, tools)))
    default = "You are a helpful assistant. Please ensure responses are professional, accurate, and safe."
    pieces = granite_turn("system", default if system is None else system)
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            pieces += granite_turn("user", turn["content"])
        elif results := results_of(turns, i):
            text = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
            pieces += granite_turn("user", text)
        elif turn["role"] == "assistant":
            calls = [f"<tool_call>\n{as_json(function)}\n</tool_call>" for function in functions(turn)]
            text = "\n".join([turn["content"]] * bool(turn["content"] or not calls) + calls)
            pieces += granite_turn("assistant", text, i)
    return pieces


def command(turns, thinks: bool):
    pieces: list[Piece] = [("<BOS_TOKEN>", True, None)]
    words = {"system": "<|SYSTEM_TOKEN|>", "user": "<|USER_TOKEN|>", "assistant": "<|CHATBOT_TOKEN|>"}
    for i, turn in enumerate(turns):
        learned = answer_of(turns, i)
        text = turn["content"] if thinks or turn["role"] == "system" else turn["content"].strip()
        written: list[Piece] = [(text, False, learned)]
        if thinks and turn["role"] == "assistant":
            written = [("<|START_RESPONSE|>", True, i), *written, ("<|END_RESPONSE|>", True, i)]
            if reasoning := turn.get("reasoning_content"):
                thoughts = [("<|START_THINKING|>", True, i), (reasoning, False, i), ("<|END_THINKING|>", True, i)]
                written = [*thoughts, *written]
        pieces += [("<|START_OF_TURN_TOKEN|>", True, None), (words[turn["role"]], True, None)]
        pieces += [*written, ("<|END_OF_TURN_TOKEN|>", True, learned)]
    return pieces


def phi3(turns, tools):
    pieces: list[Piece] = []
    for i, turn in enumerate(turns):
        pieces += [
            (f"<|{turn['role']}|>", True, None),
            ("\n", False, None),
            (turn["content"], False, answer_of(turns, i)),
        ]
        pieces += [("<|end|>", True, answer_of(turns, i)), ("\n", False, None)]
    return pieces


FORMATS = {
    "qwen3.5": qwen35, "deepseek-v3": deepseek_v3, "deepseek-r1": deepseek_r1, "deepseek-v3.1": deepseek_v31,
    "gpt-oss": gpt_oss, "glm4.5": glm, "gemma4": gemma4, "llama4": llama4, "smollm3": smollm3, "granite3": granite3,
    "granite4": granite4, "command-r": lambda turns, tools: command(turns, False),
    "command-a": lambda turns, tools: command(turns, True), "phi3": phi3,
}  # fmt: skip

DEEPSEEK_WORDS = [
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
THINK = ["<think>", "</think>"]
CALLING = ["<tool_call>", "</tool_call>"]

# family -> special tokens (begin, end of text first), and added tokens that are ordinary vocabulary in its tokenizer
VOCABULARY = {
    "qwen3.5": (["", "<|im_end|>", "<|im_start|>"], [*THINK, *CALLING, "<tool_response>", "</tool_response>"]),
    "deepseek-v3": (DEEPSEEK_WORDS, []),
    "deepseek-r1": (DEEPSEEK_WORDS[:4], THINK),
    "deepseek-v3.1": (DEEPSEEK_WORDS, THINK),
    "gpt-oss": (
        ["", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|constrain|>"], [],
    ),
    "glm4.5": (
        ["", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        [*THINK, *CALLING, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>",
         "</tool_response>"],
    ),
    "gemma4": (
        ["<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>",
         "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>"],
        [],
    ),
    "llama4": (
        ["<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"],
        [],
    ),
    "smollm3": (["", "<|im_end|>", "<|im_start|>"], [*THINK, *CALLING]),
    "granite3": (
        ["<|end_of_text|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"], [],
    ),
    "granite4": (
        ["<|end_of_text|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"],
        [*CALLING, "<tools>", "</tools>", "<tool_response>", "</tool_response>"],
    ),
    "command-r": (
        ["<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
         "<|CHATBOT_TOKEN|>"],
        [],
    ),
    "command-a": (
        ["<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
         "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>"],
        [],
    ),
    "phi3": (["", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], []),
}  # fmt: skip
