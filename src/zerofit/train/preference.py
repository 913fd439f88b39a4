"""PreferenceTrainer: a ZerofitTrainer on preferences (DPO and its kin, KTO), without a second model in memory."""

import contextlib
import hashlib
import time
from pathlib import Path

import torch
from accelerate.utils import send_to_device
from typing_extensions import override

from zerofit.base import distributed, paths
from zerofit.base.errors import UserError
from zerofit.data.batches import document_of_each_token
from zerofit.data.dataset import cache_folder
from zerofit.model import fused_loss, patches, preference_loss, quantization
from zerofit.model.load import model_fingerprint
from zerofit.train.trainer import ZerofitTrainer
from zerofit.train.unpaired.objective import Unpaired

NAMES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)

SUMS = ("pairs", "loss", *NAMES, "preference_accuracy")  # what _sums adds up


class Pairs:
    """What a PreferenceTrainer computes of pairs of answers; train/unpaired/objective.py: of answers with a label."""

    unit, sums, score_name = "pairs", SUMS, "preference accuracy"

    documents = 2  # of a row, whose log-probabilities are in the loss

    def __init__(self, trainer):
        self.trainer, self.settings, self.kl_of_steps = trainer, trainer.settings, []

    def items(self, inputs) -> torch.Tensor:
        """Return the number of pairs of a batch that are no filler."""
        return (_answer_tokens(inputs)[:, 0] > 0).sum()

    def losses(self, model, inputs):
        """Return (losses of the pairs, their sums for the metrics, pairs that are no filler, the model's outputs)."""
        trainer, settings, tokens = self.trainer, self.settings, _answer_tokens(inputs)
        own_inputs = {name: value for name, value in inputs.items() if name != "reference"}
        is_computed = settings.trains_adapter and not settings.precompute_ref_log_probs
        if "reference" in inputs:
            reference = inputs["reference"]
        elif settings.loss_type in preference_loss.REFERENCE_FREE or not is_computed:
            reference = torch.zeros((), device=tokens.device)  # a loss without one, or a trial, whose rows come without
        else:
            with trainer.as_reference(model):
                reference = trainer.log_probs(model, own_inputs)[0]
        own, outputs = trainer.log_probs(model, own_inputs)
        losses, rewards, scores = preference_loss.losses(settings, own, reference.to(own), tokens.clamp(min=1))
        real = tokens[:, 0] > 0
        losses = losses.where(real, 0.0)
        return losses, _sums(losses.detach(), rewards, scores, own.detach(), real), real.sum(), outputs

    def begin_step(self, batches: list[dict]) -> None:
        """Do nothing: the loss of a pair needs no other."""

    def evaluating(self, dataloader):
        """Return the context of an evaluation."""
        return contextlib.nullcontext()

    def of_evaluation(self, total: torch.Tensor) -> dict[str, float]:
        """Return the means over all pairs of loss, rewards and log-probabilities."""
        means = dict(zip(SUMS, (total / total[0]).tolist(), strict=True))
        return {name: means[name] for name in SUMS[1:]}

    def of_steps(self, total: torch.Tensor) -> dict[str, float]:
        """Return the metrics of the steps since the last line from their sums."""
        means = self.of_evaluation(total)
        return {name: means[name] for name in NAMES}

    def score(self, metrics: dict[str, float]) -> float:
        """Return the share of held-out pairs whose chosen answer the model finds more likely."""
        return metrics["eval_preference_accuracy"]

    def lengths(self, sequences) -> torch.Tensor:
        """Return the tokens of the longer side of each pair."""
        return torch.tensor(sequences["lengths"][:]).amax(1)

    def reference_of(self, model, inputs) -> torch.Tensor:
        """Return the log-probabilities of both sides of a batch's pairs, (pairs, 2)."""
        return self.trainer.log_probs(model, inputs)[0]

    def key(self, digest, sequences) -> object:
        """Return the datasets.Dataset of the pairs, whose tokens are all that the reference depends on."""
        return sequences


class PreferenceTrainer(ZerofitTrainer):
    """A ZerofitTrainer whose loss is a mean over the pairs of a step, or over its answers (`settings.unpaired`).

    The reference is the model with its adapter off, or log-probabilities computed before the first step
    (--precompute_ref_log_probs) and kept in the cache and in the run folder.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.model_accepts_loss_kwargs = True  # compute_loss scales by the pairs of the step
        self.objective = Unpaired(self) if self.settings.unpaired else Pairs(self)
        self.score_name = self.objective.score_name
        self.sums = torch.zeros(len(self.objective.sums), dtype=torch.float64, device=self.args.device)

    def log_probs(self, model, inputs):
        """Return (summed log-probabilities of the answers, (rows, documents of a row); the model's outputs)."""
        documents = document_of_each_token(inputs)
        if self.fused_loss:
            with self.without_logits(documents):
                outputs = model(**inputs)
            return outputs.loss.view(-1, self.objective.documents), outputs
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        log_probs = fused_loss.dense_log_probs(outputs.logits, inputs["labels"], *documents)
        return log_probs.view(-1, self.objective.documents), outputs

    def adapter_off(self):
        """Return a context in which the model is the one that training started from, before the first step."""
        starts_from_base = self.settings.trains_adapter and not self.settings.initial_adapter
        return self.model.disable_adapter() if starts_from_base else contextlib.nullcontext()

    @contextlib.contextmanager
    def as_reference(self, model):
        """Have forwards of `model` compute the reference of a step in the body."""
        is_sharded = self.settings.zero == 3 and model is not self.model
        with torch.no_grad(), self.adapter_off(), patches.same_trace(model) if is_sharded else contextlib.nullcontext():
            yield

    @override
    def _get_num_items_in_batch(self, batch_samples, device):
        """Return the pairs, or the answers, of a step over all ranks."""
        if not batch_samples:
            return None
        return self.over_ranks(sum(map(self.objective.items, batch_samples)).to(device))

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.objective.begin_step(batches)
        return batches, count

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        losses, sums, pairs, outputs = self.objective.losses(model, inputs)
        self.sums += sums.where(sums.isfinite().all(), 0.0)
        count = pairs.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = losses.sum() / count
        if self.router_loss:
            loss = loss + self.router_loss.share(outputs, pairs, count)
        loss = loss * (1 if num_items_in_batch is None else self.counted_ranks)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, dataloader, *args, **kwargs):
        with self.objective.evaluating(dataloader):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def evaluation_sums(self, model, inputs) -> torch.Tensor:
        sums = self.objective.losses(model, inputs)[1]
        if self.own_loss:
            logged, rows = self.sums, sums[0]
            self.sums = torch.zeros_like(logged)  # of training steps, to which compute_loss adds
            sums[self.objective.sums.index("loss")] = rows * self.own_mean(model, inputs, rows)
            self.sums = logged
        return sums

    def evaluation_metrics(self, total: torch.Tensor) -> dict[str, float]:
        """Return the metrics of an evaluation from its sums."""
        return self.objective.of_evaluation(total)

    def score(self) -> float:
        """Return how many of the held-out rows the model has learned to tell apart, as a share. Collective."""
        latest = next((line for line in reversed(self.state.log_history) if "eval_loss" in line), {"step": -1})
        metrics = latest if latest["step"] == self.state.global_step else self.evaluate()
        return self.objective.score(metrics)

    def unlogged(self) -> dict:
        total = self.sums.clone()
        if self.args.world_size > 1:
            torch.distributed.all_reduce(total)
        return super().unlogged() | {"sums": total.tolist(), "kl": [kl.item() for kl in self.objective.kl_of_steps]}

    def take_unlogged(self, kept: dict) -> None:
        super().take_unlogged(kept)
        if not kept.get("steps"):
            return
        if self.args.process_index == 0:  # `log` adds up those of all ranks
            self.sums += torch.tensor(kept["sums"], dtype=self.sums.dtype, device=self.sums.device)
        self.objective.kl_of_steps = [torch.tensor(kl, device=self.sums.device) for kl in kept["kl"]]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            total, self.sums = self.sums, torch.zeros_like(self.sums)
            if self.args.world_size > 1:
                torch.distributed.all_reduce(total)
            logs.update(self.objective.of_steps(total))
        super().log(logs, start_time)

    # --- reference log-probabilities before the first step ---

    def before_first_step(self) -> None:
        if not self.settings.precompute_ref_log_probs:
            return
        model_key = _model_key(self.settings) if self.args.process_index == 0 else ""
        for name, dataset in (("training", self.train_dataset), ("evaluation", self.eval_dataset)):
            if dataset is not None:
                dataset.reference = self._kept_reference(name, dataset, model_key)

    def _kept_reference(self, name: str, dataset, model_key: str) -> torch.Tensor:
        """Return the reference log-probabilities of a set's pairs, (pairs, 2), computed only if no file holds them.

        Args: model_key: on rank 0, which reads and writes the files.
        Raises: UserError when a resumed run finds none: its weights are no longer the reference's.
        """
        resumed, first, files = self.settings.resume_from_checkpoint, self.args.process_index == 0, []
        if first:
            name_of_file = f"reference-{model_key}-{_rows_key(self.objective, dataset.sequences)}.safetensors"
            runs = [Path(self.args.output_dir), *([Path(resumed).parent] if resumed else [])]
            files = [*(run / "reference" / name_of_file for run in runs), cache_folder() / name_of_file]
        log_probs, missing = distributed.broadcast((_read(*files), str(files[-2])) if first else None)
        if log_probs is None and resumed:
            raise UserError(
                f"--resume_from_checkpoint {resumed}: {missing} is missing, and the reference cannot be computed from "
                "trained weights; restore the file, or begin a new run."
            )
        if log_probs is None:
            log_probs = self._compute_reference(name, dataset)
        for file in files:
            _write(file, log_probs)
        return log_probs

    def _compute_reference(self, name: str, dataset) -> torch.Tensor:
        """Compute the log-probabilities of all pairs under the untrained model. Collective: the ranks share them."""
        args, pairs, unit = self.args, dataset.sequences, self.objective.unit
        model = self.model_wrapped if self.is_deepspeed_enabled else self.model
        log_probs = torch.zeros(len(pairs), 2, dtype=torch.float32, device=args.device)
        # Longest first: sides of like lengths need little padding, and a step with as many needs more memory than this.
        order = self.objective.lengths(pairs).argsort(descending=True, stable=True).tolist()
        size = args.per_device_train_batch_size
        batches = [order[i : i + size] for i in range(0, len(pairs), size)]
        began = last_line = time.monotonic()
        model.eval()
        with torch.no_grad(), self.adapter_off():
            for i in range(0, len(batches), args.world_size):
                self.reporter.heartbeat.beat(self.state.global_step)
                # A rank without pairs left computes the first ones again, to take part in ZeRO-3's gathers.
                own = i + args.process_index < len(batches)
                rows = batches[i + args.process_index] if own else batches[0]
                inputs = send_to_device(self.train_collator([pairs[j] for j in rows]), args.device)
                with self.compute_loss_context_manager():
                    values = self.objective.reference_of(model, inputs)
                if own:
                    log_probs[rows] = values.float()
                if args.process_index == 0 and time.monotonic() - last_line > 60:
                    last_line = time.monotonic()
                    print(f"reference log-probabilities: {i * size:,} of {len(pairs):,} {name} {unit}", flush=True)
        model.train()
        if args.world_size > 1:
            torch.distributed.all_reduce(log_probs)
        if args.process_index == 0:
            seconds = time.monotonic() - began
            print(f"reference log-probabilities of {len(pairs):,} {name} {unit}: {seconds:.1f} s", flush=True)
        return log_probs.cpu()


def _model_key(settings) -> str:
    """Return a hash of the model, its weights and their precision."""
    import xxhash

    parts = [model_fingerprint(settings), settings.precision, quantization.bits(settings)]
    if settings.random_init or settings.new_tokens:
        parts += [settings.seed, settings.new_tokens]
    digest = xxhash.xxh3_64(str(parts).encode())
    # The fingerprint has only the files' ends, which two models that were tuned from one base may share.
    folders = filter(None, (settings.model, settings.values.get("initial_adapter")))
    for path in (path for folder in folders for path in sorted(Path(folder).expanduser().glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()


def _rows_key(objective, sequences) -> str:
    """Return a hash of the rows' tokens, which hold template and cut, and of how the objective pairs them."""
    import xxhash

    digest = xxhash.xxh3_64()
    rows = objective.key(digest, sequences)
    for table in rows.with_format("arrow").iter(batch_size=1000):
        for column in sorted({"input_ids", "labels", "lengths"} & set(table.column_names)):
            digest.update(table[column].combine_chunks().flatten().to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def _answer_tokens(inputs) -> torch.Tensor:
    """Return the supervised tokens of the chosen and rejected side of each pair, (pairs, 2); 0 for fillers."""
    documents, count = document_of_each_token(inputs)
    labeled = torch.nn.functional.pad(inputs["labels"][..., 1:], (0, 1), value=fused_loss.IGNORED) != fused_loss.IGNORED
    zeros = torch.zeros(count, dtype=torch.long, device=labeled.device)
    return zeros.index_add(0, documents, labeled.flatten().long()).view(-1, 2)


def _sums(losses, rewards, scores, own, real) -> torch.Tensor:
    """Return SUMS over the pairs of a batch; fillers do not count."""
    chosen, rejected = rewards.unbind(1)
    values = [torch.ones_like(losses), losses, chosen, rejected, chosen - rejected, chosen > rejected,
              *own.unbind(1), scores[:, 0] > scores[:, 1]]  # fmt: skip
    return torch.stack([v.double() for v in values], 1).where(real[:, None], 0.0).sum(0)


def _read(*files: Path) -> torch.Tensor | None:
    """Return the tensor of the first file that exists and can be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for file in files:
        with contextlib.suppress(OSError, SafetensorError, KeyError):
            return load_file(file)["log_probs"]
    return None


def _write(file: Path, values: torch.Tensor) -> None:
    """Write the file atomically, if it is not there."""
    from safetensors.torch import save

    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with paths.replacing(file) as stream:
            stream.write(save({"log_probs": values}))
