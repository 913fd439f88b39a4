"""Check at the start of a run whether it fits; handle --zero auto and --plan."""

import psutil

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.config import defaults, resolve, show
from zerofit.job import job, memory_figure
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.model import gradient_checkpointing
from zerofit.plan import candidates, gpu_memory, planner, predict, simulate
from zerofit.plan.answer import answer_text

CHECK_SECONDS = 18  # that a launch waits for the simulation; the whole check then takes less than 20


def publish(plan: dict | None) -> None:
    """Keep the prediction for the job's ranks, or for the end of the run in this process."""
    job.publish(plan)


def prestart(settings) -> None:
    """Start the simulation's process for `check`, so that it imports while the data is read."""
    if is_planned(settings) and settings.ranks_that_split("layers") == 1:
        simulate.prestart()


def is_planned(settings) -> bool:
    """Return whether the memory of a job is predicted: on GPUs, and on a CPU with a limit."""
    return not settings.use_cpu or bool(settings.memory_limit)


def check(settings, seconds: float | None = CHECK_SECONDS) -> dict | None:
    """Predict the job's memory, print whether it fits, and return the prediction; None if there is none.

    Args: seconds: how long to wait for the simulation if the job fits by formula; None: until it ends.
    Raises: NothingFits if the job does not fit by simulation, without --ignore_plan; UserError for the user's mistakes.
    """
    try:
        plan = predict.predict(settings, seconds)
    except simulate.SimulationFailed as error:
        print(f"plan: the exact check failed: {error}; whether the job fits is not known", flush=True)
        return None
    finally:
        simulate.stop_prestarted()
    if plan is not None:
        report(plan, settings)
    return plan


def report(plan: dict, settings) -> None:
    """Print whether the job of a prediction fits. Raises: NothingFits as `check`."""
    peak, limit, stage = plan["peak_bytes"], plan["limit_bytes"], plan.get("stage")
    margin = gpu_memory.margin(settings.zero).high - 1
    rank = "rank" if stage is None else f"rank of stage {stage}, the fullest"
    size = f"{peak / GIB:.2f} of {limit / GIB:.2f} GiB a {rank}, highest in the {plan['phase']} phase"
    fits = "fits" if peak <= limit else "does not fit"
    if stage is not None:
        print(f"plan: {fits} by formula ({plan['by']}; a margin of {margin:.0%} is in it): {size}", flush=True)
    elif plan.get("by") == candidates.ENOUGH:
        print(f"plan: {fits} by formula, with a margin of {margin:.0%}: {size}", flush=True)
    elif "by" in plan:
        print(f"plan: {candidates.ESTIMATE.format(plan['by'], margin)}\nplan: {fits} by formula: {size}", flush=True)
    elif peak > limit and not settings.ignore_plan:
        raise candidates.NothingFits(
            f"this job does not fit: {size}; `make plan` with the same "
            "arguments finds one that does, --ignore_plan true starts it anyway."
        )
    else:
        print(f"plan: {fits}: {size}", flush=True)
    if falls_back := _without_compiler(settings):
        print(f"plan: {falls_back}", flush=True)


def _without_compiler(settings) -> str | None:
    """Return what runs without its Triton kernels, as this machine cannot compile them; None if nothing does."""
    kernels = {"Liger's kernels": settings.use_liger_kernel, "AdamW in one kernel": settings.pure_bf16}
    used = " and ".join(name for name, on in kernels.items() if on)
    missing = [] if settings.use_cpu or not used else hardware.missing_for_triton()
    if not missing:
        return None
    return (
        f"{' and '.join(missing)}: without {used}, a step takes about a fifth longer; apt install gcc python3-dev, or "
        "an image with a compiler (cuda:*-devel)"
    )


def only_print(settings: Settings) -> None:
    """Print the output of --plan or --show and exit the process; without either, do nothing."""
    if settings.plan:
        dry_run(settings)
        raise SystemExit(0)
    if settings.show:
        count = settings.world_size
        print(f"{settings.recipe}, {count} process{'es' * (count > 1)}\n{show.summary(settings)}")
        raise SystemExit(0)


def dry_run(settings) -> None:
    """Print the predicted memory of the job (--plan) on --gpu_type or this machine.

    Raises: NothingFits if it does not fit; UserError without a GPU, --gpu_type and --memory_limit.
    """
    if settings.gpu_type != "detect":
        gpu = hardware.find(settings.gpu_type)
        settings = resolve.resolve(settings.request, settings.world_size, gpu)
    if settings.use_cpu and not settings.memory_limit:
        raise UserError(
            "--plan: there is no GPU here; name one with --gpu_type h100-80g, or a limit with --memory_limit."
        )
    if plan := check(settings, seconds=None):
        print(memory_figure.table(plan["peak"]))


# --- --zero auto ---


def chosen_request(request: Request, ranks: int, node: int = gpu_memory.GPUS_OF_A_NODE) -> Request:
    """Return the request with the fastest setting that fits this machine's GPUs, for --zero auto.

    Its micro batch and gradient checkpointing have the source BY_PLAN: the start checks them, and keeps them if they
    fit. On a CPU the request is unchanged: the stage then follows from the number of ranks. node: GPUs of a node.
    Raises: NothingFits if no setting does; UserError for the user's mistakes.
    """
    if not hardware.torch_sees_some():
        return request
    if candidates.lacks_data(request):  # which a plan does not need, but the run
        raise UserError(defaults.NO_DATA)

    gpu, asked = hardware.find("detect", min(ranks, node)), request.values.keys()
    plan = planner.plan_of(
        candidates.methods_to_try("", request.recipe, request.flags()),
        request,
        ranks,
        gpu,
        progress=planner.Progress(lambda text: print(text, flush=True)),
        host_limit=psutil.virtual_memory().total,
        node=node,
    )

    if plan.chosen is None:
        raise candidates.NothingFits(answer_text.nothing_fits(plan))
    print(f"chosen: {plan.chosen.label}, {plan.chosen.peak / GIB:.1f} of {plan.limit / GIB:.1f} GiB", flush=True)
    request, names = plan.chosen.request, ("per_device_train_batch_size", *gradient_checkpointing.ARGUMENTS)
    return request.planned("", {name: request.get(name) for name in names if name in request.values.keys() - asked})
