"""Define Recipe, the declaration at the top of a recipe file, and read it without importing torch."""

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

NAME = re.compile(r"[A-Za-z]\w{0,63}")  # name of a recipe, which is part of run folder names


@dataclass(frozen=True, eq=False)
class Variant:
    """A recipe with other arguments, which need less memory."""

    title: str  # in messages, e.g. "QLoRA"
    arguments: Mapping[str, Any]  # argument -> value
    method: str = ""  # value of `zerofit plan --method`, e.g. "qlora"; "": plans print its flags instead

    @property
    def flags(self) -> str:
        """Return the arguments as flags."""
        return " ".join(f"--{name} {str(value).lower()}" for name, value in self.arguments.items())


@dataclass(frozen=True, eq=False)
class Recipe:
    """The properties of a recipe for the launcher, the plan and all verbs: `RECIPE = Recipe(...)` in its file.

    Raises: TypeError for a field of the wrong type, ValueError for an invalid value.
    """

    # Name in run folder names, run.json and checkpoints: letters, digits and _.
    name: str

    # Name in a plan's sentences; default: `name`.
    title: str = ""

    # Dataclasses of its flags in addition to the shared ones; each field has metadata={"help": "..."}.
    arguments: tuple[type, ...] = ()

    # Argument -> default that differs from the shared default.
    defaults: Mapping[str, Any] = field(default_factory=dict)

    # Argument -> default with --adapter, which replaces the default above.
    adapter_defaults: Mapping[str, Any] = field(default_factory=dict)

    # Flags that `--help` lists under the recipe's name; default: all of `arguments`. `--help all` lists every flag.
    common: tuple[str, ...] = ()

    # Objectives, which define rows and loss: "module:Class", or "Class" in the recipe file, derived from
    # zerofit.objective.interface.Objective; --loss_type selects one of several.
    objectives: tuple[str, ...] = ("zerofit.objective.causal_lm:CausalLM",)

    # "module:Class" of the trainer, or the class that the file derives from it; "Class": in the recipe file.
    trainer: str = "zerofit.train.trainer:ZerofitTrainer"

    # Metrics of an evaluation (eval_<name>), allowed in --metric_for_best_model; default: the objective's metrics.
    score: tuple[str, ...] = ()

    # YAML file of the task that is trained without --model and --data, in this project or with its full path; its
    # folder contains model/, train.jsonl and eval.jsonl.
    bundled: str = "examples/tiny/sft.yaml"

    # Whether the model's layers are split into --pp_size stages.
    stages: bool = False

    # The equivalent recipe with pipeline stages, which a plan for several nodes suggests; "": none.
    staged: str = ""

    # Alternatives for the same purpose with less memory, largest first: names of recipes or methods of variants.
    smaller: tuple[str, ...] = ()

    # This recipe with other arguments, which a plan suggests if memory is short.
    variants: tuple[Variant, ...] = ()

    # Custom techniques (job/technique.py), in addition to the kit's.
    techniques: tuple = ()

    # Custom row formats (data/formats.py), tried before the kit's.
    formats: tuple = ()

    # Value of --optim -> custom optimizer (optim/registry.py OptimizerSpec).
    optimizers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        _check_types(self)
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name!r}: must consist of letters, digits and _, starting with a letter")
        if not self.objectives:
            raise ValueError("objectives=(): must contain a class")
        if wrong := [group for group in self.arguments if not (isinstance(group, type) and is_dataclass(group))]:
            raise TypeError(f"arguments: must be a tuple of dataclasses, not {wrong[0]!r}")
        object.__setattr__(self, "title", self.title or self.name)

    def __str__(self) -> str:
        return self.name

    @property
    def bundled_file(self) -> Path:
        """Return the full path of `bundled`."""
        return ROOT / self.bundled

    @property
    def own_arguments(self) -> list[str]:
        """Return the names of the fields in `arguments`."""
        return [argument.name for group in self.arguments for argument in fields(group)]


def _check_types(recipe: Recipe) -> None:
    """Raise TypeError for a field with a value of the wrong type."""
    for item in fields(recipe):
        value, kind = getattr(recipe, item.name), typing.cast(type, typing.get_origin(item.type) or item.type)
        if not isinstance(value, kind):
            expected = "dict" if kind is Mapping else kind.__name__
            raise TypeError(f"{item.name}={value!r}: must be a {expected}, not a {type(value).__name__}")


# --- read it from a file ---


def assignment(tree: ast.Module) -> int | None:
    """Return the index of the last statement that assigns RECIPE; None without an assignment."""
    last = None
    for index, node in enumerate(tree.body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "RECIPE" for target in targets):
            last = index
    return last


@functools.cache  # one object per file, since it is the key for cached parsers
def read(file: Path, content: bytes) -> Recipe:
    """Return the RECIPE of a file by executing its statements up to that assignment.

    Args: file: for error messages and imports from its folder; content: the file's bytes, which assign RECIPE.
    Raises: UserError with the line of a statement that fails, or of a RECIPE that is not a Recipe.
    """
    tree = ast.parse(content, str(file))
    last = assignment(tree) or 0
    module = types.ModuleType(f"zerofit_recipe_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses resolve their annotations here
    code = compile(ast.Module(tree.body[: last + 1], []), str(file), "exec", dont_inherit=True)
    sys.path.insert(0, str(file.absolute().parent))  # as for the program itself
    try:
        exec(code, vars(module))
    except (Exception, SystemExit) as error:
        cause = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{file}:{_line(error, file) or tree.body[last].lineno}: {cause.rstrip('.')}.") from None
    finally:
        sys.path.remove(str(file.absolute().parent))
    recipe = module.RECIPE
    if not isinstance(recipe, Recipe):
        kind = type(recipe).__name__
        raise UserError(f"{file}:{tree.body[last].lineno}: RECIPE must be a zerofit.Recipe, not a {kind}.")
    return recipe


def _line(error: BaseException, file: Path) -> int | None:
    """Return the line of a file that raised an exception, directly or in a call."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
