"""Compare the weights in final/ with the weights in memory, tensor by tensor."""

import contextlib
import re
from pathlib import Path

import torch
from safetensors import safe_open

from zerofit.base import distributed
from zerofit.job.settings import Check
from zerofit.model.image_text import classes

MAX_COMPARED = 1 << 22  # numbers per tensor; of a larger one, the first and the last half of this are compared

CONVERTED = r"pissa.*|olora|corda|eva|loftq|lora_ga"  # --init_lora_weights whose adapters are converted on saving


def check(trainer, final: Path) -> Check:
    """Compare every trained tensor with its file, bit for bit. Collective under ZeRO-3."""
    settings, converted = trainer.settings, str(trainer.settings.values.get("init_lora_weights"))
    if settings.parallel_size("matrices", "layers") > 1:
        return Check("saved", None, "saved = trained: not compared: each rank holds a part of the tensors")
    if settings.trains_adapter and re.fullmatch(CONVERTED, converted):
        return Check("saved", None, f"saved = trained: not compared: {converted} is converted to a plain LoRA")
    first = trainer.args.process_index == 0
    with contextlib.ExitStack() as stack:
        files = _tensors(stack, final) if first else {}
        in_files = {} if settings.trains_adapter else classes.file_names(trainer.model.config, files)
        same, numbers, differing, elsewhere = 0, 0, [], []
        for name, parameter in trainer.model.named_parameters():
            if settings.trains_adapter and not parameter.requires_grad:
                continue
            with _gathered(parameter):
                if not first:
                    continue
                key = in_files.get(name, saved_name(name))
                file = files.get(key)
                if file is None:
                    elsewhere.append(name)
                    continue
                compared = _compare(parameter.detach(), file, key)
                same, numbers = same + (compared > 0), numbers + abs(compared)
                if compared <= 0:
                    differing.append(name)
    tied = getattr(trainer.model, "all_tied_weights_keys", {})
    elsewhere = [name for name in elsewhere if name not in tied]
    return distributed.broadcast(_line(same, numbers, differing, elsewhere) if first else None)


def _line(same: int, numbers: int, differing: list[str], elsewhere: list[str]) -> Check:
    figures = {"tensors": same, "numbers": numbers, "differing": differing, "under_other_names": elsewhere}
    if differing:
        named = ", ".join(differing[:3])
        return Check("saved", False, f"saved = trained: {len(differing)} tensors DIFFER: {named}", figures)
    if not same:
        return Check("saved", None, "saved = trained: not compared: the tensors are saved under other names", figures)
    others = f"; {len(elsewhere)} more are saved under other names and were not compared" if elsewhere else ""
    return Check(
        "saved", True, f"saved = trained: {same:,} tensors, {numbers:,} numbers equal bit for bit{others}", figures
    )


def saved_name(name: str) -> str:
    """Return the name of a parameter in the file: PEFT omits the adapter's name."""
    return name.replace(".modules_to_save.default", "").replace(".default", "")


def _tensors(stack: contextlib.ExitStack, folder: Path) -> dict:
    """Return {tensor name: open safetensors file} of a folder."""
    files = [stack.enter_context(safe_open(file, "pt")) for file in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118  (a file is not a dict)


def _gathered(parameter):
    """Return a context that gathers a parameter sharded by ZeRO-3."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])


def _compare(parameter: torch.Tensor, file, name: str) -> int:
    """Return how many numbers were compared with a safetensors file, negative if they differ."""
    shape, saved = list(parameter.shape), file.get_slice(name)
    if shape != saved.get_shape():
        return -max(1, parameter.numel())
    if not shape:
        stored = file.get_tensor(name)
        return 1 if _equal(parameter.to(stored.dtype).cpu(), stored) else -1
    if parameter.numel() <= MAX_COMPARED:
        parts = [(slice(None), parameter)]
    else:
        rows = max(1, MAX_COMPARED // 2 * shape[0] // parameter.numel())
        parts = [(slice(0, rows), parameter[:rows]), (slice(shape[0] - rows, None), parameter[-rows:])]
    equal, numbers = True, 0
    for place, part in parts:
        stored = saved[place]
        equal = equal and _equal(part.to(stored.dtype).cpu(), stored)
        numbers += part.numel()
    return max(1, numbers) if equal else -max(1, numbers)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits; NaN equals NaN."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.dim() else bool(a == b)
