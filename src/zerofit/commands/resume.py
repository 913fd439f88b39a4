"""`zerofit resume`: start a run again from its latest valid checkpoint."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.base import command_line
from zerofit.base.errors import UserError
from zerofit.checkpoint import next_settings
from zerofit.config import parse
from zerofit.job import groups, job, program, run_folder
from zerofit.job.recipe import NAME
from zerofit.job.request import BY_PLAN, FLAG, Request
from zerofit.job.settings import written
from zerofit.launch import launch, node_options, prepare


def main(argv: list[str]) -> None:
    """`zerofit resume`: see --help. Flags after the folder override the run's own.

    On another number of processes, the effective batch stays the same.
    Raises: UserError for a folder without a run or with a finished one, or where this user must say what to run
        (program.of_run, parse.refuse_foreign); otherwise as `zerofit launch`.
    """
    parser = argparse.ArgumentParser(prog="zerofit resume", allow_abbrev=False, description=__doc__)
    prepare.add_placement(parser, gpus="")  # as many as before
    node_options.add_options(parser)
    parser.add_argument("--recipe", default="", help="the recipe's file (default: the one that you started there)")
    parser.add_argument("run", help="the run folder")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="more of the recipe's flags")
    args = parser.parse_args(argv)
    folder = Path(args.run).expanduser()
    run = of_folder(folder)
    if run_folder.finished(folder):
        raise UserError(f"{folder}: this run has finished; its model is in {folder / 'final'}.")
    named = args.recipe or command_line.value_of(args.flags, ("--recipe",)) or ""
    place = node_options.of(args)
    nodes = place.most if place else 1
    words, count = command_line.with_more(
        command_line.drop(args.flags, "--recipe"), args.args, args.gpus or str(run.world_size // nodes)
    )
    said = program.said_by(run_folder.read_json(folder / "run.json"))  # null, unlike none, says something
    started = program.of_run(folder, run.recipe, said, named)
    parse.refuse_foreign(started.recipe, run.flags, words, folder)
    new = parse.request(started.recipe, words)
    try:
        before = parse.request(started.recipe, run.flags)
    except UserError as error:
        raise UserError(f"{folder}: what it was asked for cannot be read: {error}") from None
    if "config" not in new.values:
        _note_edited_file(run, before)
    asked = _asked(run, before, new, count * nodes)
    asked = asked.put(output_dir=str(folder), resume_from_checkpoint="auto")
    options = [
        "--gpus", str(count), "--launcher", args.launcher, "--port", args.port, "--nnodes", args.nnodes,
        "--node_rank", args.node_rank, "--master_addr", args.master_addr, "--join_timeout", args.join_timeout,
        "--interface", args.interface, str(started.file),
    ]  # fmt: skip
    launch.main(options, asked)


@dataclass(frozen=True)
class Run:
    """What a run folder, which may be somebody else's, says of its run."""

    recipe: str  # its name
    world_size: int
    flags: list[str]  # as they would be typed; not checked yet
    arguments: dict[str, dict]  # argument -> {"value", "source"}, resolved
    file: str = ""  # the YAML file that it was started with
    of_file: tuple[str, ...] = ()  # the flags that stood in it

    def value(self, name: str, default: Any = None) -> Any:
        """Return the resolved value of an argument."""
        return self.arguments.get(name, {}).get("value", default)


def of_folder(folder: Path) -> Run:
    """Return the run of a folder: from its job.json; one of an older zerofit from its run.json.

    Raises: UserError for a folder without a run, or whose files hold anything else.
    """
    if (folder / job.FILE).is_file():
        whole = job.read(folder / job.FILE)
        values, sources = whole.settings.values, whole.settings.source
        arguments = {name: {"value": written(name, values[name]), "source": sources[name]} for name in values}
        of_file = tuple(name for name, source in whole.request.source.items() if source not in (FLAG, BY_PLAN))
        flags, file = whole.request.all_flags(), str(whole.request.get("config") or "")
        run = Run(whole.request.recipe, whole.settings.world_size, flags, arguments, file, of_file)
    else:
        facts = read_facts(folder)
        run = Run(facts["recipe"], facts["world_size"], facts["flags"], facts["arguments"])
    sizes = [run.value(name) for name in next_settings.BATCH[:2]] + [run.value(name, 1) for name in groups.flags()]
    whole = NAME.fullmatch(run.recipe) and run.world_size > 0 and "offload" in run.arguments
    if not whole or any(type(size) is not int or size < 1 for size in sizes):
        raise _no_run(folder)
    return run


def read_facts(folder: Path) -> dict:
    """Return run.json, with flags, of a folder that may be somebody else's.

    Raises: UserError for a folder without a run, or whose run.json holds anything else.
    """
    facts = run_folder.read_record(folder / "run.json")
    flags, arguments = facts.get("flags"), facts.setdefault("arguments", {})
    whole = isinstance(flags, list) and all(isinstance(word, str) for word in flags)
    whole &= isinstance(facts.get("recipe"), str) and facts.get("world_size", 0) > 0
    if not whole or not all("value" in argument for argument in arguments.values()):
        raise _no_run(folder)
    return facts


def _no_run(folder: Path) -> UserError:
    return UserError(
        f"{folder}: is no run folder (its {job.FILE} or run.json is missing or damaged); name one of runs/."
    )


def _note_edited_file(run: Run, before: Request) -> None:
    """Print a line if the YAML file of a run has other values than those that the run goes on with."""
    if not run.file:
        return
    try:
        now = parse.read_yaml(run.file, before.recipe)
    except UserError:
        return  # it is not needed
    names = [name for name in run.of_file if now.get(name) != before.get(name)]
    if names := sorted({*names, *(now.keys() - before.values.keys())}):
        print(
            f"note: {run.file} has changed since the run began ({', '.join(names)}): the run goes on with its own "
            f"values; --config {run.file} takes the file's",
            flush=True,
        )


def _asked(run: Run, before: Request, new: Request, ranks: int) -> Request:
    """Return what to go on with: what the run was asked for, and over it what this command line asks for.

    Args: ranks: of this job.
    """
    chosen = {name for name, entry in run.arguments.items() if entry.get("source") == BY_PLAN}
    asked = before.planned(
        "", {name: before.get(name) for name in chosen & before.values.keys()}
    )  # the start may change it
    asked = asked.drop("resume_from_checkpoint", "output_dir", "gpus", *run.of_file if "config" in new.values else ())
    old = {name: entry["value"] for name, entry in run.arguments.items()}
    sizes = _sizes(new.values, old)
    if (ranks, sizes) != (run.world_size, _sizes({}, old)) and not new.values.keys() & {*next_settings.BATCH}:
        effective_batch, micro = (run.value(name) for name in next_settings.BATCH[:2])
        batch = next_settings.same_batch(effective_batch, micro, ranks, groups.per_row(sizes))
        asked = asked.drop(*next_settings.BATCH).put(**batch)
    return new.over(without_offload(asked, new, run.value("offload")))


def _sizes(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, int]:
    """Return {flag: size} of the ways to share rows: of the new arguments, else of the run's.

    That of a way which splits the model stays as it was saved: checkpoint/resumable.py refuses another one. A wrong one
    is refused by the recipe's own parser.
    """
    sizes = {}
    for way in groups.ways():
        asked = 0 if way.splits_model else new.get(way.flag, 0)
        sizes[way.flag] = asked if asked > 0 else old.get(way.flag, 1)
    return sizes


def without_offload(asked: Request, new: Request, offload: str) -> Request:
    """Return the run's request with an offload that the new ZeRO stage supports; print a note if it changes.

    Args: asked: of the run; new: of this command; offload: the run's --offload.
    """
    stage = str(new.get("zero"))
    if new.get("offload") is not None or offload == "none" or stage not in ("0", "1", "2"):
        return asked
    supported = "none" if stage == "0" else "optimizer"
    if supported == offload:
        return asked
    print(f"note: ZeRO stage {stage} cannot offload {offload}: the run goes on with --offload {supported}", flush=True)
    dropped = ("offload_path",) if supported == "none" else ()
    return asked.drop(*dropped).put(offload=supported)
