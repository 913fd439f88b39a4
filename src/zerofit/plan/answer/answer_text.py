"""Print and write a plan: terminal text, plan.md, plan.json and plan.png."""

from dataclasses import asdict
from pathlib import Path

from zerofit.base import allocator, paths
from zerofit.base.hardware import GIB
from zerofit.job import memory_figure, run_folder
from zerofit.job.recipe import Recipe
from zerofit.plan import candidates, formulas, gpu_memory
from zerofit.plan.advice import cost, table
from zerofit.plan.answer import run_line
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.speed import accuracy, rates, step

_EXPERTS = "{} per layer; the distribution of tokens over them is unknown and may change activations by a quarter"

_UNEQUAL_ROWS = (
    f"may need up to {gpu_memory.UNEQUAL_ROWS} times the planned memory, which assumes rows of equal length; "
    "PYTORCH_ALLOC_CONF=expandable_segments:True avoids this"
)

LARGE_CHECKPOINT = 100 * GIB  # a plan warns about the disk above this size
REJECTED = "the smallest of each kind (about: by formula)"


def text(plan: Plan) -> str:
    """Return the plan as text for the terminal: the setting, its memory and time, alternatives and the command."""
    best = plan.chosen or plan.nearest
    failed = best.failed if best else ""
    lines = ["", candidates.ESTIMATE_MESSAGE.format(failed, _margin(best))] if failed else [""]
    lines.append(_gpus(plan))
    if plan.chosen:
        lines += [f"chosen: {plan.chosen.label}", f"  {'GPU memory':<14}{_gpu_memory(plan.chosen, plan)}"]
        lines += [f"  {name:<14}{value}" for name, value in _briefly(plan.chosen, plan).items()]
    lines += table.lines(plan)
    if plan.chosen:
        lines += [*_warnings(plan.chosen, plan), *(one.text for one in plan.advices), *_run_it(plan)]
    return "\n".join(lines)


def _briefly(candidate: Candidate, plan: Plan) -> dict[str, str]:
    """Return the `facts` for the terminal: host memory and disk if used, time and cost of the run."""
    all_facts = facts(candidate, plan)
    names = ["host memory"] * (candidate.host_bytes_per_node >= GIB / 2) + ["disk of a node", "time"]
    names += ["cost"] * bool(plan.run and plan.run.steps_of(candidate))
    return {name: all_facts[name] for name in names if name in all_facts}


def _run_it(plan: Plan) -> list[str]:
    """Return the command; if fewer GPUs are faster, first the command for all GPUs."""
    others = " (and NODE_RANK=1, 2, ... on the other nodes)" if plan.nodes > 1 else ""
    command = f"{run_line.command_of(plan.chosen)}{others}"
    for advice in plan.advices:
        if advice.faster:
            return [f"on all {plan.ranks} GPUs: {command}", f"run it: {run_line.command_of(advice.faster)}"]
    return [f"run it: {command}"]


def _gpus(plan: Plan) -> str:
    gpus = candidates.gpus_as_text(plan.ranks, plan.node)
    kept = "" if plan.margin else "; no memory is kept free for the error of plans, since nothing fits with it"
    return f"{gpus} x {plan.gpu.device_name}, {plan.gpu.memory_gib:.1f} GiB each{kept}"


def _gpu(plan: Plan) -> str:
    """Return text about the parts of a GPU's memory inside and outside torch's allocator."""
    parts = [f"{name} {size / GIB:.2f}" for name, size in plan.allowance.items() if size > 0.005 * GIB]
    kept = (
        f"kept free for the error of plans {plan.margin / GIB:.2f} ({gpu_memory.MARGIN:.0%})"
        if plan.margin
        else "no memory is kept free for the error of plans, since nothing fits with it; see docs/planning.md"
    )
    return f"{plan.limit / GIB:.1f} GiB for torch's allocator; {', '.join([*parts, kept])}"


def _gpu_memory(candidate: Candidate, plan: Plan) -> str:
    """Return text about the memory that a GPU needs, the figure of nvidia-smi, and the parts of the peak."""
    size = figures(candidate, plan)
    phase, parts = _highest(candidate)
    return (
        f"{size['least'] / GIB:.1f} of {plan.gpu_bytes / GIB:.1f} GiB ({_source(candidate)}); nvidia-smi will show "
        f"{size['nvidia_smi'] / GIB:.1f}\n{'':16}peak {phase}: {_by_size(parts)}"
    )


def _by_size(parts: dict[str, float]) -> str:
    """Return the parts of 0.1 GiB and more as text, the largest first."""
    shown = sorted(((part, size) for part, size in parts.items() if size >= 0.05 * GIB), key=lambda pair: -pair[1])
    return ", ".join(f"{part} {size / GIB:.1f}" for part, size in shown) or "less than 0.1 each"


def _highest(candidate: Candidate) -> tuple[str, dict[str, float]]:
    """Return (when, bytes by part) of the peak."""
    if candidate.answer is None:
        return "by formula", candidate.formula
    phase = max(candidate.answer["total"], key=candidate.answer["total"].get)
    return f"in the {phase} phase", candidate.answer["peak"][phase]


def figures(candidate: Candidate, plan: Plan) -> dict[str, int]:
    """Return the peak bytes of a GPU by several measures.

    Returns: {"allocated", "reserved": torch.cuda's maxima; "nvidia_smi": including memory outside the allocator;
        "least": the same on a full GPU, whose allocator returns unused segments: it decides whether the job fits}.
    """
    outside = sum(plan.allowance.values())
    reserved = min(candidate.reserved, max(plan.limit + plan.margin, candidate.peak))
    return {
        "allocated": candidate.allocated,
        "reserved": reserved,
        "nvidia_smi": reserved + outside,
        "least": candidate.peak + outside,
    }


def _three_figures(candidate: Candidate, plan: Plan) -> list[str]:
    size = {name: f"{value / GIB:.1f}" for name, value in figures(candidate, plan).items()}
    return [
        f"peak of a GPU, {_source(candidate)}:",
        f"  allocated   {size['allocated']:>6} GiB (torch.cuda.max_memory_allocated)",
        f"  reserved    {size['reserved']:>6} GiB (torch.cuda.max_memory_reserved: with unused parts of segments)",
        f"  nvidia-smi  {size['nvidia_smi']:>6} of {plan.gpu_bytes / GIB:.1f} GiB; {size['least']} GiB "
        "suffice on a fuller GPU",
    ]


# --- rejected settings ---


def rejected_ideas(plan: Plan) -> list[str]:
    """Return a line per kind of rejected setting: the smallest one, the missing memory and its largest part."""
    kinds: dict[tuple, list[Candidate]] = {}
    for candidate, _ in plan.rejected:
        kinds.setdefault(_group_key(candidate, plan), []).append(candidate)
    smallest = [min(group, key=lambda c: (plan.exceeds_host_memory(c), c.peak)) for group in kinds.values()]
    smallest.sort(key=lambda c: (c.change, ("none", "optimizer", "all").index(c.setting.offload), c.setting.zero))
    methods = {candidate.method for candidate in [*smallest, *([plan.chosen] if plan.chosen else [])]}
    labels = [c.label if len(methods) > 1 else c.label.partition(" ")[2] for c in smallest]
    return [f"{label}: {_missing_memory(candidate, plan)}" for label, candidate in zip(labels, smallest, strict=True)]


def _group_key(candidate: Candidate, plan: Plan) -> tuple:
    """Return the key by which rejected settings share a line.

    Checkpointing is part of it only if it may be the difference from the chosen setting.
    """
    key = _state_key(candidate)
    like_the_chosen = plan.chosen is not None and key == _state_key(plan.chosen)
    return *key, like_the_chosen and candidate.setting.every > 0


def _state_key(candidate: Candidate) -> tuple:
    """Return the values that place weights and states; the stage only if several GPUs hold all of them."""
    setting = candidate.setting
    stage = setting.zero if setting.ranks > 1 and setting.offload == "none" and not candidate.change else None
    return candidate.method, candidate.change, setting.offload, setting.nvme, stage


def _missing_memory(candidate: Candidate, plan: Plan) -> str:
    """Return the memory that a rejected setting needs, with its largest part or a remedy."""
    if plan.exceeds_host_memory(candidate):
        need = f"{_host_need(candidate)}, {plan.host_memory_limit / GIB:.0f} available"
        part = f"mostly {_host_part(candidate)}"
        return f"{need}; {'--offload_path moves the states to a disk' if _disk_helps(candidate) else part}"
    about, excess = "" if candidate.answer else "about ", max(candidate.peak - plan.limit, 0.05 * GIB)
    part, size = max(_highest(candidate)[1].items(), key=lambda pair: pair[1])
    return f"{about}{candidate.peak / GIB:,.1f} GiB, {excess / GIB:,.1f} too much; mostly {part}, {size / GIB:,.1f}"


def _host_need(candidate: Candidate) -> str:
    return f"{candidate.host_bytes_per_node / GIB:,.0f} GiB of host memory per node"


def _host_part(candidate: Candidate) -> str:
    """Return the largest part of the host memory."""
    inputs = formulas.offloaded_inputs(candidate.shape, candidate.setting) * candidate.setting.ranks_per_node
    return "inputs of layers (--activation_offload)" if 2 * inputs > candidate.host_bytes_per_node else "states"


def _disk_helps(candidate: Candidate) -> bool:
    """Return whether --offload_path would move a candidate's states out of host memory."""
    states = candidate.setting.offload != "none" and _host_part(candidate) == "states"
    flags = {"zero": 3, "offload_path": "/fast/disk"}
    return states and candidates.accepts(candidate.request, candidate.setting.ranks, candidate.gpu, **flags)


# --- warnings and facts ---


def _warnings(candidate: Candidate, plan: Plan) -> list[str]:
    """Return warnings about too little disk or host memory and a base that is barely packed."""
    host, disk = host_memory(candidate, plan), disk_space(candidate, plan)
    lines = _barely_packed(candidate)
    if host["there_bytes"] is not None and host["training_bytes"] + host["saving_bytes"] > host["there_bytes"]:
        lines.append("warning: while saving, the first node needs more host memory than it has")
    if plan.exceeds_disk(candidate):
        short = f"only {disk['free_bytes'] / GIB:.0f} GiB are free"
    elif disk["checkpoint_bytes"] > LARGE_CHECKPOINT and plan.disk_limit is None:
        short = "check the free disk space of the run folder"
    else:
        return lines
    size = 2 * candidate.shape.parameters / GIB
    smaller = f"; --save_only_model true saves checkpoints of {size:.0f} GiB that cannot be resumed"
    if not candidates.accepts(candidate.request, plan.ranks, plan.gpu, save_only_model=True):
        smaller = ""
    return [*lines, f"warning: checkpoints take {disk['needed_bytes'] / GIB:,.0f} GiB: {short}{smaller}"]


def _barely_packed(candidate: Candidate) -> list[str]:
    """Return a warning if quantization leaves most of a base unpacked, else []."""
    bits = next((p.bits for p in candidate.shape.work.products if p.bits < 16), 0) if candidate.shape.work else 0
    packed = (2 - candidate.shape.frozen_bytes) / (2 - formulas.PACKED_BYTES[bits]) if bits else 1.0
    if packed >= 0.5:
        return []
    return [
        f"warning: --load_in_{bits}bit packs {packed:.0%} of the base: fused experts stay in 16 bits, so it saves "
        "little memory compared with LoRA"
    ]


def host_memory(candidate: Candidate, plan: Plan) -> dict[str, int | None]:
    """Return the bytes of host memory per node: needed while training, additional while saving, available."""
    saving = candidate.answer["host_saving"] if candidate.answer else 0
    training, limit = candidate.host_bytes_per_node, plan.host_memory_limit
    return {"training_bytes": training, "saving_bytes": saving, "there_bytes": limit}


def disk_space(candidate: Candidate, plan: Plan) -> dict[str, float | int | None]:
    """Return the bytes of a checkpoint, of final/, of all files that exist at the same time, and of free space."""
    checkpoints, final = candidate.saved(plan.kept)
    return {
        "checkpoint_bytes": candidate.checkpoint_bytes,
        "final_bytes": final,
        "needed_bytes": checkpoints + final,
        "free_bytes": plan.disk_free,
    }


def _margin(candidate: Candidate) -> float:
    return gpu_memory.margin(candidate.setting.zero).high - 1


def _source(candidate: Candidate) -> str:
    if candidate.answer is None:
        return f"by formula with a margin of {_margin(candidate):.0%}" + ("" if candidate.failed else ", not simulated")
    layers = candidate.answer.get("extended_from_layers")
    more = f", + {gpu_memory.COMPILED_MARGIN:.0%} for compiled layers" if candidate.has_compiled_graphs else ""
    return "by simulation" + (f", extrapolated from {layers[0]} and {layers[1]} layers" if layers else "") + more


def facts(candidate: Candidate, plan: Plan) -> dict[str, str]:
    """Return {title: text} about a job: host memory, disk, time, communication. The titles are keys of plan.json."""
    setting, shape = candidate.setting, candidate.shape
    result = {}
    if setting.nvme:
        node = setting.ranks_per_node
        result["disk of a node"] = (
            f"{16 * shape.trainable / plan.ranks * node / GIB:.1f} GiB of optimizer states and gradients"
            + f" and {2 * shape.parameters / plan.ranks * node / GIB:.1f} of weights" * (setting.offload == "all")
            + " in --offload_path; host memory holds only pinned transfer buffers"
        )
    else:
        result["host memory"] = _host(candidate, plan)
    result |= {
        "a GPU's memory": _gpu(plan),
        "disk": _disk(candidate, plan),
        "time": f"{cost.rounded(candidate.seconds)} s per step, {cost.rounded(candidate.tokens_per_second)} tokens/s "
        f"({cost.rounded(candidate.tokens_per_second / plan.ranks)} per GPU), an estimate",
        "error of the time": _error(candidate),
        **({"cost": cost.text(candidate, plan.run)} if plan.run else {}),
        "batch": f"{_count(setting.micro, 'row')} x {_count(setting.accumulation, 'step')} x {_data_ranks(setting)}, "
        f"{setting.tokens:,} tokens per micro batch and GPU",
        "parameters": f"{shape.parameters / 1e9:.3g} billion, {shape.trainable / 1e9:.3g} billion trainable",
        **({"rows": plan.rows} if plan.rows else {}),
        **({} if allocator.expandable_segments() else {"rows of different lengths": _UNEQUAL_ROWS}),
        **({"experts": _EXPERTS.format(shape.experts)} if shape.experts else {}),
        **({"adapts": shape.adapted} if shape.adapted else {}),
        "closed forms": f"{sum(candidate.formula.values()) / GIB:.1f} GiB: {_by_size(candidate.formula)}",
        "sent by each GPU": _sent(candidate, plan),
        "seconds of a step": _parts(candidate, plan),
        "rates": _rates(candidate),
    }
    return result


def _error(candidate: Candidate) -> str:
    """Return the measured error of such estimates."""
    measured, setting = rates.measured(candidate.gpu), candidate.setting
    has = {
        "offload": setting.offload != "none" or setting.activation_offload,
        "preference losses": candidate.request.recipe.objectives != Recipe.objectives,
        "split rows": setting.sp > 1,
        "split matrices": setting.tp > 1,
        "a pipeline": setting.pp > 1,
    }
    untested = [name for name, is_used in has.items() if is_used]
    source = f"with rates measured on this machine's {measured['device_name']}; " if measured else ""
    few = f"; few or none of these runs had {' and '.join(untested)}" if untested else ""
    return source + accuracy.error_range(candidate.gpu, candidate.shape) + few


def _rates(candidate: Candidate) -> str:
    """Return the source of the estimate's rates."""
    if rates.measured(candidate.gpu):
        return f"measured on this machine by `make calibrate`, in {rates.rates_file(candidate.gpu.device_name).parent}"
    page = "benchmarks/results/published-speeds.md"
    return f"shares of the data sheet's values ({page}); `make calibrate` measures them on a GPU"


def _parts(candidate: Candidate, plan: Plan) -> str:
    """Return the parts of a step's time, the largest first."""
    estimate = step.estimate_step(candidate.shape, candidate.setting, plan.gpu, candidate.row_length)
    parts = sorted(vars(estimate).items(), key=lambda part: -part[1])
    return ", ".join(f"{cost.rounded(seconds)} {name}" for name, seconds in parts if seconds >= 0.01 * estimate.seconds)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number > 1)}"


def _data_ranks(setting: formulas.PlanPoint) -> str:
    if not setting.groups or setting.pp > 1:
        return _count(setting.ranks, "GPU")
    together = " and ".join(way.groups for way, _ in setting.groups)
    groups = _count(setting.ranks // setting.ranks_per_row, "group")
    return f"{groups} of {setting.ranks_per_row} GPUs that {together}"


def _host(candidate: Candidate, plan: Plan) -> str:
    """Return text about the host memory that a node needs and has."""
    need = host_memory(candidate, plan)
    parts = []
    if need["training_bytes"] >= GIB / 2:
        when = "training" if candidate.setting.tp == 1 else "each rank loads the full model"
        parts.append(f"{need['training_bytes'] / GIB:,.0f} GiB per node while {when}")
    if need["saving_bytes"] >= GIB / 2:
        parts.append(f"{need['saving_bytes'] / GIB:,.0f} more on the first node while saving")
    if need["there_bytes"] is None:
        available = "not checked; set HOST_MEMORY=GiB"
    else:
        source = {"this machine": " on this machine", "assumed": " assumed by auto; set HOST_MEMORY=GiB"}
        available = f"of {need['there_bytes'] / GIB:.0f}" + source.get(plan.host_memory_source, "")
    return f"{', '.join(parts) or 'nothing besides the processes'} ({available})"


def _disk(candidate: Candidate, plan: Plan) -> str:
    """Return text about the disk space that checkpoints and final/ need, and the free space."""
    disk = disk_space(candidate, plan)
    each, needed = _size(disk["checkpoint_bytes"]), _size(disk["needed_bytes"])
    kept = f"{plan.kept} kept and a new one" if plan.kept else "2 of them; all are kept without --save_total_limit"
    where = " on this machine" if plan.disk_limit is None else ""
    free = "" if disk["free_bytes"] is None else f"; free{where}: {_size(disk['free_bytes'])}"
    return f"{needed} in runs/: checkpoints of {each} ({kept}), final/ {_size(disk['final_bytes'])}{free}"


def _size(count: float) -> str:
    if count < GIB / 10:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / GIB:,.0f} GiB" if count >= 10 * GIB else f"{count / GIB:.1f} GiB"


def _sent(candidate: Candidate, plan: Plan) -> str:
    within, across = formulas.wire_bytes(candidate.shape, candidate.setting)
    if plan.nodes == 1:
        return f"{within / GIB:.1f} GiB per step"
    _, link = rates.link_between(plan.gpu, candidate.setting.ranks_per_node)
    return (
        f"{within / GIB:.1f} GiB per step within the node at {link:g} GB/s and {across / GIB:.1f} GiB to "
        f"other nodes at {plan.gpu.node_gbs:g} GB/s (--node_link_gbs)"
    )


def nothing_fits(plan: Plan) -> str:
    """Return the error message: smallest setting, missing memory, number of GPUs that suffice."""
    nearest = plan.nearest
    if nearest is None:
        return "nothing fits."
    missing = (nearest.peak - plan.limit) / GIB
    if nearest.peak <= plan.limit:
        need = f"{_host_need(nearest)}, {plan.host_memory_limit / GIB:.0f} available"
        remedy = "set --offload_path on a fast local disk or use more" if _disk_helps(nearest) else "use more"
        return f"nothing fits: {nearest.label} fits the GPU but needs {need}; {remedy} nodes{_alternatives(plan)}."
    gpus = plan.sufficient_gpus
    remedy = f"{gpus} GPUs suffice by formula" if gpus else "4096 of these GPUs do not suffice by formula"
    if plan.packs_too_much:
        packed = nearest.shape.frozen_bytes * nearest.shape.frozen
        remedy = f"each GPU packs the full base at load time, {packed / GIB:.1f} GiB, so more GPUs do not help"
    shorter = f"; --max_length {plan.longest} fits on these GPUs" if plan.longest else ""
    return (
        f"nothing fits: the smallest setting is {nearest.label} with {nearest.peak / GIB:.1f} GiB, {missing:.1f} GiB "
        f"too much for {plan.gpu.device_name}; {remedy}{shorter}{_alternatives(plan)}."
    )


def _alternatives(plan: Plan) -> str:
    """Return a clause about the adapters that would fit, or how to try them."""
    if fit := [
        name if name.startswith("without") else f"{name} ({hint})"
        for name, (candidate, hint) in plan.alternatives.items()
        if candidate
    ]:
        return f"; {' and '.join(fit)} would fit by formula"
    method = candidates.method_of(plan.nearest.method)
    smaller = [] if method.takes_adapters else [candidates.method_of(name).title for name in method.recipe.smaller]
    untried = smaller and not {*smaller} & plan.alternatives.keys()
    return f"; --method auto also tries {' and '.join(smaller)}" if untried else ""


def write(plan: Plan, folder: Path) -> None:
    """Write plan.json, plan.md and plan.png into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_json(folder / "plan.json", as_json(plan))
    paths.write_text(folder / "plan.md", _markdown(plan))
    best = plan.chosen or plan.nearest
    if best is not None:
        by_formula = {"peak by formula": {part: int(size) for part, size in best.formula.items()}}
        peak = best.answer["peak"] if best.answer else by_formula
        title = f"Predicted peak of a GPU\n{best.label}"
        memory_figure.plot(peak, folder / "plan.png", title, (plan.limit, f"limit {plan.limit / GIB:.1f} GiB"))


def _markdown(plan: Plan) -> str:
    """Return the text of plan.md: the terminal output and further facts."""
    best = plan.chosen or plan.nearest
    parts = ["# Plan", "![memory by phase](plan.png)", _block(text(plan))]
    if plan.chosen is None:
        parts.append(nothing_fits(plan))
    if best is not None:
        table = memory_figure.table(best.answer["peak"]) if best.answer else ""
        parts += [f"## {best.label}", _block("\n".join([*_three_figures(best, plan), "", table]))]
        parts.append("\n".join(f"- {name}: {value}" for name, value in facts(best, plan).items()))
    if ideas := rejected_ideas(plan):
        parts += [f"## Rejected: {REJECTED}", "\n".join(f"- {line}" for line in ideas)]
    offers = [candidate for candidate, _ in plan.alternatives.values() if candidate]
    if offers:
        parts += ["## Alternatives", _block("\n".join(run_line.command_of(candidate) for candidate in offers))]
    parts += ["## Search", _block("\n".join([*plan.notes, f"{plan.seconds:.0f} s"]))]
    return "\n\n".join(parts) + "\n"


def _block(body: str) -> str:
    body = "\n".join(line.rstrip() for line in body.strip("\n").splitlines())
    return f"```\n{body.strip()}\n```"


def as_json(plan: Plan) -> dict:
    """Return the plan as JSON data."""
    best = plan.chosen or plan.nearest
    return {
        "gpu": asdict(plan.gpu),
        "gpus": plan.ranks,
        "gpus_of_a_node": plan.node,
        "limit_bytes": plan.limit,
        "kept_free_bytes": plan.allowance,
        "margin_bytes": plan.margin,
        "chosen": _entry(plan.chosen, plan),
        "facts": facts(plan.chosen, plan) if plan.chosen else None,
        "nearest": _entry(plan.nearest, plan),
        "host_limit_bytes": None if plan.host_memory_source == "assumed" else plan.host_memory_limit,
        "host_memory": best and host_memory(best, plan),
        "disk": best and disk_space(best, plan),
        "cost": best and plan.run and cost.price_run(best, plan.run),
        "would_pay": [one.text for one in plan.advices],
        "instead": {name: _entry(candidate, plan) for name, (candidate, _) in plan.alternatives.items()},
        "gpus_that_would_do": plan.sufficient_gpus,
        "seconds": round(plan.seconds, 1),
        "rejected": [_entry(candidate, plan, why) for candidate, why in plan.rejected],
    }


def _entry(candidate: Candidate | None, plan: Plan, why: str = "") -> dict | None:
    """Return a candidate as JSON data, with the ranks that split tokens, matrices and layers."""
    if candidate is None:
        return None
    setting = candidate.setting
    return {
        "label": candidate.label,
        "method": candidate.method,
        **{name: value for name, value in vars(setting).items() if name != "groups"},
        "sp": setting.sp,
        "tp": setting.tp,
        "pp": setting.pp,
        "peak_bytes": candidate.peak,
        **{f"{name}_bytes": size for name, size in figures(candidate, plan).items()},
        "source": _source(candidate),
        "formula": {part: int(size) for part, size in candidate.formula.items()},
        "simulation": candidate.answer,
        "seconds_per_step": round(candidate.seconds, 4),
        "tokens_per_second": round(candidate.tokens_per_second),
        "why_not": why,
        "command": run_line.command_of(candidate),
    }
