"""`zerofit resume`: resume a run from its latest valid checkpoint."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerofit.base import command_line
from zerofit.base.errors import UserError
from zerofit.checkpoint import next_settings
from zerofit.config import parse
from zerofit.job import job, parallel_dims, program, run_folder
from zerofit.job.recipe import NAME
from zerofit.job.request import BY_PLAN, FLAG, Request
from zerofit.job.settings import written
from zerofit.launch import launch, node_options, prepare


def main(argv: list[str]) -> None:
    """`zerofit resume`: see --help. Flags after the folder override the run's flags.

    The effective batch stays the same on another number of processes.
    Raises: UserError for a folder without a run, a finished run, or a run that needs the user's consent
        (program.for_run, parse.refuse_foreign); otherwise as `zerofit launch`.
    """
    parser = argparse.ArgumentParser(prog="zerofit resume", allow_abbrev=False, description=__doc__)
    prepare.add_placement(parser, gpus="")  # default: the same number
    node_options.add_options(parser)
    parser.add_argument("--recipe", default="", help="file of the recipe (default: the recipe that you started there)")
    parser.add_argument("run", help="the run folder")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="more flags of the recipe")
    args = parser.parse_args(argv)
    folder = Path(args.run).expanduser()
    run = read_run(folder)
    if run_folder.finished(folder):
        raise UserError(f"{folder}: this run has finished; its model is in {folder / 'final'}.")
    recipe_file = args.recipe or command_line.value_of(args.flags, ("--recipe",)) or ""
    place = node_options.placement(args)
    nodes = place.most if place else 1
    words, count = command_line.with_extra_flags(
        command_line.drop(args.flags, "--recipe"), args.args, args.gpus or str(run.world_size // nodes)
    )
    recorded = program.recorded_program(run_folder.read_json(folder / "run.json"))  # null and a missing key differ
    started = program.for_run(folder, run.recipe, recorded, recipe_file)
    parse.refuse_foreign(started.recipe, run.flags, words, folder)
    new = parse.request(started.recipe, words)
    try:
        before = parse.request(started.recipe, run.flags)
    except UserError as error:
        raise UserError(f"{folder}: the run's request cannot be read: {error}") from None
    if "config" not in new.values:
        _note_edited_file(run, before)
    request = _resume_request(run, before, new, count * nodes)
    request = request.put(output_dir=str(folder), resume_from_checkpoint="auto")
    options = [
        "--gpus", str(count), "--launcher", args.launcher, "--port", args.port, "--nnodes", args.nnodes,
        "--node_rank", args.node_rank, "--master_addr", args.master_addr, "--join_timeout", args.join_timeout,
        "--interface", args.interface, str(started.file),
    ]  # fmt: skip
    launch.main(options, request)


@dataclass(frozen=True)
class RecordedRun:
    """The run recorded in a folder, which may come from another user."""

    recipe: str  # name
    world_size: int
    flags: list[str]  # as on a command line; not checked yet
    arguments: dict[str, dict]  # argument -> {"value", "source"}, resolved
    file: str = ""  # YAML file of its first start
    file_flags: tuple[str, ...] = ()  # flags from this file

    def value(self, name: str, default: Any = None) -> Any:
        """Return the resolved value of an argument."""
        return self.arguments.get(name, {}).get("value", default)


def read_run(folder: Path) -> RecordedRun:
    """Read the run of a folder from job.json, or from run.json of an older zerofit.

    Raises: UserError for a folder without a run or with invalid files.
    """
    if (folder / job.FILE).is_file():
        saved = job.read(folder / job.FILE)
        values, sources = saved.settings.values, saved.settings.source
        arguments = {name: {"value": written(name, values[name]), "source": sources[name]} for name in values}
        file_flags = tuple(name for name, source in saved.request.source.items() if source not in (FLAG, BY_PLAN))
        flags, file = saved.request.all_flags(), str(saved.request.get("config") or "")
        run = RecordedRun(saved.request.recipe, saved.settings.world_size, flags, arguments, file, file_flags)
    else:
        facts = read_facts(folder)
        run = RecordedRun(facts["recipe"], facts["world_size"], facts["flags"], facts["arguments"])
    sizes = [run.value(name) for name in next_settings.BATCH[:2]] + [
        run.value(name, 1) for name in parallel_dims.size_flags()
    ]
    valid = NAME.fullmatch(run.recipe) and run.world_size > 0 and "offload" in run.arguments
    if not valid or any(type(size) is not int or size < 1 for size in sizes):
        raise _not_a_run(folder)
    return run


def read_facts(folder: Path) -> dict:
    """Read run.json of a folder that may come from another user.

    Raises: UserError for a folder without a run or with an invalid run.json.
    """
    facts = run_folder.read_record(folder / "run.json")
    flags, arguments = facts.get("flags"), facts.setdefault("arguments", {})
    valid = isinstance(flags, list) and all(isinstance(word, str) for word in flags)
    valid &= isinstance(facts.get("recipe"), str) and facts.get("world_size", 0) > 0
    if not valid or not all("value" in argument for argument in arguments.values()):
        raise _not_a_run(folder)
    return facts


def _not_a_run(folder: Path) -> UserError:
    return UserError(
        f"{folder}: not a run folder ({job.FILE} or run.json is missing or damaged); use a folder of runs/."
    )


def _note_edited_file(run: RecordedRun, before: Request) -> None:
    """Print a note if the run's YAML file has changed since its first start."""
    if not run.file:
        return
    try:
        now = parse.read_yaml(run.file, before.recipe)
    except UserError:
        return  # the file is not required
    names = [name for name in run.file_flags if now.get(name) != before.get(name)]
    if names := sorted({*names, *(now.keys() - before.values.keys())}):
        print(
            f"note: {run.file} has changed since the run began ({', '.join(names)}); the run continues with the "
            f"previous values, unless you add --config {run.file}",
            flush=True,
        )


def _resume_request(run: RecordedRun, before: Request, new: Request, ranks: int) -> Request:
    """Merge the run's request with this command's. ranks: number of ranks of the resumed job."""
    chosen = {name for name, entry in run.arguments.items() if entry.get("source") == BY_PLAN}
    # The new start may change the values of the plan.
    request = before.with_plan_values("", {name: before.get(name) for name in chosen & before.values.keys()})
    file_flags = run.file_flags if "config" in new.values else ()
    request = request.drop("resume_from_checkpoint", "output_dir", "gpus", *file_flags)
    old = {name: entry["value"] for name, entry in run.arguments.items()}
    sizes = _sizes(new.values, old)
    if (ranks, sizes) != (run.world_size, _sizes({}, old)) and not new.values.keys() & {*next_settings.BATCH}:
        effective_batch, micro = (run.value(name) for name in next_settings.BATCH[:2])
        batch = next_settings.keep_effective_batch(effective_batch, micro, ranks, parallel_dims.ranks_per_row(sizes))
        request = request.drop(*next_settings.BATCH).put(**batch)
    return new.merged_onto(keep_supported_offload(request, new, run.value("offload")))


def _sizes(new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, int]:
    """Return {flag: size} of the parallel dimensions, from the new arguments or from the run.

    Sizes that split the model stay as saved, since checkpoint/resumable.py rejects changes. The recipe's parser rejects
    invalid sizes.
    """
    sizes = {}
    for way in parallel_dims.registered():
        requested = 0 if way.splits_model else new.get(way.flag, 0)
        sizes[way.flag] = requested if requested > 0 else old.get(way.flag, 1)
    return sizes


def keep_supported_offload(request: Request, new: Request, offload: str) -> Request:
    """Change the offload to a supported one for the new ZeRO stage, and print a note.

    Args: request: the run's request; new: this command's request; offload: the run's --offload.
    """
    stage = str(new.get("zero"))
    if new.get("offload") is not None or offload == "none" or stage not in ("0", "1", "2"):
        return request
    supported = "none" if stage == "0" else "optimizer"
    if supported == offload:
        return request
    print(f"note: ZeRO-{stage} does not support --offload {offload}: continuing with --offload {supported}", flush=True)
    dropped = ("offload_path",) if supported == "none" else ()
    return request.drop(*dropped).put(offload=supported)
