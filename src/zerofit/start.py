"""The first lines of every recipe: arguments in, processes and run folder up, everything decided said once."""

import json
import os
import sys
from pathlib import Path

from . import adapters, args, hub, node_disks, quantized, quiet, world
from .errors import printable

quiet.libraries()


def settings(recipe: str, argv: list[str] | None = None, world_size: int | None = None, gpu=None) -> args.Settings:
    """The arguments of this process's command line, resolved and checked; --show prints them and ends here.

    Args: argv, world_size: for a job that is still to be started; default: this process's own. gpu: see args.parse.
    Raises: UserError for the user's mistakes, before a GPU or a process group is touched.
    """
    from . import planner, probe

    taken = world.take_over_environment()
    other_size = world.check_size() if argv is None else None
    found = args.parse(recipe, sys.argv[1:] if argv is None else argv, world_size or world.size(), gpu)
    if other_size:
        found.decisions.append(other_size)
    if taken:
        found.decisions.append(
            f"accelerate's own settings are not used ({', '.join(taken)}): the recipe decides; see --zero, --bf16"
        )
    _check(found)
    if argv is None and found.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also for libraries that look for GPUs later
    if "ZEROFIT_GHOST" in os.environ:  # ghost.INSIDE
        return found
    if found.probe and argv is None and not found.show:
        found = args.parse(recipe, probe.resolve(found, sys.argv[1:]), world.size())
        _check(found)
    if found.dry_run:
        planner.dry_run(found)
        raise SystemExit(0)
    if found.show:
        from . import report

        print(f"{recipe}, {found.world_size} process{'es' * (found.world_size > 1)}\n{report.summary(found)}")
        raise SystemExit(0)
    if argv is None and world.rank() == 0:
        hub.check_push(found)
    if argv is None and _is_to_check(found):
        planner.get_ready(found)
    return found


def _is_to_check(settings: args.Settings) -> bool:
    """Whether this process says if the job fits: rank 0, where the launcher has not."""
    from . import planner, probe

    return world.rank() == 0 and not probe.asked() and planner.PLANNED not in os.environ


def _check(found: args.Settings) -> None:
    """What belongs together, module by module.

    Raises: UserError for what cannot work or would be silently wrong.
    """
    from . import loss, mlp, stream, techniques

    techniques.check(found)
    adapters.resolve(found)
    node_disks.resolve(found)
    quantized.resolve(found)
    _choose_batches(found)
    stream.choose(found)
    loss.check_flags(found)
    mlp.check_flags(found)
    _check_memory_report(found)


def processes(settings: args.Settings, train_set, eval_set):
    """Open the process group, see that all ranks have this job, choose the run folder; return transformers' TrainingArguments.

    The folder is only made once the model is there (`open_run`), so that a mistake leaves nothing half-made.
    """
    from . import attention, failure, links, loss, memory_report, mlp, model, nvme, offload, ops, planner, report, train

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


def _choose_batches(settings: args.Settings) -> None:
    """Packed and padding-free batches need attention that keeps documents apart.

    Raises: UserError for an implementation that would mix them.
    """
    from . import attention
    from .errors import UserError

    chosen, asked = settings.attn_implementation, settings.padding_free
    attention.check_available(chosen, settings.use_cpu)
    keeps_apart = chosen in ("sdpa", "flex_attention") or attention.is_flash(chosen)
    if settings.packing and asked == "false":
        raise UserError("--packing --padding_free false: packed sequences are not padded; leave one of the two out.")
    if (settings.packing or asked == "true") and not keeps_apart:
        flag = "--packing" if settings.packing else "--padding_free true"
        raise UserError(
            f"{flag} with --attn_implementation {chosen}: documents in one row would read each other; use sdpa, "
            "flex_attention or flash_attention_2."
        )
    if asked == "auto":
        # A loop over documents (the CPU's way) costs more than the padding that it saves on short rows.
        on = settings.packing or (keeps_apart and not settings.use_cpu)
        args.decide(settings, "padding_free", str(on).lower(), "with --packing, or on a GPU") if on else None
    if settings.padding_free == "true" and chosen == "sdpa":
        name = attention.register()
        args.decide(
            settings, "attn_implementation", name, "plain sdpa would let the documents of a row read each other"
        )


def _check_memory_report(settings: args.Settings) -> None:
    """Following costs time, and compiled code cannot be followed.

    Raises: UserError with torch_compile.
    """
    from .errors import UserError

    if settings.memory_report:
        if settings.torch_compile:
            raise UserError("--memory_report with --torch_compile: compiled code cannot be followed; drop one of them.")
        settings.decisions.append("memory_report: the first 3 steps, save and evaluation are slower, being followed")
