"""Check at the start of a run whether it fits; handle --zero auto and --plan."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from zerofit.base import allocator, hardware
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.config import defaults, resolve
from zerofit.job import job
from zerofit.job.request import Request
from zerofit.job.settings import Settings
from zerofit.model import gradient_checkpointing
from zerofit.plan import candidates, formulas, gpu_memory, predict, search, simulate

CHECK_SECONDS = 18  # that a launch waits for the simulation; the whole check then takes less than 20

MUCH_FASTER = 1.2  # times as fast by estimate: from here on another micro batch is worth a line


def publish(plan: dict | None) -> None:
    """Keep the prediction for the job's ranks, or for the end of the run in this process."""
    job.publish(plan)


def prestart(settings) -> None:
    """Start the simulation's process for `check`, so that it imports while the data is read."""
    if _is_planned(settings) and settings.ranks_that_split("layers") == 1:
        simulate.prestart()


def _is_planned(settings) -> bool:
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
        _report(plan, settings)
    return plan


def _report(plan: dict, settings) -> None:
    """Print whether the job fits. Raises: as `check`."""
    peak, limit, stage = plan["peak_bytes"], plan["limit_bytes"], plan.get("stage")
    rank = "rank" if stage is None else f"rank of stage {stage}, the fullest"
    size = f"{peak / GIB:.2f} of {limit / GIB:.2f} GiB a {rank}, highest in the {plan['phase']} phase"
    fits = "fits" if peak <= limit else "does not fit"
    if stage is not None:
        margin = f"a margin of {candidates.FORMULA_MARGIN:.0%} is in it"
        print(f"plan: {fits} by formula ({plan['by']}; {margin}): {size}", flush=True)
    elif "by" in plan:
        print(f"plan: {candidates.ESTIMATE.format(plan['by'])}\nplan: {fits} by formula: {size}", flush=True)
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


def choose_and_check(
    settings, row_tokens: float | None = None, longest: int | None = None, seconds: float = CHECK_SECONDS
) -> tuple[dict | None, dict]:
    """Check as `check` does, after choosing the gradient checkpointing where the user set none: the least that fits.

    A resumed run keeps the gradient checkpointing that it had, if that fits. A micro batch that the user did not choose
    is compared with others.
    Args: row_tokens: the mean of the training rows; longest: of all rows. None: unknown. seconds: how long to wait for
        simulations.
    Returns: (the prediction, the flags of gradient checkpointing to run with; {}: as the job is).
    """
    if longest and _is_planned(settings):
        settings = _with_rows_up_to(longest, settings)
    if settings.use_cpu or settings.ranks_that_split("layers") > 1:
        return check(settings), {}
    deadline = time.monotonic() + seconds
    gpu, total, allowance = predict.place_of(settings)
    limit, margin = total - sum(allowance.values()), int(gpu_memory.MARGIN * total)
    settings = settings.replace(planned_gpu=gpu)  # it is looked up once
    with simulate.reused():
        plan, checkpointing = _less_recomputation(settings, limit, margin, deadline)
        plan = plan or check(settings, max(0.0, deadline - time.monotonic()))
    if row_tokens and (sentence := _faster_micro_batch(_with(settings, checkpointing), row_tokens, limit - margin)):
        print(f"plan: {sentence}", flush=True)
    return plan, checkpointing


def _with_rows_up_to(longest: int, settings):
    """Return the settings with --max_length of the longest row, as the collator rounds it, and print it.

    Padding and tiles of the MLP may have been decided from --max_length: then it stays.
    """
    width = -(-longest // 8) * 8
    if width >= settings.max_length or not settings.padding_free or settings.tiled_mlp != 1:
        return settings
    print(
        f"plan: the longest row has {longest} tokens: checked with --max_length {width} instead of "
        f"{settings.max_length}",
        flush=True,
    )
    return settings.replace(request=settings.request.put(max_length=width), max_length=width)


def _less_recomputation(settings, limit: int, margin: int, deadline: float) -> tuple[dict | None, dict]:
    """Return (prediction, flags) of the fastest gradient checkpointing of less than every layer that a simulation
    confirms by the deadline, and print it; (None, {}) if there is none.
    """
    earlier = _of_resumed_run(settings)
    for checkpointing, faster in _less_checkpointing(settings, earlier, limit - margin):
        job = _with(settings, checkpointing.flags)
        try:
            plan = predict.predict(job, max(0.0, deadline - time.monotonic()), waits=False)
        except UserError:
            break  # the check of the job as it is reports it
        if ("by" in plan and not earlier) or not _fits(plan["peak_bytes"], plan["limit_bytes"] - margin):
            continue
        why = _why(checkpointing, plan, faster)
        gradient_checkpointing.choose(checkpointing.flags, why)
        print(f"plan: {why}", flush=True)
        _report(plan, job)
        return plan, checkpointing.flags
    return None, {}


def _may_choose(settings) -> bool:
    """Return whether the user set no gradient checkpointing and rows are as a plan counts them: bf16, not padded."""
    is_simulated = not settings.use_cpu and settings.ranks_that_split("layers") == 1
    covered = is_simulated and settings.precision == "bf16" and settings.padding_free
    return covered and gradient_checkpointing.is_open(settings)


def _less_checkpointing(
    settings, earlier: candidates.Checkpointing | None, limit: int
) -> list[tuple[candidates.Checkpointing, float]]:
    """Return (less gradient checkpointing that fits by formula, how many times as fast a step is), the fastest first.

    Args: earlier: of the run that is resumed, None: there is none; limit: bytes.
    """
    if not _may_choose(settings):
        return []
    whole, found = candidates.of_settings(settings, settings.planned_gpu), []
    less = candidates.less_checkpointing(settings)
    for checkpointing in less if earlier is None else {earlier} & set(less):
        if checkpointing.every > whole.shape.layers:
            continue
        setting = candidates.setting_of(_with(settings, checkpointing.flags))
        tried = candidates.with_formulas(whole.request, setting, whole.shape, settings, whole.gpu)
        if tried.seconds < whole.seconds and _fits(tried.by_formula, limit):
            found.append((checkpointing, whole.seconds / tried.seconds))
    return sorted(found, key=lambda pair: -pair[1])


def _with(settings, flags: dict):
    """Return the settings with these flags of gradient checkpointing."""
    return settings.replace(request=settings.request.put(**flags), **flags)


def _fits(peak: float, limit: int) -> bool:
    return peak * (1 if allocator.expandable_segments() else gpu_memory.UNEQUAL_ROWS) <= limit


def _why(checkpointing: candidates.Checkpointing, plan: dict, faster: float) -> str:
    """Return the sentence on a choice for the terminal and run.json."""
    name, value = list(checkpointing.flags.items())[-1]
    word = str(value).lower() if isinstance(value, bool) else value
    how = "formula" if "by" in plan else "simulation"
    return (
        f"{name} {word}: the job fits so, {plan['peak_bytes'] / GIB:.1f} of {plan['limit_bytes'] / GIB:.1f} GiB a rank "
        f"by {how}; recomputing every layer (--gradient_checkpointing true) would take about {faster:.2f} times "
        "as long"
    )


def _faster_micro_batch(settings, row_tokens: float, limit: int) -> str:
    """Return a sentence on a micro batch that fits and is much faster, both by the closed forms, or "".

    It is compared only with one that zerofit has chosen, with its accumulation, at the same effective batch.
    """
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if not {settings.source[name] for name in names} <= {"decided", "default", "transformers default"}:
        return ""
    job, seconds = candidates.of_settings(settings, settings.planned_gpu), {}
    given, per_rank = job.setting, job.setting.micro * job.setting.accumulation
    slices = settings.ranks_that_split("tokens")
    for micro in (n for n in range(1, min(per_rank, 64) + 1) if per_rank % n == 0):
        full = replace(given, micro=micro, tokens=given.tokens // given.micro * micro, accumulation=per_rank // micro)
        tried = candidates.with_formulas(job.request, full, job.shape, settings, job.gpu)
        if micro == given.micro or _fits(tried.allocated, limit):
            tokens = max(1, round(row_tokens * settings.documents_per_row * micro / slices))
            real = replace(full, tokens=tokens)
            seconds[micro] = formulas.step_seconds(job.shape, real, job.gpu, round(row_tokens))
    fastest = min(seconds, key=seconds.get)
    faster = seconds[given.micro] / seconds[fastest]
    if faster < MUCH_FASTER:
        return ""
    return (
        f"micro batch {given.micro} x {row_tokens:,.0f} tokens: --per_device_train_batch_size {fastest} would be about "
        f"{faster:.1f} times as fast by estimate, with the same effective batch of {settings.effective_batch_size}"
    )


def _of_resumed_run(settings) -> candidates.Checkpointing | None:
    """Return the gradient checkpointing of the run that is resumed; None: none is, or it cannot be read."""
    if not settings.resume_from_checkpoint:
        return None
    try:
        file = Path(settings.resume_from_checkpoint).parent / "run.json"
        arguments = json.loads(file.read_text(encoding="utf-8"))["arguments"]
        values = {name: entry["value"] for name, entry in arguments.items()}
        return candidates.checkpointing_of(SimpleNamespace(**values))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


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
        settings = resolve.resolve(settings.request, settings.world_size, gpu)
    if settings.use_cpu and not settings.memory_limit:
        raise UserError(
            "--plan: there is no GPU here; name one with --gpu_type h100-80g, or a limit with --memory_limit."
        )
    if plan := check(settings, seconds=None):
        print(memory_report.table(plan["peak"]))


# --- --zero auto ---


def chosen_request(request: Request, ranks: int, node: int = gpu_memory.GPUS_OF_A_NODE) -> Request:
    """Return the request with the fastest setting that fits this machine's GPUs, for --zero auto.

    On a CPU it is unchanged: the stage then follows from the number of ranks. node: GPUs of a node.
    Raises: NothingFits if no setting does; UserError for the user's mistakes.
    """
    if not hardware.torch_sees_some():
        return request
    if candidates.lacks_data(request):  # which a plan does not need, but the run
        raise UserError(defaults.NO_DATA)
    import psutil

    gpu = hardware.find("detect", min(ranks, node))
    plan = search.search(
        candidates.methods_to_try("", request.recipe, request.flags()),
        request,
        ranks,
        gpu,
        say=lambda text: print(text, flush=True),
        host_limit=psutil.virtual_memory().total,
        node=node,
    )
    from zerofit.plan import answer_text

    if plan.chosen is None:
        raise candidates.NothingFits(answer_text.nothing_fits(plan))
    if request.get("gradient_checkpointing") is None:
        setting = plan.chosen.setting
        checkpointing = candidates.Checkpointing(setting.every, setting.selective, setting.activation_offload)
        gradient_checkpointing.choose(checkpointing.flags, f"gradient checkpointing as planned: {plan.chosen.label}")
    print(f"chosen: {plan.chosen.label}, {plan.chosen.peak / GIB:.1f} of {plan.limit / GIB:.1f} GiB", flush=True)
    return plan.chosen.request
