"""Profile one optimizer step of a run with this folder on its module path, PROFILE_OUT (a file) and PROFILE_STEP.

Prints one line, PROFILE ..., and writes the kernels by time and the calls in which the host waits to the file.
"""

import importlib.util
import os
import sys
import time
from pathlib import Path

MODULE = "zerofit.train.progress"
KINDS = {  # the first match counts; names of attention kernels also contain cutlass
    "attention": ("flash", "fmha", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "s16816"),
    "norms, SwiGLU, rotary": ("_rms_norm", "_swiglu", "_rope", "triton", "liger"),
    "optimizer": ("multi_tensor", "adam"),
    "copies and casts": ("copy", "memcpy", "memset", "cat"),
    "other kernels": ("",),
}


def tables(profiler, seconds: float) -> tuple[str, str]:
    events, spent = profiler.key_averages(), dict.fromkeys(KINDS, 0.0)
    kernels = [e for e in events if str(e.device_type).endswith("CUDA")]
    for e in kernels:
        spent[next(k for k, words in KINDS.items() if any(w in e.key.lower() for w in words))] += (
            e.self_device_sharetotal / 1e6
        )
    waits = {e.key: e.count for e in events if e.key.startswith("cuda") and e.key.endswith("Synchronize")}
    spent["idle"] = seconds - sum(spent.values())
    shares = ", ".join(f"{kind} {100 * share / seconds:.0f} %" for kind, share in spent.items())
    launches = sum(e.count for e in events if "LaunchKernel" in e.key)
    line = f"step {seconds:.2f} s: {shares}; {launches} launches, host waits {waits or 'none'}"
    by = "self_cuda_sharetotal" if kernels else "self_cpu_sharetotal"
    return line, events.table(sort_by=by, row_limit=45, max_name_column_width=90)


def patch(progress) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    plain, session, step = progress.Reporter.on_step_end, {}, int(os.environ["PROFILE_STEP"])
    on_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") != ""

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        result = plain(self, args, state, control, **kwargs)
        if state.global_step == step - 1:
            session["profiler"] = profile(
                activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True
            )
            session["profiler"].__enter__()
            session["began"] = now()
        elif state.global_step == step and session:
            seconds = now() - session["began"]
            session["profiler"].__exit__(None, None, None)
            line, text = tables(session["profiler"], seconds)
            with Path(os.environ["PROFILE_OUT"]).open("w") as file:
                file.write(f"{line}\n\n{text}\n")
            print(f"PROFILE {line}", flush=True)
        return result

    progress.Reporter.on_step_end = on_step_end


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        plain = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (plain(module), patch(module))
        return spec


if os.environ.get("PROFILE_OUT"):
    sys.meta_path.insert(0, Finder())
