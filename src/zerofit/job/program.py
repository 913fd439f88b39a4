"""Identify the program of a run, a recipe's file, and remember for this user what started in which run folder."""

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
from zerofit.base.paths import PROJECT, ROOT, cache_root, own_folder
from zerofit.job.recipe import NAME, Recipe, assignment, read

if TYPE_CHECKING:
    from zerofit.objective.interface import Objective

DEFAULT = "sft"  # the recipe of a verb whose command line names none

NAME_IT = "name the program with --recipe FILE (`make resume RUN=... RECIPE=FILE`)"


@dataclass(frozen=True)
class Program:
    """A recipe's file, which is executed only when its RECIPE is asked for."""

    file: Path  # as it was named
    sha256: str  # of its bytes, without the modules that it imports
    defines_classes: bool  # it has a class statement
    content: bytes = field(repr=False, compare=False)

    @functools.cached_property
    def recipe(self) -> Recipe:
        """Return the file's RECIPE. Raises: as `recipe.read`."""
        own = _of_this_process(self.file, "RECIPE")
        if isinstance(own, Recipe):
            return own
        return read(self.file, self.content)

    @property
    def in_project(self) -> str:
        """Return the file's path from the project, the working directory of a container's image; else its whole path.

        Either may have been reached by links.
        """
        file, project = self.file.resolve(), PROJECT.resolve()
        return str(file.relative_to(project) if file.is_relative_to(project) else self.file.absolute())

    @property
    def facts(self) -> dict[str, str]:
        """Return what run.json and checkpoints record of it."""
        return {"file": str(self.file.absolute()), "sha256": self.sha256}


_started: Program | None = None  # by this process, which is no program of its own but starts one, e.g. `zerofit launch`


def of(file: Path) -> Program:
    """Return the program in a file, which is read and not run.

    Raises: UserError for a file that is no recipe.
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
        raise UserError(f"{file}: is no recipe: it has no `RECIPE = Recipe(...)` at its top; copy a file of recipes/.")
    classes = any(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
    return Program(file, hashlib.sha256(content).hexdigest(), classes, content)


@functools.cache
def kit() -> dict[str, Recipe]:
    """Return the recipes that came with this zerofit by name, and what is added to them in a checkout.

    Those of the project, the folder in which a command is typed, are executed only where the user names them.
    """
    recipes = {}
    for file in sorted((ROOT / "recipes").glob("*.py")):
        with contextlib.suppress(UserError):  # it is reported where it is named
            recipe = of(file).recipe
            recipes[recipe.name] = recipe
    return recipes


def recipe_of(named: Recipe | str) -> Recipe:
    """Return a recipe, or that of this name: of the program that this process runs or starts, else of the kit.

    Raises: UserError for a name that there is not.
    """
    if isinstance(named, Recipe):
        return named
    if running := _running(named):
        return running.recipe
    if named not in kit():
        raise UserError(f"{named}: no such recipe; there are {', '.join(kit())}, or name a .py file of your own.")
    return kit()[named]


def names() -> list[str]:
    """Return the names of the files in the project's recipes folder."""
    return sorted(file.stem for file in (PROJECT / "recipes").glob("*.py"))


def find(named: str) -> Program:
    """Return the program that a command line names: a file, one of the project's, or a name such as sft.

    Raises: UserError for a file that is not there or is no recipe.
    """
    if named.endswith(".py"):
        files = [Path(named).expanduser(), PROJECT / named]
    else:
        files = [PROJECT / "recipes" / f"{named}.py"] if named.isidentifier() else []
    for file in files:
        if file.is_file():
            return of(file)
    raise UserError(
        f"{named}: no such recipe; there are {', '.join(names())}, or name a recipe's .py file of your own."
    )


def start(named: str) -> Program:
    """Return the program that a command line names, as the one that this process starts."""
    global _started
    _started = find(named)
    return _started


def current() -> Program | None:
    """Return the program that this process runs or starts; None if neither is a recipe's file."""
    return _of_main(getattr(sys.modules["__main__"], "__file__", None)) or _started


def _running(name: str) -> Program | None:
    """Return the program that this process runs or starts if its recipe has this name."""
    running = current()
    return running if running is not None and running.recipe.name == name else None


@functools.cache  # read once: the file may be edited while it trains
def _of_main(file: str | None) -> Program | None:
    with contextlib.suppress(UserError):
        return of(Path(file).absolute()) if file else None
    return None


def file_of(recipe: Recipe) -> Path:
    """Return the file that this process runs or starts, if it is this recipe's; else the project's."""
    running = _running(recipe.name)
    return running.file if running else PROJECT / "recipes" / f"{recipe.name}.py"


def if_not_of_kit(recipe: Recipe) -> Program | None:
    """Return the program with which another process goes on as this one; None for an unchanged recipe of the kit."""
    program = _running(recipe.name) or of(file_of(recipe))
    return None if program.sha256 == kit_hash(recipe.name) else program


def shown(recipe: Recipe) -> str:
    """Return a recipe's file as sentences name it: "recipes/sft.py", or the path of a file outside the project."""
    file, project = file_of(recipe).absolute(), PROJECT.absolute()
    return str(file.relative_to(project) if file.is_relative_to(project) else file)


def has_verb(recipe: Recipe) -> bool:
    """Return whether `zerofit NAME` starts this recipe, as it does for the files of the project's recipes folder."""
    file = file_of(recipe).absolute()
    return file.parent == (PROJECT / "recipes").absolute() and file.stem == recipe.name


def make(recipe: Recipe) -> str:
    """Return the verb of make that trains with a recipe: "make sft", or "make launch RECIPE=my_sft.py"."""
    if has_verb(recipe):
        return f"make {recipe.name}"
    return f"make launch RECIPE={shlex.quote(str(file_of(recipe)))}"


def trainer(recipe: Recipe, file: Path | None) -> type:
    """Return the class that trains: the recipe's, or the one that its file derives from it; main() is not run.

    Args: file: the recipe's; None: the recipe's class itself.
    Raises: UserError for a class that there is not, and as `own_class`.
    """
    kind = _class(recipe.trainer, file, "trainer")
    return own_class(file, kind) if file and ":" in recipe.trainer else kind


@functools.cache
def objective(recipe: Recipe, loss_type: str | None) -> "type[Objective]":
    """Return the class of what a recipe trains on (objective/interface.py).

    Args: loss_type: the value of --loss_type, which selects it; None: the recipe has no such flag.
    Raises: UserError for a class that there is not, or a --loss_type that none of them has.
    """
    file = file_of(recipe)
    for named in recipe.objectives:
        kind = _class(named, file, "objectives")
        if not kind.loss_types or loss_type is None or loss_type in kind.loss_types:
            return kind
    raise UserError(f"--loss_type {loss_type}: none of the objectives of {file} has it.")


def _class(named: str, file: Path | None, argument: str) -> Any:
    """Return the class that a RECIPE names: "module:Class", or "Class" of its own file, whose main() is not run.

    Args: argument: of the RECIPE, for the error. Raises: UserError for a class that there is not.
    """
    module, _, name = named.rpartition(":")
    try:
        if module:
            return getattr(importlib.import_module(module), name)
        if file is None:
            raise KeyError(name)
        return _of_this_process(file, name) or _names(file)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise UserError(f"{file}: its RECIPE has {argument}={named!r}, which cannot be found: {error}.") from None


def _of_this_process(file: Path, name: str) -> Any:
    """Return what a file has defined by a name so far if this process runs it; None otherwise."""
    main = sys.modules["__main__"]
    runs = Path(getattr(main, "__file__", None) or "").absolute() == file.absolute()
    return getattr(main, name, None) if runs else None


def own_class(file: Path, base: type) -> type:
    """Return the one class that a recipe derives from the kit's class `base`, or `base`; its main() is not run.

    Raises: UserError for several, or a recipe that cannot be imported.
    """
    if not of(file).defines_classes:
        return base
    named = {kind for kind in _names(file).values() if isinstance(kind, type) and issubclass(kind, base)}
    named = {kind for kind in named if not kind.__module__.startswith("zerofit.")}
    own = [kind for kind in named if not any(other is not kind and issubclass(other, kind) for other in named)]
    if len(own) > 1:
        raise UserError(f"{file}: derives {len(own)} classes from {base.__name__}, and nothing says which one it uses.")
    return own[0] if own else base


def _names(file: Path) -> dict[str, Any]:
    """Return what a recipe's file defines, by name, having executed it without its main()."""
    if "__name__" not in file.read_text(encoding="utf-8"):
        raise UserError(f'{file}: has no `if __name__ == "__main__":`, so that an import would train.')
    sys.path.insert(0, str(file.parent))  # as for the program itself
    try:
        return runpy.run_path(str(file), run_name="zerofit_recipe")
    except (Exception, SystemExit) as error:
        raise UserError(f"{file}: cannot be imported: {type(error).__name__}: {error}.") from None


def again(program: Program) -> Path:
    """Return the file of a program that is to be started, with a note if it has changed since it was first read.

    Raises: UserError if it is gone.
    """
    if not program.file.is_file():
        raise UserError(f"{program.file}: the program of this run is no longer there; put it back, then resume.")
    note_change(program.facts, of(program.file))
    return program.file


def note_change(was: dict, now: Program) -> None:
    """Print a line if a program is another one than that of these facts, or has changed."""
    before, after, file = was["sha256"], now.sha256, now.facts["file"]
    if before == after:
        return
    if was["file"] == file:
        said = f"{file} has changed since it was started (sha256 {before[:12]}, now {after[:12]})"
    else:
        said = f"{was['file']} (sha256 {before[:12]}) trained so far, {file} ({after[:12]}) from here on"
    print(f"note: {said}; what it computes may differ", flush=True)


# --- what this user has started ---


def remember(run: Path, flags: list[str]) -> None:
    """Record for this user that the running program trains into a run folder. flags: its command line, no secrets.

    The record is in this user's cache, where nobody else writes: a run folder may come from somebody else.
    Where none is known (an interpreter's own lines), an older record of the folder is deleted.
    Raises: OSError, also where others can write to the cache's folder.
    """
    folder = _records()
    if (program := current()) is None:
        with contextlib.suppress(FileNotFoundError):
            if own_folder(folder, make=False) is not None:
                (folder / _name(run)).unlink()
        return
    cache_root().mkdir(parents=True, exist_ok=True)
    if own_folder(folder) is None:
        raise PermissionError(13, "is not a folder of this user alone", str(folder))
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
    """Return what `remember` recorded of a run folder: file, sha256 and flags; None if this user has not started it."""
    folder = _records()
    try:
        if own_folder(folder, make=False) is None:
            return None
        with os.fdopen(os.open(folder / _name(run), os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.geteuid() or about.st_mode & 0o022:
                return None
            record = json.loads(file.read())
        return record if record["run"] == str(run.resolve()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _records() -> Path:
    return cache_root() / f"programs-{os.geteuid()}"  # a cache may be shared


def _name(run: Path) -> str:
    return hashlib.sha256(str(run.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:32] + ".json"


def said_by(facts: dict) -> dict | None:
    """Return the "program" of facts that may be somebody else's, to be printed: {} where it has none or no valid one.

    facts: of a run.json, a checkpoint or a kept step.
    """
    said = facts.get("program", {})
    if said is None:
        return None
    if not isinstance(said, dict) or any(type(said.get(name)) is not str for name in ("file", "sha256")):
        return {}
    return {name: one_line(said[name]) for name in ("file", "sha256")}


def of_run(run: Path, recipe: str, known: dict | None, named: str = "") -> Program:
    """Return the program to go on with in a run folder, and note if it is not the one that trained there.

    It is the one that this user names, else the one that this user has started there, else the kit's own recipe: a
    run.json alone, which may be somebody else's, never chooses code.

    Args: recipe: run.json's; known: what `said_by` returns of it; named: on the command line.
    Raises: UserError if the program is gone, or another one than this has trained there.
    """
    record = recall(run)
    if named:
        program = start(named)
    elif record:
        program = _of_record(run, recipe, record, known)
    else:
        program = _of_kit(run, recipe, known)
    if program.recipe.name != recipe:
        raise UserError(
            f"{program.file}: takes the arguments of {program.recipe}, the run in {run} those of {recipe}; {NAME_IT}."
        )
    if last := record if record and not _is_another(known, record) else known:
        note_change(last, program)
    return program


def _is_another(known: dict | None, record: dict) -> bool:
    return known is None or (known != {} and known["sha256"] != record["sha256"])


def _of_record(run: Path, recipe: str, record: dict, known: dict | None) -> Program:
    """Return the program that this user has started in a run folder.

    Raises: UserError if it is gone, or run.json names another file: it has gone on elsewhere since.
    """
    if _is_another(known, record) and (known is None or known["file"] != record["file"]):
        raise UserError(
            f"{run}: this user started {_described(record)} there, but its run.json says that {_described(known)} has "
            f"trained it since: {NAME_IT}."
        )
    # wherever this kit was when the run began
    if recipe in names() and record["sha256"] == kit_hash(recipe) == find(recipe).sha256:
        return start(recipe)
    if not Path(record["file"]).is_file():
        raise UserError(f"{run}: its program {record['file']} is no longer there; {NAME_IT}.")
    return start(record["file"])


def _of_kit(run: Path, recipe: str, known: dict | None) -> Program:
    """Return the kit's recipe for a run folder in which this user has started nothing.

    Raises: UserError if another program has trained there.
    """
    program = start(recipe) if recipe in names() else None
    kit, problem = kit_hash(recipe), ""
    if program is None or program.sha256 != kit:
        problem = f"{program.file if program else recipe} is not the {recipe}.py of this zerofit"
    if known != {} and (known is None or known["sha256"] != kit):
        problem = f"it was trained by {_described(known)}, not by the {recipe}.py of this zerofit"
    if problem or program is None:
        raise UserError(
            f"{run}: {problem}, and this user has not started it; a run folder does not choose what runs: {NAME_IT}."
        )
    if known == {}:
        print(f"note: {run}: nothing in it says which program trained it; {program.file} is taken", flush=True)
    return program


def kit_hash(recipe: str) -> str | None:
    """Return the sha256 of this zerofit's own file of a recipe's name; None without one."""
    file = ROOT / "recipes" / f"{recipe}.py"
    return of(file).sha256 if NAME.fullmatch(recipe) and file.is_file() else None


def _described(facts: dict | None) -> str:
    return f"{facts['file']} (sha256 {facts['sha256'][:12]})" if facts else "a program without a file"
