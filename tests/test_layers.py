"""Folders import in one direction, files never in a circle, and folders stay small."""

import ast
from graphlib import CycleError, TopologicalSorter

import pytest
from conftest import ROOT

SRC = ROOT / "src" / "zerofit"
FILES = sorted(SRC.rglob("*.py"))
ORDER = [
    *("base", "job", "data", "model", "parallel", "objective", "optim", "convert", "config", "certificate"),
    *("checkpoint", "train", "report", "plan", "export", "launch", "commands", "tools", ""),
]
LAST = ["entrypoint", "recipe", "cli", "__main__", "__init__"]  # files of the package that may import all folders


def module_name(file):
    return ".".join(file.relative_to(SRC).with_suffix("").parts)


MODULES = {module_name(file): file for file in FILES}


def nodes_that_run(tree):
    """All nodes but those below `if TYPE_CHECKING:`, which no process imports."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node
            yield from nodes_that_run(node)


def imports(file):
    """The package's modules that a file imports, anywhere in it."""
    for node in nodes_that_run(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            package, _, module = (node.module or "").partition(".")
            if package == "zerofit":
                names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
                yield from (name if name in MODULES else module for name in names)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("zerofit.") for alias in node.names), f"{file}: import zerofit.x"


def layer(module):
    return (
        len(ORDER) + LAST.index(module)
        if module in LAST
        else ORDER.index(module.partition(".")[0] if "." in module else "")
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_file_imports_only_what_stands_left_of_it(module):
    for target in imports(MODULES[module]):
        if target:  # "": zerofit itself
            assert layer(target) <= layer(module), f"{module} imports {target}"


def test_nothing_imports_a_tool():
    """A verb of tools/ is started by its name (cli.VERBS); without the folder all of the core works."""
    of_core = {module for module in MODULES if not module.startswith("tools.")}
    assert not [module for module in of_core if any(name.startswith("tools") for name in imports(MODULES[module]))]


def test_no_circles():
    graph = {module: set(imports(file)) - {""} for module, file in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_folders_are_small():
    for folder in {file.parent for file in FILES}:
        names = [file.name for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(names) <= 15, f"{folder.relative_to(SRC)}: {len(names)} files"
