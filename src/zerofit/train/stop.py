"""Let all ranks agree on the step after which to save and stop, or to publish a checkpoint; stop early."""

import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback
from typing_extensions import override


class Vote:
    """Vote among all ranks at the end of each step, and read the result one step later.

    The result has arrived by then, so neither the host nor a compute stream waits for it.
    Args: unanimous: whether all ranks must agree; by default one rank is enough.
    """

    def __init__(self, unanimous: bool = False):
        self._operation = dist.ReduceOp.MIN if unanimous else dist.ReduceOp.MAX
        self._result = None  # () -> whether the previous step's vote passed
        self._nccl = None  # state of `_vote_by_nccl`: the flag, its host copy, the stream

    def forget(self) -> None:
        """Discard the pending vote."""
        self._result = None

    def passes(self, approve: bool) -> bool:
        """Cast this rank's vote; return whether the previous vote passed, the same on every rank. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return approve
        previous = self._result is not None and self._result()
        self._result = (self._vote_by_nccl if dist.get_backend() == "nccl" else self._vote)(approve)
        return previous

    def _vote_by_nccl(self, approve: bool):
        if self._nccl is None:  # a single stream, as each has a memory pool
            flag, stream = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            self._nccl = flag, torch.empty(1, dtype=torch.int32, pin_memory=True), stream
        (flag, host, stream), copied = self._nccl, torch.cuda.Event()
        with torch.cuda.stream(stream):  # the stream of the step continues
            flag.fill_(int(approve))
            dist.all_reduce(flag, self._operation, async_op=True).wait()  # this stream waits, not the host
            host.copy_(flag, non_blocking=True)
            copied.record()

        def result() -> bool:
            copied.synchronize()
            return bool(host)

        return result

    def _vote(self, approve: bool):
        flag = torch.tensor([int(approve)])
        work = dist.all_reduce(flag, self._operation, async_op=True)

        def result() -> bool:
            work.wait()
            return bool(flag)

        return result


# --- early stopping ---


def early_stopping(settings) -> EarlyStoppingCallback | None:
    """Return the callback of `--early_stopping_patience`, None if not set."""
    if settings.early_stopping_patience is None:
        return None
    return _EarlyStopping(settings.early_stopping_patience, settings.early_stopping_threshold)


class _EarlyStopping(EarlyStoppingCallback):
    """transformers' callback; evaluations are equal on all ranks, so all stop after the same step.

    --restore_callback_states_from_checkpoint would also restore the stop of an earlier run by a signal.
    """

    @override
    def on_train_begin(self, args, state, control, **kwargs):
        # transformers writes the states of callbacks to trainer_state.json by class name.
        kept = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(kept, dict):
            self.early_stopping_patience_counter = kept["attributes"]["early_stopping_patience_counter"]

    @override
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        super().on_evaluate(args, state, control, metrics, **kwargs)
        count, patience = self.early_stopping_patience_counter, self.early_stopping_patience
        if count >= patience and args.process_index == 0 and state.global_step < state.max_steps:
            best = f"best value {state.best_metric:.4f}" if state.best_metric is not None else "no best value"
            print(
                f"early stopping: eval_{args.metric_for_best_model.removeprefix('eval_')} did not improve in {count} "
                f"evaluation{'s' * (count > 1)}, {best}: the run ends at step {state.global_step} of {state.max_steps}",
                flush=True,
            )
