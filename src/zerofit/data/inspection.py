"""Report the data of a run: lengths, loss spans, repeated rows, fractions and their limits.

Every number is computed from the tokens, a thousand rows at a time; only a few machine words per row stay in memory.
"""

import functools
import hashlib
import itertools
import re
import sys
import time
import unicodedata
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from zerofit.base.errors import UserError, printable
from zerofit.data import encoding, end_tokens
from zerofit.data.batches import best_fit_decreasing, documents
from zerofit.data.conversations import IGNORE
from zerofit.data.dataset import notes
from zerofit.job.settings import order_seed, subject

LETTERS = "[as letters]"  # follows a control word that is encoded as letters in a printed row

MAX_SHORT_ANSWER = 2  # supervised tokens: a one-token answer and its end token

BARS = " ▏▎▍▌▋▊▉█"

# flag -> (measured fraction, fix)
LIMITS = {
    "min_supervised_fraction": ("of the training tokens are in the loss", "inspect the rows with `make data`"),
    "max_truncated_fraction": ("of the training rows are longer than --max_length", "raise --max_length"),
    "max_duplicate_fraction": ("of the training rows are duplicates", "remove the repeated rows"),
    "max_eval_overlap_fraction": ("of the eval rows are also training rows", "remove them from one of the two sets"),
}


def enforce(settings, fractions: dict[str, float]) -> None:
    """Raise UserError for the first measured fraction that violates its limit."""
    for flag, fraction in fractions.items():
        limit = getattr(settings, flag)
        if fraction < limit if flag.startswith("min_") else fraction > limit:
            measured, fix = LIMITS[flag]
            change = "raise" if flag.startswith("max_") else "lower"
            raise UserError(f"--{flag} {limit:g}: {100 * fraction:.3g}% {measured}; {fix}, or {change} the limit.")


def scan_all_epochs(train_set, first_epoch, tokenizer) -> "Scan":
    """Return the scan of all training rows; with weights like 0.5 the first epoch has only some of them."""
    return first_epoch if train_set.full_dataset is None else scan(train_set.full_dataset, tokenizer)


def fractions(train_set, train=None, held_out=None, everything=None) -> dict[str, float]:
    """Return {flag of LIMITS: measured fraction} from the statistics and the given scans."""
    statistics = train_set.statistics
    measured = {
        "min_supervised_fraction": statistics["supervised_tokens"] / statistics["tokens"],
        "max_truncated_fraction": statistics["truncated"] / statistics["rows"],
    }
    if train is not None:
        by_weight = statistics.get("repeated_by_weight", 0)
        distinct = len(train.normalized) - by_weight
        measured["max_duplicate_fraction"] = (repeats(train.normalized) - by_weight) / distinct
    if held_out is not None:
        shared = overlap(held_out.normalized, everything.normalized)
        measured["max_eval_overlap_fraction"] = shared / len(held_out.normalized)
    return measured


def skipped(settings, eval_set) -> list[str]:
    """Return a note if a limit is set that cannot be checked."""
    unchecked = settings.max_eval_overlap_fraction < 1 and eval_set is None
    return ["max_eval_overlap_fraction is not checked without eval rows"] if unchecked else []


def eval_rows_in_training(train_set, eval_set) -> list[str]:
    """Return a warning about eval rows with the same tokens as training rows.

    A million rows take a second. Streams are not compared: only their first rows are available.
    """
    if eval_set is None or train_set.stream is not None:
        return []
    held_out = np.concatenate([*_row_hashes(eval_set.dataset)])
    is_trained = np.zeros(len(held_out), bool)
    for hashes in _row_hashes(train_set.all_rows):
        is_trained |= np.isin(held_out, hashes)
    if not (count := int(is_trained.sum())):
        return []
    return [
        f"warning: {count:,} of {len(held_out):,} eval rows ({count / len(held_out):.1%}) are also training rows: on "
        "them, the evaluation measures memorization; remove them from one of the two sets "
        "(--max_eval_overlap_fraction 0 makes this an error)"
    ]


def _row_hashes(dataset):
    """Yield arrays of a hash of each row's tokens."""
    for table in dataset.with_format("arrow").iter(batch_size=10_000):
        ids, bounds = _flat(table["input_ids"])
        yield np.array([_hash(ids[a:b].tobytes()) for a, b in itertools.pairwise(bounds)], "u8")


# --- counting ---


@dataclass
class Scan:
    """Arrays with one entry per row. last: the last supervised token or -1; exact, normalized: 64-bit hashes."""

    lengths: np.ndarray
    supervised: np.ndarray
    last: np.ndarray
    exact: np.ndarray
    normalized: np.ndarray


def scan(dataset, tokenizer) -> Scan:
    """Return the Scan of a dataset, reading every row once.

    The first label of a row is not counted: no token predicts it.
    """
    # Remove markers before normalizing: `<`, `|` and `>` are symbols, not punctuation, and `Who?<|end|>` must equal
    # `who<|end|>`.
    special = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), key=len, reverse=True)
    marker = re.compile("|".join(map(re.escape, special)) or "(?!)")
    parts, rows, last_print = [], 0, time.monotonic()
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        ids, bounds = _flat(table["input_ids"])
        labels, label_bounds = _flat(table["labels"])
        inside = labels != IGNORE
        inside[label_bounds[:-1]] = False
        before = np.concatenate([[0], np.cumsum(inside)])
        supervised = before[label_bounds[1:]] - before[label_bounds[:-1]]
        positions = np.concatenate([[0], np.flatnonzero(inside)])  # [k]: position of the k-th supervised token, from 1
        last = np.where(supervised > 0, labels[positions[before[label_bounds[1:]]]], -1)
        documents = [ids[a:b] for a, b in itertools.pairwise(bounds)]
        texts = tokenizer.batch_decode([d.tolist() for d in documents])
        exact = [_hash(d.tobytes()) for d in documents]
        normalized = [_hash(normalize(marker.sub(" ", text)).encode("utf-8", "surrogatepass")) for text in texts]
        parts.append(Scan(np.diff(bounds), supervised, last, np.array(exact, "u8"), np.array(normalized, "u8")))
        rows += len(documents)
        if time.monotonic() - last_print > 5:
            last_print = time.monotonic()
            print(f"comparing rows: {rows:,} of {len(dataset):,}", flush=True)
    return Scan(*(np.concatenate([getattr(p, n) for p in parts]) for n in Scan.__dataclass_fields__))


def _flat(column) -> tuple[np.ndarray, np.ndarray]:
    """Return a column of lists as (numbers, bounds): row i is numbers[bounds[i]:bounds[i + 1]]."""
    lists = column.combine_chunks()
    bounds = lists.offsets.to_numpy().astype(np.int64)
    return lists.values.to_numpy()[bounds[0] : bounds[-1]].astype(np.int32), bounds - bounds[0]


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def normalize(text: str) -> str:
    """Return the text in lower case, punctuation as spaces (`1.5` is not `15`), white space collapsed."""
    return " ".join(text.lower().translate(_punctuation()).split())


@functools.cache
def _punctuation() -> dict[int, str]:
    return {i: " " for i in range(sys.maxunicode + 1) if unicodedata.category(chr(i)).startswith("P")}


def repeats(hashes: np.ndarray) -> int:
    """Return the number of rows that repeat an earlier one."""
    return len(hashes) - len(np.unique(hashes))


def overlap(held_out: np.ndarray, train: np.ndarray) -> int:
    """Return the number of eval rows that are also training rows."""
    return int(np.isin(held_out, train).sum())


def histogram(values: np.ndarray, bins: int = 12) -> list[tuple[int, int, int]]:
    """Return (low, high, count) of at most `bins` bins, ends included, with widths 1, 2 or 5 x 10^k."""
    low, high = int(values.min()), int(values.max())
    widths = (m * 10**k for k in range(12) for m in (1, 2, 5))
    width = next(w for w in widths if high // w - low // w < bins)
    counts = np.bincount(values // width - low // width)
    first = low // width * width
    return [(first + i * width, first + (i + 1) * width - 1, int(n)) for i, n in enumerate(counts)]


def sides(dataset) -> dict:
    """Return the answer lengths of preference pairs, and how often each side is longer."""
    answers = []
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        labels, bounds = _flat(table["labels"])
        lengths, _ = _flat(table["lengths"])
        ends = (bounds[:-1, None] + lengths.reshape(-1, 2).cumsum(1)).ravel()
        before = np.concatenate([[0], np.cumsum(labels != IGNORE)])
        answers.append(np.diff(before[np.concatenate([[bounds[0]], ends])]).reshape(-1, 2))
    chosen, rejected = np.concatenate(answers).T
    margin = chosen - rejected
    return {
        **{
            name: {"median": int(np.median(tokens)), "p95": int(np.percentile(tokens, 95, method="inverted_cdf"))}
            for name, tokens in (("chosen", chosen), ("rejected", rejected))
        },
        "margin_mean": float(margin.mean()),
        "margin_percentiles": [int(p) for p in np.percentile(margin, [5, 50, 95], method="inverted_cdf")],
        "chosen_longer": int((margin > 0).sum()),
        "rejected_longer": int((margin < 0).sum()),
        "ties": int((margin == 0).sum()),
    }


def packing(lengths: np.ndarray, settings) -> dict:
    """Return how full packs are, and the share of padding in the first epoch's unpacked batches.

    Args: lengths: tokens per row, or per side of the pairs (pairs, 2).
    """
    packs, tokens = len(best_fit_decreasing(lengths.ravel(), settings.max_length)), int(lengths.sum())
    seed, order = order_seed(settings), np.arange(len(lengths))
    if seed is not None:
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).numpy()
    micro = settings.per_device_train_batch_size
    starts = np.arange(0, lengths.size, micro * (lengths.size // len(lengths)))
    widths = -(-np.maximum.reduceat(lengths[order].ravel(), starts) // 8) * 8  # as the collator rounds
    slots = int((widths * np.diff([*starts, lengths.size])).sum())
    return {
        "packs": packs,
        "efficiency": tokens / (packs * settings.max_length),
        "unpacked_padding_fraction": 1 - tokens / slots,
        "micro_batch": micro,
    }


def inspect(settings, train_set, eval_set, tokenizer, ends: end_tokens.Ends) -> dict:
    """Return the facts of the report. ends: result of end_tokens.decide."""
    sets = {"training": train_set} | ({"evaluation": eval_set} if eval_set is not None else {})
    pairs = settings.objective.documents == 2
    scans = {name: scan(rows.dataset, tokenizer) for name, rows in sets.items()}
    train, held_out = scans["training"], scans.get("evaluation")
    everything = train if held_out is None else scan_all_epochs(train_set, train, tokenizer)
    facts = {
        "recipe": settings.recipe.name,
        "model": settings.model,
        "max_length": settings.max_length,
        "end_token": " or ".join(ends.words or [tokenizer.eos_token]),
        **{name: _count(rows.statistics, scans[name], tokenizer, ends) for name, rows in sets.items()},
        "packing": packing(np.array(train_set.dataset["lengths"]) if pairs else train.lengths, settings),
        "fractions": fractions(train_set, train, held_out, everything),
        "limits": {flag: getattr(settings, flag) for flag in LIMITS},
        "decisions": [d for d in settings.decisions if subject(d) in ("chat_template", "max_length")]
        + list(ends.sentences)
        + skipped(settings, eval_set)
        + notes(sets),
    }
    for name in sets if pairs else ():
        facts[name]["answers"] = sides(sets[name].dataset)
    if held_out is not None:
        facts["overlap"] = {k: overlap(getattr(held_out, k), getattr(everything, k)) for k in ("exact", "normalized")}
    facts["warnings"] = _warnings(facts)
    return facts


def _count(statistics: dict, scan: Scan, tokenizer, ends: end_tokens.Ends) -> dict:
    ended = np.isin(scan.last, ends.ids or [tokenizer.eos_token_id])
    others = Counter(scan.last[~ended].tolist()).most_common(3)
    quantiles = np.percentile(scan.lengths, [50, 95], method="inverted_cdf")
    return {
        **statistics,
        "kept": len(scan.lengths),
        "length": {
            "min": int(scan.lengths.min()),
            "median": int(quantiles[0]),
            "p95": int(quantiles[1]),
            "max": int(scan.lengths.max()),
        },
        "histogram": histogram(scan.lengths),
        "supervised_mean": float(scan.supervised.mean()),
        "supervised_few": int((scan.supervised <= MAX_SHORT_ANSWER).sum()),
        "supervised_none": int((scan.supervised == 0).sum()),
        "end_supervised": int(ended.sum()),
        "other_last_tokens": {tokenizer.decode([i]) if i >= 0 else "nothing": n for i, n in others},
        # Copies made for a weight also count as repeated rows; subtract them.
        "repeated_exact": repeats(scan.exact) - statistics.get("repeated_by_weight", 0),
        "repeated_normalized": repeats(scan.normalized) - statistics.get("repeated_by_weight", 0),
    }


def _warnings(facts: dict) -> list[str]:
    sentences = []
    for name in ("training", "evaluation"):
        counts = facts.get(name)
        if counts and counts["end_supervised"] < counts["kept"]:
            last = ", ".join(f"{text!r} in {n:,}" for text, n in counts["other_last_tokens"].items())
            sentences.append(
                f"{counts['kept'] - counts['end_supervised']:,} of {counts['kept']:,} {name} rows do not end with a "
                f"supervised end token {facts['end_token']!r} (last supervised: {last}): the model does not "
                "learn to stop there. Common causes: rows truncated to --max_length, a template with another end token."
            )
    if facts.get("overlap", {}).get("normalized"):
        sentences.append(
            f"{facts['overlap']['normalized']:,} of {facts['evaluation']['kept']:,} eval rows are also training rows: "
            "the eval loss is too optimistic."
        )
    return sentences


# --- printing ---


def describe(settings, facts: dict) -> str:
    """Return the report as text, without the rendered rows and the warnings."""
    sets = [name for name in ("training", "evaluation") if name in facts]
    lines = [f"zerofit data: {settings.recipe}, tokenizer of {settings.model}, max_length {settings.max_length:,}"]
    lines += [f"  {name:<10}  {_shorten(facts[name]['source'])} ({facts[name]['format']})" for name in sets]
    lines += [f"  - {printable(sentence)}" for sentence in facts["decisions"]]
    lines += ["", " " * 32 + "".join(f"{name:>18}" for name in sets)]
    row = "pair" if "answers" in facts["training"] else "row"
    for title, value in [*_table(facts), *(_table_of_answers() if row == "pair" else [])]:
        title = title.replace("row", row)
        lines.append(f"  {title:<30}" + "".join(f"{value(facts[name]):>18}" for name in sets))
    for kind, count in facts.get("overlap", {}).items():
        share = _share(count, facts["evaluation"]["kept"])
        lines.append(f"  {f'eval rows in training, {kind}':<48}{share:>18}")

    lines += _mixture(facts["training"].get("sets", []))
    bars = facts["training"]["histogram"]
    most, width = max(n for *_, n in bars), len(f"{bars[-1][1]:,}")
    lines += ["", f"tokens per {row}, training"]
    lines += [f"  {low:>{width},} - {high:>{width},}  {bar(n / most):<40}  {n:,}" for low, high, n in bars if n]
    p = facts["packing"]
    packed = f"packed    {p['packs']:,} sequences of {facts['max_length']:,} tokens, {p['efficiency']:.1%} full"
    lines += [
        "",
        *([packed] if row == "row" else []),
        f"unpacked  {p['unpacked_padding_fraction']:.1%} of the tokens are padding (micro batch {p['micro_batch']}, "
        "random order)",
    ]
    return "\n".join(lines)


def _mixture(sets: list[dict]) -> list[str]:
    """Return a table of the rows and tokens of each --data entry in an epoch; [] for a single entry."""
    if not sets:
        return []
    totals = [sum(entry[name] for entry in sets) for name in ("rows", "tokens")]
    lines = ["", f"{'per epoch, training':<44}{'weight':>8}{'rows':>20}{'tokens':>24}"]
    for entry in sets:
        rows, tokens = (_share(entry[name], total) for name, total in zip(("rows", "tokens"), totals, strict=True))
        lines.append(f"  {_shorten(entry['data'], 42):<42}{entry['weight']:>8g}{rows:>20}{tokens:>24}")
    return lines


def _table(facts: dict) -> list:
    """Return the lines as (title, function from the facts of a set to text)."""
    reasons = dict.fromkeys(k for s in ("training", "evaluation") for k in facts.get(s, {}) if k.startswith("dropped_"))

    def in_other_set(s):
        distinct = s["kept"] - s.get("repeated_by_weight", 0) + s.get("left_out_by_weight", 0)
        return s["rows"] - distinct - sum(s.get(r, 0) for r in reasons)

    def template_share(s):
        return _share(s["template_text"]["template"], max(1, s["template_text"]["supervised"]))

    sets = [name for name in ("training", "evaluation") if name in facts]
    has_template_text = any(facts[name]["template_text"]["rows"] for name in sets)
    weights = [k for k in ("left_out_by_weight", "repeated_by_weight") if facts["training"].get(k)]
    has_labels = "wanted" in facts["training"]
    split = any(in_other_set(facts[s]) for s in sets)
    length = [(f"tokens per row, {k}", lambda s, k=k: f"{s['length'][k]:,}") for k in ("min", "median", "p95", "max")]
    return [
        ("rows read", lambda s: f"{s['rows']:,}"),
        *(
            (r.replace("_", " ").replace("dropped", "dropped,", 1), lambda s, r=r: _share(s.get(r, 0), s["rows"]))
            for r in reasons
        ),
        *([("in the other set", lambda s: f"{in_other_set(s):,}")] if split else []),
        *((k.replace("_", " "), lambda s, k=k: f"{s.get(k, 0):,}") for k in weights),
        ("rows kept", lambda s: f"{s['kept']:,}"),
        *([("answers with label true", lambda s: _share(s["wanted"], s["kept"]))] if has_labels else []),
        ("truncated to max_length", lambda s: _share(s["truncated"], s["rows"])),
        ("tokens", lambda s: f"{s['tokens']:,}"),
        *length,
        ("supervised tokens", lambda s: _share(s["supervised_tokens"], s["tokens"])),
        *([("template tokens, first rows", template_share)] if has_template_text else []),
        ("supervised per row, mean", lambda s: f"{s['supervised_mean']:,.1f}"),
        (f"rows with 0 to {MAX_SHORT_ANSWER} supervised", lambda s: _share(s["supervised_few"], s["kept"])),
        ("rows with 0 supervised", lambda s: _share(s["supervised_none"], s["kept"])),
        ("rows ending in the end token", lambda s: _share(s["end_supervised"], s["kept"])),
        ("repeated rows, exact", lambda s: _share(s["repeated_exact"], s["kept"])),
        ("repeated rows, normalized", lambda s: _share(s["repeated_normalized"], s["kept"])),
    ]


def _table_of_answers() -> list:
    """Return the lines on the two sides of the pairs as (title, function from the facts of a set to text)."""

    def length(name, key):
        return f"answer, {name}, {key} tokens", lambda s: f"{s['answers'][name][key]:,}"

    def count(title, name):
        return title, lambda s: _share(s["answers"][name], s["kept"])

    return [
        *(length(name, key) for name in ("chosen", "rejected") for key in ("median", "p95")),
        ("chosen - rejected, mean", lambda s: f"{s['answers']['margin_mean']:+,.1f}"),
        ("chosen - rejected, p5 50 95", lambda s: " ".join(f"{p:+,}" for p in s["answers"]["margin_percentiles"])),
        count("chosen is longer", "chosen_longer"),
        count("rejected is longer", "rejected_longer"),
        count("equal lengths", "ties"),
    ]


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:6.1%})"


def _shorten(text: str, limit: int = 90) -> str:
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def bar(share: float, width: int = 40) -> str:
    """Return a horizontal bar in eighths of a character; any share above 0 is visible."""
    eighths = max(round(share * width * 8), int(share > 0))
    return "█" * (eighths // 8) + BARS[eighths % 8].strip()


def render_rows(dataset, tokenizer, colored: bool) -> list[str]:
    """Return the first, middle and last row as text, with loss spans in green, or in «» without color."""
    texts, printed = [], sorted({0, len(dataset) // 2, len(dataset) - 1})
    for i in printed:
        parts = documents(dataset[i])
        for name, row in zip(("chosen", "rejected") if len(parts) == 2 else ("",), parts, strict=True):
            body = render(row["input_ids"], row["labels"], tokenizer, colored).replace("\n", "\n  | ")
            which = f"pair {i + 1:,}, {name}" if name else f"row {i + 1:,}"
            texts.append(f"\n{which}; the loss covers the {'green text' if colored else 'text in «»'}\n  | {body}")
    if any(row["labels"][0] != IGNORE for row in (dataset[i] for i in printed)):
        texts.append("\nThe first token of a row is never in the loss: no token predicts it.")
    return texts


def render(ids: list[int], labels: list[int], tokenizer, colored: bool) -> str:
    """Return a row's text with its supervised spans marked; long spans are abbreviated.

    LETTERS follows a control word that is encoded as letters.
    """
    inside = [i > 0 and label != IGNORE for i, label in enumerate(labels)]
    encoder = encoding.Encoder(tokenizer)
    is_token = [i in encoder.added for i in ids]
    edges = [i for i in range(1, len(ids)) if (inside[i], is_token[i]) != (inside[i - 1], is_token[i - 1])]
    text, previous, piece = "", "", ""
    for start, end in zip([0, *edges], [*edges, len(ids)], strict=True):
        # Decode prefixes: some tokenizers drop the leading space of a span that is decoded separately.
        prefix = tokenizer.decode(ids[:end])
        part = prefix[len(previous) :] if prefix.startswith(previous) else tokenizer.decode(ids[start:end])
        previous = prefix
        piece += part if is_token[start] else encoder.control.sub(rf"\g<0>{LETTERS}", part)
        if end < len(ids) and inside[end] == inside[start]:
            continue
        piece = printable(piece if len(piece) <= 700 else f"{piece[:450]} ... {len(piece) - 650:,} ... {piece[-200:]}")
        if inside[start] and colored:
            piece = "\n".join(f"\033[32m{line}\033[0m" for line in piece.split("\n"))
        text += f"«{piece}»" if inside[start] and not colored else piece
        piece = ""
    return text
