"""Build the optimizer: parameter groups, Muon, equal rounding on all ranks."""

import contextlib
import itertools
import math

import torch

from zerofit.base import distributed
from zerofit.optim import bf16_adamw, registry
from zerofit.optim.bf16_adamw import AdamW
from zerofit.optim.sophia import SophiaG


def own_optimizer(trainer, model):
    """Return the optimizer of --optim if it is built here; None if transformers builds it."""
    settings, args = trainer.settings, trainer.args
    spec = registry.spec_of(settings)
    if spec and spec.build:
        return spec.build(parameter_groups(trainer, model), args.learning_rate)
    extra = registry.arguments(settings)
    common = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    noise = {
        "seed": args.seed,
        "part": 0 if settings.zero == 0 else args.process_index,
    }  # ZeRO: one slice per rank
    if settings.optim == "sophia":
        numbers = {k: float(v) for k, v in extra.items() if k in ("gamma", "eps")}
        betas = (float(extra.get("beta1", 0.96)), float(extra.get("beta2", 0.99)))
        k, groups = int(extra.get("k", 10)), parameter_groups(trainer, model)
        return SophiaG(groups, args.learning_rate, betas, k=k, **noise, **numbers)
    if settings.optim == "muon":
        return _muon(model, parameter_groups(trainer, model), common, float(extra.get("momentum", 0.95)))
    if settings.pure_bf16 and settings.optim in ("adamw_torch", "adamw_torch_fused"):
        compiled = _compiles_adamw(extra.get("compile", "auto"), args.device)
        return AdamW(parameter_groups(trainer, model), **common, **noise, compiled=compiled)
    if spec and spec.module == "bitsandbytes":
        import bitsandbytes

        # Its table of parameters with 32-bit states is global and indexed by position: under ZeRO a partition of the
        # next trainer in this process would match the last trainer's entry for the embeddings.
        bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()
    return None


def _compiles_adamw(choice: str, device) -> bool:
    """Return whether AdamW of --pure_bf16 runs compiled, the same on all ranks, and print it. Collective.

    Args: choice: --optim_args compile=: true, false, or auto (on a real GPU).
    """
    if device.type not in {"auto": ("cuda",), "true": ("cuda", "cpu")}.get(choice, ()):
        return False
    problems = list(filter(None, distributed.all_gather(bf16_adamw.why_not_compiled(device))))
    if distributed.rank() == 0 and problems:
        print(f"note: --pure_bf16: AdamW runs uncompiled, which is slower: {problems[0]}", flush=True)
    elif distributed.rank() == 0:
        print("  - pure_bf16: AdamW runs as one compiled kernel", flush=True)
    return not problems


def forget_initial_step(optimizer) -> None:
    """Undo the step with zero gradients in which DeepSpeed's 16-bit optimizers of stage 0 create their states.

    Otherwise Adam would treat the first real step as its second and make it 0.74 times as large.
    """
    if type(optimizer).__module__.startswith("deepspeed.runtime.fp16."):
        optimizer.optimizer.state.clear()  # the first real step creates them again
        optimizer.refresh_fp32_params()  # the undone step applied weight decay


def parameter_groups(trainer, model) -> list[dict]:
    """Return the trained parameters in two groups: with and without (biases, norms) weight decay."""
    decayed = set(trainer.get_decay_parameter_names(model))
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in trained if n in decayed], "weight_decay": trainer.args.weight_decay},
        {"params": [p for n, p in trained if n not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _muon(model, groups: list[dict], common: dict, momentum: float):
    """Return DeepSpeed's Muon, which orthogonalizes hidden matrices at every stage; AdamW for the rest.

    Scale the rate of each shape so that an update has AdamW's usual root mean square of 0.2 (arXiv 2502.16982, equation
    4), and one learning rate works for both.
    """
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
        # DeepSpeed multiplies by sqrt(max(1, rows / columns)). rate x decay must not depend on the scale.
        scale = 0.2 * math.sqrt(max(rows, columns)) / math.sqrt(max(1.0, rows / columns))
        label = f"muon-{rows}x{columns}"
        param_groups.append(
            {"params": params, "use_muon": True, "name": label, "lr": lr * scale, "momentum": momentum,
             "weight_decay": decay / scale}
        )  # fmt: skip
    return MuonWithAuxAdam(param_groups, adam_optimizer=torch.optim.AdamW, adam_optimizer_kwargs={"lr": common["lr"]})


def share_noise(settings, optimizer) -> None:
    """Seed torchao's rounding equally on all ranks: it uses the global generator, which dropout advances."""
    if settings.pure_bf16 and settings.optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
        _same_noise_on_all_ranks(optimizer, settings.seed)


def _same_noise_on_all_ranks(optimizer, seed: int) -> None:
    steps, forked = itertools.count(1), contextlib.ExitStack()

    def seed_this_step(*_) -> None:
        device = optimizer.param_groups[0]["params"][0].device
        # Without `devices` fork_rng initializes every GPU of the node and warns.
        forked.enter_context(torch.random.fork_rng([torch.cuda.current_device()] if device.type == "cuda" else []))
        torch.manual_seed(seed * 1_000_003 + next(steps))

    optimizer.register_step_pre_hook(seed_this_step)
    optimizer.register_step_post_hook(lambda *_: forked.close())
