"""Answer --help and check files and folders before torch and transformers are imported, which takes seconds.

Flags are not parsed here: `parse.request` refuses wrong ones, before a model is loaded.
"""

import shlex
from pathlib import Path

from zerofit.base import command_line, hub
from zerofit.base.errors import UserError
from zerofit.config import help, presets, synonyms
from zerofit.data import sources
from zerofit.job import data_entry, program, run_folder, settings_file
from zerofit.job.recipe import BUNDLED_MODEL, Recipe

FILE_VERBS = ("launch", "slurm", "hosts", "kubernetes")  # verbs that take a recipe's file and its flags

NAME_VERBS = ("data", "batch-size", "plan")  # verbs with --recipe; a plan needs no local rows

# Checked arguments whose value is text in a YAML file, too (`show` is a boolean).
TEXTS = ("data", "eval_data", "data_split", "model", "output_dir", "preset", "resume_from_checkpoint")

WITHOUT_VALUE = ("--show", "--print")  # options before the file that take no value


def command(verb: str, words: list[str]) -> None:
    """Check the files and folders that the arguments of `zerofit VERB` name.

    Raises: UserError for the user's mistakes.
    """
    try:
        more = shlex.split(command_line.value_of(words, ("--args",)) or "")
    except ValueError:
        return  # command_line.with_extra_flags raises the error
    if verb in NAME_VERBS and not {"-h", "--help"} & {*words, *more}:
        started = program.start(command_line.value_of(words, ("--recipe",)) or program.DEFAULT)
        check(started.recipe, [*words, *more], here=verb != "plan", own_folder=False)
    file = next((i for i in range(len(words)) if _is_file(words, i)), None)
    if verb in FILE_VERBS and file is not None:
        recipe = program.start(words[file]).recipe
        single_node = verb == "launch" and command_line.value_of(words[:file], ("--nnodes",)) in (None, "", "1")
        local = verb == "launch" and "--show" not in words[:file]
        check(recipe, [*words[file + 1 :], *more], here=local, own_folder=single_node)


def _is_file(words: list[str], index: int) -> bool:
    """Return whether a word is a recipe's file, not an option or its value."""
    word, before = words[index], words[index - 1] if index else ""
    is_value = before.startswith("--") and "=" not in before and before not in WITHOUT_VALUE
    return word.endswith(".py") and not word.startswith("-") and not is_value


def check(recipe: Recipe, argv: list[str], here: bool, own_folder: bool) -> None:
    """Check a recipe's local files and its run folder; print the help and exit for --help.

    Args: here: model and data are on this machine; own_folder: this process chooses the run folder.
    Raises: UserError for the user's mistakes.
    """
    if {"-h", "--help"} & set(argv):
        print(help.text(recipe, every_flag="all" in argv))
        raise SystemExit(0)
    requested = _requested(argv)
    if name := "".join(requested.get("preset", [])):
        presets.values(name)
    model = requested.get("model", [BUNDLED_MODEL])
    if here and not _is_true(requested.get("show", ["false"])):  # config/show.py reports missing files
        split = [*requested.get("data_split", []), "train"][0]
        for entry in [*requested.get("data", []), *requested.get("eval_data", [])]:
            sources.find_local(entry, split)
        if len(model) == 1 and model != [BUNDLED_MODEL]:
            hub.model_folder(model[0])
    _refuse_default_model(recipe, requested)
    if own_folder and any(requested.get("output_dir", [])):
        resumes = requested.get("resume_from_checkpoint") or ["false"]
        run_folder.check_folder(Path(requested["output_dir"][0]).expanduser(), resumes[0].lower() != "false")


def _requested(argv: list[str]) -> dict[str, list[str]]:
    """Return {flag: its words}, with TEXTS and show from the YAML file unless the flags set them."""
    flags = {name[2:]: values for name, values, _ in command_line.by_flag(argv)}
    return (_in_file(flags["config"][0]) if any(flags.get("config", [])) else {}) | flags


def _in_file(path: str) -> dict[str, list[str]]:
    """Return the words of each key of a YAML file of arguments."""
    values, nodes = settings_file.load(path, label=f"--config {path}")
    if not isinstance(values, dict):  # parse.read_yaml raises the error
        return {}
    requested = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in TEXTS:
            value = settings_file.as_written(f"{settings_file.place(path, key, nodes)}: {key}", value, nodes.get(key))
        if value is not None:
            requested[name] = settings_file.words(value)
    return requested


def _is_true(words: list[str]) -> bool:
    """Return whether transformers reads a flag with these words as true; without a word it does."""
    return not words or words[0].lower() in ("true", "t", "yes", "y", "1")


def _refuse_default_model(recipe: Recipe, requested: dict[str, list[str]]) -> None:
    """Raise UserError for --data without --model, which would train the bundled model with 512 tokens."""
    bundled = recipe.bundled_file.parent.resolve()
    paths = [data_entry.parse(entry).path for entry in requested.get("data", [])]
    others = [path for path in paths if not Path(path).expanduser().resolve().is_relative_to(bundled)]
    known = ["model", *recipe.own_arguments]
    is_named = requested.get("model", [""]) != [""] or any(  # a synonym, which the parser refuses with a hint
        synonyms.hint(name, recipe, known) == "--model" for name in requested.keys() - {"model"}
    )
    if others and not is_named and "model" not in recipe.defaults:
        raise UserError(
            f"--data {others[0]}: --model is missing; add --model (MODEL=), such as Qwen/Qwen3-0.6B, or --model "
            f"{BUNDLED_MODEL} for the bundled toy model."
        )
