"""Predict how a job scales from 1 to 4,096 GPUs: memory, bytes sent, efficiency; 8B and 70B, stages 2 and 3, hpZ.

    python benchmarks/scaling.py                      # about 25 minutes on 2 cores, nearly all of it simulations
    python benchmarks/scaling.py --no_simulations     # closed forms alone, seconds; prints and writes nothing
    python benchmarks/scaling.py --gpu_type a100-80g --node_link_gbs 3.125    # other GPUs, another network
    python benchmarks/scaling.py --count              # only what a few layers send, call by call, in simulations

No GPU takes part: memory is the planner's simulation (src/zerofit/plan/simulate.py) or, marked ~, its closed forms;
bytes and time are closed forms (src/zerofit/plan/formulas.py), whose bytes are compared with every collective that a
simulated engine calls. The simulations' answers are kept in runs/scaling-simulations-<gpu>.json, so that a stopped run
can continue; delete it when memory may have changed. Writes benchmarks/results/scaling.{json,md}.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from machine import ROOT, describe, facts, save, versions

from zerofit.base import hardware, limits
from zerofit.commands import plan as plan_command
from zerofit.config import parse, resolve
from zerofit.model import fused_loss
from zerofit.plan import candidates, formulas, gpu_memory, predict, simulate
from zerofit.plan.speed import links, step

GIB = 2**30
NODE = 8
LENGTH, MICRO = 4096, 2
EVERY_N = [2**i for i in range(13)]
MODELS = {"8B": "llama3.1-8b", "70B": "llama3.1-70b"}
WAYS = {"ZeRO-2": (2, 1), "ZeRO-3": (3, 1), "ZeRO-3 + hpZ": (3, NODE)}  # (stage, ranks of the second copy)
SIMULATED = {  # numbers of GPUs that are simulated; the others are closed forms
    ("8B", "ZeRO-2"): [2, 8, 64, 1024], ("8B", "ZeRO-3"): EVERY_N[:11], ("8B", "ZeRO-3 + hpZ"): [16, 64],
    ("70B", "ZeRO-2"): [], ("70B", "ZeRO-3"): [8, 64, 512, 1024], ("70B", "ZeRO-3 + hpZ"): [64],
}  # fmt: skip
LINKS = [50, 25, 12.5, 6.25, 3.125, 1.5625]  # GB/s of a GPU to other nodes: 400 to 12.5 Gbit/s
NETWORK_N = [16, 64, 1024]
COUNTED = [  # (model, way, micro batches, GPUs)
    ("8B", "ZeRO-2", 2, 16), ("8B", "ZeRO-3", 1, 16), ("8B", "ZeRO-3", 1, 256), ("8B", "ZeRO-3 + hpZ", 2, 16),
    ("70B", "ZeRO-3", 1, 16), ("70B", "ZeRO-3", 1, 256),
]  # fmt: skip
COUNT_LAYERS = 6
BATCH = 512  # rows; strong scaling


def flags_of(model: str, way: str, ranks: int, accumulation: int = 1, micro: int = MICRO) -> list[str]:
    zero, hpz = WAYS[way]
    rows = micro * accumulation * ranks
    flags = ["--model", str(ROOT / "tests" / "configs" / MODELS[model]), "--data", "none", "--zero", str(zero),
             "--offload", "none", "--max_length", str(LENGTH), "--gradient_checkpointing", "true",
             "--per_device_train_batch_size", str(micro), "--effective_batch_size", str(rows)]  # fmt: skip
    return flags + (["--deepspeed", str(with_second_copy(hpz))] if hpz > 1 else [])


def with_second_copy(hpz: int) -> Path:
    """Write deepspeed_configs/zero3.json with ZeRO++'s hpZ over so many ranks; return the file."""
    config = json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
    config["zero_optimization"]["zero_hpz_partition_size"] = hpz
    file = ROOT / "runs" / f"hpz{hpz}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(config))
    return file


# --- memory ---


def simulations(gpu, name: str) -> dict[str, dict]:
    """Return {"model way ranks": {"total": bytes by phase, "layers": measured, "commit"}}; simulate what is missing."""
    file = ROOT / "runs" / f"scaling-simulations-{name}.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    for (model, way), counts in SIMULATED.items():
        for ranks in counts:
            key = f"{model} {way} {ranks}"
            if key in kept:
                continue
            request = parse.request("sft", flags_of(model, way, ranks))
            shape = candidates.shape_of(resolve.resolve(request, ranks, gpu))
            question = simulate.Question(request, ranks, gpu=gpu)
            answer = predict.answer_of(question, shape, zero=WAYS[way][0], every=1)
            if isinstance(answer, Exception):
                raise SystemExit(f"{key}: {answer}")
            kept[key] = {"total": answer["total"], "layers": answer.get("extended_from_layers"),
                         "commit": facts()["commit"]}  # fmt: skip
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(kept, indent=1))
            print(f"{key}: {max(answer['total'].values()) / GIB:.2f} GiB", flush=True)
    return kept


# --- bytes and time ---


def measure(gpu, answers: dict) -> list[dict]:
    """Return a row for each model, way and number of GPUs, weak scaling."""
    rows = []
    for model in MODELS:
        shape, bare = None, None
        for ranks in EVERY_N:
            for way, (zero, hpz) in WAYS.items():
                if hpz > 1 and ranks <= NODE:
                    continue  # one node: nothing to gain
                settings = resolve.resolve_settings("sft", flags_of(model, way, ranks), ranks, gpu)
                shape = shape or candidates.shape_of(settings)
                setting = _setting(zero, hpz, ranks)
                bare = formulas.memory(shape, setting, settings, shape.vocabulary >= fused_loss.LARGE_VOCABULARY)
                answer = answers.get(f"{model} {way} {ranks}")
                peak = max(answer["total"].values()) if answer else sum(bare.values())
                peak += gpu_memory.workspace_bytes(gpu)
                within, across = formulas.wire_bytes(shape, setting)
                seconds = step.seconds(shape, setting, gpu, LENGTH)
                rows.append({
                    "model": model, "way": way, "gpus": ranks, "peak_bytes": int(peak),
                    "by": "simulation" if answer else "formula",
                    "formula_bytes": int(sum(bare.values())) + gpu_memory.workspace_bytes(gpu),
                    "fits": peak <= limit(gpu, ranks), "within_bytes": int(within), "across_bytes": int(across),
                    "wire_seconds": round(links.wire_seconds(shape, setting, gpu), 3), "seconds": round(seconds, 3),
                    "tokens_per_second_a_gpu": round(setting.tokens / seconds),
                })  # fmt: skip
        _efficiency([row for row in rows if row["model"] == model])
    return rows


def _setting(zero: int, hpz: int, ranks: int, accumulation: int = 1, micro: int = MICRO) -> formulas.PlanPoint:
    whole = limits.ANY_SIZE if zero == 3 and ranks > limits.FULL_LAYERS_ABOVE_RANKS else 0
    tokens = micro * LENGTH
    more = {"node": NODE, "hpz": hpz, "whole_layers": whole}
    return formulas.PlanPoint(zero, "none", 1, micro, tokens, accumulation, ranks, **more)


def limit(gpu, ranks: int) -> int:
    """Return the bytes that tensors may take, as in a plan on a node without a history."""
    free = gpu_memory.context_bytes(gpu) + gpu_memory.nccl_bytes(ranks, NODE)
    return int((gpu.memory_gib * GIB - free) / (1 + gpu_memory.FRAGMENTATION))


def _efficiency(rows: list[dict]) -> None:
    """Return tokens a second of a GPU, as a share of the best at the fewest GPUs on which anything fits."""
    fewest = min((row["gpus"] for row in rows if row["fits"]), default=None)
    best = max((row["tokens_per_second_a_gpu"] for row in rows if row["gpus"] == fewest and row["fits"]), default=None)
    for row in rows:
        row["efficiency"] = round(row["tokens_per_second_a_gpu"] / best, 3) if best and row["fits"] else None


def networks(gpu) -> list[dict]:
    """Return the gain in speed of a step with hpZ over stage 3 without it, by network."""
    rows = []
    for model in MODELS:
        shape = candidates.shape_of(resolve.resolve_settings("sft", flags_of(model, "ZeRO-3", 16), 16, gpu))
        for gbs in LINKS:
            other, row = replace(gpu, node_gbs=gbs), {"model": model, "node_gbs": gbs}
            for ranks in NETWORK_N:
                for accumulation in (1, 4):
                    plain, hpz = (
                        step.seconds(shape, _setting(3, size, ranks, accumulation), other, LENGTH) for size in (1, NODE)
                    )
                    row[f"{ranks}x{accumulation}"] = round(plain / hpz - 1, 3)
            rows.append(row)
    return rows


def across_nodes(gpu) -> list[dict]:
    """Return GiB that one GPU of 64 sends to other nodes in a step; hybrid sharding is not in DeepSpeed 0.19.8."""
    rows = []
    for model in MODELS:
        shape = candidates.shape_of(resolve.resolve_settings("sft", flags_of(model, "ZeRO-3", 64), 64, gpu))
        for accumulation in (1, 4):
            row = {"model": model, "accumulation": accumulation}
            for way, (zero, hpz) in WAYS.items():
                row[way] = formulas.wire_bytes(shape, _setting(zero, hpz, 64, accumulation))[1] / GIB
            nodes = 64 // NODE  # gradients' shares are all-reduced between nodes once a step
            row["hybrid"] = 2 * 2 * shape.trainable / NODE * (nodes - 1) / nodes / GIB
            row["hybrid_states"] = 16 * shape.trainable / NODE / GIB
            rows.append(row)
    return rows


def strong(gpu) -> list[dict]:
    """Predict BATCH rows a step for any number of GPUs, stage 3, 8B."""
    rows, shape = [], candidates.shape_of(resolve.resolve_settings("sft", flags_of("8B", "ZeRO-3", 16), 16, gpu))
    for ranks in (8, 64, 256, 512):
        micro = min(MICRO, BATCH // ranks)
        setting = _setting(3, 1, ranks, BATCH // ranks // micro, micro)
        seconds = step.seconds(shape, setting, gpu, LENGTH)
        rows.append({"gpus": ranks, "micro": micro, "accumulation": setting.accumulation, "seconds": round(seconds, 3),
                     "tokens_per_second_a_gpu": round(BATCH * LENGTH / ranks / seconds)})  # fmt: skip
    return rows


# --- what a simulated engine sends, call by call ---

COUNT = """
import json, sys
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
given, calls, ends = json.loads(sys.argv[1]), [], []

def counted(name):
    call = getattr(c10d, name)
    def function(*a, **k):
        tensors = [t for t in (*a, *k.values()) if isinstance(t, torch.Tensor)]
        size = max((t.numel() * t.element_size() for t in tensors), default=0)
        calls.append((name, size, dist.get_world_size(k.get("group"))))
        return call(*a, **k)
    setattr(c10d, name, function)
    setattr(dist, name, function)

for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "reduce"):
    counted(name)
from deepspeed.runtime.engine import DeepSpeedEngine
step = DeepSpeedEngine.step
def ended(self, *a, **k):
    found = step(self, *a, **k)
    ends.append(len(calls))
    return found
DeepSpeedEngine.step = ended
from zerofit.base import limits, hardware
from zerofit.config import parse
from zerofit.plan import simulate
from zerofit.plan import simulated_rank
question = simulate.Question(parse.request("sft", given["flags"]), given["ranks"], gpu=hardware.GPUS["h100-80g"],
                             overrides={"num_hidden_layers": given["layers"]})
answer = simulated_rank._answer(question)
found = {}
for name, size, ranks in calls[ends[-2]:ends[-1]]:  # the second step: DeepSpeed learns the order of layers in the first
    entry = found.setdefault(f"{name} of {ranks}", [0, 0])
    entry[0] += 1
    entry[1] += size
print("counted: " + json.dumps({"parameters": answer["parameters"], "calls": found}))
"""


def count(model: str, way: str, accumulation: int, ranks: int, layers: int = COUNT_LAYERS) -> dict:
    """Return {"parameters", "calls": {"kind of ranks": [calls, bytes]}, "sent": bytes a GPU sends} of one step."""
    given = {"flags": flags_of(model, way, ranks, accumulation, 1), "ranks": ranks, "layers": layers}
    env = os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(ROOT / "src")}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", COUNT, json.dumps(given)], capture_output=True, text=True, env=env)
    said = [line for line in done.stdout.splitlines() if line.startswith("counted: ")]
    if done.returncode or not said:
        raise SystemExit(done.stderr[-2000:])
    found = json.loads(said[0].removeprefix("counted: "))
    sent = 0.0
    for kind, (_, size) in found["calls"].items():
        name, n = kind.split(" of ")
        sent += size * (1 - 1 / int(n)) * (2 if name == "all_reduce" else 1)
    return found | {"sent": sent}


def counts(gpu) -> list[dict]:
    rows = []
    for model, way, accumulation, ranks in COUNTED:
        found = count(model, way, accumulation, ranks)
        settings = resolve.resolve_settings("sft", flags_of(model, way, ranks, accumulation, 1), ranks, gpu)
        shape = replace(candidates.shape_of(settings), trainable=found["parameters"], layers=COUNT_LAYERS)
        setting = _setting(*WAYS[way], ranks, accumulation, 1)
        formula = sum(formulas.wire_bytes(shape, setting))
        of_formula = sum(collective.calls for collective in formulas.collectives(shape, setting))
        rows.append({"model": model, "way": way, "accumulation": accumulation, "gpus": ranks, **found,
                     "formula": formula, "formula_calls": of_formula})  # fmt: skip
        print(f"{model} {way} x {accumulation} on {ranks}: {found['sent'] / GIB:.2f} GiB, formula {formula / GIB:.2f}; "
              f"{sum(n for n, _ in found['calls'].values())} calls, formula {of_formula:.0f}", flush=True)  # fmt: skip
    return rows


# --- writing ---


def _size(row: dict | None) -> str:
    if row is None:
        return ""
    text = f"{'~' * (row['by'] == 'formula')}{row['peak_bytes'] / GIB:.1f}"
    return text if row["fits"] else f"({text})"


def _sent(row: dict | None) -> str:
    return f"{row['within_bytes'] / GIB:.1f} + {row['across_bytes'] / GIB:.1f}" if row else ""


def _share(row: dict | None) -> str:
    return f"{row['efficiency']:.0%}" if row and row["efficiency"] is not None else ""


def tables(rows: list[dict]) -> list[str]:
    lines = []
    for model in MODELS:
        of = {(row["gpus"], row["way"]): row for row in rows if row["model"] == model}
        heads = [f"{what}, {way}" for what in ("peak GiB", "sent GiB, within + across", "efficiency") for way in WAYS]
        lines += ["", f"**{model}**", "", f"| GPUs | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for ranks in EVERY_N:
            cells = [show(of.get((ranks, way))) for show in (_size, _sent, _share) for way in WAYS]
            lines.append(f"| {ranks:,} | {' | '.join(cells)} |")
    return lines


def network_table(rows: list[dict]) -> list[str]:
    columns = [f"{ranks}x{accumulation}" for ranks in NETWORK_N for accumulation in (1, 4)]
    heads = [f"{c.split('x')[0]} GPUs, {c.split('x')[1]} micro batch{'es' * (c[-1] != '1')}" for c in columns]
    lines = [f"| model | GB/s of a GPU to other nodes | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for row in rows:
        cells = [f"{row[c]:+.0%}" for c in columns]
        lines.append(f"| {row['model']} | {row['node_gbs']:g} | {' | '.join(cells)} |")
    return lines


def markdown(record: dict, gpu, about: list[str]) -> list[str]:
    lines = ["# Scaling from 1 to 4,096 GPUs", "", *about, "",
             f"{gpu.device_name}, {NODE} GPUs a node, {gpu.link_gbs:g} GB/s within a node and {gpu.node_gbs:g} GB/s a "
             f"GPU between nodes, one way. Full fine-tuning with AdamW in bf16, gradient checkpointing, {MICRO} rows "
             f"of {LENGTH:,} tokens on each GPU (weak scaling), no accumulation. **Nothing here was measured on a "
             "GPU.** Peak: simulation, or closed form where it has a ~; (in brackets: above the "
             f"{limit(gpu, 2) / GIB:.1f} GiB that are for tensors). Bytes: what a GPU sends in a step, closed form. "
             "Efficiency: predicted tokens a second of a GPU, as a share of the best on the fewest GPUs that fit.",
             *tables(record["rows"])]  # fmt: skip
    if commits := sorted({answer["commit"] for answer in record["simulations"].values()}):
        lines += ["", f"The simulations were made at commit {' and '.join(commits)}."]
    lines += ["", "## Where hpZ pays", "", "Predicted gain in speed over stage 3 by the network between nodes:", "",
              *network_table(record["networks"]), ""]  # fmt: skip
    lines += ["GiB that one GPU of 64 sends to other nodes in a step; hybrid sharding (not in DeepSpeed 0.19.8) by "
              "formula:", "",
              f"| model | micro batches | {' | '.join(WAYS)} | hybrid | hybrid's states, GiB a GPU |",
              "|---" * (len(WAYS) + 4) + "|"]  # fmt: skip
    for row in record["across"]:
        cells = [f"{row[name]:.1f}" for name in (*WAYS, "hybrid", "hybrid_states")]
        lines.append(f"| {row['model']} | {row['accumulation']} | {' | '.join(cells)} |")
    first = record["strong"][0]["tokens_per_second_a_gpu"]
    said = ", ".join(
        f"{row['tokens_per_second_a_gpu'] / first:.0%} on {row['gpus']} ({row['micro']} rows x {row['accumulation']})"
        for row in record["strong"]
    )
    lines += [
        "",
        f"Strong scaling, 8B, stage 3, {BATCH} rows a step whatever the GPUs: predicted efficiency {said}.",
        "",
    ]
    lines += ["## Formula and engine", "", f"What one GPU sends in a step, {COUNT_LAYERS} layers, one "
              "row: by formula, and by adding up the collectives that DeepSpeed's engine calls in a simulation. "
              "Stage 3 keeps up to 1e9 parameters gathered, which the formula does not take off:", "",
              "| job | GPUs | micro batches | formula, GiB | engine, GiB | calls by formula | calls of the engine |",
              "|---" * 7 + "|"]  # fmt: skip
    for row in record["counted"]:
        calls = ", ".join(f"{n} {kind}" for kind, (n, _) in sorted(row["calls"].items()))
        cells = [f"{row['formula'] / GIB:.2f}", f"{row['sent'] / GIB:.2f}", f"{row['formula_calls']:.0f}", calls]
        lines.append(f"| {row['model']} {row['way']} | {row['gpus']} | {row['accumulation']} | {' | '.join(cells)} |")
    lines.append("\nPublished speeds: [published-speeds.md](published-speeds.md).")
    pairs = [row for row in record["rows"] if row["by"] == "simulation"]
    worst = max(pairs, key=lambda row: abs(row["formula_bytes"] / row["peak_bytes"] - 1), default=None)
    if worst:
        off = worst["formula_bytes"] / worst["peak_bytes"] - 1
        lines.append(
            f"\nPeak by closed form against the {len(pairs)} simulations: at most {off:+.1%} off ({worst['model']} "
            f"{worst['way']}, {worst['gpus']} GPUs)."
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu_type", default="h100-80g", help="a GPU of `zerofit plan`'s table")
    parser.add_argument("--node_link_gbs", default="", help="GB/s one way of a GPU to other nodes")
    parser.add_argument("--no_simulations", action="store_true", help="closed forms alone")
    parser.add_argument("--count", action="store_true", help="only count what an engine sends")
    given = parser.parse_args()
    gpu = plan_command._with_node_link(hardware.find(given.gpu_type), given.node_link_gbs)
    if given.count:
        counts(gpu)
        return
    machine = facts()
    answers = {} if given.no_simulations else simulations(gpu, given.gpu_type)
    record = {"machine": machine, "gpu": given.gpu_type, "node_gbs": gpu.node_gbs, "rows": measure(gpu, answers),
              "networks": networks(gpu), "across": across_nodes(gpu), "strong": strong(gpu),
              "counted": [] if given.no_simulations else counts(gpu), "simulations": answers}  # fmt: skip
    lines = markdown(record, gpu, describe(machine, {"zerofit": versions()}))
    if given.no_simulations:
        print("\n".join(lines))
    else:
        save("scaling", lines, record)


if __name__ == "__main__":
    main()
