"""Find what a folder holds (a model, or an adapter and its base) and load it as it was trained."""

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
from zerofit.checkpoint.facts import is_of_this_kit, read_facts
from zerofit.job import program, run_folder
from zerofit.job.settings import Settings
from zerofit.model import adapters, attention, quantization
from zerofit.model.image_text import classes, towers
from zerofit.model.kernels import linear_attention
from zerofit.model.load import model_fingerprint
from zerofit.model.weights import adapter, complete, config_json, files, stored

MODEL, ADAPTER = "model*.safetensors", "adapter_model.safetensors"

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Saved:
    """A saved model or adapter."""

    folder: Path  # holds the weights
    run: Path | None = None  # its run folder; None if another program made it
    facts: dict = field(default_factory=dict)  # run.json
    adapter: dict | None = None  # adapter_config.json; None for a full model
    base: str = ""  # folder of the adapter's base
    remote: bool = False  # --trust_remote_code

    def argument(self, name: str):
        """Return the run's value of an argument; None for a folder of another program."""
        return self.facts.get("arguments", {}).get(name, {}).get("value")

    @property
    def label(self) -> str:
        """Return the name of the weights in their run: "checkpoint-50", "final (step 174)"; a resume changes final/."""
        steps = run_folder.read_json(self.run / "result.json").get("steps") if self.run else None
        return f"final (step {steps})" if self.folder.name == "final" and steps is not None else self.folder.name

    @property
    def bits(self) -> int | None:
        """Return 4 or 8 for an adapter that was trained on a base quantized to so many bits, else None."""
        return 4 if self.argument("load_in_4bit") else 8 if self.argument("load_in_8bit") else None

    @property
    def base_dtype(self) -> torch.dtype | None:
        """Return the dtype of an adapter's base in training (model.load.weight_dtype); None if unknown."""
        requested = self.argument("dtype")
        if requested not in (None, "auto"):
            return getattr(torch, requested)
        if not self.facts:
            return None
        return next((dtype for flag, dtype in HALF.items() if self.argument(flag)), torch.float32)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the saved weights; fp32 for DeepSpeed's shards."""
        return dtype_of(self.weights) or torch.float32

    @property
    def weights(self) -> list[Path]:
        return sorted(self.folder.glob(ADAPTER if self.adapter else MODEL))


# --- finding a folder ---


def find(path: str, base: str = "", remote: bool = False) -> Saved:
    """Find the weights under a path, and the run and the base that belong to them.

    Args: path: a run folder (its final/, else its newest valid checkpoint), a checkpoint, final/, an export, or another
        program's model folder; base: the base model of an adapter, if it has moved.
    Raises: UserError for any other folder, a damaged one, or a missing base.
    """
    path_given = Path(path).expanduser()
    if not path_given.is_dir():
        raise UserError(f"{path}: no such folder; name a run (runs/...), one of its checkpoints, or its final/.")
    run = next((folder for folder in (path_given, path_given.parent) if (folder / "run.json").exists()), None)
    facts = _facts(run) if run else {}
    folder = path_given
    if run == path_given and (path_given / "final").is_dir() and run_folder.finished(path_given):
        folder = path_given / "final"
    elif run_folder.checkpoints(path_given) and not _holds(path_given):
        folder = _of_run(path_given, facts)
    if run == path_given and folder == path_given and not _holds(path_given):
        raise UserError(f"{path}: this run has saved no checkpoint yet, and it has not finished.")
    if not _holds(folder):
        raise UserError(f"{folder}: {_why_not(folder)}.")
    saved = Saved(folder, run, facts, remote=remote)
    _check_whole(saved)
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
            for name in opened.keys():  # noqa: SIM118  (no dict)
                if (tensor := opened.get_tensor(name)).is_floating_point():
                    return tensor.dtype
    return None


def _facts(run: Path) -> dict:
    if facts := run_folder.read_record(run / "run.json"):
        return facts
    raise UserError(f"{run / 'run.json'}: is damaged; name its final/ or a checkpoint copied elsewhere.")


def _holds(folder: Path) -> bool:
    plain = (folder / "config.json").exists() and (any(folder.glob(MODEL)) or zero_shards.is_deepspeed(folder))
    return plain or (folder / ADAPTER).exists()


def _why_not(folder: Path) -> str:
    if any(folder.glob("*model*.bin")):
        return (
            "its weights are pickles (.bin), which run what they name when they are loaded; "
            "save it as safetensors first"
        )
    if zero_shards.is_deepspeed(folder):
        return (
            "holds DeepSpeed's shards and no config.json of a model; "
            "put the model's config.json and tokenizer beside them"
        )
    return "holds neither a model (config.json, model.safetensors) nor an adapter (adapter_model.safetensors)"


def _of_run(run: Path, facts: dict) -> Path:
    """Return the newest checkpoint that is valid and can be exported. Raises: UserError if there is none."""
    newest, reasons = None, []
    for checkpoint in reversed(run_folder.checkpoints(run).values()):
        if reason := "" if _holds(checkpoint) else _why_not(checkpoint):
            reasons.append(f"{checkpoint.name}: {reason}")
            continue
        try:
            _check_whole(Saved(checkpoint, run, facts))
        except UserError as error:
            reasons.append(str(error).removeprefix(f"{run}/").rstrip("."))
            continue
        newest = checkpoint
        break
    for reason in reasons if newest else ():
        print(f"note: passed over: {reason}", flush=True)
    if not newest:
        raise UserError(f"{run}: none of its checkpoints is whole ({'; '.join(reasons)}).")
    return newest


def _check_whole(saved: Saved) -> None:
    """Refuse damaged files: by hash if zerofit saved them, else by length. Raises: UserError."""
    folder = saved.folder
    is_ours = folder.name.startswith("checkpoint-") and is_of_this_kit(folder.parent)
    if (is_ours or read_facts(folder) is not None) and (reason := integrity.damage(folder)):
        raise UserError(f"{folder}: is no whole checkpoint: {reason}; name another one.")
    for file in folder.glob("*.safetensors"):
        if reason := files.damage(file):
            raise UserError(f"{file}: is not whole ({reason}); name another checkpoint.")
    for index in folder.glob("*.index.json"):
        shard_names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if outside := [name for name in shard_names if Path(str(name)).name != name]:
            raise UserError(f"{index}: {outside[0]!r} is no name of a file beside it; name another checkpoint.")
        if missing := sorted(name for name in shard_names if not (folder / name).exists()):
            raise UserError(f"{folder}: {missing[0]} is missing, which {index.name} names; name another checkpoint.")
    if zero_shards.is_deepspeed(folder) and (reason := pickles.fault(folder)):
        raise UserError(f"{folder}: {reason}.")


def _find_base(saved: Saved, given: str) -> str:
    """Return the folder of the adapter's base; a hub id is downloaded, or found in the cache.

    Raises: UserError when it does not exist, or is not the one that the adapter was trained on.
    """
    kind, init = saved.adapter.get("peft_type", ""), str(saved.adapter.get("init_lora_weights"))
    if saved.run and saved.folder.name.startswith("checkpoint-") and re.fullmatch(adapters.CHANGES_BASE, init):
        raise UserError(
            f"{saved.folder}: in training, {init} has changed the base that this adapter is for, and only final/ is "
            "converted to fit the original one; finish the run (make resume) and take that."
        )
    name = given or saved.adapter.get("base_model_name_or_path") or ""
    place = f"--base {given}" if given else f"{saved.folder}: its base {name or 'is not named'}"
    path = Path(name).expanduser()
    if not path.is_dir():
        if not name or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise UserError(f"{place}: no such folder; say where the base of this {kind} adapter is with --base.")
        path = _from_hub(name, saved, place)
    if not (path / "config.json").exists():
        raise UserError(f"{place}: has no config.json; say where the base of this {kind} adapter is with --base.")
    _check_base(saved, path, place)
    return str(path)


def _from_hub(name: str, saved: Saved, place: str) -> Path:
    revision = saved.adapter.get("revision")
    folder = hub.fetch(name, place, revision)
    return hub.fetch(name, place, revision, (*hub.SMALL, *files.names(folder)))


def _check_base(saved: Saved, base: Path, place: str) -> None:
    """Compare the base with the run's recorded hash and the adapter's shapes. Raises: UserError."""
    if saved.argument("random_init"):
        raise UserError(
            f"{saved.folder}: was trained with --random_init, its base was never saved; nothing to load it on."
        )
    folders = [saved.folder, *reversed(run_folder.checkpoints(saved.run).values())] if saved.run else [saved.folder]
    known = next((facts for folder in folders if (facts := read_facts(folder))), {})
    if known and _comparable(saved) and known["fingerprints"]["model"] != _fingerprint(saved, base):
        raise UserError(
            f"{place}: is not the model that this adapter was trained on (its hash is another); name it with --base."
        )
    adapter_weights, base_weights = stored.Weights(saved.folder), stored.Weights(base)
    for name, file in adapter_weights.where.items():
        module = name.removeprefix("base_model.model.").rpartition(".lora_A")[0]
        target = base_weights.where.get(f"{module}.weight")
        if not module or target is None or saved.adapter.get("fan_in_fan_out"):
            continue
        columns, width = target.get_slice(f"{module}.weight").get_shape()[1], file.get_slice(name).get_shape()[1]
        if columns != width:
            raise UserError(
                f"{place}: is not the model that this adapter was trained on: {module} takes {columns} numbers, the "
                f"adapter {width}; name the right one with --base."
            )


def _comparable(saved: Saved) -> bool:
    """Return whether the base's hash compares: a local base, and the same transformers (in its config)."""
    local = Path(saved.adapter.get("base_model_name_or_path") or "").is_absolute()
    return local and saved.facts.get("versions", {}).get("transformers") == __version__


def _fingerprint(saved: Saved, base: Path) -> str:
    values = {"model": str(base), "model_revision": None, "trust_remote_code": saved.remote, "random_init": False}
    return model_fingerprint(Settings(program.recipe_of(program.DEFAULT), values, {}, 1))


# --- loading ---


def tokenizer(saved: Saved):
    """Load the folder's tokenizer, else its base's; None if neither has one."""
    for folder in filter(None, (saved.folder, saved.base)):
        if any(Path(folder).glob("tokenizer*")):
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=saved.remote)
    return None


def load(saved: Saved, device: str = "cpu"):
    """Load the model as it was trained: an adapter unmerged, on its base in its dtype and quantization."""
    attention.avoid_wrong_kernels()
    if not saved.adapter:
        model = _model(saved.folder, saved, "auto", device) if saved.weights else _of_shards(saved, device)
        return _with_its_ends(model, saved).eval()
    model = _with_its_ends(load_base(saved, device), saved)
    # DeepSpeed trains an adapter in the base's dtype; PEFT would compute it in fp32.
    as_trained = {"autocast_adapter_dtype": saved.dtype == torch.float32}
    model = with_wrong_base_named(saved, lambda: PeftModel.from_pretrained(model, saved.folder, **as_trained))
    return model.eval()


def _with_its_ends(model, saved: Saved):
    """Let generation stop where the folder's generation_config.json says; peft reads the base's."""
    if (saved.folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(saved.folder)
    return model


def load_base(saved: Saved, device: str = "cpu"):
    """Load an adapter's base, with embedding rows for the adapter's tokens."""
    dtype, options = saved.base_dtype or "auto", {}
    if saved.bits:
        read = linear_attention.read_by_kernels(AutoConfig.from_pretrained(saved.base))
        options["quantization_config"] = quantization.config(saved.bits, dtype, read)
    model = _model(Path(saved.base), saved, dtype, device, **options)
    if saved.bits:
        quantization.keep_layout(model)
    own_tokenizer = tokenizer(saved)
    if own_tokenizer is not None and len(own_tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(own_tokenizer), mean_resizing=False)
    return model


def with_wrong_base_named(saved: Saved, load_adapter):
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
            ignore_mismatched_sizes=True,  # they are refused below, in a sentence
            **more,
        )
    if unpacked:
        complete.save_unpacked(model)
    towers.loaded(model, config, folder)
    complete.refuse(complete.of_loaded(model, info), str(folder))
    return model


def _of_shards(saved: Saved, device: str):
    """Load a folder with only DeepSpeed's shards, through DeepSpeed's own converter."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    config = AutoConfig.from_pretrained(saved.folder, trust_remote_code=saved.remote)
    model = classes.auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=saved.remote)
    with pickles.only_known():
        found = model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(saved.folder)), strict=False)
    if missing := sorted(set(found.missing_keys) - model.all_tied_weights_keys.keys()):
        raise UserError(
            f"{saved.folder}: its shards lack {complete.listed(missing)}, which would be random numbers (DeepSpeed's "
            "shards hold what is trained); save the whole model with trainer.save_model()."
        )
    return model.to(device)
