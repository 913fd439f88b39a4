"""Tell whether the kit takes the arguments that a plan advises."""

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.job.request import Request


def accepts(request: Request, ranks: int, gpu, **more) -> bool:
    """Return whether a job of `ranks` GPUs can start with a request and these arguments more."""
    try:
        settings = resolve.resolve(request.put(**more), ranks, gpu)
        resolve.resolve_for_model(settings)
    except UserError:
        return False
    return True
