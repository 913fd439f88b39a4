"""PipelineTrainer: a ZerofitTrainer whose optimizer step is one schedule of DeepSpeed's pipeline engine."""

import itertools
from pathlib import Path

import torch

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.data.conversations import IGNORE
from zerofit.model import fused_loss, gradient_checkpointing
from zerofit.train.trainer import ZerofitTrainer


def load_stage(settings, tokenizer):
    """Return this rank's stage of the model (pipeline_layers.Pipeline). Collective, after recipe.start_processes."""
    from zerofit.parallel import pipeline_layers  # imports DeepSpeed, which then selects its device

    return pipeline_layers.build(settings, tokenizer)


class PipelineTrainer(ZerofitTrainer):
    """A ZerofitTrainer over stages: it collects the micro batches of a step and runs them together at the last one.

    The last stage computes the loss of a step, the mean over its supervised tokens as in the other recipes. Data order,
    checkpoints, logs and signals work as in ZerofitTrainer.
    """

    def __init__(self, settings, net, *args):
        super().__init__(settings, net, *args)
        self.numel, self.shapes = (net.numel, net.numel), net.shapes
        self.clock.flops_per_token = 6 * net.numel
        self.micro_batches = []  # collected micro batches of this step
        self.scale = 1.0  # factor for a micro batch's summed loss; 1 in evaluation
        self.sums = []  # the last stage's micro batches: losses in training, `_evaluated` in evaluation
        net.loss_fn = self.loss

    @property
    def architecture(self) -> str:
        return self.model.architecture

    def install_techniques(self, net) -> None:
        """Install all techniques except gradient checkpointing: the layers come from a model that has it."""
        for technique in resolve.techniques_of(self.settings):
            if technique not in gradient_checkpointing.TECHNIQUES:
                technique.install(self.settings, net)

    def fuse_loss(self, net) -> None:
        """Leave the model unchanged: `loss` uses the weight of the head."""

    def check_no_cross_document_attention(self) -> None:
        """Skip the check: all supported models were compared with one process, including packed rows."""

    def loss(self, hidden, labels):
        """Return the summed loss of a micro batch, on the last stage, times `scale`."""
        targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORE)[:, 1:]
        weight = self.model.head_weight()
        if self.settings.fused_loss:
            tokens = hidden.flatten(0, 1)
            total = fused_loss.linear_cross_entropy(tokens, weight, None, targets.flatten())
        else:
            logits = torch.nn.functional.linear(hidden, weight).flatten(0, 1).float()
            total = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="sum")
        if self.model.training:
            self.sums.append(total.detach() / self.tokens_of_step)
        else:
            self.sums.append(self._evaluated(hidden, targets, total))
        return total * self.scale

    @staticmethod
    def _batch(inputs: dict) -> tuple:
        """Return a micro batch for DeepSpeed's engine: (inputs of the first stage, labels for the last)."""
        ids, positions = inputs["input_ids"], inputs.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()
        return (ids, positions), inputs["labels"]

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, count / self.settings.ranks_per_row  # every stage counts the same rows

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.clock.count(inputs)
        self.micro_batches.append(self._batch(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self.micro_batches, self.sums = self.micro_batches, [], []
        self.tokens_of_step = num_items_in_batch.clamp(min=1)
        # The engine divides by micro batches and data ranks.
        self.scale = len(batches) * self.settings.data_ranks / self.tokens_of_step
        loss = self.model_wrapped.train_batch(iter(batches))
        self.guard.losses = self.sums or [torch.zeros(()) for _ in batches]  # empty before the last stage
        return loss.detach()

    def check_hooks(self) -> None:
        super().check_hooks()
        if self.has_custom_loss:
            raise UserError(
                "compute_loss: a pipeline computes the loss in its last stage and never calls the trainer's; use "
                "recipes/sft.py for a custom loss."
            )

    def _evaluation_total(self, dataloader) -> torch.Tensor:
        """Return the sums of `_evaluated` over all batches and data ranks. Collective."""
        total = torch.zeros(4, dtype=torch.float64, device=self.args.device)
        batches, self.scale = (self._batch(inputs) for inputs in dataloader), 1.0
        # All ranks have the same number of batches. Groups of batches keep the stages busy between two heartbeats.
        size = 8 * self.settings.parallel_size("layers")
        for group in self.reporter.evaluating(iter(lambda: list(itertools.islice(batches, size)), [])):
            self.sums = []
            self.model_wrapped.eval_batch(
                iter(group), reduce_output=None, bcast_loss=False, num_micro_batches=len(group)
            )
            total += sum(self.sums, torch.zeros_like(total))
        self.model.train()
        torch.distributed.all_reduce(total)
        return total

    def _evaluated(self, hidden, targets, total) -> torch.Tensor:
        """Return (summed loss, supervised tokens, exactly predicted rows on the bundled task, all rows) of a batch."""
        supervised = targets != IGNORE
        rows = right = supervised.any(-1)
        if self.settings.bundled:
            logits = torch.nn.functional.linear(hidden, self.model.head_weight())
            right = rows & ((logits.argmax(-1) == targets) | ~supervised).all(-1)
        return torch.stack([n.double() for n in (total, supervised.sum(), right.sum(), rows.sum())])

    def score(self) -> float:
        """Return the share of evaluation rows that greedy generation answers exactly. Collective."""
        total = self._evaluation_total(self.get_eval_dataloader())
        return (total[2] / total[3]).item()

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        """Save the model as a Hugging Face folder, one file per stage. Collective."""
        from zerofit.parallel import pipeline_layers

        with self.tracker.during("save"), self.reporter.heartbeat.beating(self.state.global_step):
            pipeline_layers.save(self.model, Path(output_dir or self.args.output_dir), self.processing_class)
