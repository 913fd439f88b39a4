"""The built-in templates of --chat_template. Each only appends text as turns are added, and marks the answers."""

import re
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.data.chat_templates import arguments

FOLDER = Path(__file__).parent

# Built-in -> strings that identify an equivalent template of a model; the first match wins.
KNOWN_BY = {
    "qwen3.5": ("<|im_start|>", "<function=", "<think>"),
    "smollm3": ("<|im_start|>", "Reasoning Mode"),
    "qwen3": ("<|im_start|>", "<think>", "<function-name>", "<tool_response>"),
    "qwen2.5": ("<|im_start|>", "<function-name>", "<tool_response>"),
    "phi4": ("<|im_start|>", "<|im_sep|>"),
    "phi3": ("<|assistant|>", "<|end|>"),
    "llama4": ("<|header_start|>",),
    "llama3.1": ("<|start_header_id|>", "ipython"),
    "llama3": ("<|start_header_id|>",),
    "gemma4": ("<|turn>",),
    "gemma": ("<start_of_turn>",),
    "mistral": ("[SYSTEM_PROMPT]",),
    "deepseek-v3.1": ("<\uff5cAssistant\uff5c></think>",),
    "deepseek-r1": ("<\uff5cAssistant\uff5c>", "think>"),
    "deepseek-v3": ("<\uff5cAssistant\uff5c>",),
    "gpt-oss": ("<|start|>", "<|channel|>"),
    "glm4.5": ("[gMASK]<sop>", "<arg_key>"),
    "granite4": ("<|start_of_role|>", "<tool_response>"),
    "granite3": ("<|start_of_role|>",),
    "command-a": ("<|START_OF_TURN_TOKEN|>", "<|START_RESPONSE|>"),
    "command-r": ("<|START_OF_TURN_TOKEN|>",),
    "chatml": ("<|im_start|>",),
}

NAMES = ("plain", "chatml", *(name for name in KNOWN_BY if name != "chatml"))

TEMPLATES = {name: (FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in NAMES}

# Templates that write tool calls; no published template of DeepSeek-V3 and Granite 3 does.
WITH_TOOLS = tuple(name for name in NAMES if "message.tool_calls" in TEMPLATES[name] and name != "deepseek-r1")

WITH_REASONING = tuple(name for name in NAMES if "message.reasoning_content" in TEMPLATES[name])

# Spellings of templates: DeepSeek's have wide bars, and low blocks between words, Gemma 4's a single bar.
CONTROL_WORD = re.compile(
    r"<[|\uff5c][\w\u2581]+[|\uff5c]>|<\|\w+>|<\w+\|>|<\|\"\|>|<\w+_of_turn>|\[/?[A-Z_]+\]|\[gMASK\]|<sop>"
)


def choose(name: str, tokenizer) -> str:
    """Return the template of --chat_template, a built-in name or a file.

    Raises: UserError for an unknown name, a file with a syntax error, or a built-in with control words that are not
        tokens of the tokenizer.
    """
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return arguments.without_syntax_error(path.read_text(encoding="utf-8"), name)
    except (OSError, RuntimeError, ValueError) as error:  # unreadable, a name too long, an unknown ~user, not UTF-8
        raise UserError(f"--chat_template {name[:200]}: cannot be read as a file: {error}.") from None
    if name not in TEMPLATES:
        raise UserError(f"--chat_template {name}: neither a file nor a built-in template ({', '.join(TEMPLATES)}).")
    unknown = set(CONTROL_WORD.findall(TEMPLATES[name])) - tokenizer.get_vocab().keys()
    if unknown:
        words = ", ".join(sorted(unknown))
        raise UserError(f"--chat_template {name}: the tokenizer lacks {words}; choose another template.")
    return TEMPLATES[name]


def equivalent(template: str) -> str:
    """Return the name of the built-in for the model of `template`; "" if unknown or identical."""
    template = arguments.without_defaults(template)
    name = next((n for n, words in KNOWN_BY.items() if all(word in template for word in words)), "")
    if name == "chatml" and "<think>" in template:  # another thinking model, whose tags ChatML lacks
        return ""
    return name if name and template != TEMPLATES[name] else ""


def like(template: str, among: tuple[str, ...] = NAMES) -> str:
    """Return ", such as --chat_template NAME" for the built-in equivalent of `template`, or ""."""
    name = equivalent(template)
    return f", such as --chat_template {name}" if name in among else ""
