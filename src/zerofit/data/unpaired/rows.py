"""Parse rows of a prompt, an answer and a label (KTO); take pairs of two answers apart into two such rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zerofit.base.errors import UserError
from zerofit.data import formats, meaning, pairs
from zerofit.data.batches import tables
from zerofit.data.conversations import Conversation
from zerofit.data.published import columns, comparisons

KIND = "unpaired"

FROM_PAIRS = "pairs taken apart"  # the format of a row that holds two answers

# Values of the label in published data, in lower case: TRL's and ms-swift's booleans, and the same as text or numbers.
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}

WITHOUT_PROMPT = ("text", "tokens")  # formats that do not say where the answer begins


def parse(
    place: str, row: dict[str, Any], known: Sequence[formats.Format]
) -> tuple[str, list[tuple[str, Conversation, bool]], list[str], list[str]]:
    """Parse a row into (format, [(place, conversation, whether its answer is wanted)], columns not used, notes).

    Only the turns behind the last question are trained. A row of a pair has two answers.
    Raises: UserError naming the place for a label that is missing or unknown, and as the parsers of both forms.
    """
    pair, notes = comparisons.standard(place, row) if meaning.label_of(row) is None else (row, ())
    if pair.get("chosen") is not None and pair.get("rejected") is not None:
        sides = pairs.parse(place, pair)
        answers = [(f"{place}, {name}", side, name == "chosen") for name, side in zip(pairs.SIDES, sides, strict=True)]
        return FROM_PAIRS, answers, pairs.not_used(pair), list(notes)
    wanted = _label(place, row)
    row = {name: value for name, value in row.items() if name not in meaning.LABELS}
    kind, guessed = formats.recognize(place, row, known)
    row, notes = formats.renamed(row, guessed), [columns.said(guessed)] if guessed else []
    if kind in WITHOUT_PROMPT:
        raise UserError(
            f"{place}: format {kind}: nothing says where the answer begins that 'label' is about; give a `prompt` and "
            "a `completion`, or `messages`."
        )
    conversation = formats.parse(place, row, kind, known)
    asked = max((i for i, turn in enumerate(conversation.turns) if turn["role"] == "user"), default=-1)
    trained = [on and i > asked for i, on in enumerate(conversation.trained)]
    conversation = dataclasses.replace(conversation, trained=trained)
    return kind, [(place, conversation, wanted)], formats.not_used(row, kind, known), notes


def _label(place: str, row: dict[str, Any]) -> bool:
    """Return whether the row's answer is wanted."""
    meaning.check_labels(place, row)
    value = next((row[name] for name in meaning.LABELS if row.get(name) is not None), None)
    if value is None:
        present = ", ".join(k for k, v in row.items() if v is not None) or "none"
        raise UserError(
            f"{place}: column 'label' is missing or null; a row of --loss_type kto has a prompt, a completion and a "
            f"label (true: wanted), or is a pair with `chosen` and `rejected`; columns here: {present}; --columns "
            "label=... maps another name."
        )
    if str(value).lower() not in LABELS:
        raise UserError(f"{place}: column 'label' must be true or false (1 or 0), found {value!r}.")
    return LABELS[str(value).lower()]


# --- how many of each ---


def check(settings, rows) -> list[str]:
    """Return sentences about the labels of the training rows and the weights of the loss.

    Args: rows: the TokenizedDataset that is trained on.
    Raises: UserError where all rows have the same label.
    """
    wanted = count_wanted(rows.dataset)
    unwanted = len(rows) - wanted
    if not wanted or not unwanted:
        which = "wanted (label true)" if wanted else "unwanted (label false)"
        mend = "train on them with recipes/sft.py" if wanted else "add answers that are wanted"
        raise UserError(
            f"--loss_type {settings.loss_type}: each of the {len(rows):,} training answers is {which}, so there is "
            f"nothing to tell apart; {mend}{_not_used(rows.statistics)}."
        )
    said = [f"labels: {wanted:,} answers are wanted, {unwanted:,} are not"]
    if FROM_PAIRS in rows.statistics["format"]:
        said[0] += "; pairs are taken apart, each into a chosen answer that is wanted and a rejected one that is not"
    balance = settings.desirable_weight * wanted / max(settings.undesirable_weight * unwanted, 1e-12)
    if settings.loss_type == "kto" and not 0.99 <= balance <= 4 / 3 + 0.01 and wanted != unwanted:
        weight = settings.undesirable_weight * unwanted / wanted
        said.append(
            f"the weights and numbers of both kinds of answers are as {balance:.2f} to 1, and the paper advises 1 to "
            f"1.33 (arXiv 2402.01306, equation 8): --desirable_weight {weight:.3g} to {4 / 3 * weight:.3g} would be so"
        )
    return said


def _not_used(statistics: dict) -> str:
    """Return why the commonest of the rows that cannot be used are not among the answers; "" if all are."""
    bad = max(statistics.get("bad_rows", {}).values(), key=lambda entry: entry["rows"], default=None)
    return f"; {bad['rows']:,} rows cannot be used ({bad['first'][0]}: {bad['exact'].rstrip('.')})" if bad else ""


def count_wanted(dataset) -> int:
    """Return how many rows of a datasets.Dataset have the label true."""
    import pyarrow.compute as pc

    return sum(pc.sum(pc.list_flatten(table[KIND])).as_py() or 0 for table in tables(dataset, [KIND]))
