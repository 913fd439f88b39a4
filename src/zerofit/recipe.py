"""The first steps of a recipe: parse arguments, start ranks, open the run folder."""

# ruff: noqa: E402

from zerofit.base import process

process.begin()  # before torch is imported, in a program without entrypoint.check_early

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
from zerofit.job import job, program, run_folder, run_segments
from zerofit.job.recipe import Recipe
from zerofit.job.settings import Settings, to_print
from zerofit.launch import doctor
from zerofit.model import attention, load
from zerofit.model.experimental import flex
from zerofit.model.weights import complete
from zerofit.parallel import sequence_parallel
from zerofit.plan import choice, preflight
from zerofit.report import live
from zerofit.train import deepspeed_ops, memory_report, network_check, trackers, trial

CHECKS = "ZEROFIT_PLAN"  # environment variable; 0: without a launcher, rank 0 does not check if the job fits

NO_SEARCH = (
    "--per_device_train_batch_size auto: without a launcher, the plan can choose the size only on a GPU, in bf16 and "
    "without padding; start with `zerofit launch`, which measures real steps, or set a size."
)

log_filters.libraries()


def parse(recipe: Recipe) -> Settings:
    """Return the checked settings of this process, from its launcher or its command line.

    --show and --plan print and exit. Raises: UserError for a user's mistake, before using a GPU or process group.
    """
    gc.enable()  # entrypoint.check_early has disabled it for the imports
    warnings = doctor.raise_or_warn(doctor.check_installation())
    if file := job.file_argument(sys.argv[1:]):
        settings = resolve.settings_for_process(lambda: job.start(file, distributed.size(), recipe))
        facts = job.running().facts
        preflight.publish(facts.get("plan"))
        complete.LAST_CHECK.update(facts.get("weights", {}))
    else:
        settings = restart.resolve_settings(recipe)
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
    """Return whether this process checks if the job fits: rank 0, unless a launcher or search did."""
    return distributed.rank() == 0 and job.running() is None and os.environ.get(CHECKS) != "0"


def _choose(settings: Settings, train_set, eval_set) -> choice.Choice:
    """Return the plan's choice for a job without a launcher; an empty choice on ranks other than 0.

    Raises: UserError on every rank if the plan cannot choose an automatic micro batch.
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

    The run folder is chosen here, but `open_run_folder` creates it after the model is loaded, so that an error does not
    leave an incomplete run.
    """
    from zerofit.train.trainer import training_arguments

    gc.freeze()  # a full collection of the libraries' half a million objects takes 0.3 s within a step
    resolve.resolve_for_model(settings)
    chosen = _choose(settings, train_set, eval_set)  # other ranks wait for rank 0 in distributed.start
    for module in (attention, sequence_parallel):  # each process registers them, even if its launcher resolved the job
        if settings.attn_implementation == module.NAME:
            module.register()
    attention.avoid_wrong_kernels(settings)
    attention.hold_no_scores(settings)
    with network_check.connecting(settings):
        distributed.start(settings)
    network_check.answer(settings)
    if not settings.use_cpu and (
        sentences := [*filter(None, distributed.all_gather(allocator.check_expandable_segments()))]
    ):
        settings.decisions.append(min(sentences))  # reports the fallback if any rank fell back
    if job.running() is None and not settings.use_cpu:
        resolve.change(settings, distributed.broadcast(chosen).apply_to(settings.request))
    flex.follow_first_rank(settings)
    save.choose_clock(settings)
    network_check.check(settings, train_set, eval_set)
    resolve.self_test(settings, load.load_config(settings))  # collective, hence after the check that all ranks agree
    deepspeed_ops.prepare(settings)
    nvme.reserve_folder(settings)
    if distributed.rank() == 0 and not rank_status.folder():  # else the supervisor locked it
        run_folder.claim_folder(settings)
    settings.started_by = restart.starters()
    folder = None
    if distributed.rank() == 0:
        restart.resume_after_restart(settings)
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
    """Set up the run folder, print the decisions, and write run.json."""
    resumable.check_resumable(settings, train_set)
    if distributed.rank() == 0:
        folder, resumed = Path(settings.output_dir), settings.resume_from_checkpoint
        if resumed is None or Path(resumed).parent.resolve() == folder.resolve():
            run_folder.keep_metrics(folder, int(resumed.rpartition("-")[2]) if resumed else 0)
            run_folder.set_aside_result(folder)
    earlier = (
        run_segments.carried_over(Path(settings.output_dir), _resumed_at(settings)) if distributed.rank() == 0 else {}
    )
    _leave_newer_checkpoints(settings)
    run_folder.open_folder(settings)
    _remember_program(settings)
    sets = {"training": train_set, "evaluation": eval_set}
    sets = {name: rows for name, rows in sets.items() if rows is not None}
    if distributed.rank() == 0:
        from_checkpoint = f", resumed from {Path(resumed).name}" if resumed else ""
        print(
            f"zerofit {settings.recipe}: {settings.world_size} process{'es' * (settings.world_size > 1)}, ZeRO "
            f"{settings.zero}, offload {settings.offload}, {settings.compute_dtype}; run folder {settings.output_dir}"
            f"{from_checkpoint}"
        )
        described = [dataset.describe(name, rows, settings.objective.unit) for name, rows in sets.items()]
        few = tokens.few_steps(settings, train_set)
        for sentence in [*to_print(settings), *described, *dataset.notes(sets), *few]:
            print(f"  - {from_here(printable(shortened(sentence)))}", flush=True)
        facts = {name: {"fingerprint": rows.fingerprint, **rows.statistics} for name, rows in sets.items()}
        started = _job(settings)
        more = {name: fact for name, fact in started.facts.items() if fact}
        more |= {"program": started.program, "resumed": settings.previous_segments, "started_by": settings.started_by}
        job.write(folder / job.FILE, started)
        run_folder.write_run(settings, started.command, {"data": facts} | more | earlier)
        trackers.start(settings.report_to, folder)
        if not (rank_status.folder() or trial.is_canary() or trial.is_batch_search()):  # else the supervisor does
            live.Page(folder)


def _resumed_at(settings: Settings) -> int:
    """Return the step of the checkpoint to resume; 0 for a new run."""
    return step_of(Path(settings.resume_from_checkpoint)) if settings.resume_from_checkpoint else 0


def _job(settings: Settings) -> job.Job:
    """Return the final job of this process for the run folder."""
    running, current = job.running(), program.current()
    command = running.command if running else command_line.hide_secrets([sys.executable, *sys.argv])
    facts = {name: running and running.facts.get(name) for name in ("canary", "typed")} | {"plan": job.published()}
    return job.Job(settings.request, settings, current and current.facts, command, facts)


def _remember_program(settings: Settings) -> None:
    """Record for this user, on each node, the program that trains in the run folder, for `zerofit resume`."""
    if trial.is_canary() or trial.is_batch_search() or not distributed.first_of_node():
        return
    try:
        program.remember(Path(settings.output_dir), command_line.without_secrets(settings.request.all_flags()))
    except OSError as error:
        settings.decisions.append(
            f"the program is not recorded: {error.filename}: {error.strerror}; `zerofit resume` will need --recipe"
        )


def _leave_newer_checkpoints(settings: Settings) -> None:
    """Move checkpoints after the resumed one, whose steps this run repeats."""
    if distributed.rank() != 0 and not (
        settings.node_local_storage and distributed.first_of_node()
    ):  # one rank per disk
        return
    folder, step = Path(settings.output_dir), _resumed_at(settings)
    if moved_to := resumable.move_newer(folder, step):
        settings.decisions.append(f"this run resumes at step {step}; later checkpoints were moved to {moved_to}")
