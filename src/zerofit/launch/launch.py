"""`zerofit launch`: check a job, then start its processes and supervise them."""

import os
from functools import partial
from pathlib import Path

from zerofit.base import command_line, hardware
from zerofit.base.errors import UserError
from zerofit.config import defaults, resolve, show
from zerofit.job import run_folder
from zerofit.job.program import Program, again
from zerofit.job.settings import Settings
from zerofit.launch import batch_search, canary, prepare, standby, supervisor
from zerofit.launch.cluster import documents, job_secret, node_options
from zerofit.launch.cluster.coordinator import Coordinator
from zerofit.plan import preflight
from zerofit.train import consistency


def main(argv: list[str]) -> None:
    """`zerofit launch`: see --help. Ends the process with the job's exit code.

    Raises: UserError for the user's mistakes, before any process is started and before a run folder is made.
    """
    args, program, flags, count = prepare.launch_arguments(argv)
    try:
        if node_options.of(args) is None and not args.show:
            standby.prefork()
        _launch(args, program, flags, count)
    finally:
        standby.dismiss()


def _launch(args, program: Program, flags: list[str], count: int) -> None:
    """Launch on one node, or as one node of several. count: processes of this node."""
    place = node_options.of(args)
    prepare.without_a_launchers_variables()
    if place is not None:  # memory, disks and groups are those of one node
        os.environ["LOCAL_WORLD_SIZE"] = str(count)
    flags, token = prepare.without_token(flags)
    os.environ |= token
    hardware.check_devices(count, use_cpu="--use_cpu" in command_line.names(flags))
    if place is None:
        _launch_on_one_node(args, program, flags, count)
    elif args.show:
        _show_nodes(place, program, flags, count)
    else:
        os.environ.setdefault(hardware.CPU_PRECISION, "fp32 nodes cannot agree on a timing")
        prepare.check_for_nodes(flags, args.launcher)
        if place.least == place.most:  # report a mistake in the flags before any node waits
            _settings_on_nodes(program.recipe, flags, count * place.most)
        with (
            job_secret.of_job(place, flags) as secret,
            Coordinator(place, count, consistency.software(program.file), secret) as coordinator,
        ):
            launch_as = _launch_as_leader if coordinator.leads else _launch_as_follower
            launch_as(coordinator, args, program, flags, count)


def _launch_on_one_node(args, program: Program, flags: list[str], count: int) -> None:
    """Check everything, then run the job. count: its processes."""
    if preflight.is_auto(program.recipe, flags):
        flags = preflight.chosen_flags(program.recipe, flags, count)
    flags = command_line.put(flags, gpus=count)
    settings = _settings(program.recipe, flags, count)
    env = _environment(settings, count)

    def command(flags):
        return prepare.command(args.launcher, count, node_options.port_of(args.port), again(program), flags)

    if args.show:
        _show(settings, command(flags), env)
        return
    run_folder.claim_folder(settings)
    if not settings.search_batch_size:
        preflight.prestart(settings)
    folder, train_set, eval_set = prepare.prepare(settings)
    before = flags
    if settings.search_batch_size:
        planned = None
        flags = batch_search.with_size(settings, flags, batch_search.search(settings, flags).size)
    else:
        planned, flags = _planned(settings, flags, train_set, eval_set)
    preflight.publish(planned)
    changed, flags = flags != before, command_line.put(flags, output_dir=folder)
    if changed:
        settings = _settings(program.recipe, flags, count)
    job = supervisor.Job(command, partial(_settings, program.recipe), settings, flags, folder, env, count)
    if canary.wanted(settings, planned, prepare.number_of_steps(settings, train_set)):
        job.flags, job.settings = canary.run(job, planned)
    raise SystemExit(supervisor.run(job))


def _planned(settings: Settings, flags: list[str], train_set, eval_set) -> tuple[dict | None, list[str]]:
    """Return (the prediction of the job's memory, the flags with the gradient checkpointing that its plan chooses)."""
    mean, longest = prepare.row_tokens(settings, train_set), prepare.longest_row(settings, train_set, eval_set)
    planned, checkpointing = preflight.choose_and_check(settings, mean, longest)
    return planned, command_line.put(flags, **checkpointing)


def _launch_as_leader(coordinator: Coordinator, args, program: Program, flags: list[str], count: int) -> None:
    """Run the job as node 0, which decides: the nodes, the run folder, each attempt. count: processes of this node."""
    coordinator.membership.gather()
    nodes, flags = _choose_nodes(coordinator, program.recipe, flags)
    coordinator.begin_with(nodes, flags)
    settings = _settings_on_nodes(program.recipe, flags, coordinator.world_size)
    run_folder.claim_folder(settings)
    preflight.prestart(settings)
    folder, train_set, eval_set = prepare.prepare(settings)
    planned, with_plan = _planned(settings, flags, train_set, eval_set)
    preflight.publish(planned)
    folder = _agree(coordinator, settings, train_set, eval_set, folder)
    if with_plan != flags:  # the other nodes learn it with the first attempt's order
        flags, settings = with_plan, _settings_on_nodes(program.recipe, with_plan, coordinator.world_size)
    job = _job_on_nodes(coordinator, args, program, flags, settings, folder, count)
    if canary.wanted(settings, planned, prepare.number_of_steps(settings, train_set)):
        print("note: --canary is skipped: it runs on one node only", flush=True)
    raise SystemExit(supervisor.run(job))


def _launch_as_follower(coordinator: Coordinator, args, program: Program, flags: list[str], count: int) -> None:
    """Run this node's part of a job that node 0 leads. count: processes of this node."""
    coordinator.membership.gather()
    if preflight.is_auto(program.recipe, flags):
        flags = documents.with_decisions(flags, coordinator.job.flags)
    settings = _settings_on_nodes(program.recipe, flags, coordinator.world_size)
    _, train_set, eval_set = prepare.prepare(settings, decides=False)
    preflight.publish(None)
    folder = _agree(coordinator, settings, train_set, eval_set, None)
    job = _job_on_nodes(coordinator, args, program, flags, settings, folder, count)
    raise SystemExit(supervisor.follow(job))


def _agree(coordinator: Coordinator, settings: Settings, train_set, eval_set, folder: Path | None) -> Path:
    """Wait until all nodes are ready, with the same data and arguments; return the run folder."""
    folder = coordinator.membership.agree(consistency.of_job(settings, train_set, eval_set), folder)
    coordinator.effective_batch_size = settings.effective_batch_size
    print(
        f"{coordinator.name}: {coordinator.world_size} processes on {len(coordinator.job.nodes)} nodes, all with the "
        f"same software, data and arguments; run folder {folder}",
        flush=True,
    )
    return folder


def _job_on_nodes(
    coordinator: Coordinator, args, program: Program, flags: list[str], settings: Settings, folder: Path, count: int
) -> supervisor.Job:
    def command(flags):
        nodes = coordinator.attempt.order.nodes
        if sum(nodes.values()) > 1:
            return prepare.node_command(coordinator.place, nodes, again(program), flags)
        return prepare.command(args.launcher, count, node_options.port_of(""), again(program), flags)

    flags = command_line.put(flags, gpus=coordinator.world_size, output_dir=folder)
    env = _environment(settings, count)
    return supervisor.Job(command, partial(_settings, program.recipe), settings, flags, folder, env, count, coordinator)


def _settings(recipe: str, flags: list[str], ranks: int) -> Settings:
    """Resolve the ranks' command line; --show and --plan print and end the process."""
    settings = resolve.resolve_settings(recipe, flags, ranks)
    preflight.only_print(settings)
    return settings


def _settings_on_nodes(recipe: str, flags: list[str], ranks: int) -> Settings:
    """Resolve the command line of `ranks` ranks on several nodes. Raises: UserError also for what works on one only."""
    settings = _settings(recipe, command_line.put(flags, gpus=ranks), ranks)
    if settings.search_batch_size:
        raise UserError(prepare.SEARCHES_ON_ONE_NODE)
    return settings


def _environment(settings: Settings, count: int) -> dict[str, str]:
    added = prepare.environment(count, hide_gpus=settings.use_cpu and settings.source["use_cpu"] != "decided")
    if settings.use_cpu:
        chosen = " ".join(defaults.cpu_precision(settings))
        # Not for the ranks alone: searches and simulations inherit this process's environment.
        os.environ[hardware.CPU_PRECISION] = added[hardware.CPU_PRECISION] = chosen
    return added


def _choose_nodes(coordinator: Coordinator, recipe: str, flags: list[str]) -> tuple[dict[int, int], list[str]]:
    """Return the nodes that the job begins with, {node rank: processes}, and the flags with --zero auto resolved.

    They are the most of the nodes present among which the batch can be divided evenly.
    Raises: UserError if that is not possible with the minimum of nodes either.
    """
    nodes = coordinator.membership.processes()
    while True:
        ranks = sum(nodes.values())
        try:
            is_auto = preflight.is_auto(recipe, flags)
            chosen = preflight.chosen_flags(recipe, flags, ranks, node=nodes[0]) if is_auto else flags
            _settings_on_nodes(recipe, chosen, ranks)
            return nodes, chosen
        except UserError:
            if len(nodes) == coordinator.place.least:
                raise
            nodes.popitem()


def _show_nodes(place: node_options.Place, program: Program, flags: list[str], count: int) -> None:
    """Print what `--show` prints for one node of several, without contacting the other nodes."""
    ranks = count * place.most
    flags = command_line.put(flags, gpus=ranks)
    command = prepare.node_command(place, dict.fromkeys(range(place.most), count), again(program), flags)
    _show(_settings(program.recipe, flags, ranks), command, prepare.environment(count))


def _show(settings: Settings, words: list[str], env: dict[str, str]) -> None:
    print("command\n  " + command_line.hide_secrets(words))
    print("environment\n" + "\n".join(f"  {name}={value}" for name, value in env.items()))
    print(show.summary(settings))
