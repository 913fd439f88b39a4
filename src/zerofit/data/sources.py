"""Read rows from files and Hub datasets, each with its file:line."""

import codecs
import csv
import glob
import io
import itertools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zerofit.base.errors import UserError, first_line
from zerofit.base.hub import check_reachable
from zerofit.data.dataset_conventions.turns import describe_type
from zerofit.job import data_entry
from zerofit.job.data_entry import DataEntry
from zerofit.job.settings_file import without_repeated_keys

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")

TEXT = ".txt"  # one row per line; only if passed explicitly, since folders also contain licenses and notes

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}

NOT_DATA = ("dataset_info.json", "dataset_dict.json", "state.json")  # next to the Arrow files of save_to_disk

EVAL_NAMES = ("eval", "validation", "valid", "val", "dev", "test")  # names of splits

EVAL_FILE = re.compile(r"(evals?|evaluation|validation|valid|val|dev|tests?|testing)\d*([-_. ]|$)", re.IGNORECASE)

LIST_KEYS = (
    "instances",
    "data",
    "rows",
    "examples",
)  # keys of rows in a file with one object; the first is LMFlow's

csv.field_size_limit(64 << 20)

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # its first bytes

MAX_LINE_LENGTH = 64 << 20  # characters; a longer line means a broken file, and parsing it takes gigabytes

NO_ENTRY = DataEntry("")  # for a source without an entry

Row = tuple[str, dict | UserError]  # (place, columns or this row's error)


@dataclass(frozen=True)
class Source:
    """A file, saved Arrow folder or Hub split, with its entry of --data."""

    path: Path | None
    hub: tuple[str, str | None, str] | None = None  # (id, configuration, split)
    entry: DataEntry = NO_ENTRY  # entry of --data
    number: int = 0  # index of the entry
    streaming: bool = False  # read a Hub dataset over the network instead of downloading it

    @property
    def weight(self) -> float:
        """Return how often each row is used in an epoch."""
        return self.entry.weight

    def __str__(self) -> str:
        return str(self.path) if self.path else "/".join(filter(None, self.hub))

    @property
    def has_splits(self) -> bool:
        """Return whether it is a split of a Hub dataset, or of a folder written by save_to_disk."""
        return self.path is None or (self.path.parent / "dataset_dict.json").exists()


def find_files(
    data: list[str], config: str | None, split: str, streaming: bool = False
) -> tuple[list[Source], list[Source]]:
    """Return (training, evaluation) sources for the entries of --data.

    An entry is a file, folder, glob or Hub id with an optional `:weight`, or an object (job/data_entry.py). In a
    folder, files whose name begins with EVAL_FILE (eval.jsonl, test-1.csv) are the evaluation split.
    Raises: UserError for a path that looks local and does not exist, or is without data files.
    """
    train, held_out = [], []
    for number, text in enumerate(data):
        entry, pair = find_local(text, split)
        if pair is None:
            entry = replace(entry, config=entry.config or config)
            pair = _hub_sources(entry, entry.split or split, streaming)
        for side, sources in zip((train, held_out), pair, strict=True):
            side += [replace(source, entry=entry, number=number) for source in sources]
    return train, held_out


def find_local(text: str, split: str) -> tuple[DataEntry, tuple[list[Source], list[Source]] | None]:
    """Return an entry of --data and its (training, evaluation) sources, None for a Hub id.

    Raises: UserError for a path that looks local and does not exist or is without data files, and for a split,
        configuration or revision that local data does not support.
    """
    try:
        entry = data_entry.parse(text)
        pair = _local(entry.path, entry.split or split)
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown ~user, no permission, a NUL byte
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--data {text!r}: cannot be looked up: {reason.rstrip('.')}.") from None
    if pair is not None:
        has_splits = any(source.has_splits for side in pair for source in side)
        for name, is_unsupported in (("split", not has_splits), ("config", True), ("revision", True)):
            if is_unsupported and getattr(entry, name) is not None:
                raise UserError(f"--data {text}: {entry.path} is local data without a {name}; remove the {name}.")
    return entry, pair


def suffix(path: Path) -> str:
    """Return the suffix that names the format, ignoring .gz and .zst."""
    suffixes = [s.lower() for s in path.suffixes]
    return suffixes[-2] if len(suffixes) > 1 and suffixes[-1] in COMPRESSED else (suffixes[-1] if suffixes else "")


def _local(name: str, split: str) -> tuple[list[Source], list[Source]] | None:
    if "\0" in name:
        raise ValueError("a path cannot hold a NUL byte")
    path = Path(name).expanduser()
    if path.is_file():
        if suffix(path) not in (*SUFFIXES, TEXT):
            supported = ", ".join((*SUFFIXES, TEXT, *COMPRESSED))
            raise UserError(f"--data {name}: unsupported file extension {path.suffix!r}; supported: {supported}.")
        return [Source(path)], []
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return _saved_folder(path, split)
        return _split_by_name(name, sorted(_files_below(path)))
    if any(c in name for c in "*?["):
        matches = [Path(f) for f in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 (it may be absolute)
        folder = next((f for f in matches if f.is_dir()), None)
        if folder and "**" not in name:
            raise UserError(f"--data {name}: {folder} is a folder; pass it separately, or only files, e.g. *.jsonl.")
        endings = (*SUFFIXES, TEXT) if suffix(path) == TEXT else SUFFIXES
        return _split_by_name(name, [f for f in matches if _is_data(f, endings)])
    looks_local = path.is_absolute() or name.startswith((".", "~")) or suffix(path) in (*SUFFIXES, TEXT)
    if looks_local or name.count("/") > 1:
        raise UserError(f"--data {name}: no such file or folder.")
    return None


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the data files in a folder and its subfolders.

    Raises: OSError for a folder that cannot be listed, which Path.rglob would skip.
    """

    def stop(error: OSError):
        raise error

    for top, _, names in os.walk(folder, onerror=stop):
        yield from (file for file in (Path(top, name) for name in names) if _is_data(file))


def _is_data(file: Path, endings: tuple[str, ...] = SUFFIXES) -> bool:
    if suffix(file) not in endings or file.name in NOT_DATA:
        return False
    if file.is_symlink() and not file.exists():
        raise UserError(f"{file}: is a broken link to {file.readlink()}; fix or remove it.")
    return file.is_file()


def _split_by_name(name: str, files: list[Path]) -> tuple[list[Source], list[Source]]:
    if not files:
        raise UserError(f"--data {name}: contains no {', '.join(SUFFIXES)} file.")
    held_out = [f for f in files if EVAL_FILE.match(f.name)]
    return [Source(f) for f in files if f not in held_out], [Source(f) for f in held_out]


def _saved_folder(path: Path, split: str) -> tuple[list[Source], list[Source]]:
    """Return the sources of a folder written by datasets' save_to_disk: one dataset, or one per split."""
    if (path / "state.json").exists():
        return [Source(path)], []
    try:
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path / 'dataset_dict.json'}: does not list the splits; save the dataset again.") from None
    missing = next((s for s in splits if not (path / s).is_dir()), None)
    if missing:
        raise UserError(f"{path}: the folder of the split {missing!r} is missing; save the dataset again.")
    held_out = [s for s in EVAL_NAMES if s in splits and s != split][:1]
    if split not in splits and (split != "train" or not held_out):  # eval splits alone are enough for --eval_data
        raise UserError(f"--data {path}: unknown split {split!r}; choose {', '.join(splits)} with --data_split.")
    return [Source(path / s) for s in splits if s == split], [Source(path / s) for s in held_out]


def _hub_sources(entry: DataEntry, split: str, streaming: bool) -> tuple[list[Source], list[Source]]:
    name, config = entry.path, entry.config
    splits = list(_load_hub(name, config, streaming, entry.revision))
    if split not in splits:
        raise UserError(f"--data {name}: unknown split {split!r}; choose {', '.join(splits)} with --data_split.")
    held_out = [s for s in EVAL_NAMES if s in splits and s != split][:1]
    train = Source(None, (name, config, split), streaming=streaming)
    return [train], [Source(None, (name, config, s)) for s in held_out]


def _load_hub(name: str, config: str | None, streaming: bool = False, revision: str | None = None):
    import datasets

    check_reachable(f"--data {name}")
    try:
        return datasets.load_dataset(name, config, streaming=streaming, **revision_arguments(revision))
    except Exception as error:  # the Hub client raises a dozen unrelated types
        raise UserError(
            f"--data {name}: not a local file or folder, and not loadable from the Hub: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from None


def revision_arguments(revision: str | None) -> dict[str, str]:
    """Return the arguments that load a revision of a Hub dataset; {} for the newest."""
    return {} if revision is None else {"revision": revision}


def size(source: Source) -> int:
    """Return the bytes on disk; 0 for a Hub dataset."""
    if source.path is None:
        return 0
    files = [source.path] if source.path.is_file() else source.path.iterdir()
    return sum(file.stat().st_size for file in files)


def read_rows(source: Source, lines: bool = False) -> Iterator[Row]:
    """Yield the rows of one source.

    Args: lines: leave JSON lines as text, (place, line), for `json_object` to parse in another process.
    Raises: UserError with file:line for a row that cannot be read.
    """
    if source.hub:
        name, config, split = source.hub
        loaded = _load_hub(name, config, source.streaming, source.entry.revision)
        for number, row in enumerate(_without_decoding(loaded[split]), 1):
            yield f"{name} ({split}): row {number}", _without_nulls(row)
        return
    path, kind = source.path, suffix(source.path)
    try:
        if path.is_file() and _start(path, len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(f"{path}: is a git-lfs pointer, not data; run `git lfs pull` in its folder.")
        if path.is_dir() or kind == ".arrow":
            yield from _read_arrow(path)
        elif kind == ".parquet":
            yield from _read_parquet(path)
        else:
            with _open(path) as file:
                if kind == TEXT:
                    yield from ((f"{path}:{n}", {"text": line.rstrip("\r\n")}) for n, line in _numbered(path, file))
                else:
                    yield from (
                        _read_csv(path, file, kind) if kind in (".csv", ".tsv") else _read_json(path, file, lines)
                    )
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text{_encoding_fix(path)}.") from None
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def _start(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def _encoding_fix(path: Path) -> str:
    """Return where a file is not UTF-8, and a command that converts it."""
    if path.suffix.lower() in COMPRESSED:
        return "; convert or remove it"
    if _start(path, 2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        coding, where = "UTF-16", " but UTF-16"
    else:
        with path.open("rb") as file:
            line = next((n for n, text in enumerate(file, 1) if text.decode(errors="ignore").encode() != text), 1)
        coding, where = "WINDOWS-1252", f" (line {line}); if it is western European text"
    return f"{where}: iconv -f {coding} -t UTF-8 {shlex.quote(str(path))} > utf8{path.suffix} converts it"


def _open(path: Path) -> io.TextIOWrapper:
    """Open a file as UTF-8 text without byte order mark, decompressed according to its suffix."""
    compression = COMPRESSED.get(path.suffix.lower())
    if compression:
        import pyarrow as pa

        return io.TextIOWrapper(pa.input_stream(str(path), compression=compression), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _no_constant(text: str):
    raise ValueError(f"{text} is not a JSON value")


def _reason(error: Exception) -> str:
    return str(error).partition("; use sys.")[0]  # without Python's advice on long numbers


def _parse_json(text: str) -> object:
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=without_repeated_keys)


def _read_json(path: Path, file, lines: bool) -> Iterator[Row]:
    """Yield the rows of JSON lines, of an array, which starts with `[`, or of an object with one (LIST_KEYS)."""
    numbered = _numbered(path, file)
    first = next(numbered, None)
    if first is None:
        return
    number, line = first
    if line.lstrip().startswith("["):
        yield from _read_lists(path, file, numbered, line, number)
        return
    if single := _single_object(path, line):
        name = next((key for key in LIST_KEYS if isinstance(single.get(key), list)), None)
        if name is None or not all(isinstance(row, dict) for row in single[name]):
            raise UserError(f"{path}: is a single JSON object over several lines; write a list, or an object per line.")
        yield from ((f"{path}: element {n} of {name!r}", row) for n, row in enumerate(single[name], 1))
        return
    for number, line in itertools.chain([first], numbered):
        place, text = f"{path}:{number}", line.strip()
        yield place, text if lines else json_object(place, text)


def _read_lists(path: Path, file, numbered: Iterator[tuple[int, str]], line: str, number: int) -> Iterator[Row]:
    """Yield the rows of an array, or of lines with a list of turns each. line, number: the first line."""
    turns = _list_of_turns(line)
    following = None if turns is None else next(numbered, None)
    if turns is None or not (following or _are_turns(turns)):
        yield from _read_array(path, line + file.read())
        return
    yield f"{path}:{number}", {"messages": turns}
    for number, line in itertools.chain([following] if following else [], numbered):
        turns, place = _list_of_turns(line), f"{path}:{number}"
        is_list = turns is not None
        yield place, {"messages": turns} if is_list else UserError(f"{place}: each line must be a list of turns.")


def _list_of_turns(line: str) -> list | None:
    """Return the list in a line of JSON; None for other values and invalid JSON."""
    try:
        value = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def _are_turns(value: list) -> bool:
    """Return whether the elements of a list are turns, not rows, by their keys."""
    return bool(value) and all(
        isinstance(item, dict) and ({"role", "content"} <= item.keys() or {"from", "value"} <= item.keys())
        for item in value
    )


def _single_object(path: Path, first: str) -> dict | None:
    """Return the object of a file with a single one, over several lines or LMFlow's; None for lines of rows."""
    try:
        row = json.loads(first)
        return row if isinstance(row, dict) and row.keys() == {"type", LIST_KEYS[0]} else None
    except (ValueError, RecursionError):
        pass
    try:
        with _open(path) as file:
            value = json.loads(file.read(MAX_LINE_LENGTH))
            return value if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _numbered(path: Path, file) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of each line that is not blank.

    Raises: UserError for a line longer than MAX_LINE_LENGTH, unless it begins an array.
    """
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_LENGTH), ""), 1):
        if len(line) == MAX_LINE_LENGTH and not line.startswith("["):
            raise UserError(f"{path}:{number}: the line is longer than {MAX_LINE_LENGTH >> 20} M characters; split it.")
        if line.strip():
            yield number, line


def json_object(place: str, text: str) -> dict:
    """Parse one JSON line into a row.

    Raises: UserError with file:line for invalid JSON or a value other than an object.
    """
    try:
        row = _parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not valid JSON at column {error.colno}: {error.msg}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON: {_reason(error)}.") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: each line must be an object {{...}}, found {describe_type(row)}.")
    return row


def _read_array(path: Path, text: str) -> Iterator[Row]:
    try:
        rows = _parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON: {_reason(error)}.") from None
    for number, row in enumerate(rows, 1):
        place = f"{path}: element {number}"
        if isinstance(row, list):
            row = {"messages": row}
        elif not isinstance(row, dict):
            row = UserError(f"{place}: must be an object {{...}}, found {describe_type(row)}.")
        yield place, row


def _read_csv(path: Path, file, kind: str) -> Iterator[Row]:
    comma = "\t" if kind == ".tsv" else ","
    reader = csv.DictReader(file, delimiter=comma, strict=True)
    try:
        names = reader.fieldnames or []
        if len(names) == 1 and (other := next((c for c in ";\t|," if c != comma and c in names[0]), None)):
            separators = {"\t": "tabs", ",": "commas"}
            raise UserError(
                f"{path}:{reader.line_num}: fields are separated by {separators.get(other, repr(other))}; use "
                f"{separators[comma]}" + (", or rename the file to .tsv." if other == "\t" else ".")
            )
        duplicates = [name for name, count in Counter(names).items() if count > 1]
        if duplicates:
            raise UserError(
                f"{path}:{reader.line_num}: several columns are named {duplicates[0]!r}; rename all but one."
            )
        for row in reader:
            if None in row or None in row.values():
                row = UserError(
                    f"{path}:{reader.line_num}: the number of fields differs from the {len(reader.fieldnames)} columns "
                    "of the first line; fix or remove the row."
                )
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise UserError(f"{path}:{reader.reader.line_num}: not valid {kind[1:].upper()}: {error}.") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", _without_nulls(row)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {first_line(error)}") from None


def _read_arrow(path: Path) -> Iterator[Row]:
    import datasets
    import pyarrow as pa

    try:
        dataset = datasets.load_from_disk(str(path)) if path.is_dir() else datasets.Dataset.from_file(str(path))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable Arrow dataset: {first_line(error)}") from None
    for number, row in enumerate(_without_decoding(dataset), 1):
        yield f"{path}: row {number}", _without_nulls(row)


def _without_decoding(dataset):
    """Keep images, audio and video of a dataset as bytes or paths: decoding them needs other libraries."""
    import datasets

    features = dataset.features or {}  # None for some streamed datasets
    encoded = {name: _undecoded_feature(feature) for name, feature in features.items()}
    encoded = {name: feature for name, feature in encoded.items() if feature != features[name]}
    if encoded and isinstance(dataset, datasets.Dataset):
        dataset = dataset.to_iterable_dataset()  # changes columns when they are read
    for name, feature in encoded.items():
        dataset = dataset.cast_column(name, feature)
    return dataset


def _undecoded_feature(feature):
    """Return a feature of datasets with decoding off, except for JSON, whose values belong to the row."""
    import datasets

    if isinstance(feature, dict):
        return {name: _undecoded_feature(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_undecoded_feature(feature.feature))
    if hasattr(feature, "decode") and not isinstance(feature, datasets.Json):
        return replace(feature, decode=False)
    return feature


def _without_nulls(row: dict) -> dict:
    """Remove the null keys of the objects inside a row of an Arrow table.

    All objects of an Arrow column have the same keys, and a row's missing keys are null: a tool call would have the
    arguments of all other tools.
    """
    return {name: _without_null_keys(value) for name, value in row.items()}


def _without_null_keys(value):
    if isinstance(value, dict):
        return {key: _without_null_keys(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_null_keys(inner) if isinstance(inner, dict | list) else inner for inner in value]
    return value
