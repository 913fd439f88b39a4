"""Read a YAML or JSON settings file with unique keys, optionally with the text of its numbers."""

import itertools
import json
from pathlib import Path
from typing import Any

import yaml

from zerofit.base.errors import UserError, one_line, without_line_breaks
from zerofit.base.paths import read_text

MAX_DEPTH, MAX_VALUES = 20, 10_000  # limits for a file


class RepeatedKey(ValueError):
    """A repeated key in a JSON object, whose first value would be lost."""

    def __init__(self, key: str):
        super().__init__(f"the key {key!r} is repeated in an object")
        self.key = key


def without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object (an object_pairs_hook). Raises: RepeatedKey."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKey(next(key for key in keys if keys.count(key) > 1))
    return made


def load(path: str, label: str = "", keep_text: bool = False) -> tuple[Any, dict[str, yaml.Node]]:
    """Return the value of a YAML or JSON file ({} if empty) and the nodes of its keys.

    Args: label: the file in error messages, default: the path. keep_text: numbers keep their text (Number,
        WholeNumber).
    Raises: UserError for an unreadable, invalid or too large file.
    """
    label = label or path
    try:
        text = read_text(Path(path).expanduser())
    except OSError as error:
        raise UserError(f"{label}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{label}: is not a UTF-8 text file.") from None
    except RuntimeError as error:  # ~unknown_user
        raise UserError(f"{label}: cannot be expanded: {str(error).rstrip('.')}.") from None
    text = text.replace("\t", "  ") if path.endswith(".json") else text  # YAML is indented with spaces only
    values, root = _parsed(text, path, keep_text)
    if root is None or not values:
        return values or {}, {}
    return values, {key.value: value for key, value in root.value} if isinstance(values, dict) else {}


def value_of(text: str, place: str) -> Any:
    """Return the value of a YAML text; None if empty. Raises: UserError with the place, as `load`."""
    return _parsed(text, place)[0]


def place(path: str, key: str, nodes: dict[str, yaml.Node]) -> str:
    """Return "file:line" of a key. Args: nodes: from `load`, without merged keys (<<)."""
    return f"{path}:{nodes[key].start_mark.line + 1 if key in nodes else 1}"


def as_written(place: str, value: Any, node: yaml.Node | None) -> Any:
    """Return a text value, or a list of texts, as written in the file: YAML reads 3.10 as the number 3.1.

    Raises: UserError for no, off, yes and on, which are ambiguous: text, or YAML's false and true.
    """
    if isinstance(value, list) and isinstance(node, yaml.SequenceNode):
        return [_list_item(place, item, inner) for item, inner in zip(value, node.value, strict=True)]
    if value is None or not isinstance(node, yaml.ScalarNode):
        return value
    if isinstance(value, bool):
        if node.value.lower() not in ("true", "false"):
            text = json.dumps(value)
            raise UserError(f'{place}: {node.value} is {text} in YAML; write "{node.value}" in quotes, or {text}.')
        return value
    return node.value


def _list_item(place: str, value: Any, node: yaml.Node) -> Any:
    """Return an item of a list as written in the file, including the values of a mapping (a data set's revision)."""
    if not isinstance(value, dict) or len(value) != len(node.value):  # merged keys (<<) are not in the node
        return as_written(place, value, node)
    pairs = zip(value.items(), node.value, strict=True)
    return {key: _list_item(place, item, inner) for (key, item), (_, inner) in pairs}


def words(value: Any) -> list[str]:
    """Return a value, or the items of a list, as words of a command line."""
    values = value if isinstance(value, list) else [value]
    return [json.dumps(item) if isinstance(item, dict | bool) else str(item) for item in values]


def _parsed(text: str, path: str, keep_text: bool = False) -> tuple[Any, yaml.Node | None]:
    """Return the value of a YAML text and its node."""
    loader = None
    try:
        loader = _Loader(text)
        loader.keep_text = keep_text
        root = loader.get_single_node()
        return loader.construct_document(root) if root else None, root
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        problem = getattr(error, "problem", None) or without_line_breaks(error)
        raise UserError(f"{place}: not valid YAML: {one_line(problem)}.") from None
    finally:
        if loader:
            loader.dispose()


class WholeNumber(int):
    """An int whose str() is the text in the file, such as 0x10 or 1_000."""

    text = ""

    def __str__(self):
        return self.text


class Number(float):
    """A float whose str() is the text in the file, such as 3.10."""

    text = ""

    def __str__(self):
        return self.text


class _Loader(yaml.SafeLoader):
    """A SafeLoader that rejects repeated keys, of which YAML would use the last, and oversized files.

    Nested aliases can expand a few lines into billions of values. Keys are texts as written.
    """

    depth = count = 0
    keep_text = False

    def __init__(self, stream):
        super().__init__(stream)
        self.sizes: dict[int, int] = {}  # number of values below a node by its id; aliases count each time

    def compose_node(self, parent, index):
        place = self.peek_event().start_mark
        self.depth += 1
        self.count += 1
        if self.depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_DEPTH} levels of nesting", place)
        is_alias, node = self.check_event(yaml.AliasEvent), super().compose_node(parent, index)
        self.depth -= 1
        if is_alias and id(node) not in self.sizes:
            raise yaml.composer.ComposerError(None, None, "an alias of an enclosing value", place)
        if not is_alias:
            if isinstance(node, yaml.MappingNode):
                self._check_keys(node)
            elif isinstance(node, yaml.ScalarNode):
                self._join_pairs(node)
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            inner = itertools.chain(*pairs) if pairs else node.value if isinstance(node, yaml.SequenceNode) else []
            self.sizes[id(node)] = 1 + sum(self.sizes[id(child)] for child in inner)
        if max(self.sizes[id(node)], self.count) > MAX_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_VALUES:,} values including aliases", place)
        return node

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Keep the keys of a mapping as written; raise for a repeated key.

        At the top level `-` and `_` are equivalent, as in flags.
        """
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a text", key.start_mark)
            name = key.value.replace("-", "_") if self.depth == 0 else key.value
            if name in first:
                problem = f"{key.value!r} is also in line {first[name]}; keep one of them"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            first[name] = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:merge":
                key.tag = "tag:yaml.org,2002:str"

    @staticmethod
    def _join_pairs(node: yaml.ScalarNode) -> None:
        """Join surrogate pairs, as in JSON; raise for an unpaired one, which files cannot store."""
        try:
            node.value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            problem = f"{node.value[:20]!r} contains an unpaired surrogate, which is not a character"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_object(self, node, deep=False):
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError) as error:  # !!int x, !!bool x, 5,000 digits
            shown = repr(node.value[:20]) if isinstance(node, yaml.ScalarNode) else "a list or an object"
            problem = f"{shown} cannot be read as {node.tag.rpartition(':')[2]} ({type(error).__name__})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None
        if self.keep_text and type(value) in (int, float) and str(value) != node.value:
            value = (WholeNumber if isinstance(value, int) else Number)(value)
            value.text = node.value
        return value


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
for _tag in ("binary", "omap", "pairs", "set"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_undefined)
