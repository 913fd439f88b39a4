"""Set the end tokens of generation; generate greedy answers for samples and the exact-match score."""

import copy
import math
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.data import conversations, end_tokens
from zerofit.job.technique import AllBut, Conflict, Technique
from zerofit.model import attention


def ids_of(eos_token_id: int | list[int] | None) -> list[int]:
    """Return the eos_token_id of a configuration as a list."""
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or [])


def stop_ids(model) -> list[int]:
    """Return the ids at which the model's generation stops."""
    return ids_of(getattr(getattr(model, "generation_config", None), "eos_token_id", None))


def stop_at_ends(model, tokenizer, ends_of_rows: list[dict]):
    """Stop the model's generation at the end tokens of trained answers, of the tokenizer and of the base.

    Returns: (end_tokens.Ends, the tokenizer to save: a copy with the eos_token of Ends.eos if that is set, so that rows
    are still tokenized as before).
    Args: ends_of_rows: statistics["ends"] of the training set.
    """
    from transformers.trainer_utils import align_special_tokens

    owner = model.get_base_model() if hasattr(model, "get_base_model") else model
    generation, config = getattr(owner, "generation_config", None), owner.config.get_text_config()
    if generation is None or not isinstance(tokenizer, PreTrainedTokenizerBase):  # no generation, or a simulation
        return end_tokens.Ends((), (), "", ()), tokenizer
    known = ids_of(generation.eos_token_id)
    ends = end_tokens.decide(ends_of_rows, tokenizer, known)
    generation.eos_token_id = stops(ends, tokenizer, known)
    if ends.eos:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_special_tokens({"eos_token": ends.eos})
        also = ids_of(config.eos_token_id) if isinstance(config.eos_token_id, list) else []
        config.eos_token_id = [ends.ids[0], *also] if also else ends.ids[0]
    align_special_tokens(owner, tokenizer)  # as the Trainer does later: the padding and begin tokens too
    owner.generation_config = _reloaded(generation)
    return ends, tokenizer


def stops(ends: end_tokens.Ends, tokenizer, known: list[int]) -> int | list[int]:
    """Return the eos_token_id of generation_config.json: the ends of answers, the tokenizer's and the base's.

    Args: known: the base's ids, whose order is kept if they include all others.
    """
    needed = [*ends.ids, tokenizer.eos_token_id]
    ids = known if set(needed) <= set(known) else list(dict.fromkeys([*needed, *known]))
    return ids if len(ids) > 1 else ids[0]


def _reloaded(generation):
    """Return the generation configuration saved and loaded again, so that it can be saved.

    Some published configurations contradict themselves, such as Llama-2's temperature without sampling. transformers
    saves them only unchanged after loading, and 5.17 does not save them: sampling is then turned on.
    """
    with tempfile.TemporaryDirectory() as folder:
        generation.to_json_file(Path(folder) / "generation_config.json")
        loaded = type(generation).from_pretrained(folder)
        try:
            loaded.save_pretrained(folder)
        except ValueError:
            loaded.do_sample = True
        return loaded


def prompt_and_answer(row: dict) -> tuple[list[int], list[int]]:
    """Return (token ids before the first answer, the answer); plain text is split in the middle or after 16 tokens."""
    labels = row["labels"]
    start = next(i for i, label in enumerate(labels) if label != conversations.IGNORE)
    if start == 0:
        start = max(1, min(16, len(labels) // 2))
    end = next((i for i in range(start, len(labels)) if labels[i] == conversations.IGNORE), len(labels))
    return row["input_ids"][:start], row["input_ids"][start:end]


def answers(trainer, rows: list[dict], max_new_tokens: int, batch: int = 64) -> list[str]:
    """Generate the greedy answer to each row's prompt, in order. Collective: the ranks share the rows."""
    tokenizer, model, args = trainer.processing_class, trainer.model, trainer.args
    together = trainer.settings.parallel_size("matrices")  # these ranks compute each row together
    rank, ranks = args.process_index // together, args.world_size // together
    was_training = model.training
    model.eval()
    own_rows, texts = list(range(rank, len(rows), ranks)), {}
    # The same number on every rank: under ZeRO-3 each forward is collective.
    rounds = math.ceil(math.ceil(len(rows) / ranks) / batch)
    for i in range(rounds):
        # A rank without further rows answers row 0 again, to take part in ZeRO-3's gathers.
        indices = own_rows[i * batch : (i + 1) * batch] or [0]
        prompts = [prompt_and_answer(rows[j])[0] for j in indices]
        width = max(map(len, prompts))
        input_ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts], device=args.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=args.device)
        with attention.for_generation(trainer.settings, model):
            output = model.generate(
                input_ids=input_ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False,
                use_cache=True, pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
        for j, tokens in zip(indices, output[:, width:].tolist(), strict=True):
            texts[j] = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    model.train(was_training)
    texts = {j: text for part in distributed.all_gather(texts) for j, text in part.items()}
    return [texts[j] for j in range(len(rows))]


def exact_match(trainer, rows: list[dict] | None = None) -> float:
    """Return the share of rows whose greedy answer equals the expected one, letter for letter. Collective.

    Args: rows: default: all evaluation rows. Answers are limited to the length of the longest expected answer.
    """
    rows = list(trainer.eval_tokens.dataset) if rows is None else rows
    expected = [prompt_and_answer(row)[1] for row in rows]
    texts = answers(trainer, rows, max_new_tokens=max(map(len, expected)) + 1)
    decode = trainer.processing_class.decode
    matches = [
        text == decode(answer, skip_special_tokens=True).strip() for text, answer in zip(texts, expected, strict=True)
    ]
    return sum(matches) / len(matches)


def exact_match_of_first_rows(trainer) -> dict[str, float]:
    """Return {"exact_match"} for --eval_generation_rows; {} if it is not set. Collective.

    Only rows whose expected answer has at most --max_tokens_per_sample tokens are used.
    """
    settings, first = trainer.settings, trainer.args.process_index == 0
    if not settings.eval_generation_rows:
        return {}
    most = settings.max_tokens_per_sample
    short = (row for row in trainer.eval_tokens.dataset if len(prompt_and_answer(row)[1]) <= most)
    rows = list(islice(short, settings.eval_generation_rows))
    began = time.perf_counter()
    share = exact_match(trainer, rows) if rows else float("nan")
    if first and not trainer.generation_time_reported:
        trainer.generation_time_reported = True
        print(
            f"exact match: {len(rows)} of {len(trainer.eval_tokens)} eval rows, with answers of up to {most} tokens, "
            f"{time.perf_counter() - began:.1f} s per evaluation",
            flush=True,
        )
    return {"exact_match": share}


def _resolve(settings) -> None:
    """Check --eval_generation_rows. Raises: UserError if there are no answers to compare."""
    if not settings.eval_generation_rows:
        return
    if settings.objective.score_name != "exact match":
        raise UserError("--eval_generation_rows: answers are compared in supervised fine-tuning only; leave it out.")
    if not (settings.eval_data or settings.eval_fraction):
        raise UserError("--eval_generation_rows: evaluation rows are required; set --eval_data or --eval_fraction.")


TECHNIQUE = Technique(
    name="answers while training",
    flag="eval_generation_rows",
    example="--eval_generation_rows 2 --eval_data examples/tiny/eval.jsonl",
    conflicts=(
        Conflict("pp_size", AllBut(1), "a pipeline cannot generate", "leave it out"),
        Conflict("loss_type", AllBut(), "answers are compared in supervised fine-tuning only", "leave it out"),
    ),
    resolve=_resolve,
)


def samples(trainer, count: int) -> list[tuple[str, str, str]]:
    """Return (prompt, answer, expected answer) for the first `count` evaluation rows, or training rows without any."""
    tokens = trainer.eval_tokens or trainer.tokens
    rows = [tokens.dataset[i] for i in range(min(count, len(tokens)))]
    if not rows:
        return []
    decode = trainer.processing_class.decode
    pairs = [[decode(part, skip_special_tokens=True).strip() for part in prompt_and_answer(row)] for row in rows]
    texts = answers(trainer, rows, trainer.settings.max_tokens_per_sample)
    return [(prompt, text, expected) for (prompt, expected), text in zip(pairs, texts, strict=True)]
