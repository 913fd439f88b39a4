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
from zerofit.job import run_folder, stretches
from zerofit.model import generation, patches, quantization
from zerofit.model.experimental import compiled
from zerofit.model.load import count_parameters
from zerofit.optim import build
from zerofit.train import memory_report, memory_tracker, stop, trackers, trial

# Shown in step lines, if there.
SHOWN = ("perplexity", "exact_match", "kl", "rewards/margins", "rewards/accuracies", "preference_accuracy")


class ThroughputMeter:
    """Measure tokens, seconds and memory between two log lines.

    The seconds run from one measurement to the next, with the time to make batches and without evaluation and saving.
    Time before the first step is left out: data workers start then, and a resumed run skips the batches it has seen.
    """

    def __init__(self, settings, net):
        self.tokens, self.started = 0, None  # tokens: a device tensor after the first batch; no sync per step
        self.ranks_per_row = settings.ranks_per_row  # they count the same rows
        self.total_tokens, self.total_seconds = 0, 0.0
        self.pace = stragglers.Pace()
        self.of_ranks = []  # of the last interval, by rank: what Pace.take returns
        trainable_params, total_params = count_parameters(net)
        # Per weight: forward 2, backward 2 for the inputs and 2 for trainable weights (arXiv 2001.08361, section 2.1).
        # The attention products are left out, so the MFU is a lower bound.
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
        count = torch.as_tensor(self.tokens, dtype=torch.float64, device=args.device)
        of_ranks = torch.zeros(args.world_size, 5, dtype=torch.float64, device=args.device)
        of_ranks[args.process_index, 0] = count
        of_ranks[args.process_index, 1:] = of_ranks.new_tensor(self.pace.take(seconds))
        if args.world_size > 1:
            torch.distributed.all_reduce(of_ranks)
        count = int(of_ranks[:, 0].sum()) // self.ranks_per_row
        self.of_ranks = of_ranks[:, 1:].tolist()
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
        self.judge, self.judged = None, 0  # of the ranks' speed, up to this step
        self.save_clock = save.SaveTimer(trainer.settings.save_every_minutes)
        self.asked, self.vote, self.written = rank_status.StopRequest(), stop.Vote(), stop.Vote(of_all=True)
        self.stopping = False  # all ranks have agreed to stop: this step is saved and is the last
        self.before, self.before_step = None, 0  # the score before training, on the bundled task; after which step
        self.samples_before = {}  # {prompt: answer before training}
        self.has_told_memory = False  # memory_report.write_early

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
            trainer.prove_documents_apart()
        if trainer.sequence.size > 1:
            trainer.prove_slices()
        if trial.is_batch_search():  # after the packing check, which may turn padding_free off
            trial.measure_batch(trainer)
        if trial.is_canary():
            trial.measure_canary(trainer)
        trainer.objective.before_first_step()
        if args.process_index == 0:
            print(f"  - {model_sentence(trainer.settings, *trainer.numel)}", flush=True)
        self._look_before_training(args, state)
        if resumed := trainer.settings.resume_from_checkpoint:
            trainer.take_unlogged((read_facts(Path(resumed)) or {}).get("unlogged", {}))
        if args.save_strategy != "no":
            self.asked.listen()
        if trainer.settings.source["hang_timeout"] in ("default", "decided") and distributed.size() > 1:
            self.watch = phases.Watch(self.phases)
        if distributed.size() > 1:
            self._judge_ranks()
        trainer.seed_this_rank()  # a resumed run loads the saved RNG states after this
        if args.process_index == 0:
            trackers.remember(args.report_to, Path(args.output_dir))
        self.began, self.first_step = time.perf_counter(), state.global_step
        self.judged = state.global_step
        if args.process_index == 0 and wants_bar(trainer.settings):
            tqdm.monitor_interval = 0  # no separate thread that draws between two pieces of a line
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                leave=False,
                file=run_folder.terminal(),
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}% |{bar:30}| step {n}/{total}  {remaining} left{postfix}",
            )
            run_folder.keep_below(self.bar)

    def _look_before_training(self, args, state) -> None:
        """Measure what the end is compared with; a resumed run has it from its first start. Collective."""
        trainer, run = self.trainer, Path(args.output_dir)
        first, opened = args.process_index == 0, (run / "run.json").exists()
        if first and opened:
            run_folder.put_into_run(run, {"total_steps": state.max_steps})
        kept = stretches.beginning(run) if first and state.global_step else {}
        kept = distributed.broadcast(kept)
        self.before, self.before_step = kept.get("score"), 0 if kept else state.global_step
        self.samples_before = {one["prompt"]: one["answer"] for one in kept.get("samples", [])}
        if trainer.settings.bundled and self.before is None:
            self.before, self.before_step = trainer.score(), state.global_step
            if first:
                rows_of = f"{len(trainer.eval_tokens)} held-out rows"
                when = f"at step {state.global_step}" if state.global_step else "before training"
                print(f"{trainer.objective.score_name} {when}: {self.before:.1%} of {rows_of}")
        if state.global_step:
            return
        if trainer.settings.zero != 3:  # which would gather all weights for each token
            answered = generation.samples(trainer, trainer.settings.num_samples)
            self.samples_before = {prompt: answer for prompt, answer, _ in answered}
        if first and opened:
            samples = [{"prompt": prompt, "answer": answer} for prompt, answer in self.samples_before.items()]
            run_folder.put_into_run(run, {"before": {"score": self.before, "samples": samples}})

    def _tell_memory(self) -> None:
        """Write rank 0's memory by part into the run folder, once it is known."""
        trainer, tracker = self.trainer, self.trainer.tracker
        is_known = not trainer.settings.memory_report or tracker.steps >= tracker.followed_steps
        if is_known and not self.has_told_memory and (Path(trainer.args.output_dir) / "run.json").exists():
            self.has_told_memory = True
            memory_report.write_early(trainer)

    def _judge_ranks(self) -> None:
        """Begin to look for ranks that the others wait for. Collective."""
        settings = self.trainer.settings
        self.judge = stragglers.Judge(distributed.all_gather(f"node {distributed.node()}, {socket.gethostname()}"))
        exchanges = settings.zero == 3 or settings.ranks_per_row > 1  # within the forward, which then waits for others
        if not exchanges and not settings.torch_compile:  # which would compile the hooks too
            self.trainer.clock.pace.follow(self.trainer.model)

    def _tell_slow_ranks(self, args, steps: int) -> None:
        """Print which ranks are slow, and write it into run.json."""
        sentences = self.judge.add(self.trainer.clock.of_ranks, steps)
        for sentence in sentences:
            print(f"note: {sentence}", flush=True)
        if sentences:
            run_folder.add_to_run(Path(args.output_dir), "slow_ranks", sentences)

    def on_epoch_begin(self, args, state, control, **kwargs):
        # A run resumed within an epoch skips its first batches through a wrapper of accelerate's that does not set the
        # sampler's epoch: the rows would keep the order of the first epoch.
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
            control.should_log = True  # the last steps too, when logging_steps does not divide max_steps
        self.trainer.guard.after_step()
        if state.global_step == self.first_step + 1 and args.process_index == 0 and torch.cuda.is_initialized():
            memory_tracker.keep_outside_allocator(Path(args.output_dir))
        if (new := self.trainer.unpublished) is not None and self.written.passes(new.is_written):
            self.trainer.publish_checkpoint()
        if self.save_clock.is_due(state.global_step):
            control.should_save = True
        if args.save_strategy != "no" and self.vote.passes(self.asked.received is not None):
            control.should_save = control.should_training_stop = self.stopping = True
        if control.should_log and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # logging would, where a step that hangs is not in its phase any more
        self.phases.enter(phases.ELSE)

    def evaluating(self, batches):
        """Yield the batches of an evaluation, each of which is a phase and a beat."""
        for batch in batches:
            self.heartbeat.beat(self.trainer.state.global_step)
            self.phases.enter(phases.EVALUATION)
            yield batch
        self.phases.enter(phases.ELSE)

    def on_save(self, args, state, control, **kwargs):
        self.written.forget()  # of the save before

    def on_log(self, args, state, control, logs=None, **kwargs):
        if is_summary(logs):
            return
        if args.process_index == 0:
            with paths.appending(Path(args.output_dir) / run_folder.METRICS) as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
            self._tell_memory()
            if self.bar is not None and "loss" in logs:
                self.bar.set_postfix_str(f"loss {logs['loss']:.4f}", refresh=False)
            print(self._line(state, logs), flush=True)
            if self.judge is not None and "loss" in logs:
                self._tell_slow_ranks(args, state.global_step - self.judged)
                self.judged = state.global_step
            if not math.isfinite(logs.get("eval_loss", 0.0)):
                print(f"note: step {state.global_step}: the evaluation loss is {logs['eval_loss']}", flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        self.trainer.guard.at_end()
        compiled.tell_at_end(self.trainer.settings)
        if args.process_index == 0 and {"mlflow", "dagshub"} & set(args.report_to):
            import mlflow

            # transformers' callback has ended its run; an evaluation of final/ continues it instead of a new one.
            if run := mlflow.last_active_run():
                os.environ["MLFLOW_RUN_ID"] = run.info.run_id

    def close(self) -> None:
        """End the watch, and remove the progress line; what follows is printed as usual."""
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
    """Return a sentence on the model, whether the user named it, and how many of its parameters train."""
    by_default = settings.source["model"] == "bundled task" and not settings.bundled
    unnamed = " (the bundled one: no other is named with --model)" if by_default else ""
    share = "all of them train" if trainable == total else f"{trainable:,} of them train ({trainable / total:.2%})"
    return f"model: {paths.from_here(settings.model)}{unnamed}; {total:,} parameters, {share}"


def wants_bar(settings) -> bool:
    """Return whether to draw a live progress line, on a terminal."""
    return sys.stderr.isatty() and not settings.disable_tqdm


def is_summary(logs: dict) -> bool:
    """Return whether these logs are transformers' summary of the whole run.

    train_runtime alone does not tell: a step's log has it too with --include_num_input_tokens_seen.
    """
    return "train_runtime" in logs and not {"loss", "eval_loss"} & set(logs)
