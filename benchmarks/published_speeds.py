"""Compare the time of a step by plan with published tokens a second.

    python benchmarks/published_speeds.py            # the half by which rates may be set; nothing is written
    python benchmarks/published_speeds.py --write    # both halves: results/published-speeds.json, and the page
                                                     # benchmarks/results/published-speeds.md
    python benchmarks/published_speeds.py --page     # page and summary again, from the points of the stored result

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
from dataclasses import replace
from pathlib import Path

import published
from machine import facts

from zerofit.base import hardware
from zerofit.plan import candidates, formulas
from zerofit.plan.speed import accuracy, step, work
from zerofit.plan.speed.kernels import Kernels
from zerofit.plan.speed.work import Product

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "published"
RESULT = ROOT / "benchmarks" / "results" / "published-speeds.json"
PAGE = ROOT / "benchmarks" / "results" / "published-speeds.md"

# What the publications ran with, where zerofit's default is another: peft's own LoRA, transformers' own modules.
AS_PUBLISHED = {"sft": ["--use_liger_kernel", "false", "--whole_layers", "false"],
                "lora": ["--use_liger_kernel", "false", "--fused_lora", "false"]}  # fmt: skip

HBM2E_GBS = 2400.0  # of the H100 with HBM2e and 500 W that one source has (its note)

LLM_FOUNDRY = "mosaicml/llm-foundry"

# torchtitan's selective checkpointing recomputes every second product (parallelize_llama.py, _get_custom_policy)
ABOUT = """# Published speeds beside the plan's

Made by `python benchmarks/published_speeds.py --write`, on a CPU. {runs} published speeds; {left_out} are listed and
not counted, each with the reason. A hash of a run's name alone puts it into a half: by the {fit} of **fit** the rates
of [rates.json](../../src/zerofit/plan/speed/rates.json) were set, with data sheets and public microbenchmarks; the
{check} of **check** were compared once, at the end. Plans print the range of both for their kind of GPU and job,
without mixtures whose experts are modules: these runs are of FSDP and Hugging Face trainers, as the kit is.

A run is priced as it was published, not as the kit would do it now:

- adapters: peft's own sums; fp32 adapters of a 16-bit base (fms-acceleration); fp32 norms and hidden states of a packed
  base (`prepare_model_for_kbit_training`)
- no Liger; recomputation of whole layers, as transformers' reentrant default; ZeRO-3 exchanges matrices, not layers
- Mixtral and Qwen3-MoE ("experts are modules"): experts one by one, packed by QLoRA, as transformers before 5 had them
- llm-foundry: attention at {flash:.0%} of FlashAttention 2's rates, a fused loss, LayerNorm, an MLP without gate
- torchtitan's selective checkpointing: every second layer, for every second product; its H100 of 2024 with 2.4 TB/s
"""

DOUBTS = """## Doubts

- The halves are not independent: near-duplicates (the same job on another number of GPUs or with another micro batch,
  mostly of llm-foundry) are in both. Its attention's share and most of what A100 and H100 reach come from its fit half.
- The column `alike` of `job_speeds.csv` and the descriptions above were in part written after errors of the fit half
  were seen. None changed after the check half was compared.
- An earlier version of such a model, which is lost, was compared with the same check half; its summary was known when
  this one was made, and was used for nothing. The table of published speeds, both halves, was on the screen once before
  any rate was set, without predictions beside it.
- A figure of each GPU but A100, H100 and L40 rests on one or two sources. Links, networks, offload and long rows have
  few points, Blackwell, Volta and Turing none.

Found when the check half was compared, and left as it is, since no rate and no description may change after it:

- Qwen3-30B-A3B with ZeRO-3 on 16 GPUs is 17 times too fast: its 128 experts a layer are modules of their own in that
  publication, and ZeRO-3's hooks and gathers of each are not in its description. The kit's own mixtures are fused.
- PowerMoE, 40 experts called one by one on short rows, is 38 to 62 % too fast: too little time for each call.
- The order by the tokens of all GPUs of a job was added after that by the tokens of one was seen.

Written again on 2026-11-27: since the comparison, the model counts what ZeRO-3's exchange of whole layers takes, and
FSDP's runs have it. It was not changed for an error of either half. Before: dense 4.4% (88% within 20%), order 75%
(95% by jobs). The kit's own default, whole layers for short micro batches, is off for runs of DeepSpeed, which had
none; that was said after both were seen: with it mixtures are 69% off in the median, the rest is the same.

Written again later that day: the bytes of elementwise kernels are those of a trace of nine models
(`tests/plan/test_passes.py`); norms' backwards had two thirds of theirs, and gradients of an input that several layers
read were not added. No rate was changed after it. Before, the fit half was 4.2% off (bias +2.3%), the check half 4.3%
(88% within 20%, order 80%, 95% by jobs).
"""

EVERY = {"none": 0, "all": 1, "selective": 2, "every 2": 2}

AS_MODULES = "experts are modules"  # of a mixture, as transformers had them before 5: not a program that a plan is of

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


def of_job(row: dict) -> tuple[formulas.Shape, formulas.PlanPoint, hardware.Gpu, int]:
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

    prepare_model_for_kbit_training leaves norms and hidden states in fp32; adapters of a 16-bit base are fp32 since
    peft 0.12, whose inputs are cast, and all of their products are fp32 without autocast.
    """
    if row["method"] == "qlora":
        return replace(kernels, fp32_states=True, adapters="cast")
    if row["method"] == "lora" and row["source"].startswith("fms"):
        return replace(kernels, adapters="fp32" if "--bf16 false" in row["flags"] else "cast")
    return kernels


def _with_modules(shape: formulas.Shape, setting: formulas.PlanPoint, method: str):
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


def of_dimensions(row: dict) -> tuple[formulas.Shape, formulas.PlanPoint, hardware.Gpu, int]:
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
    setting = formulas.PlanPoint(
        3, "none", EVERY[row["checkpointing"]], n["micro"], tokens, n["accumulation"], n["gpus"],
        whole_layers=True, kernels=Kernels(stops_early=False, fused_loss=is_mpt, attention=FLASH_1 if is_mpt else 1.0),
    )  # fmt: skip
    gpu = hardware.GPUS[row["gpu"]]
    return shape, setting, replace(gpu, memory_gbs=HBM2E_GBS) if "HBM2e" in row["note"] else gpu, n["length"]


def measure(rows: list[dict]) -> list[dict]:
    """Return a point for each run: published and predicted tokens a second of a GPU, and the parts of a step."""
    return [_point(row) for row in rows]


def _point(row: dict) -> dict:
    has_flags = "flags" in row
    shape, setting, gpu, length = (of_job if has_flags else of_dimensions)(row)
    priced = step.estimate_step(shape, setting, gpu, length)
    told = float(row["tokens_per_second"]) / setting.ranks if has_flags else float(row["tokens_per_second_a_gpu"])
    predicted = setting.tokens * setting.accumulation / priced.seconds
    return {
        "id": row["id"], "half": half(row["id"]), "gpu": row["gpu"], "gpus": setting.ranks, "model": row["model"],
        "kind": accuracy.job_kind(shape), "source": row.get("source") or "/".join(row["url"].split("/")[3:5]),
        "url": row["url"], "counted": row.get("counted", "yes") == "yes",
        "note": "; ".join(filter(None, (row.get("alike"), row["note"]))), "published": told, "predicted": predicted,
        "error": predicted / told - 1,
        "parts": {name: round(value, 4) for name, value in vars(priced).items() if value},
    }  # fmt: skip


# --- the result ---


def counted(points: list[dict], of_half: str = "") -> list[dict]:
    """Return the points that count, of one half or of both."""
    return [p for p in points if p["counted"] and of_half in ("", p["half"])]


def figures(points: list[dict]) -> dict:
    """Return number, median size, share within 20 %, and range of the errors."""
    errors = [p["error"] for p in points]
    return {
        "n": len(errors), "median": statistics.median(map(abs, errors)), "bias": statistics.median(errors),
        "within": sum(abs(e) <= 0.2 for e in errors) / len(errors), "low": min(errors), "high": max(errors),
    }  # fmt: skip


def pairs(points: list[dict], least: float = 0.0, whole: bool = False) -> tuple[int, int]:
    """Return (pairs of settings of one source, model and GPU; those that the plan puts in the published order).

    Args: least: published speeds that differ by less than this share are no pair; whole: compare the tokens a second of
        all GPUs of a job, not of one.
    """
    found = right = 0
    for one, other in itertools.combinations(points, 2):
        if any(one[name] != other[name] for name in ("source", "model", "gpu")):
            continue
        times = one["gpus"] / other["gpus"] if whole else 1.0
        measured, told = (times * one[name] / other[name] for name in ("published", "predicted"))
        if abs(measured - 1) <= least:
            continue
        found += 1
        right += (measured > 1) == (told > 1)
    return found, right


def summary(points: list[dict]) -> dict:
    """Return the figures by half and kind of job, and the order of pairs."""
    dense, mixtures = accuracy.KINDS[:3], accuracy.KINDS[3:]
    found = {}
    for name in ("check", "fit"):
        own = counted(points, name)
        groups = {"dense models": dense, "mixtures of experts": mixtures, **{kind: (kind,) for kind in dense}}
        chosen = {title: [p for p in own if p["kind"] in kinds] for title, kinds in groups.items()}
        found[name] = {title: figures(some) for title, some in chosen.items() if some}
        found[name] |= {"pairs": pairs(own), "pairs apart": pairs(own, 0.02), "pairs of jobs": pairs(own, whole=True)}
    return found


def page(points: list[dict]) -> str:
    """Return benchmarks/results/published-speeds.md."""
    by_half = summary(points)
    lines = [ABOUT.format(runs=len(points), flash=FLASH_1, **_ids(points)), "## Result", ""]
    lines += ["| half | jobs | n | median size | median | within 20 % | range |", "|---|---|---|---|---|---|---|"]
    for name, groups in by_half.items():
        for title, f in groups.items():
            if isinstance(f, dict):
                cells = f"{f['n']} | {f['median']:.1%} | {f['bias']:+.1%} | {f['within']:.0%}"
                lines.append(f"| {name} | {title} | {cells} | {f['low']:+.0%} to {f['high']:+.0%} |")
    lines += ["", *_order(by_half), "", *_aims(by_half["check"]), "", DOUBTS, "## Points", ""]
    lines += ["Tokens a second of a GPU. *Half*: check, or fit, by which rates were set.", ""]
    lines += ["| run | GPUs | jobs | half | published | plan | difference |", "|---|---|---|---|---|---|---|"]
    lines += [_line(p) for p in sorted(counted(points), key=lambda p: (p["half"], p["source"], p["id"]))]
    lines += ["", "## Not counted", ""]
    lines += ["| run | half | published | plan | difference | why |", "|---|---|---|---|---|---|"]
    for p in points:
        if not p["counted"]:
            cells = f"{p['published']:,.0f} | {p['predicted']:,.0f} | {p['error']:+.0%} | {p['note']}"
            lines.append(f"| [{p['id']}]({p['url']}) | {p['half']} | {cells} |")
    return "\n".join(lines) + "\n"


def _ids(points: list[dict]) -> dict:
    return {"fit": len(counted(points, "fit")), "check": len(counted(points, "check")),
            "left_out": sum(not p["counted"] for p in points)}  # fmt: skip


def _line(p: dict) -> str:
    note = f" ({p['note']})" if p["note"] else ""
    return (f"| [{p['id']}]({p['url']}){note} | {p['gpus']} x {p['gpu']} | {p['kind']} | {p['half']} | "
            f"{p['published']:,.0f} | {p['predicted']:,.0f} | {p['error']:+.1%} |")  # fmt: skip


def _order(by_half: dict) -> list[str]:
    """Return sentences on pairs of settings of one source, model and GPU."""
    said = []
    for name, groups in by_half.items():
        (all_pairs, right), (apart, right_apart) = groups["pairs"], groups["pairs apart"]
        jobs_, right_jobs = groups["pairs of jobs"]
        said.append(
            f"- {name} half: {right} of {all_pairs} ({right / all_pairs:.0%}); where the published speeds differ by "
            f"more than 2 %, {right_apart} of {apart} ({right_apart / apart:.0%}); by the tokens a second of all GPUs "
            f"of a job, {right_jobs} of {jobs_} ({right_jobs / jobs_:.0%})"
        )
    return [
        "**Order** of two settings of one source, model and GPU, by tokens a second of a GPU, right in the:",
        "",
        *said,
    ]


def _aims(check: dict) -> list[str]:
    """Return the aims and whether the check half meets them."""
    dense, mixtures, (n, right) = check["dense models"], check["mixtures of experts"], check["pairs"]
    aims = [
        (f"dense median {dense['median']:.1%}", "8 %", dense["median"] <= 0.08),
        (f"dense within 20 %: {dense['within']:.0%}", "90 %", dense["within"] >= 0.9),
        (f"mixtures {mixtures['low']:+.0%} to {mixtures['high']:+.0%}", "30 %",
         max(-mixtures["low"], mixtures["high"]) <= 0.3),
        (f"order right in {right / n:.0%} of pairs", "95 %", right / n >= 0.95),
    ]  # fmt: skip
    rows = [f"| {found} | {aim} | {'met' if is_met else '**not met**'} |" for found, aim, is_met in aims]
    return ["| on the check half | aim | |", "|---|---|---|", *rows]


def write(points: list[dict]) -> None:
    """Write the result, the page, and what plans print of their error."""
    record = {"machine": facts(), "summary": summary(points), "points": points}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    kept = [{"chip": accuracy.chip_name(p["gpu"]), "kind": p["kind"], "error": round(p["error"], 3)}
            for p in counted(points) if AS_MODULES not in p["note"]]  # fmt: skip
    lines = ",\n".join(f"  {json.dumps(p)}" for p in kept)
    about = "both halves of benchmarks/results/published-speeds.md, as the kit would run them"
    accuracy.FILE.write_text(f'{{\n "about": "{about}",\n "points": [\n{lines}\n ]\n}}\n')
    PAGE.write_text(page(points))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write page and summary again, from the stored points")
    parser.add_argument("--write", action="store_true", help="look at both halves and write the result")
    args = parser.parse_args()
    if args.page:
        write(json.loads(RESULT.read_text())["points"])
        return
    runs = [row for row in (*jobs(), *shapes()) if args.write or half(row["id"]) == "fit"]
    points = measure(runs)
    for p in points:
        parts = " ".join(f"{name}={value:.3g}" for name, value in p["parts"].items())
        print(f"{p['error']:+7.1%} {p['id']:<45} {p['published']:>9,.0f} {p['predicted']:>9,.0f}  {parts}")
    for kind in accuracy.KINDS:
        f = figures([p for p in counted(points) if p["kind"] == kind])
        print(f"{kind}: {f['n']}, median size {f['median']:.1%}, within 20 %: {f['within']:.0%}")
    if args.write:
        write(points)


if __name__ == "__main__":
    main()
