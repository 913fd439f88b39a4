"""Measure a bare torch loop and TRL's SFTTrainer with the 8B model and the rows of stages.py on the same GPU.

python benchmarks/gpu/gpu_peer.py                                   # without TRL if it is not installed
python benchmarks/gpu/gpu_peer.py --peers .venv-peers/bin/python    # from `make bench-peers`; LoRA needs peft there

The loop does without trainer, logging and data set: fixed rows without a mask, bf16 throughout, fused AdamW. It
measures zerofit's overhead. Each variant runs in a separate process.
"""

import contextlib
import itertools
import json
import re
import statistics
import subprocess
import sys
import time

import gpu_job
from stages import FILES, LONG, ROOT, ROWS, STEPS, WARM

SECONDS = 150  # time limit of a variant

VARIANTS = [  # (tool, LoRA, gradient checkpointing, Liger, micro batch)
    ("loop", True, False, False, 8), ("loop", True, False, True, 8), ("loop", True, True, False, 8),
    ("trl", True, True, False, 8), ("trl", True, False, True, 8),
    ("loop", False, True, True, 8), ("loop", False, False, True, 4),
]  # fmt: skip


def name_of(variant) -> str:
    tool, lora, checkpointing, liger, micro = variant
    words = [f"{tool} {'LoRA' if lora else 'full bf16'}", "checkpointing" * checkpointing, "Liger" * liger]
    return ", ".join([*filter(None, words), f"micro batch {micro}"])


def build(liger: bool, folder=FILES / "8b", device: str = "cuda"):
    """Build the model of a folder's config.json in bf16 with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.from_pretrained(folder)
        net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    net.config.use_cache = False
    return net


def adapter():
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def loop(
    lora: bool, checkpointing: bool, liger: bool, micro: int, folder=FILES / "8b", device: str = "cuda"
) -> tuple[list[float], list[float]]:
    """Train with plain torch; return losses and seconds of each step."""
    import torch

    from zerofit.model import fused_loss

    net = build(liger, folder, device)
    if lora:
        from peft import get_peft_model

        net = get_peft_model(net, adapter(), autocast_adapter_dtype=False)
        for p in net.parameters():  # adapters in bf16; buffers keep their type
            p.data = p.data.to(torch.bfloat16)
    if checkpointing:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    fused = None if liger else fused_loss.FusedLoss(net)
    net.train()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-5, fused=device == "cuda")
    losses, seconds = [], []
    for _ in range(STEPS):
        began, total = time.perf_counter(), 0.0
        for _ in range(ROWS // micro):
            ids = torch.randint(3, 500, (micro, LONG), device=device)
            with fused.on() if fused else contextlib.nullcontext():
                value = net(input_ids=ids, labels=ids).loss * micro / ROWS
            value.backward()
            total += value.detach()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def trl(lora: bool, checkpointing: bool, liger: bool, micro: int) -> tuple[list[float], list[float]]:
    """Train with TRL's SFTTrainer; return losses and seconds of each step."""
    import datasets
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    times = []

    class Times(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            torch.cuda.synchronize()
            times.append(time.perf_counter())

    arguments = SFTConfig(
        output_dir=str(FILES / "trl"), max_steps=STEPS, per_device_train_batch_size=micro,
        gradient_accumulation_steps=ROWS // micro, max_length=LONG, bf16=True, gradient_checkpointing=checkpointing,
        use_liger_kernel=liger, logging_steps=1, save_strategy="no", report_to="none", learning_rate=1e-5,
    )  # fmt: skip
    with (FILES / "rows.jsonl").open() as file:
        ids = [json.loads(line)["input_ids"] for line in file]
    trainer = SFTTrainer(
        build(False), arguments, train_dataset=datasets.Dataset.from_dict({"input_ids": ids}), callbacks=[Times()],
        processing_class=AutoTokenizer.from_pretrained(FILES / "8b"),
        peft_config=adapter() if lora else None,
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [b - a for a, b in itertools.pairwise(times)]


def run_one(tool: str, *variant) -> None:
    """Run one variant in this process and print its result as JSON."""
    import torch

    losses, seconds = {"loop": loop, "trl": trl}[tool](*variant)
    speed, peak_bytes = ROWS * LONG / statistics.median(seconds[WARM:]), torch.cuda.max_memory_allocated()
    print("\n" + json.dumps({"tokens_per_second": speed, "losses": losses, "peak_bytes": peak_bytes}))


def measure(variant, peers: str, seconds: float) -> dict:
    """Run one variant in a process; return its result or the failure."""
    if seconds <= 0:
        return {"failed": "not run: the budget was spent"}
    words = [peers if variant[0] == "trl" else sys.executable, __file__, "--one", json.dumps(variant)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {seconds:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def row(name: str, result: dict) -> list:
    if "failed" in result:
        return [name, result["failed"], None, None]
    losses, gib = result["losses"], result["peak_bytes"] / gpu_job.GIB
    return [name, f"{result['tokens_per_second']:,.0f}", f"{gib:.2f}", f"{losses[0]:.3f} -> {losses[-1]:.3f}"]


def main() -> None:
    parser = gpu_job.parser(__doc__, "gpu-peer", budget_seconds=480)
    parser.add_argument("--peers", default=sys.executable, help="Python of the environment with TRL")
    parser.add_argument("--one", help="the variant that this process runs, as JSON")
    args = parser.parse_args()
    if args.one:
        run_one(*json.loads(args.one))
        return
    gpu_job.write_model(FILES / "8b", (ROOT / "tests" / "configs" / "llama3.1-8b" / "config.json").read_text())
    gpu_job.write_rows(FILES / "rows.jsonl", [LONG] * 20 * ROWS)
    facts, end, results = gpu_job.facts(), time.monotonic() + args.budget, {}
    for name, variant in ((name_of(variant), variant) for variant in VARIANTS):
        if re.search(args.only, name):
            results[name] = measure(variant, args.peers, min(SECONDS, end - time.monotonic()))
            print(name, results[name], flush=True)
    lines = gpu_job.table(["what", "tok/s", "peak GiB", "loss"], [row(*pair) for pair in results.items()])
    gpu_job.save(args.out, "gpu-peer", "A bare loop and TRL on one GPU", lines, {"machine": facts, "rows": results})


if __name__ == "__main__":
    main()
