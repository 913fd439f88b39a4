"""Answer a plan by formula before any library is imported, which takes seconds, for models of known kinds.

Only the model's config.json is read. What is not known here, such as another architecture or flag, has no quick answer;
`search.search` then gives the first one. It checks a quick answer too, with all its candidates.
"""

import argparse
import atexit
import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from zerofit.base import buffers, hardware, hub
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB, Gpu
from zerofit.base.paths import cache_root
from zerofit.job import batch_size
from zerofit.job.recipe import Recipe
from zerofit.job.request import Request
from zerofit.plan import formulas, gpu_memory, simulate
from zerofit.plan.advice import preference
from zerofit.plan.advice.preference import Offer
from zerofit.plan.answer import known_models
from zerofit.plan.candidate import Candidate, Plan
from zerofit.plan.formulas import Setting
from zerofit.plan.speed import step
from zerofit.plan.speed.kernels import Kernels


@dataclass(frozen=True)
class Method:
    """What of a method its memory and time depend on."""

    adapter: bool = False  # it trains a LoRA
    bits: int = 16  # of the base's matrices
    answers: int = 1  # to a prompt, each of --max_length tokens, in a row


# As candidates.methods() has them, and for `--method auto` by the name of the recipe.
METHODS = {
    "sft": Method(),
    "lora": Method(adapter=True),
    "qlora": Method(adapter=True, bits=4),
    "dpo": Method(answers=2),
}
AUTO = {"sft": ["sft", "lora", "qlora"], "lora": ["lora", "qlora"]}

# Options of `zerofit plan` and flags of the recipe that a quick answer takes, with their defaults.
OPTIONS = {
    "recipe": "sft", "method": "", "gpus": "1", "nodes": "", "node_link_gbs": "", "gpu_type": "", "output_dir": "",
    "rows": "", "gpu_price": "", "args": "", "host_memory": "", "disk": "", "model": "", "max_length": "2048",
    "zero": "", "offload": "", "per_device_train_batch_size": "", "effective_batch_size": "", "data": "none",
    "save_total_limit": "1", "lora_r": str(known_models.LORA_RANK),
}  # fmt: skip

# (every, selective, offloaded) of gradient checkpointing: as candidates.less_checkpointing and what follows there
CHECKPOINTING = ((0, False, False), (1, True, False), (2, False, False), (1, False, False), (1, False, True))

ROWS = " and rows of {} tokens, whatever --data has"

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


def sentence(label: str, peak: float, limit: float, rows: str = "") -> str:
    """Return the first answer as a line that says what it is: an estimate, which the simulation may change.

    Args: rows: words on rows that it was not computed with.
    """
    margin, size = f"{gpu_memory.FORMULA_MARGIN:.0%}", f"about {peak / GIB:.1f} of {limit / GIB:.1f} GiB"
    return (
        f"first answer, by formula with a margin of {margin}{rows}: {label}, {size}; "
        "the exact answer, by simulation, follows and may be another"
    )


def without_rows(text: str) -> str:
    """Return a `sentence` without its words on rows."""
    return re.sub(ROWS.format(r"\d+"), "", text)


def answer(words: list[str]) -> str | None:
    """Return the sentence for the fastest setting that fits by formula; None: not known here, or none fits.

    Raises: UserError or another error for words that the command refuses.
    """
    given = _given(words)
    if given is None or (config := _config(given.model)) is None:
        return None
    plan = plan_of(given)
    if not plan.gpu.bf16 or _has_proofs():
        return None
    tried = {name: fastest_first(name, config, given, plan) for name in methods_of(given)}
    found = next(iter(tried.values())) if len(tried) == 1 else _of_auto(tried, plan)
    first = next((one for one in found if one.peak <= plan.limit and not plan.host_is_short(one)), None)
    rows = "" if given.data == "none" else ROWS.format(given.max_length)
    return first and sentence(first.label, first.peak, plan.limit, rows)


def plan_of(given: argparse.Namespace) -> Plan:
    """Return an empty plan with the limits that `search.search` sets. given: by names of OPTIONS."""
    gpu, gpus = hardware.find(given.gpu_type), int(given.gpus)
    ranks, node = (int(given.nodes) * gpus, gpus) if given.nodes else (gpus, gpu_memory.GPUS_OF_A_NODE)
    if given.node_link_gbs:
        gpu = replace(gpu, node_gbs=float(given.node_link_gbs))
    outside, total = gpu_memory.outside_allocator(gpu, ranks, node), int(gpu.memory_gib * GIB)
    limit = total - int(gpu_memory.MARGIN * total) - sum(outside.values())
    plan = Plan(gpu, ranks, limit, outside, None, [], node=node, kept=int(given.save_total_limit))
    plan.host_limit = int(float(given.host_memory) * GIB) if given.host_memory else None
    plan.disk_limit = int(float(given.disk) * GIB) if given.disk else None
    return plan


def methods_of(given: argparse.Namespace) -> list[str]:
    """Return the methods that the command looks at, in order of preference."""
    return AUTO[given.recipe] if given.method == "auto" else [given.method or given.recipe]


def _of_auto(tried: dict[str, list[Candidate]], plan: Plan) -> list[Candidate]:
    """Return the settings of the method that --method auto looks at first; [] if none is fast enough and fits."""
    plan.host_assumed = preference.host_assumed(plan)
    offers = [
        Offer(
            name, found, preference.fastest_that_fits(found, plan),
            preference.worth(name == [*tried][-1], METHODS[name].adapter),
        )
        for name, found in tried.items()
    ]  # fmt: skip
    return next((found for _, found in preference.near(offers, plan)), [])


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
    if given.recipe not in METHODS or (given.method == "auto" and given.recipe not in AUTO):
        return None
    names = methods_of(given)
    plain = METHODS.keys() >= {*names} and not [*rest, *more]
    if given.lora_r != OPTIONS["lora_r"] and not all(METHODS[name].adapter for name in names):
        return None
    return given if plain and given.model and given.gpu_type not in ("", "detect") else None


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
    return config if known_models.is_known(config) else None


def _has_proofs() -> bool:
    """Return whether kernels were proven on this machine: plans then count them, for some GPUs and models."""
    return any(next((cache_root() / kind).glob("*"), None) for kind in ("liger", "flex_attention"))


def fastest_first(method: str, config: dict, given: argparse.Namespace, plan: Plan) -> list[Candidate]:
    """Return the settings without groups that `candidates.candidates` lists, the fastest first.

    Args: given: strings by names of OPTIONS. Raises: UserError for sizes of batches that do not go together.
    """
    own, request = METHODS[method], Request(Recipe(method))
    shape = known_models.shape_of(config, own.adapter, own.bits, int(given.lora_r))
    settings, length = _settings(plan.gpu, own), int(given.max_length)
    fused, found = shape.vocabulary >= buffers.LARGE_VOCABULARY, []
    for setting in _settings_of(own, given, plan):
        formula = formulas.memory(shape, setting, settings, fused)
        seconds = step.seconds(shape, setting, plan.gpu, length)
        found.append(Candidate(request, method, setting, formula, seconds, shape, plan.gpu, row_length=length))
    return sorted(found, key=lambda one: (round(one.seconds, 4), one.setting.zero))


def _settings_of(own: Method, given: argparse.Namespace, plan: Plan) -> Iterator[Setting]:
    """Yield the settings to try, as `candidates._of_group` does."""
    fixed = {name: int(text) for name in OPTIONS if name.endswith("batch_size") and (text := getattr(given, name))}
    micro, ranks = fixed.get("per_device_train_batch_size"), plan.ranks
    rows, *_ = batch_size.solve(fixed.get("effective_batch_size"), micro, None, ranks)
    rows //= ranks
    micros = [micro] if micro else batch_size.divisors(rows)
    stages = [int(given.zero)] if given.zero else [0, 1, 2, 3]
    offloads = [given.offload] if given.offload else ["none", "optimizer", "all"]
    for zero, offload, kind, micro in itertools.product(stages, offloads, CHECKPOINTING, micros):
        (every, selective, offloaded), tokens = kind, micro * int(given.max_length) * own.answers
        refused = (selective and own.adapter) or (offload == "all" and own.bits < 16)
        if refused or not formulas.sensible(zero, offload, ranks, bool(given.zero)):
            continue
        whole = zero == 3 and not own.adapter
        yield Setting(
            zero, offload, every, micro, tokens, rows // micro, ranks, offloaded, node=plan.node, selective=selective,
            whole_layers=buffers.whole_layers_up_to(tokens, ranks, offload) if whole else 0,
            fp32_weights=zero == 0 and not own.adapter,
            kernels=Kernels(fused_loss=True, experts_apart=not plan.gpu.groups_products),
        )  # fmt: skip


def _settings(gpu: Gpu, own: Method) -> SimpleNamespace:
    """Return what `formulas.memory` reads of the settings of the recipe's defaults."""
    return SimpleNamespace(
        recipe=SimpleNamespace(optimizers={}), optim="adamw_torch_fused", pure_bf16=False, precision="bf16",
        trains_adapter=own.adapter, dtype="auto", planned_gpu=gpu,
    )  # fmt: skip
