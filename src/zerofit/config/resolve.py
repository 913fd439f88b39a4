"""Resolve the arguments of a job: what they are one by one, then the ordered list of techniques."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.config import accelerate_env, deepspeed_json, defaults, offload, parse, transformers_flags
from zerofit.data import streaming
from zerofit.job import job
from zerofit.job.request import Request
from zerofit.job.settings import Settings, decide
from zerofit.job.technique import Conflict, Technique, refuse_conflicts
from zerofit.model import (
    adapters,
    attention,
    experts,
    freezing,
    fused_lora,
    fused_loss,
    generation,
    gradient_checkpointing,
    initial_adapter,
    load,
    quantization,
    tiled_mlp,
)
from zerofit.model.experimental import compiled, flash_3, flex, fp8
from zerofit.model.image_text import towers
from zerofit.model.kernels import liger, linear_attention
from zerofit.model.tried import classes
from zerofit.objective import preference_losses
from zerofit.optim import learning_rates, registry
from zerofit.parallel import ways, whole_layers


def resolve_settings(
    recipe: str, argv: list[str] | None = None, world_size: int | None = None, gpu=None, arguments_only: bool = False
) -> Settings:
    """Return the settings of a command line, resolved, checked and frozen.

    Args: argv, world_size: of a job to be started; default: this process's own. gpu: see `config.parse.settings_of`.
        arguments_only: leave the techniques out: what arguments exclude of each other is not checked.
    Raises: UserError for the user's mistakes, before a GPU or a process group is used.
    """

    def resolved(words: list[str]) -> Settings:
        return resolve(parse.request(recipe, words), world_size or distributed.size(), gpu, arguments_only)

    return of_this_process(lambda: resolved(sys.argv[1:])) if argv is None else resolved(argv)


def of_this_process(make: Callable[[], Settings]) -> Settings:
    """Return the settings that `make` resolves or reads, for this process to train with, and prepare it for them.

    Raises: UserError as `make`, and if accelerate started fewer processes than it was asked for.
    """
    dropped, other_size = accelerate_env.drop_accelerate_env(), accelerate_env.check_size()
    settings = make()
    if other_size:
        settings.decisions.append(other_size)
    if not job.named(sys.argv[1:]):  # accelerate as the launcher of `zerofit launch` has been asked for nothing
        settings.decisions.extend(accelerate_env.compare(settings) or _dropped(dropped))
    if settings.use_cpu and os.environ.get("OMP_WAIT_POLICY") == "passive":
        settings.decisions.append(
            "OMP_WAIT_POLICY passive: idle threads sleep, so that other work slows the run down less"
        )
    if settings.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also for libraries that search for GPUs later
    return settings


def _dropped(variables: list[str]) -> list[str]:
    if not variables:
        return []
    return [f"accelerate's own settings are not used ({', '.join(variables)}): the recipe decides; see --zero, --bf16"]


def resolve(asked: Request, world_size: int, gpu=None, arguments_only: bool = False) -> Settings:
    """Return the settings of a request, resolved, checked and frozen. Args and errors: as `resolve_settings`."""
    dropped = accelerate_env.drop_accelerate_env()
    settings = parse.settings_of(asked, world_size, gpu)
    for step in ARGUMENTS:
        step(settings)
    for technique in () if arguments_only else techniques_of(settings):
        refuse_conflicts(technique, settings)
        technique.resolve(settings)
    settings.decisions.extend(_dropped(dropped))
    settings.seal()
    return settings


def resolve_for_model(settings: Settings, config=None) -> None:
    """Resolve the arguments that depend on the model's config.json; only the first call does anything.

    Args: config: the model's, of a simulation with fewer layers; default: its config.json.
    Raises: UserError for a model that cannot be trained with these arguments.
    """
    if settings.knows_model:
        return
    config = load.load_config(settings) if config is None else config
    load.check_kind(settings, config)
    settings.unseal()
    for technique in techniques_of(settings):
        technique.resolve_for_model(settings, config)
    settings.knows_model = True
    settings.seal()


def change(settings: Settings, asked: Request) -> None:
    """Resolve the settings of a process again for a changed request; what was set and said since then stays.

    Args: asked: the request of the settings with other arguments.
    """
    if asked == settings.request:
        return
    before, after = (resolve(one, settings.world_size, settings.planned_gpu) for one in (settings.request, asked))
    for one in (before, after):
        resolve_for_model(one)
    added = [sentence for sentence in settings.decisions if sentence not in before.decisions]
    settings.unseal()
    for name, value in after.values.items():
        if (value, after.source[name]) != (before.values[name], before.source[name]):
            decide(settings, name, value, source=after.source[name])
    settings.deepspeed, settings.request, settings.decisions = after.deepspeed, asked, [*after.decisions, *added]
    settings.seal()


# --- hooks that are too short for a module of their own ---


def _node_local_storage(settings) -> None:
    """Turn DeepSpeed's use_node_local_storage on for --node_local_storage."""
    if settings.node_local_storage:
        settings.deepspeed.setdefault("checkpoint", {})["use_node_local_storage"] = True


SHARED_MEMORY = 2**30  # bytes free in /dev/shm below which no workers are started: containers often have 64 MiB


def _data_workers(settings) -> None:
    """Make batches in up to two processes beside each rank of a GPU, as far as there are cores for them."""
    if settings.use_cpu or settings.source["dataloader_num_workers"] != "transformers default":
        return
    workers = max(0, min(2, distributed.cores() // offload.ranks_of_node(settings) - 1))
    shared = Path("/dev/shm")
    if not workers:
        settings.decisions.append("dataloader_num_workers 0: each rank has one core")
    elif shared.is_dir() and shutil.disk_usage(shared).free < SHARED_MEMORY:
        settings.decisions.append("dataloader_num_workers 0: /dev/shm has less than 1 GiB free (docker: --shm-size 8g)")
    else:
        decide(settings, "dataloader_num_workers", workers, "batches are made while the GPU computes (off: 0)")
        if settings.source["dataloader_persistent_workers"] == "transformers default":
            decide(settings, "dataloader_persistent_workers", True)  # started once, not once an epoch


def _memory_report(settings: Settings) -> None:
    """Add the decision for --memory_report, which slows the first steps down."""
    if settings.memory_report:
        settings.decisions.append("memory_report: the first 3 steps, save and evaluation are slower, being followed")


def _ddp_static_graph(settings, config) -> None:
    """Decide --ddp_static_graph: on if every step has the same autograd graph.

    Off with gradient accumulation (torch 2.13 fails an internal assert of no_sync), for mixtures of experts (a step
    uses the experts that its tokens select) and for Sophia (its estimate is a second backward).
    Raises: UserError for --ddp_static_graph true with gradient accumulation.
    """
    uses_ddp = settings.deepspeed is None and settings.world_size > 1
    accumulates = settings.gradient_accumulation_steps > 1
    if settings.ddp_static_graph and uses_ddp and accumulates:
        raise UserError(
            f"--ddp_static_graph true with {settings.gradient_accumulation_steps} accumulation steps: PyTorch's static "
            "graph does not work with steps that do not synchronise; leave it out."
        )
    if settings.ddp_static_graph is not None or not uses_ddp:
        return
    has_experts = any("expert" in key for key in config.to_dict())
    if not accumulates and not has_experts and settings.optim != "sophia":
        decide(settings, "ddp_static_graph", True, "one micro batch a step through a dense model")


# --- the order: each may read what an earlier one has decided ---

# What the arguments are, one by one; `zerofit data` needs no more.
ARGUMENTS = (
    defaults.check_ranges,  # what the user has set, before anything is derived from it
    defaults.one_shuffle_seed,
    defaults.hang_before_collectives,
    defaults.fill_defaults,  # model, data, stage, device, evaluation: the others read them
    transformers_flags.resolve,  # reads use_cpu and whether there are eval rows
    deepspeed_json.resolve,  # reads stage and offload; the file's literals then replace arguments
    defaults.choose_precision,  # after the JSON, whose bf16 and fp16 sections decide
    defaults.solve_batch,  # after the JSON, which may hold batch sizes
    defaults.scale_learning_rate,  # by the solved batch
)

# What they exclude and require of each other: of each its conflicts, then its `resolve`. When the model is known, the
# `resolve_for_model` of all follow, and on a rank their `install`, in the same order.
TECHNIQUES = (
    classes.TECHNIQUE,  # says what of the model's class was tried
    *gradient_checkpointing.TECHNIQUES,
    *defaults.PRECISION,
    *registry.TECHNIQUES,  # may add to the DeepSpeed configuration
    Technique(
        name="gradient accumulation",
        flag="gradient_accumulation_steps",
        example="--gradient_accumulation_steps 2",
        resolve_for_model=_ddp_static_graph,
    ),
    Technique(
        name="loss without the start of answers",
        flag="mask_generation_prompt",
        example="--mask_generation_prompt true",
        conflicts=(
            Conflict(
                "train_on",
                ("all", "prompt"),
                "it leaves out the start of answers, which alone are not what is trained on",
                "leave one of the two out",
            ),
        ),
    ),
    initial_adapter.TECHNIQUE,  # decides flags that the next ones read
    preference_losses.TECHNIQUE,
    towers.TECHNIQUE,  # which class the model is of, before others build it
    *adapters.TECHNIQUES,  # turn padding_free off for prompts, so before attention's
    Technique(
        name="node-local checkpoints",
        flag="node_local_storage",
        example="--node_local_storage true",
        conflicts=(Conflict("zero", (0,), "every rank reads the same files", "use --zero 1, 2 or 3"),),
        resolve=_node_local_storage,
    ),
    Technique(
        name="saving in the background",
        flag="save_in_background",
        example="--save_in_background true",
        conflicts=(Conflict("zero", (0,), "only DeepSpeed's states are written by a thread", "use --zero 1, 2 or 3"),),
    ),
    generation.TECHNIQUE,
    *freezing.TECHNIQUES,
    *learning_rates.TECHNIQUES,
    *quantization.TECHNIQUES,
    *attention.TECHNIQUES,  # decide the attention too
    flash_3.TECHNIQUE,
    flex.TECHNIQUE,
    # may wrap or replace that attention
    Technique(name="shared rows", resolve=ways.resolve, resolve_for_model=ways.resolve_for_model),
    streaming.TECHNIQUE,
    Technique(name="data workers", resolve=_data_workers),  # a stream has one
    fp8.TECHNIQUE,
    fused_lora.TECHNIQUE,
    fused_loss.TECHNIQUE,
    tiled_mlp.TECHNIQUE,
    liger.TECHNIQUE,  # reads what fused_loss and tiled_mlp have decided
    Technique(
        name="memory report",
        flag="memory_report",
        example="--memory_report true",
        conflicts=(Conflict("torch_compile", (True,), "compiled code cannot be followed", "leave one of the two out"),),
        resolve=_memory_report,
    ),
    linear_attention.TECHNIQUE,  # changes functions that compiled layers call
    compiled.TECHNIQUE,
    whole_layers.TECHNIQUE,  # reads compile_layers; it too builds the model
    experts.TECHNIQUE,  # this and offload build the model, with the attention, the loss and the tiles decided above
    *offload.TECHNIQUES,
)


def techniques_of(settings: Settings) -> tuple[Technique, ...]:
    """Return the techniques of a job in their order: the kit's, then those of the recipe."""
    own = (registry.technique(name, spec) for name, spec in settings.recipe.optimizers.items())
    return (*TECHNIQUES, *own, *settings.recipe.techniques)


def self_test(settings: Settings, config) -> None:
    """Compare the techniques' kernels with what they replace. Collective. config: the model's config.json.

    Raises: UserError for one that was asked for and computes something else.
    """
    for technique in techniques_of(settings):
        technique.self_test(settings, config)


def install(settings: Settings, model) -> None:
    """Change a loaded model as the techniques of the job ask for, on every rank alike.

    Raises: UserError for a model that cannot be changed so.
    """
    for technique in techniques_of(settings):
        technique.install(settings, model)
