"""Set up DistributedDataParallel for ZeRO stage 0 on several ranks."""

from zerofit.errors import UserError
from zerofit.settings import decide


def resolve_for_model(settings, config) -> None:
    """Decide --ddp_static_graph: on if every step has the same autograd graph.

    Off with gradient accumulation (torch 2.13 fails an internal assert of no_sync), for mixtures of experts (a step
    uses the experts that its tokens select) and for Sophia (its estimate is a second backward).
    Args: config: of the model.
    Raises: UserError for --ddp_static_graph true with gradient accumulation.
    """
    uses_ddp = settings.deepspeed is None and settings.world_size > 1
    accumulates = settings.gradient_accumulation_steps > 1
    if settings.ddp_static_graph and uses_ddp and accumulates:
        raise UserError(
            f"--ddp_static_graph true with {settings.gradient_accumulation_steps} accumulation steps: PyTorch's static "
            "graph does not work with steps that do not synchronise; leave it out."
        )
    if settings.ddp_static_graph is not None or not uses_ddp:
        return
    experts = any("expert" in key for key in config.to_dict())
    if not accumulates and not experts and settings.optim != "sophia":
        decide(settings, "ddp_static_graph", True, "one micro batch a step through a dense model")


def apply(trainer) -> None:
    """Make gradients views of DDP's buckets, which saves a copy; call before the model is wrapped."""
    handler = trainer.accelerator.ddp_handler
    if handler is not None:
        handler.gradient_as_bucket_view = True
        handler.static_graph = bool(trainer.settings.ddp_static_graph)
