"""Let all ranks agree on a step: to save and end after it, or to publish what they have all written; stop early."""

import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback
from typing_extensions import override


class Vote:
    """Ask all ranks at the end of each step whether one of them, or all, want something; read it a step later.

    By then the answer has come: neither the host nor a stream that computes waits for it.
    Args: of_all: whether all must want it; default: one rank is enough.
    """

    def __init__(self, of_all: bool = False):
        self._operation = dist.ReduceOp.MIN if of_all else dist.ReduceOp.MAX
        self._answer = None  # of the step before: () -> whether it passed
        self._nccl = None  # what `_ask_by_nccl` keeps: the flag, its copy on the host, the stream

    def forget(self) -> None:
        """Begin anew: what was asked before is not answered."""
        self._answer = None

    def passes(self, wanted: bool) -> bool:
        """Return whether it passed at the step before, the same on every rank. Collective.

        Args: wanted: whether this rank wants it.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return wanted
        last = self._answer is not None and self._answer()
        self._answer = (self._ask_by_nccl if dist.get_backend() == "nccl" else self._ask)(wanted)
        return last

    def _ask_by_nccl(self, wanted: bool):
        if self._nccl is None:  # one stream, as each has a pool of memory of its own
            flag, stream = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            self._nccl = flag, torch.empty(1, dtype=torch.int32, pin_memory=True), stream
        (flag, host, stream), copied = self._nccl, torch.cuda.Event()
        with torch.cuda.stream(stream):  # that of the step goes on
            flag.fill_(int(wanted))
            dist.all_reduce(flag, self._operation, async_op=True).wait()  # this stream waits, not the host
            host.copy_(flag, non_blocking=True)
            copied.record()

        def answer() -> bool:
            copied.synchronize()
            return bool(host)

        return answer

    def _ask(self, wanted: bool):
        flag = torch.tensor([int(wanted)])
        work = dist.all_reduce(flag, self._operation, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(flag)

        return answer


# --- early stopping ---


def early(settings) -> EarlyStoppingCallback | None:
    """Return the callback of `--early_stopping_patience`; None without."""
    if settings.early_stopping_patience is None:
        return None
    return _EarlyStopping(settings.early_stopping_patience, settings.early_stopping_threshold)


class _EarlyStopping(EarlyStoppingCallback):
    """transformers' callback; evaluations are alike on all ranks, so all stop after the same step.

    --restore_callback_states_from_checkpoint would also restore that a signal had stopped the earlier run.
    """

    @override
    def on_train_begin(self, args, state, control, **kwargs):
        # transformers writes the states of callbacks under the names of their classes into trainer_state.json.
        kept = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(kept, dict):
            self.early_stopping_patience_counter = kept["attributes"]["early_stopping_patience_counter"]

    @override
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        super().on_evaluate(args, state, control, metrics, **kwargs)
        count, patience = self.early_stopping_patience_counter, self.early_stopping_patience
        if count >= patience and args.process_index == 0 and state.global_step < state.max_steps:
            best = f"its best is {state.best_metric:.4f}" if state.best_metric is not None else "it has no best"
            print(
                f"early stopping: eval_{args.metric_for_best_model.removeprefix('eval_')} did not improve in {count} "
                f"evaluation{'s' * (count > 1)}, {best}: the run ends at step {state.global_step} of {state.max_steps}",
                flush=True,
            )
