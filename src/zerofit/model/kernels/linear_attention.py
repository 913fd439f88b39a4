"""Keep packed documents apart in convolutions, linear attention and state spaces; report missing kernels.

transformers computes these layers with PyTorch functions that kernels of a package replace: causal_conv1d,
flash-linear-attention (fla), mamba_ssm. Kernels get the documents' boundaries by `seq_idx` or `cu_seqlens`. Without the
package transformers raises an error (from 5.20 on), or mixes the documents (before, or if a layer passes neither). Here
its PyTorch function is called for each document. Mamba-1's scan does not support boundaries.
"""

import functools
import inspect
import re
import sys
from importlib.util import find_spec

import torch

from zerofit.job.technique import Technique
from zerofit.model.image_text import classes

# Package with kernels for linear attention and state space layers -> (pip requirement, measured cost without it).
PACKAGES = {
    "fla": (
        "flash-linear-attention",
        "Qwen3.5-9B took 1.22 instead of 0.70 s a step on 8 B200 (transformers issue 48718)",
    ),
    "mamba_ssm": ("mamba-ssm --no-build-isolation", ""),
    "causal_conv1d": ("causal-conv1d --no-build-isolation", ""),
}

ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention"}  # values of config.layer_types

# Kernel -> token axis of its first argument; other kernels are for single tokens in generation.
TOKEN_AXIS = {
    "causal_conv1d_fn": 2,
    "chunk_gated_delta_rule": 1,
    "chunk_kda": 1,
    "mamba_chunk_scan_combined": 1,
    "mamba_split_conv1d_scan_combined": 1,  # returns None in PyTorch: the layer then calls the convolution and the scan
}

# Kernel -> linear layers whose weight is read directly, bypassing an adapter or bitsandbytes' unpacking.
READS_WEIGHTS = {
    "mamba_split_conv1d_scan_combined": ("out_proj",),
    "mamba_inner_fn": ("x_proj", "dt_proj", "out_proj"),
    "selective_scan_fn": ("dt_proj",),  # the layer computes dt_proj.weight @ inputs
}

WITHOUT_BOUNDARIES = {"selective_scan_fn", "mamba_inner_fn"}  # kernels of Mamba-1

CHUNK = 64  # default chunk size of the delta rules, in tokens

_KERNEL = re.compile(r'@use_kernel_func_from_hub_with_fallback\(\s*"(\w+)",\s*"(\w+)"[^)]*\)\s*def (\w+)\(')


def kernels_of(config) -> dict[str, tuple[str, str]]:
    """Return {function in the model's source: (kernel that replaces it, its package)}.

    transformers names kernel and package in the source (use_kernel_func_from_hub_with_fallback). LFM3's convolution is
    too wide for a kernel, so its package is "".
    """
    source = _source(config)
    kernels = {function: (kernel, package) for kernel, package, function in _KERNEL.findall(source)}
    if "\ndef causal_conv1d_fn(" in source:
        kernels.setdefault("causal_conv1d_fn", ("causal_conv1d_fn", ""))
    return kernels


def missing_kernels(config) -> tuple[str, str] | None:
    """Return (warning about missing packages, install command) for layers other than attention, or None.

    transformers computes a layer in PyTorch if its package cannot be imported.
    """
    if set(getattr(config.get_text_config(), "layer_types", None) or [""]) <= ATTENTION_LAYERS:
        return None
    named = {package for _, package in kernels_of(config).values()}
    missing = [package for package in PACKAGES if package in named and not find_spec(package)]
    if not missing:
        return None
    name = classes.text_class(config).__name__
    text = f"{name} computes layers in plain PyTorch, which is correct but much slower, without "
    text += " and ".join(PACKAGES[package][0].split()[0] for package in missing)
    cost = "; ".join(PACKAGES[package][1] for package in missing if PACKAGES[package][1])
    install = " && ".join(f"pip install {PACKAGES[package][0]}" for package in missing)
    return f"{text}: {cost}" if cost else text, install


def read_by_kernels(config) -> tuple[str, ...]:
    """Return the linear layers whose weights a kernel reads directly: they can be neither adapted nor packed."""
    source = _source(config)
    # The name occurs in the definition and in a call.
    called = {kernel for name, (kernel, _) in kernels_of(config).items() if source.count(f" {name}(") > 1}
    return tuple(sorted({name for kernel in called for name in READS_WEIGHTS.get(kernel, ())}))


def _source(config) -> str:
    """Return the source of the model's module in transformers; "" for other classes."""
    cls = classes.text_class(config)
    return inspect.getsource(sys.modules[cls.__module__]) if cls else ""


def mixes_documents(config) -> str | None:
    """Return why these layers mix the documents of a row, even with their packages; None if no reason is known."""
    scans = WITHOUT_BOUNDARIES & {kernel for kernel, _ in kernels_of(config).values()}
    return "its Mamba-1 scan carries the state of one document into the next" if scans else None


def reads_documents(config) -> bool:
    """Return whether a model has such layers, which need `seq_idx` for packed rows."""
    return config is not None and bool(TOKEN_AXIS.keys() & {kernel for kernel, _ in kernels_of(config).values()})


def spans(bounds: torch.Tensor) -> list[tuple[int, int]]:
    """Return (start, end) of each document on the token axis."""
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


_documents = spans


def read_boundaries_by(documents) -> None:
    """Replace `spans` in a simulation, whose boundaries do not have values."""
    global _documents
    _documents = documents


def keep_documents_apart(config) -> None:
    """Make the functions in the model's source compute each document of a row separately; once per process."""
    cls = classes.text_class(config)
    for name, (kernel, package) in kernels_of(config).items():
        plain = getattr(sys.modules[cls.__module__], name)
        if kernel not in TOKEN_AXIS or hasattr(plain, "of_each_document"):
            continue
        if not package or _is_in_pytorch(kernel, package):
            setattr(sys.modules[cls.__module__], name, _of_each_document(plain, kernel))
        elif package == "fla":
            setattr(sys.modules[cls.__module__], name, _with_boundaries(plain))


def _is_in_pytorch(kernel: str, package: str) -> bool:
    """Return whether transformers computes a kernel's function in PyTorch: the package is missing, or lacks the kernel.

    The test function is decorated like transformers' functions. Without a kernel it is called; a kernel raises an
    error, because it gets no arguments.
    """
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    try:
        return use_kernel_func_from_hub_with_fallback(kernel, package)(lambda: "in PyTorch")() == "in PyTorch"
    except Exception:
        return False


def _with_boundaries(plain):
    """Return a kernel of fla that accepts cu_seq_lens_q, as layers of Kimi delta attention pass it."""

    @functools.wraps(plain)
    def with_boundaries(*args, cu_seqlens=None, cu_seq_lens_q=None, **named):
        return plain(*args, cu_seqlens=cu_seq_lens_q if cu_seqlens is None else cu_seqlens, **named)

    with_boundaries.of_each_document = True
    return with_boundaries


def _of_each_document(plain, kernel: str):
    """Return a PyTorch function of transformers that is called for each document of a row.

    The chunk size is limited to the document's length, which avoids padding without changing the result.
    """
    axis, has_chunks = TOKEN_AXIS[kernel], kernel != "causal_conv1d_fn"

    @functools.wraps(plain)
    def of_each_document(*args, cu_seqlens=None, cu_seq_lens_q=None, seq_idx=None, **named):
        bounds = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
        if bounds is None and seq_idx is None:
            return plain(*args, **named)
        if bounds is None:  # layers of transformers before 5.20 only pass the index of each token's document
            if _documents is not spans:  # a simulation, whose tensors do not have values
                return plain(*args, seq_idx=seq_idx, **named)
            lengths = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        else:
            lengths = [end - start for start, end in _documents(bounds)]
        tokens = args[0].shape[axis]

        def split(value):
            # The gradient of a slice by index would have the size of the full row.
            has_tokens = isinstance(value, torch.Tensor) and value.ndim > 2 and value.shape[axis] == tokens
            return value.split(lengths, dim=axis) if has_tokens else [value] * len(lengths)

        split_args, split_named = [*map(split, args)], {name: split(value) for name, value in named.items()}
        parts = []
        for i, length in enumerate(lengths):
            arguments = {name: values[i] for name, values in split_named.items()}
            if has_chunks:
                arguments["chunk_size"] = min(length, named.get("chunk_size", CHUNK))
            parts.append(plain(*(values[i] for values in split_args), **arguments))
            if parts[0] is None:
                return None
        if isinstance(parts[0], tuple):  # includes the state after the last token
            return (torch.cat([part[0] for part in parts], dim=axis), *parts[-1][1:])
        return torch.cat(parts, dim=axis)

    of_each_document.of_each_document = True
    return of_each_document


def resolve_for_model(settings, config) -> None:
    """Add a decision if missing packages cause a loop over the documents of a row."""
    if not (settings.padding_free and reads_documents(config)):
        return
    used = {package for kernel, package in kernels_of(config).values() if kernel in TOKEN_AXIS and package}
    missing = [PACKAGES[package][0].split()[0] for package in PACKAGES if package in used and not find_spec(package)]
    if missing:
        why = f"without {' and '.join(missing)}, which would compute the row in one call"
        settings.decisions.append(f"linear attention and convolutions loop over the documents of a row {why}")


def install(settings, model) -> None:
    """Keep the documents of packed rows apart in a loaded model."""
    config = getattr(model, "config", None)
    if settings.padding_free and reads_documents(config):
        keep_documents_apart(config)


TECHNIQUE = Technique(name="documents in linear attention", resolve_for_model=resolve_for_model, install=install)
