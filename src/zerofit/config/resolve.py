"""Resolve the arguments of a job: single arguments first, then the techniques in their order."""

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
from zerofit.job.settings import Decision, Settings, decide
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
    tested_models,
    tiled_mlp,
)
from zerofit.model.experimental import compiled, flash_3, flex, fp8
from zerofit.model.image_text import towers
from zerofit.model.kernels import liger, linear_attention
from zerofit.objective import preference_losses
from zerofit.optim import learning_rates, registry
from zerofit.parallel import dims, whole_layers


def resolve_settings(
    recipe: str, argv: list[str] | None = None, world_size: int | None = None, gpu=None, arguments_only: bool = False
) -> Settings:
    """Return the settings of a command line, resolved, checked and frozen.

    Args: argv, world_size: of a job to be started; default: this process's. gpu: see `config.parse.settings_of`.
        arguments_only: skip the techniques, and with them the checks for conflicting arguments.
    Raises: UserError for the user's mistakes, before a GPU or a process group is used.
    """

    def resolved(words: list[str]) -> Settings:
        return resolve(parse.request(recipe, words), world_size or distributed.size(), gpu, arguments_only)

    return settings_for_process(lambda: resolved(sys.argv[1:])) if argv is None else resolved(argv)


def settings_for_process(make: Callable[[], Settings]) -> Settings:
    """Return the settings from `make` and prepare this process to train with them.

    Raises: UserError as `make`, and if accelerate started fewer processes than requested.
    """
    dropped, other_size = accelerate_env.drop_accelerate_env(), accelerate_env.check_size()
    settings = make()
    if other_size:
        settings.decisions.append(other_size)
    if not job.file_argument(sys.argv[1:]):  # `zerofit launch` sets no options of accelerate
        settings.decisions.extend(accelerate_env.compare(settings) or _dropped(dropped))
    if settings.use_cpu and os.environ.get("OMP_WAIT_POLICY") == "passive":
        sentence = "OMP_WAIT_POLICY passive: idle threads sleep, so that other processes slow the run down less"
        settings.decisions.append(Decision(sentence, "OMP_WAIT_POLICY"))
    if settings.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also for libraries that search for GPUs later
    return settings


def _dropped(variables: list[str]) -> list[str]:
    if not variables:
        return []
    return [f"accelerate's settings are not used ({', '.join(variables)}): the recipe decides; use --zero, --bf16 ..."]


def resolve(request: Request, world_size: int, gpu=None, arguments_only: bool = False) -> Settings:
    """Return the settings of a request, resolved, checked and frozen. Args and errors as for `resolve_settings`."""
    dropped = accelerate_env.drop_accelerate_env()
    settings = parse.settings_of(request, world_size, gpu)
    for step in ARGUMENTS:
        step(settings)
    for technique in () if arguments_only else techniques_of(settings):
        refuse_conflicts(technique, settings)
        technique.resolve(settings)
    settings.decisions.extend(_dropped(dropped))
    settings.seal()
    return settings


def resolve_for_model(settings: Settings, config=None) -> None:
    """Resolve the arguments that depend on the model's config.json; later calls have no effect.

    Args: config: the model's configuration, e.g. with fewer layers for a simulation; default: its config.json.
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


def change(settings: Settings, request: Request) -> None:
    """Resolve the settings of a process again for a changed request; keep later changes and decisions.

    Args: request: the request of the settings with other arguments.
    """
    if request == settings.request:
        return
    before, after = (resolve(r, settings.world_size, settings.planned_gpu) for r in (settings.request, request))
    for version in (before, after):
        resolve_for_model(version)
    added = [sentence for sentence in settings.decisions if sentence not in before.decisions]
    settings.unseal()
    for name, value in after.values.items():
        if (value, after.source[name]) != (before.values[name], before.source[name]):
            decide(settings, name, value, source=after.source[name])
    settings.deepspeed, settings.request, settings.decisions = after.deepspeed, request, [*after.decisions, *added]
    settings.seal()


# --- hooks that are too short for a separate module ---


def _node_local_storage(settings) -> None:
    """Turn on DeepSpeed's use_node_local_storage for --node_local_storage."""
    if settings.node_local_storage:
        settings.deepspeed.setdefault("checkpoint", {})["use_node_local_storage"] = True


MIN_SHARED_MEMORY = 2**30  # bytes in /dev/shm that data workers need; containers often have 64 MiB


def _data_workers(settings) -> None:
    """Use up to two data workers per GPU rank if the node has enough cores."""
    if settings.use_cpu or settings.source["dataloader_num_workers"] != "transformers default":
        return
    workers = max(0, min(2, distributed.cores() // offload.ranks_of_node(settings) - 1))
    shared = Path("/dev/shm")
    if not workers:
        settings.decisions.append("dataloader_num_workers 0: only one core per rank")
    elif shared.is_dir() and shutil.disk_usage(shared).free < MIN_SHARED_MEMORY:
        settings.decisions.append("dataloader_num_workers 0: /dev/shm has less than 1 GiB free (docker: --shm-size 8g)")
    else:
        decide(settings, "dataloader_num_workers", workers, "prepare batches while the GPU computes (off: 0)")
        if settings.source["dataloader_persistent_workers"] == "transformers default":
            decide(settings, "dataloader_persistent_workers", True)  # start once, not each epoch


def _memory_report(settings: Settings) -> None:
    """Add the decision for --memory_report, which slows down the first steps."""
    if settings.memory_report:
        settings.decisions.append("memory_report: recording slows down the first 3 steps, save and evaluation")


def _ddp_static_graph(settings, config) -> None:
    """Set --ddp_static_graph if every step has the same autograd graph.

    Not with gradient accumulation (an internal assert of no_sync fails in torch 2.13), mixtures of experts (each step
    uses other experts) or Sophia (its estimate is a second backward).
    Raises: UserError for --ddp_static_graph true with gradient accumulation.
    """
    uses_ddp = settings.deepspeed is None and settings.world_size > 1
    accumulates = settings.gradient_accumulation_steps > 1
    if settings.ddp_static_graph and uses_ddp and accumulates:
        raise UserError(
            f"--ddp_static_graph true with {settings.gradient_accumulation_steps} accumulation steps: PyTorch's static "
            "graph does not support micro batches without synchronization; leave it out."
        )
    if settings.ddp_static_graph is not None or not uses_ddp:
        return
    has_experts = any("expert" in key for key in config.to_dict())
    if not accumulates and not has_experts and settings.optim != "sophia":
        decide(settings, "ddp_static_graph", True, "dense model, one micro batch per step")


# --- the order: each entry may read the decisions of earlier ones ---

# Single arguments; `zerofit data` needs only these.
ARGUMENTS = (
    defaults.check_ranges,  # before anything is derived from the user's values
    defaults.one_shuffle_seed,
    defaults.hang_before_collectives,
    defaults.fill_defaults,  # model, data, stage, device, evaluation: read by the others
    transformers_flags.resolve,  # reads use_cpu and whether there are eval rows
    deepspeed_json.resolve,  # reads stage and offload; the file's values replace arguments
    defaults.choose_precision,  # after the JSON, which may set bf16 and fp16
    defaults.solve_batch,  # after the JSON, which may set batch sizes
    defaults.scale_learning_rate,  # reads the effective batch
)

# For each technique: refuse its conflicts, then call `resolve`. When the model is known: call `resolve_for_model` of
# each, and on a rank `install`.
TECHNIQUES = (
    tested_models.TECHNIQUE,  # reports whether the model's class is tested
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
        name="loss without the generation prompt",
        flag="mask_generation_prompt",
        example="--mask_generation_prompt true",
        conflicts=(
            Conflict(
                "train_on", ("all", "prompt"), "it masks the start of answers, which needs a loss on answers only"
            ),
        ),
    ),
    initial_adapter.TECHNIQUE,  # sets flags that the next ones read
    preference_losses.TECHNIQUE,
    towers.TECHNIQUE,  # selects the model's class before others build it
    *adapters.TECHNIQUES,  # turn padding_free off for prompts, so before attention's
    Technique(
        name="node-local checkpoints",
        flag="node_local_storage",
        example="--node_local_storage true",
        conflicts=(Conflict("zero", (0,), "without ZeRO all ranks read the same files", "use --zero 1, 2 or 3"),),
        resolve=_node_local_storage,
    ),
    Technique(
        name="background saving",
        flag="save_in_background",
        example="--save_in_background true",
        conflicts=(Conflict("zero", (0,), "it writes DeepSpeed's states only", "use --zero 1, 2 or 3"),),
    ),
    generation.TECHNIQUE,
    *freezing.TECHNIQUES,
    *learning_rates.TECHNIQUES,
    *quantization.TECHNIQUES,
    *attention.TECHNIQUES,  # select the attention
    flash_3.TECHNIQUE,
    flex.TECHNIQUE,
    # may wrap or replace this attention
    Technique(name="parallelism", resolve=dims.resolve, resolve_for_model=dims.resolve_for_model),
    streaming.TECHNIQUE,
    Technique(name="data workers", resolve=_data_workers),  # a stream has one
    fp8.TECHNIQUE,
    fused_lora.TECHNIQUE,
    fused_loss.TECHNIQUE,
    tiled_mlp.TECHNIQUE,
    liger.TECHNIQUE,  # reads the decisions of fused_loss and tiled_mlp
    Technique(
        name="memory report",
        flag="memory_report",
        example="--memory_report true",
        conflicts=(Conflict("torch_compile", (True,), "it cannot record compiled code"),),
        resolve=_memory_report,
    ),
    linear_attention.TECHNIQUE,  # changes functions that compiled layers call
    compiled.TECHNIQUE,
    whole_layers.TECHNIQUE,  # reads compile_layers and builds the model
    experts.TECHNIQUE,  # this and offload build the model, with the decisions above
    *offload.TECHNIQUES,
)


def techniques_of(settings: Settings) -> tuple[Technique, ...]:
    """Return the techniques of a job in their order: first the kit's, then the recipe's."""
    optimizers = (registry.technique(name, spec) for name, spec in settings.recipe.optimizers.items())
    return (*TECHNIQUES, *optimizers, *settings.recipe.techniques)


def self_test(settings: Settings, config) -> None:
    """Compare the techniques' kernels with the code that they replace. Collective. Args: config: the model's.

    Raises: UserError if a requested kernel computes other results.
    """
    for technique in techniques_of(settings):
        technique.self_test(settings, config)


def install(settings: Settings, model) -> None:
    """Apply the techniques of the job to a loaded model; the same on every rank.

    Raises: UserError for an unsupported model.
    """
    for technique in techniques_of(settings):
        technique.install(settings, model)
