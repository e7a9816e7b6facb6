"""Native Sparse Attention of one query per sequence, from a paged cache.

    compressed key i = phi(k[i s : i s + l])     kept with the block of the cache that has its last token, e = i s + l - 1,
                                                 in row (e % size) / s; so row r of a sequence, counted through its blocks, has
                                                 i = r - (l / s - 1), and is complete iff r s + s - 1 <= t

The near branch is the exact kernel for paged decoding under a window. The others gather: the compressed keys of a sequence,
and the tokens of the blocks that it chooses. A kernel would do both in place.

Yuan et al., Native Sparse Attention, arXiv:2502.11089.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.chosen.arguments import as_given
from rooftile.approximate.chosen.selection import choose_from, scores_of_blocks
from rooftile.approximate.paged.pieces import in_pieces
from rooftile.reference.approximate import pairs

Pair = tuple[Tensor, Tensor]


def decode(q: Tensor, compressed: Pair, selected: Pair, table: Tensor, lengths: Tensor, **sizes: Any) -> tuple[Tensor, Tensor]:
    """The compressed and the selected branch of one query per sequence.

    Args:
        q: queries (B, H, D), each the last token of its sequence.
        compressed: keys (P, size / stride, Hk, D) and values (P, size / stride, Hk, Dv), by blocks of the cache.
        selected: keys (P, size, Hk, D) and values (P, size, Hk, Dv).
        table: block tables (B, N).
        lengths: tokens of each sequence, (B,).
        sizes: length, stride, block, count, first, local, scale, as in `rooftile.approximate.native_sparse`.

    Returns:
        The outputs of both branches, (B, H, Dv).
    """
    rows, Hk, D = compressed[0].shape[1:]
    scores = table.shape[1] * rows * (q.shape[1] + Hk * D)
    tokens = min(sizes["count"] * sizes["block"], table.shape[1] * selected[0].shape[1]) * Hk * D
    found = [
        _decode(q[part], compressed, selected, table[part], lengths[part].long(), **sizes)
        for part in in_pieces(q.shape[0], 4 * max(scores, tokens))
    ]
    one, other = zip(*found, strict=True)
    return torch.cat(one), torch.cat(other)


def _decode(
    q: Tensor, compressed: Pair, selected: Pair, table: Tensor, lengths: Tensor, *, length: int, stride: int, block: int,
    count: int, first: int, local: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    size, Hk = selected[0].shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    # entries past the end of a sequence may name no block
    there = torch.arange(table.shape[1], device=q.device) * size < lengths[:, None]
    table = torch.where(there, table, 0).long()
    heads = q.unflatten(1, (Hk, -1)).to(wide)  # (B, Hk, G, D)
    skip = length // stride - 1
    kc, vc = (x[table].flatten(1, 2)[:, skip:].to(wide) for x in compressed)  # (B, n, Hk, D)
    with as_given(q):
        x = torch.einsum("bhgd,bnhd->bhgn", heads, kc) * scale
        ends = torch.arange(kc.shape[1], device=q.device) * stride + length - 1
        seen = ends < lengths[:, None]
        p = pairs.softmax(x.masked_fill(~seen[:, None, None], -math.inf))[0]
        o_compressed = torch.einsum("bhgn,bnhd->bhgd", p, torch.where(seen[..., None, None], vc, 0.0))
        blocks = -(-table.shape[1] * size // block)
        score = scores_of_blocks(p.flatten(1, 2)[:, :, None], blocks, q.shape[1] // Hk, length, stride, block)
        own = ((lengths - 1).clamp(min=0) // block)[:, None, None, None]
        chosen = choose_from(score, own, count, first, local)[:, 0]  # (B, Hk, count)
        o_selected = _selected(heads, selected, table, lengths, chosen, block, scale)
    return o_compressed.flatten(1, 2).to(q.dtype), o_selected.flatten(1, 2).to(q.dtype)


def _selected(
    q: Tensor, selected: Pair, table: Tensor, lengths: Tensor, chosen: Tensor, block: int, scale: float
) -> Tensor:  # fmt: skip
    """Attention of q (B, Hk, G, D) to the tokens of chosen blocks (B, Hk, count), -1 for none."""
    size, Hk = selected[0].shape[1:3]
    j = chosen[..., None].long() * block + torch.arange(block, device=q.device)
    seen = ((chosen[..., None] >= 0) & (j < lengths[:, None, None, None])).flatten(2)  # (B, Hk, J)
    j = torch.where(seen, j.flatten(2), 0)
    pages = table.gather(1, (j // size).flatten(1)).view(j.shape)
    head = torch.arange(Hk, device=q.device)[:, None]
    k, v = (x[pages, j % size, head].to(q.dtype) for x in selected)  # (B, Hk, J, D)
    x = torch.einsum("bhgd,bhjd->bhgj", q, k) * scale
    p = pairs.softmax(x.masked_fill(~seen[:, :, None], -math.inf))[0]
    return torch.einsum("bhgj,bhjd->bhgd", p, torch.where(seen[..., None], v, 0.0))
