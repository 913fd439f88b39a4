"""List the settings that a plan tries, fastest first, with flags, predicted memory and time."""

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
from zerofit.job import groups, program
from zerofit.job.batch_size import divisors
from zerofit.job.recipe import BUNDLED_MODEL, Recipe
from zerofit.job.request import FLAG, Request
from zerofit.job.settings import as_typed
from zerofit.model import attention, freezing, gradient_checkpointing, load, quantization, tiled_mlp
from zerofit.model.kernels import liger
from zerofit.parallel import whole_layers
from zerofit.plan import formulas, gpu_memory
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.formulas import Setting, Shape
from zerofit.plan.speed import kernels, step

ENOUGH = "the closed forms leave room"  # why a job is not simulated

ESTIMATE = "the exact check failed: {}; this is an estimate by formula, with a margin of {:.0%}"

SMALLER_STATES = [("optim", "adamw_bnb_8bit"), ("pure_bf16", True)]

UNNAMED = "not-named-yet"  # placeholder for --data, which a plan does not need


class NothingFits(UserError):
    """No setting fits into the memory of the GPU (or of the host, for what is offloaded)."""

    exit_code = EXIT_CODES["out of memory"]


@dataclass(frozen=True)
class Method:
    """A way to train that a plan looks at: a recipe, or a variant of one."""

    title: str  # as in sentences
    recipe: Recipe
    arguments: Mapping[str, Any]  # that it adds to the flags

    @property
    def takes_adapters(self) -> bool:
        return "adapter" in self.recipe.own_arguments


@dataclass(frozen=True)
class Checkpointing:
    """Gradient checkpointing: which layers are computed again in the backward."""

    every: int  # every n-th layer, 0: none
    selective: bool = False  # the results of matrix products and attention are kept
    offloaded: bool = False  # the inputs of these layers are in host memory

    @property
    def flags(self) -> dict:
        """Return the recipe's flags that differ from every layer, and --gradient_checkpointing."""
        more = {"gradient_checkpointing_every": self.every} if self.every > 1 else {}
        more |= {"gradient_checkpointing_policy": "selective"} if self.selective else {}
        more |= {"activation_offload": True} if self.offloaded else {}
        return {"gradient_checkpointing": bool(self.every)} | more


EVERY_LAYER = Checkpointing(1)


def methods(*more: Recipe) -> dict[str, Method]:
    """Return the methods by name: the recipes of the kit and these, with their variants."""
    found = {}
    for recipe in [*program.kit().values(), *more]:
        found[recipe.name] = Method(recipe.title, recipe, {})
        found |= {one.method: Method(one.title, recipe, one.arguments) for one in recipe.variants if one.method}
    return found


def method_of(name: str) -> Method:
    """Return a method by its name, also of the recipe that this process runs or starts."""
    running = program.current()
    return methods(*([running.recipe] if running else []))[name]


def recipe_of(method: str) -> Recipe:
    return method_of(method).recipe


def methods_to_try(method: str, recipe: Recipe | str, flags: list[str]) -> list[str]:
    """Return the methods that --method, or else the recipe and the flags of its variants, ask for.

    Raises: UserError for an unknown method, or one that contradicts the flags of a variant, such as --load_in_4bit.
    """
    recipe = program.recipe_of(recipe)
    known = {name: found for name, found in methods(recipe).items() if not found.recipe.stages}
    if method not in ("", *known, "auto"):
        raise UserError(f"--method {method}: must be one of {', '.join([*known, 'auto'])}.")
    if recipe.stages:
        raise UserError(
            f"{program.shown(recipe)}: a plan of recipes/sft.py on several nodes (NODES=2) names the fastest pipeline; "
            f"`zerofit {recipe.name} --plan true --gpu_type h100-80g` prices one."
        )
    if not method:
        named = [one for one in recipe.variants if one.method and _are_given(recipe, one.arguments, flags)]
        return [named[0].method if named else recipe.name]
    if method == "auto":
        return [recipe.name, *recipe.smaller]
    _check_contradictions(method, known, flags)
    return [method]


def _are_given(recipe: Recipe, arguments: Mapping[str, Any], flags: list[str]) -> bool:
    return all(parse.given(recipe, flags, name) == value for name, value in arguments.items())


def _check_contradictions(method: str, known: dict[str, Method], flags: list[str]) -> None:
    """Refuse a method with flags that turn it off, and one with the flags of a method that needs less memory."""
    chosen = known[method]
    for name, value in chosen.arguments.items():
        if (said := parse.given(chosen.recipe, flags, name)) is not None and said != value:
            raise UserError(
                f"--method {method} and --{name} {as_typed(name, said)} contradict each other: leave one out."
            )
    for other in chosen.recipe.smaller:
        arguments = known[other].arguments
        if other != method and arguments and _are_given(known[other].recipe, arguments, flags):
            typed = " ".join(f"--{name} {as_typed(name, value)}" for name, value in arguments.items())
            raise UserError(f"--method {method} and {typed} contradict each other: use --method {other}.")


def gpus_as_text(ranks: int, node: int) -> str:
    """Return the GPUs as text: "4", "2 nodes x 8", or "12 (2 nodes)" if the nodes differ."""
    nodes = math.ceil(ranks / node)
    if nodes == 1:
        return str(ranks)
    return f"{ranks} ({nodes} nodes)" if ranks % nodes else f"{nodes} nodes x {ranks // nodes}"


def candidates(
    method: str, request: Request, ranks: int, gpu, change: tuple = (), node: int = gpu_memory.GPUS_OF_A_NODE
) -> list[Candidate]:
    """Return all settings that the request leaves open, the fastest (by estimate) first.

    Args: change: a pair of SMALLER_STATES to add, or (); node: GPUs of a node.
    Raises: UserError if the request itself is wrong, or no setting is left.
    """
    disk = request.get("offload_path") if request.source.get("offload_path") == FLAG else None
    request = planned(request, method)
    request = request.put(**dict([change])) if change else request
    result, error, first = [], None, None
    for group in _open_groups(request, ranks, node):
        own = request.put(**group)
        if first:
            own = own.put(effective_batch_size=first.effective_batch_size)
        try:
            base = resolve.resolve(own, ranks, gpu)
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


def _of_group(base, shape: Shape, gpu, node: int, disk: str | None, splits: bool) -> list[Candidate]:
    """Return the candidates with the groups of `base`, the Settings of a request.

    The request is resolved once for each place of states and kind of checkpointing; micro batches are arithmetic.
    Args: node: GPUs of a node; disk: the flag --offload_path, None: it is not given; splits: as of `_open`.
    Raises: UserError if the request leaves none.
    """
    found, error = [], None
    places, kinds, micros = _open(base, disk, splits)
    for (zero, offload, on_disk), kind in itertools.product(places, kinds if micros else []):
        request = _requested(base, zero, offload, kind, micros[0])
        request = request.put(offload_path=disk) if on_disk and disk else request
        try:
            settings = resolve.resolve(request, base.world_size, gpu)
        except UserError as refused:
            error = error or refused
            continue
        job = with_formulas(request, setting_of(settings, node, shape), shape, settings, gpu)
        found += varied(job, settings, micros)
    if not found:
        raise error or UserError("these flags leave no setting to plan.")
    return found


def varied(
    job: Candidate, settings, micros: list[int] | None = None, kinds: list[Checkpointing] | None = None
) -> list[Candidate]:
    """Return a job in each of these micro batches and kinds of checkpointing, with the same effective batch.

    Args: settings: those of the job, or such as differ from it in these two alone. None: as the job has it, and its
        request has no flags for it.
    """
    found, s = [], job.setting
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
            flags |= {"per_device_train_batch_size": micro, "effective_batch_size": job.rows_of_a_step}
        if kind is not None:
            flags |= kind.flags
            setting = replace(
                setting, every=kind.every, selective=kind.selective, activation_offload=kind.offloaded
            )  # fmt: skip
        found.append(with_formulas(request.put(**flags), setting, job.shape, settings, job.gpu))
    return found


def of_settings(settings, gpu) -> Candidate:
    """Return the job as a candidate. gpu: None for a CPU, which has no time."""
    request = for_simulation(settings.request)
    return with_formulas(request, setting_of(settings), shape_of(settings, gpu), settings, gpu)


def is_described(candidate: Candidate) -> bool:
    """Return whether the closed forms may decide that a job fits: of a kit's recipe, without whole attention matrices.

    At stage 3 the weights of a mixture's experts that autograd keeps gathered depend on the engine, and 16-bit states
    are stepped in other pieces: a simulation says.
    """
    shape, request = candidate.shape, candidate.request
    is_known = candidate.setting.zero != 3 or not (shape.experts or request.get("pure_bf16"))
    is_known = is_known and not any(request.get(flag) for flag in freezing.FLAGS)  # forms are of all weights or a LoRA
    return is_known and not shape.scores and program.if_not_of_kit(request.recipe) is None


def with_formulas(request: Request, setting: Setting, shape: Shape, settings, gpu) -> Candidate:
    """Return a candidate with its bytes and seconds by the closed forms; of a pipeline those of its fullest stage.

    Args: settings: those of the request, or such as differ from it in the setting alone.
    """
    stage = None
    if setting.pp > 1:
        stage, parts = _fullest_stage(shape, setting, settings)
    else:
        parts = formulas.memory(shape, setting, settings, settings.fused_loss)
    seconds = step_seconds(shape, setting, gpu, settings.max_length) if gpu else 0.0
    length, name = settings.max_length, settings.recipe.name
    return Candidate(request, name, setting, parts, seconds, shape, gpu, stage=stage, row_length=length)


def step_seconds(shape: Shape, setting: Setting, gpu, sequence: int) -> float:
    """Return the estimated seconds of an optimizer step, with those that the tiles of an MLP add.

    Each tile is computed once more: as many seconds as all layers need for that, times the MLP's share of their
    products. Args: sequence: tokens of a row.
    """
    seconds = step.seconds(shape, setting, gpu, sequence)
    if setting.tiles == 1:
        return seconds
    plain = replace(setting, selective=False, activation_offload=False)
    again, once = (step.seconds(shape, replace(plain, every=n), gpu, sequence) for n in (1, 0))
    mlp = 6 * shape.hidden * shape.intermediate
    layer = 2 * shape.parameters / shape.layers + 2 * shape.heads * shape.head_dim * sequence
    return seconds + (again - once) * min(1.0, mlp / layer)


def _fullest_stage(shape: Shape, setting: Setting, settings) -> tuple[int, dict[str, float]]:
    """Return the number of a pipeline's stage that needs the most memory by the closed forms, and its bytes by part."""
    tied = load.load_config(settings).tie_word_embeddings
    by_stage = formulas.stages(shape, setting, settings, settings.fused_loss, tied)
    return max(enumerate(by_stage), key=lambda stage: sum(stage[1].values()))


def of_pipeline(
    method: str, best: Candidate, request: Request, plan: Plan, size: int, micro: int, accumulation: int
) -> list[Candidate]:
    """Return pipelines of `size` stages, without and with checkpointing, as far as the model and the request take one.

    Args: method: a recipe with stages; best: a candidate of full fine-tuning of the same model; accumulation: micro
        batches of a step.
    """
    result = []
    batch = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    cut = {way.flag: size for way in groups.ways() if way.splits == "layers"}
    for checkpointing in (False, True):
        try:
            own = planned(request, method).put(zero=1, gradient_checkpointing=checkpointing, **cut, **batch)
            settings = resolve.resolve(own, plan.ranks, plan.gpu)
            resolve.resolve_for_model(settings)
        except UserError:
            continue
        result.append(with_formulas(own, setting_of(settings, plan.node), best.shape, settings, plan.gpu))
    return result


def first_settings(method: str, request: Request, ranks: int, gpu, node: int):
    """Return the Settings of the request, with the first group of those that a plan tries that it allows.

    Raises: UserError if it allows none.
    """
    request, error = planned(request, method), None
    for group in _open_groups(request, ranks, node):
        try:
            return resolve.resolve(request.put(**group), ranks, gpu)
        except UserError as refused:
            error = error or refused
    raise error


def _open_groups(request: Request, ranks: int, node: int) -> list[dict[str, int]]:
    """Return each size of groups to try, as arguments; {}: as the request has them.

    Groups over nodes are among them only where those within a node leave more groups than a step has rows.
    """
    searched = [way for way in groups.ways() if way.searched]
    if any(request.get(way.flag) is not None for way in searched):
        return [{}]
    tried = [(way.flag, size) for way in searched for size in way.searched]
    tried = [(name, size) for name, size in tried if min(ranks, node) % size == 0 and ranks % size == 0]
    rows, largest = request.get("effective_batch_size"), max((size for _, size in tried), default=1)
    over_nodes = groups_over_nodes(ranks, node) if rows and rows < ranks // largest else []
    return [{}, *({name: size} for name, size in tried), *over_nodes]


def groups_over_nodes(ranks: int, node: int) -> list[dict[str, int]]:
    """Return the sizes of groups of all GPUs of several nodes, as arguments."""
    sizes = [size for size in range(2 * node, ranks + 1, node) if ranks % size == 0]
    return [{way.flag: size} for way in groups.ways() if way.whole_nodes for size in sizes]


def _check_groups(settings, node: int) -> None:
    """Raise UserError for groups of neighbors whose size does not divide the GPUs of a node."""
    local = min(settings.world_size, node)
    wrong = [(f"--{way.flag}", size) for way, size in groups.in_use(settings.values) if not way.fits_nodes(size, local)]
    if settings.world_size > node and local % hpz(settings):  # on one node config/offload.py refuses it
        wrong.append(("zero_hpz_partition_size", hpz(settings)))
    if wrong:
        name, size = wrong[0]
        raise UserError(
            f"{name} {size}: a group must be on one node, so it must divide the {local} GPUs of a node of "
            "this plan; NODES= and GPUS= say which these are."
        )


def planned(request: Request, method: str) -> Request:
    """Return the request of this method's recipe, with what a plan of the method changes or adds.

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
    return request.put(data=[UNNAMED]) if lacks_data(request) else request  # a plan never opens the rows


def drop_flags(request: Request, *names: str) -> Request:
    """Return the request without these flags of its command line; what a YAML file has stays, as in the printed one."""
    return request.drop(*(name for name in names if request.source.get(name) == FLAG))


def lacks_data(request: Request) -> bool:
    """Return whether the request names a model and no data."""
    return request.get("model") not in (None, BUNDLED_MODEL) and not request.get("data")


def shape_of(settings, gpu: hardware.Gpu | None = None) -> Shape:
    """Return the shape of a job's model. gpu: on which Liger's kernels may run, None: they do not count."""
    resolve.resolve_for_model(settings)
    model, config = load.check_model(settings), load.load_config(settings)
    has_liger = gpu is not None and liger.will_run(settings, gpu.device_name)
    cast = settings.deepspeed is not None and settings.precision != "fp32"  # by DeepSpeed's engine, to 16 bits
    fp32 = load.weight_dtype(settings) == "float32" and not cast
    bits = quantization.bits(settings)
    width = 4.0 if fp32 else 2.0
    if each := formulas.PACKED_BYTES.get(bits):  # embeddings, the head and fused experts stay in 16 bits
        packed = quantization.packed_weights(model) / sum(p.numel() for p in model.parameters() if not p.requires_grad)
        width = each * packed + 2.0 * (1 - packed)
    one_by_one = gpu is not None and attention.why_one_by_one(settings, config) is not None
    shape = formulas.shape(config, model, width, bits or 16)
    scores = formulas.score_bytes(config) if settings.attn_implementation == "eager" else 0
    return replace(shape, liger=has_liger, one_by_one=one_by_one, scores=scores)


_FIXED = ("flag", "deepspeed JSON")


def less_checkpointing(settings) -> list[Checkpointing]:
    """Return gradient checkpointing that recomputes less than every layer.

    Not selective for an adapter: it doubles the products of a layer, which then take as much as all activations.
    """
    selective = [] if settings.trains_adapter else [Checkpointing(1, selective=True)]
    return [Checkpointing(0), *selective, Checkpointing(2)]


def checkpointing_of(settings) -> Checkpointing:
    every = settings.gradient_checkpointing_every if settings.gradient_checkpointing else 0
    selective = every > 0 and settings.gradient_checkpointing_policy == "selective"
    return Checkpointing(every, selective, settings.activation_offload)


def _open(base, disk: str | None, splits: bool) -> tuple[list, list, list]:
    """Return (places of states, kinds of checkpointing, micro batches) to try; one each where the user set it.

    A place is (stage, what is offloaded, whether to `disk`).
    Args: splits: groups are searched and these have several ranks: then only micro batch 1 with checkpointing.
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
    """Return whether a plan tries a stage with an offload."""
    if (offload == "all" and zero != 3) or (offload != "none" and zero == 0):
        return False
    if base.world_size == 1 and zero and offload == "none" and not is_set(base, "zero"):
        return base.precision != "fp32" and zero == 1  # one rank: 16-bit weights with a master, nothing else to shard
    return True


def is_set(base, name: str) -> bool:
    """Return whether the user set the argument, in any place."""
    source = base.source[name]
    return source in _FIXED or source.startswith("preset") or source == base.config


def _requested(base, zero: int, offload: str, checkpointing: Checkpointing, micro: int) -> Request:
    """Return the request of one candidate, from that of the settings that it shares with others."""
    result = drop_flags(base.request, "search_batch_size", "offload_path")
    batch = {"per_device_train_batch_size": micro, "effective_batch_size": base.effective_batch_size}
    result = result.put(zero=zero, offload=offload, **batch)
    named = set(gradient_checkpointing.ARGUMENTS) & result.values.keys()
    return result if named else result.put(**checkpointing.flags)


def setting_of(settings, node: int | None = None, shape: Shape | None = None) -> Setting:
    """Return the setting of a job.

    Args: node: GPUs of a node, None: as many as the launcher starts on this one; shape: of the model, where the
        settings are not resolved for it.
    """
    checkpointing, tokens = checkpointing_of(settings), whole_layers.tokens_of(settings)
    tiles = settings.tiled_mlp
    if tiles == "auto":
        tiles = tiled_mlp.automatic(tokens, shape.hidden) if shape else 1
    return Setting(
        zero=settings.zero,
        offload=settings.offload,
        every=checkpointing.every,
        micro=settings.per_device_train_batch_size,
        tokens=tokens,
        accumulation=settings.gradient_accumulation_steps,
        ranks=settings.world_size,
        activation_offload=checkpointing.offloaded,
        nvme=bool(_disk_of(settings)),
        node=node or int(os.environ.get("LOCAL_WORLD_SIZE") or gpu_memory.GPUS_OF_A_NODE),
        hpz=hpz(settings),
        forwards=settings.objective.extra_forwards(settings),
        whole_layers=whole_layers.largest(settings, tokens),
        selective=checkpointing.selective,
        fp32_weights=settings.keeps_fp32 and settings.precision != "fp32" and load.weight_dtype(settings) == "float32",
        background_save=settings.save_in_background,
        groups=tuple(groups.in_use(settings.values)),
        arithmetic=math.prod(technique.seconds(settings) for technique in resolve.techniques_of(settings)),
        tiles=tiles,
        kernels=kernels.of(settings),
    )


def _disk_of(settings) -> str | None:
    """Return the folder to which the settings offload, from flag, YAML or JSON; None without one."""
    return next(iter(nvme.paths_of(settings.deepspeed).values()), None)


# Arguments that do not change memory.
WITHOUT_BYTES = (
    *("plan", "show", "gpu_type", "gpus", "ignore_plan", "memory_limit", "output_dir", "resume_from_checkpoint"),
    *("on_oom", "max_restarts", "hang_timeout", "on_nan", "max_nan_steps", "canary", "ignore_resume_mismatch"),
)


def for_simulation(request: Request) -> Request:
    """Return the request without what a simulation leaves out, so that jobs that differ in it share a cached answer.

    What is offloaded to a disk is simulated as if to host memory.
    """
    return drop_flags(request.drop(*WITHOUT_BYTES), "offload_path")
