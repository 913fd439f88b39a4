"""Compare the logits of an export and of the trained model on the same rows."""

import math
from pathlib import Path

import torch

from zerofit.base.errors import UserError, first_line
from zerofit.export import ends, source
from zerofit.model.weights import stored

PROMPTS = (
    "What is the capital of France?",
    "Write three words about the sea, then count from 1 to 20.",
    "def mean(numbers):\n    return sum(numbers) / len(numbers)\n",
    "Grüße: 12,5 % of 80 = 10; 東京 — naïve.",
)

MAX_ROWS, MAX_TOKENS = 4, 64  # rows of the run's data; tokens per row

# Relative rounding error. Errors of weights or activations pass through 2 sums per layer, so independent errors add up
# to unit * sqrt(2 * layers) times the standard deviation of the logits.
UNIT = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}

FP32_TOLERANCE = 1e-4  # relative to the largest logit, for a different order of summation

INT8 = 2**-7  # LLM.int8 also rounds activations


def check(args, saved, out: Path, report: dict) -> dict | None:
    """Compare the export with the trained model; return None for --check false.

    Raises: UserError if the logits differ by more than the bound, or if the export cannot be loaded.
    """
    if args.check == "false":
        print("  not compared with the trained model (--check false)", flush=True)
        return None
    unit = rounding(args, saved, report)
    try:
        result = _compare(args, saved, out, report, unit)
    except Exception as error:  # any error of transformers, peft or torch
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{out.name}: comparison failed ({reason[:300]}); the export is deleted.") from error
    print(f"  reloaded and compared: {sentence(result)}", flush=True)
    if not result["agrees"]:
        fix = f" (--dtype float32 avoids the rounding to {report['dtype']})" if report["dtype"] != "float32" else ""
        raise UserError(
            f"the results of the export differ from {saved.folder}: {sentence(result)}; the export is deleted{fix}."
        )
    if result["generated"]["missing"]:
        raise UserError(
            f"{out.name}: eos_token_id of generation_config.json lacks {', '.join(result['generated']['missing'])}, "
            "which ends the trained answers; the export is deleted."
        )
    if generation := ends.sentence(result["generated"], report["ends"]):
        print(f"  {generation}", flush=True)
    if unit > UNIT["float32"] and (note := _rounding_note(result)):
        report["notes"].append(note)
        print(f"  note: {note}", flush=True)
    return result


def _rounding_note(result: dict) -> str:
    """Return a note if rounding removes many updates that training has made, else ""."""
    if result["merged"] and result["mean"] > result["effect"] / 2:
        return (
            f"the adapter changes the logits by {result['effect']:.2g} on average, rounding by {result['mean']:.2g}: "
            "much of its effect is lost; keep it with --dtype float32"
        )
    if result["mean"] > result["independent"]:
        return (
            f"the new dtype changes the logits by {result['mean']:.2g} on average, more than independent rounding "
            f"({result['independent']:.2g}): small updates of the training are lost; keep them with the saved dtype"
        )
    return ""


def rounding(args, saved, report: dict) -> float:
    """Return the coarsest rounding between the trained model and the export, 0 for none."""
    if saved.weights and not report["merged"] and not report["masters"] and args.dtype in (None, saved.dtype):
        return 0.0
    if saved.bits == 8 and report["merged"]:
        return INT8
    dtypes = [report["dtype"]]
    if report["masters"] or not report["merged"]:
        dtypes.append(saved.dtype)
    if saved.bits:  # bitsandbytes dequantizes to this dtype, also in the forward
        dtypes.append(saved.base_dtype or torch.float32)
    return max(UNIT[str(name).removeprefix("torch.")] for name in dtypes)


def _cast_to(args, saved, report: dict) -> torch.dtype | None:
    """Return the dtype in which the files must agree bit for bit, None without a cast."""
    if args.dtype is None:
        return None
    return saved.dtype if report["masters"] else getattr(torch, report["dtype"])


def sentence(result: dict) -> str:
    text = f"largest |logit difference| {result['max']:.2g}, mean {result['mean']:.2g}"
    if not result["exact"]:
        text += f" (bounds {result['bound_max']:.2g} and {result['bound_mean']:.2g}; "
        text += f"standard deviation of the logits {result['deviation']:.2g})"
    elif result["agrees"]:
        text = "all logits are bit for bit the same"
    differing = f"; {result['differing']} differs" if result.get("differing") else ""
    return f"{text} on {result['tokens']} tokens of {result['rows']} rows{differing}"


# --- the comparison ---


def _compare(args, saved, out: Path, report: dict, unit: float) -> dict:
    """Load the trained model, then the export; return the differences of their logits."""
    exact, merged = unit == 0, report["merged"]
    samples = ends.samples(saved, tokenizer := source.tokenizer(saved))
    rows = _rows(tokenizer, samples)
    model = _aligned(source.load(saved, args.device), exact or saved.bits)
    layers = model.config.get_text_config().num_hidden_layers
    before = _logits(model, rows)
    effect = 0.0
    if merged:
        with model.disable_adapter():
            effect = _mean([a - b for a, b in zip(before, _logits(model, rows), strict=True)])
    del model
    exported = source.find(str(out), saved.base, saved.remote)
    exported.facts = saved.facts if exported.adapter else {}  # contain the quantization of the base
    model = _aligned(source.load(exported, args.device), exact or exported.bits)
    after = _logits(model, rows)
    differences = [a - b for a, b in zip(after, before, strict=True)]
    all_logits = torch.cat([row.flatten() for row in before])
    deviation = all_logits.std().item()
    largest = max(row.abs().max().item() for row in differences)  # NaN fails the comparison with the bound
    result = {
        "exact": exact, "merged": merged, "max": largest, "mean": _mean(differences), "deviation": deviation,
        "effect": effect, "rows": len(rows), "tokens": sum(map(len, rows)),
        **bounds(unit, layers, deviation, all_logits.abs().max().item(), merged),
    }  # fmt: skip
    result["generated"] = ends.generate(model, samples, source.tokenizer(exported), report["ends"])
    if not merged and saved.weights:
        result["differing"] = _differing(saved, exported, _cast_to(args, saved, report))
    result["agrees"] = bool(
        largest <= result["bound_max"] and result["mean"] <= result["bound_mean"] and not result.get("differing")
    )
    return result


def bounds(unit: float, layers: int, deviation: float, scale: float, merged: bool) -> dict[str, float]:
    """Return bounds of the rounding errors. In tests, the largest of 100,000 logits was 14 to 32 times the mean.

    Without a merge, the files are also compared bit for bit, and the bound allows errors of equal sign, e.g. if
    rounding reverts the changes of the training.
    """
    if unit <= UNIT["float32"]:
        bound = FP32_TOLERANCE * scale * (unit > 0)
        return {"bound_max": bound, "bound_mean": bound, "independent": bound}
    independent = unit * math.sqrt(2 * layers) * deviation
    mean = independent if merged else unit * 2 * layers * deviation
    return {"bound_max": 20 * mean, "bound_mean": mean, "independent": independent}


def _aligned(model, keep_dtype: bool):
    """Copy mapped weights to aligned memory, so that sums keep their order; in fp32 unless `keep_dtype`."""
    if not keep_dtype:
        model = model.float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.data.is_floating_point() and type(parameter) is torch.nn.Parameter:
                parameter.data = parameter.data.clone()
    return model


def _logits(model, rows: list[list[int]]) -> list:
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([row], device=model.device), use_cache=False).logits[0].float().cpu()
            for row in rows
        ]


def _mean(rows: list) -> float:
    return sum(row.abs().sum().item() for row in rows) / sum(row.numel() for row in rows)


def _rows(tokenizer, samples: list) -> list[list[int]]:
    """Return token ids of the prompts and of the first rows of the run's data."""
    if tokenizer is None:
        return [list(range(n)) for n in (8, 16)]
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    return [ids[:MAX_TOKENS] for ids in (*prompts, *(prompt + answer for prompt, answer in samples[:MAX_ROWS])) if ids]


def _differing(saved, exported, dtype) -> str:
    """Return the first tensor that differs from the saved tensor in any bit, else "".

    This covers embedding rows that the logits of a few rows do not use.
    Args: dtype: round both tensors to it, None for no rounding.
    """
    original, written = stored.Weights(saved.folder), stored.Weights(exported.folder)
    for name in original.where:
        tensor = written.get(name)
        if tensor is None:
            if not name.startswith("lm_head"):  # the second copy of a tied weight is not exported
                return name
            continue
        pair = [t.to(dtype) if dtype and t.is_floating_point() else t for t in (tensor, original.get(name))]
        if pair[0].dtype != pair[1].dtype or not torch.equal(*pair):
            return name
    return ""
