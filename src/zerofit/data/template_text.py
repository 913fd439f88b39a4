"""Find the text in answers that comes from no field of the row: the chat template wrote it itself.

Some of it the model has to write too, such as the JSON around a tool call. What a generation prompt supplies at
inference, and the empty wrapper of reasoning that a row does not have (`<think></think>`), it does not have to: these
are the openings, which --mask_generation_prompt leaves out of the loss. NeMo AutoModel named the flag (#3738, #3739).

`encoder` is an encoding.Encoder, which asks for its own openings here.
"""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from zerofit.base.errors import UserError
from zerofit.data.conversations import IGNORE, Conversation

# Words of the conversations that are rendered to see what the template adds to them.
ASKED, THOUGHT, ANSWERED = "zerofitasked", "zerofitthought", "zerofitanswered"

PLACE = "the chat template"  # of errors of these conversations, which are not shown

MODES = ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"thinking": True}, {"thinking": False})

EMPTY_TAGS = re.compile(r"\s*[<\[]([\w|]+)[>\]]\s*[<\[]/\1[>\]]\s*")  # <think></think>, [THINK][/THINK]

SAMPLED, MOST_CHARACTERS = 32, 200_000  # the rows of a source whose tokens are counted, and their text

MOST_ROWS = 256  # counted of all sources

COUNTS = ("rows", "supervised", "end", "template", "openings")


def openings(encoder) -> tuple[str, ...]:
    """Return what the template itself writes at the start of answers, longest first; () if it writes nothing."""
    user, answer = {"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}
    notes, found = encoder.notes.copy(), set()
    for turns in ([user, answer], [user, answer, user, answer]):
        reasoned = [turn | {"reasoning_content": THOUGHT} if turn is answer else turn for turn in turns]
        plain, thinking = _answers(encoder, turns), _answers(encoder, reasoned)
        supplied = {opening for probe in (*plain, *thinking) for opening in _supplied(encoder, turns, *probe)}
        words = {_squeezed(opening) for opening in supplied}
        found |= supplied | {w for w in _empty_wrappers(plain, thinking) if _squeezed(w) not in words}
    encoder.notes = notes  # without those of these conversations
    return tuple(sorted((opening for opening in found if opening.strip()), key=len, reverse=True))


def behind_opening(known: tuple[str, ...], text: str, answer: tuple[int, int, int], turn: dict) -> int:
    """Return where an answer begins behind the template's own opening; its start, if that is the row's own text."""
    (_, start, end), fields = answer, _fields(turn) if known else ()
    for opening in known:
        behind = start + len(opening)
        if text.startswith(opening, start, end) and not any(_begins(text, f, start, behind, end) for f in fields):
            return behind
    return start


def _begins(text: str, field: str, start: int, behind: int, end: int) -> bool:
    """Return whether a field begins before `behind`; one that the template drops does not."""
    return text.find(field, behind, end) < 0 <= text.find(field, start, end)


def _fields(turn: dict, strip: bool = True) -> list[str]:
    """Return the texts of a turn that are not blank, in the order in which templates write them."""
    fields = [field for field in (turn.get("reasoning_content", ""), turn["content"]) if field.strip()]
    return [field.strip() for field in fields] if strip else fields


def _answers(encoder, turns: list[dict]) -> list[tuple[int, str, int]]:
    """Return (turn, whole text, start) of each answer; [] if the template refuses or rewrites the turns."""
    conversation = Conversation(turns, [turn["role"] == "assistant" for turn in turns])
    try:
        text, marks = encoder._whole(PLACE, conversation)
        found = encoder.answers(PLACE, text, marks, conversation)
        return [(i, text, start) for i, start, end in found if text.find(ANSWERED, start, end) >= 0]
    except UserError:
        return []


def _supplied(encoder, turns: list[dict], i: int, text: str, start: int) -> Iterable[str]:
    """Yield the text behind `start` of the answer `i` that the generation prompt of a mode brings along."""
    conversation = Conversation(turns, [])
    for mode in MODES:
        try:
            base, before = (encoder._text(PLACE, conversation, i, **m) for m in ({}, mode))
            prompt = encoder._text(PLACE, conversation, i, prompt=True, **mode)
        except UserError:
            continue
        if not text.startswith(base):
            return
        # A mode may change the turns before, too, so only what the prompt adds to them is compared.
        added = prompt[len(before) :] if prompt.startswith(before) else ""
        if text.startswith(added, len(base)) and len(base) + len(added) > start:
            yield text[start : len(base) + len(added)]


def _empty_wrappers(plain: list, thinking: list) -> set[str]:
    """Return what stands before an answer without reasoning, if it is a pair of tags around nothing.

    Or, but for white space, what stands around the reasoning of the same answer.
    """
    found = set()
    for number, (_, text, start) in enumerate(plain):
        lead = text[start : text.find(ANSWERED, start)]
        wrapper = ""
        if number < len(thinking):
            _, text, start = thinking[number]
            wrapper = text[start : text.find(ANSWERED, start)]
        around = _squeezed(wrapper.replace(THOUGHT, "")) if THOUGHT in wrapper else None
        if _squeezed(lead) == around or EMPTY_TAGS.fullmatch(lead):
            found.add(lead)
    return found


def _squeezed(text: str) -> str:
    return "".join(text.split())


# --- counting ---


def count(encoder, rows: Iterable[tuple[str, object]]) -> Counter:
    """Count the tokens in the loss of (place, parsed row) by who wrote them: COUNTS.

    end: end tokens. template: of no field. openings: those of them that --mask_generation_prompt leaves out. Rows
    without their own answers (text, tokens), with control words in their text, or refused, are not counted.
    """
    total: Counter = Counter()
    for place, row in rows:
        if encoder.train_on in ("all", "prompt") or total["characters"] > MOST_CHARACTERS:
            break
        if not isinstance(row, Conversation) or encoder._has_control_words(row):
            continue
        try:
            text, spans = encoder._render(place, row)
            marks = encoder._whole(place, row)[1]
            answers = encoder.answers(place, text, marks, row)
        except UserError:
            continue
        total["characters"] += len(text)
        total["rows"] += 1
        total.update(_of_row(encoder, text, spans, answers, row))
    return total


def _of_row(encoder, text: str, spans: list, answers: list, row: Conversation) -> dict[str, int]:
    fields, ends, heads = [], [], []
    for i, start, end in answers:
        word = next((w for w in encoder.end_words if text.endswith(w, start, end)), "")
        behind = behind_opening(encoder.openings, text, (i, start, end), row.turns[i])
        position, last = start, end - len(word)
        for field in _fields(row.turns[i], strip=False):
            forms = (field, field.lstrip(), field.rstrip(), field.strip())  # templates trim some
            places = ((text.find(form, position, last), len(form)) for form in forms)
            at, length = next((place for place in places if place[0] >= 0), (position, 0))
            fields.append((at, at + length))
            position = at + length
        if row.turns[i].get("tool_calls"):  # what stands around a call, the model has to write as well
            fields.append((max(position, behind), last))
        ends.append((last, end))
        heads.append((start, behind))
    in_loss, in_fields, in_ends, in_heads = (_tokens(encoder, text, part) for part in (spans, fields, ends, heads))
    own = in_loss & ~in_fields & ~in_ends
    return {
        "supervised": int(in_loss.sum()),
        "end": int((in_loss & in_ends & ~in_fields).sum()),
        "template": int(own.sum()),
        "openings": int((own & in_heads).sum()),
    }


def _tokens(encoder, text: str, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return which tokens of the text have a character in one of the spans."""
    backend = encoder.tokenizer.backend_tokenizer
    backend.encode_special_tokens = False
    spans = [(start, end) for start, end in spans if start < end]
    _, labels = next(encoder._labeled_texts([text], [spans], as_arrays=True))
    return np.asarray(labels) != IGNORE
