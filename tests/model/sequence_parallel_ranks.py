"""Each of 4 ranks: models with several numbers of key heads, split over groups of 2 and 4 ranks, against whole rows.

Started by test_sequence_parallel.py; rank 0 prints a line of JSON: {"heads-key heads-size-batch": differences}.
"""

import json
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from zerofit.base import distributed
from zerofit.data.batches import Collator, PackedCollator
from zerofit.model import attention
from zerofit.parallel import sequence_parallel

LENGTHS = (5, 21, 30)  # of three documents: 56 tokens, so that the middle one lies on two ranks of 2, and on three of 4


def model(heads: int, key_heads: int, name: str):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=8 * heads, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=heads, num_key_value_heads=key_heads, use_cache=False)  # fmt: skip
    config._attn_implementation = name
    return LlamaForCausalLM(config).double()


def rows():
    draw = torch.Generator().manual_seed(1)
    documents = [torch.randint(3, 64, (n,), generator=draw).tolist() for n in LENGTHS]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in documents]


def gradients(net, inputs: dict) -> torch.Tensor:
    net.zero_grad()
    net(**inputs, num_items_in_batch=torch.tensor(50)).loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def leak(net, group, batch: dict) -> float:
    """Return the largest gradient that the loss of the middle document has by embeddings of the others."""
    batch = dict(batch, labels=batch["labels"].clone())
    start, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    batch["labels"][:, :start] = batch["labels"][:, end:] = -100
    with group.split(batch) as mine:
        ids = mine.pop("input_ids")
        embedded = net.get_input_embeddings()(ids).detach().requires_grad_()
        net(inputs_embeds=embedded, **mine, num_items_in_batch=torch.tensor(50)).loss.backward()
    whole = [torch.empty_like(embedded) for _ in range(group.size)]
    dist.all_gather(whole, embedded.grad, group=group.group)
    sizes = torch.cat(whole, 1)[0].abs().amax(-1)
    assert sizes[start : end - 1].min() > 0  # nothing is predicted from the last token
    return max(sizes[:start].max().item(), sizes[end:].max().item())


def main() -> None:
    dist.init_process_group("gloo")
    attention.register()
    sequence_parallel.register()
    found = {}
    for size in (2, 4):
        flags = SimpleNamespace(sp_size=size, ranks_per_row=size, world_size=4, data_ranks=4 // size, values={},
                                data_rank=lambda rank, size=size: rank // size,
                                deepspeed=None, source={}, attn_implementation="sdpa", decisions=[])  # fmt: skip
        sequence_parallel.resolve(flags)
        group = sequence_parallel.SequenceParallel(flags)
        for heads, key_heads in ((4, 4), (4, 2), (4, 1), (12, 6)):
            batches = {"packed": PackedCollator(0, size)(rows()), "padded": Collator(0, 8 * size)(rows())}
            for name, batch in batches.items():
                expected = gradients(model(heads, key_heads, attention.NAME), batch)
                net = model(heads, key_heads, sequence_parallel.NAME)
                with group.split(batch) as mine:
                    assert mine["input_ids"].shape[1] * size == batch["input_ids"].shape[1]
                    got = gradients(net, mine)
                dist.all_reduce(got, group=group.group)
                whole = {k: v for k, v in batch.items() if k != "attention_mask"}
                seen = {"gradient": ((got - expected).norm() / expected.norm()).item(),
                        "logits": group.logit_error(net, whole)}  # fmt: skip
                if name == "packed":
                    seen["leak"] = leak(net, group, batch)
                found[f"{heads}-{key_heads}-{size}-{name}"] = seen
    of_ranks = distributed.all_gather(found)
    if dist.get_rank() == 0:
        worst = {case: {k: max(rank[case][k] for rank in of_ranks) for k in seen} for case, seen in found.items()}
        print(json.dumps(worst))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
