"""Hold a setting with its predictions, and the plan that a search fills."""

import math
from dataclasses import dataclass, field
from typing import Any

from zerofit.base import hardware
from zerofit.job.request import Request
from zerofit.job.settings import as_typed
from zerofit.plan import formulas, gpu_memory
from zerofit.plan.formulas import Setting, Shape


@dataclass
class Candidate:
    """A setting and its predictions."""

    request: Request  # of the run, complete: what the printed command gives
    method: str  # sft, lora, qlora, dpo or pipeline
    setting: Setting
    formula: dict[str, float]  # {part of formulas.PARTS: bytes of a GPU} by the closed forms
    seconds: float  # of an optimizer step, an estimate
    shape: Shape  # of the model, with the method's adapter
    gpu: hardware.Gpu | None  # None: a CPU
    answer: dict | None = None  # of the simulation (see simulate.run), None: not run
    failed: str = ""  # why the simulation failed
    change: tuple = ()  # which of SMALLER_STATES it has that the user did not ask for; (): none
    stage: int | None = None  # of a pipeline that `formula` is of
    row_length: int = 1  # tokens of a row, or of the longer side of a pair

    @property
    def label(self) -> str:
        """Return the setting in words: "sft ZeRO-3, offload optimizer, checkpointing, micro batch 8"."""
        s = self.setting
        parts = s.in_words(self.method)
        if self.request.get("use_liger_kernel"):
            parts.append("Liger")
        if self.change:
            parts.append(changed(self.change))
        parts.append(f"micro batch {s.micro}")
        parts += [f"{way.flag} {size}" for way, size in s.groups if way.splits != "layers"]
        if s.pp > 1:
            parts.append(f"{s.accumulation} of them through {s.pp} stages")
        return ", ".join(parts)

    @property
    def workspace(self) -> int:
        """Return the bytes of cuBLAS's workspaces; 0 on a CPU."""
        return gpu_memory.workspace_bytes(self.gpu)

    @property
    def by_formula(self) -> float:
        """Return the peak of allocated bytes by the closed forms, without a margin."""
        return sum(self.formula.values()) + self.workspace

    @property
    def allocated(self) -> int:
        """Return the peak of allocated bytes, by simulation, or else by the closed forms with a margin."""
        if self.answer:
            more = gpu_memory.COMPILED_MARGIN if self.has_compiled_graphs else 0.0
            return int((1 + more) * max(self.answer["total"].values())) + self.workspace
        return int(gpu_memory.margin(self.setting.zero).high * sum(self.formula.values())) + self.workspace

    @property
    def has_compiled_graphs(self) -> bool:
        """Return whether compiled layers are recomputed, which a simulation runs uncompiled."""
        return bool(self.request.get("compile_layers") and self.setting.every)

    @property
    def unused(self) -> dict[str, int]:
        """Return the bytes above the allocated peak, as gpu_memory.beyond_allocated; none on a CPU."""
        return gpu_memory.beyond_allocated(self.answer, self.allocated if self.gpu else 0)

    @property
    def reserved(self) -> int:
        """Return the bytes that torch's allocator holds at its peak; by the closed forms those of the median job."""
        if self.answer is None:
            return int(gpu_memory.margin(self.setting.zero).reserved * self.by_formula)
        return self.allocated + self.unused["reserved"]

    @property
    def peak(self) -> int:
        """Return the least bytes that torch's allocator must hold, which decides whether the job fits."""
        return self.allocated + self.unused["least"]

    @property
    def host_of_a_node(self) -> int:
        """Return the bytes of host memory that a node's ranks need.

        They are for offloaded states or the loading of split matrices, and for the copies of --save_in_background.
        """
        s, inputs = self.setting, formulas.offloaded_inputs(self.shape, self.setting)
        each = self.answer["host"] if self.answer else formulas.host_of_a_rank(self.shape, s)
        if s.tp > 1:  # each rank loads the whole model before DeepSpeed cuts it
            each = max(each, self.shape.frozen_bytes * self.shape.parameters)
        held = int((inputs if s.nvme else each) * s.of_a_node)
        copies = formulas.saved_by_a_node(self.shape, s) if s.background_save else 0
        return held + int(copies)

    def saved(self, kept: int | None) -> tuple[float, float]:
        """Return the bytes of all checkpoints that exist at once, of which a run keeps `kept`, and of final/."""
        checkpoints = (kept or 1) + 1  # the new one is written before the oldest goes
        return self.checkpoint_bytes * checkpoints, self.final_bytes

    @property
    def final_bytes(self) -> int:
        """Return the bytes of final/, in 16 bits: of an adapter without its base."""
        return 2 * (self.shape.trainable if self.shape.frozen else self.shape.parameters)

    @property
    def checkpoint_bytes(self) -> float:
        """Return the bytes of one checkpoint."""
        if self.request.get("save_only_model"):
            return float(self.final_bytes)
        return formulas.checkpoint_bytes(self.shape.trainable, self.shape.parameters)

    @property
    def rows_of_a_step(self) -> int:
        """Return the effective batch."""
        return self.setting.micro * self.setting.accumulation * self.setting.ranks // self.setting.ranks_per_row

    @property
    def tokens_per_second(self) -> float:
        s = self.setting
        return s.tokens * s.sp * s.accumulation * s.ranks / s.ranks_per_row / self.seconds


def changed(change: tuple) -> str:
    """Return one of SMALLER_STATES as a flag; "" for ()."""
    return f"--{change[0]} {as_typed(*change)}" if change else ""


@dataclass
class Plan:
    """The result of a search."""

    gpu: hardware.Gpu  # each GPU of the job
    ranks: int  # GPUs of all nodes
    limit: int  # bytes that torch's allocator may take on a GPU, without the margin
    allowance: dict[str, int]  # {reason: bytes} of a GPU's memory outside torch's allocator
    chosen: Candidate | None  # the fastest that fits; None: nothing fits
    rejected: list[tuple[Candidate, str]]  # (a faster candidate, why it was not chosen)
    nearest: Candidate | None = None  # the smallest, if nothing fits
    would_do: int | None = None  # GPUs with which something fits by formula; None: no number was found
    longest: int | None = None  # --max_length at which something fits by formula; None: none was found
    margin: int = 0  # bytes of a GPU that are kept free for the error of plans, 0: none is left
    node: int = gpu_memory.GPUS_OF_A_NODE  # GPUs of a node
    # {LoRA, QLoRA or pipeline: (its fastest that fits by formula, None: none does; words that plan or explain it)}
    instead: dict[str, tuple[Candidate | None, str]] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)  # that were searched, in order of preference
    host_limit: int | None = None  # bytes of a node's host memory, None: unknown
    host_assumed: int | None = None  # bytes that --method auto counts on where it is unknown
    disk_limit: int | None = None  # bytes that are free for runs/, None: unknown, on another machine
    host_here: int | None = None  # bytes of this machine's host memory
    here: bool = False  # the plan is for this machine
    disk_free: int | None = None  # the same, or those on this machine where it is unknown
    kept: int | None = None  # checkpoints that a run keeps, None: all
    advices: list = field(default_factory=list)  # advice.better.Advice: what would pay beside the chosen setting
    run: Any = None  # advice.cost.Run: how much the job trains, and what a GPU costs
    rows: str = ""  # a sentence on the length of the rows
    notes: list[str] = field(default_factory=list)  # the lines that the search has shown
    seconds: float = 0.0  # that were waited for, with the imports

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.node)

    @property
    def gpu_bytes(self) -> int:
        """Return the bytes of a GPU that the plan counts on."""
        return self.limit + self.margin + sum(self.allowance.values())

    @property
    def packs_too_much(self) -> bool:
        """Return whether nothing fits because each GPU packs the whole base as it loads, whatever their number."""
        shape = self.nearest.shape if self.nearest else None
        return bool(shape) and shape.frozen_bytes < 2 and shape.frozen_bytes * shape.frozen > self.limit

    def share(self, candidate: Candidate) -> float:
        """Return the share of a GPU's memory that a candidate takes, with what is outside torch's allocator."""
        return (candidate.peak + sum(self.allowance.values())) / self.gpu_bytes

    @property
    def host_there(self) -> int | None:
        """Return the bytes of a node's host memory that the plan counts on; None: it is not looked at."""
        return self.host_assumed if self.host_limit is None else self.host_limit

    def host_is_short(self, candidate: Candidate) -> bool:
        """Return whether a candidate needs more host memory than a node has."""
        return self.host_there is not None and candidate.host_of_a_node > self.host_there

    def disk_is_short(self, candidate: Candidate) -> bool:
        """Return whether a candidate's checkpoints need more than is free where it trains."""
        return self.disk_limit is not None and sum(candidate.saved(self.kept)) > self.disk_limit
