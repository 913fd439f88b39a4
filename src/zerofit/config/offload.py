"""Write --offload_path into the DeepSpeed JSON, and refuse keys of offload and ZeRO++ that cannot work.

Statements about DeepSpeed are from the source of deepspeed 0.19.8 and, if a CPU can run it, from experiments.
"""

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch

from zerofit.base.errors import UserError, first_line
from zerofit.config import nvme
from zerofit.job.settings import json_value
from zerofit.job.technique import AllBut, Conflict, Technique
from zerofit.model import load

# JSON key -> the flag with the same meaning.
SAME_AS_FLAG = {
    "zero_optimization.offload_optimizer.nvme_path": "offload_path",
    "zero_optimization.offload_param.nvme_path": "offload_path",
}

RATIO, SUPER_OFFLOAD = "offload_optimizer.ratio", "offload_optimizer.super_offload"

HPZ = "zero_hpz_partition_size"

# Keys of zero_optimization without a flag -> DeepSpeed's default. DeepSpeed uses them at stage 3 only.
STAGE_3_DEFAULTS = {
    RATIO: 1,
    SUPER_OFFLOAD: False,
    HPZ: 1,
    "zero_quantized_weights": False,
    "zero_quantized_gradients": False,
    "zero_quantized_nontrainable_weights": False,
}

ZENFLOW = (
    "deepspeed 0.19 computes wrong results with it (at stage 2 even the loss before the first step), and accelerate "
    "overrides its choice of when to step; use --offload optimizer"
)

# The optimizers with the update rule of DeepSpeed's CPU Adam; accelerate silently replaces all others by it as well.
ADAMW = ("adamw_torch", "adamw_torch_fused")

SUPERCHIPS = ("GH200", "GB200", "GB300")


def enabled_keys(config: dict | None) -> dict[str, Any]:
    """Return the keys of STAGE_3_DEFAULTS that a DeepSpeed configuration sets to other values, with these values."""
    zero = (config or {}).get("zero_optimization", {})
    values = {key: json_value(zero, key, default) for key, default in STAGE_3_DEFAULTS.items()}
    return {key: value for key, value in values.items() if value not in (None, STAGE_3_DEFAULTS[key])}


def overlay(settings) -> str:
    """Return the name of the overlay in deepspeed_configs/ for --offload and --offload_path."""
    return f"offload_{settings.offload}{'_nvme' if settings.offload_path else ''}.json"


def with_path(config: dict, path: Path, settings) -> dict:
    """Return a copy of `config` with --offload_path and the keys that it requires.

    Raises: UserError if file and flag contradict each other, or if the flag would not have an effect.
    """
    zero = config["zero_optimization"]
    sections = {k: {**zero[k]} for k in ("offload_optimizer", "offload_param") if _device(zero, k) != "none"}
    if settings.offload_path and not sections:
        from_file = settings.source["offload_path"] == "deepspeed JSON"
        where = (
            f"{path}: nvme_path = {settings.offload_path}" if from_file else f"--offload_path {settings.offload_path}"
        )
        raise UserError(f"{where}: offload is off; add --offload optimizer (or all), or leave it out.")
    for key, section in sections.items():
        if settings.offload_path and settings.source["offload_path"] != "deepspeed JSON":
            if section["device"] != "nvme":
                raise UserError(
                    f'{path} sets zero_optimization.{key}.device = "{section["device"]}", but --offload_path is '
                    f'{settings.offload_path}: write "nvme" in the file, or leave the flag out.'
                )
            section.setdefault("nvme_path", str(Path(settings.offload_path).expanduser().resolve()))
    return _with_cpu_adam({**config, "zero_optimization": zero | sections}, path, settings)


def _with_cpu_adam(config: dict, path: Path, settings) -> dict:
    """Return the configuration with DeepSpeed's CPU Adam turned on for ratio and SuperOffload, which need it.

    Raises: UserError if the user's file turns it off, or for an optimizer that it would silently replace.
    """
    section = config["zero_optimization"].get("offload_optimizer") or {}
    if section.get("device", "none") == "none" or "optimizer" in config:
        return config
    mode = next((key for key in (RATIO, SUPER_OFFLOAD) if key in enabled_keys(config)), None)
    forced = config.get("zero_force_ds_cpu_optimizer", True)
    if mode and not forced:
        if settings.values.get("deepspeed"):
            raise UserError(
                f"{path} sets zero_optimization.{mode} and zero_force_ds_cpu_optimizer = false, but the former needs "
                "DeepSpeed's CPU Adam: write true."
            )
        config, forced = {**config, "zero_force_ds_cpu_optimizer": True}, True
        settings.decisions.append(f"zero_force_ds_cpu_optimizer true: {mode} needs DeepSpeed's CPU Adam")
    if forced and settings.optim not in ADAMW:
        why = mode or "zero_force_ds_cpu_optimizer = true (DeepSpeed's default)"
        raise UserError(
            f"--optim {settings.optim} with {why}: accelerate would silently replace it by DeepSpeed's CPU Adam; use "
            f"--optim {ADAMW[1]}{'' if mode else f', or write zero_force_ds_cpu_optimizer = false in {path}'}."
        )
    return config


def needs_cpu_adam(config: dict | None) -> bool:
    """Return whether the engine builds DeepSpeed's CPU Adam when it starts."""
    if config is None or _device(config["zero_optimization"], "offload_optimizer") == "none":
        return False
    return config.get("zero_force_ds_cpu_optimizer", True)


def _device(zero: dict, key: str) -> str:
    return (zero.get(key) or {}).get("device") or "none"


def check(config: dict, path: Path, settings) -> None:
    """Refuse unsupported keys, set by a flag or in the file; works before a model or process group exists.

    Raises: UserError with flag or file and key, cause and fix.
    """
    zero = config["zero_optimization"]
    for key, value in enabled_keys(config).items():
        in_overlay = key.startswith("offload_") and not settings.values.get("deepspeed")
        file = path.parent / overlay(settings) if in_overlay else path
        where = f"{file}: zero_optimization.{key} = {json.dumps(value)}"
        if settings.zero != 3:
            raise UserError(
                f"{where} needs stage 3, which shards parameters, not stage {settings.zero}; use --zero 3, or delete "
                "the key."
            )
        _CHECKS[key](zero, where, settings)
    for key in nvme.paths_of(config) if settings.zero != 3 else ():
        raise UserError(
            f'{path}: zero_optimization.{key}.device = "nvme" needs stage 3: at stage {settings.zero} DeepSpeed '
            "silently uses host memory; use --zero 3, or another device."
        )
    if nvme.paths_of(config):
        nvme.check(config, path, settings)
        # In an experiment the losses after a resume differed from the uninterrupted run.
        _refuse_resume("--offload_path", "the states outside the swapped tensors", settings)
    if zero.get("zenflow") is not None:
        raise UserError(f"{path}: zero_optimization.zenflow: {ZENFLOW}, and delete the section.")


# --- sizes that depend on the model ---


def depends_on_size(config: dict | None) -> bool:
    """Return whether the configuration has settings that `check_sizes` checks."""
    return bool(nvme.paths_of(config)) or RATIO in enabled_keys(config)


def check_sizes(settings, net) -> None:
    """Check the disk space, and set the sizes of buffers and sub-groups that depend on the model.

    Set sub_group_size, buffer_size and buffer_count in settings.deepspeed if unset, and add a decision.
    Args: net: the model, on the meta device. Raises: UserError if the disk or the user's buffer size is too small.
    """
    config, ranks = settings.deepspeed, settings.world_size
    if not depends_on_size(config):
        return
    sizes = [p.numel() for p in net.parameters()]
    trainable, every = sum(p.numel() for p in net.parameters() if p.requires_grad), sum(sizes)
    resolved = {**config, "bf16": {"enabled": settings.bf16}, "fp16": {"enabled": settings.fp16}}
    if settings.planned_gpu is None:  # a plan may be for another machine
        nvme.check_room(resolved, trainable, every, ranks, ranks_of_node(settings))
    zero = config["zero_optimization"]
    if "offload_param" in nvme.paths_of(config):
        nvme.fit_buffers(zero["offload_param"], net, ranks, settings)
    if RATIO in enabled_keys(config):
        _fit_grain(zero, trainable, ranks, settings)


SUB_GROUPS = 20  # the ratio is rounded to 1/20 of the optimizer


def _fit_grain(zero: dict, trainable: int, ranks: int, settings) -> None:
    """Lower sub_group_size to 1/SUB_GROUPS of a rank's share, unless the user has set it.

    DeepSpeed applies the ratio to complete sub-groups. Its default of 1e9 elements may result in a single one, stepped
    entirely on the CPU or entirely on the GPU.
    """
    size = max(1, -(-trainable // (ranks * SUB_GROUPS)))
    if settings.values.get("deepspeed") and "sub_group_size" in zero:
        return  # `after_start` reports the resulting share
    if zero.get("sub_group_size", 10**9) > size:
        zero["sub_group_size"] = size
        settings.decisions.append(
            f"sub_group_size {size:,}: 1/{SUB_GROUPS} of each rank's share, so that the ratio "
            f"{zero['offload_optimizer']['ratio']} can be met"
        )


# --- the ratio, SuperOffload ---


def _check_ratio(zero: dict, where: str, settings) -> None:
    section = _offloading(zero, where)
    if not 0 < section["ratio"] < 1:
        raise UserError(f"{where}: the fraction of the optimizer on the CPU must be above 0 and at most 1.")
    if section["device"] != "cpu":
        raise UserError(f"{where}: the rest would go to the GPU; with NVMe leave the ratio out.")
    _refuse_resume(where, "the Adam moments of the GPU's share", settings)


def _offloading(zero: dict, where: str) -> dict:
    """Return the section of the optimizer's offload. Raises: UserError if it offloads nothing."""
    if _device(zero, "offload_optimizer") == "none":
        raise UserError(f'{where}: offload is off; add "device": "cpu" to this section, or delete the key.')
    return zero["offload_optimizer"]


def _check_super_offload(zero: dict, where: str, settings) -> None:
    section = _offloading(zero, where)
    if settings.use_cpu:
        raise UserError(
            f"{where} needs an NVIDIA GPU ({SUPERCHIPS[0]} or {SUPERCHIPS[1]}), but this run is on the CPU; use "
            "--offload optimizer alone."
        )
    if section["device"] != "cpu":
        raise UserError(f"{where}: updates in host memory; leave --offload_path (NVMe) out.")
    if settings.fp16:
        raise UserError(f"{where}: updates before the gradients are divided by fp16's loss scale; use --bf16 true.")
    _refuse_resume(where, "the Adam moments of its separate process", settings)
    gpu = settings.planned_gpu.device_name if settings.planned_gpu else torch.cuda.get_device_name()
    if not any(chip in gpu for chip in SUPERCHIPS):
        settings.decisions.append(
            f"super_offload on {gpu}: made for CPUs and GPUs with a fast link ({', '.join(SUPERCHIPS)}); compare its "
            "speed with --offload optimizer"
        )


def unsaved(settings) -> str:
    """Return the flag or key due to which DeepSpeed's checkpoints lack optimizer states, or ""."""
    if settings.offload_path:
        return "--offload_path"
    return next((key for key in (RATIO, SUPER_OFFLOAD) if key in enabled_keys(settings.deepspeed)), "")


def _refuse_resume(where: str, what: str, settings) -> None:
    if (settings.resume_from_checkpoint or "false").lower() != "false":
        raise UserError(
            f"{where} with --resume_from_checkpoint: DeepSpeed does not save {what}, so a resumed run would silently "
            "reset them to zero. Remove one of the two."
        )
    settings.decisions.append(f"{where}: checkpoints cannot be resumed (DeepSpeed does not save {what.rstrip(',')})")


def after_start(trainer) -> str | None:
    """Make the GPU's share follow the learning rate; return a sentence on ratio or NVMe files, or None.

    The engine must exist. DeepSpeed steps the GPU's share with a second AdamW whose first parameter group keeps its
    initial learning rate and ignores the schedule; replace this group by the group of the real optimizer.
    """
    optimizer = getattr(trainer.model_wrapped, "optimizer", None)
    backup = getattr(optimizer, "backup_optimizer", None)
    if backup is None:
        return nvme.swapped(trainer.settings.deepspeed)
    group = optimizer.optimizer.param_groups[0]
    if backup.param_groups[0] is not group:
        for name, default in backup.defaults.items():
            group.setdefault(name, default)
        backup.param_groups[0] = group
    sizes = list(zip(optimizer.fp16_partitioned_groups_flat_numel, optimizer.subgroup_to_device.values(), strict=True))
    share = sum(n for n, device in sizes if device == "cpu") / sum(n for n, _ in sizes)
    return f"offload_ratio: {share:.0%} of rank 0's optimizer is stepped on the CPU, in {len(sizes)} sub-groups"


# --- ZeRO++ ---


def ranks_of_node(settings) -> int:
    """Return the number of ranks on this node or, before they are started, of the job."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or settings.world_size)


def hpz(settings) -> int:
    """Return the number of ranks that share ZeRO++'s second copy of the parameters; 1 without a copy."""
    return enabled_keys(settings.deepspeed).get(HPZ, 1)


def _check_hpz(zero: dict, where: str, settings) -> None:
    size, ranks, local = zero[HPZ], settings.world_size, ranks_of_node(settings)
    if _device(zero, "offload_param") != "none":
        raise UserError(f"{where}: its copy of the parameters would be offloaded too; use --offload optimizer.")
    if size < 1 or ranks % size:
        raise UserError(f"{where}: must divide the {ranks} rank{'s' * (ranks > 1)} of this job.")
    if local % size:
        raise UserError(
            f"{where}: its copies are gathered within a node, so it must divide the {local} ranks of this node (best: "
            f"{local})."
        )
    if size == ranks:
        settings.decisions.append(
            f"{where}: all ranks are on one node, so hpZ costs memory without saving communication"
        )


def _check_quantized(zero: dict, where: str, settings) -> None:
    if settings.use_cpu:
        raise UserError(f"{where}: DeepSpeed's quantizer needs a GPU; leave it out.")
    from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch

    try:
        assert_no_cuda_mismatch("quantizer")
    except Exception as error:
        raise UserError(
            f"{where}: DeepSpeed's quantizer cannot be compiled: {first_line(error)}; install the CUDA "
            "toolkit of PyTorch's version and set CUDA_HOME, or leave it out."
        ) from None


def _check_quantized_gradients(zero: dict, where: str, settings) -> None:
    _check_quantized(zero, where, settings)
    if settings.world_size == ranks_of_node(settings):
        raise UserError(f"{where}: DeepSpeed ignores it on one node, as it quantizes only between nodes; delete it.")
    if zero.get("reduce_scatter") is False:
        raise UserError(f"{where}: needs zero_optimization.reduce_scatter = true.")


_CHECKS = {
    RATIO: _check_ratio,
    SUPER_OFFLOAD: _check_super_offload,
    HPZ: _check_hpz,
    "zero_quantized_weights": _check_quantized,
    "zero_quantized_gradients": _check_quantized_gradients,
    "zero_quantized_nontrainable_weights": _check_quantized,
}


# --- the techniques ---


def _resolve_sizes(settings, config) -> None:
    """Set the sizes in the DeepSpeed configuration that depend on the number of parameters."""
    if depends_on_size(settings.deepspeed):
        check_sizes(settings, load.check_model(settings, copy.deepcopy(config)))


TECHNIQUES = (
    Technique(
        name="optimizer offload",
        flag="offload",
        values=("optimizer",),
        example="--offload optimizer",
        conflicts=(Conflict("zero", (0,), "stage 0 is plain DDP", "use --zero 2, or --offload none"),),
        resolve_for_model=_resolve_sizes,
    ),
    Technique(
        name="optimizer and parameter offload",
        flag="offload",
        values=("all",),
        example="--offload all",
        conflicts=(
            Conflict("zero", (0,), "stage 0 is plain DDP", "use --zero 3"),
            Conflict(
                "zero",
                (1, 2),
                "each GPU keeps all parameters at this stage, and DeepSpeed would silently ignore the flag",
                "use --zero 3, or --offload optimizer",
            ),
        ),
    ),
    Technique(
        name="NVMe",
        flag="offload_path",
        example="--offload all --offload_path FOLDER",
        conflicts=(
            Conflict("zero", (0, 1, 2), "DeepSpeed supports it at stage 3 only", "use --zero 3, or leave it out"),
            Conflict(
                "optim",
                AllBut(*ADAMW),
                "only AdamW's states are tested with DeepSpeed's swapping to NVMe",
                f"use --optim {ADAMW[1]}",
            ),
        ),
    ),
)
