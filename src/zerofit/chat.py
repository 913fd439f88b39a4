"""A row's columns -> token ids and labels: the format, the chat template, and the loss only on the answers."""

from typing import Any

from .errors import UserError

IGNORE = -100  # the label that transformers' loss skips

# format -> the columns that show it, most telling first
FORMATS = {
    "messages": ("messages",),
    "prompt/completion": ("prompt", "completion"),
    "question/answer": ("question", "answer"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
ROLES = ("system", "user", "assistant", "tool")

# For a tokenizer without a chat template; saved with the trained model, so that inference uses the same one.
PLAIN_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '### ' + message['role'] | capitalize + ':\\n' + message['content'] }}"
    "{%- if message['role'] == 'assistant' %}{{- eos_token }}{% endif %}{{- '\\n\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '### Assistant:\\n' }}{% endif %}"
)


def detect(place: str, row: dict[str, Any]) -> str:
    """The format of a row, by its columns.

    Raises: UserError naming the place and the columns found.
    """
    for name, columns in FORMATS.items():
        if all(c in row for c in columns):
            return name
    known = "; ".join("+".join(c) for c in FORMATS.values())
    raise UserError(
        f"{place}: no known format in the columns {', '.join(map(str, row))}; one of these is needed: {known}."
    )


def to_messages(place: str, row: dict[str, Any], kind: str) -> list[dict[str, str]] | str:
    """The row as chat messages, or as one string for plain text.

    Raises: UserError naming the place for a missing column, a wrong type or an unknown role.
    """
    for column in FORMATS[kind]:
        if row.get(column) is None:
            have = ", ".join(k for k, v in row.items() if v is not None) or "none"
            raise UserError(f"{place}: column {column!r} is missing or null (format {kind}; columns here: {have}).")
        if kind != "messages" and not isinstance(row[column], str):
            raise UserError(f"{place}: column {column!r} must be a string, found a {type(row[column]).__name__}.")
    if kind == "text":
        return row["text"]
    if kind == "messages":
        return _checked(place, row["messages"])
    first, last = (row[c] for c in FORMATS[kind])
    if kind == "instruction" and row.get("input"):
        first = f"{first}\n\n{row['input']}"
    return [{"role": "user", "content": first}, {"role": "assistant", "content": last}]


def _checked(place: str, messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{place}: 'messages' must be a list of turns that is not empty.")
    for i, turn in enumerate(messages, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            raise UserError(f"{place}: turn {i} must be an object with a 'role' and a string 'content'.")
        if turn.get("role") not in ROLES:
            raise UserError(f"{place}: turn {i} has the role {turn.get('role')!r}; known: {', '.join(ROLES)}.")
    if not any(t["role"] == "assistant" for t in messages):
        raise UserError(f"{place}: no assistant turn, so there is nothing to learn.")
    return messages


def tokenize(place: str, content: list[dict[str, str]] | str, tokenizer) -> tuple[list[int], list[int]]:
    """(input_ids, labels) of equal length; labels are IGNORE outside the answers, the end token is inside the loss."""
    if isinstance(content, str):
        ids = tokenizer(content)["input_ids"]
        if not ids or ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        return ids, list(ids)
    text, spans = _render(place, content, tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, labels, next_span = encoded["input_ids"], [], 0
    for token, (start, end) in zip(ids, encoded["offset_mapping"], strict=True):
        while next_span < len(spans) and start >= spans[next_span][1]:
            next_span += 1
        inside = next_span < len(spans) and end > spans[next_span][0] and end > start
        labels.append(token if inside else IGNORE)
    return ids, labels


def _render(place: str, messages: list[dict[str, str]], tokenizer) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text and the character spans of the answers, each with its end token.

    An answer starts where the prompt for it ends, and ends where the text that the template has produced so far
    ends; both are prefixes of the whole text, or the template is refused.
    """
    from jinja2 import TemplateError

    def text_of(turns, prompt=False):
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt)

    try:
        whole = text_of(messages)
        spans = []
        for i, turn in enumerate(messages):
            if turn["role"] != "assistant":
                continue
            before, after = text_of(messages[:i], prompt=True), text_of(messages[: i + 1])
            if not whole.startswith(before) or not whole.startswith(after):
                raise UserError(
                    f"{place}: turn {i + 1}: the chat template rewrites earlier text when turns are added, so the "
                    "answer's place is not certain; use a template that only appends."
                )
            spans.append((len(before), len(after.rstrip("\n"))))
    except TemplateError as error:
        raise UserError(f"{place}: the chat template refuses this conversation: {error}.") from None
    return whole, spans
