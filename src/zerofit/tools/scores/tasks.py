"""Find tasks of lm-evaluation-harness, its own by name and a user's by folder or file, and build them."""

import contextlib
import difflib
import functools
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path

from zerofit.base import distributed
from zerofit.base.errors import Unavailable, UserError, first_line

_OFFLINE = ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectTimeout", "ConnectionError")


@dataclass(frozen=True)
class Found:
    """A task, a group or a tag that can be built."""

    name: str  # in the manager
    manager: object  # the harness's TaskManager that knows it
    file: Path | None = None  # the user's YAML file; None for the harness's own


def words(given: list[str]) -> list[str]:
    """Return the names, folders and files in the words of --tasks, which may have commas or spaces between them."""
    return [name for word in given for name in ([word] if _is_path(word) else word.replace(",", " ").split()) if name]


def find(names: list[str]) -> list[Found]:
    """Return the tasks, each once. Raises: UserError for a name that is none, and a folder or file without tasks."""
    found = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            found += _of_folder(path)
        elif path.is_file():
            found += _of_file(path)
        else:
            found += _own(name)
    first = {one.name: one for one in reversed(found)}
    if clash := next((one for one in found if first[one.name].file != one.file), None):
        places = [str(one.file or "lm-evaluation-harness") for one in (first[clash.name], clash)]
        raise UserError(f"--tasks: {' and '.join(places)} both have a task {clash.name}; rename one.")
    return list(dict.fromkeys(found))


def build(found: list[Found], unsafe: bool) -> list:
    """Return the harness's objects of the tasks, their data loaded.

    Args: unsafe: tasks that run code which the model writes are allowed.
    Raises: UserError for data or packages that are not there, and a user's YAML file that the harness refuses.
    """
    built = [thing for one in found for thing in _build(one)]
    if not unsafe and (
        runs_code := next((task for task in _single(built) if getattr(task, "UNSAFE_CODE", False)), None)
    ):
        raise UserError(
            f"--tasks {runs_code.task_name}: runs the code that the model writes, on this machine; if it may, add "
            "--confirm_run_unsafe_code and set HF_ALLOW_CODE_EVAL=1."
        )
    return built


def rows_of(built: list) -> dict[str, int]:
    """Return the number of rows of each task."""
    return {task.task_name: len(task.eval_docs) for task in _single(built)}


def _single(built: list) -> list:
    """Return the tasks, those of groups too."""
    each = (thing.get_all_tasks() if hasattr(thing, "get_all_tasks") else [thing] for thing in built)
    return list(itertools.chain.from_iterable(each))


# --- finding ---


def _is_path(word: str) -> bool:
    return Path(word).expanduser().exists()


@functools.cache
def _manager(folder: Path | None, own: bool):
    """Return the manager of a folder's tasks. Args: own: with the harness's own, whose 14,000 files take a minute."""
    from lm_eval.tasks import TaskManager

    if own and distributed.rank() == 0:
        print("reading the list of lm-evaluation-harness's tasks (about a minute)", flush=True)
    return TaskManager(include_path=str(folder) if folder else None, include_defaults=own)


def _own(name: str) -> list[Found]:
    """Return the tasks of a name, or of a pattern such as `mmlu_*`. Raises: UserError if there is none."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        raise UserError(f"--tasks {name}: no such folder or file.")
    manager = _manager(None, own=True)
    names = manager.match_tasks([name])
    if not names:
        close = difflib.get_close_matches(name, manager.all_tasks, 1)
        hint = f"did you mean {close[0]}?" if close else "`lm-eval ls tasks` lists them; own ones are named by folder."
        raise UserError(f"--tasks {name}: lm-evaluation-harness has no such task; {hint}")
    return [Found(one, manager) for one in names]


def _of_folder(folder: Path) -> list[Found]:
    """Return the tasks and groups of a folder of YAML files, without the tasks that stand in one of its groups."""
    folder = folder.resolve()
    with _refused(folder) as refused:
        manager = _manager(folder, own=False)
    if refused:
        raise UserError(f"--tasks {refused[0]}")
    index = manager.task_index
    in_groups = {name for group in manager.all_groups for name in _members(index[group].cfg)}
    names = [name for name in (*manager.all_groups, *manager.all_subtasks) if name not in in_groups]
    if not names:
        raise UserError(f"--tasks {folder}: holds no task of lm-evaluation-harness, a file *.yaml with `task:` in it.")
    if in_groups - set(index):  # a group of the harness's own tasks
        manager = _manager(folder, own=True)
    return [Found(name, manager, Path(index[name].yaml_path)) for name in names]


def _of_file(file: Path) -> list[Found]:
    file = file.resolve()
    found = [one for one in _of_folder(file.parent) if one.file == file]
    if not found:
        raise UserError(f"--tasks {file}: is no task of lm-evaluation-harness, a file *.yaml with `task:` in it.")
    return found


def _members(group: dict) -> list[str]:
    members = group.get("task") or []
    each = [members] if isinstance(members, str) else members
    return [one if isinstance(one, str) else str(one.get("task") or one.get("group")) for one in each]


@contextlib.contextmanager
def _refused(folder: Path):
    """Yield a list that gets what the harness's index says of files that it passes over, which it only logs."""
    said = []

    class Listens(logging.Handler):
        def emit(self, record):
            text = record.getMessage()
            if text.startswith("Skip ") and "Unknown config shape" not in text:  # files that others include
                file, _, why = text.removeprefix("Skip ").partition(" (")
                said.append(f"{file}: cannot be read: {' '.join(why.rstrip(')').split())[:300]}.")
            elif text.startswith("Duplicate "):
                said.append(f"{folder}: {' '.join(text.split())}; rename one.")

    logger, listens = logging.getLogger("lm_eval.tasks._index"), Listens()
    before, propagates = logger.level, logger.propagate
    logger.addHandler(listens)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.removeHandler(listens)
        logger.setLevel(before)
        logger.propagate = propagates


# --- building ---


def _build(one: Found) -> list:
    """Return the objects of a task, a group, or the tasks of a tag.

    Paths of a user's data count from the YAML file's folder, else from where the command was typed: the harness takes
    them as `datasets` does, from the current one.
    """
    try:
        if one.file is None:
            return _objects(one.manager.load([one.name]), one.name)
        missing = None
        for place in (one.file.parent, Path.cwd()):
            with contextlib.chdir(place):
                try:
                    return _objects(one.manager.load([one.name]), one.name)
                except FileNotFoundError as error:
                    missing = missing or error
        raise missing
    except Exception as error:
        raise _explained(one, error) from error


def _objects(loaded: dict, name: str) -> list:
    for kind in ("groups", "tasks"):
        if name in loaded.get(kind, {}):
            return [loaded[kind][name]]
    return list(loaded["tasks"].values())


def _explained(one: Found, error: Exception) -> Exception:
    """Return the UserError of what a user can mend, else the error itself."""
    place, why = f"--tasks {one.file or one.name}", first_line(error)
    if _cannot_reach(error):
        return Unavailable(
            f"{place}: its data set is not in the cache and the Hub cannot be reached ({why}); score it once where "
            "there is a network and bring HF_HOME along, or name a folder of own tasks with local data."
        )
    if isinstance(error, ImportError):
        return UserError(
            f"{place}: needs a package that is not installed ({why}); `pip install 'lm_eval[tasks]'` brings those of "
            "all tasks."
        )
    if isinstance(error, FileNotFoundError) and one.file:
        return UserError(f"{place}: its data is not there: {why}; paths count from the YAML file's folder.")
    if one.file or isinstance(error, OSError):  # a gated data set, one that has moved
        return UserError(f"{place}: lm-evaluation-harness cannot build it: {type(error).__name__}: {why}.")
    return error


def _cannot_reach(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__name__ in _OFFLINE:
            return True
        error = error.__cause__ or error.__context__
    return False
