"""mkdocs: append the tables made from the code, and add the files of the repository that pages link to."""

import re
import sys
from pathlib import Path

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))

import tables

ROOT = Path(__file__).resolve().parents[1]


def on_files(files, config):
    """Add the linked files outside docs/ under repository/."""
    for file in files.documentation_pages():
        if file.src_uri in tables.PAGES:
            file.content_string += "\n" + "\n".join(tables.PAGES[file.src_uri]()) + "\n"
    linked = {match[1] for file in files.documentation_pages() for match in _links(file).finditer(file.content_string)}
    for path in sorted(linked):
        files.append(File.generated(config, _address(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Point the links out of docs/ at the added files."""
    up = "../" * page.file.src_uri.count("/")
    return _links(page.file).sub(lambda match: f"]({up}{_address(match[1])})", markdown)


def _links(file) -> re.Pattern:
    """Return the pattern of a page's links out of docs/."""
    up = re.escape("../" * (file.src_uri.count("/") + 1))
    return re.compile(rf"\]\({up}([^)#\s]+)(#[^)\s]*)?\)")


def _address(path: str) -> str:
    """Return a file's path in the site; Markdown stays text, because its links would be broken there."""
    return f"repository/{path}" + (".txt" if path.endswith((".md", ".py", ".sh", ".yaml")) else "")
