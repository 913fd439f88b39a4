"""Skip steps with a non-finite loss or gradient, save them for replay, and end a run without a gradient."""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from zerofit.base import command_line, distributed
from zerofit.base.errors import Diverged, UserError
from zerofit.job import program, run_folder
from zerofit.job.settings import Check
from zerofit.model import patches
from zerofit.train import trial

MAX_KEPT_STEPS = 10  # bad steps whose batches are kept in a run folder

MAX_OVERFLOWS = 40  # consecutive skipped steps after which fp16's loss scaler (2^16, halved each time) cannot recover

STEPS_WITHOUT_GRADIENT = 3  # first steps without a gradient after which a run ends

MIN_LOSS = 1e-4  # loss of a step below which a gradient of 0 may be right: rows without labels, a hinge, a perfect fit


class GradientCount:
    """Count the steps with a gradient of exactly zero, and end a run if the gradient of every step is zero.

    LoRA's matrix A has a zero gradient in the first step, but B does not: a zero over all parameters is an error.
    """

    def __init__(self):
        self.steps = self.zero = 0  # zero: a device tensor if the norm is one; no sync per step
        self.loss = 0.0  # sum over the first steps

    def count(self, norm, losses: list[torch.Tensor]) -> None:
        """Count an applied step. norm: None if the engine does not compute it."""
        if norm is None:
            return
        self.steps += 1
        self.zero = self.zero + (norm == 0)
        if self.steps <= STEPS_WITHOUT_GRADIENT:
            self.loss = sum((loss.detach().float().abs() for loss in losses), self.loss)

    def check(self, model) -> None:
        """Raise UserError if all steps so far had a loss but no gradient. Collective."""
        if self.steps == 0 or int(self.zero) < self.steps:
            return
        if max(distributed.all_gather(float(self.loss))) < MIN_LOSS * self.steps:  # a rank's rows may lack labels
            return
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        raise UserError(
            f"the gradient was exactly zero in each of the first {self.steps} steps despite a loss, so nothing trains: "
            f"the loss does not depend on the {len(trained)} trainable tensors ({', '.join(trained[:2])} ...). "
            "Possible causes: a scale of 0 (alpha_pattern of --adapter_config), a dropout of 1, a custom recipe that "
            "freezes or detaches the trained weights."
        )

    def line(self) -> Check:
        """Return the line for the certificate."""
        zero = int(self.zero)
        numbers = {"steps": self.steps, "steps_with_zero_gradient": zero}
        if not self.steps:
            return Check("gradient", None, "gradient: the norm was not measured in any step", numbers)
        sentence = f"gradient: not zero in {self.steps - zero} of {self.steps} steps"
        return Check("gradient", zero < self.steps, sentence, numbers)


class NanGuard:
    """Skip, report and save the optimizer steps of a trainer with a non-finite loss or gradient.

    DeepSpeed's engine silently skips updates with a non-finite gradient (stages 1 to 3). `hold_back` does the same at
    stage 0, and `watch_engine` for an engine at stage 0 in fp32 (of a JSON). Steps with finite losses that fp16's loss
    scaler skips are normal and not counted as bad.
    """

    def __init__(self, trainer):
        self.trainer, self.settings = trainer, trainer.settings
        self.gradients = GradientCount()
        self.bad_steps = self.in_a_row = self.overflows = 0
        self.by_rows = False  # whether a loss of the last bad step was not finite
        self.steps_logged = self.bad_steps_logged = 0  # since the last log line
        self.batches, self.numbers, self.losses, self.grad_norm = [], None, [], 0.0
        self.was_bad = None  # stage 0, during its optimizer step: () -> whether the gradient was not finite

    def begin(self, batches: list[dict], numbers: list[list[int]] | None) -> None:
        """Record the micro batches of the next step, without a synchronization with the device.

        Args: numbers: row numbers of each micro batch; None if unknown.
        """
        self.batches, self.numbers, self.losses = batches, numbers, []
        self.loss_before = self.trainer._tr_loss.clone()

    def watch_engine(self) -> None:
        """Let DeepSpeed's engine detect skipped steps of a plain optimizer, as it does for its own optimizers."""
        optimizer = self.trainer.optimizer.optimizer
        if hasattr(optimizer, "overflow"):
            return

        def drop_bad_gradients(optimizer, *_) -> None:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            bad = (~torch.nn.utils.get_total_norm(gradients, math.inf).isfinite()).float()
            torch.distributed.all_reduce(
                bad, torch.distributed.ReduceOp.MAX
            )  # stages of a pipeline have different gradients
            optimizer.overflow = bool(bad)
            for parameter in parameters if optimizer.overflow else []:
                parameter.grad = None

        optimizer.overflow = False
        optimizer.register_step_pre_hook(drop_bad_gradients)
        patches.write(self.trainer.optimizer, "__has_overflow__", True)

    def hold_back(self) -> None:
        """Keep torch's optimizer at stage 0 from changing weights or states with non-finite gradients.

        A fused Adam reads `found_inf` on the device (as with torch's GradScaler): its kernels are queued before the
        host reads the flag in `look_back`. For other optimizers, the host waits for the norm and drops the gradients.
        """
        trainer = self.trainer
        if trainer.is_deepspeed_enabled or trainer.accelerator.scaler is not None:
            return
        optimizer = trainer.optimizer.optimizer
        if is_fused_adam(optimizer) and isinstance(self.grad_norm, torch.Tensor):
            optimizer.found_inf = (~self.grad_norm.isfinite()).float()
            self.was_bad = _copy_to_host(optimizer.found_inf)
            return
        bad = not math.isfinite(self.grad_norm)
        self.was_bad = lambda: bad
        if bad:
            for parameter in trainer.model.parameters():
                parameter.grad = None

    def look_back(self) -> None:
        """Set accelerate's skipped-step flag after optimizer.step(), so that the scheduler does not step."""
        if self.was_bad is None:
            return
        patches.write(self.trainer.optimizer, "_is_overflow", self.was_bad())
        self.was_bad = None
        vars(self.trainer.optimizer.optimizer).pop("found_inf", None)

    def after_step(self) -> None:
        """Count, report and save a skipped step. All ranks reach the same decision.

        Raises: Diverged after --max_nan_steps bad steps in a row (--on_nan stop), or after MAX_OVERFLOWS skipped ones;
            UserError if the gradient of the first steps is zero.
        """
        self.steps_logged += 1
        if not self.trainer.accelerator.optimizer_step_was_skipped:
            self.in_a_row = self.overflows = 0
            self.gradients.count(self.grad_norm, self.losses)
            if self.gradients.steps == STEPS_WITHOUT_GRADIENT:
                self.gradients.check(self.trainer.model)
            return
        losses = distributed.all_gather([loss.item() for loss in self.losses])  # [rank][micro batch]
        if self.grad_norm is None:  # an engine at stage 0 does not measure it
            self.grad_norm = math.nan
        if self.settings.precision == "fp16" and all(math.isfinite(loss) for rank in losses for loss in rank):
            self.overflows += 1
            if self.overflows >= MAX_OVERFLOWS:
                raise Diverged(
                    f"step {self.trainer.state.global_step}: fp16 gradients overflowed in {MAX_OVERFLOWS} steps in "
                    "a row, which were all skipped; use --bf16 true, or lower --learning_rate."
                )
            return
        self.bad_steps += 1
        self.bad_steps_logged += 1
        self.in_a_row += 1
        self.by_rows = any(not math.isfinite(loss) for rank in losses for loss in rank)
        self.trainer._tr_loss.copy_(self.loss_before)  # keeps the logged mean finite
        stop = self.settings.on_nan == "stop" and self.in_a_row >= self.settings.max_nan_steps
        self._report(losses, stop)

    def at_end(self) -> None:
        """If the run ends on non-finite steps, determine whether the data or the weights caused them.

        Raises: Diverged if the loss of four rows is never finite, or if only the gradient was bad; UserError if the
            gradient of every step was zero.
        """
        self.gradients.check(self.trainer.model)
        self.settings.checks.append(self.gradients.line())
        if not self.in_a_row or (self.by_rows and self._some_row_is_finite()):
            return
        reason = "the loss of the weights is not finite on any row" if self.by_rows else "all of its losses were finite"
        raise Diverged(
            f"step {self.trainer.state.global_step}: the run ends on a step with a non-finite gradient, and {reason}: "
            "the weights are unusable. Lower --learning_rate, or start from an earlier checkpoint."
        )

    def _some_row_is_finite(self) -> bool:
        trainer = self.trainer
        losses = (
            trainer.evaluation_loop([trainer.data_collator([row])], "usable") for row in trial.longest_rows(trainer, 4)
        )
        return any(math.isfinite(loop.metrics["eval_loss"]) for loop in losses)

    def mean(self, logged: float) -> float:
        """Correct the logged mean loss: transformers divides the sum by all steps, including skipped ones."""
        steps, skipped = self.steps_logged, self.bad_steps_logged
        self.steps_logged = self.bad_steps_logged = 0
        if not skipped:
            return logged
        return logged * steps / (steps - skipped) if steps > skipped else math.nan

    def _rows_of_all_ranks(self) -> list[list[list[int]]] | None:
        """Return the rows of this step by [rank][micro batch]; None if unknown on a rank. Collective."""
        sequences = None if self.numbers is None else self.trainer.train_dataset.sequences
        rows = self.numbers and [[row for i in batch for row in _documents(sequences, i)] for batch in self.numbers]
        rows_by_rank = distributed.all_gather(rows)
        return None if None in rows_by_rank else rows_by_rank

    def _report(self, losses: list[list[float]], stop: bool) -> None:
        trainer, settings = self.trainer, self.settings
        step = trainer.state.global_step
        bad_batches = [
            (r, m) for r, rank in enumerate(losses) for m, loss in enumerate(rank) if not math.isfinite(loss)
        ]
        rows = self._rows_of_all_ranks()
        places = ", ".join(
            f"rank {r} micro batch {m}" + (f" (rows {', '.join(map(str, rows[r][m]))})" if rows else "")
            for r, m in bad_batches[:4]
        )
        places += f" and {len(bad_batches) - 4} more" if len(bad_batches) > 4 else ""
        gradient_issue = f"the gradient is {float(self.grad_norm)}, all losses are finite"
        issue = f"the loss is not finite on {places}" if bad_batches else gradient_issue
        folder = Path(trainer.args.output_dir) / "nan" / f"step-{step}"
        is_kept = self.bad_steps <= MAX_KEPT_STEPS or stop
        if is_kept:
            self._keep(folder, losses, rows, bad_batches)
        if stop:
            trainer.save_model(str(folder / "model"))
            (folder / "model" / "training_args.bin").unlink(missing_ok=True)
        hint = f"; `zerofit replay {folder}` analyzes it" if is_kept else ""
        if stop:
            raise Diverged(
                f"step {step}: {issue}; {self.in_a_row} steps in a row (--max_nan_steps) were skipped{hint}. Lower "
                "--learning_rate, inspect these rows, or use --bf16 instead of --fp16."
            )
        if trainer.args.process_index == 0:
            limit = f" of {settings.max_nan_steps}" if settings.on_nan == "stop" else ""
            print(
                f"note: step {step}: {issue}; the step is skipped ({self.in_a_row}{limit} in a row){hint}",
                flush=True,
            )

    def _keep(self, folder: Path, losses: list, rows: list | None, bad: list) -> None:
        """Write rank<r>.safetensors with this rank's micro batches; rank 0 also writes step.json."""
        trainer, settings = self.trainer, self.settings
        rank = trainer.args.process_index
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{i}.{name}": torch.as_tensor(value).cpu().contiguous()
            for i, batch in enumerate(self.batches)
            for name, value in batch.items()
        }
        save_file(tensors, folder / f"rank{rank}.safetensors")
        if rank:
            return
        flags = command_line.without_secrets(settings.request.all_flags())
        dataset, decode = trainer.tokens.all_rows, trainer.processing_class.decode
        shown = sorted({i for r, m in bad for i in rows[r][m]})[:20] if rows else []
        facts = {
            "step": trainer.state.global_step, "recipe": settings.recipe.name, "world_size": trainer.args.world_size,
            "flags": command_line.drop(flags, "--output_dir", "--resume_from_checkpoint"),
            "program": (running := program.current()) and running.facts,
            "losses": losses, "grad_norm": float(self.grad_norm), "rows": rows, "precision": settings.precision,
            "texts": {i: decode(dataset[i]["input_ids"])[:200] for i in shown},
        }  # fmt: skip
        run_folder.write_json(folder / "step.json", facts)


def is_fused_adam(optimizer) -> bool:
    """Return whether torch's optimizer leaves weights and states unchanged if its `found_inf` is 1."""
    kinds = (torch.optim.Adam, torch.optim.AdamW)
    return type(optimizer) in kinds and all(group["fused"] for group in optimizer.param_groups)


def _copy_to_host(flag: torch.Tensor):
    """Start to copy a flag to the host; return a function that waits for this copy only and returns the flag."""
    if flag.device.type != "cuda":
        return lambda: bool(flag)
    host = torch.empty((), dtype=flag.dtype, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> bool:
        copied.synchronize()
        return bool(host)

    return read


def _documents(sequences, index: int) -> list[int]:
    """Return the rows of a pack, else the row itself; [] for the filler at the end."""
    if index == len(sequences):
        return []
    return list(sequences.packs[index]) if hasattr(sequences, "packs") else [index]


def read(folder: Path) -> dict:
    """Read step.json of a saved step. Raises: ValueError if it is missing or damaged."""
    facts = run_folder.read_record(folder / "step.json")
    if missing := [name for name in ("recipe", "flags", "world_size") if name not in facts]:
        raise ValueError(f"step.json lacks {missing[0]}")
    return {"rows": None, "texts": {}} | facts
