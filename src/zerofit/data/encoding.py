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
from zerofit.data.conversations import Conversation
from zerofit.data.dataset_conventions import rendered

PROBE = "Größe\n\n 東京 🙂\t3.14 'll  x\n"  # text that reveals whether tokens stand for bytes

ANCHOR = chr(conversations.PRIVATE_USE[-1])  # text that tokenizers do not merge with the following text


class Encoder:
    """Encode batches of rows as (input_ids, labels) with one tokenizer and chat template.

    Answers are located by the template's {% generation %} marks if it has them, else by prefixes: an answer starts
    at the end of the generation prompt before it, and ends at the end of the text rendered up to its turn. Control
    words in a turn's text are encoded as plain text, never as special tokens; text that seems to be already rendered
    is an error unless data_format is "letters". mask_generation_prompt: exclude the template's own text at the start
    of answers (template_text.openings) from the loss.
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
        self.special_tokens = tokenizer.special_tokens_map  # rebuilt at each access
        quoted = tokenizer.chat_template.replace('"', "'")
        # The key under which the template reads reasoning: `reasoning_content`, unless it reads only another.
        named = (k for k in conversations.REASONING if re.search(rf"\.{k}\b|(['\"]){k}\1", tokenizer.chat_template))
        self.reasoning_key = next(named, conversations.REASONING[0])
        self.switches = [word for word in conversations.SWITCHES if f"replace('{word}'" in quoted]
        self.marked = re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template) is not None
        self.added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        words = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        words |= {w for w in tokenizer.all_special_tokens if w}
        # Control words may be ordinary added tokens, e.g. from --new_tokens: text must not encode to them.
        words |= set(built_in.CONTROL_WORD.findall(tokenizer.chat_template)) & tokenizer.get_added_vocab().keys()
        self.special_ids = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special} | set(
            tokenizer.all_special_ids
        )
        # Longest first; never empty, since load_tokenizer requires an end token.
        self.control = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))

        # An end-of-turn token need not be special: any added token in the template counts.
        ends = {t.content for t in tokenizer.added_tokens_decoder.values() if t.content in tokenizer.chat_template}
        ends = {w for w in words | ends if w.strip()}
        self.end_words = tuple(sorted(ends, key=len, reverse=True))
        self.ends = re.compile("|".join(map(re.escape, self.end_words)))
        self.end_counter = end_tokens.EndCounter(self.end_words, tokenizer.chat_template, self.special_tokens.values())

    @functools.cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Return the number of text bytes per token; None if labels cannot be placed by bytes."""
        return _token_bytes(self.tokenizer)

    @functools.cached_property
    def header(self) -> int:
        """Return the number of tokens that the template writes between question and answer; 0 if unknown."""
        conversation = Conversation([{"role": "user", "content": "?"}], [False])
        try:
            before, prompt = (self._text("", conversation, prompt=p) for p in (False, True))
        except UserError:
            return 0
        return len(self._tokens(prompt.removeprefix(before))) if prompt.startswith(before) else 0

    @functools.cached_property
    def openings(self) -> tuple[str, ...]:
        """Return the template's own texts at the start of answers."""
        return template_text.openings(self)

    def encode(
        self,
        rows: list[tuple[str, Conversation | str | dict]],
        on_error: Callable[[str, UserError], None] | None = None,
        as_arrays: bool = False,
    ) -> list[tuple[list[int], list[int]] | tuple[np.ndarray, np.ndarray] | None]:
        """Encode [(place, parsed row)] as [(input_ids, labels)], in order; untrained labels are IGNORE.

        Args: on_error: called with place and error of an unusable row, for which None is returned. as_arrays: keep
            int32 arrays of ids and labels instead of converting them to lists.
        Raises: UserError for an unusable row without `on_error`.
        """
        self.tokenizer.backend_tokenizer.no_truncation()  # tokenizer.json may set both
        self.tokenizer.backend_tokenizer.no_padding()
        encoded: list[Any] = [None] * len(rows)
        texts, spans, slots = [], [], []
        for i, (place, content) in enumerate(rows):
            try:
                notes = list(rendered.check(place, content, self.data_format, self.control))
                if isinstance(content, rendered.Rendered) or (
                    isinstance(content, Conversation) and not self._has_control_words(content)
                ):
                    is_rendered = isinstance(content, rendered.Rendered)
                    text, row_spans = (self._encode_rendered if is_rendered else self._render)(place, content)
                    texts.append(text)
                    spans.append(row_spans)
                    slots.append(i)
                else:
                    encoded[i] = self._ids(place, content)
                self.notes.update({*getattr(content, "notes", ()), *notes})
                self._note_arguments(content)
            except (UserError, RecursionError) as error:
                if isinstance(error, RecursionError):
                    error = UserError(f"{place}: its tool calls or tools are nested too deep; flatten them.")
                if on_error is None:
                    raise error from None
                on_error(place, error)
        if texts:
            # Calls with split_special_tokens leave this setting on.
            self.tokenizer.backend_tokenizer.encode_special_tokens = False
            for i, row in zip(slots, self._label_texts(texts, spans, as_arrays), strict=True):
                encoded[i] = row
        return encoded

    def _note_arguments(self, content: Conversation | str | dict) -> None:
        """Note a row's chat template arguments, and those that the template does not read."""
        for name, value in getattr(content, "template_arguments", {}).items():
            if name not in template_arguments.names_in(self.tokenizer.chat_template):
                self.notes[f"chat_template_kwargs has {name!r}, which the chat template does not read"] += 1
            else:
                is_value = f" is {json.dumps(value)}" if isinstance(value, bool) else " is set by the row"
                self.notes[f"chat template argument {name}{is_value}"] += 1

    def _label_texts(
        self, texts: list[str], spans: list[list[tuple[int, int]]], as_arrays: bool
    ) -> Iterator[tuple[list[int], list[int]] | tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, labels) of rendered texts, placed by token bytes if these are known, else by offsets."""
        backend, token_bytes = self.tokenizer.backend_tokenizer, self.token_bytes
        encode_batch = backend.encode_batch if token_bytes is None else backend.encode_batch_fast  # without offsets
        normalizer = backend.normalizer
        for encoding, text, row_spans in zip(encode_batch(texts, add_special_tokens=False), texts, spans, strict=True):
            row = None
            if token_bytes is not None and _leaves_unchanged(normalizer, text):
                row = _label_by_bytes(np.array(encoding.ids, dtype=np.int32), text, row_spans, token_bytes)
            if row is not None:
                yield row if as_arrays else (row[0].tolist(), row[1].tolist())
                continue
            if token_bytes is not None:
                encoding = backend.encode(text, add_special_tokens=False)  # with offsets
            yield _label_by_offsets(encoding, len(text), row_spans, self.special_ids)

    def _ids(self, place: str, content: Conversation | str | dict) -> tuple[list[int], list[int]]:
        """Encode token lists, plain text, or a conversation whose text contains control words."""
        if isinstance(content, dict):
            ids = [*content["input_ids"], *(t for t in content["labels"] if t != conversations.IGNORE)]
            if min(ids) < 0 or max(ids) >= len(self.tokenizer):
                raise UserError(
                    f"{place}: input_ids must be from 0 to {len(self.tokenizer) - 1}, the tokenizer's range."
                )
            return content["input_ids"], content["labels"]
        if isinstance(content, str):
            self.end_counter.note(place, self.tokenizer.eos_token, end_tokens.TEXT)
            ids = self.tokenizer(content, split_special_tokens=True, verbose=False)["input_ids"]  # truncated later
            if not ids or ids[-1] != self.tokenizer.eos_token_id:
                ids = [*ids, self.tokenizer.eos_token_id]
            return ids, list(ids)
        return self._pieces(place, content)

    def _encode_rendered(self, place: str, content: rendered.Rendered) -> tuple[str, list[tuple[int, int]]]:
        """Return an already rendered text with one BOS and one end token, and the span in the loss."""
        rendered.check_tokens(place, content, self.control)
        text, bos = content.prompt + content.text, self.tokenizer.bos_token
        first = self.tokenizer("a")["input_ids"][:1]
        if bos and first == [self.tokenizer.bos_token_id] and not text.startswith(bos):
            text = bos + text
        start, stripped = len(text) - len(content.text), len(text.rstrip())
        word = self.end_counter.at_end(text, stripped)
        # The model does not generate the white space that a template writes after the end token.
        text = text[:stripped] if word else text + self.tokenizer.eos_token
        kind = end_tokens.ANSWER if content.prompt else end_tokens.TEXT
        self.end_counter.note(place, word or self.tokenizer.eos_token, kind)
        if self.train_on == "all" or not content.prompt:
            start = 0
        return text, [(start, len(text))] if content.is_trained else []

    def _has_control_words(self, conversation: Conversation) -> bool:
        plain = [turn["content"] for turn in conversation.turns if len(turn) == 2]  # only role and content
        others = [turn for turn in conversation.turns if len(turn) > 2]
        nested = conversations.strings([others, conversation.tools, conversation.template_arguments])
        return any(map(self.control.search, itertools.chain(plain, nested)))

    @functools.cached_property
    def adds_prefix(self) -> bool:
        """Return whether the tokenizer puts a space before each text, as SentencePiece does (Llama-2, Phi-3)."""
        return self._tokens("a", ANCHOR) != self._tokens("a")

    def _tokens(self, text: str, before: str = "", token: int | None = None) -> list[int]:
        """Encode a text as it follows `before`: nothing, the added token `token`, or ANCHOR."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = False
        encoding = backend.encode(before + text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        first = next((i for i, (start, _) in enumerate(offsets) if start >= len(before)), len(ids))
        if first and ids[first - 1] != token and offsets[first - 1][1] > len(before):  # a token spans both
            return self._tokens(text)
        return ids[first:]

    def _tokens_after(self, text: str, ids: list[int]) -> list[int]:
        """Encode a piece of text as in the middle of a text, after the tokens `ids`.

        Some tokenizers add or drop a space after an added token. After any other token, ANCHOR prevents the space
        that is added at the beginning of a text.
        """
        if ids and ids[-1] in self.added:
            return self._tokens(text, self.added[ids[-1]], ids[-1])
        return self._tokens(text, ANCHOR if ids and self.adds_prefix else "")

    def _text(self, place: str, conversation: Conversation, turns: int | None = None, prompt=False, **mode) -> str:
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
        """Return whether the template needs the arguments of tool calls as JSON text, as DeepSeek's does.

        Such a template fails on objects, or writes them as Python literals.
        """
        arguments = {"of": "zerofit"}
        call = {"id": "probe0001", "type": "function", "function": {"name": "zerofit_probe", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        for calls in (turn, conversations.with_text_arguments(turn)):
            with contextlib.suppress(UserError), _template_errors(""):
                question = {"role": "user", "content": "?"}
                text = self.tokenizer.apply_chat_template([question, calls], tokenize=False)
                if "zerofit_probe" in text and str(arguments) not in text:
                    return calls is not turn
        return False

    def _render(self, place: str, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Render the conversation; return its text and the character spans to train on."""
        text, marks = self._render_with_marks(place, conversation)
        turns = conversation.turns
        excluded = [i for i, t in enumerate(turns) if t["role"] == "assistant" and not conversation.trained[i]]
        if self.train_on == "all" and not excluded:
            self._check_tools(place, text, conversation, {})
            self.end_counter.note(place, self.end_counter.at_end(text, len(text.rstrip())), end_tokens.ANSWER)
            return text, [(0, len(text))]
        answers = self.answers(place, text, marks, conversation)
        self._check_complete(place, text, conversation, answers)
        endless = next((i for i, _, end in answers if not text.endswith(self.end_words, 0, end)), None)
        if endless is not None:
            like = built_in.like(self.tokenizer.chat_template)
            raise UserError(
                f"{place}: turn {endless + 1}: the chat template writes no end token after the answer, so the model "
                f"would not learn to stop; choose another with --chat_template{like}."
            )
        if self.train_on in ("all", "prompt"):
            without = [a for a in answers if self.train_on == "prompt" or a[0] in excluded]
            bounds = [0, *(b for _, start, end in without for b in (start, end)), len(text)]
            return text, [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]
        chosen = answers[-1:] if self.train_on == "last_turn" else answers
        chosen = [a for a in chosen if a[0] not in excluded]
        self.end_counter.add(place, text, chosen, conversation)
        if self.mask_generation_prompt:
            return text, [(template_text.skip_opening(self.openings, text, a, turns[a[0]]), a[2]) for a in chosen]
        return text, [(start, end) for _, start, end in chosen]

    def answers(self, place: str, text: str, marks: list, conversation: Conversation) -> list[tuple[int, int, int]]:
        """Return [(turn, start, end)] of the answers in a rendered conversation, with their end tokens."""
        return self._marked_answers(text, marks, conversation) or self._answers_by_prefix(place, text, conversation)

    def _check_complete(self, place: str, full_text: str, conversation: Conversation, answers: list) -> None:
        """Raise UserError for a turn whose text the template omits or changes; note lost reasoning."""
        places = {i: (start, end) for i, start, end in answers}
        spans = {i: full_text[start:end] for i, (start, end) in places.items()}
        for i, turn in enumerate(conversation.turns):
            text = turn["content"].strip()
            for switch in self.switches if turn["role"] == "system" else ():
                text = text.replace(switch, "").strip()
            start, end = places.get(i, (0, len(full_text)))
            # A generation prompt may contain the beginning of an answer's text, such as its <think>.
            if turn["role"] != "tool" and not _is_written(text, full_text, start, end):
                among = built_in.WITH_TOOLS if "tool_calls" in turn else built_in.NAMES
                like = built_in.like(self.tokenizer.chat_template, among)
                raise UserError(
                    f"{place}: turn {i + 1}: the chat template omits or changes the text of this {turn['role']} turn, "
                    f"so training would not match the data; choose another with --chat_template{like}."
                )
        self._check_tools(place, full_text, conversation, spans)
        lost = [
            i for i, turn in enumerate(conversation.turns)
            if "reasoning_content" in turn and turn["reasoning_content"].strip() not in spans.get(i, full_text)
        ]  # fmt: skip
        if not lost:
            return
        last_question = max((i for i, turn in enumerate(conversation.turns) if turn["role"] == "user"), default=-1)
        # Templates such as Qwen3's drop the reasoning of earlier answers on purpose.
        keeper = built_in.equivalent(self.tokenizer.chat_template)
        keeper = keeper if keeper in built_in.WITH_REASONING else ""
        if any(i > last_question for i in lost):
            self.notes[conversations.reasoning_lost("the last answer", keeper)] += 1
        if any(i < last_question for i in lost):
            self.notes[conversations.reasoning_lost("earlier answers", keeper)] += 1

    def _check_tools(self, place: str, full_text: str, conversation: Conversation, spans: dict[int, str]) -> None:
        """Raise UserError for a tool call, a tool or a tool result that the template omits.

        Args: spans: turn -> text of the answer; other turns are searched in the full text.
        """
        if not (conversation.tools or any("tool_calls" in t or t["role"] == "tool" for t in conversation.turns)):
            return
        default = f", such as --chat_template {', '.join(built_in.WITH_TOOLS)}"
        like = built_in.like(self.tokenizer.chat_template, built_in.WITH_TOOLS) or default
        fix = f"use a template with tools{like}, or a template file."
        for i, turn in enumerate(conversation.turns):
            if "tool_calls" not in turn:
                continue
            text, names = spans.get(i, full_text), conversations.tool_names(turn["tool_calls"])
            lost = [name for name in names if name not in text]
            if lost:
                raise UserError(
                    f"{place}: turn {i + 1} calls the tool {lost[0]!r}, but the chat template does not write the "
                    f"call; {fix}"
                )
        lost = [name for name in conversations.tool_names(conversation.tools) if name not in full_text]
        if lost:
            raise UserError(f"{place}: column 'tools' has {lost[0]!r}, but the chat template does not write it; {fix}")
        lost = self._lost_results(place, conversation)
        if lost:
            raise UserError(f"{place}: turn {lost[0] + 1} is a tool result that the chat template omits; {fix}")

    def _lost_results(self, place: str, conversation: Conversation) -> list[int]:
        """Return the tool turns that the template omits: a mark appended to their text is not in the rendered text.

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

    def _unused_characters(self, conversation: Conversation) -> Iterator[str]:
        """Yield private-use characters that neither the conversation nor the template contains."""
        values = [conversation.turns, conversation.tools, conversation.template_arguments]
        used = {c for text in conversations.strings(values) for c in text}
        used |= set(self.tokenizer.chat_template)
        return (chr(c) for c in conversations.PRIVATE_USE if chr(c) not in used)

    def _render_with_marks(self, place: str, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """Render the conversation; return its text and the spans of its {% generation %} marks, if any."""
        if not self.marked:
            return self._text(place, conversation), []
        text, marks = self._marked_text(place, conversation)
        return text, self._exclude_prompts(place, text, marks, conversation) if self.marks_prompt else marks

    def _marked_text(self, place: str, conversation: Conversation) -> tuple[str, list[tuple[int, int]]]:
        with _template_errors(place):
            texts, marks = render_jinja_template(
                conversations=[self._for_template(conversation.turns)], tools=conversation.tools,
                chat_template=self.tokenizer.chat_template,
                return_assistant_tokens_mask=True, **self.special_tokens | conversation.template_arguments,
            )  # fmt: skip
        return texts[0], marks[0]

    @functools.cached_property
    def marks_prompt(self) -> bool:
        """Return whether the marks include the generation prompt: SmolLM3's template marks the role header."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        conversation = Conversation(turns, [False, True])
        try:
            text, marks = self._marked_text("", conversation)
            return self._exclude_prompts("", text, marks, conversation) != marks
        except UserError:
            return False

    def _exclude_prompts(
        self, place: str, full_text: str, marks: list[tuple[int, int]], conversation: Conversation
    ) -> list[tuple[int, int]]:
        """Return the marks without the generation prompts."""
        turns = [i for i, turn in enumerate(conversation.turns) if turn["role"] == "assistant"]
        if len(marks) != len(turns):
            return marks
        result = []
        for i, (start, end) in zip(turns, marks, strict=True):
            if start <= len(self._text(place, conversation, i)):
                start = max(start, min(self._answer_start(place, full_text, conversation, i) or start, end))
            result.append((start, end))
        return result

    def _marked_answers(self, full_text: str, marks: list, conversation: Conversation) -> list[tuple[int, int, int]]:
        """Return [(turn, start, end)] of the answers; [] unless there is one mark per assistant turn."""
        turns = [i for i, t in enumerate(conversation.turns) if t["role"] == "assistant"]
        if len(marks) != len(turns):
            return []
        answers = []
        for i, (start, end) in zip(turns, marks, strict=True):
            trimmed = start + len(full_text[start:end].rstrip())
            if full_text.endswith(self.end_words, start, trimmed):
                end = trimmed  # exclude the line break after the end token, which TRL's templates mark
            if not full_text.endswith(self.end_words, 0, end) and (match := self.ends.match(full_text, end)):
                end = match.end()  # include the end token, which must be trained too
            answers.append((i, start, end))
        return answers

    def _answers_by_prefix(self, place: str, full_text: str, conversation: Conversation) -> list[tuple[int, int, int]]:
        """Return [(turn, start, end)] of the answers by rendering the turns before and up to each of them.

        Raises: UserError if added turns change earlier text, or an answer does not begin like its generation prompt.
        """
        answers, turns = [], conversation.turns
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            start = self._answer_start(place, full_text, conversation, i)
            after = full_text if i == len(turns) - 1 else self._text(place, conversation, i + 1)
            end = None
            if start is not None:
                end = max(len(after.rstrip()), start) if full_text.startswith(after) else None
                # e.g. Qwen3 writes an empty thinking block into the last answer only
                end = end or self._end_by_tail(full_text, start, after.rstrip())
                end = end or self._end_by_content(full_text, start, turn["content"])
            if end is None:
                raise UserError(
                    f"{place}: turn {i + 1}: the answer cannot be located: the chat template rewrites earlier text "
                    "when turns are added, or begins the answer differently from its generation prompt; use a "
                    f"template that only appends{built_in.like(self.tokenizer.chat_template)}."
                )
            answers.append((i, start, end))
        return answers

    def _answer_start(self, place: str, full_text: str, conversation: Conversation, i: int) -> int | None:
        """Return the start of the answer of turn `i`: of the text to generate after the generation prompt.

        A generation prompt may end with text that the template does not write before this answer, such as
        DeepSeek-R1's `<think>`: the answer then starts where both texts diverge, after the role header. None if they
        diverge before it.
        """
        if i == 0:
            return self._start_of_greeting(place, full_text, conversation)
        prompt = self._text(place, conversation, i, prompt=True)
        if full_text.startswith(prompt):
            return len(prompt)
        before = self._text(place, conversation, i)
        if not (prompt.startswith(before) and full_text.startswith(before)):
            return None
        for key, value in itertools.product(("enable_thinking", "thinking"), (False, True)):
            # The answer may match the prompt of a mode with or without reasoning, which may change earlier turns.
            base, mode_prompt = (self._text(place, conversation, i, prompt=p, **{key: value}) for p in (False, True))
            added = mode_prompt[len(base) :] if mode_prompt.startswith(base) else ""
            if added and full_text.startswith(added, len(before)):
                return len(before) + len(added)
        # Compare without the answer's text, which may begin like the rest of the prompt.
        mark, turns = next(self._unused_characters(conversation)), list(conversation.turns)
        marked = {key: mark for key in ("content", conversations.REASONING[0]) if turns[i].get(key, "").strip()}
        turns[i] = turns[i] | marked
        without = self._text(place, dataclasses.replace(conversation, turns=turns))
        letters = zip(*(text[len(before) :] for text in (full_text, prompt, without)), strict=False)
        start = len(before) + sum(1 for _ in itertools.takewhile(lambda each: len(set(each)) == 1, letters))
        # Control words may also begin alike.
        for text in (full_text, prompt):
            words = self.ends.finditer(text, len(before))
            start = next((word.start() for word in words if word.start() < start < word.end()), start)
        if start <= len(before):
            return None
        if conversations.PROMPT_IS_LONGER not in conversation.notes:
            conversation.notes = (*conversation.notes, conversations.PROMPT_IS_LONGER)
        return start

    def _start_of_greeting(self, place: str, full_text: str, conversation: Conversation) -> int | None:
        """Return the start of an answer in the first turn, since templates do not render an empty conversation.

        It follows the generation prompt that is written after a question; None if that prompt does not precede it.
        """
        question = dataclasses.replace(conversation, turns=[{"role": "user", "content": "?"}])
        before, prompt = (self._text(place, question, prompt=p) for p in (False, True))
        header = prompt.removeprefix(before)
        if prompt == before or not prompt.startswith(before):
            return None
        start = full_text.find(header) + len(header)
        text = conversation.turns[0]["content"].strip()
        follows = full_text.startswith(header, start - len(header)) and full_text[start:].lstrip().startswith(text)
        return start if follows else None

    def _end_by_tail(self, full_text: str, start: int, after: str) -> int | None:
        """Return the end of the answer at `start`, found by the end token of `after`, the text up to its turn.

        None if `after` does not end with the same answer: the template may change only earlier text.
        """
        end_token = next((m[0] for m in self.ends.finditer(after) if m.end() == len(after)), None)
        position = full_text.find(end_token, start) if end_token else -1
        if position < 0:
            return None
        end = position + len(end_token)
        return end if after.endswith(full_text[start:end]) else None

    def _end_by_content(self, full_text: str, start: int, content: str) -> int | None:
        """Return the end of the answer at `start`, after its `content` and the end token, or None."""
        content_start = full_text.find(content.strip(), start)
        if content_start < 0 or not content.strip() or self.control.search(full_text, start, content_start):
            return None
        match = re.compile(rf"\s*(?:{self.ends.pattern})").match(full_text, content_start + len(content.strip()))
        return match.end() if match else None

    def _pieces(self, place: str, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Encode a conversation with control words in its text, hidden by placeholders during rendering."""
        words: list[str] = []
        mark = next(self._unused_characters(conversation))

        def stand_in(match) -> str:
            words.append(match[0])
            return f"{mark}{len(words) - 1}{mark}"

        def replaced(value):
            return conversations.map_strings(lambda text: self.control.sub(stand_in, text), value)

        names = ("turns", "tools", "template_arguments")
        hidden = dataclasses.replace(conversation, **{name: replaced(getattr(conversation, name)) for name in names})
        text, spans = self._render(place, hidden)
        conversation.notes = hidden.notes
        if mark.encode("unicode_escape").decode() in text:
            raise UserError(
                f"{place}: the chat template writes tools as Python literals, and these contain a control word such as "
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
                    ids += self._tokens_after(half, ids)
                labels += ids[before:] if inside else [conversations.IGNORE] * (len(ids) - before)
        return ids, labels


def _is_written(text: str, full_text: str, start: int, end: int) -> bool:
    """Return whether the rendered text contains a turn's text from `start` to `end`.

    The tags of a thinking block may differ: then its reasoning and the answer after it must be there. The generation
    prompt before `start` may contain the text's beginning.
    """
    if full_text.find(text, max(0, start + 1 - len(text)), end) >= 0:
        return True
    reasoning, block, answer = (part.strip() for part in text.partition("</think>"))
    at = full_text.find(reasoning.removeprefix("<think>").strip(), start, end) if block else -1
    return at >= 0 and full_text.find(answer, at, end) >= 0


@contextlib.contextmanager
def _template_errors(place: str) -> Iterator[None]:
    """Run a chat template, in the main thread with limits on CPU time and memory.

    The sandbox stops long loops, but not 'x' * 10**10, which fills the memory between two checks of the time. The
    timer fires repeatedly, since Jinja drops errors of constants that it folds. Wall-clock time would fail the current
    row of a paused process (Ctrl-Z, a suspended job).

    Raises: UserError naming the place for any error of the template.
    """
    memory = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with process.time_limit(conversations.TEMPLATE_SECONDS):
            if threading.current_thread() is threading.main_thread():
                resource.setrlimit(resource.RLIMIT_AS, (_address_limit(*memory), memory[1]))
            yield
    except (RecursionError, MemoryError) as error:
        raise UserError(f"{place}: the chat template fails with {type(error).__name__}; fix it.") from None
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError, TimeoutError) as error:
        raise UserError(f"{place}: the chat template refuses this conversation: {error}.") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, memory)


def _address_limit(soft: int, hard: int) -> int:
    """Return the address space limit while a template runs, in bytes: TEMPLATE_BYTES more than now."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY)  # runs for each row, and pathlib takes seven times as long
    except OSError:  # not Linux
        return soft
    try:
        used = int(os.read(statm, 64).split()[0]) * resource.getpagesize()
    finally:
        os.close(statm)
    limits = (limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)
    return min([used + conversations.TEMPLATE_BYTES, *limits])


def _label_by_offsets(encoding, length: int, spans: list[tuple[int, int]], special_ids: set[int]) -> tuple[list, list]:
    """Return (ids, labels) of one encoded text; every token with a character in a span is trained."""
    ids = encoding.ids
    labels = [conversations.IGNORE] * len(ids)
    for start, end in spans:
        at = map(encoding.char_to_token, range(start, min(end, length)))  # None for a character outside all tokens
        first = next((index for index in at if index is not None), None)
        if first is None:
            continue
        if ids[first] in special_ids and encoding.token_to_chars(first)[0] < start:
            first += 1  # a preceding special token that includes the following white space
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
    """Return the number of text bytes per token; None if they do not match the tokenizer's offsets.

    Only the tokens of byte-level tokenizers concatenate to the bytes of the text. This is tested on PROBE and on the
    added tokens, which also detects added prefixes, trimmed offsets and tokens that absorb white space.
    """
    backend = tokenizer.backend_tokenizer
    if not _leaves_unchanged(backend.normalizer, PROBE):
        return None
    vocabulary, added = backend.get_vocab(with_added_tokens=False), backend.get_added_tokens_decoder()
    counts = np.zeros(1 + max([*vocabulary.values(), *added]), dtype=np.int64)
    counts[list(vocabulary.values())] = list(map(len, vocabulary))  # a vocabulary character is one byte
    counts[list(added)] = [len(token.content.encode()) for token in added.values()]
    text = PROBE + "".join(f" {token.content} " for token in added.values())
    chars = [i for i, char in enumerate(text) for _ in char.encode()]
    encoding = backend.encode(text, add_special_tokens=False)
    ends = np.cumsum(counts[encoding.ids]).tolist()
    if ends[-1] != len(chars):
        return None
    expected = [(chars[start], chars[end - 1] + 1) for start, end in itertools.pairwise([0, *ends])]
    return counts if encoding.offsets == expected else None


def _leaves_unchanged(normalizer, text: str) -> bool:
    """Return whether the normalizer keeps the text unchanged; assume that any other than NFC changes it."""
    return normalizer is None or (
        isinstance(normalizer, NFC) and (text.isascii() or unicodedata.is_normalized("NFC", text))
    )


def _label_by_bytes(
    ids: np.ndarray, text: str, spans: list[tuple[int, int]], token_bytes: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Do the same as _label_by_offsets; return None if the tokens do not add up to the bytes of the text."""
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
