"""Stochastic rounding to bf16, and an AdamW whose weights and states are bf16 without an fp32 master copy.

bf16 keeps 8 bits: a change below 1/512 of a weight is lost when it is rounded to the nearest, and so is the slow decay
of Adam's second moment (beta2 0.999 moves it by at most 1/1000). Rounded up or down at random, with the probability
that keeps the mean, such changes arrive on average (arXiv 2010.06192, section 3).
"""

import torch

CHUNK = 1 << 24  # elements updated at once: the fp32 copies of a flat ZeRO partition would cost what bf16 saves


def round_(target: torch.Tensor, value: torch.Tensor, noise: torch.Tensor | None) -> None:
    """Write fp32 `value` into `target`, in place.

    Args: target: any type, shape of value;  noise: int32 of the same shape, uniform in 0 .. 65535: used when target is
        bf16; None rounds to the nearest.
    """
    if target.dtype != torch.bfloat16 or noise is None:
        target.copy_(value)
        return
    # bf16 is the upper half of fp32: adding noise to the lower half carries into the upper with the right probability.
    bits = (value.view(torch.int32) + noise) & -65536
    target.copy_(torch.where(value.isfinite(), bits.view(torch.float32), value))


class Noise:
    """Random bits that depend on seed and step alone: replicas on all ranks round alike, and a resumed run goes on as
    the uninterrupted one."""

    def __init__(self, seed: int):
        self.seed, self.generators = seed, {}

    def start(self, step: int) -> None:
        for generator in self.generators.values():
            generator.manual_seed(self.seed * 1_000_003 + step)
        self.step = step

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        """int32 of like's shape, all 32 bits random."""
        if like.device not in self.generators:
            generator = torch.Generator(like.device)
            self.generators[like.device] = generator.manual_seed(self.seed * 1_000_003 + self.step)
        generator = self.generators[like.device]
        return torch.randint(-(2**31), 2**31, like.shape, dtype=torch.int32, device=like.device, generator=generator)


def chunks(*tensors: torch.Tensor):
    """The same CHUNK of every tensor, flat, one after another; views, so writing into them writes into the tensors."""
    if all(t.is_contiguous() for t in tensors):
        tensors = [t.view(-1) for t in tensors]
    return zip(*(t.split(CHUNK) for t in tensors), strict=True)


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) computed in fp32 chunk by chunk; weights and states in the parameters' own type.

    bf16 weights and second moments are rounded stochastically, first moments to the nearest. With fp32 parameters it
    is torch.optim.AdamW.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, seed=0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.noise = Noise(seed)

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                self.noise.start(state["step"])
                correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
                for w, g, m, v in chunks(p, p.grad, state["exp_avg"], state["exp_avg_sq"]):
                    g = g.float()
                    m_new = m.float().lerp_(g, 1 - beta1)
                    v_new = v.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
                    w_new = w.float().mul_(1 - lr * group["weight_decay"])
                    w_new.addcdiv_(m_new, (v_new / correction2).sqrt_().add_(group["eps"]), value=-lr / correction1)
                    noise = self.noise.draw(w) if w.dtype == torch.bfloat16 else None
                    m.copy_(m_new)
                    round_(w, w_new, None if noise is None else noise & 0xFFFF)
                    round_(v, v_new, None if noise is None else (noise >> 16) & 0xFFFF)
        return loss
