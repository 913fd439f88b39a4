"""Describe a GPU machine that is not there, so that what the kit decides on one can be tested on a CPU.

`machine` returns the environment of a subprocess on such a machine, `in_process` puts the running test on one. There,
`nvidia-smi`, `nvcc` and SLURM's commands answer from a specification (a JSON file that GPU_MACHINE names), and so do
the C functions below torch.cuda; torch's own Python code above them runs as it is. Nothing computes: an allocation on
"cuda" raises RuntimeError("the stand-in GPU computes nothing: ..."), and NCCL is not there.
"""

import functools
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .devices import SPEC, Context, read_contexts, read_spec

HERE = Path(__file__).resolve().parent
COMMANDS = ("nvidia-smi", "nvcc", "sbatch", "squeue", "scontrol", "srun", "scancel", "sacct", "sinfo")
# What the developer's or CI's own machine says about GPUs.
REMOVED = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "DS_ACCELERATOR",
           "PYTORCH_NVML_BASED_CUDA_CHECK", SPEC)  # fmt: skip
_PROGRAM = """#!{python} -S
import sys
sys.path.insert(0, {tests!r})
from gpu_machine import {module}
sys.exit({module}.main(sys.argv))
"""
_NVCC = """#!/bin/sh
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release {cuda}, V{cuda}.88"
"""


@dataclass(frozen=True)
class Card:
    """One GPU, in MiB as nvidia-smi counts. slices: (profile, MiB) of each MIG slice, such as ("3g.40gb", 40448)."""

    name: str = "NVIDIA H100 80GB HBM3"
    total_mib: int = 81559
    free_mib: int | None = None  # default: all but what the driver reserves
    capability: tuple[int, int] = (9, 0)
    uuid: str | None = None  # default: one made from the index
    multi_processor_count: int = 132
    slices: tuple[tuple[str, int], ...] = ()

    def described(self, index: int) -> dict:
        """Return the fields for the JSON file, with the defaults filled in; a slice has those of a GPU."""
        made = lambda *of: uuid.uuid5(uuid.NAMESPACE_OID, f"{index} {self.name} {of}")  # noqa: E731
        reserved = round(self.total_mib * 0.006)  # torch's total is this much less than nvidia-smi's
        card = asdict(self) | {
            "index": index,
            "uuid": self.uuid or f"GPU-{made()}",
            "reserved_mib": reserved,
            "profile": "",
        }
        if self.free_mib is None:
            card["free_mib"] = self.total_mib - reserved
        slices = [{"name": f"{self.name} MIG {profile}", "uuid": f"MIG-{made(i)}", "total_mib": size, "free_mib": size,
                   "reserved_mib": 0, "profile": profile, "slices": []}
                  for i, (profile, size) in enumerate(self.slices)]  # fmt: skip
        return card | {"slices": [card | part for part in slices]}


def machine(
    folder: Path, gpus: Sequence[Card] = (), *, driver: str = "580.65.06", cuda: str | None = "13.0",
    torch_usable: bool = True, nvml: bool = True, toolkit: bool = False, compute_mode: str = "Default",
    visible: str | None = None, sbatch: bool = False, **variables: str,
) -> dict[str, str]:  # fmt: skip
    """Return the complete environment of a process on such a machine; files that it needs go into `folder`.

    gpus: in nvidia-smi's order; none: no driver and no nvidia-smi, as on a login node. driver: one that is too old for
    `cuda`, torch's CUDA version, makes torch unusable too. cuda: None is a CPU build of torch. torch_usable: False is a
    driver that fails to initialize. nvml: whether torch finds NVML (without it, it counts no GPU where it is unusable).
    compute_mode: "Default", "Exclusive_Process" or "Prohibited". visible: CUDA_VISIBLE_DEVICES. variables: more.
    """
    folder = Path(tempfile.mkdtemp(prefix="gpu-machine-", dir=folder))
    (folder / "bin").mkdir()
    spec = {"gpus": [card.described(i) for i, card in enumerate(gpus)], "driver": driver, "cuda": cuda, "nvml": nvml,
            "torch_usable": torch_usable, "compute_mode": compute_mode, "folder": str(folder),
            "toolkit": str(folder / "cuda") if toolkit else None}  # fmt: skip
    file = folder / "spec.json"
    file.write_text(json.dumps(spec, indent=1))
    programs = {"nvidia-smi": "nvidia_smi"} if gpus else {}
    programs |= dict.fromkeys(("sbatch", "squeue", "scontrol"), "slurm") if sbatch else {}
    for command, module in programs.items():
        text = _PROGRAM.format(python=sys.executable, tests=str(HERE.parent), module=module)
        _executable(folder / "bin" / command, text)
    env = {name: value for name, value in os.environ.items() if name not in REMOVED}
    if toolkit:
        (folder / "cuda" / "bin").mkdir(parents=True)
        _executable(folder / "cuda" / "bin" / "nvcc", _NVCC.format(cuda=cuda))
        (folder / "bin" / "nvcc").symlink_to(folder / "cuda" / "bin" / "nvcc")
        env["CUDA_HOME"] = str(folder / "cuda")
    env["PATH"] = os.pathsep.join([str(folder / "bin"), *_without_commands(env.get("PATH", ""), folder)])
    env["PYTHONPATH"] = os.pathsep.join([str(HERE / "site"), *filter(None, [env.get("PYTHONPATH")])])
    env |= {SPEC: str(file)} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    return env | variables


def in_process(monkeypatch, folder: Path, gpus: Sequence[Card] = (), **options) -> None:
    """Put the running test on such a machine, environment and torch.cuda; once in a test.

    See `machine` for the arguments. The accelerator that DeepSpeed has chosen at an earlier import stays.
    """
    import torch.utils.cpp_extension

    from . import cuda

    env = machine(folder, gpus, **options)
    for name in os.environ.keys() | env.keys():
        if name not in env:
            monkeypatch.delenv(name)
        elif os.environ.get(name) != env[name]:
            monkeypatch.setenv(name, env[name])
    patch = functools.partial(monkeypatch.setattr, raising=False)
    cuda.install(patch)
    cuda.set_toolkit(torch.utils.cpp_extension, patch)


def contexts(env: dict[str, str]) -> list[Context]:
    """Return the CUDA contexts that processes of this machine have opened so far, one entry a call that opens one."""
    return read_contexts(read_spec(env))


def submitted(env: dict[str, str]) -> list[dict]:
    """Return what `sbatch` was given, job by job: {"argv": [...], "environment": {...}, "script": "..."}."""
    file = Path(read_spec(env)["folder"]) / "sbatch.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _executable(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def _without_commands(path: str, folder: Path) -> list[str]:
    """Return PATH's folders; one with a GPU's or SLURM's commands is replaced by links to everything else in it."""
    found = []
    for i, entry in enumerate(filter(None, path.split(os.pathsep))):
        if any((Path(entry) / command).exists() for command in COMMANDS):
            links = folder / f"path-{i}"
            links.mkdir()
            for file in Path(entry).iterdir():
                if file.name not in COMMANDS:
                    (links / file.name).symlink_to(file)
            entry = str(links)
        found.append(entry)
    return found
