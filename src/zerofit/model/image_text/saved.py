"""Find the towers' tensors in the files of an image-text checkpoint; copy them into a saved model, bit for bit."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from zerofit.base.paths import write_text
from zerofit.model.weights import files

PROCESSORS = "*processor_config.json"  # settings for images, audio and video


def conversions_of(model, names) -> tuple[list, dict[str, tuple[str, bool]]]:
    """Return transformers' conversions for names in files, and {name: (name in the model, is it only renamed)}.

    Other tensors are merged, split or permuted when they are loaded.
    Args: model: of the original class, may be without memory.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions, state = get_model_conversion_mapping(model), model.state_dict()
    kinds = [[c for c in conversions if isinstance(c, kind)] for kind in (WeightRenaming, WeightConverter)]
    in_model = {}
    for name in names:
        renamed, pattern = rename_source_key(name, *kinds, model.base_model_prefix, state)
        if renamed not in state and name in state:  # as transformers does for a current name
            renamed, pattern = name, None
        in_model[name] = renamed, pattern is None
    return [conversion for conversion in conversions if conversion.was_used()], in_model


def names_in(folder: Path) -> dict[str, Path]:
    """Return {tensor: file} for the weights in a folder."""
    return {name: file for file in files.of_model(folder, str(folder)) for name in files.tensors(file)}


def add_towers(folder: Path, base: Path, tower_names) -> None:
    """Add the towers' tensors in the files of `base`, and its processors' settings, to a model saved in `folder`.

    They are written to another weight file and added to the index.
    Args: tower_names: the names of the towers' tensors in the files of `base`.
    """
    for file in base.glob(PROCESSORS):
        shutil.copyfile(file, folder / file.name)
    model_files = files.of_model(folder, str(folder))
    count, headers = len(model_files) + 1, {}
    for number, file in enumerate(model_files, 1):
        renamed = file.rename(folder / f"model-{number:05}-of-{count:05}.safetensors.new")
        headers[renamed] = files.tensors(renamed)
    last = folder / f"model-{count:05}-of-{count:05}.safetensors.new"
    headers[last] = _copy(base, tower_names, last)
    weight_map, size = {}, 0
    for file, entries in headers.items():
        file.rename(file.with_suffix(""))
        for name, entry in entries.items():
            weight_map[name] = file.stem
            size += entry["data_offsets"][1] - entry["data_offsets"][0]
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_text(folder / files.INDEX, json.dumps(index, indent=2, sort_keys=True))


def _copy(base: Path, names, file: Path) -> dict:
    """Write the tensors of these names to a file; return its header entries."""
    tensors, where = {}, names_in(base)
    for source in sorted({where[name] for name in names}):
        with safe_open(source, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in names if where[name] == source}
    save_file(tensors, file, metadata={"format": "pt"})
    return files.tensors(file)
