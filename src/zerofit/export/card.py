"""Write the model card of an export."""

import json
from pathlib import Path

from zerofit.export import compare
from zerofit.job import scores
from zerofit.train import model_card


def text(saved, report: dict) -> str:
    """Return the text of the model card."""
    steps, losses = _progress(saved)
    served, dtype = report.get("served") or {}, report["dtype"]
    converted = served.get("files", [])  # replace the compared folder
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
        has_generation_config=bool(report["ends"]),
        command=served.get("command", ""),
    )
    if not converted and report["agreement"] is None:
        card.body.append("Not compared with the trained weights (`--check false`).")
    elif not converted:
        compared = compare.sentence(report["agreement"])
        card.body.append(f"Reloaded after writing and compared with the trained model: {compared}.")
    if checks := served.get("checks"):
        card.body.append("\n".join(["Checks of these files:", "", *(f"- {check.line}" for check in checks)]))
    notes = list(report["notes"])
    if report["merged"] and saved.bits:
        notes.insert(0, (
            f"The adapter was trained on a {saved.bits}-bit base. It is merged into the dequantized base; merging "
            "it into the original weights would change its results."
        ))  # fmt: skip
    if notes:
        card.body.append("\n".join(f"- {note}" for note in notes))
    rounded = dtype != str(saved.dtype).removeprefix("torch.")
    changes = {"merging": report["merged"], f"rounding to {dtype}": rounded, "conversion to GGUF": converted}
    evaluations = scores.read_evaluations(saved.run) if saved.run else []
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
    """Return (steps, last losses as text) of the exported weights."""
    try:
        if saved.run and saved.folder.name == "final":
            result = json.loads((saved.run / "result.json").read_text(encoding="utf-8"))
            return result.get("steps"), model_card.losses_sentence(result.get("last_loss"), result.get("eval_loss"))
        state = json.loads((saved.folder / "trainer_state.json").read_text(encoding="utf-8"))
        return state["global_step"], model_card.losses(state["log_history"], state["global_step"])
    except (OSError, ValueError, KeyError):
        return None, ""
