"""Adapt experts with LoRA by peft's target_parameters, and linear layers that peft mistakes for experts."""

import copy
import re

from zerofit.base.errors import UserError
from zerofit.model.mixtures import weights

FLAG = "lora_target_parameters"
ALL = "experts"  # the value that selects all fused experts

# Flags that peft does not support for parameters, and their values without effect.
_UNSUPPORTED = {"lora_dropout": (0.0,), "use_dora": (False,), "init_lora_weights": ("true", "gaussian")}


def complete(config, model, settings) -> None:
    """Complete peft's targets: expand the value `experts`, and add linear layers that peft mistakes for fused experts.

    For model types in its table, peft 0.21 takes gate_proj, up_proj and down_proj for experts, and ignores linear
    layers of these names in shared experts and dense layers. They become target parameters too, with the same product
    of A and B and the same names in the saved adapter.
    Args: config: peft's LoraConfig, changed in place; model: not wrapped yet.
    Raises: UserError for a name that matches no parameter, and for flags that are not supported for parameters.
    """
    if not hasattr(config, "target_parameters"):
        return
    named = _named(config.target_parameters or [], model)
    if named:
        _check_modules(config, model)
    paths = _paths(config, model)
    if paths:
        config.target_modules = sorted(set(config.target_modules) - paths)
        if _is_packed(settings):
            raise UserError(
                f"--lora_target_modules {' '.join(sorted(paths))}: peft 0.21 mistakes these names for experts, and "
                "packed layers cannot be adapted as parameters; leave these names out, or do not pack the base."
            )
        named += [f"{path}.weight" for path in sorted(paths)]
    converted = _converted(config, model, named)
    _check_not_widened(config, converted, model)
    missed = _missed(config, converted, model)
    if missed and _is_packed(settings):
        missed = []  # packed weights cannot be target parameters; `without_adapter` reports them
    config.target_parameters = sorted({*named, *missed}) or None
    adapts_parameters = config.target_parameters or getattr(converted, "target_parameters", None)
    for flag, values in _UNSUPPORTED.items() if adapts_parameters else ():
        if (value := settings.values.get(flag)) not in values:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(
                f"--{flag} {shown}: peft does not support it for fused experts, which are among the targets; leave it "
                f"out, or adapt linear layers only: {attention_only(model)}."
            )


def attention_only(model) -> str:
    """Return the flag that adapts only the linear layers of the model's attention."""
    import torch

    paths = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    names = {path.replace(".base_layer", "") for path in paths if "attn" in path or "attention" in path}
    return (
        f"--lora_target_modules {' '.join(sorted({name.rpartition('.')[2] for name in names if 'lora' not in name}))}"
    )


def _is_packed(settings) -> bool:
    return bool(settings.values.get("load_in_4bit") or settings.values.get("load_in_8bit"))


def _suffix(name: str) -> str:
    """Return the name within its layer, such as mlp.experts.down_proj."""
    return re.split(r"\.\d+\.", name)[-1]


def _named(targets, model) -> list[str]:
    """Return the names of the parameters that the flag selects. Raises: UserError if a name matches nothing."""
    if not targets:
        return []
    fused, parameters = weights.fused(model), dict(model.named_parameters())
    if list(targets) == [ALL]:
        if not fused:
            raise UserError(
                f"--{FLAG} {ALL}: {type(model).__name__} does not have fused experts (tensors with all experts of a "
                "layer); leave it out."
            )
        return sorted({_suffix(name) for name in fused})
    for name in targets:
        if not any(key == name or key.endswith(f".{name}") for key in parameters):
            names = ", ".join(sorted({_suffix(key) for key in fused})) or "none"
            raise UserError(f"--{FLAG} {name}: it matches no parameter; the fused experts are {names}.")
    return list(targets)


def _check_modules(config, model) -> None:
    """Raise UserError if the targets match no module: with target parameters, peft only warns."""
    from peft.tuners.tuners_utils import check_target_module_exists

    targets = config.target_modules
    if not targets or targets == "all-linear":
        return
    if not any(check_target_module_exists(config, name) for name, _ in model.named_modules()):
        shown = targets if isinstance(targets, str) else " ".join(sorted(targets))
        raise UserError(
            f"--lora_target_modules {shown}: it matches no module; the attention has "
            f"{attention_only(model).partition(' ')[2]}."
        )


def _check_not_widened(config, converted, model) -> None:
    """Raise UserError if peft adapts more than an expression matches: in a mixture it only compares the last names."""
    from peft.tuners.tuners_utils import check_target_module_exists as is_target

    if not isinstance(config.target_modules, str) or config.target_modules == "all-linear":
        return
    wider = [name for name, _ in model.named_modules() if is_target(converted, name) and not is_target(config, name)]
    wider += sorted({*(converted.target_parameters or ())} - {*(config.target_parameters or ())})
    if wider:
        raise UserError(
            f"--lora_target_modules {config.target_modules}: peft 0.21 would also adapt {wider[0]} of "
            f"{type(model).__name__}; list the names of modules, and experts with --{FLAG}."
        )


def _paths(config, model) -> set[str]:
    """Return targets that are paths of linear layers (shared_experts.up_proj) and that peft mistakes for experts."""
    import torch

    if not isinstance(config.target_modules, (list, set)):
        return set()
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    paths = {t for t in config.target_modules if "." in t and any(n == t or n.endswith(f".{t}") for n in linear)}
    return {path for path in paths if names_experts(config, model, path)}


def _converted(config, model, named: list[str]):
    """Return a copy of peft's configuration after peft's conversion for this model. Raises: ValueError of peft."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = copy.deepcopy(config)
    converted.target_parameters = list(named)
    convert_peft_config_for_transformers(converted, model, None)
    return converted


def names_experts(config, model, name: str) -> bool:
    """Return whether peft takes a target, or the path of a target, for fused experts."""
    single = copy.copy(config)
    single.target_modules = [name]
    try:
        return name not in (_converted(single, model, []).target_modules or ())
    except ValueError:  # gate_proj without up_proj: experts have both in one tensor
        return True


def _missed(config, converted, model) -> list[str]:
    """Return the weights of linear layers that match the targets but are missing after peft's conversion."""
    import torch
    from peft.tuners.tuners_utils import check_target_module_exists

    if converted.target_modules == config.target_modules:
        return []
    head = model.get_output_embeddings()
    linear = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    wanted = copy.copy(config)
    if config.target_modules == "all-linear":
        wanted.target_modules = linear
    missed = {
        name
        for name in linear
        if check_target_module_exists(wanted, name) and not check_target_module_exists(converted, name)
    }
    suffixes = {_suffix(name) for name in missed}
    covered = {name for name in linear if any(name == s or name.endswith(f".{s}") for s in suffixes)}
    return [f"{name}.weight" for name in (suffixes if covered == missed else missed)]


def without_adapter(model, settings) -> str:
    """Return a sentence on packed linear layers without an adapter, because peft mistakes them for experts, or ""."""
    import torch

    if not _is_packed(settings) or not wrappers(model):
        return ""
    mapped = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
    names = {
        _suffix(name)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and name.rpartition(".")[2] in mapped
    }
    targets = {name.rpartition(".")[2] for name in settings.lora_target_modules}
    if not names or not targets & {"all-linear", *mapped}:
        return ""
    return f"no adapter on {', '.join(sorted(names))}: they are packed, and peft 0.21 mistakes these names for experts"


def wrappers(model) -> dict[str, object]:
    """Return peft's wrappers of parameters, by the name of the parameter in the base model."""
    from peft.tuners.lora.layer import ParamWrapper

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        ".".join(part for part in (*name.split("."), module.parameter_name) if part != "base_layer"): module
        for name, module in base.named_modules()
        if isinstance(module, ParamWrapper)
    }


def added_weights(model) -> int:
    """Return the number of weights to which peft adds the product of A and B before they are used.

    Linear layers are not counted: fused_lora.py adds to their outputs.
    """
    import torch

    others = (w for w in wrappers(model).values() if not isinstance(w.get_base_layer(), torch.nn.Linear))
    return sum(wrapper.get_param().numel() for wrapper in others)


def describe(model) -> str:
    """Return a description of the adapted experts; "" for a dense model or one without LoRA.

    Args: model: with its adapter, on the meta device.
    """
    if not hasattr(model, "peft_config") or next(iter(model.peft_config.values())).peft_type != "LORA":
        return ""
    names = {name.replace(".base_layer", "") for name in weights.fused(model)}
    adapted = {name: wrapper for name, wrapper in wrappers(model).items() if name in names}
    if not names:
        return ""
    if not adapted:
        return f"none, because they are fused tensors; --{FLAG} {ALL} adapts them"
    kinds: dict[str, list] = {}
    for name, wrapper in adapted.items():
        kinds.setdefault(_suffix(name), []).append(wrapper)
    ranks = ", ".join(f"{kind} (rank {next(iter(group[0].r.values()))})" for kind, group in sorted(kinds.items()))
    first = next(iter(adapted.values()))
    in_experts = sum(p.numel() for w in adapted.values() for m in (w.lora_A, w.lora_B) for p in m.parameters())
    total = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{ranks}, for each of {first.num_experts}: {in_experts / total:.0%} of the adapter's {total:,} weights"
