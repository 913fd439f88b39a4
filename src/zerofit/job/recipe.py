"""Define Recipe: what a recipe's file says of itself at its top, and read it without importing torch."""

import ast
import functools
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from zerofit.base.errors import UserError, first_line
from zerofit.base.paths import ROOT

BUNDLED_MODEL = "tiny"  # value of --model: the model of the recipe's bundled task

NAME = re.compile(r"[A-Za-z]\w{0,63}")  # of a recipe: it stands in the names of run folders


@dataclass(frozen=True, eq=False)
class Variant:
    """A recipe with other arguments, with which it needs less memory."""

    title: str  # as in sentences, e.g. "QLoRA"
    arguments: Mapping[str, Any]  # argument -> value
    method: str = ""  # as in `zerofit plan --method`, e.g. "qlora"; "": it has none, and its flags are named

    @property
    def flags(self) -> str:
        """Return the arguments as they are typed."""
        return " ".join(f"--{name} {str(value).lower()}" for name, value in self.arguments.items())


@dataclass(frozen=True, eq=False)
class Recipe:
    """What the launcher, the plan and every verb know of a recipe: `RECIPE = Recipe(...)` at the top of its file.

    Raises: TypeError for a field of another type, ValueError for a value that there is not.
    """

    # The word for it in the names of run folders, in run.json and in checkpoints: letters, digits and _.
    name: str

    # The word for it in a plan's sentences; default: its name.
    title: str = ""

    # Dataclasses of the flags that it takes beside the shared ones; each field with metadata={"help": "..."}.
    arguments: tuple[type, ...] = ()

    # Argument -> default that differs from the shared one.
    defaults: Mapping[str, Any] = field(default_factory=dict)

    # Argument -> default where an adapter trains (--adapter), instead of that above.
    adapter_defaults: Mapping[str, Any] = field(default_factory=dict)

    # Flags that `--help` lists under the recipe's name; default: all of `arguments`. `--help all` lists every flag.
    common: tuple[str, ...] = ()

    # What a row is and what is trained on it: classes as "module:Class", or "Class" of the file itself, each derived
    # from zerofit.objective.interface.Objective; --loss_type selects one of several.
    objectives: tuple[str, ...] = ("zerofit.objective.causal_lm:CausalLM",)

    # "module:Class" that trains, or the class that the file derives from it; "Class": of the file itself.
    trainer: str = "zerofit.train.trainer:ZerofitTrainer"

    # What an evaluation computes, as eval_<name>: what --metric_for_best_model may name; default: the objective's.
    score: tuple[str, ...] = ()

    # The YAML file of the task trained without --model and --data, in this project or with its whole path; beside it
    # lie model/, train.jsonl and eval.jsonl.
    bundled: str = "examples/tiny/sft.yaml"

    # The model's layers are cut into --pp_size stages.
    stages: bool = False

    # The recipe that trains the same in stages, which a plan of several nodes names; "": none.
    staged: str = ""

    # What trains for the same end with less memory, the largest first: names of recipes, methods of variants.
    smaller: tuple[str, ...] = ()

    # This recipe with other arguments, which a plan names where memory is short.
    variants: tuple[Variant, ...] = ()

    # Techniques of its own (job/technique.py), beside the kit's.
    techniques: tuple = ()

    # Formats of rows of its own (data/formats.py), tried before the kit's.
    formats: tuple = ()

    # Name for --optim -> an optimizer of its own (optim/registry.py OptimizerSpec).
    optimizers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        _check_types(self)
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name!r}: must be letters, digits and _, beginning with a letter")
        if not self.objectives:
            raise ValueError("objectives=(): must name a class")
        if wrong := [group for group in self.arguments if not (isinstance(group, type) and is_dataclass(group))]:
            raise TypeError(f"arguments: must be a tuple of dataclasses, found {wrong[0]!r}")
        object.__setattr__(self, "title", self.title or self.name)

    def __str__(self) -> str:
        return self.name

    @property
    def bundled_file(self) -> Path:
        """Return `bundled` with its whole path."""
        return ROOT / self.bundled

    @property
    def own_arguments(self) -> list[str]:
        """Return the names of `arguments`."""
        return [argument.name for group in self.arguments for argument in fields(group)]


def _check_types(recipe: Recipe) -> None:
    """Raise TypeError for a field whose value is of another type than it has above."""
    for one in fields(recipe):
        value, kind = getattr(recipe, one.name), typing.cast(type, typing.get_origin(one.type) or one.type)
        if not isinstance(value, kind):
            wanted = "dict" if kind is Mapping else kind.__name__
            raise TypeError(f"{one.name}={value!r}: must be a {wanted}, found a {type(value).__name__}")


# --- read it from a file ---


def assignment(tree: ast.Module) -> int | None:
    """Return the index of the last statement of a file that assigns RECIPE; None without one."""
    last = None
    for index, node in enumerate(tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "RECIPE" for target in targets):
            last = index
    return last


@functools.cache  # one object for a file: parsers are kept by it
def read(file: Path, content: bytes) -> Recipe:
    """Return the RECIPE of a file by executing its statements down to that assignment, and none below.

    Args: file: for error messages and imports beside it; content: of the file, which has a RECIPE.
    Raises: UserError with the line of a statement that fails, or where RECIPE is no Recipe.
    """
    tree = ast.parse(content, str(file))
    last = assignment(tree) or 0
    module = types.ModuleType(f"zerofit_recipe_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses look for the names in their annotations
    code = compile(ast.Module(tree.body[: last + 1], []), str(file), "exec", dont_inherit=True)
    sys.path.insert(0, str(file.absolute().parent))  # as for the program itself
    try:
        exec(code, vars(module))
    except (Exception, SystemExit) as error:
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{file}:{_line(error, file) or tree.body[last].lineno}: {what.rstrip('.')}.") from None
    finally:
        sys.path.remove(str(file.absolute().parent))
    recipe = module.RECIPE
    if not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise UserError(f"{file}:{tree.body[last].lineno}: RECIPE must be a zerofit.Recipe, found a {kind}.")
    return recipe


def _line(error: BaseException, file: Path) -> int | None:
    """Return the line of a file in which an exception was raised, or in which what raised it was called."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
