"""`zerofit resume`: start a run again from its latest valid checkpoint."""

import argparse
import json
import shlex
from pathlib import Path

from zerofit import command_line, run_folder
from zerofit.errors import UserError
from zerofit.launch import launch, prepare, retry
from zerofit.launch.cluster import node_options
from zerofit.paths import ROOT


def main(argv: list[str]) -> None:
    """`zerofit resume`: see --help. Flags after the folder are added to the run's own and win over them; on another
    number of processes the effective batch stays.

    Raises: UserError for a folder that holds no run, or one that has finished; otherwise as `zerofit launch`.
    """
    parser = argparse.ArgumentParser(prog="zerofit resume", allow_abbrev=False, description=__doc__)
    prepare.add_placement(parser, gpus="")  # as many as before
    node_options.add_options(parser)
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
    if run_folder.finished(folder):
        raise UserError(f"{folder}: this run has finished; its model is in {folder / 'final'}.")
    new = [*given.flags, *shlex.split(given.args)]
    again = ["--" + word[2:].partition("=")[0].replace("-", "_") for word in new if word.startswith("--")]
    here = node_options.of(given)
    machines = here.most if here else 1
    new_ranks = int(given.gpus) * machines if given.gpus.isdigit() else ranks
    if new_ranks not in (0, ranks) and not set(retry.BATCH) & set(again):
        whole, micro = (facts["arguments"][name[2:]]["value"] for name in retry.BATCH[:2])
        flags = [*command_line.drop(flags, *retry.BATCH), *retry.same_batch(whole, micro, new_ranks)]
    flags = flags_without_offload(flags, new, facts["arguments"]["offload"]["value"])
    words = command_line.drop(flags, "--resume_from_checkpoint", "--output_dir", "--gpus", *again)
    launch.main([
        "--gpus", given.gpus or str(ranks // machines), "--launcher", given.launcher, "--port", given.port, "--args", given.args,
        "--nnodes", given.nnodes, "--node_rank", given.node_rank, "--master_addr", given.master_addr,
        "--join_timeout", given.join_timeout, "--interface", given.interface,
        str(ROOT / "recipes" / f"{recipe}.py"), *words, *given.flags, "--output_dir", str(folder),
        "--resume_from_checkpoint", "auto",
    ])  # fmt: skip


def flags_without_offload(flags: list[str], new: list[str], offload: str) -> list[str]:
    """Return the run's flags, without an offload that the new stage does not have; a line says so.

    Args: flags: the run's; new: those of this command; offload: what the run has kept in host memory.
    """
    stage = command_line.value_of(new, ("--zero",))
    if command_line.value_of(new, ("--offload",)) is not None or offload == "none" or stage not in ("0", "1", "2"):
        return flags
    instead = "none" if stage == "0" else "optimizer"
    if instead == offload:
        return flags
    print(f"note: ZeRO stage {stage} cannot offload {offload}: the run goes on with --offload {instead}", flush=True)
    gone = ("--offload_path", "--offload_ratio", "--super_offload") if instead == "none" else ()
    return [*command_line.drop(flags, "--offload", *gone), "--offload", instead]
