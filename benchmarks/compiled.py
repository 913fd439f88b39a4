"""Time a forward and backward of packed rows with eager and with compiled decoder layers (--compile_layers).

python benchmarks/compiled.py                   # CPU: a Llama of width 384 and 5 layers, in fp32 and bf16
python benchmarks/compiled.py --width 2048      # on a GPU if there is one

Each round has both in turn, on rows of other lengths. On a CPU the process's own time counts, which other work on the
machine changes less than the clock's. Prints medians and their ratio as JSON, and the seconds of compiling.
"""

import argparse
import copy
import json
import random
import statistics
import time

import machine
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.config import resolve
from zerofit.model import attention
from zerofit.model.experimental import compiled


def batch(tokens: int, device: str) -> dict:
    """Return a packed row of documents of 40 to 300 tokens."""
    bounds = [0]
    while bounds[-1] < tokens:
        bounds.append(min(tokens, bounds[-1] + random.randint(40, 300)))
    ids = torch.randint(8, 1000, (1, tokens), device=device)
    cuts = torch.tensor(bounds, dtype=torch.int32, device=device)
    lengths = cuts.diff().tolist()
    return {
        "input_ids": ids, "labels": ids, "max_length_q": max(lengths), "max_length_k": max(lengths),
        "position_ids": torch.cat([torch.arange(n, device=device) for n in lengths])[None],
        "cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts,
    }  # fmt: skip


def seconds(model, rows: dict, device: str) -> float:
    """Return the seconds of a forward and a backward."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    model(**rows).loss.backward()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - began


def compare(dtype: torch.dtype, given, device: str) -> dict:
    config = AutoConfig.for_model(
        "llama", hidden_size=given.width, intermediate_size=3 * given.width, num_hidden_layers=given.layers,
        num_attention_heads=given.width // 64, vocab_size=1000, use_cache=False,
    )  # fmt: skip
    eager = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    eager = eager.to(device).train()
    fused = copy.deepcopy(eager)
    settings = resolve.resolve_settings("sft", ["--data", "none", "--compile_layers", "true"], 1)
    compiled.install(settings.replace(attn_implementation=attention.NAME), fused)
    rows = batch(given.tokens, device)
    seconds(eager, rows, device)
    began = time.perf_counter()
    seconds(fused, rows, device)
    compiling, taken = time.perf_counter() - began, {"eager": [], "compiled": []}
    for _ in range(given.rounds):
        rows = batch(given.tokens + random.randint(-64, 64), device)
        for name, model in (("eager", eager), ("compiled", fused)):
            taken[name].append(seconds(model, rows, device))
    medians = {name: statistics.median(found) for name, found in taken.items()}
    ratio = medians["eager"] / medians["compiled"]
    return {"dtype": str(dtype), **medians, "ratio": round(ratio, 3), "compiling": round(compiling, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    given, device = parser.parse_args(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    random.seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
    attention.register()
    for dtype in (torch.float32, torch.bfloat16):
        print(json.dumps(compare(dtype, given, device) | {"machine": machine.facts()}), flush=True)


if __name__ == "__main__":
    main()
