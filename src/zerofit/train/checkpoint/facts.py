"""zerofit.json: what a checkpoint holds and how it was written."""

import json
import os
from pathlib import Path

FACTS = "zerofit.json"

FORMAT = 1  # of that file; raised when an older version could not resume what it says

ASIDE = ".saving"  # folder in the run folder that a checkpoint is written to


def hash_file(file: Path, sync: bool = False) -> str:
    import xxhash

    digest = xxhash.xxh3_64()
    with file.open("rb") as opened:
        if sync:
            os.fsync(opened.fileno())
        while block := opened.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


# --- resuming ---


def read_facts(checkpoint: Path) -> dict | None:
    """Return the checkpoint's zerofit.json; {}: it is damaged; None: it has none (saved by another program)."""
    try:
        found = json.loads((checkpoint / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if _are_facts(found) else {}


def _are_facts(found) -> bool:
    """Whether this is what `save` writes, as far as a resume reads it. Of a newer form, only the number is known."""
    if not isinstance(found, dict) or not isinstance(found.get("format", 1), int):
        return False
    if found.get("format", 1) > FORMAT:
        return True
    if "digest" in found and found["digest"] != digest_of(found):
        return False
    files, others = found.get("files"), found.get("elsewhere", {})
    if not files or not all(isinstance(entries, dict) for entries in (files, others)):
        return False
    pairs = all(isinstance(e, list) and [type(n) for n in e] == [int, str] for e in (*files.values(), *others.values()))
    return pairs and all(name in found for name in ("recipe", "zero", "world_size", "offload", "fingerprints"))


def digest_of(facts: dict) -> str:
    """Return the checksum that zerofit.json has of its own content."""
    import xxhash

    content = {name: value for name, value in facts.items() if name != "digest"}
    return xxhash.xxh3_64(json.dumps(content, sort_keys=True).encode()).hexdigest()


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step that the checkpoint was saved after."""
    return json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]


def is_of_this_kit(run: Path) -> bool:
    """Whether a folder is a run folder of this kit, whose checkpoints all have a zerofit.json."""
    try:
        return "zerofit" in json.loads((run / "run.json").read_text(encoding="utf-8"))["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
