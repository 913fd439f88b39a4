"""Pairs: preferences between two answers to a prompt, a chosen and a rejected one (DPO and similar losses).

A tokenized pair is one row of two documents: input_ids and labels of the chosen side, followed by the rejected side,
and `lengths` of both. Only the answers are labeled; turns that both sides share are the prompt.
"""

from typing import Any

import torch

from zerofit.base.errors import UserError
from zerofit.data import conversations, loss_marks
from zerofit.data.chat_templates import arguments
from zerofit.data.conversations import Conversation
from zerofit.data.dataset_conventions import comparisons
from zerofit.data.reading import PAIR_COUNTS, Example, Examples
from zerofit.objective import preference_losses
from zerofit.objective.preference import Preference, answer_tokens

KIND = "preference"

SIDES = ("chosen", "rejected")

PROMPT_COLUMNS = ("instruction", "question")  # columns with the prompt if `prompt` is missing

CONVERSATION = ("conversations", "messages")  # columns with the prompt as turns (LLaMA-Factory, ShareGPT)

USED = {*SIDES, "prompt", *PROMPT_COLUMNS, *CONVERSATION, "input", "system", "tools", "history", *arguments.COLUMNS}

SCORES = (
    "score_chosen",
    "score_rejected",
    "chosen_score",
    "rejected_score",
    "margin",
)  # ignored columns of many published pairs


def parse(place: str, row: dict[str, Any]) -> tuple[Conversation, Conversation]:
    """Parse a row into the conversations of the chosen and the rejected side.

    Raises: UserError with the place for a missing column, a wrong type, sides with different prompts, or a column that
        changes the meaning of the row.
    """
    for name in SIDES:
        if row.get(name) is None:
            loss_marks.refuse_label(place, row)
            _refuse_ranking(place, row)
            present = ", ".join(k for k, v in row.items() if v is not None) or "none"
            raise UserError(
                f"{place}: column {name!r} is missing or null; a preference pair needs `chosen` and `rejected` (and a "
                f"`prompt`, unless both contain it); columns found: {present}."
            )
    loss_marks.check_row(place, row, KIND)
    prompt = _prompt(place, row)
    turns = [_side(place, name, row[name], prompt) for name in SIDES]
    shared = _shared(*turns)
    both = []
    for name, side in zip(SIDES, turns, strict=True):
        conversation = conversations.turns_of(f"{place}, {name}", side, row)
        if name == "rejected":
            conversation.notes = ()  # reported for the chosen side
        start = len(conversation.turns) - len(side) + shared  # a system column adds a turn
        conversation.trained = [trained and i >= start for i, trained in enumerate(conversation.trained)]
        if shared == 0 or (len(side) > shared and conversation.turns[start]["role"] != "assistant"):
            raise UserError(f"{place}: the chosen and the rejected side have different prompts; fix or remove the row.")
        both.append(conversation)
    return both[0], both[1]


def _refuse_ranking(place: str, row: dict[str, Any]) -> None:
    """Raise UserError for a row that ranks several answers instead of comparing two."""
    ranking = comparisons.ranking(row)
    if ranking:
        column, key, answers = ranking
        raise UserError(
            f"{place}: column {column!r} ranks {answers} answers by {key!r}, but a preference pair has two; write rows "
            "with `prompt`, `chosen` and `rejected`, e.g. with the best and the worst answer."
        )


def _prompt(place: str, row: dict[str, Any]) -> list[dict]:
    """Return the turns before the answers; [] if both sides contain them."""
    name = next((n for n in ("prompt", *CONVERSATION, *PROMPT_COLUMNS) if row.get(n) is not None), None)
    if name is None:
        return []
    value = row[name]
    if isinstance(value, list):
        return value
    text = conversations.string(place, name, value)
    if name == "instruction":
        text = conversations.with_input(place, text, row)
    return [*conversations.history_of(place, row.get("history")), {"role": "user", "content": text}]


def _side(place: str, name: str, value: Any, prompt: list[dict]) -> list[dict]:
    """Return all turns of one side: the prompt and its answer, or its complete conversation."""
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, str):
        if prompt:
            return [*prompt, {"role": "assistant", "content": conversations.string(place, name, value)}]
        if not value.startswith(comparisons.HUMAN):
            raise UserError(
                f"{place}: column 'prompt' is missing, and {name!r} is a string without a dialogue; add the "
                "prompt, or map its column with --columns prompt=..."
            )
        return comparisons.dialogue(value)
    if not isinstance(value, list) or not value:
        raise UserError(f"{place}: column {name!r} must be a string, a turn or a list of turns that is not empty.")
    # UltraFeedback repeats the prompt inside
    return value if conversations.begins_conversation(value) else [*prompt, *value]


def _shared(chosen: list[dict], rejected: list[dict]) -> int:
    """Return the number of leading turns that both sides share, at most all but the last."""
    most = min(len(chosen), len(rejected)) - 1
    return next((i for i in range(most) if chosen[i] != rejected[i]), most)


def not_used(row: dict[str, Any]) -> list[str]:
    """Return the ignored columns of a row and keys of its turns that are not empty."""
    columns = [str(k) for k, v in row.items() if k not in USED and k not in SCORES and v not in (None, "", [])]
    return columns + [
        key for name in ("prompt", *CONVERSATION, *SIDES) for key in conversations.unused_keys(name, row.get(name))
    ]


# --- training ---

METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


class Pairs(Preference):
    """The mean loss of the pairs of a step, from the log-probabilities of both answers."""

    name, loss_types = "pairs", preference_losses.PAIR_LOSSES

    format, own_columns, documents, unit = KIND, frozenset(USED), 2, "pairs"

    columns, counts = ("lengths",), PAIR_COUNTS

    sums = ("pairs", "loss", *METRICS, "preference_accuracy")

    score_name, score_metric = "preference accuracy", "preference_accuracy"

    @staticmethod
    def parse(place, row, form, settings):
        row, notes = comparisons.standard(place, row)
        return Examples(KIND, [Example(place, parse(place, row))], not_used(row), [*notes])

    def examples(self, inputs):
        return (self._answer_tokens(inputs)[:, 0] > 0).sum()

    @staticmethod
    def _answer_tokens(inputs) -> torch.Tensor:
        """Return the numbers of supervised tokens of both sides of each pair, (pairs, 2); 0 for fillers."""
        return answer_tokens(inputs).view(-1, 2)

    def losses(self, model, inputs):
        settings, tokens = self.settings, self._answer_tokens(inputs)
        model_inputs = {name: value for name, value in inputs.items() if name != "reference"}
        is_computed = settings.trains_adapter and not settings.precompute_ref_log_probs
        if "reference" in inputs:
            reference = inputs["reference"]
        elif settings.loss_type in preference_losses.REFERENCE_FREE or not is_computed:
            reference = torch.zeros((), device=tokens.device)  # unused, or rows of a trial, which lack it
        else:
            with self.as_reference(model):
                reference = self.log_probs(model, model_inputs)[0]
        log_probs, outputs = self.log_probs(model, model_inputs)
        losses, rewards, scores = preference_losses.losses(
            settings, log_probs, reference.to(log_probs), tokens.clamp(min=1)
        )
        real = tokens[:, 0] > 0
        losses = losses.where(real, 0.0)
        return losses, _sums(losses.detach(), rewards, scores, log_probs.detach(), real), real.sum(), outputs

    def means(self, total):
        return dict(zip(self.sums[1:], (total / total[0]).tolist()[1:], strict=True))

    def step_metrics(self):
        means = super().step_metrics()
        return {name: means[name] for name in METRICS}

    def lengths(self, sequences):
        """Return the number of tokens of the longer side of each pair."""
        return torch.tensor(sequences["lengths"][:]).amax(1)

    def reference_of(self, model, inputs):
        """Return the log-probabilities of both sides of a batch's pairs, (pairs, 2)."""
        return self.log_probs(model, inputs)[0]


def _sums(losses, rewards, scores, log_probs, real) -> torch.Tensor:
    """Return Pairs.sums over the pairs of a batch; fillers do not count."""
    chosen, rejected = rewards.unbind(1)
    values = [torch.ones_like(losses), losses, chosen, rejected, chosen - rejected, chosen > rejected,
              *log_probs.unbind(1), scores[:, 0] > scores[:, 1]]  # fmt: skip
    return torch.stack([v.double() for v in values], 1).where(real[:, None], 0.0).sum(0)
