"""What the trained model answers to the prompts with which a server is compared."""

from dataclasses import dataclass, field

import torch

from zerofit.base.errors import first_line
from zerofit.model import generation
from zerofit.tools.servers.check import Check

MOST_TOKENS = 24  # of an answer; the logits of each are kept

ROWS = 3  # of the run's data

_ASKED = {"role": "user", "content": "What is 12,5 % of 80? Grüße, 東京!"}

_TURNS = [_ASKED, {"role": "assistant", "content": "It is 10."}, {"role": "user", "content": "And of 160?"}]

_TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Return the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}}  # fmt: skip

# Name -> (messages, tools).
CONVERSATIONS = {
    "one turn": ([_ASKED], None),
    "a system message": ([{"role": "system", "content": "Answer in one word."}, _ASKED], None),
    "several turns": (_TURNS, None),
    "tools": ([_ASKED], [_TOOL]),
}


@dataclass
class Prompt:
    """A prompt, and the trained model's greedy answer to it."""

    name: str
    ids: list[int]
    text: str = ""  # as the template renders it; "" of a row of the data, which is given by its token ids
    messages: list[dict] | None = None
    tools: list[dict] | None = None
    answer: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None  # [token of the answer, vocabulary]
    ended: bool = False

    @property
    def as_asked(self) -> tuple:
        """Return the fields of the prompt itself."""
        return self.name, self.ids, self.text, self.messages, self.tools


def prompts(tokenizer, rows: list[tuple[list[int], list[int]]]) -> tuple[list[Prompt], list[Check]]:
    """Return the prompts that the chat template renders, with rows of the run's data, and what it does not render."""
    found, left = [], []
    for name, (messages, tools) in CONVERSATIONS.items() if tokenizer.chat_template else ():
        words = {"tools": tools, "add_generation_prompt": True}
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **words)
            ids = tokenizer.apply_chat_template(messages, return_dict=True, **words)["input_ids"]
        except Exception as error:  # a template may raise what it likes
            left.append(Check(name, None, f"the chat template does not render it: {first_line(error)}"))
            continue
        if tools and text == next((one.text for one in found if one.name == "one turn"), None):
            left.append(Check(name, None, "the chat template leaves tools out"))
            continue
        found.append(Prompt(name, ids, text, messages, tools))
    found += [Prompt(f"row {number} of the data", row[0]) for number, row in enumerate(rows[:ROWS], 1)]
    return found, left


def answer(model, tokenizer, asked: list[Prompt], as_served: bool = False) -> None:
    """Generate the greedy answer to each prompt, and keep its logits.

    Args: as_served: with the penalty for repetition of generation_config.json, which not every server reads.
    """
    penalty = {} if as_served else {"repetition_penalty": 1.0}
    stops = generation.stops_of(model)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    for prompt in asked:
        ids = torch.tensor([prompt.ids], device=model.device)
        with torch.no_grad():
            found = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=pad,
                max_new_tokens=MOST_TOKENS, output_logits=True, return_dict_in_generate=True, **penalty,
            )  # fmt: skip
        prompt.answer = found.sequences[0, len(prompt.ids) :].tolist()
        prompt.logits = torch.cat(found.logits).float().cpu()
        prompt.ended = prompt.answer[-1] in stops


def first_difference(prompt: Prompt, answer: list[int], error: float) -> str:
    """Return how an answer differs from the trained model's where logits that are off by `error` do not explain it.

    The likeliest token may be another one only where the trained model's two logits are within twice the error; what
    follows is another text. An answer that was cut short is compared as far as it goes.
    """
    for place, (own, theirs) in enumerate(zip(prompt.answer, answer, strict=False)):
        if own != theirs:
            gap = float(prompt.logits[place, own] - prompt.logits[place, theirs])
            if gap > 2 * error:
                return f"token {place + 1} is {theirs} and not {own}, whose logit is {gap:.3g} higher"
            return ""
    if prompt.ended and len(answer) > len(prompt.answer):
        return f"it goes on after token {len(prompt.answer)}, where the trained model ends"
    return ""


def compared(asked: list[Prompt], answers: list[list[int]], error: float, where: str) -> Check:
    """Return whether the answers of a server are those of the trained model. error: of its logits, as measured."""
    same = sum(prompt.answer == answer[: len(prompt.answer)] for prompt, answer in zip(asked, answers, strict=True))
    differing = [(one, first_difference(one, answer, error)) for one, answer in zip(asked, answers, strict=True)]
    differing = [f"{one.name}: {difference}" for one, difference in differing if difference]
    says = f"{same} of {len(asked)} the same token by token, {where}"
    if same < len(asked) and not differing:
        says += f"; the others part where two tokens are within the error of the logits ({error:.2g})"
    return Check("greedy answers", not differing, "; ".join([says, *differing]))


def ends(asked: list[Prompt], answers: list[list[int]], endings: list[bool], where: str) -> Check:
    """Return whether generation ended by itself where the trained model's did, in the answers that are the same."""
    pairs = zip(asked, answers, endings, strict=True)
    own = [(one.name, ended) for one, answer, ended in pairs if one.ended and answer[: len(one.answer)] == one.answer]
    if not own:
        return Check("ends by itself", None, f"no answer ends within {MOST_TOKENS} tokens and is the same, {where}")
    late = [name for name, ended in own if not ended]
    says = f"{len(own) - len(late)} of {len(own)} that the trained model ends, {where}"
    return Check("ends by itself", not late, "; ".join([says, *late]))
