"""Load a checkpoint's states into an engine of another ZeRO stage, rank count or offload.

No converted copy is written: each rank reads from the shards what its own share needs. (DeepSpeed's universal checkpoint
knows only Adam's states at stage 3, nothing of stage 0, and writes 12 bytes a parameter before it reads them again.)
"""

import json
from pathlib import Path

import torch

from zerofit.errors import UserError
from zerofit.train.checkpoint import zero_shards


def load(trainer, checkpoint: Path) -> None:
    """Weights, optimizer states, learning rate and counters, instead of transformers' loading. All ranks call it.

    Raises: UserError for a checkpoint of another model, or one whose shards are not whole.
    """
    names = {id(p): name for name, p in trainer.model.named_parameters() if p.requires_grad}
    states = zero_shards.read(checkpoint) if zero_shards.is_deepspeed(checkpoint) else _plain(trainer, checkpoint)
    if strange := sorted(set(states.shapes) ^ set(names.values())):
        whose = "the checkpoint" if strange[0] in states.shapes else "this run"
        raise UserError(
            f"--resume_from_checkpoint {checkpoint}: only {whose} trains {strange[0]}; it was saved from another model."
        )
    keys = _kept(trainer, states)
    engine = trainer.model_wrapped if trainer.is_deepspeed_enabled else None
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):  # accelerate's and DeepSpeed's wrappers
        optimizer = optimizer.optimizer
    step = {} if states.step is None or not keys else {"step": _step(optimizer, states.step)}
    if engine is None:
        _into_parameters(optimizer, states, names, keys, step)
    elif trainer.settings.zero == "3":
        _into_partitions(engine.optimizer, optimizer, states, names, keys, step)
    else:
        _into_slices(engine.optimizer, optimizer, states, names, keys, step)
    _schedule(trainer, checkpoint)
    _scale_and_count(trainer, engine, states, checkpoint)


def _plain(trainer, checkpoint: Path) -> zero_shards.OptimizerStates:
    """Of stage 0: its optimizer numbers the parameters in the order that this run's would have."""
    from zerofit.train.checkpoint.facts import read_facts

    known = read_facts(checkpoint) or {}
    groups = known.get("groups") or _groups_of_transformers(trainer)
    return zero_shards.read_plain(checkpoint, groups, file_names(trainer.model))


def group_names(trainer) -> list[list[str]]:
    """The trained parameters in the order of the optimizer's groups (stage 0), for a checkpoint's facts."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in trainer.optimizer.param_groups]


def _groups_of_transformers(trainer) -> list[list[str]]:
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    return [[name for name in trained if name in decayed], [name for name in trained if name not in decayed]]


def file_names(model) -> dict[str, str]:
    """Trained parameter -> its name in the checkpoint's safetensors, where it is another (peft leaves the adapter's out).

    What peft computes when it saves, such as virtual tokens, has no name there. No rank waits for another one.
    """
    if not hasattr(model, "peft_config") or model.active_peft_config.is_prompt_learning:
        return {}
    from peft import get_peft_model_state_dict

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved = get_peft_model_state_dict(model, state_dict=dict(trained), save_embedding_layers=False)
    found = {id(tensor): key for key, tensor in saved.items()}
    return {name: found[id(p)] for name, p in trained.items() if id(p) in found}


def _kept(trainer, states: zero_shards.OptimizerStates) -> list[str]:
    """The optimizer states that go along: all, or none, which is said."""
    from zerofit.train.checkpoint.facts import read_facts

    settings = trainer.settings
    was = (read_facts(Path(settings.resume_from_checkpoint)) or {}).get("optim", settings.optim)
    why = f"{states.unsplit} of {was} is not one number a weight" if states.unsplit else ""
    if was != settings.optim:
        why = f"the checkpoint has those of {was}"
    if why and trainer.args.process_index == 0:
        print(
            f"WARNING: the states of {settings.optim} begin anew: {why}; expect some steps of higher loss", flush=True
        )
    return [] if why else states.keys()


def _step(optimizer, step: float):
    """The step count in the form that the optimizer keeps: torch's a tensor, the others a number."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return torch.tensor(step)
    return int(step)


def _into_parameters(optimizer, states, names, keys, step) -> None:
    """Stage 0: every rank holds all."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            p.data.copy_(states.whole(name))
            if keys:
                count = _placed(step, group, p.device)
                optimizer.state[p] = {key: torch.empty_like(p).copy_(states.whole(name, key)) for key in keys} | count


def _placed(step: dict, group: dict, device) -> dict:
    """A copy of the step count where torch's optimizer wants it: beside the weights for its fused and capturable forms,
    else on the CPU."""
    if not torch.is_tensor(step.get("step")):
        return step
    on_device = group.get("fused") or group.get("capturable")
    return {"step": step["step"].to(device if on_device else "cpu", copy=True)}


def _into_slices(zero, optimizer, states, names, keys, step) -> None:
    """Stages 1 and 2: whole weights, and this rank's slice of the flat fp32 group and of its states."""
    for i, flat in enumerate(zero.single_partition_of_fp32_groups):
        own = {key: torch.zeros_like(flat) for key in keys}
        for p in zero.bit16_groups[i]:
            name = names[id(p)]
            p.data.copy_(states.whole(name))
            if p._hp_mapping is None:  # no number of it is this rank's
                continue
            of, to = p._hp_mapping.lp_fragment_address, p._hp_mapping.get_hp_fragment_address()
            for key, target in {"fp32": flat.data, **own}.items():
                target[to.start : to.start + to.numel].copy_(
                    states.whole(name, key).view(-1)[of.start : of.start + of.numel]
                )
        _give(optimizer, optimizer.param_groups[i], flat, own, step)


def _into_partitions(zero, optimizer, states, names, keys, step) -> None:
    """Stage 3: this rank's share of each parameter, of its fp32 copy and of its states."""
    rank = torch.distributed.get_rank()
    zero.checkpoint_event_prologue()  # all are partitioned
    for i, flat in enumerate(zero.fp32_partitioned_groups_flat):
        own, at = {key: torch.zeros_like(flat) for key in keys}, 0
        for p in zero.fp16_groups[i]:
            name, share = names[id(p)], p.partition_numel()
            for key, target in {"fp32": flat.data, **own}.items():
                piece = states.whole(name, key).view(-1)[rank * share : (rank + 1) * share]
                target[at : at + len(piece)].copy_(piece)
                if key == "fp32":
                    p.ds_tensor.data[: len(piece)].copy_(piece)
            at += share
        # Outside of its step, stage 3 keeps the parameters of the optimizer's groups out of them.
        group = optimizer.param_groups[zero.sub_group_to_group_id[i]]
        _give(optimizer, group, flat, own, step)
    zero.checkpoint_event_epilogue()  # small ones are whole on every rank again


def _give(optimizer, group, flat, own, step) -> None:
    if own:
        optimizer.state[flat] = own | _placed(step, group, flat.device)


def _schedule(trainer, checkpoint: Path) -> None:
    file = checkpoint / "scheduler.pt"
    if not file.exists():
        raise UserError(
            f"--resume_from_checkpoint {checkpoint}: has no scheduler.pt (its schedule was of a DeepSpeed JSON), so that its "
            "learning rate cannot go on at another stage or rank count."
        )
    scheduler, saved = trainer.lr_scheduler, torch.load(file, weights_only=True)
    groups = scheduler.optimizer.param_groups
    if len(saved["base_lrs"]) != len(groups):  # a value a group; stage 0 alone has groups without parameters
        if len(set(saved["base_lrs"])) > 1:
            raise UserError(
                f"--resume_from_checkpoint {checkpoint}: its optimizer had {len(saved['base_lrs'])} groups of parameters with "
                f"rates of their own, this run has {len(groups)}; resume it at the stage that it was saved at."
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
