# ruff: noqa: RUF001 -- DeepSeek's control words have wide bars
"""The chat formats as the families publish them, by hand in Python without jinja, beside those of reference_templates.

The texts in data/real_templates are written after the published templates; here is what they have to write. Where a
family's own format is that of a built-in, its function is the same.
"""

import datetime

from reference_recent_templates import message, results_of
from reference_templates import (
    QWEN_TOOLS,
    Piece,
    answer_of,
    as_json,
    chatml,
    framed,
    gemma,
    llama31,
    mistral,
    phi4,
    qwen,
    qwen25,
)


def today(spelling: str) -> str:
    return datetime.datetime.now().strftime(spelling)


def qwen3(turns, tools):
    """Reasoning behind the last question alone; a thinking block, if only an empty one, in the last turn."""
    parts, rest = [], turns
    if turns[0]["role"] == "system":
        parts, rest = [turns[0]["content"]], turns[1:]
    if tools:
        parts.append(QWEN_TOOLS.format("\n".join(map(as_json, tools))))
    asked = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
    place = {id(turn): i for i, turn in enumerate(turns)}

    def written(turn: dict) -> str:
        content, thought = turn["content"], turn.get("reasoning_content", "")
        if not thought and "</think>" in content:
            before, _, content = content.rpartition("</think>")
            thought = before.rpartition("<think>")[2]
        thought, content = thought.strip("\n"), content.lstrip("\n") if thought else content
        if place[id(turn)] > asked and (thought or turn is turns[-1]):
            return f"<think>\n{thought}\n</think>\n\n" + content.lstrip("\n")
        return content

    return qwen("\n\n".join(parts) if parts else None, rest, len(turns) - len(rest), written)


def mistral_small(turns, tools):
    if turns[0]["role"] == "system":
        return mistral(turns, None)
    own = (
        "You are Mistral Small 3, a Large Language Model (LLM) created by Mistral AI, a French startup headquartered "
        f"in Paris.\nThe current date is {today('%Y-%m-%d')}."
    )
    system = [("[SYSTEM_PROMPT]", True, None), (own, False, None), ("[/SYSTEM_PROMPT]", True, None)]
    begin, *others = mistral(turns, None)
    return [begin, *system, *others]


def mistral_nemo(turns, tools):
    asked = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
    pieces: list[Piece] = [("<s>", True, None)]
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            if tools and i == asked:
                pieces += between("[AVAILABLE_TOOLS]", as_json(tools), "[/AVAILABLE_TOOLS]")
            pieces += between("[INST]", turn["content"], "[/INST]")
        elif turn["role"] == "tool":
            result = f'{{"content": {turn["content"]}, "call_id": "{turn["tool_call_id"]}"}}'
            pieces += between("[TOOL_RESULTS]", result, "[/TOOL_RESULTS]")
        elif turn.get("tool_calls"):
            calls = as_json([call["function"] | {"id": call["id"]} for call in turn["tool_calls"]])
            pieces += [("[TOOL_CALLS]", True, i), (calls, False, i), ("</s>", True, i)]
        else:
            pieces += [(turn["content"], False, i), ("</s>", True, i)]
    return pieces


def between(opening: str, text: str, closing: str) -> list[Piece]:
    return [(opening, True, None), (text, False, None), (closing, True, None)]


def deepseek(turns, tools, distilled=False):
    """What one answer begins with depends on the calls and results before it in the whole conversation."""
    end = "<｜end▁of▁sentence｜>"
    systems = [turn["content"] for turn in turns if turn["role"] == "system"]
    pieces: list[Piece] = [("<｜begin▁of▁sentence｜>", True, None), ("\n\n".join(systems), False, None)]
    called = results = False
    for i, turn in enumerate(turns):
        behind_result = i > 0 and turns[i - 1]["role"] == "tool"
        if turn["role"] == "user":
            pieces += [("<｜User｜>", True, None), (turn["content"], False, None)]
        elif turn["role"] == "tool":
            if not results:
                pieces.append(("<｜tool▁outputs▁begin｜>", True, None))
            pieces.append(("\n" if results and distilled else "", False, None))
            pieces += between("<｜tool▁output▁begin｜>", turn["content"], "<｜tool▁output▁end｜>")
            results = True
            if i + 1 == len(turns) or turns[i + 1]["role"] != "tool":
                pieces.append(("<｜tool▁outputs▁end｜>", True, None))
        elif turn["role"] == "assistant":
            if not behind_result:
                pieces.append(("<｜Assistant｜>", True, None))
            pieces.append((turn["content"], False, i))
            calls = turn.get("tool_calls", [])
            for number, call in enumerate(calls):
                opening = "\n" if called else "<｜tool▁calls▁begin｜>"
                text = f"\n```json\n{as_json(call['function']['arguments'])}\n```"
                pieces += [
                    (opening, not called, i), ("<｜tool▁call▁begin｜>", True, i), (call["type"], False, i),
                    ("<｜tool▁sep｜>", True, i), (call["function"]["name"] + text, False, i),
                    ("<｜tool▁call▁end｜>", True, i),
                ]  # fmt: skip
                called = True
                if number + 1 == len(calls) and (number or not distilled):
                    pieces.append(("<｜tool▁calls▁end｜>", True, i))
            if len(calls) != 1 or not distilled:  # distilled: a single call has no end
                pieces.append((end, True, i))
    return pieces


def deepseek_distilled(turns, tools):
    return deepseek(turns, tools, distilled=True)


def smollm3(turns, tools):
    given = turns[0]["content"] if turns[0]["role"] == "system" else ""
    mode = "/no_think" if "/no_think" in given else "/think"
    asked = given.replace("/no_think", "").replace("/think", "").rstrip()
    if not asked:
        asked = "You are a helpful AI assistant named SmolLM, trained by Hugging Face."
        if mode == "/think":
            asked += " Use the format: <think> Thought section </think> Solution section."
    head = (
        f"system\n## Metadata\n\nKnowledge Cutoff Date: June 2025\nToday Date: {today('%d %B %Y')}\n"
        f"Reasoning Mode: {mode}\n\n## Custom Instructions\n\n{asked}\n\n"
    )
    pieces: list[Piece] = [("<|im_start|>", True, None), (head, False, None)]
    if tools:
        text = (
            "### Tools\n\nYou may call one or more functions to assist with the user query.\nYou are provided with "
            "function signatures within <tools></tools> XML tags:\n\n<tools>\n"
            + "".join(f"{tool}\n" for tool in tools)
            + "</tools>\n\nFor each function call, return a json object with function name and arguments within "
            '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
            "<args-json-object>}\n</tool_call>\n\n"
        )
        pieces += [(text, False, None), ("<|im_end|>", True, None), ("\n", False, None)]
    opening = "<think>\n\n</think>\n" if mode == "/no_think" else ""
    for i, turn in enumerate(turns):
        if turn["role"] == "assistant":
            text = turn["content"].lstrip("\n")
            pieces += framed("<|im_start|>", "assistant", "\n" + opening, text, "<|im_end|>", "\n", i)
        elif turn["role"] != "system":
            pieces += framed("<|im_start|>", "user", "\n", turn["content"], "<|im_end|>", "\n", None)
    return pieces


def olmo2(turns, tools):
    pieces: list[Piece] = [("<|endoftext|>", True, None)]
    for i, turn in enumerate(turns):
        pieces += [(f"<|{turn['role']}|>\n", False, None), (turn["content"], False, answer_of(turns, i))]
        if turn["role"] == "assistant":
            pieces.append(("<|endoftext|>", True, i))
        pieces.append(("\n" if i + 1 < len(turns) else "", False, None))
    return pieces


def granite(turns, tools):
    start, neck, end = "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"
    if turns[0]["role"] != "system":
        own = (
            f"Knowledge Cutoff Date: April 2024.\nToday's Date: {today('%B %d, %Y')}.\n"
            "You are Granite, developed by IBM. You are a helpful "
        )
        parts = [(own + "AI assistant.", False, None)]
        if tools:
            parts = [
                (own + "assistant with access to the following tools. When a tool is required to answer the user's "
                 "query, respond only with ", False, None),
                ("<|tool_call|>", True, None),
                (" followed by a JSON list of tools used. If a tool does not exist in the provided list of tools, "
                 "notify the user that you do not have the ability to fulfill the request.", False, None),
            ]  # fmt: skip
        pieces = [(start, True, None), ("system", False, None), (neck, True, None), *parts, (end, True, None)]
        pieces.append(("\n", False, None))
    else:
        pieces = framed(start, "system", neck, turns[0]["content"], end, "\n", None)
    if tools:
        pieces += framed(start, "available_tools", neck, as_json(tools, indent=4), end, "\n", None)
    for i, turn in enumerate(turns):
        if turn["role"] != "system":
            pieces += framed(start, turn["role"], neck, turn["content"], end, "\n", answer_of(turns, i))
    return pieces


def qwen35(turns, tools):
    """A thinking block in the answers to the last question alone, which the model writes behind its first word."""
    system = turns[0]["content"].strip() if turns[0]["role"] == "system" else ""
    if tools:
        listed = "\n".join(map(as_json, tools))
        system = (
            f"# Tools\n\nYou have access to the following functions:\n\n<tools>\n{listed}\n</tools>\n\nCall them as "
            "<tool_call>\n<function=name>\n<parameter=name>\nvalue\n</parameter>\n</function>\n</tool_call>"
        ) + (f"\n\n{system}" if system else "")
    pieces = framed("<|im_start|>", "system", "\n", system, "<|im_end|>", "\n", None) if system else []
    asked = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            pieces += framed("<|im_start|>", "user", "\n", turn["content"].strip(), "<|im_end|>", "\n", None)
        elif turn["role"] == "assistant":
            reasoning, text = turn.get("reasoning_content", ""), turn["content"].strip()
            if not reasoning and "</think>" in text:
                head, _, text = text.rpartition("</think>")
                reasoning, text = head.rpartition("<think>")[2], text.lstrip("\n")
            if calls := [xml_of(call["function"]) for call in turn.get("tool_calls", [])]:
                text = "\n\n".join([*filter(None, [text]), "\n".join(calls)])
            head = "\n<think>\n" if i > asked else "\n"
            text = f"{reasoning.strip()}\n</think>\n\n{text}" if i > asked else text
            pieces += framed("<|im_start|>", "assistant", head, text, "<|im_end|>", "\n", i)
        elif results := results_of(turns, i):
            text = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
            pieces += framed("<|im_start|>", "user", "\n", text, "<|im_end|>", "\n", None)
    return pieces


def xml_of(function: dict) -> str:
    values = [
        f"<parameter={name}>\n{as_json(value) if isinstance(value, dict | list) else value}\n</parameter>\n"
        for name, value in function["arguments"].items()
    ]
    return f"<tool_call>\n<function={function['name']}>\n{''.join(values)}</function>\n</tool_call>"


def gpt_oss(turns, tools):
    """Of one question: several are refused, as earlier answers end otherwise than the last."""
    pieces = message(
        "system",
        f"You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: "
        f"{today('%Y-%m-%d')}\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be "
        "included for every message.",
    )
    if tools:
        pieces += message("developer", "# Tools\n\n" + ", ".join(tool["function"]["name"] for tool in tools))
    called = ""
    for i, turn in enumerate(turns):
        if turn["role"] == "user":
            pieces += message("user", turn["content"])
        elif turn["role"] == "tool":
            pieces += message(f"functions.{called} to=assistant", as_json(turn["content"]), "commentary")
        else:
            channel, text, end, to = "final", turn["content"], "<|return|>", ""
            for call in turn.get("tool_calls", []):
                called = call["function"]["name"]
                to, channel, end = f" to=functions.{called}", "commentary json", "<|call|>"
                text = as_json(call["function"]["arguments"])
            pieces += [("<|start|>", True, None), ("assistant", False, None), (to, False, i), ("<|channel|>", True, i)]
            pieces += [(channel, False, i), ("<|message|>", True, i), (text, False, i), (end, True, i)]
    return pieces


FORMATS = {
    "qwen3.5": qwen35, "gpt-oss": gpt_oss,
    "llama-3.1": llama31, "qwen2.5": qwen25, "qwen3": qwen3, "gemma-2": gemma, "gemma-3": gemma,
    "mistral-nemo": mistral_nemo, "mistral-small": mistral_small, "phi-4": phi4, "chatml": chatml,
    "deepseek-r1": deepseek, "deepseek-r1-distill": deepseek_distilled, "smollm3": smollm3, "olmo-2": olmo2,
    "granite-3": granite,
}  # fmt: skip
