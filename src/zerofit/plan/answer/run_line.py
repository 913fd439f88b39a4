"""Write the command line that runs a candidate of a plan."""

import shlex

from zerofit.base.paths import IN_WHEEL, PROJECT
from zerofit.job import parallel_dims, program
from zerofit.job.request import FLAG, Request
from zerofit.plan import candidates
from zerofit.plan.candidate import Candidate

# Arguments that have a make variable.
WITH_VARIABLE = ("zero", "offload", "model", "data", "config", *parallel_dims.size_flags())


def command_of(candidate: Candidate) -> str:
    """Return the command that runs the candidate (on the first node), with make if there is a Makefile."""
    request, ranks = candidate.request, candidate.setting.ranks
    if request.get("data") == [candidates.DATA_PLACEHOLDER]:
        request = request.put(data=["your.jsonl"])
    if request.get("offload") == "none" and request.source["offload"] == FLAG:  # a file's value would apply
        request = request.drop("offload")
    nodes = candidate.setting.nodes
    several = (str(ranks // nodes), str(nodes)) if nodes > 1 and ranks % nodes == 0 else None  # with equal GPUs
    if PROJECT == IN_WHEEL:
        return _command_without_make(request, ranks, several)
    variables = {"GPUS": str(ranks)}
    if several:
        variables = {"GPUS": several[0], "NODES": several[1], "NODE_RANK": "0", "MASTER_ADDR": "name-of-node-0"}
    by_make = {name: words[1] for name in WITH_VARIABLE if len(words := _words(request, name)) == 2}
    rest = request.drop(*by_make).flags()  # including --data with several files: a make variable holds one
    variables |= {name.removesuffix("_size").upper(): by_make[name] for name in request.values if name in by_make}
    more = f" ARGS={shlex.quote(shlex.join(rest))}" if rest else ""
    return (
        f"{program.make_command(request.recipe)} "
        + " ".join(f"{k}={shlex.quote(v)}" for k, v in variables.items())
        + more
    )


def _words(request: Request, name: str) -> list[str]:
    """Return the words of a command line flag; [] if not on the command line."""
    return request.drop(*(other for other in request.values if other != name)).flags()


def _command_without_make(request: Request, ranks: int, several: tuple[str, str] | None) -> str:
    """Return the `zerofit` command that runs a request in any folder."""
    machines = ["--gpus", str(ranks)]
    if several:
        machines = ["--gpus", several[0], "--nnodes", several[1], "--node_rank", "0", "--master_addr", "name-of-node-0"]
    if program.has_verb(request.recipe):
        return shlex.join(["zerofit", request.recipe.name, *machines, *request.flags()])
    return shlex.join(["zerofit", "launch", *machines, str(program.file_of(request.recipe)), *request.flags()])
