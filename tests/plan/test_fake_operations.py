"""Operations of a simulated rank by FakeOperations, against torch's FakeTensorMode below a stack of plain modes."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode

from zerofit.base import hardware
from zerofit.config import parse
from zerofit.plan import fake_operations, simulate

CONFIGS = ROOT / "tests" / "configs"
GPU = hardware.GPUS["h100-80g"]
ON = "--gradient_checkpointing true"

# In each fork that `plain` marks, FakeTensorMode answers every operation, and each tracker has a mode of its own.
CODE = """
import contextlib, json, os, sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from zerofit.plan import simulate, simulated_rank
from zerofit.train import memory_tracker

aten = torch.ops.aten

class Answers(TorchDispatchMode):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
        if operation is aten.nonzero.default:
            count = args[0].numel() - self.rows.get(args[0].numel(), 0)
            return args[0].new_empty((count, args[0].ndim), dtype=torch.long)
        if operation is aten.index.Tensor and args[1][0].dtype == torch.bool and len(args[1]) == 1:
            mask = args[1][0]
            return args[0].new_empty(mask.numel(), *args[0].shape[mask.ndim :])
        if operation is aten.allclose.default:
            return True
        if operation is aten._to_copy.default and getattr(args[0], "constant", None) is not None:
            args[0].constant = None
        return operation(*args, **(kwargs or {}))

class Plain:
    followed = staticmethod(memory_tracker.Watch)

def plain(stack, rows):
    stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    stack.enter_context(Answers(rows))
    return Plain

answer_and_end = simulated_rank._answer_and_end

def marked(number, question):
    if number % 2:
        simulated_rank._fake_operations = plain
    answer_and_end(number, question)

simulated_rank._answer_and_end = marked
from zerofit.base import process
process.begin()
simulated_rank.main([])
"""

FEW = [
    ("full stage 2", TINY / "model", "sft", "--zero 2 --gradient_checkpointing true", 8, 7),
    ("QLoRA stage 3", TINY / "model", "lora", "--zero 3 --load_in_4bit true", 8, 0),
    ("offload", TINY / "model", "sft", f"--zero 3 --offload all --activation_offload true {ON}", 4, 0),
    ("split matrices", TINY / "model", "sft", "--zero 1 --tp_size 2 --eval_fraction 0.1", 4, 0),
]
MORE = [
    ("one GPU", CONFIGS / "llama3.1-8b", "sft", "--zero 0", 1, 0),
    ("stage 1 offload", CONFIGS / "llama3.1-8b", "sft", f"--zero 1 --offload optimizer {ON}", 8, 7),
    ("stage 2", CONFIGS / "qwen3-8b", "sft", "--zero 2 --packing true --eval_fraction 0.1", 8, 7),
    ("stage 3", CONFIGS / "llama3.1-8b", "sft", "--zero 3", 64, 63),
    ("selective", CONFIGS / "llama3.1-8b", "sft", f"--zero 3 {ON} --gradient_checkpointing_policy selective", 8, 0),
    ("LoRA", CONFIGS / "qwen3-8b", "lora", f"--zero 3 {ON}", 8, 7),
    ("QLoRA", CONFIGS / "mistral-7b", "lora", "--load_in_4bit true", 1, 0),
    ("DPO", CONFIGS / "llama3.2-1b", "dpo", f"--zero 3 {ON}", 8, 0),
    ("DPO with LoRA", CONFIGS / "llama3.2-1b", "dpo", "--adapter lora --zero 2", 8, 0),
    ("split rows", CONFIGS / "llama3.1-8b", "sft", f"--sp_size 2 --zero 3 {ON}", 8, 1),
    ("8-bit states", CONFIGS / "llama3.2-1b", "sft", "--zero 2 --optim adamw_bnb_8bit", 8, 0),
    ("pure bf16", CONFIGS / "llama3.2-1b", "sft", "--zero 2 --pure_bf16 true", 8, 0),
    ("experts", CONFIGS / "qwen3-moe-30b", "sft", f"--zero 3 {ON}", 8, 0),
    ("eager attention", CONFIGS / "gemma2-2b", "sft", "--zero 3 --attn_implementation eager", 8, 0),
]


def questions(cases):
    """Each question twice: the second is answered by the plain modes."""
    for _, model, recipe, flags, ranks, rank in cases:
        words = ["--model", str(model), "--data", "none", "--max_length", "512", *flags.split()]
        words += ["--per_device_train_batch_size", "2", "--effective_batch_size", "128"]
        overrides = {} if model.is_relative_to(TINY) else {"num_hidden_layers": 3}
        question = simulate.Question(parse.request(recipe, words), ranks, rank, gpu=GPU, overrides=overrides)
        yield from [question.as_json()] * 2


def answers(cases):
    """Return {case: (answer, that of the plain modes)}."""
    asked = json.dumps(list(questions(cases)))
    done = subprocess.run([sys.executable, "-c", CODE], input=asked + "\n", capture_output=True, text=True, cwd=ROOT,
                          env=simulate.environment(fake=True, cuda=False))  # fmt: skip
    mark = simulate.ANSWER_MARK
    lines = [line.removeprefix(mark) for line in done.stdout.splitlines() if line.startswith(mark)]
    found = dict(json.loads(line) for line in lines)
    assert len(found) == 2 * len(cases), done.stderr
    return {case[0]: (found[2 * i], found[2 * i + 1]) for i, case in enumerate(cases)}


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cases", [FEW, MORE], ids=["few", "more"])
def test_every_byte_is_that_of_torchs_own_mode(cases):
    for case, (answer, plain) in answers(cases).items():
        assert {"failed", "mistake", "trace"}.isdisjoint(plain), (case, plain)
        assert answer.pop("seconds") > 0 and plain.pop("seconds") > 0
        assert answer == plain, case
        assert answer["allocator"]["allocated"] > 0


def test_products_of_experts_in_fp32_have_a_shape():
    """Torch computes them on a CPU; up to 2.13 its meta kernel knows bf16 only."""
    sizes = {"mat_a": (6, 8), "mat_b": (2, 8, 16)}
    with FakeTensorMode() as fake:
        a, b = (torch.empty(size) for size in sizes.values())
        ends = torch.empty(2, dtype=torch.int32)
        try:
            torch._grouped_mm(a, b, offs=ends)
        except RuntimeError as error:
            assert "BF16" in str(error)
        else:  # which has a shape in fp32
            assert Version(torch.__version__) >= Version("2.14"), "`_grouped_product` is no longer needed"
        with fake_operations.FakeOperations(fake, {}):
            product = torch._grouped_mm(a, b, offs=ends)
    assert product.shape == (6, 16) and product.dtype == torch.float32
    real = torch._grouped_mm(
        *(torch.ones(size) for size in sizes.values()), offs=torch.tensor([2, 6], dtype=torch.int32)
    )
    assert real.shape == product.shape and real.stride() == product.stride()


def test_an_index_of_the_last_dimensions_has_a_shape():
    """As Falcon takes the keys and values of its heads: the first indices are None."""
    with FakeTensorMode() as fake, fake_operations.FakeOperations(fake, {}):
        taken = torch.empty(2, 3, 6, 4)[..., [-2], :]
    assert taken.shape == (2, 3, 1, 4)
