"""Define a candidate setting with its predictions, and the plan that a search fills."""

import math
from dataclasses import dataclass, field
from typing import Any

from zerofit.base import hardware
from zerofit.job.request import Request
from zerofit.job.settings import as_typed
from zerofit.plan import formulas, gpu_memory
from zerofit.plan.formulas import PlanPoint, Shape


@dataclass
class Candidate:
    """A setting and its predictions.

    Bytes of a GPU, from small to large: `by_formula` (closed forms), `allocated` (tensors, with a margin if not
    simulated), `peak` (least need of torch's allocator: decides whether the job fits), `reserved` (held by it).
    """

    request: Request  # the complete request of the run, as in the printed command
    method: str  # sft, lora, qlora, dpo or pipeline
    setting: PlanPoint
    formula: dict[str, float]  # {part of formulas.PARTS: bytes per GPU} by the closed forms
    seconds: float  # estimate for an optimizer step
    shape: Shape  # the model's shape, with the method's adapter
    gpu: hardware.Gpu | None  # None: a CPU
    answer: dict | None = None  # result of the simulation (see simulate.run), None: not simulated
    failed: str = ""  # why the simulation failed
    change: tuple = ()  # entry of SMALLER_STATES that the plan added, () if none
    stage: int | None = None  # pipeline stage that `formula` describes
    row_length: int = 1  # tokens per row, or in the longer side of a pair

    @property
    def label(self) -> str:
        """Return the setting as text: "sft ZeRO-3, offload optimizer, checkpointing, micro batch 8"."""
        s = self.setting
        parts = s.label_parts(self.method)
        if self.request.get("use_liger_kernel"):
            parts.append("Liger")
        if self.change:
            parts.append(change_flag(self.change))
        parts.append(f"micro batch {s.micro}")
        parts += [f"{way.flag} {size}" for way, size in s.groups if way.splits != "layers"]
        if s.pp > 1:
            parts.append(f"{s.accumulation} micro batches through {s.pp} stages")
        return ", ".join(parts)

    @property
    def workspace(self) -> int:
        """Return the bytes of cuBLAS workspaces; 0 on a CPU."""
        return gpu_memory.workspace_bytes(self.gpu)

    @property
    def by_formula(self) -> float:
        """Return the peak of allocated bytes by the closed forms, without a margin."""
        return sum(self.formula.values()) + self.workspace

    @property
    def allocated(self) -> int:
        """Return the peak of allocated bytes by simulation, or by the closed forms with a margin."""
        if self.answer:
            margin = gpu_memory.COMPILED_MARGIN if self.has_compiled_graphs else 0.0
            return int((1 + margin) * max(self.answer["total"].values())) + self.workspace
        return int(gpu_memory.margin(self.setting.zero).high * sum(self.formula.values())) + self.workspace

    @property
    def has_compiled_graphs(self) -> bool:
        """Return whether compiled layers are recomputed; the simulation runs them uncompiled."""
        return bool(self.request.get("compile_layers") and self.setting.every)

    @property
    def unused(self) -> dict[str, int]:
        """Return the bytes above the allocated peak, see gpu_memory.allocator_overhead; 0 on a CPU."""
        return gpu_memory.allocator_overhead(self.answer, self.allocated if self.gpu else 0)

    @property
    def reserved(self) -> int:
        """Return the bytes that torch's allocator holds at its peak; by the closed forms, the median over jobs."""
        if self.answer is None:
            return int(gpu_memory.margin(self.setting.zero).reserved * self.by_formula)
        return self.allocated + self.unused["reserved"]

    @property
    def peak(self) -> int:
        """Return the least bytes that torch's allocator needs; they decide whether the job fits."""
        return self.allocated + self.unused["least"]

    @property
    def host_bytes_per_node(self) -> int:
        """Return the bytes of host memory that the ranks of a node need.

        They hold offloaded states or matrices that are loaded before the split, and copies of --save_in_background.
        """
        s, inputs = self.setting, formulas.offloaded_inputs(self.shape, self.setting)
        each = self.answer["host"] if self.answer else formulas.host_bytes_per_rank(self.shape, s)
        if s.tp > 1:  # each rank loads the full model before DeepSpeed splits it
            each = max(each, self.shape.frozen_bytes * self.shape.parameters)
        held = int((inputs if s.nvme else each) * s.ranks_per_node)
        copies = formulas.saved_bytes_per_node(self.shape, s) if s.background_save else 0
        return held + int(copies)

    def saved(self, kept: int | None) -> tuple[float, float]:
        """Return the bytes of (all checkpoints that exist at the same time, final/). kept: checkpoints of the run."""
        checkpoints = (kept or 1) + 1  # the new one is written before the oldest goes
        return self.checkpoint_bytes * checkpoints, self.final_bytes

    @property
    def final_bytes(self) -> int:
        """Return the bytes of final/ in 16 bits; an adapter is saved without its base."""
        return 2 * (self.shape.trainable if self.shape.frozen else self.shape.parameters)

    @property
    def checkpoint_bytes(self) -> float:
        """Return the bytes of one checkpoint."""
        if self.request.get("save_only_model"):
            return float(self.final_bytes)
        return formulas.checkpoint_bytes(self.shape.trainable, self.shape.parameters)

    @property
    def effective_batch(self) -> int:
        """Return the effective batch."""
        return self.setting.micro * self.setting.accumulation * self.setting.ranks // self.setting.ranks_per_row

    @property
    def tokens_per_second(self) -> float:
        s = self.setting
        return s.tokens * s.sp * s.accumulation * s.ranks / s.ranks_per_row / self.seconds


def change_flag(change: tuple) -> str:
    """Return an entry of SMALLER_STATES as a flag; "" for ()."""
    return f"--{change[0]} {as_typed(*change)}" if change else ""


@dataclass
class Plan:
    """The result of a search."""

    gpu: hardware.Gpu  # type of every GPU of the job
    ranks: int  # GPUs on all nodes
    limit: int  # bytes per GPU available to torch's allocator, without the margin
    allowance: dict[str, int]  # {reason: bytes} of a GPU's memory outside torch's allocator
    chosen: Candidate | None  # the fastest that fits; None: nothing fits
    rejected: list[tuple[Candidate, str]]  # (a faster candidate, why it was not chosen)
    nearest: Candidate | None = None  # the smallest, if nothing fits
    sufficient_gpus: int | None = None  # number of GPUs on which a setting fits by formula; None: not found
    longest: int | None = None  # --max_length at which a setting fits by formula; None: not found
    margin: int = 0  # bytes per GPU kept free for the error of plans, 0: the setting fits only without them
    node: int = gpu_memory.GPUS_PER_NODE  # GPUs per node
    # {LoRA, QLoRA or pipeline: (the fastest candidate that fits by formula or None, the flag or page for it)}
    alternatives: dict[str, tuple[Candidate | None, str]] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)  # searched methods in order of preference
    host_memory_limit: int | None = None  # bytes of host memory per node, None: not checked
    host_memory_source: str = "option"  # "option", "this machine" or "assumed" (by --method auto)
    disk_limit: int | None = None  # free bytes for runs/, None: unknown, on another machine
    disk_free: int | None = None  # the same, or the free bytes of this machine if unknown
    kept: int | None = None  # checkpoints that a run keeps, None: all
    advices: list = field(default_factory=list)  # advice.better.Advice: changes that would pay
    run: Any = None  # advice.cost.TrainingAmount: the amount of training and the price of a GPU
    rows: str = ""  # a sentence about the length of the rows
    notes: list[str] = field(default_factory=list)  # lines printed by the search
    seconds: float = 0.0  # duration of the plan with imports

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.node)

    @property
    def gpu_bytes(self) -> int:
        """Return the bytes per GPU that the plan uses."""
        return self.limit + self.margin + sum(self.allowance.values())

    @property
    def packs_too_much(self) -> bool:
        """Return whether nothing fits because each GPU packs the full base at load time: more GPUs do not help."""
        shape = self.nearest.shape if self.nearest else None
        return bool(shape) and shape.frozen_bytes < 2 and shape.frozen_bytes * shape.frozen > self.limit

    def share(self, candidate: Candidate) -> float:
        """Return the share of a GPU's memory that a candidate takes, with memory outside torch's allocator."""
        return (candidate.peak + sum(self.allowance.values())) / self.gpu_bytes

    def exceeds_host_memory(self, candidate: Candidate) -> bool:
        """Return whether a candidate needs more host memory than a node has."""
        return self.host_memory_limit is not None and candidate.host_bytes_per_node > self.host_memory_limit

    def exceeds_disk(self, candidate: Candidate) -> bool:
        """Return whether a candidate's checkpoints need more than the free disk space."""
        return self.disk_limit is not None and sum(candidate.saved(self.kept)) > self.disk_limit
