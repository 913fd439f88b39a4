"""Resolve the arguments of a job: the ordered lists of resolvers, and which arguments exclude each other."""

import copy
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.config import accelerate_env, deepspeed_json, defaults, offload, parse, transformers_flags
from zerofit.data import streaming
from zerofit.job.request import Request
from zerofit.job.settings import Settings, as_typed, decide
from zerofit.model import (
    adapters,
    attention,
    experts,
    fused_loss,
    gradient_checkpointing,
    liger,
    load,
    preference_loss,
    quantization,
    tiled_mlp,
)
from zerofit.optim import registry
from zerofit.parallel import pipeline, sequence_parallel, tensor_parallel


def resolve_settings(
    recipe: str, argv: list[str] | None = None, world_size: int | None = None, gpu=None, resolvers=None
) -> Settings:
    """Return the settings of a command line, resolved, checked and frozen.

    Args: argv, world_size: of a job to be started; default: this process's own. gpu: see `config.parse.settings_of`.
        resolvers: default: FROM_FLAGS.
    Raises: UserError for the user's mistakes, before a GPU or a process group is used.
    """

    def resolved(words: list[str]) -> Settings:
        return resolve(parse.request(recipe, words), world_size or distributed.size(), gpu, resolvers, words)

    return of_this_process(lambda: resolved(sys.argv[1:])) if argv is None else resolved(argv)


def of_this_process(make: Callable[[], Settings]) -> Settings:
    """Return the settings that `make` resolves or reads, for this process to train with, and prepare it for them.

    Raises: UserError as `make`, and if accelerate started fewer processes than it was asked for.
    """
    dropped, other_size = accelerate_env.drop_accelerate_env(), accelerate_env.check_size()
    settings = make()
    if other_size:
        settings.decisions.append(other_size)
    _say_dropped(settings, dropped)
    if settings.use_cpu and os.environ.get("OMP_WAIT_POLICY") == "passive":
        settings.decisions.append(
            "OMP_WAIT_POLICY passive: idle threads sleep, so that other work slows the run down less"
        )
    if settings.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also for libraries that search for GPUs later
    return settings


def _say_dropped(settings: Settings, dropped: list[str]) -> None:
    if dropped:
        settings.decisions.append(
            f"accelerate's own settings are not used ({', '.join(dropped)}): the recipe decides; see --zero, --bf16"
        )


def resolve(asked: Request, world_size: int, gpu=None, resolvers=None, argv: list[str] | None = None) -> Settings:
    """Return the settings of a request, resolved, checked and frozen. Args and errors: as `resolve_settings`."""
    dropped = accelerate_env.drop_accelerate_env()
    settings = parse.settings_of(asked, world_size, gpu, argv)
    for step in FROM_FLAGS if resolvers is None else resolvers:
        step(settings)
    _say_dropped(settings, dropped)
    settings.freeze()
    return settings


def resolve_for_model(settings: Settings, config=None) -> None:
    """Resolve the arguments that depend on the model's config.json; only the first call does anything.

    Args: config: the model's, of a simulation with fewer layers; default: its config.json.
    Raises: UserError for a model that cannot be trained with these arguments.
    """
    if settings.knows_model:
        return
    config = load.load_config(settings) if config is None else config
    settings.thaw()
    for step in FROM_MODEL_CONFIG:
        step(settings, config)
    settings.knows_model = True
    settings.freeze()


# --- resolvers that are too short for a module of their own ---


def _node_local_storage(settings) -> None:
    """Turn DeepSpeed's use_node_local_storage on for --node_local_storage.

    Raises: UserError at stage 0, where every rank reads the same optimizer file."""
    if not settings.node_local_storage:
        return
    if settings.deepspeed is None:
        raise UserError("--node_local_storage: at ZeRO stage 0 every rank reads the same files; use --zero 1, 2 or 3.")
    settings.deepspeed.setdefault("checkpoint", {})["use_node_local_storage"] = True


def _padding_free(settings: Settings) -> None:
    """Decide --padding_free and the attention that keeps the documents of a row apart.

    Raises: UserError for an attention implementation with which packed documents would read each other, and for
        contradictory flags.
    """
    attn, padding_free = settings.attn_implementation, settings.padding_free
    attention.check_available(attn, settings.use_cpu)
    keeps_apart = attn in ("sdpa", "flex_attention") or attention.is_flash(attn)
    if settings.packing and padding_free is False:
        raise UserError("--packing --padding_free false: packed sequences are not padded; leave one of the two out.")
    if (settings.packing or padding_free is True) and not keeps_apart:
        flag = "--packing" if settings.packing else "--padding_free true"
        raise UserError(
            f"{flag} with --attn_implementation {attn}: documents in one row would read each other; use sdpa, "
            "flex_attention or flash_attention_2."
        )
    if padding_free == "auto":
        if keeps_apart:
            decide(settings, "padding_free", True, f"{attn} keeps the documents of a row apart")
        else:
            settings.padding_free = False
    if settings.padding_free and attn == "sdpa":
        why = "plain sdpa would let the documents of a row read each other"
        decide(settings, "attn_implementation", attention.NAME, why)


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
            settings.values["dataloader_persistent_workers"] = True  # started once, not once an epoch
            settings.source["dataloader_persistent_workers"] = "decided"


def _memory_report(settings: Settings) -> None:
    """Add the decision for --memory_report, which slows the first steps down.

    Raises: UserError with torch_compile: tensors in compiled code cannot be tracked.
    """
    if settings.memory_report:
        if settings.torch_compile:
            raise UserError("--memory_report with --torch_compile: compiled code cannot be followed; drop one of them.")
        settings.decisions.append("memory_report: the first 3 steps, save and evaluation are slower, being followed")


STAGES = ("0", "2", "3")  # stage 1 combines with the same techniques as stage 2


@dataclass(frozen=True)
class Technique:
    """A memory technique. flags: turn it on; recipe: the one that has it, None: both; cuda: needs a GPU."""

    flags: str
    recipe: str | None = None
    cuda: bool = False


TECHNIQUES: dict[str, Technique] = {
    "accumulation": Technique("--gradient_accumulation_steps 2"),
    "no checkpointing": Technique("--gradient_checkpointing false"),
    "every 2nd layer": Technique("--gradient_checkpointing_every 2"),
    "selective": Technique("--gradient_checkpointing_policy selective"),
    "activation offload": Technique("--activation_offload true"),
    "bf16": Technique("--bf16 true"),
    "fp16": Technique("--fp16 true"),
    "pure bf16": Technique("--pure_bf16 true"),
    "packing": Technique("--packing true"),
    "padding-free": Technique("--padding_free true"),
    "streaming": Technique("--streaming true"),
    "fused loss": Technique("--fused_loss true"),
    "tiled MLP": Technique("--tiled_mlp 2"),
    "8-bit Adam": Technique("--optim adamw_8bit"),
    "paged 8-bit Adam": Technique("--optim paged_adamw_8bit", cuda=True),
    "Adafactor": Technique("--optim adafactor"),
    "Lion": Technique("--optim lion_32bit"),
    "SGD": Technique("--optim sgd"),
    "Muon": Technique("--optim muon"),
    "Sophia": Technique("--optim sophia"),
    "offload optimizer": Technique("--offload optimizer"),
    "offload all": Technique("--offload all"),
    "LoRA": Technique("", "lora"),
    "DoRA": Technique("--use_dora true", "lora"),
    "LoRA+": Technique("--loraplus_lr_ratio 4", "lora"),
    "PiSSA": Technique("--init_lora_weights pissa", "lora"),
    "IA3": Technique("--adapter ia3", "lora"),
    "prompt tuning": Technique("--adapter prompt_tuning", "lora"),
    "QLoRA": Technique("--load_in_4bit true --bf16 true", "lora"),
    "8-bit base": Technique("--load_in_8bit true --bf16 true", "lora"),
}


@dataclass(frozen=True)
class Rule:
    """Two arguments that exclude each other. one, other: (argument, values that count as on; "*": any)."""

    one: tuple[str, tuple]
    other: tuple[str, tuple]
    why: str
    fix: str


RULES = (
    Rule(
        ("loraplus_lr_ratio", ("*",)),
        ("optim", ("sophia", "muon")),
        "LoRA+ gives A and B rates of their own, and this optimizer makes its own groups",
        "use an AdamW or leave --loraplus_lr_ratio out",
    ),
    Rule(
        ("loraplus_lr_ratio", ("*",)),
        ("pure_bf16", (True,)),
        "the optimizer that rounds stochastically is not built with LoRA+'s groups",
        "leave one of the two out",
    ),
    Rule(
        ("mask_generation_prompt", (True,)),
        ("train_on", ("all", "prompt")),
        "it leaves out the start of answers, which alone are not what is trained on",
        "leave one of the two out",
    ),
    Rule(
        ("activation_offload_streams", (True,)),
        ("torch_compile", (True,)),
        "not tested with compiled layers",
        "leave one of the two out",
    ),
)


def check_exclusions(settings) -> None:
    """Raise UserError if both arguments of a pair in RULES are on."""
    for rule in RULES:
        if all(_on(settings, *part) for part in (rule.one, rule.other)):
            one, other = (f"--{name} {as_typed(name, settings.values[name])}" for name, _ in (rule.one, rule.other))
            raise UserError(f"{one} with {other}: {rule.why}; {rule.fix}.")


def _on(settings, name: str, values: tuple) -> bool:
    value = settings.values.get(name)
    return value in values or (values == ("*",) and value is not None)


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


def _offload_sizes(settings, config) -> None:
    """Set the sizes in the DeepSpeed configuration that depend on the number of parameters; the model is counted."""
    if offload.depends_on_size(settings.deepspeed):
        offload.check_sizes(settings, load.check_model(settings, copy.deepcopy(config)))


def _unpacked_experts(settings, config) -> None:
    """Say how much of a quantized mixture of experts stays in 16 bits."""
    if quantization.bits(settings) and experts.count(config):
        experts.say_unpacked(settings, load.check_model(settings, copy.deepcopy(config)))


# --- the order: a resolver may read what an earlier one has decided ---

# What the arguments are, one by one; `zerofit data` needs no more.
ARGUMENTS = (
    defaults.check_ranges,  # what the user has set, before anything is derived from it
    defaults.one_shuffle_seed,
    defaults.hang_before_collectives,
    defaults.fill_defaults,  # model, data, stage, device, evaluation: the others read them
    transformers_flags.resolve,  # reads use_cpu and whether there are eval rows
    deepspeed_json.resolve,  # reads stage and offload; the file's literals then replace arguments
    gradient_checkpointing.resolve,
    defaults.choose_precision,  # after the JSON, whose bf16 and fp16 sections decide
    defaults.solve_batch,  # after the JSON, which may hold batch sizes
    registry.resolve,  # reads stage, offload and precision; adds to the DeepSpeed configuration
    defaults.scale_learning_rate,  # by the solved batch
)

# What the arguments exclude and require of each other.
COMBINATIONS = (
    check_exclusions,
    preference_loss.resolve,
    adapters.resolve,  # turns padding_free off for prompts, so before _padding_free
    _node_local_storage,
    quantization.resolve,
    _padding_free,  # decides the attention too
    tensor_parallel.resolve,
    sequence_parallel.resolve,  # wraps that attention, so after _padding_free
    pipeline.resolve,  # replaces it
    streaming.resolve,
    _data_workers,  # a stream has one
    liger.resolve,
    tiled_mlp.resolve,
    _memory_report,
)

FROM_FLAGS = (*ARGUMENTS, *COMBINATIONS)

# Each is called with (settings, the model's configuration), by resolve_for_model.
FROM_MODEL_CONFIG = (
    quantization.resolve_for_model,
    attention.resolve_for_model,
    sequence_parallel.resolve_for_model,
    tensor_parallel.resolve_for_model,
    pipeline.resolve_for_model,
    fused_loss.resolve_for_model,
    tiled_mlp.resolve_for_model,
    liger.resolve_for_model,  # reads what fused_loss and tiled_mlp have decided
    _ddp_static_graph,
    experts.resolve_for_model,
    _offload_sizes,  # builds the model without weights, with the attention, the loss and the tiles decided above
    _unpacked_experts,  # builds it too
)
