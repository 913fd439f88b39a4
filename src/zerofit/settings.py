"""Define Settings: every resolved argument of a job, its source, and the decisions made for the user."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Settings:
    """The resolved arguments of a job, read as `settings.zero`, `settings.learning_rate` ...

    values: argument -> value;  source: argument -> where it came from;  decisions: sentences to print once;
    deepspeed: the DeepSpeed configuration ("auto" is left for transformers to fill), None for stage 0;
    planned_gpu: the hardware.Gpu to plan for, None: this machine's;  flags: the command line;
    fingerprints: of model and data, for checkpoints;  resharded: the checkpoint to resume was saved at another stage,
    rank count or offload (both: train/checkpoint/resume.py, check_resumable).
    """

    recipe: str
    values: dict[str, Any]
    source: dict[str, str]
    decisions: list[str]
    deepspeed: dict | None
    world_size: int
    planned_gpu: Any = None
    flags: list[str] = field(default_factory=list)
    fingerprints: dict[str, str] = field(default_factory=dict)
    resharded: bool = False

    def __getattr__(self, name: str):
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def precision(self) -> str:
        """Return bf16, fp16 or fp32: the type of the matrix products."""
        return "bf16" if self.values["bf16"] else "fp16" if self.values["fp16"] else "fp32"

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks that train on different rows: the --sp_size ranks of a group share theirs."""
        return self.world_size // self.values["sp_size"]

    @property
    def bundled(self) -> bool:
        """Return whether the run trains on the bundled default task."""
        return self.source["data"] == "bundled task"

    def training_values(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers.TrainingArguments."""
        from transformers import TrainingArguments

        names = {f.name for f in fields(TrainingArguments) if f.init}
        values = {k: v for k, v in self.values.items() if k in names}
        values["deepspeed"] = self.deepspeed
        if self.pure_bf16 and self.deepspeed is None:
            values["bf16"] = False  # the flag means autocast over fp32 weights; these weights are bf16
        for name in ("gradient_checkpointing", "activation_checkpointing"):  # model/gradient_checkpointing.py does it
            values.pop(name, None)
            values.pop(f"{name}_kwargs", None)
        return values

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return (argument, value, source) of every argument that is not a plain transformers default."""
        shown = [k for k in self.values if self.source[k] != "transformers default"]
        return [(k, self.values[k], self.source[k]) for k in shown if k not in ("show", "config")]


def order_seed(settings) -> int | None:
    """Return the seed of the row order, of Settings or TrainingArguments; None: rows are not shuffled."""
    if settings.train_sampling_strategy == "sequential":
        return None
    return settings.seed if settings.data_seed is None else settings.data_seed


def decide(settings: Settings, name: str, value: Any, why: str) -> None:
    """Set an argument for the user and record the sentence that explains it."""
    settings.values[name] = value
    settings.source[name] = "decided"
    settings.decisions.append(f"{name} {value}: {why}")


def json_value(config: dict, dotted: str, default: Any = None) -> Any:
    """Return the value at a dotted key such as "zero_optimization.stage", or `default`."""
    for key in dotted.split("."):
        if not isinstance(config, dict) or key not in config:
            return default
        config = config[key]
    return config


def merge_json(base: dict, overlay: dict) -> dict:
    """Return `base` with the values of `overlay` over it, merged section by section; neither is changed."""
    out = dict(base)
    for key, value in overlay.items():
        out[key] = merge_json(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out
