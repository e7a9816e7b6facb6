"""Cross-entropy where each rank has some rows of the head's weights, and so some logits of every token.

For the ranks' logits z_r, with largest m_r and l_r = sum exp(z_r - m_r), and the target t on one of them:

    m = max m_r,  l = sum exp(m_r - m) l_r,  loss = log l + (m - z_t)

The largest, then the sums, go over the group for some tokens at a time, in fp32 (fp64 for fp64): three numbers for each token in
place of its logits. Each rank's gradient of its own logits needs m and l alone. The gradient of the hidden states is a sum over
all logits, so the ranks' parts are added, in fp32 again, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.fused.chunks import Gradients, Logits, chunks, scaled
from rooftile.fused.loss import ELSEWHERE, fake, gradient, reduced, run
from rooftile.fused.split_loss import Parts
from rooftile.runtime.ranks import Ranks

# places of targets that are no row of any rank
WRONG, IGNORED = -2, -3


def losses(
    tensors: tuple[Tensor, Tensor, Tensor | None], target: Tensor, count: Tensor | None, numbers: tuple[Any, ...], parts: Parts,
    reduction: str, wanted: tuple[bool, ...],
) -> Tensor:  # fmt: skip
    """Returns the loss, or with reduction "none" each token's (T,), the same on every rank of the vocabulary.

    Args:
        tensors: input (T, D), weight (rows, D), and bias (rows,).
        target: (T,) in the whole vocabulary.
        count: what a mean divides by.
        numbers: ignore_index, label_smoothing, softcap and z_loss.
        wanted: whether input, weight and bias want a gradient, the same on every rank.
    """
    found: Tensor = _Losses.apply(
        *tensors, _places(target, tensors[1], numbers[0], parts), count, numbers[1:], parts, reduction, wanted
    )
    return found


def _places(target: Tensor, weight: Tensor, ignore_index: int, parts: Parts) -> Tensor:
    """Returns the row of each target in this rank's weight, or ELSEWHERE, WRONG or IGNORED."""
    rows, ranks = weight.shape[0], parts.vocabulary
    assert ranks is not None
    first: Any = ranks.rank * rows
    right = (target >= 0) & (target < parts.V)
    if not parts.even:
        each = target.new_zeros(ranks.count, dtype=torch.int64)
        each[ranks.rank] = rows
        dist.all_reduce(each, group=ranks.group)
        if each.device.type == "cpu" and each.sum() != parts.V:
            raise InvalidInput(
                f"vocabulary is {parts.V} and the ranks have {each.tolist()} rows; must be their sum, {int(each.sum())}"
            )
        # on a GPU nothing is read: a wrong sum makes every loss NaN
        first, right = each[: ranks.rank].sum(), right & (each.sum() == parts.V)
    place = target.long() - first
    place = torch.where((place >= 0) & (place < rows), place, ELSEWHERE)
    return torch.where(target == ignore_index, IGNORED, torch.where(right, place, WRONG))


class _Losses(torch.autograd.Function):
    """Makes the gradients in the forward, unless each token has its own upstream gradient, or fp16 needs its scale first."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, place: Tensor, count: Tensor | None,
        numbers: tuple[float, float, float], parts: Parts, reduction: str, wanted: tuple[bool, ...],
    ) -> Tensor:  # fmt: skip
        found, sums = fake(input)
        at_once = any(wanted) and reduction != "none" and input.dtype != torch.float16
        gradients = _Gradients(input, weight, bias, wanted, parts) if at_once else None
        share = found.new_ones(()) if count is None else 1.0 / count.to(found.dtype)
        with torch.autocast(input.device.type, enabled=False):
            logits = Logits(input, weight, bias, parts.rows)
            for chunk in chunks(input, weight, parts.rows):
                z, t = logits(chunk), place[chunk]
                found[chunk], sums[chunk] = _joined(z, t, *numbers, parts)
                if gradients is not None:
                    gradients.add(chunk, _of_logits(share.expand(t.shape), sums[chunk], z, t, numbers, parts))
        ctx.kept, ctx.dtypes = (
            (numbers, parts, wanted, reduction),
            tuple(x if x is None else x.dtype for x in (input, weight, bias)),
        )
        ctx.at_once, ctx.has_bias = at_once, bias is not None
        if gradients is not None:
            ctx.save_for_backward(gradients.dx, gradients.dw, gradients.db)
        elif any(wanted):
            ctx.save_for_backward(input, weight, bias, place, count, sums)
        return reduced(found, count, reduction)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise Unsupported(
                "a second derivative of linear_cross_entropy with a split vocabulary; has first ones: leave create_graph"
            )
        numbers, parts, wanted, reduction = ctx.kept
        if ctx.at_once:
            found = [scaled(x, grad, dtype or x.dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        else:
            input, weight, bias, place, count, sums = ctx.saved_tensors
            each = grad if count is None else grad / count
            made = _Gradients(input, weight, bias, wanted, parts)
            with torch.autocast(input.device.type, enabled=False):
                logits = Logits(input, weight, bias, parts.rows)
                for chunk in chunks(input, weight, parts.rows):
                    z, t = logits(chunk), place[chunk]
                    dlosses = each[chunk] if reduction == "none" else each.expand(t.shape)
                    made.add(chunk, _of_logits(dlosses, sums[chunk], z, t, numbers, parts))
            found = [made.dx, made.dw.to(weight.dtype), made.db if bias is None else made.db.to(bias.dtype)]
        return *(x if wants else None for x, wants in zip(found, wanted, strict=True)), *(None,) * 6


def _of_logits(dlosses: Tensor, sums: Tensor, z: Tensor, place: Tensor, numbers: tuple[Any, ...], parts: Parts) -> Tensor:
    """Returns the gradient of this rank's logits, over them."""
    return gradient(dlosses, sums, z, place, IGNORED, *numbers, into=z, whole=parts.V)


def _joined(
    z: Tensor, place: Tensor, label_smoothing: float, softcap: float, z_loss: float, parts: Parts
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns losses (rows,), the largest logit and the log of the sum (rows, 2) over the whole vocabulary."""
    ranks = parts.vocabulary
    assert ranks is not None
    top, log, below, picked = _own(z, place, bool(label_smoothing), softcap)
    most = top.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=ranks.group)
    # exp(z - most), most - z of the target, and most - z of all logits, which smoothing takes the mean of
    shares = [(top - most + log).exp(), torch.where(place >= 0, most - picked, 0.0)]
    if label_smoothing:
        shares.append(z.shape[1] * ((most - top) + below) if z.shape[1] else torch.zeros_like(most))
    sums = torch.stack(shares)
    dist.all_reduce(sums, group=ranks.group)
    log, distance = sums[0].log(), sums[1]
    lse = most + log
    found = log + (1 - label_smoothing) * distance + z_loss * lse * lse
    if label_smoothing:
        found = found + label_smoothing * sums[2] / parts.V
    found = torch.where(place == WRONG, torch.nan, found)
    return torch.where(place == IGNORED, 0.0, found), torch.stack([most, log], -1)


def _own(z: Tensor, place: Tensor, smoothed: bool, softcap: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (rows,) of this rank's logits: the largest, log sum exp(z - it), it - mean z where wanted, and the target's."""
    if not z.shape[1]:
        none = fake(z)[0].fill_(-torch.inf)
        return none, none, none, none
    # with all weight on the smoothing, the loss is log l + (m - mean z)
    found, sums = run(z, torch.zeros_like(place), IGNORED, float(smoothed), softcap, 0.0)
    top, log = sums.unbind(-1)
    picked = z.gather(1, place.clamp(min=0)[:, None])[:, 0].to(sums.dtype)
    return top, log, found - log, softcap * torch.tanh(picked / softcap) if softcap else picked


class _Gradients(Gradients):
    """The gradients of this rank's rows; dx is summed over the group while dw of the same tokens is computed."""

    def __init__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...], parts: Parts
    ) -> None:  # fmt: skip
        super().__init__(input, weight, bias, (False, *wanted[1:]))
        self.ranks: Ranks | None = parts.vocabulary
        self.sums_dx, self.wide = wanted[0], self.dw.dtype
        if self.sums_dx:
            self.dx = input.new_empty(input.shape)
            # a CPU has no product of 16-bit numbers that leaves its sums in fp32
            self.factor = weight if weight.is_cuda else weight.to(self.wide)

    def add(self, chunk: slice, dz: Tensor) -> None:
        """Adds the part of rows whose logits have the gradient dz."""
        if not self.sums_dx:
            return super().add(chunk, dz)
        if dz.is_cuda and dz.dtype != self.wide:
            dx = torch.mm(dz, self.factor, out_dtype=self.wide)
        else:
            dx = dz.to(self.wide) @ self.factor
        assert self.ranks is not None
        coming = dist.all_reduce(dx, group=self.ranks.group, async_op=True)
        super().add(chunk, dz)
        coming.wait()
        self.dx[chunk] = dx
        return None
