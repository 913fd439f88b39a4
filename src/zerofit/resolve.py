"""Settle the arguments of a job: read them, fill in what was not given, and refuse what does not go together."""

import os
import sys

from . import adapters, args, node_disks, quantized, world


def settings(recipe: str, argv: list[str] | None = None, world_size: int | None = None, gpu=None) -> args.Settings:
    """Return the settings of a command line, resolved and checked.

    Args: argv, world_size: of a job that is still to be started; default: this process's own. gpu: see args.parse.
    Raises: UserError for the user's mistakes, before a GPU or a process group is touched.
    """
    taken = world.take_over_environment()
    other_size = world.check_size() if argv is None else None
    found = args.parse(recipe, sys.argv[1:] if argv is None else argv, world_size or world.size(), gpu)
    if other_size:
        found.decisions.append(other_size)
    if taken:
        found.decisions.append(
            f"accelerate's own settings are not used ({', '.join(taken)}): the recipe decides; see --zero, --bf16"
        )
    if argv is None and found.use_cpu and os.environ.get("OMP_WAIT_POLICY") == "passive":
        found.decisions.append(
            "OMP_WAIT_POLICY passive: idle threads sleep, so that other work slows the run down less"
        )
    _check(found)
    if argv is None and found.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also for libraries that look for GPUs later
    return found


def _check(found: args.Settings) -> None:
    """What belongs together, module by module.

    Raises: UserError for what cannot work or would be silently wrong.
    """
    from . import loss, mlp, stream, techniques

    techniques.check(found)
    adapters.resolve(found)
    node_disks.resolve(found)
    quantized.resolve(found)
    _choose_batches(found)
    stream.choose(found)
    loss.check_flags(found)
    mlp.check_flags(found)
    _check_memory_report(found)


def _choose_batches(settings: args.Settings) -> None:
    """Packed and padding-free batches need attention that keeps documents apart.

    Raises: UserError for an implementation that would mix them.
    """
    from . import attention
    from .errors import UserError

    chosen, asked = settings.attn_implementation, settings.padding_free
    attention.check_available(chosen, settings.use_cpu)
    keeps_apart = chosen in ("sdpa", "flex_attention") or attention.is_flash(chosen)
    if settings.packing and asked == "false":
        raise UserError("--packing --padding_free false: packed sequences are not padded; leave one of the two out.")
    if (settings.packing or asked == "true") and not keeps_apart:
        flag = "--packing" if settings.packing else "--padding_free true"
        raise UserError(
            f"{flag} with --attn_implementation {chosen}: documents in one row would read each other; use sdpa, "
            "flex_attention or flash_attention_2."
        )
    if asked == "auto":
        # A loop over documents (the CPU's way) costs more than the padding that it saves on short rows.
        on = settings.packing or (keeps_apart and not settings.use_cpu)
        args.decide(settings, "padding_free", str(on).lower(), "with --packing, or on a GPU") if on else None
    if settings.padding_free == "true" and chosen == "sdpa":
        name = attention.register()
        args.decide(
            settings, "attn_implementation", name, "plain sdpa would let the documents of a row read each other"
        )


def _check_memory_report(settings: args.Settings) -> None:
    """Following costs time, and compiled code cannot be followed.

    Raises: UserError with torch_compile.
    """
    from .errors import UserError

    if settings.memory_report:
        if settings.torch_compile:
            raise UserError("--memory_report with --torch_compile: compiled code cannot be followed; drop one of them.")
        settings.decisions.append("memory_report: the first 3 steps, save and evaluation are slower, being followed")
