"""Check the files of a model's weights by their headers, before anything is loaded; hash parts of them."""

import hashlib
import json
import struct
from pathlib import Path

from safetensors import SafetensorError, safe_open

from zerofit.base.errors import UserError, first_line

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"

SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of a file, in its hash

POINTER = b"version https://git-lfs"


def check(folder: Path, place: str) -> None:
    """Raise UserError if the folder has no safetensors weights, a file of them is not whole, or two hold one tensor.

    Args: place: what named the folder, for the message. It takes a millisecond a file.
    """
    held_by: dict[str, str] = {}
    for file in of_model(folder, place):
        if reason := damage(file):
            raise UserError(f"{place}: {file.name} is damaged ({reason}); download or copy it again.")
        for name in tensors(file):
            if name in held_by:
                raise UserError(
                    f"{place}: {held_by[name]} and {file.name} both hold {name}, and transformers would load one of "
                    "them, whatever the index says: the files are of different copies; download or save them again."
                )
            held_by[name] = file.name


def names(folder: Path) -> list[str]:
    """Return the names of the files of weights to download, for a folder that has a model's small files."""
    try:
        return sorted({WHOLE, *(file.name for file in of_model(folder, ""))})
    except UserError:  # no index: the model has one file, or none
        return [WHOLE]


def of_model(folder: Path, place: str) -> list[Path]:
    """Return the files that from_pretrained reads. Raises: UserError if there are none, or the index is damaged."""
    named = _named_by_config(folder)
    index = folder / (named if named.endswith(".json") else INDEX)
    if named and index.name != named:
        return [folder / named]
    if (folder / WHOLE).is_symlink() or (folder / WHOLE).exists():  # a link of the Hub's cache may lead nowhere
        return [folder / WHOLE]
    if not index.exists():
        raise UserError(f"{place}: {_why_none(folder)}")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        reason = "a git-lfs pointer; `git lfs pull` fetches it" if _is_pointer(index) else "no JSON with a weight_map"
        raise UserError(f"{place}: {index.name} is damaged ({reason}); download or copy it again.") from None
    if outside := [name for name in names if Path(str(name)).name != name]:
        raise UserError(f"{place}: {index.name}: {outside[0]!r} is no name of a file beside it; download it again.")
    return [folder / name for name in sorted(names)]


def _named_by_config(folder: Path) -> str:
    """Return the file that config.json's `transformers_weights` names, "" without one."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("transformers_weights") or ""
    except (OSError, ValueError, AttributeError):
        return ""


def _why_none(folder: Path) -> str:
    pickled = "its weights are" if any(folder.glob("*.bin")) else "if its weights are"
    return (
        f"there is no {WHOLE}, and no {INDEX}; {pickled} pickles (.bin), which can run code when they are loaded, "
        'convert them once if you trust them: python -c "import sys, transformers as t; a, b = sys.argv[1:]; '
        "t.AutoModelForCausalLM.from_pretrained(a).save_pretrained(b); "
        f't.AutoTokenizer.from_pretrained(a).save_pretrained(b)" {folder} NEW_FOLDER'
    )


def damage(file: Path) -> str:
    """Return why a safetensors file is not whole, "" if it is: its header must match its length."""
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
        return f"its header is cut or no safetensors header, {size:,} bytes"
    expected = _data_start(file) + max((end for end in ends if type(end) is int), default=0)
    if size < expected:
        return f"incomplete: {size:,} of {expected:,} bytes"
    try:
        with safe_open(file, "numpy"):  # its own check: types, shapes and offsets that do not fit each other
            return ""
    except SafetensorError as error:
        return first_line(error).removeprefix("Error while deserializing header: ")


def tensors(file: Path) -> dict:
    """Return {name: its entry in the header} of the tensors in a safetensors file.

    Raises: ValueError or struct.error if it has no header.
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
        raise ValueError("the header is no JSON object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _data_start(file: Path) -> int:
    with file.open("rb") as opened:
        return 8 + struct.unpack("<Q", opened.read(8))[0]


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(POINTER)) == POINTER


def identity(folder: Path) -> str:
    """Hash the weights: of each file name, length, header (names, types, shapes), and samples of the numbers.

    The samples are 16 blocks of 64 KiB, evenly spread, with both ends: small files are read whole, of large ones 1 MiB.
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
