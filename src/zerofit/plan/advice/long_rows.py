"""List what a plan tries where plain settings do not fit or cost time: Liger's kernels, tiled MLPs, rows over nodes."""

from dataclasses import replace
from typing import Any

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.job import groups
from zerofit.job.request import Request
from zerofit.model import gradient_checkpointing, load
from zerofit.model.kernels import liger
from zerofit.plan import candidates
from zerofit.plan.candidate import Candidate, Plan


def settings(method: str, request: Request, plan: Plan, plain: list[Candidate]) -> list[Candidate]:
    """Return settings that need less memory for the activations of a row than the plain ones, the fastest first.

    Those with Liger's kernels where the model has them, then with its norms and tiles of the MLP. Tiles are for rows of
    more tokens than the model is wide, at micro batch 1 with every layer recomputed. What the user has set is kept.
    """
    try:
        base = candidates.first_settings(method, request, plan.ranks, plan.gpu, plan.node)
        resolve.resolve_for_model(base)
    except UserError:
        return []
    kernels = _kernels(base, plan)
    found = [_with_kernels(one, base, kernels) for one in plain if kernels and one.setting.tp == 1]
    for change in _tiles(base, plan):
        try:
            asked = request.put(effective_batch_size=base.effective_batch_size, **kernels, **change)
            tried = candidates.candidates(method, asked, plan.ranks, plan.gpu, node=plan.node)
        except UserError:
            continue  # a mixture of experts has no tiles; the user's other flags may not go with it
        found += [one for one in tried if one.setting.tiles > 1]
    return sorted(found, key=lambda one: one.seconds)


def _kernels(base, plan: Plan) -> dict[str, bool]:
    """Return the argument that turns Liger's kernels on, where a start would try them and no start has proven them."""
    is_open = base.use_liger_kernel and base.source["use_liger_kernel"] == "decided"
    return {"use_liger_kernel": True} if is_open and not liger.will_run(base, plan.gpu.device_name) else {}


def _with_kernels(one: Candidate, base, kernels: dict[str, bool]) -> Candidate:
    """Return a setting with Liger's kernels."""
    request, shape = one.request.put(**kernels), replace(one.shape, liger=True)
    return replace(candidates.with_formulas(request, one.setting, shape, base, one.gpu), method=one.method)


def _tiles(base, plan: Plan) -> list[dict[str, Any]]:
    """Return the arguments of tiled MLPs to add to a request with these Settings, for each kind of setting to try."""
    if candidates.is_set(base, "tiled_mlp") or base.max_length <= _width(base):
        return []
    tiles: dict[str, Any] = {"tiled_mlp": "auto"}
    if not candidates.is_set(base, "per_device_train_batch_size"):
        tiles |= {"per_device_train_batch_size": 1}
    kinds: list[dict] = [{}]
    if not any(candidates.is_set(base, name) for name in gradient_checkpointing.ARGUMENTS):
        kinds = [{"gradient_checkpointing": True, "activation_offload": on} for on in (False, True)]
    return [tiles | kind | split for split in [{}, *_over_nodes(base, plan)] for kind in kinds]


def _width(base) -> int:
    """Return the features of a token's hidden state."""
    return load.load_config(base).get_text_config().hidden_size


def _over_nodes(base, plan: Plan) -> list[dict[str, int]]:
    """Return the sizes of groups over several nodes, as arguments, where the user has set no group."""
    if any(candidates.is_set(base, flag) for flag in groups.flags() if flag in base.values):
        return []
    return candidates.groups_over_nodes(plan.ranks, plan.node)
