"""Run the cases of the selected GPU tests side by side."""

import pytest

from zerofit.base import distributed

from . import cases

PROCESS_BYTES = 1.5 * 2**30  # of the GPU: a context, the kernels' workspaces, and the bundled model


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory) -> dict[str, cases.Outcome]:
    """Run the cases of the selected tests, and what these need, within the budget; {name: outcome}."""
    import torch

    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    names = {each["case"].name for each in parameters if isinstance(each.get("case"), cases.Case)}
    free_bytes, _ = torch.cuda.mem_get_info()
    parallel = max(1, min(distributed.cores() * 3 // 4, int(free_bytes / PROCESS_BYTES), 16))
    folder = tmp_path_factory.mktemp("gpu_runs")
    return cases.run_all(cases.with_what_they_need(names), folder, parallel, cases.BUDGET_SECONDS)
