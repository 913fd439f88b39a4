"""Refuse mistakes on a command line before torch and transformers are imported, which takes seconds."""

import shlex
from pathlib import Path

from zerofit.base import command_line, hub
from zerofit.base.errors import UserError
from zerofit.config import help, parse, presets
from zerofit.data import sources
from zerofit.job import data_entry, program, run_folder
from zerofit.job.recipe import BUNDLED_MODEL, Recipe

OF_A_FILE = ("launch", "slurm", "hosts", "kubernetes")  # verbs that take a recipe's file and its flags

OF_A_NAME = ("data", "batch-size", "plan")  # those that take its name as --recipe; a plan needs no row to be here

WITHOUT_VALUE = ("--show", "--print")  # of their options before the file


def command(verb: str, words: list[str]) -> None:
    """Check the recipe's flags among the arguments of `zerofit VERB`; of a verb in OF_A_NAME only the known ones.

    Raises: UserError for the user's mistakes.
    """
    try:
        more = shlex.split(command_line.value_of(words, ("--args",)) or "")
    except ValueError:
        return  # parse.command_line raises the error
    if verb in OF_A_NAME and not {"-h", "--help"} & {*words, *more}:
        named = program.start(command_line.value_of(words, ("--recipe",)) or program.DEFAULT)
        check(named.recipe, [*words, *more], here=verb != "plan", own_folder=False, strict=False)
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


def check(recipe: Recipe, argv: list[str], here: bool, own_folder: bool, strict: bool = True) -> None:
    """Check a recipe's flags, its local files and its run folder; print the help and exit for --help.

    Args: here: model and data are on this machine; own_folder: this process chooses the run folder; strict: refuse
        flags that the recipe does not have."""
    if {"-h", "--help"} & set(argv):
        print(help.text(recipe, whole="all" in argv))
        raise SystemExit(0)
    values = parse.explicit(recipe, argv, "command line", early=True, strict=strict)
    if values.get("config"):
        values = parse.read_yaml(values["config"], recipe, early=True) | values
    if values.get("preset"):
        presets.values(values["preset"])
    if here and not values.get("show"):  # config/show.py lists missing files itself
        for entry in [*(values.get("data") or []), *(values.get("eval_data") or [])]:
            sources.find_local(entry, values.get("data_split") or "train")
        if values.get("model", BUNDLED_MODEL) != BUNDLED_MODEL:
            hub.model_folder(values["model"])
    _refuse_default_model(recipe, values)
    if own_folder and values.get("output_dir"):
        resumes = values.get("resume_from_checkpoint") or ["false"]
        run_folder.check_folder(Path(values["output_dir"][0]).expanduser(), resumes[0].lower() != "false")


def _refuse_default_model(recipe: Recipe, values: dict) -> None:
    """Raise UserError for rows of the user without a model: the bundled one, which knows 512 words, would train."""
    bundled = recipe.bundled_file.parent.resolve()
    paths = [data_entry.parse(entry).path for entry in values.get("data") or []]
    others = [path for path in paths if not Path(path).expanduser().resolve().is_relative_to(bundled)]
    if others and not values.get("model") and "model" not in recipe.defaults:
        raise UserError(
            f"--data {others[0]}: no model is named to train on these rows; add --model (MODEL=), such as "
            f"Qwen/Qwen3-0.6B, or --model {BUNDLED_MODEL} for the bundled toy model."
        )
