"""`zerofit resume`: start a run again from its latest valid checkpoint."""

import argparse
import shlex
from pathlib import Path

from zerofit.base import command_line
from zerofit.base.errors import UserError
from zerofit.config import parse
from zerofit.job import groups, program, run_folder
from zerofit.job.recipe import NAME
from zerofit.launch import launch, prepare, retry
from zerofit.launch.cluster import node_options
from zerofit.model import gradient_checkpointing


def main(argv: list[str]) -> None:
    """`zerofit resume`: see --help. Flags after the folder override the run's own.

    On another number of processes, the effective batch stays the same.
    Raises: UserError for a folder without a run or with a finished one, or where this user must say what to run
        (program.of_run, parse.refuse_foreign_code); otherwise as `zerofit launch`.
    """
    parser = argparse.ArgumentParser(prog="zerofit resume", allow_abbrev=False, description=__doc__)
    prepare.add_placement(parser, gpus="")  # as many as before
    node_options.add_options(parser)
    parser.add_argument("--recipe", default="", help="the recipe's file (default: the one that you started there)")
    parser.add_argument("run", help="the run folder")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="more of the recipe's flags")
    args = parser.parse_args(argv)
    folder = Path(args.run).expanduser()
    facts = read_facts(folder)
    flags, recipe, ranks = facts["flags"], facts["recipe"], facts["world_size"]
    if run_folder.finished(folder):
        raise UserError(f"{folder}: this run has finished; its model is in {folder / 'final'}.")
    named = args.recipe or command_line.value_of(args.flags, ("--recipe",)) or ""
    args.flags = command_line.drop(args.flags, "--recipe")
    new = [*args.flags, *shlex.split(args.args)]
    said = program.said_by(run_folder.read_json(folder / "run.json"))  # null, unlike none, says something
    started = program.of_run(folder, recipe, said, named)
    parse.refuse_foreign_code(started.recipe, flags, new, folder)
    overridden = command_line.names(new)
    place = node_options.of(args)
    nodes = place.most if place else 1
    new_ranks = int(args.gpus) * nodes if args.gpus.isdigit() else ranks
    old = {name: argument["value"] for name, argument in facts["arguments"].items()}
    sizes = _sizes(new, old)
    if (new_ranks or ranks, sizes) != (ranks, _sizes([], old)) and not overridden & {*retry.BATCH}:
        effective_batch, micro = (facts["arguments"][name[2:]]["value"] for name in retry.BATCH[:2])
        batch = retry.same_batch(effective_batch, micro, new_ranks or ranks, groups.per_row(sizes))
        flags = [*command_line.drop(flags, *retry.BATCH), *batch]
    if _may_recompute_less(facts["arguments"]):
        flags = command_line.drop(flags, *(f"--{name}" for name in gradient_checkpointing.ARGUMENTS))  # kept if it fits
    flags = flags_without_offload(flags, new, facts["arguments"]["offload"]["value"])
    kept_flags = command_line.drop(flags, "--resume_from_checkpoint", "--output_dir", "--gpus", *overridden)
    launch.main([
        "--gpus", args.gpus or str(ranks // nodes), "--launcher", args.launcher, "--port", args.port,
        "--args", args.args,
        "--nnodes", args.nnodes, "--node_rank", args.node_rank, "--master_addr", args.master_addr,
        "--join_timeout", args.join_timeout, "--interface", args.interface,
        str(started.file), *kept_flags, *args.flags, "--output_dir", str(folder),
        "--resume_from_checkpoint", "auto",
    ])  # fmt: skip


def read_facts(folder: Path) -> dict:
    """Return run.json of a folder that may be somebody else's, with a recipe's name, flags, processes, arguments.

    Raises: UserError for a folder without a run, or whose run.json holds anything else.
    """
    facts = run_folder.read_record(folder / "run.json")
    flags, arguments = facts.get("flags"), facts.get("arguments", {})
    whole = isinstance(flags, list) and all(isinstance(word, str) for word in flags)
    whole &= type(name := facts.get("recipe")) is str and NAME.fullmatch(name) is not None
    whole &= facts.get("world_size", 0) > 0
    whole &= all("value" in argument for argument in arguments.values()) and "offload" in arguments
    sizes = [arguments.get(name[2:], {}) for name in retry.BATCH[:2]]
    sizes += [arguments.get(name, {"value": 1}) for name in groups.flags()]
    if not whole or any(type(size.get("value")) is not int or size["value"] < 1 for size in sizes):
        raise UserError(f"{folder}: is no run folder (its run.json is missing or damaged); name one of runs/.")
    return facts


def _may_recompute_less(arguments: dict) -> bool:
    """Return whether the plan of the launch chooses gradient checkpointing again, as it did for the run.

    A plan of --zero auto may have chosen to offload activations too, or have planned padded rows; a launch does not.
    """
    by_plan = arguments.get("gradient_checkpointing", {}).get("source") == gradient_checkpointing.BY_PLAN
    offload, padding_free = (arguments.get(n, {}).get("value") for n in ("activation_offload", "padding_free"))
    return by_plan and not offload and padding_free == "true"


def _sizes(new: list[str], old: dict) -> dict[str, int]:
    """Return {flag: size} of the ways to share rows: of the new flags, else of the run's arguments.

    That of a way which splits the model goes on as it was saved: checkpoint/resumable.py refuses another one. A wrong
    one is refused by the recipe's own parser.
    """
    sizes = {}
    for way in groups.ways():
        said = None if way.splits_model else command_line.value_of(new, (f"--{way.flag}",))
        sizes[way.flag] = int(said) if said and said.isdigit() and int(said) else old.get(way.flag, 1)
    return sizes


def flags_without_offload(flags: list[str], new: list[str], offload: str) -> list[str]:
    """Return the run's flags with an offload that the new ZeRO stage supports; print a note if it changes.

    Args: flags: of the run; new: of this command; offload: the run's --offload.
    """
    stage = command_line.value_of(new, ("--zero",))
    if command_line.value_of(new, ("--offload",)) is not None or offload == "none" or stage not in ("0", "1", "2"):
        return flags
    supported = "none" if stage == "0" else "optimizer"
    if supported == offload:
        return flags
    print(f"note: ZeRO stage {stage} cannot offload {offload}: the run goes on with --offload {supported}", flush=True)
    dropped = ("--offload_path", "--offload_ratio", "--super_offload") if supported == "none" else ()
    return command_line.put(command_line.drop(flags, *dropped), offload=supported)
