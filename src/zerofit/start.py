"""The first lines of every recipe: arguments in, processes and run folder up, everything decided said once."""

import json
import os
import sys
from pathlib import Path

from . import args, hub, planner, probe, quiet, resolve, world
from .errors import printable

quiet.libraries()


def settings(recipe: str) -> args.Settings:
    """Resolve and check this process's own command line; --show and --dry_run print and end the process.

    Raises: UserError for the user's mistakes, before a GPU or a process group is touched.
    """
    found = resolve.settings(recipe)
    if found.probe and not found.show:
        found = resolve.settings(recipe, probe.resolve(found, sys.argv[1:]), world.size())
    planner.only_print(found)
    if world.rank() == 0:
        hub.check_push(found)
    if _is_to_check(found):
        planner.get_ready(found)
    return found


def _is_to_check(settings: args.Settings) -> bool:
    """Whether this process says if the job fits: rank 0, where the launcher has not."""
    return world.rank() == 0 and not probe.asked() and planner.PLANNED not in os.environ


def processes(settings: args.Settings, train_set, eval_set):
    """Open the process group, see that all ranks have this job, choose the run folder; return transformers' TrainingArguments.

    The folder is only made once the model is there (`open_run`), so that a mistake leaves nothing half-made.
    """
    from . import (
        attention,
        failure,
        links,
        loss,
        memory_report,
        mlp,
        model,
        node_disks,
        nvme,
        offload,
        ops,
        report,
        train,
    )

    config = model.load_config(settings)
    loss.choose(settings, config)
    mlp.choose(settings, config)
    if offload.depends_on_size(settings.deepspeed):
        offload.check_sizes(settings, model.check(settings))
    if _is_to_check(settings):
        planner.announce(planner.check(settings))  # the other ranks wait in the next line
    attention.avoid_wrong_kernels(settings)
    world.start(settings)
    links.check(settings, train_set, eval_set)
    ops.prepare(settings)
    nvme.claim(settings)
    if world.rank() == 0 and not failure.folder():  # else the supervisor has it
        report.claim_folder(settings)
    folder = str(report.choose_folder(settings)) if world.rank() == 0 else None  # it finds the checkpoint too
    chosen = world.broadcast((folder, settings.resume_from_checkpoint))
    settings.values["output_dir"], settings.values["resume_from_checkpoint"] = chosen
    links.check_disk(settings, Path(chosen[0]))
    if settings.node_local_storage and links.several_nodes():
        node_disks.agree(settings, Path(chosen[0]))
    arguments = train.training_arguments(settings)
    if settings.memory_report:
        memory_report.start(settings)
    return arguments


def open_run(settings: args.Settings, train_set, eval_set) -> None:
    """Make the run folder, say once what was decided, and write run.json."""
    from . import canary, checkpoint, data, report

    checkpoint.check_same(settings, train_set)
    if world.rank() == 0:
        folder, resumed = Path(settings.output_dir), settings.resume_from_checkpoint
        if resumed is None or Path(resumed).parent.resolve() == folder.resolve():
            report.keep_metrics(folder, int(resumed.rpartition("-")[2]) if resumed else 0)
    _leave_newer_checkpoints(settings)
    report.open_folder(settings)
    sets = {"training": train_set, "evaluation": eval_set}
    sets = {name: found for name, found in sets.items() if found is not None}
    if world.rank() == 0:
        print(
            f"zerofit {settings.recipe}: {settings.world_size} process{'es' * (settings.world_size > 1)}, ZeRO "
            f"{settings.zero}, offload {settings.offload}, {settings.precision}; run folder {settings.output_dir}"
        )
        described = [data.describe(name, found) for name, found in sets.items()]
        for sentence in [*settings.decisions, *described, *data.notes(sets)]:
            print(f"  - {printable(sentence)}", flush=True)
        facts = {name: {"fingerprint": found.fingerprint, **found.statistics} for name, found in sets.items()}
        rehearsed = os.environ.get(canary.FOUND)
        report.write_run(settings, {"data": facts} | ({"canary": json.loads(rehearsed)} if rehearsed else {}))


def _leave_newer_checkpoints(settings: args.Settings) -> None:
    """Move the checkpoints after the one that is resumed out of the way of those that this run will save."""
    from . import checkpoint, links, recovery

    if world.rank() != 0 and not (settings.node_local_storage and links.first_of_node()):  # of each disk, one rank
        return
    folder, resumed = Path(settings.output_dir), settings.resume_from_checkpoint
    step = checkpoint.step_of(Path(resumed)) if resumed else 0
    if aside := recovery.move_newer(folder, step):
        settings.decisions.append(f"checkpoints after step {step}, where this run goes on, were moved to {aside}")
