"""Load a checkpoint's states into an engine with another ZeRO stage, rank count or offload.

Each rank reads its share from the shards; no converted copy is written. (DeepSpeed's universal checkpoint supports only
Adam's states at stage 3 and not stage 0; it writes 12 bytes per parameter and reads them again.)
"""

import contextlib
import json
from pathlib import Path

import torch
from peft import get_peft_model_state_dict
from transformers.integrations import deepspeed

from zerofit.base.errors import UserError
from zerofit.checkpoint import zero_shards
from zerofit.checkpoint.facts import read_facts
from zerofit.model.weights import converted, stored


def load(trainer, checkpoint: Path) -> None:
    """Load weights, optimizer states, learning rate and counters instead of transformers. Collective.

    Raises: UserError for a checkpoint of another model, or incomplete shards.
    """
    states, names = _read(trainer, checkpoint)
    keys = _keys_to_load(trainer, states)
    step = {} if states.step is None or not keys else {"step": _step(_unwrapped(trainer.optimizer), states.step)}
    _fill(trainer, states, names, keys, step)
    _schedule(trainer, checkpoint)
    _scale_and_count(trainer, trainer.model_wrapped if trainer.is_deepspeed_enabled else None, states, checkpoint)


def load_weights(trainer, checkpoint: Path) -> None:
    """Load the weights without optimizer states, for a model that is not trained further. Collective.

    Raises: see `load`.
    """
    states, names = _read(trainer, checkpoint)
    _fill(trainer, states, names, [], {})


def _read(trainer, checkpoint: Path) -> tuple[zero_shards.OptimizerStates, dict[int, str]]:
    """Return a checkpoint's states and {id of a trained parameter: name}."""
    names = {id(p): name for name, p in trainer.model.named_parameters() if p.requires_grad}
    states = zero_shards.read(checkpoint) if zero_shards.is_deepspeed(checkpoint) else _plain(trainer, checkpoint)
    if extra := sorted(set(states.shapes) ^ set(names.values())):
        owner = "the checkpoint" if extra[0] in states.shapes else "this run"
        raise UserError(
            f"--resume_from_checkpoint {checkpoint}: only {owner} trains {extra[0]}; it was saved from another model."
        )
    return states, names


def _unwrapped(optimizer):
    while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    return optimizer


def _fill(trainer, states, names, keys, step) -> None:
    """Fill the weights and the states `keys` of the engine in use."""
    optimizer = _unwrapped(trainer.optimizer)
    if not trainer.is_deepspeed_enabled:
        _into_parameters(optimizer, states, names, keys, step)
    elif trainer.settings.zero == 3:
        _into_partitions(trainer.model_wrapped.optimizer, optimizer, states, names, keys, step)
    else:
        _into_slices(trainer.model_wrapped.optimizer, optimizer, states, names, keys, step)


def _plain(trainer, checkpoint: Path) -> zero_shards.OptimizerStates:
    """Read a checkpoint of stage 0, whose optimizer numbers the parameters in group order."""
    known = read_facts(checkpoint) or {}
    groups = known.get("groups") or _groups_of_transformers(trainer)
    with _unsharded_models(trainer):
        weights = converted.read(trainer.model, checkpoint)
    weights = stored.Weights(checkpoint) if weights is None else weights
    return zero_shards.read_plain(checkpoint, groups, file_names(trainer.model), weights)


@contextlib.contextmanager
def _unsharded_models(trainer):
    """Keep from_pretrained from sharding models under ZeRO-3."""
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if trainer.is_deepspeed_enabled:
            deepspeed.set_hf_deepspeed_config(trainer.args.hf_deepspeed_config)


def group_names(trainer) -> list[list[str]]:
    """Return the names of the trained parameters by optimizer group (stage 0), for a checkpoint's facts."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in trainer.optimizer.param_groups]


def _groups_of_transformers(trainer) -> list[list[str]]:
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    trainable = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    return [[name for name in trainable if name in decayed], [name for name in trainable if name not in decayed]]


def file_names(model) -> dict[str, str]:
    """Return {trained parameter: name in the files} of a PEFT model; files omit the adapter's name.

    Empty for a plain model, and for prompt learning, whose virtual tokens PEFT computes while saving. Not collective.
    """
    if not hasattr(model, "peft_config") or model.active_peft_config.is_prompt_learning:
        return {}

    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved_tensors = get_peft_model_state_dict(model, state_dict=dict(trainable), save_embedding_layers=False)
    name_of = {id(tensor): key for key, tensor in saved_tensors.items()}
    return {name: name_of[id(p)] for name, p in trainable.items() if id(p) in name_of}


def _keys_to_load(trainer, states: zero_shards.OptimizerStates) -> list[str]:
    """Return the names of the optimizer states to load: all, or [] with a printed warning."""
    settings = trainer.settings
    saved_optim = (read_facts(Path(settings.resume_from_checkpoint)) or {}).get("optim", settings.optim)
    reason = f"{states.unsplit} of {saved_optim} does not have one number per weight" if states.unsplit else ""
    if saved_optim != settings.optim:
        reason = f"the checkpoint was saved with {saved_optim}"
    if reason and trainer.args.process_index == 0:
        print(
            f"WARNING: the states of {settings.optim} are reset: {reason}; the loss may rise for a few steps",
            flush=True,
        )
    return [] if reason else states.keys()


def _step(optimizer, step: float):
    """Return the step count as the optimizer stores it: a tensor for torch's optimizers, else an int."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return torch.tensor(step)
    return int(step)


def _into_parameters(optimizer, states, names, keys, step) -> None:
    """Fill full weights and states (stage 0: every rank holds all of them)."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            p.data.copy_(states.full(name))
            if keys:
                count = _placed(step, group, p.device)
                optimizer.state[p] = {key: torch.empty_like(p).copy_(states.full(name, key)) for key in keys} | count


def _placed(step: dict, group: dict, device) -> dict:
    """Copy the step count to the device that torch's optimizer expects: the CPU, unless fused or capturable."""
    if not torch.is_tensor(step.get("step")):
        return step
    on_device = group.get("fused") or group.get("capturable")
    return {"step": step["step"].to(device if on_device else "cpu", copy=True)}


def _into_slices(zero, optimizer, states, names, keys, step) -> None:
    """Fill full weights, and this rank's slice of each fp32 group and its states (stages 1 and 2)."""
    for i, flat in enumerate(zero.single_partition_of_fp32_groups):
        local_states = {key: torch.zeros_like(flat) for key in keys}
        for p in zero.bit16_groups[i]:
            name = names[id(p)]
            p.data.copy_(states.full(name))
            if p._hp_mapping is None:  # on other ranks only
                continue
            source, destination = p._hp_mapping.lp_fragment_address, p._hp_mapping.get_hp_fragment_address()
            for key, target in {"fp32": flat.data, **local_states}.items():
                target[destination.start : destination.start + destination.numel].copy_(
                    states.part(name, key, source.start, source.start + source.numel)
                )
        _set_state(optimizer, optimizer.param_groups[i], flat, local_states, step)


def _into_partitions(zero, optimizer, states, names, keys, step) -> None:
    """Fill this rank's share of each parameter, its fp32 copy and its states (stage 3)."""
    rank = torch.distributed.get_rank()
    zero.checkpoint_event_prologue()  # partitions all parameters, including small ones
    for i, flat in enumerate(zero.fp32_partitioned_groups_flat):
        local_states, offset = {key: torch.zeros_like(flat) for key in keys}, 0
        for p in zero.fp16_groups[i]:
            name, share = names[id(p)], p.partition_numel()
            for key, target in {"fp32": flat.data, **local_states}.items():
                piece = states.part(name, key, rank * share, (rank + 1) * share)
                target[offset : offset + len(piece)].copy_(piece)
                if key == "fp32":
                    p.ds_tensor.data[: len(piece)].copy_(piece)
            offset += share
        # Outside its step, stage 3 removes the parameters from the optimizer's groups.
        group = optimizer.param_groups[zero.sub_group_to_group_id[i]]
        _set_state(optimizer, group, flat, local_states, step)
    zero.checkpoint_event_epilogue()  # gathers small parameters on every rank again


def _set_state(optimizer, group, flat, states, step) -> None:
    if states:
        optimizer.state[flat] = states | _placed(step, group, flat.device)


def _schedule(trainer, checkpoint: Path) -> None:
    file = checkpoint / "scheduler.pt"
    if not file.exists():
        raise UserError(
            f"--resume_from_checkpoint {checkpoint}: lacks scheduler.pt (a DeepSpeed JSON defined its schedule), so "
            "its learning rate cannot continue at another stage or rank count; resume with the same ones."
        )
    scheduler, saved = trainer.lr_scheduler, torch.load(file, weights_only=True)
    groups = scheduler.optimizer.param_groups
    if len(saved["base_lrs"]) != len(groups):  # one value per group; only stage 0 has groups without parameters
        if len(set(saved["base_lrs"])) > 1:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: its optimizer had {len(saved['base_lrs'])} parameter "
                f"groups with different rates, this run has {len(groups)}; resume it at the stage at which it was "
                "saved."
            )
        for name in {"base_lrs", "_last_lr", "lr_lambdas"} & set(saved):
            saved[name] = saved[name][:1] * len(groups)
    scheduler.load_state_dict(saved)
    for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def _scale_and_count(trainer, engine, states, checkpoint: Path) -> None:
    scaler = trainer.accelerator.scaler
    if states.loss_scale and engine is not None and trainer.settings.fp16:
        engine.optimizer.loss_scaler.cur_scale = states.loss_scale
    elif states.loss_scale and scaler is not None:
        scaler.load_state_dict(scaler.state_dict() | {"scale": states.loss_scale})
    if engine is not None:
        steps = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
        engine.global_steps = steps
        engine.global_samples = steps * engine.train_batch_size()
        engine.skipped_steps = states.counters.get("skipped_steps", 0)
