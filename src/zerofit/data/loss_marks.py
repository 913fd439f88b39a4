"""Read the marks of rows and turns that change the loss, and refuse unsupported ones."""

from typing import Any

from zerofit.base.errors import UserError
from zerofit.data.dataset_conventions import trees

# Keys of a turn that set whether it is trained: axolotl's, OpenAI's, ms-swift's and xtuner's, LLaMA-Factory's.
TRAIN_MARKS = ("train", "training", "trainable", "weight", "loss", "loss_weight", "loss_scale", "output_with_loss")

ANY_ROLE_MARKS = ("train", "training", "trainable")  # true also trains user turns; other marks are for answers only

DETAILS = ("train_detail", "training_detail")  # axolotl's marks for character ranges of a turn

TURN_MARKS = frozenset((*TRAIN_MARKS, *DETAILS))

ROW_MARKS = ("weight", "sample_weight", "loss_weight", "train", "trainable")  # columns with the weight of a row

MEDIA = ("images", "videos", "audios", "image", "video", "audio")

LABELS = ("label", "kto_tag")  # columns that mark an answer as good or bad; the second is LLaMA-Factory's

VERDICTS = ("true", "false", "0", "1")  # their values, in lower case

TREE_COLUMNS = (*trees.PARENTS, trees.COLUMNS[0])  # columns of Open Assistant's messages

SOLUTION = "solution"  # next to question and answer: the answer is then only its last line (LIMO, s1K)

QUESTIONS_WITH_TEXT = ("prompt", "question", "instruction")

SUSPICIOUS = frozenset((*ROW_MARKS, *MEDIA, *LABELS, SOLUTION, "role", *QUESTIONS_WITH_TEXT, "mask", "attention_mask"))

RENAME = "if it means something else, rename it (--columns other={0})"


def check_row(place: str, row: dict[str, Any], kind: str) -> None:
    """Raise UserError for columns that would change the loss.

    They hold media, weights, KTO labels, message trees, a question next to a text, or masks.
    """
    if SUSPICIOUS.isdisjoint(row):
        return
    media = next((name for name in MEDIA if row.get(name)), None)
    if media:
        raise UserError(
            f"{place}: column {media!r} is not empty, but training uses text only; " + RENAME.format(media) + "."
        )
    weight = next((name for name in ROW_MARKS if name in row and _number(row[name]) not in (None, 1)), None)
    if weight:
        raise UserError(
            f"{place}: column {weight!r} is {row[weight]!r}, but rows cannot be weighted: split them into "
            "files with weights (--data a.jsonl b.jsonl:0.5), and remove the column; " + RENAME.format(weight) + "."
        )
    if kind not in ("text", "tokens"):
        refuse_label(place, row)
    if kind == "text":
        _check_text(place, row)
    if kind == "question/answer":
        _check_solution(place, row)
    if kind == "tokens":
        _check_masks(place, row)


def label_of(row: dict[str, Any]) -> str | None:
    """Return the column that marks the row's answer as good or bad (KTO), or None."""
    return next((name for name in LABELS if str(row.get(name)).lower() in VERDICTS), None)


def check_labels(place: str, row: dict[str, Any]) -> None:
    """Raise UserError for two labels that contradict each other."""
    marks = {name: str(row[name]).lower() in ("true", "1") for name in LABELS if str(row.get(name)).lower() in VERDICTS}
    if len(set(marks.values())) > 1:
        labels = " and ".join(f"{name!r} is {row[name]!r}" for name in marks)
        raise UserError(f"{place}: {labels}, which contradict each other; keep one of them.")


def refuse_label(place: str, row: dict[str, Any]) -> None:
    """Raise UserError for a row whose answer is marked as good or bad."""
    label = label_of(row)
    if label:
        raise UserError(
            f"{place}: column {label!r} marks answers as good or bad, but only recipes/dpo.py with --loss_type "
            "kto uses such labels; here, keep the good answers and remove the column, "
            f"or {RENAME.format(label)}."
        )


def _number(value: Any) -> float | None:
    """Return a weight as a number; None for null and other text."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return {"true": 1.0, "false": 0.0}.get(str(value).lower())


def _check_text(place: str, row: dict[str, Any]) -> None:
    parent = next((name for name in TREE_COLUMNS if name in row), None)
    if "role" in row and parent:
        raise UserError(
            f"{place}: columns 'role' and {parent!r} mark a single message of a tree of conversations; join the "
            "messages of each conversation into a `messages` column."
        )
    text = row["text"]
    for name in QUESTIONS_WITH_TEXT:
        question = row.get(name)
        is_text = isinstance(question, str) and question.strip() and question.strip() not in str(text)
        if isinstance(question, list) or is_text:
            raise UserError(
                f"{place}: columns {name!r} and 'text': training on the text would ignore the {name}. If the text is "
                f"the answer, set --columns prompt={name} completion=text, else --columns other={name}."
            )


def _check_solution(place: str, row: dict[str, Any]) -> None:
    solution, answer = row.get(SOLUTION), row["answer"]
    if isinstance(solution, str) and isinstance(answer, str) and len(solution.strip()) > len(answer):
        raise UserError(
            f"{place}: column 'answer' or {SOLUTION!r} may hold the answer; choose with "
            f"--columns answer={SOLUTION}, or --columns other={SOLUTION} for the shorter one."
        )


def _check_masks(place: str, row: dict[str, Any]) -> None:
    if isinstance(row.get("mask"), list):
        raise UserError(
            f"{place}: column 'mask' is ambiguous: some kits train where it is true, others where it is false; "
            "rename it to completion_mask, where 1 is trained (or ignore it with --columns other=mask)."
        )
    if isinstance(row.get("attention_mask"), list) and 0 in row["attention_mask"]:
        raise UserError(f"{place}: column 'attention_mask' has zeros, so input_ids contains padding; remove it.")


def is_trained(place: str, i: int, role: str, message: dict[str, Any]) -> bool:
    """Return whether turn `i` is an answer to train on, by its marks.

    Raises: UserError for a mark other than 0 or 1, for contradicting marks and for unsupported ones.
    """
    is_answer = role == "assistant"
    if TURN_MARKS.isdisjoint(message):
        return is_answer
    detail = next((name for name in DETAILS if message.get(name)), None)
    if detail:
        raise UserError(
            f"{place}: turn {i} has {detail!r}, which trains parts of a turn; only complete turns can be excluded "
            "('train': false)."
        )
    marks = {name: message[name] for name in TRAIN_MARKS if message.get(name) is not None}
    for name, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise UserError(f"{place}: turn {i}: {name!r} must be true or false (1 or 0, no weight), found {value!r}.")
        if value and not is_answer and name in ANY_ROLE_MARKS:
            raise UserError(
                f"{place}: turn {i} has {name!r}: true, but it is a {role} turn, and only answers are trained on; "
                "remove the mark (--train_on all trains on everything)."
            )
    if len(set(map(bool, marks.values()))) > 1:
        values = ", ".join(f"{name!r}: {value!r}" for name, value in marks.items())
        raise UserError(f"{place}: turn {i} has marks that contradict each other ({values}); keep one.")
    return is_answer and all(marks.values())
