"""Compare an export with the trained model in a clean process, by their logits on the same rows."""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from zerofit.errors import UserError
from zerofit.paths import PACKAGE

PROMPTS = ("What is the capital of France?", "Write three words about the sea, then count from 1 to 20.",
           "def mean(numbers):\n    return sum(numbers) / len(numbers)\n", "Grüße: 12,5 % of 80 = 10; 東京 — naïve.")  # fmt: skip

ROWS, TOKENS = 4, 64  # of the run's data; tokens of each row at most

# Relative error of one rounding. One rounding of every weight, or of every activation, is passed through 2 sums a layer:
# errors of independent signs add up to unit * sqrt(2 * layers) of the logits' standard deviation.
UNIT = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}

FP32 = 1e-4  # of the largest logit: sums in another order, with room

INT8 = 2**-7  # LLM.int8 rounds activations too, to 8 bits


def check(given, found, out: Path, told: dict) -> dict | None:
    """Compare; None: --check false.

    Raises: UserError when the logits are further apart than the bound, or the export cannot be loaded.
    """
    if given.check == "false":
        print("  not compared with what was trained (--check false)", flush=True)
        return None
    asked = {
        "path": str(found.folder), "base": given.base, "remote": found.remote, "device": given.device, "out": str(out),
        "merged": told["merged"], "unit": _unit(given, found, told), "bits": found.bits,
        "cast_to": _cast_to(given, found, told),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "asked.json"
        file.write_text(json.dumps(asked), encoding="utf-8")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        }
        done = subprocess.run(
            [sys.executable, "-m", "zerofit", "compare", str(file)],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"{out.name}: the export could not be compared ({last[:300]}); nothing is kept.")
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    print(f"  reloaded and compared: {in_words(result)}", flush=True)
    if not result["agrees"]:
        fix = f" (rounding to {told['dtype']}? --dtype float32 does without)" if told["dtype"] != "float32" else ""
        raise UserError(
            f"the export does not compute what {found.folder} computes: {in_words(result)}; nothing is kept{fix}."
        )
    if asked["unit"] > UNIT["float32"] and (note := _much_rounding(result)):
        told["notes"].append(note)
        print(f"  note: {note}", flush=True)
    return result


def _much_rounding(result: dict) -> str:
    """A sentence where rounding takes away a good part of what was learnt: updates below the last digit; else ""."""
    if result["merged"] and result["mean"] > result["effect"] / 2:
        return (
            f"the adapter moves the logits by {result['effect']:.2g} on average, rounding by {result['mean']:.2g}: much of "
            "what it learnt is lost; --dtype float32 keeps it"
        )
    if result["mean"] > result["independent"]:
        return (
            f"the change of type moves the logits by {result['mean']:.2g} on average, more than independent roundings "
            f"({result['independent']:.2g}): training's last small updates are rounded away; the saved type keeps them"
        )
    return ""


def _unit(given, found, told: dict) -> float:
    """The coarsest rounding between what was trained and the export; 0: none."""
    import torch

    if found.weights and not told["merged"] and not told["masters"] and given.dtype in (None, found.dtype):
        return 0.0
    if found.bits == 8 and told["merged"]:
        return INT8
    types = [told["dtype"]]
    if told["masters"] or not told["merged"]:
        types.append(found.dtype)
    if found.bits:  # what unpacks it computes in this type, in the forward too
        types.append(found.base_dtype or torch.float32)
    return max(UNIT[str(name).removeprefix("torch.")] for name in types)


def _cast_to(given, found, told: dict) -> str:
    """The type in which the files must agree bit for bit: the masters rounded again, else the saved weights cast."""
    if told["merged"] or not found.weights:
        return ""
    if given.dtype is None:
        return "as saved"
    return str(found.dtype).removeprefix("torch.") if told["masters"] else told["dtype"]


def in_words(result: dict) -> str:
    apart = f"largest |logit difference| {result['max']:.2g}, mean {result['mean']:.2g}"
    if not result["exact"]:
        apart += f" (bounds {result['bound_max']:.2g} and {result['bound_mean']:.2g}; the logits' deviation is {result['deviation']:.2g})"
    elif result["agrees"]:
        apart = "every logit is bit for bit the same"
    differing = f"; {result['differing']} differs" if result.get("differing") else ""
    return f"{apart} on {result['tokens']} tokens of {result['rows']} rows{differing}"


# --- the clean process ---


def main(argv: list[str]) -> None:
    import torch

    from zerofit import log_filters
    from zerofit.export import source

    log_filters.libraries()
    (file,) = argv
    asked = json.loads(Path(file).read_text(encoding="utf-8"))
    found = source.find(asked["path"], asked["base"], asked["remote"])
    exact = asked["unit"] == 0
    rows = _rows(found)
    net = _aligned(source.load(found, asked["device"]), exact or found.bits)
    layers = net.config.get_text_config().num_hidden_layers
    rows = rows or [list(range(n)) for n in (8, 16)]  # without a tokenizer
    before = _logits(net, rows)
    effect = 0.0
    if asked["merged"]:
        with net.disable_adapter():
            effect = _mean([a - b for a, b in zip(before, _logits(net, rows), strict=True)])
    del net
    exported = source.find(asked["out"], found.base, asked["remote"])
    exported.facts = found.facts if exported.adapter else {}  # how its base is packed
    net = _aligned(source.load(exported, asked["device"]), exact or exported.bits)
    after = _logits(net, rows)
    apart = [a - b for a, b in zip(after, before, strict=True)]
    joined = torch.cat([row.flatten() for row in before])
    deviation = joined.std().item()
    largest = max(row.abs().max().item() for row in apart)  # NaN: neither <= nor ==
    result = {
        "exact": exact, "merged": asked["merged"], "max": largest, "mean": _mean(apart), "deviation": deviation,
        "effect": effect, "rows": len(rows), "tokens": sum(map(len, rows)),
        **_bounds(asked["unit"], layers, deviation, joined.abs().max().item(), asked["merged"]),
    }  # fmt: skip
    if asked["cast_to"]:
        result["differing"] = _differing(found, exported, getattr(torch, asked["cast_to"], None))
    result["agrees"] = bool(
        largest <= result["bound_max"] and result["mean"] <= result["bound_mean"] and not result.get("differing")
    )
    (Path(file).parent / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _bounds(unit: float, layers: int, deviation: float, scale: float, merged: bool) -> dict[str, float]:
    """What roundings add up to; the largest of some 100,000 logits was seen at 14 to 32 times the mean.

    Nothing merged: the files are compared bit for bit, and the bound is that of errors which all point one way, as where
    rounding takes back what training has changed.
    """
    if unit <= UNIT["float32"]:
        bound = FP32 * scale * (unit > 0)
        return {"bound_max": bound, "bound_mean": bound, "independent": bound}
    independent = unit * math.sqrt(2 * layers) * deviation
    mean = independent if merged else unit * 2 * layers * deviation
    return {"bound_max": 20 * mean, "bound_mean": mean, "independent": independent}


def _aligned(net, as_it_is: bool):
    """Mapped weights copied to where every sum is taken in the same order; in fp32 unless bits are to be compared."""
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


def _rows(found) -> list[list[int]]:
    """Token ids of the prompts and of rows of the run's data, where it is still there."""
    from zerofit.export import source

    words = source.tokenizer(found)
    if words is None:
        return []
    texts = [*PROMPTS, *_data(found)]
    return [ids[:TOKENS] for text in texts if (ids := words(text)["input_ids"])]


def _data(found) -> list[str]:
    for name in found.argument("data") or []:
        path = Path(name).expanduser()
        if path.is_file() and path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                return ["\n".join(_texts(json.loads(line))) for line, _ in zip(lines, range(ROWS), strict=False)]
    return []


def _texts(value) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]


def _differing(found, exported, dtype) -> str:
    """The first tensor whose bits are not those saved: logits of a few rows do not see every row of an embedding.

    Args: dtype: that both sides are rounded to, None: compared as they are.
    """
    import torch

    from zerofit.train.checkpoint import zero_shards

    here, there = zero_shards.Weights(found.folder), zero_shards.Weights(exported.folder)
    for name in here.where:
        now = there.get(name)
        if now is None:
            if not name.startswith("lm_head"):  # the second copy of a tied weight is left out
                return name
            continue
        pair = [t.to(dtype) if dtype and t.is_floating_point() else t for t in (now, here.get(name))]
        if pair[0].dtype != pair[1].dtype or not torch.equal(*pair):
            return name
    return ""
