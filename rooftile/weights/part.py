"""Parts of quantised and 2:4 weights: some rows and some columns, as ranks that share a model hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.weights.formats import TILE, weight_format
from rooftile.weights.two_four import TwoFour
from rooftile.weights.weight import QuantisedWeight

# a byte of a 2:4 weight's places is for two groups of four
_FOURS = 8


def part_of(
    weight: QuantisedWeight | TwoFour, rows: Sequence[slice], columns: slice, name: str = "the weight"
) -> QuantisedWeight | TwoFour:  # fmt: skip
    """Returns the rows of a weight (N, K) in some slices, one below the other, and its columns in one slice.

    Args:
        weight: the whole weight.
        rows, columns: slices with start and stop.
        name: of the weight, for error messages.

    Raises:
        InvalidInput: a slice ends within numbers that share a scale or a byte, or columns are in another order than in the file.
    """
    N, K = weight.shape
    every = columns.stop - columns.start == K
    step = _step(weight)
    if not every and (columns.start % step or (columns.stop % step and columns.stop != K)):
        raise InvalidInput(
            f"{name} is cut at columns {columns.start} and {columns.stop}, of which {step} lie together; {_ADVICE}"
        )
    if isinstance(weight, TwoFour):
        values = _cut(weight.values, rows, slice(columns.start // 2, columns.stop // 2))
        places = _cut(weight.places, rows, slice(columns.start // _FOURS, -(-columns.stop // _FOURS)))
        scales = None if weight.scales is None else _cut(weight.scales, rows, slice(0, 1))
        return TwoFour(values, places, (len(values), columns.stop - columns.start), scales)
    if weight.order is not None and not every:
        raise InvalidInput(f"{name} has sorted columns (act-order), and is cut along them; {_ADVICE}")
    tile = TILE if weight.format == "fp8_tile" else 1
    if any(one.start % tile or (one.stop % tile and one.stop != N) for one in rows):
        ends = ", ".join(f"{one.start} to {one.stop}" for one in rows)
        raise InvalidInput(f"{name} is cut at rows {ends}, of which {tile} share a scale; {_ADVICE}")
    by = 2 if weight_format(weight.format).is_packed else 1
    codes = _cut(weight.codes, rows, slice(columns.start // by, -(-columns.stop // by)))
    group = columns.stop - columns.start if _has_row_scales(weight) else weight.group
    scaled = [slice(one.start // tile, -(-one.stop // tile)) for one in rows]
    across = slice(0, 1) if group != weight.group else slice(columns.start // weight.group, -(-columns.stop // weight.group))
    scales = _cut(weight.scales, scaled, across)
    zeros = None if weight.zeros is None else _cut(weight.zeros, scaled, across)
    outer = weight.outer
    if outer is not None and len(outer) > 1:
        outer = _cut(outer, rows, slice(0, 1))
    shape = (len(codes), columns.stop - columns.start)
    return replace(weight, codes=codes, scales=scales, zeros=zeros, group=group, shape=shape, outer=outer)


_ADVICE = "give the model to fewer ranks, or give the 16-bit checkpoint and weights="


def _step(weight: QuantisedWeight | TwoFour) -> int:
    """Returns how many neighbouring columns lie together: they share a scale or a byte."""
    if isinstance(weight, TwoFour):
        return _FOURS
    if not _has_row_scales(weight):
        return weight.group
    return 2 if weight_format(weight.format).is_packed else 1


def _has_row_scales(weight: QuantisedWeight) -> bool:
    return weight.group == weight.shape[1] and weight_format(weight.format).group is None


def _cut(x: Tensor, rows: Sequence[slice], columns: slice) -> Tensor:
    # bytes: FP8 has no kernels to join tensors on some devices
    pieces = [x[one, columns] for one in rows]
    # a copy: a view would keep the whole weight
    if len(pieces) == 1:
        return pieces[0].clone(memory_format=torch.contiguous_format)
    return torch.cat([piece.contiguous().view(torch.uint8) for piece in pieces]).view(x.dtype)
