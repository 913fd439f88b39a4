"""Measure each memory technique alone and stacked, beside the claim that it tests.

make ledger                                  # a small random model; on a CPU about 15 minutes
make ledger MODEL=Qwen/Qwen3-8B GPUS=4 SEQ=4096
python benchmarks/ledger.py --rows lora qlora --rounds 5

Memory: one run with --memory_report (on a CPU exact tensor bytes, on CUDA the allocator's). Speed: rounds without it,
all rows once a round, without the first steps; median of the steps, then of the rounds. Writes ledger.md, ledger.json,
ledger-memory.png and ledger-speed.png.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import machine

ROOT = machine.ROOT
WARM_UP = 2  # steps: compilation, allocator, ZeRO-3's trace
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One measured setting: `flags` on top of those of `on` (a row before it), compared with `reference`."""

    name: str
    flags: tuple[str, ...] = ()
    on: str | None = None
    reference: str | None = None
    recipe: str = "sft"
    ranks: int = 1
    needs_cuda: bool = False


def rows(ranks: int) -> list[Row]:
    """Return the stack in the usual order, then single techniques on the bf16 row, then the stages."""
    stacked = [
        Row("fp32", ("--bf16 false", "--gradient_checkpointing false", "--fused_loss false", "--padding_free false")),
        Row("+ bf16", ("--bf16 true",), "fp32"),
        Row("+ packing", ("--packing true", "--padding_free auto"), "+ bf16"),
        Row("+ fused loss", ("--fused_loss true",), "+ packing"),
        Row("+ checkpointing", ("--gradient_checkpointing true",), "+ fused loss"),
        Row("+ 8-bit Adam", ("--optim adamw_8bit",), "+ checkpointing"),
        Row("+ pure bf16", ("--pure_bf16 true",), "+ 8-bit Adam"),
        Row("LoRA", ("--optim adamw_torch_fused", "--pure_bf16 false"), "+ pure bf16", "+ checkpointing", "lora"),
        Row("QLoRA", ("--load_in_4bit true",), "LoRA", "LoRA", "lora"),
    ]
    alone = [
        Row("pure bf16", ("--pure_bf16 true",), "+ bf16"),
        Row("8-bit Adam", ("--optim adamw_8bit",), "+ bf16"),
        Row("Adafactor", ("--optim adafactor",), "+ bf16"),
        Row("Lion", ("--optim lion",), "+ bf16"),
        Row("SGD momentum", ("--optim sgd",), "+ bf16"),
        Row("Sophia", ("--optim sophia",), "+ bf16"),
        Row("fused loss", ("--fused_loss true",), "+ bf16"),
        Row("tiled MLP", ("--tiled_mlp 4",), "+ bf16"),
        Row("checkpointing", ("--gradient_checkpointing true",), "+ bf16"),
        Row("every 2nd layer", ("--gradient_checkpointing_every 2",), "checkpointing", "+ bf16"),
        Row("selective", ("--gradient_checkpointing_policy selective",), "checkpointing", "+ bf16"),
        Row("activation offload", ("--activation_offload true",), "checkpointing", "checkpointing", needs_cuda=True),
        Row("eager attention", ("--attn_implementation eager",), "+ bf16"),
        Row("LoRA alone", (), "+ bf16", recipe="lora"),
        # on packs, which all have one length: sixteen micro batches of rows would contain a longer row than one does
        *(Row(f"accumulation {n}", (f"--gradient_accumulation_steps {n}",), "+ packing", "accumulation 1")
          for n in (1, 4, 16)),
    ]  # fmt: skip
    stages = [
        Row("DDP", ("--zero 0",), "+ bf16", ranks=ranks),
        *(Row(f"ZeRO-{z}", (f"--zero {z}",), "+ bf16", "DDP", ranks=ranks) for z in "123"),
        Row("ZeRO-2 offload", ("--zero 2", "--offload optimizer"), "+ bf16", "ZeRO-2", ranks=ranks),
        Row("ZeRO-3 offload all", ("--zero 3", "--offload all"), "+ bf16", "ZeRO-3", ranks=ranks),
    ]
    return [*stacked, *alone, *stages] if ranks > 1 else [*stacked, *alone]


def flags_of(row: Row, table: dict[str, Row]) -> dict[str, str]:
    """Return {flag: value} of the row and the rows below it."""
    below = flags_of(table[row.on], table) if row.on else {}
    return below | dict(pair.split() for pair in row.flags)


# --- what is trained ---


def write_model(folder: Path) -> None:
    """Write a Llama of 12 M parameters: small enough for two cores, wide enough that each part is visible."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, set_seed

    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    set_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # a saved base: 4 bits are made while loading
    AutoTokenizer.from_pretrained(machine.TINY_MODEL).save_pretrained(folder)


def write_data(file: Path, longest: int, count: int = 4000) -> None:
    """Write token rows, each an arithmetic series, as long as those of gsm8k (the median a third of the longest)."""
    draw = random.Random(0)
    with file.open("w") as out:
        for _ in range(count):
            length = min(longest, max(16, round(draw.lognormvariate(math.log(longest / 3), 0.4))))
            start, stride = draw.randrange(200), draw.randrange(1, 8)
            ids = [(start + stride * i) % 200 + 10 for i in range(length)]
            out.write(json.dumps({"input_ids": ids, "labels": ids}) + "\n")


# --- running ---


def run_world(ranks: int, cases: list[dict], folder: Path) -> None:
    """Run all cases in one world; the files of a case are in its folder."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks),
               str(ROOT / "benchmarks" / "ledger_world.py"), str(file)]  # fmt: skip
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        "PYTHONPATH": str(ROOT / "src"),
    }
    log = folder / "log.txt"
    with log.open("w") as out, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=out, text=True, env=environment
    ) as job:  # fmt: skip
        for line in job.stdout:
            out.write(line)
            if line.startswith("  ") and line.rstrip().endswith((" s", ")")) and ": " in line:
                print(line, end="", flush=True)


def measure(chosen: list[Row], table: dict[str, Row], options, folder: Path) -> dict[str, dict]:
    """Return {row: {"error"} or {"memory", "seconds", "tokens_per_second", "losses", ...}}."""
    common = {
        "--data": options.data, "--model": options.model, "--max_length": options.seq, "--max_steps": options.steps,
        "--per_device_train_batch_size": options.micro, "--gradient_accumulation_steps": 1, "--logging_steps": 1,
        "--save_strategy": "no", "--num_samples": 0, "--zero": 0, "--learning_rate": "1e-3",
        "--lr_scheduler_type": "constant", "--warmup_steps": 0,
    }  # fmt: skip
    if options.random_init:
        common["--random_init"] = "true"
    assert len({slug(row.name) for row in chosen}) == len(chosen)  # a shared folder would give one row another's result
    passes = ["memory", *(f"round{i + 1}" for i in range(options.rounds))]
    for name in passes:
        for ranks in sorted({row.ranks for row in chosen}):
            where = folder / name / f"ranks{ranks}"
            where.mkdir(parents=True)
            print(f"{name}, {ranks} rank{'s' * (ranks > 1)}", flush=True)
            cases = []
            for row in (r for r in chosen if r.ranks == ranks):
                flags = common | flags_of(row, table) | {"--output_dir": where / slug(row.name)}
                flags |= {"--memory_report": "true"} if name == "memory" else {}
                words = [str(word) for pair in flags.items() for word in pair]
                cases.append({"name": row.name, "recipe": row.recipe, "flags": words})
            run_world(ranks, cases, where)
    return {
        row.name: collect(row, [folder / p / f"ranks{row.ranks}" / slug(row.name) for p in passes]) for row in chosen
    }


def slug(name: str) -> str:
    """Return a folder's name; "+ bf16" and "bf16" differ."""
    return "".join(c if c.isalnum() else "-" for c in name.replace("+", "and"))


def collect(row: Row, runs: list[Path]) -> dict:
    memory_run, *rounds = runs
    for run in runs:
        if not (run / "result.json").exists() or json.loads((run / "result.json").read_text())["status"] != "finished":
            said = (
                (run / "error.txt").read_text()
                if (run / "error.txt").exists()
                else f"ended early; see {run.parent / 'log.txt'}"
            )
            return {"error": said}
    memory = json.loads((memory_run / "memory.json").read_text())
    result = json.loads((memory_run / "result.json").read_text())
    steps = {}
    for run in rounds:
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps[run.parts[-3]] = [m for m in metrics if "tokens_per_second" in m][WARM_UP:]
    speeds = [statistics.median(m["tokens_per_second"] for m in found) for found in steps.values()]
    losses = [m["loss"] for m in next(iter(steps.values()))]
    training = {phase: parts for phase, parts in memory["peak"].items() if phase in ("forward", "backward", "step")}
    at_peak = max(training.values(), key=lambda parts: sum(parts.values()))
    activations = max(parts["activations"] + parts["logits"] for parts in training.values())
    return {
        "peak_bytes": sum(at_peak.values()),
        "parts_at_peak": at_peak,
        "activation_bytes": activations,
        "activation_bytes_without_logits": max(parts["activations"] for parts in training.values()),
        "model_states": memory["model_states"]["before_step"],
        "state_bytes": sum(memory["model_states"]["before_step"].values()),
        "state_bytes_at_last_gradient": sum(memory["model_states"]["last_gradient"].values()),
        "host_bytes": memory.get("host", 0),
        "bytes_are": memory["bytes_are"],
        "parameters": result["parameters"],
        "trainable_parameters": result["trainable_parameters"],
        "tokens_per_second": statistics.median(speeds),
        "tokens_per_second_of_rounds": speeds,
        "last_loss": losses[-1],
    }


# --- the claims ---


def claims(found: dict[str, dict], ranks: int) -> list[tuple[str, str, str, str]]:
    """Return (claim, source, measured, verdict) of every claim whose rows were measured."""

    def have(*names: str) -> bool:
        return all("error" not in found.get(n, {"error": ""}) for n in names)

    def ratio(key: str, a: str, b: str) -> float:
        return found[a][key] / found[b][key]

    def slower(a: str, b: str) -> str:
        return f"{found[b]['tokens_per_second'] / found[a]['tokens_per_second'] - 1:+.0%} time a token"

    out = []
    if have("fp32", "+ bf16", "pure bf16"):
        a, mixed, pure = (
            ratio(k, x, "fp32")
            for k, x in (
                ("activation_bytes_without_logits", "+ bf16"),
                ("state_bytes", "+ bf16"),
                ("state_bytes", "pure bf16"),
            )
        )
        out.append((
            "half precision halves memory", "tutorials",
            f"activations (without logits) x {a:.2f}, states of mixed bf16 x {mixed:.2f}, of pure bf16 x {pure:.2f}; "
            f"{slower('+ bf16', 'fp32')}",
            f"{'holds' if a < 0.6 else 'does not hold'} for activations; for model states only with pure bf16",
        ))  # fmt: skip
    if have("+ bf16", "checkpointing", "selective"):
        full, part = (1 - ratio("activation_bytes_without_logits", x, "+ bf16") for x in ("checkpointing", "selective"))
        whole = 1 - ratio("peak_bytes", "checkpointing", "+ bf16")
        out.append((
            "gradient checkpointing saves 50-80 % for 20-30 % time", "tutorials; arXiv 1604.06174, 2205.05198",
            f"all layers: {full:.0%} of the activation bytes (without logits), {whole:.0%} of the peak, "
            f"{slower('checkpointing', '+ bf16')}; selective: {part:.0%}, {slower('selective', '+ bf16')}",
            f"{'holds' if full >= 0.5 else 'does not hold'} as a share of activations, not of the total",
        ))  # fmt: skip
    if have("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"):
        measured = []
        for z, formula in (("1", 4 + 12 / ranks), ("2", 2 + 14 / ranks), ("3", 16 / ranks)):
            moment = "state_bytes_at_last_gradient" if z == "1" else "state_bytes"  # stage 1 drops gradients early
            per = found[f"ZeRO-{z}"][moment] / found[f"ZeRO-{z}"]["parameters"]
            measured.append(f"ZeRO-{z} {per:.2f} bytes a parameter (formula {formula:.2f})")
        out.append((
            "ZeRO-1 3-5x, ZeRO-2 8-10x, ZeRO-3 15x and more", "tutorials; arXiv 1910.02054",
            f"{ranks} ranks: " + "; ".join(measured),
            "3x of stage 1 needs N >= 9, 4x is its limit and 5x never holds; 8x is the limit of stage 2, not reached "
            "at any N, 10x never holds; 15x of stage 3 needs N >= 15",
        ))  # fmt: skip
    if have("LoRA alone", "+ bf16"):
        states, whole = (1 - ratio(k, "LoRA alone", "+ bf16") for k in ("state_bytes", "peak_bytes"))
        out.append((
            "LoRA saves 70 %", "tutorials; arXiv 2106.09685",
            f"{states:.0%} of the model states, {whole:.0%} of the peak; {slower('LoRA alone', '+ bf16')}",
            f"{'holds' if states >= 0.7 else 'does not hold'} for states, "
            f"{'holds' if whole >= 0.7 else 'does not hold'} for the peak with these activations",
        ))  # fmt: skip
    if have("8-bit Adam", "+ bf16"):
        optimizer = 1 - found["8-bit Adam"]["model_states"]["optimizer"] / found["+ bf16"]["model_states"]["optimizer"]
        whole = 1 - ratio("peak_bytes", "8-bit Adam", "+ bf16")
        out.append((
            "8-bit Adam: optimizer state -75 %", "arXiv 2110.02861",
            f"optimizer state -{optimizer:.0%}, peak -{whole:.0%}; {slower('8-bit Adam', '+ bf16')}",
            "holds" if optimizer > 0.7 else "smaller here: embeddings (a third of this model) and tensors below 4096 "
            "numbers keep 32-bit states",
        ))  # fmt: skip
    if have("eager attention", "+ bf16"):
        out.append((
            "FlashAttention-2 2-4x", "arXiv 2205.14135, 2307.08691",
            f"whole step against eager: {slower('eager attention', '+ bf16')}; activations of eager x "
            f"{ratio('activation_bytes', 'eager attention', '+ bf16'):.2f}",
            "this is the whole step; the operation alone: benchmarks/attention.py",
        ))  # fmt: skip
    names = [f"accumulation {n}" for n in (1, 4, 16)]
    if have(*names):
        peaks = [found[n]["peak_bytes"] for n in names]
        apart = max(abs(p / peaks[0] - 1) for p in peaks)
        out.append((
            "accumulation costs no memory", "tutorials", f"peak within {apart:.1%} from 1 to 16 steps",
            "holds" if apart <= 0.02 else "does not hold",
        ))  # fmt: skip
    if have("+ packing", "+ bf16"):
        out.append((
            "packing: +238 % tokens/s", "torchtune README",
            f"{ratio('tokens_per_second', '+ packing', '+ bf16') - 1:+.0%} real tokens/s on gsm8k-like lengths",
            "depends on how uneven the lengths are and on what padding costs on this device",
        ))  # fmt: skip
    return out


# --- writing ---


def report(found: dict[str, dict], table: dict[str, Row], said: list, record: dict, target: Path) -> None:
    lines = [
        "# Ledger",
        "",
        *machine.describe(record["machine"], {"packages": record["versions"]}),
        "",
        record["setting"],
        "",
    ]
    lines += ["| row | flags on top | peak MiB | parameters | gradients | optimizer | activations | tokens/s | against "
              "| loss |",
              "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, row in ((n, table[n]) for n in found):
        r, reference = found[name], row.reference or row.on
        flags = " ".join(row.flags) or ("recipes/lora.py" if row.recipe == "lora" else "")
        if "error" in r:
            lines.append(f"| {name} | `{flags}` | not run: {r['error']} |||||||||")
            continue
        against, base = "", found.get(reference or "", {})
        if "peak_bytes" in base:
            against = (f"{reference}: memory x {r['peak_bytes'] / base['peak_bytes']:.2f}, speed x "
                       f"{r['tokens_per_second'] / base['tokens_per_second']:.2f}")  # fmt: skip
        states = r["model_states"]
        cells = [r["peak_bytes"], states["parameters"], states["gradients"], states["optimizer"], r["activation_bytes"]]
        lines.append(
            f"| {name} | `{flags}` | " + " | ".join(f"{c / MIB:.1f}" for c in cells)
            + f" | {r['tokens_per_second']:,.0f} | {against} | {r['last_loss']:.3f} |"
        )  # fmt: skip
    lines += ["", "Peak: highest of forward, backward and step. Parameters, gradients, optimizer: just before the "
                  "step.",
              "Activations: highest of the training phases, with logits.", "",
              "| claim | source | measured here | verdict |", "|---|---|---|---|"]  # fmt: skip
    lines += [f"| {' | '.join(row)} |" for row in said]
    target.mkdir(parents=True, exist_ok=True)
    (target / "ledger.md").write_text("\n".join(lines) + "\n")
    (target / "ledger.json").write_text(json.dumps(record | {"rows": found, "claims": said}, indent=1) + "\n")
    print("\n".join(lines))


COLORS = {
    "parameters": "#1d4ed8", "gradients": "#0891b2", "optimizer": "#7c3aed", "activations": "#ea580c",
    "logits": "#facc15", "buffers": "#94a3b8", "untracked": "#e2e8f0",
}  # fmt: skip


def plot_memory(found: dict[str, dict], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [n for n in found if "error" not in found[n]]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(names) + 1.6), dpi=130)
    left = [0.0] * len(names)
    for part, color in COLORS.items():
        widths = [found[n]["parts_at_peak"].get(part, 0) / MIB for n in names]
        if any(widths):
            axes.barh(names, widths, 0.7, left=left, color=color, label=part, edgecolor="white", linewidth=0.5)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for y, total in enumerate(left):
        axes.text(total + max(left) * 0.008, y, f"{total:,.0f}", va="center", fontsize=8, color="#334155")
    axes.invert_yaxis()
    axes.set(
        xlabel="MiB at the peak of a training step (rank 0)", title="Memory by technique", xlim=(0, max(left) * 1.1)
    )
    finish(figure, axes, target)


def plot_speed(found: dict[str, dict], target: Path) -> None:
    """Plot memory against speed of the one-rank rows, with the settings that no other beats in both."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    points = sorted((r["peak_bytes"] / MIB, r["tokens_per_second"], n) for n, r in found.items()
                    if "error" not in r and r["ranks"] == 1)  # fmt: skip
    front, best = [], 0.0
    for memory, speed, name in points:
        if speed > best:
            best = speed
            front.append((memory, speed, name))
    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=130)
    axes.scatter([p[0] for p in points], [p[1] for p in points], s=28, color="#94a3b8", zorder=2)
    axes.plot([p[0] for p in front], [p[1] for p in front], "o-", color="#ea580c", zorder=3, label="Pareto front")
    on_front = {name for _, _, name in front}
    for memory, speed, name in points:
        axes.annotate(name, (memory, speed), xytext=(5, 4), textcoords="offset points", fontsize=7,
                      color="#9a3412" if name in on_front else "#475569")  # fmt: skip
    axes.set(xlabel="peak MiB", ylabel="tokens/s", title="Memory against speed, one rank")
    finish(figure, axes, target)


def finish(figure, axes, target: Path) -> None:
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        help="model folder or hub id (random weights where the folder has none); default: a Llama of 12 M parameters",
    )
    parser.add_argument("--data", help="training rows; default: made here, lengths like gsm8k's")
    parser.add_argument("--gpus", type=int, default=2, help="ranks of the ZeRO rows (1: without them)")
    parser.add_argument("--seq", type=int, default=512, help="longest row and pack, tokens")
    parser.add_argument("--micro", type=int, default=4, help="rows a step (packs with packing)")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", help="only the rows whose name holds one of these words")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the four files")
    parser.add_argument("--work", type=Path, help="folder of the runs; default: a temporary one")
    options = parser.parse_args()

    import tempfile

    import torch

    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        if options.model is None:
            options.model = str(work / "model")
            write_model(Path(options.model))
        options.random_init = not list(Path(options.model).glob("*.safetensors"))
        if options.data is None:
            options.data = str(work / "rows.jsonl")
            write_data(Path(options.data), options.seq)
        every = [r for r in rows(options.gpus) if torch.cuda.is_available() or not r.needs_cuda]
        table = {row.name: row for row in every}
        words = [w.lower() for w in options.rows or []]
        chosen = [r for r in every if not words or any(w in r.name.lower() for w in words)]
        record = {"machine": machine.facts(), "versions": machine.versions()}
        if torch.cuda.is_available():
            record["machine"]["gpu"] = torch.cuda.get_device_name()
        found = measure(chosen, table, options, work)
        for name, entry in found.items():
            entry["ranks"] = table[name].ranks
        record["setting"] = (
            f"Model {Path(options.model).name if Path(options.model).exists() else options.model} (random weights), "
            f"rows of at most {options.seq} tokens, {options.micro} a micro batch, {options.steps} steps ({WARM_UP} of "
            f"warm-up), {options.rounds} rounds, device {record['machine'].get('gpu', 'cpu')}."
        )
        report(found, table, claims(found, options.gpus), record, options.out)
        plot_memory(found, options.out / "ledger-memory.png")
        plot_speed(found, options.out / "ledger-speed.png")
    failed = [name for name, entry in found.items() if "error" in entry]
    print(f"\nwritten: {options.out}/ledger.md, ledger.json, ledger-memory.png, ledger-speed.png")
    if failed:
        raise SystemExit(f"not run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
