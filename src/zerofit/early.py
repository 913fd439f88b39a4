"""Refuse a command line for what can be seen before torch and transformers' Trainer are imported, which takes seconds."""

import os
import shlex
import sys
from pathlib import Path

from . import args, errors, flag_help, hub, presets, report, rows, world

OF_A_FILE = ("launch", "slurm", "hosts", "kubernetes")  # verbs that name a recipe's file, with its flags behind


def recipe(name: str) -> None:
    """Check the command line of this process, which runs a recipe, and set what torch reads at its import.

    `--help` prints the flags and ends the process.
    """
    os.environ.update(world.thread_waiting())
    errors.guard(lambda: _check(name, sys.argv[1:], here=True, own_folder=world.rank() == 0))


def command(verb: str, words: list[str]) -> None:
    """Check the recipe's flags among the words behind `zerofit VERB`; for `data` those that are known only.

    Raises: UserError for the user's mistakes.
    """
    try:
        more = shlex.split(world.value_of(words, ("--args",)) or "")
    except ValueError:
        return  # args.command_line says it
    if verb == "data" and not {"-h", "--help"} & {*words, *more}:
        name = world.value_of(words, ("--recipe",)) or "sft"
        if name in args.RECIPES:
            _check(name, [*words, *more], here=True, own_folder=False, strict=False)
    file = next((i for i, word in enumerate(words) if Path(word).stem in args.RECIPES and word.endswith(".py")), None)
    if verb in OF_A_FILE and file is not None:
        alone = verb == "launch" and world.value_of(words[:file], ("--nnodes",)) in (None, "", "1")
        here = verb == "launch" and "--show" not in words[:file]
        _check(Path(words[file]).stem, [*words[file + 1 :], *more], here=here, own_folder=alone)


def _check(recipe: str, argv: list[str], here: bool, own_folder: bool, strict: bool = True) -> None:
    """Args: here: model and data are on this machine; own_folder: this process decides about the run folder; strict:
    refuse flags that the recipe does not have."""
    if {"-h", "--help"} & set(argv):
        print(flag_help.text(recipe, whole="all" in argv))
        raise SystemExit(0)
    given = args.explicit(recipe, argv, "command line", early=True, strict=strict)
    if given.get("config"):
        given = args.read_yaml(given["config"], recipe, early=True) | given
    if given.get("preset"):
        presets.flags(given["preset"])
    if here and not given.get("show"):  # report.summary notes what is missing
        for entry in [*(given.get("data") or []), *(given.get("eval_data") or [])]:
            rows.find_local(entry, given.get("data_split") or "train")
        if given.get("model"):
            hub.model_folder(given["model"])
    if own_folder and given.get("output_dir"):
        resumes = given.get("resume_from_checkpoint") or ["false"]
        report.check_folder(Path(given["output_dir"][0]).expanduser(), resumes[0].lower() != "false")
