"""Settings: every resolved argument of a job, its source, and what was decided for the user."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Settings:
    """Everything a run needs to know, resolved: `settings.zero`, `settings.model`, `settings.learning_rate` ...

    values: argument -> value;  source: argument -> where it came from;  decisions: sentences to print once;
    deepspeed: the DeepSpeed configuration ("auto" left for transformers), None for stage 0;
    planned_gpu: the GPU that is planned for (hardware.Gpu), None: what this machine has;  flags: the command line;
    fingerprints: of model and data, for checkpoints;  resharded: the checkpoint to resume was saved at another stage,
    rank count or offload (both: checkpoint.check_same).
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
        """bf16, fp16 or fp32: the type of the matrix products."""
        return "bf16" if self.values["bf16"] else "fp16" if self.values["fp16"] else "fp32"

    @property
    def bundled(self) -> bool:
        """Whether this is the embedded default task."""
        return self.source["data"] == "bundled task"

    def training_values(self) -> dict[str, Any]:
        """The keyword arguments of transformers.TrainingArguments."""
        from transformers import TrainingArguments

        names = {f.name for f in fields(TrainingArguments) if f.init}
        values = {k: v for k, v in self.values.items() if k in names}
        values["deepspeed"] = self.deepspeed
        if self.pure_bf16 and self.deepspeed is None:
            values["bf16"] = False  # that flag means autocast over fp32 weights; these weights are bf16
        for name in ("gradient_checkpointing", "activation_checkpointing"):  # recompute.enable does it
            values.pop(name, None)
            values.pop(f"{name}_kwargs", None)
        return values

    def rows(self) -> list[tuple[str, Any, str]]:
        """(argument, value, source) of everything that is not a plain transformers default."""
        shown = [k for k in self.values if self.source[k] != "transformers default"]
        return [(k, self.values[k], self.source[k]) for k in shown if k not in ("show", "config")]


def order_seed(settings) -> int | None:
    """The seed of the row order, of Settings or of TrainingArguments; None keeps the rows as they come."""
    if settings.train_sampling_strategy == "sequential":
        return None
    return settings.seed if settings.data_seed is None else settings.data_seed


def decide(settings: Settings, name: str, value: Any, why: str) -> None:
    """Set an argument for the user and remember the sentence that says so."""
    settings.values[name] = value
    settings.source[name] = "decided"
    settings.decisions.append(f"{name} {value}: {why}")


def json_value(config: dict, dotted: str, default: Any = None) -> Any:
    """The value at "zero_optimization.stage" or `default`."""
    for key in dotted.split("."):
        if not isinstance(config, dict) or key not in config:
            return default
        config = config[key]
    return config


def merge_json(base: dict, overlay: dict) -> dict:
    """`base` with `overlay` laid over it, section by section; neither is changed."""
    out = dict(base)
    for key, value in overlay.items():
        out[key] = merge_json(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out
