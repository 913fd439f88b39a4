"""--sp_size: ranks that split rows compute what one rank computes for whole rows."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, Run, run_python, run_world, runs_slow, slow_but, two_layers

from zerofit.base import command_line, distributed
from zerofit.base.errors import UserError
from zerofit.checkpoint import next_settings
from zerofit.commands import resume
from zerofit.config import parse, resolve
from zerofit.model import attention
from zerofit.parallel import sequence_parallel

# --- the whole runs ---

COMMON = [
    "--model", two_layers(),
    "--data", str(TINY / "train.jsonl"), "--max_samples", "18", "--num_train_epochs", "1",
    "--effective_batch_size", "4", "--logging_steps", "1", "--save_strategy", "no", "--eval_fraction", "0.25",
    "--per_device_eval_batch_size", "2", "--num_samples", "1", "--max_tokens_per_sample", "4",
]  # fmt: skip
WAYS = {"padded": ["--padding_free", "false"], "packed": ["--packing", "true", "--max_length", "64"]}
RATE = {"sft": "1e-4", "lora": "2e-3"}


def case(recipe: str, zero: str, way: str, micro: int, sp_size: int, *more: str) -> tuple[str, list[str]]:
    return recipe, [*COMMON, "--zero", zero, *WAYS[way], "--learning_rate", RATE[recipe], "--sp_size", str(sp_size),
                    "--per_device_train_batch_size", str(micro), *more]  # fmt: skip


def cases(ranks: int) -> dict[str, tuple[str, list[str]]]:
    """{recipe-way-zero-sp_size-accumulation: case}: all of a stage, a recipe, rows, and 1 or 2 micro batches a step."""
    found = {}
    for recipe in RATE:
        for way in WAYS:
            for zero in "0123":
                for size in (2, 4):
                    data_ranks = ranks // size
                    for accumulation in (1, 2):
                        if data_ranks:
                            micro = 4 // data_ranks // accumulation
                            name = f"{recipe}-{way}-{zero}-{ranks}ranks-sp{size}-accumulation{accumulation}"
                            found[name] = case(recipe, zero, way, micro, size)
    return found


# What `make test` runs: each stage, both recipes and both kinds of rows, groups of all ranks and of half of them.
SHORT = {
    1: ["sft-padded", "lora-packed"],
    2: ["sft-padded-0-2ranks-sp2-accumulation2", "lora-packed-1-2ranks-sp2-accumulation1",
        "sft-padded-2-2ranks-sp2-accumulation1"],
    4: ["sft-padded-3-4ranks-sp2-accumulation2"],
}  # fmt: skip
REFERENCES = {f"{recipe}-{way}": case(recipe, "0", way, 4, 1) for recipe in RATE for way in WAYS}
WORLDS = {1: REFERENCES, 2: cases(2), 4: cases(4)}
ALL = [name for ranks in (2, 4) for name in WORLDS[ranks]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("runs")
    everything = runs_slow(request)
    found = {}
    for ranks, world in WORLDS.items():
        found |= run_world(ranks, {n: c for n, c in world.items() if everything or n in SHORT[ranks]}, folder)
    return found


@pytest.mark.timeout(1800)  # the first of them makes all runs
@pytest.mark.parametrize("name", slow_but(ALL, {name for names in SHORT.values() for name in names}))
def test_losses_norms_and_evaluation_are_those_of_one_rank(runs, name):
    run, reference = runs[name], runs["-".join(name.split("-")[:2])]
    assert len(run.losses) == len(reference.losses) >= 2
    for found, expected in ((run.losses, reference.losses), (run.grad_norms, reference.grad_norms)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
    result = run.json("result.json")
    assert result["eval_loss"] == pytest.approx(reference.json("result.json")["eval_loss"], rel=1e-5)
    assert result["world_size"] == int(name.split("-")[3][0])
    if "padded" in name:  # packed rows end in up to 3 tokens of padding
        assert result["tokens"] == reference.json("result.json")["tokens"]


# {technique: (recipe, stage, flags, largest relative difference)}; each on one rank, and split over two.
TECHNIQUES = {
    "fused-loss": ("sft", "2", ["--fused_loss", "true"], 1e-5),
    "no-checkpointing": ("sft", "3", ["--gradient_checkpointing", "false"], 1e-5),
    "selective": ("sft", "3", ["--gradient_checkpointing_policy", "selective", "--packing", "true"], 1e-5),
    "tiled-mlp": ("sft", "2", ["--tiled_mlp", "2", "--fused_loss", "true"], 1e-5),
    "offload-optimizer": ("sft", "2", ["--offload", "optimizer"], 1e-5),
    "offload-all": ("sft", "3", ["--offload", "all"], 1e-5),
    "padding-free": ("lora", "2", ["--padding_free", "true"], 1e-5),
    "streaming": ("sft", "2", ["--streaming", "true", "--shuffle_buffer_size", "8"], 1e-5),
    "group-by-length": ("sft", "1", ["--train_sampling_strategy", "group_by_length"], 1e-5),
    "muon": ("sft", "2", ["--optim", "muon"], 1e-4),
    "bf16": ("sft", "3", ["--bf16", "true", "--packing", "true"], 5e-3),
    "qlora": ("lora", "3", ["--load_in_4bit", "true", "--bf16", "true"], 5e-3),
}


@pytest.mark.slow
def test_other_techniques_with_split_rows(tmp_path):
    short = [
        *command_line.drop(COMMON, "--eval_fraction", "--num_train_epochs"),
        "--max_steps",
        "3",
        "--per_device_train_batch_size",
        "2",
        "--learning_rate",
        "1e-4",
    ]
    found = {}
    for ranks in (1, 2):
        world = {f"{name}-{ranks}": (recipe, [*short, "--zero", zero, "--sp_size", str(ranks), *flags])
                 for name, (recipe, zero, flags, _) in TECHNIQUES.items()}  # fmt: skip
        found |= run_world(ranks, world, tmp_path)
    for name, (_, _, _, bound) in TECHNIQUES.items():
        one, two = found[f"{name}-1"], found[f"{name}-2"]
        assert two.losses == pytest.approx(one.losses, rel=bound), name
        assert two.grad_norms == pytest.approx(one.grad_norms, rel=20 * bound), name


# --- the pieces, on 4 ranks ---


@pytest.fixture(scope="module")
def pieces():
    done = run_python([str(ROOT / "tests" / "model" / "sequence_parallel_ranks.py")], ranks=4, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.mark.slow
@pytest.mark.oracle
def test_gradients_and_logits_with_any_number_of_key_heads(pieces):
    """Also key heads that the ranks of a group do not divide: they are repeated."""
    assert len(pieces) == 16
    assert all(seen["gradient"] < 1e-12 and seen["logits"] < 1e-12 for seen in pieces.values()), pieces


@pytest.mark.slow
def test_documents_do_not_read_each_other_across_the_cut(pieces):
    leaks = {name: seen["leak"] for name, seen in pieces.items() if "leak" in seen}
    assert len(leaks) == 8 and set(leaks.values()) == {0.0}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bytes_kept_for_the_backward_fall_with_the_ranks(checkpointing):
    kept = {size: bytes_kept(size, checkpointing) for size in (1, 2, 4)}
    # Without checkpointing a layer keeps the attention's output twice: before the exchange and after it.
    assert kept[1] / kept[2] == pytest.approx(2, rel=0.05) and kept[1] / kept[4] == pytest.approx(4, rel=0.05)


def bytes_kept(size: int, checkpointing: bool) -> int:
    """Return the bytes that one rank of `size` keeps for the backward, on torch's fake process group."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        settings = settings_of("--sp_size", str(size), ranks=size)
        attention.register()
        sequence_parallel.register()
        config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=224, num_hidden_layers=2, use_cache=False,
                             num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
        config._attn_implementation = settings.attn_implementation
        net = LlamaForCausalLM(config).train()
        if checkpointing:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        group, sizes, held = sequence_parallel.SequenceParallel(settings), {}, []
        weights = {p.untyped_storage().data_ptr() for p in net.parameters()}

        def keep(x):
            if x.untyped_storage().data_ptr() not in weights:
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                held.append(x)  # so that no address comes twice
            return x

        ids = torch.randint(3, 64, (1, 1024))
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
        with hooks, group.split({"input_ids": ids, "labels": ids}) as mine:
            net(**mine, num_items_in_batch=torch.tensor(1024)).loss.backward()
        return sum(sizes.values())
    finally:
        dist.destroy_process_group()


# --- arguments ---


def settings_of(*flags: str, recipe: str = "sft", ranks: int = 4):
    return resolve.resolve_settings(recipe, ["--zero", "2", *flags], ranks)


def test_the_batch_counts_data_ranks():
    settings = settings_of("--sp_size", "2", "--effective_batch_size", "8", "--per_device_train_batch_size", "1")
    assert (settings.data_ranks, settings.gradient_accumulation_steps) == (2, 4)
    assert any(
        "1 x gradient_accumulation_steps 4 x 2 data ranks (4 ranks / sp_size 2)" in d for d in settings.decisions
    )
    assert settings.attn_implementation == sequence_parallel.NAME


def test_a_deepspeed_json_names_the_effective_batch(tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"train_batch_size": 6, "zero_optimization": {"stage": 2}}))
    settings = resolve.resolve_settings("sft", ["--deepspeed", str(file), "--sp_size", "2"], 4)
    assert (settings.effective_batch_size, settings.deepspeed["train_batch_size"]) == (6, "auto")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sp_size", "3"], "--sp_size 3: must divide the 4 ranks of this job."),
        (["--sp_size", "0"], "--sp_size is 0: it must be 1 or more."),
        (["--sp_size", "2", "--optim", "sophia"], "--sp_size 2 with --optim sophia: "),
        (["--sp_size", "2", "--attn_implementation", "eager"], "--sp_size 2 with --attn_implementation eager: "),
        (["--sp_size", "2", "--label_smoothing_factor", "0.1"], "--sp_size 2 with --label_smoothing_factor 0.1: "),
        (["--sp_size", "2", "--neftune_noise_alpha", "5"], "--sp_size 2 with --neftune_noise_alpha 5.0: "),
        (["--sp_size", "2", "--torch_compile", "true"], "--sp_size 2 with --torch_compile true: "),
        (["--sp_size", "2", "--include_num_input_tokens_seen", "true"],
         "--sp_size 2 with --include_num_input_tokens_seen true: "),
        (["--sp_size", "2", "--adapter", "prompt_tuning"], "--sp_size 2 with --adapter prompt_tuning: "),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_loads(flags, said):
    with pytest.raises(UserError) as error:
        settings_of(*flags, recipe="lora" if "--adapter" in flags else "sft")
    assert str(error.value).startswith(said) and str(error.value).count(". ") == 0


def test_a_resumed_run_keeps_its_effective_batch():
    batch = {"effective_batch_size": 8, "per_device_train_batch_size": 2}
    assert next_settings.keep_effective_batch(8, 2, 4, 2) == batch
    assert next_settings.keep_effective_batch(8, 2, 4) == batch
    for ranks, said in (
        (3, "--gpus 3: is not a multiple of the 2 ranks that share each row"),
        (6, "use 2, 4, 8, 16 processes"),
    ):
        with pytest.raises(UserError, match=said):
            next_settings.keep_effective_batch(8, 2, ranks, 2)
    values = {"effective_batch_size": 8, "per_device_train_batch_size": 2, "sp_size": 2, "offload": "none"}
    run = resume.RecordedRun("sft", 4, ["--sp_size", "2"], {name: {"value": value} for name, value in values.items()})
    for words, ranks, sp_size, micro in (([], 4, 2, None), (["--sp-size=4"], 4, 4, 2), ([], 16, 2, 1)):
        asked = resume._resume_request(run, parse.request("sft", run.flags), parse.request("sft", words), ranks)
        assert (asked.get("sp_size"), asked.get("per_device_train_batch_size")) == (sp_size, micro)


@pytest.mark.slow
def test_a_group_of_two_nodes_has_the_losses_of_one_rank(tmp_path):
    """Two launchers of one process each, as on two nodes."""
    recipe, flags = WORLDS[2]["sft-packed-3-2ranks-sp2-accumulation1"]
    expected = run_world(1, {"one": REFERENCES["sft-packed"]}, tmp_path)["one"]
    port, script = str(distributed.free_port()), str(ROOT / "recipes" / f"{recipe}.py")
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--node_rank",
             str(rank), "--master_addr", "127.0.0.1", "--master_port", port, script, *flags, "--output_dir",
             str(tmp_path / "two")],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [node.communicate(timeout=600)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said[0][-3000:] + said[1][-3000:]
    found = Run(tmp_path / "two")
    assert found.json("result.json")["world_size"] == 2
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.tensor(found.grad_norms), torch.tensor(expected.grad_norms), rtol=1e-5, atol=0)


@pytest.mark.bad_input
def test_a_group_stays_on_one_node(monkeypatch):
    """Or has all ranks of some nodes, as rows of 15 million tokens need them on 32 GPUs (arXiv 2506.13996)."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match=r"--sp_size 4: .* must divide the 3 ranks of this node or be a multiple"):
        settings_of("--sp_size", "4", ranks=12)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert settings_of("--sp_size", "4").sp_size == 4
    with pytest.raises(UserError, match=r"--tp_size 4: .* must be on one node, so the size must divide the 2 ranks"):
        settings_of("--tp_size", "4")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("qwen2.5-0.5b", 4, "--sp_size 4: must divide the model's 14 attention heads; use one of 1, 2, 7, 14."),
        (
            "gemma2-2b",
            2,
            "--sp_size 2: Gemma2ForCausalLM cannot keep documents of one row apart with sdpa; train this model without "
            "it.",
        ),
    ],
)
def test_models_that_are_refused_by_their_config(name, size, said):
    model = str(ROOT / "tests" / "configs" / name)
    with pytest.raises(UserError) as error:
        resolve.resolve_for_model(settings_of("--model", model, "--data", "unread", "--sp_size", str(size)))
    assert str(error.value).startswith(said)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "its linear_attention layers need the tokens before"),
        ({"output_router_logits": True}, "its router loss"),
        ({"attention_chunk_size": 128}, "its attention counts chunks from the start of a row"),
    ],
)
def test_configs_that_are_refused(change, why):
    from transformers import LlamaConfig

    config = LlamaConfig(num_attention_heads=4)
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match=f"--sp_size 2: {why}"):
        sequence_parallel.resolve_for_model(settings_of("--sp_size", "2"), config)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("mamba", "its linear_attention layers need the tokens before a slice"),
        ("recurrent_gemma", "its (linear_attention|recurrent) layers need the tokens before a slice"),
        ("rwkv", "RwkvForCausalLM cannot keep documents of one row apart"),
    ],
)
def test_a_model_whose_layers_keep_a_state_is_refused(kind, why):
    from transformers import AutoConfig

    with pytest.raises(UserError, match=f"--sp_size 2: {why}"):
        sequence_parallel.resolve_for_model(settings_of("--sp_size", "2"), AutoConfig.for_model(kind))


def test_attention_outside_of_split_rows_is_the_packed_one():
    """Generation and `zerofit replay` compute whole rows."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 12, 8, generator=draw) for _ in range(3))
    bounds = {"cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32), "max_length_q": 7}
    found, _ = sequence_parallel.sequence_attention(None, query, key, value, None, **bounds)
    assert torch.equal(found, attention.packed_attention(None, query, key, value, None, **bounds)[0])
