"""The published points are complete, and the stored comparison with them is within its bounds."""

import json
import re
import shlex
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, TINY

from zerofit.base import hardware
from zerofit.config import parse, resolve
from zerofit.plan import candidates, gpu_memory, simulate

sys.path.insert(0, str(ROOT / "benchmarks"))
import loops
import published

POINTS = published.points()
STORED = json.loads((published.RESULTS / "published.json").read_text())
PACKAGE = re.compile(r"package [\w-]+ \d[\w.]*, .+")  # a source that is a package is named, with its version


def test_points_are_complete():
    assert len({point["id"] for point in POINTS}) == len(POINTS) >= 95
    for point in POINTS:
        assert point["url"].startswith("https://") or PACKAGE.fullmatch(point["source"]), point["id"]
        assert point["stack"], point["id"]
        assert point["class"] == "fit" or any(point[kind] for kind in published.KINDS), point["id"]
        assert set(point["differences"].split()) <= set(published.DIFFERENCES), point["id"]
        assert set(point["reasons"].split()) <= set(published.REASONS), point["id"]
        assert point["ran"] in ("yes", "no") and int(point["gpus"]) >= 1


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point["id"])
def test_every_flag_is_accepted(point):
    request = candidates.method_request(published.request_of(point), point["method"])
    gpu = hardware.find(point["gpu"])
    settings = resolve.resolve(request, int(point["gpus"]), gpu)
    assert candidates.methods_to_try(point["method"], "sft", request.flags()) == [point["method"]]
    assert (settings.source["zero"] == "flag") == ("zero" in request.values)


def test_what_is_not_stated_makes_class_b():
    for point in POINTS:
        assert point["class"] != "A" or "not stated" not in point["note"], point["id"]
        assert point["class"] != "A" or not point["unknown"], point["id"]


def test_a_gradient_that_overwrites_the_logits_is_simulated():
    """The loss of a measured program: one fp32 copy for the model's output and one for the kernel."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    loops.overwrites_logits(SimpleNamespace(model=model))
    ids = torch.zeros(2, 5, dtype=torch.long)
    output = model(input_ids=ids, labels=ids)
    assert output.logits.dtype == torch.float32
    (kernel,) = (node for node, _ in output.loss.grad_fn.next_functions)
    shifted = kernel.saved_tensors[0]
    assert shifted.shape == (8, 64) and shifted.dtype == torch.float32
    gradients = []
    kernel.register_hook(lambda inputs, outputs: gradients.append(inputs[0]))
    output.loss.backward()
    assert gradients[0].data_ptr() == shifted.data_ptr() and model.lm_head.weight.grad.isfinite().all()


def test_weights_that_autograd_keeps_are_those_of_linear_layers():
    """Without zero.Init a linear layer's backward holds its gathered weight; an embedding's holds indices alone."""
    users = lambda layer: torch._C._storage_Use_Count(layer.weight.data.untyped_storage()._cdata)  # noqa: E731
    hidden = torch.zeros(1, 2, 4, requires_grad=True)
    for layer, value, keeps in (
        (torch.nn.Linear(4, 4, bias=False), hidden, True),
        (torch.nn.Embedding(4, 4), torch.zeros(1, 2, dtype=torch.long), False),
    ):
        before = users(layer)
        output = layer(value)
        assert (users(layer) > before) == keeps and output.requires_grad
    point = next(point for point in POINTS if point["id"] == "ds-autoep-mixtral-8l-z3x8")
    request = candidates.method_request(published.request_of(point), point["method"])
    settings = resolve.resolve(request, 8, hardware.find(point["gpu"]))
    attention, head = (
        2 * 4096 * 4096 + 2 * 4096 * 1024,
        32_000 * 4096,
    )  # experts and router are no nn.Linear
    assert published._linear_weights(settings) == 8 * attention + head


def test_stored_plans_take_the_arithmetic_of_today():
    """NVLS came after the plan of 8 x H100 was stored; flattening on the host leaves the phase of loading out."""
    point = next(point for point in POINTS if point["id"] == "peft-doc-70b-lora-z3")
    stored = STORED["plans"][point["id"]]
    nvls = int(gpu_memory.NVLS_GIB * 2**30)
    earlier = stored | {name: stored[name] - nvls for name in ("driver", "least")}
    assert published.with_arithmetic_of_today(point, earlier) == published.with_arithmetic_of_today(point, stored)
    assert abs(published.with_arithmetic_of_today(point, earlier)["driver"] - earlier["driver"] - nvls) <= 1
    total = STORED["plans"]["gist-z2-gc-opt-mb1"]["total"]
    assert max(total, key=total.get) == "load"
    assert STORED["plans"]["gist-z2-gc-opt-mb1"]["differences"]["H"] == total["backward"] - total["load"] < 0


@pytest.mark.slow
def test_another_training_loop_is_simulated():
    """A copy of the logits in fp32, without each row's last: 64 more rows of the vocabulary."""
    flags = ["--model", str(TINY / "model"), "--data", "none", "--zero", "0", "--max_length", "64",
             "--fused_loss", "false"]  # fmt: skip
    request = parse.request("sft", flags)
    hooks = ((), (f"{published.LOOPS}:copies_logits",))
    plain, other = simulate.run_all([simulate.Question(request, 1, before_training=hook) for hook in hooks])
    assert other["total"]["forward"] > plain["total"]["forward"]


def test_kernels_that_zerofit_lacks_make_class_c():
    """Every run of this file has "foak" kernels in its column framework_config."""
    with_kernels = [point for point in POINTS if point["url"].endswith("a100_80gb_liger.csv")]
    assert len(with_kernels) >= 10
    for point in with_kernels:
        assert point["class"] in ("C", "fit") and "K" in point["reasons"], point["id"]


def test_rows_of_different_lengths_make_class_c():
    """A plan has rows of one length; segments that do not expand hold more with others."""
    mixed = [point for point in POINTS if "rows of 3234.4 +- 2547.5 tokens" in point["stack"]]
    assert len(mixed) >= 10
    for point in mixed:
        assert point["class"] in ("C", "fit") and "R" in point["reasons"], point["id"]


def test_contexts_are_the_constants():
    """Every constant is near the median of its messages (two of the RTX 5090 differ by 0.3 GiB)."""
    sizes = {}
    for row in published.contexts():
        if row["gpus"] == "1" and row["gpu"]:
            sizes.setdefault(row["gpu"], []).append(float(row["gib"]))
    for name, measured in sizes.items():
        planned = gpu_memory.context_bytes(hardware.GPUS[name]) / 2**30
        assert abs(planned - statistics.median(measured)) <= 0.17, name
    of_a_node = [float(r["gib"]) - 0.5 for r in published.contexts() if 1 < int(r["gpus"]) <= 8]
    assert min(of_a_node) <= gpu_memory.NCCL_GIB["within a node"] <= max(of_a_node)
    assert gpu_memory.nccl_bytes(1) == 0 < gpu_memory.nccl_bytes(8, 8) < gpu_memory.nccl_bytes(16, 8)


def compared(*classes):
    plans = STORED["plans"]
    found = [(point, plans[point["id"]]) for point in POINTS if point["class"] in classes and point["id"] in plans]
    return [row for point, planned in found for row in published.compare(point, planned)]


# Beyond the bounds of published.BOUNDS; benchmarks/published/README.md has their reasons.
BEYOND = {
    "A": set(),
    "AB": {
        *("hf-blog-ulysses-qwen3-4b-z3x4-sp4-8k", "swiftex-lora-7b-ddpx2-short", "gist-z3-gc-mb8-ga2"),
        "flagperf-llama2-7b-z3x8-h800",
    },
}


@pytest.mark.parametrize(("classes", "median_bound", "bound"), [bounds[1:] for bounds in published.BOUNDS])
def test_the_stored_comparison_is_within_its_bounds(classes, median_bound, bound):
    """Bounds of this comparison, not of the next point; each large error has a reason."""
    rows = [row for row in compared(*classes) if row["class"] in classes]
    assert len(rows) >= 70
    assert statistics.median(abs(row["error_after"]) for row in rows) <= median_bound
    assert {row["id"] for row in rows if abs(row["error_after"]) > bound} <= BEYOND[classes]
    for row in rows:
        assert abs(row["error"]) <= published.LARGE or row["why"], row["id"]


def test_the_stored_page_has_every_point_with_its_source_and_the_date():
    page = (published.RESULTS / "published.md").read_text()
    assert STORED["date"] in page.splitlines()[2]
    figures, sources = page.partition("## Sources")[::2]
    for point in POINTS:
        assert point["id"] not in STORED["plans"] or point["id"] in figures or point["class"] == "fit", point["id"]
        assert point["id"] in sources and (point["url"] or point["source"]) in sources, point["id"]


def test_the_command_of_a_point_is_one_of_zerofit_plan():
    for point in POINTS:
        words = shlex.split(published.command_of(point))
        assert words[:2] == ["zerofit", "plan"] and (ROOT / words[words.index("--model") + 1] / "config.json").exists()


def test_no_figure_of_what_is_usable_is_left_out():
    usable = [point for point in POINTS if point["class"] in ("A", "B") and point["id"] in STORED["plans"]]
    assert len(compared("A", "B")) == sum(bool(point[kind]) for point in usable for kind in published.KINDS)


def test_what_is_kept_free_covers_the_error_of_allocated_bytes():
    """A share of the GPU, as MARGIN is; of the measured bytes the errors are at most 1.1 %."""
    gpus = {point["id"]: hardware.find(point["gpu"]) for point in POINTS}
    stated = [row for row in compared("A") if row["kind"] == "allocated"]
    assert len(stated) >= 25
    for row in stated:
        assert abs(row["after"] - row["measured"]) <= gpu_memory.MARGIN * gpus[row["id"]].memory_gib, row["id"]
        assert abs(row["error_after"]) <= 0.011, row["id"]


def test_differences_are_left_out_of_reserved_figures_where_the_cache_has_them():
    point = dict.fromkeys(("allocated", "reserved", "driver", "unknown", "note", "reasons"), "") | {
        "id": "x", "class": "A", "allocated": "10", "reserved": "13", "differences": "N S O", "gpu": "a100-80g",
        "gpus": "1", "method": "sft", "flags": "--zero 0",
    }  # fmt: skip
    sizes = {name: size * 2**30 for name, size in {"allocated": 7, "reserved": 11, "driver": 12}.items()}
    alike = {name: size + 2**30 for name, size in sizes.items()}  # with the outputs kept
    planned = sizes | {"alike": alike, "differences": {"N": 2**30, "S": 2**30}}
    rows = {row["kind"]: row for row in published.compare(point, planned)}
    assert rows["allocated"]["error_sure"] == pytest.approx(-0.1)  # S is supposed
    assert rows["allocated"]["after"] == 10 and rows["reserved"]["after"] == 13
    assert rows["allocated"]["error"] == pytest.approx(-0.3) and re.match("N; S; O", rows["reserved"]["why"])
