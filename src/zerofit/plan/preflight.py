"""Check at launch whether a run fits; handle --zero auto and --plan."""

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

CHECK_SECONDS = 18  # a launch waits this long for the simulation; the full check then takes less than 20 s


def publish(plan: dict | None) -> None:
    """Store the prediction for the ranks of the job, or for the end of the run in this process."""
    job.publish(plan)


def prestart(settings) -> None:
    """Start the simulation's process for `check`, so that it imports while the data is read."""
    if is_planned(settings) and settings.parallel_size("layers") == 1:
        simulate.prestart()


def is_planned(settings) -> bool:
    """Return whether the memory of a job is predicted: on GPUs, or on a CPU with --memory_limit."""
    return not settings.use_cpu or bool(settings.memory_limit)


def check(settings, seconds: float | None = CHECK_SECONDS) -> dict | None:
    """Predict the job's memory, print whether it fits, and return the prediction or None.

    Args: seconds: how long to wait for the simulation if the job fits by formula; None: until it ends.
    Raises: NothingFits if the job does not fit by simulation, without --ignore_plan; UserError for the user's mistakes.
    """
    try:
        plan = predict.predict(settings, seconds)
    except simulate.SimulationFailed as error:
        print(f"plan: simulation failed: {error}; it is unknown whether the job fits", flush=True)
        return None
    finally:
        simulate.stop_prestarted()
    if plan is not None:
        report(plan, settings)
    return plan


def report(plan: dict, settings) -> None:
    """Print whether the predicted job fits. Raises: NothingFits as `check`."""
    peak, limit, stage = plan["peak_bytes"], plan["limit_bytes"], plan.get("stage")
    margin = gpu_memory.margin(settings.zero).high - 1
    rank = "rank" if stage is None else f"rank of stage {stage}, the fullest"
    size = f"{peak / GIB:.2f} of {limit / GIB:.2f} GiB per {rank}, highest in the {plan['phase']} phase"
    fits = "fits" if peak <= limit else "does not fit"
    if stage is not None:
        print(f"plan: {fits} by formula ({plan['by']}), with a margin of {margin:.0%}: {size}", flush=True)
    elif plan.get("by") == candidates.ROOM_BY_FORMULA:
        print(f"plan: {fits} by formula, with a margin of {margin:.0%}: {size}", flush=True)
    elif "by" in plan:
        print(f"plan: {candidates.ESTIMATE_MESSAGE.format(plan['by'], margin)}", flush=True)
        print(f"plan: {fits} by formula: {size}", flush=True)
    elif peak > limit and not settings.ignore_plan:
        raise candidates.NothingFits(
            f"this job does not fit: {size}; run `make plan` with the same arguments to find a setting that fits, or "
            "start it anyway with --ignore_plan true."
        )
    else:
        print(f"plan: {fits}: {size}", flush=True)
    if falls_back := _without_compiler(settings):
        print(f"plan: {falls_back}", flush=True)


def _without_compiler(settings) -> str | None:
    """Return a sentence about the Triton kernels that this machine cannot compile, or None."""
    kernels = {"Liger kernels": settings.use_liger_kernel, "fused AdamW": settings.pure_bf16}
    used = " and ".join(name for name, on in kernels.items() if on)
    missing = [] if settings.use_cpu or not used else hardware.missing_for_triton()
    if not missing:
        return None
    return (
        f"{' and '.join(missing)}: without {used}, a step takes about a fifth longer; run apt install gcc python3-dev, "
        "or use an image with a compiler (cuda:*-devel)"
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
            "--plan: no GPU found on this machine; set a GPU with --gpu_type h100-80g, or a limit with --memory_limit."
        )
    if plan := check(settings, seconds=None):
        print(memory_figure.table(plan["peak"]))


# --- --zero auto ---


def chosen_request(request: Request, ranks: int, node: int = gpu_memory.GPUS_PER_NODE) -> Request:
    """Return the request with the fastest setting that fits this machine's GPUs, for --zero auto.

    Micro batch and gradient checkpointing get the source BY_PLAN: the launch checks them and keeps them if they fit. On
    a CPU the request is unchanged: the stage follows from the number of ranks. node: GPUs per node.
    Raises: NothingFits if no setting fits; UserError for the user's mistakes.
    """
    if not hardware.torch_sees_gpu():
        return request
    if candidates.lacks_data(request):  # needed by the run, not by the plan
        raise UserError(defaults.NO_DATA)

    gpu, requested = hardware.find("detect", min(ranks, node)), request.values.keys()
    plan = planner.plan_of(
        candidates.methods_to_try("", request.recipe, request.flags()),
        request,
        ranks,
        gpu,
        progress=planner.Progress(lambda text: print(text, flush=True)),
        host_memory_limit=psutil.virtual_memory().total,
        node=node,
    )

    if plan.chosen is None:
        raise candidates.NothingFits(answer_text.nothing_fits(plan))
    print(f"chosen: {plan.chosen.label}, {plan.chosen.peak / GIB:.1f} of {plan.limit / GIB:.1f} GiB", flush=True)
    request, names = plan.chosen.request, ("per_device_train_batch_size", *gradient_checkpointing.ARGUMENTS)
    chosen = {name: request.get(name) for name in names if name in request.values.keys() - requested}
    return request.with_plan_values("", chosen)
