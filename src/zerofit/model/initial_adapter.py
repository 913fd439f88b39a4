"""Go on from a LoRA adapter that was trained before (--initial_adapter): its configuration and its weights."""

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

# Flags whose values the adapter's configuration has, by the same names or those behind them.
OF_CONFIG = {"lora_r": "r", "lora_alpha": "lora_alpha", "use_dora": "use_dora", "use_rslora": "use_rslora",
             "lora_target_modules": "target_modules", "modules_to_save": "modules_to_save"}  # fmt: skip

# Flags that would change the configuration.
NOT_BESIDE = ("adapter_config", "init_lora_weights", "lora_target_parameters", "new_tokens")

# Values of init_lora_weights with which an adapter is for its base as it is, or for one that peft makes of it alone.
GOES_ON = r"True|False|gaussian|orthogonal|eva|olora|pissa(_niter_\d+)?"

SNAPSHOT = re.compile(r"models--(.+?)--([^/]+)/snapshots/")  # of a hub model in its cache


def resolve(settings) -> None:
    """Take the adapter's settings from its configuration.

    Raises: UserError for a folder without one, another kind than LoRA, a flag that differs, or another base.
    """
    where = settings.values.get("initial_adapter")
    if where is None:
        return
    named = f"--initial_adapter {where}"
    _check_one(where, settings.model)
    if settings.adapter != "lora":
        raise UserError(f"{named} without --adapter lora: only a LoRA adapter can go on; add --adapter lora.")
    config = read(where)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{named}: it is {config.get('peft_type')}, and only a LoRA adapter can go on.")
    init = str(config.get("init_lora_weights", True))
    if not re.fullmatch(GOES_ON, init):
        raise UserError(
            f"{named}: {CONFIG} says init_lora_weights {init}, which changes the base in a way that is not done here; "
            "merge it with peft, and train on the merged model."
        )
    if config.get("trainable_token_indices"):
        raise UserError(f"{named}: it has rows of new tokens; merge it first (zerofit export --merge) and train on.")
    if config.get("modules_to_save") and settings.zero == 3:
        raise UserError(f"{named}: its modules_to_save cannot be loaded into the shards of stage 3; use --zero 2.")
    for flag in NOT_BESIDE:
        if settings.values.get(flag) and settings.source[flag] not in ("default", "bundled task"):
            raise UserError(f"--{flag} with {named}: the adapter keeps its own configuration; leave the flag out.")
    for flag, name in OF_CONFIG.items():
        _take(settings, named, flag, config.get(name))
    _check_base(settings, named, config.get("base_model_name_or_path"))
    shape = f"rank {settings.lora_r}, alpha {settings.lora_alpha}"
    settings.decisions.append(f"initial_adapter {where}: training goes on from its weights ({shape})")


def _check_one(where: str, model: str) -> None:
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
        f"--initial_adapter {where}: one adapter can go on; merge those before it, then train with --model {bases[-1]} "
        f"--initial_adapter {several[-1]}:\n  " + "\n  ".join(commands)
    )


def read(where: str) -> dict:
    """Return an adapter's configuration. Raises: UserError for a folder that holds no adapter."""
    folder = Path(where).expanduser()
    missing = next((name for name in (CONFIG, FILE) if not (folder / name).is_file()), None)
    if missing:
        raise UserError(
            f"--initial_adapter {where}: {missing} is missing; name the folder of an adapter, such as runs/x/final."
        )
    if reason := files.damage(folder / FILE):
        raise UserError(f"--initial_adapter {where}: {FILE} is damaged ({reason}); copy it again.")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return config if isinstance(config, dict) else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"--initial_adapter {where}: {CONFIG} is damaged: {first_line(error)}") from None


def _take(settings, named: str, flag: str, value) -> None:
    """Decide a flag as the configuration has it. Raises: UserError where the user has given another value."""
    if flag == "lora_target_modules":
        value = sorted(value) if isinstance(value, list) else [value]
    given = settings.values[flag]
    differs = sorted(given) != value if isinstance(given, list) and value else given != value
    if settings.source[flag] not in ("default", "bundled task") and differs and given != ["all-linear"]:
        raise UserError(
            f"--{flag} {as_typed(flag, given)} with {named}: the adapter has {value}; leave the flag out, or begin "
            "another adapter."
        )
    if value is not None:
        decide(settings, flag, value)


def _check_base(settings, named: str, base: str | None) -> None:
    """Raise UserError if the adapter was trained on another base than --model, as far as names and files tell it."""
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
            f"initial_adapter: its configuration names the base {base}, and whether --model {model} is a copy of it is "
            "not known; only shapes are compared"
        )
        return
    raise UserError(f"{named}: it was trained on {base}, not on --model {model}; use that base, or another adapter.")


def _name(model: str) -> str:
    """Return the hub id of a model in the cache, the whole path of a folder, else the word itself."""
    if match := SNAPSHOT.search(model):
        return f"{match[1]}/{match[2]}"
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor of a model's files."""
    tensors = [files.tensors(file) for file in folder.glob("*.safetensors")]
    return {name: entry["shape"] for of_file in tensors for name, entry in of_file.items()}


def load(model, where: str) -> None:
    """Load the adapter's weights into a PEFT model. Raises: UserError for weights that do not fit the base."""
    weights = load_file(Path(where).expanduser() / FILE)
    finite.check(weights, f"--initial_adapter {where}", FILE)
    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in expected.items()}
    wrong = sorted(name for name in {*weights, *shapes} if name not in weights or name not in shapes)
    wrong += sorted(name for name in shapes.keys() & weights.keys() if shapes[name] != tuple(weights[name].shape))
    if wrong:
        raise UserError(
            f"--initial_adapter {where}: {len(wrong)} of its weights do not fit the model: {', '.join(wrong[:2])}; it "
            "was trained on another base, or the copy is not complete."
        )
    if not any(tensor.is_meta for tensor in expected.values()):  # those of load.check_model have no values
        set_peft_model_state_dict(model, weights)


TECHNIQUE = Technique(name="initial adapter", resolve=resolve)
