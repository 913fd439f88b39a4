"""Prepare a launch: check the job, and choose devices, environment and command."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from zerofit.base import command_line, distributed, hub
from zerofit.base.errors import UserError
from zerofit.base.paths import PROJECT, import_path, is_project
from zerofit.job import program
from zerofit.job.program import Program
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.launch import doctor, node_options

LAUNCHERS = ("torchrun", "accelerate", "deepspeed")

# For torchrun's agents. It includes restarts with smaller settings and for joining nodes; launch/rendezvous.py applies
# --max_restarts.
MAX_RESTARTS = 1000

NO_BATCH_SEARCH = (
    "--per_device_train_batch_size auto works on one node only: run `make batch-size` there with its GPUS, and set the "
    "size that it prints."
)


def clear_launcher_variables() -> None:
    """Remove the variables of a Kubernetes operator or another launcher. The ranks get new ones."""
    for name in list(os.environ):
        if name in distributed.LAUNCHER_SETS or name.startswith("PET_"):
            del os.environ[name]


def without_token(request: Request) -> tuple[Request, dict[str, str]]:
    """Return (request without --hub_token, {"HF_TOKEN": token}), since any user can read command lines."""
    token = request.get("hub_token")
    return request.drop("hub_token"), {"HF_TOKEN": token} if token else {}


def check_for_nodes(flags: list[str], launcher: str = "torchrun") -> None:
    """Check for flags that work on one node only. Raises: UserError."""
    if launcher != "torchrun":
        raise UserError(f"LAUNCHER={launcher}: only torchrun starts several nodes; remove LAUNCHER.")
    expanded = command_line.expand_auto_batch_size(flags)
    if command_line.value_of(expanded, ("--search_batch_size",)) not in (None, "false"):
        raise UserError(NO_BATCH_SEARCH)
    if command_line.value_of(expanded, ("--on_oom",)) == "ask":
        raise UserError("--on_oom ask: several nodes do not share a terminal; use retry or fail.")
    if command_line.value_of(expanded, ("--canary",)) == "true":
        raise UserError("--canary true works on one node only; remove it, or try --max_steps 3 first.")


def add_placement(parser: argparse.ArgumentParser, gpus: str) -> None:
    """Add the options that place processes. gpus: default of --gpus."""
    parser.add_argument("--gpus", default=gpus, help="number of processes; without a GPU they run on the CPU (gloo)")
    parser.add_argument("--launcher", default="torchrun", help=f"{', '.join(LAUNCHERS)} (unused for one process)")
    parser.add_argument("--port", default="", help="rendezvous port (default: a free port; 29500 on several nodes)")
    parser.add_argument("--args", default="", help="more flags of the recipe in one string, split as in a shell")


def launch_arguments(argv: list[str]) -> tuple[argparse.Namespace, Program, list[str], int]:
    """Return the options of `zerofit launch`, the recipe, its flags, and the number of processes of this node.

    Do not import torch. parse.request checks the flags.
    Raises: UserError for an unknown recipe or launcher, or an error in command_line.with_extra_flags.
    """
    description = "`zerofit launch`: check a job, then start its processes and supervise them."
    parser = argparse.ArgumentParser(prog="zerofit launch", allow_abbrev=False, description=description)
    add_placement(parser, gpus="1")
    node_options.add_options(parser)
    parser.add_argument("--show", action="store_true", help="only print command, environment and arguments")
    parser.add_argument("recipe", help="recipes/sft.py, or the file of another recipe")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="the recipe's flags")
    args = parser.parse_args(argv)
    recipe = program.start(args.recipe)
    folder = recipe.file.resolve().parent
    project = folder.parent
    if folder.name == "recipes" and is_project(project) and project != PROJECT.resolve():
        raise UserError(
            f"{args.recipe}: belongs to another project; start it in {project}, since it reads deepspeed_configs there."
        )
    if args.launcher not in LAUNCHERS:
        raise UserError(f"LAUNCHER={args.launcher}: must be one of {', '.join(LAUNCHERS)}.")
    return args, recipe, *command_line.with_extra_flags(args.flags, args.args, args.gpus)


def prepare(settings: Settings, decides: bool = True) -> tuple[Path | None, object, object]:
    """Run the checks that need no GPU in this process: run folder, model config, tokenizer, data.

    Args: decides: whether this node chooses the run folder and the checkpoint to resume (node 0).
    Returns: the run folder to create (None if not `decides`), the training set, the evaluation set or None.
    """
    from zerofit.certificate.data import check_data
    from zerofit.checkpoint import resumable, upload
    from zerofit.config import resolve
    from zerofit.data.load import load_datasets
    from zerofit.model.load import check_model, check_weights, load_tokenizer
    from zerofit.train import deepspeed_ops

    hub.check_push(settings)
    doctor.raise_or_warn(doctor.check_installation())  # the ranks write its warnings to the run folder
    resolve.resolve_for_model(settings)
    model = check_model(settings)
    check_weights(settings)
    for sentence in doctor.raise_or_warn(doctor.check_job(settings, model)):
        print(f"note: {sentence}", flush=True)
    if decides:
        upload.fetch(settings)
    folder = resumable.choose_folder(settings) if decides else None
    deepspeed_ops.prepare(settings)  # compile ops now, to report compiler errors before ranks start
    tokenizer = load_tokenizer(settings)
    sets = load_datasets(settings, tokenizer)
    check_data(settings, *sets, tokenizer)
    if decides:
        resumable.check_resumable(settings, sets[0])
    return folder, *sets


def environment(count: int, hide_gpus: bool = False) -> dict[str, str]:
    """Return the environment variables that the launcher sets, e.g. PYTHONPATH and CPU threads per process.

    Args: hide_gpus: set CUDA_VISIBLE_DEVICES to "", to hide GPUs from libraries in a --use_cpu job.
    """
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in import_path()]
    added = {"PYTHONPATH": os.pathsep.join([*import_path(), *paths]), "PYTHONUNBUFFERED": "1"}
    added |= distributed.thread_waiting()
    if "OMP_NUM_THREADS" not in os.environ:
        # Launchers set 1, which makes CPU training and offloaded optimizers very slow.
        added["OMP_NUM_THREADS"] = str(max(1, distributed.cores() // count))
    return added | ({"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {})


def command(launcher: str, count: int, port: int, recipe: Path, flags: Sequence[str] = ()) -> list[str]:
    """Return the command. It only places processes and sets no ZeRO stage, precision or DeepSpeed JSON."""
    python = sys.executable
    if count == 1:
        return [python, str(recipe), *flags]
    start = {
        "torchrun": [
            "-m", "zerofit.launch.torchrun", "--nnodes", "1", "--nproc_per_node", str(count),
            "--master_addr", "127.0.0.1", "--master_port", str(port),
        ],
        "accelerate": [
            # Without --use_deepspeed, accelerate starts one process on a CPU. The recipe sets stage and precision.
            # accelerate rejects --config_file /dev/null, so flags override each entry of the cached config.
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


def node_command(
    place: node_options.NodePlacement, count: int, settings: Settings, recipe: Path, local_address: str = ""
) -> list[str]:
    """Return the command that starts this node's ranks in a multi-node job.

    Args: count: processes of this node; local_address: this node's address on the route to node 0.
    """
    options = {
        "node_rank": place.rank,
        "gpus": count,
        "local_address": local_address,
        "interface": place.interface,
        "join_timeout": round(place.timeout),
        "lost": round(place.lost),
        "max_restarts": settings.max_restarts,
        "ranks_per_row": settings.ranks_per_row,
        "effective_batch_size": settings.effective_batch_size if "effective_batch_size" in settings.explicit else 0,
    }
    return [
        sys.executable, "-m", "zerofit.launch.torchrun", "--nnodes", f"{place.least}:{place.most}",
        "--nproc_per_node", str(count), "--max_restarts", str(MAX_RESTARTS), "--rdzv_backend", "zerofit",
        "--rdzv_id", "zerofit", "--rdzv_endpoint", f"{place.address}:{place.port}",
        "--rdzv_conf", ",".join(f"{name}={value}" for name, value in options.items() if value != ""), str(recipe),
    ]  # fmt: skip


def _deepspeed_places(count: int) -> list[str]:
    """Return the option that selects the GPUs for DeepSpeed's launcher.

    --num_gpus would ignore CUDA_VISIBLE_DEVICES and select the first GPUs (deepspeed/launcher/runner.py).
    Raises: UserError for entries that are not numbers, such as UUIDs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not visible:
        return ["--num_gpus", str(count)]
    names = [name.strip() for name in visible.split(",")]
    if not all(name.isdigit() for name in names):
        raise UserError(
            f"LAUNCHER=deepspeed supports only numbers, CUDA_VISIBLE_DEVICES is {visible}; use LAUNCHER=torchrun, or "
            "select the GPUs by number."
        )
    return ["--include", f"localhost:{','.join(names[:count])}"]
