"""The chat formats of the model families, by hand in Python without jinja, to compare the built-in templates with.

A format is a function (turns, tools) -> pieces [(text, whether it is a control token, the assistant turn that has to
learn it or None)]. Their joined texts are the conversation as the model reads it.
"""

import json

IGNORE = -100  # label that the loss ignores

Piece = tuple[str, bool, int | None]

QWEN_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

LLAMA_TOOLS = """Given the following functions, please respond with a JSON for a function call with its proper \
arguments that best answers the given prompt.

Respond in the format {{"name": function name, "parameters": dictionary of argument name and its value}}.Do not use \
variables.

{}"""


def as_json(value, **options) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def framed(head: str, role: str, neck: str, text: str, end: str, after: str, turn: int | None) -> list[Piece]:
    """A turn between control tokens: <head>role<neck>text<end>after; an answer is its text and <end>."""
    return [(head, True, None), *split(role + neck), (text, False, turn), (end, True, turn), (after, False, None)]


def split(text: str) -> list[Piece]:
    """Return role and neck, of which the part in <|...|> is a control token."""
    before, mark, rest = text.partition("<|")
    word, close, after = rest.partition("|>")
    return [(before, False, None), (mark + word + close, True, None), (after, False, None)]


def answer_of(turns: list[dict], i: int) -> int | None:
    return i if turns[i]["role"] == "assistant" else None


def plain(turns, tools):
    pieces = []
    for i, turn in enumerate(turns):
        pieces += [(f"### {turn['role'].capitalize()}:\n", False, None), (turn["content"], False, answer_of(turns, i))]
        if turn["role"] == "assistant":
            pieces.append(("</s>", True, i))
        pieces.append(("\n\n", False, None))
    return pieces


def chatml(turns, tools):
    pieces = []
    for i, turn in enumerate(turns):
        pieces += framed("<|im_start|>", turn["role"], "\n", turn["content"], "<|im_end|>", "\n", answer_of(turns, i))
    return pieces


def phi4(turns, tools):
    pieces = []
    for i, turn in enumerate(turns):
        pieces += framed(
            "<|im_start|>", turn["role"], "<|im_sep|>", turn["content"], "<|im_end|>", "", answer_of(turns, i)
        )
    return pieces


def llama3(turns, tools):
    pieces = [("<|begin_of_text|>", True, None)]
    for i, turn in enumerate(turns):
        pieces += llama_turn(turn["role"], turn["content"].strip(), answer_of(turns, i))
    return pieces


def llama_turn(role: str, text: str, turn: int | None = None) -> list[Piece]:
    return framed("<|start_header_id|>", role, "<|end_header_id|>\n\n", text, "<|eot_id|>", "", turn)


def llama31(turns, tools):
    system = turns[0]["content"].strip() if turns[0]["role"] == "system" else ""
    date = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    pieces = [
        ("<|begin_of_text|>", True, None),
        *llama_turn("system", ("Environment: ipython\n" if tools else "") + date + system),
    ]
    asked = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    for i, turn in enumerate(turns):
        role, text = turn["role"], turn["content"].strip()
        if role == "system" and i == 0:
            continue
        if i == asked and tools:
            text = LLAMA_TOOLS.format("".join(as_json(tool, indent=4) + "\n\n" for tool in tools)) + text
        if role == "tool":
            role, text = "ipython", as_json(turn["content"])
        if turn.get("tool_calls"):
            (call,) = turn["tool_calls"]
            text = as_json({"name": call["function"]["name"], "parameters": call["function"]["arguments"]})
        pieces += llama_turn(role, text, answer_of(turns, i))
    return pieces


def gemma(turns, tools):
    pieces, system = [("<bos>", True, None)], ""
    for i, turn in enumerate(turns):
        if turn["role"] == "system":
            system = turn["content"] + "\n\n"
            continue
        text = turn["content"].strip()
        if turn["role"] == "user":
            text, system = system + text, ""
        role = {"user": "user", "assistant": "model"}[turn["role"]]
        pieces += framed("<start_of_turn>", role, "\n", text, "<end_of_turn>", "\n", answer_of(turns, i))
    return pieces


def mistral(turns, tools):
    pieces = [("<s>", True, None)]
    for i, turn in enumerate(turns):
        role, text = turn["role"], turn["content"]
        if role == "system":
            pieces += [("[SYSTEM_PROMPT]", True, None), (text, False, None), ("[/SYSTEM_PROMPT]", True, None)]
        elif role == "user":
            if tools and not any(t["role"] == "user" for t in turns[:i]):
                pieces += [
                    ("[AVAILABLE_TOOLS]", True, None),
                    (as_json(tools), False, None),
                    ("[/AVAILABLE_TOOLS]", True, None),
                ]
            pieces += [("[INST]", True, None), (text, False, None), ("[/INST]", True, None)]
        elif role == "tool":
            pieces += [
                ("[TOOL_RESULTS]", True, None), (turn["tool_call_id"], False, None), ("[TOOL_CONTENT]", True, None),
                (text, False, None), ("[/TOOL_RESULTS]", True, None),
            ]  # fmt: skip
        else:
            pieces.append((text, False, i))
            if turn.get("tool_calls"):
                calls = [call["function"] | {"id": call["id"]} for call in turn["tool_calls"]]
                pieces += [("[TOOL_CALLS]", True, i), (as_json(calls), False, i)]
            pieces.append(("</s>", True, i))
    return pieces


def qwen25(turns, tools):
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    if turns[0]["role"] == "system":
        system, rest = turns[0]["content"], turns[1:]
    else:
        rest = turns
    if tools:
        system += "\n\n" + QWEN_TOOLS.format("\n".join(map(as_json, tools)))
    return qwen(system, rest, len(turns) - len(rest), lambda turn: turn["content"])


def qwen3(turns, tools):
    parts, rest = [], turns
    if turns[0]["role"] == "system":
        parts, rest = [turns[0]["content"]], turns[1:]
    if tools:
        parts.append(QWEN_TOOLS.format("\n".join(map(as_json, tools))))

    def thought(turn: dict) -> str:
        reasoning, content = turn.get("reasoning_content", "").strip("\n"), turn["content"].lstrip("\n")
        has_its_own = not reasoning and content.startswith("<think>")
        return content if has_its_own else f"<think>\n{reasoning}\n</think>\n\n{content}"

    return qwen("\n\n".join(parts) if parts else None, rest, len(turns) - len(rest), thought)


def qwen(system: str | None, turns: list[dict], skipped: int, written) -> list[Piece]:
    pieces = [] if system is None else framed("<|im_start|>", "system", "\n", system, "<|im_end|>", "\n", None)
    results: list[str] = []
    for i, turn in enumerate(turns):
        if turn["role"] == "tool":
            results.append(f"<tool_response>\n{turn['content']}\n</tool_response>")
            if i + 1 == len(turns) or turns[i + 1]["role"] != "tool":
                pieces += framed("<|im_start|>", "user", "\n", "\n".join(results), "<|im_end|>", "\n", None)
                results = []
            continue
        text, learner = turn["content"], None
        if turn["role"] == "assistant":
            calls = [call["function"] for call in turn.get("tool_calls", [])]
            tagged = [f"<tool_call>\n{as_json(call)}\n</tool_call>" for call in calls]
            text = written(turn)
            if turn["content"] or not tagged:
                tagged = [text, *tagged]
            else:
                tagged[0] = text + tagged[0]  # nothing, or a thinking block, which ends in line breaks
            text, learner = "\n".join(tagged), i + skipped
        pieces += framed("<|im_start|>", turn["role"], "\n", text, "<|im_end|>", "\n", learner)
    return pieces


FORMATS = {
    "plain": plain, "chatml": chatml, "qwen3": qwen3, "qwen2.5": qwen25, "llama3": llama3, "llama3.1": llama31,
    "gemma": gemma, "mistral": mistral, "phi4": phi4,
}  # fmt: skip


# --- tokens ---


def byte_tokenizer(special: list[str], ordinary: list[str]):
    """Return a tokenizer with a token a byte, special tokens (begin, end of text first) and ordinary added ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    begin, end, *others = special
    named = ({"bos_token": begin} if begin else {}) | {"eos_token": end}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=others, **named)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in ordinary])
    return tokenizer


def encoded(pieces: list[Piece], turns: list[dict], tokenizer, words: list[str]) -> tuple[str, list[int], list[int]]:
    """Return (text, token ids, labels) of pieces. words: added tokens that are not marked special; texts hold them."""
    number = tokenizer.get_vocab()
    letters = dict(zip(range(256), byte_letters(), strict=True))
    text, ids, labels = "", [], []
    for piece, control, turn in pieces:
        if not piece:
            continue
        tokens = [number[piece]] if control else list(ordinary_tokens(piece, words, number, letters))
        learned = turn is not None and turns[turn].get("weight", turns[turn].get("train", True))
        learned = learned and (turns[turn]["content"].strip() or turns[turn].get("tool_calls"))
        text += piece
        ids += tokens
        labels += tokens if learned else [IGNORE] * len(tokens)
    return text, ids, labels


def byte_letters() -> list[str]:
    """Return the letter that GPT-2's byte alphabet gives to each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


def ordinary_tokens(text: str, words: list[str], number: dict[str, int], letters: dict[int, str]):
    """Yield token ids of text: words that are not marked special are tokens wherever they stand, the rest is bytes."""
    while text:
        word = next((w for w in words if text.startswith(w)), None)
        if word:
            yield number[word]
        else:
            yield from (number[letters[b]] for b in text[0].encode())
        text = text[len(word or "x") :]
