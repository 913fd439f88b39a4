"""Train a mixture of experts: leaf modules of ZeRO-3, the experts' implementation, what a quantized base leaves."""

import copy

import torch

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.job.settings import decide
from zerofit.job.technique import Technique
from zerofit.model import load, quantization
from zerofit.model.mixtures import adapted, kernels
from zerofit.model.mixtures import weights as of_experts

count, is_routed = of_experts.count, of_experts.is_routed


def fused_weights(model) -> int:
    """Return the number of expert weights in tensors that hold all experts of a layer; none is a linear layer."""
    return sum(weight.numel() for weight in of_experts.fused(model).values())


# --- ranks that select other experts ---

# Classes that call their parts for each token, of which ranks have other numbers.
ONCE_A_TOKEN = ("Qwen4ExpTextQSAIndexer",)


def blocks(model) -> list[torch.nn.Module]:
    """Return the modules of a model whose experts are modules of their own; fused experts are one module."""
    lists = torch.nn.ModuleList, torch.nn.ModuleDict
    return [
        module
        for module in model.modules()
        if any(is_routed(name) and isinstance(child, lists) for name, child in module.named_children())
    ]


def install(settings, model) -> None:
    """Make the ranks gather and reduce the same weights, where each calls only those that its tokens select.

    ZeRO-3 gathers the weights of a module when it is called, so the ranks would wait for each other forever. The
    weights of a leaf module are gathered together, and its unused experts get a gradient of zeros.
    Raises: UserError at a stage that reduces only the gradients that a rank has.
    """
    alike = settings.world_size == 1 or (settings.deepspeed is None and settings.ddp_find_unused_parameters)
    expert_blocks = [] if alike else blocks(model)
    if expert_blocks and settings.zero != 3:
        instead = "--zero 3" + ("" if settings.deepspeed else ", or --ddp_find_unused_parameters true")
        raise UserError(
            f"--zero {settings.zero}: the experts of {type(model).__name__} are modules of their own, and ranks that "
            f"select other experts would reduce other gradients; use {instead}."
        )
    if settings.zero != 3:
        return
    of_tokens = [module for module in model.modules() if type(module).__name__ in ONCE_A_TOKEN]
    for block in expert_blocks + of_tokens:
        from deepspeed.utils import set_z3_leaf_module

        set_z3_leaf_module(block, True)


# --- arguments ---


def resolve_for_model(settings, config) -> None:
    """Choose `--experts_implementation auto` for a mixture of experts; say which experts train and which are packed.

    Args: config: of the model.
    """
    if not count(config):
        return

    model = load.check_model(settings, copy.deepcopy(config))
    if settings.experts_implementation == "auto":
        _choose_implementation(settings, config, model)
    if quantization.bits(settings):
        say_unpacked(settings, model)
    if said := adapted.in_words(model):
        by_peft = settings.values.get(adapted.FLAG) is None and not said.startswith("none")
        settings.decisions.append(
            f"experts that LoRA adapts: {said}" + f"; {adapted.attention_only(model)} leaves them out" * by_peft
        )
    if lost := adapted.left_out(model, settings):
        settings.decisions.append(f"lora_target_modules: {lost}")


def _choose_implementation(settings, config, model) -> None:
    if not of_experts.has_kernels(model):
        return
    fp32_weights = settings.keeps_fp32 and not settings.trains_adapter
    if fp32_weights and settings.precision != "fp32" and settings.dtype == "auto":
        why = "autocast does not reach grouped products, and stage 0 keeps fp32 weights"
        decide(settings, "experts_implementation", "eager", why)
    else:  # not asked for by name, which transformers refuses for models without it
        experts = f"the {count(config)} experts of a layer"
        how = f"one product for {experts}"
        if not has_one_kernel(settings):
            where = "a CPU" if settings.use_cpu else "this GPU" if settings.precision == "bf16" else "fp16 and fp32"
            how = f"which torch computes one after the other for {experts} on {where}"
        settings.decisions.append(f"experts_implementation auto: grouped_mm, {how}")


def has_one_kernel(settings) -> bool:
    """Return whether torch computes a grouped product of a job by one kernel."""
    is_on_gpu = not settings.use_cpu and settings.precision == "bf16"
    return is_on_gpu and hardware.groups_products(settings.planned_gpu)


def say_unpacked(settings, model) -> None:
    """Add the decision that fused experts of a quantized base stay in 16 bits, if the model has any.

    Args: model: on the meta device.
    """
    fused, width = fused_weights(model), quantization.bits(settings)
    if not fused:
        return
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    packed = quantization.packed_weights(model)
    share = 2 * fused / (2 * (frozen - packed) + width / 8 * packed)
    settings.decisions.append(
        f"load_in_{width}bit: {share:.0%} of the base's bytes are fused experts, which stay in 16 bits, because "
        "bitsandbytes packs linear layers only"
    )


TECHNIQUE = Technique(
    name="mixture of experts", resolve_for_model=resolve_for_model, self_test=kernels.prove_grouped, install=install
)
