"""The work that lists leave of a call: lists of blocks, of chosen blocks, and of gathered rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.exact.spec import Problem, option_names


def share(problem: Problem, options: list[Tensor]) -> float:
    """The share of the mask's pairs that lists of blocks leave at most: the lists are read, and every listed block is whole."""
    if problem.spec.block_size is None:
        return 1.0
    counts = dict(zip(option_names(problem.spec), options, strict=True))["block_counts"]
    rows, keys = problem.spec.block_size
    batch = 1 if problem.spec.layout == "packed" else problem.sizes.B
    copies = batch // counts.shape[0] / counts.shape[1]
    pairs = problem.pairs
    return min(1.0, int(counts.sum()) * copies * rows * keys / pairs) if pairs else 0.0


def selected(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, cu_q: Tensor, cu_k: Tensor, block: int) -> int:
    """2 (D + Dv) for each token up to a query's position in the blocks that it chose, and each of its heads."""
    row = torch.arange(q.shape[0], device=q.device)
    of = (torch.searchsorted(cu_q, row, right=True) - 1).clamp(min=0)
    end = row - cu_q[of] + cu_k.diff()[of] - cu_q.diff()[of] + 1
    tokens = (end[:, None, None] - chosen * block).clamp(0, block).masked_fill(chosen < 0, 0)
    return 2 * (q.shape[-1] + v.shape[-1]) * int(tokens.sum()) * (q.shape[1] // k.shape[1])


def gathered(q: Tensor, v: Tensor, rows: Tensor, keys: Tensor, width: int, key_width: int, kind: str) -> int:
    """2 (D + Dv) for each pair of a group, and of a chunk and the one before: which of them are seen, a sort decides."""
    N, M = rows.shape[-1], keys.shape[-1]
    starts = range(0, N, width)
    sizes = [(min(width, N - n), min(key_width, max(M - n // width * key_width, 0))) for n in starts]
    pairs = sum(a * b for a, b in sizes)
    if kind.startswith("chunks") and len(sizes) > 1:
        pairs += sum(a * sizes[g - 1][1] for g, (a, _) in enumerate(sizes))
    elif kind.startswith("window"):
        pairs = N * min(width, N)
    return 2 * (q.shape[-1] + v.shape[-1]) * pairs * rows.shape[:-1].numel()
