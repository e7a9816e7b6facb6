"""The choice of blocks of tokens by the weights of compressed keys, and attention to chosen blocks.

Yuan et al., Native Sparse Attention, arXiv:2502.11089.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rooftile.approximate.arguments import check_count, check_flag, check_qkv, check_scale
from rooftile.approximate.chosen.arguments import as_given, check_indices, check_range, check_way
from rooftile.approximate.chosen.compression import check_compressed, check_lengths
from rooftile.approximate.chosen.pairs import attend, best, cleaned, take, take_flags
from rooftile.errors import InvalidInput
from rooftile.operators import transformed, wants_grad
from rooftile.reference.approximate import native_sparse as definition
from rooftile.reference.approximate import pairs
from rooftile.words import answers_foreign_words

# bytes of what a piece of the queries may gather, or of its scores
PIECE = 2**24


@answers_foreign_words
def choose_blocks(
    q: Tensor,  # (B, T, H, D)
    compressed: Tensor,  # (B, n, Hk, D)
    *,
    backend: str | None = None,
    block: int = 64,
    count: int = 16,
    first: int = 1,
    length: int = 32,
    local: int = 2,
    return_scores: bool = False,
    scale: float | None = None,
    stride: int = 16,
    tokens: int | None = None,
) -> Any:
    """The blocks of tokens that each query of a group of heads selects, by the weights of the compressed keys.

    A block's score is the sum of the softmax weights of the compressed keys that overlap with it, by how much they do, over the
    heads of the group. The first blocks, the own one and those before it are always chosen and count among `count`. Scores are
    computed in fp32, in pieces of the queries, and ties go to the lower block.

    Args:
        q: queries (B, T, H, D), the last T tokens of the text.
        compressed: compressed keys (B, n, Hk, D), from `compress`.
        backend: "eager" is the definition, which holds all scores at once; None or "auto" computes in pieces.
        block: tokens per selected block, a multiple of stride.
        count: blocks per query, at least first + local.
        first: blocks at the beginning of the text that are always chosen.
        length, stride: those of the compression.
        local: the own block and those before it, so many in all, that are always chosen.
        return_scores: return (chosen, scores) with the scores (B, T, Hk, blocks), fp32, before anything is always chosen.
        scale: of the compressed scores; 1 / sqrt(D) if None.
        tokens: the length S of the text; T if None.

    Returns:
        (B, T, Hk, count) int32, rising, then -1 where a query has fewer blocks. Nothing has a gradient.

    Example:
        >>> q, k = torch.randn(1, 256, 8, 64), torch.randn(1, 256, 2, 64)
        >>> choose_blocks(q, compress(k), count=4).shape
        torch.Size([1, 256, 2, 4])
    """
    q, compressed, _, _ = check_qkv(q, compressed, compressed)
    length, stride, block = check_lengths(length, stride, block)
    count, first, local = check_counts(count, first, local)
    S = q.shape[1] if tokens is None else check_count("tokens", tokens, 0)
    check_compressed(compressed, S, length, stride)
    scale, eager = check_scale(scale, q.shape[-1]), check_way(backend, None, 1.0) is None
    (B, T, H, _), Hk = q.shape, compressed.shape[2]
    blocks, group = -(-S // block), H // Hk
    seen = definition.sees_compressed(T, S, compressed.shape[1], length, stride, q.device)
    found, scores = [], []
    rows = max(T, 1) if eager else max(PIECE // max(4 * B * H * compressed.shape[1], 1), 1)
    with torch.no_grad(), as_given(q):
        for t in range(0, max(T, 1), rows):
            p = definition.weights(q[:, t : t + rows], compressed, seen[t : t + rows], scale)
            if eager:
                score = definition.block_scores(p, blocks, group, length, stride, block)
                found.append(definition.choose(score, S, block, count, first, local))
            else:
                score = _block_scores(p, blocks, group, length, stride, block)
                found.append(_choose(score, t + S - T, block, count, first, local))
            scores.append(score)
    chosen = torch.cat(found, 1)
    return (chosen, torch.cat(scores, 1)) if check_flag("return_scores", return_scores) else chosen


def _block_scores(p: Tensor, blocks: int, group: int, length: int, stride: int, block: int) -> Tensor:
    """Scores (B, T, Hk, blocks) from weights p (B, H, T, n): a convolution with the overlaps, in units of stride."""
    p = p.unflatten(1, (-1, group)).sum(2).transpose(1, 2)  # (B, T, Hk, n)
    ratio, back = block // stride, length // stride - 1
    # compressed key ratio j + d overlaps with block j by so many strides
    overlaps = torch.ones(ratio, dtype=p.dtype, device=p.device)
    overlaps = torch.nn.functional.pad(overlaps, (back, back)).unfold(0, back + 1, 1).sum(-1)
    need = ratio * blocks + back
    p = torch.nn.functional.pad(p, (back, max(need - back - p.shape[-1], 0)))[..., :need]
    if not blocks:
        return p.new_zeros(*p.shape[:-1], 0)
    return (p.unfold(-1, ratio + back, ratio) * overlaps).sum(-1)


def _choose(score: Tensor, start: int, block: int, count: int, first: int, local: int) -> Tensor:
    """The definition's choice for queries that begin at a place."""
    T, blocks = score.shape[1], score.shape[-1]
    j = torch.arange(blocks, device=score.device)
    own = (torch.arange(T, device=score.device) + start).div(block, rounding_mode="floor")[:, None, None]  # (T, 1, 1)
    score = score.masked_fill((j < first) | (j > own - local), torch.inf).masked_fill(j > own, -torch.inf)
    found = best(score, count)
    # none is the largest index, so that it is sorted to the end
    found = torch.where(score.gather(-1, found) == -torch.inf, blocks, found)
    found = torch.nn.functional.pad(found, (0, count - found.shape[-1]), value=blocks).sort(dim=-1).values
    return torch.where(found == blocks, -1, found).int()


@answers_foreign_words
def selected_attention(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    chosen: Tensor,  # (B, T, Hk, n)
    *,
    backend: str | None = None,
    block: int = 64,
    deterministic: bool | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of each query to the tokens of its chosen blocks, which the heads of a group share.

    Args:
        q: queries (B, T, H, D), the last T tokens of the text.
        k: keys (B, S, Hk, D).
        v: values (B, S, Hk, Dv).
        chosen: blocks (B, T, Hk, n) int32, in any order, -1 for none; a constant in the backward. One that is there twice counts
            once.
        backend: "eager" is the definition; another name is that of the exact kernels (`rooftile.attention`); None or "auto" takes
            the fastest that runs.
        block: tokens per block; the last one may be short.
        deterministic: as in `rooftile.attention`.
        scale: of the scores; 1 / sqrt(D) if None.

    Returns:
        o (B, T, H, Dv), contiguous, in the dtype of q; 0 for a query without blocks.

    With all blocks chosen this is causal attention, and with the own block alone attention under CAUSAL & Chunk(block): known
    answers of the tests.

    Example:
        >>> q, k, v = (torch.randn(1, 256, 8, 64) for _ in range(3))
        >>> selected_attention(q, k, v, choose_blocks(q, compress(k), count=4)).shape
        torch.Size([1, 256, 8, 64])
    """
    q, k, v, _ = check_qkv(q, k, v)
    block, scale = check_count("block", block), check_scale(scale, q.shape[-1])
    options = check_way(backend, deterministic, scale)
    (B, T, H, _), (S, Hk) = q.shape, k.shape[1:3]
    chosen = check_indices("chosen", chosen, (B, T, Hk, None), f"(B, T, Hk, n) = ({B}, {T}, {Hk}, n)", q)
    check_range("chosen", chosen, max(-(-S // block), 0), -1)
    with as_given(q):
        if options is None:
            seen = definition.sees_selected(chosen, S, block, H // Hk)
            return pairs.attention(q, k, v, seen, scale=scale)[0].contiguous()
        if S == 0 or T == 0:
            return q.new_zeros(B, T, H, v.shape[-1]) + q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
        (q, lost_q), (k, lost_k), (v, lost_v) = cleaned(q), cleaned(k.contiguous()), cleaned(v.contiguous())
        lost = lost_k | lost_v
        most = PIECE * (64 if q.is_cuda else 1)
        rows = max(most // max(B * Hk * chosen.shape[-1] * block * (k.shape[-1] + v.shape[-1]) * 4, 1), 1)
        recompute = rows < T and wants_grad(q, k, v) and not transformed() and not torch.compiler.is_compiling()
        # what a piece gathers is gathered again in the backward, and not kept
        run = partial(checkpoint, _piece, use_reentrant=False, preserve_rng_state=False) if recompute else _piece
        starts = range(0, T, rows)
        # fmt: off
        return torch.cat(
            [run((q[:, t : t + rows], lost_q[:, t : t + rows]), (k, v, lost), chosen[:, t : t + rows], t + S - T, block, options)
             for t in starts], 1
        )
        # fmt: on


def _piece(
    queries: tuple[Tensor, ...], tokens: tuple[Tensor, ...], chosen: Tensor, start: int, block: int, options: dict[str, Any]
) -> Tensor:
    """Selected attention of queries that begin at a place: each is a batch of one, with its group's heads and its own keys."""
    (q, lost_q), (k, v, lost_k) = queries, tokens
    (B, T, H, _), (S, Hk) = q.shape, k.shape[1:3]
    chosen = chosen.transpose(1, 2).long()  # (B, Hk, T, n)
    n = chosen.shape[-1]
    twice = (chosen[..., :, None] == chosen[..., None, :]) & torch.ones(n, n, device=q.device).tril(-1).bool()
    chosen = chosen.masked_fill(twice.any(-1), -1)
    places = chosen.clamp(min=0)[..., None] * block + torch.arange(block, device=q.device)  # (B, Hk, T, n, block)
    own = torch.arange(T, device=q.device)[:, None, None] + start
    seen = ((chosen >= 0)[..., None] & (places <= own)).flatten(3)  # (B, Hk, T, n block)
    places = places.clamp(max=S - 1).flatten(3)
    keys, values = (take(x, places).flatten(0, 2).unsqueeze(2) for x in (k, v))  # (B Hk T, n block, 1, D)
    q, lost_q = (x.unflatten(2, (Hk, -1)).transpose(1, 2).flatten(0, 2).unsqueeze(1) for x in (q, lost_q))
    lost_k = take_flags(lost_k, places).flatten(0, 2)
    o, _ = attend(q, keys, values, seen.flatten(0, 2)[:, None], lost_q, lost_k, **options)
    return o.view(B, Hk, T, H // Hk, o.shape[-1]).transpose(1, 2).flatten(2, 3)


def check_counts(count: Any, first: Any, local: Any) -> tuple[int, int, int]:
    """How many blocks are chosen, and how many always."""
    count, first, local = check_count("count", count), check_count("first", first, 0), check_count("local", local, 0)
    if count < first + local:
        raise InvalidInput(f"count is {count}; first + local is {first + local}, and count must be at least that")
    return count, first, local
