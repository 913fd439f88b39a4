"""Define Objective: what a training row is, how it is read, and what is trained on it."""

import contextlib
from typing import Any

from zerofit.data.reading import Examples, Form


class Objective:
    """An objective of training, one file each. A recipe names those it has: `Recipe(objectives=("module:Class",))`.

    The class describes the rows to the data, the plan and the certificate. An instance computes the losses and metrics
    of one trainer; it is made when the trainer is complete.
    """

    name = ""  # the word for it in run.json

    loss_types: tuple[str, ...] = ()  # values of --loss_type that select it; (): all

    # --- rows ---

    format = ""  # the format of every row; "": detected for each source

    documents = 1  # sequences of a row, which the model reads separately

    unit = "rows"  # the word for examples in sentences

    own_columns: frozenset[str] = frozenset()  # columns of the data that `parse` reads beside those of the formats

    columns: tuple[str, ...] = ()  # columns of a tokenized row beside input_ids and labels

    counts: tuple[str, ...] = ()  # counts of data.reading.ReadingReport that only such rows have

    @staticmethod
    def parse(place: str, row: dict[str, Any], form: Form, settings) -> Examples:
        """Parse a row, whose columns have been renamed by --columns, into examples.

        Raises: UserError naming the place, for a row that cannot be used.
        """
        raise NotImplementedError

    @staticmethod
    def count(rows) -> dict[str, int]:
        """Return the `counts` of a part of a set, a datasets.Dataset, as far as they can be counted there."""
        return {}

    @staticmethod
    def check_rows(settings, rows) -> list[str]:
        """Return sentences about the training set, a TokenizedDataset. Raises: UserError if it cannot be trained on."""
        return []

    # --- the plan ---

    @staticmethod
    def extra_forwards(settings) -> int:
        """Return how often a step runs the model on a row without a backward."""
        return 0

    # --- the model ---

    @staticmethod
    def prepare_model(model):
        """Return the loaded model, before an adapter is added, as the losses need it."""
        return model

    # --- the certificate ---

    not_recomputed = ""  # why the certificate does not compute the loss a second time; "": it does

    # --- training ---

    metrics: tuple[str, ...] = ("loss",)  # metrics of an evaluation, lower is better, for --metric_for_best_model

    score_name = ""  # of `score`, in sentences

    score_metric = ""  # the metric of an evaluation that `score` returns

    def __init__(self, trainer):
        """Args: trainer: the ZerofitTrainer, complete but for its objective."""
        self.trainer, self.settings = trainer, trainer.settings

    def items(self, batches: list[dict], device):
        """Return what the losses of an optimizer step are divided by, on all ranks; None: as transformers counts.

        Collective.
        """
        return

    def begin_step(self, batches: list[dict]) -> None:
        """Prepare an optimizer step. Args: batches: this rank's micro batches. Collective."""

    def loss(self, model, inputs: dict, items) -> tuple:
        """Return (loss of a micro batch, the model's outputs).

        Args: items: of the whole step; None: the loss is a mean over the micro batch.
        """
        raise NotImplementedError

    def evaluating(self, dataloader):
        """Return the context of an evaluation."""
        return contextlib.nullcontext()

    def evaluation_sums(self, model, inputs: dict):
        """Return what a batch adds to the sums of an evaluation, a float64 tensor."""
        raise NotImplementedError

    def evaluation_metrics(self, total) -> dict[str, float]:
        """Return the metrics of an evaluation from the sums over all batches and ranks."""
        raise NotImplementedError

    def score(self) -> float:
        """Return how well the model does on the held-out rows of the bundled task, as a share. Collective."""
        state = self.trainer.state
        latest = next((line for line in reversed(state.log_history) if "eval_loss" in line), {"step": -1})
        metrics = latest if latest["step"] == state.global_step else self.trainer.evaluate()
        return metrics[f"eval_{self.score_metric}"]

    # --- logs and checkpoints ---

    def step_metrics(self) -> dict[str, float]:
        """Return the metrics of the steps since the last line, and begin the next one. Collective."""
        return {}

    def unlogged(self) -> dict:
        """Return what `step_metrics` holds so far, for a checkpoint. Collective."""
        return {}

    def take_unlogged(self, kept: dict) -> None:
        """Continue with what a checkpoint holds of `unlogged`."""

    def before_first_step(self) -> None:
        """Prepare what the first step needs, with the engine built. Collective."""
