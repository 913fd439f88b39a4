"""Compare an export with the trained model, by their logits on the same rows."""

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

ROWS, TOKENS = 4, 64  # rows of the run's data; most tokens per row

# Relative error of one rounding. A rounding of every weight, or of every activation, passes through 2 sums per layer:
# independent errors add up to unit * sqrt(2 * layers) of the logits' standard deviation.
UNIT = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}

FP32 = 1e-4  # of the largest logit: another order of summation, with a margin

INT8 = 2**-7  # LLM.int8 rounds activations too, to 8 bits


def check(given, saved, out: Path, report: dict) -> dict | None:
    """Compare the export with the trained model; return None for --check false.

    Raises: UserError when the logits are further apart than the bound, or the export cannot be loaded.
    """
    if given.check == "false":
        print("  not compared with what was trained (--check false)", flush=True)
        return None
    unit = rounding(given, saved, report)
    try:
        result = _compare(given, saved, out, report, unit)
    except Exception as error:  # whatever transformers, peft or torch meet in the folder
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{out.name}: the export could not be compared ({reason[:300]}); nothing is kept.") from error
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
    if unit > UNIT["float32"] and (note := _much_rounding(result)):
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


def rounding(given, saved, report: dict) -> float:
    """Return the coarsest rounding between what was trained and the export; 0 for none."""
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


def _cast_to(given, saved, report: dict) -> torch.dtype | None:
    """Return the dtype in which files must agree bit for bit: masters rounded, else saved weights cast; None: as is."""
    if given.dtype is None:
        return None
    return saved.dtype if report["masters"] else getattr(torch, report["dtype"])


def sentence(result: dict) -> str:
    text = f"largest |logit difference| {result['max']:.2g}, mean {result['mean']:.2g}"
    if not result["exact"]:
        text += f" (bounds {result['bound_max']:.2g} and {result['bound_mean']:.2g}; "
        text += f"the logits' deviation is {result['deviation']:.2g})"
    elif result["agrees"]:
        text = "every logit is bit for bit the same"
    differing = f"; {result['differing']} differs" if result.get("differing") else ""
    return f"{text} on {result['tokens']} tokens of {result['rows']} rows{differing}"


# --- the comparison ---


def _compare(given, saved, out: Path, report: dict, unit: float) -> dict:
    """Load what was trained, then the export, one after the other; return the differences of their logits."""
    exact, merged = unit == 0, report["merged"]
    samples = ends.samples(saved, tokenizer := source.tokenizer(saved))
    rows = _rows(tokenizer, samples)
    model = _aligned(source.load(saved, given.device), exact or saved.bits)
    layers = model.config.get_text_config().num_hidden_layers
    before = _logits(model, rows)
    effect = 0.0
    if merged:
        with model.disable_adapter():
            effect = _mean([a - b for a, b in zip(before, _logits(model, rows), strict=True)])
    del model
    exported = source.find(str(out), saved.base, saved.remote)
    exported.facts = saved.facts if exported.adapter else {}  # tells how its base is quantized
    model = _aligned(source.load(exported, given.device), exact or exported.bits)
    after = _logits(model, rows)
    differences = [a - b for a, b in zip(after, before, strict=True)]
    all_logits = torch.cat([row.flatten() for row in before])
    deviation = all_logits.std().item()
    largest = max(row.abs().max().item() for row in differences)  # a NaN fails the comparison with the bound
    result = {
        "exact": exact, "merged": merged, "max": largest, "mean": _mean(differences), "deviation": deviation,
        "effect": effect, "rows": len(rows), "tokens": sum(map(len, rows)),
        **bounds(unit, layers, deviation, all_logits.abs().max().item(), merged),
    }  # fmt: skip
    result["generated"] = ends.generate(model, samples, source.tokenizer(exported), report["ends"])
    if not merged and saved.weights:
        result["differing"] = _differing(saved, exported, _cast_to(given, saved, report))
    result["agrees"] = bool(
        largest <= result["bound_max"] and result["mean"] <= result["bound_mean"] and not result.get("differing")
    )
    return result


def bounds(unit: float, layers: int, deviation: float, scale: float, merged: bool) -> dict[str, float]:
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
    if not as_it_is:
        net = net.float()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.data.is_floating_point() and type(parameter) is torch.nn.Parameter:
                parameter.data = parameter.data.clone()
    return net


def _logits(net, rows: list[list[int]]) -> list:
    with torch.no_grad():
        return [
            net(input_ids=torch.tensor([row], device=net.device), use_cache=False).logits[0].float().cpu()
            for row in rows
        ]


def _mean(rows: list) -> float:
    return sum(row.abs().sum().item() for row in rows) / sum(row.numel() for row in rows)


def _rows(tokenizer, samples: list) -> list[list[int]]:
    """Return token ids of the prompts and of the first rows of the run's data."""
    if tokenizer is None:
        return [list(range(n)) for n in (8, 16)]
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    return [ids[:TOKENS] for ids in (*prompts, *(prompt + answer for prompt, answer in samples[:ROWS])) if ids]


def _differing(saved, exported, dtype) -> str:
    """Return the first tensor whose bits differ from the saved ones, else "".

    The logits of a few rows do not use every row of an embedding.
    Args: dtype: both sides are rounded to it; None compares them as they are.
    """
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
