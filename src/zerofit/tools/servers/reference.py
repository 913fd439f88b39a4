"""Prompts and the trained model's answers to them, with which servers are compared."""

from dataclasses import dataclass, field

import torch

from zerofit.base.errors import first_line
from zerofit.model import generation
from zerofit.tools.servers.check import ServerCheck

MAX_TOKENS = 24  # tokens per answer

ROWS = 3  # rows of the run's data

_QUESTION = {"role": "user", "content": "What is 12,5 % of 80? Grüße, 東京!"}

_TURNS = [_QUESTION, {"role": "assistant", "content": "It is 10."}, {"role": "user", "content": "And of 160?"}]

_TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": "Return the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}}  # fmt: skip

# Name -> (messages, tools).
CONVERSATIONS = {
    "one turn": ([_QUESTION], None),
    "a system message": ([{"role": "system", "content": "Answer in one word."}, _QUESTION], None),
    "several turns": (_TURNS, None),
    "tools": ([_QUESTION], [_TOOL]),
}


@dataclass
class Prompt:
    """A prompt, and the trained model's greedy answer to it."""

    name: str
    ids: list[int]
    text: str = ""  # as rendered by the template; "" for a row of the data, which consists of token ids
    messages: list[dict] | None = None
    tools: list[dict] | None = None
    answer: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None  # [token of the answer, vocabulary]
    ended: bool = False

    @property
    def question_fields(self) -> tuple:
        """Return the fields of the prompt itself."""
        return self.name, self.ids, self.text, self.messages, self.tools


def make_prompts(tokenizer, rows: list[tuple[list[int], list[int]]]) -> tuple[list[Prompt], list[ServerCheck]]:
    """Return (prompts from the chat template and the run's data, checks for conversations it cannot render)."""
    prompts, skipped = [], []
    for name, (messages, tools) in CONVERSATIONS.items() if tokenizer.chat_template else ():
        options = {"tools": tools, "add_generation_prompt": True}
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            ids = tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"]
        except Exception as error:  # templates can raise anything
            skipped.append(ServerCheck(name, None, f"the chat template does not render it: {first_line(error)}"))
            continue
        if tools and text == next((prompt.text for prompt in prompts if prompt.name == "one turn"), None):
            skipped.append(ServerCheck(name, None, "the chat template ignores tools"))
            continue
        prompts.append(Prompt(name, ids, text, messages, tools))
    prompts += [Prompt(f"row {number} of the data", row[0]) for number, row in enumerate(rows[:ROWS], 1)]
    return prompts, skipped


def answer(model, tokenizer, prompts: list[Prompt], as_served: bool = False) -> None:
    """Generate the greedy answer to each prompt with its logits.

    Args: as_served: apply the repetition penalty of generation_config.json, which some servers ignore.
    """
    penalty = {} if as_served else {"repetition_penalty": 1.0}
    stops = generation.stop_ids(model)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    for prompt in prompts:
        ids = torch.tensor([prompt.ids], device=model.device)
        with torch.no_grad():
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=pad,
                max_new_tokens=MAX_TOKENS, output_logits=True, return_dict_in_generate=True, **penalty,
            )  # fmt: skip
        prompt.answer = output.sequences[0, len(prompt.ids) :].tolist()
        prompt.logits = torch.cat(output.logits).float().cpu()
        prompt.ended = prompt.answer[-1] in stops


def first_difference(prompt: Prompt, answer: list[int], error: float) -> str:
    """Return the first difference between an answer and the trained model's that a logit error cannot explain.

    A different token is explained if the trained model's two logits are within twice the error; the texts may differ
    after it. Truncated answers are compared up to their end.
    """
    for place, (expected, token) in enumerate(zip(prompt.answer, answer, strict=False)):
        if expected != token:
            gap = float(prompt.logits[place, expected] - prompt.logits[place, token])
            if gap > 2 * error:
                return f"token {place + 1} is {token} instead of {expected}, whose logit is {gap:.3g} higher"
            return ""
    if prompt.ended and len(answer) > len(prompt.answer):
        return f"it continues after token {len(prompt.answer)}, where the trained model ends"
    return ""


def compare_answers(prompts: list[Prompt], answers: list[list[int]], error: float, where: str) -> ServerCheck:
    """Compare a server's answers with the trained model's. error: the measured error of its logits."""
    pairs = list(zip(prompts, answers, strict=True))
    same = sum(prompt.answer == answer[: len(prompt.answer)] for prompt, answer in pairs)
    differing = [(prompt.name, first_difference(prompt, answer, error)) for prompt, answer in pairs]
    differing = [f"{name}: {difference}" for name, difference in differing if difference]
    message = f"{same} of {len(prompts)} identical token by token, {where}"
    if same < len(prompts) and not differing:
        message += f"; the others differ only within the logit error ({error:.2g})"
    return ServerCheck("greedy answers", not differing, "; ".join([message, *differing]))


def check_ends(prompts: list[Prompt], answers: list[list[int]], endings: list[bool], where: str) -> ServerCheck:
    """Check that identical answers end where the trained model's answers end."""
    pairs = zip(prompts, answers, endings, strict=True)
    same = [(one.name, ended) for one, answer, ended in pairs if one.ended and answer[: len(one.answer)] == one.answer]
    if not same:
        return ServerCheck("ends by itself", None, f"no identical answer ends within {MAX_TOKENS} tokens, {where}")
    late = [name for name, ended in same if not ended]
    message = f"{len(same) - len(late)} of {len(same)} that end in the trained model, {where}"
    return ServerCheck("ends by itself", not late, "; ".join([message, *late]))
