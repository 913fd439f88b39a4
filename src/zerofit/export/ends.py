"""Write the stop tokens of an export, and check them with transformers' generate."""

import contextlib
import itertools
import json
from pathlib import Path

import torch

from zerofit.base.errors import UserError, printable
from zerofit.data import encoding, end_tokens, reading, sources
from zerofit.job import data_entry, program, run_folder
from zerofit.job.settings import Settings
from zerofit.model import generation

MAX_ROWS = 64  # rows read from the run's data

MAX_NEW_TOKENS = 128


def write(saved, out: Path, tokenizer) -> dict[str, int]:
    """Add missing end tokens of trained answers to generation_config.json; return {token: id}.

    The tokens are unknown for old runs and for folders of other programs.
    """
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    trained_ends = saved.facts.get("data", {}).get("training", {}).get("ends", [])
    trained_ends = [entry for entry in trained_ends if not entry["token"] or entry["token"] in vocabulary]
    file, base = out / "generation_config.json", Path(saved.base) / "generation_config.json"
    if not trained_ends:
        return {}
    existing = next((f for f in (file, base) if f.is_file()), None)
    config = json.loads(existing.read_text(encoding="utf-8")) if existing else {}
    known = generation.ids_of(config.get("eos_token_id"))
    ends = end_tokens.decide(trained_ends, tokenizer, known)
    config["eos_token_id"] = generation.stops(ends, tokenizer, known)
    run_folder.write_json(file, config)
    return dict(zip(ends.words, ends.ids, strict=True))


def generate(model, samples: list[tuple[list[int], list[int]]], tokenizer, ends: dict[str, int]) -> dict:
    """Generate an answer to a row of the run's data with the model's generation_config; return the result.

    Args: samples: (prompt, answer) of rows; the shortest answer is used.
    """
    stops = generation.ids_of(model.generation_config.eos_token_id)
    result = {"missing": [word for word, i in ends.items() if i not in stops], "answer": None}
    if not ends or not samples:
        return result

    prompt, answer = min(samples, key=lambda sample: len(sample[1]))
    ids = torch.tensor([prompt], device=model.device)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.no_grad():
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=pad,
            max_new_tokens=min(2 * len(answer) + 16, MAX_NEW_TOKENS),
        )[0, len(prompt) :].tolist()  # fmt: skip
    end = tokenizer.convert_ids_to_tokens(output[-1]) if output[-1] in stops else None
    return result | {"answer": tokenizer.decode(output, skip_special_tokens=True), "end": end, "tokens": len(output)}


def samples(saved, tokenizer) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) of the first readable rows of the run's first local data file."""
    # A run folder must not select a custom recipe, so custom formats are unavailable.
    recipe = program.kit()["dpo" if run_folder.trained_on_preferences(saved.facts) else program.DEFAULT]
    values = {"bad_rows": "drop", "max_length": 1 << 30, "truncation": "truncate_right"}
    values |= {"columns": saved.argument("columns"), "data_format": saved.argument("data_format") or "auto"}
    values |= {"loss_type": saved.argument("loss_type")}
    settings = Settings(recipe, values, {}, 1)
    if tokenizer is None or not tokenizer.chat_template:
        return []
    rows_read = []
    with contextlib.suppress(UserError, OSError):  # e.g. the file has changed
        entries = map(data_entry.parse, saved.argument("data") or [])
        candidates = (sources.Source(Path(entry.path).expanduser(), entry=entry) for entry in entries)
        source = next((source for source in candidates if source.path.is_file()), None)
        if source is None:
            return []
        form, rows = reading.detect_format(reading.read(source, settings), settings, source)
        raw = [(*row, form) for row in itertools.islice(rows, MAX_ROWS)]
        for row in filter(
            None, reading.tokenize_rows(raw, settings, encoding.Encoder(tokenizer), reading.ReadingReport())
        ):
            stop = row[2][0] if len(row) == 3 else None  # end of the chosen side of a pair
            rows_read.append(generation.prompt_and_answer({"input_ids": row[0][:stop], "labels": row[1][:stop]}))
    return rows_read


def sentence(result: dict, ends: dict[str, int]) -> str:
    """Describe the result of `generate`; "" if the run's end tokens are unknown."""
    if not ends:
        return ""
    words = ", ".join(f"{word} (id {i})" for word, i in ends.items())
    if result["answer"] is None:
        return f"generation stops at {words} (not tested: cannot read the run's data)"
    answer = printable(" ".join(result["answer"].split()))
    answer = answer if len(answer) < 80 else f"{answer[:76]} ..."
    tested = f"transformers' generate answers {answer!r} to a row of the data"
    if result["end"] in ends:
        return f"{tested} and ends with {result['end']}"
    ended = f"ends with {result['end']}" if result["end"] else f"does not end within {result['tokens']} tokens"
    return f"generation stops at {words}; {tested} and {ended}, which can happen with little training"
