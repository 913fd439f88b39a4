"""Packed documents never see each other: same logits, same loss, same gradients as one by one."""

import copy

import pytest
import torch
from conftest import TINY, run_world
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from zerofit import attention, data

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=5),
}


def documents():
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (n,), generator=generator).tolist() for n in (7, 3, 12, 1, 9)]
    return [{"input_ids": r, "labels": r} for r in rows]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_equals_one_by_one(name, checkpointing):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="sdpa")
    packed = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation=attention.register())
    packed.load_state_dict(plain.state_dict())
    plain.config.use_cache = packed.config.use_cache = False
    if checkpointing:
        packed.gradient_checkpointing_enable()
    packed.train()
    rows = documents()
    count = sum(len(r["labels"]) - 1 for r in rows)
    single = []
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        out = plain(input_ids=ids, labels=ids, num_items_in_batch=count)
        out.loss.backward() if ids.shape[1] > 1 else None
        single.append(out.logits[0])
    packs = data.Packs(type("Rows", (list,), {"__getitem__": _get})(rows), 32)
    assert len(packs) == 1
    order = packs.packs[0]
    out = packed(**data.PackedCollator()([packs[0]]), num_items_in_batch=count)
    out.loss.backward()
    torch.testing.assert_close(out.logits[0], torch.cat([single[i] for i in order]), rtol=1e-5, atol=1e-6)
    gradients = dict(packed.named_parameters())
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[key].grad, parameter.grad, rtol=1e-5, atol=1e-6)


def _get(self, key):
    return [row[key] for row in self] if isinstance(key, str) else list.__getitem__(self, key)


def test_changing_one_document_leaves_the_others_untouched():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(CONFIGS["llama"]), attn_implementation=attention.register()
    ).eval()
    rows = documents()
    collate = data.PackedCollator()
    pack = {k: [t for r in rows for t in r[k]] for k in ("input_ids", "labels")}
    pack["lengths"] = [len(r["input_ids"]) for r in rows]
    before = model(**collate([pack]), use_cache=False).logits
    changed = dict(pack, input_ids=[(t + 1) % 64 for t in pack["input_ids"][:7]] + pack["input_ids"][7:])
    after = model(**collate([changed]), use_cache=False).logits
    assert torch.equal(before[0, 7:], after[0, 7:])
    assert not torch.allclose(before[0, :7], after[0, :7])


def test_plain_sdpa_would_contaminate():
    """Why the kit refuses it: the same batch through transformers' sdpa with a padding mask reads across documents."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]), attn_implementation="sdpa").eval()
    ids = torch.tensor([[t for r in documents() for t in r["input_ids"]]])
    changed = ids.clone()
    changed[0, :7] = (changed[0, :7] + 1) % 64
    positions = torch.cat([torch.arange(len(r["input_ids"])) for r in documents()])[None]
    logits = [
        model(input_ids=i, position_ids=positions, attention_mask=torch.ones_like(i)).logits for i in (ids, changed)
    ]
    assert not torch.allclose(logits[0][0, 7:], logits[1][0, 7:], atol=1e-3)


def test_padded_batches_fall_back_to_sdpa():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(CONFIGS["llama"]), attn_implementation=attention.register()
    ).eval()
    rows = documents()
    batch = data.Collator(0)(rows)
    logits = model(**batch).logits
    for i, row in enumerate(rows):
        alone = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        torch.testing.assert_close(logits[i, : len(alone)], alone, rtol=1e-4, atol=1e-5)


def test_a_sliding_window_holds_without_boundaries_too():
    torch.manual_seed(0)
    config = CONFIGS["mistral-window"]
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    other = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention.register()).eval()
    other.load_state_dict(plain.state_dict())
    ids = torch.tensor([documents()[2]["input_ids"]])
    torch.testing.assert_close(other(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


def test_the_start_up_proof_finds_contamination(tokenizer):
    """Relative logit difference 0 for our attention, large for one that ignores the boundaries."""
    from transformers import TrainingArguments

    torch.manual_seed(0)
    arguments = TrainingArguments(use_cpu=True)
    for name, mixes in ((attention.register(), False), ("sdpa", True)):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]), attn_implementation=name)
        if mixes:  # what happens to a row of documents without boundaries and positions
            forward = model.forward
            model.forward = lambda input_ids, attention_mask=None, use_cache=None, forward=forward, **kw: forward(
                input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False
            )
        found = attention.logits_apart(model, documents(), 0, arguments)
        assert (found > 0.05) == mixes and (found < 1e-5) == (not mixes)


def test_padding_free_rows_train_like_padded_ones(tmp_path):
    flags = [
        "--data", str(TINY / "train.jsonl"), "--max_samples", "60", "--effective_batch_size", "8", "--zero", "2",
        "--num_train_epochs", "1", "--learning_rate", "1e-4", "--logging_steps", "1", "--save_strategy", "no",
        "--num_samples", "0",
    ]  # fmt: skip
    runs = run_world(2, {v: ("sft", [*flags, "--padding_free", v]) for v in ("true", "false")}, tmp_path)
    torch.testing.assert_close(torch.tensor(runs["true"].losses), torch.tensor(runs["false"].losses), rtol=1e-4, atol=0)


def test_packing_trains_the_same_on_one_and_two_ranks(tmp_path):
    flags = [
        "--data", str(TINY / "train.jsonl"), "--max_samples", "200", "--packing", "--max_length", "96",
        "--eval_data", str(TINY / "eval.jsonl"), "--effective_batch_size", "8", "--num_train_epochs", "1",
        "--learning_rate", "1e-4", "--logging_steps", "1", "--save_strategy", "no", "--num_samples", "1",
    ]  # fmt: skip
    one = run_world(1, {"one": ("sft", [*flags, "--per_device_train_batch_size", "2"])}, tmp_path)["one"]
    two = run_world(2, {"two": ("sft", [*flags, "--per_device_train_batch_size", "1", "--zero", "2"])}, tmp_path)["two"]
    torch.testing.assert_close(torch.tensor(one.losses), torch.tensor(two.losses), rtol=1e-4, atol=0)
    evaluations = [r.json("result.json")["eval_loss"] for r in (one, two)]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-4)
