"""Start a recipe on N processes of this machine: check first, then hand over to a standard launcher."""

import argparse
import math
import os
import sys
from pathlib import Path

from . import (
    args,
    canary,
    documents,
    job_secret,
    nodes,
    peers,
    place,
    planner,
    probe,
    report,
    resolve,
    supervise,
    world,
)
from .errors import UserError

LAUNCHERS = ("torchrun", "accelerate", "deepspeed")


def main(argv: list[str]) -> None:
    """`zerofit launch`: see --help. Ends the process with the job's exit code.

    Raises: UserError for the user's mistakes, before any process is started and before a run folder is made.
    """
    parser = argparse.ArgumentParser(prog="zerofit launch", allow_abbrev=False, description=__doc__)
    add_placement(parser, gpus="1")
    place.add_options(parser)
    parser.add_argument("--show", action="store_true", help="print command, environment and arguments; start nothing")
    parser.add_argument("recipe", help="recipes/sft.py or recipes/lora.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the recipe's flags")
    given = parser.parse_args(argv)

    recipe = Path(given.recipe)
    if not recipe.is_file() and (args.ROOT / recipe).is_file():
        recipe = args.ROOT / recipe  # started from another folder
    if recipe.stem not in args.RECIPES or not recipe.is_file():
        raise UserError(
            f"{given.recipe}: no such recipe; there are {', '.join(f'recipes/{r}.py' for r in args.RECIPES)}."
        )
    if given.launcher not in LAUNCHERS:
        raise UserError(f"LAUNCHER={given.launcher}: must be one of {', '.join(LAUNCHERS)}.")
    flags, count = args.command_line(recipe.stem, given.flags, given.args, given.gpus)
    here = place.of(given)
    _without_a_launchers_variables()
    flags, token = without_token(flags)
    os.environ |= token
    check_devices(count, use_cpu=any(f.startswith(("--use_cpu", "--use-cpu")) for f in flags))
    if here is None:
        _launch(given, recipe, flags, count)
    elif given.show:
        _show_nodes(here, recipe, flags, count)
    else:
        check_for_nodes(flags, given.launcher)
        if here.least == here.most:  # a mistake in the flags is said before anybody waits
            ranks = count * here.most
            _settings(recipe.stem, [*flags, "--gpus", str(ranks)], ranks)
        with job_secret.of_job(here, flags) as secret:
            crew = nodes.Nodes(here, count, peers.software(recipe.stem), secret)
            with crew.telling():
                _launch(given, recipe, flags, count, crew)


def _launch(given, recipe: Path, flags: list[str], count: int, crew: nodes.Nodes | None = None) -> None:
    """Check everything, then run the job. count: processes of this machine; crew: its machines, where it has several."""
    ranks = count
    if crew:
        crew.gather()
        flags, ranks = _members(crew, recipe.stem, flags)
    elif planner.asked(flags):
        flags = planner.chosen_flags(recipe.stem, flags, ranks)
    flags += ["--gpus", str(ranks)]
    settings = _settings(recipe.stem, flags, ranks)
    env = environment(count, hide_gpus=settings.use_cpu and settings.source["use_cpu"] != "decided")
    if given.show:
        _show(settings, command(given.launcher, count, port_of(given.port), recipe, flags), env)
        return
    decides = crew is None or crew.leads
    if decides:
        report.claim_folder(settings)
    if not settings.probe and decides:
        planner.get_ready(settings)
    folder, train_set, eval_set = prepare(settings, decides)
    planned = planner.check(settings) if decides and not settings.probe else None
    if settings.probe:
        flags = probe.with_size(settings, flags, probe.search(settings, flags).size)
    planner.announce(planned)
    if crew:
        folder = crew.agree(peers.of_job(settings, train_set, eval_set), folder)
        crew.batch = settings.effective_batch_size
        print(f"{crew.name}: {ranks} processes on {len(crew.board['members'])} nodes, all with the same software, data and "
              f"arguments; run folder {folder}", flush=True)  # fmt: skip
    flags = [*flags, "--output_dir", str(folder)]

    def words(flags):
        if crew and sum(crew.board["order"]["members"].values()) > 1:
            return crew.torchrun([str(recipe), *flags])
        return command(given.launcher, count, port_of("" if crew else given.port), recipe, flags)

    parsed = _settings(recipe.stem, flags, ranks) if settings.probe else settings
    job = supervise.Job(words, lambda f, n: _settings(recipe.stem, f, n), parsed, flags, folder, env, count,
                        crew)  # fmt: skip
    if decides and canary.wanted(parsed, planned, _steps(parsed, train_set)):
        if crew:
            print("note: no rehearsal (--canary) is made on several machines", flush=True)
        else:
            job.flags, job.settings = canary.rehearse(job, planned)
    raise SystemExit(supervise.run(job) if decides else supervise.follow(job))


def _settings(recipe: str, flags: list[str], ranks: int) -> args.Settings:
    """Resolve the command line of the ranks to be started; --show and --dry_run print and end the process."""
    settings = resolve.settings(recipe, flags, ranks)
    planner.only_print(settings)
    return settings


def _members(crew: nodes.Nodes, recipe: str, flags: list[str]) -> tuple[list[str], int]:
    """Node 0 says which of the nodes that are here the job begins with: as many as the batch can be dealt out to.

    Returns: the recipe's flags (--zero auto: with the choice in its place), the processes of the job.
    """
    if not crew.leads:
        chosen = documents.with_decisions(flags, crew.board["flags"]) if planner.asked(flags) else flags
        return chosen, crew.processes
    here = crew.here()
    while True:
        ranks = sum(gpus for _, gpus in here)
        try:
            chosen = planner.chosen_flags(recipe, flags, ranks, node=here[0][1]) if planner.asked(flags) else flags
            _settings(recipe, [*chosen, "--gpus", str(ranks)], ranks)
            break
        except UserError:
            if len(here) == crew.place.least:
                raise
            here = here[:-1]
    crew.begin_with(here, chosen)
    return chosen, ranks


def _without_a_launchers_variables() -> None:
    """What Kubernetes' operators or another launcher have set is not for the ranks, which get their own."""
    for name in list(os.environ):
        if name in world.LAUNCHER_SETS or name.startswith("PET_"):
            del os.environ[name]


def without_token(flags: list[str]) -> tuple[list[str], dict[str, str]]:
    """(the flags without --hub_token, the environment that hands it on): a command line can be read by everybody."""
    token = world.value_of(flags, ("--hub_token", "--hub-token"))
    return probe.drop(flags, "--hub_token"), {"HF_TOKEN": token} if token else {}


def check_for_nodes(flags: list[str], launcher: str = "torchrun") -> None:
    """Raises: UserError for what works on one machine only."""
    if launcher != "torchrun":
        raise UserError(f"LAUNCHER={launcher}: several machines are started by torchrun; leave LAUNCHER out.")
    found = args.with_auto_as_probe(flags)
    if world.value_of(found, ("--probe",)) not in (None, "false"):
        raise UserError(
            "--per_device_train_batch_size auto searches on one machine: run `make probe` there with its GPUS, and name the "
            "size that it finds."
        )
    if world.value_of(found, ("--on_oom",)) == "ask":
        raise UserError("--on_oom ask: there is no one terminal on several machines; use retry or fail.")
    if world.value_of(found, ("--canary",)) == "true":
        raise UserError("--canary true rehearses on one machine; leave it out, or try with --max_steps 3 first.")


def add_placement(parser: argparse.ArgumentParser, gpus: str) -> None:
    """The options that place processes. gpus: the default of --gpus."""
    parser.add_argument("--gpus", default=gpus, help="processes; without a GPU they run on the CPU (gloo)")
    parser.add_argument("--launcher", default="torchrun", help=f"{', '.join(LAUNCHERS)} (one process needs none)")
    parser.add_argument(
        "--port", default="", help="port of the rendezvous (default: a free one; on several machines 29500)"
    )
    parser.add_argument("--args", default="", help="more recipe flags in one string, split like a shell would")


def port_of(text: str) -> int:
    """The port that was named, or a free one. Raises: UserError for one that is none or in use."""
    if not text:
        return world.free_port()
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise UserError(f"PORT={text}: must be a number from 1 to 65535.")
    if not world.port_is_free(int(text)):
        raise UserError(f"PORT={text} is in use on this machine; name another, or none for a free one.")
    return int(text)


def check_devices(count: int, use_cpu: bool) -> None:
    """Raises: UserError for more processes than this machine has GPUs, or far more than it has cores."""
    import torch

    if use_cpu or not torch.cuda.is_available():
        cores = world.cores()
        if count > 8 * cores:
            raise UserError(f"GPUS={count}: this machine has no GPU and only {cores} CPU cores.")
        if count > cores:
            print(f"note: {count} CPU processes share {cores} cores; expect it to be slow", flush=True)
    elif count > torch.cuda.device_count():
        raise UserError(
            f"GPUS={count}: this machine has {torch.cuda.device_count()}; use GPUS={torch.cuda.device_count()}."
        )


def prepare(settings: args.Settings, decides: bool = True) -> tuple[Path | None, object, object]:
    """Everything that can go wrong without a GPU, tried in this one process: folder, model config, tokenizer, data.

    Args: decides: whether this machine chooses the run folder and the checkpoint to go on from (node 0 does).
    Returns: the run folder to be made, the training set and the evaluation set (data.Tokens, or None).
    """
    from . import checkpoint, data, doctor, hub, inspection, model, offload, ops

    hub.check_push(settings)
    notes = doctor.heed(doctor.installation())
    net = model.check(settings)
    for sentence in [*notes, *doctor.heed(doctor.of_job(settings, net))]:
        print(f"note: {sentence}", flush=True)
    folder = report.choose_folder(settings) if decides else None
    offload.check_sizes(settings, net)
    ops.prepare(settings)  # a compiler that fails does so here, before any rank waits
    tokenizer = model.load_tokenizer(settings)
    sets = data.load(settings, tokenizer)
    inspection.check(settings, *sets, tokenizer)
    if decides:
        checkpoint.check_same(settings, sets[0])
    return folder, *sets


def _steps(settings: args.Settings, train_set) -> int | None:
    """Optimizer steps of the run; None for a stream without --max_steps. Packed rows are taken as full ones."""
    if settings.max_steps > 0:
        return settings.max_steps
    if train_set.stream is not None:
        return None
    rows = train_set.statistics["tokens"] / settings.max_length if settings.packing else len(train_set)
    return math.ceil(settings.num_train_epochs * rows / settings.effective_batch_size)


def environment(count: int, hide_gpus: bool = False) -> dict[str, str]:
    """What the launcher adds to the environment: the package's path and the CPU threads of each process.

    Args: hide_gpus: for a job that --use_cpu keeps on the CPU; libraries that look for GPUs find none then.
    """
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(args.ROOT / "src")]
    added = {"PYTHONPATH": os.pathsep.join([str(args.ROOT / "src"), *paths]), "PYTHONUNBUFFERED": "1"}
    added |= world.thread_waiting()
    if "OMP_NUM_THREADS" not in os.environ:
        # Launchers set 1, on which CPU training and the offloaded optimizer crawl.
        added["OMP_NUM_THREADS"] = str(max(1, world.cores() // count))
    return added | ({"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {})


def command(launcher: str, count: int, port: int, recipe: Path, flags: list[str]) -> list[str]:
    """The exact command. It places processes and nothing else: no stage, no precision, no DeepSpeed file."""
    python = sys.executable
    if count == 1:
        return [python, str(recipe), *flags]
    start = {
        "torchrun": [
            "-m", "zerofit.torchrun", "--nnodes", "1", "--nproc_per_node", str(count),
            "--master_addr", "127.0.0.1", "--master_port", str(port),
        ],
        "accelerate": [
            # --use_deepspeed is what makes accelerate start several processes on a CPU too; stage and precision stay
            # the recipe's. --config_file /dev/null would be refused, so the cached config is outvoted flag by flag.
            "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", str(count), "--num_machines", "1",
            "--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port", str(port),
            "--mixed_precision", "no", "--dynamo_backend", "no",
        ],
        "deepspeed": [
            "-m", "deepspeed.launcher.runner", *_deepspeed_places(count),
            "--master_addr", "127.0.0.1", "--master_port", str(port),
        ],
    }  # fmt: skip
    return [python, *start[launcher], str(recipe), *flags]


def _deepspeed_places(count: int) -> list[str]:
    """The option that tells DeepSpeed's launcher which GPUs to use.

    With --num_gpus it ignores CUDA_VISIBLE_DEVICES and takes the first ones (deepspeed/launcher/runner.py).
    Raises: UserError for names that it cannot read.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible:
        return ["--num_gpus", str(count)]
    names = [name.strip() for name in visible.split(",")]
    if not all(name.isdigit() for name in names):
        raise UserError(
            f"LAUNCHER=deepspeed: it reads numbers only, CUDA_VISIBLE_DEVICES is {visible}; use LAUNCHER=torchrun, or number "
            "the GPUs."
        )
    return ["--include", f"localhost:{','.join(names[:count])}"]


def _show_nodes(here: place.Place, recipe: Path, flags: list[str], count: int) -> None:
    """What `--show` prints on a machine of several; the other machines are not asked for."""
    ranks = count * here.most
    settings = _settings(recipe.stem, [*flags, "--gpus", str(ranks)], ranks)
    _show(settings, nodes.torchrun(here, dict.fromkeys(range(here.most), count), [str(recipe), *flags, "--gpus", str(ranks)]),
          environment(count))  # fmt: skip


def _show(settings: args.Settings, words: list[str], env: dict[str, str]) -> None:
    print("command\n  " + report.hide_secrets(words))
    print("environment\n" + "\n".join(f"  {name}={value}" for name, value in env.items()))
    print(report.summary(settings))
