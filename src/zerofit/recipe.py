"""The first steps of a recipe: parse arguments, start the ranks, open the run folder."""

# ruff: noqa: E402

from zerofit.base import process

process.begin()  # before the next lines import torch, in a program that has not called entrypoint.check_early

import functools
import gc
import os
import sys
from pathlib import Path

from zerofit.base import allocator, command_line, distributed, hub, log_filters, rank_status
from zerofit.base.errors import UserError, printable, shortened
from zerofit.base.paths import from_here
from zerofit.checkpoint import restart, resumable, save, upload, verify
from zerofit.checkpoint.facts import step_of
from zerofit.config import nvme, resolve
from zerofit.data import dataset, tokens
from zerofit.job import job, program, run_folder, stretches
from zerofit.job.recipe import Recipe
from zerofit.job.settings import Settings
from zerofit.launch import doctor
from zerofit.model import attention, load
from zerofit.model.experimental import flex
from zerofit.model.weights import complete
from zerofit.parallel import sequence_parallel
from zerofit.plan import choice, preflight
from zerofit.report import live
from zerofit.train import deepspeed_ops, memory_report, network_check, trackers, trial

CHECKS = "ZEROFIT_PLAN"  # environment variable; 0: rank 0 of a recipe that is started by hand does not check if it fits

NO_SEARCH = (
    "--per_device_train_batch_size auto: without a launcher the plan chooses the size, for a GPU and rows in bf16 that "
    "are not padded; start with `zerofit launch`, which tries real steps, or name a size."
)

log_filters.libraries()


def parse(recipe: Recipe) -> Settings:
    """Return the checked settings of this process: its launcher's, or those of its command line.

    --show and --plan print and exit. Raises: UserError for the user's mistakes, before a GPU or a process group is
    used.
    """
    warnings = doctor.raise_or_warn(doctor.installation())
    if file := job.named(sys.argv[1:]):
        settings = resolve.of_this_process(lambda: job.start(file, distributed.size(), recipe))
        facts = job.running().facts
        preflight.publish(facts.get("plan"))
        complete.HELD.update(facts.get("weights", {}))
    else:
        settings = restart.settings_of(recipe)
        preflight.only_print(settings)
        if settings.search_batch_size and settings.use_cpu:
            raise UserError(NO_SEARCH)
    settings.decisions += warnings
    if distributed.rank() == 0:
        hub.check_push(settings)
    if _is_to_check(settings):
        preflight.prestart(settings)
    load.check_weights(settings)
    return settings


def _is_to_check(settings: Settings) -> bool:
    """Return whether this process checks if the job fits: rank 0, unless the launcher or a search has."""
    return distributed.rank() == 0 and job.running() is None and os.environ.get(CHECKS) != "0"


def _choose(settings: Settings, train_set, eval_set) -> choice.Choice:
    """Return what the plan chooses for a job that no launcher has resolved; on other ranks than 0 nothing.

    Raises: UserError on every rank for a micro batch that is to be searched, and cannot be chosen so.
    """
    is_chosen = job.running() is None and os.environ.get(CHECKS) != "0"
    if settings.search_batch_size and not (is_chosen and choice.covers(settings)):
        raise UserError(NO_SEARCH)
    if not _is_to_check(settings):
        return choice.Choice()
    chosen = choice.for_rows(settings, train_set, eval_set)
    preflight.publish(chosen.plan)
    return chosen


def start_processes(settings: Settings, train_set, eval_set):
    """Open the process group, check that all ranks run the same job, and return TrainingArguments.

    The run folder is chosen here but set up by `open_run_folder`, after the model is loaded, so that an error leaves no
    incomplete run behind.
    """
    from zerofit.train.trainer import training_arguments

    gc.freeze()  # a full collection looks at half a million objects of the libraries: 0.3 s, in the middle of a step
    resolve.resolve_for_model(settings)
    chosen = _choose(settings, train_set, eval_set)  # the other ranks wait for rank 0 in distributed.start
    for module in (attention, sequence_parallel):  # the launcher has resolved what each process registers
        if settings.attn_implementation == module.NAME:
            module.register()
    attention.avoid_wrong_kernels(settings)
    attention.hold_no_scores(settings)
    with network_check.connecting(settings):
        distributed.start(settings)
    network_check.answer(settings)
    if not settings.use_cpu and (sentences := [*filter(None, distributed.all_gather(allocator.prove_expandable()))]):
        settings.decisions.append(min(sentences))  # of a rank that has gone back to the usual segments, if one has
    if job.running() is None and not settings.use_cpu:
        resolve.change(settings, distributed.broadcast(chosen).of(settings.request))
    flex.follow_first_rank(settings)
    save.choose_clock(settings)
    network_check.check(settings, train_set, eval_set)
    resolve.self_test(settings, load.load_config(settings))  # collective, so after the check that all ranks agree
    deepspeed_ops.prepare(settings)
    nvme.reserve_folder(settings)
    if distributed.rank() == 0 and not rank_status.folder():  # else the supervisor has locked it
        run_folder.claim_folder(settings)
    settings.started_by = restart.starters()
    folder = None
    if distributed.rank() == 0:
        restart.go_on(settings)
        upload.fetch(settings)
        folder = run_folder.name_folder(settings)
        run_folder.check_folder(folder, bool(settings.resume_from_checkpoint))
    folder, settings.resume_from_checkpoint = distributed.broadcast((folder, settings.resume_from_checkpoint))
    settings.output_dir = str(folder)
    network_check.check_disk(settings, folder)
    local = settings.node_local_storage and distributed.several_nodes()
    resumable.find_checkpoint(settings, folder, functools.partial(verify.by_hashes, local=local))
    arguments = training_arguments(settings)
    if settings.memory_report:
        memory_report.start(settings)
    return arguments


def open_run_folder(settings: Settings, train_set, eval_set) -> None:
    """Set up the run folder, print what was decided, and write run.json."""
    resumable.check_resumable(settings, train_set)
    if distributed.rank() == 0:
        folder, resumed = Path(settings.output_dir), settings.resume_from_checkpoint
        if resumed is None or Path(resumed).parent.resolve() == folder.resolve():
            run_folder.keep_metrics(folder, int(resumed.rpartition("-")[2]) if resumed else 0)
            run_folder.set_aside_result(folder)
    earlier = stretches.kept(Path(settings.output_dir), _resumed_at(settings)) if distributed.rank() == 0 else {}
    _leave_newer_checkpoints(settings)
    run_folder.open_folder(settings)
    _remember_program(settings)
    sets = {"training": train_set, "evaluation": eval_set}
    sets = {name: rows for name, rows in sets.items() if rows is not None}
    if distributed.rank() == 0:
        from_checkpoint = f", resumed from {Path(resumed).name}" if resumed else ""
        print(
            f"zerofit {settings.recipe}: {settings.world_size} process{'es' * (settings.world_size > 1)}, ZeRO "
            f"{settings.zero}, offload {settings.offload}, {settings.precision}; run folder {settings.output_dir}"
            f"{from_checkpoint}"
        )
        described = [dataset.describe(name, rows, settings.objective.unit) for name, rows in sets.items()]
        few = tokens.few_steps(settings, train_set)
        for sentence in [*settings.decisions, *described, *dataset.notes(sets), *few]:
            print(f"  - {from_here(printable(shortened(sentence)))}", flush=True)
        facts = {name: {"fingerprint": rows.fingerprint, **rows.statistics} for name, rows in sets.items()}
        started = _job(settings)
        more = {name: fact for name, fact in started.facts.items() if fact}
        more |= {"program": started.program, "resumed": settings.resumed, "started_by": settings.started_by}
        job.write(folder / job.FILE, started)
        run_folder.write_run(settings, started.command, {"data": facts} | more | earlier)
        trackers.start(settings.report_to, folder)
        if not (rank_status.folder() or trial.is_canary() or trial.is_batch_search()):  # else the supervisor does
            live.Page(folder)


def _resumed_at(settings: Settings) -> int:
    """Return the step of the checkpoint that the run goes on from; 0: it begins."""
    return step_of(Path(settings.resume_from_checkpoint)) if settings.resume_from_checkpoint else 0


def _job(settings: Settings) -> job.Job:
    """Return the job of this process as it trains, for the run folder."""
    running, own = job.running(), program.current()
    command = running.command if running else command_line.hide_secrets([sys.executable, *sys.argv])
    facts = {name: running and running.facts.get(name) for name in ("canary", "typed")} | {"plan": job.published()}
    return job.Job(settings.request, settings, own and own.facts, command, facts)


def _remember_program(settings: Settings) -> None:
    """Record on each node for this user what trains into the run folder, so that `zerofit resume` starts it again."""
    if trial.is_canary() or trial.is_batch_search() or not distributed.first_of_node():
        return
    try:
        program.remember(Path(settings.output_dir), command_line.without_secrets(settings.request.all_flags()))
    except OSError as error:
        settings.decisions.append(
            f"the program is not recorded: {error.filename}: {error.strerror}; `zerofit resume` will ask for it"
        )


def _leave_newer_checkpoints(settings: Settings) -> None:
    """Move away the checkpoints newer than the resumed one: this run saves those steps again."""
    if distributed.rank() != 0 and not (
        settings.node_local_storage and distributed.first_of_node()
    ):  # one rank per disk
        return
    folder, step = Path(settings.output_dir), _resumed_at(settings)
    if moved_to := resumable.move_newer(folder, step):
        settings.decisions.append(f"checkpoints after step {step}, where this run resumes, were moved to {moved_to}")
