"""Tell the towers' tensors in the files of an image-text checkpoint; write them into a saved model, bit for bit."""

import json
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from zerofit.base.paths import write_text
from zerofit.model.weights import files

PROCESSORS = "*processor_config.json"  # of images, sound and video


def conversions_of(model, names) -> tuple[list, dict[str, tuple[str, bool]]]:
    """Return upstream's conversions that are used for names in files, and {name: (name in the model, is it renamed)}.

    Not only renamed is a tensor that is merged with others, split or permuted as it is loaded.
    Args: model: of the original class, also without memory.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions, own = get_model_conversion_mapping(model), model.state_dict()
    kinds = [[one for one in conversions if isinstance(one, kind)] for kind in (WeightRenaming, WeightConverter)]
    found = {}
    for name in names:
        renamed, pattern = rename_source_key(name, *kinds, model.base_model_prefix, own)
        if renamed not in own and name in own:  # as upstream does for a name that was no old one
            renamed, pattern = name, None
        found[name] = renamed, pattern is None
    return [one for one in conversions if one.was_used()], found


def names_in(folder: Path) -> dict[str, Path]:
    """Return {tensor: its file} of the weights in a folder."""
    return {name: file for file in files.of_model(folder, str(folder)) for name in files.tensors(file)}


def add_towers(folder: Path, base: Path, of_towers) -> None:
    """Add the towers' tensors in the files of `base`, and its processors' settings, to a model saved in `folder`.

    They become one more file of weights and are in the index.
    Args: of_towers: the names of the towers' tensors in the files of `base`.
    """
    for file in base.glob(PROCESSORS):
        shutil.copyfile(file, folder / file.name)
    own = files.of_model(folder, str(folder))
    count, held = len(own) + 1, {}
    for number, file in enumerate(own, 1):
        renamed = file.rename(folder / f"model-{number:05}-of-{count:05}.safetensors.new")
        held[renamed] = files.tensors(renamed)
    last = folder / f"model-{count:05}-of-{count:05}.safetensors.new"
    held[last] = _copy(base, of_towers, last)
    weight_map, size = {}, 0
    for file, entries in held.items():
        file.rename(file.with_suffix(""))
        for name, entry in entries.items():
            weight_map[name] = file.stem
            size += entry["data_offsets"][1] - entry["data_offsets"][0]
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_text(folder / files.INDEX, json.dumps(index, indent=2, sort_keys=True))


def _copy(base: Path, names, file: Path) -> dict:
    """Write the tensors of these names to one file; return its entries."""
    tensors, where = {}, names_in(base)
    for source in sorted({where[name] for name in names}):
        with safe_open(source, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in names if where[name] == source}
    save_file(tensors, file, metadata={"format": "pt"})
    return files.tensors(file)
