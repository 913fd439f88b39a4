"""Compare a model's weights with the names and shapes in its files; refuse a model that lacks some."""

import contextlib
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.model.image_text import classes
from zerofit.model.weights import files

# The last comparison that held, here or in the launcher of this process: {"key": of the files, "unexpected": names}.
HELD: dict = {}

PART_OF_IMAGES = ("vision", "visual", "image", "audio", "mm_projector", "multi_modal")  # in names of other weights


@dataclass(frozen=True)
class Names:
    """How the weights of a model and those in its files go together, by upstream's own conversions.

    total: weights of the model, tied ones once; mismatched: (name, shape in the files, shape in the model); unexpected:
    in the files alone, None: not known; loaded_as, saved_as: classes.
    """

    total: int
    missing: tuple[str, ...] = ()
    mismatched: tuple[tuple, ...] = ()
    unexpected: tuple[str, ...] | None = ()
    loaded_as: str = ""
    saved_as: str = ""


def of_loaded(model, info: dict) -> Names:
    """Return what from_pretrained reports with `output_loading_info` of the model that it has loaded.

    Under ZeRO-3 it knows the missing names only: the unexpected ones are those of `check`, if it has run.
    """
    from transformers.integrations import is_deepspeed_zero3_enabled

    named = dict(model.named_parameters()).keys() | (model.state_dict().keys() & dict(model.named_buffers()).keys())
    unexpected = tuple(sorted(info["unexpected_keys"]))
    if is_deepspeed_zero3_enabled():
        unexpected = tuple(HELD["unexpected"]) if HELD else None
    mismatched = tuple(sorted((name, list(saved), list(own)) for name, saved, own in info["mismatched_keys"]))
    saved_as = (getattr(model.config, "architectures", None) or [""])[0]
    tied = {name for name, other in model.all_tied_weights_keys.items() if other in info["missing_keys"]}
    missing = tuple(sorted(info["missing_keys"] - tied))  # both ends of a tie are missing: named once
    return Names(len(named), missing, mismatched, unexpected, type(model).__name__, saved_as)


def check(folder: Path, place: str, remote: bool = False) -> None:
    """Compare before anything is loaded, by the headers of the files: a second, for the largest models ten.

    Args: place: what named the folder, for the message; remote: --trust_remote_code.
    Raises: UserError for damaged files, and for weights that are missing or of another shape.
    """
    files.check(folder, place)
    key = _key(folder, place)
    if HELD.get("key") == key:
        return
    if (names := _by_headers(folder, place, remote)) is not None:
        refuse(names, place)
        HELD.update(key=key, unexpected=names.unexpected)


def _key(folder: Path, place: str) -> str:
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files.of_model(folder, place)]
    stats.append((str(folder.resolve()), (folder / "config.json").read_text(encoding="utf-8")))
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _by_headers(folder: Path, place: str, remote: bool) -> Names | None:
    """Load tensors without memory, of the files' names and shapes, as from_pretrained loads; None if it cannot."""
    import torch
    from transformers import AutoConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    from transformers.modeling_utils import str_to_torch_dtype

    unset_hf_deepspeed_config()  # one of an earlier run in this process would shard the model
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=remote)
        with torch.device("meta"):
            model_class = type(classes.auto_class(config).from_config(config, trust_remote_code=remote))
            tensors = {
                name: torch.empty(entry["shape"], dtype=str_to_torch_dtype.get(entry["dtype"], torch.uint8))
                for file in files.of_model(folder, place)
                for name, entry in files.read_header(file).items()
                if name != "__metadata__"
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
        return None
    return of_loaded(model, info)


def unpacked(config) -> dict:
    """Return the argument of from_pretrained that unpacks MXFP4 weights (gpt-oss), which cannot be trained packed."""
    if not is_mxfp4(config):
        return {}
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


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
    from transformers.utils import logging as words

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
    """Raise UserError if weights are missing or of another shape."""
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
    return f"base weights: {len(names.unexpected)} in the files are not used by {names.loaded_as}: " + listed(
        names.unexpected
    )
