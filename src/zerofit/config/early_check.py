"""Answer --help and refuse what is missing or in the way before torch and transformers are imported.

That takes seconds. Flags are not parsed here: `parse.request` refuses what is wrong with one, before a model is loaded.
"""

import shlex
from pathlib import Path

from zerofit.base import command_line, hub
from zerofit.base.errors import UserError
from zerofit.config import help, presets, synonyms
from zerofit.data import sources
from zerofit.job import data_entry, program, run_folder, settings_file
from zerofit.job.recipe import BUNDLED_MODEL, Recipe

OF_A_FILE = ("launch", "slurm", "hosts", "kubernetes")  # verbs that take a recipe's file and its flags

OF_A_NAME = ("data", "batch-size", "plan")  # those that take its name as --recipe; a plan needs no row to be here

# The arguments that are looked at, but show, whose value is a word in a YAML file too.
TEXTS = ("data", "eval_data", "data_split", "model", "output_dir", "preset", "resume_from_checkpoint")

WITHOUT_VALUE = ("--show", "--print")  # of their options before the file


def command(verb: str, words: list[str]) -> None:
    """Check what the recipe's flags name among the arguments of `zerofit VERB`.

    Raises: UserError for the user's mistakes.
    """
    try:
        more = shlex.split(command_line.value_of(words, ("--args",)) or "")
    except ValueError:
        return  # command_line.with_more raises the error
    if verb in OF_A_NAME and not {"-h", "--help"} & {*words, *more}:
        named = program.start(command_line.value_of(words, ("--recipe",)) or program.DEFAULT)
        check(named.recipe, [*words, *more], here=verb != "plan", own_folder=False)
    file = next((i for i in range(len(words)) if _is_file(words, i)), None)
    if verb in OF_A_FILE and file is not None:
        recipe = program.start(words[file]).recipe
        single_node = verb == "launch" and command_line.value_of(words[:file], ("--nnodes",)) in (None, "", "1")
        local = verb == "launch" and "--show" not in words[:file]
        check(recipe, [*words[file + 1 :], *more], here=local, own_folder=single_node)


def _is_file(words: list[str], index: int) -> bool:
    """Return whether a word is a recipe's file, and neither an option nor an option's value."""
    word, before = words[index], words[index - 1] if index else ""
    is_value = before.startswith("--") and "=" not in before and before not in WITHOUT_VALUE
    return word.endswith(".py") and not word.startswith("-") and not is_value


def check(recipe: Recipe, argv: list[str], here: bool, own_folder: bool) -> None:
    """Check a recipe's local files and its run folder; print the help and exit for --help.

    Args: here: model and data are on this machine; own_folder: this process chooses the run folder.
    Raises: UserError for the user's mistakes.
    """
    if {"-h", "--help"} & set(argv):
        print(help.text(recipe, whole="all" in argv))
        raise SystemExit(0)
    said = _said(argv)
    if name := "".join(said.get("preset", [])):
        presets.values(name)
    model = said.get("model", [BUNDLED_MODEL])
    if here and not _is_true(said.get("show", ["false"])):  # config/show.py lists missing files itself
        split = [*said.get("data_split", []), "train"][0]
        for entry in [*said.get("data", []), *said.get("eval_data", [])]:
            sources.find_local(entry, split)
        if len(model) == 1 and model != [BUNDLED_MODEL]:
            hub.model_folder(model[0])
    _refuse_default_model(recipe, said)
    if own_folder and any(said.get("output_dir", [])):
        resumes = said.get("resume_from_checkpoint") or ["false"]
        run_folder.check_folder(Path(said["output_dir"][0]).expanduser(), resumes[0].lower() != "false")


def _said(argv: list[str]) -> dict[str, list[str]]:
    """Return the words of each flag, and those of TEXTS and show that the flags leave to their YAML file."""
    flags = {name[2:]: values for name, values, _ in command_line.by_flag(argv)}
    return (_in_file(flags["config"][0]) if any(flags.get("config", [])) else {}) | flags


def _in_file(path: str) -> dict[str, list[str]]:
    """Return the words of each key of a YAML file of arguments."""
    values, nodes = settings_file.load(path, said=f"--config {path}")
    if not isinstance(values, dict):  # parse.read_yaml raises the error
        return {}
    said = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in TEXTS:
            value = settings_file.as_written(f"{settings_file.place(path, key, nodes)}: {key}", value, nodes.get(key))
        if value is not None:
            said[name] = settings_file.words(value)
    return said


def _is_true(words: list[str]) -> bool:
    """Return whether a flag with these words is true, as transformers reads them; one without a word is."""
    return not words or words[0].lower() in ("true", "t", "yes", "y", "1")


def _refuse_default_model(recipe: Recipe, said: dict[str, list[str]]) -> None:
    """Raise UserError for rows of the user without a model: the bundled one, which knows 512 words, would train."""
    bundled = recipe.bundled_file.parent.resolve()
    paths = [data_entry.parse(entry).path for entry in said.get("data", [])]
    others = [path for path in paths if not Path(path).expanduser().resolve().is_relative_to(bundled)]
    known = ["model", *recipe.own_arguments]
    is_named = said.get("model", [""]) != [""] or any(  # by another name, which the parser refuses with that hint
        synonyms.hint(name, recipe, known) == "--model" for name in said.keys() - {"model"}
    )
    if others and not is_named and "model" not in recipe.defaults:
        raise UserError(
            f"--data {others[0]}: no model is named to train on these rows; add --model (MODEL=), such as "
            f"Qwen/Qwen3-0.6B, or --model {BUNDLED_MODEL} for the bundled toy model."
        )
