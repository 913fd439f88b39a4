"""Tables that are made from the code and appended to pages when the site is built (docs/hooks.py)."""

import ast
import sys
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "zerofit"
sys.path.insert(0, str(SRC.parent))


def flags() -> list[str]:
    """Return a table for each group of flags, with defaults and help texts."""
    from zerofit.config import arguments

    names = [name for name in vars(arguments) if name.endswith("Arguments")]
    groups = [group for group in map(vars(arguments).get, names) if isinstance(group, type)]
    lines = []
    for group in groups:
        lines += [
            f"## {group.__doc__.splitlines()[0].rstrip('.')}",
            "",
            "| flag | default | meaning |",
            "|---|---|---|",
        ]
        for field in fields(group):
            value = str(field.default).lower() if isinstance(field.default, bool) else field.default
            default = "" if field.default in (None, MISSING) else f"`{value}`"
            text = field.metadata["help"].replace("|", "\\|").replace("%%", "%")
            lines.append(f"| `--{field.name}` | {default} | {text} |")
        lines.append("")
    return lines


def compatibility() -> list[str]:
    from zerofit.commands import compatible

    return compatible.page(compatible.shown())


def keys() -> list[str]:
    from zerofit.convert import keys, kits

    return [line for kit in kits.KITS for line in keys.page(kit)] + keys.without_counterpart()


def models() -> list[str]:
    from zerofit.commands import models

    return ["## All model types", "", *models.summary(), *models.rows().values()]


def code() -> list[str]:
    """Return the first sentence of every file, by folder, and the table of patches."""
    lines = []
    folders = sorted({file.parent for file in SRC.rglob("*.py")}, key=lambda folder: folder.relative_to(SRC).parts)
    for folder in folders:
        files = sorted(file for file in folder.glob("*.py") if not file.name.startswith("__"))
        name = f"{folder.relative_to(SRC)}/" if folder != SRC else "zerofit/"
        lines += [f"## {name}", "", _first_line(folder / "__init__.py"), "", "| file | content |", "|---|---|"]
        lines += [f"| [{file.name}](../{file.relative_to(ROOT)}) | {_first_line(file)} |" for file in files]
        lines.append("")
    return [*lines, *_patches()]


def _patches() -> list[str]:
    """Return the table of docs/patches.toml, with the versions of constraints.txt."""
    versions = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    lines = ["## All patches", "", "| file | name | library | purpose | reason | test |", "|---|---|---|---|---|---|"]
    for patch in tomllib.loads((ROOT / "docs" / "patches.toml").read_text())["patch"]:
        first, *others = patch["names"]
        name, library = f"`{first}`" + (f" and {len(others)} more" if others else ""), patch["of"].partition(".")[0]
        test = patch["test"].replace("::", " ").removeprefix("tests/")
        cells = (patch["file"], name, f"{library} {versions.get(library, '')}", patch["purpose"], patch["why"], test)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _first_line(file: Path) -> str:
    """Return the first paragraph of a file's docstring on one line."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


PAGES = {
    "flags.md": flags,
    "compatibility.md": compatibility,
    "coming-from.md": keys,
    "models.md": models,
    "code.md": code,
}
