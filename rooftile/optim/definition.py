"""One step of AdamW in plain operations, in the order of `torch.optim.AdamW`, so that fp32 has its bits on a CPU.

Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.optim.split import join, own_rests, split, sums_of


class StepNumbers(NamedTuple):
    """The numbers of a step that all weights of a call share."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: float  # from 1; 0 where each weight's step is a tensor on its device
    left_out: float = 0.0  # decay of the weights that masks leave out


def update(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, rest: Tensor | None, sums: Tensor | None,
    step: Tensor | None, lr: Tensor | None, clip: Tensor | None, numbers: StepNumbers, maximize: bool, mask: Tensor | None = None,
) -> None:  # fmt: skip
    """Changes weight, first, second and rest in place; each is computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        weight: any shape.
        gradient: like weight, in any dtype.
        first, second: moments, in the dtype of the weight, or wider.
        rest: int16; weight and rest are one fp32 number (`rooftile.optim.split`).
        sums: of the weights that the rests belong to, int32; where there is a rest.
        step: the number of this weight's step, from 1; None takes the step in `numbers`.
        lr: a number on the device in place of the rate in `numbers`.
        clip: the factor of all gradients, on the device.
        numbers: the numbers of the step.
        maximize: whether the weight follows the gradient upwards.
        mask: bool, like weight; numbers.left_out * weight is added to the gradient where it is False.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    g = gradient.to(dtype)
    if clip is not None:
        g = g * clip
    if maximize:
        g = -g
    p, m, v = (x if x.dtype == dtype else x.to(dtype) for x in (weight, first, second))
    if rest is not None and sums is not None:
        p = join(weight, own_rests(weight, rest, sums))
    if mask is not None:
        g = g + torch.where(mask, 0.0, p) * numbers.left_out
    t = numbers.step if step is None else step.double()
    rate = numbers.lr if lr is None else lr
    if numbers.weight_decay:
        p.mul_(1 - rate * numbers.weight_decay)
    m.lerp_(g, 1 - numbers.beta1)
    v.mul_(numbers.beta2).addcmul_(g, g, value=1 - numbers.beta2)
    # Python's numbers are in fp64
    size = rate / (1 - numbers.beta1**t)
    denominator = (v.sqrt() / (1 - numbers.beta2**t) ** 0.5).to(dtype).add_(numbers.eps)
    if isinstance(size, Tensor):
        p.sub_((size * (m / denominator)).to(dtype))
    else:
        p.addcdiv_(m, denominator, value=-size)
    if rest is not None and sums is not None:
        high, low = split(p)
        weight.copy_(high)
        rest.copy_(low)
        sums.copy_(sums_of(weight))
    for x, wide in ((weight if rest is None else p, p), (first, m), (second, v)):
        if x is not wide:
            x.copy_(wide)
