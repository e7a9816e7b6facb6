"""Quantises queries, keys and values by a recipe, to the integers that the attention kernels multiply, bit for bit.

Every step is the same on all devices: fp32 sums and products of two numbers in a fixed order, an exact mean, and rounding to
nearest. So a CPU and a GPU compute the same integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.numerics.formats import FP8_E4M3, INT8, Format, decode, encode
from rooftile.numerics.hadamard import hadamard, signs_of
from rooftile.numerics.precision import Precision, ValueOrder
from rooftile.numerics.scaling import BLOCK, divided, scales_of, set_aside
from rooftile.runtime.words import answers_foreign_words

# the mean key is taken over at least this many keys, or over all
MEAN_OF = 1024

_FORMATS = {"fp8": FP8_E4M3, "int8": INT8}


@dataclass(frozen=True, slots=True, repr=False)
class QuantisedQKV:
    """Queries, keys and values as `quantise_qkv` makes them, for `attention_quantised`.

    q (B, T, H, D), k (B, S, Hk, D) and v (B, S, Hk, Dv), or packed (total, heads, dim), are float8_e4m3fn, int8, or in the
    original dtype where the recipe says "native". A number is its code times a scale. The fp32 scales are (parts, heads, 1), or
    (parts, Hk, Dv) for v under granularity "row"; `part_of_rows` gives the part of a row. An INT8 scale is negative if its part
    holds a NaN. Queries and keys are rotated and smoothed by the recipe: `shift` (B, T, H) is the amount that smoothing
    subtracted from all scores of a query, and `signs` (D,) belong to the rotation.

    v is in one of two orders, and a backend reads one of them. With `v_order` "rows" it is as above. With "columns" it is
    transposed: (B, Hk, Dv, S) with S padded to whole blocks of 128, or packed (1, Hk, Dv, parts x 128), and each 16 keys are in
    the order in which a thread of a matrix instruction holds weights: 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scales: Tensor | None
    k_scales: Tensor | None
    v_scales: Tensor | None
    shift: Tensor | None
    signs: Tensor | None
    precision: Precision
    dtype: torch.dtype
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    v_order: ValueOrder = "rows"

    @property
    def dim_v(self) -> int:
        """The head dim of values and outputs."""
        return self.v.shape[-1 if self.v_order == "rows" else -2]

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors and their scales."""
        held = (self.q, self.k, self.v, self.q_scales, self.k_scales, self.v_scales, self.shift)
        return sum(x.nbytes for x in held if x is not None)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(getattr(self, name).shape)}" for name in "qkv")
        return f"QuantisedQKV({shapes}, {self.precision}, {self.nbytes:,} bytes on {self.q.device})"


@answers_foreign_words
def quantise_qkv(
    q: Tensor, k: Tensor, v: Tensor, precision: Precision, cu_q: Tensor | None = None, cu_k: Tensor | None = None
) -> QuantisedQKV:
    """Quantises queries, keys and values, dense or packed, by a recipe."""
    dtype = q.dtype
    shift = signs = q_scales = k_scales = v_scales = None
    q, k, v = set_aside(q), set_aside(k), set_aside(v)
    if precision.qk != "native":
        q, k = q.float(), k.float()
        if precision.smooth_k:
            mean = mean_key(k, cu_k)
            shift = _shift(q, mean, cu_q)
            k = k - _spread_over_rows(mean, k, cu_k)
        if precision.incoherent:
            signs = signs_of(q.shape[-1], device=q.device)
            q, k = hadamard(q, signs), hadamard(k, signs)
        q, q_scales = _by_parts(q, precision, _FORMATS[precision.qk], cu_q, of_products=True)
        k, k_scales = _by_parts(k, precision, _FORMATS[precision.qk], cu_k, of_products=True)
    if precision.pv != "native":
        by_channel = precision.granularity == "row"
        v, v_scales = _by_parts(v.float(), precision, FP8_E4M3, cu_k, of_products=False, by_channel=by_channel)
    return QuantisedQKV(q, k, v, q_scales, k_scales, v_scales, shift, signs, precision, dtype, cu_q, cu_k)


def mean_key(k: Tensor, cu: Tensor | None) -> Tensor:
    """Returns the mean key of each sequence and head, fp32 (B, Hk, D). Long sequences use every n-th key, n = length // MEAN_OF.

    A thousand keys are enough to estimate their common component, and attention is exact for any shift of all keys. NaN and
    infinity count as zero. The sum is in fp64, where 16-bit numbers add up exactly in any order.
    """
    if cu is None:
        some = _finite(k[:, :: max(k.shape[1] // MEAN_OF, 1)])
        return divided(some.sum(1), max(some.shape[1], 1)).float()
    lengths = cu.diff()
    steps = (lengths // MEAN_OF).clamp(min=1)
    sequence = sequence_of_rows(cu, k.shape[0])
    place = torch.arange(k.shape[0], device=k.device) - cu[sequence]
    some = _finite(k) * (place % steps[sequence] == 0).view(-1, 1, 1)
    sums = some.new_zeros(lengths.shape[0], *k.shape[1:]).index_add_(0, sequence, some)
    return (sums / ((lengths + steps - 1) // steps).clamp(min=1).view(-1, 1, 1)).float()


def _finite(x: Tensor) -> Tensor:
    return x.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _shift(q: Tensor, mean: Tensor, cu_q: Tensor | None) -> Tensor:
    """Computes q . mean for each query and head."""
    means = _spread_over_rows(mean, q, cu_q).repeat_interleave(q.shape[-2] // mean.shape[-2], dim=-2)
    return (q * means).sum(-1)


def _spread_over_rows(per_sequence: Tensor, x: Tensor, cu: Tensor | None) -> Tensor:
    """Spreads one entry per sequence, (B, ...), over the rows of x."""
    return per_sequence[:, None] if cu is None else per_sequence[sequence_of_rows(cu, x.shape[0])]


def sequence_of_rows(cu: Tensor, rows: int) -> Tensor:
    """Returns the sequence of each packed row."""
    return torch.searchsorted(cu[1:].long(), torch.arange(rows, device=cu.device), right=True)


def part_of_rows(x: Tensor, granularity: str, cu: Tensor | None) -> tuple[Tensor, int]:
    """Returns the part of each row under a granularity, and the number of parts.

    Dense rows are numbered through the batch. Blocks count from a sequence's start, so that its bits do not depend on the
    sequences packed with it: the parts of sequence b begin at cu[b] // 128 + b.
    """
    rows = x.shape[0] if cu is not None else x.shape[0] * x.shape[1]
    row = torch.arange(rows, device=x.device)
    if granularity == "tensor":
        return torch.zeros_like(row), 1
    if granularity == "row":
        return row, rows
    if cu is None:
        T = max(x.shape[1], 1)
        blocks = -(-T // BLOCK) if granularity == "block" else 1
        return row // T * blocks + (row % T // BLOCK if granularity == "block" else 0), x.shape[0] * blocks
    sequence = sequence_of_rows(cu, rows)
    if granularity == "head":
        return sequence, cu.shape[0] - 1
    start = cu.long()[sequence]
    return start // BLOCK + sequence + (row - start) // BLOCK, rows // BLOCK + cu.shape[0] - 1


def _by_parts(
    x: Tensor, precision: Precision, kind: Format, cu: Tensor | None, *, of_products: bool, by_channel: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns codes in the shape of x, and scales (parts, heads, 1 or dim). of_products: x is q or k, summed over rows."""
    rows = x if cu is not None else x.flatten(0, 1)
    part, parts = part_of_rows(x, "head" if by_channel else precision.granularity, cu)
    size = rows.abs()
    if not by_channel:
        # ignore rows with a NaN: all their products are NaN anyway
        size = (size if of_products else size.nan_to_num(nan=0.0)).amax(-1, keepdim=True)
    size = size.nan_to_num(nan=0.0)
    index = part.view(-1, 1, 1).expand_as(size)
    sizes = size.new_zeros(parts, *size.shape[1:]).scatter_reduce_(0, index, size, "amax")
    if precision.granularity == "tensor":
        sizes = sizes.amax(1, keepdim=True).expand_as(sizes)
    scales, inverse = scales_of(sizes, kind)
    if kind.is_integer:
        lost = rows.isnan().any(-1, keepdim=True).float()
        scales = scales * (1 - 2 * torch.zeros_like(sizes).scatter_reduce_(0, index, lost, "amax"))
    return encode(rows * inverse[part], kind).view(x.shape), scales.contiguous()


def codes(x: Tensor) -> Tensor:
    """Decodes a tensor of QuantisedQKV without its scales, fp32."""
    kind = {FP8_E4M3.dtype: FP8_E4M3, INT8.dtype: INT8}.get(x.dtype)
    return x.float() if kind is None else decode(x, kind)


def scales_of_rows(x: Tensor, scales: Tensor | None, granularity: str, cu: Tensor | None) -> Tensor:
    """Returns the scale of each row and head (…, heads, 1), or channel, for a tensor of QuantisedQKV."""
    if scales is None:
        return x.new_ones((), dtype=torch.float32).expand(*x.shape[:-1], 1)
    by_channel = scales.shape[-1] > 1
    part, _ = part_of_rows(x, "head" if by_channel else granularity, cu)
    return scales[part].abs().view(*x.shape[:-1], scales.shape[-1])
