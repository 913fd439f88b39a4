"""Write docs/models.md and the list of tried classes from the results of `make models`."""

import json
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
LIST = ROOT / "src" / "zerofit" / "model" / "tried" / "classes.json"
SIGNS = {None: "", "": "yes"}
NO_CHECKPOINTING = "does not support activation checkpointing"  # of transformers' class: nothing to try
APART = ("side by side", "packed")  # columns whose place a state space model takes by padding
HEAD = """# Which models were tried

A tiny model of random weights, of each of transformers' causal and image-text classes, is trained on the CPU
(`make models`), on rows of text. A class that is not here was never tried. A number leads to the reason below;
`-`: the class has none. Counted are types that were built and
not refused. The list at the end has the others, also those that ought to train.

| column | holds when |
|---|---|
| padded | three steps of full fine-tuning in fp32 end |
| side by side | rows without padding have the losses of padded ones |
| packed | several rows in one; the kit's proof keeps them apart |
| checkpointing, fused loss, ZeRO-3 (two ranks) | the losses are those of padded rows |
| LoRA | three steps end |
| plan | the simulated bytes of a step (ZeRO-2, two ranks) are those of real tensors |
| export, reload | `zerofit export` accepts the result; transformers loads it in the original class |
| generate | the result answers with the cache |

"""


def write(record: dict, columns: tuple[str, ...], image_text: tuple[str, ...]) -> None:
    """Write the page: how many hold each column, a row for each type, and the reasons why not."""
    kinds = {kind: found["columns"] for kind, found in sorted(record["kinds"].items())}
    tried = {kind: own for kind, own in kinds.items() if not own["built"] and not refused(own)}
    reasons, parts = {}, [HEAD + f"Versions: transformers {record['versions']['transformers']}.\n"]
    for title, chosen in (("Causal", False), ("Image-text", True)):
        of_title = {kind: own for kind, own in tried.items() if (kind in image_text) == chosen}
        rows = [f"| `{kind}` | {' | '.join(cell(own.get(name), reasons) for name in columns[1:])} |"
                for kind, own in of_title.items()]  # fmt: skip
        head = [f"| type | {' | '.join(columns[1:])} |", "|" + "---|" * len(columns)]
        parts += [f"## {title}", "", totals(of_title, columns), "", *head, *rows, ""]
    numbered = [f"{number}. {shown(reason)}" for reason, number in reasons.items()]
    others = [f"- `{kind}`: {shown(general(own['built'] or refused(own)))}"
              for kind, own in kinds.items() if kind not in tried]  # fmt: skip
    PAGE.write_text(
        "\n".join([*parts, "## Why not", "", *numbered, "", "## Refused, or not built", "", *others]) + "\n"
    )
    bad = {kind: {name: general(why) for name, why in own.items() if why} for kind, own in tried.items()}
    LIST.write_text(json.dumps({"transformers": record["versions"]["transformers"], "types": bad}, indent=1) + "\n")


def refused(own: dict) -> str:
    """Return the sentence with which zerofit refuses a type, or ""."""
    return own.get("padded", "").partition(": error: ")[2] if ": error: --model" in own.get("padded", "") else ""


def cell(found: str | None, reasons: dict[str, int]) -> str:
    """Return "yes", the number of a reason, "-" where the class has none, or "" where an earlier column failed."""
    if not found:
        return SIGNS[found]
    if NO_CHECKPOINTING in found:
        return "-"
    return f"[{reasons.setdefault(general(found), len(reasons) + 1)}]"


def general(reason: str) -> str:
    """Return a reason without what differs from model to model and column: names, folders, numbers of an error."""
    reason = re.sub(r"^(turned off: |(zerofit: )?error: (--packing: )?)|; train without --packing\.$", "", reason)
    reason = re.sub(r"\b\w+(ForCausalLM|ForConditionalGeneration|LMHead\w*)\b", "the class", reason)
    reason = re.sub(r"(gradient of one by another |logits )[\d.e+-]+", r"\1N", reason)
    return re.sub(r"(?<![:\w/])/\S+/", "", re.sub(r"\d\.\de-\d\d", "N", reason))


def shown(reason: str) -> str:
    return re.sub(r"\s+", " ", reason.replace("|", "/").replace("<", "(").replace(">", ")"))


def totals(tried: dict, columns: tuple[str, ...]) -> str:
    holds = Counter(name for own in tried.values() for name in columns if own.get(name) == "")
    every, but = (
        sum(all(own.get(name) == "" or NO_CHECKPOINTING in own.get(name, "") for name in of) for own in tried.values())
        for of in (columns, [name for name in columns if name not in APART])
    )
    each = ", ".join(f"{name} {holds[name]}" for name in columns[1:])
    return f"{len(tried)} types. All columns hold for {every}, all but {' and '.join(APART)} for {but}. Each: {each}."
