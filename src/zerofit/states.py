"""The program behind memory.model_states: one rank of a large world, alone in its process, on the CPU.

The DeepSpeed engine, its tensors and their sizes are real; only the collectives move nothing (torch's fake process
group), so the numbers that it trains on are meaningless and nothing but bytes is reported.
"""

import json
import os
import sys

from . import ghost, memory, zero


def measure(
    model_config: dict, zero_stage: int, ranks: int, rank: int = 0, sequence: int = 16, micro_batch: int = 1,
    accumulation: int = 1, offload: str = "none",
) -> dict:  # fmt: skip
    """Two optimizer steps as rank `rank` of `ranks`, bf16 with fp32 master weights and the kit's own JSON.

    Args: sequence: tokens per row; micro_batch: rows; accumulation: micro batches per step.
    Returns: as memory.model_states.
    """
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoConfig, AutoModelForCausalLM

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    import deepspeed

    ghost.believe_in_other_ranks(deepspeed)
    kind = model_config["model_type"]
    config = AutoConfig.for_model(kind, **{k: v for k, v in model_config.items() if k != "model_type"})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.config.use_cache = False
    numel = sum(p.numel() for p in model.parameters())
    with memory.Ledger(model, device="cpu") as ledger:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        settings = _deepspeed_config(zero_stage, offload, config.hidden_size, micro_batch, accumulation)
        engine, ledger.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        ids = torch.randint(0, config.vocab_size, (micro_batch, sequence))
        for _ in range(2):
            for micro_step in range(accumulation):
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                del loss
                if micro_step + 1 == accumulation:
                    ledger.before_step()
                engine.step()
            ledger.after_step()
        ledger.pause()
        return {"numel": numel, "model_states": ledger.model_states, "peak": ledger.peak, "host": ledger.host}


def _deepspeed_config(stage: int, offload: str, hidden: int, micro_batch: int, accumulation: int) -> dict:
    """The kit's JSON with "auto" filled as transformers fills it."""
    config = zero.read_json(zero.CONFIGS / f"zero{stage}.json")
    if offload != "none":
        config = zero.merged(config, zero.read_json(zero.CONFIGS / f"offload_{offload}.json"))
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
