"""Compare the tokens and labels of sampled rows with the rendering of transformers' apply_chat_template."""

import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from jinja2 import TemplateError

from zerofit.data import conversations, encoding, reading, sources
from zerofit.data.batches import documents
from zerofit.data.conversations import IGNORE, REASONING, Conversation
from zerofit.job.settings import Check

MAX_COMPARED_ROWS = 16  # rows of the first source

MAX_READ_ROWS = 64  # rows of the first source

MAX_SEARCHED_ROWS = 2000  # tokenized rows that are searched for the compared ones

MIN_CHARS = 12  # characters; shorter untrained texts may occur in the trained text by chance


def check(trainer) -> Check:
    """Compare the first rows of the data with an independent rendering."""
    settings, tokenizer = trainer.settings, trainer.processing_class
    day, count = _rendered_at(trainer.tokens), Counter()
    sampled = list(itertools.islice(_conversations(trainer, tokenizer), MAX_COMPARED_ROWS))
    wanted = {tuple(ids) for _, row in sampled for _, ids in _renderings(row, tokenizer, _options(row, tokenizer, day))}
    table = _tokenized(trainer, wanted)
    for place, conversation in sampled:
        if fault := _fault(place, conversation, table, tokenizer, settings, count, day):
            return Check("rendering", False, f"rendering: {fault}", dict(count))
    if not count["rows"]:
        return Check("rendering", None, f"rendering: not compared: {_reason_not_compared(trainer)}")
    if settings.train_on in ("assistant", "last_turn"):
        labels = "labels on the answers only"
    else:
        labels = f"labels of --train_on {settings.train_on} not compared"
    return Check(
        "rendering",
        True,
        f"rendering: {count['rows']} sampled conversations match transformers' apply_chat_template"
        f" ({count['tokens']:,} tokens), {labels}",
        dict(count),
    )


def _reason_not_compared(trainer) -> str:
    kinds = trainer.tokens.statistics["format"]
    if kinds in ("text", "tokens"):
        return f"the rows contain {kinds}, which no template renders"
    return "the first rows are longer than --max_length, or contain special tokens as text"


def _tokenized(trainer, wanted: set[tuple]) -> dict[tuple, list[int]]:
    """Return {input_ids: labels} of the wanted rows in the data sets; [] for tokens with two different labelings."""
    table: dict[tuple, list[int]] = {}
    lengths = {len(ids) for ids in wanted}
    repeated = max([1, *(round(weight) for kept, weight in trainer.tokens.statistics.get("sources", ()) if kept)])
    for tokens in filter(None, (trainer.tokens, trainer.eval_tokens)):
        for row in itertools.islice(tokens.all_rows, MAX_SEARCHED_ROWS * repeated):
            for document in documents(row):
                if len(document["input_ids"]) in lengths and (ids := tuple(document["input_ids"])) in wanted:
                    labels = document["labels"]
                    table[ids] = labels if table.get(ids, labels) == labels else []  # marks may repeat a chat
    return table


def _rendered_at(tokens) -> datetime:
    """Return the rendering time of the first rows: templates may write the date, and the cache may be older."""
    written = [Path(file["filename"]).stat().st_mtime for file in getattr(tokens.dataset, "cache_files", ())]
    return datetime.fromtimestamp(min(written) - tokens.statistics.get("seconds", 0)) if written else datetime.now()


def _dated(template: str, day: datetime) -> str:
    """Return the template with its strftime_now calls replaced by the date of `day`."""
    return re.sub(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)", lambda call: repr(day.strftime(call[2])), template)


def _conversations(trainer, tokenizer) -> Iterator[tuple[str, Conversation]]:
    """Yield (place, conversation) of the first rows that the data set contains unchanged and not truncated."""
    settings = trainer.settings
    encoder = encoding.Encoder(tokenizer, settings.train_on, settings.mask_generation_prompt, settings.data_format)
    if trainer.tokens.stream is not None:
        rows = trainer.tokens.stream.rows()  # the data set holds the first ones
    else:
        train, _ = sources.find_files(settings.data, settings.data_config, settings.data_split)
        form, of_first = reading.detect_format(reading.read(train[0], settings), settings, train[0])
        rows = ((place, row, form) for place, row in of_first)
    for place, row, form in itertools.islice(rows, min(MAX_READ_ROWS, settings.max_samples or MAX_READ_ROWS)):
        report = reading.ReadingReport()
        if reading.tokenize_rows([(place, row, form)], settings, encoder, report)[0] is None or report.truncated:
            continue
        for conversation in reading.parse_row(place, row, form, settings):
            # Special tokens in texts are encoded as text on purpose; transformers would encode them as special tokens.
            if isinstance(conversation, Conversation) and not encoder._has_control_words(conversation):
                yield place, conversation


def _renderings(conversation: Conversation, tokenizer, options: dict) -> list[tuple[list[dict], list[int]]]:
    """Return [(turns, tokens)] for each form of a conversation that the template accepts."""
    renderings = []
    for turns in _forms(conversation.turns):
        with contextlib.suppress(TemplateError, TypeError):  # the template rejects this form
            renderings.append((turns, tokenizer.apply_chat_template(turns, **options)))
    return renderings


def _options(conversation: Conversation, tokenizer, day: datetime) -> dict:
    """Return the arguments of apply_chat_template. day: when the rows were rendered."""
    template = _dated(tokenizer.chat_template, day)
    arguments = conversation.template_arguments | {"tools": conversation.tools, "chat_template": template}
    return arguments | {"tokenize": True, "return_dict": False}


def _fault(place, conversation: Conversation, table, tokenizer, settings, count: Counter, day: datetime) -> str:
    """Return how the row differs from the independent rendering, "" if equal; update `count`."""
    options = _options(conversation, tokenizer, day)
    forms = _renderings(conversation, tokenizer, options)
    turns, ids = next(((turns, ids) for turns, ids in forms if tuple(ids) in table), (None, []))
    if turns is None:
        return f"{place}: the data set lacks a row with the {len(forms[0][1])} tokens of transformers' rendering"
    labels = table[tuple(ids)]
    if not labels:
        return ""
    wrong = [i for i, (token, label) in enumerate(zip(ids, labels, strict=True)) if label not in (IGNORE, token)]
    if wrong:
        return f"{place}: the label of token {wrong[0]} is not that token"
    if settings.train_on in ("assistant", "last_turn"):
        answers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        answers = answers[-1:] if settings.train_on == "last_turn" else answers
        trained = [i for i in answers if conversation.trained[i]]
        fault = _label_fault(conversation, turns, trained, ids, labels, tokenizer, options)
        if fault := fault or _place_fault(turns, trained, ids, labels, tokenizer, options):
            return f"{place}: {fault}"
    count["rows"] += 1
    count["tokens"] += len(ids)
    return ""


def _forms(turns: list[dict]) -> Iterator[list[dict]]:
    """Yield the turns with reasoning under every template key, first with call arguments as objects, then as text."""
    ours = REASONING[0]
    turns = [t | dict.fromkeys(REASONING, t[ours]) if ours in t else t for t in turns]
    yield turns
    if any("tool_calls" in turn for turn in turns):
        yield list(map(conversations.with_text_arguments, turns))


def _label_fault(conversation: Conversation, turns, trained: list[int], ids, labels, tokenizer, options) -> str:
    """Return how the labels differ from the turns to train on; "" if they are right.

    The labeled tokens must contain the texts of these turns in order, and no long text of another turn.
    """
    text = tokenizer.decode([t for t, label in zip(ids, labels, strict=True) if label != IGNORE])
    place_in_text, answers = 0, []
    for i in trained:
        turn = conversation.turns[i]
        for written in (turn["content"].strip(), *conversations.tool_names(turn.get("tool_calls"))):
            wanted = _as_decoded(written, tokenizer, text)
            start = text.find(wanted, place_in_text)
            if start < 0:  # a generation prompt may start it, e.g. with <think>
                prompt = tokenizer.decode(
                    tokenizer.apply_chat_template(turns[:i], add_generation_prompt=True, **options)
                )
                wanted = wanted[max(k for k in range(len(wanted)) if prompt.endswith(wanted[:k])) :]
                start = text.find(wanted, place_in_text)
            thinking, block, answer = written.partition("</think>")
            if start < 0 and block:  # the template may use other reasoning tags
                at = text.find(thinking.partition("<think>")[2].strip(), place_in_text)
                start, wanted = text.find(answer.strip(), at) if at >= 0 else -1, answer.strip()
            if start < 0:
                return f"the answer of turn {i + 1} is not among the labeled tokens"
            place_in_text = start + len(wanted)
        answers += [turn["content"].strip(), *conversations.strings(turn)]
    for i, turn in enumerate(conversation.turns):
        other = _as_decoded(turn["content"].strip(), tokenizer, text)
        if i not in trained and len(other) >= MIN_CHARS and other in text and not any(other in a for a in answers):
            return f"the {turn['role']} text of turn {i + 1} is among the labeled tokens"
    return ""


def _as_decoded(written: str, tokenizer, text: str) -> str:
    """Return `written` as it occurs in the decoded `text`: unchanged, else normalized by the tokenizer (NFC)."""
    if written in text:
        return written
    return tokenizer.decode(tokenizer(written, add_special_tokens=False)["input_ids"]).strip()


def _place_fault(turns: list[dict], trained: list[int], ids, labels, tokenizer, options: dict) -> str:
    """Return a sentence about the first label outside the answers to train on, "" without one.

    An answer starts after the row's common prefix with its generation prompt, or at the template's generation mark
    inside that prefix. It ends with the rendering up to its turn, if the row starts with this rendering. Templates may
    change earlier turns, so the number of labeled runs is checked too: at most one per answer.
    """
    on = [i for i, label in enumerate(labels) if label != IGNORE]
    runs = [i for before, i in itertools.pairwise([-2, *on]) if i > before + 1]
    if len(runs) > len(trained):
        return f"{len(runs)} parts of the row are labeled, but it has {len(trained)} turns to train on"
    render = functools.partial(tokenizer.apply_chat_template, **options)
    outside, until, marked = set(on), len(ids), _marked(turns, tokenizer, options)
    for i in reversed(trained):
        before, prompt = render(turns[:i]), render(turns[:i], add_generation_prompt=True)
        after = render(turns[: i + 1])
        if ids[: len(after)] == after:
            until = len(after)
            while until and tokenizer.decode(ids[until - 1]).isspace():  # after the end token
                until -= 1
        start = len(prompt)
        if ids[:start] != prompt:  # without the answer's text, which may start like the rest of the prompt
            placeholder = {"content": "\ue000"} if turns[i]["content"] else {}
            rows = zip(ids, prompt, render([*turns[:i], turns[i] | placeholder, *turns[i + 1 :]]), strict=False)
            start = sum(1 for _ in itertools.takewhile(lambda tokens: len(set(tokens)) == 1, rows))
            start = start if start >= len(before) else 0
        start = min([start, *(first for first in marked if len(before) < first)])
        outside -= set(range(start, until))
        until = start
    return f"token {min(outside)} is labeled, but it is outside the answers to train on" if outside else ""


def _marked(turns: list[dict], tokenizer, options: dict) -> list[int]:
    """Return where the template's {% generation %} blocks start, possibly inside the generation prompt."""
    if not re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template):
        return []
    options = options | {"return_dict": True, "return_assistant_tokens_mask": True}
    mask = tokenizer.apply_chat_template(turns, **options)["assistant_masks"]
    return [i for i, (before, on) in enumerate(itertools.pairwise([0, *mask])) if on > before]
