"""Tell which weights of a model are experts that a router selects, and how many of them a token goes through."""

# Names that config.json files have for the experts of a layer, and for how many of them a token selects.
COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SELECTED = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")

# What turns the experts off that a configuration has numbers for (Doge, Gemma 4).
SWITCHES = ("is_moe", "enable_moe_block")

# Classes of experts in transformers 5.23 that compute all of them for each token, with weight 0 for most.
COMPUTE_ALL = ("Llama4TextExperts",)


def _first(config, names: tuple[str, ...]) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def count(config) -> int:
    """Return the number of experts of a layer; 0 for a dense model."""
    text = config.get_text_config()
    return 0 if any(getattr(text, name, True) is False for name in SWITCHES) else _first(text, COUNT)


def selected(config) -> int:
    """Return the number of experts that a token goes through; 0 if config.json does not say."""
    return _first(config.get_text_config(), SELECTED)


def is_routed(name: str) -> bool:
    """Return whether a module of this name is the experts of a layer: model.layers.0.mlp.experts."""
    last = name.rpartition(".")[2]
    return "experts" in last and "shared" not in last


def routed(model) -> dict:
    """Return the weights of all experts that a router selects, by name; shared experts are not among them."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
    stacked = count(base.config) if hasattr(base, "config") else 0
    found = {}
    for name, module in base.named_modules():
        for own, weight in module.named_parameters(prefix=name, recurse=False):
            shape = _shape(weight)
            parts, is_stacked = own.split("."), len(shape) == 3 and min(shape) > 1 and shape[0] == stacked
            inside = any(is_routed(part) for part in parts[:-1])
            if ".lora_" not in own and (inside or (is_stacked and "shared" not in own)):
                found[own] = weight
    return found


def fused(model) -> dict:
    """Return the expert weights in tensors that hold all experts of a layer; none is a linear layer."""
    return {name: weight for name, weight in routed(model).items() if len(_shape(weight)) == 3}


def _shape(weight):
    """Return the shape of a weight, which under ZeRO-3 has none of its own."""
    return getattr(weight, "ds_shape", weight.shape)


def numel(model) -> int:
    """Return the number of weights of all experts that a router selects; shared experts are not counted."""
    return sum(weight.numel() for weight in routed(model).values())


def idle(model, config) -> int:
    """Return the number of expert weights that a token does not use; 0 if config.json does not say how many it does."""
    used, own = 0 if computes_all(model) else selected(config), count(config)
    return round(numel(model) * (1 - used / own)) if used and own else 0


def has_kernels(model) -> bool:
    """Return whether transformers has other kernels for the model's experts than their own loop."""
    return any(hasattr(module, "is_concatenated") for module in model.modules())


def computes_all(model) -> bool:
    """Return whether the model's class computes all experts for each token, and not only the selected ones."""
    return any(type(module).__name__ in COMPUTE_ALL for module in model.modules())
