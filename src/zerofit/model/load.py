"""Load the tokenizer, the configuration and the weights in the dtype that the precision needs."""

import contextlib
import hashlib
import json
import math
import os
import struct
from pathlib import Path

from zerofit.data import conversations, hub
from zerofit.errors import UserError
from zerofit.model import adapters, attention, ddp, quantization


def fingerprints(settings, train_set) -> dict[str, str]:
    """What a run must have in common with the checkpoint that it goes on from."""
    return {"data": train_set.fingerprint, "model": model_fingerprint(settings)}


def model_fingerprint(settings) -> str:
    """A hash of the model's configuration and of the ends of its weight files (a hub model: of its commit)."""
    config = load_config(settings)
    digest = hashlib.sha256(json.dumps(config.to_diff_dict(), sort_keys=True, default=str).encode())
    folder = Path(settings.model).expanduser()
    if settings.random_init:
        digest.update(b"random")
    elif folder.is_dir():
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as opened:
                opened.seek(-min(1 << 16, file.stat().st_size), os.SEEK_END)
                digest.update(f"{file.name} {file.stat().st_size}".encode() + opened.read())
    else:
        digest.update(str(getattr(config, "_commit_hash", "")).encode())
    return digest.hexdigest()[:24]


def load_tokenizer(settings):
    """The model's tokenizer, with a pad token that is not the end token and a chat template.

    Raises: UserError when the model is neither a folder nor a hub id that can be reached, or cannot be used.
    """
    from transformers import AutoTokenizer

    tokenizer = _load(AutoTokenizer.from_pretrained, settings, "tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {settings.model}: its tokenizer has no end token, so no answer could ever end.")
    if not tokenizer.is_fast:
        raise UserError(f"--model {settings.model}: needs a fast tokenizer (tokenizer.json), found a slow one only.")
    if tokenizer.pad_token_id is None:
        # Padding is masked by position (attention mask and labels), never by id, so sharing the id is safe here.
        tokenizer.pad_token = tokenizer.eos_token
    if settings.new_tokens:
        adapters.add_tokens(tokenizer, settings)
    if settings.chat_template:
        tokenizer.chat_template = conversations.choose_template(settings.chat_template, tokenizer)
    if isinstance(tokenizer.chat_template, dict):  # several named ones, e.g. default and tool_use
        tokenizer.chat_template = tokenizer.get_chat_template()
    if not tokenizer.chat_template:
        tokenizer.chat_template = conversations.TEMPLATES["plain"]
        settings.decisions.append(
            "chat template: the tokenizer has none; a plain '### User / ### Assistant' one is used"
        )
    return tokenizer


def load_config(settings):
    """The model's config.json.

    Raises: UserError when it cannot be had.
    """
    from transformers import AutoConfig

    return _load(AutoConfig.from_pretrained, settings, "config.json")


def _load(load, settings, what: str, **kwargs):
    name = settings.model
    folder = hub.model_folder(name)
    if folder is None:
        hub.check_reachable(f"--model {name}")
    try:
        return load(
            str(folder or name),
            revision=settings.model_revision,
            trust_remote_code=settings.trust_remote_code,
            **kwargs,
        )
    except (OSError, ValueError) as error:
        if what == "weights" and not isinstance(error, OSError):
            raise
        first = str(error).strip().splitlines()[0]
        raise UserError(f"--model {name}: its {what} could not be loaded: {first}") from None


def weight_dtype(settings) -> str:
    """The type that weights are loaded in: "float32", "bfloat16" or "float16".

    Under DeepSpeed with bf16/fp16 the engine keeps the fp32 master itself. Stage 0 trains what it loads, so full
    fine-tuning there needs fp32 (autocast does the products in bf16); a frozen LoRA base does not.
    """
    if settings.dtype != "auto":
        return settings.dtype
    half = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[settings.precision]
    frozen_base = settings.recipe == "lora"
    return half if settings.deepspeed is not None or frozen_base or settings.pure_bf16 else "float32"


def load_model(settings, tokenizer):
    """The causal LM, ready to train: sharded while loading under ZeRO-3, with the cache off.

    TrainingArguments must exist before this call; it registers the ZeRO-3 configuration that from_pretrained reads.
    """
    import torch
    from transformers import AutoModelForCausalLM, set_seed

    dtype = getattr(torch, weight_dtype(settings))
    if settings.deepspeed is None and dtype != torch.float32 and settings.recipe == "sft" and not settings.pure_bf16:
        print(f"note: --dtype {settings.dtype} with stage 0 trains without an fp32 master copy", flush=True)
    set_seed(settings.seed)
    attention.avoid_wrong_kernels()
    attention.fit(settings, load_config(settings))
    kwargs = {"attn_implementation": settings.attn_implementation, "dtype": dtype}
    sharded = settings.deepspeed is not None and settings.zero == "3"
    # Straight onto the GPU: N ranks that each hold the model in host memory first would need N times its size.
    device = None if sharded or settings.use_cpu else torch.device("cuda", torch.cuda.current_device())
    if settings.random_init:
        config = load_config(settings)
        with device or contextlib.nullcontext():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code, **kwargs)
    else:
        if device is not None:
            kwargs["device_map"] = {"": device}
        if quantization.bits(settings):
            kwargs["quantization_config"] = quantization.config(settings, dtype)
        try:
            model = _load(AutoModelForCausalLM.from_pretrained, settings, "weights", use_safetensors=True, **kwargs)
        except (ValueError, ImportError) as error:  # e.g. an attention implementation that is not installed
            raise UserError(f"--model {settings.model}: {str(error).strip().splitlines()[0]}") from None
    if quantization.bits(settings):
        quantization.keep_layout(model)
    if settings.new_tokens:
        adapters.resize_embeddings(model, tokenizer, settings)
    model.config.use_cache = False
    ddp.choose(settings, model.config)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if len(tokenizer) > model.config.get_text_config().vocab_size:
        raise UserError(
            f"--model {settings.model}: the tokenizer has {len(tokenizer)} tokens, the model only "
            f"{model.config.get_text_config().vocab_size} embeddings: they do not belong together."
        )
    return model


def check_model(settings):
    """Build the model and its adapter without memory, to meet wrong names before any process starts; return it.

    Raises: UserError for an attention implementation or target modules that do not exist.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from zerofit.model import fused_loss, tiled_mlp

    config = load_config(settings)
    attention.fit(settings, config)
    fused_loss.choose(settings, config)
    tiled_mlp.choose(settings, config)
    unset_hf_deepspeed_config()  # of an earlier run in this process: it would shard the model
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=settings.attn_implementation,
                trust_remote_code=settings.trust_remote_code,
            )
            if settings.recipe == "lora":
                adapters.add_adapter(model, settings)
        fused_loss.install(settings, model)
        fused_loss.router_loss(model)
        tiled_mlp.install(settings, model)
    except (ValueError, ImportError) as error:
        raise UserError(f"--model {settings.model}: {str(error).strip().splitlines()[0]}") from None
    return model


def count_parameters(model) -> tuple[int, int]:
    """(trainable, all) parameters; under ZeRO-3 the whole ones, not this rank's share."""
    sizes = [(quantization.numel(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trainable in sizes if trainable), sum(n for n, _ in sizes)


def verify_saved(folder: Path, numel: int) -> None:
    """Read the safetensors headers in `folder` and count what they hold.

    Args: numel: how many numbers must be there at least (tied weights counted once).
    Raises: RuntimeError for empty tensors or too few numbers: how ZeRO-3 saves go wrong in silence.
    """
    found = 0
    for file in sorted(Path(folder).glob("*.safetensors")):
        with file.open("rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        for name, entry in header.items():
            size = 0 if name == "__metadata__" else math.prod(entry["shape"])
            if name != "__metadata__" and size == 0:
                raise RuntimeError(f"{file}: {name} was saved empty.")
            found += size
    if found < numel:
        raise RuntimeError(f"{folder}: holds {found:,} of the {numel:,} trained numbers.")
