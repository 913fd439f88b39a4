"""Find the text in answers that the chat template writes, not a field of the row.

The model must generate some of it, such as the JSON around a tool call. It need not generate the openings: text that a
generation prompt supplies at inference, and the empty reasoning tags (`<think></think>`) of a row without reasoning.
--mask_generation_prompt excludes these from the loss; the flag's name is NeMo AutoModel's (#3738, #3739).

`encoder` is an encoding.Encoder.
"""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from zerofit.base.errors import UserError
from zerofit.data.conversations import IGNORE, Conversation

# Contents of sample conversations, which reveal the template's own text.
QUESTION, THOUGHTS, ANSWER_TEXT = "zerofitasked", "zerofitthought", "zerofitanswered"

PLACE = "the chat template"  # place in errors of these conversations, which are not printed

MODES = ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"thinking": True}, {"thinking": False})

EMPTY_TAGS = re.compile(r"\s*[<\[]([\w|]+)[>\]]\s*[<\[]/\1[>\]]\s*")  # <think></think>, [THINK][/THINK]

SAMPLE_ROWS, MAX_CHARACTERS = 32, 200_000  # limits of counted rows of a source, and of their text

MAX_ROWS = 256  # limit of counted rows of all sources

COUNTS = ("rows", "supervised", "end", "template", "openings")


def openings(encoder) -> tuple[str, ...]:
    """Return the template's own texts at the start of answers, longest first."""
    user, answer = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER_TEXT}
    notes, texts = encoder.notes.copy(), set()
    for turns in ([user, answer], [user, answer, user, answer]):
        reasoned = [turn | {"reasoning_content": THOUGHTS} if turn is answer else turn for turn in turns]
        plain, thinking = _answers(encoder, turns), _answers(encoder, reasoned)
        supplied = {opening for probe in (*plain, *thinking) for opening in _supplied(encoder, turns, *probe)}
        words = {_squeezed(opening) for opening in supplied}
        texts |= supplied | {w for w in _empty_wrappers(plain, thinking) if _squeezed(w) not in words}
    encoder.notes = notes  # discards the notes of these conversations
    return tuple(sorted((opening for opening in texts if opening.strip()), key=len, reverse=True))


def skip_opening(known: tuple[str, ...], text: str, answer: tuple[int, int, int], turn: dict) -> int:
    """Return the start of an answer after the template's opening, if the row's text does not begin there."""
    (_, start, end), fields = answer, _fields(turn) if known else ()
    for opening in known:
        opening_end = start + len(opening)
        if text.startswith(opening, start, end) and not any(_begins(text, f, start, opening_end, end) for f in fields):
            return opening_end
    return start


def _begins(text: str, field: str, start: int, opening_end: int, end: int) -> bool:
    """Return whether a field begins before `opening_end`; a field that the template drops does not."""
    return text.find(field, opening_end, end) < 0 <= text.find(field, start, end)


def _fields(turn: dict, strip: bool = True) -> list[str]:
    """Return the non-blank texts of a turn, in the order of templates."""
    fields = [field for field in (turn.get("reasoning_content", ""), turn["content"]) if field.strip()]
    return [field.strip() for field in fields] if strip else fields


def _answers(encoder, turns: list[dict]) -> list[tuple[int, str, int]]:
    """Return (turn, full text, start) of each answer; [] if the template refuses or rewrites the turns."""
    conversation = Conversation(turns, [turn["role"] == "assistant" for turn in turns])
    try:
        text, marks = encoder._render_with_marks(PLACE, conversation)
        answers = encoder.answers(PLACE, text, marks, conversation)
        return [(i, text, start) for i, start, end in answers if text.find(ANSWER_TEXT, start, end) >= 0]
    except UserError:
        return []


def _supplied(encoder, turns: list[dict], i: int, text: str, start: int) -> Iterable[str]:
    """Yield the text after the `start` of answer `i` that the generation prompt of a mode contains."""
    conversation = Conversation(turns, [])
    for mode in MODES:
        try:
            base, before = (encoder._text(PLACE, conversation, i, **m) for m in ({}, mode))
            prompt = encoder._text(PLACE, conversation, i, prompt=True, **mode)
        except UserError:
            continue
        if not text.startswith(base):
            return
        # A mode may also change earlier turns, so compare only the text that the prompt adds.
        added = prompt[len(before) :] if prompt.startswith(before) else ""
        if text.startswith(added, len(base)) and len(base) + len(added) > start:
            yield text[start : len(base) + len(added)]


def _empty_wrappers(plain: list, thinking: list) -> set[str]:
    """Return the texts before answers without reasoning that are an empty pair of tags.

    Also return those that, except for white space, surround the reasoning of the same answer.
    """
    wrappers = set()
    for number, (_, text, start) in enumerate(plain):
        lead = text[start : text.find(ANSWER_TEXT, start)]
        wrapper = ""
        if number < len(thinking):
            _, text, start = thinking[number]
            wrapper = text[start : text.find(ANSWER_TEXT, start)]
        around = _squeezed(wrapper.replace(THOUGHTS, "")) if THOUGHTS in wrapper else None
        if _squeezed(lead) == around or EMPTY_TAGS.fullmatch(lead):
            wrappers.add(lead)
    return wrappers


def _squeezed(text: str) -> str:
    return "".join(text.split())


# --- counting ---


def count(encoder, rows: Iterable[tuple[str, object]]) -> Counter:
    """Count the tokens in the loss of (place, parsed row) by their origin: COUNTS.

    end: end tokens. template: from no field. openings: template tokens that --mask_generation_prompt excludes. Rows
    without turns (text, tokens), with control words in their text, or unusable, are not counted.
    """
    total: Counter = Counter()
    for place, row in rows:
        if encoder.train_on in ("all", "prompt") or total["characters"] > MAX_CHARACTERS:
            break
        if not isinstance(row, Conversation) or encoder._has_control_words(row):
            continue
        try:
            text, spans = encoder._render(place, row)
            marks = encoder._render_with_marks(place, row)[1]
            answers = encoder.answers(place, text, marks, row)
        except UserError:
            continue
        total["characters"] += len(text)
        total["rows"] += 1
        total.update(_count_row(encoder, text, spans, answers, row))
    return total


def _count_row(encoder, text: str, spans: list, answers: list, row: Conversation) -> dict[str, int]:
    fields, ends, heads = [], [], []
    for i, start, end in answers:
        word = next((w for w in encoder.end_words if text.endswith(w, start, end)), "")
        opening_end = skip_opening(encoder.openings, text, (i, start, end), row.turns[i])
        position, last = start, end - len(word)
        for field in _fields(row.turns[i], strip=False):
            forms = (field, field.lstrip(), field.rstrip(), field.strip())  # templates may trim them
            places = ((text.find(form, position, last), len(form)) for form in forms)
            at, length = next((place for place in places if place[0] >= 0), (position, 0))
            fields.append((at, at + length))
            position = at + length
        if row.turns[i].get("tool_calls"):  # the model must also generate the text around a call
            fields.append((max(position, opening_end), last))
        ends.append((last, end))
        heads.append((start, opening_end))
    in_loss, in_fields, in_ends, in_heads = (_tokens(encoder, text, part) for part in (spans, fields, ends, heads))
    from_template = in_loss & ~in_fields & ~in_ends
    return {
        "supervised": int(in_loss.sum()),
        "end": int((in_loss & in_ends & ~in_fields).sum()),
        "template": int(from_template.sum()),
        "openings": int((from_template & in_heads).sum()),
    }


def _tokens(encoder, text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return which tokens of the text have a character in one of the spans."""
    backend = encoder.tokenizer.backend_tokenizer
    backend.encode_special_tokens = False
    spans = [(start, end) for start, end in spans if start < end]
    _, labels = next(encoder._label_texts([text], [spans], as_arrays=True))
    return np.asarray(labels) != IGNORE
