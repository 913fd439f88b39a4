"""LoRA's product added into the layer's output: peft's numbers, gradients by an fp64 oracle, on every kind of base."""

import copy

import pytest
import torch
from conftest import TINY, run_world, slow_but, two_layers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from zerofit.config import resolve
from zerofit.model import fused_lora

# A scaling of 20 / 16, or 20 / sqrt(16): with a power of two both compute the same bits, and nothing would be compared.
COMMON = ["--model", two_layers(), "--data", str(TINY / "train.jsonl"), "--max_samples", "160",
          "--max_steps", "20", "--effective_batch_size", "8", "--logging_steps", "1", "--num_samples", "0",
          "--learning_rate", "1e-3", "--bf16", "false", "--lora_alpha", "20"]  # fmt: skip


class Net(torch.nn.Module):
    """Two linear layers, the second with a bias; they share an input, as an attention's do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 10, bias=False), torch.nn.Linear(6, 10)

    def forward(self, x):
        return (self.first(x).sin() * self.second(x)).sum()


def with_lora(dtype=torch.float64, **more):
    torch.manual_seed(0)
    net = get_peft_model(Net(), LoraConfig(r=3, lora_alpha=5, target_modules=["first", "second"], **more))
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return net.to(dtype)


def settings(**values):
    return resolve.resolve_settings("lora", [], 1).replace(**values)


def gradients(net, x) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    net.zero_grad()
    loss = net(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in net.parameters() if p.requires_grad)]


@pytest.mark.oracle
@pytest.mark.parametrize("more", [{}, {"use_rslora": True}])
@pytest.mark.parametrize("changes", [{}, {"zero": 3}, {"gradient_checkpointing_policy": "selective"}])
def test_values_and_gradients_are_those_of_the_formula_in_fp64(more, changes):
    net, x = with_lora(**more), torch.randn(2, 5, 6, dtype=torch.float64)
    scaling = 5 / (3**0.5 if more else 3)
    plain, sums = Net().double(), {}
    for name in ("first", "second"):
        layer = getattr(net.base_model.model, name)
        a, b = (part["default"].weight.detach().clone().requires_grad_() for part in (layer.lora_A, layer.lora_B))
        base = layer.base_layer
        sums[name] = a, b, lambda x, a=a, b=b, base=base: base(x) + scaling * (x @ a.t() @ b.t())
    plain.first.forward, plain.second.forward = sums["first"][2], sums["second"][2]
    inputs = x.clone().requires_grad_()
    expected = plain(inputs)
    expected.backward()
    expected = [expected.detach(), inputs.grad, *(p.grad for name in sums for p in sums[name][:2])]
    fused_lora.install(settings(**changes), net)
    for one, other in zip(gradients(net, x), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_peft_computes_where_a_layer_is_not_plain():
    for more in ({"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}):
        net = with_lora(torch.float32, **more)
        fused, x = copy.deepcopy(net), torch.randn(2, 5, 6)
        fused_lora.install(settings(), fused)
        found = []
        for one in (net, fused):
            torch.manual_seed(1)
            found.append(gradients(one, x))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), more
    net, x = with_lora(), torch.randn(2, 5, 6, dtype=torch.float64)
    fused_lora.install(settings(), net)
    with net.disable_adapter():
        assert torch.equal(net(x), net.base_model.model.first.base_layer(x).sin().mul(
            net.base_model.model.second.base_layer(x)).sum())  # fmt: skip
    before = net(x)
    net.merge_adapter()
    torch.testing.assert_close(net(x), before, rtol=1e-12, atol=1e-12)


def test_no_tensor_of_the_outputs_size_is_made_beside_the_output():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Made(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.outputs = []  # kept, as freed memory would be given to the next one

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            out = operation(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.outputs.append(out)
            return out

    counts = {}
    for fused in (True, False):
        net = with_lora(torch.float32)
        if fused:
            fused_lora.install(settings(), net)
        layer, x = net.base_model.model.first, torch.randn(4, 6)
        with Made() as made:
            layer(x)
        sized = [out for out in made.outputs if out.shape[-1:] == (10,) and 4 in out.shape]
        counts[fused] = len({out.untyped_storage().data_ptr() for out in sized})
    assert counts == {True: 1, False: 4}


def check_equal_within_rounding(one, other, near: float = 1e-6) -> None:
    """Compare losses and adapters. near: difference of two weights of adapters that may be."""
    assert one.losses == pytest.approx(other.losses, rel=1e-6)
    assert one.losses != other.losses, "the same was computed"
    weights = [load_file(run.folder / "final" / "adapter_model.safetensors") for run in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-4, atol=near)


@pytest.mark.parametrize("zero", slow_but(range(4), (2,)))
def test_20_steps_are_pefts(zero, tmp_path):
    cases = {
        f"{name}-{zero}": ("lora", [*COMMON, "--zero", str(zero), "--fused_lora", fused])
        for name, fused in (("fused", "true"), ("peft", "false"))
    }  # fmt: skip
    runs = run_world(2, cases, tmp_path)
    one, other = runs[f"fused-{zero}"], runs[f"peft-{zero}"]
    assert one.json("result.json")["world_size"] == 2 and len(one.losses) == 20
    # Adam divides by a gradient's size: at stage 0 one weight, whose gradients are near 0, is 1.6e-5 off.
    check_equal_within_rounding(one, other, near=5e-5 if zero == 0 else 1e-6)


@pytest.mark.parametrize("bits", slow_but(["4", "8"], []))
def test_packed_bases_train_as_with_peft(bits, tmp_path):
    packed = [*COMMON, "--zero", "0", f"--load_in_{bits}bit", "true", "--max_steps", "10"]
    cases = {str(fused): ("lora", [*packed, "--fused_lora", str(fused).lower()]) for fused in (True, False)}
    runs = run_world(1, cases, tmp_path)
    assert runs["True"].losses == pytest.approx(runs["False"].losses, rel=1e-5 if bits == "4" else 2e-2)
    assert runs["True"].losses != runs["False"].losses


@pytest.mark.slow
def test_20_steps_of_a_sharded_base_in_4_bits_are_pefts(tmp_path):
    """Rank-stabilized."""
    flags = [*COMMON, "--zero", "3", "--load_in_4bit", "true", "--use_rslora", "true"]
    cases = {fused: ("lora", [*flags, "--fused_lora", fused]) for fused in ("true", "false")}
    runs = run_world(2, cases, tmp_path)
    one, other = runs["true"], runs["false"]
    assert one.json("result.json")["world_size"] == 2 and len(one.losses) == 20
    check_equal_within_rounding(one, other)
