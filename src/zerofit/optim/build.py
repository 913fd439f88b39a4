"""Build the optimizer: parameter groups, Muon, equal rounding on all ranks."""

import math

from zerofit.optim import registry


def create(trainer, model=None, groups: list[dict] | None = None):
    """Build the optimizer of --optim into trainer.optimizer and return it.

    Args: model: default the trainer's; groups: parameter groups with their own lr or weight_decay, default
        parameter_groups.
    """
    from transformers import Trainer

    if trainer.optimizer is not None:
        return trainer.optimizer
    settings, args, model = trainer.settings, trainer.args, trainer.model if model is None else model
    extra = registry.arguments(settings)
    common = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    groups_given, groups = groups, groups or parameter_groups(trainer, model)
    noise = {"seed": args.seed, "part": 0 if settings.zero == 0 else args.process_index}  # ZeRO: a slice per rank
    if settings.optim == "sophia":
        from zerofit.optim.sophia import SophiaG

        numbers = {k: float(v) for k, v in extra.items() if k in ("gamma", "eps")}
        betas = (float(extra.get("beta1", 0.96)), float(extra.get("beta2", 0.99)))
        trainer.optimizer = SophiaG(groups, args.learning_rate, betas, k=int(extra.get("k", 10)), **noise, **numbers)
    elif settings.optim == "muon":
        trainer.optimizer = _muon(model, groups, common, float(extra.get("momentum", 0.95)))
    elif settings.pure_bf16 and settings.optim in ("adamw_torch", "adamw_torch_fused"):
        from zerofit.optim.bf16_adamw import AdamW

        trainer.optimizer = AdamW(groups, **common, **noise)
    elif groups_given is None:
        if registry.OPTIMIZERS.get(settings.optim, registry.NONE).module == "bitsandbytes":
            import bitsandbytes

            # Its table of parameters with 32-bit states is global and indexed by position: under ZeRO, the partition of
            # the next trainer in this process would match the last one's entry for the embeddings.
            bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
        Trainer.create_optimizer(trainer, model)
    else:
        optimizer_class, kwargs = trainer.get_optimizer_cls_and_kwargs(args, model)
        kwargs.pop("params", None)
        trainer.optimizer = optimizer_class(groups, **kwargs)
    if settings.pure_bf16 and settings.optim.startswith("adamw_torch_") and settings.optim.endswith("bit"):
        _same_noise_on_all_ranks(trainer.optimizer, args.seed)
    return trainer.optimizer


def parameter_groups(trainer, model) -> list[dict]:
    """Return the trained parameters in two groups: with weight decay, and without (biases, norms)."""
    decayed = set(trainer.get_decay_parameter_names(model))
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in trained if n in decayed], "weight_decay": trainer.args.weight_decay},
        {"params": [p for n, p in trained if n not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _muon(model, groups: list[dict], common: dict, momentum: float):
    """Return DeepSpeed's Muon, which orthogonalizes hidden matrices at every stage; AdamW for the rest.

    The rate of each shape is scaled so that an update has AdamW's usual root mean square of 0.2 (arXiv 2502.16982,
    equation 4): one learning rate serves both.
    """
    import torch
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    for name, p in model.named_parameters():
        is_outer = any(word in name.lower() for word in ("embed", "lm_head"))
        p.use_muon = len(getattr(p, "ds_shape", p.shape)) == 2 and not is_outer
    param_groups, matrices = [], {}
    for group in groups:
        options = {**common, **{k: v for k, v in group.items() if k != "params"}}
        others = [p for p in group["params"] if not p.use_muon]
        if others:
            param_groups.append({"params": others, "use_muon": False, "name": f"adam-{len(param_groups)}", **options})
        for p in (p for p in group["params"] if p.use_muon):
            shape = tuple(getattr(p, "ds_shape", p.shape))
            matrices.setdefault((shape, options["lr"], options["weight_decay"]), []).append(p)
    for (shape, lr, decay), params in matrices.items():
        rows, columns = shape
        # DeepSpeed itself multiplies by sqrt(max(1, rows / columns)). rate x decay must not depend on the scale.
        scale = 0.2 * math.sqrt(max(rows, columns)) / math.sqrt(max(1.0, rows / columns))
        label = f"muon-{rows}x{columns}"
        param_groups.append(
            {"params": params, "use_muon": True, "name": label, "lr": lr * scale, "momentum": momentum,
             "weight_decay": decay / scale}
        )  # fmt: skip
    return MuonWithAuxAdam(param_groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"lr": common["lr"]})


def _same_noise_on_all_ranks(optimizer, seed: int) -> None:
    """Seed torchao's rounding equally on all ranks: it uses the global generator, which dropout advances."""
    import torch

    plain_step, steps = optimizer.step, 0

    def step(closure=None):
        nonlocal steps
        steps += 1
        device = optimizer.param_groups[0]["params"][0].device
        # Without `devices` fork_rng initializes every GPU of the node and warns.
        with torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []):
            torch.manual_seed(seed * 1_000_003 + steps)
            return plain_step(closure)

    optimizer.step = step
