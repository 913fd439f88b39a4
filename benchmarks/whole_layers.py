"""Time a step of two CPU processes at ZeRO-3 that exchange matrices or whole layers (parallel/whole_layers.py).

python benchmarks/whole_layers.py                            # the bundled model, 4 layers
python benchmarks/whole_layers.py --model FOLDER --steps 30

Trains with each way in turn, several rounds. The processes' own time counts, which other work on the machine changes
less than the clock's; both are given, as medians over the steps and rounds after the first steps, as JSON.
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine

ROOT = machine.ROOT

SKIPPED = 3  # steps, until DeepSpeed knows the order of the modules

LAYER = "LlamaDecoderLayer"

MATRICES = {"stage3_module_granularity_threshold": 0}  # a key of one's own turns whole layers off

LEAVES = {"leaf_module": {"classes": [LAYER]}}


def ways(layer: int, matrices: int) -> dict[str, dict]:
    """Return {way: keys of zero_optimization}. layer, matrices: numbers of a layer, and those of its matrices."""
    return {
        "matrices": MATRICES,
        "layers": LEAVES,
        "layers, prefetched": LEAVES | {"stage3_prefetch_bucket_size": matrices},
        "two layers, prefetched": LEAVES | {"stage3_prefetch_bucket_size": 2 * matrices},
        "layers, one bucket": LEAVES | {"reduce_bucket_size": layer},
        "layers, prefetched, one bucket": LEAVES
        | {"stage3_prefetch_bucket_size": matrices, "reduce_bucket_size": layer},
    }


def layer_sizes(model: str) -> tuple[int, int]:
    """Return the numbers of a layer, and those of its matrices."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    sizes = [(p.numel(), p.ndim > 1) for p in net.model.layers[0].parameters()]
    return sum(n for n, _ in sizes), sum(n for n, is_matrix in sizes if is_matrix)


def measure(cases_file: str) -> None:
    """Run the cases in this rank, and append {way, cpu, wall: seconds of each step} to the file of rank 0."""
    from transformers import TrainerCallback, trainer

    from zerofit import entrypoint
    from zerofit.base import distributed

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            times.append((time.process_time(), time.perf_counter()))

    trainer.DEFAULT_CALLBACKS.append(Clock)
    stop, distributed.stop = distributed.stop, lambda wait=True: None  # the world continues after each case
    entrypoint.guard = lambda recipe: recipe()
    launched = {name: os.environ[name] for name in distributed.LAUNCHER_SETS if name in os.environ}
    cases = json.loads(Path(cases_file).read_text())
    for case in cases:
        times, words, streams = [], sys.argv, (sys.stdout, sys.stderr)
        os.environ.update(launched)
        sys.argv = ["sft", *case["flags"]]
        runpy.run_path(str(ROOT / "recipes" / "sft.py"), run_name="__main__")
        sys.argv, (sys.stdout, sys.stderr) = words, streams
        pairs = list(zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False))
        case["cpu"], case["wall"] = ([after[i] - before[i] for before, after in pairs] for i in (0, 1))
    if distributed.rank() == 0:
        Path(cases_file).write_text(json.dumps(cases))
    stop()


def compare(given, folder: Path) -> dict:
    base = json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
    cases = []
    for number in range(given.rounds):
        for way, keys in ways(*layer_sizes(given.model)).items():
            file = folder / f"{way.replace(' ', '-')}.json"
            file.write_text(json.dumps({**base, "zero_optimization": base["zero_optimization"] | keys}))
            flags = [
                *("--model", given.model, "--data", str(machine.TINY_MODEL.parent / "train.jsonl")),
                *("--max_steps", str(given.steps), "--effective_batch_size", "2", "--max_length", "64"),
                *("--num_samples", "0", "--save_strategy", "no", "--gpus", "2", "--deepspeed", str(file)),
                *("--output_dir", str(folder / f"{number}-{file.stem}")),
            ]
            cases.append({"way": way, "flags": flags})
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    log = folder / "log"
    with log.open("w") as out:
        done = subprocess.run(
            [*launch, __file__, "--cases", str(file)], stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    if done.returncode:
        raise SystemExit(log.read_text()[-4000:])
    measured = {}
    for case in json.loads(file.read_text()):
        for clock in ("cpu", "wall"):
            measured.setdefault(case["way"], {"cpu": [], "wall": []})[clock] += case[clock]
    return {way: {f"{c}_seconds": round(statistics.median(s), 4) for c, s in both.items()} for way, both in
            measured.items()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(machine.TINY_MODEL))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.cases:
        measure(given.cases)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"of a step": compare(given, Path(folder)), "machine": machine.facts()}, indent=1))


if __name__ == "__main__":
    main()
