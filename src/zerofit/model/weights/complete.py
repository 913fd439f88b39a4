"""Compare a model's weights with the names and shapes in its files; reject incomplete models."""

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
from transformers.utils import logging as logs

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.model.image_text import classes, saved
from zerofit.model.weights import config_json, files

# The last passed comparison, here or in the launcher of this process: {"key": hash of the files, "unexpected": names}.
LAST_CHECK: dict = {}

FLOATS = ("F64", "F32", "BF16", "F16")  # dtypes of safetensors that do not need a scale

MAX_UNEXPECTED = 0.1  # share of unexpected tensors above which they cause a warning

# Buffers in older checkpoints that the layers compute.
COMPUTED = re.compile(r"(attn|attention)\.(bias|masked_bias|causal_mask)$|inv_freq$|position_ids$")

SCALES = re.compile(r"scale|scb$|absmax|zero_point|qzeros", re.IGNORECASE)  # names of scales of packed weights

MULTIMODAL_NAMES = ("vision", "visual", "image", "audio", "mm_projector", "multi_modal")  # parts of weights' names


@dataclass(frozen=True)
class Names:
    """The comparison of a model's weights with its files, after transformers' conversions.

    total: number of the model's weights, tied ones once; mismatched: (name, shape in the files, shape in the model);
    unexpected: names that are only in the files, None if unknown; in_layers: unexpected names in numbered layers of the
    model, or in further layers; packed: (name, dtype) of integer or 8-bit weights; loaded_as, saved_as: classes.
    """

    total: int
    missing: tuple[str, ...] = ()
    mismatched: tuple[tuple, ...] = ()
    unexpected: tuple[str, ...] | None = ()
    in_layers: tuple[str, ...] = ()
    packed: tuple[tuple[str, str], ...] = ()
    loaded_as: str = ""
    saved_as: str = ""


def loaded_names(model, info: dict) -> Names:
    """Return the names that from_pretrained reports with `output_loading_info`.

    Under ZeRO-3 it only reports missing names; unexpected names come from `check`, if it has run.
    """
    named = dict(model.named_parameters()).keys() | (model.state_dict().keys() & dict(model.named_buffers()).keys())
    unexpected = tuple(sorted(info["unexpected_keys"]))
    if is_deepspeed_zero3_enabled():
        unexpected = tuple(LAST_CHECK["unexpected"]) if LAST_CHECK else None
    mismatched = tuple(sorted((name, list(saved), list(built)) for name, saved, built in info["mismatched_keys"]))
    saved_as = (getattr(model.config, "architectures", None) or [""])[0]
    tied = {name for name, other in model.all_tied_weights_keys.items() if other in info["missing_keys"]}
    missing = tuple(sorted(info["missing_keys"] - tied))  # list tied weights once
    in_layers = _in_layers(model, unexpected or ())
    return Names(len(named), missing, mismatched, unexpected, in_layers, (), type(model).__name__, saved_as)


def _in_layers(model, unexpected) -> tuple[str, ...]:
    """Return the names that belong to one of the model's lists of layers, without multi-token prediction layers."""
    text = model.config.get_text_config()
    extra = sum(getattr(text, name, None) or 0 for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    sizes = {name: len(module) for name, module in model.named_modules() if isinstance(module, ModuleList)}
    names = []
    for name in unexpected:
        for place in (name, f"{model.base_model_prefix}.{name}"):
            for match in re.finditer(r"\.(\d+)\.", place):
                layers = sizes.get(place[: match.start()])
                in_list = layers is not None and not layers <= int(match[1]) < layers + extra
                if in_list and not COMPUTED.search(name) and name not in names:
                    names.append(name)
    return tuple(names)


def check(folder: Path, place: str, remote: bool = False) -> None:
    """Compare the headers of the files before loading; takes a second, ten for the largest models.

    Args: place: the flag and the folder, for messages; remote: --trust_remote_code.
    Raises: UserError for damaged files, and for weights that are missing or have another shape.
    """
    files.check(folder, place)
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files.of_model(folder, place)]
    stats.append((str(folder.resolve()), (folder / "config.json").read_text(encoding="utf-8")))
    key = hashlib.sha256(repr(stats).encode()).hexdigest()
    if LAST_CHECK.get("key") == key:
        return
    if (names := _by_headers(folder, place, remote)) is not None:
        check_names(names, place)
        LAST_CHECK.update(key=key, unexpected=names.unexpected)
    for sentence in warnings(folder, names, remote) if distributed.rank() == 0 else ():
        print(f"warning: {place}: {sentence}", flush=True)


def _by_headers(folder: Path, place: str, remote: bool) -> Names | None:
    """Load tensors without memory, with the files' names and shapes, by from_pretrained; None if it cannot."""
    unset_hf_deepspeed_config()  # the configuration of an earlier run in this process would shard the model
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
        with without_report(), without_logs():
            model, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                device_map={"": "meta"},
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **unpacked(config),
            )
    except Exception:  # the conversion or the class needs values; loading will report errors
        return Names(0, packed=packed) if packed else None
    return replace(loaded_names(model, info), packed=packed)


def _packed(model, config, header: dict) -> tuple[tuple[str, str], ...]:
    """Return (name, dtype) of integer or 8-bit tensors in the files that are weights of the model."""
    packed = {name: entry["dtype"] for name, entry in header.items() if entry["dtype"] not in FLOATS}
    if not packed:
        return ()
    weights, in_model = dict(model.named_parameters()).keys(), saved.conversions_of(model, packed)[1]
    mxfp4 = ("_blocks", "_scales") if is_mxfp4(config) else ()  # these are unpacked together
    return tuple((n, dtype) for n, dtype in packed.items() if in_model[n][0] in weights and not n.endswith(mxfp4))


def unpacked(config) -> dict:
    """Return the argument of from_pretrained that unpacks MXFP4 weights (gpt-oss), which cannot be trained packed."""
    return {"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4(config) else {}


def is_mxfp4(config) -> bool:
    return (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4"


def save_unpacked(model) -> None:
    """Make save_pretrained write weights that were unpacked from MXFP4 under their unpacked names.

    By default it uses the packed names of the loaded files, and the saved model could not be loaded.
    """
    conversions = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [c for c in conversions if not any("_blocks" in name for name in c.source_patterns)]


@contextlib.contextmanager
def without_report():
    """Suppress transformers' table of missing weights: `check_names` raises a readable error."""
    logger = logging.getLogger("transformers.modeling_utils")

    def keep(record) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@contextlib.contextmanager
def without_logs():
    """Suppress transformers' progress bar and warnings, which loading the weights repeats."""
    bar, level = logs.is_progress_bar_enabled(), logs.get_verbosity()
    logs.disable_progress_bar()
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bar:
            logs.enable_progress_bar()


# --- messages ---


def check_names(names: Names, place: str) -> None:
    """Raise UserError for weights that are missing, packed without scales, of another shape or of further layers."""
    if names.packed:
        name, dtype = names.packed[0]
        raise UserError(
            f"{place}: {len(names.packed)} of its weights are {dtype} numbers in its files ({name}), and config.json "
            "does not have a quantization_config with their scales: they would be read without scaling. Use the "
            "original model, or a 16-bit copy."
        )
    if names.missing:
        raise UserError(
            f"{place}: {len(names.missing)} of its {names.total} weights are not in its files and would be random "
            f"numbers: {listed(names.missing)}. {_cause(names)}"
        )
    if names.mismatched:
        name, saved, built = names.mismatched[0]
        raise UserError(
            f"{place}: {len(names.mismatched)} of its {names.total} weights have another shape in its files than in "
            f"config.json: {name} {saved} instead of {built}. Config and weights are of different models; use both of "
            "the same model."
        )
    if names.in_layers:
        scales = any(SCALES.search(name) for name in names.in_layers)
        raise UserError(
            f"{place}: {len(names.in_layers)} weights of layers in its files do not exist in {names.loaded_as} with "
            f"this config.json and would be ignored: {listed(names.in_layers)}. "
            + (
                "They are scales of packed weights: use the original model, or a 16-bit copy."
                if scales
                else "Config and weights are of different models, maybe with fewer layers; use both of the same model."
            )
        )


def warnings(folder: Path, names: Names | None, remote: bool) -> list[str]:
    """Return warnings about differences between the trained model and its config.json."""
    sentences = [] if names is None or not names.unexpected else [describe_unexpected(names)]
    if sentences and len(names.unexpected) <= MAX_UNEXPECTED * (names.total + len(names.unexpected)):
        sentences = []  # only a decision
    if head := config_json.untie(AutoConfig.from_pretrained(folder, trust_remote_code=remote), folder):
        sentences.append(
            f"tie_word_embeddings is true in config.json, but {head} in the files differs from the embedding: it is "
            "trained as a separate weight, and saved models have false"
        )
    return sentences


def listed(names, most: int = 3) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _cause(names: Names) -> str:
    """Return the likely cause and the fix, judged by the unexpected weights."""
    other = names.unexpected or ()
    is_multimodal = any(word in name for name in other for word in MULTIMODAL_NAMES)
    renamed = _renamed(names.missing, other)
    if 2 * len(renamed) >= len(names.missing):
        name, saved = renamed[0]
        larger = ", next to image or audio weights: they are the text part of a larger model" if is_multimodal else ""
        return (
            f"{len(renamed)} of them have other names in the files ({saved} instead of {name}){larger}. Use a "
            f"checkpoint of {names.loaded_as}, or save this one with that class."
        )
    if names.saved_as and names.saved_as != names.loaded_as:
        return (
            f"config.json is of {names.saved_as}, which is loaded as {names.loaded_as}: a model with another head, or "
            "without a head, cannot be fine-tuned as a language model; use the language model that it was made from."
        )
    if is_multimodal:
        return "The files contain image or audio weights; use a text-only checkpoint."
    if 2 * len(names.missing) >= names.total and other:
        return f"The files contain {len(other)} others ({listed(other, 2)}): config.json is of another model."
    return "The copy is incomplete; download or save it again."


def _renamed(missing, unexpected) -> list[tuple[str, str]]:
    """Return (name in the model, name in the files) for names with the same end and the most common prefixes."""
    by_end = {}
    for name in unexpected:
        words = name.split(".")
        for i in range(len(words) - 1):  # the last word alone ("weight") is ambiguous
            by_end.setdefault(tuple(words[i:]), name)
    pairs = {}
    for name in missing:
        words = name.split(".")
        for i in range(len(words) - 1):  # the longest end first
            if saved := by_end.get(tuple(words[i:])):
                prefixes = tuple(words[:i]), tuple(saved.split(".")[: -len(words[i:])])
                pairs.setdefault(prefixes, []).append((name, saved))
                break
    return max(pairs.values(), key=len, default=[])


def describe_unexpected(names: Names) -> str:
    """Return the decision about weights that are only in the files, or ""."""
    if not names.unexpected:
        return ""
    count, what = len(names.unexpected), listed(names.unexpected)
    return f"base weights: {count} unexpected in the files, not used by {names.loaded_as}: {what}"
