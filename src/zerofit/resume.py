"""make resume RUN=runs/x: the same job again, from its newest good checkpoint."""

import argparse
import json
from pathlib import Path

from . import args, launch, probe, report
from .errors import UserError


def main(argv: list[str]) -> None:
    """`zerofit resume`: see --help. Flags after the folder are added to the run's own and win over them.

    Raises: UserError for a folder that holds no run, or one that has finished; otherwise as `zerofit launch`.
    """
    parser = argparse.ArgumentParser(prog="zerofit resume", allow_abbrev=False, description=__doc__)
    launch.add_placement(parser, gpus="")  # as many as before
    parser.add_argument("run", help="the run folder")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="more of the recipe's flags")
    given = parser.parse_args(argv)
    folder = Path(given.run).expanduser()
    try:
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        flags, recipe, ranks = facts["flags"], facts["recipe"], facts["world_size"]
    except (OSError, ValueError, KeyError):
        raise UserError(
            f"{folder}: is no run folder (its run.json is missing or damaged); name one of runs/."
        ) from None
    if report.finished(folder):
        raise UserError(f"{folder}: this run has finished; its model is in {folder / 'final'}.")
    again = [word.partition("=")[0] for word in given.flags if word.startswith("--")]
    words = probe.drop(flags, "--resume_from_checkpoint", "--output_dir", "--gpus", *again)
    launch.main([
        "--gpus", given.gpus or str(ranks), "--launcher", given.launcher, "--port", given.port, "--args", given.args,
        str(args.ROOT / "recipes" / f"{recipe}.py"), *words, *given.flags, "--output_dir", str(folder),
        "--resume_from_checkpoint", "auto",
    ])  # fmt: skip
