"""A quantised output head is dequantised: one product a step is not worth kernels of its own."""

from __future__ import annotations

from torch import Tensor

from rooftile.weights import QuantisedWeight
from rooftile.weights.formats import TILE
from rooftile.weights.two_four import TwoFour
from rooftile.weights.weight import dequantised, rows_of

# numbers of a head that are dequantised at once
_AT_ONCE = 1 << 20


def fill_head(head: Tensor, weight: QuantisedWeight | TwoFour, first: int) -> None:
    """Fills a head with dequantised numbers from row `first` on.

    It takes some rows at a time: a head is larger than a layer, and fp32 takes twice its memory.
    """
    N, K = weight.shape
    if isinstance(weight, TwoFour):
        head.copy_(weight.dense(head.dtype)[first : first + len(head)])
        return
    rows = max(_AT_ONCE // K // TILE, 1) * TILE
    for start in range(first // TILE * TILE, first + len(head), rows):
        stop = min(start + rows, N)
        parts = rows_of(weight.parts, weight.format, start, stop)
        some = dequantised(parts, weight.format, weight.group, (stop - start, K), head.dtype)[max(first - start, 0) :]
        place = head[max(start - first, 0) :][: len(some)]
        place.copy_(some[: len(place)])
