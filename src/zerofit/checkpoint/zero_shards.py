"""Read the states of a checkpoint of any ZeRO stage and rank count as full tensors.

Files are memory-mapped: only the used tensors are read.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from zerofit.base.errors import UserError
from zerofit.checkpoint import pickles
from zerofit.checkpoint.facts import read_facts
from zerofit.job import parallel_dims


@dataclass
class OptimizerStates:
    """Optimizer states of a checkpoint, as the flat pieces of all ranks."""

    shapes: dict[str, tuple[int, ...]]  # trained parameters, in the order of the optimizer's groups
    # parameter -> state -> flat pieces in order; "fp32" is the weight, the other names are the optimizer's
    pieces: dict[str, dict[str, list[torch.Tensor]]]
    step: float | None = None  # the optimizer's step count, None without one
    unsplit: str = ""  # first state without one number per weight; "" if all have one
    loss_scale: float | None = None  # dynamic loss scale of fp16; None without fp16
    counters: dict[str, int] = field(default_factory=dict)  # DeepSpeed's step and sample counts

    def keys(self) -> list[str]:
        """Return the names of the optimizer's states, e.g. ["exp_avg", "exp_avg_sq"]."""
        return sorted({key for states in self.pieces.values() for key in states} - {"fp32"})

    def full(self, name: str, key: str = "fp32") -> torch.Tensor:
        """Return one state of one parameter in its full shape. Raises: UserError if the shards are too short."""
        return self.part(name, key, 0, math.prod(self.shapes[name])).view(self.shapes[name])

    def part(self, name: str, key: str, start: int, stop: int) -> torch.Tensor:
        """Read a range of a flat state, up to the end of the parameter, and no other numbers.

        Raises: UserError if the shards are too short for the parameter.
        """
        pieces, numel, offset, parts = self.pieces[name].get(key, []), math.prod(self.shapes[name]), 0, []
        if (size := sum(piece.numel() for piece in pieces)) < numel:
            raise UserError(
                f"{name}: the shards hold {size:,} of the {numel:,} numbers of its {key}; the checkpoint is incomplete."
            )
        for piece in pieces:
            parts.append(piece[max(0, start - offset) : max(0, min(stop, numel) - offset)])
            offset += piece.numel()
        parts = [part for part in parts if part.numel()] or [torch.empty(0)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def is_deepspeed(checkpoint: Path) -> bool:
    return (checkpoint / "latest").exists()


def read(checkpoint: Path) -> OptimizerStates:
    """Read the states of a checkpoint of stage 1, 2 or 3.

    Raises: UserError if the files lack optimizer states, or split them by more than ZeRO.
    """
    check_complete(checkpoint)
    folder = pickles.shards_folder(checkpoint)
    files = sorted(folder.glob("*optim_states.pt"), key=_rank)
    saved = [pickles.load(file)["optimizer_state_dict"] for file in files]
    if (
        not saved
        or len({_rank(file) for file in files}) != len(files)
        or any("mp_rank_00" not in f.name for f in files)
    ):
        splitting = " and ".join(f"--{way.flag}" for way in parallel_dims.registered() if way.splits_model)
        raise UserError(
            f"{folder}: does not hold the optimizer states of one process group ({splitting} is not supported)."
        )
    model_states = pickles.load(sorted(folder.glob("*model_states.pt"), key=_rank)[0])
    shapes = _shapes(model_states)
    if _number(saved[0]["partition_count"]) != len(files):
        raise UserError(
            f"{folder}: holds the optimizer states of {len(files)} ranks, but "
            f"{_number(saved[0]['partition_count'])} ranks saved it."
        )
    states = OptimizerStates(shapes, {name: {} for name in shapes})
    if "fp32_flat_groups" in saved[0]:  # stage 3
        _collect_partitions(states, saved, len(files), folder)
    else:
        _collect_slices(states, saved, folder)
    scaler = saved[0].get("loss_scaler")
    if saved[0].get("dynamic_loss_scale"):
        states.loss_scale = float(scaler.cur_scale)
    states.counters = {
        name: model_states[name] for name in ("global_steps", "global_samples", "skipped_steps") if name in model_states
    }
    return states


def _shapes(model_states: dict) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for group in model_states["param_shapes"] for name, shape in group.items()}


def check_share(checkpoint: Path, shapes: dict[str, tuple[int, ...]], ranks: int) -> None:
    """Check in the file headers that one rank of stage 3 has saved its share of every parameter.

    Raises: UserError.
    """
    files = [list(checkpoint.glob(f"*/*{kind}_states.pt")) for kind in ("model", "optim")]
    if [len(matches) for matches in files] != [1, 1]:
        raise UserError(f"{checkpoint}: does not hold the states of one rank.")
    saved = _shapes(pickles.load(files[0][0]))
    if wrong := [name for name in {**shapes, **saved} if shapes.get(name) != saved.get(name)]:
        raise UserError(f"{checkpoint}: {wrong[0]} has shape {saved.get(wrong[0])} in it, not {shapes.get(wrong[0])}.")
    states = OptimizerStates(saved, {name: {} for name in saved})
    _collect_partitions(states, [pickles.load(files[1][0])["optimizer_state_dict"]], ranks, checkpoint)


def check_complete(checkpoint: Path) -> None:
    """Refuse one node's part (--node_local_storage) without the other parts. Raises: UserError."""
    elsewhere = (read_facts(checkpoint) or {}).get("elsewhere", {})
    if missing := [name for name in elsewhere if not (checkpoint / name).exists()]:
        raise UserError(
            f"{checkpoint}: holds one node's part (--node_local_storage), and {len(missing)} files of other nodes "
            f"are missing, e.g. {missing[0]}; copy them from each node: rsync -a --ignore-existing "
            f"HOST:{checkpoint.absolute()}/ {checkpoint}/."
        )


def saved_by(checkpoint: Path) -> tuple[str, int]:
    """Return (ZeRO stage, rank count) of the run that saved a checkpoint."""
    folder = pickles.shards_folder(checkpoint)
    saved = pickles.load(min(folder.glob("*optim_states.pt"), key=_rank))["optimizer_state_dict"]
    return str(int(saved["zero_stage"])), _number(saved["partition_count"])


def _collect_slices(states: OptimizerStates, saved: list[dict], folder: Path) -> None:
    """Collect the pieces of stages 1 and 2: a rank holds a slice of each group's concatenated parameters."""
    for rank in saved:
        if "param_slice_mappings" not in rank or not isinstance(rank["base_optimizer_state"], dict):
            raise UserError(f"{folder}: does not record the parameters of its shards (saved by an older DeepSpeed).")
        base = rank["base_optimizer_state"]
        for i, (group, flat) in enumerate(
            zip(rank["param_slice_mappings"], rank["single_partition_of_fp32_groups"], strict=True)
        ):
            local_states = _split(states, base["state"].get(base["param_groups"][i]["params"][0], {}),
                         flat.numel() + rank["group_paddings"][i])  # fmt: skip
            for name, place in group.items():
                for key, tensor in {"fp32": flat, **local_states}.items():
                    states.pieces[name].setdefault(key, []).append(tensor[place.start : place.start + place.numel])


def _collect_partitions(states: OptimizerStates, saved: list[dict], ranks: int, folder: Path) -> None:
    """Collect the pieces of stage 3: each rank holds an equal share of each parameter, the last one padded."""
    for rank in saved:
        flats, base = rank["fp32_flat_groups"], rank["optimizer_state_dict"]["state"]
        local_states = [{"fp32": flat, **_split(states, base.get(i, {}), flat.numel())} for i, flat in enumerate(flats)]
        i = offset = 0
        for name, shape in states.shapes.items():
            share = -(-math.prod(shape) // ranks)
            while i < len(flats) and offset == flats[i].numel():
                i, offset = i + 1, 0
            if i == len(flats) or offset + share > flats[i].numel():
                raise UserError(f"{folder}: its shards end before {name} (they do not contain states on NVMe).")
            for key, tensor in local_states[i].items():
                states.pieces[name].setdefault(key, []).append(tensor[offset : offset + share])
            offset += share


def _split(states: OptimizerStates, state: dict, numel: int) -> dict[str, torch.Tensor]:
    """Return the states with one number per weight; record the step and the first state of another size."""
    flat_states = {}
    for key, value in state.items():
        if isinstance(value, dict):  # bitsandbytes nests its states one level deeper
            flat_states |= _split(states, value, numel)
        elif key == "step":
            states.step = float(value)
        elif torch.is_tensor(value) and value.is_floating_point() and value.numel() == numel:
            flat_states[key] = value.reshape(-1)
        elif (
            value is not None
            and not isinstance(value, int | float)
            and (not torch.is_tensor(value) or value.numel() > 1)
        ):
            states.unsplit = states.unsplit or key
    return flat_states


def read_plain(checkpoint: Path, groups: list[list[str]], stored_names: dict[str, str], weights) -> OptimizerStates:
    """Read the states of a checkpoint of stage 0.

    Args: groups: the trained parameters in the order of the optimizer's groups; weights: the checkpoint's Weights, or a
        dict; stored_names: parameter -> its name in `weights`, if they differ.
    Raises: UserError if groups, states and weights do not match.
    """
    saved = pickles.load(checkpoint / "optimizer.pt")
    if [len(group["params"]) for group in saved["param_groups"]] != [len(group) for group in groups]:
        raise UserError(
            f"{checkpoint}: its optimizer has groups of "
            f"{', '.join(str(len(g['params'])) for g in saved['param_groups'])} parameters, this run of "
            f"{', '.join(str(len(g)) for g in groups)}: another model or recipe saved it."
        )
    states = OptimizerStates({}, {})
    for group, names in zip(saved["param_groups"], groups, strict=True):
        for i, name in zip(group["params"], names, strict=True):
            tensor = weights.get(stored_names.get(name, name))
            if tensor is None:
                raise UserError(f"{checkpoint}: its weights do not contain {stored_names.get(name, name)}.")
            states.shapes[name] = tuple(tensor.shape)
            local_states = _split(states, saved["state"].get(i, {}), tensor.numel())
            states.pieces[name] = {key: [value.reshape(-1)] for key, value in {"fp32": tensor, **local_states}.items()}
    scaler = checkpoint / "scaler.pt"
    if scaler.exists():
        states.loss_scale = float(pickles.load(scaler).get("scale", 0.0)) or None
    return states


def _rank(file: Path) -> int:
    match = re.search(r"pp_rank_(\d+)", file.name)
    return int(match[1]) if match else 0


def _number(count) -> int:
    return max(count) if isinstance(count, list) else count
