"""Make one measurement in one process: python prepare.py zerofit|trl '<job as JSON>'; the last line is the result.

Runs in zerofit's environment or in the peers', so only the standard library is imported at the top. Not timed:
imports, the tokenizer, and for TRL the model and the rest of its trainer. Timed: from the path of a JSONL file to the
prepared set (for TRL `datasets.load_dataset` and `SFTTrainer._prepare_dataset`), both writing to an empty cache.
"""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import machine


class Stopwatch:
    """Wall time and processor time (of all threads and ended child processes) spent inside `with`, added up."""

    def __init__(self):
        self.seconds = self.cpu_seconds = 0.0
        self.facts = {}  # more about what was timed

    def __enter__(self):
        self.started = time.perf_counter(), _cpu_seconds()

    def __exit__(self, *_):
        self.seconds += time.perf_counter() - self.started[0]
        self.cpu_seconds += _cpu_seconds() - self.started[1]


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usages)


def zerofit(job: dict, path: str) -> tuple[Stopwatch, object, object]:
    """Return (time, documents, packs or None)."""
    import datasets  # noqa: F401  zerofit imports it when it needs it; TRL's is not timed either
    import filelock  # noqa: F401

    from zerofit.config import resolve
    from zerofit.data.load import load_datasets
    from zerofit.model.load import load_tokenizer

    flags = ["--model", job.get("model", str(machine.TINY_MODEL)), "--data", path]
    flags += ["--max_length", str(job["max_length"]), "--preprocessing_num_workers", str(job["workers"])]
    settings = resolve.resolve_settings("sft", [*flags, *(["--packing"] if job["packing"] else []), *job["flags"]], 1)
    tokenizer = load_tokenizer(settings)
    watch = Stopwatch()
    watch.facts["started"] = time.time()
    with watch:
        tokens, _ = load_datasets(settings, tokenizer)
        packs = tokens.sequences(settings) if job["packing"] else None
    watch.facts |= {"tokenizing_seconds": tokens.statistics["seconds"], "tokens": tokens.statistics["tokens"]}
    return watch, tokens.dataset, packs


def trl(job: dict, path: str) -> tuple[Stopwatch, object, object]:
    """Return (time, documents, packs or None); the documents are None when packed, because TRL keeps only the packs."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    watch = Stopwatch()

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *args, **kwargs):
            with watch:
                return super()._prepare_dataset(*args, **kwargs)

    tokenizer = AutoTokenizer.from_pretrained(machine.TINY_MODEL)
    net = AutoModelForCausalLM.from_pretrained(machine.TINY_MODEL)
    with watch:
        rows = datasets.load_dataset("json", data_files=path, split="train")
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            max_length=job["max_length"],
            packing=job["packing"],
            assistant_only_loss=job["assistant_only_loss"],
            dataset_num_proc=job["workers"] if job["workers"] > 1 else None,
            use_cpu=True,
            bf16=False,
            report_to="none",
        )
        prepared = Timed(net, config, train_dataset=rows, processing_class=tokenizer).train_dataset
    return watch, None if job["packing"] else prepared, prepared if job["packing"] else None


def main() -> None:
    prepare = {"zerofit": zerofit, "trl": trl}[sys.argv[1]]
    job = json.loads(sys.argv[2])
    if hasattr(os, "sched_setaffinity"):  # one worker is one core, whatever threads a library starts
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["workers"]])
    if job["one_by_one"]:  # edge cases: ids and labels of each file, or the reason of its refusal
        result = [_edge(prepare, job, path) for path in job["paths"]]
    else:
        watch, documents, packs = prepare(job, job["paths"][0])
        result = {"seconds": watch.seconds, "cpu_seconds": watch.cpu_seconds} | watch.facts
        result |= {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if job["dump"]:
            columns = documents.select_columns(["input_ids", "labels"])
            columns.to_parquet(job["dump"])
        if job["count"]:  # not for --big: reading the mapped cache file would make its pages resident
            column = packs if documents is None else documents
            result["tokens"] = sum(sum(map(len, part["input_ids"])) for part in column.iter(1000))
        result["documents"] = sum(map(len, packs["seq_lengths"])) if documents is None else len(documents)
        result["packs"] = None if packs is None else len(packs)
        result["versions"] = machine.versions()
    print("\n" + json.dumps(result))


def _edge(prepare, job: dict, path: str) -> dict:
    try:
        documents = prepare(job, path)[1]
    except Exception as error:  # the refusal and its message are the finding
        return {"refused": f"{type(error).__name__}: {str(error).replace(str(Path(path).parent) + os.sep, '')}"}
    rows = [{k: list(row[k]) for k in ("input_ids", "labels")} for row in documents]
    return rows[0] if rows else {"refused": "dropped"}


if __name__ == "__main__":
    main()
