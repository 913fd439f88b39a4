"""transformers' Trainer with zerofit's data order, loss scale, evaluation and checkpoints."""

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
    """transformers' TrainingArguments, pickled without access tokens: a push uploads training_args.bin."""

    settings = None  # the run's Settings

    def __getstate__(self) -> dict:
        hidden = {name: None for name in vars(self) if name.endswith("_token") or name == "settings"}
        return vars(self) | hidden

    def to_dict(self) -> dict:
        """Return the arguments for trackers (--report_to), including zerofit's arguments and decisions."""
        if (settings := self.settings) is None:
            return super().to_dict()
        kit = {name: value for name, value in settings.written().items() if not name.endswith("_token")}
        kit |= {"recipe": settings.recipe.name, "world_size": settings.world_size, "precision": settings.precision}
        return super().to_dict() | json.loads(json.dumps(kit | {"decisions": settings.decisions}, default=str))


def training_arguments(settings) -> TrainingArguments:
    """Build transformers' TrainingArguments before the model: this registers the ZeRO-3 configuration.

    Raises: UserError for values that transformers rejects.
    """
    unset_hf_deepspeed_config()
    # Pinned batches are copied while kernels run; by accelerate's default the host waits for all kernels.
    copies = (settings.accelerator_config or {}) | {"non_blocking": settings.dataloader_pin_memory}
    overrides = {"optim": registry.name_for_transformers(settings), "accelerator_config": copies}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            arguments = Arguments(**settings.training_values() | overrides)
    except (ValueError, ImportError) as error:
        raise UserError(f"transformers rejects these arguments: {' '.join(str(error).split())}") from None
    arguments.settings = settings
    if settings.output_dir:
        arguments.run_name = arguments.run_name or Path(settings.output_dir).name
    arguments.disable_tqdm = True  # replaced by zerofit's step lines
    # A process that sees several GPUs would use nn.DataParallel, which multiplies the micro batch.
    patches.write(arguments, "_n_gpu", min(1, arguments.n_gpu))
    patches.check_overrides(ZerofitTrainer)
    distributed.verify(arguments)
    return arguments


class ZerofitTrainer(Trainer):
    """A Trainer whose optimizer steps see the same rows, equally weighted, for every rank count and accumulation."""

    def __init__(self, settings, net, tokenizer, arguments, train_set, eval_set):
        self.settings, self.tokens, self.eval_tokens = settings, train_set, eval_set
        self.generation_time_reported = False  # whether the time of --eval_generation_rows was printed
        self.ends, tokenizer = generation.stop_at_ends(net, tokenizer, train_set.statistics.get("ends", []))
        self.clock = progress.ThroughputMeter(settings, net)
        self.shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in net.named_parameters()}
        self.saving_to = None  # staging folder of the checkpoint that is being written
        self.pending_checkpoint, self.host_copies = None, background.HostCopies()  # --save_in_background
        if settings.zero == 3:
            patches.list_own_parameters_directly()
            patches.clear_releases_with_trace()
            patches.wait_for_parameters_in_order()
        self.install_techniques(net)
        self.numel = count_parameters(
            net
        )  # trainable, all; counted before DeepSpeed's tensor parallelism replaces them by shards
        self.fused_loss = self.fuse_loss(net)
        self.router_loss = fused_loss.router_loss(net)
        self.label_counts = []  # labels of the remaining micro batches of this step
        self.label_count = None  # labels of the current batch, for the fused loss; None: not counted on the host
        pad, documents = tokenizer.pad_token_id, settings.objective.documents
        self.sequence = sequence_parallel.SequenceParallel(settings)
        slices = settings.parallel_size("tokens")
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
        self.train_sampler = self.seen_rows = self.eval_loader = None
        if not train_set.stream:  # a stream shuffles its rows
            ranks = settings.data_ranks
            self.train_sampler = training_sampler(self.train_dataset, arguments, train_set.weights, ranks)
            self.seen_rows = rows.RowsSeen()
        if (ddp := self.accelerator.ddp_handler) is not None:
            ddp.gradient_as_bucket_view = True  # avoids a copy of the gradients
            ddp.static_graph = bool(settings.ddp_static_graph)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.check_ends(shipped=None)
        self.guard = nan_guard.NanGuard(self)
        self.tracker = memory_tracker.current()
        self.tracker.attach(self)
        self.reporter, self.certificate = progress.Reporter(self), recorder.Recorder(self)
        self.add_callback(self.reporter)
        if stopping := stop.early_stopping(settings):
            self.add_callback(stopping)
        self.uploads = Uploads(settings.upload_to, Path(arguments.output_dir)) if settings.upload_to else None
        if self.uploads:
            self.add_callback(self.uploads)
        self.add_callback(self.certificate)  # after the reporter, which may turn padding_free off
        self.objective = settings.objective(self)

    def check_ends(self, shipped: list[int] | None) -> None:
        """Write the certificate's line about the end tokens of answers.

        Args: shipped: end tokens in final/'s generation config, None if not saved yet.
        """
        checks, generated = self.settings.checks, generation.stop_ids(self.model)
        checks[:] = [check for check in checks if check.name != end_tokens.CHECK]
        checks.append(end_tokens.check(self.ends, self.tokens.dataset, generated, shipped))

    @property
    def architecture(self) -> str:
        """Return the name of the model's class, without its adapter."""
        model = self.model.get_base_model() if self.settings.trains_adapter else self.model
        return type(model).__name__

    def train(self, *args, **kwargs):
        """Train as transformers does.

        Raises: Stopped after the save on a signal; DiskFull if the disk was too full for that save; UserError for hooks
            of a custom recipe that would never be called (check_hooks).
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
            distributed.barrier()  # a rank that ends earlier would end the others
            raise stopped(self.args, self.state.global_step)
        return output

    def seconds_so_far(self) -> float:
        """Return the seconds of training, including the recorded time before a resume."""
        segments = self.settings.previous_segments
        before = segments[-1].get("train_seconds", 0.0) if segments else 0.0
        return before + time.perf_counter() - self.train_started

    def pending_log_state(self) -> dict:
        """Return the partial means of the next log line, for a checkpoint. Collective."""
        steps = self.state.global_step - self._globalstep_last_logged
        losses = distributed.all_gather(self._tr_loss.item()) if steps else [0.0]
        state = {"steps": steps, "loss": sum(losses) / len(losses), "skipped": self.guard.bad_steps_logged}
        return state | self.objective.pending_log_state()

    def restore_log_state(self, state: dict) -> None:
        """Continue with the checkpoint's partial means: the first log line after a resume includes earlier steps."""
        if not state.get("steps"):
            return
        patches.write(self, "_globalstep_last_logged", self.state.global_step - state["steps"])
        self._tr_loss += state["loss"]
        self.guard.steps_logged, self.guard.bad_steps_logged = state["steps"], state["skipped"]
        self.objective.restore_log_state(state)

    def finish_uploads(self, *folders: Path) -> None:
        """Wait on rank 0 until all saves and these folders are uploaded (--upload_to)."""
        if self.uploads and self.args.process_index == 0:
            with self.reporter.heartbeat.beating(self.state.global_step):
                self.uploads.finish(*folders)

    @override
    def _finalize_training(self, *args, **kwargs):
        self.publish_checkpoint()
        # A resumed run starts from the last checkpoint, which transformers deletes if another one is better.
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
        """Finish the checkpoint that is being saved in the background, if any. Collective.

        Raises: see save.publish.
        """
        if self.pending_checkpoint is not None:
            with self._saving():
                save.publish(self)

    @contextlib.contextmanager
    def _saving(self):
        """Context for the part of a save during which training waits."""
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
            if self.settings.trains_adapter and self.args.should_save and generation.stop_ids(self.model):
                # peft does not save it
                self.model.generation_config.save_pretrained(output_dir or self.args.output_dir)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        self.check_hooks()
        with self.clock.paused():
            return super().evaluate(*args, **kwargs)

    @override
    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if not self.settings.resharded:
            with pickles.known_globals_only():  # DeepSpeed loads its shards here
                return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        reshard.load(self, Path(resume_from_checkpoint))
        return prepared

    @override
    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs):
        trained = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs)
        # Without remaining steps, transformers would restart the last epoch and train for one step.
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else trained

    @override
    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self.settings.resharded or converted.load(self.model, Path(resume_from_checkpoint)):
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    @override
    def _issue_warnings_after_load(self, load_result) -> None:
        """Refuse a checkpoint that lacks weights, other than weights tied to a saved one."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        missing = [name for name in load_result.missing_keys if name not in tied]
        converted.check_names("the checkpoint to resume from", missing, load_result.unexpected_keys)

    @override
    def _determine_best_metric(self, metrics, trial) -> bool:
        """Return whether to save for --save_strategy best: at a new best metric, or if a save is due anyway.

        With --load_best_model_at_end, only a saved step can be the best one.
        """
        best_decides, due = self.args.save_strategy == SaveStrategy.BEST, self.control.should_save
        if self.args.load_best_model_at_end and not (best_decides or due):
            return False
        return super()._determine_best_metric(metrics, trial) or due

    @override
    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        # DeepSpeed cannot load shards that were saved before a resume at another stage or rank count.
        if self.is_deepspeed_enabled and (known := read_facts(best)) and resumable.must_reshard(self.settings, known):
            reshard.load_weights(self, best)
            return
        if not self.is_deepspeed_enabled and converted.load(self.model, best):
            return
        with pickles.known_globals_only():
            super()._load_best_model()

    @override
    def _load_rng_state(self, checkpoint) -> None:
        """Load this rank's RNG states; seed a rank that the saved run did not have, in the same way at each resume.

        Ranks on nodes with another number of GPUs are also seeded: a file has the states of all GPUs of one node.
        """
        args = self.args
        if checkpoint is None:
            return
        file = Path(checkpoint) / (f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth")
        if file.exists() and _matches_gpus(file):
            super()._load_rng_state(checkpoint)
            return
        if file.exists() and args.process_index == 0:
            print("note: nodes with another number of GPUs: dropout draws different numbers from now on", flush=True)
        self.seed_this_rank()

    def seed_this_rank(self) -> None:
        """Seed torch, numpy and Python from --seed, step and rank, so that dropout masks differ between ranks.

        Ranks that split matrices compute a row together and draw the same numbers. Draws that all ranks must share
        (initial weights, row order) come earlier or have a separate generator.
        """
        set_seed(self.seed_of_step())

    def seed_of_step(self) -> int:
        """Return a seed derived from --seed, step and rank."""
        rank = self.args.process_index // self.settings.parallel_size("matrices")
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
        engine_optimizer = getattr(wrapper, "optimizer", None) if self.is_deepspeed_enabled else None
        if engine_optimizer is not None and not hasattr(engine_optimizer, "defaults"):
            engine_optimizer.defaults = engine_optimizer.optimizer.defaults
        try:
            warmup = self.args.get_warmup_steps(num_training_steps)
            if self.args.lr_scheduler_type == "polynomial" and warmup >= num_training_steps:  # divides by 0
                raise ValueError(f"the warm-up takes all {num_training_steps} steps of the run; lower --warmup_steps")
            return super().create_scheduler(num_training_steps, optimizer)
        except (TypeError, ValueError) as error:
            kwargs = json.dumps(self.args.lr_scheduler_kwargs or {})
            flags = f"--lr_scheduler_type {self.args.lr_scheduler_type.value} --lr_scheduler_kwargs '{kwargs}'"
            raise UserError(f"{flags}: {first_line(error)}.") from None

    def get_train_dataloader(self):
        """Build the training data loader, whose batches may be unpadded; evaluation batches are padded."""
        collate, dataset = self.train_collator, self.train_dataset
        if self.tokens.stream is not None:
            collate = streaming.TokenizingCollator(self.tokens.stream, collate)
        else:
            collate, dataset = rows.NumberedCollator(collate), rows.Numbered(dataset)
        return self._loader(dataset, self.args.per_device_train_batch_size, self.train_sampler, collate)

    def get_eval_dataloader(self, eval_dataset=None):
        """Return the data loader of the evaluation set, built only once: its order never changes."""
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
                # By default, creating a loader draws from torch's generator: each evaluation would change dropout.
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
        """Return the divisor of a step's loss, as counted by the objective or transformers."""
        count = self.objective.items(batch_samples, device)
        if count is None:
            return super()._get_num_items_in_batch(batch_samples, device)
        # Ranks of a --tp_size group have the same rows; transformers 5.17 scales the loss as if the rows differed.
        return count / self.get_tp_size() if "get_tp_size" in Trainer.compute_loss.__code__.co_names else count

    def over_ranks(self, count: torch.Tensor) -> torch.Tensor:
        """Return the sum of a count over the ranks that contribute to a loss. Collective."""
        if self.loss_world_size > 1:
            torch.distributed.all_reduce(count)
        return count

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        self.reporter.phases.enter(phases.DATA)
        timed = self.clock.pace.timed(epoch_iterator)
        batches, count = super().get_batch_samples(timed, num_batches, device)
        self.label_counts = [batch.pop(LABEL_COUNT, None) for batch in batches]
        numbers = [batch.pop(rows.ROWS, None) for batch in batches]
        if None in numbers:  # a stream, or the recipe's custom data loader
            numbers = self.seen_rows = None
        elif self.seen_rows is not None:
            epoch = self.state.global_step // (len(self.train_sampler) // self.train_sampler.multiple)
            for batch_numbers in numbers:
                self.seen_rows.add(epoch, batch_numbers, filler=len(self.train_dataset))
        if count is not None:
            count = count / self.sequence.size  # all ranks of a group have counted the same rows
            self.certificate.compare_count(count)
        if self.settings.optim == "sophia" and batches:
            sophia.estimate_if_due(self, batches)
        self.guard.begin(batches, numbers)
        self.objective.begin_step(batches)
        return batches, count

    @override
    def _clip_grad_norm(self, model):
        if self.is_deepspeed_enabled:  # its step clips
            return None
        return super()._clip_grad_norm(model)

    @override
    def _get_grad_norm(self, model, grad_norm=None):
        if self.is_deepspeed_enabled:  # a device tensor: transformers reads it after the optimizer's kernels
            self.guard.grad_norm = self.model_wrapped.get_global_grad_norm()
        else:
            self.guard.grad_norm = super()._get_grad_norm(model, grad_norm)
        return self.guard.grad_norm

    def check_no_cross_document_attention(self) -> None:
        """Run a self-test with the real model: documents in one row must not affect each other.

        It checks that the gradient of one document with respect to another is 0 in a training step, in any precision,
        and compares the logits of three documents in one row with the logits of each document alone. In half precision
        different kernels compute them, and rounding errors grow with the depth, so the bound exceeds any rounding
        error. Without --packing, a failure turns padding_free off, with a note.
        Raises: UserError for a failure with --packing.
        """
        bound = 1e-3 if self.settings.compute_dtype == "fp32" else attention.MAX_ROUNDING_ERROR
        try:
            pad = self.data_collator.pad_token_id
            logit_error = attention.packed_logit_error(
                self.model_wrapped, self.tokens.dataset, pad, self.args, self.seq_idx
            )
            gradient_leak = attention.cross_document_gradient(self.model, self.tokens.dataset, self.args, self.seq_idx)
            measured = f"gradient between documents {gradient_leak:.1g}, logits {logit_error:.1e} off single documents"
            if logit_error <= bound and gradient_leak < 1e-6:
                sentence = f"documents in one row: {measured} (bounds 1e-06 and {bound:.0e})"
                numbers = {"gradient": gradient_leak, "logits": logit_error, "bound": bound}
                self.settings.checks.append(Check("documents_apart", True, sentence, numbers))
                return
            effect = "differ from single documents" if gradient_leak < 1e-6 else "affect each other"
            problem = f"documents in one row {effect} ({measured}; bounds 1e-06 and {bound:.0e})"
        except ValueError as error:  # the attention lacks a feature of this model, e.g. a soft cap
            problem = " ".join(str(error).split()).rstrip(".")
        # A kernel rejects the GPU or the shapes, or the model needs a mask. It may be a bug, so the traceback is saved.
        except (RuntimeError, TypeError, AttributeError) as error:
            if rank_status.gpu_is_full(error):
                raise
            error_file = Path(self.args.output_dir) / "padding_free.txt"
            problem = f"packed attention failed ({first_line(error)}; {error_file} contains the full error)"
            if self.args.process_index == 0:
                write_text(error_file, "".join(traceback.format_exception(error)))
        if self.settings.packing:
            raise UserError(f"--packing: {problem}; train without --packing.")
        self.train_collator.packed = False
        if self.args.process_index == 0:
            print(f"note: padding_free is off: {problem}", flush=True)
            run_folder.add_to_run(Path(self.args.output_dir), "decisions", [f"padding_free false: {problem}"])

    def check_row_splitting(self) -> None:
        """Run a self-test with the real model: ranks that split a row must compute the same as one rank.

        Raises: UserError if the logits differ.
        """
        if not self.model_accepts_loss_kwargs:
            raise self.sequence.refusal(f"{type(self.model).__name__} cannot divide its loss by the tokens of the step")
        rows = [{name: row[name][:128] for name in ("input_ids", "labels")} for row in islice(self.tokens.dataset, 3)]
        error = self.sequence.logit_error(
            self.model_wrapped, send_to_device(self.train_collator(rows), self.args.device)
        )
        bound = 1e-3 if self.settings.compute_dtype == "fp32" else 0.05
        if not error <= bound:
            raise self.sequence.refusal(
                f"this model's logits of split rows differ by {error:.1%} from unsplit rows (bound {bound:.1%})"
            )

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.clock.count(inputs)
        if num_items_in_batch is not None:
            # All labels of a stream's step may be truncated, and a rank with its own count may have only the filler of
            # the last step: the loss is 0, not NaN.
            num_items_in_batch = num_items_in_batch.clamp(min=1)
        no_casts = adapters.without_input_casts(self.model, self.settings)
        counted = self.labels_counted(self.label_counts.pop(0) if self.label_counts else None)
        with self.sequence.split(send_to_device(inputs, self.args.device)) as inputs, no_casts, counted:
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.guard.losses.append(loss)
        return loss

    def install_techniques(self, net) -> None:
        """Apply the techniques of the job to the model."""
        resolve.install(self.settings, net)

    def fuse_loss(self, net) -> fused_loss.FusedLoss | None:
        """Fuse the loss of the model; a simulation overrides this to use real tensors."""
        return fused_loss.install(self.settings, net)

    @contextlib.contextmanager
    def labels_counted(self, count: int | None):
        """Set the number of labels of the batch in the body; None: not known on the host."""
        self.label_count = count
        try:
            yield
        finally:
            self.label_count = None

    def without_logits(self, documents=None):
        """Return the context for a forward that needs the loss but not the logits. documents: see FusedLoss."""
        return self.fused_loss.on(documents, self.label_count) if self.fused_loss else contextlib.nullcontext()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = self.objective.loss(model, inputs, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def model_loss(self, model, inputs, num_items_in_batch):
        """Return transformers' (loss, outputs), from the model, label smoothing or compute_loss_func."""
        return super().compute_loss(model, inputs, True, num_items_in_batch)

    @property
    def loss_world_size(self) -> int:
        """Return the number of ranks in num_items_in_batch; losses are multiplied by it, as DDP averages."""
        return self.args.world_size if self.args.average_tokens_across_devices else 1

    @property
    def has_custom_loss(self) -> bool:
        """Return whether a custom recipe computes the loss."""
        owner = next(cls for cls in type(self).__mro__ if "compute_loss" in vars(cls))
        return not owner.__module__.startswith("zerofit.") or self.compute_loss_func is not None

    def check_hooks(self) -> None:
        """Refuse hooks of transformers' Trainer that would never be called, before the first step.

        Raises: UserError.
        """
        for name in ("compute_metrics", "preprocess_logits_for_metrics"):
            if getattr(self, name) is not None:
                raise UserError(
                    f"trainer.{name}: evaluation does not keep predictions, so this hook would never be called; remove "
                    "it, and measure in a callback's on_evaluate or with a custom loss."
                )
        if self.has_custom_loss and str(self.args.metric_for_best_model).removeprefix("eval_") == "perplexity":
            raise UserError("--metric_for_best_model perplexity: not available with a custom compute_loss; use loss.")

    def score(self) -> float:
        """Return the model's score on the held-out rows of the bundled task. Collective."""
        return self.objective.score()

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """Return evaluation_metrics over all rows, which do not depend on the split into batches and ranks."""
        with self.objective.evaluating(dataloader):
            with self.tracker.during("eval"):
                total = self._evaluation_total(dataloader)
            metrics = self.evaluation_metrics(total) | generation.exact_match_of_first_rows(self)
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics=metrics, num_samples=len(self.eval_tokens or ())
        )

    def _evaluation_total(self, dataloader) -> torch.Tensor:
        """Return evaluation_sums of all batches and ranks. Collective.

        Under ZeRO-3 no_grad replaces inference_mode: parameters gathered in inference mode could not be trained.
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
        """Return the float64 terms of a batch for the sums of an evaluation."""
        return self.objective.evaluation_sums(model, inputs)

    def custom_loss_mean(self, model, inputs, count) -> torch.Tensor:
        """Return the mean of a custom loss over the `count` items of a batch on this rank."""
        items = count.clamp(min=1) * self.loss_world_size  # a loss is multiplied by loss_world_size
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


def _matches_gpus(file: Path) -> bool:
    """Return whether a file of RNG states matches this node's number of GPUs, or lacks CUDA states."""
    states = pickles.load(file).get("cuda") if torch.cuda.is_available() else None
    return not isinstance(states, list) or len(states) == torch.cuda.device_count()


def stopped(args, step: int) -> UserError:
    """Return the error that ends a run after a request to save and stop: DiskFull if the save did not fit."""
    folder = Path(args.output_dir)
    if (folder / f"checkpoint-{step}").exists():
        return Stopped(how_it_stopped(args, step))
    saved = list(run_folder.checkpoints(folder).values())
    newest = f"{saved[-1].name} remains the newest" if saved else "nothing is saved yet"
    return DiskFull(
        f"stopped after step {step}, which is not saved: the disk of {folder} is too full for another checkpoint; "
        f"{newest}; free some space, then continue with `{command_line.next_step('resume', folder)}`"
    )


def how_it_stopped(args, step: int) -> str:
    """Return the message of a run after a request to save and stop."""
    folder = Path(args.output_dir)
    if args.save_only_model:
        export = command_line.next_step("export", folder / f"checkpoint-{step}")
        return (
            f"stopped after step {step}; checkpoint-{step} holds the model without optimizer states "
            f"(--save_only_model) and cannot be resumed; export it with `{export}`"
        )
    return (
        f"stopped after step {step}, checkpoint-{step} is saved; continue with "
        f"`{command_line.next_step('resume', folder)}`"
    )
