"""Find question and answer in the columns of published datasets by name."""

from collections.abc import Iterable
from typing import Any

from zerofit.data.dataset_conventions import turns

# Matching columns of a question and its answer.
COLUMN_PAIRS = (
    ("prompt", "completion"), ("question", "answer"), ("instruction", "output"), ("instruction", "response"),
    ("query", "response"), ("question", "response"), ("prompt", "response"), ("problem", "solution"),
    ("problem", "generated_solution"), ("question", "generated_solution"), ("input", "output"), ("inputs", "targets"),
    ("human", "assistant"), ("user", "assistant"), ("message_1", "message_2"),
)  # fmt: skip

# Columns of a question and of an answer, which match if a row has a single one of each.
QUESTION_COLUMNS = (
    "instruction", "question", "prompt", "query", "problem", "input", "inputs", "human", "user", "message_1",
)  # fmt: skip

ANSWER_COLUMNS = ("completion", "answer", "output", "response", "solution", "target", "targets", "assistant")

TEXT_COLUMNS = ("content", "document", "body", "article")

CHAT_COLUMNS = ("conversation", "dialogue", "dialog", "chat", "data")  # columns of turns, in order of preference

# By the question's name; prompt and completion for other names.
OUR_COLUMNS = {"instruction": ("instruction", "output"), "question": ("question", "answer")}

# Synonyms of our optional columns; INPUT_COLUMNS, with Dolly's context, only for an instruction.
SYSTEM_COLUMNS = {"system": "system", "system_prompt": "system", "system_message": "system"}

GEMINI_SYSTEM = ("systemInstruction", "system_instruction")  # next to `contents`

INPUT_COLUMNS = {"input": "input", "context": "input"}


def guess(row: dict[str, Any]) -> dict[str, str]:
    """Guess {column of the row: our name} for a row of unknown format by its column names, or {}."""
    chat = _chat(row)
    if chat:
        return {chat: "messages"} | {name: "system" for name in row if name in GEMINI_SYSTEM}
    folded = _folded(name for name, value in row.items() if isinstance(value, str))
    pair = _pair(folded)
    if pair is None:
        return {}
    ours = OUR_COLUMNS.get(pair[0], ("prompt", "completion"))
    names = {folded[theirs]: name for theirs, name in zip(pair, ours, strict=True)}
    columns = _folded(row)
    for theirs, name in (SYSTEM_COLUMNS | (INPUT_COLUMNS if ours[0] == "instruction" else {})).items():
        if theirs in columns and name not in names.values():
            names[columns[theirs]] = name
    return names


def text_column(row: dict[str, Any]) -> str | None:
    """Return the column of a full text in a row without a question, or None."""
    folded = _folded(name for name, value in row.items() if isinstance(value, str))
    if any(name in folded for name in QUESTION_COLUMNS):
        return None
    return next((folded[name] for name in TEXT_COLUMNS if name in folded), None)


def describe_guess(names: dict[str, str]) -> str:
    """Return the note about columns that were guessed."""
    pairs = ", ".join(ours if ours == theirs else f"{ours}={theirs}" for theirs, ours in names.items())
    return f"columns recognized by name: {pairs} (change them with --columns)"


def _folded(names: Iterable[str]) -> dict[str, str]:
    """Return {name in lower case: name}, without names that differ only in their case."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(str(name).strip().lower(), []).append(name)
    return {key: group[0] for key, group in groups.items() if len(group) == 1}


def _chat(row: dict[str, Any]) -> str | None:
    """Return the column of turns; None if several are possible."""
    chats = [name for name, value in row.items() if turns.is_turns(value)]
    lists = [name for name in CHAT_COLUMNS if isinstance(row.get(name), list) and len(row[name]) > 1]
    string_lists = [name for name in lists if all(isinstance(text, str) for text in row[name])]
    named = [name for name in (*chats, *string_lists) if str(name).lower() in CHAT_COLUMNS]
    certain = chats if len(chats) == 1 else named
    return certain[0] if len(certain) == 1 else None


def _pair(folded: dict[str, str]) -> tuple[str, str] | None:
    """Return the names of question and answer, in lower case; None if several are possible."""
    questions, answers = candidates(folded)
    known = [pair for pair in COLUMN_PAIRS if pair[0] in questions and pair[1] in folded]
    if len(known) == 1:
        return known[0]
    return (questions[0], answers[0]) if len(questions) == len(answers) == 1 else None


def candidates(columns: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the possible columns of the question, and of the answer, in lower case."""
    folded = _folded(columns)
    questions, answers = ([name for name in names if name in folded] for names in (QUESTION_COLUMNS, ANSWER_COLUMNS))
    return [name for name in questions if name != "input" or "instruction" not in questions], answers
