"""`zerofit launch`: check a job, then start its processes and supervise them."""

import argparse
import os
from pathlib import Path

from zerofit import command_line, hardware, run_folder
from zerofit.config import arguments, parse, resolve, show
from zerofit.errors import UserError
from zerofit.launch import batch_search, canary, prepare, supervisor
from zerofit.launch.cluster import coordinator, documents, job_secret, node_options
from zerofit.paths import ROOT
from zerofit.plan import preflight
from zerofit.settings import Settings
from zerofit.train import consistency


def main(argv: list[str]) -> None:
    """`zerofit launch`: see --help. Ends the process with the job's exit code.

    Raises: UserError for the user's mistakes, before any process is started and before a run folder is made.
    """
    parser = argparse.ArgumentParser(prog="zerofit launch", allow_abbrev=False, description=__doc__)
    prepare.add_placement(parser, gpus="1")
    node_options.add_options(parser)
    parser.add_argument("--show", action="store_true", help="print command, environment and arguments; start nothing")
    parser.add_argument("recipe", help="recipes/sft.py or recipes/lora.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the recipe's flags")
    args = parser.parse_args(argv)

    recipe = Path(args.recipe)
    if not recipe.is_file() and (ROOT / recipe).is_file():
        recipe = ROOT / recipe  # started from another folder
    if recipe.stem not in arguments.RECIPES or not recipe.is_file():
        raise UserError(
            f"{args.recipe}: no such recipe; there are {', '.join(f'recipes/{r}.py' for r in arguments.RECIPES)}."
        )
    if args.launcher not in prepare.LAUNCHERS:
        raise UserError(f"LAUNCHER={args.launcher}: must be one of {', '.join(prepare.LAUNCHERS)}.")
    flags, count = parse.command_line(recipe.stem, args.flags, args.args, args.gpus)
    place = node_options.of(args)
    prepare.without_a_launchers_variables()
    flags, token = prepare.without_token(flags)
    os.environ |= token
    hardware.check_devices(count, use_cpu="--use_cpu" in command_line.names(flags))
    if place is None:
        _launch(args, recipe, flags, count)
    elif args.show:
        _show_nodes(place, recipe, flags, count)
    else:
        prepare.check_for_nodes(flags, args.launcher)
        if place.least == place.most:  # report a mistake in the flags before any node waits
            ranks = count * place.most
            _settings(recipe.stem, command_line.put(flags, gpus=ranks), ranks)
        with job_secret.of_job(place, flags) as secret:
            crew = coordinator.Coordinator(place, count, consistency.software(recipe.stem), secret)
            with crew.telling():
                _launch(args, recipe, flags, count, crew)


def _launch(given, recipe: Path, flags: list[str], count: int, crew: coordinator.Coordinator | None = None) -> None:
    """Check everything, then run the job. count: processes of this node; crew: None for one node."""
    ranks = count
    if crew:
        crew.gather()
        flags, ranks = _members(crew, recipe.stem, flags)
    elif preflight.is_auto(flags):
        flags = preflight.chosen_flags(recipe.stem, flags, ranks)
    flags = command_line.put(flags, gpus=ranks)
    settings = _settings(recipe.stem, flags, ranks)
    env = prepare.environment(count, hide_gpus=settings.use_cpu and settings.source["use_cpu"] != "decided")
    if given.show:
        _show(settings, prepare.command(given.launcher, count, node_options.port_of(given.port), recipe, flags), env)
        return
    decides = crew is None or crew.leads
    if decides:
        run_folder.claim_folder(settings)
    if not settings.search_batch_size and decides:
        preflight.prestart(settings)
    folder, train_set, eval_set = prepare.prepare(settings, decides)
    planned = preflight.check(settings) if decides and not settings.search_batch_size else None
    if settings.search_batch_size:
        flags = batch_search.with_size(settings, flags, batch_search.search(settings, flags).size)
    preflight.publish(planned)
    if crew:
        folder = crew.agree(consistency.of_job(settings, train_set, eval_set), folder)
        crew.batch = settings.effective_batch_size
        print(f"{crew.name}: {ranks} processes on {len(crew.board['members'])} nodes, all with the same software, data "
              f"and arguments; run folder {folder}", flush=True)  # fmt: skip
    flags = command_line.put(flags, output_dir=folder)

    def words(flags):
        if crew and sum(crew.board["order"]["members"].values()) > 1:
            return crew.torchrun([str(recipe), *flags])
        return prepare.command(given.launcher, count, node_options.port_of("" if crew else given.port), recipe, flags)

    parsed = _settings(recipe.stem, flags, ranks) if settings.search_batch_size else settings
    job = supervisor.Job(words, lambda f, n: _settings(recipe.stem, f, n), parsed, flags, folder, env, count,
                        crew)  # fmt: skip
    if decides and canary.wanted(parsed, planned, prepare.number_of_steps(parsed, train_set)):
        if crew:
            print("note: no rehearsal (--canary) is made on several machines", flush=True)
        else:
            job.flags, job.settings = canary.rehearse(job, planned)
    raise SystemExit(supervisor.run(job) if decides else supervisor.follow(job))


def _settings(recipe: str, flags: list[str], ranks: int) -> Settings:
    """Resolve the ranks' command line; --show and --plan print and end the process."""
    settings = resolve.resolve_settings(recipe, flags, ranks)
    preflight.only_print(settings)
    return settings


def _members(crew: coordinator.Coordinator, recipe: str, flags: list[str]) -> tuple[list[str], int]:
    """Choose the nodes that the job starts with; node 0 chooses, the others read its choice.

    It takes the most of the nodes present among which the batch can be divided evenly.
    Returns: the recipe's flags (with --zero auto resolved), the number of processes of the job.
    """
    if not crew.leads:
        chosen = documents.with_decisions(flags, crew.board["flags"]) if preflight.is_auto(flags) else flags
        return chosen, crew.processes
    nodes = crew.here()
    while True:
        ranks = sum(gpus for _, gpus in nodes)
        try:
            chosen = (
                preflight.chosen_flags(recipe, flags, ranks, node=nodes[0][1]) if preflight.is_auto(flags) else flags
            )
            _settings(recipe, [*chosen, "--gpus", str(ranks)], ranks)
            break
        except UserError:
            if len(nodes) == crew.place.least:
                raise
            nodes = nodes[:-1]
    crew.begin_with(nodes, chosen)
    return chosen, ranks


def _show_nodes(here: node_options.Place, recipe: Path, flags: list[str], count: int) -> None:
    """Print what `--show` prints for one node of several, without contacting the other nodes."""
    ranks = count * here.most
    settings = _settings(recipe.stem, command_line.put(flags, gpus=ranks), ranks)
    _show(settings, coordinator.torchrun(here, dict.fromkeys(range(here.most), count), [str(recipe), *flags, "--gpus", str(ranks)]),
          prepare.environment(count))  # fmt: skip


def _show(settings: Settings, words: list[str], env: dict[str, str]) -> None:
    print("command\n  " + command_line.hide_secrets(words))
    print("environment\n" + "\n".join(f"  {name}={value}" for name, value in env.items()))
    print(show.summary(settings))
