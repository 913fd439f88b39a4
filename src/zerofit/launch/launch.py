"""`zerofit launch`: check a job, then start its processes and supervise them."""

import os
from collections.abc import Callable
from pathlib import Path

from zerofit.base import command_line, hardware
from zerofit.base.errors import UserError
from zerofit.checkpoint import next_settings
from zerofit.config import parse, resolve, show
from zerofit.data import tokens
from zerofit.job import job as job_file
from zerofit.job import program as programs
from zerofit.job import run_folder
from zerofit.job.program import Program, again
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.launch import batch_search, canary, prepare, supervisor
from zerofit.launch.cluster import node_options
from zerofit.launch.cluster.coordinator import Coordinator
from zerofit.model.weights import complete
from zerofit.plan import choice, preflight


def main(argv: list[str], asked: Request | None = None) -> None:
    """`zerofit launch`: see --help. Ends the process with the job's exit code.

    Args: asked: what to train, e.g. of a run that is resumed; default: what the recipe's flags among `argv` ask for.
    Raises: UserError for the user's mistakes, before any process is started and before a run folder is made.
    """
    args, program, flags, count = prepare.launch_arguments(argv)
    asked = parse.request(program.recipe, flags) if asked is None else asked
    place = node_options.of(args)
    prepare.without_a_launchers_variables()
    if place is not None:  # memory, disks and groups are those of one node
        os.environ["LOCAL_WORLD_SIZE"] = str(count)
    asked, token = prepare.without_token(asked)
    os.environ |= token
    hardware.check_devices(count, use_cpu="use_cpu" in asked.values)
    if place is None:
        _launch_on_one_node(args, program, asked, count)
    elif args.show:
        _show_nodes(place, program, asked, count)
    else:
        prepare.check_for_nodes(asked.flags(), args.launcher)
        if place.least == place.most:  # report a mistake in the flags before any node waits
            _settings_on_nodes(asked, count * place.most)
        with Coordinator(place, count) as coordinator:
            launch_as = _launch_as_leader if coordinator.leads else _launch_as_follower
            launch_as(coordinator, args, program, asked, count)


def _launch_on_one_node(args, program: Program, asked: Request, count: int) -> None:
    """Check and run a job of one node. count: its processes."""
    if asked.get("zero") == "auto":
        asked = preflight.chosen_request(asked, count)
    asked = asked.put(gpus=count)
    settings = _settings(asked, count)
    env = _environment(settings, count)

    def command() -> list[str]:
        return prepare.command(args.launcher, count, node_options.port_of(args.port), again(program))

    if args.show:
        _show(settings, [*command(), *asked.flags()], env)
        return
    run_folder.claim_folder(settings)
    if not settings.search_batch_size:
        preflight.prestart(settings)
    folder, train_set, eval_set = prepare.prepare(settings)
    if settings.search_batch_size:
        planned = None
        asked = batch_search.with_size(settings, batch_search.search(settings).size)
    else:
        planned, asked = _planned(settings, train_set, eval_set)
    preflight.publish(planned)
    settings = _resolved(asked.put(output_dir=str(folder)), count)
    job = supervisor.Job(_starter(program, command), _resolved, settings, folder, env, count)
    if canary.wanted(settings, planned, tokens.number_of_steps(settings, train_set)):
        job.settings = canary.run(job, planned)
    raise SystemExit(supervisor.run(job))


def _starter(program: Program, command: Callable[[], list[str]]) -> Callable[..., list[str]]:
    """Return a function that writes the job of an attempt and returns the command that starts its ranks.

    Args: command: returns the command without the recipe's own words.
    """

    def start(settings: Settings, folder: Path, found: dict, trial: dict) -> list[str]:
        words, file = command(), folder / job_file.FILE
        typed = command_line.hide_secrets([*words, *settings.request.flags()])
        facts = {
            "plan": job_file.published(),
            "typed": command_line.as_typed(),
            "weights": dict(complete.HELD),
            **found,
        }
        now = programs.of(program.file).facts
        job_file.write(file, job_file.Job(settings.request, settings, now, typed, facts, trial))
        return [*words, *job_file.words(file, settings.output_dir)]

    return start


def _planned(settings: Settings, train_set, eval_set) -> tuple[dict | None, Request]:
    """Return (the prediction of the job's memory, the request with what its plan chooses)."""
    chosen = choice.for_rows(settings, train_set, eval_set)
    return chosen.plan, chosen.of(settings.request)


def _launch_as_leader(coordinator: Coordinator, args, program: Program, asked: Request, count: int) -> None:
    """Run the job as node 0, which chooses nodes, run folder and attempts. count: processes of this node."""
    coordinator.meet()
    nodes, asked = _choose_nodes(coordinator, asked)
    coordinator.begin_with(nodes, asked)
    ranks = sum(nodes.values())
    settings = _settings_on_nodes(asked, ranks)
    coordinator.effective_batch_size = settings.effective_batch_size
    run_folder.claim_folder(settings)
    preflight.prestart(settings)
    folder, train_set, eval_set = prepare.prepare(settings)
    planned, asked = _planned(settings, train_set, eval_set)  # sent to the other nodes with the first attempt's order
    preflight.publish(planned)
    coordinator.wait_until_ready()
    folder = folder.absolute()
    print(f"{coordinator.name}: {ranks} processes on {len(nodes)} nodes; run folder {folder}", flush=True)
    settings = _resolved(asked.put(gpus=ranks, output_dir=str(folder)), ranks)
    job = _job_on_nodes(coordinator, args, program, settings, folder, count)
    if canary.wanted(settings, planned, tokens.number_of_steps(settings, train_set)):
        print("note: --canary is skipped: it runs on one node only", flush=True)
    raise SystemExit(supervisor.run(job))


def _launch_as_follower(coordinator: Coordinator, args, program: Program, asked: Request, count: int) -> None:
    """Run this node's part of a job that node 0 leads. count: processes of this node."""
    begun = coordinator.begun()
    if asked.get("zero") == "auto":
        asked = next_settings.with_decisions(asked, begun.decided)
    settings = _settings_on_nodes(asked, begun.ranks)
    prepare.prepare(settings, decides=False)
    preflight.publish(None)
    supervisor.follow(_job_on_nodes(coordinator, args, program, settings, Path(), count))


def _job_on_nodes(
    coordinator: Coordinator, args, program: Program, settings: Settings, folder: Path, count: int
) -> supervisor.Job:
    """Return this node's part of the job. folder: the run folder, on node 0."""

    def command() -> list[str]:
        nodes = coordinator.attempt.order.nodes
        if sum(nodes.values()) > 1:
            return prepare.node_command(coordinator.place, nodes, again(program))
        return prepare.command(args.launcher, count, node_options.port_of(""), again(program))

    env = _environment(settings, count)
    return supervisor.Job(_starter(program, command), _resolved, settings, folder, env, count, coordinator)


def _settings(asked: Request, ranks: int) -> Settings:
    """Resolve a request; --show and --plan print and end the process."""
    settings = resolve.resolve(asked, ranks)
    preflight.only_print(settings)
    return settings


def _resolved(asked: Request, ranks: int) -> Settings:
    """Return the settings that ranks train with, also resolved for the model, so that ranks resolve nothing again."""
    settings = resolve.resolve(asked, ranks)
    resolve.resolve_for_model(settings)
    return settings


def _settings_on_nodes(asked: Request, ranks: int) -> Settings:
    """Resolve a request for `ranks` ranks on several nodes. Raises: UserError also for what needs a single node."""
    settings = _settings(asked.put(gpus=ranks), ranks)
    if settings.search_batch_size:
        raise UserError(prepare.SEARCHES_ON_ONE_NODE)
    return settings


def _environment(settings: Settings, count: int) -> dict[str, str]:
    return prepare.environment(count, hide_gpus=settings.use_cpu and settings.source["use_cpu"] != "decided")


def _choose_nodes(coordinator: Coordinator, asked: Request) -> tuple[dict[int, int], Request]:
    """Return the nodes that the job begins with, {node rank: processes}, and the request with --zero auto resolved.

    These are as many of the present nodes as divide the effective batch evenly.
    Raises: UserError if even the minimum of nodes does not.
    """
    nodes = coordinator.processes()
    while True:
        ranks = sum(nodes.values())
        try:
            is_auto = asked.get("zero") == "auto"
            chosen = preflight.chosen_request(asked, ranks, node=nodes[0]) if is_auto else asked
            _settings_on_nodes(chosen, ranks)
            return nodes, chosen
        except UserError:
            if len(nodes) == coordinator.place.least:
                raise
            nodes.popitem()


def _show_nodes(place: node_options.Place, program: Program, asked: Request, count: int) -> None:
    """Print what `--show` prints for one node of several, without contacting the other nodes."""
    ranks = count * place.most
    asked = asked.put(gpus=ranks)
    command = prepare.node_command(place, dict.fromkeys(range(place.most), count), again(program))
    _show(_settings(asked, ranks), [*command, *asked.flags()], prepare.environment(count))


def _show(settings: Settings, words: list[str], env: dict[str, str]) -> None:
    print("command\n  " + command_line.hide_secrets(words))
    print("environment\n" + "\n".join(f"  {name}={value}" for name, value in env.items()))
    print(show.summary(settings))
