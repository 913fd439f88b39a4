"""`zerofit plan`: find out whether a job fits, and the fastest setting that fits."""

import argparse
import math
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

from zerofit.base import command_line, hardware
from zerofit.base.errors import UserError
from zerofit.base.hardware import GIB
from zerofit.base.paths import nearest_existing
from zerofit.commands import plan_progress
from zerofit.config import parse
from zerofit.data.batches import lengths_of
from zerofit.data.load import load_datasets
from zerofit.job import program
from zerofit.job.request import Request
from zerofit.model import load, tested_models
from zerofit.model.kernels import linear_attention
from zerofit.model.load import load_tokenizer
from zerofit.plan import candidates, gpu_memory, planner, simulate
from zerofit.plan.advice import alternatives, better, cost, table
from zerofit.plan.answer import answer_text
from zerofit.plan.candidate import Plan


def main(argv: list[str]) -> None:
    """`zerofit plan`: see --help. Print the plan and write plan.json, plan.md and plan.png.

    Raises: UserError for user errors; NothingFits (exit code 3) if no setting fits.
    """
    parser = _parser()
    args, flags = parser.parse_known_args(argv)
    args.recipe = program.start(args.recipe).recipe
    flags, ranks = command_line.with_extra_flags(flags, args.args, args.gpus)
    flags = _parse_plan_only_flags(args, flags)
    if {"--help", "-h"} & set(flags):
        parser.print_help()
        return

    folder = Path(args.output_dir or Path("runs") / f"plan-{time.strftime('%Y%m%d-%H%M%S')}").expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder}: is a file; set it to a folder.")
    plan = _search(args, flags, ranks)
    plan.seconds = time.time() - psutil.Process().create_time()
    print(_wrapped(answer_text.text(plan)))
    try:
        answer_text.write(plan, folder)
    except OSError as error:
        raise UserError(
            f"--output_dir {folder}: cannot write the plan: {error.strerror}; set another folder."
        ) from None
    print(f"more: {folder}/plan.md, plan.json, plan.png (planned in {plan.seconds:.0f} s)", flush=True)
    if plan.chosen is None:
        raise candidates.NothingFits(answer_text.nothing_fits(plan))


def _parser() -> argparse.ArgumentParser:
    about = (
        "Find out whether a job fits and which setting is fastest, without downloads or allocations. Only the model's "
        "config.json is required. Unspecified settings are searched; all flags of the recipe are allowed."
    )
    options = {
        "recipe": "sft, lora, dpo or the file of a recipe (default sft)",
        "method": "sft, lora, qlora, dpo or auto (the first method that fits and is fast enough: docs/planning.md)",
        "gpus": "total number of GPUs; with --nodes, GPUs per node",
        "nodes": f"number of nodes (default: from --gpus, with {gpu_memory.GPUS_PER_NODE} GPUs per node)",
        "node_link_gbs": "network bandwidth between nodes in GB/s per GPU, one way "
        f"(default {hardware.NODE_LINK_GBS:g}: 400 Gbit/s per GPU)",
        "gpu_type": "a GPU of the table, or detect (default: this machine's GPU)",
        "host_memory": "host memory per node in GiB (default: this machine's with --gpu_type detect, else unlimited)",
        "disk": "free disk space for runs/ in GiB (default: this machine's with --gpu_type detect, else unlimited)",
        "rows": "training rows per epoch, for the cost of the run if --data does not provide them",
        "gpu_price": "dollars per GPU hour, for the cost of the run",
        "exact": "true: also simulate settings with much free memory by formula (half a minute or more)",
        "output_dir": "folder for plan.json, plan.md, plan.png (default runs/plan-<time>)",
        "args": "more flags of the recipe in one string, split as in a shell",
    }
    parser = argparse.ArgumentParser(prog="zerofit plan", allow_abbrev=False, description=about)
    defaults = {"recipe": program.DEFAULT, "gpus": "1"}
    for name, text in options.items():
        parser.add_argument(f"--{name}", default=defaults.get(name, ""), help=text)
    return parser


def _parse_plan_only_flags(args: argparse.Namespace, flags: list[str]) -> list[str]:
    """Parse the options without a make variable (passed in ARGS) into args; return the other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("rows", "gpu_price", "node_link_gbs", "disk", "exact"):
        parser.add_argument(f"--{name}", default=getattr(args, name))
    return parser.parse_known_args(flags, args)[1]


def _search(args: argparse.Namespace, flags: list[str], ranks: int) -> Plan:
    """Read the rows of --data, and search for a plan with progress output."""
    ranks, node = _machines(args.nodes, ranks)
    methods = candidates.methods_to_try(args.method, args.recipe, flags)
    gpu = _with_node_link(hardware.find(args.gpu_type or "detect", min(ranks, node)), args.node_link_gbs)
    if sentence := hardware.note(gpu):
        print(sentence, flush=True)

    exact = _exact(args.exact)
    for_this_machine = args.gpu_type in ("", "detect")
    total_memory = psutil.virtual_memory().total if for_this_machine else None
    host_memory_limit = _bytes("host_memory", args.host_memory, total_memory)
    with simulate.reuse_process():
        if exact:
            simulate.prestart()  # imports run while the rows are read and the settings are listed
        request = parse.request(candidates.recipe_of(methods[-1]), flags)
        first = candidates.first_settings(methods[-1], request, ranks, gpu, node)
        request, rows, run = _rows(request, ranks, gpu, node, args.rows)
        run = replace(run, price=_price(args.gpu_price))
        free_bytes = shutil.disk_usage(nearest_existing(Path("runs"))).free
        disk_limit = _bytes("disk", args.disk, free_bytes if for_this_machine else None)
        notes, config = [f"rows: {rows}"], load.load_config(first)
        if missing := linear_attention.missing_kernels(config):
            notes.append("note: {}; {}".format(*missing))
        print("\n".join(notes), flush=True)
        notes.append(f"note: {tested_models.sentence(config.model_type)}")
        with plan_progress.SearchProgress(notes) as progress:
            plan = planner.plan_of(
                methods, request, ranks, gpu, progress, host_memory_limit, node, disk_limit, exact=exact
            )  # fmt: skip
            plan.run = run
            plan.alternatives |= alternatives.offers(plan, methods, request)
            plan.advices = better.advices(plan, request)
    if relation := plan_progress.compared(progress.answer, plan):
        notes.append(relation)
        print(relation, flush=True)
    plan.rows, plan.notes = rows, notes
    if for_this_machine:
        plan.host_memory_source = "this machine"
    plan.disk_free = free_bytes if disk_limit is None else disk_limit
    return plan


def _wrapped(text: str) -> str:
    """Wrap the lines of the plan if stdout is a terminal."""
    return table.wrapped(text, shutil.get_terminal_size((100, 24)).columns) if sys.stdout.isatty() else text


def with_real_lengths(request: Request, ranks: int, gpu, node: int = gpu_memory.GPUS_PER_NODE) -> tuple[Request, str]:
    """Return (the request with --max_length set to the longest row or pack of the data, a sentence about the rows).

    The tokenized rows are cached for the run. Rows that cannot be read count as full.
    """
    return _rows(request, ranks, gpu, node)[:2]


def _rows(request: Request, ranks: int, gpu, node: int, number: str = "") -> tuple[Request, str, cost.TrainingAmount]:
    """Return the results of `with_real_lengths`, and the amount of training. number: --rows, "" if not set."""
    settings = candidates.first_settings(request.recipe.name, request, ranks, gpu, node)
    length, run = settings.max_length, cost.run_of_number(settings, number)
    full = f"assumed to have --max_length {length} tokens"
    if settings.data == [candidates.DATA_PLACEHOLDER]:
        return request, f"{full}; set DATA= to plan with their real lengths", run
    if settings.streaming:
        return request, f"{full}, since --streaming does not read them in advance", run
    try:
        longest, run = _longest(settings)
    except UserError as error:
        return request, f"{full}, since they cannot be read: {error}", run
    width = min(length, -(-longest // 8) * 8)  # same rounding as the collator
    kind = "pack" if settings.packing else "side of a pair" if settings.objective.documents == 2 else "row"
    if width == length:
        return request, f"the longest {kind} of --data fills --max_length {length}", run
    sentence = f"the longest {kind} of --data has {longest} tokens: --max_length {width} instead of "
    return request.put(max_length=width), f"{sentence}{length}", run


def _longest(settings) -> tuple[int, cost.TrainingAmount]:
    """Return the length of the longest training row, pack or side of a pair in tokens, and the amount of training.

    Raises: UserError if the data cannot be read.
    """
    train_set, _ = load_datasets(settings, load_tokenizer(settings))
    run = cost.run_of_rows(settings, train_set)
    if not settings.packing:
        return train_set.statistics["longest"], run
    sequences = train_set.sequences(settings)
    lengths = lengths_of(sequences.documents)
    return max(int(lengths[pack].sum()) for pack in sequences.packs), run


def _machines(nodes: str, gpus: int) -> tuple[int, int]:
    """Return (GPUs of all nodes, GPUs of one node)."""
    if not nodes:
        return gpus, gpu_memory.GPUS_PER_NODE
    if not nodes.isdigit() or int(nodes) < 1:
        raise UserError(f"NODES={nodes}: must be a positive integer (nodes with GPUS={gpus} GPUs each).")
    return int(nodes) * gpus, gpus


def _with_node_link(gpu: hardware.Gpu, text: str) -> hardware.Gpu:
    """Return the GPU with the bandwidth of --node_link_gbs. Raises: UserError."""
    if not text:
        return gpu
    if speed := _positive(text):
        return replace(gpu, node_gbs=speed)
    raise UserError(
        f"--node_link_gbs {text}: must be a number above 0, the network bandwidth between nodes in GB/s per GPU, "
        "one way."
    )


def _bytes(name: str, text: str, default: int | None) -> int | None:
    """Convert an option from GiB to bytes. Raises: UserError."""
    if not text:
        return default
    if size := _positive(text):
        return int(size * GIB)
    raise UserError(f"--{name} {text}: must be a number above 0, in GiB.")


def _price(text: str) -> float | None:
    """Return the dollars of --gpu_price, or None if not set. Raises: UserError."""
    if not text:
        return None
    if price := _positive(text.removeprefix("$")):
        return price
    raise UserError(f"--gpu_price {text}: must be a number above 0, in dollars per GPU hour, e.g. 2.50.")


def _exact(text: str) -> bool:
    """Return the value of --exact. Raises: UserError."""
    if text.lower() not in ("", "true", "false"):
        raise UserError(f"--exact {text}: must be true or false.")
    return text.lower() == "true"


def _positive(text: str) -> float | None:
    """Return a number above 0, or None for other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
