"""`zerofit models`: print which model types train with zerofit, and which checks fail for each."""

import argparse
from collections import Counter

from zerofit.base.errors import UserError
from zerofit.model import tested_models


def main(argv: list[str]) -> None:
    """Print the results of `make models` for the named model types, or for all.

    Raises: UserError for a model type without a result.
    """
    parser = argparse.ArgumentParser(prog="zerofit models", allow_abbrev=False, description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model_type of config.json, e.g. llama (default: all)")
    types = parser.parse_args(argv).types
    tested = rows()
    if unknown := [name for name in types if name not in tested]:
        raise UserError(f"{', '.join(unknown)}: not tested; `zerofit models` lists the tested model types.")
    chosen = [row for name, row in tested.items() if name in types or not types]
    print("\n".join(chosen if types else [*summary(), *chosen]))


def summary() -> list[str]:
    """Return how many model types were tested, and how many fail each check."""
    results = tested_models.results()
    failed = Counter(check for checks in results["types"].values() for check in checks)
    counts = ", ".join(f"{check} {count}" for check, count in failed.most_common())
    clean = sum(not checks for checks in results["types"].values())
    text = f"{len(results['types'])} model types train as tiny models with transformers {results['transformers']}; "
    text += f"{clean} pass all checks. Failures by check: {counts}. {len(results['refused'])} types are refused."
    return [text, ""]


def rows() -> dict[str, str]:
    """Return {model type: a Markdown list item with the failed checks and their reasons}."""
    results = tested_models.results()
    failures = {name: "; ".join(f"{check}: {why}" for check, why in checks.items()) or "all checks pass"
                for name, checks in results["types"].items()}  # fmt: skip
    failures |= {name: f"refused: {why}" for name, why in results["refused"].items()}
    return {name: f"- `{name}`: {text}" for name, text in sorted(failures.items())}
