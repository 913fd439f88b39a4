"""Page the states of bitsandbytes' paged optimizers again after a checkpoint was loaded."""

from transformers import TrainerCallback


class PageStates(TrainerCallback):
    """Moves loaded states into memory that CUDA pages.

    Loading makes plain GPU memory of them (bitsandbytes 0.50.2, Optimizer8bit.load_state_dict; checkpoint/reshard.py):
    a run that fits because its states move to host memory would not fit after a resume.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def on_step_begin(self, *args, **kwargs):
        """Look at all states: a checkpoint is also loaded in the middle of a run, after losses that are not finite."""
        for parameter, state in self.optimizer.state.items():
            for name in {"state1", "state2"} & state.keys():
                # smaller ones are not paged, as in get_state_buffer
                if state[name].device.type == "cuda" and parameter.numel() >= 1e5:
                    paged = self.optimizer.get_state_buffer(parameter, state[name].dtype)
                    paged.copy_(state[name])
                    state[name] = paged
