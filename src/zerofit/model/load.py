"""Load tokenizer, configuration and weights, in the dtype that the precision needs."""

import contextlib
import hashlib
import inspect
import json
import math
import os
import re
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import modeling_auto

from zerofit.base import hub
from zerofit.base.errors import UserError, first_line, without_line_breaks
from zerofit.data.chat_templates import arguments, built_in
from zerofit.job import parallel_dims
from zerofit.job.settings import Check, Decision
from zerofit.model import adapters, attention, freezing, fused_loss, generation, patches, quantization, tiled_mlp
from zerofit.model.image_text import classes, towers
from zerofit.model.kernels import linear_attention
from zerofit.model.mixtures import weights as mixtures
from zerofit.model.weights import complete, config_json, files, finite

MAX_PARAMETERS = 10**14
BATCH_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # dtype of each precision

_last_checked: tuple | None = None  # (key, model) of the last `check_model`


def fingerprints(settings, train_set) -> dict[str, str]:
    """Return the hashes of data and model, to compare with the hashes in a checkpoint to resume."""
    return {"data": train_set.fingerprint, "model": model_fingerprint(settings)}


def model_fingerprint(settings) -> str:
    """Hash the configuration and the ends of the weight files; for a Hub model, the commit."""
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
    """Load the tokenizer with --new_tokens, --chat_template, --chat_template_kwargs and a pad token.

    The pad token defaults to the end token, the chat template to the built-in `plain`.
    Raises: UserError for a model that cannot be found, or a tokenizer that is slow or lacks an end token.
    """
    folder = hub.model_folder(settings.model)
    if folder and not any(re.search(r"token|vocab|\.model$", file.name) for file in folder.iterdir()):
        # Without files, transformers would build an empty tokenizer from its class.
        raise UserError(f"--model {settings.model}: tokenizer not found in the folder; copy tokenizer.json and "
                        "tokenizer_config.json of the model into it.")  # fmt: skip
    tokenizer = _load(AutoTokenizer.from_pretrained, settings, "tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {settings.model}: eos_token is not set; add it to tokenizer_config.json.")
    if not tokenizer.is_fast:
        raise UserError(f"--model {settings.model}: the tokenizer is slow; a fast one (tokenizer.json) is required.")
    if tokenizer.pad_token_id is None:
        # Safe: padding is masked by position (attention mask and labels), never by id.
        tokenizer.pad_token = tokenizer.eos_token
    if settings.new_tokens:
        adapters.add_tokens(tokenizer, settings)
    if settings.chat_template:
        tokenizer.chat_template = built_in.choose(settings.chat_template, tokenizer)
    if isinstance(tokenizer.chat_template, dict):  # several named templates, e.g. default and tool_use
        tokenizer.chat_template = tokenizer.get_chat_template()
    if not tokenizer.chat_template:
        tokenizer.chat_template = built_in.TEMPLATES["plain"]
        sentence = "chat template: not set in the tokenizer; the built-in '### User / ### Assistant' template is used"
        settings.decisions.append(Decision(sentence, "chat_template"))
    if defaults := arguments.parse_arguments(arguments.FLAG, settings.chat_template_kwargs):
        tokenizer.chat_template = arguments.with_defaults(tokenizer.chat_template, defaults)
        values = ", ".join(f"{name} is {json.dumps(value, ensure_ascii=False)}" for name, value in defaults.items())
        sentence = f"chat template: {values} by default, which a row or a caller can override; saved in final/"
        settings.decisions.append(Decision(sentence, "chat_template"))
    if settings.new_tokens:
        adapters.add_new_tokens_decision(tokenizer, settings)
    return tokenizer


def load_config(settings):
    """Load the model's config.json.

    Raises: UserError when it cannot be loaded, or if the weights are already quantized.
    """
    config = _load(AutoConfig.from_pretrained, settings, "config.json")
    place = f"--model {settings.model}"
    folder = hub.model_folder(settings.model) or hub.fetch(settings.model, place, settings.model_revision)
    config_json.check(config, folder / "config.json", place)
    if names := config_json.without_outputs(config):
        sentence = f"config.json: {' and '.join(names)} set to the values that training needs, and saved like this"
        if sentence not in settings.decisions:
            settings.decisions.append(sentence)
    if not settings.random_init:
        config_json.untie(config, folder)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method is not None and not complete.is_mxfp4(config):  # transformers can unpack MXFP4 (gpt-oss)
        why = "an adapter could not be merged or compared" if settings.trains_adapter else "they cannot be trained"
        also = ", for QLoRA with --load_in_4bit true" if settings.trains_adapter else ""
        raise UserError(
            f"--model {settings.model}: its weights are already quantized ({method}), and {why}; use the original "
            f"model, or a 16-bit copy{also}."
        )
    return config


def known_ends(settings) -> list[int]:
    """Return the ids at which the base's generation stops, from generation_config.json, else from config.json."""
    if not settings.random_init:
        with contextlib.suppress(UserError):  # without the file, transformers uses config.json
            return generation.ids_of(_load(GenerationConfig.from_pretrained, settings, "generation").eos_token_id)
    return generation.ids_of(load_config(settings).get_text_config().eos_token_id)


def weight_files(settings) -> Path:
    """Return the folder with the model's weights, downloaded once per node, after a check of their headers.

    Raises: UserError for missing or incomplete weights; Unavailable if the Hub does not respond.
    """
    place = f"--model {settings.model}"
    if (folder := hub.model_folder(settings.model)) is None:
        folder = hub.fetch(settings.model, place, settings.model_revision)
        names = files.names(folder)
        folder = hub.fetch(settings.model, place, settings.model_revision, (*hub.SMALL_FILES, *names))
    files.check(folder, place)
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{place}: the folder also contains an adapter (adapter_config.json), which transformers would load; move "
            "the adapter's files elsewhere, or use a merged model."
        )
    return folder


def check_weights(settings) -> None:
    """Check the headers of the base's files before its weights are loaded.

    Raises: UserError for incomplete files, and for weights that are missing or have another shape.
    """
    if not settings.random_init:
        complete.check(weight_files(settings), f"--model {settings.model}", settings.trust_remote_code)


def _load(load, settings, part: str, **kwargs):
    name = settings.model
    folder = hub.model_folder(name)
    if folder is None:
        hub.fetch(name, f"--model {name}", settings.model_revision)
        # auto_map may point to code in another repository, which was not downloaded.
        kwargs["local_files_only"] = not settings.trust_remote_code
        if part == "weights":
            kwargs["adapter_kwargs"] = {"local_files_only": True}  # else each rank would search the Hub
    try:
        return load(
            str(folder or name),
            revision=settings.model_revision,
            trust_remote_code=settings.trust_remote_code,
            **kwargs,
        )
    except Exception as error:  # libraries raise various errors for unexpected values
        if isinstance(error, UserError) or (part == "weights" and not isinstance(error, OSError)):
            raise
        names_field = type(error).__name__.startswith("StrictDataclass")  # a message of several lines
        why = without_line_breaks(error) if names_field else first_line(error) if str(error) else type(error).__name__
        raise UserError(f"--model {name}: its {part} could not be loaded: {why}") from None


def weight_dtype(settings) -> str:
    """Return the dtype to load weights in: "float32", "bfloat16" or "float16".

    With bf16/fp16 DeepSpeed keeps fp32 master weights. Stage 0 trains the loaded weights, so full fine-tuning needs
    fp32 there (autocast computes products in bf16); a frozen LoRA base does not.
    """
    if settings.dtype != "auto":
        return settings.dtype
    precision_dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[settings.precision]
    frozen_base = settings.trains_adapter
    return precision_dtype if frozen_base or not settings.keeps_fp32 else "float32"


def load_model(settings, tokenizer, config=None, accept_nan=False):
    """Load the causal LM for training: sharded while loading under ZeRO-3, cache off.

    Create TrainingArguments before this call: they register the ZeRO-3 configuration that from_pretrained reads.
    Args: settings: after resolve.resolve_for_model; config: a configuration to build with --random_init (a simulation
        with fewer layers), default: the model's config.json; accept_nan: accept weights that are not finite, to replay
        the step that produced them.
    """
    global _last_checked
    _last_checked = None
    dtype = getattr(torch, weight_dtype(settings))
    if settings.keeps_fp32 and dtype != torch.float32 and not settings.trains_adapter:
        print(f"note: --dtype {settings.dtype} with stage 0 trains without an fp32 master copy", flush=True)
    set_seed(settings.seed)
    attention.avoid_wrong_kernels()
    config = load_config(settings) if config is None else config
    kwargs = {"attn_implementation": towers.attention_for(settings, config), "dtype": dtype}
    if settings.experts_implementation != "auto":  # a mixture of experts
        kwargs["experts_implementation"] = settings.experts_implementation
    sharded = settings.deepspeed is not None and settings.zero == 3
    # Load onto the GPU directly: N ranks with the model in host memory would need N times its size. With tensor
    # parallelism the full matrices may not fit the GPU, and DeepSpeed splits them in host memory.
    in_host = sharded or settings.use_cpu or settings.parallel_size("matrices") > 1
    device = None if in_host else torch.device("cuda", torch.cuda.current_device())
    if settings.random_init:
        if complete.is_mxfp4(config):
            del config.quantization_config  # random weights are not packed
        try:
            with device or contextlib.nullcontext():
                model = towers.build(settings, config, **kwargs)
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            raise UserError(f"--model {settings.model}: it does not fit into memory: {first_line(error)}.") from None
        settings.checks.append(Check("base_weights", None, "base weights: random numbers (--random_init true)"))
    else:
        if device is not None:
            kwargs["device_map"] = {"": device}
        model = _load_weights(settings, config, dtype, kwargs)
        if not accept_nan:
            finite.check(dict(model.named_parameters()), f"--model {settings.model}")
    if quantization.bits(settings):
        quantization.keep_layout(model)
    if settings.new_tokens:
        adapters.resize_embeddings(model, tokenizer, settings)
    text = model.config.get_text_config()
    text.use_cache = False
    if getattr(text, "pad_token_id", None) is None:  # CodeGen
        text.pad_token_id = tokenizer.pad_token_id
    check_vocabulary(settings, tokenizer, model.config)
    return settings.objective.prepare_model(model)


def _load_weights(settings, config, dtype, kwargs: dict):
    """Load the weights and check that they are complete."""
    place, folder = f"--model {settings.model}", weight_files(settings)
    unpacked = complete.unpacked(config)
    kwargs |= unpacked
    model_class = towers.model_class(settings, config)
    if bits := quantization.bits(settings):
        kwargs["quantization_config"] = quantization.config(
            bits, dtype, (*towers.class_towers(model_class), *linear_attention.read_by_kernels(config))
        )
    if settings.deepspeed is not None and settings.zero == 3 and mixtures.count(config):
        patches.compare_full_shapes()
    try:
        with complete.without_report():
            model, info = _load(
                model_class.from_pretrained,
                settings,
                "weights",
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `certify` raises a readable error for them
                **kwargs,
            )
    except (ValueError, ImportError) as error:  # such as an attention implementation that is not installed
        raise UserError(f"{place}: {first_line(error)}") from None
    except RuntimeError as error:
        if "state_dict" not in str(error) and "conversion" not in str(error):
            raise
        why = first_line(RuntimeError(str(error).replace(":\n\t", ": ")))
        raise UserError(f"{place}: its weights do not fit config.json: {why}.") from error
    if unpacked:
        complete.save_unpacked(model)
        for weight in model.parameters():  # transformers before 5.23 leaves unpacked experts in bf16
            weight.data = weight.data.to(dtype) if weight.dtype == torch.bfloat16 else weight.data
    towers.record_folder(model, config, folder)
    certify(settings, folder, complete.loaded_names(model, info))
    return model


def certify(settings, folder: Path, names: complete.Names) -> None:
    """Add the certificate's check of the base's weights. Raises: UserError if weights are missing."""
    complete.check_names(names, f"--model {settings.model}")
    digest, unexpected = files.identity(folder), None if names.unexpected is None else len(names.unexpected)
    count = "unknown" if unexpected is None else unexpected
    if sentence := complete.describe_unexpected(names):
        settings.decisions.append(sentence)
    sentence = (
        f"base weights: {names.total} of {names.total} tensors loaded, none missing, none mismatched "
        f"({count} unexpected); hash of headers and samples {digest}"
    )
    numbers = {"loaded": names.total, "missing": 0, "mismatched": 0, "unexpected": unexpected, "hash": digest}
    settings.checks.append(Check("base_weights", True, sentence, numbers))


def check_vocabulary(settings, tokenizer, config) -> None:
    """Raise UserError if the tokenizer has more tokens than the model has embeddings."""
    if len(tokenizer) > (embeddings := config.get_text_config().vocab_size):
        raise UserError(
            f"--model {settings.model}: the tokenizer has {len(tokenizer)} tokens, but the model has only {embeddings} "
            "embeddings; copy the tokenizer of this model into its folder."
        )


def check_model(settings, config=None):
    """Build the model and its adapter on the meta device, to find wrong names before ranks start.

    The last model is kept for settings that differ only in the sizes of batches and groups, or between the kit's own
    versions of sdpa: a plan checks many, and the adapters of a mixture of experts take half a second.
    Args: settings: after resolve.resolve_for_model; config: default: the model's config.json.
    Returns: the model, without memory for weights, to be read only.
    Raises: UserError if transformers cannot build the model, or if the attention implementation or target modules do
        not exist.
    """
    global _last_checked
    unset_hf_deepspeed_config()  # the configuration of an earlier run in this process would shard the model
    config = load_config(settings) if config is None else config
    sizes = () if settings.tiled_mlp != 1 else (*BATCH_SIZES, *parallel_dims.size_flags())
    values = {name: (value, settings.source.get(name)) for name, value in settings.values.items() if name not in sizes}
    if settings.sp_size > 1 or settings.attn_implementation == attention.NAME:
        del values["attn_implementation"]
    key = repr((settings.recipe.name, values, config.to_dict()))
    if _last_checked is None or _last_checked[0] != key:
        _last_checked = None  # its memory is free before the next one is built
        _last_checked = key, _checked(settings, config)
    return _last_checked[1]


def _checked(settings, config):
    """Build the model of `check_model`."""
    try:
        with torch.device("meta"):
            model = _built(settings, config)
            if settings.trains_adapter:
                adapters.add_adapter(model, settings)
        fused_loss.install(settings, model)
        fused_loss.router_loss(model)
        tiled_mlp.install(settings, model)
        freezing.install(settings, model)
    except ImportError as error:
        raise UserError(f"--model {settings.model}: {without_line_breaks(error)}.") from None
    except ValueError as error:
        raise UserError(f"--model {settings.model}: {first_line(error)}") from None
    return model


def _built(settings, config):
    """Return the causal model of a configuration. Raises: UserError if transformers cannot build it."""
    try:
        model = towers.build(settings, config, attn_implementation=towers.attention_for(settings, config))
    except (ValueError, ImportError):  # for the attention implementation, with a clear message
        raise
    except Exception as error:  # the model's code raises various errors for inconsistent values
        raise UserError(
            f"--model {settings.model}: transformers cannot build a causal language model from its config.json "
            f"({config.model_type}): {type(error).__name__}: {first_line(error)}"
        ) from None
    if (numbers := sum(p.numel() for p in model.parameters())) > MAX_PARAMETERS:
        raise UserError(
            f"--model {settings.model}: its config.json describes {numbers:,} parameters, more than any machine can "
            "hold; correct the sizes in it."
        )
    return model


def check_kind(settings, config) -> None:
    """Raise UserError for a model that is not a causal language model for text.

    transformers builds some other models as one: a decoder without its encoder, or a bidirectional model, which sees
    the tokens that it should predict.
    """
    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    has_remote_code = settings.trust_remote_code and hasattr(config, "auto_map")
    is_image_text = name is None or name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    is_masked = config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if has_remote_code:
        return
    place = f"--model {settings.model}: {config.model_type}"
    if hasattr(config, "vision_config") and is_image_text and not classes.has_towers(config):
        raise UserError(
            f"{place} is an image-text model without a separate language model; use a text-only checkpoint."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{place} is an encoder-decoder model; use a causal language model.")
    if is_masked and not getattr(config, "is_decoder", False):
        raise UserError(
            f"{place} is a bidirectional model: each token attends to the next one, so the model would learn to copy "
            "it; use a causal language model (with is_decoder true in its config.json)."
        )
    if config.model_type == "paligemma":
        raise UserError(f"{place} reads the prompt bidirectionally; use a causal language model.")
    cls = classes.text_class(config)
    is_custom = cls is None or not cls.__module__.startswith("transformers.")  # registered by the user
    if not is_custom and "loss_function" not in Path(inspect.getfile(cls)).read_text():
        raise UserError(
            f"--model {settings.model}: {cls.__name__} does not use transformers' loss functions, so its loss is not "
            "the next-token loss; use another model."
        )


def transformer_layers(model) -> list:
    """Return the modules of transformers' layer class, which gradient checkpointing recomputes."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def count_parameters(model) -> tuple[int, int]:
    """Return the number of (trainable, all) parameters, under ZeRO-3 summed over all ranks."""
    sizes = [(quantization.numel(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trainable in sizes if trainable), sum(n for n, _ in sizes)


def verify_saved(folder: Path, numel: int) -> None:
    """Check the safetensors headers in `folder`: all weights must have been saved.

    Args: numel: the minimum number of weights (tied ones counted once).
    Raises: RuntimeError for empty tensors or too few weights, as after a silent failure of a ZeRO-3 save.
    """
    saved = 0
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, entry in files.tensors(file).items():
            size = math.prod(entry["shape"])
            if size == 0:
                raise RuntimeError(f"{file}: {name} was saved empty.")
            saved += size
    if saved < numel:
        raise RuntimeError(f"{folder}: contains only {saved:,} of the {numel:,} trained weights.")
