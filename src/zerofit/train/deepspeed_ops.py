"""Compile DeepSpeed's C++ ops once per node, before the engine needs them."""

import os
import platform
import shutil
import time
from pathlib import Path

import torch

from zerofit.base import distributed
from zerofit.base.errors import UserError, first_line
from zerofit.base.paths import cache_root, locked
from zerofit.config import nvme, offload

TOOLS = {"ninja": "pip install ninja", "g++": "apt install g++"}  # {tool to compile the ops: how to install it}


def missing_tools() -> list[str]:
    """Return the TOOLS that are not on PATH."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def prepare(settings) -> None:
    """Compile the C++ ops that the engine will load, once per node. Collective.

    Raises: UserError if the compiler is missing or fails.
    """
    names = required_ops(settings.deepspeed)
    if not names:
        return
    extensions, ours = ops_folder()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions)
    failure = None
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        try:
            for name in names:
                _build(name, extensions, ours)
        except UserError as error:
            failure = error
    distributed.broadcast(None)  # the other ranks wait here
    if failure:
        raise failure


def required_ops(config: dict | None) -> list[str]:
    """Return the names of DeepSpeed's builders for the C++ ops of this configuration."""
    builders = ["CPUAdamBuilder"] if offload.needs_cpu_adam(config) else []
    return builders + ["PinMemoryBuilder", "AsyncIOBuilder"] * bool(nvme.paths_of(config))


def ops_folder() -> tuple[Path, bool]:
    """Return (folder of compiled ops, whether it belongs to zerofit).

    It is $TORCH_EXTENSIONS_DIR, else a folder for this node and torch version: the ops are compiled for the node's CPU,
    so nodes with a shared home folder must not share them.
    """
    if path := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(path), Path(path).parent.name == "zerofit-ops"
    return cache_root() / "zerofit-ops" / f"{platform.node()}-torch{torch.__version__}", True


def _build(name: str, extensions: Path, ours: bool) -> None:
    from deepspeed.ops import op_builder

    builder = getattr(op_builder, name)()
    folder = extensions / builder.name
    _make(folder)
    if missing := missing_tools():
        tool = missing[0]
        raise UserError(
            f"{builder.name}: {tool} is not on PATH, but DeepSpeed needs it to compile this op; {TOOLS[tool]}."
        )
    with locked(folder / "zerofit.lock"):
        clear_stale_lock(folder, ours)
        if not (folder / f"{builder.name}.so").exists():
            print(f"compiling DeepSpeed's {builder.name} into {folder} (once; takes a minute or two)", flush=True)
        began = time.perf_counter()
        try:
            builder.load(verbose=False)
        except Exception as error:
            raise UserError(
                f"{builder.name}: DeepSpeed could not compile it: {first_line(error)}; see `ds_report`, or use "
                "--offload without ratio and path, which does not need a compiler."
            ) from None
        if (seconds := time.perf_counter() - began) > 10:
            print(f"{builder.name}: compiled in {seconds:.0f} s", flush=True)


def _make(folder: Path) -> None:
    """Create the folder of a compiled op. Raises: UserError if it cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK) else "no permission to write"
    except OSError as error:
        problem = error.strerror
    if problem:
        raise UserError(
            f"{folder}: {problem}, but DeepSpeed compiles its ops there; set TORCH_EXTENSIONS_DIR to another folder."
        )


def clear_stale_lock(folder: Path, ours: bool) -> None:
    """Delete the `lock` file of a killed build, for which PyTorch would wait forever.

    In zerofit's folder every builder first takes an operating-system lock, so the file is stale.
    Raises: UserError in another folder, in which another program may still compile.
    """
    lock = folder / "lock"
    if not lock.exists():
        return
    if not ours:
        raise UserError(
            f"{lock}: another program compiles there or was killed, and PyTorch would wait for it forever; remove it "
            "if no program compiles, or unset TORCH_EXTENSIONS_DIR."
        )
    lock.unlink(missing_ok=True)
    print(f"removed {lock} of a killed build: every start would wait for it", flush=True)
