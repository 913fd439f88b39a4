"""transformers' Trainer with the kit's data order, evaluation, step lines, run folder and NaN guard."""

import contextlib
import json
import math
import os
import resource
import shlex
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput

from . import (
    adapters,
    attention,
    canary,
    checkpoint,
    data,
    ddp,
    divergence,
    failure,
    generate,
    hardware,
    loss,
    memory,
    memory_report,
    mlp,
    model,
    offload,
    optimizers,
    patches,
    pickles,
    planner,
    probe,
    quantized,
    recompute,
    report,
    resharding,
    sophia,
    stream,
    world,
)
from .args import order_seed
from .errors import DiskFull, Stopped, UserError, full_disk, printable
from .offload import first_line


class Arguments(TrainingArguments):
    """transformers' own, without its tokens in the file that they are pickled to (training_args.bin, which a push uploads)."""

    def __getstate__(self) -> dict:
        return {name: None if name.endswith("_token") else value for name, value in vars(self).items()}


def training_arguments(settings) -> TrainingArguments:
    """transformers' own arguments; building them registers the ZeRO-3 configuration, so this precedes the model.

    Raises: UserError for values that transformers refuses.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            arguments = Arguments(**settings.training_values() | {"optim": optimizers.name_for_transformers(settings)})
    except (ValueError, ImportError) as error:
        raise UserError(f"transformers refuses these arguments: {' '.join(str(error).split())}") from None
    arguments.disable_tqdm = True  # our own step lines
    # One process that sees several GPUs would become nn.DataParallel, with that many times the micro batch.
    arguments._n_gpu = min(1, arguments.n_gpu)
    world.verify(arguments)
    return arguments


class KitTrainer(Trainer):
    """One optimizer step sees the same rows, weighted the same, for every rank count and accumulation split."""

    def __init__(self, settings, net, tokenizer, arguments, train_set, eval_set):
        self.settings, self.tokens, self.eval_tokens = settings, train_set, eval_set
        self.clock = Clock(settings, net)
        self.saving_to = None  # folder that a checkpoint is written to before it has its name
        if quantized.bits(settings) == 4 and settings.zero == "3":
            patches.release_gathered_4bit_weights()
        mlp.install(settings, net)
        self.fused_loss = loss.install(settings, net)
        self.router_loss = loss.router_loss(net)
        recompute.enable(net, settings)
        pad = tokenizer.pad_token_id
        self.train_collator = data.TrainCollator(pad, settings.padding_free == "true")
        super().__init__(
            model=net,
            args=arguments,
            train_dataset=train_set.stream or data.PaddedToMultiple(train_set.sequences(settings), pad),
            eval_dataset=data.PaddedToMultiple(eval_set.dataset, pad) if eval_set else None,
            data_collator=data.Collator(pad),
            processing_class=tokenizer,
        )
        ddp.apply(self)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.guard = divergence.Guard(self)
        self.ledger = memory.current()
        self.ledger.attach(self)
        self.reporter = Reporter(self)
        self.add_callback(self.reporter)

    def _get_output_dir(self, trial) -> str:
        return str(self.saving_to or super()._get_output_dir(trial))

    def _save_checkpoint(self, model, trial=None) -> None:
        write = super()._save_checkpoint
        with self.clock.paused(), self.reporter.pulse.beating(self.state.global_step):
            checkpoint.save(self, lambda: write(model, trial))

    def save_model(self, output_dir=None, _internal_call=False) -> None:
        with self.reporter.pulse.beating(self.state.global_step):
            super().save_model(output_dir, _internal_call)

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        with self.clock.paused():
            return super().evaluate(*args, **kwargs)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        if not self.settings.resharded:
            with pickles.only_known():  # DeepSpeed loads its shards here
                return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        found = super()._prepare_for_training(max_steps, train_dataloader, None)
        resharding.load(self, Path(resume_from_checkpoint))
        return found

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs):
        trained = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs)
        # With no step left transformers would begin the last epoch again and make one.
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else trained

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if not self.settings.resharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with pickles.only_known():
            super()._load_best_model()

    def _load_rng_state(self, checkpoint) -> None:
        """This rank's generators; a rank that the saved run did not have seeds its own, the same in each resume."""
        args = self.args
        saved = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
        if checkpoint is None or (Path(checkpoint) / saved).exists():
            super()._load_rng_state(checkpoint)
        else:
            self.seed_this_rank()

    def seed_this_rank(self) -> None:
        """Seed torch's, numpy's and Python's generators by --seed, step and rank: dropout masks differ between ranks.

        What all ranks must draw alike (initial weights, the order of the rows) is drawn before or has its own generator.
        """
        place = self.state.global_step * self.args.world_size + self.args.process_index
        set_seed((self.args.seed + 1_000_003 * place) % 2**32)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.args.push_to_hub and self.saving_to is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def create_optimizer(self, model=None):
        if self.optimizer is None and self.settings.values.get("loraplus_lr_ratio") is not None:
            self.optimizer = adapters.loraplus_optimizer(self)
        return optimizers.create(self, model)

    def get_train_dataloader(self):
        """Training batches may go without padding; evaluation stays padded."""
        padded, self.data_collator = self.data_collator, self.train_collator
        if self.tokens.stream is not None:
            self.data_collator = stream.Tokenise(self.tokens.stream, self.train_collator)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = padded

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.settings.optim == "sophia" and batches:
            sophia.estimate_if_due(self, batches)
        self.guard.begin(batches)
        return batches, count

    def _get_grad_norm(self, model, grad_norm=None):
        self.guard.grad_norm = super()._get_grad_norm(model, grad_norm)
        return self.guard.grad_norm

    def prove_documents_apart(self) -> None:
        """Compare the real model's logits on three documents in one row with the same documents one by one, and
        look for a gradient from one document to another, in a training step.

        Raises: UserError when they differ and --packing asked for such rows; a batch that would only have saved its
            padding falls back to padded ones, with a line that says so.
        """
        bound = 1e-3 if self.settings.precision == "fp32" else 0.05
        try:
            pad = self.data_collator.pad_token_id
            apart = attention.logits_apart(self.model_wrapped, self.tokens.dataset, pad, self.args)
            leak = attention.gradient_leak(self.model, self.tokens.dataset, self.args)
            if apart <= bound and leak < 1e-6:
                return
            text = f"logits of documents in one row are {apart:.1%} off those of the same alone (bound {bound:.1%})"
            if leak >= 1e-6:
                text = f"documents in one row read each other (gradient of one by another: {leak:.1%} of its own)"
        except ValueError as error:  # the attention cannot do what this model needs, e.g. a soft cap
            text = " ".join(str(error).split()).rstrip(".")
        except RuntimeError as error:  # a kernel refuses the GPU or the shapes; or a fault, so all of it is kept
            if failure.gpu_is_full(error):
                raise
            file = Path(self.args.output_dir) / "padding_free.txt"
            text = f"packed attention failed ({first_line(error)}; {file} holds the whole error)"
            if self.args.process_index == 0:
                file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        if self.settings.packing:
            raise UserError(f"--packing: {text}; train without --packing.")
        self.train_collator.packed = False
        if self.args.process_index == 0:
            print(f"note: padding_free is off: {text}", flush=True)

    def _get_train_sampler(self, train_dataset=None):
        dataset, args = train_dataset or self.train_dataset, self.args
        seed, lengths = order_seed(args), None
        if args.train_sampling_strategy == "group_by_length":
            lengths = [len(row["input_ids"]) for row in dataset.sequences]
        elif args.train_sampling_strategy not in ("random", "sequential"):
            raise UserError(
                f"--train_sampling_strategy {args.train_sampling_strategy}: the row order would depend on the number "
                "of ranks; use random, sequential or group_by_length."
            )
        effective = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        order = None
        if lengths:

            def order(rows, generator):
                chosen = [lengths[i] for i in rows]
                return [rows[i] for i in LengthGroupedSampler(effective, lengths=chosen, generator=generator)]

        weights = getattr(dataset.sequences, "weights", self.tokens.weights)  # of packs, else of rows
        self.train_sampler = data.EpochSampler(len(dataset), effective, seed, order, weights)
        return self.train_sampler

    def _get_eval_sampler(self, eval_dataset):
        return data.EpochSampler(len(eval_dataset), self.args.per_device_eval_batch_size * self.args.world_size, None)

    def training_step(self, net, inputs, num_items_in_batch=None):
        mask = inputs.get("attention_mask")
        self.clock.tokens = self.clock.tokens + (mask.sum() if mask is not None else inputs["input_ids"].numel())
        if self.tokens.stream is not None and num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch.clamp(min=1)  # a step whose rows were all cut away: loss 0, not NaN
        loss = super().training_step(net, inputs, num_items_in_batch)
        self.guard.losses.append(loss)
        return loss

    def without_logits(self):
        """Context of every forward that only the loss is wanted of."""
        return self.fused_loss.on() if self.fused_loss else contextlib.nullcontext()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]  # label smoothing takes them out
        with self.without_logits():
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if self.router_loss:
            # As the loss: gradients are averaged over the ranks, and the tokens counted are those of all of them.
            ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
            loss = loss + ranks * self.router_loss.share(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        """Mean loss over all supervised tokens, however they fall into batches and ranks; and its perplexity.

        Under ZeRO-3 no_grad stands in for inference_mode: parameters gathered in inference mode could not be trained
        on afterwards.
        """
        net = self.model_wrapped if self.is_deepspeed_enabled else self.model
        training = net.training
        net.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # summed loss, supervised tokens
        zero3 = self.settings.deepspeed is not None and self.settings.zero == "3"
        with torch.no_grad() if zero3 else torch.inference_mode():
            for inputs in dataloader:
                self.reporter.pulse.beat(self.state.global_step)
                inputs = self._prepare_inputs(inputs)
                count = (inputs["labels"][:, 1:] != -100).sum()
                with self.compute_loss_context_manager(), self.without_logits():
                    mean = net(**inputs, num_items_in_batch=count.clamp(min=1)).loss
                total += torch.stack([mean.double() * count, count.double()])
        net.train(training)
        if self.args.world_size > 1:
            torch.distributed.all_reduce(total)
        mean = (total[0] / total[1]).item()
        metrics = {
            f"{metric_key_prefix}_loss": mean,
            f"{metric_key_prefix}_perplexity": math.exp(min(mean, 700.0)),
        }
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics=metrics, num_samples=len(self.eval_tokens or ())
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["loss"] = self.guard.mean(logs["loss"])
            logs.update(self.clock.measure(self.args))
            skipped = self.model_wrapped.skipped_steps if self.is_deepspeed_enabled else self.reporter.skipped_steps
            if skipped:
                logs["skipped_steps"] = skipped
        super().log(logs, start_time)


class Clock:
    """Measure tokens, seconds and memory between two log lines.

    The seconds run from one measurement to the next, the making of batches included; evaluation and saving are left out.
    So is what precedes the first step: data workers start there, and a resumed run passes over the batches it has had.
    """

    def __init__(self, settings, net):
        self.tokens, self.started = 0, None  # tokens: a tensor on the device once there is one; no sync per step
        self.total_tokens, self.total_seconds = 0, 0.0
        trainable, every = model.count_parameters(net)
        # Forward 2, backward 2 for the inputs and 2 for the weights that train (arXiv 2001.08361, section 2.1); the
        # attention products are left out, so the MFU is a lower bound.
        self.flops_per_token = 4 * every + 2 * trainable
        self.peak_flops = None if settings.use_cpu else hardware.peak_flops(torch.cuda.get_device_name())

    def start(self) -> None:
        """Begin the first interval; later ones begin where the last has ended."""
        if self.started is None:
            self.started = time.perf_counter()

    @contextlib.contextmanager
    def paused(self):
        """Leave the time of the body out."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # kernels that are still queued belong to the steps before
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.started is not None:
                self.started += time.perf_counter() - began

    def measure(self, args) -> dict[str, float]:
        now = time.perf_counter()
        seconds = 0.0 if self.started is None else now - self.started
        count = torch.as_tensor(self.tokens, dtype=torch.long, device=args.device).clone()
        if args.world_size > 1:
            torch.distributed.all_reduce(count)
        self.tokens, self.started = 0, now
        self.total_tokens += int(count)
        self.total_seconds += seconds
        speed = int(count) / seconds if seconds else 0.0
        found = {"tokens_per_second": round(speed, 1), "tokens_per_second_per_gpu": round(speed / args.world_size, 1)}
        if self.peak_flops:
            found["mfu"] = round(speed / args.world_size * self.flops_per_token / self.peak_flops, 4)
        return found | {"peak_memory_bytes": peak_memory_bytes(args)}


def peak_memory_bytes(args) -> int:
    """Highest of all ranks: torch.cuda.max_memory_allocated, on a CPU the process's peak resident memory."""
    if args.device.type == "cuda":
        peak = max(torch.cuda.max_memory_allocated(), memory.highest_before_resets())
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    value = torch.tensor(peak, dtype=torch.long, device=args.device)
    if args.world_size > 1:
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return int(value)


class Reporter(TrainerCallback):
    """Step lines on the terminal, metrics.jsonl and the resolved deepspeed.json."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.began, self.first_step, self.bar = trainer, time.perf_counter(), 0, None
        self.skipped_steps = 0  # by the loss scaler of stage 0; DeepSpeed's engine counts its own
        self.pulse = failure.Pulse()
        self.save_clock = checkpoint.Clock(trainer.settings.save_every_minutes)
        self.stopping = False  # the supervisor was asked to end; this step is saved and is the last
        self.before = None  # exact match before training, on the bundled task

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        if trainer.tokens.stream is not None:
            trainer.tokens.stream.resume(state.global_step)
        if trainer.is_deepspeed_enabled and args.process_index == 0:
            report.write_json(Path(args.output_dir) / "deepspeed.json", trainer.model_wrapped.config)
        quantized.verify_shares(trainer)
        if (sentence := offload.after_start(trainer)) and args.process_index == 0:
            print(f"  - {sentence}", flush=True)
        if trainer.train_collator.packed:
            trainer.prove_documents_apart()
        if probe.asked():  # after the proof, which may turn padding_free off
            probe.measure(trainer)
        if canary.asked():
            canary.measure(trainer)
        if trainer.settings.bundled:
            self.before = generate.exact_match(trainer)
            if args.process_index == 0:
                print(f"exact match before training: {self.before:.1%} of {len(trainer.eval_tokens)} held-out rows")
        trainer.seed_this_rank()  # a resumed run loads the saved states after this
        self.began, self.first_step = time.perf_counter(), state.global_step
        if args.process_index == 0 and wants_bar(trainer.settings):
            from tqdm import tqdm

            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, unit="step", leave=False, file=report.terminal()
            )

    def on_epoch_begin(self, args, state, control, **kwargs):
        # A run that is resumed within an epoch passes over its first batches through a wrapper of accelerate's, which does
        # not tell the sampler the epoch: it would go on in the order of the first one.
        trainer = self.trainer
        if trainer.tokens.stream is None:
            steps = len(trainer.train_sampler) // trainer.train_sampler.multiple
            trainer.train_sampler.set_epoch(state.global_step // steps)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.first_step and args.resume_from_checkpoint and args.ignore_data_skip:
            # Opening the data loader draws from the generator that was just restored; dropout must not notice.
            self.trainer._load_rng_state(args.resume_from_checkpoint)
        self.trainer.clock.start()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.guard.hold_back()

    def on_step_end(self, args, state, control, **kwargs):
        self.pulse.beat(state.global_step)
        self.skipped_steps += bool(self.trainer.accelerator.optimizer_step_was_skipped)
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)
        if state.global_step >= state.max_steps:
            control.should_log = True  # the last steps too, when logging_steps does not divide
        self.trainer.guard.after_step()
        if self.save_clock.is_due(state.global_step):
            control.should_save = True
        if self.pulse.is_last(state.global_step) and args.save_strategy != "no":
            control.should_save = control.should_training_stop = self.stopping = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if is_summary(logs):
            return
        if args.process_index == 0:
            with (Path(args.output_dir) / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
            line = self._line(state, logs)
            self.bar.write(line) if self.bar is not None else print(line, flush=True)
            if not math.isfinite(logs.get("eval_loss", 0.0)):
                print(f"note: step {state.global_step}: the evaluation loss is {logs['eval_loss']}", flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
        self.trainer.guard.at_end()

    def _line(self, state, logs) -> str:
        where = f"step {state.global_step}/{state.max_steps}"
        if "eval_loss" in logs:
            return f"{where}  eval loss {logs['eval_loss']:.4f}  perplexity {logs['eval_perplexity']:.3f}"
        words = [where, f"loss {logs['loss']:.4f}", f"lr {logs['learning_rate']:.2e}"]
        if logs.get("grad_norm") is not None:
            words.append(f"grad norm {logs['grad_norm']:.3f}")
        words.append(f"{logs['tokens_per_second']:,.0f} tok/s ({logs['tokens_per_second_per_gpu']:,.0f} per rank)")
        if "mfu" in logs:
            words.append(f"MFU {logs['mfu']:.1%}")
        words.append(f"peak {logs['peak_memory_bytes'] / 2**30:.2f} GiB")
        if "skipped_steps" in logs:
            words.append(f"skipped steps {logs['skipped_steps']}")
        done = state.global_step - self.first_step
        left = (time.perf_counter() - self.began) / max(1, done) * (state.max_steps - state.global_step)
        return "  ".join([*words, f"ETA {int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02}"])


def wants_bar(settings) -> bool:
    """Return whether to draw a progress bar: only where it does not share a terminal with the step lines."""
    return sys.stderr.isatty() and not sys.stdout.isatty() and not settings.disable_tqdm


def is_summary(logs: dict) -> bool:
    """Return whether these are transformers' numbers of the whole run; with --include_num_input_tokens_seen a step's log
    has train_runtime too."""
    return "train_runtime" in logs and not {"loss", "eval_loss"} & set(logs)


def evaluation_of_saved(trainer: KitTrainer) -> dict | None:
    """Return the metrics of the model that final/ holds: the last evaluation's, or those of a new one. All ranks call it.

    With --load_best_model_at_end the weights are an earlier step's, which the last evaluation has not seen.
    """
    state = trainer.state
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    if trainer.eval_dataset is None:
        return evaluations[-1] if evaluations else None
    best = trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None
    if evaluations and not best and evaluations[-1]["step"] == state.global_step:
        return evaluations[-1]
    return trainer.evaluate()


def finish(trainer: KitTrainer, started: float) -> None:
    """Save final/, evaluate, show sample generations, draw the curve and write result.json last. All ranks call it.

    Args: started: time.perf_counter() when training began.
    """
    args, settings = trainer.args, trainer.settings
    folder, first = Path(args.output_dir), args.process_index == 0
    train_seconds = time.perf_counter() - started
    final = folder / "final"
    trainer.model.config.use_cache = True  # off for training only
    trainer.save_model(str(final))  # collective: under ZeRO-3 every rank gives its share
    trainable, every = model.count_parameters(trainer.model)
    if first:
        adapters.saved_plain(trainer.model, final)
        (final / "training_args.bin").unlink(missing_ok=True)  # a pickle that no loader needs
        model.verify_saved(final, trainable if settings.recipe == "lora" else every)
        report.readable(final)
    evaluation = evaluation_of_saved(trainer)
    before = trainer.reporter.before
    after = generate.exact_match(trainer) if settings.bundled else None
    samples = generate.samples(trainer, settings.num_samples)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    clock = trainer.clock
    result = {
        "status": "finished",
        "recipe": settings.recipe,
        "steps": trainer.state.global_step,
        "steps_not_applied": trainer.guard.found,
        "train_loss": next((e["train_loss"] for e in reversed(trainer.state.log_history) if "train_loss" in e), None),
        "last_loss": losses[-1] if losses else None,
        "eval_loss": evaluation["eval_loss"] if evaluation else None,
        "world_size": args.world_size,
        "zero": settings.zero,
        "offload": settings.offload,
        "precision": settings.precision,
        "trainable_parameters": trainable,
        "parameters": every,
        "tokens": clock.total_tokens,
        "tokens_per_second": round(clock.total_tokens / clock.total_seconds, 1) if clock.total_seconds else None,
        "train_seconds": round(train_seconds, 2),
        "peak_memory_bytes": peak_memory_bytes(args),
        "peak_memory_of": "process (resident)" if settings.use_cpu else "GPU (allocated)",
        "final": str(final),
    }
    predicted = json.loads(os.environ.get(planner.PLANNED, "{}"))
    if first and predicted and "by" not in predicted and not settings.use_cpu:
        planner.remember(predicted, result["peak_memory_bytes"], folder)
    if settings.bundled:
        result |= {"exact_match_before": before, "exact_match_after": after}
    if settings.memory_report:
        memory_report.write(trainer)
    if not first:
        return
    if (folder / "metrics.jsonl").exists():
        report.plot_loss(
            folder / "metrics.jsonl",
            folder / "loss.png",
            f"{settings.recipe} on {', '.join(Path(d).name for d in settings.data)}",
        )
    for prompt, answer, wanted in samples:
        print(printable(f"\n  asked     {prompt}\n  answered  {answer}\n  wanted    {wanted}"))
    if settings.bundled:
        print(f"\nexact match on held-out rows: {before:.1%} before, {after:.1%} after")
    print(f"{'adapter' if settings.recipe == 'lora' else 'model'}: {final}")
    report.write_json(folder / "result.json", result)


def _how_it_stopped(args, step: int) -> str:
    """Return the sentence for a run that was asked to save and end."""
    folder = shlex.quote(str(args.output_dir))
    if args.save_only_model:
        return (
            f"stopped after step {step}; checkpoint-{step} holds the model without optimizer states (--save_only_model), so no run "
            f"goes on from it; `make export RUN={folder}/checkpoint-{step}` keeps it"
        )
    return f"stopped after step {step}, checkpoint-{step} is saved; `make resume RUN={folder}` goes on"


def run(trainer: KitTrainer) -> None:
    """Train, then finish; a failure is written to result.json before it goes on."""
    started = time.perf_counter()
    try:
        with memory_report.explained(trainer):
            trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
            if trainer.reporter.stopping:
                raise Stopped(_how_it_stopped(trainer.args, trainer.state.global_step))
            finish(trainer, started)
    except BaseException as error:
        folder = Path(trainer.args.output_dir)
        if isinstance(error, KeyboardInterrupt) and not failure.folder():  # else the supervisor says it
            error = KeyboardInterrupt(report.how_to_go_on("interrupted", folder, trainer.state.global_step))
        if trainer.args.process_index == 0 and not report.finished(folder):
            kinds = {Stopped: "stopped", KeyboardInterrupt: "interrupted"}
            status = {
                "status": kinds.get(type(error), "failed"),
                "error": f"{type(error).__name__}: {error}",
                "steps": trainer.state.global_step,
            }
            with contextlib.suppress(OSError):  # the disk may be full; the error itself must come through
                report.write_json(folder / "result.json", status)
        if not isinstance(error, UserError) and failure.disk_is_full(error):
            raise DiskFull(full_disk(folder)) from error
        raise error
