"""transformers' Trainer with the kit's data order, loss scale, evaluation and checkpoints."""

import contextlib
import functools
import json
import time
import traceback
import warnings
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput, SaveStrategy
from typing_extensions import override

from zerofit.base import command_line, distributed, phases, rank_status
from zerofit.base.errors import DiskFull, Stopped, UserError, first_line
from zerofit.base.paths import write_text
from zerofit.certificate import recorder, rows
from zerofit.checkpoint import background, pickles, reshard, resumable, save
from zerofit.checkpoint.facts import read_facts, step_of
from zerofit.checkpoint.upload import Uploads
from zerofit.config import resolve
from zerofit.data import end_tokens, streaming
from zerofit.data.batches import (
    LABEL_COUNT,
    Collator,
    CountingCollator,
    DatasetWithFiller,
    EpochSampler,
    TrainCollator,
    training_sampler,
)
from zerofit.job import run_folder
from zerofit.job.settings import Check
from zerofit.model import adapters, attention, fused_loss, generation, patches
from zerofit.model.kernels import linear_attention
from zerofit.model.load import count_parameters
from zerofit.model.weights import converted
from zerofit.optim import build, learning_rates, paged, registry, sophia
from zerofit.parallel import sequence_parallel
from zerofit.train import memory_tracker, nan_guard, progress, stop, trackers


class Arguments(TrainingArguments):
    """transformers' TrainingArguments, pickled without their tokens: a push uploads training_args.bin."""

    settings = None  # of the run

    def __getstate__(self) -> dict:
        hidden = {name: None for name in vars(self) if name.endswith("_token") or name == "settings"}
        return vars(self) | hidden

    def to_dict(self) -> dict:
        """Return the arguments as trackers (--report_to) record them: the kit's and its decisions too."""
        if (settings := self.settings) is None:
            return super().to_dict()
        kit = {name: value for name, value in settings.written().items() if not name.endswith("_token")}
        kit |= {"recipe": settings.recipe.name, "world_size": settings.world_size, "precision": settings.precision}
        return super().to_dict() | json.loads(json.dumps(kit | {"decisions": settings.decisions}, default=str))


def training_arguments(settings) -> TrainingArguments:
    """Build transformers' TrainingArguments, before the model: this registers the ZeRO-3 configuration.

    Raises: UserError for values that transformers refuses.
    """
    unset_hf_deepspeed_config()
    # Batches in pinned memory are copied beside the kernels; by accelerate's default the host waits for all of them.
    copies = (settings.accelerator_config or {}) | {"non_blocking": settings.dataloader_pin_memory}
    own = {"optim": registry.name_for_transformers(settings), "accelerator_config": copies}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            arguments = Arguments(**settings.training_values() | own)
    except (ValueError, ImportError) as error:
        raise UserError(f"transformers refuses these arguments: {' '.join(str(error).split())}") from None
    arguments.settings = settings
    if settings.output_dir:
        arguments.run_name = arguments.run_name or Path(settings.output_dir).name
    arguments.disable_tqdm = True  # our own step lines
    # One process that sees several GPUs would use nn.DataParallel, which multiplies the micro batch.
    patches.write(arguments, "_n_gpu", min(1, arguments.n_gpu))
    patches.check_overrides(ZerofitTrainer)
    distributed.verify(arguments)
    return arguments


class ZerofitTrainer(Trainer):
    """A Trainer whose optimizer steps see the same rows, equally weighted, for every rank count and accumulation."""

    def __init__(self, settings, net, tokenizer, arguments, train_set, eval_set):
        self.settings, self.tokens, self.eval_tokens = settings, train_set, eval_set
        self.tells_generation = False  # whether the time of --eval_generation_rows was said
        self.ends, tokenizer = generation.stop_at_ends(net, tokenizer, train_set.statistics.get("ends", []))
        self.clock = progress.ThroughputMeter(settings, net)
        self.shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in net.named_parameters()}
        self.saving_to = None  # folder that a checkpoint is written to before it is renamed
        self.unpublished, self.host_copies = None, background.HostCopies()  # of --save_in_background
        if settings.zero == 3:
            patches.list_own_parameters_directly()
            patches.forget_releases_with_their_trace()
            patches.wait_for_parameters_in_order()
        self.install_techniques(net)
        self.numel = count_parameters(net)  # trainable, all; DeepSpeed's tensor parallelism replaces them by shards
        self.fused_loss = self.fuse_loss(net)
        self.router_loss = fused_loss.router_loss(net)
        self.label_counts = []  # of the micro batches of this step that are still to come
        self.label_count = None  # of the batch that is computed, for the fused loss; None: not counted on the host
        pad, documents = tokenizer.pad_token_id, settings.objective.documents
        self.sequence = sequence_parallel.SequenceParallel(settings)
        slices = settings.ranks_that_split("tokens")
        self.seq_idx = linear_attention.reads_documents(getattr(net, "config", None))
        self.train_collator = TrainCollator(pad, settings.padding_free, slices, self.seq_idx)
        super().__init__(
            model=net,
            args=arguments,
            train_dataset=train_set.stream or DatasetWithFiller(train_set.sequences(settings), pad, documents),
            eval_dataset=DatasetWithFiller(eval_set.dataset, pad, documents) if eval_set else None,
            data_collator=Collator(pad, 8 * slices),
            processing_class=tokenizer,
        )
        if self.label_smoother is not None:  # transformers shifts labels for its own classes only
            self.label_smoother = functools.partial(self.label_smoother, shift_labels=True)
        self.train_sampler = self.given_rows = self.eval_loader = None
        if not train_set.stream:  # which shuffles its own rows
            ranks = settings.data_ranks
            self.train_sampler = training_sampler(self.train_dataset, arguments, train_set.weights, ranks)
            self.given_rows = rows.RowsSeen()
        if (ddp := self.accelerator.ddp_handler) is not None:
            ddp.gradient_as_bucket_view = True  # saves a copy of the gradients
            ddp.static_graph = bool(settings.ddp_static_graph)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.check_ends(shipped=None)
        self.guard = nan_guard.NanGuard(self)
        self.tracker = memory_tracker.current()
        self.tracker.attach(self)
        self.reporter, self.certificate = progress.Reporter(self), recorder.Recorder(self)
        self.add_callback(self.reporter)
        if stopping := stop.early(settings):
            self.add_callback(stopping)
        self.uploads = Uploads(settings.upload_to, Path(arguments.output_dir)) if settings.upload_to else None
        if self.uploads:
            self.add_callback(self.uploads)
        self.add_callback(self.certificate)  # behind the reporter, which may turn padding_free off
        self.objective = settings.objective(self)

    def check_ends(self, shipped: list[int] | None) -> None:
        """Write the certificate's line about the tokens that end answers.

        Args: shipped: where generation of final/ stops, None: not saved yet.
        """
        checks, generated = self.settings.checks, generation.stops_of(self.model)
        checks[:] = [check for check in checks if check.name != end_tokens.CHECK]
        checks.append(end_tokens.check(self.ends, self.tokens.dataset, generated, shipped))

    @property
    def architecture(self) -> str:
        """Return the name of the model's class, without its adapter."""
        model = self.model.get_base_model() if self.settings.trains_adapter else self.model
        return type(model).__name__

    def train(self, *args, **kwargs):
        """Train as transformers does.

        Raises: Stopped after the save that a signal asked for; DiskFull if there was no room for that save; UserError
            for what a recipe of one's own sets and nothing would call (check_hooks).
        """
        self.check_hooks()
        if (resumed := self.settings.resume_from_checkpoint) and self.args.process_index == 0:
            trackers.forget_later_steps(self, step_of(Path(resumed)))
        self.train_started = time.perf_counter()
        try:
            output = super().train(*args, **kwargs)
        finally:
            self.reporter.close()
        self.train_seconds = time.perf_counter() - self.train_started
        if self.reporter.stopping:
            self.finish_uploads()
            distributed.barrier()  # a rank that ended earlier would end the others
            raise stopped(self.args, self.state.global_step)
        return output

    def seconds_so_far(self) -> float:
        """Return the seconds of training, those before a resume too, as far as the checkpoints say them."""
        before = self.settings.resumed[-1].get("train_seconds", 0.0) if self.settings.resumed else 0.0
        return before + time.perf_counter() - self.train_started

    def unlogged(self) -> dict:
        """Return what the means of the next log line hold so far, for a checkpoint. Collective."""
        steps = self.state.global_step - self._globalstep_last_logged
        losses = distributed.all_gather(self._tr_loss.item()) if steps else [0.0]
        own = {"steps": steps, "loss": sum(losses) / len(losses), "skipped": self.guard.found_logged}
        return own | self.objective.unlogged()

    def take_unlogged(self, kept: dict) -> None:
        """Go on with the means of the checkpoint: the first log line after a resume has the steps before it too."""
        if not kept.get("steps"):
            return
        patches.write(self, "_globalstep_last_logged", self.state.global_step - kept["steps"])
        self._tr_loss += kept["loss"]
        self.guard.steps_logged, self.guard.found_logged = kept["steps"], kept["skipped"]
        self.objective.take_unlogged(kept)

    def finish_uploads(self, *folders: Path) -> None:
        """Wait on rank 0 until everything that was saved is uploaded, also these folders (--upload_to)."""
        if self.uploads and self.args.process_index == 0:
            with self.reporter.heartbeat.beating(self.state.global_step):
                self.uploads.finish(*folders)

    @override
    def _finalize_training(self, *args, **kwargs):
        self.publish_checkpoint()
        # A resumed run starts from the last checkpoint, which transformers deletes beside a better one.
        if self.reporter.stopping or not self.args.load_best_model_at_end:
            self.state.best_model_checkpoint = None
        return super()._finalize_training(*args, **kwargs)

    @override
    def _get_output_dir(self, trial) -> str:
        return str(self.saving_to or super()._get_output_dir(trial))

    @override
    def _save_checkpoint(self, model, trial=None) -> None:
        write = super()._save_checkpoint
        with self._saving():
            save.save(self, lambda: write(model, trial))

    def publish_checkpoint(self) -> None:
        """Finish the checkpoint that is saved in the background, if there is one. Collective.

        Raises: as save.publish.
        """
        if self.unpublished is not None:
            with self._saving():
                save.publish(self)

    @contextlib.contextmanager
    def _saving(self):
        """Context of what a save does while training stands still."""
        during_save = self.tracker.during("save")
        with during_save, self.clock.paused(), self.reporter.heartbeat.beating(self.state.global_step):
            yield

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        with self.tracker.during("save"), self.reporter.heartbeat.beating(self.state.global_step):
            if self.saving_to is not None and save.needs_no_weights(self):
                if self.args.should_save:
                    save.write_without_weights(self, Path(output_dir))
                return
            super().save_model(output_dir, _internal_call)
            if self.settings.trains_adapter and self.args.should_save and generation.stops_of(self.model):
                # peft saves none
                self.model.generation_config.save_pretrained(output_dir or self.args.output_dir)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        self.check_hooks()
        with self.clock.paused():
            return super().evaluate(*args, **kwargs)

    @override
    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if not self.settings.resharded:
            with pickles.only_known():  # DeepSpeed loads its shards here
                return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        reshard.load(self, Path(resume_from_checkpoint))
        return prepared

    @override
    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs):
        trained = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs)
        # With no step left, transformers would start the last epoch again and train for one step.
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else trained

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self.settings.resharded or converted.load(self.model, Path(resume_from_checkpoint)):
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    @override
    def _issue_warnings_after_load(self, load_result) -> None:
        """Refuse a checkpoint that lacks weights; those that it holds under the name they are tied to are there."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        converted.refuse("the checkpoint to resume from", missing, load_result.unexpected_keys)

    @override
    def _determine_best_metric(self, metrics, trial) -> bool:
        """Return whether to save for --save_strategy best: at a new best metric, or where a save is due anyway.

        With --load_best_model_at_end, only a step that is saved can be the best one.
        """
        best_decides, due = self.args.save_strategy == SaveStrategy.BEST, self.control.should_save
        if self.args.load_best_model_at_end and not (best_decides or due):
            return False
        return super()._determine_best_metric(metrics, trial) or due

    @override
    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        # Before a resume at another stage or rank count it was saved in shards that DeepSpeed cannot load here.
        if self.is_deepspeed_enabled and (known := read_facts(best)) and resumable.must_reshard(self.settings, known):
            reshard.load_weights(self, best)
            return
        if not self.is_deepspeed_enabled and converted.load(self.model, best):
            return
        with pickles.only_known():
            super()._load_best_model()

    @override
    def _load_rng_state(self, checkpoint) -> None:
        """Load this rank's RNG states; a rank that the saved run did not have is seeded, alike in each resume.

        So are ranks on nodes with another number of GPUs: a file has the states of one node's GPUs by their numbers.
        """
        args = self.args
        if checkpoint is None:
            return
        file = Path(checkpoint) / (f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth")
        if file.exists() and _is_of_these_gpus(file):
            super()._load_rng_state(checkpoint)
            return
        if file.exists() and args.process_index == 0:
            print("note: nodes with another number of GPUs: dropout draws different numbers from here on", flush=True)
        self.seed_this_rank()

    def seed_this_rank(self) -> None:
        """Seed torch, numpy and Python from --seed, step and rank, so that dropout masks differ between ranks.

        Ranks that split matrices compute one row together, and draw the same numbers.

        Draws that all ranks must share (initial weights, row order) come earlier or have a separate generator.
        """
        set_seed(self.seed_of_step())

    def seed_of_step(self) -> int:
        """Return a number made of --seed, step and rank."""
        rank = self.args.process_index // self.settings.ranks_that_split("matrices")
        step_and_rank = self.state.global_step * self.args.world_size + rank
        return (self.args.seed + 1_000_003 * step_and_rank) % 2**32

    @override
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.args.push_to_hub and self.saving_to is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def create_optimizer(self, model=None):
        is_new = self.optimizer is None
        if is_new and self.settings.values.get("loraplus_lr_ratio") is not None:
            self.optimizer = adapters.loraplus_optimizer(self)
        elif self.optimizer is None:
            self.optimizer = build.own_optimizer(self, self.model if model is None else model)
            build.share_noise(self.settings, super().create_optimizer(model))
            if getattr(self.optimizer, "is_paged", False):
                self.add_callback(paged.PageStates(self.optimizer))
        if is_new:
            learning_rates.apply(self.optimizer, self.settings, self.model)
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        """Build the schedule; polynomial and cosine_with_min_lr read `defaults`, which DeepSpeed's optimizers lack."""
        wrapper = self.optimizer if optimizer is None else optimizer
        engines = getattr(wrapper, "optimizer", None) if self.is_deepspeed_enabled else None
        if engines is not None and not hasattr(engines, "defaults"):
            engines.defaults = engines.optimizer.defaults
        try:
            warmup = self.args.get_warmup_steps(num_training_steps)
            if self.args.lr_scheduler_type == "polynomial" and warmup >= num_training_steps:  # divides by 0 there
                raise ValueError(f"the warm-up takes all {num_training_steps} steps of the run; lower --warmup_steps")
            return super().create_scheduler(num_training_steps, optimizer)
        except (TypeError, ValueError) as error:
            more = json.dumps(self.args.lr_scheduler_kwargs or {})
            flags = f"--lr_scheduler_type {self.args.lr_scheduler_type.value} --lr_scheduler_kwargs '{more}'"
            raise UserError(f"{flags}: {first_line(error)}.") from None

    def get_train_dataloader(self):
        """Build the training data loader, whose batches may be unpadded; evaluation stays padded."""
        collate, dataset = self.train_collator, self.train_dataset
        if self.tokens.stream is not None:
            collate = streaming.TokenizingCollator(self.tokens.stream, collate)
        else:
            collate, dataset = rows.NumberedCollator(collate), rows.Numbered(dataset)
        return self._loader(dataset, self.args.per_device_train_batch_size, self.train_sampler, collate)

    def get_eval_dataloader(self, eval_dataset=None):
        """Return the data loader of the evaluation set, built once: its order never changes."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if self.eval_loader is None or self.eval_loader.dataset is not dataset:
            micro = self.args.per_device_eval_batch_size
            sampler = EpochSampler(len(dataset), micro * self.settings.data_ranks, None)
            self.eval_loader = self._loader(dataset, micro, sampler, self.data_collator)
        return self.eval_loader

    def _loader(self, dataset, batch_size: int, sampler, collate) -> DataLoader:
        args = self.args
        loader = self.accelerator.prepare(
            DataLoader(
                dataset,
                batch_size,
                sampler=sampler,
                collate_fn=self.counting(collate),
                num_workers=args.dataloader_num_workers,
                pin_memory=args.dataloader_pin_memory,
                persistent_workers=args.dataloader_persistent_workers,
                prefetch_factor=args.dataloader_prefetch_factor,
                multiprocessing_context=args.dataloader_multiprocessing_context,
                in_order=args.dataloader_in_order,
                worker_init_fn=rank_status.end_with_rank_only,
                # Without one, opening a loader draws from torch's: dropout would change with each evaluation.
                generator=torch.Generator().manual_seed(args.seed),
            )
        )
        return self.sequence.share_rows(loader)

    def counting(self, collate):
        """Let a collator count labels if the fused loss needs it; a simulation has no values to count."""
        # Slices of rows are cut on the device, each with its own count.
        other_labels = self.sequence.size > 1 or adapters.first_target(self.settings) == 0
        return CountingCollator(collate) if self.fused_loss and not other_labels else collate

    @override
    def _get_num_items_in_batch(self, batch_samples, device):
        """Return what the loss of a step is divided by, as the objective or transformers counts it."""
        count = self.objective.items(batch_samples, device)
        if count is None:
            return super()._get_num_items_in_batch(batch_samples, device)
        # The ranks of a --tp_size group have the same rows; transformers 5.17 scales the loss as if they had not.
        return count / self.get_tp_size() if "get_tp_size" in Trainer.compute_loss.__code__.co_names else count

    def over_ranks(self, count: torch.Tensor) -> torch.Tensor:
        """Return the sum of a count of each rank over the ranks that a loss is divided among. Collective."""
        if self.counted_ranks > 1:
            torch.distributed.all_reduce(count)
        return count

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        self.reporter.phases.enter(phases.DATA)
        timed = self.clock.pace.timed(epoch_iterator)
        batches, count = super().get_batch_samples(timed, num_batches, device)
        self.label_counts = [batch.pop(LABEL_COUNT, None) for batch in batches]
        numbers = [batch.pop(rows.ROWS, None) for batch in batches]
        if None in numbers:  # of a stream, or a data loader of the recipe's own
            numbers = self.given_rows = None
        elif self.given_rows is not None:
            epoch = self.state.global_step // (len(self.train_sampler) // self.train_sampler.multiple)
            for of_batch in numbers:
                self.given_rows.add(epoch, of_batch, filler=len(self.train_dataset))
        if count is not None:
            count = count / self.sequence.size  # each rank of a group has counted the same rows
            self.certificate.compare_count(count)
        if self.settings.optim == "sophia" and batches:
            sophia.estimate_if_due(self, batches)
        self.guard.begin(batches, numbers)
        self.objective.begin_step(batches)
        return batches, count

    @override
    def _clip_grad_norm(self, model):
        if self.is_deepspeed_enabled:  # its step has clipped
            return None
        return super()._clip_grad_norm(model)

    @override
    def _get_grad_norm(self, model, grad_norm=None):
        if self.is_deepspeed_enabled:  # as it is, on the device: transformers reads it, behind the optimizer's kernels
            self.guard.grad_norm = self.model_wrapped.get_global_grad_norm()
        else:
            self.guard.grad_norm = super()._get_grad_norm(model, grad_norm)
        return self.guard.grad_norm

    def prove_documents_apart(self) -> None:
        """Check with the real model that documents in one row do not affect each other.

        Looks for a gradient from one document to another in a training step, which is 0 in any precision if they are
        apart, and compares the logits of three documents in one row with those of each alone. In half precision these
        are other kernels, whose rounding grows with the depth: there only what no rounding makes is a failure. Without
        --packing, a failure turns padding_free off, with a note.
        Raises: UserError for a failure with --packing.
        """
        bound = 1e-3 if self.settings.precision == "fp32" else attention.BEYOND_ROUNDING
        try:
            pad = self.data_collator.pad_token_id
            logit_error = attention.packed_logit_error(
                self.model_wrapped, self.tokens.dataset, pad, self.args, self.seq_idx
            )
            gradient_leak = attention.cross_document_gradient(self.model, self.tokens.dataset, self.args, self.seq_idx)
            both = f"gradient of one by another {gradient_leak:.1g}, logits {logit_error:.1e} off those of each alone"
            if logit_error <= bound and gradient_leak < 1e-6:
                sentence = f"documents in one row: {both} (bounds 1e-06 and {bound:.0e})"
                numbers = {"gradient": gradient_leak, "logits": logit_error, "bound": bound}
                self.settings.checks.append(Check("documents_apart", True, sentence, numbers))
                return
            what = "are not what they are alone" if gradient_leak < 1e-6 else "read each other"
            problem = f"documents in one row {what} ({both}; bounds 1e-06 and {bound:.0e})"
        except ValueError as error:  # the attention cannot do what this model needs, e.g. a soft cap
            problem = " ".join(str(error).split()).rstrip(".")
        # A kernel refuses the GPU or the shapes, the model's code needs a mask; or a bug: the traceback is saved.
        except (RuntimeError, TypeError, AttributeError) as error:
            if rank_status.gpu_is_full(error):
                raise
            error_file = Path(self.args.output_dir) / "padding_free.txt"
            problem = f"packed attention failed ({first_line(error)}; {error_file} holds the whole error)"
            if self.args.process_index == 0:
                write_text(error_file, "".join(traceback.format_exception(error)))
        if self.settings.packing:
            raise UserError(f"--packing: {problem}; train without --packing.")
        self.train_collator.packed = False
        if self.args.process_index == 0:
            print(f"note: padding_free is off: {problem}", flush=True)
            run_folder.add_to_run(Path(self.args.output_dir), "decisions", [f"padding_free false: {problem}"])

    def prove_slices(self) -> None:
        """Check with the real model that ranks which split a row compute what one rank computes for the whole row.

        Raises: UserError if they do not.
        """
        if not self.model_accepts_loss_kwargs:
            raise self.sequence.refusal(f"{type(self.model).__name__} cannot divide its loss by the tokens of the step")
        rows = [{name: row[name][:128] for name in ("input_ids", "labels")} for row in islice(self.tokens.dataset, 3)]
        error = self.sequence.logit_error(
            self.model_wrapped, send_to_device(self.train_collator(rows), self.args.device)
        )
        bound = 1e-3 if self.settings.precision == "fp32" else 0.05
        if not error <= bound:
            raise self.sequence.refusal(
                f"this model's logits of split rows are {error:.1%} off those of whole rows (bound {bound:.1%})"
            )

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.clock.count(inputs)
        if num_items_in_batch is not None:
            # A stream's rows of a step may all be truncated away, and a rank that counts for itself may have only the
            # filler of the last step: loss 0, not NaN.
            num_items_in_batch = num_items_in_batch.clamp(min=1)
        no_casts = adapters.without_input_casts(self.model, self.settings)
        counted = self.labels_counted(self.label_counts.pop(0) if self.label_counts else None)
        with self.sequence.split(send_to_device(inputs, self.args.device)) as inputs, no_casts, counted:
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.guard.losses.append(loss)
        return loss

    def install_techniques(self, net) -> None:
        """Change the model as the techniques of the job ask for."""
        resolve.install(self.settings, net)

    def fuse_loss(self, net) -> fused_loss.FusedLoss | None:
        """Fuse the loss of the model; a simulation does it among real tensors."""
        return fused_loss.install(self.settings, net)

    @contextlib.contextmanager
    def labels_counted(self, count: int | None):
        """Context in which `count` labels of the batch are in the loss; None: not known on the host."""
        self.label_count = count
        try:
            yield
        finally:
            self.label_count = None

    def without_logits(self, documents=None):
        """Return the context for a forward pass that needs the loss but not the logits; documents: see FusedLoss."""
        return self.fused_loss.on(documents, self.label_count) if self.fused_loss else contextlib.nullcontext()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = self.objective.loss(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def model_loss(self, model, inputs, num_items_in_batch):
        """Return (loss, outputs) as transformers computes them: by the model, label smoothing or compute_loss_func."""
        return super().compute_loss(model, inputs, True, num_items_in_batch)

    @property
    def counted_ranks(self) -> int:
        """Return the ranks whose items num_items_in_batch counts; a loss is multiplied by it, as DDP averages."""
        return self.args.world_size if self.args.average_tokens_across_devices else 1

    @property
    def own_loss(self) -> bool:
        """Return whether a recipe of one's own computes the loss."""
        owner = next(kind for kind in type(self).__mro__ if "compute_loss" in vars(kind))
        return not owner.__module__.startswith("zerofit.") or self.compute_loss_func is not None

    def check_hooks(self) -> None:
        """Refuse hooks of transformers' Trainer that nothing here would call, before the first step.

        Raises: UserError.
        """
        for name in ("compute_metrics", "preprocess_logits_for_metrics"):
            if getattr(self, name) is not None:
                raise UserError(
                    f"trainer.{name}: an evaluation computes the loss and keeps no predictions, so it would never be "
                    "called; leave it out, and measure in a callback's on_evaluate or with a loss of your own."
                )
        if self.own_loss and str(self.args.metric_for_best_model).removeprefix("eval_") == "perplexity":
            raise UserError(
                "--metric_for_best_model perplexity: with an own compute_loss there is no perplexity; use loss."
            )

    def score(self) -> float:
        """Return how well the model does on the held-out rows of the bundled task. Collective."""
        return self.objective.score()

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """Return the metrics of evaluation_metrics over all rows, for any split into batches and ranks."""
        with self.objective.evaluating(dataloader):
            with self.tracker.during("eval"):
                total = self._evaluation_total(dataloader)
            found = self.evaluation_metrics(total) | generation.exact_match_of_some(self)
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics=metrics, num_samples=len(self.eval_tokens or ())
        )

    def _evaluation_total(self, dataloader) -> torch.Tensor:
        """Return evaluation_sums of all batches and ranks. Collective.

        Under ZeRO-3 no_grad replaces inference_mode: parameters gathered in inference mode could not be trained
        afterwards.
        """
        model = self.model_wrapped if self.is_deepspeed_enabled else self.model
        was_training = model.training
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.args.device)
        zero3 = self.settings.deepspeed is not None and self.settings.zero == 3
        with torch.no_grad() if zero3 else torch.inference_mode():
            for inputs in self.reporter.evaluating(dataloader):
                counted = self.labels_counted(inputs.pop(LABEL_COUNT, None))
                inputs = send_to_device(inputs, self.args.device)
                with self.sequence.split(inputs) as inputs, self.compute_loss_context_manager(), counted:
                    total = total + self.evaluation_sums(model, inputs)
        model.train(was_training)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(total)
        return total

    def evaluation_sums(self, model, inputs) -> torch.Tensor:
        """Return what a batch adds to the sums of an evaluation, float64."""
        return self.objective.evaluation_sums(model, inputs)

    def own_mean(self, model, inputs, count) -> torch.Tensor:
        """Return the mean of an own loss over the `count` items of a batch on this rank alone."""
        items = count.clamp(min=1) * self.counted_ranks  # a loss of one rank is multiplied by them (counted_ranks)
        return self.compute_loss(model, dict(inputs), num_items_in_batch=items)

    def evaluation_metrics(self, total: torch.Tensor) -> dict[str, float]:
        """Return the metrics of an evaluation from the sums over all batches and ranks."""
        return self.objective.evaluation_metrics(total)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self.objective.step_metrics())
            logs["loss"] = self.guard.mean(logs["loss"])
            logs.update(self.clock.measure(self.args))
            skipped = self.model_wrapped.skipped_steps if self.is_deepspeed_enabled else self.reporter.skipped_steps
            if skipped:
                logs["skipped_steps"] = skipped
        super().log(logs, start_time)


def _is_of_these_gpus(file: Path) -> bool:
    """Return whether a file of random states has as many as this node has GPUs, or none."""
    states = pickles.load(file).get("cuda") if torch.cuda.is_available() else None
    return not isinstance(states, list) or len(states) == torch.cuda.device_count()


def stopped(args, step: int) -> UserError:
    """Return the error that ends a run which was asked to save and stop: DiskFull if that save found no room."""
    folder = Path(args.output_dir)
    if (folder / f"checkpoint-{step}").exists():
        return Stopped(how_it_stopped(args, step))
    saved = list(run_folder.checkpoints(folder).values())
    newest = f"{saved[-1].name} stays the newest" if saved else "nothing is saved yet"
    return DiskFull(
        f"stopped after step {step}, which is not saved: the disk of {folder} has no room for another checkpoint; "
        f"{newest}; make room, then `{command_line.next_step('resume', folder)}` continues"
    )


def how_it_stopped(args, step: int) -> str:
    """Return the message of a run that was asked to save and stop."""
    folder = Path(args.output_dir)
    if args.save_only_model:
        export = command_line.next_step("export", folder / f"checkpoint-{step}")
        return (
            f"stopped after step {step}; checkpoint-{step} holds the model without optimizer states "
            f"(--save_only_model), so no run can continue from it; `{export}` keeps it"
        )
    return (
        f"stopped after step {step}, checkpoint-{step} is saved; `{command_line.next_step('resume', folder)}` continues"
    )
