"""Find the tokens that end trained answers in the rendered rows, and decide where generation stops."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from zerofit.data.conversations import Conversation
from zerofit.job.settings import Check

# Kinds of text that a token ends; INSIDE: a trained answer contains it before its end.
ANSWER, CALL, TEXT, INSIDE = "answer", "tool call", "text", "inside"

CHECK = "end_token"  # name of the certificate's line

CHECKED_ROWS = 100  # rows whose labels the check reads

# Answers of a chunk that are searched for all likely tokens; the others are searched for the tokens that end answers.
MAX_FULLY_SEARCHED = 100


class EndCounter:
    """Count the ends of trained answers: (token or "", kind) -> number of answers, and the first place."""

    def __init__(self, words: tuple[str, ...], template: str, named: Collection[str]):
        """Args: words: tokens that may end an answer, longest first; named: special tokens with a name, such as eos."""
        self.count, self.first = Counter(), {}
        self.likely = [word for word in words if word in template or word in named]  # a tokenizer may have 1,000 words
        self.words = (*self.likely, *words)

    def add(self, place: str, text: str, answers: Iterable[tuple[int, int, int]], conversation: Conversation) -> None:
        """Count the ends of answers [(turn, start, end)] in a rendered text."""
        for turn, start, end in answers:
            word = self.at_end(text, end)
            self.note(place, word, CALL if conversation.turns[turn].get("tool_calls") else ANSWER)
            searched = (
                self.likely
                if self.count.total() <= MAX_FULLY_SEARCHED
                else {w for w, kind in self.count if kind != INSIDE}
            )
            for other in searched:
                if text.find(other, start, end - len(word)) >= 0:
                    self.note(place, other, INSIDE)

    def at_end(self, text: str, end: int) -> str:
        """Return the token at the end of text[:end], or ""."""
        return next((word for word in self.words if text.endswith(word, 0, end)), "")

    def note(self, place: str, word: str, kind: str) -> None:
        self.count[word, kind] += 1
        self.first.setdefault((word, kind), place)

    def take(self) -> list[dict]:
        """Return the counts as JSON values, and reset them."""
        entries = [
            {"token": word, "ends": kind, "count": n, "first": self.first[word, kind]}
            for (word, kind), n in self.count.items()
        ]
        self.count.clear()
        self.first.clear()
        return entries


def summary(entries: Iterable[dict]) -> list[dict]:
    """Merge the entries of `EndCounter.take` of several chunks, most common first, without tokens that end nothing."""
    merged: dict[tuple, dict] = {}
    for entry in entries:
        merged.setdefault((entry["token"], entry["ends"]), entry | {"count": 0})["count"] += entry["count"]
    ending = {word for word, kind in merged if kind != INSIDE}
    return sorted((e for e in merged.values() if e["token"] in ending), key=lambda e: -e["count"])


@dataclass(frozen=True)
class Ends:
    """Where generation must stop."""

    words: tuple[str, ...]  # tokens that end trained answers, most common first
    ids: tuple[int, ...]  # ids of the words
    eos: str  # new eos_token of the tokenizer; "" to keep the current one
    sentences: tuple[str, ...]  # printed at the start of the run


def decide(entries: list[dict], tokenizer, known: Collection[int]) -> Ends:
    """Return where generation must stop after training on rows with these ends.

    A token that also occurs inside trained answers is excluded: generation would cut them. The tokenizer's eos_token
    changes only if the base model does not stop at the answers' end, and if the template does not write `eos_token`,
    whose text would change.
    Args: entries: statistics["ends"] of the training set; known: ids at which the base model's generation stops.
    """
    inside = {e["token"] for e in entries if e["ends"] == INSIDE}
    ending = [e for kind in (ANSWER, CALL, TEXT) for e in entries if e["ends"] == kind]
    words = tuple(dict.fromkeys(e["token"] for e in ending if e["token"] and e["token"] not in inside))
    ids = tuple(tokenizer.convert_tokens_to_ids(list(words)))
    other = words[:1] != (tokenizer.eos_token,) and words and ids[0] not in known
    eos = words[0] if other and not re.search(r"\beos_token\b", tokenizer.chat_template or "") else ""
    sentences = _sentences(entries, ending, dict(zip(words, ids, strict=True)), eos, other, tokenizer)
    return Ends(words, ids, eos, tuple(sentences))


def _sentences(entries: list[dict], ending: list[dict], ids: dict, eos: str, other: bool, tokenizer) -> list[str]:
    sentences, answer_ends = [], [e for e in ending if e["ends"] != TEXT and e["token"] in ids]
    if len({e["token"] for e in answer_ends}) > 1:
        kinds = ", ".join(f"{e['token']} (id {ids[e['token']]}) after {_counted(e)}" for e in answer_ends)
        sentences.append(f"answers end with several tokens, and generation stops at each: {kinds}")
    if other:
        word = next(iter(ids))
        new = f", and {word} becomes the eos_token of final/ (previously id {tokenizer.eos_token_id})" if eos else ""
        sentences.append(
            f"answers end with {word} (id {ids[word]}), not with the tokenizer's {tokenizer.eos_token}: generation "
            f"stops at both{new}"
        )
    for e in ending:
        if not e["token"]:
            sentences.append(f"no end token after {_counted(e)}: the model does not learn to stop there")
        elif e["token"] not in ids:
            inside = next(i for i in entries if i["ends"] == INSIDE and i["token"] == e["token"])
            sentences.append(
                f"{e['token']} ends {_counted(e)}, but also occurs inside {inside['count']:,}, first in "
                f"{inside['first']}: generation does not stop at it"
            )
    return sentences


def _counted(entry: dict) -> str:
    return f"{entry['count']:,} {entry['ends']}{'s' * (entry['count'] > 1)}, first in {entry['first']}"


def check(ends: Ends, rows, generated: list[int], shipped: list[int] | None) -> Check:
    """Return the certificate's line: labels, generation and final/ have the same end tokens.

    Args: rows: training rows; generated, shipped: ids at which the model's generation stops, and final/ (None before
        it is saved).
    """
    labels = [rows[i]["labels"] for i in range(min(CHECKED_ROWS, len(rows)))]
    kept = sum(1 for row in labels if not set(ends.ids).isdisjoint(row))
    numbers = {"trained": dict(zip(ends.words, ends.ids, strict=True)), "generated": generated, "shipped": shipped,
               "rows": len(labels), "rows_with_an_end": kept}  # fmt: skip
    if not ends.words:
        return Check(CHECK, None, next(iter(ends.sentences), "these rows do not define the end of an answer"), numbers)
    words = ", ".join(f"{word} (id {i})" for word, i in numbers["trained"].items())
    if not kept:  # all truncated at --max_length, or masked by the data
        missing = f"answers end with {words}, but the labels of the first {len(labels)} rows contain none of them"
        return Check(CHECK, None, f"{missing}: the model does not learn to stop", numbers)
    faults = [
        *([f"generation stops at {generated} only"] if not set(ends.ids) <= set(generated) else []),
        *([f"final/ stops at {shipped}, not at {generated}"] if shipped not in (None, generated) else []),
    ]
    stops = "generation stops there" if shipped is None else "generation and final/ stop there"
    sentence = f"end token: trained answers end with {words}; {'; '.join(faults) or stops}"
    return Check(CHECK, not faults, sentence, numbers)
