"""Render sampled rows with transformers' own apply_chat_template, and compare tokens and labels with the data set."""

import importlib.util
import itertools
from collections import Counter
from collections.abc import Iterator

from zerofit.data import conversations, encoding, pairs, reading, sources
from zerofit.data.batches import documents
from zerofit.data.conversations import IGNORE, Conversation
from zerofit.errors import UserError
from zerofit.settings import Check

ROWS = 16  # compared at most, of the first source

LOOKED_AT = 64  # rows of it that are read

TABLE = 2000  # tokenized rows in which they are looked up

LONG = 12  # characters from which a text that is not to be trained must not occur in what is


def check(trainer) -> Check:
    """Compare the first rows of the data with an independent rendering."""
    settings, tokenizer = trainer.settings, trainer.processing_class
    table = _tokenized(trainer)
    count: Counter = Counter()
    for place, conversation in itertools.islice(_conversations(settings, tokenizer), ROWS):
        fault = _fault(place, conversation, table, tokenizer, settings, count)
        if fault:
            return Check("rendering", False, f"rendering: {fault}", dict(count))
    if not count["rows"]:
        return Check("rendering", None, f"rendering: not compared: {_why_none(trainer)}")
    by_trl = f", {count['by TRL']} of them by TRL's too" if count["by TRL"] else ""
    return Check(
        "rendering",
        True,
        f"rendering: {count['rows']} sampled conversations have the tokens of transformers' apply_chat_template"
        f"{by_trl} ({count['tokens']:,} tokens), and labels on the answers alone",
        dict(count),
    )


def _why_none(trainer) -> str:
    kinds = trainer.tokens.statistics["format"]
    if kinds in ("text", "tokens"):
        return f"the rows are {kinds}, which no template renders"
    return "the first rows are longer than --max_length, or hold control words as text"


def _tokenized(trainer) -> dict[tuple, list[int]]:
    """Return {input_ids: labels} of the first documents of both sets."""
    table = {}
    for tokens in filter(None, (trainer.tokens, trainer.eval_tokens)):
        for row in itertools.islice(tokens.all_rows, TABLE):
            table |= {tuple(document["input_ids"]): document["labels"] for document in documents(row)}
    return table


def _conversations(settings, tokenizer) -> Iterator[tuple[str, Conversation]]:
    """Yield (place, conversation) of the first rows that are in the data set whole and as they are."""
    train, _ = sources.find_files(settings.data, settings.data_config, settings.data_split, settings.streaming)
    encoder = encoding.Encoder(tokenizer, settings.train_on)
    kind, rows = reading.kind_of(reading.read(train[0], settings), settings)
    names = reading._names(settings)
    for place, row in itertools.islice(rows, min(LOOKED_AT, settings.max_samples or LOOKED_AT)):
        count: Counter = Counter()
        kept = reading.tokenised([(place, row, kind)], settings, encoder, count)[0]
        if kept is None or count["truncated"]:
            continue
        try:
            columns = reading._renamed(place, row, names)
            if settings.documents_per_row == 2:
                parsed = pairs.parse(place, columns)
            else:
                parsed = (conversations.parse(place, columns, kind or conversations.detect(place, columns)),)
        except UserError:
            continue
        for conversation in parsed:
            # Control words in texts are encoded as text on purpose, where transformers would take them for tokens.
            if isinstance(conversation, Conversation) and not encoder._has_control_words(conversation):
                yield place, conversation


def _fault(place, conversation: Conversation, table, tokenizer, settings, count: Counter) -> str:
    """Return what differs from the independent rendering, else ""; updates `count`."""
    turns = [_with_every_reasoning_key(turn) for turn in conversation.turns]
    options = {"tools": conversation.tools, "tokenize": True, "return_dict": False}
    ids = tokenizer.apply_chat_template(turns, **options)
    labels = table.get(tuple(ids))
    if labels is None:
        return f"{place}: the data set has no row with the {len(ids)} tokens of transformers' rendering"
    wrong = [i for i, (token, label) in enumerate(zip(ids, labels, strict=True)) if label not in (IGNORE, token)]
    if wrong:
        return f"{place}: the label of token {wrong[0]} is not that token"
    if settings.train_on in ("assistant", "last_turn"):
        fault = _label_fault(place, conversation, ids, labels, tokenizer, settings)
        if fault:
            return fault
    if importlib.util.find_spec("trl"):
        import trl

        keys = {"messages": turns} | ({"tools": conversation.tools} if conversation.tools else {})
        text = trl.apply_chat_template(keys, tokenizer)["text"]
        if tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            return f"{place}: TRL renders other tokens"
        count["by TRL"] += 1
    count["rows"] += 1
    count["tokens"] += len(ids)
    return ""


def _with_every_reasoning_key(turn: dict) -> dict:
    """Return a turn whose reasoning stands under each key that templates read it from."""
    ours = conversations.REASONING[0]
    return turn | dict.fromkeys(conversations.REASONING, turn[ours]) if ours in turn else turn


def _label_fault(place, conversation: Conversation, ids, labels, tokenizer, settings) -> str:
    """Return how the labels differ from the answers that are to be trained; "" if they are right.

    Each trained answer stands in the text of the labelled tokens, in order; no long text of another turn does.
    """
    trained = [i for i, on in enumerate(conversation.trained) if on]
    trained = trained[-1:] if settings.train_on == "last_turn" else trained
    text = tokenizer.decode([t for t, label in zip(ids, labels, strict=True) if label != IGNORE])
    place_in_text, answers = 0, []
    for i in trained:
        answer = conversation.turns[i]["content"].strip()
        found = text.find(answer, place_in_text)
        if found < 0:
            return f"{place}: the answer of turn {i + 1} is not among the labelled tokens"
        place_in_text = found + len(answer)
        answers += [answer, *conversations.strings(conversation.turns[i])]
    for i, turn in enumerate(conversation.turns):
        other = turn["content"].strip()
        if i not in trained and len(other) >= LONG and other in text and not any(other in a for a in answers):
            return f"{place}: the {turn['role']} text of turn {i + 1} is among the labelled tokens"
    return ""
