"""Write the model card of a trained model, in final/ of a run or an export."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from zerofit import __version__
from zerofit.job import program, scores

# Folders of zerofit, replaced by the name of the run folder; and uninformative folder names.
KIT_FOLDERS = r"final|export|export-merged|checkpoint-\d+"
GENERIC_NAMES = ("model", "base", "weights", "snapshot")

# Markers around the scores of a card, between which new scores replace them.
SCORES, END_OF_SCORES = "<!-- written by zerofit eval -->", "<!-- end of the scores -->"


@dataclass
class Card:
    """The content of a model card."""

    facts: dict  # run.json; {} for a folder of another program
    name: str  # title of a card without facts
    architecture: str  # the model's class
    adapter: dict | None  # adapter_config.json; None for a full model
    steps: int | None  # optimizer steps of these weights
    losses: str  # phrase about the losses of these weights
    weights: str  # their dtype
    merged: bool = False  # whether the adapter is merged into its base
    made: str = "Trained"  # verb for zerofit's action
    has_generation_config: bool = False  # in an adapter's folder: sets where generation stops
    body: list[str] = field(default_factory=list)  # sentences below the table
    command: str = ""  # usage of files that transformers cannot load; "": code for transformers or peft

    def argument(self, name: str):
        """Return the run's value of an argument; None without facts."""
        return self.facts.get("arguments", {}).get(name, {}).get("value")

    @property
    def base(self) -> str:
        """Return the base model's hub id, or the name of its folder."""
        if self.argument("model") in [str(recipe.bundled_file.parent / "model") for recipe in program.kit().values()]:
            return "zerofit's bundled tiny Llama"
        return _public(str(self.argument("model") or (self.adapter or {}).get("base_model_name_or_path") or ""))

    @property
    def hub_base(self) -> str | None:
        """Return the base model's hub id, else None; the hub rejects a card with any other base."""
        return self.base if "/" in self.base else None


def text(card: Card) -> str:
    """Return the text of the model card."""
    from huggingface_hub import ModelCardData

    holds_adapter = card.adapter is not None and not card.merged
    library, recipe = "peft" if holds_adapter else "transformers", card.facts.get("recipe")
    kind = "gguf" if card.command else library
    head = ModelCardData(
        library_name=kind,
        pipeline_tag="text-generation",
        tags=["zerofit", recipe or "export"],
        base_model=card.hub_base,
    )
    base = card.base.rpartition("/")[2]
    title = f"{recipe or 'model'} of {card.architecture if base in GENERIC_NAMES else base}" if base else card.name
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(card) if value not in (None, ""))
    body = "".join(f"{paragraph}\n\n" for paragraph in card.body)
    loader = "AutoPeftModelForCausalLM" if holds_adapter else "AutoModelForCausalLM"
    names, more = "AutoTokenizer", ""
    if holds_adapter and card.has_generation_config:
        names = "AutoTokenizer, GenerationConfig"
        more = 'model.generation_config = GenerationConfig.from_pretrained(".")  # peft uses the base\'s\n'
    code = (
        f"```bash\n{card.command}\n```\n"
        if card.command
        else (
            f"```python\nfrom {library} import {loader}\nfrom transformers import {names}\n\n"
            f'model = {loader}.from_pretrained(".")\n{more}tokenizer = AutoTokenizer.from_pretrained(".")\n```\n'
        )
    )
    return (
        f"---\n{head.to_yaml()}\n---\n\n# {title}\n\n{card.made} by zerofit {__version__}.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n{body}## Use\n\n{code}"
    )


def with_scores(card: str, evaluations: list[dict], weights: str, changed: str = "") -> str:
    """Return the text of a card with its scores replaced by the newest scores of its weights.

    Trials on the first rows (--limit) are excluded.

    Args: evaluations: entries of scores.json; weights: their name there; changed: later changes to them, e.g. a merge.
    """
    head, rows = scores.table([entry for entry in evaluations if entry.get("limit") is None], weights)
    if not rows:
        return card
    before = f", before {changed}" if changed else ""
    harness = f"by lm-evaluation-harness {evaluations[-1].get('harness', '')}; ± is the standard error"
    intro = f"Scores of {weights}{before}, {harness}."
    section = f"{SCORES}\n## Scores\n\n{intro}\n\n{scores.as_markdown(head, rows)}\n{END_OF_SCORES}\n\n"
    before, marker, after = card.partition(SCORES)
    if marker and END_OF_SCORES in after:
        return before + section + after.partition(END_OF_SCORES)[2].lstrip("\n")
    before, heading, after = card.partition("## Use\n")
    return f"{before if heading else before.rstrip() + chr(10) * 2}{section}{heading}{after}"


def _rows(card: Card):
    facts, argument = card.facts, card.argument
    yield "base model", card.base
    yield "recipe", facts.get("recipe")
    if card.adapter:
        config = card.adapter
        size = f", r {config['r']}, alpha {config['lora_alpha']}" if config.get("peft_type") == "LORA" else ""
        bits = 4 if argument("load_in_4bit") else 8 if argument("load_in_8bit") else None
        packed = f", on a base in {bits} bits" if bits else ""
        merged = ", merged" if card.merged else ""
        yield "adapter", f"{'DoRA' if config.get('use_dora') else config.get('peft_type')}{size}{packed}{merged}"
    if facts:
        precision = next((name for name in ("bf16", "fp16") if argument(name)), "fp32")
        yield "trained with", f"ZeRO {stretches(facts, card.steps)}, {precision}"
        yield "effective batch, learning rate", f"{argument('effective_batch_size')}, {argument('learning_rate')}"
    for split, data in facts.get("data", {}).items():
        names = ", ".join(_public(name) for name in str(data.get("source", "")).split(", "))
        yield (
            f"{split} data",
            f"{names}, {data.get('kept', data.get('rows'))} rows (fingerprint {data.get('fingerprint')})",
        )
    yield "steps", card.steps
    yield "loss", card.losses
    yield "weights", card.weights
    yield "versions", ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())


def stretches(facts: dict, steps: int | None) -> str:
    """Return stage and ranks of each segment of a run: "stage 2 on 2 ranks to step 40, then stage 0 on 1 rank".

    Args: facts: run.json, whose "resumed" lists the earlier segments; steps: of the weights, None if unknown.
    """
    now = {"zero": facts.get("arguments", {}).get("zero", {}).get("value"), "world_size": facts.get("world_size")}
    shown = []
    for stretch in [*facts.get("resumed", []), now]:
        if shown and all(shown[-1][name] == stretch[name] for name in now):  # an interruption without a change
            shown.pop()
        shown.append(stretch)
        if steps is not None and stretch.get("to_step", 0) >= steps:
            break
    words = [f"stage {s['zero']} on {s['world_size']} rank{'s' * (s['world_size'] != 1)}" for s in shown]
    return ", then ".join(
        [*(f"{w} to step {s['to_step']}" for w, s in zip(words, shown[:-1], strict=False)), words[-1]]
    )


def losses(history: list[dict], step: int) -> str:
    """Return a phrase about the last losses up to a step. Args: history: transformers' log_history."""
    entries = [entry for entry in history if entry.get("step", 0) <= step]
    train, held_out = (next((e[name] for e in reversed(entries) if name in e), None) for name in ("loss", "eval_loss"))
    return losses_sentence(train, held_out)


def losses_sentence(train: float | None, held_out: float | None) -> str:
    pairs = ((train, "training"), (held_out, "held out"))
    return ", ".join(f"{value:.4f} {where}" for value, where in pairs if value is not None)


def _is_path(name: str) -> bool:
    path = Path(name).expanduser()
    return path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def _public(name: str) -> str:
    """Return a hub id unchanged, and only the folder's name of a path (the run's, for a folder within a run)."""
    if not _is_path(name):
        return name
    parts = Path(name).expanduser().parts
    return next((part for part in reversed(parts) if not re.fullmatch(KIT_FOLDERS, part)), "")
