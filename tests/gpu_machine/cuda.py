"""Give a CPU build of torch the C functions of a CUDA build; they answer from the machine's specification.

torch's own Python code (is_available, device_count, get_device_name, is_bf16_supported, ...) runs on top of them.
"""

import functools
import json
import linecache
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

from . import devices

MIB = 2**20
# The texts of torch's c10/cuda/CUDAFunctions.cpp.
_DOWNLOAD = "http://www.nvidia.com/Download/index.aspx"
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version {version}). Please update your GPU driver by "
    f"downloading and installing a new version from the URL: {_DOWNLOAD} Alternatively, go to: https://pytorch.org to "
    "install a PyTorch version that has been compiled with your version of the CUDA driver."
)
UNKNOWN = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    f"{_DOWNLOAD}"
)


class Runtime:
    """The CUDA runtime of one process. Methods with an upper-case letter stand in for torch._C's of the same name."""

    def __init__(self, torch):
        self.torch, self.spec = torch, devices.read_spec()
        self.current, self.bad_fork = 0, False

    @functools.cached_property
    def problem(self) -> str:
        """Say in torch's words why CUDA cannot be initialized; "" where it can."""
        version = devices.driver_cuda(self.spec)
        if not self.spec["gpus"]:
            return NO_DRIVER
        if version // 1000 < int(self.spec["cuda"].split(".")[0]):
            return TOO_OLD.format(version=version)
        return "" if self.spec["torch_usable"] else UNKNOWN

    @functools.cached_property
    def devices(self) -> list[dict]:
        """Return the visible GPUs; CUDA reads CUDA_VISIBLE_DEVICES once, and a fork after that cannot use it."""
        os.register_at_fork(after_in_child=lambda: setattr(self, "bad_fork", True))
        if self.problem and self.problem != NO_DRIVER:
            warnings.warn(f"CUDA initialization: {self.problem}", UserWarning, stacklevel=4)
        return [] if self.problem else devices.visible(self.spec)

    def open(self, function: str, index: int) -> None:
        """Open a context on a device, or fail as the driver does where another process has the GPU for itself."""
        if not 0 <= index < len(self.devices):
            raise self.torch.AcceleratorError("CUDA error: invalid device ordinal")
        mode, gpu = self.spec["compute_mode"], self.devices[index]["index"]
        others = set(devices.holders(self.spec, gpu)) - {os.getpid()}
        if mode == "Prohibited" or (mode == "Exclusive_Process" and others):
            raise self.torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")
        devices.record(self.spec, function, gpu)

    def refuse(self, what: str) -> None:
        raise RuntimeError(f"the stand-in GPU computes nothing: {what}")

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self.open("mem_get_info", index)
        return devices.free_mib(self.spec, self.devices[index]) * MIB, self.properties(index).total_memory

    def properties(self, index: int) -> SimpleNamespace:
        device = self.devices[index]
        major, minor = device["capability"]
        return SimpleNamespace(
            name=device["name"], total_memory=(device["total_mib"] - device["reserved_mib"]) * MIB, major=major,
            minor=minor,
            multi_processor_count=device["multi_processor_count"], uuid=device["uuid"].partition("-")[2], warp_size=32,
            max_threads_per_multi_processor=2048, is_integrated=0, is_multi_gpu_board=0, pci_bus_id=device["index"] + 1,
        )  # fmt: skip

    def nvml_uuids(self) -> list[str]:
        if not self.spec["gpus"] or not self.spec["nvml"]:
            raise OSError("libnvidia-ml.so.1: cannot open shared object file: No such file or directory")
        return [card["uuid"] for card in self.spec["gpus"]]

    def _cuda_isInBadFork(self) -> bool:
        return self.bad_fork

    def _cuda_getDeviceCount(self) -> int:
        return len(self.devices)

    def _cuda_getArchFlags(self) -> str:
        old = "sm_50 sm_60 sm_70 " if self.spec["cuda"] < "12.8" else ""
        return f"{old}sm_75 sm_80 sm_86 sm_90 sm_100 sm_120 compute_120"

    def _cuda_getDevice(self) -> int:
        return self.current

    def _cuda_init(self) -> None:  # opens no context: GPUs' names and properties come through here
        if not self.devices:
            raise RuntimeError(self.problem or "No CUDA GPUs are available")
        self.torch.cuda.default_generators = tuple(self.torch.Generator() for _ in self.devices)

    def _cuda_setDevice(self, index: int) -> None:  # opens the context at once since torch 2.9
        self.torch.cuda.init()
        self.open("set_device", index)
        self.current = index

    def _cuda_exchangeDevice(self, index: int) -> int:
        if index not in (-1, self.current):
            self.open("device", index)
        return self._cuda_maybeExchangeDevice(index)

    def _cuda_maybeExchangeDevice(self, index: int) -> int:
        before = self.current
        self.current = before if index < 0 else index
        return -1 if index < 0 else before

    def _cuda_synchronize(self) -> None:
        self.open("synchronize", self.current)

    def _cuda_memoryStats(self, index: int) -> dict:  # torch's allocator counts by itself, without the driver
        return {}

    def _cuda_emptyCache(self, *index: int) -> None:
        return None

    _cuda_resetPeakMemoryStats = _cuda_resetAccumulatedMemoryStats = _cuda_emptyCache

    def _cuda_getCurrentRawStream(self, index: int) -> None:  # torch's compiler imports it
        self.refuse("a CUDA stream")

    def _accelerator_getAccelerator(self):
        return self.torch.device("cuda")


def install(patch=setattr) -> None:
    """Make the imported torch a CUDA build on this machine. patch: sets an attribute that a test can set back."""
    import torch

    cuda, runtime = torch.cuda, Runtime(torch)
    patch(torch.version, "cuda", runtime.spec["cuda"])
    if runtime.spec["cuda"] is None:
        return
    initialize = cuda._lazy_init

    def lazy_init() -> None:
        initialize()
        caller = sys._getframe(1)
        if "_lazy_init" not in caller.f_code.co_names:  # it did not call this, so torch's C++ code did, to allocate
            devices.record(runtime.spec, "allocation", "?")
            runtime.refuse(
                linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip() or caller.f_code.co_name
            )

    for name in dir(Runtime):
        if name.startswith(("_cuda_", "_accelerator_")):
            patch(torch._C, name, getattr(runtime, name))
    patch(cuda.nccl, "version", lambda: (2, 29, 7))
    for name, value in {
        "_lazy_init": lazy_init, "_is_in_bad_fork": runtime._cuda_isInBadFork,
        "_get_device_properties": runtime.properties,
        "_exchange_device": runtime._cuda_exchangeDevice, "_maybe_exchange_device": runtime._cuda_maybeExchangeDevice,
        "_cudart": SimpleNamespace(cudaMemGetInfo=runtime.mem_get_info), "_raw_device_uuid_nvml": runtime.nvml_uuids,
        "_raw_device_count_nvml": lambda: len(runtime.nvml_uuids()),
        "_check_bf16_tensor_supported": lambda device: True,  # torch tries it with a tensor
        # what torch itself changes when it initializes CUDA
        "_initialized": False, "_cached_device_count": None, "_queued_calls": [*cuda._queued_calls],
        "default_generators": (),
    }.items():  # fmt: skip
        patch(cuda, name, value)
    for kind in (cuda.Stream, cuda.Event, cuda.CUDAGraph):
        patch(kind, "__new__", lambda cls, *args, **options: runtime.refuse(f"torch.cuda.{cls.__name__}"))


def set_toolkit(cpp_extension, patch=setattr) -> None:
    """Let torch find the machine's CUDA toolkit, or none; by itself it looks into /usr/local/cuda too."""
    patch(cpp_extension, "CUDA_HOME", devices.read_spec()["toolkit"])


def end_with_settings(recipe) -> None:
    """End each rank when its settings are final, which it writes into the folder that GPU_MACHINE_SETTINGS names.

    The run folder, with run.json, is "run" beside it. The ranks exchange through gloo where they ask for NCCL.
    Args: recipe: the module zerofit.recipe.
    """
    import torch.distributed as dist

    from zerofit.train import network_check

    folder, open_group = Path(os.environ["GPU_MACHINE_SETTINGS"]), dist.init_process_group

    def end(settings, train_set, eval_set) -> None:
        facts = {"values": settings.written(), "source": dict(settings.source), "decisions": [*settings.decisions]}
        text = json.dumps(facts, default=str)
        (folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(text)
        settings.output_dir = str(folder.with_name("run"))
        recipe.open_run_folder(settings, train_set, eval_set)
        recipe.distributed.barrier()
        os._exit(0)

    dist.init_process_group = lambda backend=None, **more: open_group("gloo", **more | {"device_id": None})
    recipe.allocator.check_expandable_segments = lambda: None  # it would allocate
    network_check.answer = lambda settings: None  # on GPUs
    network_check.check = end
