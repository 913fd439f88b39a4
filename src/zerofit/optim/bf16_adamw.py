"""AdamW with weights and states in bf16 and stochastic rounding, without an fp32 copy.

bf16 has 8 significant bits: rounding to nearest loses a change below 1/512 of a weight, and the slow decay of Adam's
second moment (at most 1/1000 per step with beta2 0.999). Stochastic rounding, up or down with the probability that
keeps the mean, preserves such changes on average (arXiv 2010.06192, section 3).
"""

import torch

CHUNK = 1 << 24  # elements per update: fp32 copies of a whole ZeRO partition would cost what bf16 saves


def round_(target: torch.Tensor, value: torch.Tensor, noise: torch.Tensor | None) -> None:
    """Round fp32 `value` into `target`, in place.

    Args: target: any dtype, shape of value; noise: int32 of the same shape, uniform in 0 .. 65535, for stochastic
        rounding to bf16; None rounds to nearest.
    """
    if target.dtype != torch.bfloat16 or noise is None:
        target.copy_(value)
        return
    # bf16 is the upper half of fp32: adding noise to the lower half carries into the upper with the right probability.
    bits = (value.view(torch.int32) + noise) & -65536
    target.copy_(torch.where(value.isfinite(), bits.view(torch.float32), value))


class Noise:
    """Random bits that depend only on seed, step, tensor and part, so that a resumed run repeats them.

    Args: part: index of the slice that this process updates: its rank under ZeRO, 0 for replicas, which must round
        equally.
    """

    def __init__(self, seed: int, part: int = 0):
        self.seed, self.part, self.numbers, self.generators = seed, part, {}, {}

    def number(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor, in the order of first calls."""
        return self.numbers.setdefault(tensor, len(self.numbers))

    def start(self, step: int, tensor: torch.Tensor) -> None:
        """Seed the generator for one tensor in one step."""
        # A CPU generator uses only the lower 32 bits of a seed: unique in a step for up to 65,537 parts per tensor.
        place = (self.seed * 1_000_003 + step) * 1_000_003 + self.number(tensor) * 65_537 + self.part
        if tensor.device not in self.generators:
            self.generators[tensor.device] = torch.Generator(tensor.device)
        self.generators[tensor.device].manual_seed(place % 2**63)

    def draw(self, like: torch.Tensor) -> torch.Tensor:
        """Return int32 with the shape of `like`, all 32 bits random."""
        generator = self.generators[like.device]
        return torch.randint(-(2**31), 2**31, like.shape, dtype=torch.int32, device=like.device, generator=generator)


def chunks(*tensors: torch.Tensor):
    """Yield flat views of CHUNK elements of every tensor in step; writes go to the tensors."""
    if all(t.is_contiguous() for t in tensors):
        tensors = [t.view(-1) for t in tensors]
    return zip(*(t.split(CHUNK) for t in tensors), strict=True)


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101), computed in fp32 by chunks; states have the dtype of the parameters.

    bf16 weights and second moments are rounded stochastically, first moments to nearest. With fp32 parameters it
    equals torch.optim.AdamW.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, seed=0, part=0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.noise = Noise(seed, part)

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], float(group["lr"])
            for p in group["params"]:
                self.noise.number(p)  # also without a gradient, so that a resumed run has the same indices
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                self.noise.start(state["step"], p)
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
