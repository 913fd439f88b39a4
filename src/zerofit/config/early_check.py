"""Refuse mistakes on a command line before torch and transformers are imported, which takes seconds."""

import shlex
from pathlib import Path

from zerofit import command_line, run_folder
from zerofit.config import arguments, help, parse, presets
from zerofit.data import hub, sources

OF_A_FILE = ("launch", "slurm", "hosts", "kubernetes")  # verbs that name a recipe's file, with its flags behind


def command(verb: str, words: list[str]) -> None:
    """Check the recipe's flags among the words behind `zerofit VERB`; for `data` those that are known only.

    Raises: UserError for the user's mistakes.
    """
    try:
        more = shlex.split(command_line.value_of(words, ("--args",)) or "")
    except ValueError:
        return  # args.command_line says it
    if verb == "data" and not {"-h", "--help"} & {*words, *more}:
        name = command_line.value_of(words, ("--recipe",)) or "sft"
        if name in arguments.RECIPES:
            check(name, [*words, *more], here=True, own_folder=False, strict=False)
    file = next(
        (i for i, word in enumerate(words) if Path(word).stem in arguments.RECIPES and word.endswith(".py")), None
    )
    if verb in OF_A_FILE and file is not None:
        alone = verb == "launch" and command_line.value_of(words[:file], ("--nnodes",)) in (None, "", "1")
        here = verb == "launch" and "--show" not in words[:file]
        check(Path(words[file]).stem, [*words[file + 1 :], *more], here=here, own_folder=alone)


def check(recipe: str, argv: list[str], here: bool, own_folder: bool, strict: bool = True) -> None:
    """Args: here: model and data are on this machine; own_folder: this process decides about the run folder; strict:
    refuse flags that the recipe does not have."""
    if {"-h", "--help"} & set(argv):
        print(help.text(recipe, whole="all" in argv))
        raise SystemExit(0)
    given = parse.explicit(recipe, argv, "command line", early=True, strict=strict)
    if given.get("config"):
        given = parse.read_yaml(given["config"], recipe, early=True) | given
    if given.get("preset"):
        presets.flags(given["preset"])
    if here and not given.get("show"):  # report.summary notes what is missing
        for entry in [*(given.get("data") or []), *(given.get("eval_data") or [])]:
            sources.find_local(entry, given.get("data_split") or "train")
        if given.get("model"):
            hub.model_folder(given["model"])
    if own_folder and given.get("output_dir"):
        resumes = given.get("resume_from_checkpoint") or ["false"]
        run_folder.check_folder(Path(given["output_dir"][0]).expanduser(), resumes[0].lower() != "false")
