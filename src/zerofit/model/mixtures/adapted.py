"""Adapt experts with LoRA by peft's target_parameters, and the linear layers that peft takes for experts."""

import copy
import re

from zerofit.base.errors import UserError
from zerofit.model.mixtures import weights

FLAG = "lora_target_parameters"
ALL = "experts"  # its word for all fused experts

# Flags that peft's wrapper of a parameter does not have, and their values without effect.
_NOT_OF_PARAMETERS = {"lora_dropout": (0.0,), "use_dora": (False,), "init_lora_weights": ("true", "gaussian")}


def complete(config, model, settings) -> None:
    """Complete peft's targets: the word `experts`, and linear layers of the names that peft turns into fused experts.

    peft 0.21 reads gate_proj, up_proj and down_proj of the types in its table as experts, and forgets the linear layers
    of these names, which are those of shared experts and dense layers. They become target parameters too: the same
    product of A and B, under the same names in the saved adapter.
    Args: config: peft's LoraConfig, changed in place; model: not wrapped yet.
    Raises: UserError for a name that no parameter has, and for flags that an adapter of a parameter does not have.
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
                f"--lora_target_modules {' '.join(sorted(paths))}: peft 0.21 takes these names for experts, and packed "
                "layers cannot be named otherwise; leave them out, or the packing of the base."
            )
        named += [f"{path}.weight" for path in sorted(paths)]
    of_model = _copied(config, model, named)
    _refuse_widened(config, of_model, model)
    lost = _lost(config, of_model, model)
    if lost and _is_packed(settings):
        lost = []  # a packed weight cannot be added to; left_out says so
    config.target_parameters = sorted({*named, *lost}) or None
    adapts_parameters = config.target_parameters or getattr(of_model, "target_parameters", None)
    for flag, values in _NOT_OF_PARAMETERS.items() if adapts_parameters else ():
        if (value := settings.values.get(flag)) not in values:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UserError(
                f"--{flag} {shown}: the targets hold fused experts, which peft adapts as parameters, and those have no "
                f"such setting; leave it out, or adapt linear layers only: {attention_only(model)}."
            )


def attention_only(model) -> str:
    """Return the flag that adapts the linear layers of the model's attention, and no experts."""
    import torch

    paths = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    names = {path.replace(".base_layer", "") for path in paths if "attn" in path or "attention" in path}
    return (
        f"--lora_target_modules {' '.join(sorted({name.rpartition('.')[2] for name in names if 'lora' not in name}))}"
    )


def _is_packed(settings) -> bool:
    return bool(settings.values.get("load_in_4bit") or settings.values.get("load_in_8bit"))


def _suffix(name: str) -> str:
    """Return the name within its layer: mlp.experts.down_proj."""
    return re.split(r"\.\d+\.", name)[-1]


def _named(asked, model) -> list[str]:
    """Return the names of the parameters that the flag asks for. Raises: UserError where there are none."""
    if not asked:
        return []
    fused, own = weights.fused(model), dict(model.named_parameters())
    if list(asked) == [ALL]:
        if not fused:
            raise UserError(
                f"--{FLAG} {ALL}: {type(model).__name__} has no fused experts, the tensors that hold all experts of a "
                "layer; leave it out."
            )
        return sorted({_suffix(name) for name in fused})
    for name in asked:
        if not any(key == name or key.endswith(f".{name}") for key in own):
            there = ", ".join(sorted({_suffix(key) for key in fused})) or "none"
            raise UserError(f"--{FLAG} {name}: the model has no parameter of that name (fused experts: {there}).")
    return list(asked)


def _check_modules(config, model) -> None:
    """Raise UserError if no module has a name of the targets: beside parameters peft only warns."""
    from peft.tuners.tuners_utils import check_target_module_exists

    asked = config.target_modules
    if not asked or asked == "all-linear":
        return
    if not any(check_target_module_exists(config, name) for name, _ in model.named_modules()):
        shown = asked if isinstance(asked, str) else " ".join(sorted(asked))
        raise UserError(
            f"--lora_target_modules {shown}: the model has no such module; the attention's are "
            f"{attention_only(model).partition(' ')[2]}."
        )


def _refuse_widened(config, of_model, model) -> None:
    """Raise UserError where peft adapts more than an expression matches: in a mixture it takes the last names alone."""
    from peft.tuners.tuners_utils import check_target_module_exists as is_target

    if not isinstance(config.target_modules, str) or config.target_modules == "all-linear":
        return
    wider = [name for name, _ in model.named_modules() if is_target(of_model, name) and not is_target(config, name)]
    wider += sorted({*(of_model.target_parameters or ())} - {*(config.target_parameters or ())})
    if wider:
        raise UserError(
            f"--lora_target_modules {config.target_modules}: peft 0.21 would adapt {wider[0]} of "
            f"{type(model).__name__} too; name the modules, and experts with --{FLAG}."
        )


def _paths(config, model) -> set[str]:
    """Return the targets that are paths of linear layers (shared_experts.up_proj) and that peft takes for experts."""
    import torch

    if not isinstance(config.target_modules, (list, set)):
        return set()
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    paths = {t for t in config.target_modules if "." in t and any(n == t or n.endswith(f".{t}") for n in linear)}
    return {path for path in paths if names_experts(config, model, path)}


def _copied(config, model, named: list[str]):
    """Return a copy of peft's configuration as it is for this model. Raises: ValueError of peft."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    found = copy.deepcopy(config)
    found.target_parameters = list(named)
    convert_peft_config_for_transformers(found, model, None)
    return found


def names_experts(config, model, name: str) -> bool:
    """Return whether a target, or the path of one, is one that peft takes for fused experts."""
    alone = copy.copy(config)
    alone.target_modules = [name]
    try:
        return name not in (_copied(alone, model, []).target_modules or ())
    except ValueError:  # gate_proj without up_proj, which are one tensor in experts
        return True


def _lost(config, of_model, model) -> list[str]:
    """Return the weights of linear layers that the targets name and that peft's configuration of the model does not."""
    import torch
    from peft.tuners.tuners_utils import check_target_module_exists

    if of_model.target_modules == config.target_modules:
        return []
    head = model.get_output_embeddings()
    linear = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head}
    wanted = copy.copy(config)
    if config.target_modules == "all-linear":
        wanted.target_modules = linear
    missed = {
        name
        for name in linear
        if check_target_module_exists(wanted, name) and not check_target_module_exists(of_model, name)
    }
    suffixes = {_suffix(name) for name in missed}
    covered = {name for name in linear if any(name == s or name.endswith(f".{s}") for s in suffixes)}
    return [f"{name}.weight" for name in (suffixes if covered == missed else missed)]


def left_out(model, settings) -> str:
    """Return which packed linear layers have no adapter, because peft takes their names for experts; "" if none."""
    import torch

    if not _is_packed(settings) or not wrappers(model):
        return ""
    mapped = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
    names = {
        _suffix(name)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and name.rpartition(".")[2] in mapped
    }
    asked = {name.rpartition(".")[2] for name in settings.lora_target_modules}
    if not names or not asked & {"all-linear", *mapped}:
        return ""
    return f"no adapter on {', '.join(sorted(names))}: peft 0.21 takes these names for experts, and they are packed"


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

    Those of linear layers are not among them: fused_lora.py adds to their outputs.
    """
    import torch

    of_others = (w for w in wrappers(model).values() if not isinstance(w.get_base_layer(), torch.nn.Linear))
    return sum(wrapper.get_param().numel() for wrapper in of_others)


def in_words(model) -> str:
    """Return which experts' parameters are adapted; "" for a dense model or one without LoRA.

    Args: model: with its adapter, on the meta device.
    """
    if not hasattr(model, "peft_config") or next(iter(model.peft_config.values())).peft_type != "LORA":
        return ""
    names = {name.replace(".base_layer", "") for name in weights.fused(model)}
    found = {name: wrapper for name, wrapper in wrappers(model).items() if name in names}
    if not names:
        return ""
    if not found:
        return f"none: they are fused tensors, no linear layers; --{FLAG} {ALL} adapts them"
    kinds: dict[str, list] = {}
    for name, wrapper in found.items():
        kinds.setdefault(_suffix(name), []).append(wrapper)
    ranks = ", ".join(f"{kind} (rank {next(iter(of[0].r.values()))})" for kind, of in sorted(kinds.items()))
    first = next(iter(found.values()))
    own = sum(p.numel() for of in kinds.values() for w in of for m in (w.lora_A, w.lora_B) for p in m.parameters())
    whole = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{ranks}, for each of {first.num_experts}: {own / whole:.0%} of the adapter's {whole:,} numbers"
