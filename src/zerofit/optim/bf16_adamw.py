"""AdamW with weights and states in bf16 and stochastic rounding, without an fp32 copy.

bf16 has 8 significant bits: rounding to nearest loses a change below 1/512 of a weight, and the slow decay of Adam's
second moment (at most 1/1000 per step with beta2 0.999). Stochastic rounding, up or down with the probability that
keeps the mean, preserves such changes on average (arXiv 2010.06192, section 3).
"""

import functools

import torch
from torch import _inductor

from zerofit.base import distributed
from zerofit.base.errors import first_line

CHUNK = 1 << 24  # elements per update; fp32 copies of a full ZeRO partition would use up the saved memory


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

    Args: part: index of this process's slice: its rank under ZeRO, 0 for replicas, which must round equally.
    """

    def __init__(self, seed: int, part: int = 0):
        self.seed, self.part, self.numbers, self.generators = seed, part, {}, {}

    def number(self, tensor: torch.Tensor) -> int:
        """Return the index of a tensor in the order of first calls."""
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
    """Yield tuples of flat views of CHUNK elements of the tensors."""
    if all(t.is_contiguous() for t in tensors):
        tensors = [t.view(-1) for t in tensors]
    return zip(*(t.split(CHUNK) for t in tensors), strict=True)


def update_(w, g, m, v, noise, decay, keep1, take1, keep2, take2, correction2, rate, eps) -> None:
    """Apply one step of AdamW to a chunk of weights and moments, in place.

    Each product, sum, quotient and root is rounded separately (lerp, addcmul and addcdiv fuse two of them on some
    devices), so compiled and uncompiled results are equal.

    Args: noise: int32 of the same shape, all bits random, or None to round to nearest; others: fp32 scalars on the
        device of the chunk (Python numbers would be compiled into the kernel, a new kernel for each step).
    """
    g = g.float()
    m_new = m.float().mul_(keep1).add_(g * take1)
    v_new = v.float().mul_(keep2).add_((g * g).mul_(take2))
    w_new = w.float().mul_(decay)
    w_new.sub_((m_new * rate).div_((v_new / correction2).sqrt_().add_(eps)))
    m.copy_(m_new)
    round_(w, w_new, None if noise is None else noise & 0xFFFF)
    round_(v, v_new, None if noise is None else (noise >> 16) & 0xFFFF)


@functools.cache
def compiled_update():
    """Return update_ as one kernel, compiled at its first call, without multiply-adds or approximations."""
    exact = ("emulate_precision_casts", "eager_numerics.division_rounding")  # the first disables multiply-adds
    known = _inductor.list_options()
    return torch.compile(update_, dynamic=True, options={name: True for name in exact if name in known})


@torch.no_grad()
def why_not_compiled(device: torch.device) -> str | None:
    """Compile the update and compare a small one with Python's; return the problem or None."""
    results, size = [], 4099  # not a multiple of a block
    for update in (update_, compiled_update()):
        noise = Noise(0)
        generator = torch.Generator(device).manual_seed(0)
        tensors = [torch.randn(size, device=device, generator=generator).bfloat16() for _ in range(4)]
        noise.start(1, tensors[0])
        scalars = _scalars(device, 1, 1e-3, (0.9, 0.999), 1e-8, 0.01)
        tensors[3].abs_()
        try:
            for first in (0, 16):  # later chunks begin inside a tensor
                update(*(t[first:] for t in tensors), noise.draw(tensors[0][first:]), *scalars)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # e.g. a missing compiler, driver or library
            return f"{type(error).__name__}: {first_line(error)}"
        results.append(torch.cat(tensors))
    # A few fp32 values may differ in the last bit; one in 65,536 of these is rounded to the other neighbor.
    different = (results[0] != results[1]).sum().item()
    if different > 4 or not torch.allclose(*(r.float() for r in results), rtol=2**-6, atol=1e-6):
        return f"{different} of {4 * size} numbers of a test differ from Python's"
    return None


def _scalars(device, step: int, lr: float, betas, eps: float, weight_decay: float) -> list[torch.Tensor]:
    """Return the scalars of update_, filled in on the device without a synchronization."""
    beta1, beta2 = betas
    values = (1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, 1 - beta2**step, lr / (1 - beta1**step), eps)
    return [torch.full((), value, dtype=torch.float32, device=device) for value in values]


class AdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101), computed in fp32 by chunks; states have the dtype of the parameters.

    bf16 weights and second moments are rounded stochastically, first moments to nearest. With fp32 parameters the
    result equals torch.optim.AdamW. torchao's AdamW with bf16_stochastic_round is also one kernel, but it rounds second
    moments to nearest, draws from the global generator, and is private.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, seed=0, part=0, compiled=False):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.noise, self.compiled = Noise(seed, part), compiled

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            scalars = {}  # (device, step) -> scalars
            for p in group["params"]:
                self.noise.number(p)  # also without a gradient, so that a resumed run has the same indices
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                self.noise.start(state["step"], p)
                if (key := (p.device, state["step"])) not in scalars:
                    numbers = (float(group["lr"]), group["betas"], group["eps"], group["weight_decay"])
                    scalars[key] = _scalars(*key, *numbers)
                for w, g, m, v in chunks(p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"]):
                    noise = self.noise.draw(w) if w.dtype == torch.bfloat16 else None
                    self._update(w, g, m, v, noise, *scalars[key])
        return loss

    def _update(self, *arguments) -> None:
        """Apply update_, compiled if it can be.

        A new kind of tensor, such as an expert with its first gradient, triggers a compilation during the run. If it
        fails, which changes no tensor, this rank continues in Python.
        """
        if self.compiled:
            try:
                compiled_update()(*arguments)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.compiled = False
                print(
                    f"note: rank {distributed.rank()}: AdamW of --pure_bf16 continues uncompiled, which is slower: "
                    f"{type(error).__name__}: {first_line(error)}",
                    flush=True,
                )
            else:
                return
        update_(*arguments)
