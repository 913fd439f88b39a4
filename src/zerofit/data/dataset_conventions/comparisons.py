"""Convert preferences of published datasets to a prompt, a chosen and a rejected answer."""

import re
from typing import Any

from zerofit.base.errors import UserError
from zerofit.data.dataset_conventions import turns

# Columns of the better and of the worse answer; `messages` ends with the better answer (ms-swift).
SIDES = (
    ("chosen", "rejected"), ("preferred_output", "non_preferred_output"),
    ("chosen_messages", "rejected_messages"), ("chosen_response", "rejected_response"),
    ("chosen_answer", "rejected_answer"), ("response_j", "response_k"), ("response", "rejected_response"),
    ("completion", "rejected_response"), ("messages", "rejected_messages"), ("messages", "rejected_response"),
    ("conversations", "rejected_response"),
)  # fmt: skip

# Two answers with a column for the better one: (first, second, column, function from its value to the index of the
# better one; None for a tie).
VERDICTS = (
    ("human_ref_A", "human_ref_B", "labels", lambda value: {1: 0, 0: 1}.get(value)),  # SHP
    ("response_0", "response_1", "better_response_id", lambda value: value if value in (0, 1) else None),  # PKU's
    ("conversation_a", "conversation_b", "winner", lambda value: {"model_a": 0, "model_b": 1}.get(value)),  # Arena
    ("response_a", "response_b", "winner", lambda value: {"model_a": 0, "model_b": 1}.get(value)),
    ("response1", "response2", "overall_preference", lambda value: None if not value else int(value > 0)),  # HelpSteer
)

SCORED = ("answer_0", "answer_1", "score_0", "score_1")  # WebGPT's comparisons

PROMPTS = ("query", "input", "context", "history", "user", "human", "conversation")  # used without any other prompt

HUMAN = "\n\nHuman: "

DIALOGUE = re.compile(r"\n\nHuman: |\n\nAssistant: ?")  # Anthropic's hh-rlhf: a dialogue in a string

RANKS = ("rank", "score", "overall_score", "rating")


class Tie(UserError):
    """A comparison in which neither answer is better."""


def columns_of(row: dict[str, Any]) -> tuple[str, str] | None:
    """Return the columns of the better and of the worse answer if only preference data have them."""
    return _first_present(row, SIDES[:6])  # the others also hold an answer for SFT


def _first_present(row: dict[str, Any], pairs: tuple[tuple[str, str], ...]) -> tuple[str, str] | None:
    return next((pair for pair in pairs if all(row.get(name) is not None for name in pair)), None)


def standard(place: str, row: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the row with `chosen`, `rejected` and its prompt under our names, and notes.

    Raises: Tie if neither answer is better.
    """
    if any(str(key).strip().lower() in ("chosen", "rejected", "prompt") and key != str(key).lower() for key in row):
        row = {key.strip().lower() if key.strip().lower() in ("chosen", "rejected", "prompt") else key: value
               for key, value in row.items()}  # fmt: skip
    notes: tuple[str, ...] = ()
    row = _with_input(row)
    for name in SIDES[0] + SIDES[1] + tuple(worse for _, worse in SIDES[2:]):
        if not _has_several(row, name):
            continue
        if len(row[name]) == 1:
            row = row | {name: row[name][0]}
        else:
            raise UserError(
                f"{place}: column {name!r} holds {len(row[name])} answers, but a pair has one: write one row per "
                "answer, with the same prompt and the same better answer."
            )
    if row.get("chosen") is None or row.get("rejected") is None:
        row, notes = _sides(place, row)
    return _prompt(row), notes


def _with_input(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of OpenAI's preference files with the messages and tools of its `input` under our names."""
    request = row.get("input")
    if "preferred_output" not in row or not isinstance(request, dict) or "messages" not in request:
        return row
    ours = {"prompt": request["messages"]} | ({"tools": request["tools"]} if request.get("tools") else {})
    return {key: value for key, value in row.items() if key != "input"} | ours


def _has_several(row: dict[str, Any], name: str) -> bool:
    """Return whether a column holds several answers; strings without a prompt may be turns of a conversation."""
    answers = row.get(name)
    if not isinstance(answers, list) or not answers:
        return False
    if all(isinstance(answer, list) for answer in answers):
        return True
    others = [value for key, value in row.items() if key != name]
    alone = not any(isinstance(value, str) or turns.is_turns(value) for value in others)
    return all(isinstance(answer, str) for answer in answers) and not alone


def _sides(place: str, row: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    pair = _first_present(row, SIDES)
    if pair:
        better, worse = (row[name] for name in pair)
        rest = {key: value for key, value in row.items() if key not in pair}
        if pair[0] in ("messages", "conversations"):
            better, worse = _last_answers(place, pair, better, worse)
        return rest | {"chosen": better, "rejected": worse}, ()
    for first, second, column, better_of in VERDICTS:
        if all(row.get(name) is not None for name in (first, second, column)):
            return _decided(place, row, (first, second), better_of(row[column]), column)
    if all(row.get(name) is not None for name in SCORED):
        first, second, *scores = SCORED
        low, high = (row[name] for name in scores)
        return _decided(place, row, (first, second), None if low == high else int(high > low), " and ".join(scores))
    return row, ()


def _decided(
    place: str, row: dict[str, Any], columns: tuple[str, str], better: int | None, by: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    if better is None:
        raise Tie(f"{place}: {columns[0]} and {columns[1]} are a tie by {by}.")
    rest = {key: value for key, value in row.items() if key not in (*columns, *by.split(" and "))}
    sides = {"chosen": row[columns[better]], "rejected": row[columns[1 - better]]}
    return rest | sides, (f"the better of {columns[0]} and {columns[1]} is chosen by {by}",)


def _last_answers(place: str, names: tuple[str, str], better: Any, worse: Any) -> tuple[Any, Any]:
    """Return the conversations that end with the better and with the worse answer."""
    better, _ = turns.with_roles(place, better)
    if turns.role_of(better[-1]) != "assistant":
        raise UserError(f"{place}: {names[0]!r} must end with an answer, the better one than {names[1]!r}.")
    if isinstance(worse, str):
        return better, [*better[:-1], {"role": "assistant", "content": worse}]
    worse, _ = turns.with_roles(place, worse)
    is_complete = turns.role_of(worse[0]) in ("system", "user")
    return better, worse if is_complete else [*better[:-1], *worse]


def _prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with its prompt under our name, as turns if it is a dialogue in a string."""
    known = ("prompt", "conversations", "messages", "instruction", "question")
    if all(row.get(name) is None for name in known):
        name = next((name for name in PROMPTS if isinstance(row.get(name), str) or turns.is_turns(row.get(name))), None)
        if name:
            row = {("prompt" if key == name else key): value for key, value in row.items() if key != "prompt"}
    if isinstance(row.get("question"), dict) and isinstance(row["question"].get("full_text"), str):  # WebGPT's
        row = row | {"question": row["question"]["full_text"]}
    prompt = row.get("prompt")
    if not (isinstance(prompt, str) and prompt.startswith(HUMAN)):
        return row
    sides = {name: row[name].strip() for name in ("chosen", "rejected") if isinstance(row.get(name), str)}
    is_open = [turn for turn in dialogue(prompt) if turn["content"]]
    return row | {"prompt": is_open} | {n: text for n, text in sides.items() if not row[n].startswith(HUMAN)}


def dialogue(text: str) -> list[dict]:
    """Return the turns of a dialogue in a string."""
    roles = ["user" if "Human" in mark else "assistant" for mark in DIALOGUE.findall(text)]
    return [{"role": r, "content": t.strip()} for r, t in zip(roles, DIALOGUE.split(text)[1:], strict=True)]


def ranking(row: dict[str, Any]) -> tuple[str, str, int] | None:
    """Return (column, key of the rank, answers) of a column that ranks several answers, or None."""
    for name, value in row.items():
        if isinstance(value, list) and len(value) > 1 and all(isinstance(answer, dict) for answer in value):
            key = next((key for key in RANKS if key in value[0]), None)
            if key and "role" not in value[0]:
                return str(name), key, len(value)
    return None
