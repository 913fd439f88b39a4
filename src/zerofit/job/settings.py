"""Define Settings: all resolved arguments of a job with their sources, and the decisions made for the user."""

import copy
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from zerofit.job import parallel_dims, program
from zerofit.job.recipe import Recipe

if TYPE_CHECKING:  # types of settings.<argument> for editors and type checkers
    from transformers import TrainingArguments

    from zerofit.config import arguments
    from zerofit.objective.interface import Objective

    class _Arguments(
        arguments.RunArguments,
        arguments.SupervisionArguments,
        arguments.ModelArguments,
        arguments.DataArguments,
        arguments.MemoryArguments,
        arguments.OptimizerArguments,
        arguments.LoraArguments,
        arguments.PreferenceArguments,
        TrainingArguments,
    ): ...

else:
    _Arguments = object

# Argument or field -> why it is set after the resolvers of config/resolve.py; all others are frozen by then.
LATE_FIELDS = {
    "decisions": "sentences to print, also from loading the data and starting the ranks",
    "output_dir": "rank 0 chooses the run folder when the run starts",
    "resume_from_checkpoint": "`auto` and `true` become the path of a checkpoint in the run folder",
    "attn_implementation": "kernels/flex.py: chooses eager or flex_attention by the self-test on the GPU",
    "padding_free": "kernels/flex.py: eager would mix the documents of a row",
    "use_liger_kernel": "kernels/liger.py: disabled if its kernels fail the self-test on the GPU",
    "ddp_backend": "distributed.start needs no process group for a single process without DeepSpeed",
    "deepspeed": "nvme_path becomes a folder of this run on the disk, the same for all ranks",
    "fingerprints": "hashes of the data, which is read later",
    "save_every_minutes": "depends on the number of nodes and the scheduler",
    "resharded": "depends on the checkpoint",
    "started_by": "ids of the agents that started the ranks",
    "previous_segments": "earlier segments of the run, from the checkpoint",
}

# Arguments that files and --show represent by the text of the flag instead of the value.
WORD_ARGUMENTS = ("zero", "canary", "padding_free", "fused_loss")


class Decision(str):
    """A sentence about a decision or finding for the user.

    argument: the argument or another value that it explains; "" for a sentence that is always printed (`to_print`).
    """

    argument: str

    def __new__(cls, sentence: str, argument: str = ""):
        self = super().__new__(cls, sentence)
        self.argument = argument
        return self


@dataclass(frozen=True)
class Check:
    """A line of the run's certificate (certificate/page.py)."""

    name: str  # key in certificate.json
    holds: bool | None  # None: not checked
    sentence: str  # the result with its number, or why it was not checked
    numbers: dict = field(default_factory=dict)  # values for JSON


MODULE_NAME = re.compile(r"[\w.-]+")  # name of a target module; peft takes anything else as a single regular expression


class FrozenDict(dict):
    """A dict that rejects changes; copies and pickles are plain dicts."""

    def _refuse(self, *args, **kwargs):
        raise FrozenInstanceError("the settings are resolved: change arguments in config/resolve.py")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self):
        return dict, (dict(self),)


def _frozen(value):
    return FrozenDict({k: _frozen(v) for k, v in value.items()}) if isinstance(value, dict) else value


class Settings(_Arguments):
    """The resolved arguments of a job, read as `settings.zero`, `settings.learning_rate` ...

    values: argument -> value;  source: argument -> source of the value;  decisions: sentences to print once;
    checks: lines of the run's certificate;
    deepspeed: the DeepSpeed configuration (transformers fills in "auto"), None for stage 0;
    defaults: argument -> default value;  planned_gpu: the hardware.Gpu to plan for, None for this machine's;
    request: the user's arguments from which the settings follow, None if unknown;
    fingerprints: hashes of model and data for checkpoints;  resharded: whether the checkpoint to resume was saved with
    another stage, rank count or offload;  previous_segments: {"zero", "world_size", "to_step"} of each earlier segment
    of the run (all three: checkpoint/resumable.py);  started_by: ids of the agents that started this process
    (checkpoint/restart.py);  knows_model: whether resolve.resolve_for_model is done.
    """

    recipe: Recipe
    values: dict[str, Any]
    source: dict[str, str]
    decisions: list[str]
    checks: list[Check]
    deepspeed: dict | None
    world_size: int
    planned_gpu: Any
    request: Any
    defaults: dict[str, Any]
    fingerprints: dict[str, str]
    resharded: bool
    previous_segments: list[dict]
    started_by: list[str]
    knows_model: bool
    frozen: bool

    def __init__(self, recipe, values, source, world_size, *, planned_gpu=None, defaults=None, request=None):
        self.__dict__.update(
            recipe=recipe, values=values, source=source, decisions=[], checks=[], deepspeed=None, world_size=world_size,
            planned_gpu=planned_gpu, request=request, defaults=defaults or {},
            fingerprints={}, resharded=False, previous_segments=[], started_by=[], knows_model=False, frozen=False,
        )  # fmt: skip

    def __getattr__(self, name: str):
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field or an argument of LATE_FIELDS (only these once frozen); `decide` sets other arguments."""
        if name not in LATE_FIELDS and (self.frozen or name in self.values):
            raise FrozenInstanceError(f"{name}: use `decide` in config/resolve.py to change an argument")
        if name in self.__dict__:
            self.__dict__[name] = _frozen(value) if self.frozen else value
        elif name in self.values:
            dict.__setitem__(self.values, name, value)
        else:
            raise AttributeError(f"{name} is not an argument of recipes/{self.recipe}.py")

    def seal(self) -> None:
        """Reject further changes, except of LATE_FIELDS."""
        self.__dict__.update({name: _frozen(self.__dict__[name]) for name in ("values", "source", "deepspeed")})
        self.__dict__["frozen"] = True

    def unseal(self) -> None:
        """Allow changes again; only for config/resolve.py."""
        self.__dict__.update({name: copy.deepcopy(self.__dict__[name]) for name in ("values", "source", "deepspeed")})
        self.__dict__["frozen"] = False

    def replace(self, **changes) -> "Settings":
        """Return a copy with other arguments or fields, e.g. for a simulated job."""
        other = copy.copy(self)
        other.unseal()
        other.decisions, other.checks = list(self.decisions), list(self.checks)
        for name, value in changes.items():
            target = other.__dict__ if name in other.__dict__ else other.values
            target[name] = value
        if self.frozen:
            other.seal()
        return other

    @property
    def explicit(self) -> Mapping[str, Any]:
        """Return {argument: value} for arguments set by flag or YAML file."""
        return self.request.values if self.request else {}

    @property
    def precision(self) -> str:
        """Return bf16 or fp16, the dtype of autocast or of DeepSpeed's engine; fp32 without either."""
        return "bf16" if self.values["bf16"] else "fp16" if self.values["fp16"] else "fp32"

    @property
    def compute_dtype(self) -> str:
        """Return bf16, fp16 or fp32, the dtype of matrix products: `precision`, or else the weights' dtype."""
        of_weights = {"bfloat16": "bf16", "float16": "fp16"}.get(self.dtype, "fp32")
        return of_weights if self.precision == "fp32" else self.precision

    @property
    def keeps_fp32(self) -> bool:
        """Return whether trained weights are fp32 themselves, without a master copy in a DeepSpeed engine."""
        return self.deepspeed is None and not self.pure_bf16

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks that train on different rows."""
        return self.world_size // self.ranks_per_row

    @property
    def ranks_per_row(self) -> int:
        """Return the number of ranks that share each row, in all dimensions of parallelism (parallel/)."""
        return parallel_dims.ranks_per_row(self.values)

    def parallel_size(self, *splits: str) -> int:
        """Return the number of ranks that split the "tokens" of a row, or the "matrices" or "layers" of the model."""
        return parallel_dims.ranks_per_row(self.values, splits)

    def data_rank(self, rank: int) -> int:
        """Return the index of a rank among the `data_ranks` shares of the rows."""
        return parallel_dims.data_rank(self.values, rank, self.world_size)

    @property
    def bundled(self) -> bool:
        """Return whether the run trains on the bundled default task."""
        return self.source["data"] == "bundled task"

    @property
    def trains_adapter(self) -> bool:
        """Return whether an adapter is trained and the model's weights are frozen."""
        return self.values.get("adapter") is not None

    @property
    def objective(self) -> "type[Objective]":
        """Return the objective class (objective/interface.py)."""
        return program.objective(self.recipe, self.values.get("loss_type"))

    def training_values(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers.TrainingArguments."""
        from transformers import TrainingArguments

        names = {f.name for f in fields(TrainingArguments) if f.init}
        values = {k: v for k, v in self.values.items() if k in names}
        values["deepspeed"] = copy.deepcopy(self.deepspeed)
        if self.pure_bf16 and self.deepspeed is None:
            values["bf16"] = False  # the flag means autocast with fp32 weights; these weights are bf16
        for name in ("gradient_checkpointing", "activation_checkpointing"):  # done by model/gradient_checkpointing.py
            values.pop(name, None)
            values.pop(f"{name}_kwargs", None)
        return values

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return (argument, value, source) for arguments that are not transformers defaults."""
        shown = [k for k in self.values if self.source[k] != "transformers default"]
        return [(k, written(k, self.values[k]), self.source[k]) for k in shown if k not in ("show", "config")]

    def written(self) -> dict[str, Any]:
        """Return the values for run.json, result.json and checkpoints."""
        return {name: written(name, value) for name, value in self.values.items()}


def written(name: str, value: Any) -> Any:
    """Return an argument's value for files: "2" for stage 2, "true" for --padding_free true."""
    return str(value).lower() if name in WORD_ARGUMENTS else value


def as_typed(name: str, value: Any) -> str:
    """Return an argument's value as typed after its flag: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(written(name, value))


def order_seed(settings) -> int | None:
    """Return the seed for shuffling rows, from Settings or TrainingArguments; None if rows are not shuffled."""
    if settings.train_sampling_strategy == "sequential":
        return None
    return settings.seed if settings.data_seed is None else settings.data_seed


def decide(settings: Settings, name: str, value: Any, why: str = "", source: str = "decided") -> None:
    """Set an argument while the job is resolved, and record the decision if there is a reason.

    Args: source: the source of the value.
    """
    settings.values[name] = value
    settings.source[name] = source
    if why:
        settings.decisions.append(Decision(f"{name} {written(name, value)}: {why}", name))


def subject(sentence: str) -> str:
    """Return the argument that a decision explains; "" without one."""
    return sentence.argument if isinstance(sentence, Decision) else ""


def to_print(settings: Settings) -> list[str]:
    """Return the decisions to print: all with --verbose, else without values for arguments that the user left open."""
    typed = {"", *settings.request.values}
    return [sentence for sentence in settings.decisions if settings.verbose or subject(sentence) in typed]


def withdraw(settings: Settings, *arguments: str) -> None:
    """Remove the decisions about these arguments, which new ones replace."""
    settings.decisions = [decision for decision in settings.decisions if subject(decision) not in arguments]


def json_value(config: dict, dotted: str, default: Any = None) -> Any:
    """Return the value at a dotted key such as "zero_optimization.stage", or `default`."""
    for key in dotted.split("."):
        if not isinstance(config, dict) or key not in config:
            return default
        config = config[key]
    return config


def merge_json(base: dict, overlay: dict) -> dict:
    """Return a copy of `base` updated with `overlay`, merged section by section."""
    out = dict(base)
    for key, value in overlay.items():
        out[key] = merge_json(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out
