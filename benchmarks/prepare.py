"""One measurement in one process: python prepare.py zerofit|trl '<job as JSON>'; the last line it prints is the result.

Runs in zerofit's environment or in the peers' one, so only the standard library is imported at the top. Not timed:
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


def zerofit(job: dict, path: str) -> tuple[float, object, object]:
    """(seconds, documents, packs or None)."""
    import datasets  # noqa: F401  zerofit imports it when it needs it; TRL's is not timed either
    import filelock  # noqa: F401

    from zerofit import args, data, model

    flags = ["--model", str(machine.TINY_MODEL), "--data", path, "--max_length", str(job["max_length"])]
    settings = args.parse("sft", [*flags, *(["--packing"] if job["packing"] else []), *job["flags"]], 1)
    tokenizer = model.load_tokenizer(settings)
    started = time.perf_counter()
    tokens, _ = data.load(settings, tokenizer)
    packs = tokens.sequences(settings) if job["packing"] else None
    return time.perf_counter() - started, tokens.dataset, packs


def trl(job: dict, path: str) -> tuple[float, object, object]:
    """(seconds, documents, packs or None); the documents are None when packed, TRL keeps only the packs."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    seconds = []

    class Timed(SFTTrainer):
        def _prepare_dataset(self, *args, **kwargs):
            started = time.perf_counter()
            prepared = super()._prepare_dataset(*args, **kwargs)
            seconds.append(time.perf_counter() - started)
            return prepared

    tokenizer = AutoTokenizer.from_pretrained(machine.TINY_MODEL)
    net = AutoModelForCausalLM.from_pretrained(machine.TINY_MODEL)
    started = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=path, split="train")
    seconds.append(time.perf_counter() - started)
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
    return sum(seconds), None if job["packing"] else prepared, prepared if job["packing"] else None


def main() -> None:
    prepare = {"zerofit": zerofit, "trl": trl}[sys.argv[1]]
    job = json.loads(sys.argv[2])
    if hasattr(os, "sched_setaffinity"):  # one worker is one core, whatever threads a library starts
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job["workers"]])
    if job["one_by_one"]:  # edge cases: ids and labels of each file, or why it was refused
        result = [_edge(prepare, job, path) for path in job["paths"]]
    else:
        seconds, documents, packs = prepare(job, job["paths"][0])
        result = {"seconds": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if job["dump"]:
            columns = documents.select_columns(["input_ids", "labels"])
            columns.to_parquet(job["dump"])
        column = packs if documents is None else documents
        result["tokens"] = sum(sum(map(len, part["input_ids"])) for part in column.iter(1000))
        result["documents"] = sum(map(len, packs["seq_lengths"])) if documents is None else len(documents)
        result["packs"] = None if packs is None else len(packs)
        result["versions"] = machine.versions()
    print("\n" + json.dumps(result))


def _edge(prepare, job: dict, path: str) -> dict:
    try:
        documents = prepare(job, path)[1]
    except Exception as error:  # what is refused, and how, is the finding
        return {"refused": f"{type(error).__name__}: {str(error).replace(str(Path(path).parent) + os.sep, '')}"}
    rows = [{k: list(row[k]) for k in ("input_ids", "labels")} for row in documents]
    return rows[0] if rows else {"refused": "dropped"}


if __name__ == "__main__":
    main()
