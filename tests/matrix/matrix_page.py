"""Write the list of tested model types (`zerofit models`) from the results of `make models`."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "src" / "zerofit" / "model" / "tested_models.json"


def write(record: dict) -> None:
    """Write tested_models.json: the version of transformers, {type: {failed check: why}}, and {refused type: why}."""
    kinds = {kind: entry["columns"] for kind, entry in sorted(record["kinds"].items())}
    failures = {kind: columns["built"] or refusal(columns) for kind, columns in kinds.items()}
    types = {kind: {name: general(why) for name, why in kinds[kind].items() if why}
             for kind, failure in failures.items() if not failure}  # fmt: skip
    refused = {kind: general(failure).removeprefix("--model model: ") for kind, failure in failures.items() if failure}
    content = {"transformers": record["versions"]["transformers"], "types": types, "refused": refused}
    LIST.write_text(json.dumps(content, indent=1) + "\n")


def refusal(columns: dict) -> str:
    """Return the sentence with which zerofit refuses a type, or ""."""
    return (
        columns.get("padded", "").partition(": error: ")[2] if ": error: --model" in columns.get("padded", "") else ""
    )


def general(reason: str) -> str:
    """Return a reason without names, folders and numbers that differ from model to model."""
    reason = re.sub(r"^(turned off: |(zerofit: )?error: (--packing: )?)|; train without --packing\.$", "", reason)
    reason = re.sub(r"\b\w+(ForCausalLM|ForConditionalGeneration|LMHead\w*)\b", "the class", reason)
    reason = re.sub(r"(gradient between documents |logits )[\d.e+-]+", r"\1N", reason)
    return re.sub(r"(?<![:\w/])/\S+/", "", re.sub(r"\d\.\de-\d\d", "N", reason))
