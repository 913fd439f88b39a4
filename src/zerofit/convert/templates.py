"""Map the names of other kits' chat templates to the built-in ones of this kit."""

from zerofit.convert.conversion import Conversion

# Ours -> the names elsewhere, of templates that write the same turns.
BUILT_IN = {
    "chatml": "chatml chatml_de",
    "qwen2.5": "qwen_25 qwen qwen2_5 qwen2.5",
    "qwen3": "qwen3",
    "llama3": "llama3 llama-3",
    "llama3.1": "llama-3.1 llama3_1 llama3_2",
    "gemma": "gemma gemma2 gemma3 gemma3_text",
    "mistral": "mistral_v7_tekken mistral_small mistral_2501",
    "phi4": "phi4 phi_4",
}

OURS = {theirs: ours for ours, names in BUILT_IN.items() for theirs in names.split()}

TOKENIZER = "the template of the model's tokenizer is used: a Jinja file as chat_template makes it another"


def template(done: Conversion, key: str, value: str | None) -> None:
    """Write the built-in template of a name; without one the tokenizer's is used, and that is said."""
    if value in (None, "", "tokenizer_default", "default_template"):
        return
    if value in OURS:
        done.put("chat_template", OURS[value], key)
        done.differ(
            f"{key}: {value} is the built-in {OURS[value]}, which writes as the family's own template; look at a row "
            "with `zerofit data`."
        )
    else:
        done.lose(key, f"no built-in {str(value)[:30]!r}; {TOKENIZER}")
