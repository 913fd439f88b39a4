"""Rows out of files and hub data sets, each with the place (file:line) that an error can name."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from . import hub
from .errors import UserError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
EVAL_NAMES = ("eval", "validation", "valid", "val", "dev", "test")

Row = tuple[str, dict]  # (place, columns)


def find_files(data: str) -> tuple[list[Path], list[Path]] | None:
    """(training files, evaluation files) of a file or folder; None when `data` is not a local path.

    In a folder, files whose name starts with eval, validation or test are the evaluation split.
    Raises: UserError for a path that looks local and does not exist, or holds no data file.
    """
    path = Path(data).expanduser()
    if path.is_file():
        if path.suffix.lower() not in SUFFIXES:
            raise UserError(f"--data {data}: {path.suffix or 'no'} ending; it must be one of {', '.join(SUFFIXES)}.")
        return [path], []
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and f.is_file())
        if not files:
            raise UserError(f"--data {data}: the folder holds no {', '.join(SUFFIXES)} file.")
        held_out = [f for f in files if f.stem.lower().split("-")[0].split("_")[0] in EVAL_NAMES]
        return [f for f in files if f not in held_out], held_out
    looks_local = path.is_absolute() or data.startswith((".", "~")) or path.suffix.lower() in SUFFIXES
    if looks_local or data.count("/") > 1:
        raise UserError(f"--data {data}: no such file or folder.")
    return None


def read(path: Path) -> Iterator[Row]:
    """The rows of one file.

    Raises: UserError with file:line for a line that cannot be read.
    """
    readers = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    try:
        yield from readers[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start} of a block); convert or remove it.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None


def _read_json(path: Path) -> Iterator[Row]:
    """JSON lines, or one array of objects; told apart by the first character that is not white space."""
    with path.open(encoding="utf-8-sig") as file:
        head = ""
        while not head and (line := file.readline()):
            head = line.strip()
        file.seek(0)
        if head.startswith("["):
            yield from _read_array(path, file.read())
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip())
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON at column {error.colno}: {error.msg}.") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: each line must be an object {{...}}, found {type(row).__name__}.")
            yield f"{path}:{number}", row


def _read_array(path: Path, text: str) -> Iterator[Row]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}.") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}: element {number} must be an object {{...}}, found {type(row).__name__}.")
        yield f"{path}: element {number}", row


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise UserError(
                        f"{path}:{reader.line_num}: has another number of fields than the {len(reader.fieldnames)} "
                        "columns in the first line."
                    )
                yield f"{path}:{reader.line_num}", row
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: not valid CSV: {error}.") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise UserError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from None
    number = 0
    for part in file.iter_batches(batch_size=1024):
        for row in part.to_pylist():
            number += 1
            yield f"{path}: row {number}", row


def read_hub(name: str, split: str) -> Iterator[Row]:
    """The rows of one split of a hub data set."""
    for number, row in enumerate(_load_hub(name)[split], 1):
        yield f"{name} ({split}): row {number}", row


def hub_splits(name: str) -> list[str]:
    return list(_load_hub(name))


def _load_hub(name: str):
    import datasets

    hub.check(f"--data {name}")
    try:
        return datasets.load_dataset(name)
    except Exception as error:  # the hub client raises a dozen unrelated types, all of them about this name
        raise UserError(
            f"--data {name}: neither a file or folder here nor a hub data set that could be loaded: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from None
