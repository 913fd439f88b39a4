"""Make a tiny model of a recipe's class with the bundled tokenizer, to test the chain of run.py anywhere."""

from pathlib import Path

import yaml

from zerofit.data.chat_templates import built_in

EXAMPLES = Path(__file__).resolve().parents[1]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
FLAGS = {"model_revision": "main", "max_steps": 2, "effective_batch_size": 2, "eval_strategy": "steps", "eval_steps": 1,
         "eval_delay": 0, "save_strategy": "no", "zero": 0, "num_samples": 0}  # fmt: skip


def flags(config: Path, model_config: str, folder: Path) -> list[str]:
    """Return flags to train on the sample rows with a tiny model, which is written next to the run folder."""
    template = yaml.safe_load(config.read_text(encoding="utf-8")).get("chat_template", "")
    model, rows = folder.with_name(f"{folder.name}-model"), config.with_name("sample.jsonl")
    write_model(model, model_config, template)
    held_out = config.with_name("sample_eval.jsonl")
    places = {"model": model, "data": rows, "eval_data": held_out if held_out.is_file() else rows}
    return [word for key, value in (places | FLAGS).items() for word in (f"--{key}", str(value))]


def tokenizer_for(template: str):
    """Return the bundled tokenizer with the control words of a chat template (a built-in's name, a file or "")."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "tiny" / "model")
    text = built_in.TEMPLATES.get(template) or (Path(template).read_text(encoding="utf-8") if template else "")
    words = sorted(set(built_in.CONTROL_WORD.findall(text)) - tokenizer.get_vocab().keys())
    tokenizer.add_tokens(words, special_tokens=True)
    return tokenizer


def write_model(folder: Path, config: str, template: str) -> None:
    """Write a model with random weights and its tokenizer.

    Args:
        config: folder of examples/models that defines class and rotary embeddings.
        template: chat template of the recipe, or ""
    """
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(7)
    tokenizer = tokenizer_for(template)
    small = AutoConfig.from_pretrained(EXAMPLES / "models" / config)
    layers = small.num_hidden_layers
    for name, value in SIZES.items():
        setattr(small, name, value)
    for name in ("layer_types", "no_rope_layers"):  # one entry for each layer
        if len(getattr(small, name, None) or []) == layers:
            setattr(small, name, getattr(small, name)[: small.num_hidden_layers])
    small.vocab_size = -(-len(tokenizer) // 8) * 8
    small.bos_token_id, small.eos_token_id = None, tokenizer.eos_token_id
    small.pad_token_id = tokenizer.pad_token_id
    AutoModelForCausalLM.from_config(small).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
