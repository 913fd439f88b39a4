"""Read the marks of rows and turns that change what is trained; refuse those that are not followed."""

from typing import Any

from zerofit.base.errors import UserError
from zerofit.data.published import trees

# Keys of a turn that say whether it is trained: axolotl's, OpenAI's, ms-swift's and xtuner's, LLaMA-Factory's.
TRAIN_MARKS = ("train", "training", "trainable", "weight", "loss", "loss_weight", "loss_scale", "output_with_loss")

FOR_ANY_ROLE = ("train", "training", "trainable")  # true trains turns of the user as well; the others are the answers'

DETAILS = ("train_detail", "training_detail")  # axolotl's: parts of a turn by character

TURN_MARKS = frozenset((*TRAIN_MARKS, *DETAILS))

ROW_MARKS = ("weight", "sample_weight", "loss_weight", "train", "trainable")  # columns that weigh a whole row

MEDIA = ("images", "videos", "audios", "image", "video", "audio")

LABELS = ("label", "kto_tag")  # columns that mark an answer as good or bad; the second is LLaMA-Factory's

VERDICTS = ("true", "false", "0", "1")  # their values, in any case

PARENTS = (*trees.PARENTS, trees.COLUMNS[0])  # of Open Assistant's messages

SOLUTION = "solution"  # beside question and answer: the answer is then its last line alone (LIMO, s1K)

ASKED_BESIDE_TEXT = ("prompt", "question", "instruction")

SUSPICIOUS = frozenset((*ROW_MARKS, *MEDIA, *LABELS, SOLUTION, "role", *ASKED_BESIDE_TEXT, "mask", "attention_mask"))

RENAME = "if it means something else, rename it (--columns other={0})"


def check_row(place: str, row: dict[str, Any], kind: str) -> None:
    """Refuse a row whose other columns change what is meant to be trained.

    Raises: UserError naming the column (media, weights, KTO, message trees, a question beside a text, masks).
    """
    if SUSPICIOUS.isdisjoint(row):
        return
    media = next((name for name in MEDIA if row.get(name)), None)
    if media:
        raise UserError(
            f"{place}: column {media!r} is not empty, but this kit trains on text only; " + RENAME.format(media) + "."
        )
    weight = next((name for name in ROW_MARKS if name in row and _number(row[name]) not in (None, 1)), None)
    if weight:
        raise UserError(
            f"{place}: column {weight!r} is {row[weight]!r}, but rows are not weighed one by one: put them into files "
            "and weigh these (--data a.jsonl b.jsonl:0.5), and remove the column; " + RENAME.format(weight) + "."
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
    """Return the column that marks the row's answer as good or bad (KTO); None without one."""
    return next((name for name in LABELS if str(row.get(name)).lower() in VERDICTS), None)


def check_labels(place: str, row: dict[str, Any]) -> None:
    """Raise UserError for two columns that mark the answer, and contradict each other."""
    marks = {name: str(row[name]).lower() in ("true", "1") for name in LABELS if str(row.get(name)).lower() in VERDICTS}
    if len(set(marks.values())) > 1:
        said = " and ".join(f"{name!r} is {row[name]!r}" for name in marks)
        raise UserError(f"{place}: {said}, so whether the answer is wanted is not certain; keep one of them.")


def refuse_label(place: str, row: dict[str, Any]) -> None:
    """Raise UserError for a row whose answer is marked as good or bad."""
    label = label_of(row)
    if label:
        raise UserError(
            f"{place}: column {label!r} marks answers as good or bad, which --loss_type kto trains on "
            "(recipes/dpo.py); here all of them would be trained on alike: keep the good ones and remove the column, "
            f"or {RENAME.format(label)}."
        )


def _number(value: Any) -> float | None:
    """Return a weight as a number; None for null and for text, which is no weight."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return {"true": 1.0, "false": 0.0}.get(str(value).lower())


def _check_text(place: str, row: dict[str, Any]) -> None:
    parent = next((name for name in PARENTS if name in row), None)
    if "role" in row and parent:
        raise UserError(
            f"{place}: columns 'role' and {parent!r} make this one message of a tree of conversations, which would be "
            "trained on alone; join the messages of a conversation into a `messages` column first."
        )
    text = row["text"]
    for name in ASKED_BESIDE_TEXT:
        asked = row.get(name)
        if isinstance(asked, list) or (isinstance(asked, str) and asked.strip() and asked.strip() not in str(text)):
            raise UserError(
                f"{place}: columns {name!r} and 'text': the text would be trained on without its {name}. If it is the "
                f"answer: --columns prompt={name} completion=text; if not: --columns other={name}."
            )


def _check_solution(place: str, row: dict[str, Any]) -> None:
    solution, answer = row.get(SOLUTION), row["answer"]
    if isinstance(solution, str) and isinstance(answer, str) and len(solution.strip()) > len(answer):
        raise UserError(
            f"{place}: columns 'answer' and {SOLUTION!r}: which of them is the answer is not certain; name it: "
            f"--columns answer={SOLUTION}, or for the shorter one --columns other={SOLUTION}."
        )


def _check_masks(place: str, row: dict[str, Any]) -> None:
    if isinstance(row.get("mask"), list):
        raise UserError(
            f"{place}: column 'mask' beside input_ids: in some kits its true is trained, in others not; rename it to "
            "completion_mask, where 1 is trained (or --columns other=mask)."
        )
    if isinstance(row.get("attention_mask"), list) and 0 in row["attention_mask"]:
        raise UserError(
            f"{place}: column 'attention_mask' has zeros, so input_ids holds padding, which would be trained on; cut "
            "it off."
        )


def is_trained(place: str, i: int, role: str, message: dict[str, Any]) -> bool:
    """Return whether turn `i` is an answer to train on, by its marks.

    Raises: UserError for a mark that is neither 0 nor 1, for two that contradict, for one that is not followed.
    """
    is_answer = role == "assistant"
    if TURN_MARKS.isdisjoint(message):
        return is_answer
    detail = next((name for name in DETAILS if message.get(name)), None)
    if detail:
        raise UserError(
            f"{place}: turn {i} has {detail!r}, which trains parts of a turn; only whole turns can be left out "
            "('train': false)."
        )
    marks = {name: message[name] for name in TRAIN_MARKS if message.get(name) is not None}
    for name, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise UserError(
                f"{place}: turn {i}: {name!r} must be true or false (1 or 0; turns are not weighed), found {value!r}."
            )
        if value and not is_answer and name in FOR_ANY_ROLE:
            raise UserError(
                f"{place}: turn {i} has {name!r}: true, but it is a {role} turn, and only answers are trained on; "
                "remove it (--train_on all trains on everything)."
            )
    if len(set(map(bool, marks.values()))) > 1:
        said = ", ".join(f"{name!r}: {value!r}" for name, value in marks.items())
        raise UserError(f"{place}: turn {i} has marks that contradict each other ({said}); keep one.")
    return is_answer and all(marks.values())
