"""What other training loops do with outputs and logits, for simulated trainers (see `simulate.question`)."""


def keeps_outputs(trainer) -> None:
    """Hold the model's outputs until the next forward or the end of the step."""
    from transformers import TrainerCallback

    kept = [None]

    class Release(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            kept[0] = None

    def keep(module, args, output):
        kept[0] = output

    trainer.model.register_forward_hook(keep)
    trainer.add_callback(Release())


def copies_logits(trainer) -> None:
    """Compute the loss as transformers 4.48 did for several rows: from a contiguous fp32 copy without each row's last.

    loss/loss_utils.py, ForCausalLMLoss. Rows that lie in one, without padding, would not need the copy.
    """
    from transformers.loss.loss_utils import fixed_cross_entropy

    def loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
        logits = logits.float()
        shifted = logits[..., :-1, :].clone()
        target = labels[..., 1:].contiguous()
        return fixed_cross_entropy(
            shifted.view(-1, vocab_size), target.view(-1), num_items_in_batch, ignore_index, **kwargs
        )

    model = trainer.model
    (model.get_base_model() if hasattr(model, "get_base_model") else model).loss_function = loss


def overwrites_logits(trainer) -> None:
    """Compute the loss as fms-acceleration's kernel does below transformers 4.46: its gradient overwrites the logits.

    The model returns an fp32 copy of the logits; the kernel (kernels/unsloth/cross_entropy_loss.py) gets another one
    without each row's last.
    """
    import torch

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, labels):
            losses, sums = (logits.new_zeros(len(logits)) for _ in range(2))
            ctx.save_for_backward(logits, sums, labels)
            return losses

        @staticmethod
        def backward(ctx, _):
            return ctx.saved_tensors[0], None

    def loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
        shifted = logits[..., :-1, :].clone()
        return InPlace.apply(shifted.view(-1, vocab_size), labels[..., 1:].reshape(-1)).sum()

    model = trainer.model
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    model.loss_function = loss
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output.float())
