"""Check installed packages: minimum versions, tested versions, known problems, and a self-test."""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from zerofit.base import command_line
from zerofit.base.errors import first_line
from zerofit.base.paths import IN_WHEEL, PACKAGE, ROOT
from zerofit.launch.doctor_nodes import Finding, fail, ok, warn

TESTED = Path(__file__).with_name("tested.json")  # written by `make test-versions`

OPTIONAL = {"bitsandbytes", "torchao", "liger-kernel"}  # a run that needs one reports that it is missing

# ({package: versions} that fail in combination, symptom with its thread, fix). Versions that pyproject.toml or the
# import of a library rejects are not listed.
RULES = (
    (
        {"flash-attn": "<=2.7.4.post1", "torch": ">=2.7"},
        "a prebuilt wheel fails on import: undefined symbol in flash_attn_2_cuda "
        "(https://github.com/Dao-AILab/flash-attention/issues/1644)",
        "pip install --no-build-isolation --no-binary flash-attn --force-reinstall --no-deps flash-attn",
    ),
    (
        {"nvidia-nccl-cu13": "==2.29.2"},
        "this NCCL release hangs: a regression that 2.29.3 reverts (https://github.com/pytorch/pytorch/pull/174338)",
        "pip install 'nvidia-nccl-cu13>=2.29.3'",
    ),
)


def check() -> Iterator[Finding]:
    """Fail for versions below the minimum, and warn about versions newer than the tested ones."""
    from packaging.version import Version

    bad, newer = [], []
    newest = newest_tested()
    for requirement in requirements():
        name = requirement.name
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name not in OPTIONAL:
                bad.append(f"{name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            bad.append(f"{name} {version} is not {requirement.specifier}")
        elif name in newest and Version(version).release[:2] > Version(newest[name]).release[:2]:
            newer.append(f"{name} {version} (tested up to {Version(newest[name]).public})")
    if bad:
        yield fail("packages", "; ".join(bad), command_line.install())
    if newer:
        text = f"newer than the tested versions: {', '.join(newer)}"
        yield warn("packages", text, "`zerofit doctor` runs a self-test of these versions")


def requirements() -> list:
    """Return zerofit's requirements on this platform, from the checkout or from the installed package."""
    from packaging.requirements import Requirement

    if ROOT == IN_WHEEL:
        texts = metadata.requires("zerofit") or []
    else:
        texts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    parsed = map(Requirement, texts)
    return [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": ""})]


def newest_tested() -> dict[str, str]:
    """Return {package: newest version that passed all tests}."""
    from packaging.version import Version

    sets = json.loads(TESTED.read_text()).values()
    passed = [entry["versions"] for entry in sets if "failed" not in entry["tests"]]
    return {name: max((versions[name] for versions in passed), key=Version) for name in (passed[0] if passed else ())}


def known_problems() -> Iterator[Finding]:
    """Warn about installed versions that match RULES."""
    from packaging.specifiers import SpecifierSet

    for ranges, symptom, fix in RULES:
        try:
            versions = {name: metadata.version(name) for name in ranges}
        except metadata.PackageNotFoundError:
            continue
        if all(SpecifierSet(ranges[name]).contains(v, prereleases=True) for name, v in versions.items()):
            matched = ", ".join(f"{name} {version}" for name, version in versions.items())
            yield warn("known problem", f"{matched}: {symptom}", fix)


def environment() -> dict[str, str]:
    """Return the environment for a subprocess that imports this package."""
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}


def self_test() -> Iterator[Finding]:
    """Train the bundled model on packed rows for four steps, and report the certificate of the run."""
    with tempfile.TemporaryDirectory(prefix="zerofit-") as folder:
        run = Path(folder) / "run"
        words = ["sft", "--max_steps", "4", "--packing", "true", "--num_samples", "0", "--output_dir", str(run)]
        done = subprocess.run([sys.executable, "-m", "zerofit", *words], cwd=folder, capture_output=True, text=True,
                              errors="replace", env=environment())  # fmt: skip
        file = run / "certificate.json"
        checks = json.loads(file.read_text())["checks"] if file.exists() else []
    held = [check for check in checks if check["holds"]]
    broken = [check["sentence"] for check in checks if check["holds"] is False]
    fix = "install earlier versions of the newer packages, or the tested set: " + command_line.install()
    if done.returncode or broken:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["the run ended without output"]
        yield fail("self-test", "; ".join(broken) or first_line(RuntimeError(lines[-1])), fix)
    else:
        text = f"{len(held)} of {len(checks)} checks of a short run hold"
        yield ok("self-test", text)
