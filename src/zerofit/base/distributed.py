"""Start the process group of a rank, verify the number of ranks, and exchange small values."""

import os
import socket
import sys
from datetime import timedelta
from pathlib import Path

from zerofit.base.errors import UserError


def node() -> str:
    """Return the id of this node: torchrun's GROUP_RANK, else the host name."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def first_of_node() -> bool:
    """Return whether this is the rank of its node that does the work once per node (local rank 0)."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def gather_nodes(value) -> list:
    """Gather the value of each node's first rank; collective."""
    return [entry for first, entry in all_gather((first_of_node(), value)) if first]


def several_nodes() -> bool:
    return size() > local_size()


# Environment variables from which torch opens a process group.
LAUNCHER_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    """Return the number of ranks that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or size())


BY_AGENT = "TORCHELASTIC_RUN_ID"  # set by torchrun's agent, which accelerate also uses

RESTARTED = "ZEROFIT_RESTARTED"  # set by zerofit's agents (launch/rendezvous.py) after a job's first attempt

BY_SLURM = "SLURM_RESTART_COUNT"  # set in a requeued SLURM job


def may_be_restart() -> bool:
    """Return whether torchrun's agent or SLURM may have restarted this process."""
    return BY_AGENT in os.environ or queued_again()


def queued_again() -> bool:
    """Return whether SLURM requeued this job."""
    return os.environ.get(BY_SLURM, "0") != "0"


def single_process_defaults() -> None:
    """Set a launcher's variables, with a free port, in a process that was started without a launcher."""
    if "WORLD_SIZE" in os.environ:
        return
    port = os.environ.get("MASTER_PORT")
    if port and not port_is_free(int(port)):
        raise UserError(f"MASTER_PORT={port} is in use on this machine: unset it or set a free port.")
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port or str(free_port()),
    )  # fmt: skip


def start(settings) -> None:
    """Open the process group that this run needs, before TrainingArguments and the model exist.

    ZeRO-3 shards the model while it loads, which needs DeepSpeed's communication. With gloo, accelerate would otherwise
    count one process and feed every rank the same rows.
    """
    import torch
    import torch.distributed as dist

    if settings.deepspeed is None and size() == 1:
        # accelerate would wrap the model in DistributedDataParallel, whose buckets keep a copy of every gradient
        for name in LAUNCHER_SETS:
            os.environ.pop(name, None)
        settings.ddp_backend = None  # with a backend set, accelerate would open a process group
    else:
        single_process_defaults()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
    if not settings.use_cpu and local_size > torch.cuda.device_count():  # raised on every rank, before any group exists
        raise UserError(f"{local_size} processes on this machine, but {torch.cuda.device_count()} GPUs; start fewer.")
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if size() > 1 and not threads.isdigit():  # OpenMP also takes a list, one number per level
        raise UserError(f"OMP_NUM_THREADS={threads}: accelerate reads a single integer; set one, or unset it.")
    if threads == "1":
        # Launchers set 1, which slows down CPU training and the offloaded optimizer.
        torch.set_num_threads(max(1, cores() // local_size))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not settings.use_cpu:
        torch.cuda.set_device(local_rank)
    if settings.use_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # also for libraries that import DeepSpeed later
    backend = "gloo" if settings.use_cpu else "nccl"
    timeout = timedelta(seconds=settings.ddp_timeout)
    if settings.deepspeed is not None:
        import_deepspeed(settings.use_cpu)
        import deepspeed.comm

        if settings.use_cpu:
            skip_inference_op()
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
    elif settings.world_size > 1 and not dist.is_initialized():
        # Without device_id, torch warns at each barrier that it guesses the device.
        device = None if settings.use_cpu else torch.device("cuda", local_rank)
        dist.init_process_group(backend, timeout=timeout, device_id=device)


def skip_inference_op() -> None:
    """Keep DeepSpeed (0.19.8) from compiling an op on a CPU, which takes a minute and serves only its inference."""
    import deepspeed

    getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False


def import_deepspeed(use_cpu: bool):
    """Import DeepSpeed for the device of this job and return the module.

    DeepSpeed reads DS_ACCELERATOR once, at import. The variable is restored afterwards, since a child of this process
    may run on another machine (a batch job submitted from a login node).
    """
    before = os.environ.get("DS_ACCELERATOR")
    if use_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    elif before == "cpu":
        del os.environ["DS_ACCELERATOR"]
    try:
        import deepspeed
    finally:
        if before is None:
            os.environ.pop("DS_ACCELERATOR", None)
        else:
            os.environ["DS_ACCELERATOR"] = before
    return deepspeed


def verify(training_arguments) -> None:
    """Check that accelerate, torch and the launcher agree on the ranks, and that each rank has at most one GPU.

    Raises: RuntimeError, which indicates a bug or a broken environment.
    """
    import torch.distributed as dist

    in_group = dist.get_world_size() if dist.is_initialized() else 1
    if not in_group == size() == training_arguments.world_size:
        raise RuntimeError(
            f"the launcher started {size()} processes, torch.distributed has {in_group}, accelerate "
            f"{training_arguments.world_size}: every rank would train on the same rows."
        )
    micro = training_arguments.per_device_train_batch_size
    if training_arguments.n_gpu > 1 or training_arguments.train_batch_size != micro:
        raise RuntimeError(
            f"transformers would spread a process over {training_arguments.n_gpu} GPUs (nn.DataParallel) with a micro "
            f"batch of {training_arguments.train_batch_size} instead of {micro}."
        )


def broadcast(value):
    """Return rank 0's value (any small picklable object) on every rank; collective."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_gather(value) -> list:
    """Return every rank's value (small picklable objects), in rank order; collective."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait for all ranks; does nothing without a process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def thread_waiting() -> dict[str, str]:
    """Return the variables that make idle OpenMP threads sleep after a short wait; {} if the user has set a policy.

    torch's libgomp spins for 300,000 turns by default. On a busy machine, a spinning thread takes the core that the
    awaited thread needs, and small CPU steps take many times as long (benchmarks/busy_cpu.py). With 0 turns, an idle
    machine loses up to half its speed; 1,000 turns lose little on either. libgomp reads both at the import of torch.
    """
    chosen = {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
    chosen = {name: value for name, value in chosen.items() if value}
    ours = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
    return ours if chosen in ({}, ours) else {}


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def home() -> Path:
    """Return the user's home folder; / for a user without one (a container with an arbitrary uid)."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/")


def port_is_free(port: int, address: str = "127.0.0.1") -> bool:
    """Return whether this machine can listen on the port. address: "" for all its addresses."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


_held_ports: dict[int, socket.socket] = {}


def hold_port(port: int) -> bool:
    """Reserve the port for this process's ranks, which bind it seconds later; return whether it was free.

    A bound port cannot be handed over to another process. Linux keeps a socket's name until its process ends.
    """
    if port not in _held_ports and sys.platform == "linux":
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0zerofit-port-{port}")
        except OSError:
            holder.close()
            return False
        _held_ports[port] = holder
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stop(wait: bool = True) -> None:
    """Close the process group, after a barrier if `wait`: a rank that exits early can abort the others."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        if wait:
            dist.barrier()
        dist.destroy_process_group()
