"""Find the tokens that end trained answers, in the rendered rows; decide where generation stops, and say it."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from zerofit.data.conversations import Conversation
from zerofit.job.settings import Check

# What a token was found to end; INSIDE: it stands in a trained answer, before its end.
ANSWER, CALL, TEXT, INSIDE = "answer", "tool call", "text", "inside"

CHECK = "end_token"  # name of the line in the certificate

ROWS = 100  # whose labels are looked at for the line

SEARCHED = 100  # answers of a chunk that are searched for all likely tokens, the others for those that end answers


class Found:
    """Count what ends the trained answers of rows: (token, or "" for none; kind) -> answers, and the first place."""

    def __init__(self, words: tuple[str, ...], template: str, named: Collection[str]):
        """Args: words: all that may end an answer, longest first; named: special tokens of a name, such as eos."""
        self.count, self.first = Counter(), {}
        self.likely = [word for word in words if word in template or word in named]  # of up to 1,000 in a tokenizer
        self.words = (*self.likely, *words)

    def add(self, place: str, text: str, answers: Iterable[tuple[int, int, int]], conversation: Conversation) -> None:
        """Count the ends of answers [(turn, start, end)] in a rendered text."""
        for turn, start, end in answers:
            word = self.at_end(text, end)
            self.note(place, word, CALL if conversation.turns[turn].get("tool_calls") else ANSWER)
            searched = (
                self.likely if self.count.total() <= SEARCHED else {w for w, kind in self.count if kind != INSIDE}
            )
            for other in searched:
                if text.find(other, start, end - len(word)) >= 0:
                    self.note(place, other, INSIDE)

    def at_end(self, text: str, end: int) -> str:
        """Return the token that the text up to `end` ends with; "" if none does."""
        return next((word for word in self.words if text.endswith(word, 0, end)), "")

    def note(self, place: str, word: str, kind: str) -> None:
        self.count[word, kind] += 1
        self.first.setdefault((word, kind), place)

    def take(self) -> list[dict]:
        """Return what was counted, as JSON holds it, and start anew."""
        found = [
            {"token": word, "ends": kind, "count": n, "first": self.first[word, kind]}
            for (word, kind), n in self.count.items()
        ]
        self.count.clear()
        self.first.clear()
        return found


def summary(entries: Iterable[dict]) -> list[dict]:
    """Return the entries of `Found.take` of several chunks, in order, as one list, the commonest first.

    Tokens that end nothing are left out.
    """
    added: dict[tuple, dict] = {}
    for entry in entries:
        known = added.setdefault((entry["token"], entry["ends"]), entry | {"count": 0})
        known["count"] += entry["count"]
    ending = {word for word, kind in added if kind != INSIDE}
    return sorted((e for e in added.values() if e["token"] in ending), key=lambda e: -e["count"])


@dataclass(frozen=True)
class Ends:
    """Where generation must stop."""

    words: tuple[str, ...]  # tokens that end trained answers, commonest first
    ids: tuple[int, ...]  # theirs
    eos: str  # the one that becomes the tokenizer's eos_token; "" where that stays
    said: tuple[str, ...]  # sentences for the start of the run


def decide(found: list[dict], tokenizer, known: Collection[int]) -> Ends:
    """Return where generation must stop after training on rows with these ends.

    A token that also stands inside trained answers is left out: generation would cut these there. The tokenizer's
    eos_token changes only where the base does not stop at the answers' end by itself, and not under a template that
    writes `eos_token`, which would write another text then.
    Args: found: statistics["ends"] of the training set; known: ids at which the base's generation stops.
    """
    inside = {e["token"] for e in found if e["ends"] == INSIDE}
    ending = [e for kind in (ANSWER, CALL, TEXT) for e in found if e["ends"] == kind]
    words = tuple(dict.fromkeys(e["token"] for e in ending if e["token"] and e["token"] not in inside))
    ids = tuple(tokenizer.convert_tokens_to_ids(list(words)))
    other = words[:1] != (tokenizer.eos_token,) and words and ids[0] not in known
    eos = words[0] if other and not re.search(r"\beos_token\b", tokenizer.chat_template or "") else ""
    return Ends(words, ids, eos, tuple(_said(found, ending, dict(zip(words, ids, strict=True)), eos, other, tokenizer)))


def _said(found: list[dict], ending: list[dict], ids: dict[str, int], eos: str, other: bool, tokenizer) -> list[str]:
    said, of_answers = [], [e for e in ending if e["ends"] != TEXT and e["token"] in ids]
    if len({e["token"] for e in of_answers}) > 1:
        kinds = ", ".join(
            f"{e['token']} (id {ids[e['token']]}) behind {_counted(e)}, first in {e['first']}" for e in of_answers
        )
        said.append(f"answers end with more than one token, and generation stops at each: {kinds}")
    if other:
        word = next(iter(ids))
        then = f", and it becomes the eos_token of final/ (id {tokenizer.eos_token_id} before)" if eos else ""
        said.append(
            f"answers end with {word} (id {ids[word]}), not with the tokenizer's {tokenizer.eos_token}: generation "
            f"stops at both{then}"
        )
    for e in ending:
        if not e["token"]:
            said.append(
                f"no end token is behind {_counted(e)}, first in {e['first']}: the model does not learn to stop there"
            )
        elif e["token"] not in ids:
            within = next(i for i in found if i["ends"] == INSIDE and i["token"] == e["token"])
            said.append(
                f"{e['token']} ends {_counted(e)}, first in {e['first']}, but also stands inside {within['count']:,}, "
                f"first in {within['first']}: generation does not stop at it"
            )
    return said


def _counted(entry: dict) -> str:
    return f"{entry['count']:,} {entry['ends']}{'s' * (entry['count'] > 1)}"


def check(ends: Ends, rows, generated: list[int], shipped: list[int] | None) -> Check:
    """Return the certificate's line: the tokens that end answers in the labels, in generation and in final/ are alike.

    Args: rows: of the training set; generated, shipped: ids at which generation of the model stops, and of what was
        saved (None: not yet).
    """
    labels = [rows[i]["labels"] for i in range(min(ROWS, len(rows)))]
    kept = sum(1 for row in labels if not set(ends.ids).isdisjoint(row))
    numbers = {"trained": dict(zip(ends.words, ends.ids, strict=True)), "generated": generated, "shipped": shipped,
               "rows": len(labels), "rows_with_an_end": kept}  # fmt: skip
    if not ends.words:
        return Check(CHECK, None, next(iter(ends.said), "rows like these do not say what ends an answer"), numbers)
    words = ", ".join(f"{word} (id {i})" for word, i in numbers["trained"].items())
    if not kept:  # all cut at --max_length, or masked by the data
        cut = f"answers end with {words}, but none of the first {len(labels)} rows has one of these in its labels"
        return Check(CHECK, None, f"{cut}: the model does not learn to stop", numbers)
    faults = [
        *([f"generation stops at {generated} only"] if not set(ends.ids) <= set(generated) else []),
        *([f"final/ stops at {shipped}, not at {generated}"] if shipped not in (None, generated) else []),
    ]
    stops = "generation stops there" if shipped is None else "generation and final/ stop there"
    said = f"end token: trained answers end with {words}; {'; '.join(faults) or stops}"
    return Check(CHECK, not faults, said, numbers)
