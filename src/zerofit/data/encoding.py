"""Encode conversations as token ids, with labels on the parts that are trained."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import resource
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jinja2 import TemplateError
from tokenizers.normalizers import NFC
from transformers.utils.chat_template_utils import render_jinja_template

from zerofit.base import process
from zerofit.base.errors import UserError
from zerofit.data import conversations, end_tokens, template_text
from zerofit.data.chat_templates import arguments as template_arguments
from zerofit.data.chat_templates import built_in
from zerofit.data.published import rendered

PROBE = "Größe\n\n 東京 🙂\t3.14 'll  x\n"  # text on which a tokenizer shows whether its tokens are its bytes

ANCHOR = chr(conversations.PRIVATE_USE[-1])  # text that no token joins with the text behind it


class Encoder:
    """Encode batches of rows as (input_ids, labels) with one tokenizer and chat template.

    Answers are located by the template's {% generation %} marks if it has them, else by prefixes: an answer starts
    where the generation prompt before it ends, and ends where the text rendered up to its turn ends. Control words in a
    turn's own text are encoded as plain text, never as special tokens; what seems rendered already is refused unless
    data_format is "letters". mask_generation_prompt: leave out of the loss what the template itself writes at the start
    of an answer (template_text.openings).
    """

    def __init__(
        self,
        tokenizer,
        train_on: str = "assistant",
        mask_generation_prompt: bool = False,
        data_format: str = rendered.LETTERS,
    ):
        self.tokenizer, self.train_on, self.data_format = tokenizer, train_on, data_format
        self.mask_generation_prompt = mask_generation_prompt
        self.notes: Counter = Counter()  # warning -> number of rows
        self.special_tokens = tokenizer.special_tokens_map  # made anew at each use
        quoted = tokenizer.chat_template.replace('"', "'")
        # The key under which the template reads reasoning: `reasoning_content`, unless it names only another.
        named = (k for k in conversations.REASONING if re.search(rf"\.{k}\b|(['\"]){k}\1", tokenizer.chat_template))
        self.reasoning_key = next(named, conversations.REASONING[0])
        self.switches = [word for word in conversations.SWITCHES if f"replace('{word}'" in quoted]
        self.marked = re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template) is not None
        self.added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        words = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        words |= {w for w in tokenizer.all_special_tokens if w}
        # Control words added as ordinary tokens, e.g. by --new_tokens: text must not open or end a turn with them.
        words |= set(built_in.CONTROL_WORD.findall(tokenizer.chat_template)) & tokenizer.get_added_vocab().keys()
        self.special_ids = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special} | set(
            tokenizer.all_special_ids
        )
        # longest first; never empty, as load_tokenizer requires an end token
        self.control = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))

        # An end-of-turn token need not be special: any added token in the template counts.
        ends = {t.content for t in tokenizer.added_tokens_decoder.values() if t.content in tokenizer.chat_template}
        ends = {w for w in words | ends if w.strip()}
        self.end_words = tuple(sorted(ends, key=len, reverse=True))
        self.ends = re.compile("|".join(map(re.escape, self.end_words)))
        self.ended = end_tokens.Found(self.end_words, tokenizer.chat_template, self.special_tokens.values())

    @functools.cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Return the bytes of text of each token, if labels can be placed by them."""
        return _token_bytes(self.tokenizer)

    @functools.cached_property
    def header(self) -> int:
        """Return how many tokens the template writes between a question and its answer; 0 if that is not certain."""
        conversation = conversations.Conversation([{"role": "user", "content": "?"}], [False])
        try:
            before, prompt = (self._text("", conversation, prompt=p) for p in (False, True))
        except UserError:
            return 0
        return len(self._tokens(prompt.removeprefix(before))) if prompt.startswith(before) else 0

    @functools.cached_property
    def openings(self) -> tuple[str, ...]:
        """Return what the template itself writes at the start of answers."""
        return template_text.openings(self)

    def encode(
        self,
        rows: list[tuple[str, conversations.Conversation | str | dict]],
        refuse: Callable[[str, UserError], None] | None = None,
        as_arrays: bool = False,
    ) -> list[tuple[list[int], list[int]] | tuple[np.ndarray, np.ndarray] | None]:
        """Encode [(place, parsed row)] as [(input_ids, labels)], in order; untrained labels are IGNORE.

        Args: refuse: called with place and error of an unusable row, for which None is returned. as_arrays: return
            rows that were labeled as arrays (int32) as they are, without making lists of them.
        Raises: UserError for an unusable row, without `refuse`.
        """
        self.tokenizer.backend_tokenizer.no_truncation()  # tokenizer.json may set both
        self.tokenizer.backend_tokenizer.no_padding()
        encoded: list[Any] = [None] * len(rows)
        texts, spans, slots = [], [], []
        for i, (place, content) in enumerate(rows):
            try:
                said = list(rendered.check(place, content, self.data_format, self.control))
                if isinstance(content, rendered.Rendered) or (
                    isinstance(content, conversations.Conversation) and not self._has_control_words(content)
                ):
                    is_rendered = isinstance(content, rendered.Rendered)
                    text, row_spans = (self._as_it_is if is_rendered else self._render)(place, content)
                    texts.append(text)
                    spans.append(row_spans)
                    slots.append(i)
                else:
                    encoded[i] = self._ids(place, content)
                self.notes.update({*getattr(content, "notes", ()), *said})
                self._note_arguments(content)
            except (UserError, RecursionError) as error:
                if isinstance(error, RecursionError):
                    error = UserError(f"{place}: its tool calls or tools are nested too deep; make them flatter.")
                if refuse is None:
                    raise error from None
                refuse(place, error)
        if texts:
            # Calls with split_special_tokens leave it on.
            self.tokenizer.backend_tokenizer.encode_special_tokens = False
            for i, row in zip(slots, self._labeled_texts(texts, spans, as_arrays), strict=True):
                encoded[i] = row
        return encoded

    def _note_arguments(self, content: conversations.Conversation | str | dict) -> None:
        """Note the chat template's arguments of a row, and those that it never reads: of another family's data set."""
        for name, value in getattr(content, "template_arguments", {}).items():
            if name not in template_arguments.names_in(self.tokenizer.chat_template):
                self.notes[f"chat_template_kwargs has {name!r}, which the chat template does not read"] += 1
            else:
                is_value = f" is {json.dumps(value)}" if isinstance(value, bool) else " is the row's own"
                self.notes[f"chat template argument {name}{is_value}"] += 1

    def _labeled_texts(
        self, texts: list[str], spans: list[list[tuple[int, int]]], as_arrays: bool
    ) -> Iterator[tuple[list[int], list[int]] | tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, labels) of rendered texts, placed by the bytes of the tokens where these are known."""
        backend, token_bytes = self.tokenizer.backend_tokenizer, self.token_bytes
        encode_batch = backend.encode_batch if token_bytes is None else backend.encode_batch_fast  # without offsets
        normalizer = backend.normalizer
        for encoding, text, row_spans in zip(encode_batch(texts, add_special_tokens=False), texts, spans, strict=True):
            row = None
            if token_bytes is not None and _keeps(normalizer, text):
                row = _labeled_by_bytes(np.array(encoding.ids, dtype=np.int32), text, row_spans, token_bytes)
            if row is not None:
                yield row if as_arrays else (row[0].tolist(), row[1].tolist())
                continue
            if token_bytes is not None:
                encoding = backend.encode(text, add_special_tokens=False)  # with offsets
            yield _labeled(encoding, len(text), row_spans, self.special_ids)

    def _ids(self, place: str, content: conversations.Conversation | str | dict) -> tuple[list[int], list[int]]:
        """Encode token lists, plain text, or a conversation whose text holds control words."""
        if isinstance(content, dict):
            ids = [*content["input_ids"], *(t for t in content["labels"] if t != conversations.IGNORE)]
            if min(ids) < 0 or max(ids) >= len(self.tokenizer):
                raise UserError(
                    f"{place}: input_ids has a number outside 0 to {len(self.tokenizer) - 1}, the tokenizer's range."
                )
            return content["input_ids"], content["labels"]
        if isinstance(content, str):
            self.ended.note(place, self.tokenizer.eos_token, end_tokens.TEXT)
            ids = self.tokenizer(content, split_special_tokens=True, verbose=False)["input_ids"]  # truncated later
            if not ids or ids[-1] != self.tokenizer.eos_token_id:
                ids = [*ids, self.tokenizer.eos_token_id]
            return ids, list(ids)
        return self._pieces(place, content)

    def _as_it_is(self, place: str, content: rendered.Rendered) -> tuple[str, list[tuple[int, int]]]:
        """Return a text that was rendered before, with its first and its last token once, and the span to train on."""
        rendered.check_tokens(place, content, self.control)
        text, bos = content.prompt + content.text, self.tokenizer.bos_token
        first = self.tokenizer("a")["input_ids"][:1]
        if bos and first == [self.tokenizer.bos_token_id] and not text.startswith(bos):
            text = bos + text
        start, stripped = len(text) - len(content.text), len(text.rstrip())
        word = self.ended.at_end(text, stripped)
        # The white space that a template writes behind the end token is not the model's to write.
        text = text[:stripped] if word else text + self.tokenizer.eos_token
        kind = end_tokens.ANSWER if content.prompt else end_tokens.TEXT
        self.ended.note(place, word or self.tokenizer.eos_token, kind)
        if self.train_on == "all" or not content.prompt:
            start = 0
        return text, [(start, len(text))] if content.is_trained else []

    def _has_control_words(self, conversation: conversations.Conversation) -> bool:
        plain = [turn["content"] for turn in conversation.turns if len(turn) == 2]  # a role and this
        others = [turn for turn in conversation.turns if len(turn) > 2]
        nested = conversations.strings([others, conversation.tools, conversation.template_arguments])
        return any(map(self.control.search, itertools.chain(plain, nested)))

    @functools.cached_property
    def adds_prefix(self) -> bool:
        """Return whether the tokenizer puts a space before each text, as SentencePiece does (Llama-2, Phi-3)."""
        return self._tokens("a", ANCHOR) != self._tokens("a")

    def _tokens(self, text: str, before: str = "", token: int | None = None) -> list[int]:
        """Encode a text, or a piece of one behind the text `before`, which is the added token `token` or ANCHOR."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = False
        encoding = backend.encode(before + text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        first = next((i for i, (start, _) in enumerate(offsets) if start >= len(before)), len(ids))
        if first and ids[first - 1] != token and offsets[first - 1][1] > len(before):  # a token of both
            return self._tokens(text)
        return ids[first:]

    def _tokens_behind(self, text: str, ids: list[int]) -> list[int]:
        """Encode a piece of text as it would be in a whole text, behind the tokens `ids`.

        Behind an added token, some tokenizers add a space or drop one. Only elsewhere the piece has to be kept from
        looking like the beginning of a text.
        """
        if ids and ids[-1] in self.added:
            return self._tokens(text, self.added[ids[-1]], ids[-1])
        return self._tokens(text, ANCHOR if ids and self.adds_prefix else "")

    def _text(
        self, place: str, conversation: conversations.Conversation, turns: int | None = None, prompt=False, **mode
    ) -> str:
        with _template_errors(place):
            return self.tokenizer.apply_chat_template(
                self._for_template(conversation.turns[:turns]),
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **conversation.template_arguments | mode,
            )

    def _for_template(self, turns: list[dict]) -> list[dict]:
        """Return the turns with their reasoning under the key that the template reads, and calls in its form."""
        ours = conversations.REASONING[0]
        if any("tool_calls" in turn for turn in turns) and self.joins_arguments:
            turns = list(map(conversations.with_text_arguments, turns))
        if self.reasoning_key == ours:
            return turns
        return [{self.reasoning_key if k == ours else k: v for k, v in turn.items()} for turn in turns]

    @functools.cached_property
    def joins_arguments(self) -> bool:
        """Return whether the template writes tool calls right only if their arguments are JSON text, as DeepSeek's.

        It refuses objects then, or prints Python's spelling of them.
        """
        arguments = {"of": "zerofit"}
        call = {"id": "probe0001", "type": "function", "function": {"name": "zerofit_probe", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        for calls in (turn, conversations.with_text_arguments(turn)):
            with contextlib.suppress(UserError), _template_errors(""):
                asked = {"role": "user", "content": "?"}
                text = self.tokenizer.apply_chat_template([asked, calls], tokenize=False)
                if "zerofit_probe" in text and str(arguments) not in text:
                    return calls is not turn
        return False

    def _render(self, place: str, conversation: conversations.Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Render the conversation; return its text and the character spans to train on."""
        text, marks = self._whole(place, conversation)
        turns = conversation.turns
        left_out = [i for i, t in enumerate(turns) if t["role"] == "assistant" and not conversation.trained[i]]
        if self.train_on == "all" and not left_out:
            self._check_tools(place, text, conversation, {})
            self.ended.note(place, self.ended.at_end(text, len(text.rstrip())), end_tokens.ANSWER)
            return text, [(0, len(text))]
        answers = self.answers(place, text, marks, conversation)
        self._check_nothing_lost(place, text, conversation, answers)
        endless = next((i for i, _, end in answers if not text.endswith(self.end_words, 0, end)), None)
        if endless is not None:
            like = built_in.like(self.tokenizer.chat_template)
            raise UserError(
                f"{place}: turn {endless + 1}: the chat template puts no end token behind the answer, so the model "
                f"would never learn to stop; name another with --chat_template{like}."
            )
        if self.train_on in ("all", "prompt"):
            without = [a for a in answers if self.train_on == "prompt" or a[0] in left_out]
            bounds = [0, *(b for _, start, end in without for b in (start, end)), len(text)]
            return text, [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]
        chosen = answers[-1:] if self.train_on == "last_turn" else answers
        chosen = [a for a in chosen if a[0] not in left_out]
        self.ended.add(place, text, chosen, conversation)
        if self.mask_generation_prompt:
            return text, [(template_text.behind_opening(self.openings, text, a, turns[a[0]]), a[2]) for a in chosen]
        return text, [(start, end) for _, start, end in chosen]

    def answers(
        self, place: str, text: str, marks: list, conversation: conversations.Conversation
    ) -> list[tuple[int, int, int]]:
        """Return [(turn, start, end)] of the answers in a rendered conversation, with their end tokens."""
        return self._marked_answers(text, marks, conversation) or self._prefixes(place, text, conversation)

    def _check_nothing_lost(
        self, place: str, whole: str, conversation: conversations.Conversation, answers: list
    ) -> None:
        """Raise UserError for a turn whose text the template leaves out or changes; note lost reasoning."""
        places = {i: (start, end) for i, start, end in answers}
        spans = {i: whole[start:end] for i, (start, end) in places.items()}
        for i, turn in enumerate(conversation.turns):
            text = turn["content"].strip()
            for switch in self.switches if turn["role"] == "system" else ():
                text = text.replace(switch, "").strip()
            start, end = places.get(i, (0, len(whole)))
            # A generation prompt may hold the beginning of an answer's text, such as its <think>.
            if turn["role"] != "tool" and not _is_written(text, whole, start, end):
                among = built_in.WITH_TOOLS if "tool_calls" in turn else built_in.NAMES
                like = built_in.like(self.tokenizer.chat_template, among)
                raise UserError(
                    f"{place}: turn {i + 1}: the chat template leaves out or changes the text of this {turn['role']} "
                    f"turn, so something else than the data would be trained; name another with --chat_template{like}."
                )
        self._check_tools(place, whole, conversation, spans)
        last_question = max((i for i, turn in enumerate(conversation.turns) if turn["role"] == "user"), default=-1)
        lost = [
            i for i, turn in enumerate(conversation.turns)
            if turn.get("reasoning_content", "").strip() not in spans.get(i, whole)
        ]  # fmt: skip
        if not lost:
            return
        # Templates such as Qwen3's drop the reasoning of earlier answers on purpose.
        keeper = built_in.equivalent(self.tokenizer.chat_template)
        keeper = keeper if keeper in built_in.WITH_REASONING else ""
        if any(i > last_question for i in lost):
            self.notes[conversations.reasoning_lost("the last answer", keeper)] += 1
        if any(i < last_question for i in lost):
            self.notes[conversations.reasoning_lost("earlier answers", keeper)] += 1

    def _check_tools(
        self, place: str, whole: str, conversation: conversations.Conversation, spans: dict[int, str]
    ) -> None:
        """Raise UserError for a tool call, a tool or a tool's result that the template leaves out.

        Args: spans: turn -> text of the answer; other turns are searched in the whole text.
        """
        any_of = f", such as that of a model made for tool calls (--chat_template {', '.join(built_in.WITH_TOOLS)})"
        like = built_in.like(self.tokenizer.chat_template, built_in.WITH_TOOLS) or any_of
        mend = f"use a template with tools{like}, or a file."
        for i, turn in enumerate(conversation.turns):
            if "tool_calls" not in turn:
                continue
            lost = [name for name in conversations.tool_names(turn["tool_calls"]) if name not in spans.get(i, whole)]
            if lost:
                raise UserError(
                    f"{place}: turn {i + 1} calls the tool {lost[0]!r}, but the chat template writes nothing of the "
                    f"call, so the model would not learn it; {mend}"
                )
        lost = [name for name in conversations.tool_names(conversation.tools) if name not in whole]
        if lost:
            raise UserError(
                f"{place}: column 'tools' has {lost[0]!r}, but the chat template writes nothing of it, so the model "
                f"would learn without its tools; {mend}"
            )
        lost = self._lost_results(place, conversation)
        if lost:
            raise UserError(
                f"{place}: turn {lost[0] + 1} is a tool's result, but the chat template writes nothing of it, so the "
                f"model would learn to answer without it; {mend}"
            )

    def _lost_results(self, place: str, conversation: conversations.Conversation) -> list[int]:
        """Return the tool turns that the template leaves out: a mark at the end of their text does not reach its text.

        The results themselves cannot be searched: templates write them as JSON, and answers repeat them.
        """
        results = [i for i, turn in enumerate(conversation.turns) if turn["role"] == "tool"]
        if not results:
            return []
        marks = dict(zip(results, self._unused_characters(conversation), strict=False))
        turns = [
            turn | {"content": turn["content"] + marks[i]} if i in marks else turn
            for i, turn in enumerate(conversation.turns)
        ]
        text = self._text(place, dataclasses.replace(conversation, turns=turns))
        return [i for i, mark in marks.items() if mark not in text and json.dumps(mark)[1:-1] not in text]

    def _unused_characters(self, conversation: conversations.Conversation) -> Iterator[str]:
        """Yield private-use characters that are neither in the conversation nor in the template."""
        given = [conversation.turns, conversation.tools, conversation.template_arguments]
        used = {c for text in conversations.strings(given) for c in text}
        used |= set(self.tokenizer.chat_template)
        return (chr(c) for c in conversations.PRIVATE_USE if chr(c) not in used)

    def _whole(self, place: str, conversation: conversations.Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Render the conversation; return its text and the spans of its {% generation %} marks, if any."""
        if not self.marked:
            return self._text(place, conversation), []
        text, marks = self._marked_text(place, conversation)
        return text, self._behind_prompts(place, text, marks, conversation) if self.marks_prompt else marks

    def _marked_text(self, place: str, conversation: conversations.Conversation) -> tuple[str, list[tuple[int, int]]]:
        with _template_errors(place):
            texts, marks = render_jinja_template(
                conversations=[self._for_template(conversation.turns)], tools=conversation.tools,
                chat_template=self.tokenizer.chat_template,
                return_assistant_tokens_mask=True, **self.special_tokens | conversation.template_arguments,
            )  # fmt: skip
        return texts[0], marks[0]

    @functools.cached_property
    def marks_prompt(self) -> bool:
        """Return whether the marks hold the generation prompt: SmolLM3's own template marks the role's header."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        conversation = conversations.Conversation(turns, [False, True])
        try:
            text, marks = self._marked_text("", conversation)
            return self._behind_prompts("", text, marks, conversation) != marks
        except UserError:
            return False

    def _behind_prompts(
        self, place: str, whole: str, marks: list[tuple[int, int]], conversation: conversations.Conversation
    ) -> list[tuple[int, int]]:
        """Return the marks, those that hold the generation prompt from where it ends."""
        turns = [i for i, turn in enumerate(conversation.turns) if turn["role"] == "assistant"]
        if len(marks) != len(turns):
            return marks
        result = []
        for i, (start, end) in zip(turns, marks, strict=True):
            if start <= len(self._text(place, conversation, i)):
                start = max(start, min(self._start(place, whole, conversation, i) or start, end))
            result.append((start, end))
        return result

    def _marked_answers(
        self, whole: str, marks: list, conversation: conversations.Conversation
    ) -> list[tuple[int, int, int]]:
        """Return [(turn, start, end)] of the answers; [] unless there is one mark per assistant turn."""
        turns = [i for i, t in enumerate(conversation.turns) if t["role"] == "assistant"]
        if len(marks) != len(turns):
            return []
        answers = []
        for i, (start, end) in zip(turns, marks, strict=True):
            trimmed = start + len(whole[start:end].rstrip())
            if whole.endswith(self.end_words, start, trimmed):
                end = trimmed  # without the line break behind the end token, which TRL's templates include
            if not whole.endswith(self.end_words, 0, end) and (match := self.ends.match(whole, end)):
                end = match.end()  # the marks exclude the end token, which must be trained too
            answers.append((i, start, end))
        return answers

    def _prefixes(self, place: str, whole: str, conversation: conversations.Conversation) -> list[tuple[int, int, int]]:
        """Return [(turn, start, end)] of the answers by rendering the turns before and up to each of them.

        Raises: UserError for a turn whose earlier text the template changes as turns are added, or that it does not
            begin as its generation prompt does.
        """
        answers, turns = [], conversation.turns
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            start = self._start(place, whole, conversation, i)
            after = whole if i == len(turns) - 1 else self._text(place, conversation, i + 1)
            end = None
            if start is not None:
                end = max(len(after.rstrip()), start) if whole.startswith(after) else None
                # e.g. Qwen3 writes an empty thinking block into the last answer only
                end = end or self._end_by_tail(whole, start, after.rstrip())
                end = end or self._end_by_content(whole, start, turn["content"])
            if end is None:
                raise UserError(
                    f"{place}: turn {i + 1}: the chat template rewrites earlier text when turns are added, or begins "
                    "the answer otherwise than its generation prompt does, so the place of the answer is not certain; "
                    f"use a template that only appends{built_in.like(self.tokenizer.chat_template)}."
                )
            answers.append((i, start, end))
        return answers

    def _start(self, place: str, whole: str, conversation: conversations.Conversation, i: int) -> int | None:
        """Return where the answer of turn `i` starts: what the model has to generate behind the generation prompt.

        A generation prompt may end in more than the template writes before this answer, such as the `<think>` of
        DeepSeek-R1's: the answer then starts where the two part, which is behind the role's header. None if they part
        before it.
        """
        if i == 0:
            return self._start_of_greeting(place, whole, conversation)
        prompt = self._text(place, conversation, i, prompt=True)
        if whole.startswith(prompt):
            return len(prompt)
        before = self._text(place, conversation, i)
        if not (prompt.startswith(before) and whole.startswith(before)):
            return None
        for key, value in itertools.product(("enable_thinking", "thinking"), (False, True)):
            # An answer without reasoning, or with it, may have the prompt of that mode, which may change earlier turns.
            base, of_mode = (self._text(place, conversation, i, prompt=p, **{key: value}) for p in (False, True))
            added = of_mode[len(base) :] if of_mode.startswith(base) else ""
            if added and whole.startswith(added, len(before)):
                return len(before) + len(added)
        # Compared without the answer's own text, which may begin like the rest of the prompt.
        mark, turns = next(self._unused_characters(conversation)), list(conversation.turns)
        own = {key: mark for key in ("content", conversations.REASONING[0]) if turns[i].get(key, "").strip()}
        turns[i] = turns[i] | own
        without = self._text(place, dataclasses.replace(conversation, turns=turns))
        letters = zip(*(text[len(before) :] for text in (whole, prompt, without)), strict=False)
        start = len(before) + sum(1 for _ in itertools.takewhile(lambda each: len(set(each)) == 1, letters))
        # Control words may begin alike, too.
        for text in (whole, prompt):
            words = self.ends.finditer(text, len(before))
            start = next((word.start() for word in words if word.start() < start < word.end()), start)
        if start <= len(before):
            return None
        if conversations.PROMPT_GOES_ON not in conversation.notes:
            conversation.notes = (*conversation.notes, conversations.PROMPT_GOES_ON)
        return start

    def _start_of_greeting(self, place: str, whole: str, conversation: conversations.Conversation) -> int | None:
        """Return where the answer starts that is the first turn: templates render no conversation without turns.

        It is behind the generation prompt, as that stands behind a question; None unless the answer follows it.
        """
        asked = dataclasses.replace(conversation, turns=[{"role": "user", "content": "?"}])
        before, prompt = (self._text(place, asked, prompt=p) for p in (False, True))
        header = prompt.removeprefix(before)
        if prompt == before or not prompt.startswith(before):
            return None
        start = whole.find(header) + len(header)
        text = conversation.turns[0]["content"].strip()
        follows = whole.startswith(header, start - len(header)) and whole[start:].lstrip().startswith(text)
        return start if follows else None

    def _end_by_tail(self, whole: str, start: int, after: str) -> int | None:
        """Return the end of the answer at `start`: its end token is that of `after`, the text up to its turn.

        None unless `after` ends with the same answer: the template may change only what precedes it.
        """
        end_token = next((m[0] for m in self.ends.finditer(after) if m.end() == len(after)), None)
        position = whole.find(end_token, start) if end_token else -1
        if position < 0:
            return None
        end = position + len(end_token)
        return end if after.endswith(whole[start:end]) else None

    def _end_by_content(self, whole: str, start: int, content: str) -> int | None:
        """Return the end of the answer at `start`: behind its `content` and the end token, or None."""
        content_start = whole.find(content.strip(), start)
        if content_start < 0 or not content.strip() or self.control.search(whole, start, content_start):
            return None
        match = re.compile(rf"\s*(?:{self.ends.pattern})").match(whole, content_start + len(content.strip()))
        return match.end() if match else None

    def _pieces(self, place: str, conversation: conversations.Conversation) -> tuple[list[int], list[int]]:
        """Encode a conversation with control words in its text, hidden by placeholders during rendering."""
        words: list[str] = []
        mark = next(self._unused_characters(conversation))

        def stand_in(match) -> str:
            words.append(match[0])
            return f"{mark}{len(words) - 1}{mark}"

        def replaced(value):
            return conversations.map_strings(lambda text: self.control.sub(stand_in, text), value)

        given = ("turns", "tools", "template_arguments")
        hidden = dataclasses.replace(conversation, **{name: replaced(getattr(conversation, name)) for name in given})
        text, spans = self._render(place, hidden)
        conversation.notes = hidden.notes
        if mark.encode("unicode_escape").decode() in text:
            raise UserError(
                f"{place}: the chat template writes tools as Python spells them, and these hold a control word such as "
                f"{words[-1]!r}; remove it, or use another template{built_in.like(self.tokenizer.chat_template)}."
            )
        ids, labels = [], []
        cuts = sorted({0, len(text), *(b for span in spans for b in span)})
        for start, end in itertools.pairwise(cuts):
            inside = any(a <= start and end <= b for a, b in spans)
            for part in re.split(f"({mark}\\d+{mark})", text[start:end]):
                if not part:
                    continue
                is_word = part.startswith(mark)
                # A control word split in two is encoded as plain text.
                word = words[int(part[1:-1])] if is_word else part
                halves = (word[:1], word[1:]) if is_word else (word,)
                before = len(ids)
                for half in halves:
                    ids += self._tokens_behind(half, ids)
                labels += ids[before:] if inside else [conversations.IGNORE] * (len(ids) - before)
        return ids, labels


def _is_written(text: str, whole: str, start: int, end: int) -> bool:
    """Return whether a turn's text stands in the rendered text from `start` to `end`.

    A thinking block in the text may be framed otherwise: then its reasoning and the answer behind it stand there. The
    generation prompt before `start` may hold the text's beginning.
    """
    if whole.find(text, max(0, start + 1 - len(text)), end) >= 0:
        return True
    reasoning, block, answer = (part.strip() for part in text.partition("</think>"))
    at = whole.find(reasoning.removeprefix("<think>").strip(), start, end) if block else -1
    return at >= 0 and whole.find(answer, at, end) >= 0


@contextlib.contextmanager
def _template_errors(place: str) -> Iterator[None]:
    """Context for running a chat template, in the main thread with limits of processor time and memory.

    The sandbox stops long loops, but not 'x' * 10**10, which fills the memory between two looks at the time. The timer
    fires again, as Jinja drops the error of a constant that it computes. By the clock, a process that is paused
    (Ctrl-Z, a suspended job) would refuse the row that it was rendering.

    Raises: UserError naming the place for any error of the template.
    """
    memory = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with process.time_limit(conversations.TEMPLATE_SECONDS):
            if threading.current_thread() is threading.main_thread():
                resource.setrlimit(resource.RLIMIT_AS, (_address_limit(*memory), memory[1]))
            yield
    except (RecursionError, MemoryError) as error:
        raise UserError(f"{place}: the chat template ends in a {type(error).__name__}; mend it.") from None
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError, TimeoutError) as error:
        raise UserError(f"{place}: the chat template refuses this conversation: {error}.") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)


def _address_limit(soft: int, hard: int) -> int:
    """Return the bytes of addresses that this process may have while a template runs: TEMPLATE_BYTES more than now."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)  # for each row: pathlib takes seven times as long
    except OSError:  # not Linux
        return soft
    try:
        used = int(os.read(statm, 64).split()[0]) * resource.getpagesize()
    finally:
        os.close(statm)
    limits = (limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)
    return min([used + conversations.TEMPLATE_BYTES, *limits])


def _labeled(encoding, length: int, spans: list[tuple[int, int]], special_ids: set[int]) -> tuple[list[int], list[int]]:
    """Return (ids, labels) of one encoded text; every token with a character in a span is trained."""
    ids = encoding.ids
    labels = [conversations.IGNORE] * len(ids)
    for start, end in spans:
        at = map(encoding.char_to_token, range(start, min(end, length)))  # None for a character in no token
        first = next((index for index in at if index is not None), None)
        if first is None:
            continue
        if ids[first] in special_ids and encoding.token_to_chars(first)[0] < start:
            first += 1  # a special token before the span that includes the following white space
        last = first
        for position in range(end - 1, start - 1, -1):
            if (index := encoding.char_to_token(position)) is not None:
                last = index + 1
                break
        while last < len(ids) and last and encoding.token_to_chars(last) == encoding.token_to_chars(last - 1):
            last += 1  # one character may be several tokens
        labels[first:last] = ids[first:last]
    return ids, labels


def _token_bytes(tokenizer) -> np.ndarray | None:
    """Return how many bytes of the text each token stands for; None if the tokenizer's offsets contradict.

    Only the tokens of byte-level tokenizers are, one after another, the bytes of the text. Whether they are is tried on
    PROBE and on the added tokens, which also finds added prefixes, trimmed offsets and tokens that swallow white space.
    """
    backend = tokenizer.backend_tokenizer
    if not _keeps(backend.normalizer, PROBE):
        return None
    vocabulary, added = backend.get_vocab(with_added_tokens=False), backend.get_added_tokens_decoder()
    counts = np.zeros(1 + max([*vocabulary.values(), *added]), dtype=np.int64)
    counts[list(vocabulary.values())] = list(map(len, vocabulary))  # a character of the vocabulary is a byte
    counts[list(added)] = [len(token.content.encode()) for token in added.values()]
    text = PROBE + "".join(f" {token.content} " for token in added.values())
    chars = [i for i, char in enumerate(text) for _ in char.encode()]
    encoding = backend.encode(text, add_special_tokens=False)
    ends = np.cumsum(counts[encoding.ids]).tolist()
    if ends[-1] != len(chars):
        return None
    wanted = [(chars[start], chars[end - 1] + 1) for start, end in itertools.pairwise([0, *ends])]
    return counts if encoding.offsets == wanted else None


def _keeps(normalizer, text: str) -> bool:
    """Return whether the normalizer leaves the text as it is; normalizers other than NFC are taken to change it."""
    return normalizer is None or (
        isinstance(normalizer, NFC) and (text.isascii() or unicodedata.is_normalized("NFC", text))
    )


def _labeled_by_bytes(
    ids: np.ndarray, text: str, spans: list[tuple[int, int]], token_bytes: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return what `_labeled` does; None if the tokens do not add up to the bytes of the text."""
    if not text.isascii():
        spans = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in spans]
    ends = token_bytes[ids].cumsum()
    if not len(ids) or ends[-1] != (len(text) if text.isascii() else len(text.encode())):
        return None
    labels = np.full_like(ids, conversations.IGNORE)
    bounds = zip(
        ends.searchsorted([start for start, _ in spans], "right").tolist(),
        ends.searchsorted([end for _, end in spans], "left").tolist(),
        strict=True,
    )
    for first, last in bounds:
        labels[first : last + 1] = ids[first : last + 1]
    return ids, labels
