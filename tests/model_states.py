"""Bytes of parameters, gradients and optimizer states on one rank of a large world, measured and by formula.

The DeepSpeed engine, its tensors and their sizes are real; only the collectives move nothing (torch's fake process
group), so the numbers that it trains on are meaningless and nothing but bytes is reported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from zerofit.config import deepspeed_json
from zerofit.job.settings import merge_json
from zerofit.plan import fake_device
from zerofit.train import memory_tracker


def formula(zero: int, ranks: int) -> dict[str, float]:
    """Bytes per trained parameter on one rank, bf16 with fp32 master and Adam (arXiv 1910.02054, section 5).

    The sums are 16 (stage 0), 4 + 12/N, 2 + 14/N, 16/N. Stage 1 describes "last_gradient" of
    MemoryTracker.model_states, the others "before_step".
    """
    share = [1 / ranks if zero >= stage else 1 for stage in (3, 2, 1)]
    return dict(zip(("parameters", "gradients", "optimizer"), (2 * share[0], 2 * share[1], 12 * share[2]), strict=True))


def model_states(model_config: str | Path | dict, zero: int, ranks: int, rank: int = 0, **options) -> dict:
    """Model states of rank `rank` of `ranks`, measured: the real DeepSpeed engine trains two steps in a process of its
    own, in which torch's fake process group stands for the other ranks.

    Args: model_config: a model's config.json (path, folder or content); its weights are random.
        options: see measure (sequence, micro_batch, accumulation, offload).
    Returns: {"numel", "model_states": {moment: {part: bytes}}, "peak": {phase: {part: bytes}}, "host"}.
    Raises: RuntimeError with the end of its output when the process fails.
    """
    if not isinstance(model_config, dict):
        path = Path(model_config)
        model_config = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    question = {"model_config": model_config, "zero": zero, "ranks": ranks, "rank": rank, **options}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(question), capture_output=True, text=True,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"measuring rank {rank} of {ranks} failed: {(done.stdout + done.stderr)[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    model_config: dict, zero_stage: int, ranks: int, rank: int = 0, sequence: int = 16, micro_batch: int = 1,
    accumulation: int = 1, offload: str = "none",
) -> dict:  # fmt: skip
    """Two optimizer steps as rank `rank` of `ranks`, bf16 with fp32 master weights and the kit's own JSON.

    Args: sequence: tokens per row; micro_batch: rows; accumulation: micro batches per step.
    Returns: as model_states.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoModelForCausalLM

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    import deepspeed

    fake_device.fake_other_ranks()
    kind = model_config["model_type"]
    config = AutoConfig.for_model(kind, **{k: v for k, v in model_config.items() if k != "model_type"})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.config.use_cache = False
    numel = sum(p.numel() for p in model.parameters())
    with memory_tracker.MemoryTracker(model, device="cpu") as tracker:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        settings = _deepspeed_config(zero_stage, offload, config.hidden_size, micro_batch, accumulation)
        engine, tracker.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        ids = torch.randint(0, config.vocab_size, (micro_batch, sequence))
        for _ in range(2):
            for micro_step in range(accumulation):
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                del loss
                if micro_step + 1 == accumulation:
                    tracker.before_step()
                engine.step()
            tracker.after_step()
        tracker.pause()
        return {"numel": numel, "model_states": tracker.model_states, "peak": tracker.peak, "host": tracker.host}


def _deepspeed_config(stage: int, offload: str, hidden: int, micro_batch: int, accumulation: int) -> dict:
    """The kit's JSON with "auto" filled as transformers fills it."""
    config = deepspeed_json.read_json(deepspeed_json.CONFIGS / f"zero{stage}.json")
    if offload != "none":
        config = merge_json(config, deepspeed_json.read_json(deepspeed_json.CONFIGS / f"offload_{offload}.json"))
    section = config["zero_optimization"]
    for key, value in (
        ("reduce_bucket_size", hidden * hidden),
        ("stage3_prefetch_bucket_size", int(0.9 * hidden * hidden)),
        ("stage3_param_persistence_threshold", 10 * hidden),
    ):
        if section.get(key) == "auto":
            section[key] = value
    del config["fp16"], config["train_batch_size"]
    return config | {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "check_grad_overflow": False},
    }


def main() -> None:
    question = json.load(sys.stdin)
    found = measure(zero_stage=question.pop("zero"), **question)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
