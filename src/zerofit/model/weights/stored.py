"""Read the tensors of a folder's safetensors files one at a time."""

import json
from pathlib import Path

import torch
from safetensors import safe_open


class Weights:
    def __init__(self, folder: Path):
        self.files = [safe_open(file, "pt") for file in _weight_files(folder)]
        self.where = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118  (no dict)

    def shape(self, name: str) -> list[int]:
        return self.where[name].get_slice(name).get_shape()

    def get(self, name: str) -> torch.Tensor | None:
        return self.where[name].get_tensor(name) if name in self.where else None


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that from_pretrained reads; the folder may contain others.

    mistralai's folders contain the weights a second time, as consolidated.safetensors.
    """
    stem = "adapter_model" if (folder / "adapter_config.json").exists() else "model"
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    return sorted(folder.glob("*.safetensors"))
