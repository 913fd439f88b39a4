"""The time of a step: its operations against torch's count, bounds that hold on every GPU, rates measured here."""

import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.commands import calibrate
from zerofit.parallel import pipeline
from zerofit.plan import formulas
from zerofit.plan.speed import accuracy, measure, rates, step

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "tests" / "matrix"))
import published_speeds
import tiny_models

ROWS, LENGTH = 2, 48
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": 96, "attn_implementation": "eager", "use_cache": False}  # fmt: skip
SHAPE_8B = formulas.Shape(8_000_000_000, 0, 525_336_576, 4096, 32, 32, 8, 128, 14336, 128256)


def dense(**more):
    return LlamaForCausalLM(LlamaConfig(intermediate_size=160, **SIZES, **more))


def mixture():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **SIZES, experts_implementation="eager"))


def adapted():
    from peft import LoraConfig, get_peft_model

    model = dense()
    model.enable_input_require_grads()  # as gradient checkpointing needs it: each product has a gradient to its input
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def unadapted_last():
    """LoRA on the queries: the last product of a layer has no adapter, and is not recomputed."""
    from peft import LoraConfig, get_peft_model

    model = dense()
    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))


def counted(model, checkpointing: bool) -> dict[str, int]:
    """The operations of a real forward and backward by kernel: {"mm": ..., "bmm": ...}."""
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    ids = torch.randint(0, 96, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    found: dict[str, int] = {}
    for kernel, flops in counter.get_flop_counts()["Global"].items():
        name = "bmm" if "bmm" in str(kernel) else "mm"
        found[name] = found.get(name, 0) + flops
    return found


def setting(**more) -> formulas.PlanPoint:
    given = {"zero": 0, "offload": "none", "every": 0, "micro": ROWS, "tokens": ROWS * LENGTH, "accumulation": 1,
             "ranks": 1}  # fmt: skip
    return formulas.PlanPoint(**{**given, **more})


@pytest.mark.oracle
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("build", [dense, mixture, adapted, unadapted_last])
def test_operations_are_those_that_torch_counts(build, checkpointing):
    """Forward, recomputation and backward of every product: dense, routed experts, and LoRA on a frozen base."""
    model = build()
    shape = formulas.shape(model.config, model)
    found = counted(model, checkpointing)
    assert step.operations(shape, setting(every=int(checkpointing))) == found["mm"]
    heads = shape.work.heads * shape.work.head_dim * sum(layers for _, layers in shape.work.attentions)
    forwards = 4 if checkpointing else 3  # two products; twice as many in the backward
    positions = 2 * 8 * LENGTH * 3 * ROWS  # rotary frequencies times positions, once a forward
    assert found["bmm"] - 4 * ROWS * LENGTH * LENGTH * heads * forwards in (0, positions // 3, positions // 3 / ROWS)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("kind", "field"), [("qwen3_next", "delta"), ("granitemoehybrid", "state"), ("lfm2_moe", "convolved")]
)
def test_convolutions_of_hybrids_are_those_that_torch_counts(kind, field):
    """What comes after them reads as many numbers; a step without them would be planned shorter."""
    config = tiny_models.config_of(kind)
    model = AutoModelForCausalLM.from_config(config).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(ROWS, LENGTH, dtype=torch.long), use_cache=False)
    found = sum(n for kernel, n in counter.get_flop_counts()["Global"].items() if "convolution" in str(kernel))
    (wide,) = {m.kernel_size[0] for m in model.modules() if isinstance(m, torch.nn.Conv1d)}
    shape = formulas.shape(config, model)
    assert 2 * ROWS * (LENGTH + wide - 1) * wide * getattr(shape.work.passes, field) == found > 0
    assert shape.work.passes.convolutions == 1
    without = replace(shape, work=replace(shape.work, passes=replace(shape.work.passes, convolutions=0, **{field: 0})))
    gpu = hardware.GPUS["h100-80g"]
    assert step.seconds(shape, setting(), gpu, LENGTH) > step.seconds(without, setting(), gpu, LENGTH)


# --- bounds that hold on every GPU ---


def test_every_gpu_of_the_table_has_its_rates():
    known = rates.table()
    assert list(known["gpus"]) == list(hardware.GPUS)
    keys = {frozenset(family) for family in known["families"].values()}
    assert len(keys) == 1, "a family lacks a share"
    for name, entry in known["gpus"].items():
        assert entry["link"] in known["links"] and entry["family"] in known["families"]
        assert (entry["fp8_tflops"] is not None) == hardware.GPUS[name].fp8, name


def of_8b(**more):
    return setting(**{"zero": 3, "every": 1, "micro": 2, "tokens": 8192, "accumulation": 2, "ranks": 8, **more})


@pytest.mark.parametrize("name", hardware.GPUS)
def test_a_step_is_within_the_data_sheet(name):
    """No step computes more than the data sheet's peak, nor sends more than the link."""
    gpu = hardware.GPUS[name]
    found = step.estimate_step(SHAPE_8B, of_8b(), gpu, 4096)
    computing = found.products + found.loss
    assert computing >= step.operations(SHAPE_8B, of_8b()) / (gpu.tflops * 1e12)
    sent, _ = formulas.wire_bytes(SHAPE_8B, of_8b())
    assert found.seconds >= sent / (gpu.link_gbs * 1e9)
    assert all(value >= 0 for value in vars(found).values())


@pytest.mark.parametrize(("name", "bridged"), [("h100-94g-nvl", 2), ("h200-141g-nvl", 4)])
def test_more_cards_than_a_bridge_joins_send_over_pcie(name, bridged):
    gpu, sxm = hardware.GPUS[name], hardware.GPUS["h100-80g"]
    assert rates.link_between(gpu, bridged) == ("nvlink", gpu.link_gbs)
    assert rates.link_between(gpu, bridged + 1) == ("pcie", gpu.host_gbs)
    joined, more = (rates.rates_for(gpu, together) for together in (bridged, 8))
    assert more.link < joined.link / 4 and more.overlap < joined.overlap and more.products == joined.products
    assert rates.rates_for(sxm, 8) == rates.rates_for(sxm, 2)
    assert (
        step.estimate_step(SHAPE_8B, of_8b(), gpu, 4096).links
        > 4 * step.estimate_step(SHAPE_8B, of_8b(ranks=bridged), gpu, 4096).links
    )


@pytest.mark.parametrize("better", ["tflops", "memory_gbs", "link_gbs", "node_gbs", "host_gbs"])
@pytest.mark.parametrize("more", [{}, {"ranks": 16}, {"offload": "all"}, {"zero": 0, "ranks": 1}])
def test_a_better_gpu_is_never_slower(better, more):
    gpu = hardware.GPUS["a100-80g"]
    faster = replace(gpu, **{better: 2 * getattr(gpu, better)})
    assert step.seconds(SHAPE_8B, of_8b(**more), faster, 4096) <= step.seconds(SHAPE_8B, of_8b(**more), gpu, 4096)


def test_longer_documents_and_more_layers_cost_more():
    gpu = hardware.GPUS["h100-80g"]
    by_length = [step.seconds(SHAPE_8B, of_8b(), gpu, length) for length in (1024, 4096, 8192)]
    assert by_length == sorted(set(by_length))
    deeper = replace(SHAPE_8B, layers=40, trainable=10_000_000_000)
    assert step.seconds(deeper, of_8b(), gpu, 4096) > step.seconds(SHAPE_8B, of_8b(), gpu, 4096)


def test_a_pipeline_of_one_micro_batch_or_one_stage_has_a_time():
    gpu = hardware.GPUS["h100-80g"]
    for stages, micro_batches in ((1, 1), (2, 1), (1, 4)):
        groups = ((pipeline.PARALLEL, stages),)
        one = of_8b(zero=1, ranks=stages, accumulation=micro_batches, groups=groups)
        found = step.estimate_step(SHAPE_8B, one, gpu, 4096)
        assert 0 < found.seconds < 60 and (found.bubble > 0) == (stages > 1)


def test_unpacking_experts_and_short_rows_have_their_price():
    """A packed base is slower, experts one by one are slower than together, few rows are slower for each token."""
    gpu, model = hardware.GPUS["a100-80g"], mixture()
    plain = formulas.shape(model.config, model)
    one = setting(tokens=2048)
    by_loop = replace(one, kernels=replace(one.kernels, loops_experts=True))
    apart = replace(one, kernels=replace(one.kernels, kernel_per_expert=True))
    looped, separate, together = (step.seconds(plain, each, gpu, 1024) for each in (by_loop, apart, one))
    assert looped > separate > together
    packed = replace(plain, work=replace(plain.work, products=tuple(
        p if p.head else replace(p, bits=4) for p in plain.work.products
    )))  # fmt: skip
    assert (
        step.estimate_step(packed, one, gpu, 1024).unpacking > 0 == step.estimate_step(plain, one, gpu, 1024).unpacking
    )
    few, many = (step.seconds(SHAPE_8B, of_8b(ranks=1, zero=0, tokens=n), gpu, 128) / n for n in (128, 8192))
    assert few > many


# --- rates of this machine ---


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROFIT_CACHE", str(tmp_path))
    return tmp_path


def test_a_measured_rate_changes_the_time_as_it_should(own_cache):
    gpu = hardware.GPUS["h100-80g"]
    before, known = step.estimate_step(SHAPE_8B, of_8b(), gpu, 4096), rates.rates_for(gpu)
    file = rates.save_rates(
        "NVIDIA H100 80GB HBM3", {"products": known.products / 2, "memory": known.memory, "link": 0}, {}
    )
    assert file.parent == own_cache / "rates"
    after = step.estimate_step(SHAPE_8B, of_8b(), gpu, 4096)
    assert rates.rates_for(gpu).measured and rates.rates_for(gpu).link == known.link  # 0 is no rate
    assert after.products == pytest.approx(2 * before.products, rel=1e-3)
    assert after.elementwise == before.elementwise
    other = hardware.GPUS["a100-80g"]
    assert not rates.rates_for(other).measured
    named = replace(gpu, device_name="NVIDIA H100 80GB HBM3")  # as torch tells it
    assert rates.rates_for(named).products == known.products / 2
    file.write_text("{")
    assert rates.rates_for(gpu) == known  # a file that cannot be read counts as none


def test_what_is_measured_is_finite_and_positive():
    found = measure.measure_rates("cpu", rates.rates_for(hardware.GPUS["t4-16g"]), calibrate.TINY)
    expected = {"products", "fp32_products", "attention_forward", "attention_backward", "memory", "host", "kernel",
                "backward_kernel"}  # fmt: skip
    assert found.keys() == expected <= set(rates.MEASURED)
    assert all(0 < rate < math.inf for rate in found.values()), found


@pytest.mark.slow
def test_the_command_measures_keeps_and_says_it(own_cache, capsys):
    """On the CPU, with an all-gather of two processes."""
    calibrate.main(["--device", "cpu"])
    kept = json.loads((own_cache / "rates" / "cpu.json").read_text())
    assert kept["rates"]["link"] > 0 and kept["details"]["gpus"] == 2
    said = capsys.readouterr().out
    assert "all-gather within the node" in said and str(own_cache) in said


@pytest.mark.bad_input
def test_without_a_gpu_it_is_refused(monkeypatch):
    monkeypatch.setattr(hardware, "torch_sees_gpu", lambda: False)
    monkeypatch.setattr(hardware, "why_no_gpu", lambda: None)
    with pytest.raises(UserError, match="needs a GPU: PyTorch sees no GPU"):
        calibrate.main([])


# --- how far plans were off ---


def test_the_printed_error_is_that_of_published_runs_like_it():
    points = accuracy.points()
    assert points and all(p["kind"] in accuracy.KINDS for p in points)
    of_a100 = [p["error"] for p in points if (p["chip"], p["kind"]) == ("a100", accuracy.KINDS[0])]
    said = accuracy.error_range(hardware.GPUS["a100-40g"], SHAPE_8B)
    assert said == (f"{100 * min(of_a100):+.0f} to {100 * max(of_a100):+.0f} % at {len(of_a100)} published runs of "
                    f"{accuracy.PROGRAMS}: full fine-tuning on A100")  # fmt: skip
    of_kind = [p["error"] for p in points if p["kind"] == accuracy.KINDS[0]]
    assert accuracy.error_range(hardware.GPUS["t4-16g"], SHAPE_8B) == (
        "no similar published runs on this GPU; "
        f"{100 * min(of_kind):+.0f} to {100 * max(of_kind):+.0f} % at {len(of_kind)} runs of full fine-tuning by "
        f"{accuracy.PROGRAMS} on any"
    )


def test_the_result_has_every_published_run():
    """Nothing is left out, and what plans print is both halves, without mixtures as transformers had them before 5."""
    stored = json.loads(published_speeds.RESULT.read_text())["points"]
    runs = {row["id"]: row for row in (*published_speeds.jobs(), *published_speeds.shapes())}
    assert [p["id"] for p in stored] == list(runs)
    assert all(p["half"] == published_speeds.half(p["id"]) for p in stored)
    assert all(p["counted"] or p["note"] for p in stored)
    kept = [
        round(p["error"], 3) for p in stored if p["counted"] and published_speeds.AS_MODULES not in p["note"]
    ]  # fmt: skip
    assert kept == [p["error"] for p in accuracy.points()]
    page = published_speeds.PAGE.read_text()
    assert all(p["id"] in page for p in stored) and page == published_speeds.page(stored)


def test_order_of_pairs():
    common = {"source": "s", "model": "m", "gpu": "g"}
    points = [{**common, "published": speed, "predicted": told} for speed, told in ((100, 90), (101, 80), (200, 100))]
    assert published_speeds.pairs(points) == (3, 2) and published_speeds.pairs(points, 0.02) == (2, 2)
    assert published_speeds.pairs([*points, {**points[0], "gpu": "other"}]) == (3, 2)
