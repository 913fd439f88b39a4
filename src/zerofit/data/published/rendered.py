"""Find texts that were rendered before: by a chat template, or with placeholders of images."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerofit.base.errors import UserError
from zerofit.data.conversations import Conversation

# Values of --data_format for rows whose texts hold control words. Neither names a format: that is still detected.
LETTERS, TOKENS = "letters", "rendered"

VALUES = (LETTERS, TOKENS)

# Control words of other families, which the tokenizer may not know; <|begin_of_thought|> and the like are text.
FOREIGN = re.compile(
    r"<[|\uff5c](?!(?:begin|end)_of_(?!text|sentence))[\w\u2581]+[|\uff5c]>|<(?:start|end)_of_turn>|\[/?INST\]"
)

# Unless it is quoted, as in a text about tags, or has a closing tag, as in XML.
PLACEHOLDER = re.compile(
    r"(?<![`'\"])(?:<(image|video|audio|img)>(?![`'\"])(?!.*</\1>)|<(?:image_placeholder|ImageHere|image_soft_token|"
    r"start_of_image|\|vision_start\||\|image_pad\||\|image_\d+\||\|image\||\|video_pad\||\|audio\|)>|\[IMG\])",
    re.DOTALL,
)


@dataclass(frozen=True)
class Rendered:
    """A text whose control words are tokens, with --data_format rendered."""

    prompt: str  # what precedes the trained text
    text: str
    is_trained: bool = True


def of(place: str, row: dict[str, Any], content: Any) -> Any:
    """Return a plain text, or a question with its answer, as a text whose control words are tokens.

    Args: content: what the columns `row` were parsed as.
    Raises: UserError for rows whose texts are not those of two columns, which a chat template has yet to render.
    """
    if isinstance(content, str):
        return Rendered("", content)
    if not isinstance(content, Conversation):  # token lists
        return content
    texts = [turn["content"] for turn in content.turns if len(turn) == 2]
    if len(texts) != 2 or len(content.turns) != 2 or content.tools or any(text not in row.values() for text in texts):
        raise UserError(
            f"{place}: --data_format {TOKENS} takes a `text`, or a `prompt` with its answer as strings; this row has "
            "turns, which the chat template renders: leave --data_format out."
        )
    return Rendered(*texts, content.trained[1])


def check(place: str, content: Any, data_format: str, control: re.Pattern) -> Iterator[str]:
    """Yield notes on control words and placeholders that are encoded as letters.

    A text that begins or ends with a control word, or a plain text with two of them, was rendered before.
    Args: control: matches the control words of the tokenizer.
    Raises: UserError for such a text and for a placeholder, unless --data_format says that letters are meant.
    """
    for name, text in _texts(content):
        words = [match[0] for match in itertools.islice(control.finditer(text), 2)]
        word = words[0] if words else ""
        was_rendered = word and (_edge(text, control) or (isinstance(content, str) and len(words) == 2))
        foreign = "" if word else _edge(text, FOREIGN)
        found = PLACEHOLDER.search(text)
        if data_format != LETTERS and found:
            raise UserError(
                f"{place}: {name} has {found[0]}, a placeholder of an image, a video or a sound, but training is on "
                f"text only and would be on its letters; remove such rows, or keep the letters with --data_format "
                f"{LETTERS}."
            )
        if data_format != LETTERS and foreign:
            raise UserError(
                f"{place}: {name} begins or ends with {foreign}, a control word that is no token of this tokenizer; "
                "it seems rendered for another model: give it as `messages`, or keep the letters with --data_format "
                f"{LETTERS}."
            )
        if data_format != LETTERS and was_rendered:
            tokens = f"take the words as tokens with --data_format {TOKENS}"
            if not isinstance(content, str):
                tokens += " (of a `prompt` and its answer in two columns)"
            raise UserError(
                f"{place}: {name} has {was_rendered if isinstance(was_rendered, str) else word}, a control word of the "
                "tokenizer, where a chat template writes it, so it seems rendered already, and would be trained as "
                f"letters; remove it, {tokens}, or keep the letters with --data_format {LETTERS}."
            )
        if word:
            yield f"{word} in a text is encoded as its letters, not as the token"
        elif foreign:
            yield f"{foreign} in a text is encoded as its letters: it is no token of this tokenizer"
        if found:
            yield f"{found[0]} in a text is encoded as its letters: training is on text only"


def check_tokens(place: str, rendered: Rendered, control: re.Pattern) -> None:
    """Raise UserError for a rendered text with a control word that the tokenizer does not know, or a placeholder."""
    text = rendered.prompt + rendered.text
    word = next(filter(None, (_edge(one, FOREIGN) for one in (text, rendered.text))), "")
    if word and not control.fullmatch(word):
        raise UserError(
            f"{place}: {word} is no token of this tokenizer, so the text was rendered for another model; give "
            "`messages`, which the model's own chat template renders."
        )
    found = PLACEHOLDER.search(text)
    if found:
        raise UserError(
            f"{place}: the text has {found[0]}, a placeholder, but training is on text only; remove the row."
        )


def _texts(content: Any) -> Iterator[tuple[str, str]]:
    if isinstance(content, str):
        yield "the text", content
    elif isinstance(content, Conversation):
        for i, turn in enumerate(content.turns, 1):
            yield f"the text of turn {i}", turn["content"]


def _edge(text: str, pattern: re.Pattern) -> str:
    """Return the word of the pattern that a text begins or ends with; "" without one."""
    text = text.strip()
    first = pattern.match(text)
    if first:
        return first[0]
    tail = text[-100:]
    return next((match[0] for match in pattern.finditer(tail) if match.end() == len(tail)), "")
