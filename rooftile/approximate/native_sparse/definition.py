"""The definition of Native Sparse Attention, with blocks of l tokens every s for compression, and of l' for selection.

    compressed key i = phi(k[i s : i s + l] + places)                      t sees i iff i s + l - 1 <= t
    p = softmax(scale q_t K_compressed^T)                                  per head
    score of block j = sum over a < l'/s, b < l/s of p[(l'/s) j + a - b]   summed over the heads of a group
    chosen: the first blocks, the own one and those before it, and the best of the others: `count` in all
    o_t = g_compressed o_compressed + g_selected o_selected + g_near o_near

Selection sees the tokens j <= t of the chosen blocks, the third branch the last `window` keys, itself among them. There are three
softmaxes, not one: the gates weigh their outputs. Each branch has keys and values of its own. The paper counts the compressed
keys of a block's score from 1.

Yuan et al., Native Sparse Attention, arXiv:2502.11089, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooftile.exact.reference import pairs


def compress(x: Tensor, phi: Callable[[Tensor], Tensor], places: Tensor | None, length: int, stride: int) -> Tensor:
    """Compressed keys or values (B, n, Hk, D') of x (B, S, Hk, D), n = (S - l) // s + 1; phi maps (..., l, D) to (..., D')."""
    n = max((x.shape[1] - length) // stride + 1, 0)
    blocks = [x[:, i * stride : i * stride + length].transpose(1, 2) for i in range(n)]  # (B, Hk, l, D)
    # a block of zeros gives phi's shape and dtype where there is no block
    whole = torch.stack(blocks, 1) if n else x.new_zeros(x.shape[0], 0, x.shape[2], length, x.shape[3])
    return phi(whole if places is None else whole + places.to(x.dtype))


def sees_compressed(T: int, S: int, n: int, length: int, stride: int, device: torch.device | None = None) -> Tensor:
    """The pairs of queries and compressed keys, (T, n)."""
    i = torch.arange(n, device=device)[None]
    return i * stride + length - 1 <= pairs.positions(T, S, device)[0]


def weights(q: Tensor, kc: Tensor, seen: Tensor, scale: float) -> Tensor:
    """p (B, H, T, n): the softmax of the compressed branch, in fp32 at least; 0 for a query that sees nothing."""
    wide = torch.promote_types(q.dtype, torch.float32)
    kc = kc.repeat_interleave(q.shape[2] // kc.shape[2], dim=2)
    x = torch.einsum("bthd,bnhd->bhtn", q.to(wide), kc.to(wide)) * scale
    return pairs.softmax(x.masked_fill(~seen, -torch.inf))[0]


def block_scores(p: Tensor, blocks: int, group: int, length: int, stride: int, block_size: int) -> Tensor:
    """The scores (B, T, Hk, blocks) of blocks from the weights p (B, H, T, n) of compressed keys."""
    n, ratio = p.shape[-1], block_size // stride
    score = p.new_zeros(*p.shape[:-1], blocks)
    for j in range(blocks):
        for a in range(ratio):
            for b in range(length // stride):
                i = ratio * j + a - b
                if 0 <= i < n:
                    score[..., j] += p[..., i]
    return score.unflatten(1, (-1, group)).sum(2).transpose(1, 2)


def choose(score: Tensor, S: int, block_size: int, count: int, first: int, local: int) -> Tensor:
    """The blocks (B, T, Hk, count) of each query, rising, then -1; from scores (B, T, Hk, blocks). Ties go to the lower block."""
    T, blocks = score.shape[1], score.shape[-1]
    j = torch.arange(blocks, device=score.device)
    own = pairs.positions(T, S, score.device)[0] // block_size  # (T, 1)
    always = (j < first) | (j > own - local)
    score = score.masked_fill(always[:, None], torch.inf).masked_fill((j > own)[:, None], -torch.inf)
    best = pairs.first_by_score(score, count)
    best = torch.where(score.gather(-1, best) == -torch.inf, blocks, best)
    best = torch.nn.functional.pad(best, (0, count - best.shape[-1]), value=blocks).sort(dim=-1).values
    return torch.where(best == blocks, -1, best).int()


def sees_selected(chosen: Tensor, S: int, block_size: int, group: int) -> Tensor:
    """The pairs of queries and tokens, (B, H, T, S), of chosen blocks (B, T, Hk, n), -1 for none."""
    i, j = pairs.positions(chosen.shape[1], S, chosen.device)
    seen = (chosen[..., None] == j[0] // block_size).any(-2)  # (B, T, Hk, S)
    return seen.transpose(1, 2).repeat_interleave(group, dim=1) & (j <= i)


def sees_near(T: int, S: int, window: int, device: torch.device | None = None) -> Tensor:
    """The pairs of the third branch, (T, S)."""
    i, j = pairs.positions(T, S, device)
    return (j <= i) & (i - j < window)


def native_sparse(
    q: Tensor,  # (B, T, H, D)
    compressed: tuple[Tensor, Tensor],  # (B, n, Hk, D), (B, n, Hk, Dv)
    selected: tuple[Tensor, Tensor],  # (B, S, Hk, D), (B, S, Hk, Dv)
    near: tuple[Tensor, Tensor],  # the same
    gates: Tensor,  # (B, T, H, 3)
    chosen: Tensor,  # (B, T, Hk, n)
    *,
    length: int,
    stride: int,
    block_size: int,
    window: int,
    scale: float,
) -> Tensor:
    """Returns o (B, T, H, Dv) in the dtype of the inputs."""
    (T, H), (S, Hk), n = q.shape[1:3], selected[0].shape[1:3], compressed[0].shape[1]
    branches = (
        (compressed, sees_compressed(T, S, n, length, stride, q.device)),
        (selected, sees_selected(chosen, S, block_size, H // Hk)),
        (near, sees_near(T, S, window, q.device)),
    )
    outs = [pairs.attention(q, k, v, seen, scale=scale)[0] for (k, v), seen in branches]
    return (torch.stack(outs, -1) * gates[..., None, :].to(q.dtype)).sum(-1)
