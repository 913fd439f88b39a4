"""Register the dimensions of parallelism, in the order in which their arguments are resolved."""

from zerofit.job import parallel_dims
from zerofit.job.settings import Settings
from zerofit.job.technique import refuse_conflicts
from zerofit.parallel import pipeline, sequence_parallel, tensor_parallel

for _dim in (sequence_parallel.PARALLEL, tensor_parallel.PARALLEL, pipeline.PARALLEL):
    parallel_dims.register(_dim)


def resolve(settings: Settings) -> None:
    """Check and complete the arguments of each dimension. Raises: UserError for a conflict."""
    for dim in parallel_dims.registered():
        dim.check_recipe(settings)
        refuse_conflicts(dim, settings)
        dim.resolve(settings)


def resolve_for_model(settings: Settings, config) -> None:
    """Check the model's config.json for each dimension. Raises: UserError for a model that cannot be split."""
    for dim in parallel_dims.registered():
        dim.resolve_for_model(settings, config)


def flag_that_splits(what: str) -> str:
    """Return the first flag that splits the "tokens", "matrices" or "layers" over ranks, e.g. for advice."""
    return next(f"--{dim.flag}" for dim in parallel_dims.registered() if dim.splits == what)
