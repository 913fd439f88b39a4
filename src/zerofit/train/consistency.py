"""Compare software, recipe, data and arguments across ranks and nodes, and report the first difference."""

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path

from zerofit.base.paths import PACKAGE
from zerofit.model.load import model_fingerprint

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft")

# Arguments that may differ between nodes without training a different model.
MAY_DIFFER = {"output_dir", "logging_dir", "resume_from_checkpoint", "local_rank", "hub_token", "offload_path",
              "ignore_plan", "preprocessing_num_workers", "dataloader_num_workers",
              "dataloader_persistent_workers", "config", "deepspeed", "run_name"}  # fmt: skip


def software(program: Path) -> dict[str, str]:
    """Return the library versions, and a hash of the recipe's file and this package."""
    versions = {"python": platform.python_version()[:4]} | {name: metadata.version(name) for name in PACKAGES}
    digest = hashlib.sha256()
    for file in [program, *sorted(PACKAGE.rglob("*.py"))]:
        digest.update(file.name.encode() + file.read_bytes())
    return versions | {"recipe files": digest.hexdigest()[:12]}


def job_facts(settings, train_set, eval_set=None) -> dict[str, str]:
    """Return the data, the model and every argument that affects the training, as strings to compare."""
    values = {name: value for name, value in settings.written().items() if name not in MAY_DIFFER}
    arguments = {f"argument --{name}": json.dumps(value, default=str) for name, value in sorted(values.items())}
    deepspeed = json.dumps(settings.deepspeed, sort_keys=True).encode()
    return {
        "data": train_set.fingerprint,
        "evaluation data": eval_set.fingerprint if eval_set else "none",
        "model": model_fingerprint(settings),
        "DeepSpeed configuration": hashlib.sha256(deepspeed).hexdigest()[:12],
        **arguments,
    }


def difference(nodes: list[tuple[str, dict]]) -> str:
    """Return a sentence about the first fact that differs between nodes; "" if all agree.

    Args: nodes: (name, facts) of each node.
    """
    first, expected = nodes[0]
    for name in expected:
        others = [(node, facts.get(name)) for node, facts in nodes[1:] if facts.get(name) != expected[name]]
        if others:
            node, value = others[0]
            and_more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
            return (
                f"{name} differs between nodes: {first} has {expected[name]}, {node}{and_more} has {value}; "
                "make them equal."
            )
    return ""
