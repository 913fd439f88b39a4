"""Write the command line that runs a candidate of a plan."""

import shlex

from zerofit.base.paths import IN_WHEEL, PROJECT
from zerofit.job import groups, program
from zerofit.job.request import FLAG, Request
from zerofit.plan import candidates
from zerofit.plan.candidate import Candidate
from zerofit.plan.formulas import Setting

# Arguments that have a make variable.
WITH_VARIABLE = ("zero", "offload", "model", "data", "config", *groups.flags())


def of(candidate: Candidate) -> str:
    """Return the command that runs the candidate, on several nodes that of the first: of make where a Makefile is."""
    request, ranks = candidate.request, candidate.setting.ranks
    if request.get("data") == [candidates.UNNAMED]:
        request = request.put(data=["your.jsonl"])
    if request.get("offload") == "none" and request.source["offload"] == FLAG:  # that of a file would be back
        request = request.drop("offload")
    several = _first_node(candidate.setting)
    if PROJECT == IN_WHEEL:
        return _command_without_make(request, ranks, several)
    variables = {"GPUS": str(ranks)}
    if several:
        variables = {"GPUS": several[0], "NODES": several[1], "NODE_RANK": "0", "MASTER_ADDR": "name-of-node-0"}
    of_make = {name: words[1] for name in WITH_VARIABLE if len(words := _words(request, name)) == 2}
    rest = request.drop(*of_make).flags()  # also --data with several files, since a make variable holds one
    variables |= {name.removesuffix("_size").upper(): of_make[name] for name in request.values if name in of_make}
    more = f" ARGS={shlex.quote(shlex.join(rest))}" if rest else ""
    return f"{program.make(request.recipe)} " + " ".join(f"{k}={shlex.quote(v)}" for k, v in variables.items()) + more


def _words(request: Request, name: str) -> list[str]:
    """Return the words of a flag of the command line; [] where it does not stand there."""
    return request.drop(*(other for other in request.values if other != name)).flags()


def _first_node(setting: Setting) -> tuple[str, str] | None:
    """Return (GPUs of a node, nodes) if there are several nodes with equal GPUs."""
    ranks, nodes = setting.ranks, setting.nodes
    return (str(ranks // nodes), str(nodes)) if nodes > 1 and ranks % nodes == 0 else None


def _command_without_make(request: Request, ranks: int, several: tuple[str, str] | None) -> str:
    """Return the `zerofit` command that runs a request in any folder."""
    placed = ["--gpus", str(ranks)]
    if several:
        placed = ["--gpus", several[0], "--nnodes", several[1], "--node_rank", "0", "--master_addr", "name-of-node-0"]
    if program.has_verb(request.recipe):
        return shlex.join(["zerofit", request.recipe.name, *placed, *request.flags()])
    return shlex.join(["zerofit", "launch", *placed, str(program.file_of(request.recipe)), *request.flags()])
