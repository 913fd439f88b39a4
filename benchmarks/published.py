"""Compare plans with published measurements on real GPUs, point by point.

    python benchmarks/published.py                     # plan the points whose plan in benchmarks/results/published.json
                                                       # is of another commit (commit_of_plans); may be stopped
    python benchmarks/published.py --only fms-lora     # the points whose id contains this; nothing is written
    python benchmarks/published.py --tables            # only the tables, from the plans that are there
    python benchmarks/published.py --margins           # src/zerofit/plan/margins.json, from the plans of the result;
                                                       # --simulate: first those of the sample with expandable segments
    python benchmarks/published.py --commands          # what was run at each point, and the plan's command; no plan

published/points.csv has the points: where a figure is from, what was run, and the flags of `zerofit plan` that stand
for it (`node`: GPUs of a node, where there were several); published/models their config.json files,
published/contexts.csv what processes hold outside torch's allocator.
A point is compared as what it measures: allocated or reserved by torch, or the driver's figure (nvidia-smi); "unknown",
where the source does not say which, is compared with the last. Class A: the source states the versions of the trainer
and of torch, the length of every row, the attention kernel, precision and optimizer, whether logits are whole, and what
the figure is of; B: one of these is not stated (the point's note says which); C: it used kernels or code that zerofit
does not have, or rows of different lengths in segments that do not expand; fit: only that it ran, or ran out of memory.
No point of class A or B is left out: two figures of one source that contradict each other are both counted.
"""

import argparse
import csv
import functools
import json
import os
import shlex
import statistics
import time
from pathlib import Path

from machine import NO_CODE, ROOT, git, versions

from zerofit.base import hardware
from zerofit.base.hardware import GIB
from zerofit.config import parse, resolve
from zerofit.job.request import Request
from zerofit.model import load
from zerofit.plan import candidates, gpu_memory, predict, simulate

HERE = Path(__file__).resolve().parent
DATA = HERE / "published"
RESULTS = HERE / "results"
LOOPS = HERE / "loops.py"

SOURCES = (
    "What was run at each point, and the plan's command: `python benchmarks/published.py --commands`, from "
    "[points.csv](../published/points.csv)."
)

KINDS = ("allocated", "reserved", "driver", "unknown")

ABOUT = (
    "`python benchmarks/published.py`; {when}. The measurements are those of the publications named below, on GPUs; "
    "the plans were made on a CPU. No constant was fitted to them; the context of a T4 is from the archive of its "
    "points."
)

# What a plan is made of, for git; margins.json is made from the plans.
MADE_OF = ("src", "benchmarks/loops.py", "benchmarks/published.py", "benchmarks/published")
NO_PART = tuple(f":(exclude){place}" for place in (*NO_CODE, gpu_memory.MARGINS.relative_to(ROOT)))

LARGE = 0.10  # errors above this need a reason

# Points that were set to class C after their errors were seen (benchmarks/published/README.md): swift-* have rows of
# different lengths, the others code that zerofit has not. A row of the result counts them as what they were.
MOVED = ("swift-", "fit-full-llama3-bs4", "swiftex-full-7b-z3x4-16k-sp4")

# (figures, classes, bound of the median size, of the largest), after known differences: without them the plan is of
# another program than the measured one.
BOUNDS = (("All is stated (A)", "A", 0.02, 0.08), ("all usable (A and B)", "AB", 0.05, 0.20))

# What other code held that zerofit does not: (text, whether it is memory that the plan also has, but freed earlier).
# Such memory stays in the allocator's cache, so reserved figures have it anyway.
DIFFERENCES = {
    "L": ("transformers 4.48 copied the shifted logits (loss/loss_utils.py): simulated", False),
    "F": ("a kernel whose gradient overwrites the logits (fms-acceleration's cross entropy): simulated", False),
    "O": ("the measuring loop keeps the model's outputs until the step's end: simulated", True),
    "S": ("fp32 logits stay alive in transformers before 4.45 (supposed): 4 bytes a logit", True),
    "N": (
        "autograd keeps gathered weights without zero.Init before DeepSpeed PR 8189: 2 bytes x nn.Linear",
        False,
    ),
    "H": ("DeepSpeed flattened the weights of stages 1 and 2 on the host (0.14.2, 0.16.4): no peak at load", False),
    "P": ("prepare_model_for_kbit_training: fp32 head, embedding and logits", False),
    "Q": ("no double quantization: 0.0466 bytes a quantized parameter more", False),
}

SIMULATED = {"F": "overwrites_logits", "L": "copies_logits", "O": "keeps_outputs"}  # of loops.py

NEEDS_LESS = {"F", "H"}  # differences with which a job needs less memory than its plan without them

SUPPOSED = {"S"}  # differences that nobody has verified: errors are given without them too

REASONS = {
    "K": "fused Triton kernels (RMSNorm, RoPE, LoRA, cross entropy in place) that zerofit does not have",
    "V": "the model's own code of 2023, other versions",
    "U": "something that matters is not stated",
    "D": "the page contradicts itself or another page",
    "R": "rows of different lengths, which leave more of segments that do not expand unused than a plan's equal rows",
    "W": "the peak is at load",
}


def points() -> list[dict]:
    with (DATA / "points.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def contexts() -> list[dict]:
    """Return what processes hold outside torch's allocator, by published messages."""
    with (DATA / "contexts.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@functools.cache
def commit_of_plans() -> str:
    """Return the last commit that changed MADE_OF, with "-dirty" and the time after other changes."""
    dirty = time.strftime("-dirty-%Y%m%d%H%M%S") if git("status", "--porcelain", "--", *MADE_OF, *NO_PART) else ""
    return git("log", "-1", "--format=%h", "--", *MADE_OF, *NO_PART) + dirty


def node_of(point: dict) -> int:
    """Return the GPUs of a node."""
    return int(point["node"] or min(int(point["gpus"]), gpu_memory.GPUS_PER_NODE))


def _expandable(point: dict) -> bool:
    return "expandable_segments" in point["stack"]


def flags_of(point: dict) -> list[str]:
    """Return the flags of `zerofit plan`, with the files that they name."""
    words = ["--model", str(DATA / "models" / point["model"]), *shlex.split(point["flags"]), *whole_rows(point)]
    if "--deepspeed" in words:
        place = words.index("--deepspeed") + 1
        words[place] = str(DATA / words[place])
    return words


def request_of(point: dict) -> Request:
    """Return what the point's flags ask for."""
    return parse.request(candidates.recipe_of(point["method"]), flags_of(point))


def whole_rows(point: dict) -> list[str]:
    split = "--sp_size" in point["flags"]
    return ["--sp_size", "1"] if int(point["gpus"]) > 1 and not split else []  # a plan would also try to split rows


def plan(point: dict) -> dict:
    """Return {"allocated", "reserved", "driver", "least": bytes, ...} of the point by simulation, or {"failed"}.

    "alike": the same figures with the measuring loop's habits, as far as they are simulated.
    """
    gpu, ranks = hardware.find(point["gpu"]), int(point["gpus"])
    (candidate,) = candidates.candidates(point["method"], request_of(point), ranks, gpu)
    began = time.perf_counter()
    # What the source ran with, not zerofit's default; torch's own default is False.
    os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{_expandable(point)}"
    figures = _simulated(point, candidate, gpu)
    if "failed" in figures:
        return figures
    answer = candidate.answer
    letters = [letter for letter in point["differences"].split() if letter in SIMULATED]
    hooks = tuple(f"{LOOPS}:{SIMULATED[letter]}" for letter in letters)
    alike = _simulated(point, candidate, gpu, hooks) if hooks else None
    return figures | {
        "phase": max(answer["total"], key=answer["total"].get), "total": answer["total"], "alike": alike,
        "extended_from_layers": answer.get("extended_from_layers"),
        "differences": _differences(point, candidate, answer["total"], gpu),
        "seconds_per_step": candidate.seconds, "seconds": round(time.perf_counter() - began, 1),
        "commit": commit_of_plans(),
    }  # fmt: skip


def _simulated(point: dict, candidate, gpu, hooks: tuple[str, ...] = ()) -> dict:
    """Simulate rank 0 with all layers where segments are compared that they leave unused; return its figures.

    Bytes of tensors grow linearly with the layers, so that few of them are enough where those alone are compared.
    Elsewhere as many are simulated as of a plan's chosen setting.
    """
    setting, shape, ranks = candidate.setting, candidate.shape, int(point["gpus"])
    segments = _has_segments(point)
    for whole in sorted({segments and shape.layers <= predict.MAX_LAYERS_OF_CHOSEN, segments}):
        question = simulate.Question(candidate.request, ranks, gpu=gpu, before_training=hooks)
        answer = predict.answer_of(question, shape, zero=setting.zero, every=setting.every, all_layers=whole)
        if isinstance(answer, Exception):
            return {"failed": str(answer)}
        candidate.answer = answer | {"rank": 0}
        if not predict.needs_all_layers(candidate, gpu_memory.allocator_capacity(gpu, ranks)):
            break
    return _figures(candidate, ranks, node_of(point), gpu)


# --- the margin of the closed forms ---

SAMPLE = 2  # every how many-th point, in the order of the file, is also simulated with expandable segments


def with_expandable_segments(point: dict) -> dict:
    """Return {"least", "reserved": bytes, "commit"} of a point, simulated with segments as the kit's jobs have them."""
    gpu, ranks = hardware.find(point["gpu"]), int(point["gpus"])
    (candidate,) = candidates.candidates(point["method"], request_of(point), ranks, gpu)
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    predict.simulate_candidate(candidate, gpu_memory.allocator_capacity(gpu, ranks))
    figures = {} if candidate.failed else {"least": candidate.peak, "reserved": candidate.reserved}
    return figures | {"commit": commit_of_plans()}


def margins(plans: dict[str, dict]) -> dict:
    """Return what margins.json has: how many times their closed form's bytes jobs need by simulation.

    Only jobs that the closed forms may decide (candidates.formulas_suffice). low and high leave out a twentieth each.
    """
    needed: dict[str, list[tuple[float, float]]] = {}
    for point in points():
        planned = plans.get(point["id"])
        if not planned or "failed" in planned:
            continue
        gpu, ranks = hardware.find(point["gpu"]), int(point["gpus"])
        (candidate,) = candidates.candidates(point["method"], request_of(point), ranks, gpu)
        if not candidates.formulas_suffice(candidate):
            continue
        outside = sum(gpu_memory.outside_allocator(gpu, ranks, node_of(point)).values())
        form, stage = candidate.by_formula, "stage 3" if candidate.setting.zero == 3 else "below stage 3"
        if not _expandable(point):
            times = (planned["least"] - outside) / form, planned["reserved"] / form
            needed.setdefault(f"usual segments, {stage}", []).append(times)
        if "least" in (with_segments := planned.get("expandable", {})):
            times = with_segments["least"] / form, with_segments["reserved"] / form
            needed.setdefault(f"expandable segments, {stage}", []).append(times)
    return {kind: _margin(found) for kind, found in sorted(needed.items())}


def _margin(found: list[tuple[float, float]]) -> dict[str, float]:
    least, reserved = (sorted(column) for column in zip(*found, strict=True))
    at = [least[round(share * (len(least) - 1))] for share in (0.05, 0.95)]
    return {
        "points": len(least), "low": round(at[0], 3), "high": round(at[1], 3),
        "reserved": round(statistics.median(reserved), 3), "lowest": round(least[0], 3), "highest": round(least[-1], 3),
    }  # fmt: skip


def write_margins(record: dict, simulates: bool) -> None:
    """Write margins.json. simulates: first the sample's plans with expandable segments that are of another commit."""
    plans, store = record["plans"], RESULTS / "published.json"
    sample = [point["id"] for point in points()][::SAMPLE]
    with simulate.reuse_process():
        for point in points() if simulates else []:
            planned = plans.get(point["id"], {})
            commit = planned.get("expandable", {}).get("commit")
            if point["id"] in sample and "least" in planned and commit != commit_of_plans():
                planned["expandable"] = with_expandable_segments(point)
                store.write_text(json.dumps(record, indent=1) + "\n")
                print(point["id"], planned["expandable"], flush=True)
    found = {"about": "written by `python benchmarks/published.py --margins`", "kinds": margins(plans)}
    gpu_memory.MARGINS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def _has_segments(point: dict) -> bool:
    """Return whether a figure of the point, or that it fits, depends on the segments of torch's allocator."""
    return point["class"] == "fit" or any(point[kind] for kind in KINDS if kind != "allocated")


def _figures(candidate, ranks: int, node: int, gpu) -> dict[str, int]:
    outside = sum(gpu_memory.outside_allocator(gpu, ranks, node).values())
    room = int(gpu.memory_gib * GIB) - outside
    reserved = max(candidate.peak, min(candidate.reserved, room))
    return {
        "allocated": candidate.allocated, "reserved": reserved, "driver": reserved + outside,
        "least": candidate.peak + outside,
    }  # fmt: skip


def _differences(point: dict, candidate, total: dict[str, int], gpu) -> dict[str, int]:
    """Return the bytes of each known difference between the published code and zerofit; total: peaks by phase."""
    shape, letters = candidate.shape, point["differences"].split()
    logits = candidate.setting.tokens * shape.vocabulary
    settings = resolve.resolve(candidate.request, int(point["gpus"]), gpu)
    tied = load.load_config(settings).get_text_config().tie_word_embeddings
    outer = shape.vocabulary * shape.hidden * (1 if tied else 2)
    sizes = {
        "S": 4 * logits, "N": 2 * _linear_weights(settings) if "N" in letters else 0, "P": 2 * outer + 4 * logits,
        "Q": 0.0466 * (shape.frozen - outer),
        "H": max(size for phase, size in total.items() if phase != "load") - max(total.values()),
    }  # fmt: skip
    return {letter: int(sizes[letter]) for letter in letters if letter in sizes}


def _linear_weights(settings) -> int:
    """Return how many numbers the model's nn.Linear weights have.

    Autograd keeps a view of them; of an embedding it keeps the indices, of fused experts the weights in any case.
    """
    import torch
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(load.load_config(settings).get_text_config())
    return sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))


def with_arithmetic_of_today(point: dict, planned: dict) -> dict:
    """Return a stored plan with what no simulation says: memory outside torch's allocator and known differences."""
    if "failed" in planned:
        return planned
    gpu, ranks = hardware.find(point["gpu"]), int(point["gpus"])
    outside = sum(gpu_memory.outside_allocator(gpu, ranks, node_of(point)).values())

    def moved(figures: dict | None) -> dict | None:
        more = outside - (figures["driver"] - figures["reserved"]) if figures else 0
        return figures and figures | {name: figures[name] + more for name in ("driver", "least")}

    differences = planned["differences"]
    if set(point["differences"].split()) - set(SIMULATED):
        (candidate,) = candidates.candidates(point["method"], request_of(point), ranks, gpu)
        differences = _differences(point, candidate, planned["total"], gpu)
    return moved(planned) | {"alike": moved(planned["alike"]), "differences": differences}


# --- comparing ---


def compare(point: dict, planned: dict) -> list[dict]:
    """Return a row for each figure of the point: {"kind", "measured", "plan", "error", "after", "error_after", ...}.

    error_after: with all known differences; error_sure: without those that are SUPPOSED.
    """
    rows = []
    for kind in KINDS:
        if not point[kind] or point["class"] == "fit" or "failed" in planned:
            continue
        size, measured = planned["driver" if kind == "unknown" else kind], float(point[kind])
        after, sure = (_with_differences(point, planned, kind, without) / GIB for without in (set(), SUPPOSED))
        rows.append({
            "id": point["id"], "class": point["class"], "job": job_of(point), "gpus": int(point["gpus"]),
            "kind": kind, "measured": measured,
            "plan": size / GIB, "error": size / GIB / measured - 1, "after": after,
            "error_after": after / measured - 1, "error_sure": sure / measured - 1, "why": _why(point),
        })  # fmt: skip
    return rows


def _with_differences(point: dict, planned: dict, kind: str, without: set[str]) -> int:
    """Return the planned bytes of a kind of figure with the known differences of the point, but for some."""
    name = "driver" if kind == "unknown" else kind
    after = (planned.get("alike") or planned)[name] + sum(
        more
        for letter, more in planned["differences"].items()
        if letter not in without and (kind == "allocated" or not DIFFERENCES[letter][1])
    )
    if kind == "allocated":
        return after
    least = 0 if NEEDS_LESS & set(point["differences"].split()) else planned[name]
    # a full GPU returns unused segments
    return max(least, min(after, int(hardware.find(point["gpu"]).memory_gib * GIB)))


def job_of(point: dict) -> str:
    words = shlex.split(point["flags"])
    zero = words[words.index("--zero") + 1] if "--zero" in words else ""
    method = {"sft": "full", "lora": "LoRA", "qlora": "QLoRA", "dpo": "full DPO"}[point["method"]]
    if not zero.isdigit():
        zero = str(json.loads((DATA / words[words.index("--deepspeed") + 1]).read_text())["zero_optimization"]["stage"])
    return f"{method}, ZeRO-{zero}"


def _why(point: dict) -> str:
    letters = [*point["differences"].split(), *point["reasons"].split()]
    return "; ".join([*letters, *([point["note"]] if point["note"] else [])])


def summary(rows: list[dict]) -> list[str]:
    """Return a table of errors by class, kind of figure and kind of job."""
    lines = [
        "| figures | n | median error | median size | worst | after known differences | median size | worst "
        "| after those that are not supposed (S) | median size | worst |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups = {"A, all": lambda r: r["class"] == "A", "A and B, all": lambda r: r["class"] in "AB"}
    groups["A and B, one GPU"] = lambda r: r["class"] in "AB" and r["gpus"] == 1
    groups["A and B, several GPUs"] = several = lambda r: r["class"] in "AB" and r["gpus"] > 1
    groups["A and B, several GPUs, allocated"] = lambda r: several(r) and r["kind"] == "allocated"
    groups["A and B, several GPUs, other figures"] = lambda r: several(r) and r["kind"] != "allocated"
    for kind in KINDS:
        groups[f"A, {kind}"] = lambda r, kind=kind: r["class"] == "A" and r["kind"] == kind
    for kind in KINDS:
        groups[f"A and B, {kind}"] = lambda r, kind=kind: r["class"] in "AB" and r["kind"] == kind
    for job in sorted({row["job"] for row in rows}):
        groups[f"A and B, {job}"] = lambda r, job=job: r["class"] in "AB" and r["job"] == job
    groups["C: not comparable"] = lambda r: r["class"] == "C"
    groups["A, B and what was set to C after its error was seen"] = lambda r: (
        r["class"] in "AB" or r["id"].startswith(MOVED)
    )
    for name, belongs in groups.items():
        group = [row for row in rows if belongs(row)]
        if group:
            columns = (_three([row[key] for row in group]) for key in ("error", "error_after", "error_sure"))
            lines.append(f"| {name} | {len(group)} | {' | '.join(columns)} |")
    return lines


def against_bounds(rows: list[dict]) -> list[str]:
    """Return a line for each of BOUNDS: what the errors are, and which points are beyond it."""
    lines = []
    for name, classes, median_bound, bound in BOUNDS:
        group = [row for row in rows if row["class"] in classes]
        if not group:
            continue
        sizes = [abs(row["error_after"]) for row in group]
        beyond = [
            f"{row['id']} {row['kind']} {row['error_after']:+.1%} ({row['why'] or 'no reason known'})"
            for row in group
            if abs(row["error_after"]) > bound
        ]
        lines.append(
            f"- {name}: median size {statistics.median(sizes):.1%} (bound {median_bound:.0%}), worst {max(sizes):.1%} "
            f"(bound {bound:.0%}){'; beyond it: ' + ', '.join(beyond) if beyond else ''}."
        )
    return ["Bounds, on the errors after known differences:", "", *lines]


def _three(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{statistics.median(errors):+.1%} | {statistics.median(sizes):.1%} | {max(errors, key=abs):+.1%}"


def fits(found: list[tuple[dict, dict]]) -> list[str]:
    """Return a table of what ran and what did not, for the points near the GPU's size."""
    lines = ["| point | GPU, GiB | needs at least, GiB | plan | published |", "|---|---|---|---|---|"]
    for point, planned in found:
        if "failed" in planned:
            continue
        total = hardware.find(point["gpu"]).memory_gib
        if point["ran"] == "yes" and planned["least"] / GIB < 0.8 * total:
            continue
        needs = ((planned.get("alike") or planned)["least"] + sum(planned["differences"].values())) / GIB
        said = "fits" if needs <= total else "does not fit"
        known = "ran" if point["ran"] == "yes" else "out of memory"
        reasons = f" ({point['reasons']})" if point["reasons"] else ""
        lines.append(f"| {point['id']} | {total:.1f} | {needs:.1f} | {said} | {known}{reasons} |")
    return lines


def markdown(found: list[tuple[dict, dict]], record: dict) -> str:
    """Return the page of the (point, plan) pairs; record: {"date", "versions"} of the plans, as in the result file."""
    rows = [row for point, planned in found for row in compare(point, planned)]
    lines = [
        "# Plans against published measurements",
        "",
        ABOUT.format(when=", ".join([record["date"], *(f"{k} {v}" for k, v in record["versions"].items())])),
        "",
        *summary(rows),
        "",
        *against_bounds(rows),
        "",
        "## Points",
        "",
    ]
    lines += ["Errors: plan / measured - 1, without and with what is known to differ (letters below).", ""]
    lines += ["| point | class | job | figure | measured, GiB | plan | error | with differences | error | why |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        after = f"{row['after']:.2f} | {row['error_after']:+.1%}"
        lines.append(
            f"| {row['id']} | {row['class']} | {row['job']} | {row['kind']} | {row['measured']:.2f} | "
            f"{row['plan']:.2f} | {row['error']:+.1%} | {after} | {row['why']} |"
        )
    few = [point["id"] for point, planned in found if planned.get("extended_from_layers") and _has_segments(point)]
    if few:
        lines += ["", f"Replayed with few layers for all, so that reserved figures are less sure: {', '.join(few)}."]
    commits = sorted({planned["commit"] for _, planned in found if "failed" not in planned})
    lines += ["", f"Plans of {'commit' if len(commits) == 1 else 'the commits'} {', '.join(commits)}."]
    lines += ["", *(f"- {letter}: {text}." for letter, (text, _) in DIFFERENCES.items())]
    lines += [f"- {letter}: {text}." for letter, text in REASONS.items()]
    lines += ["", "## Fits or does not", "", *fits(found)]
    planned_ids = {point["id"] for point, _ in found}
    failed = [f"- {point['id']}: not planned yet" for point in points() if point["id"] not in planned_ids]
    failed += [f"- {point['id']}: {planned['failed']}" for point, planned in found if "failed" in planned]
    lines += ["", "## Not planned", "", *failed] if failed else []
    lines += ["", "## Sources", "", SOURCES, "", "| source | points |", "|---|---|"]
    by_source = {}
    for point in points():
        by_source.setdefault((point["source"], point["url"]), []).append(point["id"])
    for (source, url), ids in by_source.items():
        lines.append(f"| {f'[{source}]({url})' if url else source} | {', '.join(ids)} |")
    return "\n".join(lines) + "\n"


def command_of(point: dict) -> str:
    """Return the command line of `zerofit plan` that stands for the point."""
    words = [point["model"], point["flags"], *whole_rows(point)]
    return (
        f"zerofit plan --gpu_type {point['gpu']} --gpus {point['gpus']} --method {point['method']} "
        f"--model benchmarks/published/models/{' '.join(words)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the ids; nothing is written")
    parser.add_argument("--classes", default="A,B,C,fit")
    parser.add_argument("--tables", action="store_true", help="plan nothing")
    parser.add_argument("--margins", action="store_true", help="write the margin of the closed forms")
    parser.add_argument(
        "--simulate", action="store_true", help="with --margins: simulate what is of another commit with such segments"
    )
    parser.add_argument("--commands", action="store_true", help="print what was run, and the plan's command")
    given = parser.parse_args()
    chosen = [p for p in points() if given.only in p["id"] and p["class"] in given.classes.split(",")]
    if given.commands:
        print("\n\n".join(f"{point['id']}: {point['stack']}\n{command_of(point)}" for point in chosen))
        return
    target = RESULTS / "published"
    store = target.with_suffix(".json")
    record = json.loads(store.read_text()) if store.exists() else {"plans": {}}
    if given.margins:
        write_margins(record, given.simulate)
        return
    now, plans = {"date": time.strftime("%Y-%m-%d"), "versions": versions()}, record["plans"]
    with simulate.reuse_process():
        for point in chosen:
            old = plans.get(point["id"], {})
            if old and (given.tables or (old.get("commit") == commit_of_plans() and not given.only)):
                plans[point["id"]] = with_arithmetic_of_today(point, old)
                continue
            if given.tables:
                continue
            plans[point["id"]] = plan(point) | {key: old[key] for key in ("expandable",) if key in old}
            record |= now
            for row in compare(point, plans[point["id"]]):
                print(
                    f"{row['id']}: {row['kind']} {row['measured']:.2f}, plan {row['plan']:.2f} ({row['error']:+.1%}), "
                    f"with differences {row['after']:.2f} ({row['error_after']:+.1%})",
                    flush=True,
                )
            if not given.only:  # after every point: all of them take half an hour
                store.write_text(json.dumps(record, indent=1) + "\n")
    text = markdown([(point, plans[point["id"]]) for point in chosen if point["id"] in plans], record)
    if given.only:
        print(text)
        return
    target.with_suffix(".md").write_text(text)
    store.write_text(json.dumps(record, indent=1) + "\n")
    print(text.partition("## Points")[0])


if __name__ == "__main__":
    main()
