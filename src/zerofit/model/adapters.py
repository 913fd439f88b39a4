"""Add the adapter that recipes/lora.py trains: PEFT tuners, LoRA variants, new tokens."""

import contextlib
import functools
import json
import math
import re
from dataclasses import fields
from pathlib import Path

import torch
from peft import PeftConfig, PeftType, TaskType, get_peft_model, get_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from safetensors.torch import load_file, save_file
from transformers import set_seed

from zerofit.base.errors import UserError, first_line, without_line_breaks
from zerofit.job import settings_file
from zerofit.job.settings import MODULE_NAME, decide
from zerofit.job.technique import AllBut, Conflict, Technique
from zerofit.model import initial_adapter
from zerofit.model.image_text import towers
from zerofit.model.kernels import linear_attention
from zerofit.model.mixtures import adapted
from zerofit.model.weights import adapter

# Names are peft's PeftType in lower case; tests/model/test_adapters.py trains, saves and reloads each tuner.
# prompt_tuning and prefix_tuning lengthen the input, the others change modules.
PROMPTS = ("prompt_tuning", "prefix_tuning")

# Their target modules come from peft's table of architectures, or are not linear layers.
DEFAULT_TARGETS = ("ia3", "ln_tuning", "adaption_prompt", *PROMPTS)

# Values of init_lora_weights that subtract the initial adapter from the base weights. final/ is converted to a plain
# LoRA of twice the rank, because the adapter alone would be wrong on the original base.
CHANGES_BASE = r"pissa(_niter_\d+)?|olora"

# Adapters and model types of peft's tuners_utils._check_lora_target_modules_mamba.
_LORA_LIKE = ("lora", "adalora", "randlora")
_WITH_MAMBA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")

# Model type -> linear modules whose forward is not a plain product: a router returns two tensors, a grouped layer
# splits its input, and the weight of a third is read by the surrounding module, bypassing an adapter.
# tests/model/test_adapters.py searches transformers for them.
NOT_PRODUCTS = {
    "llama4": "router", "llama4_text": "router", "phimoe": "router", "deepseek_v4": "o_a_proj",
    "longcat_flash": "classifier",
}  # fmt: skip

# Model type -> pattern of modules whose saved adapters peft 0.21 cannot load: it renames mlp.shared_expert., as
# transformers does for weights of the Hub, with a pattern that also matches mlp.shared_experts.
UNREADABLE = {"laguna": r".*\.shared_experts\..*"}

# Fields of peft's configurations whose entries must each match an adapted module.
TARGET_FIELDS = (
    "target_modules", "feedforward_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
)  # fmt: skip

_KEEPS_BASE = ("true", "gaussian", "orthogonal")

# Flag -> candidate fields of peft's configuration classes; the first that a class has is used.
_FIELDS = {
    "lora_r": ("r",),
    "lora_alpha": ("lora_alpha", "alpha"),
    "lora_dropout": ("lora_dropout",),
    "lora_target_modules": ("target_modules",),
    "lora_target_parameters": ("target_parameters",),
    "use_dora": ("use_dora",),
    "use_rslora": ("use_rslora",),
    "init_lora_weights": ("init_lora_weights",),
    "modules_to_save": ("modules_to_save",),
    "num_virtual_tokens": ("num_virtual_tokens",),
}

# Flags of adapters, except --adapter.
FLAGS = (*_FIELDS, "initial_adapter", "adapter_config", "load_in_4bit", "load_in_8bit", "loraplus_lr_ratio")

# Fields that --adapter_config must not set: they change the trained weights, the saved files or the base.
_NOT_BY_HAND = re.compile(
    "peft_type|task_type|auto_mapping|base_model_name_or_path|revision|inference_mode|peft_version|init_.*|.*_config|"
    "trainable_token_indices|layer_replication|megatron_core|prefix_projection|save_projection|use_qalora|arrow.*"
)


_NEEDS_LORA = Conflict("adapter", AllBut("lora"), "it applies to LoRA only", "use --adapter lora")


def _is_explicit(settings, name: str) -> bool:
    return settings.source[name] not in ("default", "bundled task")


def resolve(settings) -> None:
    """Check the adapter against the other arguments, and set arguments that depend on it. Raises: UserError."""
    if not settings.trains_adapter:
        return
    kind, init = settings.adapter, settings.init_lora_weights
    if init not in _KEEPS_BASE and not re.fullmatch(CHANGES_BASE, init):
        raise UserError(
            f"--init_lora_weights {init}: must be one of {', '.join(_KEEPS_BASE)}, pissa, pissa_niter_16 (any number), "
            "olora; peft's other values (eva, corda, loftq, lora_ga, mica) need a pass over data or do not train both "
            "A and B."
        )
    targets = [] if settings.initial_adapter else settings.lora_target_modules  # an initial adapter has a list
    expression = next((word for word in targets if not MODULE_NAME.fullmatch(word)), None)
    if expression is not None and len(targets) > 1:
        raise UserError(
            f"--lora_target_modules {expression}: a regular expression must be the only value; match all modules with "
            r"it, such as '.*\.(q_proj|v_proj)'."
        )
    config = _config(settings)
    if kind == "adaption_prompt" and not (config.adapter_len and config.adapter_layers):
        raise UserError(
            "--adapter adaption_prompt needs its size: --adapter_config adapter_len=10 adapter_layers=30 (the prompt's "
            "length, and the number of last layers that get one)."
        )
    if kind in PROMPTS:
        decide(settings, "padding_free", False)
    if kind == "prefix_tuning":
        for name in ("activation_checkpointing", "gradient_checkpointing"):
            if settings.values.get(name) and settings.source[name] not in ("default", "transformers default"):
                raise UserError(
                    f"--{name} with --adapter prefix_tuning: the prefix is a cache, which recomputed layers do not "
                    "get; leave one of the two out."
                )
        if settings.gradient_checkpointing:
            decide(settings, "gradient_checkpointing", False, "recomputed layers do not get the prefix")
    if init == "orthogonal" and settings.lora_r % 2:
        raise UserError(f"--init_lora_weights orthogonal needs an even --lora_r, not {settings.lora_r}.")
    if re.fullmatch(CHANGES_BASE, init) and (config.rank_pattern or config.alpha_pattern):
        raise UserError(
            f"--init_lora_weights {init} with rank_pattern or alpha_pattern: it is saved as a plain LoRA of one rank; "
            "leave one of the two out."
        )


def resolve_for_model(settings, config) -> None:
    """Exclude modules from all-linear, or from an expression, that cannot take an adapter.

    Kernels read the weights of Mamba's layers, and some modules do not compute a plain product.
    Raises: UserError if --lora_target_modules names such a layer.
    """
    words = settings.values.get("adapter_config") or []
    takes_targets = settings.trains_adapter and settings.adapter in _LORA_LIKE and not settings.initial_adapter
    if not takes_targets:  # an initial adapter has a list of targets
        return
    read, is_pattern = linear_attention.read_by_kernels(config), isinstance(_targets(settings), str)
    named = [] if is_pattern else [name for name in settings.lora_target_modules if name.rpartition(".")[2] in read]
    if named:
        raise UserError(
            f"--lora_target_modules {' '.join(named)}: Mamba's kernels in {config.model_type} read the weight of "
            f"{'these layers' if len(named) > 1 else 'this layer'} directly, so an adapter would not train; leave it "
            "out."
        )
    excluded, why = _excluded(config, read, is_pattern)
    if excluded and not any(word.startswith("exclude_modules=") for word in words):
        decide(settings, "adapter_config", [*words, f"exclude_modules={excluded}"], why)


def _excluded(config, read: tuple[str, ...], is_pattern: bool) -> tuple[str, str]:
    """Return (peft's exclude_modules for a model, why); ("", "") if nothing is excluded.

    Args: read: linear layers whose weights kernels read; is_pattern: the targets are all-linear or an expression.
    """
    kind = config.model_type
    if kind in UNREADABLE:
        return UNREADABLE[kind], f"peft 0.21 cannot load their saved adapters in {kind}"
    if not is_pattern:
        return "", ""
    by_peft = ("conv1d", "out_proj") if kind in _WITH_MAMBA else ()
    if names := sorted({*read, *by_peft}):
        return f"[{', '.join(names)}]", f"Mamba's kernels in {kind} read their weights directly, bypassing an adapter"
    if kind in NOT_PRODUCTS:
        return f"[{NOT_PRODUCTS[kind]}]", f"in {kind} it does not compute a plain product, as an adapter needs"
    return "", ""


def _targets(settings) -> list[str] | str:
    """Return the target modules for peft: a string for all-linear or a regular expression, else a list of names."""
    targets = settings.lora_target_modules
    return targets[0] if targets == ["all-linear"] or not all(map(MODULE_NAME.fullmatch, targets)) else targets


def _config(settings, new_token_ids: dict[str, list[int]] | None = None):
    """Build peft's configuration: all flags for LoRA, only explicit flags for other adapters.

    Raises: UserError for a flag or a key of --adapter_config that the adapter does not support.
    """
    if settings.initial_adapter:
        try:
            config = PeftConfig.from_pretrained(Path(settings.initial_adapter).expanduser())
        except Exception as error:  # peft raises various errors for unexpected values
            why = f"{initial_adapter.CONFIG} cannot be read: {without_line_breaks(error)}"
            raise UserError(f"--initial_adapter {settings.initial_adapter}: {why}.") from None
        config.inference_mode, config.lora_dropout = False, settings.lora_dropout
        return config
    kind = settings.adapter
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind.upper())]
    names = {f.name for f in fields(config_class)}
    if kind in PROMPTS:
        names -= {"modules_to_save"}  # declared by peft, but neither trained nor saved
    values = {}
    for flag, candidates in _FIELDS.items():
        name = next((c for c in candidates if c in names), None)
        if name is None and _is_explicit(settings, flag):
            raise UserError(
                f"--{flag} with --adapter {kind}: peft's {config_class.__name__} does not support it; leave the flag "
                "out."
            )
        if name and (kind == "lora" or _is_explicit(settings, flag) or flag == "num_virtual_tokens"):
            values[name] = settings.values[flag]
    if "target_modules" in names and kind not in DEFAULT_TARGETS:
        values["target_modules"] = settings.lora_target_modules
    if "target_modules" in values:
        values["target_modules"] = _targets(settings)
    if values.get("init_lora_weights") == "true":
        values["init_lora_weights"] = True
    if new_token_ids:
        values["trainable_token_indices"] = new_token_ids
    values |= _pairs(settings.adapter_config or [], config_class, names)
    try:
        return config_class(task_type=TaskType.CAUSAL_LM, **values)
    except (TypeError, ValueError) as error:
        raise UserError(f"--adapter {kind}: {first_line(error)}") from None


def _pairs(pairs: list[str], config_class, names: set[str]) -> dict:
    """Parse the key=value words of --adapter_config, with values as YAML."""
    flag_of = {name: flag for flag, candidates in _FIELDS.items() for name in candidates}
    values = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not value:
            raise UserError(f"--adapter_config {pair}: must be key=value, e.g. oft_block_size=16.")
        if key in flag_of:
            raise UserError(f"--adapter_config {pair}: use --{flag_of[key]} instead.")
        if key not in names or _NOT_BY_HAND.fullmatch(key):
            keys = sorted(n for n in names - set(flag_of) if not _NOT_BY_HAND.fullmatch(n))
            raise UserError(f"--adapter_config {pair}: the keys of {config_class.__name__} are {', '.join(keys)}.")
        values[key] = settings_file.value_of(value, f"--adapter_config {key}")
        if isinstance(values[key], float) and not math.isfinite(values[key]):
            raise UserError(f"--adapter_config {pair}: must be a finite number.")
    return values


def first_target(settings) -> int:
    """Return the index of the first predicted label of a row: 0 after virtual tokens, else 1."""
    return 0 if settings.values.get("adapter") == "prompt_tuning" else 1


def add_adapter(model, settings, tokenizer=None):
    """Wrap the model so that only the adapter trains, with modules_to_save and the rows of new tokens.

    With DeepSpeed in half precision the adapter keeps the dtype of the base, and DeepSpeed keeps fp32 master weights:
    mixed dtypes of trained parameters fail under ZeRO-3 with a bare AssertionError.
    Args: tokenizer: for new tokens; None in a simulation, which does not load values.
    Raises: UserError for target modules that the model does not have.
    """
    rows = _embedding_names(model, new_token_ids(tokenizer, settings)) if tokenizer and settings.new_tokens else None
    config = _config(settings, rows)
    where = settings.initial_adapter and f"--initial_adapter {settings.initial_adapter}"
    adapter.check_expressions(config, model, where or f"--adapter {settings.adapter}")
    names = [name for name, _ in model.named_modules()]
    _check_matches(config, settings, model, names, "exclude_modules", "modules_to_save")
    changes_base = re.fullmatch(CHANGES_BASE, settings.init_lora_weights) is not None
    if changes_base and next(model.parameters()).is_meta:  # load.check_model: no values to decompose
        config.init_lora_weights, changes_base = True, False
    if hasattr(config, "exclude_modules"):
        config.exclude_modules = towers.excluded(model, config.exclude_modules)
    set_seed(settings.seed)  # the initial adapter must not depend on random numbers drawn while loading
    try:
        if not settings.initial_adapter:
            adapted.complete(config, model, settings)
        model = get_peft_model(
            model, config, autocast_adapter_dtype=settings.keeps_fp32, revision=settings.model_revision
        )
    except (ValueError, TypeError, AttributeError) as error:
        flag = where or f"--adapter {settings.adapter}"
        if settings.adapter not in DEFAULT_TARGETS and not where:
            flag += f" --lora_target_modules {' '.join(settings.lora_target_modules)}"
        message = re.sub(r"\(\n.*\n\)", "", str(error), flags=re.DOTALL)  # peft prints the module's submodules
        raise UserError(f"{flag}: {first_line(ValueError(message))}") from None
    tuner = model.base_model
    names = [*getattr(tuner, "targeted_module_names", ()), *getattr(tuner, "targeted_parameter_names", ())]
    _check_matches(_config(settings), settings, model.get_base_model(), names, *TARGET_FIELDS)
    if settings.initial_adapter:
        initial_adapter.load(model, settings.initial_adapter)
    if settings.keeps_fp32 or settings.pure_bf16:
        # peft casts the adapter to fp32, but not modules_to_save, which would train without an fp32 master. In pure
        # bf16 the adapter gets the base's dtype, or fp32 for a packed base.
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.data = parameter.data.to(torch.float32 if settings.keeps_fp32 else torch.bfloat16)
    # peft would compare the vocabulary with the base and save full embeddings (empty under ZeRO-3), although the
    # adapter already contains their trained parts (new tokens, modules_to_save).
    model.save_pretrained = functools.partial(model.save_pretrained, save_embedding_layers=False)
    if changes_base:
        weights = get_peft_model_state_dict(model, save_embedding_layers=False)
        model.initial_lora = {k: v.detach().cpu().clone() for k, v in weights.items() if "lora_" in k}
    return model


def _check_matches(config, settings, model, names: list[str], *checked_fields: str) -> None:
    """Raise UserError if an explicit entry matches no module; peft only requires that one entry matches.

    Args: config: before peft replaced its names; names: names of modules.
    """
    keys = [word.partition("=")[0] for word in settings.explicit.get("adapter_config") or []]
    flags = {"target_modules": "lora_target_modules", "modules_to_save": "modules_to_save"}
    for field in checked_fields if names and not settings.initial_adapter else ():
        flag = flags.get(field)
        is_explicit = field in keys if flag is None else flag in settings.explicit
        unmatched = adapter.unmatched(config, field, names, model) if is_explicit else None
        if unmatched is None or (field == "target_modules" and adapted.names_experts(config, model, unmatched[0])):
            continue
        entry, advice = unmatched
        what = "it matches no adapted module" if field in TARGET_FIELDS else "it matches no module of the model"
        raise UserError(f"--{flag or f'adapter_config {field}'} {entry}: {what}; {advice}")


@contextlib.contextmanager
def without_input_casts(model, settings):
    """Do not cast LoRA's inputs to fp32 and back during a training step.

    At stage 0 an adapter's weights are fp32, so peft casts its inputs to fp32, and autocast casts them back for the
    products: the result is the same, but each number costs 12 bytes of memory traffic. peft's own context
    (disable_input_dtype_casting, 0.21) fails on a layer of new tokens, which lacks this switch.
    """
    plain = settings.values.get("adapter") == "lora" and not settings.use_dora
    active = settings.keeps_fp32 and settings.precision != "fp32" and plain
    layers = [m for m in model.modules() if getattr(m, "cast_input_dtype_enabled", False)] if active else []
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.cast_input_dtype_enabled = True


def convert_to_plain_lora(model, folder: Path) -> None:
    """Rewrite a saved PiSSA or OLoRA adapter as a plain LoRA of twice the rank for the original base.

    The base was W - s B0 A0 while B and A trained, so the learned change of W is s (B A - B0 A0) = s [B, -B0] [A; A0]
    (Meng et al. 2024, arXiv 2404.02948, appendix on conversion). Other adapters are not changed.
    """
    initial = getattr(model, "initial_lora", None)
    if initial is None:
        return

    weights = load_file(folder / "adapter_model.safetensors")
    for name, weight in initial.items():
        addend, axis = (weight, 0) if re.search("lora_(embedding_)?A", name) else (-weight, 1)
        weights[name] = torch.cat([weights[name], addend.to(weights[name].dtype)], axis).contiguous()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    config |= {"r": 2 * config["r"], "lora_alpha": 2 * config["r"] * scale}
    config |= {"use_rslora": False, "init_lora_weights": True}
    file.write_text(json.dumps(config, indent=2))


def loraplus_optimizer(trainer):
    """Build a LoRA+ optimizer (Hayou et al. 2024, arXiv 2402.12354): B learns at --loraplus_lr_ratio x the rate of A.

    Optimizer class and arguments are the trainer's, the weight decay is --weight_decay.
    Raises: UserError for an optimizer that makes its own parameter groups.
    """
    from peft.optimizers import create_loraplus_optimizer

    chosen = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    optimizer_class, kwargs = chosen[0], dict(chosen[1])
    if {"params", "model", "optimizer_dict"} & set(kwargs):
        raise UserError(f"--loraplus_lr_ratio with --optim {trainer.args.optim}: it makes its own parameter groups.")
    optimizer = create_loraplus_optimizer(
        trainer.model,
        optimizer_class,
        loraplus_lr_ratio=trainer.settings.loraplus_lr_ratio,
        loraplus_weight_decay=trainer.args.weight_decay,
        loraplus_lr_embedding=kwargs["lr"],  # embeddings learn at the rate of A; peft's default is 1e-6
        **kwargs,
    )
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]  # DeepSpeed needs this
    return optimizer


# --- new tokens ---


def add_tokens(tokenizer, settings) -> None:
    """Add the words of --new_tokens to the tokenizer.

    Raises: UserError for a word that is blank, repeated or already a token.
    """
    vocabulary = tokenizer.get_vocab()
    for i, word in enumerate(settings.new_tokens):
        if word in vocabulary or word in settings.new_tokens[:i] or not word.strip():
            raise UserError(f"--new_tokens {word!r}: the tokenizer already has it; list only new words.")
    tokenizer.add_tokens(list(settings.new_tokens))


def add_new_tokens_decision(tokenizer, settings) -> None:
    """Add the decision about the initial rows of the new tokens, once the chat template is known."""
    ids, ends = new_token_ids(tokenizer, settings), new_ends(tokenizer, settings)
    named = ", ".join(f"{word} = {i}" for word, i in zip(settings.new_tokens, ids, strict=True))
    as_eos = f", but {', '.join(ends)}, which ends answers, starts as {tokenizer.eos_token}" if ends else ""
    settings.decisions.append(f"new tokens: {named}; each starts as the mean of the other embeddings{as_eos}")


def new_ends(tokenizer, settings) -> list[str]:
    """Return the new tokens with which the chat template ends answers."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False).rstrip()
    except Exception:  # the template rejects these turns; the data's rows are rendered later
        return []
    return [word for word in settings.new_tokens if text.endswith(word)]


def new_token_ids(tokenizer, settings) -> list[int]:
    return tokenizer.convert_tokens_to_ids(list(settings.new_tokens))


def resize_embeddings(model, tokenizer, settings) -> None:
    """Set the rows of the new tokens in embedding and head to the mean of the rows before them.

    A token that ends answers starts as the tokenizer's eos_token. The table grows to the length of the tokenizer, as
    plain peft and transformers resize the original base when they load final/. Many models have spare rows and do not
    grow.
    """
    ids = new_token_ids(tokenizer, settings)
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    seen, ends = set(), tokenizer.convert_tokens_to_ids(new_ends(tokenizer, settings))
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is None or id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        with _gathered(module.weight), torch.no_grad():
            if module.weight.numel():  # rank 0 fills the rows, the other ranks receive them
                module.weight[ids] = module.weight[: ids[0]].float().mean(0).to(module.weight.dtype)
                for i in ends:
                    module.weight[i] = module.weight[tokenizer.eos_token_id]


def _gathered(parameter):
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)


def _embedding_names(model, ids: list[int]) -> dict[str, list[int]]:
    """Return {module name: ids} for peft's trainable_token_indices; a tied head follows its embedding."""
    tables = [model.get_input_embeddings()]
    head = model.get_output_embeddings()
    if head is not None and head.weight is not tables[0].weight:
        tables.append(head)
    return {name: ids for name, module in model.named_modules() if any(module is t for t in tables)}


# --- techniques: each adapter and each variant of LoRA ---


def _excludes(argument: str, values: tuple | None, why: str) -> Conflict:
    return Conflict(argument, values, why, "leave it out, or use --adapter lora")


def _no_zero3(why: str) -> Conflict:
    return Conflict("zero", (3,), why, "use --zero 2, or --adapter lora")


_PROMPT_CONFLICTS = (
    _no_zero3("peft saves the prompt by running its encoder on one rank, which would wait forever"),
    _excludes("label_smoothing_factor", None, "its loss does not support virtual tokens before a row"),
    _excludes("packing", (True,), "a row has one prompt, which only its first document would see"),
    _excludes("padding_free", (True,), "a row has one prompt, which only its first document would see"),
)

_SIZED_BY_WEIGHTS = (_no_zero3("peft takes its size from weights, which are empty at stage 3"),)

# Values of --adapter -> conflicts.
KINDS: dict[str, tuple[Conflict, ...]] = {
    "lora": (),
    "ia3": (),
    "prompt_tuning": _PROMPT_CONFLICTS,
    "prefix_tuning": _PROMPT_CONFLICTS,
    "adaption_prompt": (),
    "ln_tuning": (_no_zero3("peft copies norms that stage 3 has already partitioned"),),
    "loha": _SIZED_BY_WEIGHTS,
    "lokr": (),
    "oft": (),
    "hra": (),
    "miss": (),
    "vera": (),
    "randlora": (),
    "delora": _SIZED_BY_WEIGHTS,
    "road": (),
}

_NAMES = {"lora": "LoRA", "ia3": "IA3"}  # names that differ from the flag's value

_SIZES = {"adaption_prompt": "--adapter_config adapter_len=10 adapter_layers=1"}  # required arguments


def _adapter_technique(kind: str, conflicts: tuple[Conflict, ...]) -> Technique:
    example = " ".join(filter(None, (f"--adapter {kind}", _SIZES.get(kind))))
    name = _NAMES.get(kind, kind.replace("_", " "))
    return Technique(name=name, flag="adapter", values=(kind,), example=example, conflicts=conflicts)


TECHNIQUES = (
    *(_adapter_technique(kind, conflicts) for kind, conflicts in KINDS.items()),
    Technique(
        name="DoRA",
        flag="use_dora",
        example="--use_dora true",
        conflicts=(
            _NEEDS_LORA,
            Conflict("init_lora_weights", AllBut("true"), "DoRA computes its magnitudes from plain initial weights"),
        ),
    ),
    Technique(name="rank-stabilized LoRA", flag="use_rslora", example="--use_rslora true", conflicts=(_NEEDS_LORA,)),
    Technique(
        name="LoRA+",
        flag="loraplus_lr_ratio",
        example="--loraplus_lr_ratio 4",
        conflicts=(
            _NEEDS_LORA,
            Conflict(
                "optim",
                ("sophia", "muon"),
                "LoRA+ sets separate rates for A and B, and this optimizer makes its own groups",
                "use an AdamW or leave --loraplus_lr_ratio out",
            ),
            Conflict("pure_bf16", (True,), "the stochastic-rounding optimizer does not support LoRA+'s groups"),
        ),
    ),
    Technique(
        name="PiSSA and OLoRA",
        flag="init_lora_weights",
        values=AllBut(*_KEEPS_BASE),
        example="--init_lora_weights pissa",
        conflicts=(_NEEDS_LORA,),
    ),
    Technique(
        name="new tokens",
        flag="new_tokens",
        example="--new_tokens <new>",
        conflicts=(
            Conflict("adapter", AllBut("lora"), "only LoRA saves them", "use --adapter lora, or recipes/sft.py"),
            Conflict(
                "adapter",
                ("lora",),
                "peft would save the adapter without the new rows",
                "use --zero 2, or recipes/sft.py, which trains and saves all rows",
                stages=(3,),
            ),
            Conflict(
                "modules_to_save", ("embed_tokens", "lm_head", "wte"), "the rows of the new tokens would train twice"
            ),
        ),
    ),
    # The last one: it turns padding_free off for prompts, which is an error above.
    Technique(name="adapters", resolve=resolve, resolve_for_model=resolve_for_model),
)
