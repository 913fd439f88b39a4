"""Patch torch, DeepSpeed, transformers, accelerate and bitsandbytes for a simulated rank (docs/patches.toml)."""

import contextlib
import importlib.util
import sys
import types

from zerofit.base import allocator, distributed
from zerofit.plan import caching_allocator


def fake_other_ranks() -> None:
    """Disable DeepSpeed's checks of ranks and norms, since the fake group leaves arbitrary values in buffers."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3, stage_1_and_2

    for module in (partition_parameters, partitioned_param_coordinator, stage3):
        module.assert_ints_same_as_other_ranks = lambda *args, **kwargs: None
    for module in (stage3, stage_1_and_2):
        module.is_invalid_grad_norm = lambda norm: False
    _make_meshes_of_real_tensors()
    _skip_check_of_rows()
    distributed.skip_inference_op()


def _make_meshes_of_real_tensors() -> None:
    """Create torch's device meshes from real tensors, whose values torch reads."""
    from torch.distributed import device_mesh

    make = device_mesh.init_device_mesh

    def init_device_mesh(device_type, *args, **kwargs):
        with real_tensors():
            return make("cpu", *args, **kwargs)

    device_mesh.init_device_mesh = init_device_mesh


def _skip_check_of_rows() -> None:
    """Remove AutoTP's check that the ranks of a group have the same rows, since it compares values."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    configure = DeepSpeedEngine._configure_tensor_parallel_states

    def without_check(self, model):
        configure(self, model)
        self.first_dataloader_check.remove()

    DeepSpeedEngine._configure_tensor_parallel_states = without_check


def fake_adam() -> None:
    """Replace the C++ code of DeepSpeed's Adam, which would read the memory of fake tensors.

    offload_optimizer.ratio uses it on the CPU, "optimizer" in a DeepSpeed file on a GPU. It updates in place without
    allocations; Python allocates the states (deepspeed/ops/adam/cpu_adam.py, fused_adam.py).
    """
    from deepspeed.ops.op_builder import CPUAdamBuilder, FusedAdamBuilder

    names = ("create_adam", "adam_update", "destroy_adam", "multi_tensor_adam")
    module = types.SimpleNamespace(**dict.fromkeys(names, lambda *args: None))
    CPUAdamBuilder.load = FusedAdamBuilder.load = lambda self, verbose=True: module


MUON = "deepspeed.runtime.zero.muon.muon_optimizer"


def stub_muon(settings) -> None:
    """Replace DeepSpeed's Muon (0.19.8) by an empty class if the job uses another optimizer.

    Every engine imports it for an isinstance check. Its functions are compiled, so the import loads torch._inductor,
    which takes two seconds per simulation.
    """
    named = f"{settings.optim} {(settings.deepspeed or {}).get('optimizer', '')}".lower()
    if MUON not in sys.modules and "muon" not in named and settings.optim not in settings.recipe.optimizers:
        module = types.ModuleType(MUON)
        module.MuonWithAuxAdam = type("MuonWithAuxAdam", (), {})
        sys.modules[MUON] = module


def register_gpu(tracker, total_bytes: int, overlaps: bool) -> None:
    """Register a fake torch device "gpu" and a DeepSpeed accelerator; device "cpu" counts as host memory.

    Args: tracker: the MemoryTracker of the device, which records when DeepSpeed empties the allocator's cache or
        changes the stream; overlaps: DeepSpeed's overlap_comm, without which it uses a single stream; total_bytes: the
        memory of the planned GPU, not of this machine. DeepSpeed flattens the weights of stages 1 and 2 on the GPU if
        they fit twice, else in host memory (runtime/zero/stage_1_and_2.py).
    """
    import torch
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Backend(_DummyBackendModule):
        Stream = torch.cpu.Stream  # does nothing
        stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

        def get_amp_supported_dtype(self):
            return [torch.bfloat16, torch.float16, torch.float32]

    _setup_privateuseone_for_python_backend("gpu", backend_module=Backend())
    _register_autocast()
    _register_kernels()
    from deepspeed.accelerator import set_accelerator

    set_accelerator(_accelerator(tracker, total_bytes, overlaps))
    _patch_torch_tensor()
    torch.cuda.get_device_name = lambda *_: "a simulated GPU"  # ThroughputMeter reads it


def _accelerator(tracker, total_bytes: int, overlaps: bool):
    """Return DeepSpeed's accelerator for device "gpu"; args as for `register_gpu`."""
    import torch
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    typed = {
        "ByteTensor": torch.uint8,
        "FloatTensor": torch.float32,
        "HalfTensor": torch.float16,
        "BFloat16Tensor": torch.bfloat16,
        "IntTensor": torch.int32,
        "LongTensor": torch.int64,
        "DoubleTensor": torch.float64,
    }

    class Accelerator(CPU_Accelerator):
        def __init__(self):
            super().__init__()
            self._name = "gpu"  # stage3.py updates the sub-groups that its ratio leaves on the GPU on this device

        def device_name(self, device_index=None):
            return "gpu" if device_index is None else "gpu:0"

        def current_device(self):
            return 0

        def current_device_name(self):
            return "gpu:0"

        def is_fp16_supported(self):
            return True

        def pin_memory(self, tensor, *args, **kwargs):
            # torch copies to pinned memory; the source stays alive until it is freed
            size = tensor.numel() * tensor.element_size()
            block = torch.empty(allocator.pinned_bytes(size), dtype=torch.uint8, device="cpu")
            return block[:size].view(tensor.dtype).view(tensor.shape)

        def available_memory(self, device_index=None):
            return total_bytes - tracker.live_bytes

        def empty_cache(self):
            tracker.events.append((caching_allocator.EMPTY_CACHE, 0, 0))

        @contextlib.contextmanager
        def stream(self, stream):
            before, tracker.stream = tracker.stream, int(overlaps)
            try:
                yield
            finally:
                tracker.stream = before

        def on_accelerator(self, tensor):
            return tensor.device.type == "gpu"

        def __getattribute__(self, name):
            if name in typed:
                return lambda *size: _typed(torch, typed[name], *size)
            return super().__getattribute__(name)

    return Accelerator()


def _patch_torch_tensor() -> None:
    """Make torch.tensor return an empty tensor on device "gpu", since no kernel can fill it."""
    import torch
    from deepspeed.runtime.zero import partition_parameters

    plain = torch.tensor

    def tensor(data, *args, device=None, **kwargs):
        # torch.get_default_device() would recurse: in `with torch.device("meta")` it calls torch.tensor.
        target = torch.empty(0).device if device is None else torch.device(device)
        if target.type != "gpu":
            return plain(data, *args, device=device, **kwargs)
        shape = plain(data, *args, device="cpu", **kwargs)
        return torch.empty(shape.shape, dtype=shape.dtype, device="gpu:0")

    torch.tensor = partition_parameters._orig_torch_tensor = tensor  # zero.Init restores the latter
    torch.nn.functional.softmax = _softmax_of_cuda(torch.nn.functional.softmax)


def _softmax_of_cuda(plain, kind: str = "gpu"):
    """Return a softmax with CUDA's allocations, instead of the CPU's, for tensors on devices of type `kind`.

    aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: `Tensor tmp = grad * output;`, after the result is
    allocated. An fp32 softmax reads an fp16 input directly (half_to_float), other inputs from an fp32 copy
    (aten/src/ATen/native/SoftMax.cpp).
    """
    import torch

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, dim, stacklevel, dtype):
            direct = x.dtype == torch.float16 and dtype == torch.float32
            output = torch._softmax(x, dim, True) if direct else plain(x, dim, stacklevel, dtype)
            ctx.save_for_backward(output)
            ctx.dim, ctx.dtype = dim, x.dtype
            return output

        @staticmethod
        def backward(ctx, gradient):
            (output,) = ctx.saved_tensors
            direct = ctx.dtype in (torch.float16, output.dtype)
            result = torch.ops.aten._softmax_backward_data(
                gradient, output, ctx.dim, ctx.dtype if direct else output.dtype
            )
            product = gradient * output
            del product
            return result.to(ctx.dtype), None, None, None

    def softmax(input, dim=None, _stacklevel=3, dtype=None):
        if input.device.type != kind or dim is None:
            return plain(input, dim, _stacklevel, dtype)
        return Softmax.apply(input, dim, _stacklevel, dtype)

    return softmax


def skip_triton_kernels() -> None:
    """Skip Triton's kernels (--use_liger_kernel); they write into tensors that their callers allocate."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import jit

    jit.JITFunction.run = lambda self, *args, grid, warmup, **kwargs: None


def set_device(arguments, device) -> None:
    """Set the device of TrainingArguments and of accelerate, which do not support device "gpu"."""
    from accelerate.state import PartialState

    PartialState._shared_state["device"] = arguments.__dict__["_setup_devices"] = device


_HALF = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv")

_SINGLE = (
    *("layer_norm", "softmax.int", "log_softmax.int", "nll_loss", "nll_loss_nd", "cross_entropy_loss"),
    "pow.Tensor_Scalar",
)

_registrations = []  # torch.library objects for device "gpu", which have to stay alive


def _register_kernels() -> None:
    """Register backward operations on device "gpu" that have a CUDA kernel.

    Without a kernel torch decomposes silu_backward, which allocates five more tensors of its size.
    """
    import torch

    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in ("silu_backward", "mish_backward"):  # all such operations in torch's dispatcher
        library.impl(name, lambda gradient, x: torch.empty_like(gradient))
    _registrations.append(library)


def _register_autocast() -> None:
    """Register autocast for device "gpu" with CUDA's casts and cache (aten/src/ATen/autocast_mode.h).

    It keeps half-precision copies of the weights until the outermost autocast region ends.
    """
    import torch

    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    fallback = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel)
    casts, library, clear = {}, torch.library.Library("aten", "IMPL", "AutocastPrivateUse1"), torch.clear_autocast_cache

    def cast(value, dtype):
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()) or value.dtype in (dtype, torch.float64):
            return value
        if dtype == torch.float32 or not (value.requires_grad and value.is_leaf and value.dtype == torch.float32):
            return value.to(dtype)
        if id(value) not in casts:
            casts[id(value)] = value.to(dtype)
        return casts[id(value)]

    def register(name, single):
        packet = getattr(torch.ops.aten, name.split(".")[0])
        operation = getattr(packet, name.partition(".")[2] or "default")

        def with_casts(*args, **kwargs):
            dtype = torch.float32 if single else torch.get_autocast_dtype("gpu")
            with torch._C._ExcludeDispatchKeyGuard(key):
                args = [cast(value, dtype) for value in args]
                return operation(*args, **{name: cast(value, dtype) for name, value in kwargs.items()})

        library.impl(name, with_casts)

    for name in (*_HALF, *_SINGLE):
        register(name, name in _SINGLE)

    def clear_cache():
        casts.clear()
        clear()

    torch.clear_autocast_cache = clear_cache
    _registrations.extend([fallback, library])


def _typed(torch, dtype, *size):
    if size and isinstance(size[0], int):
        return torch.empty(size, dtype=dtype, device="gpu:0")
    return torch.tensor(size[0] if size else [], dtype=dtype, device="gpu:0")


def patch_value_branches(padded: bool, row: int) -> None:
    """Make library code that branches on tensor values take the branch for real rows of `row` tokens."""
    import torch
    import transformers.masking_utils as masks

    from zerofit.model import attention as model_attention
    from zerofit.parallel import sequence_parallel

    torch.Generator = _generator_class(torch.Generator)
    # torch's optimizers choose their foreach implementation by the parameters' exact type.
    optimizers = importlib.import_module("torch.optim.optimizer")
    optimizers._foreach_supported_types.append(torch._subclasses.fake_tensor.FakeTensor)
    masks.find_packed_sequence_indices = lambda position_ids: None
    masks.is_tracing = lambda *args, **kwargs: False
    masks.fast_all = lambda mask: not padded
    if not padded:
        _skip_recurrent_masks(masks)
    for register in (model_attention.register, sequence_parallel.register):
        register(lambda bounds: [(i * row, (i + 1) * row) for i in range(bounds[1:].numel())])
    torch.nn.Module._apply = _apply
    torch.nn.parallel.DistributedDataParallel = _distributed_data_parallel()


def _skip_recurrent_masks(masks) -> None:
    """Pass no mask to linear attention and state spaces, like transformers for rows without padding."""
    plain = masks.create_recurrent_attention_mask
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and vars(module).get(plain.__name__) is plain:
            module.create_recurrent_attention_mask = lambda *args, **kwargs: None


def disable_inference_mode() -> None:
    """Replace inference_mode by no_grad: same bytes, but composite operations (cross entropy) show their parts."""
    import torch

    torch.inference_mode = lambda mode=True: torch.set_grad_enabled(not mode and torch.is_grad_enabled())


def _generator_class(plain):
    """Return a torch.Generator that ignores its device. It is a class because later imports annotate with it."""

    class Generator(plain):
        def __new__(cls, device=None):
            return super().__new__(cls)

    return Generator


def real_tensors():
    """Return a context without the fake modes, in which new tensors have values."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def _apply(module, change, recurse=True):
    """Replace nn.Module._apply (to, bfloat16 ...), which swaps tensors; fake tensors cannot be swapped."""
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                new = change(parameter.data)
                if (new.dtype, new.device) != (parameter.dtype, parameter.device):
                    parameter.data = new
        for name, buffer in part._buffers.items():
            if buffer is not None:
                buffer.constant = None  # a value that fake tensors store and would compute with
                part._buffers[name] = change(buffer)
    return module


def _distributed_data_parallel():
    """Return a replacement with the memory of DistributedDataParallel, whose C++ code reads tensors."""
    import torch

    class DistributedDataParallel(torch.nn.Module):
        def __init__(self, module, *args, **kwargs):
            super().__init__()
            self.module = module
            trainable = [p for p in module.parameters() if p.requires_grad]
            # A storage per dtype replaces the buckets; the gradients are views of it (train/trainer.py).
            self.buckets, by_dtype = {}, {}
            for p in trainable:
                by_dtype.setdefault(p.dtype, []).append(p)
            for dtype, parameters in by_dtype.items():
                sizes = [p.numel() for p in parameters]
                self.buckets[dtype] = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
                for p, view in zip(parameters, self.buckets[dtype].split(sizes), strict=True):
                    self._hook(p, view.view(p.shape))

        def _hook(self, parameter, view):
            def into_bucket(p):
                p.grad = view

            parameter.register_post_accumulate_grad_hook(into_bucket)

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

        @contextlib.contextmanager
        def no_sync(self):
            yield

    return DistributedDataParallel


def register_attention(name: str, one_by_one: bool = False) -> None:
    """Register an attention `name` with FlashAttention 2's allocations (flash_api.cpp), without values.

    The forward saves q, k, v, the output and an fp32 number per query; the backward accumulates dq in fp32.
    Args: one_by_one: whether it loops over documents, repeats k and v, and joins the outputs.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    from zerofit.model import attention as model_attention
    from zerofit.model import gradient_checkpointing
    from zerofit.parallel import sequence_parallel

    if name == "eager":
        return

    def results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, heads, tokens, _ = q.shape
        out = q.new_empty(rows, tokens, heads, v.shape[-1]).transpose(1, 2)
        return out, q.new_empty(rows, heads, tokens, dtype=torch.float32)

    # A single operation, whose results selective checkpointing keeps.
    operation = torch.library.custom_op(gradient_checkpointing.SIMULATED_ATTENTION, results, mutates_args=())
    operation.register_fake(results)

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):  # (rows, heads, tokens, head_dim) views of (rows, tokens, heads, head_dim)
            out, sums = operation(q, v)
            ctx.save_for_backward(q, k, v, out, sums)
            return out

        @staticmethod
        def backward(ctx, upstream):
            q, k, v, _, _ = ctx.saved_tensors
            rows, heads, tokens, size = q.shape
            tokens, size = -(-tokens // 128) * 128, -(-size // 32) * 32
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            shapes = ((rows, heads, tokens), (rows, tokens, heads, size))
            work = [q.new_empty(shape, dtype=torch.float32) for shape in shapes]
            if k.shape[1] != heads:  # dk and dv per query head, summed afterwards
                work += [k.new_empty(rows, k.shape[2], heads, x.shape[-1]) for x in (k, v)]
            del work
            return dq, dk, dv

    def attention(module, query, key, value, mask, *args, **kwargs):
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
        groups = query.shape[1] // key.shape[1]
        is_packed = name in (model_attention.NAME, sequence_parallel.NAME)
        loops = one_by_one or (is_packed and not model_attention.varlen_takes(query.shape[-1]))
        if loops and groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        out = Flash.apply(query.to(dtype), key.to(dtype), value.to(dtype))
        if loops:
            out = torch.cat([out], dim=2)
        if (sinks := kwargs.get("s_aux")) is not None:  # transformers' flex_attention scales the output by their share
            share = sinks.to(torch.promote_types(sinks.dtype, dtype)).view(1, -1, 1, 1).expand(*out.shape[:3], 1)
            out = (out * share.exp()).to(query.dtype)
        return out.transpose(1, 2).contiguous(), None

    if name == sequence_parallel.NAME:  # its exchanges run unchanged
        model_attention.packed_attention = attention
        return
    AttentionInterface.register(name, attention)
    if name != "sdpa":
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


def _dequantized(inputs, state) -> list:
    """Return the tensors that bitsandbytes allocates on a GPU to multiply many rows by 4-bit weights.

    See _dequant_linear_fallback in bitsandbytes/backends/cuda/ops.py; up to 1,536 rows a kernel may need none.
    """
    import torch

    if inputs.device.type != "gpu" or inputs.numel() // inputs.shape[-1] <= 1536:
        return []
    constants = torch.empty_like(state.absmax, dtype=torch.float32)
    return [constants, constants + state.offset, torch.empty(state.shape, dtype=inputs.dtype, device=inputs.device)]


def quantize(net, device: str) -> None:
    """Replace linear layers by bitsandbytes' NF4 layers and doubly quantized constants, without memory."""
    import bitsandbytes
    import torch

    from zerofit.model.kernels import linear_attention

    class Linear4bit(bitsandbytes.nn.Linear4bit):
        """Linear4bit with a plain Parameter: bitsandbytes' Params4bit cannot wrap a tensor without memory."""

        def __init__(self, linear):
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
            self.compute_dtype = linear.weight.dtype
            packed, state = bitsandbytes.functional.quantize_4bit(
                torch.empty_like(linear.weight, device=device),
                blocksize=64,
                compress_statistics=True,
                quant_type="nf4",
                quant_storage=linear.weight.dtype,
            )
            self.weight = torch.nn.Parameter(packed, requires_grad=False)
            self.weight.compress_statistics, self.weight.quant_type, self.weight.quant_state = True, "nf4", state

        def forward(self, x):
            state, bias = self.weight.quant_state, None if self.bias is None else self.bias.to(self.compute_dtype)
            inputs = x.to(self.compute_dtype)
            dequantized = _dequantized(inputs, state)
            out = bitsandbytes.matmul_4bit(inputs, self.weight, bias=bias, quant_state=state)
            del dequantized
            return out.to(x.dtype)

    head, read = net.get_output_embeddings(), linear_attention.read_by_kernels(net.config)
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child is not head and name not in read:
                setattr(parent, name, Linear4bit(child))
    replaced = {}  # a tied head stays tied
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in replaced:
                    empty = torch.empty_like(parameter, device=device)
                    replaced[parameter] = torch.nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = replaced[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    net.is_loaded_in_4bit = True
