"""Compare a model's weights with the names and shapes in its files; refuse a model that lacks some."""

import contextlib
import hashlib
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import ModuleList
from transformers import AutoConfig, Mxfp4Config
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import logging as words

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.model.image_text import classes, saved
from zerofit.model.weights import config_json, files

# The last comparison that held, here or in the launcher of this process: {"key": of the files, "unexpected": names}.
HELD: dict = {}

FLOATS = ("F64", "F32", "BF16", "F16")  # of safetensors, in which weights are numbers without a scale

MUCH = 0.1  # of the tensors in the files; above, that they are left out is a warning

# Buffers of older checkpoints, which the layers compute by themselves.
COMPUTED = re.compile(r"(attn|attention)\.(bias|masked_bias|causal_mask)$|inv_freq$|position_ids$")

SCALES = re.compile(r"scale|scb$|absmax|zero_point|qzeros", re.IGNORECASE)  # names of those of packed weights

PART_OF_IMAGES = ("vision", "visual", "image", "audio", "mm_projector", "multi_modal")  # in names of other weights


@dataclass(frozen=True)
class Names:
    """How the weights of a model and those in its files go together, by upstream's own conversions.

    total: weights of the model, tied ones once; mismatched: (name, shape in the files, shape in the model); unexpected:
    in the files alone, None: not known; of_layers: those of them that stand in the model's numbered layers, or in
    further ones; packed: (name, type) of weights that are whole or 8-bit numbers; loaded_as, saved_as: classes.
    """

    total: int
    missing: tuple[str, ...] = ()
    mismatched: tuple[tuple, ...] = ()
    unexpected: tuple[str, ...] | None = ()
    of_layers: tuple[str, ...] = ()
    packed: tuple[tuple[str, str], ...] = ()
    loaded_as: str = ""
    saved_as: str = ""


def of_loaded(model, info: dict) -> Names:
    """Return what from_pretrained reports with `output_loading_info` of the model that it has loaded.

    Under ZeRO-3 it knows the missing names only: the unexpected ones are those of `check`, if it has run.
    """
    named = dict(model.named_parameters()).keys() | (model.state_dict().keys() & dict(model.named_buffers()).keys())
    unexpected = tuple(sorted(info["unexpected_keys"]))
    if is_deepspeed_zero3_enabled():
        unexpected = tuple(HELD["unexpected"]) if HELD else None
    mismatched = tuple(sorted((name, list(saved), list(own)) for name, saved, own in info["mismatched_keys"]))
    saved_as = (getattr(model.config, "architectures", None) or [""])[0]
    tied = {name for name, other in model.all_tied_weights_keys.items() if other in info["missing_keys"]}
    missing = tuple(sorted(info["missing_keys"] - tied))  # both ends of a tie are missing: named once
    of_layers = _of_layers(model, unexpected or ())
    return Names(len(named), missing, mismatched, unexpected, of_layers, (), type(model).__name__, saved_as)


def _of_layers(model, unexpected) -> tuple[str, ...]:
    """Return the names that stand in one of the model's lists of layers; not those of layers that predict further."""
    text = model.config.get_text_config()
    beside = sum(getattr(text, name, None) or 0 for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    sizes = {name: len(module) for name, module in model.named_modules() if isinstance(module, ModuleList)}
    found = []
    for name in unexpected:
        for place in (name, f"{model.base_model_prefix}.{name}"):
            for match in re.finditer(r"\.(\d+)\.", place):
                layers = sizes.get(place[: match.start()])
                in_list = layers is not None and not layers <= int(match[1]) < layers + beside
                if in_list and not COMPUTED.search(name) and name not in found:
                    found.append(name)
    return tuple(found)


def check(folder: Path, place: str, remote: bool = False) -> None:
    """Compare before anything is loaded, by the headers of the files: a second, for the largest models ten.

    Args: place: what named the folder, for the message; remote: --trust_remote_code.
    Raises: UserError for damaged files, and for weights that are missing or of another shape.
    """
    files.check(folder, place)
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files.of_model(folder, place)]
    stats.append((str(folder.resolve()), (folder / "config.json").read_text(encoding="utf-8")))
    key = hashlib.sha256(repr(stats).encode()).hexdigest()
    if HELD.get("key") == key:
        return
    if (names := _by_headers(folder, place, remote)) is not None:
        refuse(names, place)
        HELD.update(key=key, unexpected=names.unexpected)
    for sentence in warnings(folder, names, remote) if distributed.rank() == 0 else ():
        print(f"warning: {place}: {sentence}", flush=True)


def _by_headers(folder: Path, place: str, remote: bool) -> Names | None:
    """Load tensors without memory, of the files' names and shapes, as from_pretrained loads; None if it cannot."""
    unset_hf_deepspeed_config()  # one of an earlier run in this process would shard the model
    packed = ()
    try:
        config = config_json.config_of(folder, remote)
        header = {k: v for file in files.of_model(folder, place) for k, v in files.tensors(file).items()}
        with torch.device("meta"):
            skeleton = classes.auto_class(config).from_config(config, trust_remote_code=remote)
            packed = _packed(skeleton, config, header)
            model_class = type(skeleton)
            tensors = {
                name: torch.empty(entry["shape"], dtype=str_to_torch_dtype.get(entry["dtype"], torch.uint8))
                for name, entry in header.items()
            }
        with without_report(), without_words():
            model, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **unpacked(config),
            )
    except Exception:  # a conversion that needs values, or a class that cannot be built so: loading itself decides
        return Names(0, packed=packed) if packed else None
    return replace(of_loaded(model, info), packed=packed)


def _packed(model, config, header: dict) -> tuple[tuple[str, str], ...]:
    """Return (name, type) of the tensors that hold whole or 8-bit numbers where the model has weights."""
    odd = {name: entry["dtype"] for name, entry in header.items() if entry["dtype"] not in FLOATS}
    if not odd:
        return ()
    weights, in_model = dict(model.named_parameters()).keys(), saved.conversions_of(model, odd)[1]
    mxfp4 = ("_blocks", "_scales") if is_mxfp4(config) else ()  # which are unpacked with each other
    return tuple((n, kind) for n, kind in odd.items() if in_model[n][0] in weights and not n.endswith(mxfp4))


def unpacked(config) -> dict:
    """Return the argument of from_pretrained that unpacks MXFP4 weights (gpt-oss), which cannot be trained packed."""
    return {"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4(config) else {}


def is_mxfp4(config) -> bool:
    return (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4"


def save_unpacked(model) -> None:
    """Make save_pretrained write weights that were unpacked from MXFP4 under their own names, not the packed ones.

    With those, which it takes from the files that were loaded, no one could load the model again.
    """
    conversions = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [c for c in conversions if not any("_blocks" in name for name in c.source_patterns)]


@contextlib.contextmanager
def without_report():
    """Leave out transformers' own table of missing weights: `refuse` says it in a sentence."""
    logger = logging.getLogger("transformers.modeling_utils")

    def keep(record) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@contextlib.contextmanager
def without_words():
    """Leave out transformers' progress bar and warnings, which come again when the weights are loaded."""
    bar, level = words.is_progress_bar_enabled(), words.get_verbosity()
    words.disable_progress_bar()
    words.set_verbosity_error()
    try:
        yield
    finally:
        words.set_verbosity(level)
        if bar:
            words.enable_progress_bar()


# --- in words ---


def refuse(names: Names, place: str) -> None:
    """Raise UserError if weights are missing, of another shape, without their scales, or of more layers."""
    if names.packed:
        name, kind = names.packed[0]
        raise UserError(
            f"{place}: {len(names.packed)} of its weights are {kind} numbers in its files ({name}), and config.json "
            "has no quantization_config that says how to scale them: they would be read as the weights themselves. "
            "Name the original model, or a copy in 16 bits."
        )
    if names.missing:
        raise UserError(
            f"{place}: {len(names.missing)} of its {names.total} weights are not in its files and would be random "
            f"numbers: {listed(names.missing)}. {_cause(names)}"
        )
    if names.mismatched:
        name, saved, own = names.mismatched[0]
        raise UserError(
            f"{place}: {len(names.mismatched)} of its {names.total} weights have another shape in its files than by "
            f"config.json: {name} {saved} instead of {own}. Config and weights are of different models; take both from "
            "one place."
        )
    if names.of_layers:
        scales = any(SCALES.search(name) for name in names.of_layers)
        raise UserError(
            f"{place}: {len(names.of_layers)} weights of layers in its files have no place in {names.loaded_as} by "
            f"config.json and would be left out: {listed(names.of_layers)}. "
            + (
                "They are the scales of packed weights: name the original model, or a copy in 16 bits."
                if scales
                else "Config and weights are of different models (has it fewer layers?); take both from one place."
            )
        )


def warnings(folder: Path, names: Names | None, remote: bool) -> list[str]:
    """Return what is trained on otherwise than config.json says, as sentences."""
    said = [] if names is None or not names.unexpected else [unexpected_in_words(names)]
    if said and len(names.unexpected) <= MUCH * (names.total + len(names.unexpected)):
        said = []  # a decision among others
    if head := config_json.untie(AutoConfig.from_pretrained(folder, trust_remote_code=remote), folder):
        said.append(
            f"config.json says tie_word_embeddings true, but {head} in the files is not the embedding: it is trained "
            "as a weight of its own, and saved models say false"
        )
    return said


def listed(names, most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _cause(names: Names) -> str:
    """Return the likely cause and the fix as sentences, from what is in the files instead."""
    other = names.unexpected or ()
    of_images = any(word in name for name in other for word in PART_OF_IMAGES)
    renamed = _renamed(names.missing, other)
    if 2 * len(renamed) >= len(names.missing):
        name, saved = renamed[0]
        larger = ", beside weights of images or sound: they are the text part of a larger model" if of_images else ""
        return (
            f"{len(renamed)} of them are there under other names ({saved} instead of {name}){larger}. Name a "
            f"checkpoint of {names.loaded_as}, or save this one with that class."
        )
    if names.saved_as and names.saved_as != names.loaded_as:
        return (
            f"config.json is of {names.saved_as}, which is loaded as {names.loaded_as}: a model with another head, or "
            "none, cannot be fine-tuned as a language model; name the language model that it was made from."
        )
    if of_images:
        return "The files hold weights of images or sound: name a text-only checkpoint."
    if 2 * len(names.missing) >= names.total and other:
        return f"The files hold {len(other)} others ({listed(other, 2)}): config.json is of another model."
    return "The copy is not complete; download it, or save it, again."


def _renamed(missing, unexpected) -> list[tuple[str, str]]:
    """Return (name in the model, name in the files) where these end alike, of the commonest pair of beginnings."""
    by_end = {}
    for name in unexpected:
        words = name.split(".")
        for i in range(len(words) - 1):  # one word alone ("weight") says nothing
            by_end.setdefault(tuple(words[i:]), name)
    pairs = {}
    for name in missing:
        words = name.split(".")
        for i in range(len(words) - 1):  # the longest end first
            if saved := by_end.get(tuple(words[i:])):
                beginnings = tuple(words[:i]), tuple(saved.split(".")[: -len(words[i:])])
                pairs.setdefault(beginnings, []).append((name, saved))
                break
    return max(pairs.values(), key=len, default=[])


def unexpected_in_words(names: Names) -> str:
    """Return the decision about weights that are in the files alone, "" without any."""
    if not names.unexpected:
        return ""
    count, what = len(names.unexpected), listed(names.unexpected)
    return f"base weights: {count} in the files are not used by {names.loaded_as}: {what}"
