"""Dispatch `zerofit VERB ...` and `python -m zerofit VERB ...` to the verb's module."""

import difflib
import importlib
import os
import sys
from importlib import metadata
from pathlib import Path

from zerofit import __version__
from zerofit.base import command_line, distributed, log_filters, process
from zerofit.base.errors import UserError
from zerofit.base.paths import PROJECT
from zerofit.entrypoint import guard
from zerofit.job import program
from zerofit.job.run_folder import PACKAGES

USAGE = """usage: zerofit sft|lora|dpo|pipeline [--gpus N] [--show] [flags]     train on N processes, in any folder
       zerofit sft --help                                            a recipe's flags; --help all: all flags
       zerofit init DIR                                              create recipes, DeepSpeed files and a Makefile
       zerofit convert THEIRS.yaml                                   convert a file of axolotl, TRL ...
       zerofit launch [--gpus N] [--show] recipes/sft.py [flags]     train with a custom recipe
       zerofit launch --nnodes 2 --node_rank 0 --master_addr HOST    start this node of a multi-node job
       zerofit hosts --hosts FILE recipes/sft.py [flags]             start a job over ssh on hosts of a hostfile
       zerofit slurm --nodes N --gpus G recipes/sft.py [flags]       submit a SLURM job (--print: only print the file)
       zerofit kubernetes --nodes N --image I ... recipes/sft.py     print a manifest for Kubeflow
       zerofit status|cancel runs/<run>                              show a job's state, or cancel it
       zerofit data [--recipe sft] [--output_dir DIR] [flags]        show the data of a run
       zerofit batch-size [--recipe sft] [--gpus N] [flags]          find the largest micro batch that fits
       zerofit plan [--gpu_type h100-80g] [--gpus N] [flags]         find the fastest setting that fits
       zerofit compatible [fp8 packing ...]                          list which techniques exclude each other
       zerofit models [llama ...]                                    list which model types were tested
       zerofit calibrate                                             measure this GPU's speed for plans
       zerofit doctor [--json]                                       check this machine for problems
       zerofit resume runs/<run> [--gpus N] [flags]                  resume from the latest valid checkpoint
       zerofit export runs/<run> [--merge] [--for vllm]              write a Hugging Face folder, or a server's files
       zerofit report runs/<run> [runs/<other> ...]                  write a page with plots, or compare runs
       zerofit watch runs/<run>                                      show the progress in the terminal
       zerofit chat runs/<run>                                       chat with the trained model in the terminal
       zerofit eval runs/<run> --tasks gsm8k,my_tasks/               score it and its base with lm-evaluation-harness
       zerofit replay runs/<run>                                     repeat a step with a loss that was not finite
       zerofit --version"""

# verb: module whose main() (or the function after the colon) runs it; imported on use, since that takes seconds
VERBS = {
    "launch": "launch.launch",
    "init": "tools.init",
    "convert": "tools.convert",
    "data": "commands.data",
    "batch-size": "launch.batch_search",
    "plan": "commands.plan",
    "compatible": "commands.compatible",
    "models": "commands.models",
    "calibrate": "commands.calibrate",
    "doctor": "launch.doctor",
    "replay": "tools.replay",
    "resume": "commands.resume",
    "export": "tools.servers.serve",
    "chat": "commands.chat",
    "eval": "tools.scores.evaluate",
    "report": "report.run_page",
    "watch": "report.watch",
    "hosts": "tools.hostfile",
    "join": "tools.hostfile:join",
    "kubernetes": "tools.kubernetes",
    "slurm": "tools.slurm",
    "status": "commands.status",
    "cancel": "commands.cancel",
    "simulated-rank": "plan.simulated_rank",
}


LIGHT = ("status", "cancel", "init", "report", "watch")  # verbs that start fast, without torch

# verbs that print that they start
SLOW = ("launch", "resume", "data", "batch-size", "export", "chat", "eval", "doctor")

STARTS_RANKS = ("launch", "resume")


def main() -> None:
    guard(_main)


def _versions() -> str:
    """Return the version and, on a second line, the versions of the installed packages."""
    return f"zerofit {__version__}\n" + ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)


def _main() -> None:
    argv = sys.argv[1:]
    if argv and argv[0] in program.names() and argv[0] not in VERBS:  # `zerofit launch recipes/sft.py ...`
        argv = ["launch", *command_line.for_launch(str(PROJECT / "recipes" / f"{argv[0]}.py"), argv[1:])]
    if argv in (["--version"], ["-V"]):
        print(_versions())
    elif argv and argv[0] in VERBS:
        if argv[0] in SLOW and not {"--show", "--help", "-h", "--json"} & {*argv}:
            files = [Path(word).stem for word in argv[1:] if word.endswith(".py")] if argv[0] == "launch" else []
            message = f"zerofit {(files or argv)[0]}: starting; loading the libraries takes some seconds"
            print(message, file=sys.stderr if argv[0] == "chat" else sys.stdout, flush=True)
        name, _, function = VERBS[argv[0]].partition(":")
        with process.importing():
            if argv[0] not in LIGHT:
                _check_and_import(*argv)
            module = importlib.import_module(f".{name}", __package__)
        getattr(module, function or "main")(argv[1:])
    elif not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
    else:
        close = difflib.get_close_matches(argv[0], [*program.names(), *VERBS], 1)
        hint = f"did you mean {close[0]}?" if close else "`zerofit --help` lists them."
        raise UserError(f"unknown verb {argv[0]!r}; {hint}")


def _check_and_import(verb: str, *words: str) -> None:
    """Check the arguments of a verb, then silence the messages of transformers' import."""
    from zerofit.config import early_check

    early_check.command(verb, [*words])
    if verb == "launch":
        from zerofit.launch import prepare

        prepare.launch_arguments([*words])
    if verb in (*STARTS_RANKS, "eval"):
        os.environ.update(distributed.thread_waiting())  # read when torch is imported
    if verb == "eval" and not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "60")  # for the harness's progress bars; read when tqdm is imported
    log_filters.libraries()
