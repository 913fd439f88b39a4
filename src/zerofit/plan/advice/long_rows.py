"""List further settings if plain ones do not fit or cost time: Liger kernels, tiled MLPs, rows over nodes."""

from dataclasses import replace
from typing import Any

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.job import parallel_dims
from zerofit.job.request import Request
from zerofit.model import gradient_checkpointing, load
from zerofit.model.kernels import liger
from zerofit.plan import candidates
from zerofit.plan.candidate import Candidate, Plan


def settings(method: str, request: Request, plan: Plan, plain: list[Candidate]) -> list[Candidate]:
    """Return settings that need less memory for activations than the plain ones, the fastest first.

    They use Liger kernels if the model supports them, then Liger norms with tiled MLPs. Tiles are used for rows with
    more tokens than the hidden size, at micro batch 1 with every layer recomputed. The user's arguments are kept.
    """
    try:
        base = candidates.first_settings(method, request, plan.ranks, plan.gpu, plan.node)
        resolve.resolve_for_model(base)
    except UserError:
        return []
    kernels = _kernels(base, plan)
    result = []
    for one in plain if kernels else []:
        if one.setting.tp == 1:
            shape = replace(one.shape, liger=True)
            liger_one = candidates.with_formulas(one.request.put(**kernels), one.setting, shape, base, one.gpu)
            result.append(replace(liger_one, method=one.method))
    for change in _tiles(base, plan):
        tiled = request.put(effective_batch_size=base.effective_batch_size, **kernels, **change)
        result += [one for one in candidates.find(method, tiled, plan) if one.setting.tiles > 1]
    return sorted(result, key=lambda one: one.seconds)


def _kernels(base, plan: Plan) -> dict[str, bool]:
    """Return the argument that enables Liger kernels if a launch would self-test them and has not done so yet."""
    is_open = base.use_liger_kernel and base.source["use_liger_kernel"] == "decided"
    return {"use_liger_kernel": True} if is_open and not liger.will_run(base, plan.gpu.device_name) else {}


def _tiles(base, plan: Plan) -> list[dict[str, Any]]:
    """Return the arguments of tiled MLPs for each kind of setting to search."""
    if candidates.is_set(base, "tiled_mlp") or base.max_length <= load.load_config(base).get_text_config().hidden_size:
        return []
    tiles: dict[str, Any] = {"tiled_mlp": "auto"}
    if not candidates.is_set(base, "per_device_train_batch_size"):
        tiles |= {"per_device_train_batch_size": 1}
    kinds: list[dict] = [{}]
    if not any(candidates.is_set(base, name) for name in gradient_checkpointing.ARGUMENTS):
        kinds = [{"gradient_checkpointing": True, "activation_offload": on} for on in (False, True)]
    return [tiles | kind | split for split in [{}, *_over_nodes(base, plan)] for kind in kinds]


def _over_nodes(base, plan: Plan) -> list[dict[str, int]]:
    """Return the sizes of groups over several nodes, as arguments; [] if the user set a group size."""
    if any(candidates.is_set(base, flag) for flag in parallel_dims.size_flags() if flag in base.values):
        return []
    return candidates.groups_over_nodes(plan.ranks, plan.node)
