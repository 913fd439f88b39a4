"""Outline a model by the shapes of its weights, with or without a LoRA, for what reads its modules without torch.

The classes are called as torch's, and answer what speed/work.py and model/mixtures/weights.py ask of a module.
"""

import math
from collections.abc import Iterator
from types import SimpleNamespace


class Config(SimpleNamespace):
    """A config.json of a language model."""

    def get_text_config(self) -> "Config":
        return self


class Weight:
    """The shape of a weight, and whether it is trained."""

    def __init__(self, *shape: int):
        self.shape, self.requires_grad = shape, True

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)


class Module:
    """A module with its own weights and with the modules in it, by name."""

    def __init__(self, inside: "dict[str, Module] | None" = None, **own: Weight):
        self.inside, self.own = inside or {}, own

    def named_modules(self, name: str = "") -> "Iterator[tuple[str, Module]]":
        """Yield the module and all in it, each before those in it, as torch does."""
        yield name, self
        for child, module in self.inside.items():
            yield from module.named_modules(f"{name}.{child}" if name else child)

    def modules(self) -> "Iterator[Module]":
        return (module for _, module in self.named_modules())

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Weight]]:
        """Yield each weight once, by its first name."""
        seen = set()
        for name, module in self.named_modules(prefix) if recurse else [(prefix, self)]:
            for own, weight in module.own.items():
                if id(weight) not in seen:
                    seen.add(id(weight))
                    yield f"{name}.{own}" if name else own, weight

    def parameters(self) -> Iterator[Weight]:
        return (weight for _, weight in self.named_parameters())


class Embedding(Module):
    """An embedding of tokens."""


class Linear(Module):
    """A linear layer."""

    def __init__(self, wide: int, out: int, bias: bool = False):
        super().__init__(weight=Weight(out, wide), **({"bias": Weight(out)} if bias else {}))


class Router(Module):
    """A router of experts, which is no linear layer in transformers 5: its weight is never packed."""

    def __init__(self, wide: int, experts: int):
        super().__init__(weight=Weight(experts, wide))


class RMSNorm(Module):
    """A norm of several kernels."""

    def __init__(self, size: int):
        super().__init__(weight=Weight(size))


class Experts(Module):
    """The fused experts of a layer, for which transformers has kernels."""

    is_concatenated = True

    def __init__(self, experts: int, hidden: int, width: int):
        super().__init__(gate_up_proj=Weight(experts, 2 * width, hidden), down_proj=Weight(experts, hidden, width))


class Model(Module):
    """A language model: embedding, layers, norm and head."""

    def __init__(self, config: Config, layers: list[Module]):
        self.config, self.layers = config, layers
        embedding = Embedding(weight=Weight(config.vocab_size, config.hidden_size))
        head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            head.own = embedding.own
        listed = Module({str(place): layer for place, layer in enumerate(layers)})
        body = Module({"embed_tokens": embedding, "layers": listed, "norm": RMSNorm(config.hidden_size)})
        super().__init__({"model": body, "lm_head": head})

    def get_output_embeddings(self) -> Module:
        return self.inside["lm_head"]


def adapt(model: Model, rank: int) -> int:
    """Freeze a model and put LoRA on all linear layers but the head, on experts and routers, as peft does.

    Returns: the number of weights to which peft adds the product of A and B: those of experts and routers.
    """
    for weight in model.parameters():
        weight.requires_grad = False
    return sum(_adapt_inside(layer, rank) for layer in model.layers)


def _adapt_inside(parent: Module, rank: int) -> int:
    added = 0
    for name, module in parent.inside.items():
        if isinstance(module, Experts):
            parent.inside[name] = _adapted_experts(module, rank)
        elif isinstance(module, (Linear, Router)):
            out, wide = module.own["weight"].shape
            parent.inside[name] = _with_lora(module, wide, out, rank)
        else:
            added += _adapt_inside(module, rank)
            continue
        if not isinstance(module, Linear):
            added += sum(weight.numel() for weight in module.own.values())
    return added


def _with_lora(base: Module, wide: int, out: int, rank: int) -> Module:
    a, b = Module({"default": Linear(wide, rank)}), Module({"default": Linear(rank, out)})
    return Module({"base_layer": base, "lora_A": a, "lora_B": b})


def _adapted_experts(experts: Experts, rank: int) -> Module:
    """Return experts with an adapter of each tensor: the A of all experts are one matrix, and so are the B.

    gate_up_proj holds two matrices of each expert, for which peft doubles the rank.
    """
    found: Module = experts
    for name, times in (("gate_up_proj", 2), ("down_proj", 1)):
        count, out, wide = experts.own[name].shape
        found = _with_lora(found, wide, out, times * rank * count)
    return found
