"""Cross-entropy of rows of logits, read once, and its gradient, with label smoothing, softcap and z-loss."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.runtime.launch import Kernel

# logits that a program reads at once
BLOCK = 4096


@triton.jit
def _logits(x_ptr, v, softcap, SIZE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Logits, 0 outside of the row."""
    z = tl.load(x_ptr + v, mask=v < SIZE, other=0.0).to(tl.float32)
    if SOFTCAP:
        # tanh(u) = 1 - 2 / (1 + exp(2 u)), and exp may overflow
        z = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * z / softcap)))
    return z


@triton.jit
def _cross_entropy(
    x_ptr, target_ptr, losses_ptr, sums_ptr, x_stride, ignore_index, smoothing, softcap, z_loss,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHED: tl.constexpr,
):  # fmt: skip
    """Writes the loss of one row, its largest logit and the log of its sum."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total, plain = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    # the mean is summed from the first logit on: an offset that all share would cost the bits of the sum
    first = _logits(x_ptr, 0, softcap, SIZE, SOFTCAP)
    first = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    for start in range(0, SIZE, BLOCK):
        v = start + tl.arange(0, BLOCK)
        z = _logits(x_ptr, v, softcap, SIZE, SOFTCAP)
        if SMOOTHED:
            plain += tl.where(v < SIZE, z - first, 0.0)
        z = tl.where(v < SIZE, z, float("-inf"))
        above = tl.maximum(largest, z)
        # each lane has a largest of its own; one that has seen nothing yet has no sum to scale
        known = above > float("-inf")
        total = tl.where(known, total * tl.exp(largest - above) + tl.exp(z - above), total + tl.where(z != z, z, 0.0))
        largest = above
    top = tl.max(largest, 0)
    log = tl.log(tl.sum(total * tl.exp(largest - top), 0))
    target = tl.load(target_ptr + row)
    inside = (target >= 0) & (target < SIZE)
    picked = tl.load(x_ptr + tl.where(inside, target, 0)).to(tl.float32)
    if SOFTCAP:
        picked = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * picked / softcap)))
    loss = log + (1.0 - smoothing) * (top - picked) + z_loss * (top + log) * (top + log)
    if SMOOTHED:
        loss += smoothing * ((top - first) - tl.sum(plain, 0) / SIZE)
    loss = tl.where(inside, loss, float("nan"))
    tl.store(losses_ptr + row, tl.where(target == ignore_index, 0.0, loss))
    tl.store(sums_ptr + 2 * row, top)
    tl.store(sums_ptr + 2 * row + 1, log)


@triton.jit
def _cross_entropy_gradient(
    dlosses_ptr, sums_ptr, x_ptr, target_ptr, dx_ptr, x_stride, dx_stride, ignore_index, smoothing, softcap, z_loss,
    spread, SIZE: tl.constexpr, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a piece of one row, perhaps over its logits.

    spread: the smoothing of one logit. PART: the logits are a part of a vocabulary, and the target -1 is in another part.
    """
    pieces: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // pieces).to(tl.int64)
    v = tl.program_id(0) % pieces * BLOCK + tl.arange(0, BLOCK)
    z = _logits(x_ptr + row * x_stride, v, softcap, SIZE, SOFTCAP)
    target = tl.load(target_ptr + row)
    top, log = tl.load(sums_ptr + 2 * row), tl.load(sums_ptr + 2 * row + 1)
    dz = tl.exp(z - top - log) * (1.0 + 2.0 * z_loss * (top + log)) - spread
    dz = tl.where(v == target, dz - (1.0 - smoothing), dz)
    if SOFTCAP:
        dz *= 1.0 - (z / softcap) * (z / softcap)
    dz *= tl.load(dlosses_ptr + row)
    lowest: tl.constexpr = -1 if PART else 0
    dz = tl.where((target >= lowest) & (target < SIZE), dz, float("nan"))
    dz = tl.where(target == ignore_index, 0.0, dz)
    tl.store(dx_ptr + row * dx_stride + v, dz.to(dx_ptr.dtype.element_ty), mask=v < SIZE)


_start, _start_gradient = Kernel(_cross_entropy), Kernel(_cross_entropy_gradient)


def forward(
    x: Tensor, target: Tensor, ignore_index: int, smoothing: float, softcap: float, z_loss: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns losses (rows,) and sums (rows, 2), fp32."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    losses, sums = (torch.empty(shape, dtype=torch.float32, device=x.device) for shape in (x.shape[:1], (x.shape[0], 2)))
    if x.shape[0]:
        arguments = (x, target.contiguous(), losses, sums, x.stride(0), ignore_index, smoothing, softcap or 1.0, z_loss)
        _start((x.shape[0], 1, 1), arguments, constants_of(x.shape[1], softcap > 0, SMOOTHED=smoothing > 0))
    return losses, sums


def gradient(
    dlosses: Tensor, sums: Tensor, x: Tensor, target: Tensor, ignore_index: int, smoothing: float, softcap: float, z_loss: float,
    *, into: Tensor | None = None, whole: int = 0,
) -> Tensor:  # fmt: skip
    """Returns the gradient of logits (rows, V): `into`, whose rows are dense and which may be x itself, or a new tensor.

    whole: the size of the vocabulary of which the logits are a part, 0 where they are all of it.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if into is None else into
    if dx.numel():
        constants = constants_of(x.shape[1], softcap > 0, PART=whole > 0)
        arguments = (
            dlosses.contiguous(), sums.contiguous(), x, target.contiguous(), dx, x.stride(0), dx.stride(0), ignore_index,
            smoothing, softcap or 1.0, z_loss, smoothing / (whole or x.shape[1]),
        )  # fmt: skip
        _start_gradient((x.shape[0] * triton.cdiv(x.shape[1], constants["BLOCK"]), 1, 1), arguments, constants)
    return dx


@cache
def constants_of(size: int, softcap: bool, **own: bool) -> dict[str, int]:
    """The compile-time arguments; `own` are the arguments of one of the two kernels."""
    return {"SIZE": size, "BLOCK": min(BLOCK, triton.next_power_of_2(size)), "SOFTCAP": softcap, "num_warps": 8, **own}
