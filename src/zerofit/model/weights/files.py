"""Check the headers of a model's weight files before loading; hash parts of the files."""

import hashlib
import json
import struct
from pathlib import Path

from safetensors import SafetensorError, safe_open

from zerofit.base.errors import UserError, first_line

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # samples per file in the hash

POINTER = b"version https://git-lfs"


def check(folder: Path, place: str) -> None:
    """Raise UserError for missing or incomplete safetensors files, or for a tensor that is in two files.

    It takes a millisecond per file. Args: place: the flag and the folder, for messages.
    """
    file_of: dict[str, str] = {}
    for file in of_model(folder, place):
        if reason := damage(file):
            raise UserError(f"{place}: {file.name} is damaged ({reason}); download or copy it again.")
        for name in tensors(file):
            if name in file_of:
                raise UserError(
                    f"{place}: {file_of[name]} and {file.name} both contain {name}, and transformers would load any of "
                    "them, regardless of the index. The files are of different copies; download or save them again."
                )
            file_of[name] = file.name


def names(folder: Path) -> list[str]:
    """Return the names of the weight files to download, for a folder that has a model's small files."""
    try:
        return sorted({SINGLE, *(file.name for file in of_model(folder, ""))})
    except UserError:  # without an index, the model has a single file
        return [SINGLE]


def of_model(folder: Path, place: str) -> list[Path]:
    """Return the files that from_pretrained reads. Raises: UserError for missing files or a damaged index."""
    named = _named_by_config(folder)
    index = folder / (named if named.endswith(".json") else INDEX)
    if named and index.name != named:
        return [folder / named]
    if (folder / SINGLE).is_symlink() or (folder / SINGLE).exists():  # a link in the Hub's cache may be broken
        return [folder / SINGLE]
    if not index.exists():
        raise UserError(f"{place}: {_missing_message(folder)}")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        reason = "a git-lfs pointer; `git lfs pull` fetches it" if _is_pointer(index) else "not JSON with a weight_map"
        raise UserError(f"{place}: {index.name} is damaged ({reason}); download or copy it again.") from None
    if outside := [name for name in names if Path(str(name)).name != name]:
        raise UserError(f"{place}: {index.name}: {outside[0]!r} is not a file name in its folder; download it again.")
    return [folder / name for name in sorted(names)]


def _named_by_config(folder: Path) -> str:
    """Return the file name in config.json's `transformers_weights`, or ""."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("transformers_weights") or ""
    except (OSError, ValueError, AttributeError):
        return ""


def _missing_message(folder: Path) -> str:
    pickled = "its weights are" if any(folder.glob("*.bin")) else "if its weights are"
    return (
        f"{SINGLE} and {INDEX} are missing; {pickled} pickles (.bin), which can run code when they are loaded; if you "
        'trust them, convert them: python -c "import sys, transformers as t; a, b = sys.argv[1:]; '
        "t.AutoModelForCausalLM.from_pretrained(a).save_pretrained(b); "
        f't.AutoTokenizer.from_pretrained(a).save_pretrained(b)" {folder} NEW_FOLDER'
    )


def damage(file: Path) -> str:
    """Return why a safetensors file is incomplete or damaged, or "": its header must match its length."""
    if not file.exists():
        return "it is missing"
    size = file.stat().st_size
    if size == 0:
        return "empty"
    if _is_pointer(file):
        return "a git-lfs pointer; `git lfs pull` fetches the weights"
    try:
        ends = [entry["data_offsets"][1] for entry in tensors(file).values()]
    except (ValueError, LookupError, TypeError, AttributeError, struct.error):
        return f"its header is truncated or not a safetensors header, {size:,} bytes"
    expected = _data_start(file) + max((end for end in ends if type(end) is int), default=0)
    if size < expected:
        return f"incomplete: {size:,} of {expected:,} bytes"
    try:
        with safe_open(file, "numpy"):  # checks dtypes, shapes and offsets
            return ""
    except SafetensorError as error:
        return first_line(error).removeprefix("Error while deserializing header: ")


def tensors(file: Path) -> dict:
    """Return {tensor: its entry in the header} of a safetensors file.

    Raises: ValueError or struct.error without a valid header.
    """
    with file.open("rb") as opened:
        length = struct.unpack("<Q", opened.read(8))[0]
        if length > file.stat().st_size:
            raise ValueError("the header is longer than the file")
        try:
            header = json.loads(opened.read(length))
        except RecursionError:
            header = None
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _data_start(file: Path) -> int:
    with file.open("rb") as opened:
        return 8 + struct.unpack("<Q", opened.read(8))[0]


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(POINTER)) == POINTER


def identity(folder: Path) -> str:
    """Hash the weights: name, length, header (names, dtypes, shapes) and samples of each file.

    The samples are 16 blocks of 64 KiB, evenly spread and including both ends, so at most 1 MiB per file is read.
    """
    digest = hashlib.sha256()
    for file in of_model(folder, str(folder)):
        start, size = _data_start(file), file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(start))
            last = max(start, size - SAMPLE_BYTES)
            for i in range(SAMPLES):
                opened.seek(start + (last - start) * i // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
