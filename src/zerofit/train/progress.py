"""Step lines, metrics.jsonl and throughput while a run trains."""

import contextlib
import json
import math
import os
import socket
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Trainer, TrainerCallback

from zerofit.base import distributed, hardware, paths, phases, rank_status, stragglers
from zerofit.checkpoint import save
from zerofit.checkpoint.facts import read_facts
from zerofit.config import offload
from zerofit.job import run_folder, run_segments
from zerofit.model import generation, patches, quantization
from zerofit.model.experimental import compiled
from zerofit.model.load import count_parameters
from zerofit.optim import build
from zerofit.train import memory_report, memory_tracker, stop, trackers, trial

# Metrics of step lines.
SHOWN = ("perplexity", "exact_match", "kl", "rewards/margins", "rewards/accuracies", "preference_accuracy")


class ThroughputMeter:
    """Measure tokens, seconds and memory between two log lines.

    The seconds run from one measurement to the next, including data loading and excluding evaluation and saving. They
    exclude the time before the first step, when data workers start and a resumed run skips earlier batches.
    """

    def __init__(self, settings, net):
        self.tokens, self.started = 0, None  # tokens: a device tensor after the first batch; no sync per step
        self.ranks_per_row = settings.ranks_per_row  # ranks that count the same rows
        self.total_tokens, self.total_seconds = 0, 0.0
        self.pace = stragglers.Pace()
        self.rank_paces = []  # results of Pace.take in the last interval, by rank
        trainable_params, total_params = count_parameters(net)
        # Per weight: forward 2, backward 2 for the inputs and 2 for trainable weights (arXiv 2001.08361, section 2.1).
        # Attention products are not counted, so the MFU is a lower bound.
        self.flops_per_token = 4 * total_params + 2 * trainable_params
        self.peak_flops = None if settings.use_cpu else hardware.peak_flops(torch.cuda.get_device_name())

    def start(self) -> None:
        """Start the first interval; later ones start where the previous one ended."""
        if self.started is None:
            self.started = time.perf_counter()

    def count(self, inputs: dict) -> None:
        """Count the tokens of a batch, without padding."""
        mask = inputs.get("attention_mask")
        self.tokens = self.tokens + (mask.sum() if mask is not None else inputs["input_ids"].numel())

    @contextlib.contextmanager
    def paused(self):
        """Exclude the time of the body."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # queued kernels belong to the steps before
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.started is not None:
                self.started += time.perf_counter() - began

    def measure(self, args) -> dict[str, float]:
        now = time.perf_counter()
        seconds = 0.0 if self.started is None else now - self.started
        count = torch.as_tensor(self.tokens, dtype=torch.float64, device=args.device)
        values = torch.zeros(args.world_size, 5, dtype=torch.float64, device=args.device)
        values[args.process_index, 0] = count
        values[args.process_index, 1:] = values.new_tensor(self.pace.take(seconds))
        if args.world_size > 1:
            torch.distributed.all_reduce(values)
        count = int(values[:, 0].sum()) // self.ranks_per_row
        self.rank_paces = values[:, 1:].tolist()
        self.tokens, self.started = 0, now
        self.total_tokens += count
        self.total_seconds += seconds
        speed = count / seconds if seconds else 0.0
        metrics = {"tokens_per_second": round(speed, 1), "tokens_per_second_per_gpu": round(speed / args.world_size, 1)}
        if self.peak_flops:
            metrics["mfu"] = round(speed / args.world_size * self.flops_per_token / self.peak_flops, 4)
        return metrics | {"peak_memory_bytes": memory_tracker.peak_memory_bytes(args)}


class Reporter(TrainerCallback):
    """Print step lines; write metrics.jsonl and the resolved deepspeed.json."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.began, self.first_step, self.bar = trainer, time.perf_counter(), 0, None
        self.skipped_steps = 0  # by stage 0's loss scaler; DeepSpeed's engine counts its own
        self.heartbeat = rank_status.Heartbeat()
        self.phases, self.watch = phases.Phases(self.heartbeat), None
        self.stragglers, self.stragglers_step = None, 0  # detector of slow ranks, its last step
        self.save_clock = save.SaveTimer(trainer.settings.save_every_minutes)
        self.stop_request, self.vote, self.written = rank_status.StopRequest(), stop.Vote(), stop.Vote(unanimous=True)
        self.stopping = False  # all ranks have agreed to stop: this step is saved and is the last
        self.before, self.before_step = None, 0  # first score on the bundled task, and its step
        self.samples_before = {}  # {prompt: answer before training}
        self.memory_written = False  # memory_report.write_early

    def on_train_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        patches.check_attributes(trainer, "_tr_loss", "_globalstep_last_logged")
        patches.check_attributes(trainer.optimizer, "_is_overflow")
        if trainer.tokens.stream is not None:
            trainer.tokens.stream.resume(state.global_step)
        if trainer.is_deepspeed_enabled and args.process_index == 0:
            run_folder.write_json(Path(args.output_dir) / "deepspeed.json", trainer.model_wrapped.config)
        if trainer.is_deepspeed_enabled:
            trainer.guard.watch_engine()
            if state.global_step == 0:
                build.forget_initial_step(trainer.optimizer.optimizer)
        quantization.verify_shares(trainer)
        if (sentence := offload.after_start(trainer)) and args.process_index == 0:
            print(f"  - {sentence}", flush=True)
        if trainer.train_collator.packed:
            trainer.check_no_cross_document_attention()
        if trainer.sequence.size > 1:
            trainer.check_row_splitting()
        if trial.is_batch_search():  # after the packing check, which may turn padding_free off
            trial.measure_batch(trainer)
        if trial.is_canary():
            trial.measure_canary(trainer)
        trainer.objective.before_first_step()
        if args.process_index == 0:
            print(f"  - {model_sentence(trainer.settings, *trainer.numel)}", flush=True)
        self._evaluate_before_training(args, state)
        if resumed := trainer.settings.resume_from_checkpoint:
            trainer.restore_log_state((read_facts(Path(resumed)) or {}).get("unlogged", {}))
        if args.save_strategy != "no":
            self.stop_request.listen()
        if trainer.settings.source["hang_timeout"] in ("default", "decided") and distributed.size() > 1:
            self.watch = phases.HangDetector(self.phases)
        if distributed.size() > 1:
            self._detect_stragglers()
        trainer.seed_this_rank()  # a resumed run loads the saved RNG states after this
        if args.process_index == 0:
            trackers.remember(args.report_to, Path(args.output_dir))
        self.began, self.first_step = time.perf_counter(), state.global_step
        self.stragglers_step = state.global_step
        if args.process_index == 0 and wants_bar(trainer.settings):
            tqdm.monitor_interval = 0  # no monitor thread that draws within a line
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                leave=False,
                file=run_folder.terminal(),
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}% |{bar:30}| step {n}/{total}  {remaining} left{postfix}",
            )
            run_folder.keep_below(self.bar)

    def _evaluate_before_training(self, args, state) -> None:
        """Measure the first score and samples; a resumed run reads them from its first start. Collective."""
        trainer, run = self.trainer, Path(args.output_dir)
        first, opened = args.process_index == 0, (run / "run.json").exists()
        if first and opened:
            run_folder.put_into_run(run, {"total_steps": state.max_steps})
        kept = run_segments.first_start(run) if first and state.global_step else {}
        kept = distributed.broadcast(kept)
        self.before, self.before_step = kept.get("score"), 0 if kept else state.global_step
        self.samples_before = {sample["prompt"]: sample["answer"] for sample in kept.get("samples", [])}
        if trainer.settings.bundled and self.before is None:
            self.before, self.before_step = trainer.score(), state.global_step
            if first:
                when = f"at step {state.global_step}" if state.global_step else "before training"
                rows = f"{len(trainer.eval_tokens)} held-out rows"
                print(f"{trainer.objective.score_name} {when}: {self.before:.1%} of {rows}")
        if state.global_step:
            return
        if trainer.settings.zero != 3:  # ZeRO-3 gathers all weights for each token
            samples = generation.samples(trainer, trainer.settings.num_samples)
            self.samples_before = {prompt: answer for prompt, answer, _ in samples}
        if first and opened:
            samples = [{"prompt": prompt, "answer": answer} for prompt, answer in self.samples_before.items()]
            run_folder.put_into_run(run, {"before": {"score": self.before, "samples": samples}})

    def _write_memory(self) -> None:
        """Write rank 0's memory by part into the run folder, once it is known."""
        trainer, tracker = self.trainer, self.trainer.tracker
        is_known = not trainer.settings.memory_report or tracker.steps >= tracker.followed_steps
        if is_known and not self.memory_written and (Path(trainer.args.output_dir) / "run.json").exists():
            self.memory_written = True
            memory_report.write_early(trainer)

    def _detect_stragglers(self) -> None:
        """Start to detect slow ranks that the others wait for. Collective."""
        settings = self.trainer.settings
        self.stragglers = stragglers.Detector(
            distributed.all_gather(f"node {distributed.node()}, {socket.gethostname()}")
        )
        exchanges = settings.zero == 3 or settings.ranks_per_row > 1  # the forward waits for other ranks
        if not exchanges and not settings.torch_compile:  # it would compile the hooks
            self.trainer.clock.pace.follow(self.trainer.model)

    def _report_slow_ranks(self, args, steps: int) -> None:
        """Print slow ranks, and write them into run.json."""
        sentences = self.stragglers.add(self.trainer.clock.rank_paces, steps)
        for sentence in sentences:
            print(f"note: {sentence}", flush=True)
        if sentences:
            run_folder.add_to_run(Path(args.output_dir), "slow_ranks", sentences)

    def on_epoch_begin(self, args, state, control, **kwargs):
        # A run resumed within an epoch skips batches through a wrapper of accelerate that does not set the sampler's
        # epoch: the rows would keep the order of the first epoch.
        trainer = self.trainer
        if trainer.tokens.stream is None:
            steps = len(trainer.train_sampler) // trainer.train_sampler.multiple
            trainer.train_sampler.set_epoch(state.global_step // steps)

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.clock.start()
        self.phases.enter(phases.STEP)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.guard.hold_back()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.guard.look_back()

    def on_step_end(self, args, state, control, **kwargs):
        self.heartbeat.beat(state.global_step)
        self.skipped_steps += bool(self.trainer.accelerator.optimizer_step_was_skipped)
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)
        if state.global_step >= state.max_steps:
            control.should_log = True  # also if logging_steps does not divide max_steps
        self.trainer.guard.after_step()
        if state.global_step == self.first_step + 1 and args.process_index == 0 and torch.cuda.is_initialized():
            memory_tracker.keep_outside_allocator(Path(args.output_dir))
        if (new := self.trainer.pending_checkpoint) is not None and self.written.passes(new.is_written):
            self.trainer.publish_checkpoint()
        if self.save_clock.is_due(state.global_step):
            control.should_save = True
        if args.save_strategy != "no" and self.vote.passes(self.stop_request.received is not None):
            control.should_save = control.should_training_stop = self.stopping = True
        if control.should_log and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a hanging step must hang in its phase, not in logging
        self.phases.enter(phases.OTHER_PHASE)

    def evaluating(self, batches):
        """Yield the batches of an evaluation, with a phase and a heartbeat for each."""
        for batch in batches:
            self.heartbeat.beat(self.trainer.state.global_step)
            self.phases.enter(phases.EVALUATION)
            yield batch
        self.phases.enter(phases.OTHER_PHASE)

    def on_save(self, args, state, control, **kwargs):
        self.written.forget()  # the votes of the previous save

    def on_log(self, args, state, control, logs=None, **kwargs):
        if is_summary(logs):
            return
        if args.process_index == 0:
            with paths.appending(Path(args.output_dir) / run_folder.METRICS) as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
            self._write_memory()
            if self.bar is not None and "loss" in logs:
                self.bar.set_postfix_str(f"loss {logs['loss']:.4f}", refresh=False)
            print(self._line(state, logs), flush=True)
            if self.stragglers is not None and "loss" in logs:
                self._report_slow_ranks(args, state.global_step - self.stragglers_step)
                self.stragglers_step = state.global_step
            if not math.isfinite(logs.get("eval_loss", 0.0)):
                print(f"note: step {state.global_step}: the evaluation loss is {logs['eval_loss']}", flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        self.trainer.guard.at_end()
        compiled.report_at_end(self.trainer.settings)
        if args.process_index == 0 and {"mlflow", "dagshub"} & set(args.report_to):
            import mlflow

            # transformers' callback has ended its run; a later evaluation of final/ continues it.
            if run := mlflow.last_active_run():
                os.environ["MLFLOW_RUN_ID"] = run.info.run_id

    def close(self) -> None:
        """End the watch, and remove the progress line."""
        if self.watch is not None:
            self.watch.done.set()
        if self.bar is not None:
            run_folder.keep_below(None)
            self.bar.close()
            self.bar = None

    def _line(self, state, logs) -> str:
        position = f"step {state.global_step}/{state.max_steps}"
        if "eval_loss" in logs:
            shown = (f"{name.replace('_', ' ')} {logs[f'eval_{name}']:.3f}" for name in SHOWN if f"eval_{name}" in logs)
            return "  ".join([f"{position}  eval loss {logs['eval_loss']:.4f}", *shown])
        fields = [position, f"loss {logs['loss']:.4f}", f"lr {logs['learning_rate']:.2e}"]
        if logs.get("grad_norm") is not None:
            fields.append(f"grad norm {logs['grad_norm']:.3f}")
        fields += [f"{name} {logs[name]:.3f}" for name in SHOWN if name in logs]
        per_rank = f" ({logs['tokens_per_second_per_gpu']:,.0f} per rank)" * (self.trainer.settings.world_size > 1)
        fields.append(f"{logs['tokens_per_second']:,.0f} tok/s{per_rank}")
        if "mfu" in logs:
            fields.append(f"MFU {logs['mfu']:.1%}")
        fields.append(f"peak {logs['peak_memory_bytes'] / 2**30:.2f} GiB")
        if "skipped_steps" in logs:
            fields.append(f"skipped steps {logs['skipped_steps']}")
        steps_done = state.global_step - self.first_step
        at_most = "at most " * (self.trainer.settings.early_stopping_patience is not None)
        seconds_left = (time.perf_counter() - self.began) / max(1, steps_done) * (state.max_steps - state.global_step)
        clock = f"{int(seconds_left) // 3600}:{int(seconds_left) // 60 % 60:02}:{int(seconds_left) % 60:02}"
        return "  ".join([*fields, f"ETA {at_most}{clock}"])


def model_sentence(settings, trainable: int, total: int) -> str:
    """Return a sentence about the model, its source and its trainable parameters."""
    by_default = settings.source["model"] == "bundled task" and not settings.bundled
    unnamed = " (the bundled model: --model is not set)" if by_default else ""
    share = "all trainable" if trainable == total else f"{trainable:,} trainable ({trainable / total:.2%})"
    return f"model: {paths.from_here(settings.model)}{unnamed}; {total:,} parameters, {share}"


def wants_bar(settings) -> bool:
    """Return whether to draw a live progress line (on a terminal only)."""
    return sys.stderr.isatty() and not settings.disable_tqdm


def is_summary(logs: dict) -> bool:
    """Return whether these logs are transformers' summary of the run.

    With --include_num_input_tokens_seen, the log of a step also has train_runtime.
    """
    return "train_runtime" in logs and not {"loss", "eval_loss"} & set(logs)
