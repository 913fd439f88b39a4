"""Map the chat template names of other kits to zerofit's built-in templates."""

from zerofit.convert.conversion import Conversion
from zerofit.data.chat_templates import arguments as chat_templates
from zerofit.data.chat_templates import built_in

# Our name -> names in other kits of templates with the same turns.
BUILT_IN = {
    "chatml": "chatml chatml_de",
    "qwen2.5": "qwen_25 qwen qwen2_5 qwen2.5",
    "qwen3": "qwen3",
    "qwen3.5": "qwen3_5 qwen3_6",
    "deepseek-r1": "deepseekr1 deepseek_r1",
    "deepseek-v3": "deepseek3 deepseek_v3",
    "deepseek-v3.1": "deepseek_v3_1",
    "gpt-oss": "gpt_oss",
    "glm4.5": "glm4_moe glm4_5",
    "llama3": "llama3 llama-3",
    "llama3.1": "llama-3.1 llama3_1 llama3_2",
    "llama4": "llama4",
    "gemma": "gemma gemma2 gemma3 gemma3_text",
    "gemma4": "gemma4",
    "granite3": "granite3",
    "granite4": "granite4",
    "command-r": "cohere",
    "command-a": "command_a",
    "mistral": "mistral_v7_tekken mistral_small mistral_2501",
    "phi3": "phi phi3 phi_3 phi_35",
    "phi4": "phi4 phi_4",
}

OURS = {theirs: ours for ours, names in BUILT_IN.items() for theirs in names.split()}

TOKENIZER = "the tokenizer's template is used; set chat_template to a Jinja file to replace it"

ARGUMENTS = "chat_template_kwargs"


def arguments(done: Conversion, key: str, values: dict | None) -> None:
    """Write the chat template arguments, and list those that a built-in template never reads."""
    name = done.lines["chat_template"].value if "chat_template" in done.lines else ""
    read = chat_templates.names_in(built_in.TEMPLATES[name]) if name in built_in.TEMPLATES else values or {}
    if unread := sorted((values or {}).keys() - set(read)):
        done.lose(key, f"the built-in template {name} does not read {', '.join(unread)}")
    if known := {argument: value for argument, value in (values or {}).items() if argument in read}:
        done.put(ARGUMENTS, known, key)


def template(done: Conversion, key: str, value: str | None) -> None:
    """Write the built-in template for a name, or report that the tokenizer's template is used."""
    if value in (None, "", "tokenizer_default", "default_template"):
        return
    if value in OURS:
        done.put("chat_template", OURS[value], key)
        done.differ(
            f"{key}: {value} is replaced by the built-in {OURS[value]}, which follows the model family's template; "
            "check a row with `zerofit data`."
        )
    else:
        done.lose(key, f"no built-in template {str(value)[:30]!r}; {TOKENIZER}")


def file_or_text(done: Conversion, key: str) -> None:
    """Write the chat template of a key: a file that it names, or its text for a separate file."""
    value = done.take(key)
    if value and str(value).endswith((".jinja", ".j2")):
        done.put("chat_template", value, key)
    elif value:
        done.texts["chat_template"] = key, str(value)
