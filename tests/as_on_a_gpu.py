"""Let CPU ranks compute in fp16 and offload activations, as GPUs do: the numbers are those of a GPU, not the speed.

result.json then has "offloaded": how many tensors this rank's layers have saved in host memory.
"""

import functools
from unittest import mock

import torch
import transformers.modeling_utils
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch.autograd.graph import save_on_cpu

from zerofit.model import gradient_checkpointing
from zerofit.train import run

offloaded = []
enable, write_result = gradient_checkpointing.enable, run.write_result


class CountedOffload(save_on_cpu):
    def __init__(self, **of_a_gpu):
        super().__init__()
        self.pack_hook = functools.partial(counted, self.pack_hook)


def counted(pack_hook, *tensors):
    offloaded.append(1)
    return pack_hook(*tensors)


def enable_as_on_a_gpu(settings, model):
    offloaded.clear()
    with mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cpu")):
        enable(settings.replace(use_cpu=False), model)


def write_result_with_count(trainer, metrics):
    write_result(trainer, metrics | {"offloaded": len(offloaded)})


CPU_Accelerator.is_fp16_supported = lambda self: True  # slow where oneDNN has no kernels for it
transformers.modeling_utils.save_on_cpu = CountedOffload
gradient_checkpointing.enable = enable_as_on_a_gpu
object.__setattr__(gradient_checkpointing.TECHNIQUES[0], "install", enable_as_on_a_gpu)
run.write_result = write_result_with_count
