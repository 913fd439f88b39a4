"""The memory tracker against known tensors and formulas, gradient checkpointing, accumulation, diagnosis.

Real recipes on one or two CPU ranks; ranks 8 to 512 run the real DeepSpeed engine under torch's fake process group.
"""

import json
from types import SimpleNamespace

import model_states
import pytest
import torch
from conftest import ROOT, TINY, recipe_process, run_python, run_world, runs_slow

from zerofit.config import parse, resolve
from zerofit.job import memory_figure, program
from zerofit.train import memory_report, memory_tracker, tensor_owners

COMMON = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "64", "--max_length", "64", "--logging_steps", "1",
    "--save_strategy", "no", "--num_samples", "0", "--learning_rate", "1e-4",
]  # fmt: skip
VARIANTS = {
    "none": ["--gradient_checkpointing", "false"],
    "full": [],
    "every2": ["--gradient_checkpointing_every", "2"],
    "selective": ["--gradient_checkpointing_policy", "selective"],
    "offload": ["--activation_offload"],
    "all": ["--gradient_checkpointing_policy", "selective", "--gradient_checkpointing_every", "3",
            "--activation_offload"],
}  # fmt: skip


def flags(zero="0", bf16=False, steps=2, micro=4, accumulation=1, ranks=1, more=()):
    return [
        *COMMON, "--zero", zero, "--bf16", str(bf16).lower(), "--max_steps", str(steps),
        "--per_device_train_batch_size", str(micro), "--gradient_accumulation_steps", str(accumulation),
        "--effective_batch_size", str(micro * accumulation * ranks), *more,
    ]  # fmt: skip


# --- the tracker itself ---


def test_offloaded_tensors_of_a_gpu_run_are_counted_once():
    """The tracker of a GPU does not see tensors in host memory, so it asks the optimizer."""
    masters = torch.zeros(100)
    optimizer = SimpleNamespace(
        cpu_offload=True, single_partition_of_fp32_groups=[masters], state={0: {"exp_avg": torch.zeros(50)}},
        param_groups=[{"params": [masters[:40], masters[40:]]}],
    )  # fmt: skip
    assert memory_tracker.MemoryTracker(optimizer=optimizer, device="cuda").host == 4 * 150
    optimizer.cpu_offload = False
    assert memory_tracker.MemoryTracker(optimizer=optimizer, device="cuda").host == 0


def test_tracker_counts_storages_until_they_die():
    with memory_tracker.MemoryTracker() as tracker:
        tracker.model = SimpleNamespace(parameters=list, buffers=list)
        tracker.enter("forward")
        a = torch.empty(1000, dtype=torch.float32)
        view = a[10:].view(-1)  # no new storage
        b = a + 1
        del a
        assert tracker.alive()["activations"] == 8000  # the view keeps the first alive
        del view
        assert tracker.alive()["activations"] == 4000
        c = torch.empty(10, dtype=torch.float64)
        del b, c
        assert tracker.alive()["activations"] == 0
    assert tracker.peak["forward"]["activations"] == 8000
    assert not tracker.following


def test_tracker_rounds_as_the_allocator_does():
    with memory_tracker.MemoryTracker(round_to=512) as tracker:
        kept = torch.ones(1), torch.ones(129)
        assert sum(tracker.alive().values()) == 512 + 1024
    del kept


@pytest.mark.oracle
def test_tracker_agrees_with_the_allocator_of_the_cpu(record_property):
    """Live bytes of every moment, from the profiler's own record of the CPU allocator, have the same peak."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32).train()
    ids = torch.randint(2, 500, (4, 48))

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    step()  # rotary tables and the like exist from here on
    with memory_tracker.MemoryTracker(model) as tracker:
        known = sum(tracker.alive().values())
        step()
    followed = max(sum(row.values()) for row in tracker.peak.values()) - known
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    live = peak = 0
    for event in sorted(_memory_events(profile), key=lambda e: e[0]):
        live += event[1]
        peak = max(peak, live)
    record_property("relative_difference", abs(followed / peak - 1))
    assert followed == pytest.approx(peak, rel=0.005)


def _memory_events(profile):
    """(time, bytes) of every allocation and release."""
    return [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]


def test_tracker_splits_a_plain_training_loop():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32).train()
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(2, 500, (4, 48))
    with memory_tracker.MemoryTracker(model) as tracker:
        tracker.optimizer = optimizer
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            tracker.before_step()
            optimizer.step()
            optimizer.zero_grad()
            tracker.after_step()
    parts = tracker.peak["backward"]
    assert list(tracker.peak) == ["load", "forward", "backward", "step"]
    assert parts["parameters"] == pytest.approx(4 * numel, rel=0.001)
    assert parts["optimizer"] == pytest.approx(8 * numel, rel=0.001)
    assert tracker.peak["step"]["gradients"] == 4 * numel
    # The loss holds the logits of 4 x 48 tokens in fp32 at least twice.
    assert tracker.peak["forward"]["logits"] >= 2 * 4 * 48 * 512 * 4
    assert tracker.model_states["before_step"] == tracker.model_states["last_gradient"]


# --- runs ---


def cases_of_one_rank():
    cases = {f"{z}-{n}": ("sft", flags(z, z != "0", 2, 2, n, more=["--memory_report"]))
             for z, n in (("0", 1), ("0", 2), ("0", 16), ("2", 1), ("2", 2), ("2", 16))}  # fmt: skip
    cases |= {f"states-{z}": ("sft", flags(z, True, more=["--memory_report"])) for z in "13"}
    for name, more in VARIANTS.items():
        cases[f"sft-{name}"] = ("sft", flags(more=[*more, "--memory_report"]))
    cases["phases"] = (
        "lora",
        flags("2", True, 4, more=["--memory_report", "--save_strategy", "steps", "--save_steps", "4", "--offload",
                                  "optimizer", "--eval_data", str(TINY / "eval.jsonl")]),
    )  # fmt: skip
    return cases


def cases_of_two_ranks():
    cases = {f"two-states-{z}": ("sft", flags(z, True, ranks=2, more=["--memory_report"])) for z in "123"}
    for name in ("none", "selective"):
        cases[f"two-3-{name}"] = ("sft", flags("3", ranks=2, more=VARIANTS[name]))
    return cases


SHORT = "0-1 sft-none sft-full sft-selective phases two-states-3".split()


def short(names):
    """Return parameters of a test whose first value is a run's name, marked slow but for those of `make test`."""
    rows = [name if isinstance(name, tuple) else (name,) for name in names]
    return [pytest.param(*row, marks=[] if {row[0], f"sft-{row[0]}"} & {*SHORT} else pytest.mark.slow) for row in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for ranks, cases in ((1, cases_of_one_rank()), (2, cases_of_two_ranks())):
        found |= run_world(ranks, {n: c for n, c in cases.items() if n in SHORT or runs_slow(request)}, folder)
    return found


def peak_of(run) -> int:
    return max(run.json("memory.json")["total"].values())


@pytest.mark.parametrize("name", short(v for v in VARIANTS if v != "none"))
def test_checkpointing_changes_no_number(runs, name):
    assert runs[f"sft-{name}"].losses == runs["sft-none"].losses
    assert runs[f"sft-{name}"].grad_norms == runs["sft-none"].grad_norms


@pytest.mark.slow
def test_checkpointing_changes_no_number_under_zero3(runs):
    assert runs["two-3-selective"].losses == runs["two-3-none"].losses


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_checkpointing_changes_no_number_anywhere(zero, tmp_path):
    """Every variant, SFT and LoRA, packed or not, two ranks; also stage 3 that drops gathered parameters at once."""
    groups = {(recipe, packed): ["--packing"] * packed for recipe in ("sft", "lora") for packed in (0, 1)}
    if zero == "3":
        config = json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
        config["zero_optimization"] |= {
            "stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0,
        }  # fmt: skip
        (tmp_path / "eager.json").write_text(json.dumps(config))
        groups["sft", "eager"] = ["--deepspeed", str(tmp_path / "eager.json")]
    cases = {
        f"{recipe}-{kind}-{name}": (recipe, flags(zero, micro=2, ranks=2, more=[*more, *variant]))
        for (recipe, kind), more in groups.items()
        for name, variant in VARIANTS.items()
    }
    runs = run_world(2, cases, tmp_path)
    for name, run in runs.items():
        reference = runs[f"{name.rsplit('-', 1)[0]}-none"]
        assert run.losses == reference.losses, name
        assert run.grad_norms == pytest.approx(reference.grad_norms, rel=1e-6), name


def test_checkpointing_keeps_fewer_activations(runs):
    """Activations at the end of the forward: full < selective < every second layer < none."""
    held = {
        name: runs[f"sft-{name}"].json("memory.json")["peak"]["forward"]["activations"]
        for name in ("full", "selective", "every2", "none")
        if f"sft-{name}" in runs
    }
    print("\nactivations at the end of the forward:", held)  # the figures in docs/planning_model.md: -s shows them
    assert held["full"] < 0.4 * held["none"]
    assert held["full"] < held["selective"] < 0.8 * held["none"]
    assert held["full"] < held.get("every2", held["selective"]) < 0.8 * held["none"]


@pytest.mark.slow
def test_accumulation_costs_no_memory_beyond_the_gradients(runs):
    """From 2 to 16 micro batches the peak is the same; from 1 to 2 gradients stay through the next forward.

    Stage 0: never more than one set of gradients. Stage 2: the share of this rank, 2 bytes a parameter on one rank.
    """
    numel = runs["0-1"].json("result.json")["parameters"]
    for zero, kept in (("0", 4 * numel), ("2", 2 * numel)):
        one, two, sixteen = (peak_of(runs[f"{zero}-{n}"]) for n in (1, 2, 16))
        print(f"\nstage {zero}, peak bytes with 1, 2, 16 micro batches: {one:,} {two:,} {sixteen:,}")
        assert sixteen == pytest.approx(two, rel=0.02)
        assert one <= two <= one + 1.02 * kept


def deviations(run, zero: int, ranks: int) -> list[float]:
    """Measured model states of each rank over the formula, minus 1."""
    numel = run.json("result.json")["parameters"]
    moment = "last_gradient" if zero == 1 else "before_step"
    expected = numel * sum(model_states.formula(zero, ranks).values())
    return [sum(rank["model_states"][moment].values()) / expected - 1 for rank in run.json("memory.json")["ranks"]]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "zero", "ranks"),
    short([("states-1", 1, 1), ("2-1", 2, 1), ("states-3", 3, 1)] + [(f"two-states-{z}", z, 2) for z in (1, 2, 3)]),
)
def test_model_states_agree_with_the_formula(runs, name, zero, ranks, record_property):
    found = deviations(runs[name], zero, ranks)
    print(f"\nstage {zero}, {ranks} ranks: {' '.join(f'{d:+.2%}' for d in found)}")
    record_property("relative_difference", max(map(abs, found)))
    assert len(found) == ranks
    assert max(map(abs, found)) < 0.02


@pytest.mark.oracle
@pytest.mark.slow
def test_model_states_of_four_ranks(tmp_path):
    cases = {str(z): ("sft", flags(str(z), True, micro=2, ranks=4, more=["--memory_report"])) for z in (1, 2, 3)}
    for name, run in run_world(4, cases, tmp_path).items():
        found = deviations(run, int(name), 4)
        assert len(found) == 4 and max(map(abs, found)) < 0.02


def llama(hidden: int, layers: int) -> dict:
    """Many small tensors: DeepSpeed keeps the tensors that touch a rank's share whole."""
    return {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "vocab_size": 512,
        "tie_word_embeddings": True,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize(
    ("zero", "ranks", "rank"),
    [(z, n, r) for z in (1, 2, 3) for n in (8, 64, 512) for r in (0, n // 2, n - 1)],
)  # fmt: skip
def test_model_states_of_many_ranks(zero, ranks, rank):
    small = (ranks, rank) == (8, 0)  # in the middle of it a tensor is 2.6 % of all
    config = json.loads((TINY / "model" / "config.json").read_text()) if small else llama(256, 24)
    found = model_states.model_states(config, zero, ranks, rank)
    moment = "last_gradient" if zero == 1 else "before_step"
    expected = found["numel"] * sum(model_states.formula(zero, ranks).values())
    measured = sum(found["model_states"][moment].values())
    print(f"\nstage {zero}, rank {rank} of {ranks}: {measured / expected - 1:+.2%}")
    assert measured == pytest.approx(expected, rel=0.02)


def test_the_allocators_history_ends_with_the_followed_steps(monkeypatch):
    """Recording takes the stack of each allocation, which would slow down the whole run."""
    calls = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    with memory_tracker.MemoryTracker(followed_steps=2) as tracker:
        tracker.model = SimpleNamespace(parameters=list, buffers=list)
        tracker.device, tracker.enter = "cuda", lambda phase: None
        for _ in range(4):
            tracker.after_step()
    assert calls == [{"enabled": None}]


def test_formula_has_the_papers_sums():
    for ranks in (1, 8, 64):
        sums = [sum(model_states.formula(zero, ranks).values()) for zero in range(4)]
        assert sums == pytest.approx([16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks])


def test_report_of_a_run_with_offload_save_and_evaluation(runs):
    run = runs["phases"]
    found = run.json("memory.json")
    assert set(found["peak"]) == set(memory_tracker.PHASES)
    assert found["followed_optimizer_steps"] == memory_tracker.FOLLOWED_STEPS < run.json("result.json")["steps"]
    assert found["total"] == {phase: sum(parts.values()) for phase, parts in found["peak"].items()}
    trainable = run.json("result.json")["trainable_parameters"]
    assert found["host"] == pytest.approx(12 * trainable, rel=0.15)  # master and Adam; padding, staging
    assert found["peak"]["step"]["optimizer"] == 0
    assert (run.folder / "memory.png").stat().st_size > 5000
    log = (run.folder / "logs" / "rank0.log").read_text()
    assert "peak memory of rank 0" in log and "backward" in log


# --- refusals and diagnosis ---


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--gradient_checkpointing", "false", "--gradient_checkpointing_every", "2"],
            "--gradient_checkpointing_every",
        ),
        (["--gradient_checkpointing", "false", "--activation_offload"], "--activation_offload"),
        (["--gradient_checkpointing_every", "0"], "must be 1 or more"),
        (
            [
                "--gradient_checkpointing_policy",
                "selective",
                "--gradient_checkpointing_kwargs",
                '{"use_reentrant": true}',
            ],
            "use_reentrant",
        ),
        (["--gradient_checkpointing_kwargs", "nonsense"], "JSON object"),
        (
            ["--gradient_checkpointing_every", "2", "--gradient_checkpointing_kwargs", '{"every_n_layers": 3}'],
            "every_n_layers 3",
        ),
    ],
)
def test_refused(given, said):
    with pytest.raises(parse.UserError, match=said):
        resolve.resolve_settings("sft", given, 1)


def test_transformers_names_mean_the_same():
    settings = resolve.resolve_settings(
        "sft", ["--gradient_checkpointing_kwargs", '{"every_n_layers": 2, "offload": true}'], 1
    )
    assert settings.gradient_checkpointing_every == 2 and settings.activation_offload
    assert settings.gradient_checkpointing_kwargs == {"use_reentrant": False}
    if "activation_checkpointing" in settings.values:  # transformers 5.20 and later
        assert not resolve.resolve_settings("sft", ["--activation_checkpointing", "false"], 1).gradient_checkpointing
        with pytest.raises(parse.UserError, match="set only one"):
            resolve.resolve_settings(
                "sft", ["--activation_checkpointing", "false", "--gradient_checkpointing", "true"], 1
            )


@pytest.mark.bad_input
def test_more_than_the_models_layers_is_refused():
    done = recipe_process("sft", *COMMON, "--gradient_checkpointing_every", "5")
    assert done.returncode == 2 and "the model has 4 layers" in done.stderr


@pytest.mark.fault
def test_out_of_memory_is_one_sentence(tmp_path):
    """A step that raises torch.OutOfMemoryError, as a GPU's allocator would."""
    script = tmp_path / "oom.py"
    script.write_text(
        "import runpy, sys, torch\nfrom zerofit.train.trainer import ZerofitTrainer\n"
        "def fail(self, *a, **k): raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU "
        "0')\nZerofitTrainer.compute_loss = fail\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
    )
    words = [str(script), str(ROOT / "recipes" / "sft.py"), *flags(), "--output_dir", str(tmp_path / "run")]
    done = run_python(words)
    assert done.returncode == 3, done.stderr[-2000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("zerofit: error: rank 0 ran out of GPU memory in the")
    assert "forward phase of step 1 (tried to allocate 2.00 GiB): parameters 3.25 MiB; try" in last
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"


@pytest.mark.fault
def test_out_of_memory_in_an_evaluation_names_its_batch():
    """The micro batch and checkpointing have no part in it."""
    with memory_tracker.MemoryTracker(device="cpu") as tracker:
        pass
    with pytest.raises(torch.OutOfMemoryError) as error, tracker.during("eval"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")
    assert (tracker.phase, tracker.failed_in) == ("load", "eval")
    settings = SimpleNamespace(
        per_device_eval_batch_size=4, per_device_train_batch_size=4, gradient_checkpointing=False, world_size=1,
        recipe=program.recipe_of("sft"), trains_adapter=False, ranks_per_row=1, parallel_size=lambda *what: 1,
    )  # fmt: skip
    tracker.following, tracker.alive = True, lambda: {"activations": 2**30}
    trainer = SimpleNamespace(
        settings=settings, tracker=tracker, args=SimpleNamespace(process_index=0), state=SimpleNamespace(global_step=4)
    )
    said = memory_report.explain(error.value, trainer)
    assert "in the eval phase of step 5" in said
    assert said.endswith("; try --per_device_eval_batch_size 2, or a smaller --max_length.")


def test_table_names_every_phase():
    peak = {"load": dict.fromkeys(tensor_owners.PARTS, 2**20), "step": dict.fromkeys(tensor_owners.PARTS, 2**30)}
    lines = memory_figure.table(peak).splitlines()
    assert lines[0].split() == ["phase", *tensor_owners.PARTS, "total"]
    assert lines[1].split()[-2:] == ["6.00", "MiB"] and lines[2].split()[-2:] == ["6.00", "GiB"]
