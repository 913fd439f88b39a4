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

from zerofit.base.command_line import by_flag, drop, names, repeated, with_auto_as_probe
from zerofit.base.errors import UserError
from zerofit.config import arguments, deepspeed_json, help, presets, synonyms
from zerofit.convert import kits
from zerofit.data import formats
from zerofit.data.published import rendered
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
        except argparse.ArgumentError as error:  # argparse's own for a flag that is there twice
            raise UserError(
                f"{program.shown(recipe)}: a flag of its RECIPE's arguments is there already: {error}; rename it."
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
        if sentence := synonyms.of_value(message):
            on_command_line = self.origin == "command line"
            raise UserError(f"--{sentence}" if on_command_line else f"{self.origin}: {sentence}")
        raise UserError(f"{self.origin}: {message}. Every flag: --help all.")


@functools.cache
def build_parser(recipe: Recipe) -> _Parser:
    """Return the parser of all flags of a recipe; built once, as a plan reads the flags of hundreds of settings."""
    groups = (*arguments.kit_groups(recipe), TrainingArguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parser = _Parser(recipe, groups, formatter_class=argparse.HelpFormatter)
    parallelism = next(action for action in parser._actions if action.dest == "parallelism_config")
    parallelism.type = str  # an accelerate object, not text: transformers_flags.check refuses it with the reason
    optim = next(action for action in parser._actions if action.dest == "optim")
    optim.choices, optim.metavar = None, "OPTIM"  # registry.resolve checks it: there are more than transformers has
    choice = next(action for action in parser._actions if action.dest == "data_format")
    choice.choices = ("auto", *rendered.VALUES, *(entry.name for entry in formats.known_to(recipe)))
    return parser


def explicit(recipe: Recipe, argv: list[str], origin: str, strict: bool = True) -> dict[str, Any]:
    """Return only the arguments given in `argv`, with argparse's types and choices checked; strict: no others."""
    parser = build_parser(recipe)
    parser.origin = origin
    argv = _with_negative_numbers(with_auto_as_probe(argv))
    names = [action.dest for action in parser._actions if action.dest != "help"]
    namespace, unknown = parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(names, _UNSET)))
    if unknown and strict:
        raise UserError(f"{origin}: {synonyms.of_unknown(unknown, recipe, names, origin)}")
    return {k: v for k, v in vars(namespace).items() if v is not _UNSET}


def _with_negative_numbers(argv: list[str]) -> list[str]:
    """Join a flag and a value such as -1e-4 or -inf, which argparse takes for another flag."""
    words = []
    for word in argv:
        if words and re.fullmatch(r"--[^=]+", words[-1]) and re.fullmatch(r"-(\.?\d[\d.]*e.*|inf|nan)", word, re.I):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def given(recipe: Recipe | str, flags: list[str], name: str) -> Any:
    """Return an argument's value in the flags or their YAML file; None if neither has it."""
    recipe = program.recipe_of(recipe)
    values = explicit(recipe, flags, "command line", strict=False)
    if name not in values and values.get("config"):
        values = read_yaml(values["config"], recipe)
    return values.get(name)


def _unless(off: str, what: str):
    """Return a function of a value: what it does, "" for the values in `off`."""
    return lambda word: "" if word.lower() in off.split() else what


def _by_json(path: str) -> str:
    """Return what a key of a DeepSpeed JSON writes, sends or executes; "" if none does."""
    found = deepspeed_json.acting_key(deepspeed_json.read_json(path))
    return f"whose key {found[0]} {found[1]}" if found else ""


# Argument -> function of a value: what the value writes, deletes, sends or executes for whoever resumes the run, "" if
# nothing.
FOR_OTHERS = {
    "trust_remote_code": _unless("false", "which runs Python code that comes with its --model"),
    "attn_implementation": lambda word: "which runs a kernel from the Hugging Face Hub" if "/" in word else "",
    "push_to_hub": _unless("false", "which uploads the model under your name"),
    "upload_to": _unless("", "which copies the run there, and replaces and deletes what is there"),
    "report_to": _unless("none", "which sends what the run records under your name, or writes it elsewhere"),
    "offload_path": _unless("", "which writes and deletes files there"),
    "deepspeed": _by_json,
}

# Arguments that decide what one of those executes or sends, and to where.
DECIDE = (
    *FOR_OTHERS, "model", "model_revision", "config", "preset", "hub_model_id", "hub_revision", "hub_private_repo",
    "hub_strategy", "project", "run_name", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
)  # fmt: skip


def refuse_foreign(recipe: Recipe, flags: list[str], new: list[str], run: Path) -> None:
    """Refuse flags of a run folder that write elsewhere, send or execute something, unless this user has given them.

    Args: flags: that the run folder holds; new: of this command line, which are this user's; run: the run folder.
    Raises: UserError, naming the flag to give again.
    """
    decide = {f"--{name}" for name in DECIDE}

    def deciding(words: list[str]) -> list:
        return [(name, values) for name, values, _ in by_flag(words) if name in decide]

    record = program.recall(run)
    if record and deciding(record["flags"]) == deciding(flags):
        return
    kept = drop(flags, *names(new))
    for name, acts in FOR_OTHERS.items():
        value = given(recipe, kept, name) if f"--{name}" not in names(new) else None
        words = [] if value is None else settings_file.words(value)
        if what := next(filter(None, map(acts, words)), None):
            raise UserError(
                f"{run}: its flags have --{name} {' '.join(words)}, {what}, and this user has not started that run; "
                f"give --{name} again to agree, or --{name} with another value."
            )


def read_yaml(path: str, recipe: Recipe) -> dict[str, Any]:
    """Return the arguments in a YAML file, checked like flags.

    Raises: UserError with file and line for broken YAML, an unknown key or a wrong value.
    """
    values, nodes = settings_file.load(path, said=f"--config {path}")
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold `argument: value` lines, found a {type(values).__name__}.")
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
        return explicit(recipe, [word for words in flags.values() for word in words], str(path))
    except UserError as first:
        mistakes = []
        for key, words in flags.items():
            if isinstance(values[key], list) and not _takes_several(recipe, key):
                mistakes.append(f"{places[key]}: {key} is a list: it takes one value.")
                continue
            try:
                explicit(recipe, words, places[key])
            except UserError as mistake:
                mistakes.append(str(mistake))
        raise UserError(" ".join(mistakes) or str(first)) from None


def argument_names(recipe: Recipe) -> set[str]:
    """Return the names of all arguments of a recipe."""
    return {action.dest for action in build_parser(recipe)._actions} - {"help"}


def _takes_several(recipe: Recipe, key: str) -> bool:
    """Return whether an argument takes a list; true for one that does not exist."""
    actions = build_parser(recipe)._actions
    return all(action.nargs in ("*", "+") for action in actions if action.dest == key.replace("-", "_"))


def _refuse_nulls(places: dict[str, str], recipe: Recipe) -> None:
    """Raise UserError for a null where zerofit's or transformers' default is a value; others are the default."""
    defaults = vars(build_parser(recipe).parse_args([])) | arguments.SHARED_DEFAULTS | dict(recipe.defaults)
    for key, place in places.items():
        if (default := defaults.get(key.replace("-", "_"))) is not None:
            more = "; 0 keeps every checkpoint" if key == "save_total_limit" else ""
            raise UserError(f"{place}: {key}: null is no value; write one, or leave the line out for {default}{more}.")


OFF = ("eval_strategy", "hub_strategy", "logging_strategy", "save_strategy")  # YAML reads their value `no` as false


def _flag(key: str, value: Any) -> list[str]:
    """Return a YAML key with its value as words of a command line."""
    if isinstance(value, list):
        return [f"--{key}", *settings_file.words(value)]
    if value is False and key.replace("-", "_") in OFF:
        value = "no"
    return [f"--{key}={settings_file.words(value)[0]}"]


def request(recipe: Recipe | str, argv: list[str]) -> Request:
    """Return what a command line and the YAML file that it names ask for, typed and checked.

    Args: recipe: or the name of the one that this process runs or of the kit's.
    Raises: UserError for anything unknown or malformed.
    """
    recipe = program.recipe_of(recipe)
    from_flags = explicit(recipe, argv, "command line")
    from_yaml = read_yaml(from_flags["config"], recipe) if from_flags.get("config") else {}
    place = {name[2:]: number for number, (name, _, _) in enumerate(by_flag(with_auto_as_probe(argv)))}
    from_flags = dict(sorted(from_flags.items(), key=lambda item: place.get(item[0], len(place))))  # as they were typed
    source = dict.fromkeys(from_yaml, str(from_flags.get("config"))) | dict.fromkeys(from_flags, FLAG)
    return Request(recipe, {**from_yaml, **from_flags}, source, tuple(repeated(argv)))


def settings_of(asked: Request, world_size: int, gpu=None) -> Settings:
    """Return the Settings of a request over the preset and the defaults, for config/resolve.py to go on with.

    Args: world_size: number of ranks of the job; gpu: hardware.Gpu to plan for, which this machine need not have; None:
        this machine's.
    """
    from zerofit.parallel import ways  # noqa: F401  # Settings ask them how ranks share rows; they bring torch

    recipe, given, origins = asked.recipe, dict(asked.values), dict(asked.source)
    if given.get("model") == BUNDLED_MODEL:
        del given["model"], origins["model"]
    bundled = {}
    if not given.get("model") and not given.get("data"):
        bundled, folder = read_yaml(str(recipe.bundled_file), recipe), recipe.bundled_file.parent
        bundled |= {"data": [str(folder / "train.jsonl")], "eval_data": [str(folder / "eval.jsonl")]}

    preset = presets.values(given["preset"]) if given.get("preset") else {}
    if given.get("gradient_checkpointing") is False:  # the preset's choice of layers goes with it
        preset = {name: value for name, value in preset.items() if not name.startswith("gradient_checkpointing")}

    values, source = {}, {}
    defaults = copy.deepcopy(vars(build_parser(recipe).parse_args([])))  # lists and dicts are the parser's own
    if unknown := {*recipe.defaults, *recipe.adapter_defaults} - defaults.keys():
        raise UserError(f"{program.shown(recipe)}: its RECIPE has a default for {min(unknown)}, which is no argument.")
    for layer, origin in (
        (defaults, "transformers default"),
        ({**arguments.SHARED_DEFAULTS, **recipe.defaults}, "default"),
        (bundled, "bundled task"),
        (preset, f"preset {given.get('preset')}"),
    ):
        values |= layer
        source |= dict.fromkeys(layer, origin)
    values, source = values | copy.deepcopy(given), source | origins
    kit = {f.name for group in arguments.kit_groups(recipe) for f in fields(group)}
    source |= {name: "default" for name in kit if source[name] == "transformers default"}
    settings = Settings(recipe, values, source, world_size, planned_gpu=gpu, defaults=defaults, request=asked)
    settings.decisions += asked.notes
    if preset:
        typed = (f"--{name} {as_typed(name, value)}" for name, value in presets.values(given["preset"]).items())
        settings.decisions.append(f"preset {given['preset']}: {' '.join(typed)}")
    return settings
