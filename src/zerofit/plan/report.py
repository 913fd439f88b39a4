"""Print and write a plan: terminal text, plan.md, plan.json and plan.png."""

from dataclasses import asdict, replace
from pathlib import Path

from zerofit import run_folder
from zerofit.hardware import GIB
from zerofit.plan import candidates, formulas
from zerofit.plan.candidates import Candidate, Plan
from zerofit.train import memory_report

SPEED_ERROR = "12 published runs on one A100: -21 to +49 %"

_EXPERTS = (
    "{} in a layer; how tokens spread over them is not known before a run and may change activations by a quarter"
)

LARGE_CHECKPOINT = 100 * GIB  # above it a plan warns about the disk


def text(plan: Plan) -> str:
    """Return the plan as text for the terminal."""
    best = plan.chosen or plan.nearest
    lines = ["", candidates.ESTIMATE.format(best.failed)] if best and best.failed else [""]
    gpus = candidates.gpus_as_text(plan.ranks, plan.node)
    lines += [
        f"{gpus} x {plan.gpu.device_name}: {plan.gpu.memory_gib:.1f} GiB each, "
        f"{plan.limit / GIB:.1f} GiB for torch's allocator"
    ]
    lines += [f"  outside it: {name} {size / GIB:.2f} GiB" for name, size in plan.allowance.items() if size]
    lines += [_margin(plan)]
    lines += _rejected(plan)
    instead = [_adapter(plan)] if plan.adapter else []
    if plan.chosen is None:
        return "\n".join([*lines, "", nothing_fits(plan), *instead])
    chosen = plan.chosen
    lines += ["", f"chosen: {chosen.label}", *_three_figures(chosen, plan)]
    if chosen.answer:
        lines += ["", memory_report.table(chosen.answer["peak"]), ""]
    lines += [f"  {name}: {value}" for name, value in facts(chosen, plan).items()]
    others = " (and NODE_RANK=1, 2, ... on the other nodes)" if plan.nodes > 1 else ""
    lines += [
        "",
        *_warnings(chosen, plan),
        f"run it: {candidates.command(chosen, plan.ranks)}{others}",
        *instead,
        f"\nplanned in {plan.seconds:.0f} s",
    ]
    return "\n".join(lines)


def _margin(plan: Plan) -> str:
    """Return a line on what is kept free for the error of plans."""
    if not plan.margin:
        return "  nothing is kept free for the error of plans: only so a setting fits; see docs/planning.md"
    return (
        f"  kept free: {plan.margin / GIB:.2f} GiB, {candidates.MARGIN:.0%}: the largest error of allocated bytes "
        "against published measurements (docs/planning.md)"
    )


def figures(candidate: Candidate, plan: Plan) -> dict[str, int]:
    """Return the bytes of a GPU by three ways to look at it.

    Returns: {"allocated", "reserved": torch.cuda's maxima; "nvidia_smi": with what is outside the allocator; "least":
        the last on a full GPU, whose allocator returns unused segments: it decides whether the job fits}.
    """
    outside = sum(plan.allowance.values())
    reserved = min(candidate.reserved, max(plan.limit + plan.margin, candidate.peak))
    return {
        "allocated": candidate.allocated, "reserved": reserved, "nvidia_smi": reserved + outside,
        "least": candidate.peak + outside,
    }  # fmt: skip


def _three_figures(candidate: Candidate, plan: Plan) -> list[str]:
    size = {name: f"{value / GIB:.1f}" for name, value in figures(candidate, plan).items()}
    total = (plan.limit + plan.margin + sum(plan.allowance.values())) / GIB
    return [
        f"  peak of a GPU, {_source(candidate)}:",
        f"    allocated   {size['allocated']:>6} GiB (torch.cuda.max_memory_allocated)",
        f"    reserved    {size['reserved']:>6} GiB (torch.cuda.max_memory_reserved: with unused parts of segments)",
        f"    nvidia-smi  {size['nvidia_smi']:>6} of {total:.1f} GiB; on a fuller GPU {size['least']} would do",
    ]


def _rejected(plan: Plan) -> list[str]:
    """Return a line per group of rejected candidates with the same states on the GPU: its smallest."""
    groups: dict[tuple, list] = {}
    for candidate, why in plan.rejected:
        setting = candidate.setting
        key = (candidate.method, candidate.change, setting.offload, setting.nvme, setting.every > 0)
        groups.setdefault(key, []).append((candidate, why))
    lines = []
    for entries in groups.values():
        smallest, why = min(entries, key=lambda entry: entry[0].peak)
        fastest = max(candidate.tokens_per_second for candidate, _ in entries)
        alike = f" and {len(entries) - 1} more, larger ones, up to {fastest:,.0f} tok/s" if len(entries) > 1 else ""
        lines.append(f"  rejected: {smallest.label}, {smallest.tokens_per_second:,.0f} tok/s: {why}{alike}")
    return lines


def _adapter(plan: Plan) -> str:
    """Return a line on the LoRA or QLoRA that would fit."""
    adapter = plan.adapter
    name = {"lora": "LoRA", "qlora": "QLoRA"}[adapter.method]
    return (
        f"{name} would fit in {adapter.peak / GIB:.1f} GiB a GPU at {adapter.tokens_per_second:,.0f} tok/s (by "
        f"formula, + 10 %; METHOD={adapter.method} simulates it): {candidates.command(adapter, plan.ranks)}"
    )


def _warnings(candidate: Candidate, plan: Plan) -> list[str]:
    """Return a warning if checkpoints are large or the disk has too little space; else []."""
    each = formulas.checkpoint_bytes(candidate.shape.trainable, candidate.shape.parameters)
    if plan.disk_free is not None and _on_disk(each, plan) > plan.disk_free:
        short = f"only {plan.disk_free / GIB:.0f} GiB are free there"
    elif each > LARGE_CHECKPOINT:
        short = "see that the disk of the run folder has that"
    else:
        return []
    kept = (
        f"--save_total_limit {plan.kept}" if plan.kept else "without --save_total_limit, for two of those that are kept"
    )
    return [
        f"warning: checkpoints take {_on_disk(each, plan) / GIB:.0f} GiB ({kept}; the new one is written before the "
        f"oldest goes): {short}; --save_only_model true saves {2 * candidate.shape.parameters / GIB:.0f} GiB that "
        "cannot be resumed",
        "",
    ]


def _on_disk(each: float, plan: Plan) -> float:
    """Return the bytes of the checkpoints that exist at once; of two if all are kept."""
    return each * ((plan.kept or 1) + 1)


def _source(candidate: Candidate) -> str:
    if candidate.answer is None:
        return f"by formula with a margin of {candidates.FORMULA_MARGIN:.0%}" + (
            "" if candidate.failed else ", not simulated"
        )
    layers = candidate.answer.get("extended_from_layers")
    return "by simulation" + (f", extended from {layers[0]} and {layers[1]} layers" if layers else "")


def facts(candidate: Candidate, plan: Plan) -> dict[str, str]:
    """Return {title: text} of what else a job needs: host memory, disk, communication, time."""
    setting, shape = candidate.setting, candidate.shape
    node = setting.of_a_node
    result = {
        "parameters": f"{shape.parameters / 1e9:.3g} billion, {shape.trainable / 1e9:.3g} of them train",
        **({"rows": plan.rows} if plan.rows else {}),
        **_unequal_rows(candidate),
        **({"experts": _EXPERTS.format(shape.experts)} if shape.experts else {}),
        "batch": f"{setting.micro} rows x {setting.accumulation} steps x {_data_ranks(setting)}, {setting.tokens:,} "
        "tokens a micro batch on a GPU",
        "closed forms": f"{sum(candidate.formula.values()) / GIB:.1f} GiB: "
        + ", ".join(
            f"{part} {size / GIB:.1f}"
            for part, size in sorted(candidate.formula.items(), key=lambda p: -p[1])
            if size > 0.05 * GIB
        ),
    }
    if setting.nvme:
        result["disk of a node"] = (
            f"{16 * shape.trainable / plan.ranks * node / GIB:.1f} GiB of optimizer states and gradients"
            + f" and {2 * shape.parameters / plan.ranks * node / GIB:.1f} of weights" * (setting.offload == "all")
            + " in --offload_path; host memory holds pinned blocks on their way"
        )
    else:
        result["host memory needed"] = _host(candidate, plan)
    return (
        result
        | {
            "checkpoint": f"{formulas.checkpoint_bytes(shape.trainable, shape.parameters) / GIB:.1f} GiB each on disk",
            "sent by each GPU": _sent(candidate, plan),
            "estimate": f"{candidate.seconds:.2f} s a step, {candidate.tokens_per_second:,.0f} tokens/s "
            f"({candidate.tokens_per_second / plan.ranks:,.0f} a GPU), from data sheets at "
            f"{formulas.MATRIX_EFFICIENCY:.0%} of peak ({SPEED_ERROR})",
        }
        | _order(plan)
        | _hpz(candidate, plan)
        | _sp(candidate, plan)
    )


def _unequal_rows(candidate: Candidate) -> dict[str, str]:
    """Return {title: text} on what rows of different lengths leave unused in the allocator's segments."""
    answer = candidate.answer or {}
    if "equal_rows" not in answer:
        return {}
    beyond = [
        replay["reserved"] - replay["allocated"]
        for replay in (answer["equal_rows"]["segments"], answer["allocator"]["segments"],
                       answer["allocator"]["expandable"])
    ]  # fmt: skip
    equal, unequal, expandable = (f"{size / GIB:.1f}" for size in beyond)
    return {
        "rows of different lengths": f"leave {unequal} GiB of reserved memory unused, equal ones {equal} (by "
        f"{len(answer['widths'])} micro batches; more of them may leave more, up to the GPU's size); with "
        f"PYTORCH_ALLOC_CONF=expandable_segments:True {expandable}"
    }


def _data_ranks(setting: formulas.Setting) -> str:
    if setting.tp > 1:
        return f"{setting.ranks // setting.tp} groups of {setting.tp} GPUs that split matrices"
    if setting.sp == 1:
        return f"{setting.ranks} GPUs"
    return f"{setting.ranks // setting.sp} groups of {setting.sp} GPUs that split rows"


def _host(candidate: Candidate, plan: Plan) -> str:
    """Return text on the host memory that a node needs and has."""
    saving = (
        f", {candidate.answer['host_saving'] / GIB:.1f} more on the first node while saving" if candidate.answer else ""
    )
    checked = f"of {plan.host_limit / GIB:.0f} GiB" if plan.host_limit else "not checked; HOST_MEMORY=GiB checks it"
    when = "training" if candidate.setting.tp == 1 else "each rank loads the whole model"
    return f"{candidate.host_of_a_node / GIB:.0f} GiB a node while {when}{saving} ({checked})"


def _sent(candidate: Candidate, plan: Plan) -> str:
    within, across = formulas.wire_bytes(candidate.shape, candidate.setting)
    if plan.nodes == 1:
        return f"{within / GIB:.1f} GiB a step"
    return (
        f"{within / GIB:.1f} GiB a step within its node at {plan.gpu.link_gbs:g} GB/s and {across / GIB:.1f} GiB to "
        f"other nodes at {plan.gpu.node_gbs:g} GB/s (--node_link_gbs)"
    )


def _order(plan: Plan) -> dict[str, str]:
    """Return {title: text} on constants that order the settings and were never compared with a measurement."""
    if not plan.unmeasured:
        return {}
    return {"order of the settings": f"also by the speed of {' and '.join(plan.unmeasured)}, which was never measured"}


def _hpz(candidate: Candidate, plan: Plan) -> dict[str, str]:
    """Return {flag: text} on what ZeRO++ hpZ would change; {} if it does not apply."""
    setting, shape = candidate.setting, candidate.shape
    if setting.zero != 3 or setting.hpz > 1 or plan.nodes == 1 or setting.offload == "all" or plan.ranks % plan.node:
        return {}
    seconds = formulas.step_seconds(
        shape, replace(setting, hpz=plan.node), plan.gpu, setting.tokens * setting.sp // setting.micro
    )
    more = 2 * shape.parameters / plan.node / GIB
    return {
        f"--zero_hpz_partition_size {plan.node}": f"would take about {more:.1f} GiB more of each GPU; estimate "
        f"{seconds:.2f} s a step instead of {candidate.seconds:.2f} (ZeRO++ hpZ, docs/scaling.md)"
    }


def _sp(candidate: Candidate, plan: Plan) -> dict[str, str]:
    """Return {flag: text} on what rows split over two GPUs would change; {} if a smaller micro batch comes first."""
    setting, shape = candidate.setting, candidate.shape
    if setting.sp * setting.tp > 1 or setting.micro > 1 or setting.of_a_node % 2 or shape.heads % 2:
        return {}
    halved = replace(setting, sp=2, tokens=setting.tokens // 2, accumulation=2 * setting.accumulation)
    seconds = formulas.step_seconds(shape, halved, plan.gpu, setting.tokens)
    saved = (candidate.formula["activations"] + candidate.formula["logits"]) / 2 / GIB
    return {
        "--sp_size 2": f"would save about {saved:.1f} GiB of each GPU by formula; estimate {seconds:.2f} s a step "
        f"instead of {candidate.seconds:.2f} (docs/long_context.md)"
    }


def nothing_fits(plan: Plan) -> str:
    """Return the error sentence: nearest setting, missing memory, number of GPUs that would suffice."""
    nearest = plan.nearest
    if nearest is None:
        return "nothing fits."
    missing = (nearest.peak - plan.limit) / GIB
    if nearest.peak <= plan.limit:
        need = f"{nearest.host_of_a_node / GIB:.0f} GiB of a node's host memory, of {plan.host_limit / GIB:.0f}"
        return (
            f"nothing fits: {nearest.label} fits the GPU but needs {need}; --offload_path on a fast local disk takes "
            "it from there, and so do more nodes."
        )
    do = f"{plan.would_do} GPUs would do by formula" if plan.would_do else "no number of these GPUs up to 4096 would do"
    shorter = f", and so would --max_length {plan.longest} on these" if plan.longest else ""
    return (
        f"nothing fits: the nearest is {nearest.label} with {nearest.peak / GIB:.1f} GiB, {missing:.1f} GiB too much "
        f"for {plan.gpu.device_name}; {do}{shorter}; --method auto also tries LoRA and QLoRA."
    )


def write(plan: Plan, folder: Path) -> None:
    """Write plan.json, plan.md and plan.png into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_json(folder / "plan.json", as_json(plan))
    best = plan.chosen or plan.nearest
    body = "\n".join(line.rstrip() for line in text(plan).splitlines())
    (folder / "plan.md").write_text(f"# Plan\n\n```\n{body.strip()}\n```\n\n![memory](plan.png)\n", encoding="utf-8")
    if best is not None:
        peak = (
            best.answer["peak"]
            if best.answer
            else {"highest moment, by formula": {k: int(v) for k, v in best.formula.items()}}
        )
        title = f"{best.label}\npredicted peak of a GPU, by phase and part"
        memory_report.plot(peak, folder / "plan.png", title, (plan.limit, f"limit {plan.limit / GIB:.1f} GiB"))


def as_json(plan: Plan) -> dict:
    def entry(candidate: Candidate | None, why: str = "") -> dict | None:
        if candidate is None:
            return None
        return {
            "label": candidate.label, "method": candidate.method, **asdict(candidate.setting),
            "peak_bytes": candidate.peak,
            **{f"{name}_bytes": size for name, size in figures(candidate, plan).items()},
            "source": _source(candidate), "formula": {k: int(v) for k, v in candidate.formula.items()},
            "simulation": candidate.answer, "seconds_per_step": round(candidate.seconds, 4),
            "tokens_per_second": round(candidate.tokens_per_second), "why_not": why,
            "command": candidates.command(candidate, plan.ranks),
        }  # fmt: skip

    return {
        "gpu": asdict(plan.gpu), "gpus": plan.ranks, "gpus_of_a_node": plan.node, "limit_bytes": plan.limit,
        "kept_free_bytes": plan.allowance, "margin_bytes": plan.margin,
        "chosen": entry(plan.chosen), "facts": facts(plan.chosen, plan) if plan.chosen else None,
        "nearest": entry(plan.nearest), "adapter_instead": entry(plan.adapter), "host_limit_bytes": plan.host_limit,
        "gpus_that_would_do": plan.would_do, "seconds": round(plan.seconds, 1),
        "rejected": [entry(candidate, why) for candidate, why in plan.rejected],
    }  # fmt: skip
