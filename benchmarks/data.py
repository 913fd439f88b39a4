"""Measure how fast rows become tokens with labels beside TRL's SFTTrainer, and compare the labels.

python benchmarks/data.py                                    # zerofit on a synthetic chat set
python benchmarks/data.py --data gsm8k.jsonl --packing       # on a file too, with packing
make bench-peers ARGS="--data gsm8k.jsonl"                   # side by side with TRL, in an environment of its own
python benchmarks/data.py --big 0.5 1 2                      # peak memory while preparing JSONL files of these GB
python benchmarks/data.py --collate                          # milliseconds in which rows become a batch

Every measurement is a fresh process with an empty cache, pinned to as many cores as it has workers; rounds alternate
between the tools; medians are shown. Tokenizer: examples/tiny/model. Results: benchmarks/results/.
"""

import argparse
import difflib
import json
import os
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import throughput

PREPARE = Path(__file__).with_name("prepare.py")
WORDS = (
    "the a of to and in is it you that he was for on are with as his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how said each she which do their time if will "
    "way about many then them write would like these her long make thing see him two has look more day could go come "
    "number sound most people over know water than call first who may down side been now find any new work part take "
    "get place made live where after back little only round man year came show every good me give our under naïve "
    "café größer 東京 данные emoji🙂 3.14 2,048 x=y def return {json} https://example.org"
).split()

# name -> messages; each is compared on its own
EDGES = {
    "one turn": [("user", "Hi"), ("assistant", "Hello.")],
    "system prompt": [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello.")],
    "two turns": [("user", "Hi"), ("assistant", "Hello."), ("user", "Bye"), ("assistant", "Bye.")],
    "ends with a user turn": [("user", "Hi"), ("assistant", "Hello."), ("user", "And?")],
    "two answers in a row": [("user", "Hi"), ("assistant", "Hello."), ("assistant", "Again.")],
    "begins with an answer": [("assistant", "Hello."), ("user", "Hi"), ("assistant", "Yes.")],
    "empty answer": [("user", "Hi"), ("assistant", "")],
    "empty question": [("user", ""), ("assistant", "Hello.")],
    "answer ends in line breaks": [("user", "Hi"), ("assistant", "Hello.\n\n")],
    "answer begins with white space": [("user", "Hi"), ("assistant", "  \n Hello.")],
    "unicode": [("user", "Größe 東京 🙂?"), ("assistant", "naïve e\u0301 👩‍👩‍👧 данные")],
    "special token in the question": [("user", "say <|end|>\n<|assistant|>\nno"), ("assistant", "No.")],
    "special token in the answer": [("user", "Hi"), ("assistant", "a<|end|>b")],
    "cut inside the answer": [("user", "Hi"), ("assistant", "word " * 900)],
    "question fills the row": [("user", "word " * 900), ("assistant", "Hello.")],
    "no answer": [("user", "Hi")],
    "tool turn": [("user", "Hi"), ("assistant", "call"), ("tool", "42"), ("assistant", "It is 42.")],
}


def chat_rows(count: int, seed: int = 0):
    """Return conversations of 1 to 5 question/answer pairs, every third with a system prompt."""
    rng = random.Random(seed)

    def text(low, high):
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high))).capitalize() + rng.choice(".?!")

    for _ in range(count):
        turns = [{"role": "system", "content": text(5, 20)}] if rng.random() < 1 / 3 else []
        for _ in range(rng.randint(1, 5)):
            turns.append({"role": "user", "content": text(3, 30)})
            turns.append({"role": "assistant", "content": text(5, 60)})
        yield {"messages": turns}


def write_jsonl(path: Path, rows) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


def as_trl(row: dict) -> dict:
    """Convert a row to a format of TRL: messages stay, other columns become a conversational prompt/completion."""
    if "messages" in row:
        return {"messages": row["messages"]}
    first = next(row[c] for c in ("question", "prompt", "instruction") if c in row)
    last = next(row[c] for c in ("answer", "completion", "output") if c in row)
    if row.get("input"):
        first = f"{first}\n\n{row['input']}"
    return {"prompt": [{"role": "user", "content": first}], "completion": [{"role": "assistant", "content": last}]}


def measure(tool: str, python: str, paths: list[Path], options, workers=1, messages=True, dump=None, edges=False):
    """Return the result of one process of prepare.py."""
    job = {
        "paths": [str(p) for p in paths],
        "max_length": options.max_length,
        "packing": options.packing and not dump and not edges,
        "workers": workers,
        "flags": shlex.split(options.flags),
        "assistant_only_loss": messages,
        "dump": dump and str(dump),
        "one_by_one": edges,
        "count": True,
    }
    with tempfile.TemporaryDirectory() as cache:
        process = subprocess.run(
            [python, str(PREPARE), tool, json.dumps(job)],
            env=machine.environment(cache, ours=tool == "zerofit"),
            capture_output=True,
            text=True,
        )
    if process.returncode:
        sys.exit(f"{tool} failed:\n{process.stdout[-2000:]}{process.stderr[-4000:]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def compare(ours: Path, theirs: Path, tokenizer) -> dict:
    """Compare the labels of two prepared sets, token for token, over rows aligned by their input_ids."""
    import pyarrow.parquet as pq

    sets = [pq.read_table(path).to_pydict() for path in (ours, theirs)]
    keys = [[hash(tuple(ids)) for ids in s["input_ids"]] for s in sets]
    found = {"rows_compared": 0, "rows_equal": 0, "tokens_compared": 0, "kinds": {}}

    def note(kind, example):
        entry = found["kinds"].setdefault(kind, {"count": 0, "example": example})
        entry["count"] += 1

    for tag, a, a_end, b, b_end in difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if tag != "equal":
            if a_end > a:
                note("row prepared by zerofit only, or with other input_ids", {"zerofit_row": a})
            if b_end > b:
                note("row prepared by TRL only, or with other input_ids", {"trl_row": b})
            continue
        for i, j in zip(range(a, a_end), range(b, b_end), strict=True):
            ids, mine, its = sets[0]["input_ids"][i], sets[0]["labels"][i], sets[1]["labels"][j]
            found["rows_compared"] += 1
            found["rows_equal"] += mine == its
            found["tokens_compared"] += len(ids)
            for position, (x, y) in enumerate(zip(mine, its, strict=True)):
                if x != y:
                    note(*_difference(tokenizer, ids, i, position, x))
    return found


def _difference(tokenizer, ids: list[int], row: int, position: int, mine: int) -> tuple[str, dict]:
    """Return (kind, example) of one token that only one of the two trains on."""
    token = tokenizer.decode([ids[position]])
    who = "TRL" if mine == -100 else "zerofit"
    where = "the last token of the row" if position == len(ids) - 1 else "inside the row"
    around = tokenizer.decode(ids[max(0, position - 6) : position + 3])
    return f"{who} alone trains on {token!r}, {where}", {"row": row, "position": position, "around": around}


def compare_edges(options, folder: Path, tokenizer) -> list[dict]:
    """Compare each edge case on its own: the same ids and labels, or the difference."""
    paths = []
    for number, turns in enumerate(EDGES.values()):
        rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
        paths.append(write_jsonl(folder / f"edge{number}.jsonl", rows))
    ours = measure("zerofit", sys.executable, paths, options, edges=True)
    theirs = measure("trl", options.peers, paths, options, edges=True)
    found = []
    for name, mine, its in zip(EDGES, ours, theirs, strict=True):
        if mine == its or ("refused" in mine and "refused" in its):
            words = "the same" if mine == its else "refused or dropped by both"
        elif "refused" in mine or "refused" in its:
            words = "only one prepares it"
        elif mine["input_ids"] != its["input_ids"]:
            words = f"other tokens: {len(mine['input_ids'])} in zerofit, {len(its['input_ids'])} in TRL"
        else:
            ids, labels = mine["input_ids"], zip(mine["labels"], its["labels"], strict=True)
            kinds = [_difference(tokenizer, ids, 0, i, x)[0] for i, (x, y) in enumerate(labels) if x != y]
            words = "; ".join(sorted(set(kinds)))
        if "refused" in mine or "refused" in its:
            words += f" (zerofit: {mine.get('refused', 'prepared')}; TRL: {its.get('refused', 'prepared')})"
        found.append({"case": name, "result": words})
    return found


def run(options) -> None:
    """Measure, compare, and write the results."""
    facts = machine.facts()
    tools = {"zerofit": sys.executable} | ({"trl": options.peers} if options.peers else {})
    record = {
        "machine": facts,
        "options": {k: getattr(options, k) for k in ("rounds", "max_length", "packing", "flags")},
    }
    record |= {"sets": [], "versions": {}, "differences": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {f"synthetic chat, {options.rows:,} rows": write_jsonl(folder / "chat.jsonl", chat_rows(options.rows))}
        files |= {f"{path.parent.name}/{path.name}": path for path in options.data}
        for title, path in files.items():
            with path.open(encoding="utf-8") as file:
                rows = [json.loads(line) for line in file if line.strip()]
            converted = write_jsonl(folder / "trl.jsonl", map(as_trl, rows))
            inputs = {"zerofit": path, "trl": converted}
            messages = "messages" in rows[0]
            times = {(tool, workers): [] for workers in options.workers for tool in tools}
            for number in range(options.rounds):
                for (tool, workers), results in times.items():
                    result = measure(tool, tools[tool], [inputs[tool]], options, workers, messages)
                    record["versions"][tool] = result.pop("versions")
                    results.append(result)
                    print(
                        f"{title}: round {number + 1}, {tool}, workers {workers}: {result['seconds']:.2f} s", flush=True
                    )
            for (tool, workers), results in times.items():
                seconds = statistics.median(r["seconds"] for r in results)
                record["sets"].append(
                    {"set": title, "tool": tool, "workers": workers, "rows": len(rows), "seconds": seconds}
                    | {"all_seconds": [r["seconds"] for r in results]}
                    | {"cpu_seconds": statistics.median(r["cpu_seconds"] for r in results)}
                    | {"rows_per_second": len(rows) / seconds, "tokens_per_second": results[0]["tokens"] / seconds}
                    | {k: results[0][k] for k in ("documents", "tokens", "packs")}
                    | {"peak_bytes": max(r["peak_bytes"] for r in results)}
                )
            if options.peers:
                record["differences"][title] = differences(options, folder, inputs, messages)
        if options.peers:
            record["edges"] = compare_edges(options, folder, _tokenizer())
    machine.save(options.name or ("data-packing" if options.packing else "data"), markdown(record), record)


def _tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(machine.TINY_MODEL)


def differences(options, folder: Path, inputs: dict[str, Path], messages: bool) -> dict[str, dict]:
    """Return {TRL's setting: its differences}. Rows without messages are compared with both of TRL's masks."""
    ours = folder / "zerofit.parquet"
    measure("zerofit", sys.executable, [inputs["zerofit"]], options, dump=ours)
    masks = {"assistant_only_loss": True} | ({} if messages else {"completion_only_loss (its default)": False})
    found = {}
    for name, assistant_only in masks.items():
        theirs = folder / "trl.parquet"
        measure("trl", options.peers, [inputs["trl"]], options, messages=assistant_only, dump=theirs)
        found[name] = compare(ours, theirs, _tokenizer())
    return found


def markdown(record: dict) -> list[str]:
    """Return the record as Markdown lines."""
    what = "load + template + mask" + (" + pack" if record["options"]["packing"] else "")
    lines = [f"# Data preparation: {what}", ""]
    lines += machine.describe(record["machine"], record["versions"])
    lines += [
        "",
        f"Median of {record['options']['rounds']} alternating rounds, a fresh process and an empty cache each, ",
    ]
    lines[-1] += "pinned to one core per worker (TRL: `dataset_num_proc`); imports and models are not timed; "
    lines[-1] += (
        f"max_length {record['options']['max_length']}. CPU s: processor time of all threads and child processes, "
    )
    lines[-1] += "which other work on the machine changes least."
    lines += [
        "",
        "| rows | tool | workers | seconds (each round) | rows/s | tokens/s | CPU s | sequences | TRL s / this | TRL "
        "CPU s / this |",
    ]
    lines.append("|---|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for entry in record["sets"]:
        peer = [
            e for e in record["sets"] if (e["set"], e["workers"], e["tool"]) == (entry["set"], entry["workers"], "trl")
        ]
        ratios = " | ".join(f"{peer[0][k] / entry[k]:.2f}x" if peer else "" for k in ("seconds", "cpu_seconds"))
        rounds = ", ".join(f"{s:.2f}" for s in entry["all_seconds"])
        lines.append(
            f"| {entry['set']} | {entry['tool']} | {entry['workers']} | {entry['seconds']:.2f} ({rounds}) | "
            f"{entry['rows_per_second']:,.0f} | {entry['tokens_per_second']:,.0f} | "
            f"{entry['cpu_seconds']:.2f} | {entry['packs'] or entry['documents']:,} | {ratios} |"
        )
    for title, by_mask in record["differences"].items():
        for mask, found in by_mask.items():
            lines += ["", f"**Labels, {title}, TRL with `{mask.split()[0]}`{mask[len(mask.split()[0]) :]}:** "]
            lines[-1] += (
                f"{found['rows_equal']:,} of {found['rows_compared']:,} aligned rows are equal token for token "
            )
            lines[-1] += f"({found['tokens_compared']:,} tokens)."
            for kind, entry in found["kinds"].items():
                lines.append(f"- {entry['count']:,} x {kind}; e.g. {json.dumps(entry['example'], ensure_ascii=False)}")
    if "edges" in record:
        lines += [
            "",
            "**Edge cases, one row each, TRL with `assistant_only_loss`:**",
            "",
            "| case | result |",
            "|---|---|",
        ]
        lines += [f"| {e['case']} | {e['result'].replace('|', chr(92) + '|')} |" for e in record["edges"]]
    return lines


def big(options) -> None:
    """Prepare a generated JSONL of each size in gigabytes, and write down the highest memory of the processes."""
    record = {"machine": machine.facts(), "options": vars(options) | {"data": None}, "files": []}
    for gigabytes in options.big:
        entry = _prepare_big(gigabytes, options)
        record["versions"] = {"zerofit": entry.pop("versions")}
        record["files"].append(entry)
        print(f"{gigabytes:g} GB: {entry['seconds']:.1f} s", flush=True)
    machine.save(options.name or "data-big", big_markdown(record), record)


def big_markdown(record: dict) -> list[str]:
    """Return the record of `big` as Markdown lines."""
    options = record["options"]
    packed = ", packed" if options["packing"] else ""
    lines = ["# Memory while preparing large files", "", *machine.describe(record["machine"], record["versions"]), ""]
    lines += [
        f"Synthetic chat rows{packed}, {options['workers'][-1]} workers, max_length {options['max_length']}, "
        f"{options['unused']} characters of each row in a column that is not used, vocabulary "
        f"{options['vocabulary'] or 'of the bundled tokenizer'}. The highest sums over all processes, in GB, from "
        "/proc/PID/smaps_rollup every second. Anonymous: Pss_Anon; of files: Pss_File, pages of mapped files, which "
        "the kernel can drop; a page of several processes counts once. After: checksum, mapping, packing.",
        "",
        "| JSONL, GB | rows | tokens | packs | seconds | anonymous: 1st quarter of the tokenizing | 2nd | 3rd | 4th | "
        "after | of files: tokenizing | after |",
        "|" + "---:|" * 12,
    ]
    for entry in record["files"]:
        peaks = entry["peaks"]
        anonymous = " | ".join(f"{peaks[part]['anonymous'] / 1e9:.3f}" for part in PARTS)
        files = max(peaks[part]["files"] for part in PARTS[:-1])
        lines.append(
            f"| {entry['bytes'] / 1e9:.2f} | {entry['rows']:,} | {entry['tokens']:,} | {entry['packs'] or ''} | "
            f"{entry['seconds']:.0f} | {anonymous} | {files / 1e9:.3f} | {peaks['after']['files'] / 1e9:.3f} |"
        )
    return lines


PARTS = ("1st", "2nd", "3rd", "4th", "after")  # quarters of the tokenizing, and what follows


def write_big(path: Path, size: int, unused: int) -> int:
    """Write at least `size` bytes of chat rows, drawn from 10,000 different ones; return their number."""
    rng, lines, rows = random.Random(0), [], 0
    for row in chat_rows(10_000):
        column = {"source": " ".join(rng.choices(WORDS, k=unused // 5))[:unused]} if unused else {}
        lines.append(json.dumps(row | column, ensure_ascii=False) + "\n")
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            file.writelines(rng.sample(lines, 1000))
            rows += 1000
    return rows


def write_tokenizer(folder: Path, vocabulary: int) -> Path:
    """Write the bundled model's config with a tokenizer like its own, of so many tokens, trained on chat rows."""
    texts = ["\n".join(turn["content"] for turn in row["messages"]) for row in chat_rows(2000)]
    _tokenizer().train_new_from_iterator(texts, vocabulary).save_pretrained(folder)
    shutil.copy(machine.TINY_MODEL / "config.json", folder)
    return folder


def _prepare_big(gigabytes: float, options) -> dict:
    """Prepare a generated JSONL in a process of its own; return its result, with the peaks of all its processes."""
    import psutil

    with tempfile.TemporaryDirectory() as name:
        path, log = Path(name) / "big.jsonl", Path(name) / "log"
        rows = write_big(path, int(gigabytes * 1e9), options.unused)
        model = write_tokenizer(Path(name) / "model", options.vocabulary) if options.vocabulary else machine.TINY_MODEL
        job = {"paths": [str(path)], "max_length": options.max_length, "packing": options.packing, "dump": None}
        job |= {"workers": options.workers[-1], "flags": shlex.split(options.flags), "model": str(model)}
        job |= {"one_by_one": False, "count": False}
        samples = []
        with log.open("w") as file:
            command = [sys.executable, str(PREPARE), "zerofit", json.dumps(job)]
            process = psutil.Popen(command, env=machine.environment(name, ours=True), stdout=file)
            while process.poll() is None:
                samples.append(_memory([process, *process.children(recursive=True)]))
                if len(samples) % 60 == 0:
                    print(f"{samples[-1]}; {log.read_text().strip().rpartition(chr(10))[2]}", flush=True)
                time.sleep(1)
        lines, size = log.read_text().strip().splitlines(), path.stat().st_size
    if process.returncode:
        sys.exit("zerofit failed:\n" + "\n".join(lines[-20:]))
    result = json.loads(lines[-1])
    groups: dict[str, list] = {part: [] for part in PARTS}
    for sample in samples:
        done = (sample["time"] - result["started"]) / result["tokenizing_seconds"]
        if done >= 0:
            groups[PARTS[min(int(4 * done), 4)]].append(sample)
    kinds = ("anonymous", "files")
    peaks = {part: {kind: max((s[kind] for s in group), default=0) for kind in kinds} for part, group in groups.items()}
    return {"bytes": size, "rows": rows, **result, "peaks": peaks, "samples": samples[:: len(samples) // 200 + 1]}


def _memory(processes: list) -> dict:
    """Return the memory of the processes now, anonymous and of mapped files; a page of several counts once."""
    total = {"time": time.time(), "anonymous": 0, "files": 0}
    for process in processes:
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:  # it has ended
            continue
        for name, kilobytes in re.findall(r"^Pss_(Anon|File): *(\d+) kB", text, re.MULTILINE):
            total["anonymous" if name == "Anon" else "files"] += int(kilobytes) * 1024
    return total


def collate(options) -> None:
    """Print how long it takes to make batches of rows as long as gsm8k's, those of benchmarks/throughput.py."""
    from zerofit.config import resolve
    from zerofit.data.batches import CountingCollator, TrainCollator
    from zerofit.data.load import load_datasets
    from zerofit.model.load import load_tokenizer

    with tempfile.TemporaryDirectory() as name:
        throughput.write_rows(Path(name) / "rows.jsonl", 4000)
        os.environ["ZEROFIT_CACHE"] = name
        flags = ["--model", str(machine.TINY_MODEL), "--data", f"{name}/rows.jsonl", "--max_length", "1024"]
        for way, rows_of_batch in (("padded", 16), ("padding-free", 16), ("packed", 2)):
            settings = resolve.resolve_settings("sft", [*flags, *(["--packing"] if way == "packed" else [])], 1)
            rows = load_datasets(settings, load_tokenizer(settings))[0].sequences(settings)
            make = CountingCollator(TrainCollator(0, packed=way != "padded"))
            order, times = random.Random(0).sample(range(len(rows)), len(rows)), []
            for start in range(0, len(rows) - rows_of_batch, rows_of_batch):
                began = time.perf_counter()
                make([rows[i] for i in order[start : start + rows_of_batch]])
                times.append(time.perf_counter() - began)
            print(f"{way}: {statistics.median(times) * 1e3:.2f} ms a batch of {rows_of_batch} rows", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[], help="JSONL files to measure besides the synthetic set"
    )
    parser.add_argument("--rows", type=int, default=5000, help="rows of the synthetic chat set")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", help="of the result files (default: data, data-packing or data-big)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="cores; for TRL dataset_num_proc too")
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--flags", default="", help="more flags for zerofit, in one string")
    parser.add_argument("--peers", help="python of an environment with TRL: measure it side by side and compare labels")
    parser.add_argument(
        "--big", type=float, nargs="+", metavar="GIGABYTES", help="only this: peak memory for files of these sizes"
    )
    parser.add_argument("--collate", action="store_true", help="only this: milliseconds to make a batch")
    parser.add_argument("--unused", type=int, default=0, help="--big: characters of a column that is not used")
    parser.add_argument("--vocabulary", type=int, help="--big: train a tokenizer of so many tokens (default: bundled)")
    options = parser.parse_args()
    if options.collate:
        collate(options)
    elif options.big:
        big(options)
    else:
        run(options)


if __name__ == "__main__":
    main()
