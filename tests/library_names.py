"""Check names and overridden signatures that src takes from libraries against wheels that are not installed.

python tests/library_names.py wheels/          a folder of wheels and sdists; the site-packages of an environment too
python tests/library_names.py --fetch transformers==5.24.0 peft      fetches them first; without versions: the newest

Reads source only, seconds a library. What it cannot see: attributes of objects.
"""

import argparse
import ast
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "zerofit"
LIBRARIES = tuple(
    "transformers accelerate peft deepspeed huggingface_hub datasets torchao bitsandbytes liger_kernel".split()
)


class Sources:
    """The source files of a library: {name below the archive's root: text}."""

    def __init__(self, files: dict[str, str]):
        self.files, self.trees = files, {}

    @classmethod
    def of(cls, library: str, place: Path) -> "Sources | None":
        """Return a library's sources in a folder of archives or of packages; None if it is not there."""
        if (place / library / "__init__.py").exists():
            return cls({f.relative_to(place).as_posix(): f.read_text(errors="replace")
                        for f in (place / library).rglob("*.py")})  # fmt: skip
        for archive in sorted(place.iterdir()):
            if not archive.name.lower().replace("-", "_").startswith(f"{library}_") or archive.is_dir():
                continue
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as opened:
                    return cls(
                        {n: opened.read(n).decode(errors="replace") for n in opened.namelist() if n.endswith(".py")}
                    )
            with tarfile.open(archive) as opened:
                members = [m for m in opened.getmembers() if m.name.endswith(".py")]
                return cls({m.name.partition("/")[2]: opened.extractfile(m).read().decode(errors="replace")
                            for m in members})  # fmt: skip
        return None

    @cached_property
    def exported(self) -> set[str]:
        """Return the quoted words of the library's `__all__` lists and of its lazy packages' import structures."""
        words = set()
        for name, text in self.files.items():
            part = (
                text
                if name.endswith("__init__.py")
                else text.rpartition("__all__ = ")[2]
                if "__all__ = " in text
                else ""
            )
            words |= set(re.findall(r"""["'](\w+)["']""", part))
        return words

    def tree(self, name: str) -> ast.Module:
        if name not in self.trees:
            self.trees[name] = ast.parse(self.files[name])
        return self.trees[name]

    def file_of(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((n for n in (f"{path}.py", f"{path}/__init__.py") if n in self.files), None)

    def has(self, module: str, name: str) -> bool:
        """Return whether `from module import name` finds something."""
        if self.file_of(f"{module}.{name}"):
            return True
        if (file := self.file_of(module)) is None:
            return False
        if name in bound(self.tree(file)) or (file.endswith("__init__.py") and name in self.exported):
            return True
        if "this_module" in self.files[file]:  # DeepSpeed's op_builder fills itself with the classes of its folder
            return any(f"class {name}(" in text for n, text in self.files.items() if n.startswith(file[:-11]))
        return any(self.has(star, name) for star in stars(self.tree(file), module, file) if star != module)

    def method(self, module: str, cls: str, name: str) -> ast.FunctionDef | None:
        """Return a method of a class of a module, or of the bases that the module names; None if there is none."""
        for file in filter(None, [self.file_of(module)]):
            for node in ast.walk(self.tree(file)):
                if isinstance(node, ast.ClassDef) and node.name == cls:
                    own = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == name]
                    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                    return own[-1] if own else next(filter(None, (self.found(base, name) for base in bases)), None)
        return None

    def found(self, cls: str, name: str) -> ast.FunctionDef | None:
        """Return a method of the class with that name anywhere in the library."""
        for file, text in self.files.items():
            if f"class {cls}" in text and (
                method := self.method(file[:-3].replace("/", ".").removesuffix(".__init__"), cls, name)
            ):
                return method
        return None


def bound(tree: ast.Module) -> set[str]:
    """Return the names that a module binds at its top level, also below if, try and with."""
    names, waiting = set(), list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        else:
            waiting += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)
            ]
    return names


def stars(tree: ast.Module, module: str, file: str) -> list[str]:
    """Return the modules of which a module imports everything."""
    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            parent = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            found.append(".".join(filter(None, [parent, node.module])))
    return found


def taken() -> list[tuple[str, str, str]]:
    """Return (file, module, name) of each name that src imports from a library."""
    found = []
    for file in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
                found += [(file.relative_to(SRC).as_posix(), node.module, alias.name) for alias in node.names]
    return found


def overridden() -> list[tuple[str, str, str, str, ast.FunctionDef]]:
    """Return (file, module, class, method, our method) of the methods of classes that derive from a library's."""
    found = []
    for file in sorted(SRC.rglob("*.py")):
        tree = ast.parse(file.read_text())
        origin = {alias.asname or alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                  for alias in node.names}  # fmt: skip
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for base in map(ast.unparse, cls.bases):
                module = origin.get(base, "")
                if base == "ZerofitTrainer":
                    module, base = "transformers", "Trainer"
                for method in (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name != "__init__"):
                    if module.partition(".")[0] in LIBRARIES:
                        found.append((file.relative_to(SRC).as_posix(), module, base, method.name, method))
    return found


def takes(ours: ast.FunctionDef, theirs: ast.FunctionDef) -> list[str]:
    """Return the parameters of the library's method that ours does not take."""
    names = {a.arg for a in [*ours.args.posonlyargs, *ours.args.args, *ours.args.kwonlyargs]}
    count = len(ours.args.posonlyargs) + len(ours.args.args)
    missing = []
    for number, argument in enumerate([*theirs.args.posonlyargs, *theirs.args.args]):
        by_place = number < count or ours.args.vararg
        if not (by_place and (argument.arg in names or ours.args.kwarg or number == 0 or ours.args.vararg)):
            missing.append(argument.arg)
    return missing + [a.arg for a in theirs.args.kwonlyargs if a.arg not in names and not ours.args.kwarg]


def problems(place: Path) -> list[str]:
    """Return what src takes from the libraries in a folder and does not find there."""
    found, sources = [], {library: Sources.of(library, place) for library in LIBRARIES}
    names = taken()
    listed = tomllib.loads((ROOT / "docs" / "patches.toml").read_text())["patch"]
    for file, module, name in sorted(set(names)):
        known = sources[module.partition(".")[0]]
        if known and not known.has(module, name):
            found.append(f"{file}: {module} has no {name}")
    for patch in listed:
        known = sources.get(patch["of"].partition(".")[0])
        for name in patch["names"] if known else ():
            last = name.rpartition(".")[2]
            if name not in patch.get("since", {}) and not any(last in text for text in known.files.values()):
                found.append(f"{patch['file']}: {patch['of']} has no {last} (docs/patches.toml)")
    for file, module, cls, name, ours in overridden():
        known = sources[module.partition(".")[0]]
        if not known:
            continue
        theirs = known.found(cls, name)
        is_marked = any(ast.unparse(d) == "override" for d in ours.decorator_list)
        if theirs is None and is_marked:
            found.append(f"{file}: {cls} has no {name}, which would never be called")
        elif theirs is not None and (missing := takes(ours, theirs)):
            found.append(f"{file}: {cls}.{name} is given {', '.join(missing)}, which ours does not take")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", type=Path, help="folders of wheels or packages")
    parser.add_argument("--fetch", nargs="+", default=[], help="packages to fetch without what they need, and to check")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.fetch:
            fetch = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                "-d",
                folder,
            ]
            subprocess.run([*fetch, *given.fetch], check=True)
            given.places.append(Path(folder))
        failed = False
        for place in given.places:
            there = sorted(f.name for f in place.iterdir()) if place == Path(folder) else [place]
            found = problems(place)
            failed |= bool(found)
            print(*there, *(found or ["every name and signature is there"]), sep="\n  ")
    sys.exit(1 if failed or not given.places else 0)


if __name__ == "__main__":
    main()
