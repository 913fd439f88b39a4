"""Read and write the run folder: run.json, logs, metrics.jsonl, result.json."""

import contextlib
import errno
import itertools
import json
import os
import platform
import stat
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from zerofit import __version__
from zerofit.base import command_line, distributed, paths
from zerofit.base.errors import UserError, printable
from zerofit.base.paths import IN_WHEEL, LONGEST_NAME, LONGEST_PATH, PROJECT, nearest_existing
from zerofit.job import run_lock
from zerofit.job.settings import Settings, as_typed

METRICS = "metrics.jsonl"

MAX_INNER_PATH = 128  # most bytes of a path within the run folder: .saving/rank100/checkpoint-.../global_step.../...

# Kinds of values in the files of a run. FINITE: below 2^63; NUMBER: also nan and infinity, as in losses.
TEXT, INTEGER, FINITE, NUMBER = "text", "an integer", "a finite number", "a number"

PREFERENCES = ("pairs", "labeled")  # objectives with chosen and rejected answers

SCORES = ("exact_match", "preference_accuracy", "label_accuracy")  # metrics of bundled tasks, before and after training

_BYTES_BY_PHASE = {...: {...: FINITE}}  # phase -> part -> bytes

NEXT_START = "next.json"  # changes for the next start after out of memory (checkpoint/restart.py)

# The values that readers of a run folder rely on, by file: the kind of a value, [shape] for the items of an array, or
# {name: shape} with `...` for other names. Values may be missing; folders from other users may contain anything.
RECORDS = {
    "run.json": {
        **dict.fromkeys(("recipe", "started", "device", "command", "typed", "git_commit"), TEXT),
        "stretches": [{"typed": TEXT, "command": TEXT, "started": TEXT, "from_step": INTEGER, "to_step": INTEGER}],
        "world_size": INTEGER, "total_steps": INTEGER, "owners": {...: FINITE},
        "decisions": [TEXT], "slow_ranks": [TEXT], "versions": {...: TEXT}, "started_by": [TEXT],
        "arguments": {...: {"source": TEXT}},
        "data": {...: {}},
        "plan": {"peak": _BYTES_BY_PHASE, "limit_bytes": FINITE, "tokens_per_second": FINITE, "steps": INTEGER},
    },
    "result.json": {
        **dict.fromkeys(("status", "error", "peak_memory_of"), TEXT),
        **dict.fromkeys(("steps", "parameters", "trainable_parameters"), INTEGER),
        **dict.fromkeys(("tokens_per_second", "peak_memory_bytes", "train_seconds"), FINITE),
        **dict.fromkeys(("train_loss", "last_loss", "eval_loss"), NUMBER),
        **dict.fromkeys([f"{name}_{when}" for name in SCORES for when in ("before", "after")], NUMBER),
        "samples": [{}],
    },
    "report.json": {
        **dict.fromkeys(("status", "cause", "try"), TEXT),
        "attempts": [dict.fromkeys(("kind", "sentence", "what_next"), TEXT)],
    },
    "memory.json": {"peak": _BYTES_BY_PHASE},
    "scores.json": {"evaluations": [{
        "weights": TEXT, "limit": FINITE, "num_fewshot": INTEGER,
        "scores": {...: {...: {...: {"value": NUMBER, "stderr": NUMBER, "rows": INTEGER}}}},
    }]},
    "step.json": {"recipe": TEXT, "flags": [TEXT], "world_size": INTEGER, "rows": [[[INTEGER]]], "texts": {...: TEXT}},
    NEXT_START: {"started_by": [TEXT], "change": TEXT, "decided": {}},
    "slurm.json": {"job_id": TEXT, "cluster": TEXT, "jobs": INTEGER},
}  # fmt: skip

_METRIC = {
    "step": INTEGER, "peak_memory_bytes": FINITE,
    **dict.fromkeys(("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second"), NUMBER),
    **dict.fromkeys((f"{on}rewards/{what}" for on in ("", "eval_") for what in
                     ("chosen", "rejected", "margins", "accuracies")), NUMBER),
}  # fmt: skip

_INVALID = "the file is damaged: restore or fix it"

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets")


def claim_folder(settings: Settings) -> None:
    """Choose the run folder and lock it for this process, before checking whether it contains a run.

    Jobs that start in the same second without --output_dir get different folders.
    Raises: UserError if another process trains in the folder.
    """
    first, is_named = name_folder(settings), bool(settings.output_dir)
    _check_writable(first)
    run_lock.refuse_links(first, is_pushed=bool(settings.push_to_hub))
    for number in itertools.count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with contextlib.nullcontext() if is_named else contextlib.suppress(FileExistsError):
            run_lock.take(folder, must_be_new=not is_named)
            settings.output_dir = str(folder)
            return


def check_folder(folder: Path, resumes: bool) -> None:
    """Raise UserError if the run folder is not writable, or contains a run that is not resumed."""
    _check_writable(folder)
    if (folder / "run.json").exists() and not resumes:
        raise UserError(
            f"--output_dir {folder}: already holds a run; use another folder (OUT=...), or continue it with "
            "--resume_from_checkpoint."
        )


def name_folder(settings: Settings) -> Path:
    """Return --output_dir or its default, without checks."""
    return Path(settings.output_dir or default_name(settings.recipe)).expanduser()


def default_name(recipe) -> Path:
    """Return runs/<recipe>-<time>."""
    return Path("runs") / f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_name(folder: Path) -> None:
    """Raise UserError for a folder name with which saving a model would fail."""
    encoded = os.fsencode(folder.absolute())
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"--output_dir {folder}: is not UTF-8, which safetensors requires; use another folder, or start in a UTF-8 "
            "locale."
        ) from None
    if len(encoded) + MAX_INNER_PATH > LONGEST_PATH or any(len(part) > LONGEST_NAME for part in encoded.split(b"/")):
        raise UserError(
            f"--output_dir {str(folder)[:80]}...: is too long for a file system ({LONGEST_NAME} bytes per name, "
            f"{LONGEST_PATH} per path including the files of a checkpoint); use another folder."
        )


def _check_writable(folder: Path) -> None:
    check_name(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder}: is a file; use a folder.")
    parent = nearest_existing(folder)
    try:
        tempfile.TemporaryFile(dir=parent).close()  # permission bits are not enough: /proc rejects files
    except OSError as error:
        raise UserError(f"--output_dir {folder}: {parent} cannot be written to: {error.strerror}.") from None


def apply_umask(folder: Path) -> None:
    """Apply the umask to the files of a folder, which safetensors creates with mode 0600; links are not followed."""
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.rglob("*"):
        if not file.is_symlink() and file.is_file() and stat.S_IMODE(file.stat().st_mode) == 0o600:
            file.chmod(0o666 & ~mask)


def checkpoints(folder: Path) -> dict[int, Path]:
    """Return {step: checkpoint-<step>} of a run folder by step, including incomplete ones."""
    return by_step(folder, "checkpoint")


def by_step(folder: Path, name: str) -> dict[int, Path]:
    """Return {step: <name>-<step>} for the entries of a folder, by step."""
    steps = {f.name.removeprefix(f"{name}-"): f for f in folder.glob(f"{name}-*")}
    return {int(step): steps[step] for step in sorted(filter(str.isdecimal, steps), key=int)}


def open_folder(settings: Settings) -> Path:
    """Create the run folder and send this rank's output to logs/rank<r>.log; rank 0 also prints to the terminal."""
    folder = Path(settings.output_dir)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    log = paths.appending(folder / "logs" / f"rank{distributed.rank()}.log")
    if distributed.rank() == 0:
        sys.stdout, sys.stderr = _Tee(sys.stdout, log), _Tee(sys.stderr, log)
    else:
        _speak_up_on_crash(str(log.name))
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return folder


def keep_metrics(folder: Path, step: int) -> None:
    """Drop the lines of metrics.jsonl after this step, which will be written again."""
    metrics = folder / METRICS
    if not metrics.exists():
        return
    kept = itertools.takewhile(lambda entry: entry["step"] <= step, read_metrics(folder))
    paths.write_text(metrics, "".join(json.dumps(entry) + "\n" for entry in kept))


def set_aside_result(folder: Path) -> None:
    """Rename the result.json of a finished run that continues, so that it does not count as finished."""
    if finished(folder):
        steps = read_json(folder / "result.json").get("steps")
        (folder / "result.json").rename(folder / f"result-after-step-{steps}.json")


def read_metrics(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl up to the first incomplete one (of a killed run); [] without the file.

    Raises: UserError for an invalid line.
    """
    file, entries = folder / METRICS, []
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n") if file.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):
            break
        _check(f"{file}:{number}", entries[-1], _METRIC)
        _check(f"{file}:{number}: step", entries[-1].get("step"), INTEGER)
    return entries


def read_json(file: Path) -> dict:
    """Return the JSON object in a file of the run folder; {} if the file is missing or damaged."""
    try:  # a pipe may never end
        value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_record(file: Path) -> dict:
    """Read a file of RECORDS like `read_json` and check it. Raises: UserError for invalid values."""
    value = {name: inner for name, inner in read_json(file).items() if inner is not None}
    _check(str(file), value, RECORDS[file.name])
    return value


def _check(place: str, value, shape) -> None:
    """Raise UserError if a value does not have a shape of RECORDS."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise UserError(f"{place}: must be an object; {_INVALID}")
        for name, inner in value.items():
            inner_shape = shape.get(name, shape.get(...))
            may_be_null = name in shape and isinstance(inner_shape, str)
            if inner_shape is not None and not (inner is None and may_be_null):
                _check(f"{place}: {name}", inner, inner_shape)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise UserError(f"{place}: must be an array; {_INVALID}")
        for number, inner in enumerate(value):
            _check(f"{place}[{number}]", inner, shape[0])
    elif not _is(value, shape):
        raise UserError(f"{place}: must be {shape}; {_INVALID}")


def _is(value, kind: str) -> bool:
    if kind == TEXT:
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if kind == INTEGER else int | float):
        return False
    return abs(value) < 2**63 or (kind == NUMBER and isinstance(value, float))


class _Tee:
    """A stream that writes to the log and to the terminal, above the progress bar if there is one."""

    bar = None  # shared by stdout and stderr
    at_line_start = True

    def __init__(self, terminal, log):
        self.terminal, self.log = terminal, log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a full disk must not affect the terminal
            self.log.write(text)
        with self._may_be_gone():
            if _Tee.bar is None or not text:
                return self.terminal.write(text)
            if _Tee.at_line_start:
                _Tee.bar.clear()
            self.terminal.write(text)
            _Tee.at_line_start = text.endswith("\n")  # print() writes a line and its end separately
            if _Tee.at_line_start:
                self.terminal.flush()
                _Tee.bar.refresh()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.log.flush()
        with self._may_be_gone():
            self.terminal.flush()

    @contextlib.contextmanager
    def _may_be_gone(self):
        """Continue with only the log after the terminal or the reader of a pipe is closed."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.terminal.fileno())

    def __getattr__(self, name):
        return getattr(self.terminal, name)


def opened() -> Path | None:
    """Return the run folder that this process, rank 0, has opened; None on other ranks and before."""
    return Path(sys.stdout.log.name).parents[1] if isinstance(sys.stdout, _Tee) else None


def keep_below(bar) -> None:
    """Keep a tqdm bar below all further lines of this process; None: no longer."""
    _Tee.bar, _Tee.at_line_start = bar, True


def terminal():
    """Return the real stderr, without the log."""
    return getattr(sys.stderr, "terminal", sys.stderr)


def finished(folder: str | Path) -> bool:
    """Return whether the folder's result.json has the status "finished"."""
    return read_json(Path(folder) / "result.json").get("status") == "finished"


def _speak_up_on_crash(log: str) -> None:
    """Print a line on the terminal if this rank, whose output is in its log, crashes."""
    terminal = os.fdopen(os.dup(2), "w")
    before = sys.excepthook

    def hook(kind, error, traceback):
        with contextlib.suppress(OSError):  # the terminal is closed
            print(
                f"zerofit: rank {distributed.rank()} failed: {kind.__name__}: {error}; see {log}",
                file=terminal,
                flush=True,
            )
        before(kind, error, traceback)

    sys.excepthook = hook


def write_json(path: Path, value: dict) -> None:
    """Write a JSON file atomically and flush it to the disk."""
    with paths.replacing(path, sync=True) as file:
        file.write((json.dumps(value, indent=2, default=str) + "\n").encode())


def git_commit() -> str | None:
    """Return the commit of the project; None outside of a repository."""
    if PROJECT == IN_WHEEL:  # the environment may be inside another repository
        return None
    try:
        result = subprocess.run(
            ["git", "-C", str(PROJECT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:  # git is not installed
        return None
    return result.stdout.strip() or None


def format_value(name: str, value) -> str:
    """Format the value of an argument for printing; hide secrets."""
    if name == "warmup_steps" and 0 < float(value or 0) < 1:
        return f"{value} of all steps"
    return "<hidden>" if name.endswith("_token") and value else as_typed(name, value)


def trained_on_preferences(facts: dict) -> bool:
    """Return whether a run trained on preferences. facts: its run.json, which in old runs lacks the objective."""
    return facts.get("objective", "pairs" if "loss_type" in facts.get("arguments", {}) else "") in PREFERENCES


def write_run(settings: Settings, command: str, facts: dict) -> None:
    """Write run.json: all arguments with sources, decisions, versions, commit, data and command.

    Args: command: as typed, secrets hidden.
    """
    import torch

    write_json(
        Path(settings.output_dir) / "run.json",
        {
            "recipe": settings.recipe.name,
            "objective": settings.objective.name,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": command,
            "flags": command_line.without_secrets(settings.request.flags()),
            "world_size": settings.world_size,
            "device": "cpu" if settings.use_cpu else torch.cuda.get_device_name(),
            "machine": platform.platform(),
            "versions": {"zerofit": __version__, "python": platform.python_version()}
            | {name: metadata.version(name) for name in PACKAGES},
            "git_commit": git_commit(),
            "decisions": settings.decisions,
            "arguments": {
                name: {
                    "value": format_value(name, value) if name.endswith("_token") else value,
                    "source": settings.source[name],
                }
                for name, value in sorted(settings.written().items())
            },
            **facts,
        },
    )


def add_to_run(folder: Path, name: str, values: list) -> None:
    """Append values to a list in run.json, which may be missing."""
    facts = read_json(folder / "run.json")
    write_json(folder / "run.json", facts | {name: facts.get(name, []) + values})


def put_into_run(folder: Path, facts: dict) -> None:
    """Add facts to run.json."""
    write_json(folder / "run.json", read_json(folder / "run.json") | facts)


def save_figure(figure, target: Path) -> None:
    """Lay out a figure, write it as PNG and close it."""
    from matplotlib import pyplot as plt

    without_formulas(figure)
    figure.tight_layout()
    with paths.replacing(target) as file:
        figure.savefig(file, format="png")
    plt.close(figure)


def without_formulas(figure) -> None:
    """Disable TeX in a figure: matplotlib would parse text between two `$`, which names may contain."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_text(printable(text.get_text()))
