"""Detect already rendered texts: with control words of a chat template, or placeholders of images."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerofit.base.errors import UserError
from zerofit.data.conversations import Conversation

# Values of --data_format for texts with control words; the format of the rows is detected.
LETTERS, TOKENS = "letters", "rendered"

VALUES = (LETTERS, TOKENS)

# Control words of other families, which the tokenizer may lack; <|begin_of_thought|> and similar words are text.
FOREIGN_WORD = re.compile(
    r"<[|\uff5c](?!(?:begin|end)_of_(?!text|sentence))[\w\u2581]+[|\uff5c]>|<(?:start|end)_of_turn>|\[/?INST\]"
)

# Not if it is quoted, as in a text about tags, or has a closing tag, as in XML.
PLACEHOLDER = re.compile(
    r"(?<![`'\"])(?:<(image|video|audio|img)>(?![`'\"])(?!.*</\1>)|<(?:image_placeholder|ImageHere|image_soft_token|"
    r"start_of_image|\|vision_start\||\|image_pad\||\|image_\d+\||\|image\||\|video_pad\||\|audio\|)>|\[IMG\])",
    re.DOTALL,
)


@dataclass(frozen=True)
class Rendered:
    """A text whose control words are tokens, with --data_format rendered."""

    prompt: str  # text before the trained text
    text: str
    is_trained: bool = True


def as_rendered(place: str, row: dict[str, Any], content: Any) -> Any:
    """Return a plain text, or a question with its answer, as Rendered; token lists unchanged.

    Args: content: the parsed row.
    Raises: UserError for rows with turns, which need a chat template.
    """
    if isinstance(content, str):
        return Rendered("", content)
    if not isinstance(content, Conversation):  # token lists
        return content
    texts = [turn["content"] for turn in content.turns if len(turn) == 2]
    if len(texts) != 2 or len(content.turns) != 2 or content.tools or any(text not in row.values() for text in texts):
        raise UserError(
            f"{place}: --data_format {TOKENS} supports `text`, or `prompt` and its answer as strings; this row has "
            "turns, which the chat template renders: remove --data_format."
        )
    return Rendered(*texts, content.trained[1])


def check(place: str, content: Any, data_format: str, control: re.Pattern) -> Iterator[str]:
    """Yield notes on control words and placeholders that are encoded as letters.

    A text that begins or ends with a control word, or a plain text with two of them, counts as rendered.
    Args: control: pattern of the tokenizer's control words.
    Raises: UserError for such a text and for a placeholder, unless --data_format is letters.
    """
    joined = "\n".join(text for _, text in _texts(content))
    if not ("<" in joined or "[" in joined or control.search(joined)):  # most rows; the other patterns begin with these
        return
    for name, text in _texts(content):
        words = [match[0] for match in itertools.islice(control.finditer(text), 2)]
        word = words[0] if words else ""
        was_rendered = word and (_edge(text, control) or (isinstance(content, str) and len(words) == 2))
        foreign = "" if word else _edge(text, FOREIGN_WORD)
        placeholder = PLACEHOLDER.search(text)
        if data_format != LETTERS and placeholder:
            raise UserError(
                f"{place}: {name} has {placeholder[0]}, a placeholder of an image, a video or a sound, but training "
                f"uses text only; remove such rows, or encode it as letters with --data_format {LETTERS}."
            )
        if data_format != LETTERS and foreign:
            raise UserError(
                f"{place}: {name} begins or ends with {foreign}, a control word that this tokenizer lacks; it seems "
                "rendered for another model: convert it to `messages`, or encode it as letters with --data_format "
                f"{LETTERS}."
            )
        if data_format != LETTERS and was_rendered:
            tokens = f"encode such words as tokens with --data_format {TOKENS}"
            if not isinstance(content, str):
                tokens += " (for a `prompt` and its answer in two columns)"
            raise UserError(
                f"{place}: {name} has {was_rendered if isinstance(was_rendered, str) else word}, a control word of the "
                f"tokenizer, so it seems to be already rendered; remove it, {tokens}, or encode them as letters with "
                f"--data_format {LETTERS}."
            )
        if word:
            yield f"{word} in a text is encoded as letters, not as a token"
        elif foreign:
            yield f"{foreign} in a text is encoded as letters: this tokenizer lacks it"
        if placeholder:
            yield f"{placeholder[0]} in a text is encoded as letters: training uses text only"


def check_tokens(place: str, rendered: Rendered, control: re.Pattern) -> None:
    """Raise UserError for a rendered text with a control word that the tokenizer lacks, or a placeholder."""
    text = rendered.prompt + rendered.text
    word = next(filter(None, (_edge(part, FOREIGN_WORD) for part in (text, rendered.text))), "")
    if word and not control.fullmatch(word):
        raise UserError(
            f"{place}: this tokenizer lacks {word}, so the text was rendered for another model; convert it to "
            "`messages`, which the model's chat template renders."
        )
    placeholder = PLACEHOLDER.search(text)
    if placeholder:
        raise UserError(f"{place}: the text has {placeholder[0]}, but training uses text only; remove the row.")


def _texts(content: Any) -> Iterator[tuple[str, str]]:
    if isinstance(content, str):
        yield "the text", content
    elif isinstance(content, Conversation):
        for i, turn in enumerate(content.turns, 1):
            yield f"the text of turn {i}", turn["content"]


def _edge(text: str, pattern: re.Pattern) -> str:
    """Return the match at the beginning or end of a text, or ""."""
    text = text.strip()
    first = pattern.match(text)
    if first:
        return first[0]
    tail = text[-100:]
    return next((match[0] for match in pattern.finditer(tail) if match.end() == len(tail)), "")
