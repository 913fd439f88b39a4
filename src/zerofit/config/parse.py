"""Read the arguments of a recipe: flags override the YAML file, which overrides the defaults."""

import argparse
import copy
import functools
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from zerofit.base.command_line import by_flag, drop, expand_auto_batch_size, names, repeated
from zerofit.base.errors import UserError
from zerofit.config import arguments, deepspeed_json, help, presets, synonyms
from zerofit.convert import kits
from zerofit.data import formats
from zerofit.data.dataset_conventions import rendered
from zerofit.job import program, settings_file
from zerofit.job.recipe import BUNDLED_MODEL, Recipe
from zerofit.job.request import FLAG, Request
from zerofit.job.settings import Settings, as_typed

_UNSET = object()


class _Parser(HfArgumentParser):
    """HfArgumentParser whose errors are one sentence instead of 300 lines of usage."""

    origin = "command line"

    def __init__(self, recipe: Recipe, groups: tuple[type, ...], **kwargs):
        try:
            super().__init__(groups, prog=recipe.name, allow_abbrev=False, **kwargs)
        except argparse.ArgumentError as error:  # argparse refuses duplicate flags
            raise UserError(
                f"{program.display_path(recipe)}: a flag of its RECIPE exists already: {error}; rename it."
            ) from None
        self.recipe = recipe
        for action in self._actions:
            if any(choice is True for choice in action.choices or ()):  # else a choice would be the word "True"
                action.type = lambda word: {"true": True, "false": False}.get(word.lower(), word)
            elif action.dest == "tiled_mlp":
                action.type = lambda word: int(word) if word.isdecimal() else word  # a number, or auto

    def print_help(self, file=None):
        print(help.text(self.recipe), file=file)

    def error(self, message: str):
        if sentence := synonyms.explain_value(message):
            on_command_line = self.origin == "command line"
            raise UserError(f"--{sentence}" if on_command_line else f"{self.origin}: {sentence}")
        raise UserError(f"{self.origin}: {message}. For a list of all flags: --help all.")


@functools.cache
def build_parser(recipe: Recipe) -> _Parser:
    """Return the parser of all flags of a recipe; cached, as a plan parses hundreds of settings."""
    groups = (*arguments.kit_groups(recipe), TrainingArguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parser = _Parser(recipe, groups, formatter_class=argparse.HelpFormatter)
    parallelism = next(action for action in parser._actions if action.dest == "parallelism_config")
    parallelism.type = str  # an accelerate object; transformers_flags.resolve refuses it with the reason
    optim = next(action for action in parser._actions if action.dest == "optim")
    optim.choices, optim.metavar = None, "OPTIM"  # registry.resolve checks it: transformers lacks some
    choice = next(action for action in parser._actions if action.dest == "data_format")
    choice.choices = ("auto", *rendered.VALUES, *(entry.name for entry in formats.formats_of(recipe)))
    return parser


def parse_explicit(recipe: Recipe, argv: list[str], origin: str, strict: bool = True) -> dict[str, Any]:
    """Return the arguments set in `argv`, with types and choices checked. Args: strict: refuse unknown flags."""
    parser = build_parser(recipe)
    parser.origin = origin
    argv = _with_negative_numbers(expand_auto_batch_size(argv))
    names = [action.dest for action in parser._actions if action.dest != "help"]
    namespace, unknown = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(names, _UNSET)))
    if unknown and strict:
        raise UserError(f"{origin}: {synonyms.explain_unknown(unknown, recipe, names, origin)}")
    return {k: v for k, v in vars(namespace).items() if v is not _UNSET}


def _with_negative_numbers(argv: list[str]) -> list[str]:
    """Join a flag and a value such as -1e-4 or -inf, which argparse would read as another flag."""
    words = []
    for word in argv:
        if words and re.fullmatch(r"--[^=]+", words[-1]) and re.fullmatch(r"-(\.?\d[\d.]*e.*|inf|nan)", word, re.I):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def value_of(recipe: Recipe | str, flags: list[str], name: str) -> Any:
    """Return an argument's value in the flags or their YAML file; None if neither sets it."""
    recipe = program.recipe_of(recipe)
    values = parse_explicit(recipe, flags, "command line", strict=False)
    if name not in values and values.get("config"):
        values = read_yaml(values["config"], recipe)
    return values.get(name)


def _unless(off: str, effect: str):
    """Return a function of a value: its effect, or "" for the values in `off`."""
    return lambda word: "" if word.lower() in off.split() else effect


def _effect_of_json(path: str) -> str:
    """Return the effect of a key of a DeepSpeed JSON that writes, sends or executes something, or ""."""
    match = deepspeed_json.acting_key(deepspeed_json.read_json(path))
    return f"whose key {match[0]} {match[1]}" if match else ""


# Argument -> function of a value: its effect (files written, data sent, code executed) when the run is resumed, or "".
NEEDS_CONSENT = {
    "trust_remote_code": _unless("false", "which runs Python code of its --model"),
    "attn_implementation": lambda word: "which runs a kernel from the Hugging Face Hub" if "/" in word else "",
    "push_to_hub": _unless("false", "which uploads the model under your name"),
    "upload_to": _unless("", "which copies the run there, and replaces and deletes files there"),
    "report_to": _unless("none", "which sends the run's records under your name, or writes them elsewhere"),
    "offload_path": _unless("", "which writes and deletes files there"),
    "deepspeed": _effect_of_json,
}

# Arguments that decide what these execute or send, and where to.
CONSENT_INPUTS = (
    *NEEDS_CONSENT, "model", "model_revision", "config", "preset", "hub_model_id", "hub_revision", "hub_private_repo",
    "hub_strategy", "project", "run_name", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
)  # fmt: skip


def refuse_foreign(recipe: Recipe, flags: list[str], new: list[str], run: Path) -> None:
    """Refuse flags of another user's run that write elsewhere, send or execute something without consent.

    Args: flags: the run's flags; new: the flags of this command line; run: the run folder.
    Raises: UserError with the flag to repeat.
    """
    inputs = {f"--{name}" for name in CONSENT_INPUTS}

    def consent_inputs(words: list[str]) -> list:
        return [(name, values) for name, values, _ in by_flag(words) if name in inputs]

    record = program.recall(run)
    if record and consent_inputs(record["flags"]) == consent_inputs(flags):
        return
    kept = drop(flags, *names(new))
    for name, effect_of in NEEDS_CONSENT.items():
        value = value_of(recipe, kept, name) if f"--{name}" not in names(new) else None
        words = [] if value is None else settings_file.words(value)
        if effect := next(filter(None, map(effect_of, words)), None):
            raise UserError(
                f"{run}: its flags contain --{name} {' '.join(words)}, {effect}, and you did not start this run; "
                f"repeat --{name} with this value to agree, or set another one."
            )


def read_yaml(path: str, recipe: Recipe) -> dict[str, Any]:
    """Return the arguments in a YAML file, checked like flags.

    Raises: UserError with file and line for broken YAML, an unknown key or a wrong value.
    """
    values, nodes = settings_file.load(path, label=f"--config {path}")
    if not isinstance(values, dict):
        raise UserError(f"{path}: must contain `argument: value` lines, found a {type(values).__name__}.")
    if sentence := kits.foreign(values, path, frozenset(argument_names(recipe))):
        raise UserError(sentence)
    places = {key: settings_file.place(path, key, nodes) for key in values}
    texts = {action.dest for action in build_parser(recipe)._actions if action.type is str and not action.choices}
    flags = {}
    for key, value in values.items():
        if key.replace("-", "_") in texts:
            value = settings_file.as_written(f"{places[key]}: {key}", value, nodes.get(key))
        flags |= {key: _flag(key, value)} if value is not None else {}
    _refuse_nulls({key: places[key] for key in values if key not in flags}, recipe)
    try:
        return parse_explicit(recipe, [word for words in flags.values() for word in words], str(path))
    except UserError as first:
        mistakes = []
        for key, words in flags.items():
            if isinstance(values[key], list) and not _takes_several(recipe, key):
                mistakes.append(f"{places[key]}: {key} is a list, but takes one value.")
                continue
            try:
                parse_explicit(recipe, words, places[key])
            except UserError as mistake:
                mistakes.append(str(mistake))
        raise UserError(" ".join(mistakes) or str(first)) from None


def argument_names(recipe: Recipe) -> set[str]:
    """Return the names of all arguments of a recipe."""
    return {action.dest for action in build_parser(recipe)._actions} - {"help"}


def _takes_several(recipe: Recipe, key: str) -> bool:
    """Return whether an argument takes a list; true for an unknown argument."""
    actions = build_parser(recipe)._actions
    return all(action.nargs in ("*", "+") for action in actions if action.dest == key.replace("-", "_"))


def _refuse_nulls(places: dict[str, str], recipe: Recipe) -> None:
    """Raise UserError for a null if the default of zerofit or transformers is not null, too."""
    defaults = vars(build_parser(recipe).parse_args([])) | arguments.SHARED_DEFAULTS | dict(recipe.defaults)
    for key, place in places.items():
        if (default := defaults.get(key.replace("-", "_"))) is not None:
            more = "; 0 keeps every checkpoint" if key == "save_total_limit" else ""
            raise UserError(f"{place}: {key} is null; set a value, or delete the line (default {default}{more}).")


OFF = ("eval_strategy", "hub_strategy", "logging_strategy", "save_strategy")  # YAML reads their value `no` as false


def _flag(key: str, value: Any) -> list[str]:
    """Return a YAML key with its value as words of a command line."""
    if isinstance(value, list):
        return [f"--{key}", *settings_file.words(value)]
    if value is False and key.replace("-", "_") in OFF:
        value = "no"
    return [f"--{key}={settings_file.words(value)[0]}"]


def request(recipe: Recipe | str, argv: list[str]) -> Request:
    """Return the request of a command line and its YAML file, typed and checked.

    Args: recipe: a recipe, or the name of a recipe of this process or the kit.
    Raises: UserError for unknown or malformed arguments.
    """
    recipe = program.recipe_of(recipe)
    from_flags = parse_explicit(recipe, argv, "command line")
    from_yaml = read_yaml(from_flags["config"], recipe) if from_flags.get("config") else {}
    place = {name[2:]: number for number, (name, _, _) in enumerate(by_flag(expand_auto_batch_size(argv)))}
    from_flags = dict(sorted(from_flags.items(), key=lambda item: place.get(item[0], len(place))))  # as they were typed
    source = dict.fromkeys(from_yaml, str(from_flags.get("config"))) | dict.fromkeys(from_flags, FLAG)
    return Request(recipe, {**from_yaml, **from_flags}, source, tuple(repeated(argv)))


def settings_of(request: Request, world_size: int, gpu=None) -> Settings:
    """Return the unresolved Settings of a request merged onto the preset and the defaults.

    Args: world_size: number of ranks of the job; gpu: hardware.Gpu to plan for, or None for this machine's.
    """
    from zerofit.parallel import dims  # noqa: F401  # registers them for Settings; imports torch

    recipe, explicit, origins = request.recipe, dict(request.values), dict(request.source)
    if explicit.get("model") == BUNDLED_MODEL:
        del explicit["model"], origins["model"]
    bundled = {}
    if not explicit.get("model") and not explicit.get("data"):
        bundled, folder = read_yaml(str(recipe.bundled_file), recipe), recipe.bundled_file.parent
        bundled |= {"data": [str(folder / "train.jsonl")], "eval_data": [str(folder / "eval.jsonl")]}

    preset = presets.values(explicit["preset"]) if explicit.get("preset") else {}
    if explicit.get("gradient_checkpointing") is False:  # also drop the preset's choice of layers
        preset = {name: value for name, value in preset.items() if not name.startswith("gradient_checkpointing")}

    values, source = {}, {}
    defaults = copy.deepcopy(vars(build_parser(recipe).parse_args([])))  # the parser shares its lists and dicts
    if unknown := {*recipe.defaults, *recipe.adapter_defaults} - defaults.keys():
        raise UserError(
            f"{program.display_path(recipe)}: its RECIPE has a default for the unknown argument {min(unknown)}."
        )
    for layer, origin in (
        (defaults, "transformers default"),
        ({**arguments.SHARED_DEFAULTS, **recipe.defaults}, "default"),
        (bundled, "bundled task"),
        (preset, f"preset {explicit.get('preset')}"),
    ):
        values |= layer
        source |= dict.fromkeys(layer, origin)
    values, source = values | copy.deepcopy(explicit), source | origins
    kit = {f.name for group in arguments.kit_groups(recipe) for f in fields(group)}
    source |= {name: "default" for name in kit if source[name] == "transformers default"}
    settings = Settings(recipe, values, source, world_size, planned_gpu=gpu, defaults=defaults, request=request)
    settings.decisions += request.notes
    if preset:
        typed = (f"--{name} {as_typed(name, value)}" for name, value in presets.values(explicit["preset"]).items())
        settings.decisions.append(f"preset {explicit['preset']}: {' '.join(typed)}")
    return settings
