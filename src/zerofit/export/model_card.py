"""Write an export's model card."""

import json
from pathlib import Path

import yaml

from zerofit import __version__
from zerofit.config.arguments import TINY
from zerofit.export import compare


def text(saved, report: dict) -> str:
    """Return the text of the model card."""
    base = _base(saved)
    head = {
        "library_name": "peft" if report["adapter"] else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["zerofit", saved.facts.get("recipe", "export")],
    }
    if base and "/" in base:  # a hub id; the hub refuses a card with any other base
        head["base_model"] = base
    title = f"{saved.facts.get('recipe', 'model')} of {base.rpartition('/')[2]}" if base else saved.folder.name
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(saved, report, base) if value not in (None, ""))
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {title}\n\n"
        f"Exported by zerofit {__version__}.\n\n| | |\n|---|---|\n{rows}\n\n{_agreement(report)}{_notes(saved, report)}"
        f"\n## Use\n\n```python\n{_use(report)}\n```\n"
    )


def _base(saved) -> str:
    if saved.argument("model") == str(TINY / "model"):
        return "zerofit's bundled tiny Llama"
    name = str(saved.argument("model") or (saved.adapter or {}).get("base_model_name_or_path") or "")
    return _public(name)


def _public(name: str) -> str:
    """Return a hub id as it is, and only the last part of a path."""
    path = Path(name).expanduser()
    return (
        path.name if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 else name
    )


def _rows(saved, report: dict, base: str):
    facts, argument = saved.facts, saved.argument
    steps, losses = _progress(saved)
    yield "base model", base
    yield "recipe", facts.get("recipe")
    if saved.adapter:
        config = saved.adapter
        size = f", r {config['r']}, alpha {config['lora_alpha']}" if config.get("peft_type") == "LORA" else ""
        packed = f", on a base in {saved.bits} bits" if saved.bits else ""
        merged = ", merged" if report["merged"] else ""
        yield "adapter", f"{'DoRA' if config.get('use_dora') else config.get('peft_type')}{size}{packed}{merged}"
    if facts:
        ranks = facts.get("world_size")
        yield "trained with", f"ZeRO stage {argument('zero')}, {ranks} rank{'s' * (ranks != 1)}, {_precision(saved)}"
        yield "effective batch, learning rate", f"{argument('effective_batch_size')}, {argument('learning_rate')}"
    for split, data in facts.get("data", {}).items():
        names = ", ".join(_public(name) for name in str(data.get("source", "")).split(", "))
        yield (
            f"{split} data",
            f"{names}, {data.get('kept', data.get('rows'))} rows (fingerprint {data.get('fingerprint')})",
        )
    yield "steps", steps
    yield "loss", losses
    yield "weights", f"{report['dtype']}{', from the fp32 master copies' if report['masters'] else ''}"
    yield "versions", ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())


def _precision(saved) -> str:
    return next((name for name in ("bf16", "fp16") if saved.argument(name)), "fp32")


def _progress(saved) -> tuple[int | None, str]:
    """Return (steps, the last losses as text) of the weights that are exported."""
    try:
        if saved.run and saved.folder.name == "final":
            result = json.loads((saved.run / "result.json").read_text(encoding="utf-8"))
            train_loss, eval_loss, steps = result.get("last_loss"), result.get("eval_loss"), result.get("steps")
        else:
            state = json.loads((saved.folder / "trainer_state.json").read_text(encoding="utf-8"))
            history, steps = state["log_history"], state["global_step"]
            train_loss = next((entry["loss"] for entry in reversed(history) if "loss" in entry), None)
            eval_loss = next((entry["eval_loss"] for entry in reversed(history) if "eval_loss" in entry), None)
    except (OSError, ValueError, KeyError):
        return None, ""
    parts = [
        f"{value:.4f} {where}"
        for value, where in ((train_loss, "training"), (eval_loss, "held out"))
        if value is not None
    ]
    return steps, ", ".join(parts)


def _agreement(report: dict) -> str:
    result = report["agreement"]
    if result is None:
        return "Not compared with the trained weights after writing (`--check false`).\n"
    return f"Reloaded after writing and compared with what was trained: {compare.in_words(result)}.\n"


def _notes(saved, report: dict) -> str:
    notes = list(report["notes"])
    if report["merged"] and saved.bits:
        notes.insert(0, (
            f"The adapter was trained on a base in {saved.bits} bits. It is merged into that base unpacked again, "
            "which is what it was trained on; merged into the original weights it would compute something else."
        ))  # fmt: skip
    return "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")


def _use(report: dict) -> str:
    name = "AutoPeftModelForCausalLM" if report["adapter"] else "AutoModelForCausalLM"
    library = "peft" if report["adapter"] else "transformers"
    return (
        f"from {library} import {name}\nfrom transformers import AutoTokenizer\n\n"
        f'model = {name}.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")'
    )
