"""Run `zerofit plan`: find whether a job fits, and the fastest setting that does."""

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
from zerofit.model import load
from zerofit.model.kernels import linear_attention
from zerofit.model.load import load_tokenizer
from zerofit.model.tried import classes
from zerofit.plan import candidates, gpu_memory, planner, simulate
from zerofit.plan.advice import better, cost, instead, table
from zerofit.plan.answer import answer_text
from zerofit.plan.candidate import Plan


def main(argv: list[str]) -> None:
    """Run `zerofit plan` (see --help): print the plan and write plan.json, plan.md and plan.png.

    Raises: UserError for the user's mistakes; NothingFits (exit code 3) if no setting fits.
    """
    parser = _parser()
    args, flags = parser.parse_known_args(argv)
    args.recipe = program.start(args.recipe).recipe
    flags, ranks = command_line.with_more(flags, args.args, args.gpus)
    flags = _own_of_args(args, flags)
    if {"--help", "-h"} & set(flags):
        parser.print_help()
        return

    folder = Path(args.output_dir or Path("runs") / f"plan-{time.strftime('%Y%m%d-%H%M%S')}").expanduser()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder}: is a file; name a folder.")
    plan = _search(args, flags, ranks)
    plan.seconds = time.time() - psutil.Process().create_time()
    print(_for_this_terminal(answer_text.text(plan)))
    try:
        answer_text.write(plan, folder)
    except OSError as error:
        raise UserError(
            f"--output_dir {folder}: the plan cannot be written there: {error.strerror}; name another folder."
        ) from None
    print(f"more: {folder}/plan.md, plan.json, plan.png (planned in {plan.seconds:.0f} s)", flush=True)
    if plan.chosen is None:
        raise candidates.NothingFits(answer_text.nothing_fits(plan))


def _parser() -> argparse.ArgumentParser:
    about = (
        "Whether a job fits and what is fastest, before anything is downloaded or allocated. Only the model's "
        "config.json is needed. What you leave open is searched; every flag of the recipe works too."
    )
    options = {
        "recipe": "sft, lora, dpo or a recipe's file (default sft)",
        "method": "sft, lora, qlora, dpo or auto (of those that fit the first that is fast enough: docs/choosing.md)",
        "gpus": "GPUs of all nodes together; with --nodes those of each",
        "nodes": f"nodes with --gpus GPUs each (default: as many as --gpus needs at {gpu_memory.GPUS_OF_A_NODE} each)",
        "node_link_gbs": "GB/s one way that each GPU has to other nodes, all adapters of a node over its GPUs "
        f"(default {hardware.NODE_LINK_GBS:g}: 400 Gbit/s a GPU)",
        "gpu_type": "a GPU of the table, or detect (default: this machine's)",
        "host_memory": "GiB of a node's host memory (default: this machine's with --gpu_type detect, else not looked "
        "at)",
        "disk": "GiB that are free for runs/ where the job will train (default: this machine's with --gpu_type detect, "
        "else not looked at)",
        "rows": "training rows of an epoch, where --data does not tell them: for the cost of the run",
        "gpu_price": "dollars for an hour of one GPU: for the cost of the run",
        "exact": "true: simulate the chosen setting also where the closed forms leave room (half a minute or more)",
        "output_dir": "folder for plan.json, plan.md, plan.png (default runs/plan-<time>)",
        "args": "more recipe flags in one string, split like a shell would",
    }
    parser = argparse.ArgumentParser(prog="zerofit plan", allow_abbrev=False, description=about)
    defaults = {"recipe": program.DEFAULT, "gpus": "1"}
    for name, text in options.items():
        parser.add_argument(f"--{name}", default=defaults.get(name, ""), help=text)
    return parser


def _own_of_args(args: argparse.Namespace, flags: list[str]) -> list[str]:
    """Put the command's options that have no make variable, and so stand in ARGS, into args; return the other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("rows", "gpu_price", "node_link_gbs", "disk", "exact"):
        parser.add_argument(f"--{name}", default=getattr(args, name))
    return parser.parse_known_args(flags, args)[1]


def _search(args: argparse.Namespace, flags: list[str], ranks: int) -> Plan:
    """Return the plan for the command's arguments, with the rows of --data read and the search shown while it runs."""
    ranks, node = _machines(args.nodes, ranks)
    methods = candidates.methods_to_try(args.method, args.recipe, flags)
    gpu = _with_node_link(hardware.find(args.gpu_type or "detect", min(ranks, node)), args.node_link_gbs)
    if sentence := hardware.note(gpu):
        print(sentence, flush=True)

    exact = _exact(args.exact)
    for_this_machine = args.gpu_type in ("", "detect")
    host_limit = _bytes("host_memory", args.host_memory, psutil.virtual_memory().total if for_this_machine else None)
    with simulate.reused():
        if exact:
            simulate.prestart()  # it imports while the rows are read and the settings are listed
        request = parse.request(candidates.recipe_of(methods[-1]), flags)
        first = candidates.first_settings(methods[-1], request, ranks, gpu, node)
        request, rows, run = _rows(request, ranks, gpu, node, args.rows)
        run = replace(run, price=_price(args.gpu_price))
        here = shutil.disk_usage(nearest_existing(Path("runs"))).free
        disk_limit = _bytes("disk", args.disk, here if for_this_machine else None)
        notes, config = [f"rows: {rows}"], load.load_config(first)
        if missing := linear_attention.missing_kernels(config):
            notes.append("note: {}; {}".format(*missing))
        print("\n".join(notes), flush=True)
        notes.append(f"note: {classes.sentence(config.model_type)}")
        with plan_progress.Shown(notes) as progress:
            plan = planner.plan_of(
                methods, request, ranks, gpu, progress, host_limit, node, disk_limit, exact=exact
            )  # fmt: skip
            plan.run = run
            plan.instead |= instead.offers(plan, methods, request)
            plan.advices = better.advices(plan, request)
    if relation := plan_progress.compared(progress.answer, plan):
        notes.append(relation)
        print(relation, flush=True)
    plan.rows, plan.notes, plan.here = rows, notes, for_this_machine
    plan.host_here = psutil.virtual_memory().total
    plan.disk_free = here if disk_limit is None else disk_limit
    return plan


def _for_this_terminal(text: str) -> str:
    """Return the plan with its lines wrapped, where stdout is a terminal."""
    return table.wrapped(text, shutil.get_terminal_size((100, 24)).columns) if sys.stdout.isatty() else text


def with_real_lengths(request: Request, ranks: int, gpu, node: int = gpu_memory.GPUS_OF_A_NODE) -> tuple[Request, str]:
    """Return (the request with --max_length of the longest row or pack of its data, a sentence on the rows).

    The tokenized rows are cached, so the run does not read them again. Rows that cannot be read are taken to be full.
    """
    return _rows(request, ranks, gpu, node)[:2]


def _rows(request: Request, ranks: int, gpu, node: int, number: str = "") -> tuple[Request, str, cost.Run]:
    """Return what `with_real_lengths` does, and how much the job trains. number: of --rows, "": not given."""
    settings = candidates.first_settings(request.recipe.name, request, ranks, gpu, node)
    length, run = settings.max_length, cost.of_number(settings, number)
    full = f"taken to be --max_length {length} tokens long"
    if settings.data == [candidates.UNNAMED]:
        return request, f"{full}; with DATA= their real lengths are planned", run
    if settings.streaming:
        return request, f"{full}, since --streaming reads them later", run
    try:
        longest, run = _longest(settings)
    except UserError as error:
        return request, f"{full}, since they cannot be read: {error}", run
    width = min(length, -(-longest // 8) * 8)  # as the collator rounds
    kind = "pack" if settings.packing else "side of a pair" if settings.objective.documents == 2 else "row"
    if width == length:
        return request, f"the longest {kind} of --data fills --max_length {length}", run
    sentence = f"the longest {kind} of --data has {longest} tokens: planned with --max_length {width} instead of "
    return request.put(max_length=width), f"{sentence}{length}", run


def _longest(settings) -> tuple[int, cost.Run]:
    """Return the tokens of the longest row of the training data, fullest pack or longer side of a pair, and the run.

    Raises: UserError if the data cannot be read.
    """
    train_set, _ = load_datasets(settings, load_tokenizer(settings))
    run = cost.of_rows(settings, train_set)
    if not settings.packing:
        return train_set.statistics["longest"], run
    sequences = train_set.sequences(settings)
    lengths = lengths_of(sequences.documents)
    return max(int(lengths[pack].sum()) for pack in sequences.packs), run


def _machines(nodes: str, gpus: int) -> tuple[int, int]:
    """Return (GPUs of all nodes, GPUs of one node)."""
    if not nodes:
        return gpus, gpu_memory.GPUS_OF_A_NODE
    if not nodes.isdigit() or int(nodes) < 1:
        raise UserError(f"NODES={nodes}: must be a whole number of 1 or more nodes, each with GPUS={gpus} GPUs.")
    return int(nodes) * gpus, gpus


def _with_node_link(gpu: hardware.Gpu, text: str) -> hardware.Gpu:
    """Return the GPU with the speed of --node_link_gbs. Raises: UserError."""
    if not text:
        return gpu
    if speed := _positive(text):
        return replace(gpu, node_gbs=speed)
    raise UserError(
        f"--node_link_gbs {text}: must be a number of GB/s above 0: what the network between the nodes of NODES= "
        "gives each GPU, one way."
    )


def _bytes(name: str, text: str, here: int | None) -> int | None:
    """Return the bytes of an option in GiB; `here` where it is not given. Raises: UserError."""
    if not text:
        return here
    if size := _positive(text):
        return int(size * GIB)
    raise UserError(f"--{name} {text}: must be a number of GiB.")


def _price(text: str) -> float | None:
    """Return the dollars of --gpu_price; None without. Raises: UserError."""
    if not text:
        return None
    if price := _positive(text.removeprefix("$")):
        return price
    raise UserError(f"--gpu_price {text}: must be a number of dollars above 0, for an hour of one GPU, e.g. 2.50.")


def _exact(text: str) -> bool:
    """Return the value of --exact. Raises: UserError."""
    if text.lower() not in ("", "true", "false"):
        raise UserError(f"--exact {text}: must be true or false.")
    return text.lower() == "true"


def _positive(text: str) -> float | None:
    """Return a number above 0; None for other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None
