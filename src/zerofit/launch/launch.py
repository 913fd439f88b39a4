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
from zerofit.job.program import Program, again
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.launch import batch_search, canary, node_options, prepare, supervisor
from zerofit.model.weights import complete
from zerofit.plan import choice, preflight


def main(argv: list[str], asked: Request | None = None) -> None:
    """`zerofit launch`: see --help. Ends the process with the job's exit code.

    Args: asked: what to train, e.g. of a run that is resumed; default: what the recipe's flags among `argv` ask for.
    Raises: UserError for the user's mistakes, before any process is started and before a run folder is made.
    """
    args, program, flags, count = prepare.launch_arguments(argv)
    is_resumed = asked is not None
    asked = asked or parse.request(program.recipe, flags)
    place = node_options.of(args)
    prepare.without_a_launchers_variables()
    if place is not None:  # memory, disks and groups are those of one node
        os.environ["LOCAL_WORLD_SIZE"] = str(count)
    asked, token = prepare.without_token(asked)
    os.environ |= token
    hardware.check_devices(count, use_cpu="use_cpu" in asked.values)
    if place is None:
        _launch_on_one_node(args, program, asked, count)
    else:
        prepare.check_for_nodes(asked.flags(), args.launcher)
        _launch_on_nodes(place, args, program, asked, count, is_resumed)


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


def _launch_on_nodes(
    place: node_options.Place, args, program: Program, asked: Request, count: int, is_resumed: bool
) -> None:
    """Check a job of several nodes, and run this node's part of it.

    The ranks resolve the flags again, as under torchrun without a launch: for other nodes, or after out of memory.
    Args: count: processes of this node; is_resumed: an earlier run's arguments are asked for, not those of a YAML file.
    """
    leads = place.rank == 0
    if leads and not args.show:
        node_options.check_ports(place)
    asked, settings = _for_most_nodes(place, asked.drop("gpus"), count)
    if not settings.output_dir:
        raise UserError(
            "--output_dir (OUT=) is not given: several nodes need one run folder; name one on a disk that all of them "
            "see."
        )
    folder = Path(settings.output_dir).absolute()
    env = _environment(settings, count) | {rank_status.RUN_FOLDER: str(folder)}

    flags = asked.planned("", {}).all_flags() if is_resumed else asked.flags()

    def command(own_address: str = "") -> list[str]:
        return [*prepare.node_command(place, count, settings, again(program), own_address), *flags]

    if args.show:
        _show(settings, command(), env)
        return
    if leads:
        run_folder.claim_folder(settings)
    prepare.prepare(settings, decides=leads)
    words, name = command("" if leads else node_options.reach(place)), f"node {place.rank} ({socket.gethostname()})"
    job = supervisor.Job(lambda *_: words, _resolved, settings, folder, env, count, name)
    raise SystemExit(supervisor.run_node(job, leads))


def _for_most_nodes(place: node_options.Place, asked: Request, count: int) -> tuple[Request, Settings]:
    """Return (the request with --zero auto resolved, its settings) for the most nodes that divide the effective batch.

    Raises: UserError if even the fewest do not, and for what needs a single node.
    """
    for nodes in range(place.most, place.least - 1, -1):
        ranks = count * nodes
        try:
            is_auto = asked.get("zero") == "auto"
            chosen = preflight.chosen_request(asked, ranks, node=count) if is_auto else asked
            settings = _settings(chosen.put(gpus=ranks), ranks)
        except UserError:
            if nodes == place.least:
                raise
            continue
        if settings.search_batch_size:
            raise UserError(prepare.SEARCHES_ON_ONE_NODE)
        return chosen, settings
    raise AssertionError("a job has a node")


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


def _environment(settings: Settings, count: int) -> dict[str, str]:
    return prepare.environment(count, hide_gpus=settings.use_cpu and settings.source["use_cpu"] != "decided")


def _show(settings: Settings, words: list[str], env: dict[str, str]) -> None:
    print("command\n  " + command_line.hide_secrets(words))
    print("environment\n" + "\n".join(f"  {name}={value}" for name, value in env.items()))
    print(show.summary(settings))
