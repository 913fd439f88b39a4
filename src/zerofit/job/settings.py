"""Define Settings: every resolved argument of a job, its source, and the decisions made for the user."""

import copy
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from zerofit.job import groups, program
from zerofit.job.recipe import Recipe

if TYPE_CHECKING:  # for an editor and a type checker: the arguments with their types, read as settings.<name>
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

# Argument or field -> why it is set after the resolvers of config/resolve.py; the settings are frozen for all others.
AFTER_RESOLVING = {
    "decisions": "sentences to print, which loading the data and starting the ranks add to",
    "output_dir": "rank 0 names the run folder when the run starts",
    "resume_from_checkpoint": "`auto` and `true` become the path of a checkpoint in the run folder",
    "attn_implementation": "kernels/flex.py: eager and flex_attention replace each other by the proof on the GPU",
    "padding_free": "kernels/flex.py: eager would mix the documents of a row",
    "use_liger_kernel": "liger.prove turns it off where the kernels fail on the GPU",
    "ddp_backend": "distributed.start opens no process group for a single process without DeepSpeed",
    "deepspeed": "nvme_path becomes a folder of this run on the disk, which all ranks agree on",
    "fingerprints": "hashes of the data, which is read after resolving",
    "save_every_minutes": "follows from the place: how many nodes there are, and whose scheduler",
    "resharded": "follows from the facts in the checkpoint",
    "started_by": "ids of the agents, which each rank knows its own of",
    "resumed": "the stretches that were trained before, from the facts in the checkpoint",
}


# Arguments whose values have another type than the words of the command line that files and --show have for them.
WORDS = ("zero", "canary", "padding_free", "fused_loss")


class Decision(str):
    """A sentence that says what was decided for the user, or what was found out for them.

    argument: the argument that it is about, whose value and source the settings hold; "": it is about none.
    """

    argument: str

    def __new__(cls, sentence: str, argument: str = ""):
        self = super().__new__(cls, sentence)
        self.argument = argument
        return self


@dataclass(frozen=True)
class Check:
    """A line of the run's certificate (certificate/page.py)."""

    name: str  # its key in certificate.json
    holds: bool | None  # None: not checked
    sentence: str  # what was checked, with its number; or why it was not
    numbers: dict = field(default_factory=dict)  # the figures, as JSON holds them


MODULE_NAME = re.compile(r"[\w.-]+")  # of a target; anything else is a regular expression to peft, and stands alone


class FrozenDict(dict):
    """A dict that refuses changes; copies and pickles of it are plain dicts."""

    def _refuse(self, *args, **kwargs):
        raise FrozenInstanceError("the settings are resolved: arguments are decided in config/resolve.py")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self):
        return dict, (dict(self),)


def _frozen(value):
    return FrozenDict({k: _frozen(v) for k, v in value.items()}) if isinstance(value, dict) else value


class Settings(_Arguments):
    """The resolved arguments of a job, read as `settings.zero`, `settings.learning_rate` ...

    values: argument -> value;  source: argument -> where it came from;  decisions: sentences to print once;
    checks: lines of the run's certificate, from those who checked;
    deepspeed: the DeepSpeed configuration ("auto" is left for transformers to fill), None for stage 0;
    defaults: argument -> value that nobody set;  planned_gpu: the hardware.Gpu to plan for, None: this machine's;
    request: what was asked for, from which these follow; None: not known;
    fingerprints: of model and data, for checkpoints;  resharded: the checkpoint to resume was saved at another stage,
    rank count or offload;  resumed: {"zero", "world_size", "to_step"} of each stretch that was trained before (all
    three: checkpoint/resumable.py, check_resumable);  started_by: ids of the agents that have started this process
    (checkpoint/restart.py);  knows_model: resolve.resolve_for_model is done.
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
    resumed: list[dict]
    started_by: list[str]
    knows_model: bool
    frozen: bool

    def __init__(self, recipe, values, source, world_size, *, planned_gpu=None, defaults=None, request=None):
        self.__dict__.update(
            recipe=recipe, values=values, source=source, decisions=[], checks=[], deepspeed=None, world_size=world_size,
            planned_gpu=planned_gpu, request=request, defaults=defaults or {},
            fingerprints={}, resharded=False, resumed=[], started_by=[], knows_model=False, frozen=False,
        )  # fmt: skip

    def __getattr__(self, name: str):
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field, or an argument of AFTER_RESOLVING; `decide` sets the others. Once frozen, only the latter."""
        if name not in AFTER_RESOLVING and (self.frozen or name in self.values):
            raise FrozenInstanceError(f"{name}: an argument is decided in config/resolve.py, by `decide`")
        if name in self.__dict__:
            self.__dict__[name] = _frozen(value) if self.frozen else value
        elif name in self.values:
            dict.__setitem__(self.values, name, value)
        else:
            raise AttributeError(f"{name} is no argument of recipes/{self.recipe}.py")

    def seal(self) -> None:
        """Refuse changes from now on, but for those of AFTER_RESOLVING."""
        self.__dict__.update({name: _frozen(self.__dict__[name]) for name in ("values", "source", "deepspeed")})
        self.__dict__["frozen"] = True

    def unseal(self) -> None:
        """Allow changes again; for config/resolve.py alone."""
        self.__dict__.update({name: copy.deepcopy(self.__dict__[name]) for name in ("values", "source", "deepspeed")})
        self.__dict__["frozen"] = False

    def replace(self, **changes) -> "Settings":
        """Return the settings of a job that differs from this one in some arguments or fields, e.g. a simulated one."""
        other = copy.copy(self)
        other.unseal()
        other.decisions, other.checks = list(self.decisions), list(self.checks)
        for name, value in changes.items():
            where = other.__dict__ if name in other.__dict__ else other.values
            where[name] = value
        if self.frozen:
            other.seal()
        return other

    @property
    def given(self) -> Mapping[str, Any]:
        """Return the arguments set by flag or YAML file, with their values."""
        return self.request.values if self.request else {}

    @property
    def precision(self) -> str:
        """Return bf16, fp16 or fp32: the type of the matrix products."""
        return "bf16" if self.values["bf16"] else "fp16" if self.values["fp16"] else "fp32"

    @property
    def keeps_fp32(self) -> bool:
        """Return whether weights that train are fp32 themselves: no engine of DeepSpeed has a master copy of them."""
        return self.deepspeed is None and not self.pure_bf16

    @property
    def data_ranks(self) -> int:
        """Return the number of ranks that train on different rows."""
        return self.world_size // self.ranks_per_row

    @property
    def ranks_per_row(self) -> int:
        """Return the number of ranks that share each row, by all ways to share one (parallel/)."""
        return groups.per_row(self.values)

    def ranks_that_split(self, *what: str) -> int:
        """Return how many ranks split the "tokens" of a row, or the "matrices" or "layers" of the model; 1: none do."""
        return groups.per_row(self.values, what)

    def data_rank(self, rank: int) -> int:
        """Return which of the `data_ranks` shares of the rows a rank trains on."""
        return groups.data_rank(self.values, rank, self.world_size)

    @property
    def bundled(self) -> bool:
        """Return whether the run trains on the bundled default task."""
        return self.source["data"] == "bundled task"

    @property
    def trains_adapter(self) -> bool:
        """Return whether an adapter trains and the model's own weights stay frozen."""
        return self.values.get("adapter") is not None

    @property
    def objective(self) -> "type[Objective]":
        """Return the class of what a row is and what is trained on it (objective/interface.py)."""
        return program.objective(self.recipe, self.values.get("loss_type"))

    def training_values(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers.TrainingArguments."""
        from transformers import TrainingArguments

        names = {f.name for f in fields(TrainingArguments) if f.init}
        values = {k: v for k, v in self.values.items() if k in names}
        values["deepspeed"] = copy.deepcopy(self.deepspeed)
        if self.pure_bf16 and self.deepspeed is None:
            values["bf16"] = False  # the flag means autocast over fp32 weights; these weights are bf16
        for name in ("gradient_checkpointing", "activation_checkpointing"):  # model/gradient_checkpointing.py does it
            values.pop(name, None)
            values.pop(f"{name}_kwargs", None)
        return values

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return (argument, value, source) of every argument that is not a plain transformers default."""
        shown = [k for k in self.values if self.source[k] != "transformers default"]
        return [(k, written(k, self.values[k]), self.source[k]) for k in shown if k not in ("show", "config")]

    def written(self) -> dict[str, Any]:
        """Return the values as run.json, result.json and the checkpoints hold them."""
        return {name: written(name, value) for name, value in self.values.items()}


def written(name: str, value: Any) -> Any:
    """Return an argument's value as files hold it: "2" for stage 2, "true" for --padding_free true."""
    return str(value).lower() if name in WORDS else value


def as_typed(name: str, value: Any) -> str:
    """Return an argument's value as it is typed behind its flag: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(written(name, value))


def order_seed(settings) -> int | None:
    """Return the seed of the row order, of Settings or TrainingArguments; None: rows are not shuffled."""
    if settings.train_sampling_strategy == "sequential":
        return None
    return settings.seed if settings.data_seed is None else settings.data_seed


def decide(settings: Settings, name: str, value: Any, why: str = "", source: str = "decided") -> None:
    """Set an argument while the job is resolved, and record the sentence that explains it, if there is one.

    Args: source: where the value comes from.
    """
    settings.values[name] = value
    settings.source[name] = source
    if why:
        settings.decisions.append(Decision(f"{name} {written(name, value)}: {why}", name))


def subject(sentence: str) -> str:
    """Return the argument that a decision is about; "" for a sentence about none."""
    return sentence.argument if isinstance(sentence, Decision) else ""


def withdraw(settings: Settings, *arguments: str) -> None:
    """Remove the decisions about these arguments, before others take their place."""
    settings.decisions = [one for one in settings.decisions if subject(one) not in arguments]


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
