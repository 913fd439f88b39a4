"""Write an export's model card."""

import json
from pathlib import Path

from zerofit.export import compare
from zerofit.train import model_card


def text(found, told: dict) -> str:
    """Return the text of the model card."""
    steps, losses = _progress(found)
    card = model_card.Card(
        facts=found.facts,
        name=found.folder.name,
        architecture=_architecture(found),
        adapter=found.adapter,
        steps=steps,
        losses=losses,
        weights=f"{told['dtype']}{', from the fp32 master copies' if told['masters'] else ''}",
        merged=told["merged"],
        made="Exported",
        body=[_agreement(told), *(["\n".join(notes)] if (notes := _notes(found, told)) else [])],
    )
    return model_card.text(card)


def _architecture(found) -> str:
    for folder in (found.base, found.folder):
        try:
            config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
            return (config.get("architectures") or [config["model_type"]])[0]
        except (OSError, ValueError, LookupError):
            continue
    return "model"


def _progress(found) -> tuple[int | None, str]:
    """Return (steps, the last losses as text) of the weights that are exported."""
    try:
        if found.run and found.folder.name == "final":
            result = json.loads((found.run / "result.json").read_text(encoding="utf-8"))
            return result.get("steps"), model_card.losses_in_words(result.get("last_loss"), result.get("eval_loss"))
        state = json.loads((found.folder / "trainer_state.json").read_text(encoding="utf-8"))
        return state["global_step"], model_card.losses(state["log_history"], state["global_step"])
    except (OSError, ValueError, KeyError):
        return None, ""


def _agreement(told: dict) -> str:
    result = told["agreement"]
    if result is None:
        return "Not compared with the trained weights after writing (`--check false`)."
    return f"Reloaded after writing and compared with what was trained: {compare.in_words(result)}."


def _notes(found, told: dict) -> list[str]:
    notes = list(told["notes"])
    if told["merged"] and found.bits:
        notes.insert(0, (
            f"The adapter was trained on a base in {found.bits} bits. It is merged into that base unpacked again, "
            "which is what it was trained on; merged into the original weights it would compute something else."
        ))  # fmt: skip
    return [f"- {note}" for note in notes]
