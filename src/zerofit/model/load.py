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
from zerofit.base.errors import UserError, first_line, in_one_line
from zerofit.data.chat_templates import arguments, built_in
from zerofit.job.settings import Check, Decision
from zerofit.model import adapters, attention, freezing, fused_loss, generation, patches, quantization, tiled_mlp
from zerofit.model.image_text import classes, towers
from zerofit.model.kernels import linear_attention
from zerofit.model.mixtures import weights as mixtures
from zerofit.model.weights import complete, config_json, files, finite

MOST_NUMBERS = 10**14  # parameters of a model


def fingerprints(settings, train_set) -> dict[str, str]:
    """Return the hashes of data and model, to compare with those of a checkpoint to resume."""
    return {"data": train_set.fingerprint, "model": model_fingerprint(settings)}


def model_fingerprint(settings) -> str:
    """Hash the configuration and the ends of the weight files (of a Hub model: the commit)."""
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
    Raises: UserError for a model that cannot be found, or a tokenizer that is slow or has no end token.
    """
    folder = hub.model_folder(settings.model)
    if folder and not any(re.search(r"token|vocab|\.model$", file.name) for file in folder.iterdir()):
        # from its class alone, transformers would make a tokenizer that knows no word
        raise UserError(f"--model {settings.model}: the folder has no tokenizer; copy tokenizer.json and "
                        "tokenizer_config.json of the model into it.")  # fmt: skip
    tokenizer = _load(AutoTokenizer.from_pretrained, settings, "tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {settings.model}: its tokenizer has no end token, so no answer could ever end.")
    if not tokenizer.is_fast:
        raise UserError(f"--model {settings.model}: needs a fast tokenizer (tokenizer.json), found a slow one only.")
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
        said = "chat template: the tokenizer has none; a plain '### User / ### Assistant' one is used"
        settings.decisions.append(Decision(said, "chat_template"))
    if given := arguments.parsed(arguments.FLAG, settings.chat_template_kwargs):
        tokenizer.chat_template = arguments.with_defaults(tokenizer.chat_template, given)
        said = ", ".join(f"{name} is {json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
        said = f"chat template: {said} unless a row or a caller says otherwise; final/ keeps it so"
        settings.decisions.append(Decision(said, "chat_template"))
    if settings.new_tokens:
        adapters.say_new_tokens(tokenizer, settings)
    return tokenizer


def load_config(settings):
    """Load the model's config.json.

    Raises: UserError when it cannot be loaded, or is of weights that are quantized already.
    """
    config = _load(AutoConfig.from_pretrained, settings, "config.json")
    place = f"--model {settings.model}"
    folder = hub.model_folder(settings.model) or hub.fetch(settings.model, place, settings.model_revision)
    config_json.check(config, folder / "config.json", place)
    if found := config_json.without_outputs(config):
        said = f"config.json: {' and '.join(found)} as training needs them, and saved so"
        if said not in settings.decisions:
            settings.decisions.append(said)
    if not settings.random_init:
        config_json.untie(config, folder)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method is not None and not complete.is_mxfp4(config):  # gpt-oss's own format, which transformers can unpack
        why = "no adapter of them could be merged or compared" if settings.trains_adapter else "these cannot be trained"
        also = ", for QLoRA with --load_in_4bit true" if settings.trains_adapter else ""
        raise UserError(
            f"--model {settings.model}: its weights are quantized already ({method}), and {why}; name the original "
            f"model, or a copy in 16 bits{also}."
        )
    return config


def known_ends(settings) -> list[int]:
    """Return the ids at which the base's generation stops, by its generation_config.json, else by its config.json."""
    if not settings.random_init:
        with contextlib.suppress(UserError):  # without the file, transformers takes the configuration's
            return generation.ids_of(_load(GenerationConfig.from_pretrained, settings, "generation").eos_token_id)
    return generation.ids_of(load_config(settings).get_text_config().eos_token_id)


def weight_files(settings) -> Path:
    """Return the folder with the model's weights, downloaded once on this node; their headers are checked.

    Raises: UserError for weights that are not there or not whole; Unavailable when the Hub does not answer.
    """
    place = f"--model {settings.model}"
    if (folder := hub.model_folder(settings.model)) is None:
        folder = hub.fetch(settings.model, place, settings.model_revision)
        named = files.names(folder)
        folder = hub.fetch(settings.model, place, settings.model_revision, (*hub.SMALL, *named))
    files.check(folder, place)
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{place}: holds an adapter beside the model (adapter_config.json), which transformers would load into it; "
            "move the adapter's files elsewhere, or name a merged model."
        )
    return folder


def check_weights(settings) -> None:
    """Check the base before its weights are loaded, by the headers of its files.

    Raises: UserError for files that are not whole, and weights that are missing or have another shape.
    """
    if not settings.random_init:
        complete.check(weight_files(settings), f"--model {settings.model}", settings.trust_remote_code)


def _load(load, settings, part: str, **kwargs):
    name = settings.model
    folder = hub.model_folder(name)
    if folder is None:
        hub.fetch(name, f"--model {name}", settings.model_revision)
        # Code of another repository, which auto_map may name, is not in this one's files.
        kwargs["local_files_only"] = not settings.trust_remote_code
        if part == "weights":
            kwargs["adapter_kwargs"] = {"local_files_only": True}  # looked for by each rank, else on the Hub
    try:
        return load(
            str(folder or name),
            revision=settings.model_revision,
            trust_remote_code=settings.trust_remote_code,
            **kwargs,
        )
    except Exception as error:  # of any file: what libraries do with values that they do not expect
        if isinstance(error, UserError) or (part == "weights" and not isinstance(error, OSError)):
            raise
        names_field = type(error).__name__.startswith("StrictDataclass")  # in several lines
        why = in_one_line(error) if names_field else first_line(error) if str(error) else type(error).__name__
        raise UserError(f"--model {name}: its {part} could not be loaded: {why}") from None


def weight_dtype(settings) -> str:
    """Return the dtype to load weights in: "float32", "bfloat16" or "float16".

    With bf16/fp16 DeepSpeed keeps fp32 master weights itself. Stage 0 trains the loaded weights, so full fine-tuning
    needs fp32 there (autocast computes products in bf16); a frozen LoRA base does not.
    """
    if settings.dtype != "auto":
        return settings.dtype
    precision_dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[settings.precision]
    frozen_base = settings.trains_adapter
    return precision_dtype if frozen_base or not settings.keeps_fp32 else "float32"


def load_model(settings, tokenizer, config=None, accept_nan=False):
    """Load the causal LM for training: sharded while loading under ZeRO-3, cache off.

    Create TrainingArguments before this call: it registers the ZeRO-3 configuration that from_pretrained reads.
    Args: settings: after resolve.resolve_for_model. config: the model's, to build another one with --random_init (a
        simulation with fewer layers); default: its config.json. accept_nan: do not refuse weights that are not finite,
        for a replay of the step that made them.
    """
    dtype = getattr(torch, weight_dtype(settings))
    if settings.keeps_fp32 and dtype != torch.float32 and not settings.trains_adapter:
        print(f"note: --dtype {settings.dtype} with stage 0 trains without an fp32 master copy", flush=True)
    set_seed(settings.seed)
    attention.avoid_wrong_kernels()
    config = load_config(settings) if config is None else config
    kwargs = {"attn_implementation": towers.attention_of(settings, config), "dtype": dtype}
    if settings.experts_implementation != "auto":  # a mixture of experts
        kwargs["experts_implementation"] = settings.experts_implementation
    sharded = settings.deepspeed is not None and settings.zero == 3
    # Load onto the GPU directly: N ranks with the model in host memory would need N times its size.
    # Whole matrices need not fit the GPU where ranks split them: DeepSpeed cuts them in host memory.
    in_host = sharded or settings.use_cpu or settings.ranks_that_split("matrices") > 1
    device = None if in_host else torch.device("cuda", torch.cuda.current_device())
    if settings.random_init:
        if complete.is_mxfp4(config):
            del config.quantization_config  # of files that are not read: the random weights are not packed
        try:
            with device or contextlib.nullcontext():
                model = towers.build(settings, config, **kwargs)
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            raise UserError(f"--model {settings.model}: it does not fit the memory: {first_line(error)}.") from None
        settings.checks.append(Check("base_weights", None, "base weights: random numbers, by --random_init true"))
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
    if getattr(text, "pad_token_id", None) is None:  # CodeGen has none
        text.pad_token_id = tokenizer.pad_token_id
    check_vocabulary(settings, tokenizer, model.config)
    return settings.objective.prepare_model(model)


def _load_weights(settings, config, dtype, kwargs: dict):
    """Load the weights and check that they are all there."""
    place, folder = f"--model {settings.model}", weight_files(settings)
    unpacked = complete.unpacked(config)
    kwargs |= unpacked
    model_class = towers.model_class(settings, config)
    if bits := quantization.bits(settings):
        kwargs["quantization_config"] = quantization.config(
            bits, dtype, (*towers.of_class(model_class), *linear_attention.read_by_kernels(config))
        )
    if settings.deepspeed is not None and settings.zero == 3 and mixtures.count(config):
        patches.compare_whole_shapes()
    try:
        with complete.without_report():
            model, info = _load(
                model_class.from_pretrained,
                settings,
                "weights",
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, in a sentence
                **kwargs,
            )
    except (ValueError, ImportError) as error:  # e.g. an attention implementation that is not installed
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
    towers.loaded(model, config, folder)
    certify(settings, folder, complete.of_loaded(model, info))
    return model


def certify(settings, folder: Path, names: complete.Names) -> None:
    """Add the line of the certificate about the base's weights. Raises: UserError if one is missing."""
    complete.refuse(names, f"--model {settings.model}")
    digest, unexpected = files.identity(folder), None if names.unexpected is None else len(names.unexpected)
    if sentence := complete.unexpected_in_words(names):
        settings.decisions.append(sentence)
    sentence = (
        f"base weights: {names.total} of {names.total} tensors loaded, none missing, none mismatched "
        f"({'unknown' if unexpected is None else unexpected} unexpected); hash {digest}, of headers and samples"
    )
    numbers = {"loaded": names.total, "missing": 0, "mismatched": 0, "unexpected": unexpected, "hash": digest}
    settings.checks.append(Check("base_weights", True, sentence, numbers))


def check_vocabulary(settings, tokenizer, config) -> None:
    """Raise UserError if the tokenizer has more tokens than the model has embeddings."""
    if len(tokenizer) > (embeddings := config.get_text_config().vocab_size):
        raise UserError(
            f"--model {settings.model}: the tokenizer has {len(tokenizer)} tokens, the model only {embeddings} "
            "embeddings: they do not belong together."
        )


def check_model(settings, config=None):
    """Build the model and its adapter on the meta device, to find wrong names before ranks start.

    Args: settings: after resolve.resolve_for_model. config: the model's; default: its config.json.
    Returns: the model, without memory for weights.
    Raises: UserError for a config.json of which transformers can build no model, and for an attention implementation
        or target modules that do not exist.
    """
    unset_hf_deepspeed_config()  # one of an earlier run in this process would shard the model
    config = load_config(settings) if config is None else config
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
        raise UserError(f"--model {settings.model}: {in_one_line(error)}.") from None
    except ValueError as error:
        raise UserError(f"--model {settings.model}: {first_line(error)}") from None
    return model


def _built(settings, config):
    """Return the causal model of a configuration. Raises: UserError where transformers' class cannot be built of it."""
    try:
        model = towers.build(settings, config, attn_implementation=towers.attention_of(settings, config))
    except (ValueError, ImportError):  # of the attention implementation; said as it is
        raise
    except Exception as error:  # of any class: what a model's own code does with values that do not fit each other
        raise UserError(
            f"--model {settings.model}: transformers cannot build a causal language model of its config.json "
            f"({config.model_type}): {type(error).__name__}: {first_line(error)}"
        ) from None
    if (numbers := sum(p.numel() for p in model.parameters())) > MOST_NUMBERS:
        raise UserError(
            f"--model {settings.model}: its config.json asks for {numbers:,} parameters, which no machine holds."
        )
    return model


def check_kind(settings, config) -> None:
    """Raise UserError for a model that is no causal language model of text.

    transformers builds some of them as one: a decoder without its encoder, a bidirectional model, which sees what it is
    to predict.
    """
    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    own_code = settings.trust_remote_code and hasattr(config, "auto_map")
    of_images = name is None or name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    masked = config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if own_code:
        return
    if hasattr(config, "vision_config") and of_images and not classes.has_towers(config):
        raise UserError(
            f"--model {settings.model}: {config.model_type} is an image-text model without a language model of its own "
            "inside; name a text-only checkpoint."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"--model {settings.model}: {config.model_type} is an encoder-decoder model; these recipes train causal "
            "language models; name one."
        )
    if masked and not getattr(config, "is_decoder", False):
        raise UserError(
            f"--model {settings.model}: {config.model_type} is a bidirectional model: each token sees the next one, "
            "which it would learn to copy; name a causal language model (its config.json would say is_decoder true)."
        )
    if config.model_type == "paligemma":
        raise UserError(
            f"--model {settings.model}: {config.model_type} reads a prompt in both directions; these recipes train "
            "causal language models; name one."
        )
    cls = classes.text_class(config)
    own = cls is None or not cls.__module__.startswith("transformers.")  # a user's, registered
    if not own and "loss_function" not in Path(inspect.getfile(cls)).read_text():
        raise UserError(
            f"--model {settings.model}: the loss of {cls.__name__} is not that of the next token, as it is older than "
            "transformers' loss functions; name another model."
        )


def transformer_layers(model) -> list:
    """Return the modules of transformers' class of layers, those that gradient checkpointing recomputes."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def count_parameters(model) -> tuple[int, int]:
    """Return the numbers of (trainable, all) parameters, under ZeRO-3 of all ranks."""
    sizes = [(quantization.numel(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trainable in sizes if trainable), sum(n for n, _ in sizes)


def verify_saved(folder: Path, numel: int) -> None:
    """Check by the safetensors headers in `folder` that all weights were saved.

    Args: numel: the minimum number of weights (tied ones counted once).
    Raises: RuntimeError for empty tensors or too few weights: ZeRO-3 saves can fail silently like this.
    """
    saved = 0
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, entry in files.tensors(file).items():
            size = math.prod(entry["shape"])
            if size == 0:
                raise RuntimeError(f"{file}: {name} was saved empty.")
            saved += size
    if saved < numel:
        raise RuntimeError(f"{folder}: holds {saved:,} of the {numel:,} trained numbers.")
