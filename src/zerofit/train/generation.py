"""Generate greedy answers for evaluation rows: samples and the exact-match score."""

import math

import torch

from zerofit import distributed
from zerofit.data import conversations


def prompt_and_answer(row: dict) -> tuple[list[int], list[int]]:
    """Token ids up to the first answer, and that answer; plain text is asked to go on after its first half."""
    labels = row["labels"]
    start = next(i for i, label in enumerate(labels) if label != conversations.IGNORE)
    if start == 0:
        start = max(1, min(16, len(labels) // 2))
    end = next((i for i in range(start, len(labels)) if labels[i] == conversations.IGNORE), len(labels))
    return row["input_ids"][:start], row["input_ids"][start:end]


def answers(trainer, rows: list[dict], max_new_tokens: int, batch: int = 64) -> list[str]:
    """The model's greedy answer to each row's prompt, in order. Collective: rows are dealt out to the ranks."""
    tokenizer, net, args = trainer.processing_class, trainer.model, trainer.args
    rank, ranks = args.process_index, args.world_size
    training = net.training
    net.eval()
    mine, found = list(range(rank, len(rows), ranks)), {}
    rounds = math.ceil(
        math.ceil(len(rows) / ranks) / batch
    )  # the same on every rank: under ZeRO-3 each forward is collective
    for i in range(rounds):
        # A rank without rows left answers row 0 once more, so that it takes part in the gathers.
        chosen = mine[i * batch : (i + 1) * batch] or [0]
        prompts = [prompt_and_answer(rows[j])[0] for j in chosen]
        width = max(map(len, prompts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts], device=args.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=args.device)
        out = net.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, use_cache=True,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        for j, tokens in zip(chosen, out[:, width:].tolist(), strict=True):
            found[j] = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    net.train(training)
    found = {j: text for part in distributed.all_gather(found) for j, text in part.items()}
    return [found[j] for j in range(len(rows))]


def exact_match(trainer) -> float:
    """Share of the evaluation rows whose greedy answer is the wanted one, letter for letter."""
    rows = list(trainer.eval_tokens.dataset)
    wanted = [prompt_and_answer(row)[1] for row in rows]
    texts = answers(trainer, rows, max_new_tokens=max(map(len, wanted)) + 1)
    decode = trainer.processing_class.decode
    right = [text == decode(w, skip_special_tokens=True).strip() for text, w in zip(texts, wanted, strict=True)]
    return sum(right) / len(right)


def samples(trainer, count: int) -> list[tuple[str, str, str]]:
    """(prompt, answer, wanted answer) of the first `count` evaluation rows, else training rows, as text."""
    tokens = trainer.eval_tokens or trainer.tokens
    rows = [tokens.dataset[i] for i in range(min(count, len(tokens)))]
    if not rows:
        return []
    decode = trainer.processing_class.decode
    pairs = [[decode(part, skip_special_tokens=True).strip() for part in prompt_and_answer(row)] for row in rows]
    texts = answers(trainer, rows, trainer.settings.max_tokens_per_sample)
    return [(prompt, text, wanted) for (prompt, wanted), text in zip(pairs, texts, strict=True)]
