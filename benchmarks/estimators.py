"""Compare other memory estimators with the simulation and the closed forms on the same jobs.

    python benchmarks/estimators.py

The reference is the simulation (which equals real tensors on a CPU to the byte, see plan.py), not a GPU. accelerate's
and DeepSpeed's own functions are called; Korthikanti et al. (arXiv 2205.05198, equations 1 and 2:
s b h (34 + 5 a s / h) a layer without recomputation, 2 s b h with; flash attention leaves the second term out) gives
activations, to which 16-bit states by arXiv 1910.02054 are added. Writes benchmarks/results/estimators.md.
"""

from pathlib import Path

from machine import describe, facts, versions

from zerofit.base import hardware
from zerofit.plan import candidates, predict

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "tests" / "configs"
GIB = 2**30
JOBS = [  # (model, method, stage, offload, checkpointing, tokens, GPUs)
    ("llama3.1-8b", "sft", 2, "none", "true", 4096, 8),
    ("llama3.1-8b", "sft", 3, "none", "true", 4096, 8),
    ("llama3.1-8b", "sft", 3, "none", "false", 4096, 8),
    ("llama3.1-8b", "sft", 2, "optimizer", "true", 4096, 8),
    ("llama3.1-8b", "sft", 3, "all", "true", 4096, 8),
    ("qwen2.5-0.5b", "sft", 2, "none", "true", 4096, 8),
    ("qwen2.5-0.5b", "sft", 3, "none", "true", 4096, 8),
    ("llama3.1-8b", "lora", 3, "none", "true", 4096, 8),
]


def others(candidate, settings, tokens: int, checkpointing: bool) -> dict[str, float]:
    """Return {tool: bytes on a GPU}."""
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    s, setting = candidate.shape, candidate.setting
    training = estimate_training_usage(4 * s.parameters, "bfloat16")
    offloads = {"num_gpus_per_node": setting.ranks, "cpu_offload": setting.offload != "none"}
    if setting.zero == 3:
        _, deepspeed, _ = estimate_zero3_model_states_mem_needs(
            s.parameters, s.largest, cpu_offload_params=setting.offload == "all", **offloads
        )
    else:
        _, deepspeed = estimate_zero2_model_states_mem_needs(s.parameters, **offloads)
    share = [1 / setting.ranks if setting.zero >= stage else 1 for stage in (3, 2, 1)]
    states = s.trainable * (2 * share[0] + 2 * share[1] + (12 * share[2] if setting.offload == "none" else 0))
    states += 2 * s.frozen * share[0]
    activations = tokens * s.hidden * s.layers * (2 if checkpointing else 34)
    return {
        "accelerate estimate-memory": max(training.values()),
        "DeepSpeed estimate_zero*_mem_needs": deepspeed,
        "Korthikanti + ZeRO paper": states + activations,
    }


def main() -> None:
    from zerofit.config import parse, resolve

    gpu, rows = hardware.GPUS["h100-80g"], []
    for model, method, zero, offload, checkpointing, tokens, ranks in JOBS:
        flags = ["--model", str(CONFIGS / model), "--max_length", str(tokens),
                 "--gradient_checkpointing", checkpointing,
                 "--zero", str(zero), "--offload", offload, "--per_device_train_batch_size", "1",
                 "--effective_batch_size", str(ranks), "--sp_size", "1"]  # fmt: skip
        (candidate,) = candidates.candidates(method, parse.request(candidates.recipe_of(method), flags), ranks, gpu)
        predict.simulate_candidate(candidate)
        settings = resolve.resolve(candidate.request, ranks, gpu)
        simulated = max(candidate.answer["total"].values())
        said = {"closed forms": sum(candidate.formula.values())} | others(
            candidate, settings, tokens, checkpointing == "true"
        )
        name = f"{model} {method} ZeRO-{zero}" + (f", offload {offload}" if offload != "none" else "")
        rows.append((name + (", checkpointing" if checkpointing == "true" else ""), simulated, said))
    tools = list(rows[0][2])
    lines = ["# Estimators side by side", "", *describe(facts(), {"zerofit": versions()}), "",
             "8 GPUs, one row of 4,096 tokens each. GiB on a GPU, and how far from the simulation.", "",
             f"| job | simulation | {' | '.join(tools)} |", "|---" * (len(tools) + 2) + "|"]  # fmt: skip
    for name, simulated, said in rows:
        cells = [f"{said[tool] / GIB:.1f} ({said[tool] / simulated - 1:+.0%})" for tool in tools]
        lines.append(f"| {name} | {simulated / GIB:.1f} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    (ROOT / "benchmarks" / "results" / "estimators.md").write_text(text)


if __name__ == "__main__":
    main()
