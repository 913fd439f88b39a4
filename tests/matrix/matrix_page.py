"""Write docs/models.md from the results of `make models`."""

import re
from collections import Counter
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
SIGNS = {None: "", "": "yes"}
HEAD = """# Which models were tried

A tiny model of random weights, of each of transformers' causal and image-text classes, is trained on the CPU
(`make models`). A class that is not here was never tried. A number leads to the reason below.

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


def write(record: dict, columns: tuple[str, ...]) -> None:
    """Write the page: how many hold each column, a row for each type, and the reasons why not."""
    kinds, reasons = record["kinds"], {}
    lines = [f"| type | {' | '.join(columns[1:])} |", "|" + "---|" * len(columns)]
    not_built = []
    for kind, found in sorted(kinds.items()):
        if found["columns"]["built"]:
            not_built.append(f"- `{kind}`: {shown(found['columns']['built'])}")
            continue
        cells = [cell(found["columns"].get(name), reasons) for name in columns[1:]]
        lines.append(f"| `{kind}` | {' | '.join(cells)} |")
    numbered = [f"{number}. {shown(reason)}" for reason, number in reasons.items()]
    PAGE.write_text("\n".join([HEAD + totals(kinds, columns), "", *lines, "", "## Why not", "", *numbered, "",
                               "## Not built", "", *not_built]).rstrip() + "\n")  # fmt: skip


def cell(found: str | None, reasons: dict[str, int]) -> str:
    """Return "yes", the number of a reason, or "" where an earlier column failed."""
    if not found:
        return SIGNS[found]
    return f"[{reasons.setdefault(general(found), len(reasons) + 1)}]"


def general(reason: str) -> str:
    """Return a reason without what differs from model to model: folders, numbers of an error."""
    return re.sub(r"/\S+/", "", re.sub(r"\d\.\de-\d\d", "N", reason))


def shown(reason: str) -> str:
    return re.sub(r"\s+", " ", reason.replace("|", "/").replace("<", "(").replace(">", ")"))


def totals(kinds: dict, columns: tuple[str, ...]) -> str:
    built = [found["columns"] for found in kinds.values() if not found["columns"]["built"]]
    holds = Counter(name for found in built for name in columns if found.get(name) == "")
    every = sum(all(found.get(name) == "" for name in columns) for found in built)
    each = ", ".join(f"{name} {holds[name]}" for name in columns[1:])
    return f"{len(kinds)} types tried, {len(built)} built; all columns hold for {every}. Each: {each}.\n"
