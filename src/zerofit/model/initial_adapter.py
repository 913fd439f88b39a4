"""Continue training a LoRA adapter (--initial_adapter): take its configuration and load its weights."""

import json
import re
from pathlib import Path

from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file

from zerofit.base.errors import UserError, first_line
from zerofit.job.settings import as_typed, decide
from zerofit.job.technique import Technique
from zerofit.model.weights import files, finite

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"

# Flag -> key of the adapter's configuration.
CONFIG_KEYS = {"lora_r": "r", "lora_alpha": "lora_alpha", "use_dora": "use_dora", "use_rslora": "use_rslora",
               "lora_target_modules": "target_modules", "modules_to_save": "modules_to_save"}  # fmt: skip

# Flags that would change the configuration.
EXCLUDED_FLAGS = ("adapter_config", "init_lora_weights", "lora_target_parameters", "new_tokens")

# Values of init_lora_weights that keep the base, or that peft can recompute from the base alone.
SUPPORTED_INITS = r"True|False|gaussian|orthogonal|eva|olora|pissa(_niter_\d+)?"

SNAPSHOT = re.compile(r"models--(.+?)--([^/]+)/snapshots/")  # path of a Hub model in the cache


def resolve(settings) -> None:
    """Take the adapter's settings from its configuration.

    Raises: UserError for a missing configuration, an adapter that is not LoRA, a flag that differs, or another base.
    """
    folder = settings.values.get("initial_adapter")
    if folder is None:
        return
    place = f"--initial_adapter {folder}"
    _check_single(folder, settings.model)
    if settings.adapter != "lora":
        raise UserError(f"{place} without --adapter lora: only LoRA adapters can be continued; add --adapter lora.")
    config = read(folder)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{place}: its type is {config.get('peft_type')}, and only LoRA adapters can be continued.")
    init = str(config.get("init_lora_weights", True))
    if not re.fullmatch(SUPPORTED_INITS, init):
        raise UserError(
            f"{place}: init_lora_weights {init} in {CONFIG} is not supported, because it changes the base; merge the "
            "adapter with peft, and train on the merged model."
        )
    if config.get("trainable_token_indices"):
        raise UserError(f"{place}: it has rows of new tokens; merge it (zerofit export --merge), and train on that.")
    if config.get("modules_to_save") and settings.zero == 3:
        raise UserError(f"{place}: its modules_to_save cannot be loaded at stage 3; use --zero 2.")
    for flag in EXCLUDED_FLAGS:
        if settings.values.get(flag) and settings.source[flag] not in ("default", "bundled task"):
            raise UserError(f"--{flag} with {place}: the adapter's configuration is used; leave the flag out.")
    for flag, key in CONFIG_KEYS.items():
        _set_from_config(settings, place, flag, config.get(key))
    _check_base(settings, place, config.get("base_model_name_or_path"))
    shape = f"rank {settings.lora_r}, alpha {settings.lora_alpha}"
    settings.decisions.append(f"initial_adapter {folder}: training continues from its weights ({shape})")


def _check_single(where: str, model: str) -> None:
    """Raise UserError for several adapters, with the commands that merge all but the last."""
    several = [word.strip() for word in where.split(",") if word.strip()]
    if len(several) < 2 or Path(where).expanduser().exists():
        return
    bases = [model, *(f"merged-{number}" for number in range(1, len(several)))]
    commands = [
        f"zerofit export {adapter} --base {before} --merge --output_dir {after}"
        for adapter, before, after in zip(several, bases, bases[1:], strict=False)
    ]
    raise UserError(
        f"--initial_adapter {where}: only one adapter can be continued; merge the others, then train with --model "
        f"{bases[-1]} --initial_adapter {several[-1]}:\n  " + "\n  ".join(commands)
    )


def read(where: str) -> dict:
    """Return an adapter's configuration. Raises: UserError for a folder without an adapter."""
    folder = Path(where).expanduser()
    missing = next((name for name in (CONFIG, FILE) if not (folder / name).is_file()), None)
    if missing:
        raise UserError(
            f"--initial_adapter {where}: {missing} is missing; pass the folder of an adapter, such as runs/x/final."
        )
    if reason := files.damage(folder / FILE):
        raise UserError(f"--initial_adapter {where}: {FILE} is damaged ({reason}); copy it again.")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return config if isinstance(config, dict) else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"--initial_adapter {where}: {CONFIG} is damaged: {first_line(error)}") from None


def _set_from_config(settings, place: str, flag: str, value) -> None:
    """Set a flag from the adapter's configuration. Raises: UserError if the user has set another value."""
    if flag == "lora_target_modules":
        value = sorted(value) if isinstance(value, list) else [value]
    current = settings.values[flag]
    differs = sorted(current) != value if isinstance(current, list) and value else current != value
    if settings.source[flag] not in ("default", "bundled task") and differs and current != ["all-linear"]:
        raise UserError(
            f"--{flag} {as_typed(flag, current)} with {place}: the adapter has {value}; leave the flag out, or train a "
            "new adapter."
        )
    if value is not None:
        decide(settings, flag, value)


def _check_base(settings, place: str, base: str | None) -> None:
    """Raise UserError if names and files show that the adapter was trained on another base than --model."""
    model = settings.model
    if not base or _name(base) == _name(model):
        return
    folders = [Path(word).expanduser() for word in (base, model)]
    are_here = [folder.is_dir() for folder in folders]
    if all(are_here) and _shapes(folders[0]) == _shapes(folders[1]) != {}:
        settings.decisions.append(f"initial_adapter: it was trained on {base}; --model {model} has the same shapes")
        return
    if any(are_here) and not all(are_here):
        settings.decisions.append(
            f"initial_adapter: it was trained on {base}; --model {model} may be another model, as only shapes can be "
            "compared"
        )
        return
    raise UserError(f"{place}: it was trained on {base}, not on --model {model}; use that base, or another adapter.")


def _name(model: str) -> str:
    """Return the Hub id of a model in the cache, the absolute path of a folder, or the name as it is."""
    if match := SNAPSHOT.search(model):
        return f"{match[1]}/{match[2]}"
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor of a model's files."""
    headers = [files.tensors(file) for file in folder.glob("*.safetensors")]
    return {name: entry["shape"] for header in headers for name, entry in header.items()}


def load(model, where: str) -> None:
    """Load the adapter's weights into a PEFT model. Raises: UserError if they do not fit the base."""
    weights = load_file(Path(where).expanduser() / FILE)
    finite.check(weights, f"--initial_adapter {where}", FILE)
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in expected.items()}
    wrong = sorted(name for name in {*weights, *shapes} if name not in weights or name not in shapes)
    wrong += sorted(name for name in shapes.keys() & weights.keys() if shapes[name] != tuple(weights[name].shape))
    if wrong:
        raise UserError(
            f"--initial_adapter {where}: {len(wrong)} of its weights do not fit the model: {', '.join(wrong[:2])}; it "
            "was trained on another base, or the copy is incomplete."
        )
    if not any(tensor.is_meta for tensor in expected.values()):  # load.check_model builds on the meta device
        set_peft_model_state_dict(model, weights)


TECHNIQUE = Technique(name="initial adapter", resolve=resolve)
