"""Compare the time of a step by plan with published tokens a second.

    python benchmarks/published_speeds.py            # the half by which rates may be set; nothing is written
    python benchmarks/published_speeds.py --write    # both halves: results/published-speeds.json, and the page
                                                     # docs/notes/published-speeds.md

published/job_speeds.csv has runs with the flags of `zerofit plan` that stand for them, published/multi_node.csv runs of
FSDP by the dimensions of their models. Half of the runs, chosen by a hash of their names alone (`half`), may be looked
at when a rate of the time model is set; the other half is for the check. Several runs of one table differ in the number
of GPUs alone and may be in both halves.
"""

import argparse
import csv
import hashlib
import itertools
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import published
from machine import facts

from zerofit.base import hardware
from zerofit.plan import candidates, formulas
from zerofit.plan.speed import step, work
from zerofit.plan.speed.kernels import Kernels
from zerofit.plan.speed.work import Product

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "published"
RESULT = ROOT / "benchmarks" / "results" / "published-speeds.json"
PAGE = ROOT / "docs" / "notes" / "published-speeds.md"

# What the publications ran with, where zerofit's default is another: peft's own LoRA, transformers' own modules.
AS_PUBLISHED = {"sft": ["--use_liger_kernel", "false"],
                "lora": ["--use_liger_kernel", "false", "--fused_lora", "false"]}  # fmt: skip

HBM2E_GBS = 2400.0  # of the H100 with HBM2e and 500 W that one source has (its note)

LLM_FOUNDRY = "mosaicml/llm-foundry"

# torchtitan's selective checkpointing recomputes every second product (parallelize_llama.py, _get_custom_policy)
EVERY = {"none": 0, "all": 1, "selective": 2, "every 2": 2}

FLASH_1 = 0.6  # of the rates of FlashAttention 2 (arXiv 2307.08691: 1.7 to 3 times faster), in llm-foundry of 2023


def jobs() -> list[dict]:
    """Return the runs that have flags."""
    return _rows("job_speeds.csv")


def shapes() -> list[dict]:
    """Return the runs that have dimensions, each with a name."""
    named = ("model", "gpu", "gpus", "length", "micro", "checkpointing")
    return [{"id": "-".join(row[name].replace(" ", "") for name in named), **row} for row in _rows("multi_node.csv")]


def half(name: str) -> str:
    """Return "fit" for a run at which the rates may be set, "check" for one that is held back."""
    return "fit" if hashlib.sha256(name.encode()).digest()[0] % 2 else "check"


def _rows(file: str) -> list[dict]:
    with (DATA / file).open(newline="") as opened:
        return list(csv.DictReader(opened))


# --- what the plan says ---


def of_job(row: dict) -> tuple[formulas.Shape, formulas.Setting, hardware.Gpu, int]:
    """Return shape, setting, GPU and tokens of a row, of a run that has flags."""
    gpu, ranks = hardware.find(row["gpu"]), int(row["gpus"])
    own = {**row, "flags": " ".join([row["flags"], *AS_PUBLISHED["sft" if row["method"] == "sft" else "lora"]])}
    (candidate,) = candidates.candidates(row["method"], published.request_of(own), ranks, gpu)
    shape, setting = candidate.shape, candidate.setting
    # as transformers' reentrant default, and torch before 2.1
    setting = replace(setting, kernels=replace(_peft(setting.kernels, row), stops_early=False))
    if row["alike"]:
        shape, setting = _with_modules(shape, setting, row["method"])
    length = candidate.request.get("max_length")
    return shape, setting, gpu, int(length)


def _peft(kernels: Kernels, row: dict) -> Kernels:
    """Return the kernels of a publication that trains adapters with peft.

    prepare_model_for_kbit_training leaves norms and hidden states in fp32; adapters of a 16-bit base are fp32 since peft
    0.12, whose inputs are cast, and all of their products are fp32 without autocast.
    """
    if row["method"] == "qlora":
        return replace(kernels, fp32_states=True, adapters="cast")
    if row["method"] == "lora" and row["source"].startswith("fms"):
        return replace(kernels, adapters="fp32" if "--bf16 false" in row["flags"] else "cast")
    return kernels


def _with_modules(shape: formulas.Shape, setting: formulas.Setting, method: str):
    """Return shape and setting of a mixture whose experts are modules of their own, as transformers before 5 had them.

    A packed base packs them too, and Python calls one after the other.
    """
    bits = 4 if method == "qlora" else 16
    products = tuple(
        part
        for p in shape.work.products
        for part in (_as_modules(p, shape.hidden, bits) if p.experts else [p])
    )  # fmt: skip
    packed = sum(p.count * p.experts for p in products if p.experts) if bits == 4 else 0.0
    passes = replace(shape.work.passes, packed=shape.work.passes.packed + packed)
    in_experts = sum(p.weights for p in products if p.experts)
    stored = shape.frozen_bytes
    if bits == 4:
        stored = (shape.frozen * stored - in_experts * (2 - 0.55)) / shape.frozen
    own = replace(shape, frozen_bytes=stored, work=replace(shape.work, products=products, passes=passes))
    return own, replace(setting, kernels=replace(setting.kernels, loops_experts=True))


def _as_modules(product: Product, hidden: int, bits: int) -> list[Product]:
    """Return the linear layers of an expert for a tensor of all: gate and up are two."""
    product = replace(product, bits=bits if not product.trained else 16)
    wide = product.out if product.wide == hidden else product.wide
    two = (product.wide, product.out) in ((hidden, wide), (wide, hidden)) and wide > 1.5 * _narrow(product, hidden)
    return [product] if not two else [replace(product, wide=hidden, out=wide // 2, count=2 * product.count)]


def _narrow(product: Product, hidden: int) -> int:
    return min(product.wide, product.out) if hidden not in (product.wide, product.out) else hidden


def of_dimensions(row: dict) -> tuple[formulas.Shape, formulas.Setting, hardware.Gpu, int]:
    """Return the same of a run of FSDP, which gathers and reduces whole layers at any number of GPUs."""
    n = {name: int(row[name]) for name in row if row[name].isdigit()}
    is_mpt = LLM_FOUNDRY in row["url"]
    sizes = {name: n[name] for name in ("layers", "hidden", "heads", "kv_heads", "intermediate", "vocabulary")}
    sizes["head_dim"] = n["hidden"] // n["heads"]
    operations = work.dense(**sizes, gated=not is_mpt, rms=not is_mpt, rotary=not is_mpt)
    layer = (n["parameters"] - n["vocabulary"] * n["hidden"]) // n["layers"]
    shape = formulas.Shape(
        n["parameters"], 0, n["vocabulary"] * n["hidden"], **sizes, by_layer=(layer,) * n["layers"], work=operations
    )
    tokens = n["micro"] * n["length"]
    setting = formulas.Setting(
        3, "none", EVERY[row["checkpointing"]], n["micro"], tokens, n["accumulation"], n["gpus"],
        whole_layers=True, kernels=Kernels(stops_early=False, fused_loss=is_mpt, attention=FLASH_1 if is_mpt else 1.0),
    )  # fmt: skip
    gpu = hardware.GPUS[row["gpu"]]
    return shape, setting, replace(gpu, memory_gbs=HBM2E_GBS) if "HBM2e" in row["note"] else gpu, n["length"]


def kind(row: dict, shape: formulas.Shape) -> str:
    """Return the kind of a job: a mixture of experts, or full or adapter."""
    if shape.experts or any(p.experts for p in shape.work.products):
        return "mixture of experts"
    return "full" if not shape.frozen else "packed base" if row.get("method") == "qlora" else "adapter"


def measure(rows: list[dict]) -> list[dict]:
    """Return a point for each run: published and predicted tokens a second of a GPU, and the parts of a step."""
    found = []
    for row in rows:
        shape, setting, gpu, length = (of_job if "flags" in row else of_dimensions)(row)
        priced = step.of(shape, setting, gpu, length)
        tokens = setting.tokens * setting.accumulation
        told = (
            float(row["tokens_per_second"]) / setting.ranks if "flags" in row else float(row["tokens_per_second_a_gpu"])
        )
        found.append({
            "id": row["id"], "half": half(row["id"]), "gpu": row["gpu"], "gpus": setting.ranks, "model": row["model"],
            "kind": kind(row, shape), "source": row.get("source") or _source(row["url"]), "url": row["url"],
            "counted": row.get("counted", "yes") == "yes", "note": "; ".join(filter(None, (row.get("alike"), row["note"]))),
            "published": told, "predicted": tokens / priced.seconds, "error": tokens / priced.seconds / told - 1,
            "parts": {name: round(value, 4) for name, value in vars(priced).items() if value},
        })  # fmt: skip
    return found


def _source(url: str) -> str:
    return "/".join(url.split("/")[3:5])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="look at both halves and write the result")
    args = parser.parse_args()
    runs = [row for row in (*jobs(), *shapes()) if args.write or half(row["id"]) == "fit"]
    points = measure(runs)
    for p in points:
        parts = " ".join(f"{k}={v:.3g}" for k, v in p["parts"].items())
        print(f"{p['error']:+7.1%} {p['id']:<45} {p['published']:>9,.0f} {p['predicted']:>9,.0f}  {parts}")
    counted = [p for p in points if p["counted"]]
    for name in sorted({p["kind"] for p in counted}):
        errors = [p["error"] for p in counted if p["kind"] == name]
        print(
            name,
            len(errors),
            f"median {statistics.median(map(abs, errors)):.1%}, within 20 %: {sum(abs(e) <= 0.2 for e in errors)}, {min(errors):+.0%} to {max(errors):+.0%}",
        )


if __name__ == "__main__":
    main()
