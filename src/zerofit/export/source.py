"""Find what a folder holds (a model, or an adapter and its base) and load it as it was trained."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from zerofit import run_folder
from zerofit.data import hub
from zerofit.errors import UserError
from zerofit.model import adapters, quantization
from zerofit.model.load import model_fingerprint
from zerofit.train.checkpoint import integrity, pickles, zero_shards
from zerofit.train.checkpoint.facts import is_of_this_kit, read_facts

MODEL, ADAPTER = "model*.safetensors", "adapter_model.safetensors"

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Saved:
    """folder: with the weights;  run: its run folder, None: made without this kit;  facts: run.json;
    adapter: adapter_config.json, None: all weights;  base: of an adapter, a folder;  remote: --trust_remote_code."""

    folder: Path
    run: Path | None = None
    facts: dict = field(default_factory=dict)
    adapter: dict | None = None
    base: str = ""
    remote: bool = False

    def argument(self, name: str):
        """What the run was given; None for a folder of another program."""
        return self.facts.get("arguments", {}).get(name, {}).get("value")

    @property
    def bits(self) -> int | None:
        """4 or 8: how the base was packed that the adapter was trained on."""
        return 4 if self.argument("load_in_4bit") else 8 if self.argument("load_in_8bit") else None

    @property
    def base_dtype(self) -> torch.dtype | None:
        """The type that an adapter's base had in training (model.weight_dtype); None: not known."""
        asked = self.argument("dtype")
        if asked not in (None, "auto"):
            return getattr(torch, asked)
        if not self.facts:
            return None
        return next((dtype for flag, dtype in HALF.items() if self.argument(flag)), torch.float32)

    @property
    def dtype(self) -> torch.dtype:
        """The type that its own numbers are saved in; fp32 in DeepSpeed's shards."""
        return dtype_of(self.weights) or torch.float32

    @property
    def weights(self) -> list[Path]:
        return sorted(self.folder.glob(ADAPTER if self.adapter else MODEL))


# --- finding it ---


def find(path: str, base: str = "", remote: bool = False) -> Saved:
    """A run folder (its final/, else its newest good checkpoint), a checkpoint, final/, an export, or another program's.

    Args: base: the base model of an adapter, where it is no longer where the adapter says.
    Raises: UserError for what is none of these, is damaged, or whose base is not there.
    """
    named = Path(path).expanduser()
    if not named.is_dir():
        raise UserError(f"{path}: no such folder; name a run (runs/...), one of its checkpoints, or its final/.")
    run = next((folder for folder in (named, named.parent) if (folder / "run.json").exists()), None)
    facts = _facts(run) if run else {}
    folder = named
    if run == named and (named / "final").is_dir() and run_folder.finished(named):
        folder = named / "final"
    elif run_folder.checkpoints(named) and not _holds(named):
        folder = _of_run(named, facts)
    if run == named and folder == named and not _holds(named):
        raise UserError(f"{path}: this run has saved no checkpoint yet, and it has not finished.")
    if not _holds(folder):
        raise UserError(f"{folder}: {_why_not(folder)}.")
    found = Saved(folder, run, facts, remote=remote)
    _check_whole(found)
    if (folder / "adapter_config.json").exists():
        found.adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        found.base = _find_base(found, base)
    return found


def dtype_of(files: list[Path]) -> torch.dtype | None:
    """The type of the first floating point tensor."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (no dict)
                if (tensor := opened.get_tensor(name)).is_floating_point():
                    return tensor.dtype
    return None


def _facts(run: Path) -> dict:
    try:
        return json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"{run / 'run.json'}: is damaged; name its final/ or a checkpoint copied elsewhere.") from None


def _holds(folder: Path) -> bool:
    plain = (folder / "config.json").exists() and (any(folder.glob(MODEL)) or zero_shards.is_deepspeed(folder))
    return plain or (folder / ADAPTER).exists()


def _why_not(folder: Path) -> str:
    if any(folder.glob("*model*.bin")):
        return "its weights are pickles (.bin), which run what they name when they are loaded; save it as safetensors first"
    if zero_shards.is_deepspeed(folder):
        return "holds DeepSpeed's shards and no config.json of a model; put the model's config.json and tokenizer beside them"
    return "holds neither a model (config.json, model.safetensors) nor an adapter (adapter_model.safetensors)"


def _of_run(run: Path, facts: dict) -> Path:
    """The newest good checkpoint."""
    found, reasons = None, []
    for one in reversed(run_folder.checkpoints(run).values()):
        if reason := "" if _holds(one) else _why_not(one):
            reasons.append(f"{one.name}: {reason}")
            continue
        try:
            _check_whole(Saved(one, run, facts))
        except UserError as error:
            reasons.append(str(error).removeprefix(f"{run}/").rstrip("."))
            continue
        found = one
        break
    for reason in reasons if found else ():
        print(f"note: passed over: {reason}", flush=True)
    if not found:
        raise UserError(f"{run}: none of its checkpoints is whole ({'; '.join(reasons)}).")
    return found


def _check_whole(found: Saved) -> None:
    """Raises: UserError for a damaged file. What this kit saved has hashes; of other programs' the lengths are checked."""
    from safetensors import SafetensorError, safe_open

    folder = found.folder
    ours = folder.name.startswith("checkpoint-") and is_of_this_kit(folder.parent)
    if (ours or read_facts(folder) is not None) and (reason := integrity.damage(folder)):
        raise UserError(f"{folder}: is no whole checkpoint: {reason}; name another one.")
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError):
            raise UserError(f"{file}: is not whole; name another checkpoint.") from None
    for index in folder.glob("*.index.json"):
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(name for name in named if not (folder / name).exists()):
            raise UserError(f"{folder}: {missing[0]} is missing, which {index.name} names; name another checkpoint.")
    if zero_shards.is_deepspeed(folder) and (reason := pickles.fault(folder)):
        raise UserError(f"{folder}: {reason}.")


def _find_base(found: Saved, given: str) -> str:
    """The folder of the adapter's base; a hub id is fetched, or found in the cache.

    Raises: UserError when it is not there, or is not the one that was trained.
    """
    kind, init = found.adapter.get("peft_type", ""), str(found.adapter.get("init_lora_weights"))
    if found.run and found.folder.name.startswith("checkpoint-") and re.fullmatch(adapters.CHANGES_BASE, init):
        raise UserError(
            f"{found.folder}: in training, {init} has changed the base that this adapter is for, and only final/ is "
            "converted to fit the original one; finish the run (make resume) and take that."
        )
    name = given or found.adapter.get("base_model_name_or_path") or ""
    place = f"--base {given}" if given else f"{found.folder}: its base {name or 'is not named'}"
    path = Path(name).expanduser()
    if not path.is_dir():
        if not name or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise UserError(f"{place}: no such folder; say where the base of this {kind} adapter is with --base.")
        path = _from_hub(name, found, place)
    if not (path / "config.json").exists():
        raise UserError(f"{place}: has no config.json; say where the base of this {kind} adapter is with --base.")
    _check_base(found, path, place)
    return str(path)


def _from_hub(name: str, found: Saved, place: str) -> Path:
    from huggingface_hub import snapshot_download

    hub.check_reachable(place)
    try:
        revision = found.adapter.get("revision")
        return Path(snapshot_download(name, revision=revision, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf"]))
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: cannot be had: {str(error).strip().splitlines()[0]}") from None


def _check_base(found: Saved, base: Path, place: str) -> None:
    """The hash of the base that a checkpoint of this run was saved with, and the shapes."""
    if found.argument("random_init"):
        raise UserError(
            f"{found.folder}: was trained with --random_init, its base was never saved; nothing to load it on."
        )
    near = [found.folder, *reversed(run_folder.checkpoints(found.run).values())] if found.run else [found.folder]
    known = next((facts for one in near if (facts := read_facts(one))), {})
    if known and _comparable(found) and known["fingerprints"]["model"] != model_fingerprint(_as_settings(found, base)):
        raise UserError(
            f"{place}: is not the model that this adapter was trained on (its hash is another); name it with --base."
        )
    held, on = zero_shards.Weights(found.folder), zero_shards.Weights(base)
    for name, file in held.where.items():
        module = name.removeprefix("base_model.model.").rpartition(".lora_A")[0]
        target = on.where.get(f"{module}.weight")
        if not module or target is None or found.adapter.get("fan_in_fan_out"):
            continue
        columns, wide = target.get_slice(f"{module}.weight").get_shape()[1], file.get_slice(name).get_shape()[1]
        if columns != wide:
            raise UserError(
                f"{place}: is not the model that this adapter was trained on: {module} takes {columns} numbers, the "
                f"adapter {wide}; name the right one with --base."
            )


def _comparable(found: Saved) -> bool:
    """Whether the hash of the base is one of a local folder, by the library that is here (its configuration names it)."""
    from transformers import __version__

    local = Path(found.adapter.get("base_model_name_or_path") or "").is_absolute()
    return local and found.facts.get("versions", {}).get("transformers") == __version__


def _as_settings(found: Saved, base: Path) -> SimpleNamespace:
    return SimpleNamespace(model=str(base), model_revision=None, trust_remote_code=found.remote, random_init=False)


# --- loading it ---


def tokenizer(found: Saved):
    """Its tokenizer, else its base's; None: neither has one."""
    from transformers import AutoTokenizer

    for folder in filter(None, (found.folder, found.base)):
        if any(Path(folder).glob("tokenizer*")):
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=found.remote)
    return None


def load(found: Saved, device: str = "cpu"):
    """The model as it was trained: an adapter unmerged, on its base in the base's type, packed where it was packed."""
    from peft import PeftModel

    from zerofit.model import attention

    attention.avoid_wrong_kernels()
    if not found.adapter:
        return (_model(found.folder, found, "auto", device) if found.weights else _of_shards(found, device)).eval()
    net = load_base(found, device)
    # DeepSpeed trains an adapter in the base's type; peft would compute it in fp32.
    as_it_is = {"autocast_adapter_dtype": found.dtype == torch.float32}
    net = wrong_base_in_words(found, lambda: PeftModel.from_pretrained(net, found.folder, **as_it_is))
    return net.eval()


def load_base(found: Saved, device: str = "cpu"):
    """An adapter's base with rows for the adapter's tokens."""
    dtype, packed = found.base_dtype or "auto", {}
    if found.bits:
        values = {f"load_in_{found.bits}bit": True}
        packed["quantization_config"] = quantization.config(SimpleNamespace(values=values), dtype)
    net = _model(Path(found.base), found, dtype, device, **packed)
    if found.bits:
        quantization.keep_layout(net)
    words = tokenizer(found)
    if words is not None and len(words) > net.get_input_embeddings().num_embeddings:
        net.resize_token_embeddings(len(words), mean_resizing=False)
    return net


def wrong_base_in_words(found: Saved, load_adapter):
    try:
        return load_adapter()
    except (RuntimeError, ValueError) as error:  # size mismatch, target modules not found
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{found.base}: is not the base of the adapter in {found.folder}: {reason}") from None


def _model(folder: Path, found: Saved, dtype, device: str, **more):
    from transformers import AutoModelForCausalLM

    if device != "cpu":
        more["device_map"] = {"": device}
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=found.remote, use_safetensors=True, **more
    )


def _of_shards(found: Saved, device: str):
    """A folder with DeepSpeed's shards only, read by DeepSpeed's own converter."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(found.folder, trust_remote_code=found.remote)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=found.remote)
    with pickles.only_known():
        net.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(found.folder)), strict=False)
    return net.to(device)
