"""Identify the program of a run (a recipe file), and record which program this user started in which run folder."""

import ast
import contextlib
import functools
import hashlib
import importlib
import json
import os
import runpy
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.base.errors import UserError, one_line
from zerofit.base.paths import PROJECT, ROOT, cache_root, user_only_folder
from zerofit.job.recipe import NAME, Recipe, assignment, read

if TYPE_CHECKING:
    from zerofit.objective.interface import Objective

DEFAULT = "sft"  # recipe of a verb if the command line does not set one

SET_RECIPE = "set the program with --recipe FILE (`make resume RUN=... RECIPE=FILE`)"


@dataclass(frozen=True)
class Program:
    """A recipe file, which is executed only if its `recipe` is read."""

    file: Path  # as on the command line
    sha256: str  # hash of the file, without imported modules
    defines_classes: bool  # contains a class statement
    content: bytes = field(repr=False, compare=False)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """Return the file's RECIPE. Raises: as `recipe.read`."""
        local = _of_this_process(self.file, "RECIPE")
        if isinstance(local, Recipe):
            return local
        return read(self.file, self.content)

    @property
    def in_project(self) -> str:
        """Return the file's path relative to the project (the working directory of a container image), else in full.

        Links in both paths are resolved.
        """
        file, project = self.file.resolve(), PROJECT.resolve()
        return str(file.relative_to(project) if file.is_relative_to(project) else self.file.absolute())

    @property
    def facts(self) -> dict[str, str]:
        """Return the facts for run.json and checkpoints."""
        return {"file": str(self.file.absolute()), "sha256": self.sha256}


_started: Program | None = None  # the program that this process starts, e.g. in `zerofit launch`


def from_file(file: Path) -> Program:
    """Read the program in a file without running it.

    Raises: UserError for a file that is not a recipe.
    """
    try:
        content = file.read_bytes()
        tree = ast.parse(content)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}.") from None
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        where = f"{file}:{getattr(error, 'lineno', None) or 1}"
        raise UserError(f"{where}: is not valid Python: {getattr(error, 'msg', error)}.") from None
    if assignment(tree) is None:
        raise UserError(
            f"{file}: is not a recipe: `RECIPE = Recipe(...)` is missing; start from a copy of a file in recipes/."
        )
    classes = any(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
    return Program(file, hashlib.sha256(content).hexdigest(), classes, content)


@functools.cache
def kit() -> dict[str, Recipe]:
    """Return {name: recipe} for the recipes that came with this zerofit, including additions in a checkout.

    Recipes in the project (the current folder) are executed only if the user names them.
    """
    recipes = {}
    for file in sorted((ROOT / "recipes").glob("*.py")):
        with contextlib.suppress(UserError):  # reported if the user names it
            recipe = from_file(file).recipe
            recipes[recipe.name] = recipe
    return recipes


def recipe_of(name: Recipe | str) -> Recipe:
    """Return a recipe by name, from the program that this process runs or starts, else from the kit.

    Raises: UserError for an unknown name.
    """
    if isinstance(name, Recipe):
        return name
    if running := _running(name):
        return running.recipe
    if name not in kit():
        raise UserError(f"{name}: no such recipe; use {', '.join(kit())}, or the .py file of a custom recipe.")
    return kit()[name]


def names() -> list[str]:
    """Return the names of the files in the project's recipes folder."""
    return sorted(file.stem for file in (PROJECT / "recipes").glob("*.py"))


def find(name: str) -> Program:
    """Return the program for a name on a command line: a file, a file of the project, or a name such as sft.

    Raises: UserError for a file that does not exist or is not a recipe.
    """
    if name.endswith(".py"):
        files = [Path(name).expanduser(), PROJECT / name]
    else:
        files = [PROJECT / "recipes" / f"{name}.py"] if name.isidentifier() else []
    for file in files:
        if file.is_file():
            return from_file(file)
    raise UserError(f"{name}: no such recipe; use {', '.join(names())}, or the .py file of a custom recipe.")


def start(name: str) -> Program:
    """Find a program and record it as the one that this process starts."""
    global _started
    _started = find(name)
    return _started


def current() -> Program | None:
    """Return the program that this process runs or starts; None if it is not a recipe file."""
    return _of_main(getattr(sys.modules["__main__"], "__file__", None)) or _started


def _running(name: str) -> Program | None:
    """Return the program that this process runs or starts if its recipe has this name."""
    running = current()
    return running if running is not None and running.recipe.name == name else None


@functools.cache  # read once: the file may be edited while it trains
def _of_main(file: str | None) -> Program | None:
    with contextlib.suppress(UserError):
        return from_file(Path(file).absolute()) if file else None
    return None


def file_of(recipe: Recipe) -> Path:
    """Return the file of a recipe: the one that this process runs or starts, else the project's."""
    running = _running(recipe.name)
    return running.file if running else PROJECT / "recipes" / f"{recipe.name}.py"


def custom_program(recipe: Recipe) -> Program | None:
    """Return the program that another process needs to run this recipe; None for an unchanged recipe of the kit."""
    program = _running(recipe.name) or from_file(file_of(recipe))
    return None if program.sha256 == kit_hash(recipe.name) else program


def display_path(recipe: Recipe) -> str:
    """Return a recipe's file for messages: "recipes/sft.py", or the full path of a file outside the project."""
    file, project = file_of(recipe).absolute(), PROJECT.absolute()
    return str(file.relative_to(project) if file.is_relative_to(project) else file)


def has_verb(recipe: Recipe) -> bool:
    """Return whether `zerofit NAME` starts this recipe: its file is in the project's recipes folder."""
    file = file_of(recipe).absolute()
    return file.parent == (PROJECT / "recipes").absolute() and file.stem == recipe.name


def make_command(recipe: Recipe) -> str:
    """Return the make command that trains with a recipe: "make sft", or "make launch RECIPE=my_sft.py"."""
    if has_verb(recipe):
        return f"make {recipe.name}"
    return f"make launch RECIPE={shlex.quote(str(file_of(recipe)))}"


def trainer(recipe: Recipe, file: Path | None) -> type:
    """Return the trainer class: the recipe's, or the class that its file derives from it. main() is not run.

    Args: file: the recipe's file; None: use the recipe's class itself.
    Raises: UserError for an unknown class, and as `derived_class`.
    """
    kind = _class(recipe.trainer, file, "trainer")
    return derived_class(file, kind) if file and ":" in recipe.trainer else kind


@functools.cache
def objective(recipe: Recipe, loss_type: str | None) -> "type[Objective]":
    """Return the objective class of a recipe (objective/interface.py).

    Args: loss_type: the value of --loss_type, which selects it; None if the recipe lacks the flag.
    Raises: UserError for an unknown class or an unsupported --loss_type.
    """
    file = file_of(recipe)
    for name in recipe.objectives:
        kind = _class(name, file, "objectives")
        if not kind.loss_types or loss_type is None or loss_type in kind.loss_types:
            return kind
    raise UserError(f"--loss_type {loss_type}: not supported by the objectives of {file}.")


def _class(spec: str, file: Path | None, argument: str) -> Any:
    """Return the class in a RECIPE: "module:Class", or "Class" in the same file, whose main() is not run.

    Args: argument: the field of RECIPE, for the error. Raises: UserError for an unknown class.
    """
    module, _, name = spec.rpartition(":")
    try:
        if module:
            return getattr(importlib.import_module(module), name)
        if file is None:
            raise KeyError(name)
        return _of_this_process(file, name) or _names(file)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise UserError(f"{file}: its RECIPE has {argument}={spec!r}, which cannot be found: {error}.") from None


def _of_this_process(file: Path, name: str) -> Any:
    """Return the current value of a name in a file that this process runs; None for other files."""
    main = sys.modules["__main__"]
    runs = Path(getattr(main, "__file__", None) or "").absolute() == file.absolute()
    return getattr(main, name, None) if runs else None


def derived_class(file: Path, base: type) -> type:
    """Return the class that a recipe derives from the kit's class `base`, or `base`. main() is not run.

    Raises: UserError for several derived classes, or a recipe that cannot be imported.
    """
    if not from_file(file).defines_classes:
        return base
    classes = {kind for kind in _names(file).values() if isinstance(kind, type) and issubclass(kind, base)}
    classes = {kind for kind in classes if not kind.__module__.startswith("zerofit.")}
    leaves = [kind for kind in classes if not any(other is not kind and issubclass(other, kind) for other in classes)]
    if len(leaves) > 1:
        raise UserError(f"{file}: derives {len(leaves)} classes from {base.__name__}; set trainer= in its RECIPE.")
    return leaves[0] if leaves else base


def _names(file: Path) -> dict[str, Any]:
    """Execute a recipe file without its main(), and return its names with their values."""
    if "__name__" not in file.read_text(encoding="utf-8"):
        raise UserError(f'{file}: lacks `if __name__ == "__main__":`, so that an import would start training.')
    sys.path.insert(0, str(file.parent))  # as for the program itself
    try:
        return runpy.run_path(str(file), run_name="zerofit_recipe")
    except (Exception, SystemExit) as error:
        raise UserError(f"{file}: cannot be imported: {type(error).__name__}: {error}.") from None


def file_to_restart(program: Program) -> Path:
    """Return the file of a program to start, and print a note if it has changed since it was read.

    Raises: UserError if the file is missing.
    """
    if not program.file.is_file():
        raise UserError(f"{program.file}: the program of this run is missing; restore it, then resume.")
    note_change(program.facts, from_file(program.file))
    return program.file


def note_change(was: dict, now: Program) -> None:
    """Print a note if a program differs from the recorded one or has changed."""
    before, after, file = was["sha256"], now.sha256, now.facts["file"]
    if before == after:
        return
    if was["file"] == file:
        change = f"{file} has changed since it was started (sha256 {before[:12]}, now {after[:12]})"
    else:
        change = f"{was['file']} (sha256 {before[:12]}) trained so far, {file} ({after[:12]}) from here"
    print(f"note: {change}; results may differ", flush=True)


# --- programs that this user has started ---


def remember(run: Path, flags: list[str]) -> None:
    """Record for this user that the running program trains in a run folder. flags: without secrets.

    The record is in this user's private cache, since a run folder may come from another user. If the program is unknown
    (an interactive interpreter), an older record of the folder is deleted.
    Raises: OSError, also if others can write to the cache folder.
    """
    folder = _records()
    if (program := current()) is None:
        with contextlib.suppress(FileNotFoundError):
            if user_only_folder(folder, create=False) is not None:
                (folder / _name(run)).unlink()
        return
    cache_root().mkdir(parents=True, exist_ok=True)
    if user_only_folder(folder) is None:
        raise PermissionError(13, "must be writable only by this user", str(folder))
    record = {"run": str(run.resolve()), **program.facts, "flags": flags}
    descriptor, temporary = tempfile.mkstemp(suffix=".tmp", dir=folder)  # other machines may share the folder
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(record))
        Path(temporary).replace(folder / _name(run))
    except OSError:  # a full disk
        Path(temporary).unlink()
        raise


def recall(run: Path) -> dict | None:
    """Return the record of `remember` for a run folder (file, sha256, flags); None if this user did not start it."""
    folder = _records()
    try:
        if user_only_folder(folder, create=False) is None:
            return None
        with os.fdopen(os.open(folder / _name(run), os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            record = json.loads(file.read())
        return record if record["run"] == str(run.resolve()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _records() -> Path:
    return cache_root() / f"programs-{os.geteuid()}"  # a cache may be shared


def _name(run: Path) -> str:
    return hashlib.sha256(str(run.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32] + ".json"


def recorded_program(facts: dict) -> dict | None:
    """Return "program" in facts from any user, safe to print; {} if missing or invalid.

    facts: from a run.json, a checkpoint or a saved step.
    """
    record = facts.get("program", {})
    if record is None:
        return None
    if not isinstance(record, dict) or any(type(record.get(name)) is not str for name in ("file", "sha256")):
        return {}
    return {name: one_line(record[name]) for name in ("file", "sha256")}


def for_run(run: Path, recipe: str, known: dict | None, name: str = "") -> Program:
    """Return the program with which to resume a run, and print a note if another program trained before.

    It is the program that the user names, else the one that this user started there, else the kit's recipe. A run.json
    alone never selects code, since it may come from another user.

    Args: recipe: its name in run.json; known: the result of `recorded_program`; name: from the command line.
    Raises: UserError if the program is missing or another program trained there.
    """
    record = recall(run)
    if name:
        program = start(name)
    elif record:
        program = _of_record(run, recipe, record, known)
    else:
        program = _of_kit(run, recipe, known)
    if program.recipe.name != recipe:
        raise UserError(
            f"{program.file}: is a {program.recipe} recipe, but the run in {run} uses {recipe}; {SET_RECIPE}."
        )
    if last := record if record and not _is_another(known, record) else known:
        note_change(last, program)
    return program


def _is_another(known: dict | None, record: dict) -> bool:
    return known is None or (known != {} and known["sha256"] != record["sha256"])


def _of_record(run: Path, recipe: str, record: dict, known: dict | None) -> Program:
    """Return the program that this user started in a run folder.

    Raises: UserError if it is missing, or run.json names another file, with which the run has continued elsewhere.
    """
    if _is_another(known, record) and (known is None or known["file"] != record["file"]):
        raise UserError(
            f"{run}: this user started {_described(record)}, but according to run.json {_described(known)} trained it "
            f"since: {SET_RECIPE}."
        )
    # also if the kit was in another folder when the run began
    if recipe in names() and record["sha256"] == kit_hash(recipe) == find(recipe).sha256:
        return start(recipe)
    if not Path(record["file"]).is_file():
        raise UserError(f"{run}: its program {record['file']} is missing; {SET_RECIPE}.")
    return start(record["file"])


def _of_kit(run: Path, recipe: str, known: dict | None) -> Program:
    """Return the kit's recipe for a run folder in which this user did not start a program.

    Raises: UserError if another program trained there.
    """
    program = start(recipe) if recipe in names() else None
    kit, problem = kit_hash(recipe), ""
    if program is None or program.sha256 != kit:
        problem = f"{program.file if program else recipe} is not the {recipe}.py of this zerofit"
    if known != {} and (known is None or known["sha256"] != kit):
        problem = f"it was trained by {_described(known)}, not by the {recipe}.py of this zerofit"
    if problem or program is None:
        raise UserError(
            f"{run}: {problem}, and this user did not start it; a run folder never selects code: {SET_RECIPE}."
        )
    if known == {}:
        print(f"note: {run}: the program that trained it is unknown; using {program.file}", flush=True)
    return program


def kit_hash(recipe: str) -> str | None:
    """Return the sha256 of this zerofit's file for a recipe; None if the file does not exist."""
    file = ROOT / "recipes" / f"{recipe}.py"
    return from_file(file).sha256 if NAME.fullmatch(recipe) and file.is_file() else None


def _described(facts: dict | None) -> str:
    return f"{facts['file']} (sha256 {facts['sha256'][:12]})" if facts else "a program without a file"
