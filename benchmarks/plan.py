"""Compare plans with real runs: the simulation's peak bytes beside those of real tensors, phase by phase.

    make plan-validate                      # on a GPU: its allocator's peak; else: real tensors on the CPU

On a CPU every case runs twice through the kit's trainer and the real DeepSpeed engine as one rank of N (torch's fake
process group): without memory, and with real tensors. The bytes must be equal. On a GPU the second run's peak is
torch.cuda.max_memory_allocated. Writes benchmarks/results/plan-<cpu|gpu>.{json,md} (and .png on a GPU).
"""

import argparse
import json
import statistics
import time
from importlib import metadata
from pathlib import Path

from machine import describe, facts, versions

from zerofit.base import hardware
from zerofit.config import parse
from zerofit.plan import simulate

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "tiny" / "model"
CONFIGS = ROOT / "tests" / "configs"
RESULTS = ROOT / "benchmarks" / "results"


def cpu_cases() -> list[tuple[str, str, int]]:
    """Return (recipe, flags, ranks) of {full, LoRA} x stage x checkpointing x length, and of the other choices.

    These include QLoRA (real packed weights of the bundled model) and packing.
    """
    found = []
    for recipe in ("sft", "lora"):
        for zero in range(4):
            for checkpointing in ("false", "true"):
                for length in (64, 128):
                    found.append(
                        (recipe, f"--zero {zero} --gradient_checkpointing {checkpointing} --max_length {length}", 2)
                    )
        for zero, offload in ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "all")):
            found.append((recipe, f"--zero {zero} --offload {offload}", 2))
        for zero in (1, 2, 3):
            found.append((recipe, f"--zero {zero}", 8))
        found.append((recipe, "--zero 0", 1))
    for zero in range(4):
        found += [
            ("sft", f"--zero {zero} --gradient_accumulation_steps 2", 2),
            ("sft", f"--zero {zero} --per_device_train_batch_size 2", 2),
            ("sft", f"--zero {zero} --gradient_checkpointing true --gradient_checkpointing_every 2", 2),
            ("sft", f"--zero {zero} --fused_loss true", 2),
            ("sft", f"--zero {zero} --bf16 true", 2),
            ("sft", f"--zero {zero} --optim sgd", 2),
            ("sft", f"--zero {zero} --eval_fraction 0.1", 2),
        ]
    found += [("sft", f"--zero {zero} --pure_bf16 true", 2) for zero in (0, 2)]
    without_autocast = "--bf16 false --dtype bfloat16"
    found += [("sft", f"--zero {zero} {without_autocast}", 2) for zero in range(4)]
    found += [("lora", f"--zero {zero} {without_autocast}", 2) for zero in (0, 2, 3)]
    found += [("sft", "--zero 0 --optim adafactor", 2), ("sft", "--zero 2 --optim muon", 2)]
    for zero in (0, 2, 3):
        for more in ("", " --gradient_checkpointing true", " --max_length 128", " --packing true"):
            found.append(("lora", f"--load_in_4bit true --zero {zero}{more}", 2))
        for more in ("", " --gradient_checkpointing true", " --max_length 128", " --per_device_train_batch_size 2"):
            found.append(("sft", f"--packing true --zero {zero}{more}", 2))
    found += [("lora", f"--load_in_4bit true --zero {zero} --offload optimizer", 2) for zero in (2, 3)]
    found += [("lora", f"--packing true --zero {zero}", 2) for zero in (0, 3)]
    found.append(("lora", "--load_in_4bit true --zero 3", 8))
    for zero in range(4):
        for more in ("", " --fused_loss true --eval_fraction 0.1", " --adapter lora", " --padding_free true"):
            found.append(("dpo", f"--zero {zero}{more}", 2))
    for zero in (1, 2, 3):
        for more in ("--gradient_checkpointing true", "--packing true", "--fused_loss true --max_length 128"):
            found.append(("sft", f"--zero {zero} --sp_size 2 {more}", 4))
        found.append(("lora", f"--zero {zero} --sp_size 4", 4))
    for zero in (1, 2):
        for more in ("", " --gradient_checkpointing true", " --packing true", " --bf16 true"):
            found.append(("sft", f"--zero {zero} --tp_size 2{more}", 4))
    return found


def gpu_cases() -> list[tuple[str, str, int]]:
    """Return 0.5B to 8B shapes of Llama, Qwen and Gemma, N = 1, 8 and 64 by the fake group, that fit 80 GB."""
    found = []
    for name in ("qwen2.5-0.5b", "llama3.2-1b", "gemma2-2b"):
        own = "--attn_implementation eager" if "gemma" in name else ""
        for zero in (0, 1, 2, 3):
            for ranks in (1, 8) if zero else (1,):
                flags = f"--model {name} --zero {zero} --max_length 2048 --gradient_checkpointing true {own}"
                found.append(("sft", flags, ranks))
    for zero, ranks in ((2, 8), (3, 8), (3, 64)):
        for checkpointing in ("true", "false"):
            found.append(
                (
                    "sft",
                    f"--model llama3.1-8b --zero {zero} --max_length 2048 --gradient_checkpointing {checkpointing}",
                    ranks,
                )
            )
            found.append(
                (
                    "lora",
                    f"--model qwen3-8b --zero {zero} --max_length 4096 --gradient_checkpointing {checkpointing}",
                    ranks,
                )
            )
    return found


def questions(cases, gpu) -> list[simulate.Question]:
    """Return two of each case: without memory, and real."""
    found = []
    for recipe, flags, ranks in cases:
        words = [*flags.split(), "--data", "none"]
        if "--model" in words:
            words[words.index("--model") + 1] = str(CONFIGS / f"{words[words.index('--model') + 1]}")
        else:
            words += ["--model", str(TINY)]
        words += [] if "--max_length" in words else ["--max_length", "64"]
        words += [] if "--per_device_train_batch_size" in words else ["--per_device_train_batch_size", "1"]
        micro = int(words[words.index("--per_device_train_batch_size") + 1])
        accumulation = 2 if "--gradient_accumulation_steps" in words else 1
        if words[words.index("--zero") + 1] == "0":
            ranks = 1  # DistributedDataParallel needs a real group; tests/plan/test_plan.py has two real ranks
        words += ["--effective_batch_size", str(micro * accumulation * ranks)]
        request = parse.request(recipe, words)
        found.append(simulate.Question(request, ranks, gpu=gpu))
        found.append(simulate.Question(request, ranks, gpu=gpu, device="cuda" if gpu else "cpu", fake=False))
    return found


def compare(cases, gpu=None) -> list[dict]:
    """Return {"case", "predicted", "measured", "error": largest relative difference of a phase that matters} a case."""
    asked, rows = questions(cases, gpu), []
    fake = simulate.run_all(asked[::2])
    real = simulate.run_all(asked[1::2])
    for (recipe, flags, ranks), predicted, measured in zip(cases, fake, real, strict=True):
        row = {"case": f"{recipe} {flags}", "ranks": ranks}
        if isinstance(predicted, Exception) or isinstance(measured, Exception):
            failed = predicted if isinstance(predicted, Exception) else measured
            rows.append(row | {"failed": f"{type(failed).__name__}: {failed}"})
            continue
        row |= {"predicted": predicted["total"], "measured": measured["total"]}
        if gpu:
            high = max(predicted["total"].values()), max(measured["total"].values())
            row["error"] = high[0] / high[1] - 1
        else:
            shares = [predicted["total"].get(p, 0) / size - 1 for p, size in measured["total"].items()]
            row["error"] = max(shares, key=abs)
        rows.append(row)
    return rows


def markdown(rows: list[dict], about: str) -> str:
    good = [row for row in rows if "error" in row]
    errors = [abs(row["error"]) for row in good]
    lines = [f"# Plans against real runs\n\n{about}\n"]
    if errors:
        lines.append(
            f"{len(good)} of {len(rows)} cases compared; error of the peak: median {statistics.median(errors):.3%}, "
            f"worst {max(errors):.3%}; equal to the byte: {sum(e == 0 for e in errors)}.\n"
        )
    lines += ["| case | ranks | predicted peak | measured peak | largest error |", "|---|---|---|---|---|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| `{row['case']}` | {row['ranks']} | | | not compared: {row['failed'][:120]} |")
            continue
        sizes = [max(row[k].values()) / 2**20 for k in ("predicted", "measured")]
        lines.append(
            f"| `{row['case']}` | {row['ranks']} | {sizes[0]:,.3f} MiB | {sizes[1]:,.3f} MiB | {row['error']:.3%} |"
        )
    return "\n".join(lines) + "\n"


def scatter(rows: list[dict], target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    good = [row for row in rows if "error" in row]
    measured = [max(row["measured"].values()) / 2**30 for row in good]
    predicted = [max(row["predicted"].values()) / 2**30 for row in good]
    figure, axes = plt.subplots(figsize=(5, 5), dpi=120)
    axes.plot([0, max(measured)], [0, max(measured)], color="#94a3b8", linewidth=1)
    axes.scatter(measured, predicted, s=18, color="#1d4ed8")
    axes.set(xlabel="measured peak, GiB", ylabel="planned peak, GiB", title="Plans against a real GPU")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target)
    plt.close(figure)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, default=0, help="the first N cases")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    cases = gpu_cases() if cuda else cpu_cases()
    cases = cases[: given.only] if given.only else cases
    gpu = hardware.find("detect") if cuda else None
    began = time.perf_counter()
    rows = compare(cases, gpu)
    about = "\n".join(describe(facts(), {"zerofit": versions() | {"deepspeed": metadata.version("deepspeed")}}))
    about += f"\n\n`make plan-validate`, {time.perf_counter() - began:.0f} s."
    text = markdown(rows, about)
    print(text)
    if given.only:
        return
    name = f"plan-{'gpu' if cuda else 'cpu'}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps({"about": about, "cases": rows}, indent=1))
    if cuda:
        scatter(rows, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
