"""Stop a run whose evaluations no longer improve: transformers' own callback, with a count that a resume keeps."""

from transformers import EarlyStoppingCallback
from typing_extensions import override


def callback(settings) -> EarlyStoppingCallback | None:
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
