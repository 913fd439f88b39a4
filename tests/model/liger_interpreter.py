"""Run Liger's kernels on a CPU in Triton's interpreter, in a process of its own: python liger_interpreter.py llama ...

Prints JSON: {model_type: {dtype: liger.errors(...)}}, and for llama the errors of the inputs' gradient with selective
checkpointing, {"selective": {"rope": with the rotary kernel, "no rope": without}}. With the word "split", on two ranks
of torchrun, it prints {"split": error of the gradients of rows that both split, against whole rows without Liger}.

The interpreter passes floats to a kernel as they are and lacks libdevice, so both are replaced here. It has no
arithmetic in bf16 (numpy has none): fp16 stands for both half precisions.
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import torch
import triton
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.liger import apply_liger_kernel
from triton.runtime import interpreter

from zerofit.model import attention, gradient_checkpointing
from zerofit.model.kernels import liger

SMALL = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32, "head_dim": 16, "pad_token_id": 0, "max_position_embeddings": 128,
}  # fmt: skip
CPU = torch.device("cpu")
convert = interpreter._implicit_cvt


def convert_floats(value):
    if isinstance(value, float):
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
    return convert(value)


@triton.jit
def rsqrt(x):
    return tl.rsqrt(x)


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


def selective_error(config, kernels: dict) -> float:
    """Return the relative error of the inputs' gradient with Liger's kernels and selective checkpointing."""
    policy = SimpleNamespace(
        gradient_checkpointing=True, gradient_checkpointing_every=1, gradient_checkpointing_policy="selective",
        gradient_checkpointing_kwargs={"use_reentrant": False}, activation_offload=False, use_cpu=True,
    )  # fmt: skip
    torch.manual_seed(0)
    inputs, upstream = torch.randn(2, 1, 12, config.hidden_size)
    with liger._layer(config, torch.float32, CPU) as model:
        expected = liger._results(model, inputs, upstream)["gradients of the inputs"]
        apply_liger_kernel(model, kernels | liger.NO_LOSS)
        gradient_checkpointing.enable(policy, model.train())
        found = liger._results(model, inputs, upstream)["gradients of the inputs"]
    return ((found - expected).norm() / expected.norm()).item()


def error_of_split_rows() -> float:
    """Return the relative error of a model's gradients with Liger's kernels on packed rows that two ranks split."""
    import torch.distributed as dist
    from sequence_parallel_ranks import gradients, rows

    from zerofit.data.batches import PackedCollator
    from zerofit.parallel import sequence_parallel

    def model(implementation: str):
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **SMALL | {"vocab_size": 64, "use_cache": False})
        return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)

    dist.init_process_group("gloo")
    attention.register()
    sequence_parallel.register()
    ranks = SimpleNamespace(sp_size=2, ranks_per_row=2, world_size=2, data_ranks=1, data_rank=lambda rank: 0)
    group, batch = sequence_parallel.SequenceParallel(ranks), PackedCollator(0, 2)(rows())
    expected, net = gradients(model(attention.NAME), batch), model(sequence_parallel.NAME)
    apply_liger_kernel(net, liger.NO_LOSS)
    with group.split(batch) as mine:
        found = gradients(net, mine)
    dist.all_reduce(found, group=group.group)
    dist.destroy_process_group()  # a thread of gloo that still runs at the interpreter's end aborts the process
    return ((found - expected).norm() / expected.norm()).item()


def main() -> None:
    interpreter._implicit_cvt, rms_norm.rsqrt, geglu.tanh = convert_floats, rsqrt, tanh
    liger.TOKENS = 12
    if sys.argv[1:] == ["split"]:
        print("answer", json.dumps({"split": error_of_split_rows()}))
        return
    answer = {}
    for model_type in sys.argv[1:]:
        config = AutoConfig.for_model(model_type, **SMALL)
        dtypes = {"fp32": torch.float32, "fp16": torch.float16}
        answer[model_type] = {name: liger.errors(config, dtype, None, CPU) for name, dtype in dtypes.items()}
    config = AutoConfig.for_model("llama", **SMALL)
    kernels = {"rope": {}, "no rope": {"rope": False}}
    answer["selective"] = {name: selective_error(config, which) for name, which in kernels.items()}
    print("answer", json.dumps(answer))


if __name__ == "__main__":
    main()
