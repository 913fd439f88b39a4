"""Find question and answer in the columns of published data sets, by their names."""

from collections.abc import Iterable
from typing import Any

from zerofit.data.published import turns

# Columns of a question and of its answer that belong together.
TOGETHER = (
    ("prompt", "completion"), ("question", "answer"), ("instruction", "output"), ("instruction", "response"),
    ("query", "response"), ("question", "response"), ("prompt", "response"), ("problem", "solution"),
    ("problem", "generated_solution"), ("question", "generated_solution"), ("input", "output"), ("inputs", "targets"),
    ("human", "assistant"), ("user", "assistant"), ("message_1", "message_2"),
)  # fmt: skip

# Names for a question and an answer, any two of which may stand together where there is one of each.
ASKED = (
    "instruction", "question", "prompt", "query", "problem", "input", "inputs", "human", "user", "message_1",
)  # fmt: skip

ANSWERED = ("completion", "answer", "output", "response", "solution", "target", "targets", "assistant")

WHOLE_TEXT = ("content", "document", "body", "article")

CHATS = ("conversation", "dialogue", "dialog", "chat", "data")  # columns of turns, in order of preference

OURS = {"instruction": ("instruction", "output"), "question": ("question", "answer")}  # else prompt and completion

# Other columns that mean what ours do; of an instruction, also Dolly's context.
BESIDE = {"system": "system", "system_prompt": "system", "system_message": "system"}

GEMINI_SYSTEM = ("systemInstruction", "system_instruction")  # beside `contents`

OF_INSTRUCTION = {"input": "input", "context": "input"}


def guess(row: dict[str, Any]) -> dict[str, str]:
    """Guess {column of the row: our name} for a row of unknown format by its column names; {} without a guess."""
    chat = _chat(row)
    if chat:
        return {chat: "messages"} | {name: "system" for name in row if name in GEMINI_SYSTEM}
    folded = _folded(name for name, value in row.items() if isinstance(value, str))
    pair = _pair(folded)
    if pair is None:
        return {}
    ours = OURS.get(pair[0], ("prompt", "completion"))
    names = {folded[theirs]: name for theirs, name in zip(pair, ours, strict=True)}
    columns = _folded(row)
    for theirs, name in (BESIDE | (OF_INSTRUCTION if ours[0] == "instruction" else {})).items():
        if theirs in columns and name not in names.values():
            names[columns[theirs]] = name
    return names


def whole_text(row: dict[str, Any]) -> str | None:
    """Return the column that may hold a whole text, where nothing is asked and answered."""
    folded = _folded(name for name, value in row.items() if isinstance(value, str))
    if any(name in folded for name in ASKED):
        return None
    return next((folded[name] for name in WHOLE_TEXT if name in folded), None)


def said(names: dict[str, str]) -> str:
    """Return the note about columns that were guessed."""
    pairs = ", ".join(ours if ours == theirs else f"{ours}={theirs}" for theirs, ours in names.items())
    return f"columns taken by their names: {pairs} (--columns names others)"


def _folded(names: Iterable[str]) -> dict[str, str]:
    """Return {name in lower case: name}, without names that differ only in their case."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(str(name).strip().lower(), []).append(name)
    return {key: listed[0] for key, listed in found.items() if len(listed) == 1}


def _chat(row: dict[str, Any]) -> str | None:
    """Return the column that holds turns; None unless it is certain which."""
    found = [name for name, value in row.items() if turns.is_turns(value)]
    lists = [name for name in CHATS if isinstance(row.get(name), list) and len(row[name]) > 1]
    of_strings = [name for name in lists if all(isinstance(text, str) for text in row[name])]
    named = [name for name in (*found, *of_strings) if str(name).lower() in CHATS]
    certain = found if len(found) == 1 else named
    return certain[0] if len(certain) == 1 else None


def _pair(folded: dict[str, str]) -> tuple[str, str] | None:
    """Return the names of question and answer, in lower case; None where several could be meant."""
    asked, answered = candidates(folded)
    known = [pair for pair in TOGETHER if pair[0] in asked and pair[1] in folded]
    if len(known) == 1:
        return known[0]
    return (asked[0], answered[0]) if len(asked) == len(answered) == 1 else None


def candidates(columns: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names among columns that may be the question, and that may be the answer, in lower case."""
    folded = _folded(columns)
    asked, answered = ([name for name in names if name in folded] for names in (ASKED, ANSWERED))
    return [name for name in asked if name != "input" or "instruction" not in asked], answered
