"""Page the states of bitsandbytes' paged optimizers again after loading a checkpoint."""

from transformers import TrainerCallback


class PageStates(TrainerCallback):
    """Move loaded states into paged CUDA memory.

    Loading puts them into plain GPU memory (bitsandbytes 0.50.2, Optimizer8bit.load_state_dict; checkpoint/reshard.py).
    A run that fits because its states move to host memory would not fit after a resume.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def on_step_begin(self, *args, **kwargs):
        """Check all states in each step: a checkpoint is also loaded during a run, after non-finite losses."""
        for parameter, state in self.optimizer.state.items():
            for name in {"state1", "state2"} & state.keys():
                # get_state_buffer does not page smaller ones
                if state[name].device.type == "cuda" and parameter.numel() >= 1e5:
                    paged = self.optimizer.get_state_buffer(parameter, state[name].dtype)
                    paged.copy_(state[name])
                    state[name] = paged
