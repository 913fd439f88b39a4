"""Quantize a frozen base to 4 or 8 bits (QLoRA, arXiv 2305.14314)."""

import importlib.util

import torch
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from zerofit.base import command_line
from zerofit.base.errors import UserError
from zerofit.job.technique import AllBut, Conflict, Technique
from zerofit.model import patches
from zerofit.model.kernels import linear_attention
from zerofit.model.weights import complete

# Adapters that support bitsandbytes' linear layers; others would compute with the packed bytes.
ADAPTERS = ("lora", "ia3", "prompt_tuning", "prefix_tuning")


def bits(settings) -> int | None:
    """Return 4, 8, or None without quantization."""
    values = settings.values
    return 4 if values.get("load_in_4bit") else 8 if values.get("load_in_8bit") else None


def resolve(settings) -> None:
    """Check that the package for a quantized base is installed. Raises: UserError."""
    width = bits(settings)
    if width and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            f"--load_in_{width}bit: bitsandbytes is not installed (it has no wheel for Intel Macs): "
            f"{command_line.install()}."
        )


def resolve_for_model(settings, config) -> None:
    """Add a decision that an MXFP4 base (gpt-oss) is unpacked for training. Raises: UserError if it cannot be unpacked.

    The plan counts unpacked weights too, because it builds the model from config.json.
    """
    if not complete.is_mxfp4(config) or settings.random_init:
        return
    place = f"--model {settings.model}: its experts are packed (MXFP4)"
    if bits(settings):
        raise UserError(
            f"{place} and are unpacked for training, so --load_in_{bits(settings)}bit would pack only the other "
            "layers; leave it out."
        )
    if settings.zero == 3 and settings.world_size > 1:
        raise UserError(
            f"{place}, and transformers unpacks all of them on every rank, which defeats stage 3; use --zero 2, or "
            'unpack them once: python -c "import sys, transformers as t; a, b = sys.argv[1:]; '
            "t.AutoModelForCausalLM.from_pretrained(a, quantization_config=t.Mxfp4Config(dequantize=True))"
            '.save_pretrained(b, save_original_format=False); t.AutoTokenizer.from_pretrained(a).save_pretrained(b)" '
            f"{settings.model} NEW_FOLDER"
        )
    settings.decisions.append("base weights: MXFP4 files, unpacked for training to about 4 times their size")


def config(width: int, dtype, excluded: tuple[str, ...] = ()):
    """Return the BitsAndBytesConfig: NF4 with double quantization, or LLM.int8.

    Args: width: 4 or 8 bits; dtype: dtype of the matrix products and of the storage of packed weights, which ZeRO-3
        only partitions in the dtype of the other parameters; excluded: modules that are not packed, besides the head.
    """
    # By default transformers excludes the head.
    skipped = {"llm_int8_skip_modules": [*excluded, "lm_head"]} if excluded else {}
    if width == 8:
        return BitsAndBytesConfig(load_in_8bit=True, **skipped)
    return BitsAndBytesConfig(
        **skipped,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def keep_layout(model) -> None:
    """Keep bitsandbytes from repacking weights during evaluation on AVX512-BF16 CPUs, as training misreads them."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def frozen_bytes(model) -> dict[str, int]:
    """Return the bytes of the frozen base: {"total", "on_rank", "packed", "packed_on_rank", "constants"}.

    "total" and "packed" count all ranks, the constants of the quantization are the same on every rank. Under ZeRO-3 a
    parameter below the persistence threshold counts in full on each rank.
    """
    base = dict.fromkeys(("total", "on_rank", "packed", "packed_on_rank", "constants"), 0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        all_bytes = (getattr(parameter, "ds_numel", None) or parameter.numel()) * parameter.element_size()
        partition = getattr(parameter, "ds_tensor", None)
        rank_bytes = parameter.numel() * parameter.element_size()  # 0 under ZeRO-3 while it is not gathered
        if partition is not None:
            gathered = all_bytes if getattr(parameter, "ds_persist", False) else rank_bytes
            rank_bytes = gathered + partition.numel() * partition.element_size()
        base["total"] += all_bytes
        base["on_rank"] += rank_bytes
        if _is_packed(parameter):
            base["packed"] += all_bytes
            base["packed_on_rank"] += rank_bytes
            base["constants"] += _constants(parameter)
    return base


def packed_weights(model) -> int:
    """Return the number of frozen weights that bitsandbytes packs.

    It packs linear layers, except the head and layers whose weights kernels read.
    Args: model: before quantization, with or without its adapter.
    """
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)  # the adapted layer
    read = linear_attention.read_by_kernels(model.config)
    linear = [
        module
        for name, module in model.named_modules()
        if type(module) in (torch.nn.Linear, Conv1D)
        and module is not head
        and name.removesuffix(".base_layer").rpartition(".")[2] not in read  # peft adds this suffix
    ]
    return sum(m.weight.numel() for m in linear if not m.weight.requires_grad)


def numel(parameter) -> int:
    """Return the number of weights in a parameter: unpacked, and under ZeRO-3 summed over all ranks."""
    state = getattr(parameter, "quant_state", None)
    return state.shape.numel() if state is not None else getattr(parameter, "ds_numel", None) or parameter.numel()


def _is_packed(parameter) -> bool:
    return getattr(parameter, "quant_state", None) is not None or getattr(parameter, "SCB", None) is not None


def _is_partitioned(parameter, ranks: int) -> bool:
    """Return whether ZeRO-3 partitions a parameter over the ranks; a small one may also persist in full."""
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None or partition.numel() > -(-parameter.ds_numel // ranks):
        return False
    return parameter.ds_persist or parameter.numel() == 0


def _constants(parameter) -> int:
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.SCB.nbytes
    tensors = [state.absmax, state.code]
    if state.nested:
        tensors += [state.state2.absmax, state.state2.code, state.offset]
    return sum(t.nbytes for t in tensors)


def verify_shares(trainer) -> None:
    """Print the bytes of the base on each rank; at stage 3 check that packed weights are partitioned.

    Raises: UserError if they are not: every rank would silently hold the full base.
    """
    settings, ranks = trainer.settings, trainer.args.world_size
    if bits(settings) is None:
        return
    base = frozen_bytes(trainer.model)
    if settings.zero == 3 and ranks > 1:
        unsharded = [n for n, p in trainer.model.named_parameters() if _is_packed(p) and not _is_partitioned(p, ranks)]
        if unsharded:
            raise UserError(
                f"--load_in_{bits(settings)}bit with stage 3: {len(unsharded)} packed weights are not partitioned "
                f"({unsharded[0]}, ...), so each rank would hold all of them; use --zero 2 or another model."
            )
    if trainer.args.process_index == 0:
        print(
            f"{bits(settings)}-bit base: {base['on_rank'] + base['constants']:,} of "
            f"{base['total'] + base['constants']:,} bytes on each rank (packed weights {base['packed_on_rank']:,} of "
            f"{base['packed']:,}; constants, in full on each rank, {base['constants']:,})",
            flush=True,
        )


def install(settings, model) -> None:
    """Release each gathered 4-bit weight after its layer: at stage 3 the backward would keep it."""
    if bits(settings) == 4 and settings.zero == 3:
        patches.release_gathered_4bit_weights()


_COMMON_CONFLICTS = (
    Conflict("random_init", (True,), "weights are quantized while they are loaded", "save the model first"),
    Conflict(
        "adapter",
        AllBut(*ADAPTERS),
        "it does not support packed layers",
        f"use --adapter {', '.join(ADAPTERS[:-1])} or {ADAPTERS[-1]}",
    ),
    Conflict(
        "init_lora_weights", AllBut("true", "gaussian", "orthogonal"), "it changes the base weights, which are packed"
    ),
    Conflict(
        "adapter",
        ("ia3",),
        "peft computes it in fp32 outside of autocast, which only stage 0 uses",
        "use --zero 0, or --adapter lora",
        stages=(1, 2, 3),
    ),
    Conflict(
        "offload",
        ("all",),
        "DeepSpeed moves parameters without their quantization constants",
        "use --offload optimizer",
    ),
    Conflict("new_tokens", None, "a packed base cannot grow"),
)

# The hooks of the first technique handle both.
TECHNIQUES = (
    Technique(
        name="4-bit base",
        flag="load_in_4bit",
        example="--load_in_4bit true --bf16 true",
        conflicts=(
            Conflict("load_in_8bit", (True,), "a base is loaded in one width", "choose one"),
            *_COMMON_CONFLICTS,
            Conflict(
                "use_dora",
                (True,),
                "DoRA needs the norms of full base weights, and peft cannot gather packed weights under DeepSpeed",
                "use --zero 2, or leave --use_dora out",
                stages=(3,),
            ),
        ),
        resolve=resolve,
        resolve_for_model=resolve_for_model,
        install=install,
    ),
    Technique(
        name="8-bit base",
        flag="load_in_8bit",
        example="--load_in_8bit true --bf16 true",
        conflicts=(
            *_COMMON_CONFLICTS,
            Conflict(
                "use_dora",
                (True,),
                "DoRA unpacks the weights, but the first step deletes their scales",
                "use --load_in_4bit, or leave --use_dora out",
            ),
            Conflict(
                "zero",
                (3,),
                "its layers keep a full copy that DeepSpeed does not partition, so every rank would hold the full base",
                "use --load_in_4bit, or --zero 2",
            ),
        ),
    ),
)
