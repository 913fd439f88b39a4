"""`zerofit launch`: check a job, then start its processes and supervise them."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

from zerofit.base import command_line, hardware, rank_status
from zerofit.base.errors import UserError
from zerofit.config import parse, resolve, show
from zerofit.data import tokens
from zerofit.job import job as job_file
from zerofit.job import program as programs
from zerofit.job import run_folder
from zerofit.job.program import Program, file_to_restart
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.launch import batch_search, canary, node_options, prepare, supervisor
from zerofit.model.weights import complete
from zerofit.plan import choice, preflight


def main(argv: list[str], request: Request | None = None) -> None:
    """`zerofit launch`: see --help. Ends the process with the job's exit code.

    Args: request: e.g. of a resumed run; default: from the recipe's flags in `argv`.
    Raises: UserError for user errors, before a process starts or a run folder is created.
    """
    args, program, flags, count = prepare.launch_arguments(argv)
    is_resumed = request is not None
    request = request or parse.request(program.recipe, flags)
    place = node_options.placement(args)
    prepare.clear_launcher_variables()
    if place is not None:  # memory, disks and groups are counted per node
        os.environ["LOCAL_WORLD_SIZE"] = str(count)
    request, token = prepare.without_token(request)
    os.environ |= token
    hardware.check_devices(count, use_cpu="use_cpu" in request.values)
    if place is None:
        _launch_on_one_node(args, program, request, count)
    else:
        prepare.check_for_nodes(request.flags(), args.launcher)
        _launch_on_nodes(place, args, program, request, count, is_resumed)


def _launch_on_one_node(args, program: Program, request: Request, count: int) -> None:
    """Check and run a job on one node. count: number of processes."""
    if request.get("zero") == "auto":
        request = preflight.chosen_request(request, count)
    request = request.put(gpus=count)
    settings = _settings(request, count)
    env = _environment(settings, count)

    def command() -> list[str]:
        return prepare.command(args.launcher, count, node_options.port_of(args.port), file_to_restart(program))

    if args.show:
        _show(settings, [*command(), *request.flags()], env)
        return
    run_folder.claim_folder(settings)
    if not settings.search_batch_size:
        preflight.prestart(settings)
    folder, train_set, eval_set = prepare.prepare(settings)
    if settings.search_batch_size:
        planned = None
        request = batch_search.with_size(settings, batch_search.search(settings).size)
    else:
        planned, request = _planned(settings, train_set, eval_set)
    preflight.publish(planned)
    settings = _resolved(request.put(output_dir=str(folder)), count)
    job = supervisor.Supervised(_starter(program, command), _resolved, settings, folder, env, count)
    if canary.wanted(settings, planned, tokens.number_of_steps(settings, train_set)):
        job.settings = canary.run(job, planned)
    raise SystemExit(supervisor.run(job))


def _starter(program: Program, command: Callable[[], list[str]]) -> Callable[..., list[str]]:
    """Return a function that writes an attempt's job file and returns the command that starts its ranks.

    Args: command: returns the command without the recipe's arguments.
    """

    def start(settings: Settings, folder: Path, collected: dict, trial: dict) -> list[str]:
        words, file = command(), folder / job_file.FILE
        typed = command_line.hide_secrets([*words, *settings.request.flags()])
        facts = {
            "plan": job_file.published(),
            "typed": command_line.as_typed(),
            "weights": dict(complete.LAST_CHECK),
            **collected,
        }
        program_facts = programs.from_file(program.file).facts
        job_file.write(file, job_file.Job(settings.request, settings, program_facts, typed, facts, trial))
        return [*words, *job_file.words(file, settings.output_dir)]

    return start


def _planned(settings: Settings, train_set, eval_set) -> tuple[dict | None, Request]:
    """Return (the predicted memory, the request with the values that the plan chose)."""
    chosen = choice.for_rows(settings, train_set, eval_set)
    return chosen.plan, chosen.apply_to(settings.request)


def _launch_on_nodes(
    place: node_options.NodePlacement, args, program: Program, request: Request, count: int, is_resumed: bool
) -> None:
    """Check a multi-node job, and run this node's part of it.

    The ranks resolve the flags again, as under plain torchrun, since nodes may join or memory may run out.
    Args: count: processes of this node; is_resumed: use the earlier run's arguments instead of the YAML file's.
    """
    leads = place.rank == 0
    if leads and not args.show:
        node_options.check_ports(place)
    request, settings = _for_most_nodes(place, request.drop("gpus"), count)
    if not settings.output_dir:
        raise UserError(
            "--output_dir (OUT=) is not set: several nodes need one run folder; set it to a folder on a disk that all "
            "of them share."
        )
    folder = Path(settings.output_dir).absolute()
    env = _environment(settings, count) | {rank_status.RUN_FOLDER: str(folder)}

    flags = request.with_plan_values("", {}).all_flags() if is_resumed else request.flags()

    def command(local_address: str = "") -> list[str]:
        return [*prepare.node_command(place, count, settings, file_to_restart(program), local_address), *flags]

    if args.show:
        _show(settings, command(), env)
        return
    if leads:
        run_folder.claim_folder(settings)
    prepare.prepare(settings, decides=leads)
    words = command("" if leads else node_options.wait_for_node_0(place))
    name = f"node {place.rank} ({socket.gethostname()})"
    job = supervisor.Supervised(lambda *_: words, _resolved, settings, folder, env, count, name)
    raise SystemExit(supervisor.run_node(job, leads))


def _for_most_nodes(place: node_options.NodePlacement, request: Request, count: int) -> tuple[Request, Settings]:
    """Return (request with --zero auto resolved, settings) for the largest node count that divides the effective batch.

    Raises: UserError if no allowed count does, or for flags that work on one node only.
    """
    for nodes in range(place.most, place.least - 1, -1):
        ranks = count * nodes
        try:
            is_auto = request.get("zero") == "auto"
            chosen = preflight.chosen_request(request, ranks, node=count) if is_auto else request
            settings = _settings(chosen.put(gpus=ranks), ranks)
        except UserError:
            if nodes == place.least:
                raise
            continue
        if settings.search_batch_size:
            raise UserError(prepare.NO_BATCH_SEARCH)
        return chosen, settings
    raise AssertionError("a job has at least one node")


def _settings(request: Request, ranks: int) -> Settings:
    """Resolve a request; with --show or --plan, print and end the process."""
    settings = resolve.resolve(request, ranks)
    preflight.only_print(settings)
    return settings


def _resolved(request: Request, ranks: int) -> Settings:
    """Return the settings for the ranks, fully resolved (also for the model)."""
    settings = resolve.resolve(request, ranks)
    resolve.resolve_for_model(settings)
    return settings


def _environment(settings: Settings, count: int) -> dict[str, str]:
    return prepare.environment(count, hide_gpus=settings.use_cpu and settings.source["use_cpu"] != "decided")


def _show(settings: Settings, words: list[str], env: dict[str, str]) -> None:
    print("command\n  " + command_line.hide_secrets(words))
    print("environment\n" + "\n".join(f"  {name}={value}" for name, value in env.items()))
    print(show.summary(settings))
