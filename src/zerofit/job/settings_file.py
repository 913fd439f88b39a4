"""Read a file of settings, YAML or JSON: a key stands in it once, and a number can be had as it is written."""

import itertools
import json
from pathlib import Path
from typing import Any

import yaml

from zerofit.base.errors import UserError, in_one_line, one_line
from zerofit.base.paths import read_text

DEEPEST, MOST_VALUES = 20, 10_000  # of a file


class RepeatedKey(ValueError):
    """A key stands twice in an object of JSON, whose first value would be lost."""

    def __init__(self, key: str):
        super().__init__(f"the key {key!r} stands twice in an object")
        self.key = key


def without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as the object_pairs_hook of json. Raises: RepeatedKey."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKey(next(key for key in keys if keys.count(key) > 1))
    return made


def load(path: str, said: str = "", as_written: bool = False) -> tuple[Any, dict[str, yaml.Node]]:
    """Return the value of a YAML or JSON file, {} of an empty one, and the node of each of its keys.

    Args: said: what a sentence on a file that cannot be read begins with, default: the path. as_written: numbers keep
        their text (Number, WholeNumber).
    Raises: UserError for a file that cannot be read, is no YAML, or is more than a file of settings is.
    """
    said = said or path
    try:
        text = read_text(Path(path).expanduser())
    except OSError as error:
        raise UserError(f"{said}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{said}: is not a UTF-8 text file.") from None
    except RuntimeError as error:  # ~nobody
        raise UserError(f"{said}: cannot be looked up: {str(error).rstrip('.')}.") from None
    text = text.replace("\t", "  ") if path.endswith(".json") else text  # YAML indents by spaces alone
    values, root = _parsed(text, path, as_written)
    if root is None or not values:
        return values or {}, {}
    return values, {key.value: value for key, value in root.value} if isinstance(values, dict) else {}


def value_of(text: str, place: str) -> Any:
    """Return what a text says as YAML; None for an empty one. Raises: UserError as `load`, naming the place."""
    return _parsed(text, place)[0]


def place(path: str, key: str, nodes: dict[str, yaml.Node]) -> str:
    """Return "file:line" of a key. Args: nodes: as `load` returns them, without merged keys (<<)."""
    return f"{path}:{nodes[key].start_mark.line + 1 if key in nodes else 1}"


def as_written(place: str, value: Any, node: yaml.Node | None) -> Any:
    """Return the value of a text, or of a list of them, as it stands in the file: YAML reads 3.10 as the number 3.1.

    Raises: UserError for no, off, yes and on, which may be meant as text or as YAML's false and true.
    """
    if isinstance(value, list) and isinstance(node, yaml.SequenceNode):
        return [_in_list(place, inner, of) for inner, of in zip(value, node.value, strict=True)]
    if value is None or not isinstance(node, yaml.ScalarNode):
        return value
    if isinstance(value, bool):
        if node.value.lower() not in ("true", "false"):
            meant = json.dumps(value)
            raise UserError(f'{place}: {node.value} is {meant} in YAML; write "{node.value}" in quotes, or {meant}.')
        return value
    return node.value


def _in_list(place: str, value: Any, node: yaml.Node) -> Any:
    """Return an entry of a list as it stands in the file, also what a mapping holds (a data set's revision)."""
    if not isinstance(value, dict) or len(value) != len(node.value):  # merged keys (<<) are not in the node
        return as_written(place, value, node)
    return {key: _in_list(place, inner, of) for (key, inner), (_, of) in zip(value.items(), node.value, strict=True)}


def words(value: Any) -> list[str]:
    """Return a value, or those of a list, as words of a command line."""
    values = value if isinstance(value, list) else [value]
    return [json.dumps(one) if isinstance(one, dict | bool) else str(one) for one in values]


def _parsed(text: str, path: str, as_written: bool = False) -> tuple[Any, yaml.Node | None]:
    """Return the value of a YAML text and its node."""
    loader = None
    try:
        loader = _Loader(text)
        loader.as_written = as_written
        root = loader.get_single_node()
        return loader.construct_document(root) if root else None, root
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        problem = getattr(error, "problem", None) or in_one_line(error)
        raise UserError(f"{place}: not valid YAML: {one_line(problem)}.") from None
    finally:
        if loader:
            loader.dispose()


class WholeNumber(int):
    """An int whose text is another than Python's, such as 0x10 or 1_000; str() has the text."""

    text = ""

    def __str__(self):
        return self.text


class Number(float):
    """A float whose text is another than Python's, such as 3.10; str() has the text."""

    text = ""

    def __str__(self):
        return self.text


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses a key that is given twice: YAML's last one would win.

    And more than any file of settings holds: aliases of aliases stand for billions of values in a few lines. Keys are
    texts, as they are written.
    """

    depth = count = 0
    as_written = False

    def __init__(self, stream):
        super().__init__(stream)
        self.sizes: dict[int, int] = {}  # values below a node, by its id; those of an alias count each time

    def compose_node(self, parent, index):
        place = self.peek_event().start_mark
        self.depth += 1
        self.count += 1
        if self.depth > DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"more than {DEEPEST} levels of nesting", place)
        is_alias, node = self.check_event(yaml.AliasEvent), super().compose_node(parent, index)
        self.depth -= 1
        if is_alias and id(node) not in self.sizes:
            raise yaml.composer.ComposerError(None, None, "an alias of what it stands in", place)
        if not is_alias:
            if isinstance(node, yaml.MappingNode):
                self._check_keys(node)
            elif isinstance(node, yaml.ScalarNode):
                self._join_pairs(node)
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            inner = itertools.chain(*pairs) if pairs else node.value if isinstance(node, yaml.SequenceNode) else []
            self.sizes[id(node)] = 1 + sum(self.sizes[id(of)] for of in inner)
        if max(self.sizes[id(node)], self.count) > MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {MOST_VALUES:,} values with all aliases", place)
        return node

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Take the keys of a mapping as they are written; raise for one that stands there twice.

        Of the whole file's also with `-` for `_`, which both stand for the same flag.
        """
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a text", key.start_mark)
            name = key.value.replace("-", "_") if self.depth == 0 else key.value
            if name in first:
                problem = f"{key.value!r} stands in line {first[name]} too; keep one of them"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            first[name] = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:merge":
                key.tag = "tag:yaml.org,2002:str"

    @staticmethod
    def _join_pairs(node: yaml.ScalarNode) -> None:
        """Join surrogate pairs, as JSON writes characters; raise for half of one, which no file can hold."""
        try:
            node.value = node.value.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            problem = f"{node.value[:20]!r} has half of a surrogate pair, which is no character"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_object(self, node, deep=False):
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError) as error:  # !!int x, !!bool x, 5,000 digits
            shown = repr(node.value[:20]) if isinstance(node, yaml.ScalarNode) else "a list or an object"
            problem = f"{shown} cannot be read as {node.tag.rpartition(':')[2]} ({type(error).__name__})"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None
        if self.as_written and type(value) in (int, float) and str(value) != node.value:
            value = (WholeNumber if isinstance(value, int) else Number)(value)
            value.text = node.value
        return value


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_yaml_str)
for _tag in ("binary", "omap", "pairs", "set"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_undefined)
