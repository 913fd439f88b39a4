"""`zerofit data`: count and print the training data of a run, and check its limits."""

import argparse
import os
import sys
import time
from pathlib import Path

from zerofit.base import command_line
from zerofit.base.errors import UserError
from zerofit.certificate import data as checks
from zerofit.checkpoint import resumable
from zerofit.config import resolve, show
from zerofit.data import inspection
from zerofit.data.load import load_datasets
from zerofit.job import program, run_folder
from zerofit.model import load, tested_models


def main(argv: list[str]) -> None:
    """`zerofit data`: see --help. Print the report, write data.json, check the limits.

    Raises: UserError for user errors and for data beyond a limit.
    """
    settings = _settings(argv)
    if settings is None:
        return

    folder = resumable.choose_folder(settings)
    tokenizer = load.load_tokenizer(settings)
    counting = settings.replace(bad_rows="drop")  # count all bad rows first, raise below
    train_set, eval_set = load_datasets(counting, tokenizer)
    ends = checks.note(counting, train_set, eval_set, tokenizer)
    facts = inspection.inspect(counting, train_set, eval_set, tokenizer, ends)
    colored = bool(sys.stdout.isatty() or os.environ.get("FORCE_COLOR"))
    facts["decisions"].append(tested_models.sentence(load.load_config(counting).model_type))
    print(inspection.describe(counting, facts))
    for text in inspection.render_rows(train_set.dataset, tokenizer, colored):
        print(text)
    for sentence in facts["warnings"]:  # at the end of the output, so that users see them
        print("\n\033[1;31mWARNING\033[0m:" if colored else "\nWARNING:", sentence)
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.write_json(folder / "data.json", facts)
    print(f"\nwritten: {folder / 'data.json'}", flush=True)
    for name in ("training", "evaluation"):
        bad = facts.get(name, {}).get("dropped_bad")
        if bad and settings.bad_rows == "error":
            raise UserError(
                f"{bad:,} of {facts[name]['rows']:,} {name} rows are invalid (see above); fix or remove them, or "
                "exclude them with --bad_rows drop."
            )
    inspection.enforce(counting, facts["fractions"])


def _settings(argv: list[str]):
    """Return the settings of a `zerofit data` command line, or None after printing for --help or --show."""
    parser = argparse.ArgumentParser(
        prog="zerofit data",
        allow_abbrev=False,
        description="Print the training data of a run, without a model or a GPU. All flags of the recipe are allowed "
        "(`zerofit launch recipes/sft.py --help`).",
    )
    parser.add_argument(
        "--recipe",
        default=program.DEFAULT,
        help="sft, lora, dpo, pipeline or the file of a recipe (default sft)",
    )
    parser.add_argument("--output_dir", default="", help="folder for data.json (default runs/data-<time>)")
    parser.add_argument("--args", default="", help="more flags of the recipe in one string, split as in a shell")
    args, flags = parser.parse_known_args(argv)
    recipe = program.start(args.recipe).recipe
    flags, _ = command_line.with_extra_flags(flags, args.args)
    if {"--help", "-h"} & set(flags):
        parser.print_help()
        return None
    output = ["--output_dir", args.output_dir] if args.output_dir else []
    # --gpus overrides the process count of the YAML file, which is for the run
    flags = ["--gpus", "1", *flags, *output]
    settings = resolve.resolve_settings(recipe, flags, 1, arguments_only=True)
    if settings.show:
        print(f"data for {settings.recipe}\n{show.summary(settings)}")
        return None
    if settings.source["output_dir"] != "flag":
        settings.output_dir = str(Path("runs") / f"data-{time.strftime('%Y%m%d-%H%M%S')}")
    return settings
