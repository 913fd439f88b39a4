"""What is tracked is meant to be kept: nothing large, none of a scratch folder, no address of a package registry."""

import re
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest
from conftest import ROOT

LARGEST = 2_000_000  # bytes; each of the two bundled models has 1.7 million
SCRATCH = re.compile(
    r"runs|\.runs|tmp|\.tmp|temp|scratch|\.cache|build|dist|outputs|wandb|mlruns|node_modules"
    r"|\.?venv.*|__pycache__|\..+_cache|\.hypothesis|\.ipynb_checkpoints|.+\.egg-info"
)
DATED = re.compile(r"benchmarks/results/.*\d{4}-?\d{2}-?\d{2}.*")
HOSTS = re.compile(
    r"\b(pypi\.org|pypi\.python\.org|pythonhosted\.org|anaconda\.(org|com)|crates\.io|registry\.npmjs\.org"
    r"|rubygems\.org|proxy\.golang\.org|repo1?\.maven\.(org|apache\.org)|pypi\.nvidia\.com|download\.pytorch\.org)\b"
)
# Others' copies: a part of the host's name says it (mirrors.example.edu), or the path does (/simple/, /artifactory/).
MIRROR = re.compile(
    r"https?://([\w-]+\.)*(pypi|conda|mirrors?|nexus|artifactory|registry)[\w-]*\.[\w.-]+"
    r"|https?://[\w.:@-]+/(\S+/)?(simple|pypi|artifactory|conda-forge)(/|\b)"
)
NAMES_HOSTS = "tests/test_tracked_files.py"


def faults(path: str, size: int, text: str | None) -> list[str]:
    """Return why the file should not be tracked, a sentence each.

    path: from the root, with slashes; size: bytes; text: None of a binary file.
    """
    found = []
    if size > LARGEST:
        found.append(f"{path}: {size:,} bytes, more than {LARGEST:,}")
    for folder in PurePosixPath(path).parts[:-1]:
        if SCRATCH.fullmatch(folder):
            found.append(f"{path}: lies in the scratch folder {folder}")
    if DATED.fullmatch(path):
        found.append(f"{path}: has a date in its name, so the next run does not replace it; the date belongs inside")
    for pattern in (HOSTS, MIRROR) if path != NAMES_HOSTS else ():
        if address := pattern.search(text or ""):
            line = text.count("\n", 0, address.start()) + 1
            found.append(f"{path}:{line}: {address[0]} is of a package registry; name the package and its version")
            break
    return found


def text_of(file: Path) -> str | None:
    content = file.read_bytes()
    return None if b"\0" in content else content.decode(errors="replace")


def tracked(*options: str) -> list[str]:
    """Return the tracked paths that are there, of those that `git ls-files` lists with the options."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("no git, or not a clone: what is tracked is unknown")
    listed = subprocess.run(["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split("\0") if (ROOT / path).is_file()]


def test_no_tracked_file_is_one_that_git_is_told_to_ignore():
    assert tracked("--cached", "--ignored", "--exclude-from=.gitignore") == []


def test_every_tracked_file_is_meant_to_be_kept():
    files = tracked()
    assert "README.md" in files and NAMES_HOSTS in files
    found = [fault for path in files for fault in faults(path, (ROOT / path).stat().st_size, text_of(ROOT / path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "size", "text", "reason"),
    [
        ("examples/big/model.safetensors", LARGEST + 1, None, "2,000,001 bytes"),
        (".runs/tokens/0.bin", 10, None, "scratch folder .runs"),
        ("benchmarks/runs/report.md", 10, "", "scratch folder runs"),
        ("src/zerofit.egg-info/PKG-INFO", 10, "", "scratch folder zerofit.egg-info"),
        ("src/zerofit/__pycache__/cli.pyc", 10, None, "scratch folder __pycache__"),
        (".pytest_cache/README.md", 10, "", "scratch folder .pytest_cache"),
        (".venv-peers/pyvenv.cfg", 10, "", "scratch folder .venv-peers"),
        ("benchmarks/results/data-2026-11-21.md", 10, "", "has a date in its name"),
        ("docs/a.md", 10, "one\nsee https://pypi.org/project/x/1.0/", "docs/a.md:2: pypi.org is of"),
        ("docs/a.md", 10, "pip install -i https://pypi.org/simple x", "is of a package registry"),
        ("docs/a.md", 10, "https://files.pythonhosted.org/packages/a/b/x.whl", "is of a package registry"),
        ("docs/a.md", 10, "https://conda.anaconda.org/conda-forge", "is of a package registry"),
        ("pip.conf", 10, "index-url = http://mirrors.example.edu/anything", "is of a package registry"),
        ("pip.conf", 10, "index-url = http://10.0.0.7:8080/root/pypi/+simple/", "is of a package registry"),
        ("pip.conf", 10, "index-url = https://proxy.example.com/simple", "is of a package registry"),
        ("uv.lock", 10, "https://nexus.example.com/repository/all", "is of a package registry"),
    ],
)  # fmt: skip
def test_what_nobody_meant_to_keep_is_found(path, size, text, reason):
    (fault,) = faults(path, size, text)
    assert reason in fault


@pytest.mark.parametrize(
    ("path", "size", "text"),
    [
        ("examples/tiny/model/model.safetensors", LARGEST, None),
        ("src/zerofit/data/build.py", 10, "# a file may be called what a folder may not"),
        ("benchmarks/results/data.md", 10, "2026-11-23, commit 2424e7a"),
        ("benchmarks/published/points.csv", 10, "package fitcheck-llm 0.3.1, measurement archive"),
        ("launchers/trainjob.yaml", 10, "image: registry.example/zerofit:latest"),
        ("docs/a.md", 10, "https://github.com/huggingface/peft a simple page; https://huggingface.co/docs/peft"),
    ],
)
def test_what_is_meant_to_be_kept_is_not(path, size, text):
    assert faults(path, size, text) == []
