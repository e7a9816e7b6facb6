"""Native Sparse Attention of one query per sequence, from a paged cache.

    compressed key i = phi(k[i s : i s + l])     kept with the block of the cache that has its last token, e = i s + l - 1,
                                                 in row (e % size) / s; so row r of a sequence, counted through its blocks, has
                                                 i = r - (l / s - 1), and is complete iff r s + s - 1 <= t

On a GPU four kernels read compressed keys, chosen blocks and the window where they lie (`sparse_kernels`). The definition gathers
them, in pieces of the sequences.

Yuan et al., Native Sparse Attention, arXiv:2502.11089.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.chosen_arguments import as_given
from rooftile.approximate.gathered.pieces import in_pieces
from rooftile.approximate.native_sparse.selection import choose_from, scores_of_blocks
from rooftile.exact.reference import pairs
from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.operators import call, define

Pair = tuple[Tensor, Tensor]
# the order of the sizes in the operator
SIZES = ("length", "stride", "block_size", "count", "first", "local", "window")


def decode(
    q: Tensor, gates: Tensor, compressed: Pair, selected: Pair, near: Pair, table: Tensor, near_table: Tensor, lengths: Tensor, *,
    scale: float, **sizes: Any,
) -> Tensor:  # fmt: skip
    """Native Sparse Attention of one query per sequence.

    Args:
        q: queries (B, H, D), each the last token of its sequence.
        gates: (B, H, 3), of the branches in the order of the next three arguments.
        compressed: keys (P, size / stride, Hk, D) and values (P, size / stride, Hk, Dv), by blocks of the cache.
        selected: keys (P, size, Hk, D) and values (P, size, Hk, Dv).
        near: the same, in as many blocks or fewer.
        table: block tables (B, N) of the compressed and the selected keys, int32.
        near_table: block tables (B, N) of the near keys. Entries behind a sequence's window are not read.
        lengths: tokens of each sequence, (B,) int32.
        scale: of the scores.
        sizes: length, stride, block_size, count, first, local and window, as in `rooftile.approximate.native_sparse`.

    Returns:
        o (B, H, Dv).
    """
    numbers = [sizes[name] for name in SIZES]
    found: Tensor = call(
        _NATIVE_SPARSE_DECODE, _run, q, gates, [*compressed, *selected, *near], table, near_table, lengths, numbers, scale
    )
    return found


def _run(
    q: Tensor, gates: Tensor, cache: list[Tensor], table: Tensor, near_table: Tensor, lengths: Tensor, numbers: list[int],
    scale: float,
) -> Tensor:  # fmt: skip
    sizes = dict(zip(SIZES, numbers, strict=True))
    if runs_kernels(q):
        from rooftile.approximate.native_sparse import decoding_kernels as sparse_kernels

        if sparse_kernels.refusal(q, cache[1].shape[2], cache[1].shape[3], sizes) is None:
            return sparse_kernels.decode(q, gates, cache, table, near_table, lengths, scale=scale, **sizes)
    return decode_as_defined(q, gates, cache, table, near_table, lengths, scale=scale, **sizes)


@torch.no_grad()
def decode_as_defined(
    q: Tensor, gates: Tensor, cache: list[Tensor], table: Tensor, near_table: Tensor, lengths: Tensor, *, window: int,
    scale: float, **sizes: Any,
) -> Tensor:  # fmt: skip
    """Computes `decode` in plain operations."""
    compressed, selected, near = cache[:2], cache[2:4], cache[4:]
    rows, Hk, D = compressed[0].shape[1:]
    scores = table.shape[1] * rows * (q.shape[1] + Hk * D)
    tokens = min(max(sizes["count"] * sizes["block_size"], window), table.shape[1] * selected[0].shape[1]) * Hk * D
    found = []
    for part in in_pieces(q.shape[0], 4 * max(scores, tokens)):
        known = q[part], lengths[part].long()
        branches = [*_decode(known[0], compressed, selected, table[part], known[1], scale=scale, **sizes)]
        branches.append(_near(known[0], near, near_table[part], known[1], window, scale))
        wide = torch.stack(branches, dim=-1)  # (B, H, Dv, 3)
        found.append((wide * gates[part, :, None].to(wide.dtype)).sum(-1).to(q.dtype))
    return torch.cat(found) if found else q.new_zeros(0, q.shape[1], selected[1].shape[3])


def _decode(
    q: Tensor, compressed: list[Tensor], selected: list[Tensor], table: Tensor, lengths: Tensor, *, length: int, stride: int,
    block_size: int, count: int, first: int, local: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The compressed and the selected branch, (B, H, Dv) in fp32 at least."""
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
        blocks = -(-table.shape[1] * size // block_size)
        score = scores_of_blocks(p.flatten(1, 2)[:, :, None], blocks, q.shape[1] // Hk, length, stride, block_size)
        own = ((lengths - 1).clamp(min=0) // block_size)[:, None, None, None]
        chosen = choose_from(score, own, count, first, local)[:, 0]  # (B, Hk, count)
        j = chosen[..., None].long() * block_size + torch.arange(block_size, device=q.device)
        seen = (chosen[..., None] >= 0) & (j < lengths[:, None, None, None])
        o_selected = _attend(heads, selected, table, j.flatten(2), seen.flatten(2), scale)
    return o_compressed.flatten(1, 2), o_selected.flatten(1, 2)


def _near(q: Tensor, near: list[Tensor], table: Tensor, lengths: Tensor, window: int, scale: float) -> Tensor:
    """The near branch, (B, H, Dv) in fp32 at least."""
    Hk = near[0].shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    width = min(window, table.shape[1] * near[0].shape[1])
    j = (lengths[:, None] - width + torch.arange(width, device=q.device))[:, None].expand(-1, Hk, -1)
    with as_given(q):
        return _attend(q.unflatten(1, (Hk, -1)).to(wide), near, table, j, j >= 0, scale).flatten(1, 2)


def _attend(q: Tensor, cache: list[Tensor], table: Tensor, j: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attention of q (B, Hk, G, D) to the tokens at positions j (B, Hk, J) that are seen; no other entry of a table is used."""
    size, Hk = cache[0].shape[1:3]
    j = torch.where(seen, j, 0)
    pages = torch.where(seen, table.gather(1, (j // size).flatten(1)).view(j.shape), 0).long()
    head = torch.arange(Hk, device=q.device)[:, None]
    k, v = (x[pages, j % size, head].to(q.dtype) for x in cache)  # (B, Hk, J, D)
    x = torch.einsum("bhgd,bhjd->bhgj", q, k) * scale
    p = pairs.softmax(x.masked_fill(~seen[:, :, None], -math.inf))[0]
    return torch.einsum("bhgj,bhjd->bhgd", p, torch.where(seen[..., None], v, 0.0))


_NATIVE_SPARSE_DECODE = define(
    "native_sparse_decode(Tensor q, Tensor gates, Tensor[] cache, Tensor table, Tensor near_table, Tensor lengths, int[] sizes, "
    "float scale) -> Tensor",
    _run,
    lambda q, gates, cache, *others: q.new_empty(*q.shape[:2], cache[1].shape[3]),
)
