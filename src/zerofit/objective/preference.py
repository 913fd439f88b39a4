"""Preference: base class of Pairs and Labeled, with losses, metrics and a reference without a second model."""

import contextlib
import hashlib
import time
from pathlib import Path

import torch
from accelerate.utils import send_to_device

from zerofit.base import distributed, paths
from zerofit.base.errors import UserError
from zerofit.data.batches import document_of_each_token
from zerofit.data.dataset import cache_folder
from zerofit.model import fused_loss, patches, quantization
from zerofit.model.load import model_fingerprint
from zerofit.objective import preference_losses
from zerofit.objective.interface import Objective


class Preference(Objective):
    """The mean loss of the pairs or answers of a step, from the log-probabilities of complete answers.

    The reference is the model with its adapter off, or log-probabilities computed before the first step
    (--precompute_ref_log_probs) and kept in the cache and in the run folder.
    """

    not_recomputed = "the loss is a preference loss"

    prepare_model = staticmethod(preference_losses.disable_dropout)

    @staticmethod
    def extra_forwards(settings):
        computes = settings.trains_adapter and not settings.precompute_ref_log_probs
        return int(computes and settings.loss_type not in preference_losses.REFERENCE_FREE)

    sums: tuple[str, ...] = ()  # names of the sums of `losses`; the first is the number of examples

    def __init__(self, trainer):
        super().__init__(trainer)
        trainer.model_accepts_loss_kwargs = True  # `loss` divides by the number of examples
        self.total = torch.zeros(
            len(self.sums), dtype=torch.float64, device=trainer.args.device
        )  # sums since the last log line

    def examples(self, inputs) -> torch.Tensor:
        """Return the number of examples of a batch without fillers."""
        raise NotImplementedError

    def losses(self, model, inputs) -> tuple:
        """Return (losses of the examples, their `sums`, number of examples without fillers, the model's outputs)."""
        raise NotImplementedError

    def means(self, total: torch.Tensor) -> dict[str, float]:
        """Return the metrics from `sums` over any examples."""
        raise NotImplementedError

    def lengths(self, sequences) -> torch.Tensor:
        """Return the number of tokens of the longest document of each row."""
        raise NotImplementedError

    def reference_of(self, model, inputs) -> torch.Tensor:
        """Return the reference's log-probabilities of the two documents of each row, (rows, 2)."""
        raise NotImplementedError

    def rows_of_key(self, digest, sequences):
        """Return the datasets.Dataset that the reference depends on, and hash its other inputs."""
        return sequences

    def items(self, batches, device):
        return self.trainer.over_ranks(sum(map(self.examples, batches)).to(device)) if batches else None

    def loss(self, model, inputs, items):
        trainer = self.trainer
        losses, sums, examples, outputs = self.losses(model, inputs)
        self.total += sums.where(sums.isfinite().all(), 0.0)
        count = examples.clamp(min=1) if items is None else items
        loss = losses.sum() / count
        if trainer.router_loss:
            loss = loss + trainer.router_loss.share(outputs, examples, count)
        return loss * (1 if items is None else trainer.loss_world_size), outputs

    def log_probs(self, model, inputs):
        """Return (summed log-probabilities of the answers, (rows, documents per row); the model's outputs)."""
        documents = document_of_each_token(inputs)
        if self.trainer.fused_loss:
            with self.trainer.without_logits(documents):
                outputs = model(**inputs)
            return outputs.loss.view(-1, self.documents), outputs
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        log_probs = fused_loss.dense_log_probs(outputs.logits, inputs["labels"], *documents)
        return log_probs.view(-1, self.documents), outputs

    # --- metrics ---

    def evaluation_sums(self, model, inputs):
        sums = self.losses(model, inputs)[1]
        if self.trainer.has_custom_loss:
            step_total, examples = self.total, sums[0]
            self.total = torch.zeros_like(step_total)  # `loss` adds to it
            sums[self.sums.index("loss")] = examples * self.trainer.custom_loss_mean(model, inputs, examples)
            self.total = step_total
        return sums

    def evaluation_metrics(self, total):
        return self.means(total)

    def step_metrics(self):
        total, self.total = self._total_of_ranks(), torch.zeros_like(self.total)
        return self.means(total)

    def _total_of_ranks(self) -> torch.Tensor:
        """Return the sums since the last log line over all ranks. Collective."""
        total = self.total.clone()
        if self.trainer.args.world_size > 1:
            torch.distributed.all_reduce(total)
        return total

    def pending_log_state(self):
        return {"sums": self._total_of_ranks().tolist()}

    def restore_log_state(self, state):
        if self.trainer.args.process_index == 0:  # `step_metrics` sums over all ranks
            self.total += torch.tensor(state["sums"], dtype=self.total.dtype, device=self.total.device)

    # --- the reference ---

    def adapter_off(self):
        """Return a context in which the model has its initial weights, for use before the first step."""
        starts_from_base = self.settings.trains_adapter and not self.settings.initial_adapter
        return self.trainer.model.disable_adapter() if starts_from_base else contextlib.nullcontext()

    @contextlib.contextmanager
    def as_reference(self, model):
        """Return a context in which forwards of `model` compute the reference of a step."""
        is_sharded = self.settings.zero == 3 and model is not self.trainer.model
        with torch.no_grad(), self.adapter_off(), patches.same_trace(model) if is_sharded else contextlib.nullcontext():
            yield

    def before_first_step(self):
        if not self.settings.precompute_ref_log_probs:
            return
        trainer = self.trainer
        model_key = _model_key(self.settings) if trainer.args.process_index == 0 else ""
        for name, dataset in (("training", trainer.train_dataset), ("evaluation", trainer.eval_dataset)):
            if dataset is not None:
                dataset.reference = self._kept_reference(name, dataset, model_key)

    def _kept_reference(self, name: str, dataset, model_key: str) -> torch.Tensor:
        """Return the reference log-probabilities of a set's rows, (rows, 2), from a file if it exists.

        Args: model_key: only on rank 0, which reads and writes the files.
        Raises: UserError if the file of a resumed run is missing, as its weights are not the reference's.
        """
        resumed, first, files = self.settings.resume_from_checkpoint, self.trainer.args.process_index == 0, []
        if first:
            file_name = f"reference-{model_key}-{self._rows_key(dataset.sequences)}.safetensors"
            runs = [Path(self.trainer.args.output_dir), *([Path(resumed).parent] if resumed else [])]
            files = [*(run / "reference" / file_name for run in runs), cache_folder() / file_name]
        log_probs, missing = distributed.broadcast((_read(*files), str(files[-2])) if first else None)
        if log_probs is None and resumed:
            raise UserError(
                f"--resume_from_checkpoint {resumed}: {missing} is missing, and the reference cannot be computed from "
                "trained weights; restore the file, or start a new run."
            )
        if log_probs is None:
            log_probs = self._compute_reference(name, dataset)
        for file in files:
            _write(file, log_probs)
        return log_probs

    def _compute_reference(self, name: str, dataset) -> torch.Tensor:
        """Compute the log-probabilities of all rows with the untrained model, split over the ranks. Collective."""
        trainer, args, rows = self.trainer, self.trainer.args, dataset.sequences
        model = trainer.model_wrapped if trainer.is_deepspeed_enabled else trainer.model
        log_probs = torch.zeros(len(rows), 2, dtype=torch.float32, device=args.device)
        # Longest first: similar lengths need little padding. It needs less memory than a training step.
        order = self.lengths(rows).argsort(descending=True, stable=True).tolist()
        size = args.per_device_train_batch_size
        batches = [order[i : i + size] for i in range(0, len(rows), size)]
        began = last_line = time.monotonic()
        model.eval()
        with torch.no_grad(), self.adapter_off():
            for i in range(0, len(batches), args.world_size):
                trainer.reporter.heartbeat.beat(trainer.state.global_step)
                # A rank without remaining rows repeats the first ones, to participate in ZeRO-3's gathers.
                has_batch = i + args.process_index < len(batches)
                batch = batches[i + args.process_index] if has_batch else batches[0]
                inputs = send_to_device(trainer.train_collator([rows[j] for j in batch]), args.device)
                with trainer.compute_loss_context_manager():
                    values = self.reference_of(model, inputs)
                if has_batch:
                    log_probs[batch] = values.float()
                if args.process_index == 0 and time.monotonic() - last_line > 60:
                    last_line = time.monotonic()
                    print(f"reference log-probabilities: {i * size:,} of {len(rows):,} {name} {self.unit}", flush=True)
        model.train()
        if args.world_size > 1:
            torch.distributed.all_reduce(log_probs)
        if args.process_index == 0:
            seconds = time.monotonic() - began
            print(f"reference log-probabilities of {len(rows):,} {name} {self.unit}: {seconds:.1f} s", flush=True)
        return log_probs.cpu()

    def _rows_key(self, sequences) -> str:
        """Return a hash of the rows' tokens, which depend on template and truncation, and of their pairing."""
        import xxhash

        digest = xxhash.xxh3_64()
        rows = self.rows_of_key(digest, sequences)
        for table in rows.with_format("arrow").iter(batch_size=1000):
            for column in sorted({"input_ids", "labels", "lengths"} & set(table.column_names)):
                digest.update(table[column].combine_chunks().flatten().to_numpy(zero_copy_only=False).tobytes())
        return digest.hexdigest()


def answer_tokens(inputs) -> torch.Tensor:
    """Return the number of supervised tokens of each document of a batch, (documents,); 0 for fillers."""
    documents, count = document_of_each_token(inputs)
    labeled = torch.nn.functional.pad(inputs["labels"][..., 1:], (0, 1), value=fused_loss.IGNORED) != fused_loss.IGNORED
    zeros = torch.zeros(count, dtype=torch.long, device=labeled.device)
    return zeros.index_add(0, documents, labeled.flatten().long())


def _model_key(settings) -> str:
    """Return a hash of the model, its weights and their precision."""
    import xxhash

    parts = [model_fingerprint(settings), settings.precision, quantization.bits(settings)]
    if settings.random_init or settings.new_tokens:
        parts += [settings.seed, settings.new_tokens]
    digest = xxhash.xxh3_64(str(parts).encode())
    # The fingerprint covers only the files' ends, which may be equal for models tuned from the same base.
    folders = filter(None, (settings.model, settings.values.get("initial_adapter")))
    for path in (path for folder in folders for path in sorted(Path(folder).expanduser().glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, xxhash.xxh3_128).digest())
    return digest.hexdigest()


def _read(*files: Path) -> torch.Tensor | None:
    """Return the tensor of the first readable file, or None."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for file in files:
        with contextlib.suppress(OSError, SafetensorError, KeyError):
            return load_file(file)["log_probs"]
    return None


def _write(file: Path, values: torch.Tensor) -> None:
    """Write the file atomically if it does not exist."""
    from safetensors.torch import save

    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with paths.replacing(file) as stream:
            stream.write(save({"log_probs": values}))
