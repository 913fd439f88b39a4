"""Arguments of chat templates, such as enable_thinking: those of a run, and those of single rows.

Those of a run (--chat_template_kwargs) are written into the template as its defaults. So they are part of everything
that depends on the template: the fingerprint of tokenized rows, final/ and its exports, generation there and in others'
servers, where a caller's own argument still wins. An argument of a row wins over them in the same way.
"""

import functools
import json
import re
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from zerofit.base.errors import UserError

FLAG = "--chat_template_kwargs"

COLUMNS = ("chat_template_kwargs", "enable_thinking")  # of rows; the second is one argument of the first

# What the rows, the tokenizer and transformers give to every template.
TAKEN = frozenset(
    """
    messages conversation tools add_generation_prompt continue_final_message chat_template tokenize padding truncation
    max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs raise_exception strftime_now
""".split()
)

DEFAULT = re.compile(r"\{%- if (\w+) is not defined or \1 is none %\}\{% set \1 = .* %\}\{% endif %\}\n")


def parsed(place: str, value: Any) -> dict[str, Any]:
    """Return the arguments of a flag or column, an object or its JSON text; {} for none.

    Raises: UserError for anything else, and for a name that a template gets from elsewhere.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UserError(
                f"{place} is {value[:80]}, which is no JSON object such as '{{\"enable_thinking\": false}}'; a shell "
                "removes quotes that are not inside others."
            ) from None
    if not isinstance(value, dict):
        raise UserError(f'{place} must be an object such as {{"enable_thinking": false}}, found {value!r}.')
    for name in value:
        if not re.fullmatch(r"[A-Za-z]\w*", name):
            raise UserError(f"{place}: {name!r} cannot be the name of an argument.")
        if name in TAKEN or name.endswith("_token"):
            raise UserError(f"{place}: {name!r} is no argument to choose: each row, or the tokenizer, has its own.")
    return value


def of_row(place: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the template's arguments in the COLUMNS of a row.

    Raises: UserError for values of other types, and for a column that contradicts the other.
    """
    if row.keys().isdisjoint(COLUMNS):
        return {}
    arguments, thinks = parsed(f"{place}: column 'chat_template_kwargs'", row.get(COLUMNS[0])), row.get(COLUMNS[1])
    if thinks is None:
        return arguments
    if not isinstance(thinks, bool):
        raise UserError(f"{place}: column 'enable_thinking' must be true or false, found {thinks!r}.")
    if arguments.get("enable_thinking", thinks) is not thinks:
        raise UserError(f"{place}: columns 'enable_thinking' and 'chat_template_kwargs' contradict each other.")
    return arguments | {"enable_thinking": thinks}


def with_defaults(template: str, arguments: dict[str, Any]) -> str:
    """Return the template with default values of some of its arguments.

    Raises: UserError for an argument that the template never reads.
    """
    for name in arguments:
        if name not in names_in(template):
            raise UserError(f"{FLAG}: the chat template reads no {name!r}{_those_of(template)}.")
    lines = (
        f"{{%- if {name} is not defined or {name} is none %}}{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"
        for name, value in arguments.items()
    )
    return "".join(lines) + template


def without_defaults(template: str) -> str:
    """Return a template as it was before `with_defaults`."""
    while match := DEFAULT.match(template):
        template = template[match.end() :]
    return template


@functools.lru_cache(maxsize=16)
def names_in(template: str) -> frozenset[str]:
    """Return every name that a template reads, its own variables too."""
    return frozenset(node.name for node in _parsed(template).find_all(nodes.Name) if node.ctx == "load")


def _those_of(template: str) -> str:
    """Return the arguments that a template reads, as the end of a sentence."""
    names = meta.find_undeclared_variables(_parsed(template)) - TAKEN
    names = sorted(name for name in names if not name.endswith("_token") and name not in ("namespace", "range"))
    return f", only {', '.join(names)}" if names else "; it has no arguments"


def _parsed(template: str):
    """Return the syntax tree of a template. Raises: jinja2.TemplateSyntaxError."""
    plain = re.sub(r"(\{%[-+]?\s*)generation\b", r"\1if true", template)  # transformers' own block, as one of Jinja's
    plain = re.sub(r"(\{%[-+]?\s*)endgeneration\b", r"\1endif", plain)
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)


def without_syntax_error(template: str, name: str) -> str:
    """Return the template. Raises: UserError with the line for a syntax error, which each row would be refused with."""
    try:
        _parsed(template)
    except TemplateSyntaxError as error:
        why = str(error.message).rstrip(".")
        raise UserError(f"{name}:{error.lineno}: the chat template has a syntax error: {why}.") from None
    return template


def _literal(value: Any) -> str:
    """Return a JSON value as Jinja spells it."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
