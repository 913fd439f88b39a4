"""List the settings to search, fastest first, with flags, predicted memory and time."""

import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from zerofit.base import hardware
from zerofit.base.errors import EXIT_CODES, UserError
from zerofit.config import nvme, parse, resolve
from zerofit.config.offload import hpz
from zerofit.job import parallel_dims, program
from zerofit.job.batch_size import divisors
from zerofit.job.recipe import BUNDLED_MODEL, Recipe
from zerofit.job.request import FLAG, Request
from zerofit.job.settings import as_typed
from zerofit.model import attention, freezing, gradient_checkpointing, load, quantization, tiled_mlp
from zerofit.model.kernels import liger
from zerofit.model.weights import config_json
from zerofit.parallel import whole_layers
from zerofit.plan import formulas, gpu_memory
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.formulas import Checkpointing, PlanPoint, Shape
from zerofit.plan.speed import kernels, step

ROOM_BY_FORMULA = "enough free memory by formula"  # why a job is not simulated
ESTIMATE_MESSAGE = "simulation failed: {}; this is an estimate by formula with a margin of {:.0%}"
SMALLER_STATES = [("optim", "adamw_bnb_8bit"), ("pure_bf16", True)]
DATA_PLACEHOLDER = "not-named-yet"  # value of --data, which a plan does not need


class NothingFits(UserError):
    """No setting fits into the memory of the GPU (or of the host, for offloaded states)."""

    exit_code = EXIT_CODES["out of memory"]


@dataclass(frozen=True)
class Method:
    """A way to train that a plan considers: a recipe or a variant of a recipe."""

    title: str  # name in sentences
    recipe: Recipe
    arguments: Mapping[str, Any]  # added to the flags

    @property
    def takes_adapters(self) -> bool:
        return "adapter" in self.recipe.own_arguments


EVERY_LAYER = Checkpointing(1)


def methods(*more: Recipe) -> dict[str, Method]:
    """Return the methods by name: the recipes of the kit and `more`, with their variants."""
    by_name = {}
    for recipe in [*program.kit().values(), *more]:
        by_name[recipe.name] = Method(recipe.title, recipe, {})
        by_name |= {one.method: Method(one.title, recipe, one.arguments) for one in recipe.variants if one.method}
    return by_name


def method_of(name: str) -> Method:
    """Return a method by name, also from the recipe that this process runs or starts."""
    running = program.current()
    return methods(*([running.recipe] if running else []))[name]


def recipe_of(method: str) -> Recipe:
    return method_of(method).recipe


def methods_to_try(method: str, recipe: Recipe | str, flags: list[str]) -> list[str]:
    """Return the methods requested by --method, or by the recipe and the flags of its variants.

    Raises: UserError for an unknown method, or one that contradicts the flags of a variant, such as --load_in_4bit.
    """
    recipe = program.recipe_of(recipe)
    known = {name: one for name, one in methods(recipe).items() if not one.recipe.stages}
    if method not in ("", *known, "auto"):
        raise UserError(f"--method {method}: must be one of {', '.join([*known, 'auto'])}.")
    if recipe.stages:
        raise UserError(
            f"{program.display_path(recipe)}: cannot be searched; to find the fastest pipeline, plan recipes/sft.py on "
            f"several nodes (NODES=2); to check one, run `zerofit {recipe.name} --plan true --gpu_type h100-80g`."
        )
    if not method:
        variants = [one for one in recipe.variants if one.method and _have_values(recipe, one.arguments, flags)]
        return [variants[0].method if variants else recipe.name]
    if method == "auto":
        return [recipe.name, *recipe.smaller]
    _check_contradictions(method, known, flags)
    return [method]


def _have_values(recipe: Recipe, arguments: Mapping[str, Any], flags: list[str]) -> bool:
    return all(parse.value_of(recipe, flags, name) == value for name, value in arguments.items())


def _check_contradictions(method: str, known: dict[str, Method], flags: list[str]) -> None:
    """Raise UserError for flags that turn the method off or select a method that needs less memory."""
    chosen = known[method]
    for name, value in chosen.arguments.items():
        if (flag := parse.value_of(chosen.recipe, flags, name)) is not None and flag != value:
            raise UserError(f"--method {method} and --{name} {as_typed(name, flag)} contradict each other: remove one.")
    for other in chosen.recipe.smaller:
        arguments = known[other].arguments
        if other != method and arguments and _have_values(known[other].recipe, arguments, flags):
            typed = " ".join(f"--{name} {as_typed(name, value)}" for name, value in arguments.items())
            raise UserError(f"--method {method} and {typed} contradict each other: use --method {other}.")


def gpus_as_text(ranks: int, node: int) -> str:
    """Return the GPUs as text: "4", "2 nodes x 8", or "12 (2 nodes)" if the nodes differ."""
    nodes = math.ceil(ranks / node)
    if nodes == 1:
        return str(ranks)
    return f"{ranks} ({nodes} nodes)" if ranks % nodes else f"{nodes} nodes x {ranks // nodes}"


def candidates(
    method: str, request: Request, ranks: int, gpu, change: tuple = (), node: int = gpu_memory.GPUS_PER_NODE
) -> list[Candidate]:
    """Return all settings that the request leaves open, sorted by estimated time.

    Args: change: entry of SMALLER_STATES to add, or (); node: GPUs per node.
    Raises: UserError if the request is invalid or leaves no setting.
    """
    disk = request.get("offload_path") if request.source.get("offload_path") == FLAG else None
    request = method_request(request, method)
    request = request.put(**dict([change])) if change else request
    result, error, first = [], None, None
    for group in _open_groups(request, ranks, node):
        grouped = request.put(**group)
        if first:
            grouped = grouped.put(effective_batch_size=first.effective_batch_size)
        try:
            base = resolve.resolve(grouped, ranks, gpu)
            _check_groups(base, node)
            resolve.resolve_for_model(base)
            if first is None:
                first, shape = base, shape_of(base, gpu)
            result += _of_group(base, shape, gpu, node, disk, bool(group))
        except UserError as refused:
            error = error or refused
    if not result:
        raise error
    result = [replace(candidate, method=method, change=change) for candidate in result]
    return sorted(result, key=lambda c: (round(c.seconds, 4), c.setting.zero))


def find(method: str, request: Request, plan: Plan, ranks: int | None = None) -> list[Candidate]:
    """Return `candidates` on `ranks` GPUs of a plan (None: all); [] if the method or the request allows no setting."""
    try:
        return candidates(method, request, ranks or plan.ranks, plan.gpu, node=plan.node)
    except UserError:
        return []


def accepts(request: Request, ranks: int, gpu, **more) -> bool:
    """Return whether a job on `ranks` GPUs can start with the request and these additional arguments."""
    try:
        resolve.resolve_for_model(resolve.resolve(request.put(**more), ranks, gpu))
    except UserError:
        return False
    return True


def _of_group(base, shape: Shape, gpu, node: int, disk: str | None, splits: bool) -> list[Candidate]:
    """Return the candidates with the groups of `base`, the Settings of a request.

    The request is resolved once per place of states and kind of checkpointing; micro batches are arithmetic.
    Args: node: GPUs per node; disk: --offload_path, None if not set; splits: see `_open`.
    Raises: UserError if the request leaves no setting.
    """
    result, error = [], None
    places, kinds, micros = _open(base, disk, splits)
    plain = drop_flags(base.request, "search_batch_size", "offload_path")
    is_set_by_user = bool(set(gradient_checkpointing.ARGUMENTS) & plain.values.keys())
    for (zero, offload, on_disk), kind in itertools.product(places, kinds if micros else []):
        batch = {"per_device_train_batch_size": micros[0], "effective_batch_size": base.effective_batch_size}
        request = plain.put(zero=zero, offload=offload, **batch)
        request = request if is_set_by_user else request.put(**kind.flags)
        request = request.put(offload_path=disk) if on_disk and disk else request
        try:
            settings = resolve.resolve(request, base.world_size, gpu)
        except UserError as refused:
            error = error or refused
            continue
        job = with_formulas(request, plan_point_of(settings, node, shape), shape, settings, gpu)
        result += variants(job, settings, micros)
    if not result:
        raise error or UserError("these flags exclude every setting of the plan; remove some of them.")
    return result


def variants(
    job: Candidate, settings, micros: list[int] | None = None, kinds: list[Checkpointing] | None = None
) -> list[Candidate]:
    """Return a job with each of these micro batches and kinds of checkpointing, at the same effective batch.

    Args: settings: the job's settings; they may differ in micro batch and checkpointing. micros, kinds: None keeps the
        job's value without adding flags.
    """
    result, s = [], job.setting
    request = job.request if micros is None else drop_flags(job.request, "search_batch_size")
    for micro, kind in itertools.product(micros or [s.micro], kinds or [None]):
        tokens = s.tokens // s.micro * micro
        tiles = tiled_mlp.automatic(tokens, job.shape.hidden) if settings.tiled_mlp == "auto" else s.tiles
        setting = replace(
            s, micro=micro, tokens=tokens, accumulation=s.micro * s.accumulation // micro, tiles=tiles,
            whole_layers=whole_layers.largest(settings, tokens),
        )  # fmt: skip
        flags: dict[str, Any] = {}
        if micros is not None:
            flags |= {"per_device_train_batch_size": micro, "effective_batch_size": job.effective_batch}
        if kind is not None:
            flags |= kind.flags
            setting = replace(setting, every=kind.every, selective=kind.selective, activation_offload=kind.offloaded)
        result.append(with_formulas(request.put(**flags), setting, job.shape, settings, job.gpu))
    return result


def candidate_of(settings, gpu) -> Candidate:
    """Return the job as a candidate. gpu: None for a CPU, whose time is not estimated."""
    request = for_simulation(settings.request)
    return with_formulas(request, plan_point_of(settings), shape_of(settings, gpu), settings, gpu)


def formulas_suffice(candidate: Candidate) -> bool:
    """Return whether the closed forms may decide that a job fits: a recipe of the kit without full attention matrices.

    At stage 3, gathered experts of a mixture depend on the engine, and 16-bit states are stepped in other pieces, and
    an fp32 engine holds other buffers for 16-bit weights, so these jobs are simulated.
    """
    shape, request, zero = candidate.shape, candidate.request, candidate.setting.zero
    is_known = not candidate.setting.fp32_engine and (zero != 3 or not (shape.experts or request.get("pure_bf16")))
    is_known = is_known and not any(request.get(flag) for flag in freezing.FLAGS)  # forms: full or LoRA
    return is_known and not shape.scores and program.custom_program(request.recipe) is None


def with_formulas(request: Request, setting: PlanPoint, shape: Shape, settings, gpu) -> Candidate:
    """Return a candidate with bytes and seconds by the closed forms; for a pipeline, the bytes of its fullest stage.

    Args: settings: the request's Settings; they may differ in the values of `setting`.
    """
    stage = None
    if setting.pp > 1:
        tied = config_json.ties(load.load_config(settings))
        by_stage = formulas.stages(shape, setting, settings, settings.fused_loss, tied)
        stage, parts = max(enumerate(by_stage), key=lambda stage: sum(stage[1].values()))
    else:
        parts = formulas.memory(shape, setting, settings, settings.fused_loss)
    seconds = step_seconds(shape, setting, gpu, settings.max_length) if gpu else 0.0
    length, name = settings.max_length, settings.recipe.name
    return Candidate(request, name, setting, parts, seconds, shape, gpu, stage=stage, row_length=length)


def step_seconds(shape: Shape, setting: PlanPoint, gpu, sequence: int) -> float:
    """Return the estimated seconds of an optimizer step, including the recomputed tiles of MLPs.

    Each tile is recomputed once: the time to recompute all layers times the MLP's share of their products.
    Args: sequence: tokens per row.
    """
    seconds = step.seconds(shape, setting, gpu, sequence)
    if setting.tiles == 1:
        return seconds
    plain = replace(setting, selective=False, activation_offload=False)
    again, once = (step.seconds(shape, replace(plain, every=n), gpu, sequence) for n in (1, 0))
    mlp = 6 * shape.hidden * shape.intermediate
    layer = 2 * shape.parameters / shape.layers + 2 * shape.heads * shape.head_dim * sequence
    return seconds + (again - once) * min(1.0, mlp / layer)


def pipeline_candidates(
    method: str, best: Candidate, request: Request, plan: Plan, size: int, micro: int, accumulation: int
) -> list[Candidate]:
    """Return pipelines of `size` stages, without and with checkpointing; [] if model or request do not support them.

    Args: method: a recipe with stages; best: a candidate for full fine-tuning of the same model; accumulation: micro
        batches per step.
    """
    result = []
    batch = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    cut = {way.flag: size for way in parallel_dims.registered() if way.splits == "layers"}
    for checkpointing in (False, True):
        try:
            staged = method_request(request, method).put(zero=1, gradient_checkpointing=checkpointing, **cut, **batch)
            settings = resolve.resolve(staged, plan.ranks, plan.gpu)
            resolve.resolve_for_model(settings)
        except UserError:
            continue
        result.append(with_formulas(staged, plan_point_of(settings, plan.node), best.shape, settings, plan.gpu))
    return result


def first_settings(method: str, request: Request, ranks: int, gpu, node: int):
    """Return the Settings of the request with the first searched group size that it allows.

    Raises: UserError if it allows none.
    """
    request, error = method_request(request, method), None
    for group in _open_groups(request, ranks, node):
        try:
            return resolve.resolve(request.put(**group), ranks, gpu)
        except UserError as refused:
            error = error or refused
    raise error


def _open_groups(request: Request, ranks: int, node: int) -> list[dict[str, int]]:
    """Return the group sizes to search, as arguments; {} keeps the request's groups.

    Groups over nodes are searched only if groups within a node would outnumber the rows of a step.
    """
    searched = [way for way in parallel_dims.registered() if way.searched]
    if any(request.get(way.flag) is not None for way in searched):
        return [{}]
    sizes = [(way.flag, size) for way in searched for size in way.searched]
    sizes = [(name, size) for name, size in sizes if min(ranks, node) % size == 0 and ranks % size == 0]
    rows, largest = request.get("effective_batch_size"), max((size for _, size in sizes), default=1)
    over_nodes = groups_over_nodes(ranks, node) if rows and rows < ranks // largest else []
    return [{}, *({name: size} for name, size in sizes), *over_nodes]


def groups_over_nodes(ranks: int, node: int) -> list[dict[str, int]]:
    """Return the sizes of groups that span all GPUs of several nodes, as arguments."""
    sizes = [size for size in range(2 * node, ranks + 1, node) if ranks % size == 0]
    return [{way.flag: size} for way in parallel_dims.registered() if way.fills_nodes for size in sizes]


def _check_groups(settings, node: int) -> None:
    """Raise UserError for groups within a node whose size does not divide its GPUs."""
    local = min(settings.world_size, node)
    wrong = [
        (f"--{way.flag}", size)
        for way, size in parallel_dims.active(settings.values)
        if not way.fits_nodes(size, local)
    ]
    if settings.world_size > node and local % hpz(settings):  # on one node config/offload.py refuses it
        wrong.append(("zero_hpz_partition_size", hpz(settings)))
    if wrong:
        name, size = wrong[0]
        raise UserError(
            f"{name} {size}: a group must be on one node, so the size must divide the {local} GPUs per node of this "
            "plan (set by NODES= and GPUS=)."
        )


def method_request(request: Request, method: str) -> Request:
    """Return the request with the method's recipe and arguments, without arguments that a plan searches.

    Raises: UserError for an argument that the recipe does not have.
    """
    if request.recipe != recipe_of(method):
        request = parse.request(recipe_of(method), request.flags())
    if request.get("zero") == "auto":
        request = drop_flags(request, "zero")
    if "offload" not in request.values:  # candidates() adds it to the settings that offload to disk
        request = drop_flags(request, "offload_path")
    added = {name: value for name, value in method_of(method).arguments.items() if request.get(name) is None}
    request = request.put(**added)
    return request.put(data=[DATA_PLACEHOLDER]) if lacks_data(request) else request  # a plan does not need rows


def drop_flags(request: Request, *names: str) -> Request:
    """Return the request without these command line flags; values of a YAML file stay, as in the printed command."""
    return request.drop(*(name for name in names if request.source.get(name) == FLAG))


def lacks_data(request: Request) -> bool:
    """Return whether the request sets a model but no data."""
    return request.get("model") not in (None, BUNDLED_MODEL) and not request.get("data")


def shape_of(settings, gpu: hardware.Gpu | None = None) -> Shape:
    """Return the shape of a job's model. gpu: the GPU that may run Liger kernels, None: without them."""
    resolve.resolve_for_model(settings)
    model, config = load.check_model(settings), load.load_config(settings)
    has_liger = gpu is not None and liger.will_run(settings, gpu.device_name)
    cast = settings.deepspeed is not None and settings.precision != "fp32"  # DeepSpeed casts to 16 bits
    fp32 = load.weight_dtype(settings) == "float32" and not cast
    bits = quantization.bits(settings)
    width = 4.0 if fp32 else 2.0
    if each := formulas.PACKED_BYTES.get(bits):  # embeddings, head and fused experts stay in 16 bits
        packed = quantization.packed_weights(model) / sum(p.numel() for p in model.parameters() if not p.requires_grad)
        width = each * packed + 2.0 * (1 - packed)
    one_by_one = gpu is not None and attention.why_one_by_one(settings, config) is not None
    shape = formulas.shape(config, model, width, bits or 16)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    scores = (formulas.CAPPED_SCORES if capped else formulas.SCORES) * (settings.attn_implementation == "eager")
    return replace(shape, liger=has_liger, one_by_one=one_by_one, scores=scores)


def less_checkpointing(settings) -> list[Checkpointing]:
    """Return the kinds of gradient checkpointing that recompute less than every layer.

    Selective checkpointing is left out for adapters: they double the products of a layer, whose saved results would
    take as much memory as all activations.
    """
    selective = [] if settings.trains_adapter else [Checkpointing(1, selective=True)]
    return [Checkpointing(0), *selective, Checkpointing(2)]


def checkpointing_of(settings) -> Checkpointing:
    every = settings.gradient_checkpointing_every if settings.gradient_checkpointing else 0
    selective = every > 0 and settings.gradient_checkpointing_policy == "selective"
    return Checkpointing(every, selective, settings.activation_offload)


def _open(base, disk: str | None, splits: bool) -> tuple[list, list, list]:
    """Return (places of states, kinds of checkpointing, micro batches) to search; one each if the user set it.

    A place is (ZeRO stage, --offload, whether states are on `disk`).
    Args: splits: searched groups of several ranks: search only micro batch 1 with checkpointing.
    """
    disk = disk or _disk_of(base)
    stages = [base.zero] if is_set(base, "zero") else [0, 1, 2, 3]
    if is_set(base, "offload"):
        offloads = [(base.offload, bool(disk))]
    else:
        offloads = [("none", False), ("optimizer", False), ("all", False)]
        offloads += [("optimizer", True), ("all", True)] * bool(disk)
    places = [
        (zero, offload, on_disk)
        for zero, (offload, on_disk) in itertools.product(stages, offloads)
        if _is_sensible(base, zero, offload) and (zero == 3 or not on_disk)
    ]
    if any(is_set(base, name) for name in gradient_checkpointing.ARGUMENTS):
        checkpointing = [checkpointing_of(base)]
    else:
        checkpointing = [*less_checkpointing(base), EVERY_LAYER, Checkpointing(1, offloaded=True)]
    per_rank = base.effective_batch_size // base.data_ranks
    if is_set(base, "per_device_train_batch_size"):
        micros = [base.per_device_train_batch_size]
    elif is_set(base, "gradient_accumulation_steps"):
        micros = [per_rank // base.gradient_accumulation_steps]
    else:
        micros = divisors(per_rank)
    if splits:
        micros = [n for n in micros if n == 1]
        checkpointing = [c for c in checkpointing if c.every == 1 and not c.selective] or checkpointing
    return places, checkpointing, micros


def _is_sensible(base, zero: int, offload: str) -> bool:
    """Return whether to search a stage with an offload."""
    if (offload == "all" and zero != 3) or (offload != "none" and zero == 0):
        return False
    if base.world_size == 1 and zero and offload == "none" and not is_set(base, "zero"):
        return base.precision != "fp32" and zero == 1  # one rank: only 16-bit weights with a master copy differ
    return True


def is_set(base, name: str) -> bool:
    """Return whether the user set the argument by a flag, a file or a preset."""
    source = base.source[name]
    return source in (FLAG, "deepspeed JSON", base.config) or source.startswith("preset")


def plan_point_of(settings, node: int | None = None, shape: Shape | None = None) -> PlanPoint:
    """Return the PlanPoint of a job.

    Args: node: GPUs per node, None: the local world size; shape: shape of the model if the settings are not resolved
        for it.
    """
    checkpointing, tokens = checkpointing_of(settings), whole_layers.tokens_of(settings)
    tiles = settings.tiled_mlp
    if tiles == "auto":
        tiles = tiled_mlp.automatic(tokens, shape.hidden) if shape else 1
    return PlanPoint(
        zero=settings.zero,
        offload=settings.offload,
        every=checkpointing.every,
        micro=settings.per_device_train_batch_size,
        tokens=tokens,
        accumulation=settings.gradient_accumulation_steps,
        ranks=settings.world_size,
        activation_offload=checkpointing.offloaded,
        nvme=bool(_disk_of(settings)),
        node=node or int(os.environ.get("LOCAL_WORLD_SIZE") or gpu_memory.GPUS_PER_NODE),
        hpz=hpz(settings),
        forwards=settings.objective.extra_forwards(settings),
        whole_layers=whole_layers.largest(settings, tokens),
        selective=checkpointing.selective,
        fp32_weights=settings.keeps_fp32 and settings.precision != "fp32" and load.weight_dtype(settings) == "float32",
        fp32_engine=bool(settings.zero) and settings.precision == "fp32" != settings.compute_dtype,
        background_save=settings.save_in_background,
        groups=tuple(parallel_dims.active(settings.values)),
        arithmetic=math.prod(technique.seconds(settings) for technique in resolve.techniques_of(settings)),
        tiles=tiles,
        kernels=kernels.kernels_for(settings),
    )


def _disk_of(settings) -> str | None:
    """Return the folder for offloaded states, from flag, YAML or JSON; None if not set."""
    return next(iter(nvme.paths_of(settings.deepspeed).values()), None)


# Arguments that do not change memory.
WITHOUT_BYTES = (
    *("plan", "show", "gpu_type", "gpus", "ignore_plan", "memory_limit", "output_dir", "resume_from_checkpoint"),
    *("on_oom", "max_restarts", "hang_timeout", "on_nan", "max_nan_steps", "canary", "ignore_resume_mismatch"),
    "verbose",
)


def for_simulation(request: Request) -> Request:
    """Return the request without arguments that do not change memory, so that such jobs share a cached answer.

    Offload to a disk is simulated as offload to host memory.
    """
    return drop_flags(request.drop(*WITHOUT_BYTES), "offload_path")
