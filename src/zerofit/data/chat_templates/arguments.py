"""Handle arguments of chat templates, such as enable_thinking, for a run or a single row.

A run's arguments (--chat_template_kwargs) are written into the template as defaults. They thus affect everything that
depends on the template: the fingerprint of tokenized rows, final/ and its exports, and generation by servers. Arguments
of a row or of a server's caller override them.
"""

import functools
import json
import re
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

from zerofit.base.errors import UserError

FLAG = "--chat_template_kwargs"

COLUMNS = ("chat_template_kwargs", "enable_thinking")  # columns of rows; the second is one argument of the first

# Arguments that rows, the tokenizer and transformers pass to every template.
RESERVED = frozenset(
    """
    messages conversation tools add_generation_prompt continue_final_message chat_template tokenize padding truncation
    max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs raise_exception strftime_now
""".split()
)

DEFAULT = re.compile(
    r"\{%- if (\w+) is not defined or \1 is none %\}"  # wording: keep
    r"\{% set \1 = .* %\}\{% endif %\}\n"
)


def parse_arguments(place: str, value: Any) -> dict[str, Any]:
    """Return the arguments of a flag or column, an object or its JSON text; {} if empty.

    Raises: UserError for other values and reserved names.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise UserError(
                f"{place} is {value[:80]}, not a JSON object such as '{{\"enable_thinking\": false}}'; put it into "
                "single quotes, since a shell removes double quotes."
            ) from None
    if not isinstance(value, dict):
        raise UserError(f'{place} must be an object such as {{"enable_thinking": false}}, found {value!r}.')
    for name in value:
        if not re.fullmatch(r"[A-Za-z]\w*", name):
            raise UserError(f"{place}: {name!r} is not a valid name of an argument.")
        if name in RESERVED or name.endswith("_token"):
            raise UserError(f"{place}: {name!r} is reserved: rows or the tokenizer set it; remove it.")
    return value


def row_arguments(place: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the template's arguments in the COLUMNS of a row.

    Raises: UserError for values of other types, and for a column that contradicts the other.
    """
    if row.keys().isdisjoint(COLUMNS):
        return {}
    arguments = parse_arguments(f"{place}: column 'chat_template_kwargs'", row.get(COLUMNS[0]))
    thinking = row.get(COLUMNS[1])
    if thinking is None:
        return arguments
    if not isinstance(thinking, bool):
        raise UserError(f"{place}: column 'enable_thinking' must be true or false, found {thinking!r}.")
    if arguments.get("enable_thinking", thinking) is not thinking:
        raise UserError(f"{place}: columns 'enable_thinking' and 'chat_template_kwargs' contradict each other.")
    return arguments | {"enable_thinking": thinking}


def with_defaults(template: str, arguments: dict[str, Any]) -> str:
    """Return the template with default values of some of its arguments.

    Raises: UserError for an argument that the template never reads.
    """
    for name in arguments:
        if name not in names_in(template):
            raise UserError(f"{FLAG}: the chat template does not read {name!r}{_arguments_read_by(template)}.")
    lines = (
        f"{{%- if {name} is not defined or {name} is none %}}"  # wording: keep
        f"{{% set {name} = {_literal(value)} %}}{{% endif %}}\n"
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
    """Return every name that a template reads, including its variables."""
    return frozenset(node.name for node in _syntax_tree(template).find_all(nodes.Name) if node.ctx == "load")


def _arguments_read_by(template: str) -> str:
    """Return the arguments that a template reads, as the end of a sentence."""
    names = meta.find_undeclared_variables(_syntax_tree(template)) - RESERVED
    names = sorted(name for name in names if not name.endswith("_token") and name not in ("namespace", "range"))
    return f", but {', '.join(names)}" if names else "; its arguments: none"


def _syntax_tree(template: str):
    """Return the syntax tree of a template. Raises: jinja2.TemplateSyntaxError."""
    plain = re.sub(r"(\{%[-+]?\s*)generation\b", r"\1if true", template)  # transformers' block as a block of Jinja
    plain = re.sub(r"(\{%[-+]?\s*)endgeneration\b", r"\1endif", plain)
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)


def without_syntax_error(template: str, name: str) -> str:
    """Return the template. Raises: UserError with the line of a syntax error."""
    try:
        _syntax_tree(template)
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
