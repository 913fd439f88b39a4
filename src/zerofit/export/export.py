"""`zerofit export`: write a trained model as a Hugging Face folder, and verify it."""

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory as split_by
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig

from zerofit.base.errors import UserError
from zerofit.base.paths import nearest_existing, sibling, write_text
from zerofit.checkpoint import integrity, zero_shards
from zerofit.export import card, compare, ends, merge, source
from zerofit.job import run_folder
from zerofit.model import generation
from zerofit.model.image_text import classes
from zerofit.model.image_text import saved as saved_towers
from zerofit.model.weights import config_json, stored

DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
          "fp16": torch.float16, "float16": torch.float16}  # fmt: skip

STAGING = ".saving"  # suffix of the folder until the export is verified

COPIED_FILES = ("*.jinja", "*.py", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
                "merges.txt", "generation_config.json", "additional_chat_templates",
                saved_towers.PROCESSORS)  # fmt: skip


def main(argv: list[str], servers=None) -> None:
    """Run `zerofit export`; see --help.

    Args: servers: module that prepares files for servers (tools/servers/serve.py), if available.
    Raises: UserError if the model cannot be exported, or if the export gives different results.
    """
    parser = argparse.ArgumentParser(prog="zerofit export", allow_abbrev=False, description=__doc__)
    parser.add_argument(
        "run", help="a run folder, one of its checkpoints, its final/, or another program's model folder"
    )
    parser.add_argument("--merge", action="store_true", help="merge an adapter into its base")
    parser.add_argument("--dtype", choices=DTYPES, default=None, metavar="float32|bf16|fp16", help="default: as saved")
    parser.add_argument("--output_dir", default="", help="default: RUN/export, or RUN/export-merged")
    parser.add_argument("--base", default="", help="base model of the adapter, if it has moved")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--check", choices=("true", "false"), default="true", help="compare with the trained model")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device for loading and comparing"
    )
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.set_defaults(server="")
    if servers:
        servers.add_arguments(parser)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that SIGTERM also deletes the temporary folder
    saved = source.find(args.run, args.base, args.trust_remote_code)
    if args.server:
        servers.check_arguments(args, saved)
    _check_request(args, saved)
    _check_links(args, saved)
    out = _choose_out(args, saved)
    tmp_folder = sibling(out, STAGING)
    shutil.rmtree(tmp_folder, ignore_errors=True)
    if tmp_folder.is_symlink():  # rmtree does not delete links
        raise UserError(f"{tmp_folder}: is a link; remove it, or set OUT= to another folder.")
    try:
        tmp_folder.mkdir(parents=True)
        done = _write(args, saved, tmp_folder)
        done["agreement"] = compare.check(args, saved, tmp_folder, done)
        write_text(tmp_folder / "README.md", card.text(saved, done))
        if args.server:
            done["served"] = servers.finish(args, saved, tmp_folder, out, done)
            write_text(tmp_folder / "README.md", card.text(saved, done))
        tmp_folder.replace(out)
    finally:
        shutil.rmtree(tmp_folder, ignore_errors=True)
    print(f"{'adapter' if done['adapter'] else 'model'}: {out}", flush=True)


def _check_request(args, saved) -> None:
    if args.merge and not saved.adapter:
        raise UserError(f"--merge: {saved.folder} contains a full model instead of an adapter; remove --merge.")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.dtype = DTYPES.get(args.dtype)
    kind = "adapter" if saved.adapter else "model"
    base_note = f" on {_shown_base(saved)}" if saved.adapter else ""
    print(f"export of {saved.folder}: {kind}{base_note}{', merged' if args.merge else ''}", flush=True)


def _check_links(args, saved) -> None:
    """Check for links to files outside a copied folder, since a foreign folder may link to any private file.

    Links to weights are allowed, since weights are often on another disk. Raises: UserError.
    """
    for folder in filter(None, (saved.folder, saved.base if args.merge else "")):
        top = Path(folder).resolve()
        allowed = [top, *([top.parents[1] / "blobs"] if top.parent.name == "snapshots" else [])]  # the Hub's cache
        copied = (path for pattern in (*COPIED_FILES, "*.json") for path in top.glob(pattern))
        for file in (file for path in copied for file in (path, *path.rglob("*"))):
            target = Path(os.path.realpath(file))
            if not any(target.is_relative_to(place) for place in allowed):
                raise UserError(
                    f"{file}: is a link to {target} outside its folder; the export would contain that file. If you "
                    "want this, replace the link with a copy."
                )


def _shown_base(saved) -> str:
    return saved.adapter.get("base_model_name_or_path") or saved.base


def _choose_out(args, saved) -> Path:
    name = "export-merged" if args.merge else "export"
    name = f"export-{args.server}" if args.server else name
    default = saved.run / name if saved.run else sibling(saved.folder, f"-{name}")
    out = Path(args.output_dir).expanduser() if args.output_dir else default
    run_folder.check_name(out)
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UserError(f"--output_dir {out}: exists and is not empty; remove it, or set OUT= to another folder.")
    existing = nearest_existing(out.absolute().parent)
    if not os.access(existing, os.W_OK):
        raise UserError(f"--output_dir {out}: {existing} is not writable.")
    return out


# --- writing ---


def _write(args, saved, out: Path) -> dict:
    """Write everything except the model card; return a report for the comparison and the card."""
    masters = _masters(args, saved)
    done = {
        "adapter": bool(saved.adapter) and not args.merge, "merged": args.merge, "masters": bool(masters),
        "asked": args.dtype, "notes": [],
    }  # fmt: skip
    if args.dtype == torch.float32 and not masters and saved.dtype != torch.float32:
        done["notes"].append(
            "fp32 master copies of these weights do not exist: float32 adds no precision to the saved weights"
        )
    reason = merge.reason_for_full_merge(saved) if args.merge else ""
    if reason:
        done["notes"].append(f"merged by peft with the full model in memory, in fp32 ({reason})")
    for note in done["notes"]:
        print(f"  note: {note}", flush=True)
    if reason:
        _write_merged_by_peft(args, saved, masters, out, done)
    else:
        names, get = _tensors(args, saved, masters)
        done["dtype"] = _write_tensors(names, get, args, out, "adapter_model" if done["adapter"] else "model")
    _write_small(saved, out, done)
    run_folder.apply_umask(out)
    return done


def _tensors(args, saved, masters: dict):
    """Return ({tensor name: bytes}, function that reads one tensor by name)."""
    held_weights = stored.Weights(saved.folder)
    if args.merge:
        held_weights = stored.Weights(Path(saved.base))

        def adapter(name):
            return masters[name]() if name in masters else adapter_weights.get(name)

        adapter_weights, base_names = stored.Weights(saved.folder), merge.BaseNames(saved)
        dtypes = {name: args.dtype or ((name not in base_names.towers and saved.base_dtype) or None)
                  for name in held_weights.where}  # fmt: skip
        names = {name: _size(held_weights, name, dtype) for name, dtype in dtypes.items()}
        return names, lambda name: _cast(
            merge.merge_tensor(saved, adapter, held_weights, name, base_names),
            dtypes[name] or held_weights.get(name).dtype,
        )
    if not saved.weights:  # only DeepSpeed's shards
        to_dtype = args.dtype or _dtype_of_config(saved.folder)
        states = zero_shards.read(saved.folder)
        names = {name: states.full(name).numel() * to_dtype.itemsize for name in states.shapes}
        _check_complete(saved, set(names))
        return names, lambda name: _cast(states.full(name), to_dtype)
    twins = {} if saved.adapter else _tied_twins(saved, held_weights)
    names = {name: _size(held_weights, name, args.dtype) for name in held_weights.where if name not in twins}

    def get(name):
        weight = held_weights.get(name)
        return _cast(_master(masters[name](), weight, name) if name in masters else weight, args.dtype)

    return names, get


def _size(held: stored.Weights, name: str, dtype) -> int:
    """Return the bytes of a tensor after the cast."""
    tensor = held.get(name)  # memory-mapped, not read
    return tensor.numel() * (dtype.itemsize if dtype and tensor.is_floating_point() else tensor.itemsize)


def _cast(tensor: torch.Tensor, dtype) -> torch.Tensor:
    return tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor


def _write_tensors(names: dict[str, int], get, args, out: Path, stem: str) -> str:
    """Write files of at most --max_shard_size and an index; return the most common dtype.

    Args: names: {tensor: bytes}; get: reads a tensor by name.
    """
    _check_room(sum(names.values()), out)
    size = "1000TB" if stem == "adapter_model" else args.max_shard_size  # peft reads one file
    try:
        shards = split_by(
            names, get_storage_size=int, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=size
        )
    except ValueError as error:
        raise UserError(f"--max_shard_size {args.max_shard_size}: {error}") from None
    dtypes, numbers = {}, 0
    for file, keys in shards.filename_to_tensors.items():
        tensors = {}
        for name in keys:
            tensor = get(name)
            numbers += tensor.numel()
            dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.numel()
            tensors[name] = tensor.contiguous()
        save_file(tensors, out / file, metadata={"format": "pt"})
        print(f"  {file}  {(out / file).stat().st_size / 1e9:.3g} GB", flush=True)
    if len(shards.filename_to_tensors) > 1:
        index = {"metadata": shards.metadata | {"total_parameters": numbers}, "weight_map": shards.tensor_to_filename}
        run_folder.write_json(out / f"{stem}.safetensors.index.json", index)
    return str(max(dtypes, key=dtypes.get)).removeprefix("torch.")


def _check_room(needed: int, out: Path) -> None:
    free = shutil.disk_usage(out).free
    if needed * 1.01 > free:
        raise UserError(
            f"--output_dir {out.parent}: {needed / 1e9:.3g} GB needed, {free / 1e9:.3g} GB free; set OUT= to a folder "
            "on another disk."
        )


def _write_merged_by_peft(args, saved, masters: dict, out: Path, report: dict) -> None:
    """Merge with PEFT and the full model in memory, and write the result with transformers."""
    adapter = (lambda name: masters[name]() if name in masters else None) if masters else None
    model = merge.merge_model(saved, adapter, args.device)
    dtype = args.dtype or saved.base_dtype or source.dtype_of(sorted(Path(saved.base).glob("*.safetensors")))
    model = model.to(dtype)
    _check_room(sum(p.numel() * p.element_size() for p in model.parameters()), out)
    model.config.use_cache = True
    model.save_pretrained(out, max_shard_size=args.max_shard_size)
    for file in sorted(out.glob("*.safetensors")):
        print(f"  {file.name}  {file.stat().st_size / 1e9:.3g} GB", flush=True)
    report["dtype"] = str(dtype).removeprefix("torch.")


def _write_small(saved, out: Path, report: dict) -> None:
    """Write configuration, tokenizer, chat template and generation settings."""
    for folder in filter(
        None, (saved.base if report["merged"] else "", saved.folder)
    ):  # later folders override earlier ones
        for file in {file for pattern in COPIED_FILES for file in Path(folder).glob(pattern)}:
            if file.is_dir():
                shutil.copytree(file, out / file.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(file, out / file.name)
    tokenizer = source.tokenizer(saved)
    if tokenizer is None:
        report["notes"].append("the folder does not contain a tokenizer, so the export does not either")
        print(f"  note: {report['notes'][-1]}", flush=True)
    elif not any(out.glob("tokenizer*")):
        tokenizer.save_pretrained(out)
    if report["adapter"]:
        config = saved.adapter | {"inference_mode": True}
        run_folder.write_json(out / "adapter_config.json", config)
        report["ends"] = ends.write(saved, out, tokenizer)
        return
    config_folder = out if (out / "config.json").exists() else Path(saved.base) if report["merged"] else saved.folder
    config = json.loads((config_folder / "config.json").read_text(encoding="utf-8"))
    config = {k: v for k, v in config.items() if k not in ("torch_dtype", "_name_or_path", "quantization_config")}
    config["dtype"] = report["dtype"]
    config.get("text_config", config)["use_cache"] = True  # off in training
    config["architectures"] = config.get("architectures") or [type(_skeleton(config_folder, saved.remote)).__name__]
    eos = generation.ids_of(config.get("eos_token_id"))
    # config.json comes from the base, the tokenizer from the adapter
    if report["merged"] and tokenizer is not None and tokenizer.eos_token_id not in eos:
        config["eos_token_id"] = [tokenizer.eos_token_id, *eos] if len(eos) > 1 else tokenizer.eos_token_id
    run_folder.write_json(out / "config.json", config)
    if not config_json.ties(_config(out, saved.remote)):  # the weights in `out` are not tied
        for part in (config, config.get("text_config", config)):
            part["tie_word_embeddings"] = False
        run_folder.write_json(out / "config.json", config)
    if not (out / "generation_config.json").exists():
        with contextlib.suppress(ValueError):  # contradictory settings in the configuration
            GenerationConfig.from_model_config(
                AutoConfig.from_pretrained(out, trust_remote_code=saved.remote)
            ).save_pretrained(out)
    report["ends"] = ends.write(saved, out, tokenizer)


# --- weights ---


def _masters(args, saved) -> dict:
    """Return {name in the files: function that reads its fp32 master}, {} without --dtype float32.

    For final/, read the newest checkpoint whose masters round to the saved weights.
    """
    if args.dtype != torch.float32 or not saved.weights or saved.dtype == torch.float32:
        return {}
    folders = [saved.folder, *reversed(run_folder.checkpoints(saved.run).values())] if saved.run else [saved.folder]
    held_weights = stored.Weights(saved.folder)
    for folder in filter(zero_shards.is_deepspeed, folders):
        if saved.run and folder != saved.folder and integrity.find_corruption(folder):
            continue
        states = zero_shards.read(folder)
        in_files = {} if saved.adapter else classes.file_names(_config(saved.folder, saved.remote), held_weights.where)
        names = {in_files.get(plain := merge.plain_name(name), plain): name for name in states.shapes}
        sample_name = next((name for name in names if name in held_weights.where), None)
        if sample_name and _rounds(states.full(names[sample_name]), held_weights.get(sample_name)):
            print(f"  using the fp32 master copies of {folder.name}", flush=True)
            saved_names = {plain: name for plain, name in names.items() if plain in held_weights.where}
            return {plain: functools.partial(states.full, name) for plain, name in saved_names.items()}
    return {}


def _rounds(master: torch.Tensor, weight: torch.Tensor) -> bool:
    return master.shape == weight.shape and torch.equal(master.to(weight.dtype), weight)


def _master(master: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return the master. Raises: UserError if it does not round to the saved weight."""
    if not _rounds(master, weight):
        raise UserError(
            f"{name}: its fp32 master copy does not round to the saved weight; export without --dtype float32."
        )
    return master


def _dtype_of_config(folder: Path) -> torch.dtype:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return DTYPES.get(config.get("dtype") or config.get("torch_dtype"), torch.float32)


def _config(folder: Path, remote: bool):
    return config_json.config_of(folder, remote)


def _skeleton(folder: Path, remote: bool):
    """Build the model on the meta device."""
    config = _config(folder, remote)
    with torch.device("meta"):
        return classes.auto_class(config).from_config(config, trust_remote_code=remote)


def _tied_twins(saved, held: stored.Weights) -> dict[str, str]:
    """Return {duplicate of a tied weight (saved by ZeRO): the first copy} if both are equal."""
    ties = getattr(_skeleton(saved.folder, saved.remote), "all_tied_weights_keys", {})
    return {
        name: first
        for name, first in ties.items()
        if name in held.where and first in held.where and torch.equal(held.get(name), held.get(first))
    }


def _check_complete(saved, names: set[str]) -> None:
    """Check that the shards contain all weights. Raises: UserError for missing (frozen) weights."""
    model = _skeleton(saved.folder, saved.remote)
    expected = set(model.state_dict()) - set(getattr(model, "all_tied_weights_keys", {}))
    if missing := sorted(expected - names):
        raise UserError(
            f"{saved.folder}: model.safetensors is missing, and its shards lack {missing[0]} and {len(missing) - 1} "
            "more weights (DeepSpeed only saves trained weights); save the full model with trainer.save_model()."
        )
