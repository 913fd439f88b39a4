"""Write certificate.md and certificate.json, and print their lines."""

from dataclasses import fields
from pathlib import Path

from transformers import TrainingArguments

from zerofit import __version__
from zerofit.base.errors import printable
from zerofit.base.paths import write_text
from zerofit.job import run_folder
from zerofit.job.settings import Check

ORDER = (
    "base_weights", "rendering", "template_tokens", "end_token", "documents_apart", "loss", "gradient", "rows", "saved",
)  # fmt: skip

MARKS = {True: "holds", False: "FAILS", None: "not checked"}

RED, PLAIN = "\033[31m", "\033[0m"

INTRODUCTION = """\
This certificate is the run manifest: each line was checked in this run by code independent of the training code
(transformers' rendering of chat templates, a plain cross entropy, the written files). A line marked *not checked* gives
the reason and guarantees nothing.
"""


def ordered(checks: list[Check]) -> list[Check]:
    """Return the newest check of each name, in the order of the run."""
    newest = {check.name: check for check in checks}
    return sorted(newest.values(), key=lambda check: ORDER.index(check.name) if check.name in ORDER else len(ORDER))


def holds(settings) -> bool:
    """Return whether no check has failed."""
    return not any(check.holds is False for check in ordered(settings.checks))


def write(settings, status: str, seconds: float) -> None:
    """Write both files into the run folder.

    Args: status: "before the first step", or how the run ended; seconds: time spent on the expensive checks.
    """
    folder, checks = Path(settings.output_dir), ordered(settings.checks)
    chosen = _chosen(settings)
    facts = run_folder.read_json(folder / "run.json")
    data = {name: entry.get("fingerprint") for name, entry in (facts.get("data") or {}).items()}
    run_folder.write_json(
        folder / "certificate.json",
        {
            "status": status,
            "holds": holds(settings),
            "seconds": round(seconds, 2),
            "checks": [vars(check) for check in checks],
            "settings": [{"argument": name, "value": value, "source": source} for name, value, source in chosen],
            "versions": facts.get("versions", {"zerofit": __version__}),
            "program": facts.get("program"),
            "data": data,
        },
    )
    lines = [
        f"# Certificate of {folder.name}", "",
        f"Status: {status}. {summary(checks)} The checks took {seconds:.1f} s.", "", INTRODUCTION,
        "| | check |", "|---|---|",
        *(f"| {MARKS[check.holds]} | {_cell(check.sentence)} |" for check in checks), "",
        "## Settings that differ from the libraries' defaults", "", "| argument | value | chosen by |", "|---|---|---|",
        *(f"| `{name}` | {_cell(value)} | {_cell(source)} |" for name, value, source in chosen), "",
        "## Software", "",
        *(f"- {name} {version}" for name, version in facts.get("versions", {}).items()),
        *(f"- {name} data: fingerprint {fingerprint}" for name, fingerprint in data.items()),
    ]  # fmt: skip
    write_text(folder / "certificate.md", "\n".join(lines) + "\n")


def _chosen(settings) -> list[tuple]:
    """Return (argument, value, source) of the arguments that differ from the library's default."""
    defaults = {f.name: f.default for f in fields(TrainingArguments)}
    return [
        (name, value, "zerofit's default" if source == "default" else source)
        for name, value, source in settings.rows()
        if not name.endswith("_token")
        and (source != "default" or (name in defaults and value not in (defaults[name], None)))
    ]


def _cell(value) -> str:
    """Format a value as a cell of a Markdown table."""
    return printable(str(value)).replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")


def summary(checks: list[Check]) -> str:
    """Return how many checks hold, fail and were not made."""
    counts = {state: sum(check.holds is state for check in checks) for state in MARKS}
    text = f"{counts[True]} of {counts[True] + counts[False]} checks hold"
    text += f", {counts[None]} not made" if counts[None] else ""
    return text + ("." if not counts[False] else f"; {counts[False]} FAIL{'S' * (counts[False] == 1)}.")


def show(settings, names: list[str], terminal: bool) -> None:
    """Print the path of the page and the failed lines of these checks (--verbose: all), failed ones in red."""
    checks = ordered(settings.checks)
    print(f"certificate: {summary(checks)[:-1]} ({Path(settings.output_dir) / 'certificate.md'})", flush=True)
    for check in checks:
        if check.name in names and (settings.verbose or check.holds is False):
            line = printable(f"  {MARKS[check.holds]:<11} {check.sentence}")
            print(f"{RED}{line}{PLAIN}" if check.holds is False and terminal else line, flush=True)
