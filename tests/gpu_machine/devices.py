"""Read the machine's specification: which GPUs a process sees, and which processes have a context on them.

Standard library only: `nvidia-smi` starts with it.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

SPEC = "GPU_MACHINE"  # environment variable: the JSON file of the machine
CONTEXT_MIB = 500  # device memory of one process's context; 300 to 600 on real ones
# CUDA version that a driver branch brings.
CUDA_OF_DRIVER = {470: 11040, 510: 11060, 525: 12000, 535: 12020, 545: 12030, 550: 12040, 560: 12060, 570: 12080,
                  580: 13000, 590: 13010}  # fmt: skip


@dataclass(frozen=True)
class Context:
    """A call that opened a context. device: index as nvidia-smi counts, "?" for an allocation (device unknown)."""

    pid: int
    argv: str
    function: str
    device: str


def read_spec(env=os.environ) -> dict:
    """Return the specification that this environment names."""
    return json.loads(Path(env[SPEC]).read_text())


def driver_cuda(spec: dict) -> int:
    """Return the CUDA version of the driver as CUDA writes it: 12040 for 12.4."""
    branch = int(spec["driver"].split(".")[0])
    return max((cuda for driver, cuda in CUDA_OF_DRIVER.items() if driver <= branch), default=11000)


def visible(spec: dict, env=os.environ) -> list[dict]:
    """Return the GPUs or the MIG slice that a CUDA process sees, in CUDA's order."""
    cards = spec["gpus"]
    if env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":  # by default the fastest first
        cards = sorted(cards, key=lambda card: -card["multi_processor_count"])
    wanted = env.get("CUDA_VISIBLE_DEVICES")
    found = cards if wanted is None else _named(wanted, cards)
    found = [card["slices"][0] if card["slices"] else card for card in found]
    slices = [device for device in found if device["profile"]]
    return slices[:1] or found  # a process sees one slice at most, and no GPU beside it


def _named(wanted: str, cards: list[dict]) -> list[dict]:
    """Return what CUDA_VISIBLE_DEVICES names: up to the first wrong word, and nothing where a device is repeated."""
    found, by_uuid = [], [*cards, *(part for card in cards for part in card["slices"])]
    for word in map(str.strip, wanted.split(",")):
        if word.startswith(("GPU-", "MIG-")):
            matching = [device for device in by_uuid if device["uuid"].startswith(word)]
        else:
            matching = cards[int(word) : int(word) + 1] if word.isdigit() else []
        if len(matching) != 1:
            break
        if matching[0] in found:
            return []
        found += matching
    return found


def read_contexts(spec: dict) -> list[Context]:
    """Return the contexts that were opened, those of ended processes too."""
    file = Path(spec["folder"]) / "contexts.tsv"
    lines = file.read_text().splitlines() if file.exists() else []
    return [Context(int(pid), *rest) for pid, *rest in (line.split("\t") for line in lines)]


def holders(spec: dict, index: int) -> list[int]:
    """Return the running processes that have a context on this GPU."""
    return sorted({c.pid for c in read_contexts(spec) if c.device == str(index) and _runs(c.pid)})


def free_mib(spec: dict, device: dict) -> int:
    """Return what is free on a GPU now."""
    return max(0, device["free_mib"] - CONTEXT_MIB * len(holders(spec, device["index"])))


def record(spec: dict, function: str, index: int | str) -> None:
    """Write down that this process has opened a context."""
    argv = " ".join([*sys.argv, *_flags_of_job()]).replace("\t", " ").replace("\n", " ")
    with (Path(spec["folder"]) / "contexts.tsv").open("a") as file:
        file.write(f"{os.getpid()}\t{argv}\t{function}\t{index}\n")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _flags_of_job() -> list[str]:
    """Return what the job of a rank asks for, as flags: its command line names the job's file alone."""
    if "--job" not in sys.argv:
        return []
    asked = json.loads(Path(sys.argv[sys.argv.index("--job") + 1]).read_text())["request"]
    return [word for name, entry in asked.items() for word in (f"--{name}", str(entry["value"]).lower())]
