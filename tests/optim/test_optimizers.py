"""Optimizers, pure bf16 and the learning rate's scaling: update rules by hand, exact bytes, refusals, real runs."""

import contextlib
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY, Run, run_world, runs_slow
from deepspeed.accelerator import get_accelerator

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.job import program
from zerofit.optim import bf16_adamw, build, paged, registry, sophia
from zerofit.train import progress

COMMON = [
    "--data", str(TINY / "train.jsonl"), "--max_samples", "32", "--num_train_epochs", "1", "--effective_batch_size",
    "8", "--logging_steps", "1", "--save_strategy", "no", "--num_samples", "0", "--learning_rate", "1e-3",
]  # fmt: skip
PARAMETERS = 853_120  # of the bundled model


# --- update rules ---


def test_stochastic_rounding_keeps_the_mean_and_what_bf16_can_hold():
    noise = bf16_adamw.Noise(0)
    value = torch.full((200_000,), 1 + 0.3 / 128)  # 30 % of the way between two neighbors in bf16
    noise.start(1, value)
    target = torch.empty_like(value, dtype=torch.bfloat16)
    bf16_adamw.round_(target, value, noise.draw(value) & 0xFFFF)
    assert set(target.float().tolist()) == {1.0, 1 + 1 / 128}
    assert target.float().sub(1).mean().item() == pytest.approx(0.3 / 128, rel=0.02)
    kept = torch.tensor([0.0, -0.0, 1.5, -3.0, math.inf, -math.inf, math.nan])
    out = torch.empty_like(kept, dtype=torch.bfloat16)
    bf16_adamw.round_(out, kept, torch.full_like(kept, 0xFFFF, dtype=torch.int32))
    torch.testing.assert_close(out.float(), kept, rtol=0, atol=0, equal_nan=True)


def test_noise_depends_on_seed_step_tensor_and_part_alone():
    tensors = [torch.empty(200_000) for _ in range(2)]

    def draws(first_step, seed=7, part=0):
        noise, found = bf16_adamw.Noise(seed, part), {}
        for step in range(first_step, 6):
            for number, tensor in enumerate(tensors):
                noise.start(step, tensor)
                found[step, number] = noise.draw(tensor)
        return found

    whole, resumed = draws(1), draws(4)  # a resumed process has drawn less before
    assert all(torch.equal(resumed[key], whole[key]) for key in resumed)
    others = [draws(5, seed=8)[5, 0], draws(5, part=1)[5, 0], whole[4, 0], whole[5, 1]]
    for other in others:
        together = torch.corrcoef(torch.stack([whole[5, 0], other]).double())[0, 1]
        assert abs(together) < 5 / 200_000**0.5  # five standard errors


@pytest.mark.parametrize("kind", [bf16_adamw.AdamW, sophia.SophiaG])
def test_each_parameter_and_each_slice_of_zero_is_rounded_by_its_own_noise(kind):
    def error(part, resumed_at=None):
        weights = [torch.nn.Parameter(torch.ones(50_000, dtype=torch.bfloat16)) for _ in range(4)]
        optimizer = kind([{"params": weights[:3]}, {"params": weights[3:]}], lr=1e-3, seed=3, part=part)
        for step in range(3):
            if step == resumed_at:
                state = optimizer.state_dict()
                optimizer = kind([{"params": weights[:3]}, {"params": weights[3:]}], lr=1e-3, seed=3, part=part)
                optimizer.load_state_dict(state)
            for p in weights:
                p.grad = torch.ones_like(p)
            weights[0].grad = torch.ones_like(p) if step else None  # an expert that no token has reached
            optimizer.step()
        return torch.stack([p.detach().double() for p in weights])

    first = error(part=0)
    assert torch.equal(first, error(part=0)) and torch.equal(first, error(part=0, resumed_at=2))
    together = torch.corrcoef(torch.cat([first[1:], error(part=1)[1:]]))
    assert (together - torch.eye(6)).abs().max() < 5 / 50_000**0.5


@pytest.mark.parametrize("name", ["adamw_torch_fused", "sophia"])
@pytest.mark.parametrize(("zero", "part"), [(0, 0), (2, 3), (3, 3)])
def test_replicas_round_alike_and_slices_each_in_their_own_way(name, zero, part):
    settings = SimpleNamespace(optim=name, pure_bf16=True, zero=zero, optim_args=None, recipe=program.recipe_of("sft"))
    numbers = {"learning_rate": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0}
    trainer = SimpleNamespace(
        optimizer=None, settings=settings, model=torch.nn.Linear(2, 2),
        args=SimpleNamespace(process_index=3, seed=7, device=torch.device("cpu"), **numbers),
        get_decay_parameter_names=lambda model: ["weight"],
    )  # fmt: skip
    noise = build.own_optimizer(trainer, trainer.model).noise
    assert (noise.seed, noise.part) == (7, part)


def _train(kind, dtype, steps, lr=1e-2, **kwargs):
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(40, 30).to(dtype))
    optimizer = kind([weights], lr=lr, **kwargs)
    for step in range(steps):
        weights.grad = torch.randn(40, 30, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.step()
    return weights.detach().float()


@pytest.mark.oracle
def test_adamw_in_fp32_is_torchs_also_over_many_chunks(monkeypatch, record_property):
    wanted = _train(torch.optim.AdamW, torch.float32, 20, weight_decay=0.1)
    monkeypatch.setattr(bf16_adamw, "CHUNK", 77)
    found = _train(bf16_adamw.AdamW, torch.float32, 20, weight_decay=0.1)
    record_property("relative_difference", ((found - wanted).norm() / wanted.norm()).item())
    torch.testing.assert_close(found, wanted)


def _steps(compiled, dtype, monkeypatch):
    """Return weights and moments after three steps: several chunks, one number, gradients inside of a larger tensor."""
    monkeypatch.setattr(bf16_adamw, "CHUNK", 1000)
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((64, 70), (1,), (4099,))]
    groups = [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:]}]
    optimizer = bf16_adamw.AdamW(groups, compiled=compiled)
    for step in range(3):
        gradients = torch.randn(sum(w.numel() for w in weights)).to(dtype).split([w.numel() for w in weights])
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.view(weight.shape)
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step()
    return torch.cat([t.detach().flatten() for w in weights for t in (w, *list(optimizer.state[w].values())[1:])])


@pytest.mark.slow
def test_the_compiled_update_is_the_update_in_python(monkeypatch):
    """Same random bits; fp32 may differ in the last bit, as the C++ compiler approximates quotients and roots."""
    assert bf16_adamw.why_not_compiled(torch.device("cpu")) is None
    found, wanted = (_steps(compiled, torch.bfloat16, monkeypatch) for compiled in (True, False))
    assert (found != wanted).sum() <= 3  # of 25,740
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)  # the other neighbor


def test_adamw_goes_on_in_python_where_it_does_not_compile(monkeypatch, capsys):
    cpu = torch.device("cpu")
    assert not build._compiles_adamw("auto", cpu) and not build._compiles_adamw("false", torch.device("cuda"))
    assert not build._compiles_adamw("true", torch.device("meta"))  # like a simulated GPU
    assert capsys.readouterr().out == ""

    def fails(*_):
        raise RuntimeError("no C compiler\nmore")

    monkeypatch.setattr(bf16_adamw, "compiled_update", lambda: fails)
    assert not build._compiles_adamw("true", cpu)
    assert "AdamW runs uncompiled, which is slower: RuntimeError: no C compiler\n" in capsys.readouterr().out
    monkeypatch.setattr(
        bf16_adamw, "compiled_update", lambda: lambda *args: bf16_adamw.update_(*args[:4], None, *args[5:])
    )
    assert "numbers of a test differ" in bf16_adamw.why_not_compiled(cpu)  # rounded to nearest


def test_adamw_goes_on_in_python_where_a_later_kernel_does_not_compile(monkeypatch, capsys):
    """With the same bits: nothing was written, and no random number drawn twice."""

    def update(w, *more):
        if w.numel() == 1:  # torch.compile makes a kernel of its own for it
            raise RuntimeError("no space left on device\nmore")
        bf16_adamw.update_(w, *more)

    monkeypatch.setattr(bf16_adamw, "compiled_update", lambda: update)
    found, wanted = (_steps(compiled, torch.bfloat16, monkeypatch) for compiled in (True, False))
    assert torch.equal(found, wanted)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("note: rank 0: AdamW of --pure_bf16 continues uncompiled")
    assert line.endswith("RuntimeError: no space left on device")


def test_small_updates_arrive_in_bf16_only_with_stochastic_rounding():
    start = _train(torch.optim.AdamW, torch.bfloat16, 0)
    exact = _train(torch.optim.AdamW, torch.float32, 200, lr=1e-5)
    moved = {k: (_train(k, torch.bfloat16, 200, lr=1e-5) - start) for k in (torch.optim.AdamW, bf16_adamw.AdamW)}
    wanted = exact - _train(torch.optim.AdamW, torch.float32, 0)
    large = start.abs() > 0.1  # far above 512 x the update
    assert moved[torch.optim.AdamW][large].abs().max() == 0
    sums = moved[bf16_adamw.AdamW][large].sum(), wanted[large].sum()
    spread = (start[large].abs() / 128 * 1e-3).sqrt().sum()  # of the rounding noise, roughly
    assert moved[bf16_adamw.AdamW][large].abs().max() > 0 and abs(sums[0] - sums[1]) < spread


@pytest.mark.oracle
def test_sophia_follows_algorithm_3():
    """arXiv 2305.14342 by hand in plain floats: an estimate before steps 1 and 3 (k = 2), clipping, weight decay."""
    lr, b1, b2, gamma, eps, decay, tokens = 0.1, 0.96, 0.99, 0.05, 1e-12, 0.2, 50
    w, m, h = 1.5, 0.0, 0.0
    p = torch.nn.Parameter(torch.tensor([w]))
    optimizer = sophia.SophiaG([p], lr, (b1, b2), gamma, eps, decay, k=2)
    clipped = []
    for step, (gradient, sampled) in enumerate([(0.3, 0.5), (-0.2, None), (0.0004, 2.0), (-0.3, None)], 1):
        if sampled is not None:
            assert step % 2 == 1
            h = b2 * h + (1 - b2) * tokens * sampled * sampled
            p.grad, optimizer.sampled_tokens = torch.tensor([sampled]), tokens
            before = p.item()
            optimizer.step()
            optimizer.sampled_tokens = None
            assert p.item() == before  # an estimate moves no weight
        m = b1 * m + (1 - b1) * gradient
        ratio = m / max(gamma * h, eps)
        clipped.append(abs(ratio) > 1)
        w = w - lr * decay * w
        w = w - lr * max(-1.0, min(1.0, ratio))
        p.grad = torch.tensor([gradient])
        optimizer.step()
        assert p.item() == pytest.approx(w, rel=1e-6)
        assert optimizer.state[p]["exp_avg"].item() == pytest.approx(m, rel=1e-5)
        assert optimizer.state[p]["hessian"].item() == pytest.approx(h, rel=1e-5)
    assert True in clipped and False in clipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_estimate_that_is_no_number_changes_no_curvature(dtype):
    """It comes before NaN and inf are looked for; h would stay NaN, and with it every weight."""
    p = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = sophia.SophiaG([p], lr=0.1, betas=(0.96, 0.5))
    for sampled in ([2.0, 2.0, 2.0, 2.0], [float("nan"), float("inf"), 1e30, 4.0]):
        optimizer.sampled_tokens, p.grad = 1, torch.tensor(sampled, dtype=dtype)
        optimizer.step()
    assert optimizer.state[p]["hessian"].tolist() == [2.0, 2.0, 2.0, 9.0]
    optimizer.sampled_tokens, p.grad = None, torch.ones(4, dtype=dtype)
    optimizer.step()
    assert p.isfinite().all()


@pytest.mark.oracle
def test_sampled_labels_follow_the_softmax_and_do_not_depend_on_the_split():
    logits = torch.tensor([2.0, 0.0, 1.0, -3.0]).expand(6, 4000, 4)
    labels = torch.randint(0, 4, (6, 4000), generator=torch.Generator().manual_seed(0))
    drawn = sophia.sampled_labels(logits, labels, seed=3)
    share = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
    torch.testing.assert_close(share, logits[0, 0].softmax(-1), rtol=0, atol=0.01)
    padded = torch.cat([labels[2:4], torch.full((2, 9), -100)], 1)
    again = sophia.sampled_labels(torch.cat([logits[2:4], torch.zeros(2, 9, 4)], 1), padded, seed=3)
    assert torch.equal(again[:, :4000], drawn[2:4])
    assert not torch.equal(sophia.sampled_labels(logits, labels, seed=4), drawn)
    packed = sophia.sampled_labels(
        logits[:2].reshape(1, 8000, 4), labels[:2].reshape(1, 8000), 3, [(0, 4000), (4000, 8001)]
    )
    assert torch.equal(packed.reshape(2, 4000), drawn[:2])


class Linear(torch.nn.Module):
    """logits = inputs W^T: its Gauss-Newton diagonal is known exactly."""

    def __init__(self, classes, features):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(classes, features))

    def forward(self, inputs):
        return SimpleNamespace(logits=inputs @ self.weight.T)


@pytest.mark.oracle
def test_the_estimator_is_the_gauss_newton_diagonal_on_average():
    torch.manual_seed(0)
    net, x = Linear(5, 3), torch.randn(4, 9, 3)  # the last position predicts nothing
    optimizer = sophia.SophiaG(net.parameters(), betas=(0.96, 0.0))  # b2 = 0: h is the newest estimate
    trainer = SimpleNamespace(
        optimizer=optimizer, model_wrapped=net, is_deepspeed_enabled=False, state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(world_size=1, seed=0, device="cpu"),
        compute_loss_context_manager=contextlib.nullcontext,
        accelerator=SimpleNamespace(no_sync=lambda net: contextlib.nullcontext()),
    )  # fmt: skip
    labels = torch.randint(0, 5, (4, 9))
    labels[:, 4] = -100  # not supervised: not in the estimate
    batches = [{"inputs": x[:1], "labels": labels[:1]}, {"inputs": x[1:], "labels": labels[1:]}]
    mean, draws = 0, 400
    for step in range(draws):
        trainer.state.global_step = step
        sophia.estimate(trainer, batches)
        mean = mean + optimizer.state[net.weight]["hessian"] / draws
    assert net.weight.grad is None or net.weight.grad.abs().max() == 0
    used = x[:, :-1][labels[:, 1:] != -100]
    p = (used @ net.weight.detach().T).softmax(-1)
    exact = torch.einsum("bi,bj->ij", p * (1 - p), used**2) / len(used)
    torch.testing.assert_close(mean, exact, rtol=0.3, atol=0.01)  # 7 % of noise an entry


# --- checks before anything loads ---

CPU = ["--use_cpu", "true"]


def parse(*flags, world=1):
    return resolve.resolve_settings("sft", [*COMMON, *CPU, *flags], world)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--optim adafactor --zero 2", "ZeRO stage 2: it needs full matrices"),
        ("--optim adamw_torch_8bit --zero 1", "multiples of its block"),
        ("--optim adamw_torch_4bit --zero 3", "multiples of its block"),
        ("--optim paged_adamw_8bit", "needs a GPU; use adamw_8bit"),
        ("--optim paged_adamw_32bit --zero 2", "needs a GPU"),
        ("--optim schedule_free_adamw --zero 2", "ZeRO stage 2 passes flat slices"),
        ("--optim adamww", "did you mean adamw"),
        ("--optim sgd --optim_args momentum", "must have the form name=value"),
        ("--optim muon --max_grad_norm 1.0", "--max_grad_norm 0"),
        ("--optim muon --pure_bf16", "needs an fp32 master copy"),
        ("--optim sophia --zero 2 --fp16 true", "use --bf16 true"),
        ("--pure_bf16 --zero 2 --fp16 true", "it needs bf16"),
        ("--pure_bf16 --optim_args compile=yes", "must be auto, true or false"),
        ("--pure_bf16 --bf16 false", "it needs bf16"),
        ("--pure_bf16 --dtype float32", "leave --dtype out"),
        ("--pure_bf16 --zero 2 --offload optimizer", "DeepSpeed allows only its CPU Adam"),
        ("--tf32 true", "TF32 needs an NVIDIA GPU"),
        ("--lr_scaling linear --lr_scaling_base_batch_size 0", "must be 1 or more"),
    ],
)
def test_refusals(flags, words, monkeypatch):
    accelerator = type(get_accelerator())
    monkeypatch.setattr(accelerator, "is_fp16_supported", lambda self: True)  # whatever this CPU can
    with pytest.raises(UserError, match=words):
        parse(*flags.split())


@pytest.mark.bad_input
def test_fp16_on_a_cpu_without_it(monkeypatch):
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: False)
    with pytest.raises(UserError, match="does not support fp16; use --bf16 true"):
        parse("--zero", "2", "--fp16", "true")


@pytest.mark.bad_input
@pytest.mark.parametrize("name", [n for n, e in registry.OPTIMIZERS.items() if e.module])
def test_a_missing_package_names_its_install_line(name, monkeypatch):
    find = registry.importlib.util.find_spec
    gone = registry.OPTIMIZERS[name].module
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda n: None if n == gone else find(n))
    with pytest.raises(
        UserError, match=rf"--optim {name}: {gone} is not installed: make install( EXTRAS=projected)?\."
    ):
        parse("--optim", name)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw"])
def test_projected_optimizers_are_for_stage_0(name, monkeypatch):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda n: True)
    assert parse("--optim", name).optim_target_modules == "all-linear"
    with pytest.raises(UserError, match="flat slices"):
        parse("--optim", name, "--zero", "1")
    with pytest.raises(UserError, match="fp32 master copy"):
        parse("--optim", name, "--pure_bf16")


def _json(tmp_path, **more):
    config = json.loads((ROOT / "deepspeed_configs" / "zero2.json").read_text()) | more
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(config))
    return str(file)


@pytest.mark.bad_input
def test_the_users_json_is_matched(tmp_path):
    section = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    with pytest.raises(UserError, match='has an "optimizer" section'):
        parse("--deepspeed", _json(tmp_path, **section), "--optim", "sophia")
    with pytest.raises(UserError, match='has an "optimizer" section'):
        parse("--deepspeed", _json(tmp_path, **section), "--lr_scaling", "linear")
    said = parse("--deepspeed", _json(tmp_path, **section)).decisions
    assert any("--optim is not used" in sentence for sentence in said)
    file = _json(tmp_path, data_types={"grad_accum_dtype": "fp32"})
    with pytest.raises(UserError, match="grad_accum_dtype"):
        parse("--deepspeed", file, "--pure_bf16")
    config = json.loads((ROOT / "deepspeed_configs" / "zero2.json").read_text())["zero_optimization"]
    offload = {"zero_optimization": config | {"offload_optimizer": {"device": "cpu"}}}
    with pytest.raises(UserError, match=r"--optim lion .* silently replace it by DeepSpeed"):
        parse("--deepspeed", _json(tmp_path, **offload), "--optim", "lion")


def test_what_is_decided_is_said():
    chosen = parse("--optim", "sgd")
    assert chosen.optim_args == "momentum=0.9" and any("momentum=0.9" in s for s in chosen.decisions)
    assert parse("--optim", "sgd", "--optim_args", "momentum=0").optim_args == "momentum=0"
    assert parse("--optim", "lion").optim == "lion_32bit"
    assert parse("--optim", "muon").max_grad_norm == 0
    assert parse("--optim", "muon", "--zero", "3").deepspeed["zero_optimization"]["reduce_scatter"] is False
    pure = parse("--pure_bf16", "--zero", "3")
    assert pure.precision == "bf16" and pure.deepspeed["bf16"]["bf16_master_weights_and_grads"]
    assert any("stochastically" in s for s in pure.decisions)
    assert parse("--pure_bf16").training_values()["bf16"] is False  # no autocast
    assert any("1/512" in s for s in parse("--pure_bf16", "--optim", "sgd").decisions)
    assert "bf16_stochastic_round=True" in parse("--pure_bf16", "--optim", "adamw_torch_8bit").optim_args


@pytest.mark.parametrize(("flags", "wanted"), [("none", 1e-3), ("linear", 4e-3), ("sqrt", 2e-3)])
def test_learning_rate_scaling(flags, wanted):
    found = resolve.resolve_settings("sft", [*COMMON, *CPU, "--effective_batch_size", "128", "--lr_scaling", flags], 1)
    assert found.learning_rate == pytest.approx(wanted)
    assert any("effective batch 128, base 32" in s for s in found.decisions) == (flags != "none")
    halved = resolve.resolve_settings(
        "sft", [*COMMON, *CPU, "--lr_scaling", "linear", "--lr_scaling_base_batch_size", "16"], 1
    )
    assert halved.learning_rate == pytest.approx(0.5e-3)


def table_of_the_docs() -> str:
    lines = [
        "| `--optim` | bytes of state a parameter | ZeRO stages | `--offload` | `--pure_bf16` rounds | needs | bundled "
        "task's rate | notes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, spec in registry.OPTIMIZERS.items():
        needs = [f"`EXTRAS={spec.extra}`"] * bool(spec.extra) + ["CUDA"] * spec.needs_cuda
        cells = [
            f"`{name}`", spec.state_bytes, " ".join(spec.stages), "yes" if spec.offload else "no",
            spec.rounding or "refused", ", ".join(needs), f"{spec.bundled_lr:g}", spec.note,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_docs_table_is_the_data():
    text = "".join(file.read_text() for file in (ROOT / "docs").glob("*.md"))
    assert table_of_the_docs() in text
    assert {"sophia", "muon", "adafactor", "lion_32bit"} <= set(registry.OPTIMIZERS)


def test_skipped_steps_of_stage_0_reach_the_log():
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(optimizer_step_was_skipped=True), guard=SimpleNamespace(after_step=lambda: None),
        settings=SimpleNamespace(save_every_minutes=0.0), pending_checkpoint=None,
    )  # fmt: skip
    reporter = progress.Reporter(trainer)
    args, state = SimpleNamespace(save_strategy="no", process_index=1), SimpleNamespace(global_step=1, max_steps=9)
    reporter.on_step_end(args, state, SimpleNamespace(should_log=False))
    trainer.accelerator.optimizer_step_was_skipped = False
    reporter.on_step_end(args, state, SimpleNamespace(should_log=False))
    assert reporter.skipped_steps == 1


# --- real runs ---


def run(name, zero, *more):
    return "sft", [*COMMON, "--optim", name, "--zero", zero, *more]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("two")
    short = ("--max_samples", "16")
    cases = {
        "8bit-2": run("adamw_8bit", "2", *short),
        "pure-0": run("adamw_torch_fused", "0", "--pure_bf16"),
        "pure-2": run("adamw_torch_fused", "2", "--pure_bf16"),
        "static-0": run("adamw_torch_fused", "0"),
    }
    if runs_slow(request):
        cases["sophia-0"] = run("sophia", "0", "--per_device_train_batch_size", "2")
    return run_world(2, cases, folder)


@pytest.mark.fault
def test_the_first_step_of_an_engine_at_stage_0_is_adams_first(tmp_path):
    """DeepSpeed makes its 16-bit optimizer's states by a step with zero gradients, which Adam counts."""
    file = tmp_path / "zero0.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    same = [*COMMON, "--max_steps", "3", "--bf16", "true", "--lr_scheduler_type", "constant", "--warmup_steps", "0"]
    stages = {"json": ["--deepspeed", str(file)], "1": ["--zero", "1"]}
    found = run_world(2, {name: ("sft", [*same, *stage]) for name, stage in stages.items()}, tmp_path)
    assert found["json"].losses == pytest.approx(found["1"].losses, rel=1e-3)


@pytest.mark.slow
def test_sophia_is_one_curve_over_stages_ranks_and_splits(two_ranks, tmp_path):
    runs = {"one": run("sophia", "0", "--per_device_train_batch_size", "8"), "adamw": run("adamw_torch_fused", "0")}
    one = run_world(1, runs, tmp_path)
    for found in (two_ranks["sophia-0"], run_world(2, {"2": run("sophia", "2")}, tmp_path)["2"]):
        assert found.json("record.json")["optimizer"] == "SophiaG"
        torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(one["one"].losses), rtol=1e-3, atol=0)
    assert one["one"].losses[-1] < 0.5 * one["one"].losses[0]
    assert one["one"].losses[1:] != one["adamw"].losses[1:]


def test_eight_bit_states_take_two_bytes(two_ranks):
    states = two_ranks["8bit-2"].json("record.json")["bytes"]["states"]
    assert states / (PARAMETERS / 2) == pytest.approx(2, rel=0.05)


def test_pure_bf16_bytes_are_exact(two_ranks):
    """Stage 0: 2 + 4 bytes a parameter (8 with the gradients); stage 2 adds DeepSpeed's copy in bf16 and shards."""
    whole = two_ranks["pure-0"].json("record.json")["bytes"]
    assert whole == {"parameters": 2 * PARAMETERS, "master": 0, "states": 4 * PARAMETERS}
    shard = two_ranks["pure-2"].json("record.json")["bytes"]
    assert shard == {"parameters": 2 * PARAMETERS, "master": PARAMETERS, "states": 2 * PARAMETERS}


def test_pure_bf16_follows_fp32(two_ranks):
    exact = torch.tensor(two_ranks["static-0"].losses)
    for name in ("pure-0", "pure-2"):
        torch.testing.assert_close(torch.tensor(two_ranks[name].losses), exact, rtol=0.02, atol=0)


def test_ddp_settings_reach_the_module(two_ranks):
    wanted = {"find_unused_parameters": False, "gradient_as_bucket_view": True}
    assert two_ranks["static-0"].json("record.json")["ddp"] == {**wanted, "static_graph": True}
    assert two_ranks["pure-0"].json("run.json")["arguments"]["ddp_static_graph"]["value"] is True
    if "sophia-0" in two_ranks:  # it accumulates
        assert two_ranks["sophia-0"].json("record.json")["ddp"] == {**wanted, "static_graph": False}


FP16_ON_ANY_CPU = """
import runpy, sys
from deepspeed.accelerator import cpu_accelerator
cpu_accelerator.CPU_Accelerator.is_fp16_supported = lambda self: True  # slow without hardware for it, but right
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_skipped_steps_are_logged_under_fp16(tmp_path):
    config = json.loads((ROOT / "deepspeed_configs" / "zero2.json").read_text())
    config["fp16"] |= {"initial_scale_power": 32, "hysteresis": 1}  # the first steps must overflow
    (tmp_path / "fp16.json").write_text(json.dumps(config))
    flags = [
        *COMMON,
        "--fp16",
        "true",
        "--deepspeed",
        str(tmp_path / "fp16.json"),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    code = f"import sys; sys.argv = [{str(ROOT / 'recipes' / 'sft.py')!r}, *sys.argv[1:]]\n{FP16_ON_ANY_CPU}"
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    logged = [m.get("skipped_steps", 0) for m in Run(tmp_path / "out").metrics if "loss" in m]
    assert logged[0] == 1 and logged == sorted(logged)
    assert "skipped steps 1" in done.stdout


# --- slow: every supported pair, and the default task ---

LISTED = [n for n, e in registry.OPTIMIZERS.items() if not e.needs_cuda and n not in ("galore_adamw", "apollo_adamw")]
PAIRS = [
    (name, zero, offload)
    for name in LISTED
    for zero in registry.OPTIMIZERS[name].stages
    for offload in ("none", "optimizer")
    if offload == "none" or (zero != "0" and registry.OPTIMIZERS[name].offload)
]
LOOSE = {"adamw_8bit": 2e-2, "lion_8bit": 2e-2, "muon": 2e-3}  # where the blocks of 256 fall; half precision products


@pytest.fixture(scope="module")
def every_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return run_world(2, {"-".join(pair): run(*pair[:2], "--offload", pair[2]) for pair in PAIRS}, folder)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_supported_pair_trains_as_stage_0_does(every_pair, pair):
    found, reference = every_pair["-".join(pair)], every_pair[f"{pair[0]}-0-none"]
    torch.testing.assert_close(
        torch.tensor(found.losses), torch.tensor(reference.losses), rtol=LOOSE.get(pair[0], 1e-3), atol=0
    )
    states = found.json("record.json")["bytes"]["states"] * (2 if pair[1] != "0" else 1)
    stated = {"~0": 0.075, "4 (matrices), 8 (rest)": 4.5}.get(entry := registry.OPTIMIZERS[pair[0]].state_bytes)
    assert states / PARAMETERS == pytest.approx(stated or float(entry), rel=0.35)  # embeddings: 32 bits at stage 0


RESUMED = {
    "sophia-0": ["--optim", "sophia", "--zero", "0"],
    "sophia-2": ["--optim", "sophia", "--zero", "2"],
    "pure-0": ["--pure_bf16", "--zero", "0"],
    "pure-2": ["--pure_bf16", "--zero", "2"],
    "compiled-0": ["--pure_bf16", "--zero", "0", "--optim_args", "compile=true"],
    "compiled-2": ["--pure_bf16", "--zero", "2", "--optim_args", "compile=true"],
    "8bit-2": ["--optim", "adamw_8bit", "--zero", "2"],
    "muon-2": ["--optim", "muon", "--zero", "2"],
}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(tmp_path):
    """Rounding noise, curvature and quantized states included: the last two of four losses are bit-equal."""
    saving = ["--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "5"]
    cases = {}
    for name, more in RESUMED.items():
        cases[name] = ("sft", [*COMMON, *more, *saving])
        checkpoint = str(tmp_path / name / "checkpoint-2")
        cases[f"{name}-resumed"] = ("sft", [*COMMON, *more, *saving, "--resume_from_checkpoint", checkpoint])
    runs = run_world(2, cases, tmp_path)
    for name in RESUMED:
        assert runs[f"{name}-resumed"].losses == runs[name].losses[2:], name
    for zero in "02":
        log = (tmp_path / f"compiled-{zero}" / "logs" / "rank0.log").read_text()
        assert "AdamW runs as one compiled kernel" in log
        assert runs[f"compiled-{zero}"].losses == runs[f"pure-{zero}"].losses


QUALITY = {
    name: ["--optim", name, "--learning_rate", str(entry.bundled_lr)]
    for name, entry in registry.OPTIMIZERS.items()
    if name in LISTED
} | {f"pure_bf16-{zero}": ["--pure_bf16", "--zero", zero] for zero in "02"}


@pytest.fixture(scope="module")
def default_task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality")
    quiet = ["--save_strategy", "no", "--eval_strategy", "no", "--num_samples", "0"]
    return run_world(1, {name: ("sft", [*quiet, *more]) for name, more in QUALITY.items()}, folder)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", QUALITY)
def test_the_default_task_is_learned(default_task, name):
    assert default_task[name].json("result.json")["exact_match_after"] > 0.9


def test_noise_forks_no_other_ranks_generator(monkeypatch):
    """fork_rng without `devices` would take the state of every GPU of the machine, and warn."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    build._same_noise_on_all_ranks(optimizer, 0)
    before = torch.get_rng_state()
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5] and torch.equal(torch.get_rng_state(), before)


def test_replicas_draw_the_same_noise_in_a_step_and_other_noise_in_the_next():
    class Noisy(torch.optim.SGD):
        def step(self, closure=None):
            drawn.append(torch.rand(3))

    drawn = []
    for rank in (0, 1):
        torch.manual_seed(rank)  # dropout has advanced the generator of each rank
        optimizer = Noisy([torch.nn.Parameter(torch.ones(2))], lr=0.5)
        build._same_noise_on_all_ranks(optimizer, 7)
        for _ in range(2):
            optimizer.step()
            torch.rand(1 + rank)
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])


class OnGpu(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    device = property(lambda self: torch.device("cuda"))


def test_states_of_a_paged_optimizer_are_paged_again_after_a_load():
    """A load puts them into plain GPU memory; small ones stay there, and paged ones are CPU tensors to torch."""
    asked = []

    def buffer(parameter, dtype):
        asked.append(dtype)
        return torch.zeros(parameter.shape, dtype=dtype)

    large, small = torch.empty(100_000), torch.empty(10)
    loaded = {p: torch.arange(p.numel(), dtype=torch.float32) for p in (large, small)}
    already = torch.ones(100_000)
    state = {p: {"state1": x.clone().as_subclass(OnGpu), "state2": already, "step": 3} for p, x in loaded.items()}
    optimizer = SimpleNamespace(state=state, get_state_buffer=buffer)
    paged.PageStates(optimizer).on_step_begin()
    assert asked == [torch.float32] and torch.equal(state[large]["state1"], loaded[large])
    assert type(state[large]["state1"]) is torch.Tensor and type(state[small]["state1"]) is OnGpu
    assert state[large]["state2"] is already and state[large]["step"] == 3
