"""Sophia-G (arXiv 2305.14342): momentum divided by a diagonal curvature estimate, clipped per weight.

Algorithm 3 with the Gauss-Newton-Bartlett estimator (algorithm 2): every k steps, labels are sampled from the model's
predictions on the batch of the step, and the moving average h is updated with B * g * g; g is the gradient of the mean
loss over these B tokens.
"""

import contextlib

import torch
from accelerate.utils import send_to_device

from zerofit.model import attention
from zerofit.optim import bf16_adamw


class SophiaG(torch.optim.Optimizer):
    """The Sophia-G optimizer; set `sampled_tokens` for a step that only updates h.

    m = b1 m + (1-b1) g; h = b2 h + (1-b2) B g^2 every k steps; w = (1 - lr wd) w - lr clip(m / max(gamma h, eps), 1).
    It is elementwise and supports full parameters and ZeRO's flat partitions. Weights and states have the dtype of the
    parameters; bf16 weights and h (without fp32 master) are rounded stochastically, m to nearest.
    """

    def __init__(
        self, params, lr=1e-4, betas=(0.96, 0.99), gamma=0.05, eps=1e-12, weight_decay=0.0, k=10, seed=0, part=0
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "gamma": gamma, "eps": eps, "weight_decay": weight_decay})
        self.k, self.noise = k, bf16_adamw.Noise(seed, part)
        self.sampled_tokens = None  # if set, gradients belong to sampled labels, and step() only updates h

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        update = self._update_weights if self.sampled_tokens is None else self._update_hessian
        for group in self.param_groups:
            for p in group["params"]:
                self.noise.number(p)  # also without a gradient, so that a resumed run has the same indices
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "hessian": torch.zeros_like(p)}
                update(group, p, state)
        return loss

    def _update_hessian(self, group, p, state) -> None:
        self.noise.start(-1 - state["step"], p)
        beta = group["betas"][1]
        for g, h in bf16_adamw.chunks(p.grad, state["hessian"]):
            g = g.float()
            before = h.float()
            new = (before * beta).addcmul_(g, g, value=(1 - beta) * self.sampled_tokens)
            new = torch.where(new.isfinite(), new, before)  # train/nan_guard.py checks the batch later
            bf16_adamw.round_(h, new, self.noise.draw(h) & 0xFFFF if h.dtype == torch.bfloat16 else None)

    def _update_weights(self, group, p, state) -> None:
        state["step"] += 1
        self.noise.start(state["step"], p)
        lr, beta = float(group["lr"]), group["betas"][0]
        for w, g, m, h in bf16_adamw.chunks(p, p.grad, state["exp_avg"], state["hessian"]):
            m_new = m.float().lerp_(g.float(), 1 - beta)
            ratio = (m_new / (group["gamma"] * h.float()).clamp_(min=group["eps"])).clamp_(-1, 1)
            w_new = w.float().mul_(1 - lr * group["weight_decay"]).sub_(ratio, alpha=lr)
            m.copy_(m_new)
            bf16_adamw.round_(w, w_new, self.noise.draw(w) & 0xFFFF if w.dtype == torch.bfloat16 else None)


def sampled_labels(logits: torch.Tensor, labels: torch.Tensor, seed: int, documents=None) -> torch.Tensor:
    """Sample one token per position from the softmax of its logits.

    The draws for a document depend only on its labels and `seed`, not on the distribution of documents over ranks,
    micro batches and rows. Args: logits (batch, tokens, vocabulary); labels (batch, tokens), -100 if not supervised;
    documents: (start, end) of the documents in the only row, None: each row is a document.
    Returns: (batch, tokens).
    """
    drawn = torch.zeros_like(labels)
    for row, row_labels, row_drawn in zip(logits, labels, drawn, strict=True):
        for start, end in documents or [(0, len(row_labels))]:
            document_labels = row_labels[start:end]
            position = torch.arange(1, len(document_labels) + 1, device=labels.device)
            key = int((document_labels.clamp(min=0) * position).sum())
            generator = torch.Generator().manual_seed(hash((seed, key)) & 0x7FFFFFFF)
            uniform = torch.rand(len(document_labels), 1, generator=generator, dtype=torch.float64)
            cumulative = row[start:end].float().softmax(-1).cumsum(-1)
            tokens = torch.searchsorted(cumulative, uniform.to(row.device, torch.float32) * cumulative[:, -1:])
            row_drawn[start:end] = tokens.squeeze(-1)
    return drawn.clamp_(max=logits.shape[-1] - 1)


def estimate_if_due(trainer, batches: list[dict]) -> None:
    """Call `estimate` before steps 1, k + 1, 2 k + 1 ..."""
    if trainer.state.global_step % unwrapped(trainer.optimizer).k == 0:
        estimate(trainer, batches)


def estimate(trainer, batches: list[dict]) -> None:
    """Update h with one estimate from the micro batches of the next step; all ranks call it.

    Gradients of the sampled labels take the usual path (reduction by DDP or DeepSpeed, ZeRO's partitions and fp32
    master weights); only step() differs. Clipping would scale the estimate and is off for it; DeepSpeed's step counters
    are restored.
    """
    optimizer, model = unwrapped(trainer.optimizer), trainer.model_wrapped
    ranks, steps = trainer.args.world_size, trainer.state.global_step
    batches = [send_to_device(batch, trainer.args.device) for batch in batches]
    tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    if ranks > 1:
        torch.distributed.all_reduce(tokens)
    engine = model if trainer.is_deepspeed_enabled else None
    counters = {n: getattr(engine, n) for n in ("global_steps", "global_samples", "micro_steps")} if engine else {}
    if engine:
        clip, engine.optimizer.clip_grad = engine.optimizer.clip_grad, 0.0
    optimizer.sampled_tokens = int(tokens)
    model.train()
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        sync_context = contextlib.nullcontext() if engine or last else trainer.accelerator.no_sync(model)
        with sync_context:
            supervised = batch["labels"][:, 1:] != -100
            inputs = {k: v for k, v in batch.items() if k != "labels"}
            with trainer.compute_loss_context_manager():
                logits = model(**inputs).logits
            logits = logits[:, -batch["labels"].shape[1] : -1]  # virtual tokens of an adapter come first
            documents = attention.spans(batch["cu_seq_lens_q"]) if "cu_seq_lens_q" in batch else None
            labels = sampled_labels(logits.detach(), batch["labels"][:, 1:], trainer.args.seed + steps, documents)
            losses = torch.nn.functional.cross_entropy(logits[supervised].float(), labels[supervised], reduction="sum")
            loss = losses * ranks / tokens  # the reduction averages over the ranks
            if engine:
                engine.set_gradient_accumulation_boundary(is_boundary=last)
                engine.backward(loss, scale_wrt_gas=False)
            else:
                loss.backward()
    if engine:
        engine.step()
        engine.optimizer.clip_grad = clip
        for name, value in counters.items():
            setattr(engine, name, value)
    else:
        optimizer.step()
        model.zero_grad()
    optimizer.sampled_tokens = None


def unwrapped(optimizer) -> torch.optim.Optimizer:
    """Return the SophiaG inside the wrappers of accelerate and DeepSpeed."""
    while not isinstance(optimizer, SophiaG):
        optimizer = optimizer.optimizer
    return optimizer
