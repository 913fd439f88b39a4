"""Write an export's model card."""

import json
from pathlib import Path

from zerofit.export import compare
from zerofit.job import scores
from zerofit.train import model_card


def text(saved, report: dict) -> str:
    """Return the text of the model card."""
    steps, losses = _progress(saved)
    served, dtype = report.get("served") or {}, report["dtype"]
    converted = served.get("files", [])  # instead of the folder that was compared
    precision = f"{'from ' if converted else ''}{dtype}{', from the fp32 master copies' if report['masters'] else ''}"
    card = model_card.Card(
        facts=saved.facts,
        name=saved.folder.name,
        architecture=_architecture(saved),
        adapter=saved.adapter,
        steps=steps,
        losses=losses,
        weights=", ".join([*converted, precision]),
        merged=report["merged"],
        made="Exported",
        own_ends=bool(report["ends"]),
        command=served.get("command", ""),
    )
    if not converted and report["agreement"] is None:
        card.body.append("Not compared with the trained weights after writing (`--check false`).")
    elif not converted:
        compared = compare.sentence(report["agreement"])
        card.body.append(f"Reloaded after writing and compared with what was trained: {compared}.")
    if checks := served.get("checks"):
        card.body.append("\n".join(["What was checked of these files:", "", *(f"- {check.line}" for check in checks)]))
    notes = list(report["notes"])
    if report["merged"] and saved.bits:
        notes.insert(0, (
            f"The adapter was trained on a base in {saved.bits} bits. It is merged into that base unpacked again, "
            "which is what it was trained on; merged into the original weights it would compute something else."
        ))  # fmt: skip
    if notes:
        card.body.append("\n".join(f"- {note}" for note in notes))
    rounded = dtype != str(saved.dtype).removeprefix("torch.")
    changes = {"merging": report["merged"], f"rounding to {dtype}": rounded, "conversion to GGUF": converted}
    evaluations = scores.of_folder(saved.run) if saved.run else []
    changed = " and ".join(name for name, is_done in changes.items() if is_done)
    return model_card.with_scores(model_card.text(card), evaluations, saved.label, changed)


def _architecture(saved) -> str:
    for folder in (saved.base, saved.folder):
        try:
            config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            return (config.get("architectures") or [config["model_type"]])[0]
        except (OSError, ValueError, LookupError):
            continue
    return "model"


def _progress(saved) -> tuple[int | None, str]:
    """Return (steps, the last losses as text) of the weights that are exported."""
    try:
        if saved.run and saved.folder.name == "final":
            result = json.loads((saved.run / "result.json").read_text(encoding="utf-8"))
            return result.get("steps"), model_card.losses_sentence(result.get("last_loss"), result.get("eval_loss"))
        state = json.loads((saved.folder / "trainer_state.json").read_text(encoding="utf-8"))
        return state["global_step"], model_card.losses(state["log_history"], state["global_step"])
    except (OSError, ValueError, KeyError):
        return None, ""
