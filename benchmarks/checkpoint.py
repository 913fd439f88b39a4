"""Measure the cost of checkpoints (save, verify, load, convert, export), against Trainer, DeepSpeed and zero_to_fp32.

    python benchmarks/checkpoint.py     # 207 M parameters, two ranks, ZeRO-3: about 4 minutes on 2 cores, 15 GB of disk

Saves alternate in one process, medians of the rounds. Loads and conversions are processes of their own; their peak is
the resident memory of the largest rank. Writes benchmarks/results/checkpoint.{json,md}.
"""

import argparse
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import ROOT, TINY_MODEL, describe, facts, save, versions

ROUNDS, RANKS, TO = 3, 2, "ZEROFIT_BENCHMARK_TO"
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 13, "num_attention_heads": 16,
         "num_key_value_heads": 16, "vocab_size": 32768, "tie_word_embeddings": False}  # fmt: skip


def model_folder(folder: Path, shape: dict) -> Path:
    """Write a Llama of this shape with random weights and the bundled tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(TINY_MODEL, folder)
    config = AutoConfig.from_pretrained(folder, **shape)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def launched(words: list[str], **env) -> dict:
    """Return {"seconds", "peak_gb"} of a command: the largest resident memory of any of its processes."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            words, env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | env, stdout=said, stderr=said
        )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            said.seek(0)
            raise SystemExit(f"{' '.join(words)}\n{said.read().decode()[-3000:]}")
    return {"seconds": time.perf_counter() - began, "peak_gb": usage.ru_maxrss * 1024 / 1e9}


def world(ranks: int, flags: list[str], to: Path) -> dict:
    """Run inside() on so many ranks; return rank 0's measurement and the highest memory of a rank."""
    found = launched(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(ranks),
            __file__,
            *flags,
        ],
        **{TO: str(to), "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // ranks))},
    )
    return json.loads(to.read_text()) | {"peak_gb": found["peak_gb"]}


def inside() -> None:
    """Run one rank: a recipe whose loading is timed, and which saves both ways after training."""
    from transformers import trainer as transformers_trainer

    from zerofit.checkpoint import reshard
    from zerofit.train import run as train_run

    found = {"loads": {}}

    def timed(module, name, kind):
        load = getattr(module, name)

        def measured(*args, **kwargs):
            began = time.perf_counter()
            load(*args, **kwargs)
            found["loads"][kind] = time.perf_counter() - began

        setattr(module, name, measured)

    timed(transformers_trainer, "deepspeed_load_checkpoint", "DeepSpeed")
    timed(reshard, "load", "zerofit")

    def measure(trainer):
        if not trainer.args.resume_from_checkpoint:
            found.update(saves(trainer))
        if trainer.args.process_index == 0:
            Path(os.environ[TO]).write_text(json.dumps(found))

    train_run.save_final = measure
    train_run.evaluate = train_run.write_result = lambda *_: None
    runpy.run_path(str(ROOT / "recipes" / "sft.py"), run_name="__main__")


def saves(trainer) -> dict:
    """Return the seconds in which each way to save blocks training, round by round, and the bytes of the last one.

    "plain" is transformers' save, synced here, which it does not do; "kit" is verified and hashed too; "weights" the
    same with --save_model_in_checkpoints; "background" what --save_in_background leaves: the copies and the renaming.
    """
    from zerofit.base.paths import size_of
    from zerofit.job import run_folder

    run, rounds = Path(trainer.args.output_dir), {"plain": [], "weights": [], "kit": [], "background": []}
    for _ in range(ROUNDS):
        for kind, seconds in rounds.items():
            _empty(trainer, run)
            seconds.append(_blocked(trainer, run, kind))
    (newest,) = run_folder.checkpoints(run).values()
    return {"saves": rounds, "bytes": size_of(newest)}


def _empty(trainer, run: Path) -> None:
    """Delete what the last round has saved. Collective."""
    from zerofit.base import distributed
    from zerofit.job import run_folder

    distributed.barrier()
    if trainer.args.process_index == 0:
        shutil.rmtree(run / "plain", ignore_errors=True)
        for folder in run_folder.checkpoints(run).values():
            shutil.rmtree(folder)
        os.sync()
    distributed.barrier()


def _blocked(trainer, run: Path, kind: str) -> float:
    """Save in one way; return the seconds without those in which training goes on. Collective."""
    from transformers import Trainer

    from zerofit.base import distributed

    settings = trainer.settings
    settings.unseal()
    whole = kind in ("plain", "weights")
    settings.values.update(save_in_background=kind == "background", save_model_in_checkpoints=whole)
    settings.seal()
    trainer.saving_to = run / "plain" if kind == "plain" else None
    began = time.perf_counter()
    if kind == "plain":
        Trainer._save_checkpoint(trainer, trainer.model, None)
    else:
        trainer._save_checkpoint(trainer.model, None)
    distributed.barrier()
    if trainer.args.process_index == 0 and kind == "plain":
        os.sync()
    blocked = time.perf_counter() - began
    if kind != "background":
        return blocked
    trainer.pending_checkpoint.writing.wait()
    distributed.barrier()
    began = time.perf_counter()
    trainer.publish_checkpoint()
    return blocked + time.perf_counter() - began


def verified(checkpoint: Path) -> float:
    from zerofit.checkpoint import integrity

    began = time.perf_counter()
    assert integrity.find_corruption(checkpoint) == ""
    return time.perf_counter() - began


def measure(folder: Path, shape: dict, saves_alone: bool) -> dict:
    from zerofit.base.paths import size_of
    from zerofit.job import run_folder

    model = model_folder(folder / "model", shape)
    flags = ["--model", str(model), "--data", str(ROOT / "examples" / "tiny" / "train.jsonl"), "--max_samples", "64",
             "--effective_batch_size", "2", "--per_device_train_batch_size", "1", "--num_samples", "0",
             "--bf16", "true", "--learning_rate", "1e-4", "--logging_steps", "1", "--ignore_plan", "true"]  # fmt: skip
    found = world(
        RANKS, [*flags, "--max_steps", "1", "--zero", "3", "--output_dir", str(folder / "run")], folder / "save.json"
    )
    if saves_alone:
        return found
    (saved,) = run_folder.checkpoints(folder / "run").values()
    found["verify_seconds"] = verified(saved)
    again = [*flags, "--max_steps", "2", "--resume_from_checkpoint", str(saved), "--save_strategy", "no"]
    loads = {
        "same": (RANKS, "3"),
        "two ranks to one": (1, "3"),
        "stage 3 to 2": (RANKS, "2"),
        "stage 3 to 0, one rank": (1, "0"),
    }
    found["resume"] = {}
    for name, (ranks, zero) in loads.items():
        place = ["--zero", zero, "--output_dir", str(folder / name.replace(" ", "-"))]
        found["resume"][name] = world(ranks, [*again, *place], folder / "load.json")
        shutil.rmtree(folder / name.replace(" ", "-"))
    step = next(saved.glob("global_step*"))
    found["universal"] = launched([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal",
                                   "--input_folder", str(step),
                                   "--output_folder", str(folder / "universal")])  # fmt: skip
    found["universal"]["bytes"] = size_of(folder / "universal")
    shutil.rmtree(folder / "universal")
    found["zero_to_fp32"] = launched([sys.executable, "-m", "deepspeed.utils.zero_to_fp32", str(saved),
                                      str(folder / "fp32"), "--safe_serialization"])  # fmt: skip
    shutil.rmtree(folder / "fp32")
    export = [sys.executable, "-m", "zerofit", "export", "--dtype", "float32", "--output_dir"]
    found["export"] = launched([*export, str(folder / "a"), "--check", "false", str(saved)])
    shutil.rmtree(folder / "a")
    found["export, compared"] = launched([*export, str(folder / "b"), str(saved)])
    return found


def table(found: dict) -> list[str]:
    plain, whole, kit, background = (statistics.median(seconds) for seconds in found["saves"].values())
    resume = found["resume"]
    rows = [
        ("save, on the disk (synced)", f"{kit:.1f} s, verified and hashed", f"{plain:.1f} s, plain Trainer", ""),
        ("the same with --save_model_in_checkpoints", f"{whole:.1f} s", "", ""),
        ("training waits with --save_in_background", f"{background:.1f} s", "", ""),
        ("verify before a resume (all hashes)", f"{found['verify_seconds']:.1f} s", "none", ""),
        (
            "load, same ranks and stage",
            f"{resume['same']['loads']['DeepSpeed']:.1f} s, DeepSpeed's own",
            "the same",
            resume["same"],
        ),
    ]
    for name in [n for n in resume if n != "same"]:
        rows.append((f"load, {name}", f"{resume[name]['loads']['zerofit']:.1f} s, nothing written", "", resume[name]))
    universal = found["universal"]
    other = f"{universal['seconds']:.1f} s and {universal['bytes'] / 1e9:.2f} GB for ds_to_universal, peak "
    other += f"{universal['peak_gb']:.2f} GB; its load comes on top"
    rows[5] = (*rows[5][:2], other, rows[5][3])
    fp32 = f"{found['zero_to_fp32']['seconds']:.1f} s, zero_to_fp32, peak {found['zero_to_fp32']['peak_gb']:.2f} GB"
    rows.append(("export in fp32", f"{found['export']['seconds']:.1f} s", fp32, found["export"]))
    rows.append(
        (
            "export, reloaded and compared",
            f"{found['export, compared']['seconds']:.1f} s",
            "",
            found["export, compared"],
        )
    )
    lines = ["| | zerofit | others | peak memory of a process |", "|---|---|---|---|"]
    memory = [f"{row[3]['peak_gb']:.2f} GB" if row[3] else "" for row in rows]
    return lines + [f"| {' | '.join(row[:3])} | {peak} |" for row, peak in zip(rows, memory, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--saves", action="store_true", help="measure the saves alone, and print their seconds")
    given = parser.parse_args()
    machine, shape = facts(), SHAPE | {"num_hidden_layers": given.layers}
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), shape, given.saves)
    if given.saves:
        print(json.dumps(found))
        return
    lines = [
        "# What checkpoints cost", "", *describe(machine, {"zerofit": versions()}), "",
        f"Llama, {given.layers} layers of 1024, bf16 with fp32 masters, two ranks, ZeRO-3: a checkpoint of "
        f"{found['bytes'] / 1e9:.2f} GB.", "", *table(found),
    ]  # fmt: skip
    save("checkpoint", lines, {"machine": machine, "shape": shape, **found})


if __name__ == "__main__":
    inside() if TO in os.environ else main()
