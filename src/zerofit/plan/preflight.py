"""Check at the start of a run whether it fits; ZERO=auto and --plan."""

import json
import os
import re

from zerofit import hardware
from zerofit.config import parse
from zerofit.errors import UserError
from zerofit.hardware import GIB
from zerofit.plan import candidates, formulas, predict, search, simulate
from zerofit.settings import Settings
from zerofit.train import memory_history

CHECK_SECONDS = 18  # that a launch waits for a ghost; the whole check then takes less than 20


def publish(found: dict | None) -> None:
    """Tell the run what was predicted, and that it need not ask again."""
    os.environ[memory_history.PLANNED] = json.dumps(found or {})


def prestart(settings) -> None:
    """Begin what `check` will wait for; it imports while the data are read."""
    if settings.memory_limit or not settings.use_cpu:
        simulate.prestart()


def check(settings, seconds: float | None = CHECK_SECONDS) -> dict | None:
    """`predict`, said in a line; None also where it is not known.

    Args: seconds: that the simulation is waited for when the job fits by formula; None: to its end.

    Raises: NothingFits when it does not fit by simulation and --ignore_plan is not given; UserError for the user's mistakes.
    """
    try:
        found = predict.predict(settings, seconds)
    except simulate.SimulationFailed as error:
        print(f"plan: the exact check failed: {error}; whether the job fits is not known", flush=True)
        return None
    finally:
        simulate.stop_prestarted()
    if found is None:
        return None
    peak, limit = found["peak_bytes"], found["limit_bytes"]
    size = f"{peak / GIB:.2f} of {limit / GIB:.2f} GiB a rank, highest in the {found['phase']} phase"
    fits = "fits" if peak <= limit else "does not fit"
    if "by" in found:
        print(f"plan: {candidates.ESTIMATE.format(found['by'])}\nplan: {fits} by formula: {size}", flush=True)
        return found
    if peak > limit and not settings.ignore_plan:
        learned = f", {found['learned_bytes'] / GIB:.2f} GiB more kept free since {memory_history.history()} has runs above their plan"
        raise candidates.NothingFits(
            f"this job does not fit: {size}{learned if found['learned_bytes'] else ''}; `make plan` with the same arguments "
            "finds one that does, --ignore_plan true starts it anyway."
        )
    print(f"plan: {fits}: {size}", flush=True)
    return found


def only_print(settings: Settings) -> None:
    """Print what --plan or --show asks for and end the process; without either, do nothing."""
    if settings.plan:
        dry_run(settings)
        raise SystemExit(0)
    if settings.show:
        from zerofit.config import show

        count = settings.world_size
        print(f"{settings.recipe}, {count} process{'es' * (count > 1)}\n{show.summary(settings)}")
        raise SystemExit(0)


def dry_run(settings) -> None:
    """--plan: print what this very job would hold, on --gpu_type or this machine.

    Raises: NothingFits when it does not fit; UserError without a GPU and without --gpu_type or --memory_limit.
    """
    from zerofit.train import memory_report

    if settings.gpu_type != "detect":
        settings = parse.parse(settings.recipe, settings.flags, settings.world_size, hardware.find(settings.gpu_type))
    if settings.use_cpu and not settings.memory_limit:
        raise UserError(
            "--plan: there is no GPU here; name one with --gpu_type h100-80g, or a limit with --memory_limit."
        )
    if found := check(settings, seconds=None):
        print(memory_report.table(found["peak"]))


def is_auto(flags: list[str]) -> bool:
    """Whether the command line says --zero auto by name."""
    return candidates.without_flags(flags, "--zero", "auto") != flags


def chosen_flags(recipe: str, flags: list[str], ranks: int, node: int = formulas.GPUS_OF_A_NODE) -> list[str]:
    """--zero auto: the flags of the fastest setting that fits this machine's GPUs; on a CPU the flags as they are,
    where the stage goes by the number of processes. node: GPUs of a machine.

    Raises: NothingFits.
    """
    if not hardware.torch_sees_some():
        return flags
    gpu = hardware.find("detect", min(ranks, node))
    bare = candidates.without_flags(flags, "--zero", "auto")
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
    """A job ran out of memory: the history learns that it needed more than there was, unless somebody else used the GPU;
    and what was announced is taken back, since the next attempt has other settings.

    Args: errors: the ranks' tracebacks, with torch's words on who holds how much.
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
    """Whether torch's message on an out-of-memory accounts for the whole GPU with this process and what is free.

    It reads: "GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free. [Process 7 has 4.00 GiB memory in use.]
    Including non-PyTorch memory, this process has 73.80 GiB memory in use." (c10/cuda/CUDACachingAllocator.cpp)
    """
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    sizes = []
    for before in ("total capacity of", "of which", "this process has"):
        size = re.search(rf"{before} ([\d.]+) (bytes|KiB|MiB|GiB)", text)
        if size is None:
            return False
        sizes.append(float(size[1]) * units[size[2]])
    whole, free, own = sizes
    return whole - free - own < hardware.NOBODY_ELSE_BYTES
