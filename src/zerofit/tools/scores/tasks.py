"""Find and build tasks of lm-evaluation-harness by name, and custom tasks by folder or file."""

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
class TaskSource:
    """A task, a group or a tag that can be built."""

    name: str  # in the manager
    manager: object  # the harness's TaskManager
    file: Path | None = None  # a custom task's YAML file; None for tasks of the harness


def words(args: list[str]) -> list[str]:
    """Return the names, folders and files in --tasks, which may be separated by commas or spaces."""
    return [name for word in args for name in ([word] if _is_path(word) else word.replace(",", " ").split()) if name]


def find(names: list[str]) -> list[TaskSource]:
    """Return the tasks without duplicates. Raises: UserError for unknown names and folders or files without tasks."""
    tasks = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            tasks += _from_folder(path)
        elif path.is_file():
            tasks += _from_file(path)
        else:
            tasks += _from_harness(name)
    first = {task.name: task for task in reversed(tasks)}
    if clash := next((task for task in tasks if first[task.name].file != task.file), None):
        places = [str(task.file or "lm-evaluation-harness") for task in (first[clash.name], clash)]
        raise UserError(f"--tasks: {' and '.join(places)} both have a task {clash.name}; rename one.")
    return list(dict.fromkeys(tasks))


def build(sources: list[TaskSource], unsafe: bool) -> list:
    """Return the harness's task objects with their data loaded.

    Args: unsafe: allow tasks that run code written by the model.
    Raises: UserError for missing data or packages, and for an invalid YAML file.
    """
    built = [task for source in sources for task in _build(source)]
    if not unsafe and (
        runs_code := next((task for task in _single(built) if getattr(task, "UNSAFE_CODE", False)), None)
    ):
        raise UserError(
            f"--tasks {runs_code.task_name}: runs code written by the model on this machine; to allow it, add "
            "--confirm_run_unsafe_code and set HF_ALLOW_CODE_EVAL=1."
        )
    return built


def rows_of(built: list) -> dict[str, int]:
    """Return the number of rows of each task."""
    return {task.task_name: len(task.eval_docs) for task in _single(built)}


def _single(built: list) -> list:
    """Return all tasks, with groups replaced by their tasks."""
    tasks = (item.get_all_tasks() if hasattr(item, "get_all_tasks") else [item] for item in built)
    return list(itertools.chain.from_iterable(tasks))


# --- finding ---


def _is_path(word: str) -> bool:
    return Path(word).expanduser().exists()


@functools.cache
def _manager(folder: Path | None, defaults: bool):
    """Return a folder's task manager. Args: defaults: include the harness's 14,000 files, which takes a minute."""
    from lm_eval.tasks import TaskManager

    if defaults and distributed.rank() == 0:
        print("reading lm-evaluation-harness's task list (about a minute)", flush=True)
    return TaskManager(include_path=str(folder) if folder else None, include_defaults=defaults)


def _from_harness(name: str) -> list[TaskSource]:
    """Return the harness's tasks for a name or a pattern such as `mmlu_*`. Raises: UserError without a match."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        raise UserError(f"--tasks {name}: no such folder or file.")
    manager = _manager(None, defaults=True)
    names = manager.match_tasks([name])
    if not names:
        close = difflib.get_close_matches(name, manager.all_tasks, 1)
        hint = f"did you mean {close[0]}?" if close else "see `lm-eval ls tasks`; name custom tasks by their folder."
        raise UserError(f"--tasks {name}: unknown task of lm-evaluation-harness; {hint}")
    return [TaskSource(task, manager) for task in names]


def _from_folder(folder: Path) -> list[TaskSource]:
    """Return the groups of a folder of YAML files, and the tasks outside these groups."""
    folder = folder.resolve()
    with _index_errors(folder) as errors:
        manager = _manager(folder, defaults=False)
    if errors:
        raise UserError(f"--tasks {errors[0]}")
    index = manager.task_index
    in_groups = {name for group in manager.all_groups for name in _members(index[group].cfg)}
    names = [name for name in (*manager.all_groups, *manager.all_subtasks) if name not in in_groups]
    if not names:
        raise UserError(f"--tasks {folder}: does not contain a task, which is a file *.yaml with `task:` in it.")
    if in_groups - set(index):  # a group with tasks of the harness
        manager = _manager(folder, defaults=True)
    return [TaskSource(name, manager, Path(index[name].yaml_path)) for name in names]


def _from_file(file: Path) -> list[TaskSource]:
    file = file.resolve()
    tasks = [task for task in _from_folder(file.parent) if task.file == file]
    if not tasks:
        raise UserError(f"--tasks {file}: not a task, which is a file *.yaml with `task:` in it.")
    return tasks


def _members(group: dict) -> list[str]:
    members = group.get("task") or []
    members = [members] if isinstance(members, str) else members
    return [item if isinstance(item, str) else str(item.get("task") or item.get("group")) for item in members]


@contextlib.contextmanager
def _index_errors(folder: Path):
    """Yield a list that collects the errors which the harness's index only logs."""
    errors = []

    class ErrorHandler(logging.Handler):
        def emit(self, record):
            text = record.getMessage()
            if text.startswith("Skip ") and "Unknown config shape" not in text:  # files that others include
                file, _, why = text.removeprefix("Skip ").partition(" (")
                errors.append(f"{file}: cannot be read: {' '.join(why.rstrip(')').split())[:300]}.")
            elif text.startswith("Duplicate "):
                errors.append(f"{folder}: {' '.join(text.split())}; rename one.")

    logger, handler = logging.getLogger("lm_eval.tasks._index"), ErrorHandler()
    before, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield errors
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        logger.propagate = propagates


# --- building ---


def _build(source: TaskSource) -> list:
    """Return the objects of a task, a group, or the tasks of a tag.

    Data paths of custom tasks are relative to the YAML file's folder or to the current folder.
    """
    try:
        if source.file is None:
            return _objects(source.manager.load([source.name]), source.name)
        missing = None
        for folder in (source.file.parent, Path.cwd()):  # the harness only looks in the current folder
            with contextlib.chdir(folder):
                try:
                    return _objects(source.manager.load([source.name]), source.name)
                except FileNotFoundError as error:
                    missing = missing or error
        raise missing
    except Exception as error:
        raise _explained(source, error) from error


def _objects(loaded: dict, name: str) -> list:
    for kind in ("groups", "tasks"):
        if name in loaded.get(kind, {}):
            return [loaded[kind][name]]
    return list(loaded["tasks"].values())


def _explained(source: TaskSource, error: Exception) -> Exception:
    """Return a UserError for errors that the user can fix, otherwise the error itself."""
    place, why = f"--tasks {source.file or source.name}", first_line(error)
    if _cannot_reach(error):
        return Unavailable(
            f"{place}: its data set is not cached and the Hub is unreachable ({why}); score it once with network "
            "access and copy HF_HOME, or name a folder of custom tasks with local data."
        )
    if isinstance(error, ImportError):
        return UserError(
            f"{place}: a required package is missing ({why}); `pip install 'lm_eval[tasks]'` installs the packages of "
            "all tasks."
        )
    if isinstance(error, FileNotFoundError) and source.file:
        return UserError(f"{place}: its data is missing: {why}; paths are relative to the YAML file's folder.")
    if source.file or isinstance(error, OSError):  # e.g. a gated or moved data set
        return UserError(f"{place}: lm-evaluation-harness cannot build it: {type(error).__name__}: {why}.")
    return error


def _cannot_reach(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__name__ in _OFFLINE:
            return True
        error = error.__cause__ or error.__context__
    return False
