"""Write a Modelfile for ollama, with a Go template derived from the chat template and compared with it."""

import json
import os
from dataclasses import dataclass

from zerofit.tools.servers.check import ServerCheck
from zerofit.tools.servers.reference import Prompt

FILE = "Modelfile"

# Markers for the contents; the text around them gives the parts of the Go template.
_SYSTEM, _USER, _ASSISTANT, _AGAIN = "qSYSTEMq", "qUSERq", "qASSISTANTq", "qAGAINq"

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")


@dataclass
class Parts:
    """The text that a chat template adds around contents."""

    begin: str  # at the start, without a system message
    system: tuple[str, str]  # before and after the content
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str  # before a generated answer
    has_system: bool = True

    def render(self, messages: list[dict]) -> str:
        """Render messages like the Go template, the system message first."""
        around = {"user": self.user, "assistant": self.assistant}
        system = [message for message in messages if message["role"] == "system"]
        text = self.system[0] + system[0]["content"] + self.system[1] if system else self.begin
        for message in messages:
            if message["role"] in around:
                before, after = around[message["role"]]
                text += before + message["content"] + after
        return text + self.prompt

    def go(self) -> str:
        """Return the Go template; literals are quoted so that Go does not interpret them."""
        literal = _literal
        begin = literal(self.begin)
        if self.has_system:
            system = f"{literal(self.system[0])}{{{{ .System }}}}{literal(self.system[1])}"
            otherwise = f"{{{{ else }}}}{begin}" if begin else ""
            begin = f"{{{{ if .System }}}}{system}{otherwise}{{{{ end }}}}"
        user, assistant = (
            f"{literal(before)}{{{{ .Content }}}}{literal(after)}" for before, after in (self.user, self.assistant)
        )
        turn = f'{{{{ if eq .Role "user" }}}}{user}{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}'
        loop = f"{{{{ range .Messages }}}}{turn}{{{{ end }}}}"
        return begin + loop + literal(self.prompt)


def _literal(text: str) -> str:
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""


def parts_of(tokenizer) -> Parts | None:
    """Derive the parts of a chat template from its output; None if it does not consist of such parts."""

    def render(*contents: str) -> list[str]:
        roles = {_SYSTEM: "system", _USER: "user", _ASSISTANT: "assistant", _AGAIN: "user"}
        messages = [{"role": roles[content], "content": content} for content in contents]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        parts = []
        for content in contents:
            before, _, text = text.partition(content)
            parts.append(before)
        return [*parts, text]

    try:
        first, to_assistant, to_user, last = render(_USER, _ASSISTANT, _AGAIN)
    except Exception:  # templates can raise anything
        return None
    user_after = os.path.commonprefix([to_assistant, last])  # noqa: RUF071  texts, not paths
    user_before = os.path.commonprefix([first[::-1], to_user[::-1]])[::-1]  # noqa: RUF071
    try:
        system_before, system_after, _ = render(_SYSTEM, _USER)
        has_system = system_after.endswith(user_before)
    except Exception:  # the template rejects system messages
        system_before = system_after = user_before
        has_system = False
    bos = tokenizer.bos_token or ""
    adds = bool(bos) and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]  # ollama also adds it
    begin = first.removesuffix(user_before)
    return Parts(
        begin.removeprefix(bos) if adds else begin,
        (system_before.removeprefix(bos) if adds else system_before, system_after.removesuffix(user_before)),
        (user_before, user_after), (to_assistant.removeprefix(user_after), to_user.removesuffix(user_before)),
        last.removeprefix(user_after), has_system,
    )  # fmt: skip


def text(
    model: str, tokenizer, prompts: list[Prompt], stops: list[str], sampling: dict
) -> tuple[str, list[ServerCheck]]:
    """Return the Modelfile of a GGUF file, and checks of its template.

    Args: model: the file's name; stops: the tokens that end answers; sampling: from generation_config.json.
    """
    lines, parts = [f"FROM ./{model}"], parts_of(tokenizer) if tokenizer.chat_template else None
    rendered = [one for one in prompts if one.messages and not one.tools]
    bos = tokenizer.bos_token or ""
    wrong = [one.name for one in rendered
             if parts and parts.render(one.messages).removeprefix(bos) != one.text.removeprefix(bos)]  # fmt: skip
    title = "the Modelfile's template"
    if parts is None or not rendered or wrong or '"""' in parts.go():
        reason = f"it would render {', '.join(wrong)} differently" if wrong else "the chat template is too complex"
        check = ServerCheck(title, None, f"left out: {reason}; ollama uses the template in the file, if it supports it")
    else:
        lines.append(f'TEMPLATE """{parts.go()}"""')
        names = ", ".join(one.name for one in rendered)
        check = ServerCheck(title, True, f"renders {names} like the chat template (computed here, not by ollama)")
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    options = {name: sampling.get(name) for name in SAMPLING}  # the file may contain other types
    lines += [f"PARAMETER {name} {value}" for name, value in options.items() if isinstance(value, int | float)]
    tools = ServerCheck("tools", None, "the Modelfile's template does not support tools")
    return "\n".join(lines) + "\n", [check, tools]
