"""Train a mixture of experts: ZeRO-3 leaf modules, the experts' implementation, experts of a quantized base."""

import copy

import torch

from zerofit.base import hardware
from zerofit.base.errors import UserError
from zerofit.job.settings import decide
from zerofit.job.technique import Technique
from zerofit.model import load, quantization
from zerofit.model.mixtures import adapted, kernels
from zerofit.model.mixtures import weights as expert_weights

count, is_routed = expert_weights.count, expert_weights.is_routed


def fused_weights(model) -> int:
    """Return the number of expert weights in tensors that hold all experts of a layer."""
    return sum(weight.numel() for weight in expert_weights.fused(model).values())


# --- ranks that select different experts ---

# Classes that call their submodules for each token; ranks have different numbers of tokens.
CALLED_PER_TOKEN = ("Qwen4ExpTextQSAIndexer",)


def blocks(model) -> list[torch.nn.Module]:
    """Return the modules of a model whose experts are separate modules; fused experts are a single module."""
    lists = torch.nn.ModuleList, torch.nn.ModuleDict
    return [
        module
        for module in model.modules()
        if any(is_routed(name) and isinstance(child, lists) for name, child in module.named_children())
    ]


def install(settings, model) -> None:
    """Make all ranks gather and reduce the same weights, although each calls only the experts of its tokens.

    ZeRO-3 gathers the weights of a module when it is called, so the ranks would wait for each other forever. The
    weights of a leaf module are gathered together, and unused experts get a gradient of zeros.
    Raises: UserError at a stage that reduces only the gradients of a rank's experts.
    """
    alike = settings.world_size == 1 or (settings.deepspeed is None and settings.ddp_find_unused_parameters)
    expert_blocks = [] if alike else blocks(model)
    if expert_blocks and settings.zero != 3:
        instead = "--zero 3" + ("" if settings.deepspeed else ", or --ddp_find_unused_parameters true")
        raise UserError(
            f"--zero {settings.zero}: the experts of {type(model).__name__} are separate modules, and ranks that "
            f"select different experts would reduce different gradients; use {instead}."
        )
    if settings.zero != 3:
        return
    per_token = [module for module in model.modules() if type(module).__name__ in CALLED_PER_TOKEN]
    for block in expert_blocks + per_token:
        from deepspeed.utils import set_z3_leaf_module

        set_z3_leaf_module(block, True)


# --- arguments ---


def resolve_for_model(settings, config) -> None:
    """Choose `--experts_implementation auto`, and add decisions about adapted and packed experts.

    Args: config: the model's.
    """
    if not count(config):
        return

    model = load.check_model(settings, copy.deepcopy(config))
    if settings.experts_implementation == "auto":
        _choose_implementation(settings, config, model)
    if quantization.bits(settings):
        add_unpacked_decision(settings, model)
    if description := adapted.describe(model):
        by_peft = settings.values.get(adapted.FLAG) is None and not description.startswith("none")
        settings.decisions.append(
            f"experts adapted by LoRA: {description}" + f"; {adapted.attention_only(model)} excludes them" * by_peft
        )
    if missing := adapted.without_adapter(model, settings):
        settings.decisions.append(f"lora_target_modules: {missing}")


def _choose_implementation(settings, config, model) -> None:
    if not expert_weights.has_kernels(model):
        return
    fp32_weights = settings.keeps_fp32 and not settings.trains_adapter
    if fp32_weights and settings.precision != "fp32" and settings.dtype == "auto":
        why = "autocast does not apply to grouped products, and stage 0 keeps fp32 weights"
        decide(settings, "experts_implementation", "eager", why)
    else:  # not set by name, which transformers rejects for models without it
        experts = f"the {count(config)} experts of a layer"
        how = f"one product for {experts}"
        if not has_one_kernel(settings):
            where = "on a CPU" if settings.use_cpu else f"on this GPU in {settings.compute_dtype}"
            how = f"which torch computes in a loop over {experts} {where}"
        settings.decisions.append(f"experts_implementation auto: grouped_mm, {how}")


def has_one_kernel(settings) -> bool:
    """Return whether torch computes a job's grouped product with a single kernel."""
    is_on_gpu = not settings.use_cpu and settings.compute_dtype == "bf16"
    return is_on_gpu and hardware.groups_products(settings.planned_gpu)


def add_unpacked_decision(settings, model) -> None:
    """Add a decision if fused experts of a quantized base stay in 16 bits. Args: model: on the meta device."""
    fused, width = fused_weights(model), quantization.bits(settings)
    if not fused:
        return
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    packed = quantization.packed_weights(model)
    share = 2 * fused / (2 * (frozen - packed) + width / 8 * packed)
    settings.decisions.append(
        f"load_in_{width}bit: {share:.0%} of the base's bytes are fused experts, which stay in 16 bits: bitsandbytes "
        "only packs linear layers"
    )


TECHNIQUE = Technique(
    name="mixture of experts", resolve_for_model=resolve_for_model, self_test=kernels.self_test_grouped, install=install
)
