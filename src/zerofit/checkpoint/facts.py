"""zerofit.json: the content of a checkpoint and the run that saved it."""

import json
from pathlib import Path

FACTS = "zerofit.json"

FORMAT = 1  # version of zerofit.json; increase it if older versions cannot resume from new checkpoints

STAGING = ".saving"  # folder in the run folder for a checkpoint that is being written; it is renamed when complete


# --- reading ---


def read_facts(checkpoint: Path) -> dict | None:
    """Return a checkpoint's zerofit.json; {} if damaged, None if missing (saved by another program)."""
    try:
        facts = json.loads((checkpoint / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return facts if _are_facts(facts) else {}


def _are_facts(facts) -> bool:
    """Return whether the fields needed to resume are valid; a newer format is not checked further."""
    if not isinstance(facts, dict) or not isinstance(facts.get("format", 1), int):
        return False
    if facts.get("format", 1) > FORMAT:
        return True
    if "digest" in facts and facts["digest"] != digest_of(facts):
        return False
    files, others = facts.get("files"), facts.get("elsewhere", {})
    if not files or not all(isinstance(entries, dict) for entries in (files, others)):
        return False
    pairs = all(isinstance(e, list) and [type(n) for n in e] == [int, str] for e in (*files.values(), *others.values()))
    return pairs and all(name in facts for name in ("recipe", "zero", "world_size", "offload", "fingerprints"))


def digest_of(facts: dict) -> str:
    """Return the checksum of the content of zerofit.json, which the file itself stores."""
    import xxhash

    content = {name: value for name, value in facts.items() if name != "digest"}
    return xxhash.xxh3_64(json.dumps(content, sort_keys=True).encode()).hexdigest()


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step after which the checkpoint was saved."""
    return json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]


def is_zerofit_run(run: Path) -> bool:
    """Return whether a folder is a zerofit run folder, whose checkpoints all have a zerofit.json."""
    try:
        return "zerofit" in json.loads((run / "run.json").read_text(encoding="utf-8"))["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
