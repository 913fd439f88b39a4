"""Compare an export with the trained model in a clean process, by their logits on the same rows."""

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.base.paths import PACKAGE
from zerofit.data import sources
from zerofit.export import ends

PROMPTS = (
    "What is the capital of France?",
    "Write three words about the sea, then count from 1 to 20.",
    "def mean(numbers):\n    return sum(numbers) / len(numbers)\n",
    "Grüße: 12,5 % of 80 = 10; 東京 — naïve.",
)

ROWS, TOKENS = 4, 64  # rows of the run's data; most tokens per row

# Relative error of one rounding. A rounding of every weight, or of every activation, passes through 2 sums per layer:
# independent errors add up to unit * sqrt(2 * layers) of the logits' standard deviation.
UNIT = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}

FP32 = 1e-4  # of the largest logit: another order of summation, with a margin

INT8 = 2**-7  # LLM.int8 rounds activations too, to 8 bits


def check(given, saved, out: Path, report: dict) -> dict | None:
    """Compare the export with the trained model in a clean process; return None for --check false.

    Raises: UserError when the logits are further apart than the bound, or the export cannot be loaded.
    """
    if given.check == "false":
        print("  not compared with what was trained (--check false)", flush=True)
        return None
    request = {
        "path": str(saved.folder), "base": given.base, "remote": saved.remote, "device": given.device, "out": str(out),
        "merged": report["merged"], "unit": _unit(given, saved, report), "bits": saved.bits,
        "cast_to": _cast_to(given, saved, report), "ends": report["ends"],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "asked.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        }
        process = subprocess.run(
            [sys.executable, "-m", "zerofit", "compare", str(file)],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        if process.returncode:
            last_line = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"{out.name}: the export could not be compared ({last_line[:300]}); nothing is kept.")
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    print(f"  reloaded and compared: {sentence(result)}", flush=True)
    if not result["agrees"]:
        fix = f" (rounding to {report['dtype']}? --dtype float32 does without)" if report["dtype"] != "float32" else ""
        raise UserError(
            f"the export does not compute what {saved.folder} computes: {sentence(result)}; nothing is kept{fix}."
        )
    if result["generated"]["missing"]:
        raise UserError(
            f"{out.name}: trained answers end with {', '.join(result['generated']['missing'])}, which is missing among "
            "the eos_token_id of its generation_config.json; nothing is kept."
        )
    if said := ends.sentence(result["generated"], report["ends"]):
        print(f"  {said}", flush=True)
    if request["unit"] > UNIT["float32"] and (note := _much_rounding(result)):
        report["notes"].append(note)
        print(f"  note: {note}", flush=True)
    return result


def _much_rounding(result: dict) -> str:
    """Return a note if rounding loses much of what was learned (updates below the last digit), else ""."""
    if result["merged"] and result["mean"] > result["effect"] / 2:
        return (
            f"the adapter moves the logits by {result['effect']:.2g} on average, rounding by {result['mean']:.2g}: "
            "much of what it learned is lost; --dtype float32 keeps it"
        )
    if result["mean"] > result["independent"]:
        return (
            f"the change of type moves the logits by {result['mean']:.2g} on average, more than independent roundings "
            f"({result['independent']:.2g}): training's last small updates are rounded away; the saved type keeps them"
        )
    return ""


def _unit(given, saved, report: dict) -> float:
    """Return the coarsest rounding between what was trained and the export; 0 for none."""
    import torch

    if saved.weights and not report["merged"] and not report["masters"] and given.dtype in (None, saved.dtype):
        return 0.0
    if saved.bits == 8 and report["merged"]:
        return INT8
    dtypes = [report["dtype"]]
    if report["masters"] or not report["merged"]:
        dtypes.append(saved.dtype)
    if saved.bits:  # bitsandbytes dequantizes to this dtype, in the forward too
        dtypes.append(saved.base_dtype or torch.float32)
    return max(UNIT[str(name).removeprefix("torch.")] for name in dtypes)


def _cast_to(given, saved, report: dict) -> str:
    """Return the dtype in which files must agree bit for bit: masters rounded, else saved weights cast."""
    if report["merged"] or not saved.weights:
        return ""
    if given.dtype is None:
        return "as saved"
    return str(saved.dtype).removeprefix("torch.") if report["masters"] else report["dtype"]


def sentence(result: dict) -> str:
    text = f"largest |logit difference| {result['max']:.2g}, mean {result['mean']:.2g}"
    if not result["exact"]:
        text += f" (bounds {result['bound_max']:.2g} and {result['bound_mean']:.2g}; "
        text += f"the logits' deviation is {result['deviation']:.2g})"
    elif result["agrees"]:
        text = "every logit is bit for bit the same"
    differing = f"; {result['differing']} differs" if result.get("differing") else ""
    return f"{text} on {result['tokens']} tokens of {result['rows']} rows{differing}"


# --- the clean process ---


def main(argv: list[str]) -> None:
    import torch

    from zerofit.base import log_filters
    from zerofit.export import source

    log_filters.libraries()
    (file,) = argv
    request = json.loads(Path(file).read_text(encoding="utf-8"))
    trained = source.find(request["path"], request["base"], request["remote"])
    exact = request["unit"] == 0
    rows = _rows(trained)
    model = _aligned(source.load(trained, request["device"]), exact or trained.bits)
    layers = model.config.get_text_config().num_hidden_layers
    rows = rows or [list(range(n)) for n in (8, 16)]  # without a tokenizer
    before = _logits(model, rows)
    effect = 0.0
    if request["merged"]:
        with model.disable_adapter():
            effect = _mean([a - b for a, b in zip(before, _logits(model, rows), strict=True)])
    del model
    exported = source.find(request["out"], trained.base, request["remote"])
    exported.facts = trained.facts if exported.adapter else {}  # tells how its base is quantized
    model = _aligned(source.load(exported, request["device"]), exact or exported.bits)
    after = _logits(model, rows)
    differences = [a - b for a, b in zip(after, before, strict=True)]
    all_logits = torch.cat([row.flatten() for row in before])
    deviation = all_logits.std().item()
    largest = max(row.abs().max().item() for row in differences)  # a NaN fails the comparison with the bound
    result = {
        "exact": exact, "merged": request["merged"], "max": largest, "mean": _mean(differences), "deviation": deviation,
        "effect": effect, "rows": len(rows), "tokens": sum(map(len, rows)),
        **_bounds(request["unit"], layers, deviation, all_logits.abs().max().item(), request["merged"]),
    }  # fmt: skip
    result["generated"] = ends.generate(model, trained, source.tokenizer(exported), request["ends"])
    if request["cast_to"]:
        result["differing"] = _differing(trained, exported, getattr(torch, request["cast_to"], None))
    result["agrees"] = bool(
        largest <= result["bound_max"] and result["mean"] <= result["bound_mean"] and not result.get("differing")
    )
    (Path(file).parent / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _bounds(unit: float, layers: int, deviation: float, scale: float, merged: bool) -> dict[str, float]:
    """Bound what roundings add up to; the largest of 100,000 logits was seen at 14 to 32 times the mean.

    Without a merge, the files are compared bit for bit too, and the bound allows errors that all have one sign, as when
    rounding undoes what training changed.
    """
    if unit <= UNIT["float32"]:
        bound = FP32 * scale * (unit > 0)
        return {"bound_max": bound, "bound_mean": bound, "independent": bound}
    independent = unit * math.sqrt(2 * layers) * deviation
    mean = independent if merged else unit * 2 * layers * deviation
    return {"bound_max": 20 * mean, "bound_mean": mean, "independent": independent}


def _aligned(net, as_it_is: bool):
    """Copy mapped weights to aligned memory, so that sums keep their order; in fp32 unless `as_it_is`."""
    import torch

    if not as_it_is:
        net = net.float()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.data.is_floating_point() and type(parameter) is torch.nn.Parameter:
                parameter.data = parameter.data.clone()
    return net


def _logits(net, rows: list[list[int]]) -> list:
    import torch

    with torch.no_grad():
        return [
            net(input_ids=torch.tensor([row], device=net.device), use_cache=False).logits[0].float().cpu()
            for row in rows
        ]


def _mean(rows: list) -> float:
    return sum(row.abs().sum().item() for row in rows) / sum(row.numel() for row in rows)


def _rows(saved) -> list[list[int]]:
    """Return token ids of the prompts and of rows of the run's data, if it still exists."""
    from zerofit.export import source

    tokenizer = source.tokenizer(saved)
    if tokenizer is None:
        return []
    texts = [*PROMPTS, *_data(saved)]
    return [ids[:TOKENS] for text in texts if (ids := tokenizer(text)["input_ids"])]


def _data(saved) -> list[str]:
    """Return the texts of the first rows of the run's first JSONL file; fewer where rows cannot be read."""
    texts = []
    for name in saved.argument("data") or []:
        path = Path(name).expanduser()
        if path.is_file() and path.suffix == ".jsonl":
            with contextlib.suppress(UserError):  # training may have left out a broken line: --bad_rows drop
                for _, row in itertools.islice(sources.read_rows(sources.Source(path)), ROWS):
                    text = "\n".join(_texts(row))
                    texts.append(text.encode("utf-8", "ignore").decode())  # a lone surrogate is no text to tokenizers
            break
    return texts


def _texts(value) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]


def _differing(saved, exported, dtype) -> str:
    """Return the first tensor whose bits differ from the saved ones, else "".

    The logits of a few rows do not use every row of an embedding.
    Args: dtype: both sides are rounded to it; None compares them as they are.
    """
    import torch

    from zerofit.model.weights import stored

    original, written = stored.Weights(saved.folder), stored.Weights(exported.folder)
    for name in original.where:
        tensor = written.get(name)
        if tensor is None:
            if not name.startswith("lm_head"):  # the second copy of a tied weight is left out
                return name
            continue
        pair = [t.to(dtype) if dtype and t.is_floating_point() else t for t in (tensor, original.get(name))]
        if pair[0].dtype != pair[1].dtype or not torch.equal(*pair):
            return name
    return ""
