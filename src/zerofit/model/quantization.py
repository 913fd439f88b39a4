"""Load a frozen base in 4 or 8 bits (QLoRA, arXiv 2305.14314)."""

import importlib.util

from zerofit.errors import UserError

# Adapters whose layers know bitsandbytes' linear layers; the others would compute with packed bytes.
ADAPTERS = ("lora", "ia3", "prompt_tuning", "prefix_tuning")


def bits(settings) -> int | None:
    """4, 8 or None."""
    values = settings.values
    return 4 if values.get("load_in_4bit") else 8 if values.get("load_in_8bit") else None


def resolve(settings) -> None:
    """Refuse what cannot work with a quantised base, before a model is loaded.

    Raises: UserError naming flag, cause and fix.
    """
    width = bits(settings)
    if width is None:
        return
    flag = f"--load_in_{width}bit"
    if settings.load_in_4bit and settings.load_in_8bit:
        raise UserError("--load_in_4bit and --load_in_8bit are both on: choose one.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{flag}: bitsandbytes is not installed (it has no wheel for Intel Macs): make install.")
    if settings.random_init:
        raise UserError(f"{flag} with --random_init: weights are quantised while they load; save the model first.")
    if settings.adapter not in ADAPTERS:
        raise UserError(
            f"{flag} with --adapter {settings.adapter}: its layers would compute with packed numbers; use --adapter "
            f"{', '.join(ADAPTERS[:-1])} or {ADAPTERS[-1]}."
        )
    if settings.init_lora_weights not in ("true", "gaussian", "orthogonal"):
        raise UserError(
            f"{flag} with --init_lora_weights {settings.init_lora_weights}: it changes the base weights, which are "
            "packed; leave one of the two out."
        )
    if settings.adapter == "ia3" and settings.deepspeed is not None:
        raise UserError(
            f"{flag} with --adapter ia3 above stage 0: peft computes it in fp32 outside of autocast, which "
            "only stage 0 has; use --zero 0, or --adapter lora."
        )
    if width == 8 and settings.values.get("use_dora"):
        raise UserError(
            "--load_in_8bit with --use_dora: DoRA unpacks the weights, and the first step loses the scales that this "
            "takes; use --load_in_4bit, or leave --use_dora out."
        )
    if settings.values.get("use_dora") and settings.zero == "3":
        raise UserError(
            f"{flag} with --use_dora at stage 3: DoRA measures whole base weights, and peft gathers packed ones in a way that "
            "DeepSpeed does not offer; use --zero 2, or leave --use_dora out."
        )
    if settings.offload == "all":
        raise UserError(
            f"{flag} with --offload all: DeepSpeed moves parameters without the constants that unpack them; use "
            "--offload optimizer."
        )
    if width == 8 and settings.zero == "3":
        raise UserError(
            "--load_in_8bit with stage 3: its layers keep a whole copy beside what DeepSpeed shares out, so every rank "
            "would hold the whole base; use --load_in_4bit, or --zero 2."
        )
    if settings.new_tokens:
        raise UserError(f"{flag} with --new_tokens: the base cannot grow while it is packed; leave one of the two out.")


def config(settings, dtype):
    """bitsandbytes' configuration: NF4 with doubly quantised constants, or LLM.int8.

    Args: dtype: of the matrix products. Packed numbers are stored in it too, the only type that ZeRO-3 shares out
        together with the other parameters.
    """
    from transformers import BitsAndBytesConfig

    if bits(settings) == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def keep_layout(model) -> None:
    """On CPUs with AVX512-BF16 bitsandbytes repacks weights in evaluation, and training would read them wrong."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def frozen_bytes(model) -> dict[str, int]:
    """Bytes of the frozen base: {"whole": packed or not, as if on one rank, "here": on this rank, "packed": whole
    packed weights, "packed_here": on this rank, "constants": what unpacks them, on every rank}.

    Under ZeRO-3 a parameter below the persistence threshold is counted whole on each rank, as it is held.
    """
    found = dict.fromkeys(("whole", "here", "packed", "packed_here", "constants"), 0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        whole = (getattr(parameter, "ds_numel", None) or parameter.numel()) * parameter.element_size()
        share = getattr(parameter, "ds_tensor", None)
        here = parameter.numel() * parameter.element_size()  # under ZeRO-3 nothing, between the steps
        if share is not None:
            kept = whole if getattr(parameter, "ds_persist", False) else here
            here = kept + share.numel() * share.element_size()
        found["whole"] += whole
        found["here"] += here
        if _is_packed(parameter):
            found["packed"] += whole
            found["packed_here"] += here
            found["constants"] += _constants(parameter)
    return found


def numel(parameter) -> int:
    """Numbers that a parameter stands for: unpacked, and under ZeRO-3 the whole of it."""
    state = getattr(parameter, "quant_state", None)
    return state.shape.numel() if state is not None else getattr(parameter, "ds_numel", None) or parameter.numel()


def _is_packed(parameter) -> bool:
    return getattr(parameter, "quant_state", None) is not None or getattr(parameter, "SCB", None) is not None


def _shared_out(parameter, ranks: int) -> bool:
    """Whether this rank holds 1/ranks of it (whole as well where DeepSpeed lets a small parameter persist)."""
    share = getattr(parameter, "ds_tensor", None)
    if share is None or share.numel() > -(-parameter.ds_numel // ranks):
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
    """Say how many bytes of the base this rank holds; under stage 3, insist that packed weights are really shared out.

    Raises: UserError when they are not: every rank would hold the whole base without a word.
    """
    settings, ranks = trainer.settings, trainer.args.world_size
    if bits(settings) is None:
        return
    found = frozen_bytes(trainer.model)
    if settings.zero == "3" and ranks > 1:
        unshared = [n for n, p in trainer.model.named_parameters() if _is_packed(p) and not _shared_out(p, ranks)]
        if unshared:
            raise UserError(
                f"--load_in_{bits(settings)}bit with stage 3: {len(unshared)} packed weights are whole on every rank "
                f"({unshared[0]}, ...); use --zero 2, which says so, or another model."
            )
    if trainer.args.process_index == 0:
        print(
            f"{bits(settings)}-bit base: {found['here'] + found['constants']:,} bytes on each rank of "
            f"{found['whole'] + found['constants']:,} (packed weights {found['packed_here']:,} of {found['packed']:,}; "
            f"their constants, whole everywhere, {found['constants']:,})",
            flush=True,
        )
