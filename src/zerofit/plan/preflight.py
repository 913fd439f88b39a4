"""Check at the start of a run whether it fits; handle --zero auto and --plan."""

import json
import os
import re

from zerofit import command_line, hardware
from zerofit.config import parse, resolve
from zerofit.errors import UserError
from zerofit.hardware import GIB
from zerofit.plan import candidates, formulas, predict, search, simulate
from zerofit.settings import Settings
from zerofit.train import memory_history

CHECK_SECONDS = 18  # that a launch waits for the simulation; the whole check then takes less than 20


def publish(plan: dict | None) -> None:
    """Store the prediction in an environment variable, so that no process of this job checks again."""
    os.environ[memory_history.PLANNED] = json.dumps(plan or {})


def prestart(settings) -> None:
    """Start the simulation's process for `check`, so that it imports while the data is read."""
    if (settings.memory_limit or not settings.use_cpu) and settings.pp_size == 1:
        simulate.prestart()


def check(settings, seconds: float | None = CHECK_SECONDS) -> dict | None:
    """Predict the job's memory, print whether it fits, and return the prediction; None if there is none.

    Args: seconds: how long to wait for the simulation if the job fits by formula; None: until it ends.
    Raises: NothingFits if the job does not fit by simulation, without --ignore_plan; UserError for the user's mistakes.
    """
    if settings.pp_size > 1:
        return _check_stages(settings)
    try:
        plan = predict.predict(settings, seconds)
    except simulate.SimulationFailed as error:
        print(f"plan: the exact check failed: {error}; whether the job fits is not known", flush=True)
        return None
    finally:
        simulate.stop_prestarted()
    if plan is None:
        return None
    peak, limit = plan["peak_bytes"], plan["limit_bytes"]
    size = f"{peak / GIB:.2f} of {limit / GIB:.2f} GiB a rank, highest in the {plan['phase']} phase"
    fits = "fits" if peak <= limit else "does not fit"
    if "by" in plan:
        print(f"plan: {candidates.ESTIMATE.format(plan['by'])}\nplan: {fits} by formula: {size}", flush=True)
        return plan
    if peak > limit and not settings.ignore_plan:
        learned = f", {plan['learned_bytes'] / GIB:.2f} GiB more kept free since "
        learned += f"{memory_history.history()} has runs above their plan"
        raise candidates.NothingFits(
            f"this job does not fit: {size}{learned if plan['learned_bytes'] else ''}; `make plan` with the same "
            "arguments finds one that does, --ignore_plan true starts it anyway."
        )
    print(f"plan: {fits}: {size}", flush=True)
    return plan


def _check_stages(settings) -> dict | None:
    """Print by formula whether the fullest stage of a pipeline fits, and return the prediction; None on a CPU."""
    plan = predict.predict_stages(settings)
    if plan is None:
        return None
    fits = "fits" if plan["peak_bytes"] <= plan["limit_bytes"] else "does not fit"
    print(
        f"plan: {fits} by formula (no simulation covers pipelines; a margin of {candidates.FORMULA_MARGIN:.0%} is in "
        f"it): {plan['peak_bytes'] / GIB:.2f} of {plan['limit_bytes'] / GIB:.2f} GiB a rank of stage {plan['stage']}, "
        f"the fullest of {settings.pp_size}",
        flush=True,
    )
    return plan


def only_print(settings: Settings) -> None:
    """Print the output of --plan or --show and exit the process; without either, do nothing."""
    if settings.plan:
        dry_run(settings)
        raise SystemExit(0)
    if settings.show:
        from zerofit.config import show

        count = settings.world_size
        print(f"{settings.recipe}, {count} process{'es' * (count > 1)}\n{show.summary(settings)}")
        raise SystemExit(0)


def dry_run(settings) -> None:
    """Print the predicted memory of the job (--plan) on --gpu_type or this machine.

    Raises: NothingFits if it does not fit; UserError without a GPU, --gpu_type and --memory_limit.
    """
    from zerofit.train import memory_report

    if settings.gpu_type != "detect":
        gpu = hardware.find(settings.gpu_type)
        settings = resolve.resolve_settings(settings.recipe, settings.flags, settings.world_size, gpu)
    if settings.use_cpu and not settings.memory_limit:
        raise UserError(
            "--plan: there is no GPU here; name one with --gpu_type h100-80g, or a limit with --memory_limit."
        )
    if plan := check(settings, seconds=None):
        print(memory_report.table(plan["peak"]))


def is_auto(recipe: str, flags: list[str]) -> bool:
    """Return whether `auto` is explicit as --zero on the command line, or as zero in its YAML file."""
    return parse.given(recipe, flags, "zero") == "auto"


def chosen_flags(recipe: str, flags: list[str], ranks: int, node: int = formulas.GPUS_OF_A_NODE) -> list[str]:
    """Return the flags of the fastest setting that fits this machine's GPUs, for --zero auto.

    On a CPU the flags are unchanged: the stage then follows from the number of ranks. node: GPUs of a node.
    Raises: NothingFits if no setting does.
    """
    if not hardware.torch_sees_some():
        return flags
    gpu = hardware.find("detect", min(ranks, node))
    bare = command_line.drop_value(flags, "--zero", "auto")
    plan = search.search(
        candidates.methods_to_try("", recipe, bare),
        bare,
        ranks,
        gpu,
        say=lambda text: print(text, flush=True),
        node=node,
    )
    from zerofit.plan import report

    if plan.chosen is None:
        raise candidates.NothingFits(report.nothing_fits(plan))
    print(f"chosen: {plan.chosen.label}, {plan.chosen.peak / GIB:.1f} of {plan.limit / GIB:.1f} GiB", flush=True)
    return plan.chosen.flags


def record_oom(errors: list[str]) -> None:
    """Add an out-of-memory job to the history and clear its published prediction.

    The history then knows that the job needed more than its limit, unless another process used the GPU. The prediction
    is cleared since the next attempt has other settings.
    Args: errors: the ranks' tracebacks, with torch's message on the use of the GPU.
    """
    predicted = json.loads(os.environ.get(memory_history.PLANNED, "{}"))
    publish(None)
    if (
        predicted
        and "by" not in predicted
        and predicted["gpu"] != "cpu"
        and predicted["peak_bytes"] < predicted["limit_bytes"]
        and any(_alone_on_the_gpu(text) for text in errors)
    ):
        memory_history.learn(predicted, predicted["limit_bytes"])


def _alone_on_the_gpu(text: str) -> bool:
    """Return whether, by torch's out-of-memory message, no other process used the GPU.

    It reads: "GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free. [Process 7 has 4.00 GiB memory in
    use.] Including non-PyTorch memory, this process has 73.80 GiB memory in use." (c10/cuda/CUDACachingAllocator.cpp)
    """
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    sizes = []
    for before in ("total capacity of", "of which", "this process has"):
        size = re.search(rf"{before} ([\d.]+) (bytes|KiB|MiB|GiB)", text)
        if size is None:
            return False
        sizes.append(float(size[1]) * units[size[2]])
    total, free, own = sizes
    return total - free - own < hardware.NOBODY_ELSE_BYTES
