"""Experts whose weights are quantised: one `QuantisedWeight` stacks the rows of all experts, one below the other.

Tokens stay in 16 bits, whatever the format: a weight, which is a constant, is dequantised to their dtype in the product that
reads it.

So every format of `quantise_weight` needs no shape of its own. Tiles of 128 x 128 become scales of 128 numbers of a row: an
expert may then have any number of rows, for 3 % more bytes. No gradient goes through codes: whatever needs one sees the dense
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rooftile.moe.problem import QuantisedWeights, Weights
from rooftile.weights import QuantisedWeight
from rooftile.weights.formats import TILE
from rooftile.weights.weight import dequantised, rows_of


def experts_in(weights: Weights | QuantisedWeights) -> int:
    """Returns how many experts there are."""
    up, down = weights.up, weights.down
    # a quantised down is (E d, h), and up has rows of d numbers
    return down.shape[0] // (up.shape[-1] if isinstance(down, QuantisedWeight) else 1)


def rows_in(weight: Tensor | QuantisedWeight, experts: int) -> int:
    """Returns how many rows each expert has."""
    return weight.shape[0] // experts if isinstance(weight, QuantisedWeight) else weight.shape[1]


def weight_of(weight: Tensor | QuantisedWeight, e: int, experts: int, dtype: torch.dtype) -> Tensor:
    """Returns an expert's weight (out, in), in a dtype if it is quantised."""
    if isinstance(weight, Tensor):
        return weight[e]
    N, K = weight.shape[0] // experts, weight.shape[1]
    parts = rows_of(weight.parts, weight.format, e * N, (e + 1) * N)
    return dequantised(parts, weight.format, weight.group, (N, K), dtype)


def dense(weights: QuantisedWeights, dtype: torch.dtype) -> Weights:
    """Returns weights of which none is quantised."""
    E = experts_in(weights)

    def stack(x: Tensor | QuantisedWeight) -> Tensor:
        return x if isinstance(x, Tensor) else x.dequantise(dtype).unflatten(0, (E, -1))

    def one(x: Tensor | QuantisedWeight | None) -> Tensor | None:
        return x.dequantise(dtype) if isinstance(x, QuantisedWeight) else x

    return Weights(
        stack(weights.up), stack(weights.down), weights.up_bias, weights.down_bias, one(weights.shared_up),
        one(weights.shared_down), weights.shared_gate,
    )  # fmt: skip


def stacked(parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Joins weights one below the other for `experts`; None where their formats do not go together, or columns are sorted.

    Tiles of 128 x 128 become 128 numbers of a row that share a scale: so each expert may have any number of rows. A scale of all
    activations is left out.
    """
    return _joined([_by_rows(part) for part in parts], tiles=False)


def joined(parts: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """Joins the parts of the shared network's weight, for `rooftile.linear`; None where they do not go together."""
    found = _joined(parts, tiles=all(part.shape[0] % TILE == 0 for part in parts[:-1]))
    scales = [part.input_scale for part in parts if part.input_scale is not None]
    if found is None or not scales:
        return found
    return replace(found, input_scale=torch.stack([x.reshape(()) for x in scales]).amax()) if len(scales) == len(parts) else None


def _joined(parts: Sequence[QuantisedWeight], *, tiles: bool) -> QuantisedWeight | None:
    first = parts[0]
    for part in parts:
        kinds = [(x.format, x.group, x.shape[1], x.scales.dtype, x.zeros is None) for x in (part, first)]
        if kinds[0] != kinds[1] or part.order is not None or (part.format == "fp8_tile" and not tiles):
            return None
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    outer = None
    if first.outer is not None:
        outer = torch.cat([part.outer.expand(part.shape[0], 1) for part in parts if part.outer is not None])
    shape = (len(codes), first.shape[1])
    return QuantisedWeight(codes, scales, zeros, None, first.format, first.group, shape, outer)


def _by_rows(weight: QuantisedWeight) -> QuantisedWeight:
    """A weight with scales for its rows, if whole groups of 128 share them."""
    N, K = weight.shape
    if weight.format != "fp8_tile" or K % TILE:
        return weight
    scales = weight.scales.float().repeat_interleave(TILE, 0)[:N]
    return QuantisedWeight(weight.codes, scales, None, None, "fp8", TILE, (N, K))
