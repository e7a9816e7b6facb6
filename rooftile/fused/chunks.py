"""Logits of some rows at a time, and the gradients that are added up from them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rooftile.fused.where import kernels_run_on

# memory of the logits that exist at once; on a CPU, whose products need no more, an fp32 copy of them may stand beside them
BYTES_AT_ONCE, ON_CPU = 480 << 20, 32 << 20
# memory for which a CPU does not change its way
LITTLE = 1 << 20
# rows of logits start at multiples of this many numbers: cuBLAS is slow for rows that do not, such as GPT-2's of 50,257. Not on a
# CPU, where PyTorch's products in bf16 read what lies between the rows: NaN there becomes NaN in the result
ALIGNED = 64
# the rows of a chunk are a multiple of this number
ROWS = 128


def takes_less_whole(input: Tensor, weight: Tensor, wants_dx: bool, wants_dw: bool) -> bool:
    """Whether a CPU needs less memory for all logits and a dw in 16 bits than for chunks of logits and a dw in fp32."""
    if input.device.type != "cpu" or kernels_run_on(input) or torch.compiler.is_compiling():
        return False
    (T, D), V, size = input.shape, weight.shape[0], input.element_size()
    wide = max(size, 4)
    logits, dx, numbers_of_dw = T * V * size, T * D * size * wants_dx, V * D * wants_dw
    whole = max(2 * logits, logits + numbers_of_dw * size + dx)
    chunk = min(logits, _bytes_at_once(input)) * (size + wide * (wide > size) * wants_dw) // size
    return numbers_of_dw * (size + wide) + 2 * dx + chunk > whole + LITTLE


def _row(weight: Tensor, V: int) -> int:
    """The numbers from one row of V logits to the next."""
    return -(-V // ALIGNED) * ALIGNED if weight.is_cuda else V


def _bytes_at_once(input: Tensor) -> int:
    return min(BYTES_AT_ONCE, ON_CPU) if input.device.type == "cpu" else BYTES_AT_ONCE


def chunks(input: Tensor, weight: Tensor, V: int | None = None) -> Iterator[slice]:
    """Slices of rows whose logits exist at once, equal but for the last.

    V: the length of a row, by default the weight's. Ranks that hold parts of a vocabulary give the same number, and get the same
    slices.
    """
    T = input.shape[0]
    most = max(_bytes_at_once(input) // (max(_row(weight, weight.shape[0] if V is None else V), 1) * input.element_size()), 1)
    rows = -(-T // max(-(-T // most), 1))
    if rows < most:
        rows = min(-(-rows // ROWS) * ROWS, most)
    for start in range(0, T, max(rows, 1)):
        yield slice(start, min(start + rows, T))


class Logits:
    """Makes the logits of one chunk after the other, in one piece of memory."""

    def __init__(self, input: Tensor, weight: Tensor, bias: Tensor | None, V: int | None = None) -> None:
        self.input, self.weight, self.bias = input, weight, bias
        rows = max((chunk.stop - chunk.start for chunk in chunks(input, weight, V)), default=0)
        self.memory = input.new_empty(rows, _row(weight, weight.shape[0]))

    def __call__(self, chunk: slice) -> Tensor:
        found = self.memory[: chunk.stop - chunk.start, : self.weight.shape[0]]
        if self.bias is None:
            return torch.mm(self.input[chunk], self.weight.T, out=found)
        return torch.addmm(self.bias, self.input[chunk], self.weight.T, out=found)


class Gradients:
    """Sums up dw and db in fp32, and fills in dx; unwanted gradients are empty."""

    def __init__(self, input: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...] = (True,) * 3) -> None:
        wide = torch.promote_types(input.dtype, torch.float32)
        self.input, self.weight, (self.has_dx, self.has_dw, self.has_db) = input, weight, wanted
        self.has_db = self.has_db and bias is not None
        self.dx = input.new_empty(input.shape if self.has_dx else 0)
        # the first chunk writes what the others add to; without rows there is none
        make_dw = weight.new_empty if input.shape[0] else weight.new_zeros
        self.dw = make_dw(weight.shape if self.has_dw else 0, dtype=wide)
        self.db = weight.new_zeros(weight.shape[0] if self.has_db else 0, dtype=wide)

    def add(self, chunk: slice, dz: Tensor) -> None:
        """Adds the part of rows whose logits have the gradient dz."""
        if self.has_dx:
            torch.mm(dz, self.weight, out=self.dx[chunk])
        if self.has_db:
            self.db += dz.sum(0, dtype=self.db.dtype)
        if not self.has_dw:
            return
        before = float(chunk.start > 0)
        if dz.is_cuda and dz.dtype != self.dw.dtype:
            torch.addmm(self.dw, dz.T, self.input[chunk], beta=before, out_dtype=self.dw.dtype, out=self.dw)
        else:
            self.dw.addmm_(dz.T.to(self.dw.dtype), self.input[chunk].to(self.dw.dtype), beta=before)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x times the upstream gradient, rounded once."""
    return torch.mul(x, factor, out=x.new_empty(x.shape, dtype=dtype))
