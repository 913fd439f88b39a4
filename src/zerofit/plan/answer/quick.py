"""Answer a plan by formula before any library is imported, which takes seconds: known dense models, in full or LoRA.

Only the model's config.json is read. What is not known here, such as another architecture, a method or a flag, has no
quick answer; `search.search` then gives the first one. It checks a quick answer too, with all its candidates.
"""

import argparse
import atexit
import contextlib
import itertools
import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from zerofit.base import buffers, hardware, hub
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB, Gpu
from zerofit.base.paths import cache_root
from zerofit.config import batch_size
from zerofit.plan import formulas, gpu_memory, simulate
from zerofit.plan.advice import worth
from zerofit.plan.formulas import Setting, Shape
from zerofit.plan.speed import step, work
from zerofit.plan.speed.kernels import Kernels

# {model type: (numbers of biases of query, key and value of a layer, whether heads are normed)}
KNOWN = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True)}

NEEDED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "tie_word_embeddings"),
)

# Options of `zerofit plan` and flags of the recipe that a quick answer takes, with their defaults.
OPTIONS = {
    "recipe": "sft", "method": "", "gpus": "1", "nodes": "", "node_link_gbs": "", "gpu_type": "", "output_dir": "",
    "rows": "", "gpu_price": "", "args": "", "model": "", "max_length": "2048", "zero": "", "offload": "",
    "per_device_train_batch_size": "", "effective_batch_size": "", "data": "none",
}  # fmt: skip

METHODS = {"sft": None, "lora": 16, "qlora": 4}  # method: bits of the frozen base, None: there is none

RANK = 16  # of adapters, as --lora_r by default

# (every, selective, offloaded) of gradient checkpointing: as candidates.less_checkpointing and what follows there
CHECKPOINTING = ((0, False, False), (1, True, False), (2, False, False), (1, False, False), (1, False, True))

said = ""  # the quick answer that was printed


def begin(words: list[str]) -> None:
    """Start the process of the simulations, so that its imports run beside this one's, and print a quick answer.

    Args: words: of the command line behind `zerofit plan`.
    """
    global said
    if {"-h", "--help"} & {*words}:
        return
    simulate.prestart()
    atexit.register(simulate.stop_prestarted)
    with contextlib.suppress(UserError, OSError, ValueError, KeyError, TypeError):  # said by who reads them with care
        said = answer(words) or ""
    if said:
        print(said, flush=True)


def sentence(label: str, peak: float, limit: float) -> str:
    """Return the first answer as a line that says what it is: an estimate, which the simulation may change."""
    margin, size = f"{gpu_memory.FORMULA_MARGIN:.0%}", f"about {peak / GIB:.1f} of {limit / GIB:.1f} GiB"
    return (
        f"first answer, by formula with a margin of {margin}: {label}, {size}; "
        "the exact answer, by simulation, follows and may be another"
    )


def answer(words: list[str]) -> str | None:
    """Return the sentence for the fastest setting that fits by formula; None: not known here, or none fits.

    Raises: UserError or another error for words that the command refuses.
    """
    given = _given(words)
    if given is None or (config := _config(given.model)) is None:
        return None
    gpu = hardware.find(given.gpu_type)
    if not gpu.bf16 or _has_proofs():
        return None
    gpus = int(given.gpus)
    ranks, node = (int(given.nodes) * gpus, gpus) if given.nodes else (gpus, gpu_memory.GPUS_OF_A_NODE)
    if given.node_link_gbs:
        gpu = replace(gpu, node_gbs=float(given.node_link_gbs))
    total = int(gpu.memory_gib * GIB)
    limit = total - int(gpu_memory.MARGIN * total) - sum(gpu_memory.outside_allocator(gpu, ranks, node).values())
    listed = {method: _priced(shape_of(config, method), given, ranks, node, gpu) for method in _methods(given)}
    method, tried = next(iter(listed.items())) if len(listed) == 1 else _near(listed, gpu, min(ranks, node), limit)
    for one in tried:
        if one.peak <= limit:
            label = ", ".join([*one.setting.in_words(method), f"micro batch {one.setting.micro}"])
            return sentence(label, one.peak, limit)
    return None


def _methods(given) -> list[str]:
    return list(METHODS) if given.method == "auto" else [given.method]


def _near(listed: dict[str, list], gpu: Gpu, gpus: int, limit: int) -> tuple[str, list]:
    """Return the method that --method auto takes, and the settings that it prefers (advice/methods.py `near`)."""
    host = worth.host_bytes(gpu.memory_gib * GIB, gpus)
    held = {method: [one for one in tried if int(one.host * gpus) <= host] for method, tried in listed.items()}
    fastest = min((one.seconds for tried in held.values() for one in tried if one.peak <= limit), default=0.0)
    for place, (method, tried) in enumerate(held.items()):
        times = worth.worth(place, len(listed), method != "sft")
        fast = [one for one in tried if one.seconds <= worth.most(fastest, times, one.setting.offload)]
        if any(one.by_formula <= limit for one in fast):
            return method, fast
    return "", []


def _given(words: list[str]) -> argparse.Namespace | None:
    """Return the command's options and flags; None if there is one that has no quick answer."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", default=default)
    try:
        given, rest = parser.parse_known_args(words)
        given, more = parser.parse_known_args(shlex.split(given.args), given)
    except argparse.ArgumentError:
        return None
    for name, default in OPTIONS.items():
        if getattr(given, name) == "":
            setattr(given, name, default)
    rest = [word for word in [*rest, *more] if word not in ("--host_memory=", "--host-memory=")]
    given.method = given.method or given.recipe
    is_known = given.method in (*METHODS, "auto") and given.recipe in ("sft", "lora") and given.data == "none"
    return given if is_known and given.model and given.gpu_type not in ("", "detect") and not rest else None


def _config(model: str) -> dict | None:
    """Return the config.json of a model that is on this machine; None: it is not, or it is of an unknown kind."""
    folder = hub.model_folder(model)
    if folder is None:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model, "config.json")
        if not isinstance(file, str):
            return None
    else:
        file = folder / "config.json"
    config = json.loads(Path(file).read_text(encoding="utf-8"))
    return config if _is_known(config) else None


def _is_known(config: dict) -> bool:
    kind = config.get("model_type")
    if kind not in KNOWN or any(config.get(name) is None for name in NEEDED):
        return False
    if kind == "qwen3" and not config.get("head_dim"):
        return False
    windows = bool(config.get("use_sliding_window") or config.get("layer_types"))
    if kind == "mistral":
        windows = "sliding_window" not in config
    special = config.get("attention_bias") or config.get("mlp_bias") or "quantization_config" in config
    return not windows and not special


def _has_proofs() -> bool:
    """Return whether Liger's kernels were proven on this machine: plans then count them, for some GPUs and models."""
    folder = cache_root() / "liger"
    return folder.is_dir() and any(folder.iterdir())


def shape_of(config: dict, method: str = "sft") -> Shape:
    """Return what `candidates.shape_of` does for a model of KNOWN. config: its config.json; method: of METHODS."""
    shape = _in_full(config)
    return shape if method == "sft" else _with_adapters(shape, METHODS[method])


def _in_full(config: dict) -> Shape:
    """Return the shape of full fine-tuning."""
    biases, normed = KNOWN[config["model_type"]]
    hidden, wide, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads, words = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    size = config.get("head_dim") or hidden // heads
    q, k = heads * size, kv_heads * size
    layer = 2 * hidden * q + 2 * hidden * k + 3 * hidden * wide + 2 * hidden
    layer += (q + 2 * k) * biases + 2 * size * normed
    embedding = hidden * words
    window = config.get("sliding_window") or 0 if config["model_type"] == "mistral" else 0
    of_model = work.dense(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=size, intermediate=wide, vocabulary=words
    )
    passes = replace(
        of_model.passes,
        rms=of_model.passes.rms + (q + k) * layers * normed,
        norms=of_model.passes.norms + 2.0 * layers * normed,
        linears=of_model.passes.linears + 1,  # the head
        modules=of_model.passes.modules + 2.0 * layers * normed,
    )
    return Shape(
        trainable=layer * layers + hidden + embedding * (1 if config["tie_word_embeddings"] else 2),
        frozen=0,
        largest=max(embedding, hidden * wide),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        intermediate=wide,
        vocabulary=words,
        embedding=embedding,
        by_layer=(layer,) * layers,
        work=replace(of_model, passes=passes, attentions=((window, float(layers)),)),
    )


def _with_adapters(s: Shape, bits: int) -> Shape:
    """Return the shape with LoRA on all linear layers but the head. bits: of the frozen base."""
    products, passes = [], s.work.passes
    inputs = outputs = packed = 0.0
    for one in s.work.products:
        is_packed = bits < 16 and not one.head
        products.append(replace(one, trained=False, last=False, bits=bits if is_packed else 16))
        if one.head:
            continue
        into, back = (
            replace(one, trained=True, adapter=True, last=False, **size) for size in ({"out": RANK}, {"wide": RANK})
        )
        products += [into, replace(back, last=one.last)]
        inputs, outputs = inputs + one.wide * one.count, outputs + one.out * one.count
        packed += one.weights * is_packed
    adapted = sum(one.count for one in s.work.products if not one.head)
    passes = replace(
        passes, adapted_in=inputs, adapted_out=outputs, adapters=adapted, modules=passes.modules + 2 * adapted,
        packed=adapted * (bits < 16),
    )  # fmt: skip
    added, share, each = RANK * (inputs + outputs), packed / s.trainable, formulas.PACKED_BYTES.get(bits, 2.0)
    return replace(
        s, trainable=int(added), frozen=s.trainable, frozen_bytes=each * share + 2.0 * (1 - share),
        largest=RANK * int(max(max(one.wide, one.out) for one in s.work.products if not one.head)),
        by_layer=tuple(int(layer + added / s.layers) for layer in s.by_layer),
        work=replace(s.work, products=tuple(products), passes=passes),
    )  # fmt: skip


@dataclass(frozen=True)
class Priced:
    """A setting with what a candidate of the search has."""

    setting: Setting
    by_formula: float  # bytes of a GPU, without a margin
    peak: int  # with it
    host: float  # bytes of host memory of a rank
    seconds: float  # of an optimizer step


def _priced(shape: Shape, given, ranks: int, node: int, gpu: Gpu) -> list[Priced]:
    """Return the settings without groups that `candidates.candidates` lists, the fastest first.

    Args: given: strings by names of OPTIONS; node: GPUs of a node. Raises: UserError for sizes of batches that do not
        go together.
    """
    fixed = {name: int(text) for name in OPTIONS if name.endswith("batch_size") and (text := getattr(given, name))}
    micro = fixed.get("per_device_train_batch_size")
    rows, *_ = batch_size.solve(fixed.get("effective_batch_size"), micro, None, ranks)
    rows //= ranks
    micros = [micro] if micro else batch_size.divisors(rows)
    stages = [int(given.zero)] if given.zero else [0, 1, 2, 3]
    offloads = [given.offload] if given.offload else ["none", "optimizer", "all"]
    found = []
    for zero, offload, kind, micro in itertools.product(stages, offloads, CHECKPOINTING, micros):
        tokens, (every, selective, offloaded) = micro * int(given.max_length), kind
        # Adapters have no selective checkpointing, and a packed base stays on the GPU.
        is_refused = (shape.frozen and selective) or (shape.frozen_bytes < 2 and offload == "all")
        if is_refused or not formulas.sensible(zero, offload, ranks, bool(given.zero)):
            continue
        setting = Setting(
            zero, offload, every, micro, tokens, rows // micro, ranks, offloaded, node=node, selective=selective,
            whole_layers=buffers.whole_layers_up_to(tokens, ranks, offload) if zero == 3 and not shape.frozen else 0,
            fp32_weights=zero == 0 and not shape.frozen,
            kernels=Kernels(fused_loss=True),
        )  # fmt: skip
        bytes_of = formulas.memory(
            shape, setting, _settings(gpu, bool(shape.frozen)), shape.vocabulary >= buffers.LARGE_VOCABULARY
        )
        allocated = gpu_memory.with_margin(sum(bytes_of.values()), gpu)
        peak = allocated + gpu_memory.beyond_allocated(None, allocated)["least"]
        by_formula = sum(bytes_of.values()) + gpu_memory.workspace_bytes(gpu)
        seconds = step.seconds(shape, setting, gpu, int(given.max_length))
        found.append(Priced(setting, by_formula, peak, formulas.host_of_a_rank(shape, setting), seconds))
    return sorted(found, key=lambda one: (round(one.seconds, 4), one.setting.zero))


def _settings(gpu: Gpu, trains_adapter: bool) -> SimpleNamespace:
    """Return what `formulas.memory` reads of the settings of the recipe's defaults."""
    return SimpleNamespace(
        recipe=SimpleNamespace(optimizers={}), optim="adamw_torch_fused", pure_bf16=False, precision="bf16",
        trains_adapter=trains_adapter, dtype="auto", planned_gpu=gpu,
    )  # fmt: skip
