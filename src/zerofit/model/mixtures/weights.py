"""Find the weights of experts that a router selects, and how many experts a token uses."""

# Keys of config.json for the number of experts of a layer, and for the number that a token selects.
COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SELECTED = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")

# Keys of config.json that turn configured experts off (Doge, Gemma 4).
SWITCHES = ("is_moe", "enable_moe_block")

# Classes of transformers 5.23 that compute all experts for each token, with weight 0 for most of them.
COMPUTE_ALL = ("Llama4TextExperts",)


def _first(config, names: tuple[str, ...]) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def count(config) -> int:
    """Return the number of experts of a layer; 0 for a dense model."""
    text = config.get_text_config()
    return 0 if any(getattr(text, name, True) is False for name in SWITCHES) else _first(text, COUNT)


def selected(config) -> int:
    """Return the number of experts that a token uses; 0 if config.json does not specify it."""
    return _first(config.get_text_config(), SELECTED)


def is_routed(name: str) -> bool:
    """Return whether this is the name of a layer's experts, such as model.layers.0.mlp.experts."""
    last = name.rpartition(".")[2]
    return "experts" in last and "shared" not in last


def routed(model) -> dict:
    """Return the weights of all experts that a router selects, by name, without shared experts."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
    stacked = count(base.config) if hasattr(base, "config") else 0
    weights = {}
    for module_name, module in base.named_modules():
        for name, weight in module.named_parameters(prefix=module_name, recurse=False):
            shape = _shape(weight)
            parts, is_stacked = name.split("."), len(shape) == 3 and min(shape) > 1 and shape[0] == stacked
            is_inside = any(is_routed(part) for part in parts[:-1])
            if ".lora_" not in name and (is_inside or (is_stacked and "shared" not in name)):
                weights[name] = weight
    return weights


def fused(model) -> dict:
    """Return the expert weights in tensors that hold all experts of a layer."""
    return {name: weight for name, weight in routed(model).items() if len(_shape(weight)) == 3}


def _shape(weight):
    """Return the full shape of a weight, also under ZeRO-3."""
    return getattr(weight, "ds_shape", weight.shape)


def has_kernels(model) -> bool:
    """Return whether transformers supports kernels for the model's experts, besides their loop."""
    return any(hasattr(module, "is_concatenated") for module in model.modules())


def computes_all(model) -> bool:
    """Return whether the model's class computes all experts for each token, not only the selected ones."""
    return any(type(module).__name__ in COMPUTE_ALL for module in model.modules())
