"""Check and reserve a folder on a local disk for NVMe offload."""

import atexit
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections import Counter
from pathlib import Path

import filelock

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.job.settings import merge_json

LIBAIO = "install libaio (apt install libaio-dev, or dnf install libaio-devel), or leave --offload_path out"


def paths_of(config: dict | None) -> dict[str, str]:
    """Return {"offload_optimizer": folder, "offload_param": folder} of the sections whose device is nvme."""
    zero = config["zero_optimization"] if config is not None else {}
    sections = {k: zero.get(k) or {} for k in ("offload_optimizer", "offload_param")}
    return {k: section.get("nvme_path") for k, section in sections.items() if section.get("device") == "nvme"}


def check(config: dict, path: Path, settings) -> None:
    """Check the NVMe offload of a configuration: its folders, its aio section and libaio.

    Raises: UserError for a folder, a key or a machine that prevents offload to the disk.
    """
    paths = paths_of(config)
    for key, folder in paths.items():
        if not folder:
            raise UserError(
                f'{path}: zero_optimization.{key}.device is "nvme" but nvme_path is missing; write a folder on a fast '
                "local disk, or give --offload_path."
            )
        from_file = settings.source["offload_path"] == "deepspeed JSON"
        where = f"{path}: {key}.nvme_path = {folder}" if from_file else f"--offload_path {folder}"
        if settings.planned_gpu is None:  # a plan may be for another machine
            check_folder(where, Path(folder))
    if paths:
        aio = config.get("aio") or {}
        if not isinstance(aio, dict):
            raise UserError(f"{path}: aio must be an object {{...}}.")
        unknown = set(aio) - set(_aio_keys())
        if unknown:
            raise UserError(f"{path}: unknown key 'aio.{min(unknown)}'; use {', '.join(_aio_keys())}.")
        if settings.planned_gpu is None:
            check_libaio()


def _aio_keys() -> list[str]:
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    return sorted(AIO_DEFAULT_DICT)


def check_folder(where: str, folder: Path) -> None:
    """Raise UserError if files cannot be created in the folder or opened with O_DIRECT, as libaio does."""
    if not folder.exists():
        raise UserError(f"{where}: folder not found; create it on a fast local disk (mkdir -p).")
    if not folder.is_dir():
        raise UserError(f"{where}: is a file; use a folder.")
    try:
        handle, name = tempfile.mkstemp(dir=folder)
    except OSError as error:
        raise UserError(f"{where}: is not writable: {error.strerror}; use a writable folder.") from None
    os.close(handle)
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        raise UserError(
            f"{where}: its file system (tmpfs?) does not support direct I/O, which DeepSpeed needs; use a folder on a "
            "local disk."
        ) from None
    finally:
        Path(name).unlink()


def check_libaio() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        compatible = AsyncIOBuilder().is_compatible(verbose=False)
    except Exception as error:  # e.g. a GPU machine without the CUDA toolkit, which this op links against
        raise UserError(
            f"--offload_path: DeepSpeed's async_io cannot be built here: {' '.join(str(error).split())}."
        ) from None
    if not compatible:
        raise UserError(f"--offload_path: libaio was not found, which DeepSpeed needs to write to the disk; {LIBAIO}.")


def disk_bytes(config: dict, trainable: int, every: int, ranks: int, ranks_of_node: int) -> dict[str, int]:
    """Return the bytes that the ranks of one node write, {section: bytes}, for the sections of `paths_of`.

    Each rank writes 16 trainable / ranks bytes of optimizer states (fp32 master weights, two Adam moments, gradients)
    and 2 or 4 every / ranks bytes of parameters. Args: trainable, every: numbers of trained and of all parameters.
    """
    half = any(config.get(kind, {}).get("enabled") for kind in ("bf16", "fp16"))
    total_bytes = {"offload_optimizer": 16 * trainable, "offload_param": (2 if half else 4) * every}
    return {section: total_bytes[section] * ranks_of_node // ranks for section in paths_of(config)}


def fit_buffers(section: dict, net, ranks: int, settings) -> None:
    """Set size and number of offload_param's host buffers from the model, if unset.

    A buffer holds the largest shard; each parameter of a layer needs one, and prefetching 4 more. DeepSpeed's defaults
    (5 of 1e8 elements) are too small for a large embedding, and too few when a checkpointed layer is recomputed, which
    gathers all its parameters. Raises: UserError if the user's buffer_size is too small.
    """
    needed = -(-max(p.numel() for p in net.parameters()) // ranks)
    if section.get("buffer_size", needed) < needed:
        raise UserError(
            f"zero_optimization.offload_param.buffer_size is {section['buffer_size']}, but the shard of the largest "
            f"parameter has {needed} elements: increase it to that, or delete the key."
        )
    large = [name for name, p in net.named_parameters() if p.numel() >= ranks * 2**18]  # smaller ones need no buffer
    layers = Counter(prefix[0] for name in large if (prefix := re.match(r".*?\.\d+\.", name)))
    count = max(layers.values(), default=0) + 4
    derived = {"buffer_size": needed, "buffer_count": count}
    if missing := {k: v for k, v in derived.items() if k not in section}:
        section.update(missing)
        changes = ", ".join(f"{k} {v:,}" for k, v in missing.items())
        settings.decisions.append(f"offload_param {changes}: size of the largest shard; parameters of a layer + 4")


def check_room(config: dict, trainable: int, every: int, ranks: int, ranks_of_node: int) -> None:
    """Raise UserError if a disk is too small for the files of this node's ranks."""
    paths, sizes = paths_of(config), disk_bytes(config, trainable, every, ranks, ranks_of_node)
    by_disk: dict[int, list[str]] = {}
    for section, folder in paths.items():
        by_disk.setdefault(os.stat(folder).st_dev, []).append(section)
    for sections in by_disk.values():
        folder, needed = paths[sections[0]], sum(sizes[section] for section in sections)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise UserError(
                f"--offload_path {folder}: {free / 1e9:,.1f} GB are free, but {trainable / 1e9:.2f} B trained of "
                f"{every / 1e9:.2f} B parameters need {needed / 1e9:,.1f} GB; free space, or use a larger disk."
            )


def reserve_folder(settings) -> None:
    """Create a folder of this run in each nvme_path, removed when the process exits; collective.

    DeepSpeed names its files by rank only, so two runs would overwrite each other's files, and it never deletes them.
    """
    paths = paths_of(settings.deepspeed)
    if not paths:
        return
    name = distributed.broadcast(f"zerofit-{uuid.uuid4().hex[:8]}")
    sections = {key: {"nvme_path": str(Path(folder) / name)} for key, folder in paths.items()}
    settings.deepspeed = merge_json(settings.deepspeed, {"zero_optimization": sections})
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        for folder in {Path(f) for f in paths.values()}:
            _remove_leftovers(folder)
            _reserve(folder / name)
    distributed.broadcast(None)  # no rank writes before the folders exist


def _reserve(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    lock = filelock.FileLock(folder / "in_use.lock")
    lock.acquire()

    def remove():
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of this user's killed runs: folders with a lock that no process holds."""
    for leftover in folder.glob("zerofit-*"):
        info = leftover.lstat()
        lock = leftover / "in_use.lock"
        if info.st_uid != os.geteuid() or not stat.S_ISDIR(info.st_mode) or lock.is_symlink() or not lock.exists():
            continue  # another user's, or not a run's
        try:
            with filelock.FileLock(lock, timeout=0):
                shutil.rmtree(leftover, ignore_errors=True)
            print(f"removed {leftover} of a killed run", flush=True)
        except filelock.Timeout:
            continue  # a running job's


def swapped(config: dict | None) -> str | None:
    """Return a sentence on the files that this node's ranks have swapped to disk; None without NVMe."""
    folders = {Path(f) for f in paths_of(config).values()}
    if not folders:
        return None
    files = [f for folder in folders for f in folder.rglob("*.swp")]
    size = sum(f.stat().st_size for f in files)
    small = (
        "" if files else ": DeepSpeed keeps shards below 1 MB in host memory, and all shards of this model are smaller"
    )
    return f"offload_path: {size / 1e6:,.1f} MB in {len(files)} files{small}"
