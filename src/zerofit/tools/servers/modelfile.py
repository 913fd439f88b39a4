"""Write a Modelfile for ollama: its template in Go's language, derived from the chat template and compared with it."""

import json
import os
from dataclasses import dataclass

from zerofit.tools.servers.check import Check
from zerofit.tools.servers.reference import Prompt

FILE = "Modelfile"

# Contents that no template has; what it puts around them are the parts of the template in Go.
_SYSTEM, _USER, _ASSISTANT, _AGAIN = "qSYSTEMq", "qUSERq", "qASSISTANTq", "qAGAINq"

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")


@dataclass
class Parts:
    """What a chat template puts around contents. begin: before all, where there is no system message."""

    begin: str
    system: tuple[str, str]  # before the content, after it
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str  # before an answer that is generated
    has_system: bool = True

    def render(self, messages: list[dict]) -> str:
        """Return what the template in Go makes of messages, the system message first."""
        around = {"user": self.user, "assistant": self.assistant}
        system = [message for message in messages if message["role"] == "system"]
        text = self.system[0] + system[0]["content"] + self.system[1] if system else self.begin
        for message in messages:
            if message["role"] in around:
                before, after = around[message["role"]]
                text += before + message["content"] + after
        return text + self.prompt

    def go(self) -> str:
        """Return the template in Go's language; literals are quoted, so that nothing in them is read."""
        literal = _literal
        begin = literal(self.begin)
        if self.has_system:
            system = f"{literal(self.system[0])}{{{{ .System }}}}{literal(self.system[1])}"
            otherwise = f"{{{{ else }}}}{begin}" if begin else ""
            begin = f"{{{{ if .System }}}}{system}{otherwise}{{{{ end }}}}"
        user, assistant = (
            f"{literal(before)}{{{{ .Content }}}}{literal(after)}" for before, after in (self.user, self.assistant)
        )
        of_role = f'{{{{ if eq .Role "user" }}}}{user}{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}'
        loop = f"{{{{ range .Messages }}}}{of_role}{{{{ end }}}}"
        return begin + loop + literal(self.prompt)


def _literal(text: str) -> str:
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""


def parts_of(tokenizer) -> Parts | None:
    """Derive the parts of a chat template from what it renders; None where it is none of such parts."""

    def rendered(*contents: str) -> list[str]:
        roles = {_SYSTEM: "system", _USER: "user", _ASSISTANT: "assistant", _AGAIN: "user"}
        messages = [{"role": roles[content], "content": content} for content in contents]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        found = []
        for content in contents:
            before, _, text = text.partition(content)
            found.append(before)
        return [*found, text]

    try:
        first, to_assistant, to_user, last = rendered(_USER, _ASSISTANT, _AGAIN)
    except Exception:  # a template may raise what it likes
        return None
    user_after = os.path.commonprefix([to_assistant, last])  # noqa: RUF071  of texts, not of paths
    user_before = os.path.commonprefix([first[::-1], to_user[::-1]])[::-1]  # noqa: RUF071
    try:
        system_before, system_after, _ = rendered(_SYSTEM, _USER)
        has_system = system_after.endswith(user_before)
    except Exception:  # it refuses system messages
        system_before = system_after = user_before
        has_system = False
    bos = tokenizer.bos_token or ""
    adds = bool(bos) and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id]  # ollama then adds it too
    begin = first.removesuffix(user_before)
    return Parts(
        begin.removeprefix(bos) if adds else begin,
        (system_before.removeprefix(bos) if adds else system_before, system_after.removesuffix(user_before)),
        (user_before, user_after), (to_assistant.removeprefix(user_after), to_user.removesuffix(user_before)),
        last.removeprefix(user_after), has_system,
    )  # fmt: skip


def text(model: str, tokenizer, asked: list[Prompt], stops: list[str], sampling: dict) -> tuple[str, list[Check]]:
    """Return the Modelfile of a GGUF file, and what is known of its template.

    Args: model: the file's name; stops: the tokens that end answers; sampling: of generation_config.json.
    """
    lines, parts = [f"FROM ./{model}"], parts_of(tokenizer) if tokenizer.chat_template else None
    known = [one for one in asked if one.messages and not one.tools]
    bos = tokenizer.bos_token or ""
    wrong = [one.name for one in known
             if parts and parts.render(one.messages).removeprefix(bos) != one.text.removeprefix(bos)]  # fmt: skip
    what = "the Modelfile's template"
    if parts is None or not known or wrong or '"""' in parts.go():
        reason = (
            f"it renders {', '.join(wrong)} in another way" if wrong else "it has other parts than roles and contents"
        )
        check = Check(what, None, f"left out: {reason}; ollama takes the template in the file, as far as it knows it")
    else:
        lines.append(f'TEMPLATE """{parts.go()}"""')
        names = ", ".join(one.name for one in known)
        says = f"the same text as the chat template of {names} (computed here, not by ollama)"
        check = Check(what, True, says)
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    given = {name: sampling.get(name) for name in SAMPLING}  # of a file that others may have written
    lines += [f"PARAMETER {name} {value}" for name, value in given.items() if isinstance(value, int | float)]
    tools = Check("tools", None, "the Modelfile's template has no tools")
    return "\n".join(lines) + "\n", [check, tools]
