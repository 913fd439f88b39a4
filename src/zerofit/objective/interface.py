"""Define Objective: the format of training rows, the loss and the metrics."""

import contextlib
from typing import Any

from zerofit.data.reading import Examples, RowFormat


class Objective:
    """A training objective, one per file. Recipes list theirs: `Recipe(objectives=("module:Class",))`.

    The class describes the rows for the data, the plan and the certificate. An instance computes the losses and metrics
    of one trainer; it is created at the end of the trainer's set-up.
    """

    name = ""  # name in run.json

    loss_types: tuple[str, ...] = ()  # values of --loss_type that select it; () for all

    # --- rows ---

    format = ""  # format of all rows; "" to detect it for each source

    documents = 1  # separate sequences per row

    unit = "rows"  # word for examples in messages

    own_columns: frozenset[str] = frozenset()  # columns that `parse` reads in addition to the formats' columns

    columns: tuple[str, ...] = ()  # columns of a tokenized row besides input_ids and labels

    counts: tuple[str, ...] = ()  # counts of data.reading.ReadingReport for such rows only

    @staticmethod
    def parse(place: str, row: dict[str, Any], form: RowFormat, settings) -> Examples:
        """Parse a row, with columns renamed by --columns, into examples.

        Raises: UserError with the place for a malformed row.
        """
        raise NotImplementedError

    @staticmethod
    def count(rows) -> dict[str, int]:
        """Return the `counts` that can be computed from a part of a set, a datasets.Dataset."""
        return {}

    @staticmethod
    def check_rows(settings, rows) -> list[str]:
        """Return sentences about the training set, a TokenizedDataset. Raises: UserError if it cannot be trained on."""
        return []

    # --- the plan ---

    @staticmethod
    def extra_forwards(settings) -> int:
        """Return the number of forwards per row and step without a backward."""
        return 0

    # --- the model ---

    @staticmethod
    def prepare_model(model):
        """Return the loaded model, prepared for the losses, before an adapter is added."""
        return model

    # --- the certificate ---

    not_recomputed = ""  # why the certificate does not recompute the loss; "" if it does

    # --- training ---

    metrics: tuple[str, ...] = ("loss",)  # evaluation metrics for --metric_for_best_model; lower is better

    score_name = ""  # name of `score` in messages

    score_metric = ""  # evaluation metric that `score` returns

    def __init__(self, trainer):
        """Args: trainer: the ZerofitTrainer, complete except for its objective."""
        self.trainer, self.settings = trainer, trainer.settings

    def items(self, batches: list[dict], device):
        """Return the divisor of the losses of a step, over all ranks; None to use transformers' count. Collective."""
        return

    def begin_step(self, batches: list[dict]) -> None:
        """Prepare an optimizer step. Args: batches: this rank's micro batches. Collective."""

    def loss(self, model, inputs: dict, items) -> tuple:
        """Return (loss of a micro batch, the model's outputs).

        Args: items: number for the complete step; None: the loss is a mean over the micro batch.
        """
        raise NotImplementedError

    def evaluating(self, dataloader):
        """Return the context of an evaluation."""
        return contextlib.nullcontext()

    def evaluation_sums(self, model, inputs: dict):
        """Return the batch's contribution to the sums of an evaluation, a float64 tensor."""
        raise NotImplementedError

    def evaluation_metrics(self, total) -> dict[str, float]:
        """Return the metrics of an evaluation from the sums over all batches and ranks."""
        raise NotImplementedError

    def score(self) -> float:
        """Return the score on the held-out rows of the bundled task, from 0 to 1. Collective."""
        state = self.trainer.state
        latest = next((line for line in reversed(state.log_history) if "eval_loss" in line), {"step": -1})
        metrics = latest if latest["step"] == state.global_step else self.trainer.evaluate()
        return metrics[f"eval_{self.score_metric}"]

    # --- logs and checkpoints ---

    def step_metrics(self) -> dict[str, float]:
        """Return the metrics of the steps since the last log line, and reset them. Collective."""
        return {}

    def pending_log_state(self) -> dict:
        """Return the metrics since the last log line, for a checkpoint. Collective."""
        return {}

    def restore_log_state(self, state: dict) -> None:
        """Restore the `pending_log_state` of a checkpoint."""

    def before_first_step(self) -> None:
        """Prepare the first step, after the engine is built. Collective."""
