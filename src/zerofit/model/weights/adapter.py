"""Check that an adapter's file has every weight that its configuration and its base ask for."""

import warnings
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.model.image_text import classes
from zerofit.model.weights import files
from zerofit.model.weights.complete import listed

FILE = "adapter_model.safetensors"


def check(folder: Path, base: Path, remote: bool = False) -> None:
    """Raise UserError if the adapter lacks weights, which peft would leave as they were drawn, or has others.

    Args: base: the folder of its base model; remote: --trust_remote_code.
    """
    held = {name for name in files.read_header(folder / FILE) if name != "__metadata__"}
    expected = _names(folder, base, remote)
    if missing := sorted(expected - held):
        raise UserError(
            f"{folder}: {len(missing)} of the adapter's {len(expected)} weights are not in {FILE} and would be random "
            f"numbers or zero: {listed(missing)}. The copy is not complete, or adapter_config.json is of another one."
        )
    # An embedding that was saved as a whole beside them is the base's own, and peft loads it.
    kinds = {_kind(name) for name in expected}
    if expected and (others := sorted(name for name in held - expected if _kind(name) in kinds)):
        raise UserError(
            f"{folder}: {len(others)} weights of the adapter have no place in its base {base} and would be left out: "
            f"{listed(others)}. Name the base that it was trained on with --base."
        )


def _kind(name: str) -> str:
    """Return what a weight is, e.g. lora_A of "....q_proj.lora_A.weight"."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _names(folder: Path, base: Path, remote: bool) -> set[str]:
    """Return the names of the adapter's weights on a base without memory; none where peft cannot build it so."""
    import torch
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig

    try:
        config = PeftConfig.from_pretrained(folder)
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # others compute with the base's weights
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come again when it is loaded
            base_config = AutoConfig.from_pretrained(base, trust_remote_code=remote)
            model = classes.auto_class(base_config).from_config(base_config, trust_remote_code=remote)
            return set(get_peft_model_state_dict(get_peft_model(model, config), save_embedding_layers=False))
    except Exception:  # a kind of adapter that needs values: loading it decides
        return set()
