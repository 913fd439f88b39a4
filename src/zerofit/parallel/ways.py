"""Register the ways to share a row among ranks, in the order in which their arguments are resolved."""

from zerofit.job import groups
from zerofit.job.settings import Settings
from zerofit.job.technique import refuse_conflicts
from zerofit.parallel import pipeline, sequence_parallel, tensor_parallel

for _way in (sequence_parallel.PARALLEL, tensor_parallel.PARALLEL, pipeline.PARALLEL):
    groups.register(_way)


def resolve(settings: Settings) -> None:
    """Check and complete the arguments of each way. Raises: UserError for what one excludes."""
    for way in groups.ways():
        way.check_recipe(settings)
        refuse_conflicts(way, settings)
        way.resolve(settings)


def resolve_for_model(settings: Settings, config) -> None:
    """Check the model's config.json for each way. Raises: UserError for a model that one cannot split."""
    for way in groups.ways():
        way.resolve_for_model(settings, config)


def flag_that_splits(what: str) -> str:
    """Return the first flag with which ranks split the "tokens", "matrices" or "layers", e.g. for advice."""
    return next(f"--{way.flag}" for way in groups.ways() if way.splits == what)
