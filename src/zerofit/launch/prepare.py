"""Prepare a launch: check the job, choose devices, environment and command."""

import argparse
import math
import os
import sys
from pathlib import Path

from zerofit import command_line, distributed
from zerofit.errors import UserError
from zerofit.paths import ROOT
from zerofit.settings import Settings

LAUNCHERS = ("torchrun", "accelerate", "deepspeed")


def without_a_launchers_variables() -> None:
    """What Kubernetes' operators or another launcher have set is not for the ranks, which get their own."""
    for name in list(os.environ):
        if name in distributed.LAUNCHER_SETS or name.startswith("PET_"):
            del os.environ[name]


def without_token(flags: list[str]) -> tuple[list[str], dict[str, str]]:
    """(the flags without --hub_token, the environment that hands it on): a command line can be read by everybody."""
    token = command_line.value_of(flags, ("--hub_token", "--hub-token"))
    return command_line.drop(flags, "--hub_token"), {"HF_TOKEN": token} if token else {}


def check_for_nodes(flags: list[str], launcher: str = "torchrun") -> None:
    """Raises: UserError for what works on one machine only."""
    if launcher != "torchrun":
        raise UserError(f"LAUNCHER={launcher}: several machines are started by torchrun; leave LAUNCHER out.")
    found = command_line.with_auto_as_probe(flags)
    if command_line.value_of(found, ("--search_batch_size",)) not in (None, "false"):
        raise UserError(
            "--per_device_train_batch_size auto searches on one machine: run `make batch-size` there with its GPUS, and name the "
            "size that it finds."
        )
    if command_line.value_of(found, ("--on_oom",)) == "ask":
        raise UserError("--on_oom ask: there is no one terminal on several machines; use retry or fail.")
    if command_line.value_of(found, ("--canary",)) == "true":
        raise UserError("--canary true rehearses on one machine; leave it out, or try with --max_steps 3 first.")


def add_placement(parser: argparse.ArgumentParser, gpus: str) -> None:
    """The options that place processes. gpus: the default of --gpus."""
    parser.add_argument("--gpus", default=gpus, help="processes; without a GPU they run on the CPU (gloo)")
    parser.add_argument("--launcher", default="torchrun", help=f"{', '.join(LAUNCHERS)} (one process needs none)")
    parser.add_argument(
        "--port", default="", help="port of the rendezvous (default: a free one; on several machines 29500)"
    )
    parser.add_argument("--args", default="", help="more recipe flags in one string, split like a shell would")


def prepare(settings: Settings, decides: bool = True) -> tuple[Path | None, object, object]:
    """Everything that can go wrong without a GPU, tried in this one process: folder, model config, tokenizer, data.

    Args: decides: whether this machine chooses the run folder and the checkpoint to go on from (node 0 does).
    Returns: the run folder to be made, the training set and the evaluation set (data.Tokens, or None).
    """
    from zerofit.config import offload
    from zerofit.data import hub
    from zerofit.data.load import load_datasets
    from zerofit.launch import doctor
    from zerofit.model.load import check_model, load_tokenizer
    from zerofit.plan import inspect_data
    from zerofit.train import deepspeed_ops
    from zerofit.train.checkpoint import resume

    hub.check_push(settings)
    notes = doctor.raise_or_warn(doctor.installation())
    net = check_model(settings)
    for sentence in [*notes, *doctor.raise_or_warn(doctor.of_job(settings, net))]:
        print(f"note: {sentence}", flush=True)
    folder = resume.choose_folder(settings) if decides else None
    offload.check_sizes(settings, net)
    deepspeed_ops.prepare(settings)  # a compiler that fails does so here, before any rank waits
    tokenizer = load_tokenizer(settings)
    sets = load_datasets(settings, tokenizer)
    inspect_data.check_data(settings, *sets, tokenizer)
    if decides:
        resume.check_resumable(settings, sets[0])
    return folder, *sets


def number_of_steps(settings: Settings, train_set) -> int | None:
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
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(ROOT / "src")]
    added = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *paths]), "PYTHONUNBUFFERED": "1"}
    added |= distributed.thread_waiting()
    if "OMP_NUM_THREADS" not in os.environ:
        # Launchers set 1, on which CPU training and the offloaded optimizer crawl.
        added["OMP_NUM_THREADS"] = str(max(1, distributed.cores() // count))
    return added | ({"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {})


def command(launcher: str, count: int, port: int, recipe: Path, flags: list[str]) -> list[str]:
    """The exact command. It places processes and nothing else: no stage, no precision, no DeepSpeed file."""
    python = sys.executable
    if count == 1:
        return [python, str(recipe), *flags]
    start = {
        "torchrun": [
            "-m", "zerofit.launch.torchrun", "--nnodes", "1", "--nproc_per_node", str(count),
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
