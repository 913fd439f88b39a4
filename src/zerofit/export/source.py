"""Find a model, or an adapter and its base, in a folder, and load it as in training."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, __version__

from zerofit.base import hub
from zerofit.base.errors import UserError
from zerofit.checkpoint import integrity, pickles, zero_shards
from zerofit.checkpoint.facts import is_zerofit_run, read_facts
from zerofit.job import program, run_folder
from zerofit.job.settings import Settings
from zerofit.model import adapters, attention, quantization
from zerofit.model.image_text import classes, towers
from zerofit.model.kernels import linear_attention
from zerofit.model.load import DTYPES, model_fingerprint
from zerofit.model.weights import adapter, complete, config_json, files, stored

MODEL, ADAPTER = "model*.safetensors", "adapter_model.safetensors"


@dataclass
class Saved:
    """A saved model or adapter."""

    folder: Path  # contains the weights
    run: Path | None = None  # its run folder; None if another program created it
    facts: dict = field(default_factory=dict)  # run.json
    adapter: dict | None = None  # adapter_config.json; None for a full model
    base: str = ""  # folder of the adapter's base
    remote: bool = False  # --trust_remote_code

    def argument(self, name: str):
        """Return the run's value of an argument, None for a folder of another program."""
        return self.facts.get("arguments", {}).get(name, {}).get("value")

    @property
    def label(self) -> str:
        """Return the name of the weights in their run, e.g. "checkpoint-50" or "final (step 174)"."""
        steps = run_folder.read_json(self.run / "result.json").get("steps") if self.run else None
        return f"final (step {steps})" if self.folder.name == "final" and steps is not None else self.folder.name

    @property
    def bits(self) -> int | None:
        """Return 4 or 8 for an adapter that was trained on a 4-bit or 8-bit base, else None."""
        return 4 if self.argument("load_in_4bit") else 8 if self.argument("load_in_8bit") else None

    @property
    def base_dtype(self) -> torch.dtype | None:
        """Return the dtype of an adapter's base in training (model.load.weight_dtype), None if unknown."""
        requested = self.argument("dtype")
        if requested not in (None, "auto"):
            return getattr(torch, requested)
        if not self.facts:
            return None
        return next((DTYPES[flag] for flag in ("bf16", "fp16") if self.argument(flag)), torch.float32)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the saved weights, fp32 for DeepSpeed's shards."""
        return dtype_of(self.weights) or torch.float32

    @property
    def weights(self) -> list[Path]:
        return sorted(self.folder.glob(ADAPTER if self.adapter else MODEL))


# --- finding a folder ---


def find(path: str, base: str = "", remote: bool = False) -> Saved:
    """Find the weights under a path, with their run and base.

    Args: path: a run folder (for final/, else the newest valid checkpoint), a checkpoint, final/, an export, or a model
        folder of another program; base: base model of an adapter, if it has moved.
    Raises: UserError for other folders, damaged folders, or a missing base.
    """
    top = Path(path).expanduser()
    if not top.is_dir():
        raise UserError(f"{path}: no such folder; use a run (runs/...), one of its checkpoints, or its final/.")
    run = next((folder for folder in (top, top.parent) if (folder / "run.json").exists()), None)
    facts = _facts(run) if run else {}
    folder = top
    if run == top and (top / "final").is_dir() and run_folder.finished(top):
        folder = top / "final"
    elif run_folder.checkpoints(top) and not _holds(top):
        folder = _newest_checkpoint(top, facts)
    if run == top and folder == top and not _holds(top):
        raise UserError(f"{path}: this run has not finished and has not saved a checkpoint yet.")
    if not _holds(folder):
        raise UserError(f"{folder}: {_why_invalid(folder)}.")
    saved = Saved(folder, run, facts, remote=remote)
    _check_complete(saved)
    if (folder / "adapter_config.json").exists():
        saved.adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        saved.base = _find_base(saved, base)
        complete.check(Path(saved.base), f"{saved.folder}: its base {saved.base}", remote)
        adapter.check(saved.folder, Path(saved.base), remote)
    elif saved.weights:
        complete.check(saved.folder, str(saved.folder), remote)
    return saved


def dtype_of(files: list[Path]) -> torch.dtype | None:
    """Return the dtype of the first floating point tensor, or None."""
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                if (tensor := opened.get_tensor(name)).is_floating_point():
                    return tensor.dtype
    return None


def _facts(run: Path) -> dict:
    if facts := run_folder.read_record(run / "run.json"):
        return facts
    raise UserError(f"{run / 'run.json'}: is damaged; use a copy of its final/ or of a checkpoint in another folder.")


def _holds(folder: Path) -> bool:
    plain = (folder / "config.json").exists() and (any(folder.glob(MODEL)) or zero_shards.is_deepspeed(folder))
    return plain or (folder / ADAPTER).exists()


def _why_invalid(folder: Path) -> str:
    if any(folder.glob("*model*.bin")):
        return (
            "its weights are pickle files (.bin), which can execute code when they are loaded; "
            "convert them to safetensors first"
        )
    if zero_shards.is_deepspeed(folder):
        return "contains DeepSpeed's shards without a config.json; copy the model's config.json and tokenizer there"
    return "contains neither a model (config.json, model.safetensors) nor an adapter (adapter_model.safetensors)"


def _newest_checkpoint(run: Path, facts: dict) -> Path:
    """Return the newest valid checkpoint that can be exported. Raises: UserError."""
    newest, reasons = None, []
    for checkpoint in reversed(run_folder.checkpoints(run).values()):
        if reason := "" if _holds(checkpoint) else _why_invalid(checkpoint):
            reasons.append(f"{checkpoint.name}: {reason}")
            continue
        try:
            _check_complete(Saved(checkpoint, run, facts))
        except UserError as error:
            reasons.append(str(error).removeprefix(f"{run}/").rstrip("."))
            continue
        newest = checkpoint
        break
    for reason in reasons if newest else ():
        print(f"note: skipped: {reason}", flush=True)
    if not newest:
        raise UserError(f"{run}: all checkpoints are incomplete ({'; '.join(reasons)}).")
    return newest


def _check_complete(saved: Saved) -> None:
    """Check for damaged files: by hash if zerofit saved them, else by length. Raises: UserError."""
    folder = saved.folder
    is_ours = folder.name.startswith("checkpoint-") and is_zerofit_run(folder.parent)
    if (is_ours or read_facts(folder) is not None) and (reason := integrity.damage(folder)):
        raise UserError(f"{folder}: is incomplete: {reason}; use another checkpoint.")
    for file in folder.glob("*.safetensors"):
        if reason := files.damage(file):
            raise UserError(f"{file}: is incomplete ({reason}); use another checkpoint.")
    for index in folder.glob("*.index.json"):
        shard_names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if outside := [name for name in shard_names if Path(str(name)).name != name]:
            raise UserError(f"{index}: {outside[0]!r} is not a file name in its folder; use another checkpoint.")
        if missing := sorted(name for name in shard_names if not (folder / name).exists()):
            raise UserError(f"{folder}: {missing[0]} is missing, which {index.name} lists; use another checkpoint.")
    if zero_shards.is_deepspeed(folder) and (reason := pickles.fault(folder)):
        raise UserError(f"{folder}: {reason}.")


def _find_base(saved: Saved, base: str) -> str:
    """Return the folder of the adapter's base; download a Hub id unless it is in the cache.

    Raises: UserError if the base does not exist, or if the adapter was trained on another base.
    """
    kind, init = saved.adapter.get("peft_type", ""), str(saved.adapter.get("init_lora_weights"))
    if saved.run and saved.folder.name.startswith("checkpoint-") and re.fullmatch(adapters.CHANGES_BASE, init):
        raise UserError(
            f"{saved.folder}: {init} changed the base of this adapter in training, and only the adapter in final/ is "
            "converted to the original base; finish the run (make resume) and use final/."
        )
    name = base or saved.adapter.get("base_model_name_or_path") or ""
    place = f"--base {base}" if base else f"{saved.folder}: its base {name or '(not set)'}"
    path = Path(name).expanduser()
    if not path.is_dir():
        if not name or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise UserError(f"{place}: no such folder; set --base to the base of this {kind} adapter.")
        path = _from_hub(name, saved, place)
    if not (path / "config.json").exists():
        raise UserError(f"{place}: config.json is missing; set --base to the base of this {kind} adapter.")
    _check_base(saved, path, place)
    return str(path)


def _from_hub(name: str, saved: Saved, place: str) -> Path:
    revision = saved.adapter.get("revision")
    folder = hub.fetch(name, place, revision)
    return hub.fetch(name, place, revision, (*hub.SMALL_FILES, *files.names(folder)))


def _check_base(saved: Saved, base: Path, place: str) -> None:
    """Compare the base with the recorded hash and the adapter's shapes. Raises: UserError."""
    if saved.argument("random_init"):
        raise UserError(f"{saved.folder}: cannot be loaded, since its base used --random_init and was never saved.")
    folders = [saved.folder, *reversed(run_folder.checkpoints(saved.run).values())] if saved.run else [saved.folder]
    known = next((facts for folder in folders if (facts := read_facts(folder))), {})
    if known and _comparable(saved) and known["fingerprints"]["model"] != _fingerprint(saved, base):
        raise UserError(f"{place}: is not the base that this adapter was trained on (different hash); set --base.")
    adapter_weights, base_weights = stored.Weights(saved.folder), stored.Weights(base)
    for name, file in adapter_weights.where.items():
        module = name.removeprefix("base_model.model.").rpartition(".lora_A")[0]
        target = base_weights.where.get(f"{module}.weight")
        if not module or target is None or saved.adapter.get("fan_in_fan_out"):
            continue
        columns, width = target.get_slice(f"{module}.weight").get_shape()[1], file.get_slice(name).get_shape()[1]
        if columns != width:
            raise UserError(
                f"{place}: is not the base that this adapter was trained on: {module} has {columns} input features, "
                f"the adapter {width}; set --base."
            )


def _comparable(saved: Saved) -> bool:
    """Return whether base hashes are comparable: for a local base and the same version of transformers."""
    local = Path(saved.adapter.get("base_model_name_or_path") or "").is_absolute()
    return local and saved.facts.get("versions", {}).get("transformers") == __version__


def _fingerprint(saved: Saved, base: Path) -> str:
    values = {"model": str(base), "model_revision": None, "trust_remote_code": saved.remote, "random_init": False}
    return model_fingerprint(Settings(program.recipe_of(program.DEFAULT), values, {}, 1))


# --- loading ---


def tokenizer(saved: Saved):
    """Load the tokenizer of the folder or of the base, None if both lack it."""
    for folder in filter(None, (saved.folder, saved.base)):
        if any(Path(folder).glob("tokenizer*")):
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=saved.remote)
    return None


def load(saved: Saved, device: str = "cpu"):
    """Load the model as in training, with an unmerged adapter and the same dtype and quantization."""
    attention.avoid_wrong_kernels()
    if not saved.adapter:
        model = _model(saved.folder, saved, "auto", device) if saved.weights else _load_shards(saved, device)
        return _with_generation_config(model, saved).eval()
    model = _with_generation_config(load_base(saved, device), saved)
    # DeepSpeed trains an adapter in the base's dtype, while PEFT would use fp32.
    as_trained = {"autocast_adapter_dtype": saved.dtype == torch.float32}
    model = with_base_error(saved, lambda: PeftModel.from_pretrained(model, saved.folder, **as_trained))
    return model.eval()


def _with_generation_config(model, saved: Saved):
    """Use the folder's generation_config.json; peft uses the base's."""
    if (saved.folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(saved.folder)
    return model


def load_base(saved: Saved, device: str = "cpu"):
    """Load an adapter's base, with embedding rows for added tokens."""
    dtype, options = saved.base_dtype or "auto", {}
    if saved.bits:
        read = linear_attention.read_by_kernels(AutoConfig.from_pretrained(saved.base))
        options["quantization_config"] = quantization.config(saved.bits, dtype, read)
    model = _model(Path(saved.base), saved, dtype, device, **options)
    if saved.bits:
        quantization.keep_layout(model)
    adapter_tokenizer = tokenizer(saved)
    if adapter_tokenizer is not None and len(adapter_tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(adapter_tokenizer), mean_resizing=False)
    return model


def with_base_error(saved: Saved, load_adapter):
    """Load an adapter; raise UserError if it does not match its base."""
    try:
        return load_adapter()
    except (RuntimeError, ValueError) as error:  # size mismatch, target modules not found
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{saved.base}: is not the base of the adapter in {saved.folder}: {reason}") from None


def _model(folder: Path, saved: Saved, dtype, device: str, **more):
    """Load a model from a folder. Raises: UserError if weights are missing."""
    if device != "cpu":
        more["device_map"] = {"": device}
    config = config_json.config_of(folder, saved.remote)
    unpacked = complete.unpacked(config)
    more |= unpacked
    with complete.without_report():
        model, info = towers.class_of_saved(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=saved.remote,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # complete.check_names raises for them
            **more,
        )
    if unpacked:
        complete.save_unpacked(model)
    towers.record_folder(model, config, folder)
    complete.check_names(complete.loaded_names(model, info), str(folder))
    return model


def _load_shards(saved: Saved, device: str):
    """Load a folder with only DeepSpeed's shards, using DeepSpeed's converter."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    config = AutoConfig.from_pretrained(saved.folder, trust_remote_code=saved.remote)
    model = classes.auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=saved.remote)
    with pickles.known_globals_only():
        result = model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(saved.folder)), strict=False)
    if missing := sorted(set(result.missing_keys) - model.all_tied_weights_keys.keys()):
        raise UserError(
            f"{saved.folder}: its shards lack {complete.listed(missing)}, which would be random (DeepSpeed only "
            "saves trained weights); save the full model with trainer.save_model()."
        )
    return model.to(device)
