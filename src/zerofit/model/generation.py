"""Generate greedy answers for evaluation rows: samples and the exact-match score."""

import math

import torch

from zerofit import distributed
from zerofit.data import conversations


def prompt_and_answer(row: dict) -> tuple[list[int], list[int]]:
    """Return (token ids up to the first answer, that answer); plain text is split at half or 16 tokens."""
    labels = row["labels"]
    start = next(i for i, label in enumerate(labels) if label != conversations.IGNORE)
    if start == 0:
        start = max(1, min(16, len(labels) // 2))
    end = next((i for i in range(start, len(labels)) if labels[i] == conversations.IGNORE), len(labels))
    return row["input_ids"][:start], row["input_ids"][start:end]


def answers(trainer, rows: list[dict], max_new_tokens: int, batch: int = 64) -> list[str]:
    """Generate the greedy answer to each row's prompt, in order. Collective: the ranks share the rows."""
    tokenizer, model, args = trainer.processing_class, trainer.model, trainer.args
    tp_size = trainer.settings.tp_size  # ranks that compute each row together
    rank, ranks = args.process_index // tp_size, args.world_size // tp_size
    was_training = model.training
    model.eval()
    own_rows, texts = list(range(rank, len(rows), ranks)), {}
    rounds = math.ceil(
        math.ceil(len(rows) / ranks) / batch
    )  # the same on every rank: under ZeRO-3 each forward is collective
    for i in range(rounds):
        # A rank without rows left answers row 0 again, to take part in ZeRO-3's gathers.
        indices = own_rows[i * batch : (i + 1) * batch] or [0]
        prompts = [prompt_and_answer(rows[j])[0] for j in indices]
        width = max(map(len, prompts))
        input_ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts], device=args.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=args.device)
        output = model.generate(
            input_ids=input_ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, use_cache=True,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        for j, tokens in zip(indices, output[:, width:].tolist(), strict=True):
            texts[j] = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    model.train(was_training)
    texts = {j: text for part in distributed.all_gather(texts) for j, text in part.items()}
    return [texts[j] for j in range(len(rows))]


def exact_match(trainer) -> float:
    """Return the share of evaluation rows whose greedy answer equals the expected one, letter for letter."""
    rows = list(trainer.eval_tokens.dataset)
    expected = [prompt_and_answer(row)[1] for row in rows]
    texts = answers(trainer, rows, max_new_tokens=max(map(len, expected)) + 1)
    decode = trainer.processing_class.decode
    matches = [
        text == decode(answer, skip_special_tokens=True).strip() for text, answer in zip(texts, expected, strict=True)
    ]
    return sum(matches) / len(matches)


def samples(trainer, count: int) -> list[tuple[str, str, str]]:
    """Return (prompt, answer, expected answer) of the first `count` evaluation rows, else training rows."""
    tokens = trainer.eval_tokens or trainer.tokens
    rows = [tokens.dataset[i] for i in range(min(count, len(tokens)))]
    if not rows:
        return []
    decode = trainer.processing_class.decode
    pairs = [[decode(part, skip_special_tokens=True).strip() for part in prompt_and_answer(row)] for row in rows]
    texts = answers(trainer, rows, trainer.settings.max_tokens_per_sample)
    return [(prompt, text, expected) for (prompt, expected), text in zip(pairs, texts, strict=True)]
