"""Fill the certificate while a run trains."""

import contextlib
import sys
import time

from transformers import TrainerCallback

from zerofit.base import distributed
from zerofit.base.errors import UserError, first_line
from zerofit.certificate import first_step, page, rendering, rows
from zerofit.job.settings import Check


class Recorder(TrainerCallback):
    """Run the checks before the first step, and collect the later ones.

    A check that fails before the first step ends the run.
    """

    def __init__(self, trainer):
        self.trainer, self.first_step, self.printed = trainer, 0, []
        self.seconds = 0.0  # time spent on the checks
        self.count_compared = False  # whether compare_count has run

    def on_train_begin(self, args, state, control, **kwargs):
        trainer, settings = self.trainer, self.trainer.settings
        self.first_step = state.global_step
        if settings.certificate:
            with self.timed():
                settings.checks.append(first_step.check(trainer))
                if args.process_index == 0:
                    settings.checks.append(self.rendering())
        else:
            settings.checks.append(Check("loss", None, "loss: not recomputed (--certificate false)"))
            settings.checks.append(Check("rendering", None, "rendering: not compared (--certificate false)"))
        self.publish("before the first step")
        failed = [check.sentence for check in page.ordered(settings.checks) if check.holds is False]
        if failed := distributed.broadcast(failed):  # rank 0 has all lines
            raise UserError(
                f"the certificate of this run fails before the first step: {failed[0]}; nothing was trained; see "
                f"{settings.output_dir}/certificate.md."
            )

    def rendering(self) -> Check:
        """Return the check of the rendering; an error in a data source or a template is not a failed check."""
        try:
            return rendering.check(self.trainer)
        except Exception as error:
            return Check("rendering", None, f"rendering: not compared: {type(error).__name__}: {first_line(error)}")

    @contextlib.contextmanager
    def timed(self):
        """Add the time of the body to the time spent on the checks."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def compare_count(self, counted) -> None:
        """Compare the divisor of the first step's loss with the supervised tokens in its data.

        Raises: RuntimeError if they differ, before anything is trained.
        """
        line = next((check for check in self.trainer.settings.checks if check.name == "loss" and check.holds), None)
        countable = first_step.counts_full_step(self.trainer) and rows.are_countable(self.trainer, self.first_step)
        if line is None or self.count_compared or not countable:
            return
        self.count_compared = True
        supervised = line.numbers["supervised_in_step"]
        if int(counted) != supervised:
            raise RuntimeError(
                f"the first step counts {int(counted):,} supervised tokens, but its rows have {supervised:,}: the loss "
                "would be scaled wrongly. This is a bug in zerofit or of a library version; nothing was trained."
            )

    def publish(self, status: str) -> None:
        """Write the page and print the new lines, on rank 0."""
        settings = self.trainer.settings
        if self.trainer.args.process_index == 0:
            page.write(settings, status, self.seconds)
            new = [check.name for check in settings.checks if check not in self.printed]
            page.show(settings, new, sys.stdout.isatty())
            self.printed = list(settings.checks)  # a copy: lines may be replaced, so a count is not enough

    def on_train_end(self, args, state, control, **kwargs):
        settings = self.trainer.settings
        settings.checks.append(rows.check(self.trainer, self.first_step))
