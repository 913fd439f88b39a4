"""Make a tiny model of a recipe's own class, with the bundled tokenizer: the chain of run.py can then run anywhere."""

from pathlib import Path

from zerofit.data.chat_templates import built_in

EXAMPLES = Path(__file__).resolve().parents[1]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


def write_model(folder: Path, config: str, template: str) -> None:
    """Write a model with random weights and its tokenizer.

    Args:
        config: folder of examples/models whose class and rotary embeddings the model has.
        template: chat template of the recipe, "" without one; its control words become tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

    set_seed(7)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "tiny" / "model")
    text = built_in.TEMPLATES.get(template) or (Path(template).read_text(encoding="utf-8") if template else "")
    words = sorted(set(built_in.CONTROL_WORD.findall(text)) - tokenizer.get_vocab().keys())
    tokenizer.add_tokens(words, special_tokens=True)
    small = AutoConfig.from_pretrained(EXAMPLES / "models" / config)
    published_layers = small.num_hidden_layers
    for name, value in SIZES.items():
        setattr(small, name, value)
    for name in ("layer_types", "no_rope_layers"):  # one entry for each layer
        if len(getattr(small, name, None) or []) == published_layers:
            setattr(small, name, getattr(small, name)[: small.num_hidden_layers])
    small.vocab_size = -(-len(tokenizer) // 8) * 8
    small.bos_token_id, small.eos_token_id = None, tokenizer.eos_token_id
    small.pad_token_id = tokenizer.pad_token_id
    AutoModelForCausalLM.from_config(small).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
