"""Compile the decoder layers of a model (--compile_layers), except their attention.

torch.compile of a class's forward is shared by all its layers, so the compile time does not depend on their number. The
number of tokens is dynamic: rows of any length use the same kernels. The attention (which needs the documents of a
row), the embedding, the loss, gradient checkpointing and the hooks of DDP and ZeRO are not compiled. Evaluation and
generation run uncompiled.
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

# Values of --adapter whose gradients match eager layers (tests/model/test_compiled.py).
TESTED_ADAPTERS = (
    *("lora", "ia3", "prompt_tuning", "prefix_tuning", "adaption_prompt", "ln_tuning", "loha", "lokr", "oft", "miss"),
    *("vera", "randlora", "delora", "road"),
)

LIMIT_REASON = "Dynamo recompile limit exceeded"  # start of torch's reason when it stops compiling a function

_first_graphs = 0  # number of graphs after the first layers


def resolve(settings) -> None:
    """Turn other fused kernels off. Raises: UserError on a machine without a C++ compiler."""
    if not settings.compile_layers:
        return
    if not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        raise UserError("--compile_layers: torch compiles its kernels with g++, which is not on PATH; apt install g++.")
    for name in ("use_liger_kernel", "fused_lora"):
        if name in settings.values and settings.source[name] in ("default", "transformers default"):
            decide(settings, name, False, "compiled layers fuse the same operations")
    if settings.trains_adapter and settings.adapter not in TESTED_ADAPTERS:
        settings.decisions.append(
            f"compile_layers with --adapter {settings.adapter}: compiled gradients are not tested for this adapter; "
            "compare the first losses with a run with --compile_layers false"
        )


def resolve_for_model(settings, config) -> None:
    """Raise UserError for a mixture of experts, an adapter at stage 3, or a model without transformers' layers."""
    if not settings.compile_layers:
        return
    if experts.count(config):
        raise UserError(
            "--compile_layers: the routing of a mixture of experts depends on values, which cannot be compiled; leave "
            "it out."
        )
    if settings.zero == 3 and settings.trains_adapter:
        raise UserError(
            "--compile_layers with an adapter at ZeRO stage 3: all weights of a compiled layer are gathered together, "
            "which DeepSpeed does not support for frozen weights; use --zero 2, or leave it out."
        )
    _layers(load.check_model(settings, config))


def _layers(model) -> list[torch.nn.Module]:
    """Return the decoder layers. Raises: UserError without layers of transformers' class."""
    layers = load.transformer_layers(model)
    if not layers:
        raise UserError(f"--compile_layers: {type(model).__name__} does not use transformers' layers; leave it out.")
    return layers


def install(settings, model) -> None:
    """Compile the forward of each class of layers, for any number of tokens."""
    if not settings.compile_layers:
        return
    name = settings.attn_implementation
    if name in ALL_ATTENTION_FUNCTIONS:  # called without being traced; eager is plain arithmetic
        AttentionInterface.register(name, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name]))
    layers = _layers(model)
    compiled = {kind: _compiled(kind) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = compiled[type(layer)]


def _compiled(kind: type) -> type:
    """Return a subclass of `kind` whose forward is compiled in training.

    transformers wraps the forward of each subclass of its layers with gradient checkpointing, of which only the
    outermost wrapper is active: the compiled code is inside of it.
    """
    compiled, reported = torch.compile(kind.forward, dynamic=True), []

    def forward(layer, *args, **kwargs):
        if not layer.training:
            return kind.forward(layer, *args, **kwargs)
        output = compiled(layer, *args, **kwargs)
        if not reported:
            reported.append(_report_graphs(kind.__name__))
        return output

    named = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {"forward": forward, **named})


def _report_graphs(name: str) -> None:
    """Report the number of graphs and the graph breaks of the first layer of a class."""
    global _first_graphs

    breaks, _first_graphs = counters["graph_break"], counters["stats"]["unique_graphs"]
    reasons = "; ".join(f"{count} x {reason.splitlines()[0]}" for reason, count in breaks.items())
    broken = sum(breaks.values())
    _report(f"compile_layers: {name} in {_first_graphs} graphs with {broken} graph breaks ({reasons or 'none'})")


def report_at_end(settings) -> None:
    """Report graphs that were compiled after the first layers, and whether torch reached its limit."""
    if not settings.compile_layers:
        return
    if (graphs := counters["stats"]["unique_graphs"]) > _first_graphs:
        _report(f"compile_layers: {graphs} graphs at the end, {_first_graphs} after the first layers")
    if any(reason.startswith(LIMIT_REASON) for reason in counters["unimplemented"]):
        limit = torch.compiler.config.recompile_limit
        _report(
            f"compile_layers: torch reached its limit of {limit} compilations of a function, and runs other kinds of "
            "inputs uncompiled, which is slower; set TORCH_LOGS=recompiles to see the differences"
        )


def _report(sentence: str) -> None:
    """Print a sentence on rank 0, and add it to the run's decisions."""
    if distributed.rank() == 0:
        print(sentence, flush=True)
    if folder := run_folder.opened():
        run_folder.add_to_run(folder, "decisions", [sentence])


def simulated(settings, question) -> dict[str, bool]:
    """Simulate without compilation, as tensors without memory cannot be compiled (docs/speed.md)."""
    return {"compile_layers": False} if question.fake else {}


TECHNIQUE = Technique(
    name="compiled layers",
    simulated=simulated,
    flag="compile_layers",
    example="--compile_layers true",
    conflicts=(
        Conflict("torch_compile", (True,), "it compiles the entire model"),
        Conflict("use_liger_kernel", (True,), "Liger's kernels replace the compiled code"),
        Conflict("tiled_mlp", AllBut(1), "its tiles are checkpointed within a layer", "use --tiled_mlp 1"),
        Conflict(
            "gradient_checkpointing_policy",
            ("selective",),
            "products inside a compiled kernel cannot be kept separately",
        ),
        Conflict("attn_implementation", ("flex_attention",), "it is compiled separately", "use sdpa"),
        Conflict(
            "use_dora",
            (True,),
            "peft's DoRA norms cause a graph break at every matrix, which leaves little to fuse and takes minutes",
        ),
        Conflict("memory_report", (True,), "the operations of compiled code are not visible"),
        Conflict("tp_size", None, "DeepSpeed's split layers cannot be traced"),
    ),
    resolve=resolve,
    resolve_for_model=resolve_for_model,
    install=install,
)
