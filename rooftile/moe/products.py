"""Products of sorted rows with the weight of each row's expert, and the gradients of those weights.

On a CPU the counts are at hand, and each expert with rows is a product. On a GPU the host does not read them: there PyTorch's
grouped product takes bf16 on Hopper and Blackwell, and elsewhere rows are laid out in tiles of one expert each, of which there
are at most N K / ROWS + E. Where bits may not depend on neighbours, every row is part of a tile of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.fused.linear import ROWS, linear_as_defined
from rooftile.moe.quantised import rows_in, weight_of
from rooftile.moe.sorting import Sorted
from rooftile.runtime.devices import arch
from rooftile.weights import QuantisedWeight
from rooftile.weights import multiply as multiply_quantised

# tiles of one product of a batch: their weights are copied
BATCH = 16


def multiply(
    x: Tensor, weight: Tensor | QuantisedWeight, bias: Tensor | None, rows: Sorted, deterministic: bool
) -> Tensor:  # fmt: skip
    """x (N K, in) times each row's weight transposed, of (E, out, in), plus bias (E, out): (N K, out)."""
    if x.device.type == "cpu":
        return _by_expert(x, weight, bias, rows, deterministic)
    plain = weight if isinstance(weight, Tensor) else weight.dequantise(x.dtype).unflatten(0, (rows.bounds.shape[0] - 1, -1))
    y = grouped(x, plain, rows) if not deterministic and _has_grouped(x, plain) else by_tiles(x, plain, rows)
    return y if bias is None else y + bias[rows.experts.long()]


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, rows: Sorted) -> Tensor:
    """The gradient (E, out, in) of a weight; 0 for experts without rows."""
    if x.device.type == "cpu":
        found = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        for e, part in _parts(rows):
            torch.mm(dy[part].mT, x[part], out=found[e])
        return found
    return (grouped_gradient if _has_grouped(x, weight) else gradient_by_tiles)(dy, x, weight, rows)


def bias_gradient(dy: Tensor, bias: Tensor, rows: Sorted) -> Tensor:
    """The gradient (E, out) of a bias: the sum of each expert's rows."""
    if dy.device.type != "cpu":
        return sums_of_tiles(dy, bias, rows)
    found = torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    for e, part in _parts(rows):
        found[e] = dy[part].sum(0)
    return found


def one_weight(
    x: Tensor, weight: Tensor | QuantisedWeight, deterministic: bool, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x (N, in) times a weight (out, in) transposed, which all rows share, plus a bias (out,)."""
    if isinstance(weight, QuantisedWeight):
        return multiply_quantised(x, weight, bias, out_dtype=x.dtype, deterministic=deterministic, backend="")
    return linear_as_defined(x, weight, bias) if deterministic and x.shape[0] else functional.linear(x, weight, bias)


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor, deterministic: bool) -> Tensor:
    """A function of each number of x (N, in); row by row on a CPU if bits may not depend on neighbours.

    A CPU computes an exponential in vectors, and what is left at the end of a tensor in another way.
    """
    if deterministic and x.shape[0] and x.device.type == "cpu":
        return torch.cat([function(row) for row in x.split(1)])
    return function(x)


def _has_grouped(x: Tensor, weight: Tensor) -> bool:
    aligned = all(size % 8 == 0 for size in (x.shape[1], *weight.shape[1:]))
    return x.dtype == torch.bfloat16 and aligned and arch(x.device) in ("sm90", "sm100") and hasattr(torch, "_grouped_mm")


def _parts(rows: Sorted) -> Iterator[tuple[int, slice]]:
    """Yields each expert that has rows, and their places; for rows on the host."""
    for e, (start, end) in enumerate(pairwise(rows.bounds.tolist())):
        if start < end:
            yield e, slice(start, end)


def _by_expert(
    x: Tensor, weight: Tensor | QuantisedWeight, bias: Tensor | None, rows: Sorted, deterministic: bool
) -> Tensor:  # fmt: skip
    product, E = linear_as_defined if deterministic else functional.linear, rows.bounds.shape[0] - 1
    # zeros for rows of no expert here
    y = x.new_zeros((x.shape[0], rows_in(weight, E)))
    for e, part in _parts(rows):
        y[part] = product(x[part], weight_of(weight, e, E, x.dtype), None if bias is None else bias[e])
    return y


def grouped(x: Tensor, weight: Tensor, rows: Sorted) -> Tensor:
    """`multiply` without a bias, by PyTorch's grouped product."""
    return torch._grouped_mm(x, weight.mT, offs=rows.ends)


def grouped_gradient(dy: Tensor, x: Tensor, weight: Tensor, rows: Sorted) -> Tensor:
    """`weight_gradient` by PyTorch's grouped product, which promises nothing for an expert without rows."""
    found = torch._grouped_mm(dy.mT, x, offs=rows.ends)
    counts = rows.ends.diff(prepend=rows.ends.new_zeros(1))
    return torch.where(counts[:, None, None] > 0, found, 0)


def laid_out(x: Tensor, rows: Sorted, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in tiles of one expert each: tiles (n, ROWS, in) filled up with zeros, the place of each row, each tile's expert."""
    starts = torch.cat((rows.ends.new_zeros(1), rows.ends[:-1]))
    ends = (-(-(rows.ends - starts) // ROWS)).cumsum(0)
    first = torch.cat((ends.new_zeros(1), ends[:-1]))
    of = rows.experts.long()
    places = first[of] * ROWS + torch.arange(x.shape[0], device=x.device) - starts[of]
    n = x.shape[0] // ROWS + min(count, x.shape[0])
    tiles = x.new_zeros((n * ROWS, x.shape[1])).index_copy_(0, places, x)
    # tiles behind the last one are empty, whatever their weight
    expert = torch.searchsorted(ends, torch.arange(n, device=x.device), right=True).clamp(max=count - 1)
    return tiles.unflatten(0, (n, ROWS)), places, expert


def by_tiles(x: Tensor, weight: Tensor, rows: Sorted) -> Tensor:
    """`multiply` without a bias and without a count, in products of BATCH tiles."""
    tiles, places, expert = laid_out(x, rows, weight.shape[0])
    short = -tiles.shape[0] % BATCH
    tiles, expert = functional.pad(tiles, (0, 0, 0, 0, 0, short)), functional.pad(expert, (0, short))
    parts = [torch.bmm(part, weight[e].mT) for part, e in zip(tiles.split(BATCH), expert.split(BATCH), strict=True)]
    return torch.cat(parts).flatten(0, 1)[places]


def gradient_by_tiles(dy: Tensor, x: Tensor, weight: Tensor, rows: Sorted) -> Tensor:
    """`weight_gradient` without a count, tile by tile: so every sum has one order."""
    found = torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
    tiles_dy, _, expert = laid_out(dy, rows, weight.shape[0])
    tiles_x, _, _ = laid_out(x, rows, weight.shape[0])
    for n in range(len(expert)):
        found.index_add_(0, expert[n : n + 1], (tiles_dy[n].mT @ tiles_x[n])[None].to(found.dtype))
    return found.to(weight.dtype)


def sums_of_tiles(dy: Tensor, bias: Tensor, rows: Sorted) -> Tensor:
    """`bias_gradient` without a count: a product with the places of each expert's tiles, so that every sum has one order."""
    tiles, _, expert = laid_out(dy, rows, bias.shape[0])
    sums = tiles.sum(1, dtype=torch.promote_types(dy.dtype, torch.float32))
    is_here = (expert[None] == torch.arange(bias.shape[0], device=dy.device)[:, None]).to(sums.dtype)
    return (is_here @ sums).to(bias.dtype)
