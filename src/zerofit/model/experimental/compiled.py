"""Compile the decoder layers of a model (--compile_layers), each without its attention.

torch.compile of a class's forward serves all its layers, so the time to compile does not grow with their number, and
the number of tokens is dynamic: rows of other lengths use the same kernels. Outside are the attention, which knows the
documents of a row, the embedding, the loss, gradient checkpointing and the hooks of DDP and ZeRO. Evaluation and
generation compute as without.
"""

import os
import shutil

import torch
from torch._dynamo.utils import counters
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.job import run_folder
from zerofit.job.settings import decide
from zerofit.job.technique import AllBut, Conflict, Technique
from zerofit.model import experts, load

# Values of --adapter whose gradients are those of eager layers (tests/model/test_compiled.py).
COMPARED = (
    *("lora", "ia3", "prompt_tuning", "prefix_tuning", "adaption_prompt", "ln_tuning", "loha", "lokr", "oft", "miss"),
    *("vera", "randlora", "delora", "road"),
)

GIVEN_UP = "Dynamo recompile limit exceeded"  # how torch's reason begins where it compiles a function no more

_first = 0  # graphs after the first layers


def resolve(settings) -> None:
    """Leave the fusing to the compiler. Raises: UserError on a machine without a compiler for its kernels."""
    if not settings.compile_layers:
        return
    if not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        raise UserError("--compile_layers: torch compiles its kernels with g++, which is not on PATH; apt install g++.")
    for name in ("use_liger_kernel", "fused_lora"):
        if name in settings.values and settings.source[name] in ("default", "transformers default"):
            decide(settings, name, False, "compiled layers fuse the same operations")
    if settings.trains_adapter and settings.adapter not in COMPARED:
        settings.decisions.append(
            f"compile_layers with --adapter {settings.adapter}: its compiled gradients were not compared with eager "
            "ones; compare the first losses with those of --compile_layers false"
        )


def resolve_for_model(settings, config) -> None:
    """Refuse a mixture of experts, an adapter at stage 3, and a model without layers of transformers' class."""
    if not settings.compile_layers:
        return
    if experts.count(config):
        raise UserError(
            "--compile_layers: the experts of a mixture get tokens by their values, which a compiler cannot follow; "
            "leave it out."
        )
    if settings.zero == 3 and settings.trains_adapter:
        raise UserError(
            "--compile_layers with an adapter at ZeRO stage 3: a compiled layer is gathered whole, which DeepSpeed "
            "cannot do with frozen weights; use --zero 2, or leave it out."
        )
    _layers(load.check_model(settings, config))


def _layers(model) -> list[torch.nn.Module]:
    """Return the decoder layers. Raises: UserError if there is none of transformers' class."""
    layers = load.transformer_layers(model)
    if not layers:
        raise UserError(f"--compile_layers: {type(model).__name__} has no layers of transformers' class; leave it out.")
    return layers


def install(settings, model) -> None:
    """Compile the forward of each class of layers, with any number of tokens."""
    if not settings.compile_layers:
        return
    name = settings.attn_implementation
    if name in ALL_ATTENTION_FUNCTIONS:  # which the compiler calls and does not trace; eager is plain arithmetic
        AttentionInterface.register(name, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name]))
    layers = _layers(model)
    compiled = {kind: _compiled(kind) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = compiled[type(layer)]


def _compiled(kind: type) -> type:
    """Return a class of layers like `kind` whose forward is compiled while it trains.

    transformers wraps the forward of each subclass of its layers by gradient checkpointing, and of several such
    wrappers the outermost checkpoints: what is compiled is inside.
    """
    compiled, said = torch.compile(kind.forward, dynamic=True), []

    def forward(layer, *args, **kwargs):
        if not layer.training:
            return kind.forward(layer, *args, **kwargs)
        output = compiled(layer, *args, **kwargs)
        if not said:
            said.append(_say(kind.__name__))
        return output

    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {"forward": forward, **named})


def _say(name: str) -> None:
    """Say into how many graphs the first layer of a class was compiled, and what broke it into these."""
    global _first

    breaks, _first = counters["graph_break"], counters["stats"]["unique_graphs"]
    reasons = "; ".join(f"{count} x {reason.splitlines()[0]}" for reason, count in breaks.items())
    broken = sum(breaks.values())
    _tell(f"compile_layers: {name} in {_first} graphs with {broken} graph breaks ({reasons or 'none'})")


def tell_at_end(settings) -> None:
    """Say, at the end of a training, what was compiled after the first layers, and whether torch has given up on it."""
    if not settings.compile_layers:
        return
    if (graphs := counters["stats"]["unique_graphs"]) > _first:
        _tell(f"compile_layers: {graphs} graphs at the end, {_first} after the first layers")
    if any(reason.startswith(GIVEN_UP) for reason in counters["unimplemented"]):
        limit = torch.compiler.config.recompile_limit
        _tell(
            f"compile_layers: torch has compiled a part of a layer {limit} times, its limit, and computes inputs of "
            "other kinds without its kernels, which is slower; TORCH_LOGS=recompiles says how they differ"
        )


def _tell(sentence: str) -> None:
    """Print a sentence, on rank 0, and add it to the run's decisions."""
    if distributed.rank() == 0:
        print(sentence, flush=True)
    if folder := run_folder.opened():
        run_folder.add_to_run(folder, "decisions", [sentence])


def simulated(settings, asked) -> dict[str, bool]:
    """Leave compilation out of a simulation: tensors without memory cannot be compiled (docs/kernels.md)."""
    return {"compile_layers": False} if asked.fake else {}


TECHNIQUE = Technique(
    name="compiled layers",
    simulated=simulated,
    flag="compile_layers",
    example="--compile_layers true",
    conflicts=(
        Conflict("torch_compile", (True,), "it compiles the whole model"),
        Conflict("use_liger_kernel", (True,), "Liger's kernels replace what is compiled"),
        Conflict("tiled_mlp", AllBut(1), "its tiles are checkpointed within a layer", "use --tiled_mlp 1"),
        Conflict(
            "gradient_checkpointing_policy",
            ("selective",),
            "the products in a compiled kernel cannot be kept one by one",
        ),
        Conflict("attn_implementation", ("flex_attention",), "it is compiled by itself", "use sdpa"),
        Conflict(
            "use_dora",
            (True,),
            "peft's norms of DoRA break each layer at every matrix, which leaves little to fuse and takes minutes",
        ),
        Conflict("memory_report", (True,), "compiled code cannot be followed"),
        Conflict("tp_size", None, "DeepSpeed's split layers cannot be traced"),
    ),
    resolve=resolve,
    resolve_for_model=resolve_for_model,
    install=install,
)
